/* tensor_transfer.c - values that cross from the host to a device, back, or between devices. */
#include "ops/ops.h"
#include "quantized_parameter.h"
#include "tensor.h"

/* --- constants ---------------------------------------------------------------------------------------------------- */

static const te_utility fill_program = {
    .name = "fill", .inputs = "", .params = "value", .outputs = "y", .formula = "y = value"};

/* A device makes the constant itself: the host has no address that it could read. */
static te_status fill_on_device(te_tensor *t, double value)
{
    te_context *ctx = t->ctx;
    te_exec *exec = &t->storage->device->exec;
    te_program *program = te_utility_program(ctx, &fill_program);
    if (!program) return ctx->status;
    te_operand out = {.data = te_tensor_pointer(t), .dtype = t->dtype};
    te_run run = {.ndim = t->ndim ? t->ndim : 1, .outputs = &out, .params = &value};
    run.compute_f64 = true; /* so it is rounded once */
    run.shape[0] = out.stride[0] = 1;
    memcpy(run.shape, t->shape, (size_t)t->ndim * sizeof *t->shape);
    memcpy(out.stride, t->stride, (size_t)t->ndim * sizeof *t->stride);
    te_status status = exec->backend->program_run(exec, program, &run, 1);
    return status == TE_OK ? TE_OK : te_fail_exec(ctx, status, exec, "fill");
}

static te_status fill_quantized(te_tensor *t, double value)
{
    te_tensor *values = te_tensor_new_like(t);
    te_status status = values ? te_tensor_fill(values, value) : t->ctx->status;
    if (status == TE_OK) status = te_quantized_parameter_store(t, values);
    te_tensor_release(values);
    return status;
}

enum { SHARED_FROM = 1 << 20 }; /* bytes of zeros that are left to the backend and its threads */

te_status te_tensor_fill(te_tensor *t, double value)
{
    if (te_tensor_is_quantized(t)) return fill_quantized(t, value);
    te_exec *exec = &t->storage->device->exec;
    te_view dst = te_tensor_view(t);
    te_view src = {.data = &value, .dtype = TE_F64, .ndim = t->ndim};
    memcpy(src.shape, t->shape, sizeof src.shape);
    te_tensor_written(t);
    if (!exec->backend->host_memory) return fill_on_device(t, value);
    if (value == 0.0 && !__builtin_signbit(value) && te_tensor_contiguous(t)) {
        size_t bytes = (size_t)te_tensor_numel(t) * te_dtype_size(t->dtype);
        if (bytes && bytes < SHARED_FROM) memset(dst.data, 0, bytes);
        if (bytes < SHARED_FROM) return TE_OK;
    }
    te_status status = exec->backend->copy(exec, &dst, &src);
    return status == TE_OK ? TE_OK : te_fail_exec(t->ctx, status, exec, "fill");
}

/* --- between devices ---------------------------------------------------------------------------------------------- */

/* The bytes of a dense tensor into a dense one on another device. Either side's earlier work has finished when they
 * move, except that of the device which copies: its own order keeps that right. */
static te_status move_bytes(te_tensor *dst, const te_tensor *src)
{
    te_exec *to = &dst->storage->device->exec, *from = &src->storage->device->exec;
    te_exec *mover = from->backend->host_memory ? to : from;
    te_copy_kind kind = from->backend->host_memory ? TE_COPY_HOST_TO_DEVICE
                        : to->backend->host_memory ? TE_COPY_DEVICE_TO_HOST
                                                   : TE_COPY_DEVICE_TO_DEVICE;
    size_t bytes = (size_t)te_tensor_numel(src) * te_dtype_size(src->dtype);
    te_status status = mover == from ? to->backend->synchronize(to) : TE_OK;
    if (status != TE_OK) return te_fail_exec(dst->ctx, status, to, "copy_");
    status = mover->backend->memory_copy(mover, te_tensor_pointer(dst), te_tensor_pointer(src), bytes, kind);
    if (status == TE_OK && mover == from) status = mover->backend->synchronize(mover);
    return status == TE_OK ? TE_OK : te_fail_exec(dst->ctx, status, mover, "copy_");
}

