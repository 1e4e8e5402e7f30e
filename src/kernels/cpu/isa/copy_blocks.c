/* copy_blocks.c - loaders, storers, moves and tile transposes of copy.h, once per instruction set. */
#include "kernels/cpu/copy.h"
#include "kernels/cpu/transpose.h"

#include "few.h"
#include "halves.h"
#include "interleave.h"
#ifdef __SSE2__
#include <immintrin.h>
#endif
#include "kernels/dtype.h"

/* --- between elements and values -------------------------------------------------------------------------------- */

/* Stride 1 apart from the others, so that the loop people mostly run is a vector loop. */
#define DEFINE_LOAD(name, element, value, convert)                                     \
    static void load_##name(void *values, const void *src, int64_t stride, int64_t n) \
    {                                                                                  \
        value *restrict v = values;                                                    \
        const element *restrict s = src;                                               \
        if (stride == 1)                                                               \
            for (int64_t i = 0; i < n; i++) v[i] = convert(s[i]);                      \
        else                                                                           \
            for (int64_t i = 0; i < n; i++) v[i] = convert(s[i * stride]);             \
    }

#define DEFINE_STORE(name, element, value, convert)                                                               \
    static void store_##name(void *dst, int64_t stride, const void *values, int64_t value_stride, int64_t n)     \
    {                                                                                                             \
        element *restrict d = dst;                                                                                \
        const value *restrict v = values;                                                                         \
        if (stride == 1 && value_stride == 1)                                                                     \
            for (int64_t i = 0; i < n; i++) d[i] = convert(v[i]);                                                 \
        else                                                                                                      \
            for (int64_t i = 0; i < n; i++) d[i * stride] = convert(v[i * value_stride]);                         \
    }

#define SAME(x)      (x)
#define TO_FLOAT(x)  ((float)(x))
#define TO_DOUBLE(x) ((double)(x))
#define TO_INT64(x)  ((int64_t)(x))
#define NOT_ZERO(x)  ((uint8_t)((x) != 0))
#define INT_TO_I32(x) ((int32_t)((x) > INT32_MAX ? INT32_MAX : (x) < INT32_MIN ? INT32_MIN : (x)))
#define INT_TO_U8(x)  ((uint8_t)((x) > UINT8_MAX ? UINT8_MAX : (x) < 0 ? 0 : (x)))
#define INT_TO_BF16(x) te_f64_to_bf16((double)(x))
#define INT_TO_F16(x)  te_f64_to_f16((double)(x))
#define INT_TO_E4M3(x) te_f64_to_f8e4m3((double)(x))
#define INT_TO_E5M2(x) te_f64_to_f8e5m2((double)(x))

DEFINE_LOAD(f32, float, float, SAME)
DEFINE_LOAD(bf16, uint16_t, float, te_bf16_to_f32)
DEFINE_LOAD(f16_each, uint16_t, float, te_widen_half)
DEFINE_LOAD(e4m3, uint8_t, float, te_f8e4m3_to_f32)
DEFINE_LOAD(e5m2, uint8_t, float, te_f8e5m2_to_f32)
DEFINE_LOAD(f64, double, double, SAME)
DEFINE_LOAD(i64, int64_t, int64_t, SAME)
DEFINE_LOAD(i32, int32_t, int64_t, TO_INT64)
DEFINE_LOAD(u8, uint8_t, int64_t, TO_INT64)

DEFINE_STORE(f32_f32, float, float, SAME)
DEFINE_STORE(f32_bf16, uint16_t, float, te_f32_to_bf16)
DEFINE_STORE(f32_f16_each, uint16_t, float, te_narrow_half)
DEFINE_STORE(f32_f64, double, float, TO_DOUBLE)
DEFINE_STORE(f32_i64, int64_t, float, te_f32_to_i64)
DEFINE_STORE(f32_i32, int32_t, float, te_f32_to_i32)
DEFINE_STORE(f32_u8, uint8_t, float, te_f32_to_u8)
DEFINE_STORE(f32_bool, uint8_t, float, NOT_ZERO)
DEFINE_STORE(f32_e4m3, uint8_t, float, te_f32_to_f8e4m3)
DEFINE_STORE(f32_e5m2, uint8_t, float, te_f32_to_f8e5m2)

