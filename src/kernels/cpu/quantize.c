/* quantize.c - quantizing tile by tile.
 *
 * A tile is read once into float32. Side 0 is made from its rows, side 1 by the same code from the transposed tile.
 * Where a factor of the whole tensor is wanted, an earlier pass over the tiles takes the amaxes.
 */
#include "../philox.h"
#include "quantize_tile.h"

/* --- codes ------------------------------------------------------------------------------------------------------ */

/* A block of a tile and where it goes. */
typedef struct block {
    const te_quantizer *q;
    const te_quantized_side *side;
    float (*tile)[TE_TILE];
    int row, col, rows, cols;     /* in the tile; rows and cols of the whole block */
    int64_t first_row, first_col; /* of the block, in the side's matrix */
} block;

static int block_rows_inside(const block *b)
{
    int64_t left = b->side->rows - b->first_row;
    return left < b->rows ? (int)left : b->rows;
}

static int block_cols_inside(const block *b)
{
    int64_t left = b->side->cols - b->first_col;
    return left < b->cols ? (int)left : b->cols;
}

static void encode_bytes(const block *b, float multiplier)
{
    int rows = block_rows_inside(b), cols = block_cols_inside(b);
    int64_t step = b->side->col_stride;
    uint8_t codes[TE_TILE];
    for (int i = 0; i < rows; i++) {
        const float *x = &b->tile[b->row + i][b->col];
        uint8_t *to = b->side->data + (b->first_row + i) * b->side->row_stride + b->first_col * step;
        if (b->q->element == TE_E4M3)
            for (int j = 0; j < cols; j++) codes[j] = te_f32_to_f8e4m3(x[j] * multiplier);
        else
            for (int j = 0; j < cols; j++) codes[j] = te_f32_to_f8e5m2(x[j] * multiplier);
        if (step == 1) memcpy(to, codes, (size_t)cols);
        for (int j = 0; j < cols && step != 1; j++) to[j * step] = codes[j];
    }
}

/* Codes of one row of the block. */
static void encode_nibbles(const block *b, int i, float multiplier, uint8_t *codes)
{
    const float *x = &b->tile[b->row + i][b->col];
    if (!b->q->stochastic) {
        for (int j = 0; j < b->cols; j++) codes[j] = te_f32_to_e2m1(x[j] * multiplier);
        return;
    }
    int64_t across = (b->side->cols + TE_GROUP - 1) / TE_GROUP;
    for (int j = 0; j < b->cols; j += TE_GROUP) {
        te_philox_words w =
            te_rng_group(b->side->rng, (uint64_t)((b->first_row + i) * across + (b->first_col + j) / TE_GROUP));
        for (int k = 0; k < TE_GROUP; k++)
            codes[j + k] = te_f32_to_e2m1_stochastic(x[j + k] * multiplier, w.word[k / 4] >> k % 4 * 8 & 255u);
    }
}

static void encode_pairs(const block *b, float multiplier)
{
    int rows = block_rows_inside(b), cols = block_cols_inside(b);
    uint8_t codes[TE_TILE];
    for (int i = 0; i < rows; i++) {
        uint8_t *to = b->side->data + (b->first_row + i) * b->side->row_stride + b->first_col / 2;
        encode_nibbles(b, i, multiplier, codes);
        for (int j = 0; j < cols; j += 2) to[j / 2] = (uint8_t)(codes[j] | codes[j + 1] << 4);
    }
}

static void encode(const block *b, float multiplier)
{
    if (b->q->element == TE_E2M1)
        encode_pairs(b, multiplier);
    else
        encode_bytes(b, multiplier);
}

/* --- blocks ----------------------------------------------------------------------------------------------------- */

static void put_code(const block *b, uint8_t code)
{
    int rows = b->q->replicated ? block_rows_inside(b) : 1;
    for (int i = 0; i < rows; i++)
        ((uint8_t *)b->side->scale_inv)[te_scale_at(b->q, b->side, b->first_row + i, b->first_col)] = code;
}

static void put_factor(const block *b, float scale_inv)
{
    int rows = b->q->replicated ? block_rows_inside(b) : 1;
    for (int i = 0; i < rows; i++)
        ((float *)b->side->scale_inv)[te_scale_at(b->q, b->side, b->first_row + i, b->first_col)] = scale_inv;
}

