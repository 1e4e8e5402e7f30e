/* comm_reduce.c - what the processes of a group sent, made one. */
#include "comm.h"

#include "kernels/dtype.h"
#include "kernels/float_mode.h"

enum { BLOCK = 1024 }; /* elements whose sums stay in the first cache */

/* --- from and to what is added in: float, double or int64_t ------------------------------------------------------- */

#define LOAD(from, type, expression)                                                                                  \
    for (int64_t i = 0; i < n; i++) {                                                                                 \
        type x = ((const type *)(from))[i];                                                                           \
        to[i] = expression;                                                                                           \
    }
#define STORE(to, type, expression)                                                                                   \
    for (int64_t i = 0; i < n; i++) ((type *)(to))[i] = (type)(expression);

/* Integers end at the least and the largest of their type, as in operations. */
#define BETWEEN(least, x, largest) ((x) < (least) ? (least) : (x) > (largest) ? (largest) : (x))

static void load_float(float *to, const void *from, te_dtype dtype, int64_t n)
{
    if (dtype == TE_BF16) LOAD(from, uint16_t, te_bf16_to_f32(x))
    else if (dtype == TE_F16) LOAD(from, uint16_t, te_f16_to_f32(x))
    else memcpy(to, from, (size_t)n * sizeof *to);
}

static void store_float(void *to, const float *x, te_dtype dtype, int64_t n)
{
    if (dtype == TE_BF16) STORE(to, uint16_t, te_f32_to_bf16(x[i]))
    else if (dtype == TE_F16) STORE(to, uint16_t, te_f32_to_f16(x[i]))
    else memcpy(to, x, (size_t)n * sizeof *x);
}

static void load_double(double *to, const void *from, te_dtype dtype, int64_t n)
{
    (void)dtype;
    memcpy(to, from, (size_t)n * sizeof *to);
}

static void store_double(void *to, const double *x, te_dtype dtype, int64_t n)
{
    (void)dtype;
    memcpy(to, x, (size_t)n * sizeof *x);
}

static void load_int64_t(int64_t *to, const void *from, te_dtype dtype, int64_t n)
{
    if (dtype == TE_I32) LOAD(from, int32_t, x)
    else if (dtype == TE_U8 || dtype == TE_BOOL) LOAD(from, uint8_t, x)
    else memcpy(to, from, (size_t)n * sizeof *to);
}

static void store_int64_t(void *to, const int64_t *x, te_dtype dtype, int64_t n)
{
    if (dtype == TE_I32) STORE(to, int32_t, BETWEEN(INT32_MIN, x[i], INT32_MAX))
    else if (dtype == TE_U8 || dtype == TE_BOOL) STORE(to, uint8_t, BETWEEN(0, x[i], UINT8_MAX))
    else memcpy(to, x, (size_t)n * sizeof *x);
}

/* --- reductions --------------------------------------------------------------------------------------------------- */

/* A NaN stays. */
#define LARGER(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define SMALLER(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))
#define PLUS(a, b) ((a) + (b))

#define EACH(expression) for (int64_t i = 0; i < n; i++) acc[i] = expression

#define REDUCE(SUM, ADD)                                                                                              \
    static void combine_##SUM(SUM *acc, const SUM *x, int64_t n, te_reduction reduction)                              \
    {                                                                                                                 \
        if (reduction == TE_REDUCE_MAX) EACH(LARGER(acc[i], x[i]));                                                   \
        else if (reduction == TE_REDUCE_MIN) EACH(SMALLER(acc[i], x[i]));                                             \
        else EACH(ADD(acc[i], x[i]));                                                                                 \
    }                                                                                                                 \
    static void reduce_##SUM(char *out, const char *in, int n_parts, size_t stride, int64_t n, te_dtype dtype,        \
                             te_reduction reduction)                                                                  \
    {                                                                                                                 \
        SUM acc[BLOCK], x[BLOCK];                                                                                     \
        load_##SUM(acc, in, dtype, n);                                                                                \
        for (int part = 1; part < n_parts; part++) {                                                                  \
            load_##SUM(x, in + (size_t)part * stride, dtype, n);                                                      \
            combine_##SUM(acc, x, n, reduction);                                                                      \
        }                                                                                                             \
        if (reduction == TE_REDUCE_AVERAGE) EACH(acc[i] / (SUM)n_parts);                                              \
        store_##SUM(out, acc, dtype, n);                                                                              \
    }

static int64_t saturating_plus(int64_t a, int64_t b)
{
    if (b > 0 && a > INT64_MAX - b) return INT64_MAX;
    if (b < 0 && a < INT64_MIN - b) return INT64_MIN;
    return a + b;
}

REDUCE(float, PLUS)
REDUCE(double, PLUS)
REDUCE(int64_t, saturating_plus)

static bool is_small_float(te_dtype dtype) { return dtype == TE_F32 || dtype == TE_BF16 || dtype == TE_F16; }

void te_comm_reduce_parts(void *out, const void *in, int n_parts, int64_t n, te_dtype dtype, te_reduction reduction)
{
    size_t        size = te_dtype_size(dtype), stride = (size_t)n * size;
    te_float_mode mode = te_float_mode_begin(); /* the same in every process */
    for (int64_t at = 0; at < n; at += BLOCK) {
        int64_t     width = n - at < BLOCK ? n - at : BLOCK;
        char       *to = (char *)out + (size_t)at * size;
        const char *from = (const char *)in + (size_t)at * size;
        if (is_small_float(dtype)) reduce_float(to, from, n_parts, stride, width, dtype, reduction);
        else if (dtype == TE_F64) reduce_double(to, from, n_parts, stride, width, dtype, reduction);
        else reduce_int64_t(to, from, n_parts, stride, width, dtype, reduction);
    }
    te_float_mode_end(&mode);
}
