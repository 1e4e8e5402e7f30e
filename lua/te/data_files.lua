--- What te.data reads of files and folders of text. Of a folder only regular files are read, and what stands in a
--- folder that links make reachable by several ways is read once. What runs write beside their checkpoints is left out:
--- it grows.

local te = require "te"
local fail = require "te.fail"

local MOST_TEXT = 2 ^ 31 - 512 -- a little below what LuaJIT lets a string have

local TOO_MUCH = "%.0f bytes of text: they end at 2 GiB; te.data.write_tokens makes shards, which have no end"

local function read_file(path)
    local file, problem = io.open(path, "rb")
    if not file then te._core.fail_io("te.data.open: " .. problem) end
    local size = file:seek "end" -- nil of a pipe, 0 of a device
    if size then file:seek "set" end
    if size and size > MOST_TEXT then
        file:close()
        fail("te.data.open: %s: " .. TOO_MUCH, path, size)
    end
    -- at once, as a buffer that grows ends at half of what a text may have; raises where memory ends before the file
    local read, text, why = pcall(file.read, file, size and size > 0 and size or "*a")
    file:close()
    if not read then error(("%s: %s"):format(path, text), 0) end
    if not text then te._core.fail_io(("te.data.open: %s: %s"):format(path, why)) end
    return text
end

local function is_text(text) return not text:sub(1, 4096):find("%z") end

local RUN_FILES = { ["metrics.jsonl"] = true, ["metrics.jsonl.tmp"] = true, ["plot.svg"] = true }
for _, name in ipairs(require "te.tokenizer.beside") do RUN_FILES[name] = true end

-- Whether a folder is a run's, which may have stopped before it saved.
local function is_of_run(folder, names)
    for _, name in ipairs(names) do
        if name:find "^checkpoint%-%d+%.safetensors$" then return true end
        local path = folder .. "/" .. name
        local stat = name == "metrics.jsonl" and io and te._core.stat(path)
        local file = stat and stat.type == "file" and io.open(path)
        local start = file and file:read(8)
        if file then file:close() end
        if start == '{"step":' then return true end
    end
    return false
end

-- Regular files below a folder in the order of their names, hidden ones and what a run writes left out.
-- accept(name, is_folder) says which files are meant and which folders are entered. A link to a folder is followed; one
-- that leads back would have no end, so each folder is entered once. `entered` holds their ids.
local function files_below(folder, accept, entered, found)
    found, entered = found or {}, entered or {}
    local here = te._core.stat(folder)
    if not here or entered[here.id] then return found end
    entered[here.id] = true
    local names = te._core.list_dir(folder)
    local of_run = is_of_run(folder, names)
    table.sort(names)
    for _, name in ipairs(names) do
        local path = folder .. "/" .. name
        local stat = te._core.stat(path)
        if name:find("^%.") or (of_run and RUN_FILES[name]) or not stat then -- hidden, a run's, or gone
        elseif stat.type == "directory" then
            if accept(name, true) then files_below(path, accept, entered, found) end
        elseif stat.type == "file" and accept(name) then -- a pipe's end comes when somebody has written to it
            found[#found + 1] = path
        end
    end
    return found
end

local function join_files(paths)
    local texts, size = {}, 0
    for _, path in ipairs(paths) do
        local text = read_file(path)
        if is_text(text) then
            texts[#texts + 1], size = text, size + #text + 1
            if size > MOST_TEXT then fail("te.data.open: %s: with it " .. TOO_MUCH, path, size) end
        end
    end
    return table.concat(texts, "\n"), #texts
end

return { read = read_file, below = files_below, join = join_files }
