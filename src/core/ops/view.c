/* view.c - views: new geometry on the same memory. Their gradients are views too, wherever a gradient may be shared. */
#include "ops.h"

#include "../autograd.h"

static te_status give_view(te_call *call, int ndim, const int64_t *shape, const int64_t *stride, int64_t offset)
{
    te_tensor *x = call->in[0];
    call->out[0] = te_tensor_alias(x, ndim, shape, stride, offset);
    return call->out[0] ? TE_OK : call->ctx->status;
}

/* --- reshape ------------------------------------------------------------------------------------------------------ */

/* Fills in the -1 of a wanted shape. */
static te_status complete_shape(te_call *call, const te_tensor *x, const te_attr *wanted, int64_t *shape)
{
    int64_t known = 1, n = te_tensor_numel(x);
    int open = -1;
    for (int i = 0; i < wanted->n; i++) {
        shape[i] = wanted->ints[i];
        if (shape[i] == -1 && open < 0) {
            open = i;
        } else if (shape[i] < 0 || __builtin_mul_overflow(known, shape[i], &known)) {
            goto wrong;
        }
    }
    if (open >= 0) {
        if (known == 0 || n % known) goto wrong;
        shape[open] = n / known;
        known = n;
    }
    if (known == n && te_shape_numel(wanted->n, shape, te_dtype_size(x->dtype)) == n) return TE_OK;
wrong:;
    char text[160];
    return te_call_fail(call, TE_ERROR_ARGUMENT, "%s (%lld elements) cannot take the shape %s", TE_SHAPE_TEXT(x),
                        (long long)n, te_shape_text(wanted->n, wanted->ints, text, sizeof text));
}

/* Strides of x seen in another shape; false when that needs a copy. Groups of dimensions of both shapes with equal
 * products are matched from the left; each group of x must be evenly spaced. */
static bool view_strides(const te_tensor *x, int ndim, const int64_t *shape, int64_t *stride)
{
    int64_t size[TE_MAX_DIMS], step[TE_MAX_DIMS];
    int n = 0;
    if (te_tensor_numel(x) == 0) {
        int64_t s = 1;
        for (int i = ndim - 1; i >= 0; i--) {
            stride[i] = s;
            s *= shape[i] > 0 ? shape[i] : 1;
        }
        return true;
    }
    for (int i = 0; i < x->ndim; i++) { /* join what is evenly spaced */
        if (x->shape[i] == 1) continue;
        if (n && step[n - 1] == x->stride[i] * x->shape[i]) {
            size[n - 1] *= x->shape[i];
            step[n - 1] = x->stride[i];
        } else {
            size[n] = x->shape[i];
            step[n++] = x->stride[i];
        }
    }
    int group = n - 1;
    int64_t inner = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        if (shape[i] == 1) {
            stride[i] = 1;
            continue;
        }
        if (group >= 0 && inner == size[group]) {
            group--;
            inner = 1;
        }
        if (group < 0) return false;
        stride[i] = step[group] * inner;
        inner *= shape[i];
        if (size[group] % inner) return false;
    }
    return true;
}

te_tensor *te_tensor_seen(te_tensor *t, int ndim, const int64_t *shape)
{
    int64_t stride[TE_MAX_DIMS];
    if (view_strides(t, ndim, shape, stride)) return te_tensor_alias(t, ndim, shape, stride, t->offset);
    te_tensor *copy = te_tensor_clone_data(t);
    te_tensor *seen = copy ? te_tensor_alias(copy, ndim, shape, NULL, 0) : NULL;
    te_tensor_release(copy);
    return seen;
}

static te_status reshape_to(te_call *call, const te_attr *wanted, bool may_copy)
{
    te_tensor *x = call->in[0];
    int64_t shape[TE_MAX_DIMS], stride[TE_MAX_DIMS];
    te_status status = complete_shape(call, x, wanted, shape);
    if (status != TE_OK) return status;
    if (view_strides(x, wanted->n, shape, stride)) return give_view(call, wanted->n, shape, stride, x->offset);
    if (!may_copy)
        return te_call_fail(call, TE_ERROR_ARGUMENT,
                            "%s is not laid out so that it can be seen as another shape; use reshape",
                            TE_SHAPE_TEXT(x));
    call->out[0] = te_tensor_seen(x, wanted->n, shape);
    return call->out[0] ? TE_OK : call->ctx->status;
}

