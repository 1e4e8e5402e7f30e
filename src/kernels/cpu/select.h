/* select.h - rows of a view and keys by which their elements are compared, for select.c and topk.c.
 *
 * Keys of 64 bits order as the values do: any dtype, NaN above everything (below everything when the smallest is
 * wanted, so it is always the extreme), -0 equal to +0. Ties go to the lower index.
 */
#ifndef TE_KERNELS_SELECT_H
#define TE_KERNELS_SELECT_H

#include "copy.h"

enum { TE_PARALLEL_FROM = 1 << 14, TE_SELECT_POLL = 1 << 12 }; /* elements */

/* --- rows ------------------------------------------------------------------------------------------------------- */

/* The rows of a view along its last dimension. */
static inline int64_t te_rows_of(const te_view *v)
{
    int64_t n = 1;
    for (int i = 0; i + 1 < v->ndim; i++) n *= v->shape[i];
    return n;
}

static inline int64_t te_row_length(const te_view *v) { return v->shape[v->ndim - 1]; }

static inline int64_t te_row_stride(const te_view *v) { return v->stride[v->ndim - 1]; }

static inline void *te_row_at(const te_view *v, int64_t row)
{
    return te_element(v->data, v->dtype, te_offset_of(v, v->ndim - 1, row));
}

static inline int te_threads_for_rows(te_exec *exec, int64_t rows, int64_t elements)
{
    return rows < 2 || elements < TE_PARALLEL_FROM ? 1 : exec->threads;
}

/* --- keys ------------------------------------------------------------------------------------------------------- */

static inline uint64_t te_key_of_double(double x, bool largest)
{
    if (x != x) return UINT64_MAX;
    union {
        double   value;
        uint64_t bits;
    } u = {x + 0.0};
    uint64_t key = u.bits >> 63 ? ~u.bits : u.bits | (uint64_t)1 << 63;
    return largest ? key : ~key;
}

static inline uint64_t te_key_of_int(int64_t x, bool largest)
{
    uint64_t key = (uint64_t)x ^ (uint64_t)1 << 63;
    return largest ? key : ~key;
}

/* Keys of up to TE_COPY_BLOCK elements: the larger key is the wanted one. select.c */
void te_load_keys(const te_copy_blocks *blocks, uint64_t *keys, const te_view *v, const void *src, int64_t n,
                  bool largest);

#endif
