--- Groups of processes with tensors on CUDA devices: the same checks as on the CPU, by NCCL. On the made-up machine
--- alone: NCCL takes a card once in a group.

local processes = require "spec.support.processes"
local TETRAIN = os.getenv("TETRAIN") or "build/tetrain"

local CHECKS = "spec/support/distributed_checks.lua"

local function made_up()
    local file = io.open((os.getenv "TETRAIN_CUDA_LIBRARIES" or "") .. "/libte_cuda_fake.so")
    if file then file:close() end
    return file ~= nil
end

describe("processes with CUDA devices", function()
    it("move and add tensors", function()
        if not made_up() then pending "TETRAIN_CUDA_LIBRARIES is not the folder of the made-up machine" end
        if not processes.available() then pending "mpirun cannot start anything" end
        local text, status = processes.run(2, ("'%s' --device=cuda %s"):format(TETRAIN, CHECKS))
        assert.equal(0, status, text)
        local _, oks = text:gsub("ok %d of %d: %d+\n", "")
        assert.equal(2, oks, text)
    end)
end)
