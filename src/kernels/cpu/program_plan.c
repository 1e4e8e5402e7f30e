/* program_plan.c - from the instructions of a program to steps, passes and registers.
 *
 * First the levels: a row reduction's result is one level above its argument, everything else is on the highest level of
 * its arguments. Level l can be computed in pass l. A pass computes what its reductions need, the last one with element
 * work also what the outputs need, each from the loads up unless the value was kept. Then registers are given to the
 * slots of each pass, by first and last use.
 */
#include "program_plan.h"

#include <string.h>

/* Costs in additions. What costs less than COST_DEAR is computed anew in a later pass rather than kept. */
enum { COST_DIVISION = 4, COST_DEAR = 8 };

static int op_cost(te_opcode op)
{
    switch (op) {
    case TE_PW_CONST:
    case TE_PW_PARAM: return 0;
    case TE_PW_DIV:
    case TE_PW_SQRT:
    case TE_PW_RSQRT:
    case TE_PW_RECIP: return COST_DIVISION;
    case TE_PW_EXP:
    case TE_PW_LOG:
    case TE_PW_TANH:
    case TE_PW_SIGMOID:
    case TE_PW_ERF: return COST_DEAR;
    case TE_PW_SIN:
    case TE_PW_COS:
    case TE_PW_RANDOM:
    case TE_PW_KEEP: return 2 * COST_DEAR;
    case TE_PW_POW:
    case TE_PW_NORMAL: return 4 * COST_DEAR;
    default: return 1;
    }
}

static bool is_reduction(int op) { return op == TE_PW_ROWSUM || op == TE_PW_ROWMAX || op == TE_PW_ROWMIN; }
static bool is_random(int op) { return op == TE_PW_RANDOM || op == TE_PW_KEEP || op == TE_PW_NORMAL; }

static te_fold_kind fold_of(int op)
{
    return op == TE_PW_ROWSUM ? TE_FOLD_SUM : op == TE_PW_ROWMAX ? TE_FOLD_MAX : TE_FOLD_MIN;
}

/* --- the plan in the making ------------------------------------------------------------------------------------- */

typedef struct value_info {
    bool    needed;  /* an output depends on it */
    bool    in_pass; /* the pass at hand computes it, or reads it where it is kept */
    bool    kept;
    int32_t level;
    int32_t first_pass; /* that needs it, -1: none */
    int32_t cost;       /* of computing it anew */
    int32_t slot;       /* where it is, -1: not computed in this pass */
    int32_t spread;     /* slot with the value spread over the tile, -1: none */
} value_info;

typedef struct maker {
    const te_mem     *mem;
    const te_program *program;
    te_plan          *plan;
    value_info       *values;
    te_plan_kind      kind;
    bool              failed;      /* out of memory */
    int               n_levels;    /* passes of the plan */
    int               output_pass; /* in which outputs of element rate are made */
} maker;

static bool sweeps(const maker *m) { return m->kind == TE_PLAN_PASSES || m->kind == TE_PLAN_REPEAT; }

static bool grow(maker *m, void **array, size_t *capacity, int count, size_t size)
{
    if (!te_mem_grow(m->mem, array, capacity, (size_t)count + 1, size)) m->failed = true;
    return !m->failed;
}

static int32_t add_slot(maker *m, te_slot_kind kind)
{
    te_plan *plan = m->plan;
    if (!grow(m, (void **)&plan->slots, &plan->slot_capacity, plan->n_slots, sizeof *plan->slots)) return 0;
    int32_t index = kind == TE_SLOT_KEPT ? plan->n_kept++ : kind == TE_SLOT_SCALAR ? plan->n_slots : -1;
    plan->slots[plan->n_slots] = (te_slot){.kind = (uint8_t)kind, .index = index};
    return plan->n_slots++;
}

static void add_step(maker *m, te_step step)
{
    te_plan *plan = m->plan;
    if (!grow(m, (void **)&plan->steps, &plan->step_capacity, plan->n_steps, sizeof *plan->steps)) return;
    plan->steps[plan->n_steps++] = step;
}

/* --- analysis --------------------------------------------------------------------------------------------------- */

