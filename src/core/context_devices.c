/* context_devices.c - the devices of a context: opened when first named, with memory that is counted. */
#include "context.h"

#include "profile.h"

#include <stdio.h>

static void *lend_scratch(te_exec *exec, size_t bytes)
{
    te_device *device = exec->owner;
    te_block *block = te_device_alloc(device, bytes);
    if (!block) {
        exec->refused = te_exec_fail(exec, device->ctx->status, "%s", device->ctx->message);
        return NULL;
    }
    block->next = device->allocator.scratch;
    device->allocator.scratch = block;
    return block->ptr;
}

static void take_scratch(te_exec *exec, void *ptr)
{
    te_device *device = exec->owner;
    for (te_block **link = &device->allocator.scratch; *link; link = &(*link)->next) {
        te_block *block = *link;
        if (block->ptr != ptr) continue;
        *link = block->next;
        te_allocator_free(&device->allocator, block);
        return;
    }
}

static te_device *open_device(te_context *ctx, te_device *device, const te_backend *backend, const char *name,
                              int index)
{
    te_exec *exec = &device->exec;
    device->ctx = ctx;
    snprintf(device->name, sizeof device->name, "%s", name);
    *exec = (te_exec){.backend = backend,
                      .mem = &ctx->mem,
                      .threads = ctx->threads,
                      .tf32 = ctx->tf32,
                      .any_order = ctx->any_order,
                      .interrupt = &ctx->interrupted,
                      .scratch = lend_scratch,
                      .scratch_free = take_scratch,
                      .owner = device};
    enum { HOST_IDLE = 64 << 20 };
    size_t idle = backend == &te_backend_cpu ? HOST_IDLE : SIZE_MAX; /* nobody else wants a device's memory */
    te_allocator_open(&device->allocator, exec, ctx->tensor_memory_limit, idle);
    te_status status = backend->device_open(exec, index);
    if (status != TE_OK) {
        te_fail(ctx, status, "%s: %s", name, exec->message);
        return NULL;
    }
    device->open = true;
    te_profile_device(device);
    return device;
}

/* "cuda" and "cuda:N": N, at most TE_MAX_DEVICES - 2; -1 for anything else. */
static int cuda_index(const char *name)
{
    if (strncmp(name, "cuda", 4) != 0) return -1;
    if (!name[4]) return 0;
    bool one_digit = name[4] == ':' && name[5] >= '0' && name[5] <= '9' && !name[6];
    return one_digit && name[5] - '0' < TE_MAX_DEVICES - 1 ? name[5] - '0' : -1;
}

static te_device *open_cuda(te_context *ctx, int index)
{
    te_device *device = &ctx->devices[1 + index];
    char name[sizeof device->name];
    if (device->open) return device;
    te_exec opening = {.mem = &ctx->mem};
    snprintf(name, sizeof name, "cuda:%d", index);
    if (index == 0) name[4] = 0;
    te_status status = te_device_module_open(&ctx->cuda, &opening);
    if (status == TE_OK) return open_device(ctx, device, ctx->cuda.table->backend, name, index);
    te_fail(ctx, status, "%s: %s", name, opening.message);
    return NULL;
}

int te_context_cuda_devices(te_context *ctx)
{
    te_exec opening = {.mem = &ctx->mem};
    te_status status = te_device_module_open(&ctx->cuda, &opening);
    int n = status == TE_OK ? ctx->cuda.table->device_count(&opening) : 0;
    if (n == 0) te_fail(ctx, TE_ERROR_UNSUPPORTED, "%s", opening.message);
    return n < TE_MAX_DEVICES - 1 ? n : TE_MAX_DEVICES - 1;
}

te_device *te_context_device(te_context *ctx, const char *name)
{
    if (!name || strcmp(name, "cpu") == 0 || strcmp(name, "cpu:0") == 0) {
        te_device *cpu = &ctx->devices[0];
        return cpu->open ? cpu : open_device(ctx, cpu, &te_backend_cpu, "cpu", 0);
    }
    int index = cuda_index(name);
    if (index >= 0) return open_cuda(ctx, index);
    te_fail(ctx, TE_ERROR_ARGUMENT,
            "device \"%.40s\": no such device; known are \"cpu\", \"cuda\" and \"cuda:1\" to \"cuda:%d\"", name,
            TE_MAX_DEVICES - 2);
    return NULL;
}

