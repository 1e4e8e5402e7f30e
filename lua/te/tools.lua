--- te.tools: what `tetrain NAME` runs. Every tool is a module te.tools.NAME that returns its main function, which takes
--- the words of the command line and returns the exit code.

local te = require "te"

local tools = {}

--- Runs the tool that stands at words[0] and ends the process with its code.
function tools.run(words)
    local main = require("te.tools." .. words[0]) -- a script that was embedded whole runs here and does not return
    te.train.run(main, words)
end

return tools
