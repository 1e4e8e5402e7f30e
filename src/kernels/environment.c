/* environment.c - see environment.h. */
#include "environment.h"

#include <stdlib.h>

const char *te_environment(te_variable variable)
{
    static const char *const names[] = {
#define TE_VARIABLE_NAME(name, text, doc) text,
        TE_ENVIRONMENT(TE_VARIABLE_NAME)
#undef TE_VARIABLE_NAME
    };
    const char *value = getenv(names[variable]);
    return value && *value ? value : NULL;
}
