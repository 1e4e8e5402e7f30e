/* test_program_diff.c - gradients of programs against central differences in float64: every opcode, the layers of a
 * Transformer, gradients given as formulas, random programs; and how many row sums the derived programs take.
 */
#include "test.h"
#include "program_eval.h"
#include "core/program_internal.h"

enum { MAX_INPUTS = 6, MAX_OUTPUTS = 6, MAX_SIZE = 64 };

/* A program and arrays for its inputs; reduce[i] says both how input i is spread over the space and what is wanted. */
typedef struct grad_case {
    te_gradient_request request;
    int                 rows, columns;
    bool                wanted[MAX_INPUTS];
    te_output_kind      reduce[MAX_INPUTS];
    double              inputs[MAX_INPUTS][MAX_SIZE], params[4];
    double              outputs[MAX_OUTPUTS + TE_GRAD_MAX_SOURCES][MAX_SIZE], weights[MAX_OUTPUTS][MAX_SIZE];
    const char         *name;
} grad_case;

/* Everything wanted; inputs in (-2, 2), weights of the outputs in (-1, 1). */
static void case_open(grad_case *g, const char *name, const te_program *forward, uint64_t *seed)
{
    *g = (grad_case){.name = name, .rows = 3, .columns = 5};
    g->request = (te_gradient_request){.forward = forward, .wanted = g->wanted, .reduce = g->reduce};
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
static double objective(grad_case *g, const te_program *program)
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

static eval_operand source_operand(grad_case *g, const te_gradient *gradient, te_grad_source source)
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

static void compare_element(grad_case *g, int input, int k, double derived)
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

static void check_programs(const te_gradient *gradient, const char *name)
{
    te_build_error error = {.status = TE_OK};
    CHECK_MSG(te_program_verify(gradient->forward, &error) == TE_OK, "%s: %s", name, error.message);
    CHECK_MSG(te_program_verify(gradient->backward, &error) == TE_OK, "%s: %s", name, error.message);
    CHECK(gradient->n_sources == gradient->backward->n_inputs);
}

/* Differentiates, evaluates and compares; the gradient stays open for further questions. */
static void check_case(grad_case *g, te_gradient *gradient)
{
    te_build_error error;
    te_status status = te_program_differentiate(&g->request, gradient, &error);
    CHECK_MSG(status == TE_OK, "%s: %s", g->name, error.message);
    if (status != TE_OK) return;
    check_programs(gradient, g->name);
    objective(g, gradient->forward);

    eval_operand sources[TE_GRAD_MAX_SOURCES];
    double results[MAX_INPUTS][MAX_SIZE], *outputs[MAX_INPUTS];
    for (int i = 0; i < gradient->n_sources; i++) sources[i] = source_operand(g, gradient, gradient->sources[i]);
    for (int i = 0; i < MAX_INPUTS; i++) outputs[i] = results[i];
    program_eval(gradient->backward, &(eval_space){g->rows, g->columns, sources, g->params, false}, outputs);
    int output = 0;
    for (int i = 0; i < g->request.forward->n_inputs; i++) {
        if (!g->wanted[i]) continue;
        CHECK(output < gradient->backward->n_outputs && gradient->backward->outputs[output].kind == g->reduce[i]);
        for (int k = 0; k < eval_output_size(g->reduce[i], g->rows, g->columns); k++)
            compare_element(g, i, k, results[output][k]);
        output++;
    }
    CHECK(output == gradient->backward->n_outputs);
}

static void check_and_clear(grad_case *g)
{
    te_gradient gradient;
    check_case(g, &gradient);
    te_gradient_clear(&gradient);
}

/* --- every opcode ------------------------------------------------------------------------------------------------- */

static int emit(te_program *p, te_opcode op, int a, int b) { return te_program_emit(p, op, a, b, -1); }

/* a^2 + 0.5: a positive argument for those that need one. */
static int positive(te_program *p, int a)
{
    return emit(p, TE_PW_ADD, emit(p, TE_PW_MUL, a, a), te_program_const(p, 0.5));
}

static bool needs_positive(te_opcode op)
{
    return op == TE_PW_SQRT || op == TE_PW_RSQRT || op == TE_PW_RECIP || op == TE_PW_LOG || op == TE_PW_POW;
}

/* Arguments: input 0 read per element, input 1 declared with `rate`, so each broadcast meets each opcode. */
static int apply_opcode(te_program *p, te_opcode op, int x, int y, bool exchanged)
{
    int a = exchanged ? y : x, b = exchanged ? x : y;
    if (op == TE_PW_KEEP || op == TE_PW_RANDOM || op == TE_PW_NORMAL)
        return emit(p, TE_PW_MUL, y, te_program_generator(p, op, 0, te_program_const(p, 0.4)));
    if (op == TE_PW_DIV) b = positive(p, b);
    if (needs_positive(op)) a = positive(p, a);
    if (te_opcode_args(op) == 0) return emit(p, TE_PW_MUL, y, te_program_emit(p, op, -1, -1, -1));
    if (te_opcode_args(op) == 1) return emit(p, op, emit(p, TE_PW_MUL, a, b), -1);
    if (te_opcode_args(op) == 3) return te_program_emit(p, op, emit(p, TE_PW_LT, a, b), a, b);
    return emit(p, op, a, b);
}

static bool is_rounding(te_opcode op) { return op == TE_PW_TO_BF16 || op == TE_PW_TO_F16 || op == TE_PW_TO_F32; }

static void test_opcodes(void)
{
    uint64_t seed = 3;
    for (int op = TE_PW_COLUMN; op < TE_PW_COUNT; op++)
        for (int variant = 0; variant < 6; variant++) {
            if (is_rounding((te_opcode)op)) continue;
            te_program *p = te_program_new(&te_mem_libc, te_opcode_name((te_opcode)op));
            int x = te_program_input(p, TE_RATE_ELEM), y = te_program_input(p, (te_rate)(variant % 3));
            int r = apply_opcode(p, (te_opcode)op, x, y, variant >= 3);
            te_program_output(p, TE_OUT_ELEM, emit(p, TE_PW_SIN, r, -1));
            grad_case g;
            case_open(&g, p->name, p, &seed);
            check_and_clear(&g);
            te_program_free(p);
        }
}

/* Roundings pass the gradient on, comparisons and steps have none. */
static void test_no_gradient(void)
{
    static const te_opcode passing[] = {TE_PW_TO_BF16, TE_PW_TO_F16, TE_PW_TO_F32};
    static const te_opcode steps[] = {TE_PW_SIGN,  TE_PW_FLOOR, TE_PW_CEIL,    TE_PW_ROUND,
                                      TE_PW_TRUNC, TE_PW_ISNAN, TE_PW_ISFINITE};
    bool wanted[] = {true};
    te_output_kind reduce[] = {TE_OUT_ELEM};
    for (size_t i = 0; i < 10; i++) {
        bool passes = i < 3;
        te_program *p = te_program_new(&te_mem_libc, "step");
        int x = te_program_input(p, TE_RATE_ELEM);
        te_program_output(p, TE_OUT_ELEM, emit(p, passes ? passing[i] : steps[i - 3], x, -1));
        te_gradient_request request = {.forward = p, .wanted = wanted, .reduce = reduce};
        te_gradient gradient;
        CHECK(te_program_differentiate(&request, &gradient, NULL) == TE_OK);
        CHECK(gradient.n_sources == passes && gradient.backward->n_insns == 1);
        CHECK(passes || te_program_is_const(gradient.backward, gradient.backward->outputs[0].value, 0));
        te_gradient_clear(&gradient);
        te_program_free(p);
    }
}

/* An infinite or NaN adjoint stays away from the side that was not chosen; ties go where program.h says. */
static void test_choices(void)
{
    static const te_opcode ops[] = {TE_PW_MIN, TE_PW_MAX};
    bool wanted[] = {true, true};
    te_output_kind reduce[] = {TE_OUT_ELEM, TE_OUT_ELEM};
    for (int i = 0; i < 2; i++) {
        te_program *p = te_program_new(&te_mem_libc, "choice");
        int x = te_program_input(p, TE_RATE_ELEM), y = te_program_input(p, TE_RATE_ELEM);
        te_program_output(p, TE_OUT_ELEM, emit(p, ops[i], x, y));
        te_gradient_request request = {.forward = p, .wanted = wanted, .reduce = reduce};
        te_gradient gradient;
        CHECK(te_program_differentiate(&request, &gradient, NULL) == TE_OK);
        double values[][3] = {{1, 2, 1}, {2, 1, 1}, {INFINITY, NAN, 5}}, dx[3], dy[3], *outputs[] = {dx, dy};
        eval_operand sources[3];
        for (int k = 0; k < gradient.n_sources; k++) {
            te_grad_source source = gradient.sources[k];
            sources[k] = (eval_operand){values[source.kind == TE_GRAD_FROM_DOUT ? 2 : source.index], 3, 1};
        }
        program_eval(gradient.backward, &(eval_space){1, 3, sources, NULL, false}, outputs);
        double *chosen = i == 0 ? dx : dy, *other = i == 0 ? dy : dx;
        CHECK(chosen[0] == INFINITY && chosen[1] == 0 && chosen[2] == 5);
        CHECK(other[0] == 0 && isnan(other[1]) && other[2] == 0);
        te_gradient_clear(&gradient);
        te_program_free(p);
    }
}

/* As an output per element where the value is no output per row. */
static void add_output(te_program *p, te_output_kind kind, int value)
{
    bool elem = te_program_rate(p, value) == TE_RATE_ELEM;
    te_program_output(p, kind == TE_OUT_ROW && elem ? TE_OUT_ELEM : kind, value);
}

/* --- broadcasts --------------------------------------------------------------------------------------------------- */

/* y = tanh(x * a) * b + c over every way to declare and to spread a, b and c. */
static void test_broadcasts(void)
{
    static const struct { te_rate rate; te_output_kind kind; } forms[] = {
        {TE_RATE_ELEM, TE_OUT_ELEM}, {TE_RATE_ELEM, TE_OUT_ROW}, {TE_RATE_ELEM, TE_OUT_COLSUM},
        {TE_RATE_ELEM, TE_OUT_SUM},  {TE_RATE_ROW, TE_OUT_ROW},  {TE_RATE_ROW, TE_OUT_SUM},
        {TE_RATE_UNIFORM, TE_OUT_SUM}};
    static const te_output_kind out_kinds[] = {TE_OUT_ELEM, TE_OUT_COLSUM, TE_OUT_SUM, TE_OUT_ROW};
    uint64_t seed = 11;
    for (int first = 0; first < 7; first++)
        for (int second = 0; second < 7; second++)
            for (int out = 0; out < 4; out++) {
                te_program *p = te_program_new(&te_mem_libc, "broadcast");
                int x = te_program_input(p, TE_RATE_ELEM), a = te_program_input(p, forms[first].rate);
                int b = te_program_input(p, forms[second].rate);
                int lone = emit(p, TE_PW_EXP, emit(p, TE_PW_SIN, b, -1), -1);
                int bent = emit(p, TE_PW_TANH, emit(p, TE_PW_MUL, x, a), -1);
                int y = emit(p, TE_PW_ADD, emit(p, TE_PW_MUL, bent, lone), b);
                if (out_kinds[out] == TE_OUT_ROW) y = emit(p, TE_PW_MUL, emit(p, TE_PW_ROWSUM, y, -1), b);
                add_output(p, out_kinds[out], y);
                add_output(p, te_program_rate(p, lone) == TE_RATE_ELEM ? TE_OUT_SUM : TE_OUT_ROW, lone);
                te_program_output(p, TE_OUT_AMAX, y);
                grad_case g;
                case_open(&g, "broadcast", p, &seed);
                g.reduce[1] = forms[first].kind;
                g.reduce[2] = forms[second].kind;
                check_and_clear(&g);
                g.wanted[0] = g.wanted[2] = false;
                check_and_clear(&g);
                te_program_free(p);
            }
}

/* --- layers ------------------------------------------------------------------------------------------------------- */

typedef struct layer {
    const char    *name, *text;
    int            n_inputs;
    const char    *inputs[4];
    te_rate        rates[4];
    te_output_kind reduce[4];
    const char    *outputs[2];
    const char    *gradient; /* explicit one, or NULL */
    int            max_rowsums, max_rows; /* of the derived gradient and of what it stores */
} layer;

#define ELEM TE_RATE_ELEM
#define ROW  TE_RATE_ROW

static const layer layers[] = {
    {"layer_norm", "mean = rowmean(x); d = x - mean; rstd = rsqrt(rowmean(d * d) + eps); y = d * rstd * gamma + beta",
     3, {"x", "gamma", "beta"}, {ELEM, ELEM, ELEM}, {TE_OUT_ELEM, TE_OUT_COLSUM, TE_OUT_COLSUM}, {"y"},
     "h = (x - mean) * rstd; g = dy * gamma; dx = rstd * (g - rowmean(g) - h * rowmean(g * h)); dgamma = dy * h; "
     "dbeta = dy",
     2, 2},
    {"rms_norm", "rstd = rsqrt(rowmean(x * x) + eps); y = x * rstd * gamma", 2, {"x", "gamma"}, {ELEM, ELEM},
     {TE_OUT_ELEM, TE_OUT_COLSUM}, {"y"},
     "g = dy * gamma; dx = rstd * (g - x * (rstd * rstd * rowmean(g * x))); dgamma = dy * x * rstd", 1, 1},
    {"l2_norm", "y = x / sqrt(rowsum(x * x) + eps)", 1, {"x"}, {ELEM}, {TE_OUT_ELEM}, {"y"}, NULL, 1, 2},
    {"softmax", "e = exp(x - rowmax(x)); y = e / rowsum(e)", 1, {"x"}, {ELEM}, {TE_OUT_ELEM}, {"y"},
     "g = dy * y; dx = g - y * rowsum(g)", 3, 2},
    {"log_softmax", "m = rowmax(x); lse = m + log(rowsum(exp(x - m))); y = x - lse",
     1, {"x"}, {ELEM}, {TE_OUT_ELEM}, {"y"},
     "dx = dy - exp(x - lse) * rowsum(dy)", 1, 3},
    {"cross_entropy", "m = rowmax(x); lse = m + log(rowsum(exp(x - m))); "
     "loss = where(t >= 0, lse - rowsum(where(column() == t, x, 0)), 0)",
     2, {"x", "t"}, {ELEM, ROW}, {TE_OUT_ELEM, TE_OUT_ROW}, {"loss"},
     "dx = where(t >= 0, dloss, 0) * (exp(x - lse) - (column() == t)); dt = 0", 0, 2},
    {"gelu", "y = 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x^3)))",
     1, {"x"}, {ELEM}, {TE_OUT_ELEM}, {"y"}, NULL, 0, 0},
    {"gelu_erf", "y = 0.5 * x * (1 + erf(x * 0.7071067811865476))", 1, {"x"}, {ELEM}, {TE_OUT_ELEM}, {"y"}, NULL, 0, 0},
    {"swiglu", "y = a * sigmoid(a) * b", 2, {"a", "b"}, {ELEM, ELEM}, {TE_OUT_ELEM, TE_OUT_ELEM}, {"y"}, NULL, 0, 0},
    {"dropout", "y = x * keep(p) / (1 - p)", 1, {"x"}, {ELEM}, {TE_OUT_ELEM}, {"y"},
     "dx = dy * keep(p) / (1 - p)", 0, 0},
    {"residual_dropout", "y = r + s * (keep(p) / (1 - p)) * (x + bias)",
     4, {"x", "bias", "r", "s"}, {ELEM, ELEM, ELEM, ROW}, {TE_OUT_ELEM, TE_OUT_COLSUM, TE_OUT_ELEM, TE_OUT_ROW}, {"y"},
     NULL, 1, 0},
    {"clamped", "y = clamp(x, -1, 1) * relu(z); w = max(x, z) - min(x * x, z)", 2, {"x", "z"}, {ELEM, ELEM},
     {TE_OUT_ELEM, TE_OUT_ELEM}, {"y", "w"}, NULL, 0, 0},
    {"powers", "y = square(x) ^ z + (x * x + 1) ^ 1.5 + x ^ 4 + x ^ 3 + x ^ 2 * z",
     2, {"x", "z"}, {ELEM, ROW}, {TE_OUT_ELEM, TE_OUT_ROW}, {"y"}, NULL, 1, 0},
    {"variance", "m = rowmean(x); y = rowmean((x - m) ^ 2)", 1, {"x"}, {ELEM}, {TE_OUT_ELEM}, {"y"}, NULL, 1, 1},
    {"signs", "s = rowsum(x); y = (z * -(x * r) - -(z * r) * -(x * r) / (r * r + 1)) * s",
     3, {"x", "z", "r"}, {ELEM, ELEM, ROW}, {TE_OUT_ELEM, TE_OUT_ELEM, TE_OUT_ROW}, {"y"}, NULL, 2, 1},
    {"signed_product", "s = rowsum(x); y = z * -(x * r) * s", 3, {"x", "z", "r"}, {ELEM, ELEM, ROW},
     {TE_OUT_ELEM, TE_OUT_ELEM, TE_OUT_ROW}, {"y"}, NULL, 2, 1},
    {"extremes", "y = x * (rowmax(x) - rowmin(x))", 1, {"x"}, {ELEM}, {TE_OUT_ELEM}, {"y"}, NULL, 3, 3},
};

static const char *const layer_params[] = {"eps", "p"};

static te_formula layer_formula(const layer *l)
{
    return (te_formula){.text = l->text, .n_inputs = l->n_inputs, .n_params = 2, .n_outputs = l->outputs[1] ? 2 : 1,
                        .input_names = l->inputs, .input_rates = l->rates, .param_names = layer_params,
                        .output_names = l->outputs};
}

static void open_layer(grad_case *g, const layer *l, const te_formula *formula, const te_program *forward,
                       uint64_t *seed)
{
    case_open(g, l->name, forward, seed);
    g->params[2] = g->columns;
    g->request.formula = formula;
    for (int i = 0; i < l->n_inputs; i++) g->reduce[i] = l->reduce[i];
    if (strcmp(l->name, "cross_entropy") == 0) {
        g->wanted[1] = false;
        g->inputs[1][0] = 3, g->inputs[1][1] = -1, g->inputs[1][2] = 0;
    }
}

static void test_layers(void)
{
    uint64_t seed = 21;
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
        const layer *l = &layers[i];
        te_formula formula = layer_formula(l);
        te_build_error error;
        te_program *forward = te_formula_compile(&te_mem_libc, l->name, &formula, &error);
        CHECK_MSG(forward != NULL, "%s", error.message);
        if (!forward) continue;
        grad_case g;
        te_gradient gradient;
        open_layer(&g, l, &formula, forward, &seed);
        check_case(&g, &gradient);
        int rowsums = count_opcode(gradient.backward, TE_PW_ROWSUM);
        CHECK_MSG(rowsums <= l->max_rowsums, "%s: %d row sums", l->name, rowsums);
        CHECK_MSG(gradient.n_rows <= l->max_rows, "%s: %d stored rows", l->name, gradient.n_rows);
        CHECK_MSG(count_opcode(gradient.backward, TE_PW_RSQRT) == 0, "%s: rstd is not stored but computed", l->name);
        te_gradient_clear(&gradient);
        g.request.formula = NULL; /* the row's length is then counted */
        check_and_clear(&g);
        te_program_free(forward);
    }
}

