/* te.h - the engine of tetrain without Lua: contexts, tensors, operations, gradients, the fuser, AdamW. It includes
 * recipe.h, which declares recipes.
 *
 * Conventions
 *   - A function that can fail returns te_status, or NULL where it makes an object; te_context_error then holds a
 *     message with the offending values. Nothing here aborts, exits or prints.
 *   - Tensors are reference counted. A function that returns a te_tensor * gives the caller one reference unless its
 *     comment says "borrowed"; arguments are borrowed. Releasing NULL is a no-op.
 *   - Given a NULL context, tensor, operation, group or place for results, a function that returns a status returns
 *     TE_ERROR_ARGUMENT, so that a chain of calls may be checked once, at its end; the message is that of the call that
 *     returned the NULL. Other functions do nothing then and return NULL, false, 0, TE_NO_VALUE or TE_DTYPE_COUNT.
 *   - A tensor keeps its context alive: te_context_release may come before the last te_tensor_release.
 *   - A context is used by one thread at a time. Two contexts are independent.
 *   - Functions that compute need 256 KiB of stack.
 *   - Results do not depend on the floating-point mode of the calling thread (rounding, flushing to zero, exceptions
 *     that raise signals): functions that compute set the default mode, and restore the caller's before they return.
 *   - Dimensions and indices count from 0 here (in Lua they count from 1); negative ones count from the end.
 */
#ifndef TETRAIN_TE_H
#define TETRAIN_TE_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct te_context   te_context;
typedef struct te_tensor    te_tensor;
typedef struct te_op        te_op;
typedef struct te_group     te_group;
typedef struct te_optimizer te_optimizer;

/* --- context ------------------------------------------------------------------------------------------------------ */

typedef struct te_context_options {
    size_t struct_size;         /* sizeof(te_context_options): lets the struct grow */
    int    threads;             /* CPU threads for kernels, 1024 at most; 0: OMP_NUM_THREADS, or all cores */
    size_t tensor_memory_limit; /* bytes of tensor memory per device; 0: none */
    /* Allocator for host memory with lua_Alloc's contract; NULL: the C library. */
    void *(*realloc)(void *user, void *ptr, size_t old_size, size_t new_size);
    void *realloc_user;
} te_context_options;

/* options may be NULL. Returns NULL when memory is exhausted, or when struct_size was not set. */
TE_API te_context *te_context_open(const te_context_options *options);
TE_API void        te_context_release(te_context *ctx);
TE_API const char *te_context_error(const te_context *ctx); /* message of the last failure, valid until the next one */
/* May be called from any thread or signal handler. The op that is running on the CPU, or else the next one, fails with
 * TE_ERROR_INTERRUPTED, and so does every further one until the interrupt is cleared. Tensors that an op was changing
 * in place are left partly updated. */
TE_API void        te_context_interrupt(te_context *ctx);
/* Takes back every interrupt that is waiting, that of tetrain_interrupt as well. */
TE_API void        te_context_clear_interrupt(te_context *ctx);
/* Takes effect with the next op. 0 or less: OMP_NUM_THREADS, or all cores; more than 1024 count as 1024. It cannot
 * fail: where the system does not start a thread, the engine does without it. */
TE_API void        te_context_set_threads(te_context *ctx, int threads);
TE_API int         te_context_threads(const te_context *ctx);
/* Whether float32 matrix products may round their operands to TF32 (10 bits of fraction) on devices that are faster
 * with it; off by default. The CPU never does. */
TE_API void        te_context_set_tf32(te_context *ctx, bool on);
TE_API bool        te_context_tf32(const te_context *ctx);
/* Whether sums may be taken in an order that changes from call to call, where that is faster: gradients of attention in
 * 16 bits on a GPU then need less time and memory, but their bits may differ from call to call. Off by default. */
TE_API void te_context_set_any_order(te_context *ctx, bool on);
TE_API bool te_context_any_order(const te_context *ctx);
/* Sets the function, NULL for none, that is called when tensor memory runs out, before the last attempt; it may release
 * tensors. In the context of a runtime (tetrain.h) it is called before Lua's garbage collection, which runs as well; it
 * must not call Lua. */
TE_API void te_context_on_memory_pressure(te_context *ctx, void (*reclaim)(void *user), void *user);

