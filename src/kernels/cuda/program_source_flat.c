/* program_source_flat.c - kernels in which no value depends on a whole row: units along the row, or turned tiles. */
#include "program_source_emit.h"

static void emit_opening(te_emitter *e)
{
    bool sums = te_shape_sums(e->program, e->shape) > 0;
    char blocks[16] = "";
    if (e->shape->tables) snprintf(blocks, sizeof blocks, ", %d", te_shape_table_blocks(e->program, e->shape));
    te_emit(e,
            "extern \"C\" __global__ void __launch_bounds__(%d%s) te_program(const __grid_constant__ te_args a)\n{\n",
            te_shape_threads(e->shape), blocks);
    if (sums) te_emit(e, "    __shared__ te_real places[32];\n");
    if (e->shape->runs > 1)
        te_emit(e, "    int at = 0, beyond = (int)a.n_runs;\n    while (beyond - at > 1) {\n"
                   "        const int middle = (at + beyond) / 2;\n"
                   "        if (blockIdx.x >= a.run[middle].first_block) at = middle;\n"
                   "        else beyond = middle;\n    }\n"
                   "    const te_run_args &r = a.run[at];\n");
    else te_emit(e, "    const te_run_args &r = a.run[0];\n");
    te_emit(e, "    const te_index columns = (te_index)r.columns;\n");
    te_emit_uniform(e);
    te_emit_tables(e);
    te_emit_sums(e);
}

static void emit_closing(te_emitter *e)
{
    te_emit(e, "    }\n");
    te_emit_sum_parts(e);
    te_emit(e, "}\n");
}

/* Without outer dimensions the row is everything, and its last unit may be a part of one. With them, a thread finds its
 * first row by a division, and each further one by adding. */
void te_emit_flat(te_emitter *e)
{
    int         unit = e->shape->vector, threads = te_shape_threads(e->shape);
    bool        rows = e->shape->n_outer > 0;
    const char *position = rows ? "(uint64_t)row * (uint64_t)columns + (uint64_t)column" : "(uint64_t)column";
    emit_opening(e);
    te_emit(e,
            "    const te_index units = (columns + %d) / %d, step = (te_index)r.blocks * %d;\n"
            "    const te_index begin = (te_index)(blockIdx.x - r.first_block) * %d + (te_index)threadIdx.x;\n",
            unit - 1, unit, threads, threads);
    if (rows) {
        te_emit(e,
                "    const te_index width = units > 0 ? units : 1, rows = units > 0 ? (te_index)r.rows : 0;\n"
                "    const te_index down = step / width, along = step - down * width;\n"
                "    te_index row = begin / width, u = begin - row * width;\n"
                "    for (; row < rows; row += down, u += along, row += u >= width, u -= u >= width ? width : 0) {\n"
                "        const te_index column = u * %d;\n", unit);
    } else {
        te_emit(e, "    for (te_index u = begin; u < units; u += step) {\n");
        te_emit(e, "        const te_index column = u * %d;\n", unit);
        if (unit > 1)
            te_emit(e, "        const int n = columns - column < %d ? (int)(columns - column) : %d;\n", unit, unit);
    }
    te_emit_coordinates(e, e->shape->n_outer, "row");
    te_emit_offsets(e, e->shape->n_outer);
    te_emit_row_values(e, 0);
    te_emit_mark(e, 0);
    te_emit_unit(e, position, !rows && unit > 1 ? "n" : NULL);
    emit_closing(e);
}

/* --- tiles ------------------------------------------------------------------------------------------------------- */

/* A row of a tile: neighbouring lanes that walk down its columns meet different banks, two at a time where a thread has
 * a pair. */
static int pitch_of(const te_emitter *e, int i)
{
    return te_shape_tile_pitch(e->shape, te_dtype_size((te_dtype)e->shape->operand[i].dtype));
}

