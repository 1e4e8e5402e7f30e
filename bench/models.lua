-- The models that are measured, loaded by dofile from beside the benches; bench/peers/configs.py has the same.

local te = require "te"

local models = { names = { "char", "baby", "gpt2_64", "gpt2_256" } } -- the GPTs
models.steps = { "llama", unpack(models.names) }

-- n_layer, n_head, n_embd, batch, sequence, vocabulary; of a Llama also n_kv_head, n_inner
models.configs = {
    char = { 4, 4, 128, 12, 64, 65 },
    baby = { 6, 6, 384, 16, 256, 65 },
    gpt2_64 = { 12, 12, 768, 4, 64, 50304 },
    gpt2_256 = { 12, 12, 768, 4, 256, 50304 },
    llama = { 6, 6, 384, 16, 256, 4096, 2, 1024 },
}

--- The model of a config, without dropout and biases.
function models.build(name)
    local n_layer, n_head, n_embd, _, sequence, vocabulary, n_kv_head, n_inner = unpack(models.configs[name])
    local config = { vocab_size = vocabulary, block_size = sequence, n_layer = n_layer, n_head = n_head,
        n_embd = n_embd, dropout = 0 }
    if n_inner then
        config.n_kv_head, config.n_inner = n_kv_head, n_inner
        return te.models.llama(config)
    end
    config.bias = false
    return te.models.gpt(config)
end

--- Writes weights and tokens to a file that the peers start from.
function models.save_start(path, model, ids, targets)
    local tensors = { ids = ids, targets = targets }
    for name, parameter in model:named_parameters() do tensors[name] = parameter end
    te.save(path, tensors, {})
end

return models
