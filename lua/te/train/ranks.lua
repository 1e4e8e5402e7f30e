--- te.train.ranks: the processes that train one model together, each on its own rows of every batch, or with
--- divide_sequences several on parts of the same rows, or with divide_model several with parts of the model, or with
-- divide_stages with some of its blocks. What is inside has neighbouring ranks: parts or sequences, stages, rows.
--
-- Rank 0 speaks and writes; what follows from the loss, the norm or a signal is decided alike in all. A process that
-- was started alone is rank 0 of one, and none of this costs it anything.

local te = require "te"
local options = require "te.options"
local gather = require "te.distributed.texts"
local run = require "te.train.run"

local Ranks = {}
Ranks.__index = Ranks

local ranks = {}

-- row_rank of row_ranks: whose rows of a batch are this process's. holds: whether what rank 0 writes is here, or a part
-- of it. drawer: processes of the same one draw the same random numbers. split: options of a model, how it is split.
-- parts: the group of those who have one model together; alike: that of those who have the same layers.
local function new(group, rank, size, local_rank)
    return setmetatable({ group = group, alike = group, rank = rank, size = size, local_rank = local_rank,
        leads = rank == 0, row_rank = rank, row_ranks = size, holds = rank == 0, drawer = rank, split = {} }, Ranks)
end

--- This process as the only one.
function ranks.alone() return new(nil, 0, 1, 0) end

--- The processes of a group, or all that were started together.
function ranks.new(group)
    if not group and not te.distributed.launched() then return ranks.alone() end
    group = group or te.distributed.world()
    return new(group, group.rank, group.size, group.local_rank)
end

--- Gives every n neighbouring processes the same rows, of which each takes its part of the tokens: field `context` is
--- their group, of a model's option context_parallel, or with `heads` the two groups of cp_comm_type a2a+p2p. All
--- processes call it. Returns what is wrong, if anything.
---@param n integer
---@param block integer  tokens of a row
---@param heads integer|nil  how many neighbours of the n exchange heads, which divides n
---@return string|nil problem
function Ranks:divide_sequences(n, block, heads)
    if n == 1 then return end
    if self.size % n ~= 0 then return ("the number of processes, %d, is no multiple of it"):format(self.size) end
    if block % (2 * n) ~= 0 then return ("rows of %d tokens cannot be cut in 2 x %d chunks"):format(block, n) end
    local context = self.group:split(math.floor(self.rank / n))
    if heads then
        context = require("te.distributed.sequence").both { context:split(math.floor(context.rank / heads)),
            context:split(context.rank % heads) }
    end
    self.context = context
    self.row_rank, self.row_ranks = math.floor(self.rank / n), self.size / n
end

--- Splits the model between every n neighbouring processes, which have the same rows: field `tensor` is their group.
--- All processes call it. Returns what is wrong, if anything.
---@param n integer
---@param sequence boolean  whether tokens are split between layers
---@return string|nil problem
function Ranks:divide_model(n, sequence)
    if n == 1 then return end
    if self.size % n ~= 0 then return ("the number of processes, %d, is no multiple of it"):format(self.size) end
    local first = math.floor(self.rank / n)
    self.tensor = self.group:split(first)
    self.row_rank, self.row_ranks, self.holds, self.drawer = first, self.size / n, first == 0, first
    self.parts, self.split = self.tensor, { tensor_parallel = self.tensor, sequence_parallel = sequence }
end

--- Divides the blocks of the model between every n processes, or n times as many where others have parts of it or of
--- sequences. All processes call it, behind divide_sequences and divide_model. Returns what is wrong, if anything.
---@param n integer
---@return string|nil problem
function Ranks:divide_stages(n)
    if n == 1 then return end
    local inner = (self.tensor or self.context or { size = 1 }).size
    if self.size % (n * inner) ~= 0 then
        return ("the number of processes, %d, is no multiple of %s"):format(self.size,
            inner == 1 and "it" or ("%d x %d"):format(n, inner))
    end
    local row, place = math.floor(self.rank / (n * inner)), self.rank % inner
    local stages = self.group:split(row * inner + place)
    self.split.pipeline_parallel, self.alike = stages, self.group:split(stages.rank)
    self.parts = self.tensor and self.group:split(row) or stages
    self.row_rank, self.row_ranks = row, self.size / (n * inner)
    self.holds = row == 0 and (self.tensor ~= nil or place == 0)
    self.drawer = self.tensor and row or row * inner + place
