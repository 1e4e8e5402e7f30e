/* ranges.c - contiguous ranges of rows, whose sizes are known when they run, and what goes to every row of one alike.
 *
 *      x      rows 0 .. 2 | 3 | 4 .. 8         sizes {3, 1, 5}
 *
 * Sizes may lie on a device, which the host has to wait for: they are read once in a run, for all units that share
 * them, and backward reads what is on the host already.
 */
#include "ranges.h"

#include "../ops/ops.h"

#include <stdio.h>

/* --- sizes -------------------------------------------------------------------------------------------------------- */

static te_status fail_sizes(const te_fuse_plan *plan, te_tensor *sizes, int groups, int64_t rows)
{
    char text[160];
    int used = 0;
    const int64_t *n = te_tensor_data(sizes);
    for (int64_t i = 0; i < te_tensor_numel(sizes) && used < (int)sizeof text - 24; i++)
        used += snprintf(text + used, sizeof text - (size_t)used, "%s%lld", i ? ", " : "", (long long)n[i]);
    return te_fail(plan->ctx, TE_ERROR_ARGUMENT, "te.GroupedLinear: split_sizes {%s} for %d groups and %lld rows",
                   used ? text : "", groups, (long long)rows);
}

static te_tensor **kept_sizes(const te_group_state *state, const te_unit *unit)
{
    return &state->aux[unit->first_aux + 1];
}

/* What another unit has read already. NULL: nobody has. */
static te_tensor *shared_sizes(const te_group_state *state, int value)
{
    const te_fuse_plan *plan = state->plan;
    for (int u = 0; u < plan->n_units; u++) {
        const te_unit *unit = &plan->units[u];
        bool same = (unit->kind == TE_UNIT_GROUPED || unit->kind == TE_UNIT_BIASES) &&
                    plan->nodes[unit->nodes[0]].in[1] == value;
        if (same && *kept_sizes(state, unit)) return te_tensor_retain(*kept_sizes(state, unit));
    }
    return NULL;
}

static te_tensor *read_sizes(const te_group_state *state, int value)
{
    te_context *ctx = state->plan->ctx;
    te_tensor *sizes = state->values[value];
    int64_t n = te_tensor_numel(sizes);
    te_tensor *host = te_tensor_new(ctx, te_context_device(ctx, "cpu"), TE_I64, 1, &n);
    if (!host || te_tensor_read(sizes, TE_I64, te_tensor_data(host)) == TE_OK) return host;
    te_tensor_release(host);
    return NULL;
}

te_status te_ranges_read(te_group_state *state, const te_unit *unit, int groups, te_range *ranges)
{
    const te_fuse_plan *plan = state->plan;
    te_tensor **sizes = kept_sizes(state, unit);
    int value = plan->nodes[unit->nodes[0]].in[1];
    if (!*sizes) *sizes = shared_sizes(state, value);
    if (!*sizes) *sizes = read_sizes(state, value);
    if (!*sizes) return plan->ctx->status;
    int64_t rows = state->frames[plan->values[unit->result].frame].shape[0], at = 0;
    bool fits = te_tensor_numel(*sizes) == groups;
    const int64_t *n = te_tensor_data(*sizes);
    for (int i = 0; i < groups && fits; i++) {
        fits = n[i] >= 0 && n[i] <= rows - at;
        if (!fits) break;
        ranges[i] = (te_range){at, n[i]};
        at += n[i];
    }
    return fits && at == rows ? TE_OK : fail_sizes(plan, *sizes, groups, rows);
}

te_tensor *te_range_rows(const te_group_state *state, const te_unit *unit, int value, te_tensor *t, te_range range)
{
    const te_fuse_plan *plan = state->plan;
    te_tensor *seen = te_state_seen(state, &plan->values[value], t, plan->values[unit->result].frame);
    if (!seen) return NULL;
    int64_t shape[TE_MAX_DIMS];
    memcpy(shape, seen->shape, sizeof shape);
    shape[0] = range.n;
    /* strides of none are those of dense memory, whatever a dimension of 1 had */
    te_tensor *rows =
        range.n ? te_tensor_alias(seen, seen->ndim, shape, seen->stride, seen->offset + range.first * seen->stride[0])
                : te_tensor_alias(seen, seen->ndim, shape, NULL, seen->offset);
    te_tensor_release(seen);
    return rows;
}

