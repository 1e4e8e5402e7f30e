/* program_diff_rules.c - one derivative per opcode.
 *
 * A rule gets the adjoint d of a result r = op(a, b, c) and adds to the adjoints of the arguments. Where the derivative
 * has a cheaper form in the result (exp, tanh, sqrt …) that is used. Choices (min, max, where) use WHERE rather than a
 * product with 0 or 1: an infinite adjoint must not become NaN on the side that was not chosen.
 */
#include "program_diff.h"

/* What a rule works on: the forward instruction and one part of its adjoint. */
typedef struct rule {
    te_diff *diff;
    int      value;    /* forward value of the result */
    te_insn  insn;
    int      d;        /* backward value */
    bool     per_elem; /* which part d is, and thus contributes to */
} rule;

static bool wants(const rule *r, int k) { return r->diff->flags[r->insn.arg[k]] & TE_DIFF_ACTIVE; }
static int  argument(const rule *r, int k) { return te_diff_value(r->diff, r->insn.arg[k]); }
static int  result(const rule *r) { return te_diff_value(r->diff, r->value); }
static int  one(const rule *r, te_opcode op, int a) { return te_diff_emit(r->diff, op, a, -1, -1); }

void te_diff_contribute(te_diff *diff, int forward_value, int value, bool per_elem)
{
    te_adjoint *adjoint = &diff->adjoints[forward_value];
    int32_t *part = per_elem ? &adjoint->per_elem : &adjoint->per_row;
    if (per_elem && (diff->flags[forward_value] & TE_DIFF_TENSOR)) part = &diff->pending[forward_value];
    *part = te_diff_add(diff, *part, value);
}

static void give(const rule *r, int k, int value) { te_diff_contribute(r->diff, r->insn.arg[k], value, r->per_elem); }

/* --- one argument ------------------------------------------------------------------------------------------------- */

/* dr/da of the functions whose rule is a product; TE_VALUE_NONE for those without a gradient. */
static int derivative(const rule *r)
{
    te_diff *diff = r->diff;
    switch ((te_opcode)r->insn.op) {
    case TE_PW_ABS: return one(r, TE_PW_SIGN, argument(r, 0));
    case TE_PW_SIN: return one(r, TE_PW_COS, argument(r, 0));
    case TE_PW_COS: return te_diff_neg(diff, one(r, TE_PW_SIN, argument(r, 0)));
    case TE_PW_EXP: return result(r);
    case TE_PW_RECIP: return te_diff_neg(diff, te_diff_emit(diff, TE_PW_MUL, result(r), result(r), -1));
    case TE_PW_RSQRT: { /* but of rows */
        int y = result(r), cube = te_diff_emit(diff, TE_PW_MUL, te_diff_emit(diff, TE_PW_MUL, y, y, -1), y, -1);
        return te_diff_emit(diff, TE_PW_MUL, te_diff_const(diff, -0.5), cube, -1);
    }
    case TE_PW_TANH: {
        int y = result(r), square = te_diff_emit(diff, TE_PW_MUL, y, y, -1);
        return te_diff_emit(diff, TE_PW_SUB, te_diff_const(diff, 1.0), square, -1);
    }
    case TE_PW_SIGMOID: {
        int y = result(r), rest = te_diff_emit(diff, TE_PW_SUB, te_diff_const(diff, 1.0), y, -1);
        return te_diff_emit(diff, TE_PW_MUL, y, rest, -1);
    }
    case TE_PW_ERF: {
        int a = argument(r, 0), square = te_diff_emit(diff, TE_PW_MUL, a, a, -1);
        int bell = one(r, TE_PW_EXP, one(r, TE_PW_NEG, square));
        return te_diff_emit(diff, TE_PW_MUL, te_diff_const(diff, 1.12837916709551257390), bell, -1); /* 2 / sqrt(pi) */
    }
    default: return TE_VALUE_NONE;
    }
}

/* -d y^3 / 2, one factor after the other: d is a sum over a row and large where y is small, but y^3 alone is 0 for rows
 * of 1e15. The last y is where te_diff_add looks for it. */
