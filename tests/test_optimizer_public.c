/* test_optimizer_public.c - AdamW with the functions of te.h alone: steps against the formula written down again,
 * clipping, parameters that skip steps, master copies, saving and restoring, mistakes, and every allocation failing
 * once. */
#include "failing_memory.h"
#include "test.h"

#include <tetrain/tetrain.h>

enum { N = 37, STEPS = 5 };

static te_tensor *filled(te_context *ctx, te_dtype dtype, int64_t n, uint64_t seed)
{
    te_tensor *t = te_tensor_empty(ctx, dtype, 1, &n);
    double     values[N];
    for (int64_t i = 0; i < n; i++) values[i] = test_uniform(&seed, -1, 1);
    if (t && te_tensor_write(t, TE_F64, values) != TE_OK) CHECK(!"written");
    return t;
}

static void give_grad(te_tensor *param, uint64_t seed)
{
    te_tensor *g = filled(te_tensor_context(param), te_tensor_dtype(param), te_tensor_numel(param), seed);
    CHECK(te_tensor_set_grad(param, g) == TE_OK);
    te_tensor_release(g);
}

typedef struct reference {
    double p[N], m[N], v[N];
    int    t;
} reference;

static void step(reference *r, const float *g, const te_adamw_options *o, double scale)
{
    r->t++;
    for (int i = 0; i < N; i++) {
        double d = g[i] * scale;
        r->m[i] = o->beta1 * r->m[i] + (1 - o->beta1) * d;
        r->v[i] = o->beta2 * r->v[i] + (1 - o->beta2) * d * d;
        double mean = r->m[i] / (1 - pow(o->beta1, r->t)), square = r->v[i] / (1 - pow(o->beta2, r->t));
        r->p[i] -= o->lr * (mean / (sqrt(square) + o->eps) + o->weight_decay * r->p[i]);
    }
}

static void check_values(te_tensor *t, const double *expected, double tolerance)
{
    double values[N], most = 0;
    CHECK(te_tensor_read(t, TE_F64, values) == TE_OK);
    for (int i = 0; i < N; i++) most = fmax(most, fabs(values[i] - expected[i]));
    CHECK_MSG(most <= tolerance, "off by %g", most);
}

/* The second parameter has a gradient in every other step alone. */
static void test_steps(te_context *ctx)
{
    te_adamw_options o = {.struct_size = sizeof o};
    te_adamw_defaults(&o);
    CHECK(o.lr == 1e-3 && o.beta2 == 0.999 && !o.master_weights);
    o.weight_decay = 0.1;
    te_tensor    *params[] = {filled(ctx, TE_F32, N, 1), filled(ctx, TE_F32, N, 2)};
    reference     r[2] = {{.t = 0}, {.t = 0}};
    te_optimizer *adamw = te_optimizer_adamw(ctx, params, 2, &o);
    CHECK_MSG(adamw != NULL, "%s", te_context_error(ctx));
    for (int k = 0; k < 2; k++) CHECK(te_tensor_read(params[k], TE_F64, r[k].p) == TE_OK);
    for (int s = 0; s < STEPS; s++) {
        double norm = -1, sum = 0;
        o.lr = 0.01 / (s + 1);
        CHECK(te_optimizer_set_lr(adamw, o.lr) == TE_OK);
        for (int k = 0; k < 2 - s % 2; k++) {
            give_grad(params[k], (uint64_t)(10 * s + k + 5));
            const float *g = te_tensor_data(te_tensor_grad(params[k]));
            for (int i = 0; i < N; i++) sum += (double)g[i] * g[i];
            step(&r[k], g, &o, 0.5);
        }
        CHECK(te_optimizer_grad_norm(adamw, &norm) == TE_OK && fabs(norm - sqrt(sum)) < 1e-5);
        CHECK(te_optimizer_step(adamw, 0.5) == TE_OK);
        CHECK(te_optimizer_zero_grad(adamw) == TE_OK);
        CHECK(!te_tensor_grad(params[0]) && !te_tensor_grad(params[1]));
    }
    CHECK(te_optimizer_steps(adamw, 0) == STEPS && te_optimizer_steps(adamw, 1) == (STEPS + 1) / 2 &&
          te_optimizer_steps(adamw, 2) == 0);
    for (int k = 0; k < 2; k++) {
        check_values(params[k], r[k].p, 1e-6);
        check_values(te_optimizer_state(adamw, k, "exp_avg"), r[k].m, 1e-6);
        check_values(te_optimizer_state(adamw, k, "exp_avg_sq"), r[k].v, 1e-6);
        CHECK(!te_optimizer_state(adamw, k, "master") && !te_optimizer_state(adamw, k, "x") &&
              !te_optimizer_state(adamw, 2, "exp_avg"));
    }
    te_tensor_release(params[0]); /* the optimizer keeps them */
    te_tensor_release(params[1]);
    CHECK(te_optimizer_step(adamw, 1) == TE_OK);
    te_optimizer_release(adamw);
}

