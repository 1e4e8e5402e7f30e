/* fake.h - a machine with CUDA devices that has none: the entry points of the driver, NVRTC, cuBLASLt, cuDNN and
 * NCCL that the backend calls, for tests. All are in one shared object, which stands in a folder under each library's
 * name.
 *
 * Device memory is host memory that only the "device" may touch: it is protected except while queued work runs. Work is
 * queued by every call and runs when somebody waits or asks, so host memory that is reused too early is caught. New
 * device memory holds NaNs, and a border around each allocation is checked when it is freed. Time is counted, not
 * measured.
 *
 * Kernels are compiled and run by the simulator (cuda_sim.h).
 *
 * With TE_FAKE_IDLE in the environment the device has the memory of a large card and does nothing but small copies:
 * what the host does for models of any size can be watched, and the cache of kernels holds the source of all that they
 * need.
 */
#ifndef TE_KERNELS_CUDA_FAKE_H
#define TE_KERNELS_CUDA_FAKE_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TE_FAKE __attribute__((visibility("default")))

/* --- for tests, by dlsym ------------------------------------------------------------------------------------------ */

/* The n-th call (from 0) of `function` from now on returns `code`; NULL: none does. */
TE_FAKE void te_fake_fail_call(const char *function, int n, int code);
/* The n-th piece of work (from 0) from now on fails while it runs, and the device with it; code 0: none does. */
TE_FAKE void te_fake_fail_work(int n, int code);
TE_FAKE void te_fake_set_memory(size_t bytes); /* of each device */
/* The capability is 90 at first, or $TE_FAKE_CAPABILITY. */
TE_FAKE void te_fake_set_devices(int count, int capability);
/* Shared memory that a block may ask for; 0, at first: that of cards of this capability. */
TE_FAKE void te_fake_set_shared(uint32_t bytes);
/* The version of CUDA that the driver is for, and that NVRTC is of; 13000 at first. The other libraries are always of
 * 13. */
TE_FAKE void te_fake_set_driver(int version);
TE_FAKE void te_fake_set_nvrtc(int version);
/* What a matrix product's epilogue adds to its counted time, in nanoseconds; 0 at first. */
TE_FAKE void te_fake_set_epilogue_cost(uint64_t nanoseconds);
/* Counted times of a matrix product by each of the library's three algorithms, in nanoseconds, before products have
 * taken TE_FAKE_HOT of them from now on, and after it; 0, at first: the second one takes half as long as the others.
 * Products by algorithm i are counted as calls of "product i". */
enum { TE_FAKE_HOT = 20000000 };
TE_FAKE void te_fake_set_product_costs(const uint64_t *cold, const uint64_t *hot);
/* Whether products of fp8 are added up as short as tensor cores before compute capability 10.0 do it; at first
 * where TE_FAKE_SHORT_SUMS is in the environment. */
TE_FAKE void te_fake_set_short_sums(bool are_short);
/* Makes a failed device usable again, as a new process would. */
TE_FAKE void te_fake_reset(void);
/* Things made and not destroyed: allocations, streams, events, modules, retained contexts, descriptors. */
TE_FAKE int te_fake_live(void);
/* Borders found damaged, and addresses that are no allocation's, so far. */
TE_FAKE int      te_fake_faults(void);
TE_FAKE uint64_t te_fake_count(const char *function); /* calls so far */

/* --- within ------------------------------------------------------------------------------------------------------- */

typedef void te_fake_function(void *work);

/* Every entry point begins with it: counts the call; the code that it is to return, 0 when it is to go on. */
int  te_fake_enter(const char *function);
void te_fake_made(int change); /* +1, -1 */

/* Queues work: `run` gets a copy of the `size` bytes at `work` later; `cost` in nanoseconds of the counted time. */
CUresult te_fake_queue(CUstream stream, te_fake_function *run, const void *work, size_t size, uint64_t cost);
/* From begin to end what would be queued is kept instead; NULL when it was made useless by a call that waits. */
typedef struct te_fake_record te_fake_record;
void            te_fake_record_begin(void);
te_fake_record *te_fake_record_end(void);
CUresult        te_fake_record_queue(const te_fake_record *record);
/* One more owner of a record; it goes with its last one, and then calls what it was told to. */
void te_fake_record_retain(te_fake_record *record);
void te_fake_record_free(te_fake_record *record);
/* What is recorded now calls `release` with `what` at its end; false: nothing is recorded. */
bool te_fake_record_hold(te_fake_function *release, void *what);
/* Whether the stream's device is the thread's current one. */
bool te_fake_takes_work(CUstream stream);
/* Whether the device does nothing but copies of so many bytes. */
enum { TE_FAKE_IDLE_BYTES = 1 << 20 };
bool te_fake_idle(void);
/* Runs what is queued; whether something is. */
CUresult te_fake_flush(void);
/* Likewise, but CUDA_ERROR_NOT_READY where work stands still; everything else that waits would do so for ever. */
CUresult te_fake_poll(void);
/* These until *left is 0, which running work sees to. */
CUresult te_fake_flush_until(const int *left);
CUresult te_fake_poll_until(const int *left);
bool     te_fake_recording(void);
/* Called by running work that has no end, or not yet: it and all behind it stay queued. */
void te_fake_stand_still(void);
/* What has just been queued begins at once, and with each launch of what is recorded: others wait for it. */
void te_fake_hasten(void);
bool     te_fake_queued(void);
/* 90 for sm_90; 13000 for CUDA 13.0. */
int te_fake_capability(void);
int te_fake_driver(void);
/* What the device has failed with. */
CUresult te_fake_status(void);
void     te_fake_broken(int code); /* called by running work */

/* memory.c */
CUdeviceptr te_fake_allocate(size_t bytes);
bool        te_fake_release(CUdeviceptr ptr);
void        te_fake_open_memory(bool open);
bool        te_fake_contains(CUdeviceptr ptr, size_t bytes); /* within one allocation */
bool        te_fake_owns(CUdeviceptr ptr);                   /* in an allocation, no fault if not */

#endif
