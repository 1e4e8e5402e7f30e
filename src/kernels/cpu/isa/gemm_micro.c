/* gemm_micro.c - the arithmetic of the matrix product: which tile, of which vectors, on which instruction set.
 *
 * Tiles hold as many sums as the registers allow, and are wide rather than tall, because a row of b is loaded once per
 * step while elements of a come for free with the multiplication. The fused multiply-add has to be spelt out: nothing
 * in this library is contracted by the compiler.
 */
#include "../gemm.h"
#include "gemm_vectors.h"

#if defined(TE_ISA_avx512) || defined(TE_ISA_neon) /* 32 registers */
#define TILE_ROWS    8
#define TILE_VECTORS 3
#define TILE_EACH(X) \
    X(1, 1) X(2, 1) X(3, 1) X(4, 1) X(5, 1) X(6, 1) X(7, 1) X(8, 1) \
    X(1, 2) X(2, 2) X(3, 2) X(4, 2) X(5, 2) X(6, 2) X(7, 2) X(8, 2) \
    X(1, 3) X(2, 3) X(3, 3) X(4, 3) X(5, 3) X(6, 3) X(7, 3) X(8, 3)
#define TILE_EACH_WIDTH(X) X(1) X(2) X(3)
#endif

#if defined(TE_ISA_avx512)

typedef __m512  vector_f32;
typedef __m512d vector_f64;
#define SPLAT_F32(p)        _mm512_set1_ps(load_f32(p))
#define SPLAT_F64(p)        _mm512_set1_pd(load_f64(p))
#define STREAM_F32(p, sums) _mm512_stream_ps((float *)(void *)(p), sums)
#define MADD_F32(sum, a, b) _mm512_fmadd_ps(a, b, sum)
#define MADD_F64(sum, a, b) _mm512_fmadd_pd(a, b, sum)

#elif defined(TE_ISA_avx2)

#define TILE_ROWS    4
#define TILE_VECTORS 3
#define TILE_EACH(X) \
    X(1, 1) X(2, 1) X(3, 1) X(4, 1) X(1, 2) X(2, 2) X(3, 2) X(4, 2) X(1, 3) X(2, 3) X(3, 3) X(4, 3)
#define TILE_EACH_WIDTH(X) X(1) X(2) X(3)
typedef __m256  vector_f32;
typedef __m256d vector_f64;
#define SPLAT_F32(p)        _mm256_set1_ps(load_f32(p))
#define SPLAT_F64(p)        _mm256_set1_pd(load_f64(p))
#define STREAM_F32(p, sums)
#define MADD_F32(sum, a, b) _mm256_fmadd_ps(a, b, sum)
#define MADD_F64(sum, a, b) _mm256_fmadd_pd(a, b, sum)

#elif defined(TE_ISA_neon)

typedef float32x4_t vector_f32;
typedef float64x2_t vector_f64;
#define SPLAT_F32(p)        vdupq_n_f32(load_f32(p))
#define SPLAT_F64(p)        vdupq_n_f64(load_f64(p))
#define STREAM_F32(p, sums)
#define MADD_F32(sum, a, b) vfmaq_f32(sum, a, b)
#define MADD_F64(sum, a, b) vfmaq_f64(sum, a, b)

#else

/* Vectors of 16 bytes are what every 64-bit processor has; multiplication and addition round one after the other. */
#define TILE_ROWS    4
#define TILE_VECTORS 2
#define TILE_EACH(X) X(1, 1) X(2, 1) X(3, 1) X(4, 1) X(1, 2) X(2, 2) X(3, 2) X(4, 2)
#define TILE_EACH_WIDTH(X) X(1) X(2)
typedef float  vector_f32 __attribute__((vector_size(16)));
typedef double vector_f64 __attribute__((vector_size(16)));
#define SPLAT_F32(p)        splat_f32(load_f32(p))
#define SPLAT_F64(p)        splat_f64(load_f64(p))
#define STREAM_F32(p, sums)
#define MADD_F32(sum, a, b) ((sum) + (a) * (b))
#define MADD_F64(sum, a, b) ((sum) + (a) * (b))

static inline vector_f32 splat_f32(float x) { return (vector_f32){x, x, x, x}; }
static inline vector_f64 splat_f64(double x) { return (vector_f64){x, x}; }

#endif

UNWATCHED INLINE float load_f32(const char *p)
{
    float x;
    memcpy(&x, p, sizeof x);
    return x;
}

UNWATCHED INLINE double load_f64(const char *p)
{
    double x;
    memcpy(&x, p, sizeof x);
    return x;
}

#define FETCH(p) __builtin_prefetch(p, 0, 3)

UNWATCHED INLINE vector_f32 take_f32(const char *p, int v)
{
    vector_f32 x;
    memcpy(&x, p + v * (int)sizeof x, sizeof x);
    return x;
}

