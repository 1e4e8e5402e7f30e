/* driver.c - libcuda's entry points. */
#include "fake.h"

#include "kernels/cuda/program_source.h"
#include "kernels/cuda_sim/cuda_sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern uint64_t te_fake_time;

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        int code = te_fake_enter(__func__);                                                                            \
        if (code) return (CUresult)code;                                                                               \
    } while (0)

static int devices = 2, capability; /* 0: as the environment says */
static int driver_version = 13000;

int te_fake_driver(void) { return driver_version; }
TE_FAKE void te_fake_set_driver(int version) { driver_version = version; }

/* Addresses of contexts and streams, one of each per device. A stream takes work only while its context is current. */
enum { MAX_DEVICES = 16 };
static char contexts[MAX_DEVICES], streams[MAX_DEVICES];
static int retained[MAX_DEVICES]; /* how often a context is */
static _Thread_local int current = -1;

bool te_fake_takes_work(CUstream stream)
{
    return !stream || (current >= 0 && (char *)(void *)stream == &streams[current]);
}

TE_FAKE void te_fake_set_devices(int count, int new_capability)
{
    devices = count;
    capability = new_capability;
}

int te_fake_capability(void)
{
    const char *wanted = getenv("TE_FAKE_CAPABILITY");
    if (!capability) capability = wanted ? atoi(wanted) : 90;
    return capability;
}

/* --- devices ------------------------------------------------------------------------------------------------------ */

