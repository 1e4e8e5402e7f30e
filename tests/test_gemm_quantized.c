/* test_gemm_quantized.c - products of quantized operands against float64 sums of what the bytes stand for: every
 * recipe's quantizers in the three products of a linear layer, few rows by weights as they are stored, mixed pairs,
 * kept copies, and values that bfloat16 does not hold. */
#include "core/quantized.h"
#include "kernels/cpu/decode.h"
#include "kernels/cpu/gemm.h"
#include "quantizers.h"
#include "test.h"

#include <float.h>

static uint64_t seed = 0x9e3779b97f4a7c15u;

/* --- operands ----------------------------------------------------------------------------------------------------- */

static te_tensor *random_tensor(te_context *ctx, te_dtype dtype, int64_t rows, int64_t cols, double size)
{
    te_tensor *t = te_tensor_empty(ctx, dtype, 2, (int64_t[]){rows, cols});
    double *values = malloc((size_t)(rows * cols + 1) * sizeof *values);
    if (!t || !values) abort();
    for (int64_t i = 0; i < rows * cols; i++)
        values[i] = size * test_uniform(&seed, -1, 1) * exp2(test_uniform(&seed, -8, 0));
    if (te_tensor_write(t, TE_F64, values) != TE_OK) abort();
    free(values);
    return t;
}

static te_quantized quantized(te_context *ctx, const te_quantizer *q, int64_t rows, int64_t cols, double size)
{
    te_tensor *t = random_tensor(ctx, TE_BF16, rows, cols, size);
    te_quantized z;
    te_quantize_options options = {.want = {true, true}, .scale = 29.7f};
    if (te_quantize(t, q, &options, &z) != TE_OK) abort();
    te_tensor_release(t);
    return z;
}

/* --- what an operand stands for ----------------------------------------------------------------------------------- */

static double element(te_element_kind kind, const uint8_t *data, int64_t at)
{
    if (kind == TE_E4M3) return (double)te_f8e4m3_to_f32(data[at]);
    if (kind == TE_E5M2) return (double)te_f8e5m2_to_f32(data[at]);
    return (double)te_e2m1_to_f32((uint8_t)(data[at / 2] >> at % 2 * 4 & 15));
}

/* Element i, j of a stored side, from the quantizer's layout alone. */
static double stored_value(const te_quantized *z, int side, int64_t i, int64_t j)
{
    const te_quantizer *q = &z->quantizer;
    te_quantized_layout l = te_quantizer_layout(q, side, z->shape[0], z->shape[1]);
    const te_quantized_part *part = &z->side[side];
    int64_t rows = q->replicated ? 1 : q->block_rows;
    int64_t step = q->element == TE_E2M1 ? 2 * l.row_stride : l.row_stride;
    int64_t at = q->block_rows ? i / rows * l.scale_row_stride + j / q->block_cols * l.scale_col_stride : 0;
    double x = element(q->element, te_tensor_data(part->data), i * step + j * l.col_stride);
    const void *factors = te_tensor_data(part->scale_inv);
    if (q->scale == TE_SCALE_F32) return x * (double)((const float *)factors)[at];
    if (q->scale == TE_SCALE_E8M0) return x * exp2((double)((const uint8_t *)factors)[at] - 127);
    const float *amax = te_tensor_data(part->amax);
    return x * (double)te_f8e4m3_to_f32(((const uint8_t *)factors)[at]) *
           (double)te_two_level_decode(amax[l.amaxes > 1 ? i : 0], q->scale_max);
}

/* One operand: quantized, or plain. */
typedef struct operand {
    const te_quantized *z;
    int side;
    bool transposed;
    te_view view;
    te_quant quant;
} operand;

static double operand_value(const operand *o, int64_t i, int64_t j)
{
    if (!o->z) return te_load_f64(o->view.data, o->view.dtype, i * o->view.stride[0] + j * o->view.stride[1]);
    return o->transposed ? stored_value(o->z, o->side, j, i) : stored_value(o->z, o->side, i, j);
}

/* All of them, row by row. */
static double *operand_values(const operand *o)
{
    int64_t rows = o->view.shape[0], cols = o->view.shape[1];
    double *values = malloc((size_t)(rows * cols) * sizeof *values);
    if (!values) abort();
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) values[i * cols + j] = operand_value(o, i, j);
    return values;
}

