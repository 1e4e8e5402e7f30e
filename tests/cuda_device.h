/* cuda_device.h - running CUDA sources in a test: by the simulator, and through NVRTC's compiler where it is installed
 * and no sanitizer looks on: that would see nothing inside, and the sources are those of the tests without. */
#ifndef TE_TEST_CUDA_DEVICE_H
#define TE_TEST_CUDA_DEVICE_H

#include "kernels/cuda/kernels/hand.h"
#include "kernels/cuda_sim/cuda_sim.h"
#include "test.h"

#include <dlfcn.h>

/* --- NVRTC ------------------------------------------------------------------------------------------------------- */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

typedef struct nvrtc_functions {
    int (*create)(void **program, const char *source, const char *name, int n_headers, const char *const *headers,
                  const char *const *names);
    int (*compile)(void *program, int n_options, const char *const *options);
    int (*log_size)(void *program, size_t *size);
    int (*log)(void *program, char *text);
    int (*destroy)(void **program);
    int      compiled, n_seen;
    uint64_t seen[2048]; /* different sources so far */
    int      n_names;
    uint64_t names[256]; /* of the kernels that were compiled */
} nvrtc_functions;

static inline bool nvrtc_open(nvrtc_functions *nvrtc)
{
    static const char *const names[] = {"libnvrtc.so.13", "libnvrtc.so.12", "/usr/local/cuda/lib64/libnvrtc.so.13",
                                        "/usr/local/cuda/lib64/libnvrtc.so.12"};
    void *library = NULL;
    bool compiles = !SANITIZED;
    memset(nvrtc, 0, sizeof *nvrtc);
    for (size_t i = 0; compiles && !library && i < sizeof names / sizeof names[0]; i++)
        library = dlopen(names[i], RTLD_NOW);
    if (!library) {
        fprintf(stderr, "without NVRTC: sources are not compiled for sm_90a\n");
        return false;
    }
    *(void **)&nvrtc->create = dlsym(library, "nvrtcCreateProgram");
    *(void **)&nvrtc->compile = dlsym(library, "nvrtcCompileProgram");
    *(void **)&nvrtc->log_size = dlsym(library, "nvrtcGetProgramLogSize");
    *(void **)&nvrtc->log = dlsym(library, "nvrtcGetProgramLog");
    *(void **)&nvrtc->destroy = dlsym(library, "nvrtcDestroyProgram");
    return nvrtc->create && nvrtc->compile && nvrtc->log_size && nvrtc->log && nvrtc->destroy;
}

static inline uint64_t nvrtc_hash(const char *text)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (; *text; text++) hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
    return hash;
}

/* Whether a text's hash is among n of at most `limit`; it is from now on. */
static inline bool nvrtc_saw(uint64_t *seen, int *n, int limit, uint64_t hash)
{
    for (int i = 0; i < *n; i++)
        if (seen[i] == hash) return true;
    if (*n < limit) seen[(*n)++] = hash;
    return false;
}

enum { NVRTC_SAMPLE = 4 };

/* True when the source compiles, or when there is no NVRTC. Compiled are the first source of each kernel and, of the
 * others, which differ in dtypes and constants, every fourth by its hash. Not optimizing takes a third of the time or
 * less: the build and cuda_compile.c look at what is optimized. */
static inline bool nvrtc_accepts(nvrtc_functions *nvrtc, const char *source, const char *name)
{
    const char *options[] = {"--gpu-architecture=sm_90a", "--fmad=false", "--std=c++17", "--device-debug"};
    void  *program = NULL;
    static char log[1 << 18];
    size_t size = 0;
    uint64_t hash = nvrtc_hash(source);
    if (!nvrtc->create || nvrtc_saw(nvrtc->seen, &nvrtc->n_seen, 2048, hash)) return true;
    bool first = !nvrtc_saw(nvrtc->names, &nvrtc->n_names, 256, nvrtc_hash(name));
    if (!first && (hash >> 32) % NVRTC_SAMPLE) return true;
    nvrtc->compiled++;
    if (nvrtc->create(&program, source, name, 0, NULL, NULL) != 0) return false;
    int result = nvrtc->compile(program, sizeof options / sizeof options[0], options);
    nvrtc->log_size(program, &size);
    if (result != 0 && size <= sizeof log) nvrtc->log(program, log);
    if (result != 0) fprintf(stderr, "NVRTC on %s: %.1500s\n", name, log);
    nvrtc->destroy(&program);
    return result == 0;
}

/* --- programs ---------------------------------------------------------------------------------------------------- */

