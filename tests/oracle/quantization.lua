-- The scalar reference of the specs, value by value, for quantization.py: one line per conversion, format, bits of the
-- float32 and the code that came out; then what every finite code stands for.
local book = require "spec.support.quantization"
local ffi = require "ffi"

local cell = ffi.new "union { float value; uint32_t bits; }"

local function value_of(bits)
    cell.bits = bits
    return cell.value
end

local function bits_of(value)
    cell.value = value
    return cell.bits
end

-- All exponents with the mantissas around every rounding tie of three bits, both signs.
local function each_value(fn)
    for high = 0, 0xffff, 8 do
        for _, low in ipairs { 0, 1, 0x3ffff, 0x40000, 0x40001, 0x7ffff } do fn(high * 65536 + low) end
    end
end

for _, name in ipairs { "float8_e4m3", "float8_e5m2", "float4_e2m1" } do
    local format = book.formats[name]
    each_value(function(bits) print(name, bits, book.encode(format, value_of(bits))) end)
    for code = 0, 2 * format.sign - 1 do
        if code % format.sign <= format.last then print("decode:" .. name, bits_of(book.decode(format, code)), code) end
    end
end
