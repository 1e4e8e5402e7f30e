/* read_file.h - a whole file, as the engine reads parts of one. */
#ifndef TE_TESTS_READ_FILE_H
#define TE_TESTS_READ_FILE_H

#include "core/io.h"

/* The contents in a block of *size + 1 bytes from mem, which the caller frees; the byte after them is 0. */
static inline te_status read_file(const te_io *io, const te_mem *mem, const char *path, char **data, size_t *size,
                                  te_io_error *error)
{
    int fd;
    int64_t length;
    te_status status = te_io_open_read(io, path, &fd, &length, error);
    if (status != TE_OK) return status;
    char *contents = (uint64_t)length < SIZE_MAX ? te_mem_alloc(mem, (size_t)length + 1) : NULL;
    if (!contents) {
        status = te_io_fail(error, TE_ERROR_MEMORY, path, "out of memory reading %lld bytes", (long long)length);
    } else {
        status = te_io_read(io, fd, path, contents, (size_t)length, 0, error);
        if (status != TE_OK) te_mem_free(mem, contents, (size_t)length + 1);
    }
    io->close(io->user, fd);
    if (status != TE_OK) return status;
    contents[length] = '\0';
    *data = contents;
    *size = (size_t)length;
    return TE_OK;
}

#endif
