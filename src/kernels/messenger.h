/* messenger.h - what moves bytes between processes, in a library of its own (libtetrain_mpi.so), opened when a process
 * that was started together with others first asks for them.
 *
 * A messenger knows nothing of dtypes and sums: it moves bytes in host memory, and src/core/comm_reduce.c adds, in the
 * order of the ranks, so that every process has the same bits whatever the messenger does. Every call is made by all
 * processes of a group, in the same order, and has ended when it returns; one that takes long is left off with
 * TE_ERROR_INTERRUPTED when the te_exec's flag says so, and the group is of no use from then on.
 *
 * The library exports TE_MESSENGER_ENTRY, which returns this table, and links nothing of libtetrain.
 */
#ifndef TE_KERNELS_MESSENGER_H
#define TE_KERNELS_MESSENGER_H

#include "kernels.h"

/* This process's place in a group. Whatever the messenger keeps follows behind it. */
typedef struct te_peers {
    int rank, size;             /* 0 … size - 1 */
    int local_rank, local_size; /* among the processes of the group on the same machine */
    bool over;                  /* set by whoever calls: the group is of no use, nobody is told of this process's end */
} te_peers;

typedef struct te_messenger {
    uint64_t    layout; /* TE_MESSENGER_LAYOUT */
    const char *name;   /* "mpi" */
    /* All processes that were started together; one at a time, until it is left. A process that ends well takes part
     * once more in each of its groups, in an all_gather of what stands in `farewell`, of which a copy is kept. */
    te_status (*join)(te_exec *exec, const void *farewell, size_t bytes, te_peers **peers);
    /* Those with the same color (from 0), in the order of key and then of their rank before. A negative color: this
     * process is in none, and *part is NULL. */
    te_status (*split)(te_exec *exec, te_peers *peers, int color, int key, te_peers **part);
    void (*leave)(te_exec *exec, te_peers *peers);
    te_status (*broadcast)(te_exec *exec, te_peers *peers, void *data, size_t bytes, int root);
    /* out[rank] = in of that rank; bytes of one rank. in may be its own place in out. */
    te_status (*all_gather)(te_exec *exec, te_peers *peers, const void *in, void *out, size_t bytes);
    /* out[rank] = in[own rank] of that rank; bytes between two ranks. in and out lie apart. */
    te_status (*all_to_all)(te_exec *exec, te_peers *peers, const void *in, void *out, size_t bytes);
    /* Sends to one rank while receiving from another one; either may be -1 (nothing) or the process itself. */
    te_status (*exchange)(te_exec *exec, te_peers *peers, const void *out, int to, void *in, int from, size_t bytes);
} te_messenger;

#define TE_MESSENGER_LAYOUT ((uint64_t)sizeof(te_messenger) | (uint64_t)sizeof(te_peers) << 16 | \
                             (uint64_t)sizeof(te_exec) << 32)

#define TE_MESSENGER_ENTRY "te_messenger_get"
typedef const te_messenger *te_messenger_get_function(void);

#endif
