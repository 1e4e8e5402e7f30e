/* quantize_decode.h - stored codes to rows of float32 or bfloat16 by vector instructions, for quantize_blocks.c.
 *
 * Codes that are no finite numbers, and factors so large that infinities could arise, are left to the plain loops.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_DECODE_H
#define TE_KERNELS_CPU_QUANTIZE_DECODE_H

#include "quantize_values.h"

#if defined(TE_ISA_avx512)

/* Whether all of n codes, a multiple of 64, are finite numbers. */
TE_INLINE bool te_all_finite(const uint8_t *codes, int64_t n, int odd)
{
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += 64)
        most = _mm512_max_epu8(most, _mm512_and_si512(_mm512_loadu_si512(codes + i), _mm512_set1_epi8(0x7f)));
    return !_mm512_cmpge_epu8_mask(most, _mm512_set1_epi8((char)odd));
}

/* Whether factors and one more are below 2^100 in size: products with elements and with each other give no NaN. */
TE_INLINE bool te_all_modest(const float *factors, int64_t n, float times)
{
    uint32_t most = te_f32_bits(times) & 0x7fffffffu;
    for (int64_t i = 0; i < n; i++) {
        uint32_t size = te_f32_bits(factors[i]) & 0x7fffffffu;
        most = size > most ? size : most;
    }
    return most < 0x71800000u;
}

/* 2^-100: under powers of two from it on no value of a byte leaves the normal numbers of bfloat16. */
enum { TE_LEAST_POWER = 0x0d800000 };

/* How values go to memory: as float32, rounded to bfloat16, or cut to bfloat16, which holds them. */
typedef enum te_decode_way { TE_WIDE, TE_ROUNDED, TE_CUT } te_decode_way;

TE_INLINE void te_put_vector(void *to, __m512i v, bool past)
{
    if (past)
        _mm512_stream_si512((__m512i *)to, v);
    else
        _mm512_storeu_si512(to, v);
}

/* As te_f32_to_bf16, of no NaNs: upper halves go up where lower ones are more than a half, or that and the upper one
 * odd. */
TE_INLINE __m512i te_two_halves(__m512 low, __m512 high)
{
    static const uint16_t even[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                      32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
    const __m512i one = _mm512_set1_epi16(1);
    __m512i a = _mm512_castps_si512(low), b = _mm512_castps_si512(high), upper = te_upper_halves(a, b);
    __m512i lower = _mm512_permutex2var_epi16(a, _mm512_loadu_si512(even), b);
    __m512i raised = _mm512_adds_epu16(lower, _mm512_and_si512(upper, one)), half = _mm512_set1_epi16((short)0x8000);
    __mmask32 up = _mm512_cmpgt_epu16_mask(raised, half);
    return _mm512_mask_add_epi16(upper, up, upper, one);
}

TE_INLINE void te_put_64(void *to, int64_t i, const __m512 v[4], te_decode_way way, bool past)
{
    for (int k = 0; k < 4 && way == TE_WIDE; k++)
        te_put_vector((float *)to + i + 16 * k, _mm512_castps_si512(v[k]), past);
    for (int k = 0; k < 4 && way == TE_ROUNDED; k += 2)
        te_put_vector((uint16_t *)to + i + 16 * k, te_two_halves(v[k], v[k + 1]), past);
    for (int k = 0; k < 4 && way == TE_CUT; k += 2)
        te_put_vector((uint16_t *)to + i + 16 * k,
                      te_upper_halves(_mm512_castps_si512(v[k]), _mm512_castps_si512(v[k + 1])), past);
}

#if defined(TE_ISA_avx512vbmi)
/* 64 codes under two powers of two, one for each half, whose exponents are those of bfloat16: all values are normal
 * numbers or 0. */
TE_INLINE void te_look_up_64(uint16_t *to, const uint8_t *codes, const te_size_table *t, __m512i raise[2], bool past)
{
    /* unpacking goes by quarters */
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), sizes = _mm512_set1_epi16(0x7fff);
    __m512i code = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(codes));
    __m512i low = _mm512_permutex2var_epi8(t->low[0], code, t->low[1]);
    __m512i high = _mm512_permutex2var_epi8(t->high[0], code, t->high[1]);
    high = _mm512_ternarylogic_epi32(_mm512_set1_epi8((char)0x80), code, high, 0xca); /* a ? b : c */
    __m512i v[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
    for (int k = 0; k < 2; k++)
        te_put_vector(to + 32 * k, _mm512_mask_add_epi16(v[k], _mm512_test_epi16_mask(v[k], sizes), v[k], raise[k]),
                      past);
}

/* n codes in blocks of 32, of multiples of 64, or one of n; false, and nothing is written, for others. */
TE_INLINE bool te_look_up(uint16_t *to, const uint8_t *codes, const te_size_table *t, const float *factors,
                          int64_t n, int64_t block, bool past)
{
    __m512i raise[2];
    if (block == 16 && n > 16) return false;
    for (int64_t i = 0; i < n; i += 64) {
        for (int k = 0; k < 2; k++) {
            uint32_t bits = te_f32_bits(factors[block < n ? (block == 32 ? i / 32 + k : i / block) : 0]);
            raise[k] = _mm512_set1_epi16((short)((bits >> 16) - (127 << 7)));
        }
        te_look_up_64(to + i, codes + i, t, raise, past);
    }
    return true;
}

