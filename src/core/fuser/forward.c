/* forward.c - running a plan forward. */
#include "emit.h"
#include "handed.h"
#include "plan.h"

#include "../autograd.h"
#include "../ops/ops.h"
#include "../product.h"
#include "../quantized_parameter.h"

/* --- state -------------------------------------------------------------------------------------------------------- */

te_group_state *te_group_state_new(te_fuse_plan *plan, te_tensor *const *inputs)
{
    size_t n = 2 * (size_t)plan->n_values + (size_t)plan->n_rows + (size_t)plan->n_aux;
    size_t bytes = sizeof(te_group_state) + n * sizeof(te_tensor *) +
                   ((size_t)plan->n_values + (size_t)plan->n_aux) * sizeof(uint64_t) +
                   (size_t)plan->n_rngs * sizeof(te_rng) + (size_t)plan->n_products * sizeof(te_product_saved) +
                   ((size_t)plan->n_packs + 2 * (size_t)plan->n_products) * sizeof(te_quantized) +
                   (size_t)plan->n_frames * sizeof(te_space);
    te_group_state *state = te_mem_zalloc(&plan->ctx->mem, bytes);
    if (!state) {
        te_fail_memory(plan->ctx, "fuser");
        return NULL;
    }
    state->plan = plan;
    plan->refs++;
    state->bytes = bytes;
    state->device = inputs[0]->storage->device;
    state->values = (te_tensor **)(state + 1);
    state->grads = state->values + plan->n_values;
    state->rows = state->grads + plan->n_values;
    state->aux = state->rows + plan->n_rows;
    state->versions = (uint64_t *)(state->aux + plan->n_aux);
    state->rngs = (te_rng *)(state->versions + plan->n_values + plan->n_aux);
    state->products = (te_product_saved *)(state->rngs + plan->n_rngs);
    state->packs = (te_quantized *)(state->products + plan->n_products);
    state->emitted = state->packs + plan->n_packs;
    state->frames = (te_space *)(state->emitted + 2 * plan->n_products);
    if (te_state_open_frames(state, inputs) == TE_OK) return state;
    te_group_state_free(state);
    return NULL;
}

static void drop(te_tensor **t, int n)
{
    for (int i = 0; i < n; i++) {
        te_tensor_release(t[i]);
        t[i] = NULL;
    }
}

void te_group_state_free(te_group_state *state)
{
    te_fuse_plan *plan = state->plan;
    drop(state->values, plan->n_values);
    drop(state->grads, plan->n_values);
    drop(state->rows, plan->n_rows);
    drop(state->aux, plan->n_aux);
    for (int i = 0; i < plan->n_products; i++) te_product_saved_close(&state->products[i]);
    for (int i = 0; i < plan->n_packs; i++) te_quantized_close(&state->packs[i]);
    for (int i = 0; i < 2 * plan->n_products; i++) te_quantized_close(&state->emitted[i]);
    te_mem mem = plan->ctx->mem;
    te_mem_free(&mem, state, state->bytes);
    te_fuse_plan_release(plan);
}

void te_group_state_trim(te_group_state *state)
{
    for (int v = 0; v < state->plan->n_values; v++) {
        if (!state->plan->values[v].saved) drop(&state->values[v], 1);
        if (state->values[v]) state->versions[v] = te_storage_writes(state->values[v]->storage);
    }
    for (int i = 0; i < state->plan->n_aux; i++)
        if (state->aux[i]) state->versions[state->plan->n_values + i] = te_storage_writes(state->aux[i]->storage);
}

static te_space space_of(const te_group_state *state, int space, int64_t width)
{
    te_space s = state->frames[space];
    s.shape[s.ndim - 1] = width;
    return s;
}

te_space te_state_space(const te_group_state *state, const te_unit *unit)
{
    return space_of(state, unit->space, unit->width);
}

te_tensor *te_state_tensor(te_group_state *state, const te_plan_value *value)
{
    te_space s = space_of(state, value->space, value->width);
    return te_tensor_new(state->plan->ctx, state->device, value->dtype, s.ndim - (value->cls == TE_VALUE_ROWS),
                         s.shape);
}