UNWATCHED INLINE vector_f64 take_f64(const char *p, int v)
{
    vector_f64 x;
    memcpy(&x, p + v * (int)sizeof x, sizeof x);
    return x;
}

enum { LANES_F32 = sizeof(vector_f32) / sizeof(float), LANES_F64 = sizeof(vector_f64) / sizeof(double) };

#define TILE(name)  f32_##name
#define TILE_WORD   float
#define TILE_SUM    float
#define TILE_VECTOR vector_f32
#define TILE_SUMS   vector_f32
#define TILE_LANES  LANES_F32
#define TILE_SPLAT  SPLAT_F32
#define TILE_MADD   MADD_F32
#define TILE_ROUND(p, sums)
#define TILE_STREAM STREAM_F32
#define TILE_TAKE(p, v, row) take_f32(p, v)
#define TILE_FETCH(p, v, row) FETCH((p) + (v) * (int)sizeof(vector_f32))
#define TILE_TARGET
#include "gemm_tile.h"

#define TILE(name)  f64_##name
#define TILE_WORD   double
#define TILE_SUM    double
#define TILE_VECTOR vector_f64
#define TILE_SUMS   vector_f64
#define TILE_LANES  LANES_F64
#define TILE_SPLAT  SPLAT_F64
#define TILE_MADD   MADD_F64
#define TILE_ROUND(p, sums)
#define TILE_STREAM(p, sums)
#define TILE_TAKE(p, v, row) take_f64(p, v)
#define TILE_FETCH(p, v, row) FETCH((p) + (v) * (int)sizeof(vector_f64))
#define TILE_TARGET
#include "gemm_tile.h"

#if defined(TE_ISA_avx512)
/* Pairs of bfloat16: 16 lanes of two products each, an extension that the caller has checked for. */
#define TILE(name)            bf16_##name
#define TILE_WORD             int32_t
#define TILE_SUM              float
#define TILE_VECTOR           __m512i
#define TILE_SUMS             __m512
#define TILE_LANES            LANES_F32
#define TILE_SPLAT(p)         _mm512_set1_epi32(load_i32(p))
#define TILE_MADD(sum, a, b)  _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))
#define TILE_ROUND(p, sums)   round_bf16(p, sums)
#define TILE_STREAM           STREAM_F32
#define TILE_TAKE             take_pairs
#define TILE_FETCH            fetch_pairs
#define TILE_TARGET           __attribute__((target("avx512bf16")))

/* Sums that the products of pairs leave are never subnormal, so the instruction, which takes those for 0, rounds like
 * te_f32_to_bf16. */
TILE_TARGET UNWATCHED INLINE void round_bf16(char *p, __m512 sums)
{
    __m256bh half = _mm512_cvtneps_pbh(sums);
    memcpy(p, &half, sizeof half);
}

