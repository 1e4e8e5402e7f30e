/* gemm_products.h - random products of any layout, type and end, their float64 reference, and runs of them through each
 * implementation of the CPU's matrix product, with one thread and with two. */
#ifndef TESTS_GEMM_PRODUCTS_H
#define TESTS_GEMM_PRODUCTS_H

#include "kernels/cpu/gemm.h"
#include "kernels/dtype.h"

#include "test.h"

static uint64_t seed = 88172645463325252u;

static int64_t random_int(int64_t low, int64_t high) { return low + test_random(&seed) % (uint64_t)(high - low + 1); }

/* --- one product and its reference -------------------------------------------------------------------------------- */

/* Memory of a view, odd bytes in front so that nothing is aligned beyond its element. */
typedef struct block {
    char *base;
    size_t bytes;
} block;

typedef struct product {
    te_gemm gemm;
    block   a, b, c, bias;
} product;

typedef enum layout { ROWS, COLUMNS, BOTH_STRIDED, LAYOUT_COUNT } layout;

/* Gives `v` (shape and dtype set) strides of the layout and memory filled with random values in [-1, 1]. */
static block place(te_view *v, layout how, bool broadcast)
{
    int d = v->ndim, order[TE_MAX_DIMS];
    for (int i = 0; i < d; i++) order[i] = d - 1 - i; /* innermost first */
    if (how == COLUMNS) order[0] = d - 2, order[1] = d - 1;
    int64_t stride = how == BOTH_STRIDED ? 3 : 1;
    for (int i = 0; i < d; i++) {
        int dim = order[i];
        bool fixed = broadcast && dim < d - 2;
        v->stride[dim] = fixed ? 0 : stride;
        if (!fixed) stride = stride * (v->shape[dim] ? v->shape[dim] : 1) + (i < 2 ? random_int(0, 3) : 0);
    }
    size_t size = te_dtype_size(v->dtype);
    block memory = {.bytes = ((size_t)stride + 8) * size};
    memory.base = malloc(memory.bytes);
    if (!memory.base) abort();
    for (size_t i = 0; i < memory.bytes / size; i++) te_store_f64(memory.base, v->dtype, i, test_uniform(&seed, -1, 1));
    v->data = memory.base + (size_t)random_int(0, 3) * size;
    return memory;
}

static int64_t offset_of(const te_view *v, int64_t batch, int64_t i, int64_t j)
{
    int64_t offset = i * v->stride[v->ndim - 2] + j * v->stride[v->ndim - 1];
    for (int d = v->ndim - 3; d >= 0; d--) {
        offset += batch % v->shape[d] * v->stride[d];
        batch /= v->shape[d];
    }
    return offset;
}

static double value_at(const te_view *v, int64_t batch, int64_t i, int64_t j)
{
    return te_load_f64(v->data, v->dtype, offset_of(v, batch, i, j));
}

static double epsilon_of(te_dtype dtype)
{
    return dtype == TE_BF16 ? 0x1p-8 : dtype == TE_F16 ? 0x1p-11 : dtype == TE_F32 ? 0x1p-23 : 0x1p-52;
}

static bool same(double got, double want, double tolerance)
{
    if (isnan(want)) return isnan(got);
    if (isinf(want)) return got == want;
    return fabs(got - want) <= tolerance;
}

/* What each element of c should be, apart from what it is added to, and the magnitude that went into it. */
typedef struct expectation {
    double sum, size;
} expectation;

typedef double  doubles __attribute__((vector_size(64)));
typedef int64_t double_bits __attribute__((vector_size(64)));
enum { DOUBLES = 8 };

/* The sums of some columns, each from its first step to its last, of a row of a and of b, whose rows are n vectors. */
TEST_UNWATCHED static void add_up(const double *a, const doubles *b, int64_t k, int64_t n, doubles *sum, doubles *size)
{
    doubles s = {0}, magnitude = {0};
    for (int64_t i = 0; i < k; i++) {
        doubles x = b[i * n] * a[i];
        s += x;
        magnitude += (doubles)((double_bits)x & INT64_MAX);
    }
    *sum = s, *size = magnitude;
}