static void bind(operand *o, const te_quantized *z, int side, bool transposed)
{
    *o = (operand){.z = z, .side = side, .transposed = transposed};
    o->view = te_quantized_operand(z, side, transposed, &o->quant);
}

static void bind_plain(operand *o, const te_tensor *t) { *o = (operand){.view = te_tensor_view(t)}; }

/* --- products ----------------------------------------------------------------------------------------------------- */

static double epsilon_of(te_dtype dtype) { return dtype == TE_BF16 ? 0x1p-8 : dtype == TE_F16 ? 0x1p-11 : 0x1p-23; }

/* c = 0.5 a b + bias, then twice more as what is added to. `key`: of b's contents. */
static void check_product(te_context *ctx, const char *name, operand *a, operand *b, te_dtype dtype, uint64_t key)
{
    int64_t m = a->view.shape[0], k = a->view.shape[1], n = b->view.shape[1];
    te_tensor *c = te_tensor_empty(ctx, dtype, 2, (int64_t[]){m, n}), *bias = random_tensor(ctx, TE_F32, 1, n, 1);
    te_exec *exec = &c->storage->device->exec;
    te_gemm g = {.a = a->view, .b = b->view, .c = te_tensor_view(c), .alpha = 0.5f, .b_key = key};
    g.bias = te_tensor_view(bias);
    g.bias.ndim = 1;
    g.bias.shape[0] = n;
    g.bias.stride[0] = 1;
    CHECK_MSG(exec->backend->gemm(exec, &g) == TE_OK, "%s: %s", name, exec->message);
    g.bias.data = NULL;
    g.beta = 1;
    for (int i = 0; i < 2; i++) CHECK_MSG(exec->backend->gemm(exec, &g) == TE_OK, "%s: %s", name, exec->message);
    double worst = 0, *va = operand_values(a), *vb = operand_values(b);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0, size = 0, add = te_load_f64(te_tensor_data(bias), TE_F32, j);
            for (int64_t l = 0; l < k; l++) {
                double x = va[i * k + l] * vb[l * n + j];
                sum += x;
                size += fabs(x);
            }
            double got = te_load_f64(g.c.data, dtype, i * n + j), want = 1.5 * sum + add;
            double relative = 0x1p-18 + 3 * epsilon_of(dtype), smallest = dtype == TE_F16 ? 0x1p-24 : 1e-37;
            double most = (1.5 * size + fabs(add)) * relative + smallest;
            worst = fmax(worst, fabs(got - want) / most);
            if (!(fabs(got - want) <= most)) worst = 1e9;
        }
    CHECK_MSG(worst <= 1, "%s: %lld x %lld x %lld into %s: off by %g of what is allowed", name, (long long)m,
              (long long)n, (long long)k, te_dtype_name(dtype), worst);
    free(va);
    free(vb);
    te_tensor_release(c);
    te_tensor_release(bias);
}

/* y = x w^T, dx = dy w, dw = dy^T x. */
static void check_recipe(te_context *ctx, const struct quantizer_recipe *r, int64_t tokens, int64_t in, int64_t out)
{
    te_quantized x = quantized(ctx, &r->q[0], tokens, in, 3), w = quantized(ctx, &r->q[1], out, in, 0.2),
                 dy = quantized(ctx, &r->q[2], tokens, out, 1e-3);
    operand a, b;
    static uint64_t key;
    key += 2;
    bind(&a, &x, 0, false);
    bind(&b, &w, 0, true);
    check_product(ctx, r->name, &a, &b, TE_BF16, key);
    check_product(ctx, r->name, &a, &b, TE_F16, key);
    check_product(ctx, r->name, &a, &b, TE_F32, 0);
    bind(&a, &dy, 0, false);
    bind(&b, &w, 1, true);
    check_product(ctx, r->name, &a, &b, TE_F32, key + 1);
    bind(&a, &dy, 1, false);
    bind(&b, &x, 1, true);
    check_product(ctx, r->name, &a, &b, TE_F32, 0);
    te_quantized_close(&x);
    te_quantized_close(&w);
    te_quantized_close(&dy);
}

