/* environment.c - see environment.h. */
#include "environment.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

bool te_environment_traces(const char *kind)
{
    const char *at = te_environment(TE_ENV_TRACE);
    for (size_t n; at && *at; at += n + (at[n] != 0)) {
        n = strcspn(at, ",");
        if (n == strlen(kind) && memcmp(at, kind, n) == 0) return true;
    }
    return false;
}

char *te_environment_cache(char *path, size_t size)
{
    const char *own = te_environment(TE_ENV_CACHE), *user = te_environment(TE_ENV_XDG_CACHE_HOME),
               *home = te_environment(TE_ENV_HOME);
    int         n = own    ? snprintf(path, size, "%s", own)
                    : user ? snprintf(path, size, "%s/tetrain", user)
                    : home ? snprintf(path, size, "%s/.cache/tetrain", home)
                           : -1;
    return n < 0 || (size_t)n >= size ? NULL : path;
}
