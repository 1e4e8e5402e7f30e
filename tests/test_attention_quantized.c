/* test_attention_quantized.c - attention forward on E4M3 operands against its formula in float64 (te_attention): masks,
 * packed sequences, grouped heads, odd sizes, values that are NaN; every instruction set, one and two threads. */
#include "test.h"

#include "attention_modes.h"
#include "kernels/dtype.h"

enum { BATCH = 2, HEADS = 4, KV_HEADS = 2, QUERIES = 67, KEYS = 131, DIM = 20, DIM_V = 36 };

typedef struct problem {
    te_attention a;
    te_quant quants[3];
    float factors[3];
} problem;

static te_view codes_of(int64_t heads, int64_t seq, int64_t dim, uint64_t *seed)
{
    int64_t shape[4] = {BATCH, heads, seq, dim}, n = BATCH * heads * seq * dim;
    uint8_t *codes = calloc((size_t)n, 1);
    for (int64_t i = 0; codes && i < n; i++) codes[i] = te_f32_to_f8e4m3((float)test_uniform(seed, -8, 8));
    te_view v = test_view(codes, TE_F8E4M3, 4, shape);
    v.stride[1] = dim; /* memory [batch, seq, heads, dim] */
    v.stride[2] = heads * dim;
    return v;
}

static void problem_open(problem *p, te_dtype out, uint64_t seed)
{
    int64_t shape[4] = {BATCH, HEADS, QUERIES, DIM_V};
    te_view *views[3] = {&p->a.q, &p->a.k, &p->a.v};
    memset(p, 0, sizeof *p);
    p->a.q = codes_of(HEADS, QUERIES, DIM, &seed);
    p->a.k = codes_of(KV_HEADS, KEYS, DIM, &seed);
    p->a.v = codes_of(KV_HEADS, KEYS, DIM_V, &seed);
    for (int i = 0; i < 3; i++) {
        p->factors[i] = (float)test_uniform(&seed, 0.05, 0.3);
        p->quants[i] = (te_quant){.element = TE_E4M3, .scale = TE_SCALE_F32, .scale_inv = &p->factors[i]};
        views[i]->quant = &p->quants[i];
    }
    p->a.out = test_view(calloc(BATCH * HEADS * QUERIES * DIM_V, 8), out, 4, shape);
    p->a.lse = test_view(calloc(BATCH * HEADS * QUERIES, 8), TE_F32, 3, shape);
    p->a.scale = 0.5;
    p->a.window_left = p->a.window_right = -1;
}

static void problem_close(problem *p)
{
    free(p->a.q.data), free(p->a.k.data), free(p->a.v.data);
    free(p->a.out.data), free(p->a.lse.data);
}

/* x as the format holds it. */
static double as_e4m3(double x) { return (double)te_f8e4m3_to_f32(te_f64_to_f8e4m3(x)); }

static double code_at(const te_view *v, int64_t b, int64_t h, int64_t i, int64_t d)
{
    return (double)te_f8e4m3_to_f32(((uint8_t *)v->data)[b * v->stride[0] + h * v->stride[1] + i * v->stride[2] + d]);
}

/* Keys first … end that query i of a batch sees. */
static void seen_by(const te_attention *a, int64_t i, int64_t *first, int64_t *end)
{
    int64_t q0 = 0, q1 = QUERIES, k0 = 0, k1 = KEYS;
    for (int s = 0; s < a->n_seqs; s++)
        if (i >= a->cu_seqlens_q[s] && i < a->cu_seqlens_q[s + 1])
            q0 = a->cu_seqlens_q[s], q1 = a->cu_seqlens_q[s + 1], k0 = a->cu_seqlens_kv[s],
            k1 = a->cu_seqlens_kv[s + 1];
    int64_t at = i - q0 + k0 + (a->bottom_right ? (k1 - k0) - (q1 - q0) : 0);
    *first = a->window_left < 0 || at - a->window_left < k0 ? k0 : at - a->window_left;
    *end = a->window_right < 0 || at + a->window_right + 1 > k1 ? k1 : at + a->window_right + 1;
}

/* One row of the result, with how far it may be off where float32 cannot tell how to round a probability. */
static void reference_row(const problem *p, int64_t b, int64_t h, int64_t i, double *row, double *slack, double *lse)
{
    const te_attention *a = &p->a;
    double scores[KEYS], top = -INFINITY, sum = 0;
    int64_t first, end, kv = h / (HEADS / KV_HEADS);
    seen_by(a, i, &first, &end);
    for (int64_t j = first; j < end; j++) {
        double dot = 0;
        for (int64_t d = 0; d < DIM; d++) dot += code_at(&a->q, b, h, i, d) * code_at(&a->k, b, kv, j, d);
        scores[j] = dot * a->scale * (double)p->factors[0] * (double)p->factors[1];
        if (scores[j] > top) top = scores[j];
    }
    for (int64_t j = first; j < end; j++) sum += exp(scores[j] - top);
    *lse = end > first ? top + log(sum) : -INFINITY;
    for (int64_t d = 0; d < DIM_V; d++) row[d] = slack[d] = 0;
    for (int64_t j = first; j < end; j++) {
        double t = 448 * exp(scores[j] - top) / sum, unsure = 2e-6 * (1 + fabs(top) + fabs(scores[j])) * t;
        double rounded = as_e4m3(t), low = as_e4m3(t - unsure), high = as_e4m3(t + unsure);
        for (int64_t d = 0; d < DIM_V; d++) {
            double v = code_at(&a->v, b, kv, j, d);
            row[d] += rounded * v / 448;
            slack[d] += ((high - low) + 1e-6 * rounded) * fabs(v) / 448;
        }
    }
}

