/* gemm_amx.c - the matrix product's arithmetic on bfloat16 in a matrix unit (AMX).
 *
 * A tile register holds 16 rows of 64 bytes. One instruction adds the products of 16 rows of 16 words (pairs of
 * bfloat16, neighbours along k) of a with 16 words of 16 columns of b to 16 x 16 sums. Four registers hold the sums of
 * a tile of ours, 32 x 32, and two each its operands, so that a register that was loaded serves two multiplications:
 *
 *                   b: words 0..15 of    columns 0..15   columns 16..31
 *      a: rows  0..15, words 0..15          sums 0           sums 1
 *         rows 16..31                       sums 2           sums 3
 *
 * A panel of b is laid out as for vectors. Of a, 16 words of a row stand together: rows serve as they lie in memory,
 * and packed ones are word [w / 16][row][w % 16].
 */
#include "../gemm.h"

#include <immintrin.h>
#include <string.h>
#ifdef __linux__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "gemm_amx.h"

enum { NEAR_WORDS = 160 /* so many words of a panel of a and of b fit the first-level cache together */ };

/* --- the unit ----------------------------------------------------------------------------------------------------- */

bool te_gemm_amx_allowed(void)
{
#if defined(__linux__) && defined(SYS_arch_prctl) && !defined(TE_AMX_SOFTWARE)
    enum { OSXSAVE = 1 << 27, AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, STATE = 3 << 17 };
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (AMX_BF16 | AMX_TILE)) != (AMX_BF16 | AMX_TILE)) return false;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & STATE) == STATE && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

/* --- packing a ---------------------------------------------------------------------------------------------------- */

/* Rows that are contiguous, four at a time over all squares: lines of a square that are stored together leave the
 * caches together, and memory has more of them under way. */
static void pack_rows(const te_gemm_pack *p, int64_t squares, uint32_t *panels)
{
    enum { FOUR = 4 };
    int64_t   whole = p->k / (2 * SIDE);
    __mmask32 rest = ((__mmask32)1 << p->k % (2 * SIDE)) - 1;
    for (int line = 0; line < (p->extent + SIDE - 1) / SIDE * SIDE; line += FOUR) {
        const char *src = p->src + line * p->line_stride;
        uint32_t   *to = panels + (line / ROWS * squares * ROWS + line % ROWS) * SIDE;
        int         there = p->extent - line;
        for (int64_t w = 0; w < squares; w++, src += 4 * SIDE, to += ROWS * SIDE)
            for (int i = 0; i < FOUR; i++) {
                __mmask32 mask = i >= there ? 0 : w < whole ? (__mmask32)-1 : rest;
                _mm512_storeu_si512(to + i * SIDE, _mm512_maskz_loadu_epi16(mask, src + i * p->line_stride));
            }
    }
}

/* Eight rows that lie side by side, over 32 steps of k: every fourth of a vector takes eight steps, of which squares of
 * 8 x 8 are turned within the fourths. */
static inline void turn_eight(const char *src, int64_t next, uint32_t *to)
{
    __m512i r[8], x[8];
    for (int i = 0; i < 8; i++) {
        const char *p = src + i * next;
        r[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)p));
        r[i] = _mm512_mask_broadcast_i32x4(r[i], 0x00f0, _mm_loadu_si128((const __m128i *)(p + 8 * next)));
        r[i] = _mm512_mask_broadcast_i32x4(r[i], 0x0f00, _mm_loadu_si128((const __m128i *)(p + 16 * next)));
        r[i] = _mm512_mask_broadcast_i32x4(r[i], 0xf000, _mm_loadu_si128((const __m128i *)(p + 24 * next)));
    }
    for (int i = 0; i < 4; i++) { /* pairs of steps: of rows 0 to 3, and of rows 4 to 7 */
        x[i] = _mm512_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
        x[i + 4] = _mm512_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 8; i += 4) /* fours of them: of steps 0 to 3 in r[i] and r[i + 1], the others behind */
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi32(x[i + 2 * j], x[i + 2 * j + 1]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi32(x[i + 2 * j], x[i + 2 * j + 1]);
        }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            _mm512_storeu_si512(to + (i + 2 * j) * SIDE, _mm512_unpacklo_epi64(r[i + j], r[i + j + 2]));
            _mm512_storeu_si512(to + (i + 2 * j + 1) * SIDE, _mm512_unpackhi_epi64(r[i + j], r[i + j + 2]));
        }
}