static void find_needed(maker *m)
{
    const te_program *p = m->program;
    for (int o = 0; o < p->n_outputs; o++) m->values[p->outputs[o].value].needed = true;
    for (int v = p->n_insns - 1; v >= 0; v--) {
        if (!m->values[v].needed) continue;
        for (int k = 0; k < te_opcode_args(p->insns[v].op); k++) m->values[p->insns[v].arg[k]].needed = true;
    }
}

static void find_levels(maker *m)
{
    const te_program *p = m->program;
    for (int v = 0; v < p->n_insns; v++) {
        const te_insn *insn = &p->insns[v];
        value_info    *info = &m->values[v];
        info->cost = op_cost(insn->op);
        for (int k = 0; k < te_opcode_args(insn->op); k++) {
            const value_info *arg = &m->values[insn->arg[k]];
            if (arg->level > info->level) info->level = arg->level;
            if (p->insns[insn->arg[k]].rate == TE_RATE_ELEM && info->cost < COST_DEAR) info->cost += arg->cost;
        }
        if (!info->needed || !sweeps(m)) continue;
        if (is_reduction(insn->op)) {
            if (info->level > m->output_pass) m->output_pass = info->level;
            info->level++;
        }
        if (info->level >= m->n_levels) m->n_levels = info->level + 1;
    }
    for (int o = 0; o < p->n_outputs; o++) {
        const value_info *info = &m->values[p->outputs[o].value];
        if (p->outputs[o].kind != TE_OUT_ROW && info->level > m->output_pass) m->output_pass = info->level;
    }
}

/* Marks the element values that the pass computes or reads. */
static void mark_pass(maker *m, int pass)
{
    const te_program *p = m->program;
    for (int v = 0; v < p->n_insns; v++) m->values[v].in_pass = false;
    for (int v = 0; v < p->n_insns; v++) {
        const te_insn *insn = &p->insns[v];
        if (m->values[v].needed && is_reduction(insn->op) && (!sweeps(m) || m->values[v].level == pass + 1))
            m->values[insn->arg[0]].in_pass = true;
    }
    for (int o = 0; o < p->n_outputs; o++)
        if (p->outputs[o].kind != TE_OUT_ROW && pass == m->output_pass) m->values[p->outputs[o].value].in_pass = true;
    for (int v = p->n_insns - 1; v >= 0; v--) {
        value_info *info = &m->values[v];
        if (!info->in_pass || p->insns[v].rate != TE_RATE_ELEM) continue;
        if (info->first_pass < 0) info->first_pass = pass;
        if (info->kept && info->first_pass < pass) continue;
        for (int k = 0; k < te_opcode_args(p->insns[v].op); k++) m->values[p->insns[v].arg[k]].in_pass = true;
    }
}

/* Keeps the dear values of one pass that a later one uses for something new. */
static void find_kept(maker *m)
{
    const te_program *p = m->program;
    for (int pass = 0; pass < m->n_levels; pass++) mark_pass(m, pass);
    for (int w = 0; w < p->n_insns; w++) {
        const te_insn *insn = &p->insns[w];
        if (!m->values[w].needed) continue;
        int used_in = is_reduction(insn->op) ? m->values[w].level - 1 : m->values[w].first_pass;
        for (int k = 0; k < te_opcode_args(insn->op); k++) {
            value_info *arg = &m->values[insn->arg[k]];
            if (p->insns[insn->arg[k]].rate != TE_RATE_ELEM || arg->cost < COST_DEAR || arg->first_pass < 0) continue;
            if (used_in > arg->first_pass) arg->kept = true;
        }
    }
    for (int o = 0; o < p->n_outputs; o++) {
        value_info *info = &m->values[p->outputs[o].value];
        if (p->outputs[o].kind == TE_OUT_ROW || p->insns[p->outputs[o].value].rate != TE_RATE_ELEM) continue;
        if (info->cost >= COST_DEAR && info->first_pass < m->output_pass) info->kept = true;
    }
}

/* --- steps ------------------------------------------------------------------------------------------------------ */

