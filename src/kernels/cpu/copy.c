/* copy.c - strided, converting copies.
 *
 * Dimensions are first put in the order of the destination's memory and merged where both sides allow. What is left is
 * one of three:
 *      one contiguous run, same dtype           memcpy, cut among threads
 *      the source is contiguous along another
 *      dimension than the destination           tiles of TILE x TILE, so that both sides move by cache lines
 *      anything else                            runs along the last dimension
 * A zero that is spread over a run of memory is no copy: threads clear their parts, which then also lie near them.
 * A destination larger than the caches is written past them, line by line from a block in L1: its lines need not be
 * read first, and nobody would find them later. Measured, that pays where half of what is read is written, and not
 * where nothing is read but one element. Tiles go past the caches where they are converted, thus go through such a
 * block anyway, or where squares can be turned in registers, whose rows are whole lines. Where they can, past the
 * caches or not, tiles are long, eight lines of a destination's row and more one behind the other, and follow the rows
 * of the source. The work is cut into units by shape alone; each element has one writer, so the number of threads
 * changes nothing.
 */
#include "copy.h"
#include "workers.h"

enum {
    TILE = 64,
    LONG = 512,                /* columns of a tile that is turned in registers */
    RUN = 32768,               /* elements of a long run that one unit moves */
    UNIT = 4096,               /* elements of short runs that one unit moves, about */
    PARALLEL_FROM = 1 << 15,   /* elements: below this a parallel region costs more than it gains */
    STREAM_FROM = 32 << 20,    /* bytes of a destination that no cache holds */
    LINE = 64
};

const te_copy_blocks *te_copy_blocks_of(te_exec *exec)
{
#ifdef TE_ISA_HAS_X86
    if (te_cpu(exec)->isa == TE_CPU_AVX512) return &te_copy_blocks_avx512;
    if (te_cpu(exec)->isa == TE_CPU_AVX2) return &te_copy_blocks_avx2;
#endif
    (void)exec;
    return &te_copy_blocks_portable;
}

static const te_transpose_lines *lines_of(te_exec *exec)
{
#ifdef TE_ISA_HAS_X86
    if (te_cpu(exec)->isa == TE_CPU_AVX512) return &te_transpose_lines_avx512;
    if (te_cpu(exec)->isa == TE_CPU_AVX2) return &te_transpose_lines_avx2;
#endif
    (void)exec;
    return &te_transpose_lines_portable;
}

te_value_class te_value_class_of(te_dtype dtype)
{
    switch (dtype) {
    case TE_F64: return TE_CLASS_F64;
    case TE_I64:
    case TE_I32:
    case TE_U8:
    case TE_BOOL: return TE_CLASS_I64;
    default: return TE_CLASS_F32;
    }
}

int te_dtype_log2_size(te_dtype dtype)
{
    static const uint8_t log2_size[TE_DTYPE_COUNT] = {
        [TE_F32] = 2, [TE_BF16] = 1, [TE_F16] = 1, [TE_F64] = 3, [TE_I64] = 3, [TE_I32] = 2};
    return log2_size[dtype];
}

void te_convert(const te_copy_blocks *blocks, void *dst, te_dtype dst_dtype, int64_t dst_stride, const void *src,
                te_dtype src_dtype, int64_t src_stride, int64_t n)
{
    if (dst_dtype == src_dtype) {
        blocks->move[te_dtype_log2_size(dst_dtype)](dst, dst_stride, src, src_stride, n);
        return;
    }
    static const te_dtype value_dtype[TE_CLASS_COUNT] = {TE_F32, TE_F64, TE_I64};
    te_value_class class = te_value_class_of(src_dtype);
    te_load_fn load = blocks->load[src_dtype];
    te_store_fn store = blocks->store[class][dst_dtype];
    if (src_dtype == value_dtype[class]) {
        store(dst, dst_stride, src, src_stride, n);
        return;
    }
    if (dst_dtype == value_dtype[class] && dst_stride == 1) {
        load(dst, src, src_stride, n);
        return;
    }
    union {
        float   f[TE_COPY_BLOCK];
        double  d[TE_COPY_BLOCK];
        int64_t i[TE_COPY_BLOCK];
    } values;
    for (int64_t i = 0; i < n; i += TE_COPY_BLOCK) {
        int64_t count = n - i < TE_COPY_BLOCK ? n - i : TE_COPY_BLOCK;
        load(&values, te_element(src, src_dtype, i * src_stride), src_stride, count);
        store(te_element(dst, dst_dtype, i * dst_stride), dst_stride, &values, 1, count);
    }
}

