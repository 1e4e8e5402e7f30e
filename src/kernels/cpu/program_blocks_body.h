/* program_blocks_body.h - the loops behind a te_blocks table, for the value type te_real. Included once by a file that
 * defines te_real, TE_REAL_IS_F32, TE_BLOCKS_TABLE (the table's name) and TE_REAL_FN(name), the elementary functions.
 *
 * Operations, loads and stores are here, the rest in program_blocks_random.h, program_blocks_fold.h
 * and program_blocks_columns.h.
 *
 * Every loop is written so that GCC and clang vectorize it: no calls that are not inlined, selections instead of
 * branches, lengths of any size. `omp simd` states that iterations are independent, which holds with dst equal to an
 * argument.
 */
#include "../elementary.h"
#include "program_blocks.h"

#include <string.h>

#define TE_EACH _Pragma("omp simd") for (size_t i = 0; i < n; i++)
#define TE_ONE  static inline __attribute__((always_inline)) te_real

/* --- operations ------------------------------------------------------------------------------------------------- */

/* one_name is the operation on an element, op_name on a block. */
#define TE_UNARY(name, expression)                                                                   \
    TE_ONE one_##name(te_real x) { return expression; }                                              \
    static void op_##name(void *dst, const void *pa, const void *pb, const void *pc, size_t n)       \
    {                                                                                                \
        te_real       *d = dst;                                                                      \
        const te_real *a = pa;                                                                       \
        (void)pb, (void)pc;                                                                          \
        TE_EACH d[i] = one_##name(a[i]);                                                             \
    }

/* One function per set of arguments that are single numbers. */
#define TE_NUMBER(x, p) te_real x = *p;

#define TE_BINARY_VARIANT(name, suffix, numbers, x, y)                                                      \
    static void op_##name##_##suffix(void *dst, const void *pa, const void *pb, const void *pc, size_t n)   \
    {                                                                                                       \
        te_real       *d = dst;                                                                             \
        const te_real *a = pa, *b = pb;                                                                     \
        (void)pc;                                                                                           \
        numbers                                                                                             \
        TE_EACH d[i] = one_##name(x, y);                                                                    \
    }

#define TE_BINARY(name, expression)                                               \
    TE_ONE one_##name(te_real x, te_real y) { return expression; }                \
    TE_BINARY_VARIANT(name, 0, , a[i], b[i])                                      \
    TE_BINARY_VARIANT(name, 1, TE_NUMBER(a0, a), a0, b[i])                        \
    TE_BINARY_VARIANT(name, 2, TE_NUMBER(b0, b), a[i], b0)

TE_ONE one_where(te_real x, te_real y, te_real z) { return x != 0 ? y : z; }

#define TE_WHERE_VARIANT(suffix, numbers, x, y, z)                                                     \
    static void op_where_##suffix(void *dst, const void *pa, const void *pb, const void *pc, size_t n) \
    {                                                                                                  \
        te_real       *d = dst;                                                                        \
        const te_real *a = pa, *b = pb, *c = pc;                                                       \
        numbers                                                                                        \
        TE_EACH d[i] = one_where(x, y, z);                                                             \
    }

#include "../program_values.h"

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
static void op_pow_0(void *dst, const void *pa, const void *pb, const void *pc, size_t n)
{
    float       *d = dst;
    const float *a = pa, *b = pb;
    uint32_t     plain = 0;
    (void)pc;
    _Pragma("omp simd reduction(| : plain)") for (size_t i = 0; i < n; i++) plain |= te_pow_is_plain(b[i]) ? 1u : 0u;
    if (plain) {
        TE_EACH d[i] = te_pow(a[i], b[i]);
    } else {
        TE_EACH d[i] = te_pow_by_log(a[i], te_exponent_of(b[i]));
    }
}

