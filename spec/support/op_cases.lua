--- Arguments for every operation, for specs that walk all of them. An operation whose tensors are all {3, 4} ({3, 8}
--- when gated) and that needs no attributes has no entry. `draw(shape)` gives numbers in the operation's domain.
--- `inputs` says which arguments take gradients, all tensors by default.

local te = require "te"

local function ids(values) return te.tensor(values, { dtype = "int64" }) end

-- Which of two experts see three tokens: two each.
local function mask() return te.gt(te.tensor { { 1, 0 }, { 1, 1 }, { 0, 1 } }, 0) end

local cases = {
    masked_fill = function(draw) return { draw { 3, 4 }, te.gt(draw { 3, 4 }, 0), -1 }, { 1 } end,
    where = function(draw) return { te.gt(draw { 3, 4 }, 0), draw { 3, 4 }, draw { 3, 4 } }, { 2, 3 } end,
    fill = function(draw) return { draw { 3, 4 }, 2 } end,
    clamp = function(draw) return { draw { 3, 4 }, -1, 1 } end,
    scaled_srelu = function(draw) return { draw { 3, 4 }, draw { 3 } } end,
    scaled_swiglu = function(draw) return { draw { 3, 8 }, draw { 3 } } end,
    scaled_clamped_swiglu = function(draw) return { draw { 3, 8 }, draw { 3 } } end,
    scaled_situglu = function(draw) return { draw { 3, 8 }, draw { 3 } } end,
    glu_deinterleave = function(draw) return { draw { 3, 8 }, 2 } end,
    layer_norm = function(draw) return { draw { 3, 4 }, draw { 4 }, draw { 4 } } end,
    rms_norm = function(draw) return { draw { 3, 4 }, draw { 4 } } end,
    cross_entropy = function(draw) return { draw { 3, 4 }, ids { 0, 3, 1 } }, { 1 } end,
    binary_cross_entropy_with_logits = function(draw)
        return { draw { 3, 4 }, te.sigmoid(draw { 3, 4 }), draw { 3, 1 }, draw { 4 } }
    end,
    scatter_add = function(draw)
        return { draw { 3, 4 }, 2, ids { { 0, 3 }, { 1, 1 }, { 2, 0 } }, draw { 3, 3 } }, { 1, 4 }
    end,
    index_copy = function(draw) return { draw { 3, 4 }, 1, ids { 2, 0 }, draw { 2, 4 } }, { 1, 4 } end,
    index_add = function(draw) return { draw { 3, 4 }, 1, ids { 2, 0, 2, 2 }, draw { 4, 4 } }, { 1, 4 } end,
    masked_select = function(draw) return { draw { 3, 4 }, te.gt(draw { 3, 4 }, 0) }, { 1 } end,
    flip = function(draw) return { draw { 3, 2, 4 }, { 1, 3 } } end,
    roll = function(draw) return { draw { 3, 4 }, { 1, -2 }, { 1, 2 } } end,
    pad = function(draw) return { draw { 3, 4 }, { 1, 2, -1, 1 }, 0.5 } end,
    view = function(draw) return { draw { 3, 4 }, { 2, 6 } } end,
    reshape = function(draw) return { draw { 3, 4 }, { 6, 2 } } end,
    unsqueeze = function(draw) return { draw { 3, 4 }, 2 } end,
    squeeze = function(draw) return { draw { 3, 1, 4 }, 2 } end,
    permute = function(draw) return { draw { 3, 2, 4 }, { 3, 1, 2 } } end,
    narrow = function(draw) return { draw { 3, 4 }, 2, 2, 2 } end,
    select = function(draw) return { draw { 3, 4 }, 1, -1 } end,
    expand = function(draw) return { draw { 3, 1, 4 }, { 3, 2, 4 } } end,
    embedding = function(draw) return { draw { 5, 4 }, ids { { 0, 4 }, { 2, 4 } } }, { 1 } end,
    gather = function(draw) return { draw { 3, 4 }, 2, ids { { 0, 3 }, { 1, 1 }, { 2, 0 } } }, { 1 } end,
    index_select = function(draw) return { draw { 3, 4 }, 1, ids { 2, 0, 2 } }, { 1 } end,
    cat = function(draw) return { { draw { 2, 4 }, draw { 1, 4 } }, 1 } end,
    stack = function(draw) return { { draw { 3, 4 }, draw { 3, 4 } }, 2 } end,
    topk = function(draw) return { draw { 3, 4 }, 2 } end,
    linear = function(draw) return { draw { 3, 4 }, draw { 5, 4 }, draw { 5 } } end,
    matmul = function(draw) return { draw { 3, 4 }, draw { 4, 2 } } end,
    scaled_dot_product_attention = function(draw)
        return { draw { 2, 2, 3, 4 }, draw { 2, 2, 3, 4 }, draw { 2, 2, 3, 4 }, nil, { causal = true } }
    end,
    rope = function(draw) return { draw { 2, 3, 6 }, te.tensor { 1, 0.1 } }, { 1 } end,
    self_attention = function(draw) return { draw { 2, 3, 12 }, nil, { heads = 2, causal = true } }, { 1 } end,
    moe_permute = function(draw) return { draw { 3, 4 }, mask() }, { 1 } end,
    moe_permute_with_probs = function(draw) return { draw { 3, 4 }, draw { 3, 2 }, mask() }, { 1, 2 } end,
    moe_permute_and_pad_with_probs = function(draw)
        return { draw { 3, 4 }, draw { 3, 2 }, mask(), te.tensor({ 2, 2 }, { dtype = "int32" }), 3 }, { 1, 2 }
    end,
    moe_unpermute = function(draw)
        local _, map = te.moe_permute(te.zeros { 3, 1 }, mask())
        return { draw { 4, 5 }, map, draw { 3, 2 } }, { 1, 3 }
    end,
    fused_topk_with_score_function = function(draw) return { draw { 3, 6 }, 2 } end,
    fused_compute_score_for_moe_aux_loss = function(draw) return { draw { 3, 6 }, 2 } end,
    stochastic_depth = function(draw) return { draw { 3, 2, 4 } } end,
    uniform = function(draw) return { draw { 3, 4 } } end,
    integers = function(draw) return { draw { 3, 4 }, 1, 6 } end,
    multinomial = function(draw) return { te.abs(draw { 3, 4 }) + 0.1, 2 } end,
    cast = function(draw) return { draw { 3, 4 }, "float64" } end,
    to_device = function(draw) return { draw { 3, 4 }, te.get_default_device() } end,
}

