/* program_steps.c - what each step of a plan does to a tile. */
#include "program_walker.h"

#include <string.h>

/* Of the columns from `column` on, those up to `left` that lie next to each other. */
static size_t piece_of(int64_t block, int64_t column, size_t left)
{
    size_t piece = (size_t)(block - column % block);
    return piece < left ? piece : left;
}

static void load_blocks(const te_walker *w, char *dst, const te_bound_operand *in, const char *row, size_t rows)
{
    te_block_load load = w->blocks->load[in->dtype];
    for (size_t r = 0; r < rows; r++, row += te_walker_row_stride(w, in)) {
        for (size_t c = 0, n; c < w->tile_columns; c += n, dst += n * w->blocks->size) {
            int64_t at = w->column + (int64_t)c;
            n = piece_of(in->block, at, w->tile_columns - c);
            load(dst, row + te_operand_place(in->block, at) * in->column * in->size, in->column, n);
        }
    }
}

static void store_blocks(const te_walker *w, char *row, const te_bound_operand *out, const char *src)
{
    te_block_store store = w->blocks->store[out->dtype];
    for (size_t r = 0; r < w->tile_rows; r++, row += te_walker_row_stride(w, out)) {
        for (size_t c = 0, n; c < w->tile_columns; c += n, src += n * w->blocks->size) {
            int64_t at = w->column + (int64_t)c;
            n = piece_of(out->block, at, w->tile_columns - c);
            store(row + te_operand_place(out->block, at) * out->column * out->size, out->column, src, n);
        }
    }
}

/* Values that float32 may not hold end a run of small numbers, program_small.c. */
static void load_some(const te_walker *w, char *dst, const te_bound_operand *in, const char *src, int64_t stride,
                      size_t n)
{
    te_small *small = w->job->run->small;
    if (!small || (in->dtype != TE_I64 && in->dtype != TE_I32)) w->blocks->load[in->dtype](dst, src, stride, n);
    else if (!w->blocks->load_small(dst, src, in->dtype, stride, n, small->bits))
        atomic_store_explicit(&small->exceeded, 1, memory_order_relaxed);
}

static void load_tile(const te_walker *w, char *dst, int operand, size_t rows)
{
    const te_bound_operand *in = &w->operands[operand];
    const char   *src = te_walker_tile(w, in, operand);
    size_t        columns = w->tile_columns, size = w->blocks->size;
    int64_t       stride = te_walker_row_stride(w, in);
    if (in->block) {
        load_blocks(w, dst, in, w->row[operand], rows);
    } else if (in->flat) {
        load_some(w, dst, in, src, 1, rows * columns);
    } else if (columns == 1) {
        load_some(w, dst, in, src, stride / in->size, rows);
    } else if (rows == 1 || stride != 0) {
        for (size_t r = 0; r < rows; r++)
            load_some(w, dst + r * columns * size, in, src + (int64_t)r * stride, in->column, columns);
    } else { /* the same row over and over */
        size_t row = columns * size, done = row, all = rows * row;
        load_some(w, dst, in, src, in->column, columns);
        for (; done < all; done += done < all - done ? done : all - done)
            memcpy(dst + done, dst, done < all - done ? done : all - done);
    }
}

static void store_tile(const te_walker *w, int operand, const char *src)
{
    const te_bound_operand *out = &w->operands[operand];
    char          *dst = te_walker_tile(w, out, operand);
    te_block_store store = w->blocks->store[out->dtype];
    size_t         rows = w->tile_rows, columns = w->tile_columns, size = w->blocks->size;
    int64_t        stride = te_walker_row_stride(w, out);
    if (out->block) {
        store_blocks(w, w->row[operand], out, src);
    } else if (out->flat) {
        store(dst, 1, src, rows * columns);
    } else if (columns == 1) {
        store(dst, rows == 1 ? 1 : stride / out->size, src, rows);
    } else {
        for (size_t r = 0; r < rows; r++)
            store(dst + (int64_t)r * stride, out->column, src + r * columns * size, columns);
    }
}

