/* group.c - building groups, and finding the plan for a run. */
#include "plan.h"

#include "../autograd.h"
#include "../ops/ops.h"

/* --- building ----------------------------------------------------------------------------------------------------- */

te_group *te_group_new(te_context *ctx)
{
    te_group *group = te_mem_zalloc(&ctx->mem, sizeof *group);
    if (!group) {
        te_fail_memory(ctx, "fuser");
        return NULL;
    }
    group->ctx = ctx;
    te_context_retain(ctx);
    return group;
}

void te_group_release(te_group *group)
{
    if (!group) return;
    te_context *ctx = group->ctx;
    while (group->plans) {
        te_fuse_plan *plan = group->plans;
        group->plans = plan->next;
        te_fuse_plan_release(plan);
    }
    for (int i = 0; i < group->n_nodes; i++) {
        te_op_release(group->nodes[i].call.op);
        te_recipe_state_release(group->nodes[i].recipe_state);
    }
    te_mem_free(&ctx->mem, group->nodes, group->node_capacity * sizeof *group->nodes);
    te_mem_free(&ctx->mem, group->producers, group->producer_capacity * sizeof *group->producers);
    te_mem_free(&ctx->mem, group->parameter, group->parameter_capacity * sizeof *group->parameter);
    te_mem_free(&ctx->mem, group->keys, group->key_capacity * sizeof *group->keys);
    te_mem_free(&ctx->mem, group, sizeof *group);
    te_context_unref(ctx);
}

/* A value made by `producer`: a node, or -1 - input. */
static int add_value(te_group *group, int producer, bool parameter)
{
    const te_mem *mem = &group->ctx->mem;
    void *producers = group->producers, *parameters = group->parameter;
    size_t n = (size_t)group->n_values + 1;
    bool grown = te_mem_grow(mem, &producers, &group->producer_capacity, n, sizeof *group->producers);
    group->producers = producers;
    grown = grown && te_mem_grow(mem, &parameters, &group->parameter_capacity, n, sizeof *group->parameter);
    group->parameter = parameters;
    if (!grown) {
        te_fail_memory(group->ctx, "fuser");
        return TE_NO_VALUE;
    }
    group->producers[group->n_values] = producer;
    group->parameter[group->n_values] = parameter;
    return group->n_values++;
}

int te_group_input(te_group *group, bool parameter)
{
    void *keys = group->keys;
    if (!te_mem_grow(&group->ctx->mem, &keys, &group->key_capacity, (size_t)group->n_inputs + 1, sizeof *group->keys)) {
        te_fail_memory(group->ctx, "fuser");
        return TE_NO_VALUE;
    }
    group->keys = keys;
    int value = add_value(group, -1 - group->n_inputs, parameter);
    if (value != TE_NO_VALUE) group->n_inputs++;
    return value;
}

/* The op that a call stands for, with its attributes; node->call.op is NULL when it is the first input itself. */
static te_status resolve(te_group *group, te_group_node *node)
{
    te_delegate to = {.name = NULL};
    te_arg args[TE_OP_MAX_INPUTS + 4] = {{.kind = TE_ARG_ABSENT}};
    te_status status = node->call.op->def->resolve(&node->call, &to);
    if (status != TE_OK) return status;
    const te_op *op = to.name ? te_op_find(group->ctx, to.name) : NULL;
    int n = 0;
    if (to.name && !op) return group->ctx->status;
    for (int i = 0; op && i < op->n_params && n < to.n; i++)
        if (op->params[i].type > TE_TYPE_TENSORS) args[i] = TE_A_NUMBER(to.attrs[n++]);
    node->call = (te_call){.ctx = group->ctx, .op = op};
    return op ? te_call_attributes(&node->call, args, op->n_params) : TE_OK;
}

bool te_group_accepts(te_context *ctx, const te_op *op)
{
    const te_op_def *def = op->def;
    bool known = def->formula || def->resolve || strcmp(op->name, "linear") == 0 || strcmp(op->name, "self_attention") == 0;
    if (known && op->n_outputs == 1 && !op->takes_list) return true;
    te_fail(ctx, TE_ERROR_UNSUPPORTED, "te.%s %s", op->name,
            known ? "has several results" : "is no row program, matrix product or self attention");
    return false;
}

