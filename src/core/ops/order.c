/* order.c - elements in order. */
#include "../autograd.h"
#include "ops.h"

/* The positions; into values, where there are any, the elements. */
static te_tensor *order_by_kernel(te_call *call, te_tensor *x, int dim, bool descending, te_tensor *values)
{
    te_exec *exec = te_call_exec(call, x);
    te_tensor *order = te_tensor_new(call->ctx, x->storage->device, TE_I64, x->ndim, x->shape);
    te_tensor *rows = order ? te_tensor_dim_last(x, dim) : NULL, *to = rows ? te_tensor_dim_last(order, dim) : NULL;
    te_tensor *out = to && values ? te_tensor_dim_last(values, dim) : NULL;
    te_status status = to && (out || !values) ? TE_OK : call->ctx->status;
    if (status == TE_OK) {
        te_view src = te_tensor_view(rows), indices = te_tensor_view(to), sorted = src;
        if (out) sorted = te_tensor_view(out);
        status = te_call_kernel(call, exec,
                                exec->backend->sort(exec, out ? &sorted : NULL, &indices, &src, descending));
    }
    te_tensor_release(out);
    te_tensor_release(rows);
    te_tensor_release(to);
    if (status == TE_OK) return order;
    te_tensor_release(order);
    return NULL;
}

/* Positions of the elements in order along attribute 0; attribute 1: descending. Rows that a device does not take are
 * sorted by the host. *values, if wanted: the elements, where the device gives them, too. */
static te_tensor *order_of(te_call *call, int *dim, te_tensor **values)
{
    te_tensor *x = call->in[0], *order = NULL;
    if ((*dim = te_call_dim(call, (int64_t)call->attr[0].number, x)) < 0) return NULL;
    te_device *device = x->storage->device;
    bool host = device->exec.backend->host_memory, here = host || x->shape[*dim] <= UINT32_MAX;
    te_tensor *plain = te_tensor_alias(x, x->ndim, x->shape, x->stride, x->offset);
    te_tensor *near = plain ? te_tensor_on_device(plain, here ? device : te_context_device(call->ctx, "cpu")) : NULL;
    if (plain && !near) te_call_fail_host(call, "rows of 2^32 elements are sorted");
    if (near && values && here && !host) {
        *values = te_tensor_new(call->ctx, device, x->dtype, x->ndim, x->shape);
        if (!*values) te_tensor_release(near), near = NULL;
    }
    te_tensor *to = values ? *values : NULL;
    te_tensor *found = near ? order_by_kernel(call, near, *dim, call->attr[1].number != 0, to) : NULL;
    if (found) order = te_tensor_on_device(found, device);
    te_tensor_release(found);
    te_tensor_release(near);
    te_tensor_release(plain);
    return order;
}

static te_status argsort_forward(te_call *call)
{
    int dim;
    return te_call_result(call, order_of(call, &dim, NULL));
}

static te_status sort_forward(te_call *call)
{
    int dim;
    te_tensor *values = NULL;
    bool records = call->ctx->grad_enabled && te_needs_grad(call->in[0]);
    te_tensor *order = call->out[1] = order_of(call, &dim, records ? NULL : &values);
    if (order && values) return te_call_result(call, values);
    te_tensor_release(values);
    return te_call_result(call, te_op_gather(call->ctx, call->in[0], dim, order));
}

const te_op_def te_ops_order[] = {
    {.signature = "sort(x, dim: dim = -1, descending: bool = false)",
     .doc = "The values along dim in ascending order, and their positions (from 0, int64). Equal values keep their "
            "order; NaN is the largest.",
     .flags = TE_OP_METHOD,
     .outputs = "values indices",
     .forward = sort_forward},
    {.signature = "argsort(x, dim: dim = -1, descending: bool = false)",
     .doc = "The positions (from 0, int64) of te.sort.",
     .flags = TE_OP_METHOD | TE_OP_NOGRAD,
     .forward = argsort_forward},
    {0},
};
