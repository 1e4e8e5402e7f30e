/* tokens.c - token streams: finding and checking shards, reading across them, writing one. */
#include "tokens.h"

#include <fnmatch.h>
#include <stdio.h>

enum { HEADER_BYTES = 1024, MAGIC_U16 = 20240520, MAGIC_U32 = 20240801, MAGIC_EVAL = 20240522 };

typedef struct shard {
    const char   *path;   /* owned by te_token_stream.paths; NULL: memory */
    const void   *memory;
    te_token_type type;
    int64_t       offset; /* of the first token in the file */
    int64_t       first, count; /* positions in the stream */
} shard;

struct te_token_stream {
    const te_mem *mem;
    int           refs;
    te_io_names   paths;
    shard        *shards;
    size_t        n_shards;
    int64_t       length;
    void (*release)(void *user);
    void *user;
};

static int64_t token_size(te_token_type type) { return type == TE_TOKEN_U16 ? 2 : 4; }

/* --- finding shards --------------------------------------------------------------------------------------------- */

/* Appends folder/name. */
static bool add_joined(te_io_names *paths, const char *folder, size_t folder_length, const char *name)
{
    size_t size = folder_length + strlen(name) + 2;
    char *path = te_mem_alloc(paths->mem, size);
    if (!path) return false;
    bool slash = folder_length > 0 && folder[folder_length - 1] != '/';
    snprintf(path, size, "%.*s%s%s", (int)folder_length, folder, slash ? "/" : "", name);
    bool added = te_io_names_add(paths, path);
    te_mem_free(paths->mem, path, size);
    return added;
}

/* Appends the files of a folder whose names match. `shown` is what the user wrote. */
static te_status add_matches(te_io_names *paths, const te_io *io, const char *folder, const char *pattern,
                             const char *shown, te_io_error *error)
{
    te_io_names names;
    te_status status = te_io_list(io, paths->mem, *folder ? folder : ".", &names, error);
    if (status != TE_OK) return status;
    size_t before = paths->count;
    for (size_t i = 0; i < names.count && status == TE_OK; i++)
        if (fnmatch(pattern, names.names[i], FNM_PERIOD | FNM_NOESCAPE) == 0 &&
            !add_joined(paths, folder, strlen(folder), names.names[i]))
            status = te_io_fail(error, TE_ERROR_MEMORY, shown, "out of memory");
    te_io_names_free(&names);
    if (status == TE_OK && paths->count == before)
        status = te_io_fail(error, TE_ERROR_IO, shown, "no file matches %s", pattern);
    return status;
}

static te_status add_path(te_io_names *paths, const te_io *io, const char *path, te_io_error *error)
{
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    if (strpbrk(name, "*?")) {
        size_t length = (size_t)(name - path);
        char *folder = te_mem_zalloc(paths->mem, length + 1);
        if (!folder) return te_io_fail(error, TE_ERROR_MEMORY, path, "out of memory");
        memcpy(folder, path, length);
        te_status status = add_matches(paths, io, folder, name, path, error);
        te_mem_free(paths->mem, folder, length + 1);
        return status;
    }
    if (te_io_is_folder(io, path)) return add_matches(paths, io, path, "*.bin", path, error);
    return te_io_names_add(paths, path) ? TE_OK : te_io_fail(error, TE_ERROR_MEMORY, path, "out of memory");
}

/* --- checking them ---------------------------------------------------------------------------------------------- */

