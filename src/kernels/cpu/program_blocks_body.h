/* program_blocks_body.h - the loops behind a te_blocks table, for the value type te_real. Included once by a file that
 * defines te_real, TE_REAL_IS_F32, TE_BLOCKS_TABLE (the table's name) and TE_REAL_FN(name), the elementary functions.
 *
 * Every loop is written so that GCC and clang vectorize it: no calls that are not inlined, selections instead of branches,
 * lengths of any size. `omp simd` states that iterations are independent, which holds with dst equal to an argument.
 */
#include "../dtype.h"
#include "../philox.h"
#include "program_blocks.h"

#include <string.h>

#define TE_EACH _Pragma("omp simd") for (size_t i = 0; i < n; i++)

/* --- operations ------------------------------------------------------------------------------------------------- */

#define TE_UNARY(name, expression)                                                                   \
    static void op_##name(void *dst, const void *pa, const void *pb, const void *pc, size_t n)       \
    {                                                                                                \
        te_real       *d = dst;                                                                      \
        const te_real *a = pa;                                                                       \
        (void)pb, (void)pc;                                                                          \
        TE_EACH                                                                                      \
        {                                                                                            \
            te_real x = a[i];                                                                        \
            d[i] = expression;                                                                       \
        }                                                                                            \
    }

/* One function per set of arguments that are single numbers. */
#define TE_NUMBER(x, p) te_real x = *p;

#define TE_BINARY_VARIANT(name, suffix, numbers, x_is, y_is, expression)                                    \
    static void op_##name##_##suffix(void *dst, const void *pa, const void *pb, const void *pc, size_t n)   \
    {                                                                                                       \
        te_real       *d = dst;                                                                             \
        const te_real *a = pa, *b = pb;                                                                     \
        (void)pc;                                                                                           \
        numbers                                                                                             \
        TE_EACH                                                                                             \
        {                                                                                                   \
            te_real x = x_is, y = y_is;                                                                     \
            d[i] = expression;                                                                              \
        }                                                                                                   \
    }

#define TE_BINARY(name, expression)                                               \
    TE_BINARY_VARIANT(name, 0, , a[i], b[i], expression)                          \
    TE_BINARY_VARIANT(name, 1, TE_NUMBER(a0, a), a0, b[i], expression)            \
    TE_BINARY_VARIANT(name, 2, TE_NUMBER(b0, b), a[i], b0, expression)

#define TE_WHERE_VARIANT(suffix, numbers, x_is, y_is, z_is)                                            \
    static void op_where_##suffix(void *dst, const void *pa, const void *pb, const void *pc, size_t n) \
    {                                                                                                  \
        te_real       *d = dst;                                                                        \
        const te_real *a = pa, *b = pb, *c = pc;                                                       \
        numbers                                                                                        \
        TE_EACH                                                                                        \
        {                                                                                              \
            te_real x = x_is, y = y_is, z = z_is;                                                      \
            d[i] = x != 0 ? y : z;                                                                     \
        }                                                                                              \
    }

TE_UNARY(neg, -x)
TE_UNARY(abs, TE_REAL_FN(fabs)(x))
TE_UNARY(sign, x > 0 ? (te_real)1 : (x < 0 ? (te_real)-1 : (x == 0 ? (te_real)0 : x)))
TE_UNARY(floor, TE_REAL_FN(floor)(x))
TE_UNARY(ceil, TE_REAL_FN(ceil)(x))
TE_UNARY(round, TE_REAL_FN(rint)(x))
TE_UNARY(trunc, TE_REAL_FN(trunc)(x))
TE_UNARY(sqrt, TE_REAL_FN(sqrt)(x))
TE_UNARY(rsqrt, (te_real)1 / TE_REAL_FN(sqrt)(x))
TE_UNARY(recip, (te_real)1 / x)
TE_UNARY(exp, TE_REAL_FN(exp)(x))
TE_UNARY(log, TE_REAL_FN(log)(x))
TE_UNARY(tanh, TE_REAL_FN(tanh)(x))
TE_UNARY(sigmoid, TE_REAL_FN(sigmoid)(x))
TE_UNARY(erf, TE_REAL_FN(erf)(x))
TE_UNARY(isnan, x != x ? (te_real)1 : (te_real)0)
TE_UNARY(isfinite, x - x == 0 ? (te_real)1 : (te_real)0)
TE_UNARY(to_bf16, (te_real)te_bf16_to_f32(TE_REAL_FN(to_bf16)(x)))
TE_UNARY(to_f16, (te_real)te_f16_to_f32(TE_REAL_FN(to_f16)(x)))
TE_UNARY(to_f32, (te_real)(float)x)

