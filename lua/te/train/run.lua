--- Exit codes of scripts, failures that carry one, and the signals that do not end them.
--
-- Inside te.train.run, te.train.fail(code, message) ends the script with that code and only the message; anything else
-- that is raised is a fault of the script and comes with a traceback.

local core = require("te")._core

local run = {}

--- 75 and 74 are EX_TEMPFAIL and EX_IOERR of sysexits.h: run it again, and look at the disk.
run.exit = { ok = 0, script = 1, usage = 2, io = 74, interrupted = 75, not_finite = 77 }

local Failure = {}
Failure.__index = Failure
function Failure:__tostring() return self.message end

--- Ends the script.
---@param code integer  one of te.train.exit
---@param message string|nil  goes to standard error
function run.fail(code, message)
    error(setmetatable({ code = code, message = message }, Failure), 0)
end

local FUNCTIONS = { "te%.[%w_.:]+", "%u%w*:[%w_]+" } -- te.models.gpt, GPT:load_state_dict

--- The message of an error without the line and the function that it comes from, for who uses a
--- script and did not write it.
function run.plain(problem)
    local text = tostring(problem)
    local file, message = text:match "^[^\n:]-([^/\n:]+):%d+: (.*)$"
    for _, name in ipairs(FUNCTIONS) do
        local rest = text:match("^[^\n]-:%d+: " .. name .. ": (.*)$")
        if rest then return rest end
    end
    local is_tool = file == "tetrain" -- what calls one that was embedded
    return (is_tool or file and arg and file == tostring(arg[0]):match "[^/]*$") and message or text
end

-- A model, batch or file that memory has no room for is no fault of the script, nor of the disk.
local function is_memory(problem)
    return type(problem) == "string" and (problem:find("out of memory", 1, true) or problem:find "not enough memory$")
end

-- Calls fn; what it raises ends the script with exit code 74, or 1 where memory ran out, and names the file at `path`.
local function guarded(path, fn, ...)
    local results
    local function keep(ok, ...)
        results = { n = select("#", ...), ... }
        return ok
    end
    if not keep(pcall(fn, ...)) then
        local problem = results[1]
        if getmetatable(problem) == Failure then error(problem, 0) end
        local text = run.plain(problem)
        local code = is_memory(problem) and run.exit.script or run.exit.io
        run.fail(code, text:find(path, 1, true) and text or path .. ": " .. text)
    end
    return unpack(results, 1, results.n)
end

--- Runs something that reads or writes files; what it raises ends the script with exit code 74, or 1 where memory ran
--- out.
function run.io(fn, ...) return guarded("", fn, ...) end

--- The same for what was read from a file: the message begins with its path.
---@param path string
function run.of_file(path, fn, ...) return guarded(path, fn, ...) end

--- For a script that finishes and saves by itself: from here on Ctrl-C, SIGTERM and SIGHUP wait for who asks
--- (te._core.interrupt_flag), and who reads what is printed may leave, as head does.
function run.hold_signals()
    core.interrupt_flag()
    core.ignore_sigpipe()
end

--- Runs a script's main function and exits the process with its code (what it returns, 0 for nothing).
function run.run(main, ...)
    local ok, result = xpcall(main, function(problem)
        if getmetatable(problem) == Failure then return problem end
        if is_memory(problem) then
            return setmetatable({ code = run.exit.script, message = run.plain(problem) }, Failure)
        end
        return setmetatable({ code = run.exit.script, message = debug.traceback(tostring(problem), 2) }, Failure)
    end, ...)
    if not ok and result.message then
        io.stdout:flush()
        io.stderr:write(result.message .. "\n") -- at once: several processes may write to the same place
    end
    os.exit(ok and (result or run.exit.ok) or result.code, true)
end

return run
