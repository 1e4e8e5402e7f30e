/* autograd.c - recording calls and walking them backwards.
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

typedef struct te_engine {
    te_context *ctx;
    te_node **heap;
    size_t n, capacity;
    capture *captures; /* NULL: gradients of leaves go to .grad */
    int n_captures;
    struct te_engine *outer; /* runs the node that this one runs in; NULL: none */
    uint64_t since; /* not 0: older nodes, and leaves that are not captured, are those of `outer` */
    bool retain;
    bool records; /* what runs around it: gradients can be asked for in a stretch that records nothing */
} te_engine;

bool te_autograd_retains(const te_context *ctx) { return ctx->engine && ctx->engine->retain; }
bool te_needs_grad(const te_tensor *t) { return t->requires_grad || t->node; }

/* --- nodes -------------------------------------------------------------------------------------------------------- */

static size_t node_size(int n_edges) { return sizeof(te_node) + (size_t)n_edges * sizeof(te_grad_meta); }

/* Memory of a node, which counts towards the limit of tensors: a script may record operations without end. */
static te_node *node_memory(te_context *ctx, const char *name, int n_edges)
{
    size_t bytes = node_size(n_edges);
    if (!te_context_count(ctx, bytes)) return NULL;
    te_node *node = te_mem_zalloc(&ctx->mem, bytes);
    if (node) return node;
    te_context_discount(ctx, bytes);
    te_fail_memory(ctx, name);
    return NULL;
}

static void drop_saved(te_node *node)
{
    for (int i = 0; i < node->call.n_saved; i++) {
        te_tensor_release(node->call.saved[i]);
        node->call.saved[i] = NULL;
    }
    node->call.n_saved = 0;
    if (node->call.release) node->call.release(&node->call);
    node->call.release = NULL;
}

static void drop_douts(te_node *node)
{
    for (int i = 0; i < TE_OP_MAX_OUTPUTS; i++) {
        te_tensor_release(node->call.dout[i]);
        node->call.dout[i] = NULL;
    }
}

static void free_node(te_node *node)
{
    te_context *ctx = node->call.ctx;
    drop_saved(node);
    drop_douts(node);
    for (int i = 0; i < node->n_edges; i++) {
        te_tensor_release(node->edges[i].leaf);
        if (node->edges[i].node) te_node_release(node->edges[i].node);
    }
    te_op_release(node->call.op);
    te_context_discount(ctx, node_size(node->n_edges));
    te_mem_free(&ctx->mem, node, node_size(node->n_edges));
    te_context_unref(ctx);
}

/* Releasing a node may release the nodes below it; they are queued rather than freed recursively. */
void te_node_release(te_node *node)
{
    if (--node->refs > 0) return;
    te_context *ctx = node->call.ctx;
    node->next_dead = ctx->dead_nodes;
    ctx->dead_nodes = node;
    if (ctx->freeing_nodes) return;
    te_context_retain(ctx);
    ctx->freeing_nodes = true;
    while (ctx->dead_nodes) {
        te_node *dead = ctx->dead_nodes;
        ctx->dead_nodes = dead->next_dead;
        free_node(dead);
    }
    ctx->freeing_nodes = false;
    te_context_unref(ctx);
}

static void describe_input(te_grad_meta *meta, te_tensor *t)
{
    meta->device = t->storage->device;
    meta->dtype = t->dtype;
    meta->ndim = t->ndim;
    memcpy(meta->shape, t->shape, sizeof meta->shape);
    if (t->node) {
        meta->node = t->node;
        meta->output = t->node_output;
        t->node->refs++;
    } else if (t->requires_grad) {
        meta->leaf = te_tensor_retain(t);
    }
}

te_status te_replay_check(te_context *ctx, te_tensor *const *inputs, int n)
{
    for (int i = 0; i < n; i++) {
        const te_storage *s = inputs[i] ? inputs[i]->storage : NULL;
        if (s && s->id < ctx->replayed_since && s->written >= ctx->replayed_since && s->written < ctx->replay_began)
            return te_fail(ctx, TE_ERROR_ARGUMENT,
                           "te.checkpoint: backward: a tensor of shape %s that it read was changed in place since",
                           TE_SHAPE_TEXT(inputs[i]));
    }
    return TE_OK;
}

