/* backward.c - running a plan backward.
 *
 * state->grads holds the gradient so far of every value; it is complete when the unit that made the value has its turn.
 * A buffer that somebody else can see, such as the gradient that the caller gave, is never written to. Gradients of
 * parameters go where the tape wants them, so that products and column sums add straight into .grad. A weight gradient
 * whose operand is computed anew waits for the unit that made the operand.
 */
#include "backward.h"
#include "emit.h"

/* --- programs ----------------------------------------------------------------------------------------------------- */

/* What comes of an output of the gradient program. */
typedef struct result {
    te_tensor *fresh; /* new gradient of an activation, owned; NULL: memory of the tape */
    te_tensor *tape;  /* that memory, of an activation */
    bool       adds;  /* to what is there */
    int        value; /* whose gradient it is; -1: nothing to do afterwards */
} result;

static te_tensor *incoming(const te_group_backward *b, const te_unit *unit, int index)
{
    int value = index < unit->n_results ? unit->results[index]
                                        : unit->slots[unit->identities[index - unit->n_results]].value;
    return b->state->grads[value];
}

static bool has_gradient(const te_group_backward *b, const te_unit *unit)
{
    for (int i = 0; i < unit->n_results; i++)
        if (b->state->grads[unit->results[i]]) return true;
    for (int i = 0; i < unit->n_identities; i++)
        if (b->state->grads[unit->slots[unit->identities[i]].value]) return true;
    return false;
}

/* The operand of a source; *zero is made when a result has no gradient. */
static te_status bind_source(te_group_backward *b, const te_unit *unit, int i, const te_space *s, te_tensor **zero,
                             te_operand *operand)
{
    const te_grad_source *source = &unit->gradient.sources[i];
    te_tensor *t = NULL;
    te_rate rate = TE_RATE_ELEM;
    te_part part = {0};
    switch (source->kind) {
    case TE_GRAD_FROM_INPUT:
        t = b->state->values[unit->slots[source->index].value];
        part = unit->slots[source->index].part;
        rate = unit->slots[source->index].rate;
        break;
    case TE_GRAD_FROM_OUTPUT: t = b->state->values[unit->results[source->index]]; break;
    case TE_GRAD_FROM_ROW:
        t = b->state->rows[unit->first_row + source->index];
        rate = TE_RATE_ROW;
        break;
    case TE_GRAD_FROM_DOUT:
        t = incoming(b, unit, source->index);
        if (source->index >= unit->n_results)
            part = unit->slots[unit->identities[source->index - unit->n_results]].part;
        if (t) break;
        if (!*zero) *zero = te_tensor_scalar(b->ctx, b->state->device, TE_F32, 0);
        if (!*zero) return b->ctx->status;
        t = *zero;
        part = (te_part){0};
        break;
    }
    *operand = te_space_operand(t, s, part, rate);
    return TE_OK;
}

/* A parameter's gradient, or a column sum for a bias, added to what the tape has. */
static te_status bind_parameter(te_group_backward *b, int value, const te_space *s, te_operand *operand)
{
    int edge = te_wanted_edge(b, value);
    bool accumulate;
    *operand = (te_operand){.data = NULL};
    if (edge < 0) return TE_OK;
    te_tensor *t = te_grad_target(b->call, edge, &accumulate);
    if (!t) return b->ctx->status;
    *operand = (te_operand){.data = te_tensor_pointer(t), .dtype = t->dtype, .accumulate = accumulate};
    operand->stride[s->ndim - 1] = 1;
    return TE_OK;
}

/* Behind a gated operation the column sums of its two halves are the halves of one bias gradient. */
static te_status bind_bias(te_group_backward *b, const te_unit *unit, int k, const te_space *s, te_operand *operands)
{
    const te_unit_grad *grad = &unit->grads[k];
    te_part part = unit->slots[grad->slot].part;
    if (part.half != 2) {
        te_status status = bind_parameter(b, grad->bias, s, &operands[k]);
        operands[k].block = part.block;
        return status;
    }
    int64_t before = part.block ? part.block : s->shape[s->ndim - 1];
    for (int j = 0; j < k; j++) {
        if (unit->grads[j].bias != grad->bias || !operands[j].data) continue;
        operands[k] = operands[j];
        operands[k].data = (char *)operands[j].data + (size_t)before * te_dtype_size(operands[j].dtype);
        break;
    }
    return TE_OK;
}

