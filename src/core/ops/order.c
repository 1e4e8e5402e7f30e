/* order.c - elements in order. */
#include "ops.h"

static te_tensor *positions_of(te_context *ctx, te_tensor *x, int dim, bool largest)
{
    te_arg args[] = {TE_A_TENSOR(x), TE_A_NUMBER((double)x->shape[dim]), TE_A_NUMBER(dim), TE_A_NUMBER(largest)};
    te_tensor *out[2] = {NULL};
    const te_op *topk = te_op_find(ctx, "topk");
    if (topk && te_op_run(ctx, topk, args, 4, out, 2) == TE_OK) te_tensor_release(out[0]);
    return out[1];
}

/* Where no kernel sorts: the largest of all are all in order, and so are the smallest but for NaNs, which come first
 * and are brought behind. */
static te_tensor *order_by_choice(te_context *ctx, te_tensor *x, int dim, bool descending)
{
    te_tensor *order = positions_of(ctx, x, dim, descending);
    if (!order || descending || !te_dtype_is_float(x->dtype)) return order;
    te_tensor *values = te_op_gather(ctx, x, dim, order), *last = values ? te_op_apply(ctx, "isnan", 1, &values) : NULL;
    te_tensor *behind = last ? positions_of(ctx, last, dim, false) : NULL;
    te_tensor *all = te_op_gather(ctx, order, dim, behind);
    te_tensor_release(behind);
    te_tensor_release(last);
    te_tensor_release(values);
    te_tensor_release(order);
    return all;
}

static te_tensor *order_by_kernel(te_call *call, te_tensor *x, int dim, bool descending)
{
    te_exec *exec = te_call_exec(call, x);
    te_tensor *order = te_tensor_new(call->ctx, x->storage->device, TE_I64, x->ndim, x->shape);
    te_tensor *rows = order ? te_tensor_dim_last(x, dim) : NULL, *to = rows ? te_tensor_dim_last(order, dim) : NULL;
    te_status status = to ? TE_OK : call->ctx->status;
    if (to) {
        te_view src = te_tensor_view(rows), indices = te_tensor_view(to);
        status = te_call_kernel(call, exec, exec->backend->sort(exec, &indices, &src, descending));
    }
    te_tensor_release(rows);
    te_tensor_release(to);
    if (status == TE_OK) return order;
    te_tensor_release(order);
    return NULL;
}

enum { LONGEST_BY_CHOICE = 4096 }; /* the time for which grows with the square */

/* Positions of the elements in order along attribute 0; attribute 1: descending. */
static te_tensor *order_of(te_call *call, int *dim)
{
    te_tensor *x = call->in[0], *order = NULL;
    bool descending = call->attr[1].number != 0, sorts = te_call_exec(call, x)->backend->sort != NULL;
    if ((*dim = te_call_dim(call, (int64_t)call->attr[0].number, x)) < 0) return NULL;
    te_tensor *plain = te_tensor_alias(x, x->ndim, x->shape, x->stride, x->offset);
    if (plain && !sorts && x->shape[*dim] <= LONGEST_BY_CHOICE) {
        order = order_by_choice(call->ctx, plain, *dim, descending);
    } else if (plain) {
        te_device *host = te_context_device(call->ctx, "cpu");
        te_tensor *near = sorts ? te_tensor_retain(plain) : te_tensor_on_device(plain, host);
        if (!near && !sorts) te_call_fail_host(call, "long rows are sorted");
        te_tensor *found = near ? order_by_kernel(call, near, *dim, descending) : NULL;
        order = found ? te_tensor_on_device(found, x->storage->device) : NULL;
        te_tensor_release(found);
        te_tensor_release(near);
    }
    te_tensor_release(plain);
    return order;
}

static te_status argsort_forward(te_call *call)
{
    int dim;
    return te_call_result(call, order_of(call, &dim));
}

static te_status sort_forward(te_call *call)
{
    int dim;
    te_tensor *order = call->out[1] = order_of(call, &dim);
    return te_call_result(call, te_op_gather(call->ctx, call->in[0], dim, order));
}

const te_op_def te_ops_order[] = {
    {.signature = "sort(x, dim: dim = -1, descending: bool = false)",
     .doc = "The values along dim in ascending order, and their positions (from 0, int64). Equal values keep their "
            "order; NaN is the largest. On a GPU, rows of more than 4096 are sorted by the host.",
     .flags = TE_OP_METHOD,
     .outputs = "values indices",
     .forward = sort_forward},
    {.signature = "argsort(x, dim: dim = -1, descending: bool = false)",
     .doc = "The positions (from 0, int64) of te.sort.",
     .flags = TE_OP_METHOD | TE_OP_NOGRAD,
     .forward = argsort_forward},
    {0},
};
