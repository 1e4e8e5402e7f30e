/* test_cuda_kernels_move.c - CUDA kernels that only move elements, run by the simulator, against the CPU backend and
 * against loops over single elements. */
#include "cuda_twins.h"

#include "kernels/cpu/cpu.h"

/* --- many copies ------------------------------------------------------------------------------------------------- */

static te_view part_of(const te_view *whole, int dim, int64_t start, int64_t length)
{
    te_view part = *whole;
    part.shape[dim] = length;
    part.data = (char *)whole->data + start * whole->stride[dim] * (int64_t)te_dtype_size(whole->dtype);
    return part;
}

/* Tensors joined along dim, of lengths that go up by one where `grows`; expects the kernel. */
static void check_join(te_dtype dtype, layout l, int n, int dim, const int64_t *shape, bool grows, const char *kernel)
{
    twins   parts[150];
    te_view to[150], from[150];
    int64_t whole_shape[3] = {shape[0], shape[1], shape[2]}, start = 0, single[3];
    memcpy(single, whole_shape, sizeof single);
    whole_shape[dim] = n * shape[dim] + (grows ? n * (n - 1) / 2 : 0);
    twins whole = twins_new(dtype, DENSE, 3, whole_shape);
    for (int i = 0; i < n; i++) {
        single[dim] = shape[dim] + (grows ? i : 0);
        parts[i] = twins_new(dtype, l, 3, single);
        from[i] = parts[i].gpu;
        to[i] = part_of(&whole.gpu, dim, start, single[dim]);
        te_view cpu = part_of(&whole.cpu, dim, start, single[dim]);
        CHECK(te_cpu_copy(&cuda.exec, &cpu, &parts[i].cpu) == TE_OK);
        start += single[dim];
    }
    int launches = 0;
    for (int i = 0, done; i < n; i += done, launches++) {
        CHECK_PLAN(te_cuda_plan_copy_all(&plan, to + i, from + i, n - i, &done));
        CHECK_MSG(done > 0 && (plan.n_calls == 0 || strcmp(plan.calls[0].launch.name, kernel) == 0),
                  "%d done of %d along %d of %s by %s", done, n, dim, te_dtype_name(dtype), plan.calls[0].launch.name);
        if (done == 0) break;
    }
    CHECK(launches == (n + TE_COPY_PIECES - 1) / TE_COPY_PIECES);
    CHECK_MSG(same(&whole, 0), "%d of %s joined along %d", n, te_dtype_name(dtype), dim);
    for (int i = 0; i < n; i++) twins_free(&parts[i]);
    twins_free(&whole);
}

static void check_joins(void)
{
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F64, TE_I64, TE_U8, TE_BOOL};
    for (int i = 0; i < 6; i++) {
        check_join(dtypes[i], DENSE, 3, 0, (int64_t[3]){2, 3, 5}, true, "te_copy_pieces");
        check_join(dtypes[i], DENSE, 7, 2, (int64_t[3]){1, 30, 7}, false, "te_copy_pieces");
        check_join(dtypes[i], DENSE, 2, 1, (int64_t[3]){5, 4, 48}, false, "te_copy_pieces");
        check_join(dtypes[i], DENSE, 6, 2, (int64_t[3]){1, 9, 0}, true, "te_copy_pieces"); /* the first is empty */
    }
    check_join(TE_F32, PADDED, 5, 1, (int64_t[3]){1, 6, 13}, true, "te_copy_pieces");
    check_join(TE_F32, SWAPPED, 2, 0, (int64_t[3]){1, 1, 40}, false, "te_copy_pieces");
    check_join(TE_F32, DENSE, 130, 2, (int64_t[3]){1, 10, 2}, true, "te_copy_pieces"); /* three launches */
    check_join(TE_I32, DENSE, 3, 1, (int64_t[3]){3, 60, 64}, false, "te_copy_pieces"); /* several blocks of each */
    check_join(TE_F32, DENSE, 2, 2, (int64_t[3]){400, 401, 1}, false, "te_copy_mixed");
    check_join(TE_BF16, DENSE, 3, 2, (int64_t[3]){300, 401, 2}, false, "te_copy_mixed");
    check_join(TE_U8, PADDED, 5, 2, (int64_t[3]){1, 300001, 1}, false, "te_copy_mixed");
    check_join(TE_F64, DENSE, 7, 2, (int64_t[3]){1, 7001, 3}, false, "te_copy_mixed");
    /* what is no copy of rows */
    const int64_t shape[3] = {4, 5, 6};
    twins a = twins_new(TE_F32, DENSE, 3, shape), b = twins_new(TE_BF16, DENSE, 3, shape);
    twins c = twins_new(TE_F32, SWAPPED, 3, shape);
    int   done = 1;
    CHECK(te_cuda_plan_copy_all(&plan, &a.gpu, &b.gpu, 1, &done) == TE_OK && done == 0 && plan.n_calls == 0);
    CHECK(te_cuda_plan_copy_all(&plan, &a.gpu, &c.gpu, 1, &done) == TE_OK && done == 0 && plan.n_calls == 0);
    twins_free(&a), twins_free(&b), twins_free(&c);
    /* a large piece is copied by itself, and none has smaller units because of a small one beside it */
    static char    memory[16];
    static uint8_t odd[3];
    const int64_t  sizes[] = {16, 40 << 20, 2 << 20, 1};
    void *const    data[] = {memory, memory, memory, odd + 1};
    te_view        to[4];
    for (int i = 0; i < 4; i++)
        to[i] = (te_view){.data = data[i], .dtype = TE_U8, .ndim = 1, .shape = {sizes[i]}, .stride = {1}};
    CHECK(te_cuda_plan_copy_all(&plan, to, to, 4, &done) == TE_OK && done == 1 && plan.n_calls == 1);
    CHECK(te_cuda_plan_copy_all(&plan, to + 1, to + 1, 3, &done) == TE_OK && done == 0 && plan.n_calls == 0);
    CHECK(te_cuda_plan_copy_all(&plan, to + 2, to + 2, 2, &done) == TE_OK && done == 1 && plan.n_calls == 1);
}

