/* program_whole.c - programs on whole numbers, which compute in float64: conversions, and single operations in integers
 * where the results are the same.
 *
 * Processors without AVX-512 have no instruction that converts several 64-bit integers. Those below 2^51 in magnitude
 * are converted by their bits: 1.5 * 2^52 + v has v in its lowest ones.
 */
#include "program_exec.h"
#include "workers.h"

#include "kernels/dtype.h"

#include <string.h>

typedef double   pair __attribute__((vector_size(16)));
typedef uint64_t pair_bits __attribute__((vector_size(16)));

#define MIDDLE    0x1.8p52 /* what negative ones are added to, and its bits */
#define MIDDLE_AT 0x4338000000000000u
#define ABOVE     0x1p52 /* what others are added to */
#define ABOVE_AT  0x4330000000000000u
#define LIMIT_AT  0x4320000000000000u /* the bits of 2^51 */
#define SIGN      0x8000000000000000u

#define PAIRS for (size_t i = 0; i + 2 <= n; i += 2)

static inline pair_bits bits_at(const void *p)
{
    pair_bits v;
    memcpy(&v, p, sizeof v);
    return v;
}

void te_whole_load_i64(void *dst, const void *src, int64_t stride, size_t n)
{
    double        *d = dst;
    const int64_t *s = src;
    pair_bits      large = {0};
    size_t         done = 0;
    if (stride == 1) PAIRS large |= bits_at(s + i) + (UINT64_C(1) << 51);
    if (stride == 1 && (large[0] | large[1]) >> 52 == 0) {
        PAIRS
        {
            pair v = (pair)(bits_at(s + i) + MIDDLE_AT) - MIDDLE;
            memcpy(d + i, &v, sizeof v);
        }
        done = n & ~(size_t)1;
    }
    for (size_t i = done; i < n; i++) d[i] = (double)s[(int64_t)i * stride];
}

/* Without the fraction: the nearest whole number of the magnitude, and one less where that is larger. */
void te_whole_store_i64(void *dst, int64_t stride, const void *src, size_t n)
{
    int64_t      *d = dst;
    const double *s = src;
    pair_bits     large = {0};
    size_t        done = 0;
    if (stride == 1) PAIRS large |= (bits_at(s + i) & ~SIGN) + (SIGN - LIMIT_AT);
    if (stride == 1 && (large[0] | large[1]) < SIGN) {
        PAIRS
        {
            pair_bits x = bits_at(s + i), minus = -(x >> 63);
            pair      size = (pair)(x & ~SIGN), near = size + ABOVE;
            pair_bits v = (pair_bits)near - ABOVE_AT - ((pair_bits)(size - (near - ABOVE)) >> 63);
            v = (v ^ minus) - minus;
            memcpy(d + i, &v, sizeof v);
        }
        done = n & ~(size_t)1;
    }
    for (size_t i = done; i < n; i++) d[(int64_t)i * stride] = te_f64_to_i64(s[i]);
}

/* --- without float64 ---------------------------------------------------------------------------------------------- */

/* Two of a kind, or one and a number, added, subtracted, multiplied, compared, or the larger or smaller; and the sum of
 * a tensor: in integers, where those are so small that float64 would give the same. */
enum { PART = 1 << 14, BLOCK = 1 << 9 };

typedef struct whole_job {
    te_exec    *exec;
    te_dtype    dtype;
    int         op;        /* te_opcode; LOAD: the sum of all */
    const char *from[2];   /* NULL: the number */
    int64_t     number[2];
    char       *to;
    int64_t     n;         /* elements */
} whole_job;

/* y may be a or b. */
#define EACH _Pragma("omp simd") for (int64_t i = 0; i < n; i++)

