/* tokens.h - token data for training: streams, batches, and the inner loops of byte and character tokenizers.
 *
 * A stream is a sequence of token ids with 64-bit positions: the shards of a data set one after another, or a block of
 * memory. Loaders cut batches from it:
 *
 *     stream  ... 17 4 99 3 8 51 20 7 ...        x[b] = stream[start ... start + block - 1]
 *                    |--- row ---|               y[b] = stream[start + 1 ... start + block]
 *
 * Batch s depends on the options and s alone, so a run that resumes at batch s sees what it would have seen. A thread
 * prepares the next batches while the current one is computed on. It never allocates: all buffers are made up front.
 */
#ifndef TE_CORE_TOKENS_H
#define TE_CORE_TOKENS_H

#include "io.h"
#include "kernels/kernels.h"

/* --- streams ---------------------------------------------------------------------------------------------------- */

typedef struct te_token_stream te_token_stream;

typedef enum te_token_type {
    TE_TOKEN_U16,
    TE_TOKEN_U32 /* up to INT32_MAX: int32 ids are passed as this */
} te_token_type;

/* Opens shards as one stream. A path is a file, a folder (all its *.bin, sorted by name) or a pattern: * and ? in the
 * last part match the files of that folder, sorted by name. Shards of different formats may be mixed:
 *
 *     magic 20240520, version 1: header of 256 int32 (magic, version, number of tokens), then uint16 ids
 *     magic 20240801, version 7: the same header, then uint32 ids
 *     anything else:             uint16 ids from the first byte on
 *
 * The magic numbers cannot be met in the third form with GPT-2's vocabulary: read as uint16 they begin with ids above
 * it. A shard whose size disagrees with its header is an error. Files are closed again; readers open what they need. */
te_status te_token_stream_open(te_token_stream **out, const te_io *io, const te_mem *mem, const char *const *paths,
                               size_t n_paths, te_io_error *error);

/* Tokens of the caller, used in place; release (may be NULL) is called once nothing uses them any more. On failure they
 * stay the caller's. */
typedef struct te_token_memory {
    const void   *tokens;
    te_token_type type;
    int64_t       count;
    void (*release)(void *user);
    void *user;
} te_token_memory;

te_status te_token_stream_from_memory(te_token_stream **out, const te_mem *mem, const te_token_memory *memory,
                                      te_io_error *error);

/* Writes all tokens as one shard with a header, whole or not at all; ids that the type has no room for are an error. */
te_status te_token_stream_write(const te_token_stream *stream, const te_io *io, const te_mem *mem, const char *path,
                                te_token_type type, te_io_error *error);

int64_t te_token_stream_length(const te_token_stream *stream);

/* Streams are counted: every loader holds its own, so all may be closed in any order. One thread opens and closes. */
void te_token_stream_retain(te_token_stream *stream);
void te_token_stream_close(te_token_stream *stream); /* NULL is a no-op */

/* --- reading anywhere ------------------------------------------------------------------------------------------- */

enum { TE_TOKEN_READER_FILES = 16 };

/* Reads a stream with a few files open, whatever the number of shards. One reader belongs to one thread. */
typedef struct te_token_reader {
    const te_token_stream *stream;
    te_io                  io;
    int64_t                vocab_size; /* set after opening, an id that is not below it is an error; 0: all are fine */
    struct {
        size_t shard; /* meaningful while fd >= 0 */
        int    fd;
    } files[TE_TOKEN_READER_FILES]; /* shard i uses entry i % TE_TOKEN_READER_FILES */
} te_token_reader;

void      te_token_reader_open(te_token_reader *reader, const te_token_stream *stream, const te_io *io);
te_status te_token_reader_read(te_token_reader *reader, int64_t position, int64_t count, int32_t *ids,
                               te_io_error *error);
void      te_token_reader_close(te_token_reader *reader);

/* --- batches ---------------------------------------------------------------------------------------------------- */

typedef struct te_tokens te_tokens;

enum { TE_TOKENS_MAX_PREFETCH = 8 };

typedef struct te_tokens_options {
    int64_t  begin, end;   /* the part of the stream that batches may touch, their targets included: [begin, end) */
    int64_t  batch, block; /* rows, and tokens per row */
    te_dtype dtype;        /* of the ids handed out: TE_I32 or TE_I64 */
    /* Random rows: row b of batch s starts at begin + floor(u * (end - begin - block)), with u the 64-bit fraction in
     * words 0 (low) and 1 of the generator's group s * batch + b. Sequential: rows follow one another through the part;
     * what is left after the last whole batch is not used, and batch s is batch s % te_tokens_batches. */
    bool    sequential;
    te_rng  rng;
    int     prefetch;   /* batches that a thread prepares, to TE_TOKENS_MAX_PREFETCH; 0: read when asked, no thread */
    int64_t vocab_size; /* a batch with an id that is not below it fails to be read; 0: all are fine */
} te_tokens_options;

/* Valid until the next call on the same te_tokens. */
typedef struct te_tokens_batch {
    int64_t     index;
    const void *x, *y; /* [batch, block] */
} te_tokens_batch;

/* Starts at batch 0. io is copied; with prefetch its functions are called from the thread. */
te_status te_tokens_open(te_tokens **out, const te_io *io, const te_mem *mem, te_token_stream *stream,
                         const te_tokens_options *options, te_io_error *error);
/* The next batch, waiting for it if need be. A failure to read is reported when its batch is due; the call after that
 * tries the same batch again. */
te_status te_tokens_next(te_tokens *tokens, te_tokens_batch *batch, te_io_error *error);
/* Makes batch `index` (from 0) the next one. */
te_status te_tokens_seek(te_tokens *tokens, int64_t index, te_io_error *error);
/* Index of the next batch. */
int64_t te_tokens_position(te_tokens *tokens);
/* Number of different batches of a sequential loader; 0 for a random one, which has no end. */
int64_t te_tokens_batches(const te_tokens *tokens);
void    te_tokens_close(te_tokens *tokens); /* at any moment; NULL is a no-op */

/* --- text ------------------------------------------------------------------------------------------------------- */

/* Characters are code points of UTF-8. A byte that is no part of valid UTF-8 counts as one character, U+DC00 + byte,
 * which valid text cannot contain; so every sequence of bytes can be encoded and comes back the same. */

/* The different characters of a text, ascending: a block of *count elements from mem, which the caller frees. */
te_status te_text_points(const te_mem *mem, const unsigned char *text, size_t size, uint32_t **points, size_t *count,
                         te_io_error *error);

/* A vocabulary of characters: the id of points[i] is i. Points must ascend. */
typedef struct te_text_table te_text_table;

te_status te_text_table_new(te_text_table **out, const te_mem *mem, const uint32_t *points, size_t count,
                            te_io_error *error);
void      te_text_table_free(te_text_table *table); /* NULL is a no-op */
/* ids has room for `size` ids. A character outside the vocabulary is an error that names it and its offset. */
te_status te_text_table_encode(const te_text_table *table, const unsigned char *text, size_t size, int32_t *ids,
                               size_t *n_ids, te_io_error *error);

#endif
