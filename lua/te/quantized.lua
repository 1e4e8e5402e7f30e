--- Quantized tensors.
--
--     local q = te.quantize(x, recipe, "input")
--     q.rowwise_data, q.rowwise_scale_inv, q.columnwise_data, q.columnwise_scale_inv, q.amax
--     q:dequantize()                                   in the shape and dtype of x
--     te.save(path, q:state_dict())                    its parts are plain tensors
--     te.QuantizedTensor.from_parts(q.quantizer, te.load(path), { shape = q.shape, dtype = q.dtype })
--
-- Both directions are quantized from x itself, together. float4 data are uint8, two elements each, the even one in the
-- low half. Where a transform runs along the column-wise copy, that copy has whole groups of 16: dequantizing drops the
-- rest.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local recipes = require "te.recipe"
local core = te._core

local PARTS = {
    "rowwise_data", "rowwise_scale_inv", "amax", "columnwise_data", "columnwise_scale_inv", "columnwise_amax",
}

local DIRECTIONS = { "rowwise", "columnwise" }

local IS_PART = {}
for _, name in ipairs(PARTS) do IS_PART[name] = true end

local QuantizedTensor = {}
QuantizedTensor.__index = QuantizedTensor

-- Whether the amax is part of the values: a factor above those of the blocks.
local function has_two_levels(quantizer) return quantizer.scale == "float8_e4m3" end

local function new(quantizer, shape, dtype, parts)
    local self = { quantizer = quantizer, shape = shape, dtype = dtype }
    for i, name in ipairs(PARTS) do self[name] = parts[i] end
    if not has_two_levels(quantizer) then -- both directions have seen the same amax, if any
        self.amax, self.columnwise_amax = self.amax or self.columnwise_amax, nil
    end
    return setmetatable(self, QuantizedTensor)
end

--- The tensor that the quantized values stand for.
---@param direction string|nil  "rowwise" or "columnwise"; nil: row-wise where it is there
function QuantizedTensor:dequantize(direction)
    options.method("QuantizedTensor:dequantize", self, QuantizedTensor)
    direction = direction or (self.rowwise_data and "rowwise" or "columnwise")
    options.argument("te.QuantizedTensor.dequantize", "direction", direction, { "string", choices = DIRECTIONS })
    if not self[direction .. "_data"] then fail("te.QuantizedTensor.dequantize: there is no %s data", direction) end
    local amax = self.amax
    if direction == "columnwise" and has_two_levels(self.quantizer) then amax = self.columnwise_amax end
    return core.dequantize(self.quantizer, self.dtype, self.shape, direction, self[direction .. "_data"],
        self[direction .. "_scale_inv"], amax)
end

--- Its parts by name.
function QuantizedTensor:state_dict()
    options.method("QuantizedTensor:state_dict", self, QuantizedTensor)
    local parts = {}
    for _, name in ipairs(PARTS) do parts[name] = self[name] end
    return parts
end

-- The column-wise copy from the row-wise one; raises where it does not follow from that.
local function complete(self)
    self.columnwise_data = self.rowwise_data and core.complete_quantized(self.quantizer, self.dtype, self.shape,
        "rowwise", self.rowwise_data, self.rowwise_scale_inv, self.amax)
    if not self.columnwise_data then
        fail "te.QuantizedTensor.update_usage: columnwise: it was not made; quantize again"
    end
    self.columnwise_scale_inv = self.rowwise_scale_inv
end

--- Keeps one direction or both: update_usage{ rowwise = false } lets go of the row-wise copy. A column-wise copy that
--- is not there is made from the row-wise one where one factor serves all values, as in FP8 scaled per tensor.
function QuantizedTensor:update_usage(wanted)
    options.method("QuantizedTensor:update_usage", self, QuantizedTensor)
    wanted = options.check("te.QuantizedTensor.update_usage", wanted, {
        rowwise = { "boolean", self.rowwise_data ~= nil },
        columnwise = { "boolean", self.columnwise_data ~= nil },
    })
    if wanted.rowwise and not self.rowwise_data then
        fail "te.QuantizedTensor.update_usage: rowwise: it was not made; quantize again"
    end
    if not (wanted.rowwise or wanted.columnwise) then fail "te.QuantizedTensor.update_usage: nothing would be left" end
    if wanted.columnwise and not self.columnwise_data then complete(self) end
    if not wanted.rowwise then
        self.rowwise_data, self.rowwise_scale_inv = nil, nil
        if has_two_levels(self.quantizer) then self.amax = nil end
    end
    if not wanted.columnwise then
        self.columnwise_data, self.columnwise_scale_inv, self.columnwise_amax = nil, nil, nil
    end