static void test_recipes(te_context *ctx)
{
    const int64_t shapes[][3] = {{37, 150, 45}, {128, 128, 256}, {1, 33, 130}, {300, 17, 1}};
    for (int r = 0; r < QUANTIZER_RECIPES; r++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            check_recipe(ctx, &quantizer_recipes[r], shapes[s][0], shapes[s][1], shapes[s][2]);
}

/* Whether a product of m rows reads weights as they are stored. */
static bool reads_codes(te_context *ctx, const operand *a, const operand *b)
{
    int64_t m = a->view.shape[0], n = b->view.shape[1];
    te_tensor *c = te_tensor_empty(ctx, TE_F32, 2, (int64_t[]){m, n});
    te_exec *exec = &c->storage->device->exec;
    te_gemm g = {.a = a->view, .b = b->view, .c = te_tensor_view(c), .alpha = 1};
    te_gemm_problem p;
    bool across;
    te_decode d = te_decode_of(&b->view, &across);
    g.a.dtype = g.b.dtype = TE_BF16;
    g.a.quant = g.b.quant = NULL;
    CHECK(te_gemm_problem_make(exec, &g, &p) == TE_OK);
    bool able = te_cpu(exec)->has_vbmi && te_gemm_state_get(exec)->bf16_pairs;
    bool reads = !te_gemm_coded_decline(exec, &p, &d);
    te_tensor_release(c);
    return reads || !able;
}

/* Weights large enough to come from memory, with columns left over, blocks that end early and codes that are no number;
 * by quantized rows and by others. */
static void test_few_rows(te_context *ctx)
{
    enum { K = 576, N = 1025 };
    for (int r = 0; r < QUANTIZER_RECIPES; r++)
        for (int role = 1; role < 3; role++) {
            const struct quantizer_recipe *recipe = &quantizer_recipes[r];
            int64_t rows = 1 + (3 * r + role) % 8;
            te_quantized w = quantized(ctx, &recipe->q[role], N, K, 0.2), x = quantized(ctx, &recipe->q[0], rows, K, 3);
            te_tensor *plain = random_tensor(ctx, TE_BF16, rows, K, 1);
            operand a, b;
            bind(&a, &x, 0, false);
            bind(&b, &w, 0, true);
            CHECK_MSG(reads_codes(ctx, &a, &b) == !recipe->q[role].row_scaled, "%s, role %d", recipe->name, role);
            check_product(ctx, recipe->name, &a, &b, TE_F32, 0);
            bind_plain(&a, plain);
            check_product(ctx, recipe->name, &a, &b, TE_BF16, 0);
            if (recipe->q[role].element != TE_E2M1) {
                te_tensor *c = te_tensor_empty(ctx, TE_F32, 2, (int64_t[]){rows, N});
                te_exec *exec = &c->storage->device->exec;
                ((uint8_t *)te_tensor_data(w.side[0].data))[700 * K + 575] = 0xff;
                te_gemm g = {.a = a.view, .b = b.view, .c = te_tensor_view(c), .alpha = 1};
                CHECK(exec->backend->gemm(exec, &g) == TE_OK);
                for (int64_t i = 0; i < rows * N; i++)
                    CHECK(isnan(((const float *)te_tensor_data(c))[i]) == (i % N == 700));
                te_tensor_release(c);
            }
            te_tensor_release(plain);
            te_quantized_close(&x);
            te_quantized_close(&w);
        }
}

/* The first `rows` of lines {8, k} times stored weights {n, k}. */
static te_tensor *product_of_lines(te_context *ctx, te_tensor *lines, const te_quantized *w, int64_t rows, int64_t n)
{
    operand a, b;
    te_tensor *c = te_tensor_empty(ctx, TE_F32, 2, (int64_t[]){rows, n});
    te_exec *exec = &c->storage->device->exec;
    bind_plain(&a, lines);
    bind(&b, w, 0, true);
    te_gemm g = {.a = a.view, .b = b.view, .c = te_tensor_view(c), .alpha = 1};
    g.a.shape[0] = rows;
    CHECK(exec->backend->gemm(exec, &g) == TE_OK);
    return c;
}

/* Rows of few have the bits that they have in a smaller number, so that tokens checked at once are those chosen one by
 * one. */
static void test_rows_alone(te_context *ctx)
{
    enum { K = 576, N = 1025, MOST = 8 };
    for (int r = 0; r < QUANTIZER_RECIPES; r++) {
        const struct quantizer_recipe *recipe = &quantizer_recipes[r];
        if (recipe->q[1].row_scaled) continue;
        te_quantized w = quantized(ctx, &recipe->q[1], N, K, 0.2);
        te_tensor *lines = random_tensor(ctx, TE_BF16, MOST, K, 1), *all = product_of_lines(ctx, lines, &w, MOST, N);
        for (int64_t rows = 1; rows < MOST; rows++) {
            te_tensor *few = product_of_lines(ctx, lines, &w, rows, N);
            bool same = memcmp(te_tensor_data(all), te_tensor_data(few), (size_t)(rows * N) * sizeof(float)) == 0;
            CHECK_MSG(same, "%s, %d rows", recipe->name, (int)rows);
            te_tensor_release(few);
        }
        te_tensor_release(all);
        te_tensor_release(lines);
        te_quantized_close(&w);
    }
}

/* One quantized operand and one that is not, in both places. */
static void test_mixed(te_context *ctx)
{
    const te_dtype plain[] = {TE_F32, TE_BF16, TE_F16};
    for (int r = 0; r < QUANTIZER_RECIPES; r++)
        for (int p = 0; p < 3; p++) {
            te_quantized z = quantized(ctx, &quantizer_recipes[r].q[1], 70, 90, 2);
            te_tensor *t = random_tensor(ctx, plain[p], 30, 90, 1), *u = random_tensor(ctx, plain[p], 90, 20, 1);
            operand a, b;
            bind_plain(&a, t);
            bind(&b, &z, 0, true);
            check_product(ctx, quantizer_recipes[r].name, &a, &b, TE_F32, 0);
            bind(&a, &z, 0, false);
            bind_plain(&b, u);
            check_product(ctx, quantizer_recipes[r].name, &a, &b, TE_BF16, 0);
            te_tensor_release(t);
            te_tensor_release(u);
            te_quantized_close(&z);
        }
    te_quantized x = quantized(ctx, &quantizer_recipes[6].q[1], 40, 96, 1);
    te_quantized y = quantized(ctx, &quantizer_recipes[2].q[0], 50, 96, 1);
    operand a, b; /* two formats */
    bind(&a, &x, 0, false);
    bind(&b, &y, 0, true);
    check_product(ctx, "float4 by float8", &a, &b, TE_F32, 0);
    te_quantized_close(&x);
    te_quantized_close(&y);
}

/* --- the edges ---------------------------------------------------------------------------------------------------- */

/* Factors at the ends of float32: what bfloat16's products would take for 0, and factors whose product overflows. */
static void test_range(te_context *ctx)
{
    const double sizes[][2] = {{1e-37, 1e36}, {1e37, 1e-36}, {1e-38, 1e38}, {2e38, 1e-30}, {1e-44, 1e30}};
    for (int r = 0; r < QUANTIZER_RECIPES; r++)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            te_quantized x = quantized(ctx, &quantizer_recipes[r].q[1], 20, 64, sizes[s][0]),
                         y = quantized(ctx, &quantizer_recipes[r].q[1], 24, 64, sizes[s][1]);
            operand a, b;
            bind(&a, &x, 0, false);
            bind(&b, &y, 0, true);
            check_product(ctx, quantizer_recipes[r].name, &a, &b, TE_F32, 0);
            te_quantized_close(&x);
            te_quantized_close(&y);
        }
    te_quantized big = quantized(ctx, &quantizer_recipes[1].q[0], 8, 16, 3e38);
    te_quantized zero = quantized(ctx, &quantizer_recipes[1].q[0], 8, 16, 3e38);
    memset(te_tensor_data(zero.side[0].data), 0, 8 * 16);
    operand a, b; /* infinity times 0 if the factors met first */
    bind(&a, &big, 0, false);
    bind(&b, &zero, 0, true);
    check_product(ctx, "zeros under a large factor", &a, &b, TE_F32, 0);
    te_quantized_close(&big);
    te_quantized_close(&zero);
}

