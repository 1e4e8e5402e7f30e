/* program_compile.c - what a program carries once it has run: facts about it, and plans as shapes ask for them. */
#include "program_maker.h"

int te_op_cost(te_opcode op)
{
    switch (op) {
    case TE_PW_CONST:
    case TE_PW_PARAM: return 0;
    case TE_PW_DIV:
    case TE_PW_SQRT:
    case TE_PW_RSQRT:
    case TE_PW_RECIP: return TE_COST_DIVISION;
    case TE_PW_EXP:
    case TE_PW_LOG:
    case TE_PW_TANH:
    case TE_PW_SIGMOID:
    case TE_PW_ERF: return TE_COST_DEAR;
    case TE_PW_SIN:
    case TE_PW_COS:
    case TE_PW_RANDOM:
    case TE_PW_KEEP: return 2 * TE_COST_DEAR;
    case TE_PW_POW:
    case TE_PW_NORMAL: return 4 * TE_COST_DEAR;
    default: return 1;
    }
}

static void release_compiled(te_program *program)
{
    te_compiled *compiled = program->compiled;
    if (!compiled) return;
    for (int k = 0; k < TE_PLAN_COUNT; k++) te_plan_free(program->mem, compiled->plans[k]);
    for (int i = 0; i < TE_AGAIN_COUNT; i++) te_again_free(program->mem, compiled->again[i]);
    te_lookup_free(compiled->lookup);
    te_mem_free(program->mem, compiled, sizeof *compiled);
    program->compiled = NULL;
    program->release_compiled = NULL;
}

static void describe(te_compiled *compiled, const te_program *program)
{
    compiled->cost = program->n_inputs + program->n_outputs;
    for (int v = 0; v < program->n_insns; v++) {
        const te_insn *insn = &program->insns[v];
        compiled->reduces_rows |= te_opcode_reduces(insn->op);
        compiled->structured |= insn->rate == TE_RATE_ROW || insn->op == TE_PW_COLUMN;
        if (insn->rate == TE_RATE_ELEM && insn->op != TE_PW_LOAD) compiled->cost += te_op_cost(insn->op);
        compiled->dear |= insn->rate == TE_RATE_ELEM && te_op_cost(insn->op) >= TE_COST_DEAR;
    }
    for (int o = 0; o < program->n_outputs; o++) {
        int kind = program->outputs[o].kind;
        compiled->columns_summed |= kind == TE_OUT_COLSUM;
        compiled->structured |= kind == TE_OUT_COLSUM || kind == TE_OUT_ROW;
        compiled->n_sums += kind == TE_OUT_SUM || kind == TE_OUT_AMAX;
    }
}

te_status te_program_compile(te_exec *exec, te_program *program)
{
    if (program->compiled) return TE_OK;
    char wrong[160];
    if (!te_program_verify(program, wrong, sizeof wrong))
        return te_exec_fail(exec, TE_ERROR_INTERNAL, "program %s: %s", program->name, wrong);
    te_compiled *compiled = te_mem_zalloc(program->mem, sizeof *compiled);
    if (!compiled) return te_exec_fail(exec, TE_ERROR_MEMORY, "out of memory compiling program %s", program->name);
    describe(compiled, program);
    program->compiled = compiled;
    program->release_compiled = release_compiled;
    return TE_OK;
}

te_plan *te_compiled_plan(te_exec *exec, te_program *program, te_plan_kind kind)
{
    te_compiled *compiled = program->compiled;
    if (kind == TE_PLAN_REPEAT && compiled->plans[TE_PLAN_PASSES] && compiled->plans[TE_PLAN_PASSES]->n_kept == 0)
        kind = TE_PLAN_PASSES;
    if (!compiled->plans[kind]) compiled->plans[kind] = te_plan_make(program->mem, program, kind);
    if (!compiled->plans[kind])
        te_exec_fail(exec, TE_ERROR_MEMORY, "out of memory compiling program %s", program->name);
    return compiled->plans[kind];
}