/* Summed error of the block under a factor, absolute or squared: rows from left to right, then halves of the rows. */
static float block_error(const block *b, uint8_t code, float amax)
{
    float multiplier = te_two_level_multiplier(code, te_two_level_encode(amax, b->q->scale_max));
    float factor = te_f8e4m3_to_f32(code), sums[TE_TILE] = {0};
    for (int i = 0; i < b->rows; i++) {
        for (int j = 0; j < b->cols; j++) {
            float x = b->tile[b->row + i][b->col + j];
            float error = te_e2m1_to_f32(te_f32_to_e2m1(x * multiplier)) * factor * amax / (6.0f * b->q->scale_max) - x;
            sums[i] +=
                b->q->four_over_six == TE_46_MSE ? error * error : te_f32_from_bits(te_f32_bits(error) & 0x7fffffffu);
        }
    }
    for (int half = b->rows / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

static void two_level_block(const block *b, float amax)
{
    float tensor_amax = te_side_amax(b->side, b->first_row);
    float encode_factor = te_two_level_encode(tensor_amax, b->q->scale_max);
    uint8_t code = te_two_level_block(amax, encode_factor);
    if (b->q->four_over_six != TE_46_NONE) {
        uint8_t four = te_two_level_candidate(amax, encode_factor, 1.5f);
        code = te_two_level_candidate(amax, encode_factor, 1.0f);
        if (block_error(b, four, tensor_amax) < block_error(b, code, tensor_amax)) code = four;
    }
    put_code(b, code);
    encode(b, te_two_level_multiplier(code, encode_factor));
}

/* Largest finite value of the source's dtype. */
static float dtype_max(te_dtype dtype)
{
    return dtype == TE_BF16 ? te_bf16_to_f32(0x7f7f) : dtype == TE_F16 ? 65504.0f : TE_FLT_MAX;
}

static void quantize_block(const te_quantize_job *job, const block *b)
{
    float max = te_element_max(b->q->element), amax = te_tile_amax(b->tile, b->row, b->col, b->rows, b->cols);
    if (b->q->scale == TE_SCALE_E4M3) {
        two_level_block(b, amax);
    } else if (b->q->scale == TE_SCALE_E8M0) {
        uint8_t code = te_f32_to_e8m0(amax * (1.0f / max));
        put_code(b, code);
        encode(b, te_e8m0_inverse(code));
    } else {
        float scale = te_scale_from_amax(amax, max, b->q->power_of_two, b->q->epsilon, dtype_max(job->dtype));
        put_factor(b, 1.0f / scale);
        encode(b, scale);
    }
}

/* The part of a side that a tile makes; row, col: its place in the side's matrix. */
static void quantize_tile(const te_quantize_job *job, const te_quantized_side *side, float (*tile)[TE_TILE],
                          int64_t row, int64_t col)
{
    const te_quantizer *q = job->quantizer;
    int rows = te_tile_extent(side->rows, row), cols = te_tile_extent(side->cols, col);
    block b = {
        .q = q, .side = side, .tile = tile, .rows = TE_TILE, .cols = TE_TILE, .first_row = row, .first_col = col};
    if (!q->block_rows) {
        encode(&b, job->scale);
        return;
    }
    b.rows = q->block_rows;
    b.cols = q->block_cols;
    for (b.row = 0; b.row < rows; b.row += b.rows) {
        for (b.col = 0; b.col < cols; b.col += b.cols) {
            b.first_row = row + b.row;
            b.first_col = col + b.col;
            quantize_block(job, &b);
        }
    }
}

/* --- passes ----------------------------------------------------------------------------------------------------- */

/* Amaxes of the source and of what side 1 sees. */
static void measure(const te_quantize_job *job, te_lane *l, int64_t row, int64_t col)
{
    te_tile_load(job, l, row, col);
    l->amax[0] = te_amax(l->amax[0], te_tile_amax(l->tile, 0, 0, TE_TILE, TE_TILE));
    if (!job->side[1].data || !job->quantizer->hadamard) return;
    te_tile_transpose(l->across, l->tile);
    te_tile_transform(l->across, job->dtype);
    l->amax[1] = te_amax(l->amax[1], te_tile_amax(l->across, 0, 0, TE_TILE, TE_TILE));
}

static void convert(const te_quantize_job *job, te_lane *l, int64_t row, int64_t col)
{
    te_tile_load(job, l, row, col);
    if (job->quantizer->needs_history) l->amax[0] = te_amax(l->amax[0], te_tile_amax(l->tile, 0, 0, TE_TILE, TE_TILE));
    if (job->side[0].data) quantize_tile(job, &job->side[0], l->tile, row, col);
    if (!job->side[1].data) return;
    te_tile_transpose(l->across, l->tile);
    if (job->quantizer->hadamard) te_tile_transform(l->across, job->dtype);
    quantize_tile(job, &job->side[1], l->across, col, row);
}

/* Row by row: an amax of its own for each. */
static void measure_rows(const te_quantize_job *job)
{
    float x[TE_TILE];
    for (int64_t i = 0; i < job->rows; i++) {
        float amax = 0;
        for (int64_t col = 0; col < job->cols; col += TE_TILE) {
            int n = te_tile_extent(job->cols, col);
            te_tile_load_row(job, i * job->source_stride + col, n, x);
            amax = te_row_amax(x, n, amax);
        }
        job->side[0].amax[i] = amax;
    }
}

static void put_amaxes(const te_quantize_job *job, const float amax[2])
{
    const te_quantizer *q = job->quantizer;
    for (int s = 0; s < 2; s++) {
        const te_quantized_side *side = &job->side[s];
        if (!side->amax) continue;
        if (s == 0 && q->row_scaled)
            measure_rows(job);
        else
            *side->amax = amax[s && q->hadamard];
    }
}

te_status te_cpu_quantize(te_exec *exec, const te_quantize_job *given)
{
    const te_quantizer *q = given->quantizer;
    te_quantize_job job = *given;
    float amax[2] = {0, 0};
    bool whole = !q->block_rows;
    te_status status = TE_OK;
    if ((whole && !q->needs_history) || q->scale == TE_SCALE_E4M3) {
        status = te_tiles_visit(exec, &job, measure, amax);
        if (status != TE_OK) return status;
        put_amaxes(&job, amax);
    }
    if (whole && !q->needs_history)
        job.scale = te_scale_from_amax(amax[0], te_element_max(q->element), q->power_of_two, q->epsilon, TE_FLT_MAX);
    status = te_tiles_visit(exec, &job, convert, amax);
    if (status != TE_OK || !whole) return status;
    for (int s = 0; s < 2; s++)
        if (job.side[s].scale_inv) *(float *)job.side[s].scale_inv = 1.0f / job.scale;
    if (q->needs_history) put_amaxes(&job, amax);
    return TE_OK;
}
