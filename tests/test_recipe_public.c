/* test_recipe_public.c - recipes with the functions of te.h alone: what quantizers recipes have, scopes, steps of
 * delayed scaling against the rule written down again, products against what their quantized operands say, mistakes. */
#include "recipe_public.h"

/* --- recipes and quantizers --------------------------------------------------------------------------------------- */

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
            te_recipe *same =
                chosen || o->type != TE_OPTION_CHOICE ? te_recipe_new(ctx, name, &given, 1) : te_recipe_retain(recipe);
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
    CHECK(n > 0 && !te_recipe_name_at(-1) && !te_recipe_option_at("None", 0));

    te_recipe *r = te_recipe_new(ctx, "NVFP4BlockScaling", NULL, 0);
    te_quantizer_fields f = quantizer_of(r, TE_ROLE_WEIGHT, false, &yes);
    CHECK(f.block_rows == 16 && f.block_cols == 16 && f.replicated && !f.hadamard && !f.stochastic &&
          strcmp(f.scale, "float8_e4m3") == 0);
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
    te_recipe_option o = {"margin", 0.5, NULL}, rht[] = {{"nvfp4_4over6", 0, "all"}},
                     twice[] = {{"x_block_scaling_dim", 2, NULL}};
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
    CHECK_FAILS(ctx, te_recipe_new(ctx, "DelayedScaling", NULL, 1), "1 options at NULL");
    CHECK_FAILS(ctx, te_recipe_new(ctx, "DelayedScaling", &o, -1), "-1 options");
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
    CHECK_FAILS(ctx, te_recipe_quantizer(mx, &(te_operand_role){(te_role)7, false, NULL}, &f, &yes) == TE_OK,
                "there is no role 7");
    f.struct_size = 0;
    CHECK_FAILS(ctx, te_recipe_quantizer(mx, &(te_operand_role){TE_ROLE_INPUT, false, NULL}, &f, &yes) == TE_OK,
                "te_recipe_quantizer: struct_size: 0");
    f.struct_size = sizeof f;
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
    CHECK(te_autocast_begin(ctx, &inner) == TE_OK && compute_dtype(ctx) == TE_DTYPE_COUNT &&
          te_autocast_depth(ctx) == 3);
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

/* A backward that fails where it has come by a product already leaves nothing to the next one. */
static void test_failed_backward(te_product *fc, const te_autocast *scope, te_tensor *w, te_tensor *dy)
{
    te_context *ctx = te_tensor_context(w);
    te_tensor *x = filled(ctx, ROWS, IN, 9), *inner = NULL;
    te_arg arg = {.kind = TE_ARG_TENSOR, .as.tensor = x};
    CHECK(te_tensor_set_requires_grad(x, true) == TE_OK);
    CHECK(te_op_run(ctx, te_op_find(ctx, "gelu"), &arg, 1, &inner, 1) == TE_OK);
    CHECK(te_autocast_begin(ctx, scope) == TE_OK);
    te_tensor *y = linear(fc, inner, w);
    CHECK(te_autocast_end(ctx) == TE_OK);
    te_tensor_written(x);
    float before = first(te_product_scale(fc, TE_ROLE_GRAD_OUTPUT));
    CHECK_FAILS(ctx, te_backward(y, dy, false) == TE_OK, "changed in place");
    CHECK(first(te_product_amax_history(fc, TE_ROLE_GRAD_OUTPUT)) == 0);
    CHECK(first(te_product_scale(fc, TE_ROLE_GRAD_OUTPUT)) == before);
    te_tensor_release(x), te_tensor_release(inner), te_tensor_release(y);
}

/* A step ends with its outermost scope, also where one inside it switches the recipe off for a while. */
static void test_off_inside(te_product *fc, te_product *other, const te_autocast *scope, te_tensor *x, te_tensor *w)
{
    te_context *ctx = te_tensor_context(w);
    te_autocast off = {.struct_size = sizeof off, .disabled = true};
    CHECK(te_autocast_begin(ctx, scope) == TE_OK);
    te_tensor_release(linear(fc, x, w));
    CHECK(te_autocast_begin(ctx, &off) == TE_OK && te_autocast_begin(ctx, scope) == TE_OK);
    te_tensor_release(linear(other, x, w));
    CHECK(te_autocast_end(ctx) == TE_OK && te_autocast_end(ctx) == TE_OK);
    CHECK(first(te_product_amax_history(fc, TE_ROLE_INPUT)) == 99 &&
          first(te_product_scale(other, TE_ROLE_INPUT)) == 1);
    CHECK(te_autocast_end(ctx) == TE_OK);
    CHECK(first(te_product_amax_history(fc, TE_ROLE_INPUT)) == 0 &&
          first(te_product_scale(other, TE_ROLE_INPUT)) == 224.0f / 99);
}

