/* test_float_mode.c - a host that has set another floating-point mode: results are those of the default one, with any
 * number of threads, no exception ends the process, and the host finds its mode as it was. */
#define _GNU_SOURCE
#include "kernels/float_mode.h"
#include "test.h"

#include "tetrain/recipe.h"
#include "tetrain/tetrain.h"

#include <fenv.h>

enum { WIDE = 300000, RESULTS = 3 };

#if defined(__x86_64__)
#define FLUSH UINT64_C(0x8040) /* results and operands */
#elif defined(__aarch64__)
#define FLUSH (UINT64_C(1) << 24)
#endif

static const char code[] = "te = require 'te'\n"
                           "function f(x)\n"
                           "    local q = te.matmul(x:view{300, 1000} * 1e30, x:view{1000, 300} * 1e30)\n"
                           "    return x * 0.1, te.exp(x * 1e37), te.softmax(q)\n"
                           "end\n"
                           "function third() return te.tensor({1 / 3 + n}, {dtype = 'float64'}) end\n"
                           "n = 0 f(te.ones{300000})"; /* threads are started here */

static tetrain *open_runtime(int threads)
{
    tetrain_options o = {.struct_size = sizeof o, .threads = threads};
    tetrain        *rt = tetrain_open(&o);
    CHECK_MSG(tetrain_run_string(rt, code, sizeof code - 1, "=test") == TETRAIN_OK, "%s", tetrain_error(rt));
    return rt;
}

static te_tensor *numbers(tetrain *rt)
{
    te_tensor *x = te_tensor_empty(tetrain_context(rt), TE_F32, 1, (int64_t[]){WIDE});
    float     *values = te_tensor_data(x);
    for (int i = 0; i < WIDE; i++) values[i] = (float)(i % 997 + 1) * 1e-39f;
    return x;
}

static void set_default(void) { fesetenv(FE_DFL_ENV); }
static void set_upward(void) { fesetround(FE_UPWARD); }
#ifdef FLUSH
static void set_flush(void) { te_float_mode_write(te_float_mode_read() | FLUSH); }
#endif

static void (*const modes[])(void) = {
    set_default, set_upward,
#ifdef FLUSH
    set_flush,
#endif
};

/* The results of `f` and of operations that the host runs, in a mode of the host's. */
static void run_in(tetrain *rt, int mode, te_tensor **out)
{
    te_context *ctx = tetrain_context(rt);
    te_tensor  *x = numbers(rt);
    te_arg      args[] = {{.kind = TE_ARG_TENSOR, .as.tensor = x}, {.kind = TE_ARG_TENSOR, .as.tensor = x}};
    modes[mode]();
#ifdef FLUSH
    uint64_t before = te_float_mode_read() & TE_FLOAT_MODE;
#endif
    int            rounding = fegetround();
    tetrain_status status = tetrain_call(rt, "f", &x, 1, out, RESULTS);
    tetrain_status third = tetrain_call(rt, "third", NULL, 0, &out[RESULTS], 1);
    te_status      added = te_op_run(ctx, te_op_find(ctx, "add"), args, 2, &out[RESULTS + 1], 1);
    te_status      powered = te_op_run(ctx, te_op_find(ctx, "sigmoid"), args, 1, &out[RESULTS + 2], 1);
    CHECK(fegetround() == rounding);
#ifdef FLUSH
    CHECK((te_float_mode_read() & TE_FLOAT_MODE) == before);
#endif
    set_default();
    CHECK_MSG(status == TETRAIN_OK && third == TETRAIN_OK && added == TE_OK && powered == TE_OK, "%s",
              tetrain_error(rt));
    te_tensor_release(x);
}

