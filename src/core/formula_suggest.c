/* formula_suggest.c - messages of the formula parser: where, what was expected, and which name was probably meant. */
#include "formula.h"
#include "nearest.h"

#include <stdarg.h>
#include <stdio.h>

enum { MAX_NAME = TE_LONGEST_NAME };

static void describe(te_token token, char *text, size_t size)
{
    unsigned char byte = (unsigned char)token.text[0];
    if (token.kind == TE_TOKEN_END) snprintf(text, size, "the end");
    else if (token.kind == TE_TOKEN_BAD && (byte < 32 || byte > 126)) snprintf(text, size, "byte 0x%02x", byte);
    else snprintf(text, size, "'%.*s'", token.length < MAX_NAME ? token.length : MAX_NAME, token.text);
}

int te_formula_fail(te_formula_parser *parser, te_token at, const char *format, ...)
{
    char reason[160], found[MAX_NAME + 8];
    va_list args;
    va_start(args, format);
    vsnprintf(reason, sizeof reason, format, args);
    va_end(args);
    describe(at, found, sizeof found);
    te_build_fail(parser->error, TE_ERROR_ARGUMENT, "%.47s: formula at position %d, near %s: %s", parser->name,
                  (int)(at.text - parser->text) + 1, found, reason);
    return -1;
}

int te_formula_checked(te_formula_parser *parser, int value)
{
    if (value == -1 && parser->error->status == TE_OK)
        te_build_fail(parser->error, TE_ERROR_MEMORY, "%.47s: out of memory while building the formula", parser->name);
    return value;
}

static void consider_values(te_formula_parser *parser, te_nearest *nearest)
{
    static const char *const built_in[] = {"inf", "nan", "pi"};
    char name[MAX_NAME + 1];
    for (int i = 0; parser->scope->name_at(parser->scope->user, i, name, sizeof name); i++)
        te_nearest_consider(nearest, name);
    for (int i = 0; i < parser->n_symbols; i++) {
        const te_formula_symbol *symbol = &parser->symbols[i];
        snprintf(name, sizeof name, "%.*s", symbol->length < MAX_NAME ? symbol->length : MAX_NAME, symbol->name);
        te_nearest_consider(nearest, name);
    }
    for (size_t i = 0; i < sizeof built_in / sizeof built_in[0]; i++) te_nearest_consider(nearest, built_in[i]);
}

int te_formula_fail_unknown(te_formula_parser *parser, te_token name, bool function)
{
    const char *kind = function ? "function" : "name", *function_name;
    te_nearest nearest = te_nearest_to(name.text, (size_t)name.length);
    if (!function) consider_values(parser, &nearest);
    for (int i = 0; function && (function_name = te_formula_function_at(i)); i++)
        te_nearest_consider(&nearest, function_name);
    if (nearest.name[0]) return te_formula_fail(parser, name, "unknown %s; did you mean '%s'?", kind, nearest.name);
    if (function) return te_formula_fail(parser, name, "unknown function; expected an opcode, relu, clamp, rowmean …");
    return te_formula_fail(parser, name, "unknown name; expected an input, a parameter or a name assigned before");
}