static void test_gradient_formulas(void)
{
    uint64_t seed = 31;
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
        const layer *l = &layers[i];
        if (!l->gradient) continue;
        te_formula formula = layer_formula(l);
        te_program *forward = te_formula_compile(&te_mem_libc, l->name, &formula, NULL);
        grad_case g;
        te_gradient gradient;
        open_layer(&g, l, &formula, forward, &seed);
        g.request.gradient_text = l->gradient;
        check_case(&g, &gradient);
        int rowsums = count_opcode(gradient.backward, TE_PW_ROWSUM);
        CHECK(strcmp(l->name, "softmax") != 0 || (rowsums == 1 && gradient.n_sources == 2 && gradient.n_rows == 0));
        CHECK(strcmp(l->name, "cross_entropy") != 0 || (rowsums == 0 && gradient.n_rows == 1));
        CHECK(strcmp(l->name, "layer_norm") != 0 || (rowsums == 2 && gradient.n_rows == 2));
        te_gradient_clear(&gradient);
        te_program_free(forward);
    }
}

/* Of a broadcast input the formula states what one element contributes, of a ROW input the whole. */
static void test_gradient_formula_reductions(void)
{
    static const char *const inputs[] = {"x", "b", "r", "absent"}, *const outputs[] = {"y"};
    static const te_rate rates[] = {TE_RATE_ELEM, TE_RATE_ELEM, TE_RATE_ROW, TE_RATE_ELEM};
    static const bool present[] = {true, true, true, false};
    static const double defaults[] = {0, 0, 0, 2};
    uint64_t seed = 41;
    te_formula formula = {.text = "k = eps * 3; s = rowsum(x); y = absent * x * b * k + r * s", .n_inputs = 4,
                          .n_params = 1, .n_outputs = 1, .input_names = inputs, .input_rates = rates,
                          .input_defaults = defaults, .present = present, .param_names = layer_params,
                          .output_names = outputs};
    te_program *forward = te_formula_compile(&te_mem_libc, "mixed", &formula, NULL);
    static const char *const texts[] = {
        "dx = absent * dy * b * k + r * rowsum(dy); db = absent * dy * x * k; dr = rowsum(dy) * s",
        "dx = absent * dy * b * k + r * rowsum(dy); db = absent * dy * x * k; dr = dy * s"};
    for (int i = 0; i < 4; i++) {
        grad_case g;
        case_open(&g, "mixed", forward, &seed);
        g.request.formula = &formula;
        g.request.gradient_text = texts[i % 2];
        g.reduce[1] = i < 2 ? TE_OUT_ROW : TE_OUT_COLSUM;
        g.reduce[2] = i < 2 ? TE_OUT_ROW : TE_OUT_SUM;
        check_and_clear(&g);
    }
    te_program_free(forward);
}

