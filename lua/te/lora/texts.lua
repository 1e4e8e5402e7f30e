--- The adapters of a model as texts by "model.lora.<option>", for a checkpoint's metadata, and back.

local options = require "te.options"

local texts = {}

local PREFIX = "model.lora."
local BOOLEAN = { ["true"] = true, ["false"] = false }

--- Adds what a model's adapters were made with, where it has some.
---@param model te.Module
---@param to table<string, string>
function texts.add(model, to)
    local config = require("te.lora").config(model)
    for name, value in pairs(config or {}) do
        to[PREFIX .. name] = name == "targets" and table.concat(value, ",") or options.exact(value)
    end
end

--- Gives a model the adapters that such texts tell of, if any; their values are to be loaded. The texts may be
--- anybody's: te.lora.add says what is wrong with them.
---@param model te.Module
---@param from table<string, string>
function texts.restore(model, from)
    local function of(name) return from[PREFIX .. name] end
    -- A text that means nothing, or is missing, stays one, for the check of options.
    local function number(name) return tonumber(of(name)) or of(name) or "" end
    if not of "rank" then return end
    local targets, rslora = {}, BOOLEAN[of "rslora" or ""]
    if rslora == nil then rslora = of "rslora" or "" end
    for name in (of "targets" or ""):gmatch "[^,]+" do targets[#targets + 1] = name end
    local who, attach = "te.lora.add", require "te.lora.attach"
    attach.add(who, model, attach.check(who, { rank = number "rank", alpha = number "alpha",
        dropout = number "dropout", rslora = rslora, targets = targets }), true)
    if of "merged" ~= "true" then return end
    for _, module in model:named_modules() do
        if module.is_adapter == true then module.merged = true end
    end
end

return texts
