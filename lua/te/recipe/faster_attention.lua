--- What te.recipe.faster measures of an attention: a step of one of the same sizes, forward and backward.
--
-- Under fp8_dpa forward quantizes its operands and multiplies E4M3, and backward reads the values of those bytes: more
-- kernels around a faster one, which pays for long sequences first. Packed sequences are measured as if all had the
-- same length, so that nobody has to wait for theirs.

local te = require "te"
local mode = require "te.recipe.mode"

local attentions = {}

local SHARED = { "causal", "scale", "window_left", "window_right", "bottom_right" }

local Description = {}
Description.__index = Description

function Description:__tostring()
    local words = { ("%d x %d tokens"):format(self.batch, self.seq) }
    if self.seq_kv ~= self.seq then words[#words + 1] = ("on %d"):format(self.seq_kv) end
    words[#words + 1] = ("in %d heads of %d"):format(self.heads, self.dim)
    if self.dim_v ~= self.dim then words[#words + 1] = ("with values of %d"):format(self.dim_v) end
    if self.kv_heads ~= self.heads then words[#words + 1] = ("on %d"):format(self.kv_heads) end
    for _, name in ipairs(SHARED) do
        if self[name] then words[#words + 1] = ("%s=%s"):format(name, tostring(self[name])) end
    end
    if self.dropout > 0 then words[#words + 1] = "with dropout" end
    return table.concat(words, " ")
end

-- {batch, seq, width}, one sequence {tokens, width}, or n packed ones.
local function projected(module, x, lens)
    local shape = x.shape
    if #shape > 3 or #shape < 2 then return nil end
    local batch, seq = #shape == 3 and shape[1] or 1, shape[#shape - 1]
    if te.is_tensor(lens) and lens:numel() > 0 then batch, seq = lens:numel(), math.ceil(seq / lens:numel()) end
    return { packed = true, batch = batch, seq = seq, seq_kv = seq, heads = module.num_heads,
        kv_heads = module.num_kv_heads, dim = module.head_size, dim_v = module.head_size }
end

local function separate(q, k, v)
    if not (te.is_tensor(k) and te.is_tensor(v)) or #q.shape ~= 4 or #k.shape ~= 4 or #v.shape ~= 4 then return nil end
    return { batch = q.shape[1], seq = q.shape[3], seq_kv = k.shape[3], heads = q.shape[2], kv_heads = k.shape[2],
        dim = q.shape[4], dim_v = v.shape[4] }
end

--- How a module attends: self-attention over rows x and the lengths of packed sequences, other attention over q, k and
--- v. Nil for operands that it will refuse.
function attentions.describe(module, x, ...)
    local found
    if module.takes_seq_lens then found = projected(module, x, (...)) else found = separate(x, ...) end
    if not found then return nil end
    for _, name in ipairs(SHARED) do found[name] = module[name] end
    found.dropout = module.training and module.dropout or 0
    return setmetatable(found, Description)
end

local function numbers(case, shape)
    local count = 1
    for _, n in ipairs(shape) do count = count * n end
    local angles = te.arange(1, count, 1, { dtype = "float32", device = case.device })
    local t = te.sin(angles):view(shape):to(case.dtype):detach()
    t.requires_grad = true
    return t
end

-- The module, and what it attends over.
local function build(case)
    local a = case.attention
    local options = { causal = a.causal, scale = a.scale, window_left = a.window_left, window_right = a.window_right,
        dropout = a.dropout }
    if not a.packed then
        options.bottom_right = a.bottom_right
        return te.DotProductAttention(options), { numbers(case, { a.batch, a.heads, a.seq, a.dim }),
            numbers(case, { a.batch, a.kv_heads, a.seq_kv, a.dim }),
            numbers(case, { a.batch, a.kv_heads, a.seq_kv, a.dim_v }) }
    end
    local function nothing() end
    options.bias, options.init_method, options.output_layer_init_method = false, nothing, nothing
    local module = te.GroupedQueryAttention(a.heads * a.dim, a.heads, a.kv_heads, options)
    module.qkv, module.proj = te.Identity(), te.Identity()
    return module, { numbers(case, { a.batch, a.seq, (a.heads + 2 * a.kv_heads) * a.dim }) }
end

--- A function that makes a step of the case under a recipe.
function attentions.step(case, recipe)
    local module, operands = build(case)
    mode.product(module, module.attention_key).stands_for = case.product
    return function()
        local y = te.autocast({ dtype = case.dtype, recipe = recipe, when = "always" }, module, unpack(operands))
        y:backward(y:detach())
        for _, t in ipairs(operands) do t.grad = nil end
    end
end

return attentions
