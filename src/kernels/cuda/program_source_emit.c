/* program_source_emit.c - see program_source_emit.h. */
#include "program_source_emit.h"

#include <math.h>

/* --- names ------------------------------------------------------------------------------------------------------- */

static const char *const element_types[TE_DTYPE_COUNT] =
    {[TE_F32] = "float",      [TE_BF16] = "uint16_t", [TE_F16] = "uint16_t", [TE_F64] = "double",
     [TE_I64] = "int64_t",    [TE_I32] = "int32_t",   [TE_U8] = "uint8_t",   [TE_BOOL] = "uint8_t",
     [TE_F8E4M3] = "uint8_t", [TE_F8E5M2] = "uint8_t"};

const char *te_emit_type(const te_emitter *e, int operand) { return element_types[e->shape->operand[operand].dtype]; }

static const char *dtype_of(const te_emitter *e, int operand)
{
    return te_dtype_name((te_dtype)e->shape->operand[operand].dtype);
}

static void declare_field(void *user, te_field f)
{
    te_emitter *e = user;
    bool        output = f.index >= e->program->n_inputs;
    switch (f.kind) {
    case TE_FIELD_ROWS: te_emit(e, "    int64_t rows;\n"); break;
    case TE_FIELD_COLUMNS: te_emit(e, "    int64_t columns;\n"); break;
    case TE_FIELD_FIRST_BLOCK: te_emit(e, "    int64_t first_block;\n"); break;
    case TE_FIELD_BLOCKS: te_emit(e, "    int64_t blocks;\n"); break;
    case TE_FIELD_EXTENT: te_emit(e, "    int64_t extent%d;\n", f.dim); break;
    case TE_FIELD_POSITION: te_emit(e, "    int64_t position%d;\n", f.dim); break;
    case TE_FIELD_POINTER:
        te_emit(e, "    %s%s *p%d;\n", output ? "" : "const ", te_emit_type(e, f.index), f.index);
        break;
    case TE_FIELD_COLUMN_STRIDE: te_emit(e, "    int64_t p%d_column;\n", f.index); break;
    case TE_FIELD_BLOCK: te_emit(e, "    int64_t p%d_block;\n", f.index); break;
    case TE_FIELD_OUTER_STRIDE: te_emit(e, "    int64_t p%d_%d;\n", f.index, f.dim); break;
    case TE_FIELD_PARAM: te_emit(e, "    double param%d;\n", f.index); break;
    case TE_FIELD_KEEP: te_emit(e, "    uint64_t keep%d;\n", f.index); break;
    case TE_FIELD_SEED: te_emit(e, "    te_rng rng%d;\n", f.index); break;
    case TE_FIELD_STREAM:
    case TE_FIELD_OFFSET:
    case TE_FIELD_BASE: break; /* with the seed, in te_rng */
    }
}

void te_emit_arguments(te_emitter *e)
{
    te_emit(e, "struct te_run_args {\n");
    te_cuda_visit_fields(e->program, e->shape, declare_field, e);
    te_emit(
        e,
        "};\n\nstruct te_args {\n    te_run_args run[%d];\n    int64_t n_runs, blocks;\n    te_real *column_parts;\n"
        "    double *sum_parts;\n    int64_t n_column_parts;\n    te_real *row_values;\n",
        e->shape->runs);
    int quantized = te_shape_quantized(e->program, e->shape);
    if (quantized) te_emit(e, "    te_quantize_args quantized[%d];\n", quantized);
    te_emit(e, "};\n\n");
}

/* --- values of lower rates --------------------------------------------------------------------------------------- */

static void emit_number(te_emitter *e, double x)
{
    if (isnan(x)) te_emit(e, "TE_NAN");
    else if (isinf(x)) te_emit(e, "%sTE_INFINITY", x < 0 ? "-" : "");
    else te_emit(e, "%a", x);
}

static bool at_hand(const te_emitter *e, int v)
{
    return !e->values[v].held || e->values[v].first == e->pass || e->program->insns[v].rate != TE_RATE_ELEM;
}

static void emit_value_name(te_emitter *e, int v)
{
    if (at_hand(e, v)) te_emit(e, "v%d", v);
    else if (e->values[v].packed) te_emit(e, "te_from_bfloat16(h%d%s.e[k])", v, e->item);
    else te_emit(e, "h%d%s[k]", v, e->item);
}

