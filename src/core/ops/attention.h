/* attention.h - what the ops on separate and on packed projections share (attention.c). */
#ifndef TE_CORE_OPS_ATTENTION_H
#define TE_CORE_OPS_ATTENTION_H

#include "../op.h"
#include "../quantized.h"

/* What backward needs beside tensors; lives with the call. */
typedef struct te_attention_state {
    te_mem mem;
    te_attention a;
    /* what forward multiplied where that was quantized: one packed projection, or q, k and v */
    te_quantized operands[3];
    te_quant quants[3];
    int n_operands;
    te_quantized result; /* what forward left, where that is quantized */
    te_tensor *packed; /* cu_seqlens on the device, where it made them; else … */
    int n_offsets;
    int32_t offsets[]; /* cu_seqlens, n_offsets of them */
} te_attention_state;

/* The first attributes of both ops, in this order; each goes on from there. */
enum {
    TE_ATTENTION_CAUSAL, TE_ATTENTION_SCALE, TE_ATTENTION_DROPOUT, TE_ATTENTION_WINDOW_LEFT, TE_ATTENTION_WINDOW_RIGHT,
    TE_ATTENTION_BOTTOM_RIGHT, TE_ATTENTION_OPTIONS
};
#define TE_ATTENTION_SIGNATURE                                                                                         \
    "causal: bool = false, scale: number = nil, dropout: number = 0, window_left: int = -1, window_right: int = -1, "  \
    "bottom_right: bool = false"

/* The call's state, zeroed, with room for offsets; NULL when there is no memory. */
te_attention_state *te_attention_open(te_call *call, int n_offsets);
/* What backward reads is kept where the call is recorded; elsewhere, and after a failure, the state goes. */
te_status te_attention_keep(te_call *call, te_status status, te_tensor *const *tensors, int n);

/* The options, to `a`, whose q and k are set. */
te_status te_attention_options(te_call *call, te_attention *a);
/* The sinks as kernels read them, to `a`: *taken is another reference, or a copy. */
te_status te_attention_take_sinks(te_call *call, te_tensor *sinks, te_dtype dtype, te_attention *a, te_tensor **taken);
/* t itself when its last dimension has unit stride, else a copy. A new reference. */
te_tensor *te_attention_unit_stride(te_tensor *t);
/* Likewise of input `index`, in the dtype that attention computes in. */
te_tensor *te_attention_input(te_call *call, int index);

/* Result and softmax statistics; out is laid out [batch, seq, heads, dim] so that joining the heads costs nothing. */
te_status te_attention_compute(te_call *call, te_attention_state *s, te_dtype dtype, te_device *device, te_tensor **out,
                               te_tensor **lse);
void te_attention_point_to_result(te_attention *a, const te_tensor *out);

bool te_attention_wants_dsinks(const te_call *call, int index, const te_tensor *sinks);
/* The gradient of input `index`, the sinks that were saved. */
te_status te_attention_give_dsinks(te_call *call, int index, const te_attention_grad *g, te_tensor *sinks);

/* Whether shapes and dtypes of separate projections fit together. */
te_status te_attention_check_separate(te_call *call, const te_tensor *q, const te_tensor *k, const te_tensor *v);

te_status te_attention_separate_forward(te_call *call);
te_status te_attention_separate_backward(te_call *call);
te_status te_attention_packed_forward(te_call *call);
te_status te_attention_packed_backward(te_call *call);
te_status te_attention_block_forward(te_call *call);
te_status te_attention_block_gradients(te_call *call);

#endif
