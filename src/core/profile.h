/* profile.h - what ran: every kernel of a context between start and stop, with its time, bytes and work.
 *
 * While a profile runs, each open device, also one that is opened meanwhile, has a table of functions that measure and
 * hand on. A device is synchronized around every kernel, so that a time belongs to its kernel; the sum is more than the
 * run took without a profile. */
#ifndef TE_CORE_PROFILE_H
#define TE_CORE_PROFILE_H

#include "context.h"

typedef struct te_profile_event {
    char   name[56];  /* "dropout_apply+add+layer_norm", "gemm 768x128x128" */
    char   kind[12];  /* "program", "gemm", "attention", "other" */
    char   device[16];
    double start, seconds; /* from the start of the profile */
    double bytes, flops;   /* 0: not counted */
} te_profile_event;

/* One profile at a time per context. Fails with what went wrong on a device before and was not reported yet. Events
 * come from `mem`, which may refuse more of them: there is one per kernel. */
te_status te_profile_start(te_context *ctx, te_mem mem);
/* For each device that is opened: a profile in progress measures it, too. */
void te_profile_device(te_device *device);
/* The events since the start, which the caller gives back to their te_mem (capacity * sizeof). *status is the first
 * failure to record one. */
te_profile_event *te_profile_stop(te_context *ctx, size_t *n, size_t *capacity, te_status *status);

#endif
