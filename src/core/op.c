/* op.c - the registry, and running an operation; op_signature.c reads declarations and takes arguments. */
#include "op.h"

#include "quantized_parameter.h"

#include "autograd.h"
#include "kernels/float_mode.h"
#include "kernels/numerals.h"
#include "ops/ops.h"

/* --- registry ----------------------------------------------------------------------------------------------------- */

static unsigned hash_of(const char *name)
{
    uint32_t h = 2166136261u; /* FNV-1a */
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 16777619u;
    return (h ^ h >> 15) % TE_OP_HASHES;
}

static void enter_op(te_context *ctx, te_op *op)
{
    te_op **end = &ctx->ops_by_name[hash_of(op->name)];
    while (*end) end = &(*end)->next; /* of two with one name the first is found */
    *end = op;
}

te_status te_ops_open(te_context *ctx)
{
    int n = 0;
    for (const te_op_group *group = te_op_groups; group->name; group++)
        for (const te_op_def *def = group->ops; def->signature; def++) n++;
    ctx->ops = te_mem_zalloc(&ctx->mem, (size_t)n * sizeof *ctx->ops);
    if (!ctx->ops) return te_fail_memory(ctx, "te_context_open");
    ctx->n_ops = n;
    te_op *op = ctx->ops;
    for (const te_op_group *group = te_op_groups; group->name; group++) {
        for (const te_op_def *def = group->ops; def->signature; def++, op++) {
            te_status status = te_op_parse(ctx, def, op);
            if (status != TE_OK) return status;
            op->group = group->name;
            enter_op(ctx, op);
        }
    }
    return TE_OK;
}

void te_ops_close(te_context *ctx)
{
    te_variants_close(ctx);
    if (ctx->ops) te_mem_free(&ctx->mem, ctx->ops, (size_t)ctx->n_ops * sizeof *ctx->ops);
    ctx->ops = NULL;
    memset(ctx->ops_by_name, 0, sizeof ctx->ops_by_name);
}

const te_op *te_op_find(te_context *ctx, const char *name)
{
    if (!ctx) return NULL;
    for (const te_op *op = name ? ctx->ops_by_name[hash_of(name)] : NULL; op; op = op->next)
        if (strcmp(op->name, name) == 0) return op;
    te_fail(ctx, TE_ERROR_ARGUMENT, "no operation \"%s\"", name ? name : "NULL");
    return NULL;
}

bool te_op_is_of(const te_context *ctx, const te_op *op)
{
    return op->group ? op >= ctx->ops && op < ctx->ops + ctx->n_ops : te_op_definer(op) == ctx;
}

const te_op *te_op_at(te_context *ctx, int i) { return ctx && i >= 0 && i < ctx->n_ops ? &ctx->ops[i] : NULL; }
const char *te_op_name(const te_op *op) { return op ? op->name : NULL; }
const char *te_op_signature(const te_op *op) { return op ? op->def->signature : NULL; }
const char *te_op_doc(const te_op *op) { return op ? op->def->doc : NULL; }

/* --- calls -------------------------------------------------------------------------------------------------------- */

te_status te_call_fail(te_call *call, te_status status, const char *format, ...)
{
    char text[768];
    va_list args;
    va_start(args, format);
    te_vsnprintf(text, sizeof text, format, args);
    va_end(args);
    /* what stands behind te.softmax along other dimensions is softmax_row, and norm2_row behind te.norm */
    const char *title = call->op->def->title ? call->op->def->title(call) : NULL;
    if (title) return te_fail(call->ctx, status, "%s: %s", title, text);
    const char *name = call->op->name, *row = strstr(name, "_row");
    int length = row && !row[4] ? (int)(row - name) : (int)strlen(name);
    while (length > 1 && row && name[length - 1] >= '0' && name[length - 1] <= '9') length--;
    return te_fail(call->ctx, status, "te.%.*s: %s", length, name, text);
}

te_status te_call_kernel(te_call *call, te_exec *exec, te_status status)
{
    return status == TE_OK ? TE_OK : te_fail_exec(call->ctx, status, exec, call->op->name);
}

te_exec *te_call_exec(te_call *call, const te_tensor *t)
{
    (void)call;
    return &t->storage->device->exec;
}

