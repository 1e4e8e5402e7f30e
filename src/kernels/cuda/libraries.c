/* libraries.c - see libraries.h. */
#include "libraries.h"

#include "../environment.h"

#include <dlfcn.h>
#include <glob.h>
#include <stdio.h>
#include <unistd.h>

enum { PATH_BYTES = 1024 };

/* Folders to look in: "%s" stands for the variable's value. Patterns may match several. */
static const struct place {
    int variable; /* te_variable, -1: none */
    const char *pattern;
} places[] = {
    {TE_ENV_CUDA_HOME, "%s/lib64"},
    {TE_ENV_CUDA_HOME, "%s/lib"},
    {TE_ENV_CUDA_PATH, "%s/lib64"},
    {TE_ENV_CUDA_PATH, "%s/lib"},
    {TE_ENV_VIRTUAL_ENV, "%s/lib/python3*/site-packages/nvidia/*/lib"},
    {TE_ENV_CONDA_PREFIX, "%s/lib/python3*/site-packages/nvidia/*/lib"},
    {-1, "/usr/local/cuda/lib64"},
    {-1, "/usr/local/nvidia/lib64"}, /* the driver's in containers */
    {-1, "/usr/local/nvidia/lib"},
    {-1, "/usr/lib/wsl/lib"}, /* and in WSL */
    {TE_ENV_HOME, "%s/.local/lib/python3*/site-packages/nvidia/*/lib"},
    {-1, "/usr/local/lib/python3*/*-packages/nvidia/*/lib"},
    {-1, "/usr/lib/python3*/*-packages/nvidia/*/lib"},
};

typedef struct search {
    te_exec *exec;
    const char *file, *beside; /* beside: a pattern of what the library opens by name itself, NULL: nothing */
    void *library;
    char broken[200]; /* what the loader said of a file that is there */
} search;

enum { HOW = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE };

/* NVRTC asks the loader for the file of its built-in functions without saying where, and so finds it on the loader's
 * path or where it has been opened before: from the folder that NVRTC itself was found in. */
static void open_beside(const search *s, const char *path)
{
    char pattern[2 * PATH_BYTES];
    const char *end = s->beside ? strrchr(path, '/') : NULL;
    glob_t found;
    if (!end || (size_t)(end - path) >= PATH_BYTES) return;
    snprintf(pattern, sizeof pattern, "%.*s/%s", (int)(end - path), path, s->beside);
    if (glob(pattern, 0, NULL, &found) == 0)
        for (size_t i = 0; i < found.gl_pathc; i++) dlopen(found.gl_pathv[i], HOW);
    globfree(&found);
}

static void try_file(search *s, const char *path)
{
    s->library = dlopen(path, HOW);
    if (s->library) open_beside(s, path);
    if (s->library || access(path, F_OK) != 0 || s->broken[0]) return;
    const char *reason = dlerror();
    snprintf(s->broken, sizeof s->broken, "; %.190s", reason ? reason : path);
}

static void try_pattern(search *s, const char *pattern)
{
    glob_t found;
    if (glob(pattern, 0, NULL, &found) == 0)
        for (size_t i = 0; i < found.gl_pathc && !s->library; i++) try_file(s, found.gl_pathv[i]);
    globfree(&found);
}

static void try_places(search *s)
{
    char folder[PATH_BYTES], path[PATH_BYTES + 64];
    try_file(s, s->file);
    for (size_t i = 0; i < sizeof places / sizeof *places && !s->library; i++) {
        const char *value = places[i].variable < 0 ? "" : te_environment((te_variable)places[i].variable);
        if (!value) continue;
        const char *rest = places[i].variable < 0 ? places[i].pattern : places[i].pattern + 2;
        int n = snprintf(folder, sizeof folder, "%s%s", value, rest);
        if (n < 0 || (size_t)n >= sizeof folder) continue;
        snprintf(path, sizeof path, "%s/%s", folder, s->file);
        try_pattern(s, path);
    }
}

static te_status fail_search(const search *s, const char *const *files, const char *wish)
{
    char names[128] = "";
    for (size_t i = 0, used = 0; files[i] && used < sizeof names; i++)
        used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i ? " or " : "", files[i]);
    if (wish)
        return te_exec_fail(s->exec, TE_ERROR_UNSUPPORTED, "%s cannot be opened in %.200s%s", names, wish, s->broken);
    return te_exec_fail(s->exec, TE_ERROR_UNSUPPORTED,
                        "%s not found on the loader's path, in $CUDA_HOME, $CUDA_PATH, /usr/local/cuda or the nvidia "
                        "packages of Python%s",
                        names, s->broken);
}

static te_status load(te_exec *exec, const char *const *files, const char *beside, const char *const *functions,
                      size_t n, void *table)
{
    const char *wish = te_environment(TE_ENV_CUDA_LIBRARIES);
    char path[PATH_BYTES];
    search s = {.exec = exec, .beside = beside};
    for (int i = 0; files[i] && !s.library; i++) {
        s.file = files[i];
        snprintf(path, sizeof path, "%s/%s", wish ? wish : "", files[i]);
        if (wish)
            try_file(&s, path);
        else
            try_places(&s);
    }
    if (!s.library) return fail_search(&s, files, wish);
    for (size_t i = 0; i < n; i++) {
        void *address = dlsym(s.library, functions[i]);
        if (!address)
            return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "%s has no function %s: it is too old", s.file,
                                functions[i]);
        memcpy((char *)table + i * sizeof address, &address, sizeof address);
    }
    return TE_OK;
}

te_status te_cuda_load_library(te_exec *exec, const char *const *files, const char *const *functions, size_t n,
                               void *table)
{
    return load(exec, files, NULL, functions, n, table);
}

#define NAME(name) #name,
#define LOAD(functions_of, beside, files)                                                                              \
    static const char *const functions[] = {functions_of(NAME)};                                                       \
    return load(exec, files, beside, functions, sizeof functions / sizeof *functions, table)

te_status te_cuda_load_driver(te_exec *exec, te_cuda_driver *table)
{
    static const char *const files[] = {"libcuda.so.1", NULL};
    LOAD(TE_CUDA_DRIVER, NULL, files);
}

/* The same file of CUDA 13 and 12, and that order turned around. */
#define BY_VERSION(file) {{file ".13", file ".12", NULL}, {file ".12", file ".13", NULL}}

te_status te_cuda_load_nvrtc(te_exec *exec, int driver_version, te_cuda_nvrtc *table)
{
    static const char *const files[2][3] = BY_VERSION("libnvrtc.so");
    LOAD(TE_CUDA_NVRTC, "libnvrtc-builtins.so.*", files[driver_version < 13000]);
}

te_status te_cuda_load_blas(te_exec *exec, int driver_version, te_cuda_blas_library *table)
{
    static const char *const files[2][3] = BY_VERSION("libcublasLt.so");
    LOAD(TE_CUDA_BLAS, NULL, files[driver_version < 13000]);
}