bool te_walker_stored(const te_walker *w, const te_step *step)
{
    const te_bound_operand *out = &w->operands[step->operand];
    bool                    direct = w->direct[step->operand - w->job->program->n_inputs] == step->arg[0];
    return !out->present || (direct && (out->in_place || w->form[step->arg[0]] & TE_FORM_HALF));
}

/* What is bfloat16 already needs no rounding. */
static void store_value(te_walker *w, const te_step *step, const char *value)
{
    const te_bound_operand *out = &w->operands[step->operand];
    size_t                  n = w->tile_rows * w->tile_columns;
    if (w->form[step->arg[0]] & TE_FORM_HALF) {
        if (out->straight && out->dtype == TE_BF16 && !out->accumulate) {
            memcpy(te_walker_tile(w, out, step->operand), value, n * sizeof(uint16_t));
            return;
        }
        char *values = te_walker_register(w, step->arg[0]);
        w->blocks->load[TE_BF16](values, value, 1, n);
        value = values;
    }
    if (out->accumulate && out->in_place) {
        char *dst = te_walker_tile(w, out, step->operand);
        w->blocks->op[TE_PW_ADD][0](dst, dst, value, NULL, n);
        return;
    }
    if (out->accumulate) {
        load_tile(w, w->spare, step->operand, w->tile_rows);
        w->blocks->op[TE_PW_ADD][0](w->spare, w->spare, value, NULL, n);
        value = w->spare;
    }
    store_tile(w, step->operand, value);
}

/* From one row of the tile to the next in a slot, in bytes. */
static int64_t row_step(const te_walker *w, int32_t slot)
{
    return w->job->band ? w->step[slot] : (int64_t)(w->tile_columns * w->blocks->size);
}

/* Whether the rows of the output, and those of the value, follow one another. */
static bool is_dense(const te_walker *w, const te_step *step)
{
    size_t size = w->form[step->arg[0]] & TE_FORM_HALF ? sizeof(uint16_t) : w->blocks->size;
    return w->operands[step->operand].flat && row_step(w, step->arg[0]) == (int64_t)(w->tile_columns * size);
}

/* Of a band row by row where either's are apart. */
static void step_store(te_walker *w, const te_step *step)
{
    if (te_walker_stored(w, step)) return;
    const char *value = w->slot[step->arg[0]];
    if (!w->job->band || is_dense(w, step)) {
        store_value(w, step, value);
        return;
    }
    size_t rows = w->tile_rows;
    char  *first = w->row[step->operand];
    w->tile_rows = 1;
    for (size_t r = 0; r < rows; r++, value += row_step(w, step->arg[0])) {
        store_value(w, step, value);
        w->row[step->operand] += te_walker_row_stride(w, &w->operands[step->operand]);
    }
    w->tile_rows = rows;
    w->row[step->operand] = first;
}

/* Where rows are not reduced a row may take several tiles; the first one stores. */
static void step_store_row(te_walker *w, const te_step *step)
{
    const te_bound_operand *out = &w->operands[step->operand];
    if (!out->present || w->column > 0) return;
    char   *dst = w->row[step->operand], *value = w->slot[step->arg[0]];
    int64_t stride = te_walker_row_stride(w, out);
    if (!out->accumulate && !step->scalars) {
        w->blocks->store[out->dtype](dst, w->tile_rows == 1 ? 1 : stride / out->size, value, w->tile_rows);
        return;
    }
    for (size_t r = 0; r < w->tile_rows; r++, dst += stride) {
        char *one = step->scalars ? value : value + r * w->blocks->size;
        if (out->accumulate) {
            double sum[1];
            w->blocks->load[out->dtype](sum, dst, 1, 1);
            w->blocks->op[TE_PW_ADD][0](sum, sum, one, NULL, 1);
            w->blocks->store[out->dtype](dst, 1, sum, 1);
        } else {
            w->blocks->store[out->dtype](dst, 1, one, 1);
        }
    }
}