/* With the bits of te_pow; the exponents that are met most have loops of their own. */
static void op_pow_2(void *dst, const void *pa, const void *pb, const void *pc, size_t n)
{
    float       *d = dst, b = *(const float *)pb;
    const float *a = pa;
    te_exponent  e = te_exponent_of(b);
    uint32_t     whole = te_f32_bits(te_abs(b) + TE_ROUND_MAGIC);
    (void)pc;
    if (!te_pow_is_plain(b)) {
        TE_EACH d[i] = te_pow_by_log(a[i], e);
    } else if (b == 2.0f) {
        TE_EACH d[i] = a[i] * a[i];
    } else if (b == 3.0f) {
        TE_EACH d[i] = (float)te_pow_small((double)a[i], 3);
    } else if (b == 0.5f) {
        TE_EACH d[i] = te_pow_half(a[i]);
    } else if (b == -0.5f) {
        TE_EACH d[i] = 1.0f / te_pow_half(a[i]);
    } else if (b < 0.0f) {
        TE_EACH d[i] = (float)(1.0 / te_pow_small((double)a[i], whole));
    } else {
        TE_EACH d[i] = (float)te_pow_small((double)a[i], whole);
    }
}
#else
TE_ONE one_pow(te_real x, te_real y) { return TE_REAL_FN(pow)(x, y); }
TE_BINARY_VARIANT(pow, 0, , a[i], b[i])

/* Exponents of few instructions have loops of their own. */
static void op_pow_2(void *dst, const void *pa, const void *pb, const void *pc, size_t n)
{
    te_real       *d = dst, b = *(const te_real *)pb;
    const te_real *a = pa;
    (void)pc;
    if (b == 2) {
        TE_EACH d[i] = one_pow(a[i], 2);
    } else if (b == 3) {
        TE_EACH d[i] = one_pow(a[i], 3);
    } else if (b == (te_real)0.5) {
        TE_EACH d[i] = one_pow(a[i], (te_real)0.5);
    } else {
        for (size_t i = 0; i < n; i++) d[i] = one_pow(a[i], b);
    }
}
#endif

/* A number to the power of many: spread, since exponents are looked at first. */
static void op_pow_1(void *dst, const void *pa, const void *pb, const void *pc, size_t n)
{
    enum { SPAN = 256 };
    te_real number[SPAN], *d = dst;
    for (int i = 0; i < SPAN; i++) number[i] = *(const te_real *)pa;
    for (size_t i = 0; i < n; i += SPAN)
        op_pow_0(d + i, number, (const te_real *)pb + i, pc, n - i < SPAN ? n - i : SPAN);
}

/* Angles too large for the loop without branches are looked for first: dst may be where they are. */
static void turn(te_real *d, const te_real *a, size_t n, uint32_t quarters)
{
    uint32_t huge = 0;
    _Pragma("omp simd reduction(| : huge)")
    for (size_t i = 0; i < n; i++) huge |= TE_REAL_FN(angle_is_huge)(a[i]) ? 1u : 0u;
    if (huge) {
        for (size_t i = 0; i < n; i++) d[i] = TE_REAL_FN(sin_turned)(a[i], quarters);
        return;
    }
    TE_EACH d[i] = TE_REAL_FN(sin_bounded)(a[i], quarters);
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

/* --- loads and stores ------------------------------------------------------------------------------------------- */

#define TE_LOAD(function, type, from)                                                          \
    static void function(void *dst, const void *src, int64_t stride, size_t n)                 \
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
    }

