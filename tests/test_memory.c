/* test_memory.c - the CPU's blocks of memory: aligned, apart from each other, writable to the last byte, and all given
 * back; from the C library, and from a hook that refuses at times. */
#include "failing_memory.h"
#include "test.h"

#include <stdint.h>

enum { BLOCKS = 200, STEPS = 6000 };

typedef struct block {
    unsigned char *ptr;
    size_t         bytes;
    unsigned char  mark;
} block;

/* Up to 9 MB, mostly less than 1 MB, at and beside the powers of two as well. */
static size_t random_size(uint64_t *seed)
{
    unsigned shift = 1 + test_random(seed) % (test_random(seed) % 8 ? 20 : 23);
    size_t   size = (size_t)1 << shift;
    return test_random(seed) % 3 ? size + test_random(seed) % size : size + test_random(seed) % 3 - 1;
}

static bool holds(const block *b)
{
    for (size_t i = 0; i < b->bytes; i += 509)
        if (b->ptr[i] != b->mark) return false;
    return b->ptr[b->bytes - 1] == b->mark;
}

static void take(te_exec *exec, block *b, size_t bytes, unsigned char mark)
{
    b->ptr = exec->backend->memory_alloc(exec, bytes);
    b->bytes = bytes;
    b->mark = mark;
    if (!b->ptr) return;
    CHECK_MSG((uintptr_t)b->ptr % 64 == 0, "%zu bytes at %p", bytes, (void *)b->ptr);
    memset(b->ptr, mark, bytes);
}

static void give(te_exec *exec, block *b)
{
    if (!b->ptr) return;
    CHECK_MSG(holds(b), "%zu bytes at %p were written to by others", b->bytes, (void *)b->ptr);
    exec->backend->memory_free(exec, b->ptr, b->bytes);
    b->ptr = NULL;
}

/* With a hook, every `failing`-th request or so fails; 0: none. */
static void check_churn(const te_mem *mem, failing_memory *memory, uint64_t seed, long failing)
{
    static block blocks[BLOCKS];
    te_exec      exec = {.backend = &te_backend_cpu, .mem = mem, .threads = 1};
    size_t       refused = 0;
    if (te_backend_cpu.device_open(&exec, 0) != TE_OK) abort();
    for (int step = 0; step < STEPS; step++) {
        block *b = &blocks[test_random(&seed) % BLOCKS];
        give(&exec, b);
        if (test_random(&seed) % 8 == 0) continue;
        if (failing) memory->countdown = test_random(&seed) % failing;
        take(&exec, b, random_size(&seed), (unsigned char)(1 + test_random(&seed) % 255));
        memory->countdown = -1;
        refused += !b->ptr;
    }
    for (int i = 0; i < BLOCKS; i++) give(&exec, &blocks[i]);
    CHECK(exec.backend->memory_alloc(&exec, SIZE_MAX - 8) == NULL);
    te_backend_cpu.device_close(&exec);
    CHECK_MSG(memory->live == 0, "%zu bytes were not given back", memory->live);
    CHECK_MSG((refused > 0) == (failing > 0), "%zu requests refused", refused);
}

int main(void)
{
    failing_memory memory = {.countdown = -1};
    te_mem         mem = {failing_memory_realloc, &memory};
    check_churn(&te_mem_libc, &memory, 10, 0);
    check_churn(&mem, &memory, 11, 0);
    check_churn(&mem, &memory, 12, 3);
    return TEST_END();
}
