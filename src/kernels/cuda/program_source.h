/* program_source.h - row programs as CUDA C: source for NVRTC, and the geometry and arguments of its launches.
 *
 *      shape = what of a run the source depends on        te_cuda_program_shape_make   per run, allocates nothing
 *      source = f(program, shape)                         te_cuda_program_source       once per shape, then cached
 *      launches = f(program, shape, runs)                 te_cuda_program_launch       per call
 *
 * A shape is plain bytes without holes: equal shapes of one program (memcmp) share a compiled module, and equal source
 * text means an equal module, so a cache on disk goes by the text. Extents, strides, pointers, parameters and random
 * state are arguments of the launch.
 *
 * Which kernel:
 *
 *      FLAT    no value depends on a whole row: units of `vector` consecutive elements, one per thread, grid-stride.
 *              Runs of one shape whose operands are flat are served by one launch, a share of the blocks each.
 *      ROWS    row reductions, row outputs: `lanes` threads walk a row (1 to 32: part of a warp, several rows a block;
 *              more: the whole block). Up to `items` units of a row stay in a thread's registers; rows too long for
 *              that (items 0) are read anew in each pass. Where results are left quantized with one factor for all, a
 *              block takes `band` rows at a time, of which it has the codes in shared memory before it stores them
 *              transposed (kernels/quantize_whole.cu). Few rows that are long are shared by blocks: a kernel per level
 *              of reductions leaves their parts, which the next one joins (program_source_shared.c).
 *      COLUMNS column sums where nothing is reduced along a row: a thread keeps to its unit of the columns, `lanes` of
 *              them side by side, and walks down the rows. Where that fills a device, or rows are few, the sums go
 *              straight to the result (`direct`).
 *      SQUARES any other output is left quantized: 128 x 128 elements at a time gather in shared memory, from where
 *              they are quantized along rows and columns (kernels/quantize_tile.cu), or their codes do. Values of a
 *              row come from a kernel like ROWS before it.
 *      TILED   an operand's neighbours lie along another dimension than the row: 32 x 32 tiles turned in shared memory.
 *
 * Other sums leave one part per block, which a second kernel adds in a fixed order; the number of blocks then depends
 * on the shape alone, so sums repeat to the bit, on every device.
 *
 * Options the source must be compiled with: --fmad=false and IEEE division, square root and subnormal numbers (NVRTC's
 * defaults), C++17.
 */
#ifndef TE_KERNELS_CUDA_PROGRAM_SOURCE_H
#define TE_KERNELS_CUDA_PROGRAM_SOURCE_H

#include "../kernels.h"
#include "program_source_text.h"

enum { TE_CUDA_MAX_OPERANDS = 48, TE_CUDA_ARGS = 32752 };
enum { TE_CUDA_MAX_LEVELS = 6, TE_CUDA_LAUNCHES = TE_CUDA_MAX_LEVELS + 2 }; /* see `levels` */

/* One launch. The kernel takes one struct by value, whose bytes are `args`, at most TE_CUDA_ARGS as drivers for CUDA
 * 12.1 and later take them: cuLaunchKernel's kernelParams is the array of the one pointer `args`, which is borrowed. */
typedef struct te_cuda_launch {
    const char *name; /* of the kernel in its module */
    uint32_t    grid[3], block[3];
    uint32_t    shared; /* bytes of dynamic shared memory */
    uint32_t    args_bytes;
    const uint64_t *args;
} te_cuda_launch;

typedef enum te_cuda_program_kind {
    TE_CUDA_FLAT, TE_CUDA_ROWS, TE_CUDA_TILED, TE_CUDA_SQUARES, TE_CUDA_COLUMNS
} te_cuda_program_kind;

typedef enum te_cuda_access {
    TE_CUDA_ABSENT, /* an output that is not wanted, an input without elements */
    TE_CUDA_VECTOR, /* neighbours in memory, aligned to a whole unit */
    TE_CUDA_ALIKE,  /* as VECTOR, and the same in every row (not in FLAT and TILED) */
    TE_CUDA_NEXT,   /* neighbours in memory, not aligned */
    TE_CUDA_SAME,   /* one element serves the whole row */
    TE_CUDA_STRIDED,
    TE_CUDA_TURNED, /* TILED: through shared memory */
    TE_CUDA_QUANTIZED
} te_cuda_access;

