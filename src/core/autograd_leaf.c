/* autograd_leaf.c - the gradients that tensors hold: grad, and main_grad of parameters in smaller dtypes. */
#include "autograd.h"

bool te_tensor_requires_grad(const te_tensor *t) { return t && te_needs_grad(t); }
te_tensor *te_tensor_grad(const te_tensor *t) { return t ? t->grad : NULL; }

te_status te_tensor_set_requires_grad(te_tensor *t, bool on)
{
    if (!t) return TE_ERROR_ARGUMENT;
    if (on && !te_dtype_has_gradient(t->dtype))
        return te_fail(t->ctx, TE_ERROR_ARGUMENT, "requires_grad: a tensor of %s has no gradient",
                       te_dtype_name(t->dtype));
    if (t->node) {
        if (on) return TE_OK;
        return te_fail(t->ctx, TE_ERROR_ARGUMENT, "requires_grad: the tensor is a result; use detach()");
    }
    t->requires_grad = on;
    return TE_OK;
}

te_tensor *te_tensor_main_grad(const te_tensor *t) { return t ? t->main_grad : NULL; }

te_tensor *te_tensor_gradient(const te_tensor *t) { return t->main_grad ? t->main_grad : t->grad; }

te_status te_tensor_zero_gradient(te_tensor *t)
{
    te_status status = te_tensor_set_grad(t, NULL);
    return status == TE_OK && t->main_grad ? te_tensor_fill(t->main_grad, 0) : status;
}

/* Replaces *slot by `grad`: as a tensor of the slot's own, on the same memory and outside the graph. What a gradient
 * holds in its turn was therefore always put there later, so tensors and gradients never hold each other in a circle,
 * which nobody would free. */
static te_status own_gradient(te_tensor **slot, te_tensor *grad)
{
    te_tensor *own = grad ? te_tensor_alias(grad, grad->ndim, grad->shape, grad->stride, grad->offset) : NULL;
    if (grad && !own) return grad->ctx->status;
    te_tensor_release(*slot);
    *slot = own;
    return TE_OK;
}

static te_status check_context(te_tensor *t, const te_tensor *grad, const char *name)
{
    if (!grad || grad->ctx == t->ctx) return TE_OK;
    return te_fail(t->ctx, TE_ERROR_ARGUMENT, "%s: a tensor of another context", name);
}

te_status te_tensor_set_main_grad(te_tensor *t, te_tensor *grad)
{
    if (!t) return TE_ERROR_ARGUMENT;
    if (check_context(t, grad, "main_grad") != TE_OK) return t->ctx->status;
    bool fits = !grad || (te_same_shape(t, grad) && (grad->dtype == t->dtype || grad->dtype == TE_F32) &&
                          grad->storage->device == t->storage->device);
    if (!fits)
        return te_fail(t->ctx, TE_ERROR_ARGUMENT,
                       "main_grad: %s of %s on %s for a tensor %s of %s on %s; its dtype or float32 is needed",
                       TE_SHAPE_TEXT(grad), te_dtype_name(grad->dtype), te_tensor_device(grad), TE_SHAPE_TEXT(t),
                       te_dtype_name(t->dtype), te_tensor_device(t));
    const char *why = grad ? te_tensor_unwritable(grad) : NULL;
    if (why) return te_fail(t->ctx, TE_ERROR_ARGUMENT, "main_grad: %s", why);
    if (grad && (t->node || grad == t || te_needs_grad(grad) || !te_tensor_contiguous(grad)))
        return te_fail(t->ctx, TE_ERROR_ARGUMENT,
                       "main_grad: contiguous memory outside the graph is needed, of a leaf");
    return own_gradient(&t->main_grad, grad);
}

te_status te_tensor_set_grad(te_tensor *t, te_tensor *grad)
{
    if (!t) return TE_ERROR_ARGUMENT;
    if (check_context(t, grad, "grad") != TE_OK) return t->ctx->status;
    if (grad &&
        (!te_same_shape(t, grad) || grad->dtype != t->dtype || grad->storage->device != t->storage->device))
        return te_fail(t->ctx, TE_ERROR_ARGUMENT, "grad: %s of %s on %s for a tensor %s of %s on %s",
                       TE_SHAPE_TEXT(grad), te_dtype_name(grad->dtype), te_tensor_device(grad), TE_SHAPE_TEXT(t),
                       te_dtype_name(t->dtype), te_tensor_device(t));
    if (grad == t) return te_fail(t->ctx, TE_ERROR_ARGUMENT, "grad: a tensor cannot be its own gradient");
    return own_gradient(&t->grad, grad);
}
