--- Tracing: runs a function with symbols in place of tensors and makes an operation of what it did.
--
-- Functions of the engine hand a call with a symbol among its arguments to `__te_operation` of the symbol's metatable;
-- so do methods and operators. The formula of the operation is put over the nodes of its arguments
-- (te.pointwise.formula).

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local new_graph = require "te.pointwise.formula"

local core = te._core

-- One tracing: { who =, where =, graph =, along = what it reduces along rows: sets of the inputs behind it }.
local Symbol = {} -- the metatable of symbols, tables { _node =, _tracing =, _truth =, _row =, _reads =, _reduced = }

local function is_symbol(value) return getmetatable(value) == Symbol end

-- `row`: there is one value per row; `reads`: the inputs whose elements it is made of; `reduced`: something that was
-- reduced along rows has a part in it.
local function symbol(tracing, node, truth, row, reads, reduced)
    return setmetatable({ _node = node, _tracing = tracing, _truth = truth or false, _row = row or false,
        _reads = reads or {}, _reduced = reduced or false }, Symbol)
end

-- Raises a mistake of the traced function at its line.
local function refuse(tracing, message, ...)
    tracing.explained = true
    fail("%s: %s: " .. message, tracing.who, tracing.where, ...)
end

-- Arguments ---------------------------------------------------------------------------------------------------------

local function describe(value)
    if te.is_tensor(value) then return "a tensor " .. options.shape(value) end
    if is_symbol(value) then return "a traced value" end
    return type(value) == "nil" and "nothing" or "a " .. type(value)
end

-- The node of an argument that stands for a tensor.
local function operand(tracing, name, parameter, value)
    if is_symbol(value) then
        if value._tracing ~= tracing then
            refuse(tracing, "te.%s: %s: a value of another function that was traced", name, parameter.name)
        end
        return value
    end
    if type(value) == "number" then return symbol(tracing, tracing.graph:number(value), false, true) end
    if te.is_tensor(value) then
        refuse(tracing, "te.%s: %s is %s from outside; make it an argument, or one of the params of te.Pointwise", name,
            parameter.name, describe(value))
    end
    refuse(tracing, "te.%s: %s: expected a traced value or a number, got %s", name, parameter.name, describe(value))
end

-- The value of an attribute as a number.
local function attribute(tracing, name, parameter, value)
    if parameter.type == "bool" and type(value) == "boolean" then return value and 1 or 0 end
    if parameter.type == "bool" or type(value) ~= "number" then
        refuse(tracing, "te.%s: %s: expected a %s, got %s", name, parameter.name,
            parameter.type == "bool" and "boolean" or "number", describe(value))
    end
    return value
end

-- Arguments by the names of parameters; the last one may be a table of options.
local function bind(tracing, name, parameters, ...)
    local given, n, bound = { ... }, select("#", ...), {}
    local last = given[n]
    if type(last) == "table" and not getmetatable(last) then
        n = n - 1
        local declared = {}
        for _, parameter in ipairs(parameters) do declared[parameter.name] = { "any" } end
        bound = options.check("te." .. name, last, declared)
    end
    for i = 1, n do
        local parameter = parameters[i]
        if not parameter or parameter.by_name then
            if given[i] ~= nil then refuse(tracing, "te.%s: argument %d is too much", name, i) end
        else
            bound[parameter.name] = given[i]
        end
    end
    return bound
end

-- Operations --------------------------------------------------------------------------------------------------------

