/* test_attention.c - attention forward and backward against a naive float64 reference: shapes, strides, masks, packing,
 * grouped heads, bias, dropout, hostile values; every instruction set, one and two threads. */
#include "attention_naive.h"

#include "attention_modes.h"

/* --- comparing -------------------------------------------------------------------------------------------------- */

/* Rounding of the result, plus of the float32 arithmetic relative to the largest value. */
static double tolerance(te_dtype dtype, double expected, double largest)
{
    double unit = dtype == TE_BF16 ? 0x1p-8 : dtype == TE_F16 ? 0x1p-11 : dtype == TE_F64 ? 1e-14 : 0x1p-23;
    double arithmetic = dtype == TE_F64 ? 1e-12 : 4e-6;
    return unit * fabs(expected) + (arithmetic + (dtype == TE_BF16 || dtype == TE_F16 ? unit * 0.5 : 0)) * largest +
           1e-30;
}

static double largest_of(const double *x, int64_t n)
{
    double m = 0;
    for (int64_t i = 0; i < n; i++)
        if (fabs(x[i]) > m && isfinite(x[i])) m = fabs(x[i]);
    return m;
}

/* Where weights are rounded to bfloat16 before they are multiplied, each term of a sum may be off by 2^-9 of its size:
 * `sizes` are the sums of those. precision: of what the result was computed from. inputs: how far what it was computed
 * from may be off, as a share of the largest value. */
static void compare_inexact(const char *what, te_dtype precision, const te_view *got, const double *expected,
                            const double *sizes, double inputs)
{
    int64_t n = 0, bad = 0;
    double largest = largest_of(expected, te_view_numel(got));
    for (int64_t b = 0; b < got->shape[0]; b++)
        for (int64_t h = 0; h < got->shape[1]; h++)
            for (int64_t i = 0; i < got->shape[2]; i++)
                for (int64_t d = 0; d < got->shape[3]; d++, n++) {
                    double x = at4(got, b, h, i, d), y = expected[n];
                    double terms = (sizes && isfinite(sizes[n]) ? 0x1p-9 * sizes[n] : 0) + inputs * largest;
                    bool same =
                        isnan(y) ? isnan(x)
                                 : !isnan(x) && (x == y || fabs(x - y) <= tolerance(precision, y, largest) + terms);
                    if (same) continue;
                    CHECK_MSG(bad++ > 2, "%s[%d, %d, %d, %d] is %.9g, not %.9g (largest %g)", what, (int)b, (int)h,
                              (int)i, (int)d, x, y, largest);
                }
    test_checks++;
}

static void compare(const char *what, te_dtype precision, const te_view *got, const double *expected,
                    const double *sizes)
{
    compare_inexact(what, precision, got, expected, sizes, 0);
}

static void compare_lse(const te_view *lse, const double *expected)
{
    for (int64_t i = 0; i < te_view_numel(lse); i++) {
        double x = te_load_f64(lse->data, lse->dtype, i), y = expected[i];
        CHECK_MSG((isnan(x) && isnan(y)) || x == y || fabs(x - y) <= 4e-6 * (1 + fabs(y)), "lse[%d] is %g, not %g",
                  (int)i, x, y);
    }
}

/* --- running ---------------------------------------------------------------------------------------------------- */

static int best_mode(void) { return attention_mode_count() - 1; }

static void run_on(problem *p, int mode, int threads)
{
    te_exec exec = test_exec_open(threads);
    attention_mode_set(&exec, mode);
    te_status status = te_cpu_attention(&exec, &p->g.forward);
    CHECK_MSG(status == TE_OK, "forward: %s", exec.message);
    status = te_cpu_attention_backward(&exec, &p->g);
    CHECK_MSG(status == TE_OK, "backward: %s", exec.message);
    test_exec_close(&exec);
}

static size_t view_bytes(const te_view *v)
{
    int64_t last = 0;
    for (int i = 0; i < v->ndim; i++) {
        if (v->shape[i] == 0) return 0;
        last += (v->shape[i] - 1) * v->stride[i];
    }
    return (size_t)(last + 1) * te_dtype_size(v->dtype);
}

