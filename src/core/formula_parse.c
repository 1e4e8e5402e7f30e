/* formula_parse.c - statements and expressions, by precedence climbing.
 *
 *      statement  := name '=' expression
 *      expression := unary { operator unary }          or < and < comparisons < + - < * /, all left associative
 *      unary      := '-' unary | primary [ '^' unary ]
 *      primary    := number | name | name '(' arguments ')' | '(' expression ')'
 *
 * Only '(' , '-' and '^' nest without bound; they are counted, so a hostile text cannot exhaust the stack.
 */
#include "formula.h"

#include <math.h>

enum { MAX_DEPTH = 64 };

void te_formula_next(te_formula_parser *parser)
{
    parser->token = te_token_read(parser->token.text + parser->token.length);
}

bool te_formula_step(te_formula_parser *parser)
{
    if (parser->n_steps++ < TE_FORMULA_MOST_STEPS) return true;
    te_build_fail(parser->error, TE_ERROR_ARGUMENT, "%.47s: the formula has more than %d operations and names",
                  parser->name, TE_FORMULA_MOST_STEPS);
    return false;
}

static int emit(te_formula_parser *parser, te_opcode op, int a, int b)
{
    if (!te_formula_step(parser)) return -1;
    return te_formula_checked(parser, te_program_emit(parser->program, op, a, b, -1));
}

/* --- names -------------------------------------------------------------------------------------------------------- */

int te_formula_row_length(te_formula_parser *parser)
{
    return te_formula_checked(parser, te_program_param(parser->program, parser->row_length_slot));
}

static const struct {
    const char *name;
    double      number;
} numbers[] = {{"inf", INFINITY}, {"nan", NAN}, {"pi", 3.14159265358979323846}};

enum { N_NUMBERS = sizeof numbers / sizeof numbers[0] };

static int number_index(const char *name, int length)
{
    for (int i = 0; i < N_NUMBERS; i++)
        if (te_name_equal(name, length, numbers[i].name)) return i;
    return -1;
}

int te_formula_lookup(te_formula_parser *parser, const char *name, int length)
{
    for (int i = parser->n_symbols - 1; i >= 0; i--) {
        const te_formula_symbol *symbol = &parser->symbols[i];
        if (symbol->length == length && memcmp(symbol->name, name, (size_t)length) == 0) return symbol->value;
    }
    int value = parser->scope->resolve(parser->scope->user, name, length);
    if (value != TE_VALUE_NONE) return te_formula_checked(parser, value);
    if (te_name_equal(name, length, "n")) return te_formula_row_length(parser);
    int number = number_index(name, length);
    if (number < 0) return TE_VALUE_NONE;
    return te_formula_checked(parser, te_program_const(parser->program, numbers[number].number));
}

/* --- expressions -------------------------------------------------------------------------------------------------- */

static bool enter(te_formula_parser *parser)
{
    if (parser->depth < MAX_DEPTH) return ++parser->depth, true;
    te_formula_fail(parser, parser->token, "nested more than %d levels deep", MAX_DEPTH);
    return false;
}

static int parse_primary(te_formula_parser *parser)
{
    te_token token = parser->token;
    if (token.kind == TE_TOKEN_NUMBER) {
        te_formula_next(parser);
        return te_formula_checked(parser, te_program_const(parser->program, token.number));
    }
    if (token.kind == TE_TOKEN_NAME) {
        te_formula_next(parser);
        if (parser->token.kind == TE_TOKEN_OPEN) {
            if (!enter(parser)) return -1;
            int result = te_formula_call(parser, token);
            parser->depth--;
            return result;
        }
        int value = te_formula_lookup(parser, token.text, token.length);
        return value == TE_VALUE_NONE ? te_formula_fail_unknown(parser, token, false) : value;
    }
    if (token.kind != TE_TOKEN_OPEN) return te_formula_fail(parser, token, "expected a number, a name or '('");
    if (!enter(parser)) return -1;
    te_formula_next(parser);
    int value = te_formula_expression(parser);
    if (value < 0) return -1;
    if (parser->token.kind != TE_TOKEN_CLOSE)
        return te_formula_fail(parser, parser->token, "expected an operator or the ')' for '(' at %d",
                               (int)(token.text - parser->text) + 1);
    te_formula_next(parser);
    parser->depth--;
    return value;
}

static int parse_unary(te_formula_parser *parser)
{
    if (parser->token.kind == TE_TOKEN_MINUS) {
        if (!enter(parser)) return -1;
        te_formula_next(parser);
        int value = parse_unary(parser);
        parser->depth--;
        return value < 0 ? -1 : emit(parser, TE_PW_NEG, value, -1);
    }
    int base = parse_primary(parser);
    if (base < 0 || parser->token.kind != TE_TOKEN_POWER) return base;
    if (!enter(parser)) return -1;
    te_formula_next(parser);
    int exponent = parse_unary(parser);
    parser->depth--;
    return exponent < 0 ? -1 : emit(parser, TE_PW_POW, base, exponent);
}