/* --- exponentials below the row's maximum ---
 *
 * They are the one elementary function whose bits are not the CPU's: their argument is 0 or below, and only sums over
 * the row, which no two backends take in the same order, or quotients by such sums make sense of them. Which they are
 * follows from the instructions alone: an operation whose formula holds both the maximum and the exponential has them
 * wherever it is fused, and a formula may say so of a quotient whose logarithm it has (TE_EXP_BELOW). An exponential of
 * anything else, before or behind a reduction, is te_exp.
 */

/* Whether v is e^(x - m), m being the row's maximum of x. */
static bool is_below_maximum(const te_emitter *e, int v)
{
    const te_insn *insns = e->program->insns;
    if (insns[v].op != TE_PW_EXP || insns[insns[v].arg[0]].op != TE_PW_SUB) return false;
    const te_insn *difference = &insns[insns[v].arg[0]], *maximum = &insns[difference->arg[1]];
    return maximum->op == TE_PW_ROWMAX && maximum->arg[0] == difference->arg[0];
}

bool te_emit_sums_below_maximum(const te_emitter *e, int v)
{
    return e->program->insns[v].op == TE_PW_ROWSUM && is_below_maximum(e, e->program->insns[v].arg[0]);
}

static const te_insn *difference_of(const te_emitter *e, int v)
{
    const te_insn *insns = e->program->insns;
    return &insns[insns[insns[v].arg[0]].arg[0]];
}

/* That x. */
static int whose_maximum(const te_emitter *e, int v) { return difference_of(e, v)->arg[0]; }
int te_emit_maximum_of(const te_emitter *e, int v) { return difference_of(e, v)->arg[1]; }

/* Whether v is such an exponential over the sum of them all. */
static bool is_share(const te_emitter *e, int v)
{
    const te_insn *insns = e->program->insns;
    return insns[v].op == TE_PW_DIV && is_below_maximum(e, insns[v].arg[0]) &&
           insns[insns[v].arg[1]].op == TE_PW_ROWSUM && insns[insns[v].arg[1]].arg[0] == insns[v].arg[0];
}

/* Values that follow from their makers to be at most 0, or NaN: of those, an exponential takes fewer instructions. */
static bool never_positive(const te_program *program, int v)
{
    const te_insn *insn = &program->insns[v], *last = &program->insns[insn->arg[0]];
    return insn->op == TE_PW_NEG &&
           (last->op == TE_PW_ABS || (last->op == TE_PW_MUL && last->arg[0] == last->arg[1]));
}

static void emit_operation(te_emitter *e, int v)
{
    const te_insn *insn = &e->program->insns[v];
    bool           negative = insn->op == TE_PW_EXP && never_positive(e->program, insn->arg[0]);
    if (is_share(e, v)) te_emit(e, "te_row_share(");
    else if (is_below_maximum(e, v) || (insn->op == TE_PW_EXP && insn->slot == TE_EXP_BELOW))
        te_emit(e, "te_row_exp(");
    else te_emit(e, "te_op_%s(", negative ? "exp_negative" : te_opcode_name((te_opcode)insn->op));
    for (int k = 0; k < te_opcode_args((te_opcode)insn->op); k++) {
        if (k) te_emit(e, ", ");
        emit_value_name(e, insn->arg[k]);
    }
    te_emit(e, ")");
}

static void emit_scalar_load(te_emitter *e, const te_insn *insn)
{
    int i = insn->slot;
    if (e->shape->operand[i].access == TE_CUDA_ABSENT) te_emit(e, "0");
    else if (insn->rate == TE_RATE_UNIFORM) te_emit(e, "te_from_%s(*r.p%d)", dtype_of(e, i), i);
    else te_emit(e, "te_from_%s(r.p%d[o%d])", dtype_of(e, i), i, i);
}

static void emit_scalar_value(te_emitter *e, int v)
{
    const te_insn *insn = &e->program->insns[v];
    te_emit(e, "const te_real v%d = ", v);
    switch (insn->op) {
    case TE_PW_CONST:
        te_emit(e, "(te_real)");
        emit_number(e, insn->imm);
        break;
    case TE_PW_PARAM: te_emit(e, "(te_real)r.param%d", insn->slot); break;
    case TE_PW_LOAD: emit_scalar_load(e, insn); break;
    default: emit_operation(e, v);
    }
    te_emit(e, "; /* %s */\n", te_opcode_name((te_opcode)insn->op));
}

