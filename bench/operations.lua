--- Times single operations as somebody at the prompt calls them, see bench/operations.txt; the peer is
--- bench/peers/operations.py. Prints one JSON line a case.
---
---     tetrain bench/operations.lua [--only="sum|max"] [--dtypes="fp32 bf16"] [--sizes="16x64 1024x768 4096x3072"]
---                                  [--threads=2] [--seconds=0.03] [--device=cpu]
---
--- A figure is the time of a call in the fastest of several rounds; what the collector takes is in it. On another
--- device a round ends when that has finished. A case that fails is named on the standard error, and the exit status is
--- then 1.

local te = require "te"
local here = arg[0]:match("^(.*)/[^/]*$") or "."
local measure = dofile(here .. "/measure.lua")
local options = { only = "", dtypes = "fp32 bf16", sizes = "16x64 1024x768 4096x3072", threads = "2", seconds = "0.03",
    device = "cpu" }
for _, option in ipairs(arg) do
    local name, value = option:match("^%-%-(%w+)=(.*)$")
    if not name or not options[name] then
        io.stderr:write("operations.lua: unknown option ", option, "\n")
        os.exit(2)
    end
    options[name] = value
end
local threads, seconds = tonumber(options.threads), tonumber(options.seconds)
if not threads or not seconds then
    io.stderr:write("operations.lua: --threads and --seconds want numbers\n")
    os.exit(2)
end
local device = options.device
local there, problem = pcall(te.empty, { 1 }, { device = device })
if not there then
    io.stderr:write("operations.lua: --device=", device, ": ", (tostring(problem):gsub("^.-te%.empty: ", "")), "\n")
    os.exit(2)
end
te.set_num_threads(threads)
te.manual_seed(1)

local NAMES = { fp32 = "float32", bf16 = "bfloat16", fp64 = "float64" }

local on = { device = device }

--- The library as the expressions see it: what it makes is on the device.
local library = te
if te.get_default_device() ~= device then
    library = setmetatable({}, { __index = te })
    for _, name in ipairs { "arange", "zeros", "rand", "randn" } do
        local make = te[name]
        library[name] = function(shape) return make(shape, on) end -- of arange: how many
    end
    function library.randint(low, high, shape) return te.randint(low, high, shape, on) end
end

--- Waits until a device that works on its own has finished.
local function settle()
    if device ~= "cpu" then te.synchronize(device) end
end

