/* test_engine.c - the engine without Lua: operations, gradients, the optimizer, and every allocation failing in turn;
 * test_engine_errors.c has what is refused. */
#include "failing_context.h"
#include "test.h"

#include "core/ops/ops.h"
#include "core/optim.h"
#include "tetrain/te.h"

#include <limits.h>

/* --- a small network ---------------------------------------------------------------------------------------------- */

enum { TOKENS = 6, WIDTH = 8, HIDDEN = 16, CLASSES = 5, N_PARAMS = 6 };

static const int64_t param_shapes[N_PARAMS][2] = {{WIDTH, 0},  {WIDTH, 0},        {HIDDEN, WIDTH},
                                                  {HIDDEN, 0}, {CLASSES, HIDDEN}, {CLASSES, 0}};

typedef struct network {
    te_context *ctx;
    te_tensor *params[N_PARAMS], *m[N_PARAMS], *v[N_PARAMS], *x, *targets;
} network;

static te_tensor *apply(te_context *ctx, const char *name, int n, te_tensor **in)
{
    const te_op *op = te_op_find(ctx, name);
    te_arg args[4] = {{.kind = TE_ARG_ABSENT}};
    te_tensor *out = NULL;
    for (int i = 0; i < n; i++) {
        if (!in[i]) return NULL;
        args[i] = (te_arg){.kind = TE_ARG_TENSOR, .as.tensor = in[i]};
    }
    if (op) te_op_run(ctx, op, args, n, &out, 1);
    return out;
}

static te_tensor *random_tensor(te_context *ctx, te_dtype dtype, int ndim, const int64_t *shape, uint64_t *state)
{
    te_tensor *t = te_tensor_empty(ctx, dtype, ndim, shape);
    double values[HIDDEN * HIDDEN];
    int64_t n = t ? te_tensor_numel(t) : 0;
    for (int64_t i = 0; i < n; i++) values[i] = test_uniform(state, -1, 1);
    if (t && te_tensor_write(t, TE_F64, values) != TE_OK) {
        te_tensor_release(t);
        return NULL;
    }
    return t;
}

static bool network_open(network *net, te_context *ctx, te_dtype dtype)
{
    uint64_t state = 42;
    memset(net, 0, sizeof *net);
    net->ctx = ctx;
    net->x = random_tensor(ctx, dtype, 2, (int64_t[]){TOKENS, WIDTH}, &state);
    net->targets = te_tensor_empty(ctx, TE_I64, 1, (int64_t[]){TOKENS});
    bool ok = net->x && net->targets && te_tensor_write(net->targets, TE_I64, (int64_t[]){0, 4, 2, 1, 3, 4}) == TE_OK;
    for (int i = 0; i < N_PARAMS && ok; i++) {
        int ndim = param_shapes[i][1] ? 2 : 1;
        net->params[i] = random_tensor(ctx, dtype, ndim, param_shapes[i], &state);
        net->m[i] = te_tensor_full(ctx, dtype, ndim, param_shapes[i], 0);
        net->v[i] = te_tensor_full(ctx, dtype, ndim, param_shapes[i], 0);
        ok = net->params[i] && net->m[i] && net->v[i] && te_tensor_set_requires_grad(net->params[i], true) == TE_OK;
    }
    return ok;
}

static void network_close(network *net)
{
    for (int i = 0; i < N_PARAMS; i++) {
        te_tensor_release(net->params[i]);
        te_tensor_release(net->m[i]);
        te_tensor_release(net->v[i]);
    }
    te_tensor_release(net->x);
    te_tensor_release(net->targets);
}

/* The loss of LayerNorm, Linear, GELU, Linear, cross entropy; NULL on failure. */
static te_tensor *network_loss(network *net)
{
    te_tensor **p = net->params;
    te_tensor *h = apply(net->ctx, "layer_norm", 3, (te_tensor *[]){net->x, p[0], p[1]});
    te_tensor *a = apply(net->ctx, "linear", 3, (te_tensor *[]){h, p[2], p[3]});
    te_tensor *g = apply(net->ctx, "gelu", 1, (te_tensor *[]){a});
    te_tensor *logits = apply(net->ctx, "linear", 3, (te_tensor *[]){g, p[4], p[5]});
    te_tensor *loss = apply(net->ctx, "cross_entropy", 2, (te_tensor *[]){logits, net->targets});
    te_tensor_release(h);
    te_tensor_release(a);
    te_tensor_release(g);
    te_tensor_release(logits);
    return loss;
}