/* Two steps with amaxes that grow, by an operation or by a group: factors are those of the rule, and state can be taken
 * elsewhere. */
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
        CHECK(te_tensor_numel(te_product_amax_history(fc, TE_ROLE_INPUT)) == 4 && history[0] == 0 &&
              history[3] == amax_of(x));
        te_tensor_release(x), te_tensor_release(y);
    }
    te_context_set_grad_enabled(ctx, false); /* without gradients nothing is collected */
    te_tensor *large = te_tensor_full(ctx, TE_F32, 2, (int64_t[]){ROWS, IN}, 99);
    float before = first(te_product_scale(fc, TE_ROLE_INPUT));
    CHECK(te_autocast_begin(ctx, &scope) == TE_OK);
    te_tensor_release(linear(fc, large, w));
    CHECK(te_autocast_end(ctx) == TE_OK && first(te_product_scale(fc, TE_ROLE_INPUT)) == before);
    /* … but here */
    te_autocast calibrating = {.struct_size = sizeof calibrating, .disabled = true, .calibrating = true};
    calibrating.recipe = recipe;
    CHECK(te_autocast_begin(ctx, &calibrating) == TE_OK);
    te_tensor_release(linear(fc, large, w));
    CHECK(te_autocast_end(ctx) == TE_OK && first(te_product_scale(fc, TE_ROLE_INPUT)) == 224.0f / 99);
    te_context_set_grad_enabled(ctx, true);
    /* a step that fails leaves nothing to the next one */
    CHECK(te_autocast_begin(ctx, &scope) == TE_OK);
    te_tensor_release(linear(fc, large, w));
    CHECK(first(te_product_amax_history(fc, TE_ROLE_INPUT)) == 99);
    CHECK(first(te_product_amax_history(fc, TE_ROLE_WEIGHT)) == amax_of(w));
    CHECK(te_autocast_unwind(ctx, 0) == TE_OK && first(te_product_amax_history(fc, TE_ROLE_INPUT)) == 0);
    CHECK(first(te_product_amax_history(fc, TE_ROLE_WEIGHT)) == 0);
    test_failed_backward(fc, &scope, w, dy);
    test_off_inside(fc, other, &scope, large, w);

    te_tensor *scale = te_product_scale(fc, TE_ROLE_INPUT), *history = te_product_amax_history(fc, TE_ROLE_INPUT);
    CHECK(te_product_set_state(other, TE_ROLE_INPUT, scale, history) == TE_OK);
    CHECK(first(te_product_scale(other, TE_ROLE_INPUT)) == 224.0f / 99 &&
          te_product_scale(other, TE_ROLE_INPUT) != scale);
    CHECK_FAILS(ctx, te_product_set_state(other, TE_ROLE_INPUT, history, history) == TE_OK, "expected one number");
    CHECK_FAILS(ctx, te_product_set_state(other, TE_ROLE_INPUT, NULL, history) == TE_OK, "scale: expected a float32");
    CHECK_FAILS(ctx, te_product_set_state(other, TE_ROLE_INPUT, scale, w) == TE_OK, "amax_history: expected");
    CHECK_FAILS(ctx, te_product_set_state(other, (te_role)3, scale, history) == TE_OK, "no role 3");
    te_tensor *none = te_tensor_full(ctx, TE_F32, 1, (int64_t[]){1}, 0);
    CHECK_FAILS(ctx, te_product_set_state(other, TE_ROLE_INPUT, none, history) == TE_OK, "positive and finite");
    te_tensor_release(none);
    CHECK(first(te_product_scale(other, TE_ROLE_INPUT)) == 224.0f / 99);
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
    CHECK(te_autocast_depth(ctx) == 0 && te_context_skipped_amaxes(ctx, &skipped[1]) == TE_OK &&
          skipped[1] == skipped[0] + 1);
    CHECK(first(te_product_scale(fc, TE_ROLE_INPUT)) == scale);
    for (int r = TE_ROLE_INPUT; r <= TE_ROLE_WEIGHT; r++) CHECK(first(te_product_amax_history(fc, (te_role)r)) == 0);
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
    CHECK(te_product_scale(fc, TE_ROLE_GRAD_OUTPUT) && !te_product_scale(fc, TE_ROLE_INPUT) &&
          te_autocast_end(ctx) == TE_OK);
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

