/* gemm_amx_f32.c - the matrix product's arithmetic on float32 in a matrix unit (AMX), which multiplies bfloat16.
 *
 * A float32 is the sum of three bfloat16, exactly: x rounded to 8 bits, what is left of it rounded to 8 bits, and the 8
 * bits that are left of that. Of the nine products of the parts of two factors the six largest are added up:
 *
 *                   b: high  middle  low
 *      a: high           1     2      3          the other three are at most 2^-23 of the product, less than a tenth of
 *         middle         4     5                 that on average, with either sign: no more than rounding to float32
 *         low            6                       takes away
 *
 * Multiplying so takes 24 steps of the unit for a tile whose bfloat16 take 4, which is less than half the time that
 * vectors of float32 take for it. Sums of 32 steps of k are added up on their own before they meet the others, so they
 * are rounded less often than by multiply-adds one after the other. (Henry, Tang and Heinecke, "Leveraging the bfloat16
 * Artificial Intelligence Datatype for Higher-Precision Computations", 2019.)
 *
 * The unit takes subnormal numbers for 0, and leaves 0 for them, also for parts and for sums under way: an error of
 * less than k 2^-122 times the largest factor. A sum that is not far above that, and one that is not finite, which it
 * becomes where a factor is infinite or rounds to that, are computed again from a and b by multiply-adds, while the
 * next tile is multiplied. That each sum is what float32 gives does not depend on what is beside it.
 *
 * Along k elements w and w + 16 of 32 make a word of each part.
 *
 *      panel of a: [k / 32][row, 32][part][word, 16]         panel of b: [k / 32][word, 16][part][column, 32]
 */
#include "gemm_amx.h"

#include <math.h>

enum {
    PARTS = 3,
    CHUNK = 2 * SIDE,       /* elements along k of a register's rows */
    A_PART = SIDE * 4, A_ROW = PARTS * A_PART,
    B_PART = COLS * 4, B_ROW = PARTS * B_PART,
    MAGNITUDE = 0x7fffffff, /* of a float's bits */
    INFINITE = 0x7f800000
};

/* --- packing ------------------------------------------------------------------------------------------------------ */

static inline __m512i magnitude(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi32(MAGNITUDE)); }

/* Two floats in each word, `first` and `second` along k, in three parts. Ties round away from zero. */
static inline __attribute__((always_inline)) void split(__m512i first, __m512i second, char *to, const int64_t part)
{
    const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32((int)0xffff0000);
    _Pragma("GCC unroll 3") for (int p = 0; p < PARTS; p++) {
        __m512i x = first, y = second;
        if (p < PARTS - 1) { /* the last part is what is left */
            x = _mm512_and_si512(_mm512_add_epi32(x, half), upper);
            y = _mm512_and_si512(_mm512_add_epi32(y, half), upper);
            first = (__m512i)_mm512_sub_ps((__m512)first, (__m512)x);
            second = (__m512i)_mm512_sub_ps((__m512)second, (__m512)y);
        }
        _mm512_storeu_si512(to + p * part, _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(x, 16), y));
    }
}

/* The larger of `most` and the magnitudes of x and y. */
static inline __m512i larger(__m512i most, __m512i x, __m512i y)
{
    return _mm512_max_epu32(most, _mm512_max_epu32(magnitude(x), magnitude(y)));
}

static inline __mmask16 first_of(int n) { return (__mmask16)(n >= SIDE ? 0xffff : n <= 0 ? 0 : (1 << n) - 1); }

/* A vector along k of each line, of elements 0 to 15 in v[0], and of the others. */
static inline void load_along(const square *s, __m512i v[2][SIDE])
{
    for (int i = 0; i < SIDE; i++)
        for (int h = 0; h < 2; h++) {
            __mmask16 there = i < s->lines ? first_of(s->k - h * SIDE) : 0;
            v[h][i] = _mm512_maskz_loadu_epi32(there, s->src + i * s->line_stride + h * SIDE * 4);
        }
}

/* A vector across lines of each element. */
static inline void load_across(const square *s, __m512i v[2][SIDE])
{
    for (int h = 0; h < 2; h++)
        for (int w = 0; w < SIDE; w++) {
            int       step = h * SIDE + w;
            __mmask16 there = step < s->k ? first_of(s->lines) : 0;
            v[h][w] = _mm512_maskz_loadu_epi32(there, s->src + step * s->k_stride);
        }
}

