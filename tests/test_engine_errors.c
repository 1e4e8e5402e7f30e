/* test_engine_errors.c - the engine without Lua: calls that are refused, and what their messages say. */
#include "test.h"

#include "core/fuser/group.h"
#include "core/ops/ops.h"
#include "tetrain/te.h"

/* What failed gives NULL, and whoever goes on with that gets an error. */
static void test_chains_of_failures(te_context *ctx, te_tensor *a)
{
    te_tensor *out = a;
    CHECK(te_op_run(ctx, te_op_find(ctx, "lineer"), NULL, 0, &out, 1) == TE_ERROR_ARGUMENT && !out);
    CHECK(strcmp(te_context_error(ctx), "no operation \"lineer\"") == 0);
    te_arg missing[] = {{.kind = TE_ARG_TENSOR}, {.kind = TE_ARG_TENSOR, .as.tensor = a}};
    CHECK(te_op_run(ctx, te_op_find(ctx, "add"), missing, 2, &out, 1) == TE_ERROR_ARGUMENT);
    CHECK(te_op_run(ctx, te_op_find(ctx, "exp"), missing, 1, &out, 1) == TE_ERROR_ARGUMENT);
    for (int i = 0; i < 4; i++) { /* a number in place of dimensions */
        te_arg with_dim[] = {{.kind = TE_ARG_TENSOR, .as.tensor = a},
                             {.kind = TE_ARG_NUMBER, .as.number = (double[]){1.5, 1e300, NAN, -0.5}[i]}};
        CHECK(te_op_run(ctx, te_op_find(ctx, "sum"), with_dim, 2, &out, 1) == TE_ERROR_ARGUMENT);
        CHECK_MSG(strstr(te_context_error(ctx), "must be whole"), "%s", te_context_error(ctx));
    }
    CHECK(te_op_run(ctx, te_op_find(ctx, "softmax"), (te_arg[]){{.kind = TE_ARG_NUMBER}}, 1, &out, 1) ==
          TE_ERROR_ARGUMENT);
    CHECK(te_op_run(ctx, te_op_find(ctx, "exp"), NULL, 1, &out, 1) == TE_ERROR_ARGUMENT);
    te_arg lists[] = {{.kind = TE_ARG_TENSORS, .n = 2, .as.tensors = (te_tensor *[]){a, NULL}},
                      {.kind = TE_ARG_TENSORS, .n = 1},
                      {.kind = TE_ARG_TENSORS, .n = -1, .as.tensors = &a}};
    for (int i = 0; i < 3; i++)
        CHECK(te_op_run(ctx, te_op_find(ctx, "cat"), &lists[i], 1, &out, 1) == TE_ERROR_ARGUMENT);
    te_arg shapes[] = {{.kind = TE_ARG_TENSOR, .as.tensor = a},
                       {.kind = TE_ARG_INTS, .n = -1, .as.ints = (int64_t[]){1}}};
    CHECK(te_op_run(ctx, te_op_find(ctx, "view"), shapes, 2, &out, 1) == TE_ERROR_ARGUMENT);
    shapes[1] = (te_arg){.kind = TE_ARG_INTS, .n = 1};
    CHECK(te_op_run(ctx, te_op_find(ctx, "view"), shapes, 2, &out, 1) == TE_ERROR_ARGUMENT);
    shapes[1] = (te_arg){.kind = TE_ARG_TEXT};
    CHECK(te_op_run(ctx, te_op_find(ctx, "gelu"), shapes, 2, &out, 1) == TE_ERROR_ARGUMENT && !out);
    te_arg chosen[] = {{.kind = TE_ARG_TENSOR, .as.tensor = a}, {.kind = TE_ARG_NUMBER}, {.kind = TE_ARG_NUMBER}};
    for (int i = 0; i < 4; i++) { /* no such choice, truth, or dtype */
        chosen[1].as.number = (double[]){2, -1, 7, 1e18}[i];
        CHECK(te_op_run(ctx, te_op_find(ctx, "gelu"), chosen, 2, &out, 1) == TE_ERROR_ARGUMENT && !out);
        CHECK_MSG(strstr(te_context_error(ctx), "from 0 to 1 for tanh|none"), "%s", te_context_error(ctx));
        chosen[2].as.number = chosen[1].as.number;
        chosen[1].as.number = 0;
        CHECK(te_op_run(ctx, te_op_find(ctx, "sum"), chosen, 3, &out, 1) == TE_ERROR_ARGUMENT && !out);
        CHECK_MSG(strstr(te_context_error(ctx), "keepdim must be from 0 to 1, not"), "%s", te_context_error(ctx));
        chosen[1].as.number = chosen[2].as.number < 0 ? -1 : TE_DTYPE_COUNT + i;
        CHECK(te_op_run(ctx, te_op_find(ctx, "cast"), chosen, 2, &out, 1) == TE_ERROR_ARGUMENT && !out);
    }
    te_tensor *scalar = te_tensor_full(ctx, TE_F32, 0, NULL, 1); /* a shape of no dimensions needs no list */
    te_arg none[] = {{.kind = TE_ARG_TENSOR, .as.tensor = scalar}, {.kind = TE_ARG_INTS}};
    CHECK(te_op_run(ctx, te_op_find(ctx, "reshape"), none, 2, &out, 1) == TE_OK && te_tensor_ndim(out) == 0);
    te_tensor_release(out);
    te_tensor_release(scalar);
    double number;
    CHECK(te_backward(NULL, NULL, false) == TE_ERROR_ARGUMENT &&
          te_tensor_read(NULL, TE_F64, &number) == TE_ERROR_ARGUMENT);
    CHECK(te_tensor_write(NULL, TE_F64, &number) == TE_ERROR_ARGUMENT &&
          te_tensor_set_grad(NULL, a) == TE_ERROR_ARGUMENT);
    CHECK(te_tensor_set_requires_grad(NULL, true) == TE_ERROR_ARGUMENT && !te_tensor_grad(NULL) &&
          !te_tensor_requires_grad(NULL));
}

