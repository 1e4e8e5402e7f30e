/* program_plan.h - a row program as the CPU interpreter runs it: steps over blocks.
 *
 * The iteration space is walked in tiles of `rows` x `columns` elements, and the steps of the program run one after the
 * other over a tile. Which plan serves depends on the shape:
 *
 *      ROW      tiles lie in one row, and hold all of it where the program reduces rows. Row values are scalars.
 *               Where rows are not long a tile is a *band*, some whole rows of which each step does one after the
 *               other: so what a step takes to begin is shared, and rows do not wait for each other's sums. Row
 *               values are then that many scalars.
 *      ROWS     short rows: a tile holds several whole ones. Row values are blocks with one number per row, spread over
 *               the tile before they meet element values.
 *      PASSES   rows too long for a tile, with reductions: one sweep over the row per level of reduction. Element
 *               values of an earlier sweep that are dear to compute are kept in a buffer of the row's length.
 *      REPEAT   the same, for rows too long to keep anything: everything is computed anew in each sweep.
 *
 * Programs without row reductions use ROW and ROWS only. Every result of a step has a slot; slots of element values are
 * backed by registers, blocks of a tile's size that are shared by liveness so that the working set stays in L1. A load
 * of values that already are what the program computes with points its slot at the tensor itself; likewise the last
 * operation on an output writes it in place where its type and strides allow.
 */
#ifndef TE_KERNELS_CPU_PROGRAM_PLAN_H
#define TE_KERNELS_CPU_PROGRAM_PLAN_H

#include "program_chain.h"

typedef enum te_plan_kind { TE_PLAN_ROW, TE_PLAN_ROWS, TE_PLAN_PASSES, TE_PLAN_REPEAT, TE_PLAN_COUNT } te_plan_kind;

typedef enum te_step_kind {
    TE_STEP_LOAD,     /* elements of operand `operand` */
    TE_STEP_LOAD_ROW, /* one number per row of an input */
    TE_STEP_OP,       /* over the elements of a tile */
    TE_STEP_ROW_OP,   /* over its rows */
    TE_STEP_PICK,     /* the element of an input in the column that the argument says, per row; 0 where there is none */
    TE_STEP_COLUMN,
    TE_STEP_RANDOM,
    TE_STEP_SPREAD,   /* a lower rate's value to every element */
    TE_STEP_FOLD,     /* row reduction `number` */
    TE_STEP_STORE,
    TE_STEP_STORE_ROW,
    TE_STEP_COLSUM,
    TE_STEP_SUM       /* SUM and AMAX outputs, of which it is `number` */
} te_step_kind;

enum { TE_STEP_ARGS = 5 };

#define TE_NO_ARGS {-1, -1, -1, -1, -1}

typedef struct te_step {
    uint8_t kind;    /* te_step_kind */
    uint8_t op;      /* te_opcode or te_block_pair; of TE_STEP_FOLD and TE_STEP_SUM the te_fold_kind */
    uint8_t scalars; /* bit i: argument i is one number */
    uint8_t rate;    /* TE_STEP_SPREAD: of the argument */
    int32_t operand; /* input; n_inputs + output; generator */
    int32_t number;
    /* slots, -1: none; sums with a second argument add products, of column sums the third is their TE_SLOT_SUMS, of
     * row sums a number that is taken from the first, see te_blocks.fold_add; their fourth is a factor of the
     * second, see te_fold_rows; of column sums the fourth and fifth are numbers, see te_fold_columns */
    int32_t dst, arg[TE_STEP_ARGS];
    int32_t also;        /* where the sums of the second argument itself go: a slot, of TE_STEP_COLSUM an output as in
                          * `operand`; 0: nowhere */
    bool    apart;       /* TE_STEP_COLSUM: no operation makes what it adds, so that it is no link */
    int32_t beside;      /* of TE_STEP_COLSUM and a later TE_STEP_FOLD that go over the same: the other one; 0: none */
    int32_t last_use;    /* the last step of the pass that reads dst */
    bool    half_ok;     /* TE_STEP_LOAD: all that read dst takes bfloat16: links, and sums of whole rows */
    int32_t turn;        /* among the steps of the plan that go over a row, see te_share; -1: it does not */
    int32_t chain, chain_end; /* steps up to chain_end may run as the links from `chain` on; chain_end 0: none */
    bool    chain_sums;       /* and there are column sums among them */
} te_step;

