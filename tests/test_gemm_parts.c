/* test_gemm_parts.c - products of float32 that a matrix unit for bfloat16 computes from parts of their factors: numbers
 * of any size, what is not finite, and what has to be exact. Vectors of float32 pass the same tests. */
#include "gemm_products.h"
#include "kernels/cpu/gemm_plan.h"

#include <float.h>

/* a m x k, b k x n, c m x n, contiguous in rows, but b in columns if `turned`. */
typedef struct floats {
    int64_t m, n, k;
    bool    turned;
    float  *a, *b, *c;
} floats;

static floats floats_new(int64_t m, int64_t n, int64_t k, bool turned)
{
    float *memory = calloc((size_t)(m * k + k * n + m * n), sizeof *memory);
    if (!memory) abort();
    return (floats){m, n, k, turned, memory, memory + m * k, memory + m * k + k * n};
}

static float *b_at(const floats *f, int64_t step, int64_t col)
{
    return f->b + (f->turned ? col * f->k + step : step * f->n + col);
}

static te_view of_floats(float *data, int64_t rows, int64_t cols, bool turned)
{
    te_view v = view_of(TE_F32, 2, NULL, rows, cols);
    v.data = data;
    v.stride[0] = turned ? 1 : cols, v.stride[1] = turned ? rows : 1;
    return v;
}

static te_gemm product_of(const floats *f)
{
    return (te_gemm){.a = of_floats(f->a, f->m, f->k, false), .b = of_floats(f->b, f->k, f->n, f->turned),
                     .c = of_floats(f->c, f->m, f->n, false), .alpha = 1};
}

static void multiply(const floats *f, int threads)
{
    te_gemm g = product_of(f);
    CHECK(te_cpu_gemm_with(&execs[threads - 1], "blocked", &g) == TE_OK);
}

/* Against float64, at what multiply-adds of float32 promise: relative to the magnitudes that are added up, or to the
 * smallest float. */
static void check(const floats *f, const char *what)
{
    int bad = 0;
    for (int64_t i = 0; i < f->m; i++)
        for (int64_t j = 0; j < f->n; j++) {
            double sum = 0, size = 0, got = (double)f->c[i * f->n + j];
            for (int64_t l = 0; l < f->k; l++) {
                double x = (double)f->a[i * f->k + l] * (double)*b_at(f, l, j);
                sum += x, size += fabs(x);
            }
            if (fabs(sum) > (double)FLT_MAX) sum = copysign((double)INFINITY, sum);
            double tolerance = (sqrt((double)f->k) + 8) * 0x1p-24 * size + (double)f->k * 0x1p-149;
            bool   right = same(got, sum, tolerance);
            if (!right && bad++ == 0)
                CHECK_MSG(right, "%s: (%d, %d) is %.9g, not %.9g", what, (int)i, (int)j, got, sum);
        }
    CHECK_MSG(bad == 0, "%s: %d values of %d x %d x %d%s", what, bad, (int)f->m, (int)f->n, (int)f->k,
              f->turned ? ", turned" : "");
}

static float scaled(int exponent) { return ldexpf((float)test_uniform(&seed, -1, 1), exponent); }

/* Fills a by rows and b by columns, each with a magnitude of its own between 2^low and 2^high, or both. */
static void fill(floats *f, int a_low, int a_high, int b_low, int b_high, bool each)
{
    for (int64_t i = 0; i < f->m; i++) {
        int of_row = (int)random_int(a_low, a_high);
        for (int64_t l = 0; l < f->k; l++) f->a[i * f->k + l] = scaled(each ? (int)random_int(a_low, a_high) : of_row);
    }
    for (int64_t j = 0; j < f->n; j++) {
        int of_col = (int)random_int(b_low, b_high);
        for (int64_t l = 0; l < f->k; l++) *b_at(f, l, j) = scaled(each ? (int)random_int(b_low, b_high) : of_col);
    }
}

/* Also where parts, products or sums are subnormal, which a matrix unit takes for 0. */
static void test_magnitudes(void)
{
    static const int ranges[][4] = {{-3, 3, -3, 3},         {-148, -120, 0, 0},     {0, 0, -148, -120},
                                    {-148, -100, 60, 100},  {100, 120, -148, -90},  {-80, -60, -80, -60},
                                    {-70, -60, -70, -50},   {-149, 60, -149, 60},   {-110, -100, -20, -10},
                                    {50, 60, 50, 60},       {-149, -149, 100, 120}, {-30, 30, -30, 30}};
    for (size_t r = 0; r < sizeof ranges / sizeof *ranges; r++)
        for (int each = 0; each < 2; each++) {
            floats f = floats_new(70, 83, r % 3 ? 150 : 300, r % 2);
            fill(&f, ranges[r][0], ranges[r][1], ranges[r][2], ranges[r][3], each);
            multiply(&f, 1 + each);
            char what[64];
            snprintf(what, sizeof what, "2^%d to 2^%d by 2^%d to 2^%d", ranges[r][0], ranges[r][1], ranges[r][2],
                     ranges[r][3]);
            check(&f, what);
            free(f.a);
        }
}

