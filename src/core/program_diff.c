/* program_diff.c - te_program_differentiate: checks the request, runs reverse mode or the given formula, and makes the
 * two programs of the result.
 *
 * Backward is first built with every source that was looked at along the way, then copied into a program of its own
 * that has only those which some output needs: what is not a source need not be kept alive between the passes.
 */
#include "program_diff.h"

#include <stdio.h>

/* --- opening and closing ------------------------------------------------------------------------------------------ */

static const char *rate_name(te_rate rate)
{
    return rate == TE_RATE_ELEM ? "element" : rate == TE_RATE_ROW ? "row" : "run";
}

static te_status check_request(const te_gradient_request *request, te_build_error *error)
{
    const te_program *forward = request->forward;
    if (request->gradient_text && !request->formula)
        return te_build_fail(error, TE_ERROR_ARGUMENT, "%s: a gradient formula needs the formula of the forward pass",
                             forward->name);
    for (int slot = 0; slot < forward->n_inputs; slot++) {
        if (!request->wanted[slot]) continue;
        te_output_kind kind = request->reduce[slot];
        te_rate rate = (te_rate)forward->input_rates[slot];
        bool fits = kind == TE_OUT_SUM || (kind == TE_OUT_ROW && rate != TE_RATE_UNIFORM) ||
                    ((kind == TE_OUT_ELEM || kind == TE_OUT_COLSUM) && rate == TE_RATE_ELEM);
        if (!fits)
            return te_build_fail(error, TE_ERROR_ARGUMENT,
                                 "%s: the gradient of input %d, read once per %s, cannot be an output of kind %d",
                                 forward->name, slot, rate_name(rate), (int)kind);
    }
    return TE_OK;
}

static te_status open_diff(te_diff *diff)
{
    const te_program *forward = diff->request->forward;
    const te_mem *mem = forward->mem;
    char name[sizeof forward->name + 16];
    snprintf(name, sizeof name, "%s.backward", forward->name);
    diff->forward = te_program_clone(forward);
    diff->backward = te_program_new(mem, name);
    diff->n_values = forward->n_insns;
    size_t n = (size_t)diff->n_values;
    diff->mapped = te_mem_alloc(mem, n * sizeof *diff->mapped);
    diff->adjoints = te_mem_alloc(mem, n * sizeof *diff->adjoints);
    diff->slopes = te_mem_alloc(mem, n * sizeof *diff->slopes);
    diff->flags = te_mem_zalloc(mem, n);
    diff->pending = te_mem_alloc(mem, n * sizeof *diff->pending);
    diff->opaque = te_mem_alloc(mem, 2 * n * sizeof *diff->opaque);
    if (!diff->forward || !diff->backward || !diff->mapped || !diff->adjoints || !diff->slopes || !diff->flags ||
        !diff->pending || !diff->opaque)
        return te_diff_fail_memory(diff);
    diff->backward->n_params = forward->n_params;
    diff->backward->n_rngs = forward->n_rngs;
    for (int i = 0; i < diff->n_values; i++) {
        diff->mapped[i] = TE_VALUE_NONE;
        diff->adjoints[i] = (te_adjoint){TE_VALUE_NONE, TE_VALUE_NONE};
        diff->pending[i] = TE_VALUE_NONE;
        if (diff->request->joints && diff->request->joints[i].tensor) diff->flags[i] |= TE_DIFF_TENSOR;
    }
    return TE_OK;
}

static void close_diff(te_diff *diff)
{
    const te_mem *mem = diff->request->forward->mem;
    size_t n = (size_t)diff->n_values;
    te_mem_free(mem, diff->mapped, n * sizeof *diff->mapped);
    te_mem_free(mem, diff->adjoints, n * sizeof *diff->adjoints);
    te_mem_free(mem, diff->slopes, n * sizeof *diff->slopes);
    te_mem_free(mem, diff->flags, n);
    te_mem_free(mem, diff->pending, n * sizeof *diff->pending);
    te_mem_free(mem, diff->opaque, 2 * n * sizeof *diff->opaque);
    te_program_free(diff->forward);
    te_program_free(diff->backward);
}

/* --- reverse mode ------------------------------------------------------------------------------------------------- */

static bool passes_gradient(te_opcode op, int k)
{
    switch (op) {
    case TE_PW_SIGN: case TE_PW_FLOOR: case TE_PW_CEIL: case TE_PW_ROUND: case TE_PW_TRUNC: return false;
    case TE_PW_WHERE: return k > 0;
    default: return !te_opcode_is_truth(op);
    }
}

static void classify(te_diff *diff)
{
    for (int i = 0; i < diff->n_values; i++) {
        const te_insn *insn = &diff->forward->insns[i];
        te_opcode op = (te_opcode)insn->op;
        if (op == TE_PW_LOAD && diff->request->wanted[insn->slot]) diff->flags[i] |= TE_DIFF_ACTIVE;
        if (te_opcode_reduces(op)) diff->flags[i] |= TE_DIFF_REDUCED;
        for (int k = 0; k < te_opcode_args(op); k++) {
            uint8_t inherited = diff->flags[insn->arg[k]] & (TE_DIFF_ACTIVE | TE_DIFF_REDUCED);
            if (!passes_gradient(op, k)) inherited &= (uint8_t)~TE_DIFF_ACTIVE;
            diff->flags[i] |= inherited;
        }
    }
}

