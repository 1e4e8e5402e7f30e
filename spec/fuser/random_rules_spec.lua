--- Random rules on random chains give the values and gradients of no fusion.

local te = require "te"
local fusion = require "spec.support.fusion"
local trials = require "spec.support.trials"
local with, window, fused_class, outcome, assert_same =
    fusion.with, fusion.window, fusion.fused_class, fusion.outcome, fusion.assert_same

-- Rules that fuse windows at random, with operations that do by themselves what the operations in them do. Residual
-- branches are nested, so a sum in a window belongs to the last split before it there, or to one outside.
describe("random fusions", function()
    local function run_chain(ops, x, outside)
        local open, outs = {}, {}
        for i, op in ipairs(ops) do
            outs[i] = {}
            if te.is(op, te.MakeExtraOutput) then
                open[#open + 1], outs[i] = x, { x }
            elseif te.is(op, te.AddExtraInput) then
                x = te.add(x, table.remove(open) or outside[i])
            else
                x = op:op_forward(nil, x)
            end
        end
        return x, outs
    end

    local function chain_forward(self, _, x, extra_inputs)
        local outside = {}
        for i, list in ipairs(extra_inputs) do outside[i] = list[1] end
        return run_chain(self.basic_ops, x, outside)
    end

    local function leaf(t)
        t = t:detach()
        t.requires_grad = true
        return t
    end

    local function chain_backward(self, ctxs, dy, extra_gradients)
        local x, outside, leaves, depth = leaf((ctxs[1]:saved_tensors())), {}, {}, 0
        leaves[1] = x
        for i, op in ipairs(self.basic_ops) do
            if te.is(op, te.MakeExtraOutput) then depth = depth + 1 end
            if te.is(op, te.AddExtraInput) then
                if depth == 0 then
                    local _, extra = ctxs[i]:saved_tensors()
                    outside[i] = leaf(extra)
                    leaves[#leaves + 1] = outside[i]
                end
                depth = math.max(0, depth - 1)
            end
            for _, parameter in ipairs(op:parameters()) do leaves[#leaves + 1] = parameter end
        end
        local y, outs = te.enable_grad(run_chain, self.basic_ops, x, outside)
        local results, seeds = { y }, { dy }
        for i, list in ipairs(outs) do
            if list[1] and extra_gradients[i][1] then
                results[#results + 1], seeds[#seeds + 1] = list[1], extra_gradients[i][1]
            end
        end
        local grads = te.grad(results, leaves, { grad_outputs = seeds })
        local at, of_parameters, of_extras = 1, {}, {}
        for i, op in ipairs(self.basic_ops) do
            of_parameters[i], of_extras[i] = {}, {}
            if outside[i] then at, of_extras[i] = at + 1, { grads[at + 1] } end
            for k in ipairs(op:parameters()) do at, of_parameters[i][k] = at + 1, grads[at + 1] end
        end
        return grads[1], of_parameters, of_extras
    end

    local Forward = fused_class("ForwardChain", { fuser_forward = chain_forward })
    local Backward = fused_class("BackwardChain", { fuser_backward = chain_backward })
    local Joint = fused_class("JointChain", {
        fuser_forward = function(self, ctxs, x, extra_inputs)
            for i, ctx in ipairs(ctxs) do ctx:save_for_backward(i == 1 and x, extra_inputs[i][1]) end
            return chain_forward(self, ctxs, x, extra_inputs)
        end,
        fuser_backward = chain_backward,
    })

    -- Fuses up to four neighbours by one of the classes, or leaves one alone. What is fused already stays.
    local function random_rule(classes, fired)
        return function(ops)
            local new, at = {}, 1
            while ops[at] do
                local n, wanted = 0, math.random(0, 4)
                while n < wanted and ops[at + n] and not te.is(ops[at + n], te.FusedOperation) do n = n + 1 end
                local class = classes[math.random(#classes)]
                new[#new + 1] = n > 0 and class(unpack(ops, at, at + n - 1)) or ops[at]
                if n > 0 then fired[class.__name] = (fired[class.__name] or 0) + 1 end
                at = at + math.max(n, 1)
            end
            return new
        end
    end

    local Scale = te.BasicOperation:extend("Scale")
    function Scale:init() self:register_parameter("scale", te.full({}, 1.5)) end
    function Scale:op_forward(ctx, x)
        if ctx then ctx:save_for_backward(x) end
        return x * self.scale
    end
    function Scale:op_backward(ctx, dy)
        local x = ctx:saved_tensors()
        return dy * self.scale, { (dy * x):sum() }
    end

    local makers = {
        function() return te.Linear(4, 4) end, function() return te.LayerNorm(4) end, te.GELU, te.SiLU, Scale,
        function() return te.ConstantScale(0.7) end, function() return te.Bias(4) end, te.Identity,
        function() return te.L2Normalization() end,
    }

    local function random_chain(container, depth)
        local list = {}
        for i = 1, math.random(1, 5) do
            local nested = depth > 0 and math.random(4) or 0
            if nested == 1 then
                list[i] = random_chain(te.Residual, depth - 1)
            elseif nested == 2 then
                list[i] = random_chain(te.Sequential, depth - 1)
            else
                list[i] = makers[math.random(#makers)]()
            end
        end
        return container(unpack(list))
    end

    it("give the values and gradients of no fusion", function()
        te.manual_seed(11)
        math.randomseed(11)
        local fired = {}
        for _ = 1, trials(200, 12) do
            local seq = random_chain(te.Sequential, 2):to("float64")
            local x = te.randn({ 2, 4 }, { dtype = "float64", requires_grad = true })
            local before, unfused = x:clone(), outcome(seq, x)
            with({ { "forward", random_rule({ Forward, Joint }, fired) },
                { "backward", random_rule({ Backward }, fired) } },
                function() assert_same(unfused, outcome(seq, x), 1e-9) end)
            assert.equal(0, (before - x):abs():max():item())
        end
        for _, class in ipairs { "ForwardChain", "BackwardChain", "JointChain" } do
            assert.is_true((fired[class] or 0) > trials(100, 2), class)
        end
    end)
end)