static void test_errors(void)
{
    static const struct { const char *text, *part; } cases[] = {
        {"dx = dy * gama; dgamma = dy; dbeta = dy", "did you mean 'gamma'?"},
        {"dx = dy * d; dgamma = dy; dbeta = dy", "once per element"},
        {"dx = dy; dgamma = dy", "never assigns 'dbeta'"},
        {"dx = dy +; dgamma = dy; dbeta = dy", "layer_norm.backward: formula at position 10"}};
    te_formula formula = layer_formula(&layers[0]);
    te_program *forward = te_formula_compile(&te_mem_libc, "layer_norm", &formula, NULL);
    bool wanted[] = {true, true, true};
    te_output_kind reduce[] = {TE_OUT_ELEM, TE_OUT_COLSUM, TE_OUT_COLSUM};
    te_gradient_request request = {.forward = forward, .formula = &formula, .wanted = wanted, .reduce = reduce};
    te_gradient gradient;
    te_build_error error;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        request.gradient_text = cases[i].text;
        CHECK(te_program_differentiate(&request, &gradient, &error) == TE_ERROR_ARGUMENT && !gradient.forward);
        CHECK_MSG(strstr(error.message, cases[i].part), "%s", error.message);
    }
    request.formula = NULL;
    CHECK(te_program_differentiate(&request, &gradient, &error) == TE_ERROR_ARGUMENT);
    request.gradient_text = NULL;
    reduce[1] = TE_OUT_AMAX;
    CHECK(te_program_differentiate(&request, &gradient, &error) == TE_ERROR_ARGUMENT);
    CHECK_MSG(strstr(error.message, "input 1"), "%s", error.message);
    te_program_free(forward);

    te_program *wide = te_program_new(&te_mem_libc, "wide");
    bool want[40];
    te_output_kind kinds[40];
    int product = te_program_const(wide, 1);
    for (int i = 0; i < 40; i++) {
        want[i] = true;
        kinds[i] = TE_OUT_ELEM;
        product = emit(wide, TE_PW_MUL, product, te_program_input(wide, TE_RATE_ELEM));
    }
    te_program_output(wide, TE_OUT_ELEM, product);
    te_gradient_request many = {.forward = wide, .wanted = want, .reduce = kinds};
    CHECK(te_program_differentiate(&many, &gradient, &error) == TE_ERROR_UNSUPPORTED);
    CHECK_MSG(strstr(error.message, "more than 32"), "%s", error.message);
    te_program_free(wide);
}

