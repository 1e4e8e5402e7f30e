/* grouped.c - ranges of rows, each times a weight of its own: a product for every range.
 *
 *      x      rows 0 .. 2 | 3 | 4 .. 8         sizes {3, 1, 5}, known when it runs
 *      y      x W0^T + b0 | x W1^T + b1 | x W2^T + b2
 *
 * Under a recipe every range is quantized by itself, as the operation called by itself does it: amaxes and blocks down
 * the columns are of its rows alone. An empty range is one too, since the amax of its weight counts. Backward takes the
 * ranges from the last to the first, the order of a tape, in which random bits are drawn.
 */
#include "ranges.h"

#include "../ops/ops.h"
#include "../product.h"

int te_grouped_count(const te_fuse_plan *plan, const te_group_node *node)
{
    int n = 0; /* weights are matrices, biases are not */
    while (n < node->n_list && plan->values[node->list[n]].ndim == 2) n++;
    return n;
}

static bool has_bias(const te_fuse_plan *plan, const te_group_node *node)
{
    return te_grouped_count(plan, node) < node->n_list;
}

te_product_recipe *te_grouped_recipe(const te_fuse_plan *plan, const te_unit *unit, int i)
{
    const te_group_node *node = &plan->nodes[unit->nodes[0]];
    return i < node->n_states ? node->recipes[i] : NULL;
}

te_status te_plan_infer_grouped(te_fuse_plan *plan, te_group_node *node, te_plan_value *out)
{
    const te_plan_value *x = &plan->values[node->in[0]], *sizes = &plan->values[node->in[1]];
    int n = te_grouped_count(plan, node);
    if (x->cls != TE_VALUE_TOKENS || plan->frames[x->frame].ndim < 2)
        return te_plan_refuse(plan, node, "its input has no rows");
    if (sizes->cls != TE_VALUE_LENGTHS) return te_plan_refuse(plan, node, "the sizes of groups are no integers");
    if (n == 0 || (node->n_list != n && node->n_list != 2 * n))
        return te_plan_refuse(plan, node, "its weights are no matrices");
    const te_plan_value *first = &plan->values[node->list[0]];
    for (int i = 0; i < node->n_list; i++) {
        const te_plan_value *p = &plan->values[node->list[i]];
        bool fits = p->dtype == first->dtype && p->shape[0] == first->shape[0];
        if (i < n) fits = fits && p->shape[1] == x->width;
        else fits = fits && p->ndim == 1;
        if (!fits)
            return te_plan_refuse(plan, node, "parameter %lld does not fit rows of %lld, or the first one",
                                  te_counted(plan->ctx, i), (long long)x->width);
    }
    out->cls = TE_VALUE_TOKENS;
    out->width = first->shape[0];
    out->dtype = te_product_dtype(plan->ctx, x->dtype, first->dtype);
    if (out->dtype != TE_F32 && out->dtype != TE_BF16 && out->dtype != TE_F16 && out->dtype != TE_F64)
        return te_plan_refuse(plan, node, "an input of dtype %s", te_dtype_name(x->dtype));
    for (int i = 0; i < node->n_states && out->dtype == TE_F64; i++)
        if (node->recipes[i]) return te_plan_refuse(plan, node, "float64 under a recipe"); /* by itself it raises */
    return TE_OK;
}

