/* norm.c - normalisations over rows: LayerNorm, RMSNorm, L2, softmax. Statistics are float32, stored one per row. */
#include "ops.h"

/* Moves `dim` last, applies a row op and moves it back, in memory too: on the host by computing it as it shall lie. */
static te_status along_dim(te_call *call, const char *row_op)
{
    te_tensor *x = call->in[0];
    int dim = te_dim_index((int64_t)call->attr[0].number, x->ndim);
    if (dim < 0)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "dimension %lld of a tensor with %d dimensions",
                            te_counted(call->ctx, (int64_t)call->attr[0].number), x->ndim);
    if (dim == x->ndim - 1) return te_call_delegate(call, row_op, 1, &TE_A_TENSOR(x));
    te_arg swap[3] = {TE_A_TENSOR(x), TE_A_NUMBER(dim), TE_A_NUMBER(-1)};
    te_tensor *last = te_op_call(call->ctx, "transpose", 3, swap);
    call->ctx->laid_out_alike = te_tensor_contiguous(x) && x->storage->device->exec.backend->host_memory;
    te_tensor *y = last ? te_op_call(call->ctx, row_op, 1, &TE_A_TENSOR(last)) : NULL;
    call->ctx->laid_out_alike = false;
    swap[0] = TE_A_TENSOR(y);
    te_tensor *back = y ? te_op_call(call->ctx, "transpose", 3, swap) : NULL;
    te_tensor *packed = back ? te_op_call(call->ctx, "contiguous", 1, &TE_A_TENSOR(back)) : NULL;
    te_tensor_release(last);
    te_tensor_release(y);
    te_tensor_release(back);
    return te_call_result(call, packed);
}

/* eps, which is the only attribute everywhere. */
static te_status check_eps(te_call *call)
{
    double eps = call->attr[0].number;
    return eps >= 0 ? TE_OK : te_call_fail(call, TE_ERROR_ARGUMENT, "eps must be at least 0, not %g", eps);
}

static te_status softmax_forward(te_call *call) { return along_dim(call, "softmax_row"); }
static te_status log_softmax_forward(te_call *call) { return along_dim(call, "log_softmax_row"); }

const te_op_def te_ops_norm[] = {
    {.signature = "layer_norm(x, weight = 1, bias = 0; eps: number = 1e-5)",
     .doc = "(x - mean) / sqrt(var + eps) * weight + bias over the last dimension, with biased var (Ba et al. 2016). "
            "weight and bias have that dimension's size. The result is in the compute dtype of te.autocast, otherwise "
            "x's.",
     .flags = TE_OP_METHOD | TE_OP_FLOAT | TE_OP_COMPUTE | TE_OP_LASTROW,
     .formula = "mean = rowmean(x); d = x - mean; rstd = rsqrt(rowmean(d * d) + eps); y = d * rstd * weight + bias",
     .check = check_eps},
    {.signature = "rms_norm(x, weight = 1; eps: number = 1e-5)",
     .doc = "x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019); dtype as for "
            "layer_norm.",
     .flags = TE_OP_METHOD | TE_OP_FLOAT | TE_OP_COMPUTE | TE_OP_LASTROW,
     .formula = "rstd = rsqrt(rowmean(x * x) + eps); y = x * rstd * weight",
     .check = check_eps},
    {.signature = "layer_norm_zero_centered(x, weight, bias = 0; eps: number = 1e-5)",
     .doc = "layer_norm with 1 + weight in place of weight: weight decay then pulls the factor towards 1.",
     .flags = TE_OP_METHOD | TE_OP_FLOAT | TE_OP_COMPUTE | TE_OP_LASTROW,
     .formula =
         "mean = rowmean(x); d = x - mean; rstd = rsqrt(rowmean(d * d) + eps); y = d * rstd * (1 + weight) + bias",
     .check = check_eps},
    {.signature = "rms_norm_zero_centered(x, weight; eps: number = 1e-5)",
     .doc = "rms_norm with 1 + weight in place of weight.",
     .flags = TE_OP_METHOD | TE_OP_FLOAT | TE_OP_COMPUTE | TE_OP_LASTROW,
     .formula = "rstd = rsqrt(rowmean(x * x) + eps); y = x * rstd * (1 + weight)",
     .check = check_eps},
    {.signature = "l2_normalize(x; eps: number = 1e-6)",
     .doc = "x / sqrt(sum(x^2) + eps) over the last dimension; dtype as for layer_norm.",
     .flags = TE_OP_METHOD | TE_OP_FLOAT | TE_OP_COMPUTE | TE_OP_LASTROW,
     .formula = "r = rsqrt(rowsum(x * x) + eps); y = x * r",
     .check = check_eps},
    {.signature = "softmax(x, dim: dim = -1)",
     .doc = "exp(x) divided by its sum along dim, shifted by the maximum.",
     .flags = TE_OP_METHOD,
     .forward = softmax_forward},
    {.signature = "softmax_row(x)",
     .doc = "Softmax over the last dimension.",
     .flags = TE_OP_FLOAT | TE_OP_LASTROW | TE_OP_HIDDEN,
     .formula = "e = exp(x - rowmax(x)); y = e / rowsum(e)",
     .gradient = "dx = y * (dy - rowsum(dy * y))"},
    {.signature = "log_softmax(x, dim: dim = -1)",
     .doc = "log(softmax(x)) along dim, computed without underflow.",
     .flags = TE_OP_METHOD,
     .forward = log_softmax_forward},
    {.signature = "log_softmax_row(x)",
     .doc = "Logarithm of the softmax over the last dimension.",
     .flags = TE_OP_FLOAT | TE_OP_LASTROW | TE_OP_HIDDEN,
     .formula = "m = rowmax(x); y = x - m - log(rowsum(exp(x - m)))",
     .gradient = "dx = dy - exp(y) * rowsum(dy)"},
    {0},
};
