/* autograd.c - walking recorded calls (autograd_record.c) backwards.
 *
 * Nodes are numbered as they are made, so a consumer always has a higher number than what produced its inputs. Backward
 * keeps the reached nodes in a heap and takes the highest number first: when a node's turn comes, every gradient of its
 * results has arrived. Gradients wait in the producer's call.dout, those of leaves in leaf->grad or leaf->main_grad, or
 * in the slots of te_autograd_grad.
 *
 * A node that computes a stretch again runs a pass of its own over it. Nodes from before the stretch may have other
 * consumers, whose turn is yet to come: such a pass hands them to the one around it.
 */
#include "autograd.h"

#include "autocast.h"
#include "kernels/float_mode.h"
#include "ops/ops.h"

/* A tensor whose gradient te_autograd_grad was asked for. */
typedef struct capture {
    te_tensor *leaf; /* or */
    te_node *node;
    int output;
    te_tensor *grad;
} capture;

/* What a node of a pass around has received so far, while a pass of its own may come to the same node. */
typedef struct paused {
    te_node *node;
    bool queued;
    te_tensor *dout[TE_OP_MAX_OUTPUTS];
} paused;

typedef struct te_engine {
    te_context *ctx;
    te_node **heap;
    size_t n, capacity;
    capture *captures; /* NULL: gradients of leaves go to .grad */
    int n_captures;
    te_tensor *waiting; /* leaves with hooks that the pass has met (te_leaf_hooks) */
    te_node *node; /* that runs */
    struct paused *paused;
    size_t n_paused;
    struct te_engine *outer; /* runs the node that this one runs in; NULL: none */
    uint64_t since; /* not 0: older nodes, and leaves that are not captured, are those of `outer` */
    bool retain;
    bool records; /* what runs around it: gradients can be asked for in a stretch that records nothing */
} te_engine;

bool te_autograd_retains(const te_context *ctx) { return ctx->engine && ctx->engine->retain; }

/* --- the heap ----------------------------------------------------------------------------------------------------- */

static te_status push(te_engine *e, te_node *node)
{
    if (node->queued) return TE_OK;
    while (node->order < e->since) e = e->outer;
    if (!te_mem_grow(&e->ctx->mem, &e->heap, &e->capacity, e->n + 1, sizeof *e->heap))
        return te_fail_memory(e->ctx, "te.backward");
    size_t i = e->n++;
    while (i > 0 && e->heap[(i - 1) / 2]->order < node->order) {
        e->heap[i] = e->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    e->heap[i] = node;
    node->queued = true;
    node->refs++;
    return TE_OK;
}

static te_node *pop(te_engine *e)
{
    te_node *top = e->heap[0], *last = e->heap[--e->n];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= e->n) break;
        if (child + 1 < e->n && e->heap[child + 1]->order > e->heap[child]->order) child++;
        if (e->heap[child]->order <= last->order) break;
        e->heap[i] = e->heap[child];
        i = child;
    }
    if (e->n) e->heap[i] = last;
    top->queued = false;
    return top;
}

/* --- gradients of inputs ------------------------------------------------------------------------------------------ */

const te_grad_meta *te_grad_input(const te_call *call, int i) { return &call->node->edges[i]; }

/* What has the dtype in which the gradient of a leaf gathers. */
static const te_tensor *accumulator(const te_tensor *leaf) { return leaf->main_grad ? leaf->main_grad : leaf; }

static te_tensor **captured(te_engine *e, const te_tensor *leaf)
{
    for (int i = 0; i < e->n_captures; i++)
        if (e->captures[i].leaf == leaf) return &e->captures[i].grad;
    return NULL;
}

/* The pass that gathers the gradient of a leaf that e has reached. */
static te_engine *gatherer(te_engine *e, const te_tensor *leaf)
{
    while (e->since && !captured(e, leaf)) e = e->outer;
    return e;
}

/* Whether the gradient of a leaf, which `meta` may be, goes to .grad. */
static bool keeps(te_engine *e, const te_grad_meta *meta) { return meta->leaf && !gatherer(e, meta->leaf)->captures; }

/* Whether it is added to what is there as it comes. */
static bool adds(te_engine *e, const te_grad_meta *meta) { return keeps(e, meta) && !meta->leaf->hooks; }

/* Where the gradient of a leaf gathers until its hooks have seen it. */
static te_tensor **hooked_slot(te_engine *e, te_tensor *leaf)
{
    struct te_leaf_hooks *hooks = leaf->hooks;
    if (!hooks->waiting) {
        hooks->waiting = true;
        hooks->next = e->waiting;
        e->waiting = te_tensor_retain(leaf);
    }
    return &hooks->grad;
}

