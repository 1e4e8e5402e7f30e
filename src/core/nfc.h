/* nfc.h - Unicode's normalization form C, by utf8proc. */
#ifndef TE_CORE_NFC_H
#define TE_CORE_NFC_H

#include "io.h"

/* Blocks that calls reuse; starts with a mem and zeros. */
typedef struct te_nfc {
    const te_mem  *mem;
    int32_t       *points, *marks;
    unsigned char *bytes;
    size_t         capacity, marks_capacity, bytes_capacity;
} te_nfc;

/* Normalizes the UTF-8 at *text, or fails where it is none: *text and *size then say where the result lies, the same
 * place where nothing can change, or in a block, valid until the next call. */
te_status te_nfc_normalize(te_nfc *nfc, const unsigned char **text, size_t *size, te_io_error *error);
void      te_nfc_free(te_nfc *nfc);

#endif