/* Fills in type, offset and count from the file's first words and size. */
static te_status check_shard(shard *s, const int32_t header[3], int64_t size, te_io_error *error)
{
    int32_t magic = header[0];
    if (magic == MAGIC_EVAL)
        return te_io_fail(error, TE_ERROR_IO, s->path,
                          "holds multiple-choice questions (magic %d), not a stream of tokens", magic);
    if (magic != MAGIC_U16 && magic != MAGIC_U32) {
        if (size % 2 != 0)
            return te_io_fail(error, TE_ERROR_IO, s->path, "%lld bytes are not a whole number of uint16 tokens",
                              (long long)size);
        s->type = TE_TOKEN_U16;
        s->count = size / 2;
        return TE_OK;
    }
    int version = magic == MAGIC_U16 ? 1 : 7;
    s->type = magic == MAGIC_U16 ? TE_TOKEN_U16 : TE_TOKEN_U32;
    s->offset = HEADER_BYTES;
    s->count = header[2];
    if (size < HEADER_BYTES)
        return te_io_fail(error, TE_ERROR_IO, s->path, "offset %lld: the file ends inside its header of %d bytes",
                          (long long)size, (int)HEADER_BYTES);
    if (header[1] != version)
        return te_io_fail(error, TE_ERROR_IO, s->path,
                          "offset 4: version %d of the format with magic %d (only %d is known)", header[1], magic,
                          version);
    if (s->count < 0 || size - HEADER_BYTES != s->count * token_size(s->type))
        return te_io_fail(error, TE_ERROR_IO, s->path,
                          "the header counts %lld tokens of %lld bytes, but %lld bytes follow it", (long long)s->count,
                          (long long)token_size(s->type), (long long)(size - HEADER_BYTES));
    return TE_OK;
}

static te_status probe_shard(shard *s, const te_io *io, te_io_error *error)
{
    int fd;
    int64_t size;
    int32_t header[3] = {0};
    te_status status = te_io_open_read(io, s->path, &fd, &size, error);
    if (status != TE_OK) return status;
    size_t wanted = size < (int64_t)sizeof header ? (size_t)size : sizeof header;
    status = te_io_read(io, fd, s->path, header, wanted, 0, error);
    io->close(io->user, fd);
    return status == TE_OK ? check_shard(s, header, size, error) : status;
}

static te_status probe_all(te_token_stream *stream, const te_io *io, te_io_error *error)
{
    for (size_t i = 0; i < stream->n_shards; i++) {
        shard *s = &stream->shards[i];
        s->path = stream->paths.names[i];
        s->first = stream->length;
        te_status status = probe_shard(s, io, error);
        if (status != TE_OK) return status;
        stream->length += s->count;
    }
    if (stream->length == 0)
        return te_io_fail(error, TE_ERROR_IO, stream->n_shards ? stream->paths.names[0] : NULL, "no tokens");
    return TE_OK;
}

/* --- the stream ------------------------------------------------------------------------------------------------- */

static te_token_stream *stream_new(const te_mem *mem, size_t n_shards)
{
    te_token_stream *stream = te_mem_zalloc(mem, sizeof *stream);
    shard *shards = te_mem_zalloc(mem, n_shards * sizeof *shards);
    if (!stream || !shards) {
        te_mem_free(mem, stream, sizeof *stream);
        te_mem_free(mem, shards, n_shards * sizeof *shards);
        return NULL;
    }
    *stream = (te_token_stream){.mem = mem, .refs = 1, .paths = {.mem = mem}, .shards = shards, .n_shards = n_shards};
    return stream;
}

te_status te_token_stream_open(te_token_stream **out, const te_io *io, const te_mem *mem, const char *const *paths,
                               size_t n_paths, te_io_error *error)
{
    *out = NULL;
    te_io_names found = {.mem = mem};
    te_status status = TE_OK;
    for (size_t i = 0; i < n_paths && status == TE_OK; i++) status = add_path(&found, io, paths[i], error);
    te_token_stream *stream = status == TE_OK ? stream_new(mem, found.count) : NULL;
    if (!stream) {
        if (status == TE_OK)
            status = te_io_fail(error, TE_ERROR_MEMORY, NULL, "out of memory for %zu shards", found.count);
        te_io_names_free(&found);
        return status;
    }
    stream->paths = found;
    status = probe_all(stream, io, error);
    if (status == TE_OK) *out = stream;
    else te_token_stream_close(stream);
    return status;
}

