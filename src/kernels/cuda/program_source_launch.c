/* program_source_launch.c - arguments and geometry of the launches of a program's kernel. */
#include "program_source_internal.h"

#include "../philox.h"
#include "../quantize.h"
#include "kernels/hand.h"

#include <string.h>

/* --- fields ------------------------------------------------------------------------------------------------------ */

static bool has_random(const te_program *program)
{
    for (int v = 0; v < program->n_insns; v++)
        if (te_opcode_is_random(program->insns[v].op)) return true;
    return false;
}

/* The number that a KEEP's argument is, when it is given in float64. */
static bool given_probability(const te_program *program, int v)
{
    if (program->insns[v].op != TE_PW_KEEP) return false;
    int op = program->insns[program->insns[v].arg[0]].op;
    return op == TE_PW_CONST || op == TE_PW_PARAM;
}

static void visit_operand(const te_program *program, const te_cuda_program_shape *shape, int i, te_field_visitor visit,
                          void *user)
{
    int  rate = i < program->n_inputs ? program->input_rates[i] : TE_RATE_UNIFORM, access = shape->operand[i].access;
    bool column = access == TE_CUDA_STRIDED || access == TE_CUDA_TURNED;
    if (i >= program->n_inputs) {
        int kind = program->outputs[i - program->n_inputs].kind;
        rate = kind == TE_OUT_ELEM ? TE_RATE_ELEM : kind == TE_OUT_ROW ? TE_RATE_ROW : TE_RATE_UNIFORM;
        column |= kind == TE_OUT_COLSUM;
    }
    if (access == TE_CUDA_ABSENT || access == TE_CUDA_QUANTIZED) return;
    visit(user, (te_field){TE_FIELD_POINTER, i, 0});
    if (column) visit(user, (te_field){TE_FIELD_COLUMN_STRIDE, i, 0});
    if (shape->operand[i].blocked) visit(user, (te_field){TE_FIELD_BLOCK, i, 0});
    for (int d = 0; rate != TE_RATE_UNIFORM && d < shape->n_outer; d++)
        visit(user, (te_field){TE_FIELD_OUTER_STRIDE, i, d});
}

void te_cuda_visit_fields(const te_program *program, const te_cuda_program_shape *shape, te_field_visitor visit,
                          void *user)
{
    visit(user, (te_field){TE_FIELD_ROWS, 0, 0});
    visit(user, (te_field){TE_FIELD_COLUMNS, 0, 0});
    visit(user, (te_field){TE_FIELD_FIRST_BLOCK, 0, 0});
    visit(user, (te_field){TE_FIELD_BLOCKS, 0, 0});
    for (int d = 0; d < shape->n_outer; d++) visit(user, (te_field){TE_FIELD_EXTENT, 0, d});
    for (int d = 0; shape->kind == TE_CUDA_TILED && has_random(program) && d < shape->n_outer; d++)
        visit(user, (te_field){TE_FIELD_POSITION, 0, d});
    for (int i = 0; i < shape->n_operands; i++) visit_operand(program, shape, i, visit, user);
    for (int i = 0; i < program->n_params; i++) visit(user, (te_field){TE_FIELD_PARAM, i, 0});
    for (int v = 0; v < program->n_insns; v++)
        if (given_probability(program, v)) visit(user, (te_field){TE_FIELD_KEEP, v, 0});
    for (int i = 0; i < program->n_rngs; i++) {
        visit(user, (te_field){TE_FIELD_SEED, i, 0});
        visit(user, (te_field){TE_FIELD_STREAM, i, 0});
        visit(user, (te_field){TE_FIELD_OFFSET, i, 0});
        visit(user, (te_field){TE_FIELD_BASE, i, 0});
    }
}

static void count_field(void *user, te_field field)
{
    (void)field;
    ++*(int *)user;
}

int te_cuda_run_words(const te_program *program, const te_cuda_program_shape *shape)
{
    int words = 0;
    te_cuda_visit_fields(program, shape, count_field, &words);
    return words;
}

/* --- values ------------------------------------------------------------------------------------------------------ */

/* One run being written. */
typedef struct writer {
    const te_program            *program;
    const te_cuda_program_shape *shape;
    const te_run                *run;
    int64_t                      rows, columns, first_block, blocks;
    uint64_t                    *at;
} writer;

static const te_operand *operand_of(const writer *w, int i)
{
    return i < w->program->n_inputs ? &w->run->inputs[i] : &w->run->outputs[i - w->program->n_inputs];
}

