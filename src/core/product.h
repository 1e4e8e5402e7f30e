/* product.h - the three matrix products of a linear layer, on tensors. Leading dimensions of x, y and their gradients count as
 * rows; operands enter the GEMM as they lie, and are copied only where their rows are not evenly spaced. */
#ifndef TE_CORE_PRODUCT_H
#define TE_CORE_PRODUCT_H

#include "tensor.h"

/* The dtype that operands of these dtypes are multiplied in: the compute dtype of autocast, where one is set. */
te_dtype te_product_dtype(const te_context *ctx, te_dtype a, te_dtype b);

/* y = x W^T + bias. x {.., in} and w {out, in} of one dtype, bias {out} or NULL, y {.., out}. */
te_status te_linear_product(te_tensor *y, te_tensor *x, te_tensor *w, te_tensor *bias);
/* dx = dy W, or dx += dy W. Contiguous dx in dy's dtype or float32. */
te_status te_linear_dgrad(te_tensor *dx, te_tensor *dy, te_tensor *w, bool accumulate);
/* dw = dy^T x, or dw += dy^T x. */
te_status te_linear_wgrad(te_tensor *dw, te_tensor *dy, te_tensor *x, bool accumulate);
/* Whether a product of dtype `compute` can be written to, or added to, memory of `target`. */
static inline bool te_product_fits(te_dtype target, te_dtype compute)
{
    return target == compute || (target == TE_F32 && compute != TE_F64);
}

#endif