/* Rows side by side. Where a square is not whole, two steps of k are a word of each of 16 rows, and 16 such vectors are
 * turned. */
static void pack_across(const square *s, uint32_t *to)
{
    __m512i   v[SIDE];
    __mmask16 there = (__mmask16)(s->lines >= SIDE ? 0xffff : (1 << s->lines) - 1);
    if (s->k == 2 * SIDE && s->lines == SIDE) {
        turn_eight(s->src, s->k_stride, to);
        turn_eight(s->src + 16, s->k_stride, to + 8 * SIDE);
        return;
    }
    for (int w = 0; w < SIDE; w++) {
        const char *src = s->src + 2 * w * s->k_stride;
        __m512i even = _mm512_setzero_si512(), odd = even;
        if (2 * w < s->k) even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, src));
        if (2 * w + 1 < s->k) odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, src + s->k_stride));
        v[w] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
    }
    te_tile_turn(v);
    memcpy(to, v, sizeof v);
}

static void pack_scattered(const square *s, uint32_t *to)
{
    uint16_t element[SIDE][2 * SIDE] = {0};
    for (int i = 0; i < s->lines; i++)
        for (int j = 0; j < s->k && j < 2 * SIDE; j++)
            memcpy(&element[i][j], s->src + i * s->line_stride + j * s->k_stride, 2);
    memcpy(to, element, sizeof element);
}

/* Square `w` along k of the rows from `line` on, which lie so that squares beside each other share cache lines. */
static inline void pack_square(const te_gemm_pack *p, int line, int64_t w, uint32_t *to)
{
    square s = {.src = p->src + line * p->line_stride + w * 2 * SIDE * p->k_stride,
                .line_stride = p->line_stride, .k_stride = p->k_stride, .lines = p->extent - line};
    int64_t left = p->k - w * 2 * SIDE;
    s.k = left < 2 * SIDE ? (int)left : 2 * SIDE;
    if (s.lines > SIDE) s.lines = SIDE;
    if (s.line_stride == 2) pack_across(&s, to);
    else pack_scattered(&s, to);
}

static void pack(const te_gemm_pack *p, void *panels)
{
    int64_t squares = (p->k + 2 * SIDE - 1) / (2 * SIDE), lines = (p->extent + SIDE - 1) / SIDE;
    if (p->k_stride == 2) {
        pack_rows(p, squares, panels);
        return;
    }
    for (int64_t i = 0; i < squares * lines; i++) {
        int     line = (int)(i % lines) * SIDE;
        int64_t w = i / lines;
        /* of the panel, then of its half */
        uint32_t *to = (uint32_t *)panels + ((line / ROWS * squares + w) * ROWS + line % ROWS) * SIDE;
        pack_square(p, line, w, to);
    }
}

/* --- tiles -------------------------------------------------------------------------------------------------------- */

