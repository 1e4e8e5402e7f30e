/* safetensors_write.c - writing safetensors files: check, lay out, header, data. */
#include "safetensors.h"
#include "kernels/dtype.h"
#include "utf8.h"

#include <stdio.h>
#include <stdlib.h>

enum { DATA_ALIGNMENT = 64, PIECE = 1 << 20, NAME_SHOWN = 120 };

/* --- checks ----------------------------------------------------------------------------------------------------- */

static te_status check_text(const char *text, const char *what, const char *path, te_io_error *error)
{
    if (!text) return te_io_fail(error, TE_ERROR_ARGUMENT, path, "a %s is missing", what);
    size_t size = strlen(text), at = 0;
    uint32_t point;
    while (at < size) {
        size_t n = te_utf8_decode((const unsigned char *)text + at, size - at, &point);
        if (n == 0)
            return te_io_fail(error, TE_ERROR_ARGUMENT, path, "%s \"%.*s\" is not valid UTF-8 at byte %zu", what,
                              NAME_SHOWN, text, at);
        at += n;
    }
    return TE_OK;
}

/* Bytes of an item, or -1 where its shape is not one. */
static int64_t item_bytes(const te_safetensors_item *item)
{
    int64_t room = (int64_t)te_dtype_size(item->dtype), bytes = room;
    for (int i = 0; i < item->ndim; i++) {
        int64_t n = item->shape[i];
        if (n < 0 || n > INT64_MAX / room) return -1;
        room *= n ? n : 1;
        bytes *= n;
    }
    return bytes;
}

static te_status check_item(const te_safetensors_item *item, const char *path, int64_t *total, te_io_error *error)
{
    te_status status = check_text(item->name, "tensor name", path, error);
    if (status != TE_OK) return status;
    const char *problem = NULL;
    int64_t bytes = 0;
    if (strcmp(item->name, "__metadata__") == 0) problem = "the format keeps this name for itself";
    else if ((unsigned)item->dtype >= TE_DTYPE_COUNT) problem = "no such dtype";
    else if (item->ndim < 0 || item->ndim > TE_MAX_DIMS) problem = "bad number of dimensions";
    else if ((bytes = item_bytes(item)) < 0) problem = "a dimension is negative, or the shape overflows 64 bits";
    else if (bytes > INT64_MAX / 2 - *total) problem = "the file would overflow 64 bits";
    else if (bytes > 0 && !item->data && !item->read) problem = "no data";
    if (problem)
        return te_io_fail(error, TE_ERROR_ARGUMENT, path, "tensor \"%.*s\": %s", NAME_SHOWN, item->name, problem);
    *total += bytes;
    return TE_OK;
}

