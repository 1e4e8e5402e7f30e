/* tokenizer.h - a text cut into pieces, and the pieces into byte-pair tokens.
 *
 *     text          added tokens are taken out where they stand in it, the longest first
 *     what is left  is cut where it is no UTF-8: such a byte is a piece by itself
 *     runs          are normalized, then added tokens that are looked for only now are taken out
 *     pieces        each step cuts every piece that the one before has left
 *     tokens        bpe.h
 */
#ifndef TE_CORE_TOKENIZER_H
#define TE_CORE_TOKENIZER_H

#include "bpe.h"

typedef struct te_tokenizer te_tokenizer;

/* A token that text is searched for: before or after it is normalized. */
typedef struct te_added_token {
    const char *bytes;
    size_t      size; /* not 0 */
    int32_t     id;
    bool        normalized;
} te_added_token;

/* Cuts a piece into the matches of a pattern and what lies between them; without a pattern, puts a space in front of a
 * piece that has none, which one step may do. */
typedef struct te_tokenizer_step {
    const char *pattern; /* NULL: the space */
    size_t      size;
    bool        literal;
    bool        at_start; /* of the space: in front of the piece that the text begins with alone */
} te_tokenizer_step;

enum { TE_TOKENIZER_STEPS = 16 };

typedef struct te_tokenizer_options {
    te_bpe_tables            bpe;
    const te_added_token    *added;
    size_t                   n_added;
    const te_tokenizer_step *steps;
    size_t                   n_steps;
    /* What normalizing is: */
    bool                     blanks; /* U+2581 becomes a space: SentencePiece's sign for one */
    bool                     space;  /* one more stands in front */
    bool                     nfc;
} te_tokenizer_options;

/* Copies what the options point to. */
te_status te_tokenizer_new(te_tokenizer **out, const te_mem *mem, const te_tokenizer_options *options,
                           te_io_error *error);
void      te_tokenizer_free(te_tokenizer *tokenizer); /* NULL is a no-op */
/* Appends the tokens of a text. Where it fails, some may have been appended. */
te_status te_tokenizer_encode(te_tokenizer *tokenizer, const char *text, size_t size, te_bpe_ids *ids,
                              te_io_error *error);
const te_bpe *te_tokenizer_bpe(const te_tokenizer *tokenizer);
/* The token that a text of just these bytes is: an added one, else one of the vocabulary; -1: none. */
int32_t te_tokenizer_find(const te_tokenizer *tokenizer, const char *bytes, size_t size);

#endif