/* --- biases ------------------------------------------------------------------------------------------------------- */

/* Every row's own bias, that of its range: memory that a program reads, which makes the gradients of what scales them.
 * Never kept for backward, which spreads the biases once more where it reads them. */

te_status te_plan_infer_biases(te_fuse_plan *plan, te_group_node *node, te_plan_value *out)
{
    const te_plan_value *scale = &plan->values[node->in[0]], *sizes = &plan->values[node->in[1]];
    const te_plan_value *first = node->n_list ? &plan->values[node->list[0]] : NULL;
    if (scale->cls != TE_VALUE_ROWS) return te_plan_refuse(plan, node, "its scales are not one number per row");
    if (sizes->cls != TE_VALUE_LENGTHS) return te_plan_refuse(plan, node, "the sizes of groups are no integers");
    for (int i = 0; i < node->n_list; i++) {
        const te_plan_value *b = &plan->values[node->list[i]];
        if (b->ndim != 1 || b->dtype != first->dtype || b->width != first->width)
            return te_plan_refuse(plan, node, "bias %lld does not fit the first one", te_counted(plan->ctx, i));
    }
    if (!first) return te_plan_refuse(plan, node, "it has no biases");
    out->cls = TE_VALUE_TOKENS;
    out->width = first->width;
    out->dtype = te_promote(scale->dtype, first->dtype);
    return TE_OK;
}

te_status te_biases_forward(te_group_state *state, const te_unit *unit)
{
    te_fuse_plan *plan = state->plan;
    const te_group_node *node = &plan->nodes[unit->nodes[0]];
    te_range *ranges = te_mem_zalloc(&plan->ctx->mem, (size_t)node->n_list * sizeof *ranges);
    if (!ranges) return te_fail_memory(plan->ctx, "grouped_biases");
    te_status status = te_ranges_read(state, unit, node->n_list, ranges);
    te_tensor *all = status == TE_OK ? te_state_tensor(state, &plan->values[unit->result]) : NULL;
    state->values[unit->result] = all;
    if (status == TE_OK && !all) status = plan->ctx->status;
    for (int i = 0; i < node->n_list && status == TE_OK; i++) {
        te_tensor *rows = te_range_rows(state, unit, unit->result, all, ranges[i]);
        status = rows ? te_tensor_copy_data(rows, state->values[node->list[i]]) : plan->ctx->status;
        te_tensor_release(rows);
    }
    te_mem_free(&plan->ctx->mem, ranges, (size_t)node->n_list * sizeof *ranges);
    return status;
}

te_status te_backward_biases(te_group_backward *b, const te_unit *unit)
{
    const te_group_node *node = &b->plan->nodes[unit->nodes[0]];
    te_tensor *grad = b->state->grads[unit->result];
    if (!grad) return TE_OK;
    te_range *ranges = te_mem_zalloc(&b->ctx->mem, (size_t)node->n_list * sizeof *ranges);
    te_status status =
        ranges ? te_ranges_read(b->state, unit, node->n_list, ranges) : te_fail_memory(b->ctx, "grouped_biases");
    for (int i = node->n_list - 1; i >= 0 && status == TE_OK; i--) {
        int edge = te_wanted_edge(b, node->list[i]);
        if (edge < 0) continue;
        bool accumulate;
        te_tensor *rows = te_range_rows(b->state, unit, unit->result, grad, ranges[i]);
        te_tensor *db = rows ? te_grad_target(b->call, edge, &accumulate) : NULL;
        status = db ? te_sum_to(db, rows, 1, accumulate) : b->ctx->status;
        te_tensor_release(rows);
    }
    te_mem_free(&b->ctx->mem, ranges, (size_t)node->n_list * sizeof *ranges);
    return status;
}