static void check_results(void)
{
    te_tensor *expected[RESULTS + 3], *out[RESULTS + 3];
    tetrain   *one = open_runtime(1);
    run_in(one, 0, expected);
    for (int threads = 1; threads <= 3; threads += 2)
        for (int mode = 1; mode < (int)(sizeof modes / sizeof *modes); mode++) {
            tetrain *rt = open_runtime(threads);
            for (int again = 0; again < 3; again++) {
                run_in(rt, mode, out);
                for (int i = 0; i < RESULTS + 3; i++) {
                    size_t bytes = (size_t)te_tensor_numel(out[i]) * (i == RESULTS ? sizeof(double) : sizeof(float));
                    CHECK_MSG(memcmp(te_tensor_data(out[i]), te_tensor_data(expected[i]), bytes) == 0,
                              "%d threads, mode %d: result %d differs", threads, mode, i);
                    te_tensor_release(out[i]);
                }
            }
            tetrain_close(rt);
        }
    for (int i = 0; i < RESULTS + 3; i++) te_tensor_release(expected[i]);
    tetrain_close(one);
}

/* Threads that are started while a mode is in force. */
static void check_started(void)
{
    te_tensor *expected[RESULTS + 3], *out[RESULTS + 3];
    tetrain   *one = open_runtime(1);
    run_in(one, 0, expected);
    set_upward();
    tetrain *rt = open_runtime(3);
    set_default();
    run_in(rt, 0, out);
    for (int i = 0; i < RESULTS; i++)
        CHECK(memcmp(te_tensor_data(out[i]), te_tensor_data(expected[i]), (size_t)te_tensor_numel(out[i]) * 4) == 0);
    for (int i = 0; i < RESULTS + 3; i++) te_tensor_release(expected[i]), te_tensor_release(out[i]);
    tetrain_close(one);
    tetrain_close(rt);
}

#ifdef __x86_64__
static void set_control(uint16_t word) { __asm__ volatile("fldcw %0" ::"m"(word)); }
static uint16_t control(void)
{
    uint16_t word;
    __asm__ volatile("fnstcw %0" : "=m"(word));
    return word;
}

/* Where the x87 unit alone has a mode of its own: constants of formulas, numbers as text, functions of LuaJIT's. */
static void check_x87(void)
{
    static const uint16_t words[] = {0x37f, 0xb7f, 0x77f, 0xf7f, 0x27f, 0x07f};
    static const char     script[] =
        "local te = require 'te' result = te.tensor({tonumber '0.1', math.ldexp(1.1, -1073), math.fmod(5.3, 0.7)}, "
        "{dtype = 'float64'})\n"
        "text = tostring(te.tensor{0.5, 0.1, -0.1, 2 / 3}) .. ('%.17g'):format(0.1)\n"
        "assert(text == (before or text), text) before = text";
    enum { VALUES = 4 };
    double   expected[VALUES + 3] = {0}, in[VALUES] = {-1.1, -0.37, 0.73, 2.3};
    tetrain *rt = tetrain_open(NULL);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        double out[VALUES + 3] = {0};
        set_control(words[i]);
        te_context *ctx = te_context_open(NULL); /* compiles formulas anew */
        te_tensor  *x = te_tensor_from_data(ctx, in, TE_F64, 1, (int64_t[]){VALUES}, NULL, NULL), *y = NULL;
        te_arg      arg = {.kind = TE_ARG_TENSOR, .as.tensor = x};
        te_status   status = te_op_run(ctx, te_op_find(ctx, "gelu"), &arg, 1, &y, 1);
        if (status == TE_OK) status = te_tensor_read(y, TE_F64, out);
        tetrain_status scripts = tetrain_run_string(rt, script, sizeof script - 1, "=x87");
        te_tensor     *z = tetrain_get_tensor(rt, "result");
        uint16_t       after = control();
        set_control(0x37f);
        CHECK_MSG(after == words[i], "%x became %x", words[i], after);
        CHECK_MSG(status == TE_OK && scripts == TETRAIN_OK && z, "%x: %s", words[i], tetrain_error(rt));
        if (z) CHECK(te_tensor_read(z, TE_F64, out + VALUES) == TE_OK);
        if (i == 0) memcpy(expected, out, sizeof out);
        CHECK_MSG(memcmp(expected, out, sizeof out) == 0, "control word %x: results differ", words[i]);
        te_tensor_release(x);
        te_tensor_release(y);
        te_tensor_release(z);
        te_context_release(ctx);
    }
    tetrain_close(rt);
}
#endif