local function apply(tracing, op, name, ...)
    local parameters, values, row, reads, reduced, first = op.params, {}, true, {}, false, nil
    local bound = bind(tracing, name, parameters, ...)
    for _, parameter in ipairs(parameters) do
        local value = bound[parameter.name]
        if value == nil then value = parameter.default end
        if value == nil then refuse(tracing, "te.%s: argument %s is missing", name, parameter.name) end
        if parameter.type == "tensor" then
            local argument = operand(tracing, name, parameter, value)
            values[parameter.name], row = argument._node, row and argument._row
            for input in pairs(argument._reads) do reads[input] = true end
            reduced = reduced or argument._reduced
            first = first or argument
        else
            if bound[parameter.name] ~= nil then value = attribute(tracing, name, parameter, value) end
            values[parameter.name] = tracing.graph:number(value)
        end
    end
    local reduces = op.formula:find("row%a+%(") or op.formula:find("%f[%w_]n%f[^%w_]")
    if reduces and first._row then
        refuse(tracing, "te.%s works along rows, and its argument has one value per row", name)
    elseif reduces then
        table.insert(tracing.along, first._reads)
    end
    return symbol(tracing, tracing.graph:apply(op.formula, values), op.truth, row and not reduces, reads,
        reduced or reduces ~= nil)
end

-- Operations that are not one formula.
local special = {}

-- A formula over one symbol.
local function unary(tracing, formula, x, row, reads, reduced)
    return symbol(tracing, tracing.graph:apply(formula, { x = x._node }), false, row, reads, reduced)
end

function special.gelu(tracing, x, opts)
    local bound = bind(tracing, "gelu", core.operation("gelu").params, x, opts)
    return apply(tracing, core.operation(bound.approximate == "none" and "gelu_erf" or "gelu_tanh"), "gelu", x)
end

function special.dropout(tracing, ...)
    local x, bound = (...), bind(tracing, "dropout", core.operation("dropout").params, ...)
    local p = bound.p or 0.5
    if bound.training == false or p == 0 then return x end
    return apply(tracing, core.operation("dropout_apply"), "dropout", x, { p = p, scale = p < 1 and 1 / (1 - p) or 0 })
end

local casts = { float32 = "y = to_f32(x)", bfloat16 = "y = to_bf16(x)", float16 = "y = to_f16(x)" }

function special.cast(tracing, x, dtype)
    if not casts[dtype] then
        refuse(tracing, "te.cast: a traced value can be rounded to float32, bfloat16 or float16, not %s",
            tostring(dtype))
    end
    return unary(tracing, casts[dtype], x, x._row, x._reads, x._reduced)
end

function special.detach(tracing) refuse(tracing, "te.detach: part of a formula cannot be left out of its gradient") end

-- Along the last dimension, which they keep.
for _, name in ipairs { "sum", "mean", "max", "min" } do
    local formula = ("y = row%s(x)"):format(name)
    special[name] = function(tracing, x, dim, keepdim)
        if type(dim) == "table" and not getmetatable(dim) then
            if dim.dim or dim.keepdim then dim, keepdim = dim.dim, dim.keepdim else dim = dim[1] end
        end
        if dim ~= -1 or keepdim ~= true then
            refuse(tracing, "te.%s: only along the last dimension, keeping it: te.%s(x, -1, true)", name, name)
        end
        if x._row then return x end
        table.insert(tracing.along, x._reads)
        return unary(tracing, formula, x, true, nil, true)
    end
end

for _, name in ipairs { "softmax", "log_softmax" } do
    special[name] = function(tracing, x, dim)
        if type(dim) == "table" then dim = dim.dim end
        if dim ~= nil and dim ~= -1 then refuse(tracing, "te.%s: only along the last dimension", name) end
        return apply(tracing, core.operation(name .. "_row"), name, x)
    end
end

-- What the engine calls in an operation's stead: Symbol.__te_operation(name, arguments…).
function Symbol.__te_operation(name, ...)
    local tracing
    for i = 1, select("#", ...) do
        local value = select(i, ...)
        if is_symbol(value) then tracing = value._tracing break end
    end
    if tracing.over then
        fail("te.%s: a value that te.pointwise traced is no tensor; it cannot leave its function", name)
    end
    if special[name] then
        if not is_symbol((...)) then
            refuse(tracing, "te.%s: x: expected a traced value, got %s", name, describe((...)))
        end
        return special[name](tracing, ...)
    end
    local op = core.operation(name)
    if not op then
        refuse(tracing, "te.%s: a traced value cannot be written in place", name)
    elseif not op.formula or op.gated then
        refuse(tracing, "te.%s is not computed element by element and cannot stand in a traced function", name)
    end
    return apply(tracing, op, name, ...)
