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

/* A parameter that is stored quantized and is quantized while it is updated: optim_quantized.c. */
typedef struct te_optim_striped {
    te_tensor *param, *master;
    te_run run; /* of the whole */
    te_quantized copies;
} te_optim_striped;

typedef struct te_optim_stripes {
    te_optim_striped *entries;
    int n;
    size_t bytes;
} te_optim_stripes;

/* Takes those of the groups' parameters out of their runs, one per parameter, for which it pays. To be closed even
 * where it fails; nothing was written then. */
te_status te_optim_stripes_open(te_context *ctx, int n_groups, const te_optim_group *groups, te_run *runs,
                                te_optim_stripes *s);
te_status te_optim_stripes_run(te_exec *exec, te_program *program, te_optim_stripes *s, int n_inputs, int n_outputs);
void te_optim_stripes_close(te_context *ctx, te_optim_stripes *s);
/* Whether `param` is among them. */
bool te_optim_stripes_have(const te_optim_stripes *s, const te_tensor *param);

#endif
