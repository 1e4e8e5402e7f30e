-- What a plan depends on, and what it does not.

local te = require "te"
local plans = require "spec.support.plans"

local input, count = plans.input, plans.count

local function build()
    return te.Sequential(te.LayerNorm(8), te.Linear(8, 8), te.GELU(), te.Dropout(0.1), te.Linear(8, 4))
end

describe("plans are kept", function()
    it("for any number of rows", function()
        local seq = build()
        for _, shape in ipairs { { 3, 8 }, { 1, 8 }, { 0, 8 }, { 640, 8 } } do seq(input(shape)):sum():backward() end
        assert.equal(1, count(seq, input { 3, 8 }))
    end)

    it("for packed sequences of any number and length", function()
        local seq = te.Sequential(te.RMSNorm(8), te.MultiHeadedSelfAttention(8, 2))
        for _, sizes in ipairs { { 4, 2 }, { 6 }, { 1, 1, 1, 1, 2 } } do
            seq(input { 6, 8 }, te.tensor(sizes, { dtype = "int32" }))
        end
        local part = require("te.fuser").program(seq, 0, true, input { 6, 8 }).parts[1]
        assert.equal(1, te._core.group_plans(part.group))
    end)

    it("by dtype, compute dtype, number of dimensions and wanted gradients, each once", function()
        local seq, x = build(), input { 4, 8 }
        local plain = x:detach()
        local kinds = {
            function() seq(x) end,
            function() seq(plain) end,
            function() te.no_grad(seq, x) end,
            function() te.autocast({ dtype = "bfloat16" }, seq, x) end,
            function() seq(input { 2, 2, 8 }) end,
            function() seq(input({ 4, 8 }, "bfloat16")) end,
        }
        for i, kind in ipairs(kinds) do
            kind()
            assert.equal(i, count(seq, x))
        end
        for _, kind in ipairs(kinds) do kind() end
        assert.equal(#kinds, count(seq, x))
        seq[2].weight.requires_grad = false
        seq(x)
        assert.equal(#kinds + 1, count(seq, x))
    end)

    it("by recipe and by what is recomputed", function()
        local seq, x = te.Sequential(te.LayerNorm(32), te.Linear(32, 32), te.GELU()), input { 32, 32 }
        seq(x)
        for _, recipe in ipairs { te.recipe.MXFP8BlockScaling {}, te.recipe.Float8CurrentScaling {} } do
            for _ = 1, 2 do te.autocast({ recipe = recipe }, seq, x) end
        end
        assert.equal(3, count(seq, x))
        local before = te.set_recompute(true)
        seq(x)
        te.set_recompute(before)
        seq(x)
        assert.equal(4, count(seq, x))
    end)

    it("by what a recipe says, not by which one it is", function()
        local R = te.recipe
        local kinds = {
            function() return R.MXFP8BlockScaling {} end,
            function() return R.Float8CurrentScaling {} end,
            function() return R.Float8CurrentScaling { fp8_format = "E4M3" } end,
            function() return R.Float8CurrentScaling { backward_override = "dequantized" } end,
            function() return R.Float8CurrentScaling { fast_accumulation = "all" } end,
            function() return R.DelayedScaling { margin = 1 } end,
            function()
                return R.Custom { qfactory = function(role)
                    return role.tensor_type == "input" and R.MXFP8BlockScaling {} or R.HighPrecision
                end }
            end,
        }
        local function make() return te.Sequential(te.LayerNorm(32), te.Linear(32, 32), te.GELU()) end
        local anew, kept, x = make(), make(), input { 32, 32 }
        kept:load_state_dict(anew:state_dict())
        local function step(seq, recipe)
            local y = te.autocast({ recipe = recipe }, seq, x)
            y:sum():backward()
            te.optim.SGD(seq, { lr = 0.1 }):step()
            return y:totable()
        end
        for i, kind in ipairs(kinds) do
            local one = kind()
            for _ = 1, 3 do assert.same(step(kept, one), step(anew, kind())) end
            assert.equal(i, count(anew, x))
        end
        assert.same(kept[2].weight:totable(), anew[2].weight:totable())
    end)

    it("no more than many, beside those whose backward is to come", function()
        local seq, most = te.Sequential(te.GELU(), te.ConstantScale(2)), 64
        local function run(width)
            local x = input { 1, width }
            return seq(x):sum(), x
        end
        local waiting = {}
        for width = 1, 100 do waiting[width] = { run(width) } end
        assert.equal(100, count(seq, input { 1, 1 }))
        for width = 1, 100 do
            local y, x = unpack(waiting[width])
            y:backward()
            local alone = x:detach()
            alone.requires_grad = true;
            (te.gelu(alone) * 2):sum():backward()
            assert.same(alone.grad:totable(), x.grad:totable())
        end
        for width = 101, 300 do
            run(width):backward()
            assert.is_true(count(seq, input { 1, 1 }) <= most)
        end
        assert.equal(most, count(seq, input { 1, 1 }))
    end)

    it("anew by operations, options, training mode, rules and te.set_fusion", function()
        local seq, x = build(), input { 4, 8 }
        local program, seen = require("te.fuser").program, {}
        local function changed(change)
            if change then change() end
            local p = program(seq, 0, false, x)
            local new = not seen[p]
            seen[p] = true
            return new
        end
        assert.is_true(changed())
        assert.is_false(changed())
        assert.is_true(changed(function() seq[4].p = 0.5 end))
        assert.is_true(changed(function() seq:eval() end))
        assert.is_true(changed(function() seq[3] = te.ReLU() end))
        assert.is_true(changed(function() seq[2].bias = nil end))
        local function rule(ops) return ops end
        assert.is_true(changed(function() te.register_forward_fusion(rule) end))
        assert.is_true(changed(function() te.unregister_fusion(rule) end))
        assert.is_true(changed(function() te.set_fusion(false) end))
        assert.is_true(changed(function() te.set_fusion(true) end))
        assert.is_false(changed(function() te.no_grad(function() seq[5].weight:mul_(2) end) end))
    end)

    it("anew by options of a module that is called because of one", function()
        local Shy = te.BasicOperation:extend("Shy")
        Shy.plan_fields = { "reason" }
        function Shy:op_forward(_, x) return x * 2 end
        function Shy:lower(g, x)
            if self.reason then return nil, self.reason end
            return g:op("mul", { x, 2 })
        end
        local shy, x = Shy(), input { 4, 8 }
        local seq = te.Sequential(te.GELU(), shy)
        local function mentions() return tostring(seq:explain(x)):find("it would rather not", 1, true) ~= nil end
        assert.is_false(mentions())
        shy.reason = "it would rather not"
        assert.is_true(mentions())
        assert.same((te.gelu(x) * 2):totable(), seq(x):totable())
        shy.reason = nil
        assert.is_false(mentions())
    end)
end)