static const char *const raising[] = {
    "te.rsqrt(te.zeros{64})",
    "te.exp(te.ones{64} * 200)",
    "te.log(te.zeros{64})",
    "return te.zeros{64} / te.zeros{64}",
    "te.cast(te.tensor{1e30, -1e30, 0/0}, 'int32')",
    "local q = te.randn{1, 2, 16, 8} te.scaled_dot_product_attention(q, te.randn{1, 2, 16, 8}, q, {causal = true})",
    "tostring(te.tensor{0/0, 1/0, 1e-40})",
    "local m = te.Sequential(te.Linear(16, 16), te.GELU(), te.LayerNorm(16)) m(te.randn{4, 16}):sum():backward()",
    "local x = math.ldexp(0.3, 5000) + math.fmod(1 / 0, 0.3) + tonumber '1e400'",
    "local x = {} for i = 1, 300 do x[i] = 1 / (i - 7) + math.huge - math.huge end",
};

/* Everything from opening on, where division by zero and the like raise signals. */
static void check_exceptions(void)
{
    enum { RAISED = FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW };
    if (feenableexcept(RAISED) == -1) return; /* Arm processors that do not */
    tetrain *rt = open_runtime(2);
    for (size_t i = 0; i < sizeof raising / sizeof *raising; i++)
        CHECK_MSG(tetrain_run_string(rt, raising[i], strlen(raising[i]), "=test") == TETRAIN_OK, "%s: %s", raising[i],
                  tetrain_error(rt));
    te_context *ctx = tetrain_context(rt);
    te_tensor  *zero = te_tensor_full(ctx, TE_F32, 1, (int64_t[]){64}, 0), *y;
    CHECK(te_tensor_set_requires_grad(zero, true) == TE_OK);
    te_arg args[] = {{.kind = TE_ARG_TENSOR, .as.tensor = zero}};
    CHECK(te_op_run(ctx, te_op_find(ctx, "log"), args, 1, &y, 1) == TE_OK);
    te_tensor *ones = te_tensor_full(ctx, TE_F32, 1, (int64_t[]){64}, 1);
    CHECK(te_backward(y, ones, false) == TE_OK && isinf(((float *)te_tensor_data(te_tensor_grad(zero)))[63]));
    te_tensor_release(ones);
    te_tensor_release(y);
    te_tensor_release(zero);
    tetrain_close(rt);
    CHECK(fegetexcept() == RAISED);
    volatile long double one = 1; /* the unit behind these would raise now what it has kept */
    CHECK(one * 3 == 3);
    set_default();
}

/* --- recipes and optimizers of the host --------------------------------------------------------------------------- */

static bool called_elsewhere; /* a function of the host, in another mode than the default one */

static void look_at_mode(void) { called_elsewhere |= fegetround() != FE_TONEAREST || fegetexcept() > 0; }

static te_answer quantize_all(void *user, const te_operand_role *operand, te_quantizer_fields *fields,
                              te_recipe **other)
{
    (void)operand;
    (void)fields;
    look_at_mode();
    *other = user;
    return TE_ANSWER_RECIPE;
}

static float own_amax(void *user, const float *history, int64_t n)
{
    (void)user;
    (void)n;
    look_at_mode();
    return history[0];
}

static te_recipe *delayed(te_context *ctx, double length, double margin)
{
    te_recipe_option options[] = {{.name = "amax_history_len", .number = length}, {.name = "margin", .number = margin}};
    return te_recipe_new(ctx, "DelayedScaling", options, 2);
}