/* --- what is kept between the passes ------------------------------------------------------------------------------ */

static void check_sources(const char *text, bool save, int n_sources, te_grad_source_kind kind)
{
    static const char *const inputs[] = {"x"}, *const outputs[] = {"y"};
    te_formula formula = {.text = text, .n_inputs = 1, .n_outputs = 1, .input_names = inputs, .output_names = outputs};
    te_program *forward = te_formula_compile(&te_mem_libc, "kept", &formula, NULL);
    uint64_t seed = 51;
    grad_case g;
    te_gradient gradient;
    case_open(&g, text, forward, &seed);
    g.request.save_output = save ? &(bool){true} : NULL;
    check_case(&g, &gradient);
    CHECK_MSG(gradient.n_sources == n_sources, "%s: %d sources", text, gradient.n_sources);
    bool found = false;
    for (int i = 0; i < gradient.n_sources; i++) found |= gradient.sources[i].kind == kind;
    CHECK_MSG(found, "%s", text);
    te_gradient_clear(&gradient);
    te_program_free(forward);
}

static void test_sources(void)
{
    check_sources("y = tanh(x)", false, 2, TE_GRAD_FROM_INPUT);
    check_sources("y = tanh(x)", true, 2, TE_GRAD_FROM_OUTPUT);
    check_sources("y = x * 3 + 1", false, 1, TE_GRAD_FROM_DOUT);
    check_sources("y = x * keep(0.5)", false, 1, TE_GRAD_FROM_DOUT);
    check_sources("y = x / rowsum(x)", false, 3, TE_GRAD_FROM_ROW);
    check_sources("y = exp(x) * 1", true, 2, TE_GRAD_FROM_OUTPUT);
}