te_status te_autograd_record(te_call *call, te_tensor **inputs, int n_inputs)
{
    te_context *ctx = call->ctx;
    te_node *node = node_memory(ctx, call->op->name, n_inputs);
    if (!node) return ctx->status;
    node->call = *call;
    node->call.node = node;
    te_op_retain(call->op);
    node->order = ctx->next_node++;
    node->edges = (te_grad_meta *)(node + 1);
    node->n_edges = n_inputs;
    te_context_retain(ctx);
    for (int i = 0; i < n_inputs; i++)
        if (inputs[i]) describe_input(&node->edges[i], inputs[i]);
    /* what is borrowed from the caller does not outlive the call */
    memset(node->call.in, 0, sizeof node->call.in);
    memset(node->call.out, 0, sizeof node->call.out);
    node->call.list = NULL;
    node->call.inplace = NULL;
    node->refs = 1;
    for (int i = 0; i < call->op->n_outputs; i++) {
        te_tensor *out = call->out[i];
        if (!out || !te_dtype_has_gradient(out->dtype)) continue; /* positions, counts, truth values */
        out->node = node;
        out->node_output = i;
        node->refs++;
    }
    call->n_saved = 0; /* the node owns them now */
    call->release = NULL;
    te_node_release(node);
    return TE_OK;
}

/* --- the heap ----------------------------------------------------------------------------------------------------- */

