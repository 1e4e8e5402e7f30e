/* program.c - names and arities of the opcodes, from the one list in program.h. */
#include "program.h"

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
