/* program.c - names and arities of the opcodes, from the one list in program.h, rates, and whether a program is as that
 * header says. */
#include "program.h"

#include <stdarg.h>
#include <stdio.h>

static const struct {
    const char *name;
    int         args;
} opcodes[TE_PW_COUNT] = {
#define TE_OPCODE_ROW(name, text, args, doc) {text, args},
    TE_OPCODES(TE_OPCODE_ROW)
#undef TE_OPCODE_ROW
};

const char *te_opcode_name(te_opcode op) { return (unsigned)op < TE_PW_COUNT ? opcodes[op].name : "unknown"; }

int te_opcode_args(te_opcode op) { return (unsigned)op < TE_PW_COUNT ? opcodes[op].args : 0; }

te_rate te_insn_rate(const te_program *program, const te_insn *insn)
{
    te_opcode op = (te_opcode)insn->op;
    if (op == TE_PW_LOAD) return (te_rate)program->input_rates[insn->slot];
    if (op == TE_PW_COLUMN || te_opcode_is_random(op)) return TE_RATE_ELEM;
    if (te_opcode_reduces(op)) return TE_RATE_ROW;
    te_rate rate = TE_RATE_UNIFORM;
    for (int i = 0; i < te_opcode_args(op); i++) {
        te_rate arg_rate = te_program_rate(program, insn->arg[i]);
        if (arg_rate > rate) rate = arg_rate;
    }
    return rate;
}

/* --- what program.h says of a program ----------------------------------------------------------------------------- */

typedef struct fault {
    char  *text;
    size_t size;
} fault;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static bool wrong(const fault *f, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (f->text) vsnprintf(f->text, f->size, format, args);
    va_end(args);
    return false;
}

/* Slots that an instruction may name; others have 0. */
static int slots_for(const te_program *program, int op)
{
    if (op == TE_PW_LOAD) return program->n_inputs;
    if (op == TE_PW_PARAM) return program->n_params;
    if (op == TE_PW_EXP) return 1 + TE_EXP_BELOW;
    return te_opcode_is_random(op) ? program->n_rngs : 1;
}

static bool verify_insn(const te_program *program, int index, const fault *f)
{
    const te_insn *insn = &program->insns[index];
    te_opcode      op = (te_opcode)insn->op;
    if (insn->op >= TE_PW_COUNT) return wrong(f, "%%%d has opcode %d of %d", index, insn->op, TE_PW_COUNT);
    if (insn->slot < 0 || insn->slot >= slots_for(program, op))
        return wrong(f, "%%%d = %s uses slot %d", index, te_opcode_name(op), insn->slot);
    for (int k = 0; k < 3; k++) {
        bool used = k < te_opcode_args(op);
        if (used ? insn->arg[k] < 0 || insn->arg[k] >= index : insn->arg[k] != -1)
            return wrong(f, "%%%d = %s has argument %d = %d", index, te_opcode_name(op), k, insn->arg[k]);
    }
    if (insn->rate != te_insn_rate(program, insn))
        return wrong(f, "%%%d = %s has rate %d, its arguments give %d", index, te_opcode_name(op), insn->rate,
                     te_insn_rate(program, insn));
    if (te_opcode_reduces(op) && te_program_rate(program, insn->arg[0]) != TE_RATE_ELEM)
        return wrong(f, "%%%d = %s reduces %%%d, which is no element", index, te_opcode_name(op), insn->arg[0]);
    return true;
}

bool te_program_verify(const te_program *program, char *text, size_t size)
{
    fault f = {text, size};
    for (int i = 0; i < program->n_inputs; i++)
        if (program->input_rates[i] > TE_RATE_ELEM)
            return wrong(&f, "input %d has rate %d", i, program->input_rates[i]);
    for (int i = 0; i < program->n_insns; i++)
        if (!verify_insn(program, i, &f)) return false;
    for (int i = 0; i < program->n_outputs; i++) {
        const struct te_program_output *o = &program->outputs[i];
        if (o->kind > TE_OUT_AMAX || o->value < 0 || o->value >= program->n_insns)
            return wrong(&f, "output %d is of kind %d, value %d of %d", i, o->kind, o->value, program->n_insns);
        if (o->kind == TE_OUT_ROW && te_program_rate(program, o->value) == TE_RATE_ELEM)
            return wrong(&f, "output %d stores %%%d, an element, once per row", i, o->value);
    }
    return true;
}
