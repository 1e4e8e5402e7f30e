/* program_blocks_fold.h - sums, maxima and minima over rows and blocks. A part of program_blocks_body.h.
 *
 * Two sums of a row at once are in program_blocks_two.h, which is a part of this; columns in program_blocks_columns.h.
 *
 * The order of additions is part of the interface: it is the same for every instruction set, and depends on how a row
 * is cut into blocks only as program_blocks.h states. With 64 lanes four vectors of 16 are under way at a time, or
 * eight of 8, which hides the latency of an addition. A vector here is one of the machine's: a wider one GCC keeps in
 * memory.
 */
#include <string.h>
#if TE_REAL_IS_F32 && defined(TE_ISA_avx512)
#include <immintrin.h>
#define TE_WIDTH 16
#elif TE_REAL_IS_F32 && defined(TE_ISA_avx2)
#include <immintrin.h>
#define TE_WIDTH 8
#elif TE_REAL_IS_F32 || defined(TE_ISA_avx512) || defined(TE_ISA_avx2)
#define TE_WIDTH 4
#else
#define TE_WIDTH 2
#endif

enum { WIDTH = TE_WIDTH, PARTS = TE_FOLD_LANES / WIDTH, NARROW = 16 /* elements of a short row */ };
/* Vectors that leave registers for what is added to them: of one sum, and where every element goes into two. */
enum { MOST_PARTS = PARTS < 8 ? PARTS : 8, HALF_PARTS = PARTS < 4 ? PARTS : 4 };

#ifdef __clang__
#define TE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TE_UNROLL _Pragma("GCC unroll 32")
#endif
#define TE_EACH_PART(parts) TE_UNROLL for (int k = 0; k < (parts); k++)

typedef te_real te_vec __attribute__((vector_size(WIDTH * sizeof(te_real)), aligned(sizeof(te_real)), may_alias));
#if TE_REAL_IS_F32
typedef int32_t te_vec_bits __attribute__((vector_size(WIDTH * sizeof(te_real)), may_alias));
#define TE_SIZE_BITS 0x7fffffff
#else
typedef int64_t te_vec_bits __attribute__((vector_size(WIDTH * sizeof(te_real)), may_alias));
#define TE_SIZE_BITS 0x7fffffffffffffff
#endif

#define TE_SELECT(mask, yes, no) \
    ((te_vec)(((te_vec_bits)(yes) & (te_vec_bits)(mask)) | ((te_vec_bits)(no) & ~(te_vec_bits)(mask))))

/* How a vector v (JOIN) or a number v (JOIN1) joins what is held. A NaN stays held: no number compares greater. */
#define TE_JOIN_SUM(h, v)   ((h) + (v))
#define TE_JOIN1_SUM(h, v)  ((h) + (v))
#define TE_JOIN_MAX(h, v)   TE_SELECT(((v) > (h)) | ((v) != (v)), v, h)
#define TE_JOIN1_MAX(h, v)  ((((v) > (h)) | ((v) != (v))) ? (v) : (h))
#define TE_JOIN_MIN(h, v)   TE_SELECT(((v) < (h)) | ((v) != (v)), v, h)
#define TE_JOIN1_MIN(h, v)  ((((v) < (h)) | ((v) != (v))) ? (v) : (h))
#define TE_JOIN_AMAX(h, v)  TE_SELECT(TE_SIZE(v) > (h), TE_SIZE(v), h)
#define TE_JOIN1_AMAX(h, v) (TE_REAL_FN(fabs)(v) > (h) ? TE_REAL_FN(fabs)(v) : (h))
#define TE_SIZE(v)          ((te_vec)((te_vec_bits)(v) & TE_SIZE_BITS))

/* The same with the machine's maximum and minimum, which give their second argument where both
 * are equal or one is NaN. */
#if TE_REAL_IS_F32 && (defined(TE_ISA_avx512) || defined(TE_ISA_avx2))
#if defined(TE_ISA_avx512)
#define TE_MACHINE(name)     _mm512_##name
#define TE_OR_NAN(joined, v) _mm512_mask_mov_ps(joined, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), v)
#else
#define TE_MACHINE(name)     _mm256_##name
#define TE_OR_NAN(joined, v) _mm256_blendv_ps(joined, v, _mm256_cmp_ps(v, v, _CMP_UNORD_Q))
#endif
static inline te_vec join_max_vector(te_vec h, te_vec v) { return TE_OR_NAN(TE_MACHINE(max_ps)(v, h), v); }
static inline te_vec join_min_vector(te_vec h, te_vec v) { return TE_OR_NAN(TE_MACHINE(min_ps)(v, h), v); }
static inline te_vec join_amax_vector(te_vec h, te_vec v) { return TE_MACHINE(max_ps)(TE_SIZE(v), h); }
#undef TE_JOIN_MAX
#undef TE_JOIN_MIN
#undef TE_JOIN_AMAX
#define TE_JOIN_MAX(h, v)  join_max_vector(h, v)
#define TE_JOIN_MIN(h, v)  join_min_vector(h, v)
#define TE_JOIN_AMAX(h, v) join_amax_vector(h, v)
#endif