/* --- gather of lines --------------------------------------------------------------------------------------------- */

/* Of `n` indices along dim, the same for all other dimensions; expects the kernel. */
static void check_lines(te_dtype dtype, layout l, te_dtype index_dtype, int dim, const int64_t *shape, int64_t n,
                        const char *kernel)
{
    int64_t part_shape[3] = {shape[0], shape[1], shape[2]}, step = 2, list_shape[1] = {step * n};
    part_shape[dim] = n;
    twins whole = twins_new(dtype, l, 3, shape), part = twins_new(dtype, l, 3, part_shape);
    twins list = twins_new(index_dtype, DENSE, 1, list_shape);
    each(&list, NULL, (double)shape[dim]);
    te_view gpu = part.gpu, cpu = part.cpu;
    for (int i = 0; i < 3; i++) gpu.stride[i] = cpu.stride[i] = i == dim ? step : 0;
    gpu.dtype = cpu.dtype = index_dtype;
    gpu.data = list.gpu.data, cpu.data = list.cpu.data;
    CHECK_PLAN(te_cuda_plan_gather(&cuda.exec, &plan, &part.gpu, &whole.gpu, &gpu, dim));
    CHECK_MSG(strcmp(plan.calls[0].launch.name, kernel) == 0, "%s", plan.calls[0].launch.name);
    CHECK(te_cpu_gather(&cuda.exec, &part.cpu, &whole.cpu, &cpu, dim) == TE_OK);
    CHECK_MSG(same(&part, 0), "%lld of %s along %d", (long long)n, te_dtype_name(dtype), dim);
    /* what is outside is skipped, and the first is named by its place among the indices */
    int64_t bad = n / 2;
    te_store_f64(list.gpu.data, index_dtype, step * bad, -1);
    te_store_f64(list.gpu.data, index_dtype, step * (n - 1), (double)shape[dim]);
    CHECK(te_cuda_plan_gather(&cuda.exec, &plan, &part.gpu, &whole.gpu, &gpu, dim) == TE_OK);
    char message[64];
    snprintf(message, sizeof message, "gather: index -1 at position %lld is", (long long)(bad + 1));
    if (bad < n - 1)
        CHECK_MSG(cuda_plan_run(&cuda, &plan) == TE_ERROR_ARGUMENT && strstr(cuda.exec.message, message), "%s, not %s",
                  cuda.exec.message, message);
    CHECK(same(&part, 0));
    twins_free(&whole), twins_free(&part), twins_free(&list);
}

