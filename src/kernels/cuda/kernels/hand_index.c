/* hand_index.c - plans of embedding, the check of classes, gather, scatter and scatter_add. */
#include "hand_internal.h"

enum { SHORT_LINE = 64 /* a thread can go along it */, THREADS = TE_HAND_THREADS, MOST_COLUMN_BLOCKS = 65535 };

static int bits_of(uint64_t n)
{
    int bits = 0;
    for (; n; n >>= 1) bits++;
    return bits;
}

int te_cuda_plan_sort(te_cuda_plan *plan, int64_t n, uint64_t largest)
{
    enum { SORT_THREADS = 512, MOST_BLOCKS = 256 /* each reads the counts of all */ };
    int64_t      tiles = (n + TE_SORT_TILE - 1) / TE_SORT_TILE;
    te_sort_args args = {.n = n, .stretch = (tiles + MOST_BLOCKS - 1) / MOST_BLOCKS * TE_SORT_TILE,
                         .bits = bits_of(largest)};
    int64_t      blocks = tiles > 1 ? (n + args.stretch - 1) / args.stretch : 0;
    int          digits = (int)((args.bits + TE_SORT_BITS - 1) / TE_SORT_BITS);
    plan->scratch_bytes = (size_t)(n * 4 + TE_SORT_HALVES) * 8 + (size_t)blocks * TE_SORT_DIGITS * sizeof(uint32_t);
    if (tiles <= 1) te_cuda_plan_add(plan, TE_CUDA_FILE_INDEX, "te_sort", 1, SORT_THREADS, &args, sizeof args);
    for (; tiles > 1 && args.digit < digits; args.digit++) {
        te_cuda_plan_add(plan, TE_CUDA_FILE_INDEX, "te_sort_count", blocks, SORT_THREADS, &args, sizeof args);
        te_cuda_plan_add(plan, TE_CUDA_FILE_INDEX, "te_sort_pass", blocks, SORT_THREADS, &args, sizeof args);
    }
    return digits;
}

static te_status check_sort(te_exec *exec, const char *operation, int64_t n)
{
    if (n <= UINT32_MAX) return TE_OK;
    return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "%s: a sort on the device takes %lld ids at most, not %lld",
                        operation, (long long)UINT32_MAX, (long long)n);
}

static bool is_index(te_dtype dtype) { return dtype == TE_I64 || dtype == TE_I32; }

/* --- embedding --------------------------------------------------------------------------------------------------- */

/* Elements of both sides that 16-byte accesses may move at a time; 1 also where columns are apart. */
static int embedding_vector(const te_view *rows, const te_view *table)
{
    int     last = rows->ndim - 1;
    size_t  widest = te_dtype_size(rows->dtype) > te_dtype_size(table->dtype) ? te_dtype_size(rows->dtype)
                                                                               : te_dtype_size(table->dtype);
    int     vector = (int)(16 / widest);
    int64_t steps = table->shape[1] | table->stride[0];
    bool    flat = rows->stride[last] == 1 && table->stride[1] == 1;
    for (int i = 0; i < last; i++) steps |= rows->stride[i];
    while (vector > 1 &&
           (steps % vector != 0 || (uintptr_t)rows->data % (te_dtype_size(rows->dtype) * (size_t)vector) ||
            (uintptr_t)table->data % (te_dtype_size(table->dtype) * (size_t)vector)))
        vector /= 2;
    return flat ? vector : 1;
}

/* Joins the dimensions of ids that lie behind one another in both views: kernels need not take an index apart. */
static void join_dims(te_cuda_view *rows, te_cuda_view *ids)
{
    int n = 0, last = (int)ids->ndim;
    for (int i = 0; i < last; i++) {
        int64_t extent = ids->shape[i];
        if (n > 0 && ids->stride[n - 1] == extent * ids->stride[i] && rows->stride[n - 1] == extent * rows->stride[i]) {
            ids->shape[n - 1] *= extent;
        } else {
            ids->shape[n++] = extent;
        }
        rows->shape[n - 1] = ids->shape[n - 1];
        ids->stride[n - 1] = ids->stride[i];
        rows->stride[n - 1] = rows->stride[i];
    }
    rows->shape[n] = rows->shape[last];
    rows->stride[n] = rows->stride[last];
    ids->ndim = n;
    rows->ndim = n + 1;
}

