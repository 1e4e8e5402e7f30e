--- What was loaded is collected when nobody holds it: no trace of the compiler does. In processes of their own, since
--- that depends on what ran before.

local te = require "te"
local shell = require "spec.support.shell"

local TETRAIN = os.getenv("TETRAIN") or te._core.executable()

local COMMON = [[
local te, folder = require "te", ...
local config = { vocab_size = 64, block_size = 8, n_layer = 24, n_head = 2, n_embd = 16, bias = true }
local function in_use()
    for _ = 1, 3 do collectgarbage() end
    return te.memory_stats().current
end
local function grown(read)
    local before = in_use()
    for _ = 1, 6 do read() end
    print(in_use() - before)
end
]]

local CASES = {
    ["a checkpoint"] = [[
local function make()
    local model = te.models.gpt(config)
    return model, te.optim.AdamW(model:parameter_groups(0.1), { lr = 1e-3 })
end
local function save()
    local model, optimizer = make()
    local ids = te.tensor({ { 1, 2, 3 } }, { dtype = "int32" })
    select(2, model(ids, ids)):backward()
    optimizer:step()
    te.train.checkpoint.save { folder = folder, step = 1, model = model, optimizer = optimizer, keep = 1,
        metadata = { model:texts() } }
end
save()
grown(function()
    local saved = te.train.checkpoint.load(te.train.checkpoint.latest(folder))
    local model = te.models.from_checkpoint(saved)
    local optimizer = te.optim.AdamW(model:parameter_groups(0.1), { lr = 1e-3 })
    te.train.checkpoint.restore_training(saved, model, optimizer)
end)]],
    ["a model of Hugging Face's Transformers"] = [[
local function save()
    local weights = { ["wte.weight"] = te.ones(64, 16), ["wpe.weight"] = te.ones(8, 16), ["ln_f.weight"] = te.ones(16),
        ["ln_f.bias"] = te.ones(16) }
    for i = 0, 23 do
        for name, shape in pairs { ["ln_1"] = { 16 }, ["ln_2"] = { 16 }, ["attn.c_attn"] = { 16, 48 },
            ["attn.c_proj"] = { 16, 16 }, ["mlp.c_fc"] = { 16, 64 }, ["mlp.c_proj"] = { 64, 16 } } do
            weights[("h.%d.%s.weight"):format(i, name)] = te.ones(shape)
            weights[("h.%d.%s.bias"):format(i, name)] = te.ones { shape[#shape] }
        end
    end
    te.save(folder .. "/model.safetensors", weights)
    local file = io.open(folder .. "/config.json", "w")
    file:write '{"model_type": "gpt2", "vocab_size": 64, "n_positions": 8, "n_embd": 16, "n_layer": 24, "n_head": 2}'
    file:close()
end
save()
local most = te.models.from_hugging_face(folder)
print(in_use() == 4 * most:num_parameters())
most = nil
collectgarbage()
grown(function() te.models.from_hugging_face(folder) end)]],
}

describe("loading", function()
    for name, text in pairs(CASES) do
        it(name .. " leaves nothing when it is dropped", function()
            local folder = os.tmpname()
            os.remove(folder)
            te._core.mkdir(folder)
            local file = assert(io.open(folder .. "/script.lua", "w"))
            file:write(COMMON, text)
            file:close()
            local output, status = shell.capture(("%s %s/script.lua %s"):format(TETRAIN, folder, folder))
            os.execute("rm -r " .. folder)
            assert.equal(0, status, output)
            assert.equal("0\n", (output:gsub("^true\n", "")))
        end)
    end
end)
