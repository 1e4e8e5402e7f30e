/* failing_memory.h - a context's memory hook whose n-th allocation fails, and which knows what is still alive. */
#ifndef TE_TEST_FAILING_MEMORY_H
#define TE_TEST_FAILING_MEMORY_H

#include <stddef.h>
#include <stdlib.h>

typedef struct failing_memory {
    long   countdown; /* fails when it reaches 0; negative: never */
    size_t live;      /* bytes */
} failing_memory;

static inline void *failing_memory_realloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    failing_memory *memory = user;
    if (new_size == 0) {
        memory->live -= ptr ? old_size : 0;
        free(ptr);
        return NULL;
    }
    if (memory->countdown >= 0 && memory->countdown-- == 0) return NULL;
    void *p = realloc(ptr, new_size);
    if (p) memory->live += new_size - (ptr ? old_size : 0);
    return p;
}

#endif