/* Every instruction set against the reference; two threads bit for bit against one. */
static void check_problem(const char *name, problem *p)
{
    te_attention *a = &p->g.forward;
    te_view *results[6] = {&a->out, &a->lse, &p->g.dq, &p->g.dk, &p->g.dv, &p->g.dbias};
    te_dtype dtype = a->q.dtype;
    int n_results = te_view_present(&p->g.dbias) ? 6 : 5;
    reference r = {0};
    int before = test_failures;
    for (int mode = 0; mode < attention_mode_count(); mode++) {
        void *copies[6];
        run_on(p, mode, 1);
        if (mode == 0 || attention_mode_pairs(mode)) { /* the others have the same `out` */
            reference_free(&r);
            r = reference_run(&p->g);
        }
        bool pairs = attention_mode_pairs(mode) && a->q.dtype == TE_BF16;
        compare("out", dtype, &a->out, r.out, pairs ? r.out_size : NULL);
        compare_lse(&a->lse, r.lse);
        compare("dq", dtype, &p->g.dq, r.dq, pairs ? r.dq_size : NULL);
        compare("dk", dtype, &p->g.dk, r.dk, pairs ? r.dk_size : NULL);
        compare("dv", dtype, &p->g.dv, r.dv, pairs ? r.dv_size : NULL);
        if (n_results > 5) compare("dbias", dtype, &p->g.dbias, r.dbias, r.dbias_size);
        for (int i = 0; i < n_results; i++) {
            copies[i] = malloc(view_bytes(results[i]) + 1);
            memcpy(copies[i], results[i]->data, view_bytes(results[i]));
        }
        for (int threads = 2; threads <= 3; threads++) {
            run_on(p, mode, threads);
            for (int i = 0; i < n_results; i++)
                CHECK_MSG(memcmp(copies[i], results[i]->data, view_bytes(results[i])) == 0,
                          "result %d differs with %d threads", i, threads);
        }
        for (int i = 0; i < n_results; i++) free(copies[i]);
        if (test_failures > before) {
            fprintf(stderr,
                    "  in %s on %s: batch %d heads %d/%d seq %d/%d dim %d/%d window %d/%d%s dropout %g dtype %d\n",
                    name, attention_mode_name(mode), (int)a->q.shape[0], (int)a->q.shape[1], (int)a->k.shape[1],
                    (int)a->q.shape[2], (int)a->k.shape[2], (int)a->q.shape[3], (int)a->v.shape[3], (int)a->window_left,
                    (int)a->window_right, a->bottom_right ? " bottom right" : "", a->dropout, (int)a->q.dtype);
            break;
        }
    }
    reference_free(&r);
}

/* --- cases ------------------------------------------------------------------------------------------------------ */

static void test_random_problems(void)
{
    static const te_dtype dtypes[4] = {TE_F32, TE_BF16, TE_F16, TE_F64};
    static const int64_t dims[8] = {1, 7, 16, 24, 32, 33, 64, 80};
    uint64_t seed = 4242;
    for (int n = 0; n < 120; n++) {
        shape s = {.batch = 1 + test_random(&seed) % 2, .kv_heads = 1 + test_random(&seed) % 2};
        s.heads = s.kv_heads * (1 + test_random(&seed) % 3);
        s.seq_q = 1 + test_random(&seed) % (n % 8 == 0 ? 300 : 90);
        s.seq_kv = test_random(&seed) % 2 ? s.seq_q : 1 + test_random(&seed) % (n % 16 == 0 ? 600 : 150);
        s.dim = dims[test_random(&seed) % 8];
        s.dim_v = test_random(&seed) % 2 ? s.dim : dims[test_random(&seed) % 8];
        problem p = problem_new(dtypes[test_random(&seed) % 4], s, &seed);
        te_attention *a = &p.g.forward;
        if (test_random(&seed) % 2) a->window_right = test_random(&seed) % 2 ? 0 : test_random(&seed) % 40;
        if (test_random(&seed) % 3 == 0) a->window_left = test_random(&seed) % 70;
        a->bottom_right = test_random(&seed) % 2;
        if (test_random(&seed) % 3 == 0) a->dropout = test_uniform(&seed, 0.05, 0.9);
        if (test_random(&seed) % 3 == 0)
            add_bias(&p, dtypes[test_random(&seed) % 4], test_random(&seed) % 2, test_random(&seed) % 2,
                     test_random(&seed) % 2, &seed);
        if (n % 4 == 1) add_sinks(&p, seed);
        check_problem("random", &p);
        problem_free(&p);
    }
}

