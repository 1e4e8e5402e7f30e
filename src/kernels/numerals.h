/* numerals.h - numbers as text and back with a decimal point, whatever locale the host has set, and rounded to nearest.
 * Only the thread that calls is in the C locale meanwhile. */
#ifndef TE_KERNELS_NUMERALS_H
#define TE_KERNELS_NUMERALS_H

#include "float_mode.h"

#include <locale.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* In glibc the C locale is one that is always there: nothing is allocated, and a switch takes nanoseconds. */
typedef struct te_numerals {
    locale_t      c, before;
    te_float_mode mode;
} te_numerals;

static inline te_numerals te_numerals_begin(void)
{
    te_numerals n = {.c = newlocale(LC_ALL_MASK, "C", (locale_t)0), .mode = te_float_mode_begin()};
    if (n.c) n.before = uselocale(n.c);
    return n;
}

static inline void te_numerals_end(te_numerals n)
{
    te_float_mode_end(&n.mode);
    if (!n.c) return;
    uselocale(n.before);
    freelocale(n.c);
}

static inline double te_strtod(const char *text, char **end)
{
    te_numerals n = te_numerals_begin();
    double number = strtod(text, end);
    te_numerals_end(n);
    return number;
}

static inline int te_vsnprintf(char *text, size_t size, const char *format, va_list args)
{
    te_numerals n = te_numerals_begin();
    int length = vsnprintf(text, size, format, args);
    te_numerals_end(n);
    return length;
}

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static inline int te_snprintf(char *text, size_t size, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int length = te_vsnprintf(text, size, format, args);
    va_end(args);
    return length;
}

#endif
