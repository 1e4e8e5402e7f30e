/* program_naive.h - row programs evaluated one element at a time, straight from the definitions in program.h: what the
 * backends' results are compared with. Elementary functions come from elementary.h (float32) and elementary64.h
 * (float64), or with TE_NAIVE_OF_LIBRARY, for device code, the latter from the C library. Sums are added in float64, so
 * they are exact only where the test sees to it. */
#ifndef TE_TEST_PROGRAM_NAIVE_H
#define TE_TEST_PROGRAM_NAIVE_H

#include "kernels/elementary64.h"
#include "kernels/philox.h"
#include "test.h"

/* Values are kept as double; in float32 mode every one of them is a float32. */
static double naive_round(double x, bool f64) { return f64 ? x : (double)(float)x; }

static double naive_load(const te_operand *operand, int64_t at, bool f64)
{
    if (!f64 && operand->dtype == TE_I64) return (double)(float)((const int64_t *)operand->data)[at];
    return naive_round(te_load_f64(operand->data, operand->dtype, at), f64);
}

#ifdef TE_NAIVE_OF_LIBRARY
#define TE_NAIVE64(own, of_library) (of_library)
#else
#define TE_NAIVE64(own, of_library) (own)
#endif

static double naive_elementary(te_opcode op, double x, bool f64)
{
    float f = (float)x;
    switch (op) {
    case TE_PW_EXP: return f64 ? TE_NAIVE64(te_exp64(x), exp(x)) : (double)te_exp(f);
    case TE_PW_LOG: return f64 ? TE_NAIVE64(te_log64(x), log(x)) : (double)te_log(f);
    case TE_PW_SIN: return f64 ? TE_NAIVE64(te_sin_turned64(x, 0), sin(x)) : (double)te_sin(f);
    case TE_PW_COS: return f64 ? TE_NAIVE64(te_sin_turned64(x, 1), cos(x)) : (double)te_cos(f);
    case TE_PW_TANH: return f64 ? TE_NAIVE64(te_tanh64(x), tanh(x)) : (double)te_tanh(f);
    case TE_PW_ERF: return f64 ? TE_NAIVE64(te_erf64(x), erf(x)) : (double)te_erf(f);
    case TE_PW_SIGMOID:
        if (!f64) return (double)te_sigmoid(f);
        return TE_NAIVE64(te_sigmoid64(x), (x < 0 ? exp(-fabs(x)) : 1) / (1 + exp(-fabs(x))));
    case TE_PW_TO_BF16: return (double)te_bf16_to_f32(te_f64_to_bf16(x));
    case TE_PW_TO_F16: return (double)te_f16_to_f32(te_f64_to_f16(x));
    case TE_PW_TO_F32: return (double)f;
    default: return NAN;
    }
}

static double naive_unary(te_opcode op, double x, bool f64)
{
    switch (op) {
    case TE_PW_NEG: return -x;
    case TE_PW_ABS: return fabs(x);
    case TE_PW_SIGN: return isnan(x) ? x : (x > 0) - (x < 0);
    case TE_PW_FLOOR: return floor(x);
    case TE_PW_CEIL: return ceil(x);
    case TE_PW_ROUND: return rint(x);
    case TE_PW_TRUNC: return trunc(x);
    case TE_PW_SQRT: return naive_round(sqrt(x), f64);
    case TE_PW_RSQRT: return naive_round(1 / naive_round(sqrt(x), f64), f64);
    case TE_PW_RECIP: return naive_round(1 / x, f64);
    case TE_PW_ISNAN: return isnan(x) ? 1 : 0;
    case TE_PW_ISFINITE: return isfinite(x) ? 1 : 0;
    default: return naive_elementary(op, x, f64);
    }
}

/* One operation in float64 on float32 values, rounded to float32, is the float32 operation: 53 bits are enough. */
static double naive_binary(te_opcode op, double x, double y, bool f64)
{
    switch (op) {
    case TE_PW_ADD: return naive_round(x + y, f64);
    case TE_PW_SUB: return naive_round(x - y, f64);
    case TE_PW_MUL: return naive_round(x * y, f64);
    case TE_PW_DIV: return naive_round(x / y, f64);
    case TE_PW_POW: return f64 ? pow(x, y) : (double)te_pow((float)x, (float)y);
    case TE_PW_MIN: return isnan(x) || isnan(y) ? NAN : y < x ? y : x;
    case TE_PW_MAX: return isnan(x) || isnan(y) ? NAN : x > y ? x : y;
    case TE_PW_LT: return x < y;
    case TE_PW_LE: return x <= y;
    case TE_PW_EQ: return x == y;
    case TE_PW_NE: return x != y;
    default: return NAN;
    }
}

static double naive_random(const te_program *p, const te_run *run, const te_insn *insn, double a, uint64_t element)
{
    te_rng   rng = run->rngs[insn->slot];
    uint32_t word = te_rng_word(rng, element);
    if (insn->op == TE_PW_RANDOM) return (double)(word >> 8) / 16777216.0;
    if (insn->op == TE_PW_NORMAL) {
        uint64_t even = element & ~(uint64_t)1;
        return (double)te_rng_normal(te_rng_word(rng, even), te_rng_word(rng, even + 1), element % 2 != 0);
    }
    const te_insn *drop = &p->insns[insn->arg[0]];
    if (drop->op == TE_PW_CONST) a = drop->imm;
    if (drop->op == TE_PW_PARAM) a = run->params[drop->slot];
    return (double)word >= rint(a * 4294967296.0) ? 1 : 0;
}

