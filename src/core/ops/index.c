/* index.c - picking, joining and ordering elements. Indices are data and count from 0. */
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

static te_status gather_backward(te_call *call)
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

/* --- joining ------------------------------------------------------------------------------------------------------ */

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

/* --- along one dimension ------------------------------------------------------------------------------------------ */

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

static te_status topk_backward(te_call *call) { return call->dout[0] ? gather_backward(call) : TE_OK; }

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

/* --- masks by position, draws ------------------------------------------------------------------------------------- */

/* The triangle of t that the operation is about, where the backend cuts them. */
static te_tensor *triangle_of(te_call *call, te_tensor *t)
{
    bool upper = strcmp(call->op->name, "triu") == 0;
    double most = (double)(INT64_C(1) << 40), diagonal = call->attr[0].number;
    te_exec *exec = te_call_exec(call, t);
    te_tensor *y = te_tensor_new(call->ctx, t->storage->device, t->dtype, t->ndim, t->shape);
    if (!y) return NULL;
    te_view dst = te_tensor_view(y), src = te_tensor_view(t);
    int64_t at = (int64_t)(diagonal > most ? most : diagonal < -most ? -most : diagonal);
    if (te_call_kernel(call, exec, exec->backend->triangle(exec, &dst, &src, at, upper)) == TE_OK) return y;
    te_tensor_release(y);
    return NULL;
}

/* Elsewhere row numbers enter a row program beside x. */
static te_status triangle_program(te_call *call)
{
    te_context *ctx = call->ctx;
    te_tensor *x = call->in[0];
    te_tensor *row = te_tensor_new(ctx, x->storage->device, TE_F32, 1, &x->shape[x->ndim - 2]);
    te_arg count[] = {TE_A_TENSOR(row), TE_A_NUMBER(0), TE_A_NUMBER(1)};
    te_status status = row ? te_op_run_inplace(ctx, te_op_find(ctx, "sequence"), count, 3) : ctx->status;
    bool upper = strcmp(call->op->name, "triu") == 0;
    te_arg args[] = {TE_A_TENSOR(x), TE_A_TENSOR(row), TE_A_NUMBER(call->attr[0].number)};
    if (status == TE_OK) status = te_call_delegate(call, upper ? "triu_row" : "tril_row", 3, args);
    te_tensor_release(row);
    return status;
}

static te_status triangle_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    if (x->ndim < 2)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "at least two dimensions are needed, not %s", TE_SHAPE_TEXT(x));
    bool eight_bits = x->dtype == TE_F8E4M3 || x->dtype == TE_F8E5M2; /* programs give float32 */
    if (eight_bits || !te_call_exec(call, x)->backend->triangle) return triangle_program(call);
    call->out[0] = triangle_of(call, x);
    return call->out[0] ? TE_OK : call->ctx->status;
}

static te_status triangle_backward(te_call *call)
{
    te_tensor *dx = triangle_of(call, call->dout[0]);
    return dx ? te_grad_give(call, 0, dx) : call->ctx->status;
}

static te_status multinomial_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    int64_t n = (int64_t)call->attr[0].number, shape[2];
    if (x->ndim < 1 || x->ndim > 2)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "weights must be {classes} or {rows, classes}, not %s",
                            TE_SHAPE_TEXT(x));
    if (n < 1) return te_call_fail(call, TE_ERROR_ARGUMENT, "n = %lld draws", (long long)n);
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = n;
    te_tensor *y = call->out[0] = te_tensor_new(call->ctx, x->storage->device, TE_I64, x->ndim, shape);
    if (!y) return call->ctx->status;
    te_exec *exec = te_call_exec(call, x);
    te_view out = te_tensor_view(y), src = te_tensor_view(x);
    te_rng rng = te_context_draw(call->ctx, (uint64_t)te_tensor_numel(y));
    return te_call_kernel(call, exec, exec->backend->multinomial(exec, &out, &src, call->attr[1].number != 0, rng));
}

#define ROW_MASK (TE_OP_HIDDEN)

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
     .backward = gather_backward},
    {.signature = "index_select(x, dim: dim, index)",
     .doc = "The positions along dim that index {n} lists, counting from 0.",
     .flags = TE_OP_METHOD,
     .forward = index_select_forward},
    {.signature = "cat(list: tensors, dim: dim = 0)",
     .doc = "Tensors joined along dim.",
     .forward = cat_forward,
     .backward = cat_backward},
    {.signature = "stack(list: tensors, dim: dim = 0)",
     .doc = "Tensors of one shape joined along a new dimension.",
     .forward = stack_forward,
     .backward = stack_backward},
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
    {.signature = "tril(x, diagonal: int = 0)",
     .doc = "x with zeros above the diagonal (shifted right by `diagonal`).",
     .flags = TE_OP_METHOD,
     .forward = triangle_forward,
     .backward = triangle_backward},
    {.signature = "triu(x, diagonal: int = 0)",
     .doc = "x with zeros below the diagonal (shifted right by `diagonal`).",
     .flags = TE_OP_METHOD,
     .forward = triangle_forward,
     .backward = triangle_backward},
    {.signature = "tril_row(x, row; diagonal: number = 0)",
     .doc = "Lower triangle, given the row numbers.",
     .flags = ROW_MASK | TE_OP_LASTROW,
     .rows = "row",
     .formula = "y = where(column() <= row + diagonal, x, 0)"},
    {.signature = "triu_row(x, row; diagonal: number = 0)",
     .doc = "Upper triangle, given the row numbers.",
     .flags = ROW_MASK | TE_OP_LASTROW,
     .rows = "row",
     .formula = "y = where(column() >= row + diagonal, x, 0)"},
    {.signature = "multinomial(x, n: int = 1, replacement: bool = false)",
     .doc = "n class ids (from 0, int64) per row of x, drawn with the row as weights.",
     .flags = TE_OP_METHOD | TE_OP_NOGRAD,
     .forward = multinomial_forward},
    {0},
};
