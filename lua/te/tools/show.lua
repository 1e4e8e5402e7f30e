--- te.tools.show: a value as the prompt prints it. Tables are written out in short; what has a
--- __tostring speaks for itself.

local MOST, DEPTH, WIDTH = 30, 3, 100

local show

local function is_name(key) return type(key) == "string" and key:find("^[%a_][%w_]*$") ~= nil end

local function sorted_keys(t)
    local keys = {}
    for key in pairs(t) do
        if not (type(key) == "number" and key % 1 == 0 and key >= 1 and key <= #t) then keys[#keys + 1] = key end
    end
    table.sort(keys, function(a, b)
        if type(a) == type(b) and (type(a) == "number" or type(a) == "string") then return a < b end
        return tostring(a) < tostring(b)
    end)
    return keys
end

-- Entries of a table as texts, at most MOST.
local function entries(t, depth, seen)
    local parts, keys = {}, sorted_keys(t)
    for i = 1, math.min(#t, MOST) do parts[i] = show(t[i], depth + 1, seen) end
    for i = 1, math.min(#keys, MOST - #parts) do
        local key = keys[i]
        local name = is_name(key) and key or ("[%s]"):format(show(key, DEPTH, seen))
        parts[#parts + 1] = name .. " = " .. show(t[key], depth + 1, seen)
    end
    local left = #t + #keys - #parts
    if left > 0 then parts[#parts + 1] = ("... %d more"):format(left) end
    return parts
end

local function show_table(t, depth, seen)
    if seen[t] or depth >= DEPTH then return next(t) == nil and "{}" or "{...}" end
    seen[t] = true
    local parts, length, broken = entries(t, depth, seen), 0, false
    seen[t] = nil
    for _, part in ipairs(parts) do length, broken = length + #part + 2, broken or part:find("\n", 1, true) end
    if not broken and length < WIDTH - 2 * depth then return "{" .. table.concat(parts, ", ") .. "}" end
    for i, part in ipairs(parts) do parts[i] = "  " .. part:gsub("\n", "\n  ") end -- of tables inside likewise
    return "{\n" .. table.concat(parts, ",\n") .. "\n}"
end

---@param value any
---@param depth integer|nil  how many tables it stands in
---@param seen table|nil  the tables it stands in
---@return string
function show(value, depth, seen)
    if type(value) == "string" then return (("%q"):format(value):gsub("\\\n", "\\n")) end
    local mt = getmetatable(value)
    if type(value) ~= "table" or type(mt) == "table" and mt.__tostring then return tostring(value) end
    return show_table(value, depth or 0, seen or {})
end

return show