static te_tensor **leaf_slot(te_engine *e, te_tensor *leaf)
{
    e = gatherer(e, leaf);
    if (e->captures) return captured(e, leaf);
    if (leaf->hooks) return hooked_slot(e, leaf);
    return leaf->main_grad ? &leaf->main_grad : &leaf->grad;
}

/* Where the gradient of an input gathers; NULL when nobody wants it. */
static te_tensor **grad_slot(te_engine *e, const te_grad_meta *meta)
{
    if (meta->node) return &meta->node->call.dout[meta->output];
    return meta->leaf ? leaf_slot(e, meta->leaf) : NULL;
}

bool te_grad_wanted(const te_call *call, int i)
{
    return i < call->node->n_edges && grad_slot(call->ctx->engine, te_grad_input(call, i)) != NULL;
}

bool te_grad_same(const te_call *call, int i, int j)
{
    te_engine *e = call->ctx->engine;
    te_tensor **a = grad_slot(e, te_grad_input(call, i));
    return a && a == grad_slot(e, te_grad_input(call, j));
}

static bool exclusive(const te_tensor *t) { return t->refs == 1 && t->storage->refs == 1 && t->storage->block; }

static te_status arrived(te_engine *e, const te_grad_meta *meta) { return meta->node ? push(e, meta->node) : TE_OK; }

/* Whether more may be added to the gradient in the slot without anybody else seeing it; a leaf's .grad is there for
 * that. */
static bool may_add(te_engine *e, const te_grad_meta *meta, const te_tensor *grad)
{
    bool kept = adds(e, meta);
    if (kept && grad == meta->leaf->main_grad) return true;
    bool own = kept ? grad->storage->block != NULL && !grad->node : exclusive(grad);
    return own && grad->dtype == meta->dtype && te_tensor_contiguous(grad);
}

/* Puts a first gradient into its slot. A leaf's is contiguous, unshared memory, since it will be added to; and without
 * a gradient of its own, as own_gradient says. */
static te_status settle(te_engine *e, const te_grad_meta *meta, te_tensor **slot, te_tensor *grad)
{
    bool holds = grad->node || grad->grad || grad->main_grad;
    if (arrived(e, meta) != TE_OK) { /* what waits at a node that is never reached would be found by the next pass */
        te_tensor_release(grad);
        return e->ctx->status;
    }
    if (meta->leaf && (holds || !exclusive(grad) || !te_tensor_contiguous(grad))) {
        te_tensor *copy = te_tensor_clone_data(grad);
        te_tensor_release(grad);
        if (!copy) return e->ctx->status;
        grad = copy;
    }
    *slot = grad;
    return TE_OK;
}

te_status te_grad_give(te_call *call, int i, te_tensor *grad)
{
    te_engine *e = call->ctx->engine;
    const te_grad_meta *meta = te_grad_input(call, i);
    te_tensor **slot = grad_slot(e, meta);
    if (!grad) return call->ctx->status;
    if (!slot) {
        te_tensor_release(grad);
        return TE_OK;
    }
    if (grad->dtype != meta->dtype) {
        te_tensor *cast = te_tensor_cast(grad, meta->dtype);
        te_tensor_release(grad);
        if (!cast) return call->ctx->status;
        grad = cast;
    }
    if (!*slot) return settle(e, meta, slot, grad);
    te_status status = TE_OK;
    if (!may_add(e, meta, *slot)) {
        te_tensor *copy = te_tensor_clone_data(*slot);
        if (!copy) {
            te_tensor_release(grad);
            return call->ctx->status;
        }
        te_tensor_release(*slot);
        *slot = copy;
    }
    status = te_add_to(*slot, grad);
    te_tensor_release(grad);
    return status == TE_OK ? arrived(e, meta) : status;
}

te_tensor *te_grad_target(te_call *call, int i, bool *accumulate)
{
    te_engine *e = call->ctx->engine;
    te_grad_meta *meta = &call->node->edges[i];
    te_tensor **slot = grad_slot(e, meta);
    if (!slot) {
        te_call_fail(call, TE_ERROR_ARGUMENT, "backward: nobody wants the gradient of input %lld",
                     te_counted(call->ctx, i));
        return NULL;
    }
    if (*slot && !may_add(e, meta, *slot)) {
        te_tensor *copy = te_tensor_new(e->ctx, meta->device, meta->dtype, meta->ndim, meta->shape);
        if (!copy || te_tensor_copy_data(copy, *slot) != TE_OK) {
            te_tensor_release(copy);
            return NULL;
        }
        te_tensor_release(*slot);
        *slot = copy;
    }
    *accumulate = *slot != NULL;
    if (!*slot) {
        *slot = te_tensor_new(e->ctx, meta->device, meta->dtype, meta->ndim, meta->shape);
        meta->fresh = true;
    }
    if (!*slot || arrived(e, meta) != TE_OK) return NULL;
    te_tensor_written(*slot);
    return *slot;
}

