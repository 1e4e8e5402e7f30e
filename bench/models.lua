-- The GPTs that are measured, loaded by dofile from beside the benches; bench/peers/configs.py has the same.

local te = require "te"

local models = { names = { "char", "baby", "gpt2_64", "gpt2_256" } }

-- n_layer, n_head, n_embd, batch, sequence, vocabulary
models.configs = {
    char = { 4, 4, 128, 12, 64, 65 },
    baby = { 6, 6, 384, 16, 256, 65 },
    gpt2_64 = { 12, 12, 768, 4, 64, 50304 },
    gpt2_256 = { 12, 12, 768, 4, 256, 50304 },
}

--- Writes weights and tokens to a file that the peers start from.
function models.save_start(path, model, ids, targets)
    local tensors = { ids = ids, targets = targets }
    for name, parameter in model:named_parameters() do tensors[name] = parameter end
    te.save(path, tensors, {})
end

return models
