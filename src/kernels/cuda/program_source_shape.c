/* program_source_shape.c - from a run to the shape of its kernel: dimensions merged, units, access to operands. */
#include "program_source_internal.h"

#include "../check.h"
#include "../dtype.h"
#include "../quantize.h"
#include "kernels/hand.h"

#include <string.h>

/* --- facts about a program --------------------------------------------------------------------------------------- */

/* Rows mean something: dimensions may not be merged into the last. */
static bool structured(const te_program *program)
{
    for (int v = 0; v < program->n_insns; v++)
        if (program->insns[v].rate == TE_RATE_ROW || program->insns[v].op == TE_PW_COLUMN) return true;
    for (int o = 0; o < program->n_outputs; o++)
        if (program->outputs[o].kind == TE_OUT_ROW || program->outputs[o].kind == TE_OUT_COLSUM) return true;
    return false;
}

/* A thread, or several, must have a row to themselves. */
static bool needs_rows(const te_program *program)
{
    for (int v = 0; v < program->n_insns; v++)
        if (te_opcode_reduces(program->insns[v].op)) return true;
    for (int o = 0; o < program->n_outputs; o++)
        if (program->outputs[o].kind == TE_OUT_ROW) return true;
    return false;
}

static bool sums_columns(const te_program *program)
{
    for (int o = 0; o < program->n_outputs; o++)
        if (program->outputs[o].kind == TE_OUT_COLSUM) return true;
    return false;
}

int te_shape_sums(const te_program *program, const te_cuda_program_shape *shape)
{
    int n = 0;
    for (int o = 0; o < program->n_outputs; o++)
        n += te_program_sums(program->outputs[o].kind) && te_shape_wants(program, shape, o);
    return n;
}

int te_shape_column_sums(const te_program *program, const te_cuda_program_shape *shape)
{
    int n = 0;
    for (int o = 0; o < program->n_outputs; o++)
        n += program->outputs[o].kind == TE_OUT_COLSUM && te_shape_wants(program, shape, o);
    return n;
}

int te_shape_quantized(const te_program *program, const te_cuda_program_shape *shape)
{
    int n = 0;
    for (int o = 0; o < program->n_outputs; o++)
        n += te_shape_output(program, shape, o)->access == TE_CUDA_QUANTIZED;
    return n;
}

bool te_shape_has_row_kernel(const te_program *program, const te_cuda_program_shape *shape)
{
    return shape->kind == TE_CUDA_SQUARES && needs_rows(program);
}

bool te_program_leaves_quantized(const te_program *program, const te_run *run)
{
    for (int o = 0; o < program->n_outputs; o++)
        if (run->outputs[o].quantized) return true;
    return false;
}

/* --- operands ---------------------------------------------------------------------------------------------------- */

/* What the shape is being made of. */
typedef struct sketch {
    const te_program      *program;
    const te_run          *run;
    te_cuda_program_shape *shape;
    int64_t                rows, columns;
} sketch;

static const te_operand *operand_of(const sketch *s, int i)
{
    return i < s->program->n_inputs ? &s->run->inputs[i] : &s->run->outputs[i - s->program->n_inputs];
}

static int rate_of(const sketch *s, int i)
{
    if (i < s->program->n_inputs) return s->program->input_rates[i];
    int kind = s->program->outputs[i - s->program->n_inputs].kind;
    return kind == TE_OUT_ELEM ? TE_RATE_ELEM : kind == TE_OUT_ROW ? TE_RATE_ROW : TE_RATE_UNIFORM;
}

/* --- dimensions -------------------------------------------------------------------------------------------------- */

/* Whether stepping over dimension a is stepping over the whole of b, for every operand with elements of its own. */
static bool mergeable(const sketch *s, int a, int b)
{
    for (int i = 0; i < s->shape->n_operands; i++) {
        const te_operand *operand = operand_of(s, i);
        if (operand->block && b == s->run->ndim - 1) return false;
        if (rate_of(s, i) != TE_RATE_UNIFORM && operand->data &&
            operand->stride[a] != operand->stride[b] * s->run->shape[b])
            return false;
    }
    return true;
}