/* Extent of the outer dimension d, which may be several of the run's, merged. */
static int64_t outer_extent(const te_cuda_program_shape *shape, const te_run *run, int d)
{
    int64_t extent = 1;
    int     last = shape->axis[d], before = -1;
    for (int e = 0; e < shape->n_outer; e++)
        if (shape->axis[e] < last && shape->axis[e] > before) before = shape->axis[e];
    for (int axis = before + 1; axis <= last; axis++) extent *= run->shape[axis];
    return extent;
}

static int64_t row_length(const te_cuda_program_shape *shape, const te_run *run)
{
    int64_t extent = 1;
    int     before = -1;
    for (int e = 0; e < shape->n_outer; e++)
        if (shape->axis[e] > before && shape->axis[e] < shape->column_axis) before = shape->axis[e];
    if (shape->rows_matter) return run->shape[shape->column_axis];
    for (int axis = before + 1; axis <= shape->column_axis; axis++) extent *= run->shape[axis];
    return extent;
}

/* Elements, row-major, from one index of the outer dimension d to the next. */
static int64_t position_stride(const writer *w, int d)
{
    int64_t stride = 1;
    for (int axis = w->shape->axis[d] + 1; axis < w->run->ndim; axis++) stride *= w->run->shape[axis];
    return stride;
}

static uint64_t keep_threshold(const writer *w, int v)
{
    const te_insn *given = &w->program->insns[w->program->insns[v].arg[0]];
    return te_rng_threshold(given->op == TE_PW_CONST ? given->imm : w->run->params[given->slot]);
}

static uint64_t field_value(const writer *w, te_field f)
{
    const te_cuda_program_shape *shape = w->shape;
    switch (f.kind) {
    case TE_FIELD_ROWS: return (uint64_t)w->rows;
    case TE_FIELD_COLUMNS: return (uint64_t)w->columns;
    case TE_FIELD_FIRST_BLOCK: return (uint64_t)w->first_block;
    case TE_FIELD_BLOCKS: return (uint64_t)w->blocks;
    case TE_FIELD_EXTENT: return (uint64_t)outer_extent(shape, w->run, f.dim);
    case TE_FIELD_POSITION: return (uint64_t)position_stride(w, f.dim);
    case TE_FIELD_POINTER: return (uint64_t)(uintptr_t)operand_of(w, f.index)->data;
    case TE_FIELD_COLUMN_STRIDE:
        return w->columns == 1 ? 1 : (uint64_t)operand_of(w, f.index)->stride[shape->column_axis];
    case TE_FIELD_BLOCK: return (uint64_t)operand_of(w, f.index)->block;
    case TE_FIELD_OUTER_STRIDE: return (uint64_t)operand_of(w, f.index)->stride[shape->axis[f.dim]];
    case TE_FIELD_PARAM: return te_f64_bits(w->run->params[f.index]);
    case TE_FIELD_KEEP: return keep_threshold(w, f.index);
    case TE_FIELD_SEED: return w->run->rngs[f.index].seed;
    case TE_FIELD_STREAM: return w->run->rngs[f.index].stream;
    case TE_FIELD_OFFSET: return w->run->rngs[f.index].offset;
    case TE_FIELD_BASE: return (uint64_t)(uintptr_t)w->run->rngs[f.index].base;
    }
    return 0;
}

static void write_field(void *user, te_field field)
{
    writer *w = user;
    *w->at++ = field_value(w, field);
}

/* --- geometry ---------------------------------------------------------------------------------------------------- */

static void measure(writer *w)
{
    w->columns = row_length(w->shape, w->run);
    w->rows = 1;
    for (int d = 0; d < w->shape->n_outer; d++) w->rows *= outer_extent(w->shape, w->run, d);
}

static int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int64_t bounded(int64_t n, int64_t most) { return n < 1 ? 1 : n > most ? most : n; }

/* Blocks of one run. Where there are sums this depends on the shape alone; enough to fill any device, few enough for
 * the joining to be cheap. */
