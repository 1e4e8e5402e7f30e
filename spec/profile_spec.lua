local te = require "te"

describe("te.profile", function()
    local model = te.Sequential(te.LayerNorm(8), te.Linear(8, 16), te.GELU(), te.Linear(16, 8))

    local function step() model(te.ones { 4, 8 }):sum():backward() end

    it("lists the kernels that ran, in order, with bytes and work", function()
        model:zero_grad()
        step()
        local names = {}
        local p = te.profile(step)
        for _, event in ipairs(p.events) do
            names[#names + 1] = event.name
            assert.is_true(event.seconds >= 0 and event.start >= 0 and event.bytes > 0, event.name)
        end
        local text = table.concat(names, " ")
        assert.matches("layer_norm gemm 4x16x8 float32 gelu_tanh gemm 4x8x16 float32", text, 1, true)
        for _, event in ipairs(p.events) do
            if event.name == "gemm 4x16x8 float32" then
                assert.equal(2 * 4 * 16 * 8, event.flops)
                assert.equal(4 * (4 * 8 + 8 * 16 + 4 * 16 + 16), event.bytes)
                break
            end
        end
        assert.is_true(p.seconds > 0)
        assert.equal(p.events[1], p[1])
        assert.equal(#names, #p)
        assert.matches("layer_norm.backward", tostring(p))
    end)

    it("measures a device's rates without drawing random numbers, in the dtypes it names", function()
        local script = [[
            local te = require "te"
            local before, matmul, seen = te.rng_state(), te.matmul, {}
            function te.matmul(...)
                local y = matmul(...)
                seen[y.dtype] = true
                return y
            end
            te.autocast({ dtype = "bfloat16" }, require("te.rates").of, "cpu")
            assert(seen.float32 and seen.bfloat16 and before == te.rng_state())
        ]]
        local tetrain = os.getenv "TETRAIN" or te._core.executable()
        assert.equal(0, os.execute(("'%s' -e '%s'"):format(tetrain, script:gsub("\n", " "))))
    end)

    it("counts what is written, and what is read of it", function()
        local x, y = te.zeros { 100 }, te.zeros { 100 }
        local function bytes(fn) return te.profile(function() fn() end)[1].bytes end
        local number = te.get_default_device() == "cpu" and 8 or 0 -- a double; a device gets it with the call
        assert.equal(400 + number, bytes(function() return te.ones { 100 } end))
        assert.equal(400, bytes(function() x:fill_(3) end))
        assert.equal(400, bytes(function() x:normal_() end))
        assert.equal(800, bytes(function() x:copy_(y) end))
        assert.equal(1200, bytes(function() x:add_(y) end))
    end)

    it("moves the bytes that the plan counts, forward and backward", function()
        local seq = te.Sequential(te.Residual(te.RMSNorm(32), te.Linear(32, 64), te.SwiGLU(),
            te.Linear(32, 32), te.Dropout(0.1)), te.LayerNorm(32))
        local x = te.randn({ 16, 32 })
        x.requires_grad = true
        local plan, planned, moved = seq:explain(x), {}, {}
        for _, pass in ipairs { plan.forward, plan.backward } do
            for _, s in ipairs(pass) do if s.kind == "program" then planned[s.kernels[1]] = s.bytes end end
        end
        local y, dy = nil, te.ones { 16, 32 }
        for _, e in ipairs(te.profile(function() y = seq(x) y:backward(dy) end).events) do
            if e.kind == "program" then moved[e.name] = e.bytes end
        end
        local compared = 0
        for kernel, bytes in pairs(planned) do
            if moved[kernel] then
                assert.is_true(math.abs(moved[kernel] - bytes) <= 0.1 * bytes,
                    ("%s: %g planned, %g moved"):format(kernel, bytes, moved[kernel]))
                compared = compared + 1
            end
        end
        assert.is_true(compared >= 5, "compared " .. compared)
    end)

    it("moves in backward what the plan lists, also where only a later operation of a step has a gradient", function()
        for _, seq in ipairs { te.Sequential(te.Linear(8, 16), te.SwiGLU(), te.Linear(8, 8, { bias = false })),
            te.Sequential(te.SiLU(), te.Bias(8), te.GELU()) } do
            local x, planned, moved, y = te.randn { 4, 8 }, {}, {}, nil
            for _, s in ipairs(seq:explain(x).backward) do
                if s.kind == "program" then planned[#planned + 1] = s.kernels[1] .. " " .. s.bytes end
            end
            y = seq(x)
            for _, e in ipairs(te.profile(function() y:backward(te.ones { 4, 8 }) end)) do
                local counts = e.kind == "program" and e.name ~= "fill" -- a device adds up what was set to 0
                if counts then moved[#moved + 1] = e.name .. " " .. e.bytes end
            end
            assert.equal(1, #moved)
            assert.same(moved, planned)
        end
    end)

    it("sees quantizing and dequantizing, with the bytes of both copies and of their factors", function()
        local x = te.randn({ 64, 96 }, { dtype = "bfloat16" })
        local moved = {}
        for _, e in ipairs(te.profile(function()
            te.quantize(x, te.recipe.MXFP8BlockScaling {}, "input", { columnwise = true }):dequantize()
        end).events) do moved[e.name] = e.bytes end
        assert.equal(64 * 96 * (2 + 2 * (1 + 1 / 32)), moved.quantize)
        assert.equal(64 * 96 * (2 + 1 + 1 / 32), moved.dequantize)
    end)

    it("writes a trace", function()
        local path = os.tmpname()
        te.profile(step):save_trace(path)
        local file = assert(io.open(path))
        local text = file:read("*a")
        file:close()
        os.remove(path)
        assert.matches('^{"traceEvents": %[\n{"name": "', text)
        assert.matches('{"name": "layer_norm", "cat": "program", "ph": "X"', text, 1, true)
        assert.error_matches(function() te.profile(step):save_trace("/nowhere/trace.json") end, "/nowhere/trace.json")
    end)

    it("sees a device that is opened meanwhile", function()
        local tetrain = os.getenv("TETRAIN") or te._core.executable()
        local text, status = require "spec.support.shell".capture(("'%s' -e '%s'"):format(tetrain,
            "print(te.profile(function() local a = te.ones { 50, 50 } te.matmul(a, a) end))"))
        assert.equal(0, status, text)
        assert.matches("gemm 50x50x50", text)
    end)

    it("passes errors on and can start again", function()
        assert.error_matches(function() te.profile(function() error("inside") end) end, "inside")
        assert.error_matches(function() te.profile(function() te.profile(step) end) end, "a profile is running already")
        assert.is_true(#te.profile(step).events > 0)
        assert.error_matches(function() te.profile(3) end, "expected a function")
    end)
end)
