/* test_cuda_backend_gemm.c - matrix products of the CUDA backend against plain loops in double, over random shapes,
 * layouts, dtypes, biases and accumulation; and the choices between algorithms, and between an end that is fused and
 * one that is not, made once and kept on disk. */
#include "cuda_backend.h"

#include <cublasLt.h>

/* A matrix (and batches of it) on the device, and its values as doubles, row-major. */
typedef struct operand {
    te_tensor *whole, *view;
    double *values;
    int64_t n;
} operand;

static const te_dtype floats[] = {TE_F32, TE_BF16, TE_F16, TE_F64};

static int64_t pick(uint64_t *state, int64_t n) { return (int64_t)(test_random(state) % (uint64_t)n); }

/* Small whole numbers, which every dtype holds, in one of five layouts; spread: the first dimension may repeat. */
static operand random_operand(te_context *ctx, uint64_t *state, te_dtype dtype, int ndim, const int64_t *shape,
                              bool spread)
{
    int64_t stride[TE_MAX_DIMS], step = 1, last = shape[ndim - 1], before = ndim > 1 ? shape[ndim - 2] : 1;
    int layout = (int)pick(state, ndim > 1 ? 5 : 2);
    bool repeats = spread && ndim > 2 && pick(state, 3) == 0;
    stride[ndim - 1] = layout == 1 ? 2 : layout == 2 ? before : layout == 3 ? before + 3 : 1;
    if (ndim > 1) stride[ndim - 2] = layout == 0 ? last : layout == 1 ? 2 * last + 1 : layout == 4 ? last + 8 : 1;
    step = layout == 0   ? before * last
           : layout == 1 ? before * (2 * last + 1)
           : layout == 2 ? before * last
           : layout == 3 ? (before + 3) * last
                         : before * (last + 8);
    for (int i = ndim - 3; i >= 0; i--) {
        stride[i] = repeats ? 0 : step;
        if (!repeats) step *= shape[i];
    }
    int64_t offset = pick(state, 2) * 3, room = step + offset + 16;
    operand o = {.n = 1};
    for (int i = 0; i < ndim; i++) o.n *= shape[i];
    double *memory = malloc((size_t)room * sizeof *memory);
    for (int64_t i = 0; i < room; i++) memory[i] = (double)pick(state, 7) - 3;
    o.whole = te_tensor_new(ctx, te_context_device(ctx, "cuda"), dtype, 1, &room);
    if (!o.whole || te_tensor_write(o.whole, TE_F64, memory) != TE_OK) abort();
    o.view = te_tensor_alias(o.whole, ndim, shape, stride, offset);
    o.values = malloc(((size_t)o.n + 1) * sizeof *o.values);
    if (te_tensor_read(o.view, TE_F64, o.values) != TE_OK) abort();
    free(memory);
    return o;
}

static void drop(operand *o)
{
    te_tensor_release(o->view);
    te_tensor_release(o->whole);
    free(o->values);
}

static double tolerance(te_dtype dtype)
{
    return dtype == TE_BF16 ? 0x1p-7 : dtype == TE_F16 ? 0x1p-10 : dtype == TE_F32 ? 2e-6 : 1e-13;
}

static int wrong_values(te_tensor *t, const double *expected, int64_t n, double tolerance_of)
{
    double *actual = malloc(((size_t)n + 1) * sizeof *actual);
    int wrong = 0;
    if (te_tensor_read(t, TE_F64, actual) != TE_OK) abort();
    for (int64_t i = 0; i < n; i++) wrong += !(fabs(actual[i] - expected[i]) <= tolerance_of * (1 + fabs(expected[i])));
    free(actual);
    return wrong;
}

