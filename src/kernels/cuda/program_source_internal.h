/* program_source_internal.h - what the files behind program_source.h share. */
#ifndef TE_KERNELS_CUDA_PROGRAM_SOURCE_INTERNAL_H
#define TE_KERNELS_CUDA_PROGRAM_SOURCE_INTERNAL_H

#include "program_source.h"

#include "../program_tables.h"

enum { TE_CUDA_FLAT_THREADS = 256, TE_CUDA_TABLE_THREADS = 512, TE_CUDA_JOIN_THREADS = 1024 };
enum { TE_CUDA_SQUARE = 128, TE_CUDA_TILE = 32 };
enum { TE_CUDA_BAND = 32 }; /* rows at most */
enum { TE_CUDA_MAX_RUNS = 240, TE_CUDA_RUNS_STEP = 16 };

static inline bool te_program_sums(int kind) { return kind == TE_OUT_SUM || kind == TE_OUT_AMAX; }

static inline const te_cuda_operand_shape *te_shape_output(const te_program            *program,
                                                           const te_cuda_program_shape *shape, int output)
{
    return &shape->operand[program->n_inputs + output];
}

static inline bool te_shape_wants(const te_program *program, const te_cuda_program_shape *shape, int output)
{
    return te_shape_output(program, shape, output)->access != TE_CUDA_ABSENT;
}

/* Wanted SUM and AMAX outputs, wanted COLSUM outputs. */
int te_shape_sums(const te_program *program, const te_cuda_program_shape *shape);
int te_shape_column_sums(const te_program *program, const te_cuda_program_shape *shape);

/* Column sums that are joined from parts. */
static inline int te_shape_column_parts(const te_program *program, const te_cuda_program_shape *shape)
{
    return shape->direct ? 0 : te_shape_column_sums(program, shape);
}

/* Outputs that are left quantized. */
int te_shape_quantized(const te_program *program, const te_cuda_program_shape *shape);

/* Whether SQUARES needs a kernel for values of rows before it, and how many those are. */
/* TILED: rows and columns of a tile, and elements of a given size from one of its rows to the next. */
int te_shape_tile(const te_cuda_program_shape *shape);
int te_shape_tile_pitch(const te_cuda_program_shape *shape, size_t element);
bool te_shape_has_row_kernel(const te_program *program, const te_cuda_program_shape *shape);
int  te_program_row_values(const te_program *program);

/* Values that are looked up where the shape has tables, each a function of one input. Returns how many. */
enum { TE_CUDA_TABLES = 2 };
int te_cuda_tables(const te_program *program, const te_cuda_program_shape *shape,
                   te_program_table tables[TE_CUDA_TABLES]);

/* Threads of a block, of one that walks rows, and the rows that works on at a time. */
static inline int te_shape_row_threads(const te_cuda_program_shape *shape)
{
    return shape->lanes > 32 ? shape->lanes : TE_CUDA_FLAT_THREADS;
}

static inline int te_shape_threads(const te_cuda_program_shape *shape)
{
    if (shape->kind == TE_CUDA_FLAT && shape->tables) return TE_CUDA_TABLE_THREADS;
    return shape->kind == TE_CUDA_ROWS ? te_shape_row_threads(shape) : TE_CUDA_FLAT_THREADS;
}

/* Blocks per multiprocessor that make a table each: no more than run at once, since all of them do so. FLAT reads one
 * input with all the threads that there are; of two, half of them ask for as much, with registers for it. The codes of
 * SQUARES share their memory with the tables. */
static inline int te_shape_table_blocks(const te_program *program, const te_cuda_program_shape *shape)
{
    int inputs = 0;
    for (int i = 0; i < program->n_inputs; i++) inputs += program->input_rates[i] == TE_RATE_ELEM;
    if (shape->kind == TE_CUDA_SQUARES) return te_shape_quantized(program, shape) > 1 ? 3 : 4;
    return inputs > 1 ? 2 : 4;
}

static inline int te_shape_rows_at_once(const te_cuda_program_shape *shape)
{
    return te_shape_row_threads(shape) / shape->lanes;
}

static inline int te_shape_band_columns(const te_cuda_program_shape *shape)
{
    int held = shape->lanes * shape->items * shape->vector;
    return (held + TE_CUDA_SQUARE - 1) / TE_CUDA_SQUARE * TE_CUDA_SQUARE;
}