static void test_nan(te_context *ctx)
{
    for (int r = 0; r < 6; r++) {
        te_quantized x = quantized(ctx, &quantizer_recipes[r].q[1], 5, 64, 1);
        te_quantized y = quantized(ctx, &quantizer_recipes[r].q[1], 6, 64, 1);
        ((uint8_t *)te_tensor_data(x.side[0].data))[2 * 64 + 3] = 0x7f;
        te_tensor *c = te_tensor_empty(ctx, TE_F32, 2, (int64_t[]){5, 6});
        te_exec *exec = &c->storage->device->exec;
        operand a, b;
        bind(&a, &x, 0, false);
        bind(&b, &y, 0, true);
        te_gemm g = {.a = a.view, .b = b.view, .c = te_tensor_view(c), .alpha = 1};
        CHECK(exec->backend->gemm(exec, &g) == TE_OK);
        const float *got = te_tensor_data(c);
        for (int i = 0; i < 30; i++)
            CHECK_MSG(isnan(got[i]) == (i / 6 == 2), "%s: element %d", quantizer_recipes[r].name, i);
        te_tensor_release(c);
        te_quantized_close(&x);
        te_quantized_close(&y);
    }
}

/* A kept copy serves while its key is the same, and another key sees the new contents. */
static void test_kept(te_context *ctx)
{
    te_quantized x = quantized(ctx, &quantizer_recipes[2].q[0], 16, 64, 1);
    te_quantized w = quantized(ctx, &quantizer_recipes[2].q[0], 24, 64, 1);
    operand a, b;
    bind(&a, &x, 0, false);
    bind(&b, &w, 0, true);
    check_product(ctx, "first version", &a, &b, TE_F32, 1001); /* three products: seen, kept, found */
    memset(te_tensor_data(w.side[0].data), 0x38, 24 * 64);
    check_product(ctx, "second version", &a, &b, TE_F32, 1003);
    te_quantized_close(&x);
    te_quantized_close(&w);
}

