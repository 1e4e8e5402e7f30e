/* program_gradient.h - the gradient of a program against central differences in float64, as the tests of both
 * derived and stated gradients need it.
 */
#ifndef TE_TEST_PROGRAM_GRADIENT_H
#define TE_TEST_PROGRAM_GRADIENT_H

#include "test.h"
#include "program_eval.h"

enum { MAX_INPUTS = 6, MAX_OUTPUTS = 6, MAX_SIZE = 64 };

/* A program and arrays for its inputs; reduce[i] says both how input i is spread over the space and what is wanted. */
typedef struct grad_case {
    te_gradient_request request;
    int                 rows, columns;
    bool                wanted[MAX_INPUTS], again[MAX_OUTPUTS];
    te_output_kind      reduce[MAX_INPUTS];
    double              inputs[MAX_INPUTS][MAX_SIZE], params[4];
    double              outputs[MAX_OUTPUTS + TE_GRAD_MAX_SOURCES][MAX_SIZE], weights[MAX_OUTPUTS][MAX_SIZE];
    const char         *name;
} grad_case;

/* Everything wanted, and all elements of outputs again; inputs in (-2, 2), weights of the outputs in (-1, 1). */
static inline void case_open(grad_case *g, const char *name, const te_program *forward, uint64_t *seed)
{
    *g = (grad_case){.name = name, .rows = 3, .columns = 5};
    g->request = (te_gradient_request){.forward = forward, .wanted = g->wanted, .reduce = g->reduce, .again = g->again};
    for (int i = 0; i < forward->n_outputs; i++) g->again[i] = forward->outputs[i].kind == TE_OUT_ELEM;
    for (int i = 0; i < MAX_INPUTS; i++) {
        g->wanted[i] = true;
        te_rate rate = i < forward->n_inputs ? (te_rate)forward->input_rates[i] : TE_RATE_ELEM;
        g->reduce[i] = rate == TE_RATE_ELEM ? TE_OUT_ELEM : rate == TE_RATE_ROW ? TE_OUT_ROW : TE_OUT_SUM;
        for (int k = 0; k < MAX_SIZE; k++) g->inputs[i][k] = random_between(seed, -2, 2);
    }
    for (int i = 0; i < MAX_OUTPUTS; i++)
        for (int k = 0; k < MAX_SIZE; k++) g->weights[i][k] = random_between(seed, -1, 1);
    for (int i = 0; i < 4; i++) g->params[i] = random_between(seed, 0.2, 0.8);
    if (forward->n_params > 0) g->params[forward->n_params - 1] = g->columns; /* where `n` stands in formulas */
}

/* Sum over all outputs of weight * output; leaves the outputs in the case. */
static inline double objective(grad_case *g, const te_program *program)
{
    eval_operand inputs[MAX_INPUTS];
    double *outputs[MAX_OUTPUTS + TE_GRAD_MAX_SOURCES], total = 0;
    for (int i = 0; i < MAX_INPUTS; i++) inputs[i] = eval_operand_of(g->reduce[i], g->inputs[i], g->columns);
    for (int j = 0; j < MAX_OUTPUTS + TE_GRAD_MAX_SOURCES; j++) outputs[j] = g->outputs[j];
    program_eval(program, &(eval_space){g->rows, g->columns, inputs, g->params, false}, outputs);
    for (int j = 0; j < g->request.forward->n_outputs; j++) {
        te_output_kind kind = (te_output_kind)program->outputs[j].kind;
        for (int k = 0; kind != TE_OUT_AMAX && k < eval_output_size(kind, g->rows, g->columns); k++)
            total += g->weights[j][k] * g->outputs[j][k];
    }
    return total;
}

