/* program_source_text.c - see program_source_text.h. */
#include "program_source_text.h"

#include "../numerals.h"

void te_text_open(te_text *text, const te_mem *mem) { *text = (te_text){.mem = mem}; }

void te_text_close(te_text *text)
{
    te_mem_free(text->mem, text->data, text->capacity);
    text->data = NULL;
    text->length = text->capacity = 0;
}

static bool reserve(te_text *text, size_t length)
{
    if (text->failed || length >= SIZE_MAX - text->length) return false;
    text->failed = !te_mem_grow(text->mem, &text->data, &text->capacity, text->length + length + 1, 1);
    return !text->failed;
}

void te_text_write(te_text *text, const char *bytes, size_t length)
{
    if (!reserve(text, length)) return;
    memcpy(text->data + text->length, bytes, length);
    text->length += length;
    text->data[text->length] = 0;
}

void te_text_print(te_text *text, const char *format, ...)
{
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int length = te_vsnprintf(NULL, 0, format, args);
    if (length >= 0 && reserve(text, (size_t)length)) {
        te_vsnprintf(text->data + text->length, (size_t)length + 1, format, again);
        text->length += (size_t)length;
    }
    va_end(again);
    va_end(args);
}
