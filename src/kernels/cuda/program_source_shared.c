/* program_source_shared.c - rows that several blocks share: few rows, so long that a block alone would take far longer
 * to read one than a device takes to read them all.
 *
 *      te_program_level0   block (row, share): its parts of the first level's reductions
 *      te_program_level1   the same: joins the parts of its row, then its parts of the second level's
 *       …
 *      te_program          the same: joins all parts, stores its elements
 *      te_program_rows     a block per row: joins all parts, stores values of the row
 *
 * The blocks of a row take turns along it. A part is one number per block and reduction; every block that needs a
 * reduction joins its parts anew, in one order, so all have the same bits. Nothing is stored to an output before the
 * last level is behind, so elements may lie where inputs do. Values of a row are stored by its first block of
 * te_program, unless they may lie where other blocks still read, or there is no such kernel.
 */
#include "program_source_emit.h"

#include <string.h>

/* --- shape ------------------------------------------------------------------------------------------------------- */

int te_shape_levels(const te_program *program, const te_cuda_program_shape *shape)
{
    enum { MOST_INSTRUCTIONS = 512 };
    te_emit_value values[MOST_INSTRUCTIONS];
    if (program->n_insns > MOST_INSTRUCTIONS || !te_program_verify(program, NULL, 0)) return 0;
    memset(values, 0, sizeof values);
    te_emitter e = {.program = program, .shape = shape, .values = values, .item = ""};
    te_emit_analyze(&e);
    return e.passes - 1 <= TE_CUDA_MAX_LEVELS ? e.passes - 1 : 0;
}

/* As many blocks in all as run at once on a large device, each with at least what its threads load at a time, which is
 * 16 KiB where units are of 16 bytes. So there are at most ENOUGH_BLOCKS parts to join, two or three per thread. */
int64_t te_shape_shares(const te_cuda_program_shape *shape, int64_t rows, int64_t columns)
{
    enum { ENOUGH_BLOCKS = 132 * 4, UNITS_AT_ONCE = 4 };
    int64_t each = (int64_t)UNITS_AT_ONCE * shape->lanes * shape->vector, most = (columns + each - 1) / each;
    return ENOUGH_BLOCKS / rows < most ? ENOUGH_BLOCKS / rows : most;
}

static bool stores(const te_program *program, const te_cuda_program_shape *shape, te_output_kind kind)
{
    for (int o = 0; o < program->n_outputs; o++)
        if (program->outputs[o].kind == kind && te_shape_wants(program, shape, o)) return true;
    return false;
}

bool te_shape_stores_elements(const te_program *program, const te_cuda_program_shape *shape)
{
    return stores(program, shape, TE_OUT_ELEM);
}

/* Inputs of one number per row or run may lie where values of rows are stored. */
bool te_shape_stores_rows_apart(const te_program *program, const te_cuda_program_shape *shape)
{
    bool apart = !te_shape_stores_elements(program, shape);
    for (int i = 0; i < program->n_inputs; i++)
        apart |= program->input_rates[i] != TE_RATE_ELEM || shape->operand[i].access == TE_CUDA_SAME;
    return apart && stores(program, shape, TE_OUT_ROW);
}

/* --- source ------------------------------------------------------------------------------------------------------ */

static void emit_opening(te_emitter *e, const char *name, const char *place)
{
    e->item = "";
    te_emit(e, "extern \"C\" __global__ void __launch_bounds__(%d) %s(const __grid_constant__ te_args a)\n{\n"
               "    __shared__ te_real places[32];\n    const te_run_args &r = a.run[0];\n"
               "    const te_index columns = (te_index)r.columns, shares = (te_index)a.n_column_parts;\n"
               "    const int lane = threadIdx.x;\n",
            te_shape_row_threads(e->shape), name);
    te_emit_uniform(e);
    te_emit(e, "    {\n        const te_index %s;\n", place);
    te_emit_coordinates(e, e->shape->n_outer, "row");
    te_emit_offsets(e, e->shape->n_outer);
}

/* Which of the program's reductions v is. */
static int number_of(const te_emitter *e, int v)
{
    int n = 0;
    for (int u = 0; u < v; u++) n += te_opcode_reduces(e->program->insns[u].op);
    return n;
}

static bool is_reduction(const te_emitter *e, int v, int level)
{
    return te_opcode_reduces(e->program->insns[v].op) && e->values[v].live && e->values[v].level == level;
}

static void emit_parts(te_emitter *e, int level)
{
    te_emit(e, "        if (lane == 0) {\n");
    for (int v = 0; v < e->program->n_insns; v++)
        if (is_reduction(e, v, level))
            te_emit(e, "            a.row_values[%d * a.blocks + blockIdx.x] = v%d;\n", number_of(e, v), v);
    te_emit(e, "        }\n");
}

static void emit_joined(te_emitter *e, int v)
{
    bool below = e->values[v].online && e->program->insns[v].op == TE_PW_ROWSUM;
    te_emit(e, "        const te_real v%d = te_shares_%s<%d>(a.row_values + %d * a.blocks + row * shares, ", v,
            below ? "below" : te_opcode_name((te_opcode)e->program->insns[v].op), te_shape_row_threads(e->shape),
            number_of(e, v));
    if (below)
        te_emit(e, "a.row_values + %d * a.blocks + row * shares, v%d, ", number_of(e, te_emit_maximum_of(e, v)),
                te_emit_maximum_of(e, v));
    te_emit(e, "(int)shares, places);\n");
}

/* All that is known of a row behind the given level of reductions. */
static void emit_row(te_emitter *e, int last)
{
    te_emit_row_values(e, 0);
    for (int level = 1; level <= last; level++) {
        for (int v = 0; v < e->program->n_insns; v++)
            if (is_reduction(e, v, level)) emit_joined(e, v);
        te_emit_row_values(e, level);
    }
}

void te_emit_shared_rows(te_emitter *e)
{
    static const char shared[] =
        "row = (te_index)blockIdx.x / shares, share = (te_index)blockIdx.x - row * shares";
    bool apart = te_shape_stores_rows_apart(e->program, e->shape);
    for (int level = 0; level < e->shape->levels; level++) {
        char name[32];
        snprintf(name, sizeof name, "te_program_level%d", level);
        emit_opening(e, name, shared);
        emit_row(e, level);
        te_emit_pass(e, level);
        emit_parts(e, level + 1);
        te_emit(e, "    }\n}\n\n");
    }
    if (te_shape_stores_elements(e->program, e->shape)) {
        emit_opening(e, "te_program", shared);
        emit_row(e, e->shape->levels);
        te_emit_pass(e, e->shape->levels);
        if (!apart) te_emit_row_outputs(e);
        te_emit(e, "    }\n}\n\n");
    }
    if (!apart) return;
    emit_opening(e, "te_program_rows", "row = (te_index)blockIdx.x, share = 0");
    emit_row(e, e->shape->levels);
    te_emit_row_outputs(e);
    te_emit(e, "    }\n}\n");
}