/* What is folded: the element, its product with another block's, the square of its distance from a number, or that
 * distance's product with another block's. */
#define TE_PLAIN(x, y, about)    (x)
#define TE_PRODUCT(x, y, about)  ((x) * (y))
#define TE_SQUARE(x, y, about)   (((x) - (about)) * ((x) - (about)))
#define TE_DISTANCE(x, y, about) (((x) - (about)) * (y))

/* One vector of each of ROWS rows becomes one in which each row has WIDTH / ROWS lanes, of which its first holds all of
 * them: lanes are joined with those 8, 4, 2 and 1 further. Rows share vectors, so that a join serves all of them. */
enum { ROWS = WIDTH < 8 ? 1 : 4 };
#define TE_SHUFFLED(JOIN, h, ...) JOIN(h, __builtin_shufflevector(h, h, __VA_ARGS__))
#define TE_OF_TWO(a, b, ...)      __builtin_shufflevector(a, b, __VA_ARGS__)
#if TE_WIDTH == 16
#define TE_HALVED(JOIN, a, b)                                                 \
    JOIN(TE_OF_TWO(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23), \
         TE_OF_TWO(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#define TE_QUARTERED(JOIN, a, b)                                                  \
    JOIN(TE_OF_TWO(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27), \
         TE_OF_TWO(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
#define TE_TREE(JOIN, h)                                                                      \
    h[0] = TE_HALVED(JOIN, h[0], h[1]);                                                       \
    h[2] = TE_HALVED(JOIN, h[2], h[3]);                                                       \
    h[0] = TE_QUARTERED(JOIN, h[0], h[2]);                                                    \
    h[0] = TE_SHUFFLED(JOIN, h[0], 2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15);   \
    h[0] = TE_SHUFFLED(JOIN, h[0], 1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9, 13, 13, 13, 13);
#elif TE_WIDTH == 8
#define TE_HALVED(JOIN, a, b) \
    JOIN(TE_OF_TWO(a, b, 0, 1, 2, 3, 8, 9, 10, 11), TE_OF_TWO(a, b, 4, 5, 6, 7, 12, 13, 14, 15))
#define TE_TREE(JOIN, h)                                                                                         \
    h[0] = TE_HALVED(JOIN, h[0], h[1]);                                                                          \
    h[2] = TE_HALVED(JOIN, h[2], h[3]);                                                                          \
    h[0] = JOIN(TE_OF_TWO(h[0], h[2], 0, 1, 4, 5, 8, 9, 12, 13), TE_OF_TWO(h[0], h[2], 2, 3, 6, 7, 10, 11, 14, 15)); \
    h[0] = TE_SHUFFLED(JOIN, h[0], 1, 1, 3, 3, 5, 5, 7, 7);
#elif TE_WIDTH == 4
#define TE_TREE(JOIN, h)                          \
    h[0] = TE_SHUFFLED(JOIN, h[0], 2, 3, 2, 3);   \
    h[0] = TE_SHUFFLED(JOIN, h[0], 1, 1, 1, 1);
#else
#define TE_TREE(JOIN, h) h[0] = TE_SHUFFLED(JOIN, h[0], 1, 1);
#endif

/* To the second-level cache: the first one is full of the row at hand. Always as much as is due for a strip: lines
 * beyond the end are the next step's. */
static inline __attribute__((always_inline)) void fetch_ahead(te_ahead *ahead)
{
    const char *at = ahead->at, *stop = at + ahead->each;
    if (__builtin_expect(at >= ahead->end, 0)) return;
    if (ahead->write) {
        do __builtin_prefetch(at, 1, 1);
        while ((at += TE_LINE) < stop);
    } else {
        do __builtin_prefetch(at, 0, 1);
        while ((at += TE_LINE) < stop);
    }
    ahead->at = at;
    if (at >= ahead->end && ahead->next) *ahead = *ahead->next;
}

/* What is summed may be bfloat16 where it is a row, in the first HALVES arguments: then it is widened on the way. These
 * functions are always inlined, so that how vectors are returned, which GCC warns of, does not matter. */
#ifdef __GNUC__
#pragma GCC diagnostic ignored "-Wpsabi"
#endif
#define TE_ALWAYS            static inline __attribute__((always_inline))
#define TE_AT(at, half, part)     vector_at(at, half, i + (part) * WIDTH)
#define TE_CUT_AT(at, half, part) cut_at(at, half, i, n - i, (part) * WIDTH)

TE_ALWAYS int64_t bytes_of(bool half) { return half ? (int64_t)sizeof(uint16_t) : (int64_t)sizeof(te_real); }

TE_ALWAYS te_real value_at(const void *at, bool half, size_t i)
{
    return TE_REAL_IS_F32 && half ? (te_real)te_bf16_to_f32(((const uint16_t *)at)[i]) : ((const te_real *)at)[i];
}

#if TE_REAL_IS_F32
/* Compilers make two narrower conversions and more of what one instruction does. */
TE_ALWAYS te_vec load_halves(const uint16_t *at)
{
#if defined(TE_ISA_avx512)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16));
#elif defined(TE_ISA_avx2)
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16));
#else
    typedef uint16_t eight __attribute__((vector_size(16)));
    uint64_t four[2] = {0, 0};
    eight    halves, none = {0};
    memcpy(four, at, sizeof four[0]);
    memcpy(&halves, four, sizeof halves);
    return (te_vec)__builtin_shufflevector(none, halves, 0, 8, 1, 9, 2, 10, 3, 11);
#endif
}
#endif

TE_ALWAYS te_vec vector_at(const void *at, bool half, size_t i)
{
#if TE_REAL_IS_F32
    if (half) return load_halves((const uint16_t *)at + i);
#endif
    (void)half;
    return *(const te_vec *)((const te_real *)at + i);
}

/* Some vectors can be read up to an element and no further: those first … first + WIDTH - 1 of the `left` from i on. */
#if TE_REAL_IS_F32 && defined(TE_ISA_avx512)
#define TE_CUTS(half) true
TE_ALWAYS __mmask16 cut_mask(size_t left, size_t first)
{
    return (__mmask16)(_bzhi_u64(~(uint64_t)0, (unsigned)left) >> first);
}

TE_ALWAYS te_vec cut_at(const void *at, bool half, size_t i, size_t left, size_t first)
{
    __mmask16 mask = cut_mask(left, first);
    if (!half) return _mm512_maskz_loadu_ps(mask, (const float *)at + i + first);
    __m256i halves = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)at + i + first);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

TE_ALWAYS te_vec keep_behind(te_vec joined, te_vec before, size_t left, size_t first)
{
    return _mm512_mask_mov_ps(before, cut_mask(left, first), joined);
}
#elif TE_REAL_IS_F32 && defined(TE_ISA_avx2)
#define TE_CUTS(half) (!(half))
TE_ALWAYS __m256i cut_mask(size_t left, size_t first)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)left - (int)first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