/* A copy after its dimensions are ordered and merged. The last dimension (and `across`, when tiled) are the inner ones.
 */
typedef struct copy_plan {
    const te_copy_blocks *blocks;
    te_view               dst, src;  /* equal shapes, dst strides falling */
    int                   across;    /* dimension along which src is contiguous, -1 when not tiled */
    int64_t               outer;     /* combinations of the dimensions that are not inner */
    int64_t               per_outer; /* units in each */
    int64_t               at_once;   /* or combinations in one unit, where runs or matrices are small */
    int64_t               tile_rows, tile_cols;
    te_transpose_fn       turn;      /* for tiles of whole squares, NULL: none */
    bool                  past;      /* past the caches, thus by whole lines */
    bool                  streams;   /* the destination is written past the caches where its lines are whole */
} copy_plan;

static void plan_add_dim(copy_plan *plan, int64_t extent, int64_t dst_stride, int64_t src_stride)
{
    int at = plan->dst.ndim++;
    plan->src.ndim++;
    while (at > 0 && plan->dst.stride[at - 1] < dst_stride) {
        plan->dst.shape[at] = plan->dst.shape[at - 1];
        plan->dst.stride[at] = plan->dst.stride[at - 1];
        plan->src.stride[at] = plan->src.stride[at - 1];
        at--;
    }
    plan->dst.shape[at] = extent;
    plan->dst.stride[at] = dst_stride;
    plan->src.stride[at] = src_stride;
}

static void plan_merge(copy_plan *plan)
{
    te_view *d = &plan->dst, *s = &plan->src;
    int kept = 0;
    for (int i = 1; i < d->ndim; i++) {
        int64_t n = d->shape[i];
        if (d->stride[kept] == n * d->stride[i] && s->stride[kept] == n * s->stride[i])
            d->shape[kept] *= n;
        else
            d->shape[++kept] = n;
        d->stride[kept] = d->stride[i];
        s->stride[kept] = s->stride[i];
    }
    d->ndim = s->ndim = kept + 1;
    memcpy(s->shape, d->shape, sizeof s->shape);
}

static void plan_tiles(copy_plan *plan, const te_transpose_lines *lines, int64_t bytes, int64_t rows, int64_t inner)
{
    int log2_size = te_dtype_log2_size(plan->dst.dtype);
    plan->past = bytes >= STREAM_FROM;
    plan->tile_rows = plan->tile_cols = TILE;
    if (plan->dst.dtype != plan->src.dtype) return;
    plan->turn = plan->past ? lines->past[log2_size] : lines->near[log2_size];
    if (plan->turn && (plan->past || inner << log2_size >= LINE)) {
        plan->tile_rows = LINE >> log2_size;
        plan->tile_cols = LONG;
    } else if (!plan->past) { /* as many elements in tiles that one side of the matrix makes narrow */
        plan->turn = NULL;
        if (rows < TILE) plan->tile_cols = rows * LONG < TILE * TILE ? LONG : TILE * TILE / rows;
        if (inner < TILE && plan->dst.stride[plan->across] != inner) plan->tile_rows = LINE >> log2_size;
        else if (inner < TILE) plan->tile_rows = inner * LONG < TILE * TILE ? LONG : TILE * TILE / inner;
    }
}

