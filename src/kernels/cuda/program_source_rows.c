/* program_source_rows.c - kernels that walk rows.
 *
 * A row is walked once per level of reductions, and once more for outputs. What a thread holds of a row: loaded units
 * in the type they have in memory, values that are dear to compute, and those rounded to bfloat16, packed; the rest is
 * computed anew, which gives the same bits. A pass begins with all its loads. Outputs are stored in the last one, after
 * everything else is read, so they may lie where inputs do.
 */
#include "program_source_emit.h"

static bool holds(const te_emitter *e) { return e->shape->items > 0; }

/* Column sums take many registers: not so many that a block is alone on a multiprocessor, waiting for memory. */
static bool shares(const te_emitter *e) { return te_shape_column_blocks(e->program, e->shape) > 1; }

/* Results are left quantized: rows come in bands. */
static bool in_bands(const te_emitter *e)
{
    return e->shape->band > 0;
}

/* Whether lanes may have no row: those of a whole warp then leave. */
static bool may_idle(const te_emitter *e) { return e->shape->lanes < 32; }

static void emit_opening(te_emitter *e, const char *name)
{
    int threads = te_shape_row_threads(e->shape), at_once = te_shape_rows_at_once(e->shape);
    bool sums = e->shape->kind == TE_CUDA_ROWS;
    char blocks[16] = "";
    if (shares(e)) snprintf(blocks, sizeof blocks, ", %d", te_shape_column_blocks(e->program, e->shape));
    te_emit(e, "extern \"C\" __global__ void __launch_bounds__(%d%s) %s(const __grid_constant__ te_args a)\n{\n",
            threads, blocks, name);
    te_emit(e, "    __shared__ te_real places[32];\n    const te_run_args &r = a.run[0];\n"
               "    const te_index columns = (te_index)r.columns, rows = (te_index)r.rows;\n"
               "    const int lane = threadIdx.x %% %d;\n", e->shape->lanes);
    te_emit_uniform(e);
    if (sums) te_emit_sums(e);
    for (int o = 0; sums && holds(e) && o < e->program->n_outputs; o++)
        if (e->program->outputs[o].kind == TE_OUT_COLSUM && te_shape_wants(e->program, e->shape, o))
            te_emit(e, "    te_real c%d[%d] = {};\n", o, e->shape->items * e->shape->vector);
    if (in_bands(e)) {
        te_emit_band_opening(e);
        te_emit(e, "    for (te_index band = (te_index)blockIdx.x * %d; band < rows; "
                   "band += (te_index)gridDim.x * %d) {\n"
                   "    for (te_index base = band; base < band + %d && base < rows; base += %d) {\n",
                e->shape->band, e->shape->band, e->shape->band, at_once);
    } else {
        te_emit(e, "    for (te_index base = (te_index)blockIdx.x * %d; base < rows; "
                   "base += (te_index)gridDim.x * %d) {\n",
                at_once, at_once);
    }
    if (may_idle(e))
        te_emit(e, "        const bool live = base + (te_index)threadIdx.x / %d < rows;\n"
                   "        const te_index row = live ? base + (te_index)threadIdx.x / %d : base;\n", e->shape->lanes,
                e->shape->lanes);
    else if (at_once > 1)
        te_emit(e, "        const te_index row = base + (te_index)threadIdx.x / %d;\n        if (row >= rows) break;\n",
                e->shape->lanes);
    else te_emit(e, "        const te_index row = base;\n");
}

static void emit_held(te_emitter *e)
{
    for (int i = 0; i < e->program->n_inputs; i++) {
        if (holds(e) && te_emit_holds_input(e, i))
            te_emit(e, "        te_unit<%s, %d> x%d[%d];\n", te_emit_type(e, i), e->shape->vector, i, e->shape->items);
    }
    for (int v = 0; v < e->program->n_insns; v++)
        if (e->values[v].held && e->values[v].packed)
            te_emit(e, "        te_unit<uint16_t, %d> h%d[%d];\n", e->shape->vector, v, e->shape->items);
        else if (e->values[v].held)
            te_emit(e, "        te_real h%d[%d][%d];\n", v, e->shape->items, e->shape->vector);
}

bool te_emit_sums_columns(const te_emitter *e, int o)
{
    return e->program->outputs[o].kind == TE_OUT_COLSUM && te_shape_wants(e->program, e->shape, o);
}