static void step_random(te_walker *w, const te_step *step)
{
    const te_program *p = w->job->program;
    te_block_random   random = {.op = (te_opcode)step->op, .rng = w->job->run->rngs[step->operand]};
    random.first = (uint64_t)(w->row_number * w->job->columns + w->column);
    if (step->op == TE_PW_KEEP && step->scalars) {
        int32_t        a = step->arg[0]; /* a scalar's slot has the number of its instruction */
        const te_insn *insn = &p->insns[a];
        double         p_drop = insn->op == TE_PW_PARAM   ? w->job->run->params[insn->slot]
                                : insn->op == TE_PW_CONST ? insn->imm
                                                          : w->blocks->get(w->slot[a]);
        random.threshold = te_rng_threshold(p_drop);
    } else if (step->op == TE_PW_KEEP) {
        random.p = w->slot[step->arg[0]];
    }
    w->blocks->random(w->slot[step->dst], &random, w->tile_rows * w->tile_columns);
}

static void step_spread(te_walker *w, const te_step *step)
{
    size_t columns = w->tile_columns, rows = w->tile_rows;
    if (step->rate == TE_RATE_UNIFORM) columns *= rows, rows = 1;
    w->blocks->repeat(w->slot[step->dst], w->slot[step->arg[0]], rows, columns);
}

bool te_walker_point_load(te_walker *w, const te_step *step)
{
    const te_bound_operand *in = &w->operands[step->operand];
    bool                    takes = te_walker_takes_half(step, in), half = takes && te_walker_chains(w);
    bool                    there = in->in_place || half;
    w->form[step->dst] = (half ? TE_FORM_HALF : 0) | (there ? TE_FORM_TENSOR : 0);
    if (there && w->job->band) w->step[step->dst] = te_walker_row_stride(w, in);
    if (there) w->slot[step->dst] = te_walker_tile(w, in, step->operand);
    else if (takes) w->slot[step->dst] = te_walker_register(w, step->dst);
    return there;
}

static void step_load(te_walker *w, const te_step *step)
{
    te_bound_operand *in = &w->operands[step->operand];
    if (te_walker_point_load(w, step)) return;
    size_t rows = in->constant && w->job->band ? 1 : w->tile_rows;
    if (!in->constant || in->loaded < rows) {
        load_tile(w, w->slot[step->dst], step->operand, rows);
        in->loaded = rows;
    }
}

static double number_at(const te_walker *w, const char *at)
{
    const void *number = at;
    return w->blocks->size == sizeof(float) ? (double)*(const float *)number : *(const double *)number;
}

/* Columns beyond 2^24 share their float32 number with their neighbours; then what stands in all of them is added. */
static void pick_shared(te_walker *w, const te_bound_operand *in, const char *row, double at, char *dst)
{
    const te_blocks *blocks = w->blocks;
    int64_t          columns = w->job->columns, reach = columns >> 24;
    int64_t          middle = at >= 0 && at < (double)columns + 1 ? (int64_t)at : -1 - reach;
    double           element[1];
    blocks->set(dst, 0);
    for (int64_t i = middle - reach; i <= middle + reach; i++) {
        if (i < 0 || i >= columns || (double)(float)i != at) continue;
        blocks->load[in->dtype](element, row + te_operand_place(in->block, i) * in->column * in->size, 1, 1);
        blocks->op[TE_PW_ADD][0](dst, dst, element, NULL, 1);
    }
}

