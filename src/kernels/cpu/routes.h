/* routes.h - rows of tokens on their way to experts and back, once per instruction set (isa/route_rows.c). */
#ifndef TE_KERNELS_CPU_ROUTES_H
#define TE_KERNELS_CPU_ROUTES_H

#include "cpu.h"

/* Rows of n elements of one dtype. Sums are taken in float32 (float64 of float64), in the order of the terms; those of
 * a dot product in 16 lanes that are added by halves. */
typedef struct te_route_loops {
    void   (*scale)(void *y, const void *x, double weight, int64_t n);
    void   (*sum)(void *y, const void *const *x, const double *weights, int64_t terms, int64_t n);
    double (*dot)(const void *a, const void *b, int64_t n);
} te_route_loops;

typedef struct te_route_rows {
    te_route_loops f32, bf16;
} te_route_rows;

extern const te_route_rows  te_route_rows_portable, te_route_rows_avx2, te_route_rows_avx512;
extern const te_route_loops te_route_rows_f16, te_route_rows_f64; /* with any instruction set */

#endif
