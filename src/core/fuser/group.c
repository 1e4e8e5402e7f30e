/* group.c - building groups, and running them. */
#include "plan.h"

#include "../autocast.h"
#include "../autograd.h"
#include "../ops/ops.h"
#include "kernels/float_mode.h"

/* --- building ----------------------------------------------------------------------------------------------------- */

te_group *te_group_new(te_context *ctx)
{
    if (!ctx || !te_context_count(ctx, sizeof(te_group))) return NULL;
    te_group *group = te_mem_zalloc(&ctx->mem, sizeof *group);
    if (!group) {
        te_context_discount(ctx, sizeof *group);
        te_fail_memory(ctx, "fuser");
        return NULL;
    }
    group->ctx = ctx;
    group->counted = sizeof *group;
    te_context_retain(ctx);
    return group;
}

static void forget_plans(te_group *group)
{
    while (group->plans) {
        te_fuse_plan *plan = group->plans;
        group->plans = plan->next;
        te_fuse_plan_release(plan);
    }
}

void te_group_release(te_group *group)
{
    if (!group) return;
    te_context *ctx = group->ctx;
    forget_plans(group);
    for (int i = 0; i < group->n_nodes; i++) {
        te_op_release(group->nodes[i].call.op);
        te_recipe_state_release(group->nodes[i].recipe_state);
        te_node_disown(&ctx->mem, &group->nodes[i]);
    }
    te_mem_free(&ctx->mem, group->nodes, group->node_capacity * sizeof *group->nodes);
    te_mem_free(&ctx->mem, group->values, group->value_capacity * sizeof *group->values);
    te_mem_free(&ctx->mem, group->keys, group->key_capacity * sizeof *group->keys);
    te_context_discount(ctx, group->counted);
    te_mem_free(&ctx->mem, group, sizeof *group);
    te_context_unref(ctx);
}

/* Room for one more of `size` bytes; lists grow to twice of what is in them. */
static bool grow(te_group *group, void *items, size_t *capacity, int n, size_t size)
{
    if (!te_context_count(group->ctx, 2 * size)) return false;
    group->counted += 2 * size;
    if (te_mem_grow(&group->ctx->mem, items, capacity, (size_t)n + 1, size)) return true;
    te_fail_memory(group->ctx, "fuser");
    return false;
}

static int add_value(te_group *group, te_group_value made)
{
    if (!grow(group, &group->values, &group->value_capacity, group->n_values, sizeof *group->values))
        return TE_NO_VALUE;
    group->values[group->n_values] = made;
    forget_plans(group); /* they are those of a smaller group */
    return group->n_values++;
}

int te_group_input(te_group *group, bool parameter)
{
    if (!group) return TE_NO_VALUE;
    if (!grow(group, &group->keys, &group->key_capacity, group->n_inputs, sizeof *group->keys)) return TE_NO_VALUE;
    int value = add_value(group, (te_group_value){-1 - group->n_inputs, group->n_inputs ? -1 : 0, parameter});
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
    if (!ctx) return false;
    if (!op) {
        te_fail(ctx, TE_ERROR_ARGUMENT, "te_group_accepts: the operation is NULL");
        return false;
    }
    bool known = op->def->formula || op->def->resolve || op->def->unit != TE_UNIT_PROGRAM;
    if (known && op->n_outputs == 1 && !op->takes_list) return true;
    te_fail(ctx, TE_ERROR_UNSUPPORTED, "te.%s %s", op->name,
            known ? "has several results" : "is no row program, matrix product, self attention, reshape or embedding");
    return false;
}

