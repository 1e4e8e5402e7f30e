/* cores.h - how many threads are worth starting on this machine. */
#ifndef TE_CORES_H
#define TE_CORES_H

/* The processors that this process may run on, or fewer where its control group gets less time than those have: a
 * container may see sixty-four processors and be given two. At least 1. */
int te_cores(void);

#endif
