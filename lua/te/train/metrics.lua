--- te.train.Metrics: numbers of a run as JSON lines, one object a step.

local te = require "te"
local files = require "te.files"
local json = require "te.json"

local Metrics = {}
Metrics.__index = Metrics

local function encode(value)
    if type(value) == "number" then
        if value - value ~= 0 then return "null" end -- JSON has no NaN and no infinities
        return ("%.9g"):format(value)
    elseif type(value) == "boolean" then
        return tostring(value)
    end
    return json.text(tostring(value))
end

-- Lines of the file up to a step: what a run that stopped without saving wrote after its last checkpoint goes.
local function lines_until(path, step)
    local kept = {}
    if not te._core.stat(path) then return "" end
    local text, problem = files.read(path)
    if not text then error(problem, 0) end
    for line in text:gmatch "[^\n]+" do
        local at = tonumber(line:match('^{"step":(%d+)'))
        if at and at <= step and line:sub(-1) == "}" then kept[#kept + 1] = line .. "\n" end
    end
    return table.concat(kept)
end

--- Opens the file for a run that goes on after `step` (0: a new one).
function Metrics.open(path, step)
    files.need "te.train.Metrics.open"
    if step > 0 then te._core.write_file(path, lines_until(path, step)) end
    local file, problem = io.open(path, step > 0 and "a" or "w")
    if not file then error(problem, 0) end
    return setmetatable({ file = file, path = path }, Metrics)
end

--- Writes texts to the file, at once.
function Metrics:append(...)
    local ok, problem = self.file:write(...)
    if ok then ok, problem = self.file:flush() end
    if not ok then error(("%s: %s"):format(self.path, problem), 0) end
end

local function joined(fields)
    local parts = {}
    for i = 1, #fields, 2 do parts[#parts + 1] = ('"%s":%s'):format(fields[i], encode(fields[i + 1])) end
    return table.concat(parts, ",")
end

--- Writes one object; fields is a list of name, value, name, value … so that their order is the reader's.
function Metrics:write(fields) self:append("{", joined(fields), "}\n") end

-- An object's text without the fields, which a run that was killed before it saved has added already.
local function without(head, fields)
    for i = 1, #fields, 2 do head = head:gsub((',"%s":[^,}]*'):format(fields[i]), "") end
    return head
end

--- Adds fields, which are numbers, to the object of a step that was written earlier.
function Metrics:add(step, fields)
    if #fields == 0 then return end
    local text, problem = files.read(self.path)
    if not text then error(problem, 0) end
    local line = ('({"step":%d,"loss":[^\n]*)}\n'):format(step)
    local function longer(head) return without(head, fields) .. "," .. joined(fields) .. "}\n" end
    te._core.write_file(self.path, (text:gsub(line, longer, 1)))
    self:close()
    self.file, problem = io.open(self.path, "a")
    if not self.file then error(problem, 0) end
end

--- Writes an object for each operand that was watched (te.numerics.values()).
function Metrics:write_numerics(step, values)
    for _, v in ipairs(values) do
        self:write { "step", step, "product", v.product, "role", v.role, "amax", v.amax, "scale", v.scale or 0 / 0,
            "saturated", v.saturated, "flushed", v.flushed, "error", v.error, "nonfinite", v.nonfinite }
    end
end

--- Closes the file.
function Metrics:close()
    if self.file then self.file:close() end
    self.file = nil
end

return Metrics
