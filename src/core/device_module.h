/* device_module.h - finding and opening the library that holds an accelerator's backend. */
#ifndef TE_CORE_DEVICE_MODULE_H
#define TE_CORE_DEVICE_MODULE_H

#include "kernels/module.h"

typedef struct te_device_module {
    void            *library;
    const te_module *table; /* NULL: not opened */
} te_device_module;

/* Opens libtetrain_cuda.so: the file that TETRAIN_CUDA_MODULE names; otherwise beside libtetrain or the executable that
 * holds it, in ../lib from there, or on the loader's path. On failure the message in exec says what was looked for and
 * where. Opening twice is fine. */
te_status te_device_module_open(te_device_module *module, te_exec *exec);
void      te_device_module_close(te_device_module *module);

#endif
