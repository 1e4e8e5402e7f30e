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
        local text, status = shell(("mkdir '%s' && BUILD='%s' scripts/gpu_check.sh pack '%s/bundle.tar.gz'"):format(folder, build,
            folder))
        assert.equal(0, status, text)
        assert.is_true(te._core.stat(folder .. "/bundle.tar.gz").size < 60 * 2 ^ 20)
        text, status = shell(("tar -C '%s' -xzf '%s/bundle.tar.gz' && cd '%s/tetrain-gpu-check' && " ..
            "TE_DEVICE= TETRAIN_CUDA_LIBRARIES=/nowhere ./gpu_check.sh run report.txt"):format(folder, folder, folder))
        assert.equal(3, status, text)
        assert.is_truthy(text:find("no usable GPU: cuda: libcuda.so.1 cannot be opened in /nowhere", 1, true), text)
    end)

    it("says how it is used", function()
        local text, status = shell("scripts/gpu_check.sh")
        assert.equal(2, status)
        assert.is_truthy(text:find("gpu_check.sh pack", 1, true))
    end)
end)
