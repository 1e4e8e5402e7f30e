/* formula_call.c - functions of the formula language: every opcode by its text, and a few that stand for several. */
#include "formula.h"

enum { MAX_ARGS = 3 };

/* --- functions that are not one opcode ---------------------------------------------------------------------------- */

static int call_rowmean(te_formula_parser *parser, const int *arg)
{
    int sum = te_program_emit(parser->program, TE_PW_ROWSUM, arg[0], -1, -1);
    return te_program_emit(parser->program, TE_PW_DIV, sum, te_formula_row_length(parser), -1);
}

/* Zero stands second: at a tie the gradient goes there, so relu passes none at 0. */
static int call_relu(te_formula_parser *parser, const int *arg)
{
    return te_program_emit(parser->program, TE_PW_MAX, arg[0], te_program_const(parser->program, 0.0), -1);
}

/* The clamped value keeps its gradient at both bounds. */
static int call_clamp(te_formula_parser *parser, const int *arg)
{
    int raised = te_program_emit(parser->program, TE_PW_MAX, arg[1], arg[0], -1);
    return te_program_emit(parser->program, TE_PW_MIN, raised, arg[2], -1);
}

static int call_square(te_formula_parser *parser, const int *arg)
{
    return te_program_emit(parser->program, TE_PW_MUL, arg[0], arg[0], -1);
}

static int call_exp_below(te_formula_parser *parser, const int *arg)
{
    return te_program_exp_below(parser->program, arg[0]);
}

static int call_generator(te_formula_parser *parser, te_opcode op, int a)
{
    return te_program_generator(parser->program, op, parser->n_generators++, a);
}

static int call_random(te_formula_parser *parser, const int *arg)
{
    (void)arg;
    return call_generator(parser, TE_PW_RANDOM, -1);
}

static int call_normal(te_formula_parser *parser, const int *arg)
{
    (void)arg;
    return call_generator(parser, TE_PW_NORMAL, -1);
}

static int call_keep(te_formula_parser *parser, const int *arg) { return call_generator(parser, TE_PW_KEEP, arg[0]); }

typedef struct formula_function {
    const char *name;
    int         n_args;
    int (*call)(te_formula_parser *parser, const int *arg);
} formula_function;

static const formula_function composed[] = {
    {"rowmean", 1, call_rowmean}, {"relu", 1, call_relu},     {"clamp", 3, call_clamp}, {"square", 1, call_square},
    {"random", 0, call_random},   {"normal", 0, call_normal}, {"keep", 1, call_keep},
    {"exp_below", 1, call_exp_below},
};

enum { N_COMPOSED = sizeof composed / sizeof composed[0] };

/* --- finding and calling ------------------------------------------------------------------------------------------ */

/* Loads and parameters have names, constants are digits, generators are above. */
static bool is_callable(te_opcode op)
{
    switch (op) {
    case TE_PW_LOAD: case TE_PW_PARAM: case TE_PW_CONST:
    case TE_PW_RANDOM: case TE_PW_KEEP: case TE_PW_NORMAL: return false;
    default: return true;
    }
}

const char *te_formula_function_at(int index)
{
    if (index < N_COMPOSED) return composed[index].name;
    index -= N_COMPOSED;
    for (int op = 0; op < TE_PW_COUNT; op++)
        if (is_callable((te_opcode)op) && index-- == 0) return te_opcode_name((te_opcode)op);
    return NULL;
}

static const formula_function *find_composed(te_token name)
{
    for (int i = 0; i < N_COMPOSED; i++)
        if (te_name_equal(name.text, name.length, composed[i].name)) return &composed[i];
    return NULL;
}

static int find_opcode(te_token name)
{
    for (int op = 0; op < TE_PW_COUNT; op++) {
        if (!is_callable((te_opcode)op)) continue;
        if (te_name_equal(name.text, name.length, te_opcode_name((te_opcode)op))) return op;
    }
    return -1;
}

/* Number of arguments, or -1. The current token is the opening parenthesis. */
static int parse_arguments(te_formula_parser *parser, te_token name, int *arg)
{
    int count = 0;
    te_formula_next(parser);
    while (parser->token.kind != TE_TOKEN_CLOSE) {
        if (count > 0) {
            if (parser->token.kind != TE_TOKEN_COMMA)
                return te_formula_fail(parser, parser->token, "expected ',' or ')' after argument %d of %.*s", count,
                                       name.length, name.text);
            te_formula_next(parser);
        }
        int value = te_formula_expression(parser);
        if (value < 0) return -1;
        if (count < MAX_ARGS) arg[count] = value;
        count++;
    }
    te_formula_next(parser);
    return count;
}

int te_formula_call(te_formula_parser *parser, te_token name)
{
    int arg[MAX_ARGS] = {-1, -1, -1};
    if (!te_formula_step(parser)) return -1;
    const formula_function *function = find_composed(name);
    int op = function ? -1 : find_opcode(name);
    if (!function && op < 0) return te_formula_fail_unknown(parser, name, true);

    int wanted = function ? function->n_args : te_opcode_args((te_opcode)op);
    int count = parse_arguments(parser, name, arg);
    if (count < 0) return -1;
    if (count != wanted)
        return te_formula_fail(parser, name, "%.*s expected %d argument%s, got %d", name.length, name.text, wanted,
                               wanted == 1 ? "" : "s", count);
    int value = function ? function->call(parser, arg)
                         : te_program_emit(parser->program, (te_opcode)op, arg[0], arg[1], arg[2]);
    return te_formula_checked(parser, value);
}
