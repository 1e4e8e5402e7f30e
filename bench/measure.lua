-- Timing and JSON lines for the benches, loaded by dofile from beside them.

local te = require "te"
local clock = te._core.clock

local measure = {}

--- The median of a list, which is sorted on the way.
function measure.median(list)
    table.sort(list)
    local middle = math.floor(#list / 2)
    return #list % 2 == 1 and list[middle + 1] or (list[middle] + list[middle + 1]) / 2
end
local median = measure.median

--- Medians of what `step` reports over enough runs: at least `runs` of them and `seconds` together, after a warm-up of
--- three runs and a second. `step` may return times of its parts by name, in seconds.
---@return table times  median, min, max and cpu (processor time of all threads) in seconds, runs, parts
function measure.steps(step, runs, seconds)
    local start, warm = clock(), 0
    while warm < 3 or clock() - start < math.min(1, seconds) do
        step()
        warm = warm + 1
    end
    local walls, cpus, parts, total = {}, {}, {}, 0
    while #walls < runs or total < seconds do
        local cpu, wall = os.clock(), clock()
        local reported = step()
        local n = #walls + 1
        walls[n], cpus[n] = clock() - wall, os.clock() - cpu
        total = total + walls[n]
        for name, value in pairs(reported or {}) do
            parts[name] = parts[name] or {}
            table.insert(parts[name], value)
        end
    end
    for name, list in pairs(parts) do parts[name] = median(list) end
    return { median = median(walls), min = walls[1], max = walls[#walls], cpu = median(cpus), runs = #walls,
        parts = parts }
end

--- Seconds of the fastest of many calls, for kernels: `fn` runs for about `seconds` in all. It may return the time of
--- the part that counts.
function measure.best(fn, seconds)
    local best, start, runs = math.huge, clock(), 0
    while runs < 5 or clock() - start < seconds do
        local before = clock()
        best = math.min(best, fn() or clock() - before)
        runs = runs + 1
    end
    return best
end

local function encode(value)
    if type(value) == "number" then
        return value - value == 0 and ("%.9g"):format(value) or "null" -- JSON has no NaN and no infinities
    elseif type(value) == "boolean" then
        return tostring(value)
    end
    return require("te.json").text(tostring(value))
end

--- A JSON object from a list of name, value, name, value …
function measure.json(fields)
    local parts = {}
    for i = 1, #fields, 2 do parts[#parts + 1] = ('"%s": %s'):format(fields[i], encode(fields[i + 1])) end
    return "{" .. table.concat(parts, ", ") .. "}"
end

return measure
