/* formula.c - te_formula_compile: a formula over declared inputs and parameters becomes a program. */
#include "formula.h"

#include <stdio.h>

typedef struct compile_scope {
    te_program       *program;
    const te_formula *formula;
} compile_scope;

/* Slots count present inputs only. */
static int input_slot(const te_formula *formula, int input)
{
    int slot = 0;
    for (int i = 0; i < input; i++) slot += te_formula_has_input(formula, i);
    return slot;
}

static int resolve(void *user, const char *name, int length)
{
    const compile_scope *scope = user;
    const te_formula *formula = scope->formula;
    for (int i = 0; i < formula->n_inputs; i++) {
        if (!te_name_equal(name, length, formula->input_names[i])) continue;
        if (te_formula_has_input(formula, i)) return te_program_load(scope->program, input_slot(formula, i));
        return te_program_const(scope->program, formula->input_defaults ? formula->input_defaults[i] : 0.0);
    }
    for (int i = 0; i < formula->n_params; i++)
        if (te_name_equal(name, length, formula->param_names[i])) return te_program_param(scope->program, i);
    return TE_VALUE_NONE;
}

static bool name_at(void *user, int index, char *name, size_t size)
{
    const te_formula *formula = ((compile_scope *)user)->formula;
    if (index >= formula->n_inputs + formula->n_params) return false;
    const char *source = index < formula->n_inputs ? formula->input_names[index]
                                                   : formula->param_names[index - formula->n_inputs];
    snprintf(name, size, "%s", source);
    return true;
}

static te_status declare_inputs(te_program *program, const te_formula *formula)
{
    for (int i = 0; i < formula->n_inputs; i++) {
        if (!te_formula_has_input(formula, i)) continue;
        te_rate rate = formula->input_rates ? formula->input_rates[i] : TE_RATE_ELEM;
        if (te_program_input(program, rate) < 0) return TE_ERROR_MEMORY;
    }
    if (program->n_params < formula->n_params) program->n_params = formula->n_params;
    return TE_OK;
}

static te_status declare_outputs(te_formula_parser *parser, const te_formula *formula)
{
    for (int i = 0; i < formula->n_outputs; i++) {
        const char *name = formula->output_names[i];
        int value = te_formula_lookup(parser, name, (int)strlen(name));
        if (value == TE_VALUE_NONE)
            return te_build_fail(parser->error, TE_ERROR_ARGUMENT,
                                 "%.47s: the formula never assigns its output '%.60s'", parser->name, name);
        if (value < 0) return parser->error->status;
        /* a uniform value fills the space */
        bool row = !formula->elements && te_program_rate(parser->program, value) == TE_RATE_ROW;
        if (te_program_output(parser->program, row ? TE_OUT_ROW : TE_OUT_ELEM, value) < 0) return TE_ERROR_MEMORY;
    }
    return te_program_prune(parser->program);
}

te_program *te_formula_compile(const te_mem *mem, const char *name, const te_formula *formula, te_build_error *error)
{
    te_build_error unused;
    if (!error) error = &unused;
    *error = (te_build_error){.status = TE_OK};
    te_program *program = te_program_new(mem, name);
    if (!program) {
        te_build_fail(error, TE_ERROR_MEMORY, "%.47s: out of memory while building the formula", name ? name : "");
        return NULL;
    }
    compile_scope names = {program, formula};
    te_formula_scope scope = {&names, resolve, name_at};
    te_formula_parser parser = {.program = program, .name = program->name, .text = formula->text, .scope = &scope,
                                .error = error, .row_length_slot = formula->n_params};
    te_status status = declare_inputs(program, formula);
    if (status == TE_OK) status = te_formula_parse(&parser);
    if (status == TE_OK) status = declare_outputs(&parser, formula);
    te_formula_close(&parser);
    if (status == TE_OK) return program;
    te_formula_checked(&parser, -1);
    te_program_free(program);
    return NULL;
}
