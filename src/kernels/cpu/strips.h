/* strips.h - rows that do not depend on each other, several at a time, for select.c and cumsum.c.
 *
 * Rows whose elements lie apart while those of neighbouring rows lie side by side are worked on in *strips*,
 * TE_STRIP_WIDTH rows at a time, element by element of them all: memory is read as it lies. So are short rows, wherever
 * they lie: what a row costs by itself is shared. Short rows behind each other are *packed*.
 */
#ifndef TE_KERNELS_STRIPS_H
#define TE_KERNELS_STRIPS_H

#include "select.h"

enum { TE_STRIP_WIDTH = TE_COPY_BLOCK };

/* Rows in strips: those along one dimension, which is taken out of the views. */
typedef struct te_strips {
    te_view src, dst;     /* dst: of results, whose last dimension may be another one, or may be missing */
    int64_t rows, across; /* along that dimension; strips for them */
    int64_t src_step, dst_step;
} te_strips;

/* Work on rows of `src`. */
typedef struct te_rows_job {
    te_exec              *exec;
    const te_copy_blocks *blocks;
    const te_view        *src, *dst, *index;
    bool                  flag; /* the largest are wanted; from the end */
    const te_strips      *strips;
} te_rows_job;

/* Whether rows are best worked on in strips; `sums`: results are as many as elements. */
bool te_find_strips(const te_view *src, const te_view *dst, bool sums, te_strips *out);
/* Whether rows are not long and follow each other in memory. */
bool te_is_packed(const te_view *v);

int64_t te_strip_count(const te_strips *s);
/* Strip `unit`: how many rows are in it, and where their first elements and results are. */
int64_t te_strip_at(const te_strips *s, int64_t unit, const char **from, char **to);

#endif
