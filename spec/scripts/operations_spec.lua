--- bench/operations.lua: what it prints, what it names, and where it computes.

local te = require "te"
local shell = require "spec.support.shell"

local TETRAIN = os.getenv("TETRAIN") or te._core.executable()
local build = TETRAIN:match("^(.*)/") or "."

-- What it prints for options of these values, and its exit status.
local function run(options, before)
    return shell.capture(("%s '%s' %s"):format(before or "", TETRAIN, options))
end

local BENCH = " bench/operations.lua --seconds=0.0001 --dtypes=fp32 --sizes=4x8 "

describe("bench/operations.lua", function()
    it("names a device that there is not", function()
        local text, status = run(BENCH .. "--device=abacus")
        assert.equal(2, status)
        assert.truthy(text:find '^operations%.lua: %-%-device=abacus: device "abacus": no such device', text)
    end)

    it("prints a line of each case and size", function()
        local text, status = run(BENCH .. "--sizes='4x8 8x4' --only='greater|matmul 64x64'")
        assert.equal(0, status, text)
        local seen = {}
        local LINE = '{"name": "([^"]*)", "size": "([^"]*)", "dtype": "fp32", "us": ([%d.e+-]+)}\n'
        for name, size, us in text:gmatch(LINE) do
            seen[#seen + 1] = name .. " " .. size
            assert.is_true(tonumber(us) > 0)
        end
        assert.same({ "greater 4x8", "greater 8x4", "matmul 64x64x64 -" }, seen)
    end)

    it("names a case that fails, and goes on", function()
        local text, status = run("--mem-limit=4M" .. BENCH .. "--only='mean of 16777216|greater|arange'")
        assert.equal(1, status, text)
        assert.truthy(("\n" .. text):find "\noperations%.lua: mean of 16777216, %-: [^\n]*out of memory", text)
        assert.truthy(text:find('{"name": "greater", "size": "4x8"', 1, true), text)
        assert.truthy(text:find('{"name": "arange", "size": "-"', 1, true), text)
    end)

    it("makes all tensors on the device", function()
        if not te._core.stat(build .. "/cuda_fake") then
            pending("this build has no simulated GPU")
            return
        end
        local text, status = run([[-e 'local te = require "te"
                arg = { [0] = "bench/operations.lua", "--device=cuda", "--seconds=0.0001", "--dtypes=fp32",
                    "--sizes=1024x768",
                    "--only=zeros|randn|randint|arange|any|embedding and backward|LayerNorm and backward" }
                dofile(arg[0])
                print(te.memory_stats("cpu").peak, te.memory_stats("cuda").peak)']],
            ("TE_FAKE_IDLE=1 TE_DEVICE= TETRAIN_CUDA_LIBRARIES='%s/cuda_fake'"):format(build))
        assert.equal(0, status, text)
        local _, lines = text:gsub('"size"', "")
        assert.equal(7, lines, text)
        local host, device = text:match "\n(%d+)%s+(%d+)\n$"
        assert.is_true(tonumber(host) < 2 ^ 18, text) -- each case makes 800000 bytes and more
        assert.is_true(tonumber(device) > 2 ^ 22, text)
    end)
end)
