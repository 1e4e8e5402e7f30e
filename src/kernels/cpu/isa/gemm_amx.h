/* gemm_amx.h - what the matrix product's kernels for a matrix unit share: a tile's size, how its sums leave for c while
 * the next one is multiplied, and what it asks for meanwhile.
 */
#ifndef TE_KERNELS_CPU_GEMM_AMX_H
#define TE_KERNELS_CPU_GEMM_AMX_H

#include "../gemm.h"
#include "tiles.h"

#include <string.h>

enum {
    SIDE = TE_TILE_SIDE,
    ROWS = 2 * SIDE,
    COLS = 2 * SIDE,
    PITCH = COLS * 4 /* bytes from row to row of sums, and of a register's words of b's panel */
};

static void enter(void) { te_tiles_enter(); }

static void leave(void)
{
    te_gemm_streamed_avx512();
    te_tiles_leave();
}

/* A register's 16 lines by 16 words: `lines` of them and `k` elements of these are there, the rest becomes 0. */
typedef struct square {
    const char *src;
    int64_t     line_stride, k_stride;
    int         lines, k;
} square;

/* --- sums in registers 0 to 3 ------------------------------------------------------------------------------------- */

/* The number of register rows and columns is a constant wherever these are inlined. */
static inline __attribute__((always_inline)) void begin_sums(const int down, const int across, const char *kept,
                                                             bool first)
{
    MEMORY_IS_WRITTEN();
    if (first) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    } else {
        TILE_LOAD(0, kept, PITCH);
        if (across > 1) TILE_LOAD(1, kept + 64, PITCH);
        if (down > 1) TILE_LOAD(2, kept + SIDE * PITCH, PITCH);
        if (down > 1 && across > 1) TILE_LOAD(3, kept + SIDE * PITCH + 64, PITCH);
    }
}

static inline __attribute__((always_inline)) void store_sums(const int down, const int across, char *to, int64_t pitch)
{
    TILE_STORE(0, to, pitch);
    if (across > 1) TILE_STORE(1, to + 64, pitch);
    if (down > 1) TILE_STORE(2, to + SIDE * pitch, pitch);
    if (down > 1 && across > 1) TILE_STORE(3, to + SIDE * pitch + 64, pitch);
}

/* --- sums on their way to c --------------------------------------------------------------------------------------- */

/* A row of them; of those that stream, squares are added. Rounded ones are never subnormal. */
static inline __attribute__((always_inline)) void leave_row(te_gemm_leaving *l, __m512 squares[2])
{
    bool   two = l->vectors > 1;
    float *c = (float *)(void *)l->c;
    __m512 x = _mm512_loadu_ps(l->sums), y = two ? _mm512_loadu_ps(l->sums + 64) : _mm512_setzero_ps();
    if (l->way == TE_GEMM_OUT_ROUND || l->way == TE_GEMM_OUT_ROUND_STREAM) {
        __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(y, x);
        if (two && l->way == TE_GEMM_OUT_ROUND_STREAM) _mm512_stream_si512((__m512i *)(void *)c, rounded);
        else if (two) _mm512_storeu_si512(c, rounded);
        else _mm256_storeu_si256((__m256i *)(void *)c, _mm512_castsi512_si256(rounded));
    } else if (l->way == TE_GEMM_OUT_STREAM) {
        _mm512_stream_ps(c, x);
        if (two) _mm512_stream_ps(c + SIDE, y);
        squares[0] = _mm512_fmadd_ps(x, x, squares[0]);
        squares[1] = _mm512_fmadd_ps(y, y, squares[1]);
    } else {
        bool adds = l->way == TE_GEMM_OUT_ADD;
        _mm512_storeu_ps(c, adds ? _mm512_add_ps(_mm512_loadu_ps(c), x) : x);
        if (two) _mm512_storeu_ps(c + SIDE, adds ? _mm512_add_ps(_mm512_loadu_ps(c + SIDE), y) : y);
    }
    l->rows--;
    l->sums += PITCH;
    l->c += l->row;
}

static inline void leave_squares(const te_gemm_leaving *l, const __m512 squares[2])
{
    for (int v = 0; l->squares && v < l->vectors; v++) l->squares[v] = _mm512_reduce_add_ps(squares[v]);
}

/* --- what is needed soon ------------------------------------------------------------------------------------------ */

/* Memory that a tile asks for while it multiplies, some lines in each step, so that nobody waits for a burst of them:
 * what is packed next; the sums of the next tile where they are kept; and c where it will be written. */
typedef struct soon {
    te_gemm_ahead *ahead;
    const char    *sums;
    char          *c;
    int64_t        pitch;
    int            lines, sums_lines, c_rows, c_lines; /* in a step */
} soon;

static inline soon soon_make(const te_gemm_out *out, const char *kept, int across)
{
    soon s = {.ahead = out->ahead, .lines = out->lines, .sums = kept + ROWS * PITCH, .sums_lines = out->sums,
              .c = out->c, .pitch = out->row, .c_rows = out->rows};
    if (out->way == TE_GEMM_OUT_STREAM || out->way == TE_GEMM_OUT_ROUND_STREAM) s.c_rows = 0;
    s.c_lines = across * (int)out->vector > 64 ? 2 : 1;
    return s;
}

static inline void fetch_soon(soon *s)
{
    te_gemm_ask(s->ahead, s->lines);
    for (int i = 0; i < s->sums_lines; i++, s->sums += 64) __builtin_prefetch(s->sums, 1, 3);
    for (int i = 0; i < s->c_rows; i++, s->c += s->pitch)
        for (int l = 0; l < s->c_lines; l++) __builtin_prefetch(s->c + 64 * l, 1, 3);
}

#endif
