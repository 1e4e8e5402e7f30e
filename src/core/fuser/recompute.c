/* recompute.c - operands of weight gradients that backward computes anew instead of keeping.
 *
 *      forward     h -> [ y = gelu(h) ] -> y W^T           y is released
 *      backward    dy W -> [ dh, and y again ] -> dy^T y
 *
 * The gradient program of y's unit reads what y follows from anyway, and much of y is on the way to its gradient. So y
 * is one more output of it: a tensor less is kept from forward, none more is read, and the product waits until y is
 * there. Where y follows from tensors that backward would not keep, as a sum does, keeping y costs no more and is done;
 * likewise where products are so narrow that computing y again would show beside them (te_context.recompute_width).
 *
 * Under a recipe the product keeps y's column-wise copy alone; then it is that which is made again, from the same
 * values and, under delayed scaling, with the factor that forward had. */
#include "plan.h"

/* Whether backward of a product can do with x computed again. */
static bool may_wait(const te_fuse_plan *plan, const te_unit *unit)
{
    return unit->kind == TE_UNIT_LINEAR && unit->compute == plan->values[unit->x].dtype &&
           (!unit->recipe || te_product_may_recall(unit->recipe));
}

/* Whether nothing but the weight gradients of such products would keep a value, and those are work enough. */
static bool serves_weights_alone(const te_fuse_plan *plan, int value)
{
    int64_t columns = 0;
    for (int u = 0; u < plan->n_units; u++) {
        const te_unit *unit = &plan->units[u];
        for (int k = 0; k < unit->n_nodes; k++) {
            const te_group_node *node = &plan->nodes[unit->nodes[k]];
            for (int i = 0; i < node->call.op->n_inputs; i++) {
                if (node->in[i] != value || plan->values[value].unit == u) continue;
                if (i != 0 || !may_wait(plan, unit)) return false;
                if (plan->values[unit->weight].wanted) columns += plan->values[unit->result].width;
            }
        }
    }
    return columns > 0 && columns >= plan->recompute_width;
}

bool te_plan_may_recompute(const te_fuse_plan *plan, const te_unit *unit, bool *again)
{
    bool any = false;
    for (int k = 0; k < unit->n_nodes; k++)
        if (plan->nodes[unit->nodes[k]].cache_quantized) return false; /* what backward sees is not what forward saw */
    for (int k = 0; k < unit->n_results; k++) {
        const te_plan_value *v = &plan->values[unit->results[k]];
        again[k] = !unit->reload[k] && v->output < 0 && v->cls == TE_VALUE_TOKENS && v->wanted &&
                   serves_weights_alone(plan, unit->results[k]);
        any |= again[k];
    }
    return any;
}

/* Bytes per row that a gradient keeps for itself. */
static int64_t kept_bytes(const te_fuse_plan *plan, const te_unit *unit, const te_gradient *gradient)
{
    int64_t bytes = gradient->n_rows * (unit->compute_f64 ? 8 : 4);
    bool counted[TE_UNIT_SLOTS] = {false};
    for (int i = 0; i < gradient->n_sources; i++) {
        const te_grad_source *source = &gradient->sources[i];
        int value = TE_NO_VALUE;
        if (source->kind == TE_GRAD_FROM_OUTPUT) value = unit->results[source->index];
        for (int s = 0; source->kind == TE_GRAD_FROM_INPUT && s < unit->n_slots; s++) {
            if (unit->slots[s].value != unit->slots[source->index].value || counted[s]) continue;
            counted[s] = true; /* both halves of one value with the first of them */
            value = unit->slots[s].value;
        }
        if (value == TE_NO_VALUE || plan->values[value].cls != TE_VALUE_TOKENS) continue;
        bytes += plan->values[value].width * (int64_t)te_dtype_size(plan->values[value].dtype);
    }
    return bytes;
}

/* Bytes per row that products keep of a value: one tensor for all in high precision, and each its own copy under a
 * recipe. */
static int64_t operand_bytes(const te_fuse_plan *plan, int value)
{
    const te_plan_value *v = &plan->values[value];
    int64_t copies = 0, plain = 0;
    for (int u = 0; u < plan->n_units; u++) {
        const te_unit *unit = &plan->units[u];
        if (unit->kind != TE_UNIT_LINEAR || unit->x != value || !plan->values[unit->weight].wanted) continue;
        bool bytes =
            unit->recipe && unit->recipe->quantized[TE_ROLE_INPUT] && unit->recipe->backward == TE_BACKWARD_QUANTIZED;
        if (!bytes) plain = v->width * (int64_t)te_dtype_size(v->dtype);
        else copies += unit->recipe->quantizers[TE_ROLE_INPUT].element == TE_E2M1 ? (v->width + 1) / 2 : v->width;
    }
    return copies + plain;
}

bool te_plan_recompute_pays(const te_fuse_plan *plan, const te_unit *unit, const bool *again,
                            const te_gradient *keeping, const te_gradient *recomputing)
{
    int64_t saved = 0;
    for (int k = 0; k < unit->n_results; k++)
        if (again[k]) saved += operand_bytes(plan, unit->results[k]);
    return kept_bytes(plan, unit, recomputing) - kept_bytes(plan, unit, keeping) < saved;
}
