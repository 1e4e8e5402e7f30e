/* program_source_tables.c - tables of functions of one bfloat16 input.
 *
 * GELU takes some thirty instructions an element, its gradient sixty: more time than memory takes. But a bfloat16 input
 * has few values, so where there are many elements each block computes what is dear for all that are likely, once, and
 * looks them up in shared memory (device/tables.h); a unit that holds another is computed. The bits are the same.
 */
#include "program_source_emit.h"

bool te_opcode_is_dear(int op)
{
    switch (op) {
    case TE_PW_EXP: case TE_PW_LOG: case TE_PW_SIN: case TE_PW_COS: case TE_PW_TANH: case TE_PW_SIGMOID: case TE_PW_ERF:
    case TE_PW_POW: return true;
    default: return false;
    }
}

/* --- which values ------------------------------------------------------------------------------------------------- */

enum { NONE = -1, OTHERS = -2, INSNS = 96 };

/* The input that a value of each element alone depends on, beside what is the same everywhere. */
static int input_behind(const te_program *program, const te_cuda_program_shape *shape, const int8_t *behind, int v)
{
    const te_insn *insn = &program->insns[v];
    int            input = NONE;
    if (insn->rate != TE_RATE_ELEM) return insn->rate == TE_RATE_UNIFORM ? NONE : OTHERS;
    if (insn->op == TE_PW_LOAD) {
        const te_cuda_operand_shape *operand = &shape->operand[insn->slot];
        return operand->dtype == TE_BF16 && operand->access == TE_CUDA_VECTOR ? insn->slot : OTHERS;
    }
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
static void mark_asked(const te_program *program, const te_cuda_program_shape *shape, const int8_t *behind, bool *asked)
{
    bool live[INSNS] = {false};
    for (int o = 0; o < program->n_outputs; o++) {
        int value = program->outputs[o].value;
        if (te_shape_wants(program, shape, o)) live[value] = asked[value] = true;
    }
    for (int v = program->n_insns - 1; v >= 0; v--)
        for (int k = 0; live[v] && k < te_opcode_args((te_opcode)program->insns[v].op); k++) {
            live[program->insns[v].arg[k]] = true;
            asked[program->insns[v].arg[k]] |= behind[v] == OTHERS;
        }
}

int te_cuda_tables(const te_program *program, const te_cuda_program_shape *shape, te_cuda_table tables[TE_CUDA_TABLES])
{
    int8_t behind[INSNS];
    bool   asked[INSNS] = {false}, dear[INSNS] = {false}; /* dear: and not made from a table's values */
    int    n = 0;
    if (program->n_insns > INSNS || shape->compute_f64 || shape->vector % 2 != 0) return 0;
    for (int v = 0; v < program->n_insns; v++) behind[v] = (int8_t)input_behind(program, shape, behind, v);
    mark_asked(program, shape, behind, asked);
    for (int v = 0; v < program->n_insns; v++) {
        const te_insn *insn = &program->insns[v];
        if (behind[v] < 0) continue;
        dear[v] = te_opcode_is_dear(insn->op);
        for (int k = 0; k < te_opcode_args((te_opcode)insn->op); k++) dear[v] |= dear[insn->arg[k]];
        if (!dear[v] || !asked[v] || n == TE_CUDA_TABLES) continue;
        tables[n++] = (te_cuda_table){.value = v, .input = behind[v]};
        dear[v] = false;
    }
    return n;
}

/* --- source ------------------------------------------------------------------------------------------------------- */

static int tables_of(const te_emitter *e, int input)
{
    int n = 0;
    for (int t = 0; t < e->n_tables; t++) n += e->tables[t].input == input;
    return n;
}

/* Of an input's tables, which one. */
static int place_in_entry(const te_emitter *e, int table)
{
    int n = 0;
    for (int t = 0; t < table; t++) n += e->tables[t].input == e->tables[table].input;
    return n;
}

static bool is_first(const te_emitter *e, int table) { return place_in_entry(e, table) == 0; }

static int table_of(const te_emitter *e, int v)
{
    for (int t = 0; t < e->n_tables; t++)
        if (e->tables[t].value == v) return t;
    return -1;
}

bool te_emit_looks_up(const te_emitter *e, int v) { return e->looking_up && table_of(e, v) >= 0; }

void te_emit_looked_up(te_emitter *e, int v)
{
    int t = table_of(e, v), input = e->tables[t].input;
    te_emit(e, "table%d[at%d[k]].e[%d]", input, input, place_in_entry(e, t));
}

void te_emit_tables(te_emitter *e)
{
    if (e->shape->tables) e->n_tables = te_cuda_tables(e->program, e->shape, e->tables);
    for (int t = 0; t < e->n_tables; t++) {
        int input = e->tables[t].input;
        if (!is_first(e, t)) continue;
        te_emit(e, "    __shared__ te_unit<float, %d> table%d[TE_TABLE];\n"
                   "    for (int at = threadIdx.x, k = 0; at < TE_TABLE; at += %d) {\n"
                   "            const te_unit<uint16_t, 1> x%d = {{te_table_code(at)}};\n",
                tables_of(e, input), input, te_shape_threads(e->shape), input);
        for (int v = 0; v < e->program->n_insns; v++) e->values[v].need = false;
        for (int u = t; u < e->n_tables; u++)
            if (e->tables[u].input == input) e->values[e->tables[u].value].need = true;
        te_emit_needed(e);
        for (int u = t; u < e->n_tables; u++)
            if (e->tables[u].input == input)
                te_emit(e, "                table%d[at].e[%d] = v%d;\n", input, place_in_entry(e, u),
                        e->tables[u].value);
        te_emit(e, "    }\n");
    }
    if (e->n_tables) te_emit(e, "    __syncthreads();\n");
}

void te_emit_table_places(te_emitter *e)
{
    int unit = e->shape->vector;
    for (int t = 0; t < e->n_tables; t++)
        if (is_first(e, t)) te_emit(e, "            uint32_t at%d[%d];\n", e->tables[t].input, unit);
    te_emit(e, "            if (true");
    for (int t = 0; t < e->n_tables; t++)
        if (is_first(e, t))
            te_emit(e, " & te_table_places<%d>(x%d, at%d)", unit, e->tables[t].input, e->tables[t].input);
    te_emit(e, ") {\n");
}
