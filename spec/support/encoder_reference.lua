-- The encoder of BERT in loops over numbers of one text, as the paper has it, from a model's state by name.

local reference = {}

local function rows_of(t) return t:to("float64"):totable() end

-- x W^T + b
local function linear(x, weight, bias)
    local y = {}
    for i, row in ipairs(x) do
        y[i] = {}
        for o, weights in ipairs(weight) do
            local sum = bias and bias[o] or 0
            for k, w in ipairs(weights) do sum = sum + w * row[k] end
            y[i][o] = sum
        end
    end
    return y
end
reference.linear = linear

function reference.norm(x, weight, bias, eps)
    local y = {}
    for i, row in ipairs(x) do
        local mean, square = 0, 0
        for _, v in ipairs(row) do mean = mean + v / #row end
        for _, v in ipairs(row) do square = square + (v - mean) ^ 2 / #row end
        y[i] = {}
        for k, v in ipairs(row) do
            y[i][k] = (v - mean) / math.sqrt(square + eps) * weight[k] + (bias and bias[k] or 0)
        end
    end
    return y
end

-- By its series, and where that loses digits by its continued fraction.
local function erf(x)
    local a = math.abs(x)
    if a > 3 then
        local f = 0
        for n = 60, 1, -1 do f = n / 2 / (a + f) end
        return (x < 0 and -1 or 1) * (1 - math.exp(-a * a) / math.sqrt(math.pi) / (a + f))
    end
    local sum, term = x, x
    for n = 1, 100 do
        term = -term * x * x / n
        sum = sum + term / (2 * n + 1)
    end
    return 2 / math.sqrt(math.pi) * sum
end

function reference.gelu(v) return 0.5 * v * (1 + erf(v / math.sqrt(2))) end

local function map(x, fn)
    local y = {}
    for i, row in ipairs(x) do
        y[i] = {}
        for k, v in ipairs(row) do y[i][k] = fn(v) end
    end
    return y
end
reference.map = map

local function add(a, b)
    local y = {}
    for i, row in ipairs(a) do
        y[i] = {}
        for k, v in ipairs(row) do y[i][k] = v + b[i][k] end
    end
    return y
end
reference.add = add

-- Of rows Q | K | V; turn(vector, position): rotates those of queries and keys; sees(i, j): whether i attends to j.
function reference.attention(qkv, heads, turn, sees)
    local width = #qkv[1] / 3
    local size, y = width / heads, {}
    local function part(i, which, head)
        local vector = {}
        for k = 1, size do vector[k] = qkv[i][which * width + (head - 1) * size + k] end
        return turn and which < 2 and turn(vector, i - 1) or vector
    end
    for i = 1, #qkv do
        y[i] = {}
        for head = 1, heads do
            local q, scores, sum = part(i, 0, head), {}, 0
            for j = 1, #qkv do
                local k, score = part(j, 1, head), 0
                for d = 1, size do score = score + q[d] * k[d] / math.sqrt(size) end
                scores[j] = (not sees or sees(i, j)) and math.exp(score) or 0
                sum = sum + scores[j]
            end
            for d = 1, size do
                local value = 0
                for j = 1, #qkv do value = value + scores[j] / sum * part(j, 2, head)[d] end
                y[i][(head - 1) * size + d] = value
            end
        end
    end
    return y
end

-- fn(name) is the state's tensor of that name as numbers.
function reference.state(model)
    local state = model:state_dict()
    return function(name) return state[name] and rows_of(state[name]) end
end

-- Hidden states of one text of a te.models.bert.
function reference.bert(model, ids, types)
    local of, c, x = reference.state(model), model.config, {}
    for i, id in ipairs(ids) do
        x[i] = {}
        for k = 1, c.n_embd do
            x[i][k] = of "wte.weight"[id + 1][k] + of "wpe.weight"[i][k]
                + (c.n_type > 0 and of "wtt.weight"[(types and types[i] or 0) + 1][k] or 0)
        end
    end
    local function norm(y, name) return reference.norm(y, of(name .. ".weight"), of(name .. ".bias"), c.norm_eps) end
    local function product(y, name) return linear(y, of(name .. ".weight"), of(name .. ".bias")) end
    x = norm(x, "norm")
    for layer = 1, c.n_layer do
        local block = ("blocks.%d."):format(layer)
        local attended = reference.attention(product(x, block .. "attention.1.qkv"), c.n_head)
        x = norm(add(x, product(attended, block .. "attention.1.proj")), block .. "attention_norm")
        local inner = map(product(x, block .. "mlp.1"), reference.gelu)
        x = norm(add(x, product(inner, block .. "mlp.3")), block .. "mlp_norm")
    end
    return x
end

-- Halves of a vector turned by an angle for each pair.
local function turn_by(base)
    return function(vector, position)
        local half, turned = #vector / 2, {}
        for k = 1, half do
            local angle = position * base ^ (-(k - 1) / half)
            local cos, sin = math.cos(angle), math.sin(angle)
            turned[k] = vector[k] * cos - vector[k + half] * sin
            turned[k + half] = vector[k + half] * cos + vector[k] * sin
        end
        return turned
    end
end

-- Hidden states of one text of a te.models.modernbert.
function reference.modernbert(model, ids)
    local of, c, x = reference.state(model), model.config, {}
    for i, id in ipairs(ids) do x[i] = of "wte.weight"[id + 1] end
    local function norm(y, name) return reference.norm(y, of(name .. ".weight"), nil, c.norm_eps) end
    x = norm(x, "norm")
    for layer = 1, c.n_layer do
        local block = ("blocks.%d."):format(layer)
        local full = (layer - 1) % c.full_every == 0
        local inner = layer > 1 and norm(x, block .. "attention.1") or x
        local attention = block .. (layer > 1 and "attention.2." or "attention.1.")
        local attended = reference.attention(linear(inner, of(attention .. "qkv.weight")), c.n_head,
            turn_by(full and c.rope_base or c.window_rope_base),
            not full and function(i, j) return math.abs(i - j) <= math.floor(c.window / 2) end or nil)
        x = add(x, linear(attended, of(attention .. "proj.weight")))
        local both, gated = linear(norm(x, block .. "mlp.1"), of(block .. "mlp.2.weight")), {}
        for i, row in ipairs(both) do
            gated[i] = {}
            for k = 1, c.n_inner do gated[i][k] = reference.gelu(row[k]) * row[c.n_inner + k] end
        end
        x = add(x, linear(gated, of(block .. "mlp.4.weight")))
    end
    return norm(x, "last_norm")
end

return reference