te_status te_token_stream_from_memory(te_token_stream **out, const te_mem *mem, const te_token_memory *memory,
                                      te_io_error *error)
{
    *out = NULL;
    if (memory->count < 1 || !memory->tokens) return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "no tokens");
    const uint32_t *ids = memory->tokens;
    for (int64_t i = 0; memory->type == TE_TOKEN_U32 && i < memory->count; i++)
        if (ids[i] > INT32_MAX)
            return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "token %lld is %lld: ids go from 0 to 2147483647",
                              (long long)i, (long long)(int32_t)ids[i]);
    te_token_stream *stream = stream_new(mem, 1);
    if (!stream) return te_io_fail(error, TE_ERROR_MEMORY, NULL, "out of memory");
    stream->shards[0] = (shard){.memory = memory->tokens, .type = memory->type, .count = memory->count};
    stream->length = memory->count;
    stream->release = memory->release;
    stream->user = memory->user;
    *out = stream;
    return TE_OK;
}

int64_t te_token_stream_length(const te_token_stream *stream) { return stream->length; }
void    te_token_stream_retain(te_token_stream *stream) { stream->refs++; }

void te_token_stream_close(te_token_stream *stream)
{
    if (!stream || --stream->refs > 0) return;
    if (stream->release) stream->release(stream->user);
    te_io_names_free(&stream->paths);
    te_mem_free(stream->mem, stream->shards, stream->n_shards * sizeof *stream->shards);
    te_mem_free(stream->mem, stream, sizeof *stream);
}

/* --- reading ---------------------------------------------------------------------------------------------------- */

void te_token_reader_open(te_token_reader *reader, const te_token_stream *stream, const te_io *io)
{
    *reader = (te_token_reader){.stream = stream, .io = *io};
    for (int i = 0; i < TE_TOKEN_READER_FILES; i++) reader->files[i].fd = -1;
}

void te_token_reader_close(te_token_reader *reader)
{
    for (int i = 0; i < TE_TOKEN_READER_FILES; i++) {
        if (reader->files[i].fd >= 0) reader->io.close(reader->io.user, reader->files[i].fd);
        reader->files[i].fd = -1;
    }
}

/* The last shard that begins at or before a position; empty ones never hold it. */
static size_t find_shard(const te_token_stream *stream, int64_t position)
{
    size_t low = 0, high = stream->n_shards;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (stream->shards[middle].first <= position) low = middle;
        else high = middle;
    }
    return low;
}

static te_status open_shard(te_token_reader *reader, size_t index, int *fd, te_io_error *error)
{
    size_t slot = index % TE_TOKEN_READER_FILES;
    *fd = reader->files[slot].fd;
    if (*fd >= 0 && reader->files[slot].shard == index) return TE_OK;
    if (*fd >= 0) reader->io.close(reader->io.user, *fd);
    reader->files[slot].fd = -1;
    int64_t size;
    te_status status = te_io_open_read(&reader->io, reader->stream->shards[index].path, fd, &size, error);
    if (status != TE_OK) return status;
    reader->files[slot].shard = index;
    reader->files[slot].fd = *fd;
    return TE_OK;
}

/* Bytes of a shard, from its memory or its file; `at` counts tokens of the shard. */
static te_status read_bytes(te_token_reader *reader, size_t index, int64_t at, size_t size, void *to,
                            te_io_error *error)
{
    const shard *s = &reader->stream->shards[index];
    int64_t byte = at * token_size(s->type);
    if (s->memory) {
        memcpy(to, (const char *)s->memory + byte, size);
        return TE_OK;
    }
    int fd;
    te_status status = open_shard(reader, index, &fd, error);
    return status == TE_OK ? te_io_read(&reader->io, fd, s->path, to, size, s->offset + byte, error) : status;
}

static te_status read_u16(te_token_reader *reader, size_t index, int64_t at, int64_t count, int32_t *ids,
                          te_io_error *error)
{
    uint16_t piece[4096];
    te_status status = TE_OK;
    while (count > 0 && status == TE_OK) {
        int64_t n = count < 4096 ? count : 4096;
        status = read_bytes(reader, index, at, (size_t)n * sizeof *piece, piece, error);
        for (int64_t i = 0; i < n && status == TE_OK; i++) ids[i] = piece[i];
        ids += n;
        at += n;
        count -= n;
    }
    return status;
}

