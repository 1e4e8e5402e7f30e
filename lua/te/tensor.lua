--- Tensor functions that are compositions of the engine's: methods of tensors, and in `te`.

local te = require "te"
local mode = require "te.recipe.mode"
local core = te._core
local methods = core.tensor_methods

-- Loads when it is needed: it asks for `te` itself.
local function options() return require "te.options" end

local function shown(value) return options().shown(value) end

local function fail(level, name, message, ...) error(("te.%s: "):format(name) .. message:format(...), level + 1) end

local function check_tensor(name, x)
    if not te.is_tensor(x) then fail(3, name, "x: expected a tensor, got %s", core.describe(x)) end
    if not pcall(x.dim, x) then fail(3, name, "x: tensor was released") end
end

-- A function that is also a method.
local function define(name, fn)
    te[name] = fn
    methods[name] = fn
end

local dtypes = {}
for _, name in ipairs {
    "float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool", "float8_e4m3", "float8_e5m2",
} do dtypes[name] = true end

--- x in another dtype or on another device: x:to("bfloat16"), x:to("cpu"), x:to{dtype=, device=}; both in either order.
---@param where string|table
---@param device string|nil
---@return te.Tensor
define("to", function(x, where, device, ...)
    check_tensor("to", x)
    if select("#", ...) > 0 then options().last("te.to", 3, ...) end
    local dtype
    if dtypes[device] and dtypes[where] then fail(2, "to", "%q and %q are both dtypes", where, device) end
    if dtypes[device] and type(where) == "string" then where, device = device, where end
    if type(where) == "table" then
        options().last("te.to", 2, device)
        for key in pairs(where) do
            local near = core.nearest(tostring(key), { "dtype", "device" })
            if key ~= "dtype" and key ~= "device" then
                fail(2, "to", "unknown option %q%s", tostring(key),
                    near and ("; did you mean %q?"):format(near) or "; known are device, dtype")
            end
        end
        dtype, device = where.dtype, where.device
    elseif dtypes[where] then
        dtype = where
    elseif device == nil and type(where) == "string" and (where:find("^cpu") or where:find("^cuda")) then
        device = where
    elseif where ~= nil or device == nil then
        fail(2, "to", "where: expected a dtype or a device, got %s%s", shown(where),
            options().place_hint(where))
    end
    if dtype ~= nil and not dtypes[dtype] then
        fail(2, "to", "dtype: expected the name of a dtype, got %s%s", shown(dtype),
            type(dtype) == "string" and core.dtype_hint(dtype) or "")
    end
    if device and dtypes[device] then fail(2, "to", "device: expected a device, got the dtype %q", device) end
    if device then
        local moved, result = pcall(te.to_device, x, device)
        if not moved then error((tostring(result):gsub("te%.to_device:", "te.to:", 1)), 0) end
        x = result
    end
    if dtype == nil then return x end
    return te.cast(x, dtype)
end)

--- The values that a parameter had before te.quantized_model_init quantized it; nil when they were not kept, or the
--- parameter has been written since.
function methods.get_high_precision_init_val(x) return mode.initial_values(x) end

--- Lets go of them.
function methods.clear_high_precision_init_val(x) mode.initial[x] = nil end

--- Calls fn with the tensor's gradient in every backward pass that reaches it, before anything else reads it. A tensor
--- that fn returns takes its place. In the gradient of a parameter, all that the pass adds to it is summed.
---@param fn fun(grad: te.Tensor): te.Tensor|nil
---@return te.Hook hook  hook:remove() takes it off
function methods.register_hook(x, fn, ...) return require("te.hooks").on_gradient(x, fn, ...) end

--- The values of a parameter that is stored quantized (te.quantized_model_init), as a tensor of its own.
function methods.dequantize(x)
    if not core.is_quantized(x) then fail(2, "dequantize", "x: a tensor that is not stored quantized") end
    return x:clone()
end

-- Splitting -------------------------------------------------------------------------------------------------------

local function dimension(name, x, dim)
    if type(dim) == "table" then
        dim = options().check("te." .. name, dim, { dim = { "integer", 1 } }).dim
    elseif dim == nil then
        dim = 1
    end
    local n = x:dim()
    if type(dim) ~= "number" or dim == 0 or dim > n or dim < -n or dim % 1 ~= 0 then
        fail(3, name, "dim: %s out of range for %d dimensions, counted from 1", shown(dim), n)
    end
    return dim > 0 and dim or dim + n + 1
