--- te.graph and what is kept of weights between calls: copies in the compute dtype and quantized ones are current, and
--- apart from what a launch writes.

local cards = require "spec.support.device"
local graphs = require "spec.support.graphs"
local te = require "te"

local devices, reason = te.devices()
local values, model_on, equal_bits, equal_runs = graphs.values, graphs.model_on, graphs.equal_bits, graphs.equal_runs

describe("Copies of weights in te.graph on a CUDA device", function()
    if not devices[2] then
        pending(reason)
        return
    end

    it("keeps copies of weights apart from what it writes after it has read them", function()
        local x
        local function output(layer, dtype) return te.autocast({ dtype = dtype }, layer, x):to "float32" end
        local function run(graphed, stored, dtype, write)
            te.manual_seed(1)
            local layer = te.Linear(8, 8, { params_dtype = stored, bias = false }):to "cuda"
            local optimizer, seen = te.optim.AdamW(layer:parameters(), { lr = 0.01 }), {}
            local function step()
                local y = output(layer, dtype)
                write(layer.weight, optimizer, y)
                return y:detach()
            end
            local call = graphed and te.graph(step, { te.zeros { 1 } }, { device = "cuda", warmup = 1 }) or step
            for i = 1, 6 do
                te.no_grad(output, layer, dtype)
                for _, v in ipairs(values(call(te.zeros { 1 }))) do seen[#seen + 1] = v end
                local other = i > 3 and (dtype == "bfloat16" and "float16" or "bfloat16")
                if other then seen[#seen + 1] = te.no_grad(output, layer, other):sum():item() end
            end
            return seen
        end
        local function scale(weight) te.no_grad(weight.mul_, weight, 0.75) end
        local function update(_, optimizer, y)
            y:square():mean():backward()
            optimizer:step()
            optimizer:zero_grad()
        end
        x = te.randn({ 4, 8 }, { device = "cuda" })
        for _, dtypes in ipairs { { "float32", "bfloat16" }, { "bfloat16", "float16" }, { "bfloat16", "float32" } } do
            for _, write in ipairs { scale, update } do
                equal_bits(run(false, dtypes[1], dtypes[2], write), run(true, dtypes[1], dtypes[2], write))
            end
        end
    end)

    for _, name in ipairs { "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling",
        "NVFP4BlockScaling" } do
        it("trains weights that are stored quantized by " .. name, function()
            local opts = { dropout = 0, dtype = "bfloat16", quantized = name, recipe = te.recipe[name] }
            function opts.between(i, model)
                if i == 4 then -- between two launches
                    te.no_grad(function()
                        for _, p in ipairs(model:parameters()) do p:mul_(0.75) end
                    end)
                elseif i == 5 then
                    model:load_state_dict(model_on("cuda", opts):state_dict())
                end
            end
            equal_runs("cuda", opts)
        end)
    end

    -- Quantized copies of a weight belong to whoever made them: a recording or the work outside.
    describe("and quantized copies of weights", function()
        local function recipe() return te.recipe.Float8CurrentScaling {} end
        local function layer_of(weight)
            local layer = te.Linear(16, 16, { bias = false }):to "cuda"
            te.no_grad(function() layer.weight:copy_(weight) end)
            return layer
        end
        local function output(layer, x, r) return te.no_grad(te.autocast, { recipe = r }, layer, x) end
        local weight, x

        before_each(function()
            te.manual_seed(9)
            weight, x = te.randn({ 16, 16 }, { device = "cuda" }), te.randn({ 16, 16 }, { device = "cuda" })
        end)

        it("makes them anew in every launch", function()
            local layer, r = layer_of(weight), recipe()
            local graph = te.graph(function(v) return output(layer, v, r) end, { x }, { warmup = 1 })
            for i = 1, 4 do
                equal_bits(values(output(layer_of(layer.weight:detach()), x, r)), values(graph(x)))
                if i > 1 then te.no_grad(function() layer.weight:mul_(-1.5) end) end
            end
        end)

        it("lets none of a recording be read before it has run", function()
            local layer, r, sample = layer_of(weight), recipe(), x:clone()
            sample.requires_grad = true
            te.make_graphed_callables(function(v) return te.autocast({ recipe = r }, layer, v) end,
                { sample }, { warmup = 1 })
            equal_bits(values(output(layer_of(weight), x, r)), values(output(layer, x, r)))
        end)

        it("forgets them when a launch has changed the weight", function()
            local layer, r = layer_of(weight), recipe()
            local optimizer = te.optim.AdamW(layer:parameters(), { lr = 0.1 })
            local graph = te.graph(function(v)
                te.autocast({ recipe = r }, layer, v):sum():backward()
                optimizer:step { clip = te.optim.grad_clip(layer, { max = 1 }) }
                optimizer:zero_grad()
            end, { x }, { warmup = 1 })
            for _ = 1, 4 do
                graph(x)
                equal_bits(values(output(layer_of(layer.weight:detach()), x, r)), values(output(layer, x, r)))
            end
        end)
    end)

    it("reads weights in the compute dtype as they are now, whoever changed them", function()
        local function layers() return te.Sequential(te.Linear(32, 32), te.GELU(), te.Linear(32, 32)) end
        te.manual_seed(9)
        local model, plain = layers():to "cuda", layers():to "cuda"
        local x = te.randn({ 4, 32 }, { device = "cuda" })
        local function output(m, v, dtype) return te.no_grad(te.autocast, { dtype = dtype or "bfloat16" }, m, v) end
        local graph = te.graph(function(v) return output(model, v) end, { x }, { warmup = 1 })
        for i = 1, 9 do
            if i % 2 == 1 then
                te.no_grad(function() for _, p in ipairs(model:parameters()) do p:mul_(0.75) end end)
            end
            if i == 5 then output(model, x, "float16") end -- which has other copies of the weights made
            if i == 8 then output(model, x) end
            local state = {}
            for name, t in pairs(model:state_dict()) do state[name] = t:detach():clone() end
            plain:load_state_dict(state)
            equal_bits(values(output(plain, x)), values(graph(x)))
        end
    end)

    -- A launch makes copies of weights only where these were changed: nothing else may have been where they lie.
    it("keeps the copies of weights apart from what a launch writes before them", function()
        for _, recipe in pairs { delayed = te.recipe.DelayedScaling {}, current = te.recipe.Float8CurrentScaling {},
            blocks = te.recipe.Float8BlockScaling {}, mxfp8 = te.recipe.MXFP8BlockScaling {},
            nvfp4 = te.recipe.NVFP4BlockScaling {} } do
            te.manual_seed(9)
            local layer = te.Linear(64, 128, { bias = false }):to "cuda"
            local x = te.randn({ 16, 64 }, { device = "cuda", dtype = "bfloat16" })
            local before = te.randn({ 4, 64, 64 }, { device = "cuda", dtype = "bfloat16" })
            local function run(v)
                for i = 1, 4 do te.exp(before:select(1, i)):release() end      -- 8192 bytes each,
                for _, n in ipairs { 1, 64, 128, 256, 512, 1024 } do te.rand({ n }, { device = "cuda" }):release() end
                return te.no_grad(te.autocast, { recipe = recipe }, layer, v) -- as the codes of the weight
            end
            local expected, graph = values(run(x)), te.graph(run, { x }, { warmup = 1 })
            for _ = 1, 4 do equal_bits(expected, values(graph(x))) end
        end
    end)

    -- Of a size that bytes are padded for: copies with zeros around them are kept between products.
    it("changes weights stored quantized under products that have kept more of them", function()
        local recipe = te.recipe.Float8CurrentScaling {}
        te.manual_seed(9)
        local layer = te.quantized_model_init({ recipe = recipe }, te.Linear, 20, 21, { bias = false }):to "cuda"
        local optimizer = te.optim.AdamW(layer:parameters(), { lr = 0.1 })
        local x = te.randn({ 5, 20 }, { device = "cuda" })
        local function output() return values(te.no_grad(te.autocast, { recipe = recipe }, layer, x)) end
        local graph = te.graph(function(v)
            te.autocast({ recipe = recipe }, layer, v):sum():backward()
            optimizer:step { clip = te.optim.grad_clip(layer, { max = 1 }) }
            optimizer:zero_grad()
        end, { x }, { warmup = 1 })
        local expected = te.Linear(20, 21, { bias = false }):to "cpu"
        for _ = 1, 5 do
            graph(x)
            te.no_grad(function() expected.weight:copy_(layer.weight:detach():to("cpu"):to "float32") end)
            local wanted = values(te.no_grad(te.autocast, { recipe = recipe }, expected, x:to "cpu"))
            local most = cards.has_short_sums() and 2e-3 or 1e-4
            for _ = 1, 3 do -- seen, kept, taken
                for i, y in ipairs(output()) do assert.near(wanted[i], y, most * (1 + math.abs(y))) end
            end
        end
    end)

    -- As an input of other work, as a weight there, and where a backward pass is still to come.
    it("counts a launch as a write of what it returns", function()
        te.manual_seed(12)
        local tail = te.Linear(16, 16):to "cuda"
        local x = te.randn({ 4, 16 }, { device = "cuda" })
        local graph = te.graph(te.gelu, { te.zeros({ 4, 16 }, { device = "cuda" }) }, { warmup = 1 })
        local weight = te.graph(te.mul, { te.zeros({ 16, 16 }, { device = "cuda" }), 2 }, { warmup = 1 })
        for _, recipe in ipairs { false, te.recipe.MXFP8BlockScaling {}, te.recipe.Float8CurrentScaling {} } do
            local options = { dtype = "bfloat16", recipe = recipe or nil }
            for _ = 1, 4 do
                local h, w = graph(te.randn { 4, 16 }), weight(te.randn { 16, 16 }, 2)
                equal_bits(values(te.autocast(options, tail, h:clone())), values(te.autocast(options, tail, h)))
                equal_bits(values(te.autocast(options, te.linear, x, w:clone())),
                    values(te.autocast(options, te.linear, x, w)))
            end
        end
        local leaf = te.ones({ 4, 16 }, { device = "cuda", requires_grad = true })
        local loss = (graph(te.ones { 4, 16 }) * leaf):sum()
        graph(te.zeros { 4, 16 })
        assert.has_error(function() loss:backward() end,
            "te.mul: backward: a tensor of shape {4,16} that it saved was changed in place since")
    end)
end)
