/* copy.h - moving and converting short runs of elements: the inner loops behind copy, embedding, index and select.
 *
 * A conversion goes through a *class* of values that holds every element of the source exactly:
 *
 *      f32, bf16, f16, fp8  -> TE_CLASS_F32  float
 *      f64                  -> TE_CLASS_F64  double
 *      i64, i32, u8, bool   -> TE_CLASS_I64  int64_t
 *
 * Ten loaders and thirty storers replace a hundred pairs; a block of values stays in L1 between the two, unless one
 * side holds such values itself. Storing follows the rules of row programs: floats narrow to the nearest (by way of
 * float32), integers take the integer part and saturate, NaN becomes 0, bool is `!= 0`.
 */
#ifndef TE_KERNELS_CPU_COPY_H
#define TE_KERNELS_CPU_COPY_H

#include "../check.h"
#include "cpu.h"

typedef enum te_value_class { TE_CLASS_F32, TE_CLASS_F64, TE_CLASS_I64, TE_CLASS_COUNT } te_value_class;

enum { TE_COPY_BLOCK = 256 }; /* values converted at a time by te_convert */

/* Strides count elements. */
typedef void (*te_load_fn)(void *values, const void *src, int64_t stride, int64_t n);
typedef void (*te_store_fn)(void *dst, int64_t stride, const void *values, int64_t value_stride, int64_t n);
typedef void (*te_move_fn)(void *dst, int64_t dst_stride, const void *src, int64_t src_stride, int64_t n);

/* dst[r * dst_stride + c] = src[c * src_stride + r] for r < rows, c < cols. */
typedef void (*te_transpose_fn)(void *dst, int64_t dst_stride, const void *src, int64_t src_stride, int64_t rows,
                                int64_t cols);

/* Each of `runs` runs of n elements, which lie one behind the other, gets one element of so many bytes; steps are in
 * elements. */
typedef void (*te_fill_fn)(void *dst, int64_t dst_step, const void *src, int64_t src_step, size_t size, int64_t n,
                           int64_t runs);

typedef enum te_whole_join { TE_WHOLE_SUM, TE_WHOLE_MAX, TE_WHOLE_MIN } te_whole_join;

enum { TE_WHOLE_STEP = 8 };
enum { TE_FEW = 32, TE_FEW_OF = 4096, TE_FEW_SORTED = 64 };

typedef struct te_copy_blocks {
    te_load_fn      load[TE_DTYPE_COUNT];
    te_store_fn     store[TE_CLASS_COUNT][TE_DTYPE_COUNT];
    te_fill_fn      fill;
    te_move_fn      move[4];      /* elements of 1, 2, 4, 8 bytes, bits unchanged */
    te_transpose_fn transpose[4]; /* the same for tiles */
    /* Positions of the k largest of n values times `sign`, 1 or -1, best first, of equal ones the first one: k of at
     * most TE_FEW, half as many of at most TE_FEW_OF, or all of at most TE_FEW_SORTED. False where there is a NaN or
     * too many are equal. The values are overwritten. */
    bool (*few)(int32_t *best, int64_t k, float *values, int64_t n, float sign);
    /* Of n whole numbers: to[i] becomes the sum of both, the larger or the smaller; sums give the bits that any of the
     * numbers plus `half` has, so that these tell whether one is large. */
    uint64_t (*join)(te_whole_join join, int64_t *to, const int64_t *from, uint64_t half, int64_t n);
    /* The same of the n numbers, n > 0, of each of some rows that are `step` apart. */
    uint64_t (*joined)(te_whole_join join, int64_t *to, const int64_t *from, int64_t step, uint64_t half, int64_t n,
                       int64_t rows);
    /* y[i] = a[i] op b[i], of ADD, SUB, MUL, MAX and MIN. The bits are as of join, of both. n is a multiple of
     * TE_WHOLE_STEP. */
    uint64_t (*whole)(te_opcode op, int64_t *y, const int64_t *a, const int64_t *b, uint64_t half, int64_t n);
    void (*stream)(void *dst, const void *src, size_t lines); /* whole lines, past the caches: */
    void (*settle)(void); /* orders them before whatever says that they are done; waits for them, so not often */
} te_copy_blocks;

extern const te_copy_blocks te_copy_blocks_portable, te_copy_blocks_avx2, te_copy_blocks_avx512;

/* isa/transpose_lines.c: tiles of whole squares with the side of a cache line, past the caches, where the destination's
 * lines are those of the squares, and not. By logarithm of the element's size; NULL: there is none. */
typedef struct te_transpose_lines {
    te_transpose_fn past[4], near[4];
} te_transpose_lines;

extern const te_transpose_lines te_transpose_lines_portable, te_transpose_lines_avx2, te_transpose_lines_avx512;

/* copy.c */
const te_copy_blocks *te_copy_blocks_of(te_exec *exec);
te_value_class        te_value_class_of(te_dtype dtype);
int                   te_dtype_log2_size(te_dtype dtype);

/* n elements of any two dtypes. */
void te_convert(const te_copy_blocks *blocks, void *dst, te_dtype dst_dtype, int64_t dst_stride, const void *src,
                te_dtype src_dtype, int64_t src_stride, int64_t n);

/* Address of element `offset` of a view's memory. */
static inline char *te_element(const void *data, te_dtype dtype, int64_t offset)
{
    return (char *)data + offset * ((int64_t)1 << te_dtype_log2_size(dtype));
}

/* Offset of the row-major `index` over the first `ndim` dimensions of a view. */
static inline int64_t te_offset_of(const te_view *view, int ndim, int64_t index)
{
    int64_t offset = 0;
    for (int i = ndim - 1; i > 0; i--) { /* a division takes long */
        int64_t extent = view->shape[i], rest = index / extent;
        offset += (index - rest * extent) * view->stride[i];
        index = rest;
    }
    return ndim > 0 ? offset + index * view->stride[0] : 0;
}

#endif
