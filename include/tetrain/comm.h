/* comm.h - groups of processes: one program started several times (mpirun -n 4 …), each process with its own context.
 *
 * Ranks count from 0. All processes of a group call the same functions in the same order, with tensors of equal shape,
 * dtype and kind of device; on the CPU a call that differs from the others' is an error in all of them. Sums of tensors
 * on the CPU are taken in the order of the ranks in float32 (float64 and integers: in their own type) and rounded once:
 * every process gets the same bits, whatever the transport. On CUDA devices NCCL computes them.
 *
 * A call that is interrupted is abandoned, and its group cannot be used from then on. Memory that the call may still
 * write to is never freed: a few bytes for each process and, where tensors were in transit, these and their context.
 *
 * Processes know each other, not the contexts in them: where they were started together, only one context of a process
 * may be a member at a time, and te_comm_world is an error in any other until the first has released the group (a
 * process that was started alone has a group of one for each context). To MPI it makes no difference that
 * contexts of different times join. In MPI, groups made by a split take some KB each until the process ends, since
 * freeing one would wait for all its members: split once, not in every step (Open MPI has room for 65,530). One split
 * too many is an error in all processes, and the group that was to be split remains usable.
 *
 * When a process ends with status 0 after it joined, calls that wait for it fail; where the host initialized MPI
 * itself, the others are not told. For a process that ends before it joins, MPI keeps waiting.
 *
 * Nothing here records gradients: a tensor that requires one is refused while gradients are recorded (the modules
 * AllReduce, AllGather and ReduceScatter do record them), but for parameters, leaves, that te_comm_broadcast fills.
 */
#ifndef TETRAIN_COMM_H
#define TETRAIN_COMM_H

#include "te.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct te_comm te_comm;

typedef enum te_reduction { TE_REDUCE_SUM, TE_REDUCE_AVERAGE, TE_REDUCE_MAX, TE_REDUCE_MIN } te_reduction;

/* The group of all processes that were started together. It is made once; every call returns a further reference. A
 * process that was started alone is a group of one, which opens no library. NULL, with a message, when the MPI
 * module cannot be opened, or another context of this process has joined. */
TE_API te_comm *te_comm_world(te_context *ctx);
/* The group of the processes that pass the same color (0 or more), ordered by key and then by rank. All processes of
 * comm must call it; a process with a negative color gets NULL and no message: it is in none of the new groups. */
TE_API te_comm *te_comm_split(te_comm *comm, int color, int key);
TE_API te_comm *te_comm_retain(te_comm *comm);
TE_API void     te_comm_release(te_comm *comm);

/* Of NULL: rank 0 of 1. */
TE_API int te_comm_rank(const te_comm *comm);
TE_API int te_comm_size(const te_comm *comm);
TE_API int te_comm_local_rank(const te_comm *comm); /* among the processes on the same machine: a device's number */
TE_API int te_comm_local_size(const te_comm *comm); /* number of processes of the group on this machine */
/* Whether this process was started together with others, by mpirun or the like; checks only the environment. */
TE_API bool te_comm_launched(void);

/* Returns when all processes have called it. */
TE_API te_status te_comm_barrier(te_comm *comm);
/* In place; x must be contiguous. Sums of integers saturate at the limits of their type, as in operations; NCCL's wrap
 * around. */
TE_API te_status te_comm_broadcast(te_comm *comm, te_tensor *x, int root);
TE_API te_status te_comm_all_reduce_in_place(te_comm *comm, te_tensor *x, te_reduction reduction);
/* x is {n, …}. all_gather returns {size * n, …}, the processes' tensors one after the other. reduce_scatter needs n to
 * be a multiple of size and returns this process's part {n / size, …} of the reduction. all_to_all, with the same
 * condition, sends part r to rank r and returns the parts received, in the order of the ranks, {n, …}. NULL on
 * failure. */
TE_API te_tensor *te_comm_all_reduce(te_comm *comm, te_tensor *x, te_reduction reduction);
TE_API te_tensor *te_comm_all_gather(te_comm *comm, te_tensor *x);
TE_API te_tensor *te_comm_reduce_scatter(te_comm *comm, te_tensor *x, te_reduction reduction);
TE_API te_tensor *te_comm_all_to_all(te_comm *comm, te_tensor *x);
/* Sends x to rank `to` and returns the tensor that rank `from` sent, of x's shape. */
TE_API te_tensor *te_comm_exchange(te_comm *comm, te_tensor *x, int to, int from);

#ifdef __cplusplus
}
#endif
#endif
