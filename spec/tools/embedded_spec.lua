-- The library inside the executable is that of lua/te, without comments.

local function embedded(name)
    for _, loader in ipairs(package.loaders) do
        local found = loader(name)
        local _, chunk = debug.getupvalue(type(found) == "function" and found or print, 1) -- which it runs once
        if type(chunk) == "function" and debug.getinfo(chunk, "S").source:find "^=te/" then return chunk end
    end
end

-- What tools set for the scripts that they run.
local SET = { ["lua/te/tools/plan.lua"] = "arg", ["lua/te/tools/repl.lua"] = "help" }

-- Names of the globals that a function, or one in it, sets.
local function globals_set(fn, names)
    local util = require "jit.util"
    local GSET, pc = bit.band(util.funcbc(loadstring "x = 1", 2), 0xff), 1
    while util.funcbc(fn, pc) do
        local instruction = util.funcbc(fn, pc)
        if bit.band(instruction, 0xff) == GSET then
            names[#names + 1] = util.funck(fn, -bit.rshift(instruction, 16) - 1)
        end
        pc = pc + 1
    end
    for i = -1, -math.huge, -1 do
        local inner = util.funck(fn, i)
        if inner == nil then return names end
        if type(inner) == "proto" then globals_set(inner, names) end
    end
end

describe("the library and the scripts", function()
    it("set no globals", function()
        assert.same({ "y", "x" }, globals_set(loadstring "local a = 1; y = a; return function() a, x = 2, 3 end", {}))
        local files = io.popen "find lua scripts -name '*.lua'"
        for path in files:lines() do
            assert.same({ SET[path] }, globals_set(assert(loadfile(path)), {}), path)
        end
        files:close()
    end)
end)

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
