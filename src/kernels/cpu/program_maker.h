/* program_maker.h - a plan in the making, shared by the files that make plans. */
#ifndef TE_KERNELS_CPU_PROGRAM_MAKER_H
#define TE_KERNELS_CPU_PROGRAM_MAKER_H

#include "program_plan.h"

typedef struct te_value_info {
    bool    needed;  /* an output depends on it */
    bool    in_pass; /* the pass at hand computes it, or reads it where it is kept */
    bool    kept;
    int32_t level;
    int32_t first_pass; /* that needs it, -1: none */
    int32_t cost;       /* of computing it anew */
    int32_t slot;       /* where it is, -1: not computed in this pass */
    int32_t spread;     /* slot with the value spread over the tile, -1: none */
    int32_t picks, pick_at; /* a row sum that is one element: of the value `picks`, in the column that `pick_at` says;
                               -1: an ordinary value */
} te_value_info;

typedef struct te_maker {
    const te_mem     *mem;
    const te_program *program;
    te_plan          *plan;
    te_value_info       *values;
    te_plan_kind      kind;
    bool              failed;      /* out of memory */
    int               n_levels;    /* passes of the plan */
    int               output_pass; /* in which outputs of element rate are made */
} te_maker;


/* Costs of an element, in additions. What costs less than TE_COST_DEAR is computed anew in a later pass rather than
 * kept. */
enum { TE_COST_DIVISION = 4, TE_COST_DEAR = 8 };
int te_op_cost(te_opcode op);

te_plan *te_plan_make(const te_mem *mem, const te_program *program, te_plan_kind kind);
void     te_plan_free(const te_mem *mem, te_plan *plan);

/* program_registers.c, on the steps of a pass that has just been emitted: pairs of operations become one, slots get
 * registers, outputs the step that may write them directly. */
void te_maker_finish_pass(te_maker *m, te_pass *pass);

/* program_chain.c. Before slots get registers: brings operations next to those whose result they use. `pending` has one
 * entry per slot. */
void te_maker_order_steps(te_maker *m, const te_pass *pass, bool *pending);

/* Afterwards: makes the links of neighbouring operations. */
void te_maker_link_steps(te_maker *m, const te_pass *pass);

#endif
