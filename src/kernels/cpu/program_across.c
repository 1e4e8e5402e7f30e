/* program_across.c - runs programs along memory whose rows run across it; see program_across.h. */
#include "program_across.h"
#include "workers.h"

#include <string.h>

enum { WORK = 1 << 18 /* from which on threads share it */ };

/* --- a unit ------------------------------------------------------------------------------------------------------- */

typedef struct unit {
    const te_across *a;
    char            *base;                       /* of the workspace */
    char            *at[2 * TE_ACROSS_OPERANDS]; /* its first element in each operand */
    int64_t          rows;
} unit;

static char *value_of(const unit *u, int v) { return u->base + u->a->place[v]; }

static void seek(unit *u, int64_t number)
{
    const te_across *a = u->a;
    int64_t          first = number % a->across * a->width, left = a->shape[a->beside] - first;
    int              all = a->program->n_inputs + a->program->n_outputs;
    int64_t          at[TE_MAX_DIMS] = {0};
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
static bool is_along(const te_across *a, const te_operand *o)
{
    return o->stride[a->beside] != 1 && o->stride[a->axis] == 1 && a->positions > 1;
}

static void load_tile(const unit *u, char *to, int i, int64_t position, int64_t positions)
{
    const te_across  *a = u->a;
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
    const te_across  *a = u->a;
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
    const te_across *a = u->a;
    size_t           lanes = (size_t)(te_across_lanes(a, a->program->insns[v].op) * a->width) * a->blocks->size;
    return (double *)(void *)(u->base + a->lanes[v] + ((lanes + 63) & ~(size_t)63));
}

static te_opcode joining(int op) { return op == TE_PW_ROWSUM ? TE_PW_ADD : op == TE_PW_ROWMAX ? TE_PW_MAX : TE_PW_MIN; }

/* Numbers of positions from `position` on; of extremes the first ones are all there is. */
static void add_positions(const unit *u, int v, const char *values, int64_t position, int64_t positions)
{
    const te_across   *a = u->a;
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
    const te_across *a = u->a;
    char            *lanes = u->base + a->lanes[v];
    int64_t          held = done % TE_FOLD_SPAN, most = te_across_lanes(a, TE_PW_ROWSUM);
    double          *totals = a->n > TE_FOLD_SPAN ? totals_of(u, v) : NULL;
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
    const te_across  *a = u->a;
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
    if (u->a->whole & TE_ACROSS_BIT(u->a->program->insns[v].arg[0])) fold_whole(u, v);
    else memcpy(value_of(u, v), u->base + u->a->lanes[v], (size_t)u->rows * u->a->blocks->size);
}

/* Straight from an input, element rows one by one. */
static void fold_input(const unit *u, int v, int i, int64_t position, int64_t positions)
{
    const te_across  *a = u->a;
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
    const te_across  *a = u->a;
    const te_program *p = a->program;
    size_t            n = (size_t)(positions * u->rows);
    for (int v = 0; v < p->n_insns; v++) {
        const te_insn *insn = &p->insns[v];
        if (te_opcode_reduces(insn->op) && a->level[v] == level + 1 && !(a->whole & TE_ACROSS_BIT(insn->arg[0]))) {
            int from = insn->arg[0];
            if (a->direct & TE_ACROSS_BIT(from)) fold_input(u, v, p->insns[from].slot, position, positions);
            else add_positions(u, v, values[from], position, positions);
            if (insn->op == TE_PW_ROWSUM) settle_sum(u, v, position + positions);
        }
        if (!(a->sweep[level] & TE_ACROSS_BIT(v)) || a->direct & TE_ACROSS_BIT(v)) continue;
        values[v] = value_of(u, v);
        if (a->kept & TE_ACROSS_BIT(v)) {
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
    const te_across  *a = u->a;
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
    const te_across  *a = u->a;
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
    const te_across *a = u->a;
    int64_t          step = a->positions > 1 ? a->positions : TE_ACROSS_POSITIONS;
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
    const te_across  *a = u->a;
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
    const te_across *a = context;
    unit             u = {.a = a, .base = a->workspace + (size_t)thread * a->room};
    char            *values[TE_ACROSS_INSNS];
    set_uniform(&u, values);
    for (int64_t number = first; number < end && !te_cpu_stopping(a->exec); number++) {
        seek(&u, number);
        run_unit(&u, values);
    }
}

bool te_program_across_run(te_exec *exec, const te_program *program, const te_run *run, te_status *status)
{
    const te_compiled *compiled = program->compiled;
    te_across          a;
    if (!te_across_plan(&a, exec, program, run)) return false;
    int   threads = a.elements * compiled->cost < WORK ? 1 : exec->threads;
    char *room = exec->scratch(exec, a.room * (size_t)threads + 63);
    if (!room) return false;
    *status = te_check_run(exec, program, run);
    a.workspace = room + (-(uintptr_t)room & 63);
    if (*status == TE_OK) te_cpu_loop(exec, threads, a.units, te_cpu_even_grain(a.units, threads), run_units, &a);
    exec->scratch_free(exec, room);
    return true;
}
