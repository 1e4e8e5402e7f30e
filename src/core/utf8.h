/* utf8.h - one code point at a time. */
#ifndef TE_CORE_UTF8_H
#define TE_CORE_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* Bytes of the code point at the start of text (1 to 4), or 0 where the text is not UTF-8: stray or missing
 * continuation bytes, overlong forms, surrogates, values above 0x10FFFF. size is at least 1. */
static inline size_t te_utf8_decode(const unsigned char *text, size_t size, uint32_t *point)
{
    unsigned c = text[0];
    if (c < 0x80) {
        *point = c;
        return 1;
    }
    size_t length = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : 2;
    if (c < 0xC2 || c > 0xF4 || length > size) return 0;
    uint32_t p = c & (0x7Fu >> length);
    for (size_t i = 1; i < length; i++) {
        if ((text[i] & 0xC0) != 0x80) return 0;
        p = p << 6 | (text[i] & 0x3Fu);
    }
    if ((length == 3 && p < 0x800) || (length == 4 && p < 0x10000)) return 0;
    if (p > 0x10FFFF || (p >= 0xD800 && p <= 0xDFFF)) return 0;
    *point = p;
    return length;
}

/* The bytes of a code point; their number. */
static inline size_t te_utf8_encode(uint32_t point, unsigned char bytes[4])
{
    if (point < 0x80) {
        bytes[0] = (unsigned char)point;
        return 1;
    }
    size_t length = point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--) {
        bytes[i] = (unsigned char)(0x80 | (point & 0x3F));
        point >>= 6;
    }
    bytes[0] = (unsigned char)((0xF00u >> length & 0xF0) | point);
    return length;
}

#endif
