/* io.h - how the library reaches files.
 *
 * Every access goes through a te_io, one small table of functions, so that tests can make each call fail in turn and a
 * host can put its own storage underneath. The functions return a negative errno value on failure and may be
 * interrupted (-EINTR) or do less than asked; the helpers below deal with both, so nothing else has to.
 *
 * Sizes and offsets have 64 bits. Files are read with pread into buffers: a mapped file that somebody truncates is a
 * SIGBUS in the host. Only te.from_file maps, which promises to.
 */
#ifndef TE_CORE_IO_H
#define TE_CORE_IO_H

#include "kernels/memory.h"
#include "tetrain/types.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the file formats are little-endian and are read without conversion"
#endif

#if defined(__GNUC__)
#define TE_IO_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define TE_IO_PRINTF(text, first)
#endif

/* What went wrong: "path: offset 1234: what (why)". Functions that take one need it, and write it only on failure. */
typedef struct te_io_error {
    te_status status;
    char      message[512];
} te_io_error;

/* All functions may be called from any thread, with the same user pointer. */
typedef struct te_io {
    int (*open)(void *user, const char *path, int flags, int mode); /* O_* of fcntl.h; a descriptor */
    int64_t (*pread)(void *user, int fd, void *data, size_t size, int64_t offset);
    int64_t (*write)(void *user, int fd, const void *data, size_t size); /* at the descriptor's position */
    int64_t (*size)(void *user, int fd); /* of a regular file; -EISDIR for a folder, -ESPIPE for anything else */
    int (*fsync)(void *user, int fd);
    int (*close)(void *user, int fd); /* the descriptor is gone even when this fails */
    int (*rename)(void *user, const char *from, const char *to);
    int (*unlink)(void *user, const char *path);
    /* What a symbolic link holds, without an end mark, and its length; -EINVAL where there is no link. NULL where there
     * are none at all. */
    int64_t (*readlink)(void *user, const char *path, char *text, size_t size);
    int (*mkdir)(void *user, const char *path, int mode);
    /* Permissions of a file: those of the path, and giving them to an open one. Both are NULL where files have none. */
    int (*mode)(void *user, const char *path);
    int (*set_mode)(void *user, int fd, int mode);
    /* Calls each for every name in a folder, in any order, without "." and ".."; stops when it returns non-zero. */
    int (*list)(void *user, const char *path, int (*each)(void *arg, const char *name), void *arg);
    /* A private mapping of size > 0 bytes at a multiple of TE_IO_PAGE, which stays when fd is closed; 0 or a negative
     * errno. Both are NULL where nothing can be mapped. */
    int (*map)(void *user, int fd, size_t size, int64_t offset, void **data);
    int (*unmap)(void *user, void *data, size_t size);
    void *user;
} te_io;

enum { TE_IO_PAGE = 1 << 16 }; /* a multiple of every system's pages */

/* The table that uses the operating system. */
extern const te_io te_io_posix;

/* Writes "path: " and the message, and returns status. A long path keeps its end; control characters, which only a
 * damaged file brings, become '?'. path may be NULL. */
te_status te_io_fail(te_io_error *error, te_status status, const char *path, const char *format, ...)
    TE_IO_PRINTF(4, 5);
/* The same for a call that returned `code`, a negative errno value: the message is followed by its text. */
te_status te_io_fail_errno(te_io_error *error, int64_t code, const char *path, const char *format, ...)
    TE_IO_PRINTF(4, 5);

/* --- reading ---------------------------------------------------------------------------------------------------- */

/* Opens a regular file for reading; *size is its length in bytes. */
te_status te_io_open_read(const te_io *io, const char *path, int *fd, int64_t *size, te_io_error *error);

/* Reads exactly `size` bytes at `offset`; the end of the file before that is an error. */
te_status te_io_read(const te_io *io, int fd, const char *path, void *data, size_t size, int64_t offset,
                     te_io_error *error);

/* --- folders ---------------------------------------------------------------------------------------------------- */

typedef struct te_io_names {
    const te_mem *mem;
    char        **names; /* count of them */
    size_t        count, capacity;
} te_io_names;

/* Names in a folder, sorted by their bytes. On failure `names` is empty; otherwise free it. */
te_status te_io_list(const te_io *io, const te_mem *mem, const char *path, te_io_names *names, te_io_error *error);
void      te_io_names_free(te_io_names *names);
/* Appends a copy; false when memory is exhausted. */
bool te_io_names_add(te_io_names *names, const char *name);

/* False also for what cannot be opened. */
bool te_io_is_folder(const te_io *io, const char *path);

/* Makes a folder and those above it; one that exists already is fine. */
te_status te_io_make_folder(const te_io *io, const te_mem *mem, const char *path, te_io_error *error);

/* --- writing ---------------------------------------------------------------------------------------------------- */

/* A file that appears whole or not at all. The bytes go to a temporary file beside the target; commit flushes it to the
 * disk, renames it over the target and flushes the folder. Until the rename the old file is untouched, and a failure
 * removes the temporary. A process that is killed may leave its temporary (".<name>.<hex>.tmp") behind, never a damaged
 * target. Where the path is a symbolic link, the target is what it points at, even if there is nothing yet. A file that
 * is replaced hands its permissions on, and at no time may more users read what replaces it. */
typedef struct te_io_writer {
    const te_io  *io;
    const te_mem *mem;
    char         *path; /* of the target, behind all links */
    char         *temp;
    size_t        path_size, temp_size;
    int           fd; /* -1: not open, and commit and abort have nothing to do */
    int64_t       offset; /* bytes written so far */
} te_io_writer;

te_status te_io_writer_open(te_io_writer *writer, const te_io *io, const te_mem *mem, const char *path,
                            te_io_error *error);
te_status te_io_writer_write(te_io_writer *writer, const void *data, size_t size, te_io_error *error);
/* Aborts by itself on failure. When only the last step fails, flushing the folder, the new file is in place but may not
 * survive a power cut; the message says so. */
te_status te_io_writer_commit(te_io_writer *writer, te_io_error *error);
/* Removes the temporary; a no-op after commit or abort. */
void te_io_writer_abort(te_io_writer *writer);

/* Open, write, commit. */
te_status te_io_write_file(const te_io *io, const te_mem *mem, const char *path, const void *data, size_t size,
                           te_io_error *error);

#endif