static void random_case(te_context *ctx, uint64_t *state, int number)
{
    static const int64_t extents[] = {1, 2, 3, 5, 8, 16, 17, 24};
    int batch_dims = (int)pick(state, 3), ndim = batch_dims + 2;
    int64_t a_shape[4], b_shape[4], c_shape[4], batches = 1;
    int64_t m = extents[pick(state, 8)], n = extents[pick(state, 8)], k = pick(state, 8) ? extents[pick(state, 8)] : 0;
    te_dtype in = floats[pick(state, 4)], out = in == TE_F64 || pick(state, 3) ? in : TE_F32;
    for (int i = 0; i < batch_dims; i++) batches *= a_shape[i] = b_shape[i] = c_shape[i] = 1 + pick(state, 3);
    a_shape[ndim - 2] = c_shape[ndim - 2] = m;
    b_shape[ndim - 1] = c_shape[ndim - 1] = n;
    a_shape[ndim - 1] = b_shape[ndim - 2] = k;
    bool bias_wanted = pick(state, 2);
    operand a = random_operand(ctx, state, in, ndim, a_shape, true),
            b = random_operand(ctx, state, in, ndim, b_shape, true);
    operand c = random_operand(ctx, state, out, ndim, c_shape, false);
    operand bias = random_operand(ctx, state, floats[pick(state, 4)], 1, &n, false);
    te_gemm g = {.a = te_tensor_view(a.view),
                 .b = te_tensor_view(b.view),
                 .c = te_tensor_view(c.view),
                 .alpha = pick(state, 2) ? 1 : -0.5f,
                 .beta = (float)pick(state, 2)};
    if (bias_wanted) g.bias = te_tensor_view(bias.view);
    double *y = malloc((size_t)c.n * sizeof *y);
    for (int64_t i = 0; i < c.n; i++) {
        int64_t batch = i / (m * n), row = i / n % m, column = i % n;
        double sum = 0;
        for (int64_t l = 0; l < k; l++)
            sum += a.values[(batch * m + row) * k + l] * b.values[(batch * k + l) * n + column];
        y[i] = g.alpha * sum + (bias_wanted ? bias.values[column] : 0) + g.beta * c.values[i];
    }
    te_exec *exec = &te_context_device(ctx, "cuda")->exec;
    te_status status = exec->backend->gemm(exec, &g);
    int wrong = status == TE_OK ? wrong_values(c.view, y, c.n, tolerance(out)) : -1;
    CHECK_MSG(wrong == 0,
              "case %d: %lldx%lldx%lld, %lld batches, %s into %s, bias %d, beta %g: status %d (%s), %d of %lld differ",
              number, (long long)m, (long long)n, (long long)k, (long long)batches, te_dtype_name(in),
              te_dtype_name(out), bias_wanted, (double)g.beta, (int)status, status == TE_OK ? "" : exec->message, wrong,
              (long long)c.n);
    free(y);
    drop(&bias);
    drop(&c);
    drop(&b);
    drop(&a);
}

/* One product that is large enough to be timed; the calls of cuBLASLt that it made. */
static uint64_t timed_product(void)
{
    const int64_t size[] = {160, 160};
    te_context *ctx = te_context_open(NULL);
    uint64_t before = fake.count("cublasLtMatmul");
    te_tensor *a = numbers_on(ctx, "cuda", TE_F32, 2, size), *c = a ? te_tensor_new_like(a) : NULL;
    te_exec *exec = &te_context_device(ctx, "cuda")->exec;
    te_gemm g = {.a = te_tensor_view(a), .b = te_tensor_view(a), .c = te_tensor_view(c), .alpha = 1};
    CHECK(exec->backend->gemm(exec, &g) == TE_OK && exec->backend->synchronize(exec) == TE_OK);
    te_tensor_release(c);
    te_tensor_release(a);
    te_context_release(ctx);
    return fake.count("cublasLtMatmul") - before;
}

static void shorten(const char *path)
{
    if (strstr(path, ".gemm") && truncate(path, 40) != 0) abort();
}

static void test_choice(void)
{
    uint64_t measured = timed_product();
    CHECK_MSG(measured > 3, "%d products", (int)measured);
    CHECK_MSG(timed_product() == 1, "the choice was not kept");
    each_cached(shorten);
    CHECK_MSG(timed_product() == measured, "a damaged choice was taken");
    setenv("TETRAIN_GEMM_CANDIDATES", "2", 1); /* of the three that there are */
    CHECK_MSG(timed_product() < measured, "as many products as before");
    CHECK_MSG(timed_product() == 1, "the choice among two was not kept");
    setenv("TETRAIN_GEMM_CANDIDATES", "10000", 1);
    CHECK(timed_product() == measured);
    unsetenv("TETRAIN_GEMM_CANDIDATES");
    CHECK_MSG(timed_product() == 1, "the choice was forgotten");
}

