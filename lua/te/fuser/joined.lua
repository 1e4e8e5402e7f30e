--- Groups whose rows are several dimensions of their tensors, for norms over several dimensions.
--
-- The engine's groups know rows of one dimension. Where a norm takes more, the last dimensions of all that its group
-- reads are made one, which costs nothing for tensors as they usually lie, and taken apart again in what the group
-- gives. That is right for operations that go element by element through tensors of one shape; any other, such as a
-- matrix product, stands in a group of its own.

local te = require "te"
local parameter_in = require("te.module_tree").parameter_in
local fail = require "te.fail"
local options = require "te.options"
local core = te._core

local joined = {}

-- Operations of the engine that go element by element but have no formula of their own.
local ELEMENTWISE = { gelu = true, dropout = true }

-- Those that may have several activations.
local OF_SEVERAL = { add = true, sub = true, mul = true }

joined.REFUSAL = "its inputs do not end with the sizes that are normalized"

--- Whether a step gives the same whichever dimensions are its row.
function joined.is_free(step, sources)
    local op = type(step.name) == "string" and core.operation(step.name) or step.name
    if step.product or step.attributes and type(step.name) ~= "string" then return false end
    local formula = op.formula
    local of_rows = not formula or op.gated or formula:find("row") or formula:find("col")
    if of_rows and not ELEMENTWISE[step.name] then return false end
    local activations = 0
    for _, v in ipairs(step.inputs) do
        if sources[v] then return false end
        if v then activations = activations + 1 end
    end
    return activations == 1 or OF_SEVERAL[step.name] == true
end

--- Whether two lists of sizes are the same, nil being those of a row of one dimension.
function joined.same(a, b)
    if not a or not b or #a ~= #b then return a == b end
    for i = 1, #a do
        if a[i] ~= b[i] then return false end
    end
    return true
end

local function ends_with(t, sizes)
    if not te.is_tensor(t) or t:dim() < #sizes then return false end
    for i = 1, #sizes do
        if t:size(i - 1 - #sizes) ~= sizes[i] then return false end
    end
    return true
end

--- The arguments of a part's group with their last dimensions made one; nil when they do not end with the sizes.
function joined.arguments(part, env)
    local args, n, sizes = {}, #part.inputs, part.joined
    for i, v in ipairs(part.inputs) do
        if not ends_with(env[v], sizes) then return nil end
        args[i] = env[v]:flatten(-#sizes, -1)
    end
    for i, source in ipairs(part.params) do
        local parameter = parameter_in(source[1], source[2])
        args[n + i] = parameter and parameter:flatten()
    end
    return args
end

--- fn(x, parameters …) with the last dimensions, of those sizes, made one.
---@param who string
function joined.apply(who, sizes, fn, x, ...)
    if not te.is_tensor(x) then fail("te.%s: x: expected a tensor, got %s", who, options.shown(x)) end
    if not ends_with(x, sizes) then
        fail("te.%s: the input has shape %s, its last sizes must be %s", who, options.shape(x), options.shape(sizes))
    end
    local parameters, n = { ... }, select("#", ...)
    for i = 1, n do
        local p = parameters[i]
        parameters[i] = te.is_tensor(p) and p:flatten() or p
    end
    return fn(x:flatten(-#sizes, -1), unpack(parameters, 1, n)):view(x.shape)
end

return joined
