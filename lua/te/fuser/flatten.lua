--- Containers as one list of operations with explicit wiring.
--
-- Nested Sequentials dissolve; a Residual becomes MakeExtraOutput, its branch, and an AddExtraInput that reads what was
-- set aside, so that nothing marks its border any more. Values are numbers: 1 is x, then seq_lens if given, then the
-- extra inputs. An item is
--
--     { op = module, x = value, extras = { values }, y = value, outs = { values }, lens = value or nil }
--
-- An operation with a `channel` hands its extra output to, or takes its extra input from, the operation with the same
-- channel later in the same container instead of the caller.

local te = require "te"
local fail = require "te.fail"
local inside = require "te.depth"
local options = require "te.options"
local tree = require "te.module_tree"
local units = require "te.fuser.script.unit"

local flatten = {}

local CALLABLE = { "callable" }

--- The value, which is to be module `position` of a container; an error where it cannot be.
function flatten.check_member(container, position, value)
    if options.reason(CALLABLE, value) then
        fail("%s: module %d: expected a module or something callable, got %s", container.__name, position,
            options.shown(value))
    end
    options.no_class(("%s: module %d"):format(container.__name, position), value)
    return value
end

--- The modules of a container in order: its array part, or what its method chain() lists. nil for anything else: a
--- container runs fuser.forward and nothing of its own.
local function members(m)
    if type(m) ~= "table" or m.forward ~= flatten.forward then return nil end
    return m.chain and m:chain() or m
end

-- Whether a module is called although it is a container: its hooks see what goes in and comes out.
local function is_closed(m) return type(m) == "table" and rawget(m, "_hooks") ~= nil end

--- Whether a module is what its modules make of x: not where it has a chain(), nor where its class's forward calls that
--- of a container and does more.
function flatten.is_plain(m) return m.forward == flatten.forward or m.chain ~= nil end

-- How many extra inputs an operation takes, or extra outputs it makes, by the name of the field.
local function count(op, field)
    return type(op) == "table" and op[field] and units.count(op, field) or 0
end

-- How many extra inputs a module takes from the caller, or extra outputs it gives; containers count their own.
local function count_extras(m, field, depth)
    if type(m) ~= "table" then return 0 end
    local list = members(m)
    if not list then return m.channel and 0 or count(m, field) end
    local n = 0
    depth = inside(m, depth)
    for i = 1, #list do n = n + count_extras(list[i], field, depth) end
    return n
end

local function count_extra_inputs(m, depth) return count_extras(m, "num_extra_inputs", depth) end

--- The same of a module whose members run: the forward of a class derived from a container may have called its own.
function flatten.takes(m)
    if flatten.is_plain(m) then return count_extra_inputs(m) end
    local n = 0
    for i = 1, #m do n = n + count_extra_inputs(m[i], inside(m)) end
    return n
end

-- Whether what is called wants seq_lens as its second argument. takes_seq_lens says so; where nothing does, the
-- parameters of a Lua function do, but not of an operation, nor where extra inputs would follow them.
local takes_seq_lens
function takes_seq_lens(op)
    local list = is_closed(op) and members(op)
    for i = 1, list and #list or 0 do
        if takes_seq_lens(list[i]) then return true end
    end
    if list then return false end
    local fn, own = op, 0
    if type(op) == "table" then
        if op.takes_seq_lens ~= nil or op.is_operation or (op.num_extra_inputs or 0) > 0 then
            return op.takes_seq_lens == true
        end
        fn, own = getmetatable(op).__call, 1
        if fn == te.Module.__call then fn = op.forward end
    end
    if type(fn) ~= "function" then return false end
    local info = debug and debug.getinfo(fn, "Su")
    return not info or info.what ~= "C" and (info.isvararg or info.nparams > own + 1)
end

local Walk = {}
Walk.__index = Walk

function Walk:value()
    self.n_values = self.n_values + 1
    return self.n_values
end

-- The next `n` of the caller's extra inputs.
function Walk:take(n)
    local values = {}
    for i = 1, n do values[i], self.next_extra = self.next_extra, self.next_extra + 1 end
    return values
end

