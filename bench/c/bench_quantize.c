/* bench_quantize.c - quantizing and dequantizing large matrices on the CPU, without the engine around it: elements and
 * bytes per nanosecond, and the share of a loop that reads and writes as much with as many threads, in turns with it:
 * what memory gives changes from second to second, and with the proportion of both.
 *
 *      bench_quantize [threads [seconds per figure [part of the names [rows columns]]]]
 *
 * Bytes are those of the source (twice where the factor is that of the whole tensor) and of the codes, as in
 * kernels.lua. The last column is a sum over all bytes that were written, by which two builds are compared.
 */
#include "bench.h"

#include "core/quantizer.h"
#include "kernels/cpu/workers.h"
#include "kernels/dtype.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* --- cases -------------------------------------------------------------------------------------------------------- */

#define WHOLE    .element = TE_E4M3, .has_columnwise = true, .transposed = true
#define LONG(n)                                                                                                        \
    .element = TE_E4M3, .block_rows = n, .block_cols = 128, .has_columnwise = true, .transposed = true,                \
    .power_of_two = true
#define FOUR(n)                                                                                                        \
    .element = TE_E2M1, .scale = TE_SCALE_E4M3, .block_rows = n, .block_cols = 16, .has_columnwise = true,             \
    .transposed = true, .replicated = n > 1

