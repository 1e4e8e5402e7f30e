/* gemm_cache.h - packed copies of operands that come again, weights in practice.
 *
 * Packing an operand pays only when the same contents are multiplied more than once, so a copy is made at the second
 * sight of a key. Which layout a copy has is the business of who packs: `form` describes it and is compared as a whole.
 * A weight that changed arrives with another key; copies under the old one are never looked up again and leave when
 * they have not been used for a while or room is needed. A copy in use lately is never driven out by a newcomer, since
 * a set of weights that does not fit would otherwise be packed over and over.
 */
#ifndef TE_KERNELS_CPU_GEMM_CACHE_H
#define TE_KERNELS_CPU_GEMM_CACHE_H

#include "../kernels.h"

typedef struct te_gemm_packed_id {
    uint64_t key;
    int64_t  form[15];
} te_gemm_packed_id;

typedef struct te_gemm_cache te_gemm_cache;

te_gemm_cache *te_gemm_cache_new(const te_mem *mem); /* NULL: memory is exhausted */
void te_gemm_cache_free(te_gemm_cache *cache);

/* The copy of `id`, 64-byte aligned, or NULL. With NULL, *room is memory of `bytes` bytes that the caller fills now,
 * after which the copy is there; or NULL where none is to be kept (first sight, no room, no memory). */
const void *te_gemm_cache_find(te_gemm_cache *cache, const te_gemm_packed_id *id, size_t bytes, void **room);

/* Takes back what find promised, when the copy could not be filled. */
void te_gemm_cache_forget(te_gemm_cache *cache, const te_gemm_packed_id *id);

size_t te_gemm_cache_bytes(const te_gemm_cache *cache); /* in copies */

#endif
