/* program_diff_slope.c - functions of one input, differentiated as such.
 *
 * Reverse mode multiplies an adjoint by one factor of the chain rule after the other. Where a value follows from one
 * input alone, and nothing else is made from what lies between, its derivative by that input does so too: it is
 * computed by itself, and the adjoint multiplied by it in the end. That takes no more products, and a backend may look
 * the derivative up (kernels/program_tables.h). So this is done where elementary functions are taken; a choice (min,
 * max, where) is none of an adjoint times 0, so there it is not.
 */
#include "program_diff.h"

#include "kernels/program_tables.h"

enum { SHARED_FLAGS = TE_DIFF_ACTIVE | TE_DIFF_CONE };

static bool multiplies(te_opcode op)
{
    return op != TE_PW_WHERE && op != TE_PW_MIN && op != TE_PW_MAX && !te_opcode_is_truth(op) &&
           !te_opcode_is_random(op) && te_opcode_args(op) > 0;
}

/* An adjoint divided by something small may be finite where 1 divided by it is not: log(sigmoid(x)). Inside of a
 * function that is not told apart; there a derivative may overflow, or vanish, that many small steps would not. */
static bool divides(te_opcode op) { return op == TE_PW_LOG || op == TE_PW_DIV || op == TE_PW_SQRT; }

/* Marks what `value` is computed from, down to the one input, a load or a tensor between two programs; returns that,
 * TE_VALUE_NONE where there are several, or where nothing dear is computed. */
static int find_cone(te_diff *diff, int value)
{
    int  input = TE_VALUE_NONE;
    bool dear = false;
    for (int i = 0; i < value; i++) diff->flags[i] &= (uint8_t)~TE_DIFF_CONE;
    diff->flags[value] |= TE_DIFF_CONE;
    for (int i = value; i >= 0; i--) {
        const te_insn *insn = &diff->forward->insns[i];
        te_opcode op = (te_opcode)insn->op;
        if (!(diff->flags[i] & TE_DIFF_CONE)) continue;
        if (insn->rate == TE_RATE_UNIFORM) {
            if (diff->flags[i] & TE_DIFF_ACTIVE) return TE_VALUE_NONE;
            continue;
        }
        bool from_outside = op == TE_PW_LOAD || (i < value && (diff->flags[i] & TE_DIFF_TENSOR));
        if (insn->rate != TE_RATE_ELEM || (from_outside ? input >= 0 : !multiplies(op))) return TE_VALUE_NONE;
        if (from_outside) {
            input = i;
            continue;
        }
        dear |= te_opcode_is_dear(op);
        for (int k = 0; k < te_opcode_args(op); k++) diff->flags[insn->arg[k]] |= TE_DIFF_CONE;
    }
    return dear ? input : TE_VALUE_NONE;
}

/* Whether results, or values that matter to them, are made from what lies between besides: it is differentiated by
 * itself then, once for all of them. */
static bool is_used_outside(const te_diff *diff, int value, int input)
{
    const te_program *forward = diff->forward;
    for (int i = 0; i < forward->n_outputs; i++) {
        int v = forward->outputs[i].value;
        if (v > input && v < value && (diff->flags[v] & SHARED_FLAGS) == SHARED_FLAGS) return true;
    }
    for (int i = input + 1; i < diff->n_values; i++) {
        const te_insn *insn = &forward->insns[i];
        bool inside = i <= value && (diff->flags[i] & TE_DIFF_CONE);
        for (int k = 0; !inside && (diff->flags[i] & TE_DIFF_ACTIVE) && k < te_opcode_args((te_opcode)insn->op); k++) {
            int v = insn->arg[k];
            if (v > input && v < value && (diff->flags[v] & SHARED_FLAGS) == SHARED_FLAGS) return true;
        }
    }
    return false;
}

/* The derivative of `value` by the value `input`, by the rules of reverse mode with an adjoint of 1. */
static int slope_of(te_diff *diff, int value, int input)
{
    te_adjoint *adjoints = diff->adjoints;
    uint8_t flags = diff->flags[input];
    for (int i = 0; i <= value; i++) diff->slopes[i] = (te_adjoint){TE_VALUE_NONE, TE_VALUE_NONE};
    diff->slopes[value].per_elem = te_diff_const(diff, 1.0);
    diff->adjoints = diff->slopes;
    diff->flags[input] &= (uint8_t)~TE_DIFF_TENSOR;
    for (int i = value; i > input; i--)
        if ((diff->flags[i] & SHARED_FLAGS) == SHARED_FLAGS) te_diff_propagate(diff, i);
    diff->adjoints = adjoints;
    diff->flags[input] = flags;
    return diff->slopes[input].per_elem;
}

bool te_diff_by_slope(te_diff *diff, int value)
{
    te_adjoint adjoint = diff->adjoints[value];
    const te_insn *insn = &diff->forward->insns[value];
    if (insn->rate != TE_RATE_ELEM || adjoint.per_elem < 0 || adjoint.per_row >= 0 || divides((te_opcode)insn->op))
        return false;
    int input = find_cone(diff, value);
    if (input < 0 || is_used_outside(diff, value, input)) return false;
    te_diff_contribute(diff, input, te_diff_mul(diff, adjoint.per_elem, slope_of(diff, value, input)), true);
    return true;
}
