/* regex.c - PCRE2 behind a te_mem. */
#include "regex.h"

#include <stdio.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

struct te_regex {
    const te_mem          *mem;
    pcre2_general_context *general; /* the memory of the others */
    pcre2_code            *code;
    pcre2_match_data      *match;
};

/* PCRE2 does not say how much it gives back, so a block begins with its size. */
enum { HEADER = 16 };

static void *allocate(size_t size, void *user)
{
    if (size > SIZE_MAX - HEADER) return NULL;
    size_t *block = te_mem_alloc(user, size + HEADER);
    if (!block) return NULL;
    *block = size + HEADER;
    return (char *)block + HEADER;
}

static void release(void *ptr, void *user)
{
    if (!ptr) return;
    size_t *block = (size_t *)(void *)((char *)ptr - HEADER);
    te_mem_free(user, block, *block);
}

static te_status fail(te_io_error *error, int code, const char *what)
{
    PCRE2_UCHAR reason[160];
    if (code == PCRE2_ERROR_NOMEMORY) return te_io_fail(error, TE_ERROR_MEMORY, NULL, "out of memory %s", what);
    pcre2_get_error_message(code, reason, sizeof reason);
    return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "%s: %s", what, (const char *)reason);
}

static te_status compile(te_regex *r, const char *pattern, size_t size, bool literal, te_io_error *error)
{
    uint32_t   options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C);
    int        code;
    PCRE2_SIZE at;
    pcre2_compile_context *context = pcre2_compile_context_create(r->general);
    if (!context) return fail(error, PCRE2_ERROR_NOMEMORY, "for a regular expression");
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    r->code = pcre2_compile((PCRE2_SPTR)pattern, size, options, &code, &at, context);
    pcre2_compile_context_free(context);
    if (!r->code) {
        char what[128];
        snprintf(what, sizeof what, "in the regular expression \"%.*s\", at offset %zu", size < 64 ? (int)size : 64,
                 pattern, (size_t)at);
        return fail(error, code == PCRE2_ERROR_HEAP_FAILED ? PCRE2_ERROR_NOMEMORY : code, what);
    }
    pcre2_jit_compile(r->code, PCRE2_JIT_COMPLETE); /* without machine code the expression is interpreted */
    r->match = pcre2_match_data_create(1, r->general);
    return r->match ? TE_OK : fail(error, PCRE2_ERROR_NOMEMORY, "for a regular expression");
}

te_status te_regex_new(te_regex **out, const te_mem *mem, const char *pattern, size_t size, bool literal,
                       te_io_error *error)
{
    *out = NULL;
    te_regex *r = te_mem_zalloc(mem, sizeof *r);
    if (!r) return fail(error, PCRE2_ERROR_NOMEMORY, "for a regular expression");
    r->mem = mem;
    r->general = pcre2_general_context_create(allocate, release, (void *)(uintptr_t)mem);
    te_status status = r->general ? compile(r, pattern, size, literal, error)
                                  : fail(error, PCRE2_ERROR_NOMEMORY, "for a regular expression");
    if (status == TE_OK)
        *out = r;
    else
        te_regex_free(r);
    return status;
}

void te_regex_free(te_regex *r)
{
    if (!r) return;
    pcre2_match_data_free(r->match);
    pcre2_code_free(r->code);
    pcre2_general_context_free(r->general);
    te_mem_free(r->mem, r, sizeof *r);
}

te_status te_regex_find(te_regex *r, const unsigned char *text, size_t size, size_t from, size_t *begin, size_t *end,
                        te_io_error *error)
{
    int found = pcre2_match(r->code, text, size, from, PCRE2_NO_UTF_CHECK, r->match, NULL);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) /* the interpreter has the heap */
        found = pcre2_match(r->code, text, size, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, r->match, NULL);
    if (found < 0 && found != PCRE2_ERROR_NOMATCH) return fail(error, found, "matching a regular expression");
    const PCRE2_SIZE *place = pcre2_get_ovector_pointer(r->match);
    *begin = found < 0 ? SIZE_MAX : place[0];
    *end = found < 0 ? SIZE_MAX : place[1];
    return TE_OK;
}
