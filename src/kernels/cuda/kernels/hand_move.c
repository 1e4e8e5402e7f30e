/* hand_move.c - plans of kernels that only move elements: many copies at once, rows and columns by index, what is
 * turned round, triangles. */
#include "hand_internal.h"

enum { UNIT = 16 /* bytes that an access moves at most */ };

/* --- many copies ------------------------------------------------------------------------------------------------- */

/* The pair as rows, counted in bytes but for `units`, which are the rows; false: it has more dimensions. */
static bool as_rows(const te_view *dst, const te_view *src, te_copy_piece *p)
{
    int64_t size = (int64_t)te_dtype_size(dst->dtype), rows = 1, to = 0, from = 0, run = 1;
    int     d = dst->ndim - 1;
    if (dst->dtype != src->dtype) return false;
    for (; d >= 0; d--) { /* what lies side by side on both sides */
        if (dst->shape[d] == 1) continue;
        if (dst->stride[d] != run || src->stride[d] != run) break;
        run *= dst->shape[d];
    }
    for (; d >= 0; d--) {
        if (dst->shape[d] == 1) continue;
        if (rows > 1 && (dst->stride[d] != rows * to || src->stride[d] != rows * from)) return false;
        if (rows == 1) to = dst->stride[d], from = src->stride[d];
        rows *= dst->shape[d];
    }
    *p = (te_copy_piece){.dst = dst->data, .src = src->data, .run = run * size, .units = rows,
                         .dst_pitch = to * size, .src_pitch = from * size};
    return from >= 0;
}

/* Bytes of a unit that all of it is a multiple of. */
static int64_t unit_of(const te_copy_piece *p)
{
    uint64_t all = (uint64_t)(uintptr_t)p->dst | (uint64_t)(uintptr_t)p->src | (uint64_t)p->run |
                   (uint64_t)p->dst_pitch | (uint64_t)p->src_pitch | UNIT;
    return (int64_t)(all & (~all + 1));
}

/* The unsigned type of a unit's elements, and how many of them it has. */
static void set_unit(te_cuda_call *call, int64_t element, int64_t bytes)
{
    te_dtype dtype = element == 1 ? TE_U8 : element == 2 ? TE_BF16 : element == 4 ? TE_I32 : TE_I64;
    call->kernel.dtype[0] = call->kernel.dtype[1] = (uint8_t)dtype;
    call->kernel.vector = (uint16_t)(bytes / element);
}

/* Whether the pieces alternate in a dense result that begins with the first, in rows shorter than a sector. */
static bool are_mixed(const te_copy_args *a, int64_t size)
{
    enum { SECTOR = 32, FROM = 1 << 20 /* less stays in the cache until all of it is written */ };
    const te_copy_piece *p = a->piece;
    bool                 mixed = a->n > 1 && p->run < SECTOR && p->run * p->units * a->n >= FROM &&
                 p->dst_pitch == a->n * p->run && (uintptr_t)p->dst % UNIT == 0;
    for (int i = 0; i < a->n && mixed; i++)
        mixed = p[i].run == p->run && p[i].units == p->units && p[i].dst_pitch == p->dst_pitch &&
                (char *)p[i].dst == (char *)p->dst + i * p->run && p[i].src_pitch % size == 0;
    return mixed;
}

/* How many of the pieces are copied together, and by which units: no large one, which a copy of its own moves best, and
 * where there is much to copy, those whose units are the same. */
static int together(const te_copy_args *args, int64_t *unit)
{
    enum { LARGE = 32 << 20 /* bytes, beside which a launch is nothing */, MUCH = 1 << 20 };
    int64_t most = 0;
    for (int i = 0; i < args->n; i++) {
        const te_copy_piece *p = &args->piece[i];
        int64_t              bytes = p->run * p->units, own = unit_of(p);
        if (bytes > most) most = bytes;
        if (bytes >= LARGE || (i > 0 && own != *unit && most >= MUCH)) return i;
        if (i == 0 || own < *unit) *unit = own;
    }
    return args->n;
}

