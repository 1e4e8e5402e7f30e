/* memory.h - the one hook through which the library gets host memory.
 *
 * Same contract as lua_Alloc: `realloc(user, ptr, old_size, new_size)`; new_size 0 frees and returns NULL; NULL on
 * failure leaves the old block alone. A test installs a hook that fails at the n-th call and walks n upwards until a
 * scenario passes; so every allocation of the library, however small, goes through a te_mem. Sizes are given back on
 * free, which lets a hook account without headers.
 */
#ifndef TE_KERNELS_MEMORY_H
#define TE_KERNELS_MEMORY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct te_mem {
    void *(*realloc)(void *user, void *ptr, size_t old_size, size_t new_size);
    void *user;
} te_mem;

/* The hook that uses the C library. */
extern const te_mem te_mem_libc;

static inline void *te_mem_alloc(const te_mem *mem, size_t size)
{
    return mem->realloc(mem->user, NULL, 0, size ? size : 1);
}

static inline void *te_mem_zalloc(const te_mem *mem, size_t size)
{
    void *p = te_mem_alloc(mem, size);
    if (p) memset(p, 0, size ? size : 1);
    return p;
}

static inline void te_mem_free(const te_mem *mem, void *ptr, size_t size)
{
    if (ptr) mem->realloc(mem->user, ptr, size ? size : 1, 0);
}

/* Grows an array, elements of elem_size bytes, *capacity of them, to hold at least `need`. `array` is the address of
 * the pointer to it, of any type. Returns 0 and leaves everything as it was when memory is exhausted. */
static inline int te_mem_grow(const te_mem *mem, void *array, size_t *capacity, size_t need, size_t elem_size)
{
    if (need <= *capacity) return 1;
    size_t wanted = *capacity ? *capacity * 2 : 8;
    if (wanted < need) wanted = need;
    if (wanted > SIZE_MAX / elem_size) return 0;
    void *old, *p;
    memcpy(&old, array, sizeof old);
    p = mem->realloc(mem->user, old, old ? *capacity * elem_size : 0, wanted * elem_size);
    if (!p) return 0;
    memcpy(array, &p, sizeof p);
    *capacity = wanted;
    return 1;
}

#endif