static inline void load_scattered(const square *s, __m512i v[2][SIDE])
{
    uint32_t element[2][SIDE][SIDE] = {{{0}}};
    for (int i = 0; i < s->lines; i++)
        for (int j = 0; j < s->k; j++)
            memcpy(&element[j / SIDE][i][j % SIDE], s->src + i * s->line_stride + j * s->k_stride, 4);
    memcpy(v, element, sizeof element);
}

/* The same across lines, however they lie. */
static inline __attribute__((always_inline)) void load_any_across(const square *s, __m512i v[2][SIDE])
{
    if (s->line_stride == 4) {
        load_across(s, v);
        return;
    }
    if (s->k_stride == 4) load_along(s, v);
    else load_scattered(s, v);
    te_tile_turn(v[0]);
    te_tile_turn(v[1]);
}

/* Of each line, the largest magnitude so far. */
static inline void note_largest(uint32_t *largest, int lines, __m512i v[2][SIDE])
{
    __m512i most = _mm512_maskz_loadu_epi32(first_of(lines), largest);
    for (int w = 0; w < SIDE; w++)
        most = larger(most, v[0][w], v[1][w]);
    _mm512_mask_storeu_epi32(largest, first_of(lines), most);
}

static square square_of(const te_gemm_pack *p, int line, int64_t k)
{
    int64_t left = p->k - k;
    int     lines = p->extent - line;
    return (square){p->src + line * p->line_stride + k * p->k_stride, p->line_stride, p->k_stride,
                    lines < SIDE ? lines : SIDE, left < CHUNK ? (int)left : CHUNK};
}

/* Splits a register's row, of which `left` elements are left; returns the larger of `most` and their magnitudes. */
static inline __m512i split_row(const char *src, int64_t left, char *to, __m512i most)
{
    int     there = left < CHUNK ? (int)left : CHUNK;
    __m512i x = _mm512_maskz_loadu_epi32(first_of(there), src);
    __m512i y = _mm512_maskz_loadu_epi32(first_of(there - SIDE), src + SIDE * 4);
    split(x, y, to, A_PART);
    return larger(most, x, y);
}

static inline void note_line(uint32_t *largest, __m512i most)
{
    uint32_t of_slice = _mm512_reduce_max_epu32(most);
    if (of_slice > *largest) *largest = of_slice;
}

/* Contiguous rows, one after the other. */
static void pack_rows(const te_gemm_pack *p, char *panels, int64_t panel)
{
    int down = (p->extent + SIDE - 1) / SIDE * SIDE;
    for (int line = 0; line < down; line++) {
        char *to = panels + line / ROWS * panel + line % ROWS * A_ROW;
        const char *src = p->src + line * p->line_stride;
        int64_t k = line < p->extent ? p->k : 0;
        __m512i most = _mm512_setzero_si512();
        for (int64_t at = 0; at < p->k; at += CHUNK, to += ROWS * A_ROW)
            most = split_row(src + at * 4, k - at, to, most);
        if (line < p->extent) note_line(&p->largest[line], most);
    }
}

/* A word's 16 of what is left. Rows are complete tiles', so none is missing. */
static __attribute__((noinline)) void pack_piece(te_gemm_beside *b)
{
    te_gemm_pack *p = &b->pack;
    int64_t       left = p->k - b->at;
    __m512i       most = split_row(p->src + b->at * 4, left, b->to, _mm512_load_si512(b->most));
    b->to += ROWS * A_ROW, b->at += CHUNK;
    if (left > CHUNK) {
        _mm512_store_si512(b->most, most);
        return;
    }
    note_line(p->largest++, most);
    _mm512_store_si512(b->most, _mm512_setzero_si512());
    p->src += p->line_stride, p->extent--;
    b->panels += A_ROW, b->to = b->panels, b->at = 0;
}

static void pack_rest(te_gemm_beside *b)
{
    while (b->pack.extent > 0) pack_piece(b);
}

static void pack_a(const te_gemm_pack *p, void *panels)
{
    int64_t panel = (p->k + CHUNK - 1) / CHUNK * ROWS * A_ROW;
    if (p->k_stride == 4) {
        pack_rows(p, panels, panel);
        return;
    }
    __m512i v[2][SIDE];
    for (int64_t k = 0; k < p->k; k += CHUNK)
        for (int line = 0; line < p->extent; line += SIDE) { /* lines beside each other share those of a cache */
            square s = square_of(p, line, k);
            load_any_across(&s, v);
            note_largest(p->largest + line, s.lines, v);
            te_tile_turn(v[0]);
            te_tile_turn(v[1]);
            char *to = (char *)panels + line / ROWS * panel + k * ROWS / CHUNK * A_ROW + line % ROWS * A_ROW;
            for (int i = 0; i < SIDE; i++) split(v[0][i], v[1][i], to + i * A_ROW, A_PART);
        }
}

