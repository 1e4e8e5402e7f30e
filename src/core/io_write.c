/* io_write.c - files that appear whole or not at all. */
#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

enum {
    LINKS = 40,       /* that follow one another, as many as Linux follows */
    LINK_SIZE = 4096, /* of what one holds, with an end mark */
    TRIES = 100,      /* names that are tried for the temporary */
    NAME_SHOWN = 100, /* bytes of the target's name in that of the temporary: names end at 255 */
    NAME_ADDED = 32   /* what the pattern adds, generously */
};

/* Length of the folder part of a path, with its last '/'. */
static size_t folder_length(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? (size_t)(slash - path) + 1 : 0;
}

/* What the link at w->path points at takes its place. 1 where it did, 0 where there is no link, or a negative errno
 * value. */
static int follow_link(te_io_writer *w)
{
    char text[LINK_SIZE];
    int64_t n = w->io->readlink ? w->io->readlink(w->io->user, w->path, text, sizeof text) : -EINVAL;
    if (n == -EINVAL || n == -ENOENT) return 0;
    if (n < 0) return (int)n;
    if (n == sizeof text) return -ENAMETOOLONG;
    size_t folder = n > 0 && text[0] == '/' ? 0 : folder_length(w->path), size = folder + (size_t)n + 1;
    char *path = te_mem_alloc(w->mem, size);
    if (!path) return -ENOMEM;
    memcpy(path, w->path, folder);
    memcpy(path + folder, text, (size_t)n);
    path[size - 1] = '\0';
    te_mem_free(w->mem, w->path, w->path_size);
    w->path = path;
    w->path_size = size;
    return 1;
}

/* The path of what is to be written, behind all links. */
static te_status find_target(te_io_writer *w, const char *path, te_io_error *error)
{
    w->path_size = strlen(path) + 1;
    w->path = te_mem_alloc(w->mem, w->path_size);
    if (!w->path) return te_io_fail(error, TE_ERROR_MEMORY, path, "out of memory");
    memcpy(w->path, path, w->path_size);
    int code = 1;
    for (int i = 0; i <= LINKS && code == 1; i++) code = follow_link(w);
    if (code != 0) return te_io_fail_errno(error, code == 1 ? -ELOOP : code, path, "cannot find what to write");
    if (folder_length(w->path) + 1 == w->path_size)
        return te_io_fail(error, TE_ERROR_ARGUMENT, path, "cannot write: the path has no file name");
    return TE_OK;
}

/* The permissions of the file that is to be replaced; -ENOENT: there is none. */
static int target_mode(const te_io_writer *w)
{
    int mode = -ENOENT;
    if (!w->io->mode || !w->io->set_mode) return mode;
    do mode = w->io->mode(w->io->user, w->path);
    while (mode == -EINTR);
    return mode;
}

/* Creates a file that nobody else has beside the target. A number from the clock and the process makes the first name
 * nearly always free; O_EXCL makes it certain. */
static int create_temporary(te_io_writer *w, int mode)
{
    size_t folder = folder_length(w->path);
    struct timespec now = {0};
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t tag = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    tag ^= (uint64_t)getpid() * UINT64_C(0x9e3779b97f4a7c15);
    int fd = -EEXIST;
    for (int i = 0; i < TRIES && (fd == -EEXIST || fd == -EINTR); i++) {
        snprintf(w->temp, w->temp_size, "%.*s.%.*s.%016llx.tmp", (int)folder, w->path, NAME_SHOWN, w->path + folder,
                 (unsigned long long)(tag + (uint64_t)i));
        fd = w->io->open(w->io->user, w->temp, O_WRONLY | O_CREAT | O_EXCL, mode);
    }
    return fd;
}

static void release(te_io_writer *w)
{
    te_mem_free(w->mem, w->temp, w->temp_size);
    te_mem_free(w->mem, w->path, w->path_size);
    w->temp = w->path = NULL;
    w->fd = -1;
}