/* A master that was not written to itself takes over what was written to its parameter. */
static void check_written_between(te_optimizer *adamw, te_tensor *param, bool restored)
{
    float value = 2, saved = 3, master = 0;
    te_tensor *kept = te_optimizer_state(adamw, 0, "master");
    if (restored) CHECK(te_tensor_write(kept, TE_F32, &saved) == TE_OK);
    CHECK(te_tensor_write(param, TE_F32, &value) == TE_OK && te_optimizer_step(adamw, 1) == TE_OK);
    CHECK(te_tensor_read(kept, TE_F32, &master) == TE_OK);
    CHECK_MSG(fabsf(master - (restored ? saved : value)) < 2e-4f, "%g", (double)master);
}

/* What is written to a parameter is in its master where that is saved, and lasts after the master was restored. */
static void check_written_and_restored(te_optimizer *adamw, te_tensor *param)
{
    float value = 5, saved = 3, master = 0;
    CHECK(te_tensor_write(param, TE_F32, &value) == TE_OK);
    te_tensor *kept = te_optimizer_state(adamw, 0, "master");
    CHECK(kept && te_tensor_read(kept, TE_F32, &master) == TE_OK && master == value);
    CHECK(te_tensor_write(kept, TE_F32, &saved) == TE_OK && te_optimizer_set_steps(adamw, 0, 7) == TE_OK);
    value = 2;
    CHECK(te_tensor_write(param, TE_F32, &value) == TE_OK && te_optimizer_step(adamw, 1) == TE_OK);
    CHECK(te_tensor_read(kept, TE_F32, &master) == TE_OK);
    CHECK_MSG(fabsf(master - value) < 2e-4f, "%g", (double)master);
}

/* Steps of 1e-4 are lost in bfloat16 and not in a float32 copy, from which the rounding comes. */
static void test_masters(te_context *ctx)
{
    te_adamw_options o = {.struct_size = sizeof o};
    te_adamw_defaults(&o);
    o.lr = 1e-4;
    o.weight_decay = 0;
    o.master_weights = true;
    te_tensor *param = te_tensor_full(ctx, TE_BF16, 1, (int64_t[]){1}, 1),
              *g = te_tensor_full(ctx, TE_BF16, 1, (int64_t[]){1}, 1);
    te_optimizer *adamw = te_optimizer_adamw(ctx, &param, 1, &o);
    CHECK(te_tensor_set_grad(param, g) == TE_OK);
    for (int s = 0; s < 100; s++) CHECK(te_optimizer_step(adamw, 1) == TE_OK);
    float master = 0, rounded = 0;
    CHECK(te_tensor_read(te_optimizer_state(adamw, 0, "master"), TE_F32, &master) == TE_OK &&
          fabsf(master - 0.99f) < 1e-5f);
    CHECK(te_tensor_read(param, TE_F32, &rounded) == TE_OK && fabsf(rounded - master) <= 0x1p-9f && rounded != 1);
    check_written_between(adamw, param, false);
    check_written_between(adamw, param, true);
    check_written_and_restored(adamw, param);
    te_optimizer_release(adamw);
    adamw = te_optimizer_adamw(ctx, &param, 1, &o);
    check_written_between(adamw, param, false); /* before the first step, too */
    te_tensor_release(param);
    te_tensor_release(g);
    te_optimizer_release(adamw);
}

