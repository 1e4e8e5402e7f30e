/* program_exec.h - one run of a program, bound to its operands and cut into chunks.
 *
 *                columns (the row)
 *         +-------------+-------------+----+
 *    rows | chunk 0     | chunk 1     |    |   A chunk is about TE_CHUNK elements; where rows are reduced it holds
 *         |  +-------+  |             |    |   whole rows, where columns are summed there are few chunks on top of
 *         |  | tile  |  |             |    |   each other. Inside, tiles of the plan follow one another.
 *         +--+-------+--+-------------+----+
 *
 * Chunks depend on the shape alone, never on the number of threads, and each leaves its part of column sums, sums and
 * amaxes in a place of its own; these parts are joined in an order that follows from their number. So results do not
 * depend on threads.
 *
 * Sums of few columns would wait for each other, and fill no vector. So row r of a chunk adds to lane r % lanes, and
 * the sums of a lane's columns lie behind those of the lane before: dense rows then are longer ones of more columns.
 */
#ifndef TE_KERNELS_CPU_PROGRAM_EXEC_H
#define TE_KERNELS_CPU_PROGRAM_EXEC_H

#include "program_plan.h"

#include <stdatomic.h>

/* Chunks of column sums have so many rows: fewer take too many parts to join; more lose digits, since rows are added
 * one after the other, parts in pairs. Few columns have lanes enough for the last of these numbers of sums. */
enum { TE_CHUNK = 8192, TE_COLSUM_CHUNKS = 64, TE_COLSUM_ROWS = 32, TE_COLSUM_MOST = 512, TE_COLSUM_WIDTH = 256 };

/* Bytes of tensors, all those of a call together, that do not stay in the second-level caches, or in any; and of an
 * output from which on it is then written past them. */
enum { TE_PAST_NEAR_CACHES = 8 << 20, TE_PAST_CACHES = 24 << 20, TE_STREAMED_FROM = 4 << 20 };

/* An input or output, seen from the merged dimensions. Strides are in bytes but for `columns`. */
typedef struct te_bound_operand {
    char    *base;
    te_dtype dtype;
    bool     present;  /* an output that is wanted; inputs always */
    bool     flat;     /* the elements of a tile follow one another */
    /* those of a row do, and rows of a tile may be any step apart: in a band; else the same as flat */
    bool     straight;
    bool     in_place; /* and are values as the program computes with */
    bool     streamed; /* an output that is written past the caches */
    bool     accumulate;
    bool     constant; /* every row is the same and fits a tile: loaded once, into a place of its own */
    size_t   loaded;   /* rows of it that lie there */
    int64_t  size;                  /* of an element */
    int64_t  column;                /* stride in elements */
    int64_t  block;                 /* as in te_operand */
    int64_t  outer[TE_MAX_DIMS];    /* per outer dimension; the last one steps to the next row of a tile */
} te_bound_operand;

/* Geometry of a run. */
typedef struct te_job {
    te_exec           *exec; /* whose interrupt ends it early */
    const te_program  *program;
    const te_compiled *compiled;
    const te_run      *run;
    const te_plan     *plan;
    const te_blocks   *blocks;
    te_plan_kind       kind;
    bool               band; /* tiles are bands of a TE_PLAN_ROW */
    int                n_outer;
    int64_t            outer[TE_MAX_DIMS]; /* extents; their product is `rows` */
    int8_t             axis[TE_MAX_DIMS];  /* the run's dimension behind each, and behind the columns */
    int8_t             column_axis;        /* -1: there is but one column */
    int64_t            rows, columns;
    int64_t            tile_rows, tile_columns;
    int64_t            chunk_rows, chunk_columns;
    int64_t            lanes; /* rows whose column sums are apart, see above; a divisor of chunk_rows */
    int64_t            row_chunks, column_chunks;
    /* of the run, or of all runs of the call: elements, and bytes of their tensors */
    int64_t            elements, bytes;
} te_job;

/* Of the run alone. */
static inline int64_t te_job_elements(const te_job *job) { return job->rows * (job->columns ? job->columns : 1); }