TE_BINARY(add, x + y)
TE_BINARY(sub, x - y)
TE_BINARY(mul, x *y)
TE_BINARY(div, x / y)
TE_BINARY(pow, TE_REAL_FN(pow)(x, y))
TE_BINARY(min, ((y < x) | (y != y)) ? y : x)
TE_BINARY(max, ((x > y) | (x != x)) ? x : y)
TE_BINARY(lt, x < y ? (te_real)1 : (te_real)0)
TE_BINARY(le, x <= y ? (te_real)1 : (te_real)0)
TE_BINARY(eq, x == y ? (te_real)1 : (te_real)0)
TE_BINARY(ne, x != y ? (te_real)1 : (te_real)0)

TE_WHERE_VARIANT(0, , a[i], b[i], c[i])
TE_WHERE_VARIANT(1, TE_NUMBER(a0, a), a0, b[i], c[i])
TE_WHERE_VARIANT(2, TE_NUMBER(b0, b), a[i], b0, c[i])
TE_WHERE_VARIANT(3, TE_NUMBER(a0, a) TE_NUMBER(b0, b), a0, b0, c[i])
TE_WHERE_VARIANT(4, TE_NUMBER(c0, c), a[i], b[i], c0)
TE_WHERE_VARIANT(5, TE_NUMBER(a0, a) TE_NUMBER(c0, c), a0, b[i], c0)
TE_WHERE_VARIANT(6, TE_NUMBER(b0, b) TE_NUMBER(c0, c), a[i], b0, c0)

/* (a first b) second c. */
#define TE_PAIR_VARIANT(name, suffix, numbers, x_is, y_is, z_is, first, second)                                    \
    static void op_##name##_##suffix(void *dst, const void *pa, const void *pb, const void *pc, size_t n)          \
    {                                                                                                              \
        te_real       *d = dst;                                                                                    \
        const te_real *a = pa, *b = pb, *c = pc;                                                                   \
        numbers                                                                                                    \
        TE_EACH                                                                                                    \
        {                                                                                                          \
            te_real x = x_is, y = y_is, z = z_is, t = first(x, y);                                                 \
            d[i] = second(t, z);                                                                                   \
        }                                                                                                          \
    }

#define TE_PAIR(name, first, second)                                                                       \
    TE_PAIR_VARIANT(name, 0, , a[i], b[i], c[i], first, second)                                            \
    TE_PAIR_VARIANT(name, 1, TE_NUMBER(a0, a), a0, b[i], c[i], first, second)                              \
    TE_PAIR_VARIANT(name, 2, TE_NUMBER(b0, b), a[i], b0, c[i], first, second)                              \
    TE_PAIR_VARIANT(name, 4, TE_NUMBER(c0, c), a[i], b[i], c0, first, second)                              \
    TE_PAIR_VARIANT(name, 5, TE_NUMBER(a0, a) TE_NUMBER(c0, c), a0, b[i], c0, first, second)               \
    TE_PAIR_VARIANT(name, 6, TE_NUMBER(b0, b) TE_NUMBER(c0, c), a[i], b0, c0, first, second)

#define TE_PLUS(x, y)  ((x) + (y))
#define TE_MINUS(x, y) ((x) - (y))
#define TE_FROM(x, y)  ((y) - (x))
#define TE_TIMES(x, y) ((x) * (y))

TE_PAIR(add_add, TE_PLUS, TE_PLUS)
TE_PAIR(add_sub, TE_PLUS, TE_MINUS)
TE_PAIR(add_from, TE_PLUS, TE_FROM)
TE_PAIR(add_mul, TE_PLUS, TE_TIMES)
TE_PAIR(sub_add, TE_MINUS, TE_PLUS)
TE_PAIR(sub_sub, TE_MINUS, TE_MINUS)
TE_PAIR(sub_from, TE_MINUS, TE_FROM)
TE_PAIR(sub_mul, TE_MINUS, TE_TIMES)
TE_PAIR(mul_add, TE_TIMES, TE_PLUS)
TE_PAIR(mul_sub, TE_TIMES, TE_MINUS)
TE_PAIR(mul_from, TE_TIMES, TE_FROM)
TE_PAIR(mul_mul, TE_TIMES, TE_TIMES)