void te_emit_uniform(te_emitter *e)
{
    for (int i = 0; i < e->program->n_rngs; i++)
        te_emit(e, "    const te_rng rng%d = te_rng_begin(r.rng%d);\n", i, i);
    for (int v = 0; v < e->program->n_insns; v++)
        if (e->values[v].live && e->program->insns[v].rate == TE_RATE_UNIFORM) {
            te_emit(e, "    ");
            emit_scalar_value(e, v);
        }
}

void te_emit_row_values(te_emitter *e, int level)
{
    for (int v = 0; v < e->program->n_insns; v++) {
        const te_insn *insn = &e->program->insns[v];
        if (!e->values[v].live || insn->rate != TE_RATE_ROW || e->values[v].level != level) continue;
        if (te_opcode_reduces(insn->op)) continue;
        te_emit(e, "        ");
        emit_scalar_value(e, v);
    }
}

/* --- where operands are ------------------------------------------------------------------------------------------ */

void te_emit_coordinates(te_emitter *e, int n, const char *row)
{
    if (n == 0) return;
    te_emit(e, "        te_index rest = %s;\n", row);
    for (int d = n - 1; d > 0; d--)
        te_emit(e,
                "        const te_index q%d = rest %% (te_index)r.extent%d;\n        rest /= (te_index)r.extent%d;\n",
                d, d, d);
    te_emit(e, "        const te_index q0 = rest;\n");
}

static int operand_rate(const te_emitter *e, int i)
{
    if (i < e->program->n_inputs) return e->program->input_rates[i];
    int kind = e->program->outputs[i - e->program->n_inputs].kind;
    return kind == TE_OUT_ELEM ? TE_RATE_ELEM : kind == TE_OUT_ROW ? TE_RATE_ROW : TE_RATE_UNIFORM;
}

void te_emit_offsets(te_emitter *e, int n)
{
    for (int i = 0; i < e->shape->n_operands; i++) {
        int access = e->shape->operand[i].access;
        if (access == TE_CUDA_ABSENT || access == TE_CUDA_QUANTIZED || operand_rate(e, i) == TE_RATE_UNIFORM) continue;
        te_emit(e, "        const te_index o%d = 0", i);
        for (int d = 0; access != TE_CUDA_ALIKE && d < n; d++) te_emit(e, " + q%d * (te_index)r.p%d_%d", d, i, d);
        te_emit(e, ";\n");
    }
}

/* --- what a section computes ------------------------------------------------------------------------------------- */

static void mark_arguments(te_emitter *e)
{
    for (int v = e->program->n_insns - 1; v >= 0; v--) {
        const te_insn *insn = &e->program->insns[v];
        if (insn->rate != TE_RATE_ELEM) e->values[v].need = false;
        if (!e->values[v].need) continue;
        if (!at_hand(e, v)) {
            e->values[v].need = false; /* it lies ready */
            continue;
        }
        if (te_emit_looks_up(e, v)) continue;
        for (int k = 0; k < te_opcode_args((te_opcode)insn->op); k++) e->values[insn->arg[k]].need = true;
    }
}

/* What a reduction needs of every element. */
static int reduced(const te_emitter *e, int v)
{
    int arg = e->program->insns[v].arg[0];
    if (e->values[v].picked) return e->program->insns[arg].arg[1];
    return e->values[v].online && te_emit_sums_below_maximum(e, v) ? whose_maximum(e, v) : arg;
}

void te_emit_mark(te_emitter *e, int pass)
{
    const te_program *p = e->program;
    e->pass = pass;
    for (int v = 0; v < p->n_insns; v++) e->values[v].need = false;
    for (int v = 0; v < p->n_insns; v++)
        if (te_opcode_reduces(p->insns[v].op) && e->values[v].live && e->values[v].level == pass + 1)
            e->values[reduced(e, v)].need = true;
    for (int o = 0; pass == e->passes - 1 && o < p->n_outputs; o++)
        if (p->outputs[o].kind != TE_OUT_ROW && te_shape_wants(p, e->shape, o))
            e->values[p->outputs[o].value].need = true;
    mark_arguments(e);
}

