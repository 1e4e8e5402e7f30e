/* reduce.c - reductions over all or some dimensions.
 *
 * sum, mean, all and any add in place of the elements' order; the others are row programs: the reduced dimensions are
 * moved last, joined into one row by recorded views, and the row op does the rest, gradient included.
 */
#include "ops.h"

#include "../autograd.h"

#include <math.h>

/* attributes that every reduction has first: dim: dims, keepdim: bool */
enum { DIM, KEEPDIM };

/* Which dimensions are reduced: all when none are named. */
static te_status reduced_dims(te_call *call, const te_tensor *x, bool *reduced)
{
    const te_attr *dims = &call->attr[DIM];
    bool all = !dims->set;
    for (int i = 0; i < x->ndim; i++) reduced[i] = all;
    for (int i = 0; !all && i < dims->n; i++) {
        int dim = te_dim_index(dims->ints[i], x->ndim);
        if (dim < 0 || reduced[dim])
            return te_call_fail(call, TE_ERROR_ARGUMENT, "dimension %lld %s in a tensor with %d dimensions",
                                te_counted(call->ctx, dims->ints[i]),
                                dim < 0 ? "is not" : "is named twice", x->ndim);
        reduced[dim] = true;
    }
    return TE_OK;
}

/* Shape of the result, and with `spread` the shape that keeps reduced dimensions as 1. */
static int result_shape(const te_tensor *x, const bool *reduced, bool keepdim, int64_t *shape)
{
    int n = 0;
    for (int i = 0; i < x->ndim; i++) {
        if (!reduced[i])
            shape[n++] = x->shape[i];
        else if (keepdim)
            shape[n++] = 1;
    }
    return n;
}

/* --- sum, mean ---------------------------------------------------------------------------------------------------- */

static bool whole(te_dtype dtype) { return dtype == TE_I64 || dtype == TE_I32 || dtype == TE_U8 || dtype == TE_BOOL; }

/* 8 bits hold the values of a sum no better than those of any other operation. */
static te_dtype sum_dtype(te_dtype dtype, bool mean)
{
    if (dtype == TE_F8E4M3 || dtype == TE_F8E5M2) return TE_F32;
    return !whole(dtype) ? dtype : mean ? TE_F32 : TE_I64;
}

/* Of x, in call->out[0]. */
static te_status add_up(te_call *call, te_tensor *x, bool mean)
{
    bool reduced[TE_MAX_DIMS];
    int64_t wide[TE_MAX_DIMS], shape[TE_MAX_DIMS], count = 1;
    te_status status = reduced_dims(call, x, reduced);
    if (status != TE_OK) return status;
    for (int i = 0; i < x->ndim; i++) count *= reduced[i] ? x->shape[i] : 1;
    te_dtype dtype = sum_dtype(x->dtype, mean);
    te_tensor *y = te_tensor_new(call->ctx, x->storage->device, dtype, result_shape(x, reduced, true, wide), wide);
    if (!y) return call->ctx->status;
    double scale = mean ? 1.0 / (double)count : 1.0;
    status = mean && count == 0 ? te_tensor_fill(y, NAN) : te_sum_to(y, x, scale, false);
    if (status == TE_OK && !(call->attr[KEEPDIM].number != 0)) {
        int n = result_shape(x, reduced, false, shape);
        y->ndim = n; /* nobody has seen it yet */
        int64_t step = 1;
        for (int i = n - 1; i >= 0; i--) {
            y->shape[i] = shape[i];
            y->stride[i] = step;
            step *= shape[i] > 0 ? shape[i] : 1;
        }
    }
    call->out[0] = y;
    for (int i = 0; i < x->ndim; i++) call->memo[i] = reduced[i];
    call->attr[KEEPDIM].ints[0] = mean ? count : 1;
    return status;
}

static te_status sum_forward(te_call *call) { return add_up(call, call->in[0], false); }
static te_status mean_forward(te_call *call) { return add_up(call, call->in[0], true); }