static void plan_make(copy_plan *plan, const te_view *dst, const te_view *src, const te_transpose_lines *lines)
{
    plan->dst.data = dst->data;
    plan->dst.dtype = dst->dtype;
    plan->src.data = src->data;
    plan->src.dtype = src->dtype;
    for (int i = 0; i < dst->ndim; i++)
        if (dst->shape[i] != 1) plan_add_dim(plan, dst->shape[i], dst->stride[i], src->stride[i]);
    if (plan->dst.ndim == 0) plan_add_dim(plan, 1, 1, 1);
    plan_merge(plan);

    int last = plan->dst.ndim - 1;
    plan->across = -1;
    bool filled = plan->src.stride[last] == 0 && dst->dtype == src->dtype;
    if (plan->dst.stride[last] == 1 && plan->src.stride[last] != 1 && !filled)
        for (int i = 0; i < last; i++)
            if (plan->src.stride[i] == 1 && plan->dst.shape[i] >= 4) plan->across = i;
    int64_t inner = plan->dst.shape[last], bytes = te_view_numel(dst) << te_dtype_log2_size(dst->dtype);
    if (plan->across < 0) {
        plan->per_outer = (inner + RUN - 1) / RUN;
    } else {
        int64_t rows = plan->dst.shape[plan->across];
        plan_tiles(plan, lines, bytes, rows, inner);
        plan->per_outer =
            ((rows + plan->tile_rows - 1) / plan->tile_rows) * ((inner + plan->tile_cols - 1) / plan->tile_cols);
        /* the tiled dimension goes next to the last one, so that the outer ones are a prefix */
        for (int i = plan->across; i + 1 < last; i++) {
            int64_t extent = plan->dst.shape[i], ds = plan->dst.stride[i], ss = plan->src.stride[i];
            plan->dst.shape[i] = plan->src.shape[i] = plan->dst.shape[i + 1];
            plan->dst.stride[i] = plan->dst.stride[i + 1];
            plan->src.stride[i] = plan->src.stride[i + 1];
            plan->dst.shape[i + 1] = plan->src.shape[i + 1] = extent;
            plan->dst.stride[i + 1] = ds;
            plan->src.stride[i + 1] = ss;
        }
        plan->across = last - 1;
    }
    plan->outer = 1;
    for (int i = 0; i < (plan->across < 0 ? last : plan->across); i++) plan->outer *= plan->dst.shape[i];
    int64_t area = plan->across < 0 ? inner : inner * plan->dst.shape[plan->across];
    plan->at_once = area < UNIT && plan->per_outer == 1 ? (UNIT + area - 1) / area : 1;
    int  wider = te_dtype_log2_size(dst->dtype) - te_dtype_log2_size(src->dtype);
    bool pays = plan->across < 0 ? wider >= -1 && plan->src.stride[last] != 0 : dst->dtype != src->dtype;
    plan->streams = pays && bytes >= STREAM_FROM && plan->dst.stride[last] == 1;
}

/* rows x cols of the destination, contiguous along cols; the source is contiguous along rows. */
static void tile_convert(const copy_plan *plan, char *dst, int64_t dst_stride, const char *src, int64_t src_stride,
                         int64_t rows, int64_t cols)
{
    te_dtype to = plan->dst.dtype, from = plan->src.dtype;
    if (to == from) {
        plan->blocks->transpose[te_dtype_log2_size(to)](dst, dst_stride, src, src_stride, rows, cols);
        return;
    }
    enum { HALF = TILE / 2 };
    _Alignas(64) char loaded[HALF * TILE * 8], turned[HALF * TILE * 8];
    te_value_class class = te_value_class_of(from);
    int log2_size = class == TE_CLASS_F32 ? 2 : 3;
    for (int64_t at = 0; at < cols; at += HALF) {
        int64_t n = cols - at < HALF ? cols - at : HALF;
        for (int64_t c = 0; c < n; c++)
            plan->blocks->load[from](loaded + (c * TILE << log2_size), te_element(src, from, (at + c) * src_stride), 1,
                                     rows);
        plan->blocks->transpose[log2_size](turned, HALF, loaded, TILE, rows, n);
        for (int64_t r = 0; r < rows; r++)
            plan->blocks->store[class][to](te_element(dst, to, r * dst_stride + at), 1,
                                           turned + (r * HALF << log2_size), 1, n);
    }
}