static inline eval_operand source_operand(grad_case *g, const te_gradient *gradient, te_grad_source source)
{
    int own = g->request.forward->n_outputs;
    te_output_kind kind = TE_OUT_ROW;
    const double *data = g->outputs[source.index];
    if (source.kind == TE_GRAD_FROM_INPUT) data = g->inputs[source.index], kind = g->reduce[source.index];
    else if (source.kind == TE_GRAD_FROM_ROW) data = g->outputs[own + source.index];
    else kind = (te_output_kind)gradient->forward->outputs[source.index].kind;
    if (source.kind == TE_GRAD_FROM_DOUT) data = g->weights[source.index];
    return eval_operand_of(kind, data, g->columns);
}

static int kinks, compared; /* places where the two one-sided differences disagree */

static inline void compare_element(grad_case *g, int input, int k, double derived)
{
    const double step = 1e-5;
    double *at = &g->inputs[input][k], x = *at;
    double middle = objective(g, g->request.forward);
    *at = x + step;
    double above = objective(g, g->request.forward);
    *at = x - step;
    double below = objective(g, g->request.forward);
    *at = x;
    double right = (above - middle) / step, left = (middle - below) / step, numeric = (above - below) / (2 * step);
    compared++;
    if (!isfinite(numeric) || fabs(right - left) > 1e-2 * (1 + fabs(numeric))) {
        kinks++;
        return;
    }
    CHECK_MSG(fabs(derived - numeric) <= 2e-5 * (1 + fabs(numeric) + fabs(middle)),
              "%s: input %d element %d: %.9g, difference %.9g", g->name, input, k, derived, numeric);
}

static inline void check_programs(const te_gradient *gradient, const char *name)
{
    char wrong[160];
    CHECK_MSG(te_program_verify(gradient->forward, wrong, sizeof wrong), "%s: %s", name, wrong);
    CHECK_MSG(te_program_verify(gradient->backward, wrong, sizeof wrong), "%s: %s", name, wrong);
    CHECK(gradient->n_sources == gradient->backward->n_inputs);
}

/* Differentiates, evaluates and compares; the gradient stays open for further questions. */
static inline void check_case(grad_case *g, te_gradient *gradient)
{
    te_build_error error;
    te_status status = te_program_differentiate(&g->request, gradient, &error);
    CHECK_MSG(status == TE_OK, "%s: %s", g->name, error.message);
    if (status != TE_OK) return;
    check_programs(gradient, g->name);
    objective(g, gradient->forward);

    eval_operand sources[TE_GRAD_MAX_SOURCES];
    double results[MAX_INPUTS + MAX_OUTPUTS][MAX_SIZE], *outputs[MAX_INPUTS + MAX_OUTPUTS];
    for (int i = 0; i < gradient->n_sources; i++) sources[i] = source_operand(g, gradient, gradient->sources[i]);
    for (int i = 0; i < MAX_INPUTS + MAX_OUTPUTS; i++) outputs[i] = results[i];
    program_eval(gradient->backward, &(eval_space){g->rows, g->columns, sources, g->params, false}, outputs);
    int output = 0;
    for (int i = 0; i < g->request.forward->n_inputs; i++) {
        if (!g->wanted[i]) continue;
        CHECK(output < gradient->backward->n_outputs && gradient->backward->outputs[output].kind == g->reduce[i]);
        for (int k = 0; k < eval_output_size(g->reduce[i], g->rows, g->columns); k++)
            compare_element(g, i, k, results[output][k]);
        output++;
    }
    objective(g, gradient->forward);
    for (int i = 0; i < g->request.forward->n_outputs; i++) {
        if (!g->request.again || !g->again[i]) continue;
        size_t bytes = (size_t)(g->rows * g->columns) * sizeof(double);
        CHECK_MSG(memcmp(results[output], g->outputs[i], bytes) == 0, "%s: output %d again differs", g->name, i);
        output++;
    }
    CHECK(output == gradient->backward->n_outputs);
}

static inline void check_and_clear(grad_case *g)
{
    te_gradient gradient;
    check_case(g, &gradient);
    te_gradient_clear(&gradient);
}

#endif
