/* hand_order.c - plans of sort, and of topk where rows are put in order (order.cu). */
#include "hand_internal.h"

enum {
    MOST_THREADS = 512,
    TILE = MOST_THREADS * TE_ORDER_EACH, /* what one block sorts, at most */
    MOST_BLOCKS = 512,                   /* of a long row */
    FULL = 65535
};

static size_t key_bytes(te_dtype dtype) { return dtype == TE_F64 || dtype == TE_I64 ? 8 : 4; }

static te_cuda_call *add_call(te_cuda_plan *plan, const char *name, const te_order_args *args, te_dtype dtype,
                              int64_t blocks, int threads)
{
    te_cuda_call *call = te_cuda_plan_add(plan, TE_CUDA_FILE_ORDER, name, blocks, threads, args, sizeof *args);
    call->kernel.dtype[0] = call->kernel.dtype[1] = (uint8_t)dtype;
    call->kernel.wide = dtype == TE_F64;
    return call;
}

/* Of a block that sorts tiles, with so many bytes for each element. */
static uint32_t shared_for(int threads, size_t each)
{
    return (uint32_t)((size_t)threads * TE_ORDER_EACH * each +
                      (size_t)threads / 32 * TE_ORDER_DIGITS * sizeof(uint32_t));
}

/* Sorts the tiles of what args say and keeps the first of each. */
static void add_tiles(te_cuda_plan *plan, const te_order_args *args, te_dtype dtype)
{
    int threads = 32;
    while (threads < MOST_THREADS && threads * TE_ORDER_EACH < args->n) threads *= 2;
    int64_t tile = (int64_t)threads * TE_ORDER_EACH, blocks = (args->n + tile - 1) / tile * args->rows;
    te_cuda_call *call = add_call(plan, "te_order_tile", args, dtype, blocks < FULL ? blocks : FULL, threads);
    call->launch.shared = shared_for(threads, key_bytes(dtype) + sizeof(uint16_t));
}

/* Sorts rows by all blocks, then takes the first k of each. */
static void add_passes(te_cuda_plan *plan, te_order_args *args, te_dtype dtype)
{
    enum { MANY = 1 << 20, EARLY = 256 };
    int     threads = args->n < MANY ? EARLY : MOST_THREADS;
    int64_t tile = (int64_t)threads * TE_ORDER_EACH, tiles = (args->n + tile - 1) / tile;
    int64_t passes = (int64_t)key_bytes(dtype) * 8 / TE_ORDER_BITS;
    args->stretch = (tiles + MOST_BLOCKS - 1) / MOST_BLOCKS * tile;
    args->blocks = (args->n + args->stretch - 1) / args->stretch;
    plan->scratch_bytes =
        (size_t)(args->rows * args->n) * 2 * (key_bytes(dtype) + sizeof(uint32_t)) +
        (size_t)args->rows * (size_t)(TE_ORDER_DIGITS * (args->blocks + 1) + passes + 1) * sizeof(uint32_t);
    for (args->pass = 0; args->pass < passes; args->pass++) {
        add_call(plan, "te_order_count", args, dtype, args->rows * args->blocks, threads);
        add_call(plan, "te_order_scan", args, dtype, te_blocks_for(args->rows * TE_ORDER_DIGITS * 32),
                 TE_HAND_THREADS);
        te_cuda_call *call = add_call(plan, "te_order_pass", args, dtype, args->rows * args->blocks, threads);
        call->launch.shared = shared_for(threads, key_bytes(dtype) + sizeof(uint32_t));
    }
    int64_t stored = (int64_t)TE_HAND_THREADS * TE_ORDER_EACH, blocks = (args->k + stored - 1) / stored * args->rows;
    add_call(plan, "te_order_store", args, dtype, blocks < FULL ? blocks : FULL, TE_HAND_THREADS);
}

static void add_order(te_cuda_plan *plan, te_order_args *args, te_dtype dtype)
{
    args->from = args->to = -1;
    args->k_last = args->k;
    if (args->n <= TILE)
        add_tiles(plan, args, dtype);
    else
        add_passes(plan, args, dtype);
}

bool te_cuda_plan_best(te_cuda_plan *plan, te_order_args *args, te_dtype dtype)
{
    enum { FEW = 32, SOME = 64, ROWS = 32, LONG = 32768, FEW_OF_TILE = 1024 };
    bool one_tile = args->n <= TILE, few = args->k <= FEW;
    bool one_by_one = one_tile ? few : args->k <= SOME && (args->rows >= ROWS || (few && args->n < LONG));
    if (args->n > UINT32_MAX || one_by_one) return false;
    if (one_tile || args->k > FEW_OF_TILE) {
        add_order(plan, args, dtype);
        return true;
    }
    int64_t at = 0;
    for (args->from = -1; args->n > TILE; at = (int64_t)plan->scratch_bytes) {
        int64_t tiles = (args->n + TILE - 1) / TILE, rest = args->n - (tiles - 1) * TILE;
        args->k_last = rest < args->k ? rest : args->k;
        args->to = at;
        int64_t kept = (tiles - 1) * args->k + args->k_last;
        add_tiles(plan, args, dtype);
        plan->scratch_bytes += ((size_t)(args->rows * kept) * (key_bytes(dtype) + sizeof(uint32_t)) + 7) / 8 * 8;
        args->from = at;
        args->n = kept;
    }
    args->to = -1;
    args->k_last = args->k;
    add_tiles(plan, args, dtype);
    return true;
}

te_status te_cuda_plan_order(te_exec *exec, te_cuda_plan *plan, const te_view *values, const te_view *indices,
                             const te_view *src, bool descending)
{
    te_cuda_plan_open(plan);
    te_status status = te_check_rows(exec, "sort", indices, src);
    if (status != TE_OK) return status;
    int64_t       n = src->shape[src->ndim - 1];
    te_order_args args = {.src = te_cuda_view_of(src), .indices = te_cuda_view_of(indices),
                          .rows = te_row_count(src), .n = n, .k = n, .largest = 1, .turned = descending};
    if (indices->shape[indices->ndim - 1] != n || indices->dtype != TE_I64)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "sort: %lld indices of %s for %lld elements; int64 is needed",
                            (long long)indices->shape[indices->ndim - 1], te_dtype_name(indices->dtype), (long long)n);
    if (n > UINT32_MAX)
        return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "sort: a device sorts rows of %lld elements at most, not %lld",
                            (long long)UINT32_MAX, (long long)n);
    if (values && (status = te_check_rows(exec, "sort", values, src)) != TE_OK) return status;
    if (values && (values->shape[values->ndim - 1] != n || values->dtype != src->dtype))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "sort: values must be of the source's dtype and shape");
    if (values) args.out = te_cuda_view_of(values);
    if (args.rows > 0 && n > 0) add_order(plan, &args, src->dtype);
    return TE_OK;
}