/* Whether units of the operand can be moved to its tile, and from it, as they are. */
static bool moves_units(const te_emitter *e, int i) { return pitch_of(e, i) % e->shape->vector == 0; }

/* A turned operand from memory to its tile, all loads under way together, or back. */
static void emit_tile_move(te_emitter *e, int i, bool output)
{
    int         unit = e->shape->vector, edge = te_shape_tile(e->shape);
    const char *type = te_emit_type(e, i);
    te_emit(e,
            "        {\n"
            "            %s%s *at = r.p%d + o%d + (down + x * %d) + (right + y) * (te_index)r.p%d_column;\n",
            output ? "" : "const ", type, i, i, unit, i);
    te_emit(e, "            te_unit<%s, %d> u[%d];\n", type, unit, edge / 8);
    for (int step = 0; step < 2; step++) {
        te_emit(e, "#pragma unroll\n            for (int j = 0; j < %d; j += 8)\n"
                   "                if (down + x * %d < across && right + y + j < columns) ", edge, unit);
        bool memory = (step == 0) == !output;
        if (memory && output)
            te_emit(e, "te_unit_store<%s, %d>(at + j * (te_index)r.p%d_column, u[j / 8]);\n", type, unit, i);
        else if (memory)
            te_emit(e, "u[j / 8] = te_unit_load<%s, %d>(at + j * (te_index)r.p%d_column);\n", type, unit, i);
        else if (moves_units(e, i) && output)
            te_emit(e, "u[j / 8] = te_unit_load<%s, %d>(&t%d[y + j][x * %d]);\n", type, unit, i, unit);
        else if (moves_units(e, i))
            te_emit(e, "te_unit_store<%s, %d>(&t%d[y + j][x * %d], u[j / 8]);\n", type, unit, i, unit);
        else if (output)
            te_emit(e, "for (int k = 0; k < %d; k++) u[j / 8].e[k] = t%d[y + j][x * %d + k];\n", unit, i, unit);
        else te_emit(e, "for (int k = 0; k < %d; k++) t%d[y + j][x * %d + k] = u[j / 8].e[k];\n", unit, i, unit);
    }
    te_emit(e, "        }\n");
}

/* Moves turned operands between memory and their tiles; threads are neighbours along memory's neighbours. */
static void emit_tile_moves(te_emitter *e, bool outputs)
{
    int  first = outputs ? e->program->n_inputs : 0, end = outputs ? e->shape->n_operands : e->program->n_inputs;
    bool any = false;
    for (int i = first; i < end; i++) any |= e->shape->operand[i].access == TE_CUDA_TURNED;
    if (!any) return;
    if (outputs) te_emit(e, "        __syncthreads();\n");
    for (int i = first; i < end; i++)
        if (e->shape->operand[i].access == TE_CUDA_TURNED) emit_tile_move(e, i, outputs);
    if (!outputs) te_emit(e, "        __syncthreads();\n");
}

static void emit_tile_position(te_emitter *e)
{
    te_emit(e, "            const uint64_t position = (uint64_t)column");
    for (int d = 0; d < e->shape->n_outer; d++) te_emit(e, " + (uint64_t)q%d * (uint64_t)r.position%d", d, d);
    te_emit(e, ";\n");
}

/* A thread's column of the tile, 4 of its 32 rows, joined with those of the other 7 threads of the column. */
static void emit_tile_column_sums(te_emitter *e)
{
    bool any = false;
    for (int o = 0; o < e->program->n_outputs; o++) {
        if (!te_emit_sums_columns(e, o)) continue;
        if (any) te_emit(e, "        __syncthreads();\n");
        any = true;
        te_emit(e,
                "        column_sums[y][x] = c%d;\n        __syncthreads();\n"
                "        if (y == 0 && right + x < columns) {\n"
                "            for (int j = 1; j < 8; j++) c%d += column_sums[j][x];\n"
                "            a.column_parts[((int64_t)%d * a.n_column_parts + line) * r.columns + right + x] = "
                "c%d;\n"
                "        }\n",
                o, o, te_emit_column_number(e, o), o);
    }
}