/* --- programs ----------------------------------------------------------------------------------------------------- */

static te_status run_program(te_group_state *state, const te_unit *unit)
{
    te_fuse_plan *plan = state->plan;
    te_context *ctx = plan->ctx;
    te_space s = te_state_space(state, unit);
    te_operand inputs[TE_UNIT_SLOTS], outputs[TE_UNIT_RESULTS + TE_UNIT_SLOTS + TE_GRAD_MAX_SOURCES];
    te_run run;
    if (!unit->n_results) return TE_OK;
    for (int i = 0; i < unit->n_slots; i++)
        inputs[i] =
            te_space_operand(state->values[unit->slots[i].value], &s, unit->slots[i].part, unit->slots[i].rate);
    te_emitting e;
    bool emits = plan->n_products && te_emitting_forward(state, unit, &s, inputs, &e);
    int n = 0;
    for (int i = 0; i < unit->n_results; i++, n++) {
        outputs[n] = (te_operand){.data = NULL};
        if (emits && te_emission_of(&e, unit->results[i])) continue;
        te_tensor *t = state->values[unit->results[i]] = te_state_tensor(state, &plan->values[unit->results[i]]);
        if (!t) return ctx->status;
        outputs[n] = te_space_operand(t, &s, (te_part){0}, TE_RATE_ELEM);
    }
    for (int i = 0; i < unit->gradient.n_rows; i++, n++) {
        te_tensor *t = state->rows[unit->first_row + i] =
            te_tensor_new(ctx, state->device, unit->compute_f64 ? TE_F64 : TE_F32, s.ndim - 1, s.shape);
        if (!t) return ctx->status;
        outputs[n] = te_space_operand(t, &s, (te_part){0}, TE_RATE_ROW);
    }
    te_run_start(&run, &s);
    run.inputs = inputs;
    run.outputs = outputs;
    run.rngs = state->rngs + unit->first_rng;
    run.compute_f64 = unit->compute_f64;
    te_exec *exec = &state->device->exec;
    if (emits) return te_emitting_run(&e, unit->gradient.forward, &run);
    te_status status = exec->backend->program_run(exec, unit->gradient.forward, &run, 1);
    return status == TE_OK ? TE_OK : te_fail_exec(ctx, status, exec, unit->gradient.forward->name);
}

/* --- products and calls ------------------------------------------------------------------------------------------- */

static te_status run_quantized(te_group_state *state, const te_unit *unit)
{
    te_fuse_plan *plan = state->plan;
    te_recipe_state *recipe_state = plan->nodes[unit->nodes[0]].recipe_state;
    bool want_dx = plan->values[unit->x].wanted, want_dweight = plan->values[unit->weight].wanted;
    te_product_x after = !want_dweight ? TE_X_UNREAD : plan->values[unit->x].again ? TE_X_AGAIN : TE_X_KEPT;
    te_product_saved *saved = &state->products[unit->product];
    te_tensor *bias = unit->bias == TE_NO_VALUE ? NULL : state->values[unit->bias];
    te_tensor *y = state->values[unit->result] = te_state_tensor(state, &plan->values[unit->result]);
    if (!y) return plan->ctx->status;
    te_status status = te_quantized_product(recipe_state, y, state->values[unit->x], &state->emitted[2 * unit->product],
                                            state->values[unit->weight], bias, want_dx, after, saved);
    if (!plan->record) te_product_saved_close(saved);
    return status;
}

static te_status observe(te_group_state *state, const te_unit *unit)
{
    te_recipe_state *recipe_state = state->plan->nodes[unit->nodes[0]].recipe_state;
    if (!te_recipe_calibrates(recipe_state)) return TE_OK;
    te_status status = te_role_observe(recipe_state, TE_ROLE_INPUT, state->values[unit->x], unit->compute);
    if (status != TE_OK) return status;
    return te_role_observe(recipe_state, TE_ROLE_WEIGHT, state->values[unit->weight], unit->compute);
}

