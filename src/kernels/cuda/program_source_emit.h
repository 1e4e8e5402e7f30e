/* program_source_emit.h - writing the parts that every kind of kernel is made of.
 *
 * Names in the source: rN the run's arguments, vN the value of instruction N, qN the coordinates of the row at hand,
 * oN the offset of operand N at it, xN its elements, wN random words, yN values about to be stored and zN the unit that
 * they become or the tile that is quantized, hN values held from one pass to a later one, mN what a thread has of
 * reduction N, uN a unit's values for it, sN and cN sums and column sums of output N, tableN functions of operand N and
 * atN where a unit's values are in it.
 */
#ifndef TE_KERNELS_CUDA_PROGRAM_SOURCE_EMIT_H
#define TE_KERNELS_CUDA_PROGRAM_SOURCE_EMIT_H

#include "program_source_internal.h"

#include <stdio.h>

/* What is known of each instruction. */
typedef struct te_emit_value {
    bool    live;  /* some wanted output follows from it */
    bool    need;  /* the section being written computes it */
    bool    held;  /* computed in one pass, used in later ones */
    bool    packed; /* held: as the bfloat16 that it is */
    bool    online; /* a row's maximum, and the sum of exponentials less it, that are found in one pass */
    bool    picked; /* a sum over the row whose only term is that at a column given per row */
    uint8_t level; /* the pass whose reductions it follows */
    uint8_t first; /* held: the pass that computes it */
} te_emit_value;

typedef struct te_emitter {
    te_text                     *out;
    const te_program            *program;
    const te_cuda_program_shape *shape;
    te_emit_value               *values;                       /* per instruction */
    int                          passes;                       /* levels of reductions + 1 */
    int                          pass;                         /* being written */
    const char                  *item;                         /* "" or "[i]": behind what is held for several units */
    bool                         loaded[TE_CUDA_MAX_OPERANDS]; /* held inputs that are loaded */
    te_program_table             tables[TE_CUDA_TABLES];
    int                          n_tables;
    bool                         looking_up; /* values come from tables where they have one */
} te_emitter;

#define te_emit(e, ...) te_text_print((e)->out, __VA_ARGS__)

const char *te_emit_type(const te_emitter *e, int operand); /* of an element in memory */

/* Which values are live and what level they have; how many passes there are. `values` are zero before. */
void te_emit_analyze(te_emitter *e);

/* The struct of arguments. */
void te_emit_arguments(te_emitter *e);

/* UNIFORM values; ROW values of a level; operands' offsets for coordinates q0 …. */
void te_emit_uniform(te_emitter *e);
void te_emit_coordinates(te_emitter *e, int n, const char *row);
void te_emit_offsets(te_emitter *e, int n);
void te_emit_row_values(te_emitter *e, int level);

/* Whether v is the sum of e^(x - m), m being the row's maximum of x; and that m. */
bool te_emit_sums_below_maximum(const te_emitter *e, int v);
int te_emit_maximum_of(const te_emitter *e, int v);

/* Marks what a pass computes: the arguments of its reductions, or in the last one all that goes to outputs. */
void te_emit_mark(te_emitter *e, int pass);

/* Whether the pass, or any of them, reads an input. */
bool te_emit_loads_operand(const te_emitter *e, int input, bool any);

/* Inputs of which a thread holds its units from where they are first loaded, and the loading of those units that the
 * pass, or any (`all`), needs. */
bool te_emit_holds_input(const te_emitter *e, int input);
void te_emit_held_loads(te_emitter *e, bool all);

/* The elements of one unit: loads, values, what is done with them, stores. `position` is the row-major position of its
 * first element, `count` the number of its elements, NULL when it is whole. */
void te_emit_unit(te_emitter *e, const char *position, const char *count);

/* program_source_tables.c: the tables' making, once per block; the condition, opening a block, that all of a unit's
 * numbers are in them; whether a value is looked up there, and the looking up. */
void te_emit_tables(te_emitter *e);
void te_emit_table_places(te_emitter *e);
bool te_emit_looks_up(const te_emitter *e, int v);
void te_emit_looked_up(te_emitter *e, int v);

/* The values that are marked as needed, and what they are made from, for one element. */
void te_emit_needed(te_emitter *e);

/* `te_real s0 = 0;` and the writing of a block's parts at the end. */
void te_emit_sums(te_emitter *e);
void te_emit_sum_parts(te_emitter *e);

/* Whether output o is column sums that somebody wants. */
bool te_emit_sums_columns(const te_emitter *e, int o);
/* Which of the wanted column sums an output is. */
int te_emit_column_number(const te_emitter *e, int output);

void te_emit_flat(te_emitter *e); /* program_source_flat.c: FLAT and TILED */
void te_emit_tiled(te_emitter *e);
void te_emit_rows(te_emitter *e); /* program_source_rows.c */
void te_emit_row_kernel(te_emitter *e); /* values of rows, for SQUARES */
void te_emit_shared_rows(te_emitter *e); /* program_source_shared.c */

/* One pass over a row, whose reductions it leaves in the threads' values, and the stores of values of the row. */
void te_emit_pass(te_emitter *e, int pass);
void te_emit_row_outputs(te_emitter *e);

void te_emit_squares(te_emitter *e);    /* program_source_squares.c */

/* The same for ROWS that leave results quantized, in bands: the values of a unit at a place, "y, x", of the tile; what
 * stands before the loop over bands, and the end of a band and of that loop. */
void te_emit_results(te_emitter *e, const char *place);
void te_emit_band_opening(te_emitter *e);
void te_emit_band_end(te_emitter *e);

void te_emit_columns(te_emitter *e);    /* program_source_columns.c */
void te_emit_join(te_emitter *e);       /* program_source_join.c */

/* Stores `value`, to which what is there already is joined where the output wants that, and closes the block. */
void te_emit_joined_store(te_emitter *e, int output, const char *place, bool amax);

/* Where element `at` of a column sum goes. */
void te_emit_column_place(const te_emitter *e, int output, const char *run, const char *at, char *text, size_t size);

#endif
