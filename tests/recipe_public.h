/* recipe_public.h - what the tests of recipe.h share: operands, a product of linear, the product of what bytes stand
 * for. */
#ifndef TE_TEST_RECIPE_PUBLIC_H
#define TE_TEST_RECIPE_PUBLIC_H

#include "test.h"

#include <tetrain/tetrain.h>

enum { ROWS = 32, IN = 64, OUT = 48 };

static inline te_tensor *filled(te_context *ctx, int64_t rows, int64_t cols, uint64_t seed)
{
    te_tensor *t = te_tensor_empty(ctx, TE_F32, 2, (int64_t[]){rows, cols});
    for (int64_t i = 0; t && i < rows * cols; i++) ((float *)te_tensor_data(t))[i] = (float)test_uniform(&seed, -1, 1);
    return t;
}

static inline float amax_of(te_tensor *t)
{
    float most = 0;
    for (int64_t i = 0; i < te_tensor_numel(t); i++) most = fmaxf(most, fabsf(((float *)te_tensor_data(t))[i]));
    return most;
}

static inline te_autocast under(te_recipe *recipe)
{
    return (te_autocast){.struct_size = sizeof(te_autocast), .recipe = recipe};
}

static inline te_tensor *linear(te_product *product, te_tensor *x, te_tensor *w)
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

static inline float first(te_tensor *t) { return ((float *)te_tensor_data(t))[0]; }

static inline te_quantizer_fields quantizer_of(te_recipe *recipe, te_role role, bool attention, bool *quantized)
{
    te_quantizer_fields f = {.struct_size = sizeof f};
    te_operand_role operand = {role, attention, NULL};
    CHECK(te_recipe_quantizer(recipe, &operand, &f, quantized) == TE_OK);
    return f;
}

/* y = x W^T of what the recipe's bytes stand for. */
static inline void expect_product(te_recipe *recipe, te_tensor *x, te_tensor *w, te_tensor *y)
{
    bool yes;
    te_quantizer_fields fx = quantizer_of(recipe, TE_ROLE_INPUT, false, &yes),
                        fw = quantizer_of(recipe, TE_ROLE_WEIGHT, false, &yes);
    te_quantized_tensor *qx = te_quantized_tensor_new(x, &fx, NULL), *qw = te_quantized_tensor_new(w, &fw, NULL);
    te_tensor *dx = te_quantized_tensor_dequantize(qx, TE_ROWWISE),
              *dw = te_quantized_tensor_dequantize(qw, TE_ROWWISE);
    CHECK(dx && dw && y);
    if (!dx || !dw || !y) return;
    const float *a = te_tensor_data(dx), *b = te_tensor_data(dw), *c = te_tensor_data(y);
    for (int i = 0; i < ROWS; i++)
        for (int o = 0; o < OUT; o++) {
            double sum = 0, size = 0;
            for (int k = 0; k < IN; k++)
                sum += (double)a[i * IN + k] * b[o * IN + k], size += fabs((double)a[i * IN + k] * b[o * IN + k]);
            CHECK_MSG(fabs(sum - c[i * OUT + o]) <= 1e-5 * size, "row %d column %d: %g, not %g", i, o,
                      (double)c[i * OUT + o], sum);
        }
    te_tensor_release(dx), te_tensor_release(dw);
    te_quantized_tensor_release(qx), te_quantized_tensor_release(qw);
}

#endif
