/* bench_machine.c - what this machine can do at most, as the floor under every other figure: the fastest large matrix
 * product in float32 and bfloat16, and the fastest stream through memory.
 *
 *      bench_machine [threads [seconds per figure [--json | --streams]]]
 *
 * A product is 2 n^3 operations, by oneDNN alone or by our own kernel, whichever is faster. Streams count the bytes
 * that the program names, as STREAM does; arrays are many times larger than the caches. `update` (a += s b) writes only
 * lines that it read before, so unlike copy and triad it moves exactly what is counted: an optimizer can reach it.
 * `read` writes nothing; copy and triad are measured as well with stores past the caches, which save reading what they
 * write. --streams leaves the products out: what memory gives at the moment, for benches to ask for again and again.
 */
#include "bench.h"

#include "kernels/cpu/gemm.h"
#include "kernels/dtype.h"
#ifdef TE_WITH_ONEDNN
#include "kernels/cpu/gemm_onednn_compat.h"
#endif

#include <math.h>
#include <omp.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { STREAM_FLOATS = 32 << 20, LARGEST_PRODUCT = 4096 };

/* --- matrix products ---------------------------------------------------------------------------------------------- */

typedef struct square {
    te_exec *exec;
    te_dtype dtype;
    int64_t  n;
    void    *a, *b, *c;
} square;

static te_view matrix(const square *s, void *data)
{
    return (te_view){.data = data, .dtype = s->dtype, .ndim = 2, .shape = {s->n, s->n}, .stride = {s->n, 1}};
}

/* Seconds of the fastest run of our own kernel. */
static double time_own(const square *s, double limit)
{
    te_gemm gemm = {.a = matrix(s, s->a), .b = matrix(s, s->b), .c = matrix(s, s->c), .alpha = 1};
    double best = INFINITY, begin = now();
    for (int run = 0; run < 3 || now() - begin < limit; run++) {
        double start = now();
        if (te_cpu_gemm_with(s->exec, "blocked", &gemm) != TE_OK) return INFINITY;
        best = fmin(best, now() - start);
    }
    return best;
}

#ifdef TE_WITH_ONEDNN
/* The same of oneDNN; the packed layout of b is measured without the packing. */
static double time_onednn(const square *s, bool packed, double limit)
{
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    if (dnnl_engine_create(&engine, dnnl_cpu, 0)) return INFINITY;
    if (dnnl_stream_create(&stream, engine, dnnl_stream_default_flags)) return dnnl_engine_destroy(engine), INFINITY;
    te_dnnl_spec spec;
    memset(&spec, 0, sizeof spec);
    spec.m = spec.n = spec.k = spec.a_rs = spec.b_rs = spec.c_rs = s->n;
    spec.a_cs = spec.b_cs = 1;
    spec.in = spec.out = (int32_t)s->dtype, spec.bias = TE_DTYPE_COUNT, spec.packed_b = packed;
    te_dnnl_matmul matmul;
    double best = INFINITY, begin = now();
    omp_set_num_threads(s->exec->threads);
    if (te_dnnl_matmul_make(&matmul, engine, &spec)) {
        te_dnnl_args args = {.engine = engine, .stream = stream, .a = s->a, .b = s->b, .c = s->c};
        args.scratchpad = allocate(s->exec, matmul.scratchpad_bytes);
        for (int run = 0; run < 3 || now() - begin < limit; run++) {
            double start = now();
            if (!te_dnnl_matmul_run(&matmul, &args)) break;
            best = fmin(best, now() - start);
        }
        te_cpu_memory_free(s->exec, args.scratchpad, matmul.scratchpad_bytes);
        te_dnnl_matmul_free(&matmul);
    }
    dnnl_stream_destroy(stream);
    dnnl_engine_destroy(engine);
    return best;
}
#endif

static void fill(const square *s, void *data)
{
    uint32_t x = 2463534242u;
    for (int64_t i = 0; i < s->n * s->n; i++) {
        x ^= x << 13, x ^= x >> 17, x ^= x << 5;
        te_store_f64(data, s->dtype, i, x / 2147483648.0 - 1);
    }
}

/* GFLOP/s, the best over sizes and kernels. */
static double product_peak(te_exec *exec, te_dtype dtype, double limit)
{
    static const int64_t sizes[] = {1024, 2048, LARGEST_PRODUCT};
    size_t bytes = (size_t)LARGEST_PRODUCT * LARGEST_PRODUCT * sizeof(float); /* a packed b may be padded */
    square s = {.exec = exec, .dtype = dtype, .n = LARGEST_PRODUCT};
    s.a = allocate(exec, bytes), s.b = allocate(exec, bytes), s.c = allocate(exec, bytes);
    fill(&s, s.a);
    fill(&s, s.b);
    double best = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        s.n = sizes[i];
        double time = time_own(&s, limit);
#ifdef TE_WITH_ONEDNN
        time = fmin(time, fmin(time_onednn(&s, false, limit), time_onednn(&s, true, limit)));
#endif
        best = fmax(best, 2e-9 * (double)s.n * (double)s.n * (double)s.n / time);
    }
    te_cpu_memory_free(exec, s.a, bytes), te_cpu_memory_free(exec, s.b, bytes), te_cpu_memory_free(exec, s.c, bytes);
    return best;
}

/* --- streams ------------------------------------------------------------------------------------------------------ */