static te_status read_u32(te_token_reader *reader, size_t index, int64_t at, int64_t count, int32_t *ids,
                          te_io_error *error)
{
    te_status status = read_bytes(reader, index, at, (size_t)count * sizeof *ids, ids, error);
    for (int64_t i = 0; i < count && status == TE_OK; i++)
        if (ids[i] < 0)
            status = te_io_fail(error, TE_ERROR_IO, reader->stream->shards[index].path,
                                "token %lld is %lld: ids end at %d", (long long)(at + i), (long long)(uint32_t)ids[i],
                                INT32_MAX);
    return status;
}

static te_status check_ids(const te_token_reader *reader, size_t index, int64_t at, int64_t count, const int32_t *ids,
                           te_io_error *error)
{
    for (int64_t i = 0; i < count && reader->vocab_size > 0; i++)
        if (ids[i] >= reader->vocab_size)
            return te_io_fail(error, TE_ERROR_IO, reader->stream->shards[index].path,
                              "token %lld is %d, of a vocabulary of %lld", (long long)(at + i), (int)ids[i],
                              (long long)reader->vocab_size);
    return TE_OK;
}

te_status te_token_reader_read(te_token_reader *reader, int64_t position, int64_t count, int32_t *ids,
                               te_io_error *error)
{
    const te_token_stream *stream = reader->stream;
    if (position < 0 || count < 0 || position > stream->length - count)
        return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "%lld tokens from %lld of a stream of %lld", (long long)count,
                          (long long)position, (long long)stream->length);
    te_status status = TE_OK;
    while (count > 0 && status == TE_OK) {
        size_t index = find_shard(stream, position);
        const shard *s = &stream->shards[index];
        int64_t at = position - s->first;
        int64_t n = s->count - at < count ? s->count - at : count;
        status = (s->type == TE_TOKEN_U16 ? read_u16 : read_u32)(reader, index, at, n, ids, error);
        if (status == TE_OK) status = check_ids(reader, index, at, n, ids, error);
        ids += n;
        position += n;
        count -= n;
    }
    return status;
}

/* --- writing ---------------------------------------------------------------------------------------------------- */

enum { PIECE = 4096 };

static te_status write_piece(te_io_writer *w, int64_t at, const int32_t *ids, int64_t n, te_token_type type,
                             te_io_error *error)
{
    uint16_t narrow[PIECE];
    if (type == TE_TOKEN_U32) return te_io_writer_write(w, ids, (size_t)n * sizeof *ids, error);
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] > UINT16_MAX)
            return te_io_fail(error, TE_ERROR_ARGUMENT, w->path, "token %lld is %d: uint16 ends at 65535, use uint32",
                              (long long)(at + i), ids[i]);
        narrow[i] = (uint16_t)ids[i];
    }
    return te_io_writer_write(w, narrow, (size_t)n * sizeof *narrow, error);
}

te_status te_token_stream_write(const te_token_stream *stream, const te_io *io, const te_mem *mem, const char *path,
                                te_token_type type, te_io_error *error)
{
    bool    narrow = type == TE_TOKEN_U16;
    int32_t header[HEADER_BYTES / 4] = {narrow ? MAGIC_U16 : MAGIC_U32, narrow ? 1 : 7, (int32_t)stream->length};
    int32_t ids[PIECE];
    if (stream->length > INT32_MAX)
        return te_io_fail(error, TE_ERROR_ARGUMENT, path, "%lld tokens: a shard holds at most %d",
                          (long long)stream->length, INT32_MAX);
    te_token_reader reader;
    te_io_writer    w;
    te_token_reader_open(&reader, stream, io);
    te_status status = te_io_writer_open(&w, io, mem, path, error);
    if (status == TE_OK) status = te_io_writer_write(&w, header, sizeof header, error);
    for (int64_t at = 0; at < stream->length && status == TE_OK; at += PIECE) {
        int64_t n = stream->length - at < PIECE ? stream->length - at : PIECE;
        status = te_token_reader_read(&reader, at, n, ids, error);
        if (status == TE_OK) status = write_piece(&w, at, ids, n, type, error);
    }
    te_token_reader_close(&reader);
    if (status == TE_OK) return te_io_writer_commit(&w, error);
    te_io_writer_abort(&w);
    return status;
}
