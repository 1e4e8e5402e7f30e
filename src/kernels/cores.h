/* cores.h - the processors that this process may use, and on which of them its threads run. */
#ifndef TE_CORES_H
#define TE_CORES_H

/* How many threads are worth starting: the processors that this process may run on, or fewer where its control group
 * gets less time than those have: a container may see sixty-four processors and be given two. At least 1. With
 * OMP_PROC_BIND the OpenMP library holds the first thread on one processor; then those of all its places count. */
int te_cores(void);

/* How many threads to compute with where nobody says: what OMP_NUM_THREADS asks for (of a list, its first number), as
 * with other libraries, otherwise te_cores. */
int te_cores_wanted(void);

/* The processor that the calling thread runs on; -1 where that is not known. */
int te_cores_current(void);

/* For thread `index` of a team, from 1 on: where OpenMP binds its threads, on OpenMP's place of that number. A thread
 * begins with the processors of the one that made it, which may then be a single one. */
void te_cores_bind(int index);

/* Takes the calling thread off the processor, where it may run on another one. It may come back later. */
void te_cores_leave(int processor);

/* How many forks lie between this process and the one that first asked: threads that were started at another number
 * are not there. */
int te_cores_forks(void);

#endif