/* Numbers of the format next to x within its slack are as good. */
static bool is_close(const problem *p, double got, double x, double slack)
{
    double factor = (double)p->factors[2];
    te_dtype t = p->a.out.dtype;
    if (isnan(x)) return isnan(got);
    if (t == TE_F8E4M3) return got >= as_e4m3(x - slack) && got <= as_e4m3(x + slack);
    double unit = t == TE_BF16 ? 0x1p-8 : t == TE_F16 ? 0x1p-10 : 0x1p-22;
    return fabs(got - x * factor) <= slack * factor + unit * fabs(x * factor) + 1e-7;
}

static void compare(const problem *p, const char *name)
{
    int64_t bad = 0, n = 0;
    double row[DIM_V], slack[DIM_V], lse;
    for (int64_t b = 0; b < p->a.q.shape[0]; b++)
        for (int64_t h = 0; h < HEADS; h++)
            for (int64_t i = 0; i < QUERIES; i++, n++) {
                reference_row(p, b, h, i, row, slack, &lse);
                double got = (double)((float *)p->a.lse.data)[n];
                bad += !(got == lse || fabs(got - lse) < 1e-4);
                for (int64_t d = 0; d < DIM_V; d++)
                    bad += !is_close(p, te_load_f64(p->a.out.data, p->a.out.dtype, n * DIM_V + d), row[d], slack[d]);
            }
    CHECK_MSG(bad == 0, "%s: %lld of %lld numbers are off", name, (long long)bad, (long long)(n * DIM_V));
}

static void run_on(problem *p, int mode, int threads)
{
    te_exec exec = test_exec_open(threads);
    attention_mode_set(&exec, mode);
    te_status status = te_cpu_attention(&exec, &p->a);
    CHECK_MSG(status == TE_OK, "%s", exec.message);
    test_exec_close(&exec);
}

static void check(problem *p, const char *name)
{
    int modes = attention_mode_count();
    size_t bytes = (size_t)te_view_numel(&p->a.out) * te_dtype_size(p->a.out.dtype);
    void *once = malloc(bytes);
    for (int mode = 0; mode < modes && once; mode++) {
        run_on(p, mode, 1);
        compare(p, name);
        memcpy(once, p->a.out.data, bytes);
        run_on(p, mode, 2);
        CHECK_MSG(memcmp(once, p->a.out.data, bytes) == 0, "%s: two threads differ", name);
    }
    free(once);
}

static void check_masks(void)
{
    static const te_dtype dtypes[] = {TE_F8E4M3, TE_F32, TE_BF16, TE_F16};
    for (int i = 0; i < 4; i++) {
        problem p;
        problem_open(&p, dtypes[i], (uint64_t)i + 1);
        check(&p, "no mask");
        p.a.window_right = 0;
        p.a.bottom_right = i % 2;
        check(&p, "causal");
        p.a.window_left = 9;
        check(&p, "a window");
        problem_close(&p);
    }
}

static void check_packed(void)
{
    static const int32_t queries[] = {0, 5, 5, 40, QUERIES}, keys[] = {0, 70, 71, 71, KEYS};
    problem p;
    problem_open(&p, TE_F8E4M3, 9);
    p.a.q.shape[0] = p.a.k.shape[0] = p.a.v.shape[0] = p.a.out.shape[0] = p.a.lse.shape[0] = 1;
    p.a.cu_seqlens_q = queries;
    p.a.cu_seqlens_kv = keys;
    p.a.n_seqs = 4; /* the third has no keys */
    check(&p, "packed");
    p.a.window_right = 0;
    check(&p, "packed, causal");
    problem_close(&p);
}

/* A NaN among the values reaches the rows that see it, and no other. */
static void check_nan(void)
{
    problem p;
    problem_open(&p, TE_F8E4M3, 5);
    p.a.window_right = 0;
    ((uint8_t *)p.a.v.data)[60 * p.a.v.stride[2]] = 0x7f;
    check(&p, "NaN");
    problem_close(&p);
}

static void *no_scratch(te_exec *exec, size_t bytes)
{
    (void)exec, (void)bytes;
    return NULL;
}

static void check_refusals(void)
{
    problem p;
    problem_open(&p, TE_F8E4M3, 3);
    te_exec exec = test_exec_open(1);
    te_attention a = p.a;
    a.out.dtype = TE_F64;
    CHECK(te_cpu_attention(&exec, &a) == TE_ERROR_UNSUPPORTED);
    a = p.a;
    a.v.quant = NULL;
    CHECK(te_cpu_attention(&exec, &a) == TE_ERROR_UNSUPPORTED && strstr(exec.message, "which v is not"));
    a = p.a;
    a.k.shape[3]++;
    CHECK(te_cpu_attention(&exec, &a) == TE_ERROR_ARGUMENT);
    p.quants[1].element = TE_E5M2;
    CHECK(te_cpu_attention(&exec, &p.a) == TE_ERROR_UNSUPPORTED && strstr(exec.message, "which k is not"));
    p.quants[1].element = TE_E4M3;
    exec.scratch = no_scratch;
    CHECK(te_cpu_attention(&exec, &p.a) == TE_ERROR_MEMORY);
    test_exec_close(&exec);
    problem_close(&p);
}

int main(void)
{
    check_masks();
    check_packed();
    check_nan();
    check_refusals();
    return TEST_END();
}
