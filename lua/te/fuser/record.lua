--- From items to parts: what the engine plans as a group, and what is called as it is.
--
-- The recorder stands for `g` in the lower methods of operations (te.operation says what it offers).
-- Consecutive described operations form one group of the engine; an operation that does not describe itself is
-- called between two groups.
--
-- What lower methods hand around are symbols, tables; in steps and parts a value is its number.

local te = require "te"
local core = te._core
local fail = require "te.fail"
local mode = require "te.recipe.mode"
local operation = require "te.operation"
local options = require "te.options"
local joined = require "te.fuser.joined"

local record = {}

local Recorder = {}
Recorder.__index = Recorder

local function value(g)
    g.n_values = g.n_values + 1
    return g.n_values
end

local function symbol(g, v)
    local known = g.symbols[v]
    if not known then
        known = { value = v }
        g.symbols[v] = known
    end
    return known
end

-- The number of a value that `given` must be; `what` says which one.
local function number_of(g, who, what, given)
    local v = type(given) == "table" and rawget(given, "value")
    if v and g.symbols[v] == given then return v end
    fail("%s: %s: expected a value of this group, got %s", who, what, v and "one of another" or core.describe(given))
end

function Recorder:op(name, inputs, attributes, product)
    local who = ("%s: g:op(%s)"):format(self.who, options.shown(name))
    if type(name) ~= "userdata" then options.argument(who, "name", name, { "string" }) end
    local takes, reason = core.group_accepts(name)
    if not takes then return nil, reason end
    options.argument(who, "inputs", inputs, { "table" })
    local n = options.list(who, "inputs", inputs)
    if n > takes then fail("%s: inputs: at most %d are taken, got %d", who, takes, n) end
    local step = { name = name, inputs = {}, attributes = attributes, label = self.label, product = product,
        result = value(self), joined = self.joined, joined_by = self.joined_by }
    if self.unchecked then step.checked, self.unchecked = self.unchecked, nil end
    for i, input in ipairs(inputs) do -- numbers stay numbers, false stays false
        local number = type(input) == "number"
        step.inputs[i] = input and not number and number_of(self, who, "input " .. i, input)
        if number then
            step.numbers = step.numbers or {}
            step.numbers[i] = input
        end
    end
    self.steps[#self.steps + 1], self.joined = step, nil
    return symbol(self, step.result)
end

-- What makes a description hold no more (te.fuser looks): of { table, key, expected } another value there; with true as
-- a fourth entry, that there is one now or none; with { table, key } there, another value than at that place; with
-- "row" there, another tensor of one number.
local function check(g, ...) g.checks[#g.checks + 1] = { ... } end

-- The list in a field of a module has to stay the same one. Entries of a list are described one after the other.
local function check_list(g, module, field, list)
    local last = g.checks[#g.checks]
    if not (list and last and last[1] == list) then check(g, module, field, list) end
end

-- "weight.2" is the second entry of the list in the field `weight`.
local function holder_of(g, module, name)
    local field, index = name:match("^(.*)%.(%d+)$")
    if not field then return module, name end
    local list = rawget(module, field)
    check_list(g, module, field, list)
    return list, tonumber(index)
end

function Recorder:param(module, name)
    local holder, key = holder_of(self, module, name)
    if not holder then return false end
    local tensor = rawget(holder, key)
    check(self, holder, key, tensor ~= nil, true)
    if tensor == nil then return false end
    local known = self.parameters[tensor]
    local source = self.sources[known]
    if not known then
        known = value(self)
        self.parameters[tensor] = known
        self.sources[known] = { holder, key }
    elseif source[1] ~= holder or source[2] ~= key then -- one value as long as both places hold the same tensor
        check(self, holder, key, nil, source)
    end
    return symbol(self, known)
end

--- A parameter of one number for each of a row's. nil and a reason where it is one number, which the engine would take
--- for rows of any length.
function Recorder:along_row(module, name)
    local tensor = rawget(module, name)
    local single = tensor ~= nil and tensor:numel() == 1
    if single then return nil, ("a %s of one number would fit rows of any length"):format(name) end
    check(self, module, name, tensor, "row")
    return self:param(module, name)
end

--- Whether what products run under is chosen by their rows. Both answers hold as long as that stays so.
function Recorder:chooses_by_rows()
    self.lasting = { mode, "faster", mode.faster }
    return mode.faster
end

-- Appends the parameters "name.1" … "name.n" of a module to a list.
local function add_params(g, list, module, name, n)
    for i = 1, n do list[#list + 1] = g:param(module, name .. "." .. i) end
    return list
end

--- The products of a GroupedLinear, without its biases where these are scaled. `ways`: integers(module, sizes, device)
--- makes a tensor of what the caller gives as sizes, products(module, x, sizes) does the same by itself.
function Recorder:grouped_linear(module, x, sizes, ways)
    local n = module.num_groups
    local list = add_params(self, {}, module, "weight", n)
    if not module.bias then
        check_list(self, module, "bias", module.bias)
    elseif not module.scale_bias then
        add_params(self, list, module, "bias", n)
    end
    local y = self:op("grouped_linear", { x, sizes })
    local step = self.steps[#self.steps]
    step.list, step.convert = list, function(given, device) return ways.integers(module, given, device) end
    step.instead = function(rows, given) return ways.products(module, rows, given) end
    step.products = {}
    for i = 1, n do step.products[i] = mode.product(module, "weight." .. i) end
    return y
end

--- y with every row's bias added, that of its group, times the row's scale: the biases spread over the rows of their
--- groups, which a program reads. ways.add_scaled_biases(module, y, scales, sizes) does it by itself.
function Recorder:add_scaled_biases(module, y, scales, sizes, ways)
    local list = add_params(self, {}, module, "bias", module.num_groups)
    local spread = self:op("grouped_biases", { scales, sizes })
    local step = self.steps[#self.steps]
    step.list, step.instead = list, function(_, given) return given end
    local result = self:op(core.operation "addcmul_rows", { y, scales, spread })
    self.steps[#self.steps].instead = function(rows, numbers, given)
        return ways.add_scaled_biases(module, rows, numbers, given)
    end
    return result
end

--- The operation that is described next takes the last dimensions, of these sizes, for one; `name` is its module's.
function Recorder:join(sizes, name)
    self.joined, self.joined_by = sizes, name
    return true
end

--- The operation that was described last gives its backward its first input in a byte a value.
function Recorder:cache_quantized() self.steps[#self.steps].cached = true end

function Recorder:product(module, name) return mode.product(module, name) end

function Recorder:seq_lens() return self.lens and symbol(self, self.lens) or false end

--- For every row of x whether stochastic depth keeps it; `draw(x, lengths or nil)` does the same by itself.
function Recorder:rows_kept(draw, x, p)
    local kept = self:op("stochastic_depth_mask", { x, self:seq_lens() }, { p = p })
    self.steps[#self.steps].instead = draw
    return kept
end

--- Makes the description depend on the fields that the module names.
function Recorder:watch(module)
    for _, field in ipairs(operation.plan_fields(module)) do
        self.checks[#self.checks + 1] = { module, field, module[field] }
    end
end

-- Describes one item; false and a reason when it has to be called. Nothing is left behind then but that its options are
-- looked at: others may let it be described.
local function describe(g, item, values)
    local n_steps, n_checks, n_values, extras = #g.steps, #g.checks, g.n_values, {}
    for i, v in ipairs(item.extras) do extras[i] = symbol(g, values[v]) end
    g.label, g.lens, g.joined = item.label, item.lens and values[item.lens], nil
    local checks = type(item.op) == "table" and item.op.check_input
    g.unchecked = checks and { op = item.op, x = values[item.x], extra = values[item.extras[1]] }
    g.who = ("%s:lower"):format(type(item.op) == "table" and item.op.__name)
    local results = { operation.lower_child(item.op, g, symbol(g, values[item.x]), unpack(extras)) }
    if results[1] then
        for i, v in ipairs { item.y, unpack(item.outs) } do
            values[v] = number_of(g, g.who, "result " .. i, results[i])
        end
        local n = 1 + #item.outs
        if results[n + 1] ~= nil then fail("%s: expected %d results, got %d", g.who, n, #results) end
        return true
    end
    for i = #g.steps, n_steps + 1, -1 do g.steps[i] = nil end
    for v = n_values + 1, g.n_values do g.symbols[v] = nil end
    for i = #g.checks, n_checks + 1, -1 do g.checks[i] = nil end
    if operation.lowering(item.op) then g:watch(item.op) end
    return false, results[2]
end

local function call(g, item, values)
    local step = { item = item, x = values[item.x], extras = {}, label = item.label, results = { value(g) } }
    for i, v in ipairs(item.extras) do step.extras[i] = values[v] end
    step.lens = item.lens and values[item.lens]
    values[item.y] = step.results[1]
    for i, v in ipairs(item.outs) do
        step.results[1 + i] = value(g)
        values[v] = step.results[1 + i]
    end
    g.steps[#g.steps + 1] = step
end

-- Numbers of the steps that read each value last; the caller's outputs are read after all.
local function last_readers(g, outputs)
    local last = {}
    for i, step in ipairs(g.steps) do
        for _, v in ipairs(step.inputs or step.extras) do
            if v then last[v] = i end
        end
        if step.x then last[step.x] = i end
    end
    for _, v in ipairs(outputs) do last[v] = math.huge end
    return last
end

-- Numbers in the group of a step's weights and biases, nil of other steps.
local function list_of(step, numbers)
    if not step.list then return nil end
    local list = {}
    for i, parameter in ipairs(step.list) do list[i] = numbers[parameter.value] end
    return list
end

-- What recipes remember of each of a step's products, nil of other steps.
local function states_of(step)
    if not step.products then return nil end
    local states = {}
    for i, product in ipairs(step.products) do states[i] = product.state end
    return states
end

-- Steps first … last as a group of the engine.
local function make_group(g, first, last, readers)
    local part = { group = core.group_new(), inputs = {}, params = {}, outputs = {}, steps = {}, sources = g.sources }
    local numbers, entries = {}, {}
    local function enter(v)
        if numbers[v] or not v then return end
        numbers[v] = true
        entries[#entries + 1] = v
    end
    for i = first, last do -- activations stand before parameters
        for _, v in ipairs(g.steps[i].inputs) do if v and not g.sources[v] then enter(v) end end
        numbers[g.steps[i].result] = true
    end
    for i = first, last do
        for _, v in ipairs(g.steps[i].inputs) do if v and g.sources[v] then enter(v) end end
        for _, parameter in ipairs(g.steps[i].list or {}) do enter(parameter.value) end
    end
    for _, v in ipairs(entries) do
        local source = g.sources[v]
        numbers[v] = core.group_input(part.group, source ~= nil)
        local list = source and part.params or part.inputs
        list[#list + 1] = source or v
    end
    for i = first, last do
        local step, inputs = g.steps[i], {}
        part.steps[#part.steps + 1] = step
        for k, v in ipairs(step.inputs) do inputs[k] = v and numbers[v] end
        if step.convert then
            part.convert = part.convert or {}
            part.convert[step.inputs[2]] = step.convert
        end
        numbers[step.result] = core.group_op(part.group, step.label, step.name, inputs, step.attributes, step.numbers,
            step.product and step.product.state, step.cached, list_of(step, numbers), states_of(step))
        for _, product in ipairs(step.products or { step.product }) do
            part.products = part.products or {}
            part.products[#part.products + 1] = product
            if product.attends then part.lens = step.inputs[2] end
        end
    end
    for i = first, last do
        local v = g.steps[i].result
        if (readers[v] or 0) > last then
            core.group_output(part.group, numbers[v])
            part.outputs[#part.outputs + 1] = v
        end
    end
    return part
end

-- The last step that stands in a group with step `first`, and the sizes that their rows join: steps that go element
-- by element stand with any. Behind it no more of their results are read than a group can give; true if that ends it.
local function group_end(g, first, readers)
    local at, fixed, sizes, open, closing = first, false, nil, 0, {}
    local last, last_sizes = first, nil
    while g.steps[at] and not g.steps[at].item do
        local step = g.steps[at]
        if not joined.is_free(step, g.sources) then
            if fixed and not joined.same(step.joined, sizes) then break end
            fixed, sizes = true, step.joined
        end
        local read = readers[step.result] or 0
        if read > at then open, closing[read] = open + 1, (closing[read] or 0) + 1 end
        open = open - (closing[at] or 0)
        if open <= core.group_most_outputs then last, last_sizes = at, sizes end
        at = at + 1
    end
    return last, last_sizes, last < at - 1
end

--- Items as parts. With `fuse` false every item is called.
function record.parts(walk, fuse)
    local g = setmetatable({ steps = {}, checks = {}, parameters = {}, sources = {}, symbols = {}, reasons = {},
        n_values = walk.n_inputs }, Recorder)
    local values = {}
    for v = 1, walk.n_inputs do values[v] = v end
    for i, item in ipairs(walk.items) do
        item.label = i
        local described, reason = false, "fusion is switched off"
        if fuse then described, reason = describe(g, item, values) end
        g.reasons[i] = reason
        if not described then call(g, item, values) end
    end
    g.checks[#g.checks + 1] = g.lasting
    local outputs, handed = { values[walk.y] }, {} -- parameters that the caller gets
    for i, v in ipairs(walk.outputs) do outputs[1 + i] = values[v] end
    for _, v in ipairs(outputs) do handed[v] = g.sources[v] end

    local readers, parts, at = last_readers(g, outputs), {}, 1
    while at <= #g.steps do
        if g.steps[at].item then
            parts[#parts + 1] = g.steps[at]
        else
            local first, sizes, full = at, nil, nil
            at, sizes, full = group_end(g, first, readers)
            parts[#parts + 1] = make_group(g, first, at, readers)
            parts[#parts].joined, parts[#parts].full = sizes, full
        end
        parts[#parts].last_step = at
        at = at + 1
    end
    return { parts = parts, outputs = outputs, handed = handed, checks = g.checks, reasons = g.reasons,
        readers = readers, n_inputs = walk.n_inputs }
end

return record
