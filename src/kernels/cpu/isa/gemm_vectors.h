/* gemm_vectors.h - the widest vectors of an instruction set, for products whose operands are taken where they lie. */
#ifndef TE_KERNELS_CPU_ISA_GEMM_VECTORS_H
#define TE_KERNELS_CPU_ISA_GEMM_VECTORS_H

#include "../../dtype.h"
#include "../watched.h"

#include <string.h>
#if defined(TE_ISA_avx2) || defined(TE_ISA_avx512)
#include <immintrin.h>
#elif defined(TE_ISA_neon)
#include <arm_neon.h>
#endif

/* Before loops whose ends are constants, so that what they index stays in registers. */
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define INLINE static inline __attribute__((always_inline))

/* Without fused multiply-adds multiplication and addition round one after the other. */
#if defined(TE_ISA_avx512)
typedef __m512 vector;
#define MADD(a, b, sum) _mm512_fmadd_ps(a, b, sum)
#define SPLAT(x)        _mm512_set1_ps(x)
#elif defined(TE_ISA_avx2)
typedef __m256 vector;
#define MADD(a, b, sum) _mm256_fmadd_ps(a, b, sum)
#define SPLAT(x)        _mm256_set1_ps(x)
#elif defined(TE_ISA_neon)
typedef float32x4_t vector;
#define MADD(a, b, sum) vfmaq_f32(sum, a, b)
#define SPLAT(x)        vdupq_n_f32(x)
#else
typedef float vector __attribute__((vector_size(16)));
#define MADD(a, b, sum) ((a) * (b) + (sum))
#define SPLAT(x)        ((vector){x, x, x, x})
#endif

typedef uint32_t vector_u32 __attribute__((vector_size(sizeof(vector))));

/* `bytes` bytes and zeros up to `room`, a multiple of 64. Whole vectors, which a vector of them does not wait for. */
INLINE void copy_filled(char *to, const char *from, int64_t bytes, const int room)
{
#if defined(TE_ISA_avx512)
    UNROLL for (int at = 0; at < room; at += 64)
    {
        int64_t left = bytes - at;
        __mmask64 mask = left >= 64 ? ~0ull : left > 0 ? (1ull << left) - 1 : 0;
        _mm512_storeu_si512(to + at, _mm512_maskz_loadu_epi8(mask, from + at));
    }
#else
    memset(to, 0, (size_t)room);
    memcpy(to, from, (size_t)bytes);
#endif
}

/* A vector of float16, as float32. Without an instruction for it this is some hundred bytes of code. */
#if defined(TE_ISA_avx512)
INLINE vector widen_f16(const char *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p)); }
#elif defined(TE_ISA_avx2)
INLINE vector widen_f16(const char *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p)); }
#elif defined(TE_ISA_neon)
INLINE vector widen_f16(const char *p)
{
    float16x4_t half;
    memcpy(&half, p, sizeof half);
    return vcvt_f32_f16(half);
}
#else
static __attribute__((noinline, unused)) vector widen_f16(const char *p)
{
    vector v = {0};
    for (int i = 0; i < (int)(sizeof v / sizeof(float)); i++) {
        uint16_t half;
        memcpy(&half, p + 2 * i, sizeof half);
        v[i] = te_f16_to_f32(half);
    }
    return v;
}
#endif

#endif
