/* describe.c - bytes and operations of a plan's steps, counted as forward.c and backward.c bind them. */
#include "describe.h"

#include "../autograd.h"
#include "describe_internal.h"
#include "handed.h"

#include <stdio.h>

double te_described_rows(const te_describing *d, int space)
{
    double rows = 1;
    for (int i = 0; i + 1 < d->frames[space].ndim; i++) rows *= (double)d->frames[space].shape[i];
    return rows;
}

double te_described_bytes(const te_describing *d, int value, int half)
{
    const te_plan_value *v = &d->plan->values[value];
    double size = (double)te_dtype_size(v->dtype);
    switch (v->cls) {
    case TE_VALUE_TOKENS: return te_described_rows(d, v->space) * (double)v->width * size / (half ? 2 : 1);
    case TE_VALUE_ROWS: return te_described_rows(d, v->space) * size;
    case TE_VALUE_FIXED: return (double)v->width * size / (half ? 2 : 1); /* a bias, whose halves are summed apart */
    default: return 0;
    }
}

static double row_bytes(const te_describing *d, const te_unit *unit)
{
    return te_described_rows(d, unit->space) * (unit->compute_f64 ? 8 : 4);
}

static double program_flops(const te_describing *d, const te_unit *unit, const te_program *program)
{
    double per_element = 0;
    for (int i = 0; i < program->n_insns; i++)
        per_element += program->insns[i].rate == TE_RATE_ELEM && te_opcode_args((te_opcode)program->insns[i].op) > 0;
    return per_element * te_described_rows(d, unit->space) * (double)unit->width;
}

void te_describe_step(const te_describing *d, const te_unit *unit, te_step_what what, const char *kernel, double read,
                      double written, double flops, bool backward)
{
    te_step_description step = {what, kernel, unit->n_nodes, unit->nodes, read, written, flops, backward};
    d->step(d->user, &step);
}

static double attention_flops(const te_describing *d, const te_unit *unit)
{
    const te_plan_value *y = &d->plan->values[unit->result];
    const te_space *s = &d->frames[y->frame];
    double sequence = s->ndim > 1 ? (double)s->shape[s->ndim - 2] : 1;
    return 4 * te_described_rows(d, y->space) * sequence * (double)y->width;
}

/* --- quantizing --------------------------------------------------------------------------------------------------- */

const char *te_described_format(const te_quantizer *q, char *text, size_t size)
{
    if (q->block_rows)
        snprintf(text, size, "%s in blocks of %d x %d", te_element_names[q->element], q->block_rows, q->block_cols);
    else
        snprintf(text, size, "%s", te_element_names[q->element]);
    return text;
}

/* Bytes that an operand of n elements takes in one direction; in high precision when its role is not quantized. */
static double operand_bytes(const te_product_recipe *recipe, te_dtype compute, te_role role, double n)
{
    static const double factor[] = {4, 1, 1};
    if (!recipe || !recipe->quantized[role]) return n * (double)te_dtype_size(compute);
    const te_quantizer *q = &recipe->quantizers[role];
    double rows = q->replicated ? 1 : q->block_rows, block = q->block_rows ? rows * q->block_cols : n;
    return n * (q->element == TE_E2M1 ? 0.5 : 1) + (n > 0 ? n / block * factor[q->scale] : 0);
}

double te_described_operand(const te_unit *unit, te_role role, double n)
{
    return operand_bytes(unit->recipe, unit->compute, role, n);
}

te_emit_way te_described_way(const te_describing *d, int value)
{
    return te_plan_emits(d->plan, d->device, value, (int64_t)te_described_rows(d, d->plan->values[value].space));
}

/* What a program writes of a value that it may leave quantized for a product: in forward the input, in backward the
 * gradient of the result. `detail` says so behind the kernel's name. */
static double emitted_bytes(const te_describing *d, int value, char *detail, size_t size)
{
    te_role role;
    const te_unit *product = te_emitted_product(d->plan, value, &role);
    te_emit_way way = te_described_way(d, value);
    char format[64];
    const te_plan_value *v = &d->plan->values[value];
    double n = te_described_rows(d, v->space) * (double)v->width;
    const te_product_recipe *recipe = te_emitted_recipe(product);
    bool columns = te_emitted_columns(d->plan, product, role);
    bool rows = role == TE_ROLE_INPUT || d->plan->values[product->x].wanted;
    if (way == TE_EMIT_STORED) {
        snprintf(detail, size, ", amax of %s%s", te_role_names[role],
                 d->device->exec.backend->emits ? "" : ", in stripes");
        return te_described_bytes(d, value, 0);
    }
    snprintf(detail, size, ", %squantize %s to %s, in %s", way == TE_EMIT_TWICE ? "twice: amax, " : "",
             te_role_names[role], te_described_format(&recipe->quantizers[role], format, sizeof format),
             d->device->exec.backend->emits ? "tiles" : "stripes");
    return (rows + columns) * operand_bytes(recipe, product->compute, role, n);
}