/* Where memory is too short to measure, the first algorithm does it, and no later run is bound to that. */
static void test_choice_unmeasured(void)
{
    each_cached(shorten);
    fake.set_memory(8 << 20); /* no workspace */
    CHECK_MSG(timed_product() == 1, "it was measured");
    fake.set_memory((size_t)8 << 30);
    CHECK_MSG(timed_product() > 3, "what was not measured was kept");
    CHECK(timed_product() == 1);
}

/* The algorithm that is taken where products take so long; nanoseconds, of a cold and of a hot device. */
static int algorithm_for(const uint64_t cold[3], const uint64_t hot[3])
{
    static const char *const names[] = {"product 0", "product 1", "product 2"};
    uint64_t before[3];
    int taken = -1;
    each_cached(shorten);
    fake.set_product_costs(cold, hot);
    timed_product();
    for (int i = 0; i < 3; i++) before[i] = fake.count(names[i]);
    CHECK(timed_product() == 1);
    for (int i = 0; i < 3; i++)
        if (fake.count(names[i]) > before[i]) taken = i;
    fake.set_product_costs((uint64_t[3]){0}, (uint64_t[3]){0});
    return taken;
}

/* What counts is which one is the fastest on a device that has been at it for a while, where that takes long. */
static void test_choice_under_load(void)
{
    static const uint64_t even[] = {3000000, 3000000, 3000000}, second[] = {3000000, 2000000, 2500000},
                          third[] = {3000000, 2900000, 2800000}, hardly[] = {3000000, 2990000, 2980000};
    CHECK(algorithm_for(third, second) == 1);
    CHECK(algorithm_for(second, third) == 2);
    CHECK(algorithm_for(second, even) == 0);
    CHECK(algorithm_for(even, hardly) == 0);
    CHECK(algorithm_for((uint64_t[]){3000, 2000, 1000}, (uint64_t[]){3000, 2000, 1000}) == 2); /* no load at all */
    each_cached(shorten);
}

/* What the library declines with an epilogue, when it is asked or when it is about to run, takes two passes. */
static void test_epilogue_declined(void)
{
    static const char *const calls[] = {"cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"};
    const int64_t size[] = {8, 8};
    for (int i = 0; i < 2; i++) {
        te_context *ctx = te_context_open(NULL);
        te_tensor *a = numbers_on(ctx, "cuda", TE_F32, 2, size), *bias = numbers_on(ctx, "cuda", TE_F32, 1, size),
                  *c = te_tensor_new_like(a);
        double first[64], second[64];
        te_exec *exec = &te_context_device(ctx, "cuda")->exec;
        te_gemm g = {.a = te_tensor_view(a), .b = te_tensor_view(a), .c = te_tensor_view(c),
                     .bias = te_tensor_view(bias), .alpha = 1};
        fake.fail_call(calls[i], 0, CUBLAS_STATUS_NOT_SUPPORTED);
        uint64_t before = fake.count("cublasLtMatmul");
        CHECK_MSG(exec->backend->gemm(exec, &g) == TE_OK && te_tensor_read(c, TE_F64, first) == TE_OK, "%s",
                  exec->message);
        fake.fail_call(NULL, 0, 0);
        CHECK(exec->backend->gemm(exec, &g) == TE_OK && te_tensor_read(c, TE_F64, second) == TE_OK);
        for (int k = 0; k < 64; k++) {
            double sum = (double)(k % 8) - 40;
            for (int l = 0; l < 8; l++) sum += ((double)(k / 8 * 8 + l) - 40) * ((double)(8 * l + k % 8) - 40);
            CHECK(first[k] == sum);
        }
        CHECK(memcmp(first, second, sizeof first) == 0 && fake.count("cublasLtMatmul") - before == 2 + (uint64_t)i);
        te_tensor_release(c);
        te_tensor_release(bias);
        te_tensor_release(a);
        te_context_release(ctx);
    }
}

/* A product with a bias, large enough to be timed, `repeats` times with `beta`; counts[0]: cuBLASLt's products,
 * counts[1]: kernels of tetrain's own, of the last time alone. The results are compared with plain sums. */
