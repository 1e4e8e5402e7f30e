/* quantize_blocks.c - the loops of quantize_blocks.h. They are plain, and vectorize as they stand. */
#include "kernels/cpu/quantize_blocks.h"

#include "kernels/philox.h"
#include "quantize_amax.h"
#include "quantize_both.h"
#include "quantize_decode.h"
#include "quantize_errors.h"
#include "quantize_factors.h"
#include "quantize_loops.h"
#include "quantize_narrow.h"
#include "quantize_pairs.h"
#include "quantize_random.h"
#include "quantize_transform.h"
#include "quantize_turn.h"

#include <string.h>

/* --- per dtype of the source -------------------------------------------------------------------------------------- */

#define DEFINE_AMAX(name, element, key, SIZE, INFINITE, VALUE)                                                         \
    static void amax_along_##name(float *amax, const void *data, int64_t n, int64_t block)                             \
    {                                                                                                                  \
        const element *x = data;                                                                                       \
        int64_t i = te_amaxes_##name(amax, x, n, block);                                                               \
        amax += i ? i / block : 0; /* a row of nothing is a block of nothing */                                        \
        if (block == 16)                                                                                               \
            for (; i + 16 <= n; i += 16) *amax++ = amax_of_##name(x + i, 16);                                          \
        else if (block == 32)                                                                                          \
            for (; i + 32 <= n; i += 32) *amax++ = amax_of_##name(x + i, 32);                                          \
        else if (block == 128)                                                                                         \
            for (; i + 128 <= n; i += 128) *amax++ = amax_of_##name(x + i, 128);                                       \
        for (; i < n; i += block) *amax++ = amax_of_##name(x + i, n - i < block ? n - i : block);                      \
    }                                                                                                                  \
    TE_INLINE key most_down_##name(key most[COLUMNS], const element *x, int64_t stride, int rows, bool nans)           \
    {                                                                                                                  \
        key top = 0;                                                                                                   \
        for (int k = 0; k < COLUMNS; k++) most[k] = 0;                                                                 \
        for (int i = 0; i < rows; i++, x += stride)                                                                    \
            for (int k = 0; k < COLUMNS; k++) {                                                                        \
                key size = SIZE(x[k]);                                                                                 \
                if (nans) size = size > INFINITE ? (key)0 : size;                                                      \
                most[k] = size > most[k] ? size : most[k];                                                             \
            }                                                                                                          \
        for (int k = 0; k < COLUMNS; k++) top = most[k] > top ? most[k] : top;                                         \
        return top;                                                                                                    \
    }                                                                                                                  \
    static void amax_down_##name(float *amax, const void *data, int64_t stride, int rows, int n)                       \
    {                                                                                                                  \
        const element *x = data;                                                                                       \
        int j = te_amaxes_down_##name(amax, x, stride, rows, n);                                                       \
        for (; j + COLUMNS <= n; j += COLUMNS) {                                                                       \
            key most[COLUMNS];                                                                                         \
            if (most_down_##name(most, x + j, stride, rows, false) > INFINITE)                                         \
                most_down_##name(most, x + j, stride, rows, true);                                                     \
            for (int k = 0; k < COLUMNS; k++) amax[j + k] = VALUE(most[k]);                                            \
        }                                                                                                              \
        for (; j < n; j++) {                                                                                           \
            key most = 0;                                                                                              \
            for (int i = 0; i < rows; i++) {                                                                           \
                key size = SIZE(x[i * stride + j]);                                                                    \
                most = size > most && size <= INFINITE ? size : most;                                                  \
            }                                                                                                          \
            amax[j] = VALUE(most);                                                                                     \
        }                                                                                                              \
    }

enum { COLUMNS = 64 }; /* whose maxima are found together */

DEFINE_AMAX(f32, float, int32_t, SIZE_F32, 0x7f800000, VALUE_F32)
DEFINE_AMAX(bf16, uint16_t, int16_t, SIZE_HALF, 0x7f80, VALUE_BF16)
DEFINE_AMAX(f16, uint16_t, int16_t, SIZE_HALF, 0x7c00, VALUE_F16)

#define DEFINE_SOURCE(dtype, type, LOAD)                                                                               \
    DEFINE_FORMAT(dtype, type, LOAD, e4m3, TE_E4M3_CODE)                                                               \
    DEFINE_FORMAT(dtype, type, LOAD, e5m2, TE_E5M2_CODE)                                                               \
    DEFINE_FORMAT(dtype, type, LOAD, e2m1, TE_E2M1_CODE)                                                               \
    static void stochastic_##dtype(uint8_t *restrict codes, const void *data, const float *restrict multipliers,       \
                                   int64_t block, const uint8_t *restrict random, int64_t n)                           \
    {                                                                                                                  \
        const type *restrict x = data;                                                                                 \
        for (int64_t j = te_stochastic_##dtype(codes, x, multipliers, block, random, n); j < n; j++)                   \
            codes[j] = te_f32_to_e2m1_stochastic(LOAD(x[j]) * multipliers[j / block], random[j]);                      \
    }                                                                                                                  \
    static void load_##dtype(float *restrict values, const void *data, int64_t n)                                      \
    {                                                                                                                  \
        const type *restrict x = data;                                                                                 \
        for (int64_t j = 0; j < n; j++) values[j] = LOAD(x[j]);                                                        \
    }

DEFINE_SOURCE(f32, float, SAME)
DEFINE_SOURCE(bf16, uint16_t, te_bf16_to_f32)
DEFINE_SOURCE(f16, uint16_t, te_f16_to_f32)

/* --- factors ------------------------------------------------------------------------------------------------------ */

static void factors(const te_factor_rule *rule, const float *restrict amax, int n, void *factors_, float *restrict m)
{
    float *restrict wide = factors_;
    uint8_t *restrict codes = factors_;
    const te_factor_rule r = *rule;
    if (r.scale == TE_SCALE_F32)
        for (int i = te_wide_factors(wide, m, amax, n, &r); i < n; i++) {
            m[i] = te_scale_from_amax(amax[i], r.max, r.power_of_two, r.epsilon, r.overflow);
            wide[i] = 1.0f / m[i];
        }
    else if (r.scale == TE_SCALE_E8M0)
        for (int i = te_exponent_factors(codes, m, amax, n, 1.0f / r.max); i < n; i++) {
            codes[i] = te_f32_to_e8m0(amax[i] * (1.0f / r.max));
            m[i] = te_e8m0_inverse(codes[i]);
        }
    else
        for (int i = te_two_level_factors(codes, m, amax, n, r.encode); i < n; i++) {
            codes[i] = te_two_level_block(amax[i], r.encode);
            m[i] = te_two_level_multiplier(codes[i], r.encode);
        }
}

static void candidates(float encode, float stretch, const float *restrict amax, int n, uint8_t *restrict codes,
                       float *restrict multipliers, float *restrict values)
{
    for (int i = te_two_level_candidates(codes, multipliers, values, amax, n, encode, stretch); i < n; i++) {
        codes[i] = te_two_level_candidate(amax[i], encode, stretch);
        multipliers[i] = te_two_level_multiplier(codes[i], encode);
        values[i] = te_f8e4m3_to_f32(codes[i]);
    }
}

/* --- random bytes ------------------------------------------------------------------------------------------------- */

static void random_down(uint8_t *bytes, int64_t width, te_rng rng, uint64_t first, uint64_t step, int n)
{
    enum { AT_ONCE = 64 };
    for (int j = (int)te_random_down(bytes, width, rng, first, step, n); j < n; j += AT_ONCE) {
        uint32_t words[4][AT_ONCE];
        int count = n - j < AT_ONCE ? n - j : AT_ONCE;
        for (int k = 0; k < AT_ONCE; k++) {
            te_philox_words w = te_rng_group(rng, first + step * (uint64_t)(j + k));
            for (int i = 0; i < 4; i++) words[i][k] = w.word[i];
        }
        for (int i = 0; i < TE_GROUP; i++)
            for (int k = 0; k < count; k++) bytes[i * width + j + k] = (uint8_t)(words[i / 4][k] >> i % 4 * 8);
    }
}

static void random_along(uint8_t *bytes, te_rng rng, uint64_t first, int64_t n)
{
    enum { AT_ONCE = 16 };
    for (int64_t j = te_random_along(bytes, rng, first, n); j < n; j += AT_ONCE) {
        uint32_t words[AT_ONCE][4];
        int64_t count = n - j < AT_ONCE ? n - j : AT_ONCE;
        for (int k = 0; k < AT_ONCE; k++) {
            te_philox_words w = te_rng_group(rng, first + (uint64_t)(j + k));
            for (int i = 0; i < 4; i++) words[k][i] = w.word[i];
        }
        for (int64_t k = 0; k < count; k++)
            for (int i = 0; i < TE_GROUP; i++)
                bytes[(j + k) * TE_GROUP + i] = (uint8_t)(words[k][i / 4] >> i % 4 * 8);
    }
}

/* --- pairs -------------------------------------------------------------------------------------------------------- */

static void pack_along(uint8_t *restrict pairs, const uint8_t *restrict codes, int64_t n)
{
    for (int64_t j = 0; j < n / 2; j++) {
        uint16_t two;
        memcpy(&two, codes + 2 * j, sizeof two);
        pairs[j] = (uint8_t)(two | two >> 4); /* the lower byte is the even element's */
    }
}

static void pack_down(uint8_t *restrict pairs, const uint8_t *restrict even, const uint8_t *restrict odd, int64_t n)
{
    for (int64_t j = 0; j < n; j++) pairs[j] = (uint8_t)(even[j] | odd[j] << 4);
}

static void pairs_across(uint8_t *restrict pairs, const uint8_t *restrict even, const uint8_t *restrict odd, int64_t n)
{
    for (int64_t j = 0; j < n / 2; j++) {
        uint32_t a = even[j], b = odd[j];
        uint16_t two = (uint16_t)((a & 0xfu) | (b & 0xfu) << 4 | (a & 0xf0u) << 4 | (b & 0xf0u) << 8);
        memcpy(pairs + 2 * j, &two, sizeof two);
    }
    if (n % 2) pairs[n - 1] = (uint8_t)((even[n / 2] & 0xfu) | (odd[n / 2] & 0xfu) << 4);
}

static void unpack_along(uint8_t *restrict codes, const uint8_t *restrict pairs, int64_t n)
{
    for (int64_t j = 0; j < n / 2; j++) {
        uint16_t two = (uint16_t)((pairs[j] | pairs[j] << 4) & 0x0f0f);
        memcpy(codes + 2 * j, &two, sizeof two);
    }
}

/* --- the way back ------------------------------------------------------------------------------------------------- */

#define DECODE_BLOCKS_OF(SIZE, VALUE)                                                \
    for (; i < n && i + (SIZE) <= n; i += (SIZE)) {                                  \
        const float f = *factors++;                                                  \
        for (int64_t j = i; j < i + (SIZE); j++) values[j] = VALUE(codes[j]) * f;    \
    }

#define DEFINE_DECODE(format, VALUE)                                                                                   \
    static void decode_along_##format(float *restrict values, const uint8_t *restrict codes,                           \
                                      const float *restrict factors, int64_t n, int64_t block)                         \
    {                                                                                                                  \
        int64_t i = 0;                                                                                                 \
        if (block >= n) DECODE_BLOCKS_OF(n, VALUE)                                                                     \
        else if (block == 16) DECODE_BLOCKS_OF(16, VALUE)                                                              \
        else if (block == 32) DECODE_BLOCKS_OF(32, VALUE)                                                              \
        else if (block == 128) DECODE_BLOCKS_OF(128, VALUE)                                                            \
        for (; i < n; i += block) {                                                                                    \
            const float f = *factors++;                                                                                \
            const int64_t end = n - i < block ? n : i + block;                                                         \
            for (int64_t j = i; j < end; j++) values[j] = VALUE(codes[j]) * f;                                         \
        }                                                                                                              \
    }                                                                                                                  \
    static void decode_down_##format(float *restrict values, const uint8_t *restrict codes,                            \
                                     const float *restrict factors, int64_t n)                                         \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j++) values[j] = VALUE(codes[j]) * factors[j];                                      \
    }