/* Anything but 0 is true, NaN too. */
static int truth(te_formula_parser *parser, int value)
{
    if (te_opcode_is_truth((te_opcode)parser->program->insns[value].op)) return value;
    int zero = te_formula_checked(parser, te_program_const(parser->program, 0.0));
    return zero < 0 ? -1 : emit(parser, TE_PW_NE, value, zero);
}

static int logical(te_formula_parser *parser, te_opcode op, int a, int b)
{
    a = truth(parser, a);
    if (a >= 0) b = truth(parser, b);
    return a < 0 || b < 0 ? -1 : emit(parser, op, a, b);
}

static int precedence(te_token_kind kind)
{
    switch (kind) {
    case TE_TOKEN_OR: return 1;
    case TE_TOKEN_AND: return 2;
    case TE_TOKEN_LT: case TE_TOKEN_LE: case TE_TOKEN_GT:
    case TE_TOKEN_GE: case TE_TOKEN_EQ: case TE_TOKEN_NE: return 3;
    case TE_TOKEN_PLUS: case TE_TOKEN_MINUS: return 4;
    case TE_TOKEN_TIMES: case TE_TOKEN_DIVIDE: return 5;
    default: return 0;
    }
}

static int apply(te_formula_parser *parser, te_token_kind kind, int a, int b)
{
    switch (kind) {
    case TE_TOKEN_OR: return logical(parser, TE_PW_MAX, a, b);
    case TE_TOKEN_AND: return logical(parser, TE_PW_MUL, a, b);
    case TE_TOKEN_LT: return emit(parser, TE_PW_LT, a, b);
    case TE_TOKEN_LE: return emit(parser, TE_PW_LE, a, b);
    case TE_TOKEN_GT: return emit(parser, TE_PW_LT, b, a);
    case TE_TOKEN_GE: return emit(parser, TE_PW_LE, b, a);
    case TE_TOKEN_EQ: return emit(parser, TE_PW_EQ, a, b);
    case TE_TOKEN_NE: return emit(parser, TE_PW_NE, a, b);
    case TE_TOKEN_PLUS: return emit(parser, TE_PW_ADD, a, b);
    case TE_TOKEN_MINUS: return emit(parser, TE_PW_SUB, a, b);
    case TE_TOKEN_TIMES: return emit(parser, TE_PW_MUL, a, b);
    default: return emit(parser, TE_PW_DIV, a, b);
    }
}

/* Recursion on the right operand goes up one level of precedence, so at most five deep before something nests. */
static int parse_binary(te_formula_parser *parser, int lowest)
{
    int left = parse_unary(parser);
    while (left >= 0) {
        te_token_kind kind = parser->token.kind;
        int level = precedence(kind);
        if (level == 0 || level < lowest) break;
        te_formula_next(parser);
        int right = parse_binary(parser, level + 1);
        left = right < 0 ? -1 : apply(parser, kind, left, right);
    }
    return left;
}

int te_formula_expression(te_formula_parser *parser) { return parse_binary(parser, 1); }

/* --- statements --------------------------------------------------------------------------------------------------- */

static int assign(te_formula_parser *parser, te_token name, int value)
{
    if (!te_formula_step(parser)) return -1;
    if (!te_mem_grow(parser->program->mem, &parser->symbols, &parser->symbol_capacity, (size_t)parser->n_symbols + 1,
                     sizeof *parser->symbols)) return te_formula_checked(parser, -1);
    parser->symbols[parser->n_symbols++] = (te_formula_symbol){name.text, name.length, value};
    return value;
}

static int parse_statement(te_formula_parser *parser)
{
    te_token name = parser->token;
    if (name.kind != TE_TOKEN_NAME) return te_formula_fail(parser, name, "expected a name to assign to");
    if (te_name_equal(name.text, name.length, "n") || number_index(name.text, name.length) >= 0)
        return te_formula_fail(parser, name, "'%.*s' has a fixed meaning and cannot be assigned", name.length,
                               name.text);
    te_formula_next(parser);
    if (parser->token.kind != TE_TOKEN_ASSIGN)
        return te_formula_fail(parser, parser->token, "expected '=' after '%.*s'", name.length > 40 ? 40 : name.length,
                               name.text);
    te_formula_next(parser);
    int value = te_formula_expression(parser);
    if (value < 0) return -1;
    if (parser->token.kind != TE_TOKEN_SEMICOLON && parser->token.kind != TE_TOKEN_END)
        return te_formula_fail(parser, parser->token, "expected an operator, ';' or the end");
    return assign(parser, name, value);
}

te_status te_formula_parse(te_formula_parser *parser)
{
    parser->token = te_token_read(parser->text);
    while (parser->token.kind != TE_TOKEN_END) {
        if (parser->token.kind == TE_TOKEN_SEMICOLON) te_formula_next(parser);
        else if (parse_statement(parser) < 0) return parser->error->status;
    }
    return TE_OK;
}

void te_formula_close(te_formula_parser *parser)
{
    te_mem_free(parser->program->mem, parser->symbols, parser->symbol_capacity * sizeof *parser->symbols);
    parser->symbols = NULL;
    parser->symbol_capacity = 0;
    parser->n_symbols = 0;
}