static te_embedding_args embedding_args(const te_view *rows, const te_view *table, const te_view *ids)
{
    te_embedding_args args = {.rows = te_cuda_view_of(rows),
                              .table = te_cuda_view_of(table),
                              .ids = te_cuda_view_of(ids),
                              .n = te_view_numel(ids),
                              .width = table->shape[1],
                              .ids_wide = ids->dtype == TE_I64};
    join_dims(&args.rows, &args.ids);
    return args;
}

static void set_types(te_cuda_call *call, te_dtype a, te_dtype b)
{
    call->kernel.dtype[0] = (uint8_t)a;
    call->kernel.dtype[1] = (uint8_t)b;
    call->kernel.wide = a == TE_F64 || b == TE_F64;
}

te_status te_cuda_plan_embedding(te_exec *exec, te_cuda_plan *plan, const te_view *out, const te_view *table,
                                 const te_view *ids)
{
    enum { EACH = 4 /* what a thread loads of a row at a time */ };
    te_cuda_plan_open(plan);
    te_status status = te_check_embedding(exec, "embedding", out, table, ids);
    te_embedding_args args = embedding_args(out, table, ids);
    if (status != TE_OK || args.n == 0 || args.width == 0) return status;
    bool same = out->dtype == table->dtype;
    int  vector = embedding_vector(out, table);
    plan->check = (te_cuda_check){TE_CUDA_CHECK_IDS, "embedding", table->shape[0], 0};
    while (args.lanes_bits < 8 && (int64_t)EACH * vector << args.lanes_bits < args.width) args.lanes_bits++;
    te_cuda_call *call = te_cuda_plan_add(plan, TE_CUDA_FILE_INDEX, "te_embedding",
                                          te_blocks_for(args.n << args.lanes_bits), THREADS, &args, sizeof args);
    set_types(call, same ? te_storage_dtype(out->dtype) : out->dtype,
              same ? te_storage_dtype(out->dtype) : table->dtype);
    call->kernel.vector = (uint16_t)vector;
    return TE_OK;
}

/* Adds rows of dy to those of dtable: their positions are sorted by id, a warp adds the rows of an id that has few and
 * blocks those of one that has many. */
static void plan_add_rows(te_cuda_plan *plan, const te_view *dtable, const te_view *dy, const te_view *ids)
{
    enum { TILE = TE_ADD_LONG * TE_ADD_SLOTS };
    te_embedding_args args = embedding_args(dy, dtable, ids);
    te_cuda_plan_add(plan, TE_CUDA_FILE_INDEX, "te_embedding_keys", te_blocks_for(args.n), THREADS, &args, sizeof args);
    args.sorted = te_cuda_plan_sort(plan, args.n, (uint64_t)dtable->shape[0]);
    int64_t tiles = (args.n + TILE - 1) / TILE, blocks[2] = {te_blocks_for(args.n * 32), tiles};
    int     vector = embedding_vector(dy, dtable);
    while (vector > 1 && args.width <= 16 * vector) vector /= 2; /* idle lanes hold registers, too */
    int columns[2] = {32 * vector, 32};
    for (int i = 0; i < (args.n < TE_ADD_LONG ? 1 : 2); i++) {
        te_cuda_call *call = te_cuda_plan_add(plan, TE_CUDA_FILE_ADD, i ? "te_add_long" : "te_add_rows",
                                              blocks[i] < TE_HAND_FULL ? blocks[i] : TE_HAND_FULL, THREADS, &args,
                                              sizeof args);
        int64_t column_blocks = (args.width + columns[i] - 1) / columns[i];
        call->launch.grid[1] = (uint32_t)(column_blocks < MOST_COLUMN_BLOCKS ? column_blocks : MOST_COLUMN_BLOCKS);
        set_types(call, dy->dtype, dtable->dtype);
        call->kernel.wide = dtable->dtype == TE_F64;
        call->kernel.vector = (uint16_t)vector;
    }
}

