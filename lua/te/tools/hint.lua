--- te.tools.hint: one more sentence for messages whose cause is often the same.

local te = require "te"

local hint = {}

-- The file in the same folder whose name is nearest.
local function near_file(path)
    local folder, name = path:match "^(.*/)([^/]*)$"
    folder, name = folder or "", name or path
    local ok, names = pcall(te._core.list_dir, folder == "" and "." or folder)
    local near = ok and te._core.nearest(name, names)
    return near and ("did you mean %s%s?"):format(folder, near)
end

local TOOLS = { "repl", "train", "generate", "export", "inspect", "plan", "bench", "doctor", "plot" }

local SCRIPTS = { "train_gpt.lua", "generate.lua", "export.lua", "examples/custom_fusion.lua",
    "examples/custom_operation.lua", "examples/residual_branches.lua", "examples/traced_activation.lua" }
local OPTIONS = { help = true, version = true, man = true, completion = true }

local function method(name) return require("te.tools.elsewhere").methods[name] end

local COMPARE = "te.lt(x, 2), te.le, te.gt and te.ge compare element by element, x:item() < 2 the number in x"

local INDEX = "x[i] is one row; te.index_select and te.gather take places, te.masked_select a mask"

-- Rows of { pattern, sentence or function of the captures }; the first that fits is taken.
local rows = {
    { "cannot open ([^\n]-): No such file", function(path)
        if OPTIONS[path] then return ("tetrain --%s"):format(path) end
        local tool, script = te._core.nearest(path, TOOLS), te._core.nearest(path, SCRIPTS)
        return near_file(path) or tool and ("there is a tool called %s: tetrain %s"):format(tool, tool)
            or script and ("there is a script called %s: tetrain %s"):format(script, script)
    end },
    { "%(number expected, got userdata%)", "x:item() is the number in a tensor of one element" },
    { "'for' [%a ]+ must be a number", "x:item() is the number in a tensor of one element" },
    { "%(table expected, got userdata%)",
        "x:totable() is a table of a tensor's numbers; for i = 1, #x do … x[i] … end visits its rows" },
    { "attempt to compare userdata with number", COMPARE },
    { "attempt to compare number with userdata", COMPARE },
    { "local 'self' %(a %a+ value%)", "a method is called with a colon: object:method()" },
    { "global 'range' %(a nil value%)", "Lua counts with: for i = 1, n do … end" },
    { "global 'len' %(a nil value%)", "#x is the length of a text, a list or a tensor's first dimension" },
    { "global 'te' %(a nil value%)", "a script begins with: local te = require \"te\"" },
    { "global '([%w_]+)' %(a nil value%)", function(name)
        local names = {}
        for known in pairs(_G) do names[#names + 1] = tostring(known) end
        table.sort(names) -- of equally near ones always the same
        local near = te._core.nearest(name, names)
        local there = rawget(te, name) ~= nil or require("te.modules")[name]
        return there and ("there is te.%s"):format(name) or near and near ~= name and ("did you mean %s?"):format(near)
    end },
    { "te[%w_.]* has no \"([%w_]+)\"", function(name) return require("te.tools.elsewhere").names[name] end },
    { "tensors have no field or method \"([%w_]+)\"", method },
    { "attempt to call method '([%w_]+)' %(a nil value%)", method },
    { "index: expected a whole number or a name, got table", INDEX },
    { "index: expected a whole number or a name, got [%w]+ tensor", INDEX },
    { "module '(te[%w_.]*)' not found", "the library's modules are reached through te: te.optim, te.models" },
    { "out of memory",
        "smaller batches, te.checkpoint (recompute_blocks of te.models) or te.no_grad need less; :mem and "
            .. "te.memory_stats() say what is in use" },
    { "attempt to compare two userdata values",
        "tensors are compared element by element: te.lt(a, b), te.le, te.gt, te.ge, te.eq" },
    { "attempt to concatenate [^\n]*userdata value", "use tostring(x), or x:item() for the number in it" },
    { "stack overflow", "a function calls itself without end" },
    { "unexpected symbol near '!'", "Lua writes ~= for not equal and `not x` for negation" },
    { "'=' expected near '%+?%-?='", "Lua has no += and ++; write x = x + 1" },
}

--- The sentence for a message; nil when there is nothing to add.
---@param message string
---@return string|nil
function hint.text(message)
    for _, row in ipairs(rows) do
        local found = { message:find(row[1]) }
        if found[1] then
            local sentence = row[2]
            if type(sentence) == "function" then sentence = sentence(unpack(found, 3)) end
            return sentence or nil
        end
    end
end

return hint
