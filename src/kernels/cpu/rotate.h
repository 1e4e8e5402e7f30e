/* rotate.h - one row of pairs turned, once per instruction set (isa/rotate_rows.c). */
#ifndef TE_KERNELS_CPU_ROTATE_H
#define TE_KERNELS_CPU_ROTATE_H

#include "cpu.h"

/* n pairs; elements of a and b lie `in` apart, those of y and z `out`. The sines are taken times `sign`. */
typedef struct te_rotate_row {
    const void  *a, *b;
    void        *y, *z;
    const float *cos, *sin;
    int64_t      n, in, out;
    float        sign;
} te_rotate_row;

typedef void te_rotate_function(const te_rotate_row *row);

typedef struct te_rotate_rows {
    te_rotate_function *f32, *bf16, *f16;
} te_rotate_rows;

extern const te_rotate_rows te_rotate_rows_portable, te_rotate_rows_avx2, te_rotate_rows_avx512;

#endif
