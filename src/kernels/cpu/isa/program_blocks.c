/* program_blocks.c - the interpreter's float32 loops, compiled once per instruction set. */
#include "../program_blocks.h"
#include "halves.h"

#if defined(__clang__) && defined(TE_ISA_portable)
#pragma clang diagnostic ignored "-Wpass-failed" /* without a hardware fma those loops stay scalar */
#endif

typedef float te_real;

#define TE_REAL_IS_F32   1
#define TE_BLOCKS_TABLE  TE_ISA_NAME(te_program_blocks)
#define TE_REAL_FN(name) f32_##name

#define f32_fabs      __builtin_fabsf
#define f32_floor     __builtin_floorf
#define f32_ceil      __builtin_ceilf
#define f32_rint      __builtin_rintf
#define f32_trunc     __builtin_truncf
#define f32_sqrt      __builtin_sqrtf
#define f32_exp       te_exp
#define f32_log       te_log
#define f32_tanh      te_tanh
#define f32_sigmoid   te_sigmoid
#define f32_erf       te_erf
#define f32_sin_turned    te_sin_turned
#define f32_sin_bounded   te_sin_bounded
#define f32_angle_is_huge te_angle_is_huge
#define f32_to_bf16   te_f32_to_bf16
#define f32_round_bf16 te_f32_round_bf16
#define f32_to_f16    te_f32_to_f16
#define f32_to_f8e4m3 te_f32_to_f8e4m3
#define f32_to_f8e5m2 te_f32_to_f8e5m2
#define f32_to_i64    te_f32_to_i64
#define f32_to_i32    te_f32_to_i32
#define f32_to_u8     te_f32_to_u8

#include "../program_blocks_body.h"