/* What belongs to another context, and what no memory could hold. */
static void check_message(te_context *ctx, const char *name, const te_arg *args, int n, const char *part)
{
    te_tensor *out;
    CHECK(te_op_run(ctx, te_op_find(ctx, name), args, n, &out, 1) == TE_ERROR_ARGUMENT && !out);
    CHECK_MSG(strstr(te_context_error(ctx), part), "%s, not %s", te_context_error(ctx), part);
}

/* Messages count as C does, from 0, and stand for every number. */
static void test_counting(te_context *ctx)
{
    te_tensor *a = te_tensor_full(ctx, TE_F32, 2, (int64_t[]){2, 3}, 1),
              *b = te_tensor_full(ctx, TE_F32, 2, (int64_t[]){2, 2}, 1), *list[] = {a, a, b};
    const int64_t most = INT64_MAX, twice[] = {1, 1};
    te_arg args[4] = {TE_A_TENSOR(a), TE_A_INTS(&most, 1)};
    check_message(ctx, "sum", args, 2, "dimension 9223372036854775807 is not");
    check_message(ctx, "flip", args, 2, "dimension 9223372036854775807 is not");
    args[1].as.ints = (int64_t[]){2};
    check_message(ctx, "sum", args, 2, "dimension 2 is not");
    args[1] = TE_A_INTS(twice, 2);
    check_message(ctx, "sum", args, 2, "dimension 1 is named twice");
    check_message(ctx, "permute", args, 2, "dimension 1 is named twice");
    check_message(ctx, "flip", args, 2, "dimension 1 is named twice");
    args[1] = TE_A_NUMBER(2);
    check_message(ctx, "softmax", args, 2, "dimension 2 of a tensor");
    check_message(ctx, "cumsum", args, 2, "dimension 2 is not");
    args[1] = TE_A_NUMBER(0x1p62);
    check_message(ctx, "unsqueeze", args, 2,
                  "dimension 4611686018427387904: beside those of {2,3} a new one is 0 to 2");
    args[1] = TE_A_NUMBER(1), args[2] = TE_A_NUMBER(0);
    check_message(ctx, "flatten", args, 3, "first dimension 1 lies behind the last, 0");
    args[2] = TE_A_NUMBER(3);
    check_message(ctx, "select", args, 3, "position 3 of dimension 1,");
    args[2] = TE_A_NUMBER(2), args[3] = TE_A_NUMBER(2);
    check_message(ctx, "narrow", args, 4, "positions 2 to 3 of dimension 1,");
    args[2] = args[3] = TE_A_NUMBER(0x1.fffffffffffffp62);
    check_message(ctx, "narrow", args, 4, "positions 9223372036854774784 to 9223372036854775806 of dimension 1,");
    args[2] = args[3] = TE_A_NUMBER(-0x1p63);
    check_message(ctx, "narrow", args, 4, "of dimension 1,");
    args[0] = (te_arg){.kind = TE_ARG_TENSORS, .n = 3, .as.tensors = list};
    args[1] = TE_A_NUMBER(0);
    check_message(ctx, "cat", args, 2, "tensor 2 is {2,2}, which does not continue {2,3} along dimension 0");
    check_message(ctx, "stack", args, 2, "tensor 2 is {2,2}, the first one {2,3}");
    te_tensor_release(a);
    te_tensor_release(b);
}

