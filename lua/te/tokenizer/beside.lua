--- The files that a tokenizer is in: their names, the first for us and all of them for Transformers.

local json = require "te.json"

local beside = { "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja" }

-- Of one whose first file says all. Without it Transformers takes the model's own kind, which may cut text otherwise.
local CONFIG = json.encode { tokenizer_class = "PreTrainedTokenizerFast", clean_up_tokenization_spaces = false }

--- Writes the files of a tokenizer into a folder. Those that are another one's there are removed.
---@param folder string
---@param texts table<string, string>  by name
function beside.write(folder, texts)
    for _, name in ipairs(beside) do
        local path, text = folder .. "/" .. name, texts[name] or name == "tokenizer_config.json" and CONFIG
        if text then require("te")._core.write_file(path, text) else os.remove(path) end
    end
end

--- Copies a tokenizer's file, and what stands beside it, into a folder.
---@param who string
---@param path string  of the first file
---@param folder string
function beside.copy(who, path, folder)
    local core, from, texts = require("te")._core, path:match "^(.*/)[^/]*$" or "", {}
    for i, name in ipairs(beside) do
        local source = i == 1 and path or from .. name
        if i == 1 or core.stat(source) then
            local text, message = require("te.files").read(source)
            texts[name] = text or core.fail_io(who .. ": " .. message)
        end
    end
    beside.write(folder, texts)
end

return beside
