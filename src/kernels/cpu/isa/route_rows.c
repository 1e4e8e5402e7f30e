/* route_rows.c - rows that are scaled, added up and multiplied with each other, see routes.h. Operations round one by
 * one, as in programs. */
#include "kernels/cpu/routes.h"

#include "kernels/dtype.h"

#define SAME(x) (x)

enum { LANES = 16, SOME = 64 /* columns whose sums stay in registers */ };

#define DEFINE_ROWS(name, element, real, load, store)                                                          \
    static void scale_##name(void *to, const void *from, double weight, int64_t n)                             \
    {                                                                                                          \
        element *restrict       y = to;                                                                        \
        const element *restrict x = from;                                                                      \
        real                    w = (real)weight;                                                              \
        for (int64_t i = 0; i < n; i++) y[i] = store(w * load(x[i]));                                          \
    }                                                                                                          \
    static void sum_##name(void *to, const void *const *from, const double *weights, int64_t terms, int64_t n) \
    {                                                                                                          \
        element *y = to;                                                                                       \
        int64_t  i = 0;                                                                                        \
        for (; i + SOME <= n; i += SOME) {                                                                     \
            real sums[SOME] = {0};                                                                             \
            for (int64_t t = 0; t < terms; t++) {                                                              \
                const element *x = (const element *)from[t] + i;                                               \
                real           w = (real)weights[t];                                                           \
                for (int k = 0; k < SOME; k++) sums[k] += w * load(x[k]);                                      \
            }                                                                                                  \
            for (int k = 0; k < SOME; k++) y[i + k] = store(sums[k]);                                          \
        }                                                                                                      \
        for (; i < n; i++) {                                                                                   \
            real sum = 0;                                                                                      \
            for (int64_t t = 0; t < terms; t++) sum += (real)weights[t] * load(((const element *)from[t])[i]); \
            y[i] = store(sum);                                                                                 \
        }                                                                                                      \
    }                                                                                                          \
    static double dot_##name(const void *left, const void *right, int64_t n)                                   \
    {                                                                                                          \
        const element *a = left, *b = right;                                                                   \
        real           lanes[LANES] = {0};                                                                     \
        int64_t        i = 0;                                                                                  \
        for (; i + LANES <= n; i += LANES)                                                                     \
            for (int l = 0; l < LANES; l++) lanes[l] += load(a[i + l]) * load(b[i + l]);                       \
        for (int l = 0; i + l < n; l++) lanes[l] += load(a[i + l]) * load(b[i + l]);                           \
        for (int half = LANES / 2; half > 0; half /= 2)                                                        \
            for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];                                        \
        return (double)lanes[0];                                                                               \
    }

DEFINE_ROWS(f32, float, float, SAME, SAME)
DEFINE_ROWS(bf16, uint16_t, float, te_bf16_to_f32, te_f32_to_bf16)

#define LOOPS(name) {scale_##name, sum_##name, dot_##name}
const te_route_rows TE_ISA_NAME(te_route_rows) = {LOOPS(f32), LOOPS(bf16)};

#ifdef TE_ISA_portable
DEFINE_ROWS(f16, uint16_t, float, te_f16_to_f32, te_f32_to_f16)
DEFINE_ROWS(f64, double, double, SAME, SAME)
const te_route_loops te_route_rows_f16 = LOOPS(f16), te_route_rows_f64 = LOOPS(f64);
#endif