#if TE_REAL_IS_F32
/* Angles too large for the loop without branches are looked for first: dst may be where they are. */
static void turn(float *d, const float *a, size_t n, uint32_t quarters)
{
    uint32_t huge = 0;
    _Pragma("omp simd reduction(| : huge)") for (size_t i = 0; i < n; i++) huge |= te_angle_is_huge(a[i]) ? 1u : 0u;
    if (huge) {
        for (size_t i = 0; i < n; i++) d[i] = te_sin_turned(a[i], quarters);
        return;
    }
    TE_EACH d[i] = te_sin_bounded(a[i], quarters);
}

static void op_sin(void *dst, const void *a, const void *b, const void *c, size_t n)
{
    (void)b, (void)c;
    turn(dst, a, n, 0);
}

static void op_cos(void *dst, const void *a, const void *b, const void *c, size_t n)
{
    (void)b, (void)c;
    turn(dst, a, n, 1);
}
#else
TE_UNARY(sin, sin(x))
TE_UNARY(cos, cos(x))
#endif

/* --- loads and stores ------------------------------------------------------------------------------------------- */

#define TE_LOAD_STORE(name, type, from, to)                                                    \
    static void load_##name(void *dst, const void *src, int64_t stride, size_t n)              \
    {                                                                                          \
        te_real    *d = dst;                                                                   \
        const type *s = src;                                                                   \
        if (stride == 1) {                                                                     \
            TE_EACH d[i] = (te_real)from(s[i]);                                                \
        } else if (stride == 0) {                                                              \
            te_real value = n ? (te_real)from(*s) : 0;                                         \
            TE_EACH d[i] = value;                                                              \
        } else {                                                                               \
            for (size_t i = 0; i < n; i++) d[i] = (te_real)from(s[(int64_t)i * stride]);       \
        }                                                                                      \
    }                                                                                          \
    static void store_##name(void *dst, int64_t stride, const void *src, size_t n)             \
    {                                                                                          \
        type          *d = dst;                                                                \
        const te_real *s = src;                                                                \
        if (stride == 1) {                                                                     \
            TE_EACH d[i] = to(s[i]);                                                           \
        } else {                                                                               \
            for (size_t i = 0; i < n; i++) d[(int64_t)i * stride] = to(s[i]);                  \
        }                                                                                      \
    }

#define TE_SAME(x)      (x)
#define TE_FROM_BOOL(x) ((x) != 0)
#define TE_TO_BOOL(x)   ((x) != 0)
#define TE_TO_F32(x)    ((float)(x))
#define TE_TO_F64(x)    ((double)(x))

TE_LOAD_STORE(f32, float, TE_SAME, TE_TO_F32)
TE_LOAD_STORE(f64, double, TE_SAME, TE_TO_F64)
TE_LOAD_STORE(bf16, uint16_t, te_bf16_to_f32, TE_REAL_FN(to_bf16))
TE_LOAD_STORE(f16, uint16_t, te_f16_to_f32, TE_REAL_FN(to_f16))
TE_LOAD_STORE(f8e4m3, uint8_t, te_f8e4m3_to_f32, TE_REAL_FN(to_f8e4m3))
TE_LOAD_STORE(f8e5m2, uint8_t, te_f8e5m2_to_f32, TE_REAL_FN(to_f8e5m2))
TE_LOAD_STORE(i64, int64_t, TE_SAME, TE_REAL_FN(to_i64))
TE_LOAD_STORE(i32, int32_t, TE_SAME, TE_REAL_FN(to_i32))
TE_LOAD_STORE(u8, uint8_t, TE_SAME, TE_REAL_FN(to_u8))
TE_LOAD_STORE(bool, uint8_t, TE_FROM_BOOL, TE_TO_BOOL)

static void   set_value(void *dst, double value) { *(te_real *)dst = (te_real)value; }
static double get_value(const void *src) { return (double)*(const te_real *)src; }

/* --- generated values ------------------------------------------------------------------------------------------- */

static void fill_columns(void *dst, int64_t first, int64_t columns, size_t n)
{
    te_real *d = dst;
    while (n) {
        size_t run = (size_t)(columns - first) < n ? (size_t)(columns - first) : n;
        if (first + (int64_t)run <= INT32_MAX) {
            int32_t start = (int32_t)first;
            _Pragma("omp simd") for (int32_t i = 0; i < (int32_t)run; i++) d[i] = (te_real)(start + i);
        } else {
            for (size_t i = 0; i < run; i++) d[i] = (te_real)(first + (int64_t)i);
        }
        d += run;
        n -= run;
        first = 0;
    }
}

