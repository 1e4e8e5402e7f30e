/* cluster.c - which nodes share a unit, and in which order the units run.
 *
 * Every node has a stage: a matrix product or a called operation comes one stage after its inputs, a program op at the
 * stage of its latest input. Two program ops of one stage can therefore never depend on each other through a product,
 * so those that are connected, by a value that one hands to the other or that both read, become one unit when their
 * rows have the same width.
 *
 * Ops that compute in float64 and ops that compute in float32 are not joined: single ones round on the way. A value
 * that goes from one kind to the other comes one stage later, so that no unit can wait for itself.
 *
 * A program op whose only readers are program ops of a later stage is moved there, as is everything that is computed
 * from parameters alone: it is then recomputed in registers instead of being stored over a matrix product. */
#include "plan.h"

typedef struct clustering {
    te_fuse_plan *plan;
    int          *stage, *parent; /* per node */
    int          *unit;           /* per node: its unit's number before ordering */
} clustering;

static bool is_program(const te_group_node *node) { return node->call.op->def->formula != NULL; }

/* The node that makes input i of node n, or -1. */
static int producer(const te_fuse_plan *plan, int n, int i)
{
    int value = plan->nodes[n].in[i];
    return value == TE_NO_VALUE ? -1 : plan->values[value].node;
}

static int inputs(const te_fuse_plan *plan, int n) { return plan->nodes[n].call.op->n_inputs; }

/* --- stages ------------------------------------------------------------------------------------------------------- */

static bool same_numbers(const te_fuse_plan *plan, int a, int b)
{
    return te_plan_computes_f64(plan, &plan->nodes[a]) == te_plan_computes_f64(plan, &plan->nodes[b]);
}

static void find_stages(clustering *c)
{
    const te_fuse_plan *plan = c->plan;
    for (int n = 0; n < plan->n_nodes; n++) {
        int stage = 0;
        for (int i = 0; i < inputs(plan, n); i++) {
            int p = producer(plan, n, i);
            if (p < 0) continue;
            bool other = is_program(&plan->nodes[p]) && is_program(&plan->nodes[n]) && !same_numbers(plan, p, n);
            if (c->stage[p] + other > stage) stage = c->stage[p] + other;
        }
        c->stage[n] = stage + !is_program(&plan->nodes[n]);
    }
}

static bool reads_half(const te_group_node *node, int value)
{
    return (node->call.op->def->flags & TE_OP_GATED) && node->in[0] == value;
}

/* The one later stage in which all readers of n's result are program ops over the same rows; -1 when there is none. */
static int later_stage(const clustering *c, int n)
{
    const te_fuse_plan *plan = c->plan;
    const te_plan_value *out = &plan->values[plan->nodes[n].out];
    int stage = -1;
    if (out->output >= 0) return -1;
    for (int r = n + 1; r < plan->n_nodes; r++) {
        for (int i = 0; i < inputs(plan, r); i++) {
            if (producer(plan, r, i) != n) continue;
            const te_plan_value *read = &plan->values[plan->nodes[r].out];
            bool same_rows = out->cls == TE_VALUE_FIXED || (read->width == out->width && read->space == out->space);
            if (!is_program(&plan->nodes[r]) || !same_rows || !same_numbers(plan, n, r) ||
                reads_half(&plan->nodes[r], plan->nodes[n].out))
                return -1;
            if (stage >= 0 && stage != c->stage[r]) return -1;
            stage = c->stage[r];
        }
    }
    return stage > c->stage[n] ? stage : -1;
}

static void sink_nodes(clustering *c)
{
    const te_fuse_plan *plan = c->plan;
    for (int n = plan->n_nodes - 1; n >= 0 && !plan->ctx->interrupted; n--) {
        if (!is_program(&plan->nodes[n])) continue;
        int tokens = 0, stage = later_stage(c, n);
        for (int i = 0; i < inputs(plan, n); i++) {
            int value = plan->nodes[n].in[i];
            tokens += value != TE_NO_VALUE && plan->values[value].cls == TE_VALUE_TOKENS;
        }
        if (stage >= 0 && tokens <= 1) c->stage[n] = stage;
    }
}

/* --- joining ------------------------------------------------------------------------------------------------------ */

static int root(clustering *c, int n)
{
    while (c->parent[n] != n) n = c->parent[n] = c->parent[c->parent[n]];
    return n;
}

static bool joinable(const clustering *c, int a, int b)
{
    const te_fuse_plan *plan = c->plan;
    const te_plan_value *va = &plan->values[plan->nodes[a].out], *vb = &plan->values[plan->nodes[b].out];
    bool fixed = va->cls == TE_VALUE_FIXED || vb->cls == TE_VALUE_FIXED;
    return is_program(&plan->nodes[a]) && is_program(&plan->nodes[b]) && c->stage[a] == c->stage[b] &&
           same_numbers(plan, a, b) && (fixed || (va->width == vb->width && va->space == vb->space));
}

static void join(clustering *c, int a, int b)
{
    a = root(c, a);
    b = root(c, b);
    c->parent[a > b ? a : b] = a > b ? b : a;
}

/* Ends early when somebody interrupts, as the other loops over pairs of nodes do. */
static void join_nodes(clustering *c)
{
    const te_fuse_plan *plan = c->plan;
    for (int n = 0; n < plan->n_nodes && !plan->ctx->interrupted; n++) {
        for (int i = 0; i < inputs(plan, n); i++) {
            int value = plan->nodes[n].in[i], p = producer(plan, n, i);
            if (value == TE_NO_VALUE) continue;
            if (p >= 0 && joinable(c, p, n) && !reads_half(&plan->nodes[n], value)) join(c, p, n);
            if (plan->values[value].cls != TE_VALUE_TOKENS) continue;
            for (int m = 0; m < n; m++) /* those that read the same activation */
                for (int k = 0; k < inputs(plan, m); k++)
                    if (plan->nodes[m].in[k] == value && joinable(c, m, n)) join(c, m, n);
        }
    }
}

