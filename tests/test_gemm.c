/* test_gemm.c - the CPU's matrix product against a float64 reference: hostile shapes and strides, every combination of
 * types, epilogues, NaN and infinity, kept copies of operands, and the same bits from one thread and from two. */
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_cache.h"
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
    block   a, b, c, bias, aux;
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

static double activate(te_activation activation, double x)
{
    if (activation == TE_ACT_RELU) return x < 0 ? 0 : x;
    if (activation == TE_ACT_GELU) return 0.5 * x * (1 + tanh(0.79788456080286536 * (x + 0.044715 * x * x * x)));
    return x;
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

/* Value before the activation; *size: sum of the magnitudes that went into it. */
static double reference(const te_gemm *g, int64_t batch, int64_t i, int64_t j, double *size)
{
    double sum = 0, magnitude = 0;
    for (int64_t k = 0; k < g->a.shape[g->a.ndim - 1]; k++) {
        double x = value_at(&g->a, batch, i, k) * value_at(&g->b, batch, k, j);
        sum += x;
        magnitude += fabs(x);
    }
    sum *= (double)g->alpha;
    magnitude *= fabs((double)g->alpha);
    if (te_view_present(&g->bias)) {
        double x = te_load_f64(g->bias.data, g->bias.dtype, j * g->bias.stride[0]);
        sum += x;
        magnitude += fabs(x);
    }
    *size = magnitude;
    return sum;
}

/* What each element of c should be before the activation, and the magnitude that went into it. */
typedef struct expectation {
    double sum, size;
} expectation;

static expectation *expect(const te_gemm *g)
{
    int d = g->c.ndim;
    int64_t m = g->c.shape[d - 2], n = g->c.shape[d - 1], total = te_view_numel(&g->c);
    expectation *all = malloc((size_t)(total ? total : 1) * sizeof *all);
    if (!all) abort();
    for (int64_t at = 0; at < total; at++)
        all[at].sum = reference(g, at / (m * n), at / n % m, at % n, &all[at].size);
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
        double sum = expected[at].sum, old = 0, want = activate(g->activation, sum), got = value_at(&g->c, batch, i, j);
        if (g->beta != 0) old = te_load_f64(before, g->c.dtype, offset_of(&g->c, batch, i, j)), want += old;
        double tolerance = 2 * (sqrt((double)k) + 8) * step * expected[at].size +
                           2.5 * rounding * (fabs(sum) + fabs(old)) + 1e-30;
        bool right = same(got, want, tolerance);
        if (!right && bad == 0)
            CHECK_MSG(right, "%s [%lld](%lld, %lld): %.9g, expected %.9g", what, (long long)batch, (long long)i,
                      (long long)j, got, want);
        bad += !right;
        if (te_view_present(&g->aux)) bad += !same(value_at(&g->aux, batch, i, j), sum, tolerance);
    }
    CHECK_MSG(bad == 0, "%s: %d values wrong; m=%lld n=%lld k=%lld %s -> %s act %d aux %d beta %g", what, bad,
              (long long)m, (long long)n, (long long)k, te_dtype_name(g->a.dtype), te_dtype_name(g->c.dtype),
              (int)g->activation, te_view_present(&g->aux), (double)g->beta);
}

static char *copy_of(const te_view *v, const block *memory)
{
    char *copy = malloc(memory->bytes);
    if (!copy) abort();
    memcpy(copy, memory->base, memory->bytes);
    return copy + ((char *)v->data - memory->base);
}

static void release(product *p)
{
    free(p->a.base), free(p->b.base), free(p->c.base), free(p->bias.base), free(p->aux.base);
}

/* --- running on several implementations and thread counts
 * -------------------------------------------------------------- */

static te_exec execs[2]; /* one thread, two threads */

#ifdef TEST_MATRIX_UNIT
extern const te_gemm_kernel TEST_MATRIX_UNIT; /* gemm_amx.c on amx_software.h */
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
        te_gemm_suit_large_caches(&state->f32);
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

