/* formula_suggest.c - messages of the formula parser: where, what was expected, and which name was probably meant. */
#include "formula.h"

#include <stdarg.h>
#include <stdio.h>

enum { MAX_NAME = 48 };

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

/* Levenshtein distance; names longer than MAX_NAME are never near anything. */
static int edit_distance(const char *a, int a_length, const char *b)
{
    int row[MAX_NAME + 1], b_length = (int)strlen(b);
    if (a_length > MAX_NAME || b_length > MAX_NAME) return MAX_NAME;
    for (int j = 0; j <= b_length; j++) row[j] = j;
    for (int i = 1; i <= a_length; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= b_length; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[b_length];
}

typedef struct nearest_name {
    te_token wanted;
    char     name[MAX_NAME + 1];
    int      distance;
} nearest_name;

static void consider(nearest_name *nearest, const char *name)
{
    int distance = edit_distance(nearest->wanted.text, nearest->wanted.length, name);
    if (distance >= nearest->distance) return;
    nearest->distance = distance;
    snprintf(nearest->name, sizeof nearest->name, "%s", name);
}

static void consider_values(te_formula_parser *parser, nearest_name *nearest)
{
    static const char *const built_in[] = {"inf", "nan", "pi"};
    char name[MAX_NAME + 1];
    for (int i = 0; parser->scope->name_at(parser->scope->user, i, name, sizeof name); i++) consider(nearest, name);
    for (int i = 0; i < parser->n_symbols; i++) {
        const te_formula_symbol *symbol = &parser->symbols[i];
        snprintf(name, sizeof name, "%.*s", symbol->length < MAX_NAME ? symbol->length : MAX_NAME, symbol->name);
        consider(nearest, name);
    }
    for (size_t i = 0; i < sizeof built_in / sizeof built_in[0]; i++) consider(nearest, built_in[i]);
}

int te_formula_fail_unknown(te_formula_parser *parser, te_token name, bool function)
{
    const char *kind = function ? "function" : "name", *function_name;
    nearest_name nearest = {.wanted = name, .distance = 1 + (name.length + 2) / 3};
    if (!function) consider_values(parser, &nearest);
    for (int i = 0; function && (function_name = te_formula_function_at(i)); i++) consider(&nearest, function_name);
    if (nearest.name[0]) return te_formula_fail(parser, name, "unknown %s; did you mean '%s'?", kind, nearest.name);
    if (function) return te_formula_fail(parser, name, "unknown function; expected an opcode, relu, clamp, rowmean …");
    return te_formula_fail(parser, name, "unknown name; expected an input, a parameter or a name assigned before");
}
