/* regex.h - regular expressions over valid UTF-8, by PCRE2: \s, \d and the like know all of Unicode, ^ and $ stand at
 * every line. Compiled to machine code where the system allows it. All memory but that of machine code comes from a
 * te_mem.
 */
#ifndef TE_CORE_REGEX_H
#define TE_CORE_REGEX_H

#include "io.h"

typedef struct te_regex te_regex;

/* literal: the text itself is what is looked for. */
te_status te_regex_new(te_regex **out, const te_mem *mem, const char *pattern, size_t size, bool literal,
                       te_io_error *error);
void      te_regex_free(te_regex *regex); /* NULL is a no-op */
/* The first match that begins at `from` or later, which is the start of a character or the end: [*begin, *end).
 * *begin is SIZE_MAX where there is none. What is in front of `from` is seen by what looks back. */
te_status te_regex_find(te_regex *regex, const unsigned char *text, size_t size, size_t from, size_t *begin,
                        size_t *end, te_io_error *error);

#endif