DEFINE_STORE(f64_f32, float, double, TO_FLOAT)
DEFINE_STORE(f64_bf16, uint16_t, double, te_f64_to_bf16)
DEFINE_STORE(f64_f16, uint16_t, double, te_f64_to_f16)
DEFINE_STORE(f64_f64, double, double, SAME)
DEFINE_STORE(f64_i64, int64_t, double, te_f64_to_i64)
DEFINE_STORE(f64_i32, int32_t, double, te_f64_to_i32)
DEFINE_STORE(f64_u8, uint8_t, double, te_f64_to_u8)
DEFINE_STORE(f64_bool, uint8_t, double, NOT_ZERO)
DEFINE_STORE(f64_e4m3, uint8_t, double, te_f64_to_f8e4m3)
DEFINE_STORE(f64_e5m2, uint8_t, double, te_f64_to_f8e5m2)

DEFINE_STORE(i64_f32, float, int64_t, TO_FLOAT)
DEFINE_STORE(i64_bf16, uint16_t, int64_t, INT_TO_BF16)
DEFINE_STORE(i64_f16, uint16_t, int64_t, INT_TO_F16)
DEFINE_STORE(i64_f64, double, int64_t, TO_DOUBLE)
DEFINE_STORE(i64_i64, int64_t, int64_t, SAME)
DEFINE_STORE(i64_i32, int32_t, int64_t, INT_TO_I32)
DEFINE_STORE(i64_u8, uint8_t, int64_t, INT_TO_U8)
DEFINE_STORE(i64_bool, uint8_t, int64_t, NOT_ZERO)
DEFINE_STORE(i64_e4m3, uint8_t, int64_t, INT_TO_E4M3)
DEFINE_STORE(i64_e5m2, uint8_t, int64_t, INT_TO_E5M2)

static void load_f16(void *values, const void *src, int64_t stride, int64_t n)
{
    int64_t done = stride == 1 ? (int64_t)te_widen_halves(values, src, (size_t)n) : 0;
    load_f16_each((float *)values + done, (const uint16_t *)src + done, stride, n - done);
}

static void store_f32_f16(void *dst, int64_t stride, const void *values, int64_t value_stride, int64_t n)
{
    int64_t done = stride == 1 && value_stride == 1 ? (int64_t)te_narrow_to_halves(dst, values, (size_t)n) : 0;
    store_f32_f16_each((uint16_t *)dst + done, stride, (const float *)values + done, value_stride, n - done);
}

#define STORES(class)                                                                                                  \
    {                                                                                                                  \
        [TE_F32] = store_##class##_f32, [TE_BF16] = store_##class##_bf16, [TE_F16] = store_##class##_f16,              \
        [TE_F64] = store_##class##_f64, [TE_I64] = store_##class##_i64, [TE_I32] = store_##class##_i32,                \
        [TE_U8] = store_##class##_u8, [TE_BOOL] = store_##class##_bool, [TE_F8E4M3] = store_##class##_e4m3,            \
        [TE_F8E5M2] = store_##class##_e5m2                                                                             \
    }

/* --- bits unchanged --------------------------------------------------------------------------------------------- */

/* Numbers that fill a line. */
typedef union line {
    uint8_t  of_uint8_t[64];
    uint16_t of_uint16_t[32];
    uint32_t of_uint32_t[16];
    uint64_t of_uint64_t[8];
    char     bytes[64];
} line;

/* At least `least` bytes of it, and up to twice as many, the last ones from where they end. */
#define FILL_FROM(least)                                            \
    if (bytes >= (least)) {                                         \
        memcpy(dst, l->bytes, (least));                             \
        memcpy(dst + bytes - (least), l->bytes, (least));           \
        return;                                                     \
    }

static __attribute__((noinline)) void fill_run(char *dst, const line *l, size_t bytes)
{
    for (; bytes > 2 * sizeof *l; bytes -= sizeof *l, dst += sizeof *l) memcpy(dst, l->bytes, sizeof *l);
    FILL_FROM(64)
    FILL_FROM(32)
    FILL_FROM(16)
    FILL_FROM(8)
    FILL_FROM(4)
    for (size_t i = 0; i < bytes; i++) dst[i] = l->bytes[i];
}

