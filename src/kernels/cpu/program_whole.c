/* program_whole.c - programs on whole numbers, which compute in float64: single operations in integers where the
 * results are the same. */
#include "copy.h"
#include "program_exec.h"
#include "workers.h"

#include "kernels/dtype.h"

#include <string.h>

/* Two of a kind, or one and a number, added, subtracted, multiplied, compared, or the larger or smaller; the negative
 * of one; and the sum of a tensor: in integers, where those are so small that float64 would give the same. */
enum { PART = 1 << 14, BLOCK = 1 << 9, SHORT = 16 };

/* What takes part: element i of the result has number i / each % n of those that lie one behind the other. */
typedef struct side {
    const char *from; /* NULL: the number */
    int64_t     number, each, n;
} side;

typedef struct whole_job {
    te_exec              *exec;
    const te_copy_blocks *blocks;
    te_dtype              dtype;
    int                   op;    /* te_opcode; LOAD: the sum of all */
    side                  side[2];
    char                 *to;
    int64_t               n;     /* elements */
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

/* In float64. */
static __attribute__((noinline)) double in_float64(int op, double v, double w)
{
    switch (op) {
    case TE_PW_ADD: return v + w;
    case TE_PW_SUB: return v - w;
    case TE_PW_MUL: return v * w;
    default: return (op == TE_PW_MAX) == (v > w) ? v : w;
    }
}

/* The operation on a block, in float64 where its numbers are large. */
static __attribute__((noinline)) void block_int64_t(const whole_job *job, int64_t *y, const int64_t *a,
                                                    const int64_t *b, int64_t n)
{
    int      bits = job->op == TE_PW_MUL ? 26 : 52;
    uint64_t half = UINT64_C(1) << (bits - 1);
    bool     here = y == a || y == b; /* results would take the place of what may be needed again */
    int64_t  room[BLOCK], *to = here ? room : y;
    uint64_t large = job->blocks->whole((te_opcode)job->op, to, a, b, half, n);
    if (here && !(large >> bits)) memcpy(y, room, (size_t)n * sizeof *y);
    for (int64_t i = 0; i < n && large >> bits; i++)
        y[i] = te_f64_to_i64(in_float64(job->op, (double)a[i], (double)b[i]));
}

/* The values of a block are below 2^(bits - 1) in magnitude, whose results fit. */
static void block_int32_t(int op, int32_t *y, const int32_t *a, const int32_t *b, int64_t n)
{
    int      bits = op == TE_PW_MUL ? 15 : 30;
    uint32_t large = 0, half = (uint32_t)1 << (bits - 1);
    _Pragma("omp simd reduction(| : large)")
    for (int64_t i = 0; i < n; i++) large |= ((uint32_t)a[i] + half) | ((uint32_t)b[i] + half);
    if (large >> bits) {
        for (int64_t i = 0; i < n; i++) y[i] = te_f64_to_i32(in_float64(op, (double)a[i], (double)b[i]));
    } else if (op == TE_PW_ADD) {
        EACH y[i] = a[i] + b[i];
    } else if (op == TE_PW_SUB) {
        EACH y[i] = a[i] - b[i];
    } else if (op == TE_PW_MUL) {
        EACH y[i] = a[i] * b[i];
    } else if (op == TE_PW_MAX) {
        EACH y[i] = a[i] > b[i] ? a[i] : b[i];
    } else {
        EACH y[i] = a[i] < b[i] ? a[i] : b[i];
    }
}

#define IN_BLOCKS(T, U, BITS)                                                                               \
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

IN_BLOCKS(int64_t, uint64_t, 52)
IN_BLOCKS(int32_t, uint32_t, 30)

/* Their product and the smaller one are true where both are, their sum and the larger one where one is. A host's
 * memory may hold bytes that are neither 0 nor 1. */
static void block_bool(const whole_job *job, uint8_t *y, const uint8_t *a, const uint8_t *b, int64_t n)
{
    switch (job->op) {
    case TE_PW_EQ: EACH y[i] = (a[i] != 0) == (b[i] != 0); break;
    case TE_PW_NE: EACH y[i] = (a[i] != 0) != (b[i] != 0); break;
    case TE_PW_LT: EACH y[i] = (a[i] == 0) & (b[i] != 0); break;
    case TE_PW_LE: EACH y[i] = (a[i] == 0) | (b[i] != 0); break;
    case TE_PW_MUL:
    case TE_PW_MIN: EACH y[i] = (a[i] != 0) & (b[i] != 0); break;
    default: EACH y[i] = (a[i] | b[i]) != 0;
    }
}

static bool is_comparison(int op) { return op == TE_PW_LT || op == TE_PW_LE || op == TE_PW_EQ || op == TE_PW_NE; }

/* What the C library copies it does with vectors. */
static __attribute__((noinline)) void fill(int64_t *room, int64_t number, int64_t n)
{
    enum { FIRST = 16 };
    int64_t done = n < FIRST ? n : FIRST;
    for (int64_t i = 0; i < done; i++) room[i] = number;
    for (int64_t more; done < n; done += more) {
        more = done < n - done ? done : n - done;
        memcpy(room + done, room, (size_t)more * sizeof *room);
    }
}

/* A number of so many bytes as often as 64 bits hold it; a bool is 0 or 1. */
static int64_t repeated(int64_t number, size_t size)
{
    if (size == 8) return number;
    return size == 4 ? (int64_t)((uint64_t)(uint32_t)number * 0x100000001u) : number * 0x101010101010101;
}

/* Blocks end where a side's numbers begin anew, unless they would be short. */
static int64_t up_to_border(const side *s, int64_t at, int64_t n)
{
    int64_t period = s->each > 1 ? s->each : s->n, left = s->from && period >= BLOCK / 2 ? period - at % period : n;
    return left < n ? left : n;
}

/* Numbers `at` to at + n - 1 of a side: where they lie, or in the room. What they repeat is int64. */
static __attribute__((noinline)) const void *numbers_of(const side *s, int64_t at, int64_t n, size_t size,
                                                        int64_t *room)
{
    if (!s->from) return room;
    if (s->each == 1 && at % s->n + n <= s->n) return s->from + (size_t)(at % s->n) * size;
    const int64_t *from = (const int64_t *)(const void *)s->from;
    int64_t        which = at / s->each % s->n, into = at % s->each;
    for (int64_t i = 0, run; i < n; i += run) {
        int64_t left = n - i;
        if (s->each > 1) {
            run = s->each - into < left ? s->each - into : left;
            fill(room + i, from[which], run);
            into = 0;
            which = which + 1 == s->n ? 0 : which + 1;
        } else {
            run = s->n - which < left ? s->n - which : left;
            if (run >= SHORT) memcpy(room + i, from + which, (size_t)run * sizeof *room);
            else for (int64_t k = 0; k < run; k++) room[i + k] = from[which + k];
            which = 0;
        }
    }
    return room;
}

/* Of int64; the last ones that make no step are done elsewhere. */
static void whole_block(const whole_job *job, int64_t *y, const int64_t *a, const int64_t *b, int64_t n)
{
    int64_t steps = n / TE_WHOLE_STEP * TE_WHOLE_STEP, rest = n - steps, last[3][TE_WHOLE_STEP] = {{0}};
    block_int64_t(job, y, a, b, steps);
    if (rest == 0) return;
    memcpy(last[0], a + steps, (size_t)rest * sizeof *a);
    memcpy(last[1], b + steps, (size_t)rest * sizeof *b);
    block_int64_t(job, last[2], last[0], last[1], TE_WHOLE_STEP);
    memcpy(y + steps, last[2], (size_t)rest * sizeof *y);
}

static void pairs_in_parts(void *context, int64_t first, int64_t end, int thread)
{
    const whole_job *job = context;
    size_t           size = te_dtype_size(job->dtype);
    int64_t          room[2][BLOCK], last = end * PART < job->n ? end * PART : job->n;
    (void)thread;
    for (int k = 0; k < 2; k++)
        if (!job->side[k].from) fill(room[k], repeated(job->side[k].number, size), BLOCK);
    for (int64_t at = first * PART, n; at < last && !te_cpu_stopping(job->exec); at += n) {
        n = last - at < BLOCK ? last - at : BLOCK;
        for (int k = 0; k < 2; k++) n = up_to_border(&job->side[k], at, n);
        const void *a = numbers_of(&job->side[0], at, n, size, room[0]);
        const void *b = numbers_of(&job->side[1], at, n, size, room[1]);
        void       *to = job->to + (size_t)at * (is_comparison(job->op) ? 1 : size);
        if (size == 1) block_bool(job, to, a, b, n);
        else if (is_comparison(job->op) && size == 8) compare_int64_t(job, to, a, b, n);
        else if (is_comparison(job->op)) compare_int32_t(job, to, a, b, n);
        else if (size == 8) whole_block(job, to, a, b, n);
        else block_int32_t(job->op, to, a, b, n);
    }
}

static void sums_of_parts(void *context, int64_t first, int64_t end, int thread)
{
    const whole_job *job = context;
    (void)thread;
    for (int64_t p = first; p < end && !te_cpu_stopping(job->exec); p++) {
        const void *x = job->side[0].from + (size_t)(p * PART) * te_dtype_size(job->dtype);
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

static bool is_pair(int op)
{
    return op == TE_PW_ADD || op == TE_PW_SUB || op == TE_PW_MUL || op == TE_PW_MIN || op == TE_PW_MAX ||
           is_comparison(op);
}

/* Of a number that programs have; whether it is whole and small enough. */
static bool take_number(const whole_job *job, const te_program *program, const te_run *run, int value, int64_t *to)
{
    const te_insn *insn = &program->insns[value];
    double         number = insn->imm, small = job->dtype == TE_I64 ? 0x1p25 : 0x1p14;
    double         limit = !is_comparison(job->op) ? small : job->dtype == TE_I64 ? 0x1p53 : 0x1p31;
    if (insn->op == TE_PW_PARAM) number = run->params[insn->slot];
    else if (insn->op != TE_PW_CONST) return false;
    if (!(number > -limit && number < limit) || number != (double)(int64_t)number) return false;
    *to = (int64_t)number;
    return job->dtype != TE_BOOL || number == 0 || number == 1;
}

/* Of a tensor, which may be repeated; whether its strides are those of a side. */
static bool take_strides(side *s, const te_run *run, const te_operand *in)
{
    int d = run->ndim - 1;
    s->each = s->n = 1;
    for (; d >= 0 && (in->stride[d] == 0 || run->shape[d] == 1); d--) s->each *= run->shape[d];
    for (; d >= 0 && (in->stride[d] == s->n || run->shape[d] == 1); d--) s->n *= run->shape[d];
    while (d >= 0 && (in->stride[d] == 0 || run->shape[d] == 1)) d--;
    return d < 0 && in->data && !in->block && !in->quantized;
}

/* A tensor or a number that takes part; whether it can. */
static bool take_side(whole_job *job, int k, const te_program *program, const te_run *run, int value)
{
    const te_insn *insn = &program->insns[value];
    side          *s = &job->side[k];
    if (insn->op != TE_PW_LOAD) return take_number(job, program, run, value, &s->number);
    const te_operand *in = &run->inputs[insn->slot];
    if (insn->rate != TE_RATE_ELEM || in->dtype != job->dtype || !take_strides(s, run, in)) return false;
    s->from = in->data;
    bool repeats = job->dtype == TE_I64 && is_pair(job->op) && !is_comparison(job->op);
    return repeats || (s->each == 1 && s->n == job->n);
}

/* The operation that makes the value, and what takes part in it; false: it is none of those here. */
static bool take_operation(whole_job *job, const te_program *program, const te_run *run, int value)
{
    const te_insn *insn = &program->insns[value];
    if (insn->op == TE_PW_NEG) { /* from 0 */
        job->op = TE_PW_SUB;
        return job->dtype == TE_I64 && take_side(job, 1, program, run, insn->arg[0]);
    }
    job->op = insn->op;
    return is_pair(insn->op) && take_side(job, 0, program, run, insn->arg[0]) &&
           take_side(job, 1, program, run, insn->arg[1]);
}

bool te_program_whole_run(te_exec *exec, const te_program *program, const te_run *runs, int n_runs)
{
    if (n_runs != 1 || program->n_outputs != 1 || program->n_insns > 3) return false;
    const te_operand *out = runs->outputs;
    const te_insn    *last = &program->insns[program->outputs[0].value];
    int               kind = program->outputs[0].kind;
    bool              sum = kind == TE_OUT_SUM && last->op == TE_PW_LOAD;
    if (!sum && kind != TE_OUT_ELEM) return false;
    whole_job job = {.exec = exec, .blocks = te_copy_blocks_of(exec), .op = last->op, .to = out->data, .n = 1,
                     .dtype = program->n_inputs ? runs->inputs[0].dtype : TE_F32};
    for (int d = 0; d < runs->ndim; d++) job.n *= runs->shape[d];
    bool    compares = !sum && is_comparison(last->op);
    bool    of_bools = job.dtype == TE_BOOL && !sum && is_pair(last->op) && last->op != TE_PW_SUB;
    bool    of_whole = (job.dtype == TE_I64 || job.dtype == TE_I32) && runs->compute_f64;
    if (!(of_bools || of_whole) || job.n < BLOCK) return false;
    te_dtype made = sum ? TE_I64 : compares ? TE_BOOL : job.dtype;
    if (out->dtype != made || !is_dense(runs, out, sum ? 0 : runs->ndim)) return false;
    if (sum && !take_side(&job, 0, program, runs, program->outputs[0].value)) return false;
    if (!sum && !take_operation(&job, program, runs, program->outputs[0].value)) return false;
    if (of_bools && !compares && !(job.side[0].from && job.side[1].from)) return false;
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