/* Drops dimensions of extent 1 and merges neighbours. */
static void merge_dimensions(sketch *s)
{
    te_cuda_program_shape *shape = s->shape;
    int                    last = s->run->ndim - 1, n = 0;
    bool                   rows_matter = structured(s->program) || te_program_leaves_quantized(s->program, s->run);
    int64_t                extent[TE_MAX_DIMS];
    for (int d = 0; d <= last; d++) {
        if (s->run->shape[d] == 1 || (rows_matter && d == last)) continue;
        if (n > 0 && mergeable(s, shape->axis[n - 1], d)) {
            extent[n - 1] *= s->run->shape[d];
        } else {
            extent[n++] = s->run->shape[d];
        }
        shape->axis[n - 1] = (uint8_t)d;
    }
    s->columns = 1;
    shape->rows_matter = rows_matter;
    shape->column_axis = (uint8_t)last;
    if (rows_matter) {
        s->columns = s->run->shape[last];
    } else if (n > 0) {
        s->columns = extent[--n];
        shape->column_axis = shape->axis[n];
    }
    shape->n_outer = (uint8_t)n;
    s->rows = 1;
    for (int d = 0; d < n; d++) s->rows *= extent[d];
    for (int d = n; d < TE_MAX_DIMS; d++) shape->axis[d] = 0;
}

static int64_t column_stride(const sketch *s, const te_operand *operand)
{
    return s->columns == 1 ? 1 : operand->stride[s->shape->column_axis];
}

/* 0 where the columns of an operand follow one another. */
static int64_t block_of(const sketch *s, int i)
{
    return s->shape->column_axis == s->run->ndim - 1 ? operand_of(s, i)->block : 0;
}

/* Offsets, and counters that run a grid beyond the end, fit 32 bits. */
static bool is_wide(const sketch *s)
{
    const int64_t limit = INT32_MAX - (1 << 24);
    if (s->rows > 0 && s->columns > limit / s->rows) return true;
    for (int i = 0; i < s->shape->n_operands; i++) {
        int64_t farthest = 0;
        for (int d = 0; d < s->run->ndim; d++)
            if (s->run->shape[d] > 1) farthest += (s->run->shape[d] - 1) * operand_of(s, i)->stride[d];
        if (farthest > (operand_of(s, i)->block ? limit / 2 : limit)) return true;
    }
    return false;
}

/* --- units ------------------------------------------------------------------------------------------------------- */

/* As many elements as 16 bytes of the narrowest operand, at most 8; a divisor of the row unless the row is all there
 * is. Depends on shapes, strides and types, not on addresses, since it gives the order of sums. */
static int unit_of(const sketch *s)
{
    int  size = 16, most = s->shape->compute_f64 ? 4 : 8;
    bool any = false;
    for (int i = 0; i < s->shape->n_operands; i++) {
        const te_operand *operand = operand_of(s, i);
        bool quantized = operand->quantized != NULL; /* units are those of a run that stores its source */
        if (rate_of(s, i) != TE_RATE_ELEM) continue;
        if (!quantized && (!operand->data || column_stride(s, operand) != 1)) continue;
        int bytes = (int)te_dtype_size(quantized ? operand->quantized->dtype : operand->dtype);
        if (bytes < size) size = bytes;
        any = true;
    }
    /* threads side by side should store side by side: no unit of what is stored is wider than one access */
    for (int o = 0; s->shape->kind == TE_CUDA_FLAT && o < s->program->n_outputs; o++) {
        const te_operand *output = &s->run->outputs[o];
        int bytes = (int)te_dtype_size(output->dtype);
        if (s->program->outputs[o].kind == TE_OUT_ELEM && output->data && bytes > size) size = bytes;
    }
    int unit = any ? 16 / size : 1;
    if (unit > most) unit = most;
    bool tail = s->shape->kind == TE_CUDA_FLAT && s->shape->n_outer == 0;
    while (unit > 1 && !tail && s->columns % unit != 0) unit /= 2;
    for (int i = 0; i < s->shape->n_operands; i++)
        while (block_of(s, i) % unit != 0) unit /= 2;
    return unit;
}

