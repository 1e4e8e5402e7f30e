/* autograd_record.c - nodes: recording a call keeps what its backward needs, and releasing a node lets go of it. */
#include "autograd.h"

bool te_needs_grad(const te_tensor *t) { return t->requires_grad || t->node; }

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

void te_node_drop_saved(te_node *node)
{
    for (int i = 0; i < node->call.n_saved; i++) {
        te_tensor_release(node->call.saved[i]);
        node->call.saved[i] = NULL;
    }
    node->call.n_saved = 0;
    if (node->call.release) node->call.release(&node->call);
    node->call.release = NULL;
    te_grad_hooks_release(node->call.ctx, &node->hooks); /* they may hold what depends on the node */
}

void te_node_drop_gradients(te_node *node)
{
    for (int i = 0; i < TE_OP_MAX_OUTPUTS; i++) {
        te_tensor_release(node->call.dout[i]);
        node->call.dout[i] = NULL;
    }
}

static void free_node(te_node *node)
{
    te_context *ctx = node->call.ctx;
    te_node_drop_saved(node);
    te_node_drop_gradients(node);
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

void te_grad_describe(te_grad_meta *meta, te_tensor *t)
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
        if (inputs[i]) te_grad_describe(&node->edges[i], inputs[i]);
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
