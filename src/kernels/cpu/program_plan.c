/* program_plan.c - from the instructions of a program to steps, passes and registers.
 *
 * First the levels: a row reduction's result is one level above its argument, everything else is on the highest level
 * of its arguments. Level l can be computed in pass l. A pass computes what its reductions need, the last one with
 * element work also what the outputs need, each from the loads up unless the value was kept. program_registers.c
 * finishes each pass.
 *
 * A tile that is a whole row goes by the same levels within one pass, so that reductions of a level stand next to
 * each other and what no reduction needs comes last. What is made of tensors and numbers in one operation is made
 * anew at each level, which takes no longer than reading it, and where it is made of one tensor, for each use: there
 * it becomes half of a pair.
 */
#include "program_maker.h"

static te_fold_kind fold_of(int op)
{
    return op == TE_PW_ROWSUM ? TE_FOLD_SUM : op == TE_PW_ROWMAX ? TE_FOLD_MAX : TE_FOLD_MIN;
}

/* Whether the plan goes by levels. */
static bool has_levels(const te_maker *m) { return m->kind != TE_PLAN_ROWS; }

static bool sweeps(const te_maker *m) { return m->kind == TE_PLAN_PASSES || m->kind == TE_PLAN_REPEAT; }

static bool grow(te_maker *m, void *array, size_t *capacity, int count, size_t size)
{
    if (!te_mem_grow(m->mem, array, capacity, (size_t)count + 1, size)) m->failed = true;
    return !m->failed;
}

static int32_t add_slot(te_maker *m, te_slot_kind kind)
{
    te_plan *plan = m->plan;
    if (!grow(m, &plan->slots, &plan->slot_capacity, plan->n_slots, sizeof *plan->slots)) return 0;
    int32_t index = kind == TE_SLOT_KEPT ? plan->n_kept++ : kind == TE_SLOT_SCALAR ? plan->n_slots : -1;
    plan->slots[plan->n_slots] = (te_slot){.kind = (uint8_t)kind, .index = index};
    return plan->n_slots++;
}

static void add_step(te_maker *m, te_step step)
{
    te_plan *plan = m->plan;
    if (!grow(m, &plan->steps, &plan->step_capacity, plan->n_steps, sizeof *plan->steps)) return;
    plan->steps[plan->n_steps++] = step;
}

/* --- analysis --------------------------------------------------------------------------------------------------- */

static bool reduces(const te_maker *m, int v)
{
    return te_opcode_reduces(m->program->insns[v].op) && m->values[v].picks < 0;
}

/* Whether what is loaded stands for a value in a table. */
static bool is_tabled(const te_maker *m, const te_insn *insn)
{
    const te_compiled *compiled = m->program->compiled;
    return insn->op == TE_PW_LOAD && compiled->tabled && compiled->tabled >> insn->slot & 1;
}

/* rowsum(where(column() == at, x, 0)) with `at` one number per row, as cross entropy looks up its target: reading the
 * one element gives the same bits. */
static void find_picks(te_maker *m)
{
    const te_program *p = m->program;
    for (int v = 0; v < p->n_insns; v++) {
        m->values[v].picks = -1;
        const te_insn *where = p->insns[v].op == TE_PW_ROWSUM ? &p->insns[p->insns[v].arg[0]] : NULL;
        if (!where || where->op != TE_PW_WHERE) continue;
        const te_insn *is = &p->insns[where->arg[0]], *x = &p->insns[where->arg[1]], *other = &p->insns[where->arg[2]];
        if (is->op != TE_PW_EQ || x->op != TE_PW_LOAD || x->rate != TE_RATE_ELEM || is_tabled(m, x) ||
            other->op != TE_PW_CONST || other->imm != 0)
            continue;
        for (int k = 0; k < 2; k++)
            if (p->insns[is->arg[k]].op == TE_PW_COLUMN && p->insns[is->arg[1 - k]].rate != TE_RATE_ELEM) {
                m->values[v].picks = where->arg[1];
                m->values[v].pick_at = is->arg[1 - k];
            }
    }
}

/* What value v is computed from. */
static int argument_count(const te_maker *m, int v)
{
    return m->values[v].picks >= 0 ? 1 : te_opcode_args(m->program->insns[v].op);
}

static int argument(const te_maker *m, int v, int k)
{
    return m->values[v].picks >= 0 ? m->values[v].pick_at : m->program->insns[v].arg[k];
}

