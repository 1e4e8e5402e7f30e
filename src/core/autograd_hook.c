/* autograd_hook.c - hooks: functions that see a tensor's gradient on its way.
 *
 * The gradient of a result is complete when the turn of its node comes, that of a leaf when the pass has ended. A list
 * is taken off its place while it runs: a hook may run passes of its own, which consume nodes, and add hooks.
 */
#include "autograd.h"

static void free_hook(te_context *ctx, te_grad_hook *hook)
{
    hook->release(hook->data);
    te_mem_free(&ctx->mem, hook, sizeof *hook);
}

void te_grad_hooks_release(te_context *ctx, te_grad_hook **list)
{
    while (*list) {
        te_grad_hook *hook = *list;
        *list = hook->next;
        free_hook(ctx, hook);
    }
}

void te_leaf_hooks_release(te_tensor *leaf)
{
    struct te_leaf_hooks *hooks = leaf->hooks;
    if (!hooks) return;
    leaf->hooks = NULL;
    te_tensor_release(hooks->grad);
    te_grad_hooks_release(leaf->ctx, &hooks->first);
    te_mem_free(&leaf->ctx->mem, hooks, sizeof *hooks);
}

void te_leaf_hooks_move(te_tensor *from, te_tensor *to)
{
    struct te_leaf_hooks *hooks = from->hooks;
    if (!hooks || hooks->waiting || hooks->running || to->hooks || to->node) return;
    from->hooks = NULL;
    to->hooks = hooks;
}

/* The list that hooks of t stand in; NULL when there is no memory for it. */
static te_grad_hook **list_of(te_tensor *t)
{
    if (t->node) return &t->node->hooks;
    if (!t->hooks) t->hooks = te_mem_zalloc(&t->ctx->mem, sizeof *t->hooks);
    return t->hooks ? &t->hooks->first : NULL;
}

static te_status check_hooked(const te_tensor *t)
{
    if (!te_needs_grad(t))
        return te_fail(t->ctx, TE_ERROR_ARGUMENT, "the tensor requires no gradient%s",
                       te_context_grad_enabled(t->ctx) ? "" : " (nothing is recorded under te.no_grad)");
    if (t->node && t->node->consumed)
        return te_fail(t->ctx, TE_ERROR_ARGUMENT, "backward has gone through this tensor already");
    return TE_OK;
}

te_status te_grad_hook_add(te_tensor *t, const te_grad_hook *hook)
{
    te_status     status = check_hooked(t);
    te_grad_hook *own = status == TE_OK ? te_mem_alloc(&t->ctx->mem, sizeof *own) : NULL;
    te_grad_hook **list = own ? list_of(t) : NULL;
    if (!list) {
        te_mem_free(&t->ctx->mem, own, sizeof *own);
        hook->release(hook->data);
        return status == TE_OK ? te_fail_memory(t->ctx, "te.register_hook") : status;
    }
    *own = *hook;
    own->output = t->node ? t->node_output : 0;
    own->next = *list;
    *list = own;
    return TE_OK;
}

/* Lists begin with the newest hook, so that many are added fast; they run the other way round. */
static te_grad_hook *reversed(te_grad_hook *list)
{
    te_grad_hook *result = NULL;
    while (list) {
        te_grad_hook *next = list->next;
        list->next = result;
        result = list;
        list = next;
    }
    return result;
}

te_status te_grad_hooks_run(te_context *ctx, te_grad_hook **list, int output, te_tensor **grad)
{
    te_grad_hook *first = reversed(*list), **at = &first;
    te_status     status = TE_OK;
    *list = NULL;
    while (*at) {
        te_grad_hook *hook = *at;
        bool          gone = false;
        if (status == TE_OK && hook->output == output) status = hook->run(ctx, hook->data, grad, &gone);
        if (gone) {
            *at = hook->next;
            free_hook(ctx, hook);
        } else {
            at = &hook->next;
        }
    }
    while (*list) list = &(*list)->next; /* those added meanwhile */
    *list = reversed(first);
    return status;
}