static bool network_step(network *net, int step)
{
    te_tensor *loss = network_loss(net), *grads[N_PARAMS];
    bool ok = loss && te_backward(loss, NULL, false) == TE_OK;
    te_tensor_release(loss);
    for (int i = 0; i < N_PARAMS; i++) grads[i] = te_tensor_grad(net->params[i]);
    te_adamw options = {
        .lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1, .step = step, .grad_scale = 1};
    te_optim_group group = {.n = N_PARAMS, .params = net->params, .grads = grads, .states = {net->m, net->v}};
    ok = ok && te_adamw_step(net->ctx, 1, &options, &group) == TE_OK;
    for (int i = 0; i < N_PARAMS; i++) te_tensor_set_grad(net->params[i], NULL);
    return ok;
}

/* --- gradients and the optimizer against plain arithmetic --------------------------------------------------------- */

static double loss_value(network *net)
{
    double value = NAN;
    te_tensor *loss = network_loss(net);
    if (loss) te_tensor_read(loss, TE_F64, &value);
    te_tensor_release(loss);
    return value;
}

static void test_gradients(void)
{
    te_context *ctx = te_context_open(NULL);
    network net;
    CHECK(network_open(&net, ctx, TE_F64));
    te_tensor *loss = network_loss(&net);
    CHECK_MSG(loss && te_backward(loss, NULL, false) == TE_OK, "%s", te_context_error(ctx));
    te_tensor_release(loss);
    te_context_set_grad_enabled(ctx, false);
    for (int i = 0; i < N_PARAMS; i++) {
        te_tensor *p = net.params[i], *grad = te_tensor_grad(p);
        int64_t n = te_tensor_numel(p);
        double values[HIDDEN * HIDDEN], derived[HIDDEN * HIDDEN];
        CHECK(grad && te_tensor_read(grad, TE_F64, derived) == TE_OK);
        te_tensor_read(p, TE_F64, values);
        for (int64_t k = 0; k < n; k += 3) {
            double at = values[k], h = 1e-5;
            values[k] = at + h;
            te_tensor_write(p, TE_F64, values);
            double up = loss_value(&net);
            values[k] = at - h;
            te_tensor_write(p, TE_F64, values);
            double down = loss_value(&net), measured = (up - down) / (2 * h);
            values[k] = at;
            te_tensor_write(p, TE_F64, values);
            CHECK_MSG(fabs(measured - derived[k]) < 1e-7 + 1e-5 * fabs(measured), "parameter %d[%d]: %g, measured %g",
                      i, (int)k, derived[k], measured);
        }
    }
    network_close(&net);
    te_context_release(ctx);
}

static void test_training_reduces_loss(te_dtype dtype)
{
    te_context *ctx = te_context_open(NULL);
    network net;
    CHECK(network_open(&net, ctx, dtype));
    double first = loss_value(&net);
    for (int step = 1; step <= 60; step++) CHECK_MSG(network_step(&net, step), "%s", te_context_error(ctx));
    double last = loss_value(&net);
    CHECK_MSG(last < 0.2 * first, "loss %g after %g", last, first);
    network_close(&net);
    te_context_release(ctx);
}

/* Second and later steps of AdamW against the formulas in double. */
static void test_adamw(void)
{
    te_context *ctx = te_context_open(NULL);
    int64_t n = 1000, shape[1] = {1000};
    static double p[1000], g[1000], m[1000], v[1000], got[1000];
    uint64_t state = 7;
    te_tensor *t[4];
    for (int k = 0; k < 4; k++) t[k] = te_tensor_full(ctx, TE_F32, 1, shape, 0);
    for (int64_t i = 0; i < n; i++) p[i] = (float)test_uniform(&state, -1, 1);
    te_tensor_write(t[0], TE_F64, p);
    for (int step = 1; step <= 5; step++) {
        for (int64_t i = 0; i < n; i++) g[i] = (float)test_uniform(&state, -1, 1);
        te_tensor_write(t[1], TE_F64, g);
        te_adamw o = {
            .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .step = step, .grad_scale = 0.5};
        te_optim_group group = {.n = 1, .params = &t[0], .grads = &t[1], .states = {&t[2], &t[3]}};
        CHECK(te_adamw_step(ctx, 1, &o, &group) == TE_OK);
        for (int64_t i = 0; i < n; i++) {
            double h = g[i] * 0.5;
            m[i] = 0.9 * m[i] + 0.1 * h;
            v[i] = 0.95 * v[i] + 0.05 * h * h;
            p[i] -= 1e-2 * (m[i] / (1 - pow(0.9, step)) / (sqrt(v[i] / (1 - pow(0.95, step))) + 1e-8) + 0.1 * p[i]);
        }
    }
    te_tensor_read(t[0], TE_F64, got);
    for (int64_t i = 0; i < n; i++)
        CHECK_MSG(fabs(got[i] - p[i]) < 1e-5, "element %d: %g, not %g", (int)i, got[i], p[i]);
    for (int k = 0; k < 4; k++) te_tensor_release(t[k]);
    te_context_release(ctx);
}

