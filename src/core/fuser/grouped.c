/* grouped.c - ranges of rows, each times a weight of its own: a product for every range that is not empty.
 *
 *      x      rows 0 .. 2 | 3 | 4 .. 8         sizes {3, 1, 5}, known when it runs
 *      y      x W0^T + b0 | x W1^T + b1 | x W2^T + b2
 *
 * A range counts positions of the first dimension that the rows are seen in.
 */
#include "backward.h"

#include "../ops/ops.h"
#include "../product.h"

#include <stdio.h>

/* The rows of one group in memory of {rows, width}. */
typedef struct range {
    int64_t first, n;
} range;

int te_grouped_count(const te_fuse_plan *plan, const te_group_node *node)
{
    int n = 0; /* weights are matrices, biases are not */
    while (n < node->n_list && plan->values[node->list[n]].ndim == 2) n++;
    return n;
}

static bool has_bias(const te_fuse_plan *plan, const te_group_node *node) { return te_grouped_count(plan, node) < node->n_list; }

te_status te_plan_infer_grouped(te_fuse_plan *plan, te_group_node *node, te_plan_value *out)
{
    const te_plan_value *x = &plan->values[node->in[0]], *sizes = &plan->values[node->in[1]];
    int n = te_grouped_count(plan, node);
    if (x->cls != TE_VALUE_TOKENS || plan->frames[x->frame].ndim < 2) return te_plan_refuse(plan, node, "its input has no rows");
    if (sizes->cls != TE_VALUE_LENGTHS) return te_plan_refuse(plan, node, "the sizes of groups are no integers");
    if (n == 0 || (node->n_list != n && node->n_list != 2 * n)) return te_plan_refuse(plan, node, "its weights are no matrices");
    const te_plan_value *first = &plan->values[node->list[0]];
    for (int i = 0; i < node->n_list; i++) {
        const te_plan_value *p = &plan->values[node->list[i]];
        bool fits = p->dtype == first->dtype && p->shape[0] == first->shape[0];
        if (i < n) fits = fits && p->shape[1] == x->width;
        else fits = fits && p->ndim == 1;
        if (!fits)
            return te_plan_refuse(plan, node, "parameter %d does not fit rows of %lld, or the first one", i + 1, (long long)x->width);
    }
    out->cls = TE_VALUE_TOKENS;
    out->width = first->shape[0];
    out->dtype = te_product_dtype(plan->ctx, x->dtype, first->dtype);
    if (out->dtype != TE_F32 && out->dtype != TE_BF16 && out->dtype != TE_F16 && out->dtype != TE_F64)
        return te_plan_refuse(plan, node, "an input of dtype %s", te_dtype_name(x->dtype));
    return TE_OK;
}

/* --- rows --------------------------------------------------------------------------------------------------------- */

static te_status fail_sizes(const te_fuse_plan *plan, const int64_t *sizes, int64_t n, int groups, int64_t rows)
{
    char text[160];
    int used = 0;
    for (int64_t i = 0; i < n && used < (int)sizeof text - 24; i++)
        used += snprintf(text + used, sizeof text - (size_t)used, "%s%lld", i ? ", " : "", (long long)sizes[i]);
    return te_fail(plan->ctx, TE_ERROR_ARGUMENT, "te.GroupedLinear: split_sizes {%s} for %d groups and %lld rows", used ? text : "",
                   groups, (long long)rows);
}

/* The ranges of a run; `ranges` has room for one per group. */
static te_status read_ranges(const te_group_state *state, const te_unit *unit, te_tensor *sizes, range *ranges)
{
    const te_fuse_plan *plan = state->plan;
    const te_mem *mem = &plan->ctx->mem;
    const te_space *s = &state->frames[plan->values[unit->result].frame];
    int groups = te_grouped_count(plan, &plan->nodes[unit->nodes[0]]);
    int64_t n = te_tensor_numel(sizes), each = 1, at = 0;
    for (int i = 1; i + 1 < s->ndim; i++) each *= s->shape[i];
    int64_t *counts = te_mem_zalloc(mem, (size_t)(n ? n : 1) * sizeof *counts);
    if (!counts) return te_fail_memory(plan->ctx, "grouped_linear");
    te_status status = te_tensor_read(sizes, TE_I64, counts);
    bool fits = n == groups;
    for (int64_t i = 0; i < n && fits; i++) {
        fits = counts[i] >= 0 && counts[i] <= s->shape[0] - at;
        if (!fits) break;
        ranges[i] = (range){at * each, counts[i] * each};
        at += counts[i];
    }
    if (status == TE_OK && !(fits && at == s->shape[0])) status = fail_sizes(plan, counts, n, groups, s->shape[0]);
    te_mem_free(mem, counts, (size_t)(n ? n : 1) * sizeof *counts);
    return status;
}