/* The slot of a value as blocks of elements. */
static int32_t element_slot(maker *m, int v)
{
    value_info *info = &m->values[v];
    int         rate = m->program->insns[v].rate;
    if (rate == TE_RATE_ELEM) return info->slot;
    if (info->spread < 0) {
        info->spread = add_slot(m, TE_SLOT_REGISTER);
        add_step(m, (te_step){.kind = TE_STEP_SPREAD, .rate = (uint8_t)rate, .dst = info->spread,
                              .arg = {info->slot, -1, -1}});
    }
    return info->spread;
}

/* Fills in the arguments of a step of rate `rate`: what has a lower rate enters as a number where that is possible. */
static void set_arguments(maker *m, te_step *step, const te_insn *insn, te_rate rate)
{
    int n = te_opcode_args(insn->op);
    for (int k = 0; k < n; k++) {
        int     a = insn->arg[k];
        te_rate arg_rate = (te_rate)m->program->insns[a].rate;
        bool    scalar = arg_rate == TE_RATE_UNIFORM || (arg_rate == TE_RATE_ROW && m->kind != TE_PLAN_ROWS);
        if (rate == TE_RATE_ELEM && !scalar) {
            step->arg[k] = element_slot(m, a);
        } else {
            step->arg[k] = m->values[a].slot;
            if (scalar) step->scalars |= (uint8_t)(1u << k);
        }
    }
    if (n > 0 && step->scalars == (1u << n) - 1u && rate == TE_RATE_ELEM && !is_random(insn->op)) {
        step->arg[0] = element_slot(m, insn->arg[0]);
        step->scalars &= (uint8_t)~1u;
    }
    /* with one row, a row step reads one number from each argument anyway */
    if (rate == TE_RATE_ROW && m->kind != TE_PLAN_ROWS) step->scalars = 0;
}

static void emit_element(maker *m, int v)
{
    const te_insn *insn = &m->program->insns[v];
    te_step        step = {.kind = TE_STEP_OP, .op = insn->op, .operand = insn->slot, .arg = {-1, -1, -1}};
    set_arguments(m, &step, insn, TE_RATE_ELEM);
    if (insn->op == TE_PW_LOAD) step.kind = TE_STEP_LOAD;
    if (insn->op == TE_PW_COLUMN) step.kind = TE_STEP_COLUMN;
    if (is_random(insn->op)) step.kind = TE_STEP_RANDOM;
    step.dst = m->values[v].slot = add_slot(m, m->values[v].kept ? TE_SLOT_KEPT : TE_SLOT_REGISTER);
    add_step(m, step);
}

static int32_t row_slot(maker *m, int v)
{
    return m->values[v].slot = m->kind == TE_PLAN_ROWS ? add_slot(m, TE_SLOT_REGISTER) : v;
}

static void emit_row(maker *m, int v)
{
    const te_insn *insn = &m->program->insns[v];
    te_step        step = {.kind = TE_STEP_ROW_OP, .op = insn->op, .operand = insn->slot, .arg = {-1, -1, -1}};
    if (insn->op == TE_PW_LOAD) step.kind = TE_STEP_LOAD_ROW;
    set_arguments(m, &step, insn, TE_RATE_ROW);
    step.dst = row_slot(m, v);
    add_step(m, step);
}

static void emit_fold(maker *m, int v)
{
    const te_insn *insn = &m->program->insns[v];
    te_step step = {.kind = TE_STEP_FOLD, .op = (uint8_t)fold_of(insn->op), .number = m->plan->n_row_folds++};
    step.arg[0] = element_slot(m, insn->arg[0]);
    step.arg[1] = step.arg[2] = -1;
    step.dst = row_slot(m, v);
    add_step(m, step);
}

/* Outputs come last in a pass: a tensor that is also an input has been read by then. */
static void emit_outputs(maker *m)
{
    const te_program *p = m->program;
    int               sums = 0;
    for (int o = 0; o < p->n_outputs; o++) {
        te_output_kind kind = (te_output_kind)p->outputs[o].kind;
        if (kind == TE_OUT_ROW) continue;
        te_step step = {.kind = TE_STEP_STORE, .operand = p->n_inputs + o, .dst = -1, .arg = {-1, -1, -1}};
        if (kind == TE_OUT_COLSUM) step.kind = TE_STEP_COLSUM;
        if (kind == TE_OUT_SUM || kind == TE_OUT_AMAX) {
            step.kind = TE_STEP_SUM;
            step.op = kind == TE_OUT_SUM ? TE_FOLD_SUM : TE_FOLD_AMAX;
            step.number = sums++;
        }
        step.arg[0] = element_slot(m, p->outputs[o].value);
        add_step(m, step);
    }
}