static void ended_product(float beta, int repeats, int64_t m, uint64_t counts[2])
{
    const int64_t size[] = {m, 160};
    te_context *ctx = te_context_open(NULL);
    te_exec *exec = &te_context_device(ctx, "cuda")->exec;
    te_tensor *a = numbers_on(ctx, "cuda", TE_F32, 2, size),
              *b = numbers_on(ctx, "cuda", TE_F32, 2, (int64_t[]){160, 160}),
              *bias = numbers_on(ctx, "cuda", TE_F32, 1, &size[1]), *c = te_tensor_new_like(a);
    double *values = malloc((size_t)(m * 160) * sizeof *values);
    te_gemm g = {.a = te_tensor_view(a), .b = te_tensor_view(b), .c = te_tensor_view(c), .bias = te_tensor_view(bias),
                 .alpha = 0x1p-12f, .beta = beta};
    int wrong = 0;
    CHECK(te_tensor_fill(c, 3) == TE_OK);
    for (int i = 0; i < repeats; i++) {
        counts[0] = fake.count("cublasLtMatmul");
        counts[1] = fake.count("cuLaunchKernel");
        CHECK_MSG(exec->backend->gemm(exec, &g) == TE_OK, "%s", exec->message);
        counts[0] = fake.count("cublasLtMatmul") - counts[0];
        counts[1] = fake.count("cuLaunchKernel") - counts[1];
    }
    if (te_tensor_read(c, TE_F64, values) != TE_OK) abort();
    for (int64_t i = 0; i < m * 160; i++) {
        double sum = 0;
        for (int64_t l = 0; l < 160; l++)
            sum += ((double)((i / 160 * 160 + l) % 97) - 40) * ((double)((l * 160 + i % 160) % 97) - 40);
        double x = sum * 0x1p-12 + (double)(i % 160 % 97) - 40, y = beta != 0 ? 3 + repeats * x : x;
        wrong += !(fabs(values[i] - y) <= 1e-5 * (1 + fabs(y)));
    }
    CHECK_MSG(wrong == 0, "%d of %lld values with beta %g", wrong, (long long)(m * 160), (double)beta);
    free(values);
    te_tensor *tensors[] = {a, b, bias, c};
    for (int i = 0; i < 4; i++) te_tensor_release(tensors[i]);
    te_context_release(ctx);
}

/* Whether the end is fused is timed once, and the answer outlives the context and the clock it was found with. */
static void test_end(void)
{
    enum { SLOW = 100000, SMALL = 16 };
    for (int slow = 0; slow < 2; slow++) {
        int64_t m = 160 + 16 * slow; /* a product of its own */
        uint64_t counts[2];
        fake.set_epilogue_cost(slow ? SLOW : 0);
        ended_product(0, 1, m, counts);
        CHECK_MSG(counts[0] > 8 && counts[1] > 3, "%d products and %d kernels: nothing was timed", (int)counts[0],
                  (int)counts[1]);
        ended_product(0, 2, m, counts);
        CHECK_MSG(counts[0] == 1 && counts[1] == (uint64_t)slow, "%d products, %d kernels when an epilogue is %s",
                  (int)counts[0], (int)counts[1], slow ? "slow" : "fast");
        fake.set_epilogue_cost(slow ? 0 : SLOW);
        ended_product(0, 1, m, counts);
        CHECK_MSG(counts[0] == 1 && counts[1] == (uint64_t)slow, "the answer was not kept");
        each_cached(shorten);
        ended_product(0, 2, m, counts);
        CHECK_MSG(counts[0] == 1 && counts[1] == (uint64_t)!slow, "a damaged answer was taken");
        fake.set_epilogue_cost(SLOW);
        ended_product(1, 2, m, counts);
        CHECK_MSG(counts[0] == 1 && counts[1] == 0, "a product that adds to its result was timed with its end");
        ended_product(0, 1, SMALL, counts);
        CHECK_MSG(counts[0] == 1 && counts[1] == 0, "a small product was timed");
    }
    fake.set_epilogue_cost(0);
}