static bool walks_rows(const sketch *s)
{
    return s->shape->kind != TE_CUDA_FLAT && s->shape->kind != TE_CUDA_TILED && s->shape->n_outer > 0;
}

static bool alike(const sketch *s, const te_operand *operand)
{
    for (int d = 0; d < s->shape->n_outer; d++)
        if (operand->stride[s->shape->axis[d]] != 0) return false;
    return true;
}

static te_cuda_access access_of(const sketch *s, int i)
{
    const te_operand *operand = operand_of(s, i);
    int64_t           stride = column_stride(s, operand);
    int               rate = rate_of(s, i), unit = s->shape->vector;
    if (operand->quantized) return TE_CUDA_QUANTIZED;
    if (!operand->data) return TE_CUDA_ABSENT;
    if (rate != TE_RATE_ELEM) return TE_CUDA_SAME;
    if (stride == 0 && i < s->program->n_inputs) return TE_CUDA_SAME;
    if (stride != 1) return TE_CUDA_STRIDED;
    size_t bytes = te_dtype_size(operand->dtype) * (size_t)unit;
    bool   aligned = (uintptr_t)operand->data % (bytes < 16 ? bytes : 16) == 0;
    for (int d = 0; d < s->shape->n_outer; d++) aligned &= operand->stride[s->shape->axis[d]] % unit == 0;
    if (!aligned && unit > 1) return TE_CUDA_NEXT;
    return walks_rows(s) && i < s->program->n_inputs && alike(s, operand) ? TE_CUDA_ALIKE : TE_CUDA_VECTOR;
}

static void reach_operands(sketch *s)
{
    for (int i = 0; i < s->shape->n_operands; i++) {
        te_cuda_operand_shape *shape = &s->shape->operand[i];
        shape->access = (uint8_t)access_of(s, i);
        shape->dtype = shape->access == TE_CUDA_ABSENT ? 0 : (uint8_t)operand_of(s, i)->dtype;
        if (shape->access == TE_CUDA_QUANTIZED) {
            shape->dtype = (uint8_t)operand_of(s, i)->quantized->dtype;
            shape->variant = te_cuda_quantize_variant(operand_of(s, i)->quantized->quantizer);
        }
        shape->accumulate =
            i >= s->program->n_inputs && operand_of(s, i)->data && operand_of(s, i)->accumulate;
        shape->blocked = shape->access != TE_CUDA_ABSENT && block_of(s, i) != 0;
    }
}

/* --- rows -------------------------------------------------------------------------------------------------------- */

/* A warp or less while a thread holds at most WARP_HELD elements of a row and WARP_SUMS sums of their columns; then
 * blocks, the smallest whose threads hold at most BLOCK_HELD. Longer rows are not held, and have large blocks only
 * where there are few of them. */
static void share_row(sketch *s)
{
    enum { WARP_HELD = 32, WARP_ITEMS = 4, BLOCK_HELD = 16, LONG_ROW = 1024, MANY_ROWS = 1024, WARP_SUMS = 48 };
    te_cuda_program_shape *shape = s->shape;
    int64_t                units = s->columns / shape->vector;
    shape->items = 1;
    shape->lanes = 1;
    while (shape->lanes < 32 && shape->lanes < units) shape->lanes *= 2;
    if (units <= shape->lanes) return;
    int64_t items = (units + 31) / 32, sums = te_shape_column_sums(s->program, shape);
    if (items <= WARP_ITEMS && items * shape->vector <= WARP_HELD && items * shape->vector * sums <= WARP_SUMS) {
        shape->items = (uint8_t)items;
        return;
    }
    for (int threads = 128; threads <= LONG_ROW; threads *= 2) {
        items = (units + threads - 1) / threads;
        shape->lanes = (uint16_t)threads;
        shape->items = items * shape->vector <= BLOCK_HELD ? (uint8_t)items : 0;
        if (shape->items) break;
    }
    if (!shape->items && s->rows >= MANY_ROWS) shape->lanes = 256; /* several blocks a multiprocessor */
    /* with that many threads registers are few: smaller units where a thread then holds less */
    while (shape->lanes == LONG_ROW && shape->items > 1 && shape->vector > 2) {
        int64_t half = shape->vector / 2, more = (s->columns / half + LONG_ROW - 1) / LONG_ROW;
        if (more * half >= shape->items * shape->vector) break;
        shape->vector = (uint8_t)half;
        shape->items = (uint8_t)more;
    }
}