/* Whether an input's gradient, which is complete here, can go where the tape wants it. */
static bool goes_to_tape(const te_group_backward *b, const te_unit *unit, int k)
{
    const te_plan_value *values = b->plan->values;
    int value = unit->slots[unit->grads[k].slot].value, edge = values[value].input;
    if (edge < 0 || &b->plan->units[values[value].first_reader] != unit || te_wanted_edge(b, value) < 0) return false;
    for (int j = k + 1; j < unit->n_grads; j++)
        if (unit->grads[j].same == k) return false;
    for (int v = 0; v < b->plan->n_values; v++)
        if (v != value && values[v].input >= 0 && te_grad_same(b->call, values[v].input, edge)) return false;
    return true;
}

/* Added in the program, what others gave an input before is not rounded before the sum is. */
static te_status bind_tape(te_group_backward *b, const te_unit *unit, int k, const te_space *s, result *to,
                           te_operand *operand)
{
    const te_unit_slot *slot = &unit->slots[unit->grads[k].slot];
    const te_plan_value *v = &b->plan->values[slot->value];
    if (!to->tape) to->tape = te_grad_target(b->call, v->input, &to->adds);
    te_tensor *t = to->tape ? te_state_stored(b->state, v, to->tape) : NULL;
    if (!t) return b->ctx->status;
    *operand = te_space_operand(t, s, slot->part, slot->rate);
    operand->accumulate = to->adds;
    te_tensor_release(t);
    return TE_OK;
}

/* An activation's gradient goes to new memory, both halves of a gated one to the same; where it is one that came in or
 * one before it, it is that tensor. */
static te_status bind_activation(te_group_backward *b, const te_unit *unit, int k, const te_space *s, result *results,
                                 te_operand *operand)
{
    const te_unit_slot *slot = &unit->slots[unit->grads[k].slot];
    te_tensor *t = NULL;
    results[k].value = slot->value;
    if (unit->grads[k].alias >= 0) {
        te_tensor *same = incoming(b, unit, unit->gradient.sources[unit->grads[k].alias].index);
        if (same) {
            results[k].fresh = te_tensor_retain(same);
            return TE_OK;
        }
    }
    int same = unit->grads[k].same;
    if (same >= 0 && results[same].fresh) { /* not where that one is left quantized */
        results[k].fresh = te_tensor_retain(results[same].fresh);
        return TE_OK;
    }
    for (int j = 0; j < k && !t && !results[k].tape; j++) {
        if (results[j].value != slot->value || !unit->slots[unit->grads[j].slot].part.half) continue;
        t = results[j].fresh;
        results[k] = (result){.tape = results[j].tape, .adds = results[j].adds, .value = slot->value};
    }
    if (results[k].tape || (!t && goes_to_tape(b, unit, k)))
        return bind_tape(b, unit, k, s, &results[k], operand);
    if (t) {
        results[k].value = -1;
    } else {
        t = results[k].fresh = te_state_tensor(b->state, &b->plan->values[slot->value]);
        if (!t) return b->ctx->status;
    }
    *operand = te_space_operand(t, s, slot->part, slot->rate);
    return TE_OK;
}

/* Memory for the values that weight gradients wait for; e: what is emitted instead, or NULL. */
static te_status bind_again(te_group_backward *b, const te_unit *unit, const te_space *s, te_emitting *e,
                            te_operand *outputs, bool *computes)
{
    for (int i = 0; i < unit->n_again; i++) {
        int value = unit->again[i];
        bool awaited = false;
        outputs[i] = (te_operand){.data = NULL};
        for (int u = 0; u < b->plan->n_units; u++) awaited |= te_waits_for(b, &b->plan->units[u], value);
        *computes |= awaited;
        if (!awaited || (e && te_emission_of(e, value))) continue;
        te_tensor *t = b->state->values[value] = te_state_tensor(b->state, &b->plan->values[value]);
        if (!t) return b->ctx->status;
        outputs[i] = te_space_operand(t, s, (te_part){0}, TE_RATE_ELEM);
    }
    return TE_OK;
}