static te_status run_linear(te_group_state *state, const te_unit *unit)
{
    if (unit->recipe) return run_quantized(state, unit);
    te_fuse_plan *plan = state->plan;
    const te_plan_value *x = &plan->values[unit->x], *w = &plan->values[unit->weight];
    te_tensor *xc = te_tensor_cast(state->values[unit->x], unit->compute);
    te_tensor *wc = xc ? te_product_weight(state->values[unit->weight], unit->compute) : NULL;
    te_tensor *y = wc ? te_state_tensor(state, &plan->values[unit->result]) : NULL;
    te_tensor *bias = unit->bias == TE_NO_VALUE ? NULL : state->values[unit->bias];
    state->values[unit->result] = y;
    te_status status = y ? te_linear_product(y, xc, wc, bias) : plan->ctx->status;
    if (status == TE_OK) status = observe(state, unit);
    if (status == TE_OK && w->wanted && !x->again) state->aux[unit->first_aux] = te_tensor_retain(xc);
    if (status == TE_OK && x->wanted) state->aux[unit->first_aux + 1] = te_tensor_retain(wc);
    te_tensor_release(xc);
    te_tensor_release(wc);
    return status;
}

/* What only the tape still knows keeps no memory: quantized attention has its operands and its result as bytes, and
 * attention with positions has turned copies of its operands. */
static te_status forget_values(te_tensor *t)
{
    te_tensor *shell = te_tensor_new_unbacked(t->ctx, t->storage->device, t->dtype, t->ndim, t->shape);
    if (!shell) return t->ctx->status;
    te_storage *values = t->storage;
    t->storage = shell->storage;
    shell->storage = values;
    te_tensor_release(shell);
    return TE_OK;
}

/* What a program left quantized for an attention stands for its operand, which has no values. */
static te_status open_operand(te_group_state *state, const te_unit *unit)
{
    te_quantized *left = unit->n_products ? &state->emitted[2 * unit->product] : NULL;
    if (!left || !te_quantized_is_there(left)) return TE_OK;
    const te_plan_value *x = &state->plan->values[unit->x];
    te_space s = state->frames[state->plan->values[unit->result].frame];
    s.shape[s.ndim - 1] = x->width;
    left->ndim = s.ndim;
    memcpy(left->shape, s.shape, sizeof left->shape);
    state->values[unit->x] = te_quantized_shell(state->plan->ctx, state->device, left);
    memset(left, 0, sizeof *left);
    return state->values[unit->x] ? TE_OK : state->plan->ctx->status;
}

/* A tensor as the leaf of a tape of its own, its gradient wanted or not. */
static te_tensor *leaf_of(te_tensor *t, bool wanted)
{
    te_tensor *leaf = t ? te_tensor_alias(t, t->ndim, t->shape, t->stride, t->offset) : NULL;
    if (leaf) leaf->requires_grad = wanted;
    return leaf;
}

/* An operation with a tape of its own: its input is a leaf there, and so are sinks that learn. */
/* Runs a call with the numbers and the state of a recipe that belong to its unit. */
static te_status run_with_state(te_group_state *state, const te_unit *unit, te_call *call,
                                te_recipe_state *recipe)
{
    te_context *ctx = state->plan->ctx;
    uint64_t offset = ctx->rng_offset;
    te_recipe_state *state_before = ctx->product_state;
    bool bytes_before = ctx->product_bytes;
    if (unit->n_rngs) ctx->rng_offset = state->rngs[unit->first_rng].offset;
    ctx->product_state = recipe;
    ctx->product_bytes = state->plan->values[unit->result].handed;
    te_status status = te_call_run_op(call);
    ctx->product_state = state_before;
    ctx->product_bytes = bytes_before;
    if (unit->n_rngs) ctx->rng_offset = offset;
    return status;
}

