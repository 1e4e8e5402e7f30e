/* bpe.h - byte-pair encoding: tokens that stand for bytes, and pieces of text merged into them.
 *
 * A piece begins as one token a byte; or one a character, and where a character has none, one a byte of it. Of all
 * neighbours that some merge joins, those of the earliest merge are joined, the leftmost first, until none are left:
 *
 *     l o w e r      merges: 0 "e r", 1 "l o", 2 "lo w"
 *     l o w er       0
 *     lo w er        1
 *     low er         2
 *
 * The merges that are possible wait in a heap, so a piece of n bytes takes O(n log n), however long it is. Pieces of
 * ordinary text are short and come again: what became of them is kept in a table of fixed size.
 */
#ifndef TE_CORE_BPE_H
#define TE_CORE_BPE_H

#include "io.h"

typedef struct te_bpe te_bpe;

typedef struct te_bpe_token {
    const char *bytes;
    size_t      size;
    bool        text; /* false: an id has these bytes, but no text leads to it by merging */
} te_bpe_token;

/* The token `id` takes the place of `left` and `right`. */
typedef struct te_bpe_merge {
    uint32_t left, right, id;
} te_bpe_merge;

/* What te_bpe_new copies. The id of tokens[i] is i; merges come in their order, and of two that join the same tokens
 * the later one counts. decoded[i] has the bytes that the id i stands for where that is not what leads to it. */
typedef struct te_bpe_tables {
    const te_bpe_token *tokens;
    size_t              n_tokens;
    const te_bpe_merge *merges;
    size_t              n_merges;
    bool                whole_first; /* a piece that is a token becomes that token, whatever the merges say */
    const int32_t      *fallback; /* pieces begin as characters: tokens of the 256 bytes of those without; or NULL */
    const te_bpe_token *decoded;  /* NULL: as tokens */
} te_bpe_tables;

/* Ids that calls append to. Starts with a mem and zeros; te_bpe_ids_free empties it. */
typedef struct te_bpe_ids {
    const te_mem *mem;
    int32_t      *ids;
    size_t        n, capacity;
} te_bpe_ids;

te_status te_bpe_new(te_bpe **out, const te_mem *mem, const te_bpe_tables *tables, te_io_error *error);
void      te_bpe_free(te_bpe *bpe); /* NULL is a no-op */

/* The token with just these bytes that text may lead to; -1: none. */
int32_t te_bpe_find(const te_bpe *bpe, const char *bytes, size_t size);
/* The bytes that a token stands for, *size of them; NULL: there is no such id. */
const char *te_bpe_bytes(const te_bpe *bpe, uint64_t id, size_t *size);
/* Appends the tokens of a piece. A byte that has no token is an error. Ids may have been appended where it fails. */
te_status te_bpe_encode(te_bpe *bpe, const unsigned char *piece, size_t size, te_bpe_ids *ids, te_io_error *error);

bool te_bpe_ids_push(te_bpe_ids *ids, int32_t id); /* false: out of memory */
void te_bpe_ids_free(te_bpe_ids *ids);

#endif
