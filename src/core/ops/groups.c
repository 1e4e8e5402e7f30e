/* groups.c - the list of operation tables, and what several of them share. */
#include "ops.h"

#include <stdio.h>

const te_op_group te_op_groups[] = {
    {"arithmetic", te_ops_pointwise},  {"activation", te_ops_activation}, {"normalization", te_ops_norm},
    {"loss", te_ops_loss},             {"reduction", te_ops_reduce},      {"shape", te_ops_view},
    {"indexing", te_ops_index},        {"indexing", te_ops_join},         {"indexing", te_ops_along},
    {"indexing", te_ops_triangle},     {"indexing", te_ops_draw},         {"arrangement", te_ops_scatter},
    {"arrangement", te_ops_order},     {"arrangement", te_ops_arrange},   {"matrix product", te_ops_linear},
    {"attention", te_ops_attention},   {"random", te_ops_random},         {"conversion", te_ops_convert},
    {"quantization", te_ops_quantized}, {"mixture of experts", te_ops_moe},
    {"router of experts", te_ops_moe_router}, {NULL, NULL},
};

te_tensor *te_op_call(te_context *ctx, const char *name, int n_args, const te_arg *args)
{
    const te_op *op = te_op_find(ctx, name);
    te_tensor *out = NULL;
    if (op) te_op_run(ctx, op, args, n_args, &out, 1);
    return out;
}

te_tensor *te_op_gather(te_context *ctx, te_tensor *x, int dim, te_tensor *index)
{
    te_arg args[] = {TE_A_TENSOR(x), TE_A_NUMBER(dim), TE_A_TENSOR(index)};
    return index ? te_op_call(ctx, "gather", 3, args) : NULL;
}

void te_call_fail_host(te_call *call, const char *what)
{
    char reason[256];
    snprintf(reason, sizeof reason, "%s", te_context_error(call->ctx));
    te_call_fail(call, call->ctx->status, "%s by the host: %s", what, reason);
}

int te_call_dim(te_call *call, int64_t dim, const te_tensor *x)
{
    int i = te_dim_index(dim, x->ndim);
    if (i < 0)
        te_call_fail(call, TE_ERROR_ARGUMENT, "dimension %lld is not in a tensor with %d dimensions",
                     te_counted(call->ctx, dim), x->ndim);
    return i;
}

te_tensor *te_tensor_dim_last(te_tensor *x, int dim)
{
    int64_t shape[TE_MAX_DIMS], stride[TE_MAX_DIMS];
    for (int i = 0; i < x->ndim; i++) {
        int from = i == dim ? x->ndim - 1 : i == x->ndim - 1 ? dim : i;
        shape[i] = x->shape[from];
        stride[i] = x->stride[from];
    }
    return te_tensor_alias(x, x->ndim, shape, stride, x->offset);
}

te_dtype te_promote(te_dtype a, te_dtype b)
{
    static const int rank[TE_DTYPE_COUNT] = {
        [TE_BOOL] = 0,   [TE_U8] = 1,   [TE_I32] = 2, [TE_I64] = 3, [TE_F8E4M3] = 4,
        [TE_F8E5M2] = 4, [TE_BF16] = 5, [TE_F16] = 5, [TE_F32] = 6, [TE_F64] = 7};
    if (a == b) return a;
    if (rank[a] == rank[b]) return TE_F32;
    return rank[a] > rank[b] ? a : b;
}
