/* join.c - tensors joined along a dimension, an old one or a new one. */
#include "ops.h"

#include "../autograd.h"

/* The part of `whole` that tensor i fills. */
static te_tensor *slot_of(te_tensor *whole, int dim, int64_t start, int64_t length)
{
    int64_t shape[TE_MAX_DIMS];
    memcpy(shape, whole->shape, sizeof shape);
    shape[dim] = length;
    return te_tensor_alias(whole, whole->ndim, shape, whole->stride, whole->offset + start * whole->stride[dim]);
}

static te_status cat_forward(te_call *call)
{
    if (call->n_list == 0) return te_call_fail(call, TE_ERROR_ARGUMENT, "at least one tensor is needed");
    te_tensor *first = call->list[0];
    int dim = te_call_dim(call, (int64_t)call->attr[0].number, first);
    if (dim < 0) return call->ctx->status;
    int64_t shape[TE_MAX_DIMS];
    te_dtype dtype = first->dtype;
    memcpy(shape, first->shape, sizeof shape);
    shape[dim] = 0;
    for (int k = 0; k < call->n_list; k++) {
        te_tensor *t = call->list[k];
        bool fits = t->ndim == first->ndim;
        for (int i = 0; i < t->ndim && fits; i++) fits = i == dim || t->shape[i] == first->shape[i];
        if (!fits || __builtin_add_overflow(shape[dim], t->shape[dim], &shape[dim]))
            return te_call_fail(call, TE_ERROR_ARGUMENT,
                                "tensor %lld is %s, which does not continue %s along dimension %lld",
                                te_counted(call->ctx, k), TE_SHAPE_TEXT(t), TE_SHAPE_TEXT(first),
                                te_counted(call->ctx, dim));
        dtype = te_promote(dtype, t->dtype);
    }
    te_tensor *y = call->out[0] = te_tensor_new(call->ctx, first->storage->device, dtype, first->ndim, shape);
    if (!y) return call->ctx->status;
    call->memo[0] = dim;
    return te_tensor_copy_parts(y, y->stride, dim, false, call->list, call->n_list);
}

static te_status cat_backward(te_call *call)
{
    int dim = (int)call->memo[0];
    int64_t start = 0;
    for (int k = 0; k < call->node->n_edges; k++) {
        int64_t length = te_grad_input(call, k)->shape[dim];
        if (te_grad_wanted(call, k)) {
            te_status status = te_grad_give(call, k, slot_of(call->dout[0], dim, start, length));
            if (status != TE_OK) return status;
        }
        start += length;
    }
    return TE_OK;
}

/* The part of `whole` that tensor i of a stack fills. */
static te_tensor *layer_of(te_tensor *whole, int dim, int64_t i)
{
    int64_t shape[TE_MAX_DIMS], stride[TE_MAX_DIMS];
    for (int d = 0, n = 0; d < whole->ndim; d++) {
        if (d == dim) continue;
        shape[n] = whole->shape[d];
        stride[n++] = whole->stride[d];
    }
    return te_tensor_alias(whole, whole->ndim - 1, shape, stride, whole->offset + i * whole->stride[dim]);
}

static te_status stack_forward(te_call *call)
{
    te_context *ctx = call->ctx;
    int n = call->n_list;
    if (n < 1) return te_call_fail(call, TE_ERROR_ARGUMENT, "at least one tensor is needed");
    te_tensor *first = call->list[0];
    te_dtype dtype = first->dtype;
    for (int i = 1; i < n; i++) {
        if (!te_same_shape(call->list[i], first))
            return te_call_fail(call, TE_ERROR_ARGUMENT, "tensor %lld is %s, the first one %s",
                                te_counted(ctx, i), TE_SHAPE_TEXT(call->list[i]), TE_SHAPE_TEXT(first));
        dtype = te_promote(dtype, call->list[i]->dtype);
    }
    int dim = te_dim_index((int64_t)call->attr[0].number, first->ndim + 1);
    if (dim < 0)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "dimension %lld is not in a tensor with %d dimensions",
                            te_counted(ctx, (int64_t)call->attr[0].number), first->ndim + 1);
    if (first->ndim == TE_MAX_DIMS)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "a tensor has at most %d dimensions", TE_MAX_DIMS);
    int64_t shape[TE_MAX_DIMS];
    for (int i = 0; i <= first->ndim; i++) shape[i] = i == dim ? n : first->shape[i - (i > dim)];
    te_tensor *y = call->out[0] = te_tensor_new(ctx, first->storage->device, dtype, first->ndim + 1, shape);
    if (!y) return ctx->status;
    int64_t stride[TE_MAX_DIMS];
    for (int i = 0; i < first->ndim; i++) stride[i] = y->stride[i + (i >= dim)];
    call->memo[0] = dim;
    return te_tensor_copy_parts(y, stride, dim, true, call->list, n);
}

static te_status stack_backward(te_call *call)
{
    for (int k = 0; k < call->node->n_edges; k++) {
        if (!te_grad_wanted(call, k)) continue;
        te_status status = te_grad_give(call, k, layer_of(call->dout[0], (int)call->memo[0], k));
        if (status != TE_OK) return status;
    }
    return TE_OK;
}

const te_op_def te_ops_join[] = {
    {.signature = "cat(list: tensors, dim: dim = 0)",
     .doc = "Tensors joined along dim.",
     .forward = cat_forward,
     .backward = cat_backward},
    {.signature = "stack(list: tensors, dim: dim = 0)",
     .doc = "Tensors of one shape joined along a new dimension.",
     .forward = stack_forward,
     .backward = stack_backward},
    {0},
};
