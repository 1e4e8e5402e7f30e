/* test_cuda_kernels_quantize.c - quantizing and dequantizing on a device, run by the simulator, against the CPU:
 * every byte of data, factors and amaxes, for the quantizers of every recipe. Sources are also compiled by NVRTC
 * where that is installed. */
#include "cuda_device.h"

#include "core/quantizer.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cuda/ready.h"
#include "quantizers.h"

static cuda_device  cuda;
static te_cuda_plan plan;
static uint64_t     state = 0x2545f4914f6cdd1du;

enum { ARRAYS = 3, SCALE = 32 };

/* The arrays of a side, twice over: by the device and by the CPU. */
typedef struct arrays {
    void  *data[ARRAYS];
    size_t bytes[ARRAYS];
} arrays;

static arrays arrays_of(const te_quantizer *q, int side, int64_t rows, int64_t cols, te_quantized_side *out)
{
    te_quantized_layout l = te_quantizer_layout(q, side, rows, cols);
    size_t factors = 1;
    for (int i = 0; i < l.scale_ndim; i++) factors *= (size_t)l.scale_shape[i];
    arrays a = {.bytes = {(size_t)(l.data_rows * l.data_bytes), factors * te_dtype_size(l.scale_dtype),
                          l.amaxes > 0 ? (size_t)l.amaxes * sizeof(float) : 0}};
    for (int i = 0; i < ARRAYS; i++) {
        a.data[i] = test_scratch(&cuda.exec, a.bytes[i]);
        memset(a.data[i], 0xa5, a.bytes[i]);
    }
    *out = (te_quantized_side){.data = a.data[0],
                               .rows = l.rows,
                               .cols = l.cols,
                               .row_stride = l.row_stride,
                               .col_stride = l.col_stride,
                               .scale_inv = a.data[1],
                               .scale_row_stride = l.scale_row_stride,
                               .scale_col_stride = l.scale_col_stride,
                               .amax = l.amaxes > 0 ? a.data[2] : NULL,
                               .amax_stride = l.amaxes != 1,
                               .rng = {5, 0, (uint64_t)side * 1000, NULL}};
    return a;
}

static void *random_source(te_dtype dtype, int64_t n, bool special)
{
    const double values[] = {INFINITY, -INFINITY, NAN, 0, -0.0, 1e30, 1e-39};
    void *x = test_scratch(&cuda.exec, (size_t)n * te_dtype_size(dtype));
    for (int64_t i = 0; i < n; i++) {
        double v = test_uniform(&state, -4, 4) * exp2(test_uniform(&state, -10, 0));
        if (special && test_random(&state) % 200 == 0) v = values[test_random(&state) % 7];
        else if (special && test_random(&state) % 4 == 0) /* halfway between codes of E2M1, and just beside */
            v = (double)((int)(test_random(&state) % 129) - 64) / 8 / SCALE *
                (1 + (double)((int)(test_random(&state) % 3) - 1) / 128);
        te_store_f64(x, dtype, i, v);
    }
    return x;
}

static void check_back(const char *name, te_quantize_job job, int side)
{
    size_t bytes = (size_t)(job.rows * job.cols) * te_dtype_size(job.dtype);
    void *by_gpu = test_scratch(&cuda.exec, bytes), *by_cpu = test_scratch(&cuda.exec, bytes);
    job.source_stride = job.cols;
    job.source = by_gpu;
    te_status made = te_cuda_plan_dequantize(&plan, &job, side);
    CHECK_MSG(made == TE_OK && cuda_plan_run(&cuda, &plan) == TE_OK, "%s", cuda.exec.message);
    job.source = by_cpu;
    CHECK(te_cpu_dequantize(&cuda.exec, &job, side) == TE_OK);
    int64_t wrong = 0;
    for (int64_t i = 0; i < job.rows * job.cols; i++) {
        double a = te_load_f64(by_gpu, job.dtype, i), b = te_load_f64(by_cpu, job.dtype, i);
        wrong += !(a == b || (isnan(a) && isnan(b)));
    }
    CHECK_MSG(wrong == 0, "%s: side %d back, %lld x %lld %s: %lld differ", name, side, (long long)job.rows,
              (long long)job.cols, te_dtype_name(job.dtype), (long long)wrong);
    free(by_gpu);
    free(by_cpu);
}

/* Rows of the source are `beyond` elements longer than the matrix: 0 where they may be aligned. */
static void check_quantizer(const char *name, const te_quantizer *q, te_dtype dtype, int64_t rows, int64_t cols,
                            int64_t beyond, bool special)
{
    int64_t stride = cols + beyond;
    te_quantize_job gpu = {.quantizer = q, .dtype = dtype, .rows = rows, .cols = cols, .source_stride = stride,
                           .scale = special ? SCALE : 29.7f}, cpu = gpu;
    arrays by_gpu[2], by_cpu[2];
    gpu.source = cpu.source = random_source(dtype, rows * stride, special);
    for (int s = 0; s < 2; s++) {
        by_gpu[s] = arrays_of(q, s, rows, cols, &gpu.side[s]);
        by_cpu[s] = arrays_of(q, s, rows, cols, &cpu.side[s]);
    }
    te_status made = te_cuda_plan_quantize(&plan, &gpu);
    CHECK_MSG(made == TE_OK && cuda_plan_run(&cuda, &plan) == TE_OK, "%s: %s", name, cuda.exec.message);
    CHECK(te_cpu_quantize(&cuda.exec, &cpu) == TE_OK);
    for (int s = 0; s < 2; s++)
        for (int i = 0; i < ARRAYS; i++) {
            const uint8_t *a = by_gpu[s].data[i], *b = by_cpu[s].data[i];
            size_t at = 0;
            while (at < by_gpu[s].bytes[i] && a[at] == b[at]) at++;
            CHECK_MSG(at == by_gpu[s].bytes[i], "%s: side %d, array %d of %lld x %lld %s: byte %zu is %d, not %d", name,
                      s, i, (long long)rows, (long long)cols, te_dtype_name(dtype), at, a[at], b[at]);
        }
    for (int s = 0; s < 2; s++) check_back(name, cpu, s);
    for (int s = 0; s < 2; s++)
        for (int i = 0; i < ARRAYS; i++) free(by_gpu[s].data[i]), free(by_cpu[s].data[i]);
    free(gpu.source);
}

