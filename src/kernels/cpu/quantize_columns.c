/* quantize_columns.c - the column-wise side of a panel: blocks run down the columns of the source.
 *
 * Codes are made in the order of the source, each column with a multiplier of its own, and turned as bytes at the end.
 * Where a code depends on nothing but the element and a factor that both sides share, those of side 0 are turned.
 */
#include "quantize_panel.h"
#include "quantize_four.h"

#include <string.h>

/* Rows of values that are quantized: those of the source, or transformed ones. */
typedef struct rows {
    const te_quantize_loops *loops;
    const char *data;
    int64_t stride; /* elements */
    size_t size;
    int count;
} rows;

static rows rows_of(const te_panel_job *p, te_panel_lane *l, te_panel x)
{
    if (!p->job.quantizer->hadamard)
        return (rows){p->loops, te_panel_source(p, x.row, x.col), p->job.source_stride, te_dtype_size(p->job.dtype),
                      x.rows};
    int count = te_panel_transform(p, l, x);
    return (rows){p->loops, (const char *)l->values, te_panel_strip(x), te_dtype_size(p->job.dtype), count};
}

static const void *row_at(const rows *r, int i) { return r->data + (size_t)(i * r->stride) * r->size; }

/* Whether factors are bytes that lie down columns far apart: those of a panel are put there at once. */
static bool gathers_factors(const te_panel_job *p)
{
    const te_quantizer *q = p->job.quantizer;
    const te_quantized_side *side = &p->job.side[1];
    bool each = q->scale != TE_SCALE_F32 && (q->block_rows == 1 || q->replicated); /* column has a byte */
    return each && q->transposed && q->block_cols >= TE_GROUP && side->scale_col_stride == 1 &&
        side->scale_row_stride > 1;
}

/* Two rows to a byte on their way to columns, from row i of x on. */
static uint8_t *pairs_at(const te_panel_job *p, te_panel_lane *l, te_panel x, int i)
{
    int64_t row = (x.row + i) % TE_PANEL_ROWS / 2;
    return l->band ? l->band + row * te_panel_band_stride(p) + x.col : l->pairs[row] + x.col % TE_PANEL_COLS;
}

static int64_t pairs_stride(const te_panel_job *p, const te_panel_lane *l)
{
    return l->band ? te_panel_band_stride(p) : TE_PANEL_COLS;
}

/* Factors on their way to columns, of the blocks that begin in row i of x; a band has pieces of TE_DOWN_COLUMNS. */
static uint8_t *down_at(const te_panel_job *p, te_panel_lane *l, te_panel x, int i)
{
    int64_t row = (x.row + i) % TE_PANEL_ROWS / p->job.quantizer->block_cols, col = x.col % TE_DOWN_COLUMNS;
    if (!l->band || !te_panel_goes_by_groups(p)) return l->down[row] + col;
    int64_t piece = x.col / TE_DOWN_COLUMNS * (TE_PANEL_ROWS / TE_GROUP);
    return l->band + TE_PANEL_ROWS / 2 * te_panel_band_stride(p) + (piece + row) * TE_DOWN_COLUMNS + col;
}

static void put_gathered(const te_panel_job *p, te_panel_lane *l, te_panel x)
{
    const te_quantized_side *side = &p->job.side[1];
    int high = p->job.quantizer->block_cols, count = (x.rows + high - 1) / high, end = x.cols;
    uint8_t *to = (uint8_t *)side->scale_inv + x.row / high;
    for (int n = 0; gathers_factors(p) && end > 0; end -= n, x.col += n) {
        n = end < TE_DOWN_COLUMNS ? end : TE_DOWN_COLUMNS;
        p->blocks->turn_factors(to + x.col * side->scale_row_stride, side->scale_row_stride, down_at(p, l, x, 0), count,
                                n);
    }
}