TE_ALWAYS te_vec cut_at(const void *at, bool half, size_t i, size_t left, size_t first)
{
    (void)half;
    return _mm256_maskload_ps((const float *)at + i + first, cut_mask(left, first));
}

TE_ALWAYS te_vec keep_behind(te_vec joined, te_vec before, size_t left, size_t first)
{
    return _mm256_blendv_ps(before, joined, _mm256_castsi256_ps(cut_mask(left, first)));
}
#else
#define TE_CUTS(half) false
TE_ALWAYS te_vec cut_at(const void *at, bool half, size_t i, size_t left, size_t first)
{
    (void)left;
    return vector_at(at, half, i + first);
}

TE_ALWAYS te_vec keep_behind(te_vec joined, te_vec before, size_t left, size_t first)
{
    (void)before, (void)left, (void)first;
    return joined;
}
#endif

#if TE_REAL_IS_F32 && TE_WIDTH >= 8
/* The first n elements of a vector, n < WIDTH, and zeros. */
TE_ALWAYS te_vec few_at(const void *at, bool half, size_t n)
{
    if (TE_CUTS(half)) return cut_at(at, half, 0, n, 0);
    const uint16_t *from = at;
    uint16_t        some[WIDTH] = {0}, *to = some;
    if (n & 4) memcpy(to, from, 8), to += 4, from += 4;
    if (n & 2) memcpy(to, from, 4), to += 2, from += 2;
    if (n & 1) *to = *from;
    return load_halves(some);
}