static te_status view_forward(te_call *call) { return reshape_to(call, &call->attr[0], false); }
static te_status reshape_forward(te_call *call) { return reshape_to(call, &call->attr[0], true); }

static te_status reshape_backward(te_call *call)
{
    const te_grad_meta *x = te_grad_input(call, 0);
    return te_grad_give(call, 0, te_tensor_seen(call->dout[0], x->ndim, x->shape));
}

static te_status flatten_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    te_attr wanted = {.n = 0};
    if (x->ndim == 0) {
        wanted.ints[wanted.n++] = 1;
        return reshape_to(call, &wanted, true);
    }
    int first = te_call_dim(call, (int64_t)call->attr[0].number, x),
        last = te_call_dim(call, (int64_t)call->attr[1].number, x);
    if (first < 0 || last < 0) return call->ctx->status;
    if (first > last)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "first dimension %lld lies behind the last, %lld",
                            te_counted(call->ctx, first), te_counted(call->ctx, last));
    for (int i = 0; i < x->ndim; i++) {
        if (i > first && i <= last)
            wanted.ints[wanted.n - 1] *= x->shape[i];
        else
            wanted.ints[wanted.n++] = x->shape[i];
    }
    return reshape_to(call, &wanted, true);
}

static te_status squeeze_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    te_attr wanted = {.n = 0};
    int only = -1;
    if (call->attr[0].set && (only = te_call_dim(call, (int64_t)call->attr[0].number, x)) < 0)
        return call->ctx->status;
    for (int i = 0; i < x->ndim; i++)
        if (x->shape[i] != 1 || (only >= 0 && i != only)) wanted.ints[wanted.n++] = x->shape[i];
    return reshape_to(call, &wanted, true);
}

static te_status unsqueeze_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    int64_t shape[TE_MAX_DIMS], stride[TE_MAX_DIMS];
    int dim = te_dim_index((int64_t)call->attr[0].number, x->ndim + 1);
    if (dim < 0)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "dimension %lld: beside those of %s a new one is %lld to %lld",
                            te_counted(call->ctx, (int64_t)call->attr[0].number), TE_SHAPE_TEXT(x),
                            te_counted(call->ctx, 0), te_counted(call->ctx, x->ndim));
    if (x->ndim == TE_MAX_DIMS)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "a tensor has at most %d dimensions", TE_MAX_DIMS);
    for (int i = 0; i <= x->ndim; i++) {
        shape[i] = i == dim ? 1 : x->shape[i - (i > dim)];
        stride[i] = i == dim ? 1 : x->stride[i - (i > dim)];
    }
    return give_view(call, x->ndim + 1, shape, stride, x->offset);
}

/* --- order of dimensions ------------------------------------------------------------------------------------------ */

/* memo[i]: which dimension of x stands at i. */
static te_status permuted(te_call *call)
{
    te_tensor *x = call->in[0];
    int64_t shape[TE_MAX_DIMS], stride[TE_MAX_DIMS];
    for (int i = 0; i < x->ndim; i++) {
        shape[i] = x->shape[call->memo[i]];
        stride[i] = x->stride[call->memo[i]];
    }
    return give_view(call, x->ndim, shape, stride, x->offset);
}

static te_status permute_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    const te_attr *order = &call->attr[0];
    bool seen[TE_MAX_DIMS] = {false};
    if (order->n != x->ndim)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "%d dimensions named for a tensor with %d", order->n, x->ndim);
    for (int i = 0; i < order->n; i++) {
        int dim = te_call_dim(call, order->ints[i], x);
        if (dim < 0) return call->ctx->status;
        if (seen[dim])
            return te_call_fail(call, TE_ERROR_ARGUMENT, "dimension %lld is named twice", te_counted(call->ctx, dim));
        seen[dim] = true;
        call->memo[i] = dim;
    }
    return permuted(call);
}

static te_status transpose_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    int a = te_call_dim(call, (int64_t)call->attr[0].number, x),
        b = te_call_dim(call, (int64_t)call->attr[1].number, x);
    if (a < 0 || b < 0) return call->ctx->status;
    for (int i = 0; i < x->ndim; i++) call->memo[i] = i == a ? b : i == b ? a : i;
    return permuted(call);
}