/* The gradient program of a unit, without the results that nothing came back for. */
static te_program *program_of(te_group_backward *b, const te_unit *unit)
{
    bool absent[TE_GRAD_MAX_SOURCES] = {false};
    te_gradient *g = (te_gradient *)(uintptr_t)&unit->gradient; /* keeps those programs */
    for (int i = 0; i < g->n_sources; i++)
        absent[i] = g->sources[i].kind == TE_GRAD_FROM_DOUT && !incoming(b, unit, g->sources[i].index);
    te_program *program = te_gradient_without(g, absent);
    if (!program) te_fail_memory(b->ctx, g->backward->name);
    return program;
}

/* Whether the k-th gradient is none, so that whoever waits for it has none from here. */
static bool is_nothing(const te_unit *unit, int k, const te_program *program)
{
    bool partial = program != unit->gradient.backward;
    return partial && !unit->slots[unit->grads[k].slot].part.half && te_program_gives_nothing(program, k);
}

/* Memory for the gradients of a unit, each where it goes; e: what is emitted instead, or NULL. *computes: there is
 * something to compute. */
static te_status bind_gradients(te_group_backward *b, const te_unit *unit, const te_program *program,
                                const te_space *s, te_emitting *e, result *results, te_operand *outputs,
                                bool *computes)
{
    te_status status = TE_OK;
    for (int k = 0; k < unit->n_grads && status == TE_OK; k++) {
        const te_unit_grad *grad = &unit->grads[k];
        const te_unit_slot *slot = &unit->slots[grad->slot];
        outputs[k] = (te_operand){.data = NULL};
        if (is_nothing(unit, k, program)) continue;
        if (e && grad->bias == TE_NO_VALUE && te_emission_of(e, slot->value)) {
            *computes = true;
            continue;
        }
        if (grad->bias != TE_NO_VALUE)
            status = bind_bias(b, unit, k, s, outputs);
        else if (b->plan->values[slot->value].cls == TE_VALUE_FIXED)
            status = bind_parameter(b, slot->value, s, &outputs[k]);
        else
            status = bind_activation(b, unit, k, s, results, &outputs[k]);
        *computes |= outputs[k].data != NULL;
    }
    return status;
}

static te_status run_gradient(te_group_backward *b, const te_unit *unit, te_program *program, const te_space *s,
                              te_emitting *e, te_operand *inputs, te_operand *outputs)
{
    te_exec *exec = &b->state->device->exec;
    te_run run;
    te_run_start(&run, s);
    run.inputs = inputs;
    run.outputs = outputs;
    run.rngs = b->state->rngs + unit->first_rng;
    run.compute_f64 = unit->compute_f64;
    if (e) return te_emitting_run(e, program, &run);
    te_status status = exec->backend->program_run(exec, program, &run, 1);
    if (status != TE_OK) te_fail_exec(b->ctx, status, exec, program->name);
    return status;
}

