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
    case TE_VALUE_FIXED: return (double)v->width * size;
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

/* "float8_e4m3", "float8_e4m3 in blocks of 1 x 32". */
static const char *format_text(const te_quantizer *q, char *text, size_t size)
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

static te_emit_way way_of(const te_describing *d, int value)
{
    return te_plan_emits(d->plan, d->device, value, (int64_t)te_described_rows(d, d->plan->values[value].space));
}

/* What a program writes of a value that it may leave quantized for a product: in forward the input, in backward the
 * gradient of the result. `detail` says so behind the kernel's name. */
static double emitted_bytes(const te_describing *d, int value, char *detail, size_t size)
{
    te_role role;
    const te_unit *product = te_emitted_product(d->plan, value, &role);
    te_emit_way way = way_of(d, value);
    char format[64];
    const te_plan_value *v = &d->plan->values[value];
    double n = te_described_rows(d, v->space) * (double)v->width;
    const te_product_recipe *recipe = te_emitted_recipe(product);
    bool columns = te_emitted_columns(d->plan, product);
    bool rows = role == TE_ROLE_INPUT || d->plan->values[product->x].wanted;
    if (way == TE_EMIT_STORED) {
        snprintf(detail, size, ", amax of %s%s", te_role_names[role],
                 d->device->exec.backend->emits ? "" : ", in stripes");
        return te_described_bytes(d, value, 0);
    }
    snprintf(detail, size, ", %squantize %s to %s, in %s", way == TE_EMIT_TWICE ? "twice: amax, " : "",
             te_role_names[role], format_text(&recipe->quantizers[role], format, sizeof format),
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
             format_text(&unit->recipe->quantizers[role], format, sizeof format),
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

static void forward_linear(const te_describing *d, const te_unit *unit)
{
    const te_plan_value *values = d->plan->values;
    double x = te_described_elements(d, unit->x), w = te_described_elements(d, unit->weight),
           y = te_described_bytes(d, unit->result, 0);
    bool columns = te_described_quantized(unit);
    if (!values[unit->x].handed)
        te_describe_quantize(d, unit, TE_ROLE_INPUT, x, true, columns && values[unit->weight].wanted, false,
                             way_of(d, unit->x));
    double read = te_described_operand(unit, TE_ROLE_INPUT, x) + te_described_operand(unit, TE_ROLE_WEIGHT, w);
    if (unit->bias != TE_NO_VALUE) read += te_described_bytes(d, unit->bias, 0);
    double flops =
        2 * te_described_rows(d, unit->space) * (double)values[unit->x].width * (double)values[unit->result].width;
    te_described_product p = te_described_gemm(d, unit);
    char kernel[160];
    te_describe_step(d, unit, TE_STEP_PRODUCT,
                     te_describe_product(&p, TE_PRODUCT_FORWARD, "linear", kernel, sizeof kernel), read, y, flops,
                     false);
}

static void backward_linear(const te_describing *d, const te_unit *unit)
{
    const te_plan_value *values = d->plan->values;
    bool want_dx = values[unit->x].wanted, want_dweight = values[unit->weight].wanted;
    te_role dy_role = te_described_quantized(unit) ? TE_ROLE_GRAD_OUTPUT : TE_ROLE_COUNT;
    double x = te_described_elements(d, unit->x), w = te_described_elements(d, unit->weight),
           y = te_described_elements(d, unit->result);
    double high = (double)te_dtype_size(unit->compute);
    double flops =
        2 * te_described_rows(d, unit->space) * (double)values[unit->x].width * (double)values[unit->result].width;
    double x_bytes = dy_role == TE_ROLE_COUNT ? high * x : te_described_operand(unit, TE_ROLE_INPUT, x);
    double w_bytes = dy_role == TE_ROLE_COUNT ? high * w : te_described_operand(unit, TE_ROLE_WEIGHT, w);
    double y_bytes = dy_role == TE_ROLE_COUNT ? high * y : te_described_operand(unit, dy_role, y);
    if (dy_role != TE_ROLE_COUNT)
        te_describe_quantize(d, unit, dy_role, y, want_dx, want_dweight, true, way_of(d, unit->result));
    te_described_product p = te_described_gemm(d, unit);
    char kernel[160];
    if (want_dx)
        te_describe_step(d, unit, TE_STEP_PRODUCT,
                         te_describe_product(&p, TE_PRODUCT_DGRAD, "dgrad", kernel, sizeof kernel), y_bytes + w_bytes,
                         te_described_bytes(d, unit->x, 0), flops, true);
    p.result = values[unit->weight].dtype;
    if (want_dweight && !values[unit->x].again)
        te_describe_step(d, unit, TE_STEP_PRODUCT,
                         te_describe_product(&p, TE_PRODUCT_WGRAD, "wgrad", kernel, sizeof kernel), x_bytes + y_bytes,
                         te_described_bytes(d, unit->weight, 0), flops, true);
    if (unit->bias != TE_NO_VALUE && values[unit->bias].wanted && !unit->bias_elsewhere)
        te_describe_step(d, unit, TE_STEP_ROW_PROGRAM, "bias gradient", te_described_bytes(d, unit->result, 0),
            te_described_bytes(d, unit->bias, 0), 0, true);
}

/* The weight gradients that waited for a value to be computed again. */
static void waiting_products(const te_describing *d, int value)
{
    const te_plan_value *values = d->plan->values;
    for (int u = d->plan->n_units - 1; u >= 0; u--) {
        const te_unit *unit = &d->plan->units[u];
        if (unit->kind != TE_UNIT_LINEAR || unit->x != value || !values[unit->weight].wanted) continue;
        double flops =
            2 * te_described_rows(d, unit->space) * (double)values[unit->x].width * (double)values[unit->result].width;
        te_describe_step(d, unit, TE_STEP_PRODUCT, "wgrad",
                         te_described_bytes(d, unit->x, 0) + te_described_bytes(d, unit->result, 0),
                         te_described_bytes(d, unit->weight, 0), flops, true);
    }
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
    te_describe_quantize(d, &quantized, TE_ROLE_INPUT, x, true, false, false, way_of(d, unit->x));
    snprintf(kernel, sizeof kernel, "%s of %s%s", d->plan->nodes[unit->nodes[0]].call.op->name, format,
             result->handed ? ", result as bytes to its product" : "");
    te_describe_step(d, unit, TE_STEP_CALLED, kernel, x, y, attention_flops(d, unit), false);
    if (!result->handed)
        te_describe_step(d, unit, TE_STEP_QUANTIZE, "values of the result", y, te_described_bytes(d, unit->result, 0),
                         0, false);
}

static void forward_unit(const te_describing *d, const te_unit *unit)
{
    const te_fuse_plan *plan = d->plan;
    double read = 0, written = 0;
    if (unit->kind == TE_UNIT_PROGRAM) {
        if (!unit->n_results) return;
        for (int i = 0; i < unit->n_slots; i++)
            read += te_described_bytes(d, unit->slots[i].value, unit->slots[i].part.half);
        char kernel[256], detail[160] = "";
        bool twice = false;
        for (int i = 0; i < unit->n_results; i++) {
            te_emit_way way = way_of(d, unit->results[i]);
            twice |= way == TE_EMIT_TWICE;
            written += way ? emitted_bytes(d, unit->results[i], detail, sizeof detail)
                           : te_described_bytes(d, unit->results[i], 0);
        }
        written += unit->gradient.n_rows * row_bytes(d, unit);
        const te_program *program = unit->gradient.forward;
        snprintf(kernel, sizeof kernel, "%s%s", program->name, detail);
        te_describe_step(d, unit, TE_STEP_ROW_PROGRAM, kernel, read + measuring_bytes(d, unit, true, twice), written,
            program_flops(d, unit, program) + measuring_flops(d, unit, true, twice), false);
        return;
    }
    if (unit->kind == TE_UNIT_LINEAR) {
        forward_linear(d, unit);
        return;
    }
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
    else if (unit->kind == TE_UNIT_CALL)
        te_describe_step(d, unit, TE_STEP_CALLED, plan->nodes[unit->nodes[0]].call.op->name,
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

static void backward_program(const te_describing *d, const te_unit *unit)
{
    const te_gradient *g = &unit->gradient;
    double read = 0, written = 0;
    bool computes = false, twice = false;
    char kernel[256], detail[160] = "";
    if (!g->backward) return;
    for (int i = 0; i < g->n_sources; i++) read += source_bytes(d, unit, &g->sources[i]);
    for (int k = 0; k < unit->n_grads; k++) {
        const te_unit_grad *grad = &unit->grads[k];
        if (grad->alias >= 0) continue;
        computes = true;
        int value = unit->slots[grad->slot].value;
        te_emit_way way = te_emitted_by(d->plan, unit, false, k) == TE_NO_VALUE ? TE_EMIT_APART : way_of(d, value);
        if (way != TE_EMIT_APART) {
            twice |= way == TE_EMIT_TWICE;
            if (unit->slots[grad->slot].part.half != 2) written += emitted_bytes(d, value, detail, sizeof detail);
            continue;
        }
        written += te_described_bytes(d, grad->bias == TE_NO_VALUE ? unit->slots[grad->slot].value : grad->bias,
                               unit->slots[grad->slot].part.half);
    }
    for (int i = 0; i < unit->n_again; i++) written += te_described_bytes(d, unit->again[i], 0);
    for (int i = 0; i < unit->n_slots; i++) { /* before it runs */
        const te_plan_value *v = &d->plan->values[unit->slots[i].value];
        if (v->spread)
            te_describe_step(d, &d->plan->units[v->unit], TE_STEP_GATHER, "grouped_biases again",
                             te_described_list(d, &d->plan->units[v->unit]),
                             te_described_bytes(d, unit->slots[i].value, 0), 0, true);
    }
    snprintf(kernel, sizeof kernel, "%s%s%s", g->backward->name, unit->n_again ? ", operand again" : "", detail);
    if (computes || unit->n_again)
        te_describe_step(d, unit, TE_STEP_ROW_PROGRAM, kernel, read + measuring_bytes(d, unit, false, twice), written,
            program_flops(d, unit, g->backward) + measuring_flops(d, unit, false, twice), true);
    for (int i = 0; i < unit->n_again; i++) waiting_products(d, unit->again[i]);
}

static void backward_unit(const te_describing *d, const te_unit *unit)
{
    const te_plan_value *values = d->plan->values;
    if (!values[unit->kind == TE_UNIT_PROGRAM ? d->plan->nodes[unit->nodes[0]].out : unit->result].wanted) return;
    if (unit->kind == TE_UNIT_PROGRAM) {
        backward_program(d, unit);
        return;
    }
    double x = te_described_bytes(d, unit->x, 0), y = te_described_bytes(d, unit->result, 0);
    if (unit->kind == TE_UNIT_CALL) {
        if (unit->attention)
            te_describe_step(d, unit, TE_STEP_QUANTIZE, "values of operands and result",
                             te_described_elements(d, unit->x) + te_described_elements(d, unit->result), x + y, 0,
                             true);
        te_describe_step(d, unit, TE_STEP_CALLED, d->plan->nodes[unit->nodes[0]].call.op->name, x + 2 * y, x,
            2.5 * attention_flops(d, unit), true);
        return;
    }
    if (unit->kind == TE_UNIT_GATHER)
        te_describe_step(d, unit, TE_STEP_GATHER, "embedding_backward", 2 * y + id_bytes(d, unit), y, 0, true);
    if (unit->kind == TE_UNIT_GROUPED) te_describe_grouped_backward(d, unit);
    if (unit->kind == TE_UNIT_BIASES)
        te_describe_step(d, unit, TE_STEP_GATHER, "bias gradients", y, te_described_list(d, unit), 0, true);
    if (unit->kind == TE_UNIT_LINEAR) backward_linear(d, unit);
}

/* --- splits ------------------------------------------------------------------------------------------------------- */

/* How attention's operands get into the form that it reads. */
static const char *why_before_attention(const te_describing *d, const te_unit *maker, const te_unit *call, char *text,
                                        size_t size)
{
    char format[64];
    if (maker->kind == TE_UNIT_LINEAR)
        return "attention reads its operands quantized by a kernel of its own: the product's kernels round to 16 or 32 "
               "bits";
    snprintf(
        text, size, "attention reads its operands from memory, quantized to %s %s",
        format_text(&call->attention->quantizers[TE_ROLE_INPUT], format, sizeof format),
        te_emit_reason(d->plan, d->device, call->x, (int64_t)te_described_rows(d, d->plan->values[call->x].space)));
    return text;
}

/* How a product's operand gets into the form that it is multiplied in. */
static const char *why_stored(const te_describing *d, const te_unit *product, char *text, size_t size)
{
    char format[64];
    if (!product->recipe) return "a matrix product reads its operand from memory";
    if (!product->recipe->quantized[TE_ROLE_INPUT])
        return "a matrix product reads its operand from memory, which the recipe leaves in high precision";
    const te_quantizer *q = &product->recipe->quantizers[TE_ROLE_INPUT];
    format_text(q, format, sizeof format);
    snprintf(text, size, "a matrix product reads its operand from memory, quantized to %s %s", format,
             te_emit_reason(d->plan, d->device, product->x,
                            (int64_t)te_described_rows(d, d->plan->values[product->x].space)));
    return text;
}

static const char *why_not_handed(const te_fuse_plan *plan, const te_unit *call, char *text, size_t size)
{
    const char *reason = te_plan_why_not_handed(plan, call);
    if (!reason) return "attention hands its result on as the bytes that the product multiplies";
    snprintf(text, size, "attention's bytes become values again: %s", reason);
    return text;
}

static const char *why_split(const te_describing *d, int from, int to, char *text, size_t size)
{
    const te_fuse_plan *plan = d->plan;
    const te_unit *a = &plan->units[plan->values[plan->nodes[from].out].unit];
    const te_unit *b = &plan->units[plan->values[plan->nodes[to].out].unit];
    if (a->kind == TE_UNIT_LINEAR && b->kind == TE_UNIT_LINEAR)
        return "two matrix products: the second needs whole rows of the first";
    if (a->kind == TE_UNIT_VIEW && b->kind == TE_UNIT_LINEAR && b->recipe)
        return "behind the reshape rows have another width, so a program before it cannot leave the product's operand "
               "quantized";
    if (a->kind == TE_UNIT_VIEW || b->kind == TE_UNIT_VIEW) return "behind the reshape rows have another width";
    if (b->kind == TE_UNIT_GROUPED && b->n_products)
        return "products of ranges of rows: each quantizes its own, and which they are is known when it runs";
    if (a->kind == TE_UNIT_GROUPED || b->kind == TE_UNIT_GROUPED)
        return "products of ranges of rows read and write memory";
    if (a->kind == TE_UNIT_BIASES) return "biases are spread over the rows of their ranges, then read by one program";
    if (a->kind == TE_UNIT_MASK) return "one number is drawn for a whole sample, before programs read it row by row";
    if (a->kind == TE_UNIT_GATHER) return "the rows that are looked up are stored, then read by one step";
    if (a->kind == TE_UNIT_CALL && a->attention) return why_not_handed(plan, a, text, size);
    if (b->kind == TE_UNIT_CALL && b->attention) return why_before_attention(d, a, b, text, size);
    if (a->kind == TE_UNIT_CALL || b->kind == TE_UNIT_CALL) return "attention reads and writes whole sequences";
    if (a->kind == TE_UNIT_LINEAR) return "a matrix product's result is stored, then read by one program";
    if (b->kind == TE_UNIT_LINEAR) return why_stored(d, b, text, size);
    if (a->width != b->width) return "rows of another width: one value of the second needs two of the first";
    return "a matrix product lies between them on another path";
}

static void say_splits(const te_describing *d, void (*split)(void *, const te_split_description *), void *user)
{
    const te_fuse_plan *plan = d->plan;
    for (int n = 0; n < plan->n_nodes; n++) {
        for (int i = 0; i < plan->nodes[n].call.op->n_inputs; i++) {
            int value = plan->nodes[n].in[i], from = value == TE_NO_VALUE ? -1 : plan->values[value].node;
            if (from < 0 || plan->values[value].unit == plan->values[plan->nodes[n].out].unit) continue;
            char text[256];
            te_split_description s = {from, n, why_split(d, from, n, text, sizeof text)};
            split(user, &s);
        }
    }
}

te_status te_group_describe(te_group *group, te_tensor *const *inputs,
                            void (*step)(void *user, const te_step_description *),
                            void (*split)(void *user, const te_split_description *), void *user)
{
    const te_tensor *x = inputs[0];
    bool record = false;
    if (!x || x->ndim < 1)
        return te_fail(group->ctx, TE_ERROR_UNSUPPORTED, "a group needs an input with at least one dimension");
    for (int i = 0; i < group->n_inputs; i++)
        record |= inputs[i] && group->ctx->grad_enabled && te_needs_grad(inputs[i]);
    te_fuse_plan *plan = te_group_plan(group, inputs, record);
    if (!plan) return group->ctx->status;
    if (plan->refusal) return te_fail(group->ctx, TE_ERROR_UNSUPPORTED, "%s", plan->refusal);
    te_group_state *state = te_group_state_new(plan, inputs);
    if (!state) return group->ctx->status;
    te_describing d = {.plan = plan, .device = x->storage->device, .frames = state->frames, .step = step, .user = user};
    for (int u = 0; u < plan->n_units; u++) forward_unit(&d, &plan->units[u]);
    for (int u = plan->n_units - 1; u >= 0 && record; u--) backward_unit(&d, &plan->units[u]);
    say_splits(&d, split, user);
    te_group_state_free(state);
    return TE_OK;
}

int te_group_node_label(const te_group *group, int node) { return group->nodes[node].label; }
const char *te_group_node_name(const te_group *group, int node) { return group->nodes[node].call.op->name; }
