/* program_across.h - programs whose rows run across memory, many rows at a time: program_across_plan.c says how,
 * program_across.c does it.
 *
 * The interpreter goes along rows. Where the elements of a row lie apart and those of neighbouring rows side by side,
 * as in x:max(1) or in a softmax over the first dimension, this goes along memory instead: a *unit* is some rows that
 * lie side by side, and a value of the program is one number for each of them, for one position in the row after the
 * other. Per-row values are then blocks of so many numbers, and a reduction adds blocks to each other.
 *
 *                      rows of the unit
 *      position 0   x x x x x x x x x x x x     A *tile* is some positions. There is one sweep over them per level:
 *      position 1   x x x x x x x x x x x x     level 0 are values that need no reduction, level 1 those that need one
 *          …                                    of level 0 and so on. What is loaded or dear to compute stays for later
 *      position n   x x x x x x x x x x x x     sweeps where there is room.
 *
 * Sums have the bits of those along rows: position i goes to lane i % TE_FOLD_LANES, lanes are joined as a balanced
 * tree, and float64 takes over each TE_FOLD_SPAN positions (program_blocks.h).
 */
#ifndef TE_KERNELS_PROGRAM_ACROSS_H
#define TE_KERNELS_PROGRAM_ACROSS_H

#include "copy.h"
#include "program_exec.h"

enum {
    TE_ACROSS_INSNS = 40,
    TE_ACROSS_OPERANDS = 6,
    TE_ACROSS_POSITIONS = 16 /* of a tile, at most: a divisor of TE_FOLD_LANES */
};

/* A run, and how it is done. */
typedef struct te_across {
    te_exec              *exec;
    const te_program     *program;
    const te_blocks      *blocks;
    const te_copy_blocks *copy;
    const double         *params;
    te_operand            operand[2 * TE_ACROSS_OPERANDS]; /* inputs, then outputs; strides over `shape` */
    int64_t               shape[TE_MAX_DIMS];
    int                   ndim, axis, beside;
    int64_t               n, width, positions; /* of a row, of a unit, of a tile */
    int64_t               units, across;       /* units; those along `beside` */
    int64_t               elements;            /* of the whole run */
    int                   levels;
    int8_t                level[TE_ACROSS_INSNS];
    uint64_t              sweep[TE_ACROSS_INSNS]; /* by level: the values that it computes, as bits */
    uint64_t              kept, direct;           /* values that stay; loads that only folds of one sweep read */
    uint64_t              whole;                  /* of these, what te_blocks.fold_across takes */
    size_t                place[TE_ACROSS_INSNS], room; /* where values are in a workspace, which has so many bytes */
    size_t                lanes[TE_ACROSS_INSNS]; /* of reductions: where they are added up */
    size_t                spare;
    char                 *workspace;
} te_across;

#define TE_ACROSS_BIT(v) (UINT64_C(1) << (v))

/* Blocks that a reduction adds up in. */
static inline int64_t te_across_lanes(const te_across *a, int op)
{
    return op != TE_PW_ROWSUM ? 1 : a->n < TE_FOLD_LANES ? a->n : TE_FOLD_LANES;
}

/* Plans a run. False: it is none for this. */
bool te_across_plan(te_across *a, te_exec *exec, const te_program *program, const te_run *run);

#endif
