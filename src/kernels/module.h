/* module.h - a backend in a library of its own, opened when a device of its kind is first asked for.
 *
 * The library exports one function, TE_MODULE_ENTRY, which returns this table. It links nothing of libtetrain: the few
 * shared functions of src/kernels are compiled into both. So both must come from one build, which `layout` checks.
 */
#ifndef TE_KERNELS_MODULE_H
#define TE_KERNELS_MODULE_H

#include "kernels.h"

/* Changes whenever a struct that both sides see changes its size. */
#define TE_MODULE_LAYOUT                                                                                              \
    ((uint64_t)sizeof(te_backend) | (uint64_t)sizeof(te_exec) << 16 | (uint64_t)sizeof(te_attention_grad) << 32 |      \
     (uint64_t)(sizeof(te_gemm) + sizeof(te_run) + sizeof(te_program) + sizeof(te_insn)) << 48)

typedef struct te_module {
    uint64_t          layout;
    const te_backend *backend;
    /* Number of devices that device_open would accept an index of; 0 with the reason in `exec`'s message. exec has mem
     * alone. */
    int (*device_count)(te_exec *exec);
} te_module;

#define TE_MODULE_ENTRY "te_module_get"
typedef const te_module *te_module_get_function(void);

#endif