te_status te_group_op(te_group *group, const te_group_call *call, int *result)
{
    te_context *ctx = group->ctx;
    te_group_node node = {.call = {.ctx = ctx, .op = call->op},
                          .label = call->label,
                          .recipe_state = call->recipe_state,
                          .cache_quantized = call->cache_quantized};
    te_status status = te_call_attributes(&node.call, call->args, call->n_args);
    for (int i = 0; i < TE_OP_MAX_INPUTS; i++) node.in[i] = i < call->op->n_inputs ? call->values[i] : TE_NO_VALUE;
    for (int i = 0; i < call->op->n_inputs && status == TE_OK; i++)
        if (node.in[i] < TE_NO_VALUE || node.in[i] >= group->n_values)
            status = te_call_fail(&node.call, TE_ERROR_ARGUMENT, "no value %d in the group", node.in[i]);
    for (int i = 0; i < call->op->n_params && status == TE_OK; i++) {
        const te_param *p = &call->op->params[i];
        if (p->type == TE_TYPE_TENSOR && !p->optional && node.in[p->slot] == TE_NO_VALUE &&
            !node.call.is_number[p->slot])
            status = te_call_fail(&node.call, TE_ERROR_ARGUMENT, "argument %s is missing", p->name);
    }
    if (status == TE_OK && !te_group_accepts(ctx, call->op)) status = ctx->status;
    if (status == TE_OK && call->op->def->check) status = call->op->def->check(&node.call);
    if (status == TE_OK && call->op->def->resolve) status = resolve(group, &node);
    if (status != TE_OK) return status;
    if (!node.call.op) {
        *result = node.in[0];
        return TE_OK;
    }
    if (!grow(group, &group->nodes, &group->node_capacity, group->n_nodes, sizeof *group->nodes)) return ctx->status;
    for (int i = 0; i < call->n_list; i++)
        if (call->list[i] < 0 || call->list[i] >= group->n_values || !group->values[call->list[i]].parameter)
            return te_call_fail(&node.call, TE_ERROR_ARGUMENT, "value %d is no parameter of the group", call->list[i]);
    if (!te_node_own(&ctx->mem, &node, call->list, call->n_list, call->states, call->n_states)) {
        te_node_disown(&ctx->mem, &node);
        return te_fail_memory(ctx, "fuser");
    }
    int frame = te_group_enter_frame(group, &node);
    *result = node.out = add_value(group, (te_group_value){group->n_nodes, frame, false});
    if (node.out == TE_NO_VALUE) {
        te_node_disown(&ctx->mem, &node);
        return ctx->status;
    }
    if (node.call.op->def->unit == TE_UNIT_VIEW) node.frame = frame;
    te_op_retain(node.call.op);
    te_recipe_state_retain(node.recipe_state);
    group->nodes[group->n_nodes++] = node;
    return TE_OK;
}

static te_status apply(te_group *group, te_product *product, const te_op *op, const int *values, int n_values,
                       const te_arg *args, int n_args, int *result)
{
    te_group_call call = {.op = op, .args = args, .n_args = n_args, .recipe_state = product};
    if (!op) return te_fail(group->ctx, TE_ERROR_ARGUMENT, "te_group_apply: there is no operation");
    if (!te_op_is_of(group->ctx, op))
        return te_fail(group->ctx, TE_ERROR_ARGUMENT, "te_group_apply: te.%s is an operation of another context",
                       op->name);
    if (n_values < 0 || n_values > op->n_inputs || (n_values && !values))
        return te_fail(group->ctx, TE_ERROR_ARGUMENT, "te.%s: %d values%s for %d inputs", op->name, n_values,
                       values ? "" : " at NULL", op->n_inputs);
    for (int i = 0; i < TE_OP_MAX_INPUTS; i++) call.values[i] = i < n_values ? values[i] : TE_NO_VALUE;
    return te_group_op(group, &call, result);
}

te_status te_group_apply(te_group *group, const te_op *op, const int *values, int n_values, const te_arg *args,
                         int n_args, int *result)
{
    te_status status = TE_ERROR_ARGUMENT;
    if (group && !result) return te_fail(group->ctx, TE_ERROR_ARGUMENT, "te_group_apply: result is NULL");
    if (group) status = apply(group, NULL, op, values, n_values, args, n_args, result);
    if (status != TE_OK && result) *result = TE_NO_VALUE; /* not before: it may lie among the values */
    return status;
}

