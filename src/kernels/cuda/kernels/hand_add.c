/* hand_add.c - plans of sums of single elements in shared memory (add.cu). */
#include "hand_internal.h"

/* Joins the dimensions of one view that lie behind one another. */
static void join_view(te_cuda_view *v)
{
    int64_t n = 0;
    for (int64_t i = 0; i < v->ndim; i++) {
        if (v->shape[i] == 1) continue;
        if (n > 0 && v->stride[n - 1] == v->shape[i] * v->stride[i])
            v->shape[n - 1] *= v->shape[i];
        else
            v->shape[n++] = v->shape[i];
        v->stride[n - 1] = v->stride[i];
    }
    if (n == 0) v->shape[n++] = v->stride[0] = 1;
    v->ndim = n;
}

static void set_type(te_cuda_call *call, te_dtype dtype)
{
    call->kernel.dtype[0] = call->kernel.dtype[1] = (uint8_t)dtype;
    call->kernel.wide = dtype == TE_F64;
}

static int bits_for(int64_t numbers) /* that are below it */
{
    int bits = 0;
    while (INT64_C(1) << bits < numbers) bits++;
    return bits;
}

/* Many lines side by side in memory, each of about as many elements as places, or more: a block for each. */
static bool plan_lines(te_cuda_plan *plan, const te_index_args *args, te_dtype dtype)
{
    enum { THREADS = 128, MANY_LINES = 256, MOST_STRETCHES = 8, TIMES = 4 };
    int64_t dim = args->dim, extent = args->index.shape[dim], bound = args->whole.shape[dim];
    int64_t stretch = TE_ADD_STRETCH_BYTES / (int64_t)te_dtype_size(dtype), lines = args->n / extent;
    int64_t stretches = (bound + stretch - 1) / stretch;
    bool    last = dim == args->index.ndim - 1 && args->index.stride[dim] == 1 && args->part.stride[dim] == 1;
    if (!last || lines < MANY_LINES || bound > TIMES * extent || stretches > MOST_STRETCHES ||
        lines * stretches > INT32_MAX)
        return false;
    set_type(te_cuda_plan_add(plan, TE_CUDA_FILE_ADD, "te_add_lines", lines * stretches, THREADS, args, sizeof *args),
             dtype);
    return true;
}

static bool plan_buckets(te_cuda_plan *plan, const te_index_args *args, te_dtype dtype)
{
    enum { USUAL = TE_BUCKETS / 2 /* since each warp counts for each */, LEAST_BITS = 8 };
    enum { MOST_WARPS = 2048, LEAST_SHARE = 512, ROUND = 128, WARPS = TE_HAND_THREADS / 32, TIMES = 4 };
    int64_t         size = (int64_t)te_dtype_size(dtype), dim = args->dim;
    te_buckets_args b = {.whole = args->whole, .part = args->part, .index = args->index, .n = args->n,
                         .index_wide = args->index_wide, .extent = args->whole.shape[dim],
                         .taken = args->index.shape[dim], .inner = 1};
    for (int64_t i = dim + 1; i < args->index.ndim; i++) b.inner *= args->index.shape[i];
    for (int64_t i = 0; i < args->index.ndim; i++) b.whole.shape[i] = i == dim ? b.extent : args->index.shape[i];
    if (b.n <= TE_SORT_TILE || b.n > UINT32_MAX || b.extent > TIMES * b.taken) return false;
    b.slots = b.n / b.taken * b.extent;
    b.stretch_bits = bits_for((b.slots + USUAL - 1) / USUAL);
    if (b.stretch_bits < LEAST_BITS) b.stretch_bits = LEAST_BITS;
    if (size << b.stretch_bits > TE_ADD_STRETCH_BYTES) b.stretch_bits--;
    if (size << b.stretch_bits > TE_ADD_STRETCH_BYTES) return false;
    b.buckets = (b.slots + (INT64_C(1) << b.stretch_bits) - 1) >> b.stretch_bits;
    b.bits = bits_for(b.buckets);
    b.share = (b.n + MOST_WARPS - 1) / MOST_WARPS;
    b.share = ((b.share > LEAST_SHARE ? b.share : LEAST_SHARE) + ROUND - 1) / ROUND * ROUND;
    b.warps = (b.n + b.share - 1) / b.share;
    b.counts_at = TE_BUCKETS * 4;
    b.placed_at = b.counts_at + (b.buckets * b.warps + 3) / 4 * 16;
    plan->scratch_bytes = (size_t)(b.placed_at + b.n * (size < 4 ? 4 : 2 * size));
    join_view(&b.whole), join_view(&b.part), join_view(&b.index);
    static const char *const kernels[] = {"te_bucket_count", "te_bucket_scan", "te_bucket_move", "te_bucket_add"};
    int64_t blocks[] = {(b.warps + WARPS - 1) / WARPS, b.buckets, (b.warps + WARPS - 1) / WARPS, b.buckets};
    for (int i = 0; i < 4; i++)
        set_type(te_cuda_plan_add(plan, TE_CUDA_FILE_ADD, kernels[i], blocks[i], TE_HAND_THREADS, &b, sizeof b), dtype);
    return true;
}

bool te_cuda_plan_add_elements(te_cuda_plan *plan, const te_index_args *args, te_dtype dtype)
{
    return plan_lines(plan, args, dtype) || plan_buckets(plan, args, dtype);
}