/* Stores the factors of the blocks that begin in row i. */
static void put_factors(const te_panel_job *p, te_panel_lane *l, te_panel x, int i)
{
    const te_quantizer *q = p->job.quantizer;
    const te_quantized_side *side = &p->job.side[1];
    int wide = q->block_rows, n = (x.cols + wide - 1) / wide;
    int64_t along = (x.row + i) / q->block_cols * side->scale_col_stride;
    if (gathers_factors(p)) {
        const uint8_t *factors = (const uint8_t *)l->factors;
        uint8_t *down = down_at(p, l, x, i);
        for (int b = 0; b < n && wide > 1; b++)
            memset(down + b * wide, factors[b], (size_t)(x.cols - b * wide < wide ? x.cols - b * wide : wide));
        if (wide == 1) memcpy(down, factors, (size_t)n);
        return;
    }
    if (!q->replicated) {
        te_panel_put_factors(p, side, l->factors, n, along + x.col / wide * side->scale_row_stride,
                             side->scale_row_stride, 1, 0);
        return;
    }
    for (int b = 0; b < n; b++) {
        int copies = x.cols - b * wide < wide ? x.cols - b * wide : wide;
        const void *factor = q->scale == TE_SCALE_F32 ? (void *)(l->factors + b) : (void *)((uint8_t *)l->factors + b);
        te_panel_put_factors(p, side, factor, 1, along + (x.col + b * wide) * side->scale_row_stride, 1, copies,
                             side->scale_row_stride);
    }
}

/* Multipliers of the columns for the blocks that begin in row i, whose factors are stored. */
static void make_factors(const te_panel_job *p, te_panel_lane *l, te_panel x, const rows *r, int i, int high)
{
    const te_quantizer *q = p->job.quantizer;
    int wide = q->block_rows, n = (x.cols + wide - 1) / wide;
    if (te_panel_shares_amaxes(p)) {
        te_panel square = {x.row + i, x.col, high, x.cols, x.next};
        memcpy(l->amaxes, te_panel_squares(p, l, square), (size_t)n * sizeof *l->amaxes);
    } else {
        r->loops->amax_down(wide == 1 ? l->amaxes : l->multipliers, row_at(r, i), r->stride, high, x.cols);
        if (wide > 1) p->blocks->of[0].amax_along(l->amaxes, l->multipliers, x.cols, wide);
    }
    te_factor_rule rule = te_panel_rule(p, 1, 0);
    te_panel part = {x.row + i, x.col, high, x.cols, x.next};
    if (q->four_over_six != TE_46_NONE)
        te_four_over_six_factors(p, l, part, 1, &rule, wide == 1 ? l->multipliers : l->blocks);
    else
        p->blocks->factors(&rule, l->amaxes, n, l->factors, wide == 1 ? l->multipliers : l->blocks);
    for (int b = 0; b < n && wide > 1 && !te_panel_shares_codes(p); b++)
        for (int j = b * wide; j < (b + 1) * wide && j < x.cols; j++) l->multipliers[j] = l->blocks[b];
    put_factors(p, l, x, i);
}

/* Codes of rows i … i + high, to memory at once where the side lies as the source does. */
static void encode_rows(const te_panel_job *p, te_panel_lane *l, te_panel x, const rows *r, int i, int high)
{
    const te_quantizer *q = p->job.quantizer;
    const te_quantized_side *side = &p->job.side[1];
    uint8_t *codes = q->transposed ? l->codes[i]
                                   : side->data + (x.row + i) * side->col_stride + x.col * side->row_stride;
    r->loops->encode_down[q->element](codes, q->transposed ? TE_PANEL_COLS : side->col_stride, row_at(r, i),
                                      r->stride, high, l->multipliers, x.cols);
}

/* The same two rows to a byte, to pairs_at: at most TE_GROUP rows, from a multiple of TE_GROUP on. */
static void encode_pairs(const te_panel_job *p, te_panel_lane *l, te_panel x, const rows *r, int i, int high)
{
    const te_quantized_side *side = &p->job.side[1];
    te_pair_rows w = {.x = row_at(r, i), .stride = r->stride, .rows = high, .multipliers = l->multipliers,
                      .random_stride = TE_PANEL_COLS, .tied = p->tied[1]};
    if (p->job.quantizer->stochastic) {
        uint64_t across = (uint64_t)(side->cols + TE_GROUP - 1) / TE_GROUP, down = (uint64_t)(x.row + i) / TE_GROUP;
        p->blocks->random_down(l->random[0], TE_PANEL_COLS, side->rng, (uint64_t)x.col * across + down, across, x.cols);
        w.random = l->random[0];
    }
    uint8_t *pairs = pairs_at(p, l, x, i);
    int64_t stride = pairs_stride(p, l);
    int64_t done = r->loops->pairs_down ? r->loops->pairs_down(pairs, stride, &w, x.cols) : 0;
    if (done == x.cols) return; /* else the rest byte by byte */
    for (int k = i; k < i + high; k++) {
        const void *from = (const char *)row_at(r, k) + (size_t)done * r->size;
        if (w.random)
            r->loops->stochastic(l->codes[k], from, l->multipliers + done, 1, l->random[k - i] + done, x.cols - done);
        else
            r->loops->encode_down[TE_E2M1](l->codes[k], TE_PANEL_COLS, from, 0, 1, l->multipliers + done,
                                           x.cols - done);
    }
    if (high % 2) memset(l->codes[i + high], 0, (size_t)(x.cols - done));
    for (int k = i; k < i + high; k += 2)
        p->blocks->pack_down(pairs + (k - i) / 2 * stride + done, l->codes[k], l->codes[k + 1], x.cols - done);
}