/* Gradients in a main_grad: float32, of parameters of 16 bits too. */
static void test_main_grad(te_context *ctx)
{
    te_tensor *params[] = {filled(ctx, TE_BF16, N, 3), filled(ctx, TE_BF16, N, 3)}, *main = filled(ctx, TE_F32, N, 4);
    te_tensor *zeros = te_tensor_full(ctx, TE_F32, 1, (int64_t[]){N}, 0);
    te_optimizer *first = te_optimizer_adamw(ctx, params, 1, NULL),
                 *second = te_optimizer_adamw(ctx, params + 1, 1, NULL);
    uint16_t values[2][N];
    double g[N], norms[2];
    give_grad(params[1], 4);
    CHECK(te_tensor_read(te_tensor_grad(params[1]), TE_F64, g) == TE_OK);
    CHECK(te_tensor_write(main, TE_F64, g) == TE_OK && te_tensor_set_main_grad(params[0], main) == TE_OK);
    CHECK(te_optimizer_grad_norm(first, norms) == TE_OK && te_optimizer_grad_norm(second, norms + 1) == TE_OK);
    CHECK(norms[0] > 0 && norms[0] == norms[1]);
    for (int s = 0; s < 2; s++) CHECK(te_optimizer_step(first, 1) == TE_OK && te_optimizer_step(second, 1) == TE_OK);
    CHECK(te_optimizer_steps(first, 0) == 2);
    for (int k = 0; k < 2; k++) CHECK(te_tensor_read(params[k], TE_BF16, values[k]) == TE_OK);
    CHECK(memcmp(values[0], values[1], sizeof values[0]) == 0);
    CHECK(te_optimizer_zero_grad(first) == TE_OK);
    CHECK(te_tensor_data(te_tensor_main_grad(params[0])) == te_tensor_data(main));
    CHECK(memcmp(te_tensor_data(main), te_tensor_data(zeros), N * sizeof(float)) == 0);
    te_tensor *all[] = {params[0], params[1], main, zeros};
    for (int i = 0; i < 4; i++) te_tensor_release(all[i]);
    te_optimizer_release(first);
    te_optimizer_release(second);
}

/* An optimizer that is given another one's state goes on with the same bits. */
static void test_restore(te_context *ctx)
{
    te_tensor    *params[] = {filled(ctx, TE_F32, N, 3), filled(ctx, TE_F32, N, 3)};
    te_optimizer *first = te_optimizer_adamw(ctx, params, 1, NULL),
                 *second = te_optimizer_adamw(ctx, params + 1, 1, NULL);
    float         values[N];
    for (int s = 0; s < 6; s++) {
        if (s == 3) { /* from here on the second one */
            const char *names[] = {"exp_avg", "exp_avg_sq"};
            for (int k = 0; k < 2; k++) {
                CHECK(te_tensor_read(te_optimizer_state(first, 0, names[k]), TE_F32, values) == TE_OK);
                CHECK(te_tensor_write(te_optimizer_state(second, 0, names[k]), TE_F32, values) == TE_OK);
            }
            CHECK(te_optimizer_set_steps(second, 0, te_optimizer_steps(first, 0)) == TE_OK);
            CHECK(te_tensor_read(params[0], TE_F32, values) == TE_OK &&
                  te_tensor_write(params[1], TE_F32, values) == TE_OK);
        }
        for (int k = 0; k < 2; k++) give_grad(params[k], (uint64_t)s + 50);
        CHECK(te_optimizer_step(first, 1) == TE_OK && (s < 3 || te_optimizer_step(second, 1) == TE_OK));
    }
    CHECK(memcmp(te_tensor_data(params[0]), te_tensor_data(params[1]), sizeof values) == 0);
    for (int k = 0; k < 2; k++) te_tensor_release(params[k]);
    te_optimizer_release(first);
    te_optimizer_release(second);
}

/* Steps of a script and of the host change the same values to the same bits. */
static void test_script(void)
{
    static const char code[] =
        "local te = require 'te' p, g = p, g p.grad = g local o = te.optim.AdamW({p}, {lr = 0.01})\n"
        "for i = 1, 3 do p.grad = g o:step {grad_scale = 0.5} end";
    tetrain         *rt = tetrain_open(NULL);
    te_context      *ctx = tetrain_context(rt);
    te_tensor       *p[] = {filled(ctx, TE_F32, N, 8), filled(ctx, TE_F32, N, 8)}, *g = filled(ctx, TE_F32, N, 9);
    te_adamw_options o = {.struct_size = sizeof o};
    te_adamw_defaults(&o);
    o.lr = 0.01;
    CHECK(tetrain_set_tensor(rt, "p", p[0]) == TETRAIN_OK && tetrain_set_tensor(rt, "g", g) == TETRAIN_OK);
    CHECK_MSG(tetrain_run_string(rt, code, sizeof code - 1, "=t") == TETRAIN_OK, "%s", tetrain_error(rt));
    te_optimizer *adamw = te_optimizer_adamw(ctx, p + 1, 1, &o);
    CHECK(te_tensor_set_grad(p[1], g) == TE_OK);
    for (int s = 0; s < 3; s++) CHECK(te_optimizer_step(adamw, 0.5) == TE_OK);
    CHECK(memcmp(te_tensor_data(p[0]), te_tensor_data(p[1]), N * sizeof(float)) == 0);
    te_tensor *all[] = {p[0], p[1], g};
    for (int i = 0; i < 3; i++) te_tensor_release(all[i]);
    te_optimizer_release(adamw);
    tetrain_close(rt);
}