/* Scattered by a vector of indices, of which some come twice. */
static void check_scatter(te_dtype dtype, layout l, te_dtype index_dtype, int dim, const int64_t *shape, int64_t n,
                          const char *kernel)
{
    int64_t part_shape[3] = {shape[0], shape[1], shape[2]};
    part_shape[dim] = n;
    twins whole = twins_new(dtype, l, 3, shape), part = twins_new(dtype, l, 3, part_shape);
    twins list = twins_new(index_dtype, DENSE, 1, &n);
    each(&list, NULL, (double)shape[dim]);
    te_view gpu = part.gpu, cpu = part.cpu;
    for (int i = 0; i < 3; i++) gpu.stride[i] = cpu.stride[i] = i == dim;
    gpu.dtype = cpu.dtype = index_dtype;
    gpu.data = list.gpu.data, cpu.data = list.cpu.data;
    CHECK_PLAN(te_cuda_plan_scatter(&cuda.exec, &plan, &whole.gpu, &part.gpu, &gpu, dim));
    CHECK_MSG(strcmp(plan.calls[plan.n_calls - 1].launch.name, kernel) == 0, "%s", plan.calls[0].launch.name);
    CHECK(te_cpu_scatter(&cuda.exec, &whole.cpu, &part.cpu, &cpu, dim) == TE_OK);
    CHECK_MSG(same(&whole, 0), "%lld of %s put along %d", (long long)n, te_dtype_name(dtype), dim);
    te_store_f64(list.gpu.data, index_dtype, n - 2, (double)shape[dim]);
    CHECK(te_cuda_plan_scatter(&cuda.exec, &plan, &whole.gpu, &part.gpu, &gpu, dim) == TE_OK);
    char message[64];
    snprintf(message, sizeof message, "scatter: index %lld at position %lld is", (long long)shape[dim],
             (long long)(n - 1));
    CHECK_MSG(cuda_plan_run(&cuda, &plan) == TE_ERROR_ARGUMENT && strstr(cuda.exec.message, message), "%s, not %s",
              cuda.exec.message, message);
    twins_free(&whole), twins_free(&part), twins_free(&list);
}

static void check_scatters(void)
{
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F64, TE_I64, TE_U8, TE_BOOL};
    for (int i = 0; i < 6; i++) {
        te_dtype ids = i % 2 ? TE_I32 : TE_I64;
        check_scatter(dtypes[i], DENSE, ids, 0, (int64_t[3]){90, 4, 32}, 100, "te_scatter_rows");
        check_scatter(dtypes[i], PADDED, ids, 1, (int64_t[3]){3, 300, 37}, 200, "te_scatter_rows");
        check_scatter(dtypes[i], DENSE, ids, 2, (int64_t[3]){2, 3, 64}, 160, "te_scatter_rows");
    }
    check_scatter(TE_F32, SWAPPED, TE_I64, 1, (int64_t[3]){2, 50, 3}, 70, "te_scatter_rows");
    check_scatter(TE_BF16, PADDED, TE_I64, 0, (int64_t[3]){80, 3, 7}, 100, "te_scatter_rows");
    check_scatter(TE_F32, DENSE, TE_I64, 0, (int64_t[3]){50, 2, 3}, 20, "te_scatter"); /* few of them */
    check_scatter(TE_F32, DENSE, TE_I64, 0, (int64_t[3]){6500, 1, 1}, 100, "te_scatter"); /* among many */
}

static void check_all_lines(void)
{
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F64, TE_I64, TE_U8, TE_BOOL};
    for (int i = 0; i < 6; i++) {
        te_dtype ids = i % 2 ? TE_I32 : TE_I64;
        check_lines(dtypes[i], DENSE, ids, 0, (int64_t[3]){9, 4, 32}, 30, "te_gather_rows");
        check_lines(dtypes[i], PADDED, ids, 1, (int64_t[3]){3, 9, 37}, 20, "te_gather_rows");
        check_lines(dtypes[i], DENSE, ids, 2, (int64_t[3]){2, 3, 64}, 160, "te_gather_columns");
        check_lines(dtypes[i], PADDED, ids, 2, (int64_t[3]){3, 2, 77}, 131, "te_gather_columns");
    }
    check_lines(TE_F32, DENSE, TE_I64, 0, (int64_t[3]){5, 1, 5000}, 3, "te_gather_rows"); /* several rounds of a row */
    check_lines(TE_BF16, DENSE, TE_I64, 1, (int64_t[3]){2, 300, 2}, 3000, "te_gather_rows");
    check_lines(TE_F32, DENSE, TE_I64, 2, (int64_t[3]){2, 2, 300}, 8300, "te_gather_columns"); /* two tiles of them */
    check_lines(TE_BF16, DENSE, TE_I32, 2, (int64_t[3]){2, 2, 4001}, 4004, "te_gather_columns");
    check_lines(TE_U8, DENSE, TE_I32, 2, (int64_t[3]){1, 1030, 129}, 128, "te_gather_columns"); /* blocks go round */
    check_lines(TE_F32, SWAPPED, TE_I64, 2, (int64_t[3]){2, 5, 30}, 140, "te_gather");
    check_lines(TE_F32, SWAPPED, TE_I64, 0, (int64_t[3]){2, 5, 30}, 9, "te_gather");
    check_lines(TE_F32, DENSE, TE_I64, 2, (int64_t[3]){1, 2, 30000}, 140, "te_gather"); /* few of long rows */
}

