/* along.c - extremes, the largest few and running sums along a dimension, by kernels that take rows: the dimension is
 * brought to the end, as a view. */
#include "ops.h"

#include "../autograd.h"

static te_status arg_extreme(te_call *call, bool largest)
{
    te_tensor *x = call->in[0], *rows;
    int64_t shape[TE_MAX_DIMS];
    bool keepdim = call->attr[1].number != 0;
    int dim = -1, n = 0;
    if (call->attr[0].set && (dim = te_call_dim(call, (int64_t)call->attr[0].number, x)) < 0) return call->ctx->status;
    if ((dim < 0 ? te_tensor_numel(x) : x->shape[dim]) == 0)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "%s has no elements%s", TE_SHAPE_TEXT(x),
                            dim < 0 ? "" : " along the dimension");
    if (dim >= 0) {
        rows = te_tensor_dim_last(x, dim);
    } else { /* position in the flattened tensor */
        te_tensor *flat = te_tensor_contiguous_copy(x);
        int64_t all = te_tensor_numel(x);
        rows = flat ? te_tensor_alias(flat, 1, &all, NULL, flat->offset) : NULL;
        te_tensor_release(flat);
    }
    if (!rows) return call->ctx->status;
    for (int i = 0; i < x->ndim; i++)
        if (keepdim || (dim >= 0 && i != dim)) shape[n++] = dim < 0 || i == dim ? 1 : x->shape[i];
    te_tensor *y = call->out[0] = te_tensor_new(call->ctx, x->storage->device, TE_I64, n, shape);
    te_status status = y ? TE_OK : call->ctx->status;
    if (y && te_tensor_numel(y)) {
        te_exec *exec = te_call_exec(call, x);
        te_view src = te_tensor_view(rows), out = te_tensor_view(y);
        out.ndim = src.ndim - 1; /* same memory in the order of the rows' leading dimensions */
        int64_t step[TE_MAX_DIMS], s = 1;
        for (int i = x->ndim - 1; i >= 0 && dim >= 0; i--) {
            step[i] = i == dim ? 0 : s;
            if (i != dim) s *= x->shape[i];
        }
        for (int i = 0; i < out.ndim; i++) {
            out.shape[i] = src.shape[i];
            out.stride[i] = step[i == dim ? x->ndim - 1 : i];
        }
        status = te_call_kernel(call, exec, exec->backend->arg_reduce(exec, &out, &src, largest));
    }
    te_tensor_release(rows);
    return status;
}

static te_status argmax_forward(te_call *call) { return arg_extreme(call, true); }
static te_status argmin_forward(te_call *call) { return arg_extreme(call, false); }

static te_status topk_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    int64_t k = (int64_t)call->attr[0].number, shape[TE_MAX_DIMS];
    int dim = te_call_dim(call, (int64_t)call->attr[1].number, x);
    if (dim < 0) return call->ctx->status;
    if (k < 0 || k > x->shape[dim])
        return te_call_fail(call, TE_ERROR_ARGUMENT, "k = %lld of %lld positions", (long long)k,
                            (long long)x->shape[dim]);
    memcpy(shape, x->shape, sizeof shape);
    shape[dim] = k;
    te_tensor *values = call->out[0] = te_tensor_new(call->ctx, x->storage->device, x->dtype, x->ndim, shape);
    te_tensor *indices = call->out[1] = te_tensor_new(call->ctx, x->storage->device, TE_I64, x->ndim, shape);
    te_tensor *rows = te_tensor_dim_last(x, dim), *v = values ? te_tensor_dim_last(values, dim) : NULL,
              *at = indices ? te_tensor_dim_last(indices, dim) : NULL;
    te_status status = rows && v && at ? TE_OK : call->ctx->status;
    if (status == TE_OK) {
        te_exec *exec = te_call_exec(call, x);
        te_view src = te_tensor_view(rows), out = te_tensor_view(v), positions = te_tensor_view(at);
        status =
            te_call_kernel(call, exec, exec->backend->topk(exec, &out, &positions, &src, call->attr[2].number != 0));
    }
    te_tensor_release(rows);
    te_tensor_release(v);
    te_tensor_release(at);
    call->memo[0] = dim;
    if (status != TE_OK || !call->record) return status;
    /* without its place in the graph, or node and result would keep each other alive */
    te_tensor *kept = te_tensor_alias(indices, indices->ndim, indices->shape, indices->stride, indices->offset);
    if (!kept || te_call_save(call, kept) < 0) status = call->ctx->status;
    te_tensor_release(kept);
    return status;
}

static te_status topk_backward(te_call *call) { return call->dout[0] ? te_gather_backward(call) : TE_OK; }

static te_status run_cumsum(te_call *call, te_tensor *dst, te_tensor *src, int dim, bool reverse)
{
    te_exec *exec = te_call_exec(call, src);
    te_tensor *in = te_tensor_dim_last(src, dim), *out = te_tensor_dim_last(dst, dim);
    te_status status = in && out ? TE_OK : call->ctx->status;
    if (status == TE_OK) {
        te_view x = te_tensor_view(in), y = te_tensor_view(out);
        status = te_call_kernel(call, exec, exec->backend->cumsum(exec, &y, &x, reverse));
    }
    te_tensor_release(in);
    te_tensor_release(out);
    return status;
}

static te_status cumsum_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    int dim = te_call_dim(call, (int64_t)call->attr[0].number, x);
    if (dim < 0) return call->ctx->status;
    bool whole = x->dtype == TE_BOOL || x->dtype == TE_U8 || x->dtype == TE_I32 || x->dtype == TE_I64;
    bool narrow = x->dtype == TE_F8E4M3 || x->dtype == TE_F8E5M2;
    te_dtype dtype = whole ? TE_I64 : narrow ? TE_F32 : x->dtype;
    call->memo[0] = dim;
    call->out[0] = te_tensor_new(call->ctx, x->storage->device, dtype, x->ndim, x->shape);
    return call->out[0] ? run_cumsum(call, call->out[0], x, dim, false) : call->ctx->status;
}

static te_status cumsum_backward(te_call *call)
{
    te_tensor *dx = te_tensor_new_like(call->dout[0]);
    te_status status = dx ? run_cumsum(call, dx, call->dout[0], (int)call->memo[0], true) : call->ctx->status;
    if (status == TE_OK) return te_grad_give(call, 0, dx);
    te_tensor_release(dx);
    return status;
}

const te_op_def te_ops_along[] = {
    {.signature = "argmax(x, dim: dim = nil, keepdim: bool = false)",
     .doc = "Position (from 0, int64) of the first largest value along dim, or in the flattened tensor.",
     .flags = TE_OP_METHOD | TE_OP_NOGRAD,
     .forward = argmax_forward},
    {.signature = "argmin(x, dim: dim = nil, keepdim: bool = false)",
     .doc = "Position (from 0, int64) of the first smallest value.",
     .flags = TE_OP_METHOD | TE_OP_NOGRAD,
     .forward = argmin_forward},
    {.signature = "topk(x, k: int, dim: dim = -1; largest: bool = true)",
     .doc = "The k largest values along dim, sorted, and their positions (from 0, int64). Equal values keep their "
            "order; NaN comes first, also when the smallest are asked for.",
     .flags = TE_OP_METHOD,
     .outputs = "values indices",
     .forward = topk_forward,
     .backward = topk_backward},
    {.signature = "cumsum(x, dim: dim = -1)",
     .doc = "Running sum along dim.",
     .flags = TE_OP_METHOD,
     .forward = cumsum_forward,
     .backward = cumsum_backward},
    {0},
};