/* The result of a call as its value: handed on, or as the plan stores it, without its place in the tape. */
static te_status keep_result(te_group_state *state, const te_unit *unit, te_tensor *y)
{
    const te_plan_value *result = &state->plan->values[unit->result];
    if (result->handed) return te_state_hand_on(state, unit, y);
    te_tensor *stored = te_state_stored(state, result, y);
    if (stored)
        state->values[unit->result] =
            te_tensor_alias(stored, stored->ndim, stored->shape, stored->stride, stored->offset);
    te_tensor_release(stored);
    return state->values[unit->result] ? TE_OK : state->plan->ctx->status;
}

static te_status run_call(te_group_state *state, const te_unit *unit)
{
    te_fuse_plan *plan = state->plan;
    te_context *ctx = plan->ctx;
    const te_group_node *node = &plan->nodes[unit->nodes[0]];
    const te_plan_value *result = &plan->values[unit->result];
    te_status status = open_operand(state, unit);
    if (status != TE_OK) return status;
    te_tensor *x = te_state_seen(state, &plan->values[unit->x], state->values[unit->x], result->frame);
    int sinks = te_plan_sinks(plan, node);
    bool wanted = plan->values[unit->x].wanted;
    te_tensor *leaf = leaf_of(x, wanted), *second = sinks == TE_NO_VALUE ? NULL : leaf_of(state->values[sinks], true);
    te_tensor_release(x);
    if (!leaf || (sinks != TE_NO_VALUE && !second)) {
        te_tensor_release(leaf);
        return ctx->status;
    }
    te_call call = node->call;
    call.in[0] = leaf;
    for (int i = 1; i < call.op->n_inputs; i++)
        call.in[i] = node->in[i] == TE_NO_VALUE ? NULL : node->in[i] == sinks ? second : state->values[node->in[i]];
    status = run_with_state(state, unit, &call, node->recipe_state);
    te_tensor *y = call.out[0];
    bool recorded = wanted || second;
    if (status == TE_OK && recorded) {
        state->aux[unit->first_aux] = wanted ? te_tensor_retain(leaf) : NULL;
        state->aux[unit->first_aux + 1] = te_tensor_retain(y);
        state->aux[unit->first_aux + 2] = te_tensor_retain(second);
    }
    if (status == TE_OK) status = keep_result(state, unit, y);
    if (status == TE_OK && wanted && (unit->attention || te_plan_turns(node))) status = forget_values(leaf);
    if (status == TE_OK && recorded && unit->attention && !result->handed) status = forget_values(y);
    te_tensor_release(y);
    te_tensor_release(leaf);
    te_tensor_release(second);
    return status;
}

static te_status run_view(te_group_state *state, const te_unit *unit)
{
    te_tensor *y = te_state_stored(state, &state->plan->values[unit->result], state->values[unit->x]);
    state->values[unit->result] = y;
    return y ? TE_OK : state->plan->ctx->status;
}

/* --- saved in a byte a value -------------------------------------------------------------------------------------- */

static te_status pack(te_group_state *state, int value)
{
    static const te_quantizer e4m3 = {.element = TE_E4M3, .scale = TE_SCALE_F32};
    te_quantize_options options = {.want = {true, false}, .scale = 1};
    const te_plan_value *v = &state->plan->values[value];
    te_status status = te_quantize(state->values[value], &e4m3, &options, &state->packs[v->pack]);
    drop(&state->values[value], 1);
    return status;
}

te_status te_group_state_unpack(te_group_state *state, const te_unit *unit)
{
    te_context *ctx = state->plan->ctx;
    for (int i = 0; i < unit->n_slots; i++) {
        int value = unit->slots[i].value;
        const te_plan_value *v = &state->plan->values[value];
        if (state->values[value]) continue;
        if (v->spread && te_biases_forward(state, &state->plan->units[v->unit]) != TE_OK) return ctx->status;
        if (!v->packed) continue;
        state->values[value] = te_dequantize(ctx, &state->packs[v->pack], 0);
        if (!state->values[value]) return ctx->status;
    }
    return TE_OK;
}

