--- What tokenizers decode: ids in a list, or in a tensor of whole numbers.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"

local INTEGERS = { int64 = true, int32 = true, uint8 = true }

--- decode(list) of a list or a tensor {n}; of a tensor {batch, n} a list of what it gives for each row.
---@param ids integer[]|te.Tensor
---@param decode function
return function(ids, decode)
    if not options.tensor("te.tokenizer", "ids", ids) then
        options.argument("te.tokenizer", "ids", ids, { "table" })
        return decode(ids)
    end
    local dims, texts = ids:dim(), {}
    if not INTEGERS[ids.dtype] or dims < 1 or dims > 2 then
        fail("te.tokenizer: ids: expected whole numbers {n} or {batch, n}, got %s %s", ids.dtype, options.shape(ids))
    end
    local rows = ids:totable()
    if dims == 1 then return decode(rows) end
    for i, row in ipairs(rows) do texts[i] = decode(row) end
    return texts
end
