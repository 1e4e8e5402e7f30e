--- te.autocast{ when = "faster" }: a product runs under the recipe where that was measured to be faster, and a plan
--- says which. Times are made up here; what follows from them is not.

local te = require "te"
local faster = require "te.recipe.faster"
local mode = require "te.recipe.mode"

local devices, reason = te.devices()

local function values(t) return t:detach():to("cpu"):to("float64"):reshape(-1):totable() end

local function build(device)
    te.manual_seed(3)
    return te.Sequential(te.Linear(32, 64), te.GELU(), te.Linear(64, 32)):to(device)
end

local function input(device)
    te.manual_seed(4)
    return te.randn({ 16, 32 }, { device = "cpu" }):to(device)
end

-- Results and weight gradients of a step.
local function step(model, x, opts, wrap)
    local y = te.autocast(opts, function() return (wrap or function(m, v) return m(v) end)(model, x) end)
    y:backward(y:detach())
    local seen = values(y)
    for _, p in ipairs(model:parameters()) do
        for _, v in ipairs(values(p.grad)) do seen[#seen + 1] = v end
        p.grad = nil
    end
    return seen
end

describe("te.autocast{ when = \"faster\" }", function()
    it("is refused with another value", function()
        assert.error_matches(function() te.autocast({ when = "never" }, print) end, "when")
    end)

    it("holds within, until a recipe is named", function()
        local recipe = te.recipe.Float8CurrentScaling {}
        te.autocast({ recipe = recipe, when = "faster" }, function()
            te.autocast({ dtype = "bfloat16" }, function() assert.is_true(mode.faster) end)
            te.autocast({ recipe = recipe }, function() assert.is_false(mode.faster) end)
            assert.is_true(mode.faster)
        end)
        assert.is_false(mode.faster)
    end)

    it("never takes a recipe on the CPU, and says why", function()
        local model, x = build "cpu", input "cpu"
        local opts = { dtype = "bfloat16", recipe = te.recipe.DelayedScaling {}, when = "faster" }
        assert.same(step(model, x, { dtype = "bfloat16" }), step(model, x, opts))
        te.autocast(opts, function()
            assert.truthy(tostring(model:explain(x)):find("bfloat16: the cpu multiplies no low precision", 1, true))
        end)
        -- and the recipe itself is back afterwards
        opts.when = "always"
        assert.not_same(step(model, x, { dtype = "bfloat16" }), step(model, x, opts))
    end)

    describe("on a CUDA device", function()
        if not devices[2] then
            pending(reason)
            return
        end

        local seconds, path, folder, file, asked
        before_each(function()
            seconds, path, folder, asked = faster.seconds, faster.path, os.tmpname(), 0
            os.remove(folder)
            file = folder .. "/made/faster.txt"
            faster.path = function() return file end
            -- the recipe pays for the wide result alone
            faster.seconds = function(case, recipe)
                asked = asked + 1
                return (recipe == faster.plain()) == (case.width_out > 32) and 2 or 1
            end
            faster.forget()
        end)
        after_each(function()
            faster.seconds, faster.path = seconds, path
            os.execute("rm -rf " .. folder)
            faster.forget()
        end)

        it("decides for each product, measures once, and keeps that", function()
            local x, opts = input "cuda", { dtype = "bfloat16", recipe = te.recipe.Float8CurrentScaling {},
                when = "faster" }
            local function plan(model) return te.autocast(opts, function() return tostring(model:explain(x)) end) end
            local text = plan(build "cuda")
            assert.truthy(text:find("product 1 of 2: the recipe: measured 2.00 times as fast as bfloat16", 1, true))
            assert.truthy(text:find("product 2 of 2: bfloat16: measured 0.50 times as fast as bfloat16", 1, true))
            assert.truthy(text:find("linear, float8_e4m3 as it is", 1, true))
            assert.equal(4, asked)
            plan(build "cuda")
            faster.forget() -- another process finds it on disk
            assert.equal(text, plan(build "cuda"))
            assert.equal(4, asked)
            plan(te.Sequential(te.Linear(32, 48)):to "cuda") -- another shape
            assert.equal(6, asked)
        end)

        describe("and attention", function()
            local fp8 = te.recipe.Float8CurrentScaling { fp8_dpa = true }
            local described

            -- FP8 pays for what attends over 64 tokens and more.
            local function pretend()
                described = {}
                faster.seconds = function(case, recipe)
                    if not case.attention then return 1 end
                    asked = asked + 1
                    described[#described + 1] = tostring(case.attention)
                    return (recipe == faster.plain()) == (case.attention.seq >= 64) and 2 or 1
                end
            end

            local function rows(...)
                te.manual_seed(4)
                return te.randn({ ... }, { device = "cpu" }):to "cuda"
            end
            local function attention()
                te.manual_seed(3)
                return te.Sequential(te.GroupedQueryAttention(32, 4, 2)):to "cuda"
            end
            local function explained(recipe, x, ...)
                local model = attention()
                return te.autocast({ dtype = "bfloat16", recipe = recipe, when = "faster" }, function(...)
                    return tostring(model:explain(...))
                end, x, ...)
            end
            local function find(text, part) assert.truthy(text:find(part, 1, true), text) end

            it("is measured for the sequences it attends over", function()
                pretend()
                local text = explained(fp8, rows(2, 16, 32))
                find(text, "GroupedQueryAttention.attention, product 2 of 3: bfloat16: measured 0.50 times as fast as "
                    .. "bfloat16")
                assert.falsy(text:find("self_attention of float8_e4m3", 1, true))
                text = explained(fp8, rows(1, 64, 32))
                find(text, "GroupedQueryAttention.attention, product 2 of 3: the recipe: measured 2.00 times as fast "
                    .. "as bfloat16")
                find(text, "self_attention of float8_e4m3")
                assert.equal(4, asked)
                faster.forget() -- another process finds it on disk
                assert.equal(text, explained(fp8, rows(1, 64, 32)))
                assert.equal(4, asked)
                assert.equal("2 x 16 tokens in 4 heads of 8 on 2 causal=true window_left=-1", described[1])
            end)

            it("takes packed sequences as equally long", function()
                pretend()
                local lens = te.tensor({ 7, 3, 54 }, { dtype = "int32", device = "cuda" })
                find(explained(fp8, rows(64, 32), lens), "product 2 of 3: bfloat16: measured 0.50")
                assert.truthy(described[1]:find("3 x 22 tokens", 1, true))
                find(explained(fp8, rows(64, 32)), "product 2 of 3: the recipe: measured 2.00")
            end)

            it("is not where the recipe leaves it in high precision", function()
                pretend()
                local text = explained(te.recipe.Float8CurrentScaling {}, rows(2, 16, 32))
                assert.equal(0, asked)
                assert.falsy(text:find("attention, product", 1, true))
            end)

            it("chooses between the bits of the two", function()
                pretend()
                local function result(opts, seq)
                    local module, q = te.DotProductAttention { causal = true }, rows(1, 2, seq, 16)
                    opts.dtype = "bfloat16"
                    return values(te.autocast(opts, module, q, q * 0.5, q + 1))
                end
                local faster_, always, never = { recipe = fp8, when = "faster" }, { recipe = fp8 }, {}
                assert.same(result(never, 16), result(faster_, 16))
                assert.not_same(result(always, 16), result(faster_, 16))
                assert.same(result(always, 64), result(faster_, 64))
                assert.not_same(result(never, 64), result(faster_, 64))
                assert.equal("1 x 16 tokens in 2 heads of 16 causal=true window_left=-1", described[1])
            end)

            it("makes steps of the same sizes to be measured", function()
                local module, lens = te.MultiHeadedSelfAttention(32, 2),
                    te.tensor({ 5, 11 }, { dtype = "int32", device = "cuda" })
                local attentions = require "te.recipe.faster_attention"
                local q, k = rows(1, 2, 16, 16), rows(1, 1, 24, 16)
                for _, attention in ipairs { attentions.describe(module, rows(16, 32), lens),
                    attentions.describe(module, rows(2, 8, 32)),
                    attentions.describe(te.DotProductAttention(), q, k, k) } do
                    local case = { device = "cuda", dtype = "bfloat16", attention = attention }
                    assert.is_true(seconds(case, fp8) > 0)
                    assert.is_true(seconds(case, faster.plain()) > 0)
                end
                assert.is_nil(attentions.describe(te.DotProductAttention(), q))
            end)
        end)

        it("leaves no trace of measuring in a step, and none in a checkpointed stretch", function()
            local function run(measures)
                faster.seconds = function(case, recipe)
                    if measures then assert.is_true(seconds(case, recipe) > 0) end
                    return recipe == faster.plain() and 2 or 1
                end
                faster.forget()
                os.remove(file)
                local opts = { dtype = "bfloat16", recipe = te.recipe.DelayedScaling {}, when = "faster" }
                local model, seen = build "cuda", {}
                te.manual_seed(6)
                for i = 1, 3 do
                    local function stretch(m, v) return te.checkpoint(m, te.dropout(v, { p = 0.25 })) end
                    for _, v in ipairs(step(model, input "cuda" * i, opts, stretch)) do seen[#seen + 1] = v end
                end
                local state = model:state_dict()
                for _, name in ipairs { "1.input_scale", "3.weight_scale", "3.grad_output_amax_history" } do
                    for _, v in ipairs(values(state[name])) do seen[#seen + 1] = v end
                end
                seen[#seen + 1] = te.rand({ 1 }, { device = "cpu" }):item()
                return seen
            end
            assert.same(run(false), run(true))
        end)
    end)
end)
