/* program_source_join.c - the kernel that joins the parts of sums. */
#include "program_source_emit.h"

void te_emit_joined_store(te_emitter *e, int o, const char *place, bool amax)
{
    int         i = e->program->n_inputs + o;
    const char *dtype = te_dtype_name((te_dtype)e->shape->operand[i].dtype);
    if (e->shape->operand[i].accumulate)
        te_emit(e, amax ? "            const te_real old = te_from_%s(%s);\n            if (old > value) value = old;\n"
                        : "            value = te_from_%s(%s) + value;\n", dtype, place);
    te_emit(e, "            %s = te_as_%s(value);\n        }\n", place, dtype);
}

void te_emit_column_place(const te_emitter *e, int o, const char *run, const char *at, char *text, size_t size)
{
    int i = e->program->n_inputs + o;
    if (e->shape->operand[i].blocked)
        snprintf(text, size, "%s.p%d[te_place(%s, %s.p%d_block) * %s.p%d_column]", run, i, at, run, i, run, i);
    else
        snprintf(text, size, "%s.p%d[%s * %s.p%d_column]", run, i, at, run, i);
}

static void emit_join_columns(te_emitter *e)
{
    te_emit(e, "    const te_run_args &first = a.run[0];\n"
               "    const int64_t column_blocks = (first.columns + 31) / 32, column = (int64_t)blockIdx.x * 32 + "
               "threadIdx.x;\n"
               "    if (blockIdx.x < column_blocks) {\n");
    for (int o = 0; o < e->program->n_outputs; o++) {
        if (e->program->outputs[o].kind != TE_OUT_COLSUM || !te_shape_wants(e->program, e->shape, o)) continue;
        char place[96];
        te_emit_column_place(e, o, "first", "column", place, sizeof place);
        te_emit(e,
                "        const te_real sum%d = te_join_columns(a.column_parts + (int64_t)%d * a.n_column_parts * "
                "first.columns, "
                "first.rows ? a.n_column_parts : 0, first.columns);\n"
                "        if (threadIdx.x < 32 && column < first.columns) {\n            te_real value = sum%d;\n",
                o, te_emit_column_number(e, o), o);
        te_emit_joined_store(e, o, place, false);
    }
    te_emit(e, "        return;\n    }\n");
}

/* Where runs share an output one block does them all, in order; else each has a block. */
void te_emit_join(te_emitter *e)
{
    const char *columns = te_shape_column_parts(e->program, e->shape) ? "(int)column_blocks" : "0";
    int n = 0;
    te_emit(
        e,
        "\nextern \"C\" __global__ void __launch_bounds__(%d) te_program_join(const __grid_constant__ te_args a)\n{\n",
        TE_CUDA_JOIN_THREADS);
    if (te_shape_column_parts(e->program, e->shape)) emit_join_columns(e);
    if (te_shape_sums(e->program, e->shape))
        te_emit(e,
                "    for (int at = (int)blockIdx.x - %s; at < a.n_runs; at += (int)gridDim.x - %s) {\n"
                "        const te_run_args &r = a.run[at];\n",
                columns, columns);
    for (int o = 0; o < e->program->n_outputs; o++) {
        int  kind = e->program->outputs[o].kind;
        char place[32];
        if (!te_program_sums(kind) || !te_shape_wants(e->program, e->shape, o)) continue;
        snprintf(place, sizeof place, "*r.p%d", e->program->n_inputs + o);
        te_emit(
            e,
            "        const double total%d = te_join_parts<%s>(a.sum_parts + %d * a.blocks + r.first_block, r.blocks);\n"
            "        if (threadIdx.x == 0) {\n            te_real value = (te_real)total%d;\n",
            o, kind == TE_OUT_AMAX ? "true" : "false", n++, o);
        te_emit_joined_store(e, o, place, kind == TE_OUT_AMAX);
    }
    if (n) te_emit(e, "    }\n");
    te_emit(e, "}\n");
}