static void repeat_rows(void *dst, const void *src, size_t rows, size_t columns)
{
    te_real       *d = dst;
    const te_real *s = src;
    for (size_t r = 0; r < rows; r++) {
        te_real value = s[r];
        for (size_t j = 0; j < columns; j++) *d++ = value;
    }
}

enum { RANDOM_SPAN = 256 };

/* Words of 4 * groups elements from group `first` on. */
static void random_words(uint32_t *restrict out, te_rng rng, uint64_t first, size_t groups)
{
    uint32_t k0 = (uint32_t)rng.seed, k1 = (uint32_t)(rng.seed >> 32);
    uint32_t s0 = (uint32_t)rng.stream, s1 = (uint32_t)(rng.stream >> 32);
    uint64_t counter = rng.offset + first;
    _Pragma("omp simd") for (size_t g = 0; g < groups; g++)
    {
        te_philox_words words = te_philox((uint32_t)(counter + g), (uint32_t)((counter + g) >> 32), s0, s1, k0, k1);
        out[4 * g] = words.word[0];
        out[4 * g + 1] = words.word[1];
        out[4 * g + 2] = words.word[2];
        out[4 * g + 3] = words.word[3];
    }
}

/* `w` is the word of element 0; elements start at an even one when `odd` is false. */
static void random_values(te_real *d, const te_block_random *random, const uint32_t *w, const te_real *p, bool odd, size_t n)
{
    switch (random->op) {
    case TE_PW_RANDOM:
        TE_EACH d[i] = (te_real)te_rng_uniform(w[i]);
        break;
    case TE_PW_KEEP:
        if (p) {
            for (size_t i = 0; i < n; i++) d[i] = w[i] >= te_rng_threshold((double)p[i]) ? 1 : 0;
        } else {
            uint32_t least = (uint32_t)random->threshold;
            te_real  kept = random->threshold >> 32 ? 0 : 1;
            TE_EACH d[i] = w[i] >= least ? kept : (te_real)0;
        }
        break;
    default:
        for (size_t i = 0; i < n; i++) {
            bool            second = (i & 1u) != odd;
            const uint32_t *pair = w + i - second;
            d[i] = (te_real)te_rng_normal(pair[0], pair[1], second);
        }
    }
}

static void fill_random(void *dst, const te_block_random *random, size_t n)
{
    te_real       *d = dst;
    const te_real *p = random->p;
    uint64_t       first = random->first;
    while (n) {
        uint32_t words[RANDOM_SPAN + 8];
        size_t   skip = (size_t)(first % 4), span = n < RANDOM_SPAN ? n : RANDOM_SPAN;
        random_words(words, random->rng, first / 4, (skip + span + 3) / 4);
        random_values(d, random, words + skip, p, skip % 2 != 0, span);
        d += span;
        p = p ? p + span : NULL;
        first += span;
        n -= span;
    }
}

/* --- reductions ------------------------------------------------------------------------------------------------- */

enum { WIDTH = 16 };
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

/* What is folded: the element, or its product with another block's. */
#define TE_PLAIN(x, y)   (x)
#define TE_PRODUCT(x, y) ((x) * (y))

/* Lane i of v beside lane i + half. */
#define TE_UPPER8(v) __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15)
#define TE_UPPER4(v) __builtin_shufflevector(v, v, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7)
#define TE_UPPER2(v) __builtin_shufflevector(v, v, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3)
#define TE_UPPER1(v) __builtin_shufflevector(v, v, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)

/* add: n elements into the lanes. row: a row by itself. Lanes are joined as a balanced tree, and a row of at most WIDTH
 * elements has the bits it would have with all the lanes, as those beyond its end are neutral. */
