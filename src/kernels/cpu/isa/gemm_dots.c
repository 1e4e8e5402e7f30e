/* gemm_dots.c - products of few rows: every element of c is the sum of products of two contiguous lines.
 *
 * Word w of both lines is multiplied in lane w % 16 of one vector of sums, ascending; then the lanes that are 8, 4, 2
 * and 1 apart are added. So the order follows from k alone, for every instruction set.
 *
 * What takes the time is reading b, from memory where it is a model's. Lines that follow each other are read from the
 * first byte to the last by prefetches some KiB ahead; to the processor's own prefetching four short lines at a time
 * are no stream, and half as fast.
 */
#include "../gemm.h"
#include "gemm_lines.h"

#if defined(TE_ISA_avx512)
enum { BLOCK_ROWS = 4 };
#else
enum { BLOCK_ROWS = 1 };
#endif

enum {
    AHEAD = 8 << 10,      /* bytes */
    NEAR = 24 << 10,      /* of lines of a, that stay in the first-level cache as they are; else these … */
    PART = 2 << 10,       /* … are gone through in parts of so many bytes, … */
    LEAST_ROWS = 4,       /* … if there are several, … */
    PART_ROWS = 20,       /* … and not more than have room, … */
    PART_COLS = 32,       /* … by so many columns */
    PART_BLOCKS = PART_COLS / BLOCK_COLS,
    APART = 2 << 10       /* bytes, by a multiple of which lines share places in a cache */
};

/* Adds to sums of part v the products of its words of one step, whose lines begin at a and b. */
INLINE vector add_f32(const char *a, const char *b, int v, vector sum)
{
    int at = v * (int)sizeof(vector);
    return MADD(load(a + at), load(b + at), sum);
}

/* The first of each pair of bfloat16 as float32, and the second. */
INLINE vector first_of(vector pairs) { return (vector)((vector_u32)pairs << 16); }
INLINE vector second_of(vector pairs) { return (vector)((vector_u32)pairs & 0xffff0000u); }

INLINE vector add_bf16(const char *a, const char *b, int v, vector sum)
{
    vector x = load(a + v * (int)sizeof(vector)), y = load(b + v * (int)sizeof(vector));
    return MADD(second_of(x), second_of(y), MADD(first_of(x), first_of(y), sum));
}

/* Both at once, by an extension that the caller has checked for; numbers below the normal ones count as 0. */
#if defined(TE_ISA_avx512)
#define PAIRS_TARGET __attribute__((target("avx512bf16")))
PAIRS_TARGET INLINE vector add_pairs(const char *a, const char *b, int v, vector sum)
{
    (void)v; /* a step is one vector */
    return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)load(a), (__m512bh)load(b));
}
#elif defined(TE_ISA_neonbf16)
#define PAIRS_TARGET
INLINE vector add_pairs(const char *a, const char *b, int v, vector sum)
{
    int at = v * (int)sizeof(vector);
    return vbfdotq_f32(sum, (bfloat16x8_t)load(a + at), (bfloat16x8_t)load(b + at));
}
#endif

/* Element e of 32 is added in lane e % 16. */
INLINE vector add_f16(const char *a, const char *b, int v, vector sum)
{
    int at = v * (int)sizeof(vector) / 2;
    sum = MADD(widen_f16(a + at), widen_f16(b + at), sum);
    return MADD(widen_f16(a + LINE / 2 + at), widen_f16(b + LINE / 2 + at), sum);
}

typedef vector add_fn(const char *a, const char *b, int v, vector sum);

/* What is left of some lines behind their whole steps, filled up with zeros. By itself: within the loop over steps it
 * costs registers, and those lines time that have no rest. */
static __attribute__((noinline)) void copy_rest(const char *src, int64_t stride, int lines, int64_t bytes,
                                                char rest[][LINE])
{
    for (int i = 0; i < lines; i++) copy_filled(rest[i], src + i * stride, bytes, LINE);
}

/* A part of long lines, and where the same of the next ones lies, or what follows it, which is asked for meanwhile. */
typedef struct dots_part {
    bool        begins, ends;
    const char *next;
} dots_part;

