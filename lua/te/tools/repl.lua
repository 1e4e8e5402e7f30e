--- te.tools.repl: what the prompt does with a chunk. The executable reads lines and calls `take` until a chunk is
--- whole, then `run` in a call of its own, which Ctrl-C ends.
--
-- An expression is printed without `return`, also behind statements of the same chunk; `_` keeps the last value. Lines
-- that begin with ? or : are commands.

local te = require "te"
local show = require "te.tools.show"

local repl = {}
local pending = ""

help = help or function(x) print(require("te.tools.help").text(x)) end -- a global of the prompt

-- Whether text is one or more expressions and nothing else, not even nothing.
local function is_expression(text)
    return loadstring("return " .. text) ~= nil and loadstring("local _ = " .. text) ~= nil
end

-- The chunk that gives the values of expressions behind `head`. They are arguments: a call that is returned would have
-- no frame, and its messages no line. Not so where a semicolon ends them. A field that ends them is read in the line
-- of the bracket behind it, which stands in a line of its own only where a comment would hide it.
local function valued(head, expressions)
    local call = ("%sreturn (function(...) return ... end)(%s"):format(head, (expressions:gsub("%s+$", "")))
    return loadstring(call .. ")", "=prompt") or loadstring(call .. "\n)", "=prompt")
        or loadstring(head .. "return " .. expressions, "=prompt")
end

