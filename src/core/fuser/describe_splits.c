/* describe_splits.c - why neighbours are not one step: the edges of the graph that cross steps, each with its
 * reason. */
#include "describe_internal.h"
#include "handed.h"

#include <stdio.h>

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
        te_described_format(&call->attention->quantizers[TE_ROLE_INPUT], format, sizeof format),
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
    te_described_format(q, format, sizeof format);
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

/* What keeps two programs of one kind apart, which run in stages. */
static const char *what_lies_between(const te_unit *a, const te_unit *b)
{
    bool only_programs = true;
    for (const te_unit *unit = a + 1; unit < b; unit++) only_programs &= unit->kind == TE_UNIT_PROGRAM;
    if (!only_programs || b <= a) return "a matrix product lies between them on another path";
    return a->compute_f64 ? "one that computes in float32 lies between them on another path"
                          : "one that computes in float64 lies between them on another path";
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
    if (a->kind == TE_UNIT_ATTENTION && a->attention) return why_not_handed(plan, a, text, size);
    if (b->kind == TE_UNIT_ATTENTION && b->attention) return why_before_attention(d, a, b, text, size);
    if (a->kind == TE_UNIT_ATTENTION || b->kind == TE_UNIT_ATTENTION)
        return "attention reads and writes whole sequences";
    if (a->kind == TE_UNIT_LINEAR) return "a matrix product's result is stored, then read by one program";
    if (b->kind == TE_UNIT_LINEAR) return why_stored(d, b, text, size);
    if (a->width != b->width) return "rows of another width: one value of the second needs two of the first";
    if (a->compute_f64 != b->compute_f64) return "one computes in float64, the other in float32";
    return what_lies_between(a, b);
}

void te_describe_splits(const te_describing *d, void (*split)(void *, const te_split_description *), void *user)
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
