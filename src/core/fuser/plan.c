/* plan.c - plans of a group: making them, what tells them apart, and finding the one for a run. */
#include "plan.h"

#include "../autograd.h"
#include "kernels/environment.h"

bool te_node_own(const te_mem *mem, te_group_node *node, const int *list, int n, te_recipe_state *const *states,
                 int n_states)
{
    node->list = NULL;
    node->states = NULL;
    node->recipes = NULL;
    node->n_list = node->n_states = 0;
    if (n && !(node->list = te_mem_alloc(mem, (size_t)n * sizeof *list))) return false;
    if (n) memcpy(node->list, list, (size_t)n * sizeof *list);
    node->n_list = n;
    if (!n_states) return true;
    node->states = te_mem_zalloc(mem, (size_t)n_states * sizeof *states);
    node->recipes = te_mem_zalloc(mem, (size_t)n_states * sizeof(te_product_recipe *));
    node->n_states = n_states;
    for (int i = 0; i < n_states && node->states; i++) node->states[i] = te_recipe_state_retain(states[i]);
    return node->states && node->recipes;
}

void te_node_disown(const te_mem *mem, te_group_node *node)
{
    for (int i = 0; i < node->n_states; i++) {
        if (node->states) te_recipe_state_release(node->states[i]);
        if (node->recipes) te_product_recipe_release(node->recipes[i]);
    }
    te_mem_free(mem, node->states, (size_t)node->n_states * sizeof(te_recipe_state *));
    te_mem_free(mem, node->recipes, (size_t)node->n_states * sizeof(te_product_recipe *));
    te_mem_free(mem, node->list, (size_t)node->n_list * sizeof(int));
}

/* --- plans -------------------------------------------------------------------------------------------------------- */

static void free_unit(const te_mem *mem, te_unit *unit)
{
    te_mem_free(mem, unit->nodes, (size_t)unit->n_nodes * sizeof *unit->nodes);
    te_gradient_clear(&unit->gradient);
    te_program_free(unit->measuring[0]);
    te_program_free(unit->measuring[1]);
}

void te_fuse_plan_release(te_fuse_plan *plan)
{
    if (!plan || --plan->refs > 0) return;
    te_context *ctx = plan->ctx;
    const te_mem *mem = &ctx->mem;
    for (int u = 0; u < plan->n_units; u++) free_unit(mem, &plan->units[u]);
    for (int i = 0; plan->nodes && i < plan->n_nodes; i++) {
        if (plan->nodes[i].call.op) te_op_release(plan->nodes[i].call.op);
        te_recipe_state_release(plan->nodes[i].recipe_state);
        te_node_disown(mem, &plan->nodes[i]);
    }
    for (int i = 0; plan->recipes && i < plan->n_nodes; i++) te_product_recipe_release(plan->recipes[i]);
    te_mem_free(mem, plan->keys, (size_t)plan->n_inputs * sizeof *plan->keys);
    te_mem_free(mem, plan->values, (size_t)plan->n_values * sizeof *plan->values);
    te_mem_free(mem, plan->units, (size_t)plan->n_nodes * sizeof *plan->units);
    te_mem_free(mem, plan->nodes, (size_t)plan->n_nodes * sizeof *plan->nodes);
    te_mem_free(mem, plan->recipes, (size_t)plan->n_nodes * sizeof *plan->recipes);
    te_mem_free(mem, plan->draws, (size_t)plan->n_rngs * sizeof *plan->draws);
    te_mem_free(mem, plan->frames, ((size_t)plan->n_nodes + 1) * sizeof *plan->frames);
    te_mem_free(mem, plan->outputs, 2 * (size_t)plan->n_outputs * sizeof *plan->outputs);
    te_mem_free(mem, plan->refusal, sizeof ctx->message);
    te_context_discount(ctx, plan->counted);
    te_mem_free(mem, plan, sizeof *plan);
    te_context_unref(ctx);
}

/* What a plan counts towards the limit of tensor memory: what it is made of, and about what its programs are, with what
 * the backend makes of them. */
static size_t size_of_plan(const te_group *group)
{
    enum { PROGRAMS = 2048 }; /* per node */
    size_t node = sizeof(te_unit) + sizeof(te_group_node) + sizeof(te_plan_value) + sizeof(te_plan_frame) + PROGRAMS;
    return sizeof(te_fuse_plan) + (size_t)group->n_nodes * node + (size_t)group->n_inputs * sizeof(te_plan_key);
}