#define FILL_LINE(type) \
    for (size_t k = 0; k < 64 / sizeof(type); k++) l.of_##type[k] = *(const type *)s

static void fill_runs(void *dst, int64_t dst_step, const void *src, int64_t src_step, size_t size, int64_t n,
                      int64_t runs)
{
    char       *d = dst;
    const char *s = src;
    for (; runs > 0; runs--, d += dst_step * (int64_t)size, s += src_step * (int64_t)size) {
        line l;
        if (size == 1) FILL_LINE(uint8_t);
        else if (size == 2) FILL_LINE(uint16_t);
        else if (size == 4) FILL_LINE(uint32_t);
        else FILL_LINE(uint64_t);
        fill_run(d, &l, (size_t)n * size);
    }
}

#define DEFINE_MOVE(type)                                                                                              \
    static void reverse_##type(type *restrict d, const type *restrict s, int64_t n)                                    \
    {                                                                                                                  \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) d[i] = s[-i];                                              \
    }                                                                                                                  \
    static void move_##type(void *dst, int64_t dst_stride, const void *src, int64_t src_stride, int64_t n)             \
    {                                                                                                                  \
        type *restrict d = dst;                                                                                        \
        const type *restrict s = src;                                                                                  \
        if (dst_stride == 1 && src_stride == 1)                                                                        \
            memcpy(d, s, (size_t)n * sizeof(type));                                                                    \
        else if (dst_stride == 1 && src_stride == 0)                                                                   \
            fill_runs(d, 0, s, 0, sizeof(type), n, 1);                                                                 \
        else if (dst_stride == 1 && src_stride == -1)                                                                  \
            reverse_##type(d, s, n);                                                                                   \
        else                                                                                                           \
            for (int64_t i = 0; i < n; i++) d[i * dst_stride] = s[i * src_stride];                                     \
    }

DEFINE_MOVE(uint8_t)
DEFINE_MOVE(uint16_t)
DEFINE_MOVE(uint32_t)
DEFINE_MOVE(uint64_t)

typedef uint32_t four_numbers __attribute__((vector_size(16), may_alias));
typedef uint16_t eight_halves __attribute__((vector_size(16), may_alias));
typedef uint8_t sixteen_bytes __attribute__((vector_size(16), may_alias));
#define LOW_FOUR(a, b)    __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define HIGH_FOUR(a, b)   __builtin_shufflevector(a, b, 2, 6, 3, 7)
#define LOW_HALVES(a, b)  __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH_HALVES(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define LOW_BYTES(a, b)   __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH_BYTES(a, b)  __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)

/* A transpose element by element; strides are in bytes. */
static __attribute__((noinline)) void turn_each(char *d, int64_t dst_stride, const char *s, int64_t src_stride,
                                                size_t size, int64_t rows, int64_t cols)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            char       *to = d + r * dst_stride + c * (int64_t)size;
            const char *from = s + c * src_stride + r * (int64_t)size;
            if (size == 4) memcpy(to, from, 4);
            else if (size == 2) memcpy(to, from, 2);
            else if (size == 8) memcpy(to, from, 8);
            else *to = *from;
        }
}

/* Small squares, N x N, in registers; the edges of a matrix by such, the last of which begin early enough to be whole.
 * Where the destination's lines are shorter than a square and follow one another, each overwrites what the one before
 * wrote too far, up to the last ones. */
