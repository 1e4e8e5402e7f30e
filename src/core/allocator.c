/* allocator.c - see allocator.h. */
#include "allocator.h"

static const size_t LARGEST = (size_t)1 << 46; /* bytes of a block */

/* Class and rounded size of a request: multiples of 64 up to 512, then eight steps per power of two. */
static int size_class(size_t bytes, size_t *rounded)
{
    if (bytes <= 512) {
        int units = bytes ? (int)((bytes + 63) / 64) : 1;
        *rounded = (size_t)units * 64;
        return units - 1;
    }
    int e = 63 - __builtin_clzll((unsigned long long)(bytes - 1)); /* 2^e < bytes <= 2^(e+1), e >= 9 */
    size_t step = (size_t)1 << (e - 3);
    size_t k = (bytes + step - 1) / step; /* 9 … 16 */
    *rounded = k * step;
    return 8 + (e - 9) * 8 + (int)(k - 9);
}

void te_allocator_open(te_allocator *allocator, te_exec *exec, size_t limit, size_t idle)
{
    memset(allocator, 0, sizeof *allocator);
    allocator->exec = exec;
    allocator->limit = limit;
    allocator->refused = SIZE_MAX;
    allocator->idle = idle;
}

static void release_block(te_allocator *allocator, te_block *block)
{
    allocator->exec->backend->memory_free(allocator->exec, block->ptr, block->size);
    allocator->reserved -= block->size;
    block->ptr = NULL;
    block->next = allocator->spare;
    allocator->spare = block;
}

void te_allocator_empty_cache(te_allocator *allocator)
{
    if (allocator->pool) return;
    for (int i = 0; i < TE_SIZE_CLASSES; i++) {
        while (allocator->cached[i]) {
            te_block *block = allocator->cached[i];
            allocator->cached[i] = block->next;
            release_block(allocator, block);
        }
    }
}

void te_allocator_close(te_allocator *allocator)
{
    te_allocator_empty_cache(allocator);
    while (allocator->spare) {
        te_block *block = allocator->spare;
        allocator->spare = block->next;
        te_mem_free(allocator->exec->mem, block, sizeof *block);
    }
}

static bool over_limit(const te_allocator *allocator, size_t size)
{
    size_t used = allocator->reserved + allocator->beside;
    return allocator->limit && (size > allocator->limit || used > allocator->limit - size);
}

bool te_allocator_limits(const te_allocator *allocator, size_t bytes)
{
    size_t size = bytes;
    if (bytes <= LARGEST) size_class(bytes, &size);
    return over_limit(allocator, size);
}

bool te_allocator_count(te_allocator *allocator, size_t bytes)
{
    if (over_limit(allocator, bytes)) te_allocator_empty_cache(allocator);
    if (over_limit(allocator, bytes)) return false;
    allocator->beside += bytes;
    return true;
}

void te_allocator_discount(te_allocator *allocator, size_t bytes) { allocator->beside -= bytes; }

static bool shares(const te_allocator *allocator) { return allocator->idle != SIZE_MAX; }

/* A request larger than all that there is says nothing of how much there could be. */
static void note_refusal(te_allocator *allocator, size_t size)
{
    if (!shares(allocator) || over_limit(allocator, size) || size > allocator->reserved) return;
    allocator->refused = allocator->reserved;
}

static bool gives_back(const te_allocator *allocator)
{
    return allocator->reserved > allocator->refused - allocator->refused / 4;
}

/* A block fresh from the system, within the limit. */
static te_block *reserve_block(te_allocator *allocator, size_t size)
{
    if (over_limit(allocator, size)) return NULL;
    te_block *block = allocator->spare;
    if (block)
        allocator->spare = block->next;
    else if (!(block = te_mem_alloc(allocator->exec->mem, sizeof *block)))
        return NULL;
    block->ptr = allocator->exec->backend->memory_alloc(allocator->exec, size);
    if (!block->ptr) {
        block->next = allocator->spare;
        allocator->spare = block;
        return NULL;
    }
    block->size = size;
    block->pool = NULL;
    allocator->reserved += size;
    if (allocator->reserved > allocator->refused) allocator->refused = SIZE_MAX;
    return block;
}