static int64_t blocks_of(const writer *w, int multiprocessors)
{
    enum { SUM_BLOCKS = 1024, MULTIPROCESSORS = 132, UNITS_PER_SUM = 4, PER_MULTIPROCESSOR = 32 };
    const te_cuda_program_shape *shape = w->shape;
    int     sums = te_shape_sums(w->program, shape), columns = te_shape_column_sums(w->program, shape);
    int64_t full = (int64_t)bounded(multiprocessors, 512) * PER_MULTIPROCESSOR;
    if (shape->tables) full = (int64_t)multiprocessors * te_shape_table_blocks(w->program, shape);
    if (shape->levels) return w->rows * te_shape_shares(shape, w->rows, w->columns);
    if (shape->kind == TE_CUDA_ROWS) {
        int64_t blocks = divided_up(w->rows, shape->band ? shape->band : te_shape_rows_at_once(shape));
        int64_t each = te_shape_column_blocks(w->program, shape); /* so many run at once, and none waits for another */
        return bounded(blocks, columns ? MULTIPROCESSORS * (each > 2 ? each : 2) : sums ? SUM_BLOCKS : full);
    }
    if (shape->kind == TE_CUDA_COLUMNS)
        return te_shape_blocks_across(shape, w->columns) * te_shape_blocks_down(shape, w->rows, w->columns);
    if (shape->kind == TE_CUDA_SQUARES) {
        int64_t squares = divided_up(w->rows, TE_CUDA_SQUARE) * divided_up(w->columns, TE_CUDA_SQUARE);
        if (sums) return bounded(squares, SUM_BLOCKS); /* column sums have parts per row of squares */
        if (shape->tables) return bounded(squares, full);
        int64_t each = bounded(divided_up(squares, full / 2), INT64_MAX); /* of many, each block has several */
        return bounded(divided_up(squares, each), full);
    }
    if (shape->kind == TE_CUDA_TILED) {
        int64_t across = outer_extent(shape, w->run, shape->n_outer - 1), batch = across ? w->rows / across : 0;
        int64_t edge = te_shape_tile(shape), tiles = batch * divided_up(across, edge) * divided_up(w->columns, edge);
        return bounded(tiles, sums + columns ? SUM_BLOCKS : full);
    }
    int64_t units = w->rows * divided_up(w->columns, shape->vector);
    if (sums) return bounded(divided_up(units, UNITS_PER_SUM * TE_CUDA_FLAT_THREADS), SUM_BLOCKS);
    return bounded(divided_up(units, te_shape_threads(shape)), full);
}

static writer writer_for(const te_program *program, const te_cuda_program_shape *shape, const te_run *run)
{
    writer w = {.program = program, .shape = shape, .run = run};
    measure(&w);
    return w;
}

static int64_t all_blocks(const te_program *program, const te_cuda_program_shape *shape, const te_run *runs, int n_runs,
                          int multiprocessors)
{
    int64_t blocks = 0;
    for (int r = 0; r < n_runs; r++) {
        writer w = writer_for(program, shape, &runs[r]);
        blocks += blocks_of(&w, multiprocessors);
    }
    return blocks;
}

/* --- interface --------------------------------------------------------------------------------------------------- */

int te_cuda_program_batch(te_exec *exec, const te_program *program, te_cuda_program_shape *shape, const te_run *runs,
                          int n_runs)
{
    int room = (TE_CUDA_ARGS / 8 - TE_CUDA_TAIL_WORDS) / te_cuda_run_words(program, shape), n = 1;
    if (room > TE_CUDA_MAX_RUNS) room = TE_CUDA_MAX_RUNS;
    if (shape->kind != TE_CUDA_FLAT || shape->n_outer > 0) room = 1;
    while (n < n_runs && n < room) {
        te_cuda_program_shape other;
        if (te_cuda_program_shape_make(exec, program, &runs[n], &other) != TE_OK ||
            memcmp(shape, &other, sizeof other) != 0)
            break;
        n++;
    }
    /* few modules for models of all sizes */
    int rounded = (n + TE_CUDA_RUNS_STEP - 1) / TE_CUDA_RUNS_STEP * TE_CUDA_RUNS_STEP;
    if (n > 1) shape->runs = (uint8_t)(rounded < room ? rounded : room);
    return n;
}

static int reductions(const te_program *program)
{
    int n = 0;
    for (int v = 0; v < program->n_insns; v++) n += te_opcode_reduces(program->insns[v].op);
    return n;
}

/* Rows of parts that a column sum is joined from: one per block, in TILED and SQUARES one per row of tiles, in COLUMNS
 * one per row of blocks. Of shared rows it is the number of shares. */