static te_status push(te_engine *e, te_node *node)
{
    if (node->queued) return TE_OK;
    while (node->order < e->since) e = e->outer;
    void *heap = e->heap;
    if (!te_mem_grow(&e->ctx->mem, &heap, &e->capacity, e->n + 1, sizeof *e->heap))
        return te_fail_memory(e->ctx, "te.backward");
    e->heap = heap;
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

static te_tensor **leaf_slot(te_engine *e, te_tensor *leaf)
{
    e = gatherer(e, leaf);
    if (e->captures) return captured(e, leaf);
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
    bool kept = keeps(e, meta);
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

static te_status run_node(te_engine *e, te_node *node)
{
    te_status status = te_context_poll(e->ctx);
    if (status == TE_OK) status = check_saved(node);
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
    drop_douts(node);
    if (status == TE_OK && !e->retain) {
        drop_saved(node);
        node->consumed = true;
    }
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
    /* as if a consumer of `output` handed its gradient over */
    struct {
        te_node node;
        te_grad_meta edge;
    } consumer = {.node = {.call = {.ctx = ctx}}};
    consumer.node.edges = &consumer.edge;
    consumer.node.n_edges = 1;
    consumer.node.call.node = &consumer.node;
    describe_input(&consumer.edge, output);
    te_status status = te_grad_give(&consumer.node.call, 0, first);
    te_tensor_release(consumer.edge.leaf);
    if (consumer.edge.node) te_node_release(consumer.edge.node);
    return status;
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
    te_status status = TE_OK;
    for (int i = 0; i < n_outputs && status == TE_OK; i++) status = seed(e, outputs[i], seeds ? seeds[i] : NULL);
    while (e->n) {
        te_node *node = pop(e);
        if (status == TE_OK)
            status = run_node(e, node);
        else
            drop_douts(node);
        te_node_release(node);
    }
    te_mem_free(&ctx->mem, e->heap, e->capacity * sizeof *e->heap);
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

/* --- leaves ------------------------------------------------------------------------------------------------------- */

bool te_tensor_requires_grad(const te_tensor *t) { return t && te_needs_grad(t); }
te_tensor *te_tensor_grad(const te_tensor *t) { return t ? t->grad : NULL; }

te_status te_tensor_set_requires_grad(te_tensor *t, bool on)
{
    if (!t) return TE_ERROR_ARGUMENT;
    if (on && !te_dtype_has_gradient(t->dtype))
        return te_fail(t->ctx, TE_ERROR_ARGUMENT, "requires_grad: a tensor of %s has no gradient",
                       te_dtype_name(t->dtype));
    if (t->node) {
        if (on) return TE_OK;
        return te_fail(t->ctx, TE_ERROR_ARGUMENT, "requires_grad: the tensor is a result; use detach()");
    }
    t->requires_grad = on;
    return TE_OK;
}

te_tensor *te_tensor_main_grad(const te_tensor *t) { return t ? t->main_grad : NULL; }

te_tensor *te_tensor_gradient(const te_tensor *t) { return t->main_grad ? t->main_grad : t->grad; }

te_status te_tensor_zero_gradient(te_tensor *t)
{
    te_status status = te_tensor_set_grad(t, NULL);
    return status == TE_OK && t->main_grad ? te_tensor_fill(t->main_grad, 0) : status;
}

/* Replaces *slot by `grad`: as a tensor of the slot's own, on the same memory and outside the graph. What a gradient
 * holds in its turn was therefore always put there later, so tensors and gradients never hold each other in a circle,
 * which nobody would free. */
static te_status own_gradient(te_tensor **slot, te_tensor *grad)
{
    te_tensor *own = grad ? te_tensor_alias(grad, grad->ndim, grad->shape, grad->stride, grad->offset) : NULL;
    if (grad && !own) return grad->ctx->status;
    te_tensor_release(*slot);
    *slot = own;
    return TE_OK;
}

static te_status check_context(te_tensor *t, const te_tensor *grad, const char *name)
{
    if (!grad || grad->ctx == t->ctx) return TE_OK;
    return te_fail(t->ctx, TE_ERROR_ARGUMENT, "%s: a tensor of another context", name);
}

te_status te_tensor_set_main_grad(te_tensor *t, te_tensor *grad)
{
    if (!t) return TE_ERROR_ARGUMENT;
    if (check_context(t, grad, "main_grad") != TE_OK) return t->ctx->status;
    bool fits = !grad || (te_same_shape(t, grad) && (grad->dtype == t->dtype || grad->dtype == TE_F32) &&
                          grad->storage->device == t->storage->device);
    if (!fits)
        return te_fail(t->ctx, TE_ERROR_ARGUMENT,
                       "main_grad: %s of %s on %s for a tensor %s of %s on %s; its dtype or float32 is needed",
                       TE_SHAPE_TEXT(grad), te_dtype_name(grad->dtype), te_tensor_device(grad), TE_SHAPE_TEXT(t),
                       te_dtype_name(t->dtype), te_tensor_device(t));
    const char *why = grad ? te_tensor_unwritable(grad) : NULL;
    if (why) return te_fail(t->ctx, TE_ERROR_ARGUMENT, "main_grad: %s", why);
    if (grad && (t->node || grad == t || te_needs_grad(grad) || !te_tensor_contiguous(grad)))
        return te_fail(t->ctx, TE_ERROR_ARGUMENT,
                       "main_grad: contiguous memory outside the graph is needed, of a leaf");
    return own_gradient(&t->main_grad, grad);
}

te_status te_tensor_set_grad(te_tensor *t, te_tensor *grad)
{
    if (!t) return TE_ERROR_ARGUMENT;
    if (check_context(t, grad, "grad") != TE_OK) return t->ctx->status;
    if (grad &&
        (!te_same_shape(t, grad) || grad->dtype != t->dtype || grad->storage->device != t->storage->device))
        return te_fail(t->ctx, TE_ERROR_ARGUMENT, "grad: %s of %s on %s for a tensor %s of %s on %s",
                       TE_SHAPE_TEXT(grad), te_dtype_name(grad->dtype), te_tensor_device(grad), TE_SHAPE_TEXT(t),
                       te_dtype_name(t->dtype), te_tensor_device(t));
    if (grad == t) return te_fail(t->ctx, TE_ERROR_ARGUMENT, "grad: a tensor cannot be its own gradient");
    return own_gradient(&t->grad, grad);
}
