/* program_diff_algebra.c - sums and products of adjoints.
 *
 * Adjoints are our own expressions, so here, unlike in te_program_emit, the rules of real numbers may be used: signs
 * move outwards until a sum swallows them, factors that are constant along the row are gathered and leave row sums, and
 * a row sum that the forward pass already took is not taken again. What comes out differs from the plain chain rule by
 * roundings only. What does not depend is TE_VALUE_NONE and vanishes; a factor 0 stays, as 0 times infinity is NaN.
 */
#include "program_diff.h"

int te_diff_emit(te_diff *diff, te_opcode op, int a, int b, int c)
{
    if (diff->status != TE_OK) return TE_VALUE_NONE;
    int value = te_program_emit(diff->backward, op, a, b, c);
    if (value >= 0) return value;
    te_diff_fail_memory(diff);
    return TE_VALUE_NONE;
}

int te_diff_const(te_diff *diff, double number)
{
    if (diff->status != TE_OK) return TE_VALUE_NONE;
    int value = te_program_const(diff->backward, number);
    if (value >= 0) return value;
    te_diff_fail_memory(diff);
    return TE_VALUE_NONE;
}

static const te_insn *insn_of(const te_diff *diff, int value) { return &diff->backward->insns[value]; }

static bool is_op(const te_diff *diff, int value, te_opcode op) { return te_program_is_op(diff->backward, value, op); }

static te_rate rate_of(const te_diff *diff, int value) { return te_program_rate(diff->backward, value); }

/* Whether another program made the value: its roundings stay as they are. */
static bool is_opaque(const te_diff *diff, int value)
{
    for (int i = 0; i < diff->n_opaque; i++)
        if (diff->opaque[i] == value) return true;
    return false;
}

/* --- sums --------------------------------------------------------------------------------------------------------- */

enum { MAX_TERM_DEPTH = 8 };

/* e of a product e * row that is a value per element and one per row; TE_VALUE_NONE if it is none. */
static int beside_row(const te_diff *diff, int product, int row)
{
    const te_insn *insn = insn_of(diff, product);
    for (int k = 0; insn->op == TE_PW_MUL && k < 2; k++)
        if (insn->arg[k] == row && rate_of(diff, insn->arg[1 - k]) == TE_RATE_ELEM) return insn->arg[1 - k];
    return TE_VALUE_NONE;
}

/* sum + f (c r) as ... + (e + f c) r, where the sum has a term e r. */
static int joined_to_term(te_diff *diff, int sum, int f, int c, int r, int depth)
{
    const te_insn insn = *insn_of(diff, sum);
    int e = beside_row(diff, sum, r);
    if (is_opaque(diff, sum)) return TE_VALUE_NONE;
    if (e >= 0) return te_diff_mul(diff, te_diff_add(diff, e, te_diff_mul(diff, f, c)), r);
    if (depth == 0 || (insn.op != TE_PW_ADD && insn.op != TE_PW_SUB)) return TE_VALUE_NONE;
    for (int k = insn.op == TE_PW_ADD; k >= 0; k--) {
        int term = joined_to_term(diff, insn.arg[k], f, c, r, depth - 1);
        if (term < 0) continue;
        return te_diff_emit(diff, (te_opcode)insn.op, k ? insn.arg[0] : term, k ? term : insn.arg[1], -1);
    }
    return TE_VALUE_NONE;
}

/* The gradient of a norm, e r + x (c r) with r = 1 / |x|, becomes (e + x c) r. That are as many products, and x c is of
 * the size of e, whereas c r falls with the square of x and vanishes where rows are large. */
static int joined_by_row(te_diff *diff, int a, int b)
{
    const te_insn product = *insn_of(diff, b);
    for (int k = 0; product.op == TE_PW_MUL && k < 2; k++) {
        const te_insn row = *insn_of(diff, product.arg[k]);
        if (row.rate != TE_RATE_ROW || row.op != TE_PW_MUL || beside_row(diff, b, product.arg[k]) < 0) continue;
        for (int i = 0; i < 2; i++) {
            if (rate_of(diff, row.arg[i]) != TE_RATE_ROW) continue;
            int sum = joined_to_term(diff, a, product.arg[1 - k], row.arg[1 - i], row.arg[i], MAX_TERM_DEPTH);
            if (sum >= 0) return sum;
        }
    }
    return TE_VALUE_NONE;
}