/* Elements are collected as they are, 0 for none, and then loaded together. Added to 0, -0 becomes 0. */
static void step_pick(te_walker *w, const te_step *step)
{
    enum { TOGETHER = 64 };
    const te_bound_operand *in = &w->operands[step->operand];
    const te_blocks        *blocks = w->blocks;
    const char             *row = w->row[step->operand], *number = w->slot[step->arg[0]];
    char                   *dst = w->slot[step->dst];
    int64_t                 columns = w->job->columns, next = te_walker_row_stride(w, in);
    size_t                  number_step = step->scalars ? 0 : blocks->size, size = (size_t)in->size;
    bool                    shared = blocks->size == sizeof(float) && columns >> 24 > 0;
    double                  zero = 0;
    for (size_t first = 0; first < w->tile_rows; first += TOGETHER, dst += TOGETHER * blocks->size) {
        size_t n = w->tile_rows - first < TOGETHER ? w->tile_rows - first : TOGETHER;
        char   elements[TOGETHER * sizeof(double)];
        memset(elements, 0, n * size);
        for (size_t r = 0; r < n; r++, row += next, number += number_step) {
            double  at = number_at(w, number);
            int64_t column = at >= 0 && at < (double)columns ? (int64_t)at : -1;
            if (shared) pick_shared(w, in, row, at, dst + r * blocks->size);
            if (shared || column < 0 || (double)column != at) continue;
            const char *from = row + te_operand_place(in->block, column) * in->column * in->size;
            if (size == 4) memcpy(elements + r * 4, from, 4);
            else if (size == 2) memcpy(elements + r * 2, from, 2);
            else memcpy(elements + r * size, from, size);
        }
        if (shared) continue;
        blocks->load[in->dtype](dst, elements, 1, n);
        blocks->op[TE_PW_ADD][2](dst, dst, &zero, NULL, n);
    }
}

/* The part of a step's share that a tile with `strips` to go has: all of it where the tile is the row. */
static te_ahead ahead_of(te_walker *w, const te_step *step, size_t strips)
{
    if (!w->fetches || strips == 0) return (te_ahead){0};
    const te_share *share = &w->shares[step->turn];
    size_t          columns = (size_t)w->job->columns, column = (size_t)w->column, all = 0;
    int             n = 0;
    for (; n < TE_FETCHED_MAX && share->part[n].lines; n++) {
        const struct te_share_part *part = &share->part[n];
        size_t first = part->lines * column / columns, end = part->lines * (column + w->tile_columns) / columns;
        const char *at = w->row[part->operand] + part->offset;
        w->ahead[n] = (te_ahead){.at = at + first * TE_LINE, .end = at + end * TE_LINE, .next = &w->ahead[n + 1],
                                 .write = part->operand >= w->job->program->n_inputs};
        all += end - first;
    }
    if (n == 0) return (te_ahead){0};
    w->ahead[n - 1].next = NULL;
    for (int i = 0; i < n; i++) w->ahead[i].each = (int64_t)((all + strips - 1) / strips) * TE_LINE;
    return w->ahead[0];
}

static const char *argument(const te_walker *w, const te_step *step, int k)
{
    return step->arg[k] >= 0 ? w->slot[step->arg[k]] : NULL;
}

/* The second factor of a sum of products. */
static const char *factor(const te_walker *w, const te_step *step) { return argument(w, step, 1); }

/* Whether an argument is bfloat16, and then or else, from one row to the next in elements. */
static int64_t fold_step(const te_walker *w, const te_step *step, int k, bool *half)
{
    if (step->arg[k] < 0) return 0;
    *half = w->form[step->arg[k]] & TE_FORM_HALF;
    return row_step(w, step->arg[k]) / (*half ? (int64_t)sizeof(uint16_t) : (int64_t)w->blocks->size);
}

/* What follows a row or window that is added up straight from memory, as far behind as memory is away: processors fetch
 * it by themselves, but too late for one core to have its share of the bandwidth. */
static te_ahead ahead_of_sum(const te_walker *w, int32_t slot, const char *src, size_t n)
{
    enum { AWAY = 6144 };
    const uint8_t form = w->form[slot];
    int64_t each = TE_FOLD_LANES * (form & TE_FORM_HALF ? (int64_t)sizeof(uint16_t) : (int64_t)w->blocks->size);
    if (w->job->bytes < TE_PAST_CACHES || !(form & TE_FORM_TENSOR)) return (te_ahead){0};
    return (te_ahead){.at = src + AWAY, .end = src + AWAY + (int64_t)(n / TE_FOLD_LANES) * each, .each = each};
}

