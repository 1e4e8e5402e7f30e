/* bpe.c - merging by a heap of ranks, over a list of symbols linked both ways. */
#include "bpe.h"

#include "utf8.h"

enum {
    CACHE_SLOTS = 1 << 13,
    SLOT_BYTES = 30, /* a slot is a cache line */
    SLOT_IDS = 8,
    KEPT_BYTES = 1 << 16 /* a longer piece gives its working memory back */
};

#define NONE UINT32_MAX

/* What became of one piece; size 0: nothing yet. */
typedef struct cache_slot {
    uint8_t       size, n;
    unsigned char bytes[SLOT_BYTES];
    int32_t       ids[SLOT_IDS];
} cache_slot;

_Static_assert(sizeof(cache_slot) == 64, "a slot is a cache line");

/* A place of the hash table of merges. */
typedef struct pair_slot {
    uint32_t left, right;
    uint32_t rank; /* NONE: free */
} pair_slot;

/* A token of the piece that is being merged, at the place of its first byte. */
typedef struct symbol {
    uint32_t id; /* NONE: joined to the one before it */
    uint32_t previous, next; /* NONE: there is none */
} symbol;

/* Bytes of all tokens, those of token i from starts[i] to starts[i + 1]. */
typedef struct token_bytes {
    char   *bytes;
    size_t *starts;
} token_bytes;

struct te_bpe {
    const te_mem *mem;
    size_t        n_tokens, n_merges;
    bool          whole_first, by_characters;
    uint32_t      first[256];    /* the token of a byte, or NONE */
    uint32_t      fallback[256]; /* by_characters: of a byte whose character has no token */
    token_bytes   read;          /* what leads to them */
    token_bytes   decoded;       /* what they stand for; without starts: the same */
    te_bpe_merge *merges; /* by rank */
    pair_slot    *pairs;
    size_t        pair_mask; /* size of the table minus 1, as in token_mask */
    uint32_t     *table; /* tokens that text may lead to, by the hash of their bytes */
    size_t        token_mask;
    cache_slot   *cache;
    symbol       *symbols; /* working memory of a piece */
    uint64_t     *heap;    /* rank << 32 | place of the left symbol */
    size_t        n_heap, symbols_capacity, heap_capacity;
};

/* --- hashing ------------------------------------------------------------------------------------------------------ */

static uint64_t mix(uint64_t h)
{
    h *= 0x9E3779B97F4A7C15u;
    return h ^ h >> 32;
}

static uint64_t hash_bytes(const void *bytes, size_t size)
{
    const unsigned char *p = bytes;
    uint64_t             h = size, word;
    for (; size >= 8; p += 8, size -= 8) {
        memcpy(&word, p, 8);
        h = mix(h ^ word);
    }
    word = 0;
    for (size_t i = 0; i < size; i++) word = word << 8 | p[i];
    return mix(mix(h ^ word));
}

static pair_slot *pair_place(const te_bpe *b, uint32_t left, uint32_t right)
{
    size_t i = (size_t)mix((uint64_t)left << 32 | right) & b->pair_mask;
    while (b->pairs[i].rank != NONE && (b->pairs[i].left != left || b->pairs[i].right != right))
        i = (i + 1) & b->pair_mask;
    return &b->pairs[i];
}

/* The place of the token with these bytes, or the free one where it would be. */
static uint32_t *token_place(const te_bpe *b, const char *bytes, size_t size)
{
    size_t i = (size_t)hash_bytes(bytes, size) & b->token_mask;
    for (;; i = (i + 1) & b->token_mask) {
        uint32_t id = b->table[i];
        if (id == NONE) return &b->table[i];
        const char *start = b->read.bytes + b->read.starts[id];
        size_t      found = b->read.starts[id + 1] - b->read.starts[id];
        if (found == size && memcmp(start, bytes, size) == 0) return &b->table[i];
    }
}

static size_t table_size(size_t n)
{
    size_t size = 16;
    while (size < 2 * n) size *= 2;
    return size;
}

/* --- making the tables -------------------------------------------------------------------------------------------- */

static te_status out_of_memory(te_io_error *error)
{
    return te_io_fail(error, TE_ERROR_MEMORY, NULL, "out of memory for a table of tokens");
}

