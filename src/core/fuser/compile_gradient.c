/* compile_gradient.c - the gradient of a unit's program: what it gives, what products sum up of it, and which results
 * it gives again instead of having them saved. */
#include "plan.h"

static te_status out_of_memory(te_fuse_plan *plan) { return te_fail_memory(plan->ctx, "fuser"); }

/* The gradient of output `index` of the backward program is a gradient that came in, as it is. */
static int alias_of(const te_fuse_plan *plan, const te_unit *unit, const te_unit_grad *grad, int value)
{
    const te_insn *insn = &unit->gradient.backward->insns[value];
    const te_unit_slot *slot = &unit->slots[grad->slot];
    if (insn->op != TE_PW_LOAD || grad->kind != TE_OUT_ELEM || slot->part.half) return -1;
    const te_grad_source *source = &unit->gradient.sources[insn->slot];
    if (source->kind != TE_GRAD_FROM_DOUT) return -1;
    int from = source->index < unit->n_results ? unit->results[source->index]
                                               : unit->slots[unit->identities[source->index - unit->n_results]].value;
    return plan->values[from].dtype == plan->values[slot->value].dtype ? insn->slot : -1;
}

/* The gradient before number k that is the same: what was added shares one. */
static int same_as(const te_fuse_plan *plan, const te_unit *unit, int k)
{
    const struct te_program_output *outputs = unit->gradient.backward->outputs;
    const te_unit_grad             *grads = unit->grads;
    const te_plan_value            *mine = &plan->values[unit->slots[grads[k].slot].value];
    for (int j = 0; j < k; j++) {
        const te_plan_value *other = &plan->values[unit->slots[grads[j].slot].value];
        bool whole = !unit->slots[grads[k].slot].part.half && !unit->slots[grads[j].slot].part.half;
        if (outputs[j].value == outputs[k].value && grads[j].kind == TE_OUT_ELEM && grads[k].kind == TE_OUT_ELEM &&
            whole && mine != other && mine->dtype == other->dtype && mine->space == other->space &&
            mine->width == other->width && mine->cls == other->cls)
            return j;
    }
    return -1;
}

/* The matrix product whose bias gradient is the column sum of the gradient in this slot; NULL when there is none or the
 * gradient is not complete here. */
static te_unit *product_of(te_fuse_plan *plan, int position, const te_unit_slot *slot)
{
    const te_plan_value *v = &plan->values[slot->value];
    if (v->cls != TE_VALUE_TOKENS || v->unit < 0 || v->first_reader != position) return NULL;
    te_unit *unit = &plan->units[v->unit];
    bool biased = unit->kind == TE_UNIT_LINEAR && unit->bias != TE_NO_VALUE && plan->values[unit->bias].wanted;
    return biased ? unit : NULL;
}

static te_status add_bias_gradients(te_fuse_plan *plan, int position)
{
    te_unit *unit = &plan->units[position];
    int n = unit->n_grads;
    for (int k = 0; k < n; k++) {
        te_unit *product = product_of(plan, position, &unit->slots[unit->grads[k].slot]);
        if (!product || unit->grads[k].kind != TE_OUT_ELEM) continue;
        int value = unit->gradient.backward->outputs[k].value;
        if (te_program_output(unit->gradient.backward, TE_OUT_COLSUM, value) < 0) return out_of_memory(plan);
        unit->grads[unit->n_grads++] = (te_unit_grad){
            .slot = unit->grads[k].slot, .kind = TE_OUT_COLSUM, .alias = -1, .same = -1, .bias = product->bias};
        product->bias_elsewhere = true;
    }
    return TE_OK;
}