typedef struct te_memory_stats {
    size_t   current, peak; /* bytes in live tensors, now and at their most */
    size_t   reserved;      /* bytes taken from the system, cached blocks included */
    uint64_t allocations;   /* blocks handed out since the context was opened */
} te_memory_stats;

/* The memory of one device, which is opened if it was not; NULL: "cpu". */
TE_API te_status te_context_memory(te_context *ctx, const char *device, te_memory_stats *stats);
/* Waits until a device (NULL: all open ones) has finished its queued work; failures of that work are reported here. */
TE_API te_status te_context_synchronize(te_context *ctx, const char *device);
/* Resets peak to current, on all devices. */
TE_API void      te_context_reset_peak(te_context *ctx);
/* Returns blocks that no tensor uses to the system, on all devices. */
TE_API void      te_context_empty_cache(te_context *ctx);

/* Random numbers: Philox4x32-10 with key `seed`. Every op that draws takes the next range of offsets, so the state is
 * two numbers and restoring it replays the same draws. */
TE_API void te_context_seed(te_context *ctx, uint64_t seed);
TE_API void te_context_rng_state(const te_context *ctx, uint64_t *seed, uint64_t *offset); /* NULL: not asked for */
TE_API void te_context_set_rng_state(te_context *ctx, uint64_t seed, uint64_t offset);

/* Whether ops record gradients; returns the previous setting. */
TE_API bool te_context_set_grad_enabled(te_context *ctx, bool enabled);
TE_API bool te_context_grad_enabled(const te_context *ctx);
/* Compute dtype of matrix product, norm, attention and embedding ops (autocast); TE_DTYPE_COUNT: that of their
 * operands, which float64 always keeps. Returns the previous setting; anything but float64, float32, bfloat16 and
 * float16 changes nothing. */
TE_API te_dtype te_context_set_compute_dtype(te_context *ctx, te_dtype dtype);

/* --- tensors ------------------------------------------------------------------------------------------------------ */

/* Uninitialised tensor in host memory. shape: ndim sizes, 0 to 8 of them, each 0 or more; NULL, with a message, where
 * they are not, or come to more bytes than an int64_t counts or memory holds. The operation "to_device" (x, device as
 * TE_ARG_TEXT) copies a tensor to a GPU, and operations run where their tensors are. */
TE_API te_tensor *te_tensor_empty(te_context *ctx, te_dtype dtype, int ndim, const int64_t *shape);
TE_API te_tensor *te_tensor_full(te_context *ctx, te_dtype dtype, int ndim, const int64_t *shape, double value);
/* Wraps host memory, aligned for its elements, without a copy. deleter(user) runs when the last view dies; deleter
 * NULL: the caller keeps the memory alive, as after a failure, on which deleter is not called. */
TE_API te_tensor *te_tensor_from_data(te_context *ctx, void *data, te_dtype dtype, int ndim, const int64_t *shape,
                                      void (*deleter)(void *user), void *user);
TE_API te_tensor     *te_tensor_retain(te_tensor *t);
TE_API void           te_tensor_release(te_tensor *t);
/* Host pointer of a contiguous CPU tensor, else NULL. For a NULL tensor, the data and the shape are NULL, the dtype is
 * TE_DTYPE_COUNT, and the numbers of dimensions and elements are 0. */
TE_API void          *te_tensor_data(te_tensor *t);
/* To be called after writing there. Copies of the values (of weights in the compute dtype, or quantized) are then made
 * anew, norms of gradients are taken of the new values, and a backward pass that needs the old values fails. Functions
 * of the engine mark what they write themselves. NULL is a no-op. */
TE_API void           te_tensor_written(te_tensor *t);
TE_API te_dtype       te_tensor_dtype(const te_tensor *t);
TE_API int            te_tensor_ndim(const te_tensor *t);
TE_API const int64_t *te_tensor_shape(const te_tensor *t);   /* te_tensor_ndim sizes, valid while the tensor lives */
TE_API int64_t        te_tensor_numel(const te_tensor *t);
TE_API const char    *te_tensor_device(const te_tensor *t);  /* "cpu", "cuda", "cuda:1"; valid while the tensor lives */
TE_API te_context    *te_tensor_context(const te_tensor *t); /* borrowed */

/* Copies between a tensor (any strides, any device) and contiguous host memory of `dtype`, converting. host: room for
 * te_tensor_numel elements, not NULL unless there are none. */
TE_API te_status te_tensor_read(te_tensor *t, te_dtype dtype, void *host);
TE_API te_status te_tensor_write(te_tensor *t, te_dtype dtype, const void *host);