/* Attention under a recipe from a function: quantized under fp8_dpa alone, and of its operands q, k and v. */
static void test_custom_attention(te_context *ctx)
{
    te_recipe_option dpa = {"fp8_dpa", 1, NULL};
    choices c = {.grads = te_recipe_new(ctx, "DelayedScaling", NULL, 0)};
    te_recipe *recipes[] = {te_recipe_custom(ctx, choose, &c, NULL, 0), te_recipe_custom(ctx, choose, &c, &dpa, 1)};
    for (int i = 0; i < 2; i++) {
        for (int r = 0; r < TE_ROLE_COUNT; r++) {
            te_quantizer_fields f = {.struct_size = sizeof f};
            bool yes = true;
            c.n = 0;
            te_operand_role operand = {(te_role)r, true, "dpa"};
            CHECK(te_recipe_quantizer(recipes[i], &operand, &f, &yes) == TE_OK);
            bool wanted = i == 1 && r == TE_ROLE_INPUT;
            CHECK(yes == wanted && c.n == wanted);
        }
    }
    te_tensor *qkv = filled(ctx, 16, 3 * 32, 17), *y[2] = {NULL};
    te_arg args[] = {{.kind = TE_ARG_TENSOR, .as.tensor = qkv}};
    const te_op *op = te_op_find(ctx, "self_attention");
    te_product *attention = te_product_new(ctx, "dpa");
    te_autocast scope = under(recipes[0]);
    CHECK(te_op_run(ctx, op, args, 1, &y[0], 1) == TE_OK && te_autocast_begin(ctx, &scope) == TE_OK);
    CHECK_MSG(te_product_run(attention, op, args, 1, &y[1], 1) == TE_OK, "%s", te_context_error(ctx));
    CHECK(te_autocast_end(ctx) == TE_OK);
    CHECK(y[1] && memcmp(te_tensor_data(y[0]), te_tensor_data(y[1]), 16 * 32 * sizeof(float)) == 0);
    te_tensor_release(qkv), te_tensor_release(y[0]), te_tensor_release(y[1]);
    te_product_release(attention);
    te_recipe_release(recipes[0]), te_recipe_release(recipes[1]), te_recipe_release(c.grads);
}

typedef struct named { te_recipe *input, *others; } named;

static te_answer name_by_role(void *user, const te_operand_role *operand, te_quantizer_fields *fields,
                              te_recipe **recipe)
{
    (void)fields;
    *recipe = operand->role == TE_ROLE_INPUT ? ((named *)user)->input : ((named *)user)->others;
    return TE_ANSWER_RECIPE;
}

/* Options of the recipes that a custom one names. */
static void test_named(te_context *ctx)
{
    te_recipe_option lengths[] = {{"amax_history_len", 2, NULL}, {"amax_history_len", 5, NULL}};
    te_recipe_option override = {"backward_override", 0, "dequantized"};
    named n = {te_recipe_new(ctx, "DelayedScaling", &lengths[0], 1),
               te_recipe_new(ctx, "DelayedScaling", &lengths[1], 1)};
    te_recipe *recipe = te_recipe_custom(ctx, name_by_role, &n, NULL, 0);
    te_product *fc = te_product_new(ctx, "fc"), *next = te_product_new(ctx, "next");
    te_tensor *x = filled(ctx, ROWS, IN, 11), *w = filled(ctx, OUT, IN, 12);
    te_autocast scope = under(recipe);
    CHECK(te_autocast_begin(ctx, &scope) == TE_OK);
    te_tensor_release(linear(fc, x, w));
    CHECK(te_tensor_numel(te_product_amax_history(fc, TE_ROLE_INPUT)) == 2 &&
          te_tensor_numel(te_product_amax_history(fc, TE_ROLE_WEIGHT)) == 5 && te_autocast_end(ctx) == TE_OK);
    te_recipe_release(n.input), te_recipe_release(n.others);
    n.input = te_recipe_new(ctx, "Float8CurrentScaling", &override, 1);
    n.others = te_recipe_new(ctx, "MXFP8BlockScaling", NULL, 0);
    CHECK(te_autocast_begin(ctx, &scope) == TE_OK);
    CHECK_FAILS(ctx, linear(next, x, w), "the recipes for input and weight differ in it");
    te_recipe_release(n.others);
    n.others = te_recipe_new(ctx, "MXFP8BlockScaling", &override, 1);
    te_tensor *y = linear(next, x, w);
    CHECK_MSG(y, "%s", te_context_error(ctx));
    CHECK(te_autocast_end(ctx) == TE_OK);
    te_recipe_release(n.input), te_recipe_release(n.others);
    te_tensor_release(x), te_tensor_release(w), te_tensor_release(y);
    te_product_release(fc), te_product_release(next);
    te_recipe_release(recipe);
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
    test_custom_attention(ctx);
    test_named(ctx);
    te_context_release(ctx);
    return TEST_END();
}
