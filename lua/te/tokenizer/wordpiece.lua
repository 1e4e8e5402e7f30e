--- WordPiece tokenizers from tokenizer.json files, or from a vocab.txt alone, as BERT comes with (Devlin et al. 2019).
--
--     text     added tokens are taken out where they stand in it, the longest first
--     words    te._core.words: normalized, cut at spaces and around punctuation
--     tokens   of each word the longest that it begins with, then the longest of "##" and what is left, and so on; a
--              word that is not all tokens, or is too long, is the unknown one
--
-- What a file says acts, or is an error that names it.

local te = require "te"
local fail = require "te.fail"
local files = require "te.files"
local json = require "te.json"
local options = require "te.options"
local each = require "te.tokenizer.ids"
local reader = require "te.tokenizer.reader"
local around = require "te.tokenizer.around"
local beside = require "te.tokenizer.beside"
local refuse, typed = reader.refuse, reader.typed

local WordPiece = { kind = "wordpiece" }
WordPiece.__index = WordPiece

local REMEMBERED, LONGEST = 2 ^ 16, 128 -- words whose tokens are kept, and bytes of each

-- Words -------------------------------------------------------------------------------------------------------------

local function count_characters(word) return select(2, word:gsub("[^\128-\191]", "")) end

-- The ids of one word.
local function cut(self, word)
    if count_characters(word) > self.longest_word then return { self.unknown } end
    local ids, first, prefix = {}, 1, ""
    while first <= #word do
        local last, id = math.min(#word, first + self.longest_token - 1), nil
        while last >= first do
            local next_byte = word:byte(last + 1)
            if not next_byte or next_byte < 0x80 or next_byte > 0xBF then
                id = self.ids[prefix .. word:sub(first, last)]
                if id then break end
            end
            last = last - 1
        end
        if not id then return { self.unknown } end
        ids[#ids + 1], first, prefix = id, last + 1, self.prefix
    end
    return ids
end

local function append_words(self, text, ids)
    local known = self.remembered
    for _, word in ipairs(te._core.words(text, self.flags)) do
        local list = known[word]
        if not list then
            list = cut(self, word)
            if self.n_remembered >= REMEMBERED then known, self.n_remembered = {}, 0 end
            self.remembered = known
            if #word <= LONGEST then known[word], self.n_remembered = list, self.n_remembered + 1 end
        end
        for i = 1, #list do ids[#ids + 1] = list[i] end
    end
end

-- Added tokens ------------------------------------------------------------------------------------------------------

-- What finds the first of some texts in another: those by their first byte, the longest first.
local function finder(tokens)
    local by_byte, set = {}, {}
    for _, token in ipairs(tokens) do
        local byte = token.content:sub(1, 1)
        if not by_byte[byte] then by_byte[byte], set[#set + 1] = {}, byte:gsub("%p", "%%%0") end
        table.insert(by_byte[byte], token)
    end
    for _, list in pairs(by_byte) do table.sort(list, function(a, b) return #a.content > #b.content end) end
    if not set[1] then return nil end
    local pattern = "[" .. table.concat(set) .. "]"
    return function(text, at)
        while true do
            at = text:find(pattern, at)
            if not at then return nil end
            for _, token in ipairs(by_byte[text:sub(at, at)]) do
                if text:sub(at, at + #token.content - 1) == token.content then return at, token end
            end
            at = at + 1
        end
    end
end

-- Takes the tokens that `find` finds out of a text; rest(text) is for what lies between.
local function take_out(find, text, ids, rest)
    local at = 1
    while find do
        local first, token = find(text, at)
        if not first then break end
        if first > at then rest(text:sub(at, first - 1)) end
        ids[#ids + 1] = token.id
        at = first + #token.content
    end
    if at <= #text then rest(text:sub(at)) end
end

-- The methods -------------------------------------------------------------------------------------------------------

local ENCODE = {
    special = { "boolean", false, help = "add the special tokens that the file puts around a text" },
    prompt = { "boolean", false, help = "add those that it puts before a text, unless they stand there" },
    pair = { "string", help = "a second text, behind the first as the file says, with special" },
}

local function ids_of(self, text)
    local ids = {}
    local function words(part) append_words(self, part, ids) end
    local function normalized(part)
        if not self.find_normalized then return words(part) end
        part = te._core.words(part, self.normalizing)[1] or ""
        take_out(self.find_normalized, part, ids, words)
    end
    take_out(self.find, around.strip(self.strippers, text), ids, normalized)
    return ids
end

--- Ids of a text. Special tokens that stand in it are found; none are added unless `special` or `prompt` asks for them.
---@param text string
---@param opts table|nil  special, prompt, pair
---@return integer[] ids
---@return integer[]|nil types  with pair: of each id
function WordPiece:encode(text, opts)
    options.method("tokenizer:encode", self, WordPiece)
    options.argument("te.tokenizer", "text", text, { "string" })
    opts = opts and options.check("te.tokenizer", opts, ENCODE)
    local ids = ids_of(self, text)
    if opts and opts.pair then
        if not opts.special then fail("te.tokenizer: option pair: needs special") end
        return around.pair("te.tokenizer", self.templates, { A = ids, B = ids_of(self, opts.pair) })
    end
    return around.put(self, ids, opts)
end

local DECODE = {
    continues = { "boolean", false, help = "the ids continue others: a word begins with its space" },
    skip_special_tokens = { "boolean", false, help = "leave out the tokens that the file calls special" },
}

local CLEANED = { { " .", "." }, { " ?", "?" }, { " !", "!" }, { " ,", "," }, { " ' ", "'" }, { " n't", "n't" },
    { " 'm", "'m" }, { " do not", " don't" }, { " 's", "'s" }, { " 've", "'ve" }, { " 're", "'re" } }

local function clean(piece)
    for _, pair in ipairs(CLEANED) do
        local at = piece:find(pair[1], 1, true)
        if at then piece = piece:sub(1, at - 1) .. pair[2] .. piece:sub(at + #pair[1]) end
    end
    return piece
end

--- The text that ids stand for: words with spaces between, special tokens as they are written. A tensor {batch, n}
--- gives a list of texts.
---@param ids integer[]|te.Tensor  a list or a tensor {n} or {batch, n}
---@param opts table|nil  continues, skip_special_tokens
---@return string|string[]
function WordPiece:decode(ids, opts)
    options.method("tokenizer:decode", self, WordPiece)
    opts = options.check("te.tokenizer", opts, DECODE)
    return each(ids, function(list)
        local pieces, n = {}, 0
        for i = 1, options.list("te.tokenizer", "ids", list) do
            local piece = self.texts[list[i]]
                or fail("te.tokenizer: token %s of a vocabulary of %d", tostring(list[i]), self.vocab_size)
            if not (opts.skip_special_tokens and self.special[list[i]]) then
                if n > 0 or opts.continues then
                    local inner = piece:sub(1, #self.prefix) == self.prefix
                    piece = inner and piece:sub(#self.prefix + 1) or " " .. piece
                end
                n = n + 1
                pieces[n] = self.cleans and clean(piece) or piece
            end
        end
        return table.concat(pieces)
    end)
end

--- The token that is just this text, such as "[MASK]"; nil where there is none.
---@param text string
---@return integer|nil
function WordPiece:id(text)
    options.method("tokenizer:id", self, WordPiece)
    options.argument("te.tokenizer", "text", text, { "string" })
    return self.names[text] or self.ids[text]
end

--- A token that a text may begin after: what the file puts in front of one.
---@return integer
function WordPiece:start()
    options.method("tokenizer:start", self, WordPiece)
    return self.before[1] or 0
end

--- The ids that end a text: none, for no text is continued.
function WordPiece.ends() return {} end

--- Names the file, which te.tokenizer.parse reads again.
---@return string
function WordPiece:describe()
    options.method("tokenizer:describe", self, WordPiece)
    return "bpe " .. self.called
end

--- Has describe() say another name of the file: one from the folder that te.tokenizer.parse is given.
---@param name string
function WordPiece:call(name)
    options.method("tokenizer:call", self, WordPiece)
    self.called = options.argument("tokenizer:call", "name", name, { "string" })
    return self
end

--- Writes the file, and what stands beside it for tokenizers, into a folder, which keeps nothing of another's.
---@param folder string
function WordPiece:save(folder)
    options.method("tokenizer:save", self, WordPiece)
    options.argument("tokenizer:save", "folder", folder, { "string" })
    files.need "tokenizer:save"
    if self.written then return beside.write(folder, { ["tokenizer.json"] = self.written }) end
    beside.copy("tokenizer:save", self.path, folder)
end

-- Files -------------------------------------------------------------------------------------------------------------

-- Letters of te._core.words for what the normalizer does, and for that and cutting.
local function read_flags(path, file)
    local normalizer, flags = file.normalizer, ""
    if normalizer ~= nil then
        if type(normalizer) ~= "table" or normalizer.type ~= "BertNormalizer" then
            refuse(path, "normalizer.type", type(normalizer) == "table" and normalizer.type or normalizer,
                '"BertNormalizer" or null')
        end
        local function says(name, default)
            local value = typed(path, normalizer, "normalizer.", name, "boolean", true)
            if value == nil then return default end
            return value
        end
        local lowercase = says("lowercase", true)
        flags = (says("clean_text", true) and "c" or "") .. (says("handle_chinese_chars", true) and "i" or "")
            .. (says("strip_accents", lowercase) and "a" or "") .. (lowercase and "l" or "")
    end
    local pre_tokenizer = file.pre_tokenizer
    if type(pre_tokenizer) ~= "table" or pre_tokenizer.type ~= "BertPreTokenizer" then
        refuse(path, "pre_tokenizer", type(pre_tokenizer) == "table" and pre_tokenizer.type or pre_tokenizer,
            '"BertPreTokenizer"')
    end
    return flags, flags .. "w"
end

-- Texts by id, ids by text, and the longest text's bytes.
local function read_vocabulary(path, vocabulary, added)
    local texts, longest, n, largest = {}, 0, 0, -1
    local function put(text, id, field)
        if type(id) ~= "number" or id < 0 or id % 1 ~= 0 or id >= 2 ^ 31 - 1 or texts[id] then
            refuse(path, field, id, "an id that no other token has")
        end
        texts[id], n, largest = text, n + 1, math.max(largest, id)
    end
    for text, id in pairs(vocabulary) do
        put(text, id, "model.vocab[" .. options.shown(text) .. "]")
        longest = math.max(longest, #text)
    end
    for i, token in ipairs(added) do
        local known = vocabulary[token.content]
        if known == nil then
            put(token.content, token.id, ("added_tokens[%d].id"):format(i - 1))
        elseif known ~= token.id then
            refuse(path, ("added_tokens[%d].id"):format(i - 1), token.id, ("%d, as in model.vocab"):format(known))
        end
    end
    if largest ~= n - 1 then
        fail("%s: %s: model.vocab: %d tokens, and one has the id %d", reader.WHO, path, n, largest)
    end
    return texts, longest, n
end

-- Whether decoded texts are cleaned.
local function read_decoder(path, decoder, prefix)
    if decoder == nil then return false end
    if type(decoder) ~= "table" or decoder.type ~= "WordPiece" or (decoder.prefix or "##") ~= prefix then
        refuse(path, "decoder", type(decoder) == "table" and decoder.type or decoder,
            ('a "WordPiece" of %s'):format(prefix))
    end
    return typed(path, decoder, "decoder.", "cleanup", "boolean", true) ~= false
end

local wordpiece = {}

--- The tokenizer of what a file says, but for truncation and padding, which whoever makes batches does.
function wordpiece.build(path, file)
    local model, plain, other, names, special = file.model, {}, {}, {}, {}
    local vocabulary = typed(path, model, "model.", "vocab", "table")
    local added = around.added(path, typed(path, file, "", "added_tokens", "table", true) or {})
    local prefix = typed(path, model, "model.", "continuing_subword_prefix", "string", true) or "##"
    local unknown = vocabulary[typed(path, model, "model.", "unk_token", "string", true) or "[UNK]"]
    if not unknown then refuse(path, "model.unk_token", model.unk_token, "a token of model.vocab") end
    local texts, longest, size = read_vocabulary(path, vocabulary, added)
    local normalizing, flags = read_flags(path, file)
    for _, token in ipairs(added) do
        names[token.content], special[token.id] = token.id, token.special or nil
        local content = token.normalized and te._core.words(token.content, normalizing)[1] or token.content
        table.insert(token.normalized and other or plain, { content = content, id = token.id })
    end
    local templates = around.post_processor(path, file.post_processor, size)
    local before, after = around.single(templates)
    return setmetatable({ path = path, called = path, vocab_size = size, ids = vocabulary, texts = texts,
        longest_token = longest, prefix = prefix,
        longest_word = typed(path, model, "model.", "max_input_chars_per_word", "number", true) or 100,
        unknown = unknown, flags = flags, normalizing = normalizing, names = names, special = special,
        find = finder(plain), find_normalized = finder(other), strippers = around.strippers(added),
        templates = templates, before = before, after = after, cleans = read_decoder(path, file.decoder, prefix),
        remembered = {}, n_remembered = 0 }, WordPiece)
end

local SPECIAL = { "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]" }

--- The tokenizer of a vocab.txt, whose line number n is the token n - 1, with BERT's special tokens. Beside it,
--- tokenizer_config.json may say do_lower_case, tokenize_chinese_chars and strip_accents.
---@param path string
function wordpiece.of_words(path)
    local text, message = files.read(path)
    if not text then te._core.fail_io(("%s: %s"):format(reader.WHO, message)) end
    local vocabulary, n, added = {}, 0, {}
    for line in text:gsub("\r\n", "\n"):gsub("([^\n])$", "%1\n"):gmatch "([^\n]*)\n" do
        vocabulary[line], n = n, n + 1
    end
    for _, name in ipairs(SPECIAL) do
        local id = vocabulary[name]
        if id then added[#added + 1] = { content = name, id = id, normalized = false, special = true } end
    end
    local first, last = vocabulary["[CLS]"], vocabulary["[SEP]"]
    if not (first and last) then fail("%s: %s: there is no [CLS] or no [SEP]", reader.WHO, path) end
    local beside_it, said = (path:match "^.*/" or "") .. "tokenizer_config.json", {}
    if te._core.stat(beside_it) then said = files.json(reader.WHO, beside_it) end
    if type(said) ~= "table" then fail("%s: %s: expected an object", reader.WHO, beside_it) end
    local file = { version = "1.0", truncation = json.null, padding = json.null, added_tokens = added,
        normalizer = { type = "BertNormalizer", clean_text = true, lowercase = said.do_lower_case ~= false,
            handle_chinese_chars = said.tokenize_chinese_chars ~= false, strip_accents = said.strip_accents },
        pre_tokenizer = { type = "BertPreTokenizer" },
        post_processor = { type = "BertProcessing", cls = { "[CLS]", first }, sep = { "[SEP]", last } },
        decoder = { type = "WordPiece", prefix = "##", cleanup = true },
        model = { type = "WordPiece", unk_token = "[UNK]", continuing_subword_prefix = "##",
            max_input_chars_per_word = 100, vocab = vocabulary } }
    local made = wordpiece.build(path, file)
    made.written = json.encode(file)
    return made
end

return wordpiece