#define CHECK_REFUSED(call, text)                                                                               \
    do {                                                                                                        \
        CHECK_MSG(!(call), "%s is no error", #call);                                                            \
        CHECK_MSG(strstr(te_context_error(ctx), text), "\"%s\" lacks \"%s\"", te_context_error(ctx), text);     \
    } while (0)

static void test_mistakes(te_context *ctx)
{
    te_tensor *p = filled(ctx, TE_F32, N, 3), *whole = te_tensor_full(ctx, TE_I64, 1, (int64_t[]){2}, 1),
              *twice[] = {p, p};
    te_adamw_options o = {.struct_size = sizeof o}, none = {.lr = 1};
    te_adamw_defaults(&o);
    CHECK(!te_optimizer_adamw(NULL, &p, 1, NULL));
    CHECK_REFUSED(te_optimizer_adamw(ctx, NULL, 1, NULL), "1 parameters at NULL");
    CHECK_REFUSED(te_optimizer_adamw(ctx, &p, 0, NULL), "0 parameters");
    CHECK_REFUSED(te_optimizer_adamw(ctx, &whole, 1, NULL), "parameter 0 is int64");
    CHECK_REFUSED(te_optimizer_adamw(ctx, twice, 2, NULL), "parameter 1 came before");
    CHECK_REFUSED(te_optimizer_adamw(ctx, (te_tensor *[]){NULL}, 1, NULL), "parameter 0 is NULL");
    CHECK_REFUSED(te_optimizer_adamw(ctx, &p, 1, &none), "struct_size: 0");
    te_tensor *grid = te_tensor_full(ctx, TE_F32, 2, (int64_t[]){2, 3}, 1), *across = NULL;
    te_arg turn[] = {{.kind = TE_ARG_TENSOR, .as.tensor = grid}, {.kind = TE_ARG_NUMBER, .as.number = 0},
                     {.kind = TE_ARG_NUMBER, .as.number = 1}};
    bool recorded = te_context_set_grad_enabled(ctx, false);
    CHECK(te_op_run(ctx, te_op_find(ctx, "transpose"), turn, 3, &across, 1) == TE_OK);
    te_context_set_grad_enabled(ctx, recorded);
    CHECK_REFUSED(te_optimizer_adamw(ctx, &across, 1, NULL), "parameter 0 is not contiguous");
    te_tensor_release(grid);
    te_tensor_release(across);
    o.lr = NAN;
    CHECK_REFUSED(te_optimizer_adamw(ctx, &p, 1, &o), "lr nan");
    o.lr = 1;
    o.beta2 = 1;
    CHECK_REFUSED(te_optimizer_adamw(ctx, &p, 1, &o), "beta2 1");
    te_optimizer *adamw = te_optimizer_adamw(ctx, &p, 1, NULL);
    CHECK_REFUSED(te_optimizer_set_lr(adamw, -1) == TE_OK, "-1");
    CHECK_REFUSED(te_optimizer_set_steps(adamw, 1, 1) == TE_OK, "parameter 1 of 1");
    CHECK_REFUSED(te_optimizer_grad_norm(adamw, NULL) == TE_OK, "NULL");
    give_grad(p, 3);
    CHECK_REFUSED(te_optimizer_step(adamw, NAN) == TE_OK, "grad_scale is NaN");
    CHECK(te_tensor_set_grad(p, NULL) == TE_OK && te_optimizer_steps(adamw, 0) == 0);
    double norm = -1;
    CHECK(te_optimizer_grad_norm(adamw, &norm) == TE_OK && norm == 0);
    CHECK(te_optimizer_step(NULL, 1) == TE_ERROR_ARGUMENT && te_optimizer_set_lr(NULL, 1) == TE_ERROR_ARGUMENT);
    CHECK(te_optimizer_state(adamw, 0, NULL) == NULL && te_optimizer_steps(NULL, 0) == 0);
    CHECK(te_optimizer_zero_grad(NULL) == TE_ERROR_ARGUMENT);
    te_optimizer_release(NULL);
    te_optimizer_release(adamw);
    te_tensor_release(p);
    te_tensor_release(whole);
}

/* The parameters are as they were when a step failed. */
static bool train_under(failing_memory *memory)
{
    te_context_options options = {
        .struct_size = sizeof options, .threads = 1, .realloc = failing_memory_realloc, .realloc_user = memory};
    te_context *ctx = te_context_open(&options);
    if (!ctx) return false;
    float         numbers[] = {1, 2}, grads[] = {1, 1};
    te_tensor    *p = te_tensor_from_data(ctx, numbers, TE_F32, 1, (int64_t[]){2}, NULL, NULL);
    te_tensor    *g = te_tensor_from_data(ctx, grads, TE_F32, 1, (int64_t[]){2}, NULL, NULL);
    te_optimizer *adamw = p ? te_optimizer_adamw(ctx, &p, 1, NULL) : NULL;
    double        norm;
    bool ready = g && adamw && te_tensor_set_grad(p, g) == TE_OK && te_optimizer_grad_norm(adamw, &norm) == TE_OK;
    bool done = ready && te_optimizer_step(adamw, 1) == TE_OK;
    CHECK(done == (numbers[0] != 1) && done == (adamw && te_optimizer_steps(adamw, 0) == 1));
    te_optimizer_release(adamw);
    te_context_release(ctx); /* the tensors keep it */
    te_tensor_release(p);
    te_tensor_release(g);
    return done;
}

/* The same where a master takes over what was written, and gradients lie across. */
static bool train_master_under(failing_memory *memory)
{
    te_context_options options = {
        .struct_size = sizeof options, .threads = 1, .realloc = failing_memory_realloc, .realloc_user = memory};
    te_context *ctx = te_context_open(&options);
    if (!ctx) return false;
    enum { ONE = 0x3f80, TWO = 0x4000 };
    uint16_t  numbers[] = {ONE, ONE, ONE, ONE}, grads[] = {ONE, TWO, TWO, ONE};
    int64_t   shape[] = {2, 2};
    te_adamw_options o = {.struct_size = sizeof o};
    te_adamw_defaults(&o);
    o.master_weights = true;
    o.lr = 0.125;
    te_tensor *p = te_tensor_from_data(ctx, numbers, TE_BF16, 2, shape, NULL, NULL), *across = NULL;
    te_tensor *g = te_tensor_from_data(ctx, grads, TE_BF16, 2, shape, NULL, NULL);
    te_arg turn[] = {{.kind = TE_ARG_TENSOR, .as.tensor = g}, {.kind = TE_ARG_NUMBER, .as.number = 0},
                     {.kind = TE_ARG_NUMBER, .as.number = 1}};
    te_optimizer *adamw = p ? te_optimizer_adamw(ctx, &p, 1, &o) : NULL;
    bool ready = g && adamw && te_op_run(ctx, te_op_find(ctx, "transpose"), turn, 3, &across, 1) == TE_OK &&
                 te_tensor_set_grad(p, across) == TE_OK;
    for (int i = 0; i < 4; i++) numbers[i] = TWO;
    te_tensor_written(p);
    bool done = ready && te_optimizer_step(adamw, 1) == TE_OK;
    CHECK(done == (numbers[0] != TWO) && (!done || numbers[0] > ONE));
    te_optimizer_release(adamw);
    te_context_release(ctx);
    te_tensor_release(p);
    te_tensor_release(g);
    te_tensor_release(across);
    return done;
}

static void test_failing_allocations(bool train(failing_memory *))
{
    bool done = false;
    long n = 0;
    for (; !done && n < 5000; n++) {
        failing_memory memory = {.countdown = n};
        done = train(&memory);
        CHECK_MSG(memory.live == 0, "allocation %ld: %zu bytes leaked", n, memory.live);
    }
    CHECK_MSG(done && n > 10, "%ld allocations", n);
}

int main(void)
{
    te_context *ctx = te_context_open(NULL);
    test_steps(ctx);
    test_masters(ctx);
    test_main_grad(ctx);
    test_restore(ctx);
    test_script();
    test_mistakes(ctx);
    te_context_release(ctx);
    test_failing_allocations(train_under);
    test_failing_allocations(train_master_under);
    return TEST_END();
}
