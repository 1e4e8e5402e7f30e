/* gemm_coded.c - products of few rows with quantized weights as they are stored (../gemm_rows.c).
 *
 * A token needs every weight once, so what counts is how many bytes that is. Codes become bfloat16 in registers, by
 * tables of bytes: of 8 bits all 128 sizes stand in two registers for lower and two for upper bytes; of 4 bits all 16
 * codes in one each. Pairs are multiplied as they are, the factor of a block with the sum over it: it may be any
 * float32, and a code that is no number makes the sum none.
 */
#include "../gemm.h"

#include <immintrin.h>

#include "gemm_lines.h"
#include "quantize_values.h"

#ifdef TE_ISA_HAS_AVX512BF16
#define TARGET __attribute__((target("avx512bf16")))

enum { BLOCK_ROWS = 4, STEP = 64 /* codes */, AHEAD = 4 << 10, LONG = 2 << 10 /* bytes */ };

typedef struct tables {
    te_size_table sizes;          /* of 8 bits */
    __m512i       lower, upper;   /* of 4 bits */
} tables;

/* Two vectors of bytes to words, lower and upper halves of vectors of 32. Unpacking goes by quarters, so codes come in
 * this order of eights. */
INLINE void to_words(__m512i v[2], __m512i low, __m512i high)
{
    v[0] = _mm512_unpacklo_epi8(low, high);
    v[1] = _mm512_unpackhi_epi8(low, high);
}

INLINE __m512i by_quarters(__m512i bytes)
{
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bytes);
}

typedef void values_fn(__m512i v[2], const uint8_t *codes, const tables *t);

/* 64 codes of 8 bits as bfloat16. */
INLINE void values_of_bytes(__m512i v[2], const uint8_t *codes, const tables *t)
{
    __m512i code = by_quarters(_mm512_loadu_si512(codes));
    __m512i low = _mm512_permutex2var_epi8(t->sizes.low[0], code, t->sizes.low[1]);
    __m512i high = _mm512_permutex2var_epi8(t->sizes.high[0], code, t->sizes.high[1]);
    to_words(v, low, _mm512_ternarylogic_epi32(_mm512_set1_epi8((char)0x80), code, high, 0xca)); /* a ? b : c */
}

/* The same of 4 bits, the first of two in the lower half of a byte. Eight codes go to an eighth of the vector each, in
 * the order of by_quarters, and to bytes there, whose upper bits are of others: the tables come four times over. */
INLINE void values_of_halves(__m512i v[2], const uint8_t *pairs, const tables *t)
{
    const __m512i order = _mm512_setr_epi32(0, 0, 4, 4, 1, 1, 5, 5, 2, 2, 6, 6, 3, 3, 7, 7);
    const __m512i places = _mm512_set1_epi64(0x1c1814100c080400);
    __m512i all = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)pairs));
    __m512i code = _mm512_multishift_epi64_epi8(places, _mm512_permutexvar_epi32(order, all));
    to_words(v, _mm512_permutexvar_epi8(code, t->lower), _mm512_permutexvar_epi8(code, t->upper));
}

INLINE tables tables_of_halves(void)
{
    const __m128i lower = _mm_setr_epi8(0, 0, (char)0x80, (char)0xc0, 0, 0x40, (char)0x80, (char)0xc0, 0, 0, (char)0x80,
                                        (char)0xc0, 0, 0x40, (char)0x80, (char)0xc0);
    const __m128i upper = _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, (char)0x80, (char)0xbf, (char)0xbf,
                                        (char)0xbf, (char)0xc0, (char)0xc0, (char)0xc0, (char)0xc0);
    return (tables){.lower = _mm512_broadcast_i32x4(lower), .upper = _mm512_broadcast_i32x4(upper)};
}

TARGET INLINE vector multiply(vector sum, const char *a, __m512i b)
{
    return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)load(a), (__m512bh)b);
}

/* The factors of the two halves of a step, whose blocks are of 16 or 32. */
INLINE void factors_of_step(vector f[2], const float *factors, int block)
{
    if (block == 32) {
        f[0] = SPLAT(factors[0]), f[1] = SPLAT(factors[1]);
        return;
    }
    const __mmask16 second = 0xff00;
    for (int h = 0; h < 2; h++)
        f[h] = (vector)_mm512_mask_broadcastss_ps(_mm512_set1_ps(factors[2 * h]), second,
                                                  _mm_load_ss(factors + 2 * h + 1));
}

/* What a step asks for: lines one after the other some KiB ahead, as in gemm_dots.c, or of long ones the next four, for
 * which the second-level cache has room. */
typedef struct ahead {
    bool           far;
    const uint8_t *first;
    int64_t        line, step;
} ahead;

INLINE ahead ahead_of(const te_gemm_coded *c, int bits)
{
    if (c->line > LONG) return (ahead){true, c->codes + BLOCK_COLS * c->line, c->line, bits * STEP / 8};
    return (ahead){false, c->codes + AHEAD, LINE, BLOCK_COLS * bits * STEP / 8};
}

/* Steps [at, end) of `rows` lines of a and BLOCK_COLS lines of codes, under factors of `block`; 0: under none, added to
 * `sum`. */
