/* bench_program.c - row programs on the CPU interpreter against what bounds them: the bandwidth of memory, and the same
 * formula with the same elementary functions compiled as one loop by hand.
 *
 *      bench_program [threads [seconds per figure [case [rows columns]]]]
 *
 * Figures are the best of many repetitions. `stream` is the share of the bandwidth that an update in place (a += s * b)
 * reaches on this machine, counting each operand's bytes once; `hand` is the time of the loop by hand over ours. On
 * x86-64 that loop is for AVX-512, so run this where the interpreter says avx512.
 */
#include "bench.h"

#include "core/program_build.h"
#include "kernels/cpu/workers.h"
#include "kernels/dtype.h"
#include "kernels/elementary.h"

#include <omp.h>

#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed" /* it leaves the search for a maximum scalar */
#endif

#if defined(__x86_64__) && defined(__clang__)
#define WIDEST __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#elif defined(__x86_64__)
#define WIDEST __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")))
#else
#define WIDEST
#endif

enum { MAX_OPERANDS = 8 };

static double seconds_each = 0.3;

/* --- cases ------------------------------------------------------------------------------------------------------ */

typedef struct bench {
    const char *name, *formula;
    /* "x" is float32, "x:b" bfloat16, "x:w" a float32 and "x:c" a bfloat16 row for all rows, "x:r" one float32 per row;
     * an output "y=" is in place of the input there, "y:s" the sum of all rows */
    const char *inputs[MAX_OPERANDS], *outputs[MAX_OPERANDS];
    const char *params[MAX_OPERANDS];
    double      values[MAX_OPERANDS];
    void (*hand)(void *const *out, void *const *in, int64_t begin, int64_t end, int64_t columns);
} bench;

WIDEST static void hand_gelu(void *const *out, void *const *in, int64_t begin, int64_t end, int64_t columns)
{
    const uint16_t *x = in[0];
    uint16_t       *y = out[0];
    _Pragma("omp simd") for (int64_t i = begin * columns; i < end * columns; i++)
    {
        float v = te_bf16_to_f32(x[i]);
        y[i] = te_f32_to_bf16(v * te_sigmoid(v * (1.5957691f + 0.07135482f * (v * v))));
    }
}

WIDEST static void hand_gelu_erf(void *const *out, void *const *in, int64_t begin, int64_t end, int64_t columns)
{
    const uint16_t *x = in[0];
    uint16_t       *y = out[0];
    _Pragma("omp simd") for (int64_t i = begin * columns; i < end * columns; i++)
    {
        float v = te_bf16_to_f32(x[i]);
        y[i] = te_f32_to_bf16(0.5f * v * (1.0f + te_erf(v * 0.70710678f)));
    }
}

static inline float gelu_gradient(float x, float dy)
{
    float p = 1.5957691f + 0.07135482f * (x * x), s = te_sigmoid(x * p), g = dy * x * (s * (1.0f - s));
    return dy * s + g * p + g * x * 0.14270963f * x;
}

WIDEST static void hand_gelu_backward(void *const *out, void *const *in, int64_t begin, int64_t end, int64_t columns)
{
    const float *x = in[0], *dy = in[1];
    float       *dx = out[0];
    _Pragma("omp simd") for (int64_t i = begin * columns; i < end * columns; i++) dx[i] = gelu_gradient(x[i], dy[i]);
}

WIDEST static void hand_gelu_backward_bf16(void *const *out, void *const *in, int64_t begin, int64_t end,
                                           int64_t columns)
{
    const uint16_t *x = in[0], *dy = in[1];
    uint16_t       *dx = out[0];
    _Pragma("omp simd") for (int64_t i = begin * columns; i < end * columns; i++) dx[i] =
        te_f32_to_bf16(gelu_gradient(te_bf16_to_f32(x[i]), te_bf16_to_f32(dy[i])));
}

static inline float gelu_erf_gradient(float x, float dy)
{
    float v = 0.70710678f * x;
    return 0.5f * dy * (1.0f + te_erf(v)) + dy * (0.5f * x) * (1.1283792f * te_exp(-v * v)) * 0.70710678f;
}

