/* test_bpe.c - byte-pair merges against merging as it is defined, pieces of texts, and memory that runs out. */
#include "core/nfc.h"
#include "core/regex.h"
#include "core/tokenizer.h"
#include "faulty_io.h"

enum { MOST_TOKENS = 512, MOST_BYTES = 4096 };

/* A vocabulary that grows by random merges of what is there: some bytes, then pairs. */
typedef struct random_table {
    te_bpe_token tokens[MOST_TOKENS];
    te_bpe_merge merges[MOST_TOKENS];
    char         bytes[MOST_TOKENS][32];
    size_t       n_tokens, n_merges, alphabet;
} random_table;

static uint32_t token_of(const random_table *r, const char *bytes, size_t size)
{
    for (size_t i = 0; i < r->n_tokens; i++)
        if (r->tokens[i].size == size && memcmp(r->tokens[i].bytes, bytes, size) == 0) return (uint32_t)i;
    return UINT32_MAX;
}

static uint32_t add_token(random_table *r, const char *bytes, size_t size)
{
    size_t id = r->n_tokens++;
    memcpy(r->bytes[id], bytes, size);
    r->tokens[id] = (te_bpe_token){r->bytes[id], size, true};
    return (uint32_t)id;
}

static void make_table(random_table *r, size_t alphabet, size_t n_merges, uint64_t *random)
{
    memset(r, 0, sizeof *r);
    r->alphabet = alphabet;
    for (size_t i = 0; i < alphabet; i++) add_token(r, &(char){(char)('a' + i)}, 1);
    while (r->n_merges < n_merges) {
        uint32_t left = test_random(random) % (uint32_t)r->n_tokens;
        uint32_t right = test_random(random) % (uint32_t)r->n_tokens;
        size_t   size = r->tokens[left].size + r->tokens[right].size;
        char     joined[64];
        if (size > 24) continue;
        memcpy(joined, r->tokens[left].bytes, r->tokens[left].size);
        memcpy(joined + r->tokens[left].size, r->tokens[right].bytes, r->tokens[right].size);
        uint32_t id = token_of(r, joined, size); /* several merges may give one token */
        r->merges[r->n_merges++] =
            (te_bpe_merge){left, right, id != UINT32_MAX ? id : add_token(r, joined, size)};
    }
}

/* Looks for the earliest merge of all neighbours, joins its leftmost pair, and begins again. */
static size_t merge_slowly(const random_table *r, const char *piece, size_t size, uint32_t *ids)
{
    size_t n = size;
    for (size_t i = 0; i < n; i++) ids[i] = token_of(r, piece + i, 1);
    for (;;) {
        size_t rank = SIZE_MAX, at = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            for (size_t k = r->n_merges; k-- > 0;) { /* of equal pairs the last counts */
                if (r->merges[k].left != ids[i] || r->merges[k].right != ids[i + 1]) continue;
                if (k < rank) {
                    rank = k;
                    at = i;
                }
                break;
            }
        }
        if (rank == SIZE_MAX) return n;
        ids[at] = r->merges[rank].id;
        memmove(ids + at + 1, ids + at + 2, (n - at - 2) * sizeof *ids);
        n--;
    }
}

static void compare(te_bpe *bpe, const random_table *r, const char *piece, size_t size)
{
    te_bpe_ids      ids = {.mem = &te_mem_libc};
    te_io_error     error;
    static uint32_t expected[MOST_BYTES];
    size_t          n = merge_slowly(r, piece, size, expected), same = 0;
    CHECK(te_bpe_encode(bpe, (const unsigned char *)piece, size, &ids, &error) == TE_OK);
    while (same < n && same < ids.n && (uint32_t)ids.ids[same] == expected[same]) same++;
    CHECK_MSG(same == n && ids.n == n, "%.*s: %zu of %zu tokens are as expected, %zu came", (int)size, piece, same, n,
              ids.n);
    te_bpe_ids_free(&ids);
}

