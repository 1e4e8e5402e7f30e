/* test_fuser_memory.c - groups whose memory runs out: every allocation of planning, of a step and of its backward fails
 * in turn, with a message, nothing leaked, gradients that are whole or not there, and a next step that works. */
#include "failing_context.h"
#include "fuser_block.h"

#include <limits.h>

static bool block_step(network *net)
{
    te_tensor *out[2] = {NULL, NULL};
    te_group *group = make_group(net->ctx);
    bool ok = group && te_group_run(group, net->in, out) == TE_OK && backward_of(out, false) == TE_OK;
    drop(out);
    te_group_release(group);
    for (int i = 0; i < N_INPUTS; i++) te_tensor_set_grad(net->in[i], NULL);
    return ok;
}

/* A node with one or two activations and, where a width is given, a shape {-1, width}; -1 on failure. */
static int add_node(te_context *ctx, te_group *group, const char *name, int first, int second, int64_t width,
                    const int *list)
{
    const int64_t shape[] = {-1, width};
    te_arg args[TE_OP_MAX_INPUTS + TE_OP_MAX_ATTRS] = {{.kind = TE_ARG_ABSENT}};
    te_group_call call = {.op = te_op_find(ctx, name),
                          .values = {first, second, TE_NO_VALUE, TE_NO_VALUE, TE_NO_VALUE, TE_NO_VALUE},
                          .list = list,
                          .n_list = list ? 2 : 0,
                          .args = args};
    int result;
    if (width) args[1] = (te_arg){.kind = TE_ARG_INTS, .n = 2, .as.ints = shape};
    call.n_args = call.op ? call.op->n_params : 0;
    return call.op && group && first >= 0 && te_group_op(group, &call, &result) == TE_OK ? result : -1;
}

/* ids -> embedding -> reshape to half the width -> rms_norm -> reshape back -> stochastic depth -> grouped_linear */
static bool rows_step(network *net)
{
    te_context *ctx = net->ctx;
    te_group *group = te_group_new(ctx);
    te_tensor *out[2] = {NULL, NULL}, *ids = te_tensor_full(ctx, TE_I64, 1, (int64_t[]){6}, 3);
    te_tensor *sizes = te_tensor_full(ctx, TE_I32, 1, (int64_t[]){2}, 3);
    int x = group ? te_group_input(group, false) : -1, n = group ? te_group_input(group, false) : -1, p[3];
    for (int i = 0; i < 3; i++) p[i] = group ? te_group_input(group, true) : -1;
    int rows = p[2] < 0 ? -1 : add_node(ctx, group, "embedding", p[0], x, 0, NULL);
    rows = add_node(ctx, group, "reshape", rows, TE_NO_VALUE, WIDTH / 2, NULL);
    rows = add_node(ctx, group, "rms_norm", rows, TE_NO_VALUE, 0, NULL);
    rows = add_node(ctx, group, "reshape", rows, TE_NO_VALUE, WIDTH, NULL);
    int kept = add_node(ctx, group, "stochastic_depth_mask", rows, TE_NO_VALUE, 0, NULL);
    rows = kept < 0 ? -1 : add_node(ctx, group, "stochastic_depth_rows", rows, kept, 0, NULL);
    rows = add_node(ctx, group, "grouped_linear", rows, n, 0, p + 1);
    te_tensor *in[] = {ids, sizes, net->in[5], net->in[3], net->in[7]};
    bool ok =
        ids && sizes && rows >= 0 && te_group_output(group, rows) == TE_OK && te_group_run(group, in, out) == TE_OK;
    te_tensor *seed = ok ? te_tensor_full(ctx, TE_F32, out[0]->ndim, out[0]->shape, 1) : NULL;
    ok = seed && te_backward(out[0], seed, false) == TE_OK;
    te_tensor_release(seed);
    drop(out);
    te_tensor_release(ids);
    te_tensor_release(sizes);
    te_group_release(group);
    for (int i = 0; i < N_INPUTS; i++) te_tensor_set_grad(net->in[i], NULL);
    return ok;
}