int te_emit_column_number(const te_emitter *e, int output)
{
    int n = 0;
    for (int o = 0; o < output; o++) n += te_emit_sums_columns(e, o);
    return n;
}

/* Column sums of rows too long to be held grow in the block's part itself. */
static void emit_long_column_sums(te_emitter *e, bool before)
{
    for (int o = 0; !holds(e) && e->pass == e->passes - 1 && o < e->program->n_outputs; o++) {
        if (e->program->outputs[o].kind != TE_OUT_COLSUM || !te_shape_wants(e->program, e->shape, o)) continue;
        int n = te_emit_column_number(e, o), unit = e->shape->vector;
        if (before)
            te_emit(
                e,
                "            te_real *part%d = a.column_parts + ((int64_t)%d * a.blocks + blockIdx.x) * r.columns + "
                "column;\n            te_unit<te_real, %d> c%d = {};\n"
                "            if (base != (te_index)blockIdx.x) c%d = te_unit_gather<te_real, %d>(part%d, 1, %d);\n",
                o, n, unit, o, o, unit, o, unit);
        else te_emit(e, "            te_unit_scatter<te_real, %d>(part%d, 1, %d, c%d);\n", unit, o, unit, o);
    }
}

static void emit_item_loop(te_emitter *e, int items)
{
    te_emit(e, "#pragma unroll\n        for (int i = 0; i < %d; i++) {\n"
               "            const te_index column = (te_index)(i * %d + lane) * %d%s;\n",
            items, e->shape->lanes, e->shape->vector, holds(e) ? "" : " + first");
    if (!e->shape->full) te_emit(e, "            if (column >= columns) continue;\n");
}

/* Registers for what a thread holds of the row's inputs. */
static int held_registers(const te_emitter *e)
{
    int bytes = 0;
    for (int i = 0; i < e->program->n_inputs; i++)
        if (te_emit_holds_input(e, i))
            bytes += e->shape->items * e->shape->vector * (int)te_dtype_size((te_dtype)e->shape->operand[i].dtype);
    return bytes / 4;
}

/* All loads of a pass are under way before the first is waited for; those of later passes too where there is room. */
static void emit_held_loads(te_emitter *e)
{
    enum { FEW = 48 };
    bool any = false, all = e->pass == 0 && !shares(e) && held_registers(e) <= FEW;
    for (int i = 0; i < e->program->n_inputs; i++) any |= !e->loaded[i] && te_emit_holds_input(e, i);
    if (!any) return;
    emit_item_loop(e, e->shape->items);
    te_emit_held_loads(e, all);
    te_emit(e, "        }\n");
}

/* How many units of a row that is not held are under way at a time. */
static int batch(const te_emitter *e)
{
    int n = 0;
    for (int i = 0; i < e->shape->n_operands; i++)
        n += i >= e->program->n_inputs ? e->pass == e->passes - 1 && e->shape->operand[i].access != TE_CUDA_ABSENT
                                       : te_emit_loads_operand(e, i, false);
    return n > 2 && e->shape->vector >= 4 ? 2 : 4;
}

/* Their loads; the inputs of a pass are read anew in each. */
static void emit_batch(te_emitter *e)
{
    int n = batch(e), width = n * e->shape->lanes * e->shape->vector;
    if (e->shape->levels)
        te_emit(e, "        for (te_index first = share * %d; first < columns; first += shares * %d) {\n", width,
                width);
    else te_emit(e, "        for (te_index first = 0; first < columns; first += %d) {\n", width);
    e->item = "[i]";
    for (int i = 0; i < e->program->n_inputs; i++) {
        e->loaded[i] = false;
        if (te_emit_holds_input(e, i) && te_emit_loads_operand(e, i, false))
            te_emit(e, "        te_unit<%s, %d> x%d[%d];\n", te_emit_type(e, i), e->shape->vector, i, n);
    }
    emit_item_loop(e, n);
    te_emit_held_loads(e, false);
    te_emit(e, "        }\n");
}

/* Where few warps are there to wait for memory, as where blocks have a row at a time of a band, the next row is brought
 * as near as the L2 while this one is worked on. */