te_dtype te_call_compute_dtype(const te_call *call, te_dtype otherwise)
{
    bool castable = otherwise == TE_F32 || otherwise == TE_BF16 || otherwise == TE_F16;
    return castable && call->ctx->compute_dtype != TE_DTYPE_COUNT ? call->ctx->compute_dtype : otherwise;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

static te_tensor **call_inputs(te_call *call, int *n)
{
    *n = call->op->takes_list ? call->n_list : call->op->n_inputs;
    return call->op->takes_list ? call->list : call->in;
}

/* All inputs on one device; some input wants a gradient. */
static te_status check_inputs(te_call *call)
{
    int n;
    te_tensor **inputs = call_inputs(call, &n);
    const te_device *device = NULL;
    bool needs_grad = false;
    for (int i = 0; i < n; i++) {
        te_tensor *t = inputs[i];
        if (!t) continue;
        if (t->ctx != call->ctx) return te_call_fail(call, TE_ERROR_ARGUMENT, "a tensor of another runtime was given");
        if (device && t->storage->device != device && !(call->op->def->flags & TE_OP_ACROSS))
            return te_call_fail(call, TE_ERROR_ARGUMENT, "tensors on different devices: %s and %s", device->name,
                                t->storage->device->name);
        if (!device) device = t->storage->device;
        needs_grad |= te_needs_grad(t);
    }
    call->record = needs_grad && call->ctx->grad_enabled && !(call->op->def->flags & TE_OP_NOGRAD);
    call->ctx->gradient_uses += needs_grad;
    return TE_OK;
}

static void drop_call(te_call *call)
{
    for (int i = 0; i < call->n_saved; i++) te_tensor_release(call->saved[i]);
    if (call->release) call->release(call);
    call->n_saved = 0;
    call->release = NULL;
    for (int i = 0; i < TE_OP_MAX_OUTPUTS; i++) {
        te_tensor_release(call->out[i]);
        call->out[i] = NULL;
    }
}

/* Runs the op that a call stands for. */
static te_status run_resolved(te_call *call)
{
    te_delegate to = {.name = NULL};
    te_status status = call->op->def->resolve(call, &to);
    if (status != TE_OK) return status;
    if (!to.name) return te_call_result(call, te_tensor_retain(call->in[0]));
    te_arg args[TE_OP_MAX_INPUTS + 4] = {{.kind = TE_ARG_ABSENT}};
    int n = 0;
    for (int i = 0; i < call->op->n_inputs; i++, n++)
        if (call->in[i]) args[n] = TE_A_TENSOR(call->in[i]);
    for (int i = 0; i < to.n; i++) args[n++] = TE_A_NUMBER(to.attrs[i]);
    return te_call_delegate(call, to.name, n, args);
}

static te_status run_forward(te_call *call)
{
    const te_op_def *def = call->op->def;
    te_status status = def->check ? def->check(call) : TE_OK;
    if (status == TE_OK && def->check_inputs) status = def->check_inputs(call);
    if (status != TE_OK) return status;
    status = def->resolve ? run_resolved(call) : def->formula ? te_program_op_forward(call) : def->forward(call);
    return status == TE_OK && def->after ? def->after(call) : status;
}

/* What an operation inside, or nobody by name, has to say is told under the name that the caller used. An interrupt
 * that came before any kernel ran concerns none. */
static te_status name_outer(te_context *ctx, te_status status, const te_op *op, const char *form)
{
    const char *inner = ctx->message + 3, *rest = strchr(ctx->message, ':');
    bool        named = strncmp(ctx->message, "te.", 3) == 0;
    if (!named && status == TE_ERROR_INTERRUPTED) return status;
    if (!named) return te_fail(ctx, status, "te.%s%s: %s", op->name, form, ctx->message);
    if (!rest) return status;
    size_t n = (size_t)(rest - inner);
    for (int i = 0; i < ctx->n_ops; i++)
        if (strlen(ctx->ops[i].name) == n && memcmp(ctx->ops[i].name, inner, n) == 0)
            return te_fail(ctx, status, "te.%s%s%s", op->name, form, rest);
    return status;
}

static te_status run_call(te_call *call)
{
    te_status status = te_context_poll(call->ctx);
    if (status == TE_OK) status = run_forward(call);
    if (status == TE_OK && call->record) {
        int n;
        te_tensor **inputs = call_inputs(call, &n);
        status = te_autograd_record(call, inputs, n); /* takes over what was saved */
    }
    if (status == TE_OK) return TE_OK;
    drop_call(call);
    return name_outer(call->ctx, status, call->op, "");
}

/* Parameters that are stored quantized take part with their values; `opened` holds those, by position. */
static te_status open_inputs(te_call *call, te_tensor **opened)
{
    int n;
    te_tensor **inputs = call_inputs(call, &n);
    if (call->op->def->flags & TE_OP_QUANTIZED) return TE_OK;
    for (int i = 0; i < n; i++) {
        if (!inputs[i] || !te_tensor_is_quantized(inputs[i])) continue;
        if (call->op->takes_list)
            return te_call_fail(call, TE_ERROR_UNSUPPORTED,
                                "tensor %lld of the list is stored quantized; give its clone()",
                                te_counted(call->ctx, i));
        opened[i] = te_tensor_plain(inputs[i]);
        if (!opened[i]) return call->ctx->status;
        inputs[i] = opened[i];
    }
    return TE_OK;
}

static void close_inputs(te_tensor **opened)
{
    for (int i = 0; i < TE_OP_MAX_INPUTS; i++) te_tensor_release(opened[i]);
}

/* What comes from another device carries no gradient back, so it must not lose one either. */
static te_status check_graph_goes_on(te_call *call)
{
    const te_op *op = call->op;
    for (int i = 0; i < op->n_params && op->def->flags & TE_OP_ACROSS && call->ctx->grad_enabled; i++) {
        const te_param *p = &op->params[i];
        const te_tensor *t = p->type == TE_TYPE_TENSOR && p->slot > 0 ? call->in[p->slot] : NULL;
        if (t && te_needs_grad(t))
            return te_call_fail(call, TE_ERROR_ARGUMENT,
                                "%s takes part in gradients, which this does not carry; use te.no_grad, %s:detach(), "
                                "or %s:to(…)",
                                p->name, p->name, p->name);
    }
    return TE_OK;
}

te_status te_call_run_op(te_call *call)
{
    te_tensor *opened[TE_OP_MAX_INPUTS] = {NULL};
    te_status status = check_inputs(call);
    if (status == TE_OK) status = check_graph_goes_on(call);
    if (status == TE_OK) status = open_inputs(call, opened);
    if (status == TE_OK) status = run_call(call);
    close_inputs(opened);
    return status;
}

/* Of an operation in place without what it writes to. */
static te_status check_replayed(te_context *ctx, const te_arg *args, int n_args, bool inplace)
{
    te_status status = TE_OK;
    for (int i = inplace; i < n_args && status == TE_OK; i++) {
        if (args[i].kind == TE_ARG_TENSOR) status = te_replay_check(ctx, &args[i].as.tensor, 1);
        if (args[i].kind == TE_ARG_TENSORS) status = te_replay_check(ctx, args[i].as.tensors, args[i].n);
    }
    return status;
}

static te_status run_op(te_context *ctx, const te_op *op, const te_arg *args, int n_args, te_tensor **out, int n_out)
{
    te_status status;
    for (int i = 0; out && i < n_out; i++) out[i] = NULL;
    if (!ctx) return TE_ERROR_ARGUMENT;
    if (!op) { /* as te_op_find gave it, whose message is the better one */
        bool named = strncmp(ctx->message, "no operation ", 13) == 0;
        return te_fail(ctx, TE_ERROR_ARGUMENT, "%s", named ? ctx->message : "te_op_run: the operation is NULL");
    }
    if (!te_op_is_of(ctx, op))
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te_op_run: te.%s is an operation of another context", op->name);
    if ((n_args > 0 && !args) || (n_out > 0 && !out))
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te_op_run: te.%s: %d arguments%s, %d results%s", op->name, n_args,
                       args ? "" : " at NULL", n_out, out ? "" : " at NULL");
    if (te_replays(ctx) && (status = check_replayed(ctx, args, n_args, false)) != TE_OK) return status;
    if (op->simple && n_out == 1 && te_program_op_quick(ctx, op, args, n_args, out, &status)) return status;
    te_call call = {.ctx = ctx, .op = op};
    status = te_call_arguments(&call, args, n_args);
    if (status == TE_OK) status = te_call_run_op(&call);
    if (status != TE_OK) return status;
    for (int i = 0; i < op->n_outputs; i++) {
        if (i < n_out)
            out[i] = call.out[i];
        else
            te_tensor_release(call.out[i]);
    }
    return TE_OK;
}

