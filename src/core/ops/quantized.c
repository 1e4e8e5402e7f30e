/* quantized.c - a linear layer under a recipe, as an operation of its own. Groups make the same products themselves. */
#include "ops.h"

#include "../autograd.h"
#include "../product.h"
#include "../product_quantized.h"
#include "../quantized_parameter.h"

static te_product_saved *saved_of(const te_call *call) { return (te_product_saved *)(uintptr_t)call->pointer; }

static void release_saved(te_call *call)
{
    te_product_saved *saved = saved_of(call);
    te_mem mem = call->ctx->mem;
    te_product_saved_close(saved);
    te_mem_free(&mem, saved, sizeof *saved);
    call->pointer = NULL;
}

static te_status without_recipe(te_call *call, te_recipe_state *state)
{
    te_arg args[] = {TE_A_TENSOR(call->in[0]), TE_A_TENSOR(call->in[1]),
                     call->in[2] ? TE_A_TENSOR(call->in[2]) : TE_A_ABSENT};
    te_status status = TE_OK;
    if (te_recipe_calibrates(state)) {
        te_dtype compute = te_product_dtype(call->ctx, call->in[0]->dtype, call->in[1]->dtype);
        status = te_role_observe(state, TE_ROLE_INPUT, call->in[0], compute);
        if (status == TE_OK) status = te_role_observe(state, TE_ROLE_WEIGHT, call->in[1], compute);
    }
    return status == TE_OK ? te_call_delegate(call, "linear", 3, args) : status;
}

static te_status forward(te_call *call)
{
    te_context *ctx = call->ctx;
    te_tensor *x = call->in[0], *w = call->in[1];
    te_recipe_state *state = ctx->product_state;
    te_status status = te_linear_check(call);
    if (status != TE_OK) return status;
    if (!te_recipe_active(state)) return without_recipe(call, state);
    te_dtype compute = te_product_dtype(ctx, x->dtype, w->dtype);
    int64_t shape[TE_MAX_DIMS];
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = w->shape[0];
    te_product_saved *saved = te_mem_zalloc(&ctx->mem, sizeof *saved);
    if (!saved) return te_fail_memory(ctx, "linear");
    call->pointer = saved;
    call->release = release_saved;
    te_tensor *y = call->out[0] = te_tensor_new(ctx, x->storage->device, compute, x->ndim, shape);
    if (!y) return ctx->status;
    bool want_dx = call->record && te_needs_grad(x), want_dweight = call->record && te_needs_grad(w);
    status =
        te_quantized_product(state, y, x, NULL, w, call->in[2], want_dx, want_dweight ? TE_X_KEPT : TE_X_UNREAD, saved);
    if (status == TE_OK && !call->record) release_saved(call);
    if (!call->pointer) call->release = NULL;
    return status;
}

typedef te_status product(const te_product_saved *saved, te_tensor *target, const te_factor *dy, bool accumulate);

static te_status into_grad(te_call *call, int i, product *multiply, const te_factor *dy)
{
    const te_product_saved *saved = saved_of(call);
    const te_grad_meta *meta = te_grad_input(call, i);
    bool direct = te_product_fits(meta->dtype, saved->compute), accumulate = false;
    te_tensor *target = direct ? te_grad_target(call, i, &accumulate)
                               : te_tensor_new(call->ctx, meta->device, saved->compute, meta->ndim, meta->shape);
    if (!target) return call->ctx->status;
    te_status status = multiply(saved, target, dy, accumulate);
    if (direct) return status;
    if (status == TE_OK) return te_grad_give(call, i, target);
    te_tensor_release(target);
    return status;
}

static te_status backward(te_call *call)
{
    bool want_dx = te_grad_wanted(call, 0), want_dweight = te_grad_wanted(call, 1);
    te_factor dy;
    te_status status = te_quantized_grad_output(saved_of(call), call->dout[0], NULL, want_dx, want_dweight, &dy);
    if (status == TE_OK && want_dx) status = into_grad(call, 0, te_quantized_dgrad, &dy);
    if (status == TE_OK && want_dweight) status = into_grad(call, 1, te_quantized_wgrad, &dy);
    te_factor_close(&dy);
    if (status == TE_OK && call->node->n_edges > 2 && te_grad_wanted(call, 2)) {
        bool accumulate;
        te_tensor *db = te_grad_target(call, 2, &accumulate);
        status = db ? te_sum_to(db, call->dout[0], 1, accumulate) : call->ctx->status;
    }
    return status;
}