/* Numbers that have no three parts, and what comes of them; the rows and columns beside them keep their bits. */
static void test_specials(void)
{
    static const float specials[] = {INFINITY, -INFINITY, NAN, FLT_MAX, -FLT_MAX, 0x1.ff8p127f, 0x1.feffp127f, -0.0f};
    for (int turned = 0; turned < 2; turned++) {
        floats f = floats_new(67, 90, 141, turned), before = f;
        fill(&f, -2, 2, -2, 2, true);
        for (int64_t l = 0; l < f.k; l++) f.a[40 * f.k + l] = *b_at(&f, l, 77) = 0; /* lines of zeros */
        before.c = malloc((size_t)(f.m * f.n) * sizeof *before.c);
        if (!before.c) abort();
        multiply(&before, 1);
        for (size_t s = 0; s < sizeof specials / sizeof *specials; s++) {
            float *in_a = &f.a[33 * f.k + 5 * (int64_t)s], *in_b = b_at(&f, 7 * (int64_t)s, 50);
            float  x = *in_a, y = *in_b;
            *in_a = specials[s], *in_b = specials[s];
            multiply(&f, 2);
            char what[32];
            snprintf(what, sizeof what, "a factor %g", (double)specials[s]);
            check(&f, what);
            int others = 0;
            for (int64_t i = 0; i < f.m; i++)
                for (int64_t j = 0; j < f.n; j++) {
                    int64_t at = i * f.n + j;
                    others += i != 33 && j != 50 && memcmp(&f.c[at], &before.c[at], sizeof *f.c) != 0;
                }
            CHECK_MSG(others == 0, "%s changes %d other sums", what, others);
            *in_a = x, *in_b = y;
        }
        free(before.c), free(f.a);
    }
    floats f = floats_new(64, 96, 64, true); /* products of first parts alone, 2^64 by 2^64, would be too large */
    for (int i = 0; i < 64; i++) f.a[i * f.k + i] = *b_at(&f, i, i) = 0x1.ff7p63f;
    multiply(&f, 1);
    check(&f, "factors that round up to 2^64");
    free(f.a);
}

/* A float times 1, with zeros beside it, is that float; and sums of small whole numbers are exact. */
static void test_exact(void)
{
    enum { N = 130 };
    for (int which = 0; which < 4; which++) {
        floats f = floats_new(N, N, N, which % 2);
        int    bad = 0;
        for (int64_t i = 0; i < N; i++)
            for (int64_t j = 0; j < N; j++) {
                uint32_t bits = test_random(&seed) & 0xbfffffffu; /* below 2, some of them subnormal */
                float    x;
                if (i % 2) bits |= 0x007ff000u, bits &= ~(test_random(&seed) & 0x7fu); /* which round up */
                memcpy(&x, &bits, sizeof x);
                f.a[i * N + j] = which < 2 ? x : (float)(i == j);
                *b_at(&f, i, j) = which < 2 ? (float)(i == j) : x;
            }
        multiply(&f, 1);
        for (int64_t i = 0; i < N; i++)
            for (int64_t j = 0; j < N; j++)
                bad += f.c[i * N + j] != (which < 2 ? f.a[i * N + j] : *b_at(&f, i, j));
        CHECK_MSG(bad == 0, "%d of %d floats are others after a product with 1", bad, N * N);
        free(f.a);
    }
    floats f = floats_new(96, 96, 256, true);
    for (int64_t i = 0; i < f.m * f.k; i++) f.a[i] = (float)random_int(-255, 255);
    for (int64_t i = 0; i < f.k * f.n; i++) f.b[i] = (float)random_int(-255, 255);
    multiply(&f, 1);
    for (int64_t i = 0; i < f.m; i++)
        for (int64_t j = 0; j < f.n; j++) {
            int64_t sum = 0;
            for (int64_t l = 0; l < f.k; l++) sum += (int64_t)f.a[i * f.k + l] * (int64_t)*b_at(&f, l, j);
            CHECK_MSG((int64_t)f.c[i * f.n + j] == sum, "(%d, %d): %g, not %d", (int)i, (int)j,
                      (double)f.c[i * f.n + j], (int)sum);
        }
    free(f.a);
}

