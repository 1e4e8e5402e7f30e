/* program_f64.c - the interpreter's loops in float64, compiled once per instruction set. */
#include "../program_blocks.h"
#include "kernels/elementary64.h"

#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed" /* loops around library calls stay scalar */
#endif

typedef double te_real;

/* Exponents as programs have them that know theirs (simplify_pow), and a root that is none of -0 and -inf. */
static inline double power(double x, double y)
{
    if (y == 0.5) return x == -(double)TE_INFINITY ? (double)TE_INFINITY : __builtin_sqrt(x) + 0.0;
    return y == 2 ? x * x : y == 3 ? x * x * x : pow(x, y);
}

#define TE_REAL_IS_F32   0
#define TE_BLOCKS_TABLE  TE_ISA_NAME(te_program_blocks_f64)
#define TE_REAL_FN(name) f64_##name

#define f64_fabs      __builtin_fabs
#define f64_floor     __builtin_floor
#define f64_ceil      __builtin_ceil
#define f64_rint      __builtin_rint
#define f64_trunc     __builtin_trunc
#define f64_sqrt      __builtin_sqrt
#define f64_exp       te_exp64
#define f64_log       te_log64
#define f64_tanh      te_tanh64
#define f64_sigmoid   te_sigmoid64
#define f64_erf       te_erf64
#define f64_pow       power
#define f64_sin_turned    te_sin_turned64
#define f64_sin_bounded   te_sin_bounded64
#define f64_angle_is_huge te_angle_is_huge64
#define f64_to_bf16   te_f64_to_bf16
#define f64_round_bf16(x) te_bf16_to_f32(te_f64_to_bf16(x))
#define f64_to_f16    te_f64_to_f16
#define f64_to_f8e4m3 te_f64_to_f8e4m3
#define f64_to_f8e5m2 te_f64_to_f8e5m2
#define f64_to_i32    te_f64_to_i32
#define f64_to_u8     te_f64_to_u8

#include "../program_blocks_body.h"
