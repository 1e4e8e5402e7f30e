local te = require "te"
local shell = require "spec.support.shell"

local TETRAIN = os.getenv "TETRAIN" or "build/tetrain"

-- How often a weight was multiplied before: copies of it may be kept.
local AGAIN = [[
local te = require "te"
te.manual_seed(1)
local wrong = 0
for i = 1, 60 do
    local m, n, k, apart = math.random(2, 130), math.random(2, 900), math.random(2, 900), i % 3 == 0 and 3 or 0
    if i % 2 == 0 then n, k = n - n % 8 + 8, k - k % 8 + 8 end
    local dtype = i % 5 == 0 and "bfloat16" or "float32"
    local w = te.randn({ n + apart, k + apart }):to(dtype):narrow(1, 1, n):narrow(2, 1, k):detach()
    local x = te.randn({ m, k }):to(dtype)
    x.requires_grad = true
    local first, dx
    for _ = 1, 3 do
        local y = te.linear(x, w)
        x.grad = nil
        y:sum():backward()
        first, dx = first or y, dx or x.grad
        if te.any(te.ne(first, y)):item() or te.any(te.ne(dx, x.grad)):item() then wrong = wrong + 1 end
    end
end
print(wrong)]]

describe("te.Linear", function()
    it("starts as N(0, 0.023) with a bias of zeros", function()
        te.manual_seed(1)
        local m = te.Linear(200, 300)
        assert.same({ 300, 200 }, m.weight.shape)
        assert.is_true(math.abs(m.weight:var():sqrt():item() - 0.023) < 0.0005)
        assert.is_true(math.abs(m.weight:mean():item()) < 0.0005)
        assert.equal(0, m.bias:abs():max():item())
        assert.equal("te.Linear", "te." .. m.__name)
    end)

    it("is x W^T + b", function()
        local m = te.Linear(2, 1, { init_method = function(t) t:fill_(3) end })
        te.no_grad(function() m.bias:fill_(1) end)
        assert.same({ { 10 }, { 1 } }, m(te.tensor { { 1, 2 }, { 0, 0 } }):totable())
    end)

    it("takes no rows at all, in any dimensions", function()
        for _, shape in ipairs { { 0, 2 }, { 4, 0, 2 }, { 0, 4, 2 }, { 3, 4, 0, 2 } } do
            local m, x = te.Linear(2, 3), te.zeros(shape, { requires_grad = true })
            local y = m(x)
            assert.equal(3, y:size(-1))
            assert.equal(0, y:numel())
            y:sum():backward()
            assert.same(shape, x.grad.shape)
            assert.equal(0, m.weight.grad:abs():max():item())
        end
    end)

    it("takes its options", function()
        assert.is_nil(te.Linear(2, 2, { bias = false }).bias)
        assert.equal("bfloat16", te.Linear(2, 2, { params_dtype = "bfloat16" }).weight.dtype)
        local y, bias = te.Linear(2, 3, { return_bias = true })(te.ones({ 1, 2 }))
        assert.same({ 1, 3 }, y.shape)
        assert.same({ 3 }, bias.shape)
        assert.error_matches(function() te.Linear(2, 2, { bais = false }) end,
            'unknown option "bais"; did you mean "bias"')
        assert.error_matches(function() te.Linear(0, 2) end,
            "te%.Linear: in_features: expected positive integer, got 0")
    end)

    it("hands out its bias from inside a container, with its gradient", function()
        local x = te.randn({ 4, 2 })
        for _, around in ipairs {
            function(m) return te.Sequential(m) end, function(m) return te.Sequential(m, te.ReLU()) end,
            function(m) return te.Sequential(te.SiLU(), te.Residual(m)) end,
            function(m) return te.Sequential(function(v) return v * 2 end, m, te.Linear(2, 2)) end,
        } do
            for _, fused in ipairs { true, false } do
                local before, m = te.set_fusion(fused), te.Linear(2, 2, { return_bias = true })
                local seq = around(m)
                for _, run in ipairs { seq, function(v) return te.checkpoint(seq, v) end } do
                    local y, bias = run(x)
                    assert.same({ 4, 2 }, y.shape)
                    assert.same(m.bias:totable(), bias:totable())
                    m.bias.grad, m.weight.grad = nil, nil
                    ;(y:sum() + (bias * te.tensor({ 2, 3 })):sum()):backward()
                    assert.same({ 2, 3 }, m.bias.grad:totable())
                    assert.same({ 2, 2 }, m.weight.grad.shape)
                end
                te.set_fusion(before)
            end
        end
    end)

    it("refuses what it cannot do, unless nothing is asked", function()
        te.Linear(2, 2, { tensor_parallel_mode = nil, sequence_parallel = false, accumulate_into_main_grad = false })
        for _, class in ipairs { te.Linear, te.BasicLinear } do
            assert.error_matches(function() class(2, 2, { userbuffers_options = {} }) end,
                "option userbuffers_options: products and what goes between processes do not overlap")
            assert.error_matches(function() class(2, 2, { accumulate_into_main_grad = true }) end,
                "option accumulate_into_main_grad: gradients accumulate in the main_grad")
        end
        assert.error_matches(function() te.Linear(2, 2, { bias = false, return_bias = true }) end,
            "te%.Linear: option return_bias: there is no bias to return")
    end)

    it("names itself and the shape that does not fit", function()
        assert.error_matches(function() te.Linear(3, 4)(te.ones({ 2, 5 })) end,
            "te%.Linear: the input has shape {2,5}, its last size must be in_features = 3")
    end)

    it("has the gradients of a sum, whose gradient is one number for all", function()
        local m, x = te.Linear(2, 3), te.tensor({ { 1, 2 }, { 3, 4 } }, { requires_grad = true })
        for _ = 1, 3 do
            m:zero_grad()
            x.grad = nil
            te.add(te.ones({ 3 }), m(x)):sum():backward()
            assert.same({ { 4, 6 }, { 4, 6 }, { 4, 6 } }, m.weight.grad:totable())
            assert.same({ 2, 2, 2 }, m.bias.grad:totable())
            local row = m.weight:sum(1):totable()
            assert.is_true((x.grad - te.tensor { row, row }):abs():max():item() < 1e-6)
        end
    end)

    it("equals BasicLinear and Bias", function()
        te.manual_seed(2)
        local whole, product, bias = te.Linear(4, 3), te.BasicLinear(4, 3), te.Bias(3)
        product.weight = whole.weight
        te.no_grad(function() whole.bias:copy_(te.randn({ 3 })); bias.bias:copy_(whole.bias) end)
        local x = te.randn({ 2, 5, 4 })
        assert.is_true((whole(x) - te.Sequential(product, bias)(x)):abs():max():item() < 1e-6)
    end)

    it("has the same bits however often a weight was multiplied before", function()
        for _, isa in ipairs { "portable", "avx2", "avx512" } do -- as far as the processor has them
            local command = ("TE_CPU_ISA=%s %s --threads=2 -e '%s'"):format(isa, TETRAIN, AGAIN)
            assert.equal("0\n", (shell.capture(command)), isa)
        end
    end)

    it("of no rows has a gradient of zeros, whose norm is 0", function()
        te.manual_seed(3)
        local w, b = te.randn({ 2048, 1024 }, { requires_grad = true }), te.zeros { 2048 }
        te.square(te.linear(te.randn { 40, 1024 }, w, b)):sum():backward() -- leaves numbers in memory
        w.grad = nil
        te.square(te.linear(te.zeros { 0, 1024 }, w, b)):sum():backward()
        assert.equal(0, te.optim.clip_grad_norm({ w }, 1))
    end)
end)
