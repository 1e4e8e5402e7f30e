/* disk_cache.c - see disk_cache.h. A file is: magic, length, checksum, bytes. */
#include "disk_cache.h"

#include "../environment.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC UINT64_C(0x314548434143c574)

typedef struct header {
    uint64_t magic, length;
    te_hash128 checksum;
} header;

/* --- hash --------------------------------------------------------------------------------------------------------- */

static uint64_t rotate(uint64_t x, int n) { return x << n | x >> (64 - n); }

static uint64_t scatter(uint64_t x)
{
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
    return x ^ x >> 32;
}

static te_hash128 add_word(te_hash128 h, uint64_t word)
{
    h.a = rotate((h.a ^ word) * 0x9fb21c651e98df25u, 29) + h.b;
    h.b = rotate(h.b + (word ^ 0xa0761d6478bd642fu) * 0xe7037ed1a0b428dbu, 37) ^ h.a;
    return h;
}

te_hash128 te_hash128_add(te_hash128 hash, const void *bytes, size_t length)
{
    const char *at = bytes;
    size_t left = length;
    for (; left >= 8; left -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        hash = add_word(hash, word);
    }
    uint64_t last = 0;
    if (left) memcpy(&last, at, left);
    hash = add_word(add_word(hash, last), length);
    return (te_hash128){scatter(hash.a + hash.b), scatter(hash.b ^ rotate(hash.a, 23))};
}

/* --- files -------------------------------------------------------------------------------------------------------- */

void te_disk_cache_open(te_disk_cache *cache, const te_mem *mem)
{
    *cache = (te_disk_cache){.mem = mem};
    if (!te_environment_cache(cache->folder, sizeof cache->folder)) cache->folder[0] = 0;
}

static bool entry_path(const te_disk_cache *cache, te_hash128 key, const char *suffix, char *path, size_t size)
{
    int n = snprintf(path, size, "%s/%016llx%016llx%s", cache->folder, (unsigned long long)key.a,
                     (unsigned long long)key.b, suffix);
    return cache->folder[0] && n > 0 && (size_t)n < size;
}

static bool read_all(int fd, void *to, size_t bytes)
{
    for (char *at = to; bytes > 0;) {
        ssize_t n = read(fd, at, bytes);
        if (n <= 0) return false;
        at += n;
        bytes -= (size_t)n;
    }
    return true;
}

static bool write_all(int fd, const void *from, size_t bytes)
{
    for (const char *at = from; bytes > 0;) {
        ssize_t n = write(fd, at, bytes);
        if (n <= 0) return false;
        at += n;
        bytes -= (size_t)n;
    }
    return true;
}

static te_hash128 checksum(const void *bytes, size_t length) { return te_hash128_add(TE_HASH128_START, bytes, length); }

void *te_disk_cache_read(const te_disk_cache *cache, te_hash128 key, const char *suffix, size_t *length)
{
    char path[640];
    header h;
    struct stat s;
    if (!entry_path(cache, key, suffix, path, sizeof path)) return NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return NULL;
    void *bytes = NULL;
    bool whole = read_all(fd, &h, sizeof h) && h.magic == MAGIC && fstat(fd, &s) == 0 && h.length > 0 &&
                 (uint64_t)s.st_size == sizeof h + h.length;
    if (whole) bytes = te_mem_alloc(cache->mem, h.length);
    if (bytes) {
        te_hash128 sum = {0, 0};
        if (read_all(fd, bytes, h.length)) sum = checksum(bytes, h.length);
        if (sum.a != h.checksum.a || sum.b != h.checksum.b) {
            te_mem_free(cache->mem, bytes, h.length);
            bytes = NULL;
        }
    }
    close(fd);
    if (bytes) *length = h.length;
    return bytes;
}

static void make_folders(const char *folder)
{
    char path[512];
    snprintf(path, sizeof path, "%s", folder);
    for (char *at = path + 1; *at; at++) {
        if (*at != '/') continue;
        *at = 0;
        mkdir(path, 0777);
        *at = '/';
    }
    mkdir(path, 0777);
}

void te_disk_cache_write(const te_disk_cache *cache, te_hash128 key, const char *suffix, const void *bytes,
                         size_t length)
{
    char path[640], temporary[560];
    if (!entry_path(cache, key, suffix, path, sizeof path)) return;
    make_folders(cache->folder);
    snprintf(temporary, sizeof temporary, "%s/new-XXXXXX", cache->folder);
    int fd = mkstemp(temporary);
    if (fd < 0) return;
    header h = {MAGIC, length, checksum(bytes, length)};
    bool written = write_all(fd, &h, sizeof h) && write_all(fd, bytes, length);
    if (close(fd) != 0) written = false;
    if (!written || rename(temporary, path) != 0) unlink(temporary);
}
