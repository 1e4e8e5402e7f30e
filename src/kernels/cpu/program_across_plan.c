/* program_across_plan.c - which runs go along memory though their rows run across it, and in what units, tiles and
 * sweeps; see program_across.h. */
#include "program_across.h"

#include <string.h>

enum {
    APART = 8,            /* elements of a row, at least */
    BESIDE = 64,          /* rows that lie side by side: fewer are transposed sooner (program_straight.c) */
    BESIDE_MADE = 24,     /* the same where elements are made, which would have to be transposed, too */
    TILE = 2048,          /* elements of a tile */
    LINE = 16,            /* rows of a unit are a multiple */
    DIRECT_ROWS = 512,    /* rows where nothing but folds is done, and bytes of their lanes */
    WHOLE_ROWS = 2048,    /* and where each fold is one call */
    DIRECT_BYTES = 32 << 10,
    KEPT_BYTES = 512 << 10,
    READ_WHOLE = TE_FOLD_LANES /* rows that fold_whole reads, of the unit before where the last one has fewer */
};

_Static_assert(TILE / TE_ACROSS_POSITIONS >= READ_WHOLE && DIRECT_ROWS >= READ_WHOLE && WHOLE_ROWS >= READ_WHOLE &&
                   DIRECT_BYTES / (int)sizeof(float) / TE_FOLD_LANES >= READ_WHOLE, "units that are too narrow");

static bool is_dear(const te_insn *insn)
{
    return insn->op == TE_PW_LOAD || (insn->op >= TE_PW_EXP && insn->op <= TE_PW_ERF) || insn->op == TE_PW_POW;
}

/* --- which runs --------------------------------------------------------------------------------------------------- */

static bool chains(const te_across *a, int from, int to, int64_t extent)
{
    const te_program *p = a->program;
    for (int i = 0; i < p->n_inputs + p->n_outputs; i++) {
        if (i < p->n_inputs && p->input_rates[i] == TE_RATE_UNIFORM) continue;
        if (a->operand[i].data && a->operand[i].stride[from] != a->operand[i].stride[to] * extent) return false;
    }
    return true;
}

/* The run's dimensions, merged where they may be; the last one stays by itself. */
static void merge(te_across *a, const te_run *run)
{
    int all = a->program->n_inputs + a->program->n_outputs, n = 0;
    for (int d = 0; d < run->ndim; d++) {
        bool last = d == run->ndim - 1;
        if (run->shape[d] == 1 && !last) continue;
        bool joins = n > 0 && !last && chains(a, n - 1, d, run->shape[d]);
        n += !joins;
        a->shape[n - 1] = run->shape[d] * (joins ? a->shape[n - 1] : 1);
        for (int i = 0; i < all; i++) a->operand[i].stride[n - 1] = a->operand[i].stride[d];
    }
    a->ndim = n;
    a->axis = n - 1;
    a->n = a->shape[a->axis];
}

static bool takes_operands(te_across *a, const te_run *run)
{
    const te_program *p = a->program;
    if (p->n_inputs > TE_ACROSS_OPERANDS || p->n_outputs > TE_ACROSS_OPERANDS) return false;
    for (int i = 0; i < p->n_inputs + p->n_outputs; i++) {
        const te_operand *o = i < p->n_inputs ? &run->inputs[i] : &run->outputs[i - p->n_inputs];
        bool              element = i >= p->n_inputs && p->outputs[i - p->n_inputs].kind == TE_OUT_ELEM;
        if (o->block || o->quantized || (i < p->n_inputs && !o->data) || (element && o->accumulate)) return false;
        a->operand[i] = *o;
    }
    return true;
}

/* The dimension along which rows lie side by side: that of the first input whose rows run across. */
static bool find_beside(te_across *a)
{
    const te_program *p = a->program;
    int64_t           least = BESIDE;
    for (int o = 0; o < p->n_outputs; o++)
        if (p->outputs[o].kind == TE_OUT_ELEM) least = BESIDE_MADE;
    for (int i = 0; i < p->n_inputs; i++) {
        if (p->input_rates[i] != TE_RATE_ELEM || a->operand[i].stride[a->axis] < APART) continue;
        for (int d = 0; d < a->axis; d++)
            if (a->operand[i].stride[d] == 1 && a->shape[d] >= least) {
                a->beside = d;
                return true;
            }
    }
    return false;
}

