/* program_registers.c - finishing a pass: joining operations in pairs, and giving registers to slots by first and last
 * use. */
#include "program_maker.h"

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

/* A row sum of products, of which one factor or both are x minus a number that nothing else uses: subtracts it itself.
 * Returns the step that did, -1: none. */
static int join_distance(te_plan *plan, te_step *step, const int32_t *uses, const int32_t *maker_of)
{
    bool square = step->arg[0] == step->arg[1];
    if (step->kind != TE_STEP_FOLD || step->op != TE_FOLD_SUM || step->arg[1] < 0) return -1;
    for (int k = 0; k < 2; k++) {
        int32_t        factor = step->arg[k], def = maker_of[factor];
        const te_step *distance = def >= 0 ? &plan->steps[def] : NULL;
        if (!distance || distance->op != TE_PW_SUB || distance->scalars != 2 || uses[factor] != 1 + square) continue;
        *step = (te_step){.kind = TE_STEP_FOLD, .op = step->op, .number = step->number, .dst = step->dst, .scalars = 4,
                          .arg = {distance->arg[0], square ? -1 : step->arg[1 - k], distance->arg[1], -1, -1}};
        return def;
    }
    return -1;
}

static te_step nothing(void) { return (te_step){.kind = TE_STEP_OP, .dst = -1, .arg = TE_NO_ARGS}; }

static bool is_nothing(const te_step *step) { return step->kind == TE_STEP_OP && step->dst < 0; }

/* The sum of a slot itself, of the same level as the sum at `fold`: there is no row value between them; -1: none. */
static int sum_beside(const te_plan *plan, const te_pass *pass, int fold, int32_t slot)
{
    for (int way = -1; way <= 1; way += 2)
        for (int s = fold + way; s >= pass->body && s < pass->end; s += way) {
            const te_step *step = &plan->steps[s];
            if (step->kind != TE_STEP_FOLD && step->kind != TE_STEP_OP && step->kind != TE_STEP_LOAD) break;
            if (step->kind == TE_STEP_FOLD && step->op == TE_FOLD_SUM && step->arg[0] == slot && step->arg[1] < 0 &&
                step->arg[2] < 0)
                return s;
        }
    return -1;
}

/* A row sum of products takes up the sum of one factor, and that factor's own multiplication where nothing else uses
 * it: each operand is read once for all of them. */
static void join_sums(te_plan *plan, const te_pass *pass, int fold, int32_t *uses, const int32_t *maker_of)
{
    te_step *step = &plan->steps[fold];
    if (step->kind != TE_STEP_FOLD || step->op != TE_FOLD_SUM || step->arg[1] < 0) return;
    for (int k = 1; k >= (step->arg[2] < 0 ? 0 : 1); k--) {
        int32_t  factor = step->arg[k], other = step->arg[1 - k];
        int      beside = sum_beside(plan, pass, fold, factor), def = maker_of[factor];
        bool     takes = beside >= 0 && other != factor;
        te_step *product = def >= 0 ? &plan->steps[def] : NULL;
        bool     alone = other != factor && uses[factor] == 1 + takes && product && product->op == TE_PW_MUL &&
                         !product->scalars;
        if (!takes && !alone) continue;
        step->arg[0] = other, step->arg[1] = factor;
        if (takes) {
            step->also = plan->steps[beside].dst;
            plan->steps[beside] = nothing();
            uses[factor]--;
        }
        if (alone) {
            step->arg[1] = product->arg[0], step->arg[3] = product->arg[1];
            *product = nothing();
        }
        return;
    }
}

/* A column sum of products, of which one factor is made of a tensor and numbers and not used otherwise, makes it
 * itself. */
static void join_numbers(te_plan *plan, te_step *step, const int32_t *uses, const int32_t *maker_of)
{
    int sub_mul = te_block_pair(TE_FIRST_SUB, TE_SECOND_MUL);
    for (int k = 0; k < 2 && step->arg[1] >= 0; k++) {
        int32_t factor = step->arg[k], by = step->arg[1 - k], def = maker_of[factor];
        if (def < 0 || uses[factor] != 1 || maker_of[by] >= 0) continue;
        te_step *made = &plan->steps[def];
        bool     moved = made->op == TE_PW_SUB && made->scalars == 2, both = made->op == sub_mul && made->scalars == 6;
        bool     scaled = made->op == TE_PW_MUL && (made->scalars == 1 || made->scalars == 2);
        int32_t  of = made->arg[made->scalars == 1 ? 1 : 0];
        if (!(moved || both || scaled) || maker_of[of] >= 0) continue;
        step->arg[0] = of, step->arg[1] = by;
        step->arg[3] = scaled ? -1 : made->arg[1];
        step->arg[4] = both ? made->arg[2] : scaled ? made->arg[made->scalars == 1 ? 0 : 1] : -1;
        *made = nothing();
        return;
    }
}

/* And takes up the sum of the other factor. */
static void join_column_sums(te_plan *plan, const te_pass *pass, const int32_t *uses, const int32_t *maker_of)
{
    for (int s = pass->body; s < pass->end; s++) {
        te_step *step = &plan->steps[s];
        if (step->kind != TE_STEP_COLSUM) continue;
        join_numbers(plan, step, uses, maker_of);
        step->apart = maker_of[step->arg[0]] < 0 && (step->arg[1] < 0 || maker_of[step->arg[1]] < 0);
    }
    for (int s = pass->body; s < pass->end; s++)
        for (int o = pass->body; o < pass->end; o++) {
            te_step *step = &plan->steps[s], *other = &plan->steps[o];
            if (step->kind != TE_STEP_COLSUM || !step->apart || step->arg[1] < 0 || step->also > 0 ||
                other->kind != TE_STEP_COLSUM || other->arg[0] != step->arg[1] || other->arg[1] >= 0)
                continue;
            step->also = other->operand;
            *other = nothing();
        }
}

