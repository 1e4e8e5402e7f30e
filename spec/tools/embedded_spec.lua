-- The library inside the executable is that of lua/te, without comments.

local function embedded(name)
    for _, loader in ipairs(package.loaders) do
        local chunk = loader(name)
        if type(chunk) == "function" and debug.getinfo(chunk, "S").source:find "^=te/" then return chunk end
    end
end

describe("the embedded library", function()
    it("is made of the files in lua/te", function()
        local files, compared = io.popen "cd lua && find te -name '*.lua'", 0
        for path in files:lines() do
            local name = path:gsub("%.lua$", ""):gsub("/init$", ""):gsub("/", ".")
            local chunk = assert(embedded(name), name)
            assert.is_true(string.dump(chunk, true) == string.dump(assert(loadfile("lua/" .. path)), true), name)
            compared = compared + 1
        end
        files:close()
        assert.is_true(compared > 80)
    end)
end)
