/* backend.c - the CUDA backend's table, and the entry through which libtetrain finds it. */
#include "../module.h"
#include "cuda_backend.h"

static const te_backend backend = {
    .name = "cuda",
    .host_memory = false,
    .emits = true,
    .describe = te_cuda_describe,
    .device_open = te_cuda_device_open,
    .device_close = te_cuda_device_close,
    .memory_alloc = te_cuda_memory_alloc,
    .memory_free = te_cuda_memory_free,
    .memory_copy = te_cuda_memory_copy,
    .read_begin = te_cuda_read_begin,
    .read_end = te_cuda_read_end,
    .synchronize = te_cuda_synchronize,
#define TE_KERNEL_OPTIONAL(name, parameters, arguments, moved)
#define TE_KERNEL(name, parameters, arguments, moved) .name = te_cuda_##name,
#include "../kernel_list.h"
    .triangle = te_cuda_triangle,
    .gemm_decline = te_cuda_decline_narrow,
    .forget = te_cuda_forget,
    .pack = te_cuda_pack,
    .delayed_update = te_cuda_delayed_update,
    .check_classes = te_cuda_check_classes,
    .integers = te_cuda_integers,
    .capture_begin = te_cuda_capture_begin,
    .capture_end = te_cuda_capture_end,
    .graph_launch = te_cuda_graph_launch,
    .graph_free = te_cuda_graph_free,
#ifdef TE_HAVE_NCCL
    .collectives = &te_cuda_collectives_table,
#endif
};

static const te_module module = {TE_MODULE_LAYOUT, &backend, te_cuda_device_count};

TE_API te_module_get_function te_module_get;

const te_module *te_module_get(void) { return &module; }
