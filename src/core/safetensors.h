/* safetensors.h - named tensors in one file.
 *
 *     +---------------+---------------------------------------------+---------------------------------+
 *     | u64, little-  | JSON: {"name": {"dtype", "shape",           | data, the tensors one after     |
 *     | endian: bytes | "data_offsets": [begin, end]}, ...,         | another, row-major, nothing     |
 *     | of the JSON   | "__metadata__": {"key": "text"}}, spaces    | before, between or after them   |
 *     +---------------+---------------------------------------------+---------------------------------+
 *
 * Reading trusts nothing: open checks the whole header against the size of the file before any data is used, so that
 * a file cut at any byte, or with a header that makes no sense, is an error that names the path, the offset and the
 * tensor. Data bytes have no checksum in this format.
 */
#ifndef TE_CORE_SAFETENSORS_H
#define TE_CORE_SAFETENSORS_H

#include "io.h"

typedef struct te_safetensors te_safetensors;

typedef struct te_safetensors_entry {
    const char *name;
    const char *stored; /* its dtype as the file names it */
    te_dtype    dtype;  /* that it is read as; TE_DTYPE_COUNT: it cannot be read */
    int         ndim;   /* 0: a scalar */
    int64_t     shape[TE_MAX_DIMS];
    int64_t     offset; /* of its first byte in the file */
    int64_t     bytes;  /* in the file */
    int64_t     size;   /* in memory, once read */
} te_safetensors_entry;

typedef struct te_safetensors_pair {
    const char *key, *value;
} te_safetensors_pair;

/* Largest header, in bytes: the limit that the format's authors set. */
enum { TE_SAFETENSORS_MAX_HEADER = 100 * 1000 * 1000 };

/* The format's name of a dtype: "F32", "BF16", "F8_E4M3" ... */
const char *te_safetensors_dtype_name(te_dtype dtype);

/* --- reading ---------------------------------------------------------------------------------------------------- */

/* Opens a file and checks it. mem must outlive the result; io is copied. More than TE_MAX_DIMS dimensions are
 * TE_ERROR_UNSUPPORTED, damage is TE_ERROR_IO. */
te_status te_safetensors_open(te_safetensors **out, const te_io *io, const te_mem *mem, const char *path,
                              te_io_error *error);
void te_safetensors_close(te_safetensors *st); /* NULL is a no-op */

/* Entries in the order of their data. They live until close. */
int                         te_safetensors_count(const te_safetensors *st);
const te_safetensors_entry *te_safetensors_get(const te_safetensors *st, int index);

/* Metadata in the order of the header. */
int                        te_safetensors_metadata_count(const te_safetensors *st);
const te_safetensors_pair *te_safetensors_metadata(const te_safetensors *st, int index);

/* Reads one tensor; size is that of the buffer and must be the entry's size. Whole numbers without a te_dtype become
 * wider ones: I8, I16 and U16 are read as TE_I32, U32 as TE_I64. A TE_BOOL tensor with a byte other than 0 and 1 is an
 * error. May be called from several threads. */
te_status te_safetensors_read(const te_safetensors *st, int index, void *data, size_t size, te_io_error *error);

/* TE_ERROR_UNSUPPORTED where the entry's dtype has no te_dtype and cannot become one. */
te_status te_safetensors_check_dtype(const te_safetensors *st, int index, te_io_error *error);

/* --- writing ---------------------------------------------------------------------------------------------------- */

/* A tensor to write: contiguous memory, or a function that produces its bytes piece by piece, in order (for tensors
 * that are strided or on a device). */
typedef struct te_safetensors_item {
    const char *name; /* valid UTF-8, unique */
    te_dtype    dtype;
    int         ndim;
    int64_t     shape[TE_MAX_DIMS];
    const void *data; /* NULL: use read */
    te_status (*read)(void *user, int64_t offset, void *to, size_t size, te_io_error *error); /* bytes of the tensor */
    void *user;
} te_safetensors_item;

typedef struct te_safetensors_contents {
    const te_safetensors_item *items;
    int                        n_items;
    const te_safetensors_pair *metadata; /* valid UTF-8, unique keys */
    int                        n_metadata;
} te_safetensors_contents;

/* Writes the file as a te_io_writer does: whole or not at all. Tensors with larger elements come first, otherwise in
 * the order given, and data starts at a multiple of 64 bytes: so tensors are aligned to their elements. */
te_status te_safetensors_write(const te_io *io, const te_mem *mem, const char *path,
                               const te_safetensors_contents *contents, te_io_error *error);

#endif
