/* quantize.c - quantizing and dequantizing tile by tile.
 *
 * A tile is read once into float32. Side 0 is made from its rows, side 1 by the same code from the transposed tile. Where a
 * factor of the whole tensor is wanted, an earlier pass over the tiles takes the amaxes. No result depends on the order of
 * tiles: they share nothing but maxima.
 */
#include "quantize.h"
#include "philox.h"

#include <omp.h>

enum { TILE = 128, GROUP = 16 };

/* What a thread works in. */
typedef struct lane {
    float tile[TILE][TILE], across[TILE][TILE]; /* as in the source, and transposed */
    float amax[2];
} lane;

typedef void visit(const te_quantize_job *job, lane *l, int64_t row, int64_t col);

static int extent(int64_t total, int64_t first) { return (int)(total - first < TILE ? total - first : TILE); }

/* --- tiles ------------------------------------------------------------------------------------------------------ */

static float load(const void *source, te_dtype dtype, int64_t i)
{
    if (dtype == TE_BF16) return te_bf16_to_f32(((const uint16_t *)source)[i]);
    if (dtype == TE_F16) return te_f16_to_f32(((const uint16_t *)source)[i]);
    return ((const float *)source)[i];
}

static void store(void *target, te_dtype dtype, int64_t i, float x)
{
    if (dtype == TE_BF16) ((uint16_t *)target)[i] = te_f32_to_bf16(x);
    else if (dtype == TE_F16) ((uint16_t *)target)[i] = te_f32_to_f16(x);
    else ((float *)target)[i] = x;
}

static void load_tile(const te_quantize_job *job, lane *l, int64_t row, int64_t col)
{
    int rows = extent(job->rows, row), cols = extent(job->cols, col);
    if (rows < TILE || cols < TILE) memset(l->tile, 0, sizeof l->tile);
    for (int i = 0; i < rows; i++) {
        int64_t at = (row + i) * job->cols + col;
        for (int j = 0; j < cols; j++) l->tile[i][j] = load(job->source, job->dtype, at + j);
    }
}

static void store_tile(const te_quantize_job *job, float (*tile)[TILE], int64_t row, int64_t col)
{
    int rows = extent(job->rows, row), cols = extent(job->cols, col);
    for (int i = 0; i < rows; i++) {
        int64_t at = (row + i) * job->cols + col;
        for (int j = 0; j < cols; j++) store(job->source, job->dtype, at + j, tile[i][j]);
    }
}

static void transpose(float (*to)[TILE], float (*from)[TILE])
{
    for (int i = 0; i < TILE; i++)
        for (int j = 0; j < TILE; j++) to[i][j] = from[j][i];
}

/* As the unfused graph would store it: rounded to the source's dtype. */
static void transform(float (*tile)[TILE], te_dtype dtype)
{
    for (int i = 0; i < TILE; i++) {
        for (int j = 0; j < TILE; j += GROUP) {
            te_hadamard_signs(&tile[i][j]);
            te_hadamard16(&tile[i][j]);
        }
        for (int j = 0; j < TILE && dtype != TE_F32; j++) {
            float x = tile[i][j];
            tile[i][j] = dtype == TE_BF16 ? te_bf16_to_f32(te_f32_to_bf16(x)) : te_f16_to_f32(te_f32_to_f16(x));
        }
    }
}

static void transform_back(float (*tile)[TILE])
{
    for (int i = 0; i < TILE; i++) {
        for (int j = 0; j < TILE; j += GROUP) {
            te_hadamard16(&tile[i][j]);
            te_hadamard_signs(&tile[i][j]);
        }
    }
}

static float window_amax(float (*tile)[TILE], int row, int col, int rows, int cols)
{
    float amax = 0;
    for (int i = row; i < row + rows; i++)
        for (int j = col; j < col + cols; j++) amax = te_amax(amax, tile[i][j]);
    return amax;
}

/* Visits every tile. Maxima over all tiles come back in amax. */
static te_status for_each_tile(te_exec *exec, const te_quantize_job *job, visit *v, float amax[2])
{
    int64_t across = (job->cols + TILE - 1) / TILE, tiles = (job->rows + TILE - 1) / TILE * across;
    int     threads = tiles < exec->threads ? (int)tiles : exec->threads;
    amax[0] = amax[1] = 0;
    if (job->rows == 0 || job->cols == 0) return TE_OK;
    if (threads < 1) threads = 1;
    lane *lanes = exec->scratch(exec, (size_t)threads * sizeof *lanes);
    if (!lanes) return TE_ERROR_MEMORY;
    for (int i = 0; i < threads; i++) lanes[i].amax[0] = lanes[i].amax[1] = 0;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t t = 0; t < tiles; t++) v(job, &lanes[omp_get_thread_num()], t / across * TILE, t % across * TILE);
    for (int i = 0; i < threads; i++)
        for (int s = 0; s < 2; s++) amax[s] = te_amax(amax[s], lanes[i].amax[s]);
    exec->scratch_free(exec, lanes);
    return TE_OK;
}