/* --- units ------------------------------------------------------------------------------------------------------- */

bool te_emit_loads_operand(const te_emitter *e, int i, bool any)
{
    for (int v = 0; v < e->program->n_insns; v++)
        if ((any ? e->values[v].live : e->values[v].need) && e->program->insns[v].op == TE_PW_LOAD &&
            e->program->insns[v].slot == i)
            return true;
    return false;
}

enum { PLACE_TEXT = 64 };

/* Where the unit at `column` lies among an operand's columns. */
static const char *place_of(const te_emitter *e, int i, char *text)
{
    if (!e->shape->operand[i].blocked) return "column";
    snprintf(text, PLACE_TEXT, "te_place((te_index)column, (te_index)r.p%d_block)", i);
    return text;
}

/* An operand's unit at the column: `xN`, and behind it `item`. */
static void emit_unit_load(te_emitter *e, const char *item, int i, const char *count)
{
    char        text[PLACE_TEXT];
    const char *type = te_emit_type(e, i), *place = place_of(e, i, text);
    int         unit = e->shape->vector;
    switch (e->shape->operand[i].access) {
    case TE_CUDA_VECTOR:
    case TE_CUDA_ALIKE:
        if (!count)
            te_emit(e, "x%d%s = te_unit_load<%s, %d>(r.p%d + o%d + %s);\n", i, item, type, unit, i, i, place);
        else
            te_emit(e, "x%d%s = te_unit_load_part<%s, %d>(r.p%d + o%d + %s, %s);\n", i, item, type, unit, i, i, place,
                    count);
        break;
    case TE_CUDA_NEXT:
        te_emit(e, "x%d%s = te_unit_gather<%s, %d>(r.p%d + o%d + %s, (te_index)1, %s);\n", i, item, type, unit, i, i,
                place, count ? count : "TE_WHOLE");
        break;
    default:
        te_emit(
            e,
            "x%d%s = te_unit_gather<%s, %d>(r.p%d + o%d + %s * (te_index)r.p%d_column, (te_index)r.p%d_column, %s);\n",
            i, item, type, unit, i, i, place, i, i, count ? count : "TE_WHOLE");
    }
}

/* What is the same in every row is near anyway. */
bool te_emit_holds_input(const te_emitter *e, int i)
{
    int access = e->shape->operand[i].access;
    return e->item[0] && e->program->input_rates[i] == TE_RATE_ELEM && access != TE_CUDA_ABSENT &&
           access != TE_CUDA_SAME && access != TE_CUDA_ALIKE;
}

void te_emit_held_loads(te_emitter *e, bool all)
{
    for (int i = 0; i < e->program->n_inputs; i++) {
        if (e->loaded[i] || !te_emit_holds_input(e, i) || !te_emit_loads_operand(e, i, all)) continue;
        te_emit(e, "            ");
        emit_unit_load(e, e->item, i, NULL);
        e->loaded[i] = true;
    }
}

static void emit_loads(te_emitter *e, const char *count)
{
    for (int i = 0; i < e->program->n_inputs; i++) {
        int access = e->shape->operand[i].access;
        if (e->program->input_rates[i] != TE_RATE_ELEM || access == TE_CUDA_ABSENT || access == TE_CUDA_TURNED ||
            !te_emit_loads_operand(e, i, false))
            continue;
        if (access == TE_CUDA_SAME) {
            te_emit(e, "            const %s x%d = r.p%d[o%d];\n", te_emit_type(e, i), i, i, i);
        } else if (!te_emit_holds_input(e, i)) {
            te_emit(e, "            const te_unit<%s, %d> ", te_emit_type(e, i), e->shape->vector);
            emit_unit_load(e, "", i, count);
        }
    }
}

static void emit_random_words(te_emitter *e, const char *position)
{
    for (int v = 0; v < e->program->n_insns; v++) {
        const te_insn *insn = &e->program->insns[v];
        if (!e->values[v].need || !te_opcode_is_random(insn->op)) continue;
        bool normal = insn->op == TE_PW_NORMAL;
        te_emit(e, "            const te_unit<%s, %d> w%d = %s<%d>(rng%d, %s);\n", normal ? "float" : "uint32_t",
                e->shape->vector, v, normal ? "te_unit_normals" : "te_unit_words", e->shape->vector, insn->slot,
                position);
    }
}

