--- Packed sequences on the CUDA device, whose lengths the host does not read: the CPU's results, in a graph with other
--- lengths at each launch, too; lengths that do not fit are errors of the next wait and reach no foreign memory. What
--- the host does read says so in a graph. Pending without a device.

local te = require "te"

local devices, reason = te.devices()

-- `turned`: queries and keys by their positions.
local function frequencies(device, turned) return turned and te.rope_frequencies(16, { device = device }) or nil end

local function attend(device, dtype, lens, x, turned)
    local qkv = x:to(dtype):to(device):detach():clone()
    qkv.requires_grad = true
    local y = te.self_attention(qkv, te.tensor(lens, { dtype = "int32", device = "cpu" }):to(device),
        frequencies(device, turned), { heads = 2, causal = true })
    local wide = y:to "float32"
    te.sum(wide * wide):backward()
    return { y:detach():to("cpu"):to "float64", qkv.grad:to("cpu"):to "float64" }
end

local function furthest(a, b) return (te.max((a - b):abs()) / te.max(a:abs())):item() end

describe("packed sequences on CUDA", function()
    if not devices[2] then
        pending("no CUDA device: " .. tostring(reason))
        return
    end

    local function input(tokens)
        te.manual_seed(3)
        return te.randn({ tokens, 96 }, { device = "cpu" })
    end

    for dtype, bound in pairs { float32 = 1e-5, bfloat16 = 0.02 } do
        it("attend as on the CPU, in " .. dtype, function()
            -- more sequences than a block has threads, empty ones first, last and in between
            local many = {}
            for i = 1, 260 do many[i] = i % 9 == 2 and 2 or 0 end
            for _, lens in ipairs { { 7, 0, 20, 13 }, { 40 }, { 0, 1, 39, 0 }, many } do
                local tokens = 0
                for _, n in ipairs(lens) do tokens = tokens + n end
                local x = input(tokens)
                for _, turned in ipairs { false, true } do
                    local expected = attend("cpu", dtype, lens, x, turned)
                    local seen = attend("cuda", dtype, lens, x, turned)
                    for i = 1, 2 do
                        local off = furthest(expected[i], seen[i])
                        assert.is_true(off < bound, ("%s %d is off by %g"):format(dtype, i, off))
                    end
                end
            end
        end)
    end

    it("have other lengths at each launch of a graph", function()
        for i = 0, 3 do
            local dtype, turned = i < 2 and "float32" or "bfloat16", i % 2 == 1
            local x, f = input(40):to(dtype):to "cuda", frequencies("cuda", turned)
            local function forward(lens) return te.self_attention(x, lens, f, { heads = 2 }) end
            local graph = te.graph(forward, { te.tensor({ 40, 0, 0 }, { dtype = "int32", device = "cpu" }) },
                { device = "cuda" })
            for _, lens in ipairs { { 1, 2, 37 }, { 40, 0, 0 }, { 0, 20, 20 }, { 13, 14, 13 }, { 5, 30, 5 } } do
                local given = te.tensor(lens, { dtype = "int32", device = "cpu" })
                assert.same(forward(given:to "cuda"):totable(), graph(given):totable())
            end
        end
    end)

    it("are errors of the next wait where they do not fit", function()
        for message, lens in pairs { ["seq_lens%[2%] = %-3 does not fit 40 tokens"] = { 7, -3, 36 },
            ["seq_lens%[1%] = 41 does not fit 40 tokens"] = { 41, 1 },
            ["seq_lens%[3%] = 2 does not fit 40 tokens"] = { 20, 20, 2 },
            ["seq_lens add up to 20 of 40 tokens"] = { 10, 10 },
            ["seq_lens%[2%] = 2147483647 does not fit 40 tokens"] = { 3, 9007199254740991, 9007199254740991 } } do
            for _, dtype in ipairs { "float32", "bfloat16" } do
                local x = input(40):to(dtype):to "cuda"
                x.requires_grad = true
                local y = te.self_attention(x, te.tensor(lens, { dtype = "int64", device = "cuda" }), { heads = 2 })
                te.sum(y):backward()
                assert.error_matches(function() te.synchronize "cuda" end, message)
                te.synchronize "cuda" -- said once
            end
        end
    end)

    it("names what the host has to read, in a graph", function()
        local function refuses(message, fn)
            local graph = te.graph(fn, { te.ones({ 4, 4 }, { device = "cuda" }) }, { warmup = 1 })
            graph(te.ones { 4, 4 })
            assert.error_matches(function() graph(te.ones { 4, 4 }) end, message)
            te.synchronize "cuda"
        end
        local lens = te.tensor({ 1, 3 }, { dtype = "int32", device = "cuda" })
        local layer = te.GroupedLinear(2, 4, 4, { device = "cuda" })
        refuses("te.GroupedLinear: split_sizes are read by the host: .*a copy to the host cannot be part of a graph",
            function(x) return layer(x, lens) end)
        refuses("stochastic_depth.*: seq_lens are read by the host: .*a copy to the host cannot be part of a graph",
            function(x) return te.stochastic_depth(x, lens, { p = 0.5 }) end)
    end)
end)
