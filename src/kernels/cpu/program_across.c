/* program_across.c - programs whose rows run across memory, many rows at a time.
 *
 * The interpreter goes along rows. Where the elements of a row lie apart and those of neighbouring rows side by side,
 * as in x:max(1) or in a softmax over the first dimension, this goes along memory instead: a *unit* is some rows that
 * lie side by side, and a value of the program is one number for each of them, for one position in the row after the
 * other. Per-row values are then blocks of so many numbers, and a reduction adds blocks to each other.
 *
 *                      rows of the unit
 *      position 0   x x x x x x x x x x x x     A *tile* is some positions. There is one sweep over them per level:
 *      position 1   x x x x x x x x x x x x     level 0 are values that need no reduction, level 1 those that need one
 *          …                                    of level 0 and so on. What is loaded or dear to compute stays for later
 *      position n   x x x x x x x x x x x x     sweeps where there is room.
 *
 * Sums have the bits of those along rows: position i goes to lane i % TE_FOLD_LANES, lanes are joined as a balanced
 * tree, and float64 takes over each TE_FOLD_SPAN positions (program_blocks.h).
 */
#include "copy.h"
#include "program_exec.h"
#include "workers.h"

#include <string.h>

enum {
    MOST_INSNS = 40,
    MOST_OPERANDS = 6,
    APART = 8,            /* elements of a row, at least */
    BESIDE = 64,          /* rows that lie side by side: fewer are transposed sooner (program_straight.c) */
    BESIDE_MADE = 24,     /* the same where elements are made, which would have to be transposed, too */
    TILE = 2048,          /* elements of a tile */
    TILE_POSITIONS = 16,  /* a divisor of TE_FOLD_LANES */
    LINE = 16,            /* rows of a unit are a multiple */
    DIRECT_ROWS = 512,    /* rows where nothing but folds is done, and bytes of their lanes */
    WHOLE_ROWS = 2048,    /* and where each fold is one call */
    DIRECT_BYTES = 32 << 10,
    KEPT_BYTES = 512 << 10,
    WORK = 1 << 18,       /* from which on threads share it */
    READ_WHOLE = TE_FOLD_LANES /* rows that fold_whole reads, of the unit before where the last one has fewer */
};

typedef struct across {
    te_exec              *exec;
    const te_program     *program;
    const te_blocks      *blocks;
    const te_copy_blocks *copy;
    const double         *params;
    te_operand            operand[2 * MOST_OPERANDS]; /* inputs, then outputs; strides over `shape` */
    int64_t               shape[TE_MAX_DIMS];
    int                   ndim, axis, beside;
    int64_t               n, width, positions; /* of a row, of a unit, of a tile */
    int64_t               units, across;       /* units; those along `beside` */
    int                   levels;
    int8_t                level[MOST_INSNS];
    uint64_t              sweep[MOST_INSNS];  /* by level: the values that it computes, as bits */
    uint64_t              kept, direct;       /* values that stay; loads that only folds of one sweep read */
    uint64_t              whole;              /* of these, what te_blocks.fold_across takes */
    size_t                place[MOST_INSNS], room; /* where values are in a workspace, which has so many bytes */
    size_t                lanes[MOST_INSNS];  /* of reductions: where they are added up */
    size_t                spare;
    char                 *workspace;
} across;

_Static_assert(TILE / TILE_POSITIONS >= READ_WHOLE && DIRECT_ROWS >= READ_WHOLE && WHOLE_ROWS >= READ_WHOLE &&
                   DIRECT_BYTES / (int)sizeof(float) / TE_FOLD_LANES >= READ_WHOLE, "units that are too narrow");

#define BIT(v) (UINT64_C(1) << (v))

static bool is_dear(const te_insn *insn)
{
    return insn->op == TE_PW_LOAD || (insn->op >= TE_PW_EXP && insn->op <= TE_PW_ERF) || insn->op == TE_PW_POW;
}