static te_status take_bytes(const te_bpe *b, token_bytes *to, const te_bpe_token *tokens, te_io_error *error)
{
    size_t total = 0;
    for (size_t i = 0; i < b->n_tokens; i++) total += tokens[i].size;
    to->starts = te_mem_zalloc(b->mem, (b->n_tokens + 1) * sizeof *to->starts);
    if (!to->starts) return out_of_memory(error);
    to->bytes = te_mem_alloc(b->mem, total);
    if (!to->bytes) return out_of_memory(error); /* all starts are 0, as free_bytes wants to see */
    for (size_t i = 0, at = 0; i < b->n_tokens; i++) {
        if (tokens[i].size) memcpy(to->bytes + at, tokens[i].bytes, tokens[i].size);
        to->starts[i + 1] = at += tokens[i].size;
    }
    return TE_OK;
}

static te_status take_tokens(te_bpe *b, const te_bpe_token *tokens, te_io_error *error)
{
    te_status status = take_bytes(b, &b->read, tokens, error);
    if (status != TE_OK) return status;
    size_t size = table_size(b->n_tokens);
    b->table = te_mem_alloc(b->mem, size * sizeof *b->table);
    if (!b->table) return out_of_memory(error);
    b->token_mask = size - 1;
    memset(b->table, 0xFF, size * sizeof *b->table);
    for (size_t i = 0; i < b->n_tokens; i++) {
        if (!tokens[i].text || tokens[i].size == 0) continue;
        uint32_t *place = token_place(b, tokens[i].bytes, tokens[i].size);
        if (*place != NONE)
            return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "tokens %u and %zu have the same bytes",
                              (unsigned)*place, i);
        *place = (uint32_t)i;
        if (tokens[i].size == 1) b->first[(unsigned char)tokens[i].bytes[0]] = (uint32_t)i;
    }
    return TE_OK;
}

static te_status take_merges(te_bpe *b, const te_bpe_merge *merges, te_io_error *error)
{
    size_t size = table_size(b->n_merges);
    b->merges = te_mem_alloc(b->mem, b->n_merges * sizeof *b->merges);
    b->pairs = te_mem_alloc(b->mem, size * sizeof *b->pairs);
    b->pair_mask = size - 1;
    if (!b->merges || !b->pairs) return out_of_memory(error);
    memset(b->pairs, 0xFF, size * sizeof *b->pairs);
    for (size_t i = 0; i < b->n_merges; i++) {
        te_bpe_merge m = b->merges[i] = merges[i];
        if (m.left >= b->n_tokens || m.right >= b->n_tokens || m.id >= b->n_tokens)
            return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "merge %zu: %u and %u to %u, of %zu tokens", i,
                              (unsigned)m.left, (unsigned)m.right, (unsigned)m.id, b->n_tokens);
        *pair_place(b, m.left, m.right) = (pair_slot){m.left, m.right, (uint32_t)i};
    }
    return TE_OK;
}

static te_status take_fallback(te_bpe *b, const int32_t *fallback, te_io_error *error)
{
    b->by_characters = fallback != NULL;
    for (int i = 0; fallback && i < 256; i++) {
        if (fallback[i] < 0 || (size_t)fallback[i] >= b->n_tokens)
            return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "the byte 0x%02X becomes %d, of %zu tokens", (unsigned)i,
                              (int)fallback[i], b->n_tokens);
        b->fallback[i] = (uint32_t)fallback[i];
    }
    return TE_OK;
}

te_status te_bpe_new(te_bpe **out, const te_mem *mem, const te_bpe_tables *tables, te_io_error *error)
{
    *out = NULL;
    if (tables->n_tokens >= INT32_MAX || tables->n_merges >= INT32_MAX)
        return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "%zu tokens and %zu merges are too many", tables->n_tokens,
                          tables->n_merges);
    te_bpe *b = te_mem_zalloc(mem, sizeof *b);
    if (!b) return out_of_memory(error);
    b->mem = mem;
    b->n_tokens = tables->n_tokens;
    b->n_merges = tables->n_merges;
    b->whole_first = tables->whole_first;
    memset(b->first, 0xFF, sizeof b->first);
    te_status status = take_tokens(b, tables->tokens, error);
    if (status == TE_OK && tables->decoded) status = take_bytes(b, &b->decoded, tables->decoded, error);
    if (status == TE_OK) status = take_merges(b, tables->merges, error);
    if (status == TE_OK) status = take_fallback(b, tables->fallback, error);
    if (status == TE_OK && !(b->cache = te_mem_zalloc(mem, CACHE_SLOTS * sizeof *b->cache)))
        status = out_of_memory(error);
    if (status == TE_OK)
        *out = b;
    else
        te_bpe_free(b);
    return status;
}

