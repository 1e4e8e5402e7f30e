/* words.h - a text cut into the words that WordPiece takes apart, as BERT cuts it (Devlin et al. 2019), by utf8proc.
 *
 *     clean      no control characters; spaces of all kinds become spaces
 *     chinese    a space on both sides of every ideograph
 *     accents    characters taken apart, and marks that take no space of their own left out
 *     lowercase  letters in small
 *     cuts       at spaces, which are left out, and around punctuation
 *
 * A byte that is no UTF-8 counts as U+FFFD. Categories are those of Unicode 8, as the tokenizers library has them, so
 * that newer marks and punctuation count as letters; small letters are those of utf8proc's Unicode.
 */
#ifndef TE_CORE_WORDS_H
#define TE_CORE_WORDS_H

#include "io.h"

typedef struct te_words_options {
    bool clean, chinese, accents, lowercase;
    bool cuts; /* false: the normalized text is one word */
} te_words_options;

/* Words one after the other, and where each ends. Starts with a mem and zeros. */
typedef struct te_words {
    const te_mem  *mem;
    unsigned char *bytes;
    size_t         size, capacity; /* bytes */
    size_t        *ends;           /* where each word ends in bytes */
    size_t         n, ends_capacity;
} te_words;

/* Appends the words of a text. */
te_status te_words_cut(te_words *words, const te_words_options *options, const char *text, size_t size,
                       te_io_error *error);
void      te_words_free(te_words *words);

#endif
