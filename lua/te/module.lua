--- te.Module: the base of everything that holds parameters.
--
--     local MLP = te.Module:extend("MLP")
--     function MLP:init(width) self.up, self.down = te.Linear(width, 4 * width), te.Linear(4 * width, width) end
--     function MLP:forward(x)  return self.down(te.gelu(self.up(x))) end
--
-- A class is the metatable of its instances. Fields are plain: an instance only remembers in which order their names
-- first appeared, and everything that walks a model looks at what stands in them now. A field counts when it holds a
-- module, a parameter (a leaf tensor that requires a gradient, or one named by register_parameter), a buffer, or a
-- table without a metatable in which modules and parameters stand, however deep: "layers.1.norm.weight". The array part
-- counts too, which is how containers keep theirs. What else stands in such tables is looked past.

local te = require "te"
local fail = require "te.fail"
local inside = require "te.depth"
local tree = require "te.module_tree"
local mode = require "te.recipe.mode"
local options = require "te.options"
local rows = require "te.rows"
local core = te._core
local is_module, parameters, walk, walk_modules = tree.is_module, tree.parameters, tree.walk, tree.walk_modules

local Module = { __name = "Module", is_module = true, training = true }
Module.__index = Module

local instance = options.instance

--- Whether `value` is an instance of `class` or of a class derived from it.
---@param value any
---@param class table
local function is(value, class)
    if type(class) ~= "table" then fail("te.is: class: expected a class, got %s", options.shown(class)) end
    return instance(value, class)
end

-- How messages of a method name it. Raises where there is no module, or more than the `takes` arguments of the method.
local function method(self, name, takes, ...)
    options.method("Module:" .. name, self, Module)
    local who = self.__name .. ":" .. name
    options.last(who, takes, ...)
    return who
end

local function instantiate(class, ...)
    if class.takes and select("#", ...) > class.takes then
        options.last("te." .. class.__name, class.takes, select(class.takes + 1, ...))
    end
    local self = setmetatable({}, class)
    rawset(self, "_fields", {})
    rawset(self, "_registered", {})
    rawset(self, "_parameters", {}) -- names of those ever registered as such
    self:init(...)
    return self
end

--- Makes a class. Metamethods are inherited; everything else is found through the parent.
---@param name string
function Module:extend(name)
    if type(self) ~= "table" then options.method("Module:extend", self) end
    options.argument("Module:extend", "name", name, { "string" })
    local class = {}
    for key, value in pairs(self) do
        if type(key) == "string" and key:find("^__") then class[key] = value end
    end
    class.__index, class.__name, class.super = class, name, self
    -- Promises of a built-in class about its forward; whoever derives from it may write another one.
    class.pure = false
    class.takes = false -- likewise how many arguments its constructor takes at most
    return setmetatable(class, {
        __index = self, __call = instantiate, __tostring = function() return "class " .. name end,
    })
end

function Module:init() end

function Module:forward()
    method(self, "forward", 0)
    fail("%s: the class has no forward method", self.__name)
end

function Module:__call(...)
    if tree.may_run(self) then return self:forward(...) end
    return tree.checked(self, self:forward(...))
end

-- Runs for names that the instance does not have.
function Module:__newindex(name, value)
    rawset(self, name, value)
    tree.note_field(name)
    if te.is_tensor(value) then
        if value.requires_grad and value.is_leaf then
            -- it stays one when it is frozen later
            if self._registered[name] then parameters[value] = true else tree.register(self, name, value) end
        elseif self._registered[name] == "parameter" and not parameters[value] then
            self._registered[name] = nil
        end
    end
    if type(name) == "string" and value ~= nil then
        for _, known in ipairs(self._fields) do
            if known == name then return end
        end
        table.insert(self._fields, name)
    end
end

-- Raises where a tensor of this name would have none in the tree.
local function check_name(who, name)
    options.argument(who, "name", name, { "string" })
    local wrong = tree.wrong_text(name)
    if wrong then fail("%s: name: %s, got %s", who, wrong, options.shown(name)) end
