/* memory.c - device memory, and copies that pass through pinned memory.
 *
 * The host's memory is pageable, which the device cannot read by itself. Copies go through two pinned stages in turn:
 *
 *      host --memcpy--> stage 0 --stream--> device        while stage 0 is on its way, stage 1 is filled
 *                       stage 1
 *
 * Up, the caller's memory is free again when the last piece lies in a stage; the stream carries it on in order. Down,
 * the call returns when the bytes have arrived.
 *
 * Small copies up, such as the tokens and the learning rate of a training step, have many small stages: the host waits
 * only for the copy so many before, and so runs several steps ahead of the device.
 */
#include "cuda_backend.h"

te_status te_cuda_stages_open(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    CUresult r = CUDA_SUCCESS;
    for (int i = 0; i < TE_CUDA_STAGES && r == CUDA_SUCCESS; i++) {
        r = d->driver.cuMemHostAlloc(&d->stage[i], TE_CUDA_STAGE_BYTES, 0);
        if (r == CUDA_SUCCESS) r = d->driver.cuEventCreate(&d->staged[i], CU_EVENT_DISABLE_TIMING);
    }
    if (r == CUDA_SUCCESS) r = d->driver.cuMemHostAlloc(&d->small, TE_CUDA_STAGE_BYTES, 0);
    for (int i = 0; i < TE_CUDA_SMALL_STAGES && r == CUDA_SUCCESS; i++)
        r = d->driver.cuEventCreate(&d->small_staged[i], CU_EVENT_DISABLE_TIMING);
    return te_cuda_result(exec, r, "pinned memory for copies");
}

void te_cuda_stages_close(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    for (int i = 0; i < TE_CUDA_STAGES; i++) {
        if (d->staged[i]) d->driver.cuEventDestroy(d->staged[i]);
        if (d->stage[i]) d->driver.cuMemFreeHost(d->stage[i]);
    }
    for (int i = 0; i < TE_CUDA_SMALL_STAGES; i++)
        if (d->small_staged[i]) d->driver.cuEventDestroy(d->small_staged[i]);
    if (d->small) d->driver.cuMemFreeHost(d->small);
}

void *te_cuda_memory_alloc(te_exec *exec, size_t bytes)
{
    te_cuda_device *d = te_cuda(exec);
    CUdeviceptr ptr = 0;
    if (te_cuda_enter(exec) != TE_OK) return NULL;
    CUresult r = d->driver.cuMemAlloc(&ptr, bytes ? bytes : 1);
    if (r == CUDA_SUCCESS) return (void *)(uintptr_t)ptr;
    if (r != CUDA_ERROR_OUT_OF_MEMORY) te_cuda_result(exec, r, "device memory"); /* an earlier failure shows here */
    return NULL;
}

void te_cuda_memory_free(te_exec *exec, void *ptr, size_t bytes)
{
    te_cuda_device *d = te_cuda(exec);
    (void)bytes;
    if (!ptr || te_cuda_enter(exec) != TE_OK) return;
    if (d->collectives && !d->capture) te_cuda_await(exec, NULL); /* what follows cannot be left off */
    d->driver.cuMemFree(te_cuda_address(ptr)); /* waits for work that uses it */
}

/* --- copies ------------------------------------------------------------------------------------------------------- */

/* n bytes by way of a stage, once what it held last is on the device. */
static te_status copy_piece(te_exec *exec, CUdeviceptr dst, const char *src, size_t n, void *stage, CUevent staged)
{
    te_cuda_device *d = te_cuda(exec);
    te_status status = te_cuda_await(exec, staged);
    if (status != TE_OK) return status;
    memcpy(stage, src, n);
    CUresult r = d->driver.cuMemcpyHtoDAsync(dst, stage, n, d->stream);
    if (r == CUDA_SUCCESS) r = d->driver.cuEventRecord(staged, d->stream);
    return te_cuda_result(exec, r, "copy to the device");
}

