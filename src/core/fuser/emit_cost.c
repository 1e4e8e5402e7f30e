/* emit_cost.c - what a program reads and computes of results that are measured before they are quantized, and the bytes
 * of these: the price of running it twice and of storing them, which emit.c compares. */
#include "emit.h"

/* What a thread takes to go over an element, for an instruction and for a dear one, in bytes that memory moves
 * meanwhile. Measured on two cores of Zen 4, a thread: a second run of srelu 0.2 ns an element more than to store
 * bfloat16, of a LayerNorm 0.4, of SiLU 0.7, of GELU through tanh 0.9, of dropout 1.2. */
enum { PASS_WORK = 6, CHEAP_WORK = 1, DEAR_WORK = 16 };

/* The value that an input of a unit's program is; TE_NO_VALUE: a number per row. *half: of it. */
static int loaded(const te_unit *unit, bool forward, int input, bool *half)
{
    te_grad_source source = {TE_GRAD_FROM_INPUT, input};
    int slot = -1;
    if (!forward) source = unit->gradient.sources[input];
    *half = false;
    switch (source.kind) {
    case TE_GRAD_FROM_INPUT: slot = source.index; break;
    case TE_GRAD_FROM_OUTPUT: return unit->results[source.index];
    case TE_GRAD_FROM_ROW: return TE_NO_VALUE;
    case TE_GRAD_FROM_DOUT:
        if (source.index < unit->n_results) return unit->results[source.index];
        slot = unit->identities[source.index - unit->n_results];
    }
    *half = unit->slots[slot].part.half != 0;
    return unit->slots[slot].value;
}

/* Costs of wider rows are all the same: too much. */
static int64_t width_of(const te_unit *unit) { return unit->width < (int64_t)1 << 40 ? unit->width : (int64_t)1 << 40; }

static bool is_dear(int op)
{
    switch (op) {
    case TE_PW_EXP: case TE_PW_LOG: case TE_PW_SIN: case TE_PW_COS: case TE_PW_TANH: case TE_PW_SIGMOID: case TE_PW_ERF:
    case TE_PW_POW: case TE_PW_RANDOM: case TE_PW_KEEP: case TE_PW_NORMAL: return true;
    default: return false;
    }
}

/* What the marked instructions of a program read and compute. */
static void add_cost(const te_fuse_plan *plan, const te_unit *unit, bool forward, const bool *need, te_emit_cost *cost)
{
    const te_program *program = forward ? unit->gradient.forward : unit->gradient.backward;
    const int64_t width = width_of(unit);
    for (int i = 0; i < program->n_insns; i++) {
        const te_insn *insn = &program->insns[i];
        if (!need[i]) continue;
        cost->reduces |= insn->op == TE_PW_ROWSUM || insn->op == TE_PW_ROWMAX || insn->op == TE_PW_ROWMIN;
        if (insn->rate != TE_RATE_ELEM) continue;
        bool half;
        int value = insn->op == TE_PW_LOAD ? loaded(unit, forward, insn->slot, &half) : TE_NO_VALUE;
        const te_plan_value *v = value == TE_NO_VALUE ? NULL : &plan->values[value];
        if (v && v->cls == TE_VALUE_TOKENS) cost->read += v->width / (half ? 2 : 1) * (int64_t)te_dtype_size(v->dtype);
        cost->flops += insn->op == TE_PW_LOAD || insn->arg[0] < 0 ? 0 : width;
        cost->work += width * (is_dear(insn->op) ? DEAR_WORK : insn->op == TE_PW_LOAD ? 0 : CHEAP_WORK);
    }
}

te_status te_emit_cost_of(te_fuse_plan *plan, te_unit *unit, bool forward)
{
    const te_program *program = forward ? unit->gradient.forward : unit->gradient.backward;
    te_emit_cost *cost = &unit->emit_cost[!forward];
    if (!program) return TE_OK;
    size_t bytes = (size_t)program->n_insns * sizeof(bool);
    cost->work = PASS_WORK * width_of(unit);
    cost->whole = !unit->compute_f64;
    bool *need = te_mem_zalloc(&plan->ctx->mem, bytes);
    if (!need && bytes) return te_fail_memory(plan->ctx, "fuser");
    for (int k = 0; k < (forward ? unit->n_results : unit->n_grads); k++) {
        int value = te_emitted_by(plan, unit, forward, k);
        if (value == TE_NO_VALUE || !te_quantizer_measures(te_emitted_quantizer(plan, value))) continue;
        const te_plan_value *v = &plan->values[value];
        bool half = !forward && unit->slots[unit->grads[k].slot].part.half;
        cost->stored += v->width / (half ? 2 : 1) * (int64_t)te_dtype_size(v->dtype);
        cost->stochastic |= te_emitted_quantizer(plan, value)->stochastic;
        cost->whole &=
            !half && !te_emitted_quantizer(plan, value)->hadamard && !te_emitted_quantizer(plan, value)->row_scaled;
        need[program->outputs[k].value] = true;
    }
    for (int i = program->n_insns - 1; i >= 0; i--)
        for (int a = 0; a < 3 && need[i]; a++)
            if (program->insns[i].arg[a] >= 0) need[program->insns[i].arg[a]] = true;
    add_cost(plan, unit, forward, need, cost);
    te_mem_free(&plan->ctx->mem, need, bytes);
    return TE_OK;
}