DEFINE_DECODE(e4m3, te_value_e4m3)
DEFINE_DECODE(e5m2, te_f8e5m2_to_f32)
#if defined(TE_ISA_avx512)
/* All values are in one register. */
static const float e2m1_values[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

TE_INLINE void decode_16(float *values, const uint8_t *codes, __m512 factors)
{
    __m512i which = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
    _mm512_storeu_ps(values, _mm512_mul_ps(_mm512_permutexvar_ps(which, _mm512_loadu_ps(e2m1_values)), factors));
}

static void decode_along_e2m1(float *restrict values, const uint8_t *restrict codes, const float *restrict factors,
                              int64_t n, int64_t block)
{
    int64_t i = 0;
    for (; block % 16 == 0 && i + 16 <= n; i += 16)
        decode_16(values + i, codes + i, _mm512_set1_ps(factors[i / block]));
    for (; i < n; i++) values[i] = e2m1_values[codes[i]] * factors[i / block];
}

static void decode_down_e2m1(float *restrict values, const uint8_t *restrict codes, const float *restrict factors,
                             int64_t n)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) decode_16(values + i, codes + i, _mm512_loadu_ps(factors + i));
    for (; i < n; i++) values[i] = e2m1_values[codes[i]] * factors[i];
}
#else
DEFINE_DECODE(e2m1, te_value_e2m1)
#endif