static void emit_row_outputs(maker *m)
{
    const te_program *p = m->program;
    for (int o = 0; o < p->n_outputs; o++) {
        if (p->outputs[o].kind != TE_OUT_ROW) continue;
        int v = p->outputs[o].value;
        te_step step = {.kind = TE_STEP_STORE_ROW, .operand = p->n_inputs + o, .dst = -1, .arg = {m->values[v].slot, -1, -1}};
        step.scalars = p->insns[v].rate == TE_RATE_UNIFORM;
        add_step(m, step);
    }
}

/* All of the program over one tile: rows, elements and reductions in the program's order. */
static void emit_tile(maker *m, te_pass *pass)
{
    const te_program *p = m->program;
    mark_pass(m, 0);
    for (int v = 0; v < p->n_insns; v++) {
        const value_info *info = &m->values[v];
        if (!info->needed || p->insns[v].rate == TE_RATE_UNIFORM) continue;
        if (is_reduction(p->insns[v].op)) emit_fold(m, v);
        else if (p->insns[v].rate == TE_RATE_ROW) emit_row(m, v);
        else emit_element(m, v);
    }
    emit_outputs(m);
    emit_row_outputs(m);
    pass->folds = m->plan->n_steps;
}

static void emit_sweep(maker *m, te_pass *pass, int number)
{
    const te_program *p = m->program;
    for (int v = 0; v < p->n_insns; v++) {
        value_info *info = &m->values[v];
        if (p->insns[v].rate == TE_RATE_ROW && !is_reduction(p->insns[v].op) && info->needed && info->level == number)
            emit_row(m, v);
        if (p->insns[v].rate == TE_RATE_ELEM && !(info->kept && info->first_pass < number)) info->slot = -1;
        info->spread = -1;
    }
    if (number == m->n_levels - 1) emit_row_outputs(m);
    pass->body = m->plan->n_steps;
    mark_pass(m, number);
    for (int v = 0; v < p->n_insns; v++)
        if (m->values[v].in_pass && p->insns[v].rate == TE_RATE_ELEM && m->values[v].slot < 0) emit_element(m, v);
    for (int v = 0; v < p->n_insns; v++)
        if (is_reduction(p->insns[v].op) && m->values[v].needed && m->values[v].level == number + 1)
            (void)element_slot(m, p->insns[v].arg[0]);
    if (number == m->output_pass) emit_outputs(m);
    pass->folds = m->plan->n_steps;
    for (int v = 0; v < p->n_insns; v++)
        if (is_reduction(p->insns[v].op) && m->values[v].needed && m->values[v].level == number + 1) emit_fold(m, v);
}

/* --- pairs ------------------------------------------------------------------------------------------------------ */

static int first_of(int op)
{
    return op == TE_PW_ADD ? TE_FIRST_ADD : op == TE_PW_SUB ? TE_FIRST_SUB : op == TE_PW_MUL ? TE_FIRST_MUL : -1;
}

/* `at`: which argument of the second operation the first one's result is. */
static int second_of(int op, int at)
{
    if (op == TE_PW_SUB) return at == 0 ? TE_SECOND_SUB : TE_SECOND_FROM;
    return op == TE_PW_ADD ? TE_SECOND_ADD : op == TE_PW_MUL ? TE_SECOND_MUL : -1;
}

