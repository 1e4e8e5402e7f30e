/* arrange.c - elements put elsewhere: chosen by a mask, turned round, with a border. */
#include "ops.h"

#include "../autograd.h"

/* --- by a mask ---------------------------------------------------------------------------------------------------- */

/* The elements of mask that are not 0: {n, dimensions}, or with flat {n} in the flattened tensor. The host reads it. */
static te_tensor *places_of(te_call *call, te_tensor *mask, bool flat)
{
    te_context *ctx = call->ctx;
    int64_t all = te_tensor_numel(mask), columns = flat ? 1 : mask->ndim, n = 0;
    te_arg ne[] = {TE_A_TENSOR(mask), TE_A_NUMBER(0)};
    te_tensor *holds = mask->dtype == TE_BOOL ? te_tensor_retain(mask) : te_op_call(ctx, "ne", 2, ne);
    te_tensor *read = holds ? te_tensor_empty(ctx, TE_BOOL, 1, &all) : NULL, *list = NULL, *places = NULL;
    unsigned char *set = read ? te_tensor_data(read) : NULL; /* a host's bytes may be others than 0 and 1 */
    if (read && te_tensor_read(holds, TE_BOOL, set) != TE_OK) {
        te_call_fail_host(call, "the mask is read");
        te_tensor_release(read);
        read = NULL;
    }
    for (int64_t i = 0; read && i < all; i++) n += set[i] != 0;
    int64_t shape[] = {n, columns};
    if (read) list = te_tensor_empty(ctx, TE_I64, flat ? 1 : 2, shape);
    int64_t *to = list ? te_tensor_data(list) : NULL;
    for (int64_t i = 0; list && i < all; i++) {
        if (!set[i]) continue;
        int64_t rest = i;
        for (int64_t k = columns - 1; k >= 0; k--) {
            to[k] = flat ? rest : rest % mask->shape[k];
            rest = flat ? 0 : rest / mask->shape[k];
        }
        to += columns;
    }
    if (list) places = te_tensor_on_device(list, mask->storage->device);
    te_tensor_release(list);
    te_tensor_release(read);
    te_tensor_release(holds);
    return places;
}

static te_status nonzero_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    return te_call_result(call, places_of(call, x, false));
}

/* t in another shape, recorded; takes t over. */
static te_tensor *shaped(te_context *ctx, const char *op, te_tensor *t, int ndim, const int64_t *shape)
{
    te_arg args[] = {TE_A_TENSOR(t), TE_A_INTS(shape, ndim)};
    te_tensor *y = t ? te_op_call(ctx, op, 2, args) : NULL;
    te_tensor_release(t);
    return y;
}

static te_status masked_select_forward(te_call *call)
{
    te_context *ctx = call->ctx;
    te_tensor *x = call->in[0], *mask = call->in[1];
    int64_t shape[TE_MAX_DIMS], line = -1;
    int ndim = x->ndim;
    memcpy(shape, x->shape, sizeof shape);
    if (mask->dtype != TE_BOOL)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "mask must be bool, not %s", te_dtype_name(mask->dtype));
    if (!te_broadcast(&ndim, shape, mask->ndim, mask->shape))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "mask %s does not fit x %s", TE_SHAPE_TEXT(mask),
                            TE_SHAPE_TEXT(x));
    te_tensor *wide = shaped(ctx, "expand", te_tensor_retain(mask), ndim, shape);
    te_tensor *places = wide ? places_of(call, wide, true) : NULL;
    te_tensor *all = places ? shaped(ctx, "expand", te_tensor_retain(x), ndim, shape) : NULL;
    int64_t n = te_tensor_numel(wide);
    all = shaped(ctx, "reshape", all, 1, n ? &line : &n);
    te_tensor *y = all ? te_op_gather(ctx, all, 0, places) : NULL;
    te_tensor_release(all);
    te_tensor_release(places);
    te_tensor_release(wide);
    return te_call_result(call, y);
}

/* --- turned round and shifted ------------------------------------------------------------------------------------- */

/* y, which it takes over, or where nothing was moved a copy, so that it shares no memory with x. */
static te_status give_moved(te_call *call, te_tensor *y)
{
    if (!y || y->storage != call->in[0]->storage) return te_call_result(call, y);
    te_tensor *own = te_op_call(call->ctx, "clone", 1, &TE_A_TENSOR(y));
    te_tensor_release(y);
    return te_call_result(call, own);
}