static te_status backward_program(te_group_backward *b, const te_unit *unit)
{
    const te_gradient *g = &unit->gradient;
    te_space s = te_state_space(b->state, unit);
    te_operand inputs[TE_GRAD_MAX_SOURCES], outputs[2 * TE_UNIT_SLOTS + TE_UNIT_RESULTS];
    result results[2 * TE_UNIT_SLOTS];
    te_tensor *zero = NULL;
    te_status status = TE_OK;
    bool computes = false;
    if (!g->backward || !has_gradient(b, unit)) return TE_OK;
    te_program *program = program_of(b, unit);
    if (!program) return b->ctx->status;
    for (int i = 0; i < g->n_sources && status == TE_OK; i++) status = bind_source(b, unit, i, &s, &zero, &inputs[i]);
    te_emitting e;
    bool emits = status == TE_OK && b->plan->n_products && te_emitting_backward(b->state, unit, &s, inputs, &e);
    te_emitting *emitting = emits ? &e : NULL;
    for (int k = 0; k < unit->n_grads; k++) results[k] = (result){.value = -1};
    if (status == TE_OK) status = bind_gradients(b, unit, program, &s, emitting, results, outputs, &computes);
    if (status == TE_OK) status = bind_again(b, unit, &s, emitting, outputs + unit->n_grads, &computes);
    if (status == TE_OK && computes) status = run_gradient(b, unit, program, &s, emitting, inputs, outputs);
    for (int k = 0; k < unit->n_grads; k++) {
        if (results[k].value < 0) continue;
        te_drop(&b->state->grads[results[k].value]);
        b->state->grads[results[k].value] = results[k].fresh;
    }
    te_tensor_release(zero);
    return status;
}

/* --- called operations -------------------------------------------------------------------------------------------- */

static te_status backward_call(te_group_backward *b, const te_unit *unit)
{
    const te_plan_value *x = &b->plan->values[unit->x], *y = &b->plan->values[unit->result];
    te_tensor **aux = b->state->aux + unit->first_aux, *leaves[2], *grads[2] = {NULL, NULL};
    int values[2], n = 0;
    if (!b->state->grads[unit->result] || !aux[1]) return TE_OK;
    if (aux[0]) leaves[n] = aux[0], values[n++] = unit->x;
    if (aux[2]) leaves[n] = aux[2], values[n++] = te_plan_sinks(b->plan, &b->plan->nodes[unit->nodes[0]]);
    te_tensor *dy = te_state_seen(b->state, y, b->state->grads[unit->result], y->frame);
    te_status status = dy ? te_autograd_grad(b->ctx, &aux[1], &dy, 1, leaves, grads, n, !b->release) : b->ctx->status;
    te_tensor_release(dy);
    for (int i = 0; i < n; i++) {
        bool rows = values[i] == unit->x;
        te_tensor *stored = !grads[i] || status != TE_OK ? NULL
            : rows ? te_state_stored(b->state, x, grads[i]) : te_tensor_retain(grads[i]);
        if (status == TE_OK && grads[i]) status = stored ? te_backward_add(b, values[i], stored) : b->ctx->status;
        te_tensor_release(grads[i]);
    }
    return status;
}

static te_status backward_view(te_group_backward *b, const te_unit *unit)
{
    const te_plan_value *x = &b->plan->values[unit->x];
    if (!b->state->grads[unit->result] || !x->wanted) return TE_OK;
    te_tensor *dx = te_state_stored(b->state, x, b->state->grads[unit->result]);
    te_drop(&b->state->grads[unit->result]); /* so that the gradient may be the only one that sees its memory */
    return dx ? te_backward_add(b, unit->x, dx) : b->ctx->status;
}

/* --- the plan ----------------------------------------------------------------------------------------------------- */

static te_status check_saved(te_group_backward *b)
{
    const te_group_state *state = b->state;
    int n = b->plan->n_values;
    for (int i = 0; i < n + b->plan->n_aux; i++) {
        const te_tensor *t = i < n ? state->values[i] : state->aux[i - n];
        if (t && te_storage_writes(t->storage) != state->versions[i])
            return te_call_fail(b->call, TE_ERROR_ARGUMENT,
                                "backward: a tensor of shape %s that it saved was changed in place since",
                                TE_SHAPE_TEXT(t));
    }
    return TE_OK;
}

/* The gradients that came in, by value: two outputs may be the same value. */
static te_status take_douts(te_group_backward *b)
{
    for (int i = 0; i < b->plan->n_outputs; i++) {
        int value = b->plan->outputs[i];
        if (!b->call->dout[i]) continue;
        te_tensor *dout = te_state_stored(b->state, &b->plan->values[value], b->call->dout[i]);
        te_status status = dout ? te_backward_add(b, value, dout) : b->ctx->status;
        if (status != TE_OK) return status;
    }
    return TE_OK;
}