static void emit_element_load(te_emitter *e, int i)
{
    switch (e->shape->operand[i].access) {
    case TE_CUDA_ABSENT: te_emit(e, "0"); break;
    case TE_CUDA_SAME: te_emit(e, "te_from_%s(x%d)", dtype_of(e, i), i); break;
    case TE_CUDA_TURNED:
        te_emit(e, "te_from_%s(t%d[x * %d + k][y + j])", dtype_of(e, i), i, e->shape->vector);
        break;
    default: te_emit(e, "te_from_%s(x%d%s.e[k])", dtype_of(e, i), i, te_emit_holds_input(e, i) ? e->item : "");
    }
}

static void emit_keep(te_emitter *e, int v)
{
    int given = e->program->insns[v].arg[0], op = e->program->insns[given].op;
    te_emit(e, "TE_TRUE(te_rng_keeps(w%d.e[k], ", v);
    if (op == TE_PW_CONST || op == TE_PW_PARAM) {
        te_emit(e, "r.keep%d))", v);
    } else {
        te_emit(e, "te_rng_threshold((double)");
        emit_value_name(e, given);
        te_emit(e, ")))");
    }
}

static void emit_element_value(te_emitter *e, int v)
{
    const te_insn *insn = &e->program->insns[v];
    bool           held = e->values[v].held && e->values[v].first == e->pass;
    if (held && e->values[v].packed) {
        te_emit(e, "                h%d%s.e[k] = te_as_bfloat16(", v, e->item);
        emit_value_name(e, insn->arg[0]);
        te_emit(e, ");\n                const te_real v%d = te_from_bfloat16(h%d%s.e[k]);\n", v, v, e->item);
        return;
    }
    te_emit(e, "                const te_real v%d = ", v);
    if (te_emit_looks_up(e, v)) {
        te_emit_looked_up(e, v);
        te_emit(e, ";\n");
        return;
    }
    switch (insn->op) {
    case TE_PW_LOAD: emit_element_load(e, insn->slot); break;
    case TE_PW_COLUMN: te_emit(e, "(te_real)(column + k)"); break;
    case TE_PW_RANDOM: te_emit(e, "(te_real)te_rng_uniform(w%d.e[k])", v); break;
    case TE_PW_NORMAL: te_emit(e, "(te_real)w%d.e[k]", v); break;
    case TE_PW_KEEP: emit_keep(e, v); break;
    default: emit_operation(e, v);
    }
    te_emit(e, ";\n");
    if (held) te_emit(e, "                h%d%s[k] = v%d;\n", v, e->item, v);
}

static bool reduces_now(const te_emitter *e, int v)
{
    return te_opcode_reduces(e->program->insns[v].op) && e->values[v].live && e->values[v].level == e->pass + 1;
}

static void emit_reductions(te_emitter *e)
{
    for (int v = 0; v < e->program->n_insns; v++) {
        const te_insn *insn = &e->program->insns[v];
        if (!reduces_now(e, v) || e->values[v].picked) continue;
        if (e->values[v].online) {
            if (!te_emit_sums_below_maximum(e, v)) continue;
            te_emit(e, "                u%d[k] = ", v);
            emit_value_name(e, whose_maximum(e, v));
            te_emit(e, ";\n");
            continue;
        }
        if (insn->op == TE_PW_ROWMAX) te_emit(e, "                m%d = te_row_max(m%d, ", v, v);
        else te_emit(e, "                m%d = te_op_join_%s(m%d, ", v, te_opcode_name((te_opcode)insn->op), v);
        emit_value_name(e, insn->arg[0]);
        te_emit(e, ");\n");
    }
}

/* Where the values of a unit stand until all of them are known. */
static void emit_unit_values(te_emitter *e)
{
    for (int v = 0; v < e->program->n_insns; v++)
        if (reduces_now(e, v) && e->values[v].online && te_emit_sums_below_maximum(e, v))
            te_emit(e, "            te_real u%d[%d];\n", v, e->shape->vector);
}

/* The number of the column that a sum picks its term at. */
static int picked_column(const te_emitter *e, int v)
{
    const te_insn *insns = e->program->insns, *equal = &insns[insns[insns[v].arg[0]].arg[0]];
    return insns[equal->arg[0]].op == TE_PW_COLUMN ? equal->arg[1] : equal->arg[0];
}