static int compare_texts(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* names is sorted in place. */
static te_status check_unique(const char **names, int n, const char *what, const char *path, te_io_error *error)
{
    if (n > 1) qsort(names, (size_t)n, sizeof *names, compare_texts);
    for (int i = 1; i < n; i++)
        if (strcmp(names[i - 1], names[i]) == 0)
            return te_io_fail(error, TE_ERROR_ARGUMENT, path, "two %s \"%.*s\"", what, NAME_SHOWN, names[i]);
    return TE_OK;
}

static te_status check_contents(const te_mem *mem, const char *path, const te_safetensors_contents *c,
                                te_io_error *error)
{
    int64_t total = 0;
    te_status status = TE_OK;
    for (int i = 0; i < c->n_items && status == TE_OK; i++) status = check_item(&c->items[i], path, &total, error);
    for (int i = 0; i < c->n_metadata && status == TE_OK; i++) {
        status = check_text(c->metadata[i].key, "metadata key", path, error);
        if (status == TE_OK) status = check_text(c->metadata[i].value, "metadata", path, error);
    }
    if (status != TE_OK) return status;
    size_t size = (size_t)(c->n_items > c->n_metadata ? c->n_items : c->n_metadata) * sizeof(char *);
    const char **names = te_mem_alloc(mem, size);
    if (!names) return te_io_fail(error, TE_ERROR_MEMORY, path, "out of memory");
    for (int i = 0; i < c->n_items; i++) names[i] = c->items[i].name;
    status = check_unique(names, c->n_items, "tensors are called", path, error);
    for (int i = 0; i < c->n_metadata; i++) names[i] = c->metadata[i].key;
    if (status == TE_OK) status = check_unique(names, c->n_metadata, "metadata keys are", path, error);
    te_mem_free(mem, names, size);
    return status;
}

/* --- the header ------------------------------------------------------------------------------------------------- */

/* A growing text. The first failure to get memory sticks, so a sequence of puts is checked once at its end. */
typedef struct text {
    const te_mem *mem;
    void         *bytes;
    size_t        size, capacity;
    bool          failed;
} text;

static void put(text *t, const void *bytes, size_t size)
{
    if (t->failed || !te_mem_grow(t->mem, &t->bytes, &t->capacity, t->size + size, 1)) {
        t->failed = true;
        return;
    }
    memcpy((char *)t->bytes + t->size, bytes, size);
    t->size += size;
}

static void put_text(text *t, const char *s) { put(t, s, strlen(s)); }

static void put_number(text *t, int64_t n)
{
    char digits[24];
    put(t, digits, (size_t)snprintf(digits, sizeof digits, "%lld", (long long)n));
}

static void put_string(text *t, const char *s)
{
    put_text(t, "\"");
    for (; *s; s++) {
        char escaped[8];
        if (*s == '"' || *s == '\\') put(t, (char[]){'\\', *s}, 2);
        else if ((unsigned char)*s >= ' ') put(t, s, 1);
        else put(t, escaped, (size_t)snprintf(escaped, sizeof escaped, "\\u%04x", (unsigned)*s));
    }
    put_text(t, "\"");
}

static void put_item(text *t, const te_safetensors_item *item, int64_t begin)
{
    put_string(t, item->name);
    put_text(t, ":{\"dtype\":\"");
    put_text(t, te_safetensors_dtype_name(item->dtype));
    put_text(t, "\",\"shape\":[");
    for (int i = 0; i < item->ndim; i++) {
        if (i) put_text(t, ",");
        put_number(t, item->shape[i]);
    }
    put_text(t, "],\"data_offsets\":[");
    put_number(t, begin);
    put_text(t, ",");
    put_number(t, begin + item_bytes(item));
    put_text(t, "]}");
}

/* Items in the order of the file: by falling size of their elements, otherwise as given. *i and *size run over both;
 * start with i = -1, size = 8. */
static const te_safetensors_item *next_item(const te_safetensors_contents *c, int *i, size_t *size)
{
    for (; *size > 0; *size /= 2, *i = -1)
        for (++*i; *i < c->n_items; ++*i)
            if (te_dtype_size(c->items[*i].dtype) == *size) return &c->items[*i];
    return NULL;
}

static void put_header(text *t, const te_safetensors_contents *c)
{
    const char *separator = "";
    put(t, (char[8]){0}, 8); /* the length, known at the end */
    put_text(t, "{");
    if (c->n_metadata > 0) put_text(t, "\"__metadata__\":{");
    for (int i = 0; i < c->n_metadata; i++, separator = ",") {
        put_text(t, separator);
        put_string(t, c->metadata[i].key);
        put_text(t, ":");
        put_string(t, c->metadata[i].value);
    }
    if (c->n_metadata > 0) put_text(t, "}");
    int64_t begin = 0;
    size_t size = 8;
    int i = -1;
    for (const te_safetensors_item *item; (item = next_item(c, &i, &size)) != NULL; separator = ",") {
        put_text(t, separator);
        put_item(t, item, begin);
        begin += item_bytes(item);
    }
    put_text(t, "}");
    while (!t->failed && t->size % DATA_ALIGNMENT != 0) put_text(t, " ");
    uint64_t length = t->failed ? 0 : t->size - 8;
    for (int b = 0; b < 8 && !t->failed; b++) ((unsigned char *)t->bytes)[b] = (unsigned char)(length >> 8 * b);
}

/* --- the data --------------------------------------------------------------------------------------------------- */

static te_status write_pieces(te_io_writer *w, const te_safetensors_item *item, void *buffer, te_io_error *error)
{
    int64_t bytes = item_bytes(item);
    te_status status = TE_OK;
    for (int64_t at = 0; at < bytes && status == TE_OK; at += PIECE) {
        size_t size = bytes - at < PIECE ? (size_t)(bytes - at) : PIECE;
        status = item->read(item->user, at, buffer, size, error);
        if (status == TE_OK) status = te_io_writer_write(w, buffer, size, error);
    }
    return status;
}

static te_status write_data(te_io_writer *w, const te_safetensors_contents *c, void *buffer, te_io_error *error)
{
    te_status status = TE_OK;
    size_t size = 8;
    int i = -1;
    for (const te_safetensors_item *item; status == TE_OK && (item = next_item(c, &i, &size)) != NULL;)
        status = item->data ? te_io_writer_write(w, item->data, (size_t)item_bytes(item), error)
                            : write_pieces(w, item, buffer, error);
    return status;
}

static te_status write_file(const te_io *io, const te_mem *mem, const char *path, const text *header,
                            const te_safetensors_contents *c, void *buffer, te_io_error *error)
{
    te_io_writer w;
    te_status status = te_io_writer_open(&w, io, mem, path, error);
    if (status == TE_OK) status = te_io_writer_write(&w, header->bytes, header->size, error);
    if (status == TE_OK) status = write_data(&w, c, buffer, error);
    if (status == TE_OK) return te_io_writer_commit(&w, error);
    te_io_writer_abort(&w);
    return status;
}

te_status te_safetensors_write(const te_io *io, const te_mem *mem, const char *path, const te_safetensors_contents *c,
                               te_io_error *error)
{
    te_status status = check_contents(mem, path, c, error);
    if (status != TE_OK) return status;
    bool pieces = false;
    for (int i = 0; i < c->n_items; i++) pieces |= !c->items[i].data;
    text header = {.mem = mem};
    put_header(&header, c);
    void *buffer = pieces ? te_mem_alloc(mem, PIECE) : NULL;
    if (header.failed || (pieces && !buffer))
        status = te_io_fail(error, TE_ERROR_MEMORY, path, "out of memory writing %d tensors", c->n_items);
    else if (header.size - 8 > TE_SAFETENSORS_MAX_HEADER)
        status = te_io_fail(error, TE_ERROR_ARGUMENT, path, "a header of %zu bytes (at most %d are allowed)",
                            header.size - 8, (int)TE_SAFETENSORS_MAX_HEADER);
    else
        status = write_file(io, mem, path, &header, c, buffer, error);
    te_mem_free(mem, buffer, PIECE);
    te_mem_free(mem, header.bytes, header.capacity);
    return status;
}