/* --- random programs ---------------------------------------------------------------------------------------------- */

static int random_step(te_program *p, uint64_t *seed)
{
    int a = random_below(seed, p->n_insns), b = random_below(seed, p->n_insns), c = random_below(seed, p->n_insns);
    int soft = emit(p, TE_PW_TANH, b, -1);
    switch (random_below(seed, 26)) {
    case 0: return emit(p, TE_PW_NEG, a, -1);
    case 1: return emit(p, TE_PW_ABS, a, -1);
    case 2: return emit(p, TE_PW_SIN, a, -1);
    case 3: return emit(p, TE_PW_COS, a, -1);
    case 4: return emit(p, TE_PW_EXP, soft, -1);
    case 5: return emit(p, TE_PW_LOG, positive(p, a), -1);
    case 6: return emit(p, TE_PW_SQRT, positive(p, a), -1);
    case 7: return emit(p, TE_PW_RSQRT, positive(p, a), -1);
    case 8: return emit(p, TE_PW_RECIP, positive(p, a), -1);
    case 9: return emit(p, TE_PW_SIGMOID, a, -1);
    case 10: return emit(p, TE_PW_ERF, a, -1);
    case 11: return emit(p, TE_PW_DIV, a, positive(p, b));
    case 12: return emit(p, TE_PW_POW, positive(p, emit(p, TE_PW_SIN, a, -1)), soft);
    case 13: return emit(p, TE_PW_MIN, a, b);
    case 14: return emit(p, TE_PW_MAX, a, b);
    case 15: return te_program_emit(p, TE_PW_WHERE, emit(p, TE_PW_LT, a, b), soft, c);
    case 16: return emit(p, TE_PW_ROWMAX, a, -1);
    case 17: return emit(p, TE_PW_ROWMIN, a, -1);
    case 18: return emit(p, TE_PW_MUL, te_program_generator(p, TE_PW_KEEP, a % 2, te_program_const(p, 0.3)), a);
    case 19: return emit(p, TE_PW_MUL, te_program_param(p, 0), te_program_emit(p, TE_PW_COLUMN, -1, -1, -1));
    case 20: case 21: return emit(p, TE_PW_MUL, emit(p, TE_PW_ROWSUM, a, -1), te_program_const(p, 0.2));
    case 22: return emit(p, TE_PW_ADD, a, b);
    case 23: return emit(p, TE_PW_SUB, a, b);
    default: return emit(p, TE_PW_MUL, a, soft);
    }
}