static int root_of_row(const rule *r)
{
    te_diff *diff = r->diff;
    int y = result(r), half = te_diff_mul(diff, r->d, te_diff_const(diff, -0.5));
    return te_diff_mul(diff, te_diff_mul(diff, te_diff_mul(diff, half, y), y), y);
}

static void unary_rule(const rule *r)
{
    te_diff *diff = r->diff;
    switch ((te_opcode)r->insn.op) {
    case TE_PW_NEG: give(r, 0, te_diff_neg(diff, r->d)); break;
    case TE_PW_TO_BF16: case TE_PW_TO_F16: case TE_PW_TO_F32: give(r, 0, r->d); break;
    case TE_PW_LOG: give(r, 0, te_diff_div(diff, r->d, argument(r, 0))); break;
    case TE_PW_SQRT:
        give(r, 0, te_diff_div(diff, te_diff_mul(diff, r->d, te_diff_const(diff, 0.5)), result(r)));
        break;
    default:
        if (r->insn.op == TE_PW_RSQRT && r->insn.rate == TE_RATE_ROW) give(r, 0, root_of_row(r));
        else give(r, 0, te_diff_mul(diff, r->d, derivative(r)));
    }
}

/* --- two and three arguments -------------------------------------------------------------------------------------- */

/* Which argument of a product is the square of the other one; -1: none. */
static int square_index(const rule *r)
{
    for (int k = 0; k < 2; k++) {
        const te_insn *insn = &r->diff->forward->insns[r->insn.arg[k]];
        int base = r->insn.arg[1 - k];
        if (insn->op == TE_PW_MUL && insn->arg[0] == base && insn->arg[1] == base) return k;
    }
    return -1;
}

/* Squares and cubes in one step, with their factor 2 or 3 on d, where it may meet others. */
static void mul_rule(const rule *r)
{
    te_diff *diff = r->diff;
    int square = square_index(r);
    if (r->insn.arg[0] == r->insn.arg[1]) {
        give(r, 0, te_diff_mul(diff, te_diff_mul(diff, r->d, te_diff_const(diff, 2.0)), argument(r, 0)));
        return;
    }
    if (square >= 0) {
        give(r, 1 - square, te_diff_mul(diff, te_diff_mul(diff, r->d, te_diff_const(diff, 3.0)), argument(r, square)));
        return;
    }
    if (wants(r, 0)) give(r, 0, te_diff_mul(diff, r->d, argument(r, 1)));
    if (wants(r, 1)) give(r, 1, te_diff_mul(diff, r->d, argument(r, 0)));
}

static void div_rule(const rule *r)
{
    te_diff *diff = r->diff;
    int quotient = te_diff_div(diff, r->d, argument(r, 1));
    if (wants(r, 0)) give(r, 0, quotient);
    if (wants(r, 1)) give(r, 1, te_diff_neg(diff, te_diff_mul(diff, quotient, result(r))));
}

/* d(a^b) = b a^(b-1) da + a^b log(a) db, where 0 * inf at b = 0 and at a = 0 means 0. */
static void pow_rule(const rule *r)
{
    te_diff *diff = r->diff;
    int a = argument(r, 0), b = argument(r, 1);
    bool constant = te_program_is_op(diff->backward, b, TE_PW_CONST);
    if (wants(r, 0)) {
        int less = constant ? te_diff_const(diff, diff->backward->insns[b].imm - 1.0)
                            : te_diff_emit(diff, TE_PW_SUB, b, te_diff_const(diff, 1.0), -1);
        int slope = te_diff_mul(diff, b, te_diff_emit(diff, TE_PW_POW, a, less, -1));
        if (!constant) slope = te_diff_where(diff, b, slope, TE_VALUE_NONE);
        give(r, 0, te_diff_mul(diff, r->d, slope));
    }
    if (wants(r, 1)) {
        int slope = te_diff_mul(diff, result(r), one(r, TE_PW_LOG, a));
        give(r, 1, te_diff_mul(diff, r->d, te_diff_where(diff, a, slope, TE_VALUE_NONE)));
    }
}

static bool is_given(const te_diff *diff, int value)
{
    return te_program_is_op(diff->backward, value, TE_PW_CONST) || te_program_is_op(diff->backward, value, TE_PW_PARAM);
}

