-- Writes a model that train_gpt.lua trained, and its tokenizer, into a folder as Hugging Face's Transformers reads it.
--
--     tetrain export.lua --out=out/gpt --to=my-gpt
--     tetrain export.lua --checkpoint=out/gpt/checkpoint-00002000.safetensors --to=my-gpt --dtype=bfloat16
--     tetrain export.lua --out=out/gpt --to=my-adapters --adapters     of a run with --lora-rank, for PEFT
--
-- AutoModelForCausalLM.from_pretrained("my-gpt") and AutoTokenizer.from_pretrained("my-gpt") load it there,
-- te.models.from_hugging_face and te.tokenizer.load here.

local te = require "te"
local train = te.train

local command_line = train.command_line {
    script = "export.lua",
    about = "Writes a model that train_gpt.lua trained as Hugging Face Transformers reads it.",
    { "out", "string", "out/gpt", help = "folder of the training run; its newest checkpoint is used" },
    { "checkpoint", "string", help = "a specific checkpoint instead" },
    { "to", "string", help = "folder to write into; required" },
    { "dtype", "string", choices = { "float32", "bfloat16", "float16" },
        help = "of the weights in the file; default: the checkpoint's" },
    { "adapters", "boolean", false, help = "the adapters of a run with --lora-rank alone, as PEFT reads them" },
}

-- Transformers adds adapters that lie beside a model to its weights, and those of an exported one have them already.
local function check_folder(o)
    if not o.to then command_line:refuse "--to is missing: the folder to write into" end
    if te._core.stat(o.to .. (o.adapters and "/config.json" or "/adapter_config.json")) then
        command_line:refuse("--to=%s: there %s already; Transformers would add the adapters to the model", o.to,
            o.adapters and "is a model" or "are adapters")
    end
end

local function main(words)
    local o = command_line:parse(words)
    check_folder(o)
    local model, tokenizer, path, base = train.saved.load(o.out, o.checkpoint)
    local adapted = te.lora.config(model)
    if o.adapters then
        if not adapted then command_line:refuse("--adapters: %s has none", path) end
        if o.dtype then command_line:refuse "--dtype: adapters have that of the checkpoint" end
        train.io(te.lora.save, model, o.to, { base = base })
        io.stdout:write(("%s: adapters of %s, for %s\n"):format(o.to, path, base))
        return
    end
    local kind = train.io(te.models.to_hugging_face, model, o.to, { dtype = o.dtype, tokenizer = tokenizer })
    if adapted then te.lora.remove(model) end -- they are in the weights there
    io.stdout:write(("%s: %s of %s, %d parameters%s\n"):format(o.to, kind, path, model:num_parameters(),
        tokenizer and "" or ", without a tokenizer"))
end

train.run(main, arg)