/* E4M3 with one factor a tensor, for every operand. */
static bool open_states(te_context *ctx, te_recipe_state **states, int n)
{
    te_product_recipe description = {.history_length = {1, 1, 1}}, *recipe;
    for (int r = 0; r < TE_ROLE_COUNT; r++) {
        description.quantized[r] = true;
        description.quantizers[r] =
            (te_quantizer){.element = TE_E4M3, .scale = TE_SCALE_F32, .has_columnwise = true, .transposed = true};
    }
    bool ok = (recipe = te_product_recipe_new(ctx, &description)) != NULL;
    for (int i = 0; i < n && ok; i++)
        ok = (states[i] = te_recipe_state_new(ctx)) && te_recipe_state_use(states[i], recipe) == TE_OK;
    te_product_recipe_release(recipe);
    return ok;
}

/* grouped_linear under a recipe, and the biases of its groups: in memory of their own, since plans keep their lists */
static bool groups_step(network *net)
{
    te_context *ctx = net->ctx;
    te_group *group = te_group_new(ctx);
    te_recipe_state *states[2] = {NULL, NULL};
    te_tensor *out[1] = {NULL}, *sizes = te_tensor_full(ctx, TE_I32, 1, (int64_t[]){2}, 1);
    te_tensor *scale = te_tensor_full(ctx, TE_F32, 2, (int64_t[]){BATCH, TOKENS}, 2);
    int v[7], y = -1, biases = -1, sum = -1;
    bool ok = group && sizes && scale && open_states(ctx, states, 2);
    for (int i = 0; i < 7 && ok; i++) ok = (v[i] = te_group_input(group, i > 2)) >= 0;
    if (ok) {
        te_arg none[TE_OP_MAX_INPUTS + TE_OP_MAX_ATTRS] = {{.kind = TE_ARG_ABSENT}};
        te_group_call calls[] = {
            {.op = te_op_find(ctx, "grouped_linear"),
             .values = {v[0], v[1]},
             .list = v + 3,
             .n_list = 2,
             .states = states,
             .n_states = 2},
            {.op = te_op_find(ctx, "grouped_biases"), .values = {v[2], v[1]}, .list = v + 5, .n_list = 2},
            {.op = te_op_find(ctx, "addcmul_rows"), .values = {0, v[2], 0}}};
        int *results[] = {&y, &biases, &sum};
        for (int i = 0; i < 3 && ok; i++) {
            calls[i].args = none;
            calls[i].n_args = calls[i].op->n_params;
            if (i == 2) calls[i].values[0] = y;
            if (i == 2) calls[i].values[2] = biases;
            ok = te_group_op(group, &calls[i], results[i]) == TE_OK;
        }
    }
    te_tensor *in[] = {net->in[0], sizes, scale, net->in[5], net->in[5], net->in[6], net->in[10]};
    ctx->recipe_enabled = true;
    ok = ok && te_group_output(group, sum) == TE_OK && te_group_run(group, in, out) == TE_OK;
    te_tensor *seed = ok ? te_tensor_full(ctx, TE_F32, out[0]->ndim, out[0]->shape, 1) : NULL;
    ok = seed && te_backward(out[0], seed, false) == TE_OK;
    ctx->recipe_enabled = false;
    te_tensor_release(seed);
    te_tensor_release(out[0]);
    te_tensor_release(scale);
    te_tensor_release(sizes);
    for (int i = 0; i < 2; i++) te_recipe_state_release(states[i]);
    te_group_release(group);
    for (int i = 0; i < N_INPUTS; i++) te_tensor_set_grad(net->in[i], NULL);
    return ok;
}

/* Returns whether the step got by without reaching allocation n. */
static bool step_with_failure(long n, bool (*take_step)(network *))
{
    failing_memory f;
    te_context *ctx = failing_context_open(&f, 1);
    network net;
    CHECK(ctx && network_open(&net, ctx, TE_F32));
    f.countdown = n;
    bool ok = take_step(&net), reached = failing_memory_stop(&f);
    CHECK_MSG(ok || strlen(te_context_error(ctx)) > 0, "allocation %ld failed without a message", n);
    CHECK_MSG(take_step(&net), "after allocation %ld failed: %s", n, te_context_error(ctx));
    network_close(&net);
    failing_context_close(ctx, &f, n);
    return !reached;
}

