/* quantize_tile.c - reading, writing and transforming tiles, and going over them. */
#include "quantize_tile.h"

#include <omp.h>

static void store(void *target, te_dtype dtype, int64_t i, float x)
{
    if (dtype == TE_BF16)
        ((uint16_t *)target)[i] = te_f32_to_bf16(x);
    else if (dtype == TE_F16)
        ((uint16_t *)target)[i] = te_f32_to_f16(x);
    else
        ((float *)target)[i] = x;
}

void te_tile_load_row(const te_quantize_job *job, int64_t at, int n, float *x)
{
    const uint16_t *narrow = job->source;
    if (job->dtype == TE_F32)
        memcpy(x, (const float *)job->source + at, (size_t)n * sizeof *x);
    else if (job->dtype == TE_BF16)
        for (int i = 0; i < n; i++) x[i] = te_bf16_to_f32(narrow[at + i]);
    else
        for (int i = 0; i < n; i++) x[i] = te_f16_to_f32(narrow[at + i]);
}

void te_tile_load(const te_quantize_job *job, te_lane *l, int64_t row, int64_t col)
{
    int rows = te_tile_extent(job->rows, row), cols = te_tile_extent(job->cols, col);
    if (rows < TE_TILE || cols < TE_TILE) memset(l->tile, 0, sizeof l->tile);
    for (int i = 0; i < rows; i++) {
        te_tile_load_row(job, (row + i) * job->source_stride + col, cols, l->tile[i]);
    }
}

void te_tile_store(const te_quantize_job *job, float (*tile)[TE_TILE], int64_t row, int64_t col)
{
    int rows = te_tile_extent(job->rows, row), cols = te_tile_extent(job->cols, col);
    for (int i = 0; i < rows; i++) {
        int64_t at = (row + i) * job->source_stride + col;
        for (int j = 0; j < cols; j++) store(job->source, job->dtype, at + j, tile[i][j]);
    }
}

void te_tile_transpose(float (*to)[TE_TILE], float (*from)[TE_TILE])
{
    for (int i = 0; i < TE_TILE; i++)
        for (int j = 0; j < TE_TILE; j++) to[i][j] = from[j][i];
}

void te_tile_transform(float (*tile)[TE_TILE], te_dtype dtype)
{
    for (int i = 0; i < TE_TILE; i++) {
        for (int j = 0; j < TE_TILE; j += TE_GROUP) {
            te_hadamard_signs(&tile[i][j]);
            te_hadamard16(&tile[i][j]);
        }
        for (int j = 0; j < TE_TILE && dtype != TE_F32; j++) {
            float x = tile[i][j];
            tile[i][j] = dtype == TE_BF16 ? te_bf16_to_f32(te_f32_to_bf16(x)) : te_f16_to_f32(te_f32_to_f16(x));
        }
    }
}

void te_tile_transform_back(float (*tile)[TE_TILE])
{
    for (int i = 0; i < TE_TILE; i++) {
        for (int j = 0; j < TE_TILE; j += TE_GROUP) {
            te_hadamard16(&tile[i][j]);
            te_hadamard_signs(&tile[i][j]);
        }
    }
}

/* Magnitudes compare as integers do, which vectorizes. */
float te_row_amax(const float *x, int n, float amax)
{
    int32_t most = (int32_t)te_f32_bits(amax);
    for (int i = 0; i < n; i++) {
        int32_t size = (int32_t)(te_f32_bits(x[i]) & 0x7fffffffu);
        size = size > 0x7f800000 ? 0 : size;
        most = size > most ? size : most;
    }
    return te_f32_from_bits((uint32_t)most);
}

float te_tile_amax(float (*tile)[TE_TILE], int row, int col, int rows, int cols)
{
    float amax = 0;
    for (int i = row; i < row + rows; i++) amax = te_row_amax(&tile[i][col], cols, amax);
    return amax;
}

te_status te_tiles_visit(te_exec *exec, const te_quantize_job *job, te_visit *v, float amax[2])
{
    int64_t across = (job->cols + TE_TILE - 1) / TE_TILE, tiles = (job->rows + TE_TILE - 1) / TE_TILE * across;
    int threads = tiles < exec->threads ? (int)tiles : exec->threads;
    amax[0] = amax[1] = 0;
    if (job->rows == 0 || job->cols == 0) return TE_OK;
    if (threads < 1) threads = 1;
    te_lane *lanes = exec->scratch(exec, (size_t)threads * sizeof *lanes);
    if (!lanes) return TE_ERROR_MEMORY;
    for (int i = 0; i < threads; i++) lanes[i].amax[0] = lanes[i].amax[1] = 0;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t t = 0; t < tiles; t++)
        v(job, &lanes[omp_get_thread_num()], t / across * TE_TILE, t % across * TE_TILE);
    for (int i = 0; i < threads; i++)
        for (int s = 0; s < 2; s++) amax[s] = te_amax(amax[s], lanes[i].amax[s]);
    exec->scratch_free(exec, lanes);
    return TE_OK;
}
