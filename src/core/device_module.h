/* device_module.h - finding and opening the library that holds an accelerator's backend. */
#ifndef TE_CORE_DEVICE_MODULE_H
#define TE_CORE_DEVICE_MODULE_H

#include "kernels/module.h"

typedef struct te_device_module {
    void            *library;
    const te_module *table; /* NULL: not opened */
} te_device_module;

/* Opens a library of tetrain's: the file `wish`, where it is not NULL; otherwise `file` beside libtetrain or the
 * executable that holds it, in ../lib from there, or on the loader's path. NULL on failure: the message in exec says
 * what was looked for (`what`: "CUDA") and where. */
void *te_module_library(te_exec *exec, const char *file, const char *wish, const char *what);

/* Opens libtetrain_cuda.so, or what TETRAIN_CUDA_MODULE names. Opening twice is fine. */
te_status te_device_module_open(te_device_module *module, te_exec *exec);
void      te_device_module_close(te_device_module *module);

#endif