static void run_all(product *p)
{
    expectation *expected = expect(&p->gemm);
    run_and_check(p, expected, NULL);
    run_in_slices(p, expected, 1);
    run_and_check(p, expected, "blocked");
    row_runs += run_and_check(p, expected, "rows");
    row_runs += run_and_check(p, expected, "sweep");
    onednn_runs += run_and_check(p, expected, "onednn");
    free(expected);
}

/* --- random products
 * --------------------------------------------------------------------------------------------------- */

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

static product make(type_pair types, int64_t m, int64_t n, int64_t k, int batch_dims, const int64_t *batch)
{
    int d = batch_dims + 2;
    product p = {.gemm = {.a = view_of(types.in, d, batch, m, k), .b = view_of(types.in, d, batch, k, n),
                          .c = view_of(types.out, d, batch, m, n), .alpha = 1}};
    p.a = place(&p.gemm.a, random_int(0, LAYOUT_COUNT - 1), random_int(0, 3) == 0);
    p.b = place(&p.gemm.b, random_int(0, LAYOUT_COUNT - 1), random_int(0, 1) == 0);
    p.c = place(&p.gemm.c, random_int(0, 5) ? ROWS : random_int(0, LAYOUT_COUNT - 1), false);
    return p;
}

static void add_epilogue(product *p)
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
    if (random_int(0, 2) == 0) {
        g->aux = g->c;
        p->aux = place(&g->aux, random_int(0, LAYOUT_COUNT - 1), false);
    }
    g->activation = random_int(0, 2) == 0 ? (te_activation)random_int(1, 2) : TE_ACT_NONE;
    g->alpha = random_int(0, 2) == 0 ? 0.37f : 1;
    g->beta = (float)random_int(0, 1);
}

static void test_random_products(void)
{
    static const int64_t sizes[] = {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 47, 48, 49, 64, 65, 97, 130};
    enum { SIZES = sizeof sizes / sizeof sizes[0] };
    for (int round = 0; round < 700; round++) {
        int64_t batch[3] = {random_int(1, 3), random_int(0, 8) ? random_int(1, 4) : 0, random_int(1, 2)};
        int batch_dims = random_int(0, 1) ? 0 : (int)random_int(1, 3);
        int64_t limit = batch_dims ? 12 : SIZES - 1;
        product p = make(type_pairs[round % TYPE_PAIRS], sizes[random_int(0, limit)], sizes[random_int(0, limit)],
                         sizes[random_int(0, limit)], batch_dims, batch);
        add_epilogue(&p);
        run_all(&p);
        release(&p);
    }
}

/* Several slices and units of the blocked kernel, shared by threads: complete tiles as in a
 * model, and incomplete ones. */
static void test_large_products(void)
{
    static const int64_t shapes[][3] = {{257, 70, 300}, {33, 500, 129}, {5, 17, 9000}, {300, 1, 400}, {1, 700, 600},
                                        {9, 1500, 1500}, {20, 60, 4200}, {64, 192, 768}, {600, 96, 64},
                                        {131, 337, 514}, {65, 128, 768}, {128, 512, 96}, {528, 40, 1056},
                                        {600, 5, 500}, {530, 2, 531}, {40, 8, 90}, {530, 110, 1100}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int t = 0; t < TYPE_PAIRS; t++) {
            product p = make(type_pairs[t], shapes[i][0], shapes[i][1], shapes[i][2], 0, NULL);
            if (t % 2) add_epilogue(&p);
            run_all(&p);
            release(&p);
        }
}