static void emit_unit_reductions(te_emitter *e)
{
    const te_insn *insns = e->program->insns;
    for (int v = 0; v < e->program->n_insns; v++) {
        if (!reduces_now(e, v)) continue;
        if (e->values[v].online && te_emit_sums_below_maximum(e, v))
            te_emit(e, "            te_join_online<%d>(m%d, m%d, u%d);\n", e->shape->vector, te_emit_maximum_of(e, v),
                    v, v);
        if (!e->values[v].picked) continue;
        int column = picked_column(e, v), unit = e->shape->vector;
        te_emit(e, "            if (v%d >= (te_real)column && v%d <= (te_real)(column + %d)) {\n#pragma unroll\n"
                   "                for (int k = 0; k < %d; k++)\n"
                   "                    if ((te_real)(column + k) == v%d) m%d += ",
                column, column, unit - 1, unit, column, v);
        emit_element_load(e, insns[insns[insns[v].arg[0]].arg[1]].slot);
        te_emit(e, ";\n            }\n");
    }
}

/* Whether v is its argument rounded to what operand i stores, which storing it does anyway, two values at a time. */
static bool rounds_as_stored(const te_emitter *e, int i, int v)
{
    return e->program->insns[v].op == TE_PW_TO_BF16 && !e->values[v].held && !e->shape->compute_f64 &&
           !te_emit_looks_up(e, v) && e->shape->operand[i].dtype == TE_BF16 && !e->shape->operand[i].accumulate;
}

static void emit_element_output(te_emitter *e, int o, const char *count)
{
    int i = e->program->n_inputs + o, v = e->program->outputs[o].value, kind = e->program->outputs[o].kind;
    te_emit(e, "                ");
    if (count && kind != TE_OUT_ELEM) te_emit(e, "if (k < %s) ", count);
    if (kind == TE_OUT_COLSUM && e->shape->kind == TE_CUDA_TILED) te_emit(e, "c%d += ", o);
    else if (kind == TE_OUT_COLSUM && e->shape->kind != TE_CUDA_ROWS) te_emit(e, "c%d[k] += ", o);
    else if (kind == TE_OUT_COLSUM && e->shape->items) te_emit(e, "c%d[i * %d + k] += ", o, e->shape->vector);
    else if (kind == TE_OUT_COLSUM) te_emit(e, "c%d.e[k] = ", o);
    else if (kind == TE_OUT_ELEM && e->shape->operand[i].access == TE_CUDA_TURNED)
        te_emit(e, "t%d[x * %d + k][y + j] = te_as_%s(", i, e->shape->vector, dtype_of(e, i));
    else if (kind == TE_OUT_ELEM) te_emit(e, "y%d[k] = (", o);
    else te_emit(e, "s%d = te_op_join_%s(s%d, ", o, kind == TE_OUT_SUM ? "sum" : "amax", o);
    if (kind == TE_OUT_ELEM && e->shape->operand[i].accumulate)
        te_emit(e, "te_from_%s(x%d.e[k]) + ", dtype_of(e, i), i);
    if (kind == TE_OUT_COLSUM && e->shape->kind == TE_CUDA_ROWS && !e->shape->items) te_emit(e, "c%d.e[k] + ", o);
    emit_value_name(e, kind == TE_OUT_ELEM && rounds_as_stored(e, i, v) ? e->program->insns[v].arg[0] : v);
    te_emit(e, kind == TE_OUT_COLSUM ? ";\n" : ");\n");
}

/* Room for values about to be stored, and what is there where that is added to. */
static void emit_output_units(te_emitter *e, const char *count)
{
    for (int o = 0; o < e->program->n_outputs; o++) {
        int i = e->program->n_inputs + o, access = e->shape->operand[i].access;
        if (e->program->outputs[o].kind != TE_OUT_ELEM || access == TE_CUDA_ABSENT || access == TE_CUDA_TURNED)
            continue;
        te_emit(e, "            te_real y%d[%d];\n", o, e->shape->vector);
        if (!e->shape->operand[i].accumulate) continue;
        te_emit(e, "            const te_unit<%s, %d> ", te_emit_type(e, i), e->shape->vector);
        emit_unit_load(e, "", i, count);
    }
}