/* Puts the operation `def`, whose result only `step` uses, as its argument `at`, into that step. */
static bool join_steps(te_step *step, int at, const te_step *def)
{
    bool sums = (step->kind == TE_STEP_FOLD || step->kind == TE_STEP_SUM || step->kind == TE_STEP_COLSUM);
    if (sums) {
        bool adds = step->kind == TE_STEP_COLSUM || step->op == TE_FOLD_SUM;
        if (!adds || def->op != TE_PW_MUL || def->scalars || step->arg[1] >= 0) return false;
        step->arg[0] = def->arg[0];
        step->arg[1] = def->arg[1];
        return true;
    }
    int first = first_of(def->op), second = second_of(step->op, at);
    if (step->kind != TE_STEP_OP || first < 0 || second < 0) return false;
    int other = step->arg[1 - at], other_scalar = step->scalars >> (1 - at) & 1;
    step->op = (uint8_t)te_block_pair((te_pair_first)first, (te_pair_second)second);
    step->arg[0] = def->arg[0];
    step->arg[1] = def->arg[1];
    step->arg[2] = other;
    step->scalars = (uint8_t)(def->scalars | other_scalar << 2);
    return true;
}

/* Joins operations with the one use of their result, where the table has them as a pair. Later ones first: in a chain every
 * other operation takes up its predecessor. */
static void join_pairs(maker *m, te_pass *pass, int32_t *uses, int32_t *maker_of)
{
    te_plan *plan = m->plan;
    for (int i = 0; i < plan->n_slots; i++) uses[i] = 0, maker_of[i] = -1;
    for (int s = pass->body; s < pass->end; s++) {
        const te_step *step = &plan->steps[s];
        for (int k = 0; k < 3; k++)
            if (step->arg[k] >= 0) uses[step->arg[k]]++;
        if (step->kind == TE_STEP_OP && plan->slots[step->dst].kind == TE_SLOT_REGISTER) maker_of[step->dst] = s;
    }
    for (int s = pass->end - 1; s >= pass->body; s--) {
        te_step *step = &plan->steps[s];
        if (step->kind == TE_STEP_OP && step->dst < 0) continue;
        for (int at = 0; at < 2; at++) {
            int32_t a = step->arg[at], def = a >= 0 ? maker_of[a] : -1;
            if (def < 0 || uses[a] != 1 || !join_steps(step, at, &plan->steps[def])) continue;
            plan->steps[def] = (te_step){.kind = TE_STEP_OP, .dst = -1, .arg = {-1, -1, -1}};
            break;
        }
    }
    int kept = pass->body, folds = pass->folds;
    for (int s = pass->body; s < pass->end; s++) {
        bool gone = plan->steps[s].kind == TE_STEP_OP && plan->steps[s].dst < 0;
        if (gone && s < folds) pass->folds--;
        if (!gone) plan->steps[kept++] = plan->steps[s];
    }
    pass->end = plan->n_steps = kept;
}

/* --- registers -------------------------------------------------------------------------------------------------- */

/* `last_use` has one entry per slot, `busy` one per slot too: there are never more registers. */
static void assign_registers(maker *m, const te_pass *pass, int32_t *last_use, bool *busy)
{
    te_plan *plan = m->plan;
    for (int i = 0; i < plan->n_slots; i++) last_use[i] = -1, busy[i] = false;
    for (int s = pass->head; s < pass->end; s++)
        for (int k = 0; k < 3; k++)
            if (plan->steps[s].arg[k] >= 0) last_use[plan->steps[s].arg[k]] = s;
    for (int s = pass->head; s < pass->end; s++) {
        te_step *step = &plan->steps[s];
        /* an elementwise step may write where it reads; spreading and folding may not */
        bool in_place = step->kind == TE_STEP_OP || step->kind == TE_STEP_ROW_OP;
        for (int turn = 0; turn < 2; turn++) {
            if ((turn == 0) == in_place) {
                for (int k = 0; k < 3; k++) {
                    int32_t a = step->arg[k];
                    if (a >= 0 && plan->slots[a].kind == TE_SLOT_REGISTER && last_use[a] == s) busy[plan->slots[a].index] = false;
                }
            } else if (step->dst >= 0 && plan->slots[step->dst].kind == TE_SLOT_REGISTER) {
                int r = 0;
                while (busy[r]) r++;
                busy[r] = true;
                plan->slots[step->dst].index = r;
                if (r >= plan->n_registers) plan->n_registers = r + 1;
            }
        }
        if (step->dst >= 0) step->last_use = last_use[step->dst];
    }
}

