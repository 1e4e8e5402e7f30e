/* compile.c - source to kernels: NVRTC behind a cache in memory, what the build has compiled, and a cache on disk.
 *
 * The key on disk is everything the result depends on: source, target, options and NVRTC's version. Options are fixed
 * by the rule that each instruction of a program rounds once: no contraction, IEEE division and square root.
 */
#include "cuda_backend.h"
#include "ready.h"

#include <stdio.h>

enum { MAX_FUNCTIONS = 16 };

struct te_cuda_code {
    CUmodule module;
    int n_functions;
    struct {
        char name[48];
        CUfunction function;
        uint32_t shared; /* dynamic shared memory it was allowed */
    } functions[MAX_FUNCTIONS];
};

/* --- NVRTC -------------------------------------------------------------------------------------------------------- */

static const char *const fixed_options[] = {TE_CUDA_FIXED_OPTIONS};
enum { N_FIXED = sizeof fixed_options / sizeof *fixed_options };

typedef struct image {
    char *bytes;
    size_t size;
} image;

static void image_free(te_exec *exec, image *i)
{
    te_mem_free(exec->mem, i->bytes, i->size);
    *i = (image){NULL, 0};
}

/* The first lines of the compiler's log. */
static te_status fail_compile(te_exec *exec, nvrtcProgram program, const char *name, nvrtcResult result)
{
    te_cuda_device *d = te_cuda(exec);
    size_t size = 0;
    char *log = NULL;
    if (program && d->nvrtc.nvrtcGetProgramLogSize(program, &size) == NVRTC_SUCCESS && size > 1)
        log = te_mem_alloc(exec->mem, size);
    if (log && d->nvrtc.nvrtcGetProgramLog(program, log) != NVRTC_SUCCESS) log[0] = 0;
    te_exec_fail(exec, TE_ERROR_INTERNAL, "kernel %s does not compile for %s: %s: %.300s", name, d->target,
                 d->nvrtc.nvrtcGetErrorString(result), log ? log : "");
    if (log) te_mem_free(exec->mem, log, size);
    return TE_ERROR_INTERNAL;
}

static te_status take_image(te_exec *exec, nvrtcProgram program, const char *name, image *out)
{
    te_cuda_device *d = te_cuda(exec);
    bool binary = strncmp(d->target, "sm_", 3) == 0;
    nvrtcResult r =
        binary ? d->nvrtc.nvrtcGetCUBINSize(program, &out->size) : d->nvrtc.nvrtcGetPTXSize(program, &out->size);
    if (r != NVRTC_SUCCESS) return fail_compile(exec, program, name, r);
    if (!(out->bytes = te_mem_alloc(exec->mem, out->size)))
        return te_exec_fail(exec, TE_ERROR_MEMORY, "kernel %s: out of host memory", name);
    r = binary ? d->nvrtc.nvrtcGetCUBIN(program, out->bytes) : d->nvrtc.nvrtcGetPTX(program, out->bytes);
    if (r == NVRTC_SUCCESS) return TE_OK;
    image_free(exec, out);
    return fail_compile(exec, program, name, r);
}

static te_status compile_source(te_exec *exec, const char *name, const char *source, image *out)
{
    te_cuda_device *d = te_cuda(exec);
    char target[64];
    const char *options[N_FIXED + 1] = {fixed_options[0], fixed_options[1], target};
    nvrtcProgram program = NULL;
    snprintf(target, sizeof target, "--gpu-architecture=%s", d->target);
    nvrtcResult r = d->nvrtc.nvrtcCreateProgram(&program, source, name, 0, NULL, NULL);
    if (r == NVRTC_SUCCESS) r = d->nvrtc.nvrtcCompileProgram(program, N_FIXED + 1, options);
    te_status status = r == NVRTC_SUCCESS ? take_image(exec, program, name, out) : fail_compile(exec, program, name, r);
    if (program) d->nvrtc.nvrtcDestroyProgram(&program);
    return status;
}

/* --- code --------------------------------------------------------------------------------------------------------- */

static te_hash128 key_of(const te_cuda_device *d, const char *source, size_t length)
{
    te_hash128 key = te_hash128_add(TE_HASH128_START, source, length);
    key = te_hash128_add(key, d->target, strlen(d->target));
    key = te_hash128_add(key, &d->nvrtc_version, sizeof d->nvrtc_version);
    for (int i = 0; i < N_FIXED; i++) key = te_hash128_add(key, fixed_options[i], strlen(fixed_options[i]));
    return key;
}

