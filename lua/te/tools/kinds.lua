--- te.tools.kinds: what functions of `te` return that has methods and is no class of modules: plans, profiles, groups.

local te = require "te"
local options = require "te.options"

local kinds = {}

-- Name, what an object is called in signatures, fields, sentence, and the file that has the class or what gives it.
local ROWS = {
    { "Plan", "plan", "forward: table[], backward: table[], reasons: table[]",
        "What explain returns. Steps of forward and backward have name, ops and kernels (lists of names), kind, reads, "
            .. "writes and bytes of tensors, flops and, after plan:floors(), floor in seconds; reasons have from, to "
            .. "and reason.", "te.fuser.plan" },
    { "Profile", "profile", "events: table[], seconds: number",
        "What te.profile returns: profile[1] … profile[#profile] are the kernels that ran, in order: { name, kind, "
            .. "device, start, seconds, bytes, flops }.", "te.profile" },
    { "Group", "group", "rank: integer, size: integer, local_rank: integer, local_size: integer",
        "Processes, as te.distributed.world() returns them; ranks count from 0.", "te.distributed" },
    { "Tokenizer", "tokenizer", "kind: string, vocab_size: integer", "What the functions of te.tokenizer return.",
        "te.tokenizer.bpe" },
    { "DataSet", "set", "n_tokens: integer, n_train: integer, n_val: integer, tokenizer: te.Tokenizer|nil, "
        .. "description: string", "What te.data.open returns.",
        function() return getmetatable(te.data.open { tokens = { 0, 0, 0 }, block = 1 }) end },
    { "Watch", "watch", "", "What te.numerics.watch returns; prints as a table.", "te.numerics" },
    { "Graph", "graph", "", "What te.graph returns; it is called like its function.", "te.graph" },
    { "Hook", "hook", "", "What register_hook, register_forward_hook and register_forward_pre_hook return.",
        function() return require("te.hooks").Hook end },
    { "Optimizer", "optimizer", "groups: table[], lr: number", "What te.optim.AdamW, Muon and SGD return.",
        function() return require "te.optim.optimizer" end },
    { "LanguageModel", "model", "config: table", "The base of the classes of te.models.",
        function() return require "te.language_model" end },
    { "Decoder", "model", "config: table", "The base of te.models.gpt and te.models.llama.",
        function() return require "te.decoder" end },
    { "Encoder", "model", "config: table", "The base of te.models.bert and te.models.modernbert.",
        function() return require "te.encoder" end },
}

local made

--- All of them that there are in this runtime: { name, object, fields, doc, class }.
---@return table[]
function kinds.list()
    if made then return made end
    made = {}
    for _, row in ipairs(ROWS) do
        local get = row[5]
        local there, class = pcall(type(get) == "function" and get or require, get)
        class = options.kinds[row[1]] or class
        if there then
            made[#made + 1] = { name = row[1], object = row[2], fields = row[3], doc = row[4], class = class }
        end
    end
    return made
end

return kinds
