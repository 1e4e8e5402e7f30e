/* test_formula.c - the formula language: meaning, precedence, names, errors, hostile texts. */
#include "test.h"
#include "program_eval.h"

static const char *const xy_names[] = {"x", "y"}, *const param_names[] = {"eps"}, *const out_names[] = {"out"};

static te_formula formula_of(const char *text)
{
    return (te_formula){.text = text, .n_inputs = 2, .n_params = 1, .n_outputs = 1, .input_names = xy_names,
                        .param_names = param_names, .output_names = out_names};
}

static te_program *compile(const char *text, te_build_error *error)
{
    te_formula formula = formula_of(text);
    te_program *program = te_formula_compile(&te_mem_libc, "op", &formula, error);
    char wrong[160];
    CHECK((program != NULL) == (error->status == TE_OK));
    if (program) CHECK_MSG(te_program_verify(program, wrong, sizeof wrong), "%s: %s", text, wrong);
    return program;
}

/* The value of the formula at x, y on the only element, with n = 1 and eps = 0.5. */
static double value_of(const char *text, double x, double y)
{
    te_build_error error;
    te_program *program = compile(text, &error);
    CHECK_MSG(program != NULL, "%s: %s", text, error.message);
    if (!program) return NAN;
    CHECK(program->n_inputs == 2 && program->n_params >= 1);
    double out = NAN, *outputs[] = {&out};
    eval_operand inputs[] = {{&x, 0, 0}, {&y, 0, 0}};
    program_eval(program, &(eval_space){1, 1, inputs, (const double[]){0.5, 1}, false}, outputs);
    te_program_free(program);
    return out;
}

static void check_value(const char *text, double expected)
{
    double got = value_of(text, 3, 5);
    CHECK_MSG(got == expected || fabs(got - expected) < 1e-14 * fabs(expected) || (isnan(got) && isnan(expected)),
              "%s: %.17g instead of %.17g", text, got, expected);
}

static void test_precedence(void)
{
    check_value("out = 2 + 3 * 4", 14);
    check_value("out = (2 + 3) * 4", 20);
    check_value("out = 10 - 4 - 3", 3);
    check_value("out = 24 / 4 / 3 * 2", 4);
    check_value("out = 2 ^ 3 ^ 2", 512);
    check_value("out = -x ^ 2", -9);
    check_value("out = 2 ^ -1", 0.5);
    check_value("out = --x", 3);
    check_value("out = x - -y", 8);
    check_value("out = 1 + 1 < 3", 1);
    check_value("out = x < y and y < x or x == 3", 1);
    check_value("out = x > y or y >= 5 and x <= 2", 0);
    check_value("out = x ~= y", 1);
    check_value("out = (x and y) + (0 or 0) * 2 + (0 or y)", 2);
    check_value("out = x < y == 1", 1);
    check_value(";; a = x ;; b = a * 2 ; ; out = b ; ", 6);
    check_value("a = x; a = a + 1; out = a", 4);
    check_value("out=x*y\n\t+ 1\r\n", 16);
}

static void test_numbers(void)
{
    check_value("out = 0.044715", 0.044715);
    check_value("out = .5 + 1. + 1e-3 + 2E+2", .5 + 1. + 1e-3 + 2E+2);
    check_value("out = 0.1", 0.1);
    check_value("out = 1.7976931348623157e308", 1.7976931348623157e308);
    check_value("out = 4.9e-324", 4.9e-324);
    check_value("out = 123456789012345678901234567890.5", 123456789012345678901234567890.5);
    check_value("out = 0.0000000000000000000000000000000000000000000000000000000000000000000000012345e66", 1.2345e-6);
    check_value("out = 1e99999999999", INFINITY);
    check_value("out = -inf", -INFINITY);
    check_value("out = nan", NAN);
    check_value("out = pi", 3.14159265358979323846);
    check_value("out = eps * x", 1.5);
    check_value("out = n", 1);
}