static te_status copy_up(te_exec *exec, CUdeviceptr dst, const char *src, size_t bytes)
{
    te_cuda_device *d = te_cuda(exec);
    if (bytes <= TE_CUDA_SMALL_BYTES) {
        int k = d->next_small;
        d->next_small = (k + 1) % TE_CUDA_SMALL_STAGES;
        return copy_piece(exec, dst, src, bytes, (char *)d->small + (size_t)k * TE_CUDA_SMALL_BYTES,
                          d->small_staged[k]);
    }
    for (size_t at = 0; at < bytes; at += TE_CUDA_STAGE_BYTES) {
        size_t n = bytes - at < TE_CUDA_STAGE_BYTES ? bytes - at : TE_CUDA_STAGE_BYTES;
        int k = d->next_stage;
        d->next_stage = (k + 1) % TE_CUDA_STAGES;
        te_status status = copy_piece(exec, dst + at, src + at, n, d->stage[k], d->staged[k]);
        if (status != TE_OK) return status;
    }
    return TE_OK;
}

/* Piece i arrives while piece i + 1 is on its way. */
static te_status copy_down(te_exec *exec, char *dst, CUdeviceptr src, size_t bytes)
{
    te_cuda_device *d = te_cuda(exec);
    size_t pieces = (bytes + TE_CUDA_STAGE_BYTES - 1) / TE_CUDA_STAGE_BYTES;
    te_status status = te_cuda_reports_fetch(exec);
    if (status != TE_OK) return status;
    for (size_t i = 0; i <= pieces; i++) {
        size_t at = i * TE_CUDA_STAGE_BYTES, before = at - TE_CUDA_STAGE_BYTES;
        if (i < pieces) {
            size_t n = bytes - at < TE_CUDA_STAGE_BYTES ? bytes - at : TE_CUDA_STAGE_BYTES;
            CUresult r = d->driver.cuMemcpyDtoHAsync(d->stage[i % 2], src + at, n, d->stream);
            if (r == CUDA_SUCCESS) r = d->driver.cuEventRecord(d->staged[i % 2], d->stream);
            if (r != CUDA_SUCCESS) return te_cuda_result(exec, r, "copy from the device");
        }
        if (i == 0) continue;
        status = te_cuda_await(exec, d->staged[(i - 1) % 2]);
        if (status != TE_OK) return status;
        memcpy(dst + before, d->stage[(i - 1) % 2], at < bytes ? TE_CUDA_STAGE_BYTES : bytes - before);
    }
    d->n_recent = 0; /* all that was under way before the copy has finished well */
    status = te_cuda_reports_read(exec);
    return status == TE_OK ? te_cuda_graph_reports(exec) : status;
}

te_status te_cuda_memory_copy(te_exec *exec, void *dst, const void *src, size_t bytes, te_copy_kind kind)
{
    te_cuda_device *d = te_cuda(exec);
    te_status status = te_cuda_enter(exec);
    if (status != TE_OK || bytes == 0) return status;
    if (kind != TE_COPY_DEVICE_TO_DEVICE) {
        bool up = kind == TE_COPY_HOST_TO_DEVICE;
        status = te_cuda_outside_graph(exec, up ? "a copy from the host" : "a copy to the host");
        if (status != TE_OK) return status;
    }
    if (kind == TE_COPY_HOST_TO_DEVICE) return copy_up(exec, te_cuda_address(dst), src, bytes);
    if (kind == TE_COPY_DEVICE_TO_HOST) return copy_down(exec, dst, te_cuda_address(src), bytes);
    return te_cuda_result(exec,
                          d->driver.cuMemcpyDtoDAsync(te_cuda_address(dst), te_cuda_address(src), bytes, d->stream),
                          "copy on the device");
}

void *te_cuda_upload(te_exec *exec, const void *host, size_t bytes)
{
    te_cuda_device *d = te_cuda(exec);
    void *ptr = exec->scratch(exec, bytes), *kept = NULL;
    te_status status = ptr ? TE_OK : TE_ERROR_MEMORY;
    if (ptr && !d->capture) status = te_cuda_memory_copy(exec, ptr, host, bytes, TE_COPY_HOST_TO_DEVICE);
    if (ptr && d->capture && !(kept = te_cuda_graph_keep(exec, bytes))) status = TE_ERROR_MEMORY;
    if (kept) {
        memcpy(kept, host, bytes);
        CUresult r = d->driver.cuMemcpyHtoDAsync(te_cuda_address(ptr), kept, bytes, d->stream);
        status = te_cuda_result(exec, r, "copy to the device");
    }
    if (status == TE_OK) return ptr;
    if (ptr) exec->scratch_free(exec, ptr);
    return NULL;
}
