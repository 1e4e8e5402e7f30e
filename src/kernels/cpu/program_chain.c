/* program_chain.c - from the steps of a pass to chains, see program_chain.h. */
#include "program_maker.h"

/* --- order ------------------------------------------------------------------------------------------------------ */

static bool is_pointwise(const te_step *step) { return step->kind == TE_STEP_LOAD || step->kind == TE_STEP_OP; }

static bool is_linked_sum(const te_step *step) { return step->kind == TE_STEP_COLSUM && !step->apart; }

/* Moves step `from` to the earlier place `to`. */
static void move_step(te_plan *plan, int from, int to)
{
    te_step step = plan->steps[from];
    for (int s = from; s > to; s--) plan->steps[s] = plan->steps[s - 1];
    plan->steps[to] = step;
}

/* Loads come first: they do not take part in chains. Returns where the operations begin. */
static int order_loads(te_plan *plan, int first, int end)
{
    for (int s = first; s < end; s++)
        if (plan->steps[s].kind == TE_STEP_LOAD) move_step(plan, s, first++);
    return first;
}

static bool makes_part_of(const te_step *step, const te_step *sum)
{
    int32_t also = step->kind == TE_STEP_FOLD ? step->also : 0;
    bool    makes = false;
    for (int k = 0; k < TE_STEP_ARGS; k++)
        makes |= sum->arg[k] >= 0 && (step->dst == sum->arg[k] || (also > 0 && also == sum->arg[k]));
    return makes;
}

/* Column sums go right behind the last step that makes what they add, row loads to the front: then operations
 * stand next to each other. */
static void order_sums(te_plan *plan, const te_pass *pass)
{
    int rows = pass->body;
    for (int s = pass->body; s < pass->end; s++) {
        const te_step *step = &plan->steps[s];
        int            to = s;
        if (step->kind == TE_STEP_LOAD_ROW) to = rows++;
        while (step->kind == TE_STEP_COLSUM && to > rows && !makes_part_of(&plan->steps[to - 1], step)) to--;
        move_step(plan, s, to);
    }
}

/* How well a step goes behind the one that left acc: a sum of it best, -1: not all of its arguments exist. */
static int rank_of(const te_step *step, int32_t acc, const bool *pending)
{
    bool uses = false;
    for (int k = 0; k < 3; k++) {
        if (step->arg[k] < 0) continue;
        if (pending[step->arg[k]]) return -1;
        uses = uses || step->arg[k] == acc;
    }
    return !uses ? 0 : step->kind == TE_STEP_COLSUM ? 2 : 1;
}

/* Operations and sums [first, end): after each one another that uses its result, if there is one whose other arguments
 * exist. */
static void order_operations(te_plan *plan, int first, int end, bool *pending)
{
    int32_t acc = -1;
    for (int i = 0; i < plan->n_slots; i++) pending[i] = false;
    for (int s = first; s < end; s++)
        if (plan->steps[s].kind != TE_STEP_COLSUM) pending[plan->steps[s].dst] = true;
    for (int at = first; at < end; at++) {
        int best = -1, best_rank = -1;
        for (int s = at; s < end && best_rank < 2; s++) {
            int rank = rank_of(&plan->steps[s], acc, pending);
            if (rank > best_rank) best = s, best_rank = rank;
        }
        move_step(plan, best, at);
        if (plan->steps[at].kind == TE_STEP_COLSUM) continue;
        acc = plan->steps[at].dst;
        pending[acc] = false;
    }
}

void te_maker_order_steps(te_maker *m, const te_pass *pass, bool *pending)
{
    te_plan *plan = m->plan;
    bool     sums = m->kind != TE_PLAN_ROWS;
    if (sums) order_sums(plan, pass);
    for (int s = pass->body; s < pass->end;) {
        int end = s;
        while (end < pass->end && (is_pointwise(&plan->steps[end]) || (sums && is_linked_sum(&plan->steps[end]))))
            end++;
        if (end > s) order_operations(plan, order_loads(plan, s, end), end, pending);
        s = end > s ? end : s + 1;
    }
}

/* --- links ------------------------------------------------------------------------------------------------------ */

/* Powers and angles are done block by block: their loops want more registers, or look at the whole block first. So are
 * sums where a tile has several rows. */
static bool has_link(const te_maker *m, const te_step *step)
{
    if (step->kind == TE_STEP_COLSUM) return m->kind != TE_PLAN_ROWS && is_linked_sum(step);
    return step->kind == TE_STEP_OP && step->op != TE_PW_POW && step->op != TE_PW_SIN && step->op != TE_PW_COS;
}

static void add_link(te_maker *m, te_link link)
{
    te_plan *plan = m->plan;
    if (!te_mem_grow(m->mem, &plan->links, &plan->link_capacity, (size_t)plan->n_links + 1, sizeof link)) {
        m->failed = true;
        return;
    }
    plan->links[plan->n_links++] = link;
}

