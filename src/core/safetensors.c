/* safetensors.c - opening, checking and reading safetensors files.
 *
 * open runs in four steps, each of which may assume what the ones before have checked:
 *   1. the header's length against the size of the file, then its bytes;
 *   2. its JSON, by jansson, which rejects duplicate keys, NUL characters and invalid UTF-8;
 *   3. each entry by itself: types, ranges, and that shape and dtype give the number of bytes that it claims;
 *   4. all entries together: sorted by offset they must tile the data without overlap, hole or remainder.
 *
 * jansson has one allocator per process, which is the host's to choose, so the parsed JSON alone does not come from the
 * te_mem; it is gone when open returns.
 */
#include "safetensors.h"
#include "kernels/dtype.h"

#include <jansson.h>
#include <stdlib.h>

enum { LENGTH_BYTES = 8, NAME_SHOWN = 120 };

struct te_safetensors {
    te_io                        io;
    const te_mem                *mem;
    char                        *path;
    int                          fd;
    int64_t                      file_size, header_size;
    te_safetensors_entry        *entries;
    te_safetensors_pair         *pairs;
    int                          n_entries, n_pairs;
    size_t                       capacity; /* of entries */
    char                        *strings; /* all names, keys and values: header_size bytes */
    size_t                       strings_used;
};

static const char *const dtype_names[TE_DTYPE_COUNT] = {
    [TE_F32] = "F32", [TE_BF16] = "BF16", [TE_F16] = "F16",   [TE_F64] = "F64",        [TE_I64] = "I64",
    [TE_I32] = "I32", [TE_U8] = "U8",     [TE_BOOL] = "BOOL", [TE_F8E4M3] = "F8_E4M3", [TE_F8E5M2] = "F8_E5M2",
};

/* Whole numbers that tensors do not have, and what they are read as. */
static const struct {
    char     name[4];
    int      bytes;
    bool     negative; /* whether there are numbers below 0 */
    te_dtype dtype;
} widened[] = {{"I8", 1, true, TE_I32}, {"I16", 2, true, TE_I32}, {"U16", 2, false, TE_I32}, {"U32", 4, false, TE_I64}};

enum { WIDENED = sizeof widened / sizeof *widened };

/* The row of widened that an entry is read by; WIDENED: none. */
static int widening(const te_safetensors_entry *e)
{
    int i = 0;
    while (i < WIDENED && strcmp(e->stored, widened[i].name) != 0) i++;
    return i;
}

const char *te_safetensors_dtype_name(te_dtype dtype) { return dtype_names[dtype]; }

/* --- 1. the header's bytes -------------------------------------------------------------------------------------- */

static te_status read_length(te_safetensors *st, te_io_error *error)
{
    unsigned char bytes[LENGTH_BYTES];
    if (st->file_size < LENGTH_BYTES)
        return te_io_fail(error, TE_ERROR_IO, st->path,
                          "offset %lld: the file ends inside the 8 bytes that give the header's length",
                          (long long)st->file_size);
    te_status status = te_io_read(&st->io, st->fd, st->path, bytes, sizeof bytes, 0, error);
    if (status != TE_OK) return status;
    uint64_t length = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--) length = length << 8 | bytes[i];
    if (length > TE_SAFETENSORS_MAX_HEADER && bytes[0] == '{')
        return te_io_fail(error, TE_ERROR_IO, st->path, "offset 0: not a safetensors file: it begins like JSON");
    if (length > TE_SAFETENSORS_MAX_HEADER)
        return te_io_fail(error, TE_ERROR_IO, st->path,
                          "offset 0: not a safetensors file: a header of %llu bytes (at most %d are allowed)",
                          (unsigned long long)length, (int)TE_SAFETENSORS_MAX_HEADER);
    if ((int64_t)length > st->file_size - LENGTH_BYTES)
        return te_io_fail(error, TE_ERROR_IO, st->path,
                          "offset %lld: the file ends inside its header, which claims %llu bytes from offset 8",
                          (long long)st->file_size, (unsigned long long)length);
    st->header_size = (int64_t)length;
    return TE_OK;
}

/* --- 2. JSON ---------------------------------------------------------------------------------------------------- */

static te_status parse_json(te_safetensors *st, const char *text, json_t **root, te_io_error *error)
{
    if (st->header_size == 0 || text[0] != '{')
        return te_io_fail(error, TE_ERROR_IO, st->path,
                          "offset 8: not a safetensors file: the header is not an object");
    json_error_t what;
    json_t *json = json_loadb(text, (size_t)st->header_size, JSON_REJECT_DUPLICATES, &what);
    if (!json && json_error_code(&what) == json_error_out_of_memory)
        return te_io_fail(error, TE_ERROR_MEMORY, st->path, "out of memory parsing a header of %lld bytes",
                          (long long)st->header_size);
    if (!json)
        return te_io_fail(error, TE_ERROR_IO, st->path, "offset %lld: header: %s",
                          (long long)LENGTH_BYTES + what.position, what.text);
    *root = json;
    return TE_OK;
}