static void test_merges(void)
{
    static random_table r;
    static char         piece[MOST_BYTES];
    uint64_t            random = 11;
    te_io_error         error;
    te_bpe             *bpe;
    for (int round = 0; round < 60; round++) {
        make_table(&r, 1 + test_random(&random) % 6, test_random(&random) % 200, &random);
        te_bpe_tables tables = {r.tokens, r.n_tokens, r.merges, r.n_merges, false, NULL, NULL};
        CHECK(te_bpe_new(&bpe, &te_mem_libc, &tables, &error) == TE_OK);
        for (int i = 0; i < 80; i++) {
            size_t size = i == 0 ? 700 : 1 + test_random(&random) % (i % 2 ? 10 : 60);
            for (size_t k = 0; k < size; k++) piece[k] = (char)('a' + test_random(&random) % r.alphabet);
            compare(bpe, &r, piece, size);
            compare(bpe, &r, piece, size); /* from what was kept */
        }
        for (size_t i = 0; i < r.n_tokens; i++) {
            size_t      size = 0;
            const char *bytes = te_bpe_bytes(bpe, i, &size);
            CHECK(size == r.tokens[i].size && memcmp(bytes, r.tokens[i].bytes, size) == 0);
            CHECK(te_bpe_find(bpe, bytes, size) == (int32_t)i);
        }
        size_t size;
        CHECK(!te_bpe_bytes(bpe, r.n_tokens, &size) && !te_bpe_bytes(bpe, UINT64_MAX, &size));
        te_bpe_free(bpe);
    }
}

/* Pieces of megabytes: n log n. */
static void test_long_piece(void)
{
    enum { SIZE = 1 << 20 };
    static const te_bpe_token tokens[] = {{"a", 1, true}, {"aa", 2, true}, {"aaaa", 4, true}, {"ab", 2, false}};
    static const te_bpe_merge merges[] = {{0, 0, 1}, {1, 1, 2}};
    te_bpe_tables             tables = {tokens, 4, merges, 2, false, NULL, NULL};
    te_bpe                   *bpe;
    te_io_error               error;
    te_bpe_ids                ids = {.mem = &te_mem_libc};
    unsigned char            *piece = malloc(SIZE);
    memset(piece, 'a', SIZE);
    CHECK(te_bpe_new(&bpe, &te_mem_libc, &tables, &error) == TE_OK);
    CHECK(te_bpe_encode(bpe, piece, SIZE - 1, &ids, &error) == TE_OK);
    CHECK(ids.n == SIZE / 4 + 1 && ids.ids[0] == 2 && ids.ids[ids.n - 2] == 1 && ids.ids[ids.n - 1] == 0);
    CHECK(te_bpe_encode(bpe, (const unsigned char *)"aab", 3, &ids, &error) == TE_ERROR_ARGUMENT);
    CHECK_MSG(strstr(error.message, "0x62"), "%s", error.message);
    CHECK(te_bpe_find(bpe, "ab", 2) == -1); /* no text leads there */
    size_t size = 0;
    CHECK(memcmp(te_bpe_bytes(bpe, 1, &size), "aa", 2) == 0 && size == 2);
    te_bpe_free(bpe);

    static const te_bpe_token decoded[] = {{"b", 1, true}, {"", 0, true}, {"<aaaa>", 6, true}, {"ab", 2, true}};
    tables.decoded = decoded;
    CHECK(te_bpe_new(&bpe, &te_mem_libc, &tables, &error) == TE_OK);
    ids.n = 0;
    CHECK(te_bpe_encode(bpe, piece, 5, &ids, &error) == TE_OK && ids.n == 2 && ids.ids[0] == 2 && ids.ids[1] == 0);
    CHECK(te_bpe_find(bpe, "aaaa", 4) == 2 && te_bpe_find(bpe, "<aaaa>", 6) == -1 && te_bpe_find(bpe, "b", 1) == -1);
    for (size_t i = 0; i < 4; i++) {
        const char *bytes = te_bpe_bytes(bpe, i, &size);
        CHECK(size == decoded[i].size && memcmp(bytes, decoded[i].bytes, size) == 0);
    }
    te_bpe_ids_free(&ids);
    te_bpe_free(bpe);
    free(piece);

    te_bpe_merge beyond = {0, 4, 1};
    tables = (te_bpe_tables){tokens, 4, &beyond, 1, false, NULL, NULL};
    CHECK(te_bpe_new(&bpe, &te_mem_libc, &tables, &error) == TE_ERROR_ARGUMENT);
    te_bpe_token twice[] = {{"a", 1, true}, {"a", 1, true}};
    tables = (te_bpe_tables){twice, 2, NULL, 0, false, NULL, NULL};
    CHECK(te_bpe_new(&bpe, &te_mem_libc, &tables, &error) == TE_ERROR_ARGUMENT);
}