/* Columns side by side: nothing is turned. */
static void pack_b_across(const te_gemm_pack *p, char *panel)
{
    for (int line = 0; line < p->extent; line += SIDE) {
        __mmask16   there = first_of(p->extent - line);
        const char *src = p->src + line * 4;
        char       *to = panel + line * 4;
        __m512i     most = _mm512_maskz_loadu_epi32(there, p->largest + line);
        for (int64_t k = 0; k < p->k; k += CHUNK, src += SIDE * p->k_stride)
            for (int w = 0; w < SIDE; w++, src += p->k_stride, to += B_ROW) {
                __m512i x = _mm512_maskz_loadu_epi32(k + w < p->k ? there : 0, src);
                __m512i y = _mm512_maskz_loadu_epi32(k + w + SIDE < p->k ? there : 0, src + SIDE * p->k_stride);
                split(x, y, to, B_PART);
                most = larger(most, x, y);
            }
        _mm512_mask_storeu_epi32(p->largest + line, there, most);
    }
}

static void pack_b(const te_gemm_pack *p, void *panel)
{
    __m512i v[2][SIDE];
    if (p->line_stride == 4) {
        pack_b_across(p, panel);
        return;
    }
    for (int64_t k = 0; k < p->k; k += CHUNK)
        for (int line = 0; line < p->extent; line += SIDE) {
            square s = square_of(p, line, k);
            load_any_across(&s, v);
            note_largest(p->largest + line, s.lines, v);
            char *to = (char *)panel + k * SIDE / CHUNK * B_ROW + line * 4;
            for (int w = 0; w < SIDE; w++) split(v[0][w], v[1][w], to + w * B_ROW, B_PART);
        }
}

/* --- sums that the unit does not give ----------------------------------------------------------------------------- */

/* 16 floats `stride` bytes apart; 0 outside the mask. */
static inline __m512 load_columns(const char *p, int64_t stride, __mmask16 mask)
{
    if (stride == 4) return _mm512_maskz_loadu_ps(mask, p);
    __m512i at = _mm512_mullo_epi64(_mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi64(stride));
    __m256  low = _mm512_mask_i64gather_ps(_mm256_setzero_ps(), (__mmask8)mask, at, p, 1);
    __m256  high = _mm512_mask_i64gather_ps(_mm256_setzero_ps(), (__mmask8)(mask >> 8), at, p + 8 * stride, 1);
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

/* Magnitudes but those of 0, which become the largest numbers. */
static inline __m512i beyond_zero(__m512 x)
{
    return _mm512_sub_epi32(magnitude((__m512i)x), _mm512_set1_epi32(1));
}

/* The smallest magnitude of a row that is not 0. */
static uint32_t smallest_of_row(const te_gemm_origin *o)
{
    if (*o->a_range.smallest) return *o->a_range.smallest;
    __m512i least = _mm512_set1_epi32(INFINITE - 1);
    for (int64_t k = 0; k < o->k; k += SIDE) {
        __mmask16 there = first_of(o->k - k < SIDE ? (int)(o->k - k) : SIDE);
        least = _mm512_min_epu32(least, beyond_zero(load_columns(o->a + k * o->a_step, o->a_step, there)));
    }
    return *o->a_range.smallest = _mm512_reduce_min_epu32(least) + 1;
}

/* The same of 16 columns; of those outside the mask nothing is said. */
static __m512i smallest_of_columns(const te_gemm_origin *o, int vector, __mmask16 columns)
{
    uint32_t *noted = o->b_range.smallest + vector * SIDE;
    __m512i   known = _mm512_loadu_si512(noted), least = _mm512_set1_epi32(INFINITE - 1);
    if (!(_mm512_cmpeq_epi32_mask(known, _mm512_setzero_si512()) & columns)) return known;
    const char *b = o->b + vector * SIDE * o->b_col;
    for (int64_t k = 0; k < o->k; k++, b += o->b_step)
        least = _mm512_min_epu32(least, beyond_zero(load_columns(b, o->b_col, columns)));
    known = _mm512_mask_add_epi32(known, columns, least, _mm512_set1_epi32(1));
    _mm512_storeu_si512(noted, known);
    return known;
}

/* Which of 16 sums of a row are right though they are small: those of lines without numbers so small that products, or
 * parts of them, become 0. */
static __mmask16 lost_nothing(const te_gemm_origin *o, int vector, __mmask16 columns)
{
    const __m512 small = _mm512_set1_ps(0x1p-100f);
    __m512    row = (__m512)_mm512_set1_epi32((int)smallest_of_row(o));
    __m512    column = (__m512)smallest_of_columns(o, vector, columns);
    __mmask16 each = _mm512_cmp_ps_mask(_mm512_min_ps(row, column), small, _CMP_GE_OQ);
    return each & _mm512_cmp_ps_mask(_mm512_mul_ps(row, column), _mm512_set1_ps(o->least), _CMP_GE_OQ) & columns;
}

/* Those of `small` and `large` among 16 sums of a row, if the unit's do not stand: where a line holds a NaN, or is all
 * zeros and the other finite. */
static __attribute__((noinline)) void sum_again(const te_gemm_origin *o, int vector, __mmask16 small, __mmask16 large,
                                                float *sums)
{
    const __m512i infinite = _mm512_set1_epi32(INFINITE), none = _mm512_setzero_si512();
    uint32_t  a_largest = *o->a_range.largest;
    __m512i   b_largest = _mm512_loadu_si512(o->b_range.largest + vector * SIDE);
    __mmask16 empty = a_largest ? _mm512_cmpeq_epi32_mask(b_largest, none) : 0xffff;
    __mmask16 nan = a_largest > INFINITE ? 0xffff : _mm512_cmpgt_epu32_mask(b_largest, infinite);
    small &= (__mmask16) ~(large | empty);
    large &= (__mmask16) ~nan;
    if (small) small &= (__mmask16)~lost_nothing(o, vector, small);
    __mmask16 wanted = small | large;
    if (!wanted) return;
    const char *a = o->a, *b = o->b + vector * SIDE * o->b_col;
    enum { CHAINS = 4 }; /* so that no multiply-add waits for the one before it */
    __m512 sum[CHAINS] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t k = 0; k < o->k; k += CHAINS)
        for (int i = 0; i < CHAINS && k + i < o->k; i++, a += o->a_step, b += o->b_step) {
            float x;
            memcpy(&x, a, sizeof x);
            sum[i] = _mm512_fmadd_ps(_mm512_set1_ps(x), load_columns(b, o->b_col, wanted), sum[i]);
        }
    _mm512_mask_storeu_ps(sums, wanted, _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3])));
}

