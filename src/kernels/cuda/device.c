/* device.c - opening and closing a CUDA device, waiting for it, and what its failures are called. */
#include "cuda_backend.h"

#include "../environment.h"

#include <stdarg.h>
#include <stdio.h>

enum { OLDEST_CAPABILITY = 80, OLDEST_CUDA = 12010 }; /* before CUDA 12.1 kernels took 4 KiB of arguments */

/* --- failures ----------------------------------------------------------------------------------------------------- */

static te_status status_of(CUresult result)
{
    return result == CUDA_ERROR_OUT_OF_MEMORY ? TE_ERROR_MEMORY : TE_ERROR_DEVICE;
}

static const char *error_name(te_cuda_device *d, CUresult result)
{
    const char *name = NULL;
    return d->driver.cuGetErrorName(result, &name) == CUDA_SUCCESS && name ? name : "unknown CUDA error";
}

static const char *error_text(te_cuda_device *d, CUresult result)
{
    const char *text = NULL;
    return d->driver.cuGetErrorString(result, &text) == CUDA_SUCCESS && text ? text : "no description";
}

te_status te_cuda_result(te_exec *exec, CUresult result, const char *what)
{
    te_cuda_device *d = te_cuda(exec);
    if (result == CUDA_SUCCESS) return TE_OK;
    return te_exec_fail(exec, status_of(result), "%s: %s (%s)", what, error_text(d, result), error_name(d, result));
}

/* "gelu, linear": oldest first. */
static void list_recent(const te_cuda_device *d, char *text, size_t size)
{
    uint64_t first = d->n_recent > TE_CUDA_RECENT ? d->n_recent - TE_CUDA_RECENT : 0;
    size_t used = 0;
    text[0] = 0;
    for (uint64_t i = first; i < d->n_recent && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s",
                                 i > first ? ", "
                                 : first   ? "..., "
                                           : "",
                                 d->recent[i % TE_CUDA_RECENT]);
}

te_status te_cuda_waited(te_exec *exec, CUresult result)
{
    te_cuda_device *d = te_cuda(exec);
    char recent[TE_CUDA_RECENT * (TE_CUDA_NAME + 2) + 8];
    if (result == CUDA_SUCCESS) return TE_OK;
    list_recent(d, recent, sizeof recent);
    return te_exec_fail(exec, status_of(result), "%s (%s) on the device, in %s%s", error_text(d, result),
                        error_name(d, result), d->n_recent > 1 ? "one of " : "", d->n_recent ? recent : "a copy");
}

void te_cuda_note(te_exec *exec, const char *operation)
{
    te_cuda_device *d = te_cuda(exec);
    char *name = d->recent[d->n_recent++ % TE_CUDA_RECENT];
    size_t n = strlen(operation);
    if (n >= TE_CUDA_NAME) n = TE_CUDA_NAME - 1;
    memcpy(name, operation, n);
    name[n] = 0;
}

te_status te_cuda_synchronize(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    te_status status = te_cuda_enter(exec);
    if (status == TE_OK) status = te_cuda_outside_graph(exec, "waiting for the device");
    if (status == TE_OK) status = te_cuda_reports_fetch(exec);
    if (status == TE_OK) status = te_cuda_await(exec, NULL);
    if (status != TE_OK) return status;
    d->n_recent = 0;
    status = te_cuda_reports_read(exec);
    te_status graphs = te_cuda_graph_reports(exec);
    return status == TE_OK ? graphs : status;
}

te_status te_cuda_enter(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    return te_cuda_result(exec, d->driver.cuCtxSetCurrent(d->context), "the device's context");
}

CUcontext te_cuda_host_context(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    CUcontext current = NULL;
    if (d->driver.cuCtxGetCurrent(&current) != CUDA_SUCCESS) return NULL;
    return current == d->context ? NULL : current;
}

void te_cuda_leave(te_exec *exec, CUcontext host)
{
    if (host) te_cuda(exec)->driver.cuCtxSetCurrent(host);
}

void te_cuda_trace(te_exec *exec, const char *format, ...)
{
    if (!te_cuda(exec)->trace_dispatch) return;
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
}