/* With the positions of dims, bits of memo 0, in reverse: a copy from memory that is walked backwards. */
static te_tensor *turned_round(te_call *call, te_tensor *t)
{
    te_tensor *y = te_tensor_new_like(t);
    if (!y || te_tensor_numel(t) == 0) return y;
    te_exec *exec = te_call_exec(call, t);
    te_view to = te_tensor_view(y), from = te_tensor_view(t);
    int64_t last = 0;
    for (int i = 0; i < t->ndim; i++) {
        if (!(call->memo[0] >> i & 1)) continue;
        last += (t->shape[i] - 1) * t->stride[i];
        from.stride[i] = -t->stride[i];
    }
    from.data = (char *)from.data + last * (int64_t)te_dtype_size(t->dtype);
    if (te_call_kernel(call, exec, exec->backend->copy(exec, &to, &from)) == TE_OK) return y;
    te_tensor_release(y);
    return NULL;
}

/* flip(x, dims): positions in reverse. */
static te_status flip_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    call->memo[0] = 0;
    for (int i = 0; i < call->attr[0].n; i++) {
        int dim = te_call_dim(call, call->attr[0].ints[i], x);
        if (dim < 0) return call->ctx->status;
        if (call->memo[0] >> dim & 1)
            return te_call_fail(call, TE_ERROR_ARGUMENT, "dimension %lld is named twice", te_counted(call->ctx, dim));
        call->memo[0] |= 1 << dim;
    }
    call->out[0] = turned_round(call, x);
    return call->out[0] ? TE_OK : call->ctx->status;
}

static te_status flip_backward(te_call *call)
{
    te_tensor *dx = turned_round(call, call->dout[0]);
    return dx ? te_grad_give(call, 0, dx) : call->ctx->status;
}

/* x with the last `shift` positions of dim in front; takes x over. */
static te_tensor *rolled(te_context *ctx, te_tensor *x, int dim, int64_t shift)
{
    int64_t n = x->shape[dim], front = n ? (shift % n + n) % n : 0;
    if (front == 0) return x;
    te_tensor *parts[2] = {NULL}, *y = NULL;
    for (int i = 0; i < 2; i++) {
        te_arg args[] = {TE_A_TENSOR(x), TE_A_NUMBER(dim), TE_A_NUMBER((double)(i ? 0 : n - front)),
                         TE_A_NUMBER((double)(i ? n - front : front))};
        parts[i] = te_op_call(ctx, "narrow", 4, args);
    }
    te_arg args[] = {{.kind = TE_ARG_TENSORS, .n = 2, .as.tensors = parts}, TE_A_NUMBER(dim)};
    if (parts[0] && parts[1]) y = te_op_call(ctx, "cat", 2, args);
    te_tensor_release(parts[0]);
    te_tensor_release(parts[1]);
    te_tensor_release(x);
    return y;
}

static te_status roll_forward(te_call *call)
{
    te_context *ctx = call->ctx;
    te_tensor *x = call->in[0], *y;
    const te_attr *shifts = &call->attr[0], *dims = &call->attr[1];
    int n = dims->set ? dims->n : 1;
    if (shifts->n != n)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "%d shifts for %d dimensions%s", shifts->n, n,
                            dims->set ? "" : ": without dims for the flattened tensor");
    y = te_tensor_retain(x);
    if (dims->set) {
        for (int i = 0; i < n && y; i++) {
            int dim = te_call_dim(call, dims->ints[i], x);
            te_tensor *now = y;
            y = dim < 0 ? NULL : rolled(ctx, now, dim, shifts->ints[i]);
            if (dim < 0) te_tensor_release(now);
        }
    } else if (te_tensor_numel(x)) {
        y = shaped(ctx, "reshape", y, 1, &(int64_t){-1});
        y = shaped(ctx, "reshape", y ? rolled(ctx, y, 0, shifts->ints[0]) : NULL, x->ndim, x->shape);
    }
    return give_moved(call, y);
}

/* --- border ------------------------------------------------------------------------------------------------------- */

/* What x and the padded y have in common, as a part of t, which is either; memo: how many positions are put before
 * each dimension of x. */