/* An a whose steps of k are pages apart, and odd in number, with more lines than are packed at a time. */
static void test_steps_apart(void)
{
    for (int t = 0; t < TYPE_PAIRS; t++)
        for (int64_t k = 69; k <= 420; k += 351) {
            product p = make(type_pairs[t], 1100, 59, k, 0, NULL);
            free(p.a.base), free(p.b.base);
            p.a = place(&p.gemm.a, COLUMNS, false);
            p.b = place(&p.gemm.b, k % 2 ? COLUMNS : ROWS, false);
            expectation *expected = expect(&p.gemm);
            run_and_check(&p, expected, "blocked");
            free(expected);
            release(&p);
        }
}

/* Gives c rows of `pitch` elements, each a whole number of cache lines. */
static void place_in_lines(product *p, int64_t rows, int64_t pitch)
{
    enum { LINE = 64 };
    free(p->c.base);
    p->c.bytes = (size_t)(rows * pitch) * te_dtype_size(p->gemm.c.dtype) + LINE;
    p->c.base = malloc(p->c.bytes);
    if (!p->c.base) abort();
    memset(p->c.base, 0xff, p->c.bytes);
    p->gemm.c.data = (char *)(((uintptr_t)p->c.base + LINE - 1) & ~(uintptr_t)(LINE - 1));
    p->gemm.c.stride[0] = pitch, p->gemm.c.stride[1] = 1;
}

/* Whether large results of that type of operands are written past the caches. */
static bool streams_from(te_dtype in)
{
    const te_gemm_state *state = te_gemm_state_get(&execs[0]);
    return in == TE_F32 ? state->f32.streams : state->bf16_pairs && (state->matrix_unit || state->bf16.streams);
}

/* A result of whole cache lines, too large for the caches: products of bfloat16 pairs, and all of machines with a
 * matrix unit, write it past them, and sum up its squares. */
static void test_streamed_result(void)
{
    enum { N = 640 };
    static const int64_t rows[] = {1050, 1050, 1056, 1056, 2112, 2112}, steps[] = {32, 32, 69, 69, 72, 72};
    for (int run = 0; run < 6; run++) {
        int64_t M = rows[run], K = steps[run];
        product p = make((type_pair){run % 2 ? TE_F32 : TE_BF16, TE_F32}, M, N, K, 0, NULL);
        place_in_lines(&p, M, N);
        squares_found = 0;
        run_all(&p);
        expectation *expected = expect(&p.gemm);
        int found = squares_found;
        bool streams = streams_from(p.gemm.a.dtype);
        int  group = te_gemm_state_get(&execs[0])->matrix_unit ? 16 : 1; /* which does so in whole registers */
        CHECK_MSG(found > 0 || !streams || M % group, "%d rows: no sum of squares", (int)M);
        run_in_slices(&p, expected, 0.6 * (double)(M * N * K));
        bool halves = M > 2000 && streams && run % 2 == 0;
        CHECK_MSG(squares_found > found || !halves, "%d rows in two slices: no sum of squares", (int)M);
        free(expected);
        release(&p);
    }
}

/* The same of bfloat16, with a last panel of half the width, and with rows that fill no register. */
static void test_streamed_rounded(void)
{
    enum { PITCH = 1024 };
    static const int64_t rows[] = {2112, 2100}, cols[] = {1008, 1024}, steps[] = {37, 32};
    for (int run = 0; run < 2; run++) {
        product p = make((type_pair){TE_BF16, TE_BF16}, rows[run], cols[run], steps[run], 0, NULL);
        place_in_lines(&p, rows[run], PITCH);
        run_all(&p);
        release(&p);
    }
}