end

function QuantizedTensor:__tostring()
    local q, directions = self.quantizer, {}
    if self.rowwise_data then directions[1] = "rowwise" end
    if self.columnwise_data then directions[#directions + 1] = "columnwise" end
    local rows = q.block_rows or 0
    local blocks = rows == 0 and "one factor"
        or ("%s factors of %d x %d"):format(q.scale or "float32", rows, q.block_cols)
    return ("quantized tensor {%s} of %s: %s, %s, %s"):format(table.concat(self.shape, ", "), self.dtype,
        q.element or "float8_e4m3", blocks, table.concat(directions, " and "))
end

--- A quantized tensor from the parts of another, as te.load gives them.
function QuantizedTensor.from_parts(quantizer, parts, opts)
    if not recipes.is_quantizer(quantizer) then fail "te.QuantizedTensor.from_parts: expected a quantizer" end
    local declared = { shape = { "table" }, dtype = { "string", "float32" } }
    opts = options.check("te.QuantizedTensor.from_parts", opts, declared)
    if not opts.shape then fail "te.QuantizedTensor.from_parts: option shape is missing" end
    options.argument("te.QuantizedTensor.from_parts", "parts", parts, { "table" })
    for name in pairs(parts) do
        if not IS_PART[name] then fail("te.QuantizedTensor.from_parts: there is no part %s", tostring(name)) end
    end
    for _, direction in ipairs(DIRECTIONS) do
        if parts[direction .. "_scale_inv"] and not parts[direction .. "_data"] then
            fail("te.QuantizedTensor.from_parts: %s_scale_inv: there is no %s_data", direction, direction)
        end
    end
    if not (parts.rowwise_data or parts.columnwise_data) then
        fail "te.QuantizedTensor.from_parts: there is neither rowwise_data nor columnwise_data"
    end
    local list = {}
    for i, name in ipairs(PARTS) do list[i] = parts[name] end
    local self = new(quantizer, opts.shape, opts.dtype, list)
    if self.rowwise_data then self:dequantize("rowwise") end -- which says where parts do not fit
    if self.columnwise_data then self:dequantize("columnwise") end
    return self
end

local ROLE = { "string", choices = { "input", "weight", "grad_output" } }

--- t in low precision.
---@param how table         a recipe or a quantizer
---@param role string|nil   "input" (default), "weight" or "grad_output": which of the recipe's quantizers
---@param opts table|nil    rowwise, columnwise: whether to make that copy (both, where the quantizer has both); scale,
---                         what delayed scaling multiplies by (1), refused where factors follow from the values; seed
---                         of stochastic rounding, where there is any (the library's generator otherwise)
---@return te.QuantizedTensor
local function quantize(t, how, role, opts, ...)
    options.last("te.quantize", 4, ...)
    if not te.is_tensor(t) then fail("te.quantize: t: expected a tensor, got %s", core.describe(t)) end
    if recipes.is_recipe(how) then
        local recipe, kind = how, type(role) == "table" and role.tensor_type or role
        if kind ~= nil then options.argument("te.quantize", "role", kind, ROLE) end
        how = recipe:quantizer(role)
        if not how then
            local kind = type(role) == "table" and role.tensor_type or role or "input"
            fail("te.quantize: %s leaves this %s in high precision", tostring(recipe), kind)
        end
    end
    if not recipes.is_quantizer(how) then
        fail("te.quantize: how: expected a recipe or a quantizer, got %s", options.shown(how))
    end
    return new(how, t.shape, t.dtype, { core.quantize(t, how, opts) })
end

return { quantize = quantize, QuantizedTensor = QuantizedTensor }