static void drain(te_gemm_leaving *l)
{
    __m512 squares[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    if (l->rows == 0) return;
    while (l->rows > 0) leave_row(l, squares);
    leave_squares(l, squares);
}

#define LOAD(passes, t, from, pitch)                                                                                   \
    do {                                                                                                               \
        if (passes) TILE_PASS(t, from, pitch);                                                                         \
        else TILE_LOAD(t, from, pitch);                                                                                \
    } while (0)

/* The number of register rows and columns is a constant wherever this is inlined. */
static inline __attribute__((always_inline)) void body(const int down, const int across, const char *a, int64_t a_row,
                                                       int64_t a_step, const char *b, int64_t words, char *kept,
                                                       bool first, const te_gemm_out *out)
{
    begin_sums(down, across, kept, first);
    soon next = soon_make(out, kept, across);
    te_gemm_leaving leaving = *out->leaving;
    __m512  squares[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    bool    leaves = leaving.rows > 0, b_passes = out->b_passes, a_passes = !b_passes && words > NEAR_WORDS;
    int64_t steps = words / SIDE, share = (leaving.rows + steps - 1) / steps;
    for (int64_t w = 0; w < words; w += SIDE, a += a_step, b += SIDE * PITCH) {
        fetch_soon(&next);
        LOAD(a_passes, 4, a, a_row);
        LOAD(b_passes, 6, b, PITCH);
        TILE_MADD(0, 4, 6);
        if (across > 1) LOAD(b_passes, 7, b + 64, PITCH);
        if (across > 1) TILE_MADD(1, 4, 7);
        for (int64_t i = 0; i < share && leaving.rows > 0; i++) leave_row(&leaving, squares);
        if (down == 1) continue;
        LOAD(a_passes, 5, a + SIDE * a_row, a_row);
        TILE_MADD(2, 5, 6);
        if (across > 1) TILE_MADD(3, 5, 7);
    }
    if (leaves) leave_squares(&leaving, squares);
    bool  direct = out->way == TE_GEMM_OUT_STORE;
    char *to = direct ? out->c : kept;
    int64_t pitch = direct ? out->row : PITCH;
    store_sums(down, across, to, pitch);
    bool stays = direct || out->way == TE_GEMM_OUT_KEEP;
    *out->leaving = (te_gemm_leaving){.way = out->way, .rows = stays ? 0 : down * SIDE, .vectors = across, .sums = kept,
                                      .c = out->c, .row = out->row, .squares = out->squares};
}

#define TILE_DEFINE(down, across)                                                                                      \
    static void tile_##down##x##across(const char *a, int64_t a_row, int64_t a_step, const char *b, int64_t words,     \
                                       void *kept, bool first, const te_gemm_out *out)                                 \
    {                                                                                                                  \
        body(down, across, a, a_row, a_step, b, words, kept, first, out);                                              \
    }
TILE_DEFINE(1, 1)
TILE_DEFINE(1, 2)
TILE_DEFINE(2, 1)
TILE_DEFINE(2, 2)

static te_gemm_tile *const tiles[][TE_GEMM_MAX_VECTORS] = {{tile_1x1, tile_1x2}, {tile_2x1, tile_2x2}};

/* With a slice of 256 words a panel of b is 32 KiB of the 48 of a first-level cache, past which a is loaded: a register
 * of it serves 32 columns and is not seen again before the next panel; what panels are packed from passes too. Products
 * of a register take 16 cycles, so that the second-level cache has to give 32 bytes a cycle, half of what it can: it
 * shall hold what of a a unit has, 800 KiB, and the sums of one panel. A word of b costs up to a third of a cycle to
 * pack, and serves 16 x 16 multiplications in one: hence blocks of more rows than with vectors. Where it is a that is
 * near, the second-level cache holds all of b, 1200 KiB. */
const te_gemm_kernel TE_ISA_NAME(te_gemm_kernel) = {
    .mr = ROWS, .nr = COLS, .lanes = SIDE, .row_group = SIDE, .step = SIDE, .slice_words = 256,
    .unit_rows = 512, .unit_panels = 32, .chunk_bytes = 800 << 10, .held_bytes = 1200 << 10, .rate = 16,
    .word_bytes = 4, .sum_bytes = 4, .k_per_word = 2, .rounds = true, .streams = true,
    .stream_squares = te_gemm_stream_squares_avx512,
    .tile = tiles, .pack_a = pack, .enter = enter, .leave = leave, .drain = drain,
    .finish = te_gemm_finish_f32_avx512,
};
