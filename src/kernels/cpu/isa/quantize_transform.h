/* quantize_transform.h - the 16-point Hadamard transform down the columns of sixteen rows, for quantize_blocks.c.
 *
 * A vector holds one row of some columns, so a butterfly is an addition and a subtraction of two vectors, and all
 * sixteen stay in registers. Additions are those of te_hadamard16, in the same order. What is wanted is either the
 * values, rounded to the dtype of the source, or their amax alone: the amax of what is rounded is that of what is not,
 * rounded.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_TRANSFORM_H
#define TE_KERNELS_CPU_QUANTIZE_TRANSFORM_H

#include "kernels/cpu/quantize_blocks.h"
#include "quantize_decode.h"
#include "quantize_random.h"

#include <string.h>

/* Columns that one step of the transform holds in registers, sixteen vectors. */
#if defined(TE_ISA_avx512)
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef uint32_t lane_bits __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef uint16_t lane_halves __attribute__((vector_size(LANES * sizeof(uint16_t))));

/* te_hadamard16 of what is divided already, down the columns, over distances below `end`. */
TE_INLINE void butterflies(lanes v[TE_GROUP], int end)
{
#pragma GCC unroll 4
    for (int distance = 1; distance < end; distance *= 2)
#pragma GCC unroll 16
        for (int i = 0; i < TE_GROUP; i++) {
            if (i & distance) continue;
            lanes a = v[i], b = v[i + distance];
            v[i] = a + b;
            v[i + distance] = a - b;
        }
}

/* te_hadamard_signs down the columns, times `size`. */
TE_INLINE void signs(lanes v[TE_GROUP], float size)
{
#pragma GCC unroll 16
    for (int i = 0; i < TE_GROUP; i++) v[i] *= 0xd7e8u >> i & 1u ? -size : size;
}

/* te_amax of each lane, of a + b and a - b: one of these is the sum of sizes, and none is larger. */
TE_INLINE void lanes_amax(lanes *most, const lanes *a, const lanes *b)
{
    lanes size = (lanes)((lane_bits)*a & 0x7fffffffu) + (lanes)((lane_bits)*b & 0x7fffffffu);
#if defined(TE_ISA_avx512)
    *most = (lanes)_mm512_max_ps((__m512)size, (__m512)*most); /* the second where one is a NaN */
#else
    lane_bits larger = (lane_bits)(size > *most);
    *most = (lanes)(((lane_bits)size & larger) | ((lane_bits)*most & ~larger));
#endif
}

/* One vector of a row. */
TE_INLINE void lanes_from_f32(lanes *v, const float *x) { memcpy(v, x, sizeof *v); }
TE_INLINE void lanes_to_f32(float *x, const lanes *v) { memcpy(x, v, sizeof *v); }

TE_INLINE void lanes_from_bf16(lanes *v, const uint16_t *x)
{
#if defined(TE_ISA_avx512)
    *v = (lanes)te_load_bf16(x);
#else
    lane_halves h;
    memcpy(&h, x, sizeof h);
    *v = (lanes)(__builtin_convertvector(h, lane_bits) << 16);
#endif
}

/* The first or the second of two vectors that lie side by side. */
#define DEFINE_FROM_TWO(dtype, type)                                                                                   \
    TE_INLINE void lanes_from_two_##dtype(lanes *v, const type *x, int second)                                         \
    {                                                                                                                  \
        lanes_from_##dtype(v, x + second * LANES);                                                                     \
    }

#if defined(TE_ISA_avx512)
TE_INLINE void lanes_from_two_bf16(lanes *v, const uint16_t *x, int second)
{
    const __m512i upper = _mm512_setr_epi32(0, 1 << 16, 2 << 16, 3 << 16, 4 << 16, 5 << 16, 6 << 16, 7 << 16,
                                            8 << 16, 9 << 16,
                                            10 << 16, 11 << 16, 12 << 16, 13 << 16, 14 << 16, 15 << 16);
    __m512i which = _mm512_add_epi32(upper, _mm512_set1_epi32(second * LANES << 16));
    *v = (lanes)_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, which, _mm512_loadu_si512(x));
}
#else
DEFINE_FROM_TWO(bf16, uint16_t)
#endif

/* As te_f32_to_bf16. */
TE_INLINE void lanes_to_bf16(uint16_t *x, const lanes *v)
{
    lane_bits bits = (lane_bits)*v, rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, nan = bits >> 16 | 0x40u;
    lane_bits is_nan = (lane_bits)((bits & 0x7fffffffu) > 0x7f800000u);
    lane_halves h = __builtin_convertvector((nan & is_nan) | (rounded & ~is_nan), lane_halves);
    memcpy(x, &h, sizeof h);
}

/* All rows, `width` apart. */
#define DEFINE_TO_ROWS(dtype, type)                                                                                    \
    TE_INLINE void lanes_to_rows_##dtype(type *x, int64_t width, const lanes v[TE_GROUP])                              \
    {                                                                                                                  \
        _Pragma("GCC unroll 16") for (int i = 0; i < TE_GROUP; i++) lanes_to_##dtype(x + i * width, &v[i]);            \
    }