static te_fuse_plan *open_plan(te_group *group)
{
    te_context *ctx = group->ctx;
    size_t bytes = size_of_plan(group);
    if (!te_context_count(ctx, bytes)) return NULL;
    te_fuse_plan *plan = te_mem_zalloc(&ctx->mem, sizeof *plan);
    if (!plan) {
        te_context_discount(ctx, bytes);
        te_fail_memory(ctx, "fuser");
        return NULL;
    }
    *plan = (te_fuse_plan){.ctx = ctx, .refs = 1, .counted = bytes, .n_inputs = group->n_inputs,
                           .n_nodes = group->n_nodes, .n_values = group->n_values, .n_outputs = group->n_outputs};
    te_context_retain(ctx);
    plan->keys = te_mem_zalloc(&ctx->mem, (size_t)plan->n_inputs * sizeof *plan->keys);
    plan->values = te_mem_zalloc(&ctx->mem, (size_t)plan->n_values * sizeof *plan->values);
    plan->units = te_mem_zalloc(&ctx->mem, (size_t)plan->n_nodes * sizeof *plan->units);
    plan->nodes = te_mem_zalloc(&ctx->mem, (size_t)plan->n_nodes * sizeof *plan->nodes);
    plan->recipes = te_mem_zalloc(&ctx->mem, (size_t)plan->n_nodes * sizeof(te_product_recipe *));
    plan->outputs = te_mem_zalloc(&ctx->mem, 2 * (size_t)plan->n_outputs * sizeof *plan->outputs);
    plan->output_frames = plan->outputs + plan->n_outputs;
    plan->frames = te_mem_zalloc(&ctx->mem, ((size_t)plan->n_nodes + 1) * sizeof *plan->frames);
    if (plan->keys && plan->values && plan->units && plan->nodes && plan->recipes && plan->outputs && plan->frames)
        return plan;
    te_fuse_plan_release(plan);
    te_fail_memory(ctx, "fuser");
    return NULL;
}

static void describe_values(te_fuse_plan *plan, const te_group *group)
{
    for (int v = 0; v < plan->n_values; v++) {
        te_plan_value *value = &plan->values[v];
        int producer = group->values[v].producer;
        *value = (te_plan_value){.node = producer >= 0 ? producer : -1, .input = producer < 0 ? -1 - producer : -1,
                                 .unit = -1, .output = -1, .wired = TE_NO_VALUE};
        if (value->input < 0) continue;
        const te_plan_key *key = &plan->keys[value->input];
        value->cls = key->cls;
        value->dtype = key->dtype;
        value->wanted = key->wanted;
        value->ndim = key->ndim;
        value->frame = group->values[v].frame > 0 ? group->values[v].frame : 0;
        value->width = key->width;
        memcpy(value->shape, key->shape, sizeof value->shape);
    }
    if (plan->n_outputs) memcpy(plan->outputs, group->outputs, (size_t)plan->n_outputs * sizeof *plan->outputs);
}

static te_fuse_plan *new_plan(te_group *group, const te_plan_key *keys, int x_ndim, bool record)
{
    te_context *ctx = group->ctx;
    te_fuse_plan *plan = open_plan(group);
    if (!plan) return NULL;
    memcpy(plan->keys, keys, (size_t)plan->n_inputs * sizeof *keys);
    if (plan->n_nodes) memcpy(plan->nodes, group->nodes, (size_t)plan->n_nodes * sizeof *plan->nodes);
    bool owned = true;
    for (int i = 0; i < plan->n_nodes; i++) {
        te_group_node *node = &plan->nodes[i];
        const te_group_node *from = &group->nodes[i];
        owned = te_node_own(&ctx->mem, node, from->list, from->n_list, from->states, from->n_states) && owned;
        te_op_retain(node->call.op);
        te_recipe_state_retain(node->recipe_state);
        plan->recipes[i] = te_product_recipe_retain(te_recipe_active(node->recipe_state));
        for (int k = 0; k < node->n_states && owned; k++)
            node->recipes[k] = te_product_recipe_retain(te_recipe_active(node->states[k]));
    }
    plan->compute_dtype = ctx->compute_dtype;
    plan->record = record;
    plan->recompute_width = ctx->recompute_width;
    plan->x_ndim = x_ndim;
    plan->n_frames = 1;
    plan->frames[0] = (te_plan_frame){.ndim = x_ndim, .rows = 1, .per = 1};
    describe_values(plan, group);
    te_status status = owned ? te_plan_infer(plan) : te_fail_memory(ctx, "fuser");
    if (status == TE_OK) te_plan_wire(plan);
    if (status == TE_OK) status = te_plan_cluster(plan);
    if (status == TE_OK) status = te_plan_compile(plan);
    if (status == TE_OK) return plan;
    if (status == TE_ERROR_UNSUPPORTED && (plan->refusal = te_mem_alloc(&ctx->mem, sizeof ctx->message))) {
        memcpy(plan->refusal, ctx->message, sizeof ctx->message);
        return plan;
    }
    te_fuse_plan_release(plan);
    return NULL;
}

