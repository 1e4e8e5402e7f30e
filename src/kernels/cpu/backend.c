/* backend.c - the CPU backend's table, its memory and the choice of instruction set. */
#include "workers.h"

#include "../environment.h"
#include "../float_mode.h"

#include <stdio.h>
#include <string.h>
#if defined(TE_ISA_HAS_X86) && defined(__x86_64__)
#include <cpuid.h>
#endif
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
    unsigned a, b, c, d;
    bool halves = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    if (halves && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        best = TE_CPU_AVX2;
    if (best == TE_CPU_AVX2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
        best = TE_CPU_AVX512;
#endif
    const char *wish = te_environment(TE_ENV_CPU_ISA);
    for (int i = 0; wish && i < (int)best; i++)
        if (strcmp(wish, isa_names[i]) == 0) best = (te_cpu_isa)i;
    return best;
}

#ifdef TE_ISA_HAS_X86
/* Intel's processors with a matrix unit gather 16 numbers in half the time of 16 loads. Those before are slowed down
 * against leaks, and AMD's load one by one. */
static bool gathers_fast(void)
{
#ifdef __x86_64__
    enum { AMX_TILE = 1 << 24 };
    unsigned a, b, c, d;
    return __builtin_cpu_is("intel") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_TILE) != 0;
#else
    return false;
#endif
}
#endif

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
    device->gathers = more && gathers_fast();
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

static void cpu_describe(te_exec *exec, char *text, size_t size)
{
    snprintf(text, size, "%s", te_cpu_isa_name(te_cpu(exec)->isa));
}

static void cpu_close(te_exec *exec)
{
    te_cpu_device *device = te_cpu(exec);
    if (!device) return;
    te_cpu_workers_free(exec);
    if (device->gemm_release) device->gemm_release(exec, device->gemm);
    te_quantize_close(exec, device);
    te_tables_free(exec, device);
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
#define TE_KERNEL_DEVICE(name, parameters, arguments, moved)
#define TE_KERNEL(name, parameters, arguments, moved) \
    static te_status cpu_##name parameters            \
    {                                                 \
        te_float_mode mode = te_float_mode_begin();   \
        te_status status = te_cpu_##name arguments;   \
        te_float_mode_end(&mode);                     \
        return status;                                \
    }
#include "../kernel_list.h"

static te_status cpu_integers(te_exec *exec, void *values, te_dtype dtype, int64_t n, const te_integers *drawn)
{
    (void)dtype;
    te_float_mode mode = te_float_mode_begin();
    te_status status = te_cpu_integers(exec, values, n, drawn);
    te_float_mode_end(&mode);
    return status;
}

const te_backend te_backend_cpu = {
    .name = "cpu",
    .host_memory = true,
    .describe = cpu_describe,
    .device_open = cpu_open,
    .device_close = cpu_close,
    .memory_alloc = te_cpu_memory_alloc,
    .memory_free = te_cpu_memory_free,
    .memory_copy = cpu_memory_copy,
    .synchronize = cpu_synchronize,
#define TE_KERNEL_DEVICE(name, parameters, arguments, moved)
#define TE_KERNEL(name, parameters, arguments, moved) .name = cpu_##name,
#include "../kernel_list.h"
    .adds_halves = true,
    .wide_attention = true,
    .integers = cpu_integers,
};
