-- Every example runs and prints what it is there to show.

local TETRAIN = os.getenv("TETRAIN") or "build/tetrain"

local EXPECTED = {
    residual_branches = {
        "te.Residual differs by 0\n", "two halves differ by 0\n", "%d of 6 sequences took the branch",
        "in evaluation all do: true",
    },
    custom_fusion = {
        "difference of results:%s+none\n", "difference of gradients:%s+none\n",
        "fusion rule forgetful: it dropped operation 2 %(LayerNorm%)\n",
    },
    custom_operation = { "step 200: loss 0%.%d+\n", "%(3%): LearnedRounding%(step=0%.%d+%)" },
    traced_activation = {
        "pointwise%(x%) { y = x %* tanh%(log%(1 %+ exp%(x%)%)%) }", "false\tattempt to compare .*use te%.where",
        "step 200: loss 0%.0%d+\n", "Pointwise%(y = max%(x, 0%) %+ slope %* min%(x, 0%)%)",
    },
}

local function run(name)
    local pipe = assert(io.popen(("%s scripts/examples/%s.lua 2>&1; echo status $?"):format(TETRAIN, name)))
    local text = pipe:read("*a")
    pipe:close()
    return text:match("^(.*)status (%d+)\n$")
end

describe("scripts/examples", function()
    for name, lines in pairs(EXPECTED) do
        it(name .. " shows what it says", function()
            local output, status = run(name)
            assert.equal("0", status, output)
            for _, line in ipairs(lines) do assert.is_truthy(output:find(line), output) end
        end)
    end
end)