/* What the engine keeps beside tensors concerns a limit alone. A 0 with precision 0 prints nothing. */
static void fail_room(te_device *device, size_t bytes)
{
    const te_allocator *a = &device->allocator;
    te_fail(device->ctx, TE_ERROR_MEMORY, "out of memory: %zu bytes asked on %s, %zu in use, %s%.0zu", bytes,
            device->name, a->current + (a->limit ? a->beside : 0), a->limit ? "limit " : "no limit", a->limit);
}

/* Has the host let go of what nobody uses any more. False: it is at it, or there is nobody to ask. */
static bool relieve(te_context *ctx)
{
    if ((!ctx->reclaim && !ctx->collect) || ctx->reclaiming) return false;
    ctx->reclaiming = true;
    if (ctx->reclaim) ctx->reclaim(ctx->reclaim_user);
    if (ctx->collect) ctx->collect(ctx->collect_user);
    ctx->reclaiming = false;
    return true;
}

te_block *te_device_alloc(te_device *device, size_t bytes)
{
    te_context *ctx = device->ctx;
    device->exec.message[0] = 0; /* a backend says there when it was not memory that was missing */
    te_block *block = te_allocator_alloc(&device->allocator, bytes);
    if (!block && relieve(ctx)) block = te_allocator_alloc(&device->allocator, bytes);
    if (!block) ctx->limit_refused = te_allocator_limits(&device->allocator, bytes);
    if (!block && device->exec.message[0])
        te_fail(ctx, TE_ERROR_DEVICE, "%s: %s", device->name, device->exec.message);
    else if (!block)
        fail_room(device, bytes);
    return block;
}

/* Counts memory beside the allocator's towards the device's limit; false: none is left. */
static bool count_memory(te_device *device, size_t bytes)
{
    if (te_allocator_count(&device->allocator, bytes)) return true;
    if (relieve(device->ctx) && te_allocator_count(&device->allocator, bytes)) return true;
    device->ctx->limit_refused = true;
    fail_room(device, bytes);
    return false;
}

bool te_context_count(te_context *ctx, size_t bytes)
{
    te_device *cpu = ctx->devices[0].open ? &ctx->devices[0] : te_context_device(ctx, "cpu");
    return cpu && count_memory(cpu, bytes);
}

void te_context_discount(te_context *ctx, size_t bytes)
{
    te_allocator_discount(&ctx->devices[0].allocator, bytes);
}

void te_device_close(te_device *device)
{
    if (!device->open) return;
    te_allocator_close(&device->allocator);
    if (device->skipped_amaxes)
        device->exec.backend->memory_free(&device->exec, device->skipped_amaxes, sizeof *device->skipped_amaxes);
    device->exec.backend->device_close(&device->exec);
    device->open = false;
}

te_status te_context_memory(te_context *ctx, const char *name, te_memory_stats *stats)
{
    if (stats) *stats = (te_memory_stats){0};
    if (!ctx) return TE_ERROR_ARGUMENT;
    if (!stats) return te_fail(ctx, TE_ERROR_ARGUMENT, "te_context_memory: stats is NULL");
    te_device *device = te_context_device(ctx, name);
    if (!device) return ctx->status;
    const te_allocator *a = &device->allocator;
    *stats = (te_memory_stats){a->current, a->peak, a->reserved, a->allocations};
    return TE_OK;
}

te_status te_context_synchronize(te_context *ctx, const char *name)
{
    if (!ctx) return TE_ERROR_ARGUMENT;
    te_device *wanted = name ? te_context_device(ctx, name) : NULL;
    if (name && !wanted) return ctx->status;
    for (int i = 0; i < TE_MAX_DEVICES; i++) {
        te_device *device = &ctx->devices[i];
        if (!device->open || (wanted && device != wanted)) continue;
        te_status status = device->exec.backend->synchronize(&device->exec);
        if (status != TE_OK) return te_fail(ctx, status, "%s: %s", device->name, device->exec.message);
    }
    return TE_OK;
}

void te_context_reset_peak(te_context *ctx)
{
    for (int i = 0; ctx && i < TE_MAX_DEVICES; i++)
        ctx->devices[i].allocator.peak = ctx->devices[i].allocator.current;
}

void te_context_empty_cache(te_context *ctx)
{
    for (int i = 0; ctx && i < TE_MAX_DEVICES; i++)
        if (ctx->devices[i].open) te_allocator_empty_cache(&ctx->devices[i].allocator);
}