/* The step that makes an output's value, if it may write to the output's memory. */
static void find_direct(maker *m, const te_pass *pass)
{
    const te_program *p = m->program;
    te_plan          *plan = m->plan;
    for (int s = pass->body; s < pass->end; s++) {
        const te_step *store = &plan->steps[s];
        if (store->kind != TE_STEP_STORE || plan->slots[store->arg[0]].kind != TE_SLOT_REGISTER) continue;
        for (int d = pass->body; d < s; d++) {
            const te_step *def = &plan->steps[d];
            if (def->dst == store->arg[0] && def->kind == TE_STEP_OP)
                plan->direct[store->operand - p->n_inputs] = (te_direct){def->dst, d};
        }
        for (int o = 0; o < store->operand - p->n_inputs; o++)
            if (plan->direct[o].step >= 0 && plan->direct[o].slot == store->arg[0])
                plan->direct[store->operand - p->n_inputs].step = -1; /* an earlier output has it */
    }
}

/* --- putting it together ---------------------------------------------------------------------------------------- */

static void plan_free(const te_mem *mem, te_plan *plan)
{
    if (!plan) return;
    te_mem_free(mem, plan->steps, plan->step_capacity * sizeof *plan->steps);
    te_mem_free(mem, plan->slots, plan->slot_capacity * sizeof *plan->slots);
    te_mem_free(mem, plan->passes, plan->pass_capacity * sizeof *plan->passes);
    te_mem_free(mem, plan->direct, plan->direct_capacity * sizeof *plan->direct);
    te_mem_free(mem, plan, sizeof *plan);
}

static void finish_pass(maker *m, te_pass *pass)
{
    size_t   slots = (size_t)m->plan->n_slots;
    int32_t *numbers = te_mem_alloc(m->mem, 2 * slots * sizeof *numbers);
    bool    *busy = te_mem_alloc(m->mem, slots * sizeof *busy);
    if (numbers && busy) {
        join_pairs(m, pass, numbers, numbers + slots);
        assign_registers(m, pass, numbers, busy);
        find_direct(m, pass);
    } else {
        m->failed = true;
    }
    te_mem_free(m->mem, numbers, 2 * slots * sizeof *numbers);
    te_mem_free(m->mem, busy, slots * sizeof *busy);
}

static void make_passes(maker *m)
{
    te_plan *plan = m->plan;
    for (int number = 0; number < m->n_levels && !m->failed; number++) {
        if (!grow(m, (void **)&plan->passes, &plan->pass_capacity, number, sizeof *plan->passes)) return;
        te_pass pass = {.head = plan->n_steps, .body = plan->n_steps};
        if (sweeps(m)) emit_sweep(m, &pass, number);
        else emit_tile(m, &pass);
        pass.end = plan->n_steps;
        if (!m->failed) finish_pass(m, &pass);
        plan->passes[plan->n_passes++] = pass;
    }
}

static te_plan *make_plan(const te_mem *mem, const te_program *program, te_plan_kind kind)
{
    size_t n = (size_t)program->n_insns;
    maker  m = {.mem = mem, .program = program, .kind = kind, .n_levels = 1};
    m.plan = te_mem_zalloc(mem, sizeof *m.plan);
    m.values = te_mem_zalloc(mem, n * sizeof *m.values);
    if (!m.plan || !m.values) m.failed = true;
    for (size_t v = 0; v < n && !m.failed; v++) {
        m.values[v].first_pass = m.values[v].spread = -1;
        m.values[v].slot = add_slot(&m, TE_SLOT_SCALAR);
    }
    if (!m.failed && grow(&m, (void **)&m.plan->direct, &m.plan->direct_capacity, program->n_outputs, sizeof *m.plan->direct)) {
        for (int o = 0; o < program->n_outputs; o++) m.plan->direct[o] = (te_direct){-1, -1};
        find_needed(&m);
        find_levels(&m);
        if (kind == TE_PLAN_PASSES) find_kept(&m);
        make_passes(&m);
    }
    te_mem_free(mem, m.values, n * sizeof *m.values);
    if (!m.failed) return m.plan;
    plan_free(mem, m.plan);
    return NULL;
}