static void find_needed(te_maker *m)
{
    const te_program *p = m->program;
    for (int o = 0; o < p->n_outputs; o++) m->values[p->outputs[o].value].needed = true;
    for (int v = p->n_insns - 1; v >= 0; v--) {
        if (!m->values[v].needed) continue;
        for (int k = 0; k < argument_count(m, v); k++) m->values[argument(m, v, k)].needed = true;
    }
}

static void find_levels(te_maker *m)
{
    const te_program *p = m->program;
    for (int v = 0; v < p->n_insns; v++) {
        const te_insn *insn = &p->insns[v];
        te_value_info    *info = &m->values[v];
        info->cost = te_op_cost(insn->op);
        for (int k = 0; k < argument_count(m, v); k++) {
            const te_value_info *arg = &m->values[argument(m, v, k)];
            if (arg->level > info->level) info->level = arg->level;
            if (p->insns[argument(m, v, k)].rate == TE_RATE_ELEM && info->cost < TE_COST_DEAR) info->cost += arg->cost;
        }
        if (!info->needed || !has_levels(m)) continue;
        if (reduces(m, v)) {
            if (info->level > m->output_pass) m->output_pass = info->level;
            info->level++;
        }
        if (info->level >= m->n_levels) m->n_levels = info->level + 1;
    }
    for (int o = 0; o < p->n_outputs; o++) {
        const te_value_info *info = &m->values[p->outputs[o].value];
        if (p->outputs[o].kind != TE_OUT_ROW && info->level > m->output_pass) m->output_pass = info->level;
    }
}

/* Marks the element values that the pass computes or reads. */
static void mark_pass(te_maker *m, int pass)
{
    const te_program *p = m->program;
    for (int v = 0; v < p->n_insns; v++) m->values[v].in_pass = false;
    for (int v = 0; v < p->n_insns; v++) {
        const te_insn *insn = &p->insns[v];
        if (m->values[v].needed && reduces(m, v) && (!has_levels(m) || m->values[v].level == pass + 1))
            m->values[insn->arg[0]].in_pass = true;
    }
    for (int o = 0; o < p->n_outputs; o++)
        if (p->outputs[o].kind != TE_OUT_ROW && pass == m->output_pass) m->values[p->outputs[o].value].in_pass = true;
    for (int v = p->n_insns - 1; v >= 0; v--) {
        te_value_info *info = &m->values[v];
        if (!info->in_pass || p->insns[v].rate != TE_RATE_ELEM) continue;
        if (info->first_pass < 0) info->first_pass = pass;
        if (info->kept && info->first_pass < pass) continue;
        for (int k = 0; k < te_opcode_args(p->insns[v].op); k++) m->values[p->insns[v].arg[k]].in_pass = true;
    }
}

static int tensors_of(const te_maker *m, int v);

/* Whether a whole row's value is in a register for the levels behind its own. */
static bool is_kept_for(const te_maker *m, int v, int level)
{
    return m->kind == TE_PLAN_ROW && m->values[v].level < level && tensors_of(m, v) == 0;
}

/* What an operation is made of besides numbers: two tensors, or one, or a value kept from an earlier level; 0 where it
 * is made of anything else, or dear. */
static int tensors_of(const te_maker *m, int v)
{
    const te_insn *insn = &m->program->insns[v], *insns = m->program->insns;
    int            n = 0, kept = 0;
    if (insn->rate != TE_RATE_ELEM || te_opcode_is_random(insn->op)) return 0;
    if (te_op_cost(insn->op) >= TE_COST_DIVISION) return 0;
    for (int k = 0; k < te_opcode_args(insn->op); k++) {
        int a = insn->arg[k];
        if (insns[a].rate != TE_RATE_ELEM) continue;
        if (insns[a].op != TE_PW_LOAD && !is_kept_for(m, a, m->values[v].level)) return 0;
        kept += insns[a].op != TE_PW_LOAD;
        n++;
    }
    return n <= (kept ? 1 : 2) ? n : 0;
}

/* A value of a whole row that is made anew for each use. */
static bool made_per_use(const te_maker *m, int v)
{
    return m->kind == TE_PLAN_ROW && m->n_levels > 1 && tensors_of(m, v) == 1;
}