/* A row of sums that is complete; the next one comes next. */
static inline __attribute__((always_inline)) void mend_row(te_gemm_origin *o, float *sums, int vectors)
{
    const __m512i one = _mm512_set1_epi32(0x3f800000);
    __m512i row = _mm512_max_epu32(_mm512_set1_epi32((int)*o->a_range.largest), one);
    for (int v = 0; v < vectors; v++) {
        __m512i sum = magnitude(_mm512_loadu_si512(sums + v * SIDE));
        __m512i most = _mm512_max_epu32(_mm512_loadu_si512(o->b_range.largest + v * SIDE), row);
        __m512  least = _mm512_mul_ps((__m512)most, _mm512_set1_ps(o->least));
        __mmask16 small = _mm512_cmp_ps_mask((__m512)sum, least, _CMP_NGE_UQ);
        __mmask16 large = _mm512_cmpge_epu32_mask(sum, _mm512_set1_epi32(INFINITE));
        if (__builtin_expect(small | large, 0)) sum_again(o, v, small, large, sums + v * SIDE);
    }
    o->a += o->a_row;
    o->a_range.largest++, o->a_range.smallest++;
}

static void mend(const te_gemm_origin *origin, void *sums, int rows, int vectors)
{
    te_gemm_origin o = *origin;
    for (int i = 0; i < rows; i++) mend_row(&o, (float *)sums + i * COLS, vectors);
}

static inline __attribute__((always_inline)) void mend_and_leave(te_gemm_leaving *l, __m512 squares[2])
{
    mend_row(&l->origin, (float *)(void *)l->sums, l->vectors);
    leave_row(l, squares);
}

