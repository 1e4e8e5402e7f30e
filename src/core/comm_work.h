/* comm_work.h - a call of a group on its way: from comm_calls.c, through what all agree on (comm_agree.c), to
 * where its bytes are moved and added, the host's memory (comm_host.c) or a device with collectives (comm_device.c). */
#ifndef TE_CORE_COMM_WORK_H
#define TE_CORE_COMM_WORK_H

#include "comm.h"

typedef enum te_comm_function {
    TE_COMM_SPLIT, TE_COMM_BARRIER, TE_COMM_BROADCAST, TE_COMM_ALL_REDUCE, TE_COMM_ALL_GATHER,
    TE_COMM_REDUCE_SCATTER, TE_COMM_ALL_TO_ALL, TE_COMM_EXCHANGE,
    TE_COMM_END /* of the process */
} te_comm_function;

const char *te_comm_function_name(int64_t function);
const char *te_comm_reduction_name(int64_t reduction);

/* A call on its way. All it needs is there before the processes agree on it: after that none may fail alone. */
typedef struct te_comm_work {
    te_comm         *comm;
    te_comm_function function;
    te_tensor       *given;
    te_reduction     reduction;
    int              root, to, from;
    bool             in_place;
    te_tensor       *x;      /* `given` where the call can be run, contiguous; what works in place works here */
    te_tensor       *out;    /* NULL: x is the result */
    te_tensor       *room;   /* for what is on its way, in host memory; NULL: not needed */
    te_device       *device; /* with collectives; NULL: the host's memory */
    te_device_peers *peers;
} te_comm_work;

/* The group is of no use from now on. */
void te_comm_give_up(te_comm *comm);
/* What the messenger says went wrong in a call, which gives the group up. */
te_status te_comm_fail_exec(te_comm *comm, te_status status, const char *call);
/* Whether the group is still of use. */
te_status te_comm_check_group(te_comm *comm, te_comm_function f);
/* Every process learns what the others are about to do, and finds the same fault in it or none; so all go on from the
 * same place. One that failed on its own takes part too: the others would wait for it. */
te_status te_comm_agree(te_comm *comm, const te_comm_call *own);

/* Elements of w->room that a call in the host's memory needs. */
int64_t te_comm_room(const te_comm_work *w);
te_status te_comm_on_host(const te_comm_work *w);
te_status te_comm_on_device(te_comm_work *w);

#endif
