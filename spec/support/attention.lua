--- Attention of quantized operands by the book, in float64 on the host: what specs of FP8 attention compare with. Operands are
--- {batch, heads, seq, dim}, k and v with as many heads as they have.

local te = require "te"
local book = require "spec.support.quantization"

local attention = {}

local function f64(t) return t:detach():to("cpu"):to("float64") end

--- The values that the bytes of E4M3 under current scaling stand for, in float64.
function attention.values(t)
    return f64(te.quantize(t:detach():to("float32"), te.recipe.Float8CurrentScaling {}, "input"):dequantize())
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

--- The result and how far rounding may be off: where float32 cannot tell on which side of the middle between two numbers of
--- the format a probability lies, it may become either. keep: what dropout multiplies by.
function attention.rounded(q, k, v, opts, keep)
    local format = book.formats.float8_e4m3
    local p, score = probabilities(q, k, opts)
    local shape, flat, slack, unsure = p.shape, p:flatten():totable(), {}, 2e-6 * (1 + score)
    for i, x in ipairs(flat) do
        local low, high = book.encode(format, 448 * x * (1 - unsure)), book.encode(format, 448 * x * (1 + unsure))
        flat[i] = book.decode(format, book.encode(format, 448 * x)) / 448
        slack[i] = (book.decode(format, high) - book.decode(format, low)) / 448
    end
    local options = { dtype = "float64", device = "cpu" }
    p, slack = te.tensor(flat, options):view(shape), te.tensor(slack, options):view(shape)
    if keep then p, slack = p * keep, slack * keep end
    v = repeat_heads(v, q:size(2))
    return te.matmul(p, v), te.matmul(slack, v:abs()) + 2e-6 * te.matmul(p, v:abs())
end

-- The sum over the query heads that share one of `heads`.
local function fold_heads(t, heads)
    local shape = t.shape
    return t:reshape({ shape[1], heads, shape[2] / heads, shape[3], shape[4] }):sum(3)
end

--- Gradients of attention without roundings, {q =, k =, v =}, and bounds for what it does to them that rows of dout * out have
--- rounded probabilities in them: 2^-4 of each at most.
function attention.gradients(q, k, v, dout, opts, keep)
    local heads, kv_heads, scale = q:size(2), k:size(2), scale_of(q, opts)
    local p, kk, vv = probabilities(q, k, opts), repeat_heads(k, heads), repeat_heads(v, heads)
    local dropped, dp = keep and p * keep or p, te.matmul(dout, vv:transpose(3, 4))
    if keep then dp = dp * keep end
    local function through(ds)
        return te.matmul(ds, kk) * scale, fold_heads(te.matmul(ds:transpose(3, 4), q), kv_heads) * scale
    end
    local dq, dk = through(p * (dp - (p * dp):sum(-1, true)))
    local off = p * (p * dp:abs()):sum(-1, true) * 2 ^ -4
    local bound_q = te.matmul(off, kk:abs()) * scale
    local bound_k = fold_heads(te.matmul(off:transpose(3, 4), q:abs()), kv_heads) * scale
    return { q = dq, k = dk, v = fold_heads(te.matmul(dropped:transpose(3, 4), dout), kv_heads) },
        { q = bound_q, k = bound_k, v = 0 }
end

attention.f64 = f64

return attention