/* A library that has no memory, or no algorithm, for the second way leaves the first. */
static void test_end_impossible(void)
{
    uint64_t counts[2];
    fake.set_epilogue_cost(100000);
    fake.fail_call("cublasLtMatmulAlgoGetHeuristic", 1, CUBLAS_STATUS_NOT_SUPPORTED); /* of the product alone */
    ended_product(0, 2, 208, counts);
    CHECK_MSG(counts[0] == 1 && counts[1] == 0, "%d products, %d kernels", (int)counts[0], (int)counts[1]);
    fake.fail_call(NULL, 0, 0);
    fake.set_epilogue_cost(0);
}

/* {m, k} by {k, n}, once; the calls of cuBLASLt that it made. */
static uint64_t sized_product(te_context *ctx, int64_t m, int64_t k, int64_t n, const char *call)
{
    te_exec *exec = &te_context_device(ctx, "cuda")->exec;
    te_tensor *a = numbers_on(ctx, "cuda", TE_F32, 2, (int64_t[]){m, k}),
              *b = numbers_on(ctx, "cuda", TE_F32, 2, (int64_t[]){k, n}),
              *c = te_tensor_new(ctx, te_context_device(ctx, "cuda"), TE_F32, 2, (int64_t[]){m, n});
    te_gemm g = {.a = te_tensor_view(a), .b = te_tensor_view(b), .c = te_tensor_view(c), .alpha = 1};
    uint64_t before = fake.count(call);
    CHECK_MSG(exec->backend->gemm(exec, &g) == TE_OK, "%s", exec->message);
    uint64_t calls = fake.count(call) - before;
    double first = 0, *values = malloc((size_t)(m * n) * sizeof *values);
    for (int64_t l = 0; l < k; l++) first += ((double)(l % 97) - 40) * ((double)(l * n % 97) - 40);
    CHECK(te_tensor_read(c, TE_F64, values) == TE_OK && fabs(values[0] - first) <= 1e-5 * (1 + fabs(first)));
    free(values);
    te_tensor_release(c);
    te_tensor_release(b);
    te_tensor_release(a);
    return calls;
}

/* Of products that differ in the rows of the result, or in what is summed over, the first eight sizes are timed; the
 * others are not, in later runs neither, and the eight keep what was found. */
static void test_sizes(void)
{
    for (int inner = 0; inner < 2; inner++)
        for (int run = 0; run < 2; run++) {
            te_context *ctx = te_context_open(NULL);
            for (int i = run ? 19 : 0; run ? i >= 0 : i < 20; i += run ? -1 : 1) {
                int64_t size = 184 + 8 * i;
                uint64_t calls = sized_product(ctx, inner ? 176 : size, inner ? size : 176, 192, "cublasLtMatmul");
                CHECK_MSG((calls > 3) == (run == 0 && i < 8), "run %d, size %d: %d products", run, i, (int)calls);
                CHECK(sized_product(ctx, inner ? 176 : size, inner ? size : 176, 192, "cublasLtMatmul") == 1);
            }
            te_context_release(ctx);
        }
}

/* Small products of ever other sizes: their plans go again, and come again. */
static void test_many_sizes(void)
{
    static const char heuristic[] = "cublasLtMatmulAlgoGetHeuristic";
    enum { PLANS = 512, OBJECTS = 4 /* of a plan */ };
    te_context *ctx = te_context_open(NULL);
    for (int64_t m = 1; m <= 3; m++) CHECK(sized_product(ctx, m, 8, 8, heuristic) == 1);
    int live = fake.live();
    for (int64_t m = 4; m <= 3 * PLANS; m++) CHECK(sized_product(ctx, m, 8, 8, heuristic) == 1);
    CHECK_MSG(fake.live() - live <= PLANS * OBJECTS + 200, "%d things more than before", fake.live() - live);
    for (int64_t m = 2 * PLANS + 1; m <= 3 * PLANS; m++) CHECK(sized_product(ctx, m, 8, 8, heuristic) == 0);
    for (int64_t m = 1; m <= 3; m++) CHECK(sized_product(ctx, m, 8, 8, heuristic) == 1);
    te_context_release(ctx);
}

