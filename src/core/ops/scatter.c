/* scatter.c - elements added, or put, at positions. */
#include "ops.h"

#include "../autograd.h"

static te_status check_dtypes(te_call *call, bool adds)
{
    te_dtype x = call->in[0]->dtype, index = call->in[1]->dtype, src = call->in[2]->dtype;
    if (index != TE_I64 && index != TE_I32)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "index must be int64 or int32, not %s", te_dtype_name(index));
    if (src != x || (adds && x == TE_BOOL))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "x is %s, src %s: both must have one dtype%s", te_dtype_name(x),
                            te_dtype_name(src), adds ? ", which is not bool" : "");
    return TE_OK;
}

static te_status check_scatter(te_call *call, int dim)
{
    te_tensor *x = call->in[0], *index = call->in[1], *src = call->in[2];
    if (check_dtypes(call, true) != TE_OK) return call->ctx->status;
    bool fits = index->ndim == x->ndim && src->ndim == x->ndim;
    for (int i = 0; i < x->ndim && fits; i++)
        fits = index->shape[i] <= src->shape[i] && (i == dim || index->shape[i] <= x->shape[i]);
    if (fits) return TE_OK;
    return te_call_fail(call, TE_ERROR_ARGUMENT, "index %s does not fit src %s and x %s", TE_SHAPE_TEXT(index),
                        TE_SHAPE_TEXT(src), TE_SHAPE_TEXT(x));
}

/* t, or where y lies in the same memory, which is written meanwhile, a copy; takes t over. */
static te_tensor *own_beside(const te_tensor *y, te_tensor *t)
{
    if (!t || t->storage != y->storage) return t;
    te_tensor *own = te_tensor_clone_data(t);
    te_tensor_release(t);
    return own;
}

/* scatter_add(x, dim, index, src); src may be larger than index. */
static te_status scatter_add_forward(te_call *call)
{
    te_tensor *x = call->in[0], *index = call->in[1], *src = call->in[2];
    int dim = te_call_dim(call, (int64_t)call->attr[0].number, x);
    te_status status = dim < 0 ? call->ctx->status : check_scatter(call, dim);
    if (status != TE_OK) return status;
    bool whole = te_sums_are_apart(x->dtype); /* all of y is written at the end */
    te_tensor *y = call->out[0] =
        call->inplace ? te_tensor_retain(call->inplace)
        : whole       ? te_tensor_new(call->ctx, x->storage->device, x->dtype, x->ndim, x->shape)
                      : te_tensor_clone_data(x);
    te_tensor *part = y ? te_tensor_alias(src, index->ndim, index->shape, src->stride, src->offset) : NULL;
    part = own_beside(y, part);
    index = part ? own_beside(y, te_tensor_retain(index)) : NULL;
    status = index ? TE_OK : call->ctx->status;
    if (index && call->inplace) te_tensor_written(y);
    if (index) status = te_call_scatter_add(call, y, whole && !call->inplace ? x : y, part, index, dim);
    te_tensor_release(part);
    call->memo[0] = dim;
    if (status == TE_OK && call->record && te_call_save(call, index) < 0) status = call->ctx->status;
    te_tensor_release(index);
    return status;
}

static te_status scatter_add_backward(te_call *call)
{
    te_tensor *index = call->saved[0], *dy = call->dout[0];
    if (te_grad_wanted(call, 0) && te_grad_give(call, 0, te_tensor_retain(dy)) != TE_OK) return call->ctx->status;
    if (!te_grad_wanted(call, 2)) return TE_OK;
    const te_grad_meta *src = te_grad_input(call, 2);
    te_tensor *d = te_tensor_new(call->ctx, dy->storage->device, dy->dtype, src->ndim, src->shape);
    te_tensor *part = d ? te_tensor_alias(d, index->ndim, index->shape, d->stride, d->offset) : NULL;
    te_status status = !part                                                 ? call->ctx->status
                       : te_tensor_numel(part) == te_tensor_numel(d) ? TE_OK
                                                                             : te_tensor_fill(d, 0);
    if (status == TE_OK) {
        te_exec *exec = te_call_exec(call, index);
        te_view out = te_tensor_view(part), from = te_tensor_view(dy), at = te_tensor_view(index);
        status = te_call_kernel(call, exec, exec->backend->gather(exec, &out, &from, &at, (int)call->memo[0]));
    }
    te_tensor_release(part);
    if (status == TE_OK) return te_grad_give(call, 2, d);
    te_tensor_release(d);
    return status;
}

/* The index of slices spread over the other dimensions, of the shape of src; NULL: it does not fit. */
static te_tensor *spread_index(te_call *call, int dim)
{
    te_tensor *x = call->in[0], *index = call->in[1], *src = call->in[2];
    int64_t stride[TE_MAX_DIMS] = {0};
    bool fits = index->ndim == 1 && src->ndim == x->ndim;
    for (int i = 0; i < x->ndim && fits; i++) fits = src->shape[i] == (i == dim ? index->shape[0] : x->shape[i]);
    if (!fits) {
        te_call_fail(call, TE_ERROR_ARGUMENT,
                     "index %s and src %s do not fit x %s: src has x's shape, dimension %lld that of index",
                     TE_SHAPE_TEXT(index), TE_SHAPE_TEXT(src), TE_SHAPE_TEXT(x), te_counted(call->ctx, dim));
        return NULL;
    }
    stride[dim] = index->stride[0];
    return te_tensor_alias(index, x->ndim, src->shape, stride, index->offset);
}

