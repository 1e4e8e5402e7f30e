--- te.Embedding: rows of a table by token id. Ids are data and count from 0.
--
-- With tensor_parallel_mode = "vocab" the processes of a group hold some rows of the table each: all of them look up
-- the same ids, those of other processes' rows give zeros, and the results are added up. A gradient of the table stays
-- where its rows are. Where the rows do not divide, the first ranks have one more, as in a column-parallel te.Linear,
-- which may share the table: head.weight = embedding.weight.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local declared = require "te.ops.declared"
local initializers = require "te.initializers"
local collective = require "te.ops.collective"
local BasicOperation = require("te.operation").BasicOperation

local Embedding = BasicOperation:extend("Embedding")
Embedding.pure, Embedding.takes = true, 3

local EMBEDDING = {
    init_method = declared.INIT,
    params_dtype = declared.PLACE.params_dtype,
    device = declared.PLACE.device,
    tensor_parallel_mode = { "string", choices = { "vocab" },
        help = "each process holds some rows; default: the table is not split" },
    tensor_parallel_group = collective.PARALLEL.tensor_parallel_group,
    sequence_parallel = { "boolean", false, help = "each process gets its part of the rows of the result" },
}

local function split_table(self, split)
    local who, whole = "te.Embedding", self.weight:detach()
    self.split = split
    self.first = collective.share(who, "num_embeddings", self.num_embeddings, split.group, true)
    self.weight = collective.part(who, "num_embeddings", whole, 1, split.group, true)
    self.reduce = split.sequence and collective.scatter or collective.reduce
end

function Embedding:init(num_embeddings, embedding_dim, opts)
    opts = options.check("te.Embedding", opts, EMBEDDING)
    self.num_embeddings = options.argument("te.Embedding", "num_embeddings", num_embeddings, { "size" })
    self.embedding_dim = options.argument("te.Embedding", "embedding_dim", embedding_dim, { "size" })
    self.weight = initializers.parameter({ num_embeddings, embedding_dim },
        opts.init_method or initializers.default, opts)
    local split = collective.split("te.Embedding", opts)
    if split then split_table(self, split) end
end
options.declare(Embedding.init, EMBEDDING)

-- Whether each id is a row of the whole table. The host says at once that one is not; a device, where nobody waits for
-- it, when it looks the id up.
local function check_ids(self, ids)
    local known = te.eq(ids, te.clamp(ids, 0, self.num_embeddings - 1))
    if not te._core.device_traits(ids.device).host_memory or te.all(known):item() then return known end
    local at = te.argmin(known:reshape({ -1 }):to "float32", -1):item()
    fail("te.Embedding: id %d at position %d is outside 0 to %d", ids:reshape({ -1 })[at + 1]:item(), at + 1,
        self.num_embeddings - 1)
end

-- Ids that are nowhere stay as they are: no part of the table has them.
local function look_up(self, ids)
    local last = self.first + self.weight.shape[1] - 1
    local nearest, known = te.clamp(ids, self.first, last), check_ids(self, ids)
    local rows = te.embedding(self.weight, te.where(known, nearest - self.first, ids))
    return self.reduce(self.split.group, te.where(te.eq(ids, nearest):unsqueeze(-1), rows, 0))
end

function Embedding:op_forward(_, ids)
    if self.split then return look_up(self, ids) end
    return te.embedding(self.weight, ids)
end

function Embedding:lower(g, ids)
    if self.split then return nil, "it waits for other processes" end
    return g:op("embedding", { g:param(self, "weight"), ids })
end

function Embedding:describe()
    local split = self.split
    return ("num_embeddings=%d, embedding_dim=%d%s"):format(self.num_embeddings, self.embedding_dim,
        split and (", tensor_parallel_mode=%q, %s"):format(split.mode, tostring(split.group)) or "")
end

return { Embedding = Embedding }