#if defined(TE_ISA_avx512)
/* Two rows of bfloat16 in one vector: the upper halves of what rounding has raised, unless there are NaNs. */
TE_INLINE void lanes_to_rows_bf16(uint16_t *x, int64_t width, const lanes v[TE_GROUP])
{
    __mmask16 nans = 0;
#pragma GCC unroll 8
    for (int i = 0; i < TE_GROUP; i += 2) {
        __m512i both = te_two_halves((__m512)v[i], (__m512)v[i + 1]);
        nans |= _mm512_cmp_ps_mask((__m512)v[i], (__m512)v[i + 1], _CMP_UNORD_Q);
        _mm256_storeu_si256((__m256i *)(x + i * width), _mm512_castsi512_si256(both));
        _mm256_storeu_si256((__m256i *)(x + (i + 1) * width), _mm512_extracti64x4_epi64(both, 1));
    }
    for (int i = 0; i < TE_GROUP && __builtin_expect(nans != 0, 0); i++) lanes_to_bf16(x + i * width, &v[i]);
}
#else
DEFINE_TO_ROWS(bf16, uint16_t)
#endif

/* Called: in place, forty-eight times over, they would be a fifth of all quantizing code. */
static __attribute__((noinline)) void lanes_from_f16(lanes *v, const uint16_t *x)
{
    float values[LANES];
    for (int k = 0; k < LANES; k++) values[k] = te_f16_to_f32(x[k]);
    memcpy(v, values, sizeof *v);
}

static __attribute__((noinline)) void lanes_to_f16(uint16_t *x, const lanes *v)
{
    float values[LANES];
    memcpy(values, v, sizeof *v);
    for (int k = 0; k < LANES; k++) x[k] = te_f32_to_f16(values[k]);
}

DEFINE_FROM_TWO(f32, float)
DEFINE_FROM_TWO(f16, uint16_t)
DEFINE_TO_ROWS(f32, float)
DEFINE_TO_ROWS(f16, uint16_t)

#define SAME_F32(x)   (x)
#define ROUND_BF16(x) te_bf16_to_f32(te_f32_to_bf16(x))
#define ROUND_F16(x)  te_f16_to_f32(te_f32_to_f16(x))

/* Columns j … of n are loaded by twos where there are that many. */
#define DEFINE_TRANSFORM(dtype, type, ROUND)                                                                           \
    TE_INLINE void columns_##dtype(lanes v[TE_GROUP], const type *x, int64_t stride, int rows, int j, int n)           \
    {                                                                                                                  \
        const int second = j / LANES % 2, first = j - second * LANES;                                                  \
        if (rows < TE_GROUP || n - j < LANES) {                                                                        \
            type staged[TE_GROUP][LANES] = {{0}};                                                                      \
            size_t there = (size_t)(n - j < LANES ? n - j : LANES) * sizeof *x;                                        \
            for (int i = 0; i < rows; i++) memcpy(staged[i], x + i * stride + j, there);                               \
            for (int i = 0; i < TE_GROUP; i++) lanes_from_##dtype(&v[i], staged[i]);                                   \
        } else if (n - first < 2 * LANES) {                                                                            \
            for (int i = 0; i < TE_GROUP; i++) lanes_from_##dtype(&v[i], x + i * stride + j);                          \
        } else {                                                                                                       \
            _Pragma("GCC unroll 16") for (int i = 0; i < TE_GROUP; i++)                                                \
                lanes_from_two_##dtype(&v[i], x + i * stride + first, second);                                         \
        }                                                                                                              \
        signs(v, 0.25f);                                                                                               \
    }                                                                                                                  \
    static void transform_##dtype(void *values, int64_t width, const void *x, int64_t stride, int rows, int n)         \
    {                                                                                                                  \
        type *to = values;                                                                                             \
        for (int j = 0; j < n; j += LANES) {                                                                           \
            lanes v[TE_GROUP];                                                                                         \
            columns_##dtype(v, x, stride, rows, j, n);                                                                 \
            butterflies(v, TE_GROUP);                                                                                  \
            lanes_to_rows_##dtype(to + j, width, v);                                                                   \
        }                                                                                                              \
    }                                                                                                                  \
    static float transform_amax_##dtype(const void *x, int64_t stride, int rows, int n)                                \
    {                                                                                                                  \
        lanes most = {0};                                                                                              \
        float amax = 0;                                                                                                \
        for (int j = 0; j < n; j += LANES) {                                                                           \
            lanes v[TE_GROUP];                                                                                         \
            columns_##dtype(v, x, stride, rows, j, n);                                                                 \
            butterflies(v, TE_GROUP / 2);                                                                              \
            _Pragma("GCC unroll 8") for (int i = 0; i < TE_GROUP / 2; i++)                                             \
                lanes_amax(&most, &v[i], &v[i + TE_GROUP / 2]);                                                        \
        }                                                                                                              \
        for (int k = 0; k < LANES; k++) amax = most[k] > amax ? most[k] : amax;                                        \
        return ROUND(amax);                                                                                            \
    }

DEFINE_TRANSFORM(f32, float, SAME_F32)
DEFINE_TRANSFORM(bf16, uint16_t, ROUND_BF16)
DEFINE_TRANSFORM(f16, uint16_t, ROUND_F16)

/* The way back, of float32 in place. */
static void transform_back(float *values, int width, int n)
{
    for (int j = 0; j < n; j += LANES) {
        lanes v[TE_GROUP];
#pragma GCC unroll 16
        for (int i = 0; i < TE_GROUP; i++) {
            memcpy(&v[i], values + i * width + j, sizeof v[i]);
            v[i] *= 0.25f;
        }
        butterflies(v, TE_GROUP);
        signs(v, 1);
#pragma GCC unroll 16
        for (int i = 0; i < TE_GROUP; i++) memcpy(values + i * width + j, &v[i], sizeof v[i]);
    }
}

#endif