te_status te_op_run(te_context *ctx, const te_op *op, const te_arg *args, int n_args, te_tensor **out, int n_out)
{
    te_float_mode mode = te_float_mode_begin(); /* of what is computed here: numbers that programs hold */
    te_status     status = run_op(ctx, op, args, n_args, out, n_out);
    te_float_mode_end(&mode);
    return status;
}

/* A write in place is not recorded, so it must not lose a gradient. A leaf may be filled from elsewhere: what it was
 * then counts for nothing. */
static te_status check_graph_stays(te_call *call)
{
    const te_op *op = call->op;
    bool overwrites = op->def->flags & TE_OP_NOGRAD;
    if (!call->ctx->grad_enabled) return TE_OK;
    for (int i = 0; i < op->n_params; i++) {
        const te_param *p = &op->params[i];
        const te_tensor *t = p->type == TE_TYPE_TENSOR ? call->in[p->slot] : NULL;
        bool is_target = t == call->in[0];
        if (!t || !te_needs_grad(t) || (is_target && !t->node && overwrites)) continue;
        return te_call_fail(call, TE_ERROR_ARGUMENT,
                            "%s takes part in gradients, which a write in place does not carry; use te.no_grad, %s%s",
                            p->name, is_target ? "or the form without underscore" : p->name,
                            is_target ? "" : ":detach()");
    }
    return TE_OK;
}

