/* allocator.h - the caching allocator behind tensors and kernel scratch, one per device.
 *
 * Sizes are rounded up to one of eight steps per power of two (at most 1/8 is wasted); a freed block goes to its
 * class's list and the next request of that class takes it. Work on a device is ordered, so a block may be reused at
 * once. When the system or the limit refuses, the cache is emptied and the request tried again. Bookkeeping lives in
 * host memory: the blocks themselves are never touched.
 *
 * The host's memory is not the library's alone. A system that has refused gets back what the cache holds beyond three
 * quarters of what it had given, until it gives more than that again: others need memory, too, and some of them end the
 * process without it. Where the cache holds more than was ever in use at a time, sizes change: then a larger block
 * serves where there is none of the class, and the cache is emptied where it holds twice as much and nothing in it
 * fits.
 */
#ifndef TE_CORE_ALLOCATOR_H
#define TE_CORE_ALLOCATOR_H

#include "kernels/kernels.h"

enum { TE_SIZE_CLASSES = 8 * 48 };

typedef struct te_pool te_pool;

typedef struct te_block {
    void            *ptr;
    size_t           size, used; /* what there is, and of that what was asked for, rounded */
    struct te_block *next;
    te_pool         *pool; /* NULL: anybody's */
} te_block;

/* The memory of a recorded graph: addresses in it are used whenever the graph is launched, so a block that was taken
 * while it was recorded serves that recording alone and returns to the cache only when both the graph and the block's
 * holder are gone. */
struct te_pool {
    int       blocks; /* taken from the cache and not yet returned to it */
    bool      closed;
    te_block *cached[TE_SIZE_CLASSES];
};

typedef struct te_allocator {
    te_exec  *exec;
    size_t    limit; /* 0: none */
    size_t    beside; /* bytes of host memory that count towards the limit: of tensors and recorded operations */
    size_t    current, peak, reserved; /* of `used` the first two, of `size` the third */
    size_t    most;    /* that `current` ever was: the peak may be reset */
    size_t    refused; /* reserved bytes when the system last refused, SIZE_MAX: it gives */
    size_t    idle;    /* bytes that the cache may hold in any case, SIZE_MAX: nobody else wants the memory */
    uint64_t  allocations;
    te_block *cached[TE_SIZE_CLASSES];
    te_block *spare; /* empty te_block structs */
    te_block *scratch; /* blocks lent to kernels */
    te_pool  *pool;    /* that blocks come from while a graph is recorded, NULL: none is */
    bool      lasting; /* and what they hold is there in the next launch: none that the recording has used before */
} te_allocator;

void te_allocator_open(te_allocator *allocator, te_exec *exec, size_t limit, size_t idle);
void te_allocator_close(te_allocator *allocator);
/* NULL when exhausted. The block is given back with te_allocator_free. */
te_block *te_allocator_alloc(te_allocator *allocator, size_t bytes);
void      te_allocator_free(te_allocator *allocator, te_block *block);
void      te_allocator_empty_cache(te_allocator *allocator); /* nothing while a graph is recorded */
/* Whether the limit, and not the system, is what refuses a block of so many bytes. */
bool      te_allocator_limits(const te_allocator *allocator, size_t bytes);
/* Counts bytes of other memory towards the limit: false, and nothing is counted, where it does not allow them. */
bool      te_allocator_count(te_allocator *allocator, size_t bytes);
void      te_allocator_discount(te_allocator *allocator, size_t bytes);
te_pool  *te_pool_open(te_allocator *allocator); /* NULL: out of host memory */
void      te_pool_close(te_allocator *allocator, te_pool *pool);

#endif