end

-- Symbols -----------------------------------------------------------------------------------------------------------

for event, name in pairs { __add = "add", __sub = "sub", __mul = "mul", __div = "div", __pow = "pow",
    __mod = "remainder" } do
    Symbol[event] = function(a, b) return Symbol.__te_operation(name, a, b) end
end
function Symbol.__unm(x) return Symbol.__te_operation("neg", x) end

local function misuse(message)
    return function(a, b) refuse((is_symbol(a) and a or b)._tracing, message) end
end

local decide = "a traced value stands for all values and decides nothing; use te.where with te.%s"
Symbol.__lt = misuse(decide:format("lt or te.gt"))
Symbol.__le = misuse(decide:format("le or te.ge"))
Symbol.__eq = misuse(decide:format("eq or te.ne"))
Symbol.__concat = misuse("a traced value is no text")
Symbol.__tostring = misuse("a traced value is no text")
Symbol.__len = misuse("a traced value has no length")
Symbol.__call = misuse("a traced value is no function")
Symbol.__newindex = misuse("a traced value has no fields")

function Symbol.__index(x, name)
    if name == "to" then return function(_, dtype) return Symbol.__te_operation("cast", x, dtype) end end
    local method = core.tensor_methods[name]
    if method == nil then
        refuse(x._tracing, "a traced value has no %s; the function runs once for all shapes and values", tostring(name))
    end
    return method
end

-- Tracing -----------------------------------------------------------------------------------------------------------

local HINTS = {
    { "attempt to compare", "a traced value decides nothing: use te.where with te.lt, te.gt and their like" },
    { "number expected, got table", "use te.exp, te.sqrt and their like for functions of math" },
    { "expected a tensor, got table", "this function takes tensors, not traced values" },
}

-- Adds to a Lua error of the function what is being done and what to do about it, but where memory ran out: a host
-- knows LuaJIT's message by its end.
local function explain(tracing, problem)
    local as_it_is = tracing.explained or type(problem) ~= "string" or problem:find("not enough memory$")
    if as_it_is then error(problem, 0) end
    local hint = ""
    for _, entry in ipairs(HINTS) do
        if problem:find(entry[1], 1, true) then hint = "; " .. entry[2] end
    end
    error(("%s (while %s traces %s%s)"):format(problem, tracing.who, tracing.where, hint), 0)
end

local function location(fn)
    local info = debug and debug.getinfo(fn, "S")
    return info and ("function at %s:%d"):format(info.short_src, info.linedefined) or "function"
end

local RESERVED = { ["and"] = true, ["or"] = true, inf = true, nan = true, pi = true, n = true }

-- `name` where it can stand in a formula and is not taken yet, else `otherwise`.
local function choose_name(taken, name, otherwise)
    local fits = name and #name < 20 and name:find("^%a[%w_]*$") and not name:find("^[ty]%d+$") and not RESERVED[name]
    local chosen = fits and not taken[name] and name or otherwise
    taken[chosen] = true
    return chosen
end

-- The nodes of what the function returned.
local function results(tracing, ...)
    local n, nodes, truth = select("#", ...), {}, true
    tracing.along.reductions = #tracing.along
    if n == 0 then refuse(tracing, "returned nothing") end
    for i = 1, n do
        local value = select(i, ...)
        if not is_symbol(value) or value._tracing ~= tracing then
            refuse(tracing, "result %d is %s; every result must be made of the arguments", i, describe(value))
        end
        if value._row then
            refuse(tracing, "result %d has one value per row; use te.sum, te.mean, te.max or te.min by themselves", i)
        end
        nodes[i], truth = value._node, truth and value._truth
        if value._reduced then table.insert(tracing.along, value._reads) end
    end
    return nodes, truth
