/* attention_dnn.h - attention as a graph of cuDNN. */
#ifndef TE_KERNELS_CUDA_ATTENTION_DNN_H
#define TE_KERNELS_CUDA_ATTENTION_DNN_H

#include "dnn.h"

/* The numbers under which a plan knows its tensors. */
typedef enum te_dnn_uid {
    TE_DNN_Q = 1,
    TE_DNN_K,
    TE_DNN_V,
    TE_DNN_OUT,
    TE_DNN_DOUT,
    TE_DNN_DQ,
    TE_DNN_DK,
    TE_DNN_DV,
    TE_DNN_LSE,
    TE_DNN_SUMS,    /* backward: rows of dout * out, f32 [batch, heads, seq_q] dense; memory to work in */
    TE_DNN_DQ_SUMS, /* likewise, where they are added in any order: dq in f32, dense, which 9.6 and later clear */
    TE_DNN_SCALE,   /* one f32 each, on the host: the scale, what masked scores become, 1, the window */
    TE_DNN_MASKED,
    TE_DNN_ONE,
    TE_DNN_WINDOW,
    TE_DNN_SCALE_P, /* quantized: one f32 each, on the device: of probabilities and its inverse, of v, of the result */
    TE_DNN_DESCALE_P,
    TE_DNN_DESCALE_V,
    TE_DNN_SCALE_OUT,
    TE_DNN_DESCALE_Q, /* the factors of q and k; the result has that of v */
    TE_DNN_DESCALE_K,
    TE_DNN_AMAX_P,    /* likewise, written and read by nobody: amaxes of probabilities and of the result */
    TE_DNN_AMAX_OUT,
    TE_DNN_KEYS, /* alignment at the last position: one i32 each, on the host: how many keys and queries there are */
    TE_DNN_QUERIES,
    TE_DNN_BIAS,
    TE_DNN_SINKS,   /* f32 [heads] */
    TE_DNN_LENGTHS, /* packed: i32 [batch], and offsets in elements, i32 [batch + 1], of every tensor that is packed */
    TE_DNN_OFFSETS  /* of tensor X: TE_DNN_OFFSETS + X; lse and its sums share theirs */
} te_dnn_uid;

/* What a plan depends on: compared as bytes, so it is filled from zeros. */
typedef struct te_dnn_attention {
    int64_t         batch, heads, kv_heads, seq_q, seq_kv, dim, dim_v;
    int64_t         stride[TE_DNN_LSE + 1][3]; /* by uid: of batch, head and position */
    int64_t         window;                    /* positions before its own that a row sees; -1: all */
    int64_t         shift;                     /* row i stands at the position i + shift */
    int64_t         bias_dim[3];    /* of batch, head and query, 1 where all have the same; 0: there is no bias */
    int64_t         bias_stride[3]; /* keys lie behind one another */
    cudnnDataType_t type; /* fp8: of quantized operands */
    cudnnDataType_t bias_type;
    int32_t         causal, backward, packed, lse; /* lse: forward writes it */
    int32_t         sinks;                         /* forward: with a score more in every row */
    int32_t         any_order; /* backward, not packed: bits need not repeat */
} te_dnn_attention;

/* What there is to know of an attention, or with grad of its gradient. */
void te_dnn_attention_key(te_dnn_attention *key, const te_attention *a, const te_attention_grad *grad, bool any_order);
/* Why cuDNN is not asked; NULL: it is. grad: NULL in forward. */
const char *te_dnn_attention_decline(te_exec *exec, const te_attention *a, const te_attention_grad *grad);
/* What that version of the library gets wrong of this on a device of that compute capability, or does not do, as
 * NVIDIA's own front end has it; NULL: nothing known. */
const char *te_dnn_attention_fault(size_t version, int capability, const te_dnn_attention *a);
/* The engine that repeats its bits where the library does not say so of those that it offers, likewise from there;
 * false: its choices will do. */
bool te_dnn_attention_engine(size_t version, int capability, const te_dnn_attention *a, te_dnn_engine *engine);
/* The operand that has this number, TE_DNN_Q to TE_DNN_DV. */
const te_view *te_dnn_attention_view(const te_attention *a, const te_attention_grad *grad, int uid);

/* Adds the operations to a graph. */
void te_dnn_attention_graph(te_dnn_graph *g, const te_dnn_attention *a);

#endif