/* Blocks share rows that are not held where one block would be busy with a row for long: it reads 100 to 200 GB/s, so
 * LONG bytes in about the time of the launch that a level takes in addition. Where there are many rows the blocks of
 * one row each read nearly as fast as memory is, and sharing gains less, so rows have to be longer; from MOST_ROWS on
 * there is a block for every second multiprocessor without it. */
static void share_long_rows(sketch *s)
{
    enum { MOST_ROWS = 64, LONG = 256 << 10, LONG_FOR_EACH = 32 << 10, THREADS = 256 };
    te_cuda_program_shape *shape = s->shape;
    int64_t                bytes = 0;
    if (shape->items > 0 || s->rows < 1 || s->rows > MOST_ROWS) return;
    if (te_shape_sums(s->program, shape) + te_shape_column_sums(s->program, shape) > 0) return;
    for (int i = 0; i < s->program->n_inputs; i++) {
        int access = shape->operand[i].access;
        if (rate_of(s, i) == TE_RATE_ELEM && access != TE_CUDA_ABSENT && access != TE_CUDA_SAME)
            bytes += (int64_t)te_dtype_size((te_dtype)shape->operand[i].dtype) * s->columns;
    }
    if (bytes < LONG || bytes < s->rows * LONG_FOR_EACH) return;
    shape->levels = (uint8_t)te_shape_levels(s->program, shape);
    if (shape->levels) shape->lanes = THREADS;
}

/* Whether rows that results are quantized of are held, and the codes of several fit in shared memory beside those of
 * other blocks: inputs are then read once. */
static bool fits_bands(const sketch *s)
{
    enum { SHARED_BYTES = 64 << 10, LEAST = 16 };
    int  n = 0;
    bool turns = false;
    if (!s->shape->items || s->shape->lanes < 32) return false;
    for (int o = 0; o < s->program->n_outputs; o++) {
        const te_quantize_job *job = s->run->outputs[o].quantized;
        if (!job) continue;
        if (!te_cuda_quantizes_whole(te_cuda_quantize_variant(job->quantizer))) return false;
        turns |= job->side[1].data && job->step != TE_QUANTIZE_MEASURE;
        n++;
    }
    int bytes = turns ? n * te_shape_band_columns(s->shape) : 0, band = TE_CUDA_BAND;
    while (band > LEAST && bytes * band > SHARED_BYTES) band /= 2;
    s->shape->band = bytes * band <= SHARED_BYTES ? (uint8_t)band : 0;
    return s->shape->band > 0;
}

/* Neighbours in a warp take neighbouring units. */
static void share_columns(sketch *s)
{
    te_cuda_program_shape *shape = s->shape;
    int64_t                units = s->columns / shape->vector;
    shape->kind = TE_CUDA_COLUMNS;
    while (shape->lanes < 32 && shape->lanes < units) shape->lanes *= 2;
    shape->direct = te_shape_blocks_down(shape, s->rows, s->columns) == 1;
}

/* --- tiles ------------------------------------------------------------------------------------------------------- */

static bool turns(const sketch *s, int i, int axis)
{
    const te_operand *operand = operand_of(s, i);
    return s->shape->operand[i].access == TE_CUDA_STRIDED && !s->shape->operand[i].accumulate &&
           !s->shape->operand[i].blocked && operand->stride[axis] == 1;
}

int te_shape_tile(const te_cuda_program_shape *shape) { return TE_CUDA_TILE * shape->vector; }

