/* unpack.c - the text of an embedded Lua source, which the build has packed (cmake/pack_sources.c). */
#include "bindings.h"

/* The rest of a length of which the token held 15. */
static size_t further(const unsigned char **in, size_t length)
{
    while (length >= 15) {
        unsigned char next = *(*in)++;
        length += next;
        if (next < 255) break;
    }
    return length;
}

void te_lua_unpack(const te_lua_source *source, unsigned char *to)
{
    const unsigned char *in = source->packed, *end = in + source->packed_size;
    if (source->packed_size == source->size) {
        memcpy(to, in, source->size);
        return;
    }
    for (;;) {
        unsigned char token = *in++;
        size_t        literals = further(&in, token >> 4);
        memcpy(to, in, literals);
        to += literals;
        in += literals;
        if (in == end) return;
        size_t offset = in[0] | (size_t)in[1] << 8;
        in += 2;
        for (size_t n = further(&in, token & 15) + 4; n > 0; n--, to++) *to = to[-(ptrdiff_t)offset];
    }
}