/* Whether the blocks of both sides that begin in row i are the same squares with the same factors, so that side 0 has
 * the codes already. Where errors chose between two factors, both sides agree on what sums of either order decide. */
static bool has_pairs(const te_panel_job *p, const te_panel_lane *l, te_panel x, int i)
{
    const te_quantizer *q = p->job.quantizer;
    if (!te_panel_shares_amaxes(p) || !te_panel_goes_by_groups(p) || q->row_scaled) return false;
    if (q->block_cols != TE_GROUP || x.col % 2 != 0 || p->encode[0] != p->encode[1]) return false;
    const int8_t *chosen = l->chosen[(x.row + i) % TE_PANEL_ROWS / TE_GROUP] + x.col % TE_MOST_COLUMNS / TE_GROUP;
    int8_t least = 0;
    for (int b = 0; b * TE_GROUP < x.cols && q->four_over_six != TE_46_NONE; b++)
        least = chosen[b] < least ? chosen[b] : least;
    return least >= 0;
}

/* The pairs of side 0, which lie along rows, to pairs_at. */
static void turn_pairs(const te_panel_job *p, te_panel_lane *l, te_panel x, int i, int high)
{
    const te_quantized_side *side = &p->job.side[0];
    const uint8_t *from = side->data + (x.row + i) * side->row_stride + x.col / 2;
    uint8_t *pairs = pairs_at(p, l, x, i), *none = l->codes[0];
    if (high % 2) memset(none, 0, (size_t)(x.cols + 1) / 2);
    for (int k = 0; k < high; k += 2, from += 2 * side->row_stride, pairs += pairs_stride(p, l))
        p->blocks->pairs_across(pairs, from, k + 1 < high ? from + side->row_stride : none, x.cols);
}

/* Codes of x.cols columns and `count` rows to the transposed side; two rows to a byte they are at pairs_at. */
static void turn(const te_panel_job *p, te_panel_lane *l, te_panel x, const uint8_t *codes, int64_t stride, int count)
{
    const te_quantized_side *side = &p->job.side[1];
    uint8_t *to = side->data + x.col * side->row_stride;
    if (p->job.quantizer->element == TE_E2M1)
        p->transpose(to + x.row / 2, side->row_stride, pairs_at(p, l, x, 0), pairs_stride(p, l), x.cols,
                     (count + 1) / 2);
    else
        p->transpose(to + x.row, side->row_stride, codes, stride, x.cols, count);
}

/* Some columns after the other; between them, rows of the next panel are fetched to the second-level cache, as memory
 * would else only be written meanwhile. */
static void turn_kept(const te_panel_job *p, te_panel_lane *l, te_panel x, int count)
{
    enum { COLUMNS = 256, AHEAD = 192 << 10 };
    int64_t row, col, bytes = x.cols * (int64_t)te_dtype_size(p->job.dtype);
    int     ahead = (int)(AHEAD / bytes), fetched = 0;
    if (ahead > x.rows) ahead = x.rows;
    for (int j = 0; j < x.cols; j += COLUMNS) {
        te_panel part = {x.row, x.col + j, x.rows, x.cols - j < COLUMNS ? x.cols - j : COLUMNS, x.next};
        for (int end = (int)((int64_t)ahead * (j + part.cols) / x.cols); fetched < end; fetched++)
            te_panel_foresee(p, x, fetched, &row, &col);
        turn(p, l, part, l->band + j, p->kept, count);
    }
}

bool te_panel_shares_codes(const te_panel_job *p)
{
    const te_quantizer *q = p->job.quantizer;
    return p->job.side[0].data && q->transposed && q->element != TE_E2M1 && q->block_rows == q->block_cols &&
           !q->hadamard;
}