/* Generation with a cache: keys and values are taken as they lie where they are of the arithmetic's dtype and whole
 * vectors. */
static void test_one_query(void)
{
    static const int64_t dims[6] = {32, 48, 64, 96, 128, 16}, keys[5] = {17, 63, 64, 65, 300};
    uint64_t seed = 77;
    for (int n = 0; n < 72; n++) {
        shape s = {.batch = 1 + n % 2, .kv_heads = 2, .heads = 2 + 2 * (n % 3), .seq_q = 1, .seq_kv = keys[n % 5],
                   .dim = dims[n % 6], .dim_v = dims[n / 6 % 6]};
        problem p = problem_new(n / 36 ? TE_F32 : TE_BF16, s, &seed);
        te_attention *a = &p.g.forward;
        a->bottom_right = n % 7 != 0 || n % 3 == 0;
        if (n % 3 == 0) a->window_right = 0, a->window_left = n % 2 ? -1 : 20;
        if (n % 4 == 1) a->dropout = 0.3;
        if (n % 5 == 2) add_bias(&p, TE_F32, n % 2, true, false, &seed);
        if (n % 8 == 3) add_sinks(&p, seed);
        check_problem("one query", &p);
        problem_free(&p);
    }
}

static void test_shapes(void)
{
    uint64_t seed = 99;
    static const shape shapes[] = {{1, 1, 1, 1, 1, 1, 1}, {2, 3, 3, 64, 64, 32, 32}, {1, 2, 1, 257, 257, 64, 64},
                                   {1, 1, 1, 700, 700, 16, 16}, {1, 1, 1, 20, 30, 512, 512}, {1, 8, 1, 65, 65, 16, 16},
                                   {1, 2, 2, 1, 200, 64, 64}, {1, 2, 2, 130, 3, 8, 8}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int causal = 0; causal < 2; causal++) {
            problem p = problem_new(i % 2 ? TE_F32 : TE_BF16, shapes[i], &seed);
            if (causal) p.g.forward.window_right = 0, p.g.forward.bottom_right = i % 2;
            check_problem("shapes", &p);
            problem_free(&p);
        }
}

static void test_empty(void)
{
    uint64_t seed = 5;
    static const shape shapes[] = {{0, 2, 2, 8, 8, 4, 4}, {2, 0, 0, 8, 8, 4, 4}, {2, 0, 2, 8, 8, 4, 3},
                                   {1, 2, 2, 0, 8, 4, 4}, {1, 2, 2, 8, 0, 4, 4}, {1, 2, 2, 8, 8, 4, 0},
                                   {1, 2, 2, 8, 8, 0, 4}, {1, 2, 2, 0, 0, 4, 4}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        problem p = problem_new(TE_F32, shapes[i], &seed);
        te_view *results[5] = {&p.g.forward.out, &p.g.forward.lse, &p.g.dq, &p.g.dk, &p.g.dv};
        for (int k = 0; k < 5; k++) memset(results[k]->data, 0x55, view_bytes(results[k]));
        if (shapes[i].kv_heads)
            check_problem("empty", &p);
        else
            run_on(&p, TE_CPU_PORTABLE, 2);
        problem_free(&p);
    }
}

static void test_packed(void)
{
    uint64_t seed = 77;
    static const int32_t q_offsets[] = {3, 20, 20, 110, 120}, kv_offsets[] = {0, 17, 30, 120, 120};
    for (int variant = 0; variant < 8; variant++) {
        shape s = {1, 4, 2, 125, 140, 24, 16};
        problem p = problem_new(variant % 2 ? TE_F32 : TE_F64, s, &seed);
        te_attention *a = &p.g.forward;
        a->cu_seqlens_q = q_offsets;
        a->cu_seqlens_kv = kv_offsets;
        a->n_seqs = 4;
        a->bottom_right = variant / 2 % 2;
        if (variant / 4) a->window_right = 0, a->dropout = 0.3, a->window_left = 20;
        te_view *results[5] = {&a->out, &a->lse, &p.g.dq, &p.g.dk, &p.g.dv};
        for (int k = 0; k < 5; k++) memset(results[k]->data, 0x55, view_bytes(results[k]));
        check_problem("packed", &p);
        problem_free(&p);
    }
}

