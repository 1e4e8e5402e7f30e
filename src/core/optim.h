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

/* The tensors of one group, n of each kind, contiguous and of the parameter's size. states: exp_avg and exp_avg_sq for AdamW, the
 * momentum buffer for SGD (NULL without momentum). masters: NULL, or float32 copies (entries may be NULL) that are
 * updated in the parameters' stead, which then receive their rounding. */
typedef struct te_optim_group {
    int               n;
    te_tensor *const *params, *const *grads, *const *states[2], *const *masters;
} te_optim_group;

/* Update all groups in one pass, options[i] belonging to groups[i], and bump versions. On failure nothing was written. Cached
 * compute copies of parameters are refreshed in the same pass. */
te_status te_adamw_step(te_context *ctx, int n_groups, const te_adamw *options, const te_optim_group *groups);
te_status te_sgd_step(te_context *ctx, int n_groups, const te_sgd *options, const te_optim_group *groups);

/* squares[i] = sum of squares of tensor i (a tensor holding NaN or inf gives a non-finite one): gradient norms, and which
 * tensor broke. One pass, one synchronisation. */
te_status te_sum_squares(te_context *ctx, int n, te_tensor *const *tensors, double *squares);

#endif