/* With the sums of its columns, which a bias takes. */
WIDEST static void hand_gelu_erf_backward(void *const *out, void *const *in, int64_t begin, int64_t end,
                                          int64_t columns)
{
    float *sums = calloc((size_t)columns, sizeof *sums);
    for (int64_t r = begin; sums && r < end; r++) {
        const float *x = (const float *)in[0] + r * columns, *dy = (const float *)in[1] + r * columns;
        float       *dx = (float *)out[0] + r * columns;
        _Pragma("omp simd") for (int64_t i = 0; i < columns; i++) sums[i] += dx[i] = gelu_erf_gradient(x[i], dy[i]);
    }
#pragma omp critical
    for (int64_t i = 0; sums && i < columns; i++) ((float *)out[1])[i] += sums[i];
    free(sums);
}

WIDEST static void hand_gelu_erf_backward_bf16(void *const *out, void *const *in, int64_t begin, int64_t end,
                                               int64_t columns)
{
    float *sums = calloc((size_t)columns, sizeof *sums);
    for (int64_t r = begin; sums && r < end; r++) {
        const uint16_t *x = (const uint16_t *)in[0] + r * columns, *dy = (const uint16_t *)in[1] + r * columns;
        uint16_t       *dx = (uint16_t *)out[0] + r * columns;
        _Pragma("omp simd") for (int64_t i = 0; i < columns; i++)
        {
            float d = gelu_erf_gradient(te_bf16_to_f32(x[i]), te_bf16_to_f32(dy[i]));
            dx[i] = te_f32_to_bf16(d);
            sums[i] += d;
        }
    }
#pragma omp critical
    for (int64_t i = 0; sums && i < columns; i++) ((float *)out[1])[i] += sums[i];
    free(sums);
}

WIDEST static void hand_silu(void *const *out, void *const *in, int64_t begin, int64_t end, int64_t columns)
{
    const float *x = in[0];
    float       *y = out[0];
    _Pragma("omp simd") for (int64_t i = begin * columns; i < end * columns; i++) y[i] = x[i] * te_sigmoid(x[i]);
}

WIDEST static void hand_add(void *const *out, void *const *in, int64_t begin, int64_t end, int64_t columns)
{
    const float *a = in[0], *b = in[1];
    float       *y = out[0];
    _Pragma("omp simd") for (int64_t i = begin * columns; i < end * columns; i++) y[i] = a[i] + b[i];
}

WIDEST static void hand_add_bf16(void *const *out, void *const *in, int64_t begin, int64_t end, int64_t columns)
{
    const uint16_t *a = in[0], *b = in[1];
    uint16_t       *y = out[0];
    _Pragma("omp simd") for (int64_t i = begin * columns; i < end * columns; i++) y[i] =
        te_f32_to_bf16(te_bf16_to_f32(a[i]) + te_bf16_to_f32(b[i]));
}

WIDEST static void hand_adamw(void *const *out, void *const *in, int64_t begin, int64_t end, int64_t columns)
{
    float       *p = out[0], *m = out[1], *v = out[2];
    const float *g = in[3];
    _Pragma("omp simd") for (int64_t i = begin * columns; i < end * columns; i++)
    {
        float grad = g[i], first = m[i] * 0.9f + grad * 0.1f, second = v[i] * 0.95f + grad * grad * 0.05f;
        m[i] = first;
        v[i] = second;
        p[i] = p[i] - 1e-3f * (first * 1.1f / (__builtin_sqrtf(second * 1.2f) + 1e-8f) + 0.1f * p[i]);
    }
}

#define HAND(name) static void name(void *const *out, void *const *in, int64_t begin, int64_t end, int64_t columns)
HAND(hand_layer_norm);
HAND(hand_layer_norm_f32);
HAND(hand_layer_norm_backward);
HAND(hand_add_layer_norm);
HAND(hand_rms_norm);
HAND(hand_softmax);
HAND(hand_softmax_bf16);
HAND(hand_softmax_backward);
HAND(hand_column_sum);
HAND(hand_cross_entropy);