int te_diff_neg(te_diff *diff, int a) { return a < 0 ? TE_VALUE_NONE : te_diff_emit(diff, TE_PW_NEG, a, -1, -1); }

int te_diff_add(te_diff *diff, int a, int b)
{
    if (a < 0) return b;
    if (b < 0) return a;
    if (is_op(diff, b, TE_PW_NEG)) return te_diff_sub(diff, a, insn_of(diff, b)->arg[0]);
    if (is_op(diff, a, TE_PW_NEG)) return te_diff_sub(diff, b, insn_of(diff, a)->arg[0]);
    int joined = joined_by_row(diff, a, b);
    return joined >= 0 ? joined : te_diff_emit(diff, TE_PW_ADD, a, b, -1);
}

int te_diff_sub(te_diff *diff, int a, int b)
{
    if (b < 0) return a;
    if (a < 0) return te_diff_neg(diff, b);
    if (a == b && rate_of(diff, a) != TE_RATE_ELEM) return TE_VALUE_NONE; /* of what a softmax is shifted by */
    if (is_op(diff, b, TE_PW_NEG)) return te_diff_add(diff, a, insn_of(diff, b)->arg[0]);
    if (is_op(diff, a, TE_PW_NEG)) return te_diff_neg(diff, te_diff_add(diff, insn_of(diff, a)->arg[0], b));
    return te_diff_emit(diff, TE_PW_SUB, a, b, -1);
}

