--- Parameters that are stored quantized, moved to the CUDA device and trained there. Pending without a device.

local te = require "te"
local core = te._core
local cards = require "spec.support.device"

local devices, reason = te.devices()

local RECIPES = {
    delayed = te.recipe.DelayedScaling {}, current = te.recipe.Float8CurrentScaling {},
    block = te.recipe.Float8BlockScaling {},
    mxfp8 = te.recipe.MXFP8BlockScaling {}, nvfp4 = te.recipe.NVFP4BlockScaling {},
}

local function build(recipe)
    te.manual_seed(3)
    return te.quantized_model_init({ recipe = recipe, preserve_high_precision_init_val = true }, function()
        return te.Sequential(te.Linear(32, 64), te.GELU(), te.Linear(64, 32))
    end)
end

local function bytes(model)
    local found = {}
    for name, tensor in pairs(model:state_dict()) do
        found[#found + 1] = name .. core.tensor_bytes(tensor:to("cpu"):clone())
    end
    table.sort(found)
    return table.concat(found)
end

-- Losses of three steps.
local function train(model, recipe, device)
    local optimizer, losses = te.optim.AdamW(model, { lr = 0.01 }), {}
    for i = 1, 3 do
        te.manual_seed(i)
        local x = te.randn({ 16, 32 }):to(device)
        model:zero_grad()
        local loss = te.autocast({ recipe = recipe }, function()
            local y = model(x)
            return (y * y):mean()
        end)
        loss:backward()
        optimizer:step()
        losses[i] = loss:item()
    end
    return losses
end

describe("parameters that are stored quantized", function()
    if not devices[2] then
        pending("no CUDA device: " .. tostring(reason))
        return
    end

    for name, recipe in pairs(RECIPES) do
        it("keep their bytes on the way to the device and back: " .. name, function()
            local model = build(recipe)
            local before, first = bytes(model), model[1].weight:get_high_precision_init_val()
            model:to("cuda")
            assert.is_true(core.is_quantized(model[1].weight))
            assert.equal("cuda", model[1].weight.device)
            assert.is_true(rawequal(first, model[1].weight:get_high_precision_init_val()))
            assert.equal(before, bytes(model))
            model:to("cpu")
            assert.equal(before, bytes(model))
        end)

        it("are trained there as on the CPU: " .. name, function()
            local here, there = build(recipe):to("cpu"), build(recipe):to("cuda")
            local expected, decoded = train(here, recipe, "cpu"), name == "mxfp8" or name == "nvfp4"
            -- AdamW makes a whole step of a gradient near 0, whichever sign it has
            local most = cards.has_short_sums() and not decoded and 3e-2 or 1e-5
            for i, loss in ipairs(train(there, recipe, "cuda")) do
                local off = math.abs(loss - expected[i])
                assert.is_true(off <= most * expected[i], ("step %d: %g, %g"):format(i, loss, expected[i]))
            end
        end)
    end
end)