static void random_inputs(te_program *p, te_output_kind *kinds, uint64_t *seed)
{
    static const te_output_kind of_elem[] = {TE_OUT_ELEM, TE_OUT_ELEM, TE_OUT_COLSUM, TE_OUT_ROW, TE_OUT_SUM};
    static const te_output_kind of_row[] = {TE_OUT_ROW, TE_OUT_SUM};
    int n = 1 + random_below(seed, 4);
    for (int i = 0; i < n; i++) {
        te_rate rate = i == 0 ? TE_RATE_ELEM : (te_rate)random_below(seed, 3);
        te_program_input(p, rate);
        kinds[i] = TE_OUT_SUM;
        if (rate == TE_RATE_ELEM) kinds[i] = of_elem[random_below(seed, 5)];
        if (rate == TE_RATE_ROW) kinds[i] = of_row[random_below(seed, 2)];
    }
}

static void test_random_programs(void)
{
    uint64_t seed = 61;
    for (int round = 0; round < 500; round++) {
        te_program *p = te_program_new(&te_mem_libc, "random");
        te_output_kind kinds[MAX_INPUTS];
        bool saved[MAX_OUTPUTS];
        random_inputs(p, kinds, &seed);
        int steps = 3 + random_below(&seed, 18), last = -1;
        for (int i = 0; i < steps; i++) last = random_step(p, &seed);
        for (int i = 0; i < 1 + round % 3; i++) {
            int value = i == 0 ? last : random_below(&seed, p->n_insns);
            add_output(p, (te_output_kind)random_below(&seed, 4), value);
        }
        grad_case g;
        case_open(&g, "random", p, &seed);
        for (int i = 0; i < MAX_OUTPUTS; i++) saved[i] = random_below(&seed, 2);
        if (round % 4 == 0) g.request.save_output = saved;
        for (int i = 0; i < p->n_inputs; i++) {
            g.reduce[i] = kinds[i];
            g.wanted[i] = random_below(&seed, 4) > 0;
        }
        int before = test_failures;
        check_and_clear(&g);
        if (test_failures > before && before < 3) {
            char text[8000];
            te_program_dump(p, text, sizeof text);
            fprintf(stderr, "round %d\n%s", round, text);
        }
        te_program_free(p);
    }
    CHECK_MSG(kinks * 20 < compared, "%d of %d elements stood at a kink", kinks, compared);
}

