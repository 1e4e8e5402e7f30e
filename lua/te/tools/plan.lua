--- tetrain plan SCRIPT: how the model that a script returns will run. The script returns a model and its inputs:
---
---     return model, te.randn { 8, 64 }

local te = require "te"

local command_line = te.train.command_line {
    script = "plan",
    about = "Runs SCRIPT, which returns a model and its inputs, and prints how the model will run on them.",
    arguments = { "SCRIPT [arguments]", min = 1, rest = true },
}

local function explain(model, ...)
    local class = type(model) == "table" and getmetatable(model)
    if not class or not class.is_module then
        error(("plan: expected a model, got %s"):format(te.is_tensor(model) and "a tensor" or type(model)), 0)
    end
    if type(model.explain) ~= "function" then
        error(("plan: a %s has no plan of its own: put it into a te.Sequential"):format(class.__name or "model"), 0)
    end
    if select("#", ...) == 0 then
        error("plan: the model's inputs are missing: a plan depends on shapes and dtypes", 0)
    end
    return tostring(model:explain(...))
end

-- The message of an error in the script, with those frames of the traceback that are the script's.
local function traced(problem)
    local lines = { tostring(problem), "stack traceback:" }
    for frame in debug.traceback("", 2):gmatch "\n(\t[^\n]+)" do
        if not frame:find "^\t%[C%]" and not frame:find "^\tte/" and not frame:find "^\ttetrain:" then
            lines[#lines + 1] = frame
        end
    end
    return table.concat(lines, "\n")
end

local function main(words)
    local o = command_line:parse(words)
    local script = o.arguments[1]
    local chunk, problem = loadfile(script)
    if not chunk then te.train.fail(te.train.exit.script, problem) end
    arg = { [0] = script, unpack(o.arguments, 2) } -- what the script expects as a global
    local results = { n = 0 }
    local function keep(ran, ...)
        if not ran then te.train.fail(te.train.exit.script, (...)) end
        results = { n = select("#", ...), ... }
    end
    keep(xpcall(chunk, traced, unpack(o.arguments, 2)))
    if results.n == 0 then
        te.train.fail(te.train.exit.script,
            ("%s returns nothing; it should return a model and its inputs"):format(script))
    end
    local ok, text = pcall(explain, unpack(results, 1, results.n))
    if not ok then te.train.fail(te.train.exit.script, text) end
    print(text)
end

return setmetatable({ explain = explain }, { __call = function(_, words) return main(words) end })