/* One step under the recipe; the factor of its input. */
static float scale_after_step(te_context *ctx, te_recipe *recipe, const float *numbers)
{
    te_tensor *x = te_tensor_from_data(ctx, (void *)numbers, TE_F32, 2, (int64_t[]){32, 32}, NULL, NULL), *y = NULL;
    te_arg     args[] = {{.kind = TE_ARG_TENSOR, .as.tensor = x}, {.kind = TE_ARG_TENSOR, .as.tensor = x}};
    float      scale = 0;
    te_product  *product = te_product_new(ctx, "fc");
    te_autocast  scope = {.struct_size = sizeof scope, .recipe = recipe, .dtype = "bfloat16"};
    CHECK(te_autocast_begin(ctx, &scope) == TE_OK);
    CHECK(te_product_run(product, te_op_find(ctx, "linear"), args, 2, &y, 1) == TE_OK);
    CHECK(te_autocast_end(ctx) == TE_OK && te_autocast_begin(ctx, &scope) == TE_OK);
    CHECK(te_autocast_unwind(ctx, 0) == TE_OK);
    CHECK(te_tensor_read(te_product_scale(product, TE_ROLE_INPUT), TE_F32, &scale) == TE_OK);
    te_tensor_release(x);
    te_tensor_release(y);
    te_product_release(product);
    return scale;
}

/* All of it, into `out`: three factors and what messages say. */
static void run_engine(const float *numbers, float *out, char *text, size_t size)
{
    te_context         *ctx = te_context_open(NULL);
    te_tensor          *p = te_tensor_full(ctx, TE_F32, 1, (int64_t[]){2}, 0.5);
    te_adamw_options    options = {.struct_size = sizeof options};
    te_quantizer_fields fields = {.struct_size = sizeof fields};
    te_adamw_defaults(&options);
    te_optimizer *optimizer = te_optimizer_adamw(ctx, &p, 1, &options);
    CHECK(optimizer && te_optimizer_set_lr(optimizer, 0.1) == TE_OK);
    CHECK(te_optimizer_set_lr(optimizer, NAN) == TE_ERROR_ARGUMENT);
    options.lr = -0.3;
    CHECK(!te_optimizer_adamw(ctx, &p, 1, &options));
    snprintf(text, size, "%s", te_context_error(ctx));
    CHECK(!delayed(ctx, 16.5, 0) && !delayed(ctx, NAN, 0) && !delayed(ctx, 1e300, 0) && !delayed(ctx, 4, 1e300));
    te_quantizer_defaults(&fields);
    fields.epsilon = 1e-30f;
    te_quantizer_fields_check(ctx, &fields);
    te_recipe *plain = delayed(ctx, 4, 1), *own = delayed(ctx, 4, 0);
    te_recipe *custom = te_recipe_custom(ctx, quantize_all, plain, NULL, 0);
    CHECK(te_recipe_set_algorithms(own, &(te_delayed_algorithms){.amax = own_amax}) == TE_OK);
    out[0] = scale_after_step(ctx, plain, numbers);
    out[1] = scale_after_step(ctx, own, numbers);
    out[2] = scale_after_step(ctx, custom, numbers);
    te_recipe_release(plain);
    te_recipe_release(own);
    te_recipe_release(custom);
    te_optimizer_release(optimizer);
    te_tensor_release(p);
    te_context_release(ctx);
}

static void check_engine(void)
{
    static float numbers[32 * 32];
    float        expected[3], out[3];
    char         expected_text[300], text[300];
    for (int i = 0; i < 32 * 32; i++) numbers[i] = (float)i * 0.0007f;
    run_engine(numbers, expected, expected_text, sizeof text);
    for (int i = 0; i < 2; i++) {
        fesetround(i ? FE_DOWNWARD : FE_UPWARD);
        feenableexcept(FE_ALL_EXCEPT); /* not on every Arm processor */
        run_engine(numbers, out, text, sizeof text);
        set_default();
        CHECK(memcmp(out, expected, sizeof out) == 0);
        CHECK_MSG(strcmp(text, expected_text) == 0, "%s", text);
    }
    CHECK(!called_elsewhere && strstr(text, "-0.3"));
}

int main(void)
{
    check_engine();
    check_results();
    check_started();
#ifdef __x86_64__
    check_x87();
#endif
    check_exceptions();
    return TEST_END();
}
