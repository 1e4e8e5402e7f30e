/* device_module.c - see device_module.h. */
#define _GNU_SOURCE /* dladdr */
#include "device_module.h"

#include "kernels/environment.h"

#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

/* Folder, with its last '/', of the file that this code was loaded from. */
static void own_folder(char *folder, size_t size)
{
    static const char here = 0;
    Dl_info info;
    snprintf(folder, size, "%s", dladdr(&here, &info) && info.dli_fname ? info.dli_fname : "");
    if (folder[0] != '/') { /* an executable may be known by the name it was called with */
        ssize_t n = readlink("/proc/self/exe", folder, size - 1);
        folder[n > 0 ? n : 0] = 0;
    }
    char *slash = strrchr(folder, '/');
    if (slash) slash[1] = 0;
}

/* Opens `path`; what was tried is added to `tried`. A file that is there but cannot be used ends the search. */
static void *try_path(const char *path, char *tried, size_t size, bool *found)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    size_t used = strlen(tried);
    *found = strchr(path, '/') && access(path, F_OK) == 0;
    if (!library) snprintf(tried + used, size - used, "%s%.140s", used ? "; " : "", *found ? dlerror() : path);
    return library;
}

void *te_module_library(te_exec *exec, const char *file, const char *wish, const char *what)
{
    char folder[1024], path[1100], tried[sizeof exec->message - 64] = "";
    bool found = false;
    void *library = NULL;
    own_folder(folder, sizeof folder);
    if (wish) library = try_path(wish, tried, sizeof tried, &found);
    for (int i = 0; !wish && i < 3 && !library && !found; i++) {
        snprintf(path, sizeof path, "%s%s%s", i < 2 ? folder : "", i == 1 ? "../lib/" : "", file);
        library = try_path(path, tried, sizeof tried, &found);
    }
    if (!library) te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "the %s module cannot be opened; tried %s", what, tried);
    return library;
}

te_status te_device_module_open(te_device_module *module, te_exec *exec)
{
    if (module->table) return TE_OK;
    void *library = te_module_library(exec, "libtetrain_cuda.so", te_environment(TE_ENV_CUDA_MODULE), "CUDA");
    if (!library) return TE_ERROR_UNSUPPORTED;
    te_module_get_function *get;
    *(void **)&get = dlsym(library, TE_MODULE_ENTRY);
    const te_module *table = get ? get() : NULL;
    if (!table || table->layout != TE_MODULE_LAYOUT) {
        dlclose(library);
        return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "the CUDA module found is of another build of tetrain");
    }
    *module = (te_device_module){library, table};
    return TE_OK;
}

void te_device_module_close(te_device_module *module)
{
    if (module->library) dlclose(module->library);
    *module = (te_device_module){NULL, NULL};
}
