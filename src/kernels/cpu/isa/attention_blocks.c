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

static void find_ranges(block_ranges *ranges, const te_attention_seq *seq, int64_t query, int queries, int64_t key, int keys)
{
    ranges->whole = keys == TE_ATTENTION_KEYS;
    for (int i = 0; i < queries; i++) {
        ranges->low[i] = (int)(te_attention_first_key(seq, query + i, key, key + keys) - key);
        ranges->high[i] = (int)(te_attention_end_key(seq, query + i, key, key + keys) - key);
        ranges->whole = ranges->whole && ranges->low[i] == 0 && ranges->high[i] == keys;
    }
}

/* Row i of an operand [batch, heads, seq, dim] at sequence position i. */
static inline const char *operand_row(const te_view *v, int64_t batch, int64_t head, int64_t i)
{
    int64_t offset = batch * v->stride[0] + head * v->stride[1] + i * v->stride[2];
    return (const char *)v->data + offset * (int64_t)te_dtype_size(v->dtype);
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

/* --- float ------------------------------------------------------------------------------------------------------ */

#define REAL      float
#define T(name)   name##_f32
#define REAL_EXP  exp_of_score
#define REAL_NAME te_attention_f32
#if defined(TE_ISA_avx512)
#define VECTOR            __m512
#define VLEN              16
#define V_SET(x)          _mm512_set1_ps(x)
#define V_LOAD(p)         _mm512_loadu_ps(p)
#define V_STORE(p, x)     _mm512_storeu_ps(p, x)
#define V_FMA(a, b, c)    _mm512_fmadd_ps(a, b, c)
#define MICRO_ROWS        8
#elif defined(TE_ISA_avx2)
#define VECTOR            __m256
#define VLEN              8
#define V_SET(x)          _mm256_set1_ps(x)
#define V_LOAD(p)         _mm256_loadu_ps(p)
#define V_STORE(p, x)     _mm256_storeu_ps(p, x)
#define V_FMA(a, b, c)    _mm256_fmadd_ps(a, b, c)
#define MICRO_ROWS        4
#else
typedef float portable_f32 __attribute__((vector_size(16)));
#define VECTOR            portable_f32
#define VLEN              4
#define V_SET(x)          ((portable_f32){(x), (x), (x), (x)})
#define V_LOAD(p)         (*(const portable_f32 *)(p))
#define V_STORE(p, x)     (*(portable_f32 *)(p) = (x))
#define V_FMA(a, b, c)    ((a) * (b) + (c))
#define MICRO_ROWS        4
#endif
#include "kernels/cpu/attention_loops.h"

/* --- double ----------------------------------------------------------------------------------------------------- */

#define REAL      double
#define T(name)   name##_f64
#define REAL_EXP  exp
#define REAL_NAME te_attention_f64
#if defined(TE_ISA_avx512)
#define VECTOR            __m512d
#define VLEN              8
#define V_SET(x)          _mm512_set1_pd(x)
#define V_LOAD(p)         _mm512_loadu_pd(p)
#define V_STORE(p, x)     _mm512_storeu_pd(p, x)
#define V_FMA(a, b, c)    _mm512_fmadd_pd(a, b, c)
#define MICRO_ROWS        8
#elif defined(TE_ISA_avx2)
#define VECTOR            __m256d
#define VLEN              4
#define V_SET(x)          _mm256_set1_pd(x)
#define V_LOAD(p)         _mm256_loadu_pd(p)
#define V_STORE(p, x)     _mm256_storeu_pd(p, x)
#define V_FMA(a, b, c)    _mm256_fmadd_pd(a, b, c)
#define MICRO_ROWS        4
#else
typedef double portable_f64 __attribute__((vector_size(16)));
#define VECTOR            portable_f64
#define VLEN              2
#define V_SET(x)          ((portable_f64){(x), (x)})
#define V_LOAD(p)         (*(const portable_f64 *)(p))
#define V_STORE(p, x)     (*(portable_f64 *)(p) = (x))
#define V_FMA(a, b, c)    ((a) * (b) + (c))
#define MICRO_ROWS        4
#endif
#include "kernels/cpu/attention_loops.h"
