/* test_cuda_kernels_product.c - the kernel for products of few rows, run by the simulator, against sums in float64, and
 * what it does with infinities, NaN, lines that lie apart and places that are not its own. */
#include "cuda_device.h"

#include "kernels/dtype.h"

enum { MOST_N = 50, MOST_K = 4112, LINE = MOST_K + 32 };

static cuda_device  cuda;
static te_cuda_plan plan;
static uint64_t     seed = 17;
static uint64_t     w[MOST_N * LINE / 4], x[TE_FEW_ROWS * LINE / 4], y[TE_FEW_ROWS * 64], bias[MOST_N]; /* any dtype */

static void fill(void *data, te_dtype dtype, int64_t n)
{
    for (int64_t i = 0; i < n; i++) te_store_f64(data, dtype, i, test_uniform(&seed, -2, 2));
}

static bool is_fp8(te_dtype dtype) { return dtype == TE_F8E4M3 || dtype == TE_F8E5M2; }

static double true_value(const te_few_args *a, const te_dtype t[3], int64_t row, int64_t column, double *size)
{
    double sum = 0, by = a->alpha;
    *size = 0;
    for (int64_t i = 0; i < a->k; i++) {
        double term = te_load_f64(a->x, t[1], row * a->x_line + i) * te_load_f64(a->w, t[0], column * a->w_line + i);
        sum += term;
        *size += fabs(term);
    }
    for (int i = 0; i < 2; i++) by *= a->factor[i] ? (double)*a->factor[i] : 1;
    double added = a->bias ? te_load_f64(a->bias, t[2], column) : 0;
    *size = *size * fabs(by) + fabs(added);
    return sum * by + added;
}

static bool same(double found, double wanted, double tolerance)
{
    if (isnan(wanted)) return isnan(found);
    return isinf(wanted) ? found == wanted : fabs(found - wanted) <= tolerance;
}

/* All of y, and that nothing else was written. */
static void check(const te_few_args *a, const te_dtype t[3])
{
    static const double last_place[TE_DTYPE_COUNT] = {[TE_F32] = 0x1p-24, [TE_BF16] = 0x1p-8, [TE_F16] = 0x1p-11};
    memset(y, 0x55, sizeof y);
    CHECK(te_cuda_plan_few(&plan, a, t) == TE_OK);
    CHECK_MSG(cuda_plan_run(&cuda, &plan) == TE_OK, "%s", cuda.exec.message);
    for (int64_t i = 0; i < TE_FEW_ROWS * 64; i++) {
        int64_t row = i / a->y_line, column = i % a->y_line;
        double  found = te_load_f64(y, t[2], i), size;
        if (row >= a->m || column >= a->n) {
            uint64_t untouched = 0x5555555555555555u;
            CHECK(memcmp((char *)y + (size_t)i * te_dtype_size(t[2]), &untouched, te_dtype_size(t[2])) == 0);
            continue;
        }
        double wanted = true_value(a, t, row, column, &size);
        CHECK_MSG(same(found, wanted, last_place[t[2]] * fabs(wanted) + 1e-5 * size),
                  "%s by %s to %s, {%d, %d, %d}, place %d, %d: %g, not %g", te_dtype_name(t[1]), te_dtype_name(t[0]),
                  te_dtype_name(t[2]), (int)a->m, (int)a->n, (int)a->k, (int)row, (int)column, found, wanted);
    }
}

static void check_sizes(const te_dtype t[3], int64_t m, int64_t n, int64_t k, int64_t apart, bool ends)
{
    static const float factors[2] = {0.25f, 3.0f};
    te_few_args a = {.w = w, .x = x, .bias = ends ? bias : NULL, .y = y, .m = m, .n = n, .k = k,
                     .w_line = k + apart, .x_line = k + 2 * apart, .y_line = n + (ends ? 5 : 0),
                     .alpha = ends ? 0.5 : 1};
    for (int i = 0; i < 2 && is_fp8(t[0]); i++) a.factor[i] = &factors[i];
    fill(w, t[0], n * a.w_line);
    fill(x, t[1], m * a.x_line);
    fill(bias, t[2], n);
    check(&a, t);
    te_store_f64(w, t[0], (n - 1) * a.w_line + k / 2, NAN);
    te_store_f64(x, t[1], (m - 1) * a.x_line + k - 1, t[1] == TE_F8E4M3 ? NAN : INFINITY);
    check(&a, t);
}

int main(void)
{
    static const te_dtype dtypes[][3] = {
        {TE_BF16, TE_BF16, TE_BF16}, {TE_BF16, TE_BF16, TE_F32}, {TE_F16, TE_F16, TE_F16}, {TE_F16, TE_F16, TE_F32},
        {TE_F8E4M3, TE_F8E4M3, TE_BF16}, {TE_F8E4M3, TE_F8E5M2, TE_F32}, {TE_F8E5M2, TE_F8E4M3, TE_F16}};
    cuda.exec = test_exec_open(2);
    nvrtc_open(&cuda.nvrtc);
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        int64_t unit = is_fp8(dtypes[i][0]) ? 16 : 8;
        check_sizes(dtypes[i], 1, 1, unit, 0, false);
        check_sizes(dtypes[i], 8, 50, 4112, 0, true);
        for (int k = 0; k < 12; k++) {
            int64_t m = 1 + (int64_t)(test_random(&seed) % 8), n = 1 + (int64_t)(test_random(&seed) % MOST_N);
            int64_t inner = unit * (1 + (int64_t)(test_random(&seed) % (uint64_t)(k % 3 ? 20 : MOST_K / unit)));
            check_sizes(dtypes[i], m, n, inner, test_random(&seed) % 2 ? unit : 0, test_random(&seed) % 2);
        }
    }
    te_few_args nothing = {.m = 0, .n = 5, .k = 8};
    CHECK(te_cuda_plan_few(&plan, &nothing, dtypes[0]) == TE_OK && plan.n_calls == 0);
    fprintf(stderr, "%d sources through NVRTC\n", cuda.nvrtc.compiled);
    test_exec_close(&cuda.exec);
    return TEST_END();
}
