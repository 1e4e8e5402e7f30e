--- What seq:explain(x) returns: the steps of a container's plan, what each moves and computes, and why neighbours
--- did not become one step.
--
--     plan.forward, plan.backward   lists of steps in order: name, ops (names of the basic operations), kernels, reads
--                                   and writes (bytes of tensors), bytes, flops
--     plan:floors()                 the plan with step.floor, seconds that each takes at least on this machine,
--                                   measured when first asked for (te.rates)
--     plan.reasons                  { from =, to =, reason = } for every pair of neighbours in different steps
--
-- Bytes count every tensor that a step reads or writes once; of what is called, the least that it can move.
-- tostring(plan) is a table, plan:dot() a Graphviz graph,
-- plan:svg() a picture, plan:json() text for other programs.

local te = require "te"
local options = require "te.options"
local rates = require "te.rates"
local mode = require "te.recipe.mode"
local core = te._core
local script = require "te.fuser.script"
local joined = require "te.fuser.joined"
local is_module = require("te.module_tree").is_module

local Plan = {}
Plan.__index = Plan
options.kinds.Plan = Plan

-- Names -----------------------------------------------------------------------------------------------------------

local function op_name(item)
    local op = item.op
    if type(op) ~= "table" then return "function" end
    return op.__name
end