/* Those rows of a tensor whose rows are evenly spaced. NULL on failure. */
static te_tensor *rows_of(te_tensor *t, range r)
{
    te_view v;
    te_tensor *rows = te_rows_tensor(t, &v);
    if (!rows) return NULL;
    int64_t shape[] = {r.n, v.shape[1]}, start = rows->offset + r.first * v.stride[0];
    te_tensor *part = te_tensor_alias(rows, 2, shape, v.stride, start);
    te_tensor_release(rows);
    return part;
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

static te_status multiply(te_group_state *state, const te_group_node *node, const te_unit *unit, int i, range r, te_tensor *x)
{
    const te_fuse_plan *plan = state->plan;
    int groups = te_grouped_count(plan, node);
    te_tensor *bias = has_bias(plan, node) ? state->values[node->list[groups + i]] : NULL;
    te_tensor *w = te_tensor_cast_cached(state->values[node->list[i]], unit->compute);
    te_tensor *from = w ? rows_of(x, r) : NULL, *to = from ? rows_of(state->values[unit->result], r) : NULL;
    te_status status = to ? te_linear_product(to, from, w, bias) : plan->ctx->status;
    te_tensor_release(to);
    te_tensor_release(from);
    te_tensor_release(w);
    return status;
}

te_status te_grouped_forward(te_group_state *state, const te_unit *unit)
{
    te_fuse_plan *plan = state->plan;
    const te_group_node *node = &plan->nodes[unit->nodes[0]];
    te_tensor *sizes = state->values[node->in[1]];
    int groups = te_grouped_count(plan, node);
    range *ranges = te_mem_zalloc(&plan->ctx->mem, (size_t)groups * sizeof *ranges);
    if (!ranges) return te_fail_memory(plan->ctx, "grouped_linear");
    te_status status = read_ranges(state, unit, sizes, ranges);
    te_tensor *x = status == TE_OK ? te_tensor_cast(state->values[unit->x], unit->compute) : NULL;
    if (x) state->values[unit->result] = te_state_tensor(state, &plan->values[unit->result]);
    if (status == TE_OK && !(x && state->values[unit->result])) status = plan->ctx->status;
    for (int i = 0; i < groups && status == TE_OK; i++)
        if (ranges[i].n) status = multiply(state, node, unit, i, ranges[i], x);
    if (status == TE_OK && plan->values[unit->result].wanted) {
        state->aux[unit->first_aux] = te_tensor_retain(x);
        state->aux[unit->first_aux + 1] = te_tensor_retain(sizes);
    }
    te_tensor_release(x);
    te_mem_free(&plan->ctx->mem, ranges, (size_t)groups * sizeof *ranges);
    return status;
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* dw or db of a group, added straight to where the tape wants it, or in the dtype of the product and then cast. */
static te_status weight_gradient(te_group_backward *b, const te_unit *unit, int value, te_tensor *dy, te_tensor *x)
{
    int edge = te_wanted_edge(b, value);
    if (edge < 0) return TE_OK;
    const te_grad_meta *meta = te_grad_input(b->call, edge);
    bool direct = te_product_fits(meta->dtype, unit->compute) || !x, accumulate = false;
    te_tensor *target = direct ? te_grad_target(b->call, edge, &accumulate)
                               : te_tensor_new(b->ctx, meta->device, unit->compute, meta->ndim, meta->shape);
    if (!target) return b->ctx->status;
    te_status status = x ? te_linear_wgrad(target, dy, x, accumulate) : te_sum_to(target, dy, 1, accumulate);
    if (direct) return status;
    if (status == TE_OK) return te_grad_give(b->call, edge, target);
    te_tensor_release(target);
    return status;
}

static te_status group_gradients(te_group_backward *b, const te_unit *unit, int i, range r, te_tensor *dy, te_tensor *dx, bool accumulate)
{
    const te_group_node *node = &b->plan->nodes[unit->nodes[0]];
    int groups = te_grouped_count(b->plan, node);
    te_tensor *dy_rows = rows_of(dy, r), *x_rows = rows_of(b->state->aux[unit->first_aux], r), *w = NULL, *dx_rows = NULL;
    te_status status = dy_rows && x_rows ? TE_OK : b->ctx->status;
    if (status == TE_OK && dx && r.n) {
        w = te_tensor_cast_cached(b->state->values[node->list[i]], unit->compute);
        dx_rows = w ? rows_of(dx, r) : NULL;
        status = dx_rows ? te_linear_dgrad(dx_rows, dy_rows, w, accumulate) : b->ctx->status;
    }
    if (status == TE_OK) status = weight_gradient(b, unit, node->list[i], dy_rows, x_rows);
    if (status == TE_OK && has_bias(b->plan, node)) status = weight_gradient(b, unit, node->list[groups + i], dy_rows, NULL);
    te_tensor_release(dx_rows);
    te_tensor_release(w);
    te_tensor_release(x_rows);
    te_tensor_release(dy_rows);
    return status;
}

te_status te_backward_grouped(te_group_backward *b, const te_unit *unit)
{
    const te_plan_value *x = &b->plan->values[unit->x];
    te_tensor **aux = b->state->aux + unit->first_aux, *grad = b->state->grads[unit->result], *dx = NULL;
    int groups = te_grouped_count(b->plan, &b->plan->nodes[unit->nodes[0]]);
    bool direct = te_product_fits(x->dtype, unit->compute), accumulate = false;
    if (!grad || !aux[0]) return TE_OK;
    range *ranges = te_mem_zalloc(&b->ctx->mem, (size_t)groups * sizeof *ranges);
    te_tensor *dy = ranges ? te_tensor_cast(grad, unit->compute) : NULL;
    te_status status = dy ? read_ranges(b->state, unit, aux[1], ranges) : te_fail_memory(b->ctx, "grouped_linear");
    te_plan_value own = *x;
    own.dtype = direct ? x->dtype : unit->compute;
    if (status == TE_OK && x->wanted) {
        dx = direct ? te_tensor_retain(te_backward_target(b, unit->x, &accumulate)) : te_state_tensor(b->state, &own);
        if (!dx) status = b->ctx->status;
    }
    for (int i = 0; i < groups && status == TE_OK; i++) status = group_gradients(b, unit, i, ranges[i], dy, dx, accumulate);
    if (status == TE_OK && dx && !direct) {
        te_tensor *cast = te_tensor_cast(dx, x->dtype);
        status = cast ? te_backward_add(b, unit->x, cast) : b->ctx->status;
    }
    te_tensor_release(dx);
    te_tensor_release(dy);
    te_mem_free(&b->ctx->mem, ranges, (size_t)groups * sizeof *ranges);
    return status;
}
