/* describe_grouped.c - products of ranges of rows as steps: all groups together, under the recipe of those that have
 * one. */
#include "describe_internal.h"

#include <stdio.h>

/* A grouped unit as if it were one product, under the recipe that the first of its groups has that has any; `n`: how
 * many have. */
static te_unit as_product(const te_describing *d, const te_unit *unit, int *n)
{
    te_unit product = *unit;
    int groups = te_grouped_count(d->plan, &d->plan->nodes[unit->nodes[0]]);
    *n = 0;
    for (int i = groups - 1; i >= 0; i--) {
        te_product_recipe *recipe = te_grouped_recipe(d->plan, unit, i);
        if (recipe) product.recipe = recipe;
        *n += recipe != NULL;
    }
    return product;
}

/* "grouped_linear, decoded: …", and of how many groups that is true. */
static const char *grouped_text(const te_describing *d, const te_unit *product, te_product_kind kind, const char *name,
                                int quantized, char *text, size_t size)
{
    int groups = te_grouped_count(d->plan, &d->plan->nodes[product->nodes[0]]);
    te_described_product p = te_described_gemm(d, product);
    char of[64];
    if (quantized && quantized < groups)
        snprintf(of, sizeof of, "%s, %d of %d groups quantized", name, quantized, groups);
    return te_describe_product(&p, kind, quantized && quantized < groups ? of : name, text, size);
}

/* All groups together, taking every weight to be read. */
void te_describe_grouped(const te_describing *d, const te_unit *unit)
{
    const te_fuse_plan *plan = d->plan;
    const te_group_node *node = &plan->nodes[unit->nodes[0]];
    int quantized, groups = te_grouped_count(plan, node);
    te_unit product = as_product(d, unit, &quantized);
    double x = te_described_elements(d, unit->x), read = 0;
    bool wanted = false;
    char text[224];
    for (int i = 0; i < node->n_list; i++) {
        wanted |= i < groups && plan->values[node->list[i]].wanted;
        read += i < groups ? te_described_operand(&product, TE_ROLE_WEIGHT, te_described_elements(d, node->list[i]))
                           : te_described_bytes(d, node->list[i], 0);
    }
    te_describe_quantize(d, &product, TE_ROLE_INPUT, x, true, te_described_quantized(&product) && wanted, false,
                         TE_EMIT_APART);
    te_describe_step(d, unit, TE_STEP_PRODUCT,
                     grouped_text(d, &product, TE_PRODUCT_FORWARD, "grouped_linear", quantized, text, sizeof text),
                     read + te_described_operand(&product, TE_ROLE_INPUT, x), te_described_bytes(d, unit->result, 0),
                     te_described_flops(d, unit), false);
}

void te_describe_grouped_backward(const te_describing *d, const te_unit *unit)
{
    const te_fuse_plan *plan = d->plan;
    const te_group_node *node = &plan->nodes[unit->nodes[0]];
    int quantized, groups = te_grouped_count(plan, node);
    te_unit product = as_product(d, unit, &quantized);
    if (!te_described_quantized(&product)) product.recipe = NULL;
    double weights = 0, dweights = 0, dbiases = 0, flops = te_described_flops(d, unit);
    for (int i = 0; i < node->n_list; i++) {
        if (i < groups)
            weights += te_described_operand(&product, TE_ROLE_WEIGHT, te_described_elements(d, node->list[i]));
        if (plan->values[node->list[i]].wanted)
            *(i < groups ? &dweights : &dbiases) += te_described_bytes(d, node->list[i], 0);
    }
    double x = te_described_operand(&product, TE_ROLE_INPUT, te_described_elements(d, unit->x));
    double y = te_described_operand(&product, TE_ROLE_GRAD_OUTPUT, te_described_elements(d, unit->result));
    bool want_dx = plan->values[unit->x].wanted;
    char text[224];
    te_describe_quantize(d, &product, TE_ROLE_GRAD_OUTPUT, te_described_elements(d, unit->result), want_dx,
                         dweights > 0, true, TE_EMIT_APART);
    if (want_dx)
        te_describe_step(d, unit, TE_STEP_PRODUCT,
                         grouped_text(d, &product, TE_PRODUCT_DGRAD, "grouped dgrad", quantized, text, sizeof text),
                         y + weights, te_described_bytes(d, unit->x, 0), flops, true);
    if (dweights > 0)
        te_describe_step(d, unit, TE_STEP_PRODUCT,
                         grouped_text(d, &product, TE_PRODUCT_WGRAD, "grouped wgrad", quantized, text, sizeof text),
                         x + y, dweights, flops, true);
    if (dbiases > 0)
        te_describe_step(d, unit, TE_STEP_ROW_PROGRAM, "bias gradients", te_described_bytes(d, unit->result, 0),
                         dbiases, 0, true);
}

double te_described_list(const te_describing *d, const te_unit *unit)
{
    const te_group_node *node = &d->plan->nodes[unit->nodes[0]];
    double bytes = 0;
    for (int i = 0; i < node->n_list; i++) bytes += te_described_bytes(d, node->list[i], 0);
    return bytes;
}
