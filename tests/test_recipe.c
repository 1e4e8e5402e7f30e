/* test_recipe.c - products under recipes without Lua: a step of a group with a weight of either kind, in which
 * every allocation fails in turn: a message, nothing leaked, and the next step works. Their numbers are
 * checked in spec/recipe. */
#include "failing_context.h"
#include "test.h"

#include "core/autograd.h"
#include "core/fuser/group.h"
#include "core/quantized_parameter.h"

enum { ROWS = 20, WIDTH = 24, HIDDEN = 40 };

/* Quantizers of the kinds that differ in what they need: a history; blocks; two levels with
 * transform and random bits. */
static const te_quantizer delayed = {
    .element = TE_E4M3, .needs_history = true, .has_columnwise = true, .transposed = true};
static const te_quantizer blocks = {
    .element = TE_E4M3, .scale = TE_SCALE_E8M0, .block_rows = 1, .block_cols = 32, .has_columnwise = true};
static const te_quantizer two_levels = {.element = TE_E2M1, .scale = TE_SCALE_E4M3, .block_rows = 1, .block_cols = 16,
                                        .has_columnwise = true, .transposed = true, .hadamard = true,
                                        .stochastic = true,
                                        .scale_max = 448};

static te_product_recipe *make_recipe(te_context *ctx, const te_quantizer *q)
{
    te_product_recipe recipe = {.history_length = {3, 3, 3}};
    for (int r = 0; r < TE_ROLE_COUNT; r++) {
        recipe.quantized[r] = true;
        recipe.quantizers[r] = *q;
        if (r == TE_ROLE_WEIGHT) recipe.quantizers[r].hadamard = recipe.quantizers[r].stochastic = false;
        if (r == TE_ROLE_INPUT) recipe.quantizers[r].stochastic = false;
    }
    return te_product_recipe_new(ctx, &recipe);
}

typedef struct network {
    te_context *ctx;
    te_recipe_state *states[2];
    te_tensor *in[3]; /* x, weight, weight stored quantized */
} network;

static te_tensor *filled(te_context *ctx, int64_t rows, int64_t cols, uint64_t seed)
{
    double values[HIDDEN * WIDTH];
    int64_t shape[] = {rows, cols};
    te_tensor *t = te_tensor_empty(ctx, TE_F32, 2, shape);
    for (int64_t i = 0; i < rows * cols; i++) values[i] = test_uniform(&seed, -1, 1);
    if (t && te_tensor_write(t, TE_F64, values) == TE_OK) return t;
    te_tensor_release(t);
    return NULL;
}

static bool network_open(network *net, te_context *ctx, const te_quantizer *q)
{
    te_product_recipe *recipe = make_recipe(ctx, q);
    *net = (network){.ctx = ctx};
    bool ok = recipe != NULL;
    for (int i = 0; i < 2 && ok; i++) {
        net->states[i] = te_recipe_state_new(ctx);
        ok = net->states[i] && te_recipe_state_use(net->states[i], recipe) == TE_OK;
    }
    te_product_recipe_release(recipe);
    if (ok) net->in[0] = filled(ctx, ROWS, WIDTH, 1);
    if (ok) net->in[1] = filled(ctx, HIDDEN, WIDTH, 2);
    te_tensor *source = ok ? filled(ctx, WIDTH, HIDDEN, 3) : NULL;
    if (source) net->in[2] = te_quantized_parameter_new(source, net->states[1], true);
    te_tensor_release(source);
    for (int i = 0; i < 3 && ok; i++) ok = net->in[i] && te_tensor_set_requires_grad(net->in[i], true) == TE_OK;
    return ok;
}

static void network_close(network *net)
{
    for (int i = 0; i < 3; i++) te_tensor_release(net->in[i]);
    for (int i = 0; i < 2; i++) te_recipe_state_release(net->states[i]);
}

static int add(te_context *ctx, te_group *group, const char *name, int x, int weight, te_recipe_state *state,
               bool cached)
{
    te_arg args[TE_OP_MAX_INPUTS + TE_OP_MAX_ATTRS] = {{.kind = TE_ARG_ABSENT}};
    const te_op *op = te_op_find(ctx, name);
    te_group_call call = {.op = op, .values = {x, weight, TE_NO_VALUE, TE_NO_VALUE, TE_NO_VALUE, TE_NO_VALUE},
                          .args = args, .n_args = op ? op->n_params : 0, .recipe_state = state,
                          .cache_quantized = cached};
    int result;
    return x != TE_NO_VALUE && op && te_group_op(group, &call, &result) == TE_OK ? result : TE_NO_VALUE;
}

