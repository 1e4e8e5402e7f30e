-- Fusions of your own: a rule looks at neighbouring operations and replaces some by one that does their work at once.
--
--     tetrain scripts/examples/custom_fusion.lua

local te = require "te"

-- What a rule puts in place of ConstantScale and AddExtraInput. It owns nothing: parameters stay with the operations.
local traced = te.pointwise(function(x, residual, scale) return x * scale + residual end)
local ForwardAxpy = te.FusedOperation:extend("ForwardAxpy")

function ForwardAxpy:init(scale, add) self:set_basic_ops(scale, add) end

-- extra_inputs[i] are those of basic operation i; the second result lists extra outputs in the same way.
function ForwardAxpy:fuser_forward(_, x, extra_inputs)
    return traced(x, extra_inputs[2][1], self.basic_ops[1].scale), { {}, {} }
end

-- A rule returns the list it is given, with neighbours replaced. The branch of a Residual is part of that list: it ends
-- with the AddExtraInput that adds what was set aside.
local function fuse_axpy(ops)
    local fused, i = {}, 1
    while ops[i] do
        if te.is(ops[i], te.ConstantScale) and te.is(ops[i + 1], te.AddExtraInput) then
            fused[#fused + 1] = ForwardAxpy(ops[i], ops[i + 1])
            i = i + 2
        else
            fused[#fused + 1] = ops[i]
            i = i + 1
        end
    end
    return fused
end

-- A backward fusion: the constant multiplies what is small, the weight and its gradient, and not the gradient of every
-- token. The context of a built-in operation holds its input.
local BackwardLinearScale = te.FusedOperation:extend("BackwardLinearScale")

function BackwardLinearScale:init(linear, scale) self:set_basic_ops(linear, scale) end

function BackwardLinearScale:fuser_backward(ctxs, dy)
    local linear, scale, x = self.basic_ops[1], self.basic_ops[2].scale, ctxs[1]:saved_tensors()
    local dx = te.matmul(dy, linear.weight * scale)
    local dw, db = te.matmul(dy:transpose(1, 2), x) * scale, dy:sum(1) * scale
    return dx, { { dw, db }, {} } -- gradients of parameters, per basic operation
end

local function fuse_linear_scale(ops)
    for i = #ops - 1, 1, -1 do
        if te.is(ops[i], te.Linear) and te.is(ops[i + 1], te.ConstantScale) then
            ops[i] = BackwardLinearScale(ops[i], table.remove(ops, i + 1))
        end
    end
    return ops -- the list is the rule's own: it may change it
end

te.manual_seed(1)
local block = te.Residual(te.LayerNorm(8), te.Linear(8, 8), te.ConstantScale(0.5))
local x = te.randn({ 4, 8 }, { requires_grad = true })

local function run()
    x.grad = nil
    local y = block(x)
    te.sum(y * y):backward()
    return y:detach(), x.grad
end

local y, dx = run()
te.register_forward_fusion(fuse_axpy)
te.register_backward_fusion(fuse_linear_scale)
local fused_y, fused_dx = run()
print("largest difference of results:  ", (y - fused_y):abs():max():item() < 1e-6 and "none" or "some")
print("largest difference of gradients:", (dx - fused_dx):abs():max():item() < 1e-5 and "none" or "some")
te.unregister_fusion(fuse_linear_scale)
te.unregister_fusion(fuse_axpy)

-- A rule that loses an operation is told so.
te.register_forward_fusion(function(ops) return { ops[1] } end, { name = "forgetful" })
print(select(2, pcall(block, x)))