/* One element, of what add_up says of it. */
static expectation finish(const te_gemm *g, int64_t j, double sum, double magnitude)
{
    sum *= (double)g->alpha;
    magnitude *= fabs((double)g->alpha);
    if (te_view_present(&g->bias)) {
        double x = te_load_f64(g->bias.data, g->bias.dtype, j * g->bias.stride[0]);
        sum += x;
        magnitude += fabs(x);
    }
    return (expectation){sum, magnitude};
}

static void *lines(int64_t bytes)
{
    void *memory = aligned_alloc(64, (size_t)((bytes + 64) / 64 * 64));
    if (!memory) abort();
    return memory;
}

static expectation *expect(const te_gemm *g)
{
    int d = g->c.ndim;
    int64_t m = g->c.shape[d - 2], n = g->c.shape[d - 1], k = g->a.shape[d - 1], total = te_view_numel(&g->c);
    int64_t vectors = (n + DOUBLES - 1) / DOUBLES;
    expectation *all = malloc((size_t)(total ? total : 1) * sizeof *all);
    if (!all) abort();
    double *a = lines(k * (int64_t)sizeof *a), *b = lines(k * vectors * (int64_t)sizeof(doubles));
    memset(b, 0, (size_t)(k * vectors) * sizeof(doubles));
    for (int64_t batch = 0; batch * m * n < total; batch++) {
        for (int64_t l = 0; l < k; l++)
            for (int64_t j = 0; j < n; j++) b[l * vectors * DOUBLES + j] = value_at(&g->b, batch, l, j);
        for (int64_t i = 0; i < m; i++) {
            for (int64_t l = 0; l < k; l++) a[l] = value_at(&g->a, batch, i, l);
            for (int64_t j = 0; j < n; j += DOUBLES) {
                doubles sum, size;
                add_up(a, (const doubles *)(const void *)b + j / DOUBLES, k, vectors, &sum, &size);
                for (int64_t lane = 0; lane < DOUBLES && j + lane < n; lane++)
                    all[(batch * m + i) * n + j + lane] = finish(g, j + lane, sum[lane], size[lane]);
            }
        }
    }
    free(a), free(b);
    return all;
}

/* Compares with `before`, a copy of c's memory from before the product. */
static void compare(const te_gemm *g, const expectation *expected, const char *before, const char *what)
{
    int d = g->c.ndim, bad = 0;
    int64_t m = g->c.shape[d - 2], n = g->c.shape[d - 1], k = g->a.shape[d - 1], total = te_view_numel(&g->c);
    double step = epsilon_of(g->a.dtype == TE_F64 ? TE_F64 : TE_F32), rounding = epsilon_of(g->c.dtype);
    for (int64_t at = 0; at < total; at++) {
        int64_t batch = at / (m * n), i = at / n % m, j = at % n;
        double sum = expected[at].sum, old = 0, want = sum, got = value_at(&g->c, batch, i, j);
        if (g->beta != 0) old = te_load_f64(before, g->c.dtype, offset_of(&g->c, batch, i, j)), want += old;
        double tolerance = 2 * (sqrt((double)k) + 8) * step * expected[at].size +
                           2.5 * rounding * (fabs(sum) + fabs(old)) + (g->c.dtype == TE_F16 ? 0x1p-24 : 1e-30);
        bool right = same(got, want, tolerance);
        if (!right && bad == 0)
            CHECK_MSG(right, "%s [%lld](%lld, %lld): %.9g, expected %.9g", what, (long long)batch, (long long)i,
                      (long long)j, got, want);
        bad += !right;
    }
    CHECK_MSG(bad == 0, "%s: %d values wrong; m=%lld n=%lld k=%lld %s -> %s alpha %g bias %d beta %g", what, bad,
              (long long)m, (long long)n, (long long)k, te_dtype_name(g->a.dtype), te_dtype_name(g->c.dtype),
              (double)g->alpha, te_view_present(&g->bias), (double)g->beta);
}