/* --- memory that runs out ----------------------------------------------------------------------------------------- */

/* Allocation n fails during a training step: a clean error, weights and moments as before, nothing leaked, and the next
 * step works. Returns whether the step got by without reaching allocation n. */
static bool step_with_failure(long n)
{
    failing_memory f;
    te_context *ctx = failing_context_open(&f, 2);
    network net;
    float before[N_PARAMS][HIDDEN * HIDDEN], after[HIDDEN * HIDDEN];
    CHECK(ctx && network_open(&net, ctx, TE_F32));
    for (int i = 0; i < N_PARAMS; i++) te_tensor_read(net.params[i], TE_F32, before[i]);
    f.countdown = n;
    bool ok = network_step(&net, 1);
    bool reached = failing_memory_stop(&f);
    if (!ok) {
        CHECK_MSG(strlen(te_context_error(ctx)) > 0, "allocation %ld failed without a message", n);
        for (int i = 0; i < N_PARAMS; i++) {
            te_tensor_read(net.params[i], TE_F32, after);
            CHECK_MSG(memcmp(after, before[i], (size_t)te_tensor_numel(net.params[i]) * sizeof *after) == 0,
                      "allocation %ld: weights changed", n);
        }
    }
    CHECK_MSG(network_step(&net, 1), "after allocation %ld failed: %s", n, te_context_error(ctx));
    network_close(&net);
    failing_context_close(ctx, &f, n);
    return !reached;
}

static void test_failing_allocations(void)
{
    long n = 0;
    while (!step_with_failure(n) && n < 20000) n++;
    CHECK_MSG(n > 50 && n < 20000, "%ld allocations in a step", n);
    failing_memory f = {.countdown = 0};
    for (long k = 0; k < 10000; k++) { /* opening */
        f = (failing_memory){.countdown = k};
        te_context_options options = {
            .struct_size = sizeof options, .realloc = failing_memory_realloc, .realloc_user = &f};
        te_context *ctx = te_context_open(&options);
        te_context_release(ctx);
        CHECK(f.live == 0);
        if (ctx) break;
    }
}

static bool same_values(te_tensor *t, const float *values)
{
    float got[HIDDEN * HIDDEN];
    return te_tensor_read(t, TE_F32, got) == TE_OK &&
           memcmp(got, values, (size_t)te_tensor_numel(t) * sizeof *got) == 0;
}

/* Allocation n fails in backward: a gradient is whole or not there, and the next pass over the graph finds nothing of
 * this one. Returns whether backward got by without reaching allocation n. */
static bool backward_with_failure(long n, float (*want)[HIDDEN * HIDDEN])
{
    failing_memory f;
    te_context *ctx = failing_context_open(&f, 1);
    network net;
    CHECK(ctx && network_open(&net, ctx, TE_F32));
    te_tensor *loss = network_loss(&net);
    CHECK(loss != NULL);
    f.countdown = n;
    te_status status = te_backward(loss, NULL, true);
    bool reached = failing_memory_stop(&f);
    for (int i = 0; i < N_PARAMS; i++) {
        te_tensor *grad = te_tensor_grad(net.params[i]);
        if (status == TE_OK && !reached) te_tensor_read(grad, TE_F32, want[i]);
        CHECK_MSG(!grad || same_values(grad, want[i]), "allocation %ld: gradient %d is none", n, i);
        te_tensor_set_grad(net.params[i], NULL);
    }
    CHECK_MSG(te_backward(loss, NULL, true) == TE_OK, "after allocation %ld failed: %s", n, te_context_error(ctx));
    for (int i = 0; i < N_PARAMS; i++)
        CHECK_MSG(same_values(te_tensor_grad(net.params[i]), want[i]), "after allocation %ld: gradient %d", n, i);
    te_tensor_release(loss);
    network_close(&net);
    failing_context_close(ctx, &f, n);
    return !reached;
}