typedef struct te_cuda_operand_shape {
    uint8_t dtype, access, accumulate;
    uint8_t blocked;  /* columns alternate with others in blocks */
    uint16_t variant; /* QUANTIZED: of the quantizer (kernels/args.h) */
} te_cuda_operand_shape;

typedef struct te_cuda_program_shape {
    uint8_t               kind;              /* te_cuda_program_kind */
    uint8_t               compute_f64, wide; /* wide: offsets need 64 bits */
    uint8_t               rows_matter; /* the last dimension is the row; else columns are the innermost that merged */
    uint8_t               n_outer;     /* dimensions before the row, after merging */
    uint8_t               vector;      /* elements per unit */
    uint8_t               items; /* ROWS, SQUARES: units of a row that a thread holds; 0: any number, none held */
    uint8_t               axis[TE_MAX_DIMS]; /* the run's dimension behind each outer one */
    uint8_t               column_axis;       /* the run's dimension behind the columns */
    uint8_t               n_operands;        /* inputs, then outputs */
    uint8_t               runs;              /* that a launch has room for */
    uint8_t               direct;            /* COLUMNS: sums are whole when a block is done, and leave no parts */
    uint8_t               full; /* ROWS, SQUARES: a row is as many units as its threads hold */
    uint8_t               band; /* ROWS: so many at a time are left quantized; 0: none is */
    uint8_t               tables; /* what is dear of one bfloat16 input alone is looked up */
    uint8_t               levels; /* ROWS that blocks share: of reductions, a kernel each; 0: a block has whole rows */
    uint8_t               none;   /* no hole before what follows */
    uint16_t              lanes;             /* ROWS, SQUARES: threads per row; COLUMNS: units side by side */
    te_cuda_operand_shape operand[TE_CUDA_MAX_OPERANDS];
} te_cuda_program_shape;

/* Checks the run's operands and describes it. Only fails for wrong arguments (message in the exec). */
te_status te_cuda_program_shape_make(te_exec *exec, const te_program *program, const te_run *run,
                                     te_cuda_program_shape *shape);

/* CUDA C for the shape, with everything it needs (no #include). TE_ERROR_MEMORY when the text's memory is
 * exhausted, TE_ERROR_INTERNAL for a program that breaks the rules of program.h; no message. */
te_status te_cuda_program_source(const te_program *program, const te_cuda_program_shape *shape, te_text *out);

/* How many of the runs from the first on one launch can serve (at least 1): those of equal shape, as far as arguments
 * fit. `shape` is the first run's, as te_cuda_program_shape_make gave it, and gets room for several where they are. */
int te_cuda_program_batch(te_exec *exec, const te_program *program, te_cuda_program_shape *shape, const te_run *runs,
                          int n_runs);

/* Bytes of device memory, 64-byte aligned, that the launch of these runs needs for parts of sums and
 * reductions and for values of rows; 0: none. */
size_t te_cuda_program_parts(const te_program *program, const te_cuda_program_shape *shape, const te_run *runs,
                             int n_runs);

bool te_program_leaves_quantized(const te_program *program, const te_run *run);

/* Bytes of dynamic shared memory that the kernel of a run wants which leaves results quantized, and at most so many of
 * shared variables beside them. */
enum {
    TE_CUDA_SQUARE_VARIABLES = 9 << 10,
    TE_CUDA_BAND_VARIABLES = 18 << 10,
    TE_CUDA_TABLE_VARIABLES = 32 << 10
};
uint32_t te_cuda_program_shared(const te_program *program, const te_cuda_program_shape *shape, const te_run *run);

/* The launches, of arguments that are written to `args`, that serve the runs, in order: values of rows where SQUARES
 * needs them or the levels of shared rows, the program, the joining of sums. n_runs as te_cuda_program_batch gave;
 * `multiprocessors` of the device, `parts` as te_cuda_program_parts asks. Returns the number of launches. */
int te_cuda_program_launch(const te_program *program, const te_cuda_program_shape *shape, const te_run *runs,
                           int n_runs, int multiprocessors, void *parts, uint64_t args[TE_CUDA_ARGS / 8],
                           te_cuda_launch launches[TE_CUDA_LAUNCHES]);

#endif
