/* optim.h - optimizer updates as fused passes over many tensors: one kernel for a whole model. */
#ifndef TE_CORE_OPTIM_H
#define TE_CORE_OPTIM_H

#include "tensor.h"

/* AdamW (Loshchilov and Hutter 2019): m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2;
 * p -= lr ((m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps) + weight_decay p). */
typedef struct te_adamw {
    double  lr, beta1, beta2, eps, weight_decay;
    int64_t step;       /* t, from 1 */
    double  grad_scale; /* multiplies every gradient: clipping and averaging cost no pass of their own */
} te_adamw;

/* SGD with momentum: g += weight_decay p; buf = momentum buf + (1 - dampening) g (first step: buf = g); nesterov: g += momentum buf. */
typedef struct te_sgd {
    double lr, momentum, dampening, weight_decay, grad_scale;
    bool   nesterov, first;
} te_sgd;

/* Updates parameters of one group in place and bumps their versions. masters: NULL, or float32 copies that are updated
 * in the parameters' stead, which then receive their rounding. Moments have the masters' (else parameters') shape;
 * float32; without momentum, SGD may go without them (NULL). Entries are contiguous. Cached compute copies of parameters
 * are refreshed in the same pass. */
te_status te_adamw_step(te_context *ctx, const te_adamw *options, int n, te_tensor *const *params, te_tensor *const *grads,
                        te_tensor *const *exp_avg, te_tensor *const *exp_avg_sq, te_tensor *const *masters);
te_status te_sgd_step(te_context *ctx, const te_sgd *options, int n, te_tensor *const *params, te_tensor *const *grads,
                      te_tensor *const *momentum, te_tensor *const *masters);

/* squares[i] = sum of squares of tensor i (a tensor holding NaN or inf gives a non-finite one): gradient norms, and which
 * tensor broke. One pass, one synchronisation. */
te_status te_sum_squares(te_context *ctx, int n, te_tensor *const *tensors, double *squares);

#endif
