--- Expression graphs that become a formula of the engine (the language stands in src/core/program_build.h).
--
-- A node is an input or a piece of formula text with other nodes in its gaps:
--
--     { name = "x" }                                    an input
--     { parts = { node, " * sigmoid(", node, ")" } }    v * sigmoid(v)
--
-- Equal nodes are made once. Written out, a node that is used twice gets a name of its own, others stand where they are
-- used.

local Graph = {}
Graph.__index = Graph

-- `random`: some node draws random numbers.
local function new()
    return setmetatable({ nodes = {}, by_key = {}, named = {}, random = false }, Graph)
end

local function add(graph, node)
    node.id = #graph.nodes + 1
    graph.nodes[node.id] = node
    return node
end

function Graph:input(name)
    self.named[name] = true
    return add(self, { name = name, parts = {} })
end

--- The node of `parts`; random: never the same as another one.
function Graph:node(parts, random)
    local key = {}
    for i, part in ipairs(parts) do key[i] = type(part) == "table" and "#" .. part.id or part end
    key = table.concat(key)
    local node = not random and self.by_key[key]
    if not node then
        node = add(self, { parts = parts })
        if not random then self.by_key[key] = node end
    end
    return node
end

--- The node of a number: the shortest text that reads back as the same.
function Graph:number(value)
    local text
    if value ~= value then
        text = "nan"
    elseif value == math.huge or value == -math.huge then
        text = value > 0 and "inf" or "-inf"
    else
        for digits = 14, 17 do
            text = ("%." .. digits .. "g"):format(value)
            if tonumber(text) == value then break end
        end
    end
    return self:node({ text })
end

-- Reading formulas --------------------------------------------------------------------------------------------------

local LITERAL = { ["and"] = true, ["or"] = true, inf = true, nan = true, pi = true, n = true }

-- Splits an expression into literal text and { name = }: names that stand for values, not functions or numbers.
local function split(expression)
    local pieces, at, literal = {}, 1, ""
    while at <= #expression do
        local number = expression:match("^%d*%.?%d+[eE][+-]?%d+", at) or expression:match("^%d+%.?%d*", at)
        local word = not number and expression:match("^[%a_][%w_]*", at)
        if word and not LITERAL[word] and not expression:match("^%s*%(", at + #word) then
            if literal ~= "" then pieces[#pieces + 1] = literal end
            pieces[#pieces + 1], literal = { name = word }, ""
        else
            literal = literal .. (number or word or expression:sub(at, at))
        end
        at = at + #(number or word or " ")
    end
    if literal ~= "" then pieces[#pieces + 1] = literal end
    return pieces
end

local parsed = {} -- statements by formula

local function statements(formula)
    if not parsed[formula] then
        local list = {}
        for name, expression in formula:gmatch("([%a_][%w_]*)%s*=%s*([^;]+)") do
            list[#list + 1] = { name = name, pieces = split(expression:gsub("%s+$", "")) }
        end
        parsed[formula] = list
    end
    return parsed[formula]
end

--- The node of the last result of a formula over nodes by name.
function Graph:apply(formula, values)
    local random = formula:find("keep%(") or formula:find("random%(") or formula:find("normal%(")
    self.random = self.random or random ~= nil
    local result
    local names = setmetatable({}, { __index = values })
    for _, statement in ipairs(statements(formula)) do
        local parts = {}
        for i, piece in ipairs(statement.pieces) do
            parts[i] = type(piece) == "table" and names[piece.name] or piece
        end
        result = #parts == 1 and type(parts[1]) == "table" and parts[1] or self:node(parts, random)
        names[statement.name] = result
    end
    return result
end

-- Writing -----------------------------------------------------------------------------------------------------------

-- How often each node is used, from the last one back: nodes stand behind what they are made of.
local function count_uses(nodes, outputs)
    local uses = {}
    for _, node in ipairs(outputs) do uses[node] = (uses[node] or 0) + 1 end
    for i = #nodes, 1, -1 do
        for _, part in ipairs(uses[nodes[i]] and nodes[i].parts or {}) do
            if type(part) == "table" then uses[part] = (uses[part] or 0) + 1 end
        end
    end
    return uses
end

local function is_word(text) return text:find("^[%w_.]+$") or text:find("^%d[%d.]*e[+-]%d+$") end

-- How strongly the operators of a text bind, outside its parentheses: 1 logic and comparisons, 2 sums, 3 products,
-- 4 powers, 5 nothing to take apart.
local function strength(text)
    if is_word(text) then return 5 end
    local bare = text:gsub("%b()", ""):gsub("%d[%d.]*e[+-]%d+", "")
    if bare:find("[<>=~]") or bare:find(" and ") or bare:find(" or ") then return 1 end
    return bare:find("[+-]") and 2 or bare:find("[*/]") and 3 or bare:find("^", 1, true) and 4 or 5
end

-- How strong an operand must be to stand without parentheses behind and before such a character. Operators of one
-- strength group from the left; an order of operations is never changed.
local AT_RIGHT_OF = {
    ["("] = 0, [","] = 0, ["<"] = 2, [">"] = 2, ["="] = 2, ["+"] = 3, ["-"] = 3, ["*"] = 4, ["/"] = 4,
}
local AT_LEFT_OF = {
    [")"] = 0, [","] = 0, ["<"] = 2, [">"] = 2, ["="] = 2, ["~"] = 2, ["+"] = 2, ["-"] = 2, ["*"] = 3, ["/"] = 3,
}

-- How strong parts[i] must be between its neighbours.
local function needed(parts, i)
    local before, after = parts[i - 1], parts[i + 1]
    local left = type(before) == "string" and before:match("(%S)%s*$")
    local right = type(after) == "string" and after:match("^%s*(%S)")
    local sign = left == "-" and (before:find("[(,*/^<>=+-]%s*%-%s*$") or i == 2 and before:find("^%s*%-"))
    return math.max(before == nil and 0 or sign and 5 or AT_RIGHT_OF[left] or 5,
        after == nil and 0 or AT_LEFT_OF[right] or 5)
end

local function expression(node)
    local out = {}
    for i, part in ipairs(node.parts) do
        if type(part) == "table" then
            local text = part.text
            out[i] = strength(text) >= needed(node.parts, i) and text or "(" .. text .. ")"
        else
            out[i] = part
        end
    end
    return table.concat(out)
end

local function depth(text)
    local most, now = 0, 0
    for mark in text:gmatch("[()]") do
        now = now + (mark == "(" and 1 or -1)
        most = math.max(most, now)
    end
    return most
end

local DEEPEST = 16 -- the engine's parser takes 64

--- The formula that assigns `outputs` (nodes) to `names`.
function Graph:write(outputs, names)
    local lines, uses = {}, count_uses(self.nodes, outputs)
    for _, node in ipairs(self.nodes) do
        if uses[node] then
            node.text = node.name or expression(node)
            if not is_word(node.text) and (uses[node] > 1 or depth(node.text) > DEEPEST) then
                lines[#lines + 1] = ("t%d = %s"):format(#lines + 1, node.text)
                node.text = "t" .. #lines
            end
        end
    end
    for i, node in ipairs(outputs) do lines[#lines + 1] = ("%s = %s"):format(names[i], node.text) end
    return table.concat(lines, "; ")
end

return new