#define GELU_BACKWARD                                                                                                  \
    "p = 1.5957691 + 0.07135482 * (x * x); s = sigmoid(x * p); g = dy * x * (s * (1 - s)); "                           \
    "dx = dy * s + g * p + g * x * 0.14270963 * x"

#define GELU_ERF_BACKWARD                                                                                              \
    "v = 0.70710678 * x; dx = 0.5 * dy * (1 + erf(v)) + dy * (0.5 * x) * (1.1283791671 * exp(-(v * v))) * "            \
    "0.70710678; "                                                                                                     \
    "db = dx"

static const bench cases[] = {
    {"add f32", "y = a + b", {"a", "b"}, {"y"}, {NULL}, {0}, hand_add},
    {"add bf16", "y = a + b", {"a:b", "b:b"}, {"y:b"}, {NULL}, {0}, hand_add_bf16},
    {"gelu bf16", "y = x * sigmoid(x * (1.5957691 + 0.07135482 * (x * x)))",
     {"x:b"}, {"y:b"}, {NULL}, {0}, hand_gelu},
    {"gelu erf bf16", "y = 0.5 * x * (1 + erf(x * 0.70710678))", {"x:b"}, {"y:b"}, {NULL}, {0}, hand_gelu_erf},
    {"gelu back f32", GELU_BACKWARD, {"x", "dy"}, {"dx"}, {NULL}, {0}, hand_gelu_backward},
    {"gelu back bf16", GELU_BACKWARD, {"x:b", "dy:b"}, {"dx:b"}, {NULL}, {0}, hand_gelu_backward_bf16},
    {"gelu erf back f32", GELU_ERF_BACKWARD, {"x", "dy"}, {"dx", "db:s"}, {NULL}, {0}, hand_gelu_erf_backward},
    {"gelu erf back bf16", GELU_ERF_BACKWARD, {"x:b", "dy:b"}, {"dx:b", "db:s"}, {NULL}, {0},
     hand_gelu_erf_backward_bf16},
    {"silu f32", "y = x * sigmoid(x)", {"x"}, {"y"}, {NULL}, {0}, hand_silu},
    {"adamw f32",
     "m1 = m * b1 + g * (1 - b1); v1 = v * b2 + g * g * (1 - b2); "
     "p1 = p - lr * (m1 * c1 / (sqrt(v1 * c2) + eps) + wd * p)",
     {"p", "m", "v", "g"}, {"p1=", "m1=", "v1="}, {"b1", "b2", "lr", "c1", "c2", "eps", "wd"},
     {0.9, 0.95, 1e-3, 1.1, 1.2, 1e-8, 0.1}, hand_adamw},
    {"layer_norm bf16",
     "mean = rowmean(x); d = x - mean; rstd = rsqrt(rowmean(d * d) + 1e-5); y = d * rstd * gamma + beta",
     {"x:b", "gamma:c", "beta:c"}, {"y:b"}, {NULL}, {0}, hand_layer_norm},
    {"layer_norm f32",
     "mean = rowmean(x); d = x - mean; rstd = rsqrt(rowmean(d * d) + 1e-5); y = d * rstd * gamma + beta",
     {"x", "gamma:w", "beta:w"}, {"y"}, {NULL}, {0}, hand_layer_norm_f32},
    {"add+norm bf16",
     "s = to_bf16(res + x); mean = rowmean(s); d = s - mean; rstd = rsqrt(rowmean(d * d) + 1e-5); "
     "y = d * rstd * gamma + beta",
     {"res:b", "x:b", "gamma:c", "beta:c"}, {"s:b", "y:b", "mean:r", "rstd:r"}, {NULL}, {0}, hand_add_layer_norm},
    {"layer_norm back f32",
     "d = x - mean; g = dy * gamma; "
     "dx = g * rstd - rowsum(g * d) * (rstd * rstd * rstd / n) * d - rowsum(g) * rstd / n; "
     "dgamma = dy * (d * rstd); dbeta = dy",
     {"x", "dy", "gamma:w", "mean:r", "rstd:r"}, {"dx", "dgamma:s", "dbeta:s"}, {NULL}, {0}, hand_layer_norm_backward},
    {"layer_norm back bf16",
     "d = x - mean; g = dy * gamma; "
     "dx = g * rstd - rowsum(g * d) * (rstd * rstd * rstd / n) * d - rowsum(g) * rstd / n; "
     "dgamma = dy * (d * rstd); dbeta = dy",
     {"x:b", "dy:b", "gamma:w", "mean:r", "rstd:r"}, {"dx:b", "dgamma:s", "dbeta:s"}, {NULL}, {0}, NULL},
    {"add+norm back bf16",
     "d = x - mean; g = dy * gamma; h = d * rstd; y = h * gamma; dgamma = dy * h; "
     "dx = res + (g * rstd - rowsum(g * d) * (rstd * rstd * rstd / n) * d) - rowsum(g) * rstd / n",
     {"x:b", "dy:b", "res:b", "gamma:w", "mean:r", "rstd:r"}, {"dx:b", "y:b", "dgamma:s"}, {NULL}, {0}, NULL},
    {"rms_norm f32", "rstd = rsqrt(rowmean(x * x) + 1e-5); y = x * rstd * gamma", {"x", "gamma:w"}, {"y"}, {NULL}, {0},
     hand_rms_norm},
    {"softmax f32", "e = exp(x - rowmax(x)); y = e / rowsum(e)", {"x"}, {"y"}, {NULL}, {0}, hand_softmax},
    {"softmax bf16", "e = exp(x - rowmax(x)); y = e / rowsum(e)", {"x:b"}, {"y:b"}, {NULL}, {0}, hand_softmax_bf16},
    {"softmax back f32", "dx = y * (dy - rowsum(dy * y))", {"y", "dy"}, {"dx"}, {NULL}, {0}, hand_softmax_backward},
    {"column sum f32", "y = x", {"x"}, {"y:s"}, {NULL}, {0}, hand_column_sum},
    {"column sum bf16", "y = x", {"x:b"}, {"y:s"}, {NULL}, {0}, NULL},
    {"cross entropy f32", "m = rowmax(x); y = m + log(rowsum(exp(x - m)))", {"x"}, {"y:r"}, {NULL}, {0},
     hand_cross_entropy},
    {"cross entropy bf16", "m = rowmax(x); y = m + log(rowsum(exp(x - m)))", {"x:b"}, {"y:r"}, {NULL}, {0}, NULL},
};

