/* program_source_emit.h - writing the parts that every kind of kernel is made of.
 *
 * Names in the source: rN the run's arguments, vN the value of instruction N, qN the coordinates of the row at hand, oN
 * the offset of operand N at it, xN its elements, wN random words, yN values about to be stored and uN the unit they
 * become, hN values held from one pass to a later one, sN and cN sums and column sums of output N.
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
    bool                         loaded[TE_CUDA_MAX_OPERANDS]; /* held inputs that an earlier pass has loaded */
} te_emitter;

#define te_emit(e, ...) te_text_print((e)->out, __VA_ARGS__)

const char *te_emit_type(const te_emitter *e, int operand); /* of an element in memory */

/* The struct of arguments. */
void te_emit_arguments(te_emitter *e);

/* UNIFORM values; ROW values of a level; operands' offsets for coordinates q0 …. */
void te_emit_uniform(te_emitter *e);
void te_emit_coordinates(te_emitter *e, int n, const char *row);
void te_emit_offsets(te_emitter *e, int n);
void te_emit_row_values(te_emitter *e, int level);

/* Marks what a pass computes: the arguments of its reductions, or in the last one all that goes to outputs. */
void te_emit_mark(te_emitter *e, int pass);

/* The elements of one unit: loads, values, what is done with them, stores. `position` is the row-major position of its
 * first element, `count` the number of its elements, NULL when it is whole. */
void te_emit_unit(te_emitter *e, const char *position, const char *count);

/* `te_real s0 = 0;` and the writing of a block's parts at the end. */
void te_emit_sums(te_emitter *e);
void te_emit_sum_parts(te_emitter *e);

/* Which of the wanted column sums an output is. */
int te_emit_column_number(const te_emitter *e, int output);

void te_emit_flat(te_emitter *e); /* program_source_flat.c: FLAT and TILED */
void te_emit_tiled(te_emitter *e);
void te_emit_rows(te_emitter *e); /* program_source_rows.c */
void te_emit_row_kernel(te_emitter *e); /* values of rows, for SQUARES */
void te_emit_squares(te_emitter *e);    /* program_source_squares.c */
void te_emit_join(te_emitter *e);

#endif