static void drain(te_gemm_leaving *l)
{
    __m512 squares[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    if (l->rows == 0) return;
    while (l->rows > 0) mend_and_leave(l, squares);
    leave_squares(l, squares);
}

/* --- tiles -------------------------------------------------------------------------------------------------------- */

enum { HIGH, MIDDLE, LOW };

#define LOAD_A(part)                                                                                                   \
    do {                                                                                                               \
        TILE_LOAD(4, a + (part) * A_PART, A_ROW);                                                                      \
        if (down > 1) TILE_LOAD(5, a + SIDE * A_ROW + (part) * A_PART, A_ROW);                                         \
    } while (0)
#define LOAD_B(part)                                                                                                   \
    do {                                                                                                               \
        TILE_LOAD(6, b + (part) * B_PART, B_ROW);                                                                      \
        if (across > 1) TILE_LOAD(7, b + (part) * B_PART + SIDE * 4, B_ROW);                                           \
    } while (0)
#define MULTIPLY()                                                                                                     \
    do {                                                                                                               \
        TILE_MADD(0, 4, 6);                                                                                            \
        if (across > 1) TILE_MADD(1, 4, 7);                                                                            \
        if (down > 1) TILE_MADD(2, 5, 6);                                                                              \
        if (down > 1 && across > 1) TILE_MADD(3, 5, 7);                                                                \
        for (int i = 0; i < pieces && beside->pack.extent > 0; i++) pack_piece(beside);                                \
    } while (0)

/* As in gemm_amx.c. Of the factors of a step one stays where it is. Between multiplications vectors have time for a
 * few pieces of rows that are packed beside them. */
static inline __attribute__((always_inline)) void body(const int down, const int across, const char *a, const char *b,
                                                       int64_t words, char *kept, bool first, const te_gemm_out *out)
{
    begin_sums(down, across, kept, first);
    soon next = soon_make(out, kept, across);
    te_gemm_leaving leaving;
    leaving.rows = out->leaving->rows;
    if (leaving.rows > 0) leaving = *out->leaving;
    __m512  squares[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    bool    leaves = leaving.rows > 0;
    int64_t steps = words / SIDE, share = (leaving.rows + steps - 1) / steps;
    te_gemm_beside *beside = out->beside;
    const int pieces = beside ? out->pieces : 0;
    for (int64_t w = 0; w < words; w += SIDE, a += ROWS * A_ROW, b += SIDE * B_ROW) {
        fetch_soon(&next);
        LOAD_A(HIGH);
        LOAD_B(LOW);
        MULTIPLY();
        LOAD_B(MIDDLE);
        MULTIPLY();
        for (int64_t i = 0; i < share && leaving.rows > 0; i++) mend_and_leave(&leaving, squares);
        LOAD_A(MIDDLE);
        MULTIPLY();
        LOAD_B(HIGH);
        MULTIPLY();
        LOAD_A(LOW);
        MULTIPLY();
        LOAD_A(HIGH);
        MULTIPLY();
    }
    if (leaves) leave_squares(&leaving, squares);
    store_sums(down, across, kept, PITCH);
    out->leaving->rows = 0;
    if (out->way == TE_GEMM_OUT_KEEP) return;
    *out->leaving = (te_gemm_leaving){.way = out->way, .rows = down * SIDE, .vectors = across, .sums = kept,
                                      .c = out->c, .row = out->row, .squares = out->squares, .origin = out->origin};
}

#define TILE_DEFINE(down, across)                                                                                      \
    static void tile_##down##x##across(const char *a, int64_t a_row, int64_t a_step, const char *b, int64_t words,     \
                                       void *kept, bool first, const te_gemm_out *out)                                 \
    {                                                                                                                  \
        (void)a_row, (void)a_step; /* of a panel */                                                                    \
        body(down, across, a, b, words, kept, first, out);                                                             \
    }
TILE_DEFINE(1, 1)
TILE_DEFINE(1, 2)
TILE_DEFINE(2, 1)
TILE_DEFINE(2, 2)

static te_gemm_tile *const tiles[][TE_GEMM_MAX_VECTORS] = {{tile_1x1, tile_1x2}, {tile_2x1, tile_2x2}};

/* Registers are loaded 14 times for 24 multiplications, so operands may come from the second-level cache, which holds
 * 1200 KiB of a's block or, where b is held, of that, beside a panel of 72 KiB of the other; what counts is that sums
 * are seldom kept. Splitting a word takes 1.2 cycles, four times as long as moving it. */
const te_gemm_kernel TE_ISA_NAME(te_gemm_kernel_f32) = {
    .mr = ROWS, .nr = COLS, .lanes = SIDE, .row_group = SIDE, .step = SIDE, .slice_words = 192,
    .unit_rows = 512, .unit_panels = 32, .chunk_bytes = 800 << 10, .held_bytes = 1200 << 10,
    .rate = 2.4, .word_cycles = 1.2, .word_bytes = PARTS * 4, .sum_bytes = 4, .k_per_word = 2,
    .rounds = true, .streams = true, .stream_squares = te_gemm_stream_squares_avx512,
    .tile = tiles, .pack_a = pack_a, .pack_b = pack_b, .enter = enter, .leave = leave, .drain = drain, .mend = mend,
    .times = 6, .pack_rest = pack_rest,
    .finish = te_gemm_finish_f32_avx512,
};