/* The library looks at where a bias lies when it names candidates. */
static void test_alignment_of_bias(void)
{
    te_context *ctx = te_context_open(NULL);
    te_exec *exec = &te_context_device(ctx, "cuda")->exec;
    te_tensor *a = numbers_on(ctx, "cuda", TE_F32, 2, (int64_t[]){8, 8}), *c = te_tensor_new_like(a),
              *bias = numbers_on(ctx, "cuda", TE_F32, 1, (int64_t[]){264});
    const int64_t offsets[] = {0, 4, 64, 68, 128}, asks[] = {1, 1, 0, 0, 0};
    for (int i = 0; i < 5; i++) {
        te_tensor *part = te_tensor_alias(bias, 1, (int64_t[]){8}, (int64_t[]){1}, offsets[i]);
        te_gemm g = {.a = te_tensor_view(a), .b = te_tensor_view(a), .c = te_tensor_view(c),
                     .bias = te_tensor_view(part), .alpha = 1};
        uint64_t before = fake.count("cublasLtMatmulAlgoGetHeuristic");
        CHECK_MSG(exec->backend->gemm(exec, &g) == TE_OK, "%s", exec->message);
        int asked = (int)(fake.count("cublasLtMatmulAlgoGetHeuristic") - before);
        CHECK_MSG(asked == (int)asks[i], "a bias at %d: asked %d times", (int)offsets[i], asked);
        te_tensor_release(part);
    }
    te_tensor_release(bias);
    te_tensor_release(c);
    te_tensor_release(a);
    te_context_release(ctx);
}

/* More products at once than a grid counts along y and z. */
static void test_many_batches(te_context *ctx)
{
    enum { N = 70001 };
    te_exec *exec = &te_context_device(ctx, "cuda")->exec;
    te_tensor *a = numbers_on(ctx, "cuda", TE_F32, 3, (int64_t[]){N, 3, 2}),
              *b = numbers_on(ctx, "cuda", TE_F32, 3, (int64_t[]){N, 2, 1}),
              *c = te_tensor_new(ctx, te_context_device(ctx, "cuda"), TE_F32, 3, (int64_t[]){N, 3, 1});
    te_gemm g = {.a = te_tensor_view(a), .b = te_tensor_view(b), .c = te_tensor_view(c), .alpha = 1};
    double *expected = malloc(3 * N * sizeof *expected);
    for (int64_t i = 0; i < 3 * N; i++) {
        expected[i] = 0;
        for (int64_t k = 0; k < 2; k++)
            expected[i] += ((double)((2 * i + k) % 97) - 40) * ((double)((i / 3 * 2 + k) % 97) - 40);
    }
    CHECK_MSG(exec->backend->gemm(exec, &g) == TE_OK, "%s", exec->message);
    CHECK(wrong_values(c, expected, 3 * N, 0) == 0);
    free(expected);
    te_tensor_release(c);
    te_tensor_release(b);
    te_tensor_release(a);
}

static void test_refusals(te_context *ctx)
{
    te_exec *exec = &te_context_device(ctx, "cuda")->exec;
    te_tensor *a = numbers_on(ctx, "cuda", TE_F32, 2, (int64_t[]){3, 4}),
              *b = numbers_on(ctx, "cuda", TE_F64, 2, (int64_t[]){4, 3});
    te_gemm g = {.a = te_tensor_view(a), .b = te_tensor_view(a), .c = te_tensor_view(a), .alpha = 1};
    CHECK(exec->backend->gemm(exec, &g) == TE_ERROR_ARGUMENT);
    g.b = te_tensor_view(b);
    g.c.shape[1] = 3;
    CHECK(exec->backend->gemm(exec, &g) == TE_ERROR_ARGUMENT && strstr(exec->message, "float64"));
    te_tensor_release(a);
    te_tensor_release(b);
}

int main(void)
{
    fake_open();
    te_context *ctx = te_context_open(NULL);
    uint64_t state = 20;
    for (int i = 0; i < 600; i++) random_case(ctx, &state, i);
    test_many_batches(ctx);
    test_refusals(ctx);
    te_context_release(ctx);
    test_choice();
    test_choice_unmeasured();
    test_choice_under_load();
    test_epilogue_declined();
    test_end();
    test_end_impossible();
    test_sizes();
    test_many_sizes();
    test_alignment_of_bias();
    fake_close();
    return TEST_END();
}
