/* test_op_define.c - operations defined at run time: what they compute, how long they live, every allocation failing in
 * turn, and texts that are no declaration.
 */
#include "test.h"

#include "core/op.h"
#include "tetrain/te.h"

enum { N = 7 };

static const te_op_def cube = {
    .signature = "cube(x, w = 1; s: number = 2)", .flags = TE_OP_FLOAT, .formula = "y = s * w * x * x * x"};

typedef struct counting {
    long countdown; /* fails when it reaches 0; negative: never */
    size_t live;
} counting;

static void *counting_realloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    counting *c = user;
    if (new_size == 0) {
        c->live -= old_size;
        free(ptr);
        return NULL;
    }
    if (c->countdown >= 0 && c->countdown-- == 0) return NULL;
    void *p = realloc(ptr, new_size);
    if (p) c->live += new_size - (ptr ? old_size : 0);
    return p;
}

static te_context *open_counting(counting *c)
{
    te_context_options options = {
        .struct_size = sizeof options, .threads = 1, .realloc = counting_realloc, .realloc_user = c};
    return te_context_open(&options);
}

static te_tensor *one_to_n(te_context *ctx)
{
    double values[N];
    for (int i = 0; i < N; i++) values[i] = i + 1;
    te_tensor *x = te_tensor_empty(ctx, TE_F64, 1, (int64_t[]){N});
    if (x && te_tensor_write(x, TE_F64, values) == TE_OK && te_tensor_set_requires_grad(x, true) == TE_OK) return x;
    te_tensor_release(x);
    return NULL;
}

static te_tensor *run(te_context *ctx, const te_op *op, te_tensor *x)
{
    te_tensor *y = NULL;
    if (op && x) te_op_run(ctx, op, &(te_arg){.kind = TE_ARG_TENSOR, .as.tensor = x}, 1, &y, 1);
    return y;
}

/* Forward, then the maker lets go, then backward. */
static bool whole_life(te_context *ctx, double *values, double *grad)
{
    te_tensor *x = one_to_n(ctx), *ones = te_tensor_full(ctx, TE_F64, 1, (int64_t[]){N}, 1);
    const te_op *op = te_op_define(ctx, &cube);
    te_tensor *y = run(ctx, op, x);
    te_op_release(op);
    bool ok = y && ones && te_tensor_read(y, TE_F64, values) == TE_OK && te_backward(y, ones, false) == TE_OK &&
              te_tensor_read(te_tensor_grad(x), TE_F64, grad) == TE_OK;
    te_tensor_release(y);
    te_tensor_release(ones);
    te_tensor_release(x);
    return ok;
}

static void test_values(void)
{
    counting c = {.countdown = -1};
    te_context *ctx = open_counting(&c);
    double values[N], grad[N];
    CHECK_MSG(whole_life(ctx, values, grad), "%s", te_context_error(ctx));
    for (int i = 0; i < N; i++) {
        double x = i + 1;
        CHECK(values[i] == 2 * x * x * x);
        CHECK(fabs(grad[i] - 6 * x * x) < 1e-12 * x * x);
    }
    te_context_release(ctx);
    CHECK(c.live == 0);
}

/* Many operations one after the other need no more memory than a few: their programs go with them. */
static void test_many(void)
{
    counting c = {.countdown = -1};
    te_context *ctx = open_counting(&c);
    double values[N], grad[N];
    size_t settled = 0;
    for (int round = 0; round < 400; round++) {
        CHECK(whole_life(ctx, values, grad));
        if (round == 100) settled = c.live;
    }
    CHECK_MSG(c.live == settled, "%zu bytes after 100 operations, %zu after 400", settled, c.live);
    te_context_release(ctx);
    CHECK(c.live == 0);
}

