/* gemm_sweep.c - products of few rows with a b whose rows are contiguous: c's rows are sums of b's rows.
 *
 * b is gone through STEPS rows at a time, from one side of the columns to the other, which memory delivers as fast as
 * it can; sums wait in the first-level cache. An element of c is one chain of multiply-adds in ascending k.
 *
 * Two bfloat16 are widened where they lie, the first of each pair and the second; so their sums stand in two vectors
 * until the end.
 */
#include "../gemm.h"
#include "gemm_vectors.h"

enum {
#if defined(TE_ISA_avx512) || defined(TE_ISA_neon)
    STEPS = 8,
#else
    STEPS = 4, /* half as many registers */
#endif
    LANES = sizeof(vector) / sizeof(float),
    WIDE = 2 * LANES, /* columns that are added to at once */
    MOST_BYTES = 4 * WIDE
};

/* Rows of b, of one step, from some column on. */
typedef struct sweep_rows {
    const char *b;
    int64_t     line;
} sweep_rows;

INLINE vector load(const void *p)
{
    vector v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void load_wide(te_dtype dtype, const char *p, vector y[2])
{
    if (dtype == TE_F32) {
        y[0] = load(p);
        y[1] = load(p + sizeof *y);
    } else if (dtype == TE_F16) {
        y[0] = widen_f16(p);
        y[1] = widen_f16(p + 2 * LANES);
    } else {
        vector_u32 pairs = (vector_u32)load(p);
        y[0] = (vector)(pairs << 16);
        y[1] = (vector)(pairs & 0xffff0000u);
    }
}

/* Adds `steps` rows times the numbers x to WIDE columns of all rows of sums. */
INLINE void add_wide(te_dtype dtype, const int steps, int rows, sweep_rows r, const float *x, float *sums,
                     int64_t pitch)
{
    vector y[STEPS][2];
    UNROLL for (int s = 0; s < steps; s++) load_wide(dtype, r.b + s * r.line, y[s]);
    for (int i = 0; i < rows; i++, sums += pitch) {
        vector first = load(sums), second = load(sums + LANES);
        UNROLL for (int s = 0; s < steps; s++) {
            vector a = SPLAT(x[i * STEPS + s]);
            first = MADD(a, y[s][0], first);
            second = MADD(a, y[s][1], second);
        }
        memcpy(sums, &first, sizeof first);
        memcpy(sums + LANES, &second, sizeof second);
    }
}

INLINE float element_of(te_dtype dtype, const char *p)
{
    float    x;
    uint16_t half;
    if (dtype == TE_F32) {
        memcpy(&x, p, sizeof x);
        return x;
    }
    memcpy(&half, p, sizeof half);
    return dtype == TE_F16 ? te_f16_to_f32(half) : te_bf16_to_f32(half);
}

/* Columns behind the last whole WIDE of them are copied first. */
INLINE void add_steps(te_dtype dtype, const int steps, const te_gemm_sweep *w, int64_t k)
{
    const int size = dtype == TE_F32 ? 4 : 2;
    float x[TE_GEMM_SWEEP_ROWS * STEPS];
    char  rest[STEPS][MOST_BYTES];
    for (int i = 0; i < w->rows; i++)
        UNROLL for (int s = 0; s < steps; s++)
            x[i * STEPS + s] = element_of(dtype, w->a + i * w->a_row + (k + s) * w->a_step);
    sweep_rows r = {w->b + k * w->b_line, w->b_line};
    int j = 0;
    for (; j + WIDE <= w->cols; j += WIDE, r.b += WIDE * size)
        add_wide(dtype, steps, w->rows, r, x, w->sums + j, w->pitch);
    if (j == w->cols) return;
    UNROLL for (int s = 0; s < steps; s++) copy_filled(rest[s], r.b + s * r.line, (w->cols - j) * size, MOST_BYTES);
    add_wide(dtype, steps, w->rows, (sweep_rows){rest[0], sizeof rest[0]}, x, w->sums + j, w->pitch);
}

INLINE void sweep(te_dtype dtype, const te_gemm_sweep *w)
{
    int64_t k = 0;
    for (; k + STEPS <= w->k; k += STEPS) add_steps(dtype, STEPS, w, k);
    for (; k < w->k; k++) add_steps(dtype, 1, w, k);
}

/* First and second ones become pairs of neighbours. */
static void join_pairs(float *sums, int cols)
{
    for (int j = 0; j < cols; j += WIDE) {
        float split[WIDE];
        memcpy(split, sums + j, sizeof split);
        for (int i = 0; i < LANES; i++) sums[j + 2 * i] = split[i], sums[j + 2 * i + 1] = split[LANES + i];
    }
}

void TE_ISA_NAME(te_gemm_sweep)(const te_gemm_sweep *w)
{
    for (int i = 0; i < w->rows; i++) memset(w->sums + i * w->pitch, 0, (size_t)w->pitch * sizeof *w->sums);
    if (w->dtype == TE_F32) sweep(TE_F32, w);
    else if (w->dtype == TE_F16) sweep(TE_F16, w);
    else sweep(TE_BF16, w);
    if (w->dtype == TE_BF16)
        for (int i = 0; i < w->rows; i++) join_pairs(w->sums + i * w->pitch, w->cols);
}