-- Statements with an expression behind them, in a line of its own or after a semicolon, as a chunk that gives its
-- value. A whole chunk may be meant otherwise: {1} in a line of its own goes on the call before it.
local function with_last_value(text, is_whole)
    local starts = {}
    for start in text:gmatch "[\n;]()" do starts[#starts + 1] = start end
    for i = #starts, 1, -1 do
        local head, tail = text:sub(1, starts[i] - 1), text:sub(starts[i])
        local stands_alone = not is_whole or head:find ";$" or tail:find "^%s*[%a_]"
        if stands_alone and is_expression(tail) and loadstring(head) then
            return valued(head, tail)
        end
    end
end

-- "= x", as Lua's own prompt takes it, is x.
local function compile(text)
    text = text:gsub("^%s*=", "", 1)
    local as_value, as_expression = loadstring("return " .. text, "=prompt")
    if as_value then return valued("", text) end
    local chunk
    local problem
    chunk, problem = loadstring(text, "=prompt")
    local showing = with_last_value(text, chunk ~= nil)
    return showing or chunk, problem, as_expression
end

local function cut_off(problem) return problem ~= nil and problem:find("near '<eof>'", 1, true) ~= nil end

--- Keeps text to be run; "more" when it is the beginning of something longer.
---@param text string
---@return string|nil
function repl.take(text)
    pending = text
    if text:find("^%s*[?:]") then return nil end
    local chunk, problem, as_expression = compile(text)
    if not chunk and (cut_off(problem) or cut_off(as_expression)) then return "more" end
end

-- Whether the values of what runs are on the screen.
local ended = false

local function print_values(...)
    local n = select("#", ...)
    if n == 0 then return end
    _G._ = (...)
    local texts = {}
    for i = 1, n do texts[i] = show((select(i, ...))) end
    ended = true
    print(table.concat(texts, "\t"))
end

-- Commands --------------------------------------------------------------------------------------------------------

local function evaluate(text)
    local chunk, problem = compile(text)
    if not chunk then error(problem, 0) end
    local function pass(...) return ... end -- no tail call: the chunk's frame keeps its name
    return pass(chunk())
end

local function duration(seconds)
    if seconds < 1e-3 then return ("%.1f us"):format(seconds * 1e6) end
    if seconds < 1 then return ("%.2f ms"):format(seconds * 1e3) end
    return ("%.3f s"):format(seconds)
end

local function megabytes(bytes) return ("%.1f MB"):format(bytes / 2 ^ 20) end

local commands = {}

function commands.time(text)
    local before = te._core.clock()
    local function finish(...)
        local seconds = te._core.clock() - before
        print_values(...)
        print(duration(seconds))
    end
    finish(evaluate(text))
end

function commands.mem()
    local stats = te.memory_stats()
    print(("tensors %s, at most %s, %s taken from the system"):format(megabytes(stats.current), megabytes(stats.peak),
        megabytes(stats.reserved)))
    print(("Lua %s, process %s"):format(megabytes(collectgarbage "count" * 1024), megabytes(te._core.rss())))
end

function commands.plan(text)
    print(require("te.tools.plan").explain(evaluate(text)))
end

local help_text = [[
?name, help(x)     what a name or value is: ?softmax, ?te.Linear, help(x)
:time EXPRESSION   its value and how long it took
:plan MODEL, X     how the model will run on X
:mem               memory in use
:quit              leave (as Ctrl-D does)
_                  the last value; Tab completes; Ctrl-R searches; Ctrl-C stops what runs]]

function commands.help() print(help_text) end

function commands.quit() os.exit(0) end

local function run_command(text)
    local name, rest = text:match("^%s*:%s*([%w_]*)%s*(.-)%s*$")
    local command = commands[name]
    if command then return command(rest) end
    local names = {}
    for known in pairs(commands) do names[#names + 1] = known end
    table.sort(names)
    local near = te._core.nearest(name, names)
    error((":%s is no command%s; there are :%s"):format(name, near and (", did you mean :%s?"):format(near) or "",
        table.concat(names, " :")), 0)
end

-- What other prompts take to leave or for help, where it is no name of the user's.
local WORDS = { help = commands.help }
for _, word in ipairs { "quit", "exit" } do
    WORDS[word] = function() print(":quit leaves, as Ctrl-D does") end
end
local own_help = help

local function word_of(text)
    local word = text:match "^%s*(%l+)%s*$"
    local value = word and rawget(_G, word)
    return (value == nil or value == own_help) and WORDS[word]
end

--- Runs what was taken.
function repl.run()
    local text = pending
    local word = word_of(text)
    ended = false
    if word then return word() end
    if text:find("^%s*%?") then
        print(require("te.tools.help").text(text:match("^%s*%?%s*(.-)%s*$")))
    elseif text:find("^%s*:") then
        run_command(text)
    else
        print_values(evaluate(text))
    end
end

-- Frames that are the prompt's own.
local function is_own(frame)
    return frame:find "^\tte/tools/%w+%.lua:" or frame:find "^\ttetrain:%d+: in main chunk"
        or frame:find "^\tprompt:%d+: in function 'chunk'"
end

--- A message for people: without the frames of the prompt, and with a hint where there is one. Empty where Ctrl-C came
--- when all had been shown.
---@param message string
---@return string
function repl.problem(message)
    if ended and message:find "^[^\n]*interrupted" then return "" end
    local text, traceback = message:match "^(.-)\nstack traceback:(.*)$"
    text = (text or message):gsub("^te/tools/repl%.lua:%d+: ", "") -- where a chunk's tail call says that it stands
    local lines, frames = { text }, {}
    for frame in (traceback or ""):gmatch "[^\n]+" do
        if not is_own(frame) then frames[#frames + 1] = frame end
    end
    if #frames > 0 then lines[2] = "stack traceback:\n" .. table.concat(frames, "\n") end
    local hint = require("te.tools.hint").text(message)
    if hint then lines[#lines + 1] = "hint: " .. hint end
    return table.concat(lines, "\n")
end

--- What may follow the text before the cursor: what to insert, and a list when there are several ways.
function repl.complete(before) return require("te.tools.complete").complete(before) end

-- `tetrain repl` with words behind it; without any the executable reads lines itself.
return setmetatable(repl, { __call = function(_, words)
    te.train.command_line({ script = "repl", about = "The prompt: runs Lua and prints the results; :help says more." })
        :parse(words)
end })