static void test_functions(void)
{
    check_value("out = tanh(x) + exp(y)", tanh(3) + exp(5));
    check_value("out = relu(x - y) + relu(y - x)", 2);
    check_value("out = clamp(x, 0, 2.5) + clamp(-y, -1, 1)", 1.5);
    check_value("out = square(y)", 25);
    check_value("out = where(x < y, x, y)", 3);
    check_value("out = max(x, y) - min(x, y)", 2);
    check_value("out = rowmean(x) + rowsum(y) + rowmax(x) + rowmin(x)", 14);
    check_value("out = column() + add(x, y)", 8);
    check_value("out = pow(x, 2) + sqrt(y * y)", 14);
    check_value("a = keep(0); b = keep(1); out = a + b", 1);
}

static void test_slots_and_rates(void)
{
    te_build_error error;
    te_program *p = compile("out = random() * keep(eps) + normal() * keep(eps)", &error);
    CHECK(p && p->n_rngs == 4 && count_opcode(p, TE_PW_KEEP) == 2 && p->n_params == 1);
    te_program_free(p);
    p = compile("out = x / n", &error);
    CHECK(p && p->n_params == 2 && p->outputs[0].kind == TE_OUT_ELEM);
    te_program_free(p);
    p = compile("out = rowsum(x)", &error);
    CHECK(p && p->outputs[0].kind == TE_OUT_ROW);
    te_program_free(p);

    const char *const names[] = {"x", "gamma", "r"}, *const outs[] = {"y", "m"};
    const te_rate rates[] = {TE_RATE_ELEM, TE_RATE_ELEM, TE_RATE_ROW};
    const double defaults[] = {0, 1, 0};
    const bool present[] = {true, false, true};
    te_formula f = {.text = "y = x * gamma; m = r * eps", .n_inputs = 3, .n_params = 1, .n_outputs = 2,
                    .input_names = names, .input_rates = rates, .input_defaults = defaults, .present = present,
                    .param_names = param_names, .output_names = outs};
    p = te_formula_compile(&te_mem_libc, "scaled", &f, &error);
    CHECK(p && p->n_inputs == 2 && p->input_rates[1] == TE_RATE_ROW && strcmp(p->name, "scaled") == 0);
    CHECK(p && p->insns[p->outputs[0].value].op == TE_PW_LOAD); /* x * 1 */
    CHECK(p && p->outputs[0].kind == TE_OUT_ELEM && p->outputs[1].kind == TE_OUT_ROW);
    te_program_free(p);
}

/* --- errors ------------------------------------------------------------------------------------------------------- */

static void check_error(const char *text, const char *position, const char *part)
{
    te_build_error error;
    te_program *program = compile(text, &error);
    CHECK_MSG(!program && error.status == TE_ERROR_ARGUMENT, "%s", text);
    CHECK_MSG(strncmp(error.message, "op: ", 4) == 0 && strstr(error.message, position) && strstr(error.message, part),
              "%s gives: %s", text, error.message);
    te_program_free(program);
}

static void test_errors(void)
{
    check_error("out = tahn(x)", "position 7", "did you mean 'tanh'?");
    check_error("out = rowmeen(x)", "position 7", "did you mean 'rowmean'?");
    check_error("alpha = x; out = alhpa", "position 18", "did you mean 'alpha'?");
    check_error("out = x * epz", "position 11", "did you mean 'eps'?");
    check_error("out = qqqqqqqq", "position 7", "unknown name");
    check_error("out = wonderful(x)", "position 7", "unknown function");
    check_error("out = tanh(x, y)", "position 7", "expected 1 argument, got 2");
    check_error("out = where(x, y)", "position 7", "expected 3 arguments, got 2");
    check_error("out = clamp()", "position 7", "expected 3 arguments, got 0");
    check_error("out = (x + y", "position 13, near the end", "')' for '(' at 7");
    check_error("out = tanh(x y)", "position 14", "expected ',' or ')'");
    check_error("out = x +", "position 10", "expected a number, a name or '('");
    check_error("out = 2x", "position 8", "expected an operator, ';' or the end");
    check_error("out x", "position 5", "expected '='");
    check_error("3 = x", "position 1", "expected a name");
    check_error("pi = x", "position 1", "cannot be assigned");
    check_error("out = x $ y", "near '$'", "expected an operator");
    check_error("out = x \x01", "byte 0x01", "expected an operator");
    check_error("y1 = x", "", "never assigns its output 'out'");
    check_error("out = load(x)", "position 7", "unknown function");
    check_error("out = and", "position 7", "expected a number");
}