/* --- the walk ----------------------------------------------------------------------------------------------------- */

static te_status check_saved(te_node *node)
{
    te_call *call = &node->call;
    if (node->consumed)
        return te_call_fail(call, TE_ERROR_ARGUMENT,
                            "backward: this part of the graph was used before and its saved tensors are gone; "
                            "pass retain_graph = true to the first backward");
    for (int i = 0; i < call->n_saved; i++)
        if (call->saved[i] && te_storage_writes(call->saved[i]->storage) != call->saved_version[i])
            return te_call_fail(call, TE_ERROR_ARGUMENT,
                                "backward: a tensor of shape %s that it saved was changed in place since",
                                TE_SHAPE_TEXT(call->saved[i]));
    return TE_OK;
}

/* te.grad wants the gradients of its inputs alone, where a node may have none of them as its own. */
static bool is_wanted(const te_node *node)
{
    bool wanted = node->call.op->def->flags & TE_OP_EFFECTS;
    for (int i = 0; i < node->n_edges && !wanted; i++) wanted = te_grad_wanted(&node->call, i);
    return wanted;
}

/* After a failure: nobody knows what was written of the gradients that began at this node. */
static void drop_fresh(te_engine *e, te_node *node)
{
    for (int i = 0; i < node->n_edges; i++) {
        te_tensor **slot = node->edges[i].fresh ? grad_slot(e, &node->edges[i]) : NULL;
        if (!slot) continue;
        te_tensor_release(*slot);
        *slot = NULL;
    }
}

/* Shows the gradients that have arrived to the hooks of a node's results. */
static te_status run_hooks(te_node *node)
{
    te_status status = TE_OK;
    for (int i = 0; i < TE_OP_MAX_OUTPUTS && node->hooks && status == TE_OK; i++)
        if (node->call.dout[i]) status = te_grad_hooks_run(node->call.ctx, &node->hooks, i, &node->call.dout[i]);
    if (node->consumed) te_grad_hooks_release(node->call.ctx, &node->hooks);
    return status == TE_OK ? check_saved(node) : status; /* passes of theirs may have used it up */
}

static te_status run_node(te_engine *e, te_node *node)
{
    te_status status = te_context_poll(e->ctx);
    if (status == TE_OK) status = check_saved(node);
    if (status == TE_OK && node->hooks) status = run_hooks(node);
    for (int i = 0; i < node->n_edges; i++) {
        te_grad_meta *meta = &node->edges[i];
        bool kept = keeps(e, meta);
        if (status == TE_OK && kept && meta->leaf->replaced)
            status = te_call_fail(&node->call, TE_ERROR_ARGUMENT,
                                  "backward: a parameter of shape %s was converted or moved since, so its gradient "
                                  "would be lost", TE_SHAPE_TEXT(meta->leaf));
        if (meta->leaf) meta->dtype = (kept ? accumulator(meta->leaf) : meta->leaf)->dtype;
        meta->fresh = false;
    }
    for (int i = 0; i < e->n_captures; i++)
        if (e->captures[i].node == node) e->captures[i].grad = te_tensor_retain(node->call.dout[e->captures[i].output]);
    if (status == TE_OK && is_wanted(node)) {
        const te_op_def *def = node->call.op->def;
        status = def->formula ? te_program_op_backward(&node->call) : def->backward(&node->call);
        if (status != TE_OK) drop_fresh(e, node);
    }
    te_node_drop_gradients(node);
    if (status == TE_OK && !e->retain) {
        te_node_drop_saved(node);
        node->consumed = true;
    }
    return status;
}

/* As if a consumer of t handed its gradient over, which is released. */
static te_status hand_over(te_engine *e, te_tensor *t, te_tensor *grad)
{
    struct {
        te_node node;
        te_grad_meta edge;
    } consumer = {.node = {.call = {.ctx = e->ctx}}};
    consumer.node.edges = &consumer.edge;
    consumer.node.n_edges = 1;
    consumer.node.call.node = &consumer.node;
    te_grad_describe(&consumer.edge, t);
    if (keeps(e, &consumer.edge)) consumer.edge.dtype = accumulator(t)->dtype;
    te_status status = te_grad_give(&consumer.node.call, 0, grad);
    te_tensor_release(consumer.edge.leaf);
    if (consumer.edge.node) te_node_release(consumer.edge.node);
    return status;
}

