-- Products of bfloat16 over an odd number of steps: the half pair that is left must not meet a made-up number, which an
-- infinity in it would show as NaN.

local te = require "te"

local function turned(x) return x:transpose(1, 2):contiguous():transpose(1, 2) end

local function count_nan(x) return x:ne(x):sum():item() end

describe("odd numbers of steps of bfloat16", function()
    local sizes = {
        { 414, 237, 61 }, { 28, 251, 19 }, { 768, 16, 33 }, { 1023, 130, 33 }, { 5, 300, 7 }, { 40, 9, 513 },
    }

    for _, size in ipairs(sizes) do
        local m, n, k = unpack(size)
        it(("let an infinity in the last of %d pass: %d x %d"):format(k, m, n), function()
            te.manual_seed(m)
            for _, factor in ipairs { "a", "b" } do
                local a = te.randn({ m, k }, { dtype = "bfloat16" })
                local b = te.randn({ k, n }, { dtype = "bfloat16" })
                local spoilt = factor == "a" and a:select(2, k) or b[k]
                spoilt:narrow(1, 1, 1):fill_(factor == "a" and math.huge or -math.huge)
                local expected = te.matmul(a:to("float64"), b:to("float64"))
                assert.equal(0, count_nan(expected))
                for _, x in ipairs { a, turned(a) } do
                    for _, y in ipairs { b, turned(b) } do
                        local result = te.matmul(x, y):to("float64")
                        assert.equal(0, count_nan(result))
                        for _, infinity in ipairs { math.huge, -math.huge } do
                            assert.is_true(result:eq(infinity):eq(expected:eq(infinity)):all():item())
                        end
                    end
                end
            end
        end)
    end
end)