end

--- Divides what the options of train_gpt.lua say. Returns the option that cannot be, and what is wrong.
---@param o table
---@return string|nil name
---@return string|nil problem
function Ranks:divide(o)
    local heads = o.cp_comm_type == "a2a+p2p" and o.cp_heads or nil
    local problem = self:divide_sequences(o.context_parallel, o.block, heads)
    if problem then return "context-parallel", problem end
    problem = self:divide_model(o.tensor_parallel, o.sequence_parallel)
    if problem then return "tensor-parallel", problem end
    problem = self:divide_stages(o.pipeline_parallel)
    if problem then return "pipeline-parallel", problem end
end

local function of_all(group, number, op)
    return group:all_reduce(te.tensor({ number }, { dtype = "int32", device = "cpu" }), op):item()
end

--- Whether one of those that have parts of the same model says so; of a whole one, this process.
---@param said boolean
---@return boolean
function Ranks:any_part(said)
    if not self.parts then return said end
    return of_all(self.parts, said and 1 or 0, "max") > 0
end

--- Whether this process is the one to say what it has found: rank 0, or of a divided model the first that has it.
---@param found boolean
---@return boolean
function Ranks:speaks(found)
    if not self.split.pipeline_parallel then return self.leads end
    local first = of_all(self.parts, found and self.parts.rank or self.parts.size, "min")
    return self.holds and self.parts.rank == first % self.parts.size
end

--- This process's part of rows {rows, tokens}.
function Ranks:part(x) return self.context and te.distributed.split_sequence(x, self.context) or x end

--- The sums of numbers over all processes, the same in each: one small collective.
function Ranks:sums(...)
    if self.size == 1 then return ... end
    local values = te.tensor({ ... }, { dtype = "float64", device = "cpu" })
    return unpack(self.group:all_reduce_(values, "sum"):totable())
end

local function told(problem, failed, ...)
    if problem == nil and failed > 0 then problem = select(2, pcall(run.fail, run.exit.io)) end
    return problem, ...
end

--- What keeps a process from going on, `problem` as it was raised here: all call this and get one where any has. A
--- process whose own is nil gets a failure without a message: whoever has the reason gives it. Behind it stand the sums
--- of numbers.
function Ranks:agree(problem, ...)
    if self.size == 1 then return problem, ... end
    return told(problem, self:sums(problem ~= nil and 1 or 0, ...))
end

function Ranks:mean(value) return (self:sums(value)) / self.size end

--- The mean of a tensor over all processes, where it lies.
function Ranks:average(x) return self.size > 1 and self.group:all_reduce(x, "average") or x end

function Ranks:average_gradients(parameters)
    if self.size > 1 then te.distributed.average_gradients(parameters, { group = self.group }) end
end

--- Gives all processes the model of rank 0.
function Ranks:broadcast(model)
    if self.size > 1 then te.distributed.broadcast_parameters(model, { group = self.group }) end
end

--- Divides an optimizer between all processes.
function Ranks:shard(optimizer)
    if self.size > 1 then te.distributed.shard_optimizer(optimizer, self.group) end
end

function Ranks:barrier()
    if self.size > 1 then self.group:barrier() end
end