end

local FLOATING = { float32 = true, bfloat16 = true, float16 = true, float64 = true }

--- Makes `tensor` a parameter named `name`: it requires a gradient, is saved and is optimized.
function Module:register_parameter(name, tensor, ...)
    check_name(method(self, "register_parameter", 2, ...), name)
    if not te.is_tensor(tensor) then
        fail("%s: parameter %s: expected a tensor, got %s", self.__name, tostring(name), core.describe(tensor))
    end
    if not FLOATING[tensor.dtype] then
        fail("%s: parameter %s: a tensor of %s has no gradient", self.__name, name, tensor.dtype)
    end
    tensor.requires_grad = true
    tree.register(self, name, tensor)
    self[name] = tensor
    return tensor
end

local BUFFER = { persistent = { "boolean", true } }

--- Makes `tensor` a buffer: saved and moved with the module, never optimized. One that is not persistent follows from
--- how the module was made: it moves between devices, keeps its dtype and is not saved.
---@param opts table|nil  { persistent = true }
function Module:register_buffer(name, tensor, opts, ...)
    local who = method(self, "register_buffer", 3, ...)
    check_name(who, name)
    if tensor ~= nil and not te.is_tensor(tensor) then
        fail("%s: buffer %s: expected a tensor, got %s", self.__name, name, core.describe(tensor))
    end
    self._registered[name] = options.check(who, opts, BUFFER).persistent and "buffer" or "constant"
    self[name] = tensor
    return tensor
end

-- An iterator over the values of each entry.
local function each_entry(entries)
    local i = 0
    return function()
        i = i + 1
        if entries[i] then return unpack(entries[i]) end
    end
end