static void set4(const te_view *v, int64_t b, int64_t h, int64_t i, int64_t d, double x)
{
    te_store_f64(v->data, v->dtype, offset4(v, b, h, i, d), x);
}

/* What is not visible must not matter, however bad it is; what is visible and NaN must show. */
static void test_hostile(te_dtype dtype)
{
    uint64_t seed = 31;
    shape s = {1, 2, 2, 100, 100, 16, 16};
    for (int what = 0; what < 4; what++) {
        problem p = problem_new(dtype, s, &seed);
        te_attention *a = &p.g.forward;
        a->window_right = 0;
        double bad = what % 2 ? INFINITY : NAN;
        const te_view *victims[2] = {&a->k, &a->v};
        set4(victims[what / 2], 0, 1, 70, 3, bad);
        run_on(&p, best_mode(), 2);
        for (int64_t i = 0; i < 100; i++) {
            bool clean_out = isfinite(at4(&a->out, 0, 1, i, 3)), clean_dq = isfinite(at4(&p.g.dq, 0, 1, i, 0));
            if (i >= 70 && victims[what / 2] == &a->k && bad == INFINITY)
                continue; /* its score may be minus infinity */
            CHECK_MSG(clean_out == (i < 70), "out row %d", (int)i);
            CHECK_MSG(clean_dq == (i < 70), "dq row %d", (int)i);
            CHECK(isfinite(at4(&a->out, 0, 0, i, 3)) && isfinite(at4(&p.g.dk, 0, 0, i, 3)));
        }
        problem_free(&p);
    }
    /* a query that is NaN spoils what it sees, and nothing else */
    problem p = problem_new(dtype, s, &seed);
    te_attention *a = &p.g.forward;
    a->window_right = 0;
    set4(&a->q, 0, 0, 20, 5, NAN);
    run_on(&p, best_mode(), 2);
    for (int64_t j = 0; j < 100; j++) {
        CHECK_MSG(isnan(at4(&p.g.dk, 0, 0, j, 5)) == (j <= 20), "dk row %d", (int)j);
        CHECK_MSG(isnan(at4(&p.g.dv, 0, 0, j, 5)) == (j <= 20), "dv row %d", (int)j);
        CHECK(isnan(at4(&a->out, 0, 0, j, 0)) == (j == 20));
    }
    problem_free(&p);
}

/* Scores of minus infinity: an arbitrary mask as a bias, with rows that see nothing. Scores far apart must not
 * overflow. */
static void test_extreme_scores(void)
{
    uint64_t seed = 8;
    shape s = {2, 2, 1, 70, 90, 16, 16};
    for (int variant = 0; variant < 4; variant++) {
        problem p = problem_new(variant % 2 ? TE_F32 : TE_BF16, s, &seed);
        te_attention *a = &p.g.forward;
        if (variant / 2) a->scale = 0; /* then scores are exact */
        add_bias(&p, TE_F32, true, true, true, &seed);
        for (int64_t b = 0; b < 2; b++)
            for (int64_t h = 0; h < 2; h++)
                for (int64_t i = 0; i < 70; i++)
                    for (int64_t j = 0; j < 90; j++) {
                        bool masked = i == 7 || i == 69 || test_random(&seed) % 3 == 0 || (i == 40 && j < 64);
                        set4(&a->bias, b, h, i, j,
                             masked        ? -INFINITY
                             : variant / 2 ? rint(test_uniform(&seed, -1e4, 1e4)) * 64
                                           : 0);
                    }
        check_problem("minus infinity", &p);
        problem_free(&p);
    }
}