TE_FAKE CUresult cuInit(unsigned flags)
{
    ENTER();
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

TE_FAKE CUresult cuDriverGetVersion(int *version)
{
    ENTER();
    *version = driver_version;
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuGetErrorName(CUresult error, const char **text)
{
    *text = error == CUDA_ERROR_OUT_OF_MEMORY     ? "CUDA_ERROR_OUT_OF_MEMORY"
            : error == CUDA_ERROR_ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
            : error == CUDA_ERROR_LAUNCH_FAILED   ? "CUDA_ERROR_LAUNCH_FAILED"
                                                  : "CUDA_ERROR_FAKED";
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text =
        error == CUDA_ERROR_ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : "a failure made for a test";
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuDeviceGetCount(int *count)
{
    ENTER();
    *count = devices;
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    ENTER();
    *device = ordinal;
    return ordinal < devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

TE_FAKE CUresult cuDeviceGetName(char *name, int size, CUdevice device)
{
    ENTER();
    snprintf(name, (size_t)size, "Fake GPU %d", device);
    return CUDA_SUCCESS;
}

static uint32_t shared_set;

TE_FAKE void te_fake_set_shared(uint32_t bytes) { shared_set = bytes; }

/* Of a block, that it may ask for, and that it has for the asking. */
static uint32_t shared_most(void)
{
    int c = te_fake_capability();
    if (shared_set) return shared_set;
    return c == 80 || c == 87 ? 163 << 10 : c < 90 || c >= 120 ? 99 << 10 : 227 << 10;
}

TE_FAKE CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    (void)device;
    ENTER();
    *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? te_fake_capability() / 10
             : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? te_fake_capability() % 10
             : attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT     ? 4
             : attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? (int)shared_most()
                                                                                  : 0;
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device)
{
    (void)device;
    ENTER();
    *bytes = (size_t)8 << 30;
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    ENTER();
    if (device < 0 || device >= MAX_DEVICES) return CUDA_ERROR_INVALID_DEVICE;
    *context = (CUcontext)(void *)&contexts[device];
    retained[device]++;
    te_fake_made(1);
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    ENTER();
    if (device < 0 || device >= MAX_DEVICES || !retained[device]) return CUDA_ERROR_INVALID_CONTEXT;
    retained[device]--;
    te_fake_made(-1);
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    ENTER();
    if (device < 0 || device >= MAX_DEVICES) return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = retained[device] > 0;
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuCtxGetCurrent(CUcontext *context)
{
    ENTER();
    *context = current < 0 ? NULL : (CUcontext)(void *)&contexts[current];
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuCtxSetCurrent(CUcontext context)
{
    ENTER();
    current = context ? (int)((char *)(void *)context - contexts) : -1;
    return CUDA_SUCCESS;
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

TE_FAKE CUresult cuMemAlloc(CUdeviceptr *ptr, size_t bytes)
{
    ENTER();
    if (te_fake_status()) return te_fake_status();
    *ptr = te_fake_allocate(bytes);
    if (!*ptr) return CUDA_ERROR_OUT_OF_MEMORY;
    te_fake_made(1);
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuMemFree(CUdeviceptr ptr)
{
    ENTER();
    te_fake_flush();
    if (!te_fake_release(ptr)) return CUDA_ERROR_INVALID_VALUE;
    te_fake_made(-1);
    return te_fake_status();
}

TE_FAKE CUresult cuMemGetInfo(size_t *free_bytes, size_t *total)
{
    ENTER();
    *free_bytes = *total = (size_t)8 << 30;
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuMemHostAlloc(void **ptr, size_t bytes, unsigned flags)
{
    (void)flags;
    ENTER();
    *ptr = malloc(bytes);
    if (!*ptr) return CUDA_ERROR_OUT_OF_MEMORY;
    te_fake_made(1);
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuMemFreeHost(void *ptr)
{
    ENTER();
    te_fake_flush();
    free(ptr);
    te_fake_made(-1);
    return CUDA_SUCCESS;
}

typedef struct transfer {
    void *dst;
    const void *src;
    size_t bytes;
} transfer;

static void run_transfer(void *work)
{
    const transfer *t = work;
    memmove(t->dst, t->src, t->bytes);
}

static CUresult queue_transfer(void *dst, const void *src, size_t bytes, CUstream stream)
{
    if (te_fake_idle() && !te_fake_recording() && bytes <= TE_FAKE_IDLE_BYTES) memmove(dst, src, bytes);
    return te_fake_queue(stream, run_transfer, &(transfer){dst, src, bytes}, sizeof(transfer), 1000 + bytes / 32);
}

TE_FAKE CUresult cuMemcpyHtoDAsync(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream)
{
    ENTER();
    if (!te_fake_contains(dst, bytes)) return CUDA_ERROR_INVALID_VALUE;
    return queue_transfer((void *)(uintptr_t)dst, src, bytes, stream);
}

TE_FAKE CUresult cuMemcpyDtoHAsync(void *dst, CUdeviceptr src, size_t bytes, CUstream stream)
{
    ENTER();
    if (!te_fake_contains(src, bytes)) return CUDA_ERROR_INVALID_VALUE;
    return queue_transfer(dst, (const void *)(uintptr_t)src, bytes, stream);
}

TE_FAKE CUresult cuMemcpyDtoDAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream)
{
    ENTER();
    if (!te_fake_contains(dst, bytes) || !te_fake_contains(src, bytes)) return CUDA_ERROR_INVALID_VALUE;
    return queue_transfer((void *)(uintptr_t)dst, (const void *)(uintptr_t)src, bytes, stream);
}

typedef struct filling {
    void *dst;
    unsigned char value;
    size_t bytes;
} filling;

static void run_filling(void *work)
{
    const filling *f = work;
    memset(f->dst, f->value, f->bytes);
}

TE_FAKE CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream)
{
    ENTER();
    if (!te_fake_contains(dst, bytes)) return CUDA_ERROR_INVALID_VALUE;
    if (te_fake_idle() && bytes <= TE_FAKE_IDLE_BYTES) memset((void *)(uintptr_t)dst, value, bytes);
    return te_fake_queue(stream, run_filling, &(filling){(void *)(uintptr_t)dst, value, bytes}, sizeof(filling), 1000);
}

/* --- streams and events ------------------------------------------------------------------------------------------- */

TE_FAKE CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    (void)flags;
    ENTER();
    if (current < 0) return CUDA_ERROR_INVALID_CONTEXT;
    *stream = (CUstream)(void *)&streams[current];
    te_fake_made(1);
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuStreamDestroy(CUstream stream)
{
    (void)stream;
    ENTER();
    te_fake_flush();
    te_fake_made(-1);
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuStreamSynchronize(CUstream stream)
{
    (void)stream;
    ENTER();
    return te_fake_flush();
}

TE_FAKE CUresult cuStreamQuery(CUstream stream)
{
    (void)stream;
    ENTER();
    return te_fake_poll();
}

/* --- graphs ------------------------------------------------------------------------------------------------------- */

TE_FAKE CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode)
{
    (void)stream;
    ENTER();
    if (mode != CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    te_fake_record_begin();
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    (void)stream;
    te_fake_record *record = te_fake_record_end();
    *graph = (CUgraph)(void *)record;
    if (!record) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    te_fake_made(1);
    ENTER();
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuGraphInstantiateWithFlags(CUgraphExec *runnable, CUgraph graph, unsigned long long flags)
{
    ENTER();
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    *runnable = (CUgraphExec)(void *)graph;
    te_fake_record_retain((te_fake_record *)(void *)graph);
    te_fake_made(1);
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuGraphLaunch(CUgraphExec runnable, CUstream stream)
{
    (void)stream;
    ENTER();
    return te_fake_record_queue((const te_fake_record *)(void *)runnable);
}

/* Launches that are under way have copies of what they run. */
TE_FAKE CUresult cuGraphExecDestroy(CUgraphExec runnable)
{
    ENTER();
    te_fake_record_free((te_fake_record *)(void *)runnable);
    te_fake_made(-1);
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuGraphDestroy(CUgraph graph)
{
    ENTER();
    te_fake_record_free((te_fake_record *)(void *)graph);
    te_fake_made(-1);
    return CUDA_SUCCESS;
}

typedef struct event {
    uint64_t time;
    int left; /* recordings that have not been reached */
} event;

TE_FAKE CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    (void)flags;
    ENTER();
    *out = (CUevent)calloc(1, sizeof(event));
    if (!*out) return CUDA_ERROR_OUT_OF_MEMORY;
    te_fake_made(1);
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuEventDestroy(CUevent e)
{
    ENTER();
    te_fake_flush();
    free(e);
    te_fake_made(-1);
    return CUDA_SUCCESS;
}

static void run_event(void *work)
{
    event *e = *(event **)work;
    e->time = te_fake_time;
    if (e->left > 0) e->left--;
}

TE_FAKE CUresult cuEventRecord(CUevent e, CUstream stream)
{
    ENTER();
    CUresult result = te_fake_queue(stream, run_event, &e, sizeof e, 0);
    if (result == CUDA_SUCCESS && !te_fake_recording() && !te_fake_idle()) ((event *)(void *)e)->left++;
    return result;
}

/* The device gets on while the host does other things: whoever asks finds the work done, but nothing behind it. */
TE_FAKE CUresult cuEventQuery(CUevent e)
{
    ENTER();
    return te_fake_poll_until(&((const event *)(void *)e)->left);
}

TE_FAKE CUresult cuEventSynchronize(CUevent e)
{
    ENTER();
    return te_fake_flush_until(&((const event *)(void *)e)->left);
}

#undef cuEventElapsedTime /* drivers for CUDA before 12.8 have no other */

TE_FAKE CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to);
TE_FAKE CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to)
{
    ENTER();
    *ms = (float)((double)(((event *)to)->time - ((event *)from)->time) * 1e-6);
    return CUDA_SUCCESS;
}

/* --- kernels ------------------------------------------------------------------------------------------------------ */

typedef struct function {
    te_cuda_sim *sim;
    struct function *next;
    uint32_t dynamic; /* shared memory that a launch may ask for */
    char name[64];
} function;

enum { SHARED_UNASKED = 48 << 10 };

/* Shared variables of all kernels of the module: at least those of the function, as far as one may have them. */
static uint32_t variables_of(const function *f)
{
    uint32_t bytes = f->sim ? te_cuda_sim_variables(f->sim) : 0;
    return bytes < SHARED_UNASKED ? bytes : SHARED_UNASKED;
}

typedef struct module {
    te_cuda_sim *sim;
    function *functions;
} module;

TE_FAKE CUresult cuModuleLoadData(CUmodule *out, const void *image)
{
    char message[1024];
    ENTER();
    if (memcmp(image, "\177ELF", 4) == 0) te_fake_enter("binary for a GPU"); /* counted; nothing here runs it */
    if (driver_version < 13000) return CUDA_ERROR_UNSUPPORTED_PTX_VERSION; /* images are of CUDA 13 */
    if (strncmp(image, "fake cubin\n", 11) != 0) return CUDA_ERROR_INVALID_IMAGE;
    module *m = calloc(1, sizeof *m);
    te_cuda_sim_set_other_functions(true);
    if (!te_fake_idle()) m->sim = te_cuda_sim_compile((const char *)image + 11, NULL, message, sizeof message);
    if (!m->sim && !te_fake_idle()) {
        fprintf(stderr, "fake CUDA: %s\n", message);
        free(m);
        return CUDA_ERROR_INVALID_IMAGE;
    }
    *out = (CUmodule)(void *)m;
    te_fake_made(1);
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuModuleUnload(CUmodule module_)
{
    module *m = (module *)(void *)module_;
    ENTER();
    te_fake_flush();
    for (function *f = m->functions; f;) {
        function *next = f->next;
        free(f);
        f = next;
    }
    te_cuda_sim_release(m->sim);
    free(m);
    te_fake_made(-1);
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuModuleGetFunction(CUfunction *out, CUmodule module_, const char *name)
{
    module *m = (module *)(void *)module_;
    ENTER();
    if (m->sim && !te_cuda_sim_has(m->sim, name)) return CUDA_ERROR_NOT_FOUND;
    function *f = calloc(1, sizeof *f);
    *f = (function){.sim = m->sim, .next = m->functions};
    f->dynamic = SHARED_UNASKED - variables_of(f);
    snprintf(f->name, sizeof f->name, "%s", name);
    m->functions = f;
    *out = (CUfunction)(void *)f;
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f)
{
    ENTER();
    if (attribute != CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
    *value = (int)variables_of((const function *)(void *)f);
    return CUDA_SUCCESS;
}

TE_FAKE CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value)
{
    function *f = (function *)(void *)handle;
    ENTER();
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 ||
        (uint32_t)value + variables_of(f) > shared_most())
        return CUDA_ERROR_INVALID_VALUE;
    f->dynamic = (uint32_t)value;
    return CUDA_SUCCESS;
}

typedef struct launch {
    const function *function;
    uint32_t grid[3], block[3], shared;
    uint64_t args[TE_CUDA_ARGS / 8];
} launch;

static void run_launch(void *work)
{
    launch *l = work;
    char message[512];
    void *params[] = {l->args};
    if (te_cuda_sim_launch(l->function->sim, l->function->name, l->grid, l->block, l->shared, params, message,
                           sizeof message) == 0)
        return;
    fprintf(stderr, "fake CUDA: kernel %s: %s\n", l->function->name, message);
    te_fake_broken(CUDA_ERROR_LAUNCH_FAILED);
}

/* All kernels take one struct by value, part of a te_cuda_launch: as many bytes as that has are read. */
TE_FAKE CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                unsigned bz, unsigned shared, CUstream stream, void **params, void **extra)
{
    ENTER();
    bool fits =
        gx && gy && gz && bx && by && bz && gy < 65536 && gz < 65536 && (uint64_t)bx * by * bz <= 1024 && !extra;
    if (!fits || shared > ((const function *)(void *)f)->dynamic) return CUDA_ERROR_INVALID_VALUE;
    if (te_fake_idle()) return te_fake_queue(stream, run_launch, NULL, 0, 2000); /* arguments are not worth a copy */
    launch l = {.function = (const function *)(void *)f, .grid = {gx, gy, gz}, .block = {bx, by, bz}, .shared = shared};
    memcpy(l.args, params[0], sizeof l.args);
    return te_fake_queue(stream, run_launch, &l, sizeof l, 2000);
}
