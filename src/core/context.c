/* context.c - life of a context, its messages, settings and random state. */
#include "context.h"

#include "autocast.h"
#include "graph.h"
#include "kernels/cores.h"
#include "kernels/float_mode.h"
#include "kernels/numerals.h"
#include "op.h"
#include "tensor.h"

#define TE_VERSION_TEXT "0.1.0"

const char *te_version(void) { return TE_VERSION_TEXT; }

/* --- messages ----------------------------------------------------------------------------------------------------- */

te_status te_fail(te_context *ctx, te_status status, const char *format, ...)
{
    char text[sizeof ctx->message]; /* the arguments may point into the old message */
    va_list args;
    va_start(args, format);
    te_vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(ctx->message, text, sizeof text);
    ctx->status = status;
    if (status == TE_ERROR_MEMORY) te_context_empty_host_cache(ctx);
    return status;
}

te_status te_fail_exec(te_context *ctx, te_status status, te_exec *exec, const char *op)
{
    const char *message = exec->message[0]            ? exec->message
                          : status == TE_ERROR_MEMORY ? "out of host memory"
                                                      : "the kernel failed";
    size_t      n = op ? strlen(op) : 0;
    if (status == TE_ERROR_MEMORY && exec->refused != TE_OK) status = exec->refused;
    /* a kernel named the operation */
    if (op && strncmp(message, op, n) == 0 && strncmp(message + n, ": ", 2) == 0) message += n + 2;
    te_fail(ctx, status, "%s%s%s%s", op ? "te." : "", op ? op : "", op ? ": " : "", message);
    exec->message[0] = 0;
    exec->refused = TE_OK;
    return status;
}

te_status te_fail_memory(te_context *ctx, const char *what)
{
    return te_fail(ctx, TE_ERROR_MEMORY, "%s: out of host memory", what);
}

const char *te_context_error(const te_context *ctx) { return ctx ? ctx->message : "there is no context"; }

static int thread_count(int asked)
{
    if (asked <= 0) return te_cores_wanted();
    return asked < TE_MAX_THREADS ? asked : TE_MAX_THREADS;
}

/* --- life --------------------------------------------------------------------------------------------------------- */

te_context *te_context_open(const te_context_options *options)
{
    te_context_options o = {0};
    if (options && !options->struct_size) return NULL; /* forgotten: limits would go unseen */
    if (options) te_copy_fields(&o, options, options->struct_size, sizeof o);
    te_mem mem = te_mem_libc;
    if (o.realloc) mem = (te_mem){o.realloc, o.realloc_user};
    te_context *ctx = te_mem_zalloc(&mem, sizeof *ctx);
    if (!ctx) return NULL;
    ctx->mem = mem;
    ctx->refs = 1;
    te_context_set_threads(ctx, o.threads);
    ctx->tensor_memory_limit = o.tensor_memory_limit;
    ctx->grad_enabled = true;
    ctx->recompute_width = 256; /* computing a GELU again for 128 columns is 2 % of a step, for 256 it is lost in the
                                   noise */
    ctx->compute_dtype = TE_DTYPE_COUNT;
    ctx->clock = 1;
    ctx->replayed_since = UINT64_MAX;
    te_float_mode mode = te_float_mode_begin();
    te_status     status = te_ops_open(ctx);
    te_float_mode_end(&mode);
    if (status != TE_OK) {
        te_context_release(ctx);
        return NULL;
    }
    return ctx;
}

void te_context_unref(te_context *ctx)
{
    if (--ctx->refs > 0) return;
    te_mem mem = ctx->mem;
    te_ops_close(ctx);
    te_tensor_pool_close(ctx);
    te_mem_free(&mem, ctx->recorded_scales.uses, ctx->recorded_scales.capacity * sizeof(te_scale_use));
    te_mem_free(&mem, ctx->replayed_scales.uses, ctx->replayed_scales.capacity * sizeof(te_scale_use));
    for (int i = TE_MAX_DEVICES - 1; i >= 0; i--) te_device_close(&ctx->devices[i]);
    te_device_module_close(&ctx->cuda);
    te_mem_free(&mem, ctx, sizeof *ctx);
}