/* Truth is counted, which is exact and needs no order of elements. */
static te_status compare_count(te_call *call, bool all)
{
    te_context *ctx = call->ctx;
    te_tensor *x = call->in[0];
    te_arg nonzero[] = {TE_A_TENSOR(x), TE_A_NUMBER(0)};
    te_tensor *truth = x->dtype == TE_BOOL ? te_tensor_retain(x) : te_op_call(ctx, "ne", 2, nonzero);
    if (!truth) return ctx->status;
    te_status status = add_up(call, truth, false);
    te_tensor *count = call->out[0];
    call->out[0] = NULL;
    if (status == TE_OK) {
        int64_t results = te_tensor_numel(count), each = results ? te_tensor_numel(truth) / results : 0;
        te_arg compare[] = {TE_A_TENSOR(count), TE_A_NUMBER(all ? (double)each : 0)};
        status = te_call_result(call, te_op_call(ctx, all ? "eq" : "gt", 2, compare));
    }
    te_tensor_release(count);
    te_tensor_release(truth);
    return status;
}

static te_status all_forward(te_call *call) { return compare_count(call, true); }
static te_status any_forward(te_call *call) { return compare_count(call, false); }

/* Every element of a group receives the group's gradient (over the count): a broadcast view, nothing is written. */
static te_status sum_backward(te_call *call)
{
    const te_grad_meta *x = te_grad_input(call, 0);
    te_tensor *dy = te_tensor_retain(call->dout[0]);
    int64_t count = call->attr[KEEPDIM].ints[0], stride[TE_MAX_DIMS];
    if (count != 1) {
        te_arg scale[] = {TE_A_TENSOR(dy), TE_A_NUMBER(1.0 / (double)count)};
        te_tensor *scaled = te_op_call(call->ctx, "mul", 2, scale);
        te_tensor_release(dy);
        if (!(dy = scaled)) return call->ctx->status;
    }
    bool keepdim = call->attr[KEEPDIM].number != 0;
    for (int i = 0, k = 0; i < x->ndim; i++) {
        bool reduced = call->memo[i];
        stride[i] = reduced ? 0 : dy->stride[k];
        k += !reduced || keepdim;
    }
    te_tensor *spread = te_tensor_alias(dy, x->ndim, x->shape, stride, dy->offset);
    te_tensor_release(dy);
    return te_grad_give(call, 0, spread);
}

/* --- the others --------------------------------------------------------------------------------------------------- */

/* x with the reduced dimensions joined into a last one, recorded. */
static te_tensor *rows_of(te_context *ctx, te_tensor *x, const bool *reduced)
{
    int64_t order[TE_MAX_DIMS], shape[TE_MAX_DIMS];
    int n = 0, kept;
    for (int i = 0; i < x->ndim; i++)
        if (!reduced[i]) order[n++] = i;
    kept = n;
    int64_t row = 1;
    for (int i = 0; i < x->ndim; i++) {
        if (!reduced[i]) continue;
        order[n++] = i;
        row *= x->shape[i];
    }
    if (kept == TE_MAX_DIMS) { /* there is no room for a row of one element */
        te_fail(ctx, TE_ERROR_ARGUMENT, "a reduction over no dimension of a tensor with %d dimensions", TE_MAX_DIMS);
        return NULL;
    }
    for (int i = 0; i < kept; i++) shape[i] = x->shape[order[i]];
    shape[kept] = row;
    te_arg permute[] = {TE_A_TENSOR(x), TE_A_INTS(order, n)};
    te_tensor *moved = te_op_call(ctx, "permute", 2, permute);
    te_arg reshape[] = {TE_A_TENSOR(moved), TE_A_INTS(shape, kept + 1)};
    te_tensor *rows = moved ? te_op_call(ctx, "reshape", 2, reshape) : NULL;
    te_tensor_release(moved);
    return rows;
}

