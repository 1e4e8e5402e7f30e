/* describe_linear.c - the three products of a linear layer as steps, and what quantizes their operands. */
#include "describe_internal.h"

double te_described_flops(const te_describing *d, const te_unit *unit)
{
    const te_plan_value *values = d->plan->values;
    return 2 * te_described_rows(d, unit->space) * (double)values[unit->x].width * (double)values[unit->result].width;
}

void te_describe_linear(const te_describing *d, const te_unit *unit)
{
    const te_plan_value *values = d->plan->values;
    double x = te_described_elements(d, unit->x), w = te_described_elements(d, unit->weight),
           y = te_described_bytes(d, unit->result, 0);
    bool columns = te_described_quantized(unit) && values[unit->weight].wanted && !values[unit->x].again;
    if (!values[unit->x].handed)
        te_describe_quantize(d, unit, TE_ROLE_INPUT, x, true, columns, false, te_described_way(d, unit->x));
    double read = te_described_operand(unit, TE_ROLE_INPUT, x) + te_described_operand(unit, TE_ROLE_WEIGHT, w);
    if (unit->bias != TE_NO_VALUE) read += te_described_bytes(d, unit->bias, 0);
    double flops = te_described_flops(d, unit);
    te_described_product p = te_described_gemm(d, unit);
    char kernel[160];
    te_describe_step(d, unit, TE_STEP_PRODUCT,
                     te_describe_product(&p, TE_PRODUCT_FORWARD, "linear", kernel, sizeof kernel), read, y, flops,
                     false);
}

/* One of backward's two products. */
static void describe_backward(const te_describing *d, const te_unit *unit, te_product_kind kind, const char *name,
                              int other, int target)
{
    te_role dy_role = te_described_quantized(unit) ? TE_ROLE_GRAD_OUTPUT : TE_ROLE_COUNT;
    te_role role = dy_role == TE_ROLE_COUNT ? dy_role : kind == TE_PRODUCT_WGRAD ? TE_ROLE_INPUT : TE_ROLE_WEIGHT;
    double high = (double)te_dtype_size(unit->compute);
    double x = te_described_elements(d, other), y = te_described_elements(d, unit->result);
    double read = dy_role == TE_ROLE_COUNT
                      ? high * (x + y)
                      : te_described_operand(unit, role, x) + te_described_operand(unit, dy_role, y);
    te_described_product p = te_described_gemm(d, unit);
    char kernel[160];
    if (kind == TE_PRODUCT_WGRAD) p.result = d->plan->values[unit->weight].dtype;
    te_describe_step(d, unit, TE_STEP_PRODUCT, te_describe_product(&p, kind, name, kernel, sizeof kernel), read,
                     te_described_bytes(d, target, 0), te_described_flops(d, unit), true);
}

static void describe_wgrad(const te_describing *d, const te_unit *unit)
{
    describe_backward(d, unit, TE_PRODUCT_WGRAD, "wgrad", unit->x, unit->weight);
}

void te_describe_linear_backward(const te_describing *d, const te_unit *unit)
{
    const te_plan_value *values = d->plan->values;
    bool want_dx = values[unit->x].wanted, want_dweight = values[unit->weight].wanted;
    if (te_described_quantized(unit))
        te_describe_quantize(d, unit, TE_ROLE_GRAD_OUTPUT, te_described_elements(d, unit->result), want_dx,
                             want_dweight, true, te_described_way(d, unit->result));
    if (want_dx) describe_backward(d, unit, TE_PRODUCT_DGRAD, "dgrad", unit->weight, unit->x);
    if (want_dweight && !values[unit->x].again) describe_wgrad(d, unit);
    if (unit->bias != TE_NO_VALUE && values[unit->bias].wanted && !unit->bias_elsewhere)
        te_describe_step(d, unit, TE_STEP_ROW_PROGRAM, "bias gradient", te_described_bytes(d, unit->result, 0),
            te_described_bytes(d, unit->bias, 0), 0, true);
}

void te_describe_waiting(const te_describing *d, const te_unit *maker, int i)
{
    const te_plan_value *values = d->plan->values;
    int value = maker->again[i];
    te_emit_way way = te_plan_emits_again(d->plan, d->device, maker, i, (int64_t)te_described_rows(d, maker->space));
    for (int u = d->plan->n_units - 1; u >= 0; u--) {
        const te_unit *unit = &d->plan->units[u];
        if (unit->kind != TE_UNIT_LINEAR || unit->x != value || !values[unit->weight].wanted) continue;
        if (te_described_quantized(unit))
            te_describe_quantize(d, unit, TE_ROLE_INPUT, te_described_elements(d, value), false, true, true, way);
        describe_wgrad(d, unit);
    }
}
