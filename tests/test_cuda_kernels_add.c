/* test_cuda_kernels_add.c - CUDA kernels that add elements and rows by index, run by the simulator, against the CPU
 * backend: to the bit, since both add in the order of the terms. */
#include "cuda_twins.h"

#include "kernels/cpu/cpu.h"

/* Mostly numbers, whose sums show the order; a few that are none. */
static double tame(double x) { return isfinite(x) || test_random(&state) % 64 == 0 ? x : 1.0 / 3; }

/* The sum, by a plan that begins or ends with the kernel; then with one index outside, which is skipped and named by
 * the place that `named` gives for its element. */
static void check_sum(twins *whole, const twins *part, const te_view *gpu, const te_view *cpu, int dim,
                      const char *kernel, int64_t bad, int64_t named)
{
    char message[80];
    CHECK_PLAN(te_cuda_plan_scatter_add(&cuda.exec, &plan, &whole->gpu, &part->gpu, gpu, dim));
    const char *first = plan.calls[0].launch.name, *last = plan.calls[plan.n_calls - 1].launch.name;
    CHECK_MSG(strcmp(first, kernel) == 0 || strcmp(last, kernel) == 0, "%s … %s, not %s", first, last, kernel);
    CHECK(te_cpu_scatter_add(&cuda.exec, &whole->cpu, &part->cpu, cpu, dim) == TE_OK);
    CHECK_MSG(same(whole, 0), "%s of %s along %d", kernel, te_dtype_name(whole->gpu.dtype), dim);
    if (bad < 0) return;
    te_store_f64(gpu->data, gpu->dtype, bad, (double)whole->gpu.shape[dim]);
    CHECK(te_cuda_plan_scatter_add(&cuda.exec, &plan, &whole->gpu, &part->gpu, gpu, dim) == TE_OK);
    snprintf(message, sizeof message, "scatter_add: index %lld at position %lld is", (long long)whole->gpu.shape[dim],
             (long long)named + 1);
    CHECK_MSG(cuda_plan_run(&cuda, &plan) == TE_ERROR_ARGUMENT && strstr(cuda.exec.message, message), "%s, not %s",
              cuda.exec.message, message);
}

/* --- rows -------------------------------------------------------------------------------------------------------- */

/* n rows of `width` to some of `bound`; every `often` th row, or 0: none, goes to the last one. */
static void check_rows(te_dtype dtype, layout l, te_dtype index_dtype, int64_t n, int64_t bound, int64_t width,
                       int64_t often)
{
    twins whole = twins_new(dtype, l, 2, (int64_t[2]){bound, width});
    twins part = twins_new(dtype, l, 2, (int64_t[2]){n, width});
    twins list = twins_new(index_dtype, DENSE, 1, &n);
    each(&list, NULL, (double)bound);
    each(&part, tame, 0);
    for (int64_t i = 0; often > 0 && i < n; i++) {
        if (i % often != 0) continue;
        te_store_f64(list.gpu.data, index_dtype, i, (double)(bound - 1));
        te_store_f64(list.cpu.data, index_dtype, i, (double)(bound - 1));
    }
    te_view gpu = part.gpu, cpu = part.cpu;
    gpu.dtype = cpu.dtype = index_dtype;
    gpu.stride[0] = cpu.stride[0] = 1, gpu.stride[1] = cpu.stride[1] = 0;
    gpu.data = list.gpu.data, cpu.data = list.cpu.data;
    check_sum(&whole, &part, &gpu, &cpu, 0, n < TE_ADD_LONG ? "te_add_rows" : "te_add_long", n / 2, n / 2);
    twins_free(&whole), twins_free(&part), twins_free(&list);
}