#define DEFINE_EDGE(type, vector, N, LOW, HIGH, INLINE)                                                                \
    TE_DEFINE_INTERLEAVE(interleave_##type, vector, N, LOW, HIGH)                                                      \
    INLINE void small_##type(type *d, int64_t dst_stride, const type *s, int64_t src_stride)                           \
    {                                                                                                                  \
        vector a[N];                                                                                                   \
        _Pragma("GCC unroll 16") for (int k = 0; k < N; k++) memcpy(&a[k], s + k * src_stride, sizeof a[k]);           \
        interleave_##type(a);                                                                                          \
        _Pragma("GCC unroll 16") for (int k = 0; k < N; k++) memcpy(d + k * dst_stride, &a[k], sizeof a[k]);           \
    }                                                                                                                  \
    static __attribute__((noinline)) void edge_##type(type *d, int64_t dst_stride, const type *s, int64_t src_stride,  \
                                                      int64_t rows, int64_t cols)                                      \
    {                                                                                                                  \
        bool    narrow = cols < N, squares = rows >= N && (!narrow || dst_stride == cols);                             \
        int64_t r = 0;                                                                                                 \
        type    room[N * N] = {0};                                                                                     \
        for (; squares && r < rows && (!narrow || (r + N - 1) * cols + N <= rows * cols); r += N) {                    \
            int64_t row = narrow || r + N <= rows ? r : rows - N;                                                      \
            for (int64_t c = 0; c < cols; c += N) {                                                                    \
                int64_t     col = narrow || c + N <= cols ? c : cols - N, step = narrow ? N : src_stride;              \
                const type *from = s + col * src_stride + row;                                                         \
                for (int64_t k = 0; narrow && k < cols; k++)                                                           \
                    memcpy(room + k * N, from + k * src_stride, N * sizeof *s);                                        \
                small_##type(d + row * dst_stride + col, dst_stride, narrow ? room : from, step);                      \
            }                                                                                                          \
        }                                                                                                              \
        if (r < rows)                                                                                                  \
            turn_each((char *)(d + r * dst_stride), dst_stride * (int64_t)sizeof *d, (const char *)(s + r),            \
                      src_stride * (int64_t)sizeof *s, sizeof *s, rows - r, cols);                                     \
    }

#define TE_ONCE static inline __attribute__((always_inline))
#define TE_SHARED static __attribute__((noinline))
#ifdef __AVX2__
typedef uint64_t words __attribute__((vector_size(32), may_alias));
DEFINE_EDGE(uint64_t, words, 4, LOW_FOUR, HIGH_FOUR, TE_ONCE)
#else
typedef uint64_t words __attribute__((vector_size(16), may_alias));
#define LOW_WORDS(a, b)  __builtin_shufflevector(a, b, 0, 2)
#define HIGH_WORDS(a, b) __builtin_shufflevector(a, b, 1, 3)
DEFINE_EDGE(uint64_t, words, 2, LOW_WORDS, HIGH_WORDS, TE_ONCE)
#endif
DEFINE_EDGE(uint32_t, four_numbers, 4, LOW_FOUR, HIGH_FOUR, TE_ONCE)
DEFINE_EDGE(uint16_t, eight_halves, 8, LOW_HALVES, HIGH_HALVES, TE_SHARED)
DEFINE_EDGE(uint8_t, sixteen_bytes, 16, LOW_BYTES, HIGH_BYTES, TE_SHARED)

/* A transpose goes by squares with the side of one cache line, so that each line of either side is moved once. Where
 * turning needs the vectors whole, a square is read into a small one, turned there, and written from a second one; then
 * lines of rows that are a large power of two apart cannot throw each other out of the cache. */
#define DEFINE_TRANSPOSE(type, SQUARE)                                                                                 \
    static void transpose_##type(void *dst, int64_t dst_stride, const void *src, int64_t src_stride, int64_t rows,     \
                                 int64_t cols)                                                                         \
    {                                                                                                                  \
        enum { SIDE = 64 / sizeof(type) };                                                                             \
        type *restrict d = dst;                                                                                        \
        const type *restrict s = src;                                                                                  \
        int64_t full_rows = rows - rows % SIDE, full_cols = cols - cols % SIDE;                                        \
        if (full_cols == 0) full_rows = 0;                                                                             \
        for (int64_t r = 0; r < full_rows; r += SIDE)                                                                  \
            for (int64_t c = 0; c < full_cols; c += SIDE)                                                              \
                SQUARE(type, d + r * dst_stride + c, dst_stride, s + c * src_stride + r, src_stride)                   \
        if (full_rows && full_cols < cols)                                                                             \
            edge_##type(d + full_cols, dst_stride, s + full_cols * src_stride, src_stride, full_rows,                  \
                        cols - full_cols);                                                                             \
        if (full_rows < rows)                                                                                          \
            edge_##type(d + full_rows * dst_stride, dst_stride, s + full_rows, src_stride, rows - full_rows, cols);    \
    }