/* --- keys --------------------------------------------------------------------------------------------------------- */

/* s: the dimensions that rows have where the operation stands that reads t. */
static void read_key(te_plan_key *key, const te_tensor *t, const te_space *s, bool parameter, bool record)
{
    memset(key, 0, sizeof *key);
    if (!t) return;
    int lead = s->ndim - 1;
    bool rows = !parameter && t->ndim >= lead;
    for (int i = 0; i < lead && rows; i++) rows = s->shape[i] == t->shape[i] || s->shape[i] == -1;
    key->dtype = t->dtype;
    key->wanted = record && te_needs_grad(t);
    key->width = t->ndim ? t->shape[t->ndim - 1] : 1;
    if (t->dtype == TE_I32 || t->dtype == TE_I64) {
        key->cls = TE_VALUE_LENGTHS;
        key->width = 0; /* however many there are */
    } else if (rows && t->ndim == s->ndim) {
        key->cls = TE_VALUE_TOKENS;
    } else if (rows && t->ndim == lead && lead > 0) {
        key->cls = TE_VALUE_ROWS;
    } else {
        key->cls = TE_VALUE_FIXED;
        key->ndim = t->ndim;
        key->width = te_tensor_numel(t);
        memcpy(key->shape, t->shape, (size_t)t->ndim * sizeof *t->shape);
    }
}

static bool same_plan(const te_fuse_plan *plan, const te_plan_key *keys, int x_ndim, bool record)
{
    for (int i = 0; i < plan->n_nodes; i++) {
        const te_group_node *node = &plan->nodes[i];
        if (!te_product_recipe_alike(plan->recipes[i], te_recipe_active(node->recipe_state))) return false;
        for (int k = 0; k < node->n_states; k++)
            if (!te_product_recipe_alike(node->recipes[k], te_recipe_active(node->states[k]))) return false;
    }
    return plan->record == record && plan->x_ndim == x_ndim && plan->compute_dtype == plan->ctx->compute_dtype &&
           plan->recompute_width == plan->ctx->recompute_width &&
           memcmp(plan->keys, keys, (size_t)plan->n_inputs * sizeof *keys) == 0;
}

/* Shapes and recipes may be new in every step. A plan that backward has yet to run takes memory anyway. */
static void forget_surplus(te_group *group)
{
    int n = 0;
    for (te_fuse_plan **at = &group->plans; *at;) {
        te_fuse_plan *plan = *at;
        if (++n <= TE_GROUP_MAX_PLANS || plan->refs > 1) {
            at = &plan->next;
            continue;
        }
        *at = plan->next;
        te_fuse_plan_release(plan);
    }
}

te_fuse_plan *te_group_plan(te_group *group, te_tensor *const *inputs, bool record)
{
    const te_space first = te_frame_of_input(inputs[0]);
    int n = 0;
    for (int v = 0; v < group->n_values; v++) {
        const te_group_value *value = &group->values[v];
        if (value->producer >= 0) continue;
        te_space s = value->frame > 0 ? te_group_frame(group, value->frame, inputs[0]) : first;
        read_key(&group->keys[n], inputs[n], &s, value->parameter, record);
        n++;
    }
    for (te_fuse_plan **at = &group->plans; *at; at = &(*at)->next) {
        te_fuse_plan *plan = *at;
        if (!same_plan(plan, group->keys, first.ndim, record)) continue;
        *at = plan->next;
        plan->next = group->plans;
        return group->plans = plan;
    }
    te_fuse_plan *plan = new_plan(group, group->keys, first.ndim, record);
    if (!plan) return NULL;
    plan->next = group->plans;
    group->plans = plan;
    forget_surplus(group);
    if (te_environment_traces("fuse")) te_fuse_trace(plan, inputs);
    return plan;
}
