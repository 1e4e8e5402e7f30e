/* gemm_lines.h - for products of few rows: vectors of lines, and sums of the lanes w % 16 that have their words w. */
#ifndef TE_KERNELS_CPU_ISA_GEMM_LINES_H
#define TE_KERNELS_CPU_ISA_GEMM_LINES_H

#include "gemm_vectors.h"

enum { BLOCK_COLS = 4, LINE = 64 /* bytes of a step */, PARTS = LINE / sizeof(vector) };

INLINE vector load(const char *p)
{
    vector v;
    memcpy(&v, p, sizeof v);
    return v;
}

typedef float quad __attribute__((vector_size(16)));

/* Lanes 8 and 4 apart. */
INLINE quad fold_to_quad(const vector sum[PARTS])
{
    quad q[4];
    memcpy(q, sum, sizeof q);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

/* Of four sums, lanes 2 and 1 apart. */
INLINE quad fold_quads(quad a, quad b, quad c, quad d)
{
    quad ab = __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
    quad cd = __builtin_shufflevector(c, d, 0, 1, 4, 5) + __builtin_shufflevector(c, d, 2, 3, 6, 7);
    return __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
}

INLINE void fold(vector sum[BLOCK_COLS][PARTS], float *sums)
{
    quad folded = fold_quads(fold_to_quad(sum[0]), fold_to_quad(sum[1]), fold_to_quad(sum[2]), fold_to_quad(sum[3]));
    memcpy(sums, &folded, sizeof folded);
}

#endif