bool te_panel_shares_amaxes(const te_panel_job *p)
{
    const te_quantizer *q = p->job.quantizer;
    return p->job.side[0].data && q->block_rows == q->block_cols && q->block_rows >= TE_GROUP && !q->hadamard;
}

bool te_panel_rounds_once(const te_panel_job *p)
{
    const te_quantizer *q = p->job.quantizer;
    bool powers = q->scale == TE_SCALE_E8M0 || (q->scale == TE_SCALE_F32 && q->power_of_two);
    return p->job.side[0].data && p->job.side[1].data && powers && q->block_rows == 1 && !q->hadamard &&
        p->loops->encode_both[q->element];
}

bool te_panel_follows_rows(const te_panel_job *p)
{
    return te_panel_rounds_once(p) && !p->job.quantizer->transposed && p->job.quantizer->block_cols == 32;
}

bool te_panel_in_bands(const te_panel_job *p)
{
    const te_quantizer *q = p->job.quantizer;
    bool shared = p->job.side[0].data && (!p->job.side[1].data || te_panel_shares_codes(p));
    bool squares = q->block_rows == TE_PANEL_ROWS && q->element != TE_E2M1 && !q->replicated;
    bool lines = te_panel_rounds_once(p) && q->block_cols == TE_PANEL_ROWS && q->transposed && q->scale == TE_SCALE_F32;
    int64_t group = TE_GROUP * p->job.cols * (int64_t)te_dtype_size(p->job.dtype);
    bool groups = te_panel_goes_by_groups(p) && group <= TE_BAND_BYTES;
    return ((shared && squares && p->loops->amax_squares) || lines || groups) && p->job.cols <= TE_MOST_COLUMNS;
}

/* What lies between column j and the right edge of `w`, each way by itself. */
static void encode_rest(const te_panel_job *p, const te_two_ways *w, int64_t j)
{
    te_element_kind element = p->job.quantizer->element;
    const char *x = (const char *)w->x + (size_t)j * te_dtype_size(p->job.dtype);
    size_t row = (size_t)w->stride * te_dtype_size(p->job.dtype);
    if (j == w->n) return;
    for (int i = 0; i < w->rows; i++)
        p->loops->encode_along[element](w->codes[0] + i * w->codes_stride[0] + j, x + (size_t)i * row,
                                        w->along + i * w->step + j / w->block, w->n - j, w->block, w->past[0]);
    p->loops->encode_down[element](w->codes[1] + j, w->codes_stride[1], x, w->stride, w->rows, w->down + j, w->n - j);
}

/* Multipliers of rows and of columns, whose factors are stored; returns the largest amax. */
static float make_both_factors(const te_panel_job *p, te_panel_lane *l, te_panel x, const rows *r,
                               const te_two_ways *w, int i)
{
    te_factor_rule rule = te_panel_rule(p, 0, x.row + i);
    float *along = l->turned[0], most;
    if (p->loops->amax_both(along, l->amaxes, w)) {
        p->blocks->factors(&rule, along, w->rows * (int)w->step, l->factors, l->blocks);
        te_panel_put_row_factors(p, l, &x, i, (int)w->step, w->rows);
        rule = te_panel_rule(p, 1, 0);
        p->blocks->factors(&rule, l->amaxes, x.cols, l->factors, l->multipliers);
        put_factors(p, l, x, i);
    } else {
        te_panel_row_factors(p, l, &x, i, w->rows);
        make_factors(p, l, x, r, i, w->rows);
    }
    p->blocks->of[0].amax_along(&most, l->amaxes, x.cols, x.cols);
    return most;
}

/* Rows are a block of the columns high; where one has an infinite amax codes may saturate. */
void te_panel_both(const te_panel_job *p, te_panel_lane *l, te_panel x)
{
    const te_quantizer *q = p->job.quantizer;
    const te_quantized_side *side = p->job.side;
    const rows r = {p->loops, te_panel_source(p, x.row, x.col), p->job.source_stride,
                    te_dtype_size(p->job.dtype), x.rows};
    uint8_t *turned = l->band ? l->band : l->codes[0];
    int64_t stride = l->band ? te_panel_band_stride(p) : TE_PANEL_COLS;
    for (int i = 0; i < x.rows; i += q->block_cols) {
        int64_t row, col;
        te_two_ways w = {.x = row_at(&r, i), .stride = r.stride, .n = x.cols, .block = q->block_cols,
                         .along = l->blocks,
                         .down = l->multipliers, .past = {p->streams, p->streams && !q->transposed}};
        w.rows = x.rows - i < q->block_cols ? x.rows - i : q->block_cols;
        w.step = (x.cols + q->block_cols - 1) / q->block_cols;
        if (te_panel_next(p, x, i, &row, &col)) w.next = te_panel_source(p, row, col);
        w.codes[0] = side[0].data + (x.row + i) * side[0].row_stride + x.col;
        w.codes_stride[0] = side[0].row_stride;
        w.codes[1] = q->transposed ? turned + i * stride : side[1].data + (x.row + i) * side[1].col_stride + x.col;
        w.codes_stride[1] = q->transposed ? stride : side[1].col_stride;
        float most = make_both_factors(p, l, x, &r, &w, i);
        encode_rest(p, &w, most <= TE_FLT_MAX ? p->loops->encode_both[q->element](&w) : 0);
    }
    put_gathered(p, l, x);
    if (q->transposed) turn(p, l, x, turned, stride, x.rows);
}