function Walk:add(op, x, extras)
    local item = { op = op, x = x, extras = extras, y = self:value(), outs = {} }
    local outs = is_closed(op) and members(op) and count_extras(op, "num_extra_outputs")
        or count(op, "num_extra_outputs")
    for i = 1, outs do item.outs[i] = self:value() end
    if self.lens and takes_seq_lens(op) then item.lens, self.lens_taken = self.lens, true end
    self.items[#self.items + 1] = item
    return item
end

-- One operation with its extra inputs and outputs, through a channel or from and to the caller.
function Walk:operation(op, x, channels, container)
    local channel = type(op) == "table" and op.channel
    if not channel then
        local item = self:add(op, x, self:take(count_extra_inputs(op)))
        for _, out in ipairs(item.outs) do self.outputs[#self.outputs + 1] = out end
        return item.y
    end
    if count(op, "num_extra_inputs") == 0 then
        local item = self:add(op, x, {})
        if channels[channel] then fail("%s: two operations make channel %q", container.__name, channel) end
        channels[channel] = item.outs[1]
        return item.y
    end
    if not channels[channel] then
        fail("%s: nothing before %s makes channel %q", container.__name, op.__name, channel)
    end
    return self:add(op, x, { channels[channel] }).y
end

-- Remembers what a container held, for is_current. A module behind a gap would be left out unnoticed.
function Walk:enter(container, list)
    local n = tree.count(container, list)
    self.containers[#self.containers + 1] = container
    for i = 1, n do self.members[#self.members + 1] = list[i] end
end

-- The list's modules one after the other; the first is module `position` of the container. They are looked at
-- here as well as where they are put in, since Lua does not tell a container that one of its modules is
-- replaced by an assignment.
function Walk:chain(container, list, x, position)
    local channels = {}
    for i = 1, #list do
        x = self:module(flatten.check_member(container, position + i - 1, list[i]), x, channels, container)
    end
    return x
end

-- sum + what the branch makes of x. Where both are the same value, MakeExtraOutput splits it, as it
-- would be written by hand.
function Walk:branch(m, list, x, sum, position)
    if x == sum then
        local split = self:add(flatten.split, x, {})
        x, sum = split.y, split.outs[1]
    end
    local branch = self:chain(m, list, x, position)
    local drop = m:stochastic_depth()
    if drop then branch = self:add(drop, branch, {}).y end
    return self:add(flatten.sum, branch, { sum }).y
end

-- What adds x to a branch, and says where it does not fit.
local function make_sum()
    local Sum = te.AddExtraInput:extend("AddExtraInput")
    Sum.pure = true
    function Sum.check_input(_, branch, x)
        for i = 1, te.is_tensor(branch) and te.is_tensor(x) and math.min(branch:dim(), x:dim()) or 0 do
            local a, b = branch:size(-i), x:size(-i)
            if a ~= b and a ~= 1 and b ~= 1 then
                fail("te.Residual: what its modules make has shape %s, which does not add to x of %s",
                    options.shape(branch), options.shape(x))
            end
        end
    end
    function Sum:op_forward(_, branch, x)
        self:check_input(branch, x)
        return te.add(branch, x)
    end
    Sum.lower = te.AddExtraInput.lower
    return Sum()
end

function Walk:module(m, x, channels, parent)
    local list = not is_closed(m) and members(m)
    if not list then return self:operation(m, x, channels, parent) end
    return self:container(m, list, x)
end

function Walk:container(m, list, x)
    self:enter(m, list)
    if not m.is_residual then return self:chain(m, list, x, 1) end
    self.residuals[#self.residuals + 1] = { m, m.parallel, m:stochastic_depth() or false }
    if not m.parallel then return self:branch(m, list, x, x, 1) end
    local sum = x
    for i = 1, #list do sum = self:branch(m, { list[i] }, x, sum, i) end
    return sum
end

--- The items of a container, or of the chain() of any other module, run with n_extras extra inputs and, when has_lens,
--- lengths of packed sequences.
function flatten.module(m, n_extras, has_lens)
    local walk = setmetatable({ items = {}, outputs = {}, containers = {}, members = {}, residuals = {},
        n_values = 1 + n_extras }, Walk)
    if has_lens then walk.lens, walk.n_values = 2, walk.n_values + 1 end
    walk.next_extra = has_lens and 3 or 2
    walk.n_inputs = walk.n_values
    flatten.split = flatten.split or te.MakeExtraOutput()
    flatten.sum = flatten.sum or make_sum()
    walk.y = walk:container(m, m.chain and m:chain() or m, 1)
    if has_lens and not walk.lens_taken then
        fail("%s: takes %d extra inputs, got %d; nothing in it takes seq_lens", m.__name, n_extras, n_extras + 1)
    end
    return walk
end

--- Whether the containers still hold what they held.
function flatten.is_current(walk)
    local at = 0
    for _, container in ipairs(walk.containers) do
        local list, i = container.chain and container:chain() or container, 1
        while list[i] ~= nil do
            at = at + 1
            if walk.members[at] ~= list[i] then return false end
            i = i + 1
        end
    end
    for _, r in ipairs(walk.residuals) do
        if r[1].parallel ~= r[2] or (r[1].drop_path or false) ~= r[3] then return false end
    end
    return at == #walk.members
end

return flatten