-- "LayerNorm", or "MultiHeadedSelfAttention.linear" for one of several engine operations of a module.
local function part_names(step, items, counts)
    local ops, seen = {}, {}
    for i, label in ipairs(step.labels) do
        local name = op_name(items[label])
        if counts[label] > 1 then name = name .. "." .. step.names[i] end
        if not seen[label .. name] then ops[#ops + 1] = name end
        seen[label .. name] = true
    end
    return ops
end

local function count_nodes(steps)
    local counts = {}
    for _, step in ipairs(steps) do
        if step.pass == "forward" and step.kind ~= "quantize" then
            for _, label in ipairs(step.labels) do counts[label] = (counts[label] or 0) + 1 end
        end
    end
    return counts
end

-- Building --------------------------------------------------------------------------------------------------------

local function add_step(plan, step, ops)
    local list = plan[step.pass]
    list[#list + 1] = { name = table.concat(ops, " + "), ops = ops, kernels = { step.kernel }, kind = step.kind,
        reads = step.reads, writes = step.writes, bytes = step.reads + step.writes, flops = step.flops }
end

local SIZES = { float64 = 8, int64 = 8, float32 = 4, int32 = 4, bfloat16 = 2, float16 = 2 }

local function bytes_of(...)
    local bytes = 0
    for i = 1, select("#", ...) do
        local t = select(i, ...)
        if te.is_tensor(t) then bytes = bytes + t:numel() * (SIZES[t.dtype] or 1) end
    end
    return bytes
end

-- The tensors that a called part reads: its inputs and the parameters of its operations.
local function read_by(part, env)
    local list, op = { env[part.x] }, part.item.op
    for _, v in ipairs(part.extras) do list[#list + 1] = env[v] end
    local steps = script.is(op) and op.steps or { { op = op } }
    for _, step in ipairs(steps) do
        if type(step.op) == "table" and step.op.parameters then
            for _, parameter in ipairs(step.op:parameters()) do list[#list + 1] = parameter end
        end
    end
    return list
end

-- A called part and its backward, with what they move at least: inputs and parameters, results; gradients of
-- results, and of inputs and parameters that take one. Results are known where the part has run. Returns the
-- backward's step, if there is one.
local function add_called(plan, part, reason, env)
    local name, read, results = op_name(part.item), read_by(part, env), {}
    for i, v in ipairs(part.results or {}) do results[i] = env[v] end
    local op = part.item.op
    if type(op) == "table" and op.is_view then read, results = {}, {} end
    local step = { pass = "forward", kernel = "call", kind = "call", reads = bytes_of(unpack(read)),
        writes = bytes_of(unpack(results)), flops = 0 }
    local function ops(pass) return script.is(op) and op:ops(pass) or { name } end
    add_step(plan, step, ops "forward")
    plan.reasons[#plan.reasons + 1] = { from = name, to = name,
        reason = "called: " .. (reason or "it is no operation") }
    local wanted = {}
    for _, t in ipairs(read) do
        if te.is_tensor(t) and t.requires_grad and core.grad_enabled() then wanted[#wanted + 1] = t end
    end
    if #wanted == 0 then return nil end
    return { pass = "backward", kernel = "call", kind = "call", reads = step.writes, writes = bytes_of(unpack(wanted)),
        flops = 0 }, ops "backward"
end

-- An operation of a group that cannot be planned, which is called by itself.
local function add_single(plan, item, reason)
    local name = op_name(item)
    add_step(plan, { pass = "forward", kernel = "call", kind = "call", reads = 0, writes = 0, flops = 0 }, { name })
    plan.reasons[#plan.reasons + 1] = { from = name, to = name, reason = "called: " .. reason }
end

local function add_group(plan, steps, splits, items)
    local counts, backward = count_nodes(steps), {}
    for _, step in ipairs(steps) do
        if step.pass == "forward" then
            add_step(plan, step, part_names(step, items, counts))
        else
            backward[#backward + 1] = { step, part_names(step, items, counts) }
        end
    end
    for _, split in ipairs(splits) do
        local function name(label, node)
            return op_name(items[label]) .. ((counts[label] or 0) > 1 and "." .. node or "")
        end
        plan.reasons[#plan.reasons + 1] =
            { from = name(split.from, split.from_name), to = name(split.to, split.to_name), reason = split.reason }
    end
    return backward
end

-- What te.autocast{ when = "faster" } decided.
local function add_choices(plan, products)
    for i, product in ipairs(products) do
        if product.choice then
            plan.choices[#plan.choices + 1] = ("%s.%s, product %d of %d: %s"):format(product.module,
                product.name, i, #products, product.choice)
        end
    end
end

local function arguments(part, env)
    if part.joined then return joined.arguments(part, env) end
    local args, n = {}, #part.inputs
    for k, v in ipairs(part.inputs) do args[k] = env[v] end
    for k, param in ipairs(part.params) do args[n + k] = rawget(param[1], param[2]) end
    return args
end

-- Two groups next to each other have rows of different dimensions, or the first gives all results that it can.
local function add_border(plan, part, after, items)
    if not (after and after.group) then return end
    local reason = "rows of several dimensions beside rows of one"
    if part.full then
        reason = ("at most %d results of what is planned together are read behind it"):format(core.group_most_outputs)
    end
    plan.reasons[#plan.reasons + 1] = { from = op_name(items[part.steps[#part.steps].label]),
        to = op_name(items[after.steps[1].label]), reason = reason }
end

-- What the steps compute in, for their floors: te.autocast's dtype, that of floating-point rows, or that of what the
-- modules hold where they take ids.
local function dtype_of(x, items)
    if core.compute_dtype() then return core.compute_dtype() end
    if te.is_tensor(x) and x.dtype:find "float" then return x.dtype end
    for _, item in ipairs(items) do
        local first = is_module(item.op) and item.op:parameters()[1]
        if first then return first.dtype end
    end
    return "float32"
end

-- The plan of a program (te.fuser) for these inputs. `step` runs a part and is only called for scripts, and where a
-- later part needs the results of an earlier one.
function Plan.of(program, env, step)
    local plan = setmetatable({ forward = {}, backward = {}, reasons = {}, choices = {} }, Plan)
    plan.device = te.is_tensor(env[1]) and env[1].device or "cpu"
    local items, backward = program.walk.items, {}
    plan.dtype = dtype_of(env[1], items)
    for i, part in ipairs(program.parts) do
        if part.group then
            for v, convert in pairs(part.convert or {}) do env[v] = convert(env[v], env[part.inputs[1]].device) end
            if mode.on and part.products then
                mode.prepare(part.products, env[part.inputs[1]], env[part.lens])
                add_choices(plan, part.products)
            end
            local args = arguments(part, env)
            local steps, splits = nil, joined.REFUSAL
            if args then steps, splits = core.group_explain(part.group, args) end
            add_border(plan, part, program.parts[i + 1], items)
            if steps then
                backward[#backward + 1] = add_group(plan, steps, splits, items)
            else
                for _, one in ipairs(part.steps) do add_single(plan, items[one.label], splits) end
            end
        end
        local scripted = not part.group and script.is(part.item.op)
        if i < #program.parts or scripted then step(part, env) end
        if not part.group then
            local reason = not scripted and part.item.reason or program.reasons[part.item.label]
            backward[#backward + 1] = { { add_called(plan, part, reason, env) } }
        end
    end
    for i = #backward, 1, -1 do
        for _, entry in ipairs(backward[i]) do
            if entry[1] then add_step(plan, entry[1], entry[2]) end
        end
    end
    return plan
end

-- As a table ------------------------------------------------------------------------------------------------------

local UNITS = { { 1e9, "G" }, { 1e6, "M" }, { 1e3, "k" } }

local function amount(number)
    for _, unit in ipairs(UNITS) do
        if number >= unit[1] then return ("%.3g %s"):format(number / unit[1], unit[2]) end
    end
    return ("%.3g "):format(number)
end

--- Adds to every step the least time that it can take here; a printed plan then shows it.
---@return te.Plan
function Plan:floors(...)
    options.method("Plan:floors", self, Plan)
    options.last("Plan:floors", 0, ...)
    for _, pass in ipairs { "forward", "backward" } do
        for _, step in ipairs(self[pass]) do
            step.floor = rates.floor(self.device, step.kind, self.dtype, step.bytes, step.flops)
        end
    end
    return self
end

local function microseconds(seconds) return seconds and ("%.1f us"):format(seconds * 1e6) end

local function rows_of(steps)
    local rows = {}
    for i, step in ipairs(steps) do
        rows[i] = { tostring(i), step.name, step.kernels[1], amount(step.reads) .. "B", amount(step.writes) .. "B",
            amount(step.flops) .. "FLOP", microseconds(step.floor) }
    end
    return rows
end

local function aligned(rows)
    local widths, lines = {}, {}
    for _, row in ipairs(rows) do
        for i, cell in ipairs(row) do widths[i] = math.max(widths[i] or 0, #cell) end
    end
    for _, row in ipairs(rows) do
        local cells = {}
        for i, cell in ipairs(row) do
            cells[i] = i <= 3 and i > 1 and cell .. (" "):rep(widths[i] - #cell) or (" "):rep(widths[i] - #cell) .. cell
        end
        lines[#lines + 1] = (table.concat(cells, "  "):gsub("%s+$", ""))
    end
    return lines
end

function Plan:__tostring()
    local lines = {}
    for _, pass in ipairs { "forward", "backward" } do
        if #self[pass] > 0 then
            local rows, total = rows_of(self[pass]), { 0, 0, 0, 0 }
            for _, step in ipairs(self[pass]) do
                total = { total[1] + step.reads, total[2] + step.writes, total[3] + step.flops,
                    total[4] + (step.floor or 0) }
            end
            local timed = self[pass][1].floor ~= nil
            table.insert(rows, 1, { "#", "operations", "kernel", "reads", "writes", "work", timed and "floor" or nil })
            rows[#rows + 1] = { "", "sum", "", amount(total[1]) .. "B", amount(total[2]) .. "B",
                amount(total[3]) .. "FLOP", timed and microseconds(total[4]) or nil }
            lines[#lines + 1] = pass
            for _, line in ipairs(aligned(rows)) do lines[#lines + 1] = "  " .. line end
        end
    end
    if #self.choices > 0 then lines[#lines + 1] = "precision, when faster" end
    for _, choice in ipairs(self.choices) do lines[#lines + 1] = "  " .. choice end
    if #self.reasons > 0 then lines[#lines + 1] = "not fused" end
    local seen = {}
    for _, r in ipairs(self.reasons) do
        local line = r.from == r.to and ("  %s: %s"):format(r.from, r.reason)
            or ("  %s | %s: %s"):format(r.from, r.to, r.reason)
        if not seen[line] then lines[#lines + 1] = line end
        seen[line] = true
    end
    return table.concat(lines, "\n")
end

-- For other programs ----------------------------------------------------------------------------------------------

local function quoted(text) return '"' .. text:gsub('[\\"]', "\\%0"):gsub("\n", "\\n") .. '"' end

--- A Graphviz graph: one box per step, forward above backward.
---@return string
function Plan:dot(...)
    options.method("Plan:dot", self, Plan)
    options.last("Plan:dot", 0, ...)
    local lines = { "digraph plan {", "  rankdir = TB; node [shape = box, fontname = \"sans-serif\"];" }
    for _, pass in ipairs { "forward", "backward" } do
        for i, step in ipairs(self[pass]) do
            lines[#lines + 1] = ("  %s%d [label = %s];"):format(pass, i,
                quoted(("%s\n%s, %sB"):format(step.name, step.kernels[1], amount(step.bytes))))
            if i > 1 then lines[#lines + 1] = ("  %s%d -> %s%d;"):format(pass, i - 1, pass, i) end
        end
    end
    lines[#lines + 1] = "}"
    return table.concat(lines, "\n") .. "\n"
end

local function json(value)
    if type(value) == "string" then return quoted(value) end
    if type(value) == "number" then return ("%.17g"):format(value) end
    local parts = {}
    if #value > 0 or next(value) == nil then
        for i, entry in ipairs(value) do parts[i] = json(entry) end
        return "[" .. table.concat(parts, ", ") .. "]"
    end
    local keys = {}
    for key in pairs(value) do keys[#keys + 1] = key end
    table.sort(keys)
    for i, key in ipairs(keys) do parts[i] = quoted(key) .. ": " .. json(value[key]) end
    return "{" .. table.concat(parts, ", ") .. "}"
end

--- The plan as JSON: forward, backward, reasons.
---@return string
function Plan:json(...)
    options.method("Plan:json", self, Plan)
    options.last("Plan:json", 0, ...)
    return json({ forward = self.forward, backward = self.backward, reasons = self.reasons })
end

--- A picture, forward in the left column and backward in the right one, readable on light and on dark ground. The width
--- of a bar is a step's share of the bytes of its pass.
---@return string
function Plan:svg(...)
    options.method("Plan:svg", self, Plan)
    options.last("Plan:svg", 0, ...)
    return require("te.fuser.picture")(self, amount)
end

return Plan