/* Codes and factors of a strip, on their way to columns where they are transposed. Returns the number of rows. */
static int encode_strip(const te_panel_job *p, te_panel_lane *l, te_panel x)
{
    const te_quantizer *q = p->job.quantizer;
    rows r = rows_of(p, l, x);
    bool shared = te_panel_shares_codes(p);
    int step = q->block_rows ? q->block_cols : r.count;
    for (int j = 0; j < x.cols && !q->block_rows && !shared; j++) l->multipliers[j] = p->job.scale;
    for (int i = 0; i < r.count; i += step) {
        int high = r.count - i < step ? r.count - i : step;
        if (q->block_rows) make_factors(p, l, x, &r, i, high);
        bool there = q->element == TE_E2M1 && has_pairs(p, l, x, i);
        if (there) turn_pairs(p, l, x, i, high);
        for (int k = 0; k < high && !there && q->element == TE_E2M1; k += TE_GROUP)
            encode_pairs(p, l, x, &r, i + k, high - k < TE_GROUP ? high - k : TE_GROUP);
        if (q->element != TE_E2M1 && !shared)
            encode_rows(p, l, x, &r, i, high);
    }
    return r.count;
}

static void quantize_strip(const te_panel_job *p, te_panel_lane *l, te_panel x)
{
    const te_quantizer *q = p->job.quantizer;
    const te_quantized_side *rowwise = &p->job.side[0];
    int count = encode_strip(p, l, x);
    if (q->block_rows) put_gathered(p, l, x);
    if (!q->transposed) return;
    if (p->kept)
        turn_kept(p, l, x, count);
    else if (te_panel_shares_codes(p))
        turn(p, l, x, rowwise->data + x.row * rowwise->row_stride + x.col, rowwise->row_stride, count);
    else
        turn(p, l, x, l->codes[0], TE_PANEL_COLS, count);
}

void te_panel_columnwise(const te_panel_job *p, te_panel_lane *l, te_panel x)
{
    int width = p->job.quantizer->hadamard ? te_panel_strip(x) : x.cols;
    for (int j = 0; j < x.cols; j += width) {
        te_panel strip = {x.row, x.col + j, x.rows, x.cols - j < width ? x.cols - j : width, x.next};
        quantize_strip(p, l, strip);
    }
}

bool te_panel_goes_by_groups(const te_panel_job *p)
{
    const te_quantizer *q = p->job.quantizer;
    bool high = q->block_rows == TE_GROUP && !q->stochastic;
    return p->job.side[1].data && q->element == TE_E2M1 && q->block_cols == TE_GROUP && (q->block_rows == 1 || high);
}

/* Rows are read from memory once: columns find a group of them in the second cache. */
void te_panel_by_groups(const te_panel_job *p, te_panel_lane *l, te_panel x)
{
    int count = 0;
    for (int i = 0; i < x.rows; i += TE_GROUP) {
        te_panel group = {x.row + i, x.col, x.rows - i < TE_GROUP ? x.rows - i : TE_GROUP, x.cols, x.next};
        if (p->job.side[0].data) te_panel_rowwise(p, l, group);
        te_panel strip = group;
        for (int j = 0; j < x.cols; j += TE_LINE_COLS) {
            strip.col = x.col + j;
            strip.cols = x.cols - j < TE_LINE_COLS ? x.cols - j : TE_LINE_COLS;
            count = i + encode_strip(p, l, strip);
        }
    }
    put_gathered(p, l, x);
    turn(p, l, x, NULL, 0, count);
}
