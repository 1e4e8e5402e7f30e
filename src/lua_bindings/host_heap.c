/* host_heap.c - the Lua heap of a runtime that has a memory hook or a limit: sizes that the hook can trust, and a piece
 * of memory for what may not fail.
 */
#include "host.h"

#include <string.h>

/* LuaJIT crashes when an allocation fails within lua_newstate. So what that function needs is asked for beforehand, in
 * one piece; pieces of it that Lua grows or frees later move to the heap. */
enum { ARENA_SIZE = 48 << 10 };

static bool in_arena(const tetrain *host, const void *ptr)
{
    return host->arena && (const char *)ptr >= host->arena && (const char *)ptr < host->arena + ARENA_SIZE;
}

static void *arena_alloc(tetrain *host, size_t size)
{
    size_t rounded = (size + 15) & ~(size_t)15;
    if (!host->opening || rounded > ARENA_SIZE - host->arena_used) return NULL;
    char *p = host->arena + host->arena_used;
    host->arena_used += rounded;
    return p;
}

/* Bytes before each block of the heap, which hold its size: LuaJIT names a smaller one when it frees a closure for
 * whose upvalues there was no memory. They keep the alignment of 8 that LuaJIT needs. */
enum { SIZE_HEADER = 8 };

/* From here on a block takes longer to fill than some instructions to run. */
enum { LARGE = 64 << 10 };

/* The hook's realloc, told the true size of what lies at ptr. */
static void *resize(tetrain *host, void *ptr, size_t old_size, size_t new_size)
{
    char  *block = ptr ? (char *)ptr - SIZE_HEADER : NULL;
    size_t taken = ptr ? old_size + SIZE_HEADER : 0;
    block = host->mem.realloc(host->mem.user, block, taken, new_size ? new_size + SIZE_HEADER : 0);
    if (!block || !new_size) return NULL;
    memcpy(block, &new_size, sizeof new_size);
    return block + SIZE_HEADER;
}

void *tetrain_heap_alloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    tetrain *host = user;
    if (!ptr && new_size) {
        void *early = arena_alloc(host, new_size);
        if (early) return early;
    } else if (in_arena(host, ptr)) {
        void *moved = new_size ? tetrain_heap_alloc(host, NULL, 0, new_size) : NULL;
        if (moved) memcpy(moved, ptr, old_size < new_size ? old_size : new_size);
        return moved;
    }
    old_size = 0;
    if (ptr) memcpy(&old_size, (char *)ptr - SIZE_HEADER, sizeof old_size);
    size_t limit = host->options.lua_memory_limit;
    if (!ptr && !new_size) return NULL;
    bool  within = !limit || new_size <= old_size || new_size - old_size <= limit - host->lua_memory;
    void *p = within ? resize(host, ptr, old_size, new_size) : NULL;
    if (p || new_size == 0)
        host->lua_memory += new_size - old_size;
    else
        host->now.ran_out = true;
    if (!within) te_lua_exhausted(host->rt, TETRAIN_HEAP_EXHAUSTED);
    if (p && new_size > old_size + LARGE) tetrain_count_large(host, new_size - old_size);
    return p;
}

bool tetrain_arena_open(tetrain *host)
{
    host->arena = te_mem_alloc(&host->mem, ARENA_SIZE);
    return host->arena != NULL;
}

void tetrain_arena_close(tetrain *host)
{
    te_mem_free(&host->mem, host->arena, ARENA_SIZE);
    host->arena = NULL;
}
