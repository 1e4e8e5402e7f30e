/* amx_software.h - the tile instructions that gemm_amx.c uses, in C: for machines that have no matrix unit.
 *
 * Registers belong to a thread. What the processor refuses ends the test: a register that was not configured, or one
 * used after it was released.
 */
#ifndef TE_TESTS_AMX_SOFTWARE_H
#define TE_TESTS_AMX_SOFTWARE_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct amx_tile {
    uint8_t bytes[16][64];
} amx_tile;

static _Thread_local struct {
    amx_tile tile[8];
    int      rows[8], row_bytes[8]; /* 0: not configured */
} amx;

static void amx_require(int good)
{
    if (!good) abort();
}

static void amx_configure(const void *from)
{
    const uint8_t *config = from;
    amx_require(config[0] == 1 && config[1] == 0);
    memset(&amx, 0, sizeof amx);
    for (int t = 0; t < 8; t++) {
        uint16_t bytes;
        memcpy(&bytes, config + 16 + 2 * t, sizeof bytes);
        amx.row_bytes[t] = bytes, amx.rows[t] = config[48 + t];
        amx_require(bytes <= 64 && amx.rows[t] <= 16);
    }
}

static void amx_release(void) { memset(&amx, 0, sizeof amx); }

static void amx_zero(int t)
{
    amx_require(amx.rows[t] > 0);
    memset(&amx.tile[t], 0, sizeof amx.tile[t]);
}

static void amx_load(int t, const void *from, int64_t pitch)
{
    amx_zero(t);
    const char *row = from;
    for (int r = 0; r < amx.rows[t]; r++, row += pitch) memcpy(amx.tile[t].bytes[r], row, amx.row_bytes[t]);
}

static void amx_store(int t, void *to, int64_t pitch)
{
    amx_require(amx.rows[t] > 0);
    for (int r = 0; r < amx.rows[t]; r++) memcpy((char *)to + r * pitch, amx.tile[t].bytes[r], amx.row_bytes[t]);
}

static float amx_flush(float x)
{
    return x != 0 && __builtin_fabsf(x) < 0x1p-126f ? 0 * x : x;
}

/* Element `i` of a row of bfloat16; subnormal ones count as 0. */
static float amx_bf16(const uint8_t *row, int i)
{
    uint16_t half;
    memcpy(&half, row + 2 * i, sizeof half);
    uint32_t word = (uint32_t)half << 16;
    float    x;
    memcpy(&x, &word, sizeof x);
    return amx_flush(x);
}

/* TDPBF16PS: products of the even elements and of the odd ones are summed apart, each by fused multiplications and
 * additions, and then added to what is there. */
static void amx_madd(int sums, int a, int b)
{
    amx_require(amx.rows[sums] == amx.rows[a] && amx.rows[b] == amx.row_bytes[a] / 4);
    amx_require(amx.row_bytes[sums] == amx.row_bytes[b] && amx.rows[sums] > 0);
    for (int i = 0; i < amx.rows[sums]; i++)
        for (int j = 0; j < amx.row_bytes[sums] / 4; j++) {
            float even = 0, odd = 0, sum;
            for (int k = 0; k < amx.rows[b]; k++) {
                const uint8_t *x = amx.tile[a].bytes[i], *y = amx.tile[b].bytes[k];
                even = amx_flush(__builtin_fmaf(amx_bf16(x, 2 * k), amx_bf16(y, 2 * j), even));
                odd = amx_flush(__builtin_fmaf(amx_bf16(x, 2 * k + 1), amx_bf16(y, 2 * j + 1), odd));
            }
            memcpy(&sum, amx.tile[sums].bytes[i] + 4 * j, sizeof sum);
            sum = amx_flush(amx_flush(sum) + amx_flush(even + odd));
            memcpy(amx.tile[sums].bytes[i] + 4 * j, &sum, sizeof sum);
        }
}

#define TILES_CONFIGURE(config)   amx_configure(config)
#define TILES_RELEASE()           amx_release()
#define TILE_ZERO(t)              amx_zero(t)
#define TILE_LOAD(t, from, pitch) amx_load(t, from, pitch)
#define TILE_PASS(t, from, pitch) amx_load(t, from, pitch)
#define TILE_STORE(t, to, pitch)  amx_store(t, to, pitch)
#define TILE_MADD(sums, a, b)     amx_madd(sums, a, b)

#endif
