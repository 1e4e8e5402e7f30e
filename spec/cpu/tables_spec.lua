--- Large runs on bfloat16, in which functions of one input are looked up: the bits of the same numbers in pieces that
--- are too small for that, forward and backward, alone and with neighbours in a group.

local bits = require "spec.support.bits"
local te = require "te"

local ROWS, COLUMNS, PIECE = 384, 768, 96 -- 294912 elements, a piece 73728

local FUNCTIONS = {
    gelu = te.gelu,
    gelu_erf = function(x) return te.gelu(x, { approximate = "none" }) end,
    quick_gelu = te.quick_gelu,
    silu = te.silu,
    sigmoid = te.sigmoid,
    tanh = te.tanh,
    erf = te.erf,
    softplus = te.softplus,
    log_sigmoid = te.log_sigmoid,
    sin = te.sin,
    log1p = function(x) return te.log1p(te.abs(x)) end,
    expm1 = te.expm1,
    geglu = te.geglu,
    swiglu = te.swiglu,
    clamped_swiglu = te.clamped_swiglu,
    situglu = te.situglu,
    pointwise = te.pointwise(function(x, y) return te.tanh(x) * te.sin(x) + te.sigmoid(y or x) end),
}

--- Everyday numbers, each seventh an extraordinary one.
local function inputs()
    local x = te.randn({ ROWS, COLUMNS })
    local odd = te.tensor { 0, -0.0, math.huge, -math.huge, 1e-40, -1e-40, 3e38, -3e38, 88, -88, 1e-3, 16, -16 }
    local ids = te.randint(0, odd:numel() - 1, { ROWS * COLUMNS })
    local which = te.lt(te.rand({ ROWS, COLUMNS }), 1 / 7)
    return te.where(which, odd:index_select(1, ids):view { ROWS, COLUMNS }, x):to("bfloat16")
end

local function run(f, x, dy)
    x = x:detach():clone()
    x.requires_grad = true
    local y = f(x)
    y:backward(dy:narrow(-1, 1, y:size(-1)):contiguous())
    return y:detach(), x.grad
end

describe("functions that are looked up", function()
    local threads = te.get_num_threads()
    before_each(function() te.manual_seed(20261128) end)
    after_each(function() te.set_num_threads(threads) end)

    for name, f in pairs(FUNCTIONS) do
        it("have the bits of computed ones: " .. name, function()
            local x, dy = inputs(), te.randn({ ROWS, COLUMNS }):to("bfloat16")
            for n = 1, 2 do
                te.set_num_threads(n)
                local y, dx = run(f, x, dy)
                for first = 1, ROWS, PIECE do
                    local part_y, part_dx = run(f, x:narrow(1, first, PIECE), dy:narrow(1, first, PIECE))
                    bits.assert_equal(part_y, y:narrow(1, first, PIECE), name)
                    bits.assert_equal(part_dx, dx:narrow(1, first, PIECE), name .. ", gradient")
                end
            end
        end)
    end

    it("have them in groups with neighbours", function()
        local block = te.Sequential(te.Residual(te.GELU { approximate = "none" }, te.Dropout(0)), te.LayerNorm(COLUMNS))
        local x, dy = te.randn({ ROWS, COLUMNS }):to("bfloat16"), te.randn({ ROWS, COLUMNS }):to("bfloat16")
        local function grouped(part, d)
            return te.autocast({ dtype = "bfloat16" }, run, function(v) return block(v) end, part, d)
        end
        local y, dx = grouped(x, dy)
        for first = 1, ROWS, PIECE do
            local part_y, part_dx = grouped(x:narrow(1, first, PIECE), dy:narrow(1, first, PIECE))
            bits.assert_equal(part_y, y:narrow(1, first, PIECE), "group")
            bits.assert_equal(part_dx, dx:narrow(1, first, PIECE), "group, gradient")
        end
    end)

    it("follow numbers that change from call to call", function()
        local x = te.randn({ ROWS, COLUMNS }):to("bfloat16")
        for limit = 1, 4 do
            local options = { limit = limit, alpha = 1 + limit / 4 }
            local y = te.clamped_swiglu(x, options)
            for first = 1, ROWS, PIECE do
                bits.assert_equal(te.clamped_swiglu(x:narrow(1, first, PIECE), options), y:narrow(1, first, PIECE),
                    "limit " .. limit)
            end
        end
    end)
end)