/* The last n elements of a row, n < WIDTH, by whole vectors: what is stored in parts has to wait before it is loaded as
 * one. */
#define TE_REST(JOIN, JOIN1, VALUE)                                                                      \
    te_vec *l = (te_vec *)lane, x = few_at((const char *)s + (int64_t)i * bytes_of(half), half, n - i);  \
    te_vec  y = few_at((const char *)by + (int64_t)i * bytes_of(by_half), by_half, n - i);               \
    (void)y;                                                                                             \
    *l = keep_behind(JOIN(*l, VALUE(x, y, about)), *l, n - i, 0);
#else
#define TE_REST(JOIN, JOIN1, VALUE)                                                                      \
    for (; i < n; i++, lane++) {                                                                         \
        te_real value = VALUE(value_at(s, half, i), value_at(by, by_half, i), about);                    \
        *lane = JOIN1(*lane, value);                                                                     \
    }
#endif

/* add: n elements into the lanes. row: a row by itself. Lanes are joined as a balanced tree, and a row of at most
 * NARROW elements has the bits it would have with all the lanes, as those beyond its end are neutral. */
#define TE_FOLD(name, JOIN, JOIN1, VALUE, HALVES)                                                        \
    /* Of `parts` vectors, a power of two, one. */                                                       \
    TE_ALWAYS te_vec lanes_of_##name(const te_vec *lanes, const int parts)                               \
    {                                                                                                    \
        te_vec h[PARTS];                                                                                 \
        TE_EACH_PART(parts) h[k] = lanes[k];                                                             \
        TE_UNROLL for (int half = parts / 2; half > 0; half /= 2)                                        \
            TE_EACH_PART(half) h[k] = JOIN(h[k], h[k + half]);                                           \
        return h[0];                                                                                     \
    }                                                                                                    \
    TE_ALWAYS te_real tree_##name(const te_vec *lanes, const int parts)                                  \
    {                                                                                                    \
        te_vec h[ROWS] = {lanes_of_##name(lanes, parts)};                                                \
        TE_TREE(JOIN, h)                                                                                 \
        return h[0][0];                                                                                  \
    }                                                                                                    \
    /* Elements from i on, fewer than there are lanes. */                                                \
    static __attribute__((noinline)) void rest_##name(te_real *lane, const void *s, bool half,           \
                                                      const void *by, bool by_half, te_real about,       \
                                                      size_t i, size_t n)                                \
    {                                                                                                    \
        (void)by, (void)by_half, (void)about;                                                            \
        for (; i + WIDTH <= n; i += WIDTH, lane += WIDTH) {                                              \
            te_vec *l = (te_vec *)lane;                                                                  \
            *l = JOIN(*l, VALUE(TE_AT(s, half, 0), TE_AT(by, by_half, 0), about));                       \
        }                                                                                                \
        if (i == n) return;                                                                              \
        TE_REST(JOIN, JOIN1, VALUE)                                                                      \
    }                                                                                                    \
    TE_ALWAYS void add_##name(te_real *lane, const void *s, bool half, const te_real *by, te_real about, \
                              size_t n, te_ahead ahead)                                                  \
    {                                                                                                    \
        te_vec *l = (te_vec *)lane, h[PARTS];                                                            \
        size_t  i = 0;                                                                                   \
        TE_EACH_PART(PARTS) h[k] = l[k];                                                                 \
        for (; i + TE_FOLD_LANES <= n; i += TE_FOLD_LANES) {                                             \
            (void)by, (void)about;                                                                       \
            fetch_ahead(&ahead);                                                                         \
            TE_EACH_PART(PARTS) h[k] = JOIN(h[k], VALUE(TE_AT(s, half, k), TE_AT(by, false, k), about)); \
        }                                                                                                \
        TE_EACH_PART(PARTS) l[k] = h[k];                                                                 \
        if (i < n) rest_##name(lane, s, half, by, false, about, i, n);                                   \
    }                                                                                                    \
    static inline te_real join_##name(const te_real *lane)                                               \
    {                                                                                                    \
        return tree_##name((const te_vec *)lane, PARTS);                                                 \
    }                                                                                                    \
    /* A row whose lanes stay in registers: columns > NARROW. */                                         \
    TE_ALWAYS te_vec row_##name(const void *s, bool half, const void *by, bool by_half, te_real about,   \
                                size_t n, te_real neutral, te_ahead *ahead)                              \
    {                                                                                                    \
        te_vec h[PARTS];                                                                                 \
        size_t i = 0;                                                                                    \
        TE_EACH_PART(PARTS) h[k] = neutral - (te_vec){0};                                                \
        for (; i + TE_FOLD_LANES <= n; i += TE_FOLD_LANES) {                                             \
            (void)by, (void)by_half, (void)about;                                                        \
            fetch_ahead(ahead);                                                                          \
            TE_EACH_PART(PARTS) h[k] = JOIN(h[k], VALUE(TE_AT(s, half, k), TE_AT(by, by_half, k), about));\
        }                                                                                                \
        if (i < n && TE_CUTS(half || by_half)) {                                                         \
            TE_EACH_PART(PARTS)                                                                          \
            {                                                                                            \
                te_vec v = VALUE(TE_CUT_AT(s, half, k), TE_CUT_AT(by, by_half, k), about);               \
                h[k] = keep_behind(JOIN(h[k], v), h[k], n - i, k * WIDTH);                               \
            }                                                                                            \
        } else if (i < n) {                                                                              \
            te_real lane[TE_FOLD_LANES];                                                                 \
            te_vec *l = (te_vec *)lane;                                                                  \
            TE_EACH_PART(PARTS) l[k] = h[k];                                                             \
            rest_##name(lane, s, half, by, by_half, about, i, n);                                        \
            TE_EACH_PART(PARTS) h[k] = l[k];                                                             \
        }                                                                                                \
        return lanes_of_##name(h, PARTS);                                                                \
    }                                                                                                    \
    TE_ALWAYS te_vec narrow_row_##name(const void *s, bool half, const void *by, bool by_half,           \
                                       te_real about, size_t n, te_real neutral)                         \
    {                                                                                                    \
        te_real lane[NARROW];                                                                            \
        (void)by, (void)by_half, (void)about;                                                            \
        _Pragma("omp simd") for (size_t i = 0; i < NARROW; i++) {                                        \
            te_real value = i < n ? VALUE(value_at(s, half, i), value_at(by, by_half, i), about) : neutral;\
            lane[i] = i < n ? JOIN1(neutral, value) : neutral;                                           \
        }                                                                                                \
        return lanes_of_##name((const te_vec *)lane, NARROW / WIDTH);                                    \
    }                                                                                                    \
    TE_ALWAYS void rows_of_##name(te_real *d, const te_fold_rows *fold, bool half, bool by_half,         \
                                  te_real neutral, te_ahead ahead)                                       \
    {                                                                                                    \
        const char    *s = fold->src, *by = fold->by ? fold->by : s;                                     \
        const te_real *centre = fold->about;                                                             \
        int64_t        step = fold->src_step * bytes_of(half);                                           \
        int64_t        by_step = fold->by ? fold->by_step * bytes_of(by_half) : step;                    \
        size_t         columns = fold->columns;                                                          \
        te_vec         h[ROWS] = {{0}};                                                                  \
        for (size_t r = 0, q = 0; r < fold->rows; r++, s += step, by += by_step) {                       \
            te_real about = centre ? *centre : 0;                                                        \
            if (centre) centre += fold->about_step;                                                      \
            if (columns <= NARROW) h[q++] = narrow_row_##name(s, half, by, by_half, about, columns, neutral);\
            else h[q++] = row_##name(s, half, by, by_half, about, columns, neutral, &ahead);             \
            if (q < ROWS && r + 1 < fold->rows) continue;                                                \
            TE_TREE(JOIN, h)                                                                             \
            for (size_t k = 0; k < q; k++) d[r + 1 - q + k] = ((te_real *)h)[k * (WIDTH / ROWS)];        \
            q = 0;                                                                                       \
        }                                                                                                \
    }                                                                                                    \
    static void rows_##name(te_real *d, const te_fold_rows *fold, te_real neutral, te_ahead ahead)       \
    {                                                                                                    \
        bool half = fold->src_half, by_half = fold->by ? fold->by_half : half;                           \
        if (HALVES == 0 || (!half && !by_half)) rows_of_##name(d, fold, false, false, neutral, ahead);   \
        else if (HALVES == 1 || (half && by_half)) rows_of_##name(d, fold, true, true, neutral, ahead);  \
        else rows_of_##name(d, fold, half, by_half, neutral, ahead);                                     \
    }

