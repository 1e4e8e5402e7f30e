/* attention_quantized.h - attention of quantized operands: what the ops keep of it.
 *
 * Where the recipe of ctx->product_state quantizes q, k and v, forward multiplies their bytes and, unless there
 * is dropout, leaves E4M3 with v's factor (te_attention). The bytes are all that is kept; backward reads their
 * values in high precision.
 */
#ifndef TE_CORE_OPS_ATTENTION_QUANTIZED_H
#define TE_CORE_OPS_ATTENTION_QUANTIZED_H

#include "attention.h"

/* n tensors, one packed projection or q, k and v, to the state's operands; there are none where no
 * recipe quantizes them. */
te_status te_attention_quantize(te_call *call, te_attention_state *s, te_tensor *const *t, int n);
/* Says of a view on the bytes of operand i, or on a part of them, what they stand for. */
void te_attention_mark(te_attention_state *s, int i, te_view *view);

/* Room {batch, seq, heads, dim} for the result in `dtype`, or for its bytes in s->result. NULL on failure. */
te_tensor *te_attention_result(te_call *call, te_attention_state *s, te_dtype dtype, te_device *device,
                               const int64_t rows[4]);
/* A quantized result as what is read next, in that shape: its values; where it is handed on, with the bytes attached,
 * or these alone (ctx->product_bytes). NULL on failure. */
te_tensor *te_attention_open_result(te_call *call, te_attention_state *s, int ndim, const int64_t *shape);
/* The result as backward reads it: the tensor that was saved, or the values of the bytes. */
te_tensor *te_attention_result_values(te_call *call, const te_attention_state *s, te_tensor *saved);

#endif