te_status te_cuda_plan_copy_all(te_cuda_plan *plan, const te_view *dst, const te_view *src, int n, int *done)
{
    te_copy_args args = {.n = 0};
    int          place[TE_COPY_PIECES]; /* of a piece among the copies */
    int64_t      unit = UNIT, blocks = 0, size = (int64_t)te_dtype_size(dst->dtype);
    te_cuda_plan_open(plan);
    *done = 0;
    for (; *done < n && args.n < TE_COPY_PIECES; ++*done) {
        te_copy_piece *p = &args.piece[args.n];
        if (dst[*done].dtype != dst->dtype || !as_rows(&dst[*done], &src[*done], p)) break;
        if (te_view_numel(&dst[*done]) == 0) continue;
        place[args.n++] = *done;
    }
    if (args.n == 0) return TE_OK;
    if (are_mixed(&args, size)) {
        for (int i = 0; i < args.n; i++) {
            te_copy_piece *p = &args.piece[i];
            p->run /= size, p->src_pitch /= size, p->dst_pitch /= size;
            p->units *= p->run;
        }
        blocks = te_blocks_for(args.n * args.piece[0].units * size / UNIT);
        set_unit(te_cuda_plan_add(plan, TE_CUDA_FILE_MOVE, "te_copy_mixed", blocks, TE_COPY_THREADS, &args,
                                  sizeof args),
                 size, UNIT);
        return TE_OK;
    }
    int first = together(&args, &unit);
    if (first < args.n) *done = place[first];
    args.n = first;
    if (first == 0) return TE_OK;
    for (int i = 0; i < args.n; i++) {
        enum { TILE = TE_COPY_THREADS * TE_COPY_EACH };
        te_copy_piece *p = &args.piece[i];
        p->run /= unit, p->src_pitch /= unit, p->dst_pitch /= unit;
        p->units *= p->run;
        p->first = blocks;
        blocks += (p->units + TILE - 1) / TILE;
    }
    set_unit(te_cuda_plan_add(plan, TE_CUDA_FILE_MOVE, "te_copy_pieces", blocks, TE_COPY_THREADS, &args, sizeof args),
             unit < 4 ? unit : 4, unit);
    return TE_OK;
}

/* --- gather of lines --------------------------------------------------------------------------------------------- */

void te_cuda_join_index(te_index_args *args)
{
    te_cuda_view *whole = &args->whole, *part = &args->part, *index = &args->index;
    int64_t       n = 0, dim = -1, bound = whole->shape[args->dim];
    for (int64_t i = 0; i < index->ndim; i++) {
        int64_t extent = index->shape[i];
        bool    is_dim = i == args->dim;
        if (extent == 1 && !is_dim) continue;
        if (n > 0 && !is_dim && dim != n - 1 && index->stride[n - 1] == extent * index->stride[i] &&
            part->stride[n - 1] == extent * part->stride[i] && whole->stride[n - 1] == extent * whole->stride[i])
            index->shape[n - 1] *= extent;
        else
            index->shape[n++] = extent;
        if (is_dim) dim = n - 1;
        part->shape[n - 1] = index->shape[n - 1];
        index->stride[n - 1] = index->stride[i];
        part->stride[n - 1] = part->stride[i];
        whole->stride[n - 1] = whole->stride[i];
    }
    whole->shape[dim] = bound;
    args->dim = dim;
    whole->ndim = part->ndim = index->ndim = n;
}

/* Elements of a 16-byte unit that all of these are multiples of. */
static int vector_of(te_dtype dtype, const void *a, const void *b, int64_t steps)
{
    int64_t size = (int64_t)te_dtype_size(dtype);
    int     vector = UNIT / (int)size;
    while (vector > 1 && (steps % vector != 0 || (uintptr_t)a % (uintptr_t)(vector * size) ||
                          (uintptr_t)b % (uintptr_t)(vector * size)))
        vector /= 2;
    return vector;
}

static int64_t steps_of(const te_lines_args *args)
{
    int64_t steps = 0;
    for (int64_t i = 0; i < args->index.ndim; i++) {
        if (args->index.shape[i] > 1 || i == args->dim) steps |= args->whole.stride[i];
        if (args->index.shape[i] > 1) steps |= args->part.stride[i];
    }
    return steps;
}

static void plan_rows(te_cuda_plan *plan, const char *kernel, te_lines_args *args, te_dtype dtype)
{
    enum { EACH = 4 /* units that a thread loads of a row at a time */ };
    int vector = vector_of(dtype, args->whole.data, args->part.data, steps_of(args) | args->run);
    while (args->lanes_bits < 8 && (int64_t)EACH * vector << args->lanes_bits < args->run) args->lanes_bits++;
    int64_t lanes = args->n <= INT64_MAX >> 8 ? args->n << args->lanes_bits : INT64_MAX - TE_HAND_THREADS;
    te_cuda_call *call = te_cuda_plan_add(plan, TE_CUDA_FILE_MOVE, kernel, te_blocks_for(lanes), TE_HAND_THREADS,
                                          args, sizeof *args);
    call->kernel.dtype[0] = call->kernel.dtype[1] = (uint8_t)dtype;
    call->kernel.vector = (uint16_t)vector;
}