/* --- exhausted memory --------------------------------------------------------------------------------------------- */

static void test_memory(const char *gradient_text)
{
    te_formula formula = layer_formula(&layers[0]);
    bool wanted[] = {true, true, true};
    te_output_kind reduce[] = {TE_OUT_ELEM, TE_OUT_COLSUM, TE_OUT_COLSUM};
    te_status status = TE_ERROR_MEMORY;
    long n = 0;
    while (status != TE_OK && n < 2000) {
        failing_heap heap = {.fail_at = 0};
        te_mem mem = {failing_realloc, &heap};
        te_program *forward = te_formula_compile(&mem, "layer_norm", &formula, NULL);
        te_gradient_request request = {.forward = forward, .formula = &formula, .gradient_text = gradient_text,
                                       .wanted = wanted, .reduce = reduce};
        te_gradient gradient;
        te_build_error error;
        heap.calls = 0;
        heap.fail_at = ++n;
        status = te_program_differentiate(&request, &gradient, &error);
        CHECK_MSG(status == TE_OK || (status == TE_ERROR_MEMORY && error.status == status), "%ld: %d %s", n, status,
                  error.message);
        te_gradient_clear(&gradient);
        te_program_free(forward);
        CHECK_MSG(heap.live == 0, "%zu bytes lost when allocation %ld fails", heap.live, n);
    }
    CHECK(n > 5 && n < 2000);
}

int main(void)
{
    test_opcodes();
    test_no_gradient();
    test_choices();
    test_broadcasts();
    test_layers();
    test_gradient_formulas();
    test_gradient_formula_reductions();
    test_errors();
    test_sources();
    test_random_programs();
    test_memory(NULL);
    test_memory(layers[0].gradient);
    return TEST_END();
}