end

--- Pieces of `size` along dim (the last may be smaller), or pieces of the listed sizes: a list of views.
---@param size integer|integer[]
---@param dim integer|nil
---@return te.Tensor[]
define("split", function(x, size, dim, ...)
    check_tensor("split", x)
    options().last("te.split", 3, ...)
    dim = dimension("split", x, dim)
    local extent, sizes = x:size(dim), size
    if type(size) == "number" then
        if size < 1 or size % 1 ~= 0 then fail(2, "split", "size: %s is no positive whole number", shown(size)) end
        sizes = {}
        for start = 1, extent, size do sizes[#sizes + 1] = math.min(size, extent - start + 1) end
        if extent == 0 then sizes[1] = 0 end
    elseif type(size) ~= "table" then
        fail(2, "split", "size: expected a number or a list of sizes, got %s", core.describe(size))
    end
    local sum = 0
    for i = 1, options().list("te.split", "sizes", sizes) do
        local length = sizes[i]
        if type(length) ~= "number" or length < 0 or length % 1 ~= 0 then
            fail(2, "split", "size %d: %s is no size", i, tostring(length))
        end
        sum = sum + length
    end
    if sum ~= extent then fail(2, "split", "sizes sum to %d, dimension %d has %d", sum, dim, extent) end
    local pieces, start = {}, 1
    for i, length in ipairs(sizes) do
        pieces[i] = length > 0 and x:narrow(dim, start, length) or x:narrow(dim, 1, 0)
        start = start + length
    end
    return pieces
end)

--- At most n pieces of equal size (the last may be smaller): a list of views.
---@param n integer
---@param dim integer|nil
---@return te.Tensor[]
define("chunk", function(x, n, dim, ...)
    check_tensor("chunk", x)
    options().last("te.chunk", 3, ...)
    if type(n) ~= "number" or n < 1 or n % 1 ~= 0 then
        fail(2, "chunk", "n: %s is no positive whole number", shown(n))
    end
    dim = dimension("chunk", x, dim)
    return x:split(math.max(1, math.ceil(x:size(dim) / n)), dim)
end)

-- Drawn -----------------------------------------------------------------------------------------------------------

local RANDPERM = { dtype = { "string" }, device = { "string" } }

-- Up to where a dtype has all whole numbers from 0 on.
local LARGEST = { float64 = 2 ^ 53, float32 = 2 ^ 24, float16 = 2 ^ 11, bfloat16 = 2 ^ 8, float8_e4m3 = 2 ^ 4,
    float8_e5m2 = 2 ^ 3, int32 = 2 ^ 31 - 1, uint8 = 255, bool = 1 }

--- The whole numbers from 0 to n - 1 in random order, int64: positions, as te.index_select takes them.
---@param n integer
---@param opts table|nil  dtype, device
---@return te.Tensor
function te.randperm(n, opts, ...)
    options().last("te.randperm", 2, ...)
    if type(n) ~= "number" or n < 0 or n % 1 ~= 0 then fail(2, "randperm", "n: %s is no size", shown(n)) end
    opts = options().check("te.randperm", opts, RANDPERM)
    local largest = LARGEST[opts.dtype]
    if largest and n - 1 > largest then
        fail(2, "randperm", "n: %.0f in %s, which has all whole numbers up to %.0f", n, opts.dtype, largest)
    end
    local drawn, keys = pcall(te.randint, 0, 2 ^ 48, { n }, { device = opts.device })
    if not drawn then error((tostring(keys):gsub("te%.randint:", "te.randperm:", 1)), 0) end
    return te.cast(te.argsort(keys), opts.dtype or "int64")
end

-- In place --------------------------------------------------------------------------------------------------------

if not rawget(te, "zero_") then define("zero_", function(x) return x:fill_(0) end) end

-- Help ------------------------------------------------------------------------------------------------------------

--- What an operation, function or class of `te` is, by its name ("softmax", "optim.AdamW") or itself: its signature,
--- description and options. A list of all operations without one.
---@param name string|function|table|nil
---@return string
function te.help(name, ...)
    options().last("te.help", 1, ...)
    local names, lines = {}, {}
    for _, op in ipairs(te.ops_list()) do
        if op.name == name then return ("te.%s\n%s"):format(op.signature, op.doc) end
        names[#names + 1], lines[#lines + 1] = op.name, "te." .. op.signature
    end
    if name == nil then return table.concat(lines, "\n") end
    local known, text = pcall(function() return require("te.tools.help").text(name) end)
    if known and type(name) ~= "number" and type(name) ~= "boolean" then return text end
    local nearest = not known and tostring(text):match "did you mean ([%w_.]+)%?$"
        or core.nearest(tostring(name), names)
    fail(2, "help", "no operation %q%s", tostring(name), nearest and ("; did you mean %q?"):format(nearest) or "")
end

-- Files -----------------------------------------------------------------------------------------------------------

if core.safetensors_write then
    --- Writes named tensors and texts to a safetensors file, which appears whole or not at all.
    ---@param tensors table  tensors by name, or a list of {name, tensor}; or with tables in it, like an optimizer's
    ---  state_dict, which may hold numbers, texts and booleans: te.load gives them back
    ---@param metadata table|nil  texts by name
    function te.save(path, tensors, metadata, ...)
        options().last("te.save", 3, ...)
        local class = getmetatable(tensors)
        if type(tensors) ~= "table" or type(class) == "table" and class.__name then
            fail(2, "save", "tensors: expected a table, got %s", core.describe(tensors))
        end
        local entries, names, deep = tensors, {}, false
        if tensors[1] then
            options().list("te.save", "tensors", tensors)
        else
            entries = {}
            for name in pairs(tensors) do
                if type(name) ~= "string" then fail(2, "save", "tensors: names are strings, got %s", tostring(name)) end
                names[#names + 1] = name
                deep = deep or type(tensors[name]) == "table"
            end
            table.sort(names)
            for i, name in ipairs(names) do entries[i] = { name, tensors[name] } end
        end
        if metadata ~= nil and type(metadata) ~= "table" then
            fail(2, "save", "metadata: expected a table of texts, got %s", core.describe(metadata))
        end
        if deep then entries, metadata = require("te.nested").flatten(tensors, metadata) end
        core.safetensors_write(path, entries, metadata)
    end

    -- What tells core.safetensors_read which tensors to read, and what raises where a name of a list is not there.
    local function chooser(wanted)
        if type(wanted) == "function" then return wanted end
        if type(wanted) == "string" then
            local ok, reason = pcall(string.find, "", wanted)
            if not ok then fail(3, "load", "names: %s: %s", shown(wanted), reason) end
            return function(name)
                local known, found = pcall(string.find, name, wanted) -- some are wrong only beyond what matched
                if not known then fail(5, "load", "names: %s: %s", shown(wanted), found) end
                return found ~= nil
            end
        end
        if type(wanted) ~= "table" or getmetatable(wanted) then
            fail(3, "load", "names: expected a list, a pattern or a function, got %s", shown(wanted))
        end
        local missing, all = {}, {}
        for i = 1, options().list("te.load", "names", wanted) do
            if type(wanted[i]) ~= "string" then
                fail(3, "load", "names: entry %d: expected a string, got %s", i, shown(wanted[i]))
            end
            missing[wanted[i]] = true
        end
        return function(name)
            local found = missing[name]
            missing[name], all[#all + 1] = nil, name
            return found
        end, function(path)
            local name = options().names(missing)[1]
            local near = name and core.nearest(name, all)
            if not name then return end
            fail(3, "load", "names: %s has no tensor %s%s", path, shown(name),
                near and ("; did you mean %q?"):format(near) or "")
        end
    end

    --- Tensors by name, metadata by name, and the names in the order of the file. Whole numbers of dtypes that tensors
    --- do not have become wider ones: I8, I16 and U16 int32, U32 int64. Other dtypes are an error if they are wanted.
    ---@param path string
    ---@param opts table|nil  names: a list, a pattern of string.find, or a function of a name that says yes or no. Only
    ---  these tensors are read; names are those in the file
    ---@return table<string, te.Tensor> tensors
    ---@return table<string, string> metadata
    ---@return string[] names
    function te.load(path, opts, ...)
        options().last("te.load", 2, ...)
        local wanted = options().check("te.load", opts, { names = { "any" } }).names
        local choose, check
        if wanted ~= nil then choose, check = chooser(wanted) end
        local names, tensors, metadata = core.safetensors_read(path, choose)
        if check then check(path) end
        if metadata and metadata["te.nested/"] then
            tensors, metadata = require("te.nested").restore(path, tensors, metadata)
        end
        return tensors, metadata, names
    end
end