/* Nothing that only this unit needed outlives it. */
static void consume(te_group_backward *b, const te_unit *unit)
{
    te_group_state *state = b->state;
    for (int k = 0; k < unit->n_nodes; k++) {
        int value = b->plan->nodes[unit->nodes[k]].out;
        te_drop(&state->grads[value]);
        if (b->release) te_drop(&state->values[value]);
    }
    if (!b->release) return;
    for (int i = 0; i < unit->gradient.n_rows; i++) te_drop(&state->rows[unit->first_row + i]);
    bool waits = unit->kind == TE_UNIT_LINEAR && te_waits_for(b, unit, unit->x);
    for (int i = 0; i < unit->n_products && !waits; i++) te_product_saved_close(&state->products[unit->product + i]);
    bool ranges = unit->kind == TE_UNIT_GROUPED || unit->kind == TE_UNIT_BIASES;
    bool keeps = ranges || unit->kind == TE_UNIT_ATTENTION || (unit->kind == TE_UNIT_LINEAR && !unit->recipe);
    int aux = unit->kind == TE_UNIT_ATTENTION ? TE_CALL_AUX : 2;
    for (int i = 0; i < aux && keeps; i++) te_drop(&state->aux[unit->first_aux + i]);
}

static te_status give_inputs(te_group_backward *b)
{
    for (int v = 0; v < b->plan->n_values; v++) {
        te_tensor *grad = b->state->grads[v];
        int edge = b->plan->values[v].input;
        if (!grad || edge < 0) continue;
        b->state->grads[v] = NULL;
        te_tensor *seen = te_state_seen(b->state, &b->plan->values[v], grad, b->plan->values[v].frame);
        te_tensor_release(grad);
        te_status status = te_grad_give(b->call, edge, seen);
        if (status != TE_OK) return status;
    }
    return TE_OK;
}

/* After a failure nothing stays that waited, or was waited for. */
static void forget_waiting(te_group_backward *b)
{
    for (int u = 0; u < b->plan->n_units; u++) {
        const te_unit *unit = &b->plan->units[u];
        if (unit->kind == TE_UNIT_LINEAR && te_waits_for(b, unit, unit->x)) te_backward_forget(b, unit);
        for (int i = 0; i < unit->n_again; i++) te_drop(&b->state->values[unit->again[i]]);
    }
}

te_status te_plan_backward(te_group_state *state, te_call *call)
{
    te_group_backward b = {state, state->plan, state->plan->ctx, call, !te_autograd_retains(call->ctx)};
    te_status status = check_saved(&b);
    if (status == TE_OK) status = take_douts(&b);
    for (int u = b.plan->n_units - 1; u >= 0 && status == TE_OK; u--) {
        const te_unit *unit = &b.plan->units[u];
        status = te_context_poll(b.ctx);
        if (status != TE_OK) break;
        switch (unit->kind) {
        case TE_UNIT_PROGRAM:
            status = te_group_state_unpack(state, unit);
            if (status == TE_OK) status = backward_program(&b, unit);
            te_group_state_repack(state, unit, b.release);
            if (status == TE_OK) status = te_backward_finish(&b, unit);
            break;
        case TE_UNIT_LINEAR: status = te_backward_linear(&b, unit); break;
        case TE_UNIT_ATTENTION: status = backward_call(&b, unit); break;
        case TE_UNIT_GATHER: status = te_backward_gather(&b, unit); break;
        case TE_UNIT_GROUPED: status = te_backward_grouped(&b, unit); break;
        case TE_UNIT_BIASES: status = te_backward_biases(&b, unit); break;
        case TE_UNIT_MASK: break;
        case TE_UNIT_VIEW: status = backward_view(&b, unit); break;
        }
        consume(&b, unit);
    }
    if (status == TE_OK) status = give_inputs(&b);
    for (int v = 0; v < b.plan->n_values; v++) te_drop(&state->grads[v]);
    if (status != TE_OK) forget_waiting(&b);
    return status;
}
