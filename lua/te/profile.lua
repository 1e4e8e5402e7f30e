--- te.profile: runs fn and returns the kernels that ran, with times, bytes and work.
--
--     local p = te.profile(function() model(x):sum():backward() end)
--     print(p)                          -- by kernel: calls, time, share, rates, share of the floor
--     p:save_trace("trace.json")        -- for chrome://tracing or ui.perfetto.dev
--
-- p[1] … p[#p] are they in order: { name, kind, device, start, seconds, bytes, flops }; p.events is p. The device is
-- synchronized around each kernel, so times are those of the kernels alone. The floor of a kernel is the larger of its
-- bytes over the measured bandwidth and its work over the measured peak of a matrix product; both are measured once,
-- when first printed. What attention's masks hide counts as its work.

local te = require "te"
local fail = require "te.fail"
local files = require "te.files"
local options = require "te.options"
local rates = require "te.rates"
local core = te._core

local Profile = {}
Profile.__index = Profile
options.kinds.Profile = Profile

-- Seconds that a kernel would take at the device's measured rates.
local function floor_of(entry)
    local dtype = entry.name:find("bfloat16") and "bfloat16" or "float32"
    return rates.floor(entry.device, entry.kind, dtype, entry.bytes, entry.flops)
end

-- Printing --------------------------------------------------------------------------------------------------------

--- Events summed by kernel, the longest first: { name, kind, device, calls, seconds, bytes, flops }.
---@return table[]
function Profile:kernels(...)
    options.method("profile:kernels", self, Profile)
    options.last("profile:kernels", 0, ...)
    local by_name, list = {}, {}
    for _, event in ipairs(self.events) do
        local key = event.device .. event.name
        local entry = by_name[key]
        if not entry then
            entry = { name = event.name, kind = event.kind, device = event.device, calls = 0, seconds = 0,
                bytes = 0, flops = 0 }
            by_name[key] = entry
            list[#list + 1] = entry
        end
        entry.calls = entry.calls + 1
        for _, field in ipairs { "seconds", "bytes", "flops" } do entry[field] = entry[field] + event[field] end
    end
    table.sort(list, function(a, b) return a.seconds > b.seconds end)
    return list
end

function Profile:__tostring()
    local lines = { ("%-52s %6s %10s %6s %8s %9s %6s"):format("kernel", "calls", "ms", "share", "GB/s",
        "GFLOP/s", "floor") }
    local total = 0
    for _, entry in ipairs(self:kernels()) do total = total + entry.seconds end
    for _, entry in ipairs(self:kernels()) do
        local seconds = math.max(entry.seconds, 1e-12)
        lines[#lines + 1] = ("%-52s %6d %10.3f %5.1f%% %8.1f %9.1f %5.0f%%"):format(entry.name:sub(1, 52), entry.calls,
            entry.seconds * 1e3, 100 * entry.seconds / math.max(total, 1e-12), entry.bytes / seconds / 1e9,
            entry.flops / seconds / 1e9, 100 * floor_of(entry) / seconds)
    end
    lines[#lines + 1] = ("%-52s %6d %10.3f"):format("kernels", #self.events, total * 1e3)
    lines[#lines + 1] = ("%-52s %6s %10.3f"):format("everything", "", self.seconds * 1e3)
    return table.concat(lines, "\n")
end

--- Writes the events as Chrome trace JSON, times in microseconds.
function Profile:save_trace(path, ...)
    options.method("profile:save_trace", self, Profile)
    options.last("profile:save_trace", 1, ...)
    options.argument("profile:save_trace", "path", path, { "string" })
    files.need "profile:save_trace"
    local parts = {}
    for i, event in ipairs(self.events) do
        parts[i] = ('{"name": "%s", "cat": "%s", "ph": "X", "pid": 1, "tid": "%s", "ts": %.3f, "dur": %.3f, '
            .. '"args": {"bytes": %.0f, "flops": %.0f}}'):format(event.name:gsub('[\\"]', "\\%0"),
                event.kind, event.device,
            event.start * 1e6, event.seconds * 1e6, event.bytes, event.flops)
    end
    local written, problem = files.write(path, '{"traceEvents": [\n' .. table.concat(parts, ",\n") .. "\n]}\n")
    if not written then fail("profile:save_trace: %s", problem) end
end

---@return te.Profile
return function(fn, ...)
    options.last("te.profile", 1, ...)
    if type(fn) ~= "function" then fail("te.profile: fn: expected a function, got %s", core.describe(fn)) end
    local begin = core.clock()
    local profile = core.profile(fn)
    profile.events, profile.seconds = profile, core.clock() - begin
    return setmetatable(profile, Profile)
end
