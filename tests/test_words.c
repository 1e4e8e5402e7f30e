/* test_words.c - texts cut into the words of WordPiece. */
#include "core/words.h"

#include "faulty_io.h"
#include "test.h"

static const te_words_options all = {.clean = true, .chinese = true, .accents = true, .lowercase = true, .cuts = true};

/* The words of a text with "|" between. */
static te_status joined(const te_mem *mem, const te_words_options *options, const char *text, size_t size, char *out,
                        te_io_error *error)
{
    te_words  words = {.mem = mem};
    te_status status = te_words_cut(&words, options, text, size, error);
    size_t    begin = 0;
    for (size_t i = 0; status == TE_OK && i < words.n; begin = words.ends[i++]) {
        if (i) *out++ = '|';
        memcpy(out, words.bytes + begin, words.ends[i] - begin);
        out += words.ends[i] - begin;
    }
    *out = 0;
    te_words_free(&words);
    return status;
}

static void test_cases(void)
{
    static const struct {
        const char *text, *words;
    } cases[] = {
        {"", ""},
        {"  Hello,  World! ", "hello|,|world|!"},
        {"a\tb\nc\x0b" "d\x7f", "a|b|cd"}, /* other controls are nothing */
        {"\xc3\x89t\xc3\xa9 e\xcc\x81", "ete|e"},
        {"x\xe4\xb8\xad\xe6\x96\x87y", "x|\xe4\xb8\xad|\xe6\x96\x87|y"},
        {"\xc4\xb0I\xc4\xb1", "ii\xc4\xb1"},
        {"a\xff" "b\xe2\x80", "ab"}, /* no UTF-8 */
        {"a\xc2\xa0" "b\xe2\x80\x8b" "c\xe2\x80\xa6", "a|bc|\xe2\x80\xa6"},
        {"a\xe2\xb9\x93", "a\xe2\xb9\x93"}, /* punctuation that is newer than Unicode 8 */
    };
    char        out[128];
    te_io_error error;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK(joined(&te_mem_libc, &all, cases[i].text, strlen(cases[i].text), out, &error) == TE_OK);
        CHECK_MSG(strcmp(out, cases[i].words) == 0, "case %zu: %s", i, out);
    }
}

static void test_parts(void)
{
    char             out[128];
    te_io_error      error;
    te_words_options none = {.cuts = true}, small = {.lowercase = true}, apart = {.accents = true};
    CHECK(joined(&te_mem_libc, &none, "\xc3\x89 \x01", 4, out, &error) == TE_OK);
    CHECK(strcmp(out, "\xc3\x89|\x01") == 0);
    CHECK(joined(&te_mem_libc, &small, "\xc3\x89 A\xc4\xb0", 6, out, &error) == TE_OK);
    CHECK(strcmp(out, "\xc3\xa9 ai\xcc\x87") == 0);
    CHECK(joined(&te_mem_libc, &apart, "\xc3\x89 A", 4, out, &error) == TE_OK);
    CHECK(strcmp(out, "E A") == 0);
}

static void test_memory(void)
{
    static const char text[] = "a text of some words, each of which needs a place, \xc3\xa9 among them";
    char              out[128];
    faulty_mem        m;
    te_io_error       error;
    faulty_mem_init(&m);
    CHECK(joined(&m.mem, &all, text, sizeof text - 1, out, &error) == TE_OK && m.bytes == 0);
    for (long n = 1, calls = m.calls; n <= calls; n++) {
        m.calls = 0;
        m.fail_at = n;
        CHECK(joined(&m.mem, &all, text, sizeof text - 1, out, &error) == TE_ERROR_MEMORY);
        CHECK_MSG(m.bytes == 0, "allocation %ld: %lld bytes are left", n, (long long)m.bytes);
    }
}

int main(void)
{
    test_cases();
    test_parts();
    test_memory();
    return TEST_END();
}