void te_cuda_describe(te_exec *exec, char *text, size_t size)
{
    te_cuda_device *d = te_cuda(exec);
    size_t version;
    const char *missing = te_cuda_dnn_missing(exec, &version);
    int n = snprintf(text, size, "%s, kernels for %s by NVRTC %d.%d; attention in 16 bits by ", d->title, d->target,
                     d->nvrtc_version / 100, d->nvrtc_version / 10 % 10);
    if (n < 0 || (size_t)n >= size) return;
    if (missing)
        snprintf(text + n, size - (size_t)n, "own kernels, without cuDNN: %s", missing);
    else
        snprintf(text + n, size - (size_t)n, "cuDNN %zu.%zu.%zu where it takes it", version / 10000,
                 version / 100 % 100, version % 100);
}

/* --- opening ------------------------------------------------------------------------------------------------------ */

static te_status count_devices(te_exec *exec, te_cuda_device *d, int *count)
{
    te_status status = te_cuda_load_driver(exec, &d->driver);
    if (status == TE_OK) status = te_cuda_result(exec, d->driver.cuInit(0), "starting the CUDA driver");
    if (status == TE_OK)
        status = te_cuda_result(exec, d->driver.cuDriverGetVersion(&d->driver_version), "the driver's version");
    if (status == TE_OK) status = te_cuda_result(exec, d->driver.cuDeviceGetCount(count), "counting CUDA devices");
    if (status == TE_OK && *count == 0)
        status = te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "the driver knows no CUDA device");
    return status;
}

int te_cuda_device_count(te_exec *exec)
{
    te_cuda_device d = {.index = 0};
    int count = 0;
    te_exec counting = {.mem = exec->mem, .device = &d};
    if (count_devices(&counting, &d, &count) == TE_OK) return count;
    te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "%s", counting.message);
    return 0;
}

static te_status read_properties(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    int major = 0, minor = 0;
    CUresult r = d->driver.cuDeviceGet(&d->handle, d->index);
    if (r == CUDA_SUCCESS) r = d->driver.cuDeviceGetName(d->title, sizeof d->title, d->handle);
    if (r == CUDA_SUCCESS)
        r = d->driver.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, d->handle);
    if (r == CUDA_SUCCESS)
        r = d->driver.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, d->handle);
    if (r == CUDA_SUCCESS)
        r = d->driver.cuDeviceGetAttribute(&d->multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, d->handle);
    if (r == CUDA_SUCCESS)
        r = d->driver.cuDeviceGetAttribute(&d->shared_most, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                                           d->handle);
    if (r != CUDA_SUCCESS) return te_cuda_result(exec, r, "the device's properties");
    d->capability = major * 10 + minor;
    if (d->capability < OLDEST_CAPABILITY)
        return te_exec_fail(exec, TE_ERROR_UNSUPPORTED,
                            "%s has compute capability %d.%d; %d.%d is the oldest supported", d->title, major, minor,
                            OLDEST_CAPABILITY / 10, OLDEST_CAPABILITY % 10);
    return TE_OK;
}

/* What NVRTC makes is loaded by drivers of its major version or a later one. */
static te_status check_versions(te_exec *exec, int major, int minor)
{
    int driver = te_cuda(exec)->driver_version;
    if (driver < OLDEST_CUDA)
        return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "the driver is for CUDA %d.%d; %d.%d is the oldest supported",
                            driver / 1000, driver % 1000 / 10, OLDEST_CUDA / 1000, OLDEST_CUDA % 1000 / 10);
    if (major * 1000 + minor * 10 < OLDEST_CUDA)
        return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "NVRTC is of CUDA %d.%d; %d.%d is the oldest supported", major,
                            minor, OLDEST_CUDA / 1000, OLDEST_CUDA % 1000 / 10);
    if (major <= driver / 1000) return TE_OK;
    return te_exec_fail(exec, TE_ERROR_UNSUPPORTED,
                        "the driver is for CUDA %d.%d and does not load what NVRTC %d.%d makes; a newer driver or the "
                        "libraries of CUDA %d are needed",
                        driver / 1000, driver % 1000 / 10, major, minor, driver / 1000);
}

/* sm_N, with the card's own instructions where there are such; for a card that this NVRTC does not know, code for the
 * newest one it knows, which the driver translates. */
