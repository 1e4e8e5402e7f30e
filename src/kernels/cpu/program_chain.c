/* program_chain.c - from the steps of a pass to chains, see program_chain.h. */
#include "program_maker.h"

/* --- order ------------------------------------------------------------------------------------------------------ */

static bool is_pointwise(const te_step *step) { return step->kind == TE_STEP_LOAD || step->kind == TE_STEP_OP; }

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

/* Operations [first, end): after each one another that uses its result, if there is one whose other arguments exist. */
static void order_operations(te_plan *plan, int first, int end, bool *pending)
{
    for (int i = 0; i < plan->n_slots; i++) pending[i] = false;
    for (int s = first; s < end; s++) pending[plan->steps[s].dst] = true;
    for (int at = first; at < end; at++) {
        int32_t acc = at > first ? plan->steps[at - 1].dst : -1;
        int     best = -1;
        bool    uses_acc = false;
        for (int s = at; s < end && !uses_acc; s++) {
            const te_step *step = &plan->steps[s];
            bool           ready = true, uses = false;
            for (int k = 0; k < 3; k++) {
                if (step->arg[k] < 0) continue;
                ready = ready && !pending[step->arg[k]];
                uses = uses || step->arg[k] == acc;
            }
            if (!ready || (best >= 0 && !uses)) continue;
            best = s;
            uses_acc = uses;
        }
        move_step(plan, best, at);
        pending[plan->steps[at].dst] = false;
    }
}

void te_maker_order_steps(te_maker *m, const te_pass *pass, bool *pending)
{
    te_plan *plan = m->plan;
    for (int s = pass->body; s < pass->end;) {
        int end = s;
        while (end < pass->end && is_pointwise(&plan->steps[end])) end++;
        if (end > s) order_operations(plan, order_loads(plan, s, end), end, pending);
        s = end > s ? end : s + 1;
    }
}

/* --- links ------------------------------------------------------------------------------------------------------ */

/* Powers and angles are done block by block: their loops want more registers, or look at the whole block first. */
static bool has_link(const te_step *step)
{
    return step->kind == TE_STEP_OP && step->op != TE_PW_POW && step->op != TE_PW_SIN && step->op != TE_PW_COS;
}

static void add_link(te_maker *m, te_link link)
{
    te_plan *plan = m->plan;
    if (!te_mem_grow(m->mem, (void **)&plan->links, &plan->link_capacity, (size_t)plan->n_links + 1, sizeof link)) {
        m->failed = true;
        return;
    }
    plan->links[plan->n_links++] = link;
}

/* The link of a step whose predecessor's result has the slot `acc`. */
static te_link link_of(const te_step *step, int32_t acc)
{
    te_link link = {.op = step->op, .number = step->scalars};
    for (int k = 0; k < 3; k++)
        link.arg[k] = step->arg[k] == acc && !(step->scalars >> k & 1) ? -1 : step->arg[k];
    return link;
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
        acc = step->dst;
        bool passes = plan->slots[acc].kind == TE_SLOT_REGISTER && step->last_use == s + 1 && s + 1 < end;
        if (!passes) add_link(m, (te_link){.op = TE_LINK_KEEP, .arg = {acc, -1, -1}});
    }
    add_link(m, (te_link){.op = TE_LINK_END, .arg = {-1, -1, -1}});
}

/* --- bfloat16 --------------------------------------------------------------------------------------------------- */

static int uses_of(const te_step *step, int32_t slot)
{
    return (step->arg[0] == slot) + (step->arg[1] == slot) + (step->arg[2] == slot);
}

/* Whether steps of [from, end) read the slot only as links that take bfloat16. */
static bool only_links_read(const te_plan *plan, int32_t slot, int from, int end)
{
    int first = from, last = from; /* of the chain at hand */
    for (int s = from; s < end; s++) {
        const te_step *step = &plan->steps[s];
        if (step->chain_end) first = s, last = step->chain_end;
        if (!uses_of(step, slot)) continue;
        bool acc_is_last = s > first && s < last && !(step->scalars & 4) && step->arg[2] == plan->steps[s - 1].dst;
        if (s >= last || !te_link_takes_halves(step->op, acc_is_last)) return false;
    }
    return plan->slots[slot].kind == TE_SLOT_REGISTER;
}

static void find_halves(te_maker *m, const te_pass *pass)
{
    te_plan *plan = m->plan;
    int      linked = pass->body;
    for (int s = pass->body; s < pass->end; s++) {
        te_step *step = &plan->steps[s];
        if (step->chain_end) linked = step->chain_end;
        if (step->kind == TE_STEP_LOAD) step->half_ok = only_links_read(plan, step->dst, s + 1, pass->end);
        for (int o = 0; s < linked && o < m->program->n_outputs; o++) {
            te_direct *direct = &plan->direct[o];
            if (direct->step != s) continue;
            int uses = 0;
            for (int later = s + 1; later < pass->end; later++) uses += uses_of(&plan->steps[later], step->dst);
            direct->half_ok = uses == 1;
        }
    }
}

/* Folds and chains go over whole rows with time to spare for memory. */
static void count_turns(te_maker *m, const te_pass *pass)
{
    te_plan *plan = m->plan;
    for (int s = pass->body; s < pass->end; s++) {
        te_step *step = &plan->steps[s];
        step->turn = step->kind == TE_STEP_FOLD || step->chain_end ? plan->n_turns++ : -1;
    }
}

void te_maker_link_steps(te_maker *m, const te_pass *pass)
{
    const te_plan *plan = m->plan;
    for (int s = pass->body; s < pass->end && !m->failed;) {
        int end = s;
        while (end < pass->end && has_link(&plan->steps[end]) && 2 * (end - s) + 2 < TE_CHAIN_MAX) end++;
        if (end > s) link_run(m, s, end);
        s = end > s ? end : s + 1;
    }
    find_halves(m, pass);
    count_turns(m, pass);
}