/* Whether a row of `whole` is best read as one: most of its sectors are wanted, and it has room. */
static bool reads_rows(const te_index_args *args, te_dtype dtype)
{
    enum { SECTOR = 32, MOST_ROW_BLOCKS = 65535 };
    int64_t dim = args->dim, size = (int64_t)te_dtype_size(dtype), n = args->index.shape[dim];
    int64_t bytes = args->whole.shape[dim] * size;
    bool    alike = dim == args->index.ndim - 1 && args->whole.stride[dim] == 1 && args->part.stride[dim] == 1;
    for (int64_t i = 0; i < dim; i++) alike &= args->index.stride[i] == 0;
    return alike && dim > 0 && bytes <= TE_COLUMN_BYTES && n * SECTOR >= bytes && n >= TE_COLUMN_THREADS / 4 &&
           n / (TE_COLUMN_IDS * TE_COLUMN_THREADS) < MOST_ROW_BLOCKS;
}

static void plan_columns(te_cuda_plan *plan, te_lines_args *args, te_dtype dtype)
{
    enum { MOST = 1024, TILE = TE_COLUMN_IDS * TE_COLUMN_THREADS };
    te_lines_args others = *args; /* rows begin at multiples of a unit; its end need not be one */
    others.index.ndim--;
    others.dim = -1;
    int vector = vector_of(dtype, args->whole.data, args->part.data, steps_of(&others));
    te_cuda_call *call = te_cuda_plan_add(plan, TE_CUDA_FILE_MOVE, "te_gather_columns", args->n < MOST ? args->n : MOST,
                                          TE_COLUMN_THREADS, args, sizeof *args);
    call->launch.grid[1] = (uint32_t)((args->run + TILE - 1) / TILE);
    int64_t row = args->whole.shape[args->dim] * (int64_t)te_dtype_size(dtype);
    call->launch.shared = (uint32_t)((row + UNIT - 1) / UNIT * UNIT);
    call->kernel.dtype[0] = call->kernel.dtype[1] = (uint8_t)dtype;
    call->kernel.vector = (uint16_t)vector;
}

bool te_cuda_plan_gather_lines(te_cuda_plan *plan, const te_index_args *args, te_dtype dtype)
{
    int64_t       last = args->index.ndim - 1;
    te_lines_args lines = {.whole = args->whole, .part = args->part, .index = args->index, .dim = args->dim,
                           .index_wide = args->index_wide, .run = args->index.shape[last]};
    lines.n = args->n / lines.run;
    if (reads_rows(args, dtype)) {
        plan_columns(plan, &lines, dtype);
        return true;
    }
    if (last == args->dim || args->index.stride[last] != 0 || args->whole.stride[last] != 1 ||
        args->part.stride[last] != 1)
        return false;
    lines.whole.ndim = lines.part.ndim = --lines.index.ndim;
    plan_rows(plan, "te_gather_rows", &lines, dtype);
    return true;
}

bool te_cuda_plan_scatter_lines(te_cuda_plan *plan, const te_index_args *args, te_dtype dtype)
{
    te_lines_args lines = {.whole = args->whole, .part = args->part, .index = args->index, .dim = args->dim,
                           .index_wide = args->index_wide, .run = 1, .inner = 1};
    enum { TIMES = 64 };
    int64_t last = args->index.ndim - 1, bound = args->whole.shape[args->dim];
    for (int64_t i = 0; i <= last; i++)
        if (i != args->dim && args->index.stride[i] != 0) return false;
    if (last == args->dim + 1 && args->whole.stride[last] == 1 && args->part.stride[last] == 1) {
        lines.run = args->index.shape[last];
        lines.whole.ndim = lines.part.ndim = lines.index.ndim = last;
    } else {
        for (int64_t i = args->dim + 1; i <= last; i++) lines.inner *= args->index.shape[i];
    }
    lines.n = args->n / lines.run;
    if (bound > TIMES * args->index.shape[args->dim]) return false; /* claims would take more memory than they save */
    plan->scratch_bytes = (size_t)bound * sizeof(int64_t);
    const char *kernels[] = {"te_scatter_clear", "te_scatter_claim"};
    int64_t     work[] = {bound, args->index.shape[args->dim]};
    for (int i = 0; i < 2; i++) {
        te_cuda_call *call = te_cuda_plan_add(plan, TE_CUDA_FILE_MOVE, kernels[i], te_blocks_for(work[i]),
                                              TE_HAND_THREADS, &lines, sizeof lines);
        call->kernel.dtype[0] = call->kernel.dtype[1] = (uint8_t)TE_I32; /* which the build compiles */
        call->kernel.vector = 4;
    }
    plan_rows(plan, "te_scatter_rows", &lines, dtype);
    return true;
}