void te_group_state_repack(te_group_state *state, const te_unit *unit, bool release)
{
    for (int i = 0; i < unit->n_slots; i++) {
        const te_plan_value *v = &state->plan->values[unit->slots[i].value];
        if (!v->packed && !v->spread) continue;
        drop(&state->values[unit->slots[i].value], 1);
        if (release && v->packed) te_quantized_close(&state->packs[v->pack]);
    }
}

/* What no later unit, nor backward, nor the caller reads is given back at once. */
static te_status release_read(te_group_state *state, int position)
{
    te_status status = TE_OK;
    te_fuse_plan *plan = state->plan;
    const te_unit *unit = &plan->units[position];
    for (int k = 0; k < unit->n_nodes; k++) {
        const te_group_node *node = &plan->nodes[unit->nodes[k]];
        for (int i = 0; i < node->call.op->n_inputs; i++) {
            const te_plan_value *v = node->in[i] == TE_NO_VALUE ? NULL : &plan->values[node->in[i]];
            if (!v || v->last_reader != position || v->output >= 0) continue;
            if (v->packed && state->values[node->in[i]] && status == TE_OK) status = pack(state, node->in[i]);
            if (!(v->saved && plan->record)) drop(&state->values[node->in[i]], 1);
        }
    }
    return status;
}

/* Whether something else than a product, as its weight, reads a value. */
static bool read_elsewhere(const te_fuse_plan *plan, int value)
{
    for (int u = 0; u < plan->n_units; u++) {
        const te_unit *unit = &plan->units[u];
        for (int k = 0; k < unit->n_nodes; k++) {
            const te_group_node *node = &plan->nodes[unit->nodes[k]];
            for (int i = 0; i < node->call.op->n_inputs; i++)
                if (node->in[i] == value && (unit->kind != TE_UNIT_LINEAR || i != 1)) return true;
            for (int i = 0; i < node->n_list; i++)
                if (node->list[i] == value && plan->values[value].ndim != 2) return true;
        }
    }
    return false;
}

/* Parameters that are stored quantized stay so where products multiply them. */
static te_status take_inputs(te_group_state *state, te_tensor *const *inputs)
{
    te_fuse_plan *plan = state->plan;
    for (int v = 0; v < plan->n_values; v++) {
        if (plan->values[v].input < 0) continue;
        te_tensor *t = inputs[plan->values[v].input];
        bool open = t && te_tensor_is_quantized(t) && read_elsewhere(plan, v), framed = t && plan->values[v].frame > 0;
        state->values[v] = open     ? te_tensor_dequantized(t)
                           : framed ? te_state_stored(state, &plan->values[v], t)
                                    : te_tensor_retain(t);
        if (t && !state->values[v]) return plan->ctx->status;
    }
    return TE_OK;
}

/* --- the plan ----------------------------------------------------------------------------------------------------- */

te_status te_plan_forward(te_group_state *state, te_tensor *const *inputs)
{
    te_fuse_plan *plan = state->plan;
    te_status status = take_inputs(state, inputs);
    te_state_draw(state);
    for (int u = 0; u < plan->n_units && status == TE_OK; u++) {
        const te_unit *unit = &plan->units[u];
        status = te_context_poll(plan->ctx);
        if (status != TE_OK) break;
        switch (unit->kind) {
        case TE_UNIT_PROGRAM: status = run_program(state, unit); break;
        case TE_UNIT_LINEAR: status = run_linear(state, unit); break;
        case TE_UNIT_ATTENTION: status = run_call(state, unit); break;
        case TE_UNIT_GATHER: status = te_gather_forward(state, unit); break;
        case TE_UNIT_GROUPED: status = te_grouped_forward(state, unit); break;
        case TE_UNIT_BIASES: status = te_biases_forward(state, unit); break;
        case TE_UNIT_MASK: status = te_mask_forward(state, unit); break;
        case TE_UNIT_VIEW: status = run_view(state, unit); break;
        }
        if (status == TE_OK) status = release_read(state, u);
    }
    return status;
}
