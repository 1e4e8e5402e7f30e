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

enum { AHEAD = 8 << 10 /* bytes */ };

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

/* `rows` lines of a times BLOCK_COLS of b, `col` bytes apart. */
INLINE void dots_block(add_fn *add, int rows, const te_gemm_dots *d, const char *a, const char *b, int64_t col,
                       float *sums)
{
    vector  sum[BLOCK_ROWS][BLOCK_COLS][PARTS] = {0};
    char    x[BLOCK_ROWS][LINE], y[BLOCK_COLS][LINE];
    int64_t row = d->a_line, whole = d->bytes / LINE * LINE, rest = d->bytes - whole;
    /* of one row times the same column over and over, both are fetched as far ahead */
    int64_t     pace = col ? BLOCK_COLS : 1;
    const char *ahead[BLOCK_COLS];
    UNROLL for (int j = 0; j < BLOCK_COLS; j++) ahead[j] = (col ? b + j * LINE : j ? a : b) + AHEAD;
    for (;;) {
        for (int64_t at = 0; at < whole; at += LINE) {
            UNROLL for (int j = 0; j < BLOCK_COLS; j++)
                __builtin_prefetch(rows == 1 ? ahead[j] + pace * at : b + BLOCK_COLS * at + j * LINE + AHEAD);
            UNROLL for (int i = 0; i < rows; i++)
                UNROLL for (int j = 0; j < BLOCK_COLS; j++)
                    UNROLL for (int v = 0; v < (int)PARTS; v++)
                        sum[i][j][v] = add(a + i * row + at, b + j * col + at, v, sum[i][j][v]);
        }
        if (!rest) break;
        copy_rest(a + whole, row, rows, rest, x), copy_rest(b + whole, col, BLOCK_COLS, rest, y);
        a = x[0], b = y[0], row = col = whole = LINE, rest = 0;
    }
    UNROLL for (int i = 0; i < rows; i++) fold(sum[i], sums + i * d->pitch);
}

/* A block of columns for all rows. */
INLINE void dots_cols(add_fn *add, const te_gemm_dots *d, const char *b, int64_t col, float *sums)
{
    for (int i = 0; i < d->rows;) {
        const char *a = d->a + i * d->a_line;
        float *to = sums + i * d->pitch;
        if (BLOCK_ROWS >= 4 && d->rows - i >= 4) dots_block(add, BLOCK_ROWS, d, a, b, col, to), i += 4;
        else if (BLOCK_ROWS >= 4 && d->rows - i >= 2) dots_block(add, BLOCK_ROWS / 2, d, a, b, col, to), i += 2;
        else dots_block(add, 1, d, a, b, col, to), i++;
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
        dots_cols(add, d, d->b + at * d->b_line, few ? 0 : d->b_line, d->sums + at);
    }
}

void TE_ISA_NAME(te_gemm_dots_f32)(const te_gemm_dots *d) { dots_all(add_f32, d); }
void TE_ISA_NAME(te_gemm_dots_bf16)(const te_gemm_dots *d) { dots_all(add_bf16, d); }
void TE_ISA_NAME(te_gemm_dots_f16)(const te_gemm_dots *d) { dots_all(add_f16, d); }
#ifdef PAIRS_TARGET
PAIRS_TARGET void TE_ISA_NAME(te_gemm_dots_pairs)(const te_gemm_dots *d) { dots_all(add_pairs, d); }
#endif
