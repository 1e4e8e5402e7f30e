-- Runs every operation and its gradient once on the CUDA device, for tools that watch memory and races.
--
--     compute-sanitizer --tool memcheck build/tetrain bench/gpu_touch.lua [--few]

local te = require "te"
local support = dofile((arg[0]:match("^(.*/)") or "./") .. "../spec/support/op_cases.lua")
local few = arg[1] == "--few" and { softmax = true, layer_norm = true, sum = true, linear = true, embedding = true,
    scaled_dot_product_attention = true, cross_entropy = true, cumsum = true, topk = true }

local function to_device(value, leaves)
    if te.is_tensor(value) then
        local there = value:detach():to("cuda")
        if there.dtype:find("^float") or there.dtype == "bfloat16" then
            there.requires_grad = true
            leaves[#leaves + 1] = there
        end
        return there
    elseif type(value) == "table" and te.is_tensor(value[1]) then
        local list = {}
        for i, t in ipairs(value) do list[i] = to_device(t, leaves) end
        return list
    end
    return value
end

local n = 0
for _, op in ipairs(te.ops_list()) do
    if not few or few[op.name] then
        for _, dtype in ipairs { "float32", "bfloat16" } do
            local args, leaves = support.arguments(op, dtype), {}
            local count = support.count(args)
            for i = 1, count do args[i] = to_device(args[i], leaves) end
            local result = te[op.name](unpack(args, 1, count))
            if op.differentiable and result.requires_grad then te.sum(result):backward() end
            te.synchronize()
            n = n + 1
        end
    end
end
print(("%d operations ran"):format(n))
