/* bench_attention.c - attention forward and backward on training shapes, causal, q, k and v as views of one projection.
 *
 *      bench_attention [threads [seconds per case [number of the only shape, from 1 [float32 | bfloat16]]]]
 *
 * Prints the best and the median time, the arithmetic rate (masked entries not counted) and its share of the rate at
 * which this machine multiplies and adds float32 vectors.
 */
#include "bench.h"

#include "kernels/dtype.h"

#include <omp.h>

/* --- the machine's peak ----------------------------------------------------------------------------------------- */

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define PEAK_LOOP(vector, set1, fma, lanes)                                                     \
    {                                                                                           \
        vector sum[12], x = set1(1.0f), y = set1(1e-9f), total = set1(0.0f);                    \
        for (int i = 0; i < 12; i++) sum[i] = set1((float)i);                                   \
        for (long n = 0; n < rounds; n++)                                                       \
            for (int i = 0; i < 12; i++) sum[i] = fma(x, sum[i], y);                            \
        for (int i = 0; i < 12; i++) total = fma(x, total, sum[i]);                             \
        float out[lanes];                                                                       \
        memcpy(out, &total, sizeof out);                                                        \
        return out[0] + (float)(24 * (lanes)) * 0.0f;                                           \
    }

__attribute__((target("avx512f"))) static float peak_avx512(long rounds)
PEAK_LOOP(__m512, _mm512_set1_ps, _mm512_fmadd_ps, 16)
__attribute__((target("avx2,fma"))) static float peak_avx2(long rounds)
PEAK_LOOP(__m256, _mm256_set1_ps, _mm256_fmadd_ps, 8)

static double measure_peak(te_cpu_isa isa, int threads)
{
    const long rounds = 4000000;
    double best = 0;
    for (int n = 0; n < 5; n++) {
        volatile float sink = 0;
        double start = now();
#pragma omp parallel num_threads(threads)
        sink = isa == TE_CPU_AVX512 ? peak_avx512(rounds) : isa == TE_CPU_AVX2 ? peak_avx2(rounds) : 0;
        double rate = (isa == TE_CPU_AVX512 ? 384.0 : 192.0) * (double)rounds * threads / (now() - start);
        if (rate > best) best = rate;
        (void)sink;
    }
    return isa == TE_CPU_PORTABLE ? 0 : best;
}
#else
static double measure_peak(te_cpu_isa isa, int threads)
{
    (void)isa;
    (void)threads;
    return 0;
}
#endif

/* --- cases ------------------------------------------------------------------------------------------------------ */

typedef struct shape {
    int64_t batch, heads, seq, dim;
} shape;