void te_context_release(te_context *ctx)
{
    if (!ctx) return;
    ctx->reclaim = NULL;
    te_scopes_close(ctx); /* scopes hold recipes, and these the context */
    te_context_unref(ctx);
}

/* --- settings ----------------------------------------------------------------------------------------------------- */

void te_context_interrupt(te_context *ctx)
{
    if (ctx) atomic_fetch_or(&ctx->interrupted, TE_INTERRUPT_WORK);
}

void te_context_clear_interrupt(te_context *ctx)
{
    if (ctx) ctx->interrupted = 0;
}

te_status te_context_poll(te_context *ctx)
{
    return ctx->interrupted ? te_fail(ctx, TE_ERROR_INTERRUPTED, "interrupted") : TE_OK;
}

void te_context_set_threads(te_context *ctx, int threads)
{
    if (!ctx) return;
    ctx->threads = thread_count(threads);
    ctx->threads_told = threads > 0;
    for (int i = 0; i < TE_MAX_DEVICES; i++) ctx->devices[i].exec.threads = ctx->threads;
}

int te_context_threads(const te_context *ctx) { return ctx ? ctx->threads : 0; }

void te_context_set_tf32(te_context *ctx, bool on)
{
    if (!ctx) return;
    ctx->tf32 = on;
    for (int i = 0; i < TE_MAX_DEVICES; i++) ctx->devices[i].exec.tf32 = on;
}

bool te_context_tf32(const te_context *ctx) { return ctx && ctx->tf32; }

void te_context_set_any_order(te_context *ctx, bool on)
{
    if (!ctx) return;
    ctx->any_order = on;
    for (int i = 0; i < TE_MAX_DEVICES; i++) ctx->devices[i].exec.any_order = on;
}

bool te_context_any_order(const te_context *ctx) { return ctx && ctx->any_order; }

void te_context_on_memory_pressure(te_context *ctx, void (*reclaim)(void *user), void *user)
{
    if (!ctx) return;
    ctx->reclaim = reclaim;
    ctx->reclaim_user = user;
}

void te_context_seed(te_context *ctx, uint64_t seed)
{
    if (ctx && ctx->capture) te_graph_spoil(ctx->capture, "a seed of random numbers"); /* its launches draw on */
    te_context_set_rng_state(ctx, seed, 0);
}

void te_context_rng_state(const te_context *ctx, uint64_t *seed, uint64_t *offset)
{
    if (seed) *seed = ctx ? ctx->seed : 0;
    if (offset) *offset = ctx ? ctx->rng_offset : 0;
}

void te_context_set_rng_state(te_context *ctx, uint64_t seed, uint64_t offset)
{
    if (!ctx) return;
    if (ctx->capture && seed != ctx->seed) te_graph_spoil(ctx->capture, "another seed of random numbers");
    ctx->seed = seed;
    ctx->rng_offset = offset;
}

te_rng te_context_draw(te_context *ctx, uint64_t words)
{
    te_rng rng = {.seed = ctx->seed, .stream = 0, .offset = ctx->rng_offset};
    ctx->rng_offset += (words + 3) / 4;
    return ctx->capture ? te_graph_draw(ctx->capture, rng) : rng;
}

bool te_context_set_grad_enabled(te_context *ctx, bool enabled)
{
    if (!ctx) return false;
    bool before = ctx->grad_enabled;
    ctx->grad_enabled = enabled;
    return before;
}

bool te_context_grad_enabled(const te_context *ctx) { return ctx && ctx->grad_enabled; }

te_dtype te_context_set_compute_dtype(te_context *ctx, te_dtype dtype)
{
    if (!ctx) return TE_DTYPE_COUNT;
    te_dtype before = ctx->compute_dtype;
    if (dtype == TE_DTYPE_COUNT || te_dtype_has_gradient(dtype)) ctx->compute_dtype = dtype;
    return before;
}
