/* index.c - rows and elements picked by index. Indices are data and count from 0. */
#include "ops.h"

#include "../autograd.h"

#include <math.h>

static bool is_index(const te_tensor *t) { return t->dtype == TE_I64 || t->dtype == TE_I32; }

static te_status need_index(te_call *call, const char *name, const te_tensor *t)
{
    return is_index(t) ? TE_OK
                       : te_call_fail(call, TE_ERROR_ARGUMENT, "%s must be int64 or int32, not %s", name,
                                      te_dtype_name(t->dtype));
}

/* --- embedding ---------------------------------------------------------------------------------------------------- */

te_status te_embedding_rows(te_call *call, te_tensor *y, te_tensor *table, te_tensor *ids)
{
    te_exec *exec = te_call_exec(call, table);
    te_view out = te_tensor_view(y), weights = te_tensor_view(table), indices = te_tensor_view(ids);
    return te_call_kernel(call, exec, exec->backend->embedding(exec, &out, &weights, &indices));
}

te_status te_embedding_add_rows(te_call *call, te_tensor *dtable, te_tensor *dy, te_tensor *ids)
{
    te_exec *exec = te_call_exec(call, ids);
    te_view out = te_tensor_view(dtable), grad = te_tensor_view(dy), indices = te_tensor_view(ids);
    double squares;
    bool known = te_tensor_squares_before(dtable, &squares);
    te_status status = exec->backend->embedding_backward(exec, &out, &grad, &indices, known ? &squares : NULL);
    if (status == TE_OK && known && !isnan(squares)) te_tensor_note_squares(dtable, squares);
    return te_call_kernel(call, exec, status);
}

static te_status embedding_forward(te_call *call)
{
    if (is_index(call->in[0]) && !is_index(call->in[1])) { /* in PyTorch's order */
        te_tensor *ids_first = call->in[0];
        call->in[0] = call->in[1];
        call->in[1] = ids_first;
    }
    te_tensor *table = call->in[0], *ids = call->in[1];
    int64_t shape[TE_MAX_DIMS];
    te_status status = need_index(call, "ids", ids);
    if (status != TE_OK) return status;
    if (ids->ndim >= TE_MAX_DIMS)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "ids have %d dimensions, at most %d are possible", ids->ndim,
                            TE_MAX_DIMS - 1);
    if (table->ndim != 2)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "a table of {entries, width} is needed, not %s",
                            TE_SHAPE_TEXT(table));
    memcpy(shape, ids->shape, sizeof shape);
    shape[ids->ndim] = table->shape[1];
    te_dtype dtype = te_call_compute_dtype(call, table->dtype);
    te_tensor *y = call->out[0] = te_tensor_new(call->ctx, table->storage->device, dtype, ids->ndim + 1, shape);
    status = y ? te_embedding_rows(call, y, table, ids) : call->ctx->status;
    if (status == TE_OK && call->record && te_call_save(call, ids) < 0) status = call->ctx->status;
    return status;
}

static te_status embedding_backward(te_call *call)
{
    bool accumulate;
    te_tensor *ids = call->saved[0], *dtable = te_grad_target(call, 0, &accumulate);
    if (!dtable || (!accumulate && te_tensor_fill(dtable, 0) != TE_OK)) return call->ctx->status;
    return te_embedding_add_rows(call, dtable, call->dout[0], ids);
}

/* --- gather ------------------------------------------------------------------------------------------------------- */

static te_status gather_forward(te_call *call)
{
    te_tensor *x = call->in[0], *index = call->in[1];
    int dim = te_call_dim(call, (int64_t)call->attr[0].number, x);
    te_status status = dim < 0 ? call->ctx->status : need_index(call, "index", index);
    if (status != TE_OK) return status;
    bool fits = index->ndim == x->ndim;
    for (int i = 0; i < x->ndim && fits; i++) fits = i == dim || index->shape[i] <= x->shape[i];
    if (!fits)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "index %s does not fit x %s", TE_SHAPE_TEXT(index),
                            TE_SHAPE_TEXT(x));
    te_tensor *y = call->out[0] = te_tensor_new(call->ctx, x->storage->device, x->dtype, index->ndim, index->shape);
    if (!y) return call->ctx->status;
    te_exec *exec = te_call_exec(call, x);
    te_view out = te_tensor_view(y), src = te_tensor_view(x), at = te_tensor_view(index);
    call->memo[0] = dim;
    status = te_call_kernel(call, exec, exec->backend->gather(exec, &out, &src, &at, dim));
    if (status == TE_OK && call->record && te_call_save(call, index) < 0) status = call->ctx->status;
    return status;
}

