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
    twins a = twins_new(TE_F32, DENSE, 3, (int64_t[3]){4, 5, 6}), b = twins_new(TE_BF16, DENSE, 3, (int64_t[3]){4, 5, 6});
    twins c = twins_new(TE_F32, SWAPPED, 3, (int64_t[3]){4, 5, 6});
    int   done = 1;
    CHECK(te_cuda_plan_copy_all(&plan, &a.gpu, &b.gpu, 1, &done) == TE_OK && done == 0 && plan.n_calls == 0);
    CHECK(te_cuda_plan_copy_all(&plan, &a.gpu, &c.gpu, 1, &done) == TE_OK && done == 0 && plan.n_calls == 0);
    twins_free(&a), twins_free(&b), twins_free(&c);
}

int main(void)
{
    cuda = (cuda_device){.exec = test_exec_open(1), .multiprocessors = 2};
    nvrtc_open(&cuda.nvrtc);
    check_joins();
    fprintf(stderr, "%d sources through NVRTC\n", cuda.nvrtc.compiled);
    test_exec_close(&cuda.exec);
    return TEST_END();
}
