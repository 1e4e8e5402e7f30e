/* io_posix.c - the te_io of POSIX systems: each function is the system call, with its errno as a negative result. */
#define _FILE_OFFSET_BITS 64
#include "io.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(sizeof(off_t) == 8, "files need 64-bit offsets");

/* Some systems refuse a single transfer above INT_MAX bytes. */
enum { MAX_TRANSFER = 1 << 30 };

static int posix_open(void *user, const char *path, int flags, int mode)
{
    (void)user;
    int fd = open(path, flags | O_CLOEXEC, (mode_t)mode);
    return fd < 0 ? -errno : fd;
}

static int64_t posix_pread(void *user, int fd, void *data, size_t size, int64_t offset)
{
    (void)user;
    ssize_t n = pread(fd, data, size < MAX_TRANSFER ? size : MAX_TRANSFER, (off_t)offset);
    return n < 0 ? -errno : n;
}

static int64_t posix_write(void *user, int fd, const void *data, size_t size)
{
    (void)user;
    ssize_t n = write(fd, data, size < MAX_TRANSFER ? size : MAX_TRANSFER);
    return n < 0 ? -errno : n;
}

static int64_t posix_size(void *user, int fd)
{
    (void)user;
    struct stat info;
    if (fstat(fd, &info) != 0) return -errno;
    if (S_ISDIR(info.st_mode)) return -EISDIR;
    return S_ISREG(info.st_mode) ? (int64_t)info.st_size : -ESPIPE;
}

static int posix_fsync(void *user, int fd)
{
    (void)user;
    return fsync(fd) != 0 ? -errno : 0;
}

static int posix_close(void *user, int fd)
{
    (void)user;
    return close(fd) != 0 ? -errno : 0;
}

/* A file takes the place of a file or a link, never that of a device or a pipe: whoever writes to those means what is
 * behind them. */
static int posix_rename(void *user, const char *from, const char *to)
{
    (void)user;
    struct stat info;
    if (lstat(to, &info) == 0 && !S_ISREG(info.st_mode) && !S_ISLNK(info.st_mode) && !S_ISDIR(info.st_mode))
        return -EEXIST;
    return rename(from, to) != 0 ? -errno : 0;
}

static int posix_unlink(void *user, const char *path)
{
    (void)user;
    return unlink(path) != 0 ? -errno : 0;
}

static int64_t posix_readlink(void *user, const char *path, char *text, size_t size)
{
    (void)user;
    ssize_t n = readlink(path, text, size);
    return n < 0 ? -errno : n;
}

static int posix_mkdir(void *user, const char *path, int mode)
{
    (void)user;
    return mkdir(path, (mode_t)mode) != 0 ? -errno : 0;
}

static int posix_mode(void *user, const char *path)
{
    (void)user;
    struct stat info;
    return stat(path, &info) != 0 ? -errno : (int)(info.st_mode & 0777);
}

static int posix_set_mode(void *user, int fd, int mode)
{
    (void)user;
    return fchmod(fd, (mode_t)mode) != 0 ? -errno : 0;
}

static int posix_list(void *user, const char *path, int (*each)(void *arg, const char *name), void *arg)
{
    (void)user;
    DIR *folder = opendir(path);
    if (!folder) return -errno;
    int code = 0;
    for (int stop = 0; !stop;) {
        errno = 0; /* readdir returns NULL at the end and on failure */
        const struct dirent *item = readdir(folder);
        if (!item) {
            code = -errno;
            break;
        }
        if (strcmp(item->d_name, ".") == 0 || strcmp(item->d_name, "..") == 0) continue;
        stop = each(arg, item->d_name);
    }
    closedir(folder);
    return code;
}

/* Writable, so that a host that writes through a tensor's pointer changes memory of its own; without a claim on memory
 * for that. */
static int posix_map(void *user, int fd, size_t size, int64_t offset, void **data)
{
    (void)user;
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, (off_t)offset);
    if (at == MAP_FAILED) return -errno;
    *data = at;
    return 0;
}

static int posix_unmap(void *user, void *data, size_t size)
{
    (void)user;
    return munmap(data, size) != 0 ? -errno : 0;
}

const te_io te_io_posix = {
    .open = posix_open,
    .pread = posix_pread,
    .write = posix_write,
    .size = posix_size,
    .fsync = posix_fsync,
    .close = posix_close,
    .rename = posix_rename,
    .unlink = posix_unlink,
    .readlink = posix_readlink,
    .mkdir = posix_mkdir,
    .mode = posix_mode,
    .set_mode = posix_set_mode,
    .list = posix_list,
    .map = posix_map,
    .unmap = posix_unmap,
};