static te_status seed(te_engine *e, te_tensor *output, te_tensor *grad)
{
    te_context *ctx = e->ctx;
    const char *name = e->captures ? "te.grad" : "te.backward";
    if (!te_needs_grad(output))
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "%s: the tensor does not depend on anything that requires a gradient (%s)", name,
                       e->records ? "how gradients were computed is not recorded"
                                  : "nothing is recorded under te.no_grad, nor in the first run of te.checkpoint");
    if (grad && (!te_same_shape(grad, output)))
        return te_fail(ctx, TE_ERROR_ARGUMENT, "%s: gradient %s for a tensor %s", name, TE_SHAPE_TEXT(grad),
                       TE_SHAPE_TEXT(output));
    if (grad && (grad->ctx != ctx || grad->storage->device != output->storage->device))
        return te_fail(ctx, TE_ERROR_ARGUMENT, "%s: gradient on %s for a tensor on %s%s", name, te_tensor_device(grad),
                       te_tensor_device(output), grad->ctx != ctx ? " of another context" : "");
    if (!grad && te_tensor_numel(output) != 1)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "%s: a gradient is needed for a tensor of shape %s", name,
                       TE_SHAPE_TEXT(output));
    te_tensor *first = NULL;
    if (grad) {
        first = te_tensor_cast(grad, output->dtype);
    } else {
        first = te_tensor_new_like(output);
        if (first && te_tensor_fill(first, 1) != TE_OK) {
            te_tensor_release(first);
            first = NULL;
        }
    }
    return hand_over(e, output, first);
}

static te_status show_leaf(te_tensor *leaf, te_tensor **grad)
{
    struct te_leaf_hooks *hooks = leaf->hooks;
    hooks->running++; /* a pass that a hook runs leaves them in place */
    te_status status = te_grad_hooks_run(leaf->ctx, &hooks->first, 0, grad);
    hooks->running--;
    return status;
}

/* The pass has met all that gives to leaves with hooks: what they make of the sum is added to .grad. */
static te_status finish_leaves(te_engine *e, te_status status)
{
    while (e->waiting) {
        te_tensor *leaf = e->waiting, *grad = leaf->hooks->grad;
        struct te_leaf_hooks *hooks = leaf->hooks;
        e->waiting = hooks->next;
        hooks->waiting = false;
        hooks->grad = NULL;
        if (grad && status == TE_OK) status = show_leaf(leaf, &grad);
        leaf->hooks = NULL; /* it goes past them */
        if (grad && status == TE_OK)
            status = hand_over(e, leaf, grad);
        else
            te_tensor_release(grad);
        leaf->hooks = hooks;
        if (!hooks->first && !hooks->running) te_leaf_hooks_release(leaf);
        te_tensor_release(leaf);
    }
    for (int i = 0; i < e->n_captures && status == TE_OK; i++) {
        te_tensor *leaf = e->captures[i].leaf;
        if (leaf && leaf->hooks && e->captures[i].grad) status = show_leaf(leaf, &e->captures[i].grad);
    }
    return status;
}

/* Sets what the passes around a new one have gathered in nodes aside: it may come to the same nodes. */
static te_status pause_outer(te_engine *e)
{
    size_t n = 0;
    for (te_engine *o = e->outer; o; o = o->since ? o->outer : NULL) n += o->n + 1;
    e->paused = te_mem_zalloc(&e->ctx->mem, n * sizeof *e->paused);
    if (!e->paused) return te_fail_memory(e->ctx, "te.backward");
    e->n_paused = n;
    paused *p = e->paused;
    for (te_engine *o = e->outer; o; o = o->since ? o->outer : NULL) {
        for (size_t i = 0; i <= o->n; i++, p++) {
            te_node *node = p->node = i < o->n ? o->heap[i] : o->node;
            if (!node) continue; /* at the leaves already */
            p->queued = node->queued;
            memcpy(p->dout, node->call.dout, sizeof p->dout);
            node->queued = false;
            memset(node->call.dout, 0, sizeof p->dout);
        }
    }
    return TE_OK;
}

static void resume_outer(te_engine *e)
{
    for (size_t i = 0; i < e->n_paused; i++) {
        te_node *node = e->paused[i].node;
        if (!node) continue;
        node->queued = e->paused[i].queued;
        memcpy(node->call.dout, e->paused[i].dout, sizeof node->call.dout);
    }
    te_mem_free(&e->ctx->mem, e->paused, e->n_paused * sizeof *e->paused);
}