/* --- gradients ---------------------------------------------------------------------------------------------------- */

TE_API bool       te_tensor_requires_grad(const te_tensor *t);      /* of a leaf, or a result that depends on one */
TE_API te_status  te_tensor_set_requires_grad(te_tensor *t, bool on);
TE_API te_tensor *te_tensor_grad(const te_tensor *t);               /* borrowed; NULL when there is none */
/* t's gradient becomes a view of all of `grad`, outside the graph: a tensor of its own on the same memory, so that a
 * write to one shows in the other. NULL clears it. */
TE_API te_status  te_tensor_set_grad(te_tensor *t, te_tensor *grad);
/* The tensor that backward adds a leaf's gradients to instead of giving it a .grad: contiguous, of the leaf's shape, of
 * its dtype or float32; other tensors may be views into it. Optimizers use it in place of .grad, too. */
TE_API te_tensor *te_tensor_main_grad(const te_tensor *t); /* borrowed; NULL when there is none */
TE_API te_status  te_tensor_set_main_grad(te_tensor *t, te_tensor *grad); /* likewise a view */
/* Adds d loss / d leaf to the .grad of every leaf that loss depends on. grad NULL: loss must have one element, and 1 is
 * used. Saved tensors are released as they are consumed, unless retain is true. */
TE_API te_status te_backward(te_tensor *loss, te_tensor *grad, bool retain);

/* --- operations --------------------------------------------------------------------------------------------------- */

/* An argument of an operation, in the order of its signature (see te_op_signature). */
typedef enum te_arg_kind {
    TE_ARG_ABSENT = 0, /* takes the declared default */
    TE_ARG_TENSOR,
    TE_ARG_TENSORS,
    TE_ARG_NUMBER, /* also int, bool, dim, dtype, and a choice by its index */
    TE_ARG_INTS,
    TE_ARG_TEXT
} te_arg_kind;

typedef struct te_arg {
    te_arg_kind kind;
    int         n; /* TENSORS, INTS: how many */
    union {
        te_tensor        *tensor;
        te_tensor *const *tensors;
        double            number;
        const int64_t    *ints;
        const char       *text;
    } as;
} te_arg;

/* Operations and their strings live as long as the context. */
TE_API const te_op *te_op_find(te_context *ctx, const char *name); /* NULL: no such operation */
TE_API const te_op *te_op_at(te_context *ctx, int i);              /* i from 0; NULL past the last */
TE_API const char  *te_op_name(const te_op *op);
TE_API const char  *te_op_signature(const te_op *op); /* "softmax(x, dim: dim = -1)" */
TE_API const char  *te_op_doc(const te_op *op);
/* Runs an operation. out receives its first n_out results, one reference each; places without a result become NULL, and
 * results without a place are released. On failure all places are NULL. */
TE_API te_status te_op_run(te_context *ctx, const te_op *op, const te_arg *args, int n_args, te_tensor **out,
                           int n_out);

/* --- groups: neighbouring operations planned and run as one ------------------------------------------------------- */

/* A group is a small graph. Its inputs are x, further activations and parameters; its nodes apply operations; its
 * outputs are values of either kind. Values are numbered from 0.
 *
 *      te_group *g = te_group_new(ctx);
 *      int x = te_group_input(g, false), w = te_group_input(g, true), normed, y;
 *      te_group_apply(g, te_op_find(ctx, "rms_norm"), (int[]){x, w}, 2, NULL, 0, &normed);
 *      te_group_apply(g, te_op_find(ctx, "silu"), &normed, 1, NULL, 0, &y);
 *      te_group_output(g, y);
 *      te_tensor *out, *in[] = {hidden, weight};
 *      te_group_run(g, in, &out);
 *
 * The first run with inputs of a new kind makes a plan: which nodes share a kernel, forward and backward. Gradients go
 * through a run as through one operation. Results are those of te_op_run for each node. */
enum { TE_NO_VALUE = -1 };

TE_API te_group *te_group_new(te_context *ctx);
/* NULL is a no-op; runs whose backward is still to come are not disturbed. */
TE_API void      te_group_release(te_group *group);
/* A group may be extended after it has run: its plans are made anew.
 *
 * A parameter has a shape of its own; an activation is x, the first input, or has x's leading dimensions. Returns
 * TE_NO_VALUE on failure. */