te_status te_cuda_plan_embedding_backward(te_exec *exec, te_cuda_plan *plan, const te_view *dtable, const te_view *dy,
                                          const te_view *ids)
{
    te_cuda_plan_open(plan);
    te_status status = te_check_embedding(exec, "embedding backward", dy, dtable, ids);
    int64_t   n = te_view_numel(ids);
    if (status != TE_OK || n == 0 || dtable->shape[1] == 0) return status;
    if (te_is_whole(dtable->dtype) || te_is_whole(dy->dtype))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "embedding backward: gradients must be floats");
    if ((status = check_sort(exec, "embedding backward", n)) != TE_OK) return status;
    plan->check = (te_cuda_check){TE_CUDA_CHECK_IDS, "embedding backward", dtable->shape[0], 0};
    plan_add_rows(plan, dtable, dy, ids);
    return TE_OK;
}

/* --- classes ----------------------------------------------------------------------------------------------------- */

te_status te_cuda_plan_check_classes(te_exec *exec, te_cuda_plan *plan, const te_view *targets, int64_t classes,
                                     double ignored)
{
    te_cuda_plan_open(plan);
    te_classes_args args = {.targets = te_cuda_view_of(targets),
                            .n = te_view_numel(targets),
                            .bytes = (int64_t)te_dtype_size(targets->dtype),
                            .classes = classes,
                            .ignored = ignored};
    if (!is_index(targets->dtype) && targets->dtype != TE_U8)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "classes must be int64, int32 or uint8, not %s",
                            te_dtype_name(targets->dtype));
    if (args.n == 0) return TE_OK;
    plan->check = (te_cuda_check){TE_CUDA_CHECK_CLASSES, "cross_entropy", classes, 0};
    /* the types of the embeddings that the build compiles */
    te_cuda_call *call = te_cuda_plan_add(plan, TE_CUDA_FILE_INDEX, "te_check_classes", te_blocks_for(args.n), THREADS,
                                          &args, sizeof args);
    set_types(call, TE_F32, TE_F32);
    return TE_OK;
}

/* --- gather, scatter and scatter_add ----------------------------------------------------------------------------- */

/* The check of an index. Where it is a vector, spread over other dimensions, places are those in the vector. */
static te_cuda_check check_of(const char *op, const te_view *whole, const te_view *index, int dim)
{
    te_cuda_check check = {TE_CUDA_CHECK_INDEX, op, whole->shape[dim], 1};
    for (int i = dim + 1; i < index->ndim; i++) check.count *= index->shape[i];
    for (int i = 0; i < index->ndim; i++)
        if (i != dim && index->shape[i] != 1 && index->stride[i] != 0) check.count = 1;
    return check;
}

static te_index_args index_args(const te_view *whole, const te_view *part, const te_view *index, int dim)
{
    return (te_index_args){.whole = te_cuda_view_of(whole),
                           .part = te_cuda_view_of(part),
                           .index = te_cuda_view_of(index),
                           .n = te_view_numel(index),
                           .dim = dim,
                           .index_wide = index->dtype == TE_I64};
}

/* A kernel that moves elements as they are, a thread for each line of `line` of them; 0: a gather's single ones, or
 * more where an index serves them. */
static te_status plan_moves(te_exec *exec, te_cuda_plan *plan, const char *op, const char *kernel, const te_view *whole,
                            const te_view *part, const te_view *index, int dim, int64_t line)
{
    te_cuda_plan_open(plan);
    te_status status = te_check_index(exec, op, whole, part, index, dim);
    if (status != TE_OK || te_view_numel(index) == 0) return status;
    te_index_args args = index_args(whole, part, index, dim);
    te_cuda_join_index(&args);
    te_dtype type = te_storage_dtype(whole->dtype);
    plan->check = check_of(op, whole, index, dim);
    if (line == 0 && te_cuda_plan_gather_lines(plan, &args, type)) return TE_OK;
    if (line > SHORT_LINE && te_cuda_plan_scatter_lines(plan, &args, type)) return TE_OK;
    if (line == 0) line = 1;
    set_types(te_cuda_plan_add(plan, TE_CUDA_FILE_INDEX, kernel, te_blocks_for(args.n / line), THREADS, &args,
                               sizeof args),
              type, type);
    return TE_OK;
}

