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

/* Divides each of so many groups of rows among blocks, which are `blocks` together at most, with at least so many
 * elements for each. */
static void divide_rows(te_select_args *args, int64_t groups, int64_t blocks, int64_t least)
{
    enum { WHOLE = 64 /* elements that no two parts share */ };
    int64_t parts = blocks / groups < args->n / least ? blocks / groups : args->n / least;
    args->part = args->n;
    if (parts > 1) args->part = ((args->n + parts - 1) / parts + WHOLE - 1) / WHOLE * WHOLE;
    args->parts = (args->n + args->part - 1) / args->part;
}

/* Which one it is changes no result: of equal elements the first is best in any order. */
static void add_arg_calls(te_cuda_plan *plan, te_select_args *args)
{
    enum { SHORT = 256, EACH = 8, SHARED_FROM = 32768, BLOCKS = 1024, LEAST = 8192 };
    enum { ACROSS = 32, NEIGHBOURS = 8, COLUMN_BLOCKS = 2048, COLUMN_LEAST = 256 };
    const te_cuda_view *src = &args->src;
    int64_t             last = src->ndim - 1, groups = (args->rows + ACROSS - 1) / ACROSS;
    int                 threads = TE_HAND_THREADS;
    args->parts = 1;
    args->part = args->n;
    if (last > 0 && args->n > 1 && src->stride[last] != 1 && src->stride[last - 1] == 1 &&
        src->shape[last - 1] >= NEIGHBOURS) {
        divide_rows(args, groups, COLUMN_BLOCKS, COLUMN_LEAST);
        te_cuda_plan_add(plan, TE_CUDA_FILE_SELECT, "te_arg_columns", groups * args->parts, threads, args,
                         sizeof *args);
    } else if (args->n <= SHORT) {
        while ((int64_t)EACH << args->leaves < args->n) args->leaves++;
        te_cuda_plan_add(plan, TE_CUDA_FILE_SELECT, "te_arg_short", te_blocks_for(args->rows << args->leaves), threads,
                         args, sizeof *args);
    } else {
        if (args->n >= SHARED_FROM) divide_rows(args, args->rows, BLOCKS, LEAST);
        int64_t blocks = args->rows * args->parts;
        te_cuda_plan_add(plan, TE_CUDA_FILE_SELECT, "te_arg_reduce", blocks < FULL ? blocks : FULL,
                         threads_for(args->part, CHOICE_THREADS), args, sizeof *args);
    }
    if (args->parts == 1) return;
    plan->scratch_bytes = (size_t)(args->rows * args->parts) * 2 * sizeof(uint64_t);
    te_cuda_plan_add(plan, TE_CUDA_FILE_SELECT, "te_arg_join", te_blocks_for(args->rows * 32), threads, args,
                     sizeof *args);
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
    add_arg_calls(plan, &args);
    for (int i = 0; i < plan->n_calls; i++) {
        te_cuda_kernel *kernel = &plan->calls[i].kernel;
        kernel->dtype[0] = kernel->dtype[1] = (uint8_t)src->dtype;
        kernel->wide = src->dtype == TE_F64;
    }
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
    te_order_args order = {.src = args.src, .out = args.out, .indices = args.indices, .rows = args.rows, .n = args.n,
                           .k = args.k, .largest = largest, .turned = 1};
    if (te_cuda_plan_best(plan, &order, src->dtype)) return TE_OK;
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
    enum { LEAVES = 256, MOST_NODES = 2048, FEW_DRAWS = 32 };
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
    int64_t nodes = (args.leaves + LEAVES - 1) / LEAVES; /* as te_multinomial_few keeps them */
    if (args.k <= (replacement ? FEW_DRAWS : 1) && nodes <= MOST_NODES) {
        args.leaves = nodes * LEAVES;
        add_call(plan, "te_multinomial_few", &args, FULL, TREE_THREADS, src->dtype, src->dtype);
        plan->calls[0].launch.shared = (uint32_t)((size_t)nodes * 2 * sizeof(double));
        plan->calls[0].kernel.wide = true;
        return TE_OK;
    }
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
