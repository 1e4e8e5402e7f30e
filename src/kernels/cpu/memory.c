/* memory.c - host memory: the library's hook on malloc, and the blocks behind tensors. */
#define _GNU_SOURCE
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

enum { HUGE_PAGE = 2 << 20, HUGE_FROM = 4 << 20 };

/* Blocks of 4 MiB and more come straight from the kernel, aligned for huge pages; smaller ones from malloc. */
void *te_cpu_memory_alloc(te_exec *exec, size_t bytes)
{
    (void)exec;
    if (bytes > SIZE_MAX - 2 * (size_t)HUGE_PAGE) return NULL;
    void *ptr = NULL;
    if (bytes < HUGE_FROM) return posix_memalign(&ptr, 64, bytes ? bytes : 64) == 0 ? ptr : NULL;
    if (posix_memalign(&ptr, HUGE_PAGE, bytes) != 0) return NULL;
    (void)madvise(ptr, bytes & ~(size_t)(HUGE_PAGE - 1), MADV_HUGEPAGE);
    return ptr;
}

void te_cpu_memory_free(te_exec *exec, void *ptr, size_t bytes)
{
    (void)exec;
    (void)bytes;
    free(ptr);
}
