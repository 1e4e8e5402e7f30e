/* program_chain_links.h - the functions that chains are made of, see program_chain.h. A part of program_blocks_body.h,
 * for float32 alone.
 *
 * A strip is four vectors of the machine: enough to hide the latency of one operation behind the others, and as many as
 * calling conventions pass in registers. What an operation does to an element is the expression that its block function
 * has; a loop over one vector's worth of it becomes straight vector code.
 */
#include "program_chain.h"

#if defined(TE_ISA_avx512)
#include <immintrin.h>
enum { LANES = 16 };
#elif defined(TE_ISA_avx2)
#include <immintrin.h>
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
enum { STRIP = 4 * LANES };

typedef te_real te_strip_part __attribute__((vector_size(LANES * sizeof(te_real))));
typedef te_real te_strip_memory
    __attribute__((vector_size(LANES * sizeof(te_real)), aligned(sizeof(te_real)), may_alias));

/* Two vectors rounded, one behind the other; where the compiler's own code takes twice as many instructions, by hand:
 * the upper halves are picked from what te_f32_to_bf16 has before its shift. */
#if defined(TE_ISA_avx512)
static inline __attribute__((always_inline)) __m512i round_halves(te_strip_part x, te_strip_part y)
{
    const __m512i pick = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                          25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    __m512i bits[2] = {_mm512_castps_si512(x), _mm512_castps_si512(y)};
    for (int i = 0; i < 2; i++) {
        __mmask16 nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(bits[i]), _mm512_castsi512_ps(bits[i]), _CMP_UNORD_Q);
        __m512i   odd = _mm512_and_si512(_mm512_srli_epi32(bits[i], 16), _mm512_set1_epi32(1));
        __m512i   rounded = _mm512_add_epi32(_mm512_add_epi32(bits[i], odd), _mm512_set1_epi32(0x7fff));
        bits[i] = _mm512_mask_or_epi32(rounded, nan, bits[i], _mm512_set1_epi32(0x400000));
    }
    return _mm512_permutex2var_epi16(bits[0], pick, bits[1]);
}
#elif defined(TE_ISA_avx2)
static inline __attribute__((always_inline)) __m256i round_halves(te_strip_part x, te_strip_part y)
{
    te_strip_part parts[2] = {x, y};
    __m256i       bits[2];
    for (int i = 0; i < 2; i++) {
        bits[i] = _mm256_castps_si256(parts[i]);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits[i], 16), _mm256_set1_epi32(1));
        __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits[i], odd), _mm256_set1_epi32(0x7fff));
        __m256i quiet = _mm256_or_si256(bits[i], _mm256_set1_epi32(0x400000));
        __m256  nan = _mm256_cmp_ps(parts[i], parts[i], _CMP_UNORD_Q);
        rounded = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan));
        bits[i] = _mm256_srli_epi32(rounded, 16);
    }
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(bits[0], bits[1]), 0xd8);
}
#endif

/* Machines that multiply pairs of bfloat16 also round to them, with the same bits but for numbers below the normal
 * ones, which count as 0. */
#if defined(TE_ISA_avx512) && defined(TE_ISA_HAS_AVX512BF16)
#define TE_ROUNDS_PAIRS __attribute__((target("avx512bf16")))
static inline TE_ROUNDS_PAIRS __m512i round_pairs(te_strip_part x, te_strip_part y)
{
    enum { BELOW_NORMAL = 0x20 };
    __mmask16 below = _mm512_fpclass_ps_mask(x, BELOW_NORMAL), below_too = _mm512_fpclass_ps_mask(y, BELOW_NORMAL);
    if (__builtin_expect(!_kortestz_mask16_u8(below, below_too), 0)) return round_halves(x, y);
    return (__m512i)_mm512_cvtne2ps_pbh(y, x);
}
#endif

static inline __attribute__((always_inline)) void store_halves(uint16_t *to, te_strip_part x, te_strip_part y)
{
#if defined(TE_ISA_avx512)
    _mm512_storeu_si512(to, round_halves(x, y));
#elif defined(TE_ISA_avx2)
    _mm256_storeu_si256((__m256i *)(void *)to, round_halves(x, y));
#else
    te_real  values[2 * LANES];
    uint16_t halves[2 * LANES];
    memcpy(values, &x, sizeof x), memcpy(values + LANES, &y, sizeof y);
    _Pragma("omp simd") for (int i = 0; i < 2 * LANES; i++) halves[i] = te_f32_to_bf16(values[i]);
    memcpy(to, halves, sizeof halves);
#endif
}

/* The block function behind those of program_blocks_body.h. */
static void store_flat_bf16(void *dst, int64_t stride, const void *src, size_t n)
{
    uint16_t      *d = dst;
    const te_real *s = src;
    size_t         whole = stride == 1 ? n / (2 * LANES) * (2 * LANES) : 0;
    for (size_t i = 0; i < whole; i += 2 * LANES)
        store_halves(d + i, *(const te_strip_memory *)(s + i), *(const te_strip_memory *)(s + i + LANES));
    if (n > whole) store_bf16(d + whole, stride, s + whole, n - whole);
}

