--- te.tools.source: what the sources of functions say of them: their annotations, and the opening of their files.

local te = require "te"

local source = {}

local function lines_of(text)
    local lines = {}
    for line in (text .. "\n"):gmatch "(.-)\r?\n" do lines[#lines + 1] = line end
    return lines
end

local cache = {}

--- Lines of the file that debug.getinfo calls `named`: of the library ("=te/…"), or a script ("@path").
function source.lines(named)
    if cache[named] then return cache[named] end
    local kind, name = named:sub(1, 1), named:sub(2)
    local text
    if kind == "=" then
        text = te._core.library_sources()[name]
    elseif kind == "@" then
        local file = io.open(name)
        text = file and file:read "*a"
        if file then file:close() end
    end
    local lines = text and lines_of(text)
    if kind == "=" then cache[named] = lines end -- a script may change
    return lines
end

-- The comment that ends right above a line, without its dashes.
local function comment_above(lines, line)
    local first = line
    while first > 1 and lines[first - 1]:find "^%s*%-%-" do first = first - 1 end
    local found = {}
    for i = first, line - 1 do found[#found + 1] = (lines[i]:gsub("^%s*%-%-%-?%s?", "")) end
    return found
end

local function names_in(parameters)
    local names = {}
    for name in parameters:gmatch "[%w_.]+" do
        if name ~= "self" and name ~= "_" then names[#names + 1] = name end
    end
    return names
end

-- Types of parameters without annotation, by the names that they have everywhere.
local USUAL = {}
for kind, names in pairs {
    ["te.Tensor"] = "x q k v t qkv dy ids logits tensor bias probs extra scales seq_lens split_sizes sorted_index",
    string = "path folder name text device who op",
    integer = "dim in_features out_features num_heads num_kv_heads hidden_size num_experts num_groups num_embeddings "
        .. "embedding_dim step topk root i length", ["integer|integer[]"] = "size",
    ["te.Shape"] = "shape", ["te.Dtype"] = "dtype", ["te.Module"] = "module model m", ["te.Group"] = "group",
    ["function"] = "fn callable", number = "lr max coeff p", table = "config fields saved parts values list",
    ["table|nil"] = "opts", ["te.DataSet"] = "set", ["te.Optimizer"] = "optimizer",
} do
    for name in names:gmatch "%S+" do USUAL[name] = kind end
end

-- Whether a function's "..." is there for the check that nothing follows its last argument.
local function only_counts(lines, info)
    for i = info.linedefined, math.min(info.lastlinedefined, info.linedefined + 3) do
        local line = lines[i]
        if line:find "options[()]*%.last%(.*%.%.%.%)" or line:find 'method%(self, "[%w_]+", %d+, %.%.%.%)' then
            return true
        end
    end
    return false
end

--- What the source says of a Lua function: doc, params {name, type, doc}, results (types), returned {type, doc}; nil
--- when it cannot be found.
---@param fn function
---@return table|nil
function source.of_function(fn)
    local info = debug.getinfo(fn, "S")
    local lines = info.what ~= "C" and source.lines(info.source)
    if not lines or not lines[info.linedefined] then return nil end
    local typed, results, returned, doc, tag = {}, {}, {}, {}, nil
    for _, line in ipairs(comment_above(lines, info.linedefined)) do
        local name, rest = line:match "^@param%s+([%w_.]+)%??%s+(.*)$"
        local result = line:match "^@return%s+(.*)$"
        if name then
            local kind, text = rest:match "^(.-)%s%s+(.*)$"
            tag = { type = kind or rest, doc = text }
            typed[name] = tag
        elseif result then
            results[#results + 1] = result:match "^fun%b():?%s*%S*" or result:match "^[%w_.]+%b<>%S*"
                or result:match "^%S+"
            local kind, text = result:match "^(.-)%s%s+(.*)$"
            tag = { type = kind or result, doc = text }
            returned[#returned + 1] = tag
        elseif line:find "^@" then
            tag = nil
        elseif tag then -- goes on with what is said of a parameter or a result
            tag.doc = (tag.doc and tag.doc .. " " or "") .. line:match "^%s*(.-)%s*$"
        else
            doc[#doc + 1] = line
        end
    end
    local head, params = lines[info.linedefined], {}
    local of_containers = head:find "%(module, x, " ~= nil -- forward, which takes its container first
    local inside = head:match "function[^(]*%(([^)]*)%)" or ""
    local names = names_in(of_containers and inside:gsub("^module, ", "") or inside)
    if only_counts(lines, info) then names[#names] = nil end
    for i, name in ipairs(names) do
        local known = typed[name] or {}
        local usual = name == "opts" and i < #names and "table" or USUAL[name]
        params[i] = { name = name, type = known.type or usual or "any", doc = known.doc }
    end
    return { doc = table.concat(doc, "\n"):gsub("%s+$", ""), params = params, results = results, returned = returned,
        is_method = of_containers or head:find "function%s+[%w_.]+:" ~= nil or head:find "%(self" ~= nil,
        file = info.source:sub(2), line = info.linedefined }
end

--- The parameters of a method behind the object.
function source.without_first(params)
    local rest = {}
    for i = 2, #params do rest[i - 1] = params[i] end
    return rest
end

--- The first paragraph of a file.
function source.opening(lines)
    local found = {}
    for _, line in ipairs(lines or {}) do
        local text = line:match "^%-%-%-?%s?(.*)$"
        if not text or text == "" then break end
        found[#found + 1] = text
    end
    return table.concat(found, "\n")
end

--- That of the file in which a function stands.
function source.file_doc(fn)
    local info = debug.getinfo(fn, "S")
    return info.what ~= "C" and source.opening(source.lines(info.source)) or ""
end

return source
