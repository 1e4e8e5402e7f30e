--- te.Embedding: rows of a table by token id. Ids are data and count from 0.

local te = require "te"
local options = require "te.options"
local declared = require "te.ops.declared"
local initializers = require "te.initializers"
local BasicOperation = require("te.operation").BasicOperation

local Embedding = BasicOperation:extend("Embedding")
Embedding.pure, Embedding.takes = true, 3

local EMBEDDING = {
    init_method = { "callable" },
    params_dtype = declared.PLACE.params_dtype,
    device = { "string" },
}

function Embedding:init(num_embeddings, embedding_dim, opts)
    opts = options.check("te.Embedding", opts, EMBEDDING)
    self.num_embeddings = options.argument("te.Embedding", "num_embeddings", num_embeddings, { "size" })
    self.embedding_dim = options.argument("te.Embedding", "embedding_dim", embedding_dim, { "size" })
    self.weight = initializers.parameter({ num_embeddings, embedding_dim },
        opts.init_method or initializers.default, opts)
end

function Embedding:op_forward(_, ids) return te.embedding(self.weight, ids) end

function Embedding:lower(g, ids) return g:op("embedding", { g:param(self, "weight"), ids }) end

function Embedding:describe()
    return ("num_embeddings=%d, embedding_dim=%d"):format(self.num_embeddings, self.embedding_dim)
end

return { Embedding = Embedding }