TE_API int te_group_input(te_group *group, bool parameter);
/* Whether a group may hold the operation; if not, the context's message says why. */
TE_API bool te_group_accepts(te_context *ctx, const te_op *op);
/* values: one for each tensor parameter of the operation, in order; TE_NO_VALUE where absent; absent ones at the end
 * may be left out. args: all of its arguments in the order of its signature, of which those that are tensors are
 * ignored; NULL for the defaults. */
TE_API te_status te_group_apply(te_group *group, const te_op *op, const int *values, int n_values, const te_arg *args,
                                int n_args, int *result);
TE_API te_status te_group_output(te_group *group, int value);
TE_API int       te_group_n_inputs(const te_group *group);
TE_API int       te_group_n_outputs(const te_group *group);
TE_API int       te_group_n_plans(const te_group *group); /* plans that are kept, including refusals */
/* inputs: te_group_n_inputs tensors, NULL for an absent one. outputs: te_group_n_outputs, one reference each; all NULL
 * on failure. Where these inputs cannot be planned, it returns TE_ERROR_UNSUPPORTED before anything runs: then run the
 * operations one by one. */
TE_API te_status te_group_run(te_group *group, te_tensor *const *inputs, te_tensor **outputs);
TE_API bool      te_group_refused(const te_group *group); /* whether the last run was refused in this way */

/* --- optimizer ---------------------------------------------------------------------------------------------------- */

/* AdamW, as Lua's te.optim.AdamW: m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; p -= lr ((m / (1 -
 * beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p). A step is one pass over all parameters; its results
 * are bit-identical to those of a script.
 *
 *      te_optimizer *adamw = te_optimizer_adamw(ctx, params, n, NULL);
 *      te_backward(loss, NULL, false);
 *      te_optimizer_grad_norm(adamw, &norm);
 *      te_optimizer_step(adamw, norm > 1 ? 1 / norm : 1);          clipped to a norm of 1
 *      te_optimizer_zero_grad(adamw);
 */
typedef struct te_adamw_options {
    size_t struct_size; /* sizeof(te_adamw_options) */
    double lr, beta1, beta2, eps, weight_decay; /* 1e-3, 0.9, 0.999, 1e-8, 0.01 */
    bool   master_weights; /* 16-bit parameters are updated in float32 copies and receive the rounded values */
} te_adamw_options;

/* Fills as much of the struct as struct_size, which must be set before, says there is. */
TE_API void te_adamw_defaults(te_adamw_options *options);
/* Keeps references to the parameters: n floating-point tensors that are leaves, not results of operations. options
 * NULL: the defaults. Returns NULL on failure. */
TE_API te_optimizer *te_optimizer_adamw(te_context *ctx, te_tensor *const *params, int n,
                                        const te_adamw_options *options);
TE_API void          te_optimizer_release(te_optimizer *optimizer); /* NULL is a no-op */
TE_API te_status     te_optimizer_set_lr(te_optimizer *optimizer, double lr);
/* The norm of all gradients together; not finite where one of them is not. Waits for the device. */
TE_API te_status     te_optimizer_grad_norm(te_optimizer *optimizer, double *norm);
/* grad_scale multiplies every gradient: 1, or a factor that clips or averages them; NaN is refused. A parameter without
 * a gradient is left alone; its t counts only the steps that it took part in. On failure nothing has been written; an
 * interrupt waits until the step is over. */
TE_API te_status     te_optimizer_step(te_optimizer *optimizer, double grad_scale);
/* Removes the parameters' gradients; a main_grad stays, filled with zeros. */
TE_API te_status     te_optimizer_zero_grad(te_optimizer *optimizer);
/* "exp_avg", "exp_avg_sq" (float32, of the parameter's shape) and "master" of parameter i, counted from 0: borrowed, to
 * be saved, or restored with te_tensor_write; NULL where there is none. Values written to the parameter are in the
 * master as well. Call te_optimizer_set_steps last when restoring: from then on a master is used where the parameter is
 * its rounded value. */
TE_API te_tensor    *te_optimizer_state(te_optimizer *optimizer, int i, const char *name);
TE_API int64_t       te_optimizer_steps(const te_optimizer *optimizer, int i);
TE_API te_status     te_optimizer_set_steps(te_optimizer *optimizer, int i, int64_t steps);

TE_API const char *te_version(void);

#ifdef __cplusplus
}
#endif

#include "recipe.h"

#endif