static bool attends(const te_op *op) { return op->def->unit == TE_UNIT_ATTENTION; }

static te_status apply_product(te_product *product, te_group *group, const te_op *op, const int *values, int n_values,
                               const te_arg *args, int n_args, int *result)
{
    if (product->ctx != group->ctx)
        return te_fail(group->ctx, TE_ERROR_ARGUMENT,
                       "te_product_apply: the product and the group have different contexts");
    if (!op || (op->def->unit != TE_UNIT_LINEAR && !attends(op)))
        return te_fail(group->ctx, TE_ERROR_ARGUMENT, "te_product_apply: %s is no linear operation or attention",
                       op ? op->name : "NULL");
    return apply(group, product, op, values, n_values, args, n_args, result);
}

te_status te_product_apply(te_product *product, te_group *group, const te_op *op, const int *values, int n_values,
                           const te_arg *args, int n_args, int *result)
{
    te_status status = TE_ERROR_ARGUMENT;
    if (product && group && result)
        status = apply_product(product, group, op, values, n_values, args, n_args, result);
    if (status != TE_OK && result) *result = TE_NO_VALUE;
    return status;
}

/* Products of a C host take the recipe of the scope that the group runs in. */
static te_status prepare_products(te_group *group)
{
    te_status status = TE_OK;
    for (int i = 0; i < group->n_nodes && group->ctx->n_scopes && status == TE_OK; i++) {
        te_group_node *node = &group->nodes[i];
        if (node->recipe_state) status = te_product_prepare(node->recipe_state, attends(node->call.op));
    }
    return status;
}

te_status te_group_output(te_group *group, int value)
{
    if (!group) return TE_ERROR_ARGUMENT;
    if (value < 0 || value >= group->n_values)
        return te_fail(group->ctx, TE_ERROR_ARGUMENT, "no value %d in the group", value);
    if (group->n_outputs == TE_GROUP_MAX_OUTPUTS)
        return te_fail(group->ctx, TE_ERROR_UNSUPPORTED, "a group has at most %d outputs", TE_GROUP_MAX_OUTPUTS);
    group->outputs[group->n_outputs++] = value;
    forget_plans(group);
    return TE_OK;
}

int te_group_n_inputs(const te_group *group) { return group ? group->n_inputs : 0; }
bool te_group_refused(const te_group *group) { return group && group->refused; }
int te_group_n_outputs(const te_group *group) { return group ? group->n_outputs : 0; }