#define TE_LOAD_STORE(name, type, from, to)                                                    \
    TE_LOAD(load_##name, type, from)                                                           \
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
#if TE_REAL_IS_F32
TE_LOAD_STORE(f16_each, uint16_t, te_f16_to_f32, TE_REAL_FN(to_f16))
#else
TE_LOAD_STORE(f16, uint16_t, te_f16_to_f32, TE_REAL_FN(to_f16))
#endif
TE_LOAD_STORE(f8e4m3, uint8_t, te_f8e4m3_to_f32, TE_REAL_FN(to_f8e4m3))
TE_LOAD_STORE(f8e5m2, uint8_t, te_f8e5m2_to_f32, TE_REAL_FN(to_f8e5m2))
#if TE_REAL_IS_F32
TE_LOAD(load_i64, int64_t, TE_SAME)

/* Values of 32 bits take a conversion that every processor has for vectors. */
static void store_i64(void *dst, int64_t stride, const void *src, size_t n)
{
    int64_t     *d = dst;
    const float *s = src;
    int32_t      inside = 1;
    if (stride == 1) {
        _Pragma("omp simd reduction(& : inside)")
        for (size_t i = 0; i < n; i++) inside &= (s[i] > -0x1p31f) & (s[i] < 0x1p31f);
    }
    if (stride == 1 && inside) {
        TE_EACH d[i] = (int32_t)s[i];
    } else {
        for (size_t i = 0; i < n; i++) d[(int64_t)i * stride] = TE_REAL_FN(to_i64)(s[i]);
    }
}

#define TE_LOAD_SMALL(name, type, bits_type)                                                        \
    static bool load_small_##name(float *d, const type *s, int64_t stride, size_t n, int bits)      \
    {                                                                                               \
        bits_type large = 0, half = (bits_type)1 << bits;                                           \
        if (stride == 1) {                                                                          \
            _Pragma("omp simd reduction(| : large)")                                                \
            for (size_t i = 0; i < n; i++) large |= (bits_type)s[i] + half, d[i] = (float)(int32_t)s[i]; \
        } else {                                                                                    \
            for (size_t i = 0; i < n; i++) {                                                        \
                type v = s[(int64_t)i * stride];                                                    \
                large |= (bits_type)v + half;                                                       \
                d[i] = (float)(int32_t)v;                                                           \
            }                                                                                       \
        }                                                                                           \
        return large >> (bits + 1) == 0;                                                            \
    }

TE_LOAD_SMALL(i64, int64_t, uint64_t)
TE_LOAD_SMALL(i32, int32_t, uint32_t)

static bool load_small(void *dst, const void *src, te_dtype dtype, int64_t stride, size_t n, int bits)
{
    return dtype == TE_I64 ? load_small_i64(dst, src, stride, n, bits) : load_small_i32(dst, src, stride, n, bits);
}
#else
#include "program_blocks_whole.h"
#endif
TE_LOAD_STORE(i32, int32_t, TE_SAME, TE_REAL_FN(to_i32))
TE_LOAD_STORE(u8, uint8_t, TE_SAME, TE_REAL_FN(to_u8))
TE_LOAD_STORE(bool, uint8_t, TE_FROM_BOOL, TE_TO_BOOL)

#if TE_REAL_IS_F32
static void load_f16(void *dst, const void *src, int64_t stride, size_t n)
{
    size_t done = stride == 1 ? te_widen_halves(dst, src, n) : 0;
    load_f16_each((te_real *)dst + done, (const uint16_t *)src + done, stride, n - done);
}

static void store_f16(void *dst, int64_t stride, const void *src, size_t n)
{
    size_t done = stride == 1 ? te_narrow_to_halves(dst, src, n) : 0;
    store_f16_each((uint16_t *)dst + done, stride, (const te_real *)src + done, n - done);
}
#endif

static void   set_value(void *dst, double value) { *(te_real *)dst = (te_real)value; }
static double get_value(const void *src) { return (double)*(const te_real *)src; }

#include "program_blocks_fold.h"
#include "program_blocks_columns.h"
#include "program_blocks_random.h"
#if TE_REAL_IS_F32
#include "program_chain_links.h"
#endif

/* --- the table -------------------------------------------------------------------------------------------------- */

#define TE_ROW1(NAME, name) [TE_PW_##NAME] = {op_##name}
#define TE_ROW2(NAME, name) [TE_PW_##NAME] = {op_##name##_0, op_##name##_1, op_##name##_2}

#define TE_ROW_PAIR(FIRST, SECOND, name)                                                       \
    [TE_BLOCK_PAIRS + TE_FIRST_##FIRST * TE_SECOND_COUNT + TE_SECOND_##SECOND] = {             \
        op_##name##_0, op_##name##_1, op_##name##_2, NULL, op_##name##_4, op_##name##_5, op_##name##_6}

#if !TE_REAL_IS_F32
#define TE_STORE_BF16 store_bf16
#include "program_blocks_table.h"
#else
#define TE_STORE_BF16 store_flat_bf16
#define TE_CHAIN      run_chain
#include "program_blocks_table.h"
#ifdef TE_ROUNDS_PAIRS
#undef TE_BLOCKS_TABLE
#undef TE_STORE_BF16
#undef TE_CHAIN
#define TE_BLOCKS_TABLE te_program_blocks_avx512bf16
#define TE_STORE_BF16   store_flat_bf16_pairs
#define TE_CHAIN        run_chain_pairs
#include "program_blocks_table.h"
#endif
#endif
