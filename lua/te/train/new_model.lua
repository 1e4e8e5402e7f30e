--- te.train.new_model: the model that the options of train_gpt.lua describe.

local te = require "te"

---@param o table                 values of options
---@param tokenizer table|nil     what has the vocabulary; nil: the options say how large it is
---@param quantized string|nil    the recipe in whose format weights are stored
---@param split table             how te.train.ranks splits it
---@return table model
return function(o, tokenizer, quantized, split)
    local config = { vocab_size = tokenizer and tokenizer.vocab_size or o.vocab_size, block_size = o.block,
        n_layer = o.n_layer, n_head = o.n_head, n_embd = o.n_embd, dropout = o.dropout, init_std = o.init_std,
        quantized = quantized, tensor_parallel = split.tensor_parallel, sequence_parallel = split.sequence_parallel,
        pipeline_parallel = split.pipeline_parallel }
    if o.model == "gpt" then config.bias = o.bias end
    if o.n_kv_head > 0 then config.n_kv_head = o.n_kv_head end
    if o.n_expert > 0 then
        config.n_expert, config.n_expert_active = o.n_expert, o.n_expert_active
        config.expert_aux_loss = o.expert_aux_loss
    end
    return te.models[o.model](config)
end