typedef struct cuda_device {
    te_exec         exec; /* its message and scratch memory */
    nvrtc_functions nvrtc;
    int             multiprocessors;
    int             kinds[5]; /* launches of each te_cuda_program_kind */
    bool            show;     /* sources of programs that fail */
} cuda_device;

static inline te_status cuda_launch_program(cuda_device *device, te_cuda_sim *sim, const te_program *program,
                                            const te_cuda_program_shape *shape, const te_run *runs, int n)
{
    static te_cuda_launch launches[TE_CUDA_LAUNCHES];
    static uint64_t       args[TE_CUDA_ARGS / 8];
    te_status             status = TE_OK;
    size_t                bytes = te_cuda_program_parts(program, shape, runs, n);
    void                 *parts = bytes ? test_scratch(&device->exec, bytes) : NULL;
    if (parts) memset(parts, 0xff, bytes);
    int count = te_cuda_program_launch(program, shape, runs, n, device->multiprocessors, parts, args, launches);
    for (int l = 0; l < count && status == TE_OK; l++) {
        void *params[1] = {args};
        if (te_cuda_sim_launch(sim, launches[l].name, launches[l].grid, launches[l].block, launches[l].shared, params,
                               device->exec.message, sizeof device->exec.message) != 0)
            status = TE_ERROR_DEVICE;
    }
    free(parts);
    device->kinds[shape->kind]++;
    return status;
}

/* As a CUDA backend runs a program, with the simulator for a GPU. */
static inline te_status cuda_program_run(cuda_device *device, te_program *program, const te_run *runs, int n_runs)
{
    te_status status = TE_OK;
    for (int at = 0, n; at < n_runs && status == TE_OK; at += n) {
        te_cuda_program_shape shape;
        te_text               source;
        te_cuda_sim          *sim = NULL;
        n = 1;
        status = te_cuda_program_shape_make(&device->exec, program, &runs[at], &shape);
        if (status != TE_OK) break;
        n = te_cuda_program_batch(&device->exec, program, &shape, &runs[at], n_runs - at);
        te_text_open(&source, &te_mem_libc);
        status = te_cuda_program_source(program, &shape, &source);
        if (status == TE_OK && !nvrtc_accepts(&device->nvrtc, source.data, program->name)) status = TE_ERROR_DEVICE;
        if (status == TE_OK) {
            sim = te_cuda_sim_compile(source.data, NULL, device->exec.message, sizeof device->exec.message);
            status = sim ? cuda_launch_program(device, sim, program, &shape, &runs[at], n) : TE_ERROR_DEVICE;
        }
        if (status != TE_OK && device->show) fprintf(stderr, "%s\n", strstr(source.data, "struct te_run_args"));
        te_cuda_sim_release(sim);
        te_text_close(&source);
    }
    return status;
}

/* --- hand-written kernels ---------------------------------------------------------------------------------------- */

static inline te_status cuda_launch_call(cuda_device *device, const te_cuda_call *call)
{
    te_text      source;
    te_cuda_sim *sim = NULL;
    te_text_open(&source, &te_mem_libc);
    te_status status = te_cuda_kernel_source(&call->kernel, &source);
    if (status == TE_OK && !nvrtc_accepts(&device->nvrtc, source.data, call->launch.name)) status = TE_ERROR_DEVICE;
    if (status == TE_OK)
        sim = te_cuda_sim_compile(source.data, NULL, device->exec.message, sizeof device->exec.message);
    void *params[1] = {(void *)(uintptr_t)call->launch.args};
    if (!sim || te_cuda_sim_launch(sim, call->launch.name, call->launch.grid, call->launch.block, call->launch.shared,
                                   params, device->exec.message, sizeof device->exec.message) != 0)
        status = TE_ERROR_DEVICE;
    te_cuda_sim_release(sim);
    te_text_close(&source);
    return status;
}

/* As a CUDA backend runs a plan. */
static inline te_status cuda_plan_run(cuda_device *device, te_cuda_plan *plan)
{
    uint64_t  fault = UINT64_MAX;
    void     *scratch = test_scratch(&device->exec, plan->scratch_bytes);
    te_status status = TE_OK;
    memset(scratch, 0xff, plan->scratch_bytes);
    te_cuda_plan_bind(plan, scratch, &fault);
    for (int i = 0; i < plan->n_calls && status == TE_OK; i++) status = cuda_launch_call(device, &plan->calls[i]);
    free(scratch);
    return status == TE_OK ? te_cuda_check_fault(&device->exec, &plan->check, fault) : status;
}

#endif
