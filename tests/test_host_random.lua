-- Random calls of everything that the engine declares, right and wrong. round(n) makes n of them and returns how many
-- went well; a call may fail in any way that is an error.

local te = require "te"

local state
local function random(n)
    state = state * 16807 % 2147483647
    return state % n + 1
end

local function pick(list) return list[random(#list)] end

local dtypes = { "float32", "float32", "float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool",
    "float8_e4m3", "nonsense" }
local odd = { 0, -1, 2.5, 0 / 0, 1 / 0, -1 / 0, 1e300, 2 ^ 31, -2 ^ 63, "x", "", "\0", true, {}, { 1, "a" },
    { { 1 }, { 2, 3 } },
    function() end, coroutine.create(function() end), te, math }
local sizes = { 0, 1, 1, 2, 3, 4, 4, 8 }
local pool = {}

local function small_shape()
    local shape = {}
    for i = 1, random(4) - 1 do shape[i] = pick(sizes) end
    return shape
end

-- Any tensor of the pool, or a new one; those of one shape come often, so that operands fit each other.
local function tensor()
    local t = pool[random(64)]
    if t and random(8) > 1 then return t end
    local kind = random(6)
    local made
    if kind == 1 then
        made = te.randint(0, 3, random(2) == 1 and { 3, 4 } or small_shape(), { dtype = pick { "int64", "int32" } })
    elseif kind == 2 then
        made = te.randn(small_shape(), { dtype = pick { "float32", "bfloat16", "float64" } })
    else
        made = te.randn({ 3, 4 }, { requires_grad = random(3) == 1 })
    end
    pool[random(64)] = made
    return made
end

local values = {
    tensor = tensor,
    tensors = function() return { tensor(), tensor(), random(9) == 1 and tensor() or nil } end,
    number = function() return pick { 0, 1, -1, 0.5, 2, 1e-5, 100, 0 / 0, 1 / 0 } end,
    int = function() return random(9) - 3 end,
    bool = function() return random(2) == 1 end,
    dim = function() return random(7) - 4 end,
    index = function() return random(7) - 4 end,
    dims = function() return random(2) == 1 and random(5) - 3 or { random(3), -random(3) } end,
    shape = small_shape,
    dtype = function() return pick(dtypes) end,
    device = function() return pick { "cpu", "cuda", "nowhere" } end,
    text = function() return pick { "a", "", "mean" } end,
}

local function value(param)
    if random(12) == 1 then return pick(odd) end
    if param.type == "choice" then
        local names = {}
        for name in param.choices:gmatch "[^|]+" do names[#names + 1] = name end
        return pick(names)
    end
    return (values[param.type] or values.int)()
end

-- Arguments in order, with options in a table at the end now and then.
local function arguments(op)
    local args, n, options = {}, 0, nil
    for _, param in ipairs(op.params) do
        if param.by_name or (param.optional and random(3) == 1) then
            if random(2) == 1 then
                options = options or {}
                options[random(40) == 1 and "nonsense" or param.name] = value(param)
            end
            if not param.by_name then break end
        else
            n = n + 1
            args[n] = value(param)
        end
    end
    if random(30) == 1 then n = n + 1 args[n] = pick(odd) end
    if random(30) == 1 and n > 0 then n = n - 1 end
    if options then n = n + 1 args[n] = options end
    return args, n
end

local function keep(ok, ...)
    for i = 1, select("#", ...) do
        local result = select(i, ...)
        if ok and te.is_tensor(result) and result:numel() < 4096 then pool[random(64)] = result end
    end
    return ok
end

local calls = {}
local left_out = { topk = true } -- indices of a recorded call that is never used keep themselves alive
for _, op in ipairs(te.ops_list()) do
    calls[#calls + 1] = not left_out[op.name] and function()
        local args, n = arguments(op)
        local form = random(4)
        local call = form == 1 and op.method and te._core.tensor_methods[op.name] or form == 2 and op.inplace
            and te[op.name .. "_"] or te[op.name]
        return keep(pcall(call, unpack(args, 1, n)))
    end or nil
end

-- What is no operation: made with random arguments altogether.
local function anything()
    local kind = random(8)
    if kind <= 3 then return tensor() end
    if kind <= 5 then return pick(odd) end
    if kind == 6 then return small_shape() end
    if kind == 7 then return { dtype = pick(dtypes), requires_grad = random(2) == 1 } end
    return random(12) - 4
end

local natives = { "tensor", "zeros", "ones", "full", "eye", "arange", "rand", "randn", "randint", "backward", "grad",
    "is_tensor", "split",
    "chunk", "to", "no_grad", "autocast", "checkpoint", "manual_seed", "rng_state", "memory_stats" }
for _, name in ipairs(natives) do
    calls[#calls + 1] = function()
        return keep(pcall(te[name], anything(), anything(), random(3) == 1 and anything() or nil))
    end
end
for _, name in ipairs { "size", "dim", "numel", "item", "totable", "is_contiguous", "backward", "release" } do
    calls[#calls + 1] = function()
        if name == "release" and random(4) > 1 then return true end
        return keep(pcall(te._core.tensor_methods[name], anything(), random(2) == 1 and anything() or nil))
    end
end
local fields = { "grad", "requires_grad", "shape", "dtype", "device", "is_leaf", "nonsense", 1, -1, 99, 0.5 }
calls[#calls + 1] = function() return keep(pcall(function(t, k) return t[k] end, tensor(), pick(fields))) end
calls[#calls + 1] = function() return (pcall(function(t, k, v) t[k] = v end, tensor(), pick(fields), anything())) end
local operators = {
    function(a, b) return a + b end, function(a, b) return a * b end, function(a, b) return a == b end,
    function(a) return -a end, function(a, b) return a ^ b end, function(a) return #a end,
    function(a) return tostring(a) end,
}
calls[#calls + 1] = function() return keep(pcall(pick(operators), anything(), anything())) end

-- Modules with random parts, run forward and backward.
local classes = { "Linear", "LayerNorm", "RMSNorm", "GELU", "SwiGLU", "Dropout", "Identity", "ConstantScale",
    "Reshape", "Embedding", "BasicLinear", "Bias", "ReLU", "L2Normalization" }
calls[#calls + 1] = function()
    return keep(pcall(function()
        local parts = {}
        for i = 1, random(3) do parts[i] = te[pick(classes)](pick { 4, 4, 8, 3, 2 }, pick { 4, 8, 2 }) end
        local y = te.Sequential(unpack(parts))(tensor())
        if random(2) == 1 then y:sum():backward() end
        return y
    end))
end

function round(seed, n)
    state = seed
    local good = 0
    for _ = 1, n do
        if pick(calls)() then good = good + 1 end
    end
    return te.tensor { good }
end