/* --- which runs --------------------------------------------------------------------------------------------------- */

static bool chains(const across *a, int from, int to, int64_t extent)
{
    const te_program *p = a->program;
    for (int i = 0; i < p->n_inputs + p->n_outputs; i++) {
        if (i < p->n_inputs && p->input_rates[i] == TE_RATE_UNIFORM) continue;
        if (a->operand[i].data && a->operand[i].stride[from] != a->operand[i].stride[to] * extent) return false;
    }
    return true;
}

/* The run's dimensions, merged where they may be; the last one stays by itself. */
static void merge(across *a, const te_run *run)
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

static bool takes_operands(across *a, const te_run *run)
{
    const te_program *p = a->program;
    if (p->n_inputs > MOST_OPERANDS || p->n_outputs > MOST_OPERANDS) return false;
    for (int i = 0; i < p->n_inputs + p->n_outputs; i++) {
        const te_operand *o = i < p->n_inputs ? &run->inputs[i] : &run->outputs[i - p->n_inputs];
        bool              element = i >= p->n_inputs && p->outputs[i - p->n_inputs].kind == TE_OUT_ELEM;
        if (o->block || o->quantized || (i < p->n_inputs && !o->data) || (element && o->accumulate)) return false;
        a->operand[i] = *o;
    }
    return true;
}

