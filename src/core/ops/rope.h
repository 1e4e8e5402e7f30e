/* rope.h - rotary position embedding, for the op itself and for attention on a packed projection. */
#ifndef TE_CORE_OPS_ROPE_H
#define TE_CORE_OPS_ROPE_H

#include "../op.h"

/* How features turn: pair k of a token at position p by the angle (p + offset) frequencies[k]. Nothing is owned. */
typedef struct te_rope {
    te_tensor *positions;   /* a number per row of x; dimensions aligned at x's last but one, of extent 1 where equal */
    te_tensor *frequencies; /* {pairs}, float32 or float64 */
    double     offset;
    bool       interleaved; /* pairs are neighbours, 2 k and 2 k + 1; otherwise k and k + pairs */
} te_rope;

/* Whether `frequencies` can turn rows of `dim` features. */
te_status te_rope_check(te_call *call, const te_tensor *frequencies, int64_t dim);
/* 0, 1, 2, …: the positions of one sequence. NULL on failure. */
te_tensor *te_rope_positions(te_context *ctx, te_device *device, int64_t n);
/* Positions of packed sequences, each from 0; offsets {sequences + 1} say where they begin. NULL on failure. */
te_tensor *te_rope_packed_positions(te_context *ctx, te_tensor *offsets, int64_t tokens);
/* y = x turned, or turned back: views of one shape {.., dim}, apart from each other. Features behind the pairs are
 * copied. */
te_status te_rope_turn(te_call *call, const te_rope *rope, const te_view *x, const te_view *y, bool back);

te_status te_rope_forward(te_call *call);
te_status te_rope_backward(te_call *call);

#endif