te_status te_group_op(te_group *group, const te_group_call *call, int *result)
{
    te_context *ctx = group->ctx;
    te_group_node node = {.call = {.ctx = ctx, .op = call->op}, .label = call->label, .recipe_state = call->recipe_state,
                          .cache_quantized = call->cache_quantized};
    void *nodes = group->nodes;
    te_status status = te_call_attributes(&node.call, call->args, call->n_args);
    for (int i = 0; i < TE_OP_MAX_INPUTS; i++) node.in[i] = i < call->op->n_inputs ? call->values[i] : TE_NO_VALUE;
    for (int i = 0; i < call->op->n_inputs && status == TE_OK; i++)
        if (node.in[i] < TE_NO_VALUE || node.in[i] >= group->n_values)
            status = te_call_fail(&node.call, TE_ERROR_ARGUMENT, "no value %d in the group", node.in[i]);
    if (status == TE_OK && !te_group_accepts(ctx, call->op)) status = ctx->status;
    if (status == TE_OK && call->op->def->resolve) status = resolve(group, &node);
    if (status != TE_OK) return status;
    if (!node.call.op) {
        *result = node.in[0];
        return TE_OK;
    }
    if (!te_mem_grow(&ctx->mem, &nodes, &group->node_capacity, (size_t)group->n_nodes + 1, sizeof *group->nodes))
        return te_fail_memory(ctx, "fuser");
    group->nodes = nodes;
    *result = node.out = add_value(group, group->n_nodes, false);
    if (node.out == TE_NO_VALUE) return ctx->status;
    te_op_retain(node.call.op);
    te_recipe_state_retain(node.recipe_state);
    group->nodes[group->n_nodes++] = node;
    return TE_OK;
}

te_status te_group_output(te_group *group, int value)
{
    if (value < 0 || value >= group->n_values || group->n_outputs == TE_GROUP_MAX_OUTPUTS)
        return te_fail(group->ctx, TE_ERROR_UNSUPPORTED, "a group has at most %d outputs", TE_GROUP_MAX_OUTPUTS);
    group->outputs[group->n_outputs++] = value;
    return TE_OK;
}

int te_group_n_inputs(const te_group *group) { return group->n_inputs; }
bool te_group_refused(const te_group *group) { return group->refused; }
int te_group_n_outputs(const te_group *group) { return group->n_outputs; }

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
    }
    for (int i = 0; plan->recipes && i < plan->n_nodes; i++) te_product_recipe_release(plan->recipes[i]);
    te_mem_free(mem, plan->keys, (size_t)plan->n_inputs * sizeof *plan->keys);
    te_mem_free(mem, plan->values, (size_t)plan->n_values * sizeof *plan->values);
    te_mem_free(mem, plan->units, (size_t)plan->n_nodes * sizeof *plan->units);
    te_mem_free(mem, plan->nodes, (size_t)plan->n_nodes * sizeof *plan->nodes);
    te_mem_free(mem, plan->recipes, (size_t)plan->n_nodes * sizeof *plan->recipes);
    te_mem_free(mem, plan->outputs, (size_t)plan->n_outputs * sizeof *plan->outputs);
    te_mem_free(mem, plan->refusal, sizeof ctx->message);
    te_mem_free(mem, plan, sizeof *plan);
    te_context_unref(ctx);
}