typedef void stream_fn(float *restrict a, const float *restrict b, const float *restrict c, size_t n);

static void copy(float *restrict a, const float *restrict b, const float *restrict c, size_t n)
{
    (void)c;
    memcpy(a, b, n * sizeof *a);
}

static void triad(float *restrict a, const float *restrict b, const float *restrict c, size_t n)
{
    for (size_t i = 0; i < n; i++) a[i] = b[i] + 0.5f * c[i];
}

static void update(float *restrict a, const float *restrict b, const float *restrict c, size_t n)
{
    (void)c;
    for (size_t i = 0; i < n; i++) a[i] += 0.5f * b[i];
}

/* Stores past the caches, where the compiler has them; elsewhere as above. */
static void copy_past(float *restrict a, const float *restrict b, const float *restrict c, size_t n)
{
#ifdef __SSE2__
    (void)c;
    for (size_t i = 0; i < n; i += 4) _mm_stream_ps(a + i, _mm_loadu_ps(b + i));
#else
    copy(a, b, c, n);
#endif
}

static void triad_past(float *restrict a, const float *restrict b, const float *restrict c, size_t n)
{
#ifdef __SSE2__
    __m128 half = _mm_set1_ps(0.5f);
    for (size_t i = 0; i < n; i += 4)
        _mm_stream_ps(a + i, _mm_add_ps(_mm_loadu_ps(b + i), _mm_mul_ps(half, _mm_loadu_ps(c + i))));
#else
    triad(a, b, c, n);
#endif
}

/* The sum goes where nobody reads it, so that it is made. */
static void only_read(float *restrict a, const float *restrict b, const float *restrict c, size_t n)
{
    (void)c;
    float sum[16] = {0};
    for (size_t i = 0; i < n; i += 16)
        for (int lane = 0; lane < 16; lane++) sum[lane] += b[i + (size_t)lane];
    for (int lane = 0; lane < 16; lane++) a[lane] = sum[lane];
}

/* GB/s with `arrays` arrays of STREAM_FLOATS named per pass. */
static double stream_peak(te_exec *exec, stream_fn *fn, float *data[3], int arrays, double limit)
{
    double best = INFINITY, begin = now();
    for (int run = 0; run < 4 || now() - begin < limit; run++) {
        double start = now();
#pragma omp parallel num_threads(exec->threads)
        {
            size_t part = STREAM_FLOATS / (size_t)omp_get_num_threads(), at = part * (size_t)omp_get_thread_num();
            fn(data[0] + at, data[1] + at, data[2] + at, part);
        }
        best = fmin(best, now() - start);
    }
    return 1e-9 * arrays * STREAM_FLOATS * sizeof(float) / best;
}

int main(int argc, char **argv)
{
    static const char *const outputs[] = {"--json", "--streams", NULL};
    arguments a = {argc, argv};
    int threads = threads_argument(&a, omp_get_num_procs()), output = choice_argument(&a, 3, "output", outputs);
    double limit = number_argument(&a, 2, "seconds", 0.3, 0);
    bool json = output >= 0, streams = output == 1;
    at_most(&a, 3);
    te_exec exec = {.backend = &te_backend_cpu, .mem = &te_mem_libc, .threads = threads, .scratch = scratch,
                    .scratch_free = scratch_free};
    if (te_backend_cpu.device_open(&exec, 0) != TE_OK) return 1;
    double fp32 = streams ? 0 : product_peak(&exec, TE_F32, limit);
    double bf16 = streams ? 0 : product_peak(&exec, TE_BF16, limit);

    float *data[3];
    for (int i = 0; i < 3; i++) {
        data[i] = allocate(&exec, STREAM_FLOATS * sizeof(float));
        memset(data[i], 0, STREAM_FLOATS * sizeof(float));
    }
    double copied = stream_peak(&exec, copy, data, 2, limit), triple = stream_peak(&exec, triad, data, 3, limit),
           updated = stream_peak(&exec, update, data, 3, limit);
    double read = stream_peak(&exec, only_read, data, 1, limit);
    copied = fmax(copied, stream_peak(&exec, copy_past, data, 2, limit));
    triple = fmax(triple, stream_peak(&exec, triad_past, data, 3, limit));
    double bandwidth = fmax(copied, fmax(triple, updated));
    const char *isa = te_cpu_isa_name(te_cpu(&exec)->isa);
    if (json)
        printf("{\"isa\": \"%s\", \"threads\": %d, \"fp32_gflops\": %.1f, \"bf16_gflops\": %.1f, \"copy_gb_s\": %.1f, "
               "\"triad_gb_s\": %.1f, \"update_gb_s\": %.1f, \"read_gb_s\": %.1f, \"bandwidth_gb_s\": %.1f}\n",
               isa, threads, fp32, bf16, copied, triple, updated, read, bandwidth);
    else
        printf("%s, %d threads\nmatrix product: float32 %.1f, bfloat16 %.1f GFLOP/s\nmemory: copy %.1f, triad %.1f, "
               "update in place %.1f, read %.1f GB/s\n", isa, threads, fp32, bf16, copied, triple, updated, read);
    for (int i = 0; i < 3; i++) te_cpu_memory_free(&exec, data[i], STREAM_FLOATS * sizeof(float));
    te_backend_cpu.device_close(&exec);
    return 0;
}
