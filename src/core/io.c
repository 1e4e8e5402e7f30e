/* io.c - messages, reading files and folders. */
#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* --- messages --------------------------------------------------------------------------------------------------- */

enum { PATH_SHOWN = 200 }; /* bytes of a path that a message repeats, so that the reason always fits */

static size_t append(te_io_error *error, size_t used, const char *format, va_list args) TE_IO_PRINTF(3, 0);

/* Appends at `used`; returns the length after it, which never passes the end. */
static size_t append(te_io_error *error, size_t used, const char *format, va_list args)
{
    size_t room = sizeof error->message - used;
    int n = vsnprintf(error->message + used, room, format, args);
    if (n < 0) return used;
    return (size_t)n < room ? used + (size_t)n : sizeof error->message - 1;
}

static size_t start(te_io_error *error, te_status status, const char *path)
{
    error->status = status;
    error->message[0] = '\0';
    if (!path) return 0;
    if (!*path) path = "\"\"";
    size_t length = strlen(path);
    bool long_path = length > PATH_SHOWN;
    int n = snprintf(error->message, sizeof error->message, "%s%s: ", long_path ? "..." : "",
                     long_path ? path + length - PATH_SHOWN : path);
    return n < 0 ? 0 : (size_t)n;
}

static void clean(te_io_error *error)
{
    for (char *c = error->message; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 127) *c = '?';
}

te_status te_io_fail(te_io_error *error, te_status status, const char *path, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    append(error, start(error, status, path), format, args);
    va_end(args);
    clean(error);
    return status;
}

te_status te_io_fail_errno(te_io_error *error, int64_t code, const char *path, const char *format, ...)
{
    te_status status = code == -ENOMEM ? TE_ERROR_MEMORY : TE_ERROR_IO;
    va_list args;
    va_start(args, format);
    size_t used = append(error, start(error, status, path), format, args);
    va_end(args);
    char reason[128];
    if (strerror_r((int)-code, reason, sizeof reason) != 0) snprintf(reason, sizeof reason, "error %d", (int)-code);
    snprintf(error->message + used, sizeof error->message - used, ": %s", reason);
    clean(error);
    return status;
}

/* --- reading ---------------------------------------------------------------------------------------------------- */

te_status te_io_open_read(const te_io *io, const char *path, int *fd, int64_t *size, te_io_error *error)
{
    int f;
    do f = io->open(io->user, path, O_RDONLY | O_NONBLOCK, 0); /* opening a pipe must not wait for its writer */
    while (f == -EINTR);
    if (f < 0) return te_io_fail_errno(error, f, path, "cannot open");
    int64_t n = io->size(io->user, f);
    if (n < 0) {
        io->close(io->user, f);
        return te_io_fail_errno(error, n, path, "cannot read as a file");
    }
    *fd = f;
    *size = n;
    return TE_OK;
}

te_status te_io_read(const te_io *io, int fd, const char *path, void *data, size_t size, int64_t offset,
                     te_io_error *error)
{
    char *to = data;
    while (size > 0) {
        int64_t n = io->pread(io->user, fd, to, size, offset);
        if (n == -EINTR) continue;
        if (n < 0) return te_io_fail_errno(error, n, path, "offset %lld: cannot read", (long long)offset);
        if (n == 0)
            return te_io_fail(error, TE_ERROR_IO, path, "offset %lld: the file ends here, %zu more bytes are needed",
                              (long long)offset, size);
        to += n;
        size -= (size_t)n;
        offset += n;
    }
    return TE_OK;
}

/* --- folders ---------------------------------------------------------------------------------------------------- */

bool te_io_names_add(te_io_names *names, const char *name)
{
    if (!te_mem_grow(names->mem, &names->names, &names->capacity, names->count + 1, sizeof *names->names)) return false;
    size_t size = strlen(name) + 1;
    char *copy = te_mem_alloc(names->mem, size);
    if (!copy) return false;
    memcpy(copy, name, size);
    names->names[names->count++] = copy;
    return true;
}

void te_io_names_free(te_io_names *names)
{
    for (size_t i = 0; i < names->count; i++) te_mem_free(names->mem, names->names[i], strlen(names->names[i]) + 1);
    te_mem_free(names->mem, names->names, names->capacity * sizeof *names->names);
    *names = (te_io_names){.mem = names->mem};
}

typedef struct listing {
    te_io_names *names;
    bool         out_of_memory;
} listing;

static int list_one(void *arg, const char *name)
{
    listing *l = arg;
    l->out_of_memory = !te_io_names_add(l->names, name);
    return l->out_of_memory;
}

static int compare_names(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

te_status te_io_list(const te_io *io, const te_mem *mem, const char *path, te_io_names *names, te_io_error *error)
{
    *names = (te_io_names){.mem = mem};
    listing l = {.names = names};
    int code = io->list(io->user, path, list_one, &l);
    if (code < 0 || l.out_of_memory) {
        te_io_names_free(names);
        return te_io_fail_errno(error, l.out_of_memory ? -ENOMEM : code, path, "cannot list the folder");
    }
    if (names->count > 1) qsort(names->names, names->count, sizeof *names->names, compare_names);
    return TE_OK;
}

bool te_io_is_folder(const te_io *io, const char *path)
{
    int fd;
    do fd = io->open(io->user, path, O_RDONLY | O_NONBLOCK, 0);
    while (fd == -EINTR);
    if (fd < 0) return false;
    int64_t size = io->size(io->user, fd);
    io->close(io->user, fd);
    return size == -EISDIR;
}

te_status te_io_make_folder(const te_io *io, const te_mem *mem, const char *path, te_io_error *error)
{
    size_t size = strlen(path) + 1;
    char *part = te_mem_alloc(mem, size);
    if (!part) return te_io_fail(error, TE_ERROR_MEMORY, path, "out of memory");
    memcpy(part, path, size);
    int code = size > 1 ? 0 : -ENOENT;
    for (size_t i = 1; i < size && code == 0; i++) {
        char end = part[i];
        if (end != '/' && end != '\0') continue;
        part[i] = '\0';
        code = io->mkdir(io->user, part, 0777);
        bool passable = code == -EEXIST && end == '/'; /* were it a file, the next step would fail */
        if (code < 0 && (passable || te_io_is_folder(io, part))) code = 0;
        part[i] = end;
    }
    te_mem_free(mem, part, size);
    return code < 0 ? te_io_fail_errno(error, code, path, "cannot make the folder") : TE_OK;
}
