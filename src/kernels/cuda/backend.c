/* backend.c - the CUDA backend's table, and the entry through which libtetrain finds it.
 *
 * Every function makes the device's context the thread's. Where the host had made another one current, that is current
 * again when the function returns; one that had none is left with the device's, which costs less. collectives.c does
 * the same for its own.
 */
#include "../module.h"
#include "cuda_backend.h"

#define GUARDED(name, parameters, arguments)                  \
    static te_status guarded_##name parameters                \
    {                                                         \
        CUcontext host = te_cuda_host_context(exec);          \
        te_status status = te_cuda_##name arguments;          \
        te_cuda_leave(exec, host);                            \
        return status;                                        \
    }
#define TE_KERNEL_OPTIONAL(name, parameters, arguments, moved)
#define TE_KERNEL(name, parameters, arguments, moved) GUARDED(name, parameters, arguments)
#include "../kernel_list.h"
GUARDED(triangle, (te_exec *exec, const te_view *dst, const te_view *src, int64_t diagonal, bool upper),
        (exec, dst, src, diagonal, upper))
GUARDED(memory_copy, (te_exec *exec, void *dst, const void *src, size_t bytes, te_copy_kind kind),
        (exec, dst, src, bytes, kind))
GUARDED(read_begin, (te_exec *exec, const void *src, size_t bytes, void **reading), (exec, src, bytes, reading))
GUARDED(read_end, (te_exec *exec, void *reading, void *dst), (exec, reading, dst))
GUARDED(synchronize, (te_exec *exec), (exec))
GUARDED(pack, (te_exec *exec, int32_t *offsets, const te_view *lens, int64_t tokens), (exec, offsets, lens, tokens))
GUARDED(delayed_update, (te_exec *exec, const te_delayed *tensors, int64_t n, uint64_t *skipped),
        (exec, tensors, n, skipped))
GUARDED(check_classes, (te_exec *exec, const te_view *targets, int64_t classes, double ignored),
        (exec, targets, classes, ignored))
GUARDED(integers, (te_exec *exec, void *values, te_dtype dtype, int64_t n, const te_integers *drawn),
        (exec, values, dtype, n, drawn))
GUARDED(capture_begin, (te_exec *exec), (exec))
GUARDED(capture_end, (te_exec *exec, bool keep, void **graph), (exec, keep, graph))
GUARDED(graph_launch, (te_exec *exec, void *graph), (exec, graph))

/* Which opens cuDNN, to say what there is. */
static void guarded_describe(te_exec *exec, char *text, size_t size)
{
    CUcontext host = te_cuda_host_context(exec);
    te_cuda_describe(exec, text, size);
    te_cuda_leave(exec, host);
}

static void *guarded_memory_alloc(te_exec *exec, size_t bytes)
{
    CUcontext host = te_cuda_host_context(exec);
    void *memory = te_cuda_memory_alloc(exec, bytes);
    te_cuda_leave(exec, host);
    return memory;
}

static void guarded_memory_free(te_exec *exec, void *ptr, size_t bytes)
{
    CUcontext host = te_cuda_host_context(exec);
    te_cuda_memory_free(exec, ptr, bytes);
    te_cuda_leave(exec, host);
}

static void guarded_graph_free(te_exec *exec, void *graph)
{
    CUcontext host = te_cuda_host_context(exec);
    te_cuda_graph_free(exec, graph);
    te_cuda_leave(exec, host);
}

static const te_backend backend = {
    .name = "cuda",
    .host_memory = false,
    .emits = true,
    .describe = guarded_describe,
    .device_open = te_cuda_device_open,
    .device_close = te_cuda_device_close,
    .memory_alloc = guarded_memory_alloc,
    .memory_free = guarded_memory_free,
    .memory_copy = guarded_memory_copy,
    .read_begin = guarded_read_begin,
    .read_end = guarded_read_end,
    .synchronize = guarded_synchronize,
#define TE_KERNEL_OPTIONAL(name, parameters, arguments, moved)
#define TE_KERNEL(name, parameters, arguments, moved) .name = guarded_##name,
#include "../kernel_list.h"
    .triangle = guarded_triangle,
    .gemm_decline = te_cuda_decline_narrow,
    .forget = te_cuda_forget,
    .pack = guarded_pack,
    .delayed_update = guarded_delayed_update,
    .check_classes = guarded_check_classes,
    .integers = guarded_integers,
    .capture_begin = guarded_capture_begin,
    .capture_end = guarded_capture_end,
    .graph_launch = guarded_graph_launch,
    .graph_free = guarded_graph_free,
#ifdef TE_HAVE_NCCL
    .collectives = &te_cuda_collectives_table,
#endif
};

static const te_module module = {TE_MODULE_LAYOUT, &backend, te_cuda_device_count};

TE_API te_module_get_function te_module_get;

const te_module *te_module_get(void) { return &module; }