-- Elements where a gradient jumps are kept away from.
local rounding = { abs = true, sign = true, floor = true, ceil = true, round = true, trunc = true,
    relu = true, srelu = true,
    reglu = true, sreglu = true, scaled_srelu = true }

local support = { rounding = rounding }

--- Arguments of an operation and the positions of those that take gradients.
---@param op table  an entry of te.ops_list()
---@param dtype string
function support.arguments(op, dtype)
    local low, high = (op.domain or "-2 2"):match("(%S+) (%S+)")
    local function draw(shape)
        local x = te.rand(shape, { dtype = "float64" }) * (tonumber(high) - tonumber(low)) + tonumber(low)
        if rounding[op.name] then x = te.floor(x) + 0.3 + 0.4 * (x - te.floor(x)) end
        return x:to(dtype)
    end
    if cases[op.name] then return cases[op.name](draw) end
    local args, shape = {}, op.gated and { 3, 8 } or { 3, 4 }
    for _, p in ipairs(op.params) do
        if p.type == "tensor" then
            args[#args + 1] = draw(shape)
        elseif not p.optional then
            error(("te.%s needs an entry in spec/support/op_cases.lua for %s"):format(op.name, p.name))
        end
    end
    return args
end

--- How many arguments there are at most, nils included.
function support.count(args)
    local n = 0
    for i in pairs(args) do n = math.max(n, i) end
    return n
end

return support