/* An amax has no gradient: it is a statistic beside the result. */
static void seed_outputs(te_diff *diff)
{
    for (int i = 0; i < diff->forward->n_outputs; i++) {
        const struct te_program_output *output = &diff->forward->outputs[i];
        if (output->kind == TE_OUT_AMAX || !(diff->flags[output->value] & TE_DIFF_ACTIVE)) continue;
        te_adjoint *adjoint = &diff->adjoints[output->value];
        int32_t *part = output->kind == TE_OUT_ROW ? &adjoint->per_row : &adjoint->per_elem;
        *part = te_diff_add(diff, *part, te_diff_output_gradient(diff, i));
    }
}

static te_adjoint adjoint_of_input(te_diff *diff, int slot)
{
    te_adjoint total = {TE_VALUE_NONE, TE_VALUE_NONE};
    for (int i = 0; i < diff->n_values; i++) {
        const te_insn *insn = &diff->forward->insns[i];
        if (insn->op != TE_PW_LOAD || insn->slot != slot) continue;
        total.per_row = te_diff_add(diff, total.per_row, diff->adjoints[i].per_row);
        total.per_elem = te_diff_add(diff, total.per_elem, diff->adjoints[i].per_elem);
    }
    return total;
}

/* As the tensor of forward value i would hold it. */
static int as_stored(te_diff *diff, int i, int gradient)
{
    uint8_t stored = diff->request->joints[i].stored;
    const te_insn *insn = &diff->backward->insns[gradient];
    const te_grad_source *source = insn->op == TE_PW_LOAD ? &diff->sources[insn->slot] : NULL;
    if (source && source->kind == TE_GRAD_FROM_DOUT && diff->request->out_stored[source->index] == stored) stored = 0;
    int value = stored ? te_diff_emit(diff, (te_opcode)stored, gradient, -1, -1) : gradient;
    if (value >= 0 && diff->n_opaque < 2 * diff->n_values) diff->opaque[diff->n_opaque++] = value;
    return value;
}

/* A program that has had its turn added to the gradient that was stored before, and stored the sum. */
static void add_pending(te_diff *diff, int i)
{
    int32_t *adjoint = &diff->adjoints[i].per_elem;
    if (diff->pending[i] < 0 || diff->status != TE_OK) return;
    if (*adjoint >= 0) *adjoint = as_stored(diff, i, *adjoint);
    *adjoint = te_diff_add(diff, *adjoint, diff->pending[i]);
    diff->pending[i] = TE_VALUE_NONE;
}

static void add_all_pending(te_diff *diff)
{
    for (int i = 0; i < diff->n_values; i++) add_pending(diff, i);
}

static void propagate(te_diff *diff, int i)
{
    const te_joint *joints = diff->request->joints;
    int32_t *adjoint = &diff->adjoints[i].per_elem;
    if (joints && joints[i].last) add_all_pending(diff);
    if (!(diff->flags[i] & TE_DIFF_ACTIVE) || diff->forward->insns[i].op == TE_PW_LOAD) return;
    add_pending(diff, i);
    if ((diff->flags[i] & TE_DIFF_TENSOR) && *adjoint >= 0) *adjoint = as_stored(diff, i, *adjoint);
    if (!te_diff_by_slope(diff, i)) te_diff_propagate(diff, i);
}

static te_status derive(te_diff *diff)
{
    classify(diff);
    seed_outputs(diff);
    for (int i = diff->n_values - 1; i >= 0 && diff->status == TE_OK; i--) propagate(diff, i);
    add_all_pending(diff);
    for (int slot = 0; slot < diff->forward->n_inputs && diff->status == TE_OK; slot++)
        if (diff->request->wanted[slot]) te_diff_add_output(diff, slot, adjoint_of_input(diff, slot));
    return diff->status;
}

/* --- results ------------------------------------------------------------------------------------------------------ */

/* What counts once per row enters a sum over the elements at the first one of its row. */
static int summed_over_elements(te_diff *diff, te_adjoint adjoint)
{
    if (adjoint.per_row < 0) return adjoint.per_elem;
    int column = te_diff_emit(diff, TE_PW_COLUMN, -1, -1, -1);
    int first = te_diff_emit(diff, TE_PW_EQ, column, te_diff_const(diff, 0.0), -1);
    return te_diff_add(diff, te_diff_where(diff, first, adjoint.per_row, TE_VALUE_NONE), adjoint.per_elem);
}