/* Of numbers below 2^62: SSE2 has no comparisons of 64 bits. */
static inline uint8_t above_int64_t(int64_t a, int64_t b) { return (uint8_t)(((uint64_t)b - (uint64_t)a) >> 63); }
static inline uint8_t above_int32_t(int32_t a, int32_t b) { return a > b; }
static inline uint8_t equal_int32_t(int32_t a, int32_t b) { return a == b; }
static inline uint8_t equal_int64_t(int64_t a, int64_t b)
{
    uint64_t d = (uint64_t)a ^ (uint64_t)b;
    return (uint32_t)(d | d >> 32) == 0;
}

/* The values of a block are below a power of two in magnitude whose results fit. */
#define IN_BLOCKS(T, U, BITS, PRODUCT_BITS, STORED)                                                         \
    static void block_##T(const whole_job *job, T *y, const T *a, const T *b, int64_t n)                    \
    {                                                                                                       \
        int bits = job->op == TE_PW_MUL ? PRODUCT_BITS : BITS;                                              \
        U   large = 0, half = (U)1 << (bits - 1);                                                           \
        _Pragma("omp simd reduction(| : large)")                                                            \
        for (int64_t i = 0; i < n; i++) large |= ((U)a[i] + half) | ((U)b[i] + half);                       \
        if (large >> bits) {                                                                                \
            for (int64_t i = 0; i < n; i++) {                                                               \
                double v = (double)a[i], w = (double)b[i];                                                  \
                v = job->op == TE_PW_ADD   ? v + w                                                          \
                    : job->op == TE_PW_SUB ? v - w                                                          \
                    : job->op == TE_PW_MUL ? v * w                                                          \
                    : (job->op == TE_PW_MAX) == (v > w) ? v                                                 \
                                                        : w;                                                \
                y[i] = STORED(v);                                                                           \
            }                                                                                               \
        } else if (job->op == TE_PW_ADD) {                                                                  \
            EACH y[i] = a[i] + b[i];                                                                        \
        } else if (job->op == TE_PW_SUB) {                                                                  \
            EACH y[i] = a[i] - b[i];                                                                        \
        } else if (job->op == TE_PW_MUL) {                                                                  \
            EACH y[i] = (T)((U)a[i] * (U)b[i]);                                                             \
        } else if (job->op == TE_PW_MAX) {                                                                  \
            EACH y[i] = a[i] > b[i] ? a[i] : b[i];                                                          \
        } else {                                                                                            \
            EACH y[i] = a[i] < b[i] ? a[i] : b[i];                                                          \
        }                                                                                                   \
    }                                                                                                       \
    static void compare_##T(const whole_job *job, uint8_t *y, const T *a, const T *b, int64_t n)            \
    {                                                                                                       \
        uint8_t  flip = job->op == TE_PW_NE || job->op == TE_PW_LE;                                         \
        const T *v = job->op == TE_PW_LT ? b : a, *w = job->op == TE_PW_LT ? a : b;                         \
        bool     equal = job->op == TE_PW_EQ || job->op == TE_PW_NE;                                        \
        uint64_t large = 0, half = UINT64_C(1) << 53;                                                       \
        int64_t  wide = sizeof(T) == 8 ? n : 0;                                                             \
        _Pragma("omp simd reduction(| : large)")                                                            \
        for (int64_t i = 0; i < wide; i++) large |= ((uint64_t)a[i] + half) | ((uint64_t)b[i] + half);      \
        if (large >> 54)                                                                                    \
            EACH y[i] = flip ^ (equal ? (double)v[i] == (double)w[i] : (double)v[i] > (double)w[i]);        \
        else if (equal)                                                                                     \
            EACH y[i] = flip ^ equal_##T(v[i], w[i]);                                                       \
        else                                                                                                \
            EACH y[i] = flip ^ above_##T(v[i], w[i]);                                                       \
    }                                                                                                       \
    /* False: its values are too large. */                                                                  \
    static bool sum_##T(int64_t *sum, const T *x, int64_t n)                                                \
    {                                                                                                       \
        U       large = 0, half = (U)1 << (BITS - 5);                                                       \
        uint64_t s = 0;                                                                                     \
        _Pragma("omp simd reduction(| : large) reduction(+ : s)")                                           \
        for (int64_t i = 0; i < n; i++) large |= (U)x[i] + half, s += (uint64_t)x[i];                       \
        *sum = (int64_t)s;                                                                                  \
        return sizeof(T) < 8 || large >> (BITS - 4) == 0;                                                   \
    }

