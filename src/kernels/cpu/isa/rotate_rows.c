/* rotate_rows.c - a row of pairs turned by its angles, see rotate.h. Every operation rounds once, as in row programs. */
#include "kernels/cpu/rotate.h"

#include "halves.h"
#include "kernels/dtype.h"

#define SAME(x) (x)

/* Pairs that lie one after the other, or every so many elements; heads have few, so lengths that are known become
 * vectors without a loop. */
#define DEFINE_ROTATE(name, element, load, store)                                                                     \
    static inline __attribute__((always_inline)) void rotate_##name##_some(const te_rotate_row *row, int64_t first,   \
                                                                           int64_t n, int64_t in, int64_t out)        \
    {                                                                                                                 \
        const element *restrict a = (const element *)row->a + first * in;                                             \
        const element *restrict b = (const element *)row->b + first * in;                                             \
        element *restrict y = (element *)row->y + first * out;                                                        \
        element *restrict z = (element *)row->z + first * out;                                                        \
        const float *restrict c = row->cos + first;                                                                   \
        const float *restrict s = row->sin + first;                                                                   \
        for (int64_t i = 0; i < n; i++) {                                                                             \
            float p = load(a[i * in]), q = load(b[i * in]), sine = row->sign * s[i];                                  \
            y[i * out] = store(p * c[i] - q * sine);                                                                  \
            z[i * out] = store(q * c[i] + p * sine);                                                                  \
        }                                                                                                             \
    }                                                                                                                 \
    static inline __attribute__((always_inline)) void rotate_##name##_by(const te_rotate_row *row, int64_t in,        \
                                                                         int64_t out)                                 \
    {                                                                                                                 \
        int64_t i = 0;                                                                                                \
        for (; i + 32 <= row->n; i += 32) rotate_##name##_some(row, i, 32, in, out);                                  \
        for (; i + 16 <= row->n; i += 16) rotate_##name##_some(row, i, 16, in, out);                                  \
        for (; i + 8 <= row->n; i += 8) rotate_##name##_some(row, i, 8, in, out);                                     \
        for (; i < row->n; i++) rotate_##name##_some(row, i, 1, in, out);                                             \
    }                                                                                                                 \
    static void rotate_##name(const te_rotate_row *row)                                                               \
    {                                                                                                                 \
        if (row->in == 1 && row->out == 1)                                                                            \
            rotate_##name##_by(row, 1, 1);                                                                            \
        else if (row->in == 2 && row->out == 2)                                                                       \
            rotate_##name##_by(row, 2, 2);                                                                            \
        else                                                                                                          \
            rotate_##name##_by(row, row->in, row->out);                                                               \
    }

DEFINE_ROTATE(f32, float, SAME, SAME)
DEFINE_ROTATE(bf16, uint16_t, te_bf16_to_f32, te_f32_to_bf16)
DEFINE_ROTATE(f16_each, uint16_t, te_f16_to_f32, te_f32_to_f16)

/* By way of float32, a few dozen pairs at a time, where whole vectors of them lie side by side. */
static void rotate_f16(const te_rotate_row *row)
{
    enum { SOME = 64 };
    float       a[SOME], b[SOME], y[SOME], z[SOME];
    te_rotate_row left = *row;
    while (left.n > 0 && left.in == 1 && left.out == 1) {
        size_t n = left.n < SOME ? (size_t)left.n : SOME;
        n = te_widen_halves(a, left.a, n);
        if (n == 0) break;
        te_widen_halves(b, left.b, n);
        te_rotate_row part = {.a = a, .b = b, .y = y, .z = z, .cos = left.cos, .sin = left.sin, .n = (int64_t)n,
                            .sign = left.sign};
        rotate_f32_by(&part, 1, 1);
        te_narrow_to_halves(left.y, y, n);
        te_narrow_to_halves(left.z, z, n);
        left.a = (const uint16_t *)left.a + n;
        left.b = (const uint16_t *)left.b + n;
        left.y = (uint16_t *)left.y + n;
        left.z = (uint16_t *)left.z + n;
        left.cos += n;
        left.sin += n;
        left.n -= (int64_t)n;
    }
    rotate_f16_each(&left);
}

const te_rotate_rows TE_ISA_NAME(te_rotate_rows) = {rotate_f32, rotate_bf16, rotate_f16};