/* --- codes ------------------------------------------------------------------------------------------------------ */

/* A block of a tile and where it goes. */
typedef struct block {
    const te_quantizer      *q;
    const te_quantized_side *side;
    float (*tile)[TILE];
    int     row, col, rows, cols; /* in the tile; rows and cols of the whole block */
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
    for (int i = 0; i < rows; i++) {
        const float *x = &b->tile[b->row + i][b->col];
        uint8_t     *to = b->side->data + (b->first_row + i) * b->side->row_stride + b->first_col * b->side->col_stride;
        int64_t      step = b->side->col_stride;
        if (b->q->element == TE_E4M3)
            for (int j = 0; j < cols; j++) to[j * step] = te_f32_to_f8e4m3(x[j] * multiplier);
        else
            for (int j = 0; j < cols; j++) to[j * step] = te_f32_to_f8e5m2(x[j] * multiplier);
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
    int64_t across = (b->side->cols + GROUP - 1) / GROUP;
    for (int j = 0; j < b->cols; j += GROUP) {
        te_philox_words w = te_rng_group(b->side->rng, (uint64_t)((b->first_row + i) * across + (b->first_col + j) / GROUP));
        for (int k = 0; k < GROUP; k++)
            codes[j + k] = te_f32_to_e2m1_stochastic(x[j + k] * multiplier, w.word[k / 4] >> k % 4 * 8 & 255u);
    }
}

static void encode_pairs(const block *b, float multiplier)
{
    int     rows = block_rows_inside(b), cols = block_cols_inside(b);
    uint8_t codes[TILE];
    for (int i = 0; i < rows; i++) {
        uint8_t *to = b->side->data + (b->first_row + i) * b->side->row_stride + b->first_col / 2;
        encode_nibbles(b, i, multiplier, codes);
        for (int j = 0; j < cols; j += 2) to[j / 2] = (uint8_t)(codes[j] | codes[j + 1] << 4);
    }
}

static void encode(const block *b, float multiplier)
{
    if (b->q->element == TE_E2M1) encode_pairs(b, multiplier);
    else encode_bytes(b, multiplier);
}

/* --- blocks ----------------------------------------------------------------------------------------------------- */

/* The place of the block's factor; a replicated one stands once per row. */
static int64_t scale_at(const te_quantizer *q, const te_quantized_side *side, int64_t row, int64_t col)
{
    int64_t i = q->replicated ? row : row / q->block_rows;
    return i * side->scale_row_stride + col / q->block_cols * side->scale_col_stride;
}

static void put_code(const block *b, uint8_t code)
{
    int rows = b->q->replicated ? block_rows_inside(b) : 1;
    for (int i = 0; i < rows; i++) ((uint8_t *)b->side->scale_inv)[scale_at(b->q, b->side, b->first_row + i, b->first_col)] = code;
}

static void put_factor(const block *b, float scale_inv)
{
    int rows = b->q->replicated ? block_rows_inside(b) : 1;
    for (int i = 0; i < rows; i++) ((float *)b->side->scale_inv)[scale_at(b->q, b->side, b->first_row + i, b->first_col)] = scale_inv;
}

static float side_amax(const te_quantized_side *side, int64_t row) { return side->amax[row * side->amax_stride]; }

/* Summed error of the block under a factor, absolute or squared: rows from left to right, then halves of the rows. */
static float block_error(const block *b, uint8_t code, float amax)
{
    float multiplier = te_two_level_multiplier(code, te_two_level_encode(amax, b->q->scale_max));
    float factor = te_f8e4m3_to_f32(code), sums[TILE] = {0};
    for (int i = 0; i < b->rows; i++) {
        for (int j = 0; j < b->cols; j++) {
            float x = b->tile[b->row + i][b->col + j];
            float error = te_e2m1_to_f32(te_f32_to_e2m1(x * multiplier)) * factor * amax / (6.0f * b->q->scale_max) - x;
            sums[i] += b->q->four_over_six == TE_46_MSE ? error * error : te_f32_from_bits(te_f32_bits(error) & 0x7fffffffu);
        }
    }
    for (int half = b->rows / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

static void two_level_block(const block *b, float amax)
{
    float   tensor_amax = side_amax(b->side, b->first_row);
    float   encode_factor = te_two_level_encode(tensor_amax, b->q->scale_max);
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
    float max = te_element_max(b->q->element), amax = window_amax(b->tile, b->row, b->col, b->rows, b->cols);
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
static void quantize_tile(const te_quantize_job *job, const te_quantized_side *side, float (*tile)[TILE], int64_t row, int64_t col)
{
    const te_quantizer *q = job->quantizer;
    int   rows = extent(side->rows, row), cols = extent(side->cols, col);
    block b = {.q = q, .side = side, .tile = tile, .rows = TILE, .cols = TILE, .first_row = row, .first_col = col};
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
static void measure(const te_quantize_job *job, lane *l, int64_t row, int64_t col)
{
    load_tile(job, l, row, col);
    l->amax[0] = te_amax(l->amax[0], window_amax(l->tile, 0, 0, TILE, TILE));
    if (!job->side[1].data || !job->quantizer->hadamard) return;
    transpose(l->across, l->tile);
    transform(l->across, job->dtype);
    l->amax[1] = te_amax(l->amax[1], window_amax(l->across, 0, 0, TILE, TILE));
}

static void convert(const te_quantize_job *job, lane *l, int64_t row, int64_t col)
{
    load_tile(job, l, row, col);
    if (job->quantizer->needs_history) l->amax[0] = te_amax(l->amax[0], window_amax(l->tile, 0, 0, TILE, TILE));
    if (job->side[0].data) quantize_tile(job, &job->side[0], l->tile, row, col);
    if (!job->side[1].data) return;
    transpose(l->across, l->tile);
    if (job->quantizer->hadamard) transform(l->across, job->dtype);
    quantize_tile(job, &job->side[1], l->across, col, row);
}

static void measure_rows(const te_quantize_job *job)
{
    for (int64_t i = 0; i < job->rows; i++) {
        float amax = 0;
        for (int64_t j = 0; j < job->cols; j++) amax = te_amax(amax, load(job->source, job->dtype, i * job->cols + j));
        job->side[0].amax[i] = amax;
    }
}

static void put_amaxes(const te_quantize_job *job, const float amax[2])
{
    const te_quantizer *q = job->quantizer;
    for (int s = 0; s < 2; s++) {
        const te_quantized_side *side = &job->side[s];
        if (!side->amax) continue;
        if (s == 0 && q->row_scaled) measure_rows(job);
        else *side->amax = amax[s && q->hadamard];
    }
}

te_status te_quantize_run(te_exec *exec, const te_quantize_job *given)
{
    const te_quantizer *q = given->quantizer;
    te_quantize_job     job = *given;
    float               amax[2] = {0, 0};
    bool                whole = !q->block_rows;
    te_status           status = TE_OK;
    if ((whole && !q->needs_history) || q->scale == TE_SCALE_E4M3) {
        status = for_each_tile(exec, &job, measure, amax);
        if (status != TE_OK) return status;
        put_amaxes(&job, amax);
    }
    if (whole && !q->needs_history)
        job.scale = te_scale_from_amax(amax[0], te_element_max(q->element), q->power_of_two, q->epsilon, TE_FLT_MAX);
    status = for_each_tile(exec, &job, convert, amax);
    if (status != TE_OK || !whole) return status;
    for (int s = 0; s < 2; s++)
        if (job.side[s].scale_inv) *(float *)job.side[s].scale_inv = 1.0f / job.scale;
    if (q->needs_history) put_amaxes(&job, amax);
    return TE_OK;
}

/* --- back ------------------------------------------------------------------------------------------------------- */

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
    int64_t at = scale_at(q, s, i, j);
    if (q->scale == TE_SCALE_F32) return x * ((const float *)s->scale_inv)[at];
    uint8_t code = ((const uint8_t *)s->scale_inv)[at];
    if (q->scale == TE_SCALE_E8M0) return x * te_e8m0_to_f32(code);
    return x * te_f8e4m3_to_f32(code) * te_two_level_decode(side_amax(s, i), q->scale_max);
}

static void decode_tile(const te_quantizer *q, const te_quantized_side *s, float (*tile)[TILE], int64_t row, int64_t col)
{
    int rows = extent(s->rows, row), cols = extent(s->cols, col);
    if (rows < TILE || cols < TILE) memset(tile, 0, sizeof(float[TILE][TILE]));
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) tile[i][j] = value_at(q, s, row + i, col + j);
}

static void restore(const te_quantize_job *job, lane *l, int64_t row, int64_t col)
{
    decode_tile(job->quantizer, &job->side[0], l->tile, row, col);
    store_tile(job, l->tile, row, col);
}

static void restore_across(const te_quantize_job *job, lane *l, int64_t row, int64_t col)
{
    decode_tile(job->quantizer, &job->side[1], l->across, col, row);
    if (job->quantizer->hadamard) transform_back(l->across);
    transpose(l->tile, l->across);
    store_tile(job, l->tile, row, col);
}

te_status te_dequantize_run(te_exec *exec, const te_quantize_job *job, int side)
{
    float amax[2];
    return for_each_tile(exec, job, side ? restore_across : restore, amax);
}
