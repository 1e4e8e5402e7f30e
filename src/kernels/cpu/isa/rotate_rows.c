/* rotate_rows.c - a row of pairs turned by its angles, see rotate.h. Operations round one by one, as in programs. */
#include "kernels/cpu/rotate.h"

#include "halves.h"
#include "kernels/dtype.h"

#define SAME(x) (x)

/* Pairs from number i on. */
#define DEFINE_ROTATE_EACH(name, element, load, store)                                                                \
    static inline void rotate_##name##_each(const te_rotate_row *row, int64_t i)                                      \
    {                                                                                                                 \
        for (; i < row->n; i++) {                                                                                     \
            float p = load(((const element *)row->a)[i * row->in]), q = load(((const element *)row->b)[i * row->in]); \
            float sine = row->sign * row->sin[i];                                                                     \
            ((element *)row->y)[i * row->out] = store(p * row->cos[i] - q * sine);                                    \
            ((element *)row->z)[i * row->out] = store(q * row->cos[i] + p * sine);                                    \
        }                                                                                                             \
    }

/* Pairs that lie one after the other, or every so many elements. Heads have few, so lengths that are known become
 * vectors without a loop. */
#define DEFINE_ROTATE(name, element, load, store)                                                                     \
    DEFINE_ROTATE_EACH(name, element, load, store)                                                                    \
    static inline __attribute__((always_inline)) void rotate_##name##_some(const te_rotate_row *row, int64_t first,   \
                                                                           int64_t n)                                 \
    {                                                                                                                 \
        const element *restrict a = (const element *)row->a + first;                                                  \
        const element *restrict b = (const element *)row->b + first;                                                  \
        element *restrict y = (element *)row->y + first;                                                              \
        element *restrict z = (element *)row->z + first;                                                              \
        const float *restrict c = row->cos + first;                                                                   \
        const float *restrict s = row->sin + first;                                                                   \
        for (int64_t i = 0; i < n; i++) {                                                                             \
            float p = load(a[i]), q = load(b[i]), sine = row->sign * s[i];                                            \
            y[i] = store(p * c[i] - q * sine);                                                                        \
            z[i] = store(q * c[i] + p * sine);                                                                        \
        }                                                                                                             \
    }                                                                                                                 \
    static void rotate_##name(const te_rotate_row *row)                                                               \
    {                                                                                                                 \
        int64_t i = 0;                                                                                                \
        bool    aside = row->in == 1 && row->out == 1;                                                                \
        for (; aside && i + 16 <= row->n; i += 16) rotate_##name##_some(row, i, 16);                                  \
        for (; aside && i + 8 <= row->n; i += 8) rotate_##name##_some(row, i, 8);                                     \
        rotate_##name##_each(row, i);                                                                                 \
    }

DEFINE_ROTATE(f32, float, SAME, SAME)
DEFINE_ROTATE(bf16, uint16_t, te_bf16_to_f32, te_f32_to_bf16)
DEFINE_ROTATE_EACH(f16, uint16_t, te_widen_half, te_narrow_half)

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
                              .in = 1, .out = 1, .sign = left.sign};
        rotate_f32(&part);
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
    rotate_f16_each(&left, 0);
}

const te_rotate_rows TE_ISA_NAME(te_rotate_rows) = {rotate_f32, rotate_bf16, rotate_f16};