static void test_foreign(te_context *ctx, te_context *other, te_tensor *a, te_tensor *foreign)
{
    te_tensor *y = te_op_apply(ctx, "mul", 2, (te_tensor *[]){a, a}), *out = NULL;
    CHECK(te_backward(y, foreign, false) == TE_ERROR_ARGUMENT && strstr(te_context_error(ctx), "of another context"));
    te_arg square = {.kind = TE_ARG_TENSOR, .as.tensor = a};
    CHECK(te_op_run(ctx, te_op_find(other, "square"), &square, 1, &out, 1) == TE_ERROR_ARGUMENT && !out &&
          strstr(te_context_error(ctx), "te.square is an operation of another context"));
    te_group *group = te_group_new(ctx);
    int v = te_group_input(group, false), before = v;
    CHECK(te_group_apply(group, te_op_find(other, "silu"), &v, 1, NULL, 0, &v) == TE_ERROR_ARGUMENT && v != before);
    v = before;
    CHECK(te_group_apply(group, te_op_find(ctx, "silu"), &v, 1, NULL, 0, &v) == TE_OK && v != before);
    te_arg eps[] = {TE_A_ABSENT, TE_A_ABSENT, TE_A_NUMBER(-0.5)}; /* refused as by the operation */
    v = before;
    CHECK(te_group_apply(group, te_op_find(ctx, "rms_norm"), &v, 1, eps, 3, &v) == TE_ERROR_ARGUMENT &&
          strstr(te_context_error(ctx), "te.rms_norm: eps must be at least 0, not -0.5"));
    te_product *product = te_product_new(ctx, "fc");
    CHECK(te_product_run(product, te_op_find(other, "linear"), NULL, 0, &out, 1) == TE_ERROR_ARGUMENT &&
          strstr(te_context_error(ctx), "te_product_run: te.linear is an operation of another context"));
    te_product_release(product);
    te_group_release(group);
    te_tensor_release(y);
}

static void test_odd_shapes_and_values(te_context *ctx)
{
    te_tensor *nothing = te_tensor_empty(ctx, TE_F32, 1, (int64_t[]){0}), *out = NULL;
    te_arg reshape[] = {{.kind = TE_ARG_TENSOR, .as.tensor = nothing},
                        {.kind = TE_ARG_INTS, .n = 3, .as.ints = (int64_t[]){0, INT64_C(1) << 40, INT64_C(1) << 40}}};
    CHECK(te_op_run(ctx, te_op_find(ctx, "reshape"), reshape, 2, &out, 1) == TE_ERROR_ARGUMENT && !out);
    te_tensor *row = te_tensor_full(ctx, TE_F32, 2, (int64_t[]){1, 3}, 0);
    te_arg expand[] = {{.kind = TE_ARG_TENSOR, .as.tensor = row},
                       {.kind = TE_ARG_INTS, .n = 2, .as.ints = (int64_t[]){2, 3}}};
    CHECK(te_op_run(ctx, te_op_find(ctx, "expand"), expand, 2, &out, 1) == TE_OK);
    CHECK(te_tensor_write(out, TE_F64, (double[6]){1, 2, 3, 4, 5, 6}) == TE_ERROR_ARGUMENT &&
          strstr(te_context_error(ctx), "elements share memory"));
    te_tensor_release(out);
    unsigned char bytes[5] = {255, 0, 2, 0, 1};
    te_tensor *mask = te_tensor_from_data(ctx, bytes, TE_BOOL, 1, (int64_t[]){5}, NULL, NULL);
    te_tensor *places = te_op_apply(ctx, "nonzero", 1, &mask);
    double found[3];
    CHECK(places && te_tensor_numel(places) == 3 && te_tensor_read(places, TE_F64, found) == TE_OK && found[0] == 0 &&
          found[1] == 2 && found[2] == 4);
    te_tensor_release(places);
    te_tensor_release(mask);
    te_tensor *x = te_tensor_full(ctx, TE_F32, 8, (int64_t[]){2, 1, 1, 1, 1, 1, 1, 4}, 1);
    te_tensor *scale = te_tensor_full(ctx, TE_F32, 8, (int64_t[]){2, 1, 1, 1, 1, 1, 1, 1}, 1);
    CHECK(!te_op_apply(ctx, "scaled_srelu", 2, (te_tensor *[]){x, scale}) &&
          strstr(te_context_error(ctx), "one number per row in a tensor"));
    te_dtype before = te_context_set_compute_dtype(ctx, TE_F64);
    static const te_dtype none[] = {(te_dtype)77, TE_I64, TE_BOOL, TE_F8E4M3};
    for (int i = 0; i < 4; i++) CHECK(te_context_set_compute_dtype(ctx, none[i]) == TE_F64);
    CHECK(te_context_set_compute_dtype(ctx, before) == TE_F64);
    te_tensor *all[] = {nothing, row, x, scale};
    for (int i = 0; i < 4; i++) te_tensor_release(all[i]);
}