static void test_refused(te_context *ctx)
{
    te_quantized x = quantized(ctx, &quantizer_recipes[1].q[0], 16, 64, 1);
    te_quantized w = quantized(ctx, &quantizer_recipes[1].q[0], 24, 64, 1);
    te_tensor *c = te_tensor_empty(ctx, TE_F32, 2, (int64_t[]){16, 24}),
              *d = te_tensor_empty(ctx, TE_F64, 2, (int64_t[]){16, 64});
    te_exec *exec = &c->storage->device->exec;
    operand a, b;
    bind(&a, &x, 0, false);
    bind(&b, &w, 0, true);
    te_gemm g = {.a = a.view, .b = b.view, .c = te_tensor_view(c), .alpha = 1}, bad = g;
    bad.b.shape[0] = 63;
    CHECK(exec->backend->gemm(exec, &bad) == TE_ERROR_ARGUMENT && strstr(exec->message, "{16, 64}"));
    bad = g;
    bad.a = te_tensor_view(d);
    CHECK(exec->backend->gemm(exec, &bad) == TE_ERROR_ARGUMENT && strstr(exec->message, "float64"));
    bad = g;
    bad.c.quant = &a.quant;
    CHECK(exec->backend->gemm(exec, &bad) == TE_ERROR_UNSUPPORTED);
    te_tensor_release(c);
    te_tensor_release(d);
    te_quantized_close(&x);
    te_quantized_close(&w);
}

/* Rows that are further apart than they are long, as those of a slice, give the bytes of a contiguous copy. */
static void test_strided_source(te_context *ctx)
{
    te_tensor *wide = random_tensor(ctx, TE_BF16, 150, 200, 1);
    te_tensor *slice = te_tensor_alias(wide, 2, (int64_t[]){150, 70}, (int64_t[]){200, 1}, 13);
    te_tensor *copy = te_tensor_clone_data(slice);
    for (int r = 0; r < QUANTIZER_RECIPES; r++) {
        te_quantized z, want;
        uint64_t number = 5;
        te_quantize_options options = {.want = {true, true}, .scale = 2, .seed = &number};
        CHECK(te_quantize(slice, &quantizer_recipes[r].q[2], &options, &z) == TE_OK);
        CHECK(te_quantize(copy, &quantizer_recipes[r].q[2], &options, &want) == TE_OK);
        for (int s = 0; s < 2; s++) {
            size_t bytes = (size_t)te_tensor_numel(z.side[s].data);
            CHECK_MSG(memcmp(te_tensor_data(z.side[s].data), te_tensor_data(want.side[s].data), bytes) == 0, "%s",
                      quantizer_recipes[r].name);
        }
        te_quantized_close(&z);
        te_quantized_close(&want);
    }
    te_tensor_release(copy);
    te_tensor_release(slice);
    te_tensor_release(wide);
}

int main(void)
{
    te_context_options options = {.struct_size = sizeof options, .threads = 2};
    te_context *ctx = te_context_open(&options);
    test_recipes(ctx);
    test_few_rows(ctx);
    test_rows_alone(ctx);
    test_mixed(ctx);
    test_range(ctx);
    test_nan(ctx);
    test_kept(ctx);
    test_refused(ctx);
    test_strided_source(ctx);
    te_context_release(ctx);
    return TEST_END();
}
