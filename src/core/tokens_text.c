/* tokens_text.c - the loops over text that byte and character tokenizers need. */
#include "tokens.h"
#include "utf8.h"

enum { ESCAPE = 0xDC00, POINTS = 0x110000, PAGE = 256, PAGES = POINTS / PAGE };

/* The character at the start of a text; its number of bytes. */
static size_t next_point(const unsigned char *text, size_t size, uint32_t *point)
{
    size_t n = te_utf8_decode(text, size, point);
    if (n) return n;
    *point = ESCAPE + text[0];
    return 1;
}

te_status te_text_points(const te_mem *mem, const unsigned char *text, size_t size, uint32_t **points, size_t *count,
                         te_io_error *error)
{
    te_status status = TE_OK;
    uint8_t *seen = te_mem_zalloc(mem, POINTS); /* a byte per code point */
    if (!seen) return te_io_fail(error, TE_ERROR_MEMORY, NULL, "out of memory collecting characters");
    size_t n = 0;
    for (size_t at = 0; at < size;) {
        uint32_t point;
        at += next_point(text + at, size - at, &point);
        n += !seen[point];
        seen[point] = 1;
    }
    uint32_t *list = te_mem_alloc(mem, n * sizeof *list);
    if (list) {
        *points = list;
        *count = n;
        for (uint32_t p = 0; p < POINTS; p++)
            if (seen[p]) *list++ = p;
    } else {
        status = te_io_fail(error, TE_ERROR_MEMORY, NULL, "out of memory for %zu characters", n);
    }
    te_mem_free(mem, seen, POINTS);
    return status;
}

/* --- vocabularies ----------------------------------------------------------------------------------------------- */

/* Two levels: the page of a code point, then its id. Page 0 holds no ids; others exist where points occur. */
struct te_text_table {
    const te_mem *mem;
    size_t        size; /* of this block */
    uint16_t      page[PAGES];
    int32_t       ids[][PAGE];
};

static te_status check_points(const uint32_t *points, size_t count, size_t *pages, te_io_error *error)
{
    *pages = 1;
    for (size_t i = 0; i < count; i++) {
        if (points[i] >= POINTS || (i > 0 && points[i] <= points[i - 1]))
            return te_io_fail(error, TE_ERROR_ARGUMENT, NULL,
                              "characters must ascend and end at U+10FFFF: number %zu is U+%04X", i,
                              (unsigned)points[i]);
        *pages += i == 0 || points[i] / PAGE != points[i - 1] / PAGE;
    }
    return TE_OK;
}

te_status te_text_table_new(te_text_table **out, const te_mem *mem, const uint32_t *points, size_t count,
                            te_io_error *error)
{
    *out = NULL;
    size_t pages;
    te_status status = check_points(points, count, &pages, error);
    if (status != TE_OK) return status;
    size_t size = sizeof(te_text_table) + pages * sizeof(int32_t[PAGE]);
    te_text_table *t = te_mem_zalloc(mem, size);
    if (!t) return te_io_fail(error, TE_ERROR_MEMORY, NULL, "out of memory for %zu characters", count);
    t->mem = mem;
    t->size = size;
    memset(t->ids, 0xFF, pages * sizeof *t->ids); /* -1 */
    uint16_t used = 0;
    for (size_t i = 0; i < count; i++) {
        uint16_t *page = &t->page[points[i] / PAGE];
        if (*page == 0) *page = ++used;
        t->ids[*page][points[i] % PAGE] = (int32_t)i;
    }
    *out = t;
    return TE_OK;
}

void te_text_table_free(te_text_table *t)
{
    if (t) te_mem_free(t->mem, t, t->size);
}

te_status te_text_table_encode(const te_text_table *t, const unsigned char *text, size_t size, int32_t *ids,
                               size_t *n_ids, te_io_error *error)
{
    size_t n = 0;
    for (size_t at = 0; at < size;) {
        uint32_t point;
        size_t bytes = next_point(text + at, size - at, &point);
        int32_t id = t->ids[t->page[point / PAGE]][point % PAGE];
        if (id < 0 && point >= ESCAPE && point < ESCAPE + 256)
            return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "offset %zu: the vocabulary has no byte 0x%02x", at,
                              (unsigned)(point - ESCAPE));
        if (id < 0)
            return te_io_fail(error, TE_ERROR_ARGUMENT, NULL,
                              "offset %zu: the vocabulary has no character U+%04X \"%.*s\"", at, (unsigned)point,
                              (int)bytes, (const char *)text + at);
        ids[n++] = id;
        at += bytes;
    }
    *n_ids = n;
    return TE_OK;
}
