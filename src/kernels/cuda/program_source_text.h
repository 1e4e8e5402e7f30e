/* program_source_text.h - text that grows, for generated source. A failed allocation is remembered, so that writers
 * need not check each line. */
#ifndef TE_KERNELS_CUDA_PROGRAM_SOURCE_TEXT_H
#define TE_KERNELS_CUDA_PROGRAM_SOURCE_TEXT_H

#include "../memory.h"

#include <stdbool.h>

typedef struct te_text {
    const te_mem *mem;
    char         *data; /* ends with a 0; NULL while nothing was written */
    size_t        length, capacity;
    bool          failed;
} te_text;

void te_text_open(te_text *text, const te_mem *mem);
void te_text_close(te_text *text);
void te_text_write(te_text *text, const char *bytes, size_t length);
void te_text_print(te_text *text, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;

#endif
