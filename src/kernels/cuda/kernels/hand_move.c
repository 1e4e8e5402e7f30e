/* hand_move.c - plans of kernels that only move elements: many copies at once. */
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

te_status te_cuda_plan_copy_all(te_cuda_plan *plan, const te_view *dst, const te_view *src, int n, int *done)
{
    enum { LARGE = 32 << 20 /* bytes, beside which a launch is nothing */ };
    te_copy_args args = {.n = 0};
    int64_t      unit = UNIT, blocks = 0, size = (int64_t)te_dtype_size(dst->dtype);
    te_cuda_plan_open(plan);
    *done = 0;
    for (; *done < n && args.n < TE_COPY_PIECES; ++*done) {
        te_copy_piece *p = &args.piece[args.n];
        if (dst[*done].dtype != dst->dtype || !as_rows(&dst[*done], &src[*done], p)) break;
        if (te_view_numel(&dst[*done]) == 0) continue;
        if (unit_of(p) < unit) unit = unit_of(p);
        args.n++;
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
    if (te_view_numel(dst) * size >= LARGE) {
        *done = 0;
        return TE_OK;
    }
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
