/* attention_blocks.c - vectors of this instruction set, and the attention loops over them in float and in double; where
 * there are products of bfloat16 pairs, of vectors or in a matrix unit, the loops with those instead. */
#include "kernels/cpu/attention.h"
#include "kernels/cpu/copy.h"
#include "kernels/cpu/transpose.h"
#include "kernels/cpu/watched.h"

#include "kernels/dtype.h"
#include "kernels/elementary.h"
#include "kernels/philox.h"

#include <math.h>

#ifdef TE_ISA_amx
#include "tiles.h"
#endif
#if defined(TE_ISA_avx512) || defined(TE_ISA_avx2)
#include <immintrin.h>
#elif defined(TE_ISA_neon)
#include <arm_neon.h>
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Where the masks of a block put its rows: query i of the block sees keys low[i] … high[i], counted within the block.
 */
typedef struct block_ranges {
    int  low[TE_ATTENTION_KEYS], high[TE_ATTENTION_KEYS];
    bool whole; /* every query sees every key of a full block */
} block_ranges;

/* What a walk of forward over the keys does with scores: WALK_ONCE weighs values relative to the largest score so far;
 * WALK_SUMS finds maxima and sums alone, for WALK_ROUNDED, which weighs values by rounded probabilities. */
typedef enum attention_walk { WALK_ONCE, WALK_SUMS, WALK_ROUNDED } attention_walk;

/* How far above what weights are relative to a score may be: e^8 is far from any limit. */
static inline int slack_of(attention_walk walk) { return walk == WALK_ONCE ? 8 : 0; }

/* Ranges move monotonically, so the first and the last query tell whether the block is whole. */
static void find_ranges(block_ranges *ranges, const te_attention_seq *seq, int64_t query, int queries, int64_t key,
                        int keys)
{
    ranges->whole = keys == TE_ATTENTION_KEYS &&
                    te_attention_first_key(seq, query + queries - 1, key, key + keys) == key &&
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
static void dropout_row(const te_attention *a, const te_attention_seq *seq, int64_t head, int64_t query, int64_t key,
                        int n, float *keep)
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
    te_exp_parts parts = te_exp_reduce(x < -87.0f ? -87.0f : x, 0.0f);
    float scale = te_f32_from_bits((parts.exponent << 23) + 0x3f800000u);
    float result = TE_FMA(scale, parts.expm1, scale);
    return x < -87.0f ? 0.0f : result;
}

/* --- bfloat16 --------------------------------------------------------------------------------------------------- */

#if defined(TE_ISA_avx512bf16) || defined(TE_ISA_amx)
#ifdef TE_ISA_amx
#define MATRIX_UNIT       1
#endif
#define REAL              float
#define T(name)           name##_bf16
#define PAIRS             1
#define ROUNDED           1
#define REAL_EXP          exp_of_score
#define REAL_LOG          te_log
#define REAL_NAME         te_attention_bf16
#define VECTOR            __m512
#define VLEN              16
#define V_SET(x)          _mm512_set1_ps(x)
#define V_LOAD(p)         _mm512_loadu_ps(p)
#define V_STORE(p, x)     _mm512_storeu_ps(p, x)
#define V_DOT(a, b, c)    _mm512_dpbf16_ps(c, (__m512bh)(a), (__m512bh)(b))
#define V_MAX(a, b)       _mm512_max_ps(a, b)
#define V_TOP(a)          _mm512_reduce_max_ps(a)
#define V_SUM(a)          _mm512_reduce_add_ps(a)
#define TRANSPOSE_BLOCK   te_transpose_block
#define MICRO_ROWS        8
#define TOGETHER          4
#define IN_PLACE          TE_BF16
#include "kernels/cpu/attention_loops.h"
#else

/* --- float ------------------------------------------------------------------------------------------------------ */

#define REAL      float
#define T(name)   name##_f32
#define REAL_EXP  exp_of_score
#define REAL_LOG  te_log
#define REAL_NAME te_attention_f32
#define ROUNDED   1
#if defined(TE_ISA_avx512)
#define VECTOR            __m512
#define VLEN              16
#define V_SET(x)          _mm512_set1_ps(x)
#define V_LOAD(p)         _mm512_loadu_ps(p)
#define V_STORE(p, x)     _mm512_storeu_ps(p, x)
#define V_DOT(a, b, c)    _mm512_fmadd_ps(a, b, c)
#define V_MAX(a, b)       _mm512_max_ps(a, b)
#define V_TOP(a)          _mm512_reduce_max_ps(a)
#define V_SUM(a)          _mm512_reduce_add_ps(a)
#define TRANSPOSE_BLOCK   te_transpose_block
#define MICRO_ROWS        8
#define TOGETHER          4
#define IN_PLACE          TE_F32
#elif defined(TE_ISA_avx2)
static inline float top_of_f32(__m256 a)
{
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}

