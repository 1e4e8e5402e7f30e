-- Some tokens of GPT-2 124M in a recorded graph, for a profiler of kernels to look at: te.profile sees no kernel inside
-- a graph. scripts/gpu_check.sh runs it under ncu.
--
--     build/tetrain bench/gpu_token.lua [TEXTS]

local te = require "te"

local texts = tonumber(arg[1] or 1)
local model = te.models.gpt { vocab_size = 50304, block_size = 1024, n_layer = 12, n_head = 12, n_embd = 768 }
model:to "cuda"
local ids = te.randint(0, 63, { texts, 128 }, { dtype = "int32", device = "cuda" })
te.autocast({ dtype = "bfloat16" }, function() model:generate(ids, 24, { temperature = 0, graph = true }) end)
te.synchronize "cuda"
