--- Quantization by the book, one value at a time: what the specs of recipes compare bytes with. Matrices are lists of
--- rows of Lua numbers. Every float32 operation is done in float64 and rounded, which gives what one float32 operation
--- gives.

local ffi = require "ffi"
local bit = require "bit"

local book = {}

local box = ffi.new("float[1]")

--- x rounded to float32.
function book.f32(x)
    box[0] = x
    return tonumber(box[0])
end
local f32 = book.f32

local FLT_MAX = f32(3.4028234663852886e38)

-- Elements --------------------------------------------------------------------------------------------------------

-- Value of every non-negative finite code, from the layout of a format.
local function values_of(mantissa_bits, bias, last_code)
    local values, steps = {}, 2 ^ mantissa_bits
    for code = 0, last_code do
        local exponent, mantissa = math.floor(code / steps), code % steps
        values[code] = exponent == 0 and mantissa / steps * 2 ^ (1 - bias)
            or (1 + mantissa / steps) * 2 ^ (exponent - bias)
    end
    return values
end

book.formats = {
    float8_e4m3 = { values = values_of(3, 7, 126), last = 126, sign = 128, nan = 127 },
    float8_e5m2 = { values = values_of(2, 15, 123), last = 123, sign = 128, nan = 127 },
    float4_e2m1 = { values = values_of(1, 1, 7), last = 7, sign = 8, nan = 7 },
}

local function is_negative(x) return x < 0 or x == 0 and 1 / x < 0 end

--- The code nearest to x, ties to the even code, saturating.
function book.encode(format, x)
    if x ~= x then return format.nan end
    local size, below, above = math.abs(x), 0, format.last
    if size >= format.values[above] then
        below = above
    else
        while above - below > 1 do
            local middle = math.floor((below + above) / 2)
            if format.values[middle] <= size then below = middle else above = middle end
        end
        local down, up = size - format.values[below], format.values[above] - size
        if up < down or up == down and below % 2 == 1 then below = above end
    end
    return below + (is_negative(x) and format.sign or 0)
end

function book.decode(format, code)
    if format.sign == 128 and code % 128 == 127 then return 0 / 0 end
    local value = format.values[code % format.sign]
    return code >= format.sign and -value or value
end

-- Random bits -----------------------------------------------------------------------------------------------------

-- The four words of one Philox4x32-10 counter; stream 0.
local function philox(seed, counter)
    local mask = 0xffffffffULL
    local c = { ffi.cast("uint64_t", counter) % 2 ^ 32, ffi.cast("uint64_t", math.floor(counter / 2 ^ 32)), 0ULL, 0ULL }
    local k0, k1 = ffi.cast("uint64_t", seed % 2 ^ 32), ffi.cast("uint64_t", math.floor(seed / 2 ^ 32))
    for _ = 1, 10 do
        local a, b = 0xd2511f53ULL * c[1], 0xcd9e8d57ULL * c[3]
        local high_a, high_b = bit.rshift(a, 32), bit.rshift(b, 32)
        c = { bit.bxor(high_b, c[2], k0), bit.band(b, mask), bit.bxor(high_a, c[4], k1), bit.band(a, mask) }
        k0, k1 = bit.band(k0 + 0x9e3779b9ULL, mask), bit.band(k1 + 0xbb67ae85ULL, mask)
    end
    return c
end

-- Byte k (from 0) of a counter.
local function random_byte(words, k)
    return tonumber(bit.band(bit.rshift(words[math.floor(k / 4) + 1], k % 4 * 8), 0xff))
end

--- To the grid point below |x| + step * u / 256, where u is one of 0 … 255.
function book.encode_stochastic(format, x, u)
    if x ~= x then return format.nan end
    local size = math.abs(x)
    local step = size < 2 and 0.5 or size < 4 and 1 or 2
    local raised, code = f32(size + step * u / 256), 0
    local floor = math.floor(raised / step) * step
    if raised >= 6 then code = 7 else
        while format.values[code] ~= floor do code = code + 1 end
    end
    return code + (is_negative(x) and 8 or 0)
end

-- Scales ----------------------------------------------------------------------------------------------------------

--- The smallest exponent code whose power of two is at least v.
function book.e8m0(v)
    if v ~= v then return 255 end
    local code = 0
    while code < 254 and 2 ^ (code - 127) < v do code = code + 1 end
    return code
end

--- Section 1.1: the factor for an amax.
function book.scale(amax, max, o)
    if amax < (o.epsilon or 0) then amax = f32(o.epsilon) end
    if amax == 0 or amax == math.huge then return 1 end
    local scale = f32(max / amax)
    if scale == math.huge then scale = o.overflow or FLT_MAX end
    if o.power_of_two then
        local _, exponent = math.frexp(scale)
        scale = 2 ^ (exponent - 1)
    end
    return scale