#ifdef TE_ROUNDS_PAIRS
static TE_ROUNDS_PAIRS void store_flat_bf16_pairs(void *dst, int64_t stride, const void *src, size_t n)
{
    uint16_t      *d = dst;
    const te_real *s = src;
    size_t         whole = stride == 1 ? n / (2 * LANES) * (2 * LANES) : 0;
    for (size_t i = 0; i < whole; i += 2 * LANES)
        _mm512_storeu_si512(d + i, round_pairs(_mm512_loadu_ps(s + i), _mm512_loadu_ps(s + i + LANES)));
    if (n > whole) store_bf16(d + whole, stride, s + whole, n - whole);
}
#endif

/* A link while its chain runs over a tile: its function, and per argument an address or a number. */
typedef struct te_bound_link te_bound_link;

#define LINK_PARAMETERS \
    te_strip_part a0, te_strip_part a1, te_strip_part a2, te_strip_part a3, const te_bound_link *link, size_t at

struct te_bound_link {
    void (*run)(LINK_PARAMETERS);
    union {
        char   *block;
        te_real number;
    } arg[3];
};

#define NEXT_LINK link[1].run(a0, a1, a2, a3, link + 1, at)

/* x0 … x3: argument k. */
#define FROM_ACC(x, k) te_strip_part x##0 = a0, x##1 = a1, x##2 = a2, x##3 = a3;
#define FROM_BLOCK(x, k)                                                                     \
    const te_strip_memory *x##_at = (const te_strip_memory *)(link->arg[k].block + at);      \
    te_strip_part x##0 = x##_at[0], x##1 = x##_at[1], x##2 = x##_at[2], x##3 = x##_at[3];
#define FROM_NUMBER(x, k)                                                                    \
    te_strip_part x##0 = link->arg[k].number - (te_strip_part){0}, x##1 = x##0, x##2 = x##0, x##3 = x##0;

#define FROM_HALF(x, k)                                                                      \
    const uint16_t *x##_at = (const uint16_t *)(link->arg[k].block + at / 2);                \
    te_strip_part x##0 = load_halves(x##_at), x##1 = load_halves(x##_at + LANES),            \
                  x##2 = load_halves(x##_at + 2 * LANES), x##3 = load_halves(x##_at + 3 * LANES);

/* --- functions of a vector ---------------------------------------------------------------------------------------- */

#define TE_LANES _Pragma("omp simd") for (int i = 0; i < LANES; i++)
#define TE_PART  static inline __attribute__((always_inline)) te_strip_part

#define VECTOR_1(name)                                                           \
    TE_PART part_##name(te_strip_part x)                                         \
    {                                                                            \
        te_real a[LANES];                                                        \
        memcpy(a, &x, sizeof a);                                                 \
        TE_LANES a[i] = one_##name(a[i]);                                        \
        memcpy(&x, a, sizeof a);                                                 \
        return x;                                                                \
    }

#define VECTOR_2(name)                                                           \
    TE_PART part_##name(te_strip_part x, te_strip_part y)                        \
    {                                                                            \
        te_real a[LANES], b[LANES];                                              \
        memcpy(a, &x, sizeof a);                                                 \
        memcpy(b, &y, sizeof b);                                                 \
        TE_LANES a[i] = one_##name(a[i], b[i]);                                  \
        memcpy(&x, a, sizeof a);                                                 \
        return x;                                                                \
    }

#define VECTOR_3(name)                                                           \
    TE_PART part_##name(te_strip_part x, te_strip_part y, te_strip_part z)                    \
    {                                                                            \
        te_real a[LANES], b[LANES], c[LANES];                                    \
        memcpy(a, &x, sizeof a);                                                 \
        memcpy(b, &y, sizeof b);                                                 \
        memcpy(c, &z, sizeof c);                                                 \
        TE_LANES a[i] = one_##name(a[i], b[i], c[i]);                            \
        memcpy(&x, a, sizeof a);                                                 \
        return x;                                                                \
    }

/* te_exp, with its last steps, which scale by a power of two and round once, as the instruction for that. */
#if defined(TE_ISA_avx512)
TE_PART part_exp(te_strip_part x)
{
    te_real v[LANES], n[LANES];
    x = _mm512_max_ps(_mm512_set1_ps(-105.0f), _mm512_min_ps(_mm512_set1_ps(89.0f), x)); /* NaN stays */
    memcpy(v, &x, sizeof v);
    TE_LANES
    {
        te_exp_parts parts = te_exp_reduce(v[i], 0.0f);
        v[i] = 1.0f + parts.expm1;
        n[i] = parts.n;
    }
    te_strip_part powers;
    memcpy(&x, v, sizeof x), memcpy(&powers, n, sizeof powers);
    return _mm512_scalef_ps(x, powers);
}

