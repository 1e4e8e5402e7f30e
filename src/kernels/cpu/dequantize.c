/* dequantize.c - the values that a quantized side stands for, tile by tile. */
#include "quantize_tile.h"

static float element_at(const te_quantizer *q, const te_quantized_side *s, int64_t i, int64_t j)
{
    if (q->element == TE_E2M1) return te_e2m1_to_f32((uint8_t)(s->data[i * s->row_stride + j / 2] >> (j % 2 * 4) & 15));
    uint8_t code = s->data[i * s->row_stride + j * s->col_stride];
    return q->element == TE_E4M3 ? te_f8e4m3_to_f32(code) : te_f8e5m2_to_f32(code);
}

static float value_at(const te_quantizer *q, const te_quantized_side *s, int64_t i, int64_t j)
{
    float x = element_at(q, s, i, j);
    if (!q->block_rows) return x * *(const float *)s->scale_inv;
    int64_t at = te_scale_at(q, s, i, j);
    if (q->scale == TE_SCALE_F32) return x * ((const float *)s->scale_inv)[at];
    uint8_t code = ((const uint8_t *)s->scale_inv)[at];
    if (q->scale == TE_SCALE_E8M0) return x * te_e8m0_to_f32(code);
    return x * te_f8e4m3_to_f32(code) * te_two_level_decode(te_side_amax(s, i), q->scale_max);
}

static void decode_tile(const te_quantizer *q, const te_quantized_side *s, float (*tile)[TE_TILE], int64_t row,
                        int64_t col)
{
    int rows = te_tile_extent(s->rows, row), cols = te_tile_extent(s->cols, col);
    if (rows < TE_TILE || cols < TE_TILE) memset(tile, 0, sizeof(float[TE_TILE][TE_TILE]));
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) tile[i][j] = value_at(q, s, row + i, col + j);
}

static void restore(const te_quantize_job *job, te_lane *l, int64_t row, int64_t col)
{
    decode_tile(job->quantizer, &job->side[0], l->tile, row, col);
    te_tile_store(job, l->tile, row, col);
}

static void restore_across(const te_quantize_job *job, te_lane *l, int64_t row, int64_t col)
{
    decode_tile(job->quantizer, &job->side[1], l->across, col, row);
    if (job->quantizer->hadamard) te_tile_transform_back(l->across);
    te_tile_transpose(l->tile, l->across);
    te_tile_store(job, l->tile, row, col);
}

te_status te_cpu_dequantize(te_exec *exec, const te_quantize_job *job, int side)
{
    float amax[2];
    return te_tiles_visit(exec, job, side ? restore_across : restore, amax);
}