TE_INLINE bool te_look_up_e4m3(uint16_t *to, const uint8_t *codes, const float *factors, int64_t n,
                               int64_t block, bool past)
{
    const te_size_table t = te_size_table_e4m3();
    return te_look_up(to, codes, &t, factors, n, block, past);
}

TE_INLINE bool te_look_up_e5m2(uint16_t *to, const uint8_t *codes, const float *factors, int64_t n,
                               int64_t block, bool past)
{
    const te_size_table t = te_size_table_e5m2();
    return te_look_up(to, codes, &t, factors, n, block, past);
}
#else
#define te_look_up_e4m3(to, codes, factors, n, block, past) false
#define te_look_up_e5m2(to, codes, factors, n, block, past) false
#endif
#define te_look_up_e2m1(to, codes, factors, n, block, past) false

/* Factors of 64 elements from number i on, of which blocks of 16 or 32 begin with the row; block 0: all have the
 * first. */
TE_INLINE void te_factors_of_64(__m512 f[4], const float *factors, int64_t i, int block, float lift)
{
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) f[k] = _mm512_set1_ps(factors[block ? (i + 16 * k) / block : 0] * lift);
}

#define TE_DEFINE_DECODE_TO(format, LIFT, SHIFT)                                                                       \
    TE_INLINE void te_decode_##format(void *to, te_decode_way way, const uint8_t *stored, const float *factors,        \
                                      int64_t i, int64_t end, int block, float times, bool past)                       \
    {                                                                                                                  \
        const __m512 again = _mm512_set1_ps(times);                                                                    \
        for (; i < end; i += 64) {                                                                                     \
            __m512 v[4], f[4];                                                                                         \
            te_values_64_##format(v, stored + (i >> SHIFT));                                                           \
            te_factors_of_64(f, factors, i, block, LIFT);                                                              \
            for (int k = 0; k < 4; k++) v[k] = _mm512_mul_ps(v[k], f[k]);                                              \
            for (int k = 0; k < 4 && way != TE_CUT; k++) v[k] = _mm512_mul_ps(v[k], again);                            \
            te_put_64(to, i, v, way, past);                                                                            \
        }                                                                                                              \
    }                                                                                                                  \
    TE_INLINE void te_decode_blocks_##format(void *to, te_decode_way way, const uint8_t *stored, const float *factors, \
                                             int64_t n, int64_t block, float times, bool past)                         \
    {                                                                                                                  \
        if (block == 16)                                                                                               \
            te_decode_##format(to, way, stored, factors, 0, n, 16, times, past);                                       \
        else if (block == 32)                                                                                          \
            te_decode_##format(to, way, stored, factors, 0, n, 32, times, past);                                       \
        for (int64_t i = 0; i < n && block > 32; i += block, factors++)                                                \
            te_decode_##format(to, way, stored, factors, i, n - i < block ? n : i + block, 0, times, past);            \
    }                                                                                                                  \
    static bool decode_to_##format(void *to, te_dtype dtype, const uint8_t *stored, const float *factors, int64_t n,   \
                                   int64_t block, float times, bool past)                                              \
    {                                                                                                                  \
        int64_t blocks = block < n ? (n + block - 1) / block : 1;                                                      \
        if (n % 64 != 0 || (dtype != TE_F32 && dtype != TE_BF16)) return false;                                        \
        if (block != 16 && block != 32 && block % 64 != 0 && block < n) return false;                                  \
        if (!te_all_modest(factors, blocks, times) || !TE_FINITE_##format(stored, n)) return false;                    \
        past = past && (uintptr_t)to % 64 == 0;                                                                        \
        if (dtype == TE_F32)                                                                                           \
            te_decode_blocks_##format(to, TE_WIDE, stored, factors, n, block, times, past);                            \
        else if (times == 1 && te_powers_from(TE_LEAST_POWER, factors, blocks)) {                                      \
            if (te_look_up_##format(to, stored, factors, n, block, past)) return true;                                 \
            te_decode_blocks_##format(to, TE_CUT, stored, factors, n, block, times, past);                             \
        } else                                                                                                         \
            te_decode_blocks_##format(to, TE_ROUNDED, stored, factors, n, block, times, past);                         \
        return true;                                                                                                   \
    }

#define TE_FINITE_e4m3(codes, n) te_all_finite(codes, n, TE_ODD_E4M3)
#define TE_FINITE_e5m2(codes, n) te_all_finite(codes, n, TE_ODD_E5M2)
#define TE_FINITE_e2m1(codes, n) true

TE_DEFINE_DECODE_TO(e4m3, TE_LIFT_E4M3, 0)
TE_DEFINE_DECODE_TO(e5m2, TE_LIFT_E5M2, 0)
TE_DEFINE_DECODE_TO(e2m1, TE_LIFT_E2M1, 1)
#else
#define decode_to_e4m3 NULL
#define decode_to_e5m2 NULL
#define decode_to_e2m1 NULL
#endif

#endif