static const struct {
    const char *name;
    int reads;
    te_quantizer q;
} kinds[] = {
    {"delayed", 1, {WHOLE, .needs_history = true}},
    {"current", 2, {WHOLE}},
    {"MXFP8", 1, {.element = TE_E4M3, .scale = TE_SCALE_E8M0, .block_rows = 1, .block_cols = 32,
                  .has_columnwise = true}},
    {"1x128", 1, {LONG(1)}},
    {"128x128", 1, {LONG(128)}},
    {"NVFP4", 2, {FOUR(1), .scale_max = 448}},
    {"NVFP4 RHT", 2, {FOUR(1), .hadamard = true, .scale_max = 448}},
    {"NVFP4 stochastic", 2, {FOUR(1), .hadamard = true, .stochastic = true, .scale_max = 448}},
    {"NVFP4 16x16", 2, {FOUR(16), .scale_max = 448}},
    {"NVFP4 4over6", 2, {FOUR(16), .four_over_six = TE_46_MAE, .scale_max = 256}},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

static uint64_t sum_bytes(uint64_t sum, const void *data, size_t bytes)
{
    const uint8_t *p = data;
    for (size_t i = 0; i < bytes; i++) sum = (sum ^ p[i]) * 0x100000001b3u;
    return sum;
}

typedef struct bench {
    te_exec *exec;
    te_quantize_job job;
    size_t data_bytes[2], scale_bytes[2];
    float amax[2];
} bench;

static size_t scale_bytes(const te_quantized_layout *l)
{
    size_t bytes = te_dtype_size(l->scale_dtype);
    for (int i = 0; i < l->scale_ndim; i++) bytes *= (size_t)l->scale_shape[i];
    return bytes;
}

/* What the codes or the factors of either side take at most. */
static size_t largest_part(int64_t rows, int64_t cols)
{
    size_t most = 0;
    for (int k = 0; k < 2 * KINDS; k++) {
        te_quantized_layout l = te_quantizer_layout(&kinds[k / 2].q, k % 2, rows, cols);
        size_t data = (size_t)(l.data_rows * l.data_bytes), scales = scale_bytes(&l),
               part = data > scales ? data : scales;
        most = part > most ? part : most;
    }
    return most;
}

static void bind_side(bench *b, int s, uint8_t *data, void *scales)
{
    const te_quantizer *q = b->job.quantizer;
    te_quantized_layout l = te_quantizer_layout(q, s, b->job.rows, b->job.cols);
    te_quantized_side side = {.data = data, .rows = l.rows, .cols = l.cols, .row_stride = l.row_stride,
                              .col_stride = l.col_stride, .scale_inv = scales, .scale_row_stride = l.scale_row_stride,
                              .scale_col_stride = l.scale_col_stride, .amax = l.amaxes < 0 ? NULL : &b->amax[s],
                              .rng = {.seed = 7, .offset = s ? 1u << 20 : 0}};
    b->data_bytes[s] = (size_t)(l.data_rows * l.data_bytes);
    b->scale_bytes[s] = scale_bytes(&l);
    b->job.side[s] = side;
}

/* --- the same traffic with nothing computed --------------------------------------------------------------------- */

/* Lines of 64 bytes that 128 elements take: read, of either source, and written past the caches. */
typedef struct traffic {
    const char *from;
    char *to;
    int in, out;
} traffic;

#ifdef __SSE2__
static void move_lines(const char *from, char *to, int in, int out)
{
    __m128i sum = _mm_setzero_si128();
    for (int k = 0; k < 4 * in; k++)
        sum = _mm_xor_si128(sum, _mm_load_si128((const __m128i *)(const void *)(from + 16 * k)));
    for (int k = 0; k < 4 * out; k++) _mm_stream_si128((__m128i *)(void *)(to + 16 * k), sum);
    __asm__ volatile("" : : "x"(sum)); /* is read for its own sake */
}
#else
static void move_lines(const char *from, char *to, int in, int out)
{
    uint64_t sum = 0;
    for (int k = 0; k < 8 * in; k++) sum ^= ((const uint64_t *)(const void *)from)[k];
    for (int k = 0; k < 8 * out; k++) ((uint64_t *)(void *)to)[k] = sum;
    __asm__ volatile("" : : "r"(sum));
}
#endif

static void move_part(void *context, int64_t first, int64_t end, int thread)
{
    enum { LINE = 64 };
    const traffic *t = context;
    (void)thread;
    for (int64_t i = first; i < end; i++)
        move_lines(t->from + i * t->in * LINE, t->to + i * t->out * LINE, t->in, t->out);
#ifdef __SSE2__
    _mm_sfence();
#endif
}

static double seconds_of_traffic(te_exec *exec, const traffic *t, int64_t n)
{
    traffic context = *t;
    double start = now();
    te_cpu_loop(exec, exec->threads, n / 128, te_cpu_even_grain(n / 128, exec->threads), move_part, &context);
    return now() - start;
}

/* Seconds of the fastest run, and of the same traffic in turns with it, `reads` times over; way 2: back. */
static double time_job(bench *b, int way, traffic t, int reads, double limit, double *floor)
{
    te_quantize_job job = b->job;
    double best = 1e9, begin = now();
    *floor = 1e9;
    if (way == 0) job.side[1] = (te_quantized_side){0};
    for (int run = 0; run < 3 || now() - begin < limit; run++) {
        traffic again = {t.from, t.to, t.in, 0};
        double least = seconds_of_traffic(b->exec, &t, job.rows * job.cols);
        if (reads > 1) least += seconds_of_traffic(b->exec, &again, job.rows * job.cols);
        double start = now();
        te_status status =
            way < 2 ? te_backend_cpu.quantize(b->exec, &job) : te_backend_cpu.dequantize(b->exec, &job, 0);
        if (status != TE_OK) return 1e9;
        double seconds = now() - start;
        best = seconds < best ? seconds : best;
        *floor = least < *floor ? least : *floor;
    }
    return best;
}

enum { WAYS = 3 };

static const char *name_of(int narrow, int kind, int way, char name[static 64])
{
    static const char *const ways[WAYS] = {"", " both", " back"};
    snprintf(name, 64, "%s %s%s", narrow ? "bf16" : "f32", kinds[kind].name, ways[way]);
    return name;
}

static bool is_part_of_a_name(const char *text)
{
    char name[64];
    for (int i = 0; i < 2 * KINDS * WAYS; i++)
        if (strstr(name_of(i % 2, i / 2 % KINDS, i / 2 / KINDS, name), text)) return true;
    return false;
}

/* About normal. */
static void fill(float *x, int64_t n, bool narrow)
{
    uint64_t state = 1;
    for (int64_t i = 0; i < n; i++) {
        float sum = 0;
        for (int k = 0; k < 4; k++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            sum += (float)(int32_t)(state >> 32) * 0x1p-31f;
        }
        if (narrow)
            ((uint16_t *)x)[i] = te_f32_to_bf16(sum);
        else
            x[i] = sum;
    }
}

int main(int argc, char **argv)
{
    arguments a = {argc, argv};
    int threads = threads_argument(&a, 1);
    double limit = number_argument(&a, 2, "seconds", 0.3, 0);
    const char *only = argc > 3 ? argv[3] : "";
    int64_t rows = whole_argument(&a, 4, "rows", 8192, 1, MOST_EXTENT);
    int64_t cols = whole_argument(&a, 5, "columns", 3072, 1, MOST_EXTENT), n = rows * cols;
    at_most(&a, 5);
    if (argc == 5) refuse(&a, "columns", "", "a number where rows are given");
    if (!is_part_of_a_name(only)) refuse(&a, "case", only, "part of a case's name");
    te_exec exec = {.backend = &te_backend_cpu, .mem = &te_mem_libc, .threads = threads, .scratch = scratch,
                    .scratch_free = scratch_free};
    if (te_backend_cpu.device_open(&exec, 0) != TE_OK) return 1;
    size_t size = (size_t)n, room = largest_part(rows, cols);
    float *x = allocate(&exec, 4 * size), *y = allocate(&exec, 4 * size);
    uint8_t *codes[2] = {allocate(&exec, room), allocate(&exec, room)};
    void *scales[2] = {allocate(&exec, room), allocate(&exec, room)};
    printf("%d threads, %lld x %lld\n", threads, (long long)rows, (long long)cols);

    for (int narrow = 0; narrow < 2; narrow++) {
        fill(x, n, narrow);
        for (int k = 0; k < KINDS; k++)
            for (int way = 0; way < WAYS; way++) {
                char name[64];
                if (!strstr(name_of(narrow, k, way, name), only)) continue;
                bench b = {.exec = &exec,
                           .job = {.quantizer = &kinds[k].q, .source = x, .dtype = narrow ? TE_BF16 : TE_F32,
                                   .rows = rows, .cols = cols, .source_stride = cols, .scale = 64}};
                for (int s = 0; s < 2; s++) bind_side(&b, s, codes[s], scales[s]);
                bool half = kinds[k].q.element == TE_E2M1;
                int width = narrow ? 2 : 4;
                int reads = way < 2 ? kinds[k].reads : 1, side = half ? 1 : 2; /* lines of 128 codes */
                double bytes = reads * width + (half ? 0.5 : 1) * (1 + (way == 1)), floor;
                traffic t = {(const char *)x, (char *)y, 2 * width, side * (1 + way)};
                if (way == 2) {
                    if (time_job(&b, 0, t, 1, 0, &floor) > 1e8) return 1;
                    b.job.source = y;
                    t = (traffic){(const char *)codes[0], (char *)y, side, 2 * width};
                }
                double seconds = time_job(&b, way, t, reads, limit, &floor), rate = (double)n / seconds * 1e-9;
                uint64_t sum = 0;
                for (int s = 0; s <= (way == 1) && way < 2; s++) {
                    sum = sum_bytes(sum, codes[s], b.data_bytes[s]);
                    sum = sum_bytes(sum, scales[s], b.scale_bytes[s]);
                    sum = sum_bytes(sum, b.job.side[s].amax, b.job.side[s].amax ? sizeof(float) : 0);
                }
                if (way == 2) sum = sum_bytes(sum, y, size * (size_t)width);
                printf("%-28s %7.2f Gel/s %6.1f GB/s %4.0f%% of %6.1f  %6.2f ns per 64  %016llx\n", name, rate,
                       rate * bytes, 100 * floor / seconds, (double)n * bytes / floor * 1e-9, 64 / rate * threads,
                       (unsigned long long)sum);
                fflush(stdout);
            }
    }
    for (int s = 0; s < 2; s++) {
        te_cpu_memory_free(&exec, codes[s], room);
        te_cpu_memory_free(&exec, scales[s], room);
    }
    te_cpu_memory_free(&exec, x, 4 * size);
    te_cpu_memory_free(&exec, y, 4 * size);
    te_backend_cpu.device_close(&exec);
    return 0;
}
