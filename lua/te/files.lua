--- files.need(who): raises where the host lets scripts reach no files (TETRAIN_RESTRICTED).

local fail = require "te.fail"

local files = {}

---@param who string  the function that is about to read or write one
function files.need(who)
    if not io then fail("%s: scripts of this host reach no files", who) end
end

return files