/* `step` 0: the same number in every column. */
static double naive_reduce(te_opcode op, const double *v, int step, int64_t n, bool f64)
{
    double r = op == TE_PW_ROWSUM ? 0 : op == TE_PW_ROWMAX ? -INFINITY : INFINITY;
    for (int64_t j = 0; j < n; j++) {
        if (op == TE_PW_ROWSUM) r += v[j * step];
        else r = naive_binary(op == TE_PW_ROWMAX ? TE_PW_MAX : TE_PW_MIN, r, v[j * step], f64);
    }
    return naive_round(r, f64);
}

static int64_t naive_offset(const te_operand *operand, const te_run *run, int64_t row, int64_t column)
{
    int64_t at = te_operand_place(operand->block, column) * operand->stride[run->ndim - 1];
    for (int d = run->ndim - 2; d >= 0; d--) {
        at += row % run->shape[d] * operand->stride[d];
        row /= run->shape[d];
    }
    return at;
}

/* All values of one row: value v of column j in values[v * columns + j], lower rates in column 0. */
static void naive_row(const te_program *p, const te_run *run, int64_t row, int64_t columns, double *values)
{
    int64_t stride = columns ? columns : 1;
    bool    f64 = run->compute_f64;
    for (int v = 0; v < p->n_insns; v++) {
        const te_insn *insn = &p->insns[v];
        int64_t        n = insn->rate == TE_RATE_ELEM ? columns : 1;
        for (int64_t j = 0; j < n; j++) {
            double arg[3] = {0, 0, 0}, *out = &values[v * stride + j];
            for (int k = 0; k < te_opcode_args(insn->op); k++)
                arg[k] = values[insn->arg[k] * stride + (p->insns[insn->arg[k]].rate == TE_RATE_ELEM ? j : 0)];
            const te_operand *in = insn->op == TE_PW_LOAD ? &run->inputs[insn->slot] : NULL;
            switch (insn->op) {
            case TE_PW_LOAD:
                *out = naive_load(in, insn->rate == TE_RATE_UNIFORM ? 0 : naive_offset(in, run, row, j), f64);
                break;
            case TE_PW_PARAM: *out = naive_round(run->params[insn->slot], f64); break;
            case TE_PW_CONST: *out = naive_round(insn->imm, f64); break;
            case TE_PW_COLUMN: *out = naive_round((double)j, f64); break;
            case TE_PW_RANDOM:
            case TE_PW_KEEP:
            case TE_PW_NORMAL: *out = naive_random(p, run, insn, arg[0], (uint64_t)(row * columns + j)); break;
            case TE_PW_WHERE: *out = arg[0] != 0 ? arg[1] : arg[2]; break;
            case TE_PW_ROWSUM:
            case TE_PW_ROWMAX:
            case TE_PW_ROWMIN:
                *out = naive_reduce(insn->op, &values[insn->arg[0] * stride],
                                    p->insns[insn->arg[0]].rate == TE_RATE_ELEM, columns, f64);
                break;
            default:
                *out = te_opcode_args(insn->op) == 1 ? naive_unary(insn->op, arg[0], f64)
                                                     : naive_binary(insn->op, arg[0], arg[1], f64);
            }
        }
    }
}

static void naive_store(const te_operand *out, int64_t at, double value, bool f64)
{
    if (out->accumulate) value = naive_round(naive_load(out, at, f64) + value, f64);
    te_store_f64(out->data, out->dtype, at, value);
}

/* Runs the program. The operands of inputs must not be those of outputs. */
static void naive_run(const te_program *p, const te_run *run)
{
    int64_t columns = run->shape[run->ndim - 1], rows = 1, stride = columns ? columns : 1;
    for (int d = 0; d < run->ndim - 1; d++) rows *= run->shape[d];
    double *values = calloc((size_t)(stride * p->n_insns), sizeof *values);
    double *sums = calloc((size_t)(stride * p->n_outputs), sizeof *sums);
    for (int64_t row = 0; row < rows; row++) {
        naive_row(p, run, row, columns, values);
        for (int o = 0; o < p->n_outputs; o++) {
            int               v = p->outputs[o].value, kind = p->outputs[o].kind;
            const te_operand *out = &run->outputs[o];
            bool              elements = p->insns[v].rate == TE_RATE_ELEM;
            if (!out->data) continue;
            if (kind == TE_OUT_ROW)
                naive_store(out, naive_offset(out, run, row, 0), values[v * stride], run->compute_f64);
            for (int64_t j = 0; kind != TE_OUT_ROW && j < columns; j++) {
                double value = values[v * stride + (elements ? j : 0)],
                       *sum = &sums[o * stride + (kind == TE_OUT_COLSUM ? j : 0)];
                if (kind == TE_OUT_ELEM) naive_store(out, naive_offset(out, run, row, j), value, run->compute_f64);
                else if (kind == TE_OUT_AMAX) *sum = fabs(value) > *sum ? fabs(value) : *sum;
                else *sum += value;
            }
        }
    }
    for (int o = 0; o < p->n_outputs; o++) {
        const te_operand *out = &run->outputs[o];
        int               kind = p->outputs[o].kind;
        if (!out->data || kind <= TE_OUT_ROW) continue;
        if (kind == TE_OUT_COLSUM) {
            for (int64_t j = 0; j < columns; j++)
                naive_store(out, te_operand_place(out->block, j) * out->stride[run->ndim - 1],
                            naive_round(sums[o * stride + j], run->compute_f64), run->compute_f64);
        } else if (kind == TE_OUT_AMAX && out->accumulate) {
            double old = naive_load(out, 0, run->compute_f64);
            te_store_f64(out->data, out->dtype, 0, old > sums[o * stride] ? old : sums[o * stride]);
        } else {
            naive_store(out, 0, naive_round(sums[o * stride], run->compute_f64), run->compute_f64);
        }
    }
    free(values);
    free(sums);
}

#endif
