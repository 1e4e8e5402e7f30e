--- Forward fusions registered from Lua: which operations they replace, and what becomes of values and gradients.

local te = require "te"
local fusion = require "spec.support.fusion"
local with, window, fused_class, outcome, assert_same, axpy, input =
    fusion.with, fusion.window, fusion.fused_class, fusion.outcome, fusion.assert_same, fusion.axpy, fusion.input

describe("a forward fusion", function()
    before_each(function()
        te.manual_seed(7)
        fusion.calls = 0
    end)

    it("replaces neighbours and gives the same values and gradients", function()
        local seq = te.Sequential(te.Linear(4, 4), te.ConstantScale(3), te.AddExtraInput(), te.GELU())
        local x, e = input(), input()
        local unfused = outcome(seq, x, e)
        assert.equal(0, fusion.calls)
        with({ { "forward", axpy } }, function()
            assert_same(unfused, outcome(seq, x, e))
            assert.equal(1, fusion.calls)
        end)
    end)

    it("is gone after unregistering", function()
        local seq = te.Sequential(te.ConstantScale(3), te.AddExtraInput())
        local x, e = input(), input()
        te.register_forward_fusion(axpy)
        seq(x, e)
        assert.is_true(te.unregister_fusion(axpy))
        seq(x, e)
        assert.equal(1, fusion.calls)
        assert.is_false(te.unregister_fusion(axpy))
        te.register_forward_fusion(axpy)
        assert.is_false(te.unregister_backward_fusion(axpy))
        assert.is_true(te.unregister_forward_fusion(axpy))
        seq(x, e)
        assert.equal(1, fusion.calls)
    end)

    it("crosses the border of a residual branch", function()
        local seq = te.Sequential(te.Linear(4, 4), te.Residual(te.LayerNorm(4), te.ConstantScale(0.5)), te.ReLU())
        local x = input()
        local unfused = outcome(seq, x)
        with({ { "forward", axpy } }, function() assert_same(unfused, outcome(seq, x)) end)
        assert.equal(1, fusion.calls)
    end)

    it("may stand for a whole branch; what stays inside is not passed in", function()
        local given
        local Branch = fused_class("Branch", {
            fuser_forward = function(self, _, x, extra_inputs)
                given = #extra_inputs[3]
                return x * (1 + self.basic_ops[2].scale), { { x }, {}, {} }
            end,
        })
        local seq = te.Sequential(te.Linear(4, 4), te.Residual(te.ConstantScale(0.5)), te.ReLU())
        local x = input()
        local unfused = outcome(seq, x)
        local rule = window({ te.MakeExtraOutput, te.ConstantScale, te.AddExtraInput }, Branch)
        with({ { "forward", rule } }, function() assert_same(unfused, outcome(seq, x)) end)
        assert.equal(0, given)
    end)

    it("makes extra outputs for the caller", function()
        local Both = fused_class("Both", {
            fuser_forward = function(self, _, x)
                fusion.calls = fusion.calls + 1
                return x * self.basic_ops[2].scale, { { x }, {} }
            end,
        })
        local seq = te.Sequential(te.ReLU(), te.MakeExtraOutput(), te.ConstantScale(2), te.Linear(4, 4))
        local x = input()
        local unfused = outcome(seq, x)
        with({ { "forward", window({ te.MakeExtraOutput, te.ConstantScale }, Both) } },
            function() assert_same(unfused, outcome(seq, x)) end)
        assert.equal(1, fusion.calls)
    end)

    it("works with operations that take lengths of packed sequences", function()
        local Attend = fused_class("Attend", {
            fuser_forward = function(self, ctxs, x)
                fusion.calls = fusion.calls + 1
                return self.basic_ops[1](x, ctxs[1].seq_lens) * self.basic_ops[2].scale
            end,
        })
        local seq = te.Sequential(te.MultiHeadedSelfAttention(4, 2), te.ConstantScale(2))
        local x, lens = te.randn({ 5, 4 }), te.tensor({ 2, 3 }, { dtype = "int32" })
        local unfused = seq(x, lens)
        with({ { "forward", window({ te.MultiHeadedSelfAttention, te.ConstantScale }, Attend) } },
            function() assert.equal(0, (unfused - seq(x, lens)):abs():max():item()) end)
        assert.equal(1, fusion.calls)
    end)

    it("reaches into models", function()
        local model = te.models.gpt { vocab_size = 11, block_size = 8, n_layer = 2, n_head = 2, n_embd = 8 }
        local ids = te.randint(0, 10, { 2, 8 }, { dtype = "int32" })
        local function run()
            model:zero_grad()
            local _, loss = model(ids, ids)
            loss:backward()
            return loss:item(), model.blocks[1].mlp[4].weight.grad:clone(), model.wte.weight.grad:clone()
        end
        local loss, dw, embedding = run()
        local Pair = fused_class("GeluLinear", {
            fuser_forward = function(self, _, x)
                fusion.calls = fusion.calls + 1
                return te.linear(te.gelu(x, { approximate = self.basic_ops[1].approximate }), self.basic_ops[2].weight)
            end,
        })
        with({ { "forward", window({ te.GELU, te.Linear }, Pair) } }, function()
            local fused_loss, fused_dw, fused_embedding = run()
            assert.equal(2, fusion.calls)
            assert.is_true(math.abs(loss - fused_loss) < 1e-5)
            assert.is_true((dw - fused_dw):abs():max():item() < 1e-5)
            assert.is_true((embedding - fused_embedding):abs():max():item() < 1e-5)
        end)
    end)

    it("does not happen when fusion is off", function()
        local seq = te.Sequential(te.ConstantScale(3), te.AddExtraInput())
        with({ { "forward", axpy } }, function()
            te.set_fusion(false)
            local ok, message = pcall(seq, input(), input())
            te.set_fusion(true)
            assert.is_true(ok, message)
            assert.equal(0, fusion.calls)
            seq(input(), input())
            assert.equal(1, fusion.calls)
        end)
    end)
end)