/* te_sigmoid with that exponential. */
TE_PART part_sigmoid(te_strip_part x)
{
    te_strip_part e = part_exp(_mm512_or_ps(x, _mm512_set1_ps(-0.0f))), q = e / (1.0f + e);
    __mmask16     negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_mask_blend_ps(negative, 1.0f - q, _mm512_fnmadd_ps(e, q, e));
}

/* te_erf with that scaling. */
TE_PART part_erf(te_strip_part x)
{
    te_real       v[LANES], n[LANES];
    te_strip_part size = _mm512_min_ps(_mm512_set1_ps(4.0f), _mm512_abs_ps(x)), powers; /* NaN stays */
    memcpy(v, &size, sizeof v);
    TE_LANES
    {
        te_exp_parts parts = te_exp_reduce(te_log_erfc(v[i]), 0.0f);
        v[i] = parts.expm1;
        n[i] = parts.n;
    }
    memcpy(&size, v, sizeof size), memcpy(&powers, n, sizeof powers);
    powers = _mm512_scalef_ps(_mm512_set1_ps(-1.0f), powers);
    size = _mm512_fmadd_ps(powers, size, 1.0f + powers);
    return (te_strip_part)_mm512_ternarylogic_epi32((__m512i)size, (__m512i)x, _mm512_set1_epi32(INT32_MIN), 0xf8);
}

/* Their block functions: whole vectors, and what is left by those of program_blocks_body.h. */
#define BLOCK_OF(name)                                                                        \
    static void op_##name##_vectors(void *dst, const void *pa, const void *pb, const void *pc, size_t n) \
    {                                                                                         \
        te_real       *d = dst;                                                               \
        const te_real *a = pa;                                                                \
        size_t         whole = n / LANES * LANES;                                             \
        for (size_t i = 0; i < whole; i += LANES)                                             \
            *(te_strip_memory *)(d + i) = part_##name(*(const te_strip_memory *)(a + i));     \
        op_##name(d + whole, a + whole, pb, pc, n - whole);                                   \
    }
BLOCK_OF(exp)
BLOCK_OF(sigmoid)
BLOCK_OF(erf)
#define op_exp     op_exp_vectors
#define op_sigmoid op_sigmoid_vectors
#define op_erf     op_erf_vectors
#else
VECTOR_1(exp)
VECTOR_1(sigmoid)
VECTOR_1(erf)
#endif

/* --- links -------------------------------------------------------------------------------------------------------- */

#define LINK_1(name, A)                                                                       \
    static void link_##name##_##A(LINK_PARAMETERS)                                            \
    {                                                                                         \
        FROM_##A(x, 0)                                                                        \
        a0 = part_##name(x0), a1 = part_##name(x1), a2 = part_##name(x2), a3 = part_##name(x3); \
        NEXT_LINK;                                                                            \
    }

#define LINK_2(name, A, B)                                                                    \
    static void link_##name##_##A##_##B(LINK_PARAMETERS)                                      \
    {                                                                                         \
        FROM_##A(x, 0) FROM_##B(y, 1)                                                         \
        a0 = part_##name(x0, y0), a1 = part_##name(x1, y1);                                   \
        a2 = part_##name(x2, y2), a3 = part_##name(x3, y3);                                   \
        NEXT_LINK;                                                                            \
    }

#define LINK_3(name, A, B, C)                                                                 \
    static void link_##name##_##A##_##B##_##C(LINK_PARAMETERS)                                \
    {                                                                                         \
        FROM_##A(x, 0) FROM_##B(y, 1) FROM_##C(z, 2)                                          \
        a0 = part_##name(x0, y0, z0), a1 = part_##name(x1, y1, z1);                           \
        a2 = part_##name(x2, y2, z2), a3 = part_##name(x3, y3, z3);                           \
        NEXT_LINK;                                                                            \
    }

#define LINKS_1_OF(name) LINK_1(name, ACC) LINK_1(name, BLOCK) LINK_1(name, HALF)
#define LINKS_1(name)    VECTOR_1(name) LINKS_1_OF(name)
/* Two numbers do not meet: the result would be a number. */
#define LINKS_2(name)                                                                         \
    VECTOR_2(name)                                                                            \
    LINK_2(name, ACC, ACC) LINK_2(name, ACC, BLOCK) LINK_2(name, ACC, NUMBER)                 \
    LINK_2(name, BLOCK, ACC) LINK_2(name, BLOCK, BLOCK) LINK_2(name, BLOCK, NUMBER)           \
    LINK_2(name, NUMBER, ACC) LINK_2(name, NUMBER, BLOCK)                                     \
    LINK_2(name, ACC, HALF) LINK_2(name, BLOCK, HALF) LINK_2(name, NUMBER, HALF)              \
    LINK_2(name, HALF, ACC) LINK_2(name, HALF, BLOCK) LINK_2(name, HALF, NUMBER) LINK_2(name, HALF, HALF)
