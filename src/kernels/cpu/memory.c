/* memory.c - host memory: the library's hook on malloc, and the blocks behind tensors.
 *
 * Blocks come from the same hook as everything else, so a host can count or refuse them. Each is aligned by hand, with
 * the address that the hook gave kept just before it:
 *
 *     raw ……… | raw | block, 64-byte or huge-page aligned ………
 */
#include "cpu.h"

#include <stdlib.h>
#include <sys/mman.h>

static void *libc_realloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    (void)user;
    (void)old_size;
    if (new_size == 0) {
        free(ptr);
        return NULL;
    }
    return realloc(ptr, new_size);
}

const te_mem te_mem_libc = {libc_realloc, NULL};

enum { CACHE_LINE = 64, HUGE_PAGE = 2 << 20, HUGE_FROM = 2 << 20 };

static size_t alignment_of(size_t bytes) { return bytes < HUGE_FROM ? CACHE_LINE : HUGE_PAGE; }

/* Large blocks are aligned to and advised for huge pages: their page faults cost more than the arithmetic on them. */
void *te_cpu_memory_alloc(te_exec *exec, size_t bytes)
{
    size_t align = alignment_of(bytes);
    if (bytes > SIZE_MAX - align - sizeof(void *)) return NULL;
    void *raw = te_mem_alloc(exec->mem, bytes + align + sizeof(void *));
    if (!raw) return NULL;
    uintptr_t at = ((uintptr_t)raw + sizeof(void *) + align - 1) & ~(uintptr_t)(align - 1);
    void     *ptr = (void *)at;
    ((void **)ptr)[-1] = raw;
    if (align == HUGE_PAGE) (void)madvise(ptr, bytes & ~(size_t)(HUGE_PAGE - 1), MADV_HUGEPAGE);
    return ptr;
}

void te_cpu_memory_free(te_exec *exec, void *ptr, size_t bytes)
{
    if (ptr) te_mem_free(exec->mem, ((void **)ptr)[-1], bytes + alignment_of(bytes) + sizeof(void *));
}
