/* program_plan.c - from the instructions of a program to steps, passes and registers. */
#include "program_plan.h"

#include <string.h>

/* Additions' worth of an operation, roughly; what keeping a value in a row buffer must save, loading apart. */
enum { COST_DEAR = 8, COST_DIVISION = 4 };

static int op_cost(te_opcode op)
{
    switch (op) {
    case TE_PW_CONST:
    case TE_PW_PARAM: return 0;
    case TE_PW_DIV:
    case TE_PW_SQRT:
    case TE_PW_RSQRT:
    case TE_PW_RECIP: return COST_DIVISION;
    case TE_PW_EXP:
    case TE_PW_LOG:
    case TE_PW_TANH:
    case TE_PW_SIGMOID:
    case TE_PW_ERF: return COST_DEAR;
    case TE_PW_SIN:
    case TE_PW_COS:
    case TE_PW_RANDOM:
    case TE_PW_KEEP: return 2 * COST_DEAR;
    case TE_PW_POW:
    case TE_PW_NORMAL: return 4 * COST_DEAR;
    default: return 1;
    }
}

static bool is_reduction(int op) { return op == TE_PW_ROWSUM || op == TE_PW_ROWMAX || op == TE_PW_ROWMIN; }
static bool is_random(int op) { return op == TE_PW_RANDOM || op == TE_PW_KEEP || op == TE_PW_NORMAL; }

/* --- making a plan ---------------------------------------------------------------------------------------------- */

/* Per value while a plan is made. */
typedef struct value_info {
    bool    needed;      /* some output depends on it */
    bool    in_pass;     /* the pass being emitted computes or uses it */
    bool    kept;
    int32_t level;       /* the first pass in which it can be computed */
    int32_t first_pass, last_pass; /* in which it is needed */
    int32_t cost;        /* of computing it anew */
    int32_t slot;        /* where it is, -1: not computed yet */
    int32_t spread;      /* slot of the value spread over the tile, -1: none */
} value_info;

typedef struct maker {
    te_exec          *exec;
    const te_program *program;
    te_plan          *plan;
    value_info       *values;
    te_plan_kind      kind;
    bool              failed; /* out of memory */
    int               n_levels, output_pass;
    int32_t          *last_use, *owner; /* per slot, per register: while registers are assigned */
    size_t            last_use_capacity, owner_capacity;
} maker;

static bool in_passes(const maker *m) { return m->kind == TE_PLAN_PASSES || m->kind == TE_PLAN_REPEAT; }

static int32_t add_slot(maker *m, te_slot_kind kind)
{
    te_plan *plan = m->plan;
    if (!te_mem_grow(m->exec->mem, (void **)&plan->slots, &plan->slot_capacity, (size_t)plan->n_slots + 1, sizeof *plan->slots)) {
        m->failed = true;
        return 0;
    }
    int32_t index = kind == TE_SLOT_SCALAR ? plan->n_scalars++ : kind == TE_SLOT_KEPT ? plan->n_kept++ : -1;
    plan->slots[plan->n_slots] = (te_slot){.kind = (uint8_t)kind, .index = index};
    return plan->n_slots++;
}

static te_step *add_step(maker *m, te_step step)
{
    te_plan *plan = m->plan;
    static te_step none;
    if (!te_mem_grow(m->exec->mem, (void **)&plan->steps, &plan->step_capacity, (size_t)plan->n_steps + 1, sizeof *plan->steps)) {
        m->failed = true;
        return &none;
    }
    plan->steps[plan->n_steps] = step;
    return &plan->steps[plan->n_steps++];
}
