/* program_source_columns.c - column sums where nothing is reduced along a row: threads that walk down the rows.
 *
 *      lanes units side by side       block 0   block 1  …        rows 0, n, 2n, …   of thread row 0
 *      256 / lanes thread rows        block b   block b + 1 …     rows 1, n + 1, …   of thread row 1
 *
 * A thread adds up its unit's columns over every n-th row, n being the thread rows of all blocks of those columns; the
 * thread rows of a block are then joined in shared memory, those of several blocks by te_program_join.
 */
#include "program_source_emit.h"

/* How many blocks a multiprocessor is to hold: as many as there are, but where sums take so many registers. */
static int blocks_at_once(const te_emitter *e)
{
    int sums = 0;
    for (int o = 0; o < e->program->n_outputs; o++) sums += te_emit_sums_columns(e, o);
    return sums > 1 ? TE_CUDA_COLUMN_BLOCKS / 2 : TE_CUDA_COLUMN_BLOCKS;
}

static void emit_opening(te_emitter *e)
{
    int  lanes = e->shape->lanes, unit = e->shape->vector, at_once = te_shape_rows_at_once(e->shape);
    char blocks[16] = "";
    if (!e->shape->compute_f64) snprintf(blocks, sizeof blocks, ", %d", blocks_at_once(e));
    te_emit(e, "extern \"C\" __global__ void __launch_bounds__(%d%s) te_program(const __grid_constant__ te_args a)\n"
               "{\n", TE_CUDA_FLAT_THREADS, blocks);
    if (te_shape_sums(e->program, e->shape)) te_emit(e, "    __shared__ te_real places[32];\n");
    if (at_once > 1) te_emit(e, "    __shared__ te_real column_sums[%d];\n", TE_CUDA_FLAT_THREADS / 2 * unit);
    te_emit(e, "    const te_run_args &r = a.run[0];\n"
               "    const te_index columns = (te_index)r.columns, rows = (te_index)r.rows;\n"
               "    const te_index across = columns > %d ? (columns + %d) / %d : 1;\n"
               "    const te_index column = ((te_index)blockIdx.x %% across * %d + (te_index)threadIdx.x %% %d) * %d;\n"
               "    const te_index down = (te_index)blockIdx.x / across, step = (te_index)a.n_column_parts * %d;\n",
            lanes * unit, lanes * unit - 1, lanes * unit, lanes, lanes, unit, at_once);
    te_emit_uniform(e);
    te_emit_tables(e);
    te_emit_sums(e);
    for (int o = 0; o < e->program->n_outputs; o++)
        if (te_emit_sums_columns(e, o)) te_emit(e, "    te_real c%d[%d] = {};\n", o, unit);
}

/* Programs of few instructions wait for memory: several rows are under way at a time. */
static int rows_under_way(const te_emitter *e)
{
    enum { FEW_INSTRUCTIONS = 12, UNITS = 4 };
    int instructions = 0, inputs = 0;
    for (int v = 0; v < e->program->n_insns; v++) {
        bool element = e->values[v].live && e->program->insns[v].rate == TE_RATE_ELEM;
        instructions += element;
        inputs += element && e->program->insns[v].op == TE_PW_LOAD;
    }
    return instructions > FEW_INSTRUCTIONS || inputs == 0 ? 1 : inputs > UNITS ? 1 : UNITS / inputs;
}

static void emit_walk(te_emitter *e)
{
    te_emit(e, "    if (column < columns) {\n#pragma unroll %d\n"
               "        for (te_index row = down * %d + (te_index)threadIdx.x / %d; row < rows; row += step) {\n",
            rows_under_way(e), te_shape_rows_at_once(e->shape), e->shape->lanes);
    te_emit_coordinates(e, e->shape->n_outer, "row");
    te_emit_offsets(e, e->shape->n_outer);
    te_emit_row_values(e, 0);
    te_emit_mark(e, 0);
    te_emit_unit(e, "(uint64_t)row * (uint64_t)columns + (uint64_t)column", NULL);
    te_emit(e, "        }\n    }\n");
}

static void emit_result(te_emitter *e, int o)
{
    int  unit = e->shape->vector;
    char place[96];
    if (te_shape_rows_at_once(e->shape) > 1)
        te_emit(e, "    te_join_groups<%d, %d, %d>(c%d, column_sums);\n", e->shape->lanes, TE_CUDA_FLAT_THREADS, unit,
                o);
    te_emit(e, "    if (threadIdx.x < %d && column < columns) {\n", e->shape->lanes);
    if (!e->shape->direct) {
        te_emit(e, "        te_real *part = a.column_parts + ((int64_t)%d * a.n_column_parts + down) * r.columns + "
                   "column;\n        te_unit<te_real, %d> sums;\n#pragma unroll\n"
                   "        for (int k = 0; k < %d; k++) sums.e[k] = c%d[k];\n"
                   "        te_unit_store<te_real, %d>(part, sums);\n    }\n",
                te_emit_column_number(e, o), unit, unit, o, unit);
        return;
    }
    te_emit_column_place(e, o, "r", "at", place, sizeof place);
    te_emit(e, "#pragma unroll\n        for (int k = 0; k < %d; k++) {\n            const int64_t at = column + k;\n"
               "            te_real value = c%d[k];\n", unit, o);
    te_emit_joined_store(e, o, place, false);
    te_emit(e, "    }\n");
}

void te_emit_columns(te_emitter *e)
{
    e->item = "";
    emit_opening(e);
    emit_walk(e);
    for (int o = 0; o < e->program->n_outputs; o++)
        if (te_emit_sums_columns(e, o)) emit_result(e, o);
    te_emit_sum_parts(e);
    te_emit(e, "}\n");
}