--- What the expressions see: each maker remembers its tensors.
local function environment(dtype)
    local made, leaves = {}, {}
    local function maker(kind, make)
        return function(...)
            local key = kind .. table.concat({ ... }, " ")
            made[key] = made[key] or make(...)
            return made[key]
        end
    end
    local function normal(...) return te.randn({ ... }, on):to(dtype) end
    local function leaf(tensor)
        tensor.requires_grad = true
        leaves[#leaves + 1] = tensor
        return tensor
    end
    return {
        te = library,
        other = dtype == "float32" and "bfloat16" or "float32",
        r = maker("r", normal),
        r2 = maker("r2", normal),
        w = maker("w", normal),
        g = maker("g", function(...) return leaf(normal(...)) end),
        p = maker("p", function(...) return (te.randn({ ... }, on):abs() + 0.5):to(dtype) end),
        m = maker("m", function(...) return te.randn({ ... }, on):gt(0) end),
        i = maker("i", function(n, ...) return te.randint(0, n - 1, { ... }, on) end),
        mod = maker("mod", function(name, ...)
            local module = te[name](...):to(device):to(dtype)
            for _, parameter in ipairs(module:parameters()) do leaves[#leaves + 1] = parameter end
            return module
        end),
        causal = true,
        whole = false,
        attend = function(q, k, v, causal, dropout, bias)
            return te.scaled_dot_product_attention(q, k, v, bias, { causal = causal or false, dropout = dropout or 0 })
        end,
        many = function(x)
            local list = {}
            for n = 1, 64 do list[n] = x end
            return list
        end,
        back = function(y, dy)
            y:backward(dy)
            for _, tensor in ipairs(leaves) do tensor.grad = nil end
        end,
    }
end

--- The expression with a name for everything that a maker makes, which is no part of what is timed.
local function prepared(expression, names)
    local count = 0
    local function make(maker, arguments)
        count = count + 1
        names["made" .. count] = setfenv(assert(loadstring("return " .. maker .. arguments)), names)()
        return "made" .. count
    end
    for _, maker in ipairs { "r2", "r", "w", "g", "p", "m", "i", "mod" } do
        expression = expression:gsub("%f[%w](" .. maker .. ")(%b())", make)
    end
    return expression
end

--- Calls until results go to memory that earlier ones had: a collection may be some results away.
local function warm_up(call, loop)
    local enough, most = te._core.clock() + seconds / 2, te._core.clock() + 40 * seconds
    local reserved, since = -1, 0
    repeat
        loop(call, 1)
        settle()
        local now = te.memory_stats(device).reserved
        reserved, since = now, now == reserved and since + 1 or 0
    until te._core.clock() > most or (since > 16 and te._core.clock() > enough)
end

local LOOP = "local call, n = ... for _ = 1, n do call() end"

--- The time of a call in the fastest of five rounds of `calls`, or of fewer where these take long.
local function fastest(call, loop, calls)
    local clock, best = te._core.clock, math.huge
    local enough, rounds = clock() + 10 * seconds, 0
    repeat
        local before = clock()
        loop(call, calls)
        settle()
        best, rounds = math.min(best, (clock() - before) / calls), rounds + 1
    until rounds == 5 or clock() > enough
    return best
end

local function run(name, size, dtype, expression, names)
    local chunk = assert(loadstring("return " .. prepared(expression, names), "=" .. name))
    local call = setfenv(chunk, names)
    local loop = assert(loadstring(LOOP)) -- of this case alone: one for all would be compiled for the first
    warm_up(call, loop)
    local once = fastest(call, loop, 1)
    local best = fastest(call, loop, math.max(1, math.floor(seconds / 5 / once)))
    print(measure.json { "name", name, "size", size, "dtype", dtype, "us", best * 1e6 })
    io.flush()
end

local function wanted(name)
    for pattern in (options.only .. "|"):gmatch("([^|]*)|") do
        if name:find(pattern, 1, true) then return true end
    end
    return false
end

--- Names and the expressions below them.
local function cases()
    local list = {}
    for line in io.lines(here .. "/operations.txt") do
        local expression = line:match("^    (.*)$")
        if expression then
            local last = list[#list]
            last.expression = last.expression or expression
        elseif not line:find("^#") then
            list[#list + 1] = { name = line }
        end
    end
    return list
end

local status = 0

--- Runs a case; says so where it fails.
local function try(case, size, ...)
    local done, problem = pcall(run, case.name, size, ...)
    if done then return end
    io.stderr:write("operations.lua: ", case.name, ", ", size, ": ", tostring(problem), "\n")
    status = 1
end

for dtype in options.dtypes:gmatch("%S+") do
    for _, case in ipairs(cases()) do
        local sized = case.expression:find("%f[%w][RC]%f[%W]")
        for size in (sized and options.sizes or "-"):gmatch("%S+") do
            local rows, columns = size:match("(%d+)x(%d+)")
            local expression = case.expression:gsub("%f[%w]R%f[%W]", rows or "R"):gsub("%f[%w]C%f[%W]", columns or "C")
            if wanted(case.name) then
                local names = environment(assert(NAMES[dtype], "operations.lua: no dtype " .. dtype))
                collectgarbage() -- the tensors of earlier cases
                if case.name:find("backward") then
                    try(case, size, dtype, expression, names)
                else
                    te.no_grad(function() try(case, size, dtype, expression, names) end)
                end
            end
        end
    end
end
if status ~= 0 then os.exit(status) end
