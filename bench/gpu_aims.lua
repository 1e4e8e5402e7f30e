-- What the benches of a GPU are to show, aim by aim, from the report of scripts/gpu_check.sh: whether it was measured,
-- and if not, why. Aims are for an H200; elsewhere figures are given all the same, and no verdict.
--
--     build/tetrain bench/gpu_aims.lua REPORT

local CARD = "H200"

-- A report as lists of lines: results, steps with how they ended, and what the device is.
local function read(path)
    local report = { benches = {}, steps = {}, small = false }
    for line in io.lines(path) do
        local result = line:match "^BENCH (.+)$"
        if result then report.benches[#report.benches + 1] = result end
        report.small = report.small or line:find("^BENCH GPT%-2 124M, 1 x") ~= nil
        local verdict, name = line:match "^(%u[%u ]+%S*)%s%s(.+)$"
        if not verdict then verdict, name = line:match "^(FAILED %(%d+%))%s%s(.+)$" end
        if not verdict then verdict, name = line:match "^(passed)%s%s(.+)$" end
        if verdict then report.steps[#report.steps + 1] = { verdict = verdict, name = name } end
        report.device = report.device or line:match "^(.-), kernels for %S+ by NVRTC"
    end
    return report
end

-- The number behind "NAME: " in milliseconds, and what the host needs of it; nil: there is
-- none. Names are not patterns.
local function figure(report, name)
    for _, line in ipairs(report.benches) do
        if line:sub(1, #name + 2) == name .. ": " then
            local rest = line:sub(#name + 3)
            local ms = tonumber(rest:match "^([%d.]+) ms")
            if ms then return ms, tonumber(rest:match "host ([%d.]+) ms") end
        end
    end
    return nil
end

-- The least of several figures, and which it was.
local function least(report, names)
    local best, which
    for _, name in ipairs(names) do
        local ms = figure(report, name)
        if ms and (not best or ms < best) then best, which = ms, name end
    end
    return best, which
end

local function starts(line, text) return line:sub(1, #text) == text end

-- Why there is no figure of this name: it failed, its bench was left out or failed, or ran with small sizes.
local function reason(report, name)
    local bench = starts(name, "PyTorch ") and "benches of PyTorch" or "benches of steps"
    local short = name:gsub("^PyTorch ", "")
    for _, line in ipairs(report.benches) do
        if starts(line, "failed: " .. short) then return line end
        if starts(line, name) and line:find ": not measured: " then return line end
    end
    for _, step in ipairs(report.steps) do
        if starts(step.name, bench) and step.verdict ~= "passed" then
            return (step.verdict .. " " .. step.name):gsub("%s+$", "")
        end
    end
    for _, step in ipairs(report.steps) do
        if starts(step.name, bench) then
            return report.small and "only small sizes ran" or "no such figure came of the " .. bench
        end
    end
    return bench .. " did not run"
end

-- "met" or "missed" where the card is the one that the aim is for.
local function verdict(report, met)
    if not (report.device or ""):find(CARD, 1, true) then
        return ("no verdict on %s"):format(report.device or "an unknown device")
    end
    return met and "met" or "missed"
end

local FP8 = { "FP8 delayed", "FP8 blocks", "MXFP8" }
local GPT2, LLAMA = "GPT-2 124M, 32 x 1024 step, ", "Llama 8B layer, 4096 tokens forward and backward, "

local function with(prefix, modes, suffix)
    local names = {}
    for i, mode in ipairs(modes) do names[i] = prefix .. mode .. (suffix or "") end
    return names
end

local GPT2_OURS = { GPT2 .. "bfloat16, graph", GPT2 .. "bfloat16, sums in any order, graph", GPT2 .. "bfloat16" }
local PEERS_FP8 = with("PyTorch " .. LLAMA,
    { "compiled, FP8 _scaled_mm", "eager, FP8 Transformer Engine" })
local PEERS_BOTH = with("PyTorch " .. LLAMA, { "eager, bfloat16", "compiled, bfloat16" })
for _, name in ipairs(PEERS_FP8) do PEERS_BOTH[#PEERS_BOTH + 1] = name end

-- An aim at a time: at most `most` ms.
local function at_most(name, names, most)
    return { name, function(report)
        local ms, which = least(report, names)
        if not ms then return nil, reason(report, names[1]) end
        return ("%.2f ms (%s)"):format(ms, which), verdict(report, ms <= most)
    end }
end

-- An aim at a ratio to the best of others.
local function share(name, ours, others, most)
    return { name, function(report)
        local ms, which = least(report, ours)
        if not ms then return nil, reason(report, ours[1]) end
        local other, whose = least(report, others)
        if not other then return nil, reason(report, others[1]) end
        return ("%.3f of it: %.3f ms (%s) beside %.3f ms (%s)"):format(ms / other, ms, which, other, whose),
            verdict(report, ms / other <= most)
    end }
end

local function host(name, bench)
    return { name, function(report)
        local ms, on_host = figure(report, bench)
        if not on_host then return nil, reason(report, bench) end
        return ("%.2f %% (%.3f of %.2f ms)"):format(100 * on_host / ms, on_host, ms),
            verdict(report, on_host < 0.01 * ms)
    end }
end

-- What steps of the report show, whatever the card.
local function shown(name, step)
    return { name, function(report)
        for _, s in ipairs(report.steps) do
            if starts(s.name, step) and s.verdict == "passed" then return s.name, "met" end
            if starts(s.name, step) then return nil, (s.verdict .. " " .. s.name):gsub("%s+$", "") end
        end
        return nil, step .. " did not run"
    end }
end

local AIMS = {
    shown("kernels fused and quantizing, products and attention in FP8, recorded steps: the CPU's results",
        "every operation against the CPU"),
    shown("a recorded training step has the plain one's losses, bfloat16", "training repeats bit for bit"),
    shown("collectives over NCCL, plain and in a graph, for a group of one", "collectives of one process"),
    at_most("GPT-2 124M step, 32 x 1024, at most 53 ms (floor 40)", GPT2_OURS, 53),
    share("GPT-2 124M step at most 0.85 of torch.compile's in bfloat16", GPT2_OURS,
        { "PyTorch " .. GPT2 .. "compiled, bfloat16" }, 0.85),
    at_most("Llama 8B layer in bfloat16 at most 10 ms (floor 8.0)", { LLAMA .. "bfloat16" }, 10),
    share("Llama 8B layer under FP8 at most 0.75 of bfloat16 (floor 5.5 ms)", with(LLAMA, FP8),
        { LLAMA .. "bfloat16" }, 0.75),
    share("Llama 8B layer under FP8 at most 0.9 of the best peer", with(LLAMA, FP8), PEERS_BOTH, 0.9),
    host("host time of a recorded step of GPT-2 124M under 1 %", GPT2 .. "bfloat16, graph"),
    host("host time of a recorded step of a Llama 8B layer under 1 %",
        "Llama 8B layer, 4096 tokens step, bfloat16, graph"),
}
for _, layer in ipairs { "LayerNorm 1024", "Linear 1024", "GELU" } do
    local name = layer .. " on 128 tokens forward and backward, "
    AIMS[#AIMS + 1] = share(layer .. " on 128 tokens under FP8 no slower than PyTorch in bfloat16",
        with(name, { "FP8 delayed" }),
        { "PyTorch " .. name .. "eager, bfloat16" }, 1)
end

if not arg[1] then
    io.stderr:write "usage: tetrain bench/gpu_aims.lua REPORT\n"
    os.exit(2)
end
local report = read(arg[1])
for _, aim in ipairs(AIMS) do
    local measured, text = aim[2](report)
    print(("AIM %s: %s"):format(aim[1], measured and measured .. ": " .. text or "not measured: " .. text))
end