/* Units side by side share packed rows of a, but calls do not: an a that changed where it lies is read again. */
static void test_operand_changes(void)
{
    enum { M = 9, N = 3300, K = 300 };
    for (int run = 0; run < 4; run++) {
        type_pair types = {run % 2 ? TE_BF16 : TE_F32, TE_F32};
        product p = make(types, M, N, K, 0, NULL);
        size_t size = te_dtype_size(types.in);
        float *c = malloc(2 * sizeof(float[M * N])), *negated = c + M * N;
        if (!c) abort();
        p.gemm.c.data = c, p.gemm.c.stride[0] = N, p.gemm.c.stride[1] = 1;
        CHECK(te_cpu_gemm_with(&execs[run / 2], "blocked", &p.gemm) == TE_OK);
        for (size_t at = size - 1; at < p.a.bytes; at += size) p.a.base[at] ^= (char)0x80; /* signs */
        p.gemm.c.data = negated;
        CHECK(te_cpu_gemm_with(&execs[run / 2], "blocked", &p.gemm) == TE_OK);
        int same = 0;
        for (int i = 0; i < M * N; i++) same += negated[i] == -c[i];
        CHECK_MSG(same == M * N, "%d of %d numbers of -a b are those of a b, negated", same, M * N);
        free(c);
        release(&p);
    }
}

static void test_small_products(void)
{
    static const int64_t shapes[][3] = {{4, 4, 4}, {3, 7, 5}, {9, 33, 6}, {1, 40, 17}, {20, 18, 30}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int t = 0; t < TYPE_PAIRS; t++) {
            if (type_pairs[t].out == TE_F16) continue; /* some of so many sums are too near 0 for its precision */
            product p = make(type_pairs[t], shapes[i][0], shapes[i][1], shapes[i][2], 2, (int64_t[2]){101, 3});
            if (t % 3 == 0) add_epilogue(&p);
            run_all(&p);
            release(&p);
        }
}

/* However many threads share c, the units of our own kernel cover it once, and its bits are those of one thread. */
static void test_many_threads(void)
{
    static const int64_t shapes[][3] = {{65, 128, 300}, {256, 512, 70}, {500, 130, 128}, {40, 900, 64}, {8, 2100, 129}};
    int usual = execs[1].threads;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int threads = 3; threads <= 17; threads += 2) {
            type_pair types = type_pairs[(i + (size_t)threads / 2) % 3];
            product p = make(types, shapes[i][0], shapes[i][1], shapes[i][2], 0, NULL);
            p.gemm.beta = threads % 4 == 1;
            expectation *expected = expect(&p.gemm);
            execs[1].threads = threads;
            CHECK(run_and_check(&p, expected, "blocked"));
            free(expected);
            release(&p);
        }
    execs[1].threads = usual;
}

/* Products of a training step, in pieces that are enough for many threads: a layer forward, both of its gradients. */
static void test_pieces_for_many_threads(void)
{
    static const struct {
        int64_t m, n, k;
        layout  a, b;
    } cases[] = {{640, 128, 300, ROWS, ROWS},    {768, 128, 130, ROWS, COLUMNS},  {320, 136, 700, COLUMNS, ROWS},
                 {150, 900, 260, COLUMNS, ROWS}, {1100, 96, 260, ROWS, COLUMNS}, {160, 512, 400, COLUMNS, ROWS},
                 {1, 770, 900, ROWS, COLUMNS},   {2, 510, 1100, ROWS, COLUMNS}};
    static const int threads[] = {3, 5, 8, 16, 64};
    int              usual = execs[1].threads;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        product p = make(type_pairs[0], cases[i].m, cases[i].n, cases[i].k, 0, NULL);
        free(p.a.base);
        free(p.b.base);
        p.a = place(&p.gemm.a, cases[i].a, false);
        p.b = place(&p.gemm.b, cases[i].b, false);
        p.gemm.beta = i % 2;
        expectation *expected = expect(&p.gemm);
        for (size_t t = 0; t < sizeof threads / sizeof threads[0]; t++) {
            execs[1].threads = threads[t];
            CHECK(run_and_check(&p, expected, NULL));
            (void)run_and_check(&p, expected, "onednn");
        }
        free(expected);
        release(&p);
    }
    execs[1].threads = usual;
}