/* Of several rows one by one where each fills the lanes: so the sum is that of rows, whatever a tile has of them. */
static void step_sum(te_walker *w, const te_step *step)
{
    size_t      pieces = w->tile_columns % TE_FOLD_LANES == 0 ? w->tile_rows : 1;
    size_t      n = w->tile_rows * w->tile_columns / (pieces ? pieces : 1);
    const char *src = w->slot[step->arg[0]], *by = factor(w, step);
    bool        half = w->form[step->arg[0]] & TE_FORM_HALF;
    for (size_t r = 0; r < pieces; r++) {
        w->blocks->fold_add(&w->sums[step->number], (te_fold_kind)step->op, src, half, by, NULL, n,
                            ahead_of_sum(w, step->arg[0], src, n));
        src += row_step(w, step->arg[0]);
        if (by) by += row_step(w, step->arg[1]);
    }
}

/* Of the columns of the tile, in the lane of its first row. */
static char *column_sums(const te_walker *w, int operand)
{
    int output = operand - w->job->program->n_inputs;
    int64_t lane = w->row_number % w->job->lanes; /* chunks begin with the first one */
    return te_job_column_part(w->job, w->parts, output, w->row_chunk) +
           (size_t)(lane * w->job->columns + w->column) * w->blocks->size;
}

/* Rows that follow one another in a slot, as many at a time as there are lanes to the end. */
static void add_lanes(const te_walker *w, int32_t slot, te_fold_columns *fold)
{
    const size_t row = w->tile_columns * w->blocks->size, lanes = (size_t)w->job->lanes;
    size_t       lane = (size_t)w->row_number % lanes, left = w->tile_rows;
    char        *sums = (char *)fold->sums - lane * row;
    fold->src_step = fold->by_step = (int64_t)(lanes * w->tile_columns);
    for (size_t n; left; left -= n, lane = 0) {
        n = lanes - lane < left ? lanes - lane : left; /* a lane's row, or all lanes' rows */
        if (lane == 0 && left > lanes) n = left - left % lanes;
        fold->rows = n > lanes ? n / lanes : 1;
        fold->columns = n / fold->rows * w->tile_columns;
        fold->sums = sums + lane * row;
        w->blocks->fold_columns(fold, ahead_of_sum(w, slot, fold->src, n * w->tile_columns));
        fold->src = (const char *)fold->src + n * row;
        if (fold->by) fold->by = (const char *)fold->by + n * row;
    }
}

static void add_columns(te_walker *w, const te_step *step)
{
    bool            here = w->operands[step->operand].present, also = step->also > 0 && w->operands[step->also].present;
    size_t          strips = step->turn >= 0 ? w->tile_rows * w->tile_columns / TE_FOLD_LANES : 0;
    te_fold_columns fold = {.rows = w->tile_rows, .columns = w->tile_columns};
    if (!here && !also) return;
    fold.src = argument(w, step, here ? 0 : 1);
    fold.src_step = fold_step(w, step, here ? 0 : 1, &fold.src_half);
    fold.sums = column_sums(w, here ? step->operand : step->also);
    if (here) {
        fold.by = argument(w, step, 1), fold.about = argument(w, step, 3), fold.times = argument(w, step, 4);
        fold.by_step = fold_step(w, step, 1, &fold.by_half);
        fold.also = also ? column_sums(w, step->also) : NULL;
    }
    if (w->job->lanes > 1 && w->tile_rows > 1) {
        add_lanes(w, step->arg[here ? 0 : 1], &fold);
        return;
    }
    bool alone = !w->fetches && here && w->tile_rows == 1;
    w->blocks->fold_columns(&fold, alone ? ahead_of_sum(w, step->arg[0], fold.src, fold.columns)
                                         : ahead_of(w, step, strips));
}