static int link_op_of(const te_step *step)
{
    return step->kind != TE_STEP_COLSUM ? step->op : step->arg[1] >= 0 ? TE_LINK_COLUMNS_DOT : TE_LINK_COLUMNS;
}

/* The link of a step behind one whose result has the slot `acc`. */
static te_link link_of(const te_step *step, int32_t acc)
{
    te_link link = {.op = (uint8_t)link_op_of(step), .number = step->scalars};
    for (int k = 0; k < 3; k++)
        link.arg[k] = step->arg[k] == acc && !(step->scalars >> k & 1) ? -1 : step->arg[k];
    return link;
}

/* Whether all that reads the result of step s does so while it is acc: sums behind it, and the next operation. */
static bool passes_on(const te_plan *plan, int s, int end)
{
    const te_step *step = &plan->steps[s];
    int            next = s + 1;
    while (next < end && plan->steps[next].kind == TE_STEP_COLSUM) next++;
    return plan->slots[step->dst].kind == TE_SLOT_REGISTER && step->last_use > s && step->last_use <= next &&
           step->last_use < end;
}

/* Steps [first, end), of which the results that are read from their slots are kept. */
static void link_run(te_maker *m, int first, int end)
{
    te_plan *plan = m->plan;
    plan->steps[first].chain = plan->n_links;
    plan->steps[first].chain_end = end;
    int32_t acc = -1;
    for (int s = first; s < end; s++) {
        const te_step *step = &plan->steps[s];
        add_link(m, link_of(step, acc));
        if (step->kind == TE_STEP_COLSUM) {
            plan->steps[first].chain_sums = true;
            continue;
        }
        acc = step->dst;
        if (!passes_on(plan, s, end)) add_link(m, (te_link){.op = TE_LINK_KEEP, .arg = {acc, -1, -1}});
    }
    add_link(m, (te_link){.op = TE_LINK_END, .arg = {-1, -1, -1}});
}

/* --- bfloat16 --------------------------------------------------------------------------------------------------- */

static int uses_of(const te_step *step, int32_t slot)
{
    int uses = 0;
    for (int k = 0; k < TE_STEP_ARGS; k++) uses += step->arg[k] == slot;
    return uses;
}

/* Whether a step adds up rows, or the whole space, or finds the extremes of rows, and takes bfloat16. */
static bool folds_halves(const te_step *step)
{
    if (step->kind == TE_STEP_SUM) return step->op == TE_FOLD_SUM && step->arg[1] < 0;
    return step->kind == TE_STEP_FOLD && step->op != TE_FOLD_AMAX;
}

/* Whether steps of [from, end) but for stores read the slot only as links that take bfloat16, or as folds where these
 * do. `last`: the end of the chain at hand. */
static bool only_links_read(const te_plan *plan, int32_t slot, int from, int last, int end, bool folds)
{
    for (int s = from; s < end; s++) {
        const te_step *step = &plan->steps[s];
        if (step->chain_end) last = step->chain_end;
        bool sums = folds && folds_halves(step);
        if (!uses_of(step, slot) || step->apart || sums || step->kind == TE_STEP_STORE) continue;
        if (s >= last) return false;
        if (step->kind == TE_STEP_COLSUM) continue;
        if (!te_link_takes_halves(step->op)) return false;
    }
    return plan->slots[slot].kind == TE_SLOT_REGISTER;
}

/* Of the slot by steps of [from, end) that are stores, or by the others. */
static int uses_behind(const te_plan *plan, int32_t slot, int from, int end, bool stores)
{
    int uses = 0;
    for (int s = from; s < end; s++)
        if ((plan->steps[s].kind == TE_STEP_STORE) == stores) uses += uses_of(&plan->steps[s], slot);
    return uses;
}

static void find_halves(te_maker *m, const te_pass *pass)
{
    te_plan *plan = m->plan;
    int      linked = pass->body;
    bool     folds = m->kind == TE_PLAN_ROW;
    for (int s = pass->body; s < pass->end; s++) {
        te_step *step = &plan->steps[s];
        if (step->chain_end) linked = step->chain_end;
        if (step->kind == TE_STEP_LOAD)
            step->half_ok = only_links_read(plan, step->dst, s + 1, s + 1, pass->end, folds) &&
                            uses_behind(plan, step->dst, s + 1, pass->end, true) == 0;
        for (int o = 0; s < linked && o < m->program->n_outputs; o++) {
            te_direct *direct = &plan->direct[o];
            if (direct->step != s) continue;
            int behind = s + 1;
            while (behind < linked && plan->steps[behind].kind == TE_STEP_COLSUM) behind++; /* they take acc */
            direct->unread = uses_behind(plan, step->dst, behind, pass->end, false) == 0;
            direct->half_ok = direct->unread || (step->op == TE_PW_TO_BF16 && step->kind == TE_STEP_OP &&
                                                 only_links_read(plan, step->dst, s + 1, linked, pass->end, folds));
        }
    }
}