static te_status run(te_engine *e, te_tensor *const *outputs, te_tensor *const *seeds, int n_outputs)
{
    te_context *ctx = e->ctx;
    bool grad_enabled = te_context_set_grad_enabled(ctx, false);
    te_float_mode mode = te_float_mode_begin();
    e->outer = ctx->engine;
    ctx->engine = e;
    if (!e->outer) ctx->backwards++;
    e->records = grad_enabled;
    te_status status = e->outer && !e->since ? pause_outer(e) : TE_OK;
    for (int i = 0; i < n_outputs && status == TE_OK; i++) status = seed(e, outputs[i], seeds ? seeds[i] : NULL);
    while (e->n) {
        te_node *node = e->node = pop(e);
        if (status == TE_OK)
            status = run_node(e, node);
        else
            te_node_drop_gradients(node);
        te_node_release(node);
    }
    e->node = NULL;
    te_mem_free(&ctx->mem, e->heap, e->capacity * sizeof *e->heap);
    status = finish_leaves(e, status);
    resume_outer(e);
    ctx->engine = e->outer;
    te_context_set_grad_enabled(ctx, grad_enabled);
    if (!e->outer && status == TE_OK)
        status = te_products_update(ctx, true);
    else if (!e->outer)
        (void)te_products_forget(ctx, true);
    te_float_mode_end(&mode);
    return status;
}

te_status te_backward(te_tensor *loss, te_tensor *grad, bool retain)
{
    if (!loss) return TE_ERROR_ARGUMENT;
    te_engine e = {.ctx = loss->ctx, .retain = retain};
    return run(&e, &loss, grad ? &grad : NULL, 1);
}

/* Runs e, which captures what it finds for `inputs`. */
static te_status run_capturing(te_engine *e, te_tensor *const *outputs, te_tensor *const *seeds, int n_outputs,
                               te_tensor *const *inputs, te_tensor **grads, int n_inputs)
{
    te_context *ctx = e->ctx;
    size_t bytes = (size_t)(n_inputs + 1) * sizeof(capture); /* captures are not NULL where inputs are none */
    capture *captures = e->captures = te_mem_zalloc(&ctx->mem, bytes);
    if (!captures) return te_fail_memory(ctx, "te.grad");
    e->n_captures = n_inputs;
    for (int i = 0; i < n_inputs; i++) {
        if (inputs[i]->node)
            captures[i] = (capture){.node = inputs[i]->node, .output = inputs[i]->node_output};
        else
            captures[i].leaf = inputs[i];
    }
    te_status status = run(e, outputs, seeds, n_outputs);
    for (int i = 0; i < n_inputs; i++) {
        bool again = false; /* the same tensor asked for twice: the first slot collected */
        for (int j = 0; j < i && !captures[i].grad; j++) {
            if (inputs[j] != inputs[i]) continue;
            grads[i] = te_tensor_retain(grads[j]);
            again = true;
        }
        if (!again) grads[i] = captures[i].grad;
    }
    for (int i = 0; i < n_inputs && status == TE_OK; i++) { /* whoever gets a gradient may write to it, unseen */
        if (!grads[i] || (exclusive(grads[i]) && !te_tensor_repeats(grads[i]))) continue;
        te_tensor *own = te_tensor_clone_data(grads[i]);
        te_tensor_release(grads[i]);
        grads[i] = own;
        if (!own) status = ctx->status;
    }
    for (int i = 0; i < n_inputs && status != TE_OK; i++) {
        te_tensor_release(grads[i]);
        grads[i] = NULL;
    }
    te_mem_free(&ctx->mem, captures, bytes);
    return status;
}

te_status te_autograd_grad(te_context *ctx, te_tensor *const *outputs, te_tensor *const *seeds, int n_outputs,
                           te_tensor *const *inputs, te_tensor **grads, int n_inputs, bool retain)
{
    te_engine e = {.ctx = ctx, .retain = retain};
    return run_capturing(&e, outputs, seeds, n_outputs, inputs, grads, n_inputs);
}

te_status te_autograd_replayed(te_context *ctx, uint64_t since, te_tensor *const *outputs, te_tensor *const *seeds,
                               int n_outputs, te_tensor *const *inputs, te_tensor **grads, int n_inputs)
{
    te_engine e = {.ctx = ctx, .since = ctx->engine ? since : 0};
    return run_capturing(&e, outputs, seeds, n_outputs, inputs, grads, n_inputs);
}
