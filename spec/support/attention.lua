--- Attention of quantized operands by the book, in float64 on the host: what specs of FP8 attention compare with.
--- Operands are {batch, heads, seq, dim}, k and v with as many heads as they have.

local te = require "te"
local book = require "spec.support.quantization"
local cards = require "spec.support.device"

local attention = {}

local function f64(t) return t:detach():to("cpu"):to("float64") end

local function factor(t)
    return te.quantize(t:detach():to("float32"), te.recipe.Float8CurrentScaling {},
        "input").rowwise_scale_inv:to("cpu"):item()
end

local function repeat_heads(t, heads)
    local list = {}
    for h = 1, heads do list[h] = t:select(2, math.floor((h - 1) * t:size(2) / heads) + 1) end
    return te.stack(list, 2)
end

-- Scores that are not seen at -1e300; lens: packed sequences.
local function mask(sq, skv, opts)
    local rows = {}
    local of, at = {}, 0
    for s, n in ipairs(opts.lens or {}) do
        for _ = 1, n do at = at + 1; of[at] = s end
    end
    for i = 1, sq do
        local row = {}
        for j = 1, skv do
            local seen = (not opts.causal or j <= i) and (not opts.lens or of[i] == of[j])
                and (not opts.window_left or j >= i - opts.window_left)
            row[j] = seen and 0 or -1e300
        end
        rows[i] = row
    end
    return te.tensor(rows, { dtype = "float64", device = "cpu" })
end

local function scale_of(q, opts) return opts.scale or 1 / math.sqrt(q:size(4)) end

-- softmax(q k^T scale), and the largest score.
local function probabilities(q, k, opts)
    local scores = te.matmul(q, repeat_heads(k, q:size(2)):transpose(3, 4)) * scale_of(q, opts)
    return te.softmax(scores + mask(q:size(3), k:size(3), opts), -1), scores:abs():max():item()
end

-- Elements of t as multiples of `unit` in E4M3, and how far they may be off: what lies within `unsure` of the middle
-- between two numbers of the format may become either.
local function round_all(t, unit, unsure)
    local format, options = book.formats.float8_e4m3, { dtype = "float64", device = "cpu" }
    local rounded, slack, shape = t:flatten():totable(), {}, t.shape
    unsure = unsure:flatten():totable()
    local function round(x) return book.decode(format, book.encode(format, x / unit)) * unit end
    for i, x in ipairs(rounded) do
        rounded[i] = round(x)
        slack[i] = math.max(round(x + unsure[i]) - rounded[i], rounded[i] - round(x - unsure[i]))
    end
    return te.tensor(rounded, options):view(shape), te.tensor(slack, options):view(shape)
end

--- The values that the bytes of E4M3 under current scaling stand for, in float64. whole: the
--- tensor that t is a part of.
function attention.values(t, whole)
    if whole then
        return (round_all(f64(t), factor(whole), te.zeros(t.shape, { dtype = "float64", device = "cpu" })))
    end
    return f64(te.quantize(t:detach():to("float32"), te.recipe.Float8CurrentScaling {}, "input"):dequantize())
end

--- The result for tensors q, k and v, which may be parts of one that is quantized as a whole, and how far it may be off
--- with sums in float32. keep: what dropout multiplies by.
function attention.rounded(q, k, v, opts, keep, whole)
    local unit = factor(whole or v)
    v = repeat_heads(attention.values(v, whole), q:size(2))
    local exact, score = probabilities(attention.values(q, whole), attention.values(k, whole), opts)
    local p, slack = round_all(exact, 1 / 448, exact * (2e-6 * (1 + score)))
    -- cuDNN rounds before it divides by the sum: by as much, but to other numbers
    if cards.is_card() then slack = slack + exact / 8 + 2 ^ -9 / 448 end
    if keep then p, slack = p * keep, slack * keep end
    local out, off = te.matmul(p, v), te.matmul(slack, v:abs()) + 2e-6 * te.matmul(p, v:abs())
    if keep then return out, off end
    return round_all(out, unit, off)
end

-- The sum over the query heads that share one of `heads`.
local function fold_heads(t, heads)
    local shape = t.shape
    return t:reshape({ shape[1], heads, shape[2] / heads, shape[3], shape[4] }):sum(3)
end

--- Gradients of attention of the bytes of tensors q, k and v without further rounding, {q =, k =, v =}, and bounds for
--- what it does to them that backward's sums of rows of dout * out read a result whose probabilities were rounded, and
--- which was rounded itself: by 2^-4 of each at most, or half of the smallest number of the format.
function attention.gradients(q, k, v, dout, opts, keep)
    local unit = factor(v)
    q, k, v = attention.values(q), attention.values(k), attention.values(v)
    local heads, kv_heads, scale = q:size(2), k:size(2), scale_of(q, opts)
    local p, kk, vv = probabilities(q, k, opts), repeat_heads(k, heads), repeat_heads(v, heads)
    local dropped, dp = keep and p * keep or p, te.matmul(dout, vv:transpose(3, 4))
    if keep then dp = dp * keep end
    local function through(ds)
        return te.matmul(ds, kk) * scale, fold_heads(te.matmul(ds:transpose(3, 4), q), kv_heads) * scale
    end
    local dq, dk = through(p * (dp - (p * dp):sum(-1, true)))
    local out = te.matmul(dropped, vv)
    local sums = (p * dp:abs()):sum(-1, true) * 2 ^ -4
    if not keep then sums = sums + (dout:abs() * (out:abs() * 2 ^ -4 * 1.1 + unit * 2 ^ -10)):sum(-1, true) end
    local off = p * sums
    local bound_q = te.matmul(off, kk:abs()) * scale
    local bound_k = fold_heads(te.matmul(off:transpose(3, 4), q:abs()), kv_heads) * scale
    local dv = fold_heads(te.matmul(dropped:transpose(3, 4), dout), kv_heads)
    local function more(t) return cards.is_card() and 5e-3 * t:abs():max():item() or 0 end -- its sums are less exact
    return { q = dq, k = dk, v = dv }, { q = bound_q + more(dq), k = bound_k + more(dk), v = more(dv) }
end

attention.f64 = f64

return attention
