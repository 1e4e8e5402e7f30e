/* check.h - what operands must be to each other, the same on every device, and how messages name them. A backend asks
 * before it plans or touches anything; where values must be looked at, such as ids, it does so itself. */
#ifndef TE_KERNELS_CHECK_H
#define TE_KERNELS_CHECK_H

#include "kernels.h"

enum { TE_ATTENTION_MAX_DIM = 512 }; /* columns of a head */

typedef struct te_view_words {
    char text[160];
} te_view_words;

/* The shape, "{2, 3}". */
te_view_words te_describe_view(const te_view *view);
bool te_view_has_shape(const te_view *view, int ndim, const int64_t *shape);

/* Shape, dtypes and data of what a program runs on. */
te_status te_check_run(te_exec *exec, const te_program *program, const te_run *run);

/* Shapes, dtypes and options of a matrix product; `bytes`: of quantized operands, whose dtypes others look at. */
te_status te_check_gemm(te_exec *exec, const te_gemm *g, bool bytes);

/* Shapes, dtypes, strides and options of attention in plain dtypes: `op` is what the message begins with. */
te_status te_check_attention(te_exec *exec, const char *op, const te_attention *a);

/* rows: of ids' shape with the table's width appended. */
te_status te_check_embedding(te_exec *exec, const char *op, const te_view *rows, const te_view *table,
                             const te_view *ids);
/* `whole` is indexed along dim; part has index's shape. */
te_status te_check_index(te_exec *exec, const char *op, const te_view *whole, const te_view *part,
                         const te_view *index, int dim);
/* Equal but for the last dimension, which both have. */
te_status te_check_rows(te_exec *exec, const char *op, const te_view *a, const te_view *b);
te_status te_check_arg_reduce(te_exec *exec, const te_view *index, const te_view *src);

enum { TE_MOST_EXPERTS = 1 << 20 }; /* ids of a routing map are below it */

/* See te_backend.route_map and what follows it. */
te_status te_check_route_map(te_exec *exec, const te_view *map, const te_view *counts, const te_view *routing);
te_status te_check_routes(te_exec *exec, const char *op, const te_routes *r, const te_view *rows,
                          const te_view *tokens);
te_status te_check_route_choose(te_exec *exec, const te_view *map, const te_view *scores, int64_t k, int64_t groups,
                                int64_t best_groups);

#endif
