/* strips.c - see strips.h. */
#include "strips.h"

enum {
    FEWEST = 16,  /* rows side by side for which a strip is worth it */
    NARROW = 2,   /* the same where such rows are one piece of memory */
    SHORT = 32,   /* elements of a short row */
    PACKED = 64   /* and of one in a piece of memory with its neighbours */
};

static void take_out(te_view *v, int dim)
{
    for (int i = dim; i + 1 < v->ndim; i++) v->shape[i] = v->shape[i + 1], v->stride[i] = v->stride[i + 1];
    v->ndim--;
}

/* The dimension that a strip runs along, -1: none. Sums are as many as elements and count more. */
static int strip_dim(const te_view *src, const te_view *dst, bool sums)
{
    const te_view *lies = sums ? dst : src;
    int            found = -1;
    bool           is_short = te_row_length(src) <= SHORT;
    for (int d = 0; d + 1 < src->ndim; d++) {
        int64_t n = src->shape[d];
        bool    whole = sums && src->stride[d] == 1 && te_row_stride(src) == n && te_row_stride(dst) == n;
        if (n < (whole ? NARROW : FEWEST)) continue;
        if (lies->stride[d] == 1 && (is_short || te_row_stride(lies) != 1)) return d;
        if (is_short && (found < 0 || n > src->shape[found])) found = d;
    }
    return found;
}

bool te_find_strips(const te_view *src, const te_view *dst, bool sums, te_strips *out)
{
    int d = strip_dim(src, dst, sums);
    if (d < 0) return false;
    *out = (te_strips){.src = *src, .dst = *dst, .rows = src->shape[d], .src_step = src->stride[d],
                       .dst_step = dst->stride[d]};
    out->across = (out->rows + TE_STRIP_WIDTH - 1) / TE_STRIP_WIDTH;
    take_out(&out->src, d);
    take_out(&out->dst, d);
    return true;
}

bool te_is_packed(const te_view *v)
{
    int64_t n = te_row_length(v), step = 1;
    for (int d = v->ndim - 1; d >= 0; d--) {
        if (v->shape[d] > 1 && v->stride[d] != step) return false;
        step *= v->shape[d];
    }
    return n > 0 && n <= PACKED && v->ndim > 1;
}

int64_t te_strip_count(const te_strips *s)
{
    int64_t outer = 1;
    for (int i = 0; i + 1 < s->src.ndim; i++) outer *= s->src.shape[i];
    return outer * s->across;
}

int64_t te_strip_at(const te_strips *s, int64_t unit, const char **from, char **to)
{
    int64_t first = unit % s->across * TE_STRIP_WIDTH, outer = unit / s->across;
    int     dims = s->src.ndim - 1;
    *from = te_element(s->src.data, s->src.dtype, te_offset_of(&s->src, dims, outer) + first * s->src_step);
    *to = te_element(s->dst.data, s->dst.dtype, te_offset_of(&s->dst, dims, outer) + first * s->dst_step);
    return s->rows - first < TE_STRIP_WIDTH ? s->rows - first : TE_STRIP_WIDTH;
}