static void factor_values(float *restrict factors, const uint8_t *restrict stored, te_scale_kind scale, int n)
{
    if (scale == TE_SCALE_E8M0)
        for (int i = 0; i < n; i++) factors[i] = te_e8m0_to_f32(stored[i]);
    else
        for (int i = 0; i < n; i++) factors[i] = te_f8e4m3_to_f32(stored[i]);
}

static void multiply(float *restrict values, float factor, int64_t n)
{
    for (int64_t j = 0; j < n; j++) values[j] *= factor;
}

static bool narrow(uint16_t *restrict to, const float *restrict values, int64_t n)
{
    uint32_t bad = 0;
    for (int64_t j = 0; j < n; j++) {
        uint32_t bits = te_f32_bits(values[j]), size = bits & 0x7fffffffu;
        bad |= (bits & 0xffffu) | (uint32_t)(size - 1 < 0x7fffffu);
        to[j] = (uint16_t)(bits >> 16);
    }
    return !bad;
}

#define FORMATS(way) {[TE_E4M3] = way##_e4m3, [TE_E5M2] = way##_e5m2, [TE_E2M1] = way##_e2m1}

#define LOOPS(dtype)                                                                                                   \
    {                                                                                                                  \
        .amax_along = amax_along_##dtype, .amax_down = amax_down_##dtype, .amax_both = amax_both_##dtype,              \
        .amax_squares = amax_squares_##dtype,                                                                          \
        .encode_along = FORMATS(along_##dtype), .encode_down = FORMATS(down_##dtype),                                  \
        .encode_both = {[TE_E4M3] = both_##dtype##_e4m3, [TE_E5M2] = both_##dtype##_e5m2},                             \
        .encode_whole = FORMATS(whole_##dtype),                                                                        \
        .stochastic = stochastic_##dtype,                                                                              \
        .pairs_along = pairs_along_##dtype, .pairs_down = pairs_down_##dtype,                                          \
        .errors_about = errors_about_##dtype,                                                                          \
        .load = load_##dtype, .transform = transform_##dtype, .transform_amax = transform_amax_##dtype                 \
    }

const te_quantize_blocks TE_ISA_NAME(te_quantize_blocks) = {
    .of = {LOOPS(f32), LOOPS(bf16), LOOPS(f16)},
    .factors = factors,
    .candidates = candidates,
    .errors = errors,
    .errors_across = errors_across,
    .random_down = random_down,
    .random_along = random_along,
    .turn = {turn_codes, turn_past},
    .turn_factors = turn_factors,
    .pack_along = pack_along,
    .pack_down = pack_down,
    .pairs_across = pairs_across,
    .unpack_along = unpack_along,
    .decode_along = FORMATS(decode_along),
    .decode_down = FORMATS(decode_down),
    .factor_values = factor_values,
    .multiply = multiply,
    .transform_back = transform_back,
    .decode_to = FORMATS(decode_to),
    .narrow = narrow,
    .narrow_along = {[TE_E4M3] = narrow_along_e4m3, [TE_E5M2] = narrow_along_e5m2},
};