TE_FOLD(sum, TE_JOIN_SUM, TE_JOIN1_SUM, TE_PLAIN, TE_REAL_IS_F32)
TE_FOLD(dot, TE_JOIN_SUM, TE_JOIN1_SUM, TE_PRODUCT, 2 * TE_REAL_IS_F32)
TE_FOLD(square, TE_JOIN_SUM, TE_JOIN1_SUM, TE_SQUARE, TE_REAL_IS_F32)
TE_FOLD(distance, TE_JOIN_SUM, TE_JOIN1_SUM, TE_DISTANCE, 2 * TE_REAL_IS_F32)
TE_FOLD(max, TE_JOIN_MAX, TE_JOIN1_MAX, TE_PLAIN, TE_REAL_IS_F32)
TE_FOLD(min, TE_JOIN_MIN, TE_JOIN1_MIN, TE_PLAIN, TE_REAL_IS_F32)
TE_FOLD(amax, TE_JOIN_AMAX, TE_JOIN1_AMAX, TE_PLAIN, 0)

#include "program_blocks_two.h"

/* --- the table's functions ---------------------------------------------------------------------------------------- */

static te_real neutral_of(te_fold_kind kind)
{
    te_real infinity = (te_real)TE_INFINITY;
    return kind == TE_FOLD_MAX ? -infinity : kind == TE_FOLD_MIN ? infinity : (te_real)0;
}

