local te = require "te"
local plans = require "spec.support.plans"

local function attention() return te.MultiHeadedSelfAttention(8, 2, { dropout = 0.4 }) end

local function branches(...) return te.Sequential(te.Residual(..., { parallel = true })) end

local CASES = {
    ["branches whose first operations share a program"] = function()
        return branches(te.Sequential(te.Dropout(0.25), te.Linear(8, 8), te.Dropout(0.5)),
            te.Sequential(te.Dropout(0.75), te.Linear(8, 8)))
    end,
    ["attention in the first branch, dropout in the second"] = function()
        return branches(te.Sequential(te.RMSNorm(8), attention()), te.Sequential(te.Dropout(0.5), te.Linear(8, 8)))
    end,
    ["dropout in the first branch behind a product, attention in the second"] = function()
        return branches(te.Sequential(te.Linear(8, 8), te.Dropout(0.5)), te.Sequential(attention(), te.Dropout(0.1)))
    end,
    ["attention after attention"] = function() return te.Sequential(attention(), te.Dropout(0.2), attention()) end,
}

describe("random numbers are those of single operations in", function()
    for name, build in pairs(CASES) do
        it(name, function()
            te.manual_seed(3)
            local seq = build()
            for _, shape in ipairs { { 2, 5, 8 }, { 6, 8 }, { 1, 1, 8 } } do
                plans.assert_unchanged(seq, plans.input(shape))
            end
        end)
    end

    it("packed sequences, and leave the generator where single operations leave it", function()
        local seq = CASES["attention in the first branch, dropout in the second"]()
        local x, lens, after = plans.input { 7, 8 }, te.tensor({ 3, 4 }, { dtype = "int32" }), {}
        for i, fused in ipairs { true, false } do
            local before = te.set_fusion(fused)
            te.manual_seed(5)
            after[i] = { seq(x, lens):totable(), te.rand({ 3 }):totable() }
            te.set_fusion(before)
        end
        assert.same(after[2], after[1])
    end)
end)