static te_view part_of(char *data, te_dtype dtype, shape s, int parts, int part)
{
    return (te_view){.data = data + (size_t)(part * s.heads * s.dim) * te_dtype_size(dtype), .dtype = dtype, .ndim = 4,
                     .shape = {s.batch, s.heads, s.seq, s.dim},
                     .stride = {s.seq * parts * s.heads * s.dim, s.dim, parts * s.heads * s.dim, 1}};
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Runs for `seconds`; times[0] is the best, times[1] the median. */
static void measure(te_exec *exec, const te_attention_grad *g, bool backward, double seconds, double times[2])
{
    enum { MOST = 20000 };
    static double all[MOST];
    int n = 0;
    double end = now() + seconds;
    while (n < 5 || (now() < end && n < MOST)) {
        double start = now();
        te_status status = backward ? te_cpu_attention_backward(exec, g) : te_cpu_attention(exec, &g->forward);
        all[n++] = now() - start;
        if (status != TE_OK) {
            fprintf(stderr, "%s\n", exec->message);
            exit(1);
        }
    }
    qsort(all, (size_t)n, sizeof *all, compare_doubles);
    times[0] = all[0];
    times[1] = all[n / 2];
}

static void run_case(te_exec *exec, te_dtype dtype, shape s, double seconds, double peak)
{
    size_t n = (size_t)(s.batch * s.heads * s.seq * s.dim), size = te_dtype_size(dtype);
    char *qkv = malloc(n * 3 * size), *grads = calloc(n * 3, size), *out = malloc(n * size), *dout = malloc(n * size);
    float *lse = malloc(n / (size_t)s.dim * sizeof *lse);
    uint64_t state = 88172645463325252u;
    for (size_t i = 0; i < n * 4; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        double x = (double)(state >> 33) * 0x1p-30 - 1;
        te_store_f64(i < n * 3 ? qkv : dout, dtype, (int64_t)(i < n * 3 ? i : i - n * 3), x);
    }
    te_attention_grad g = {.forward = {.q = part_of(qkv, dtype, s, 3, 0),
                                       .k = part_of(qkv, dtype, s, 3, 1),
                                       .v = part_of(qkv, dtype, s, 3, 2),
                                       .out = part_of(out, dtype, s, 1, 0),
                                       .scale = 0.125,
                                       .window_left = -1}};
    g.forward.lse = (te_view){.data = lse, .dtype = TE_F32, .ndim = 3, .shape = {s.batch, s.heads, s.seq},
                              .stride = {s.heads * s.seq, s.seq, 1}};
    g.dout = part_of(dout, dtype, s, 1, 0);
    g.dq = part_of(grads, dtype, s, 3, 0), g.dk = part_of(grads, dtype, s, 3, 1), g.dv = part_of(grads, dtype, s, 3, 2);
    double pair = (double)(s.batch * s.heads) * (double)s.seq * (double)(s.seq + 1) / 2 * (double)s.dim * 2, f[2], b[2];
    measure(exec, &g, false, seconds, f);
    measure(exec, &g, true, seconds, b);
    printf(
        "%-8s (%2d, %2d, %4d, %3d)  forward %8.0f us (median %8.0f) %6.1f GFLOP/s %3.0f %%   backward %8.0f us (median "
        "%8.0f) %6.1f GFLOP/s %3.0f %%   sum %8.0f\n",
        te_dtype_name(dtype), (int)s.batch, (int)s.heads, (int)s.seq, (int)s.dim, f[0] * 1e6, f[1] * 1e6,
        2 * pair / f[0] * 1e-9, 200 * pair / f[0] / peak, b[0] * 1e6, b[1] * 1e6, 5 * pair / b[0] * 1e-9,
        500 * pair / b[0] / peak, (f[0] + b[0]) * 1e6);
    fflush(stdout);
    free(qkv), free(grads), free(out), free(dout), free(lse);
}

int main(int argc, char **argv)
{
    static const shape shapes[] = {{12, 4, 64, 32},  {16, 6, 256, 64},  {4, 12, 64, 64},
                                   {4, 12, 256, 64}, {1, 12, 1024, 64}, {1, 8, 2048, 128}};
    static const te_dtype dtypes[] = {TE_F32, TE_BF16};
    static const char *const names[] = {"float32", "bfloat16", NULL};
    arguments a = {argc, argv};
    int threads = threads_argument(&a, omp_get_max_threads());
    double seconds = number_argument(&a, 2, "seconds", 0.5, 0);
    size_t only = (size_t)whole_argument(&a, 3, "shape", 0, 0, sizeof shapes / sizeof *shapes);
    int dtype = choice_argument(&a, 4, "dtype", names);
    at_most(&a, 4);
    te_exec exec = {.backend = &te_backend_cpu, .mem = &te_mem_libc, .threads = threads, .scratch = scratch,
                    .scratch_free = scratch_free};
    if (te_backend_cpu.device_open(&exec, 0) != TE_OK) return 1;
    double peak = measure_peak(te_cpu(&exec)->isa, threads);
    printf("%s, %d threads, float32 peak %.1f GFLOP/s\n", te_cpu_isa_name(te_cpu(&exec)->isa), threads, peak * 1e-9);
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            if ((only == 0 || only == i + 1) && (dtype < 0 || (size_t)dtype == d))
                run_case(&exec, dtypes[d], shapes[i], seconds, peak);
    te_backend_cpu.device_close(&exec);
    return 0;
}