static te_status load_json(te_safetensors *st, json_t **root, te_io_error *error)
{
    te_status status = read_length(st, error);
    if (status != TE_OK) return status;
    char *text = te_mem_alloc(st->mem, (size_t)st->header_size);
    if (!text)
        return te_io_fail(error, TE_ERROR_MEMORY, st->path, "out of memory reading a header of %lld bytes",
                          (long long)st->header_size);
    status = te_io_read(&st->io, st->fd, st->path, text, (size_t)st->header_size, LENGTH_BYTES, error);
    if (status == TE_OK) status = parse_json(st, text, root, error);
    te_mem_free(st->mem, text, (size_t)st->header_size);
    return status;
}

/* Copies a string of the header. They fit: in the JSON text each had two quotes around it. */
static const char *keep(te_safetensors *st, const char *text)
{
    size_t size = strlen(text) + 1;
    char *copy = st->strings + st->strings_used;
    memcpy(copy, text, size);
    st->strings_used += size;
    return copy;
}

/* --- 3. each entry by itself ------------------------------------------------------------------------------------ */

static te_status entry_fail(const te_safetensors *st, const te_safetensors_entry *e, te_status status,
                            const char *what, te_io_error *error)
{
    return te_io_fail(error, status, st->path, "header: tensor \"%.*s\": %s", NAME_SHOWN, e->name, what);
}

static te_status read_dtype(te_safetensors *st, te_safetensors_entry *e, const json_t *json, te_io_error *error)
{
    const char *name = json_string_value(json);
    if (!name) return entry_fail(st, e, TE_ERROR_IO, "no text \"dtype\"", error);
    e->stored = keep(st, name);
    int i = 0, row = widening(e);
    while (i < TE_DTYPE_COUNT && strcmp(name, dtype_names[i]) != 0) i++;
    e->dtype = row < WIDENED ? widened[row].dtype : (te_dtype)i;
    return TE_OK;
}

/* The shape, and from it the sizes, which those of an unknown dtype are not. */
static te_status read_shape(const te_safetensors *st, te_safetensors_entry *e, const json_t *json, te_io_error *error)
{
    if (!json_is_array(json)) return entry_fail(st, e, TE_ERROR_IO, "no list \"shape\"", error);
    char what[120];
    size_t ndim = json_array_size(json);
    if (ndim > TE_MAX_DIMS) {
        snprintf(what, sizeof what, "%zu dimensions (at most %d are supported)", ndim, TE_MAX_DIMS);
        return entry_fail(st, e, TE_ERROR_UNSUPPORTED, what, error);
    }
    e->ndim = (int)ndim;
    bool    known = e->dtype < TE_DTYPE_COUNT;
    int64_t element = known ? (int64_t)te_dtype_size(e->dtype) : 1;
    int64_t room = element; /* bytes with empty dimensions as 1: strides must fit too */
    e->size = element;
    for (size_t i = 0; i < ndim; i++) {
        const json_t *item = json_array_get(json, i);
        if (!json_is_integer(item) || json_integer_value(item) < 0)
            return entry_fail(st, e, TE_ERROR_IO, "\"shape\" must hold integers from 0", error);
        int64_t n = json_integer_value(item);
        if (n > INT64_MAX / room) return entry_fail(st, e, TE_ERROR_IO, "\"shape\" overflows 64 bits", error);
        room *= n ? n : 1;
        e->size *= n;
        e->shape[i] = n;
    }
    int row = widening(e);
    e->bytes = row < WIDENED ? e->size / element * widened[row].bytes : known ? e->size : -1;
    return TE_OK;
}

static te_status read_offsets(const te_safetensors *st, te_safetensors_entry *e, const json_t *json, te_io_error *error)
{
    const json_t *first = json_array_get(json, 0), *last = json_array_get(json, 1); /* NULL when json is no array */
    if (json_array_size(json) != 2 || !json_is_integer(first) || !json_is_integer(last))
        return entry_fail(st, e, TE_ERROR_IO, "\"data_offsets\" must be a list of two integers", error);
    int64_t begin = json_integer_value(first), end = json_integer_value(last);
    char what[160];
    if (begin < 0 || end < begin) {
        snprintf(what, sizeof what, "\"data_offsets\" [%lld, %lld] are not a range", (long long)begin, (long long)end);
        return entry_fail(st, e, TE_ERROR_IO, what, error);
    }
    if (e->bytes < 0) e->bytes = end - begin;
    if (end - begin != e->bytes) {
        snprintf(what, sizeof what, "\"data_offsets\" [%lld, %lld] hold %lld bytes, dtype and shape need %lld",
                 (long long)begin, (long long)end, (long long)(end - begin), (long long)e->bytes);
        return entry_fail(st, e, TE_ERROR_IO, what, error);
    }
    e->offset = begin; /* from the start of the data; made absolute when all entries are checked */
    return TE_OK;
}