-- Texts by name as one: lengths tell where each begins.
local function packed(texts)
    local parts = {}
    for _, name in ipairs(options.names(texts)) do
        parts[#parts + 1] = ("%d:%s%d:%s"):format(#name, name, #texts[name], texts[name])
    end
    return table.concat(parts)
end

local function unpacked(text)
    local texts, at = {}, 1
    local function read()
        local length, last = text:match("^(%d+):()", at)
        at = last + length
        return text:sub(last, at - 1)
    end
    while at <= #text do
        local name = read()
        texts[name] = read()
    end
    return texts
end

--- The first of texts, which go by names, that another process has otherwise than rank 0: its name, the rank, and both
--- texts, "none" of one that is not there; nil where all are alike. All processes call it and get the same answer.
---@param texts table<string, string>
---@return string|nil name
---@return integer|nil rank
---@return string|nil text
---@return string|nil first  that of rank 0
function Ranks:difference(texts)
    if self.size == 1 then return end
    local all = gather(self.group, packed(texts))
    for rank = 1, #all - 1 do
        if all[rank + 1] ~= all[1] then
            local here, first, names = unpacked(all[rank + 1]), unpacked(all[1]), {}
            for name in pairs(here) do names[name] = true end
            for name in pairs(first) do names[name] = true end
            for _, name in ipairs(options.names(names)) do
                if here[name] ~= first[name] then return name, rank, here[name] or "none", first[name] or "none" end
            end
        end
    end
end

--- "cuda" on a machine of several devices: each process has its own.
function Ranks:device(name)
    if self.size == 1 or name ~= "cuda" then return name end
    local n = 0
    for _, device in ipairs((te.devices())) do
        if device:find "^cuda" then n = n + 1 end
    end
    return n > 1 and ("cuda:%d"):format(self.local_rank % n) or name
end

-- What tells processes apart that do not share processors: the machine and those that it may run on, as 16 bytes.
local function processors()
    local text = {}
    for _, path in ipairs { "/proc/sys/kernel/random/boot_id", "/proc/self/status" } do
        local file = io.open(path)
        text[#text + 1] = file and file:read "*a" or ""
        if file then file:close() end
    end
    text = text[1] .. (text[2]:match "\nCpus_allowed:%s*([^\n]*)" or "")
    local sums = { 0, 0, 0, 0 }
    for i = 1, #text do
        local k = i % 4 + 1
        sums[k] = (sums[k] * 31 + text:byte(i)) % 2 ^ 30
    end
    return sums
end

--- Whether the executable's --threads, te.set_num_threads or OMP_NUM_THREADS has said how many there are.
function ranks.threads_told()
    return (te._core.told()) or (os.getenv "OMP_NUM_THREADS" or ""):match "^%s*%+?0*[1-9]" ~= nil
end

--- Whether TE_DEVICE or the executable's --device has said where tensors are made.
function ranks.device_told() return (select(2, te._core.told())) end

--- The threads of a process that was not told how many: processes that may run on the same processors share them. A
--- launcher that binds processes has divided them already.
function Ranks:share_threads()
    if self.size == 1 or ranks.threads_told() then return end
    local own = te.tensor({ processors() }, { dtype = "int32", device = "cpu" })
    local all, sharing = self.group:all_gather(own):totable(), 0
    own = all[self.rank + 1]
    for _, other in ipairs(all) do
        local same = true
        for k = 1, #own do same = same and own[k] == other[k] end
        sharing = sharing + (same and 1 or 0)
    end
    te.set_num_threads(math.max(1, math.floor(te.get_num_threads() / sharing)))
end

local STRIDE, SEEDS = 173402521172797, 2 ^ 53 -- any large odd number; seeds are whole in a double

--- Random numbers of its own for each process, and for those that have parts of the same model together, from a state
--- that is the same in all. Rank 0 goes on with that state.
function Ranks:divide_random()
    local seed, offset = te.rng_state():match "^(%d+) (%d+)$"
    if self.drawer == 0 then return end
    seed = tonumber(seed) % SEEDS
    for _ = 1, self.drawer do seed = (seed + STRIDE) % SEEDS end
    te.rng_state(("%.0f %s"):format(seed, offset))
end

return ranks