/* Each row of p is computed alone, to the bits that it has among all, as p.c holds them. */
static void check_rows_alone(product *p, const char *impl)
{
    char  *all = copy_of(&p->gemm.c, &p->c);
    size_t size = te_dtype_size(p->gemm.c.dtype), skip = (size_t)((char *)p->gemm.c.data - p->c.base);
    for (int64_t i = 0; i < p->gemm.a.shape[0]; i++) {
        te_gemm one = p->gemm;
        one.a.shape[0] = one.c.shape[0] = 1;
        one.a.data = (char *)one.a.data + i * one.a.stride[0] * (int64_t)te_dtype_size(one.a.dtype);
        one.c.data = (char *)one.c.data + i * one.c.stride[0] * (int64_t)size;
        if (te_view_present(&one.aux)) {
            one.aux.shape[0] = 1;
            one.aux.data = (char *)one.aux.data + i * one.aux.stride[0] * (int64_t)size;
        }
        CHECK(te_cpu_gemm_with(&execs[0], impl, &one) == TE_OK);
    }
    bool same_bits = memcmp(all - skip, p->c.base, p->c.bytes) == 0;
    CHECK_MSG(same_bits, "%s of %lld have other bits than alone", impl, (long long)p->gemm.a.shape[0]);
    free(all - skip);
}

/* Few rows, as a model's answers token by token: a row has the bits that it has alone. False: `impl` declines. */
static bool check_few_rows(const char *impl, layout of_b, type_pair types, int64_t m, int64_t n, int64_t k)
{
    product p = {.gemm = {.a = view_of(types.in, 2, NULL, m, k), .b = view_of(types.in, 2, NULL, k, n),
                          .c = view_of(types.out, 2, NULL, m, n), .alpha = 1}};
    p.a = place(&p.gemm.a, ROWS, false);
    p.b = place(&p.gemm.b, of_b, false);
    p.c = place(&p.gemm.c, m % 3 ? ROWS : BOTH_STRIDED, false);
    if (m % 2) add_epilogue(&p);
    p.gemm.beta = 0;
    expectation *expected = expect(&p.gemm);
    bool runs = run_and_check(&p, expected, impl);
    if (runs) {
        CHECK(te_cpu_gemm_with(&execs[1], impl, &p.gemm) == TE_OK);
        check_rows_alone(&p, impl);
    }
    free(expected);
    release(&p);
    return runs;
}

static void test_few_rows(void)
{
    static const type_pair types[] = {{TE_F32, TE_F32}, {TE_BF16, TE_BF16}, {TE_BF16, TE_F32}, {TE_F16, TE_F16}};
    for (int m = 1; m <= 8; m += 1 + m / 3) /* 1, 2, 3, 5, 7 */
        for (int t = 0; t < 4; t++) {
            int64_t n = random_int(800, 900), k = random_int(700, 900);
            bool few = m <= 3 || types[t].in == TE_F16;
            bool strided = m % 3 == 0;
            CHECK(check_few_rows("rows", COLUMNS, types[t], m, n, k));
            CHECK(check_few_rows("sweep", ROWS, types[t], m, n, k) == (few || strided));
            few = m <= 2 || types[t].in != TE_BF16;
            n = random_int(32, 180), k = random_int(1, 170);
            CHECK(check_few_rows("sweep", ROWS, types[t], m, n, k) == (few || strided));
        }
    /* more of them, where tiles would have to be packed for longer, and a does not grow too long */
    const te_gemm_state *state = te_gemm_state_get(&execs[0]);
    bool wide = te_cpu(&execs[0])->isa == TE_CPU_AVX512, floats = wide && state->f32.rate >= 2;
    bool pairs = wide && state->bf16_pairs && !state->matrix_unit;
    for (int t = 0; t < 3; t++) {
        int64_t m = random_int(9, 32), n = random_int(300, 700), k = random_int(300, 700);
        CHECK(check_few_rows("rows", COLUMNS, types[t], m, n, k) == (types[t].in == TE_F32 ? floats : pairs));
        CHECK(!check_few_rows("rows", COLUMNS, types[t], m, random_int(20, 120), random_int(1, 130)));
    }
    CHECK(check_few_rows("rows", COLUMNS, types[0], 49, 2200, 2001) == floats);
    CHECK(check_few_rows("rows", COLUMNS, types[2], 64, 2100, 4001) == pairs);
    CHECK(!check_few_rows("rows", COLUMNS, types[0], 49, 1100, 3900));
}

