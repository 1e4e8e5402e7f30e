/* quantize_loops.h - codes of runs of a row, or of rows under factors of their columns: vector code as far as it goes,
 * plain loops for what is left. For quantize_blocks.c, and for quantize_vbmi.c, which has the same with byte
 * permutations.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_LOOPS_H
#define TE_KERNELS_CPU_QUANTIZE_LOOPS_H

#include "quantize_encode.h"

#define SAME(x) (x)

/* Magnitudes compare as integers do; signed ones, whose maximum vectorizes. */
#define SIZE_F32(x)    ((int32_t)(te_f32_bits(x) & 0x7fffffffu))
#define SIZE_HALF(x)   ((int16_t)((x) & 0x7fffu))
#define VALUE_F32(x)   te_f32_from_bits((uint32_t)(x))
#define VALUE_BF16(x)  te_bf16_to_f32((uint16_t)(x))
#define VALUE_F16(x)   te_f16_to_f32((uint16_t)(x))

/* NaNs are looked for in the maximum, and passed over only where there are some. */
#define DEFINE_MOST(name, element, key, SIZE, INFINITE, VALUE)                                                         \
    TE_INLINE key most_of_##name(const element *x, int64_t n, bool nans)                                               \
    {                                                                                                                  \
        key most = 0;                                                                                                  \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            key size = SIZE(x[i]);                                                                                     \
            if (nans) size = size > INFINITE ? (key)0 : size;                                                          \
            most = size > most ? size : most;                                                                          \
        }                                                                                                              \
        return most;                                                                                                   \
    }                                                                                                                  \
    TE_INLINE float amax_of_##name(const element *x, int64_t n)                                                        \
    {                                                                                                                  \
        key most = most_of_##name(x, n, false);                                                                        \
        return VALUE(most > INFINITE ? most_of_##name(x, n, true) : most);                                             \
    }

DEFINE_MOST(f32, float, int32_t, SIZE_F32, 0x7f800000, VALUE_F32)
DEFINE_MOST(bf16, uint16_t, int16_t, SIZE_HALF, 0x7f80, VALUE_BF16)
DEFINE_MOST(f16, uint16_t, int16_t, SIZE_HALF, 0x7c00, VALUE_F16)

/* CODE(j) is the code of element j; the factor of a block is m. */
#define BLOCKS_OF(SIZE, BODY)                                                        \
    for (; i + (SIZE) <= n; i += (SIZE)) {                                           \
        const float m = *multipliers++;                                              \
        for (int64_t j = i; j < i + (SIZE); j++) codes[j] = BODY;                    \
    }

#define ALONG(BODY)                                                                  \
    int64_t i = 0;                                                                   \
    if (block == 16) BLOCKS_OF(16, BODY)                                             \
    else if (block == 32) BLOCKS_OF(32, BODY)                                        \
    else if (block == 128) BLOCKS_OF(128, BODY)                                      \
    for (; i < n; i += block) {                                                      \
        const float m = *multipliers++;                                              \
        const int64_t end = n - i < block ? n : i + block;                           \
        for (int64_t j = i; j < end; j++) codes[j] = BODY;                           \
    }

/* Sixty-fours by vector code where there is some, the rest one by one. */
#define DEFINE_ENCODE(dtype, type, LOAD, format, ...)                                                                  \
    static void along_##dtype##_##format(uint8_t *restrict codes, const void *data, const float *restrict multipliers, \
                                         int64_t n, int64_t block, bool past)                                          \
    {                                                                                                                  \
        const type *restrict x = data;                                                                                 \
        int64_t done = te_codes_along_##dtype(codes, x, multipliers, n, block, past, __VA_ARGS__);                     \
        (void)past, multipliers += done / block;                                                                       \
        codes += done, x += done, n -= done;                                                                           \
        ALONG(te_code(LOAD(x[j]) * m, __VA_ARGS__))                                                                    \
    }                                                                                                                  \
    static float whole_##dtype##_##format(uint8_t *codes, const void *data, float multiplier, int64_t n, bool past)    \
    {                                                                                                                  \
        const type *x = data;                                                                                          \
        float amax = 0;                                                                                                \
        int64_t done = te_codes_whole_##dtype(codes, x, multiplier, n, &amax, past, __VA_ARGS__);                      \
        if (!done) amax = 0;                                                                                           \
        if (done < n) along_##dtype##_##format(codes + done, x + done, &multiplier, n - done, n, past);                \
        return te_amax(amax, amax_of_##dtype(x + done, n - done));                                                     \
    }                                                                                                                  \
    static void down_##dtype##_##format(uint8_t *codes, int64_t codes_stride, const void *data, int64_t stride,        \
                                        int rows, const float *multipliers, int64_t n)                                 \
    {                                                                                                                  \
        const type *x = data;                                                                                          \
        int64_t done = te_codes_down_##dtype(codes, codes_stride, x, stride, rows, multipliers, n, __VA_ARGS__);       \
        for (int i = 0; i < rows; i++, codes += codes_stride, x += stride)                                             \
            down_row_##dtype##_##format(codes + done, x + done, multipliers + done, n - done);                         \
    }

#define DEFINE_DOWN_ROW(dtype, type, LOAD, format, ...)                                                                \
    TE_INLINE void down_row_##dtype##_##format(uint8_t *restrict codes, const type *restrict x,                        \
                                               const float *restrict multipliers, int64_t n)                           \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j++) codes[j] = te_code(LOAD(x[j]) * multipliers[j], __VA_ARGS__);                  \
    }

#define DEFINE_FORMAT(dtype, type, LOAD, format, ...)                                                                  \
    DEFINE_DOWN_ROW(dtype, type, LOAD, format, __VA_ARGS__)                                                            \
    DEFINE_ENCODE(dtype, type, LOAD, format, __VA_ARGS__)

#endif
