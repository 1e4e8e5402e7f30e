/* test_locale.c - numbers of the engine have a decimal point under a host's locale that has a comma: defaults of
 * operations, formulas, sources of kernels, messages, printed tensors. Where no such locale is installed the rest of
 * the test runs in the C locale. */
#include "test.h"

#include "core/op.h"
#include "core/program_build.h"
#include "kernels/cuda/program_source_text.h"
#include "kernels/numerals.h"
#include "tetrain/tetrain.h"

static bool set_comma(void)
{
    static const char *const names[] = {"",           "de_DE.UTF-8", "de_DE.utf8", "de_DE",      "fr_FR.UTF-8",
                                        "fr_FR.utf8", "es_ES.UTF-8", "es_ES.utf8", "ru_RU.UTF-8", "pt_BR.UTF-8"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (setlocale(LC_ALL, names[i]) && *localeconv()->decimal_point != '.') return true;
    setlocale(LC_ALL, "C");
    return false;
}

static void test_text(void)
{
    char text[64], *end;
    CHECK(te_strtod("0.5", NULL) == 0.5 && te_strtod("1.5e-3,", &end) == 1.5e-3 && *end == ',');
    CHECK(te_strtod("-inf", NULL) == -INFINITY);
    CHECK(te_snprintf(text, sizeof text, "%g %a %.4f", 0.5, 1.5, 0.25) == 19 && !strcmp(text, "0.5 0x1.8p+0 0.2500"));
    te_text source;
    te_text_open(&source, &te_mem_libc);
    te_text_print(&source, "%a", 1.5);
    CHECK(source.data && strcmp(source.data, "0x1.8p+0") == 0);
    te_text_close(&source);
}

/* Of a context that was opened in the C locale and one that was not. */
static void test_defaults(te_context *before, te_context *ctx)
{
    const te_op *op;
    for (int i = 0; (op = te_op_at(ctx, i)); i++) {
        const te_op *expected = te_op_at(before, i);
        for (int k = 0; k < op->n_params; k++)
            CHECK_MSG(op->params[k].number == expected->params[k].number, "%s, %s: %.17g instead of %.17g", op->name,
                      op->params[k].name, op->params[k].number, expected->params[k].number);
    }
    op = te_op_find(ctx, "dropout");
    CHECK(op && op->params[1].number == 0.5);
    op = te_op_find(ctx, "layer_norm");
    CHECK(op && op->params[op->n_params - 1].number == 1e-5);
}

static void test_formula(void)
{
    static const char *const x[] = {"x"}, *const y[] = {"y"};
    te_formula formula = {.text = "y = x * 0.75 + 1.25e1", .n_inputs = 1, .n_outputs = 1, .input_names = x,
                          .output_names = y};
    te_build_error error = {.status = TE_OK};
    char text[512] = "";
    te_program *program = te_formula_compile(&te_mem_libc, "op", &formula, &error);
    CHECK_MSG(program != NULL, "%s", error.message);
    if (program) te_program_dump(program, text, sizeof text);
    CHECK_MSG(strstr(text, " 0.75\n") && strstr(text, " 12.5\n"), "%s", text);
    te_program_free(program);
}

static void test_messages(te_context *ctx)
{
    te_tensor *x = te_tensor_full(ctx, TE_F32, 1, (int64_t[]){4}, 1), *y = NULL;
    te_arg args[] = {{.kind = TE_ARG_TENSOR, .as.tensor = x}, {.kind = TE_ARG_NUMBER, .as.number = 1.5}};
    CHECK(te_op_run(ctx, te_op_find(ctx, "dropout"), args, 2, &y, 1) == TE_ERROR_ARGUMENT);
    CHECK_MSG(strstr(te_context_error(ctx), "not 1.5"), "%s", te_context_error(ctx));
    te_tensor_release(x);
}

static void test_script(void)
{
    static const char code[] = "local te = require 'te'\n"
                               "assert(tostring(te.tensor{0.5, 0.25}):find('{0.5000, 0.2500}', 1, true))\n"
                               "local _, message = pcall(te.cat, 1.5)\n"
                               "assert(message:find('number 1.5', 1, true), message)\n"
                               "local _, message = pcall(te.arange, 1, 2.5, 0)\n"
                               "assert(message:find('from 1 to 2.5 by 0', 1, true), message)\n"
                               "assert(te.clamped_swiglu(te.tensor{{1.5, 2.5, 0.5, -1}}):max():item() > 1)";
    tetrain *rt = tetrain_open(NULL);
    CHECK_MSG(tetrain_run_string(rt, code, strlen(code), NULL) == TETRAIN_OK, "%s", tetrain_error(rt));
    tetrain_close(rt);
}

int main(void)
{
    te_context *before = te_context_open(NULL);
    if (!set_comma()) printf("skipped: no locale with a decimal comma is installed\n");
    te_context *ctx = te_context_open(NULL);
    test_text();
    test_defaults(before, ctx);
    test_formula();
    test_messages(ctx);
    test_script();
    te_context_release(ctx);
    te_context_release(before);
    return TEST_END();
}
