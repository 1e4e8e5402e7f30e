/* quantize_tile.h - tiles of 128 x 128 float32 values between a matrix and its quantized sides.
 *
 * Shared by quantize.c and dequantize.c. Tiles have nothing in common but maxima, so no result depends on the order or
 * the number of threads in which they are visited.
 */
#ifndef TE_KERNELS_QUANTIZE_TILE_H
#define TE_KERNELS_QUANTIZE_TILE_H

#include "../quantize.h"
#include "cpu.h"

enum { TE_TILE = 128, TE_GROUP = 16 };

/* What a thread works in. */
typedef struct te_lane {
    float tile[TE_TILE][TE_TILE], across[TE_TILE][TE_TILE]; /* as in the source, and transposed */
    float amax[2];
} te_lane;

typedef void te_visit(const te_quantize_job *job, te_lane *l, int64_t row, int64_t col);

static inline int te_tile_extent(int64_t total, int64_t first)
{
    return (int)(total - first < TE_TILE ? total - first : TE_TILE);
}

/* The place of the block's factor; a replicated one stands once per row. */
static inline int64_t te_scale_at(const te_quantizer *q, const te_quantized_side *side, int64_t row, int64_t col)
{
    int64_t i = q->replicated ? row : row / q->block_rows;
    return i * side->scale_row_stride + col / q->block_cols * side->scale_col_stride;
}

static inline float te_side_amax(const te_quantized_side *side, int64_t row)
{
    return side->amax[row * side->amax_stride];
}

/* Visits every tile of the matrix. Maxima over the lanes come back in amax. */
te_status te_tiles_visit(te_exec *exec, const te_quantize_job *job, te_visit *v, float amax[2]);

/* Elements at … at + n - 1 of the source as float32. */
void te_tile_load_row(const te_quantize_job *job, int64_t at, int n, float *x);
/* The tile at row, col of the source, with zeros beyond its edges; and back. */
void te_tile_load(const te_quantize_job *job, te_lane *l, int64_t row, int64_t col);
void te_tile_store(const te_quantize_job *job, float (*tile)[TE_TILE], int64_t row, int64_t col);
void te_tile_transpose(float (*to)[TE_TILE], float (*from)[TE_TILE]);
/* The Hadamard transform along the rows, rounded to the source's dtype as the unfused graph would; and back. */
void te_tile_transform(float (*tile)[TE_TILE], te_dtype dtype);
void te_tile_transform_back(float (*tile)[TE_TILE]);
/* The largest magnitude of n elements, or amax; a NaN is passed over. */
float te_row_amax(const float *x, int n, float amax);
float te_tile_amax(float (*tile)[TE_TILE], int row, int col, int rows, int cols);

#endif