/* --- what a program keeps --------------------------------------------------------------------------------------- */

static void release_compiled(te_program *program)
{
    te_compiled *compiled = program->compiled;
    if (!compiled) return;
    for (int k = 0; k < TE_PLAN_COUNT; k++) plan_free(program->mem, compiled->plans[k]);
    te_mem_free(program->mem, compiled, sizeof *compiled);
    program->compiled = NULL;
    program->release_compiled = NULL;
}

static void describe(te_compiled *compiled, const te_program *program)
{
    compiled->cost = program->n_inputs + program->n_outputs;
    for (int v = 0; v < program->n_insns; v++) {
        const te_insn *insn = &program->insns[v];
        compiled->reduces_rows |= is_reduction(insn->op);
        compiled->structured |= insn->rate == TE_RATE_ROW || insn->op == TE_PW_COLUMN;
        if (insn->rate == TE_RATE_ELEM && insn->op != TE_PW_LOAD) compiled->cost += op_cost(insn->op);
    }
    for (int o = 0; o < program->n_outputs; o++) {
        int kind = program->outputs[o].kind;
        compiled->columns_summed |= kind == TE_OUT_COLSUM;
        compiled->structured |= kind == TE_OUT_COLSUM || kind == TE_OUT_ROW;
        compiled->n_sums += kind == TE_OUT_SUM || kind == TE_OUT_AMAX;
    }
}

/* The invariants of program.h that the interpreter relies on for its memory safety. */
static bool well_formed(const te_program *program)
{
    for (int v = 0; v < program->n_insns; v++) {
        const te_insn *insn = &program->insns[v];
        if (insn->op >= TE_PW_COUNT || insn->rate > TE_RATE_ELEM) return false;
        for (int k = 0; k < te_opcode_args(insn->op); k++)
            if (insn->arg[k] < 0 || insn->arg[k] >= v || (!is_reduction(insn->op) && program->insns[insn->arg[k]].rate > insn->rate))
                return false;
        if (is_reduction(insn->op) && insn->rate != TE_RATE_ROW) return false;
        if ((is_random(insn->op) || insn->op == TE_PW_COLUMN) && insn->rate != TE_RATE_ELEM) return false;
        if (is_random(insn->op) && (insn->slot < 0 || insn->slot >= program->n_rngs)) return false;
        if (insn->op == TE_PW_PARAM && (insn->slot < 0 || insn->slot >= program->n_params)) return false;
        if (insn->op == TE_PW_LOAD && (insn->slot < 0 || insn->slot >= program->n_inputs)) return false;
    }
    for (int o = 0; o < program->n_outputs; o++) {
        int v = program->outputs[o].value;
        if (v < 0 || v >= program->n_insns) return false;
        if (program->outputs[o].kind == TE_OUT_ROW && program->insns[v].rate == TE_RATE_ELEM) return false;
    }
    return true;
}

te_status te_program_compile(te_exec *exec, te_program *program)
{
    if (program->compiled) return TE_OK;
    if (!well_formed(program)) return te_exec_fail(exec, TE_ERROR_INTERNAL, "program %s is malformed", program->name);
    te_compiled *compiled = te_mem_zalloc(program->mem, sizeof *compiled);
    if (!compiled) return te_exec_fail(exec, TE_ERROR_MEMORY, "out of memory compiling program %s", program->name);
    describe(compiled, program);
    program->compiled = compiled;
    program->release_compiled = release_compiled;
    return TE_OK;
}

te_plan *te_compiled_plan(te_exec *exec, te_program *program, te_plan_kind kind)
{
    te_compiled *compiled = program->compiled;
    if (kind == TE_PLAN_REPEAT && compiled->plans[TE_PLAN_PASSES] && compiled->plans[TE_PLAN_PASSES]->n_kept == 0)
        kind = TE_PLAN_PASSES;
    if (!compiled->plans[kind]) compiled->plans[kind] = make_plan(program->mem, program, kind);
    if (!compiled->plans[kind]) te_exec_fail(exec, TE_ERROR_MEMORY, "out of memory compiling program %s", program->name);
    return compiled->plans[kind];
}