static void check_all_rows(void)
{
    static const te_dtype dtypes[] = {TE_F32, TE_F64, TE_I64, TE_I32, TE_U8};
    for (int i = 0; i < 5; i++) {
        te_dtype ids = i % 2 ? TE_I32 : TE_I64;
        check_rows(dtypes[i], DENSE, ids, 300, 40, 64, 0);
        check_rows(dtypes[i], PADDED, ids, 700, 7, 33, 2);
        check_rows(dtypes[i], DENSE, ids, 1000, 3, 17, 1); /* all of them to one row */
    }
    check_rows(TE_F32, SWAPPED, TE_I64, 260, 5, 6, 3);
    check_rows(TE_F32, DENSE, TE_I64, 100, 5, 130, 1);
    for (int64_t n = 127; n <= 129; n++) check_rows(TE_F32, DENSE, TE_I64, n, 2, 4, 1);
    for (int64_t n = 255; n <= 258; n++) check_rows(TE_F32, DENSE, TE_I64, n, 1, 40, 1);
    check_rows(TE_F32, DENSE, TE_I64, 5000, 4, 4, 0);      /* several long ones of a block */
    check_rows(TE_F32, DENSE, TE_I32, 3000, 3000, 4, 17);  /* one among short ones */
}

/* --- single elements --------------------------------------------------------------------------------------------- */

/* Indices below `few`, so that many meet, or anywhere where that is 0. */
static void check_elements(te_dtype dtype, layout l, te_dtype index_dtype, int dim, const int64_t *whole_shape,
                           const int64_t *part_shape, int64_t few, const char *kernel)
{
    twins whole = twins_new(dtype, l, 3, whole_shape), part = twins_new(dtype, l, 3, part_shape);
    twins index = twins_new(index_dtype, DENSE, 3, part_shape);
    int64_t bad = te_view_numel(&index.gpu) / 3;
    each(&part, tame, 0);
    each(&index, NULL, (double)(few ? few : whole_shape[dim]));
    check_sum(&whole, &part, &index.gpu, &index.cpu, dim, kernel, bad, bad);
    twins_free(&whole), twins_free(&part), twins_free(&index);
}

static void check_all_elements(void)
{
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F64, TE_I64, TE_I32, TE_U8, TE_F16};
    for (int i = 0; i < 7; i++) {
        te_dtype ids = i % 2 ? TE_I32 : TE_I64;
        layout   l = i % 3 == 1 ? PADDED : DENSE;
        check_elements(dtypes[i], l, ids, 2, (int64_t[3]){2, 130, 70}, (int64_t[3]){2, 130, 99}, 0, "te_add_lines");
        check_elements(dtypes[i], l, ids, 0, (int64_t[3]){300, 1, 4}, (int64_t[3]){600, 1, 4}, 0, "te_bucket_add");
        check_elements(dtypes[i], l, ids, 1, (int64_t[3]){3, 40, 2}, (int64_t[3]){3, 700, 2}, 3, "te_bucket_add");
    }
    check_elements(TE_F32, DENSE, TE_I64, 2, (int64_t[3]){1, 256, 80}, (int64_t[3]){1, 256, 300}, 1, "te_add_lines");
    check_elements(TE_F64, DENSE, TE_I64, 2, (int64_t[3]){1, 257, 4200}, (int64_t[3]){1, 256, 1060}, 0, "te_add_lines");
    check_elements(TE_F32, DENSE, TE_I64, 0, (int64_t[3]){2100, 1, 1}, (int64_t[3]){9000, 1, 1}, 0, "te_bucket_add");
    check_elements(TE_F32, DENSE, TE_I64, 0, (int64_t[3]){9000, 1, 1}, (int64_t[3]){4097, 1, 1}, 2, "te_bucket_add");
    check_elements(TE_BF16, PADDED, TE_I32, 0, (int64_t[3]){900, 2, 20}, (int64_t[3]){899, 2, 20}, 0, "te_bucket_add");
    check_elements(TE_I32, SWAPPED, TE_I64, 1, (int64_t[3]){2, 500, 9}, (int64_t[3]){2, 333, 9}, 0, "te_bucket_add");
}

int main(void)
{
    cuda = (cuda_device){.exec = test_exec_open(1), .multiprocessors = 2};
    nvrtc_open(&cuda.nvrtc);
    check_all_rows();
    check_all_elements();
    fprintf(stderr, "%d sources through NVRTC\n", cuda.nvrtc.compiled);
    test_exec_close(&cuda.exec);
    return TEST_END();
}