static te_status permute_backward(te_call *call)
{
    const te_grad_meta *x = te_grad_input(call, 0);
    te_tensor *dy = call->dout[0];
    int64_t stride[TE_MAX_DIMS];
    for (int i = 0; i < x->ndim; i++) stride[call->memo[i]] = dy->stride[i];
    return te_grad_give(call, 0, te_tensor_alias(dy, x->ndim, x->shape, stride, dy->offset));
}

/* --- parts -------------------------------------------------------------------------------------------------------- */

/* memo: dimension, start, length. */
static te_status narrow_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    int dim = te_call_dim(call, (int64_t)call->attr[0].number, x);
    if (dim < 0) return call->ctx->status;
    int64_t start = (int64_t)call->attr[1].number, length = (int64_t)call->attr[2].number, shape[TE_MAX_DIMS];
    if (start < 0) start += x->shape[dim];
    if (start < 0 || length < 0 || start > x->shape[dim] || length > x->shape[dim] - start) {
        int64_t end, first = call->ctx->count_from;
        if (__builtin_add_overflow(start, length, &end)) end = length < 0 ? -INT64_MAX : INT64_MAX;
        return te_call_fail(call, TE_ERROR_ARGUMENT, "positions %lld to %lld of dimension %lld, which has %lld",
                            (long long)(start + first), (long long)(end - 1 + first), te_counted(call->ctx, dim),
                            (long long)x->shape[dim]);
    }
    memcpy(shape, x->shape, sizeof shape);
    shape[dim] = length;
    call->memo[0] = dim;
    call->memo[1] = start;
    call->memo[2] = length;
    return give_view(call, x->ndim, shape, x->stride, x->offset + start * x->stride[dim]);
}

static te_status select_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    int dim = te_call_dim(call, (int64_t)call->attr[0].number, x);
    if (dim < 0) return call->ctx->status;
    int64_t index = (int64_t)call->attr[1].number, shape[TE_MAX_DIMS], stride[TE_MAX_DIMS];
    if (index < 0) index += x->shape[dim];
    if (index < 0 || index >= x->shape[dim])
        return te_call_fail(call, TE_ERROR_ARGUMENT, "position %lld of dimension %lld, which has %lld",
                            te_counted(call->ctx, (int64_t)call->attr[1].number), te_counted(call->ctx, dim),
                            (long long)x->shape[dim]);
    for (int i = 0; i + 1 < x->ndim; i++) {
        shape[i] = x->shape[i + (i >= dim)];
        stride[i] = x->stride[i + (i >= dim)];
    }
    call->memo[0] = dim;
    call->memo[1] = index;
    call->memo[2] = -1;
    return give_view(call, x->ndim - 1, shape, stride, x->offset + index * x->stride[dim]);
}

/* The gradient of the whole: zeros outside the part; parts taken from one tensor gather in one buffer. */
static te_status part_backward(te_call *call)
{
    const te_grad_meta *x = te_grad_input(call, 0);
    int dim = (int)call->memo[0];
    bool accumulate;
    te_tensor *dx = te_grad_target(call, 0, &accumulate);
    if (!dx) return call->ctx->status;
    if (!accumulate && te_tensor_fill(dx, 0) != TE_OK) return call->ctx->status;
    int64_t shape[TE_MAX_DIMS], stride[TE_MAX_DIMS], offset = dx->offset + call->memo[1] * dx->stride[dim];
    int n = 0;
    for (int i = 0; i < x->ndim; i++) {
        if (i == dim && call->memo[2] < 0) continue;
        shape[n] = i == dim ? call->memo[2] : x->shape[i];
        stride[n++] = dx->stride[i];
    }
    te_tensor *part = te_tensor_alias(dx, n, shape, stride, offset);
    if (!part) return call->ctx->status;
    te_status status = te_add_to(part, call->dout[0]);
    te_tensor_release(part);
    return status;
}

