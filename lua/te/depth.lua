--- Walks over nested modules: `depth` of the one inside, or an error where there is no end because
--- a module contains itself.

local fail = require "te.fail"

local DEEPEST = 256

---@param module table  what is entered, for the message
---@param depth integer|nil  how many modules are around it
---@return integer depth  for what it contains
return function(module, depth)
    depth = (depth or 0) + 1
    if depth > DEEPEST then
        fail("%s: modules are nested more than %d deep: one of them contains itself", module.__name, DEEPEST)
    end
    return depth
end
