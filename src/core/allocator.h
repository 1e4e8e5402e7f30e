/* allocator.h - the caching allocator behind tensors and kernel scratch, one per device.
 *
 * Sizes are rounded up to one of eight steps per power of two (at most 1/8 is wasted); a freed block goes to its class's
 * list and the next request of that class takes it. Work on a device is ordered, so a block may be reused at once. When
 * the system or the limit refuses, the cache is emptied and the request tried again. Bookkeeping lives in host memory:
 * the blocks themselves are never touched.
 */
#ifndef TE_CORE_ALLOCATOR_H
#define TE_CORE_ALLOCATOR_H

#include "kernels/kernels.h"

enum { TE_SIZE_CLASSES = 8 * 48 };

typedef struct te_block {
    void            *ptr;
    size_t           size; /* rounded */
    struct te_block *next;
} te_block;

typedef struct te_allocator {
    te_exec  *exec;
    size_t    limit; /* 0: none */
    size_t    current, peak, reserved;
    uint64_t  allocations;
    te_block *cached[TE_SIZE_CLASSES];
    te_block *spare; /* empty te_block structs */
    te_block *scratch; /* blocks lent to kernels */
} te_allocator;

void te_allocator_open(te_allocator *allocator, te_exec *exec, size_t limit);
void te_allocator_close(te_allocator *allocator);
/* NULL when exhausted. The block is given back with te_allocator_free. */
te_block *te_allocator_alloc(te_allocator *allocator, size_t bytes);
void      te_allocator_free(te_allocator *allocator, te_block *block);
void      te_allocator_empty_cache(te_allocator *allocator);

#endif