/* --- turned round, triangles ------------------------------------------------------------------------------------- */

/* Leaves out dimensions of one position and joins those behind one another in both; the last `apart` stay. */
static void join_moved(te_move_args *args, int64_t apart)
{
    te_cuda_view *dst = &args->dst, *src = &args->src;
    int64_t       n = 0, joined = dst->ndim - apart;
    for (int64_t i = 0; i < dst->ndim; i++) {
        int64_t extent = dst->shape[i];
        if (extent == 1 && i < joined) continue;
        if (n > 0 && i < joined && dst->stride[n - 1] == extent * dst->stride[i] &&
            src->stride[n - 1] == extent * src->stride[i])
            dst->shape[n - 1] *= extent;
        else
            dst->shape[n++] = extent;
        dst->stride[n - 1] = dst->stride[i];
        src->stride[n - 1] = src->stride[i];
    }
    if (n == 0) dst->shape[n++] = dst->stride[0] = src->stride[0] = 1;
    dst->ndim = src->ndim = n;
}

/* Turns the last dimension into units, and adds the launch. */
static void plan_moved(te_cuda_plan *plan, const char *kernel, te_move_args *args, te_dtype dtype)
{
    enum { TILE = TE_COPY_THREADS * TE_COPY_EACH };
    te_cuda_view *dst = &args->dst, *src = &args->src;
    int64_t       last = dst->ndim - 1, steps = dst->shape[last], step = src->stride[last];
    int64_t       size = (int64_t)te_dtype_size(dtype);
    int           vector = 1;
    for (int64_t i = 0; i < last; i++) steps |= dst->stride[i] | src->stride[i];
    if (dst->stride[last] == 1 && (step == 1 || step == -1)) {
        const char *begin = (const char *)src->data + (step < 0 ? size : 0); /* where units end as well */
        vector = vector_of(dtype, dst->data, begin, steps);
    }
    args->back = vector > 1 && step < 0;
    if (args->back) src->data = (char *)src->data - (vector - 1) * size;
    dst->shape[last] /= vector;
    dst->stride[last] *= vector;
    src->stride[last] *= vector;
    args->n /= vector;
    te_cuda_call *call = te_cuda_plan_add(plan, TE_CUDA_FILE_MOVE, kernel, (args->n + TILE - 1) / TILE,
                                          TE_COPY_THREADS, args, sizeof *args);
    call->kernel.dtype[0] = call->kernel.dtype[1] = (uint8_t)dtype;
    call->kernel.vector = (uint16_t)vector;
}

static te_status open_moved(te_exec *exec, te_cuda_plan *plan, te_move_args *args, const te_view *dst,
                            const te_view *src)
{
    te_cuda_plan_open(plan);
    *args = (te_move_args){.dst = te_cuda_view_of(dst), .src = te_cuda_view_of(src), .n = te_view_numel(dst)};
    if (dst->dtype == src->dtype && te_view_has_shape(src, dst->ndim, dst->shape)) return TE_OK;
    return te_exec_fail(exec, TE_ERROR_ARGUMENT, "copy: the shapes or dtypes differ");
}

te_status te_cuda_plan_turn(te_exec *exec, te_cuda_plan *plan, const te_view *dst, const te_view *src)
{
    te_move_args args;
    te_status    status = open_moved(exec, plan, &args, dst, src);
    if (status != TE_OK || args.n == 0) return status;
    join_moved(&args, 0);
    plan_moved(plan, "te_turn", &args, te_storage_dtype(dst->dtype));
    return TE_OK;
}

te_status te_cuda_plan_triangle(te_exec *exec, te_cuda_plan *plan, const te_view *dst, const te_view *src,
                                int64_t diagonal, bool upper)
{
    te_move_args args;
    te_status    status = open_moved(exec, plan, &args, dst, src);
    if (status != TE_OK || args.n == 0) return status;
    args.diagonal = diagonal;
    args.upper = upper;
    join_moved(&args, 2);
    plan_moved(plan, "te_triangle", &args, te_storage_dtype(dst->dtype));
    return TE_OK;
}