/* Row by row, vectorized passes over a row that stays in L1. */
WIDEST static void hand_layer_norm(void *const *out, void *const *in, int64_t begin, int64_t end, int64_t columns)
{
    const uint16_t *gamma = in[1], *beta = in[2];
    float          *row = malloc((size_t)columns * sizeof *row);
    for (int64_t r = begin; row && r < end; r++) {
        const uint16_t *x = (const uint16_t *)in[0] + r * columns;
        uint16_t       *y = (uint16_t *)out[0] + r * columns;
        float           sum = 0, squares = 0;
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < columns; i++) sum += row[i] =
            te_bf16_to_f32(x[i]);
        float mean = sum / (float)columns;
        _Pragma("omp simd reduction(+ : squares)") for (int64_t i = 0; i < columns; i++)
        {
            row[i] -= mean;
            squares += row[i] * row[i];
        }
        float rstd = 1.0f / __builtin_sqrtf(squares / (float)columns + 1e-5f);
        _Pragma("omp simd") for (int64_t i = 0; i < columns; i++)
            y[i] = te_f32_to_bf16(row[i] * rstd * te_bf16_to_f32(gamma[i]) + te_bf16_to_f32(beta[i]));
    }
    free(row);
}

WIDEST HAND(hand_layer_norm_f32)
{
    const float *gamma = in[1], *beta = in[2];
    for (int64_t r = begin; r < end; r++) {
        const float *x = (const float *)in[0] + r * columns;
        float       *y = (float *)out[0] + r * columns, sum = 0, squares = 0;
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < columns; i++) sum += x[i];
        float mean = sum / (float)columns;
        _Pragma("omp simd reduction(+ : squares)") for (int64_t i = 0; i < columns; i++)
            squares += (x[i] - mean) * (x[i] - mean);
        float rstd = 1.0f / __builtin_sqrtf(squares / (float)columns + 1e-5f);
        _Pragma("omp simd") for (int64_t i = 0; i < columns; i++) y[i] = (x[i] - mean) * rstd * gamma[i] + beta[i];
    }
}

