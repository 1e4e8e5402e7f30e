/* program_small.c - programs on whole numbers, which compute in float64, done in float32 while the numbers are small.
 *
 * float32 holds whole numbers up to 2^24, and there are vectors of twice as many. Where all inputs are below some bound
 * in magnitude, so that every intermediate value is exact in float32, or one operation on exact values makes a float32
 * result, both types give the same bits: sums, products, quotients and roots that float64 rounds first are rounded the
 * same by float32 alone, since 53 >= 2 * 24 + 2 (Figueroa 1995). Whether the inputs are that small is found out as they
 * are read; when one is not, all is done over in float64. So results must not lie where inputs do.
 */
#include "program_exec.h"

#include "../dtype.h"

#include <math.h>

enum { MOST_INSNS = 16 };

#define EXACT 0x1p24 /* whole numbers that float32 holds */

/* What is known of a value. */
typedef enum knowledge {
    UNKNOWN, /* float32 would make something else of it */
    ROUNDED, /* the same once both are rounded to float32 */
    REAL,    /* exact in float32 */
    WHOLE    /* and a whole number, at most `most` in magnitude */
} knowledge;

typedef struct fact {
    knowledge is;
    double    most;
} fact;

static fact whole(double most) { return most <= EXACT ? (fact){WHOLE, most} : (fact){UNKNOWN, 0}; }

static fact fact_of_number(double v)
{
    if (v == trunc(v) && fabs(v) <= EXACT) return whole(fabs(v));
    return (fact){(double)(float)v == v ? REAL : UNKNOWN, 0};
}

static fact fact_of_input(const te_operand *in, double bound)
{
    switch (in->dtype) {
    case TE_I64:
    case TE_I32: return whole(bound);
    case TE_U8: return whole(255);
    case TE_BOOL: return whole(1);
    case TE_F64: return (fact){UNKNOWN, 0};
    default: return (fact){REAL, 0};
    }
}

/* Of one of two values. */
static fact either(fact a, fact b)
{
    return a.is == WHOLE && b.is == WHOLE ? whole(fmax(a.most, b.most)) : (fact){REAL, 0};
}

static fact fact_of_operation(int op, const fact *a)
{
    bool both = a[0].is == WHOLE && a[1].is == WHOLE;
    for (int k = 0; k < te_opcode_args((te_opcode)op); k++)
        if (a[k].is <= (op == TE_PW_TO_F32 ? UNKNOWN : ROUNDED)) return (fact){UNKNOWN, 0};
    switch (op) {
    case TE_PW_NEG:
    case TE_PW_ABS:
    case TE_PW_FLOOR:
    case TE_PW_CEIL:
    case TE_PW_ROUND:
    case TE_PW_TRUNC: return a[0];
    case TE_PW_SIGN: return a[0].is == WHOLE ? whole(1) : a[0];
    case TE_PW_TO_F32: return a[0].is == WHOLE ? a[0] : (fact){REAL, 0};
    case TE_PW_ISNAN:
    case TE_PW_ISFINITE:
    case TE_PW_LT:
    case TE_PW_LE:
    case TE_PW_EQ:
    case TE_PW_NE: return whole(1);
    case TE_PW_MIN:
    case TE_PW_MAX: return either(a[0], a[1]);
    case TE_PW_WHERE: return either(a[1], a[2]);
    case TE_PW_ADD:
    case TE_PW_SUB: return both ? whole(a[0].most + a[1].most) : (fact){ROUNDED, 0};
    case TE_PW_MUL: return both ? whole(a[0].most * a[1].most) : (fact){ROUNDED, 0};
    case TE_PW_DIV:
    case TE_PW_RECIP:
    case TE_PW_SQRT: return (fact){ROUNDED, 0};
    default: return (fact){UNKNOWN, 0};
    }
}

/* Whether the result is the same when inputs are at most `bound`. */
static bool is_same(const te_program *program, const te_run *run, double bound)
{
    fact     facts[MOST_INSNS] = {{UNKNOWN, 0}}; /* which GCC for Arm does not see filled */
    te_dtype made = run->outputs[0].dtype;
    for (int v = 0; v < program->n_insns; v++) {
        const te_insn *insn = &program->insns[v];
        if (insn->op == TE_PW_LOAD) {
            facts[v] = fact_of_input(&run->inputs[insn->slot], bound);
        } else if (insn->op == TE_PW_PARAM) {
            facts[v] = fact_of_number(run->params[insn->slot]);
        } else if (insn->op == TE_PW_CONST) {
            facts[v] = fact_of_number(insn->imm);
        } else {
            fact args[3] = {{UNKNOWN, 0}, {UNKNOWN, 0}, {UNKNOWN, 0}};
            for (int k = 0; k < te_opcode_args((te_opcode)insn->op); k++) args[k] = facts[insn->arg[k]];
            facts[v] = fact_of_operation(insn->op, args);
        }
    }
    return facts[program->outputs[0].value].is >= (made == TE_F32 ? ROUNDED : REAL);
}

/* Inputs that nothing reads do not matter: the target of a copy is one. */
static bool is_candidate(const te_program *program, const te_run *run)
{
    const te_operand *out = run->outputs;
    if (!run->compute_f64 || program->n_outputs != 1 || program->outputs[0].kind != TE_OUT_ELEM || program->n_rngs ||
        program->n_insns > MOST_INSNS || !out->data || out->accumulate || out->block || out->quantized)
        return false;
    for (int v = 0; v < program->n_insns; v++) {
        const te_insn    *insn = &program->insns[v];
        const te_operand *in = insn->op == TE_PW_LOAD ? &run->inputs[insn->slot] : NULL;
        if (in && (insn->rate != TE_RATE_ELEM || in->data == out->data || in->block || in->quantized)) return false;
    }
    return true;
}

bool te_program_small_run(const te_program *program, const te_run *run, te_small *small)
{
    static const int8_t bits[] = {24, 23, 22, 20, 16, 12};
    if (!is_candidate(program, run)) return false;
    for (size_t i = 0; i < sizeof bits; i++) {
        if (!is_same(program, run, ldexp(1, bits[i]))) continue;
        *small = (te_small){.run = *run, .bits = bits[i]};
        small->run.compute_f64 = false;
        small->run.small = small;
        return true;
    }
    return false;
}