#define LINKS_3_OF(name, A, B) LINK_3(name, A, B, ACC) LINK_3(name, A, B, BLOCK) LINK_3(name, A, B, NUMBER)
#define LINKS_3(name)                                                                         \
    LINKS_3_OF(name, ACC, ACC) LINKS_3_OF(name, ACC, BLOCK) LINKS_3_OF(name, ACC, NUMBER)     \
    LINKS_3_OF(name, BLOCK, ACC) LINKS_3_OF(name, BLOCK, BLOCK) LINKS_3_OF(name, BLOCK, NUMBER) \
    LINKS_3_OF(name, NUMBER, ACC) LINKS_3_OF(name, NUMBER, BLOCK) LINKS_3_OF(name, NUMBER, NUMBER)

/* (x first y) second z. */
#define LINKS_PAIR(name, first, second)                                                       \
    TE_PART part_##name(te_strip_part x, te_strip_part y, te_strip_part z)                    \
    {                                                                                         \
        te_strip_part t = first(x, y);                                                        \
        return second(t, z);                                                                  \
    }                                                                                         \
    LINKS_3(name)

/* clang-format off */
LINKS_1(neg) LINKS_1(abs) LINKS_1(sign) LINKS_1(floor) LINKS_1(ceil) LINKS_1(round) LINKS_1(trunc)
LINKS_1(sqrt) LINKS_1(rsqrt) LINKS_1(recip) LINKS_1_OF(exp) LINKS_1(log) LINKS_1(tanh) LINKS_1_OF(sigmoid)
LINKS_1_OF(erf) LINKS_1(isnan) LINKS_1(isfinite) LINKS_1(to_bf16) LINKS_1(to_f16) LINKS_1(to_f32)
LINKS_2(add) LINKS_2(sub) LINKS_2(mul) LINKS_2(div) LINKS_2(min) LINKS_2(max)
LINKS_2(lt) LINKS_2(le) LINKS_2(eq) LINKS_2(ne)
VECTOR_3(where) LINKS_3(where)
LINKS_PAIR(add_add, TE_PLUS, TE_PLUS) LINKS_PAIR(add_sub, TE_PLUS, TE_MINUS)
LINKS_PAIR(add_from, TE_PLUS, TE_FROM) LINKS_PAIR(add_mul, TE_PLUS, TE_TIMES)
LINKS_PAIR(sub_add, TE_MINUS, TE_PLUS) LINKS_PAIR(sub_sub, TE_MINUS, TE_MINUS)
LINKS_PAIR(sub_from, TE_MINUS, TE_FROM) LINKS_PAIR(sub_mul, TE_MINUS, TE_TIMES)
LINKS_PAIR(mul_add, TE_TIMES, TE_PLUS) LINKS_PAIR(mul_sub, TE_TIMES, TE_MINUS)
LINKS_PAIR(mul_from, TE_TIMES, TE_FROM) LINKS_PAIR(mul_mul, TE_TIMES, TE_TIMES)
/* clang-format on */

#include "program_chain_tables.h"

/* --- results ------------------------------------------------------------------------------------------------------ */

static void link_keep(LINK_PARAMETERS)
{
    te_strip_memory *to = (te_strip_memory *)(link->arg[0].block + at);
    to[0] = a0, to[1] = a1, to[2] = a2, to[3] = a3;
    NEXT_LINK;
}

static void link_keep_half(LINK_PARAMETERS)
{
    uint16_t *to = (uint16_t *)(link->arg[0].block + at / 2);
    store_halves(to, a0, a1);
    store_halves(to + 2 * LANES, a2, a3);
    NEXT_LINK;
}

/* The same past the caches, to whole lines. */
#if defined(TE_ISA_avx512)
static void link_stream(LINK_PARAMETERS)
{
    float *to = (float *)(link->arg[0].block + at);
    _mm512_stream_ps(to, a0), _mm512_stream_ps(to + LANES, a1);
    _mm512_stream_ps(to + 2 * LANES, a2), _mm512_stream_ps(to + 3 * LANES, a3);
    NEXT_LINK;
}

static void link_stream_half(LINK_PARAMETERS)
{
    uint16_t *to = (uint16_t *)(link->arg[0].block + at / 2);
    _mm512_stream_si512((__m512i *)to, round_halves(a0, a1));
    _mm512_stream_si512((__m512i *)(to + 2 * LANES), round_halves(a2, a3));
    NEXT_LINK;
}
#else
#define link_stream      link_keep
#define link_stream_half link_keep_half
#endif

#ifdef TE_ROUNDS_PAIRS
static TE_ROUNDS_PAIRS void link_keep_pairs(LINK_PARAMETERS)
{
    uint16_t *to = (uint16_t *)(link->arg[0].block + at / 2);
    _mm512_storeu_si512(to, round_pairs(a0, a1));
    _mm512_storeu_si512(to + 2 * LANES, round_pairs(a2, a3));
    NEXT_LINK;
}

