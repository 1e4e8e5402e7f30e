--- What `te` offers beyond the engine's functions, by name: loaded when the name is first used.
--
-- Every value is "module.path" or "module.path:field", where a file defines several things. `te.X` for a name below is
--
--     local path, field = value:match("^([^:]+):?(.*)$")
--     local loaded = require(path)
--     te.X = field ~= "" and loaded[field] or loaded

local modules = {
    -- modules and containers
    Module = "te.module",
    BasicOperation = "te.operation:BasicOperation",
    FusedOperation = "te.operation:FusedOperation",
    Sequential = "te.sequential",
    Residual = "te.residual",
    is = "te.module:is",
    set_fusion = "te.fuser:set_fusion",
    set_recompute = "te.fuser:set_recompute",
    profile = "te.profile",
    graph = "te.graph:graph",
    make_graphed_callables = "te.graph:make_graphed_callables",
    pointwise = "te.pointwise",
    KVCache = "te.kv_cache",
    MoE = "te.moe:MoE",
    moe_sort_chunks_by_index = "te.moe:sort_chunks_by_index",
    moe_sort_chunks_by_index_with_probs = "te.moe:sort_chunks_by_index_with_probs",
    fused_moe_aux_loss = "te.moe:fused_aux_loss",
    parallel_cross_entropy = "te.distributed.cross_entropy",
    einsum = "te.einsum",
    gradcheck = "te.gradcheck",
    rope_frequencies = "te.rotary:frequencies",
    register_forward_fusion = "te.fuser.rules:register_forward_fusion",
    register_backward_fusion = "te.fuser.rules:register_backward_fusion",
    unregister_fusion = "te.fuser.rules:unregister_fusion",
    unregister_forward_fusion = "te.fuser.rules:unregister_forward_fusion",
    unregister_backward_fusion = "te.fuser.rules:unregister_backward_fusion",

    -- low precision
    recipe = "te.recipe",
    autocast = "te.recipe.autocast:autocast",
    quantized_model_init = "te.recipe.parameters:quantized_model_init",
    fp8_model_init = "te.recipe.parameters:fp8_model_init",
    fp8_autocast = "te.recipe.autocast:fp8_autocast",
    quantize = "te.quantized:quantize",
    QuantizedTensor = "te.quantized:QuantizedTensor",
    numerics = "te.numerics",

    -- libraries
    ops = "te.ops",
    optim = "te.optim",
    models = "te.models",
    train = "te.train",
    lora = "te.lora",
    initializers = "te.initializers",
    tokenizer = "te.tokenizer",
    data = "te.data",
    distributed = "te.distributed",
}

-- Operations: reachable as te.X and as te.ops.X.
local operations = {
    ["te.ops.linear"] = { "Linear", "BasicLinear", "Bias" },
    ["te.ops.grouped_linear"] = { "GroupedLinear" },
    ["te.ops.quantize"] = { "Quantize" },
    ["te.ops.norm"] = { "LayerNorm", "RMSNorm", "L2Normalization" },
    ["te.ops.basic"] = {
        "Identity", "Reshape", "ConstantScale", "Dropout", "StochasticDepth", "MakeExtraOutput", "AddExtraInput",
    },
    ["te.ops.collective"] = { "AllReduce", "AllGather", "ReduceScatter" },
    ["te.ops.pointwise"] = { "Pointwise" },
    ["te.ops.embedding"] = { "Embedding" },
    ["te.ops.attention"] = {
        "MultiHeadedSelfAttention", "GroupedQueryAttention", "MultiQuerySelfAttention", "DotProductAttention",
    },
}
for path, names in pairs(operations) do
    for _, name in ipairs(names) do modules[name] = path .. ":" .. name end
end
-- Activations have a module where their declaration names one (src/core/ops/activation.c).
for _, names in ipairs(require("te")._core.operation_modules()) do
    for name in names:gmatch "%S+" do modules[name] = "te.ops.activation:" .. name end
end

return modules
