/* attention_blocks.c - vectors of this instruction set, and the attention loops over them in float and in double. */
#include "kernels/cpu/attention.h"

#include "kernels/dtype.h"
#include "kernels/elementary.h"
#include "kernels/philox.h"

#include <math.h>

#if defined(TE_ISA_avx512) || defined(TE_ISA_avx2)
#include <immintrin.h>
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Where the masks of a block put its rows: query i of the block sees keys low[i] … high[i], counted within the block. */
typedef struct block_ranges {
    int  low[TE_ATTENTION_KEYS], high[TE_ATTENTION_KEYS];
    bool whole; /* every query sees every key of a full block */
} block_ranges;

/* Ranges move monotonically, so the first and the last query tell whether the block is whole. */
static void find_ranges(block_ranges *ranges, const te_attention_seq *seq, int64_t query, int queries, int64_t key, int keys)
{
    ranges->whole = keys == TE_ATTENTION_KEYS && te_attention_first_key(seq, query + queries - 1, key, key + keys) == key &&
                    te_attention_end_key(seq, query, key, key + keys) == key + keys;
    for (int i = 0; i < queries; i++) {
        ranges->low[i] = ranges->whole ? 0 : (int)(te_attention_first_key(seq, query + i, key, key + keys) - key);
        ranges->high[i] = ranges->whole ? keys : (int)(te_attention_end_key(seq, query + i, key, key + keys) - key);
    }
}

/* lse is float32, or float64 beside float64 operands. */
static inline void *lse_at(const te_attention *a, int64_t batch, int64_t head, int64_t i)
{
    int64_t offset = batch * a->lse.stride[0] + head * a->lse.stride[1] + i * a->lse.stride[2];
    return (char *)a->lse.data + offset * (a->lse.dtype == TE_F64 ? 8 : 4);
}

/* keep[j] is 1, or 0 where the generator drops entry (query, key + j) of the sequence. */
static void dropout_row(const te_attention *a, const te_attention_seq *seq, int64_t head, int64_t query, int64_t key, int n,
                        float *keep)
{
    int64_t row = (seq->batch * a->q.shape[1] + head) * a->q.shape[2] + seq->q_start + query;
    uint64_t element = (uint64_t)(row * a->k.shape[2] + seq->kv_start + key);
    uint64_t threshold = te_rng_threshold(a->dropout), group = element / 4;
    enum { GROUPS = TE_ATTENTION_KEYS / 4 + 1 };
    uint32_t words[4 * GROUPS];
    int groups = (int)((element % 4 + (uint64_t)n + 3) / 4);
    for (int i = 0; i < groups; i++) {
        te_philox_words w = te_rng_group(a->rng, group + (uint64_t)i);
        for (int j = 0; j < 4; j++) words[4 * i + j] = w.word[j];
    }
    const uint32_t *word = words + element % 4;
    for (int j = 0; j < n; j++) keep[j] = word[j] >= threshold ? 1.0f : 0.0f;
}

/* e^x for x that is not much above 0, as softmax has them: below -87, near the smallest normal number, it is 0. */
static inline float exp_of_score(float x)
{
    te_exp_parts parts = te_exp_reduce(x < -87.0f ? -87.0f : x);
    float scale = te_f32_from_bits(((uint32_t)parts.exponent + 127u) << 23);
    float result = TE_FMA(scale, parts.expm1, scale);
    return x < -87.0f ? 0.0f : result;
}

/* --- transposes ------------------------------------------------------------------------------------------------- */

/* out[c, r] = in[r, c] of a square block of as many floats as a vector holds. */
#if defined(TE_ISA_avx512)
static inline void transpose_block(float *out, int64_t out_row, const float *in, int64_t in_row)
{
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(in + i * in_row);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) { /* pairs of rows: 2 x 2 blocks in each quarter */
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) { /* fours of rows: quarter q of a[i + c] holds column 4 q + c */
        a[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b[i]), _mm512_castps_pd(b[i + 2])));
        a[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b[i]), _mm512_castps_pd(b[i + 2])));
        a[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b[i + 1]), _mm512_castps_pd(b[i + 3])));
        a[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b[i + 1]), _mm512_castps_pd(b[i + 3])));
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) { /* a 4 x 4 transpose of the quarters */
        __m512 even_low = _mm512_shuffle_f32x4(a[c], a[c + 4], 0x88), odd_low = _mm512_shuffle_f32x4(a[c], a[c + 4], 0xdd);
        __m512 even_high = _mm512_shuffle_f32x4(a[c + 8], a[c + 12], 0x88), odd_high = _mm512_shuffle_f32x4(a[c + 8], a[c + 12], 0xdd);
        _mm512_storeu_ps(out + c * out_row, _mm512_shuffle_f32x4(even_low, even_high, 0x88));
        _mm512_storeu_ps(out + (c + 4) * out_row, _mm512_shuffle_f32x4(odd_low, odd_high, 0x88));
        _mm512_storeu_ps(out + (c + 8) * out_row, _mm512_shuffle_f32x4(even_low, even_high, 0xdd));
        _mm512_storeu_ps(out + (c + 12) * out_row, _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd));
    }
}
#elif defined(TE_ISA_avx2)
static inline void transpose_block(float *out, int64_t out_row, const float *in, int64_t in_row)
{
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(in + i * in_row);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) { /* half h of a[i + c] holds column 4 h + c */
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        _mm256_storeu_ps(out + c * out_row, _mm256_permute2f128_ps(a[c], a[c + 4], 0x20));
        _mm256_storeu_ps(out + (c + 4) * out_row, _mm256_permute2f128_ps(a[c], a[c + 4], 0x31));
    }
}
#endif