WIDEST HAND(hand_layer_norm_backward)
{
    const float *gamma = in[2], *mean = in[3], *rstd = in[4];
    float       *dgamma = calloc((size_t)columns, sizeof *dgamma), *dbeta = calloc((size_t)columns, sizeof *dbeta);
    for (int64_t r = begin; dgamma && dbeta && r < end; r++) {
        const float *x = (const float *)in[0] + r * columns, *dy = (const float *)in[1] + r * columns;
        float       *dx = (float *)out[0] + r * columns, m = mean[r], s = rstd[r], first = 0, second = 0;
        _Pragma("omp simd reduction(+ : first, second)") for (int64_t i = 0; i < columns; i++)
        {
            float h = (x[i] - m) * s, g = dy[i] * gamma[i];
            first += g, second += g * h;
            dgamma[i] += dy[i] * h, dbeta[i] += dy[i];
        }
        first /= (float)columns, second /= (float)columns;
        _Pragma("omp simd") for (int64_t i = 0; i < columns; i++)
            dx[i] = s * (dy[i] * gamma[i] - first - (x[i] - m) * s * second);
    }
#pragma omp critical
    for (int64_t i = 0; dgamma && dbeta && i < columns; i++) {
        ((float *)out[1])[i] += dgamma[i];
        ((float *)out[2])[i] += dbeta[i];
    }
    free(dgamma), free(dbeta);
}

/* A row is rounded before it is summed, and read again as it was stored. */
WIDEST HAND(hand_add_layer_norm)
{
    const uint16_t *gamma = in[2], *beta = in[3];
    for (int64_t r = begin; r < end; r++) {
        const uint16_t *a = (const uint16_t *)in[0] + r * columns, *b = (const uint16_t *)in[1] + r * columns;
        uint16_t       *s = (uint16_t *)out[0] + r * columns, *y = (uint16_t *)out[1] + r * columns;
        float           sum = 0, squares = 0;
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < columns; i++)
        {
            s[i] = te_f32_to_bf16(te_bf16_to_f32(a[i]) + te_bf16_to_f32(b[i]));
            sum += te_bf16_to_f32(s[i]);
        }
        float mean = sum / (float)columns;
        _Pragma("omp simd reduction(+ : squares)") for (int64_t i = 0; i < columns; i++)
        {
            float d = te_bf16_to_f32(s[i]) - mean;
            squares += d * d;
        }
        float rstd = 1.0f / __builtin_sqrtf(squares / (float)columns + 1e-5f);
        _Pragma("omp simd") for (int64_t i = 0; i < columns; i++)
        {
            float h = (te_bf16_to_f32(s[i]) - mean) * rstd;
            y[i] = te_f32_to_bf16(h * te_bf16_to_f32(gamma[i]) + te_bf16_to_f32(beta[i]));
        }
        ((float *)out[2])[r] = mean, ((float *)out[3])[r] = rstd;
    }
}

WIDEST HAND(hand_rms_norm)
{
    const float *gamma = in[1];
    for (int64_t r = begin; r < end; r++) {
        const float *x = (const float *)in[0] + r * columns;
        float       *y = (float *)out[0] + r * columns, squares = 0;
        _Pragma("omp simd reduction(+ : squares)") for (int64_t i = 0; i < columns; i++) squares += x[i] * x[i];
        float rstd = 1.0f / __builtin_sqrtf(squares / (float)columns + 1e-5f);
        _Pragma("omp simd") for (int64_t i = 0; i < columns; i++) y[i] = x[i] * rstd * gamma[i];
    }
}

WIDEST HAND(hand_softmax)
{
    for (int64_t r = begin; r < end; r++) {
        const float *x = (const float *)in[0] + r * columns;
        float       *y = (float *)out[0] + r * columns, top = -1e30f, sum = 0;
        _Pragma("omp simd reduction(max : top)") for (int64_t i = 0; i < columns; i++) top = x[i] > top ? x[i] : top;
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < columns; i++) sum += y[i] = te_exp(x[i] - top);
        float scale = 1.0f / sum;
        _Pragma("omp simd") for (int64_t i = 0; i < columns; i++) y[i] *= scale;
    }
}

