/* test_recipe_public_tensors.c - with the functions of recipe.h alone: quantized tensors and parameters, attention,
 * groups; scopes of C beside those of scripts; every allocation failing in turn. */
#include "failing_context.h"
#include "recipe_public.h"

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
    CHECK(te_tensor_numel(parts[0][0]) == ROWS * IN && te_tensor_numel(parts[0][1]) == ROWS * IN / 32 && !parts[0][2] &&
          parts[1][0]);
    te_quantized_tensor *same = te_quantized_tensor_from_parts(ctx, &f, TE_F32, 2, (int64_t[]){ROWS, IN}, parts);
    te_tensor *a = te_quantized_tensor_dequantize(q, TE_ROWWISE), *b = te_quantized_tensor_dequantize(same, TE_ROWWISE);
    CHECK(a && b && memcmp(te_tensor_data(a), te_tensor_data(b), ROWS * IN * 4) == 0);
    for (int i = 0; i < ROWS * IN; i++)
        CHECK(fabsf(((float *)te_tensor_data(a))[i] - ((float *)te_tensor_data(x))[i]) <= 0.04f);
    CHECK_FAILS(ctx, te_quantized_tensor_from_parts(ctx, &f, TE_F32, 2, (int64_t[]){ROWS, IN + 1}, parts), "expected");
    CHECK_FAILS(ctx, te_quantized_tensor_from_parts(ctx, &f, TE_I32, 2, (int64_t[]){ROWS, IN}, parts), "int32");
    CHECK_FAILS(ctx, te_quantized_tensor_from_parts(ctx, &f, TE_F32, 99, (int64_t[]){ROWS, IN}, parts),
                "99 dimensions");
    te_tensor *factors = parts[TE_COLUMNWISE][TE_STORED_SCALE_INV];
    parts[TE_COLUMNWISE][TE_STORED_SCALE_INV] = NULL;
    CHECK_FAILS(ctx, te_quantized_tensor_from_parts(ctx, &f, TE_F32, 2, (int64_t[]){ROWS, IN}, parts), "got none");
    parts[TE_COLUMNWISE][TE_STORED_SCALE_INV] = factors;
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

static te_answer leave(void *user, const te_operand_role *operand, te_quantizer_fields *fields, te_recipe **recipe)
{
    (void)user, (void)operand, (void)fields, (void)recipe;
    return TE_ANSWER_HIGH_PRECISION;
}

static void test_parameters(te_context *ctx)
{
    te_recipe *recipe = te_recipe_new(ctx, "MXFP8BlockScaling", NULL, 0);
    te_product *fc = te_product_new(ctx, "fc");
    te_tensor *x = filled(ctx, ROWS, IN, 14), *w = filled(ctx, OUT, IN, 15), *dy = filled(ctx, ROWS, OUT, 16);
    te_tensor *p = te_product_parameter(fc, recipe, w, true);
    CHECK_MSG(p && te_tensor_set_requires_grad(p, true) == TE_OK, "%s", te_context_error(ctx));
    CHECK(te_tensor_quantized_part(p, TE_COLUMNWISE, TE_STORED_DATA) &&
          !te_tensor_quantized_part(w, TE_ROWWISE, TE_STORED_DATA));
    te_autocast scope = under(recipe);
    CHECK(te_autocast_begin(ctx, &scope) == TE_OK);
    te_tensor *y = linear(fc, x, p);
    expect_product(recipe, x, w, y);
    CHECK(te_autocast_end(ctx) == TE_OK && te_backward(y, dy, false) == TE_OK && te_tensor_grad(p));
    float values[OUT * IN], back[OUT * IN];
    for (int i = 0; i < OUT * IN; i++) values[i] = (float)(i % 7) - 3;
    CHECK(te_tensor_write(p, TE_F32, values) == TE_OK && te_tensor_read(p, TE_F32, back) == TE_OK);
    CHECK(memcmp(values, back, sizeof values) == 0); /* exact in E4M3 */
    te_recipe *plain = te_recipe_custom(ctx, leave, NULL, NULL, 0);
    te_tensor *q = te_product_parameter(fc, plain, w, true); /* without a quantizer, a leaf like any other */
    CHECK(q && q != w && !te_tensor_quantized_part(q, TE_ROWWISE, TE_STORED_DATA) &&
          memcmp(te_tensor_data(q), te_tensor_data(w), OUT * IN * sizeof(float)) == 0);
    CHECK(te_tensor_set_requires_grad(q, true) == TE_OK);
    te_tensor_release(q);
    te_recipe_release(plain);
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
    CHECK(te_autocast_end(ctx) == TE_OK &&
          first(te_product_scale(dpa, TE_ROLE_INPUT)) == (float)(448.0 / (double)amax_of(qkv)));
    CHECK(memcmp(te_tensor_data(y[0]), te_tensor_data(y[1]), 16 * 32 * 4) != 0);
    te_tensor_release(qkv), te_tensor_release(y[0]), te_tensor_release(y[1]);
    te_product_release(dpa);
    te_recipe_release(recipe);
}

