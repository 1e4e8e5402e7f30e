/* pack_sources.c - run by the build: writes the embedded Lua sources once more, packed.
 *
 * usage: te_pack_sources FILE
 *
 * Packed is what te_lua_unpack reads: blocks of LZ4's format (token, literals, offset of two bytes, least match of 4).
 * Of all matches at a place the longest is taken, unless the next place has a longer one.
 */
#include "lua_bindings/bindings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST = 4, WINDOW = 65535, HASH_BITS = 12 };

/* `last` has the latest place for each hash of LEAST bytes, `before` the place before each place; from 1. */
typedef struct packer {
    const unsigned char *text;
    size_t               size, last[1 << HASH_BITS], *before;
    unsigned char       *out;
} packer;

static size_t *bucket(packer *p, size_t at)
{
    uint32_t word;
    memcpy(&word, p->text + at, sizeof word);
    return &p->last[word * 2654435761u >> (32 - HASH_BITS)];
}

static void enter(packer *p, size_t at)
{
    if (at + LEAST > p->size) return;
    size_t *last = bucket(p, at);
    p->before[at] = *last;
    *last = at + 1;
}

/* Returns the length of the longest match at `at`, 0 for none. */
static size_t longest(packer *p, size_t at, size_t *offset)
{
    size_t best = LEAST - 1;
    if (at + LEAST > p->size) return 0;
    for (size_t from = *bucket(p, at); from && at - (from - 1) <= WINDOW; from = p->before[from - 1]) {
        size_t n = 0;
        while (at + n < p->size && p->text[from - 1 + n] == p->text[at + n]) n++;
        if (n > best) {
            best = n;
            *offset = at - (from - 1);
        }
    }
    return best < LEAST ? 0 : best;
}

/* What four bits of the token did not hold of a length. */
static void write_length(packer *p, size_t length)
{
    if (length < 15) return;
    for (length -= 15; length >= 255; length -= 255) *p->out++ = 255;
    *p->out++ = (unsigned char)length;
}

/* match 0: literals are the end */
static void write_sequence(packer *p, const unsigned char *literals, size_t n, size_t match, size_t offset)
{
    size_t more = match ? match - LEAST : 0;
    *p->out++ = (unsigned char)((n < 15 ? n : 15) << 4 | (more < 15 ? more : 15));
    write_length(p, n);
    memcpy(p->out, literals, n);
    p->out += n;
    if (!match) return;
    *p->out++ = (unsigned char)(offset & 255);
    *p->out++ = (unsigned char)(offset >> 8);
    write_length(p, more);
}

/* Returns how many bytes of `out` are taken. */
static size_t pack(packer *p, unsigned char *out)
{
    size_t from = 0, at = 0;
    memset(p->last, 0, sizeof p->last);
    p->out = out;
    while (at < p->size) {
        size_t offset = 0, after = 0, n = longest(p, at, &offset);
        enter(p, at);
        if (!n || longest(p, at + 1, &after) > n) {
            at++;
            continue;
        }
        write_sequence(p, p->text + from, at - from, n, offset);
        for (size_t end = at + n; ++at < end;) enter(p, at);
        from = at;
    }
    write_sequence(p, p->text + from, at - from, 0, 0);
    return (size_t)(p->out - out);
}

static void fail(const char *what)
{
    fprintf(stderr, "te_pack_sources: %s\n", what);
    exit(1);
}

int main(int argc, char **argv)
{
    FILE *file = argc == 2 ? fopen(argv[1], "w") : NULL;
    if (!file) fail(argc == 2 ? "cannot write the file" : "the name of the file to write is needed");
    fputs("/* Made from lua/te by cmake/pack_sources.c. */\n#include \"lua_bindings/bindings.h\"\n\n", file);
    for (const te_lua_source *s = te_lua_sources; s->name; s++) {
        packer         p = {.text = s->packed, .size = s->size, .before = calloc(s->size + 1, sizeof(size_t))};
        unsigned char *packed = malloc(2 * s->size + 64), *again = malloc(s->size + 1);
        if (!p.before || !packed || !again) fail("out of memory");
        te_lua_source made = {s->name, s->file, packed, pack(&p, packed), s->size};
        if (made.packed_size >= s->size) made = *s;
        te_lua_unpack(&made, again);
        if (memcmp(again, s->packed, s->size) != 0) fail(s->file);
        fprintf(file, "static const unsigned char source_%d[] = {", (int)(s - te_lua_sources));
        for (size_t i = 0; i < made.packed_size; i++) fprintf(file, "%d,", made.packed[i]);
        fputs(made.packed_size ? "};\n" : "0};\n", file);
        free(again);
        free(packed);
        free(p.before);
    }
    fputs("\nconst te_lua_source te_lua_sources[] = {\n", file);
    for (const te_lua_source *s = te_lua_sources; s->name; s++) {
        int i = (int)(s - te_lua_sources);
        fprintf(file, "    {\"%s\", \"%s\", source_%d, sizeof source_%d, %zu},\n", s->name, s->file, i, i, s->size);
    }
    fputs("    {0, 0, 0, 0, 0},\n};\n", file);
    if (ferror(file) || fclose(file) != 0) fail("cannot write the file");
    return 0;
}