static te_status open_temporary(te_io_writer *w, te_io_error *error)
{
    w->temp_size = w->path_size + NAME_ADDED;
    w->temp = te_mem_alloc(w->mem, w->temp_size);
    if (!w->temp) return te_io_fail(error, TE_ERROR_MEMORY, w->path, "out of memory");
    int mode = target_mode(w);
    if (mode < 0 && mode != -ENOENT)
        return te_io_fail_errno(error, mode, w->path, "cannot find out who may read what is there");
    int fd = create_temporary(w, mode < 0 ? 0666 : mode);
    if (fd < 0) return te_io_fail_errno(error, fd, w->path, "cannot create a temporary file beside it");
    /* What the umask held back. Where that fails fewer users may read the file than before, never more. */
    if (mode >= 0) w->io->set_mode(w->io->user, fd, mode);
    w->fd = fd;
    return TE_OK;
}

te_status te_io_writer_open(te_io_writer *w, const te_io *io, const te_mem *mem, const char *path, te_io_error *error)
{
    *w = (te_io_writer){.io = io, .mem = mem, .fd = -1};
    te_status status = find_target(w, path, error);
    if (status == TE_OK) status = open_temporary(w, error);
    if (status != TE_OK) release(w);
    return status;
}

te_status te_io_writer_write(te_io_writer *w, const void *data, size_t size, te_io_error *error)
{
    const char *from = data;
    while (size > 0) {
        int64_t n = w->io->write(w->io->user, w->fd, from, size);
        if (n == -EINTR) continue;
        if (n <= 0) /* a regular file accepts at least one byte or says why not */
            return te_io_fail_errno(error, n < 0 ? n : -EIO, w->path, "offset %lld: cannot write",
                                    (long long)w->offset);
        from += n;
        size -= (size_t)n;
        w->offset += n;
    }
    return TE_OK;
}

void te_io_writer_abort(te_io_writer *w)
{
    if (!w->temp) return;
    if (w->fd >= 0) w->io->close(w->io->user, w->fd);
    w->io->unlink(w->io->user, w->temp);
    release(w);
}

static int flush(const te_io *io, int fd)
{
    int code;
    do code = io->fsync(io->user, fd);
    while (code == -EINTR);
    return code;
}

/* The folder, opened so that the rename can be made durable; it is opened before the rename, because after it the old
 * file is gone. */
static int open_folder(te_io_writer *w)
{
    size_t folder = folder_length(w->path);
    char first = w->temp[folder];
    w->temp[folder] = '\0'; /* the temporary's path begins with the folder's */
    int fd;
    do fd = w->io->open(w->io->user, folder ? w->temp : ".", O_RDONLY | O_DIRECTORY, 0);
    while (fd == -EINTR);
    w->temp[folder] = first;
    return fd;
}

te_status te_io_writer_commit(te_io_writer *w, te_io_error *error)
{
    const te_io *io = w->io;
    const char *step = "cannot flush to the disk";
    int folder = -1;
    int code = flush(io, w->fd);
    if (code == 0) {
        step = "cannot close";
        code = io->close(io->user, w->fd);
        w->fd = -1;
    }
    if (code == 0) {
        step = "cannot open its folder";
        folder = open_folder(w);
        code = folder < 0 ? folder : 0;
    }
    if (code == 0) {
        step = "cannot rename the temporary file";
        code = io->rename(io->user, w->temp, w->path);
    }
    if (code != 0) {
        te_status status = te_io_fail_errno(error, code, w->path, "%s", step);
        if (folder >= 0) io->close(io->user, folder);
        te_io_writer_abort(w);
        return status;
    }
    code = flush(io, folder);
    io->close(io->user, folder);
    bool flushed = code == 0 || code == -EINVAL; /* EINVAL: this file system has no way to flush a folder */
    te_status status = TE_OK;
    if (!flushed)
        status = te_io_fail_errno(error, code, w->path, "written, but its folder cannot be flushed to the disk");
    release(w);
    return status;
}

te_status te_io_write_file(const te_io *io, const te_mem *mem, const char *path, const void *data, size_t size,
                           te_io_error *error)
{
    te_io_writer writer;
    te_status status = te_io_writer_open(&writer, io, mem, path, error);
    if (status == TE_OK) status = te_io_writer_write(&writer, data, size, error);
    if (status == TE_OK) return te_io_writer_commit(&writer, error);
    te_io_writer_abort(&writer);
    return status;
}
