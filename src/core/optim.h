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

/* SGD with momentum: g += weight_decay p; buf = momentum buf + (1 - dampening) g (first step: buf = g);
 * nesterov: g += momentum buf. */
typedef struct te_sgd {
    double lr, momentum, dampening, weight_decay, grad_scale;
    bool   nesterov, first;
} te_sgd;

/* The tensors of one group, n of each kind, of the parameter's size and, but for gradients, contiguous. states: exp_avg
 * and exp_avg_sq for AdamW, the momentum buffer for SGD (NULL without momentum). masters: NULL, or float32 or bfloat16
 * copies (entries may be NULL) that are updated in the parameters' stead, which then receive their rounding; a
 * parameter that is stored quantized needs one, and is quantized from it in the same pass or after it. Where others
 * wrote to a parameter since the last step with its master, and not to the master, that first takes over the values
 * that are not its rounding; of a parameter that is stored quantized all, if any is not. Likewise where a master never
 * took part in a step. */
typedef struct te_optim_group {
    int               n;
    te_tensor *const *params, *const *grads, *const *states[2], *const *masters;
} te_optim_group;

/* Update all groups in one pass, options[i] belonging to groups[i], and bump versions. On failure nothing was written,
 * but that masters took over what their parameters hold. Cached compute copies of parameters are refreshed in the same
 * pass. */
te_status te_adamw_step(te_context *ctx, int n_groups, const te_adamw *options, const te_optim_group *groups);
te_status te_sgd_step(te_context *ctx, int n_groups, const te_sgd *options, const te_optim_group *groups);

/* A step whose coefficients lie on the device, so that a recorded graph can make it. numbers: float64 {n_groups, 8},
 * filled by te_adamw_send from options whose grad_scale is 1. clip: NULL, or what te_grad_clip gave; where it does not
 * allow the step nothing changes. The same bits as te_adamw_step's with clip's factor as grad_scale.
 *
 * With clip the device also counts the steps that were not made, in `unmade`, float64 {1}; the host, which hears of
 * them later, says in unmade_known how many of them the steps of its options leave out. numbers are then
 * {n_groups, 16}: also what those of earlier steps follow from, which the device takes where it knows of more. */
te_status te_adamw_send(te_context *ctx, int n_groups, const te_adamw *options, double unmade_known,
                        te_tensor *numbers);
te_status te_adamw_step_on(te_context *ctx, int n_groups, te_tensor *numbers, te_tensor *clip, te_tensor *unmade,
                           const te_optim_group *groups);
/* float64 {3} on the device: the norm of all tensors together times scale; the factor (scale, or less so that the
 * norm is at most max; max 0: no limit); 1 where the norm, and the loss if there is one, are finite, else 0.
 * Nothing is waited for. */
te_tensor *te_grad_clip(te_context *ctx, int n, te_tensor *const *tensors, const te_tensor *loss, double scale,
                        double max);

/* An error of `what` where a tensor of parameter i is not dense, of the parameter's size and on its device. */
te_status te_optim_check(te_context *ctx, const char *what, int i, const te_tensor *param, const te_tensor *t);

/* From here on `master` holds what `param` does; or, as after loading, nobody knows whether it does. */
void      te_optim_follow(te_tensor *master, const te_tensor *param);
void      te_optim_forget(te_tensor *master);
/* Where others wrote to param since, or nothing is known. The tensors must pass te_optim_check. In a recording it is
 * left to the launch, but for what the recording itself has written. */
te_status te_optim_catch_up(te_tensor *master, te_tensor *param);

/* squares[i] = sum of squares of tensor i (a tensor holding NaN or inf gives a non-finite one): gradient norms, and
 * which tensor broke. One pass, one synchronisation. */
te_status te_sum_squares(te_context *ctx, int n, te_tensor *const *tensors, double *squares);

#endif