static te_status choose_target(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    int n = 0, newest = 0, major = 0, minor = 0;
    bool exact = false;
    nvrtcResult r = d->nvrtc.nvrtcVersion(&major, &minor);
    if (r == NVRTC_SUCCESS) r = d->nvrtc.nvrtcGetNumSupportedArchs(&n);
    size_t bytes = r == NVRTC_SUCCESS && n > 0 ? (size_t)n * sizeof(int) : 0;
    int *known = bytes ? te_mem_alloc(exec->mem, bytes) : NULL;
    if (bytes && !known) return te_exec_fail(exec, TE_ERROR_MEMORY, "out of host memory opening the device");
    if (known) r = d->nvrtc.nvrtcGetSupportedArchs(known);
    for (int i = 0; i < n && known && r == NVRTC_SUCCESS; i++) {
        exact |= known[i] == d->capability;
        if (known[i] <= d->capability && known[i] > newest) newest = known[i];
    }
    if (known) te_mem_free(exec->mem, known, bytes);
    if (r != NVRTC_SUCCESS) return te_exec_fail(exec, TE_ERROR_DEVICE, "NVRTC: %s", d->nvrtc.nvrtcGetErrorString(r));
    if (newest < OLDEST_CAPABILITY)
        return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "NVRTC %d.%d cannot compile for %s (sm_%d)", major, minor,
                            d->title, d->capability);
    bool own = exact && d->capability >= 90;
    snprintf(d->target, sizeof d->target, "%s_%d%s", exact ? "sm" : "compute", newest, own ? "a" : "");
    d->nvrtc_version = major * 100 + minor * 10;
    return check_versions(exec, major, minor);
}

static te_status open_stream(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    te_status status =
        te_cuda_result(exec, d->driver.cuDevicePrimaryCtxRetain(&d->context, d->handle), "opening the device");
    if (status != TE_OK) {
        d->context = NULL;
        return status;
    }
    status = te_cuda_enter(exec);
    if (status == TE_OK)
        status = te_cuda_result(exec, d->driver.cuStreamCreate(&d->stream, CU_STREAM_NON_BLOCKING), "making a stream");
    return status == TE_OK ? te_cuda_stages_open(exec) : status;
}

te_status te_cuda_device_open(te_exec *exec, int index)
{
    te_cuda_device *d = te_mem_zalloc(exec->mem, sizeof *d);
    int count = 0;
    if (!d) return te_exec_fail(exec, TE_ERROR_MEMORY, "out of host memory opening the device");
    exec->device = d;
    d->index = index;
    d->trace_dispatch = te_environment_traces("dispatch");
    te_disk_cache_open(&d->cache, exec->mem);
    te_status status = count_devices(exec, d, &count);
    if (status == TE_OK && index >= count)
        status = te_exec_fail(exec, TE_ERROR_ARGUMENT, "there %s %d CUDA device%s, counted from 0",
                              count > 1 ? "are" : "is", count, count > 1 ? "s" : "");
    if (status == TE_OK) status = read_properties(exec);
    if (status == TE_OK) status = te_cuda_load_nvrtc(exec, d->driver_version, &d->nvrtc);
    if (status == TE_OK) status = choose_target(exec);
    CUcontext host = status == TE_OK ? te_cuda_host_context(exec) : NULL;
    if (status == TE_OK) status = open_stream(exec);
    te_cuda_leave(exec, host);
    if (status != TE_OK) te_cuda_device_close(exec);
    return status;
}

/* The device's context may be the host's own, which has it current as well: it stays current where somebody still holds
 * it. What all have released is nobody's. */
static void release_context(te_cuda_device *d, CUcontext host)
{
    unsigned flags = 0;
    int held = 0;
    d->driver.cuDevicePrimaryCtxRelease(d->handle);
    if (!host && d->driver.cuDevicePrimaryCtxGetState(d->handle, &flags, &held) == CUDA_SUCCESS && held) return;
    d->driver.cuCtxSetCurrent(host);
}

void te_cuda_device_close(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    if (!d) return;
    if (d->context) {
        CUcontext host = te_cuda_host_context(exec);
        d->driver.cuCtxSetCurrent(d->context); /* after a failure on the device host memory is freed all the same */
        if (d->stream) te_cuda_await(exec, NULL); /* also for a collective whose other process is gone */
        te_cuda_graphs_close(exec);
        te_cuda_collectives_close(exec);
        te_cuda_gemm_close(exec);
        te_cuda_dnn_close(exec);
        te_cuda_copier_close(exec);
        te_cuda_reports_close(exec);
        te_cuda_hand_close(exec);
        te_cuda_codes_close(exec);
        te_cuda_readings_close(exec);
        te_cuda_stages_close(exec);
        if (d->stream) d->driver.cuStreamDestroy(d->stream);
        release_context(d, host);
    }
    te_mem_free(exec->mem, d, sizeof *d);
    exec->device = NULL;
}