static te_status reduce_rows(te_call *call, const char *row_op, int n_extra, const te_arg *extra)
{
    te_context *ctx = call->ctx;
    te_tensor *x = call->in[0];
    bool reduced[TE_MAX_DIMS];
    int64_t shape[TE_MAX_DIMS];
    te_status status = reduced_dims(call, x, reduced);
    if (status != TE_OK) return status;
    te_tensor *rows = rows_of(ctx, x, reduced);
    te_arg args[4] = {TE_A_TENSOR(rows)};
    for (int i = 0; i < n_extra; i++) args[1 + i] = extra[i];
    te_tensor *y = rows ? te_op_call(ctx, row_op, 1 + n_extra, args) : NULL;
    te_tensor_release(rows);
    if (y && call->attr[KEEPDIM].number != 0) {
        te_arg reshape[] = {TE_A_TENSOR(y), TE_A_INTS(shape, result_shape(x, reduced, true, shape))};
        te_tensor *kept = te_op_call(ctx, "reshape", 2, reshape);
        te_tensor_release(y);
        y = kept;
    }
    return te_call_result(call, y);
}

/* Of nothing there is no largest value, and integers have no infinity to stand for it. */
static te_status extreme_rows(te_call *call, const char *row_op)
{
    const te_tensor *x = call->in[0];
    bool reduced[TE_MAX_DIMS];
    te_status status = reduced_dims(call, x, reduced);
    for (int i = 0; i < x->ndim && status == TE_OK; i++)
        if (reduced[i] && x->shape[i] == 0)
            status = te_call_fail(call, TE_ERROR_ARGUMENT, "%s has no elements%s", TE_SHAPE_TEXT(x),
                                  call->attr[DIM].set ? " along the dimension" : "");
    return status == TE_OK ? reduce_rows(call, row_op, 0, NULL) : status;
}

static te_status max_forward(te_call *call) { return extreme_rows(call, "max_row"); }
static te_status min_forward(te_call *call) { return extreme_rows(call, "min_row"); }
static te_status var_forward(te_call *call)
{
    return reduce_rows(call, "var_row", 1, &TE_A_NUMBER(call->attr[2].number));
}

static te_status std_forward(te_call *call)
{
    return reduce_rows(call, "std_row", 1, &TE_A_NUMBER(call->attr[2].number));
}
static te_status logsumexp_forward(te_call *call) { return reduce_rows(call, "logsumexp_row", 0, NULL); }

static te_status norm_forward(te_call *call)
{
    double p = call->attr[2].number;
    if (p == 2) return reduce_rows(call, "norm2_row", 0, NULL);
    if (p == 1) return reduce_rows(call, "norm1_row", 0, NULL);
    if (p == HUGE_VAL) return reduce_rows(call, "norm_inf_row", 0, NULL);
    if (p > 0) return reduce_rows(call, "norm_p_row", 1, &TE_A_NUMBER(p));
    return te_call_fail(call, TE_ERROR_ARGUMENT, "p must be positive, not %g", p);
}

#define REDUCTION TE_OP_METHOD
#define ROW       (TE_OP_LASTROW | TE_OP_HIDDEN)