IN_BLOCKS(int64_t, uint64_t, 52, 26, te_f64_to_i64)
IN_BLOCKS(int32_t, uint32_t, 30, 15, te_f64_to_i32)

/* Their product and the smaller one are true where both are, their sum and the larger one where one is. */
static void block_bool(const whole_job *job, uint8_t *y, const uint8_t *a, const uint8_t *b, int64_t n)
{
    if (job->op == TE_PW_MUL || job->op == TE_PW_MIN)
        EACH y[i] = (a[i] != 0) & (b[i] != 0);
    else
        EACH y[i] = (a[i] | b[i]) != 0;
}

static bool is_comparison(int op) { return op == TE_PW_LT || op == TE_PW_LE || op == TE_PW_EQ || op == TE_PW_NE; }

static void pairs_in_parts(void *context, int64_t first, int64_t end, int thread)
{
    const whole_job *job = context;
    size_t           size = te_dtype_size(job->dtype);
    int64_t          numbers[2][BLOCK], last = end * PART < job->n ? end * PART : job->n;
    (void)thread;
    for (int k = 0; k < 2; k++)
        for (int64_t i = 0; i < BLOCK && !job->from[k]; i++) {
            if (size == 8) numbers[k][i] = job->number[k];
            else ((int32_t *)numbers[k])[i] = (int32_t)job->number[k];
        }
    for (int64_t at = first * PART; at < last && !te_cpu_stopping(job->exec); at += BLOCK) {
        int64_t     n = last - at < BLOCK ? last - at : BLOCK;
        const void *from[2];
        void       *to = job->to + (size_t)at * (is_comparison(job->op) ? 1 : size);
        for (int k = 0; k < 2; k++)
            from[k] = job->from[k] ? (const void *)(job->from[k] + (size_t)at * size) : numbers[k];
        if (is_comparison(job->op) && size == 8) compare_int64_t(job, to, from[0], from[1], n);
        else if (is_comparison(job->op)) compare_int32_t(job, to, from[0], from[1], n);
        else if (size == 8) block_int64_t(job, to, from[0], from[1], n);
        else if (size == 4) block_int32_t(job, to, from[0], from[1], n);
        else block_bool(job, to, from[0], from[1], n);
    }
}

static void sums_of_parts(void *context, int64_t first, int64_t end, int thread)
{
    const whole_job *job = context;
    (void)thread;
    for (int64_t p = first; p < end && !te_cpu_stopping(job->exec); p++) {
        const void *x = job->from[0] + (size_t)(p * PART) * te_dtype_size(job->dtype);
        int64_t     n = job->n - p * PART < PART ? job->n - p * PART : PART, sum;
        bool        small = job->dtype == TE_I64 ? sum_int64_t(&sum, x, n) : sum_int32_t(&sum, x, n);
        ((int64_t *)(void *)job->to)[p] = small ? sum : INT64_MIN;
    }
}

/* Adds the parts up; false: some of it was too large. */
static bool join_sums(const int64_t *parts, int64_t n, int64_t *total)
{
    *total = 0;
    for (int64_t p = 0; p < n; p++)
        if (parts[p] == INT64_MIN || __builtin_add_overflow(*total, parts[p], total)) return false;
    return true;
}

/* --- which runs --------------------------------------------------------------------------------------------------- */

/* One behind the other, over the first dimensions of the run. */
static bool is_dense(const te_run *run, const te_operand *o, int dims)
{
    int64_t step = 1;
    bool    dense = o->data && !o->block && !o->accumulate && !o->quantized;
    for (int d = dims - 1; d >= 0 && dense; d--) {
        dense = run->shape[d] == 1 || o->stride[d] == step;
        step *= run->shape[d];
    }
    return dense;
}

