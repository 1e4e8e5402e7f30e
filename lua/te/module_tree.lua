--- What stands in a module, and in those in it: modules, parameters and buffers with their names. te.module says which
--- fields count; everything that walks a model does it here, and looks at what stands in the fields now.

local te = require "te"
local fail = require "te.fail"
local inside = require "te.depth"
local options = require "te.options"
local core = te._core

local tree = {}

function tree.is_module(value)
    local class = type(value) == "table" and getmetatable(value)
    return type(class) == "table" and class.is_module == true
end

-- Tensors that have been seen as parameters: they stay that when they are frozen.
local parameters = setmetatable({}, { __mode = "k" })

tree.parameters = parameters

-- What an instance may have instead of its class's: plans are made of what runs.
local RUNS = { forward = true, op_forward = true, op_backward = true, lower = true, chain = true }

tree.replaced = 0

-- While names of modules are asked for and none is running: entering(module, fn, ...) runs fn(...), a call of it
-- (te.recipe.names).
tree.entering = nil

--- Counts instances that are given such a field.
function tree.note_field(name) if RUNS[name] then tree.replaced = tree.replaced + 1 end end

-- Whether a field may hold the tensor that stands where a parameter was. One that was computed of others may: a forward
-- of one's own makes it, and without gradients the next one is like any tensor. So such fields are noted among names.
local function may_hold(self, name, value)
    if not te.is_tensor(value) or self._parameters[name] == true then return true end
    if not value.requires_grad then return false end
    if value.is_leaf then
        parameters[value] = true
    elseif type(name) == "string" then
        self._parameters[name] = true
    end
    return true
end

-- Raises where a tensor that cannot be trained took the place of a parameter: Lua does not tell a module that one of
-- its fields is assigned anew, so it is found where parameters are asked for, or run with gradients.
local function check_parameter(self, name, value)
    if not may_hold(self, name, value) then
        fail("%s: field %s: a tensor that requires no gradient was assigned over a parameter; write its values with "
            .. "te.no_grad(p.copy_, p, values), or assign one with requires_grad = true (a field that is set to nil "
            .. "first holds a parameter no more)", self.__name, name)
    end
    return true
end

--- Notes that a field holds a parameter.
function tree.register(self, name, tensor)
    self._registered[name], parameters[tensor] = "parameter", true
    for _, known in ipairs(self._parameters) do
        if known == name then return end
    end
    table.insert(self._parameters, name)
end

local function look_at_all(self, look)
    for name, kind in next, self._registered do
        local value = kind == "parameter" and rawget(self, name)
        if value and not parameters[value] and not look(self, name, value) then return false end
    end
    return true
end

--- Whether all parameters of a module may stand where they do. Every call of a module comes by here, most of modules
--- with two parameters at most: for these there is no loop, which would keep the call from being compiled.
function tree.may_run(self)
    local names = self._parameters
    local first, second = names[1], names[2]
    if not first or parameters[rawget(self, first)] and not names[3]
        and (not second or parameters[rawget(self, second)]) then return true end
    return look_at_all(self, may_hold)
end

--- Returns what a module gave that was not to run as it stood; raises unless its forward has put that right, or ran
--- without gradients.
function tree.checked(self, ...)
    if core.grad_enabled() then look_at_all(self, check_parameter) end
    return ...
end

--- What stands at a key of a module, or of a table in it, as programs read it.
function tree.parameter_in(holder, key)
    local value = rawget(holder, key)
    if value == nil or parameters[value] then return value end
    local kinds = rawget(holder, "_registered")
    if kinds and kinds[key] == "parameter" and core.grad_enabled() then check_parameter(holder, key, value) end
    return value
end

local function kind_of(self, name, value)
    if tree.is_module(value) then return "module" end
    if not te.is_tensor(value) then return nil end
    local kind = self._registered[name]
    if kind or not (value.requires_grad and value.is_leaf) then return kind end
    parameters[value] = true
    return "parameter"
end

-- The same in tables, where nothing has a name of its own.
local function kind_in_table(value)
    if tree.is_module(value) then return "module" end
    if not te.is_tensor(value) then return nil end
    parameters[value] = parameters[value] or (value.requires_grad and value.is_leaf) or nil
    return parameters[value] and "parameter"
end

local RANK = { number = 1, string = 2 }

local function stands_before(a, b)
    local first, second = RANK[type(a)] or 3, RANK[type(b)] or 3
    if first ~= second or first == 3 then return first < second end
    return a < b
end

-- Keys of a table at which something may stand that counts, numbers in order and then texts in order; nil: none.
local function keys_of(holder)
    local keys, n, sorted = nil, 0, true
    for key, value in next, holder do
        local kind = type(value)
        if (kind == "table" or kind == "userdata") and (RANK[type(key)] or type(key) == "boolean") then
            keys, sorted = keys or {}, sorted and (n == 0 or stands_before(keys[n], key))
            n = n + 1
            keys[n] = key
        end
    end
    if not sorted then table.sort(keys, stands_before) end
    return keys
end

--- Why a text cannot be part of a name, nil where it can.
function tree.wrong_text(text)
    return (text == "" or text:find(".", 1, true)) and 'a text in a name is not empty and has no "."' or nil
end

-- The same of any key of a table.
local function wrong_key(holder, key)
    local number, wrong = tonumber(key), nil
    if type(key) == "string" then
        wrong = tree.wrong_text(key)
            or number and tostring(number) == key and holder[number] ~= nil and "the number has the same name"
    elseif type(key) ~= "number" or key % 1 ~= 0 or math.abs(key) >= 1e14 then
        wrong = "names are made of whole numbers and texts"
    end
    return wrong and ("key %s: %s"):format(options.shown(key), wrong) or nil