/* Whether a row sum can do these column sums on the way. In single rows they would go through memory for each. */
static bool is_beside(const te_walker *w, const te_fold_rows *rows, const te_step *sum)
{
    return w->job->band && w->operands[sum->operand].present && rows->src_half == rows->by_half && !rows->times_half;
}

static te_fold_columns columns_beside(const te_walker *w, const te_fold_rows *rows, const te_step *sum)
{
    bool also = sum->also > 0 && w->operands[sum->also].present;
    return (te_fold_columns){.sums = column_sums(w, sum->operand), .also = also ? column_sums(w, sum->also) : NULL,
                             .src = rows->src, .by = rows->by, .about = rows->about, .times = argument(w, sum, 4),
                             .src_step = rows->src_step, .by_step = rows->by_step, .rows = rows->rows,
                             .columns = rows->columns, .src_half = rows->src_half, .by_half = rows->by_half};
}

static void step_fold(te_walker *w, const te_step *step, size_t n)
{
    const char *src = w->slot[step->arg[0]], *by = factor(w, step), *about = argument(w, step, 2);
    te_ahead    ahead = ahead_of(w, step, n / TE_FOLD_LANES);
    if (w->job->kind > TE_PLAN_ROWS) {
        w->blocks->fold_add(&w->folds[step->number], (te_fold_kind)step->op, src, false, by, about, n, ahead);
        return;
    }
    te_fold_rows rows = {.src = src, .by = by, .about = about, .rows = w->tile_rows, .columns = w->tile_columns};
    rows.times = argument(w, step, 3);
    rows.also = step->also > 0 ? w->slot[step->also] : NULL;
    rows.src_step = fold_step(w, step, 0, &rows.src_half);
    rows.by_step = fold_step(w, step, 1, &rows.by_half);
    rows.times_step = fold_step(w, step, 3, &rows.times_half);
    rows.about_step = w->job->band;
    te_fold_columns beside;
    if (step->beside) {
        const te_step *sum = &w->plan->steps[step->beside];
        if (is_beside(w, &rows, sum)) {
            beside = columns_beside(w, &rows, sum);
            rows.beside = &beside;
        } else {
            add_columns(w, sum);
        }
    }
    w->blocks->fold_rows((te_fold_kind)step->op, w->slot[step->dst], &rows, ahead);
}

static inline void run_op(te_walker *w, const te_step *step, size_t n)
{
    char *const *slot = w->slot;
    const char  *a = slot[step->arg[0]];
    const char  *b = step->arg[1] >= 0 ? slot[step->arg[1]] : NULL, *c = step->arg[2] >= 0 ? slot[step->arg[2]] : NULL;
    w->blocks->op[step->op][step->scalars](slot[step->dst], a, b, c, n);
}

/* Whether a step writes the slot as an output's elements, which its own values are not. */
static bool is_rounded_output(const te_walker *w, int32_t slot)
{
    bool is = false;
    for (int o = 0; o < w->job->program->n_outputs; o++)
        is |= w->direct[o] == slot && w->plan->steps[w->plan->direct[o].step].op != TE_PW_TO_BF16;
    return is;
}

/* Argument k of a link from element `skip` on, for the block functions: bfloat16 is loaded into the slot's register,
 * where the values of an output are before they are rounded. */
static const char *rest_of(const te_walker *w, const te_step *step, int k, size_t skip, size_t n)
{
    int32_t slot = step->arg[k];
    if (slot < 0) return NULL;
    if (step->scalars >> k & 1) return w->slot[slot];
    if (!(w->form[slot] & TE_FORM_HALF)) return w->slot[slot] + skip * w->blocks->size;
    char *values = te_walker_register(w, slot) + skip * w->blocks->size;
    if (!is_rounded_output(w, slot)) w->blocks->load[TE_BF16](values, w->slot[slot] + 2 * skip, 1, n);
    return values;
}

