/* program_source_tables.c - tables of functions of one bfloat16 input (../program_tables.h) in shared memory.
 *
 * Each block computes the values for all inputs that are likely, once (device/tables.h); a unit that holds another is
 * computed.
 */
#include "program_source_emit.h"

int te_cuda_tables(const te_program *program, const te_cuda_program_shape *shape,
                   te_program_table tables[TE_CUDA_TABLES])
{
    bool narrow[TE_CUDA_MAX_OPERANDS] = {false}, wanted[TE_CUDA_MAX_OPERANDS] = {false};
    if (shape->compute_f64 || shape->vector % 2 != 0) return 0;
    for (int i = 0; i < program->n_inputs; i++)
        narrow[i] = shape->operand[i].dtype == TE_BF16 && shape->operand[i].access == TE_CUDA_VECTOR;
    for (int o = 0; o < program->n_outputs; o++) wanted[o] = te_shape_wants(program, shape, o);
    return te_program_tables(program, narrow, wanted, tables, TE_CUDA_TABLES);
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