static void free_working_memory(te_bpe *b)
{
    te_mem_free(b->mem, b->symbols, b->symbols_capacity * sizeof *b->symbols);
    te_mem_free(b->mem, b->heap, b->heap_capacity * sizeof *b->heap);
    b->symbols = NULL;
    b->heap = NULL;
    b->symbols_capacity = b->heap_capacity = 0;
}

static void free_bytes(te_bpe *b, token_bytes *of)
{
    if (of->starts) te_mem_free(b->mem, of->bytes, of->starts[b->n_tokens]);
    te_mem_free(b->mem, of->starts, (b->n_tokens + 1) * sizeof *of->starts);
}

void te_bpe_free(te_bpe *b)
{
    if (!b) return;
    const te_mem *mem = b->mem;
    free_working_memory(b);
    free_bytes(b, &b->read);
    free_bytes(b, &b->decoded);
    te_mem_free(mem, b->table, (b->token_mask + 1) * sizeof *b->table);
    te_mem_free(mem, b->merges, b->n_merges * sizeof *b->merges);
    te_mem_free(mem, b->pairs, (b->pair_mask + 1) * sizeof *b->pairs);
    te_mem_free(mem, b->cache, CACHE_SLOTS * sizeof *b->cache);
    te_mem_free(mem, b, sizeof *b);
}

/* --- looking up --------------------------------------------------------------------------------------------------- */

int32_t te_bpe_find(const te_bpe *b, const char *bytes, size_t size)
{
    uint32_t id = *token_place(b, bytes, size);
    return id == NONE ? -1 : (int32_t)id;
}

const char *te_bpe_bytes(const te_bpe *b, uint64_t id, size_t *size)
{
    if (id >= b->n_tokens) return NULL;
    const token_bytes *of = b->decoded.starts ? &b->decoded : &b->read;
    *size = of->starts[id + 1] - of->starts[id];
    return of->bytes + of->starts[id];
}

/* --- merging ------------------------------------------------------------------------------------------------------ */

static void heap_push(te_bpe *b, uint64_t key)
{
    size_t i = b->n_heap++;
    for (; i > 0 && b->heap[(i - 1) / 2] > key; i = (i - 1) / 2) b->heap[i] = b->heap[(i - 1) / 2];
    b->heap[i] = key;
}

static uint64_t heap_pop(te_bpe *b)
{
    uint64_t *heap = b->heap, top = heap[0], last = heap[--b->n_heap];
    size_t    n = b->n_heap, i = 0;
    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= last) break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return top;
}

/* Puts the merge of the symbol at `at` and the next one into the heap, where there is one. */
static void consider(te_bpe *b, uint32_t at)
{
    const symbol *left = &b->symbols[at];
    if (left->next == NONE) return;
    uint32_t rank = pair_place(b, left->id, b->symbols[left->next].id)->rank;
    if (rank != NONE) heap_push(b, (uint64_t)rank << 32 | at);
}

/* The token that a piece begins as, of *n bytes; NONE: there is none. */
static uint32_t symbol_at(const te_bpe *b, const unsigned char *piece, size_t size, size_t *n)
{
    uint32_t point, id = b->first[piece[0]];
    *n = 1;
    if (!b->by_characters) return id;
    size_t length = te_utf8_decode(piece, size, &point);
    if (length > 1) id = *token_place(b, (const char *)piece, length);
    if (id == NONE || length == 0) return b->fallback[piece[0]];
    *n = length;
    return id;
}

