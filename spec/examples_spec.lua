--- Every file in examples/ runs, and what it prints is true.

local function capture(command)
    local pipe = assert(io.popen(command .. " 2>&1; echo \"status $?\""))
    local text = pipe:read "*a"
    pipe:close()
    local output, status = text:match "^(.*)status (%d+)\n$"
    return output, tonumber(status)
end

local interpreter = capture("readlink /proc/$PPID/exe"):gsub("%s+$", "")

-- What must stand in the output of an example, as patterns.
local EXPECTED = {
    ["custom_operation.lua"] = {
        "gradient agrees with finite differences:%s+true",
        "step 60  loss 0%.0%d+",
    },
    ["custom_fusion.lua"] = {
        "largest difference of results:%s+none",
        "largest difference of gradients:%s+none",
        "fusion rule forgetful: it dropped operation 2 %(LayerNorm%)",
    },
}

describe("examples", function()
    for path in capture("ls examples/*.lua"):gmatch "[^\n]+" do
        it(path .. " runs", function()
            local output, status = capture(interpreter .. " " .. path)
            assert.equal(0, status, output)
            for _, pattern in ipairs(EXPECTED[path:match "[^/]+$"] or {}) do
                assert.truthy(output:find(pattern), pattern .. "\n" .. output)
            end
        end)
    end

    it("are all there that are checked", function()
        for name in pairs(EXPECTED) do assert.truthy(io.open("examples/" .. name), name) end
    end)
end)
