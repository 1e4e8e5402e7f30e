/* bench_gemm.c - the matrix products of training steps: GFLOP/s of the backend's choice, of our own kernel, and of
 * oneDNN's matmul alone in whichever layout of its operands is the fastest, all measured in turns within one run.
 *
 *      bench_gemm [threads [seconds per figure [f32 | bf16 [warm | cold [tokens]]]]]
 *
 * tokens: only the products of so many rows. cold: the weight, or its gradient, lies elsewhere in every run, so that it
 * comes from memory as in a training step.
 *
 * Per Linear of `in` to `out` features over T tokens: fwd y = x W^T, dx = dy W, dw0: dW = dy^T x, dw1: dW += dy^T x,
 * the latter two in float32. `peak` is the tile of our kernel on operands in the first-level cache.
 */
#include "bench.h"

#include "kernels/cpu/gemm.h"
#include "kernels/dtype.h"
#ifdef TE_WITH_ONEDNN
#include "kernels/cpu/gemm_onednn_compat.h"
#endif

#include <math.h>
#include <omp.h>

/* With one thread its CPU time, which a busy machine does not distort as much. */
static clockid_t clock_used = CLOCK_MONOTONIC;

static double seconds(void)
{
    struct timespec t;
    clock_gettime(clock_used, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* --- what is measured --------------------------------------------------------------------------------------------- */

typedef struct product {
    const char *name;
    int64_t     m, n, k;
    bool        a_transposed, b_transposed;
    te_dtype    in, out;
    bool        accumulate;
} product;

typedef struct buffers {
    void *a, *b, *c, *packed;
} buffers;

enum { TENSOR_BYTES = 50304 * 1024 * 4 };

typedef struct candidate {
    void (*run)(struct candidate *);
    te_exec    *exec;
    te_gemm     gemm;
    const char *impl; /* NULL: the backend's choice */
    double      best;
    bool        failed;
    void      **moving; /* NULL, or the operand that moves on by `step` bytes with every run, and where it began */
    char       *begin;
    int64_t     step;
#ifdef TE_WITH_ONEDNN
    te_dnnl_matmul matmul;
    te_dnnl_args   args;
#endif
} candidate;

static void run_ours(candidate *c)
{
    te_status status = c->impl ? te_cpu_gemm_with(c->exec, c->impl, &c->gemm) : te_cpu_gemm(c->exec, &c->gemm);
    if (status != TE_OK) c->failed = true;
}

static te_view matrix(void *data, te_dtype dtype, int64_t rows, int64_t cols, bool transposed)
{
    return (te_view){.data = data, .dtype = dtype, .ndim = 2, .shape = {rows, cols},
                     .stride = {transposed ? 1 : cols, transposed ? rows : 1}};
}

static candidate ours(te_exec *exec, const product *p, const buffers *mem, const char *impl)
{
    return (candidate){.run = run_ours, .exec = exec, .impl = impl, .best = INFINITY,
                       .gemm = {.a = matrix(mem->a, p->in, p->m, p->k, p->a_transposed),
                                .b = matrix(mem->b, p->in, p->k, p->n, p->b_transposed),
                                .c = matrix(mem->c, p->out, p->m, p->n, false), .alpha = 1, .beta = p->accumulate}};
}

#ifdef TE_WITH_ONEDNN
static dnnl_engine_t engine;
static dnnl_stream_t stream;

static void run_matmul(candidate *c)
{
    if (!te_dnnl_matmul_run(&c->matmul, &c->args)) c->failed = true;
}

/* oneDNN on all threads, with the layout of each operand to choose. */
static candidate theirs(te_exec *exec, const product *p, const buffers *mem, bool a_transposed, bool b_transposed,
                        bool packed)
{
    candidate c = {.run = run_matmul, .best = INFINITY};
    te_dnnl_spec spec;
    memset(&spec, 0, sizeof spec);
    spec.m = p->m, spec.n = p->n, spec.k = p->k;
    spec.a_rs = a_transposed ? 1 : p->k, spec.a_cs = a_transposed ? p->m : 1;
    spec.b_rs = b_transposed ? 1 : p->n, spec.b_cs = b_transposed ? p->k : 1;
    spec.c_rs = p->n, spec.in = p->in, spec.out = p->out, spec.bias = TE_DTYPE_COUNT;
    spec.accumulate = p->accumulate, spec.packed_b = packed;
    omp_set_num_threads(exec->threads);
    c.failed = !te_dnnl_matmul_make(&c.matmul, engine, &spec);
    c.args = (te_dnnl_args){
        .engine = engine, .stream = stream, .a = mem->a, .b = packed ? mem->packed : mem->b, .c = mem->c};
    if (!c.failed && c.matmul.scratchpad_bytes) c.args.scratchpad = allocate(exec, c.matmul.scratchpad_bytes);
    return c;
}

static void theirs_free(te_exec *exec, candidate *c)
{
    if (c->args.scratchpad) te_cpu_memory_free(exec, c->args.scratchpad, c->matmul.scratchpad_bytes);
    te_dnnl_matmul_free(&c->matmul);
}
#endif

/* Lets the weight of `p`, or its gradient, move. */
static void let_move(candidate *c, const product *p, void **b, void **result)
{
    bool gradient = p->a_transposed;
    c->moving = gradient ? result : b;
    c->begin = *c->moving;
    c->step = gradient ? p->m * p->n * (int64_t)te_dtype_size(p->out) : p->k * p->n * (int64_t)te_dtype_size(p->in);
}

static void move(candidate *c)
{
    if (!c->moving) return;
    char *next = (char *)*c->moving + c->step;
    *c->moving = next + c->step > c->begin + TENSOR_BYTES ? c->begin : next;
}

/* Best time of each candidate; they take turns, in both orders, so that a disturbance from outside hits all alike. The
 * library's threads spin for some milliseconds after its turn, beside ours, so turns last longer than that. */
static void measure(candidate *candidates, int n, double limit)
{
    const double TURN = 0.01;
    double begin = seconds();
    for (int round = 0; round < 4 || seconds() - begin < limit * n; round++)
        for (int i = 0; i < n; i++) {
            candidate *c = &candidates[round % 2 ? n - 1 - i : i];
            if (c->failed) continue;
            double turn = now();
            for (int repeat = 0; repeat < 2 || now() - turn < TURN; repeat++) {
                move(c);
                double start = seconds();
                c->run(c);
                double time = seconds() - start;
                if (time < c->best) c->best = time;
            }
        }
}

/* --- the report --------------------------------------------------------------------------------------------------- */

/* Numbers from 0.5 to 2 of either sign, read as bfloat16 or as float32: with zeros processors are faster. */
static void fill_halves(char *to, size_t bytes)
{
    uint32_t x = 88172645u;
    for (size_t i = 0; i < bytes; i += 2) {
        x ^= x << 13, x ^= x >> 17, x ^= x << 5;
        uint16_t half = (uint16_t)(0x3f00u | (x & 0x80ffu));
        memcpy(to + i, &half, sizeof half);
    }
}

static double peak(te_exec *exec, te_dtype dtype)
{
    const te_gemm_state *state = te_gemm_state_get(exec);
    const te_gemm_kernel *kernel = dtype == TE_BF16 && state->bf16_pairs ? &state->bf16 : &state->f32;
    if (dtype == TE_BF16 && state->matrix_unit) kernel = state->matrix_unit;
    if (dtype == TE_F32 && state->f32_in_unit) kernel = state->f32_in_unit;
    enum { MOST_WORDS = 320, MOST_BYTES = 12, MOST_ROWS = 32, MOST_COLS = 48, REPEATS = 2000 };
    int64_t mr = kernel->mr, words = kernel->slice_words, row = kernel->step * kernel->word_bytes;
    te_gemm_tile *tile = kernel->tile[(mr - 1) / kernel->row_group][kernel->nr / kernel->lanes - 1];
    double best = INFINITY;
    for (int round = 0; round < 20; round++) {
        double start = 0;
#pragma omp parallel num_threads(exec->threads)
        {
            _Alignas(64) char a[MOST_WORDS * MOST_ROWS * MOST_BYTES], b[MOST_WORDS * MOST_COLS * MOST_BYTES];
            _Alignas(64) char sums[MOST_ROWS * MOST_COLS * 4];
            te_gemm_ahead none = {0};
            te_gemm_leaving nothing = {0};
            const te_gemm_out keep = {.way = TE_GEMM_OUT_KEEP, .ahead = &none, .leaving = &nothing};
            fill_halves(a, sizeof a);
            fill_halves(b, sizeof b);
            if (kernel->enter) kernel->enter();
#pragma omp barrier
#pragma omp master
            start = seconds();
            for (int i = 0; i < REPEATS; i++) tile(a, row, mr * row, b, words, sums, true, &keep);
            if (kernel->leave) kernel->leave();
        }
        double time = seconds() - start;
        if (time < best) best = time;
    }
    return 2e-9 * kernel->mr * kernel->nr * kernel->k_per_word * (double)words * REPEATS * exec->threads / best;
}

static bool cold;

static void report(te_exec *exec, const product *p, const buffers *mem, double top, double limit, double share[2])
{
    candidate all[8] = {ours(exec, p, mem, NULL), ours(exec, p, mem, "blocked")};
    int n = 2;
    double flops = 2e-9 * (double)p->m * (double)p->n * (double)p->k, best = INFINITY;
#ifdef TE_WITH_ONEDNN
    for (int layout = 0; layout < 6; layout++) all[n++] = theirs(exec, p, mem, layout & 1, layout & 2, layout & 4);
    for (int i = 2; cold && i < n; i++) let_move(&all[i], p, &all[i].args.b, &all[i].args.c);
#endif
    for (int i = 0; cold && i < 2; i++) let_move(&all[i], p, &all[i].gemm.b.data, &all[i].gemm.c.data);
    measure(all, n, limit);
    for (int i = 2; i < n; i++)
        if (!all[i].failed && all[i].best < best) best = all[i].best;
    printf("%-5s %-4s %5lld x %5lld x %5lld %8.1f %3.0f%% of peak   own %8.1f", p->in == TE_BF16 ? "bf16" : "f32",
           p->name, (long long)p->m, (long long)p->n, (long long)p->k, flops / all[0].best,
           100 * flops / all[0].best / top, flops / all[1].best);
    if (n > 2)
        printf("   oneDNN %8.1f   ratio %4.2f (own %4.2f)", flops / best, best / all[0].best, best / all[1].best);
    printf("\n");
    fflush(stdout);
    share[0] += all[0].best;
    share[1] += best;
#ifdef TE_WITH_ONEDNN
    for (int i = 2; i < n; i++) theirs_free(exec, &all[i]);
#endif
}

static void report_linear(te_exec *exec, const buffers *mem, te_dtype dtype, const int64_t shape[3], double top,
                          double limit, double share[2])
{
    int64_t t = shape[0], in = shape[1], out = shape[2];
    const product products[] = {{"fwd", t, out, in, false, true, dtype, dtype, false},
                                {"dx", t, in, out, false, false, dtype, dtype, false},
                                {"dw0", out, in, t, true, false, dtype, TE_F32, false},
                                {"dw1", out, in, t, true, false, dtype, TE_F32, true}};
    for (int i = 0; i < 4; i++) report(exec, &products[i], mem, top, limit, share);
}

static void fill(void *data, te_dtype dtype)
{
    uint32_t x = 2463534242u;
    for (int64_t i = 0; i < TENSOR_BYTES / (int64_t)te_dtype_size(dtype); i++) {
        x ^= x << 13, x ^= x >> 17, x ^= x << 5;
        te_store_f64(data, dtype, i, x / 2147483648.0 - 1);
    }
}

/* Microseconds of a product so small that the call is what counts. */
static void report_small(te_exec *exec, const buffers *mem)
{
    static const int64_t shapes[][3] = {{1, 16, 64},    {1, 64, 16},   {16, 16, 64},  {4, 64, 64},
                                        {16, 1024, 64}, {1, 768, 768}, {1, 768, 3072}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        product p = {"small", shapes[i][0], shapes[i][2], shapes[i][1], false, true, TE_F32, TE_F32, false};
        candidate c = ours(exec, &p, mem, NULL);
        double best = INFINITY;
        for (int round = 0; round < 200; round++) {
            double start = seconds();
            for (int repeat = 0; repeat < 20; repeat++) c.run(&c);
            double time = (seconds() - start) / 20;
            if (time < best) best = time;
        }
        printf("f32   %lld x %lld x %lld: %.3f us\n", (long long)p.m, (long long)p.n, (long long)p.k, 1e6 * best);
    }
}

int main(int argc, char **argv)
{
    static const int64_t shapes[][3] = {{768, 128, 384},   {768, 128, 128},   {768, 128, 512},   {768, 512, 128},
                                        {768, 128, 65},    {4096, 384, 1152}, {4096, 384, 384},  {4096, 384, 1536},
                                        {4096, 1536, 384}, {4096, 384, 65},   {256, 768, 2304},  {256, 768, 768},
                                        {256, 768, 3072},  {256, 3072, 768},  {256, 768, 50304}, {1024, 768, 2304},
                                        {1024, 768, 768},  {1024, 768, 3072}, {1024, 3072, 768}, {1024, 768, 50304},
                                        {64, 768, 2304},   {64, 768, 768}};
    static const char *const dtypes[] = {"f32", "bf16", NULL}, *const weights[] = {"warm", "cold", NULL};
    arguments a = {argc, argv};
    int threads = threads_argument(&a, omp_get_num_procs());
    if (threads == 1) clock_used = CLOCK_THREAD_CPUTIME_ID;
    double limit = number_argument(&a, 2, "seconds", 0.1, 0);
    int only = choice_argument(&a, 3, "dtype", dtypes);
    cold = choice_argument(&a, 4, "weights", weights) == 1;
    int64_t tokens = whole_argument(&a, 5, "tokens", 0, 0, MOST_EXTENT);
    at_most(&a, 5);
    te_exec exec = {.backend = &te_backend_cpu, .mem = &te_mem_libc, .threads = threads, .scratch = scratch,
                    .scratch_free = scratch_free};
    if (te_backend_cpu.device_open(&exec, 0) != TE_OK) return 1;
#ifdef TE_WITH_ONEDNN
    if (dnnl_engine_create(&engine, dnnl_cpu, 0) || dnnl_stream_create(&stream, engine, dnnl_stream_default_flags))
        return 1;
#endif
    buffers mem = {allocate(&exec, TENSOR_BYTES), allocate(&exec, TENSOR_BYTES), allocate(&exec, TENSOR_BYTES),
                   allocate(&exec, TENSOR_BYTES)};
    for (int d = 0; d < 2; d++) {
        te_dtype dtype = d ? TE_BF16 : TE_F32;
        if (only >= 0 && only != d) continue;
        double top = peak(&exec, dtype), share[2] = {0};
        printf("peak of %s on %d threads: %.1f GFLOP/s\n", te_dtype_name(dtype), threads, top);
        fill(mem.a, dtype);
        fill(mem.b, dtype);
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            if (!tokens || tokens == shapes[i][0]) report_linear(&exec, &mem, dtype, shapes[i], top, limit, share);
        printf("%s, all shapes: %.3f of oneDNN's best\n", te_dtype_name(dtype), share[1] / share[0]);
    }
    fill(mem.a, TE_F32);
    fill(mem.b, TE_F32);
    report_small(&exec, &mem);
    te_backend_cpu.device_close(&exec);
    return 0;
}