WIDEST HAND(hand_softmax_bf16)
{
    float *e = malloc((size_t)columns * sizeof *e);
    for (int64_t r = begin; e && r < end; r++) {
        const uint16_t *x = (const uint16_t *)in[0] + r * columns;
        uint16_t       *y = (uint16_t *)out[0] + r * columns;
        float           top = -1e30f, sum = 0;
        _Pragma("omp simd reduction(max : top)") for (int64_t i = 0; i < columns; i++)
        {
            float v = te_bf16_to_f32(x[i]);
            top = v > top ? v : top;
        }
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < columns; i++) sum += e[i] =
            te_exp(te_bf16_to_f32(x[i]) - top);
        float scale = 1.0f / sum;
        _Pragma("omp simd") for (int64_t i = 0; i < columns; i++) y[i] = te_f32_to_bf16(e[i] * scale);
    }
    free(e);
}

WIDEST HAND(hand_softmax_backward)
{
    for (int64_t r = begin; r < end; r++) {
        const float *y = (const float *)in[0] + r * columns, *dy = (const float *)in[1] + r * columns;
        float       *dx = (float *)out[0] + r * columns, sum = 0;
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < columns; i++) sum += y[i] * dy[i];
        _Pragma("omp simd") for (int64_t i = 0; i < columns; i++) dx[i] = y[i] * (dy[i] - sum);
    }
}

WIDEST HAND(hand_column_sum)
{
    float *sums = calloc((size_t)columns, sizeof *sums);
    for (int64_t r = begin; sums && r < end; r++) {
        const float *x = (const float *)in[0] + r * columns;
        _Pragma("omp simd") for (int64_t i = 0; i < columns; i++) sums[i] += x[i];
    }
#pragma omp critical
    for (int64_t i = 0; sums && i < columns; i++) ((float *)out[0])[i] += sums[i];
    free(sums);
}

WIDEST HAND(hand_cross_entropy)
{
    for (int64_t r = begin; r < end; r++) {
        const float *x = (const float *)in[0] + r * columns;
        float        top = -1e30f, sum = 0;
        _Pragma("omp simd reduction(max : top)") for (int64_t i = 0; i < columns; i++) top = x[i] > top ? x[i] : top;
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < columns; i++) sum += te_exp(x[i] - top);
        ((float *)out[0])[r] = top + te_log(sum);
    }
}

/* --- measuring -------------------------------------------------------------------------------------------------- */

static size_t operand_bytes(const te_operand *operand, int64_t rows, int64_t columns)
{
    int64_t count = (operand->stride[0] ? rows : 1) * (operand->stride[1] ? columns : 1);
    return (size_t)count * te_dtype_size(operand->dtype);
}

static void *make_operand(te_exec *exec, te_operand *operand, const char *spec, int64_t rows, int64_t columns,
                          double *bytes)
{
    char    kind = strchr(spec, ':') ? strchr(spec, ':')[1] : 'f';
    bool    one_row = kind == 'c' || kind == 'w' || kind == 's', one_column = kind == 'r';
    *operand = (te_operand){.dtype = kind == 'b' || kind == 'c' ? TE_BF16 : TE_F32,
                            .stride = {one_row ? 0 : one_column ? 1 : columns, one_column ? 0 : 1}};
    size_t  size = operand_bytes(operand, rows, columns);
    int64_t count = (int64_t)(size / te_dtype_size(operand->dtype));
    *bytes += (double)size;
    operand->data = te_cpu_memory_alloc(exec, size);
    for (int64_t i = 0; operand->data && i < count; i++)
        te_store_f64(operand->data, operand->dtype, i, 0.25 + (double)(i % 1001) * 1e-3);
    return operand->data;
}

