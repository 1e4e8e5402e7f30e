/* op_program.h - what the files that run program ops share.
 *
 *     call -- layout (which tensor each program input reads) -- space (broadcast of the inputs)
 *          -- variant (the compiled program for this case) -- operands (strides, 0 where broadcast) -- te_run
 *
 * op_variant.c compiles and keeps variants, op_space.c does geometry and binding, op_program.c runs forward,
 * op_quick.c forward where none of that is needed, op_gradient.c backward.
 */
#ifndef TE_CORE_OP_PROGRAM_H
#define TE_CORE_OP_PROGRAM_H

#include "op.h"
#include "program_build.h"

enum {
    /* inputs of a program: a gated op reads its first twice */
    TE_PROGRAM_SLOTS = TE_OP_MAX_INPUTS + 1,
    /* attributes, numbers in a tensor's stead, the row's length */
    TE_PROGRAM_PARAMS = TE_OP_MAX_ATTRS + TE_OP_MAX_INPUTS + 1
};

/* One compiled form of one op. */
typedef struct te_variant {
    const te_op *op;
    uint64_t     key;
    te_gradient  gradient; /* forward alone when nothing is recorded */
    struct te_variant *next; /* of the same op, where te_op_define made that */
    bool         flat;     /* no gradient, and one result whose elements depend on nothing but those at their place */
} te_variant;

/* What is read of a tensor's last dimension. */
typedef struct te_part {
    int     half;  /* 0: all of it, 1: the first half, 2: the second */
    int64_t block; /* 0, or the halves alternate in blocks of so many elements */
} te_part;

/* The program's inputs: which tensor of the call each one reads. */
typedef struct te_layout {
    int     n;
    int     input[TE_PROGRAM_SLOTS];
    te_part part[TE_PROGRAM_SLOTS];
    te_rate rate[TE_PROGRAM_SLOTS];
} te_layout;

typedef struct te_space {
    int     ndim;
    int64_t shape[TE_MAX_DIMS];
} te_space;

/* The variant for a call; wanted and reduce per program input. NULL on failure. */
te_variant *te_variant_get(te_call *call, unsigned present, unsigned numbers, const te_layout *l, const bool *wanted,
                           const te_output_kind *reduce);
/* The variant without gradient for all n inputs of an op, when it was made before; else NULL. */
te_variant *te_variant_find(te_context *ctx, const te_op *op, int n);
/* Whether the gradient of program input i was asked for when the variant was made. */
static inline bool te_variant_wants(const te_variant *v, int i) { return v->key >> (13 + i) & 1; }
bool te_is_row_input(const te_op_def *def, const char *name);

/* Whether a row of so many elements has the halves that are asked for; all of it has. */
static inline bool te_part_fits(te_part part, int64_t width)
{
    return !part.half ||
           (part.block >= 0 && part.block <= INT64_MAX / 2 && width % (part.block ? 2 * part.block : 2) == 0);
}

te_layout te_program_layout(const te_call *call, unsigned present);
/* Shape of program input i of a tensor's shape: halves are halved, row inputs get a last dimension of 1. */
te_space te_layout_space(const te_layout *l, int i, int ndim, const int64_t *shape);
/* Dtype of the results; of the inputs only dtype and number of dimensions count. */
te_dtype te_program_result_dtype(const te_call *call, const te_layout *l);
void     te_run_start(te_run *run, const te_space *s);
/* Has a run whose elements do not know where they are go through the memory of its first output in order. */
void     te_run_by_memory(const te_program *program, te_run *run, te_operand *inputs, te_operand *outputs);
/* The operand of a tensor in the space: aligned at the last dimension, stride 0 where broadcast. */
te_operand te_space_operand(const te_tensor *t, const te_space *s, te_part part, te_rate rate);
/* How the gradient of an input of shape `s` follows from gradients over the space; false: write it out, of an input per
 * row as row sums, and sum after. */
bool te_space_reduce(const te_space *whole, const te_space *s, te_rate rate, te_output_kind *kind);
/* Values of the program's parameters. */
void te_program_params(const te_call *call, const te_program *program, unsigned numbers, int64_t row_length,
                       double *params);
bool te_needs_f64(const te_tensor *t, te_rate rate);
/* Whether a program counts columns further than float32 does. */
bool te_counts_far(const te_program *program, const te_run *run);
/* A result over the whole space, or with one value per row. */
te_tensor *te_program_result(te_call *call, bool per_row, const te_space *s, te_dtype dtype, te_device *device);
te_status  te_call_run(te_call *call, te_device *device, te_program *program, te_run *run);

#endif
