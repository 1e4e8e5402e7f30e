/* program_source_squares.c - kernels whose results are quantized where they are made.
 *
 * A block computes 128 x 128 elements, thread after thread along the rows, and puts those that are left quantized,
 * rounded, into a tile per output in shared memory; kernels/quantize_tile.cu then makes both copies from it. Nothing is
 * reduced along a row here: values of a row are loaded from where te_program_rows left them.
 *
 *      threads of a square, units of 8 elements:   0  1 … 15        y = 0, 16, … 112
 *                                                 16 17 … 31        y = 1, 17, … 113
 *                                                  …
 */
#include "program_source_emit.h"

static int across(const te_emitter *e) { return TE_CUDA_SQUARE / e->shape->vector; }
static int at_once(const te_emitter *e) { return TE_CUDA_FLAT_THREADS / across(e); }

static bool quantizes(const te_emitter *e, int o)
{
    return te_shape_output(e->program, e->shape, o)->access == TE_CUDA_QUANTIZED;
}

static bool sums_columns(const te_emitter *e, int o)
{
    return e->program->outputs[o].kind == TE_OUT_COLSUM && te_shape_wants(e->program, e->shape, o);
}

/* Tiles first, then what one quantization at a time works in. */
static void emit_tiles(te_emitter *e)
{
    int n = 0;
    for (int o = 0; o < e->program->n_outputs; o++)
        if (quantizes(e, o)) te_emit(e, "    te_a *const z%d = (te_a *)shared + %d * TE_SQUARE * TE_PITCH;\n", o, n++);
    te_emit(e, "    uint8_t *const codes = (uint8_t *)((te_a *)shared + %d * TE_SQUARE * TE_PITCH);\n"
               "    float *const partial = (float *)(codes + TE_SQUARE * TE_SQUARE);\n", n);
}

static void emit_opening(te_emitter *e)
{
    te_emit(e, "\nextern \"C\" __global__ void __launch_bounds__(%d) te_program(const __grid_constant__ te_args a)\n{\n"
               "    TE_DYNAMIC_SHARED(char, shared);\n", TE_CUDA_FLAT_THREADS);
    if (te_shape_sums(e->program, e->shape)) te_emit(e, "    __shared__ te_real places[32];\n");
    if (te_shape_column_sums(e->program, e->shape))
        te_emit(e, "    __shared__ te_real column_sums[%d][%d];\n", at_once(e), TE_CUDA_SQUARE);
    te_emit(e, "    const te_run_args &r = a.run[0];\n"
               "    const te_index columns = (te_index)r.columns, rows = (te_index)r.rows;\n"
               "    const te_index wide = (columns + 127) / 128, squares = (rows + 127) / 128 * wide;\n"
               "    const int x = threadIdx.x %% %d * %d;\n", across(e), e->shape->vector);
    te_emit_uniform(e);
    te_emit_sums(e);
    emit_tiles(e);
    te_emit(e, "    for (te_index square = blockIdx.x; square < squares; square += (te_index)r.blocks) {\n"
               "        const te_index right = square %% wide * 128, down = square / wide * 128;\n");
}

static void emit_stored_row_values(te_emitter *e)
{
    int n = 0;
    for (int v = 0; v < e->program->n_insns; v++) {
        if (e->program->insns[v].rate != TE_RATE_ROW) continue;
        if (e->values[v].live && e->values[v].level > 0)
            te_emit(e, "        const te_real v%d = a.row_values[%d * r.rows + row]; /* %s */\n", v, n,
                    te_opcode_name((te_opcode)e->program->insns[v].op));
        n++;
    }
}

/* Beyond the edges there are zeros. */
static void emit_elements(te_emitter *e)
{
    te_emit(e, "        for (int y = threadIdx.x / %d; y < 128; y += %d) {\n"
               "            const te_index row = down + y, column = right + x;\n"
               "            if (row >= rows || column >= columns) {\n", across(e), at_once(e));
    for (int o = 0; o < e->program->n_outputs; o++)
        if (quantizes(e, o))
            te_emit(e, "                for (int k = 0; k < %d; k++) z%d[y * TE_PITCH + x + k] = te_as_a(0.0f);\n",
                    e->shape->vector, o);
    te_emit(e, "                continue;\n            }\n");
    te_emit_coordinates(e, e->shape->n_outer, "row");
    te_emit_offsets(e, e->shape->n_outer);
    te_emit_row_values(e, 0);
    emit_stored_row_values(e);
    te_emit_unit(e, "(uint64_t)row * (uint64_t)columns + (uint64_t)column", NULL);
    te_emit(e, "        }\n");
}

/* A thread's columns, of some of the square's rows, joined with those of the threads below it. */
static void emit_column_sums(te_emitter *e)
{
    for (int o = 0; o < e->program->n_outputs; o++) {
        if (!sums_columns(e, o)) continue;
        te_emit(e, "        for (int k = 0; k < %d; k++) column_sums[threadIdx.x / %d][x + k] = c%d[k];\n"
                   "        __syncthreads();\n"
                   "        if (threadIdx.x < 128 && right + (te_index)threadIdx.x < columns) {\n"
                   "            te_real sum = column_sums[0][threadIdx.x];\n"
                   "            for (int j = 1; j < %d; j++) sum += column_sums[j][threadIdx.x];\n"
                   "            a.column_parts[((int64_t)%d * a.n_column_parts + square / wide) * columns + right + "
                   "threadIdx.x]"
                   " = sum;\n        }\n        __syncthreads();\n",
                e->shape->vector, across(e), o, at_once(e), te_emit_column_number(e, o));
    }
}

static void emit_quantizations(te_emitter *e)
{
    int n = 0;
    te_emit(e, "        __syncthreads();\n");
    for (int o = 0; o < e->program->n_outputs; o++)
        if (quantizes(e, o))
            te_emit(e, "        te_quantize_tile<%d>(a.quantized[%d], te_tile{codes, partial, down, right}, z%d);\n",
                    te_shape_output(e->program, e->shape, o)->variant, n++, o);
    te_emit(e, "    }\n    for (int s = 0; s < %d && blockIdx.x == 0 && threadIdx.x == 0; s++) "
               "te_put_whole(a.quantized[s / 2], s %% 2);\n", 2 * n);
}

void te_emit_squares(te_emitter *e)
{
    if (te_shape_has_row_kernel(e->program, e->shape)) te_emit_row_kernel(e);
    for (int v = 0; v < e->program->n_insns; v++) e->values[v].held = false;
    e->item = "";
    emit_opening(e);
    for (int o = 0; o < e->program->n_outputs; o++)
        if (sums_columns(e, o)) te_emit(e, "        te_real c%d[%d] = {};\n", o, e->shape->vector);
    te_emit_mark(e, e->passes - 1);
    emit_elements(e);
    emit_column_sums(e);
    emit_quantizations(e);
    te_emit_sum_parts(e);
    te_emit(e, "}\n");
}
