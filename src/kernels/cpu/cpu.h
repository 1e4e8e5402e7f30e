/* cpu.h - what the files of the CPU backend share.
 *
 * Files in isa/ hold the inner loops. The build compiles each of them once per instruction set with TE_ISA defined to
 * one of `portable`, `avx2`, `avx512`; what they export is wrapped in TE_ISA_NAME so that the copies do not collide,
 * and is reached through the device's `isa` at run time. All copies give the same bits, but for products (gemm.h) and
 * attention. That is compiled for `avx512bf16` besides, and quantizing for `avx512vbmi`. On 64-bit Arm processors
 * `portable` is NEON, which all of them have (TE_ISA_neon), and products are compiled for `neonbf16` besides.
 */
#ifndef TE_KERNELS_CPU_H
#define TE_KERNELS_CPU_H

#include "../kernels.h"

#define TE_ISA_JOIN2(a, b) a##_##b
#define TE_ISA_JOIN(a, b)  TE_ISA_JOIN2(a, b)
#define TE_ISA_NAME(name)  TE_ISA_JOIN(name, TE_ISA)

typedef enum te_cpu_isa { TE_CPU_PORTABLE, TE_CPU_AVX2, TE_CPU_AVX512, TE_CPU_ISA_COUNT } te_cpu_isa;

/* The state behind te_exec.device on the CPU. */
typedef struct te_cpu_device {
    te_cpu_isa isa;    /* best one that was compiled and that this machine has; TE_CPU_ISA=portable|avx2|avx512 lowers
                          it */
    bool       has_bf16; /* and pairs of bfloat16, of products and, beside avx512, rounding; not with TE_CPU_ISA=avx512,
                            nor, on Arm, =portable */
    bool       has_vbmi; /* likewise permutations of bytes */
    bool       gathers;  /* an instruction that gathers numbers takes less time than loading each of them */
    struct te_quantize_blocks *quantize; /* loops that do; NULL: there are none */
    const struct te_attention_blocks *tiled_attention; /* of bfloat16, in a matrix unit, once products know of one */
    int64_t    quantize_keeps_from; /* bytes of a source and its codes that are in no cache when they are needed */
    int64_t    quantize_ahead; /* bytes by which rows in memory are asked for; 0: the machine foresees them better */
    struct te_tables *tables; /* of functions, program_lookup.c; NULL: none so far */
    atomic_int stopped; /* a unit of the call that runs was left out */
    void      *gemm;   /* caches of the matrix product (primitives, packed weights), owned by gemm.c */
    void     (*gemm_release)(te_exec *exec, void *gemm);
    struct te_cpu_workers *workers; /* workers.h; NULL: not needed so far */
} te_cpu_device;

static inline te_cpu_device *te_cpu(te_exec *exec) { return (te_cpu_device *)exec->device; }

/* Interrupts. Loops ask before each unit of work, some milliseconds long at most, and leave out the rest; their entry
 * ends with te_cpu_finish. That something was left out is kept by the device, so a flag that is taken back changes
 * nothing. */
static inline bool te_cpu_stopping(te_exec *exec)
{
    if (!exec->interrupt || !atomic_load_explicit(exec->interrupt, memory_order_relaxed)) return false;
    atomic_store_explicit(&te_cpu(exec)->stopped, 1, memory_order_relaxed);
    return true;
}

/* Whether something was left out. */
static inline bool te_cpu_stopped(te_exec *exec)
{
    return atomic_load_explicit(&te_cpu(exec)->stopped, memory_order_relaxed) != 0;
}

/* The status of an entry; TE_ERROR_INTERRUPTED where that would be TE_OK and something was left out. */
te_status te_cpu_finish(te_exec *exec, te_status status);

/* What quantizing keeps in the device. quantize_panel.c */
te_status te_quantize_open(te_exec *, te_cpu_device *);
void      te_quantize_close(te_exec *, te_cpu_device *);

/* Frees the device's tables. program_lookup.c */
void te_tables_free(te_exec *, te_cpu_device *);

te_cpu_isa  te_cpu_isa_detect(void);
const char *te_cpu_isa_name(te_cpu_isa isa);

/* memory.c: large blocks are aligned to and advised for huge pages, since page faults cost more than the arithmetic. */
void *te_cpu_memory_alloc(te_exec *, size_t bytes);
void  te_cpu_memory_free(te_exec *, void *ptr, size_t bytes);

/* Entries of the backend's table: te_cpu_NAME, in files of their names or families. */
#define TE_KERNEL_DEVICE(name, parameters, arguments, moved)
#define TE_KERNEL(name, parameters, arguments, moved) te_status te_cpu_##name parameters;
#include "../kernel_list.h"
te_status te_cpu_integers(te_exec *, int64_t *values, int64_t n, const te_integers *drawn); /* integers.c */

#endif