/* index_add(x, dim, index, src): scatter_add with the index spread over the other dimensions. */
static te_status index_add_forward(te_call *call)
{
    te_tensor *x = call->in[0], *src = call->in[2];
    int dim = te_call_dim(call, (int64_t)call->attr[0].number, x);
    te_tensor *spread = dim < 0 || check_dtypes(call, true) != TE_OK ? NULL : spread_index(call, dim);
    if (!spread) return call->ctx->status;
    te_arg args[] = {TE_A_TENSOR(x), TE_A_NUMBER(dim), TE_A_TENSOR(spread), TE_A_TENSOR(src)};
    te_status status = call->inplace
                           ? te_op_run_inplace(call->ctx, te_op_find(call->ctx, "scatter_add"), args, 4)
                           : te_call_delegate(call, "scatter_add", 4, args);
    if (call->inplace && status == TE_OK) call->out[0] = te_tensor_retain(call->inplace);
    te_tensor_release(spread);
    return status;
}

/* y[… index …] = src along dim, where `index` has src's shape. */
static te_status put(te_call *call, te_tensor *y, te_tensor *src, te_tensor *index, int dim)
{
    te_exec *exec = te_call_exec(call, index);
    te_view to = te_tensor_view(y), from = te_tensor_view(src), at = te_tensor_view(index);
    return te_call_kernel(call, exec, exec->backend->scatter(exec, &to, &from, &at, dim));
}

static te_status index_copy_forward(te_call *call)
{
    te_tensor *x = call->in[0], *src = call->in[2];
    int dim = te_call_dim(call, (int64_t)call->attr[0].number, x);
    if (dim < 0 || check_dtypes(call, false) != TE_OK) return call->ctx->status;
    te_tensor *spread = spread_index(call, dim), *part = NULL;
    if (!spread) return call->ctx->status;
    te_tensor *y = call->out[0] = call->inplace ? te_tensor_retain(call->inplace) : te_tensor_clone_data(x);
    if (y) part = own_beside(y, te_tensor_retain(src));
    if (part) spread = own_beside(y, spread);
    te_status status = part && spread ? TE_OK : call->ctx->status;
    if (status == TE_OK && call->inplace) te_tensor_written(y);
    if (status == TE_OK) status = put(call, y, part, spread, dim);
    te_tensor_release(part);
    call->memo[0] = dim;
    if (status == TE_OK && call->record && te_call_save(call, spread) < 0) status = call->ctx->status;
    te_tensor_release(spread);
    return status;
}

static te_status index_copy_backward(te_call *call)
{
    te_tensor *index = call->saved[0], *dy = call->dout[0];
    int dim = (int)call->memo[0];
    te_status status = TE_OK;
    if (te_grad_wanted(call, 2)) {
        te_tensor *d = te_op_gather(call->ctx, dy, dim, index);
        status = d ? te_grad_give(call, 2, d) : call->ctx->status;
    }
    if (status != TE_OK || !te_grad_wanted(call, 0)) return status;
    int64_t none[TE_MAX_DIMS] = {0}, one = 1;
    te_tensor *d = te_tensor_clone_data(dy), *zero = te_tensor_new(call->ctx, dy->storage->device, dy->dtype, 1, &one);
    bool filled = zero && te_tensor_fill(zero, 0) == TE_OK;
    te_tensor *zeros = filled ? te_tensor_alias(zero, index->ndim, index->shape, none, zero->offset) : NULL;
    status = d && zeros ? put(call, d, zeros, index, dim) : call->ctx->status;
    te_tensor_release(zeros);
    te_tensor_release(zero);
    if (status == TE_OK) return te_grad_give(call, 0, d);
    te_tensor_release(d);
    return status;
}

const te_op_def te_ops_scatter[] = {
    {.signature = "scatter_add(x, dim: dim, index, src)",
     .doc = "x with the elements of src added at positions of dim: y[...index[...i...]...] += src[...i...], in the "
            "order of src. index counts from 0.",
     .flags = TE_OP_METHOD | TE_OP_INPLACE,
     .forward = scatter_add_forward,
     .backward = scatter_add_backward},
    {.signature = "index_add(x, dim: dim, index, src)",
     .doc = "x with the slices of src along dim added at the positions in index {n}, counting from 0, in order.",
     .flags = TE_OP_METHOD | TE_OP_INPLACE,
     .forward = index_add_forward},
    {.signature = "index_copy(x, dim: dim, index, src)",
     .doc = "x with its slices at the positions in index {n} along dim replaced by those of src; positions count from "
            "0 and must differ.",
     .flags = TE_OP_METHOD | TE_OP_INPLACE,
     .forward = index_copy_forward,
     .backward = index_copy_backward},
    {0},
};
