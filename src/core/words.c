/* words.c - one code point at a time. */
#include "words.h"

#include "utf8.h"

#include <utf8proc.h>

enum { REPLACEMENT = 0xFFFD, MOST = 8 }; /* MOST: parts of one character; 4 in Unicode 15 */

typedef struct cutter {
    te_words               *words;
    const te_words_options *options;
    size_t                  begin; /* of the word at hand */
    bool                    memory; /* there was enough */
} cutter;

/* Where marks, punctuation and formats are that are newer than Unicode 8, the tokenizers library's: it knows none. */
static const uint32_t newer[][2] = {
    {0x61D, 0x61D}, {0x7FD, 0x7FD}, {0x890, 0x8E2}, {0x9FD, 0x9FE}, {0xA76, 0xA76}, {0xAFA, 0xAFF}, {0xB55, 0xB55},
    {0xC04, 0xC3C}, {0xC77, 0xC77}, {0xC84, 0xC84}, {0xD00, 0xD00}, {0xD3B, 0xD3C}, {0xD81, 0xD81}, {0xEBA, 0xEBA},
    {0xECE, 0xECE}, {0x180F, 0x1886}, {0x1ABF, 0x1ACE}, {0x1B7D, 0x1B7E}, {0x1DF6, 0x1DFB}, {0x2E43, 0x2E5D},
    {0xA82C, 0xA82C}, {0xA8C5, 0xA8C5}, {0xA8FF, 0xA8FF}, {0xA9BD, 0xA9BD}, {0x10D24, 0x10F89}, {0x11070, 0x11074},
    {0x110C2, 0x110CD}, {0x111CF, 0x111CF}, {0x1123E, 0x11241}, {0x1133B, 0x1133B}, {0x11438, 0x1145E},
    {0x11660, 0x1166C}, {0x116B9, 0x116B9}, {0x1182F, 0x11FFF}, {0x12FF1, 0x13455}, {0x16E97, 0x16F4F},
    {0x16FE2, 0x16FE4}, {0x1CF00, 0x1CF46}, {0x1E000, 0x1E4EF}, {0x1E944, 0x1E95F}};

static bool is_in(const uint32_t (*ranges)[2], size_t n, uint32_t c)
{
    for (size_t i = 0; i < n && c >= ranges[i][0]; i++)
        if (c <= ranges[i][1]) return true;
    return false;
}

/* Two characters were something else then. */
static utf8proc_category_t category_of(uint32_t c)
{
    if (c >= newer[0][0] && is_in(newer, sizeof newer / sizeof *newer, c)) return UTF8PROC_CATEGORY_CN;
    if (c == 0x166D) return UTF8PROC_CATEGORY_PO;
    return c == 0x1734 ? UTF8PROC_CATEGORY_MN : utf8proc_category((int32_t)c);
}

static bool is_space(uint32_t c)
{
    if (c < 0x80) return c == ' ' || (c >= '\t' && c <= '\r');
    if (c == 0x85) return true;
    utf8proc_category_t category = category_of(c);
    return category == UTF8PROC_CATEGORY_ZS || category == UTF8PROC_CATEGORY_ZL || category == UTF8PROC_CATEGORY_ZP;
}

/* Characters without a category stay. */
static bool is_control(uint32_t c)
{
    if (c == '\t' || c == '\n' || c == '\r') return false;
    utf8proc_category_t category = category_of(c);
    return category == UTF8PROC_CATEGORY_CC || category == UTF8PROC_CATEGORY_CF || category == UTF8PROC_CATEGORY_CO;
}

static bool is_punctuation(uint32_t c)
{
    if (c < 0x80)
        return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') || (c >= '{' && c <= '~');
    utf8proc_category_t category = category_of(c);
    return category >= UTF8PROC_CATEGORY_PC && category <= UTF8PROC_CATEGORY_PO;
}

static bool is_ideograph(uint32_t c)
{
    static const uint32_t ranges[][2] = {{0x3400, 0x4DBF},   {0x4E00, 0x9FFF},   {0xF900, 0xFAFF},  {0x20000, 0x2A6DF},
                                         {0x2A700, 0x2B81F}, {0x2B920, 0x2CEAF}, {0x2F800, 0x2FA1F}};
    return is_in(ranges, sizeof ranges / sizeof *ranges, c);
}

static void end_word(cutter *u)
{
    te_words *w = u->words;
    if (w->size == u->begin) return;
    if (!te_mem_grow(w->mem, &w->ends, &w->ends_capacity, w->n + 1, sizeof *w->ends)) {
        u->memory = false;
        return;
    }
    w->ends[w->n++] = u->begin = w->size;
}

/* What stands in the normalized text. */
static void put(cutter *u, uint32_t c)
{
    te_words *w = u->words;
    bool      alone = u->options->cuts && is_punctuation(c);
    if (u->options->cuts && is_space(c)) {
        end_word(u);
        return;
    }
    if (alone) end_word(u);
    if (!te_mem_grow(w->mem, &w->bytes, &w->capacity, w->size + 4, 1)) {
        u->memory = false;
        return;
    }
    w->size += te_utf8_encode(c, w->bytes + w->size);
    if (alone) end_word(u);
}

/* Only of one capital are two characters the small one. */
static void put_cased(cutter *u, uint32_t c)
{
    if (!u->options->lowercase) {
        put(u, c);
    } else if (c == 0x130) {
        put(u, 'i');
        put(u, 0x307);
    } else {
        put(u, (uint32_t)utf8proc_tolower((int32_t)c));
    }
}

static bool put_parts(cutter *u, uint32_t c)
{
    int32_t          parts[MOST];
    int              bound = 0;
    utf8proc_ssize_t n = utf8proc_decompose_char((int32_t)c, parts, MOST,
                                                 (utf8proc_option_t)(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE), &bound);
    if (n < 0 || n > MOST) return false;
    for (utf8proc_ssize_t i = 0; i < n; i++)
        if (category_of((uint32_t)parts[i]) != UTF8PROC_CATEGORY_MN) put_cased(u, (uint32_t)parts[i]);
    return true;
}

static bool put_character(cutter *u, uint32_t c)
{
    const te_words_options *o = u->options;
    if (o->clean) {
        if (c == 0 || c == REPLACEMENT || is_control(c)) return true;
        if (is_space(c)) c = ' ';
    }
    bool apart = o->chinese && is_ideograph(c), fine = true;
    if (apart) put(u, ' ');
    if (o->accents && c >= 0xC0)
        fine = put_parts(u, c);
    else
        put_cased(u, c);
    if (apart) put(u, ' ');
    return fine;
}

te_status te_words_cut(te_words *words, const te_words_options *options, const char *text, size_t size,
                       te_io_error *error)
{
    const unsigned char *bytes = (const unsigned char *)text;
    cutter               u = {.words = words, .options = options, .begin = words->size, .memory = true};
    for (size_t at = 0; at < size && u.memory;) {
        uint32_t c = REPLACEMENT;
        size_t   length = te_utf8_decode(bytes + at, size - at, &c);
        if (!length) c = REPLACEMENT;
        if (!put_character(&u, c))
            return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "cutting a text: character U+%04X has too many parts", c);
        at += length ? length : 1;
    }
    end_word(&u);
    if (!u.memory) return te_io_fail(error, TE_ERROR_MEMORY, NULL, "out of memory cutting a text");
    return TE_OK;
}

void te_words_free(te_words *words)
{
    te_mem_free(words->mem, words->bytes, words->capacity);
    te_mem_free(words->mem, words->ends, words->ends_capacity * sizeof *words->ends);
    *words = (te_words){.mem = words->mem};
}
