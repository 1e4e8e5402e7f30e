/* timing.c - how long work takes on the device, for choices between two ways of doing the same. */
#include "cuda_backend.h"

enum { REPEATS = 3 };

static te_status record(te_exec *exec, CUevent event)
{
    te_cuda_device *d = te_cuda(exec);
    return te_cuda_result(exec, d->driver.cuEventRecord(event, d->stream), "timing");
}

static te_status time_between(te_exec *exec, te_cuda_work *run, void *work, CUevent from, CUevent to, float *ms)
{
    te_cuda_device *d = te_cuda(exec);
    te_status status = run(exec, work); /* what is made once, or read from afar, is not counted */
    if (status == TE_OK) status = record(exec, from);
    for (int i = 0; i < REPEATS && status == TE_OK; i++) status = run(exec, work);
    if (status == TE_OK) status = record(exec, to);
    if (status == TE_OK) status = te_cuda_await(exec, to);
    return status == TE_OK ? te_cuda_result(exec, d->driver.cuEventElapsedTime(ms, from, to), "timing") : status;
}

te_status te_cuda_time(te_exec *exec, te_cuda_work *run, void *work, float *ms)
{
    te_cuda_device *d = te_cuda(exec);
    CUevent events[2] = {NULL, NULL};
    te_status status = te_cuda_outside_graph(exec, "a measurement");
    for (int i = 0; i < 2 && status == TE_OK; i++)
        status = te_cuda_result(exec, d->driver.cuEventCreate(&events[i], CU_EVENT_DEFAULT), "timing");
    if (status == TE_OK) status = time_between(exec, run, work, events[0], events[1], ms);
    for (int i = 0; i < 2; i++)
        if (events[i]) d->driver.cuEventDestroy(events[i]);
    return status;
}