static void emit_unit_stores(te_emitter *e, const char *count)
{
    for (int o = 0; o < e->program->n_outputs; o++) {
        int         i = e->program->n_inputs + o, unit = e->shape->vector;
        char        text[PLACE_TEXT];
        const char *type = te_emit_type(e, i), *place = place_of(e, i, text);
        int         access = e->shape->operand[i].access;
        if (e->program->outputs[o].kind != TE_OUT_ELEM || access == TE_CUDA_ABSENT || access == TE_CUDA_TURNED ||
            access == TE_CUDA_QUANTIZED)
            continue;
        te_emit(e, "            const te_unit<%s, %d> z%d = te_unit_as_%s<%d>(y%d);\n", type, unit, o, dtype_of(e, i),
                unit, o);
        switch (access) {
        case TE_CUDA_VECTOR:
            if (count)
                te_emit(
                    e,
                    "            if (%s < %d) te_unit_scatter<%s, %d>(r.p%d + o%d + %s, (te_index)1, %s, z%d);\n"
                    "            else\n    ",
                    count, unit, type, unit, i, i, place, count, o);
            te_emit(e, "            te_unit_store<%s, %d>(r.p%d + o%d + %s, z%d);\n", type, unit, i, i, place, o);
            break;
        case TE_CUDA_NEXT:
            te_emit(e, "            te_unit_scatter<%s, %d>(r.p%d + o%d + %s, (te_index)1, %s, z%d);\n", type, unit,
                    i, i, place, count ? count : "TE_WHOLE", o);
            break;
        default:
            te_emit(e, "            te_unit_scatter<%s, %d>(r.p%d + o%d + %s * (te_index)r.p%d_column, "
                       "(te_index)r.p%d_column, %s, z%d);\n",
                    type, unit, i, i, place, i, i, count ? count : "TE_WHOLE", o);
        }
    }
}

void te_emit_needed(te_emitter *e)
{
    mark_arguments(e);
    for (int v = 0; v < e->program->n_insns; v++)
        if (e->values[v].need) emit_element_value(e, v);
}

static void emit_elements(te_emitter *e, bool last, const char *count)
{
    te_emit(e, "#pragma unroll\n            for (int k = 0; k < %d; k++) {\n", e->shape->vector);
    for (int v = 0; v < e->program->n_insns; v++)
        if (e->values[v].need) emit_element_value(e, v);
    emit_reductions(e);
    for (int o = 0; last && o < e->program->n_outputs; o++)
        if (e->program->outputs[o].kind != TE_OUT_ROW && te_shape_wants(e->program, e->shape, o))
            emit_element_output(e, o, count);
    te_emit(e, "            }\n");
}

void te_emit_unit(te_emitter *e, const char *position, const char *count)
{
    bool last = e->pass == e->passes - 1;
    emit_loads(e, count);
    emit_random_words(e, position);
    if (last) emit_output_units(e, count);
    emit_unit_values(e);
    if (e->n_tables) {
        te_emit_table_places(e);
        e->looking_up = true;
        te_emit_mark(e, e->pass);
        emit_elements(e, last, count);
        e->looking_up = false;
        te_emit_mark(e, e->pass);
        te_emit(e, "            } else {\n");
    }
    emit_elements(e, last, count);
    if (e->n_tables) te_emit(e, "            }\n");
    emit_unit_reductions(e);
    if (last) emit_unit_stores(e, count);
}

/* --- sums -------------------------------------------------------------------------------------------------------- */

void te_emit_sums(te_emitter *e)
{
    for (int o = 0; o < e->program->n_outputs; o++)
        if (te_program_sums(e->program->outputs[o].kind) && te_shape_wants(e->program, e->shape, o))
            te_emit(e, "    te_real s%d = 0;\n", o);
}

void te_emit_sum_parts(te_emitter *e)
{
    int n = 0;
    for (int o = 0; o < e->program->n_outputs; o++) {
        int kind = e->program->outputs[o].kind;
        if (!te_program_sums(kind) || !te_shape_wants(e->program, e->shape, o)) continue;
        te_emit(e, "    s%d = te_block_%s<%d>(s%d, places);\n", o, kind == TE_OUT_SUM ? "sum" : "amax",
                te_shape_threads(e->shape), o);
        te_emit(e, "    if (threadIdx.x == 0) a.sum_parts[%d * a.blocks + blockIdx.x] = s%d;\n", n++, o);
    }
}