/* --- turned round, triangles ------------------------------------------------------------------------------------- */

static void check_turned(te_dtype dtype, layout l, const int64_t *shape, int dims)
{
    twins   from = twins_new(dtype, l, 3, shape), to = twins_new(dtype, DENSE, 3, shape);
    int64_t last[2] = {0};
    te_view view[2] = {from.gpu, from.cpu};
    for (int s = 0; s < 2; s++) {
        for (int i = 0; i < 3; i++) {
            if (!(dims >> i & 1)) continue;
            last[s] += (shape[i] - 1) * view[s].stride[i];
            view[s].stride[i] = -view[s].stride[i];
        }
        view[s].data = (char *)view[s].data + last[s] * (int64_t)te_dtype_size(dtype);
    }
    CHECK_PLAN(te_cuda_plan_turn(&cuda.exec, &plan, &to.gpu, &view[0]));
    CHECK(te_cpu_copy(&cuda.exec, &to.cpu, &view[1]) == TE_OK);
    CHECK_MSG(same(&to, 0), "%s turned round along %d", te_dtype_name(dtype), dims);
    twins_free(&from), twins_free(&to);
}

static void check_triangle(te_dtype dtype, layout l, const int64_t *shape, int64_t diagonal, bool upper)
{
    twins from = twins_new(dtype, l, 3, shape), to = twins_new(dtype, DENSE, 3, shape);
    CHECK_PLAN(te_cuda_plan_triangle(&cuda.exec, &plan, &to.gpu, &from.gpu, diagonal, upper));
    CHECK(te_cpu_triangle(&cuda.exec, &to.cpu, &from.cpu, diagonal, upper) == TE_OK);
    CHECK_MSG(same(&to, 0), "%s cut at %lld", te_dtype_name(dtype), (long long)diagonal);
    twins_free(&from), twins_free(&to);
}

static void check_shapes(void)
{
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F64, TE_I64, TE_U8};
    for (int i = 0; i < 5; i++)
        for (int dims = 1; dims < 8; dims++) {
            check_turned(dtypes[i], DENSE, (int64_t[3]){3, 5, 64}, dims);
            if (dims % 2 == 0) check_turned(dtypes[i], PADDED, (int64_t[3]){2, 3, 7 + dims}, dims);
        }
    check_turned(TE_F32, DENSE, (int64_t[3]){1, 1, 9001}, 4);
    check_turned(TE_F32, DENSE, (int64_t[3]){1, 3, 1}, 6);
    check_turned(TE_F32, SWAPPED, (int64_t[3]){4, 5, 6}, 5);
    check_turned(TE_BF16, DENSE, (int64_t[3]){4, 0, 6}, 5);
    for (int i = 0; i < 5; i++)
        for (int upper = 0; upper < 2; upper++) {
            check_triangle(dtypes[i], DENSE, (int64_t[3]){2, 40, 64}, 0, upper);
            check_triangle(dtypes[i], PADDED, (int64_t[3]){3, 9, 7}, i - 2, upper);
            check_triangle(dtypes[i], DENSE, (int64_t[3]){1, 100, 48}, 5, upper);
        }
    check_triangle(TE_F32, DENSE, (int64_t[3]){2, 9, 8}, -(INT64_C(1) << 40), false);
    check_triangle(TE_F32, DENSE, (int64_t[3]){2, 9, 8}, -(INT64_C(1) << 40), true);
    check_triangle(TE_F32, DENSE, (int64_t[3]){2, 9, 8}, INT64_C(1) << 40, false);
    check_triangle(TE_F32, DENSE, (int64_t[3]){2, 9, 8}, INT64_C(1) << 40, true);
    check_triangle(TE_F32, DENSE, (int64_t[3]){2, 0, 8}, 0, true);
}

int main(void)
{
    cuda = (cuda_device){.exec = test_exec_open(1), .multiprocessors = 2};
    nvrtc_open(&cuda.nvrtc);
    check_joins();
    check_all_lines();
    check_scatters();
    check_shapes();
    fprintf(stderr, "%d sources through NVRTC\n", cuda.nvrtc.compiled);
    test_exec_close(&cuda.exec);
    return TEST_END();
}
