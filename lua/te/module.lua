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
local options = require "te.options"
local module_state = require "te.module_state"
local placing = require "te.module_placing"
local shards = require "te.distributed.shards"
local core = te._core
local is_module, parameters, walk, walk_modules = tree.is_module, tree.parameters, tree.walk, tree.walk_modules

local Module = { __name = "Module", is_module = true, training = true }
Module.__index = Module

local instance = options.instance

--- Whether `value` is an instance of `class` or of a class derived from it.
---@param value any
---@param class table
local function is(value, class, ...)
    if select("#", ...) > 0 then options.last("te.is", 2, ...) end
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
function Module:extend(name, ...)
    if type(self) ~= "table" then options.method("Module:extend", self) end
    options.argument("Module:extend", "name", name, { "string" })
    options.last("Module:extend", 1, ...)
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

-- A module with hooks, between these.
local function run(self, ...)
    if tree.may_run(self) then return self:forward(...) end
    return tree.checked(self, self:forward(...))
end

function Module:__call(...)
    if tree.entering then return tree.entering(self, Module.__call, self, ...) end
    if rawget(self, "_hooks") then return require("te.hooks").around(self, run, ...) end
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

--- Makes `tensor` a parameter named `name`: it requires a gradient, is saved and is optimized.
function Module:register_parameter(name, tensor, ...)
    check_name(method(self, "register_parameter", 2, ...), name)
    if not te.is_tensor(tensor) then
        fail("%s: parameter %s: expected a tensor, got %s", self.__name, tostring(name), core.describe(tensor))
    end
    if not placing.floating[tensor.dtype] then
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
    return module_state.of(self)
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
    local missing, unexpected = module_state.load(self, who, state, strict)
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

--- Converts parameters and buffers to a dtype or moves them to a device: m:to("bfloat16"), m:to("cuda"), m:to{ dtype =,
--- device = }, or both in either order. Buffers of whole numbers, and those that are not persistent, keep their dtype.
--- Parameters remain the same objects, also for an optimizer; its states stay where they are, so it is made after a
--- model has moved between devices.
---@param where string|table
---@param also string|nil
function Module:to(where, also, ...)
    local who = method(self, "to", 2, ...)
    if also ~= nil then
        local dtype, second = placing.check(who, where), placing.check(who, also)
        if (dtype == nil) == (second == nil) then
            fail("%s: %q and %q are both %s", who, where, also, dtype and "dtypes" or "devices")
        end
        self:to(also)
    end
    if type(where) == "table" then
        where = options.check(who, where, placing.OPTIONS)
        if where.device then self:to(where.device) end
        return where.dtype and self:to(where.dtype) or self
    end
    placing.move(self, placing.check(who, where))
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

--- Calls fn(module, args, results …) after every call of the module; args is the list of its arguments. What fn returns
--- takes the place of the results, unless it is nil. It runs by itself, unfused, as long as it has hooks.
---@param fn fun(module: te.Module, args: table, ...): any
---@return te.Hook hook  hook:remove() takes it off
function Module:register_forward_hook(fn, ...)
    return require("te.hooks").add(method(self, "register_forward_hook", 1, ...), self, "after", fn)
end

--- Calls fn(module, args) before every call of the module. What fn returns takes the place of the arguments, unless it
--- is nil.
---@param fn fun(module: te.Module, args: table): any
---@return te.Hook hook  hook:remove() takes it off
function Module:register_forward_pre_hook(fn, ...)
    return require("te.hooks").add(method(self, "register_forward_pre_hook", 1, ...), self, "before", fn)
end

function Module:zero_grad(...)
    method(self, "zero_grad", 0, ...)
    for _, parameter in ipairs(self:parameters()) do
        local shard = shards.of[parameter]
        core.zero_gradient(parameter)
        if shard then shard:zero_gradient() end
    end
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

-- What stands in the array part of a container, also what is callable without being a module, and where a gap begins.
local function entries(self)
    local positions, list, last = {}, {}, 0
    for key in next, self do
        if type(key) == "number" and key > 0 then positions[#positions + 1] = key end
    end
    table.sort(positions)
    for _, position in ipairs(positions) do
        if position > last + 1 then list[#list + 1] = { name = tostring(last + 1) } end
        list[#list + 1] = { name = tostring(position), module = self[position] }
        last = position
    end
    return list
end

local function print_tree(self, indent, depth, path)
    local lines = {}
    depth, path = inside(self, depth), path or {}
    path[depth] = self
    for _, child in ipairs(self[1] ~= nil and entries(self) or tree.children(self, path, depth, true)) do
        local text = is_module(child.module) and print_tree(child.module, indent .. "  ", depth, path)
            or tostring(child.module)
        lines[#lines + 1] = ("%s  (%s): %s\n"):format(indent, child.name, text)
    end
    local head = ("%s(%s"):format(self.__name, self:describe())
    if #lines == 0 then return head .. ")" end
    return head .. "\n" .. table.concat(lines) .. indent .. ")"
end

function Module:__tostring() return print_tree(self, "") end

require "te.uncompiled"(each_entry, Module.parameters, named, Module.named_modules, Module.apply)

-- te.Module itself is extended, never run; `is` travels with it so that one file defines both.
Module.is = is
return setmetatable(Module, { __call = instantiate, __tostring = function() return "class Module" end })