int te_diff_where(te_diff *diff, int condition, int a, int b)
{
    if (a < 0 && b < 0) return TE_VALUE_NONE;
    if (b < 0 && is_op(diff, a, TE_PW_NEG)) {
        int positive = insn_of(diff, a)->arg[0];
        return te_diff_neg(diff, te_diff_where(diff, condition, positive, TE_VALUE_NONE));
    }
    int zero = a < 0 || b < 0 ? te_diff_const(diff, 0.0) : TE_VALUE_NONE;
    int value = te_diff_emit(diff, TE_PW_WHERE, condition, a < 0 ? zero : a, b < 0 ? zero : b);
    return value == zero ? TE_VALUE_NONE : value; /* the condition is a constant */
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* x when `product` is x / divisor, as a quotient or as a product with the reciprocal. */
static int without_divisor(const te_diff *diff, int product, int divisor)
{
    const te_insn *insn = insn_of(diff, product);
    if (insn->op == TE_PW_DIV && insn->arg[1] == divisor) return insn->arg[0];
    for (int k = 0; insn->op == TE_PW_MUL && k < 2; k++) {
        int factor = insn->arg[k];
        if (is_op(diff, factor, TE_PW_RECIP) && insn_of(diff, factor)->arg[0] == divisor) return insn->arg[1 - k];
    }
    return TE_VALUE_NONE;
}

/* (e * f) * factor with e per element and both factors rarer becomes e * (f * factor): one product per element. */
static int gathered(te_diff *diff, int product, int factor)
{
    const te_insn insn = *insn_of(diff, product);
    bool applies = insn.op == TE_PW_MUL && insn.rate == TE_RATE_ELEM && rate_of(diff, factor) != TE_RATE_ELEM;
    if (!applies) return TE_VALUE_NONE;
    for (int k = 0; k < 2; k++)
        if (rate_of(diff, insn.arg[k]) != TE_RATE_ELEM)
            return te_diff_mul(diff, insn.arg[1 - k], te_diff_mul(diff, insn.arg[k], factor));
    return TE_VALUE_NONE;
}

/* (c r) * number is (c number) r, for c and r per row: r stays apart for joined_by_row. It is the older of the two. */
static int within_row(te_diff *diff, int product, int number)
{
    const te_insn insn = *insn_of(diff, product);
    if (insn.op != TE_PW_MUL || rate_of(diff, number) != TE_RATE_UNIFORM) return TE_VALUE_NONE;
    if (rate_of(diff, insn.arg[0]) != TE_RATE_ROW || rate_of(diff, insn.arg[1]) != TE_RATE_ROW) return TE_VALUE_NONE;
    if (te_program_is_const(diff->backward, number, -1.0)) return TE_VALUE_NONE; /* a sign, which moves outwards */
    int newer = insn.arg[0] < insn.arg[1];
    return te_diff_emit(diff, TE_PW_MUL, te_diff_mul(diff, insn.arg[newer], number), insn.arg[1 - newer], -1);
}

static int product_rule(te_diff *diff, int a, int b)
{
    const te_program *program = diff->backward;
    if (te_program_is_const(program, a, 1.0)) return b;
    if (te_program_is_const(program, a, -1.0)) return te_diff_neg(diff, b);
    if (is_op(diff, a, TE_PW_NEG)) return te_diff_neg(diff, te_diff_mul(diff, insn_of(diff, a)->arg[0], b));
    if (is_opaque(diff, a)) return TE_VALUE_NONE;
    int cancelled = without_divisor(diff, a, b);
    if (cancelled < 0) cancelled = within_row(diff, a, b);
    return cancelled >= 0 ? cancelled : gathered(diff, a, b);
}

int te_diff_mul(te_diff *diff, int a, int b)
{
    if (a < 0 || b < 0 || diff->status != TE_OK) return TE_VALUE_NONE;
    int simpler = product_rule(diff, a, b);
    if (simpler == TE_VALUE_NONE) simpler = product_rule(diff, b, a);
    return simpler != TE_VALUE_NONE ? simpler : te_diff_emit(diff, TE_PW_MUL, a, b, -1);
}

/* A divisor that is rarer than what it divides is inverted once. */
int te_diff_div(te_diff *diff, int a, int b)
{
    if (a < 0 || b < 0 || diff->status != TE_OK) return TE_VALUE_NONE;
    if (is_op(diff, a, TE_PW_NEG)) return te_diff_neg(diff, te_diff_div(diff, insn_of(diff, a)->arg[0], b));
    if (rate_of(diff, b) < rate_of(diff, a)) return te_diff_mul(diff, a, te_diff_emit(diff, TE_PW_RECIP, b, -1, -1));
    return te_diff_emit(diff, TE_PW_DIV, a, b, -1);
}

/* --- row sums ----------------------------------------------------------------------------------------------------- */

/* A product as elem * row with the sign apart; `row` is TE_VALUE_NONE for 1. */
typedef struct factors {
    int  elem, row;
    bool negative;
} factors;

static int times(te_diff *diff, int a, int b) { return a < 0 ? b : b < 0 ? a : te_diff_mul(diff, a, b); }

static factors split_factors(te_diff *diff, int value, int depth);

static factors split_product(te_diff *diff, int value, int depth)
{
    const te_insn insn = *insn_of(diff, value);
    int a = insn.arg[0], b = insn.arg[1];
    bool divides = insn.op == TE_PW_DIV;
    if (rate_of(diff, b) != TE_RATE_ELEM) {
        factors left = split_factors(diff, a, depth - 1);
        int factor = divides ? te_diff_emit(diff, TE_PW_RECIP, b, -1, -1) : b;
        return (factors){left.elem, times(diff, left.row, factor), left.negative};
    }
    if (!divides && rate_of(diff, a) != TE_RATE_ELEM) {
        factors right = split_factors(diff, b, depth - 1);
        return (factors){right.elem, times(diff, a, right.row), right.negative};
    }
    factors left = {TE_VALUE_NONE, a, false}, right = {b, TE_VALUE_NONE, false};
    if (rate_of(diff, a) == TE_RATE_ELEM) left = split_factors(diff, a, depth - 1);
    if (!divides) right = split_factors(diff, b, depth - 1);
    if (left.elem == a && right.elem == b) return (factors){value, TE_VALUE_NONE, false};
    int elem = divides ? left.elem < 0 ? te_diff_emit(diff, TE_PW_RECIP, b, -1, -1) : te_diff_div(diff, left.elem, b)
                       : te_diff_mul(diff, left.elem, right.elem);
    return (factors){elem, times(diff, left.row, right.row), left.negative != right.negative};
}

static factors split_factors(te_diff *diff, int value, int depth)
{
    factors whole = {value, TE_VALUE_NONE, false};
    if (diff->status != TE_OK || value < 0 || depth == 0 || is_opaque(diff, value)) return whole;
    if (is_op(diff, value, TE_PW_NEG)) {
        factors inner = split_factors(diff, insn_of(diff, value)->arg[0], depth - 1);
        inner.negative = !inner.negative;
        return inner;
    }
    if (is_op(diff, value, TE_PW_MUL) || is_op(diff, value, TE_PW_DIV)) return split_product(diff, value, depth);
    return whole;
}

/* Formulas have the row's length as a parameter; elsewhere it is counted. */
static int row_length(te_diff *diff)
{
    if (diff->request->row_length > 0) return te_diff_const(diff, diff->request->row_length);
    if (!diff->request->formula) {
        int column = te_diff_emit(diff, TE_PW_COLUMN, -1, -1, -1);
        return te_diff_emit(diff, TE_PW_ROWSUM, te_diff_emit(diff, TE_PW_EQ, column, column, -1), -1, -1);
    }
    int value = te_program_param(diff->backward, diff->request->formula->n_params);
    return value >= 0 ? value : (te_diff_fail_memory(diff), TE_VALUE_NONE);
}

static int known_rowsum(te_diff *diff, int elem)
{
    for (int i = 0; i < diff->n_values; i++) {
        const te_insn *insn = &diff->forward->insns[i];
        if (insn->op == TE_PW_ROWSUM && diff->mapped[insn->arg[0]] == elem) return te_diff_value(diff, i);
    }
    return TE_VALUE_NONE;
}

/* sum / n, or sum * (1/n). */
static bool divides_by_row_length(const te_diff *diff, const te_insn *insn)
{
    const te_insn *by = &diff->forward->insns[insn->arg[1]];
    double n = diff->request->row_length;
    if (n > 0 && by->op == TE_PW_CONST)
        return (insn->op == TE_PW_DIV && by->imm == n) || (insn->op == TE_PW_MUL && by->imm == 1 / n);
    return insn->op == TE_PW_DIV && by->op == TE_PW_PARAM && diff->request->formula &&
           by->slot == diff->request->formula->n_params;
}

/* Whether a value is x - rowsum(x) / n: over the row it sums to 0. */
static bool is_centered(const te_diff *diff, int elem)
{
    const te_insn *insns = diff->forward->insns;
    for (int i = 0; i < diff->n_values; i++) {
        if (diff->mapped[i] != elem || insns[i].op != TE_PW_SUB) continue;
        const te_insn *mean = &insns[insns[i].arg[1]];
        if (te_opcode_args((te_opcode)mean->op) != 2 || insns[mean->arg[0]].op != TE_PW_ROWSUM) continue;
        if (insns[mean->arg[0]].arg[0] == insns[i].arg[0] && divides_by_row_length(diff, mean)) return true;
    }
    return false;
}

/* In the sum of a row, a term that is a centered value times a number per row counts nothing. This turns the two
 * reductions of a LayerNorm's gradient, of which one would wait for the other, into two that run side by side. */
static int without_centered(te_diff *diff, int a, int depth)
{
    const te_insn insn = *insn_of(diff, a);
    if (insn.op != TE_PW_ADD && insn.op != TE_PW_SUB) return a;
    for (int k = 0; k < 2; k++) {
        if (rate_of(diff, insn.arg[k]) != TE_RATE_ELEM) return a;
        factors parts = split_factors(diff, insn.arg[k], depth);
        if (parts.elem < 0 || !is_centered(diff, parts.elem)) continue;
        if (k == 0 && insn.op == TE_PW_SUB) return te_diff_neg(diff, insn.arg[1]);
        return insn.arg[1 - k];
    }
    return a;
}

int te_diff_rowsum(te_diff *diff, int a)
{
    enum { MAX_SPLIT_DEPTH = 8 }; /* shared factors are visited once per path */
    if (a >= 0 && diff->status == TE_OK && is_op(diff, a, TE_PW_NEG))
        return te_diff_neg(diff, te_diff_rowsum(diff, insn_of(diff, a)->arg[0]));
    if (a < 0 || diff->status != TE_OK) return TE_VALUE_NONE;
    if (rate_of(diff, a) != TE_RATE_ELEM) return te_diff_mul(diff, a, row_length(diff));
    factors parts = split_factors(diff, a, MAX_SPLIT_DEPTH);
    if (parts.elem < 0) return TE_VALUE_NONE;
    int rest = without_centered(diff, parts.elem, MAX_SPLIT_DEPTH);
    int sum = rest == parts.elem ? known_rowsum(diff, rest) : te_diff_rowsum(diff, rest);
    if (sum < 0 && rest == parts.elem) sum = te_diff_emit(diff, TE_PW_ROWSUM, rest, -1, -1);
    if (parts.row >= 0) sum = te_diff_mul(diff, sum, parts.row);
    return parts.negative ? te_diff_neg(diff, sum) : sum;
}