static inline float sum_of_f32(__m256 a)
{
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}

#define VECTOR            __m256
#define VLEN              8
#define V_SET(x)          _mm256_set1_ps(x)
#define V_LOAD(p)         _mm256_loadu_ps(p)
#define V_STORE(p, x)     _mm256_storeu_ps(p, x)
#define V_DOT(a, b, c)    _mm256_fmadd_ps(a, b, c)
#define V_MAX(a, b)       _mm256_max_ps(a, b)
#define V_TOP(a)          top_of_f32(a)
#define V_SUM(a)          sum_of_f32(a)
#define TRANSPOSE_BLOCK   te_transpose_block
#define MICRO_ROWS        4
#define TOGETHER          4
#define IN_PLACE          TE_F32
#elif defined(TE_ISA_neon)
#define VECTOR            float32x4_t
#define VLEN              4
#define V_SET(x)          vdupq_n_f32(x)
#define V_LOAD(p)         vld1q_f32(p)
#define V_STORE(p, x)     vst1q_f32(p, x)
#define V_DOT(a, b, c)    vfmaq_f32(c, a, b)
#define V_MAX(a, b)       vmaxq_f32(a, b)
#define V_TOP(a)          vmaxvq_f32(a)
#define V_SUM(a)          (((a)[0] + (a)[2]) + ((a)[1] + (a)[3]))
#define TRANSPOSE_BLOCK   te_transpose_block
#define MICRO_ROWS        8
#define TOGETHER          4
#define IN_PLACE          TE_F32
#else
typedef float portable_f32 __attribute__((vector_size(16)));
static inline portable_f32 max_f32(portable_f32 a, portable_f32 b)
{
    for (int i = 0; i < 4; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
}

static inline float top_of_f32(portable_f32 a)
{
    float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
    return x > y ? x : y;
}
#define VECTOR            portable_f32
#define VLEN              4
#define V_SET(x)          ((portable_f32){(x), (x), (x), (x)})
#define V_LOAD(p)         (*(const portable_f32 *)(p))
#define V_STORE(p, x)     (*(portable_f32 *)(p) = (x))
#define V_DOT(a, b, c)    ((a) * (b) + (c))
#define V_MAX(a, b)       max_f32(a, b)
#define V_TOP(a)          top_of_f32(a)
#define V_SUM(a)          (((a)[0] + (a)[2]) + ((a)[1] + (a)[3]))
#define TRANSPOSE_BLOCK   te_transpose_block
#define MICRO_ROWS        4
#define TOGETHER          1
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
#define V_DOT(a, b, c)    _mm512_fmadd_pd(a, b, c)
#define V_MAX(a, b)       _mm512_max_pd(a, b)
#define V_TOP(a)          _mm512_reduce_max_pd(a)
#define V_SUM(a)          _mm512_reduce_add_pd(a)
#define MICRO_ROWS        8
#define TOGETHER          1
#elif defined(TE_ISA_avx2)
static inline double top_of_f64(__m256d a)
{
    __m128d b = _mm_max_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_max_sd(b, _mm_unpackhi_pd(b, b)));
}

static inline double sum_of_f64(__m256d a)
{
    __m128d b = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_add_sd(b, _mm_unpackhi_pd(b, b)));
}

#define VECTOR            __m256d
#define VLEN              4
#define V_SET(x)          _mm256_set1_pd(x)
#define V_LOAD(p)         _mm256_loadu_pd(p)
#define V_STORE(p, x)     _mm256_storeu_pd(p, x)
#define V_DOT(a, b, c)    _mm256_fmadd_pd(a, b, c)
#define V_MAX(a, b)       _mm256_max_pd(a, b)
#define V_TOP(a)          top_of_f64(a)
#define V_SUM(a)          sum_of_f64(a)
#define MICRO_ROWS        4
#define TOGETHER          1
#elif defined(TE_ISA_neon)
#define VECTOR            float64x2_t
#define VLEN              2
#define V_SET(x)          vdupq_n_f64(x)
#define V_LOAD(p)         vld1q_f64(p)
#define V_STORE(p, x)     vst1q_f64(p, x)
#define V_DOT(a, b, c)    vfmaq_f64(c, a, b)
#define V_MAX(a, b)       vmaxq_f64(a, b)
#define V_TOP(a)          vmaxvq_f64(a)
#define V_SUM(a)          ((a)[0] + (a)[1])
#define MICRO_ROWS        8
#define TOGETHER          1
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
#define V_DOT(a, b, c)    ((a) * (b) + (c))
#define V_MAX(a, b)       max_f64(a, b)
#define V_TOP(a)          ((a)[0] > (a)[1] ? (a)[0] : (a)[1])
#define V_SUM(a)          ((a)[0] + (a)[1])
#define MICRO_ROWS        4
#define TOGETHER          1
#endif
#include "kernels/cpu/attention_loops.h"
#endif