end

local function is_among(path, n, module)
    for i = 1, n do
        if path[i] == module then return true end
    end
    return false
end

-- The name of what stands in field `field` under the keys where `depth` tables are looked at now.
local function name_of(field, stack, depth)
    local keys = { field }
    for i = 1, depth do keys[i + 1] = stack[i].key end
    return table.concat(keys, ".")
end

-- Calls visit(kind, name, value, holder, key) for all modules and parameters in the tables that begin with `root`, each
-- table once: they may refer to one another. Of modules those are left out that are being walked, the first `level` of
-- `path`: what leads back to them does not hold them. What has no name is an error, unless `skips`.
local function look_in(self, field, root, visit, path, level, skips)
    local keys = keys_of(root)
    if not keys then return end
    local seen, stack, depth = { [root] = true }, { { keys = keys, at = 0, table = root } }, 1
    while depth > 0 do
        local frame = stack[depth]
        local holder, key = frame.table, frame.keys[frame.at + 1]
        frame.at, frame.key = frame.at + 1, key
        local value = key ~= nil and holder[key]
        local kind = value and kind_in_table(value)
        if key == nil then
            stack[depth], depth = nil, depth - 1
        elseif kind and not is_among(path, level, value) then
            local wrong = frame.wrong or wrong_key(holder, key)
            if wrong and not skips then
                fail("%s: field %s: a %s has no name, because of %s", self.__name, field, kind, wrong)
            elseif not wrong then
                visit(kind, name_of(field, stack, depth), value, holder, key)
            end
        elseif not kind and type(value) == "table" and not getmetatable(value) and not seen[value] then
            seen[value], keys = true, keys_of(value)
            if keys then
                depth = depth + 1
                stack[depth] = { keys = keys, at = 0, table = value, wrong = frame.wrong or wrong_key(holder, key) }
            end
        end
    end
end

-- The length of an array part, up to the first gap.
local function length(list)
    local n = 0
    while rawget(list, n + 1) ~= nil do n = n + 1 end
    return n
end

-- For an entry behind the first n, where what counts them would leave it out.
local function refuse_behind_gap(self, kind, key, n)
    fail("%s: %s %g stands behind a gap: there is no %s %d", self.__name, kind, key, kind, n + 1)
end

--- How many modules stand in a container's list of them; raises where some stand behind a gap.
function tree.count(self, list)
    local n = length(list)
    for key in next, list do
        if type(key) == "number" and key > n then refuse_behind_gap(self, "module", key, n) end
    end
    return n
end

local function nothing() end

tree.SKIP = "skip"

-- Calls visit(kind, name, value, holder, key) for every parameter, buffer and module directly in `self`. Raises where
-- some stand behind a gap of the array part, or with past_gaps = true visits them as well. With tree.SKIP it leaves
-- these out, and what cannot have a name.
function tree.each(self, visit, path, level, past_gaps)
    local skips = past_gaps == tree.SKIP
    local function look(name, value, key, found)
        local kind = kind_of(self, name, value)
        local wrong = kind and key == name and wrong_key(self, key)
        if wrong and not skips then
            fail("%s: a %s has no name, because of %s", self.__name, kind, wrong)
        elseif kind and not wrong then
            found(kind, name, value, self, key)
        elseif type(value) == "table" and not getmetatable(value) then
            look_in(self, name, value, found, path, level, skips)
        end
    end
    for _, name in ipairs(self._fields) do look(name, rawget(self, name), name, visit) end
    local n = length(self)
    for i = 1, n do look(tostring(i), self[i], i, visit) end
    for key, value in next, self do
        if type(key) == "number" and key > n then
            look(tostring(key), value, key, skips and nothing or past_gaps and visit
                or function(kind) refuse_behind_gap(self, kind, key, n) end)
        end
    end
end

-- Calls visit(name, tensor, kind, holder, key, module) for every tensor in the tree, under its full name. A module that
-- stands in several places is entered every time, so a visitor sees all the names of a shared tensor.
function tree.walk(self, prefix, visit, depth, path)
    depth, path = inside(self, depth), path or {}
    path[depth] = self
    tree.each(self, function(kind, name, value, holder, key)
        if kind == "module" then
            tree.walk(value, prefix .. name .. ".", visit, depth, path)
        else
            if kind == "parameter" and not parameters[value] then check_parameter(self, name, value) end
            visit(prefix .. name, value, kind, holder, key, self)
        end
    end, path, depth)
end

-- The modules directly in this one, as a list of { name =, module = }. past_gaps: see tree.each.
function tree.children(self, path, level, past_gaps)
    local list = {}
    tree.each(self, function(kind, name, value)
        if kind == "module" then list[#list + 1] = { name = name, module = value } end
    end, path, level, past_gaps)
    return list
end

-- Calls before(prefix, module), if given, then after(prefix, module), for every module of the tree, as often as it
-- stands there: the one ahead of what the module holds, the other behind.
function tree.walk_modules(self, prefix, before, after, depth, path)
    depth, path = inside(self, depth), path or {}
    path[depth] = self
    if before then before(prefix, self) end
    for _, child in ipairs(tree.children(self, path, depth)) do
        tree.walk_modules(child.module, prefix .. child.name .. ".", before, after, depth, path)
    end
    if after then after(prefix, self) end
end

require "te.uncompiled"(keys_of, look_in, tree.each, tree.walk, tree.children, tree.walk_modules)

return tree