/* A tensor or a number that takes part; whether it can. */
static bool take_side(whole_job *job, int k, const te_program *program, const te_run *run, int value)
{
    const te_insn *insn = &program->insns[value];
    double         number = insn->imm, small = job->dtype == TE_I64 ? 0x1p25 : 0x1p14;
    double         limit = !is_comparison(job->op) ? small : job->dtype == TE_I64 ? 0x1p53 : 0x1p31;
    if (insn->op == TE_PW_LOAD) {
        const te_operand *in = &run->inputs[insn->slot];
        job->from[k] = in->data;
        return insn->rate == TE_RATE_ELEM && in->dtype == job->dtype && is_dense(run, in, run->ndim);
    }
    if (insn->op == TE_PW_PARAM) number = run->params[insn->slot];
    else if (insn->op != TE_PW_CONST) return false;
    if (!(number > -limit && number < limit) || number != (double)(int64_t)number) return false;
    job->number[k] = (int64_t)number;
    return true;
}

static bool is_pair(int op)
{
    return op == TE_PW_ADD || op == TE_PW_SUB || op == TE_PW_MUL || op == TE_PW_MIN || op == TE_PW_MAX ||
           is_comparison(op);
}

bool te_program_whole_run(te_exec *exec, const te_program *program, const te_run *runs, int n_runs)
{
    if (n_runs != 1 || program->n_outputs != 1 || program->n_insns > 3) return false;
    const te_operand *out = runs->outputs;
    const te_insn    *last = &program->insns[program->outputs[0].value];
    int               kind = program->outputs[0].kind;
    bool              sum = kind == TE_OUT_SUM && last->op == TE_PW_LOAD;
    if (!sum && !(kind == TE_OUT_ELEM && is_pair(last->op))) return false;
    whole_job job = {.exec = exec, .dtype = program->n_inputs ? runs->inputs[0].dtype : TE_F32, .op = last->op,
                     .to = out->data, .n = 1};
    for (int d = 0; d < runs->ndim; d++) job.n *= runs->shape[d];
    bool    compares = kind == TE_OUT_ELEM && is_comparison(last->op);
    bool    of_bools = job.dtype == TE_BOOL && kind == TE_OUT_ELEM && last->op != TE_PW_SUB && !compares;
    bool    of_whole = (job.dtype == TE_I64 || job.dtype == TE_I32) && runs->compute_f64;
    if (!(of_bools || of_whole) || job.n < BLOCK) return false;
    te_dtype made = sum ? TE_I64 : compares ? TE_BOOL : job.dtype;
    if (out->dtype != made || !is_dense(runs, out, sum ? 0 : runs->ndim)) return false;
    if (!take_side(&job, 0, program, runs, sum ? program->outputs[0].value : last->arg[0])) return false;
    if (kind == TE_OUT_ELEM && !take_side(&job, 1, program, runs, last->arg[1])) return false;
    if (of_bools && !(job.from[0] && job.from[1])) return false;
    int64_t parts = (job.n + PART - 1) / PART;
    int     threads = parts > 4 ? exec->threads : 1;
    if (!sum) {
        te_cpu_loop(exec, threads, parts, te_cpu_even_grain(parts, threads), pairs_in_parts, &job);
    } else {
        int64_t *sums = exec->scratch(exec, (size_t)parts * sizeof *sums), total = 0;
        if (!sums) return false;
        job.to = (char *)sums;
        te_cpu_loop(exec, threads, parts, te_cpu_even_grain(parts, threads), sums_of_parts, &job);
        bool done = te_cpu_stopped(exec) || join_sums(sums, parts, &total);
        exec->scratch_free(exec, sums);
        if (!done) return false;
        if (!te_cpu_stopped(exec)) *(int64_t *)out->data = total;
    }
    return true;
}