/* --- particular behaviour
 * ------------------------------------------------------------------------------------------------ */

static void test_not_finite(void)
{
    for (int t = 0; t < TYPE_PAIRS; t++) {
        product p = make(type_pairs[t], 40, 50, 33, 0, NULL);
        te_store_f64(p.gemm.a.data, p.gemm.a.dtype, offset_of(&p.gemm.a, 0, 3, 5), NAN);
        te_store_f64(p.gemm.a.data, p.gemm.a.dtype, offset_of(&p.gemm.a, 0, 7, 5), INFINITY);
        te_store_f64(p.gemm.b.data, p.gemm.b.dtype, offset_of(&p.gemm.b, 0, 2, 49), -INFINITY);
        te_store_f64(p.gemm.b.data, p.gemm.b.dtype, offset_of(&p.gemm.b, 0, 5, 4), 0);
        for (int act = TE_ACT_NONE; act <= TE_ACT_RELU; act++) {
            p.gemm.activation = (te_activation)act;
            run_all(&p);
        }
        release(&p);
    }
}

/* beta = 0 does not read c: what is there, NaN included, is gone. */
static void test_result_not_read(void)
{
    for (int t = 0; t < TYPE_PAIRS; t++) {
        product p = make(type_pairs[t], 70, 60, 80, 0, NULL);
        for (size_t i = 0; i < p.c.bytes / te_dtype_size(p.gemm.c.dtype); i++)
            te_store_f64(p.c.base, p.gemm.c.dtype, i, NAN);
        run_all(&p);
        release(&p);
    }
}

static void test_errors(void)
{
    te_exec *exec = &execs[0];
    product p = make(type_pairs[0], 4, 5, 6, 0, NULL);
    te_gemm g = p.gemm;
    g.b.shape[0] = 7;
    CHECK(te_cpu_gemm(exec, &g) == TE_ERROR_ARGUMENT);
    CHECK_MSG(strstr(exec->message, "[4, 6]") && strstr(exec->message, "[7, 5]"), "%s", exec->message);
    g = p.gemm;
    g.beta = 0.5f;
    CHECK(te_cpu_gemm(exec, &g) == TE_ERROR_ARGUMENT);
    g = p.gemm;
    g.b.dtype = TE_BF16;
    CHECK(te_cpu_gemm(exec, &g) == TE_ERROR_ARGUMENT);
    CHECK_MSG(strstr(exec->message, "bfloat16"), "%s", exec->message);
    g = p.gemm;
    g.bias = (te_view){.data = p.a.base, .dtype = TE_F32, .ndim = 1, .shape = {4}, .stride = {1}};
    CHECK(te_cpu_gemm(exec, &g) == TE_ERROR_ARGUMENT);
    g = p.gemm;
    g.aux = g.a;
    CHECK(te_cpu_gemm(exec, &g) == TE_ERROR_ARGUMENT);
    release(&p);
}

/* --- kept copies
 * ----------------------------------------------------------------------------------------------------------- */

static void check_product(product *p, const char *what)
{
    expectation *expected = expect(&p->gemm);
    CHECK(te_cpu_gemm(&execs[1], &p->gemm) == TE_OK);
    compare(&p->gemm, expected, (char *)p->gemm.c.data, what);
    free(expected);
}