/* What sums of a dtype are taken in. */
static te_dtype dtype_of_sums(te_dtype dtype)
{
    if (te_dtype_is_float(dtype)) return te_dtype_size(dtype) < te_dtype_size(TE_F32) ? TE_F32 : dtype;
    return te_dtype_size(dtype) < te_dtype_size(TE_I64) ? TE_I64 : dtype;
}

bool te_sums_are_apart(te_dtype dtype) { return dtype_of_sums(dtype) != dtype; }

te_status te_call_scatter_add(te_call *call, te_tensor *dst, te_tensor *before, te_tensor *src, te_tensor *index,
                              int dim)
{
    te_exec   *exec = te_call_exec(call, dst);
    te_dtype   dtype = dtype_of_sums(dst->dtype);
    bool       halves = exec->backend->adds_halves && dtype == TE_F32 && src->dtype == TE_BF16;
    te_tensor *sums = te_tensor_cast(before, dtype);
    te_tensor *terms = sums ? te_tensor_cast(src, halves ? TE_BF16 : dtype) : NULL;
    te_status  status = terms ? TE_OK : call->ctx->status;
    if (terms) {
        te_view to = te_tensor_view(sums), from = te_tensor_view(terms), at = te_tensor_view(index);
        status = te_call_kernel(call, exec, exec->backend->scatter_add(exec, &to, &from, &at, dim));
    }
    if (status == TE_OK && dtype != dst->dtype) status = te_tensor_copy_data(dst, sums);
    te_tensor_release(terms);
    te_tensor_release(sums);
    return status;
}

te_status te_gather_backward(te_call *call)
{
    bool accumulate;
    te_tensor *dx = te_grad_target(call, 0, &accumulate);
    if (!dx || (!accumulate && te_tensor_fill(dx, 0) != TE_OK)) return call->ctx->status;
    return te_call_scatter_add(call, dx, dx, call->dout[0], call->saved[0], (int)call->memo[0]);
}

/* index_select(x, dim, index): gather with the index spread over the other dimensions. */
static te_status index_select_forward(te_call *call)
{
    te_tensor *x = call->in[0], *index = call->in[1];
    int dim = te_call_dim(call, (int64_t)call->attr[0].number, x);
    if (dim < 0) return call->ctx->status;
    if (index->ndim != 1)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "index must have one dimension, not %d", index->ndim);
    int64_t shape[TE_MAX_DIMS], stride[TE_MAX_DIMS] = {0};
    memcpy(shape, x->shape, sizeof shape);
    shape[dim] = index->shape[0];
    stride[dim] = index->stride[0];
    te_tensor *spread = te_tensor_alias(index, x->ndim, shape, stride, index->offset);
    if (!spread) return call->ctx->status;
    te_arg args[] = {TE_A_TENSOR(x), TE_A_NUMBER(dim), TE_A_TENSOR(spread)};
    te_status status = te_call_delegate(call, "gather", 3, args);
    te_tensor_release(spread);
    return status;
}

const te_op_def te_ops_index[] = {
    {.signature = "embedding(table, ids)",
     .doc = "Rows of table {entries, width} selected by ids {...}: {..., width}, in the compute dtype of "
            "te.autocast, otherwise the table's. ids may come first.",
     .unit = TE_UNIT_GATHER,
     .forward = embedding_forward,
     .backward = embedding_backward},
    {.signature = "gather(x, dim: dim, index)",
     .doc = "y[...i...] = x[...index[...i...]...] along dim; index counts from 0.",
     .flags = TE_OP_METHOD,
     .forward = gather_forward,
     .backward = te_gather_backward},
    {.signature = "index_select(x, dim: dim, index)",
     .doc = "The positions along dim that index {n} lists, counting from 0.",
     .flags = TE_OP_METHOD,
     .forward = index_select_forward},
    {0},
};