/* --- units in order ----------------------------------------------------------------------------------------------- */

/* Whether everything that unit u reads is made by units that have run. */
static bool ready(const clustering *c, int u, const bool *done)
{
    const te_fuse_plan *plan = c->plan;
    for (int n = 0; n < plan->n_nodes; n++) {
        if (c->unit[n] != u) continue;
        for (int i = 0; i < inputs(plan, n); i++) {
            int p = producer(plan, n, i);
            if (p >= 0 && c->unit[p] != u && !done[c->unit[p]]) return false;
        }
    }
    return true;
}

static te_status add_unit(clustering *c, int u)
{
    te_fuse_plan *plan = c->plan;
    te_unit *unit = &plan->units[plan->n_units];
    int n_nodes = 0;
    for (int n = 0; n < plan->n_nodes; n++) n_nodes += c->unit[n] == u;
    unit->nodes = te_mem_alloc(&plan->ctx->mem, (size_t)n_nodes * sizeof *unit->nodes);
    if (!unit->nodes) return te_fail_memory(plan->ctx, "fuser");
    for (int n = 0; n < plan->n_nodes; n++) {
        if (c->unit[n] != u) continue;
        unit->nodes[unit->n_nodes++] = n;
        plan->values[plan->nodes[n].out].unit = plan->n_units;
    }
    const te_op *op = plan->nodes[unit->nodes[0]].call.op;
    unit->kind = op->def->unit;
    plan->n_units++;
    for (int k = 0; k < unit->n_nodes; k++) { /* what is computed from parameters alone may have joined others */
        const te_plan_value *out = &plan->values[plan->nodes[unit->nodes[k]].out];
        if (out->cls != TE_VALUE_TOKENS) continue;
        if (unit->width && (unit->width != out->width || unit->space != out->space))
            return te_plan_refuse(plan, &plan->nodes[unit->nodes[k]],
                                  "computed from parameters that rows of another width read too");
        unit->width = out->width;
        unit->space = out->space;
    }
    return TE_OK;
}

/* Among the units that are ready, the one with the earliest node runs next. */
static te_status order_units(clustering *c)
{
    te_fuse_plan *plan = c->plan;
    bool *done = te_mem_zalloc(&plan->ctx->mem, (size_t)plan->n_nodes * sizeof *done);
    if (!done) return te_fail_memory(plan->ctx, "fuser");
    te_status status = TE_OK;
    bool progress = true;
    for (int n = 0; n < plan->n_nodes; n++)
        /* reads nothing, is read by nothing */
        if (plan->values[plan->nodes[n].out].wired != TE_NO_VALUE) done[c->unit[n]] = true;
    while (progress && status == TE_OK) {
        progress = false;
        status = te_context_poll(plan->ctx);
        for (int n = 0; n < plan->n_nodes && !progress && status == TE_OK; n++) {
            int u = c->unit[n];
            if (done[u] || !ready(c, u, done)) continue;
            done[u] = progress = true;
            status = add_unit(c, u);
        }
    }
    for (int n = 0; n < plan->n_nodes && status == TE_OK; n++)
        if (!done[c->unit[n]]) status = te_plan_refuse(plan, &plan->nodes[n], "its unit would wait for itself");
    te_mem_free(&plan->ctx->mem, done, (size_t)plan->n_nodes * sizeof *done);
    return status;
}

static void add_reader(te_plan_value *v, int unit)
{
    if (v->unit == unit) return;
    if (v->first_reader < 0) v->first_reader = unit;
    v->last_reader = unit;
}

static te_status find_readers(te_fuse_plan *plan)
{
    for (int v = 0; v < plan->n_values; v++) plan->values[v].first_reader = plan->values[v].last_reader = -1;
    for (int u = 0; u < plan->n_units; u++) {
        for (int k = 0; k < plan->units[u].n_nodes; k++) {
            const te_group_node *node = &plan->nodes[plan->units[u].nodes[k]];
            for (int i = 0; i < node->call.op->n_inputs; i++)
                if (node->in[i] != TE_NO_VALUE) add_reader(&plan->values[node->in[i]], u);
            for (int i = 0; i < node->n_list; i++) add_reader(&plan->values[node->list[i]], u);
        }
    }
    for (int n = 0; n < plan->n_nodes; n++) {
        te_plan_value *v = &plan->values[plan->nodes[n].out];
        v->inside = v->first_reader < 0 && v->output < 0;
        if (v->cls == TE_VALUE_FIXED && !v->inside)
            return te_plan_refuse(plan, &plan->nodes[n], "computed from parameters alone, but read by several kernels");
    }
    return TE_OK;
}

te_status te_plan_cluster(te_fuse_plan *plan)
{
    te_context *ctx = plan->ctx;
    size_t n = (size_t)plan->n_nodes;
    int *memory = te_mem_zalloc(&ctx->mem, 3 * n * sizeof *memory);
    if (!memory) return te_fail_memory(ctx, "fuser");
    clustering c = {plan, memory, memory + n, memory + 2 * n};
    for (int i = 0; i < plan->n_nodes; i++) c.parent[i] = i;
    find_stages(&c);
    sink_nodes(&c);
    join_nodes(&c);
    for (int i = 0; i < plan->n_nodes; i++) c.unit[i] = root(&c, i);
    te_status status = order_units(&c);
    te_mem_free(&ctx->mem, memory, 3 * n * sizeof *memory);
    return status == TE_OK ? find_readers(plan) : status;
}
