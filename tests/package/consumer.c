/* consumer.c - another project's program, in the common part of C and C++. */
#include <tetrain/tetrain.h>

#include <stdio.h>
#include <string.h>

/* A scope of low precision: the same numbers to three bits of fraction. */
static int has_recipes(te_context *ctx)
{
    const int64_t shape[] = {16, 32};
    te_autocast   scope;
    te_arg        args[2];
    te_tensor *a = te_tensor_full(ctx, TE_F32, 2, shape, 1.5), *b = te_tensor_full(ctx, TE_F32, 2, shape, 2), *y = NULL;
    te_recipe    *recipe = te_recipe_new(ctx, te_recipe_name_at(3), NULL, 0);
    te_product   *product = te_product_new(ctx, "fc");
    memset(&scope, 0, sizeof scope);
    memset(args, 0, sizeof args);
    scope.struct_size = sizeof scope;
    scope.recipe = recipe;
    args[0].kind = args[1].kind = TE_ARG_TENSOR;
    args[0].as.tensor = a;
    args[1].as.tensor = b;
    int good = te_autocast_begin(ctx, &scope) == TE_OK &&
               te_product_run(product, te_op_find(ctx, "linear"), args, 2, &y, 1) == TE_OK &&
               te_autocast_end(ctx) == TE_OK && ((float *)te_tensor_data(y))[7] == 96 &&
               te_autocast_end(ctx) == TE_ERROR_ARGUMENT;
    te_tensor_release(a);
    te_tensor_release(b);
    te_tensor_release(y);
    te_product_release(product);
    te_recipe_release(recipe);
    return good;
}

int main(void)
{
    const char  code[] = "local te = require 'te' x = te.ones {2, 3} * 2";
    tetrain    *rt = tetrain_open(NULL);
    int         good = rt && tetrain_run_string(rt, code, sizeof code - 1, "=consumer") == TETRAIN_OK;
    te_tensor  *x = good ? tetrain_get_tensor(rt, "x") : NULL;
    good = x && te_tensor_numel(x) == 6 && ((float *)te_tensor_data(x))[5] == 2 &&
           strcmp(tetrain_version(), te_version()) == 0;
    te_tensor_release(x);
    good = good && has_recipes(tetrain_context(rt));
    tetrain_close(rt);
    printf("%s\n", good ? "good" : "bad");
    return !good;
}