/* Whether a row sum adds products with the products that a column sum adds. */
static bool goes_beside(const te_step *fold, const te_step *sum)
{
    return fold->kind == TE_STEP_FOLD && fold->op == TE_FOLD_SUM && fold->arg[3] >= 0 && fold->arg[0] == sum->arg[0] &&
           fold->arg[1] == sum->arg[1] && fold->arg[2] == sum->arg[3];
}

/* Column sums are left to such a row sum behind them. */
static void find_beside(te_plan *plan, const te_pass *pass)
{
    for (int s = pass->body; s < pass->end; s++) {
        te_step *sum = &plan->steps[s];
        for (int f = s + 1; f < pass->end && sum->kind == TE_STEP_COLSUM && sum->apart && !sum->beside; f++)
            if (!plan->steps[f].beside && goes_beside(&plan->steps[f], sum)) {
                sum->beside = f;
                plan->steps[f].beside = s;
            }
    }
}

/* Folds and chains go over whole rows with time to spare for memory. */
static void count_turns(te_maker *m, const te_pass *pass)
{
    te_plan *plan = m->plan;
    int      linked = pass->body;
    for (int s = pass->body; s < pass->end; s++) {
        te_step *step = &plan->steps[s];
        bool     sums = step->kind == TE_STEP_FOLD || (step->apart && !step->beside);
        bool     takes = s >= linked && (sums || step->chain_end);
        if (step->chain_end) linked = step->chain_end;
        step->turn = takes ? plan->n_turns++ : -1;
    }
}

/* --- bands -------------------------------------------------------------------------------------------------------- */

static void note_use(te_plan *plan, int32_t slot, int chain)
{
    if (slot >= 0 && plan->slots[slot].chain != chain) plan->slots[slot].brief = false;
}

/* Registers whose values are made and used in one chain; one that serves other values too is not brief for any. */
static void find_brief(te_plan *plan, const te_pass *pass)
{
    for (int i = 0; i < plan->n_slots; i++) {
        plan->slots[i].brief = plan->slots[i].kind == TE_SLOT_REGISTER;
        plan->slots[i].chain = -1;
    }
    for (int s = pass->body, first = -1, end = 0; s < pass->end; s++) {
        const te_step *step = &plan->steps[s];
        if (step->chain_end) first = s, end = step->chain_end;
        int chain = s < end ? first : -2;
        for (int k = 0; k < TE_STEP_ARGS; k++) note_use(plan, step->arg[k], chain);
        if (step->dst >= 0 && chain >= 0) plan->slots[step->dst].chain = chain;
        note_use(plan, step->dst, chain);
    }
    for (int i = 0; i < plan->n_slots; i++)
        for (int j = 0; j < plan->n_slots && !plan->slots[i].brief && plan->slots[i].kind == TE_SLOT_REGISTER; j++)
            if (plan->slots[j].kind == TE_SLOT_REGISTER && plan->slots[j].index == plan->slots[i].index)
                plan->slots[j].brief = false;
    for (int i = 0; i < plan->n_slots; i++)
        plan->n_long += plan->slots[i].kind == TE_SLOT_REGISTER && !plan->slots[i].brief;
}

/* Whether a step can be done to several rows at once: that numbers differ from row to row, and that a tensor's rows may
 * be apart, block functions do not know. */
static bool knows_rows(const te_maker *m, const te_step *step)
{
    if (step->kind == TE_STEP_RANDOM && step->arg[0] >= 0) /* a scalar's slot has the number of its instruction */
        return step->scalars && m->program->insns[step->arg[0]].rate == TE_RATE_UNIFORM;
    return step->kind != TE_STEP_OP || has_link(m, step);
}

static void find_bands(te_maker *m, const te_pass *pass)
{
    te_plan *plan = m->plan;
    plan->bands = plan->adds = true;
    for (int s = pass->body; s < pass->end; s++) {
        const te_step *step = &plan->steps[s];
        plan->bands &= knows_rows(m, step);
        plan->adds &= step->kind == TE_STEP_LOAD || (step->kind == TE_STEP_COLSUM && step->apart);
    }
    if (plan->bands) find_brief(plan, pass);
}

void te_maker_link_steps(te_maker *m, const te_pass *pass)
{
    const te_plan *plan = m->plan;
    for (int s = pass->body; s < pass->end && !m->failed;) {
        int end = s;
        while (end < pass->end && has_link(m, &plan->steps[end]) && 2 * (end - s) + 2 < TE_CHAIN_MAX) end++;
        if (end > s) link_run(m, s, end);
        s = end > s ? end : s + 1;
    }
    find_halves(m, pass);
    if (m->kind == TE_PLAN_ROW) find_beside(m->plan, pass);
    count_turns(m, pass);
    if (m->kind == TE_PLAN_ROW) find_bands(m, pass);
}