static void emit_prefetches(te_emitter *e)
{
    bool few = shares(e) || (in_bands(e) && e->shape->lanes > 32);
    if (!few || e->pass > 0 || e->shape->n_outer != 1) return;
    int at_once = te_shape_rows_at_once(e->shape);
    if (in_bands(e))
        te_emit(e, "        const te_index step = base + %d < band + %d ? %d : (te_index)gridDim.x * %d - %d;\n",
                at_once, e->shape->band, at_once, e->shape->band, e->shape->band - at_once);
    else te_emit(e, "        const te_index step = (te_index)gridDim.x * %d;\n", at_once);
    te_emit(e, "        if (row + step < rows) {\n");
    emit_item_loop(e, e->shape->items);
    for (int i = 0; i < e->program->n_inputs; i++)
        if (te_emit_holds_input(e, i) && e->shape->operand[i].access == TE_CUDA_VECTOR &&
            !e->shape->operand[i].blocked && te_emit_loads_operand(e, i, true))
            te_emit(e, "            te_prefetch(r.p%d + o%d + step * (te_index)r.p%d_0 + column);\n", i, i, i);
    te_emit(e, "        }\n        }\n");
}

static void emit_pass_loop(te_emitter *e)
{
    int items = holds(e) ? e->shape->items : batch(e);
    if (holds(e)) emit_held_loads(e);
    else emit_batch(e);
    emit_prefetches(e);
    /* what is alike in every row is loaded anew: kept, it would take the registers that other blocks need */
    if (shares(e) && e->pass > 0) te_emit(e, "        asm volatile(\"\" ::: \"memory\");\n");
    emit_item_loop(e, items);
    if (holds(e) && may_idle(e)) te_emit(e, "            if (!live) continue;\n");
    emit_long_column_sums(e, true);
    te_emit_unit(e, "(uint64_t)row * (uint64_t)columns + (uint64_t)column", NULL);
    if (in_bands(e) && e->pass == e->passes - 1) te_emit_results(e, "(int)(row - band), (int)column");
    emit_long_column_sums(e, false);
    te_emit(e, holds(e) ? "        }\n" : "        }\n        }\n");
}

static const char *neutral(int op)
{
    return op == TE_PW_ROWSUM ? "0" : op == TE_PW_ROWMAX ? "-(te_real)TE_INFINITY" : "(te_real)TE_INFINITY";
}

void te_emit_pass(te_emitter *e, int pass)
{
    const te_program *p = e->program;
    bool              any = false;
    te_emit_mark(e, pass);
    for (int v = 0; v < p->n_insns; v++) {
        if (!te_opcode_reduces(p->insns[v].op) || !e->values[v].live || e->values[v].level != pass + 1) continue;
        te_emit(e, "        te_real m%d = %s;\n", v, neutral(p->insns[v].op));
        any = true;
    }
    for (int o = 0; pass == e->passes - 1 && o < p->n_outputs; o++)
        any |= p->outputs[o].kind != TE_OUT_ROW && te_shape_wants(p, e->shape, o);
    if (any) emit_pass_loop(e);
    for (int v = 0; v < p->n_insns; v++) {
        if (!te_opcode_reduces(p->insns[v].op) || !e->values[v].live || e->values[v].level != pass + 1) continue;
        te_emit(e, "        const te_real v%d = te_row_%s<%d>(m%d", v, te_opcode_name((te_opcode)p->insns[v].op),
                e->shape->lanes, v);
        /* a part of a row may hold nothing but -infinity where the row does not */
        const char *below = e->shape->levels ? " * te_row_exp(m%d - te_row_max(v%d, (te_real)TE_LOWEST))"
                                             : " * te_row_exp(m%d - v%d)";
        if (e->values[v].online && p->insns[v].op == TE_PW_ROWSUM)
            te_emit(e, below, te_emit_maximum_of(e, v), te_emit_maximum_of(e, v));
        te_emit(e, ", places);\n");
    }
}

/* Row outputs may lie where row inputs do, which all threads of the row read at its beginning. */
void te_emit_row_outputs(te_emitter *e)
{
    const te_program *p = e->program;
    bool              any = false;
    for (int o = 0; o < p->n_outputs; o++) {
        if (p->outputs[o].kind != TE_OUT_ROW || !te_shape_wants(p, e->shape, o)) continue;
        int         i = p->n_inputs + o;
        const char *dtype = te_dtype_name((te_dtype)e->shape->operand[i].dtype);
        if (!any) te_emit(e, "        %s();\n        if (%slane == 0) {\n",
                          e->shape->lanes > 32 ? "__syncthreads" : "__syncwarp",
                          e->shape->levels ? "share == 0 && " : may_idle(e) ? "live && " : "");
        any = true;
        te_emit(e, "            r.p%d[o%d] = te_as_%s(", i, i, dtype);
        if (e->shape->operand[i].accumulate) te_emit(e, "te_from_%s(r.p%d[o%d]) + ", dtype, i, i);
        te_emit(e, "v%d);\n", p->outputs[o].value);
    }
    if (any) te_emit(e, "        }\n");
}

