--- scripts/gpu_check.sh: packs a bundle that starts, and says so where there is no GPU.

local te = require "te"

local TETRAIN = os.getenv("TETRAIN") or te._core.executable()
local build = TETRAIN:match("^(.*)/") or "."

local function shell(command)
    local out = os.tmpname()
    local status = os.execute(("{ %s\n} >%s 2>&1"):format(command, out))
    local file = io.open(out, "rb")
    local text = file:read("*a")
    file:close()
    os.remove(out)
    return text, math.floor(status / 256)
end

describe("gpu_check.sh", function()
    if not te._core.stat(build .. "/libtetrain_cuda.so") then
        pending("this build has no CUDA module")
        return
    end

    it("packs a bundle under 60 MiB that runs alone and exits with 3 without a GPU", function()
        local folder = os.tmpname()
        os.remove(folder)
        finally(function() os.execute(("rm -rf '%s'"):format(folder)) end)
        local text, status = shell(("mkdir '%s' && BUILD='%s' scripts/gpu_check.sh pack '%s/bundle.tar.gz'")
            :format(folder, build, folder))
        assert.equal(0, status, text)
        assert.is_true(te._core.stat(folder .. "/bundle.tar.gz").size < 60 * 2 ^ 20)
        text, status = shell(("tar -C '%s' -xzf '%s/bundle.tar.gz' && cd '%s/tetrain-gpu-check' && " ..
            "TE_DEVICE= TETRAIN_CUDA_LIBRARIES=/nowhere ./gpu_check.sh run report.txt"):format(folder, folder, folder))
        assert.equal(3, status, text)
        assert.is_truthy(text:find("no usable GPU: cuda: libcuda.so.1 cannot be opened in /nowhere", 1, true), text)
    end)

    it("writes the report where the user stands", function()
        local folder = os.tmpname()
        os.remove(folder)
        finally(function() os.execute(("rm -rf '%s'"):format(folder)) end)
        local text, status = shell(("mkdir -p '%s/a bundle/bin' && cp scripts/gpu_check.sh '%s/a bundle' && " ..
            "cd '%s' && printf '#!/bin/sh\\n' >'a bundle/bin/tetrain' && chmod +x 'a bundle/bin/tetrain' && " ..
            "SECONDS_TO_RUN=0 PYTHON=false 'a bundle/gpu_check.sh' run report.txt"):format(folder, folder, folder))
        assert.equal(0, status, text)
        assert.truthy(text:find(("0 steps failed; report in %s/report.txt\n"):format(folder), 1, true), text)
        assert.truthy(te._core.stat(folder .. "/report.txt"))
    end)

    -- bench/gpu_aims.lua on a report of these lines, as a table by aim.
    local function aims(...)
        local path = os.tmpname()
        local file = io.open(path, "w")
        file:write(table.concat({ ... }, "\n"), "\n")
        file:close()
        local text, status = shell(("'%s' bench/gpu_aims.lua '%s'"):format(TETRAIN, path))
        os.remove(path)
        assert.equal(0, status, text)
        local found, n = {}, 0
        for aim, said in text:gmatch "AIM ([^\n]-): ([^\n]+)\n" do found[aim], n = said, n + 1 end
        assert.equal(13, n, text)
        return found, text
    end

    it("says of every aim whether it was measured, and met", function()
        local GPT2, LLAMA = "BENCH GPT-2 124M, 32 x 1024 step, ",
            "BENCH Llama 8B layer, 4096 tokens forward and backward, "
        local found, text = aims("NVIDIA H200, kernels for sm_90a by NVRTC 13.0; attention in 16 bits by own kernels",
            GPT2 .. "bfloat16, graph: 50.00 ms, host 0.40 ms, 640000 tokens/s, 30.1 GB at most",
            GPT2 .. "bfloat16: 52.90 ms, host 9.00 ms, 640000 tokens/s, 30.1 GB at most",
            "BENCH failed: Llama 8B layer, 4096 tokens, FP8 delayed: out of memory",
            LLAMA .. "bfloat16: 10.500 ms (600 TFLOP/s), host 0.300 ms",
            LLAMA .. "FP8 blocks: 7.350 ms (800 TFLOP/s), host 0.400 ms",
            "BENCH Llama 8B layer, 4096 tokens step, bfloat16, graph: 14.00 ms, host 0.20 ms, 300000 tokens/s, "
                .. "9.0 GB at most",
            "BENCH PyTorch GPT-2 124M, 32 x 1024 step, compiled, bfloat16: 60.00 ms, host 3.00 ms, 500000 tokens/s",
            "BENCH PyTorch Linear 1024 on 128 tokens, eager, bfloat16: not measured: it broke",
            "passed  every operation against the CPU, 80 s", "FAILED (1)  benches of steps, 100 s",
            "passed  benches of PyTorch, 90 s",
            "LEFT OUT  training repeats bit for bit")
        local function ends(aim, with)
            assert.equal(with, (found[aim] or text):sub(-#with), text)
        end
        ends("GPT-2 124M step, 32 x 1024, at most 53 ms (floor 40)",
            "50.00 ms (GPT-2 124M, 32 x 1024 step, bfloat16, graph): met")
        local step = found["GPT-2 124M step at most 0.85 of torch.compile's in bfloat16"]
        assert.truthy(step:find("^0.833 of it: .* met$"))
        ends("Llama 8B layer in bfloat16 at most 10 ms (floor 8.0)", "missed")
        local layer = found["Llama 8B layer under FP8 at most 0.75 of bfloat16 (floor 5.5 ms)"]
        assert.truthy(layer:find("^0.700 of it: 7.350 ms .* met$"))
        ends("Llama 8B layer under FP8 at most 0.9 of the best peer",
            "not measured: no such figure came of the benches of PyTorch")
        ends("host time of a recorded step of GPT-2 124M under 1 %", "0.80 % (0.400 of 50.00 ms): met")
        ends("host time of a recorded step of a Llama 8B layer under 1 %", "1.43 % (0.200 of 14.00 ms): missed")
        ends("Linear 1024 on 128 tokens under FP8 no slower than PyTorch in bfloat16",
            "not measured: FAILED (1) benches of steps, 100 s")
        ends("a recorded training step has the plain one's losses, bfloat16",
            "not measured: LEFT OUT training repeats bit for bit")
        assert.truthy(text:find("recorded steps: the CPU's results: every operation against the CPU, 80 s: met",
            1, true))
    end)

    it("gives no verdict on another card, and none on small sizes", function()
        local found = aims("Fake GPU 0, kernels for sm_90a by NVRTC 13.0; attention in 16 bits by own kernels",
            "BENCH GPT-2 124M, 32 x 1024 step, bfloat16: 52.90 ms, host 9.00 ms, 640000 tokens/s, 30.1 GB at most")
        assert.equal("52.90 ms (GPT-2 124M, 32 x 1024 step, bfloat16): no verdict on Fake GPU 0",
            found["GPT-2 124M step, 32 x 1024, at most 53 ms (floor 40)"])
        assert.equal("not measured: benches of PyTorch did not run",
            found["GPT-2 124M step at most 0.85 of torch.compile's in bfloat16"])
        found = aims("BENCH GPT-2 124M, 1 x 8 step, bfloat16: 2.90 ms, host 1.00 ms, 6400 tokens/s, 0.1 GB at most",
            "passed  benches of steps, 9 s")
        assert.equal("not measured: only small sizes ran",
            found["GPT-2 124M step, 32 x 1024, at most 53 ms (floor 40)"])
    end)

    it("says how it is used", function()
        local text, status = shell("scripts/gpu_check.sh")
        assert.equal(2, status)
        assert.is_truthy(text:find("gpu_check.sh pack", 1, true))
    end)
end)
