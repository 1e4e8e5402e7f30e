--- One tensor for several inputs of a function, in formulas at random as well.

local close = require("spec.support.reference").assert_close
local te = require "te"

describe("one tensor for several inputs", function()
    -- The gradient by tensor, once by backward and once by te.grad, of leaves and of results.
    local function gradients(f, tensors, picks, weights, how)
        local given = {}
        for i, t in ipairs(tensors) do
            t.grad = nil
            given[i] = how.results and t * 1 or t
        end
        local chosen = {}
        for i, k in ipairs(picks) do chosen[i] = given[k] end
        local results, loss = { f(unpack(chosen)) }, 0
        for i, r in ipairs(results) do
            local seen = how.uses == 3 or how.uses == i
            if seen and r.requires_grad then loss = loss + (r * weights:narrow(1, i, 1)):sum() end
        end
        local found = {}
        if loss == 0 then return found end
        if how.asks then
            for i, g in ipairs(te.grad(loss, tensors)) do found[i] = g end
        else
            loss:backward()
            for i, t in ipairs(tensors) do found[i] = t.grad end
        end
        return found
    end

    it("gets the sum of what each of them gets", function()
        for _, dtype in ipairs { "float32", "float64" } do
            local x = te.tensor({ 1, 2, 3 }, { dtype = dtype, requires_grad = true })
            local ones = te.ones({ 3 }, { dtype = dtype })
            te.pointwise(function(a, b) return b - a end)(x, x):sum():backward()
            assert.same({ 0, 0, 0 }, x.grad:totable())
            x.grad = nil
            te.layer_norm(x, ones, x):sum():backward()
            close({ 1, 1, 1 }, x.grad)
            local h = x * 1
            local twice = te.pointwise(function(a, b) return a * a + b end)
            close({ 3, 5, 7 }, te.grad(twice(h, h):sum(), x, { retain_graph = true }))
            close({ 3, 5, 7 }, te.grad(twice(h, h):sum(), h))
        end
    end)

    local random = math.random

    local function pick(list) return list[random(#list)] end

    local TERMS = { "%A + %B", "%A - %B", "%A * %B", "%A / (1 + %B * %B)", "%A - rowmean(%A)", "tanh(%A)", "-%A",
        "where(%A > %B, %B, %A)", "exp(tanh(%A))" }

    -- Some steps on inputs and on steps before; the results add whatever stands there.
    local function formula()
        local names, steps = { "x", "y", "w", "s" }, {}
        for i = 1, random(4) do
            local a, b = pick(names), pick(names)
            steps[i] = ("t%d = %s"):format(i, (pick(TERMS):gsub("%%A", a):gsub("%%B", b)))
            names[#names + 1] = "t" .. i
        end
        steps[#steps + 1] = "r = " .. names[#names] .. " + " .. pick(names)
        steps[#steps + 1] = "z = " .. pick(names) .. " - (" .. pick(names) .. ")"
        return table.concat(steps, "; ")
    end

    it("gets it in random formulas", function()
        math.randomseed(31)
        te.manual_seed(31)
        local compared = 0
        for _ = 1, 150 do
            local text = formula()
            local defined, f = pcall(te._core.define, "repeating(x, y, w, s)", text,
                { outputs = "r z", rows = true, elements = true })
            if defined then
                local shapes = { { 2, 3 }, pick { { 2, 3 }, { 2, 1 }, { 3 } }, pick { { 3 }, { 1 } } }
                local picks = { 1, random(2), random(3), random(3) }
                local dtype = pick { "float64", "float32" }
                local tensors, apart, apart_from = {}, {}, {}
                for i, shape in ipairs(shapes) do
                    tensors[i] = te.randn(shape, { dtype = dtype })
                    tensors[i].requires_grad = true
                end
                for i, k in ipairs(picks) do
                    apart[i] = tensors[k]:detach():clone()
                    apart[i].requires_grad, apart_from[i] = true, k
                end
                local weights = te.randn({ 2 }, { dtype = dtype })
                local how = { results = random(2) == 1, asks = random(2) == 1, uses = random(3) }
                local got = gradients(f, tensors, picks, weights, how)
                local want = {}
                for i, g in pairs(gradients(f, apart, { 1, 2, 3, 4 }, weights, { uses = how.uses })) do
                    local k = apart_from[i]
                    if g then want[k] = want[k] and want[k] + g or g end
                end
                for k, g in pairs(want) do
                    assert.is_truthy(got[k], text)
                    close(g:totable(), got[k], dtype == "float64" and 1e-10 or 1e-4)
                    compared = compared + 1
                end
                if dtype == "float64" then -- at values of which no two are alike, where minima have kinks
                    for i, t in ipairs(apart) do apart[i] = t:detach() * (1 + i / 8) end
                    assert.is_true(te.gradcheck(f, apart))
                end
            end
        end
        assert.is_true(compared > 150)
    end)
end)