static TE_ROUNDS_PAIRS void link_stream_pairs(LINK_PARAMETERS)
{
    uint16_t *to = (uint16_t *)(link->arg[0].block + at / 2);
    _mm512_stream_si512((__m512i *)to, round_pairs(a0, a1));
    _mm512_stream_si512((__m512i *)(to + 2 * LANES), round_pairs(a2, a3));
    NEXT_LINK;
}
#else
#define link_keep_pairs   link_keep_half
#define link_stream_pairs link_stream_half
#endif

/* Of a pair that becomes two links: its last argument, where that is acc, put where the second one finds it. */
static void link_put_aside(LINK_PARAMETERS)
{
    te_strip_part *to = (te_strip_part *)(void *)link->arg[2].block;
    to[0] = a0, to[1] = a1, to[2] = a2, to[3] = a3;
    NEXT_LINK;
}

#define LINK_ASIDE(name, op)                                                                  \
    static void link_aside_##name(LINK_PARAMETERS)                                            \
    {                                                                                         \
        const te_strip_part *z = (const te_strip_part *)(const void *)link->arg[2].block;     \
        a0 = op(a0, z[0]), a1 = op(a1, z[1]), a2 = op(a2, z[2]), a3 = op(a3, z[3]);           \
        NEXT_LINK;                                                                            \
    }

LINK_ASIDE(add, TE_PLUS) LINK_ASIDE(sub, TE_MINUS) LINK_ASIDE(from, TE_FROM) LINK_ASIDE(mul, TE_TIMES)

static void (*const aside_runs[TE_SECOND_COUNT])(LINK_PARAMETERS) = {
    [TE_SECOND_ADD] = link_aside_add, [TE_SECOND_SUB] = link_aside_sub, [TE_SECOND_FROM] = link_aside_from,
    [TE_SECOND_MUL] = link_aside_mul};

/* --- sums of columns ---------------------------------------------------------------------------------------------- */

#define TO_COLUMNS(x)                                                                         \
    te_strip_memory *to = (te_strip_memory *)(link->arg[2].block + at);                       \
    to[0] = to[0] + x##0, to[1] = to[1] + x##1, to[2] = to[2] + x##2, to[3] = to[3] + x##3;   \
    NEXT_LINK;

#define COLUMNS_1(A)                                                                          \
    static void columns_##A(LINK_PARAMETERS)                                                  \
    {                                                                                         \
        FROM_##A(x, 0)                                                                        \
        TO_COLUMNS(x)                                                                         \
    }

#define COLUMNS_2(A, B)                                                                       \
    static void columns_##A##_##B(LINK_PARAMETERS)                                            \
    {                                                                                         \
        FROM_##A(x, 0) FROM_##B(y, 1)                                                         \
        x0 = x0 * y0, x1 = x1 * y1, x2 = x2 * y2, x3 = x3 * y3;                               \
        TO_COLUMNS(x)                                                                         \
    }

/* clang-format off */
COLUMNS_1(ACC) COLUMNS_1(BLOCK) COLUMNS_1(HALF)
COLUMNS_2(ACC, ACC) COLUMNS_2(ACC, BLOCK) COLUMNS_2(ACC, HALF)
COLUMNS_2(BLOCK, ACC) COLUMNS_2(BLOCK, BLOCK) COLUMNS_2(BLOCK, HALF)
COLUMNS_2(HALF, ACC) COLUMNS_2(HALF, BLOCK) COLUMNS_2(HALF, HALF)
/* clang-format on */

static void link_end(LINK_PARAMETERS)
{
    (void)a0, (void)a1, (void)a2, (void)a3, (void)link, (void)at;
}

/* --- the table ---------------------------------------------------------------------------------------------------- */

#define WAY(op, name, A, B, C, suffix) [TE_LINK_OF(op, TE_FROM_##A, TE_FROM_##B, TE_FROM_##C)] = link_##name##suffix
#define WAYS_1(op, name)                                                                               \
    WAY(op, name, ACC, ACC, ACC, _ACC), WAY(op, name, BLOCK, ACC, ACC, _BLOCK), WAY(op, name, HALF, ACC, ACC, _HALF)
#define WAYS_2(op, name)                                                                               \
    WAY(op, name, ACC, ACC, ACC, _ACC_ACC), WAY(op, name, ACC, BLOCK, ACC, _ACC_BLOCK),                \
        WAY(op, name, ACC, NUMBER, ACC, _ACC_NUMBER), WAY(op, name, BLOCK, ACC, ACC, _BLOCK_ACC),      \
        WAY(op, name, BLOCK, BLOCK, ACC, _BLOCK_BLOCK), WAY(op, name, BLOCK, NUMBER, ACC, _BLOCK_NUMBER), \
        WAY(op, name, NUMBER, ACC, ACC, _NUMBER_ACC), WAY(op, name, NUMBER, BLOCK, ACC, _NUMBER_BLOCK), \
        WAY(op, name, ACC, HALF, ACC, _ACC_HALF), WAY(op, name, BLOCK, HALF, ACC, _BLOCK_HALF),        \
        WAY(op, name, NUMBER, HALF, ACC, _NUMBER_HALF), WAY(op, name, HALF, ACC, ACC, _HALF_ACC),      \
        WAY(op, name, HALF, BLOCK, ACC, _HALF_BLOCK), WAY(op, name, HALF, NUMBER, ACC, _HALF_NUMBER),  \
        WAY(op, name, HALF, HALF, ACC, _HALF_HALF)
