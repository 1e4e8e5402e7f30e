/* nearest.h - which of many names was probably meant. */
#ifndef TE_CORE_NEAREST_H
#define TE_CORE_NEAREST_H

#include <stdbool.h>
#include <stddef.h>

enum { TE_LONGEST_NAME = 48 }; /* longer ones are near none */

typedef struct te_nearest {
    char wanted[TE_LONGEST_NAME + 1], name[TE_LONGEST_NAME + 1]; /* name: the nearest yet, "" while none is near */
    int  least;                                                  /* only names that are less far are near */
} te_nearest;

te_nearest te_nearest_to(const char *wanted, size_t length);
bool       te_nearest_consider(te_nearest *nearest, const char *name); /* whether it is nearer than those before */

#endif
