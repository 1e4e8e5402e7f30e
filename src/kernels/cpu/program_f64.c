/* program_f64.c - the interpreter's loops in float64, for gradient checks: elementary functions of the C library, no
 * haste. */
#include "program_blocks.h"

#include <math.h>

#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed" /* loops around library calls stay scalar */
#endif

typedef double te_real;

static inline double sigmoid64(double x)
{
    double e = exp(-fabs(x));
    return (x < 0 ? e : 1) / (1 + e);
}

/* Whole powers as programs have them that know the exponent (simplify_pow). */
static inline double power(double x, double y) { return y == 2 ? x * x : y == 3 ? x * x * x : pow(x, y); }

#define TE_REAL_IS_F32   0
#define TE_BLOCKS_TABLE  te_program_blocks_f64
#define TE_REAL_FN(name) f64_##name

#define f64_fabs      fabs
#define f64_floor     floor
#define f64_ceil      ceil
#define f64_rint      rint
#define f64_trunc     trunc
#define f64_sqrt      sqrt
#define f64_exp       exp
#define f64_log       log
#define f64_tanh      tanh
#define f64_sigmoid   sigmoid64
#define f64_erf       erf
#define f64_pow       power
#define f64_to_bf16   te_f64_to_bf16
#define f64_round_bf16(x) te_bf16_to_f32(te_f64_to_bf16(x))
#define f64_to_f16    te_f64_to_f16
#define f64_to_f8e4m3 te_f64_to_f8e4m3
#define f64_to_f8e5m2 te_f64_to_f8e5m2
#define f64_to_i32    te_f64_to_i32
#define f64_to_u8     te_f64_to_u8

#include "program_blocks_body.h"
