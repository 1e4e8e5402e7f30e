--- Which layers of a model adapters go to (te.lora), by name.
--
-- A layer has its path in the model, "blocks.1.attention.2.qkv". One of te.models knows in addition what Transformers
-- calls it, or calls its parts: "model.layers.0.self_attn.q_proj", of k_proj and of v_proj (model:product_names).

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"

local targets = {}

local MOST_WORDS = 16 -- that a message lists

local function runs_as(module, class)
    return te.is(module, class) and module.forward == class.forward and module.op_forward == class.op_forward
end

-- Why a layer takes no adapters; nil where it does. own: layers with whose weight another module multiplies.
local function refusal(module, own)
    if te.is(module, te.GroupedLinear) then return "te.GroupedLinear, of experts, takes no adapters" end
    if module.split then return "te.lora does not split adapters between processes (tensor_parallel_mode)" end
    if own[module] then return ("%s reads its weight by itself"):format(own[module]) end
    if not (runs_as(module, te.Linear) or runs_as(module, te.BasicLinear)) then
        return ("its class %s has a forward of its own"):format(module.__name)
    end
end

local function is_linear(module)
    return te.is(module, te.Linear) or te.is(module, te.BasicLinear) or te.is(module, te.GroupedLinear)
end

-- The parts of a layer by their names: one, or those that a model says.
local function parts_of(path, module, known)
    local rows, first, parts = not te.is(module, te.GroupedLinear) and module.weight.shape[1] or 0, 1, {}
    for i, name in ipairs(known and known.names or { path }) do
        local count = known and known.counts and known.counts[i] or rows
        parts[i] = { name = name, first = first, count = count }
        first = first + count
    end
    return parts
end

--- The linear layers of a model in order: { path =, module =, parts = { { name =, first =, count = } … } of its rows,
--- refused = why it takes no adapters, or nil }. A layer that stands at several places comes once.
---@param model te.Module
---@return table[]
function targets.layers(model)
    local own, names, list = {}, {}, {}
    for _, known in ipairs(model.product_names and model:product_names() or {}) do names[known.path] = known end
    for path, module in model:named_modules() do
        for _, field in ipairs(module.own_products or {}) do
            if module[field] then own[module[field]] = module.__name end
        end
        if is_linear(module) then
            if path == "" then path = module.__name end -- the model is a layer
            list[#list + 1] = { path = path, module = module, parts = parts_of(path, module, names[path]),
                refused = refusal(module, own) }
        end
    end
    return list
end

local function is_pattern(target) return target:find "[%^%$%*%+%?%[%]%%]" ~= nil end

local function matches(target, name, whole)
    if whole then return name == target end
    if is_pattern(target) then return name:find(target) ~= nil end
    return name == target or name:sub(-#target - 1) == "." .. target
end

-- Every ending of the names, which a target may say.
local function endings(list)
    local names = {}
    for _, layer in ipairs(list) do
        for _, part in ipairs(layer.parts) do
            for _, name in ipairs { part.name, layer.path } do
                names[name:match "[^.]*$"], names[name:match "[^.]*%.[^.]*$" or name] = true, true
            end
        end
    end
    return options.names(names)
end

-- What to say of a target that names nothing: what is nearest, or which names there are.
local function instead(list, target)
    local near, words = options.nearest(target, endings(list)), {}
    if near then return ("; did you mean %q?"):format(near) end
    for _, layer in ipairs(list) do
        for _, part in ipairs(not layer.refused and layer.parts or {}) do words[part.name:match "[^.]*$"] = true end
    end
    words = options.names(words)
    return words[1] and not words[MOST_WORDS + 1] and "; there are " .. table.concat(words, ", ") or ""
end

-- Marks the parts that a target names. Raises where it names none, or one that takes no adapters.
local function mark(who, list, chosen, i, target, whole)
    options.argument(who, ("option targets[%d]"):format(i), target, { "string" })
    local good, found = pcall(string.find, "", target)
    if target == "" or not whole and is_pattern(target) and not good then
        fail("%s: option targets[%d]: %s", who, i, target == "" and "is empty" or "no pattern: " .. tostring(found))
    end
    local any = false
    for _, layer in ipairs(list) do
        local all = matches(target, layer.path, whole)
        for _, part in ipairs(layer.parts) do
            if all or matches(target, part.name, whole) then
                if layer.refused then fail("%s: option targets[%d]: %s: %s", who, i, layer.path, layer.refused) end
                chosen[part], any = true, true
            end
        end
    end
    if not any then
        fail("%s: option targets[%d]: no linear layer is named %q%s", who, i, target, instead(list, target))
    end
end

-- All that take adapters, of the blocks where a model has those. Layers that are split would be left out unnoticed.
local function mark_all(who, list, chosen, model)
    local within = te.is(model, require "te.language_model") and "^blocks%." or ""
    for _, layer in ipairs(list) do
        if layer.module.split then fail("%s: %s: %s", who, layer.path, layer.refused) end
        for _, part in ipairs(layer.path:find(within) and not layer.refused and layer.parts or {}) do
            chosen[part] = true
        end
    end
end

--- The layers among targets.layers(model) that have parts which are wanted, with those alone.
---@param who string
---@param model te.Module
---@param wanted string[]|nil  names, ends of names or patterns; nil: all
---@param whole boolean|nil    whether they are names in full, and no others
---@return table[] layers
function targets.find(who, model, wanted, whole)
    local list, chosen, found = targets.layers(model), {}, {}
    if not list[1] then fail("%s: model: %s has no linear layers", who, model.__name) end
    for i = 1, wanted and options.list(who, "option targets", wanted) or 0 do
        mark(who, list, chosen, i, wanted[i], whole)
    end
    if not wanted then mark_all(who, list, chosen, model) end
    for _, layer in ipairs(list) do
        local parts = {}
        for _, part in ipairs(layer.parts) do
            if chosen[part] then parts[#parts + 1] = part end
        end
        if parts[1] then found[#found + 1] = { path = layer.path, module = layer.module, parts = parts } end
    end
    if not found[1] then fail("%s: model: no linear layer of %s takes adapters", who, model.__name) end
    return found
end

return targets