/* Keeps the dear values of one pass that a later one uses for something new; of a whole row all but the cheapest. */
static void find_kept(te_maker *m)
{
    const te_program *p = m->program;
    for (int v = 0; m->kind == TE_PLAN_ROW && v < p->n_insns; v++) m->values[v].kept = tensors_of(m, v) == 0;
    if (m->kind == TE_PLAN_ROW) return;
    for (int pass = 0; pass < m->n_levels; pass++) mark_pass(m, pass);
    for (int w = 0; w < p->n_insns; w++) {
        const te_insn *insn = &p->insns[w];
        if (!m->values[w].needed || m->values[w].picks >= 0) continue;
        int used_in = te_opcode_reduces(insn->op) ? m->values[w].level - 1 : m->values[w].first_pass;
        for (int k = 0; k < te_opcode_args(insn->op); k++) {
            te_value_info *arg = &m->values[insn->arg[k]];
            if (p->insns[insn->arg[k]].rate != TE_RATE_ELEM || arg->cost < TE_COST_DEAR || arg->first_pass < 0)
                continue;
            if (used_in > arg->first_pass) arg->kept = true;
        }
    }
    for (int o = 0; o < p->n_outputs; o++) {
        te_value_info *info = &m->values[p->outputs[o].value];
        if (p->outputs[o].kind == TE_OUT_ROW || p->insns[p->outputs[o].value].rate != TE_RATE_ELEM) continue;
        if (info->cost >= TE_COST_DEAR && info->first_pass < m->output_pass) info->kept = true;
    }
}

/* --- steps ------------------------------------------------------------------------------------------------------ */

static void emit_element(te_maker *m, int v);

/* The slot of a value as blocks of elements. */
static int32_t element_slot(te_maker *m, int v)
{
    te_value_info *info = &m->values[v];
    int         rate = m->program->insns[v].rate;
    if (rate == TE_RATE_ELEM) {
        if (made_per_use(m, v)) emit_element(m, v);
        return info->slot;
    }
    if (info->spread < 0) {
        info->spread = add_slot(m, TE_SLOT_REGISTER);
        add_step(m, (te_step){.kind = TE_STEP_SPREAD, .rate = (uint8_t)rate, .dst = info->spread,
                              .arg = {info->slot, -1, -1, -1, -1}});
    }
    return info->spread;
}

/* Fills in the arguments of a step of rate `rate`: what has a lower rate enters as a number where that is possible. */
static void set_arguments(te_maker *m, te_step *step, const te_insn *insn, te_rate rate)
{
    int n = te_opcode_args(insn->op);
    for (int k = 0; k < n; k++) {
        int     a = insn->arg[k];
        te_rate arg_rate = (te_rate)m->program->insns[a].rate;
        bool    scalar = arg_rate == TE_RATE_UNIFORM || (arg_rate == TE_RATE_ROW && m->kind != TE_PLAN_ROWS);
        if (rate == TE_RATE_ELEM && !scalar) {
            bool again = k > 0 && insn->arg[k - 1] == a;
            step->arg[k] = again ? step->arg[k - 1] : element_slot(m, a);
        } else {
            step->arg[k] = m->values[a].slot;
            if (scalar) step->scalars |= (uint8_t)(1u << k);
        }
    }
    if (n > 0 && step->scalars == (1u << n) - 1u && rate == TE_RATE_ELEM && !te_opcode_is_random(insn->op)) {
        step->arg[0] = element_slot(m, insn->arg[0]);
        step->scalars &= (uint8_t)~1u;
    }
    /* with one row, a row step reads one number from each argument anyway */
    if (rate == TE_RATE_ROW && m->kind != TE_PLAN_ROWS) step->scalars = 0;
}

static void emit_element(te_maker *m, int v)
{
    const te_insn *insn = &m->program->insns[v];
    te_step        step = {.kind = TE_STEP_OP, .op = insn->op, .operand = insn->slot, .arg = TE_NO_ARGS};
    set_arguments(m, &step, insn, TE_RATE_ELEM);
    if (insn->op == TE_PW_LOAD) step.kind = TE_STEP_LOAD;
    if (insn->op == TE_PW_COLUMN) step.kind = TE_STEP_COLUMN;
    if (te_opcode_is_random(insn->op)) step.kind = TE_STEP_RANDOM;
    if (is_tabled(m, insn)) {
        int32_t code = step.dst = add_slot(m, TE_SLOT_REGISTER);
        add_step(m, step);
        step = (te_step){.kind = TE_STEP_OP, .op = TE_BLOCK_LOOK_UP, .scalars = 2, .arg = TE_NO_ARGS};
        step.arg[0] = code;
        step.arg[1] = add_slot(m, TE_SLOT_TABLE);
        if (!m->failed) m->plan->slots[step.arg[1]].index = insn->slot;
    }
    step.dst = m->values[v].slot = add_slot(m, sweeps(m) && m->values[v].kept ? TE_SLOT_KEPT : TE_SLOT_REGISTER);
    add_step(m, step);
}