/* What backward reads: of products in high precision the weights themselves. */
void te_plan_describe_grouped(te_fuse_plan *plan, te_unit *unit)
{
    const te_group_node *node = &plan->nodes[unit->nodes[0]];
    int groups = te_grouped_count(plan, node);
    unit->compute = plan->values[unit->result].dtype;
    unit->product = plan->n_products;
    for (int i = 0; i < groups; i++) {
        if (te_grouped_recipe(plan, unit, i)) unit->n_products = groups;
        else plan->values[node->list[i]].saved |= plan->values[unit->x].wanted;
    }
    plan->n_products += unit->n_products;
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* A group's product in high precision; while amaxes are collected without quantizing, those of its operands. */
static te_status multiply_plain(te_group_state *state, const te_unit *unit, int i, te_tensor *y, te_tensor *x,
                                te_tensor *weight, te_tensor *bias)
{
    const te_group_node *node = &state->plan->nodes[unit->nodes[0]];
    te_recipe_state *observer = i < node->n_states ? node->states[i] : NULL;
    te_tensor *w = te_product_weight(weight, unit->compute);
    te_status status = w ? te_linear_product(y, x, w, bias) : state->plan->ctx->status;
    te_tensor_release(w);
    if (status != TE_OK || !te_recipe_calibrates(observer)) return status;
    status = te_role_observe(observer, TE_ROLE_INPUT, x, unit->compute);
    return status == TE_OK ? te_role_observe(observer, TE_ROLE_WEIGHT, weight, unit->compute) : status;
}

static te_status multiply(te_group_state *state, const te_unit *unit, int i, te_range range, te_tensor *x)
{
    const te_fuse_plan *plan = state->plan;
    const te_group_node *node = &plan->nodes[unit->nodes[0]];
    int groups = te_grouped_count(plan, node);
    te_tensor *weight = state->values[node->list[i]],
              *bias = has_bias(plan, node) ? state->values[node->list[groups + i]] : NULL;
    te_tensor *from = te_range_rows(state, unit, unit->x, x, range);
    te_tensor *to = from ? te_range_rows(state, unit, unit->result, state->values[unit->result], range) : NULL;
    te_status status = to ? TE_OK : plan->ctx->status;
    if (status == TE_OK && te_grouped_recipe(plan, unit, i)) {
        te_product_saved *saved = &state->products[unit->product + i];
        status = te_quantized_product(node->states[i], to, from, NULL, weight, bias, plan->values[unit->x].wanted,
                                      plan->values[node->list[i]].wanted ? TE_X_KEPT : TE_X_UNREAD, saved);
        if (!plan->record) te_product_saved_close(saved);
    } else if (status == TE_OK) {
        status = multiply_plain(state, unit, i, to, from, weight, bias);
    }
    te_tensor_release(to);
    te_tensor_release(from);
    return status;
}

/* Whether backward reads x itself: some group's weight gradient is a product in high precision. */
static bool keeps_x(const te_fuse_plan *plan, const te_unit *unit)
{
    bool keeps = false;
    for (int i = 0; i < te_grouped_count(plan, &plan->nodes[unit->nodes[0]]); i++)
        keeps |= !te_grouped_recipe(plan, unit, i);
    return keeps && plan->values[unit->result].wanted;
}

te_status te_grouped_forward(te_group_state *state, const te_unit *unit)
{
    te_fuse_plan *plan = state->plan;
    int groups = te_grouped_count(plan, &plan->nodes[unit->nodes[0]]);
    te_range *ranges = te_mem_zalloc(&plan->ctx->mem, (size_t)groups * sizeof *ranges);
    if (!ranges) return te_fail_memory(plan->ctx, "grouped_linear");
    te_status status = te_ranges_read(state, unit, groups, ranges);
    te_tensor *x = status == TE_OK ? te_tensor_cast(state->values[unit->x], unit->compute) : NULL;
    if (x) state->values[unit->result] = te_state_tensor(state, &plan->values[unit->result]);
    if (status == TE_OK && !(x && state->values[unit->result])) status = plan->ctx->status;
    for (int i = 0; i < groups && status == TE_OK; i++) status = multiply(state, unit, i, ranges[i], x);
    if (status == TE_OK && keeps_x(plan, unit)) state->aux[unit->first_aux] = te_tensor_retain(x);
    te_tensor_release(x);
    te_mem_free(&plan->ctx->mem, ranges, (size_t)groups * sizeof *ranges);
    return status;
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

static te_status input_gradient(te_group_backward *b, const te_unit *unit, int i, te_tensor *dx, bool accumulate,
                                const te_backward_operands *o)
{
    if (o->saved) return te_quantized_dgrad(o->saved, dx, &o->factor, accumulate);
    int value = b->plan->nodes[unit->nodes[0]].list[i];
    te_tensor *w = te_tensor_cast_cached(b->state->values[value], unit->compute);
    te_status status = w ? te_linear_dgrad(dx, o->dy, w, accumulate) : b->ctx->status;
    te_tensor_release(w);
    return status;
}

static te_status bias_gradient(te_group_backward *b, int value, te_tensor *dy)
{
    int edge = te_wanted_edge(b, value);
    if (edge < 0) return TE_OK;
    bool accumulate;
    te_tensor *db = te_grad_target(b->call, edge, &accumulate);
    return db ? te_sum_to(db, dy, 1, accumulate) : b->ctx->status;
}

/* Of group i; dx: its rows of x's gradient, NULL when nobody wants them. */
static te_status group_gradients(te_group_backward *b, const te_unit *unit, int i, te_range range, te_tensor *dy,
                                 te_tensor *dx, bool accumulate)
{
    const te_group_node *node = &b->plan->nodes[unit->nodes[0]];
    int groups = te_grouped_count(b->plan, node), edge = te_wanted_edge(b, node->list[i]);
    te_backward_operands o = {.dy = te_range_rows(b->state, unit, unit->result, dy, range)};
    te_status status = o.dy ? TE_OK : b->ctx->status;
    if (status == TE_OK && te_grouped_recipe(b->plan, unit, i)) {
        o.saved = &b->state->products[unit->product + i];
        status = te_quantized_grad_output(o.saved, o.dy, NULL, dx != NULL, edge >= 0, &o.factor);
    } else if (status == TE_OK) {
        o.x = te_range_rows(b->state, unit, unit->x, b->state->aux[unit->first_aux], range);
        if (!o.x) status = b->ctx->status;
    }
    if (status == TE_OK && dx && range.n) status = input_gradient(b, unit, i, dx, accumulate, &o);
    if (status == TE_OK && edge >= 0) status = te_backward_weight(b, unit, edge, &o);
    if (status == TE_OK && has_bias(b->plan, node)) status = bias_gradient(b, node->list[groups + i], o.dy);
    te_factor_close(&o.factor);
    te_tensor_release(o.x);
    te_tensor_release(o.dy);
    return status;
}

/* Where x's gradient is added to, or in a dtype that products have where theirs is another: *direct says which. */
static te_tensor *open_dx(te_group_backward *b, const te_unit *unit, bool *direct, bool *accumulate)
{
    te_plan_value own = b->plan->values[unit->x];
    *direct = te_product_fits(own.dtype, unit->compute);
    *accumulate = false;
    if (*direct) return te_tensor_retain(te_backward_target(b, unit->x, accumulate));
    own.dtype = unit->compute;
    return te_state_tensor(b->state, &own);
}

static te_status all_gradients(te_group_backward *b, const te_unit *unit, const te_range *ranges, te_tensor *dy)
{
    const te_plan_value *x = &b->plan->values[unit->x];
    bool direct = true, accumulate = false;
    te_tensor *dx = x->wanted ? open_dx(b, unit, &direct, &accumulate) : NULL;
    te_status status = x->wanted && !dx ? b->ctx->status : TE_OK;
    for (int i = te_grouped_count(b->plan, &b->plan->nodes[unit->nodes[0]]) - 1; i >= 0 && status == TE_OK; i--) {
        te_tensor *rows = dx ? te_range_rows(b->state, unit, unit->x, dx, ranges[i]) : NULL;
        status = dx && !rows ? b->ctx->status : group_gradients(b, unit, i, ranges[i], dy, rows, accumulate);
        te_tensor_release(rows);
    }
    if (status == TE_OK && dx && !direct) {
        te_tensor *cast = te_tensor_cast(dx, x->dtype);
        status = cast ? te_backward_add(b, unit->x, cast) : b->ctx->status;
    }
    te_tensor_release(dx);
    return status;
}

te_status te_backward_grouped(te_group_backward *b, const te_unit *unit)
{
    te_tensor *grad = b->state->grads[unit->result];
    int groups = te_grouped_count(b->plan, &b->plan->nodes[unit->nodes[0]]);
    if (!grad) return TE_OK;
    te_range *ranges = te_mem_zalloc(&b->ctx->mem, (size_t)groups * sizeof *ranges);
    te_tensor *dy = ranges ? te_tensor_cast(grad, unit->compute) : NULL;
    te_status status = !ranges ? te_fail_memory(b->ctx, "grouped_linear")
                       : dy    ? te_ranges_read(b->state, unit, groups, ranges)
                               : b->ctx->status;
    if (status == TE_OK) status = all_gradients(b, unit, ranges, dy);
    te_tensor_release(dy);
    te_mem_free(&b->ctx->mem, ranges, (size_t)groups * sizeof *ranges);
    return status;
}
