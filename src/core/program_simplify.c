/* program_simplify.c - the rules by which te_program_emit avoids an instruction.
 *
 * A rule may only fire when the result has the same bits as the instruction it replaces, for every argument: -0,
 * infinities, NaN (which stays a NaN; which one is up to the machine anyway), in float32 and in float64 runs alike. So
 * x + 0 stays (it turns -0 into 0) while x + (-0) goes, and 0 * x stays. Every rule yields an existing value or
 * strictly simpler instructions, hence rewriting ends.
 *
 * A constant operand is rounded to the compute type when the program runs. The folded constant is the float64 result;
 * it stands for the instruction only if, rounded to float32, it is also what the float32 run would have computed.
 */
#include "program_internal.h"

#include <math.h>

/* --- constants ---------------------------------------------------------------------------------------------------- */

/* One definition for both types: each case is a single correctly rounded operation. False: leave it to the run. */
#define DEFINE_FOLD(NAME, T, FLOOR, CEIL, RINT, TRUNC, SQRT)                               \
    static bool NAME(te_opcode op, T a, T b, T *result)                                    \
    {                                                                                      \
        switch (op) {                                                                      \
        case TE_PW_NEG: *result = -a; break;                                               \
        case TE_PW_ABS: *result = a < 0 ? -a : a + 0; break;                               \
        case TE_PW_SIGN: *result = (T)((a > 0) - (a < 0)); return a != 0;                  \
        case TE_PW_FLOOR: *result = FLOOR(a); break;                                       \
        case TE_PW_CEIL: *result = CEIL(a); break;                                         \
        case TE_PW_ROUND: *result = RINT(a); break;                                        \
        case TE_PW_TRUNC: *result = TRUNC(a); break;                                       \
        case TE_PW_SQRT: *result = SQRT(a); break;                                         \
        case TE_PW_RSQRT: *result = 1 / SQRT(a); break;                                    \
        case TE_PW_RECIP: *result = 1 / a; break;                                          \
        case TE_PW_ISFINITE: *result = (T)(isfinite(a) != 0); break;                       \
        case TE_PW_ADD: *result = a + b; break;                                            \
        case TE_PW_SUB: *result = a - b; break;                                            \
        case TE_PW_MUL: *result = a * b; break;                                            \
        case TE_PW_DIV: *result = a / b; break;                                            \
        case TE_PW_MIN: *result = a < b ? a : b; return a != b;                            \
        case TE_PW_MAX: *result = a > b ? a : b; return a != b;                            \
        case TE_PW_LT: *result = a < b; break;                                             \
        case TE_PW_LE: *result = a <= b; break;                                            \
        case TE_PW_EQ: *result = a == b; break;                                            \
        case TE_PW_NE: *result = a != b; break;                                            \
        default: return false;                                                             \
        }                                                                                  \
        return true;                                                                       \
    }

DEFINE_FOLD(fold_f64, double, floor, ceil, rint, trunc, sqrt)
DEFINE_FOLD(fold_f32, float, floorf, ceilf, rintf, truncf, sqrtf)

static bool same_bits(float a, float b) { return memcmp(&a, &b, sizeof a) == 0; }

static int fold(te_program *program, te_opcode op, const int arg[3])
{
    int n_args = te_opcode_args(op);
    if (n_args < 1 || n_args > 2) return TE_VALUE_NONE;
    double number[2] = {0, 0}, wide;
    float narrow;
    for (int i = 0; i < n_args; i++) {
        const te_insn *insn = &program->insns[arg[i]];
        if (insn->op != TE_PW_CONST || isnan(insn->imm)) return TE_VALUE_NONE;
        number[i] = insn->imm;
    }
    if (!fold_f64(op, number[0], number[1], &wide)) return TE_VALUE_NONE;
    if (!fold_f32(op, (float)number[0], (float)number[1], &narrow)) return TE_VALUE_NONE;
    if (isnan(wide) || !same_bits((float)wide, narrow)) return TE_VALUE_NONE;
    return te_program_const(program, wide);
}

static bool const_of(const te_program *program, int value, double *number)
{
    const te_insn *insn = &program->insns[value];
    *number = insn->imm;
    return insn->op == TE_PW_CONST;
}

static bool is_minus_zero(const te_program *program, int value)
{
    return te_program_is_const(program, value, 0.0) && signbit(program->insns[value].imm);
}

static bool is_plus_zero(const te_program *program, int value)
{
    return te_program_is_const(program, value, 0.0) && !signbit(program->insns[value].imm);
}

/* --- one argument ------------------------------------------------------------------------------------------------- */

static bool is_whole(te_opcode op)
{
    return op == TE_PW_FLOOR || op == TE_PW_CEIL || op == TE_PW_ROUND || op == TE_PW_TRUNC || op == TE_PW_SIGN ||
           op == TE_PW_COLUMN || te_opcode_is_truth(op);
}

