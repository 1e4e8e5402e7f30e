/* backward_products.c - the gradients of matrix products.
 *
 * The gradient of an activation is added to where others have left theirs, inside the product; a buffer that somebody
 * else can see is copied first. A weight gradient goes straight to where the tape wants it. Where its operand is
 * computed anew it waits, with the gradient of the result, for the unit that made the operand.
 */
#include "backward.h"

#include "../ops/ops.h"
#include "../product.h"

static bool exclusive(const te_tensor *t) { return t->refs == 1 && t->storage->refs == 1 && t->storage->block; }

te_tensor *te_backward_target(te_group_backward *b, int value, bool *accumulate)
{
    te_tensor **grad = &b->state->grads[value];
    *accumulate = *grad != NULL;
    if (*grad && !(exclusive(*grad) && te_tensor_contiguous(*grad))) {
        te_tensor *copy = te_tensor_clone_data(*grad);
        if (!copy) return NULL;
        te_tensor_release(*grad);
        *grad = copy;
    }
    if (!*grad) *grad = te_state_tensor(b->state, &b->plan->values[value]);
    return *grad;
}

te_status te_backward_add(te_group_backward *b, int value, te_tensor *grad)
{
    bool accumulate;
    if (!b->state->grads[value]) {
        b->state->grads[value] = grad;
        return TE_OK;
    }
    te_tensor *target = te_backward_target(b, value, &accumulate);
    te_status status = target ? te_add_to(target, grad) : b->ctx->status;
    te_tensor_release(grad);
    return status;
}

/* The gradient of a product's result as its two products read it, and their other operands. */
static te_status dgrad(const te_backward_operands *p, te_tensor *dx, bool accumulate)
{
    if (p->saved) return te_quantized_dgrad(p->saved, dx, &p->factor, accumulate);
    return te_linear_dgrad(dx, p->dy, p->weight, accumulate);
}

static te_status wgrad(const te_backward_operands *p, te_tensor *dweight, bool accumulate)
{
    if (p->saved) return te_quantized_wgrad(p->saved, dweight, &p->factor, accumulate);
    return te_linear_wgrad(dweight, p->dy, p->x, accumulate);
}

static te_status input_gradient(te_group_backward *b, const te_unit *unit, const te_backward_operands *p)
{
    const te_plan_value *x = &b->plan->values[unit->x];
    bool accumulate = false;
    if (te_product_fits(x->dtype, unit->compute)) {
        te_tensor *target = te_backward_target(b, unit->x, &accumulate);
        return target ? dgrad(p, target, accumulate) : b->ctx->status;
    }
    te_plan_value narrow = *x;
    narrow.dtype = unit->compute;
    te_tensor *dx = te_state_tensor(b->state, &narrow);
    te_status status = dx ? dgrad(p, dx, false) : b->ctx->status;
    te_tensor *cast = status == TE_OK ? te_tensor_cast(dx, x->dtype) : NULL;
    te_tensor_release(dx);
    return cast ? te_backward_add(b, unit->x, cast) : b->ctx->status;
}

te_status te_backward_weight(te_group_backward *b, const te_unit *unit, int edge, const te_backward_operands *p)
{
    const te_grad_meta *meta = te_grad_input(b->call, edge);
    bool direct = te_product_fits(meta->dtype, unit->compute), accumulate = false;
    te_tensor *target = direct ? te_grad_target(b->call, edge, &accumulate)
                               : te_tensor_new(b->ctx, meta->device, unit->compute, meta->ndim, meta->shape);
    if (!target) return b->ctx->status;
    te_status status = wgrad(p, target, accumulate);
    if (direct) return status;
    if (status == TE_OK) return te_grad_give(b->call, edge, target);
    te_tensor_release(target);
    return status;
}