te_status te_diff_add_output(te_diff *diff, int slot, te_adjoint adjoint)
{
    te_output_kind kind = diff->request->reduce[slot];
    int value = kind == TE_OUT_ROW ? te_diff_add(diff, te_diff_rowsum(diff, adjoint.per_elem), adjoint.per_row)
                                   : summed_over_elements(diff, adjoint);
    if (value < 0) value = te_diff_const(diff, 0.0);
    if (diff->status == TE_OK && te_program_output(diff->backward, kind, value) < 0) te_diff_fail_memory(diff);
    return diff->status;
}

static te_status add_again(te_diff *diff)
{
    for (int i = 0; diff->request->again && i < diff->forward->n_outputs && diff->status == TE_OK; i++) {
        if (!diff->request->again[i]) continue;
        int value = te_diff_value(diff, diff->forward->outputs[i].value);
        if (diff->status == TE_OK && te_program_output(diff->backward, TE_OUT_ELEM, value) < 0)
            te_diff_fail_memory(diff);
    }
    return diff->status;
}

/* Sources that no output needs in the end are dropped, and the slots of the others closed up. */
static te_status drop_unused_sources(te_diff *diff)
{
    te_program *backward = diff->backward;
    bool used[TE_GRAD_MAX_SOURCES] = {false};
    int16_t slots[TE_GRAD_MAX_SOURCES];
    if (te_program_prune(backward) != TE_OK) return te_diff_fail_memory(diff);
    for (int i = 0; i < backward->n_insns; i++)
        if (backward->insns[i].op == TE_PW_LOAD) used[backward->insns[i].slot] = true;

    int kept = 0;
    for (int slot = 0; slot < diff->n_sources; slot++) {
        if (!used[slot]) continue;
        diff->sources[kept] = diff->sources[slot];
        backward->input_rates[kept] = backward->input_rates[slot];
        slots[slot] = (int16_t)kept++;
    }
    for (int i = 0; i < backward->n_insns; i++)
        if (backward->insns[i].op == TE_PW_LOAD) backward->insns[i].slot = slots[backward->insns[i].slot];
    diff->n_sources = backward->n_inputs = kept;
    return TE_OK;
}

/* Stored rows become outputs of forward; then both programs change hands. */
static te_status finish(te_diff *diff, te_gradient *gradient)
{
    if (drop_unused_sources(diff) != TE_OK) return diff->status;
    for (int i = 0; i < diff->n_sources; i++) {
        te_grad_source *source = &diff->sources[i];
        if (source->kind == TE_GRAD_FROM_ROW) {
            if (te_program_output(diff->forward, TE_OUT_ROW, source->index) < 0) return te_diff_fail_memory(diff);
            source->index = gradient->n_rows++;
        }
        gradient->sources[gradient->n_sources++] = *source;
    }
    if (te_program_prune(diff->forward) != TE_OK) return te_diff_fail_memory(diff);
    gradient->forward = diff->forward;
    gradient->backward = diff->backward;
    diff->forward = diff->backward = NULL;
    return TE_OK;
}

te_status te_program_differentiate(const te_gradient_request *request, te_gradient *gradient, te_build_error *error)
{
    te_build_error unused;
    if (!error) error = &unused;
    *error = (te_build_error){.status = TE_OK};
    *gradient = (te_gradient){.forward = NULL};
    te_status status = check_request(request, error);
    if (status != TE_OK) return status;

    te_diff diff = {.request = request, .error = error, .status = TE_OK};
    status = open_diff(&diff);
    if (status == TE_OK) status = request->gradient_text ? te_diff_explicit(&diff) : derive(&diff);
    if (status == TE_OK) status = add_again(&diff);
    if (status == TE_OK) status = finish(&diff, gradient);
    if (status != TE_OK) *gradient = (te_gradient){.forward = NULL};
    close_diff(&diff);
    return status;
}

/* One of those that do without some sources: few combinations of results are ever used. */
typedef struct te_partial_gradient {
    uint32_t absent; /* bits of sources */
    te_program *backward;
    struct te_partial_gradient *next;
} partial;

te_program *te_gradient_without(te_gradient *gradient, const bool *absent)
{
    const te_mem *mem = gradient->backward->mem;
    uint32_t bits = 0;
    for (int i = 0; i < gradient->n_sources; i++) bits |= (uint32_t)absent[i] << i;
    if (!bits) return gradient->backward;
    for (const partial *p = gradient->partial; p; p = p->next)
        if (p->absent == bits) return p->backward;
    partial *made = te_mem_alloc(mem, sizeof *made);
    te_program *backward = made ? te_program_without(gradient->backward, absent) : NULL;
    if (!backward) {
        te_mem_free(mem, made, sizeof *made);
        return NULL;
    }
    *made = (partial){bits, backward, gradient->partial};
    gradient->partial = made;
    return backward;
}

void te_gradient_clear(te_gradient *gradient)
{
    while (gradient->partial) {
        partial *p = gradient->partial;
        gradient->partial = p->next;
        const te_mem *mem = p->backward->mem;
        te_program_free(p->backward);
        te_mem_free(mem, p, sizeof *p);
    }
    te_program_free(gradient->forward);
    te_program_free(gradient->backward);
    *gradient = (te_gradient){.forward = NULL};
}