/* min(a, b) is a where a < b, max(a, b) is a where b < a. Equal ones have half of the gradient each; beside a constant
 * min(a, b) is then a, and max(a, b) is b. */
static void extreme_rule(const rule *r)
{
    te_diff *diff = r->diff;
    int a = argument(r, 0), b = argument(r, 1), d = r->d;
    bool minimum = r->insn.op == TE_PW_MIN, shared = !is_given(diff, a) && !is_given(diff, b);
    int low = minimum ? a : b, high = minimum ? b : a;
    if (shared)
        d = te_diff_where(diff, te_diff_emit(diff, TE_PW_EQ, a, b, -1), te_diff_mul(diff, d, te_diff_const(diff, 0.5)),
                          d);
    te_opcode only = TE_PW_LT, or_equal = TE_PW_LE;
    int first = te_diff_emit(diff, shared || minimum ? or_equal : only, low, high, -1);
    int taken = te_diff_emit(diff, shared || !minimum ? only : or_equal, low, high, -1);
    if (wants(r, 0)) give(r, 0, te_diff_where(diff, first, d, TE_VALUE_NONE));
    if (wants(r, 1)) give(r, 1, te_diff_where(diff, taken, TE_VALUE_NONE, d));
}

static void binary_rule(const rule *r)
{
    te_diff *diff = r->diff;
    switch ((te_opcode)r->insn.op) {
    case TE_PW_ADD: case TE_PW_SUB:
        if (wants(r, 0)) give(r, 0, r->d);
        if (wants(r, 1)) give(r, 1, r->insn.op == TE_PW_ADD ? r->d : te_diff_neg(diff, r->d));
        break;
    case TE_PW_MUL: mul_rule(r); break;
    case TE_PW_DIV: div_rule(r); break;
    case TE_PW_POW: pow_rule(r); break;
    case TE_PW_MIN: case TE_PW_MAX: extreme_rule(r); break;
    default: break;
    }
}

static void where_rule(const rule *r)
{
    int condition = argument(r, 0);
    if (wants(r, 1)) give(r, 1, te_diff_where(r->diff, condition, r->d, TE_VALUE_NONE));
    if (wants(r, 2)) give(r, 2, te_diff_where(r->diff, condition, TE_VALUE_NONE, r->d));
}

/* --- reductions --------------------------------------------------------------------------------------------------- */

/* Every element of the row gets the adjoint of the sum; the elements equal to the extreme share its adjoint. */
static void reduction_rule(const rule *r)
{
    te_diff *diff = r->diff;
    int d = r->d;
    if (r->insn.op != TE_PW_ROWSUM) {
        int extreme = te_diff_emit(diff, TE_PW_EQ, argument(r, 0), result(r), -1);
        int share = te_diff_div(diff, d, te_diff_emit(diff, TE_PW_ROWSUM, extreme, -1, -1));
        d = te_diff_where(diff, extreme, share, TE_VALUE_NONE);
    }
    te_diff_contribute(diff, r->insn.arg[0], d, true);
}

/* --- dispatch ----------------------------------------------------------------------------------------------------- */

static void apply_rule(const rule *r)
{
    te_opcode op = (te_opcode)r->insn.op;
    if (r->d < 0) return;
    if (te_opcode_reduces(op)) reduction_rule(r);
    else if (op == TE_PW_WHERE) where_rule(r);
    else if (te_opcode_args(op) == 2) binary_rule(r);
    else unary_rule(r);
}

void te_diff_propagate(te_diff *diff, int value)
{
    te_adjoint *adjoint = &diff->adjoints[value];
    rule r = {.diff = diff, .value = value, .insn = diff->forward->insns[value]};
    if (r.insn.rate == TE_RATE_ROW) {
        adjoint->per_row = te_diff_add(diff, te_diff_rowsum(diff, adjoint->per_elem), adjoint->per_row);
        adjoint->per_elem = TE_VALUE_NONE;
    }
    r.d = adjoint->per_row;
    r.per_elem = false;
    apply_rule(&r);
    r.d = adjoint->per_elem;
    r.per_elem = true;
    apply_rule(&r);
}