static te_tensor *common(te_call *call, te_tensor *t, const int64_t *x, const int64_t *y, bool of_x)
{
    int64_t shape[TE_MAX_DIMS], offset = t->offset;
    for (int i = 0; i < t->ndim; i++) {
        int64_t before = call->memo[i], first = before < 0 ? -before : 0, end = y[i] - before;
        shape[i] = (end < x[i] ? end : x[i]) - first; /* positions of x */
        if (shape[i] < 0) shape[i] = 0;
        offset += (of_x ? first : before + first) * (shape[i] ? t->stride[i] : 0);
    }
    return te_tensor_alias(t, t->ndim, shape, t->stride, offset);
}

static te_status pad_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    const te_attr *pad = &call->attr[0];
    int64_t shape[TE_MAX_DIMS];
    if (pad->n % 2 != 0 || pad->n / 2 > x->ndim)
        return te_call_fail(call, TE_ERROR_ARGUMENT,
                            "pad has %d entries, but needs two for each of the last dimensions of %s", pad->n,
                            TE_SHAPE_TEXT(x));
    for (int i = 0; i < x->ndim; i++) {
        int at = 2 * (x->ndim - 1 - i);
        int64_t before = at < pad->n ? pad->ints[at] : 0, after = at < pad->n ? pad->ints[at + 1] : 0;
        call->memo[i] = before;
        if (__builtin_add_overflow(x->shape[i], before, &shape[i]) ||
            __builtin_add_overflow(shape[i], after, &shape[i]) || shape[i] < 0)
            return te_call_fail(call, TE_ERROR_ARGUMENT, "%lld before and %lld behind %lld positions of dimension %lld",
                                (long long)before, (long long)after, (long long)x->shape[i], te_counted(call->ctx, i));
    }
    te_tensor *y = call->out[0] = te_tensor_new(call->ctx, x->storage->device, x->dtype, x->ndim, shape);
    te_status status = y ? te_tensor_fill(y, call->attr[1].number) : call->ctx->status;
    if (status != TE_OK) return status;
    te_tensor *to = common(call, y, x->shape, y->shape, false), *from = common(call, x, x->shape, y->shape, true);
    status = to && from ? te_tensor_copy_data(to, from) : call->ctx->status;
    te_tensor_release(to);
    te_tensor_release(from);
    return status;
}

static te_status pad_backward(te_call *call)
{
    const te_grad_meta *x = te_grad_input(call, 0);
    te_tensor *dy = call->dout[0];
    bool accumulate;
    te_tensor *dx = te_grad_target(call, 0, &accumulate);
    if (!dx || (!accumulate && te_tensor_fill(dx, 0) != TE_OK)) return call->ctx->status;
    te_tensor *to = common(call, dx, x->shape, dy->shape, true), *from = common(call, dy, x->shape, dy->shape, false);
    te_status status = to && from ? te_add_to(to, from) : call->ctx->status;
    te_tensor_release(to);
    te_tensor_release(from);
    return status;
}

const te_op_def te_ops_arrange[] = {
    {.signature = "nonzero(x)",
     .doc = "Positions (from 0, int64) of the elements that are not 0: {n, dimensions of x}, in order. Waits for the "
            "device.",
     .flags = TE_OP_METHOD | TE_OP_NOGRAD,
     .forward = nonzero_forward},
    {.signature = "masked_select(x, mask)",
     .doc = "The elements of x where mask (bool) is true, in order, in one dimension; x and mask broadcast. Waits for "
            "the device.",
     .flags = TE_OP_METHOD,
     .forward = masked_select_forward},
    {.signature = "flip(x, dims: dims)",
     .doc = "x with the positions along dims reversed.",
     .flags = TE_OP_METHOD,
     .forward = flip_forward,
     .backward = flip_backward},
    {.signature = "roll(x, shifts: shape, dims: dims = nil)",
     .doc = "x with its elements shifted up along dims by shifts, wrapping around at the end; without dims, in the "
            "flattened tensor.",
     .flags = TE_OP_METHOD,
     .forward = roll_forward},
    {.signature = "pad(x, pad: shape, value: number = 0)",
     .doc = "x with a border of value: pad gives how many positions to add before and after the last dimension, then "
            "the one before it, and so on; negative numbers remove positions.",
     .flags = TE_OP_METHOD,
     .forward = pad_forward,
     .backward = pad_backward},
    {0},
};