/* Hidden by a bias: keys whose scores overflow and values whose products with dout do. */
static void test_hidden(void)
{
    static const te_dtype dtypes[3] = {TE_F32, TE_BF16, TE_F64};
    uint64_t seed = 21;
    for (int n = 0; n < 12; n++) {
        shape s = {1, 2, 1, n % 4 == 3 ? 1 : 70, 90, 32, 16};
        problem p = problem_new(dtypes[n % 3], s, &seed);
        te_attention *a = &p.g.forward;
        double huge = a->q.dtype == TE_F64 ? 1.7e308 : 3e38;
        if (n / 3 % 2) a->dropout = 0.3;
        if (n / 6) a->window_right = 30;
        add_bias(&p, TE_F32, true, true, true, &seed);
        for (int64_t j = 1; j < s.seq_kv; j += 3) {
            for (int64_t d = 0; d < s.dim; d++) set4(&a->k, 0, 0, j, d, d % 2 ? huge : -huge);
            for (int64_t d = 0; d < s.dim_v; d++) set4(&a->v, 0, 0, j, d, j % 2 ? huge : -huge);
            for (int64_t i = 0; i < s.heads * s.seq_q; i++)
                set4(&a->bias, 0, i / s.seq_q, i % s.seq_q, j, -INFINITY);
        }
        check_problem("hidden by a bias", &p);
        problem_free(&p);
    }
}

/* Scores that rise or fall from one block of keys to the next, by less and by more than what weights may be relative to
 * without being brought to a new maximum. Scores of up to 160 are known to 1e-5, and so are weights. */
static void test_rising_scores(void)
{
    static const double steps[6] = {0.5, 3, 7.5, 9, 40, -6};
    uint64_t seed = 12;
    shape s = {1, 2, 1, 140, 300, 16, 16};
    for (int n = 0; n < 24; n++) {
        problem p = problem_new(n / 6 % 2 ? TE_F32 : TE_BF16, s, &seed);
        te_attention *a = &p.g.forward;
        a->scale = n % 4 ? 0.5 : 1;
        if (n / 12) a->dropout = 0.25;
        for (int64_t i = 0; i < 140 * 2 * 16; i++)
            set4(&a->q, 0, i / (140 * 16), i / 16 % 140, i % 16, test_uniform(&seed, 0.75, 1.25) / a->scale);
        for (int64_t j = 0; j < 300 * 16; j++)
            set4(&a->k, 0, 0, j / 16, j % 16, test_uniform(&seed, -1, 1) + steps[n % 6] / 16 * (double)(j / 16 / 64));
        for (int mode = 0; mode < attention_mode_count(); mode++) {
            run_on(&p, mode, 2);
            reference r = reference_run(&p.g);
            bool      pairs = attention_mode_pairs(mode) && a->q.dtype == TE_BF16;
            compare_inexact("out", a->q.dtype, &a->out, r.out, pairs ? r.out_size : NULL, 3e-5);
            compare_lse(&a->lse, r.lse);
            reference_free(&r);
        }
        problem_free(&p);
    }
}

/* The gradient of sum(out * dout) by central differences, in float64. */
static void test_finite_differences(void)
{
    uint64_t seed = 3;
    shape s = {1, 2, 1, 9, 11, 5, 4};
    problem p = problem_new(TE_F64, s, &seed);
    te_attention *a = &p.g.forward;
    a->dropout = 0.25;
    a->window_right = 2;
    run_on(&p, best_mode(), 1);
    const te_view *inputs[3] = {&a->q, &a->k, &a->v}, *grads[3] = {&p.g.dq, &p.g.dk, &p.g.dv};
    for (int which = 0; which < 3; which++)
        for (int n = 0; n < 25; n++) {
            const te_view *x = inputs[which];
            int64_t h = test_random(&seed) % (uint32_t)x->shape[1], i = test_random(&seed) % (uint32_t)x->shape[2],
                    d = test_random(&seed) % (uint32_t)x->shape[3];
            double expected = at4(grads[which], 0, h, i, d), value = at4(x, 0, h, i, d), loss[2] = {0, 0};
            for (int side = 0; side < 2; side++) {
                te_exec exec = test_exec_open(1);
                set4(x, 0, h, i, d, value + (side ? 1e-5 : -1e-5));
                CHECK(te_cpu_attention(&exec, a) == TE_OK);
                test_exec_close(&exec);
                for (int64_t b = 0; b < a->q.shape[1]; b++)
                    for (int64_t r = 0; r < a->q.shape[2]; r++)
                        for (int64_t e = 0; e < a->v.shape[3]; e++)
                            loss[side] += at4(&a->out, 0, b, r, e) * at4(&p.g.dout, 0, b, r, e);
            }
            set4(x, 0, h, i, d, value);
            double slope = (loss[1] - loss[0]) / 2e-5;
            CHECK_MSG(fabs(slope - expected) < 1e-7 * (1 + fabs(slope)), "gradient %d: %g, by differences %g", which,
                      expected, slope);
        }
    problem_free(&p);
}