/* From the build or from disk where that works: an image that the driver refuses is compiled again. */
static te_status load_module(te_exec *exec, const char *name, const char *source, size_t length, te_hash128 key,
                             CUmodule *module)
{
    te_cuda_device *d = te_cuda(exec);
    const void *ready = te_cuda_ready_find(d->capability, source, length);
    image im;
    if (ready && d->driver.cuModuleLoadData(module, ready) == CUDA_SUCCESS) return TE_OK;
    im.bytes = te_disk_cache_read(&d->cache, key, ".cubin", &im.size);
    if (im.bytes) {
        CUresult r = d->driver.cuModuleLoadData(module, im.bytes);
        image_free(exec, &im);
        if (r == CUDA_SUCCESS) return TE_OK;
    }
    te_status status = compile_source(exec, name, source, &im);
    if (status != TE_OK) return status;
    status = te_cuda_result(exec, d->driver.cuModuleLoadData(module, im.bytes), "loading a kernel");
    if (status == TE_OK) te_disk_cache_write(&d->cache, key, ".cubin", im.bytes, im.size);
    image_free(exec, &im);
    return status;
}

static void free_code(te_exec *exec, te_cuda_code *code)
{
    te_cuda(exec)->driver.cuModuleUnload(code->module);
    te_mem_free(exec->mem, code, sizeof *code);
}

te_status te_cuda_compile(te_exec *exec, const char *name, const char *source, size_t length, te_cuda_code **out)
{
    te_cuda_device *d = te_cuda(exec);
    te_hash128 key = key_of(d, source, length);
    te_cuda_code *code = te_map_find(&d->codes, key);
    if (code) {
        *out = code;
        return TE_OK;
    }
    code = te_mem_zalloc(exec->mem, sizeof *code);
    if (!code) return te_exec_fail(exec, TE_ERROR_MEMORY, "kernel %s: out of host memory", name);
    te_status status = load_module(exec, name, source, length, key, &code->module);
    if (status != TE_OK) {
        te_mem_free(exec->mem, code, sizeof *code);
        return status;
    }
    if (!te_map_put(&d->codes, exec->mem, key, code)) {
        free_code(exec, code);
        return te_exec_fail(exec, TE_ERROR_MEMORY, "kernel %s: out of host memory", name);
    }
    *out = code;
    return TE_OK;
}

void te_cuda_codes_close(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    te_cuda_code *code;
    for (size_t at = 0; (code = te_map_next(&d->codes, &at));) free_code(exec, code);
    te_map_clear(&d->codes, exec->mem);
}

/* --- launching ---------------------------------------------------------------------------------------------------- */

static te_status find_function(te_exec *exec, te_cuda_code *code, const char *name, int *index)
{
    te_cuda_device *d = te_cuda(exec);
    for (*index = 0; *index < code->n_functions; ++*index)
        if (strcmp(code->functions[*index].name, name) == 0) return TE_OK;
    if (code->n_functions == MAX_FUNCTIONS || strlen(name) >= sizeof code->functions[0].name)
        return te_exec_fail(exec, TE_ERROR_INTERNAL, "kernel %s: no room in its module's table", name);
    int variables = 0;
    CUfunction *function = &code->functions[*index].function;
    CUresult r = d->driver.cuModuleGetFunction(function, code->module, name);
    if (r == CUDA_SUCCESS) r = d->driver.cuFuncGetAttribute(&variables, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, *function);
    if (r != CUDA_SUCCESS) return te_cuda_result(exec, r, name);
    snprintf(code->functions[*index].name, sizeof code->functions[0].name, "%s", name);
    /* what it may ask for without saying so */
    code->functions[*index].shared = variables < 48 << 10 ? (48u << 10) - (uint32_t)variables : 0;
    code->n_functions++;
    return TE_OK;
}

te_status te_cuda_launch_code(te_exec *exec, te_cuda_code *code, const te_cuda_launch *launch, const char *operation)
{
    te_cuda_device *d = te_cuda(exec);
    int i;
    te_status status = find_function(exec, code, launch->name, &i);
    if (status != TE_OK) return status;
    CUfunction function = code->functions[i].function;
    if (launch->shared > code->functions[i].shared) {
        CUresult r = d->driver.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                                  (int)launch->shared);
        if (r != CUDA_SUCCESS) return te_cuda_result(exec, r, operation);
        code->functions[i].shared = launch->shared;
    }
    if (launch->args != d->args) memcpy(d->args, launch->args, launch->args_bytes);
    void *params[] = {d->args};
    const uint32_t *g = launch->grid, *b = launch->block;
    te_cuda_note(exec, operation);
    return te_cuda_result(
        exec,
        d->driver.cuLaunchKernel(function, g[0], g[1], g[2], b[0], b[1], b[2], launch->shared, d->stream, params, NULL),
        operation);
}
