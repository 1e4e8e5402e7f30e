--- Low-rank adapters (Hu et al. 2021, "LoRA"): what te.lora puts into the field `lora` of a te.Linear.
--
-- Beside its product a layer then adds scale B A x to y, A of `rank` rows and B of as many columns. Models here make
-- products of several layers at once, queries, keys and values or an MLP's gate and what it gates; such a product has
-- parts, rows of W one below the other, and each part that is adapted has an A of its own and its rows of B:
--
--          rows of W      B
--          q   [      ]   [  ]  A.1 x            y = W x + scale (B A.1 x where a row is of q,
--          k   [      ]   [ 0]                                     0      where it is of k,
--          v   [      ]   [  ]  A.2 x                            B A.2 x where it is of v)
--
-- which is what adapters of three layers would compute. Rows of B that no part has stay zero.

local te = require "te"
local initializers = require "te.initializers"
local BasicOperation = require("te.operation").BasicOperation

local Adapter = BasicOperation:extend("LoRA")
Adapter.pure = true
Adapter.num_extra_inputs = 1
Adapter.is_adapter = true -- its parameters are none of a layer's own
Adapter.plan_fields = { "training", "dropout", "scale", "merged" }

-- y and the adapter's share of it, everywhere or in the columns of a part alone; in y's dtype, or that of te.autocast.
local add = te._core.define("add_scaled(y, u; scale: number = 1)", "y = y + scale * u", { compute = true })
local add_columns = te._core.define("add_scaled_columns(y, u, columns; scale: number = 1)",
    "y = y + where(columns, scale * u, 0)", { compute = true })

--- Of a weight {out, in}. parts: rows { first =, count = } of it that have adapters, in order.
---@param weight te.Tensor
---@param parts table[]
---@param opts table  rank, alpha, rslora, dropout, and init, which fills A
function Adapter:init(weight, parts, opts)
    local out, inputs = weight.shape[1], weight.shape[2]
    local dtype = weight.dtype == "float64" and "float64" or "float32" -- steps are too small for less
    local place = { params_dtype = dtype, device = weight.device }
    self.rank, self.alpha, self.rslora, self.dropout = opts.rank, opts.alpha, opts.rslora, opts.dropout
    self.scale = opts.alpha / (opts.rslora and math.sqrt(opts.rank) or opts.rank)
    self.merged = false -- into the weight
    self.parts, self.A = parts, {}
    for i, part in ipairs(parts) do
        self.A[i] = initializers.parameter({ opts.rank, inputs }, opts.init, place)
        if part.count < out then
            local rows = te.zeros({ out }, { device = weight.device })
            rows:narrow(1, part.first, part.count):fill_(1)
            self:register_buffer("rows" .. i, rows, { persistent = false })
        end
    end
    self.B = initializers.parameter({ out, opts.rank }, initializers.zeros, place)
end

--- y + scale B A x, y being what the layer makes of x.
function Adapter:op_forward(_, y, x)
    if self.merged then return y end
    local rows, sum, opts = x, y, { scale = self.scale }
    if self.training and self.dropout > 0 then rows = te.dropout(x, { p = self.dropout }) end
    for i, A in ipairs(self.A) do
        local inner, columns = te.linear(rows, A), self["rows" .. i]
        local share, before = te.linear(inner, self.B), sum
        sum = columns and add_columns(before, share, columns, opts) or add(before, share, opts)
        inner:release()
        share:release()
        if before ~= y then before:release() end
    end
    if rows ~= x then rows:release() end
    return sum
end

function Adapter:lower(g, y, x)
    if self.merged then return y end
    local opts = { scale = self.scale }
    if self.training and self.dropout > 0 then x = g:op("dropout", { x }, { p = self.dropout }) end
    for i = 1, #self.A do
        local inner, columns = g:op("linear", { x, g:param(self, "A." .. i) }), g:param(self, "rows" .. i)
        local share = g:op("linear", { inner, g:param(self, "B") })
        y = columns and g:op(add_columns, { y, share, columns }, opts) or g:op(add, { y, share }, opts)
    end
    return y
end

--- What the adapter adds to the layer's weight: scale B A.
---@return te.Tensor delta  {out, in}
function Adapter:delta()
    local B = self.B:detach()
    local delta = te.zeros({ B:size(1), self.A[1]:size(2) }, { dtype = B.dtype, device = B.device })
    te.no_grad(te.autocast, { enabled = false }, function()
        for i, part in ipairs(self.parts) do
            delta:narrow(1, part.first, part.count):copy_(
                te.matmul(B:narrow(1, part.first, part.count), self.A[i]:detach()))
        end
        delta:mul_(self.scale)
    end)
    return delta
end

function Adapter:describe()
    return ("rank=%d, scale=%g, dropout=%g%s"):format(self.rank, self.scale, self.dropout,
        self.merged and ", merged" or "")
end

return Adapter
