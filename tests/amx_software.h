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

typedef float    amx_floats __attribute__((vector_size(64)));
typedef uint32_t amx_words __attribute__((vector_size(64)));

/* Checks of single accesses would take most of a test's time here. */
#define AMX_UNWATCHED __attribute__((no_sanitize("address", "undefined")))

/* Subnormal ones become 0 of the same sign. */
AMX_UNWATCHED static inline amx_words amx_flush(amx_words bits)
{
    amx_words normal = (amx_words)((bits & 0x7f800000u) != 0);
    return bits & (normal | 0x80000000u);
}

/* x * y + z in each of them, rounded once. */
AMX_UNWATCHED static inline amx_words amx_fma(amx_words x, amx_words y, amx_words z)
{
    amx_floats a = (amx_floats)x, b = (amx_floats)y, c = (amx_floats)z;
    for (int j = 0; j < 16; j++) c[j] = __builtin_fmaf(a[j], b[j], c[j]);
    return amx_flush((amx_words)c);
}

/* TDPBF16PS: products of the even elements and of the odd ones are summed apart, each by fused multiplications and
 * additions, and then added to what is there. A word holds one of each; subnormal ones count as 0. */
AMX_UNWATCHED static void amx_add_products(int sums, int a, int b)
{
    amx_words words, even_b[16], odd_b[16];
    for (int k = 0; k < amx.rows[b]; k++) {
        memcpy(&words, amx.tile[b].bytes[k], sizeof words);
        even_b[k] = amx_flush(words << 16), odd_b[k] = amx_flush(words & 0xffff0000u);
    }
    for (int i = 0; i < amx.rows[sums]; i++) {
        amx_words even = {0}, odd = {0}, sum = {0};
        for (int k = 0; k < amx.rows[b]; k++) {
            uint32_t word;
            memcpy(&word, amx.tile[a].bytes[i] + 4 * k, sizeof word);
            even = amx_fma(amx_flush((amx_words){0} + (word << 16)), even_b[k], even);
            odd = amx_fma(amx_flush((amx_words){0} + (word & 0xffff0000u)), odd_b[k], odd);
        }
        memcpy(&sum, amx.tile[sums].bytes[i], (size_t)amx.row_bytes[sums]);
        even = amx_flush((amx_words)((amx_floats)even + (amx_floats)odd));
        sum = amx_flush((amx_words)((amx_floats)amx_flush(sum) + (amx_floats)even));
        memcpy(amx.tile[sums].bytes[i], &sum, (size_t)amx.row_bytes[sums]);
    }
}

static void amx_madd(int sums, int a, int b)
{
    amx_require(amx.rows[sums] == amx.rows[a] && amx.rows[b] == amx.row_bytes[a] / 4);
    amx_require(amx.row_bytes[sums] == amx.row_bytes[b] && amx.rows[sums] > 0);
    amx_add_products(sums, a, b);
}

#define TILES_CONFIGURE(config)   amx_configure(config)
#define TILES_RELEASE()           amx_release()
#define TILE_ZERO(t)              amx_zero(t)
#define TILE_LOAD(t, from, pitch) amx_load(t, from, pitch)
#define TILE_PASS(t, from, pitch) amx_load(t, from, pitch)
#define TILE_STORE(t, to, pitch)  amx_store(t, to, pitch)
#define TILE_MADD(sums, a, b)     amx_madd(sums, a, b)

#endif