/* A b that is turned gives the bits of one that lies. */
static void test_layouts(void)
{
    floats lies = floats_new(150, 130, 275, false), turned = floats_new(150, 130, 275, true);
    fill(&lies, -3, 3, -3, 3, true);
    memcpy(turned.a, lies.a, (size_t)(lies.m * lies.k) * sizeof *lies.a);
    for (int64_t l = 0; l < lies.k; l++)
        for (int64_t j = 0; j < lies.n; j++) *b_at(&turned, l, j) = *b_at(&lies, l, j);
    multiply(&lies, 1);
    multiply(&turned, 2);
    CHECK(memcmp(lies.c, turned.c, (size_t)(lies.m * lies.n) * sizeof *lies.c) == 0);
    free(lies.a), free(turned.a);
}

/* Errors are those of float32: on average no larger than half of the last bit of what is added up. */
static void test_error(void)
{
    floats f = floats_new(128, 128, 1024, true);
    double errors = 0;
    fill(&f, 0, 0, 0, 0, true);
    multiply(&f, 2);
    for (int64_t i = 0; i < f.m; i++)
        for (int64_t j = 0; j < f.n; j++) {
            double sum = 0, size = 0;
            for (int64_t l = 0; l < f.k; l++) {
                double x = (double)f.a[i * f.k + l] * (double)*b_at(&f, l, j);
                sum += x, size += fabs(x);
            }
            double error = ((double)f.c[i * f.n + j] - sum) / size;
            errors += error * error;
        }
    double rms = sqrt(errors / (double)(f.m * f.n));
    CHECK_MSG(rms < 0.5 * 0x1p-24, "an error of %.3f 2^-24", rms * 0x1p24);
    free(f.a);
}

/* A subnormal number, which the unit loses, by a large one in another chunk of k than others; the sum is not small. */
static void test_far_apart(void)
{
    for (int turned = 0; turned < 2; turned++) {
        floats f = floats_new(130, 270, 1000, turned);
        fill(&f, -10, -10, -10, -10, true);
        for (int64_t i = 0; i < f.m; i++) f.a[i * f.k + (i % 2 ? 3 : 900)] = 0x1p100f;
        for (int64_t j = 0; j < f.n; j++) *b_at(&f, 3, j) = *b_at(&f, 900, j) = 0x1p-130f;
        multiply(&f, 2);
        check(&f, "far apart");
        free(f.a);
    }
}

/* Which products are computed so: not those of a few elements, or too narrow for tiles. */
static void test_choice(void)
{
    static const struct {
        int64_t m, n, k;
        bool    in_unit;
    } cases[] = {{48, 96, 64, true}, {1000, 48, 48, true}, {64, 96, 31, false}, {1000, 15, 40, false}};
    te_gemm_state *state = te_gemm_state_get(&execs[0]);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        floats  f = floats_new(cases[i].m, cases[i].n, cases[i].k, true);
        te_gemm g = product_of(&f);
        te_gemm_problem problem;
        te_gemm_plan    plan;
        CHECK(te_gemm_problem_make(&execs[0], &g, &problem) == TE_OK);
        te_gemm_plan_make(&execs[0], state, &problem, &plan);
        bool unit = plan.kernel == state->f32_in_unit;
        CHECK_MSG(unit == (cases[i].in_unit && state->f32_in_unit), "case %zu", i);
#ifdef TE_WITH_ONEDNN
        const char *chosen = te_gemm_choose(&execs[0], &problem, NULL)->name;
        CHECK_MSG(!unit || strcmp(chosen, "own") == 0, "case %zu goes to %s", i, chosen);
#endif
        free(f.a);
    }
}

/* Sums that are 0, where lines are not: of large numbers, and of some that are too small for the unit. */
static void test_zeros(void)
{
    for (int run = 0; run < 4; run++) {
        floats f = floats_new(90, 75, 200, run % 2);
        for (int64_t i = 0; i < f.m; i++)
            for (int64_t l = 0; l < f.k; l++) f.a[i * f.k + l] = random_int(0, 19) ? 0 : scaled(run < 2 ? 0 : -90);
        for (int64_t l = 0; l < f.k; l++)
            for (int64_t j = 0; j < f.n; j++) *b_at(&f, l, j) = random_int(0, 9) ? 0 : scaled(j % 3 ? 0 : -70);
        multiply(&f, 1);
        check(&f, "sparse");
        free(f.a);
    }
}

int main(void)
{
    execs[0] = open_exec(1);
    execs[1] = open_exec(2);
    test_magnitudes();
    test_specials();
    test_exact();
    test_zeros();
    test_layouts();
    test_error();
    test_far_apart();
    test_choice();
    test_exec_close(&execs[0]);
    test_exec_close(&execs[1]);
    return TEST_END();
}