#define WAYS_3_OF(op, name, A, B)                                                                      \
    WAY(op, name, A, B, ACC, _##A##_##B##_ACC), WAY(op, name, A, B, BLOCK, _##A##_##B##_BLOCK),        \
        WAY(op, name, A, B, NUMBER, _##A##_##B##_NUMBER)
#define WAYS_3(op, name)                                                                               \
    WAYS_3_OF(op, name, ACC, ACC), WAYS_3_OF(op, name, ACC, BLOCK), WAYS_3_OF(op, name, ACC, NUMBER),  \
        WAYS_3_OF(op, name, BLOCK, ACC), WAYS_3_OF(op, name, BLOCK, BLOCK),                            \
        WAYS_3_OF(op, name, BLOCK, NUMBER), WAYS_3_OF(op, name, NUMBER, ACC),                          \
        WAYS_3_OF(op, name, NUMBER, BLOCK), WAYS_3_OF(op, name, NUMBER, NUMBER)

#define ROW_1(NAME, name)              WAYS_1(TE_PW_##NAME, name)
#define ROW_2(NAME, name)              WAYS_2(TE_PW_##NAME, name)
#define ROW_PAIR(FIRST, SECOND, name)                                                                  \
    WAYS_3(TE_BLOCK_PAIRS + TE_FIRST_##FIRST * TE_SECOND_COUNT + TE_SECOND_##SECOND, name)

static void (*const link_runs[TE_LINK_COUNT])(LINK_PARAMETERS) = {
    ROW_1(NEG, neg), ROW_1(ABS, abs), ROW_1(SIGN, sign), ROW_1(FLOOR, floor), ROW_1(CEIL, ceil), ROW_1(ROUND, round),
    ROW_1(TRUNC, trunc), ROW_1(SQRT, sqrt), ROW_1(RSQRT, rsqrt), ROW_1(RECIP, recip), ROW_1(EXP, exp), ROW_1(LOG, log),
    ROW_1(TANH, tanh), ROW_1(SIGMOID, sigmoid), ROW_1(ERF, erf), ROW_1(ISNAN, isnan), ROW_1(ISFINITE, isfinite),
    ROW_1(TO_BF16, to_bf16), ROW_1(TO_F16, to_f16), ROW_1(TO_F32, to_f32),
    ROW_2(ADD, add), ROW_2(SUB, sub), ROW_2(MUL, mul), ROW_2(DIV, div), ROW_2(MIN, min), ROW_2(MAX, max),
    ROW_2(LT, lt), ROW_2(LE, le), ROW_2(EQ, eq), ROW_2(NE, ne), WAYS_3(TE_PW_WHERE, where),
    ROW_PAIR(ADD, ADD, add_add), ROW_PAIR(ADD, SUB, add_sub), ROW_PAIR(ADD, FROM, add_from),
    ROW_PAIR(ADD, MUL, add_mul), ROW_PAIR(SUB, ADD, sub_add), ROW_PAIR(SUB, SUB, sub_sub),
    ROW_PAIR(SUB, FROM, sub_from), ROW_PAIR(SUB, MUL, sub_mul), ROW_PAIR(MUL, ADD, mul_add),
    ROW_PAIR(MUL, SUB, mul_sub), ROW_PAIR(MUL, FROM, mul_from), ROW_PAIR(MUL, MUL, mul_mul),
    WAY(TE_BLOCK_LOOK_UP, look_up, ACC, NUMBER, ACC, _ACC_NUMBER),
    WAY(TE_BLOCK_LOOK_UP, look_up, BLOCK, NUMBER, ACC, _BLOCK_NUMBER),
    WAY(TE_BLOCK_LOOK_UP, look_up, HALF, NUMBER, ACC, _HALF_NUMBER),
};

#define COLUMNS_WAYS(A) \
    [TE_FROM_##A] = {[TE_FROM_ACC] = columns_##A##_ACC, [TE_FROM_BLOCK] = columns_##A##_BLOCK, \
                     [TE_FROM_HALF] = columns_##A##_HALF}

static void (*const columns_runs[TE_FROM_COUNT])(LINK_PARAMETERS) = {
    [TE_FROM_ACC] = columns_ACC, [TE_FROM_BLOCK] = columns_BLOCK, [TE_FROM_HALF] = columns_HALF};
static void (*const columns_dot_runs[TE_FROM_COUNT][TE_FROM_COUNT])(LINK_PARAMETERS) = {
    COLUMNS_WAYS(ACC), COLUMNS_WAYS(BLOCK), COLUMNS_WAYS(HALF)};

/* What changes from one window or row to the next: addresses go on, and numbers are the next row's. */
typedef struct te_moving_block {
    char  **block;
    int64_t step;
} te_moving_block;

typedef struct te_moving_number {
    te_real       *number;
    const te_real *rows;
} te_moving_number;

/* A tensor that windows read from memory: where it is bound, and bytes of a strip. */
typedef struct te_read_block {
    char *const *block;
    int64_t      strip;
} te_read_block;

enum { READ_MAX = 8, READ_AHEAD = 1024 /* bytes: more are not there in time, or gone again */ };

/* A chain bound to a tile. */
typedef struct te_bound_chain {
    te_strip_part    aside[4];
    te_bound_link    link[3 * TE_CHAIN_MAX];
    te_moving_block  block[2 * 3 * TE_CHAIN_MAX];
    te_moving_number number[2 * 3 * TE_CHAIN_MAX];
    te_read_block    read[READ_MAX];
    int              n_links, n_blocks, n_numbers, n_read;
} te_bound_chain;

/* By how much the block in a slot goes on. */
static int64_t step_of(const te_chain_run *run, int32_t slot)
{
    uint8_t form = run->form[slot];
    if (run->step) return run->step[slot];
    if (!(form & TE_FORM_TENSOR)) return 0;
    return (int64_t)(run->window * (form & TE_FORM_HALF ? sizeof(uint16_t) : sizeof(te_real)));
}

static void bind_block(te_bound_chain *chain, char **block, const te_chain_run *run, int32_t slot)
{
    int64_t step = run->window < run->n ? step_of(run, slot) : 0;
    *block = run->slot[slot];
    if (step) chain->block[chain->n_blocks++] = (te_moving_block){block, step};
}

static void bind_number(te_bound_chain *chain, te_real *number, const te_chain_run *run, int32_t slot)
{
    const te_real *rows = (const te_real *)run->slot[slot];
    *number = rows[0];
    if (run->step && run->window < run->n) chain->number[chain->n_numbers++] = (te_moving_number){number, rows};
}

static void bind_read(te_bound_chain *chain, char *const *block, const te_chain_run *run, int32_t slot)
{
    uint8_t form = run->form[slot];
    if (!run->far || !(form & TE_FORM_TENSOR) || chain->n_read == READ_MAX) return;
    for (int i = 0; i < chain->n_read; i++)
        if (*chain->read[i].block == *block) return;
    int64_t strip = STRIP * (form & TE_FORM_HALF ? sizeof(uint16_t) : sizeof(te_real));
    chain->read[chain->n_read++] = (te_read_block){block, strip};
}

/* Where the arguments of a link are, and which function takes them from there. */
static void bind_link(te_bound_chain *chain, const te_link *link, const te_chain_run *run)
{
    te_bound_link *bound = &chain->link[chain->n_links++];
    int            from[3] = {TE_FROM_ACC, TE_FROM_ACC, TE_FROM_ACC};
    for (int k = 0; k < 3; k++) {
        int32_t arg = link->arg[k];
        if (arg < 0) continue;
        from[k] = link->number >> k & 1 ? TE_FROM_NUMBER : run->form[arg] & TE_FORM_HALF ? TE_FROM_HALF : TE_FROM_BLOCK;
        if (link->op == TE_BLOCK_LOOK_UP && k == 1) {
            bound->arg[k].block = run->slot[arg];
            continue;
        }
        if (from[k] == TE_FROM_NUMBER) {
            bind_number(chain, &bound->arg[k].number, run, arg);
            continue;
        }
        bind_block(chain, &bound->arg[k].block, run, arg);
        bind_read(chain, &bound->arg[k].block, run, arg);
    }
    bound->run = link->op == TE_LINK_COLUMNS       ? columns_runs[from[0]]
                 : link->op == TE_LINK_COLUMNS_DOT ? columns_dot_runs[from[0]][from[1]]
                                                   : link_runs[TE_LINK_OF(link->op, from[0], from[1], from[2])];
#ifdef TE_ISA_avx512
    if (link->op == TE_BLOCK_LOOK_UP && from[0] == TE_FROM_HALF && run->gathers) bound->run = link_gather_HALF_NUMBER;
#endif
}

/* As the tensor wants it. What is streamed is so in whole lines, in every row. */
static void bind_keep(te_bound_chain *chain, const te_link *link, const te_chain_run *run, bool pairs)
{
    te_bound_link *bound = &chain->link[chain->n_links++];
    uint8_t        form = run->form[link->arg[0]];
    bind_block(chain, &bound->arg[0].block, run, link->arg[0]);
    bool streamed = (form & TE_FORM_STREAM) && (uintptr_t)bound->arg[0].block % TE_LINE == 0 &&
                    step_of(run, link->arg[0]) % TE_LINE == 0;
    if ((form & TE_FORM_HALF) && pairs) bound->run = streamed ? link_stream_pairs : link_keep_pairs;
    else if (form & TE_FORM_HALF) bound->run = streamed ? link_stream_half : link_keep_half;
    else bound->run = streamed ? link_stream : link_keep;
}

/* A pair with blocks of bfloat16 becomes two links. */
static void bind_links(te_bound_chain *chain, const te_link *link, const te_chain_run *run)
{
    static const uint8_t first_op[TE_FIRST_COUNT] = {TE_PW_ADD, TE_PW_SUB, TE_PW_MUL};
    static const uint8_t second_op[TE_SECOND_COUNT] = {TE_PW_ADD, TE_PW_SUB, TE_PW_SUB, TE_PW_MUL};
    bool                 halves = false;
    for (int k = 0; k < 3; k++) halves = halves || (link->arg[k] >= 0 && (run->form[link->arg[k]] & TE_FORM_HALF));
    if (!halves || link->op < TE_BLOCK_PAIRS || link->op >= TE_BLOCK_LOOK_UP) {
        bind_link(chain, link, run);
        return;
    }
    int     pair = link->op - TE_BLOCK_PAIRS, second = pair % TE_SECOND_COUNT, at = second == TE_SECOND_FROM ? 0 : 1;
    te_link one = {first_op[pair / TE_SECOND_COUNT], link->number & 3, {link->arg[0], link->arg[1], -1}};
    te_link two = {second_op[second], (uint8_t)(link->number >> 2 << at), {-1, -1, -1}};
    two.arg[at] = link->arg[2];
    if (link->arg[2] < 0) {
        chain->link[chain->n_links++] = (te_bound_link){link_put_aside, {[2] = {.block = (char *)chain->aside}}};
        bind_link(chain, &one, run);
        chain->link[chain->n_links++] = (te_bound_link){aside_runs[second], {[2] = {.block = (char *)chain->aside}}};
        return;
    }
    bind_link(chain, &one, run);
    bind_link(chain, &two, run);
}

/* Whether the link only rounds what the one behind it rounds when it writes it, as the last one. */
static bool rounds_for_keep(const te_link *link, const te_chain_run *run)
{
    return link->op == TE_PW_TO_BF16 && link->arg[0] < 0 && link[1].op == TE_LINK_KEEP &&
           (run->form[link[1].arg[0]] & TE_FORM_HALF) && link[2].op == TE_LINK_END;
}

static inline void run_strips(const te_bound_link *first, size_t n, te_ahead *ahead)
{
    const te_strip_part none = {0};
    for (size_t i = 0; i < n; i += STRIP) {
        fetch_ahead(ahead);
        first->run(none, none, none, none, first, i * sizeof(te_real));
    }
}

/* The same of a window whose tensors come from memory or the last cache. Processors fetch what follows by themselves,
 * but one core has too few lines under way for its share of the bandwidth: sums of two tensors take a fifth less time
 * so, AdamW over tensors of 14 MB half of it. */
static void run_far_strips(const te_bound_chain *chain, size_t n)
{
    const te_bound_link *first = chain->link;
    const te_strip_part  none = {0};
    int64_t              strip = 0;
    for (size_t i = 0; i < n; i += STRIP, strip++) {
        for (const te_read_block *read = chain->read; read < chain->read + chain->n_read; read++) {
            const char *at = *read->block + strip * read->strip + READ_AHEAD;
            for (const char *end = at + read->strip; at < end; at += TE_LINE) __builtin_prefetch(at, 0, 3);
        }
        first->run(none, none, none, none, first, i * sizeof(te_real));
    }
}

/* To row or window `index`. */
static inline void go_on(te_bound_chain *chain, size_t index)
{
    for (int i = 0; i < chain->n_blocks; i++) *chain->block[i].block += chain->block[i].step;
    for (int i = 0; i < chain->n_numbers; i++) *chain->number[i].number = chain->number[i].rows[index];
}

static inline __attribute__((always_inline)) void run_chain_with(const te_chain_run *run, bool pairs)
{
    te_bound_chain chain;
    te_ahead       ahead = run->ahead;
    chain.n_links = chain.n_blocks = chain.n_numbers = chain.n_read = 0;
    for (const te_link *link = run->links; link->op != TE_LINK_END; link++) {
        if (link->op == TE_LINK_KEEP) bind_keep(&chain, link, run, pairs);
        else if (!rounds_for_keep(link, run)) bind_links(&chain, link, run);
    }
    chain.link[chain.n_links].run = link_end;
    for (size_t left = run->n, window = run->window, index = 1;; left -= window, go_on(&chain, index++)) {
        if (chain.n_read) run_far_strips(&chain, left < window ? left : window);
        else run_strips(chain.link, left < window ? left : window, &ahead);
        if (left <= window) return;
    }
}

static void run_chain(const te_chain_run *run) { run_chain_with(run, false); }

#ifdef TE_ROUNDS_PAIRS
static void run_chain_pairs(const te_chain_run *run) { run_chain_with(run, true); }
#endif
