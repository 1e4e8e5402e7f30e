/* reading.c - numbers on their way to the host that nobody waits for.
 *
 * A reading has pinned memory and an event of its own, which are used again once it has ended: the stream keeps
 * the next copy into that memory behind the one before. Its end asks the event, and waits only where the
 * numbers have not arrived.
 */
#include "cuda_backend.h"

struct te_cuda_reading {
    te_cuda_reading *next;
    void *pinned;
    CUevent arrived;
    size_t bytes;
    bool open; /* between begin and end */
};

static void discard(te_exec *exec, te_cuda_reading *r)
{
    te_cuda_device *d = te_cuda(exec);
    if (r->arrived) d->driver.cuEventDestroy(r->arrived);
    if (r->pinned) d->driver.cuMemFreeHost(r->pinned);
    te_mem_free(exec->mem, r, sizeof *r);
}

static te_cuda_reading *make(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    te_cuda_reading *r = te_mem_zalloc(exec->mem, sizeof *r);
    if (!r) {
        te_exec_fail(exec, TE_ERROR_MEMORY, "out of host memory for reading from the device");
        return NULL;
    }
    CUresult result = d->driver.cuMemHostAlloc(&r->pinned, TE_CUDA_READING_BYTES, 0);
    if (result == CUDA_SUCCESS) result = d->driver.cuEventCreate(&r->arrived, CU_EVENT_DISABLE_TIMING);
    if (result == CUDA_SUCCESS) {
        r->next = d->readings;
        d->readings = r;
        return r;
    }
    te_cuda_result(exec, result, "pinned memory for reading from the device");
    discard(exec, r);
    return NULL;
}

te_status te_cuda_read_begin(te_exec *exec, const void *src, size_t bytes, void **reading)
{
    te_cuda_device *d = te_cuda(exec);
    te_status status = te_cuda_enter(exec);
    if (status == TE_OK) status = te_cuda_outside_graph(exec, "a copy to the host");
    if (status != TE_OK) return status;
    if (bytes > TE_CUDA_READING_BYTES)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%zu bytes to be read on the way, %d at most", bytes,
                            TE_CUDA_READING_BYTES);
    te_cuda_reading *r = d->readings;
    while (r && r->open) r = r->next;
    if (!r && !(r = make(exec))) return TE_ERROR_MEMORY;
    CUresult result =
        bytes ? d->driver.cuMemcpyDtoHAsync(r->pinned, te_cuda_address(src), bytes, d->stream) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS) result = d->driver.cuEventRecord(r->arrived, d->stream);
    if (result != CUDA_SUCCESS) return te_cuda_result(exec, result, "copy from the device");
    r->bytes = bytes;
    r->open = true;
    *reading = r;
    return TE_OK;
}

te_status te_cuda_read_end(te_exec *exec, void *reading, void *dst)
{
    te_cuda_device *d = te_cuda(exec);
    te_cuda_reading *r = reading;
    r->open = false;
    if (!dst) return TE_OK;
    te_status status = te_cuda_enter(exec);
    if (status != TE_OK) return status;
    CUresult result = d->driver.cuEventQuery(r->arrived);
    status = result == CUDA_ERROR_NOT_READY ? te_cuda_await(exec, r->arrived) : te_cuda_waited(exec, result);
    if (status != TE_OK) return status;
    memcpy(dst, r->pinned, r->bytes);
    /* launches after this reading may carry the same report to the host once more */
    return te_cuda_graph_reported(exec) ? te_cuda_synchronize(exec) : TE_OK;
}

void te_cuda_readings_close(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    while (d->readings) {
        te_cuda_reading *r = d->readings;
        d->readings = r->next;
        discard(exec, r);
    }
}