static bool draws(const te_emitter *e)
{
    for (int v = 0; v < e->program->n_insns; v++)
        if (te_opcode_is_random(e->program->insns[v].op)) return true;
    return false;
}

/* Offsets of the operands that are reached directly, from those of the tile. */
static void emit_tile_offsets(te_emitter *e, bool inner)
{
    int last = e->shape->n_outer - 1;
    for (int i = 0; i < e->shape->n_operands; i++) {
        int  access = e->shape->operand[i].access;
        bool uniform = i < e->program->n_inputs ? e->program->input_rates[i] == TE_RATE_UNIFORM
                                                : e->program->outputs[i - e->program->n_inputs].kind != TE_OUT_ELEM;
        if (access == TE_CUDA_ABSENT || access == TE_CUDA_TURNED || uniform) continue;
        if (inner)
            te_emit(e, "            const te_index o%d = o%d_tile + q%d * (te_index)r.p%d_%d;\n", i, i, last, i, last);
        else te_emit(e, "            const te_index o%d_tile = o%d;\n", i, i);
    }
}

/* t[column][row within the tile]: turned operands are moved with x along the outer dimension, values computed with x
 * along the row. Either way a thread has a unit. */
void te_emit_tiled(te_emitter *e)
{
    int last = e->shape->n_outer - 1, unit = e->shape->vector, edge = te_shape_tile(e->shape);
    emit_opening(e);
    for (int i = 0; i < e->shape->n_operands; i++)
        if (e->shape->operand[i].access == TE_CUDA_TURNED)
            te_emit(e, "    __shared__ __align__(16) %s t%d[%d][%d];\n", te_emit_type(e, i), i, edge, pitch_of(e, i));
    if (te_shape_column_sums(e->program, e->shape)) te_emit(e, "    __shared__ te_real column_sums[8][32];\n");
    te_emit(e,
            "    const te_index across = (te_index)r.extent%d;\n"
            "    const te_index wide = (columns + %d) / %d, high = (across + %d) / %d;\n",
            last, edge - 1, edge, edge - 1, edge);
    if (last == 0) te_emit(e, "    const te_index tiles = wide * high;\n");
    else te_emit(e, "    const te_index tiles = across ? (te_index)r.rows / across * wide * high : 0;\n");
    te_emit(e, "    const int x = threadIdx.x %% 32, y = threadIdx.x / 32;\n"
               "    for (te_index tile = blockIdx.x; tile < tiles; tile += (te_index)r.blocks) {\n"
               "        const te_index line = tile / wide, right = (tile - line * wide) * %d;\n", edge);
    if (last == 0) te_emit(e, "        const te_index down = line * %d;\n", edge);
    else te_emit(e, "        const te_index batch = line / high, down = (line - batch * high) * %d;\n", edge);
    te_emit_coordinates(e, last, "batch");
    te_emit_offsets(e, last);
    emit_tile_moves(e, false);
    for (int o = 0; o < e->program->n_outputs; o++)
        if (te_emit_sums_columns(e, o)) te_emit(e, "        te_real c%d = 0;\n", o);
    te_emit(e, "        for (int j = 0; j < %d; j += 8)\n"
               "            if (down + y + j < across && right + x * %d < columns) {\n"
               "            const te_index q%d = down + y + j, column = right + x * %d;\n", edge, unit, last, unit);
    if (draws(e)) emit_tile_position(e);
    emit_tile_offsets(e, false);
    te_emit(e, "            {\n");
    emit_tile_offsets(e, true);
    te_emit_row_values(e, 0);
    te_emit_mark(e, 0);
    te_emit_unit(e, "position", NULL);
    te_emit(e, "            }\n            }\n");
    emit_tile_moves(e, true);
    emit_tile_column_sums(e);
    te_emit(e, "        __syncthreads();\n");
    emit_closing(e);
}
