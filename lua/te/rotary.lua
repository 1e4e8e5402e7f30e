--- te.rope_frequencies: how fast rotary position embeddings (te.rope, Su et al. 2021) turn each pair of features.
--
--     local f = te.rope_frequencies(64)                        -- {32}: 10000 ^ (-2 k / 64)
--     local f = te.rope_frequencies(128, { base = 500000, scaling = { type = "llama3", factor = 8 } })
--     local m = te.GroupedQueryAttention(512, 8, 2, { rope = { base = 500000 } })
--
-- They are a plain tensor, so other ways of stretching a context need no more than another tensor.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local declared = require "te.ops.declared"

local rotary = {}

local TYPE = { "string", "linear", choices = { "linear", "llama3", "yarn" }, help = "selects which pairs slow down" }
local FACTOR = { "number", 1, wrong = function(v) if v <= 0 then return "factor: expected a number above 0" end end,
    help = "factor by which the context grows" }
local ORIGINAL = { "size", 8192, help = "llama3, yarn: the context that the model was trained with" }

-- What each type of scaling takes.
local SCALING = {
    linear = { type = TYPE, factor = FACTOR },
    llama3 = {
        type = TYPE, factor = FACTOR,
        low_freq_factor = { "number", 1, help = "llama3: pairs that turn less often are slowed down" },
        high_freq_factor = { "number", 4, help = "llama3: pairs that turn more often are left alone" },
        original_max_position_embeddings = ORIGINAL,
    },
    yarn = {
        type = TYPE, factor = FACTOR,
        beta_fast = { "number", 32, help = "yarn: pairs that turn more often are left alone" },
        beta_slow = { "number", 1, help = "yarn: pairs that turn less often are slowed down" },
        truncate = { "boolean", true, help = "yarn: round the range between the betas to whole pairs" },
        original_max_position_embeddings = ORIGINAL,
    },
}

local FREQUENCIES = {
    base = { "number", 10000, wrong = function(v) if v <= 0 then return "base: expected a number above 0" end end,
        help = "pair k of n turns by base ^ (-k / n) per position" },
    scaling = { "table", help = "stretches the context", fields = declared.join(SCALING.llama3, SCALING.yarn) },
    device = { "string", help = "device of the result" },
}

local function check_scaling(who, given)
    who = who .. ": scaling"
    local kind = given.type == nil and TYPE[2] or given.type
    options.argument(who, "type", kind, TYPE)
    local scaling = options.check(who, given, SCALING[kind])
    if kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor then
        fail("%s: high_freq_factor %g must be above low_freq_factor %g", who, scaling.high_freq_factor,
            scaling.low_freq_factor)
    elseif kind == "yarn" and (scaling.beta_slow <= 0 or scaling.beta_fast <= scaling.beta_slow) then
        fail("%s: beta_fast %g must be above beta_slow %g, and both above 0", who, scaling.beta_fast, scaling.beta_slow)
    end
    scaling.type = kind
    return scaling
end

-- Scaled frequencies by type. linear: positions are divided (Chen et al. 2023). llama3: only pairs that turn less than
-- low_freq_factor times in the original context are slowed down, those that turn more than high_freq_factor times are
-- left alone, and in between goes a straight line (Llama 3.1's release). yarn: pairs that turn less than beta_slow
-- times are slowed down, those that turn more than beta_fast times are not, and in between the line is one over the
-- pairs (Peng et al. 2023; scores want another factor, te.models.llama has it).
local scale = {}

function scale.linear(f, o) return f / o.factor end

function scale.yarn(f, o, pair, size, base)
    -- the pair, as a fraction, that turns so many times in the original context
    local function pair_of(turns)
        return size * math.log(o.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))
    end
    local first, last = pair_of(o.beta_fast), pair_of(o.beta_slow)
    if o.truncate then first, last = math.floor(first), math.ceil(last) end
    first, last = math.max(first, 0), math.min(last, size - 1)
    local slowed = math.min(math.max((pair - first) / math.max(last - first, 0.001), 0), 1)
    return slowed * f / o.factor + (1 - slowed) * f
end

function scale.llama3(f, o)
    local turns = o.original_max_position_embeddings * f / (2 * math.pi)
    local kept = (turns - o.low_freq_factor) / (o.high_freq_factor - o.low_freq_factor)
    kept = math.min(math.max(kept, 0), 1)
    return (1 - kept) * f / o.factor + kept * f
end

--- base ^ (-2 k / size) for k from 0, as a float32 tensor {size / 2}. `scaling` stretches the context that a model was
--- trained with: { type = "linear", "llama3" or "yarn", factor = … }, with further fields for llama3 and yarn.
---@param size integer     features that turn, even, at most 2^20
---@param opts table|nil   base (10000), scaling, device
---@return te.Tensor frequencies
function rotary.frequencies(size, opts)
    local who = "te.rope_frequencies"
    options.argument(who, "size", size, { "size", max = 2 ^ 20 })
    if size % 2 ~= 0 then fail("%s: size: expected an even number, got %d", who, size) end
    opts = options.check(who, opts, FREQUENCIES)
    local scaling = opts.scaling and check_scaling(who, opts.scaling)
    if scaling and scaling.type == "yarn" and opts.base <= 1 then
        fail("%s: base: expected a number above 1 for yarn, got %g", who, opts.base)
    end
    local values = {}
    for k = 0, size / 2 - 1 do
        local f = opts.base ^ (-2 * k / size)
        values[k + 1] = scaling and scale[scaling.type](f, scaling, k, size, opts.base) or f
    end
    return te.tensor(values, { dtype = "float32", device = opts.device })
end
options.declare(rotary.frequencies, FREQUENCIES)

local MODULE = {
    base = FREQUENCIES.base, scaling = FREQUENCIES.scaling,
    size = { "size", help = "rotate only this many features of a head, the first ones; default: all" },
    interleaved = { "boolean", false, help = "pair neighbouring features, not one of each half" },
    frequencies = { "any", help = "a tensor {pairs}, instead of base, scaling and size" },
}

--- The declaration of that option.
rotary.OPTION = { "any", help = "true, or a table: rotate queries and keys by their positions", fields = MODULE }

--- The option `rope` of attention modules, true or a table: frequencies, and whether pairs are neighbours.
---@param who string
---@param given any
---@param head_size integer
---@param device string|nil
function rotary.of_option(who, given, head_size, device)
    if given ~= true and (type(given) ~= "table" or getmetatable(given)) then
        fail("%s: option rope: expected true or a table, got %s", who, options.shown(given))
    end
    local opts = options.check(who .. ": rope", given ~= true and given or nil, MODULE)
    local own = opts.frequencies
    if own == nil then
        local size = opts.size or head_size
        if size > head_size or size % 2 ~= 0 then
            fail("%s: rope: size: expected an even number up to the head's %d features, got %d", who, head_size, size)
        end
        own = rotary.frequencies(size, { base = opts.base, scaling = opts.scaling, device = device })
    elseif not te.is_tensor(own) or own:dim() ~= 1 or 2 * own:numel() > head_size then
        fail("%s: rope: frequencies: expected a tensor {pairs} of at most %d, got %s", who, math.floor(head_size / 2),
            te.is_tensor(own) and options.shape(own) or options.shown(own))
    else
        for _, name in ipairs { "base", "scaling", "size" } do
            if given[name] ~= nil then fail("%s: rope: %s has no effect beside frequencies", who, name) end
        end
    end
    return own, opts.interleaved
end

return rotary
