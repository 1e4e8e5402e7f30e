-- Runs every operation and its gradient once on the CUDA device, for tools that watch memory and races.
--
--     compute-sanitizer --tool memcheck build/tetrain bench/gpu_touch.lua [--few | --list | NAME…]
--
-- With names only these; the exit status is 1 when one of them fails.

local te = require "te"
local support = dofile((arg[0]:match("^(.*/)") or "./") .. "../spec/support/op_cases.lua")

local FEW = { "softmax", "layer_norm", "sum", "linear", "embedding", "scaled_dot_product_attention", "cross_entropy",
    "cumsum", "topk" }
local chosen
if arg[1] and arg[1] ~= "--list" then
    chosen = {}
    for _, name in ipairs(arg[1] == "--few" and FEW or arg) do chosen[name] = true end
end

local function to_device(value, leaf)
    if te.is_tensor(value) then
        local there = value:detach():to("cuda")
        if there.dtype:find("^float") or there.dtype == "bfloat16" then there.requires_grad = leaf end
        return there
    elseif type(value) == "table" and te.is_tensor(value[1]) then
        local list = {}
        for i, t in ipairs(value) do list[i] = to_device(t, leaf) end
        return list
    end
    return value
end

local function touch(op, dtype)
    local args, inputs = support.arguments(op, dtype)
    local count, takes = support.count(args), {}
    for _, i in ipairs(inputs or {}) do takes[i] = true end
    for i = 1, count do args[i] = to_device(args[i], op.differentiable and (not inputs or takes[i] == true)) end
    local result = te[op.name](unpack(args, 1, count))
    if op.differentiable and result.requires_grad then te.sum(result):backward() end
    te.synchronize()
end

local ran, failed = 0, 0
for _, op in ipairs(te.ops_list()) do
    if arg[1] == "--list" then
        print(op.name)
    elseif not chosen or chosen[op.name] then
        for _, dtype in ipairs { "float32", "bfloat16" } do
            local ok, problem = pcall(touch, op, dtype)
            ran = ran + 1
            if not ok then
                failed = failed + 1
                print(("te.%s in %s: %s"):format(op.name, dtype, tostring(problem)))
            end
        end
    end
end
if arg[1] ~= "--list" then print(("%d operations ran, %d failed"):format(ran, failed)) end
if failed > 0 then os.exit(1) end
