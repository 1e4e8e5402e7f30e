-- Programs started several times at once, by mpirun.

local shell = require "spec.support.shell"

local processes = {}

-- Processes that wait must not keep the processors from the others, and memory is what they share: no network is
-- looked for, and no permission of the system's is needed.
local ENVIRONMENT = "OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
    .. "OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none "
    -- what OpenMPI itself never frees
    .. "ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 "

local function command(n, words)
    return ("%stimeout -k 5 240 mpirun --oversubscribe -n %d %s"):format(ENVIRONMENT, n, words)
end

--- What `n` processes of the command print, and the exit status of mpirun.
function processes.run(n, words) return shell.capture(command(n, words)) end

--- Runs spec/support/NAME_checks.lua in `n` processes: what they print, the exit status of mpirun, and how many of them
--- end with "ok" and a number of checks.
function processes.checks(n, name)
    local tetrain = os.getenv("TETRAIN") or "build/tetrain"
    local text, status = processes.run(n, ("'%s' spec/support/%s_checks.lua"):format(tetrain, name))
    local _, oks = text:gsub("ok %d+\n", "")
    return text, status, oks
end

--- The same; raises unless all end so.
function processes.assert_checks(n, name)
    local text, status, oks = processes.checks(n, name)
    if status == 0 and oks == n then return end
    error(("exit status %d, %d of %d end with ok: %s"):format(status, oks, n, text), 0)
end

local works

--- Whether this build has the module, and mpirun is there and can start something.
function processes.available()
    if works == nil then
        local tetrain = os.getenv("TETRAIN") or "build/tetrain"
        local _, status = processes.run(2, ("'%s' -e 'te.distributed.world()'"):format(tetrain))
        works = status == 0
    end
    return works
end

return processes