/* The dimension along which rows lie side by side: that of the first input whose rows run across. */
static bool find_beside(across *a)
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
static bool find_levels(across *a)
{
    const te_program *p = a->program;
    if (p->n_insns > MOST_INSNS) return false;
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
static bool outputs_apart(const across *a)
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
static void need(across *a, int v, int level)
{
    const te_insn *insn = &a->program->insns[v];
    if (insn->rate != TE_RATE_ELEM || a->sweep[level] & BIT(v)) return;
    a->sweep[level] |= BIT(v);
    if (a->level[v] < level && a->kept & BIT(v)) return;
    for (int k = 0; k < te_opcode_args((te_opcode)insn->op); k++) need(a, insn->arg[k], level);
}

static void find_sweeps(across *a)
{
    const te_program *p = a->program;
    memset(a->sweep, 0, sizeof a->sweep);
    for (int v = 0; v < p->n_insns; v++)
        if (te_opcode_reduces(p->insns[v].op)) need(a, p->insns[v].arg[0], a->level[v] - 1);
    for (int o = 0; o < p->n_outputs; o++)
        if (a->operand[p->n_inputs + o].data) need(a, p->outputs[o].value, a->level[p->outputs[o].value]);
}

/* What the sweep of its own level computes and later ones need again stays if it all fits. */
static void choose_kept(across *a)
{
    int kept = 0;
    a->kept = 0;
    find_sweeps(a);
    uint64_t again = 0;
    for (int v = 0; v < a->program->n_insns; v++)
        for (int l = a->level[v] + 1; l < a->levels; l++)
            if (a->sweep[a->level[v]] & a->sweep[l] & BIT(v) && is_dear(&a->program->insns[v])) again |= BIT(v);
    for (uint64_t rest = again; rest; rest &= rest - 1) kept++;
    if ((size_t)(kept * a->n * a->width) * a->blocks->size > KEPT_BYTES) return;
    a->kept = again;
    find_sweeps(a);
}

static bool is_taken(const across *a, te_dtype dtype)
{
    return a->blocks->fold_across && (dtype == TE_F32 || dtype == TE_BF16);
}

/* Whether an output is an input's memory: of such a unit, others may not be read. */
static bool is_in_place(const across *a)
{
    const te_program *p = a->program;
    bool              is = false;
    for (int o = 0; o < p->n_outputs; o++)
        for (int i = 0; i < p->n_inputs; i++) is |= a->operand[p->n_inputs + o].data == a->operand[i].data;
    return is;
}

/* Loads that nothing but folds reads. */
static void find_direct(across *a)
{
    const te_program *p = a->program;
    uint64_t          other = a->kept;
    a->direct = 0;
    for (int v = 0; v < p->n_insns; v++) {
        const te_insn *insn = &p->insns[v];
        if (insn->op == TE_PW_LOAD && insn->rate == TE_RATE_ELEM && a->operand[insn->slot].stride[a->beside] == 1)
            a->direct |= BIT(v);
        for (int k = 0; k < te_opcode_args((te_opcode)insn->op); k++)
            if (!te_opcode_reduces(insn->op)) other |= BIT(insn->arg[k]);
    }
    for (int o = 0; o < p->n_outputs; o++) other |= BIT(p->outputs[o].value);
    a->direct &= ~other;
    a->whole = 0;
    if (is_in_place(a)) return;
    for (int v = 0; v < p->n_insns && a->n <= TE_FOLD_SPAN && a->shape[a->beside] >= TE_FOLD_LANES; v++)
        if (a->direct & BIT(v) && is_taken(a, a->operand[p->insns[v].slot].dtype)) a->whole |= BIT(v);
}

static size_t take(across *a, int64_t values)
{
    size_t at = a->room;
    a->room += ((size_t)values * a->blocks->size + 63) & ~(size_t)63;
    return at;
}

static int64_t lanes_of(const across *a, int op)
{
    return op != TE_PW_ROWSUM ? 1 : a->n < TE_FOLD_LANES ? a->n : TE_FOLD_LANES;
}

/* float64 totals of a sum are behind its lanes. */
static void lay_out(across *a)
{
    const te_program *p = a->program;
    a->room = 0;
    a->spare = take(a, a->positions * a->width + TE_FOLD_LANES);
    for (int v = 0; v < p->n_insns; v++) {
        const te_insn *insn = &p->insns[v];
        if (insn->rate == TE_RATE_UNIFORM) a->place[v] = take(a, 2);
        else if (a->direct & BIT(v)) a->place[v] = a->spare;
        else a->place[v] = take(a, (a->kept & BIT(v) ? a->n : a->positions) * a->width);
        if (!te_opcode_reduces(insn->op)) continue;
        a->lanes[v] = a->place[v];
        if (a->whole & BIT(insn->arg[0])) continue;
        a->lanes[v] = take(a, lanes_of(a, insn->op) * a->width);
        if (a->n > TE_FOLD_SPAN) a->room += ((size_t)a->width * sizeof(double) + 63) & ~(size_t)63;
    }
}

static void choose_width(across *a)
{
    const te_program *p = a->program;
    int64_t           most;
    bool              direct = true, whole = true;
    a->width = a->positions = 0;
    find_direct(a);
    for (int v = 0; v < p->n_insns; v++) {
        direct &= p->insns[v].rate != TE_RATE_ELEM || (a->direct & BIT(v)) != 0;
        whole &= p->insns[v].rate != TE_RATE_ELEM || (a->whole & BIT(v)) != 0;
    }
    a->positions = direct ? 1 : a->n < TILE_POSITIONS ? a->n : TILE_POSITIONS;
    if (whole) {
        most = WHOLE_ROWS;
    } else if (direct) {
        most = DIRECT_BYTES / (int64_t)a->blocks->size / lanes_of(a, TE_PW_ROWSUM);
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

/* --- a unit ------------------------------------------------------------------------------------------------------- */

typedef struct unit {
    const across *a;
    char         *base;                      /* of the workspace */
    char         *at[2 * MOST_OPERANDS];     /* its first element in each operand */
    int64_t       rows;
} unit;

static char *value_of(const unit *u, int v) { return u->base + u->a->place[v]; }

static void seek(unit *u, int64_t number)
{
    const across *a = u->a;
    int64_t       first = number % a->across * a->width, left = a->shape[a->beside] - first;
    int           all = a->program->n_inputs + a->program->n_outputs;
    int64_t       at[TE_MAX_DIMS] = {0};
    number /= a->across;
    u->rows = left < a->width ? left : a->width;
    for (int d = a->axis - 1; d >= 0; d--) {
        if (d == a->beside) continue;
        at[d] = number % a->shape[d];
        number /= a->shape[d];
    }
    at[a->beside] = first;
    for (int i = 0; i < all; i++) {
        int64_t offset = 0;
        for (int d = 0; d < a->axis; d++) offset += at[d] * a->operand[i].stride[d];
        if (a->operand[i].data) u->at[i] = te_element(a->operand[i].data, a->operand[i].dtype, offset);
    }
}

/* Where an operand's elements of a position begin. */
static char *position_of(const unit *u, int i, int64_t position)
{
    const te_operand *o = &u->a->operand[i];
    return te_element(u->at[i], o->dtype, position * o->stride[u->a->axis]);
}

/* Whether an operand's rows lie along memory, so that tiles are turned on the way. */
static bool is_along(const across *a, const te_operand *o)
{
    return o->stride[a->beside] != 1 && o->stride[a->axis] == 1 && a->positions > 1;
}

static void load_tile(const unit *u, char *to, int i, int64_t position, int64_t positions)
{
    const across     *a = u->a;
    const te_operand *o = &a->operand[i];
    te_block_load     load = a->blocks->load[o->dtype];
    int64_t           beside = o->stride[a->beside], rows = u->rows;
    if (is_along(a, o)) {
        char *turned = u->base + a->spare;
        a->copy->transpose[te_dtype_log2_size(o->dtype)](turned, rows, position_of(u, i, position), beside, positions,
                                                         rows);
        load(to, turned, 1, (size_t)(positions * rows));
        return;
    }
    const char *from = position_of(u, i, position);
    int64_t     step = position_of(u, i, position + 1) - from;
    for (int64_t k = 0; k < positions; k++, from += step, to += (size_t)rows * a->blocks->size)
        load(to, from, beside, (size_t)rows);
}

static void store_tile(const unit *u, int i, const char *from, int64_t position, int64_t positions)
{
    const across     *a = u->a;
    const te_operand *o = &a->operand[i];
    te_block_store    store = a->blocks->store[o->dtype];
    int64_t           beside = o->stride[a->beside], rows = u->rows;
    if (is_along(a, o)) {
        char *turned = u->base + a->spare;
        store(turned, 1, from, (size_t)(positions * rows));
        a->copy->transpose[te_dtype_log2_size(o->dtype)](position_of(u, i, position), beside, turned, rows, rows,
                                                         positions);
        return;
    }
    char   *to = position_of(u, i, position);
    int64_t step = position_of(u, i, position + 1) - to;
    for (int64_t k = 0; k < positions; k++, to += step, from += (size_t)rows * a->blocks->size)
        store(to, beside, from, (size_t)rows);
}

/* --- folds -------------------------------------------------------------------------------------------------------- */

static double *totals_of(const unit *u, int v)
{
    const across *a = u->a;
    size_t        lanes = (size_t)(lanes_of(a, a->program->insns[v].op) * a->width) * a->blocks->size;
    return (double *)(void *)(u->base + a->lanes[v] + ((lanes + 63) & ~(size_t)63));
}

static te_opcode joining(int op) { return op == TE_PW_ROWSUM ? TE_PW_ADD : op == TE_PW_ROWMAX ? TE_PW_MAX : TE_PW_MIN; }

/* Numbers of positions from `position` on; of extremes the first ones are all there is. */
static void add_positions(const unit *u, int v, const char *values, int64_t position, int64_t positions)
{
    const across      *a = u->a;
    int                op = a->program->insns[v].op;
    const te_block_op *join = a->blocks->op[joining(op)];
    size_t             rows = (size_t)u->rows, step = rows * a->blocks->size;
    char              *lanes = u->base + a->lanes[v], *lane = lanes;
    double             zero = 0;
    if (op == TE_PW_ROWSUM) {
        lane += (size_t)(position % TE_FOLD_LANES) * step;
        if (position % TE_FOLD_SPAN < TE_FOLD_LANES) join[1](lane, &zero, values, NULL, rows * (size_t)positions);
        else join[0](lane, lane, values, NULL, rows * (size_t)positions);
        return;
    }
    char *spare = u->base + a->spare;
    for (; positions > 1; positions -= positions / 2, values = spare) { /* the later half joins the earlier one */
        size_t half = (size_t)(positions / 2), rest = (size_t)positions - half;
        join[0](spare, values, values + rest * step, NULL, half * rows);
        if (rest > half && values != spare) memcpy(spare + half * step, values + half * step, step);
    }
    if (position == 0) memcpy(lanes, values, step);
    else join[0](lanes, lanes, values, NULL, rows);
}

/* The lanes' sum in the first one; `count` of them are used. */
static void join_lanes(const unit *u, char *lanes, int64_t count)
{
    size_t rows = (size_t)u->rows, step = rows * u->a->blocks->size;
    for (int64_t half = TE_FOLD_LANES / 2; half > 0; half /= 2) {
        int64_t upper = (count < 2 * half ? count : 2 * half) - half;
        if (upper > 0)
            u->a->blocks->op[TE_PW_ADD][0](lanes, lanes, lanes + (size_t)half * step, NULL, (size_t)upper * rows);
    }
}

/* After positions up to `done`: full lanes go over into float64, and all do where that is the end. */
static void settle_sum(const unit *u, int v, int64_t done)
{
    const across *a = u->a;
    char         *lanes = u->base + a->lanes[v];
    int64_t       held = done % TE_FOLD_SPAN, most = lanes_of(a, TE_PW_ROWSUM);
    double       *totals = a->n > TE_FOLD_SPAN ? totals_of(u, v) : NULL;
    if (held && done < a->n) return;
    join_lanes(u, lanes, held && held < most ? held : most);
    for (int64_t r = 0; totals && r < u->rows; r++) {
        char  *sum = lanes + (size_t)r * a->blocks->size;
        double total = (done <= TE_FOLD_SPAN ? 0 : totals[r]) + a->blocks->get(sum);
        totals[r] = total;
        if (done == a->n) a->blocks->set(sum, total);
    }
}

/* All of a row in one go. */
static void fold_whole(const unit *u, int v)
{
    const across     *a = u->a;
    const te_insn    *insn = &a->program->insns[v];
    int               slot = a->program->insns[insn->arg[0]].slot;
    const te_operand *o = &a->operand[slot];
    te_fold_kind kind = insn->op == TE_PW_ROWSUM ? TE_FOLD_SUM : insn->op == TE_PW_ROWMAX ? TE_FOLD_MAX : TE_FOLD_MIN;
    /* the last rows, with some of the unit before */
    size_t more = u->rows < TE_FOLD_LANES ? (size_t)(TE_FOLD_LANES - u->rows) : 0;
    char  *to = more ? u->base + a->spare : value_of(u, v);
    a->blocks->fold_across(kind, to, u->at[slot] - more * te_dtype_size(o->dtype), o->stride[a->axis],
                           o->dtype == TE_BF16, (size_t)a->n, (size_t)u->rows + more);
    if (more) memcpy(value_of(u, v), to + more * a->blocks->size, (size_t)u->rows * a->blocks->size);
}

static void finish_fold(const unit *u, int v)
{
    if (u->a->whole & BIT(u->a->program->insns[v].arg[0])) fold_whole(u, v);
    else memcpy(value_of(u, v), u->base + u->a->lanes[v], (size_t)u->rows * u->a->blocks->size);
}

/* Straight from an input, element rows one by one. */
static void fold_input(const unit *u, int v, int i, int64_t position, int64_t positions)
{
    const across     *a = u->a;
    const te_operand *o = &a->operand[i];
    bool              plain = a->blocks->size == te_dtype_size(o->dtype) && (o->dtype == TE_F32 || o->dtype == TE_F64);
    const char       *from = position_of(u, i, position);
    int64_t           step = position_of(u, i, position + 1) - from;
    for (int64_t k = position; k < position + positions; k++, from += step) {
        if (!plain) a->blocks->load[o->dtype](u->base + a->spare, from, 1, (size_t)u->rows);
        add_positions(u, v, plain ? from : u->base + a->spare, k, 1);
    }
}

/* --- running ------------------------------------------------------------------------------------------------------ */

/* An operation on `n` numbers; an argument of UNIFORM rate is one. */
static void operate(const unit *u, int v, char *const *values, size_t n)
{
    const te_program *p = u->a->program;
    const te_insn    *insn = &p->insns[v];
    const char       *arg[3] = {NULL, NULL, NULL};
    int               numbers = 0;
    for (int k = 0; k < te_opcode_args((te_opcode)insn->op); k++) {
        arg[k] = values[insn->arg[k]];
        if (insn->rate != TE_RATE_UNIFORM && p->insns[insn->arg[k]].rate == TE_RATE_UNIFORM) numbers |= 1 << k;
    }
    u->a->blocks->op[insn->op][numbers](values[v], arg[0], arg[1], arg[2], n);
}

static void run_tile(const unit *u, int level, char **values, int64_t position, int64_t positions)
{
    const across     *a = u->a;
    const te_program *p = a->program;
    size_t            n = (size_t)(positions * u->rows);
    for (int v = 0; v < p->n_insns; v++) {
        const te_insn *insn = &p->insns[v];
        if (te_opcode_reduces(insn->op) && a->level[v] == level + 1 && !(a->whole & BIT(insn->arg[0]))) {
            int from = insn->arg[0];
            if (a->direct & BIT(from)) fold_input(u, v, p->insns[from].slot, position, positions);
            else add_positions(u, v, values[from], position, positions);
            if (insn->op == TE_PW_ROWSUM) settle_sum(u, v, position + positions);
        }
        if (!(a->sweep[level] & BIT(v)) || a->direct & BIT(v)) continue;
        values[v] = value_of(u, v);
        if (a->kept & BIT(v)) {
            values[v] += (size_t)(position * u->rows) * a->blocks->size;
            if (a->level[v] < level) continue;
        }
        if (insn->op == TE_PW_LOAD) load_tile(u, values[v], insn->slot, position, positions);
        else operate(u, v, values, n);
    }
    for (int o = 0; o < p->n_outputs; o++)
        if (p->outputs[o].kind == TE_OUT_ELEM && a->level[p->outputs[o].value] == level &&
            a->operand[p->n_inputs + o].data)
            store_tile(u, p->n_inputs + o, values[p->outputs[o].value], position, positions);
}

/* Values of rows whose level is reached, for all positions of a tile. */
static void run_rows(const unit *u, int level, char **values)
{
    const across     *a = u->a;
    const te_program *p = a->program;
    size_t            rows = (size_t)u->rows, step = rows * a->blocks->size;
    for (int v = 0; v < p->n_insns; v++) {
        const te_insn *insn = &p->insns[v];
        if (insn->rate != TE_RATE_ROW || a->level[v] != level) continue;
        if (te_opcode_reduces(insn->op)) finish_fold(u, v);
        else if (insn->op == TE_PW_LOAD)
            a->blocks->load[a->operand[insn->slot].dtype](values[v], u->at[insn->slot],
                                                          a->operand[insn->slot].stride[a->beside], rows);
        else operate(u, v, values, rows);
    }
    for (int v = 0; v < p->n_insns; v++)
        if (p->insns[v].rate == TE_RATE_ROW && a->level[v] == level)
            for (int64_t k = 1; k < a->positions; k++) memcpy(values[v] + (size_t)k * step, values[v], step);
}

static void store_rows(const unit *u, char **values)
{
    const across     *a = u->a;
    const te_program *p = a->program;
    for (int o = 0; o < p->n_outputs; o++) {
        int               i = p->n_inputs + o;
        const te_operand *out = &a->operand[i];
        const char       *value = values[p->outputs[o].value];
        if (p->outputs[o].kind != TE_OUT_ROW || !out->data) continue;
        if (out->accumulate) {
            char *sum = u->base + a->spare;
            a->blocks->load[out->dtype](sum, u->at[i], out->stride[a->beside], (size_t)u->rows);
            a->blocks->op[TE_PW_ADD][0](sum, sum, value, NULL, (size_t)u->rows);
            value = sum;
        }
        a->blocks->store[out->dtype](u->at[i], out->stride[a->beside], value, (size_t)u->rows);
    }
}

static void run_unit(const unit *u, char **values)
{
    const across *a = u->a;
    int64_t       step = a->positions > 1 ? a->positions : TILE_POSITIONS;
    for (int level = 0; level < a->levels; level++) {
        run_rows(u, level, values);
        bool sweeps = (a->sweep[level] & ~a->whole) != 0;
        for (int64_t k = 0; k < a->n && sweeps && !te_cpu_stopping(a->exec); k += step)
            run_tile(u, level, values, k, a->n - k < step ? a->n - k : step);
    }
    store_rows(u, values);
}

static void set_uniform(const unit *u, char **values)
{
    const across     *a = u->a;
    const te_program *p = a->program;
    for (int v = 0; v < p->n_insns; v++) {
        const te_insn *insn = &p->insns[v];
        values[v] = value_of(u, v);
        if (insn->rate != TE_RATE_UNIFORM) continue;
        if (insn->op == TE_PW_CONST) a->blocks->set(values[v], insn->imm);
        else if (insn->op == TE_PW_PARAM) a->blocks->set(values[v], a->params[insn->slot]);
        else if (insn->op == TE_PW_LOAD)
            a->blocks->load[a->operand[insn->slot].dtype](values[v], a->operand[insn->slot].data, 1, 1);
        else operate(u, v, values, 1);
    }
}

static void run_units(void *context, int64_t first, int64_t end, int thread)
{
    const across *a = context;
    unit          u = {.a = a, .base = a->workspace + (size_t)thread * a->room};
    char         *values[MOST_INSNS];
    set_uniform(&u, values);
    for (int64_t number = first; number < end && !te_cpu_stopping(a->exec); number++) {
        seek(&u, number);
        run_unit(&u, values);
    }
}

bool te_program_across_run(te_exec *exec, const te_program *program, const te_run *run, te_status *status)
{
    const te_compiled *compiled = program->compiled;
    across             a = {.exec = exec, .program = program, .params = run->params};
    int64_t            elements = 1;
    if (!compiled->reduces_rows || compiled->columns_summed || compiled->n_sums || run->ndim < 2) return false;
    if (run->small || run->ndim > TE_MAX_DIMS || !takes_operands(&a, run)) return false;
    for (int d = 0; d < run->ndim; d++)
        if (run->shape[d] < 1 || __builtin_mul_overflow(elements, run->shape[d], &elements)) return false;
    merge(&a, run);
    if (a.n < 2 || !find_beside(&a) || !find_levels(&a) || !outputs_apart(&a)) return false;
    a.blocks = te_job_blocks(exec, run->compute_f64);
    a.copy = te_copy_blocks_of(exec);
    choose_width(&a);
    lay_out(&a);
    int   threads = elements * compiled->cost < WORK ? 1 : exec->threads;
    char *room = exec->scratch(exec, a.room * (size_t)threads + 63);
    if (!room) return false;
    *status = te_check_run(exec, program, run);
    a.workspace = room + (-(uintptr_t)room & 63);
    if (*status == TE_OK) te_cpu_loop(exec, threads, a.units, te_cpu_even_grain(a.units, threads), run_units, &a);
    exec->scratch_free(exec, room);
    return true;
}
