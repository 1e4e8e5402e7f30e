/* test_tokens_text.c - bytes and characters to ids and back, valid UTF-8 or not. */
#include "core/tokens.h"
#include "core/utf8.h"
#include "faulty_io.h"

/* The bytes of a character; U+DC80 to U+DCFF stand for bytes that are no UTF-8. */
static size_t point_bytes(uint32_t point, unsigned char bytes[4])
{
    if (point < 0xDC80 || point > 0xDCFF) return te_utf8_encode(point, bytes);
    bytes[0] = (unsigned char)(point - 0xDC00);
    return 1;
}

/* Collect, encode, decode; the text comes back. Returns the number of ids, or -1. */
static long text_round_trip(const te_mem *mem, const unsigned char *text, size_t size, te_io_error *error)
{
    uint32_t *points = NULL;
    size_t count = 0, n = 0, length = 0;
    te_text_table *table = NULL;
    if (te_text_points(mem, text, size, &points, &count, error) != TE_OK) return -1;
    int32_t *ids = malloc((size + 1) * sizeof *ids);
    unsigned char *back = malloc(size + 4);
    te_status status = te_text_table_new(&table, mem, points, count, error);
    if (status == TE_OK) status = te_text_table_encode(table, text, size, ids, &n, error);
    for (size_t i = 0; i < n; i++) {
        CHECK(ids[i] >= 0 && (size_t)ids[i] < count && length <= size);
        length += point_bytes(points[ids[i]], back + length);
    }
    if (status == TE_OK) CHECK(length == size && memcmp(back, text, size) == 0);
    for (size_t i = 1; i < count; i++) CHECK(points[i] > points[i - 1]);
    te_text_table_free(table);
    te_mem_free(mem, points, count * sizeof *points);
    free(ids);
    free(back);
    return status == TE_OK ? (long)n : -1;
}

static void test_characters(void)
{
    faulty_mem m;
    te_io_error error;
    faulty_mem_init(&m);
    static const struct {
        const char *text;
        long        ids;
    } cases[] = {
        {"", 0}, {"hello", 5}, {"h\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", 4}, {"\xff", 1}, {"\xc3", 1}, {"\xe2\x82", 2},
        {"\xf0\x9f\x98z", 4}, {"\xc0\x80", 2}, {"\xed\xb2\x80", 3}, {"\xf4\x90\x80\x80", 4}, {"\xf4\x8f\xbf\xbf", 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const unsigned char *text = (const unsigned char *)cases[i].text;
        long n = text_round_trip(&m.mem, text, strlen(cases[i].text), &error);
        CHECK_MSG(n == cases[i].ids, "case %zu: %ld ids", i, n);
    }
    unsigned char noise[4096];
    uint64_t random = 3;
    for (int round = 0; round < 50; round++) {
        for (size_t i = 0; i < sizeof noise; i++) { /* lead and continuation bytes are frequent */
            uint32_t r = test_random(&random);
            noise[i] = (unsigned char)(r & 0x300 ? r & 0xff : 0x80 | (r & 0x3f));
        }
        CHECK(text_round_trip(&m.mem, noise, sizeof noise, &error) > 0);
    }
    for (uint32_t p = 0; p < 0x110000; p++) { /* every code point through its bytes */
        unsigned char bytes[4];
        uint32_t back = 0;
        size_t n = te_utf8_encode(p, bytes), decoded = te_utf8_decode(bytes, n, &back);
        bool surrogate = p >= 0xD800 && p <= 0xDFFF;
        if (surrogate ? decoded != 0 : decoded != n || back != p) CHECK_MSG(false, "U+%04X", (unsigned)p);
    }
    for (long n = 1; n <= 3; n++) {
        m.calls = 0;
        m.fail_at = n;
        CHECK(text_round_trip(&m.mem, noise, 100, &error) == -1 && error.status == TE_ERROR_MEMORY && m.bytes == 0);
    }
    m.fail_at = 0;

    const uint32_t points[] = {'a', 'b', 0x20AC}, unsorted[] = {'b', 'a'}, outside[] = {0x110000};
    te_text_table *table;
    int32_t ids[8];
    size_t count;
    CHECK(te_text_table_new(&table, &m.mem, points, 3, &error) == TE_OK);
    CHECK(te_text_table_encode(table, (const unsigned char *)"b\xe2\x82\xac", 4, ids, &count, &error) == TE_OK);
    CHECK(count == 2 && ids[0] == 1 && ids[1] == 2);
    CHECK(te_text_table_encode(table, (const unsigned char *)"ab\xc3\xa9", 4, ids, &count, &error) != TE_OK);
    CHECK(error.status == TE_ERROR_ARGUMENT);
    CHECK_MSG(strstr(error.message, "offset 2: ") && strstr(error.message, "U+00E9"), "%s", error.message);
    te_text_table_free(table);
    CHECK(te_text_table_new(&table, &m.mem, unsorted, 2, &error) == TE_ERROR_ARGUMENT && !table);
    CHECK(te_text_table_new(&table, &m.mem, outside, 1, &error) == TE_ERROR_ARGUMENT && !table);
    CHECK(m.bytes == 0);
}

int main(void)
{
    test_characters();
    return TEST_END();
}