static int64_t column_parts(const te_program *program, const te_cuda_program_shape *shape, const te_run *run,
                            int64_t blocks)
{
    writer w = writer_for(program, shape, run);
    if (shape->levels) return te_shape_shares(shape, w.rows, w.columns);
    if (shape->kind == TE_CUDA_SQUARES) return divided_up(w.rows, TE_CUDA_SQUARE);
    if (shape->kind == TE_CUDA_COLUMNS) return te_shape_blocks_down(shape, w.rows, w.columns);
    if (shape->kind != TE_CUDA_TILED) return blocks;
    int64_t across = outer_extent(shape, run, shape->n_outer - 1);
    return across ? w.rows / across * divided_up(across, te_shape_tile(shape)) : 0;
}

/* Column parts come first, each of them 64-byte aligned by what precedes it being one number per column and part. */
static size_t column_bytes(const te_program *program, const te_cuda_program_shape *shape, const te_run *runs,
                           int64_t blocks)
{
    size_t bytes = (size_t)te_shape_column_parts(program, shape) *
                   (size_t)column_parts(program, shape, &runs[0], blocks) * (size_t)row_length(shape, &runs[0]) *
                   (shape->compute_f64 ? 8u : 4u);
    return (bytes + 63) / 64 * 64;
}

/* Values of rows come last, or the parts of their reductions, a number per block. */
static size_t row_value_bytes(const te_program *program, const te_cuda_program_shape *shape, const te_run *run)
{
    if (!shape->levels && !te_shape_has_row_kernel(program, shape)) return 0;
    writer w = writer_for(program, shape, run);
    if (shape->levels)
        return (size_t)reductions(program) * (size_t)blocks_of(&w, 1) * (shape->compute_f64 ? 8u : 4u);
    return (size_t)te_program_row_values(program) * (size_t)w.rows * sizeof(float);
}

size_t te_cuda_program_parts(const te_program *program, const te_cuda_program_shape *shape, const te_run *runs,
                             int n_runs)
{
    int sums = te_shape_sums(program, shape), columns = te_shape_column_parts(program, shape);
    size_t rows = row_value_bytes(program, shape, runs);
    if (sums + columns == 0) return rows;
    int64_t blocks = all_blocks(program, shape, runs, n_runs, 1);
    return (columns ? column_bytes(program, shape, runs, blocks) : 0) + (size_t)(sums * blocks) * sizeof(double) + 64 +
           rows;
}

static void set_geometry(te_cuda_launch *launch, const char *name, int64_t grid, int threads)
{
    launch->name = name;
    launch->grid[0] = (uint32_t)grid;
    launch->block[0] = (uint32_t)threads;
    launch->grid[1] = launch->grid[2] = launch->block[1] = launch->block[2] = 1;
    launch->shared = 0;
}

/* Tiles of values, codes, and for blocks of several lines an amax per line; where there is one factor for all, codes
 * that are stored transposed. */
uint32_t te_cuda_program_shared(const te_program *program, const te_cuda_program_shape *shape, const te_run *run)
{
    size_t tiles = 0, lines = 0, whole = 0;
    bool   turns = false;
    for (int o = 0; o < program->n_outputs; o++) {
        const te_quantize_job *job = run->outputs[o].quantized;
        if (!job) continue;
        if (te_cuda_quantizes_whole(te_cuda_quantize_variant(job->quantizer))) {
            whole += shape->kind == TE_CUDA_ROWS ? (size_t)shape->band * (size_t)te_shape_band_columns(shape)
                                                 : TE_CUDA_SQUARE_CODES;
            turns |= job->side[1].data && job->step != TE_QUANTIZE_MEASURE;
            continue;
        }
        size_t each = te_cuda_quantize_lines(job->quantizer);
        tiles += TE_CUDA_SQUARE_TILE * te_dtype_size(job->dtype);
        if (each > lines) lines = each;
    }
    if (tiles) tiles += TE_CUDA_SQUARE_CODES + lines;
    return (uint32_t)(tiles + (tiles || turns ? whole : 0));
}

/* Whether the sums of runs go to places of their own, so that none waits for another: they are in order then. */
static bool sums_apart(const te_program *program, const te_cuda_program_shape *shape, const te_run *runs, int n)
{
    for (int r = 1; r < n; r++)
        for (int o = 0; o < program->n_outputs; o++)
            if (te_program_sums(program->outputs[o].kind) && te_shape_wants(program, shape, o) &&
                (uintptr_t)runs[r].outputs[o].data <= (uintptr_t)runs[r - 1].outputs[o].data)
                return false;
    return true;
}