static int simplify_unary(te_program *program, te_opcode op, int a)
{
    te_insn inner = program->insns[a];
    te_opcode inner_op = (te_opcode)inner.op;
    bool truth = te_opcode_is_truth(inner_op);
    switch (op) {
    case TE_PW_NEG: return inner_op == TE_PW_NEG ? inner.arg[0] : TE_VALUE_NONE;
    case TE_PW_ABS:
        if (inner_op == TE_PW_NEG) return te_program_emit(program, TE_PW_ABS, inner.arg[0], -1, -1);
        return inner_op == TE_PW_ABS || truth ? a : TE_VALUE_NONE;
    case TE_PW_FLOOR: case TE_PW_CEIL: case TE_PW_ROUND: case TE_PW_TRUNC:
        return is_whole(inner_op) ? a : TE_VALUE_NONE;
    case TE_PW_TO_BF16: return inner_op == TE_PW_TO_BF16 || truth ? a : TE_VALUE_NONE;
    case TE_PW_TO_F16: return inner_op == TE_PW_TO_F16 || truth ? a : TE_VALUE_NONE;
    case TE_PW_TO_F32:
        if (inner_op == TE_PW_CONST) return te_program_const(program, (float)inner.imm);
        return inner_op == TE_PW_TO_F32 || inner_op == TE_PW_TO_BF16 || inner_op == TE_PW_TO_F16 || truth ? a
                                                                                                       : TE_VALUE_NONE;
    default: return TE_VALUE_NONE;
    }
}

/* --- two and three arguments -------------------------------------------------------------------------------------- */

/* Division by a power of two is multiplication by its reciprocal, which is exact as long as both are normal numbers. */
static int simplify_div(te_program *program, int a, int b)
{
    double divisor;
    int exponent;
    if (te_program_is_const(program, a, 1.0)) return te_program_emit(program, TE_PW_RECIP, b, -1, -1);
    if (!const_of(program, b, &divisor)) return TE_VALUE_NONE;
    if (divisor == 1.0) return a;
    if (fabs(frexp(divisor, &exponent)) != 0.5 || exponent < -125 || exponent > 126) return TE_VALUE_NONE;
    return te_program_emit(program, TE_PW_MUL, a, te_program_const(program, 1.0 / divisor), -1);
}

/* The powers whose meaning as repeated multiplication leaves no choice of order, and the reciprocal. */
static int simplify_pow(te_program *program, int a, int b)
{
    if (te_program_is_const(program, b, 0.0)) return te_program_const(program, 1.0);
    if (te_program_is_const(program, b, 1.0)) return a;
    if (te_program_is_const(program, b, -1.0)) return te_program_emit(program, TE_PW_RECIP, a, -1, -1);
    if (te_program_is_const(program, b, 2.0)) return te_program_emit(program, TE_PW_MUL, a, a, -1);
    if (!te_program_is_const(program, b, 3.0)) return TE_VALUE_NONE;
    return te_program_emit(program, TE_PW_MUL, te_program_emit(program, TE_PW_MUL, a, a, -1), a, -1);
}

static int simplify_binary(te_program *program, te_opcode op, int a, int b)
{
    switch (op) {
    case TE_PW_ADD:
        if (is_minus_zero(program, b)) return a;
        return is_minus_zero(program, a) ? b : TE_VALUE_NONE;
    case TE_PW_SUB: return is_plus_zero(program, b) ? a : TE_VALUE_NONE;
    case TE_PW_MUL:
        if (te_program_is_const(program, b, 1.0)) return a;
        return te_program_is_const(program, a, 1.0) ? b : TE_VALUE_NONE;
    case TE_PW_DIV: return simplify_div(program, a, b);
    case TE_PW_POW: return simplify_pow(program, a, b);
    case TE_PW_MIN: case TE_PW_MAX: return a == b ? a : TE_VALUE_NONE;
    default: return TE_VALUE_NONE;
    }
}

static int simplify_where(const te_program *program, const int arg[3])
{
    double condition;
    if (arg[1] == arg[2]) return arg[1];
    if (!const_of(program, arg[0], &condition)) return TE_VALUE_NONE;
    if ((condition != 0) != ((float)condition != 0)) return TE_VALUE_NONE; /* underflows in a float32 run */
    return condition != 0 ? arg[1] : arg[2];
}

int te_program_simplify(te_program *program, te_opcode op, const int arg[3])
{
    int folded = fold(program, op, arg);
    if (folded != TE_VALUE_NONE) return folded;
    switch (te_opcode_args(op)) {
    case 1: return simplify_unary(program, op, arg[0]);
    case 2: return simplify_binary(program, op, arg[0], arg[1]);
    case 3: return simplify_where(program, arg);
    default: return TE_VALUE_NONE;
    }
}
