/* nfc.c - code points taken apart, put in order and put together again. */
#include "nfc.h"

#include "utf8.h"

#include <utf8proc.h>

enum { OPTIONS = UTF8PROC_STABLE | UTF8PROC_COMPOSE };

/* Whether all characters are below U+0300. None of them changes by itself, and those that change others lie above. */
static bool is_plain(const unsigned char *text, size_t size)
{
    unsigned char most = 0;
    for (size_t i = 0; i < size; i++) most = text[i] > most ? text[i] : most;
    return most < 0xCC; /* U+0300 is 0xCC 0x80 */
}

static te_status fail(te_io_error *error, utf8proc_ssize_t code)
{
    if (code == UTF8PROC_ERROR_NOMEM || code == 0)
        return te_io_fail(error, TE_ERROR_MEMORY, NULL, "out of memory normalizing a text");
    return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "normalizing a text: %s", utf8proc_errmsg(code));
}

te_status te_nfc_normalize(te_nfc *nfc, const unsigned char **text, size_t *size, te_io_error *error)
{
    if (is_plain(*text, *size)) return TE_OK;
    utf8proc_ssize_t n = utf8proc_decompose(*text, (utf8proc_ssize_t)*size, NULL, 0, OPTIONS);
    if (n < 0) return fail(error, n);
    if (!te_mem_grow(nfc->mem, (void **)&nfc->points, &nfc->capacity, (size_t)n, sizeof *nfc->points))
        return fail(error, 0);
    n = utf8proc_decompose(*text, (utf8proc_ssize_t)*size, nfc->points, n, OPTIONS);
    if (n >= 0) n = utf8proc_normalize_utf32(nfc->points, n, OPTIONS);
    if (n < 0) return fail(error, n);
    if (!te_mem_grow(nfc->mem, (void **)&nfc->bytes, &nfc->bytes_capacity, 4 * (size_t)n, 1)) return fail(error, 0);
    size_t length = 0;
    for (utf8proc_ssize_t i = 0; i < n; i++)
        length += te_utf8_encode((uint32_t)nfc->points[i], nfc->bytes + length);
    *text = nfc->bytes;
    *size = length;
    return TE_OK;
}

void te_nfc_free(te_nfc *nfc)
{
    te_mem_free(nfc->mem, nfc->points, nfc->capacity * sizeof *nfc->points);
    te_mem_free(nfc->mem, nfc->bytes, nfc->bytes_capacity);
    *nfc = (te_nfc){.mem = nfc->mem};
}