static te_status read_entry(te_safetensors *st, const char *name, const json_t *json, te_io_error *error)
{
    te_safetensors_entry *e = &st->entries[st->n_entries];
    e->name = keep(st, name);
    if (!json_is_object(json) || json_object_size(json) != 3)
        return entry_fail(st, e, TE_ERROR_IO, "must be an object of dtype, shape and data_offsets", error);
    te_status status = read_dtype(st, e, json_object_get(json, "dtype"), error);
    if (status == TE_OK) status = read_shape(st, e, json_object_get(json, "shape"), error);
    if (status == TE_OK) status = read_offsets(st, e, json_object_get(json, "data_offsets"), error);
    if (status == TE_OK) st->n_entries++;
    return status;
}

static te_status read_metadata(te_safetensors *st, json_t *json, te_io_error *error)
{
    const char *key;
    json_t *value;
    if (!json_is_object(json))
        return te_io_fail(error, TE_ERROR_IO, st->path, "header: \"__metadata__\" must be an object");
    st->n_pairs = (int)json_object_size(json);
    st->pairs = te_mem_zalloc(st->mem, (size_t)st->n_pairs * sizeof *st->pairs);
    if (!st->pairs) return te_io_fail(error, TE_ERROR_MEMORY, st->path, "out of memory");
    te_safetensors_pair *pair = st->pairs;
    json_object_foreach(json, key, value) {
        if (!json_is_string(value))
            return te_io_fail(error, TE_ERROR_IO, st->path, "header: metadata \"%.*s\" must be a text", NAME_SHOWN,
                              key);
        *pair++ = (te_safetensors_pair){keep(st, key), keep(st, json_string_value(value))};
    }
    return TE_OK;
}

/* --- 4. all entries together ------------------------------------------------------------------------------------ */

/* By data; empty tensors first where several begin together, and in the header's order among themselves (names were
 * copied to one block in that order). */
static int compare_offsets(const void *a, const void *b)
{
    const te_safetensors_entry *x = a, *y = b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return x->name < y->name ? -1 : x->name > y->name;
}

static te_status check_tiling(te_safetensors *st, te_io_error *error)
{
    int64_t start = LENGTH_BYTES + st->header_size;
    int64_t available = st->file_size - start, expected = 0;
    for (int i = 0; i < st->n_entries; i++) {
        te_safetensors_entry *e = &st->entries[i];
        if (e->offset != expected)
            return te_io_fail(error, TE_ERROR_IO, st->path, "offset %lld: tensor \"%.*s\" begins %lld bytes %s",
                              (long long)(start + expected), NAME_SHOWN, e->name,
                              (long long)(e->offset > expected ? e->offset - expected : expected - e->offset),
                              e->offset > expected ? "later: a hole in the data" : "earlier: it overlaps another");
        if (e->bytes > available - e->offset)
            return te_io_fail(error, TE_ERROR_IO, st->path,
                              "offset %lld: the file ends inside tensor \"%.*s\", %lld bytes from offset %lld",
                              (long long)st->file_size, NAME_SHOWN, e->name, (long long)e->bytes,
                              (long long)(start + e->offset));
        expected += e->bytes;
        e->offset += start;
    }
    if (expected != available)
        return te_io_fail(error, TE_ERROR_IO, st->path, "offset %lld: %lld bytes that belong to no tensor follow",
                          (long long)(start + expected), (long long)(available - expected));
    return TE_OK;
}

static te_status read_header(te_safetensors *st, json_t *root, te_io_error *error)
{
    const char *name;
    json_t *value;
    st->capacity = json_object_size(root); /* one too many where there is metadata */
    st->strings = te_mem_alloc(st->mem, (size_t)st->header_size);
    st->entries = te_mem_zalloc(st->mem, st->capacity * sizeof *st->entries);
    if (!st->strings || !st->entries)
        return te_io_fail(error, TE_ERROR_MEMORY, st->path, "out of memory for %zu tensors", st->capacity);
    json_object_foreach(root, name, value) {
        bool metadata = strcmp(name, "__metadata__") == 0;
        te_status status = metadata ? read_metadata(st, value, error) : read_entry(st, name, value, error);
        if (status != TE_OK) return status;
    }
    qsort(st->entries, (size_t)st->n_entries, sizeof *st->entries, compare_offsets);
    return check_tiling(st, error);
}

