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

/* --- updates: optim.c --------------------------------------------------------------------------------------------- */

enum { TE_OPTIM_VALUES = 8 }; /* coefficients of an update, float64: of the host, or columns of numbers on the device */

/* What an update does: a program over p, g and the states of each parameter, whose outputs are the updated p and states
 * and what follows p. */
typedef struct te_optim_work {
    const te_utility *program;
    int n_states, n_groups;
    const te_optim_group *groups;
    const double (*values)[TE_OPTIM_VALUES]; /* of each group; they stay where they are until it ran */
    const te_tensor *numbers; /* instead: {groups, TE_OPTIM_VALUES} on the device, inputs behind the states */
} te_optim_work;

/* An update of groups in one run of the backend, with all that can be found out beforehand: until it runs nothing was
 * written. */
typedef struct te_optim_pending {
    te_optim_work work;
    te_program *program;
    te_device *device;
    int n; /* parameters of all groups */
    te_optim_batch batch;
    te_optim_quantizing stored;
    te_tensor **copies; /* n: of gradients that are not contiguous */
} te_optim_pending;

/* Binds an update; to be closed even where it fails. */
te_status te_optim_open(te_context *ctx, te_optim_pending *p, const te_optim_work *work);
/* The last preparations, for which all groups of a step are known to be right: masters may change here. */
te_status te_optim_settle(te_context *ctx, te_optim_pending *p);
/* Of groups that are all settled: what follows does not run out of memory. */
te_status te_optim_reserve(te_context *ctx, const te_optim_pending *p);
te_status te_optim_run(te_context *ctx, te_optim_pending *p);
void      te_optim_close(te_context *ctx, te_optim_pending *p);
/* All of these, one after the other. */
te_status te_optim_update(te_context *ctx, const te_optim_work *work);
/* Whether something follows the updated values of any parameter: the parameter of a master, or a compute copy. */
bool      te_optim_any_follows(int n_groups, const te_optim_group *groups);

#endif