/* n runs of so many bytes; steps are in bytes, too. */
static void copy_bytes(char *dst, int64_t dst_step, const char *src, int64_t src_step, int64_t bytes, int64_t n)
{
    if ((bytes & (bytes - 1)) == 0 && bytes >= 4 && bytes <= 128) {
#define OF(BYTES)                                                                              \
    if (bytes == BYTES)                                                                        \
        for (int64_t i = 0; i < n; i++) memcpy(dst + i * dst_step, src + i * src_step, BYTES);
        OF(4) OF(8) OF(16) OF(32) OF(64) OF(128)
#undef OF
        return;
    }
    for (int64_t i = 0; i < n; i++) memcpy(dst + i * dst_step, src + i * src_step, (size_t)bytes);
}

/* The tile that begins at an element of a matrix, which begins at dst and src. */
static void copy_tile(const copy_plan *plan, char *dst, const char *src, int64_t row, int64_t col)
{
    const te_view *d = &plan->dst, *s = &plan->src;
    int last = d->ndim - 1;
    int64_t rows = d->shape[plan->across] - row, cols = d->shape[last] - col;
    int64_t dst_stride = d->stride[plan->across], src_stride = s->stride[last];
    if (rows > plan->tile_rows) rows = plan->tile_rows;
    if (cols > plan->tile_cols) cols = plan->tile_cols;
    int64_t size = (int64_t)1 << te_dtype_log2_size(d->dtype);
    dst = te_element(dst, d->dtype, row * dst_stride + col);
    src = te_element(src, s->dtype, row + col * src_stride);
    bool lines = ((uintptr_t)dst | (uintptr_t)(dst_stride * size) | (uintptr_t)(cols * size)) % LINE == 0;
    bool squares = plan->past ? lines : cols * size % LINE == 0;
    if (plan->turn && squares && rows == plan->tile_rows) {
        plan->turn(dst, dst_stride, src, src_stride, rows, cols);
        return;
    }
    if (!plan->streams || !lines) {
        tile_convert(plan, dst, dst_stride, src, src_stride, rows, cols);
        return;
    }
    _Alignas(LINE) char tile[TILE * TILE * 8];
    tile_convert(plan, tile, cols, src, src_stride, rows, cols);
    for (int64_t r = 0; r < rows; r++)
        plan->blocks->stream(te_element(dst, d->dtype, r * dst_stride), te_element(tile, d->dtype, r * cols),
                             (size_t)(cols * size / LINE));
}

static int outer_dims(const copy_plan *plan) { return plan->across < 0 ? plan->dst.ndim - 1 : plan->across; }