/* x W1^T, GELU that saves a byte a value, W2 stored quantized. */
static te_group *make_group(const network *net)
{
    te_group *group = te_group_new(net->ctx);
    if (!group) return NULL;
    int x = te_group_input(group, false), w1 = te_group_input(group, true), w2 = te_group_input(group, true);
    int h = w2 == TE_NO_VALUE ? TE_NO_VALUE : add(net->ctx, group, "linear", x, w1, net->states[0], false);
    h = add(net->ctx, group, "gelu", h, TE_NO_VALUE, NULL, true);
    h = add(net->ctx, group, "linear", h, w2, net->states[1], false);
    if (h != TE_NO_VALUE && te_group_output(group, h) == TE_OK) return group;
    te_group_release(group);
    return NULL;
}

static bool step(network *net)
{
    te_tensor *y = NULL;
    te_group *group = make_group(net);
    net->ctx->recipe_enabled = true;
    bool ok = group && te_group_run(group, net->in, &y) == TE_OK;
    te_tensor *dy = ok ? filled(net->ctx, ROWS, WIDTH, 4) : NULL;
    ok = dy && te_backward(y, dy, false) == TE_OK;
    for (int i = 0; i < 2 && ok; i++)
        for (int r = 0; r < TE_ROLE_COUNT && ok; r++)
            ok = te_recipe_states_update(
                     net->ctx, &(te_recipe_update){net->states[i], (te_role)r, TE_AMAX_MAX, 0, NULL}, 1) == TE_OK;
    te_tensor *master = ok ? filled(net->ctx, WIDTH, HIDDEN, 5) : NULL;
    ok = master && te_quantized_parameter_store(net->in[2], master) == TE_OK;
    net->ctx->recipe_enabled = false;
    te_tensor_release(master);
    te_tensor_release(dy);
    te_tensor_release(y);
    te_group_release(group);
    return ok;
}

/* Returns whether the step got by without reaching allocation n. */
static bool step_with_failure(const te_quantizer *q, long n)
{
    failing_memory f;
    te_context *ctx = failing_context_open(&f, 1);
    network net;
    bool opened = ctx && network_open(&net, ctx, q);
    CHECK_MSG(opened, "%s", ctx ? te_context_error(ctx) : "no context");
    if (!opened) return true;
    f.countdown = n;
    bool ok = step(&net), reached = failing_memory_stop(&f);
    CHECK_MSG(ok || strlen(te_context_error(ctx)) > 0, "allocation %ld failed without a message", n);
    CHECK_MSG(step(&net), "after allocation %ld failed: %s", n, te_context_error(ctx));
    network_close(&net);
    failing_context_close(ctx, &f, n);
    return !reached;
}

static void test_failing_allocations(const te_quantizer *q)
{
    long n = 0;
    while (!step_with_failure(q, n) && n < 20000) n++;
    CHECK_MSG(n > 50 && n < 20000, "%ld allocations in a step", n);
}

/* Of a weight stored quantized the values are quantized. */
static void test_quantizing_stored(const te_quantizer *q)
{
    te_context *ctx = te_context_open(NULL);
    network net;
    CHECK_MSG(network_open(&net, ctx, q), "%s", te_context_error(ctx));
    te_tensor *values = te_tensor_dequantized(net.in[2]);
    te_quantize_options wanted = {.want = {true, true}, .scale = 2};
    te_quantized got, want;
    CHECK(te_quantize(net.in[2], &blocks, &wanted, &got) == TE_OK);
    CHECK(te_quantize(values, &blocks, &wanted, &want) == TE_OK);
    for (int s = 0; s < 2; s++) {
        te_quantized_part *a = &got.side[s], *b = &want.side[s];
        size_t bytes = (size_t)te_tensor_numel(a->data), factors = (size_t)te_tensor_numel(a->scale_inv);
        CHECK(memcmp(te_tensor_data(a->data), te_tensor_data(b->data), bytes) == 0);
        CHECK(memcmp(te_tensor_data(a->scale_inv), te_tensor_data(b->scale_inv), factors) == 0);
    }
    te_quantized_close(&got);
    te_quantized_close(&want);
    te_tensor_release(values);
    network_close(&net);
    te_context_release(ctx);
}

/* Quantizers whose operands could not meet. */
static void test_refusals(void)
{
    te_context *ctx = te_context_open(NULL);
    te_product_recipe *recipe = make_recipe(ctx, &two_levels), broken;
    CHECK(recipe != NULL);
    broken = *recipe;
    broken.quantizers[TE_ROLE_GRAD_OUTPUT].hadamard = false;
    CHECK(!te_product_recipe_new(ctx, &broken) && strstr(te_context_error(ctx), "hadamard"));
    broken.backward = TE_BACKWARD_DEQUANTIZED; /* backward then multiplies neither */
    te_product_recipe *fine = te_product_recipe_new(ctx, &broken);
    CHECK(fine != NULL);
    te_product_recipe_release(fine);
    te_product_recipe_release(recipe);
    te_context_release(ctx);
}

int main(void)
{
    test_failing_allocations(&delayed);
    test_failing_allocations(&blocks);
    test_failing_allocations(&two_levels);
    test_quantizing_stored(&delayed);
    test_quantizing_stored(&blocks);
    test_refusals();
    return TEST_END();
}
