/* program_diff_values.c - how the backward program gets at the values of the forward one.
 *
 *      input, saved output        loaded
 *      ROW value behind a row reduction    stored by forward as an extra output and loaded: one number per row
 *      anything else              computed again from these
 *
 * A ROW value whose ingredients were all asked for before is computed again too: arithmetic once per row costs less
 * than one more stored output.
 */
#include "program_diff.h"

te_status te_diff_fail_memory(te_diff *diff)
{
    if (diff->status != TE_OK) return diff->status;
    return diff->status = te_build_fail(diff->error, TE_ERROR_MEMORY, "%s: out of memory while differentiating",
                                        diff->request->forward->name);
}

/* --- sources ------------------------------------------------------------------------------------------------------ */

int te_diff_source(te_diff *diff, te_grad_source_kind kind, int index, te_rate rate)
{
    if (diff->status != TE_OK) return TE_VALUE_NONE;
    for (int i = 0; i < diff->n_sources; i++)
        if (diff->sources[i].kind == kind && diff->sources[i].index == index) return te_program_load(diff->backward, i);
    if (diff->n_sources == TE_GRAD_MAX_SOURCES) {
        diff->status = te_build_fail(diff->error, TE_ERROR_UNSUPPORTED, "%s: the gradient reads more than %d tensors",
                                     diff->request->forward->name, TE_GRAD_MAX_SOURCES);
        return TE_VALUE_NONE;
    }
    int value = te_program_input(diff->backward, rate);
    if (value < 0) return te_diff_fail_memory(diff), TE_VALUE_NONE;
    diff->sources[diff->n_sources++] = (te_grad_source){kind, index};
    return value;
}

int te_diff_forward_input(te_diff *diff, int slot)
{
    return te_diff_source(diff, TE_GRAD_FROM_INPUT, slot, (te_rate)diff->forward->input_rates[slot]);
}

static te_rate output_rate(const te_program *program, int index)
{
    switch (program->outputs[index].kind) {
    case TE_OUT_ROW: return TE_RATE_ROW;
    case TE_OUT_SUM: case TE_OUT_AMAX: return TE_RATE_UNIFORM;
    default: return TE_RATE_ELEM;
    }
}

int te_diff_forward_output(te_diff *diff, int index)
{
    return te_diff_source(diff, TE_GRAD_FROM_OUTPUT, index, output_rate(diff->forward, index));
}

int te_diff_output_gradient(te_diff *diff, int index)
{
    return te_diff_source(diff, TE_GRAD_FROM_DOUT, index, output_rate(diff->forward, index));
}

/* --- values ------------------------------------------------------------------------------------------------------- */

/* A row's number that was spread over its elements would be read as one of these. */
static int saved_output_of(const te_diff *diff, int value)
{
    const te_program *forward = diff->request->forward;
    for (int i = 0; diff->request->save_output && i < forward->n_outputs; i++) {
        const struct te_program_output *output = &forward->outputs[i];
        bool spread = output->kind == TE_OUT_ELEM && forward->insns[value].rate != TE_RATE_ELEM;
        bool holds_values = (output->kind == TE_OUT_ELEM && !spread) || output->kind == TE_OUT_ROW;
        if (output->value == value && holds_values && diff->request->save_output[i]) return i;
    }
    return -1;
}

static bool is_leaf(te_opcode op) { return op == TE_PW_LOAD || op == TE_PW_PARAM || op == TE_PW_CONST; }

static bool is_stored_row(const te_diff *diff, int value)
{
    const te_insn *insn = &diff->forward->insns[value];
    te_opcode op = (te_opcode)insn->op;
    if (insn->rate != TE_RATE_ROW || !(diff->flags[value] & TE_DIFF_REDUCED)) return false;
    if (te_opcode_reduces(op)) return true;
    for (int k = 0; k < te_opcode_args(op); k++)
        if ((diff->flags[insn->arg[k]] & TE_DIFF_REDUCED) && diff->mapped[insn->arg[k]] < 0) return true;
    return false;
}

/* The value if it can be read from memory, TE_VALUE_NONE if it is to be computed. */
static int read_value(te_diff *diff, int value)
{
    const te_insn *insn = &diff->forward->insns[value];
    if (insn->op == TE_PW_LOAD) return te_diff_forward_input(diff, insn->slot);
    if (is_leaf((te_opcode)insn->op)) return TE_VALUE_NONE;
    int output = saved_output_of(diff, value);
    if (output >= 0) return te_diff_forward_output(diff, output);
    if (is_stored_row(diff, value)) return te_diff_source(diff, TE_GRAD_FROM_ROW, value, TE_RATE_ROW);
    return TE_VALUE_NONE;
}

/* Downwards: which values to compute and which to read; upwards: compute. No recursion, since chains may be long. */
int te_diff_value(te_diff *diff, int forward_value)
{
    int32_t *mapped = diff->mapped;
    diff->flags[forward_value] |= TE_DIFF_MARK;
    for (int i = forward_value; i >= 0; i--) {
        if (!(diff->flags[i] & TE_DIFF_MARK)) continue;
        if (mapped[i] < 0) mapped[i] = read_value(diff, i);
        const te_insn *insn = &diff->forward->insns[i];
        if (mapped[i] >= 0) diff->flags[i] &= (uint8_t)~TE_DIFF_MARK;
        for (int k = 0; mapped[i] < 0 && k < te_opcode_args((te_opcode)insn->op); k++)
            diff->flags[insn->arg[k]] |= TE_DIFF_MARK;
    }
    for (int i = 0; i <= forward_value; i++) {
        if (!(diff->flags[i] & TE_DIFF_MARK)) continue;
        diff->flags[i] &= (uint8_t)~TE_DIFF_MARK;
        if (diff->status != TE_OK) continue;
        mapped[i] = te_program_replay(diff->backward, &diff->forward->insns[i], mapped, 0, 0);
        if (mapped[i] < 0) te_diff_fail_memory(diff);
    }
    return diff->status == TE_OK ? mapped[forward_value] : TE_VALUE_NONE;
}
