/* memory.c - memory of the fake devices: one arena, protected while no work runs. Its protection changes twice per
 * wait, which takes a time that grows with the number of pages, so they are large ones where the system has them. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { BORDER = 256, FILL_BORDER = 0xA5, FILL_NEW = 0xFF, LARGE_PAGE = 2 << 20 };
static const size_t arena_size = (size_t)256 << 30, idle_limit = (size_t)140 << 30;

typedef struct region {
    size_t start, size; /* in the arena, border included behind */
    size_t bytes;
} region;

static char *arena;
static region *regions; /* by address */
static size_t n_regions, capacity, used, limit = (size_t)8 << 30, high;
static int faults;

TE_FAKE void te_fake_set_memory(size_t bytes) { limit = bytes; }
TE_FAKE int te_fake_faults(void) { return faults; }

void te_fake_open_memory(bool open)
{
    if (arena && high && !te_fake_idle()) mprotect(arena, high, open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

static bool grow(void)
{
    if (n_regions < capacity) return true;
    size_t wanted = capacity ? 2 * capacity : 64;
    region *more = realloc(regions, wanted * sizeof *regions);
    if (!more) return false;
    regions = more;
    capacity = wanted;
    return true;
}

static bool make_arena(void)
{
    if (arena) return true;
    int access = te_fake_idle() ? PROT_READ | PROT_WRITE : PROT_NONE;
    char *made = mmap(NULL, arena_size + LARGE_PAGE, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return false;
    arena = made + (LARGE_PAGE - (uintptr_t)made % LARGE_PAGE) % LARGE_PAGE;
    if (!te_fake_idle()) madvise(arena, arena_size, MADV_HUGEPAGE); /* slower without */
    return true;
}

/* First gap that is large enough. */
CUdeviceptr te_fake_allocate(size_t bytes)
{
    size_t size = (bytes + BORDER - 1) / BORDER * BORDER + BORDER, at = BORDER, i = 0;
    size_t most = te_fake_idle() ? idle_limit : limit;
    if (!make_arena() || bytes > most || used > most - bytes || !grow()) return 0;
    for (; i < n_regions && regions[i].start - at < size; i++) at = regions[i].start + regions[i].size;
    if (at + size > arena_size) return 0;
    memmove(&regions[i + 1], &regions[i], (n_regions - i) * sizeof *regions);
    regions[i] = (region){at, size, bytes};
    n_regions++;
    used += bytes;
    size_t end = (at + size + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
    if (end > high) high = end;
    if (te_fake_idle()) { /* where nobody writes, as far as copies reach */
        memset(arena + at, 0, bytes < TE_FAKE_IDLE_BYTES ? bytes : TE_FAKE_IDLE_BYTES);
        return (CUdeviceptr)(uintptr_t)(arena + at);
    }
    te_fake_open_memory(true);
    memset(arena + at, FILL_NEW, bytes);
    memset(arena + at + bytes, FILL_BORDER, size - bytes);
    te_fake_open_memory(false);
    return (CUdeviceptr)(uintptr_t)(arena + at);
}

static region *find(CUdeviceptr ptr)
{
    size_t at = (size_t)((char *)(uintptr_t)ptr - arena);
    for (size_t i = 0; arena && i < n_regions; i++)
        if (at >= regions[i].start && at < regions[i].start + regions[i].size) return &regions[i];
    return NULL;
}

bool te_fake_owns(CUdeviceptr ptr) { return find(ptr) != NULL; }

bool te_fake_contains(CUdeviceptr ptr, size_t bytes)
{
    const region *r = find(ptr);
    bool inside = r && (size_t)((char *)(uintptr_t)ptr - arena) - r->start + bytes <= r->bytes;
    faults += !inside;
    return inside;
}

bool te_fake_release(CUdeviceptr ptr)
{
    region *r = find(ptr);
    if (!r || arena + r->start != (char *)(uintptr_t)ptr) {
        faults++;
        return false;
    }
    te_fake_open_memory(true);
    for (size_t i = r->bytes; i < r->size && !te_fake_idle(); i++)
        faults += (unsigned char)arena[r->start + i] != FILL_BORDER;
    te_fake_open_memory(false);
    used -= r->bytes;
    n_regions--;
    memmove(r, r + 1, (size_t)(regions + n_regions - r) * sizeof *r);
    return true;
}
