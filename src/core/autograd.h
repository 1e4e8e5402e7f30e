/* autograd.h - the tape: one node per recorded call. */
#ifndef TE_CORE_AUTOGRAD_H
#define TE_CORE_AUTOGRAD_H

#include "op.h"

/* What backward must know of an input after forward is gone. */
typedef struct te_grad_meta {
    te_node   *node; /* producer; NULL for leaves */
    int        output;
    bool       fresh; /* the consumer's backward was given new memory to write the gradient into */
    te_tensor *leaf; /* collects into leaf->grad; NULL for results and for inputs without gradient */
    te_device *device;
    te_dtype   dtype;
    int        ndim;
    int64_t    shape[TE_MAX_DIMS];
} te_grad_meta;

/* What sees the gradient of a tensor before anything reads it, and may put another one in its place: run replaces
 * *grad, and sets *gone when the hook is not to be asked again. `data` is the hook's, until `release`. */
typedef struct te_grad_hook {
    struct te_grad_hook *next;
    int                  output; /* of the node */
    te_status (*run)(te_context *ctx, void *data, te_tensor **grad, bool *gone);
    void (*release)(void *data);
    void *data;
} te_grad_hook;

/* Those of a leaf. Its gradient gathers here during a pass, in the dtype of what it is added to at the end. */
struct te_leaf_hooks {
    te_grad_hook *first;
    te_tensor    *grad;
    te_tensor    *next; /* leaf that waits for the end of the same pass */
    bool          waiting;
    int           running;
};

struct te_node {
    te_call       call;
    uint64_t      order; /* creation number: consumers have higher ones than producers */
    int           refs;
    bool          queued, consumed;
    int           n_edges;
    te_grad_meta *edges;
    te_grad_hook *hooks;
    te_node      *next_dead;
};

/* Adds a hook behind the others of a tensor that requires a gradient. Its data is released on failure, too. */
te_status te_grad_hook_add(te_tensor *t, const te_grad_hook *hook);
/* Runs those hooks of a list that are for `output`, one after the other, on *grad. */
te_status te_grad_hooks_run(te_context *ctx, te_grad_hook **list, int output, te_tensor **grad);
void      te_grad_hooks_release(te_context *ctx, te_grad_hook **list);
void      te_leaf_hooks_release(te_tensor *leaf);
void      te_leaf_hooks_move(te_tensor *from, te_tensor *to); /* not while a pass is to run them */

/* Makes the node of a finished forward call (in, out and saved filled) and connects the results. */
te_status te_autograd_record(te_call *call, te_tensor **inputs, int n_inputs);
bool      te_needs_grad(const te_tensor *t); /* leaf with requires_grad, or result of a node */
void      te_node_release(te_node *node);
/* What nodes keep for backward, and the gradients of their results that have arrived, are let go of. */
void      te_node_drop_saved(te_node *node);
void      te_node_drop_gradients(te_node *node);
/* What backward must know of an input; holds its producer, or t itself where that is a leaf. */
void      te_grad_describe(te_grad_meta *meta, te_tensor *t);
/* Raises where a stretch that is computed again does not find what it reads as it was when the stretch had run. What it
 * writes itself it may read. */
te_status te_replay_check(te_context *ctx, te_tensor *const *inputs, int n);
static inline bool te_replays(const te_context *ctx) { return ctx->replayed_since != UINT64_MAX; }
bool      te_autograd_retains(const te_context *ctx); /* the pass in progress keeps what was saved */

/* Gradients of `outputs` (weighted by `seeds`, NULL entries: ones) with respect to `inputs`, without touching any
 * .grad. grads[i] receives a reference, or NULL where there is no path. */
te_status te_autograd_grad(te_context *ctx, te_tensor *const *outputs, te_tensor *const *seeds, int n_outputs,
                           te_tensor *const *inputs, te_tensor **grads, int n_inputs, bool retain);
/* The same inside a backward pass, of a stretch that was computed again, whose first node is `since`. What the stretch
 * met beside its inputs, older nodes and other leaves, is left to that pass, with the gradients that come from here. */
te_status te_autograd_replayed(te_context *ctx, uint64_t since, te_tensor *const *outputs, te_tensor *const *seeds,
                               int n_outputs, te_tensor *const *inputs, te_tensor **grads, int n_inputs);

#endif