/* --- values that are quantized on their way ----------------------------------------------------------------------- */

static te_status values_forward(te_call *call)
{
    te_context *ctx = call->ctx;
    te_tensor *x = call->in[0];
    te_recipe_state *state = ctx->product_state;
    bool forward = call->attr[0].number != 0, active = te_recipe_active(state);
    te_dtype compute = te_product_dtype(ctx, x->dtype, x->dtype);
    if (!(state && state->recipe) && !te_recipe_calibrates(state)) /* one may leave everything in high precision */
        return te_call_fail(call, TE_ERROR_ARGUMENT, "no recipe is in force");
    bool observed = !active && forward && compute != TE_F64;
    te_status status = observed ? te_role_observe(state, TE_ROLE_INPUT, x, compute) : TE_OK;
    if (status != TE_OK) return status;
    if (active && call->record) {
        te_product_saved *saved = te_mem_zalloc(&ctx->mem, sizeof *saved);
        if (!saved) return te_fail_memory(ctx, "quantize");
        saved->state = te_recipe_state_retain(state);
        saved->recipe = te_product_recipe_retain(state->recipe);
        call->pointer = saved;
        call->release = release_saved;
    }
    if (active && forward && compute != TE_F64 && state->recipe->quantized[TE_ROLE_INPUT])
        call->out[0] = te_role_quantized_values(state, state->recipe, TE_ROLE_INPUT, x, compute, ctx->grad_enabled);
    else
        call->out[0] = te_tensor_alias(x, x->ndim, x->shape, x->stride, x->offset);
    return call->out[0] ? TE_OK : ctx->status;
}

static te_status values_backward(te_call *call)
{
    const te_product_saved *saved = saved_of(call); /* NULL: scales were calibrated */
    const te_product_recipe *recipe = saved ? saved->recipe : NULL;
    te_tensor *dy = call->dout[0];
    bool quantizes = call->attr[1].number != 0 && recipe && recipe->backward == TE_BACKWARD_QUANTIZED &&
                     recipe->quantized[TE_ROLE_GRAD_OUTPUT] && dy->dtype != TE_F64;
    if (!quantizes) return te_grad_give(call, 0, te_tensor_retain(dy));
    return te_grad_give(
        call, 0, te_role_quantized_values(saved->state, recipe, TE_ROLE_GRAD_OUTPUT, dy, dy->dtype, false));
}

/* --- parameters that are stored quantized ------------------------------------------------------------------------- */

static te_status dequantize_forward(te_call *call)
{
    if (!te_tensor_is_quantized(call->in[0])) return te_call_result(call, te_tensor_retain(call->in[0]));
    call->out[0] = te_tensor_dequantized(call->in[0]);
    if (!call->out[0]) return call->ctx->status;
    call->out[0]->storage->read_only = TE_OF_QUANTIZED;
    return TE_OK;
}

/* The values stand for the parameter: its gradient is theirs. */
static te_status dequantize_backward(te_call *call)
{
    return te_grad_give(call, 0, te_tensor_retain(call->dout[0]));
}

const te_op_def te_ops_quantized[] = {
    {.signature = "quantize_values(x, forward: bool, backward: bool)",
     .doc = "x and its gradient as the recipe's formats hold them.",
     .flags = TE_OP_HIDDEN,
     .forward = values_forward,
     .backward = values_backward},
    {.signature = "dequantize_parameter(x)",
     .doc = "The values of a parameter that is stored quantized.",
     .flags = TE_OP_HIDDEN | TE_OP_QUANTIZED,
     .forward = dequantize_forward,
     .backward = dequantize_backward},
    {.signature = "quantized_linear(x, weight, bias = nil)",
     .doc = "linear under the recipe of te.autocast, with the state that the context holds for it.",
     .flags = TE_OP_HIDDEN | TE_OP_QUANTIZED,
     .forward = forward,
     .backward = backward},
    {0},
};