/* Pieces that begin as characters: U+00E9 has a token, U+00E8 has not, and no byte but 'a'. */
static void test_characters(void)
{
    enum { FIRST_BYTE = 4 };
    static char               bytes[256];
    static te_bpe_token       tokens[FIRST_BYTE + 256] = {
        {"a", 1, true}, {"\xc3\xa9", 2, true}, {"a\xc3\xa9", 3, true}, {"a\xc3\xa9" "a", 4, true}};
    static const te_bpe_merge merges[] = {{0, 1, 2}, {2, 0, 3}, {FIRST_BYTE + 'b', FIRST_BYTE + 'b', 0}};
    static int32_t            fallback[256];
    static const struct {
        const char *text;
        int32_t     ids[6];
        size_t      n;
    } cases[] = {
        {"a\xc3\xa9" "aa", {3, 0}, 2},
        {"b\xc3\xa8\xc3\xa9", {4 + 'b', 4 + 0xc3, 4 + 0xa8, 1}, 4},
        {"\xc3" "a\xa9", {4 + 0xc3, 0, 4 + 0xa9}, 3}, /* bytes that are no character */
        {"abb", {0, 0}, 2},                           /* merges may join bytes, too */
    };
    te_io_error error;
    te_bpe     *bpe;
    for (int i = 0; i < 256; i++) {
        bytes[i] = (char)i;
        tokens[FIRST_BYTE + i] = (te_bpe_token){&bytes[i], 1, false};
        fallback[i] = FIRST_BYTE + i;
    }
    te_bpe_tables tables = {tokens, FIRST_BYTE + 256, merges, 3, false, fallback, NULL};
    CHECK(te_bpe_new(&bpe, &te_mem_libc, &tables, &error) == TE_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        te_bpe_ids ids = {.mem = &te_mem_libc};
        size_t     n = strlen(cases[i].text);
        CHECK(te_bpe_encode(bpe, (const unsigned char *)cases[i].text, n, &ids, &error) == TE_OK);
        bool same = ids.n == cases[i].n && memcmp(ids.ids, cases[i].ids, ids.n * sizeof *ids.ids) == 0;
        CHECK_MSG(same, "case %zu: %zu tokens came", i, ids.n);
        te_bpe_ids_free(&ids);
    }
    te_bpe_free(bpe);
    fallback[7] = FIRST_BYTE + 256;
    CHECK(te_bpe_new(&bpe, &te_mem_libc, &tables, &error) == TE_ERROR_ARGUMENT);
    CHECK_MSG(strstr(error.message, "0x07"), "%s", error.message);
}

/* --- texts -------------------------------------------------------------------------------------------------------- */

/* All bytes, "ab", " a", "<x>", "<x>y" and U+00E9. */
static te_status open_tokenizer(te_tokenizer **t, const te_mem *mem, const char *pattern, bool space,
                                te_io_error *error)
{
    static char         bytes[256];
    static te_bpe_token tokens[261];
    for (int i = 0; i < 256; i++) {
        bytes[i] = (char)i;
        tokens[i] = (te_bpe_token){&bytes[i], 1, true};
    }
    tokens[256] = (te_bpe_token){"ab", 2, true};
    tokens[257] = (te_bpe_token){" a", 2, true};
    tokens[258] = (te_bpe_token){"<x>", 3, false};
    tokens[259] = (te_bpe_token){"<x>y", 4, false};
    tokens[260] = (te_bpe_token){"\xc3\xa9", 2, false};
    static const te_bpe_merge   merges[] = {{'a', 'b', 256}, {' ', 'a', 257}};
    static const te_added_token added[] = {{"<x>", 3, 258, false}, {"<x>y", 4, 259, false},
                                           {"e\xcc\x81", 3, 260, true}}; /* normalized: U+00E9 */
    te_tokenizer_step    steps[] = {{pattern, strlen(pattern), false, false}, {NULL, 0, false, false}};
    te_tokenizer_options options = {
        .bpe = {tokens, 261, merges, 2, true, NULL, tokens}, .added = added, .n_added = 3, .steps = steps,
        .n_steps = space ? 2 : 1, .nfc = true};
    return te_tokenizer_new(t, mem, &options, error);
}