/* The first launch's arguments serve all others. */
static te_cuda_launch *same_arguments(te_cuda_launch *launches, int i)
{
    if (i == 0) return launches;
    launches[i].args_bytes = launches[0].args_bytes;
    launches[i].args = launches[0].args;
    return &launches[i];
}

/* A kernel per level of reductions, one for elements, one for values of rows. */
static int launch_shared(const te_program *program, const te_cuda_program_shape *shape, int64_t rows, int64_t blocks,
                         te_cuda_launch launches[TE_CUDA_LAUNCHES])
{
    static const char *const levels[TE_CUDA_MAX_LEVELS] = {"te_program_level0", "te_program_level1",
                                                           "te_program_level2", "te_program_level3",
                                                           "te_program_level4", "te_program_level5"};
    int threads = te_shape_row_threads(shape), n = 0;
    for (int level = 0; level < shape->levels; level++)
        set_geometry(same_arguments(launches, n++), levels[level], blocks, threads);
    if (te_shape_stores_elements(program, shape))
        set_geometry(same_arguments(launches, n++), "te_program", blocks, threads);
    if (te_shape_stores_rows_apart(program, shape))
        set_geometry(same_arguments(launches, n++), "te_program_rows", rows, threads);
    return n;
}

int te_cuda_program_launch(const te_program *program, const te_cuda_program_shape *shape, const te_run *runs,
                           int n_runs, int multiprocessors, void *parts, uint64_t args[TE_CUDA_ARGS / 8],
                           te_cuda_launch launches[TE_CUDA_LAUNCHES])
{
    int       words = te_cuda_run_words(program, shape), columns = te_shape_column_parts(program, shape);
    uint64_t *tail = args + (size_t)words * shape->runs;
    int64_t   blocks = 0;
    uint64_t *end = tail + TE_CUDA_TAIL_WORDS;
    memset(args, 0, (size_t)(end - args) * sizeof *args);
    for (int r = 0; r < n_runs; r++) {
        writer w = writer_for(program, shape, &runs[r]);
        w.first_block = blocks;
        w.blocks = blocks_of(&w, multiprocessors);
        w.at = args + (size_t)words * (size_t)r;
        blocks += w.blocks;
        te_cuda_visit_fields(program, shape, write_field, &w);
    }
    tail[0] = (uint64_t)n_runs;
    tail[1] = (uint64_t)blocks;
    tail[2] = (uint64_t)(uintptr_t)parts;
    tail[3] = tail[2] + (columns ? column_bytes(program, shape, runs, blocks) : 0);
    tail[4] = (uint64_t)column_parts(program, shape, &runs[0], blocks);
    tail[5] = tail[2] + te_cuda_program_parts(program, shape, runs, n_runs) - row_value_bytes(program, shape, runs);
    for (int o = 0; o < program->n_outputs; o++) {
        if (!runs[0].outputs[o].quantized) continue;
        te_quantize_args quantize = te_cuda_quantize_args(runs[0].outputs[o].quantized);
        memcpy(end, &quantize, sizeof quantize);
        end += sizeof quantize / sizeof *end;
    }
    launches[0].args = args;
    launches[0].args_bytes = (uint32_t)((size_t)(end - args) * sizeof *args);
    if (shape->levels)
        return launch_shared(program, shape, blocks / (int64_t)tail[4], blocks, launches);
    int n = 0;
    if (te_shape_has_row_kernel(program, shape)) {
        writer w = writer_for(program, shape, &runs[0]);
        int64_t at_once = te_shape_rows_at_once(shape);
        set_geometry(same_arguments(launches, n++), "te_program_rows",
                     bounded(divided_up(w.rows, at_once), 32 * (int64_t)bounded(multiprocessors, 512)),
                     te_shape_row_threads(shape));
    }
    set_geometry(same_arguments(launches, n++), "te_program", blocks, te_shape_threads(shape));
    if (te_shape_quantized(program, shape)) launches[n - 1].shared = te_cuda_program_shared(program, shape, &runs[0]);
    if (columns + te_shape_sums(program, shape) == 0) return n;
    int64_t column_blocks = columns ? divided_up(row_length(shape, &runs[0]), 32) : 0;
    int64_t join_blocks = column_blocks + (te_shape_sums(program, shape) == 0         ? 0
                                           : sums_apart(program, shape, runs, n_runs) ? n_runs
                                                                                      : 1);
    if (join_blocks == 0) return n; /* sums of no columns */
    set_geometry(same_arguments(launches, n++), "te_program_join", join_blocks, TE_CUDA_JOIN_THREADS);
    return n;
}