static te_status run_inplace(te_context *ctx, const te_op *op, const te_arg *args, int n_args)
{
    te_call call = {.ctx = ctx, .op = op};
    te_status status = te_replays(ctx) ? check_replayed(ctx, args, n_args, true) : TE_OK;
    if (status == TE_OK) status = te_call_arguments(&call, args, n_args);
    if (status == TE_OK && !(op->def->flags & TE_OP_INPLACE))
        return te_call_fail(&call, TE_ERROR_ARGUMENT, "there is no form in place");
    if (status == TE_OK) status = check_inputs(&call);
    if (status == TE_OK && !call.in[0])
        status = te_call_fail(&call, TE_ERROR_ARGUMENT, "the form in place needs a tensor as first argument");
    const char *why = status == TE_OK ? te_tensor_unwritable(call.in[0]) : NULL;
    if (why) status = te_call_fail(&call, TE_ERROR_ARGUMENT, "%s", why);
    if (status == TE_OK) status = check_graph_stays(&call);
    if (status != TE_OK) return status;
    te_tensor *target = call.in[0], *opened[TE_OP_MAX_INPUTS] = {NULL};
    status = open_inputs(&call, opened);
    if (opened[0]) opened[0]->storage->read_only = TE_WRITABLE; /* they are stored again */
    call.inplace = call.in[0];
    if (status == TE_OK) status = run_call(&call);
    if (status == TE_OK) te_tensor_release(call.out[0]);
    if (status == TE_OK && opened[0]) status = te_quantized_parameter_store(target, opened[0]);
    close_inputs(opened);
    return status;
}

te_status te_op_run_inplace(te_context *ctx, const te_op *op, const te_arg *args, int n_args)
{
    te_float_mode mode = te_float_mode_begin();
    te_status     status = run_inplace(ctx, op, args, n_args);
    te_float_mode_end(&mode);
    return status == TE_OK ? TE_OK : name_outer(ctx, status, op, "_");
}

te_tensor *te_op_apply(te_context *ctx, const char *name, int n, te_tensor *const *in)
{
    const te_op *op = te_op_find(ctx, name);
    te_arg args[TE_OP_MAX_INPUTS + TE_OP_MAX_ATTRS] = {{.kind = TE_ARG_ABSENT}};
    te_tensor *out = NULL;
    if (!op) return NULL;
    for (int i = 0; i < n; i++)
        if (in[i]) args[i] = (te_arg){.kind = TE_ARG_TENSOR, .as.tensor = in[i]};
    te_op_run(ctx, op, args, n, &out, 1);
    return out;
}

te_status te_call_result(te_call *call, te_tensor *result)
{
    call->out[0] = result;
    call->record = false; /* what it was made of is in the graph already */
    return result ? TE_OK : call->ctx->status;
}

te_status te_call_delegate(te_call *call, const char *name, int n_args, const te_arg *args)
{
    const te_op *op = te_op_find(call->ctx, name);
    if (!op) return call->ctx->status;
    call->record = false;
    return te_op_run(call->ctx, op, args, n_args, call->out, op->n_outputs);
}

int te_call_save(te_call *call, te_tensor *t)
{
    if (call->n_saved == TE_OP_MAX_SAVED) {
        te_call_fail(call, TE_ERROR_INTERNAL, "more than %d tensors saved for backward", TE_OP_MAX_SAVED);
        return -1;
    }
    call->saved[call->n_saved] = te_tensor_retain(t);
    call->saved_version[call->n_saved] = t ? te_storage_writes(t->storage) : 0;
    return call->n_saved++;
}