int te_group_n_plans(const te_group *group)
{
    int n = 0;
    for (const te_fuse_plan *plan = group ? group->plans : NULL; plan; plan = plan->next) n++;
    return n;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

te_status te_group_check_inputs(te_group *group, te_tensor *const *inputs, bool *record)
{
    te_context *ctx = group->ctx;
    const te_tensor *x = group->n_inputs ? inputs[0] : NULL;
    *record = false;
    if (!x || x->ndim < 1)
        return te_fail(ctx, TE_ERROR_UNSUPPORTED, "a group needs an input with at least one dimension");
    if (te_frame_of_input(x).ndim > TE_MAX_DIMS)
        return te_fail(ctx, TE_ERROR_UNSUPPORTED, "ids of %d dimensions, for which rows would have too many", x->ndim);
    for (int i = 0; i < group->n_inputs; i++) {
        if (!inputs[i]) continue;
        if (inputs[i]->ctx != ctx) return te_fail(ctx, TE_ERROR_ARGUMENT, "a tensor of another runtime was given");
        if (inputs[i]->storage->device != x->storage->device)
            return te_fail(ctx, TE_ERROR_ARGUMENT, "tensors on different devices: %s and %s", x->storage->device->name,
                           inputs[i]->storage->device->name);
        bool needs_grad = te_needs_grad(inputs[i]);
        ctx->gradient_uses += needs_grad;
        *record |= needs_grad && ctx->grad_enabled;
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

static const te_op_def group_def = {
    .signature = "sequential(x)", .doc = "A group of operations.", .backward = group_backward};
static const te_op group_op = {.def = &group_def, .name = "Sequential", .n_outputs = TE_GROUP_MAX_OUTPUTS};

/* The caller gets tensors of its own: what the state keeps stays outside the graph, so that node and result do not keep
 * each other alive. */
static te_status make_outputs(te_group_state *state, te_tensor **outputs)
{
    for (int i = 0; i < state->plan->n_outputs; i++) {
        const te_fuse_plan *plan = state->plan;
        te_tensor *t = te_state_seen(state, &plan->values[plan->outputs[i]], state->values[plan->outputs[i]],
                                     plan->output_frames[i]);
        outputs[i] = t ? te_tensor_alias(t, t->ndim, t->shape, t->stride, t->offset) : NULL;
        te_tensor_release(t);
        if (!outputs[i]) return plan->ctx->status;
    }
    return TE_OK;
}

static te_status run_group(te_group *group, te_tensor *const *inputs, te_tensor **outputs)
{
    bool record;
    if (!group) return TE_ERROR_ARGUMENT;
    if (inputs && outputs && inputs < outputs + group->n_outputs && outputs < inputs + group->n_inputs)
        return te_fail(group->ctx, TE_ERROR_ARGUMENT, "te_group_run: inputs and outputs overlap in memory");
    for (int i = 0; outputs && i < group->n_outputs; i++) outputs[i] = NULL;
    if ((group->n_inputs && !inputs) || (group->n_outputs && !outputs))
        return te_fail(group->ctx, TE_ERROR_ARGUMENT, "te_group_run: %d inputs%s, %d outputs%s", group->n_inputs,
                       inputs ? "" : " at NULL", group->n_outputs, outputs ? "" : " at NULL");
    te_status status = te_context_poll(group->ctx);
    if (status == TE_OK) status = te_group_check_inputs(group, inputs, &record);
    if (status == TE_OK && te_replays(group->ctx)) status = te_replay_check(group->ctx, inputs, group->n_inputs);
    if (status == TE_OK) status = prepare_products(group);
    group->refused = status == TE_ERROR_UNSUPPORTED;
    if (status != TE_OK) return status;
    te_fuse_plan *plan = te_group_plan(group, inputs, record);
    group->refused = plan && plan->refusal;
    if (group->refused) return te_fail(group->ctx, TE_ERROR_UNSUPPORTED, "%s", plan->refusal);
    te_group_state *state = plan ? te_group_state_new(plan, inputs) : NULL;
    group->refused = !state && group->ctx->status == TE_ERROR_UNSUPPORTED;
    if (!state) return group->ctx->status;
    status = te_plan_forward(state, inputs);
    if (status == TE_OK) status = make_outputs(state, outputs);
    if (status == TE_OK && record) {
        te_call call = {.ctx = group->ctx, .op = &group_op, .pointer = state, .release = release_state};
        bool any = false; /* a node that no output holds would live for ever */
        for (int i = 0; i < group->n_outputs; i++) {
            if (!plan->values[group->outputs[i]].wanted) continue;
            call.out[i] = outputs[i];
            any = true;
        }
        if (any) {
            te_group_state_trim(state);
            status = te_autograd_record(&call, (te_tensor **)(uintptr_t)inputs, group->n_inputs);
            if (status == TE_OK) return TE_OK;
        }
    }
    te_group_state_free(state);
    for (int i = 0; i < group->n_outputs && status != TE_OK; i++) {
        te_tensor_release(outputs[i]);
        outputs[i] = NULL;
    }
    return status;
}

te_status te_group_run(te_group *group, te_tensor *const *inputs, te_tensor **outputs)
{
    te_float_mode mode = te_float_mode_begin(); /* of planning, too: numbers that programs hold */
    te_status     status = run_group(group, inputs, outputs);
    te_float_mode_end(&mode);
    return status;
}
