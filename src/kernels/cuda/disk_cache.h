/* disk_cache.h - blobs on disk by the hash of what they were made from.
 *
 * An entry is written to a file of its own and renamed, so that readers and writers of several processes never see half
 * of one; it carries its length and checksum, and one that does not match counts as absent. No failure of the file
 * system is an error: the cache is then empty.
 */
#ifndef TE_KERNELS_CUDA_DISK_CACHE_H
#define TE_KERNELS_CUDA_DISK_CACHE_H

#include "../map.h"

typedef te_map_key te_hash128;

#define TE_HASH128_START ((te_hash128){0x9e3779b97f4a7c15u, 0xc2b2ae3d27d4eb4fu})

/* Goes on with `bytes`; the length enters too, so that pieces cannot shift. */
te_hash128 te_hash128_add(te_hash128 hash, const void *bytes, size_t length);

typedef struct te_disk_cache {
    const te_mem *mem;
    char          folder[512]; /* "": no cache */
} te_disk_cache;

/* $TETRAIN_CACHE, or tetrain in the user's cache folder. */
void te_disk_cache_open(te_disk_cache *cache, const te_mem *mem);
/* The entry's bytes, to be freed through mem with *length; NULL when there is none or it is damaged. */
void *te_disk_cache_read(const te_disk_cache *cache, te_hash128 key, const char *suffix, size_t *length);
void  te_disk_cache_write(const te_disk_cache *cache, te_hash128 key, const char *suffix, const void *bytes,
                          size_t length);

#endif
