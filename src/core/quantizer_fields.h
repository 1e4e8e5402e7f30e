/* quantizer_fields.h - quantizers as hosts write them (te_quantizer_fields) and as kernels read them (te_quantizer). */
#ifndef TE_CORE_QUANTIZER_FIELDS_H
#define TE_CORE_QUANTIZER_FIELDS_H

#include "quantizer.h"

/* Checked: *q is what `fields` say, or an error names the field. `who` begins the message. */
te_status te_quantizer_from_fields(te_context *ctx, const char *who, const te_quantizer_fields *fields,
                                   te_quantizer *q);
/* As much of *fields as its struct_size covers. */
void te_quantizer_to_fields(const te_quantizer *q, te_quantizer_fields *fields);

#endif