TARGET INLINE void steps(values_fn *values, const tables *t, int rows, int bits, int block, const te_gemm_coded *c,
                         const char *const *a, int64_t at, int64_t end, vector sum[BLOCK_ROWS][BLOCK_COLS])
{
    const ahead    next = ahead_of(c, bits);
    const uint8_t *fetch = next.first + at / STEP * next.step;
    for (; at < end; at += STEP, fetch += next.step) {
        UNROLL for (int j = 0; j < BLOCK_COLS; j++) {
            const uint8_t *codes = c->codes + j * c->line + at * bits / 8;
            __m512i v[2];
            vector f[2];
            if (next.far) __builtin_prefetch(fetch + j * next.line, 0, 2);
            else __builtin_prefetch(fetch + j * next.line);
            values(v, codes, t);
            if (block) factors_of_step(f, c->factors + j * c->factor_line + at / block, block);
            UNROLL for (int i = 0; i < rows; i++)
                UNROLL for (int h = 0; h < 2; h++) {
                    const char *x = a[i] + 2 * at + h * LINE;
                    if (block) sum[i][j] = MADD(multiply((vector){0}, x, v[h]), f[h], sum[i][j]);
                    else sum[i][j] = multiply(sum[i][j], x, v[h]);
                }
        }
    }
}

/* The steps of whole blocks, then their factors. */
TARGET INLINE void large_blocks(values_fn *values, const tables *t, int rows, int bits, const te_gemm_coded *c,
                                const char *const *a, vector sum[BLOCK_ROWS][BLOCK_COLS])
{
    for (int64_t at = 0, b = 0; at < c->k; at += c->block, b++) {
        vector part[BLOCK_ROWS][BLOCK_COLS] = {0};
        steps(values, t, rows, bits, 0, c, a, at, c->k - at < c->block ? c->k : at + c->block, part);
        UNROLL for (int j = 0; j < BLOCK_COLS; j++) {
            vector f = SPLAT(c->factors[j * c->factor_line + b]);
            UNROLL for (int i = 0; i < rows; i++) sum[i][j] = MADD(part[i][j], f, sum[i][j]);
        }
    }
}

/* Row `row` of a, or BLOCK_ROWS from there on, of which the last one stands for those that are not there. Blocks of 4
 * bits are of 16, those of 8 bits of 32 or of whole steps. */
TARGET INLINE void all_blocks(values_fn *values, const tables *t, int rows, int bits, const te_gemm_coded *c, int row)
{
    vector      sum[BLOCK_ROWS][BLOCK_COLS] = {0};
    const char *a[BLOCK_ROWS];
    for (int i = 0; i < rows; i++) a[i] = c->a + (row + i < c->rows ? row + i : c->rows - 1) * c->a_line;
    if (bits == 4) steps(values, t, rows, bits, 16, c, a, 0, c->k, sum);
    else if (c->block == 32) steps(values, t, rows, bits, 32, c, a, 0, c->k, sum);
    else large_blocks(values, t, rows, bits, c, a, sum);
    UNROLL for (int i = 0; i < rows; i++) {
        vector parts[BLOCK_COLS][PARTS];
        for (int j = 0; j < BLOCK_COLS; j++) parts[j][0] = sum[i][j];
        if (row + i < c->rows) fold(parts, c->sums + (row + i) * c->pitch);
    }
}

/* Codes are decoded once for BLOCK_ROWS rows. Two rows have a loop of their own: passes that check one guess have two,
 * and took as long as those with four. */
TARGET INLINE void all_rows(values_fn *values, const tables *t, int bits, const te_gemm_coded *c)
{
    int row = 0;
    for (; c->rows - row > 2; row += BLOCK_ROWS) all_blocks(values, t, BLOCK_ROWS, bits, c, row);
    if (c->rows - row == 2) all_blocks(values, t, 2, bits, c, row);
    else if (row < c->rows) all_blocks(values, t, 1, bits, c, row);
}

/* The last columns begin early enough to be BLOCK_COLS, as in gemm_dots.c. */
TARGET INLINE void all_columns(values_fn *values, const tables *t, int bits, const te_gemm_coded *c)
{
    bool few = c->cols < BLOCK_COLS;
    int  step = few ? 1 : BLOCK_COLS, last = c->cols - step;
    for (int j = 0; j < c->cols; j += step) {
        int at = j < last ? j : last;
        te_gemm_coded some = *c;
        some.codes += at * c->line;
        some.factors += at * c->factor_line;
        some.sums += at;
        if (few) some.line = some.factor_line = 0;
        all_rows(values, t, bits, &some);
    }
}

TARGET static __attribute__((noinline)) void coded_bytes(const te_gemm_coded *c, te_size_table sizes)
{
    const tables t = {.sizes = sizes};
    all_columns(values_of_bytes, &t, 8, c);
}

/* The largest size of E4M3 is no number, which the table takes for 480. */
TARGET static void coded_e4m3(const te_gemm_coded *c)
{
    const __mmask64 last = UINT64_C(1) << 63;
    te_size_table sizes = te_size_table_e4m3();
    sizes.low[1] = _mm512_mask_set1_epi8(sizes.low[1], last, (char)0xc0);
    sizes.high[1] = _mm512_mask_set1_epi8(sizes.high[1], last, 0x7f);
    coded_bytes(c, sizes);
}

TARGET static void coded_e5m2(const te_gemm_coded *c) { coded_bytes(c, te_size_table_e5m2()); }

TARGET static void coded_e2m1(const te_gemm_coded *c)
{
    const tables t = tables_of_halves();
    all_columns(values_of_halves, &t, 4, c);
}

void (*const te_gemm_coded_dots[TE_ELEMENT_COUNT])(const te_gemm_coded *) = {
    [TE_E4M3] = coded_e4m3, [TE_E5M2] = coded_e5m2, [TE_E2M1] = coded_e2m1};
#endif