--- The list of all parameters, each once.
function Module:parameters(...)
    method(self, "parameters", 0, ...)
    local list, seen = {}, {}
    walk(self, "", function(_, tensor, kind)
        if kind == "parameter" and not seen[tensor] then
            seen[tensor] = true
            list[#list + 1] = tensor
        end
    end)
    return list
end

-- An iterator over name, tensor, module of parameters, or of what is none; each tensor comes once.
local function named(self, parameters_wanted)
    local entries, seen = {}, {}
    walk(self, "", function(name, tensor, kind, _, _, module)
        if (kind == "parameter") == parameters_wanted and not seen[tensor] then
            seen[tensor] = true
            entries[#entries + 1] = { name, tensor, module }
        end
    end)
    return each_entry(entries)
end

--- Iterates over name, parameter, module in order: `for name, p in m:named_parameters() do`. A shared parameter comes
--- once, under its first name.
function Module:named_parameters(...)
    method(self, "named_parameters", 0, ...)
    return named(self, true)
end

--- Iterates over name, buffer, module in order, also over buffers that are not saved. A shared buffer comes once, under
--- its first name.
function Module:named_buffers(...)
    method(self, "named_buffers", 0, ...)
    return named(self, false)
end

--- Iterates over path, module of the tree, this one first under "". A shared module comes once, under its first path.
function Module:named_modules(...)
    method(self, "named_modules", 0, ...)
    local entries, seen = {}, {}
    walk_modules(self, "", function(prefix, module)
        if not seen[module] then
            seen[module] = true
            entries[#entries + 1] = { prefix:sub(1, -2), module }
        end
    end)
    return each_entry(entries)
end

--- The modules directly in this one, as a list of { name =, module = }.
function Module:children(...)
    method(self, "children", 0, ...)
    return tree.children(self, { self }, 1)
end

--- Parameters and buffers by name, parameters that are stored quantized in their parts ("weight.rowwise_data" …), and
--- what delayed scaling remembers. The tensors are the module's own; a shared one stands under its first name.
function Module:state_dict(...)
    method(self, "state_dict", 0, ...)
    local state, seen = {}, {}
    walk(self, "", function(name, tensor, kind)
        if not seen[tensor] and kind ~= "constant" then
            seen[tensor] = true
            if core.is_quantized(tensor) then
                require("te.recipe.parameters").each_part(name, tensor, function(part, t) state[part] = t end)
            else
                state[name] = tensor
            end
        end
    end)
    if not mode.products then return state end
    walk_modules(self, "", function(prefix, module)
        if seen[module] then return end
        seen[module] = true
        for name, tensor in pairs(mode.products.state(module)) do
            if state[prefix .. name] then
                fail("%s:state_dict: %s is the name of a tensor of %s, and of what delayed scaling remembers",
                    self.__name, prefix .. name, module.__name)
            end
            state[prefix .. name] = tensor
        end
    end)
    return state
end

-- Those of sorted names that stand in a message, at most a few.
local function few(names)
    local shown = table.concat(names, ", ", 1, math.min(#names, 5))
    return #names > 5 and ("%s and %d more"):format(shown, #names - 5) or shown
end

-- Finds scales and histories of delayed scaling among `state`: their names are added to `known`, what puts them in
-- place to `steps`. Returns what is wrong.
local function find_recipe_state(self, state, known, steps)
    local any, problem = false, nil
    for name in pairs(state) do any = any or type(name) == "string" and name:find("_amax_history$") ~= nil end
    if not any then return end
    walk_modules(self, "", function(prefix, module)
        local found, load, wrong = require("te.recipe.products").loader(module, prefix, state)
        for _, name in ipairs(found) do known[name] = true end
        steps[#steps + 1], problem = load, problem or wrong
    end)
    return problem
end

local function is_released(t) return te.is_tensor(t) and not pcall(t.dim, t) end

-- Raises where one of the tensors of a state is no more.
local function check_unreleased(who, state)
    for name, given in pairs(state) do
        local released = is_released(given)
        for _, part in ipairs(rows.are(given) and given.parts or {}) do released = released or is_released(part) end
        if released then fail("%s: %s: tensor was released", who, tostring(name)) end
    end
end

--- Copies tensors into the parameters and buffers of the same names. strict (the default) demands that names match;
--- what delayed scaling remembers may be missing. Nothing is changed unless everything fits.
---@param state table<string, any>
---@param opts table|nil  { strict = true }
---@return table self
---@return table|nil names  with strict = false, the sorted lists { missing =, unexpected = }
function Module:load_state_dict(state, opts)
    local who = method(self, "load_state_dict", 2) -- no more is looked at: te.load(path) gives three values
    options.argument(who, "state", state, { "table" })
    local strict = options.check(who, opts, { strict = { "boolean", true } }).strict
    check_unreleased(who, state)
    local known, names, source, absent, problem, steps = {}, {}, {}, {}, nil, {}
    walk(self, "", function(name, tensor, kind, _, _, module)
        if kind == "constant" then return end
        known[name] = true
        names[#names + 1] = name
        local given = state[name]
        local parts, wrong
        if given == nil and core.is_quantized(tensor) then
            parts, wrong = require("te.recipe.parameters").loader(name, tensor, state, known)
        end
        if parts then
            problem = problem or wrong
            steps[#steps + 1], source[tensor] = parts, tensor
        elseif given == nil and (state[name .. ".rowwise_data"] or state[name .. ".columnwise_data"]) then
            problem = problem or ("%s of %s is stored in full, the one given quantized. A module made under "
                .. "te.quantized_model_init with that recipe takes it; p:clone() of each of its named_parameters() is "
                .. "what is taken here"):format(name, module.__name)
        elseif given == nil then
            absent[tensor] = absent[tensor] or name
        elseif not te.is_tensor(given) and not rows.are(given) then
            problem = problem or ("%s: expected a tensor, got %s"):format(name, core.describe(given))
        elseif options.shape(given) ~= options.shape(tensor) then
            problem = problem or ("%s of %s has shape %s, the one given has %s"):format(name, module.__name,
                options.shape(tensor), options.shape(given))
        else
            source[tensor] = given
        end
    end)
    problem = problem or find_recipe_state(self, state, known, steps)
    if problem then fail("%s: %s", who, problem) end
    local missing, unexpected = {}, {}
    for tensor, name in pairs(absent) do -- a shared tensor may come under any of its names
        if not source[tensor] then missing[#missing + 1] = name end
    end
    for name in pairs(state) do
        if not known[name] then unexpected[#unexpected + 1] = tostring(name) end
    end
    table.sort(missing)
    table.sort(unexpected)
    if strict and #missing > 0 then fail("%s: missing: %s", who, few(missing)) end
    if strict and #unexpected > 0 then
        local near = options.nearest(unexpected[1], names)
        fail("%s: unexpected: %s%s", who, few(unexpected), near and (" (nearest known: %s)"):format(near) or "")
    end
    te.no_grad(function()
        for tensor, given in pairs(source) do
            if rows.are(given) then
                given:copy_to(tensor)
            elseif not rawequal(tensor, given) then
                tensor:copy_(given)
            end
        end
    end)
    for _, step in ipairs(steps) do step() end
    if strict then return self end
    return self, { missing = missing, unexpected = unexpected }
end

--- Calls fn(module) for every module of the tree, children first, and once for one that stands there several times.
function Module:apply(fn, ...)
    options.argument(method(self, "apply", 1, ...), "fn", fn, { "callable" })
    local seen = {}
    walk_modules(self, "", nil, function(_, module)
        if seen[module] then return end
        seen[module] = true
        fn(module)
    end)
    return self
end

local function set_training(self, on)
    return self:apply(function(module) module.training = on end)
end

--- Training is switched on, or off with m:train(false).
---@param on boolean|nil
function Module:train(on, ...)
    local who = method(self, "train", 1, ...)
    if on == nil then on = true end
    return set_training(self, options.argument(who, "on", on, { "boolean" }))
end

--- Training is switched off: m:train(true) switches it on.
function Module:eval(...)
    method(self, "eval", 0, ...)
    return set_training(self, false)
end

-- The dtype or the device that `where` names, the other one nil.
local function place(who, where)
    options.argument(who, "where", where, { "string" })
    if FLOATING[where] then return where end
    if where:find("^cpu") or where:find("^cuda") then
        local problem = options.device_problem(where)
        if problem then fail("%s: where: %s", who, problem) end
        return nil, where
    end
    local hint = options.place_hint(where)
    local near = hint:match 'did you mean "(%w+)"'
    fail("%s: where: expected float32, bfloat16, float16, float64 or a device, got %q%s", who, where,
        near and (FLOATING[near] or near == "cuda") and hint or "")
end

-- What is wrong with the name of a dtype, or of a device, in a table for m:to.
local TO = {
    dtype = { "string", wrong = function(name)
        if not FLOATING[name] then
            return ("dtype: expected float32, bfloat16, float16 or float64, got %q%s"):format(name,
                options.place_hint(name))
        end
    end },
    device = { "string", wrong = options.device_problem },
}

-- A tensor with the dtype or on the device, itself where it is so already. Parameters remain the objects that they are,
-- and keep their gradients, a main_grad in float32 as it is; one that is stored quantized keeps its bytes, a dtype says
-- what they stand for.
local function convert(tensor, kind, dtype, device)
    local stays = dtype and (kind == "constant" or not FLOATING[tensor.dtype])
    if stays or tensor.dtype == dtype or tensor.device == device then return tensor end
    local new, grad, main
    if core.is_quantized(tensor) then
        new = device and core.quantized_on(tensor, device) or core.quantized_as(tensor, dtype)
    else
        new = tensor:detach():to(dtype or device)
    end
    new.requires_grad, grad, main = tensor.requires_grad, tensor.grad, tensor.main_grad
    if kind ~= "parameter" then return new end
    if grad then new.grad = grad:to(dtype or device) end
    if main then new.main_grad = dtype and main.dtype == "float32" and main or main:to(dtype or device) end
    core.become(tensor, new)
    return tensor
end

--- Converts parameters and buffers to a dtype or moves them to a device: m:to("bfloat16"), m:to("cuda"), m:to{ dtype =,
--- device = }, or both in either order. Buffers of whole numbers, and those that are not persistent, keep their dtype.
--- Parameters remain the same objects, also for an optimizer; its states stay where they are, so it is made after a
--- model has moved between devices.
---@param where string|table
---@param also string|nil
function Module:to(where, also, ...)
    local who = method(self, "to", 2, ...)
    if also ~= nil then
        local dtype, second = place(who, where), place(who, also)
        if (dtype == nil) == (second == nil) then
            fail("%s: %q and %q are both %s", who, where, also, dtype and "dtypes" or "devices")
        end
        self:to(also)
    end
    if type(where) == "table" then
        where = options.check(who, where, TO)
        if where.device then self:to(where.device) end
        return where.dtype and self:to(where.dtype) or self
    end
    local dtype, device = place(who, where)
    local moved = {}
    if device == "cuda:0" then device = "cuda" end
    walk(self, "", function(_, tensor, kind, holder, key)
        local new = moved[tensor] or convert(tensor, kind, dtype, device)
        moved[tensor], moved[new] = new, new
        holder[key] = new
    end)
    return self
end

--- Freezes all parameters with m:requires_grad_(false), or has them trained again. They remain parameters: they are
--- saved, and an optimizer leaves alone what has no gradient.
---@param on boolean|nil  true unless given
---@return table self
function Module:requires_grad_(on, ...)
    local who = method(self, "requires_grad_", 1, ...)
    if on == nil then on = true end
    options.argument(who, "on", on, { "boolean" })
    for _, parameter in ipairs(self:parameters()) do parameter.requires_grad = on end
    return self
end

--- A copy with parameters and buffers of its own, of the same values and modes: a target network, averaged weights, the
--- reference of a policy. What is shared within the module is shared within the copy; gradients are not copied. Tables
--- without a metatable are copied, too; functions and other objects in fields are the same ones.
---@return table copy
function Module:clone(...)
    method(self, "clone", 0, ...)
    return require "te.clone"(self)
end

function Module:zero_grad(...)
    method(self, "zero_grad", 0, ...)
    for _, parameter in ipairs(self:parameters()) do core.zero_gradient(parameter) end
    return self
end

function Module:num_parameters(...)
    method(self, "num_parameters", 0, ...)
    local n = 0
    for _, parameter in ipairs(self:parameters()) do n = n + parameter:numel() end
    return n
end

--- What stands between the parentheses when the module prints; classes override it.
function Module:describe() return "" end

local function print_tree(self, indent, depth, path)
    local lines = {}
    depth, path = inside(self, depth), path or {}
    path[depth] = self
    local children = tree.children(self, path, depth)
    if self[1] ~= nil then -- a container: also what is callable without being a module
        children = {}
        for i = 1, #self do children[i] = { name = tostring(i), module = self[i] } end
    end
    for _, child in ipairs(children) do
        local text = is_module(child.module) and print_tree(child.module, indent .. "  ", depth, path)
            or tostring(child.module)
        lines[#lines + 1] = ("%s  (%s): %s\n"):format(indent, child.name, text)
    end
    local head = ("%s(%s"):format(self.__name, self:describe())
    if #lines == 0 then return head .. ")" end
    return head .. "\n" .. table.concat(lines) .. indent .. ")"
end

function Module:__tostring() return print_tree(self, "") end

require "te.uncompiled"(each_entry, find_recipe_state, Module.parameters, named, Module.named_modules,
    Module.state_dict, Module.load_state_dict, Module.apply, Module.to)

-- te.Module itself is extended, never run; `is` travels with it so that one file defines both.
Module.is = is
return setmetatable(Module, { __call = instantiate, __tostring = function() return "class Module" end })