static char *copy_of(const te_view *v, const block *memory)
{
    char *copy = malloc(memory->bytes);
    if (!copy) abort();
    memcpy(copy, memory->base, memory->bytes);
    return copy + ((char *)v->data - memory->base);
}

static inline void release(product *p)
{
    free(p->a.base), free(p->b.base), free(p->c.base), free(p->bias.base);
}

/* --- running on several implementations and thread counts --------------------------------------------------------- */

static te_exec execs[2]; /* one thread, two threads */

#ifdef TEST_MATRIX_UNIT
extern const te_gemm_kernel TEST_MATRIX_UNIT, TEST_FLOATS_IN_UNIT; /* gemm_amx*.c on amx_software.h */
static atomic_int matrix_entries;

static void count_and_enter(void)
{
    matrix_entries++;
    TEST_MATRIX_UNIT.enter();
}
#endif

/* As it finds the machine, or with a matrix unit in software that takes all products it can. */
static te_exec open_exec(int threads)
{
    te_exec exec = test_exec_open(threads);
#ifdef TEST_MATRIX_UNIT
    static te_gemm_kernel counted;
    counted = TEST_MATRIX_UNIT;
    counted.enter = count_and_enter;
    te_gemm_state *state = te_gemm_state_get(&exec);
    if (state->bf16_pairs) {
        state->matrix_unit = &counted;
        state->f32_in_unit = &TEST_FLOATS_IN_UNIT;
    }
    state->matrix_macs = 0;
#endif
    return exec;
}

static int     onednn_runs, row_runs, squares_found;

/* The sum of squares that came with c, if one did: that of what is there, in the same bits with any threads. */
static void check_squares(const te_gemm *g, double squares, double *first, int threads)
{
    int d = g->c.ndim;
    int64_t m = g->c.shape[d - 2], n = g->c.shape[d - 1], total = te_view_numel(&g->c);
    double sum = 0;
    for (int64_t at = 0; at < total && !isnan(squares); at++) {
        double x = value_at(&g->c, at / (m * n), at / n % m, at % n);
        sum += x * x;
    }
    CHECK_MSG(isnan(squares) || fabs(squares - sum) <= 1e-6 * sum, "sum of squares %g, not %g", squares, sum);
    if (threads == 1) *first = squares;
    CHECK_MSG(memcmp(&squares, first, sizeof squares) == 0 || (isnan(squares) && isnan(*first)),
              "sum of squares: %.17g with one thread, %.17g with %d", *first, squares, threads);
    squares_found += !isnan(squares);
}

/* Runs with one and two threads through `impl` (NULL: the backend's own choice); checks values and equal bits. Returns
 * false when the implementation declines. */
static bool run_and_check(product *p, const expectation *expected, const char *impl)
{
    size_t skip = (size_t)((char *)p->gemm.c.data - p->c.base);
    char *before = copy_of(&p->gemm.c, &p->c), *first = NULL;
    double squares, first_squares = NAN;
    bool accepted = true;
    p->gemm.squares = p->gemm.c.dtype == TE_F32 ? &squares : NULL;
    for (int e = 0; e < 2 && accepted; e++) {
        squares = NAN;
        memcpy(p->c.base, before - skip, p->c.bytes);
        te_status status = impl ? te_cpu_gemm_with(&execs[e], impl, &p->gemm) : te_cpu_gemm(&execs[e], &p->gemm);
        if (impl && status == TE_ERROR_UNSUPPORTED) accepted = false;
        else CHECK_MSG(status == TE_OK, "%s: status %d, %s", impl ? impl : "chosen", status, execs[e].message);
        if (accepted && p->gemm.squares) check_squares(&p->gemm, squares, &first_squares, execs[e].threads);
        if (accepted && e == 0) {
            compare(&p->gemm, expected, before, impl ? impl : "chosen");
            first = copy_of(&p->gemm.c, &p->c);
        } else if (accepted)
            CHECK_MSG(memcmp(first - skip, p->c.base, p->c.bytes) == 0, "%s: %d threads give other bits",
                      impl ? impl : "chosen", execs[e].threads);
    }
    p->gemm.squares = NULL;
    memcpy(p->c.base, before - skip, p->c.bytes);
    free(before - skip);
    if (first) free(first - skip);
    return accepted;
}