static te_status expand_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    const te_attr *wanted = &call->attr[0];
    int64_t shape[TE_MAX_DIMS], stride[TE_MAX_DIMS];
    int lead = wanted->n - x->ndim;
    bool fits = lead >= 0;
    for (int i = 0; i < wanted->n && fits; i++) {
        int64_t have = i < lead ? 1 : x->shape[i - lead];
        shape[i] = wanted->ints[i] == -1 && i >= lead ? have : wanted->ints[i];
        stride[i] = i < lead || (have == 1 && shape[i] != 1) ? 0 : x->stride[i - lead];
        fits = shape[i] >= 0 && (have == shape[i] || have == 1);
    }
    if (!fits || te_shape_numel(wanted->n, shape, te_dtype_size(x->dtype)) < 0) {
        char text[160];
        return te_call_fail(call, TE_ERROR_ARGUMENT, "%s does not expand to %s", TE_SHAPE_TEXT(x),
                            te_shape_text(wanted->n, wanted->ints, text, sizeof text));
    }
    return give_view(call, wanted->n, shape, stride, x->offset);
}

static te_status expand_backward(te_call *call)
{
    bool accumulate;
    te_tensor *dx = te_grad_target(call, 0, &accumulate);
    return dx ? te_sum_to(dx, call->dout[0], 1, accumulate) : call->ctx->status;
}

/* --- identity in value -------------------------------------------------------------------------------------------- */

static te_status contiguous_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    if (te_tensor_contiguous(x)) return te_call_result(call, te_tensor_retain(x));
    call->out[0] = te_tensor_clone_data(x);
    return call->out[0] ? TE_OK : call->ctx->status;
}

static te_status pass_backward(te_call *call) { return te_grad_give(call, 0, te_tensor_retain(call->dout[0])); }

static te_status detach_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    return give_view(call, x->ndim, x->shape, x->stride, x->offset);
}

const te_op_def te_ops_view[] = {
    {.signature = "view(x, shape: shape)",
     .doc = "x in another shape of as many elements; one extent may be -1. An error where this needs a copy.",
     .flags = TE_OP_METHOD,
     .forward = view_forward,
     .backward = reshape_backward},
    {.signature = "reshape(x, shape: shape)",
     .doc = "Like view, but copies where necessary.",
     .flags = TE_OP_METHOD,
     .unit = TE_UNIT_VIEW,
     .forward = reshape_forward,
     .backward = reshape_backward},
    {.signature = "flatten(x, first: dim = 0, last: dim = -1)",
     .doc = "Dimensions first to last joined into one.",
     .flags = TE_OP_METHOD,
     .forward = flatten_forward,
     .backward = reshape_backward},
    {.signature = "squeeze(x, dim: dim = nil)",
     .doc = "x without dimensions of extent 1, or without `dim` if that has extent 1.",
     .flags = TE_OP_METHOD,
     .forward = squeeze_forward,
     .backward = reshape_backward},
    {.signature = "unsqueeze(x, dim: dim)",
     .doc = "x with a new dimension of extent 1 at `dim`.",
     .flags = TE_OP_METHOD,
     .forward = unsqueeze_forward,
     .backward = reshape_backward},
    {.signature = "permute(x, dims: dims)",
     .doc = "x with its dimensions in the given order.",
     .flags = TE_OP_METHOD,
     .forward = permute_forward,
     .backward = permute_backward},
    {.signature = "transpose(x, dim0: dim = -2, dim1: dim = -1)",
     .doc = "x with two dimensions swapped, the last two by default.",
     .flags = TE_OP_METHOD,
     .forward = transpose_forward,
     .backward = permute_backward},
    {.signature = "narrow(x, dim: dim, start: index, length: int)",
     .doc = "`length` positions along dim, from `start`.",
     .flags = TE_OP_METHOD,
     .forward = narrow_forward,
     .backward = part_backward},
    {.signature = "select(x, dim: dim, index: index)",
     .doc = "One position along dim, which is removed.",
     .flags = TE_OP_METHOD,
     .forward = select_forward,
     .backward = part_backward},
    {.signature = "expand(x, shape: shape)",
     .doc = "Dimensions of extent 1 repeated without a copy; -1 keeps an extent.",
     .flags = TE_OP_METHOD,
     .forward = expand_forward,
     .backward = expand_backward},
    {.signature = "contiguous(x)",
     .doc = "x itself, or a copy laid out row by row.",
     .flags = TE_OP_METHOD,
     .forward = contiguous_forward,
     .backward = pass_backward},
    {.signature = "detach(x)",
     .doc = "x detached from the graph, sharing its memory.",
     .flags = TE_OP_METHOD | TE_OP_NOGRAD,
     .forward = detach_forward},
    {0},
};
