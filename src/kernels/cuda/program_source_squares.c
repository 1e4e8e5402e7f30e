/* program_source_squares.c - kernels whose results are quantized where they are made.
 *
 * A block computes 128 x 128 elements, thread after thread along the rows. Where FP8 has one factor for all, a thread
 * makes codes of its values at once (kernels/quantize_whole.cu). Otherwise it puts them, rounded, into a tile per
 * output in shared memory, and kernels/quantize_tile.cu makes both copies from that. Nothing is reduced along a row
 * here: values of a row are loaded from where te_program_rows left them.
 *
 *      threads of a square, units of 8 elements:   0  1 … 15        y = 0, 16, … 112
 *                                                 16 17 … 31        y = 1, 17, … 113
 *                                                  …
 */
#include "kernels/hand.h"
#include "program_source_emit.h"

static int across(const te_emitter *e) { return TE_CUDA_SQUARE / e->shape->vector; }
static int at_once(const te_emitter *e) { return TE_CUDA_FLAT_THREADS / across(e); }

static bool quantizes(const te_emitter *e, int o)
{
    return te_shape_output(e->program, e->shape, o)->access == TE_CUDA_QUANTIZED;
}

/* A tile of codes. */
static int tile_rows(const te_emitter *e) { return e->shape->band ? e->shape->band : TE_CUDA_SQUARE; }
static int tile_columns(const te_emitter *e)
{
    return e->shape->band ? te_shape_band_columns(e->shape) : TE_CUDA_SQUARE;
}

static int variant_of(const te_emitter *e, int o) { return te_shape_output(e->program, e->shape, o)->variant; }

static bool is_whole(const te_emitter *e, int o)
{
    return quantizes(e, o) && te_cuda_quantizes_whole((uint16_t)variant_of(e, o));
}

static bool has_tile(const te_emitter *e, int o) { return quantizes(e, o) && !is_whole(e, o); }

static bool any(const te_emitter *e, bool (*is)(const te_emitter *, int))
{
    for (int o = 0; o < e->program->n_outputs; o++)
        if (is(e, o)) return true;
    return false;
}

/* Which of the quantized outputs it is. */
static int number_of(const te_emitter *e, int output)
{
    int n = 0;
    for (int o = 0; o < output; o++) n += quantizes(e, o);
    return n;
}

/* Tiles of values and of codes first, then what one quantization at a time works in. */
static void emit_tiles(te_emitter *e)
{
    int tiles = 0, wholes = 0;
    for (int o = 0; o < e->program->n_outputs; o++)
        if (has_tile(e, o))
            te_emit(e, "    te_a *const z%d = (te_a *)shared + %d * TE_SQUARE * TE_PITCH;\n", o, tiles++);
    te_emit(e, "    uint8_t *const bytes = (uint8_t *)((te_a *)shared + %d * TE_SQUARE * TE_PITCH);\n", tiles);
    for (int o = 0; o < e->program->n_outputs; o++)
        if (is_whole(e, o))
            te_emit(e, "    te_whole<%d, %d, %d> z%d(a.quantized[%d], bytes + %d);\n", variant_of(e, o), tile_rows(e),
                    tile_columns(e), o, number_of(e, o), wholes++ * tile_rows(e) * tile_columns(e));
    if (!tiles) return;
    te_emit(e, "    uint8_t *const codes = bytes + %d * TE_SQUARE * TE_SQUARE;\n"
               "    float *const partial = (float *)(codes + TE_SQUARE * TE_SQUARE);\n", wholes);
}