static void fill(char *text, const char *piece, int count, const char *end)
{
    char *at = text;
    at += sprintf(at, "out = ");
    for (int i = 0; i < count; i++) at += sprintf(at, "%s", piece);
    sprintf(at, "%s", end);
}

static void test_depth(void)
{
    static char text[400000];
    static const char *const pieces[] = {"(", "-", "2^", "tanh(", "(x+x*-2^", "where(x,x<1 and x+2*"};
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        fill(text, pieces[i], 15000, "x");
        check_error(text, "position", "nested more than 64 levels deep");
    }
    fill(text, "-", 60, "x");
    CHECK(value_of(text, 3, 5) == 3);
    fill(text, "x + ", 4095, "x"); /* and an assignment */
    CHECK(value_of(text, 1, 0) == 4096);
    fill(text, "x + ", 4096, "x");
    check_error(text, "op: ", "more than 4096 operations and names");
    fill(text, "x; out = ", 5000, "x");
    check_error(text, "op: ", "more than 4096 operations and names");
}

/* --- hostile texts ------------------------------------------------------------------------------------------------ */

static void test_fuzz(void)
{
    static const char seed_text[] = "m = rowmean(x); d = x - m; r = rsqrt(rowmean(d^2) + eps) and keep(0.5) >= 1e-3 or "
                                    "clamp(-y, -1, inf); out = where(d ~= 0, d * r, nan) / 3";
    static const char alphabet[] = "xy()+-*/^=;,.~<> 0123456789eandormtkp_#\x80\n";
    uint64_t seed = 7;
    char text[256];
    te_build_error error;
    for (size_t length = 0; length < sizeof seed_text; length++) {
        memcpy(text, seed_text, length);
        text[length] = '\0';
        te_program_free(compile(text, &error));
    }
    for (int round = 0; round < 20000; round++) {
        size_t length = round % 2 ? sizeof seed_text - 1 : (size_t)random_below(&seed, 60);
        if (round % 2) memcpy(text, seed_text, sizeof seed_text);
        int changes = round % 2 ? 1 + random_below(&seed, 3) : (int)length;
        for (int i = 0; i < changes; i++) {
            size_t at = round % 2 ? (size_t)random_below(&seed, (int)length) : (size_t)i;
            bool any = random_below(&seed, 8) == 0;
            text[at] = any ? (char)random_bits(&seed) : alphabet[random_below(&seed, (int)sizeof alphabet - 1)];
        }
        text[length] = '\0';
        te_program *program = compile(text, &error);
        CHECK(program || error.message[0]);
        te_program_free(program);
    }
}

static void test_memory(void)
{
    te_formula formula = formula_of("m = rowmean(x); d = x - m; v = rowmean(d * d); s = rsqrt(v + eps); a = d * s; "
                                    "b = a; c = b; e = c; f = e; g = f; out = tanh(g) * keep(0.5) + y");
    te_program *program = NULL;
    long n = 0;
    while (!program && n < 1000) {
        failing_heap heap = {.fail_at = ++n};
        te_mem mem = {failing_realloc, &heap};
        te_build_error error;
        program = te_formula_compile(&mem, "op", &formula, &error);
        CHECK(program ? error.status == TE_OK : error.status == TE_ERROR_MEMORY && error.message[0]);
        te_program_free(program);
        CHECK_MSG(heap.live == 0, "%zu bytes lost when allocation %ld fails", heap.live, n);
    }
    CHECK(n > 5 && n < 1000);
}

int main(void)
{
    test_precedence();
    test_numbers();
    test_functions();
    test_slots_and_rates();
    test_errors();
    test_depth();
    test_fuzz();
    test_memory();
    return TEST_END();
}