static te_program *compile(const bench *b, int *n_in, int *n_out, int *n_params, int64_t columns, double *values)
{
    char        names[2 * MAX_OPERANDS][16];
    const char *in[MAX_OPERANDS], *out[MAX_OPERANDS];
    te_rate     rates[MAX_OPERANDS];
    te_formula  formula = {.text = b->formula, .input_names = in, .input_rates = rates, .output_names = out,
                           .param_names = b->params};
    for (int i = 0; i < MAX_OPERANDS && b->inputs[i]; i++) {
        snprintf(names[i], sizeof names[i], "%.*s", (int)strcspn(b->inputs[i], ":="), b->inputs[i]);
        rates[i] = strstr(b->inputs[i], ":r") ? TE_RATE_ROW : TE_RATE_ELEM;
        in[formula.n_inputs++] = names[i];
    }
    for (int i = 0; i < MAX_OPERANDS && b->outputs[i]; i++) {
        char *name = names[MAX_OPERANDS + i];
        snprintf(name, sizeof names[0], "%.*s", (int)strcspn(b->outputs[i], ":="), b->outputs[i]);
        out[formula.n_outputs++] = name;
    }
    while (formula.n_params < MAX_OPERANDS && b->params[formula.n_params]) formula.n_params++;
    memcpy(values, b->values, sizeof b->values);
    values[formula.n_params] = (double)columns; /* `n` */
    *n_in = formula.n_inputs, *n_out = formula.n_outputs, *n_params = formula.n_params;
    te_build_error error;
    te_program    *program = te_formula_compile(&te_mem_libc, b->name, &formula, &error);
    if (!program) fprintf(stderr, "%s: %s\n", b->name, error.message);
    for (int i = 0; program && i < formula.n_outputs; i++)
        if (strstr(b->outputs[i], ":s")) program->outputs[i].kind = TE_OUT_COLSUM;
    return program;
}

typedef struct hand_job {
    const bench *b;
    void *const *out, *const *in;
    int64_t      rows, columns, threads;
} hand_job;

static void run_hand_piece(void *context, int64_t first, int64_t end, int thread)
{
    const hand_job *h = context;
    (void)thread;
    h->b->hand(h->out, h->in, h->rows * first / h->threads, h->rows * end / h->threads, h->columns);
}

/* By the threads that run programs: others would spin on their processors for a while. */
static void run_hand(te_exec *exec, const bench *b, void *const *out, void *const *in, int64_t rows, int64_t columns,
                     int threads)
{
    hand_job h = {b, out, in, rows, columns, threads};
    te_cpu_loop(exec, threads, threads, 1, run_hand_piece, &h);
}

static void measure(te_exec *exec, const bench *b, int64_t rows, int64_t columns, double bandwidth)
{
    te_operand  in[MAX_OPERANDS], out[MAX_OPERANDS];
    void       *in_data[MAX_OPERANDS], *out_data[MAX_OPERANDS];
    int         n_in, n_out, n_params;
    double      values[MAX_OPERANDS + 1], bytes = 0, best = 1e9, best_hand = 1e9;
    te_program *program = compile(b, &n_in, &n_out, &n_params, columns, values);
    if (!program) return;
    for (int i = 0; i < n_in; i++) in_data[i] = make_operand(exec, &in[i], b->inputs[i], rows, columns, &bytes);
    for (int i = 0; i < n_out; i++) {
        bool in_place = strchr(b->outputs[i], '=') != NULL;
        if (in_place) bytes += (double)(rows * columns) * (double)te_dtype_size(in[i].dtype);
        out[i] = in[i];
        out_data[i] = in_place ? in_data[i] : make_operand(exec, &out[i], b->outputs[i], rows, columns, &bytes);
    }
    te_run run = {.ndim = 2, .shape = {rows, columns}, .inputs = in, .outputs = out, .params = values};
    for (double start = now(); now() - start < seconds_each;) {
        double t0 = now();
        if (te_cpu_program_run(exec, program, &run, 1) != TE_OK) fprintf(stderr, "%s\n", exec->message);
        double t1 = now();
        if (b->hand) run_hand(exec, b, out_data, in_data, rows, columns, rows * columns < 32768 ? 1 : exec->threads);
        double t2 = now();
        if (t1 - t0 < best) best = t1 - t0;
        if (t2 - t1 < best_hand) best_hand = t2 - t1;
    }
    printf("%-20s %7lld x %-7lld %10.2f us %8.3f G elements/s  %7.2f GB/s  stream %5.2f", b->name, (long long)rows,
           (long long)columns, best * 1e6, (double)(rows * columns) / best * 1e-9, bytes / best * 1e-9,
           bytes / best / bandwidth);
    if (b->hand) printf("  hand %5.2f", best_hand / best);
    printf("\n");
    for (int i = 0; i < n_out; i++)
        if (!strchr(b->outputs[i], '=')) te_cpu_memory_free(exec, out[i].data, operand_bytes(&out[i], rows, columns));
    for (int i = 0; i < n_in; i++) te_cpu_memory_free(exec, in[i].data, operand_bytes(&in[i], rows, columns));
    te_program_free(program);
}

