--- Set-up of the specs about fusions registered from Lua: rules that are taken away again, operations that rules put in
-- the place of others, and the comparison of runs.

local assert = require "luassert"

local te = require "te"

local fusion = { calls = 0 } -- calls: how often an operation below ran

-- Rules registered by `with` are taken away again, also when the test fails.
function fusion.with(rules, fn)
    local done = {}
    for _, rule in ipairs(rules) do
        local kind, f, opts = unpack(rule)
        done[#done + 1] = te["register_" .. kind .. "_fusion"](f, opts)
    end
    local ok, message = pcall(fn)
    for _, f in ipairs(done) do te.unregister_fusion(f) end
    if not ok then error(message, 0) end
end

-- A rule that replaces neighbours of the given classes by make(…).
function fusion.window(classes, make)
    return function(ops)
        local new, at = {}, 1
        while ops[at] do
            local fits = true
            for k, class in ipairs(classes) do fits = fits and te.is(ops[at + k - 1], class) end
            new[#new + 1] = fits and make(unpack(ops, at, at + #classes - 1)) or ops[at]
            at = at + (fits and #classes or 1)
        end
        return new
    end
end

function fusion.fused_class(name, methods)
    local class = te.FusedOperation:extend(name)
    function class:init(...) self:set_basic_ops(...) end
    for method, fn in pairs(methods) do class[method] = fn end
    return class
end

-- Output and all gradients of a run, as tables of numbers.
function fusion.outcome(seq, ...)
    local inputs = { ... }
    seq:zero_grad()
    for _, input in ipairs(inputs) do input.grad = nil end
    local results, total = { seq(...) }, nil
    for i, result in ipairs(results) do
        local part = te.sum(result * result * (i + 0.5))
        total = total and total + part or part
    end
    total:backward()
    local numbers = {}
    local function note(name, t) numbers[#numbers + 1] = { name, t and t:detach():clone() } end
    for i, result in ipairs(results) do note("result " .. i, result) end
    for i, input in ipairs(inputs) do note("gradient of input " .. i, input.grad) end
    for name, parameter in seq:named_parameters() do note("gradient of " .. name, parameter.grad) end
    return numbers
end

-- Rounding differs: sums that cancel are added up in another order.
function fusion.assert_same(expected, got, tolerance)
    assert.equal(#expected, #got)
    for i, entry in ipairs(expected) do
        local name, want, value = entry[1], entry[2], got[i][2]
        assert.equal(want == nil, value == nil, name)
        if want then
            local scale = math.max(1, want:abs():max():item())
            local difference = (want - value):abs():max():item()
            assert.is_true(difference <= (tolerance or 2e-5) * scale, ("%s differs by %g"):format(name, difference))
        end
    end
end

fusion.ForwardAxpy = fusion.fused_class("ForwardAxpy", {
    fuser_forward = function(self, _, x, extra_inputs)
        fusion.calls = fusion.calls + 1
        return x * self.basic_ops[1].scale + extra_inputs[2][1], { {}, {} }
    end,
})
fusion.axpy = fusion.window({ te.ConstantScale, te.AddExtraInput }, fusion.ForwardAxpy)

-- dx and gradients of a Linear whose result is multiplied by a constant.
function fusion.linear_scale_backward(self, ctxs, dy)
    fusion.calls = fusion.calls + 1
    local linear, scale = self.basic_ops[1], self.basic_ops[2].scale
    local x, scaled = ctxs[1]:saved_tensors(), dy * scale
    local dw = te.matmul(scaled:transpose(1, 2), x)
    return te.matmul(scaled, linear.weight), { { dw, scaled:sum(1) }, {} }, { {}, {} }
end
fusion.BackwardLinearScale = fusion.fused_class("BackwardLinearScale",
    { fuser_backward = fusion.linear_scale_backward })
fusion.backward_linear_scale = fusion.window({ te.Linear, te.ConstantScale }, fusion.BackwardLinearScale)

function fusion.input(shape) return te.randn(shape or { 3, 4 }, { requires_grad = true }) end

function fusion.names(ops)
    local list = {}
    for i, op in ipairs(ops) do list[i] = op.__name end
    return table.concat(list, " ")
end

-- A rule that changes nothing and writes down what it is given.
function fusion.listener(seen)
    return function(ops, opts)
        seen[#seen + 1] = { ops = fusion.names(ops), opts = opts }
        return ops
    end
end

return fusion