end

--- The operation that fn(symbols…) describes; and where it has several results that share no random numbers, a list of
--- operations with one of them each; then what is reduced along rows: for each, the set of the inputs behind it. One
--- whose inputs all have one value per row is not what the function says: there it would reduce that value alone, but
--- the operation sees it repeated along the row. Behind the first `reductions` come results that something reduced has
--- a part in: those of one value per row the operation would repeat. `names` are those of parameters, which follow the
--- inputs in one table.
---@param who string   for messages
---@param fn function
---@param n integer    how many inputs
---@param opts table|nil  { params = names, compute = whether te.autocast sets the dtype, name = of the operation }
local function trace(who, fn, n, opts)
    opts = opts or {}
    local tracing = { who = who, where = location(fn), graph = new_graph(), along = {} }
    local inputs, taken, arguments, parameters = {}, {}, {}, opts.params and {}
    local function input(name, otherwise)
        inputs[#inputs + 1] = choose_name(taken, name, otherwise)
        return symbol(tracing, tracing.graph:input(inputs[#inputs]), false, false, { [#inputs] = true })
    end
    for i = 1, n do arguments[i] = input(debug and debug.getlocal(fn, i), "x" .. i) end
    for _, name in ipairs(opts.params or {}) do parameters[name] = input(name, "p_" .. name) end
    arguments[n + 1] = parameters
    local returned = {}
    local function keep(ok, ...)
        tracing.over = true
        if not ok then explain(tracing, (...)) end
        returned.nodes, returned.truth = results(tracing, ...)
    end
    keep(pcall(fn, unpack(arguments, 1, parameters and n + 1 or n)))
    local function define(nodes, outputs)
        local ok, op = pcall(core.define, ("%s(%s)"):format(opts.name or "pointwise", table.concat(inputs, ", ")),
            tracing.graph:write(nodes, outputs),
            { outputs = table.concat(outputs, " "), compute = opts.compute, truth = returned.truth,
                rows = #tracing.along > 0, elements = true })
        if not ok then refuse(tracing, "%s", (tostring(op):gsub("^.-te%.define: ", ""))) end
        return op
    end
    local name, names, singles = tracing.graph.named.y and "result" or "y", {}, nil
    for i = 1, #returned.nodes do names[i] = "y" .. i end
    if #names == 1 then return define(returned.nodes, { name }), nil, tracing.along end
    if not tracing.graph.random then
        singles = {}
        for i, node in ipairs(returned.nodes) do singles[i] = define({ node }, { name }) end
    end
    return define(returned.nodes, names), singles, tracing.along
end

-- Extents of a tensor, none of a number.
local function extents(value) return te.is_tensor(value) and value.shape or {} end

--- The first of `along` whose inputs all have one value per row where the arguments together have more, and whether it
--- is a result; nil: none.
---@param along table  what trace returned
---@param arguments table  tensors and numbers
---@param n integer  how many
local function narrow(along, arguments, n)
    if #along == 0 then return end
    local widths, width = {}, 1
    for i = 1, n do
        local shape = extents(arguments[i])
        widths[i] = shape[#shape] or 1
        if widths[i] ~= 1 then width = widths[i] end
    end
    for k, reads in ipairs(along) do
        local widest = 1
        for i in pairs(reads) do
            if widths[i] ~= 1 then widest = widths[i] end
        end
        if widest ~= width then return reads, k > along.reductions end
    end
end

--- Whether the first of n arguments has the shape of all together, as an operation along rows wants it.
local function leads(arguments, n)
    local first = extents(arguments[1])
    for i = 2, n do
        local shape = extents(arguments[i])
        local before = #first - #shape
        if before < 0 then return false end
        for d, extent in ipairs(shape) do
            if extent ~= 1 and extent ~= first[before + d] then return false end
        end
    end
    return #first > 0
end

return setmetatable({ is_symbol = is_symbol, narrow = narrow, leads = leads },
    { __call = function(_, ...) return trace(...) end })