/* Whether outputs with elements of that size leave the caches before anybody reads them. */
static inline bool te_job_streams(const te_job *job, int64_t size)
{
    return job->bytes >= TE_PAST_CACHES && job->elements * size >= TE_STREAMED_FROM;
}

static inline int64_t te_job_chunks(const te_job *job) { return job->row_chunks * job->column_chunks; }

/* Shape, plan and chunks of a run. The plan is made when it does not exist; for a job described before, that cannot
 * fail. */
te_status te_job_describe(te_exec *exec, te_program *program, const te_run *run, te_job *job);

/* The block functions that runs on this device use. */
const te_blocks *te_job_blocks(te_exec *exec, bool compute_f64);

/* Bytes that running the job takes per thread, and bytes for the parts of its sums. */
size_t te_job_workspace(const te_job *job);
size_t te_job_parts(const te_job *job);

/* Runs chunks [first, last). Workspace and parts are aligned to 64 bytes; the workspace need not be cleared. */
void te_job_run(const te_job *job, int64_t first, int64_t last, void *workspace, void *parts);

/* Does the runs when they are small and bound like earlier ones, or can be bound to stay; false: nothing was done. */
bool te_program_run_again(te_exec *exec, te_program *program, const te_run *runs, int n_runs);

/* Does a single run by copying where that is all there is to do; false: nothing was done. program_copy.c */
bool te_program_copy_run(te_exec *exec, const te_program *program, const te_run *runs, int n_runs, te_status *status);

/* Does a single run of whole numbers without float64, to the same values; false: nothing was done. program_whole.c */
bool te_program_whole_run(te_exec *exec, const te_program *program, const te_run *runs, int n_runs);

/* Likewise sums and extremes over rows and columns. program_whole_rows.c */
bool te_program_whole_rows_run(te_exec *exec, const te_program *program, const te_run *runs, int n_runs);

/* A run of whole numbers in float32 instead of float64, to the same values as long as those of its inputs are below
 * 2^bits in magnitude; what it leaves behind where they were not (`exceeded`) is no result. program_small.c */
typedef struct te_small {
    te_run     run;
    int        bits;
    atomic_int exceeded;
} te_small;

/* Makes that run; false: there is none. */
bool te_program_small_run(const te_program *program, const te_run *run, te_small *small);

static inline bool te_run_exceeded(const te_run *run)
{
    return run->small && atomic_load_explicit(&run->small->exceeded, memory_order_relaxed);
}

/* A large run with tables in the place of functions of one input of bfloat16. program_lookup.c */
enum { TE_LOOKUP_OPERANDS = 24 };
typedef struct te_table_run {
    te_program  *program;
    te_run       run;
    te_operand   inputs[TE_LOOKUP_OPERANDS];
    const float *tables[TE_LOOKUP_OPERANDS];
} te_table_run;

/* false: there is nothing to look up, or no memory for it. */
bool te_program_look_up(te_exec *exec, const te_program *program, const te_run *run, te_table_run *by);

/* Does a run by `runner`, with dense copies of inputs that lie across, perhaps in pieces. program_straight.c */
typedef te_status te_program_runner(te_exec *exec, te_program *program, const te_run *run);
te_status te_program_run_straight(te_exec *exec, te_program *program, const te_run *run, te_program_runner *runner);

/* Does a run whose rows lie side by side, many at a time; false: nothing was done. program_across.c */
bool te_program_across_run(te_exec *exec, const te_program *program, const te_run *run, te_status *status);

/* One long row's extreme in pieces: the first `n` runs, and then the last one. `room` is freed by who ran them.
 * program_pieces.c */
enum { TE_PIECES_LAST = 2 };
typedef struct te_pieces {
    te_run     runs[TE_PIECES_LAST + 1];
    te_operand in[TE_PIECES_LAST + 1], out[TE_PIECES_LAST + 1];
    int        n;
    void      *room;
} te_pieces;

/* false: the run is not like that, or there is no memory. */
bool te_program_cut(te_exec *exec, const te_program *program, const te_run *run, te_pieces *p);

/* Joins the parts of all chunks into the outputs. */
void te_job_join(const te_job *job, void *parts, int threads);

#endif
