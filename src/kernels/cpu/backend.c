/* backend.c - the CPU backend's table, its memory and the choice of instruction set. */
#include "workers.h"

#include "../environment.h"
#include "../float_mode.h"

#include <string.h>
#ifdef TE_ISA_HAS_NEONBF16
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

static const char *const isa_names[TE_CPU_ISA_COUNT] = {"portable", "avx2", "avx512"};

const char *te_cpu_isa_name(te_cpu_isa isa)
{
#ifdef TE_ISA_HAS_NEON
    if (isa == TE_CPU_PORTABLE) return "neon";
#endif
    return isa_names[isa];
}

te_cpu_isa te_cpu_isa_detect(void)
{
    te_cpu_isa best = TE_CPU_PORTABLE;
#if defined(TE_ISA_HAS_X86) && defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = TE_CPU_AVX2;
    if (best == TE_CPU_AVX2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        best = TE_CPU_AVX512;
#endif
    const char *wish = te_environment(TE_ENV_CPU_ISA);
    for (int i = 0; wish && i < (int)best; i++)
        if (strcmp(wish, isa_names[i]) == 0) best = (te_cpu_isa)i;
    return best;
}

te_status te_cpu_finish(te_exec *exec, te_status status)
{
    if (!te_cpu_stopped(exec)) return status;
    atomic_store_explicit(&te_cpu(exec)->stopped, 0, memory_order_relaxed);
    return status == TE_OK ? te_exec_fail(exec, TE_ERROR_INTERRUPTED, "interrupted") : status;
}

static te_status cpu_open(te_exec *exec, int index)
{
    if (index != 0) return te_exec_fail(exec, TE_ERROR_ARGUMENT, "cpu:%d: there is one CPU device, cpu", index);
    te_cpu_device *device = te_mem_zalloc(exec->mem, sizeof *device);
    if (!device) return te_exec_fail(exec, TE_ERROR_MEMORY, "out of memory opening the CPU device");
    device->isa = te_cpu_isa_detect();
    device->quantize_keeps_from = 64 << 20;
#ifdef TE_ISA_HAS_X86
    const char *wish = te_environment(TE_ENV_CPU_ISA);
    bool        declined = wish && strcmp(wish, isa_names[TE_CPU_AVX512]) == 0;
    bool        more = device->isa == TE_CPU_AVX512 && !declined;
#ifdef TE_ISA_HAS_AVX512BF16
    device->has_bf16 = more && __builtin_cpu_supports("avx512bf16");
#endif
#ifdef TE_ISA_HAS_AVX512VBMI
    device->has_vbmi = more && __builtin_cpu_supports("avx512vbmi");
    device->quantize_ahead = __builtin_cpu_is("amdfam19h") ? 0 : 8 << 10; /* Zen 4 (isa/quantize_along.h) */
#endif
#elif defined(TE_ISA_HAS_NEONBF16)
    device->has_bf16 = !te_environment(TE_ENV_CPU_ISA) && (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
#endif
    te_float_mode mode = te_float_mode_begin();
    te_status status = te_quantize_open(exec, device);
    te_float_mode_end(&mode);
    if (status != TE_OK) {
        te_mem_free(exec->mem, device, sizeof *device);
        return te_exec_fail(exec, status, "out of memory opening the CPU device");
    }
    exec->device = device;
    return TE_OK;
}

static void cpu_close(te_exec *exec)
{
    te_cpu_device *device = te_cpu(exec);
    if (!device) return;
    te_cpu_workers_free(exec);
    if (device->gemm_release) device->gemm_release(exec, device->gemm);
    te_quantize_close(exec, device);
    te_mem_free(exec->mem, device, sizeof *device);
    exec->device = NULL;
}

static te_status cpu_memory_copy(te_exec *exec, void *dst, const void *src, size_t bytes, te_copy_kind kind)
{
    (void)exec;
    (void)kind;
    if (bytes) memmove(dst, src, bytes);
    return TE_OK;
}

static te_status cpu_synchronize(te_exec *exec)
{
    (void)exec;
    return TE_OK;
}

/* What the table calls: kernels run in the default floating-point mode, whatever the host's is; workers have it too. */
#define ENTRY(name, parameters, arguments)          \
    static te_status cpu_##name parameters          \
    {                                               \
        te_float_mode mode = te_float_mode_begin(); \
        te_status status = te_cpu_##name arguments; \
        te_float_mode_end(&mode);                   \
        return status;                              \
    }

ENTRY(program_run, (te_exec *exec, te_program *program, const te_run *runs, int n_runs), (exec, program, runs, n_runs))
ENTRY(gemm, (te_exec *exec, const te_gemm *gemm), (exec, gemm))
ENTRY(attention, (te_exec *exec, const te_attention *a), (exec, a))
ENTRY(attention_backward, (te_exec *exec, const te_attention_grad *g), (exec, g))
ENTRY(rotate, (te_exec *exec, const te_rotation *rotation), (exec, rotation))
ENTRY(quantize, (te_exec *exec, const te_quantize_job *job), (exec, job))
ENTRY(dequantize, (te_exec *exec, const te_quantize_job *job, int side), (exec, job, side))
ENTRY(copy, (te_exec *exec, const te_view *dst, const te_view *src), (exec, dst, src))
ENTRY(embedding, (te_exec *exec, const te_view *out, const te_view *table, const te_view *ids), (exec, out, table, ids))
ENTRY(embedding_backward, (te_exec *exec, const te_view *dtable, const te_view *dy, const te_view *ids,
                           double *squares), (exec, dtable, dy, ids, squares))
ENTRY(gather, (te_exec *exec, const te_view *out, const te_view *src, const te_view *index, int dim),
      (exec, out, src, index, dim))
ENTRY(scatter_add, (te_exec *exec, const te_view *dst, const te_view *src, const te_view *index, int dim),
      (exec, dst, src, index, dim))
ENTRY(scatter, (te_exec *exec, const te_view *dst, const te_view *src, const te_view *index, int dim),
      (exec, dst, src, index, dim))
ENTRY(arg_reduce, (te_exec *exec, const te_view *index, const te_view *src, bool largest), (exec, index, src, largest))
ENTRY(topk, (te_exec *exec, const te_view *values, const te_view *indices, const te_view *src, bool largest),
      (exec, values, indices, src, largest))
ENTRY(sort, (te_exec *exec, const te_view *indices, const te_view *src, bool descending),
      (exec, indices, src, descending))
ENTRY(cumsum, (te_exec *exec, const te_view *dst, const te_view *src, bool reverse), (exec, dst, src, reverse))
ENTRY(multinomial, (te_exec *exec, const te_view *out, const te_view *src, bool replacement, te_rng rng),
      (exec, out, src, replacement, rng))
ENTRY(route_map, (te_exec *exec, const te_view *map, const te_view *counts, const te_view *routing, int64_t rows),
      (exec, map, counts, routing, rows))
ENTRY(route_rows, (te_exec *exec, const te_routes *routes, const te_view *rows, const te_view *tokens),
      (exec, routes, rows, tokens))
ENTRY(route_tokens, (te_exec *exec, const te_routes *routes, const te_view *tokens, const te_view *rows),
      (exec, routes, tokens, rows))
ENTRY(route_weights, (te_exec *exec, const te_routes *routes, const te_view *weights, const te_view *rows,
                      const te_view *tokens), (exec, routes, weights, rows, tokens))
ENTRY(route_choose, (te_exec *exec, const te_view *map, const te_view *scores, int64_t k, int64_t groups,
                     int64_t best_groups), (exec, map, scores, k, groups, best_groups))
ENTRY(integers, (te_exec *exec, int64_t *values, int64_t n, const te_integers *drawn), (exec, values, n, drawn))

const te_backend te_backend_cpu = {
    .name = "cpu",
    .host_memory = true,
    .device_open = cpu_open,
    .device_close = cpu_close,
    .memory_alloc = te_cpu_memory_alloc,
    .memory_free = te_cpu_memory_free,
    .memory_copy = cpu_memory_copy,
    .synchronize = cpu_synchronize,
    .program_run = cpu_program_run,
    .gemm = cpu_gemm,
    .attention = cpu_attention,
    .attention_backward = cpu_attention_backward,
    .rotate = cpu_rotate,
    .quantize = cpu_quantize,
    .dequantize = cpu_dequantize,
    .copy = cpu_copy,
    .embedding = cpu_embedding,
    .embedding_backward = cpu_embedding_backward,
    .gather = cpu_gather,
    .scatter_add = cpu_scatter_add,
    .adds_halves = true,
    .scatter = cpu_scatter,
    .arg_reduce = cpu_arg_reduce,
    .topk = cpu_topk,
    .sort = cpu_sort,
    .cumsum = cpu_cumsum,
    .multinomial = cpu_multinomial,
    .route_map = cpu_route_map,
    .route_rows = cpu_route_rows,
    .route_tokens = cpu_route_tokens,
    .route_weights = cpu_route_weights,
    .route_choose = cpu_route_choose,
    .integers = cpu_integers,
};
