--- Every code block of docs/guide.md runs. Lua blocks of a section share their globals, and print what stands below
--- them; lines of shell blocks succeed; C programs compile without warnings, link and succeed. `build/` stands for the
--- folder of the interpreter that runs the specs.

local te = require "te"

local shell = require "spec.support.shell"
local read, capture = shell.read, shell.capture

local build = te._core.executable():match "^(.*)/"
local folder = capture("mktemp -d"):gsub("%s+$", "")

-- Sections as { title =, blocks = { { language =, text = } } }.
local function sections()
    local found = {}
    for section in ("\n" .. read "docs/guide.md"):gsub("\n## ", "\n\1"):gmatch "\1([^\1]*)" do
        local entry = { title = section:match "^[^\n]*", blocks = {} }
        for language, text in section:gmatch "\n```(%a*)\n(.-)\n```" do
            entry.blocks[#entry.blocks + 1] = { language = language, text = text }
        end
        found[#found + 1] = entry
    end
    return found
end

-- Runs the Lua blocks of a section in one environment; returns what each printed.
local function run_lua(text, env)
    local lines = {}
    env.print = function(...)
        local parts = {}
        for i = 1, select("#", ...) do parts[i] = tostring((select(i, ...))) end
        lines[#lines + 1] = table.concat(parts, "\t") .. "\n"
    end
    local chunk = assert(loadstring(text, "=guide"))
    setfenv(chunk, env)
    chunk()
    return table.concat(lines)
end

local function compile_and_run(text)
    local file = assert(io.open(folder .. "/example.c", "w"))
    file:write(text)
    file:close()
    local sanitize = build:match "asan" and "-fsanitize=address,undefined" or ""
    return capture(([[cc -std=c11 -Wall -Wextra -Werror %s -Iinclude $(pkg-config --cflags luajit) \
        %s/example.c -L%s -ltetrain $(pkg-config --libs luajit) -Wl,-rpath,%s -o %s/example \
        && ASAN_OPTIONS=detect_leaks=0 %s/example]])
        :format(sanitize, folder, build, build, folder, folder))
end

describe("the guide", function()
    teardown(function() os.execute("rm -rf " .. folder) end)

    local count = { lua = 0, sh = 0, c = 0 }
    for _, section in ipairs(sections()) do
        local env = setmetatable({}, { __index = _G })
        for i, block in ipairs(section.blocks) do
            count[block.language] = (count[block.language] or 0) + 1
            local following = section.blocks[i + 1]
            if block.language == "lua" then
                it(("%s, block %d: Lua"):format(section.title, i), function()
                    local output = run_lua(block.text, env)
                    assert.equal(following and following.language == "" and following.text .. "\n" or "", output)
                end)
            elseif block.language == "sh" then
                for line in block.text:gmatch "[^\n]+" do
                    it(("%s: %s"):format(section.title, line), function()
                        local output, status = capture((line:gsub("build/", build .. "/"):gsub("out/guide", folder)))
                        assert.equal(0, status, output)
                    end)
                end
            elseif block.language == "c" then
                it(("%s, block %d: C"):format(section.title, i), function()
                    local output, status = compile_and_run(block.text)
                    assert.equal(0, status, output)
                end)
            end
        end
    end

    it("has blocks of every kind", function()
        assert.is_true(count.lua >= 12 and count.sh >= 4 and count.c == 3)
    end)
end)