static int32_t row_slot(te_maker *m, int v)
{
    return m->values[v].slot = m->kind == TE_PLAN_ROWS ? add_slot(m, TE_SLOT_REGISTER) : v;
}

static void emit_row(te_maker *m, int v)
{
    const te_insn *insn = &m->program->insns[v];
    te_step        step = {.kind = TE_STEP_ROW_OP, .op = insn->op, .operand = insn->slot, .arg = TE_NO_ARGS};
    if (m->values[v].picks >= 0) {
        int at = m->values[v].pick_at;
        step.kind = TE_STEP_PICK;
        step.operand = m->program->insns[m->values[v].picks].slot;
        step.arg[0] = m->values[at].slot;
        step.scalars = m->program->insns[at].rate == TE_RATE_UNIFORM;
    } else {
        if (insn->op == TE_PW_LOAD) step.kind = TE_STEP_LOAD_ROW;
        set_arguments(m, &step, insn, TE_RATE_ROW);
    }
    step.dst = row_slot(m, v);
    add_step(m, step);
}

static void emit_fold(te_maker *m, int v)
{
    const te_insn *insn = &m->program->insns[v];
    te_step step = {.kind = TE_STEP_FOLD, .op = (uint8_t)fold_of(insn->op), .number = m->plan->n_row_folds++,
                    .arg = TE_NO_ARGS};
    step.arg[0] = element_slot(m, insn->arg[0]);
    step.dst = row_slot(m, v);
    add_step(m, step);
}

/* Outputs come last in a pass: a tensor that is also an input has been read by then. */
static void emit_outputs(te_maker *m)
{
    const te_program *p = m->program;
    int               sums = 0;
    for (int o = 0; o < p->n_outputs; o++) {
        te_output_kind kind = (te_output_kind)p->outputs[o].kind;
        if (kind == TE_OUT_ROW) continue;
        te_step step = {.kind = TE_STEP_STORE, .operand = p->n_inputs + o, .dst = -1, .arg = TE_NO_ARGS};
        if (kind == TE_OUT_COLSUM) step.kind = TE_STEP_COLSUM;
        if (kind == TE_OUT_SUM || kind == TE_OUT_AMAX) {
            step.kind = TE_STEP_SUM;
            step.op = kind == TE_OUT_SUM ? TE_FOLD_SUM : TE_FOLD_AMAX;
            step.number = sums++;
        }
        step.arg[0] = element_slot(m, p->outputs[o].value);
        if (kind == TE_OUT_COLSUM) step.arg[2] = add_slot(m, TE_SLOT_SUMS);
        add_step(m, step);
    }
}

static void emit_row_outputs(te_maker *m)
{
    const te_program *p = m->program;
    for (int o = 0; o < p->n_outputs; o++) {
        if (p->outputs[o].kind != TE_OUT_ROW) continue;
        int v = p->outputs[o].value;
        te_step step = {.kind = TE_STEP_STORE_ROW, .operand = p->n_inputs + o, .dst = -1,
                        .arg = {m->values[v].slot, -1, -1, -1, -1}};
        step.scalars = p->insns[v].rate == TE_RATE_UNIFORM;
        add_step(m, step);
    }
}

/* All of the program over one tile: rows, elements and reductions in the program's order. */
static void emit_tile(te_maker *m)
{
    const te_program *p = m->program;
    mark_pass(m, 0);
    for (int v = 0; v < p->n_insns; v++) {
        const te_value_info *info = &m->values[v];
        if (!info->needed || p->insns[v].rate == TE_RATE_UNIFORM) continue;
        if (reduces(m, v)) emit_fold(m, v);
        else if (p->insns[v].rate == TE_RATE_ROW) emit_row(m, v);
        else emit_element(m, v);
    }
    emit_outputs(m);
    emit_row_outputs(m);
}

static void emit_row_values(te_maker *m, int level)
{
    const te_program *p = m->program;
    for (int v = 0; v < p->n_insns; v++)
        if (p->insns[v].rate == TE_RATE_ROW && !reduces(m, v) && m->values[v].needed && m->values[v].level == level)
            emit_row(m, v);
}

