/* program_diff.h - the state of one differentiation, shared by program_diff*.c.
 *
 * Adjoints. Reverse mode visits the forward values from last to first; the adjoint of a value is the sum of what its
 * uses contributed. Uses may be more frequent than the value: a ROW value that ELEM instructions read receives one
 * contribution per element. So an adjoint has two parts,
 *
 *      full adjoint of a ROW value     = rowsum(per_elem) + per_row
 *      full adjoint of a UNIFORM value = the sum of per_elem over the space + the sum of per_row over all rows
 *
 * which stay apart as long as possible: the contributions of all uses are added first and reduced once, and a UNIFORM
 * value, whose total no program can hold, keeps both parts down to the output that sums them. `per_elem` says how often
 * a part counts, not the rate of the value that holds it: a ROW value there counts once for every element of its row.
 */
#ifndef TE_CORE_PROGRAM_DIFF_H
#define TE_CORE_PROGRAM_DIFF_H

#include "program_internal.h"

/* Values of the backward program, or TE_VALUE_NONE: nothing was contributed, the adjoint is 0. */
typedef struct te_adjoint {
    int32_t per_row, per_elem;
} te_adjoint;

/* What is known of a forward value. */
enum {
    TE_DIFF_REDUCED = 1, /* depends on a row reduction, so backward does not compute it anew when it is per row */
    TE_DIFF_ACTIVE = 2,  /* depends on an input whose gradient is wanted */
    TE_DIFF_MARK = 4,    /* to be computed by the te_diff_value in progress */
    TE_DIFF_TENSOR = 8,  /* the joints say so */
    TE_DIFF_CONE = 16    /* the te_diff_by_slope in progress goes over it */
};

typedef struct te_diff {
    const te_gradient_request *request;
    te_program                *forward, *backward; /* a copy of the request's, and the one that is made */
    te_build_error            *error;              /* never NULL */
    te_status                  status;             /* once it is not TE_OK, nothing more is emitted */

    int         n_values; /* of the forward program; the length of the next four arrays */
    int32_t    *mapped;   /* value of the backward program, or TE_VALUE_NONE */
    te_adjoint *adjoints, *slopes;
    uint8_t    *flags;
    int32_t    *pending; /* of tensors: what the program in progress has contributed */
    int32_t    *opaque;  /* values of the backward program that the algebra must not look into */
    int         n_opaque;

    te_grad_source sources[TE_GRAD_MAX_SOURCES]; /* by slot of backward; TE_GRAD_FROM_ROW has a forward *value* here */
    int            n_sources;
} te_diff;

/* --- program_diff_values.c: forward values inside the backward program -------------------------------------------- */

int te_diff_source(te_diff *diff, te_grad_source_kind kind, int index, te_rate rate);
int te_diff_forward_input(te_diff *diff, int slot);
int te_diff_forward_output(te_diff *diff, int index);
int te_diff_output_gradient(te_diff *diff, int index);
int te_diff_value(te_diff *diff, int forward_value);

/* --- program_diff_algebra.c: TE_VALUE_NONE as an argument or result is the number 0 ------------------------------- */

int te_diff_emit(te_diff *diff, te_opcode op, int a, int b, int c);
int te_diff_const(te_diff *diff, double number);
int te_diff_add(te_diff *diff, int a, int b);
int te_diff_sub(te_diff *diff, int a, int b);
int te_diff_neg(te_diff *diff, int a);
int te_diff_mul(te_diff *diff, int a, int b);
int te_diff_div(te_diff *diff, int a, int b);
int te_diff_where(te_diff *diff, int condition, int a, int b);
int te_diff_rowsum(te_diff *diff, int a);

/* --- program_diff_rules.c, program_diff_formula.c, program_diff.c ------------------------------------------------- */

/* Adds what forward value `value` contributes to its arguments. */
void te_diff_propagate(te_diff *diff, int value);

/* Adds a part to the adjoint of forward value `value`. */
void te_diff_contribute(te_diff *diff, int value, int part, bool per_elem);

/* The same as te_diff_propagate, but down to the one input that the value is a function of, at once; false: nothing was
 * added, it is no such value. program_diff_slope.c */
bool te_diff_by_slope(te_diff *diff, int value);

/* Gradients from the request's gradient_text. */
te_status te_diff_explicit(te_diff *diff);

/* The gradient of an input as the output that the request asks for. */
te_status te_diff_add_output(te_diff *diff, int slot, te_adjoint adjoint);

te_status te_diff_fail_memory(te_diff *diff);

#endif