int te_shape_tile_pitch(const te_cuda_program_shape *shape, size_t element)
{
    bool pairs = shape->vector == 2 && element == 2; /* which are words */
    return te_shape_tile(shape) + (pairs ? 2 : 1);
}

static size_t tile_bytes(const sketch *s, int i)
{
    size_t element = te_dtype_size(operand_of(s, i)->dtype);
    return (size_t)te_shape_tile(s->shape) * (size_t)te_shape_tile_pitch(s->shape, element) * element;
}

/* Whether units of two lie whole in memory both ways. */
static bool in_pairs(const sketch *s, int i, int across)
{
    const te_operand *operand = operand_of(s, i);
    bool              even = block_of(s, i) % 2 == 0;
    if (!turns(s, i, across)) return even;
    even &= (uintptr_t)operand->data % (2 * te_dtype_size(operand->dtype)) == 0 && column_stride(s, operand) % 2 == 0;
    for (int d = 0; d < s->shape->n_outer; d++)
        even &= s->shape->axis[d] == across || operand->stride[s->shape->axis[d]] % 2 == 0;
    return even;
}

/* Small elements are moved in pairs: one at a time, instructions would take longer than memory. Not where that would
 * make the order of a sum depend on addresses. */
static void choose_tile(sketch *s, int across, size_t most_shared)
{
    te_cuda_program_shape *shape = s->shape;
    bool   small = false, sums = te_shape_sums(s->program, shape) + te_shape_column_sums(s->program, shape) > 0;
    bool   pairs = !sums && !shape->compute_f64 && s->columns % 2 == 0 && s->run->shape[across] % 2 == 0;
    size_t shared = 0;
    shape->vector = 2;
    for (int i = 0; i < shape->n_operands; i++) {
        if (rate_of(s, i) != TE_RATE_ELEM || !operand_of(s, i)->data) continue;
        pairs &= in_pairs(s, i, across);
        small |= te_dtype_size(operand_of(s, i)->dtype) <= 2;
        if (turns(s, i, across)) shared += tile_bytes(s, i);
    }
    shape->vector = pairs && small && shared <= most_shared ? 2 : 1;
}

/* The outer dimension along which most operands have their neighbours becomes the last outer one. */
static void turn_tiles(sketch *s)
{
    enum { WORTHWHILE = 8, SHARED_BYTES = 46 << 10 };
    te_cuda_program_shape *shape = s->shape;
    int                    best = -1, most = 0;
    if (s->columns < WORTHWHILE) return;
    for (int d = 0; d < shape->n_outer; d++) {
        int n = 0;
        for (int i = 0; i < shape->n_operands; i++) n += turns(s, i, shape->axis[d]);
        if (n > most && s->run->shape[shape->axis[d]] >= WORTHWHILE) best = d, most = n;
    }
    if (best < 0) return;
    uint8_t across = shape->axis[best];
    for (int d = best; d + 1 < shape->n_outer; d++) shape->axis[d] = shape->axis[d + 1];
    shape->axis[shape->n_outer - 1] = across;
    shape->kind = TE_CUDA_TILED;
    choose_tile(s, across, SHARED_BYTES);
    reach_operands(s);
    size_t shared = 0;
    for (int i = 0; i < shape->n_operands; i++) {
        size_t bytes = tile_bytes(s, i);
        if (!turns(s, i, across) || shared + bytes > SHARED_BYTES) continue;
        shared += bytes;
        shape->operand[i].access = TE_CUDA_TURNED;
    }
}

/* --- tables ------------------------------------------------------------------------------------------------------ */

/* Whether making tables takes little of the time that they save. Tiles of values that are quantized leave them no
 * room; how sums are shared among blocks is not to depend on them. */