/* n short runs, or small matrices, along the last of the outer dimensions. */
static void copy_some_runs(const copy_plan *plan, int64_t to, int64_t from, int64_t n)
{
    const te_view *d = &plan->dst, *s = &plan->src;
    int         last = d->ndim - 1, inner = outer_dims(plan) - 1;
    char       *dst = te_element(d->data, d->dtype, to);
    const char *src = te_element(s->data, s->dtype, from);
    int64_t     dst_step = inner >= 0 ? d->stride[inner] : 0, src_step = inner >= 0 ? s->stride[inner] : 0;
    if (plan->across >= 0) {
        for (int64_t i = 0; i < n; i++)
            copy_tile(plan, te_element(dst, d->dtype, i * dst_step), te_element(src, s->dtype, i * src_step), 0, 0);
        return;
    }
    if (d->dtype == s->dtype && d->stride[last] == 1 && s->stride[last] == 1) {
        int log2_size = te_dtype_log2_size(d->dtype);
        int64_t size = (int64_t)1 << log2_size; /* steps may be negative */
        copy_bytes(dst, dst_step * size, src, src_step * size, d->shape[last] * size, n);
        return;
    }
    if (d->dtype == s->dtype && d->stride[last] == 1 && s->stride[last] == 0) {
        plan->blocks->fill(dst, dst_step, src, src_step, te_dtype_size(d->dtype), d->shape[last], n);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        te_convert(plan->blocks, te_element(dst, d->dtype, i * dst_step), d->dtype, d->stride[last],
                   te_element(src, s->dtype, i * src_step), s->dtype, s->stride[last], d->shape[last]);
}

/* Short runs or small matrices first … end, one per combination of the outer dimensions. */
static void copy_runs(const copy_plan *plan, int64_t first, int64_t end)
{
    const te_view *d = &plan->dst, *s = &plan->src;
    int n_outer = outer_dims(plan), inner = n_outer - 1;
    int64_t at[TE_MAX_DIMS] = {0}, rest = first;
    int64_t to = te_offset_of(d, n_outer, first), from = te_offset_of(s, n_outer, first);
    for (int i = inner; i >= 0; i--) {
        at[i] = rest % d->shape[i];
        rest /= d->shape[i];
    }
    for (int64_t run = first, n; run < end; run += n) {
        int64_t left = inner < 0 ? 1 : d->shape[inner] - at[inner];
        n = end - run < left ? end - run : left;
        copy_some_runs(plan, to, from, n);
        for (int i = inner; i >= 0; i--) {
            int64_t steps = i == inner ? n : 1;
            to += steps * d->stride[i];
            from += steps * s->stride[i];
            if ((at[i] += steps) < d->shape[i]) break;
            to -= at[i] * d->stride[i];
            from -= at[i] * s->stride[i];
            at[i] = 0;
        }
    }
}

/* n elements of a run, past the caches: returns how many, whole lines from where the destination begins one. */
static int64_t stream_run(const copy_plan *plan, char *dst, const char *src, int64_t src_stride, int64_t n)
{
    te_dtype to = plan->dst.dtype, from = plan->src.dtype;
    int64_t  size = (int64_t)1 << te_dtype_log2_size(to), whole = n * size / LINE * LINE / size;
    if ((uintptr_t)dst % LINE != 0) return 0;
    if (to == from && src_stride == 1) {
        plan->blocks->stream(dst, src, (size_t)(whole * size / LINE));
        return whole;
    }
    _Alignas(LINE) char values[8 * TE_COPY_BLOCK];
    for (int64_t i = 0; i < whole; i += TE_COPY_BLOCK) {
        int64_t count = whole - i < TE_COPY_BLOCK ? whole - i : TE_COPY_BLOCK;
        te_convert(plan->blocks, values, to, 1, te_element(src, from, i * src_stride), from, src_stride, count);
        plan->blocks->stream(te_element(dst, to, i), values, (size_t)(count * size / LINE));
    }
    return whole;
}

/* One part of a long run. */
static void copy_part(const copy_plan *plan, char *dst, const char *src, int64_t part)
{
    const te_view *d = &plan->dst, *s = &plan->src;
    int last = d->ndim - 1;
    int64_t at = part * RUN, n = d->shape[last] - at < RUN ? d->shape[last] - at : RUN;
    dst = te_element(dst, d->dtype, at * d->stride[last]);
    src = te_element(src, s->dtype, at * s->stride[last]);
    int64_t done = plan->streams ? stream_run(plan, dst, src, s->stride[last], n) : 0;
    te_convert(plan->blocks, te_element(dst, d->dtype, done * d->stride[last]), d->dtype, d->stride[last],
               te_element(src, s->dtype, done * s->stride[last]), s->dtype, s->stride[last], n - done);
}

static void copy_unit(const copy_plan *plan, int64_t unit)
{
    if (plan->at_once > 1) {
        int64_t first = unit * plan->at_once, end = first + plan->at_once;
        copy_runs(plan, first, end < plan->outer ? end : plan->outer);
        return;
    }
    const te_view *d = &plan->dst, *s = &plan->src;
    int n_outer = outer_dims(plan);
    int64_t outer = unit / plan->per_outer, part = unit % plan->per_outer;
    char *dst = te_element(d->data, d->dtype, te_offset_of(d, n_outer, outer));
    const char *src = te_element(s->data, s->dtype, te_offset_of(s, n_outer, outer));
    if (plan->across < 0) {
        copy_part(plan, dst, src, part);
        return;
    }
    int64_t down = (d->shape[plan->across] + plan->tile_rows - 1) / plan->tile_rows;
    int64_t along = (d->shape[d->ndim - 1] + plan->tile_cols - 1) / plan->tile_cols;
    int64_t row = plan->turn ? part % down : part / along, col = plan->turn ? part / down : part % along;
    copy_tile(plan, dst, src, row * plan->tile_rows, col * plan->tile_cols);
}

typedef struct copy_job {
    te_exec         *exec;
    const copy_plan *plan;
} copy_job;

static void copy_units(void *context, int64_t first, int64_t end, int thread)
{
    const copy_job *job = context;
    (void)thread;
    for (int64_t unit = first; unit < end && !te_cpu_stopping(job->exec); unit++) copy_unit(job->plan, unit);
    if (job->plan->streams || (job->plan->turn && job->plan->past)) job->plan->blocks->settle();
}

/* --- zeros -------------------------------------------------------------------------------------------------------- */

enum { CLEARED = 64 << 10, CLEARED_FROM = 1 << 20, CLEARED_AT_ONCE = 4 << 20 /* bytes */ };

typedef struct clear_job {
    te_exec *exec;
    char    *data;
    int64_t  bytes;
} clear_job;

/* Whether a copy spreads a zero over one run of memory that is worth sharing. */
static bool clears(const copy_plan *plan)
{
    static const char zero[8] = {0};
    const te_view    *d = &plan->dst, *s = &plan->src;
    size_t            size = (size_t)1 << te_dtype_log2_size(s->dtype);
    return d->ndim == 1 && d->stride[0] == 1 && s->stride[0] == 0 &&
           d->shape[0] << te_dtype_log2_size(d->dtype) >= CLEARED_FROM && memcmp(s->data, zero, size) == 0;
}

static void clear_units(void *context, int64_t first, int64_t end, int thread)
{
    const clear_job *job = context;
    int64_t          stop = end * CLEARED < job->bytes ? end * CLEARED : job->bytes;
    (void)thread;
    for (int64_t at = first * CLEARED, n; at < stop && !te_cpu_stopping(job->exec); at += n) {
        n = stop - at < CLEARED_AT_ONCE ? stop - at : CLEARED_AT_ONCE;
        memset(job->data + at, 0, (size_t)n);
    }
}

static void clear(te_exec *exec, const copy_plan *plan)
{
    clear_job job = {exec, plan->dst.data, plan->dst.shape[0] << te_dtype_log2_size(plan->dst.dtype)};
    int64_t   units = (job.bytes + CLEARED - 1) / CLEARED;
    te_cpu_loop(exec, exec->threads, units, te_cpu_even_grain(units, exec->threads), clear_units, &job);
}

/* Whether all elements of a copy are one and the same. */
static bool spreads_one(const te_view *src)
{
    for (int i = 0; i < src->ndim; i++)
        if (src->shape[i] != 1 && src->stride[i] != 0) return false;
    return true;
}

te_status te_cpu_copy(te_exec *exec, const te_view *dst, const te_view *src)
{
    bool same = dst->ndim == src->ndim;
    for (int i = 0; same && i < dst->ndim; i++) same = dst->shape[i] == src->shape[i];
    if (!same)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "copy: destination %s and source %s differ in shape",
                            te_describe_view(dst).text, te_describe_view(src).text);
    int64_t numel = te_view_numel(dst);
    if (numel == 0) return TE_OK;
    if (dst->dtype == src->dtype && numel < PARALLEL_FROM && te_view_dense(dst) && te_view_dense(src)) {
        memcpy(dst->data, src->data, (size_t)numel << te_dtype_log2_size(dst->dtype));
        return te_cpu_finish(exec, TE_OK);
    }
    copy_plan plan = {.blocks = te_copy_blocks_of(exec)};
    te_view   one = *src;
    int64_t   element;
    if (dst->dtype != src->dtype && spreads_one(src)) { /* converted once */
        te_convert(plan.blocks, &element, dst->dtype, 1, src->data, src->dtype, 1, 1);
        one.data = &element;
        one.dtype = dst->dtype;
    }
    plan_make(&plan, dst, &one, lines_of(exec));
    if (clears(&plan)) {
        clear(exec, &plan);
        return te_cpu_finish(exec, TE_OK);
    }
    int64_t units = plan.at_once > 1 ? (plan.outer + plan.at_once - 1) / plan.at_once : plan.outer * plan.per_outer;
    int threads = numel < PARALLEL_FROM || units < 2 ? 1 : exec->threads;
    copy_job job = {exec, &plan};
    te_cpu_loop(exec, threads, units, te_cpu_even_grain(units, threads), copy_units, &job);
    return te_cpu_finish(exec, TE_OK);
}