typedef vector block_sums[BLOCK_COLS][PARTS];

/* One by one, so that they may be in registers. */
INLINE void move_sums(int rows, block_sums *to, block_sums *from)
{
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < BLOCK_COLS; j++)
            UNROLL for (int v = 0; v < (int)PARTS; v++) to[i][j][v] = from[i][j][v];
}

/* `rows` lines of a times BLOCK_COLS of b, `col` bytes apart. A part that does not begin goes on with the sums that are
 * kept, and one that does not end leaves them there; without a part lines are multiplied as a whole. */
INLINE void dots_block(add_fn *add, int rows, const te_gemm_dots *d, const char *a, const char *b, int64_t col,
                       const dots_part *part, block_sums *kept, float *sums)
{
    block_sums  sum[BLOCK_ROWS] = {0};
    char        x[BLOCK_ROWS][LINE], y[BLOCK_COLS][LINE];
    int64_t     row = d->a_line, whole = d->bytes / LINE * LINE, rest = d->bytes - whole;
    /* of one row times the same column over and over, both are fetched as far ahead */
    int64_t     pace = col ? BLOCK_COLS : 1, gap = col;
    const char *ahead[BLOCK_COLS];
    UNROLL for (int j = 0; j < BLOCK_COLS; j++) ahead[j] = (col ? b + j * LINE : j ? a : b) + AHEAD;
    if (part && !part->begins) move_sums(rows, sum, kept);
    for (;;) {
        for (int64_t at = 0; at < whole; at += LINE) {
            UNROLL for (int j = 0; j < BLOCK_COLS; j++)
                if (part) __builtin_prefetch(part->next + j * gap + at);
                else if (rows == 1) __builtin_prefetch(ahead[j] + pace * at);
                else __builtin_prefetch(b + BLOCK_COLS * at + j * LINE + AHEAD);
            UNROLL for (int i = 0; i < rows; i++)
                UNROLL for (int j = 0; j < BLOCK_COLS; j++)
                    UNROLL for (int v = 0; v < (int)PARTS; v++)
                        sum[i][j][v] = add(a + i * row + at, b + j * col + at, v, sum[i][j][v]);
        }
        if (!rest) break;
        copy_rest(a + whole, row, rows, rest, x), copy_rest(b + whole, col, BLOCK_COLS, rest, y);
        a = x[0], b = y[0], row = col = whole = LINE, rest = 0;
    }
    if (part && !part->ends) move_sums(rows, kept, sum);
    else UNROLL for (int i = 0; i < rows; i++) fold(sum[i], sums + i * d->pitch);
}

/* A block of columns for all rows. */
INLINE void dots_cols(add_fn *add, const te_gemm_dots *d, const char *b, int64_t col, const dots_part *part,
                      block_sums *kept, float *sums)
{
    for (int i = 0; i < d->rows;) {
        const char *a = d->a + i * d->a_line;
        float *to = sums + i * d->pitch;
        block_sums *own = part ? kept + i : NULL;
        if (BLOCK_ROWS >= 4 && d->rows - i >= 4) dots_block(add, BLOCK_ROWS, d, a, b, col, part, own, to), i += 4;
        else if (BLOCK_ROWS >= 4 && d->rows - i >= 2)
            dots_block(add, BLOCK_ROWS / 2, d, a, b, col, part, own, to), i += 2;
        else dots_block(add, 1, d, a, b, col, part, own, to), i++;
    }
}

/* The last block begins early enough to be whole: what it overlaps with is computed twice, to the same sums. Where
 * there are fewer columns than a block has, each is taken for all of one; what that writes too far right the next one
 * overwrites, and `pitch` leaves room for the last. */
INLINE void dots_all(add_fn *add, const te_gemm_dots *d)
{
    bool few = d->cols < BLOCK_COLS;
    int  step = few ? 1 : BLOCK_COLS, last = d->cols - step;
    for (int j = 0; j < d->cols; j += step) {
        int at = j < last ? j : last;
        dots_cols(add, d, d->b + at * d->b_line, few ? 0 : d->b_line, NULL, NULL, d->sums + at);
    }
}