/* A weight keeps its key while its contents stay; the copy made on the way gives the bits that no copy gives. */
static void test_keys(void)
{
    for (int t = 0; t < TYPE_PAIRS; t++)
        for (int64_t m = 3; m < 100; m += 40) {
            product p = make(type_pairs[t], m, 200, 150, 0, NULL);
            CHECK(te_cpu_gemm(&execs[1], &p.gemm) == TE_OK);
            char *first = copy_of(&p.gemm.c, &p.c);
            p.gemm.b_key = (uint64_t)t << 20 | (uint64_t)m << 40 | 7;
            for (int repeat = 0; repeat < 4; repeat++) {
                check_product(&p, "same key");
                CHECK_MSG(memcmp(first - ((char *)p.gemm.c.data - p.c.base), p.c.base, p.c.bytes) == 0,
                          "a kept copy changes bits: m=%lld %s", (long long)m, te_dtype_name(p.gemm.a.dtype));
            }
            for (int change = 0; change < 3; change++) {
                for (size_t i = 0; i < p.b.bytes / te_dtype_size(p.gemm.b.dtype); i++)
                    te_store_f64(p.b.base, p.gemm.b.dtype, i, test_uniform(&seed, -1, 1));
                p.gemm.b_key++;
                for (int repeat = 0; repeat < 3; repeat++) check_product(&p, "new key");
            }
            free(first - ((char *)p.gemm.c.data - p.c.base));
            release(&p);
        }
}

/* Counts what is allocated and fails on demand. */
typedef struct counting_mem {
    size_t bytes;
    int    until_failure; /* negative: never */
} counting_mem;

static void *counting_realloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    counting_mem *count = user;
    if (new_size && count->until_failure >= 0 && count->until_failure-- == 0) return NULL;
    void *p = te_mem_libc.realloc(NULL, ptr, old_size, new_size);
    if (p || new_size == 0) count->bytes += new_size - (ptr ? old_size : 0);
    return p;
}

static const void *look_up(te_gemm_cache *cache, uint64_t key, size_t bytes, void **room)
{
    te_gemm_packed_id id = {.key = key, .form = {1, 2, 3}};
    return te_gemm_cache_find(cache, &id, bytes, room);
}

static void test_cache(void)
{
    enum { MIB = 1 << 20 };
    counting_mem count = {.until_failure = -1};
    te_mem mem = {counting_realloc, &count};
    te_gemm_cache *cache = te_gemm_cache_new(&mem);
    void *room;
    CHECK(!look_up(cache, 1, 100, &room) && !room); /* first sight */
    CHECK(!look_up(cache, 1, 100, &room) && room);
    CHECK((uintptr_t)room % 64 == 0);
    void *kept = room;
    CHECK(look_up(cache, 1, 100, &room) == kept && !room);
    CHECK(!look_up(cache, 2, 100, &room) && !room); /* another key, not this copy */

    for (uint64_t key = 10; key < 20; key++) look_up(cache, key, 64 * MIB, &room), look_up(cache, key, 64 * MIB, &room);
    CHECK(te_gemm_cache_bytes(cache) > 64 * MIB && te_gemm_cache_bytes(cache) <= 256 * MIB);
    CHECK(!look_up(cache, 19, 64 * MIB, &room) && !room);                /* no room, and those in use stay */
    for (int i = 0; i < 3000; i++) look_up(cache, 1, 100, &room);
    CHECK(!look_up(cache, 30, 64 * MIB, &room) && !room);
    CHECK(!look_up(cache, 30, 64 * MIB, &room) && room);                 /* the stale ones have made room */
    CHECK(te_gemm_cache_bytes(cache) == 64 * MIB + 100);

    for (uint64_t key = 1000; key < 3000; key++) look_up(cache, key, 8, &room); /* more keys than entries */
    count.until_failure = 0;
    look_up(cache, 31, 100, &room);
    CHECK(!look_up(cache, 31, 100, &room) && !room); /* no memory: no copy */
    te_gemm_cache_free(cache);
    CHECK(count.bytes == 0);
}