end

-- Matrices --------------------------------------------------------------------------------------------------------

function book.transpose(m, cols)
    local t = {}
    for j = 1, cols do
        t[j] = {}
        for i = 1, #m do t[j][i] = m[i][j] end
    end
    return t
end

--- The largest magnitude of rows i0 … i1 and columns j0 … j1, as far as they exist; NaN does not count.
function book.amax(m, i0, i1, j0, j1)
    local amax = 0
    for i = i0 or 1, math.min(i1 or #m, #m) do
        for j = j0 or 1, math.min(j1 or #m[i], #m[i]) do
            local size = math.abs(m[i][j])
            if size > amax then amax = size end
        end
    end
    return amax
end

local function ceil_div(a, b) return math.floor((a + b - 1) / b) end

--- Quantizes row by row with `multiplier(i, j)`: a matrix of codes.
local function codes_of(m, format, multiplier, seed, first_counter)
    local codes = {}
    for i = 1, #m do
        codes[i] = {}
        local groups, words = ceil_div(#m[i], 16), nil
        for j = 1, #m[i] do
            local x = f32(m[i][j] * multiplier(i, j))
            if seed then
                if (j - 1) % 16 == 0 then words = philox(seed, first_counter + (i - 1) * groups + (j - 1) / 16) end
                codes[i][j] = book.encode_stochastic(format, x, random_byte(words, (j - 1) % 16))
            else
                codes[i][j] = book.encode(format, x)
            end
        end
    end
    return codes
end

--- One factor for the matrix. o: format, scale (given) or power_of_two, epsilon.
function book.per_tensor(m, o)
    local format, amax = book.formats[o.format], book.amax(m)
    local scale = o.scale or book.scale(amax, format.values[format.last], o)
    local codes = codes_of(m, format, function() return scale end)
    return { codes = codes, scales = { { f32(1 / scale) } }, amax = { amax } }
end

-- A value per block, and where the blocks are: block(i, j) is the entry for element i, j.
local function per_block(m, cols, rows_of, cols_of, value)
    local list = {}
    for bi = 1, ceil_div(#m, rows_of) do
        list[bi] = {}
        for bj = 1, ceil_div(cols, cols_of) do
            local i0, j0 = (bi - 1) * rows_of + 1, (bj - 1) * cols_of + 1
            list[bi][bj] = value(i0, i0 + rows_of - 1, j0, j0 + cols_of - 1)
        end
    end
    return list, function(i, j) return list[ceil_div(i, rows_of)][ceil_div(j, cols_of)] end
end

-- The field `name` of each block: one per block, or repeated for its rows.
local function field(m, list, block_rows, name, replicated)
    local out = {}
    for i = 1, replicated and #m or #list do
        out[i] = {}
        local blocks = list[replicated and ceil_div(i, block_rows) or i]
        for j, block in ipairs(blocks) do out[i][j] = block[name] end
    end
    return out
end

--- Float32 factors of blocks. o: format, rows, cols (of a block), power_of_two, epsilon, overflow.
function book.blocks(m, cols, o)
    local format = book.formats[o.format]
    local list, block = per_block(m, cols, o.rows, o.cols, function(...)
        local scale = book.scale(book.amax(m, ...), format.values[format.last], o)
        return { scale = scale, inverse = f32(1 / scale) }
    end)
    return {
        codes = codes_of(m, format, function(i, j) return block(i, j).scale end),
        scales = field(m, list, o.rows, "inverse"),
    }
end

--- Exponents as factors.
function book.mx(m, cols, o)
    local format = book.formats[o.format]
    local reciprocal = f32(1 / format.values[format.last])
    local list, block = per_block(m, cols, o.rows, o.cols, function(...)
        return { code = book.e8m0(f32(book.amax(m, ...) * reciprocal)) }
    end)
    return {
        codes = codes_of(m, format, function(i, j) return 2 ^ (127 - block(i, j).code) end),
        scales = field(m, list, o.rows, "code", true),
    }
end

-- NVFP4 -----------------------------------------------------------------------------------------------------------

local SIGNS = { 1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1 }

-- H of a power of two: the sums of the halves' transforms, then their differences.
local function walsh(v)
    if #v == 1 then return v end
    local low, high, out = {}, {}, {}
    for i = 1, #v / 2 do low[i], high[i] = v[i], v[i + #v / 2] end
    low, high = walsh(low), walsh(high)
    for i = 1, #low do out[i], out[i + #low] = f32(low[i] + high[i]), f32(low[i] - high[i]) end
    return out
end

--- Each group of 16 along the rows transformed, the last one filled up with zeros. round: of the source's dtype.
function book.hadamard(m, cols, round)
    local out = {}
    for i = 1, #m do
        out[i] = {}
        for first = 1, cols, 16 do
            local v = {}
            for k = 1, 16 do v[k] = f32((m[i][first + k - 1] or 0) * SIGNS[k] / 4) end
            for k, x in ipairs(walsh(v)) do out[i][first + k - 1] = round(x) end
        end
    end
    return out
end

local function encode_factor(g, scale_max)
    local factor = math.min(f32(f32(scale_max * 6) / g), FLT_MAX)
    return (g == 0 or factor == 0) and 1 or factor
end

local function multiplier_of(code, encode)
    local factor = book.decode(book.formats.float8_e4m3, code)
    return math.min(f32(1 / f32(factor * f32(1 / encode))), FLT_MAX)
end

-- Sums rows from left to right, then adds the lower half of the rows' sums to the upper one until one is left.
local function block_error(m, i0, i1, j0, j1, code, g, o)
    local e2m1, factor = book.formats.float4_e2m1, book.decode(book.formats.float8_e4m3, code)
    local multiplier, sums = multiplier_of(code, encode_factor(g, o.scale_max)), {}
    for i = i0, i1 do
        local sum = 0
        for j = j0, j1 do
            local x = m[i] and m[i][j] or 0
            local q = book.decode(e2m1, book.encode(e2m1, f32(x * multiplier)))
            local err = f32(f32(f32(f32(q * factor) * g) / (6 * o.scale_max)) - x)
            sum = f32(sum + (o.four_over_six == "mse" and f32(err * err) or math.abs(err)))
        end
        sums[#sums + 1] = sum
    end
    while #sums > 1 do
        local halves = {}
        for i = 1, #sums / 2 do halves[i] = f32(sums[i] + sums[i + #sums / 2]) end
        sums = halves
    end
    return sums[1]
end

-- The e4m3 factor of a block and what its elements are multiplied by.
local function two_level_block(m, i0, i1, j0, j1, g, o)
    local e4m3, encode, amax = book.formats.float8_e4m3, encode_factor(g, o.scale_max), book.amax(m, i0, i1, j0, j1)
    local code = book.encode(e4m3, f32(amax * f32(encode / 6)))
    if o.four_over_six ~= "none" then
        local base = f32(amax * f32(encode / 6))
        local four = book.encode(e4m3, f32(base * 1.5))
        code = book.encode(e4m3, base)
        if block_error(m, i0, i1, j0, j1, four, g, o) < block_error(m, i0, i1, j0, j1, code, g, o) then code = four end
    end
    return { code = code, multiplier = multiplier_of(code, encode) }
end

--- Two levels of factors. o: rows (of a block, 1 or 16), scale_max, four_over_six, row_scaled, seed and first counter.
function book.nvfp4(m, cols, o)
    local amax = {}
    for i = 1, o.row_scaled and #m or 1 do
        amax[i] = o.row_scaled and book.amax(m, i, i) or book.amax(m)
    end
    local list, block = per_block(m, cols, o.rows, 16, function(i0, i1, j0, j1)
        return two_level_block(m, i0, i1, j0, j1, amax[o.row_scaled and i0 or 1], o)
    end)
    local function multiplier(i, j) return block(i, j).multiplier end
    local codes = codes_of(m, book.formats.float4_e2m1, multiplier, o.seed, o.first)
    return { codes = codes, scales = field(m, list, o.rows, "code", true), amax = amax }
end

--- Two codes to a byte, the first in the low half.
function book.pack(codes)
    local out = {}
    for i, row in ipairs(codes) do
        out[i] = {}
        for j = 1, #row, 2 do out[i][(j + 1) / 2] = row[j] + 16 * (row[j + 1] or 0) end
    end
    return out
end

-- Comparing -------------------------------------------------------------------------------------------------------

--- A matrix of codes as bytes.
function book.bytes(codes)
    local out = {}
    for _, row in ipairs(codes) do
        for _, code in ipairs(row) do out[#out + 1] = string.char(code) end
    end
    return table.concat(out)
end

--- A matrix of numbers as float32 bytes.
function book.floats(rows)
    local out = {}
    for _, row in ipairs(rows) do
        for _, x in ipairs(row) do
            box[0] = x
            out[#out + 1] = ffi.string(box, 4)
        end
    end
    return table.concat(out)
end

return book