static te_status open_product(te_group_backward *b, const te_unit *unit, te_tensor *grad, te_backward_operands *p)
{
    te_group_state *state = b->state;
    *p = (te_backward_operands){.dy = NULL};
    if (unit->recipe) {
        p->saved = &state->products[unit->product];
        return te_quantized_grad_output(p->saved, grad, &state->emitted[2 * unit->product + 1],
                                        b->plan->values[unit->x].wanted, te_wanted_edge(b, unit->weight) >= 0,
                                        &p->factor);
    }
    p->x = state->aux[unit->first_aux];
    p->weight = state->aux[unit->first_aux + 1];
    p->dy = te_tensor_cast(grad, unit->compute);
    return p->dy ? TE_OK : b->ctx->status;
}

/* The weight gradient is taken when x is there again. */
static void let_wait(te_group_backward *b, const te_unit *unit, te_backward_operands *p)
{
    if (!p->saved) {
        *te_waiting(b, unit) = te_tensor_retain(p->dy);
        return;
    }
    p->saved->waiting = p->factor;
    p->factor = (te_factor){.plain = NULL};
    if (!p->saved->waiting.plain) te_factor_keep_side(&p->saved->waiting, 1);
}

te_status te_backward_linear(te_group_backward *b, const te_unit *unit)
{
    te_tensor *grad = b->state->grads[unit->result];
    te_backward_operands p;
    if (!grad && !(unit->recipe && te_quantized_is_there(&b->state->emitted[2 * unit->product + 1]))) return TE_OK;
    te_status status = open_product(b, unit, grad, &p);
    if (status == TE_OK && b->plan->values[unit->x].wanted) status = input_gradient(b, unit, &p);
    int edge = te_wanted_edge(b, unit->weight);
    if (status == TE_OK && edge >= 0 && b->plan->values[unit->x].again)
        let_wait(b, unit, &p);
    else if (status == TE_OK && edge >= 0)
        status = te_backward_weight(b, unit, edge, &p);
    edge = unit->bias == TE_NO_VALUE || unit->bias_elsewhere ? -1 : te_wanted_edge(b, unit->bias);
    if (status == TE_OK && edge >= 0) {
        bool accumulate;
        te_tensor *db = te_grad_target(b->call, edge, &accumulate);
        status = db ? te_sum_to(db, grad, 1, accumulate) : b->ctx->status;
    }
    te_tensor_release(p.dy);
    te_factor_close(&p.factor);
    return status;
}

void te_backward_forget(te_group_backward *b, const te_unit *product)
{
    if (!product->recipe) {
        te_drop(te_waiting(b, product));
        return;
    }
    te_product_saved *saved = &b->state->products[product->product];
    te_factor_close(&saved->x);
    te_factor_close(&saved->waiting);
    if (b->release) te_product_saved_close(saved);
}

/* A weight gradient that waited for x, or for its bytes, which the program has left. */
static te_status late_gradient(te_group_backward *b, const te_unit *product, te_tensor *x)
{
    te_product_saved *saved = product->recipe ? &b->state->products[product->product] : NULL;
    te_backward_operands p = {.saved = saved, .x = x};
    bool emitted = saved && te_factor_is_there(&saved->x);
    te_status status = saved && !emitted ? te_quantized_recall(saved, x) : TE_OK;
    if (saved)
        p.factor = saved->waiting;
    else
        p.dy = *te_waiting(b, product);
    return status == TE_OK ? te_backward_weight(b, product, te_wanted_edge(b, product->weight), &p) : status;
}

/* The weight gradients that waited for what the unit has computed again. */
te_status te_backward_finish(te_group_backward *b, const te_unit *unit)
{
    te_status status = TE_OK;
    for (int i = 0; i < unit->n_again; i++) {
        te_tensor **x = &b->state->values[unit->again[i]];
        for (int u = b->plan->n_units - 1; u >= 0; u--) {
            const te_unit *product = &b->plan->units[u];
            if (!te_waits_for(b, product, unit->again[i])) continue;
            if (status == TE_OK) status = late_gradient(b, product, *x);
            te_backward_forget(b, product);
        }
        te_drop(x);
    }
    return status;
}

