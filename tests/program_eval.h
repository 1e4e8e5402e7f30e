/* program_eval.h - what the tests of programs share: a naive evaluator, random numbers and a memory hook that fails.
 *
 * The evaluator computes one instruction after the other over a whole rows x columns array in double, and rounds each
 * result to float where a float32 run is to be imitated (for + - * / sqrt that equals float arithmetic). Its generators
 * are hashes of (slot, element), not Philox: the tests need only that equal slots give equal numbers.
 */
#ifndef TE_TEST_PROGRAM_EVAL_H
#define TE_TEST_PROGRAM_EVAL_H

#include "core/program_build.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* --- random numbers ----------------------------------------------------------------------------------------------- */

static inline uint64_t eval_hash(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline uint32_t random_bits(uint64_t *state) { return (uint32_t)(eval_hash((*state)++) >> 32); }
static inline int random_below(uint64_t *state, int n) { return (int)(random_bits(state) % (uint32_t)n); }
static inline double random_between(uint64_t *state, double low, double high)
{
    return low + (high - low) * (random_bits(state) / 4294967296.0);
}

/* --- memory that runs out ----------------------------------------------------------------------------------------- */

typedef struct failing_heap {
    size_t live;      /* bytes handed out and not given back */
    long   calls, fail_at; /* the fail_at-th allocation and all later ones fail; 0: none */
} failing_heap;

static inline void *failing_realloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    failing_heap *heap = user;
    if (new_size == 0) {
        heap->live -= old_size;
        free(ptr);
        return NULL;
    }
    if (++heap->calls >= heap->fail_at && heap->fail_at) return NULL;
    void *grown = realloc(ptr, new_size);
    if (grown) heap->live += new_size - (ptr ? old_size : 0);
    return grown;
}

/* --- instructions ------------------------------------------------------------------------------------------------- */

typedef struct eval_operand {
    const double *data;
    int           row_stride, column_stride;
} eval_operand;

typedef struct eval_space {
    int                 rows, columns;
    const eval_operand *inputs;
    const double       *params;
    bool                f32;
} eval_space;

static inline double eval_bits_rounded(double a, int mantissa_bits, int lowest_exponent, double overflow)
{
    int exponent;
    if (a == 0 || !isfinite(a)) return a;
    frexp(a, &exponent);
    if (exponent < lowest_exponent) exponent = lowest_exponent;
    double unit = ldexp(1.0, exponent - mantissa_bits), rounded = rint(a / unit) * unit;
    return fabs(rounded) >= overflow ? copysign(INFINITY, a) : copysign(rounded, a);
}

static inline double eval_generator(const te_insn *insn, double a, size_t element)
{
    uint64_t word = eval_hash(((uint64_t)insn->slot << 40) + element);
    if (insn->op == TE_PW_KEEP) return (double)(word >> 32) >= rint(a * 4294967296.0);
    double u = (double)(word >> 40) / 16777216.0;
    if (insn->op == TE_PW_RANDOM) return u;
    double v = (double)((eval_hash(word) >> 40) + 1) / 16777216.0;
    return sqrt(-2 * log(v)) * cos(6.283185307179586 * u);
}

static inline double eval_pow(double a, double b)
{
    if (b == 2) return a * a;
    if (b == 3) return a * a * a;
    return pow(a, b);
}

static inline double eval_insn(te_opcode op, double a, double b, double c)
{
    switch (op) {
    case TE_PW_NEG: return -a;
    case TE_PW_ABS: return fabs(a);
    case TE_PW_SIGN: return isnan(a) ? a : (a > 0) - (a < 0);
    case TE_PW_FLOOR: return floor(a);
    case TE_PW_CEIL: return ceil(a);
    case TE_PW_ROUND: return rint(a);
    case TE_PW_TRUNC: return trunc(a);
    case TE_PW_SQRT: return sqrt(a);
    case TE_PW_RECIP: return 1 / a;
    case TE_PW_EXP: return exp(a);
    case TE_PW_LOG: return log(a);
    case TE_PW_SIN: return sin(a);
    case TE_PW_COS: return cos(a);
    case TE_PW_TANH: return tanh(a);
    case TE_PW_SIGMOID: return 1 / (1 + exp(-a));
    case TE_PW_ERF: return erf(a);
    case TE_PW_ISNAN: return isnan(a);
    case TE_PW_ISFINITE: return isfinite(a);
    case TE_PW_TO_BF16: return eval_bits_rounded(a, 8, -125, 0x1p128);
    case TE_PW_TO_F16: return eval_bits_rounded(a, 11, -13, 65536.0);
    case TE_PW_TO_F32: return (float)a;
    case TE_PW_ADD: return a + b;
    case TE_PW_SUB: return a - b;
    case TE_PW_MUL: return a * b;
    case TE_PW_DIV: return a / b;
    case TE_PW_MIN: return isnan(a) || a < b ? a : b;
    case TE_PW_MAX: return isnan(a) || a > b ? a : b;
    case TE_PW_LT: return a < b;
    case TE_PW_LE: return a <= b;
    case TE_PW_EQ: return a == b;
    case TE_PW_NE: return a != b;
    case TE_PW_WHERE: return a != 0 ? b : c;
    default: return NAN;
    }
}

static inline double eval_rounded(double a, bool f32) { return f32 ? (double)(float)a : a; }

