/* float_mode.h - the mode in which this thread computes with floating-point numbers: rounding, subnormal numbers as
 * zeros or not, exceptions that raise signals or not.
 *
 * A host may have set any; te computes in the default one, so that results do not depend on which thread makes them,
 * and no division by zero ends the process. Whoever enters sets it, and restores the host's on the way out. Setting it
 * takes tens of cycles, looking at it a few, so what is right already is left alone.
 */
#ifndef TE_KERNELS_FLOAT_MODE_H
#define TE_KERNELS_FLOAT_MODE_H

#include <stdbool.h>
#include <stdint.h>

#if defined(__x86_64__) || defined(__aarch64__)

typedef struct te_float_mode {
    uint64_t host;
    bool     changed;
} te_float_mode;

#ifdef __x86_64__
/* MXCSR, and above it the control word of the x87 unit, with which the C library reads and writes numbers and LuaJIT
 * computes some functions. */
#define TE_FLOAT_DEFAULT UINT64_C(0x037f00001f80)
#define TE_FLOAT_MODE    UINT64_C(0x0f3f0000ffc0) /* the other bits say nothing, or which exceptions there were */
static inline uint64_t te_float_mode_read(void)
{
    uint16_t control;
    __asm__ volatile("fnstcw %0" : "=m"(control));
    return (uint64_t)control << 32 | __builtin_ia32_stmxcsr();
}
static inline void te_float_mode_write(uint64_t mode)
{
    uint16_t control = (uint16_t)(mode >> 32);
    __asm__ volatile("" ::: "memory"); /* what is to be computed before and after stays there */
    __builtin_ia32_ldmxcsr((unsigned)mode);
    /* an exception of the past would raise its signal once that is not masked any more */
    if ((control & 0x3f) != 0x3f) __asm__ volatile("fnclex");
    __asm__ volatile("fldcw %0" ::"m"(control) : "memory");
}
#else
#define TE_FLOAT_DEFAULT UINT64_C(0)
#define TE_FLOAT_MODE    UINT64_MAX
static inline uint64_t te_float_mode_read(void)
{
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static inline void te_float_mode_write(uint64_t mode) { __asm__ volatile("msr fpcr, %0" ::"r"(mode) : "memory"); }
#endif

static inline te_float_mode te_float_mode_begin(void)
{
    uint64_t      host = te_float_mode_read();
    te_float_mode mode = {host, ((host ^ TE_FLOAT_DEFAULT) & TE_FLOAT_MODE) != 0};
    if (__builtin_expect(mode.changed, 0)) te_float_mode_write(TE_FLOAT_DEFAULT);
    return mode;
}

static inline void te_float_mode_end(const te_float_mode *mode)
{
    if (__builtin_expect(mode->changed, 0)) te_float_mode_write(mode->host);
}

#else
#include <fenv.h>

typedef fenv_t te_float_mode;

static inline te_float_mode te_float_mode_begin(void)
{
    fenv_t mode;
    fegetenv(&mode);
    fesetenv(FE_DFL_ENV);
    return mode;
}

static inline void te_float_mode_end(const te_float_mode *mode) { fesetenv(mode); }

#endif

/* From here to the end of the block, wherever that is left. */
#define TE_FLOAT_DEFAULT_HERE \
    __attribute__((cleanup(te_float_mode_end), unused)) te_float_mode te_mode_before = te_float_mode_begin()

#endif
