/* test_recipe_public.c - recipes with the functions of te.h alone: what quantizers recipes have, scopes, steps of delayed scaling against
 * the rule written down again, products against what their quantized operands say, quantized tensors and parameters, mistakes. */
#include "failing_memory.h"
#include "test.h"

#include <tetrain/tetrain.h>

enum { ROWS = 32, IN = 64, OUT = 48 };

static te_tensor *filled(te_context *ctx, int64_t rows, int64_t cols, uint64_t seed)
{
    te_tensor *t = te_tensor_empty(ctx, TE_F32, 2, (int64_t[]){rows, cols});
    for (int64_t i = 0; t && i < rows * cols; i++) ((float *)te_tensor_data(t))[i] = (float)test_uniform(&seed, -1, 1);
    return t;
}

static float amax_of(te_tensor *t)
{
    float most = 0;
    for (int64_t i = 0; i < te_tensor_numel(t); i++) most = fmaxf(most, fabsf(((float *)te_tensor_data(t))[i]));
    return most;
}

static te_autocast under(te_recipe *recipe) { return (te_autocast){.struct_size = sizeof(te_autocast), .recipe = recipe}; }

static te_tensor *linear(te_product *product, te_tensor *x, te_tensor *w)
{
    te_arg args[] = {{.kind = TE_ARG_TENSOR, .as.tensor = x}, {.kind = TE_ARG_TENSOR, .as.tensor = w}};
    te_tensor *y = NULL;
    te_product_run(product, te_op_find(te_tensor_context(x), "linear"), args, 2, &y, 1);
    return y;
}

