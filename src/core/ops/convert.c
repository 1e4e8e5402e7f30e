/* convert.c - other dtypes, other devices. */
#include "ops.h"

#include "../autograd.h"

static te_status cast_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    int dtype = (int)call->attr[0].number;
    if (dtype < 0 || dtype >= TE_DTYPE_COUNT) return te_call_fail(call, TE_ERROR_ARGUMENT, "unknown dtype %d", dtype);
    if ((te_dtype)dtype == x->dtype) return te_call_result(call, te_tensor_retain(x));
    call->out[0] = te_tensor_cast(x, (te_dtype)dtype);
    if (!te_dtype_has_gradient((te_dtype)dtype)) call->record = false;
    return call->out[0] ? TE_OK : call->ctx->status;
}

static te_status cast_backward(te_call *call) { return te_grad_give(call, 0, te_tensor_retain(call->dout[0])); }

static te_status to_device_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    te_device *device = te_context_device(call->ctx, call->attr[0].text);
    if (!device) return call->ctx->status;
    if (device == x->storage->device) return te_call_result(call, te_tensor_retain(x));
    call->out[0] = te_tensor_on_device(x, device);
    return call->out[0] ? TE_OK : call->ctx->status;
}

static te_status to_device_backward(te_call *call)
{
    return te_grad_give(call, 0, te_tensor_on_device(call->dout[0], te_grad_input(call, 0)->device));
}

const te_op_def te_ops_convert[] = {
    {.signature = "cast(x, dtype: dtype)",
     .doc = "x in another dtype: floating point rounds to nearest, ties to even; integers drop the fraction; x "
            "itself when it has that dtype. Gradients end at integers, bool and float8.",
     .flags = TE_OP_METHOD,
     .forward = cast_forward,
     .backward = cast_backward},
    {.signature = "to_device(x, device: device)",
     .doc = "x on another device, connected to x in the graph; x itself when it is already there.",
     .flags = TE_OP_METHOD,
     .forward = to_device_forward,
     .backward = to_device_backward},
    {0},
};