/* What a step of a chain does to the `left` elements behind the `skip` that its link has done. */
static void finish_link(te_walker *w, const te_step *step, size_t skip, size_t left)
{
    const te_blocks *blocks = w->blocks;
    const char      *a = rest_of(w, step, 0, skip, left), *b = rest_of(w, step, 1, skip, left);
    if (step->kind == TE_STEP_COLSUM) {
        te_fold_columns fold = {.src = a, .by = b, .rows = 1, .columns = left};
        fold.sums = w->slot[step->arg[2]] + skip * blocks->size;
        blocks->fold_columns(&fold, (te_ahead){0});
        return;
    }
    bool  half = w->form[step->dst] & TE_FORM_HALF;
    char *dst = (half ? te_walker_register(w, step->dst) : w->slot[step->dst]) + skip * blocks->size;
    blocks->op[step->op][step->scalars](dst, a, b, rest_of(w, step, 2, skip, left), left);
    if (half) blocks->store[TE_BF16](w->slot[step->dst] + 2 * skip, 1, dst, left);
}

/* Whole strips by the links, what is left of the tile by the block functions. */
void te_walker_chain(te_walker *w, int first)
{
    const te_blocks *blocks = w->blocks;
    const te_step   *steps = w->plan->steps, *chain = &steps[first];
    size_t n = w->tile_rows * w->tile_columns, strips = n / blocks->strip, skip = strips * blocks->strip,
           left = n - skip;
    for (int s = first; chain->chain_sums && s < chain->chain_end; s++) {
        if (steps[s].kind != TE_STEP_COLSUM) continue;
        w->slot[steps[s].arg[2]] = column_sums(w, steps[s].operand);
        w->form[steps[s].arg[2]] = TE_FORM_TENSOR;
    }
    te_chain_run run = {.links = &w->plan->links[chain->chain], .slot = w->slot, .form = w->form, .n = skip};
    run.step = w->job->band ? w->step : NULL;
    run.window = w->job->band ? w->tile_columns : w->window ? w->window : skip;
    run.far = !w->job->band && w->window && w->job->bytes >= TE_PAST_NEAR_CACHES;
    run.gathers = te_cpu(w->job->exec)->gathers;
    run.ahead = ahead_of(w, chain, strips);
    blocks->chain(&run);
    for (int s = first; left && s < chain->chain_end; s++) finish_link(w, &steps[s], skip, left);
}

void te_walker_step(te_walker *w, const te_step *step)
{
    char  **slot = w->slot;
    size_t  n = w->tile_rows * w->tile_columns;
    switch ((te_step_kind)step->kind) {
    case TE_STEP_OP: run_op(w, step, n); break;
    case TE_STEP_ROW_OP: run_op(w, step, w->tile_rows); break;
    case TE_STEP_LOAD: step_load(w, step); break;
    case TE_STEP_LOAD_ROW: {
        const te_bound_operand *in = &w->operands[step->operand];
        int64_t stride = w->tile_rows == 1 ? 1 : te_walker_row_stride(w, in) / in->size;
        w->blocks->load[in->dtype](slot[step->dst], w->row[step->operand], stride, w->tile_rows);
        break;
    }
    case TE_STEP_PICK: step_pick(w, step); break;
    case TE_STEP_COLUMN: w->blocks->column(slot[step->dst], w->column, w->job->columns, n); break;
    case TE_STEP_RANDOM: step_random(w, step); break;
    case TE_STEP_SPREAD: step_spread(w, step); break;
    case TE_STEP_FOLD: step_fold(w, step, n); break;
    case TE_STEP_STORE: step_store(w, step); break;
    case TE_STEP_STORE_ROW: step_store_row(w, step); break;
    case TE_STEP_COLSUM:
        if (!step->beside) add_columns(w, step); /* else the row sum sees to it */
        break;
    case TE_STEP_SUM: step_sum(w, step); break;
    }
}
