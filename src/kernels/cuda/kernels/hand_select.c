/* hand_select.c - plans of arg_reduce, topk, cumsum, multinomial and of whole numbers at random. */
#include "hand_internal.h"

enum {
    FULL = 8192,
    TREES = 256, /* blocks of multinomial, each with a tree in scratch memory */
    CHOICE_THREADS = 512, /* of a block, at most */
    SUM_THREADS = 256,
    TREE_THREADS = 1024
};

static int64_t row_length(const te_view *v) { return v->shape[v->ndim - 1]; }

static te_select_args args_for(const te_view *src)
{
    return (te_select_args){.src = te_cuda_view_of(src), .rows = te_row_count(src), .n = row_length(src)};
}

/* Of a block for rows of n elements: the order of sums depends on it, so nothing else may decide. */
static int threads_for(int64_t n, int most)
{
    enum { WARP = 32, SHORT = 512, BLOCK = 256, LONG = 8192 };
    int threads = n <= SHORT ? WARP : n <= LONG ? BLOCK : most;
    return threads < most ? threads : most;
}

static void add_call(te_cuda_plan *plan, const char *name, const te_select_args *args, int64_t most_blocks,
                     int most_threads, te_dtype a, te_dtype b)
{
    te_cuda_call *call =
        te_cuda_plan_add(plan, TE_CUDA_FILE_SELECT, name, args->rows < most_blocks ? args->rows : most_blocks,
                         threads_for(args->n, most_threads), args, sizeof *args);
    call->kernel.dtype[0] = (uint8_t)a;
    call->kernel.dtype[1] = (uint8_t)b;
}

static void put_rng(uint64_t *words, te_rng rng)
{
    words[0] = rng.seed;
    words[1] = rng.stream;
    words[2] = rng.offset;
    words[3] = (uint64_t)(uintptr_t)rng.base;
}

te_status te_cuda_plan_arg_reduce(te_exec *exec, te_cuda_plan *plan, const te_view *index, const te_view *src,
                                  bool largest)
{
    te_cuda_plan_open(plan);
    te_status status = te_check_arg_reduce(exec, index, src);
    if (status != TE_OK) return status;
    te_select_args args = args_for(src);
    if (args.rows == 0) return TE_OK;
    args.indices = te_cuda_view_of(index);
    args.flag = largest;
    add_call(plan, "te_arg_reduce", &args, FULL, CHOICE_THREADS, src->dtype, src->dtype);
    plan->calls[0].kernel.wide = src->dtype == TE_F64;
    return TE_OK;
}

te_status te_cuda_plan_topk(te_exec *exec, te_cuda_plan *plan, const te_view *values, const te_view *indices,
                            const te_view *src, bool largest)
{
    te_cuda_plan_open(plan);
    te_status status = te_check_rows(exec, "topk", values, src);
    if (status == TE_OK) status = te_check_rows(exec, "topk", indices, src);
    if (status != TE_OK) return status;
    te_select_args args = args_for(src);
    args.k = row_length(values);
    if (row_length(indices) != args.k || args.k > args.n || indices->dtype != TE_I64 || values->dtype != src->dtype)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT,
                            "topk: %lld values and %lld indices of %lld elements; indices must be int64, values of the "
                            "source's dtype", (long long)args.k, (long long)row_length(indices), (long long)args.n);
    if (args.rows == 0 || args.k == 0) return TE_OK;
    args.out = te_cuda_view_of(values);
    args.indices = te_cuda_view_of(indices);
    args.flag = largest;
    add_call(plan, "te_topk", &args, FULL, CHOICE_THREADS, src->dtype, src->dtype);
    plan->calls[0].kernel.wide = src->dtype == TE_F64;
    return TE_OK;
}

te_status te_cuda_plan_cumsum(te_exec *exec, te_cuda_plan *plan, const te_view *dst, const te_view *src, bool reverse)
{
    te_cuda_plan_open(plan);
    te_status status = te_check_rows(exec, "cumsum", dst, src);
    if (status != TE_OK) return status;
    te_select_args args = args_for(src);
    if (row_length(dst) != args.n)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "cumsum: rows of %lld sums for rows of %lld elements",
                            (long long)row_length(dst), (long long)args.n);
    if (args.rows == 0 || args.n == 0) return TE_OK;
    args.out = te_cuda_view_of(dst);
    args.flag = reverse;
    add_call(plan, "te_cumsum", &args, FULL, SUM_THREADS, src->dtype, dst->dtype);
    plan->calls[0].kernel.wide = true;
    return TE_OK;
}

te_status te_cuda_plan_multinomial(te_exec *exec, te_cuda_plan *plan, const te_view *out, const te_view *src,
                                   bool replacement, te_rng rng)
{
    te_cuda_plan_open(plan);
    te_status status = te_check_rows(exec, "multinomial", out, src);
    if (status != TE_OK) return status;
    if (out->dtype != TE_I64) return te_exec_fail(exec, TE_ERROR_ARGUMENT, "multinomial: samples must be int64");
    te_select_args args = args_for(src);
    args.k = row_length(out);
    if (args.rows == 0 || args.k == 0) return TE_OK;
    args.indices = te_cuda_view_of(out);
    args.flag = replacement;
    args.leaves = 1;
    while (args.leaves < args.n) args.leaves *= 2;
    put_rng(args.rng, rng);
    plan->check = (te_cuda_check){TE_CUDA_CHECK_WEIGHTS, "multinomial", 0, 0};
    plan->scratch_bytes = (size_t)(args.rows < TREES ? args.rows : TREES) * (size_t)args.leaves * 2 * sizeof(double);
    add_call(plan, "te_multinomial", &args, TREES, TREE_THREADS, src->dtype, src->dtype);
    plan->calls[0].kernel.wide = true;
    return TE_OK;
}

te_status te_cuda_plan_integers(te_cuda_plan *plan, void *values, te_dtype dtype, int64_t n, const te_integers *drawn)
{
    te_cuda_plan_open(plan);
    te_integers_args args = {.to = values,
                             .n = n,
                             .bytes = (int64_t)te_dtype_size(dtype),
                             .low = drawn->low,
                             .range = drawn->range};
    if (n == 0) return TE_OK;
    put_rng(args.rng, drawn->rng);
    te_cuda_call *call = te_cuda_plan_add(plan, TE_CUDA_FILE_SELECT, "te_integers", te_blocks_for((n + 1) / 2),
                                          TE_HAND_THREADS, &args, sizeof args);
    call->kernel.dtype[0] = call->kernel.dtype[1] = TE_F32; /* the types of the selections that the build compiles */
    return TE_OK;
}