/* Levels of all values; false: there is one that this cannot do. */
static bool find_levels(te_across *a)
{
    const te_program *p = a->program;
    if (p->n_insns > TE_ACROSS_INSNS) return false;
    a->levels = 1;
    for (int v = 0; v < p->n_insns; v++) {
        const te_insn *insn = &p->insns[v];
        bool           reduces = te_opcode_reduces(insn->op);
        if (te_opcode_is_random(insn->op) || insn->op == TE_PW_COLUMN) return false;
        a->level[v] = 0;
        for (int k = 0; k < te_opcode_args((te_opcode)insn->op); k++) {
            int8_t level = a->level[insn->arg[k]];
            if (reduces && p->insns[insn->arg[k]].rate != TE_RATE_ELEM) return false;
            if (level + reduces > a->level[v]) a->level[v] = (int8_t)(level + reduces);
        }
        if (a->level[v] >= a->levels) a->levels = a->level[v] + 1;
    }
    for (int o = 0; o < p->n_outputs; o++) {
        te_rate rate = te_program_rate(p, p->outputs[o].value);
        int     kind = p->outputs[o].kind;
        if (!(kind == TE_OUT_ELEM && rate == TE_RATE_ELEM) && !(kind == TE_OUT_ROW && rate == TE_RATE_ROW))
            return false;
    }
    return true;
}

/* An output of elements may be an input's memory if that is the same elements and not read again. */
static bool outputs_apart(const te_across *a)
{
    const te_program *p = a->program;
    for (int o = 0; o < p->n_outputs; o++)
        for (int i = 0; i < p->n_inputs; i++) {
            const te_operand *out = &a->operand[p->n_inputs + o], *in = &a->operand[i];
            if (out->data != in->data) continue;
            if (p->outputs[o].kind != TE_OUT_ELEM || a->level[p->outputs[o].value] + 1 < a->levels ||
                out->dtype != in->dtype || memcmp(out->stride, in->stride, (size_t)a->ndim * sizeof *in->stride) != 0)
                return false;
        }
    return true;
}

/* --- sweeps ------------------------------------------------------------------------------------------------------- */

/* Adds an element value, and what it follows from, to those that the sweep of a level computes. */
static void need(te_across *a, int v, int level)
{
    const te_insn *insn = &a->program->insns[v];
    if (insn->rate != TE_RATE_ELEM || a->sweep[level] & TE_ACROSS_BIT(v)) return;
    a->sweep[level] |= TE_ACROSS_BIT(v);
    if (a->level[v] < level && a->kept & TE_ACROSS_BIT(v)) return;
    for (int k = 0; k < te_opcode_args((te_opcode)insn->op); k++) need(a, insn->arg[k], level);
}

static void find_sweeps(te_across *a)
{
    const te_program *p = a->program;
    memset(a->sweep, 0, sizeof a->sweep);
    for (int v = 0; v < p->n_insns; v++)
        if (te_opcode_reduces(p->insns[v].op)) need(a, p->insns[v].arg[0], a->level[v] - 1);
    for (int o = 0; o < p->n_outputs; o++)
        if (a->operand[p->n_inputs + o].data) need(a, p->outputs[o].value, a->level[p->outputs[o].value]);
}

/* What the sweep of its own level computes and later ones need again stays if it all fits. */
static void choose_kept(te_across *a)
{
    int kept = 0;
    a->kept = 0;
    find_sweeps(a);
    uint64_t again = 0;
    for (int v = 0; v < a->program->n_insns; v++)
        for (int l = a->level[v] + 1; l < a->levels; l++)
            if (a->sweep[a->level[v]] & a->sweep[l] & TE_ACROSS_BIT(v) && is_dear(&a->program->insns[v]))
                again |= TE_ACROSS_BIT(v);
    for (uint64_t rest = again; rest; rest &= rest - 1) kept++;
    if ((size_t)(kept * a->n * a->width) * a->blocks->size > KEPT_BYTES) return;
    a->kept = again;
    find_sweeps(a);
}

static bool is_taken(const te_across *a, te_dtype dtype)
{
    return a->blocks->fold_across && (dtype == TE_F32 || dtype == TE_BF16);
}

/* Whether an output is an input's memory: of such a unit, others may not be read. */
static bool is_in_place(const te_across *a)
{
    const te_program *p = a->program;
    bool              is = false;
    for (int o = 0; o < p->n_outputs; o++)
        for (int i = 0; i < p->n_inputs; i++) is |= a->operand[p->n_inputs + o].data == a->operand[i].data;
    return is;
}