/* --- float ------------------------------------------------------------------------------------------------------ */

#define REAL      float
#define T(name)   name##_f32
#define REAL_EXP  exp_of_score
#define REAL_LOG  te_log
#define REAL_NAME te_attention_f32
#if defined(TE_ISA_avx512)
#define VECTOR            __m512
#define VLEN              16
#define V_SET(x)          _mm512_set1_ps(x)
#define V_LOAD(p)         _mm512_loadu_ps(p)
#define V_STORE(p, x)     _mm512_storeu_ps(p, x)
#define V_FMA(a, b, c)    _mm512_fmadd_ps(a, b, c)
#define V_MAX(a, b)       _mm512_max_ps(a, b)
#define TRANSPOSE_BLOCK   transpose_block
#define MICRO_ROWS        8
#elif defined(TE_ISA_avx2)
#define VECTOR            __m256
#define VLEN              8
#define V_SET(x)          _mm256_set1_ps(x)
#define V_LOAD(p)         _mm256_loadu_ps(p)
#define V_STORE(p, x)     _mm256_storeu_ps(p, x)
#define V_FMA(a, b, c)    _mm256_fmadd_ps(a, b, c)
#define V_MAX(a, b)       _mm256_max_ps(a, b)
#define TRANSPOSE_BLOCK   transpose_block
#define MICRO_ROWS        4
#else
typedef float portable_f32 __attribute__((vector_size(16)));
static inline portable_f32 max_f32(portable_f32 a, portable_f32 b)
{
    for (int i = 0; i < 4; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
}
#define VECTOR            portable_f32
#define VLEN              4
#define V_SET(x)          ((portable_f32){(x), (x), (x), (x)})
#define V_LOAD(p)         (*(const portable_f32 *)(p))
#define V_STORE(p, x)     (*(portable_f32 *)(p) = (x))
#define V_FMA(a, b, c)    ((a) * (b) + (c))
#define V_MAX(a, b)       T(max)(a, b)
#define MICRO_ROWS        4
#endif
#include "kernels/cpu/attention_loops.h"

/* --- double ----------------------------------------------------------------------------------------------------- */

#define REAL      double
#define T(name)   name##_f64
#define REAL_EXP  exp
#define REAL_LOG  log
#define REAL_NAME te_attention_f64
#if defined(TE_ISA_avx512)
#define VECTOR            __m512d
#define VLEN              8
#define V_SET(x)          _mm512_set1_pd(x)
#define V_LOAD(p)         _mm512_loadu_pd(p)
#define V_STORE(p, x)     _mm512_storeu_pd(p, x)
#define V_FMA(a, b, c)    _mm512_fmadd_pd(a, b, c)
#define V_MAX(a, b)       _mm512_max_pd(a, b)
#define MICRO_ROWS        8
#elif defined(TE_ISA_avx2)
#define VECTOR            __m256d
#define VLEN              4
#define V_SET(x)          _mm256_set1_pd(x)
#define V_LOAD(p)         _mm256_loadu_pd(p)
#define V_STORE(p, x)     _mm256_storeu_pd(p, x)
#define V_FMA(a, b, c)    _mm256_fmadd_pd(a, b, c)
#define V_MAX(a, b)       _mm256_max_pd(a, b)
#define MICRO_ROWS        4
#else
typedef double portable_f64 __attribute__((vector_size(16)));
static inline portable_f64 max_f64(portable_f64 a, portable_f64 b)
{
    for (int i = 0; i < 2; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
}
#define VECTOR            portable_f64
#define VLEN              2
#define V_SET(x)          ((portable_f64){(x), (x)})
#define V_LOAD(p)         (*(const portable_f64 *)(p))
#define V_STORE(p, x)     (*(portable_f64 *)(p) = (x))
#define V_FMA(a, b, c)    ((a) * (b) + (c))
#define V_MAX(a, b)       T(max)(a, b)
#define MICRO_ROWS        4
#endif
#include "kernels/cpu/attention_loops.h"