static void test_errors(void)
{
    te_context *ctx = te_context_open(NULL);
    te_tensor *a = te_tensor_full(ctx, TE_F32, 2, (int64_t[]){2, 3}, 1),
              *b = te_tensor_full(ctx, TE_F32, 2, (int64_t[]){4, 5}, 1);
    CHECK(!te_op_apply(ctx, "add", 2, (te_tensor *[]){a, b}) && strstr(te_context_error(ctx), "te.add") &&
          strstr(te_context_error(ctx), "{4,5}"));
    CHECK(!te_op_apply(ctx, "matmul", 2, (te_tensor *[]){a, b}) && strstr(te_context_error(ctx), "inner sizes differ"));
    CHECK(te_op_find(ctx, "no_such_op") == NULL);
    test_chains_of_failures(ctx, a);
    CHECK(!te_tensor_empty(ctx, TE_F32, 3, (int64_t[]){INT64_MAX, 2, 2}));
    CHECK(!te_tensor_empty(ctx, TE_F32, 1, (int64_t[]){-1}));
    CHECK(te_tensor_set_requires_grad(a, true) == TE_OK);
    te_arg two[] = {{.kind = TE_ARG_TENSOR, .as.tensor = a}, {.kind = TE_ARG_NUMBER, .as.number = 2}};
    CHECK(te_op_run_inplace(ctx, te_op_find(ctx, "add"), two, 2) != TE_OK);
    te_tensor *y = te_op_apply(ctx, "mul", 2, (te_tensor *[]){a, a});
    te_tensor *s = te_op_apply(ctx, "sum", 1, &y);
    CHECK(te_backward(s, NULL, false) == TE_OK);
    double grad[6];
    te_tensor_read(te_tensor_grad(a), TE_F64, grad);
    for (int i = 0; i < 6; i++) CHECK(grad[i] == 2);
    CHECK(te_backward(s, NULL, false) != TE_OK && strstr(te_context_error(ctx), "retain_graph"));
    te_context *other = te_context_open(NULL);
    te_tensor *foreign = te_tensor_full(other, TE_F32, 2, (int64_t[]){2, 3}, 1);
    CHECK(te_tensor_set_grad(a, foreign) == TE_ERROR_ARGUMENT && strstr(te_context_error(ctx), "grad: a tensor of an"));
    CHECK(te_tensor_set_main_grad(a, foreign) == TE_ERROR_ARGUMENT &&
          strcmp(te_context_error(ctx), "main_grad: a tensor of another context") == 0);
    test_foreign(ctx, other, a, foreign);
    test_odd_shapes_and_values(ctx);
    test_counting(ctx);
    te_tensor_release(foreign);
    te_context_release(other);
    te_context_interrupt(ctx);
    CHECK(!te_op_apply(ctx, "mul", 2, (te_tensor *[]){a, a}));
    te_context_release(ctx); /* tensors keep it alive */
    te_tensor_release(a);
    te_tensor_release(b);
    te_tensor_release(y);
    te_tensor_release(s);
}

int main(void)
{
    test_errors();
    return TEST_END();
}