#define CHECK_FAILS(ctx, call, text)                                                                            \
    do {                                                                                                        \
        CHECK_MSG(!(call), "%s is no error", #call);                                                            \
        CHECK_MSG(strstr(te_context_error(ctx), text), "\"%s\" lacks \"%s\"", te_context_error(ctx), text);     \
    } while (0)

/* --- recipes and quantizers --------------------------------------------------------------------------------------- */

static te_quantizer_fields quantizer_of(te_recipe *recipe, te_role role, bool attention, bool *quantized)
{
    te_quantizer_fields f = {.struct_size = sizeof f};
    te_operand_role operand = {role, attention, NULL};
    CHECK(te_recipe_quantizer(recipe, &operand, &f, quantized) == TE_OK);
    return f;
}

static void test_quantizers(te_context *ctx)
{
    int n = 0;
    bool yes;
    for (const char *name; (name = te_recipe_name_at(n)); n++) {
        te_recipe *recipe = te_recipe_new(ctx, name, NULL, 0);
        CHECK_MSG(recipe != NULL, "%s: %s", name, te_context_error(ctx));
        CHECK(te_recipe_option_at(name, 0)->name && !te_recipe_option_at(name, 99) && !te_recipe_option_at(name, -1));
        for (int i = 0; te_recipe_option_at(name, i); i++) { /* every default is a value that may be given */
            const te_option_info *o = te_recipe_option_at(name, i);
            bool chosen = o->type == TE_OPTION_CHOICE && o->number >= 0;
            te_recipe_option given = {o->name, o->number, chosen ? o->choices[(int)o->number] : NULL};
            te_recipe *same = chosen || o->type != TE_OPTION_CHOICE ? te_recipe_new(ctx, name, &given, 1) : te_recipe_retain(recipe);
            CHECK_MSG(same && o->doc && *o->doc, "%s.%s: %s", name, o->name, te_context_error(ctx));
            te_recipe_release(same);
        }
        for (int r = 0; r < TE_ROLE_COUNT; r++) {
            te_quantizer_fields f = quantizer_of(recipe, (te_role)r, false, &yes);
            CHECK(yes && te_quantizer_fields_check(ctx, &f) == TE_OK);
        }
        quantizer_of(recipe, TE_ROLE_INPUT, true, &yes);
        CHECK(!yes); /* fp8_dpa is off at first */
        te_recipe_release(recipe);
    }
    CHECK(n == 5 && !te_recipe_name_at(-1) && !te_recipe_option_at("None", 0));

    te_recipe *r = te_recipe_new(ctx, "NVFP4BlockScaling", NULL, 0);
    te_quantizer_fields f = quantizer_of(r, TE_ROLE_WEIGHT, false, &yes);
    CHECK(f.block_rows == 16 && f.block_cols == 16 && f.replicated && !f.hadamard && !f.stochastic && strcmp(f.scale, "float8_e4m3") == 0);
    f = quantizer_of(r, TE_ROLE_GRAD_OUTPUT, false, &yes);
    CHECK(f.block_rows == 1 && f.hadamard && f.stochastic && strcmp(f.element, "float4_e2m1") == 0);
    te_recipe_release(r);

    te_recipe_option some[] = {{"fp8_dpa", 1, NULL}, {"fp8_format", 0, "E4M3"}, {"fp8_format", 0, "HYBRID"}};
    r = te_recipe_new(ctx, "DelayedScaling", some, 3);
    CHECK(strcmp(quantizer_of(r, TE_ROLE_GRAD_OUTPUT, false, &yes).element, "float8_e5m2") == 0); /* the last counts */
    CHECK(quantizer_of(r, TE_ROLE_INPUT, true, &yes).needs_history && yes);
    te_recipe_release(r);
}

static void test_option_mistakes(te_context *ctx)
{
    te_recipe_option o = {"margin", 0.5, NULL}, rht[] = {{"nvfp4_4over6", 0, "all"}}, twice[] = {{"x_block_scaling_dim", 2, NULL}};
    CHECK_FAILS(ctx, te_recipe_new(ctx, "DelayedScaling", &o, 1), "margin: expected an integer");
    o = (te_recipe_option){"amax_history_len", NAN, NULL};
    CHECK_FAILS(ctx, te_recipe_new(ctx, "DelayedScaling", &o, 1), "amax_history_len");
    o = (te_recipe_option){"fp8_format", 0, "E5M2"};
    CHECK_FAILS(ctx, te_recipe_new(ctx, "DelayedScaling", &o, 1), "one of E4M3, HYBRID, got E5M2");
    o = (te_recipe_option){"fp8_format", 1, NULL};
    CHECK_FAILS(ctx, te_recipe_new(ctx, "DelayedScaling", &o, 1), "got no text");
    o = (te_recipe_option){"block", 1, NULL};
    CHECK_FAILS(ctx, te_recipe_new(ctx, "MXFP8BlockScaling", &o, 1), "unknown option block");
    CHECK_FAILS(ctx, te_recipe_new(ctx, "Delayed", NULL, 0), "no recipe Delayed");
    CHECK_FAILS(ctx, te_recipe_new(ctx, NULL, NULL, 0), "no recipe NULL");
    CHECK_FAILS(ctx, te_recipe_new(ctx, "DelayedScaling", NULL, 2), "2 options");
    CHECK_FAILS(ctx, te_recipe_new(ctx, "NVFP4BlockScaling", rht, 1), "disable_rht");
    CHECK_FAILS(ctx, te_recipe_new(ctx, "Float8BlockScaling", twice, 1), "may be 2, got 2, 2 and 1");
    CHECK_FAILS(ctx, te_recipe_custom(ctx, NULL, NULL, NULL, 0), "expected a function");
    CHECK(!te_recipe_new(NULL, "DelayedScaling", NULL, 0) && te_recipe_set_algorithms(NULL, NULL) == TE_ERROR_ARGUMENT);
    te_recipe *mx = te_recipe_new(ctx, "MXFP8BlockScaling", NULL, 0);
    CHECK_FAILS(ctx, te_recipe_set_algorithms(mx, NULL) == TE_OK, "keeps no history");
    te_quantizer_fields f = {.struct_size = sizeof f};
    bool yes;
    CHECK_FAILS(ctx, te_recipe_quantizer(mx, &(te_operand_role){(te_role)7, false, NULL}, &f, &yes) == TE_OK, "operand");
    te_recipe_release(mx);
    te_quantizer_defaults(&f);
    f.element = "float9";
    CHECK_FAILS(ctx, te_quantizer_fields_check(ctx, &f) == TE_OK, "no choice \"float9\"");
    f.element = NULL, f.block_rows = 1, f.block_cols = 48;
    CHECK_FAILS(ctx, te_quantizer_fields_check(ctx, &f) == TE_OK, "1 x 48");
    f.block_cols = 4096;
    CHECK_FAILS(ctx, te_quantizer_fields_check(ctx, &f) == TE_OK, "at most 128");
}

/* --- scopes ------------------------------------------------------------------------------------------------------- */

static te_dtype compute_dtype(te_context *ctx)
{
    te_dtype now = te_context_set_compute_dtype(ctx, TE_DTYPE_COUNT);
    te_context_set_compute_dtype(ctx, now);
    return now;
}

static void test_scopes(te_context *ctx)
{
    te_recipe *recipe = te_recipe_new(ctx, "Float8CurrentScaling", NULL, 0);
    te_autocast outer = under(recipe), inner = {.struct_size = sizeof inner, .disabled = true}, wrong = under(recipe);
    outer.dtype = "bfloat16", wrong.dtype = "float64";
    CHECK_FAILS(ctx, te_autocast_end(ctx) == TE_OK, "no scope has begun");
    CHECK(te_autocast_begin(ctx, &outer) == TE_OK && compute_dtype(ctx) == TE_BF16 && te_autocast_depth(ctx) == 1);
    CHECK(te_autocast_begin(ctx, NULL) == TE_OK && compute_dtype(ctx) == TE_BF16); /* changes nothing */
    CHECK(te_autocast_begin(ctx, &inner) == TE_OK && compute_dtype(ctx) == TE_DTYPE_COUNT && te_autocast_depth(ctx) == 3);
    CHECK_FAILS(ctx, te_autocast_begin(ctx, &wrong) == TE_OK, "float64 is no compute dtype");
    wrong.dtype = "nonsense";
    CHECK_FAILS(ctx, te_autocast_begin(ctx, &wrong) == TE_OK, "nonsense");
    wrong.struct_size = 3;
    CHECK_FAILS(ctx, te_autocast_begin(ctx, &wrong) == TE_OK, "struct_size");
    CHECK_FAILS(ctx, te_autocast_unwind(ctx, 4) == TE_OK, "4 of 3");
    CHECK(te_autocast_depth(ctx) == 3 && te_autocast_end(ctx) == TE_OK && compute_dtype(ctx) == TE_BF16);
    CHECK(te_autocast_unwind(ctx, 0) == TE_OK && te_autocast_depth(ctx) == 0 && compute_dtype(ctx) == TE_DTYPE_COUNT);
    CHECK_FAILS(ctx, te_autocast_end(ctx) == TE_OK, "no scope has begun");
    CHECK(te_autocast_begin(NULL, NULL) == TE_ERROR_ARGUMENT && te_autocast_end(NULL) == TE_ERROR_ARGUMENT);

    te_context *other = te_context_open(NULL);
    CHECK_FAILS(other, te_autocast_begin(other, &outer) == TE_OK, "another context");
    te_recipe *own = te_recipe_new(other, "MXFP8BlockScaling", NULL, 0); /* of a scope that nobody ends */
    outer.recipe = own;
    CHECK(te_autocast_begin(other, &outer) == TE_OK);
    te_recipe_release(own);
    te_context_release(other);
    te_recipe_release(recipe);
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* y = x W^T of what the recipe's bytes stand for. */
static void expect_product(te_recipe *recipe, te_tensor *x, te_tensor *w, te_tensor *y)
{
    bool yes;
    te_quantizer_fields fx = quantizer_of(recipe, TE_ROLE_INPUT, false, &yes), fw = quantizer_of(recipe, TE_ROLE_WEIGHT, false, &yes);
    te_quantized_tensor *qx = te_quantized_tensor_new(x, &fx, NULL), *qw = te_quantized_tensor_new(w, &fw, NULL);
    te_tensor *dx = te_quantized_tensor_dequantize(qx, TE_ROWWISE), *dw = te_quantized_tensor_dequantize(qw, TE_ROWWISE);
    CHECK(dx && dw && y);
    if (!dx || !dw || !y) return;
    const float *a = te_tensor_data(dx), *b = te_tensor_data(dw), *c = te_tensor_data(y);
    for (int i = 0; i < ROWS; i++)
        for (int o = 0; o < OUT; o++) {
            double sum = 0, size = 0;
            for (int k = 0; k < IN; k++) sum += (double)a[i * IN + k] * b[o * IN + k], size += fabs((double)a[i * IN + k] * b[o * IN + k]);
            CHECK_MSG(fabs(sum - c[i * OUT + o]) <= 1e-5 * size, "row %d column %d: %g, not %g", i, o, (double)c[i * OUT + o], sum);
        }
    te_tensor_release(dx), te_tensor_release(dw);
    te_quantized_tensor_release(qx), te_quantized_tensor_release(qw);
}

static void test_products(te_context *ctx)
{
    te_tensor *x = filled(ctx, ROWS, IN, 3), *w = filled(ctx, OUT, IN, 4);
    for (int n = 1; n < 5; n++) { /* the first one's factor is 1 */
        te_recipe *recipe = te_recipe_new(ctx, te_recipe_name_at(n), NULL, 0);
        te_product *fc = te_product_new(ctx, "fc");
        te_autocast scope = under(recipe);
        te_tensor *plain = linear(fc, x, w);
        CHECK(te_autocast_begin(ctx, &scope) == TE_OK);
        te_tensor *y = linear(fc, x, w), *again = linear(fc, x, w);
        CHECK_MSG(y, "%s", te_context_error(ctx));
        expect_product(recipe, x, w, y);
        CHECK(memcmp(te_tensor_data(y), te_tensor_data(again), ROWS * OUT * 4) == 0);
        CHECK(memcmp(te_tensor_data(y), te_tensor_data(plain), ROWS * OUT * 4) != 0);
        ((float *)te_tensor_data(w))[0] += 1; /* behind the engine's back */
        te_tensor_written(w);
        te_tensor *changed = linear(fc, x, w);
        expect_product(recipe, x, w, changed);
        CHECK(memcmp(te_tensor_data(y), te_tensor_data(changed), ROWS * OUT * 4) != 0);
        ((float *)te_tensor_data(w))[0] -= 1;
        te_tensor_written(w);
        te_tensor_release(changed);
        CHECK(te_autocast_end(ctx) == TE_OK && !te_product_scale(fc, TE_ROLE_INPUT));
        te_tensor *after = linear(fc, x, w);
        CHECK(memcmp(te_tensor_data(after), te_tensor_data(plain), ROWS * OUT * 4) == 0);
        te_tensor *all[] = {plain, y, again, after};
        for (int i = 0; i < 4; i++) te_tensor_release(all[i]);
        te_product_release(fc);
        te_recipe_release(recipe);
    }
    te_product *fc = te_product_new(ctx, NULL);
    te_tensor *out = x;
    te_arg args[] = {{.kind = TE_ARG_TENSOR, .as.tensor = x}, {.kind = TE_ARG_TENSOR, .as.tensor = x}};
    CHECK_FAILS(ctx, te_product_run(fc, te_op_find(ctx, "add"), args, 2, &out, 1) == TE_OK, "add is no linear");
    CHECK(out == NULL);
    CHECK_FAILS(ctx, te_product_run(fc, NULL, args, 2, &out, 1) == TE_OK, "NULL is no linear");
    CHECK(te_product_run(NULL, NULL, NULL, 0, &out, 1) == TE_ERROR_ARGUMENT);
    te_product_release(fc);
    te_product_release(NULL);
    te_tensor_release(x), te_tensor_release(w);
}

/* --- delayed scaling ---------------------------------------------------------------------------------------------- */

static float first(te_tensor *t) { return ((float *)te_tensor_data(t))[0]; }

/* Two steps with amaxes that grow, by an operation or by a group: factors are those of the rule, and state can be taken elsewhere. */
static void test_delayed(te_context *ctx, bool in_group)
{
    te_recipe_option options[] = {{"amax_history_len", 4, NULL}, {"margin", 1, NULL}};
    te_recipe *recipe = te_recipe_new(ctx, "DelayedScaling", options, 2);
    te_product *fc = te_product_new(ctx, "fc"), *other = te_product_new(ctx, "other");
    te_tensor *w = filled(ctx, OUT, IN, 5), *dy = filled(ctx, ROWS, OUT, 6);
    te_autocast scope = under(recipe);
    te_group *group = te_group_new(ctx);
    int gx = te_group_input(group, false), gw = te_group_input(group, true), gy;
    CHECK(te_product_apply(fc, group, te_op_find(ctx, "linear"), (int[]){gx, gw}, 2, NULL, 0, &gy) == TE_OK);
    CHECK(te_group_output(group, gy) == TE_OK && te_tensor_set_requires_grad(w, true) == TE_OK);
    float most[3] = {0};
    for (int step = 0; step < 2; step++) {
        te_tensor *x = filled(ctx, ROWS, IN, 7 + (uint64_t)step), *in[] = {x, w}, *y = NULL;
        CHECK(te_autocast_begin(ctx, &scope) == TE_OK);
        if (in_group)
            CHECK_MSG(te_group_run(group, in, &y) == TE_OK, "%s", te_context_error(ctx));
        else
            y = linear(fc, x, w);
        CHECK(y && first(te_product_amax_history(fc, TE_ROLE_INPUT)) == amax_of(x));
        CHECK(te_autocast_end(ctx) == TE_OK);
        most[0] = fmaxf(most[0], amax_of(x)), most[1] = amax_of(w), most[2] = amax_of(dy);
        CHECK(first(te_product_scale(fc, TE_ROLE_INPUT)) == (float)(224.0 / (double)most[0]));
        CHECK(first(te_product_scale(fc, TE_ROLE_WEIGHT)) == (float)(224.0 / (double)most[1]));
        CHECK(step > 0 || first(te_product_scale(fc, TE_ROLE_GRAD_OUTPUT)) == 1);
        CHECK(te_backward(y, dy, false) == TE_OK);
        CHECK(first(te_product_scale(fc, TE_ROLE_GRAD_OUTPUT)) == (float)(28672.0 / (double)most[2]));
        const float *history = te_tensor_data(te_product_amax_history(fc, TE_ROLE_INPUT));
        CHECK(te_tensor_numel(te_product_amax_history(fc, TE_ROLE_INPUT)) == 4 && history[0] == 0 && history[3] == amax_of(x));
        te_tensor_release(x), te_tensor_release(y);
    }
    te_context_set_grad_enabled(ctx, false); /* without gradients nothing is collected */
    te_tensor *large = te_tensor_full(ctx, TE_F32, 2, (int64_t[]){ROWS, IN}, 99);
    float before = first(te_product_scale(fc, TE_ROLE_INPUT));
    CHECK(te_autocast_begin(ctx, &scope) == TE_OK);
    te_tensor_release(linear(fc, large, w));
    CHECK(te_autocast_end(ctx) == TE_OK && first(te_product_scale(fc, TE_ROLE_INPUT)) == before);
    te_autocast calibrating = {.struct_size = sizeof calibrating, .disabled = true, .calibrating = true}; /* … but here */
    calibrating.recipe = recipe;
    CHECK(te_autocast_begin(ctx, &calibrating) == TE_OK);
    te_tensor_release(linear(fc, large, w));
    CHECK(te_autocast_end(ctx) == TE_OK && first(te_product_scale(fc, TE_ROLE_INPUT)) == 224.0f / 99);
    te_context_set_grad_enabled(ctx, true);

    te_tensor *scale = te_product_scale(fc, TE_ROLE_INPUT), *history = te_product_amax_history(fc, TE_ROLE_INPUT);
    CHECK(te_product_set_state(other, TE_ROLE_INPUT, scale, history) == TE_OK);
    CHECK(first(te_product_scale(other, TE_ROLE_INPUT)) == 224.0f / 99 && te_product_scale(other, TE_ROLE_INPUT) != scale);
    CHECK_FAILS(ctx, te_product_set_state(other, TE_ROLE_INPUT, history, history) == TE_OK, "expected one number");
    CHECK_FAILS(ctx, te_product_set_state(other, TE_ROLE_INPUT, NULL, history) == TE_OK, "scale: expected a float32");
    CHECK_FAILS(ctx, te_product_set_state(other, TE_ROLE_INPUT, scale, w) == TE_OK, "amax_history: expected");
    CHECK_FAILS(ctx, te_product_set_state(other, (te_role)3, scale, history) == TE_OK, "no role 3");
    CHECK(!te_product_scale(NULL, TE_ROLE_INPUT) && !te_product_scale(fc, (te_role)5));
    te_group_release(group);
    te_tensor *all[] = {w, dy, large};
    for (int i = 0; i < 3; i++) te_tensor_release(all[i]);
    te_product_release(fc), te_product_release(other);
    te_recipe_release(recipe);
}

typedef struct asked { int amaxes, scales; float last; } asked;
static float twice_last(void *user, const float *history, int64_t n)
{
    ((asked *)user)->amaxes++;
    ((asked *)user)->last = history[0];
    return n == 3 ? 2 * history[0] : NAN;
}
static float half(void *user, float amax, float old_scale, float largest)
{
    ((asked *)user)->scales++;
    return old_scale == 1 ? largest / (2 * amax) : -1; /* wrong in the second step */
}

static void test_algorithms(te_context *ctx)
{
    te_recipe_option options[] = {{"amax_history_len", 3, NULL}};
    te_recipe *recipe = te_recipe_new(ctx, "DelayedScaling", options, 1);
    asked seen = {0};
    te_delayed_algorithms own = {twice_last, half, &seen};
    CHECK(te_recipe_set_algorithms(recipe, &own) == TE_OK);
    te_product *fc = te_product_new(ctx, "fc");
    te_tensor *x = filled(ctx, ROWS, IN, 9), *w = filled(ctx, OUT, IN, 10), *infinite = filled(ctx, ROWS, IN, 9);
    ((float *)te_tensor_data(infinite))[5] = INFINITY;
    te_autocast scope = under(recipe);
    uint64_t skipped[2];
    CHECK(te_context_skipped_amaxes(ctx, &skipped[0]) == TE_OK && te_autocast_begin(ctx, &scope) == TE_OK);
    te_tensor_release(linear(fc, x, w));
    CHECK_FAILS(ctx, te_recipe_set_algorithms(recipe, NULL) == TE_OK, "in use");
    CHECK(te_autocast_end(ctx) == TE_OK && seen.amaxes == 2 && seen.scales == 2);
    CHECK(first(te_product_scale(fc, TE_ROLE_INPUT)) == 448 / (4 * amax_of(x)));
    CHECK(te_autocast_begin(ctx, &scope) == TE_OK);
    te_tensor_release(linear(fc, infinite, w));
    float scale = first(te_product_scale(fc, TE_ROLE_INPUT));
    CHECK_FAILS(ctx, te_autocast_end(ctx) == TE_OK, "would be -1"); /* of the weight */
    CHECK(te_autocast_depth(ctx) == 0 && te_context_skipped_amaxes(ctx, &skipped[1]) == TE_OK && skipped[1] == skipped[0] + 1);
    CHECK(first(te_product_scale(fc, TE_ROLE_INPUT)) == scale);
    te_tensor_release(x), te_tensor_release(w), te_tensor_release(infinite);
    te_product_release(fc);
    te_recipe_release(recipe);
}

/* --- own quantizers ----------------------------------------------------------------------------------------------- */

typedef struct choices { te_recipe *grads, *loop; te_answer wrong; bool history; int n; char name[8]; } choices;

static te_answer choose(void *user, const te_operand_role *operand, te_quantizer_fields *fields, te_recipe **recipe)
{
    choices *c = user;
    c->n++;
    snprintf(c->name, sizeof c->name, "%s", operand->name);
    if (c->wrong) return c->wrong;
    *recipe = c->loop ? c->loop : c->grads;
    if (c->loop || operand->role == TE_ROLE_GRAD_OUTPUT) return TE_ANSWER_RECIPE;
    if (operand->role == TE_ROLE_WEIGHT) return TE_ANSWER_HIGH_PRECISION;
    fields->block_rows = 1, fields->block_cols = 32, fields->needs_history = c->history;
    if (c->history) fields->block_rows = fields->block_cols = 0;
    return TE_ANSWER_QUANTIZER;
}

static void test_custom(te_context *ctx)
{
    te_recipe_option override = {"backward_override", 0, "dequantized"};
    choices c = {.grads = te_recipe_new(ctx, "DelayedScaling", NULL, 0)};
    te_recipe *recipe = te_recipe_custom(ctx, choose, &c, &override, 1);
    te_product *fc = te_product_new(ctx, "fc");
    te_tensor *x = filled(ctx, ROWS, IN, 11), *w = filled(ctx, OUT, IN, 12);
    te_autocast scope = under(recipe);
    CHECK(te_autocast_begin(ctx, &scope) == TE_OK);
    te_tensor *y = linear(fc, x, w);
    CHECK(y && c.n == 3 && strcmp(c.name, "fc") == 0);
    te_tensor_release(linear(fc, x, w));
    CHECK(c.n == 3); /* asked once */
    CHECK(te_product_scale(fc, TE_ROLE_GRAD_OUTPUT) && !te_product_scale(fc, TE_ROLE_INPUT) && te_autocast_end(ctx) == TE_OK);
    const char *texts[] = {"no te_answer", "name each other", "comes from DelayedScaling", "no recipe of this context"};
    for (int i = 0; i < 4; i++) {
        te_product *next = te_product_new(ctx, "next");
        c.wrong = i == 0 ? (te_answer)9 : i == 3 ? TE_ANSWER_RECIPE : (te_answer)0;
        c.loop = i == 1 ? recipe : NULL;
        c.history = i == 2;
        if (i == 3) te_recipe_release(c.grads), c.grads = NULL;
        CHECK(te_autocast_begin(ctx, &scope) == TE_OK);
        CHECK_FAILS(ctx, linear(next, x, w), texts[i]);
        CHECK(te_autocast_end(ctx) == TE_OK);
        te_product_release(next);
    }
    te_tensor_release(x), te_tensor_release(w), te_tensor_release(y);
    te_product_release(fc);
    te_recipe_release(recipe);
}

/* --- quantized tensors and parameters ----------------------------------------------------------------------------- */

static void test_tensors(te_context *ctx)
{
    bool yes;
    te_recipe *recipe = te_recipe_new(ctx, "MXFP8BlockScaling", NULL, 0);
    te_quantizer_fields f = quantizer_of(recipe, TE_ROLE_INPUT, false, &yes), whole = {.struct_size = sizeof whole};
    te_tensor *x = filled(ctx, ROWS, IN, 13);
    te_quantized_tensor *q = te_quantized_tensor_new(x, &f, NULL);
    te_tensor *parts[2][TE_STORED_PART_COUNT] = {{NULL}};
    for (int i = 0; i < 2 * TE_STORED_PART_COUNT; i++)
        parts[i / 3][i % 3] = te_quantized_tensor_part(q, (te_direction)(i / 3), (te_stored_part)(i % 3));
    CHECK(te_tensor_numel(parts[0][0]) == ROWS * IN && te_tensor_numel(parts[0][1]) == ROWS * IN / 32 && !parts[0][2] && parts[1][0]);
    te_quantized_tensor *same = te_quantized_tensor_from_parts(ctx, &f, TE_F32, 2, (int64_t[]){ROWS, IN}, parts);
    te_tensor *a = te_quantized_tensor_dequantize(q, TE_ROWWISE), *b = te_quantized_tensor_dequantize(same, TE_ROWWISE);
    CHECK(a && b && memcmp(te_tensor_data(a), te_tensor_data(b), ROWS * IN * 4) == 0);
    for (int i = 0; i < ROWS * IN; i++) CHECK(fabsf(((float *)te_tensor_data(a))[i] - ((float *)te_tensor_data(x))[i]) <= 0.04f);
    CHECK_FAILS(ctx, te_quantized_tensor_from_parts(ctx, &f, TE_F32, 2, (int64_t[]){ROWS, IN + 1}, parts), "expected");
    CHECK_FAILS(ctx, te_quantized_tensor_from_parts(ctx, &f, TE_I32, 2, (int64_t[]){ROWS, IN}, parts), "int32");
    CHECK_FAILS(ctx, te_quantized_tensor_from_parts(ctx, &f, TE_F32, 99, (int64_t[]){ROWS, IN}, parts), "99 dimensions");
    te_quantize_how how = {.struct_size = sizeof how, .no_columnwise = true, .scale = 2};
    te_quantizer_defaults(&whole);
    whole.needs_history = true;
    te_quantized_tensor *given = te_quantized_tensor_new(x, &whole, &how);
    CHECK(given && !te_quantized_tensor_part(given, TE_COLUMNWISE, TE_STORED_DATA));
    CHECK(first(te_quantized_tensor_part(given, TE_ROWWISE, TE_STORED_SCALE_INV)) == 0.5f);
    CHECK(first(te_quantized_tensor_part(given, TE_ROWWISE, TE_STORED_AMAX)) == amax_of(x));
    CHECK_FAILS(ctx, te_quantized_tensor_dequantize(given, TE_COLUMNWISE), "no columnwise data");
    CHECK_FAILS(ctx, te_quantized_tensor_dequantize(given, (te_direction)2), "direction 2");
    te_tensor *ids = te_tensor_full(ctx, TE_I64, 2, (int64_t[]){2, 2}, 1);
    CHECK_FAILS(ctx, te_quantized_tensor_new(ids, &f, NULL), "int64");
    CHECK_FAILS(ctx, te_quantized_tensor_new(x, NULL, NULL), "no quantizer");
    CHECK(!te_quantized_tensor_new(NULL, &f, NULL) && !te_quantized_tensor_part(NULL, TE_ROWWISE, TE_STORED_DATA));
    te_quantized_tensor *held = te_quantized_tensor_retain(q);
    te_quantized_tensor *all[] = {q, held, same, given, NULL};
    for (int i = 0; i < 5; i++) te_quantized_tensor_release(all[i]);
    te_tensor_release(a), te_tensor_release(b), te_tensor_release(x), te_tensor_release(ids);
    te_recipe_release(recipe);
}

static void test_parameters(te_context *ctx)
{
    te_recipe *recipe = te_recipe_new(ctx, "MXFP8BlockScaling", NULL, 0);
    te_product *fc = te_product_new(ctx, "fc");
    te_tensor *x = filled(ctx, ROWS, IN, 14), *w = filled(ctx, OUT, IN, 15), *dy = filled(ctx, ROWS, OUT, 16);
    te_tensor *p = te_product_parameter(fc, recipe, w, true);
    CHECK_MSG(p && te_tensor_set_requires_grad(p, true) == TE_OK, "%s", te_context_error(ctx));
    CHECK(te_tensor_quantized_part(p, TE_COLUMNWISE, TE_STORED_DATA) && !te_tensor_quantized_part(w, TE_ROWWISE, TE_STORED_DATA));
    te_autocast scope = under(recipe);
    CHECK(te_autocast_begin(ctx, &scope) == TE_OK);
    te_tensor *y = linear(fc, x, p);
    expect_product(recipe, x, w, y);
    CHECK(te_autocast_end(ctx) == TE_OK && te_backward(y, dy, false) == TE_OK && te_tensor_grad(p));
    float values[OUT * IN], back[OUT * IN];
    for (int i = 0; i < OUT * IN; i++) values[i] = (float)(i % 7) - 3;
    CHECK(te_tensor_write(p, TE_F32, values) == TE_OK && te_tensor_read(p, TE_F32, back) == TE_OK);
    CHECK(memcmp(values, back, sizeof values) == 0); /* exact in E4M3 */
    CHECK_FAILS(ctx, te_product_parameter(fc, NULL, w, true), "are needed");
    CHECK(!te_product_parameter(NULL, NULL, NULL, true));
    te_context *elsewhere = te_context_open(NULL);
    te_tensor *foreign = filled(elsewhere, OUT, IN, 1);
    CHECK_FAILS(ctx, te_product_parameter(fc, recipe, foreign, true), "another context");
    te_tensor_release(foreign);
    te_context_release(elsewhere);
    te_tensor *all[] = {x, w, dy, p, y};
    for (int i = 0; i < 5; i++) te_tensor_release(all[i]);
    te_product_release(fc);
    te_recipe_release(recipe);
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

static void test_attention(te_context *ctx)
{
    te_recipe_option options[] = {{"fp8_dpa", 1, NULL}};
    te_recipe *recipe = te_recipe_new(ctx, "DelayedScaling", options, 1);
    te_product *dpa = te_product_new(ctx, "attention");
    te_tensor *qkv = filled(ctx, 16, 3 * 32, 17), *y[2] = {NULL};
    const te_op *op = te_op_find(ctx, "self_attention");
    te_arg args[] = {{.kind = TE_ARG_TENSOR, .as.tensor = qkv}};
    te_autocast scope = under(recipe);
    CHECK(te_op_run(ctx, op, args, 1, &y[0], 1) == TE_OK && te_autocast_begin(ctx, &scope) == TE_OK);
    CHECK_MSG(te_product_run(dpa, op, args, 1, &y[1], 1) == TE_OK, "%s", te_context_error(ctx));
    CHECK(first(te_product_amax_history(dpa, TE_ROLE_INPUT)) == amax_of(qkv) && !te_product_scale(dpa, TE_ROLE_WEIGHT));
    CHECK(te_autocast_end(ctx) == TE_OK && first(te_product_scale(dpa, TE_ROLE_INPUT)) == (float)(448.0 / (double)amax_of(qkv)));
    CHECK(memcmp(te_tensor_data(y[0]), te_tensor_data(y[1]), 16 * 32 * 4) != 0);
    te_tensor_release(qkv), te_tensor_release(y[0]), te_tensor_release(y[1]);
    te_product_release(dpa);
    te_recipe_release(recipe);
}

/* Attention that hands its bytes on to its projection, and a weight stored quantized, in one group: what it keeps alive itself, and how
 * near it is to the same without a recipe. */
static void test_group(te_context *ctx)
{
    te_recipe_option options[] = {{"fp8_mha", 1, NULL}};
    te_recipe *recipe = te_recipe_new(ctx, "Float8CurrentScaling", options, 1);
    te_product *dpa = te_product_new(ctx, "dpa"), *proj = te_product_new(ctx, "proj");
    te_group *group = te_group_new(ctx), *other = NULL;
    te_tensor *qkv = filled(ctx, 16, 3 * 32, 17), *w = filled(ctx, 24, 32, 18), *y[2] = {NULL}, *dy = filled(ctx, 16, 24, 19);
    te_tensor *p = te_product_parameter(proj, recipe, w, true), *in[] = {qkv, p}, *plain[] = {qkv, w};
    int x = te_group_input(group, false), weight = te_group_input(group, true), h, out;
    CHECK(te_product_apply(dpa, group, te_op_find(ctx, "self_attention"), &x, 1, NULL, 0, &h) == TE_OK);
    CHECK(te_product_apply(proj, group, te_op_find(ctx, "linear"), (int[]){h, weight}, 2, NULL, 0, &out) == TE_OK);
    CHECK(te_group_output(group, out) == TE_OK);
    CHECK_FAILS(ctx, te_product_apply(proj, group, te_op_find(ctx, "gelu"), &h, 1, NULL, 0, &out) == TE_OK, "gelu is no linear");
    CHECK_FAILS(ctx, te_product_apply(proj, group, NULL, &h, 1, NULL, 0, &out) == TE_OK, "NULL is no linear");
    CHECK(out == TE_NO_VALUE && te_product_apply(NULL, group, NULL, NULL, 0, NULL, 0, &out) == TE_ERROR_ARGUMENT);
    CHECK(te_product_apply(proj, other, NULL, NULL, 0, NULL, 0, &out) == TE_ERROR_ARGUMENT);
    te_product_release(dpa), te_product_release(proj);
    te_autocast scope = under(recipe);
    CHECK(te_group_run(group, plain, &y[0]) == TE_OK && te_tensor_set_requires_grad(p, true) == TE_OK);
    CHECK(te_autocast_begin(ctx, &scope) == TE_OK);
    te_recipe_release(recipe); /* the scope holds it */
    CHECK_MSG(te_group_run(group, in, &y[1]) == TE_OK, "%s", te_context_error(ctx));
    CHECK(te_autocast_end(ctx) == TE_OK && te_backward(y[1], dy, false) == TE_OK && te_tensor_grad(p));
    double error = 0, size = 0;
    for (int i = 0; i < 16 * 24; i++) {
        double a = ((float *)te_tensor_data(y[0]))[i], b = ((float *)te_tensor_data(y[1]))[i];
        error += (a - b) * (a - b), size += a * a;
    }
    CHECK_MSG(error > 0 && error < 0.01 * size, "error %g of %g", error, size);
    te_group_release(group);
    te_tensor *all[] = {qkv, w, p, y[0], y[1], dy};
    for (int i = 0; i < 6; i++) te_tensor_release(all[i]);
}

/* --- scripts ------------------------------------------------------------------------------------------------------ */

/* A module that has run under te.autocast is called within a scope of C: neither reaches into the other. */
static void test_script(void)
{
    static const char script[] = "te = require 'te' fc = te.Linear(64, 48) recipe = te.recipe.MXFP8BlockScaling{}\n"
                                 "function plain(x) return te.no_grad(fc, x) end\n"
                                 "function low(x) return te.no_grad(te.autocast, {recipe = recipe}, fc, x) end";
    tetrain *rt = tetrain_open(NULL);
    te_context *ctx = tetrain_context(rt);
    te_recipe *recipe = te_recipe_new(ctx, "Float8CurrentScaling", NULL, 0);
    te_product *product = te_product_new(ctx, NULL);
    te_autocast scope = under(recipe);
    te_tensor *x = filled(ctx, ROWS, IN, 20), *w = filled(ctx, OUT, IN, 21), *y[6] = {NULL};
    CHECK(tetrain_run_string(rt, script, sizeof script - 1, "=script") == TETRAIN_OK);
    CHECK(tetrain_call(rt, "low", &x, 1, &y[0], 1) == TETRAIN_OK && tetrain_call(rt, "plain", &x, 1, &y[1], 1) == TETRAIN_OK);
    CHECK(te_autocast_begin(ctx, &scope) == TE_OK);
    y[2] = linear(product, x, w);
    CHECK(tetrain_call(rt, "plain", &x, 1, &y[3], 1) == TETRAIN_OK && tetrain_call(rt, "low", &x, 1, &y[4], 1) == TETRAIN_OK);
    y[5] = linear(product, x, w);
    CHECK(te_autocast_end(ctx) == TE_OK);
    for (int i = 0; i < 6; i++) CHECK(y[i] && te_tensor_numel(y[i]) == ROWS * OUT);
    size_t bytes = ROWS * OUT * sizeof(float);
    CHECK(memcmp(te_tensor_data(y[0]), te_tensor_data(y[1]), bytes) != 0);
    CHECK(memcmp(te_tensor_data(y[1]), te_tensor_data(y[3]), bytes) == 0 && memcmp(te_tensor_data(y[0]), te_tensor_data(y[4]), bytes) == 0);
    CHECK(memcmp(te_tensor_data(y[2]), te_tensor_data(y[5]), bytes) == 0);
    for (int i = 0; i < 6; i++) te_tensor_release(y[i]);
    te_tensor_release(x), te_tensor_release(w);
    te_product_release(product);
    te_recipe_release(recipe);
    tetrain_close(rt);
}

/* --- every allocation fails in turn ------------------------------------------------------------------------------- */

static bool step(te_context *ctx, te_tensor *x, te_tensor *w)
{
    te_recipe_option options[] = {{"amax_history_len", 4, NULL}};
    te_recipe *recipe = te_recipe_new(ctx, "DelayedScaling", options, 1);
    te_product *fc = te_product_new(ctx, "fc");
    te_autocast scope = under(recipe);
    int depth = te_autocast_depth(ctx);
    bool ok = recipe && fc && te_autocast_begin(ctx, &scope) == TE_OK;
    te_tensor *y = ok ? linear(fc, x, w) : NULL;
    ok = y && te_autocast_end(ctx) == TE_OK;
    te_autocast_unwind(ctx, depth);
    te_quantizer_fields fields = {.struct_size = sizeof fields};
    te_quantizer_defaults(&fields);
    te_quantized_tensor *q = ok ? te_quantized_tensor_new(x, &fields, NULL) : NULL;
    te_tensor *p = q ? te_product_parameter(fc, recipe, w, true) : NULL;
    te_quantized_tensor_release(q);
    te_tensor_release(p), te_tensor_release(y);
    te_product_release(fc);
    te_recipe_release(recipe);
    return p != NULL;
}

static void test_failing_allocations(void)
{
    bool reached = true;
    long n = 0;
    for (; reached && n < 5000; n++) {
        failing_memory f = {.countdown = -1};
        te_context_options options = {.struct_size = sizeof options, .threads = 1, .realloc = failing_memory_realloc, .realloc_user = &f};
        te_context *ctx = te_context_open(&options);
        te_tensor *x = filled(ctx, ROWS, IN, 1), *w = filled(ctx, OUT, IN, 2);
        CHECK(te_tensor_set_requires_grad(w, true) == TE_OK);
        f.countdown = n;
        bool ok = step(ctx, x, w);
        reached = f.countdown < 0;
        f.countdown = -1;
        CHECK_MSG(ok || strlen(te_context_error(ctx)) > 0, "allocation %ld failed without a message", n);
        CHECK_MSG(step(ctx, x, w), "after allocation %ld failed: %s", n, te_context_error(ctx));
        te_tensor_release(x), te_tensor_release(w);
        te_context_release(ctx);
        CHECK_MSG(f.live == 0, "allocation %ld: %zu bytes leaked", n, f.live);
    }
    CHECK_MSG(n > 20 && n < 5000, "%ld allocations", n);
}

int main(void)
{
    te_context *ctx = te_context_open(NULL);
    test_quantizers(ctx);
    test_option_mistakes(ctx);
    test_scopes(ctx);
    test_products(ctx);
    test_delayed(ctx, false);
    test_delayed(ctx, true);
    test_algorithms(ctx);
    test_custom(ctx);
    test_tensors(ctx);
    test_parameters(ctx);
    test_attention(ctx);
    test_group(ctx);
    te_context_release(ctx);
    test_script();
    test_failing_allocations();
    return TEST_END();
}
