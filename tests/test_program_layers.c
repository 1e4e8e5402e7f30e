/* test_program_layers.c - gradients of the layers of a Transformer written as formulas, derived and stated as formulas
 * themselves: right, with few row sums and few stored values; errors; exhausted memory.
 */
#include "program_gradient.h"

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
    {"cross_entropy", "m = rowmax(x); s = log(rowsum(exp(x - m))); "
     "loss = where(t >= 0, s - (rowsum(where(column() == t, x, 0)) - m), 0)",
     2, {"x", "t"}, {ELEM, ROW}, {TE_OUT_ELEM, TE_OUT_ROW}, {"loss"},
     "dx = where(t >= 0, dloss, 0) * (exp(x - m - s) - (column() == t)); dt = 0", 0, 2},
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
     3, {"x", "z", "r"}, {ELEM, ELEM, ROW}, {TE_OUT_ELEM, TE_OUT_ELEM, TE_OUT_ROW}, {"y"}, NULL, 3, 1},
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
        check_and_clear(&g);
        g.request.again = NULL;
        check_case(&g, &gradient);
        int rowsums = count_opcode(gradient.backward, TE_PW_ROWSUM);
        CHECK(strcmp(l->name, "softmax") != 0 || (rowsums == 1 && gradient.n_sources == 2 && gradient.n_rows == 0));
        CHECK(strcmp(l->name, "cross_entropy") != 0 || (rowsums == 0 && gradient.n_rows == 2));
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
        product = te_program_emit(wide, TE_PW_MUL, product, te_program_input(wide, TE_RATE_ELEM), -1);
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
    g.request.again = NULL;
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
    test_layers();
    test_gradient_formulas();
    test_gradient_formula_reductions();
    test_errors();
    test_sources();
    test_memory(NULL);
    test_memory(layers[0].gradient);
    return TEST_END();
}
