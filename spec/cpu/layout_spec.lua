--- Elements do not depend on where they lie: operations on tensors in any order, cut into slabs or bands, give what
--- they give on contiguous copies.

local bits = require "spec.support.bits"
local te = require "te"

local function values(shape, dtype)
    if dtype == "int64" or dtype == "int32" then return te.randint(-3000, 3000, shape, { dtype = dtype }) end
    local x = te.randn(shape)
    x:view(-1):narrow(1, 5, 2):copy_(te.tensor { 0 / 0, -math.huge })
    return x:to(dtype)
end

local one = {
    function(x) return -x end, function(x) return x:abs() end, function(x) return x:exp() end,
    function(x) return x:lt(0.5) end, function(x) return x * 3 + 1 end, function(x) return x:clamp(-1, 1) end,
}
local two = {
    function(x, y) return x + y end, function(x, y) return te.maximum(x, y) end,
    function(x, y) return te.where(x:gt(0), x, y) end, function(x, y) return x:lt(y) end,
}

-- a view of a tensor and a second operand that is contiguous, both of one shape
local views = {
    ["turned"] = { { 300, 700 }, function(x) return x:transpose(1, 2) end },
    ["turned, long rows"] = { { 40000, 17 }, function(x) return x:transpose(1, 2) end },
    ["turned, few columns"] = { { 17, 40000 }, function(x) return x:transpose(1, 2) end },
    ["turned batches"] = { { 9, 150, 170 }, function(x) return x:transpose(2, 3) end },
    ["permuted"] = { { 30, 70, 110 }, function(x) return x:permute(3, 1, 2) end },
    ["permuted otherwise"] = { { 30, 70, 128 }, function(x) return x:permute(2, 1, 3) end },
    ["backwards"] = { { 50, 60, 71 }, function(x) return x:permute(3, 2, 1) end },
    ["part of a turned one"] = { { 800, 400 }, function(x)
        return x:transpose(1, 2):narrow(1, 3, 390):narrow(2, 7, 701)
    end },
    ["half of its columns"] = { { 301, 512 }, function(x) return x:narrow(2, 257, 256) end },
    ["three quarters of its columns"] = { { 150, 2048 }, function(x) return x:narrow(2, 101, 1536) end },
    ["few columns"] = { { 3000, 100 }, function(x) return x:narrow(2, 3, 64) end },
    ["every other element"] = { { 200, 512 }, function(x) return x:view(200, 256, 2):select(3, 2) end },
    ["large and turned"] = { { 1100, 1000 }, function(x) return x:transpose(1, 2) end },
}

describe("operations on a tensor", function()
    local threads = te.get_num_threads()
    after_each(function() te.set_num_threads(threads) end)

    for name, view in pairs(views) do
        for _, dtype in ipairs { "float32", "bfloat16", "float16", "float64", "int64", "int32" } do
            it(("%s give the same, %s"):format(name, dtype), function()
                te.manual_seed(5)
                local x = view[2](values(view[1], dtype))
                local same = x:contiguous()
                local y = values(x.shape, dtype)
                local across = view[2](values(view[1], dtype))
                local row, column = y:narrow(1, 1, 1), y:narrow(y:dim(), 2, 1)
                -- everything, of x or what stands for it, and of what stands for `across`
                local function results(x, across)
                    local list = {}
                    for _, fn in ipairs(one) do list[#list + 1] = fn(x) end
                    for _, fn in ipairs(two) do
                        list[#list + 1], list[#list + 2], list[#list + 3] = fn(x, y), fn(y, x), fn(x, across)
                    end
                    list[#list + 1], list[#list + 2] = x + row, x * column
                    return list
                end
                local expected = results(same, across:contiguous())
                local sum = across:clone() + same
                for n = 1, 2 do
                    te.set_num_threads(n)
                    for i, found in ipairs(results(x, across)) do
                        if i <= #one then assert.is_true(found:is_contiguous()) end
                        bits.assert_equal(expected[i], found)
                    end
                    local into = view[2](values(view[1], dtype)):copy_(across)
                    into:add_(x)
                    bits.assert_equal(sum, into:contiguous())
                end
            end)
        end
    end
end)