/* Ids as text: "256 258"; or the message. */
static const char *encoded(te_tokenizer *t, const char *text, size_t size)
{
    static char shown[1024];
    te_io_error error;
    te_bpe_ids  ids = {.mem = &te_mem_libc};
    if (te_tokenizer_encode(t, text, size, &ids, &error) != TE_OK) {
        te_bpe_ids_free(&ids);
        snprintf(shown, sizeof shown, "%s", error.message);
        return shown;
    }
    shown[0] = 0;
    for (size_t i = 0, at = 0; i < ids.n && at < sizeof shown - 8; i++)
        at += (size_t)snprintf(shown + at, sizeof shown - at, i ? " %d" : "%d", (int)ids.ids[i]);
    te_bpe_ids_free(&ids);
    return shown;
}

static void test_texts(void)
{
    static const struct {
        const char *pattern, *text, *ids;
        bool        space;
    } cases[] = {
        {"\\s+", "", "", true},
        {"\\s+", "ab  ab", "256 32 32 256", false},
        {"\\s+", "a b", "97 32 98", false}, /* no merge across a cut */
        {"[^ ]", "ab", "97 98", false},
        {"x*", "ab", "97 98", false},       /* empty matches cut */
        {"x*", "abxxb", "97 98 120 120 98", false},
        {"^b", "ab\nb", "256 10 98", false},
        {"q", "a", "257", true},
        {"q", " a", "257", true},
        {"q", "<x>ab<x>yab", "258 256 259 256", false},
        {"q", "<x<x>", "60 120 258", false},
        {"q", "a\xff" "ab", "97 255 256", false},
        {"q", "a\xff" "ab", "257 255 256", true}, /* a byte that is no UTF-8 is not where a text begins */
        {"q", "\xe2\x82", "226 130", false},
        {"q", "e\xcc\x81" "b\xc3\xa9", "260 98 260", false},
        {"q", "<x>\xcc\x81", "258 204 129", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        te_tokenizer *t;
        te_io_error   error;
        CHECK(open_tokenizer(&t, &te_mem_libc, cases[i].pattern, cases[i].space, &error) == TE_OK);
        const char *ids = encoded(t, cases[i].text, strlen(cases[i].text));
        CHECK_MSG(strcmp(ids, cases[i].ids) == 0, "case %zu: %s instead of %s", i, ids, cases[i].ids);
        CHECK(te_tokenizer_find(t, "<x>y", 4) == 259 && te_tokenizer_find(t, "ab", 2) == 256);
        CHECK(te_tokenizer_find(t, "<x>yy", 5) == -1 && te_tokenizer_find(t, "", 0) == -1);
        te_tokenizer_free(t);
    }
}

/* A group that repeats takes the stack of the machine code; the interpreter goes on from there, up to its limit. */
static void test_patterns(void)
{
    te_regex   *regex;
    te_io_error error;
    size_t      begin, end, size = 3000000;
    CHECK(te_regex_new(&regex, &te_mem_libc, "a(b", 3, false, &error) == TE_ERROR_ARGUMENT);
    CHECK_MSG(strstr(error.message, "offset 3"), "%s", error.message);
    CHECK(te_regex_new(&regex, &te_mem_libc, "a(b", 3, true, &error) == TE_OK);
    CHECK(te_regex_find(regex, (const unsigned char *)"a(a(b", 5, 0, &begin, &end, &error) == TE_OK);
    CHECK(begin == 2 && end == 5);
    CHECK(te_regex_find(regex, (const unsigned char *)"a(a(b", 5, 3, &begin, &end, &error) == TE_OK);
    CHECK(begin == SIZE_MAX);
    te_regex_free(regex);
    char *text = malloc(size);
    memset(text, 'a', size);
    CHECK(te_regex_new(&regex, &te_mem_libc, "(?:a|b)+", 8, false, &error) == TE_OK);
    CHECK(te_regex_find(regex, (const unsigned char *)text, size, 0, &begin, &end, &error) == TE_OK);
    CHECK(begin == 0 && end == size);
    te_regex_free(regex);
    CHECK(te_regex_new(&regex, &te_mem_libc, "(?:a+)+b", 8, false, &error) == TE_OK);
    CHECK(te_regex_find(regex, (const unsigned char *)text, 60, 0, &begin, &end, &error) == TE_OK || error.message[0]);
    te_regex_free(regex);
    free(text);
}

/* Marks by their class, of one class as they came, in any number; composed afterwards. */
static void test_normalization(void)
{
    static const struct {
        const char *from, *to;
    } cases[] = {
        {"plain \xc3\xa9", "plain \xc3\xa9"},
        {"e\xcc\x81", "\xc3\xa9"},
        {"a\xcc\x81\xcc\xa3", "\xe1\xba\xa1\xcc\x81"}, /* the dot below goes first */
        {"a\xcc\xa3\xcc\x81", "\xe1\xba\xa1\xcc\x81"},
        {"\xe2\x84\xab", "\xc3\x85"}, /* the sign of the angstrom */
        {"\xe1\x84\x92\xe1\x85\xa1\xe1\x86\xab", "\xed\x95\x9c"},
        {"\xe0\xa5\x98", "\xe0\xa4\x95\xe0\xa4\xbc"}, /* excluded from composition */
    };
    te_nfc      nfc = {.mem = &te_mem_libc};
    te_io_error error;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const unsigned char *text = (const unsigned char *)cases[i].from;
        size_t               size = strlen(cases[i].from);
        CHECK(te_nfc_normalize(&nfc, &text, &size, &error) == TE_OK);
        CHECK_MSG(size == strlen(cases[i].to) && memcmp(text, cases[i].to, size) == 0, "case %zu", i);
    }
    enum { MARKS = 200000 }; /* by swapping neighbours this would take minutes */
    unsigned char *marks = malloc(4 * MARKS);
    for (size_t i = 0; i < MARKS; i++) memcpy(marks + 4 * i, "\xcc\x81\xcc\xa3", 4);
    const unsigned char *text = marks;
    size_t               size = 4 * MARKS;
    CHECK(te_nfc_normalize(&nfc, &text, &size, &error) == TE_OK && size == 4 * MARKS);
    CHECK(memcmp(text, "\xcc\xa3\xcc\xa3", 4) == 0 && memcmp(text + size - 4, "\xcc\x81\xcc\x81", 4) == 0);
    te_nfc_free(&nfc);
    free(marks);
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* Opens a tokenizer and encodes a text that needs all of its memory. */
static te_status scenario(const te_mem *mem, te_io_error *error)
{
    static const char text[] = "ab ab<x>a e\xcc\x81\xcc\xa3\xff the end of a longer piece is not kept";
    te_tokenizer     *t = NULL;
    te_bpe_ids        ids = {.mem = mem};
    te_status         status = open_tokenizer(&t, mem, "\\s+(?!\\S)|\\p{L}+", true, error);
    if (status == TE_OK) status = te_tokenizer_encode(t, text, sizeof text - 1, &ids, error);
    if (status == TE_OK) CHECK(ids.n > 40);
    te_bpe_ids_free(&ids);
    te_tokenizer_free(t);
    return status;
}

static void test_memory(void)
{
    faulty_mem  m;
    te_io_error error;
    faulty_mem_init(&m);
    CHECK(scenario(&m.mem, &error) == TE_OK && m.bytes == 0);
    long calls = m.calls, failed = 0;
    for (long n = 1; n <= calls; n++) {
        m.calls = 0;
        m.fail_at = n;
        te_status status = scenario(&m.mem, &error);
        failed += status != TE_OK; /* without memory for machine code an expression is interpreted */
        CHECK_MSG(status == TE_OK || status == TE_ERROR_MEMORY, "allocation %ld: %s", n, error.message);
        CHECK_MSG(m.bytes == 0, "allocation %ld: %lld bytes are left", n, (long long)m.bytes);
    }
    CHECK_MSG(failed > calls / 2, "%ld of %ld", failed, calls);
}

int main(void)
{
    test_merges();
    test_long_piece();
    test_characters();
    test_texts();
    test_patterns();
    test_normalization();
    test_memory();
    return TEST_END();
}