typedef struct stream_job {
    float *a, *b;
    bool   first;
} stream_job;

static void run_stream(void *context, int64_t first, int64_t end, int thread)
{
    const stream_job *s = context;
    (void)thread;
    for (int64_t i = first; i < end; i++) {
        if (s->first) s->a[i] = 0, s->b[i] = 1;
        s->a[i] += 0.5f * s->b[i];
    }
}

/* Bytes a second of a += s * b on arrays of 128 MB. */
static double measure_stream(te_exec *exec)
{
    enum { COUNT = 32 << 20 };
    float     *a = te_cpu_memory_alloc(exec, COUNT * sizeof *a), *b = te_cpu_memory_alloc(exec, COUNT * sizeof *b);
    stream_job s = {a, b, true};
    double     best = 1e9;
    for (int repeat = 0; a && b && repeat < 12; repeat++, s.first = false) {
        double start = now();
        te_cpu_loop(exec, exec->threads, COUNT, COUNT / exec->threads + 1, run_stream, &s);
        if (repeat && now() - start < best) best = now() - start;
    }
    te_cpu_memory_free(exec, a, COUNT * sizeof *a);
    te_cpu_memory_free(exec, b, COUNT * sizeof *b);
    return 3.0 * COUNT * sizeof(float) / best;
}

int main(int argc, char **argv)
{
    te_exec exec = {.backend = &te_backend_cpu, .mem = &te_mem_libc, .scratch = scratch, .scratch_free = scratch_free};
    arguments a = {argc, argv};
    exec.threads = threads_argument(&a, omp_get_num_procs());
    seconds_each = number_argument(&a, 2, "seconds", seconds_each, 0);
    int64_t rows = whole_argument(&a, 4, "rows", 0, 1, MOST_EXTENT);
    int64_t cols = whole_argument(&a, 5, "columns", 0, 1, MOST_EXTENT);
    at_most(&a, 5);
    if (rows && !cols) refuse(&a, "columns", "", "a number where rows are given");
    size_t named = 0;
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) named += argc < 4 || strstr(cases[c].name, argv[3]);
    if (!named) refuse(&a, "case", argv[3], "part of a case's name");
    if (te_backend_cpu.device_open(&exec, 0) != TE_OK) return 1;
    double bandwidth = measure_stream(&exec);
    printf("%s, %d threads, stream %.1f GB/s\n", te_cpu_isa_name(te_cpu(&exec)->isa), exec.threads, bandwidth * 1e-9);
    static const int64_t shapes[][2] = {{1, 16},    {64, 16},   {1024, 16},  {100, 64},   {256, 128},
                                        {768, 128}, {84, 384},
                                        {8, 768},   {32, 768},  {512, 768},  {256, 3072}, {4096, 768}, {64, 50257},
                                        {16384, 768}, {8192, 3072}};
    if (rows) {
        for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++)
            if (strstr(cases[c].name, argv[3])) measure(&exec, &cases[c], rows, cols, bandwidth);
        te_backend_cpu.device_close(&exec);
        return 0;
    }
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++)
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
            if (argc < 4 || strstr(cases[c].name, argv[3]))
                measure(&exec, &cases[c], shapes[s][0], shapes[s][1], bandwidth);
    te_backend_cpu.device_close(&exec);
    return 0;
}