/* What backs a slot. The first n_insns slots are scalars, one per instruction: there UNIFORM values live, and ROW
 * values except in TE_PLAN_ROWS. */
typedef enum te_slot_kind {
    TE_SLOT_SCALAR,
    TE_SLOT_REGISTER,
    TE_SLOT_KEPT,
    TE_SLOT_SUMS, /* an output's column sums, to chains */
    TE_SLOT_TABLE /* of an input */
} te_slot_kind;

typedef struct te_slot {
    uint8_t kind;
    bool    brief; /* a register that is used within one chain only, so that rows of a band may share it */
    int32_t index; /* of the scalar, register, kept row or input */
    int32_t chain; /* while the plan is made: the first step of the chain that makes the value, -1: none does */
} te_slot;

/* One sweep over a row. `head` runs once per row, `body` once per tile. */
typedef struct te_pass {
    int32_t head, body, end; /* steps [head, body), [body, end) */
} te_pass;

/* An ELEM output: the step that makes its value, and whether that may write to the tensor directly unless an input read
 * in place and used later is the same memory. */
typedef struct te_direct {
    int32_t slot, step; /* step -1: never */
    bool    half_ok;    /* a link makes the value, and as bfloat16 it serves all that read it: te_slot_form may apply */
    bool    unread;     /* only outputs take it */
} te_direct;

typedef struct te_plan {
    te_step   *steps;
    te_slot   *slots;
    te_pass   *passes;
    te_direct *direct; /* per output */
    te_link   *links;
    size_t     step_capacity, slot_capacity, pass_capacity, direct_capacity, link_capacity;
    int        n_steps, n_slots, n_passes, n_links;
    int        n_registers, n_kept, n_row_folds, n_turns;
    bool       bands; /* its tiles may be bands: element work is done by chains alone */
    bool       adds;  /* and adding up columns of inputs is all that is done */
    int        n_long; /* of bands: slots in registers that are not brief */
} te_plan;

/* program_lookup.c: the program with tables in the place of functions. */
typedef struct te_lookup te_lookup;
void te_lookup_free(te_lookup *lookup);

/* program_again.c: a small run, bound to be done again with other operands. */
typedef struct te_again te_again;

enum { TE_AGAIN_COUNT = 8 };

typedef struct te_compiled {
    te_plan *plans[TE_PLAN_COUNT]; /* made when first needed; PASSES without kept values also serves as REPEAT */
    bool     structured;           /* rows mean something: dimensions may not be merged into the last */
    bool     reduces_rows;
    bool     columns_summed;
    bool     dear;                 /* an elementary function is computed of elements */
    int      n_sums;               /* SUM and AMAX outputs */
    int      cost;                 /* of an element, in additions */
    te_again *again[TE_AGAIN_COUNT];
    uint32_t tabled;               /* inputs whose numbers stand for values in the run's tables */
    te_lookup *lookup;             /* NULL: not asked for so far */
    unsigned  next_again;          /* the place that is used next, modulo their number */
} te_compiled;

void te_again_free(const te_mem *mem, te_again *again);

/* Makes program->compiled when it does not exist yet. */
te_status te_program_compile(te_exec *exec, te_program *program);

/* A plan of a compiled program, made when it does not exist yet; NULL with the exec's message set when memory is
 * exhausted. */
te_plan *te_compiled_plan(te_exec *exec, te_program *program, te_plan_kind kind);

#endif