static bool is_idle(const te_allocator *allocator)
{
    enum { TIMES = 2 };
    size_t cached = allocator->reserved - allocator->current;
    return cached > allocator->idle && cached / TIMES > allocator->most;
}

/* A block of none of the lists. */
static te_block *fresh_block(te_allocator *allocator, size_t size)
{
    if (is_idle(allocator)) te_allocator_empty_cache(allocator);
    te_block *block = reserve_block(allocator, size);
    if (block) return block;
    te_allocator_empty_cache(allocator);
    block = reserve_block(allocator, size);
    if (!block) note_refusal(allocator, size);
    return block;
}

/* A larger block, up to twice the size, where the cache holds more than was ever in use at a time: sizes change then,
 * and what is there serves others as well. Elsewhere what lives long would keep the larger ones. */
static te_block *larger_block(te_allocator *allocator, int class)
{
    size_t cached = allocator->reserved - allocator->current;
    if (allocator->pool || cached <= allocator->idle || cached <= allocator->most) return NULL;
    int last = class < 8 ? 2 * class + 1 : class + 8;
    for (int c = class + 1; c <= last && c < TE_SIZE_CLASSES; c++) {
        te_block *block = allocator->cached[c];
        if (!block) continue;
        allocator->cached[c] = block->next;
        return block;
    }
    return NULL;
}

te_block *te_allocator_alloc(te_allocator *allocator, size_t bytes)
{
    if (bytes > LARGEST) return NULL;
    size_t size;
    int class = size_class(bytes, &size);
    te_block *block = allocator->pool && !allocator->lasting ? allocator->pool->cached[class] : NULL;
    if (block)
        allocator->pool->cached[class] = block->next;
    else if ((block = allocator->cached[class]))
        allocator->cached[class] = block->next;
    else if (!(block = larger_block(allocator, class)) && !(block = fresh_block(allocator, size)))
        return NULL;
    block->next = NULL;
    if (allocator->pool && !block->pool) {
        block->pool = allocator->pool;
        block->pool->blocks++;
    }
    allocator->allocations++;
    block->used = size;
    allocator->current += size;
    if (allocator->current > allocator->peak) allocator->peak = allocator->current;
    if (allocator->current > allocator->most) allocator->most = allocator->current;
    return block;
}

static void cache(te_block **lists, te_block *block)
{
    size_t size;
    int class = size_class(block->size, &size);
    block->next = lists[class];
    lists[class] = block;
}

static void return_to_cache(te_allocator *allocator, te_pool *pool, te_block *block)
{
    block->pool = NULL;
    cache(allocator->cached, block);
    if (--pool->blocks == 0) te_mem_free(allocator->exec->mem, pool, sizeof *pool);
}

void te_allocator_free(te_allocator *allocator, te_block *block)
{
    allocator->current -= block->used;
    if (block->pool && block->pool->closed)
        return_to_cache(allocator, block->pool, block);
    else if (!block->pool && gives_back(allocator))
        release_block(allocator, block);
    else
        cache(block->pool ? block->pool->cached : allocator->cached, block);
}

/* --- pools -------------------------------------------------------------------------------------------------------- */

te_pool *te_pool_open(te_allocator *allocator)
{
    te_pool *pool = te_mem_zalloc(allocator->exec->mem, sizeof *pool);
    if (pool) pool->blocks = 1; /* its own, until it is closed */
    return pool;
}

void te_pool_close(te_allocator *allocator, te_pool *pool)
{
    pool->closed = true;
    for (int i = 0; i < TE_SIZE_CLASSES; i++) {
        while (pool->cached[i]) {
            te_block *block = pool->cached[i];
            pool->cached[i] = block->next;
            return_to_cache(allocator, pool, block);
        }
    }
    if (--pool->blocks == 0) te_mem_free(allocator->exec->mem, pool, sizeof *pool);
}
