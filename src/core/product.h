/* product.h - the three matrix products of a linear layer, on tensors. Leading dimensions of x, y and their gradients
 * count as rows; operands enter the GEMM as they lie, and are copied only where their rows are not evenly spaced. */
#ifndef TE_CORE_PRODUCT_H
#define TE_CORE_PRODUCT_H

#include "tensor.h"

/* The dtype that operands of these dtypes are multiplied in: the compute dtype of autocast, where one is set. */
te_dtype te_product_dtype(const te_context *ctx, te_dtype a, te_dtype b);

/* W for te_linear_product: in the dtype of x; or as it is stored quantized, where the host multiplies and no gradients
 * are recorded, nor will be when a stretch runs again. To be released. */
te_tensor *te_product_weight(te_tensor *w, te_dtype dtype);

/* y = x W^T + bias. x {.., in} and w {out, in} of one dtype, or a w that is stored quantized; bias {out} or NULL,
 * y {.., out}. */
te_status te_linear_product(te_tensor *y, te_tensor *x, te_tensor *w, te_tensor *bias);
/* dx = dy W, or dx += dy W. Contiguous dx in dy's dtype or float32. */
te_status te_linear_dgrad(te_tensor *dx, te_tensor *dy, te_tensor *w, bool accumulate);
/* dw = dy^T x, or dw += dy^T x. */
te_status te_linear_wgrad(te_tensor *dw, te_tensor *dy, te_tensor *x, bool accumulate);

/* The same matrix with rows and columns exchanged. */
te_view te_matrix_transposed(te_view v);
/* Leading dimensions joined: {.., k} as {rows, k}. False when they are not evenly spaced. */
bool te_rows_view(const te_tensor *t, te_view *out);
/* The same as a tensor that stays valid: t itself or a copy. A new reference; NULL on failure. */
te_tensor *te_rows_tensor(te_tensor *t, te_view *view);
/* The bias of a product that gives y, NULL passes through: on a device, whose epilogues take it in y's dtype, a copy in
 * 16 bits; of whole numbers one in floating point. It is kept as those of weights are. *held, NULL or not, is released
 * after the product. */
te_status te_product_bias(const te_tensor *y, te_tensor *bias, te_view *view, te_tensor **held);
/* Identifies the contents of a weight, so that a packed copy of it may be kept; 0: not worth it. */
uint64_t te_content_key(const te_tensor *t);

/* Whether a product of dtype `compute` can be written to, or added to, memory of `target`. */
static inline bool te_product_fits(te_dtype target, te_dtype compute)
{
    return target == compute || (target == TE_F32 && compute != TE_F64);
}

#endif
