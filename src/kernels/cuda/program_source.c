/* program_source.c - the source of one program's kernel: the shared headers, the arguments, the kernel, its joining. */
#include "program_source_emit.h"

#include <string.h>

extern const char te_cuda_program_prelude[]; /* device headers up to where te_real is known, made by the build */
extern const char te_cuda_program_device[];  /* and those that use it */
extern const char te_cuda_program_tables[];
extern const char te_cuda_program_shares[];
extern const char te_cuda_program_quantize[];

/* --- analysis ---------------------------------------------------------------------------------------------------- */

static void mark_live(te_emitter *e)
{
    const te_program *p = e->program;
    for (int o = 0; o < p->n_outputs; o++)
        if (te_shape_wants(p, e->shape, o)) e->values[p->outputs[o].value].live = true;
    for (int v = p->n_insns - 1; v >= 0; v--)
        for (int k = 0; e->values[v].live && k < te_opcode_args((te_opcode)p->insns[v].op); k++)
            e->values[p->insns[v].arg[k]].live = true;
}

/* Rows that are not held are read once for their maximum and the exponentials below it; what those are added to is
 * rescaled when a larger maximum is met. */
static bool finds_online(const te_emitter *e, int v)
{
    return e->shape->items == 0 && e->values[v].live && te_emit_sums_below_maximum(e, v) &&
           !e->values[te_emit_maximum_of(e, v)].online;
}

/* Sums of where(column = c, x, 0) with one c per row, as a loss picks the target's logit: all other terms are 0, so
 * only the unit that holds c is looked at. */
static bool picks(const te_emitter *e, int v)
{
    const te_insn *insns = e->program->insns, *where = insns[v].op == TE_PW_ROWSUM ? &insns[insns[v].arg[0]] : NULL;
    if (!where || where->op != TE_PW_WHERE || insns[where->arg[0]].op != TE_PW_EQ) return false;
    const te_insn *equal = &insns[where->arg[0]], *zero = &insns[where->arg[2]];
    int columns = 0, rows = 0;
    for (int k = 0; k < 2; k++) {
        columns += insns[equal->arg[k]].op == TE_PW_COLUMN;
        rows += insns[equal->arg[k]].rate != TE_RATE_ELEM;
    }
    return columns == 1 && rows == 1 && zero->op == TE_PW_CONST && zero->imm == 0 &&
           insns[where->arg[1]].op == TE_PW_LOAD && insns[where->arg[1]].rate == TE_RATE_ELEM;
}

static void find_levels(te_emitter *e)
{
    e->passes = 1;
    for (int v = 0; v < e->program->n_insns; v++) {
        const te_insn *insn = &e->program->insns[v];
        int            level = 0;
        for (int k = 0; k < te_opcode_args((te_opcode)insn->op); k++)
            if (e->values[insn->arg[k]].level > level) level = e->values[insn->arg[k]].level;
        level += te_opcode_reduces(insn->op);
        if (finds_online(e, v)) {
            e->values[v].online = e->values[te_emit_maximum_of(e, v)].online = true;
            level--;
        }
        e->values[v].picked = picks(e, v);
        e->values[v].level = (uint8_t)level;
        if (e->values[v].live && level + 1 > e->passes) e->passes = level + 1;
    }
}

void te_emit_analyze(te_emitter *e)
{
    mark_live(e);
    find_levels(e);
}

/* Worth a register from one pass to the next. */
static bool dear(int op)
{
    return te_opcode_is_dear(op) || te_opcode_is_random(op);
}

/* A sum rounded to bfloat16 takes half a register and one instruction to unpack, its operands more of both. */
static bool packs(const te_emitter *e, int v)
{
    return e->program->insns[v].op == TE_PW_TO_BF16 && !e->shape->compute_f64;
}

/* Dear values that more than one pass needs, and those that are packed, are held from the first of them on. */
static void choose_held(te_emitter *e)
{
    for (int v = 0; v < e->program->n_insns; v++) {
        int passes = 0;
        e->values[v].packed = packs(e, v);
        bool kept = dear(e->program->insns[v].op) || e->values[v].packed;
        if (!kept || e->program->insns[v].rate != TE_RATE_ELEM) continue;
        for (int pass = 0; pass < e->passes; pass++) {
            te_emit_mark(e, pass);
            if (!e->values[v].need) continue;
            if (passes++ == 0) e->values[v].first = (uint8_t)pass;
        }
        e->values[v].held = passes > 1;
    }
}

/* --- text -------------------------------------------------------------------------------------------------------- */

static void emit_text(te_emitter *e, const char *text) { te_text_write(e->out, text, strlen(text)); }

/* Tiles with values of the type that all quantized outputs are rounded to. */
static void emit_quantizing(te_emitter *e)
{
    int i = 0;
    while (e->shape->operand[i].access != TE_CUDA_QUANTIZED) i++;
    const char *dtype = te_dtype_name((te_dtype)e->shape->operand[i].dtype);
    te_emit(e,
            "typedef %s te_a;\n#define te_from_a te_from_%s\n#define te_as_a te_as_%s\n#define TE_A_IS_BF16 %d\n",
            te_emit_type(e, i), dtype, dtype, e->shape->operand[i].dtype == TE_BF16);
    emit_text(e, te_cuda_program_quantize);
}

static void emit_kernel(te_emitter *e)
{
    switch (e->shape->kind) {
    case TE_CUDA_FLAT: te_emit_flat(e); break;
    case TE_CUDA_TILED: te_emit_tiled(e); break;
    case TE_CUDA_SQUARES: te_emit_squares(e); break;
    case TE_CUDA_COLUMNS: te_emit_columns(e); break;
    default:
        if (e->shape->levels) te_emit_shared_rows(e);
        else te_emit_rows(e);
    }
}

te_status te_cuda_program_source(const te_program *program, const te_cuda_program_shape *shape, te_text *out)
{
    if (!te_program_verify(program, NULL, 0)) return TE_ERROR_INTERNAL;
    size_t         bytes = (size_t)program->n_insns * sizeof(te_emit_value);
    te_emit_value *values = te_mem_zalloc(out->mem, bytes);
    te_emitter     e = {.out = out, .program = program, .shape = shape, .values = values, .item = ""};
    if (!values) return TE_ERROR_MEMORY;
    te_emit_analyze(&e);
    if (shape->items > 0) choose_held(&e);
    emit_text(&e, te_cuda_program_prelude);
    te_emit(&e, "\ntypedef %s te_real;\n#define TE_REAL_IS_F32 %d\ntypedef %s te_index;\n#define TE_WHOLE %d\n\n",
            shape->compute_f64 ? "double" : "float", !shape->compute_f64, shape->wide ? "int64_t" : "int32_t",
            shape->vector);
    emit_text(&e, te_cuda_program_device);
    if (shape->tables) emit_text(&e, te_cuda_program_tables);
    if (shape->levels) emit_text(&e, te_cuda_program_shares);
    if (te_shape_quantized(program, shape)) emit_quantizing(&e);
    te_emit_arguments(&e);
    emit_kernel(&e);
    if (te_shape_sums(program, shape) + te_shape_column_parts(program, shape) > 0) te_emit_join(&e);
    te_mem_free(out->mem, values, bytes);
    return out->failed ? TE_ERROR_MEMORY : TE_OK;
}