/* COLUMNS: blocks side by side, and how many share the rows of their columns: as many as run at once on a large device,
 * while each thread still has several rows. */
enum { TE_CUDA_COLUMN_BLOCKS = 4 };
static inline int64_t te_shape_blocks_across(const te_cuda_program_shape *shape, int64_t columns)
{
    int64_t width = (int64_t)shape->lanes * shape->vector;
    return columns > width ? (columns + width - 1) / width : 1;
}

static inline int64_t te_shape_blocks_down(const te_cuda_program_shape *shape, int64_t rows, int64_t columns)
{
    enum { ENOUGH_BLOCKS = 132 * TE_CUDA_COLUMN_BLOCKS, ROWS_ALONE = 32, ROWS_SHARED = 8 };
    int64_t at_once = te_shape_rows_at_once(shape), down = ENOUGH_BLOCKS / te_shape_blocks_across(shape, columns);
    if (rows <= ROWS_ALONE * at_once || down <= 1) return 1;
    return down < rows / (ROWS_SHARED * at_once) ? down : rows / (ROWS_SHARED * at_once);
}

/* ROWS that are held, with column sums: blocks per multiprocessor that registers are limited to have room for, more
 * where a thread holds few elements. Where even that would take more than there are, 0: no limit. */
static inline int te_shape_column_blocks(const te_program *program, const te_cuda_program_shape *shape)
{
    enum { FEW_HELD = 8, MANY_SUMS = 64, THREADS_FEW = 768, THREADS = 512 };
    int held = shape->items * shape->vector, sums = te_shape_column_sums(program, shape);
    if (shape->kind != TE_CUDA_ROWS || shape->compute_f64) return 0;
    if (sums == 0 || held == 0 || sums * held > MANY_SUMS) return 0;
    return (held <= FEW_HELD ? THREADS_FEW : THREADS) / te_shape_row_threads(shape);
}

/* ROWS that blocks share: levels of a program's reductions, 0 where those are too many; blocks per row, which depend on
 * the run's shape alone; whether elements are stored, and whether values of rows are stored by a kernel behind that. */
int     te_shape_levels(const te_program *program, const te_cuda_program_shape *shape);
int64_t te_shape_shares(const te_cuda_program_shape *shape, int64_t rows, int64_t columns);
bool    te_shape_stores_elements(const te_program *program, const te_cuda_program_shape *shape);
bool    te_shape_stores_rows_apart(const te_program *program, const te_cuda_program_shape *shape);

/* --- arguments ---------------------------------------------------------------------------------------------------- */

/* The members of a kernel's te_run_args, 8 bytes each: the source declares them, the launch fills them, both in the
 * order of te_cuda_visit_fields. */
typedef enum te_field_kind {
    TE_FIELD_ROWS,
    TE_FIELD_COLUMNS,
    TE_FIELD_FIRST_BLOCK,
    TE_FIELD_BLOCKS,
    TE_FIELD_EXTENT,        /* of outer dimension `dim` */
    TE_FIELD_POSITION,      /* TILED with random numbers: elements from one index of `dim` to the next, row-major */
    TE_FIELD_POINTER,       /* of operand `index` */
    TE_FIELD_COLUMN_STRIDE, /* of operand `index` */
    TE_FIELD_BLOCK,         /* of operand `index` */
    TE_FIELD_OUTER_STRIDE,  /* of operand `index` along outer dimension `dim` */
    TE_FIELD_PARAM,
    TE_FIELD_KEEP, /* threshold of instruction `index` */
    TE_FIELD_SEED,
    TE_FIELD_STREAM,
    TE_FIELD_OFFSET,
    TE_FIELD_BASE
} te_field_kind;

typedef struct te_field {
    te_field_kind kind;
    int           index, dim;
} te_field;

typedef void (*te_field_visitor)(void *user, te_field field);

void te_cuda_visit_fields(const te_program *program, const te_cuda_program_shape *shape, te_field_visitor visit,
                          void *user);

/* Behind the runs: n_runs, blocks of all runs, column parts, sum parts, how many rows of column parts or shares of a
 * row, values of rows or parts of their reductions; then a te_quantize_args for each quantized output. */
enum { TE_CUDA_TAIL_WORDS = 6 };

/* Words of one run. */
int te_cuda_run_words(const te_program *program, const te_cuda_program_shape *shape);

#endif