/* Attention that hands its bytes on to its projection, and a weight stored quantized, in one group: what it keeps alive
 * itself, and how near it is to the same without a recipe. */
static void test_group(te_context *ctx)
{
    te_recipe_option options[] = {{"fp8_mha", 1, NULL}};
    te_recipe *recipe = te_recipe_new(ctx, "Float8CurrentScaling", options, 1);
    te_product *dpa = te_product_new(ctx, "dpa"), *proj = te_product_new(ctx, "proj");
    te_group *group = te_group_new(ctx), *other = NULL;
    te_tensor *qkv = filled(ctx, 16, 3 * 32, 17), *w = filled(ctx, 24, 32, 18), *y[2] = {NULL},
              *dy = filled(ctx, 16, 24, 19);
    te_tensor *p = te_product_parameter(proj, recipe, w, true), *in[] = {qkv, p}, *plain[] = {qkv, w};
    int x = te_group_input(group, false), weight = te_group_input(group, true), h, out;
    CHECK(te_product_apply(dpa, group, te_op_find(ctx, "self_attention"), &x, 1, NULL, 0, &h) == TE_OK);
    CHECK(te_product_apply(proj, group, te_op_find(ctx, "linear"), (int[]){h, weight}, 2, NULL, 0, &out) == TE_OK);
    CHECK(te_group_output(group, out) == TE_OK);
    CHECK_FAILS(ctx, te_product_apply(proj, group, te_op_find(ctx, "gelu"), &h, 1, NULL, 0, &out) == TE_OK,
                "gelu is no linear");
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
    CHECK(tetrain_call(rt, "low", &x, 1, &y[0], 1) == TETRAIN_OK &&
          tetrain_call(rt, "plain", &x, 1, &y[1], 1) == TETRAIN_OK);
    CHECK(te_autocast_begin(ctx, &scope) == TE_OK);
    y[2] = linear(product, x, w);
    CHECK(tetrain_call(rt, "plain", &x, 1, &y[3], 1) == TETRAIN_OK &&
          tetrain_call(rt, "low", &x, 1, &y[4], 1) == TETRAIN_OK);
    y[5] = linear(product, x, w);
    CHECK(te_autocast_end(ctx) == TE_OK);
    for (int i = 0; i < 6; i++) CHECK(y[i] && te_tensor_numel(y[i]) == ROWS * OUT);
    size_t bytes = ROWS * OUT * sizeof(float);
    CHECK(memcmp(te_tensor_data(y[0]), te_tensor_data(y[1]), bytes) != 0);
    CHECK(memcmp(te_tensor_data(y[1]), te_tensor_data(y[3]), bytes) == 0 &&
          memcmp(te_tensor_data(y[0]), te_tensor_data(y[4]), bytes) == 0);
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
        failing_memory f;
        te_context *ctx = failing_context_open(&f, 1);
        te_tensor *x = filled(ctx, ROWS, IN, 1), *w = filled(ctx, OUT, IN, 2);
        CHECK(te_tensor_set_requires_grad(w, true) == TE_OK);
        f.countdown = n;
        bool ok = step(ctx, x, w);
        reached = failing_memory_stop(&f);
        CHECK_MSG(ok || strlen(te_context_error(ctx)) > 0, "allocation %ld failed without a message", n);
        CHECK_MSG(step(ctx, x, w), "after allocation %ld failed: %s", n, te_context_error(ctx));
        te_tensor_release(x), te_tensor_release(w);
        failing_context_close(ctx, &f, n);
    }
    CHECK_MSG(n > 20 && n < 5000, "%ld allocations", n);
}

int main(void)
{
    te_context *ctx = te_context_open(NULL);
    test_tensors(ctx);
    test_parameters(ctx);
    test_attention(ctx);
    test_group(ctx);
    te_context_release(ctx);
    test_script();
    test_failing_allocations();
    return TEST_END();
}
