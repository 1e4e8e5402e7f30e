-- Every code block of the README runs. Blocks of one language run in order; `build/` stands for the folder of the
-- interpreter that runs the specs. The two scripts that install and test are what runs this; they are not run again.

local shell = require "spec.support.shell"
local read, capture = shell.read, shell.capture

local build = capture("dirname $(readlink /proc/$PPID/exe)"):gsub("%s+$", "")

local blocks = {}
for language, text in read("README.md"):gmatch "\n```(%a*)\n(.-)\n```" do
    blocks[#blocks + 1] = { language = language, text = text }
end

local function run_lua(text)
    local path = os.tmpname()
    local file = assert(io.open(path, "w"))
    file:write(text)
    file:close()
    local output, status = capture(("%s/tetrain %s"):format(build, path))
    os.remove(path)
    return output, status
end

describe("tables of the documentation", function()
    for _, path in ipairs { "README.md", "docs/operations.md" } do
        it("in " .. path .. " are what the library declares", function()
            local text, tables = read(path), require "te.tools.tables"
            assert.is_truthy(text:find("<!-- table: ", 1, true))
            assert.is_true(text == tables.fill(text),
                ("write them anew: build/tetrain -e 'require(\"te.tools.tables\").update(%q)'"):format(path))
        end)
    end
end)

describe("README", function()
    local folder = capture("mktemp -d"):gsub("%s+$", "")
    teardown(function() os.execute("rm -rf " .. folder) end)

    it("has blocks of every kind", function()
        local count = {}
        for _, block in ipairs(blocks) do count[block.language] = (count[block.language] or 0) + 1 end
        assert.is_true(count.lua >= 2 and count.sh >= 3 and count.c == 1)
    end)

    for i, block in ipairs(blocks) do
        if block.language == "lua" then
            it("block " .. i .. " (Lua) runs and prints what stands below it", function()
                local output, status = run_lua(block.text)
                assert.are.equal(0, status, output)
                local expected = blocks[i + 1]
                if expected and expected.language == "" then assert.are.equal(expected.text .. "\n", output) end
            end)
        elseif block.language == "sh" then
            for line in block.text:gmatch "[^\n]+" do
                if not line:match "^%./scripts/" then
                    it("runs " .. line, function()
                        local command = line:gsub("build/tetrain", build .. "/tetrain"):gsub("out/readme", folder)
                        local output, status = capture(command)
                        assert.are.equal(0, status, output)
                    end)
                end
            end
        elseif block.language == "c" then
            it("block " .. i .. " (C) compiles, links and succeeds", function()
                local file = assert(io.open(folder .. "/example.c", "w"))
                file:write(block.text)
                file:close()
                local sanitize = build:match "asan" and "-fsanitize=address,undefined" or ""
                local output, status = capture(("cc -std=c11 -Wall -Werror %s -Iinclude %s/example.c -L%s -ltetrain "
                    .. "-Wl,-rpath,%s -o %s/example && ASAN_OPTIONS=detect_leaks=0 %s/example")
                    :format(sanitize, folder, build, build, folder, folder))
                assert.are.equal(0, status, output)
            end)
        end
    end
end)