/* What a first run that only measures reads and computes. */
static double measuring_bytes(const te_describing *d, const te_unit *unit, bool forward, bool twice)
{
    return twice ? te_described_rows(d, unit->space) * (double)unit->emit_cost[!forward].read : 0;
}

static double measuring_flops(const te_describing *d, const te_unit *unit, bool forward, bool twice)
{
    return twice ? te_described_rows(d, unit->space) * (double)unit->emit_cost[!forward].flops : 0;
}

void te_describe_quantize(const te_describing *d, const te_unit *unit, te_role role, double n, bool rowwise,
                          bool columnwise, bool backward, te_emit_way way)
{
    char format[64], kernel[128];
    if (way == TE_EMIT_AT_ONCE || way == TE_EMIT_TWICE) return;
    if (!unit->recipe || !unit->recipe->quantized[role] || !(rowwise || columnwise)) return;
    snprintf(kernel, sizeof kernel, "quantize %s to %s, %s%s", te_role_names[role],
             te_described_format(&unit->recipe->quantizers[role], format, sizeof format),
             rowwise && columnwise ? "row-wise and column-wise" : rowwise ? "row-wise" : "column-wise",
             way == TE_EMIT_STORED ? ", by that amax" : "");
    te_describe_step(d, unit, TE_STEP_QUANTIZE, kernel, n * (double)te_dtype_size(unit->compute),
        (rowwise + columnwise) * te_described_operand(unit, role, n), 0, backward);
}

double te_described_elements(const te_describing *d, int value)
{
    const te_plan_value *v = &d->plan->values[value];
    return (v->cls == TE_VALUE_TOKENS ? te_described_rows(d, v->space) : 1) * (double)v->width;
}

/* Whether backward multiplies quantized operands. */
bool te_described_quantized(const te_unit *unit)
{
    return unit->recipe && unit->recipe->backward == TE_BACKWARD_QUANTIZED;
}

te_described_product te_described_gemm(const te_describing *d, const te_unit *unit)
{
    return (te_described_product){.exec = &d->device->exec,
                                  .recipe = unit->recipe,
                                  .compute = unit->compute,
                                  .result = unit->compute,
                                  .tokens = (int64_t)te_described_rows(d, unit->space),
                                  .in = d->plan->values[unit->x].width,
                                  .out = d->plan->values[unit->result].width};
}