/* --- the interface ---------------------------------------------------------------------------------------------- */

te_status te_safetensors_open(te_safetensors **out, const te_io *io, const te_mem *mem, const char *path,
                              te_io_error *error)
{
    *out = NULL;
    te_safetensors *st = te_mem_zalloc(mem, sizeof *st);
    if (!st) return te_io_fail(error, TE_ERROR_MEMORY, path, "out of memory");
    st->io = *io;
    st->mem = mem;
    st->fd = -1;
    size_t path_size = strlen(path) + 1;
    st->path = te_mem_alloc(mem, path_size);
    json_t *root = NULL;
    te_status status = st->path ? TE_OK : te_io_fail(error, TE_ERROR_MEMORY, path, "out of memory");
    if (st->path) memcpy(st->path, path, path_size);
    if (status == TE_OK) status = te_io_open_read(io, path, &st->fd, &st->file_size, error);
    if (status == TE_OK) status = load_json(st, &root, error);
    if (status == TE_OK) status = read_header(st, root, error);
    json_decref(root);
    if (status == TE_OK) *out = st;
    else te_safetensors_close(st);
    return status;
}

void te_safetensors_close(te_safetensors *st)
{
    if (!st) return;
    const te_mem *mem = st->mem;
    if (st->fd >= 0) st->io.close(st->io.user, st->fd);
    te_mem_free(mem, st->pairs, (size_t)st->n_pairs * sizeof *st->pairs);
    te_mem_free(mem, st->entries, st->capacity * sizeof *st->entries);
    te_mem_free(mem, st->strings, (size_t)st->header_size);
    if (st->path) te_mem_free(mem, st->path, strlen(st->path) + 1);
    te_mem_free(mem, st, sizeof *st);
}

int te_safetensors_count(const te_safetensors *st) { return st->n_entries; }
int te_safetensors_metadata_count(const te_safetensors *st) { return st->n_pairs; }

const te_safetensors_entry *te_safetensors_get(const te_safetensors *st, int index) { return &st->entries[index]; }
const te_safetensors_pair  *te_safetensors_metadata(const te_safetensors *st, int index) { return &st->pairs[index]; }

te_status te_safetensors_check_dtype(const te_safetensors *st, int index, te_io_error *error)
{
    const te_safetensors_entry *e = &st->entries[index];
    if (e->dtype < TE_DTYPE_COUNT) return TE_OK;
    char what[160];
    snprintf(what, sizeof what,
             "dtype \"%.20s\" is not one of F32 BF16 F16 F64 I64 I32 U8 BOOL F8_E4M3 F8_E5M2 I8 I16 U16 U32",
             e->stored);
    return entry_fail(st, e, TE_ERROR_UNSUPPORTED, what, error);
}

/* Makes wider numbers of those at the end of the buffer; each is written where no later one lies. */
static void widen(const te_safetensors_entry *e, int row, char *data)
{
    int64_t to = (int64_t)te_dtype_size(e->dtype), from = widened[row].bytes, n = e->size / to;
    for (int64_t i = 0; i < n; i++) {
        uint64_t bits = 0; /* little-endian, like the file */
        memcpy(&bits, data + n * (to - from) + i * from, (size_t)from);
        uint64_t sign = widened[row].negative ? (uint64_t)1 << (8 * from - 1) : 0;
        bits = (bits ^ sign) - sign;
        memcpy(data + i * to, &bits, (size_t)to);
    }
}

te_status te_safetensors_read(const te_safetensors *st, int index, void *data, size_t size, te_io_error *error)
{
    const te_safetensors_entry *e = &st->entries[index];
    te_status status = te_safetensors_check_dtype(st, index, error);
    if (status != TE_OK) return status;
    if ((uint64_t)e->size != size)
        return te_io_fail(error, TE_ERROR_ARGUMENT, st->path, "tensor \"%.*s\" has %lld bytes, the buffer %zu",
                          NAME_SHOWN, e->name, (long long)e->size, size);
    int row = widening(e);
    status = te_io_read(&st->io, st->fd, st->path, (char *)data + (e->size - e->bytes), (size_t)e->bytes, e->offset,
                        error);
    if (status == TE_OK && row < WIDENED) widen(e, row, data);
    if (status != TE_OK || e->dtype != TE_BOOL) return status;
    const unsigned char *bytes = data;
    for (size_t i = 0; i < size; i++)
        if (bytes[i] > 1)
            return te_io_fail(error, TE_ERROR_IO, st->path, "offset %lld: tensor \"%.*s\" of BOOL holds the byte %d",
                              (long long)e->offset + (long long)i, NAME_SHOWN, e->name, bytes[i]);
    return TE_OK;
}
