/* collectives.h - what a backend offers between devices of several processes (te_backend.collectives; CUDA: NCCL).
 *
 * Calls are ordered with the others on the same te_exec and asynchronous, as kernels are; all processes of a group make
 * them in the same order. Sums of two-byte floats are rounded as the library rounds them, in an order of its own.
 */
#ifndef TE_KERNELS_COLLECTIVES_H
#define TE_KERNELS_COLLECTIVES_H

#include "kernels.h"
#include "tetrain/comm.h" /* for what is reduced alone */

typedef struct te_device_peers te_device_peers; /* the backend's own */

typedef struct te_collectives {
    size_t id_bytes; /* of what the processes of a new group must know together */
    /* Made by one process, and known to all before they connect. */
    te_status (*make_id)(te_exec *exec, void *id);
    te_status (*connect)(te_exec *exec, const void *id, int rank, int size, te_device_peers **peers);
    void (*disconnect)(te_exec *exec, te_device_peers *peers);
    /* Elements in memory of the device, contiguous. n: of one process's input in all_reduce and all_gather, of its
     * output in reduce_scatter, between two processes in all_to_all and exchange. all_reduce may work in place; in
     * all_gather in may be its own place in out, in reduce_scatter out its own place in in. */
    te_status (*all_reduce)(te_exec *exec, te_device_peers *peers, const void *in, void *out, int64_t n,
                            te_dtype dtype, te_reduction reduction);
    te_status (*reduce_scatter)(te_exec *exec, te_device_peers *peers, const void *in, void *out, int64_t n,
                                te_dtype dtype, te_reduction reduction);
    te_status (*all_gather)(te_exec *exec, te_device_peers *peers, const void *in, void *out, int64_t n,
                            te_dtype dtype);
    te_status (*broadcast)(te_exec *exec, te_device_peers *peers, void *data, int64_t n, te_dtype dtype, int root);
    te_status (*all_to_all)(te_exec *exec, te_device_peers *peers, const void *in, void *out, int64_t n,
                            te_dtype dtype);
    te_status (*exchange)(te_exec *exec, te_device_peers *peers, const void *out, int to, void *in, int from,
                          int64_t n, te_dtype dtype);
} te_collectives;

#endif
