--- tetrain.d.lua against the live module, both ways, and the declarations behind it.

local te = require "te"
local reference = require "te.tools.reference"
local natives = require "te.tools.natives"
local annotations = require "te.tools.annotations"

-- What the text declares, as if it were Lua: loading it gives tables and functions of the same names.
local function declared()
    local text = annotations()
    local chunk = assert(loadstring(text:gsub("%s*return te%s*$", " return te, Tensor, Module"), "=tetrain.d.lua"))
    return chunk()
end

describe("tetrain.d.lua", function()
    local lib, tensor = declared()

    it("declares everything that te has", function()
        local kinds = {}
        for _, entry in ipairs(reference.entries()) do kinds[entry.name] = entry.kind end
        for name, value in pairs(te) do
            if not name:find "^_" then
                local class = kinds[name] == "class" and name ~= "Module" -- declared by its constructor
                assert.equal(class and "function" or type(value), type(lib[name]), "te." .. name)
            end
        end
        for name in pairs(require "te.modules") do assert.is_not_nil(lib[name], "te." .. name .. " is not declared") end
        for name in pairs(te._core.tensor_methods) do
            assert.equal("function", type(tensor[name]), "the method " .. name .. " is not declared")
        end
    end)

    it("declares nothing that is not there", function()
        for name in pairs(lib) do
            assert.is_true(pcall(function() return te[name] end), "te." .. name .. " does not exist")
        end
        for name in pairs(tensor) do
            assert.is_not_nil(te._core.tensor_methods[name], "the method " .. name .. " does not exist")
        end
    end)

    it("has a sentence for everything", function()
        for _, entry in ipairs(reference.entries()) do
            assert.is_truthy(entry.doc:find "%S", entry.name)
            for _, member in ipairs(entry.kind == "module" and reference.members(entry.name) or {}) do
                assert.is_truthy(member.doc:find "%S", member.name)
            end
        end
    end)

    it("types every parameter of an operation", function()
        for _, entry in ipairs(reference.entries()) do
            if entry.kind == "operation" then
                assert.equal(#entry.op.params, #entry.params)
                for _, p in ipairs(entry.params) do assert.are_not.equal("any", p.type, entry.name .. " " .. p.name) end
            end
        end
    end)

    it("is right about what is written by hand", function()
        local seen = {}
        for _, row in ipairs(natives.functions) do
            assert.equal("function", type(rawget(te, row[1])), row[1])
            assert.is_nil(seen[row[1]])
            seen[row[1]] = true
            for _, op in ipairs(te.ops_list()) do assert.are_not.equal(op.name, row[1]) end
        end
        for _, row in ipairs(natives.methods) do
            assert.equal("function", type(te._core.tensor_methods[row[1]]), row[1])
        end
    end)
end)