/* Every allocation of a session fails once: the product is right or says that memory is exhausted, and nothing leaks.
 */
static void test_memory_failures(void)
{
    product p = make((type_pair){TE_F32, TE_F32}, 90, 200, 150, 0, NULL);
    p.gemm.b_key = 99;
    expectation *expected = expect(&p.gemm);
    for (int fail_at = 0; fail_at < 12; fail_at++) {
        counting_mem count = {.until_failure = -1};
        te_mem mem = {counting_realloc, &count};
        te_exec exec = {.backend = &te_backend_cpu, .mem = &mem, .threads = 1, .scratch = test_scratch,
                        .scratch_free = test_scratch_free};
        CHECK(te_backend_cpu.device_open(&exec, 0) == TE_OK);
        count.until_failure = fail_at;
        for (int repeat = 0; repeat < 3; repeat++) {
            te_status status = te_cpu_gemm(&exec, &p.gemm);
            CHECK_MSG(status == TE_OK || status == TE_ERROR_MEMORY, "allocation %d: status %d", fail_at, status);
            if (status == TE_OK) compare(&p.gemm, expected, (char *)p.gemm.c.data, "after a failed allocation");
        }
        count.until_failure = -1;
        test_exec_close(&exec);
        CHECK_MSG(count.bytes == 0, "allocation %d: %zu bytes leaked", fail_at, count.bytes);
    }
    free(expected);
    release(&p);
}

/* Implementations are asked in order, and each that declines says why. */
static void test_choice(void)
{
    const char *reasons[TE_GEMM_IMPLS] = {0};
    te_gemm_problem problem;
    product p = make((type_pair){TE_F64, TE_F64}, 200, 200, 200, 0, NULL);
    CHECK(te_gemm_problem_make(&execs[0], &p.gemm, &problem) == TE_OK);
    const te_gemm_impl *impl = te_gemm_choose(&execs[0], &problem, reasons);
    CHECK_MSG(strcmp(impl->name, "blocked") == 0, "%s", impl->name);
    for (int i = 0; te_gemm_impls + i < impl; i++)
        CHECK_MSG(reasons[i] && reasons[i][0], "%s gives no reason", te_gemm_impls[i].name);
    release(&p);

    p = make((type_pair){TE_BF16, TE_BF16}, 96, 128, 768, 0, NULL);
    CHECK(te_gemm_problem_make(&execs[0], &p.gemm, &problem) == TE_OK);
    impl = te_gemm_choose(&execs[0], &problem, reasons);
    const te_gemm_state *state = te_gemm_state_get(&execs[0]);
    bool ours = state->bf16_pairs, here = true;
#ifndef TE_WITH_ONEDNN
    here = false; /* without the library there is nothing to prefer it to */
#endif
    CHECK_MSG((strcmp(impl->name, "own") == 0) == (ours && here), "%s: %s", impl->name, reasons[3]);
    release(&p);
}

int main(void)
{
    execs[0] = open_exec(1);
    execs[1] = open_exec(2);
    test_random_products();
    test_large_products();
    test_steps_apart();
    test_streamed_result();
    test_streamed_rounded();
    test_operand_changes();
    test_small_products();
    test_few_rows();
    test_many_threads();
    test_pieces_for_many_threads();
    test_not_finite();
    test_result_not_read();
    test_errors();
    test_keys();
    test_cache();
    test_memory_failures();
    test_choice();
    CHECK(row_runs > 0);
#ifdef TEST_MATRIX_UNIT
    CHECK(matrix_entries > 0 || !te_gemm_state_get(&execs[0])->bf16_pairs);
#endif
#ifdef TE_WITH_ONEDNN
    CHECK(onednn_runs > 0 || te_cpu(&execs[0])->isa == TE_CPU_PORTABLE);
#endif
    test_exec_close(&execs[0]);
    test_exec_close(&execs[1]);
    return TEST_END();
}
