/* optim_internal.h - what the optimizer passes share: runs over the elements of many tensors. */
#ifndef TE_CORE_OPTIM_INTERNAL_H
#define TE_CORE_OPTIM_INTERNAL_H

#include "optim.h"

#include "ops/ops.h"
#include "quantized.h"

/* Runs and their operands for n tensors, in one block. */
typedef struct te_optim_batch {
    te_run *runs;
    te_operand *operands;
    int n, inputs, outputs;
    size_t bytes;
} te_optim_batch;

/* One-dimensional runs with their operands zeroed; b->runs, of b->bytes bytes, is the caller's to free. */
te_status  te_optim_batch_open(te_context *ctx, te_optim_batch *b, int n, int inputs, int outputs);
/* A dense tensor as a row of elements; NULL: an absent one. */
te_operand te_optim_flat(const te_tensor *t);

enum { TE_OPTIM_OPERANDS = 20 }; /* inputs and outputs of an update: at most */

/* A parameter that is stored quantized, to be quantized while it is updated, or after that: optim_quantized.c. */
typedef struct te_optim_stored {
    te_tensor *param, *master;
    bool striped;
    te_run run; /* of the whole */
    te_quantized copies;
} te_optim_stored;

typedef struct te_optim_quantizing {
    te_optim_stored *entries;
    int n;
    size_t bytes;
    te_exec *exec;
    void *room; /* for a stripe in the dtype that is quantized; NULL: none is needed */
} te_optim_quantizing;

/* Collects those of the groups' parameters, and takes those for which stripes pay out of their runs, one per parameter.
 * Nothing is written, and what it holds is to be closed even where it fails. _reserve comes when all of a step is open:
 * after it, memory does not end the rest, which is the others' pass and _run. */
te_status te_optim_quantizing_open(te_context *ctx, int n_groups, const te_optim_group *groups, te_run *runs,
                                   te_optim_quantizing *z);
te_status te_optim_quantizing_reserve(te_context *ctx, const te_optim_quantizing *z);
te_status te_optim_quantizing_run(te_exec *exec, te_program *program, te_optim_quantizing *z, int n_inputs,
                                  int n_outputs);
void te_optim_quantizing_close(te_context *ctx, te_optim_quantizing *z);

#endif
