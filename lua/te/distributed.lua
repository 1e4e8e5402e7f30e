--- Groups of processes: `mpirun -n 4 tetrain script.lua` runs a script four times, and each of the four finds the
--- others here. A process that was started alone is a group of one, for which everything below changes nothing.
--
-- Ranks count from 0. All processes of a group make the same calls in the same order, with tensors of equal shape and
-- dtype. Of what is here split_sequence and join_sequence alone carry gradients; te.AllReduce, te.AllGather and
-- te.ReduceScatter are modules that do.

local te = require "te"
local options = require "te.options"

local core = te._core

local Group = {}
Group.__index = Group
options.kinds.Group = Group
Group.__name = "Group"

local function new_group(comm)
    local rank, size, local_rank, local_size = core.comm_place(comm)
    return setmetatable({ comm = comm, rank = rank, size = size, local_rank = local_rank, local_size = local_size },
        Group)
end

function Group:__tostring() return ("Group(rank %d of %d)"):format(self.rank, self.size) end

--- The processes that give the same color, a number from 0, ordered by key (this group's rank, unless given). All of
--- the group call it; one with a negative color is in no new group and gets nil. MPI keeps what it knows of a group,
--- some KB, to the end of the process: split once, not in every step.
---@param color integer
---@param key integer|nil
---@return te.Group|nil
function Group:split(color, key)
    options.method("Group:split", self, Group)
    local comm = core.comm_split(self.comm, color, key or self.rank)
    return comm and new_group(comm)
end

--- Returns when all have called it.
function Group:barrier()
    options.method("Group:barrier", self, Group)
    core.comm_barrier(self.comm)
end

--- The sum (or op "average", "max", "min") of all processes' x: a new tensor, the same bits everywhere. On the CPU
--- added in the order of the ranks, in float32 for the smaller floats, and rounded once; sums of integers end at the
--- limits of their type, where those of NCCL wrap.
---@param op string|nil
---@return te.Tensor
function Group:all_reduce(x, op)
    options.method("Group:all_reduce", self, Group)
    return core.comm_all_reduce(self.comm, x, op or "sum")
end

--- Likewise into x, which it returns.
---@param op string|nil
---@return te.Tensor
function Group:all_reduce_(x, op)
    options.method("Group:all_reduce_", self, Group)
    return core.comm_all_reduce_(self.comm, x, op or "sum")
end

--- {size * n, …} of every process's x {n, …}, in the order of the ranks.
---@return te.Tensor
function Group:all_gather(x)
    options.method("Group:all_gather", self, Group)
    return core.comm_all_gather(self.comm, x)
end

--- Part `rank` of the sum of all x {n, …}: {n / size, …}.
---@param op string|nil
---@return te.Tensor
function Group:reduce_scatter(x, op)
    options.method("Group:reduce_scatter", self, Group)
    return core.comm_reduce_scatter(self.comm, x, op or "sum")
end

--- Sends part r of x {n, …} to rank r; returns the parts that came, in the order of the ranks.
---@return te.Tensor
function Group:all_to_all(x)
    options.method("Group:all_to_all", self, Group)
    return core.comm_all_to_all(self.comm, x)
end

--- Writes what x holds on rank `root` (0) into x everywhere, and returns it.
---@param root integer|nil
---@return te.Tensor
function Group:broadcast_(x, root)
    options.method("Group:broadcast_", self, Group)
    return core.comm_broadcast_(self.comm, x, root or 0)
end

--- Sends x to rank `to` and returns what rank `from` sent, a tensor of the same shape; -1 is nobody: zeros come.
---@param to integer
---@param from integer
---@return te.Tensor
function Group:exchange(x, to, from)
    options.method("Group:exchange", self, Group)
    return core.comm_exchange(self.comm, x, to, from)
end

local distributed = {}

local world

--- All processes that were started together.
---@return te.Group
function distributed.world()
    if not core.comm_world then core.fail "te.distributed.world: not in a restricted runtime" end
    world = world or new_group(core.comm_world())
    return world
end

--- Whether this process was started together with others; opens nothing.
---@return boolean
function distributed.launched() return core.comm_launched ~= nil and core.comm_launched() end

--- Whether v is a group of processes.
---@param v any
---@return boolean
function distributed.is_group(v) return getmetatable(v) == Group end

-- What training needs besides is loaded when it is first used.
local loaded_later = {
    average_gradients = "te.distributed.gradients", broadcast_parameters = "te.distributed.gradients",
    hold_apart = "te.distributed.gradients", shard_optimizer = "te.distributed.sharded",
    split_sequence = "te.distributed.sequence", join_sequence = "te.distributed.sequence",
    sequence_positions = "te.distributed.sequence",
    pipeline_step = "te.distributed.pipeline",
    join_state = "te.distributed.whole", split_state = "te.distributed.whole",
}

return setmetatable(distributed, { names = loaded_later, __index = function(self, name)
    if not loaded_later[name] then core.fail(("te.distributed has no %q"):format(tostring(name))) end
    local fn = require(loaded_later[name])[name]
    rawset(self, name, fn)
    return fn
end })
