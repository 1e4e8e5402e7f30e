/* comm.h - groups of processes, as the engine sees them. */
#ifndef TE_CORE_COMM_H
#define TE_CORE_COMM_H

#include "context.h"
#include "kernels/collectives.h"
#include "kernels/messenger.h"
#include "tetrain/comm.h"

/* One call of one process, as it tells the others before. What stands before `failed` is the same in all of them; it is
 * compared as bytes, so there is no padding and what is not used is 0. */
typedef struct te_comm_call {
    int64_t function, dtype, by_device, reduction, root, ndim, shape[TE_MAX_DIMS];
    int64_t failed; /* te_status: this process cannot take part */
    int64_t to, from;
    int64_t connection; /* of its device: where they differ, the devices are connected anew */
} te_comm_call;

/* What rank 0 tells the others of its device: whether it could make an id, and the id. */
typedef struct te_comm_announcement {
    int64_t       status;
    unsigned char id[256];
} te_comm_announcement;

struct te_comm {
    te_context         *ctx;
    int                 refs;
    const te_messenger *messenger; /* NULL: a group of one */
    te_peers           *peers;     /* of it */
    te_exec             exec;      /* for its messages */
    bool                broken;    /* of no use: the processes no longer agree where they are */
    bool                left_off;  /* a call is still under way: `calls` and what it has of tensors are never freed */
    int                 ended;     /* 1 + the rank of a process that has ended */
    te_comm_call       *calls;     /* of all processes, and its own once more */
    te_comm_announcement *announced; /* behind them */
    size_t              bytes_of_calls;
    te_device_peers    *device_peers[TE_MAX_DEVICES]; /* NULL: not connected */
    int64_t             connection[TE_MAX_DEVICES];   /* the number of that connection, from 1 */
    int64_t             connections;                  /* so far, the same in all processes */
};

/* A group of all that join the messenger; NULL with the reason recorded. messenger NULL: a group of one. */
te_comm *te_comm_join(te_context *ctx, const te_messenger *messenger);

/* Takes part in the split that the others call, with a failure whose message the caller has. */
te_status te_comm_decline_split(te_comm *comm);

/* out[i] = in[0][i] + in[1][i] + … + in[n_parts - 1][i], in this order, or what else the reduction is; parts of n
 * elements one after the other. In float32 and rounded once; float64 and integers in their own type. */
void te_comm_reduce_parts(void *out, const void *in, int n_parts, int64_t n, te_dtype dtype, te_reduction reduction);

#endif