#define EDGE_SQUARE(type, d, dst_stride, s, src_stride) edge_##type(d, dst_stride, s, src_stride, SIDE, SIDE);

#define STAGED_SQUARE(type, d, dst_stride, s, src_stride)                                            \
    {                                                                                                \
        _Alignas(64) type in[SIDE * SIDE], out[SIDE * SIDE];                                         \
        for (int i = 0; i < SIDE; i++) memcpy(in + i * SIDE, (s) + i * (src_stride), 64);            \
        turn_##type(out, in);                                                                        \
        for (int i = 0; i < SIDE; i++) memcpy((d) + i * (dst_stride), out + i * SIDE, 64);           \
    }

static inline void turn_uint32_t(uint32_t *restrict out, const uint32_t *restrict in)
{
    for (int i = 0; i < 16; i += TE_TRANSPOSE)
        for (int j = 0; j < 16; j += TE_TRANSPOSE)
            te_transpose_block((float *)out + i * 16 + j, 16, (const float *)in + j * 16 + i, 16);
}

#define DEFINE_TURN(type, N)                                                                                           \
    static inline void turn_##type(type *restrict out, const type *restrict in)                                        \
    {                                                                                                                  \
        enum { SIDE = 64 / sizeof(type) };                                                                             \
        for (int i = 0; i < SIDE; i += N)                                                                              \
            for (int j = 0; j < SIDE; j += N) small_##type(out + i * SIDE + j, SIDE, in + j * SIDE + i, SIDE);      \
    }

DEFINE_TURN(uint16_t, 8)
DEFINE_TURN(uint8_t, 16)

DEFINE_TRANSPOSE(uint8_t, STAGED_SQUARE)
DEFINE_TRANSPOSE(uint16_t, STAGED_SQUARE)
DEFINE_TRANSPOSE(uint32_t, STAGED_SQUARE)
DEFINE_TRANSPOSE(uint64_t, EDGE_SQUARE)

/* --- past the caches ---------------------------------------------------------------------------------------------- */

static void stream_lines(void *dst, const void *src, size_t lines)
{
#if defined(TE_ISA_avx512)
    for (size_t i = 0; i < lines; i++)
        _mm512_stream_si512((__m512i *)dst + i, _mm512_loadu_si512((const __m512i *)src + i));
#elif defined(__SSE2__)
    for (size_t i = 0; i < 4 * lines; i++)
        _mm_stream_si128((__m128i *)dst + i, _mm_loadu_si128((const __m128i *)src + i));
#else
    memcpy(dst, src, 64 * lines);
#endif
}

static void settle_lines(void)
{
#ifdef __SSE2__
    _mm_sfence();
#endif
}

/* --- whole numbers joined --------------------------------------------------------------------------------------- */

static uint64_t join_whole(te_whole_join join, int64_t *to, const int64_t *from, uint64_t half, int64_t n)
{
    uint64_t bits = 0;
    int64_t  flip = join == TE_WHOLE_MIN ? -1 : 0; /* the smallest is the largest of all bits turned */
    if (join == TE_WHOLE_SUM) {
        _Pragma("omp simd reduction(| : bits)") for (int64_t i = 0; i < n; i++)
        {
            uint64_t v = (uint64_t)from[i];
            bits |= v + half;
            to[i] = (int64_t)((uint64_t)to[i] + v);
        }
    } else {
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) to[i] = (from[i] ^ flip) > (to[i] ^ flip) ? from[i] : to[i];
    }
    return bits;
}

enum { SHORT_ROW = 12, TOGETHER = 8 };