/* With v of ones a row of out is the sum of its kept weights: its mean is 1 whatever the probability. */
static void test_dropout_mean(void)
{
    uint64_t seed = 17;
    shape s = {1, 4, 4, 128, 128, 8, 1};
    static const double probabilities[] = {0.1, 0.5, 0.9, 1.0};
    for (int n = 0; n < 4; n++) {
        problem p = problem_new(TE_F32, s, &seed);
        te_attention *a = &p.g.forward;
        a->scale = 0;
        a->dropout = probabilities[n];
        for (int64_t h = 0; h < 4; h++)
            for (int64_t j = 0; j < 128; j++) set4(&a->v, 0, h, j, 0, 1);
        run_on(&p, best_mode(), 2);
        double sum = 0, rows = 4 * 128, entries = rows * 128;
        for (int64_t h = 0; h < 4; h++)
            for (int64_t i = 0; i < 128; i++) sum += at4(&a->out, 0, h, i, 0);
        double expected = n == 3 ? 0 : 1, deviation = n == 3 ? 0 : sqrt(a->dropout / (1 - a->dropout) / entries);
        CHECK_MSG(fabs(sum / rows - expected) <= 5 * deviation, "p = %g: mean %g", a->dropout, sum / rows);
        problem_free(&p);
    }
}

static void check_refused(problem *p, const char *part)
{
    te_exec exec = test_exec_open(1);
    te_status status = te_cpu_attention_backward(&exec, &p->g);
    CHECK(status == TE_ERROR_ARGUMENT || status == TE_ERROR_UNSUPPORTED);
    CHECK_MSG(strstr(exec.message, part) != NULL, "\"%s\" lacks \"%s\"", exec.message, part);
    test_exec_close(&exec);
}

static void *no_scratch(te_exec *exec, size_t bytes)
{
    (void)bytes;
    te_exec_fail(exec, TE_ERROR_MEMORY, "none");
    return NULL;
}

static void test_refusals(void)
{
    uint64_t seed = 1;
    shape s = {1, 2, 2, 8, 8, 4, 4};
    static const int32_t falling[] = {0, 5, 3}, rising[] = {0, 3, 8};
    problem p = problem_new(TE_F32, s, &seed), broken = p;
    broken.g.forward.k.shape[1] = 3;
    check_refused(&broken, "{1, 3, 8, 4}");
    broken = p;
    broken.g.forward.q.stride[3] = 2;
    check_refused(&broken, "stride 2");
    broken = p;
    broken.g.forward.v.dtype = TE_BF16;
    check_refused(&broken, "same dtype");
    broken = p;
    broken.g.forward.dropout = 1.5;
    check_refused(&broken, "1.5");
    broken = p;
    broken.g.dk.shape[2] = 7;
    check_refused(&broken, "dk {1, 2, 7, 4}");
    broken = p;
    broken.g.forward.cu_seqlens_q = falling;
    broken.g.forward.cu_seqlens_kv = rising;
    broken.g.forward.n_seqs = 2;
    check_refused(&broken, "cu_seqlens_q[2] is 3");
    broken = p;
    broken.g.forward.lse.data = NULL;
    check_refused(&broken, "lse");
    broken = p;
    broken.g.dbias = p.g.dout;
    check_refused(&broken, "dbias float32 {1, 2, 8, 4}");

    te_exec exec = test_exec_open(2);
    exec.scratch = no_scratch;
    CHECK(te_cpu_attention(&exec, &p.g.forward) == TE_ERROR_MEMORY);
    CHECK(te_cpu_attention_backward(&exec, &p.g) == TE_ERROR_MEMORY);
    test_exec_close(&exec);
    problem_free(&p);
}

int main(void)
{
    test_shapes();
    test_empty();
    test_packed();
    test_hostile(TE_F32);
    test_hostile(TE_BF16);
    test_hidden();
    test_extreme_scores();
    test_rising_scores();
    test_finite_differences();
    test_dropout_mean();
    test_refusals();
    test_random_problems();
    test_one_query();
    return TEST_END();
}
