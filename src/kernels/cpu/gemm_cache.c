/* gemm_cache.c - see gemm_cache.h. A flat array serves: there are as many entries as a model has weights, and a look-up
 * compares keys only. */
#include "gemm_cache.h"

#include <string.h>

enum {
    ENTRIES = 512,
    ALIGNMENT = 64,
    STALE_AFTER = 1024 /* look-ups; a step of a deep model makes some hundreds */
};

static const size_t BYTES_LIMIT = (size_t)256 << 20;

typedef struct entry {
    te_gemm_packed_id id;
    uint64_t          used;
    char             *block; /* NULL: only seen so far */
    size_t            bytes;
} entry;

struct te_gemm_cache {
    const te_mem *mem;
    uint64_t      clock;
    size_t        bytes;
    int           n;
    entry         entries[ENTRIES];
};

te_gemm_cache *te_gemm_cache_new(const te_mem *mem)
{
    te_gemm_cache *cache = te_mem_zalloc(mem, sizeof *cache);
    if (cache) cache->mem = mem;
    return cache;
}

static void remove_entry(te_gemm_cache *cache, int i)
{
    entry *e = &cache->entries[i];
    if (e->block) {
        te_mem_free(cache->mem, e->block, e->bytes + ALIGNMENT);
        cache->bytes -= e->bytes;
    }
    cache->entries[i] = cache->entries[--cache->n];
}

void te_gemm_cache_free(te_gemm_cache *cache)
{
    if (!cache) return;
    while (cache->n) remove_entry(cache, cache->n - 1);
    te_mem_free(cache->mem, cache, sizeof *cache);
}

size_t te_gemm_cache_bytes(const te_gemm_cache *cache) { return cache->bytes; }

static void remove_stale(te_gemm_cache *cache)
{
    for (int i = cache->n - 1; i >= 0; i--)
        if (cache->clock - cache->entries[i].used > STALE_AFTER) remove_entry(cache, i);
}

static entry *find_entry(te_gemm_cache *cache, const te_gemm_packed_id *id)
{
    for (int i = 0; i < cache->n; i++)
        if (cache->entries[i].id.key == id->key && memcmp(&cache->entries[i].id, id, sizeof *id) == 0)
            return &cache->entries[i];
    return NULL;
}

void te_gemm_cache_forget(te_gemm_cache *cache, const te_gemm_packed_id *id)
{
    entry *e = find_entry(cache, id);
    if (e) remove_entry(cache, (int)(e - cache->entries));
}

static void remember(te_gemm_cache *cache, const te_gemm_packed_id *id)
{
    remove_stale(cache);
    if (cache->n < ENTRIES) cache->entries[cache->n++] = (entry){.id = *id, .used = cache->clock};
}

static void *aligned(char *block) { return (void *)(((uintptr_t)block + ALIGNMENT - 1) & ~(uintptr_t)(ALIGNMENT - 1)); }

const void *te_gemm_cache_find(te_gemm_cache *cache, const te_gemm_packed_id *id, size_t bytes, void **room)
{
    *room = NULL;
    cache->clock++;
    entry *e = find_entry(cache, id);
    if (!e) {
        remember(cache, id);
        return NULL;
    }
    e->used = cache->clock;
    if (e->block) return aligned(e->block);
    if (cache->bytes + bytes > BYTES_LIMIT) {
        remove_stale(cache);
        e = find_entry(cache, id); /* entries moved */
    }
    if (cache->bytes + bytes > BYTES_LIMIT) return NULL;
    e->block = te_mem_alloc(cache->mem, bytes + ALIGNMENT);
    if (!e->block) return NULL;
    e->bytes = bytes;
    cache->bytes += bytes;
    *room = aligned(e->block);
    return NULL;
}