/* Joins operations with the one use of their result, where the table has them as a pair. Later ones first: in a chain
 * every other operation takes up its predecessor. */
static void join_pairs(te_maker *m, te_pass *pass, int32_t *uses, int32_t *maker_of)
{
    te_plan *plan = m->plan;
    for (int i = 0; i < plan->n_slots; i++) uses[i] = 0, maker_of[i] = -1;
    for (int s = pass->body; s < pass->end; s++) {
        const te_step *step = &plan->steps[s];
        for (int k = 0; k < TE_STEP_ARGS; k++)
            if (step->arg[k] >= 0) uses[step->arg[k]]++;
        if (step->kind == TE_STEP_OP && plan->slots[step->dst].kind == TE_SLOT_REGISTER) maker_of[step->dst] = s;
    }
    for (int s = pass->end - 1; s >= pass->body; s--) {
        te_step *step = &plan->steps[s];
        if (is_nothing(step)) continue;
        for (int at = 0; at < 2; at++) {
            int32_t a = step->arg[at], def = a >= 0 ? maker_of[a] : -1;
            if (def < 0 || uses[a] != 1 || !join_steps(step, at, &plan->steps[def])) continue;
            plan->steps[def] = nothing();
            break;
        }
        int distance = join_distance(plan, step, uses, maker_of);
        if (distance >= 0) plan->steps[distance] = nothing();
        if (m->kind == TE_PLAN_ROW) join_sums(plan, pass, s, uses, maker_of);
    }
    if (m->kind != TE_PLAN_ROWS) join_column_sums(plan, pass, uses, maker_of);
    int kept = pass->body;
    for (int s = pass->body; s < pass->end; s++)
        if (!is_nothing(&plan->steps[s])) plan->steps[kept++] = plan->steps[s];
    pass->end = plan->n_steps = kept;
}

/* --- registers -------------------------------------------------------------------------------------------------- */

/* `last_use` has one entry per slot, `busy` one per slot too: there are never more registers. */
static void assign_registers(te_maker *m, const te_pass *pass, int32_t *last_use, bool *busy)
{
    te_plan *plan = m->plan;
    for (int i = 0; i < plan->n_slots; i++) last_use[i] = -1, busy[i] = false;
    for (int s = pass->head; s < pass->end; s++)
        for (int k = 0; k < TE_STEP_ARGS; k++)
            if (plan->steps[s].arg[k] >= 0) last_use[plan->steps[s].arg[k]] = s;
    for (int s = pass->head; s < pass->end; s++) {
        te_step *step = &plan->steps[s];
        /* an elementwise step may write where it reads; spreading and folding may not */
        bool in_place = step->kind == TE_STEP_OP || step->kind == TE_STEP_ROW_OP;
        for (int turn = 0; turn < 2; turn++) {
            if ((turn == 0) == in_place) {
                for (int k = 0; k < TE_STEP_ARGS; k++) {
                    int32_t a = step->arg[k];
                    if (a >= 0 && plan->slots[a].kind == TE_SLOT_REGISTER && last_use[a] == s)
                        busy[plan->slots[a].index] = false;
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
static void find_direct(te_maker *m, const te_pass *pass)
{
    const te_program *p = m->program;
    te_plan          *plan = m->plan;
    for (int s = pass->body; s < pass->end; s++) {
        const te_step *store = &plan->steps[s];
        if (store->kind != TE_STEP_STORE || plan->slots[store->arg[0]].kind != TE_SLOT_REGISTER) continue;
        for (int d = pass->body; d < s; d++) {
            const te_step *def = &plan->steps[d];
            if (def->dst == store->arg[0] && def->kind == TE_STEP_OP)
                plan->direct[store->operand - p->n_inputs] = (te_direct){.slot = def->dst, .step = d};
        }
        for (int o = 0; o < store->operand - p->n_inputs; o++)
            if (plan->direct[o].step >= 0 && plan->direct[o].slot == store->arg[0])
                plan->direct[store->operand - p->n_inputs].step = -1; /* an earlier output has it */
    }
}

/* --- a pass ------------------------------------------------------------------------------------------------------- */

void te_maker_finish_pass(te_maker *m, te_pass *pass)
{
    size_t   slots = (size_t)m->plan->n_slots;
    int32_t *numbers = te_mem_alloc(m->mem, 2 * slots * sizeof *numbers);
    bool    *busy = te_mem_alloc(m->mem, slots * sizeof *busy);
    if (numbers && busy) {
        join_pairs(m, pass, numbers, numbers + slots);
        te_maker_order_steps(m, pass, busy);
        assign_registers(m, pass, numbers, busy);
        find_direct(m, pass);
        te_maker_link_steps(m, pass);
    } else {
        m->failed = true;
    }
    te_mem_free(m->mem, numbers, 2 * slots * sizeof *numbers);
    te_mem_free(m->mem, busy, slots * sizeof *busy);
}
