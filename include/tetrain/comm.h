/* comm.h - groups of processes: one program started several times (mpirun -n 4 …), each with a context of its own.
 *
 * Ranks count from 0. All processes of a group call the same functions in the same order, with tensors of equal shape,
 * dtype and kind of device; on the CPU a call that differs from the others' is an error in all of them. Sums of tensors
 * on the CPU are taken in the order of the ranks in float32 (float64 and integers: in their own type) and rounded once:
 * every process gets the same bits, whatever carries them. On CUDA devices NCCL adds.
 *
 * A call that is interrupted is left off, and its group is of no use from then on. What that call may still write to is
 * never freed: the call's few bytes for each process and, where its tensors were on their way, these and their context.
 *
 * Processes know each other, not the contexts in them: only one context of a process is among the others at a time, and
 * te_comm_world is an error in another one until the first has released what it gave. What contexts of different times
 * join is the same to MPI. Groups that were split stay there, some KB each, to the end of the process, since freeing
 * one waits for all of it: split once, not in every step (Open MPI has room for 65,530). One too many is an error in
 * all processes, and the group that was to be split goes on.
 *
 * A process that ends with status 0 after it joined makes calls that wait for it fail; where the host began MPI by
 * itself nobody is told. One that ends before it joins is waited for in MPI.
 *
 * Nothing here records gradients: a tensor that requires one is refused while they are recorded (of modules, AllReduce,
 * AllGather and ReduceScatter do).
 */
#ifndef TETRAIN_COMM_H
#define TETRAIN_COMM_H

#include "te.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct te_comm te_comm;

typedef enum te_reduction { TE_REDUCE_SUM, TE_REDUCE_AVERAGE, TE_REDUCE_MAX, TE_REDUCE_MIN } te_reduction;

/* All processes that were started together; made once, every call gives a further reference. A process that was started
 * alone is a group of one, which opens no library. NULL, with a message: the module for it cannot be opened, or another
 * context of this process has joined. */
TE_API te_comm *te_comm_world(te_context *ctx);
/* The processes that give the same color (from 0), ordered by key and then by rank. Called by all of comm; a process
 * with a negative color gets NULL and no message: it is in none of the new groups. */
TE_API te_comm *te_comm_split(te_comm *comm, int color, int key);
TE_API te_comm *te_comm_retain(te_comm *comm);
TE_API void     te_comm_release(te_comm *comm);

TE_API int te_comm_rank(const te_comm *comm);
TE_API int te_comm_size(const te_comm *comm);
TE_API int te_comm_local_rank(const te_comm *comm); /* among the processes on the same machine: a device's number */
TE_API int te_comm_local_size(const te_comm *comm); /* how many of the group are on this machine */
/* Whether this process was started together with others, by mpirun or the like; looks at the environment alone. */
TE_API bool te_comm_launched(void);

/* Returns when all have called it. */
TE_API te_status te_comm_barrier(te_comm *comm);
/* In place, contiguous. Sums of integers end at the limits of their type, as in operations; NCCL's wrap. */
TE_API te_status te_comm_broadcast(te_comm *comm, te_tensor *x, int root);
TE_API te_status te_comm_all_reduce_in_place(te_comm *comm, te_tensor *x, te_reduction reduction);
/* x is {n, …}. all_gather gives {size * n, …}, the processes' tensors one after the other; reduce_scatter needs n to
 * be a multiple of size and gives this process's {n / size, …} of the sum; all_to_all likewise sends part r to rank r
 * and gives the parts that came, in the order of the ranks, {n, …}. NULL on failure. */
TE_API te_tensor *te_comm_all_reduce(te_comm *comm, te_tensor *x, te_reduction reduction);
TE_API te_tensor *te_comm_all_gather(te_comm *comm, te_tensor *x);
TE_API te_tensor *te_comm_reduce_scatter(te_comm *comm, te_tensor *x, te_reduction reduction);
TE_API te_tensor *te_comm_all_to_all(te_comm *comm, te_tensor *x);
/* What rank `from` sent, of x's shape, while x goes to rank `to`. */
TE_API te_tensor *te_comm_exchange(te_comm *comm, te_tensor *x, int to, int from);

#ifdef __cplusplus
}
#endif
#endif
