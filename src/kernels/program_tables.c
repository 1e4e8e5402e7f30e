/* program_tables.c - values of a program that are dear to compute and follow from one input. */
#include "program_tables.h"

bool te_opcode_is_dear(int op)
{
    switch (op) {
    case TE_PW_EXP: case TE_PW_LOG: case TE_PW_SIN: case TE_PW_COS: case TE_PW_TANH: case TE_PW_SIGMOID: case TE_PW_ERF:
    case TE_PW_POW: return true;
    default: return false;
    }
}

enum { NONE = -1, OTHERS = -2, INSNS = TE_TABLES_INSNS };

/* The input that a value of each element alone depends on, beside what is the same everywhere. */
static int input_behind(const te_program *program, const bool *narrow, const int8_t *behind, int v)
{
    const te_insn *insn = &program->insns[v];
    int            input = NONE;
    if (insn->rate != TE_RATE_ELEM) return insn->rate == TE_RATE_UNIFORM ? NONE : OTHERS;
    if (insn->op == TE_PW_LOAD) return narrow[insn->slot] ? insn->slot : OTHERS;
    if (te_opcode_args((te_opcode)insn->op) == 0 || te_opcode_is_random(insn->op)) return OTHERS;
    for (int k = 0; k < te_opcode_args((te_opcode)insn->op); k++) {
        int other = behind[insn->arg[k]];
        if (other == NONE) continue;
        if (other == OTHERS || (input != NONE && other != input)) return OTHERS;
        input = other;
    }
    return input;
}

/* Which values the rest is made from, directly: outputs, and arguments of what depends on more than one input. */
static void mark_asked(const te_program *program, const bool *wanted, const int8_t *behind, bool *asked)
{
    bool live[INSNS] = {false};
    for (int o = 0; o < program->n_outputs; o++) {
        int value = program->outputs[o].value;
        if (wanted[o]) live[value] = asked[value] = true;
    }
    for (int v = program->n_insns - 1; v >= 0; v--)
        for (int k = 0; live[v] && k < te_opcode_args((te_opcode)program->insns[v].op); k++) {
            live[program->insns[v].arg[k]] = true;
            asked[program->insns[v].arg[k]] |= behind[v] == OTHERS;
        }
}

int te_program_tables(const te_program *program, const bool *narrow, const bool *wanted, te_program_table *tables,
                      int most)
{
    int8_t behind[INSNS];
    bool   asked[INSNS] = {false}, dear[INSNS] = {false}; /* dear: and not made from a table's values */
    int    n = 0;
    if (program->n_insns > INSNS || program->n_inputs > INSNS) return 0;
    for (int v = 0; v < program->n_insns; v++) behind[v] = (int8_t)input_behind(program, narrow, behind, v);
    mark_asked(program, wanted, behind, asked);
    for (int v = 0; v < program->n_insns; v++) {
        const te_insn *insn = &program->insns[v];
        if (behind[v] < 0) continue;
        dear[v] = te_opcode_is_dear(insn->op);
        for (int k = 0; k < te_opcode_args((te_opcode)insn->op); k++) dear[v] |= dear[insn->arg[k]];
        if (!dear[v] || !asked[v] || n == most) continue;
        tables[n++] = (te_program_table){.value = v, .input = behind[v]};
        dear[v] = false;
    }
    return n;
}