te_status te_cuda_plan_gather(te_exec *exec, te_cuda_plan *plan, const te_view *out, const te_view *src,
                              const te_view *index, int dim)
{
    return plan_moves(exec, plan, "gather", "te_gather", src, out, index, dim, 0);
}

te_status te_cuda_plan_scatter(te_exec *exec, te_cuda_plan *plan, const te_view *dst, const te_view *src,
                               const te_view *index, int dim)
{
    return plan_moves(exec, plan, "scatter", "te_scatter", dst, src, index, dim, index->shape[dim]);
}

/* The operands of a scatter_add as rows added to rows; false: its indices differ within rows, or narrow sums, which are
 * rounded after every addition, are asked for. */
static bool as_added_rows(const te_index_args *args, te_dtype dtype, te_view *table, te_view *rows, te_view *ids)
{
    const te_cuda_view *whole = &args->whole, *part = &args->part, *index = &args->index;
    bool narrow = te_dtype_is_float(dtype) && dtype != TE_F32 && dtype != TE_F64;
    if (narrow || index->ndim != 2 || args->dim != 0 || index->stride[1] != 0) return false;
    int64_t n = index->shape[0], width = index->shape[1];
    *table = (te_view){.data = whole->data, .dtype = dtype, .ndim = 2, .shape = {whole->shape[0], width},
                       .stride = {whole->stride[0], whole->stride[1]}};
    *rows = (te_view){.data = part->data, .dtype = dtype, .ndim = 2, .shape = {n, width},
                      .stride = {part->stride[0], part->stride[1]}};
    *ids = (te_view){.data = index->data, .dtype = args->index_wide ? TE_I64 : TE_I32, .ndim = 1, .shape = {n},
                     .stride = {index->stride[0]}};
    return true;
}

te_status te_cuda_plan_scatter_add(te_exec *exec, te_cuda_plan *plan, const te_view *dst, const te_view *src,
                                   const te_view *index, int dim)
{
    enum { MANY_LINES = 256 };
    te_cuda_plan_open(plan);
    te_status status = te_check_index(exec, "scatter_add", dst, src, index, dim);
    if (status != TE_OK || te_view_numel(index) == 0) return status;
    if (dst->dtype == TE_BOOL) return te_exec_fail(exec, TE_ERROR_ARGUMENT, "scatter_add: bool values cannot be added");
    te_index_args args = index_args(dst, src, index, dim);
    int64_t       lines = args.n / index->shape[dim];
    te_view       table, rows, ids;
    te_cuda_call *call;
    plan->check = check_of("scatter_add", dst, index, dim);
    te_cuda_join_index(&args);
    if (index->shape[dim] > SHORT_LINE) {
        bool by_rows = as_added_rows(&args, dst->dtype, &table, &rows, &ids) && ids.shape[0] <= UINT32_MAX;
        if (by_rows) plan_add_rows(plan, &table, &rows, &ids);
        if (by_rows) plan->check.count = 1; /* ids are looked at once each */
        if (by_rows || te_cuda_plan_add_elements(plan, &args, dst->dtype)) return TE_OK;
    }
    if (lines >= MANY_LINES || index->shape[dim] <= SHORT_LINE) {
        call = te_cuda_plan_add(plan, TE_CUDA_FILE_INDEX, "te_scatter_lines", te_blocks_for(lines), THREADS, &args,
                                sizeof args);
    } else {
        if ((status = check_sort(exec, "scatter_add", args.n)) != TE_OK) return status;
        te_cuda_plan_add(plan, TE_CUDA_FILE_INDEX, "te_scatter_keys", te_blocks_for(args.n), THREADS, &args,
                         sizeof args);
        args.sorted = te_cuda_plan_sort(plan, args.n, (uint64_t)lines * (uint64_t)dst->shape[dim]);
        call = te_cuda_plan_add(plan, TE_CUDA_FILE_INDEX, "te_scatter_add", te_blocks_for(args.n), THREADS, &args,
                                sizeof args);
    }
    set_types(call, dst->dtype, dst->dtype);
    return TE_OK;
}