/* The block's part of a column sum: of all its rows' lanes. */
static void emit_column_parts(te_emitter *e, int o)
{
    int unit = e->shape->vector, items = e->shape->items, lanes = e->shape->lanes, n = te_emit_column_number(e, o);
    if (te_shape_rows_at_once(e->shape) > 1)
        te_emit(e, "    te_join_groups<%d, %d, %d>(c%d, column_sums);\n", lanes, te_shape_threads(e->shape),
                items * unit, o);
    te_emit(e, "    if (threadIdx.x < %d) {\n"
               "        te_real *part = a.column_parts + ((int64_t)%d * a.blocks + blockIdx.x) * r.columns;\n"
               "#pragma unroll\n        for (int i = 0; i < %d; i++) {\n"
               "            const te_index column = (te_index)(i * %d + lane) * %d;\n"
               "            te_unit<te_real, %d> sums;\n#pragma unroll\n"
               "            for (int k = 0; k < %d; k++) sums.e[k] = c%d[i * %d + k];\n"
               "            if (column < columns) te_unit_store<te_real, %d>(part + column, sums);\n        }\n    }\n",
            lanes, n, items, lanes, unit, unit, unit, o, unit, unit);
}

/* One array for all column sums: disjoint scopes do not share the memory of their shared variables. */
static void emit_column_room(te_emitter *e)
{
    int room = te_shape_threads(e->shape) / 2 * e->shape->items * e->shape->vector;
    if (holds(e) && te_shape_rows_at_once(e->shape) > 1 && te_shape_column_sums(e->program, e->shape) > 0)
        te_emit(e, "    __shared__ te_real column_sums[%d];\n", room);
}

static void emit_beginning(te_emitter *e, const char *name)
{
    emit_opening(e, name);
    te_emit_coordinates(e, e->shape->n_outer, "row");
    te_emit_offsets(e, e->shape->n_outer);
    if (holds(e)) e->item = "[i]";
    emit_held(e);
}

/* All that follows from reductions, since the next kernel reduces nothing. */
static void emit_row_values_stored(te_emitter *e)
{
    int n = 0;
    te_emit(e, "        if (%slane == 0) {\n", may_idle(e) ? "live && " : "");
    for (int v = 0; v < e->program->n_insns; v++) {
        if (e->program->insns[v].rate != TE_RATE_ROW) continue;
        if (e->values[v].live && e->values[v].level > 0)
            te_emit(e, "            a.row_values[%d * r.rows + row] = v%d;\n", n, v);
        n++;
    }
    te_emit(e, "        }\n");
}

int te_program_row_values(const te_program *program)
{
    int n = 0;
    for (int v = 0; v < program->n_insns; v++) n += program->insns[v].rate == TE_RATE_ROW;
    return n;
}

void te_emit_row_kernel(te_emitter *e)
{
    emit_beginning(e, "te_program_rows");
    for (int pass = 0; pass < e->passes; pass++) {
        te_emit_row_values(e, pass);
        if (pass + 1 < e->passes) te_emit_pass(e, pass);
    }
    emit_row_values_stored(e);
    te_emit_row_outputs(e);
    te_emit(e, "    }\n}\n");
}

void te_emit_rows(te_emitter *e)
{
    emit_beginning(e, "te_program");
    for (int pass = 0; pass < e->passes; pass++) {
        te_emit_row_values(e, pass);
        te_emit_pass(e, pass);
    }
    te_emit_row_outputs(e);
    te_emit(e, "    }\n");
    if (in_bands(e)) te_emit_band_end(e);
    emit_column_room(e);
    for (int o = 0; holds(e) && o < e->program->n_outputs; o++)
        if (e->program->outputs[o].kind == TE_OUT_COLSUM && te_shape_wants(e->program, e->shape, o))
            emit_column_parts(e, o);
    te_emit_sum_parts(e);
    te_emit(e, "}\n");
}