/* Several at once, released in another order: the table of programs stays whole. */
static void test_several(void)
{
    enum { COUNT = 60 };
    te_context *ctx = te_context_open(NULL);
    const te_op *ops[COUNT];
    te_tensor *x = one_to_n(ctx);
    for (int i = 0; i < COUNT; i++) {
        char formula[40];
        snprintf(formula, sizeof formula, "y = x + %d", i);
        ops[i] = te_op_define(ctx, &(te_op_def){.signature = "shift(x)", .formula = formula});
        te_tensor_release(run(ctx, ops[i], x));
    }
    for (int k = 0; k < COUNT; k++) {
        int gone = k * 37 % COUNT;
        te_op_release(ops[gone]);
        ops[gone] = NULL;
        for (int i = 0; i < COUNT; i++) {
            double values[N] = {0};
            te_tensor *y = ops[i] ? run(ctx, ops[i], x) : NULL;
            if (y) te_tensor_read(y, TE_F64, values);
            CHECK(!ops[i] || values[N - 1] == N + i);
            te_tensor_release(y);
        }
    }
    te_tensor_release(x);
    te_context_release(ctx);
}

/* The last holder may be the operation itself. */
static void test_outlives_context(void)
{
    counting c = {.countdown = -1};
    te_context *ctx = open_counting(&c);
    const te_op *op = te_op_define(ctx, &cube);
    te_op_retain(op);
    te_context_release(ctx);
    CHECK(strcmp(te_op_name(op), "cube") == 0 && c.live > 0);
    te_op_release(op);
    te_op_release(op);
    CHECK(c.live == 0);
    te_op_release(NULL);
}

static void test_failing_allocations(void)
{
    long n = 0;
    for (bool reached = true; reached && n < 5000; n++) {
        counting c = {.countdown = -1};
        te_context *ctx = open_counting(&c);
        double values[N], grad[N];
        c.countdown = n;
        bool ok = whole_life(ctx, values, grad);
        reached = c.countdown < 0;
        c.countdown = -1;
        CHECK_MSG(ok || strlen(te_context_error(ctx)) > 0, "allocation %ld failed without a message", n);
        CHECK_MSG(whole_life(ctx, values, grad), "after allocation %ld failed: %s", n, te_context_error(ctx));
        te_context_release(ctx);
        CHECK_MSG(c.live == 0, "allocation %ld: %zu bytes leaked", n, c.live);
    }
    CHECK_MSG(n > 10 && n < 5000, "%ld allocations", n);
}

static void test_texts(void)
{
    static const struct {
        te_op_def def;
        const char *message;
    } cases[] = {
        {{.signature = "f(x)"}, "with a formula"},
        {{.signature = "f(x)", .formula = "y = x", .flags = TE_OP_INPLACE}, "with a formula"},
        {{.signature = "", .formula = "y = x"}, "is no signature"},
        {{.signature = "f", .formula = "y = x"}, "is no signature"},
        {{.signature = "f(x) g", .formula = "y = x"}, "is no signature"},
        {{.signature = "(x)", .formula = "y = x"}, "has no name"},
        {{.signature = "f()", .formula = "y = 1"}, "0 inputs and 1 results"},
        {{.signature = "f(x, x)", .formula = "y = x"}, "two parameters named x"},
        {{.signature = "f(x, 3)", .formula = "y = x"}, "parameter 2 has no name"},
        {{.signature = "f(x, s: shape)", .formula = "y = x"}, "parameter s must be a tensor, number, int or bool"},
        {{.signature = "f(x, s: a|b)", .formula = "y = x"}, "parameter s must be"},
        {{.signature = "f(a, b, c, d, e, g, h)", .formula = "y = a"}, "7 inputs"},
        {{.signature = "f(a_name_that_is_longer_than_it_may_be)", .formula = "y = 1"}, "more than 23 characters"},
        {{.signature = "f(x)", .formula = "y = z"}, "unknown name"},
        {{.signature = "f(x)", .formula = "y = x +"}, "expected a number"},
        {{.signature = "f(x)", .formula = "z = x"}, "y"},
        {{.signature = "f(x)", .formula = "y = x", .outputs = "a b c d e g h i j k l m"}, "12 results"},
    };
    counting c = {.countdown = -1};
    te_context *ctx = open_counting(&c);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const te_op *op = te_op_define(ctx, &cases[i].def);
        CHECK_MSG(!op && strstr(te_context_error(ctx), cases[i].message), "%s: %s", cases[i].def.signature,
                  op ? "accepted" : te_context_error(ctx));
        te_op_release(op);
    }
    te_context_release(ctx);
    CHECK(c.live == 0);
}

int main(void)
{
    test_values();
    test_many();
    test_several();
    test_outlives_context();
    test_failing_allocations();
    test_texts();
    return TEST_END();
}
