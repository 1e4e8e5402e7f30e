--- Reading files, where scripts may: files.need(who) raises where the host lets them reach none (TETRAIN_RESTRICTED).

local fail = require "te.fail"
local core = require("te")._core

local files = {}

---@param who string  the function that is about to read or write one
function files.need(who)
    if not io then fail("%s: scripts of this host reach no files", who) end
end

--- The bytes of a file; nil and a message where it cannot be read.
---@param path string
function files.read(path)
    local file, message = io.open(path, "rb")
    if not file then return nil, message end
    local text, wrong = file:read("*a")
    file:close()
    if not text then return nil, path .. ": " .. tostring(wrong) end
    return text
end

--- Writes a text to a file. Returns true; nil and a message where it is not all there.
---@param path string
---@param text string
function files.write(path, text)
    local file, message = io.open(path, "wb")
    if not file then return nil, message end
    local written, why = file:write(text)
    local closed, late = file:close()
    if written and closed then return true end
    return nil, ("%s: %s"):format(path, why or late)
end

--- The value of a JSON file; nulls are nil. Raises in the name of `who` where it is none.
---@param who string
---@param path string
function files.json(who, path)
    local text, message = files.read(path)
    if not text then core.fail_io(("%s: %s"):format(who, message)) end
    local ok, value = pcall(core.json, text)
    if not ok then fail("%s: %s: %s", who, path, value) end
    return value
end

return files
