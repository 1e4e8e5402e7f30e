-- Writes a model that train_gpt.lua trained, and its tokenizer, into a folder as Hugging Face's Transformers reads it.
--
--     tetrain export.lua --out=out/gpt --to=my-gpt
--     tetrain export.lua --checkpoint=out/gpt/checkpoint-00002000.safetensors --to=my-gpt --dtype=bfloat16
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
}

local function main(words)
    local o = command_line:parse(words)
    if not o.to then command_line:refuse "--to is missing: the folder to write into" end
    local model, tokenizer, path = train.saved.load(o.out, o.checkpoint)
    local kind = train.io(te.models.to_hugging_face, model, o.to, { dtype = o.dtype, tokenizer = tokenizer })
    io.stdout:write(("%s: %s of %s, %d parameters%s\n"):format(o.to, kind, path, model:num_parameters(),
        tokenizer and "" or ", without a tokenizer"))
end

train.run(main, arg)