#define TE_FOLD(name, JOIN, JOIN1, VALUE)                                                                \
    static inline te_real tree_##name(te_vec h)                                                          \
    {                                                                                                    \
        h = JOIN(h, TE_UPPER8(h));                                                                       \
        h = JOIN(h, TE_UPPER4(h));                                                                       \
        h = JOIN(h, TE_UPPER2(h));                                                                       \
        h = JOIN(h, TE_UPPER1(h));                                                                       \
        return h[0];                                                                                     \
    }                                                                                                    \
    static inline void add_##name(te_real *lane, const te_real *src, const te_real *by, size_t n)        \
    {                                                                                                    \
        te_vec *l = (te_vec *)lane;                                                                      \
        te_vec  h0 = l[0], h1 = l[1], h2 = l[2], h3 = l[3];                                              \
        for (; n >= TE_FOLD_LANES; n -= TE_FOLD_LANES, src += TE_FOLD_LANES, by += TE_FOLD_LANES) {      \
            const te_vec *v = (const te_vec *)src, *u = (const te_vec *)by;                              \
            (void)u;                                                                                     \
            h0 = JOIN(h0, VALUE(v[0], u[0]));                                                            \
            h1 = JOIN(h1, VALUE(v[1], u[1]));                                                            \
            h2 = JOIN(h2, VALUE(v[2], u[2]));                                                            \
            h3 = JOIN(h3, VALUE(v[3], u[3]));                                                            \
        }                                                                                                \
        l[0] = h0, l[1] = h1, l[2] = h2, l[3] = h3;                                                      \
        TE_EACH lane[i] = JOIN1(lane[i], VALUE(src[i], by[i]));                                          \
    }                                                                                                    \
    static inline te_real join_##name(const te_real *lane)                                               \
    {                                                                                                    \
        const te_vec *l = (const te_vec *)lane;                                                          \
        return tree_##name(JOIN(JOIN(l[0], l[2]), JOIN(l[1], l[3])));                                    \
    }                                                                                                    \
    static void rows_##name(te_real *d, const te_real *s, const te_real *by, size_t rows, size_t columns, te_real neutral) \
    {                                                                                                    \
        for (size_t r = 0; r < rows; r++, s += columns, by += columns) {                                 \
            te_real lane[TE_FOLD_LANES];                                                                 \
            if (columns <= WIDTH) {                                                                      \
                _Pragma("omp simd") for (size_t i = 0; i < WIDTH; i++)                                   \
                    lane[i] = i < columns ? JOIN1(neutral, VALUE(s[i], by[i])) : neutral;                \
                d[r] = tree_##name(*(const te_vec *)lane);                                               \
            } else {                                                                                     \
                for (int i = 0; i < TE_FOLD_LANES; i++) lane[i] = neutral;                               \
                add_##name(lane, s, by, columns);                                                        \
                d[r] = join_##name(lane);                                                                \
            }                                                                                            \
        }                                                                                                \
    }

TE_FOLD(sum, TE_JOIN_SUM, TE_JOIN1_SUM, TE_PLAIN)
TE_FOLD(dot, TE_JOIN_SUM, TE_JOIN1_SUM, TE_PRODUCT)
TE_FOLD(max, TE_JOIN_MAX, TE_JOIN1_MAX, TE_PLAIN)
TE_FOLD(min, TE_JOIN_MIN, TE_JOIN1_MIN, TE_PLAIN)
TE_FOLD(amax, TE_JOIN_AMAX, TE_JOIN1_AMAX, TE_PLAIN)

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