/* Allocation n fails on the way back: a gradient is whole or not there, and the next pass gives all of them. Returns
 * whether it was not reached; want is filled where nothing failed. */
static bool backward_with_failure(long n, double want[N_INPUTS][256])
{
    static double got[N_INPUTS][256];
    failing_memory f;
    te_context *ctx = failing_context_open(&f, 1);
    network net;
    te_tensor *out[2] = {NULL, NULL};
    CHECK(ctx && network_open(&net, ctx, TE_F32));
    te_group *group = make_group(ctx);
    CHECK(group && te_group_run(group, net.in, out) == TE_OK);
    f.countdown = n;
    bool ok = backward_of(out, true) == TE_OK, reached = failing_memory_stop(&f);
    if (ok && !reached) read_grads(&net, want);
    for (int i = 0; i < N_INPUTS; i++) {
        te_tensor *grad = te_tensor_grad(net.in[i]);
        size_t bytes = (size_t)te_tensor_numel(net.in[i]) * sizeof(double);
        if (grad) CHECK(te_tensor_read(grad, TE_F64, got[i]) == TE_OK);
        CHECK_MSG(!grad || memcmp(got[i], want[i], bytes) == 0, "allocation %ld: gradient %d is none", n, i);
        te_tensor_set_grad(net.in[i], NULL);
    }
    CHECK_MSG(backward_of(out, true) == TE_OK, "after allocation %ld failed: %s", n, te_context_error(ctx));
    read_grads(&net, got);
    for (int i = 0; i < N_INPUTS; i++)
        CHECK_MSG(memcmp(got[i], want[i], (size_t)te_tensor_numel(net.in[i]) * sizeof(double)) == 0,
                  "after allocation %ld: gradient %d", n, i);
    drop(out);
    te_group_release(group);
    network_close(&net);
    failing_context_close(ctx, &f, n);
    return !reached;
}

static void test_failing_backward(void)
{
    static double want[N_INPUTS][256];
    long n = 0;
    CHECK(backward_with_failure(LONG_MAX, want));
    while (!backward_with_failure(n, want) && n < 20000) n++;
    CHECK_MSG(n > 20 && n < 20000, "%ld allocations in backward", n);
}

/* Memory that runs out while a group is planned says nothing about the group. */
static void test_failing_plan(void)
{
    for (long n = 0; n < 1000; n++) {
        failing_memory f;
        te_context *ctx = failing_context_open(&f, 1);
        network net;
        te_tensor *out[2] = {NULL, NULL};
        CHECK(ctx && network_open(&net, ctx, TE_F32));
        te_group *group = make_group(ctx);
        f.countdown = n;
        te_status status = te_group_run(group, net.in, out);
        bool reached = failing_memory_stop(&f);
        CHECK_MSG(status == TE_OK || status == TE_ERROR_MEMORY, "allocation %ld: %s", n, te_context_error(ctx));
        drop(out);
        CHECK_MSG(te_group_run(group, net.in, out) == TE_OK, "after allocation %ld: %s", n, te_context_error(ctx));
        drop(out);
        te_group_release(group);
        network_close(&net);
        failing_context_close(ctx, &f, n);
        if (!reached) return;
    }
    CHECK(false);
}

static void test_failing_allocations(bool (*take_step)(network *))
{
    long n = 0;
    while (!step_with_failure(n, take_step) && n < 20000) n++;
    CHECK_MSG(n > 20 && n < 20000, "%ld allocations in a step", n);
}

int main(void)
{
    test_failing_plan();
    test_failing_backward();
    test_failing_allocations(block_step);
    test_failing_allocations(rows_step);
    test_failing_allocations(groups_step);
    return TEST_END();
}
