--- Every quantizer against spec/support/quantization.lua, byte for byte, in both directions.

local te = require "te"
local book = require "spec.support.quantization"

local bytes_of = te._core.tensor_bytes

-- Where two strings first differ, for messages.
local function same_bytes(expected, got, what)
    if expected == got then return end
    assert.equal(#expected, #got, what .. ": size")
    for i = 1, #expected do
        if expected:byte(i) ~= got:byte(i) then
            error(("%s: byte %d of %d is %d, not %d"):format(what, i, #expected, got:byte(i), expected:byte(i)), 0)
        end
    end
end

local HOSTILE = {
    0, -0.0, 0 / 0, 1 / 0, -1 / 0, 1e-45, -1e-42, 1.1754943508222875e-38, 3.4e38, -3.4e38, 448, 449, 464, 480, -57344, 61440,
    0.25, 0.75, 1.25, 2.5, 5, -6, 1 / 448, 2 ^ -126, 2 ^ -127, 2 ^ 127, 65504, 1e-8,
}

-- Deterministic values over many magnitudes; `hostile` mixes in the list above.
local function values(rows, cols, hostile)
    local state = rows * 7919 + cols * 31 + 1
    local function random()
        state = (state * 16807) % 2147483647
        return state / 2147483647
    end
    local m = {}
    for i = 1, rows do
        m[i] = {}
        for j = 1, cols do
            m[i][j] = (random() - 0.5) * 10 ^ math.floor(random() * 6 - 3)
            if hostile and random() < 0.3 then m[i][j] = HOSTILE[1 + math.floor(random() * #HOSTILE)] end
        end
    end
    return m
end

local function finite(m)
    for _, row in ipairs(m) do
        for j, x in ipairs(row) do if x ~= x or math.abs(x) == math.huge then row[j] = 7 end end
    end
    return m
end

-- Tensors of both kinds and all awkward shapes: fn(x, its values after rounding, rows, cols).
local SHAPES = { { 1, 1 }, { 1, 131 }, { 3, 5 }, { 17, 33 }, { 131, 1 }, { 32, 64 }, { 130, 141 } }

local function for_each_source(fn)
    for _, dtype in ipairs { "float32", "bfloat16", "float16" } do
        for _, shape in ipairs(SHAPES) do
            for _, kind in ipairs { "plain", "hostile", "finite" } do
                local m = values(shape[1], shape[2], kind ~= "plain")
                local x = te.tensor(kind == "finite" and finite(m) or m, { dtype = dtype })
                fn(x, x:totable(), shape[1], shape[2], ("%s {%d, %d} %s"):format(dtype, shape[1], shape[2], kind))
            end
        end
        for _, shape in ipairs { { 0, 8 }, { 5, 0 } } do
            local x = te.zeros(shape, { dtype = dtype })
            fn(x, shape[1] == 0 and {} or { {}, {}, {}, {}, {} }, shape[1], shape[2], "empty")
        end
    end
end

local OVERFLOW = { float32 = 3.4028234663852886e38, bfloat16 = 3.3895313892515355e38, float16 = 65504 }

-- Checks one direction of q. `swapped`: the book's matrix is the transpose of what is stored.
local function check(q, direction, expected, packed, swapped, what)
    what = what .. " " .. direction
    local codes, scales = expected.codes, expected.scales
    if packed then codes = book.pack(codes) end
    if swapped then
        codes = book.transpose(codes, codes[1] and #codes[1] or 0)
        scales = book.transpose(scales, scales[1] and #scales[1] or 0)
    end
    same_bytes(book.bytes(codes), bytes_of(q[direction .. "_data"]), what .. " data")
    local scale = q[direction .. "_scale_inv"]
    same_bytes(scale.dtype == "float32" and book.floats(scales) or book.bytes(scales), bytes_of(scale), what .. " scales")
    local amax = direction == "rowwise" and q.amax or q.columnwise_amax
    if amax then same_bytes(book.floats { expected.amax }, bytes_of(amax), what .. " amax") end
end

local BOTH = { columnwise = true }
local FORMATS = { input = "float8_e4m3", weight = "float8_e4m3", grad_output = "float8_e5m2" }

describe("per-tensor FP8", function()
    it("follows the book with current scaling", function()
        for _, o in ipairs { {}, { power_of_two = true }, { epsilon = 0.5 } } do
            local recipe = te.recipe.Float8CurrentScaling { use_power_2_scales = o.power_of_two, amax_epsilon = o.epsilon }
            for_each_source(function(x, m, _, cols, what)
                for role, format in pairs(FORMATS) do
                    local q, given = te.quantize(x, recipe, role, BOTH), { format = format, power_of_two = o.power_of_two, epsilon = o.epsilon }
                    local expected = book.per_tensor(m, given)
                    check(q, "rowwise", expected, false, false, what)
                    expected.codes = book.transpose(expected.codes, cols)
                    check(q, "columnwise", expected, false, false, what)
                end
            end)
        end
    end)

    it("follows the book with a given scale, and reports the amax", function()
        local recipe = te.recipe.DelayedScaling {}
        for_each_source(function(x, m, _, cols, what)
            for _, scale in ipairs { 1, 0.37, 3e5 } do
                scale = book.f32(scale)
                local q = te.quantize(x, recipe, "input", { columnwise = true, scale = scale })
                local expected = book.per_tensor(m, { format = "float8_e4m3", scale = scale })
                check(q, "rowwise", expected, false, false, what)
                expected.codes = book.transpose(expected.codes, cols)
                check(q, "columnwise", expected, false, false, what)
            end
        end)
    end)
end)

describe("MXFP8", function()
    it("follows the book", function()
        for _, square in ipairs { false, true } do
            local recipe = te.recipe.MXFP8BlockScaling { fp8_format = "HYBRID", enable_2d_quantization = square }
            for_each_source(function(x, m, rows, cols, what)
                for role, format in pairs(FORMATS) do
                    local o = { format = format, rows = square and role == "weight" and 32 or 1, cols = 32 }
                    local q = te.quantize(x, recipe, role, BOTH)
                    check(q, "rowwise", book.mx(m, cols, o), false, false, what)
                    check(q, "columnwise", book.mx(book.transpose(m, cols), rows, o), false, true, what)
                end
            end)
        end
    end)
end)