/* Of two rows of bfloat16. */
TILE_TARGET UNWATCHED INLINE __m512i take_pairs(const char *p, int v, int64_t row)
{
    __m256i even = _mm256_loadu_si256((const __m256i *)(const void *)(p + v * 32));
    __m256i odd = _mm256_loadu_si256((const __m256i *)(const void *)(p + v * 32 + row));
    return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

/* Two vectors of a row are a cache line. */
INLINE void fetch_pairs(const char *p, int v, int64_t row)
{
    if (v % 2) return;
    FETCH(p + v * 32);
    FETCH(p + v * 32 + row);
}

UNWATCHED INLINE int32_t load_i32(const char *p)
{
    int32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

#include "gemm_tile.h"
#endif

#if defined(TE_ISA_neonbf16)
/* The same of four lanes. */
#define TILE(name)            bf16_##name
#define TILE_WORD             int32_t
#define TILE_SUM              float
#define TILE_VECTOR           bfloat16x8_t
#define TILE_SUMS             float32x4_t
#define TILE_LANES            LANES_F32
#define TILE_SPLAT(p)         splat_pair(p)
#define TILE_MADD(sum, a, b)  vbfdotq_f32(sum, a, b)
#define TILE_ROUND(p, sums)   round_bf16(p, sums)
#define TILE_STREAM(p, sums)
#define TILE_TAKE             take_pairs
#define TILE_FETCH(p, v, row) (FETCH((p) + (v) * 8), FETCH((p) + (v) * 8 + (row)))
#define TILE_TARGET

UNWATCHED INLINE bfloat16x8_t splat_pair(const char *p)
{
    uint32_t x;
    memcpy(&x, p, sizeof x);
    return vreinterpretq_bf16_u32(vdupq_n_u32(x));
}

UNWATCHED INLINE void round_bf16(char *p, float32x4_t sums)
{
    bfloat16x4_t half = vcvt_bf16_f32(sums);
    memcpy(p, &half, sizeof half);
}

/* Of two rows of bfloat16. */
UNWATCHED INLINE bfloat16x8_t take_pairs(const char *p, int v, int64_t row)
{
    uint16x4_t even, odd;
    memcpy(&even, p + v * 8, sizeof even);
    memcpy(&odd, p + v * 8 + row, sizeof odd);
    uint16x4x2_t both = vzip_u16(even, odd);
    return vreinterpretq_bf16_u16(vcombine_u16(both.val[0], both.val[1]));
}

#include "gemm_tile.h"
#endif

#if defined(TE_ISA_avx512)
void te_gemm_streamed_avx512(void) { _mm_sfence(); }

/* By itself: in tiles it would take registers that sums are in. */
INLINE void stream_squares(char *c, int64_t row, const float *sums, int nr, int rows, const int vectors, float *squares)
{
    __m512 all[TILE_VECTORS] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int r = 0; r < rows; r++, c += row, sums += nr)
        UNROLL for (int v = 0; v < vectors; v++) {
            __m512 x = _mm512_loadu_ps(sums + v * LANES_F32);
            _mm512_stream_ps((float *)(void *)c + v * LANES_F32, x);
            all[v] = _mm512_fmadd_ps(x, x, all[v]);
        }
    UNROLL for (int v = 0; v < vectors; v++) squares[v] = _mm512_reduce_add_ps(all[v]);
}

void te_gemm_stream_squares_avx512(char *c, int64_t row, const void *sums, int nr, int rows, int vectors,
                                   float *squares)
{
    if (vectors == 3) stream_squares(c, row, sums, nr, rows, 3, squares);
    else if (vectors == 2) stream_squares(c, row, sums, nr, rows, 2, squares);
    else stream_squares(c, row, sums, nr, rows, 1, squares);
}
#endif

#if defined(TE_ISA_neon)
enum {
    SLICE_WORDS = 256, /* of 12 floats: 12 KiB, and a panel of a passes by */
    UNIT_ROWS = 128,   /* with a slice of them: 128 KiB … */
    UNIT_PANELS = 32   /* … and their sums 192 KiB */
};
#else
enum {
    SLICE_WORDS = 128, /* of 48 floats: 24 KiB, and a panel of a passes by */
    UNIT_ROWS = 256,   /* with a slice of them: 128 KiB … */
    UNIT_PANELS = 8    /* … and their sums 384 KiB; both twice where there is one slice, since no sums are kept */
};
#endif

#define KERNEL(type, word, sum, words_k, end, ...)                                                                     \
    {                                                                                                                  \
        .mr = TILE_ROWS, .nr = TILE_VECTORS * (int)(sizeof(vector_##end) / sizeof(sum)),                               \
        .lanes = sizeof(vector_##end) / sizeof(sum), .row_group = 1, .step = 1, .rate = 1,                             \
        .slice_words = SLICE_WORDS, .unit_rows = UNIT_ROWS, .unit_panels = UNIT_PANELS,                                \
        .word_bytes = sizeof(word), .sum_bytes = sizeof(sum), .k_per_word = words_k, .tile = type##_table,             \
        .packing = type##_packing,                                                                                     \
        .fetch = TE_ISA_NAME(te_gemm_fetch), .finish = TE_ISA_NAME(te_gemm_finish_##end), __VA_ARGS__                  \
    }

const te_gemm_isa TE_ISA_NAME(te_gemm_isa) = {
    .f32 = KERNEL(f32, float, float, 1, f32, .streams = false),
    .f64 = KERNEL(f64, double, double, 1, f64, .streams = false),
#if defined(TE_ISA_avx512)
    .bf16 = KERNEL(bf16, int32_t, float, 2, f32, .rounds = true, .streams = true,
                   .stream_squares = te_gemm_stream_squares_avx512, .leave = te_gemm_streamed_avx512),
    .small = te_gemm_small_avx512,
    .small_pairs = te_gemm_small_pairs_avx512,
    .dots_pairs = TE_ISA_NAME(te_gemm_dots_pairs),
#elif defined(TE_ISA_neonbf16)
    .bf16 = KERNEL(bf16, int32_t, float, 2, f32, .rounds = true, .streams = false),
    .dots_pairs = TE_ISA_NAME(te_gemm_dots_pairs),
#endif
    .dots_f32 = TE_ISA_NAME(te_gemm_dots_f32),
    .dots_bf16 = TE_ISA_NAME(te_gemm_dots_bf16),
    .dots_f16 = TE_ISA_NAME(te_gemm_dots_f16),
    .sweep = TE_ISA_NAME(te_gemm_sweep),
    .pack = TE_ISA_NAME(te_gemm_pack_panels),
};