/* Loads that nothing but folds reads. */
static void find_direct(te_across *a)
{
    const te_program *p = a->program;
    uint64_t          other = a->kept;
    a->direct = 0;
    for (int v = 0; v < p->n_insns; v++) {
        const te_insn *insn = &p->insns[v];
        if (insn->op == TE_PW_LOAD && insn->rate == TE_RATE_ELEM && a->operand[insn->slot].stride[a->beside] == 1)
            a->direct |= TE_ACROSS_BIT(v);
        for (int k = 0; k < te_opcode_args((te_opcode)insn->op); k++)
            if (!te_opcode_reduces(insn->op)) other |= TE_ACROSS_BIT(insn->arg[k]);
    }
    for (int o = 0; o < p->n_outputs; o++) other |= TE_ACROSS_BIT(p->outputs[o].value);
    a->direct &= ~other;
    a->whole = 0;
    if (is_in_place(a)) return;
    for (int v = 0; v < p->n_insns && a->n <= TE_FOLD_SPAN && a->shape[a->beside] >= TE_FOLD_LANES; v++)
        if (a->direct & TE_ACROSS_BIT(v) && is_taken(a, a->operand[p->insns[v].slot].dtype))
            a->whole |= TE_ACROSS_BIT(v);
}

static size_t take(te_across *a, int64_t values)
{
    size_t at = a->room;
    a->room += ((size_t)values * a->blocks->size + 63) & ~(size_t)63;
    return at;
}

/* float64 totals of a sum are behind its lanes. */
static void lay_out(te_across *a)
{
    const te_program *p = a->program;
    a->room = 0;
    a->spare = take(a, a->positions * a->width + TE_FOLD_LANES);
    for (int v = 0; v < p->n_insns; v++) {
        const te_insn *insn = &p->insns[v];
        if (insn->rate == TE_RATE_UNIFORM) a->place[v] = take(a, 2);
        else if (a->direct & TE_ACROSS_BIT(v)) a->place[v] = a->spare;
        else a->place[v] = take(a, (a->kept & TE_ACROSS_BIT(v) ? a->n : a->positions) * a->width);
        if (!te_opcode_reduces(insn->op)) continue;
        a->lanes[v] = a->place[v];
        if (a->whole & TE_ACROSS_BIT(insn->arg[0])) continue;
        a->lanes[v] = take(a, te_across_lanes(a, insn->op) * a->width);
        if (a->n > TE_FOLD_SPAN) a->room += ((size_t)a->width * sizeof(double) + 63) & ~(size_t)63;
    }
}

static void choose_width(te_across *a)
{
    const te_program *p = a->program;
    int64_t           most;
    bool              direct = true, whole = true;
    a->width = a->positions = 0;
    find_direct(a);
    for (int v = 0; v < p->n_insns; v++) {
        direct &= p->insns[v].rate != TE_RATE_ELEM || (a->direct & TE_ACROSS_BIT(v)) != 0;
        whole &= p->insns[v].rate != TE_RATE_ELEM || (a->whole & TE_ACROSS_BIT(v)) != 0;
    }
    a->positions = direct ? 1 : a->n < TE_ACROSS_POSITIONS ? a->n : TE_ACROSS_POSITIONS;
    if (whole) {
        most = WHOLE_ROWS;
    } else if (direct) {
        most = DIRECT_BYTES / (int64_t)a->blocks->size / te_across_lanes(a, TE_PW_ROWSUM);
        if (most > DIRECT_ROWS) most = DIRECT_ROWS;
    } else {
        most = TILE / a->positions;
    }
    most = most / LINE * LINE;
    if (most < LINE) most = LINE;
    a->width = most < a->shape[a->beside] ? most : a->shape[a->beside];
    a->across = (a->shape[a->beside] + a->width - 1) / a->width;
    a->units = a->across;
    for (int d = 0; d < a->axis; d++)
        if (d != a->beside) a->units *= a->shape[d];
    choose_kept(a);
    find_direct(a);
}

bool te_across_plan(te_across *a, te_exec *exec, const te_program *program, const te_run *run)
{
    const te_compiled *compiled = program->compiled;
    if (!compiled->reduces_rows || compiled->columns_summed || compiled->n_sums || run->ndim < 2) return false;
    *a = (te_across){.exec = exec, .program = program, .params = run->params, .elements = 1};
    if (run->small || run->ndim > TE_MAX_DIMS || !takes_operands(a, run)) return false;
    for (int d = 0; d < run->ndim; d++)
        if (run->shape[d] < 1 || __builtin_mul_overflow(a->elements, run->shape[d], &a->elements)) return false;
    merge(a, run);
    if (a->n < 2 || !find_beside(a) || !find_levels(a) || !outputs_apart(a)) return false;
    a->blocks = te_job_blocks(exec, run->compute_f64);
    a->copy = te_copy_blocks_of(exec);
    choose_width(a);
    lay_out(a);
    return true;
}
