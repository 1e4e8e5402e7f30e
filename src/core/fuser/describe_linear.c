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
    bool columns = te_described_quantized(unit);
    if (!values[unit->x].handed)
        te_describe_quantize(d, unit, TE_ROLE_INPUT, x, true, columns && values[unit->weight].wanted, false,
                             te_described_way(d, unit->x));
    double read = te_described_operand(unit, TE_ROLE_INPUT, x) + te_described_operand(unit, TE_ROLE_WEIGHT, w);
    if (unit->bias != TE_NO_VALUE) read += te_described_bytes(d, unit->bias, 0);
    double flops = te_described_flops(d, unit);
    te_described_product p = te_described_gemm(d, unit);
    char kernel[160];
    te_describe_step(d, unit, TE_STEP_PRODUCT,
                     te_describe_product(&p, TE_PRODUCT_FORWARD, "linear", kernel, sizeof kernel), read, y, flops,
                     false);
}

void te_describe_linear_backward(const te_describing *d, const te_unit *unit)
{
    const te_plan_value *values = d->plan->values;
    bool want_dx = values[unit->x].wanted, want_dweight = values[unit->weight].wanted;
    te_role dy_role = te_described_quantized(unit) ? TE_ROLE_GRAD_OUTPUT : TE_ROLE_COUNT;
    double x = te_described_elements(d, unit->x), w = te_described_elements(d, unit->weight),
           y = te_described_elements(d, unit->result);
    double high = (double)te_dtype_size(unit->compute);
    double flops = te_described_flops(d, unit);
    double x_bytes = dy_role == TE_ROLE_COUNT ? high * x : te_described_operand(unit, TE_ROLE_INPUT, x);
    double w_bytes = dy_role == TE_ROLE_COUNT ? high * w : te_described_operand(unit, TE_ROLE_WEIGHT, w);
    double y_bytes = dy_role == TE_ROLE_COUNT ? high * y : te_described_operand(unit, dy_role, y);
    if (dy_role != TE_ROLE_COUNT)
        te_describe_quantize(d, unit, dy_role, y, want_dx, want_dweight, true, te_described_way(d, unit->result));
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

void te_describe_waiting(const te_describing *d, int value)
{
    const te_plan_value *values = d->plan->values;
    for (int u = d->plan->n_units - 1; u >= 0; u--) {
        const te_unit *unit = &d->plan->units[u];
        if (unit->kind != TE_UNIT_LINEAR || unit->x != value || !values[unit->weight].wanted) continue;
        double flops = te_described_flops(d, unit);
        te_describe_step(d, unit, TE_STEP_PRODUCT, "wgrad",
                         te_described_bytes(d, unit->x, 0) + te_described_bytes(d, unit->result, 0),
                         te_described_bytes(d, unit->weight, 0), flops, true);
    }
}