static te_status begin_merging(te_bpe *b, const unsigned char *piece, size_t size, te_io_error *error)
{
    if (size >= NONE) return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "a piece of %zu bytes is too long", size);
    /* A merge takes one entry out and puts two in at most, and there are fewer merges than bytes. */
    if (!te_mem_grow(b->mem, &b->symbols, &b->symbols_capacity, size, sizeof *b->symbols) ||
        !te_mem_grow(b->mem, &b->heap, &b->heap_capacity, 2 * size, sizeof *b->heap))
        return te_io_fail(error, TE_ERROR_MEMORY, NULL, "out of memory merging a piece of %zu bytes", size);
    uint32_t last = NONE;
    for (size_t i = 0, n; i < size; i += n) {
        uint32_t id = symbol_at(b, piece + i, size - i, &n);
        if (id == NONE)
            return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "the vocabulary has no token for the byte 0x%02X",
                              piece[i]);
        b->symbols[i] = (symbol){id, last, NONE};
        if (last != NONE) b->symbols[last].next = (uint32_t)i;
        last = (uint32_t)i;
    }
    b->n_heap = 0;
    for (uint32_t i = 0; i != NONE; i = b->symbols[i].next) consider(b, i);
    return TE_OK;
}

static void merge_all(te_bpe *b)
{
    symbol *symbols = b->symbols;
    while (b->n_heap) {
        uint64_t            key = heap_pop(b);
        uint32_t            at = key & NONE;
        symbol             *left = &symbols[at];
        const te_bpe_merge *m = &b->merges[key >> 32];
        if (left->id != m->left || left->next == NONE || symbols[left->next].id != m->right) continue; /* outdated */
        symbol *right = &symbols[left->next];
        left->id = m->id;
        left->next = right->next;
        right->id = NONE;
        if (left->next != NONE) symbols[left->next].previous = at;
        consider(b, at);
        if (left->previous != NONE) consider(b, left->previous);
    }
}

static te_status out_of_ids(te_io_error *error)
{
    return te_io_fail(error, TE_ERROR_MEMORY, NULL, "out of memory for the ids of a text");
}

static te_status merge_piece(te_bpe *b, const unsigned char *piece, size_t size, te_bpe_ids *ids, te_io_error *error)
{
    te_status status = begin_merging(b, piece, size, error);
    if (status == TE_OK) {
        merge_all(b);
        for (uint32_t at = 0; at != NONE && status == TE_OK; at = b->symbols[at].next)
            if (!te_bpe_ids_push(ids, (int32_t)b->symbols[at].id)) status = out_of_ids(error);
    }
    if (size > KEPT_BYTES) free_working_memory(b);
    return status;
}

static te_status encode_anew(te_bpe *b, const unsigned char *piece, size_t size, te_bpe_ids *ids, te_io_error *error)
{
    int32_t whole = b->whole_first ? te_bpe_find(b, (const char *)piece, size) : -1;
    if (whole < 0) return merge_piece(b, piece, size, ids, error);
    return te_bpe_ids_push(ids, whole) ? TE_OK : out_of_ids(error);
}

te_status te_bpe_encode(te_bpe *b, const unsigned char *piece, size_t size, te_bpe_ids *ids, te_io_error *error)
{
    if (size == 0) return TE_OK;
    if (size > SLOT_BYTES) return encode_anew(b, piece, size, ids, error);
    cache_slot *slot = &b->cache[hash_bytes(piece, size) & (CACHE_SLOTS - 1)];
    if (slot->size == size && memcmp(slot->bytes, piece, size) == 0) {
        if (!te_mem_grow(ids->mem, &ids->ids, &ids->capacity, ids->n + SLOT_IDS, sizeof *ids->ids))
            return out_of_ids(error);
        memcpy(ids->ids + ids->n, slot->ids, sizeof slot->ids);
        ids->n += slot->n;
        return TE_OK;
    }
    size_t    before = ids->n;
    te_status status = encode_anew(b, piece, size, ids, error);
    size_t    n = ids->n - before;
    if (status != TE_OK || n > SLOT_IDS) return status;
    slot->size = (uint8_t)size;
    slot->n = (uint8_t)n;
    memcpy(slot->bytes, piece, size);
    memcpy(slot->ids, ids->ids + before, n * sizeof *slot->ids);
    return TE_OK;
}

/* --- ids ---------------------------------------------------------------------------------------------------------- */

bool te_bpe_ids_push(te_bpe_ids *ids, int32_t id)
{
    if (!te_mem_grow(ids->mem, &ids->ids, &ids->capacity, ids->n + 1, sizeof *ids->ids)) return false;
    ids->ids[ids->n++] = id;
    return true;
}

void te_bpe_ids_free(te_bpe_ids *ids)
{
    te_mem_free(ids->mem, ids->ids, ids->capacity * sizeof *ids->ids);
    *ids = (te_bpe_ids){.mem = ids->mem};
}
