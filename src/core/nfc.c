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

static unsigned class_of(int32_t point) { return (unsigned)utf8proc_get_property(point)->combining_class; }

/* Takes every character apart: *n code points. */
static te_status decompose(te_nfc *nfc, const unsigned char *text, size_t size, size_t *n, te_io_error *error)
{
    enum { MOST = 8 }; /* of one character; 4 in Unicode 15 */
    int bound = 0;
    *n = 0;
    for (size_t at = 0; at < size;) {
        uint32_t point = 0;
        size_t   bytes = te_utf8_decode(text + at, size - at, &point);
        if (!bytes)
            return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "normalizing a text: byte %zu is no UTF-8", at + 1);
        at += bytes;
        if (!te_mem_grow(nfc->mem, &nfc->points, &nfc->capacity, *n + MOST, sizeof *nfc->points))
            return fail(error, 0);
        utf8proc_ssize_t parts =
            utf8proc_decompose_char((int32_t)point, nfc->points + *n, MOST, (utf8proc_option_t)OPTIONS, &bound);
        if (parts < 0 || parts > MOST) return fail(error, parts < 0 ? parts : UTF8PROC_ERROR_OVERFLOW);
        *n += (size_t)parts;
    }
    return TE_OK;
}

/* Sorts marks by their class, those of one class as they came. utf8proc does it by swapping neighbours, which takes
 * hours where a text is nothing but marks. */
static bool sort_marks(te_nfc *nfc, int32_t *marks, size_t n)
{
    size_t starts[257] = {0};
    if (n < 2) return true;
    if (!te_mem_grow(nfc->mem, &nfc->marks, &nfc->marks_capacity, n, sizeof *nfc->marks)) return false;
    memcpy(nfc->marks, marks, n * sizeof *marks);
    for (size_t i = 0; i < n; i++) starts[class_of(marks[i]) + 1]++;
    for (size_t c = 1; c < 257; c++) starts[c] += starts[c - 1];
    for (size_t i = 0; i < n; i++) marks[starts[class_of(nfc->marks[i])]++] = nfc->marks[i];
    return true;
}

static bool reorder(te_nfc *nfc, size_t n)
{
    for (size_t i = 0, end; i < n; i = end + 1) {
        for (end = i; end < n && class_of(nfc->points[end]) != 0; end++) continue;
        if (!sort_marks(nfc, nfc->points + i, end - i)) return false;
    }
    return true;
}

te_status te_nfc_normalize(te_nfc *nfc, const unsigned char **text, size_t *size, te_io_error *error)
{
    size_t n, length = 0;
    if (is_plain(*text, *size)) return TE_OK;
    te_status status = decompose(nfc, *text, *size, &n, error);
    if (status != TE_OK) return status;
    if (!reorder(nfc, n)) return fail(error, 0);
    utf8proc_ssize_t left =
        utf8proc_normalize_utf32(nfc->points, (utf8proc_ssize_t)n, (utf8proc_option_t)OPTIONS);
    if (left < 0) return fail(error, left);
    if (!te_mem_grow(nfc->mem, &nfc->bytes, &nfc->bytes_capacity, 4 * (size_t)left, 1))
        return fail(error, 0);
    for (utf8proc_ssize_t i = 0; i < left; i++)
        length += te_utf8_encode((uint32_t)nfc->points[i], nfc->bytes + length);
    *text = nfc->bytes;
    *size = length;
    return TE_OK;
}

void te_nfc_free(te_nfc *nfc)
{
    te_mem_free(nfc->mem, nfc->points, nfc->capacity * sizeof *nfc->points);
    te_mem_free(nfc->mem, nfc->marks, nfc->marks_capacity * sizeof *nfc->marks);
    te_mem_free(nfc->mem, nfc->bytes, nfc->bytes_capacity);
    *nfc = (te_nfc){.mem = nfc->mem};
}