/* Instructions that are more than one rounding away from their arguments. */
static inline double eval_stepwise(te_opcode op, double a, double b, bool f32)
{
    if (op == TE_PW_RSQRT) return eval_rounded(1 / eval_rounded(sqrt(a), f32), f32);
    if (b == 3) return eval_rounded(eval_rounded(a * a, f32) * a, f32);
    return eval_rounded(eval_pow(a, b), f32);
}

static inline double eval_reduced(te_opcode op, const double *row, int columns, bool f32)
{
    double r = op == TE_PW_ROWSUM ? 0 : op == TE_PW_ROWMAX ? -INFINITY : INFINITY;
    for (int c = 0; c < columns; c++) {
        if (op == TE_PW_ROWSUM) r += row[c];
        else if (isnan(row[c]) || (op == TE_PW_ROWMAX ? row[c] > r : row[c] < r)) r = row[c];
    }
    return eval_rounded(r, f32);
}

static inline double eval_element(const eval_space *space, const te_insn *insn, double *const *values, int row,
                                  int column)
{
    size_t element = (size_t)row * (size_t)space->columns + (size_t)column;
    double a = insn->arg[0] >= 0 ? values[insn->arg[0]][element] : 0;
    double b = insn->arg[1] >= 0 ? values[insn->arg[1]][element] : 0;
    double c = insn->arg[2] >= 0 ? values[insn->arg[2]][element] : 0;
    switch ((te_opcode)insn->op) {
    case TE_PW_LOAD: {
        const eval_operand *input = &space->inputs[insn->slot];
        return eval_rounded(input->data[row * input->row_stride + column * input->column_stride], space->f32);
    }
    case TE_PW_PARAM: return eval_rounded(space->params[insn->slot], space->f32);
    case TE_PW_CONST: return eval_rounded(insn->imm, space->f32);
    case TE_PW_COLUMN: return column;
    case TE_PW_RANDOM: case TE_PW_KEEP: case TE_PW_NORMAL:
        return eval_rounded(eval_generator(insn, a, element), space->f32);
    case TE_PW_ROWSUM: case TE_PW_ROWMAX: case TE_PW_ROWMIN:
        return eval_reduced((te_opcode)insn->op, values[insn->arg[0]] + element - column, space->columns, space->f32);
    case TE_PW_RSQRT: case TE_PW_POW: return eval_stepwise((te_opcode)insn->op, a, b, space->f32);
    default: return eval_rounded(eval_insn((te_opcode)insn->op, a, b, c), space->f32);
    }
}

/* --- programs ----------------------------------------------------------------------------------------------------- */

static inline int eval_output_size(te_output_kind kind, int rows, int columns)
{
    switch (kind) {
    case TE_OUT_ELEM: return rows * columns;
    case TE_OUT_ROW: return rows;
    case TE_OUT_COLSUM: return columns;
    default: return 1;
    }
}

/* How an array of that size is spread over the space: as an input of that broadcast, or as an output. */
static inline eval_operand eval_operand_of(te_output_kind kind, const double *data, int columns)
{
    return (eval_operand){data, kind == TE_OUT_ELEM ? columns : kind == TE_OUT_ROW,
                          kind == TE_OUT_ELEM || kind == TE_OUT_COLSUM};
}

static inline void eval_store(te_output_kind kind, const eval_space *space, const double *value, double *out)
{
    eval_operand place = eval_operand_of(kind, out, space->columns);
    bool sums = kind != TE_OUT_ELEM && kind != TE_OUT_ROW;
    if (sums) memset(out, 0, sizeof *out * (size_t)eval_output_size(kind, space->rows, space->columns));
    for (int r = 0; r < space->rows; r++)
        for (int c = 0; c < space->columns; c++) {
            double v = value[r * space->columns + c], *at = &out[r * place.row_stride + c * place.column_stride];
            if (kind == TE_OUT_AMAX) *at = fabs(v) > *at ? fabs(v) : *at;
            else *at = sums ? *at + v : v;
        }
}

/* outputs[j] receives eval_output_size numbers. A value of lower rate is taken from the first column, or element, so a
 * wrong rate shows in the results. */
static inline void program_eval(const te_program *program, const eval_space *space, double *const *outputs)
{
    size_t size = (size_t)space->rows * (size_t)space->columns, n = (size_t)program->n_insns;
    double *memory = calloc(n * size + 1, sizeof *memory), **values = malloc((n + 1) * sizeof *values);
    for (int i = 0; i < program->n_insns; i++) {
        const te_insn *insn = &program->insns[i];
        double *value = values[i] = memory + (size_t)i * size;
        for (int r = 0; r < space->rows; r++)
            for (int c = 0; c < space->columns; c++) {
                int at = r * space->columns + c;
                int first = insn->rate == TE_RATE_ELEM ? at : insn->rate == TE_RATE_ROW ? at - c : 0;
                value[at] = at == first ? eval_element(space, insn, values, r, c) : value[first];
            }
    }
    for (int j = 0; j < program->n_outputs; j++)
        eval_store((te_output_kind)program->outputs[j].kind, space, values[program->outputs[j].value], outputs[j]);
    free(values);
    free(memory);
}

static inline int count_opcode(const te_program *program, te_opcode op)
{
    int count = 0;
    for (int i = 0; i < program->n_insns; i++) count += program->insns[i].op == op;
    return count;
}

#endif