te_status te_tensor_copy_across(te_tensor *dst, te_tensor *src)
{
    te_tensor *dense = te_tensor_contiguous_copy(src);
    if (!dense) return dst->ctx->status;
    bool direct = te_tensor_contiguous(dst) && dst->dtype == src->dtype && te_same_shape(dst, src);
    te_tensor *landed = direct ? te_tensor_retain(dst)
                               : te_tensor_new(dst->ctx, dst->storage->device, src->dtype, src->ndim, src->shape);
    if (landed && direct) te_tensor_written(dst); /* also where only some of it arrives */
    te_status status = landed ? move_bytes(landed, dense) : dst->ctx->status;
    if (status == TE_OK && !direct) status = te_tensor_copy_data(dst, landed);
    te_tensor_release(landed);
    te_tensor_release(dense);
    return status;
}

te_tensor *te_tensor_on_device(te_tensor *t, te_device *device)
{
    if (t->storage->device == device) return te_tensor_retain(t);
    te_tensor *there = te_tensor_new(t->ctx, device, t->dtype, t->ndim, t->shape);
    if (!there || te_tensor_copy_across(there, t) == TE_OK) return there;
    te_tensor_release(there);
    return NULL;
}

/* --- host memory -------------------------------------------------------------------------------------------------- */

/* Moves bytes between host memory of `dtype` and t. */
static te_status transfer(te_tensor *t, te_dtype dtype, void *host, bool to_host)
{
    te_exec *exec = &t->storage->device->exec;
    te_tensor *staged = te_tensor_new(t->ctx, t->storage->device, dtype, t->ndim, t->shape);
    if (!staged) return t->ctx->status;
    size_t bytes = (size_t)te_tensor_numel(t) * te_dtype_size(dtype);
    te_view device_view = te_tensor_view(t), staged_view = te_tensor_view(staged);
    te_status status;
    if (to_host) {
        status = exec->backend->copy(exec, &staged_view, &device_view);
        if (status == TE_OK)
            status = exec->backend->memory_copy(exec, host, staged_view.data, bytes, TE_COPY_DEVICE_TO_HOST);
    } else {
        te_tensor_written(t);
        status = exec->backend->memory_copy(exec, staged_view.data, host, bytes, TE_COPY_HOST_TO_DEVICE);
        if (status == TE_OK) status = exec->backend->copy(exec, &device_view, &staged_view);
    }
    if (status == TE_OK) status = exec->backend->synchronize(exec);
    if (status != TE_OK) te_fail_exec(t->ctx, status, exec, to_host ? "read" : "write");
    te_tensor_release(staged);
    return status;
}

static te_status check_host(te_tensor *t, const char *function, const void *host)
{
    if (!t) return TE_ERROR_ARGUMENT;
    if (host || te_tensor_numel(t) == 0) return TE_OK;
    return te_fail(t->ctx, TE_ERROR_ARGUMENT, "%s: host is NULL for a tensor of %lld elements", function,
                   (long long)te_tensor_numel(t));
}

te_status te_tensor_read(te_tensor *t, te_dtype dtype, void *host)
{
    if (check_host(t, "te_tensor_read", host) != TE_OK) return TE_ERROR_ARGUMENT;
    if (te_tensor_is_quantized(t)) {
        te_tensor *values = te_tensor_dequantized(t);
        te_status status = values ? te_tensor_read(values, dtype, host) : t->ctx->status;
        te_tensor_release(values);
        return status;
    }
    if (t->dtype == dtype && te_tensor_data(t)) {
        size_t bytes = (size_t)te_tensor_numel(t) * te_dtype_size(dtype);
        if (bytes) memcpy(host, te_tensor_data(t), bytes);
        return TE_OK;
    }
    return transfer(t, dtype, host, true);
}

te_status te_tensor_write(te_tensor *t, te_dtype dtype, const void *host)
{
    if (check_host(t, "te_tensor_write", host) != TE_OK) return TE_ERROR_ARGUMENT;
    const char *why = te_tensor_unwritable(t);
    if (why) return te_fail(t->ctx, TE_ERROR_ARGUMENT, "te_tensor_write: %s", why);
    if (te_tensor_is_quantized(t)) {
        te_tensor *values = te_tensor_new_like(t);
        te_status status = values ? te_tensor_write(values, dtype, host) : t->ctx->status;
        if (status == TE_OK) status = te_quantized_parameter_store(t, values);
        te_tensor_release(values);
        return status;
    }
    if (t->dtype == dtype && te_tensor_data(t)) {
        size_t bytes = (size_t)te_tensor_numel(t) * te_dtype_size(dtype);
        if (bytes) memcpy(te_tensor_data(t), host, bytes);
        te_tensor_written(t);
        return TE_OK;
    }
    return transfer(t, dtype, (void *)(uintptr_t)host, false);
}
