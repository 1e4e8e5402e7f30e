/* ops.h - the groups of operations. A group is a table in its own file; a new group is one line in groups.c. */
#ifndef TE_CORE_OPS_H
#define TE_CORE_OPS_H

#include "../op.h"

typedef struct te_op_group {
    const char      *name; /* as help and the tables of the documentation call it */
    const te_op_def *ops;  /* ends with an empty row */
} te_op_group;

extern const te_op_group te_op_groups[]; /* ends with a NULL name */

extern const te_op_def te_ops_pointwise[], te_ops_activation[], te_ops_norm[], te_ops_loss[], te_ops_reduce[],
    te_ops_view[], te_ops_index[], te_ops_join[], te_ops_along[], te_ops_triangle[], te_ops_draw[], te_ops_scatter[],
    te_ops_order[], te_ops_arrange[], te_ops_linear[], te_ops_attention[], te_ops_random[], te_ops_convert[],
    te_ops_quantized[], te_ops_moe[], te_ops_moe_router[];

/* Compiled programs of program ops, kept in the context. */
void te_variants_close(te_context *ctx);
void te_variants_drop(te_context *ctx, const te_op *op); /* those of one op */

/* A program that the engine uses by itself, kept in the context from its first use; identified by its address. */
typedef struct te_utility {
    const char    *name, *inputs, *params, *outputs, *formula;
    te_output_kind kind; /* of the first output, where not one value per element */
} te_utility;

te_program *te_utility_program(te_context *ctx, const te_utility *utility);

/* In formulas over x: l = log(1 + exp(-|x|)), to the last digits where exp(-|x|) is small too. Its derivative at 0 is
 * the one that max(x, 0) + l needs. */
#define TE_LOG1P_EXP "e = exp(where(x > 0, -x, x)); u = 1 + e; l = log(u) + (e - (u - 1)) / u; "

/* Shorthand for calling ops from ops. */
#define TE_A_TENSOR(t)    ((te_arg){.kind = TE_ARG_TENSOR, .as.tensor = (t)})
#define TE_A_NUMBER(v)    ((te_arg){.kind = TE_ARG_NUMBER, .as.number = (v)})
#define TE_A_INTS(p, len) ((te_arg){.kind = TE_ARG_INTS, .n = (len), .as.ints = (p)})
#define TE_A_ABSENT       ((te_arg){.kind = TE_ARG_ABSENT})

/* One result of op `name`, recorded as any call; NULL on failure. */
te_tensor *te_op_call(te_context *ctx, const char *name, int n_args, const te_arg *args);

/* The position of dimension `dim`, from 0, of x; negative, and the call has failed, where x has none such. */
int te_call_dim(te_call *call, int64_t dim, const te_tensor *x);

/* x with `dim` exchanged with the last one, outside the graph, as kernels of one dimension want it. NULL on failure. */
te_tensor *te_tensor_dim_last(te_tensor *x, int dim);

/* The elements of x at positions along dim, recorded; NULL without an index, or on failure. */
te_tensor *te_op_gather(te_context *ctx, te_tensor *x, int dim, te_tensor *index);

/* Puts what the host was to do, and could not, as while a graph is recorded, before the reason. */
void te_call_fail_host(te_call *call, const char *what);

/* Common dtype of two operands: bool < uint8 < int32 < int64 < (bfloat16, float16) < float32 < float64; bfloat16 with
 * float16 gives float32. */
te_dtype te_promote(te_dtype a, te_dtype b);

/* Whether the shapes of a linear layer's x, weight and bias fit. */
te_status te_linear_check(te_call *call);

/* t in another shape of as many elements, outside the graph: a view, or a copy where it does not lie so. NULL on
 * failure. */
te_tensor *te_tensor_seen(te_tensor *t, int ndim, const int64_t *shape);

/* Rows of a table by id into y, and their gradient added to that of the table; `call` names the operation in
 * messages. */
te_status te_embedding_rows(te_call *call, te_tensor *y, te_tensor *table, te_tensor *ids);
te_status te_embedding_add_rows(te_call *call, te_tensor *dtable, te_tensor *dy, te_tensor *ids);

/* The backward of what picked elements along dimension memo[0] by a saved index. */
te_status te_gather_backward(te_call *call);

/* dst = before, with dst[... index ...] += src along dim, for src in index's shape that shares no memory with dst. Sums
 * of fewer than 32 bits are taken in float32 or int64, so that they are rounded, or limited to what dst holds, once;
 * of others `before` is dst. */
bool      te_sums_are_apart(te_dtype dtype);
te_status te_call_scatter_add(te_call *call, te_tensor *dst, te_tensor *before, te_tensor *src, te_tensor *index,
                              int dim);

/* dst = (or +=, when accumulate) scale * src summed over the dimensions in which dst has extent 1 or lacks (leading
 * ones). */
te_status te_sum_to(te_tensor *dst, te_tensor *src, double scale, bool accumulate);
/* dst += src, equal shapes. */
te_status te_add_to(te_tensor *dst, te_tensor *src);

#endif
