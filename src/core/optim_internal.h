/* optim_internal.h - what the optimizer passes share: runs over the elements of many tensors. */
#ifndef TE_CORE_OPTIM_INTERNAL_H
#define TE_CORE_OPTIM_INTERNAL_H

#include "optim.h"

#include "ops/ops.h"

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

#endif