static void fold_add(te_fold *fold, te_fold_kind kind, const void *src, const void *by, size_t n)
{
    te_real *lane = (te_real *)fold->lane;
    switch (kind) {
    case TE_FOLD_SUM:
        if (by) add_dot(lane, src, by, n);
        else add_sum(lane, src, src, n);
        break;
    case TE_FOLD_MAX: add_max(lane, src, src, n); return;
    case TE_FOLD_MIN: add_min(lane, src, src, n); return;
    case TE_FOLD_AMAX: add_amax(lane, src, src, n); return;
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

static void fold_rows(te_fold_kind kind, void *dst, const void *src, const void *by, size_t rows, size_t columns)
{
    te_real neutral = neutral_of(kind);
    switch (kind) {
    case TE_FOLD_SUM:
        if (by) rows_dot(dst, src, by, rows, columns, neutral);
        else rows_sum(dst, src, src, rows, columns, neutral);
        break;
    case TE_FOLD_MAX: rows_max(dst, src, src, rows, columns, neutral); break;
    case TE_FOLD_MIN: rows_min(dst, src, src, rows, columns, neutral); break;
    case TE_FOLD_AMAX: rows_amax(dst, src, src, rows, columns, neutral); break;
    }
}

static void fold_columns(void *sums, const void *src, const void *by, size_t rows, size_t columns)
{
    te_real       *d = sums;
    const te_real *s = src, *u = by;
    for (size_t r = 0; r < rows; r++, s += columns) {
        if (by) {
            _Pragma("omp simd") for (size_t j = 0; j < columns; j++) d[j] += s[j] * u[j];
            u += columns;
        } else {
            _Pragma("omp simd") for (size_t j = 0; j < columns; j++) d[j] += s[j];
        }
    }
}

/* --- the table -------------------------------------------------------------------------------------------------- */

#define TE_ROW1(NAME, name) [TE_PW_##NAME] = {op_##name}
#define TE_ROW2(NAME, name) [TE_PW_##NAME] = {op_##name##_0, op_##name##_1, op_##name##_2}

#define TE_ROW_PAIR(FIRST, SECOND, name)                                                       \
    [TE_BLOCK_PAIRS + TE_FIRST_##FIRST * TE_SECOND_COUNT + TE_SECOND_##SECOND] = {             \
        op_##name##_0, op_##name##_1, op_##name##_2, NULL, op_##name##_4, op_##name##_5, op_##name##_6}

const te_blocks TE_BLOCKS_TABLE = {
    .size = sizeof(te_real),
    .op = {TE_ROW1(NEG, neg), TE_ROW1(ABS, abs), TE_ROW1(SIGN, sign), TE_ROW1(FLOOR, floor), TE_ROW1(CEIL, ceil),
           TE_ROW1(ROUND, round), TE_ROW1(TRUNC, trunc), TE_ROW1(SQRT, sqrt), TE_ROW1(RSQRT, rsqrt),
           TE_ROW1(RECIP, recip), TE_ROW1(EXP, exp), TE_ROW1(LOG, log), TE_ROW1(SIN, sin), TE_ROW1(COS, cos),
           TE_ROW1(TANH, tanh), TE_ROW1(SIGMOID, sigmoid), TE_ROW1(ERF, erf), TE_ROW1(ISNAN, isnan),
           TE_ROW1(ISFINITE, isfinite), TE_ROW1(TO_BF16, to_bf16), TE_ROW1(TO_F16, to_f16), TE_ROW1(TO_F32, to_f32),
           TE_ROW2(ADD, add), TE_ROW2(SUB, sub), TE_ROW2(MUL, mul), TE_ROW2(DIV, div), TE_ROW2(POW, pow),
           TE_ROW2(MIN, min), TE_ROW2(MAX, max), TE_ROW2(LT, lt), TE_ROW2(LE, le), TE_ROW2(EQ, eq), TE_ROW2(NE, ne),
           [TE_PW_WHERE] = {op_where_0, op_where_1, op_where_2, op_where_3, op_where_4, op_where_5, op_where_6},
           TE_ROW_PAIR(ADD, ADD, add_add), TE_ROW_PAIR(ADD, SUB, add_sub), TE_ROW_PAIR(ADD, FROM, add_from),
           TE_ROW_PAIR(ADD, MUL, add_mul), TE_ROW_PAIR(SUB, ADD, sub_add), TE_ROW_PAIR(SUB, SUB, sub_sub),
           TE_ROW_PAIR(SUB, FROM, sub_from), TE_ROW_PAIR(SUB, MUL, sub_mul), TE_ROW_PAIR(MUL, ADD, mul_add),
           TE_ROW_PAIR(MUL, SUB, mul_sub), TE_ROW_PAIR(MUL, FROM, mul_from), TE_ROW_PAIR(MUL, MUL, mul_mul)},
    .load = {[TE_F32] = load_f32, [TE_BF16] = load_bf16, [TE_F16] = load_f16, [TE_F64] = load_f64, [TE_I64] = load_i64,
             [TE_I32] = load_i32, [TE_U8] = load_u8, [TE_BOOL] = load_bool, [TE_F8E4M3] = load_f8e4m3,
             [TE_F8E5M2] = load_f8e5m2},
    .store = {[TE_F32] = store_f32, [TE_BF16] = store_bf16, [TE_F16] = store_f16, [TE_F64] = store_f64,
              [TE_I64] = store_i64, [TE_I32] = store_i32, [TE_U8] = store_u8, [TE_BOOL] = store_bool,
              [TE_F8E4M3] = store_f8e4m3, [TE_F8E5M2] = store_f8e5m2},
    .set = set_value,
    .get = get_value,
    .column = fill_columns,
    .random = fill_random,
    .repeat = repeat_rows,
    .fold_start = fold_start,
    .fold_add = fold_add,
    .fold_finish = fold_finish,
    .fold_rows = fold_rows,
    .fold_columns = fold_columns,
};