/* What no recipe has and a quantizer may be: blocks of a thread's eight places and smaller ones, larger ones with two
 * candidates, options together. */
#define QUANTIZER(kind, rows, cols)                                                                                    \
    .element = kind, .block_rows = rows, .block_cols = cols, .has_columnwise = true, .transposed = true
static const te_quantizer unusual[] = {
    {QUANTIZER(TE_E4M3, 1, 1)},
    {QUANTIZER(TE_E5M2, 2, 2), .power_of_two = true},
    {QUANTIZER(TE_E4M3, 4, 4), .replicated = true},
    {QUANTIZER(TE_E4M3, 1, 8), .scale = TE_SCALE_E8M0},
    {QUANTIZER(TE_E4M3, 8, 8)},
    {QUANTIZER(TE_E4M3, 16, 16), .hadamard = true},
    {QUANTIZER(TE_E5M2, 1, 64), .replicated = true, .epsilon = 0.5f},
    {QUANTIZER(TE_E4M3, 64, 64), .scale = TE_SCALE_E8M0},
    {QUANTIZER(TE_E2M1, 0, 0)},
    {QUANTIZER(TE_E2M1, 1, 2)},
    {QUANTIZER(TE_E2M1, 1, 128), .stochastic = true, .hadamard = true},
    {QUANTIZER(TE_E2M1, 1, 4), .scale = TE_SCALE_E4M3, .scale_max = 256, .four_over_six = TE_46_MSE},
    {QUANTIZER(TE_E2M1, 4, 4), .scale = TE_SCALE_E4M3, .scale_max = 448, .four_over_six = TE_46_MAE},
    {QUANTIZER(TE_E2M1, 1, 16), .scale = TE_SCALE_E4M3, .scale_max = 448, .four_over_six = TE_46_MAE,
     .row_scaled = true},
    {QUANTIZER(TE_E2M1, 1, 32), .scale = TE_SCALE_E4M3, .scale_max = 448, .four_over_six = TE_46_MSE},
    {QUANTIZER(TE_E2M1, 0, 0), .needs_history = true},
    {QUANTIZER(TE_E2M1, 64, 64), .scale = TE_SCALE_E4M3, .scale_max = 448, .four_over_six = TE_46_MSE},
};

/* What the build compiles are variants that recipes have. */
static void check_ready(void)
{
    for (const te_cuda_kernel *k = te_cuda_ready_list; k->file != TE_CUDA_FILE_COUNT; k++) {
        bool known = k->file != TE_CUDA_FILE_QUANTIZE || k->dim[0] == 0;
        for (int i = 0; i < 3 * QUANTIZER_RECIPES; i++)
            known |= k->dim[0] == te_cuda_quantize_variant(&quantizer_recipes[i / 3].q[i % 3]);
        CHECK_MSG(known, "variant %x", k->dim[0]);
    }
}

int main(void)
{
    const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F16};
    cuda = (cuda_device){.exec = test_exec_open(2), .multiprocessors = 2};
    nvrtc_open(&cuda.nvrtc);
    for (int r = 0; r < QUANTIZER_RECIPES; r++)
        for (int role = 0; role < 3; role++) {
            const te_quantizer *q = &quantizer_recipes[r].q[role];
            te_dtype dtype = dtypes[(r + role) % 3];
            check_quantizer(quantizer_recipes[r].name, q, dtype, 150, 141, 5, false);
            check_quantizer(quantizer_recipes[r].name, q, TE_BF16, 33, 300, 5, true);
            check_quantizer(quantizer_recipes[r].name, q, dtype, 256, 144, 0, true);
        }
    for (size_t i = 0; i < sizeof unusual / sizeof *unusual; i++) {
        char name[32];
        snprintf(name, sizeof name, "unusual %zu", i);
        check_quantizer(name, &unusual[i], TE_BF16, 150, 144, 8 * (int64_t)(i % 2), i % 3 == 0);
    }
    check_ready();
    check_quantizer("one element", &quantizer_recipes[1].q[0], TE_F32, 1, 1, 5, false);
    check_quantizer("no rows", &quantizer_recipes[1].q[0], TE_F32, 0, 7, 5, false);
    check_quantizer("no columns", &quantizer_recipes[7].q[0], TE_F32, 7, 0, 5, false);
    fprintf(stderr, "%d sources through NVRTC\n", cuda.nvrtc.compiled);
    test_exec_close(&cuda.exec);
    return TEST_END();
}