const te_op_def te_ops_reduce[] = {
    {.signature = "sum(x, dim: dims = nil, keepdim: bool = false)",
     .doc = "Sum over dim (all dimensions when absent); integers give int64.",
     .flags = REDUCTION,
     .forward = sum_forward,
     .backward = sum_backward},
    {.signature = "mean(x, dim: dims = nil, keepdim: bool = false)",
     .doc = "Mean over dim (all dimensions when absent); NaN where there are no elements.",
     .flags = REDUCTION,
     .forward = mean_forward,
     .backward = sum_backward},
    {.signature = "max(x, dim: dims = nil, keepdim: bool = false)",
     .doc = "Largest value over dim; NaN when there is one. Equal values share the gradient. See argmax for the "
            "position.",
     .flags = REDUCTION,
     .forward = max_forward},
    {.signature = "min(x, dim: dims = nil, keepdim: bool = false)",
     .doc = "Smallest value over dim; NaN when there is one. Equal values share the gradient.",
     .flags = REDUCTION,
     .forward = min_forward},
    {.signature = "var(x, dim: dims = nil, keepdim: bool = false; correction: number = 1)",
     .doc = "Variance over dim: sum of squared deviations divided by max(count - correction, 0).",
     .flags = REDUCTION,
     .forward = var_forward},
    {.signature = "std(x, dim: dims = nil, keepdim: bool = false; correction: number = 1)",
     .doc = "Standard deviation over dim, the square root of te.var.",
     .flags = REDUCTION,
     .forward = std_forward},
    {.signature = "logsumexp(x, dim: dims = nil, keepdim: bool = false)",
     .doc = "log(sum(exp(x))) over dim, shifted by the maximum.",
     .flags = REDUCTION,
     .forward = logsumexp_forward},
    {.signature = "norm(x, dim: dims = nil, keepdim: bool = false; p: number = 2)",
     .doc = "p-norm over dim, for p above 0; p = math.huge: the largest magnitude.",
     .flags = REDUCTION,
     .forward = norm_forward,
     .domain = "0.3 2"},
    {.signature = "all(x, dim: dims = nil, keepdim: bool = false)",
     .doc = "Whether every value is not 0.",
     .flags = REDUCTION | TE_OP_NOGRAD,
     .forward = all_forward},
    {.signature = "any(x, dim: dims = nil, keepdim: bool = false)",
     .doc = "Whether any value is not 0.",
     .flags = REDUCTION | TE_OP_NOGRAD,
     .forward = any_forward},
    {.signature = "max_row(x)", .doc = "Maximum of a row.", .flags = ROW, .formula = "y = rowmax(x)"},
    {.signature = "min_row(x)", .doc = "Minimum of a row.", .flags = ROW, .formula = "y = rowmin(x)"},
    {.signature = "var_row(x; correction: number = 1)",
     .doc = "Variance of a row.",
     .flags = ROW | TE_OP_FLOAT,
     .formula = "d = x - rowmean(x); y = rowsum(d * d) / max(n - correction, 0)"},
    {.signature = "std_row(x; correction: number = 1)",
     .doc = "Standard deviation of a row.",
     .flags = ROW | TE_OP_FLOAT,
     .formula = "m = rowmean(x); d = x - m; y = sqrt(rowsum(d * d) / max(n - correction, 0))",
     .gradient = "dx = where(y == 0, 0, dy / y * (x - m) / max(n - correction, 0))"},
    {.signature = "logsumexp_row(x)",
     .doc = "Logarithm of the sum of exponentials of a row.",
     .flags = ROW | TE_OP_FLOAT,
     .formula = "m = rowmax(x); s = where(isfinite(m), m, 0); t = rowsum(exp(x - s)); y = s + log(t)",
     .gradient = "dx = where(x == -inf, 0, dy * exp(x - s) / t)"},
    {.signature = "norm1_row(x)",
     .doc = "1-norm of a row.",
     .flags = ROW | TE_OP_FLOAT,
     .formula = "y = rowsum(abs(x))"},
    {.signature = "norm2_row(x)",
     .doc = "2-norm of a row.",
     .flags = ROW | TE_OP_FLOAT,
     .formula = "y = sqrt(rowsum(x * x))",
     .gradient = "dx = where(y == 0, 0, dy * x / y)"},
    {.signature = "norm_inf_row(x)",
     .doc = "Largest magnitude of a row.",
     .flags = ROW | TE_OP_FLOAT,
     .formula = "y = max(rowmax(abs(x)), 0)"},
    {.signature = "norm_p_row(x; p: number = 2)",
     .doc = "p-norm of a row.",
     .flags = ROW | TE_OP_FLOAT,
     .formula = "y = rowsum(abs(x) ^ p) ^ (1 / p)",
     .gradient = "dx = where(min(abs(x), y) == 0, 0, dy * sign(x) * (abs(x) / y) ^ (p - 1))"},
    {0},
};