static void test_failing_backward(void)
{
    float want[N_PARAMS][HIDDEN * HIDDEN];
    long n = 0;
    CHECK(backward_with_failure(LONG_MAX, want));
    while (!backward_with_failure(n, want) && n < 20000) n++;
    CHECK_MSG(n > 5 && n < 20000, "%ld allocations in backward", n);
}

/* No operation holds on to what it was given, or to itself: with nobody left all memory is back. */
static void test_operations_let_go(void)
{
    failing_memory f = {.countdown = LONG_MAX};
    te_context_options options = {
        .struct_size = sizeof options, .threads = 1, .realloc = failing_memory_realloc, .realloc_user = &f};
    const char *name = "";
    for (int i = 0; name; i++) {
        te_context *ctx = te_context_open(&options);
        const te_op *op = te_op_at(ctx, i);
        name = op ? te_op_signature(op) : NULL;
        for (int n = 1; op && n <= 3; n++) {
            te_arg args[3];
            te_tensor *out[3];
            for (int k = 0; k < n; k++) {
                args[k] =
                    (te_arg){.kind = TE_ARG_TENSOR, .as.tensor = te_tensor_full(ctx, TE_F32, 2, (int64_t[]){4, 4}, 1)};
                te_tensor_set_requires_grad(args[k].as.tensor, true);
            }
            te_op_run(ctx, op, args, n, out, 3);
            for (int k = 0; k < 3; k++) te_tensor_release(out[k]);
            for (int k = 0; k < n; k++) te_tensor_release(args[k].as.tensor);
        }
        te_context_release(ctx);
        CHECK_MSG(f.live == 0, "%s: %zu bytes", name ? name : "", f.live);
        f.live = 0;
    }
}

static void test_memory_limit(void)
{
    te_context_options options = {.struct_size = sizeof options, .tensor_memory_limit = 1 << 20};
    te_context *ctx = te_context_open(&options);
    te_tensor *big = te_tensor_empty(ctx, TE_F32, 1, (int64_t[]){1 << 20});
    CHECK(!big && strstr(te_context_error(ctx), "out of memory"));
    te_tensor *a = te_tensor_empty(ctx, TE_F32, 1, (int64_t[]){100000});
    te_tensor_release(a);
    te_tensor *b = te_tensor_empty(ctx, TE_F32, 1, (int64_t[]){200000}); /* fits once the cached block is let go */
    CHECK_MSG(b != NULL, "%s", te_context_error(ctx));
    te_memory_stats stats;
    CHECK(te_context_memory(ctx, "cpu", &stats) == TE_OK && stats.current >= 800000 && stats.reserved <= 1 << 20);
    te_tensor_release(b);
    te_context_release(ctx);
}

/* A graph of a million nodes is released without recursion. */
static void test_long_graph(void)
{
    te_context *ctx = te_context_open(NULL);
    te_tensor *x = te_tensor_full(ctx, TE_F32, 0, NULL, 1);
    te_tensor_set_requires_grad(x, true);
    te_tensor *y = te_tensor_retain(x);
    for (int i = 0; i < 200000; i++) {
        te_tensor *next = apply(ctx, "neg", 1, &y);
        te_tensor_release(y);
        y = next;
    }
    CHECK(y && te_backward(y, NULL, true) == TE_OK);
    float g = 0;
    te_tensor_read(te_tensor_grad(x), TE_F32, &g);
    CHECK(g == 1);
    te_tensor_release(y);
    te_tensor_release(x);
    te_context_release(ctx);
}

int main(void)
{
    test_gradients();
    test_training_reduces_loss(TE_F32);
    test_training_reduces_loss(TE_F64);
    test_adamw();
    test_memory_limit();
    test_operations_let_go();
    test_long_graph();
    test_failing_allocations();
    test_failing_backward();
    return TEST_END();
}
