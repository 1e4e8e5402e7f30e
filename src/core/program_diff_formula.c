/* program_diff_formula.c - gradients that an operation states itself.
 *
 * The formula is compiled into the backward program; each name it uses for the first time becomes a source:
 *
 *      x          forward input          dy      gradient of output y
 *      y          saved output           rstd    per row in the forward formula: one more output of forward
 *
 * To find a value by its name in the forward formula, the formula is compiled once more with that name as its output,
 * and appended to the copy of forward, where equal instructions fall together.
 */
#include "formula.h"
#include "program_diff.h"

#include <stdio.h>

/* --- names of the forward formula --------------------------------------------------------------------------------- */

/* Values of the target for those inputs that the program reads. The target is backward or the copy of forward. */
static te_status bind_inputs(te_diff *diff, const te_program *program, te_program *target, int *inputs)
{
    for (int i = 0; i < program->n_inputs; i++) inputs[i] = -1;
    for (int i = 0; i < program->n_insns; i++) {
        const te_insn *insn = &program->insns[i];
        if (insn->op != TE_PW_LOAD) continue;
        inputs[insn->slot] = target == diff->backward ? te_diff_forward_input(diff, insn->slot)
                                                      : te_program_load(target, insn->slot);
        if (inputs[insn->slot] < 0) return te_diff_fail_memory(diff);
    }
    return diff->status;
}

/* The value of the only output of `program` in the target, or -1. */
static int append_named(te_diff *diff, const te_program *program, te_program *target)
{
    size_t bytes = (size_t)program->n_inputs * sizeof(int);
    int value = -1, *inputs = te_mem_alloc(target->mem, bytes);
    if (!inputs) return te_diff_fail_memory(diff), -1;
    if (bind_inputs(diff, program, target, inputs) == TE_OK &&
        te_program_append(target, program, inputs, 0, 0, &value) != TE_OK) {
        te_diff_fail_memory(diff);
        value = -1;
    }
    te_mem_free(target->mem, inputs, bytes);
    return value;
}

static int use_named(te_diff *diff, const te_program *program, const char *name)
{
    switch (te_program_rate(program, program->outputs[0].value)) {
    case TE_RATE_UNIFORM: return append_named(diff, program, diff->backward);
    case TE_RATE_ROW: {
        int value = append_named(diff, program, diff->forward);
        return value < 0 ? -1 : te_diff_source(diff, TE_GRAD_FROM_ROW, value, TE_RATE_ROW);
    }
    default:
        diff->status = te_build_fail(diff->error, TE_ERROR_ARGUMENT,
                                     "%s: the gradient formula uses '%.40s', which the forward formula has once per "
                                     "element; only outputs and values per row are kept",
                                     diff->request->forward->name, name);
        return -1;
    }
}

static int resolve_assigned(te_diff *diff, const char *text, int length)
{
    char name[64];
    const char *const names[] = {name};
    if (length >= (int)sizeof name) return TE_VALUE_NONE;
    snprintf(name, sizeof name, "%.*s", length, text);
    if (te_name_equal(name, length, "n")) return TE_VALUE_NONE;
    te_formula formula = *diff->request->formula;
    formula.n_outputs = 1;
    formula.output_names = names;
    te_build_error error;
    te_program *program = te_formula_compile(diff->backward->mem, diff->request->forward->name, &formula, &error);
    if (!program) return error.status == TE_ERROR_MEMORY ? (te_diff_fail_memory(diff), -1) : TE_VALUE_NONE;
    int value = use_named(diff, program, name);
    te_program_free(program);
    return value;
}

/* --- scope -------------------------------------------------------------------------------------------------------- */

static int output_index(const te_formula *formula, const char *name, int length)
{
    for (int i = 0; i < formula->n_outputs; i++)
        if (te_name_equal(name, length, formula->output_names[i])) return i;
    return -1;
}

