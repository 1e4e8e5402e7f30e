/* types.h - the plain types that every layer of tetrain shares. */
#ifndef TETRAIN_TYPES_H
#define TETRAIN_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Result of every function that can fail. The message that goes with a failure is kept by the context
 * (te_context_error), or by the te_exec for kernels. */
typedef enum te_status {
    TE_OK = 0,
    TE_ERROR_ARGUMENT,    /* wrong shape, dtype, value or combination */
    TE_ERROR_MEMORY,      /* host or device memory exhausted, or a limit reached */
    TE_ERROR_IO,          /* a file could not be opened, read, written or understood */
    TE_ERROR_UNSUPPORTED, /* valid, but this build or device cannot do it */
    TE_ERROR_DEVICE,      /* the device, driver or library reported a failure */
    TE_ERROR_INTERRUPTED, /* somebody called te_context_interrupt */
    TE_ERROR_INTERNAL     /* a broken invariant: a bug in tetrain */
} te_status;

/* Element types. FP8 types are the OCP formats: E4M3 has no infinities (maximum 448), E5M2 is IEEE-like (57344). */
typedef enum te_dtype {
    TE_F32 = 0,
    TE_BF16,
    TE_F16,
    TE_F64,
    TE_I64,
    TE_I32,
    TE_U8,
    TE_BOOL, /* one byte, 0 or 1 */
    TE_F8E4M3,
    TE_F8E5M2,
    TE_DTYPE_COUNT
} te_dtype;

#define TE_MAX_DIMS 8

#if defined(__GNUC__)
#define TE_API __attribute__((visibility("default")))
#else
#define TE_API
#endif

#ifndef __CUDACC_RTC__ /* device code wants the types alone */
TE_API size_t      te_dtype_size(te_dtype dtype);          /* bytes of an element; 0 for a number that is no dtype */
TE_API const char *te_dtype_name(te_dtype dtype);          /* "float32" */
TE_API te_dtype    te_dtype_from_name(const char *name);   /* TE_DTYPE_COUNT when there is none of that name */
#endif

#ifdef __cplusplus
}
#endif
#endif
