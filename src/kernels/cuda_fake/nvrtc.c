/* nvrtc.c - NVRTC's entry points: the "binary" is the source. */
#include "fake.h"

#include "kernels/cuda_sim/cuda_sim.h"

#include <dlfcn.h>
#include <nvrtc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        int code = te_fake_enter(__func__);                                                                            \
        if (code) return (nvrtcResult)code;                                                                            \
    } while (0)

struct _nvrtcProgram {
    char *image;
    char log[4096];
};

static const char magic[] = "fake cubin\n";

static int version = 13000;

TE_FAKE void te_fake_set_nvrtc(int wanted) { version = wanted; }

TE_FAKE nvrtcResult nvrtcVersion(int *major, int *minor)
{
    ENTER();
    *major = version / 1000;
    *minor = version % 1000 / 10;
    return NVRTC_SUCCESS;
}

TE_FAKE const char *nvrtcGetErrorString(nvrtcResult result)
{
    return result == NVRTC_ERROR_COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_FAKED";
}

static const int known[] = {75, 80, 90, 100};

/* $TE_FAKE_TARGETS are so many in front of these. */
static int further_targets(void)
{
    const char *wanted = getenv("TE_FAKE_TARGETS");
    return wanted ? atoi(wanted) : 0;
}

TE_FAKE nvrtcResult nvrtcGetNumSupportedArchs(int *n)
{
    ENTER();
    *n = further_targets() + (int)(sizeof known / sizeof *known);
    return NVRTC_SUCCESS;
}

TE_FAKE nvrtcResult nvrtcGetSupportedArchs(int *archs)
{
    ENTER();
    int further = further_targets();
    for (int i = 0; i < further; i++) archs[i] = 10 + i % 50;
    memcpy(archs + further, known, sizeof known);
    return NVRTC_SUCCESS;
}

TE_FAKE nvrtcResult nvrtcCreateProgram(nvrtcProgram *out, const char *source, const char *name, int n_headers,
                                       const char *const *headers, const char *const *names)
{
    (void)name, (void)headers, (void)names;
    ENTER();
    if (n_headers) return NVRTC_ERROR_INVALID_INPUT;
    nvrtcProgram p = calloc(1, sizeof *p);
    p->image = malloc(strlen(source) + sizeof magic);
    memcpy(p->image, magic, sizeof magic);
    strcat(p->image, source);
    *out = p;
    te_fake_made(1);
    return NVRTC_SUCCESS;
}

TE_FAKE nvrtcResult nvrtcDestroyProgram(nvrtcProgram *program)
{
    ENTER();
    free((*program)->image);
    free(*program);
    *program = NULL;
    te_fake_made(-1);
    return NVRTC_SUCCESS;
}

/* The real compiler, where $TE_FAKE_NVRTC names its library: what it refuses is refused here. */
static nvrtcResult compile_really(const char *source, int n_options, const char *const *options, char *log,
                                  size_t log_size)
{
    const char *path = getenv("TE_FAKE_NVRTC");
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library) return path ? NVRTC_ERROR_BUILTIN_OPERATION_FAILURE : NVRTC_SUCCESS;
    __typeof__(&nvrtcCreateProgram) create;
    __typeof__(&nvrtcCompileProgram) compile;
    __typeof__(&nvrtcGetProgramLogSize) get_log_size;
    __typeof__(&nvrtcGetProgramLog) get_log;
    __typeof__(&nvrtcDestroyProgram) destroy;
    *(void **)&create = dlsym(library, "nvrtcCreateProgram");
    *(void **)&compile = dlsym(library, "nvrtcCompileProgram");
    *(void **)&get_log_size = dlsym(library, "nvrtcGetProgramLogSize");
    *(void **)&get_log = dlsym(library, "nvrtcGetProgramLog");
    *(void **)&destroy = dlsym(library, "nvrtcDestroyProgram");
    nvrtcProgram program = NULL;
    size_t size = 0;
    nvrtcResult r = create(&program, source, "kernel", 0, NULL, NULL);
    if (r == NVRTC_SUCCESS) r = compile(program, n_options, options);
    if (r != NVRTC_SUCCESS && get_log_size(program, &size) == NVRTC_SUCCESS && size <= log_size) get_log(program, log);
    destroy(&program);
    return r;
}

TE_FAKE nvrtcResult nvrtcCompileProgram(nvrtcProgram p, int n_options, const char *const *options)
{
    ENTER();
    nvrtcResult r = compile_really(p->image + sizeof magic - 1, n_options, options, p->log, sizeof p->log);
    if (r != NVRTC_SUCCESS || te_fake_idle()) return r;
    te_cuda_sim *sim = te_cuda_sim_compile(p->image + sizeof magic - 1, NULL, p->log, sizeof p->log);
    if (!sim) return NVRTC_ERROR_COMPILATION;
    te_cuda_sim_release(sim);
    return NVRTC_SUCCESS;
}

TE_FAKE nvrtcResult nvrtcGetCUBINSize(nvrtcProgram p, size_t *size)
{
    ENTER();
    *size = strlen(p->image) + 1;
    return NVRTC_SUCCESS;
}

TE_FAKE nvrtcResult nvrtcGetCUBIN(nvrtcProgram p, char *image)
{
    ENTER();
    strcpy(image, p->image);
    return NVRTC_SUCCESS;
}

TE_FAKE nvrtcResult nvrtcGetPTXSize(nvrtcProgram p, size_t *size) { return nvrtcGetCUBINSize(p, size); }

TE_FAKE nvrtcResult nvrtcGetPTX(nvrtcProgram p, char *image)
{
    ENTER();
    strcpy(image, p->image);
    return NVRTC_SUCCESS;
}

TE_FAKE nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram p, size_t *size)
{
    *size = strlen(p->log) + 1;
    return NVRTC_SUCCESS;
}

TE_FAKE nvrtcResult nvrtcGetProgramLog(nvrtcProgram p, char *log)
{
    strcpy(log, p->log);
    return NVRTC_SUCCESS;
}