static void emit_opening(te_emitter *e)
{
    te_emit(e, "\nextern \"C\" __global__ void __launch_bounds__(%d) te_program(const __grid_constant__ te_args a)\n{\n"
               "    TE_DYNAMIC_SHARED(char, shared);\n", TE_CUDA_FLAT_THREADS);
    if (te_shape_sums(e->program, e->shape)) te_emit(e, "    __shared__ te_real places[32];\n");
    if (te_shape_column_sums(e->program, e->shape))
        te_emit(e, "    __shared__ __align__(16) te_real column_sums[%d][%d];\n", at_once(e), TE_CUDA_SQUARE);
    te_emit(e, "    const te_run_args &r = a.run[0];\n"
               "    const te_index columns = (te_index)r.columns, rows = (te_index)r.rows;\n"
               "    const te_index wide = (columns + 127) / 128, squares = (rows + 127) / 128 * wide;\n"
               "    const int x = threadIdx.x %% %d * %d;\n", across(e), e->shape->vector);
    te_emit_uniform(e);
    te_emit_tables(e);
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

void te_emit_results(te_emitter *e, const char *place)
{
    for (int o = 0; o < e->program->n_outputs; o++) {
        int unit = e->shape->vector, i = e->program->n_inputs + o;
        if (is_whole(e, o))
            te_emit(e, "            z%d.put<%d>(a.quantized[%d], row, column, %s, y%d);\n", o, unit, number_of(e, o),
                    place, o);
        else if (has_tile(e, o))
            te_emit(e, "            te_unit_store<te_a, %d>(z%d + y * TE_PITCH + x, te_unit_as_%s<%d>(y%d));\n", unit,
                    o, te_dtype_name((te_dtype)e->shape->operand[i].dtype), unit, o);
    }
}

/* Beyond the edges there are zeros. */
static void emit_elements(te_emitter *e)
{
    te_emit(e, "        for (int y = threadIdx.x / %d; y < 128; y += %d) {\n"
               "            const te_index row = down + y, column = right + x;\n"
               "            if (row >= rows || column >= columns) {\n", across(e), at_once(e));
    for (int o = 0; o < e->program->n_outputs; o++)
        if (has_tile(e, o))
            te_emit(e, "                te_unit_store<te_a, %d>(z%d + y * TE_PITCH + x, te_unit<te_a, %d>{});\n",
                    e->shape->vector, o, e->shape->vector);
    te_emit(e, "                continue;\n            }\n");
    te_emit_coordinates(e, e->shape->n_outer, "row");
    te_emit_offsets(e, e->shape->n_outer);
    te_emit_row_values(e, 0);
    emit_stored_row_values(e);
    te_emit_unit(e, "(uint64_t)row * (uint64_t)columns + (uint64_t)column", NULL);
    te_emit_results(e, "y, x");
    te_emit(e, "        }\n");
}

/* A thread's columns, of some of the square's rows … */
static void emit_column_sums(te_emitter *e, int o)
{
    int unit = e->shape->vector;
    te_emit(e, "        te_unit<te_real, %d> sums%d;\n#pragma unroll\n"
               "        for (int k = 0; k < %d; k++) sums%d.e[k] = c%d[k];\n"
               "        te_unit_store<te_real, %d>(column_sums[threadIdx.x / %d] + x, sums%d);\n",
            unit, o, unit, o, o, unit, across(e), o);
}

/* … are joined with those of the threads below it. */
static void emit_joined_columns(te_emitter *e, int o)
{
    te_emit(e, "        if (threadIdx.x < 128 && right + (te_index)threadIdx.x < columns) {\n"
               "            te_real sum = column_sums[0][threadIdx.x];\n"
               "            for (int j = 1; j < %d; j++) sum += column_sums[j][threadIdx.x];\n"
               "            a.column_parts[((int64_t)%d * a.n_column_parts + square / wide) * columns + right + "
               "threadIdx.x]"
               " = sum;\n        }\n",
            at_once(e), te_emit_column_number(e, o));
}

/* Whether a block has to wait for its codes. */
static void emit_turns(te_emitter *e)
{
    te_emit(e, "        const bool turns = false");
    for (int o = 0; o < e->program->n_outputs; o++)
        if (is_whole(e, o)) te_emit(e, " | z%d.turns(a.quantized[%d])", o, number_of(e, o));
    te_emit(e, ";\n");
}

static void emit_turn(te_emitter *e, int o, const char *corner)
{
    te_emit(e, "        z%d.turn<%d>(a.quantized[%d], %s);\n", o, te_shape_threads(e->shape), number_of(e, o), corner);
}

static void emit_amaxes(te_emitter *e)
{
    for (int o = 0; o < e->program->n_outputs; o++)
        if (is_whole(e, o))
            te_emit(e, "    z%d.finish<%d>(a.quantized[%d]);\n", o, te_shape_threads(e->shape), number_of(e, o));
    te_emit(e, "    for (int s = 0; s < %d && blockIdx.x == 0 && threadIdx.x == 0; s++) "
               "te_put_whole(a.quantized[s / 2], s %% 2);\n", 2 * te_shape_quantized(e->program, e->shape));
}

/* The block waits where a square's results are complete, and again before the next one's take their place. */
static void emit_quantizations(te_emitter *e)
{
    const te_program *p = e->program;
    bool              waits = any(e, te_emit_sums_columns) || any(e, has_tile);
    int               last = -1;
    for (int o = 0; o < p->n_outputs; o++) {
        if (!te_emit_sums_columns(e, o)) continue;
        if (last >= 0) {
            te_emit(e, "        __syncthreads();\n");
            emit_joined_columns(e, last);
            te_emit(e, "        __syncthreads();\n");
        }
        emit_column_sums(e, last = o);
    }
    if (!waits) emit_turns(e);
    te_emit(e, "        %s__syncthreads();\n", waits ? "" : "if (turns) ");
    if (last >= 0) emit_joined_columns(e, last);
    for (int o = 0; o < p->n_outputs; o++)
        if (is_whole(e, o)) emit_turn(e, o, "down, right");
    for (int o = 0; o < p->n_outputs; o++)
        if (has_tile(e, o))
            te_emit(e, "        te_quantize_tile<%d>(a.quantized[%d], te_tile{codes, partial, down, right}, z%d);\n",
                    variant_of(e, o), number_of(e, o), o);
    te_emit(e, "        %s__syncthreads();\n    }\n", waits ? "" : "if (turns) ");
    emit_amaxes(e);
}

void te_emit_band_opening(te_emitter *e)
{
    te_emit(e, "    TE_DYNAMIC_SHARED(char, shared);\n");
    emit_tiles(e);
}

void te_emit_band_end(te_emitter *e)
{
    emit_turns(e);
    te_emit(e, "        if (turns) __syncthreads();\n");
    for (int o = 0; o < e->program->n_outputs; o++)
        if (is_whole(e, o)) emit_turn(e, o, "band, 0");
    te_emit(e, "        if (turns) __syncthreads();\n    }\n");
    emit_amaxes(e);
}

void te_emit_squares(te_emitter *e)
{
    if (te_shape_has_row_kernel(e->program, e->shape)) te_emit_row_kernel(e);
    for (int v = 0; v < e->program->n_insns; v++) e->values[v].held = false;
    e->item = "";
    emit_opening(e);
    for (int o = 0; o < e->program->n_outputs; o++)
        if (te_emit_sums_columns(e, o)) te_emit(e, "        te_real c%d[%d] = {};\n", o, e->shape->vector);
    te_emit_mark(e, e->passes - 1);
    emit_elements(e);
    emit_quantizations(e);
    te_emit_sum_parts(e);
    te_emit(e, "}\n");
}
