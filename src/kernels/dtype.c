/* dtype.c - names and sizes of the element types. */
#include "tetrain/types.h"

#include <string.h>

static const struct {
    const char *name;
    size_t      size;
} dtypes[TE_DTYPE_COUNT] = {
    [TE_F32] = {"float32", 4}, [TE_BF16] = {"bfloat16", 2}, [TE_F16] = {"float16", 2}, [TE_F64] = {"float64", 8},
    [TE_I64] = {"int64", 8},   [TE_I32] = {"int32", 4},     [TE_U8] = {"uint8", 1},    [TE_BOOL] = {"bool", 1},
    [TE_F8E4M3] = {"float8_e4m3", 1}, [TE_F8E5M2] = {"float8_e5m2", 1},
};

size_t te_dtype_size(te_dtype dtype) { return (unsigned)dtype < TE_DTYPE_COUNT ? dtypes[dtype].size : 0; }

const char *te_dtype_name(te_dtype dtype) { return (unsigned)dtype < TE_DTYPE_COUNT ? dtypes[dtype].name : "unknown"; }

te_dtype te_dtype_from_name(const char *name)
{
    for (int i = 0; name && i < TE_DTYPE_COUNT; i++)
        if (strcmp(dtypes[i].name, name) == 0) return (te_dtype)i;
    return TE_DTYPE_COUNT;
}
