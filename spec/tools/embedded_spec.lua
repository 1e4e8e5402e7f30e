-- The library inside the executable is that of lua/te, without comments.

local function embedded(name)
    for _, loader in ipairs(package.loaders) do
        local found = loader(name)
        local _, chunk = debug.getupvalue(type(found) == "function" and found or print, 1) -- which it runs once
        if type(chunk) == "function" and debug.getinfo(chunk, "S").source:find "^=te/" then return chunk end
    end
end

describe("the embedded library", function()
    it("is made of the files in lua/te", function()
        local files, compared = io.popen "cd lua && find te -name '*.lua'", 0
        for path in files:lines() do
            local name = path:gsub("%.lua$", ""):gsub("/init$", ""):gsub("/", ".")
            local chunk = embedded(name)
            assert.is_true(chunk ~= nil or name == "te", name) -- te itself is what opens the others
            assert.is_true(not chunk or string.dump(chunk, true) == string.dump(assert(loadfile("lua/" .. path)), true),
                name)
            compared = compared + 1
        end
        files:close()
        assert.is_true(compared > 80)
    end)
end)