static bool wants_tables(const sketch *s)
{
    enum { MANY = 1 << 24 };
    const te_cuda_program_shape *shape = s->shape;
    te_program_table tables[TE_CUDA_TABLES];
    bool fits = shape->kind == TE_CUDA_FLAT || shape->kind == TE_CUDA_COLUMNS || shape->kind == TE_CUDA_SQUARES;
    if (!fits || te_shape_sums(s->program, shape) > 0 || s->rows == 0 || s->columns < MANY / s->rows) return false;
    for (int o = 0; o < s->program->n_outputs; o++) {
        const te_quantize_job *job = s->run->outputs[o].quantized;
        if (job && !te_cuda_quantizes_whole(te_cuda_quantize_variant(job->quantizer))) return false;
    }
    return te_cuda_tables(s->program, shape, tables) > 0;
}

/* --- checks ------------------------------------------------------------------------------------------------------ */

static te_status check_quantized(te_exec *exec, const te_program *program, const te_run *run, int o)
{
    const te_quantize_job *job = run->outputs[o].quantized;
    int64_t rows = 1;
    for (int d = 0; d + 1 < run->ndim; d++) rows *= run->shape[d];
    bool fits = program->outputs[o].kind == TE_OUT_ELEM && !run->outputs[o].data && !run->compute_f64 &&
                rows == job->rows && run->shape[run->ndim - 1] == job->cols &&
                (job->step != TE_QUANTIZE_BOTH || !te_quantizer_measures(job->quantizer));
    return fits ? TE_OK
                : te_exec_fail(exec, TE_ERROR_ARGUMENT,
                               "program %s: output %d cannot be left quantized: rows of %lld, %lld", program->name, o,
                               (long long)job->rows, (long long)job->cols);
}

static te_status check_run(te_exec *exec, const te_program *program, const te_run *run)
{
    te_status status = te_check_run(exec, program, run);
    if (program->n_inputs + program->n_outputs > TE_CUDA_MAX_OPERANDS)
        return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "program %s: %d operands, the CUDA backend takes up to %d",
                            program->name, program->n_inputs + program->n_outputs, TE_CUDA_MAX_OPERANDS);
    for (int o = 0; o < program->n_outputs && status == TE_OK; o++)
        if (run->outputs[o].quantized) status = check_quantized(exec, program, run, o);
    return status;
}

te_status te_cuda_program_shape_make(te_exec *exec, const te_program *program, const te_run *run,
                                     te_cuda_program_shape *shape)
{
    memset(shape, 0, sizeof *shape);
    te_status status = check_run(exec, program, run);
    if (status != TE_OK) return status;
    sketch s = {.program = program, .run = run, .shape = shape};
    bool rows = needs_rows(program), squares = te_program_leaves_quantized(program, run);
    shape->kind = squares ? TE_CUDA_SQUARES : rows || sums_columns(program) ? TE_CUDA_ROWS : TE_CUDA_FLAT;
    shape->compute_f64 = run->compute_f64;
    shape->n_operands = (uint8_t)(program->n_inputs + program->n_outputs);
    shape->runs = 1;
    shape->lanes = 1;
    merge_dimensions(&s);
    shape->vector = (uint8_t)unit_of(&s);
    shape->wide = is_wide(&s);
    reach_operands(&s);
    if (!rows && !squares) turn_tiles(&s);
    if (shape->kind == TE_CUDA_ROWS && !rows) {
        share_columns(&s);
    } else if (shape->kind == TE_CUDA_ROWS || squares) {
        share_row(&s);
        if (shape->kind == TE_CUDA_ROWS) share_long_rows(&s);
        shape->full = s.columns > 0 && s.columns == (int64_t)shape->lanes * shape->items * shape->vector;
        if (squares && rows && fits_bands(&s)) shape->kind = TE_CUDA_ROWS;
        reach_operands(&s); /* units may have changed */
    }
    shape->tables = wants_tables(&s);
    int quantized = te_shape_quantized(program, shape) * (int)(sizeof(te_quantize_args) / 8);
    if (2 * TE_CUDA_TAIL_WORDS + te_cuda_run_words(program, shape) + quantized > TE_CUDA_ARGS / 8)
        return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "program %s: too many operands for one CUDA kernel",
                            program->name);
    return TE_OK;
}