/* Cut in slices of at most so many multiplications, or as small as can be, as large products are where somebody may
 * interrupt. */
static void run_in_slices(product *p, const expectation *expected, double most)
{
    static const atomic_int never;
    double                  usual[2];
    for (int e = 0; e < 2; e++) {
        te_gemm_state *state = te_gemm_state_get(&execs[e]);
        usual[e] = state->slice_macs;
        state->slice_macs = most;
        execs[e].interrupt = &never;
    }
    run_and_check(p, expected, NULL);
    for (int e = 0; e < 2; e++) {
        te_gemm_state_get(&execs[e])->slice_macs = usual[e];
        execs[e].interrupt = NULL;
    }
}

static inline void run_all(product *p)
{
    expectation *expected = expect(&p->gemm);
    run_and_check(p, expected, NULL);
    run_in_slices(p, expected, 1);
    run_and_check(p, expected, "blocked");
    row_runs += run_and_check(p, expected, "rows");
    row_runs += run_and_check(p, expected, "sweep");
    run_and_check(p, expected, "turned");
    onednn_runs += run_and_check(p, expected, "onednn");
    free(expected);
}

/* --- random ones -------------------------------------------------------------------------------------------------- */

typedef struct type_pair {
    te_dtype in, out;
} type_pair;

static const type_pair type_pairs[] = {{TE_F32, TE_F32}, {TE_BF16, TE_BF16}, {TE_BF16, TE_F32}, {TE_F16, TE_F16},
                                       {TE_F16, TE_F32}, {TE_F64, TE_F64}, {TE_F64, TE_F32}};
enum { TYPE_PAIRS = sizeof type_pairs / sizeof type_pairs[0] };

static te_view view_of(te_dtype dtype, int ndim, const int64_t *batch, int64_t rows, int64_t cols)
{
    te_view v = {.dtype = dtype, .ndim = ndim};
    for (int i = 0; i < ndim - 2; i++) v.shape[i] = batch[i];
    v.shape[ndim - 2] = rows;
    v.shape[ndim - 1] = cols;
    return v;
}

static inline product make(type_pair types, int64_t m, int64_t n, int64_t k, int batch_dims, const int64_t *batch)
{
    int d = batch_dims + 2;
    product p = {.gemm = {.a = view_of(types.in, d, batch, m, k), .b = view_of(types.in, d, batch, k, n),
                          .c = view_of(types.out, d, batch, m, n), .alpha = 1}};
    p.a = place(&p.gemm.a, random_int(0, LAYOUT_COUNT - 1), random_int(0, 3) == 0);
    p.b = place(&p.gemm.b, random_int(0, LAYOUT_COUNT - 1), random_int(0, 1) == 0);
    p.c = place(&p.gemm.c, random_int(0, 5) ? ROWS : random_int(0, LAYOUT_COUNT - 1), false);
    return p;
}

static inline void add_epilogue(product *p)
{
    te_gemm *g = &p->gemm;
    static const te_dtype bias_types[] = {TE_F32, TE_BF16, TE_F16, TE_F64};
    if (random_int(0, 1)) {
        g->bias = (te_view){.dtype = bias_types[random_int(0, 3)], .ndim = 1, .shape = {g->c.shape[g->c.ndim - 1]}};
        int64_t stride = random_int(1, 2);
        te_view wide = {.dtype = g->bias.dtype, .ndim = 2, .shape = {g->bias.shape[0], stride}};
        p->bias = place(&wide, ROWS, false);
        g->bias.data = wide.data;
        g->bias.stride[0] = wide.stride[0];
    }
    g->alpha = random_int(0, 2) == 0 ? 0.37f : 1;
    g->beta = (float)random_int(0, 1);
}

#endif