/* TOGETHER short rows, whose numbers are taken one of each at a time. */
static uint64_t joined_rows(te_whole_join join, int64_t *to, const int64_t *from, int64_t step, uint64_t half,
                            int64_t n)
{
    int64_t  best[TOGETHER], flip = join == TE_WHOLE_MIN ? -1 : 0;
    uint64_t sum[TOGETHER] = {0}, bits[TOGETHER] = {0}, all = 0;
    for (int q = 0; q < TOGETHER; q++) best[q] = INT64_MIN;
    for (int64_t i = 0; i < n; i++)
        _Pragma("omp simd") for (int q = 0; q < TOGETHER; q++)
        {
            int64_t v = from[q * step + i] ^ flip;
            best[q] = v > best[q] ? v : best[q];
            sum[q] += (uint64_t)v;
            bits[q] |= (uint64_t)v + half;
        }
    for (int q = 0; q < TOGETHER; q++) {
        to[q] = join == TE_WHOLE_SUM ? (int64_t)sum[q] : best[q] ^ flip;
        all |= bits[q];
    }
    return all;
}

/* All that may be wanted at once: one loop takes little longer than another one reads. */
static uint64_t joined_whole(te_whole_join join, int64_t *to, const int64_t *from, int64_t step, uint64_t half,
                             int64_t n, int64_t rows)
{
    uint64_t bits = 0;
    int64_t  flip = join == TE_WHOLE_MIN ? -1 : 0, r = 0;
    for (; n <= SHORT_ROW && r + TOGETHER <= rows; r += TOGETHER, from += TOGETHER * step)
        bits |= joined_rows(join, to + r, from, step, half, n);
    for (; r < rows; r++, from += step) {
        int64_t  best = INT64_MIN;
        uint64_t sum = 0;
        _Pragma("omp simd reduction(| : bits) reduction(+ : sum) reduction(max : best)")
        for (int64_t i = 0; i < n; i++) {
            int64_t v = from[i] ^ flip;
            best = v > best ? v : best;
            sum += (uint64_t)v;
            bits |= (uint64_t)v + half;
        }
        to[r] = join == TE_WHOLE_SUM ? (int64_t)sum : best ^ flip;
    }
    return bits;
}

/* What is made of numbers that are too large does not count, but must be something. */
#define WHOLE_LOOP(expression)                                              \
    _Pragma("omp simd reduction(| : bits)") for (int64_t i = 0; i < n; i++) \
    {                                                                       \
        uint64_t v = (uint64_t)a[i], w = (uint64_t)b[i];                    \
        bits |= (v + half) | (w + half);                                    \
        y[i] = (int64_t)(expression);                                       \
    }                                                                       \
    break

/* A difference is the sum with all bits of b turned, and 1. */
static uint64_t whole_of(te_opcode op, int64_t *y, const int64_t *a, const int64_t *b, uint64_t half, int64_t n)
{
    uint64_t bits = 0, turn = op == TE_PW_SUB ? ~(uint64_t)0 : 0;
    n = n / TE_WHOLE_STEP * TE_WHOLE_STEP; /* which compilers then know */
    switch (op) {
    case TE_PW_ADD:
    case TE_PW_SUB: WHOLE_LOOP(v + (w ^ turn) - turn);
    case TE_PW_MUL: WHOLE_LOOP(v * w);
    case TE_PW_MAX: WHOLE_LOOP((int64_t)v > (int64_t)w ? v : w);
    default: WHOLE_LOOP((int64_t)v < (int64_t)w ? v : w);
    }
    return bits;
}

const te_copy_blocks TE_ISA_NAME(te_copy_blocks) = {
    .load = {[TE_F32] = load_f32,
             [TE_BF16] = load_bf16,
             [TE_F16] = load_f16,
             [TE_F64] = load_f64,
             [TE_I64] = load_i64,
             [TE_I32] = load_i32,
             [TE_U8] = load_u8,
             [TE_BOOL] = load_u8,
             [TE_F8E4M3] = load_e4m3,
             [TE_F8E5M2] = load_e5m2},
    .store = {[TE_CLASS_F32] = STORES(f32), [TE_CLASS_F64] = STORES(f64), [TE_CLASS_I64] = STORES(i64)},
    .fill = fill_runs,
    .move = {move_uint8_t, move_uint16_t, move_uint32_t, move_uint64_t},
    .transpose = {transpose_uint8_t, transpose_uint16_t, transpose_uint32_t, transpose_uint64_t},
    .join = join_whole,
    .joined = joined_whole,
    .whole = whole_of,
    .few = few_of,
    .stream = stream_lines,
    .settle = settle_lines,
};