/* The element values of a level, but for those that are there from earlier ones. */
static void emit_elements(te_maker *m, int level)
{
    const te_program *p = m->program;
    for (int v = 0; v < p->n_insns; v++) {
        te_value_info *info = &m->values[v];
        bool           there = info->kept && info->first_pass >= 0 && info->first_pass < level;
        if (p->insns[v].rate == TE_RATE_ELEM && !there) info->slot = -1;
        if (sweeps(m)) info->spread = -1;
    }
    mark_pass(m, level);
    for (int v = 0; v < p->n_insns; v++)
        if (m->values[v].in_pass && p->insns[v].rate == TE_RATE_ELEM && m->values[v].slot < 0 && !made_per_use(m, v))
            emit_element(m, v);
}

static void emit_folds(te_maker *m, int level)
{
    for (int v = 0; v < m->program->n_insns; v++)
        if (reduces(m, v) && m->values[v].needed && m->values[v].level == level + 1) emit_fold(m, v);
}

static void emit_sweep(te_maker *m, te_pass *pass, int number)
{
    const te_program *p = m->program;
    emit_row_values(m, number);
    if (number == m->n_levels - 1) emit_row_outputs(m);
    pass->body = m->plan->n_steps;
    emit_elements(m, number);
    for (int v = 0; v < p->n_insns; v++)
        if (reduces(m, v) && m->values[v].needed && m->values[v].level == number + 1)
            (void)element_slot(m, p->insns[v].arg[0]);
    if (number == m->output_pass) emit_outputs(m);
    emit_folds(m, number);
}

/* All of the program over a tile that is a row, level by level. */
static void emit_levels(te_maker *m)
{
    for (int level = 0; level < m->n_levels; level++) {
        emit_row_values(m, level);
        emit_elements(m, level);
        emit_folds(m, level);
        if (level == m->output_pass) emit_outputs(m);
    }
    emit_row_outputs(m);
}

/* --- putting it together ---------------------------------------------------------------------------------------- */

void te_plan_free(const te_mem *mem, te_plan *plan)
{
    if (!plan) return;
    te_mem_free(mem, plan->steps, plan->step_capacity * sizeof *plan->steps);
    te_mem_free(mem, plan->slots, plan->slot_capacity * sizeof *plan->slots);
    te_mem_free(mem, plan->passes, plan->pass_capacity * sizeof *plan->passes);
    te_mem_free(mem, plan->direct, plan->direct_capacity * sizeof *plan->direct);
    te_mem_free(mem, plan->links, plan->link_capacity * sizeof *plan->links);
    te_mem_free(mem, plan, sizeof *plan);
}

static void make_passes(te_maker *m)
{
    te_plan *plan = m->plan;
    for (int number = 0; number < (sweeps(m) ? m->n_levels : 1) && !m->failed; number++) {
        if (!grow(m, &plan->passes, &plan->pass_capacity, number, sizeof *plan->passes)) return;
        te_pass pass = {.head = plan->n_steps, .body = plan->n_steps};
        if (sweeps(m)) emit_sweep(m, &pass, number);
        else if (has_levels(m)) emit_levels(m);
        else emit_tile(m);
        pass.end = plan->n_steps;
        if (!m->failed) te_maker_finish_pass(m, &pass);
        plan->passes[plan->n_passes++] = pass;
    }
}

te_plan *te_plan_make(const te_mem *mem, const te_program *program, te_plan_kind kind)
{
    size_t n = (size_t)program->n_insns;
    te_maker m = {.mem = mem, .program = program, .kind = kind, .n_levels = 1};
    m.plan = te_mem_zalloc(mem, sizeof *m.plan);
    m.values = te_mem_zalloc(mem, n * sizeof *m.values);
    if (!m.plan || !m.values) m.failed = true;
    for (size_t v = 0; v < n && !m.failed; v++) {
        m.values[v].first_pass = m.values[v].spread = -1;
        m.values[v].slot = add_slot(&m, TE_SLOT_SCALAR);
    }
    if (!m.failed &&
        grow(&m, &m.plan->direct, &m.plan->direct_capacity, program->n_outputs, sizeof *m.plan->direct)) {
        for (int o = 0; o < program->n_outputs; o++) m.plan->direct[o] = (te_direct){.slot = -1, .step = -1};
        find_picks(&m);
        find_needed(&m);
        find_levels(&m);
        if (kind == TE_PLAN_PASSES || kind == TE_PLAN_ROW) find_kept(&m);
        make_passes(&m);
    }
    te_mem_free(mem, m.values, n * sizeof *m.values);
    if (!m.failed) return m.plan;
    te_plan_free(mem, m.plan);
    return NULL;
}
