--- te.distributed.texts: a text of every process of a group, in all of them.

local te = require "te"

---@param group table
---@param text string
---@return string[]  by rank, from 1
return function(group, text)
    local longest = group:all_reduce(te.tensor({ #text }, { dtype = "int32", device = "cpu" }), "max"):item()
    local bytes = { #text }
    for i = 1, longest do bytes[i + 1] = text:byte(i) or 0 end
    local all = group:all_gather(te.tensor({ bytes }, { dtype = "int32", device = "cpu" })):totable()
    for rank, list in ipairs(all) do
        local length = list[1]
        for i = 1, length do list[i] = string.char(list[i + 1]) end
        all[rank] = table.concat(list, "", 1, length)
    end
    return all
end
