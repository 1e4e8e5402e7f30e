/* tiles.h - the registers of a matrix unit (AMX): what its instructions are called here, and how they are configured.
 *
 * A register holds 16 rows of 64 bytes. TILE_MADD adds the products of 16 rows of 16 words (pairs of bfloat16,
 * neighbours along k) of a with 16 words of 16 columns of b to 16 x 16 sums. TILE_PASS loads what will not be needed
 * again soon and shall not displace what is in the first-level cache.
 *
 * Where a test defines TE_AMX_SOFTWARE, that header stands for the instructions (Intel SDM, volume 2: TDPBF16PS).
 */
#ifndef TE_KERNELS_CPU_TILES_H
#define TE_KERNELS_CPU_TILES_H

#include "interleave.h"

#include <immintrin.h>
#include <stdint.h>

#ifdef TE_AMX_SOFTWARE
#include TE_AMX_SOFTWARE
#else
#define TILES_CONFIGURE(config)   _tile_loadconfig(config)
#define TILES_RELEASE()           _tile_release()
#define TILE_ZERO(t)              _tile_zero(t)
#define TILE_LOAD(t, from, pitch) _tile_loadd(t, from, pitch)
#define TILE_PASS(t, from, pitch) _tile_stream_loadd(t, from, pitch)
#define TILE_STORE(t, to, pitch)  _tile_stored(t, to, pitch)
#define TILE_MADD(sums, a, b)     _tile_dpbf16ps(sums, a, b)
#endif

enum { TE_TILE_SIDE = 16 };

/* The instructions say nothing of the memory they read; what was written before shall be there. */
#define MEMORY_IS_WRITTEN() __asm__ volatile("" ::: "memory")

/* Palette 1, all eight registers 16 rows of 64 bytes. */
static inline void te_tiles_enter(void)
{
    _Alignas(64) struct {
        uint8_t  palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t  rows[16];
    } config = {.palette = 1};
    for (int t = 0; t < 8; t++) config.row_bytes[t] = 64, config.rows[t] = TE_TILE_SIDE;
    MEMORY_IS_WRITTEN();
    TILES_CONFIGURE(&config);
}

/* Registers in use are saved whenever threads are switched. */
static inline void te_tiles_leave(void) { TILES_RELEASE(); }

/* Words of x and y in turns: of their first eight, and of their last. */
#define TE_LOW_WORDS(x, y)  _mm512_permutex2var_epi32(x, te_in_turns(0), y)
#define TE_HIGH_WORDS(x, y) _mm512_permutex2var_epi32(x, te_in_turns(8), y)

static inline __attribute__((always_inline)) __m512i te_in_turns(int first)
{
    __m512i turns = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_add_epi32(turns, _mm512_set1_epi32(first));
}

/* 16 x 16 words turned. */
TE_DEFINE_INTERLEAVE(te_tile_turn, __m512i, TE_TILE_SIDE, TE_LOW_WORDS, TE_HIGH_WORDS)

#endif