static te_fuse_plan *open_plan(te_group *group)
{
    te_context *ctx = group->ctx;
    te_fuse_plan *plan = te_mem_zalloc(&ctx->mem, sizeof *plan);
    if (!plan) return NULL;
    *plan = (te_fuse_plan){.ctx = ctx, .refs = 1, .n_inputs = group->n_inputs, .n_nodes = group->n_nodes,
                           .n_values = group->n_values, .n_outputs = group->n_outputs};
    te_context_retain(ctx);
    plan->keys = te_mem_zalloc(&ctx->mem, (size_t)plan->n_inputs * sizeof *plan->keys);
    plan->values = te_mem_zalloc(&ctx->mem, (size_t)plan->n_values * sizeof *plan->values);
    plan->units = te_mem_zalloc(&ctx->mem, (size_t)plan->n_nodes * sizeof *plan->units);
    plan->nodes = te_mem_zalloc(&ctx->mem, (size_t)plan->n_nodes * sizeof *plan->nodes);
    plan->recipes = te_mem_zalloc(&ctx->mem, (size_t)plan->n_nodes * sizeof(te_product_recipe *));
    plan->outputs = te_mem_zalloc(&ctx->mem, (size_t)plan->n_outputs * sizeof *plan->outputs);
    if (plan->keys && plan->values && plan->units && plan->nodes && plan->recipes && plan->outputs) return plan;
    te_fuse_plan_release(plan);
    return NULL;
}

static void describe_values(te_fuse_plan *plan, const te_group *group)
{
    for (int v = 0; v < plan->n_values; v++) {
        te_plan_value *value = &plan->values[v];
        int producer = group->producers[v];
        *value = (te_plan_value){.node = producer >= 0 ? producer : -1, .input = producer < 0 ? -1 - producer : -1,
                                 .unit = -1, .output = -1};
        if (value->input < 0) continue;
        const te_plan_key *key = &plan->keys[value->input];
        value->cls = key->cls;
        value->dtype = key->dtype;
        value->wanted = key->wanted;
        value->ndim = key->ndim;
        value->width = key->width;
        memcpy(value->shape, key->shape, sizeof value->shape);
    }
    for (int i = plan->n_outputs - 1; i >= 0; i--) plan->values[plan->outputs[i] = group->outputs[i]].output = i;
}