/* The gradient that gives results again, in the other's place where that keeps less. */
static te_status recompute(te_fuse_plan *plan, te_unit *unit, const te_gradient_request *asked, te_gradient *gradient)
{
    bool again[TE_UNIT_RESULTS + TE_UNIT_SLOTS] = {false};
    te_gradient other;
    if (!te_plan_may_recompute(plan, unit, again)) return TE_OK;
    te_gradient_request request = *asked;
    request.again = again;
    te_status status = te_program_differentiate(&request, &other, NULL);
    if (status != TE_OK) return status == TE_ERROR_MEMORY ? out_of_memory(plan) : TE_OK;
    if (te_plan_recompute_pays(plan, unit, again, gradient, &other)) {
        te_gradient keeping = *gradient;
        *gradient = other;
        other = keeping;
        for (int k = 0; k < unit->n_results; k++) {
            if (!again[k]) continue;
            plan->values[unit->results[k]].again = true;
            unit->again[unit->n_again++] = unit->results[k];
        }
    }
    te_gradient_clear(&other);
    return TE_OK;
}

/* What is computed again goes behind the sums that were added since. */
static void move_again_last(te_unit *unit)
{
    struct te_program_output *outputs = unit->gradient.backward->outputs, again[TE_UNIT_RESULTS];
    int n = unit->gradient.backward->n_outputs - unit->n_again, before = 0;
    while (before < unit->n_grads && unit->grads[before].bias == TE_NO_VALUE) before++;
    memcpy(again, outputs + before, (size_t)unit->n_again * sizeof *again);
    memmove(outputs + before, outputs + before + unit->n_again, (size_t)(n - before) * sizeof *again);
    memcpy(outputs + n, again, (size_t)unit->n_again * sizeof *again);
}

/* Identities are there to be differentiated; no run writes them. */
static void drop_identities(te_unit *unit)
{
    te_program *program = unit->gradient.forward;
    if (!unit->n_identities) return;
    struct te_program_output *first = program->outputs + unit->n_results;
    program->n_outputs -= unit->n_identities;
    memmove(first, first + unit->n_identities, (size_t)(program->n_outputs - unit->n_results) * sizeof *first);
}

te_status te_plan_differentiate(te_fuse_plan *plan, int position, const te_joint *joints)
{
    te_unit *unit = &plan->units[position];
    bool wanted[TE_UNIT_SLOTS] = {false}, save[TE_UNIT_RESULTS + TE_UNIT_SLOTS] = {false}, any = false;
    te_output_kind reduce[TE_UNIT_SLOTS] = {TE_OUT_ELEM};
    uint8_t stored[TE_UNIT_RESULTS + TE_UNIT_SLOTS];
    te_build_error error;
    te_gradient gradient;
    for (int i = 0; i < unit->n_slots; i++) {
        const te_plan_value *v = &plan->values[unit->slots[i].value];
        wanted[i] = v->wanted;
        any |= wanted[i];
        reduce[i] = te_plan_reduction(v, unit->slots[i].rate);
        if (!wanted[i]) continue;
        unit->grads[unit->n_grads++] = (te_unit_grad){.slot = i, .kind = reduce[i], .bias = TE_NO_VALUE};
    }
    if (!any) return TE_OK;
    for (int k = 0; k < unit->n_results; k++) save[k] = unit->reload[k];
    for (int k = 0; k < unit->n_results; k++) stored[k] = te_plan_rounding(plan, unit, unit->results[k]);
    for (int i = 0; i < unit->n_identities; i++)
        stored[unit->n_results + i] = te_plan_rounding(plan, unit, unit->slots[unit->identities[i]].value);
    te_gradient_request request = {.forward = unit->gradient.forward, .wanted = wanted, .reduce = reduce,
                                   .save_output = save, .row_length = (double)unit->width,
                                   .joints = joints, .out_stored = stored};
    te_status status = te_program_differentiate(&request, &gradient, &error);
    if (status == TE_ERROR_MEMORY) return out_of_memory(plan);
    if (status != TE_OK) return te_plan_refuse(plan, &plan->nodes[unit->nodes[0]], "%s", error.message);
    status = recompute(plan, unit, &request, &gradient);
    te_program_free(unit->gradient.forward);
    unit->gradient = gradient;
    drop_identities(unit);
    if (status != TE_OK) return status;
    for (int k = 0; k < unit->n_grads; k++) {
        unit->grads[k].alias = alias_of(plan, unit, &unit->grads[k], gradient.backward->outputs[k].value);
        unit->grads[k].same = same_as(plan, unit, k);
    }
    status = add_bias_gradients(plan, position);
    if (unit->n_again) move_again_last(unit);
    return status;
}
