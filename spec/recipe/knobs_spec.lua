--- Every option of every recipe acts: changed alone, it changes results or gradients of four training steps. Options
--- without such a case are named, with the reason.
local te = require "te"

local RECIPES = { "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling",
    "NVFP4BlockScaling" }

-- Options that change nothing here: what other specs show to act, or what has one value that is supported.
local ELSEWHERE = {
    fp8_dpa = "attention", fp8_mha = "attention",
    fast_accumulation = "the products of tensor cores: spec/cuda_spec.lua",
    reduce_amax = "amaxes are those of one process, to which both values are the same",
    fp4_format = "the only format of four bits",
}
-- Of one recipe alone.
local SINGLE = { NVFP4BlockScaling = { fp8_format = "the only format of block factors" } }

-- Per option: options that it is tried with, and those changed.
local CASES = {
    margin = { {}, { margin = 2 } },
    fp8_format = { { fp8_format = "E4M3" }, { fp8_format = "HYBRID" } },
    amax_history_len = { { amax_history_len = 1024 }, { amax_history_len = 2 } },
    amax_compute_algo = { {}, { amax_compute_algo = "most_recent" } },
    scaling_factor_compute_algo = { {}, { scaling_factor_compute_algo = function() return te.tensor { 3 } end } },
    use_power_2_scales = { {}, { use_power_2_scales = true } },
    amax_epsilon = { {}, { amax_epsilon = 64 } },
    backward_override = { {}, { backward_override = "high_precision" } },
    use_f32_scales = { {}, { use_f32_scales = true } },
    x_block_scaling_dim = { {}, { x_block_scaling_dim = 2, w_block_scaling_dim = 1 }, { w_block_scaling_dim = 1 } },
    w_block_scaling_dim = { {}, { w_block_scaling_dim = 1 } },
    grad_block_scaling_dim = { { w_block_scaling_dim = 1 }, { grad_block_scaling_dim = 2, w_block_scaling_dim = 1 } },
    enable_2d_quantization = { {}, { enable_2d_quantization = true } },
    disable_rht = { {}, { disable_rht = true } },
    disable_stochastic_rounding = { {}, { disable_stochastic_rounding = true } },
    disable_2d_quantization = { {}, { disable_2d_quantization = true } },
    row_scaled_activation = { {}, { row_scaled_activation = true } },
    nvfp4_4over6 = { {}, { nvfp4_4over6 = "weights" } },
    nvfp4_4over6_e4m3_use_256 = {
        { nvfp4_4over6 = "weights" }, { nvfp4_4over6 = "weights", nvfp4_4over6_e4m3_use_256 = "none" },
    },
    nvfp4_4over6_err_mode = {
        { nvfp4_4over6 = "weights" }, { nvfp4_4over6 = "weights", nvfp4_4over6_err_mode = "MSE" },
    },
}

-- Options that have no value unless given.
local WITHOUT_DEFAULT = { "backward_override", "scaling_factor_compute_algo" }

local function option_names(recipe)
    local names = {}
    for name in pairs(te.recipe[recipe] {}:options()) do names[#names + 1] = name end
    for _, name in ipairs(WITHOUT_DEFAULT) do
        if pcall(te.recipe[recipe], CASES[name][2]) then names[#names + 1] = name end
    end
    table.sort(names)
    return names
end

local function bytes_of(t) return te._core.tensor_bytes(t:detach():to("cpu"):contiguous()) end

-- Factors of columns: blocks with amaxes of all sizes.
local function spread(n, size)
    local factors = {}
    for i = 1, n do factors[i] = size * 10 ^ -(i % 7) end
    return te.tensor(factors)
end

-- What four steps of a Linear leave, amaxes of which first fall and then rise: results, gradients and state.
local function trace(recipe)
    te.manual_seed(4)
    local module, parts = te.Linear(160, 144, { bias = false }), {}
    module.weight:copy_((te.randn { 160, 144 } * spread(144, 1)):transpose(1, 2)) -- rows of all sizes
    for _, size in ipairs { 4, 1, 0.25, 2 } do
        local x, dy = te.randn({ 144, 160 }) * spread(160, size), te.randn({ 144, 144 }) * spread(144, size)
        x.requires_grad = true
        module.weight.grad = nil
        te.manual_seed(6)
        local y = te.autocast({ recipe = recipe, dtype = "float32" }, module, x)
        y:backward(dy)
        for _, t in ipairs { y, x.grad, module.weight.grad } do parts[#parts + 1] = bytes_of(t) end
    end
    return table.concat(parts)
end

describe("options of recipes", function()
    for _, recipe in ipairs(RECIPES) do
        local single = SINGLE[recipe] or {}
        for _, name in ipairs(option_names(recipe)) do
            if not ELSEWHERE[name] and not single[name] then
                it(("act: %s.%s"):format(recipe, name), function()
                    local case = assert(CASES[name], "no case for " .. name)
                    local make = te.recipe[recipe]
                    local changed = trace(make(case[2]))
                    assert.is_true(changed ~= trace(make(case[3] or case[1])))
                end)
            end
        end
    end

    it("give the same results where nothing is changed", function()
        for _, recipe in ipairs(RECIPES) do
            assert.is_true(trace(te.recipe[recipe] {}) == trace(te.recipe[recipe] {}))
        end
    end)
end)