te_fuse_plan *te_fuse_plan_new(te_group *group, const te_plan_key *keys, int x_ndim, bool record)
{
    te_context *ctx = group->ctx;
    te_fuse_plan *plan = open_plan(group);
    if (!plan) {
        te_fail_memory(ctx, "fuser");
        return NULL;
    }
    memcpy(plan->keys, keys, (size_t)plan->n_inputs * sizeof *keys);
    memcpy(plan->nodes, group->nodes, (size_t)plan->n_nodes * sizeof *plan->nodes);
    for (int i = 0; i < plan->n_nodes; i++) {
        te_op_retain(plan->nodes[i].call.op);
        te_recipe_state_retain(plan->nodes[i].recipe_state);
        plan->recipes[i] = te_product_recipe_retain(te_recipe_active(plan->nodes[i].recipe_state));
    }
    plan->compute_dtype = ctx->compute_dtype;
    plan->record = record;
    plan->recompute_width = ctx->recompute_width;
    plan->x_ndim = x_ndim;
    describe_values(plan, group);
    te_status status = te_plan_infer(plan);
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

static void read_key(te_plan_key *key, const te_tensor *t, const te_tensor *x, bool parameter, bool record)
{
    memset(key, 0, sizeof *key);
    if (!t) return;
    int lead = x->ndim - 1;
    bool rows = !parameter && t->ndim >= lead && memcmp(t->shape, x->shape, (size_t)lead * sizeof *t->shape) == 0;
    key->dtype = t->dtype;
    key->wanted = record && te_needs_grad(t);
    key->width = t->ndim ? t->shape[t->ndim - 1] : 1;
    if (t->dtype == TE_I32 || t->dtype == TE_I64) {
        key->cls = TE_VALUE_LENGTHS;
    } else if (rows && t->ndim == x->ndim) {
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
    for (int i = 0; i < plan->n_nodes; i++)
        if (plan->recipes[i] != te_recipe_active(plan->nodes[i].recipe_state)) return false;
    return plan->record == record && plan->x_ndim == x_ndim && plan->compute_dtype == plan->ctx->compute_dtype &&
           plan->recompute_width == plan->ctx->recompute_width &&
           memcmp(plan->keys, keys, (size_t)plan->n_inputs * sizeof *keys) == 0;
}

te_fuse_plan *te_group_plan(te_group *group, te_tensor *const *inputs, bool record)
{
    const te_tensor *x = inputs[0];
    int n = 0;
    for (int v = 0; v < group->n_values; v++) {
        if (group->producers[v] >= 0) continue;
        read_key(&group->keys[n], inputs[n], x, group->parameter[v], record);
        n++;
    }
    for (te_fuse_plan **at = &group->plans; *at; at = &(*at)->next) {
        te_fuse_plan *plan = *at;
        if (!same_plan(plan, group->keys, x->ndim, record)) continue;
        *at = plan->next;
        plan->next = group->plans;
        return group->plans = plan;
    }
    te_fuse_plan *plan = te_fuse_plan_new(group, group->keys, x->ndim, record);
    if (!plan) return NULL;
    plan->next = group->plans;
    return group->plans = plan;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

static te_status check_inputs(te_group *group, te_tensor *const *inputs, bool *record)
{
    te_context *ctx = group->ctx;
    const te_tensor *x = inputs[0];
    *record = false;
    if (!x || x->ndim < 1) return te_fail(ctx, TE_ERROR_UNSUPPORTED, "a group needs an input with at least one dimension");
    for (int i = 0; i < group->n_inputs; i++) {
        if (!inputs[i]) continue;
        if (inputs[i]->ctx != ctx) return te_fail(ctx, TE_ERROR_ARGUMENT, "a tensor of another runtime was given");
        if (inputs[i]->storage->device != x->storage->device)
            return te_fail(ctx, TE_ERROR_ARGUMENT, "tensors on different devices: %s and %s", x->storage->device->name,
                           inputs[i]->storage->device->name);
        *record |= ctx->grad_enabled && te_needs_grad(inputs[i]);
    }
    return TE_OK;
}

static void release_state(te_call *call)
{
    te_group_state_free((te_group_state *)(uintptr_t)call->pointer);
    call->pointer = NULL;
}

static te_status group_backward(te_call *call)
{
    return te_plan_backward((te_group_state *)(uintptr_t)call->pointer, call);
}

static const te_op_def group_def = {.signature = "sequential(x)", .doc = "A group of operations.", .backward = group_backward};
static const te_op group_op = {.def = &group_def, .name = "sequential", .n_outputs = TE_GROUP_MAX_OUTPUTS};

/* The caller gets tensors of its own: what the state keeps stays outside the graph, so that node and result do not keep
 * each other alive. */
static te_status make_outputs(te_group_state *state, te_tensor **outputs)
{
    for (int i = 0; i < state->plan->n_outputs; i++) {
        te_tensor *t = state->values[state->plan->outputs[i]];
        outputs[i] = te_tensor_alias(t, t->ndim, t->shape, t->stride, t->offset);
        if (!outputs[i]) return t->ctx->status;
    }
    return TE_OK;
}

te_status te_group_run(te_group *group, te_tensor *const *inputs, te_tensor **outputs)
{
    bool record;
    te_status status = te_context_poll(group->ctx);
    for (int i = 0; i < group->n_outputs; i++) outputs[i] = NULL;
    if (status == TE_OK) status = check_inputs(group, inputs, &record);
    if (status != TE_OK) return status;
    te_fuse_plan *plan = te_group_plan(group, inputs, record);
    group->refused = plan && plan->refusal;
    if (group->refused) return te_fail(group->ctx, TE_ERROR_UNSUPPORTED, "%s", plan->refusal);
    te_group_state *state = plan ? te_group_state_new(plan, inputs[0]) : NULL;
    if (!state) return group->ctx->status;
    status = te_plan_forward(state, inputs);
    if (status == TE_OK) status = make_outputs(state, outputs);
    if (status == TE_OK && record) {
        te_call call = {.ctx = group->ctx, .op = &group_op, .pointer = state, .release = release_state};
        te_group_state_trim(state);
        for (int i = 0; i < group->n_outputs; i++)
            if (plan->values[group->outputs[i]].wanted) call.out[i] = outputs[i];
        status = te_autograd_record(&call, (te_tensor **)(uintptr_t)inputs, group->n_inputs);
        if (status == TE_OK) return TE_OK;
    }
    te_group_state_free(state);
    for (int i = 0; i < group->n_outputs && status != TE_OK; i++) {
        te_tensor_release(outputs[i]);
        outputs[i] = NULL;
    }
    return status;
}
