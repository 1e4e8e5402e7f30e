--- tetrain doctor: what was found on this machine, whether it works, and why something is off.

local te = require "te"
local core = te._core

local command_line = te.train.command_line {
    script = "doctor",
    about = "Reports what was found on this machine, and why something is unavailable.",
}

local FEATURES = { "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16" }

-- Instruction sets of the processor as the system names them; nil where it does not say.
local function processor()
    local file = io.open "/proc/cpuinfo"
    if not file then return nil end
    local text = file:read "*a"
    file:close()
    local flags = " " .. (text:match "\nflags%s*:%s*([^\n]*)" or text:match "\nFeatures%s*:%s*([^\n]*)" or "") .. " "
    local found = {}
    for _, name in ipairs(FEATURES) do
        if flags:find(" " .. name .. " ", 1, true) then found[#found + 1] = name end
    end
    local maker, part = text:match "\nCPU implementer%s*:%s*(%S+)", text:match "\nCPU part%s*:%s*(%S+)"
    local arm = maker and part and ("Arm, implementer %s, part %s"):format(maker, part)
    return text:match "\nmodel name%s*:%s*([^\n]*)" or arm or "unknown", found
end

local problems = 0

local function line(name, format, ...) print(("%-12s %s"):format(name, format:format(...))) end

local function problem(name, format, ...)
    problems = problems + 1
    line(name, "PROBLEM: " .. format, ...)
end

-- A check that raises is a problem.
local function check(name, fn)
    local ok, text = pcall(fn)
    if ok then line(name, "%s", text) else problem(name, "%s", tostring(text)) end
end

local function check_cpu()
    local info, isa = core.cpu_info(), core.device_info "cpu"
    local model, features = processor()
    line("processor", "%s, %d cores", model or "unknown", info.cores)
    if features then
        line("", "has %s", #features > 0 and table.concat(features, " ") or "no vector instructions that are used")
    end
    local wanted = os.getenv "TE_CPU_ISA"
    if wanted == "" then wanted = nil end
    line("kernels", "%s%s, %d thread%s", isa, wanted and (" (TE_CPU_ISA=%s)"):format(wanted) or "", info.threads,
        info.threads == 1 and "" or "s")
    if not wanted and features and isa == "portable" and #features > 0 then
        problem("kernels", "the processor has vector instructions that this build was not compiled for")
    end
end

local function check_product()
    local info = core.build_info()
    local a, b = te.randn { 65, 33 }, te.randn { 33, 47 }
    local difference = (te.matmul(a, b):to "float64" - te.matmul(a:to "float64", b:to "float64")):abs()
    local worst = te.max(difference):item()
    if not (worst < 1e-4) then error(("products are off by %g"):format(worst), 0) end
    return ("%s, right to %.1e"):format(info.matrix_products, worst)
end

local function check_training()
    local model = te.Sequential(te.Linear(4, 8), te.GELU(), te.Linear(8, 1))
    local optimizer = te.optim.AdamW(model:parameters(), { lr = 0.01 })
    local x, first, last = te.randn { 16, 4 }, nil, nil
    for _ = 1, 20 do
        local loss = (model(x) - 1) ^ 2
        loss = loss:mean()
        optimizer:zero_grad()
        loss:backward()
        optimizer:step()
        first, last = first or loss:item(), loss:item()
    end
    if not (last < first) then error(("the loss went from %g to %g"):format(first, last), 0) end
    return "a small model learns"
end

local function check_files()
    local path = os.tmpname()
    te.save(path, { x = te.ones { 3 } })
    local loaded = te.load(path)
    os.remove(path)
    if te.sum(loaded.x):item() ~= 3 then error("a saved tensor came back different", 0) end
    return "checkpoints are written and read"
end

local function check_device(name)
    local ok, message = pcall(te.empty, { 1 }, { device = name })
    local state = ok and (core.device_info(name) or "there")
        or "not there: " .. tostring(message):gsub("^[^ ]*:%d+: ", ""):gsub("^te%.empty: ", ""):gsub("^cuda: ", "")
    line(name, "%s", state)
end

return function(words)
    command_line:parse(words)
    local info = core.build_info()
    line("tetrain", "%s, %s, %s", te.version, info.compiler, info.lua)
    check_cpu()
    check("products", check_product)
    check("training", check_training)
    check("files", check_files)
    check_device "cuda"
    local stats = te.memory_stats()
    line("memory", "%.0f MB in this process, %.1f MB of tensors", core.rss() / 2 ^ 20, stats.current / 2 ^ 20)
    print(problems == 0 and "nothing is off" or ("%d problems"):format(problems))
    return problems == 0 and te.train.exit.ok or te.train.exit.script
end