#if defined(TE_ISA_avx512)
/* --- long lines, part by part ------------------------------------------------------------------------------------- */

/* Columns first … end of a part. */
INLINE void part_columns(add_fn *add, const te_gemm_dots *d, int first, int end, const dots_part *part,
                         block_sums kept[][PART_ROWS])
{
    int     last = d->cols - BLOCK_COLS;
    int64_t col = d->b_line;
    for (int j = first; j < end; j += BLOCK_COLS) {
        int         at = j < last ? j : last;
        const char *b = d->b + at * col;
        dots_part   now = *part;
        if (j + BLOCK_COLS < end) now.next = b + BLOCK_COLS * col;
        dots_cols(add, d, b, col, &now, kept[(j - first) / BLOCK_COLS], d->sums + at);
    }
}

typedef void columns_fn(const te_gemm_dots *d, int first, int end, const dots_part *part,
                        block_sums kept[][PART_ROWS]);

/* The part of the lines that begins at byte `from`. Rows so far apart that they push each other out are copied. */
static te_gemm_dots part_of(const te_gemm_dots *d, int64_t from, char near[][PART + LINE])
{
    te_gemm_dots part = *d;
    part.a += from;
    part.b += from;
    if (part.bytes > from + PART) part.bytes = from + PART;
    part.bytes -= from;
    if (d->a_line % APART != 0) return part;
    for (int i = 0; i < d->rows; i++) memcpy(near[i], part.a + i * d->a_line, (size_t)part.bytes);
    part.a = near[0];
    part.a_line = sizeof near[0];
    return part;
}

/* Long lines, part by part: one of all rows stays in the first-level cache while that of some columns passes. */
static void dots_in_parts(columns_fn *columns, const te_gemm_dots *d)
{
    block_sums kept[PART_BLOCKS][PART_ROWS];
    char       near[PART_ROWS][PART + LINE];
    for (int first = 0; first < d->cols; first += PART_COLS) {
        int end = first + PART_COLS < d->cols ? first + PART_COLS : d->cols;
        for (int64_t from = 0; from < d->bytes; from += PART) {
            const te_gemm_dots part = part_of(d, from, near);
            bool        ends = from + part.bytes == d->bytes;
            const char *next = ends ? d->b + end * d->b_line : part.b + PART + first * d->b_line;
            const dots_part now = {.begins = from == 0, .ends = ends, .next = next};
            columns(&part, first, end, &now, kept);
        }
    }
}

/* Where registers hold the sums of one row alone parts take longer. */
static bool goes_in_parts(const te_gemm_dots *d)
{
    bool several = d->rows >= LEAST_ROWS && d->rows <= PART_ROWS && d->cols >= BLOCK_COLS;
    return several && d->bytes > PART && d->rows * d->bytes > NEAR;
}

#define DOTS_IN_PARTS(type, target)                                                                                    \
    target static void type##_columns(const te_gemm_dots *d, int first, int end, const dots_part *part,                \
                                      block_sums kept[][PART_ROWS])                                                    \
    {                                                                                                                  \
        part_columns(add_##type, d, first, end, part, kept);                                                           \
    }                                                                                                                  \
    target void TE_ISA_NAME(te_gemm_dots_##type)(const te_gemm_dots *d)                                                \
    {                                                                                                                  \
        if (goes_in_parts(d)) dots_in_parts(type##_columns, d);                                                        \
        else dots_all(add_##type, d);                                                                                  \
    }
DOTS_IN_PARTS(f32, )
DOTS_IN_PARTS(pairs, PAIRS_TARGET)
#else
void TE_ISA_NAME(te_gemm_dots_f32)(const te_gemm_dots *d) { dots_all(add_f32, d); }
#ifdef PAIRS_TARGET
PAIRS_TARGET void TE_ISA_NAME(te_gemm_dots_pairs)(const te_gemm_dots *d) { dots_all(add_pairs, d); }
#endif
#endif

void TE_ISA_NAME(te_gemm_dots_bf16)(const te_gemm_dots *d) { dots_all(add_bf16, d); }
void TE_ISA_NAME(te_gemm_dots_f16)(const te_gemm_dots *d) { dots_all(add_f16, d); }
