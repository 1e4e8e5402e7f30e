--- Rules of fusion registered from Lua: what they are told, when they run, and the example among the scripts.

local te = require "te"
local fusion = require "spec.support.fusion"
local with, fused_class, input, names = fusion.with, fusion.fused_class, fusion.input, fusion.names
local outcome, assert_same, axpy, listener = fusion.outcome, fusion.assert_same, fusion.axpy, fusion.listener

describe("rules", function()
    before_each(function()
        te.manual_seed(8)
        fusion.calls = 0
    end)

    it("see runs of basic operations, containers dissolved", function()
        local seen = {}
        local custom = te.Module:extend("Custom")
        function custom:forward(x) return x + 1 end
        local seq = te.Sequential(te.Linear(4, 4), te.Residual(te.Sequential(te.LayerNorm(4), te.ReLU())), custom(),
            function(x) return x end, te.Bias(4))
        with({ { "forward", listener(seen) } }, function() seq(te.randn({ 2, 4 })) end)
        assert.equal(2, #seen)
        assert.equal("Linear MakeExtraOutput LayerNorm ReLU AddExtraInput", seen[1].ops)
        assert.equal("Bias", seen[2].ops)
    end)

    it("see no operation together with one of several readers of its result", function()
        local seen = {}
        local function item(op, x, y, ...) return { op = op, x = x, extras = { ... }, y = y, outs = {} } end
        local walk = { outputs = {}, y = 5, items = {
            item(te.ReLU(), 1, 2), item(te.GELU(), 2, 3), item(te.Identity(), 2, 4), item(te.AddExtraInput(), 4, 5, 3),
        } }
        with({ { "forward", listener(seen) } },
            function() require("te.fuser.rewrite").walk(walk, { opts = {}, wants_grad = false }) end)
        assert.equal(4, #walk.items)
        assert.same({ "ReLU", "GELU", "Identity AddExtraInput" }, { seen[1].ops, seen[2].ops, seen[3].ops })
    end)

    it("run in order, each on what the one before made", function()
        local seen, Whole = {}, fused_class("Whole", {
            fuser_forward = function(self, _, x, extra_inputs)
                return te.relu(x * self.basic_ops[1].scale + extra_inputs[2][1])
            end,
        })
        local function absorb(ops)
            seen[#seen + 1] = { ops = names(ops) }
            return { Whole(ops[1].basic_ops[1], ops[1].basic_ops[2], ops[2]) }
        end
        local seq = te.Sequential(te.ConstantScale(3), te.AddExtraInput(), te.ReLU())
        local x, e = input(), input()
        local unfused = outcome(seq, x, e)
        with({ { "forward", axpy }, { "forward", absorb }, { "forward", listener(seen) } },
            function() assert_same(unfused, outcome(seq, x, e)) end)
        assert.equal(0, fusion.calls)
        assert.equal("ForwardAxpy ReLU", seen[1].ops)
        assert.equal("Whole", seen[2].ops)
    end)

    it("run again when what they may depend on changes, not when sizes do", function()
        local seen = {}
        local scale = te.ConstantScale(2)
        local seq = te.Sequential(te.ReLU(), scale)
        with({ { "forward", listener(seen) } }, function()
            local function runs(expected, what)
                assert.equal(expected, #seen, what)
                seen = {}
            end
            seen = {}
            local listen = te.register_forward_fusion(function(ops, opts)
                seen[#seen + 1] = { ops = names(ops), opts = opts }
                return ops
            end)
            local x = te.randn({ 2, 4 })
            seq(x)
            assert.equal("float32", seen[1].opts.dtype)
            assert.equal(te.get_default_device(), seen[1].opts.device)
            assert.is_true(seen[1].opts.training)
            runs(1, "first run")
            seq(te.randn({ 3, 4 }))
            runs(0, "another batch size")
            seq:eval()(x)
            assert.is_false(seen[1].opts.training)
            runs(1, "evaluation")
            seq:train()
            seq(x)
            runs(0, "training again")
            seq(x:to("bfloat16"))
            assert.equal("bfloat16", seen[1].opts.dtype)
            runs(1, "dtype")
            te.autocast({ dtype = "float16" }, seq, x)
            assert.equal("float16", seen[1].opts.dtype)
            runs(1, "autocast")
            scale.scale = 3
            seq(x)
            runs(1, "a field of an operation")
            seq:append(te.Identity())
            seq(x)
            assert.equal("ReLU ConstantScale Identity", seen[1].ops)
            runs(1, "another module")
            te.unregister_fusion(te.register_forward_fusion(axpy))
            seq(x)
            runs(1, "another rule")
            seq(input({ 2, 4 }))
            runs(1, "a gradient")
            te.unregister_fusion(listen)
            seq(x)
            runs(0, "unregistered")
        end)
    end)

    it("leave a step in the plan that says what it moves at least, also when it is the last", function()
        local seq = te.Sequential(te.ReLU(), te.ConstantScale(3), te.AddExtraInput())
        local x, e = input(), input()
        with({ { "forward", axpy, { name = "axpy" } } }, function()
            local plan = seq:explain(x, e)
            local step, back = plan.forward[2], plan.backward[1]
            assert.same({ "call", 2 * 12 * 4, 12 * 4 }, { step.kind, step.reads, step.writes })
            assert.same({ step.name, "call", 12 * 4, 2 * 12 * 4 }, { back.name, back.kind, back.reads, back.writes })
            assert.equal(0, #te.no_grad(function() return seq:explain(x, e) end).backward)
        end)
    end)

    it("may keep and change their list; the container stays as it was", function()
        local kept
        local seq = te.Sequential(te.ConstantScale(3), te.AddExtraInput(), te.Linear(4, 4))
        local x, e = input(), input()
        local weight, before, text = seq[3].weight:clone(), x:clone(), tostring(seq)
        local members = { seq[1], seq[2], seq[3] }
        local function keep(ops)
            kept = axpy(ops)
            for i = #ops, 1, -1 do ops[i] = nil end
            return kept
        end
        local function empty(ops)
            for i = #kept, 1, -1 do kept[i] = nil end
            return ops
        end
        with({ { "forward", keep }, { "backward", empty } }, function()
            local first = seq(x, e)
            assert.equal(1, fusion.calls)
            assert.equal(0, (first - seq(x, e)):abs():max():item())
        end)
        assert.equal(text, tostring(seq))
        for i, member in ipairs(members) do assert.equal(member, seq[i]) end
        assert.equal(0, (weight - seq[3].weight):abs():max():item())
        assert.equal(0, (before - x):abs():max():item())
    end)
end)

describe("scripts/examples/custom_fusion.lua", function()
    it("shows what it says", function()
        local executable = os.getenv "TETRAIN" or te._core.executable()
        local command = ("'%s' scripts/examples/custom_fusion.lua 2>&1; echo status $?"):format(executable)
        local pipe = assert(io.popen(command))
        local output, status = pipe:read("*a"):match("^(.*)status (%d+)\n$")
        pipe:close()
        assert.equal("0", status, output)
        assert.truthy(output:find("difference of results:%s+none"), output)
        assert.truthy(output:find("difference of gradients:%s+none"), output)
        assert.truthy(output:find("custom_fusion.lua:%d+: fusion rule forgetful: it dropped operation 2 %(LayerNorm%)"),
            output)
    end)
end)
