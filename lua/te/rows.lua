--- te.rows: tensors that stand for te.cat(parts, 1), as load_state_dict takes them for one. They are joined as late as
--- possible, so that the weights of a model that a file has in pieces are not in memory twice.

local te = require "te"

local Rows = {}
Rows.__index = Rows

--- Writes what the parts are together to a tensor of their shape.
---@param tensor te.Tensor
function Rows:copy_to(tensor)
    if te._core.is_quantized(tensor) then
        tensor:copy_(te.cat(self.parts, 1))
        return
    end
    local first = 1
    for _, part in ipairs(self.parts) do
        tensor:narrow(1, first, part:size(1)):copy_(part)
        first = first + part:size(1)
    end
end

local rows = {}

--- Whether a value is what rows.of made of several parts.
function rows.are(value) return getmetatable(value) == Rows end

--- One part is itself. Raises what te.cat does of parts that do not fit together.
---@param parts te.Tensor[]
function rows.of(parts)
    if #parts == 1 then return parts[1] end
    local shape = parts[1].shape
    for i = 2, #parts do
        local other = parts[i].shape
        local fits = #other == #shape and #shape > 0
        for d = 2, #shape do fits = fits and other[d] == shape[d] end
        if not fits then return te.no_grad(te.cat, parts, 1) end
        shape[1] = shape[1] + other[1]
    end
    return setmetatable({ parts = parts, shape = shape }, Rows)
end

return rows