/* Inputs and parameters: TE_VALUE_NONE for any other name. */
static int resolve_declared(te_diff *diff, const char *name, int length)
{
    const te_formula *formula = diff->request->formula;
    int slot = 0;
    for (int i = 0; i < formula->n_inputs; i++) {
        bool present = te_formula_has_input(formula, i);
        if (te_name_equal(name, length, formula->input_names[i])) {
            if (present) return te_diff_forward_input(diff, slot);
            return te_diff_const(diff, formula->input_defaults ? formula->input_defaults[i] : 0.0);
        }
        slot += present;
    }
    for (int i = 0; i < formula->n_params; i++)
        if (te_name_equal(name, length, formula->param_names[i])) return te_program_param(diff->backward, i);
    return TE_VALUE_NONE;
}

static int resolve(void *user, const char *name, int length)
{
    te_diff *diff = user;
    const te_formula *formula = diff->request->formula;
    int value = resolve_declared(diff, name, length);
    if (value == TE_VALUE_NONE && diff->status == TE_OK) {
        int output = output_index(formula, name, length), gradient = -1;
        if (length > 1 && name[0] == 'd') gradient = output_index(formula, name + 1, length - 1);
        if (output >= 0) value = te_diff_forward_output(diff, output);
        else if (gradient >= 0) value = te_diff_output_gradient(diff, gradient);
        else value = resolve_assigned(diff, name, length);
    }
    return diff->status == TE_OK ? value : -1;
}

static bool name_at(void *user, int index, char *name, size_t size)
{
    const te_formula *formula = ((te_diff *)user)->request->formula;
    int n_inputs = formula->n_inputs, n_outputs = formula->n_outputs;
    if (index < n_inputs) return snprintf(name, size, "%s", formula->input_names[index]), true;
    index -= n_inputs;
    if (index < formula->n_params) return snprintf(name, size, "%s", formula->param_names[index]), true;
    index -= formula->n_params;
    if (index < n_outputs) return snprintf(name, size, "%s", formula->output_names[index]), true;
    index -= n_outputs;
    return index < n_outputs ? snprintf(name, size, "d%s", formula->output_names[index]), true : false;
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

/* Values as frequent as the input count as they stand, more frequent ones are summed as the request says. */
static te_adjoint adjoint_of_value(const te_diff *diff, int slot, int value)
{
    bool per_elem = diff->forward->input_rates[slot] == TE_RATE_ELEM ||
                    te_program_rate(diff->backward, value) == TE_RATE_ELEM;
    return per_elem ? (te_adjoint){TE_VALUE_NONE, value} : (te_adjoint){value, TE_VALUE_NONE};
}

static te_status add_gradient(te_diff *diff, te_formula_parser *parser, const char *input, int slot)
{
    for (int i = 0; i < parser->n_symbols; i++) {
        const te_formula_symbol *symbol = &parser->symbols[parser->n_symbols - 1 - i];
        if (symbol->name[0] == 'd' && te_name_equal(symbol->name + 1, symbol->length - 1, input))
            return te_diff_add_output(diff, slot, adjoint_of_value(diff, slot, symbol->value));
    }
    return diff->status = te_build_fail(diff->error, TE_ERROR_ARGUMENT,
                                        "%s: the gradient formula never assigns 'd%.60s'", parser->name, input);
}

te_status te_diff_explicit(te_diff *diff)
{
    const te_formula *formula = diff->request->formula;
    te_formula_scope scope = {diff, resolve, name_at};
    te_formula_parser parser = {.program = diff->backward, .name = diff->backward->name,
                                .text = diff->request->gradient_text, .scope = &scope, .error = diff->error,
                                .row_length_slot = formula->n_params};
    te_status status = te_formula_parse(&parser);
    if (diff->status == TE_OK) diff->status = status;
    int slot = 0;
    for (int i = 0; i < formula->n_inputs && diff->status == TE_OK; i++) {
        if (!te_formula_has_input(formula, i)) continue;
        if (diff->request->wanted[slot]) add_gradient(diff, &parser, formula->input_names[i], slot);
        slot++;
    }
    te_formula_close(&parser);
    return diff->status;
}