static void fold_start(te_fold *fold, te_fold_kind kind)
{
    te_real *lane = (te_real *)fold->lane, neutral = neutral_of(kind);
    for (int i = 0; i < TE_FOLD_LANES; i++) lane[i] = neutral;
    fold->total = 0;
    fold->held = 0;
    fold->spilled = false;
}

static te_real join_lanes(te_fold *fold, te_fold_kind kind)
{
    const te_real *lane = (const te_real *)fold->lane;
    switch (kind) {
    case TE_FOLD_SUM: return join_sum(lane);
    case TE_FOLD_MAX: return join_max(lane);
    case TE_FOLD_MIN: return join_min(lane);
    default: return join_amax(lane);
    }
}

static void fold_add(te_fold *fold, te_fold_kind kind, const void *src, bool half, const void *by, const void *about,
                     size_t n, te_ahead ahead)
{
    te_real *lane = (te_real *)fold->lane, centre = about ? *(const te_real *)about : 0;
    switch (kind) {
    case TE_FOLD_SUM:
        if (by && about) add_distance(lane, src, false, by, centre, n, ahead);
        else if (about) add_square(lane, src, false, src, centre, n, ahead);
        else if (by) add_dot(lane, src, false, by, 0, n, ahead);
        else if (TE_REAL_IS_F32 && half) add_sum(lane, src, true, src, 0, n, ahead);
        else add_sum(lane, src, false, src, 0, n, ahead);
        break;
    case TE_FOLD_MAX: add_max(lane, src, false, src, 0, n, ahead); return;
    case TE_FOLD_MIN: add_min(lane, src, false, src, 0, n, ahead); return;
    case TE_FOLD_AMAX: add_amax(lane, src, false, src, 0, n, ahead); return;
    }
    fold->held += n;
    if (fold->held < TE_FOLD_SPAN) return;
    fold->total += (double)join_lanes(fold, kind);
    fold->held = 0;
    fold->spilled = true;
    memset(lane, 0, TE_FOLD_LANES * sizeof *lane);
}

static void fold_finish(te_fold *fold, te_fold_kind kind, void *dst)
{
    te_real rest = join_lanes(fold, kind);
    *(te_real *)dst = fold->spilled ? (te_real)(fold->total + (double)rest) : rest;
}

static void fold_rows(te_fold_kind kind, void *dst, const te_fold_rows *fold, te_ahead ahead)
{
    te_real neutral = neutral_of(kind);
    switch (kind) {
    case TE_FOLD_SUM:
        if (fold->beside) rows_both(dst, fold, ahead);
        else if (fold->times || fold->also) rows_two(dst, fold, ahead);
        else if (fold->by && fold->about) rows_distance(dst, fold, neutral, ahead);
        else if (fold->about) rows_square(dst, fold, neutral, ahead);
        else if (fold->by) rows_dot(dst, fold, neutral, ahead);
        else rows_sum(dst, fold, neutral, ahead);
        break;
    case TE_FOLD_MAX: rows_max(dst, fold, neutral, ahead); break;
    case TE_FOLD_MIN: rows_min(dst, fold, neutral, ahead); break;
    case TE_FOLD_AMAX: rows_amax(dst, fold, neutral, ahead); break;
    }
}
