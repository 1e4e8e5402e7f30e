/* faulty_io.h - a te_io and a te_mem for tests, which fail on request, and a folder to work in. */
#ifndef TE_FAULTY_IO_H
#define TE_FAULTY_IO_H

#include "core/io.h"
#include "test.h"

#include <errno.h>
#include <stdatomic.h>
#include <unistd.h>

/* The operating system's functions with faults in between. Atomic, since a prefetch thread uses them too. */
typedef struct faulty_io {
    te_io       io; /* hand this out */
    atomic_long calls;
    atomic_long fail_at;    /* this call (from 1) fails with `code`; 0: none */
    int         code;       /* a negative errno value */
    bool        fail_on;    /* every call from fail_at on fails */
    bool        stutter;    /* every other transfer is interrupted and the rest move at most 7 bytes */
    atomic_long open_files; /* descriptors not closed yet */
} faulty_io;

static inline bool faulty_now(faulty_io *f)
{
    long call = atomic_fetch_add(&f->calls, 1) + 1, at = atomic_load(&f->fail_at);
    return at != 0 && (call == at || (f->fail_on && call > at));
}

static int faulty_open(void *user, const char *path, int flags, int mode)
{
    faulty_io *f = user;
    if (faulty_now(f)) return f->code;
    int fd = te_io_posix.open(NULL, path, flags, mode);
    if (fd >= 0) atomic_fetch_add(&f->open_files, 1);
    return fd;
}

static int64_t faulty_pread(void *user, int fd, void *data, size_t size, int64_t offset)
{
    faulty_io *f = user;
    if (faulty_now(f)) return f->code;
    if (f->stutter && atomic_load(&f->calls) % 2 == 0) return -EINTR;
    return te_io_posix.pread(NULL, fd, data, f->stutter && size > 7 ? 7 : size, offset);
}

static int64_t faulty_write(void *user, int fd, const void *data, size_t size)
{
    faulty_io *f = user;
    if (faulty_now(f)) return f->code;
    if (f->stutter && atomic_load(&f->calls) % 2 == 0) return -EINTR;
    return te_io_posix.write(NULL, fd, data, f->stutter && size > 7 ? 7 : size);
}

static int64_t faulty_size(void *user, int fd)
{
    faulty_io *f = user;
    return faulty_now(f) ? f->code : te_io_posix.size(NULL, fd);
}

static int faulty_fsync(void *user, int fd)
{
    faulty_io *f = user;
    if (faulty_now(f)) return f->code;
    return f->stutter && atomic_load(&f->calls) % 2 == 0 ? -EINTR : te_io_posix.fsync(NULL, fd);
}

static int faulty_close(void *user, int fd)
{
    faulty_io *f = user;
    bool fail = faulty_now(f);
    int code = te_io_posix.close(NULL, fd);
    if (code == 0) atomic_fetch_sub(&f->open_files, 1);
    return fail ? f->code : code;
}

static int faulty_rename(void *user, const char *from, const char *to)
{
    faulty_io *f = user;
    return faulty_now(f) ? f->code : te_io_posix.rename(NULL, from, to);
}

static int faulty_unlink(void *user, const char *path)
{
    faulty_io *f = user;
    return faulty_now(f) ? f->code : te_io_posix.unlink(NULL, path);
}

static int64_t faulty_readlink(void *user, const char *path, char *text, size_t size)
{
    faulty_io *f = user;
    return faulty_now(f) ? f->code : te_io_posix.readlink(NULL, path, text, size);
}

static int faulty_mkdir(void *user, const char *path, int mode)
{
    faulty_io *f = user;
    return faulty_now(f) ? f->code : te_io_posix.mkdir(NULL, path, mode);
}

static int faulty_mode(void *user, const char *path)
{
    faulty_io *f = user;
    if (faulty_now(f)) return f->code;
    return f->stutter && atomic_load(&f->calls) % 2 == 0 ? -EINTR : te_io_posix.mode(NULL, path);
}

static int faulty_set_mode(void *user, int fd, int mode)
{
    faulty_io *f = user;
    return faulty_now(f) ? f->code : te_io_posix.set_mode(NULL, fd, mode);
}

static int faulty_list(void *user, const char *path, int (*each)(void *arg, const char *name), void *arg)
{
    faulty_io *f = user;
    return faulty_now(f) ? f->code : te_io_posix.list(NULL, path, each, arg);
}

static inline void faulty_io_init(faulty_io *f)
{
    memset(f, 0, sizeof *f);
    f->code = -EIO;
    f->io = (te_io){.open = faulty_open, .pread = faulty_pread, .write = faulty_write, .size = faulty_size,
                    .fsync = faulty_fsync, .close = faulty_close, .rename = faulty_rename, .unlink = faulty_unlink,
                    .readlink = faulty_readlink, .mkdir = faulty_mkdir, .mode = faulty_mode,
                    .set_mode = faulty_set_mode, .list = faulty_list, .user = f};
}

/* Arms the n-th call from now on. */
static inline void faulty_io_arm(faulty_io *f, long n)
{
    atomic_store(&f->calls, 0);
    atomic_store(&f->fail_at, n);
}

/* Memory that counts what is out and fails at the n-th allocation, and at one that no machine could serve. */
typedef struct faulty_mem {
    te_mem mem;
    long   calls, fail_at;
    size_t bytes;
} faulty_mem;

static void *faulty_realloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    faulty_mem *f = user;
    if (new_size != 0 && (++f->calls == f->fail_at || new_size > PTRDIFF_MAX / 1024)) return NULL;
    void *p = te_mem_libc.realloc(NULL, ptr, old_size, new_size);
    if (new_size == 0 || p) f->bytes += new_size - old_size;
    return p;
}

static inline void faulty_mem_init(faulty_mem *f)
{
    *f = (faulty_mem){.mem = {faulty_realloc, f}};
}

/* --- a folder --------------------------------------------------------------------------------------------------- */

/* Makes an empty folder of the test's own and moves there. */
static inline void test_folder_enter(char *path, size_t size, const char *name)
{
    const char *base = getenv("TMPDIR");
    snprintf(path, size, "%s/tetrain-%s-XXXXXX", base && *base ? base : "/tmp", name);
    if (!mkdtemp(path) || chdir(path) != 0) {
        fprintf(stderr, "no temporary folder %s\n", path);
        abort();
    }
}

/* Number of files in a folder whose names contain `part`; they are removed when asked. */
static inline size_t test_folder_count(const char *path, const char *part, bool remove_them)
{
    te_io_error error;
    te_io_names names;
    if (te_io_list(&te_io_posix, &te_mem_libc, path, &names, &error) != TE_OK) return 0;
    size_t found = 0;
    for (size_t i = 0; i < names.count; i++) {
        if (!strstr(names.names[i], part)) continue;
        found++;
        char full[4096];
        snprintf(full, sizeof full, "%s/%s", path, names.names[i]);
        if (remove_them && unlink(full) != 0) rmdir(full);
    }
    te_io_names_free(&names);
    return found;
}

static inline void test_folder_leave(const char *path)
{
    test_folder_count(path, "", true);
    if (chdir("/") == 0) rmdir(path);
}

static inline void test_file_write(const char *path, const void *data, size_t size)
{
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, size, f) != size || fclose(f) != 0) abort();
}

#endif