static double id_bytes(const te_describing *d, const te_unit *unit)
{
    return te_described_rows(d, unit->space) * (double)te_dtype_size(d->plan->values[unit->x].dtype);
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* Attention under a recipe: reads bytes and leaves bytes, from which values are made unless a product takes them. */
static void forward_quantized_call(const te_describing *d, const te_unit *unit)
{
    double x = te_described_elements(d, unit->x), y = te_described_elements(d, unit->result);
    const te_plan_value *result = &d->plan->values[unit->result];
    te_unit quantized = *unit;
    const char *format = te_element_names[unit->attention->quantizers[TE_ROLE_INPUT].element];
    char kernel[192];
    quantized.recipe = unit->attention;
    te_describe_quantize(d, &quantized, TE_ROLE_INPUT, x, true, false, false, te_described_way(d, unit->x));
    snprintf(kernel, sizeof kernel, "%s of %s%s", d->plan->nodes[unit->nodes[0]].call.op->name, format,
             result->handed ? ", result as bytes to its product" : "");
    te_describe_step(d, unit, TE_STEP_CALLED, kernel, x, y, attention_flops(d, unit), false);
    if (!result->handed)
        te_describe_step(d, unit, TE_STEP_QUANTIZE, "values of the result", y, te_described_bytes(d, unit->result, 0),
                         0, false);
}

/* Queries and keys are turned by their positions in a copy of the projection, and their gradients back. */
static void describe_turning(const te_describing *d, const te_unit *unit, bool backward)
{
    if (unit->kind != TE_UNIT_ATTENTION || !te_plan_turns(&d->plan->nodes[unit->nodes[0]])) return;
    double x = te_described_bytes(d, unit->x, 0);
    te_describe_step(d, unit, TE_STEP_GATHER, "rope", x, x, 3 * te_described_elements(d, unit->x), backward);
}

static void forward_program(const te_describing *d, const te_unit *unit)
{
    double read = 0, written = unit->gradient.n_rows * row_bytes(d, unit);
    const te_program *program = unit->gradient.forward;
    char kernel[256], detail[160] = "";
    bool twice = false;
    if (!unit->n_results) return;
    for (int i = 0; i < unit->n_slots; i++)
        read += te_described_bytes(d, unit->slots[i].value, unit->slots[i].part.half);
    for (int i = 0; i < unit->n_results; i++) {
        te_emit_way way = te_described_way(d, unit->results[i]);
        twice |= way == TE_EMIT_TWICE;
        written += way ? emitted_bytes(d, unit->results[i], detail, sizeof detail)
                       : te_described_bytes(d, unit->results[i], 0);
    }
    snprintf(kernel, sizeof kernel, "%s%s", program->name, detail);
    te_describe_step(d, unit, TE_STEP_ROW_PROGRAM, kernel, read + measuring_bytes(d, unit, true, twice), written,
        program_flops(d, unit, program) + measuring_flops(d, unit, true, twice), false);
}

static void forward_unit(const te_describing *d, const te_unit *unit)
{
    if (unit->kind == TE_UNIT_PROGRAM) {
        forward_program(d, unit);
        return;
    }
    if (unit->kind == TE_UNIT_LINEAR) {
        te_describe_linear(d, unit);
        return;
    }
    describe_turning(d, unit, false);
    if (unit->attention) {
        forward_quantized_call(d, unit);
        return;
    }
    double y = te_described_bytes(d, unit->result, 0);
    if (unit->kind == TE_UNIT_MASK)
        te_describe_step(d, unit, TE_STEP_GATHER, "stochastic_depth_mask", 0, y, 0, false);
    else if (unit->kind == TE_UNIT_GROUPED)
        te_describe_grouped(d, unit);
    else if (unit->kind == TE_UNIT_BIASES)
        te_describe_step(d, unit, TE_STEP_GATHER, "grouped_biases", te_described_list(d, unit), y, 0, false);
    else if (unit->kind == TE_UNIT_GATHER)
        te_describe_step(d, unit, TE_STEP_GATHER, "embedding", y + id_bytes(d, unit), y, 0, false);
    else if (unit->kind == TE_UNIT_ATTENTION)
        te_describe_step(d, unit, TE_STEP_CALLED, d->plan->nodes[unit->nodes[0]].call.op->name,
                         te_described_bytes(d, unit->x, 0), y, attention_flops(d, unit), false);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

static double source_bytes(const te_describing *d, const te_unit *unit, const te_grad_source *source)
{
    switch (source->kind) {
    case TE_GRAD_FROM_INPUT:
        return te_described_bytes(d, unit->slots[source->index].value, unit->slots[source->index].part.half);
    case TE_GRAD_FROM_OUTPUT: return te_described_bytes(d, unit->results[source->index], 0);
    case TE_GRAD_FROM_ROW: return row_bytes(d, unit);
    default: break;
    }
    if (source->index < unit->n_results) return te_described_bytes(d, unit->results[source->index], 0);
    const te_unit_slot *slot = &unit->slots[unit->identities[source->index - unit->n_results]];
    return te_described_bytes(d, slot->value, slot->part.half);
}

/* What a program writes of an operand that a weight gradient waits for: its values, or the bytes that are read of
 * it. */
static double again_bytes(const te_describing *d, const te_unit *unit, int i, char *detail, size_t size)
{
    char format[64];
    te_role role;
    int value = unit->again[i];
    int64_t rows = (int64_t)te_described_rows(d, unit->space);
    const te_unit *product = te_emitted_product(d->plan, value, &role);
    snprintf(detail, size, ", operand again");
    if (te_plan_emits_again(d->plan, d->device, unit, i, rows) == TE_EMIT_APART) return te_described_bytes(d, value, 0);
    snprintf(detail, size, ", operand again, quantize it to %s, in %s",
             te_described_format(&product->recipe->quantizers[role], format, sizeof format),
             d->device->exec.backend->emits ? "tiles" : "stripes");
    return te_described_operand(product, role, te_described_elements(d, value));
}

static void backward_program(const te_describing *d, const te_unit *unit)
{
    const te_gradient *g = &unit->gradient;
    double read = 0, written = 0;
    bool computes = false, twice = false;
    char kernel[384], detail[160] = "", again[160] = "";
    if (!g->backward) return;
    for (int i = 0; i < g->n_sources; i++) read += source_bytes(d, unit, &g->sources[i]);
    for (int k = 0; k < unit->n_grads; k++) {
        const te_unit_grad *grad = &unit->grads[k];
        if (grad->alias >= 0) continue;
        computes = true;
        int value = unit->slots[grad->slot].value;
        te_emit_way way =
            te_emitted_by(d->plan, unit, false, k) == TE_NO_VALUE ? TE_EMIT_APART : te_described_way(d, value);
        if (way != TE_EMIT_APART) {
            twice |= way == TE_EMIT_TWICE;
            if (unit->slots[grad->slot].part.half != 2) written += emitted_bytes(d, value, detail, sizeof detail);
            continue;
        }
        if (grad->same >= 0 && te_emitted_by(d->plan, unit, false, grad->same) == TE_NO_VALUE) continue;
        written += te_described_bytes(d, grad->bias == TE_NO_VALUE ? unit->slots[grad->slot].value : grad->bias,
                               unit->slots[grad->slot].part.half);
    }
    for (int i = 0; i < unit->n_again; i++) written += again_bytes(d, unit, i, again, sizeof again);
    for (int i = 0; i < unit->n_slots; i++) { /* before it runs */
        const te_plan_value *v = &d->plan->values[unit->slots[i].value];
        if (v->spread)
            te_describe_step(d, &d->plan->units[v->unit], TE_STEP_GATHER, "grouped_biases again",
                             te_described_list(d, &d->plan->units[v->unit]),
                             te_described_bytes(d, unit->slots[i].value, 0), 0, true);
    }
    snprintf(kernel, sizeof kernel, "%s%s%s", g->backward->name, again, detail);
    if (computes || unit->n_again)
        te_describe_step(d, unit, TE_STEP_ROW_PROGRAM, kernel, read + measuring_bytes(d, unit, false, twice), written,
            program_flops(d, unit, g->backward) + measuring_flops(d, unit, false, twice), true);
    for (int i = 0; i < unit->n_again; i++) te_describe_waiting(d, unit, i);
}

static void backward_unit(const te_describing *d, const te_unit *unit)
{
    const te_plan_value *values = d->plan->values;
    if (unit->kind == TE_UNIT_PROGRAM) {
        backward_program(d, unit);
        return;
    }
    if (!values[unit->result].wanted) return;
    double x = te_described_bytes(d, unit->x, 0), y = te_described_bytes(d, unit->result, 0);
    if (unit->kind == TE_UNIT_ATTENTION) {
        if (unit->attention)
            te_describe_step(d, unit, TE_STEP_QUANTIZE, "values of operands and result",
                             te_described_elements(d, unit->x) + te_described_elements(d, unit->result), x + y, 0,
                             true);
        te_describe_step(d, unit, TE_STEP_CALLED, d->plan->nodes[unit->nodes[0]].call.op->name, x + 2 * y, x,
            2.5 * attention_flops(d, unit), true);
        describe_turning(d, unit, true);
        return;
    }
    if (unit->kind == TE_UNIT_GATHER)
        te_describe_step(d, unit, TE_STEP_GATHER, "embedding_backward", 2 * y + id_bytes(d, unit), y, 0, true);
    if (unit->kind == TE_UNIT_GROUPED) te_describe_grouped_backward(d, unit);
    if (unit->kind == TE_UNIT_BIASES)
        te_describe_step(d, unit, TE_STEP_GATHER, "bias gradients", y, te_described_list(d, unit), 0, true);
    if (unit->kind == TE_UNIT_LINEAR) te_describe_linear_backward(d, unit);
}

/* --- the whole plan ----------------------------------------------------------------------------------------------- */

te_status te_plan_describe(te_fuse_plan *plan, te_tensor *const *inputs,
                           void (*step)(void *user, const te_step_description *),
                           void (*split)(void *user, const te_split_description *), void *user)
{
    te_group_state *state = te_group_state_new(plan, inputs);
    if (!state) return plan->ctx->status;
    te_describing d = {
        .plan = plan, .device = inputs[0]->storage->device, .frames = state->frames, .step = step, .user = user};
    for (int u = 0; u < plan->n_units; u++) forward_unit(&d, &plan->units[u]);
    for (int u = plan->n_units - 1; u >= 0 && plan->record; u--) backward_unit(&d, &plan->units[u]);
    te_describe_splits(&d, split, user);
    te_group_state_free(state);
    return TE_OK;
}

te_status te_group_describe(te_group *group, te_tensor *const *inputs,
                            void (*step)(void *user, const te_step_description *),
                            void (*split)(void *user, const te_split_description *), void *user)
{
    bool record;
    te_status fitting = te_group_check_inputs(group, inputs, &record);
    if (fitting != TE_OK) return fitting;
    te_fuse_plan *plan = te_group_plan(group, inputs, record);
    if (!plan) return group->ctx->status;
    if (plan->refusal) return te_fail(group->ctx, TE_ERROR_UNSUPPORTED, "%s", plan->refusal);
    return te_plan_describe(plan, inputs, step, split, user);
}

int te_group_node_label(const te_group *group, int node) { return group->nodes[node].label; }
const char *te_group_node_name(const te_group *group, int node) { return group->nodes[node].call.op->name; }
