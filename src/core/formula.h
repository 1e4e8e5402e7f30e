/* formula.h - the formula parser as its own files and the gradient builder see it.
 *
 *      formula_lex.c      bytes to tokens                     formula.c           te_formula_compile: a parser whose
 *      formula_parse.c    statements and expressions                              outer names are inputs and parameters
 *      formula_call.c     functions and their arguments       formula_suggest.c   "did you mean"
 *
 * A parser emits straight into a program. Names that the text itself assigns are the parser's; all others are asked
 * from a scope, so a gradient formula can make inputs appear in its program at their first use.
 */
#ifndef TE_CORE_FORMULA_H
#define TE_CORE_FORMULA_H

#include "program_internal.h"

typedef enum te_token_kind {
    TE_TOKEN_END, TE_TOKEN_NUMBER, TE_TOKEN_NAME, TE_TOKEN_AND, TE_TOKEN_OR,
    TE_TOKEN_LT, TE_TOKEN_LE, TE_TOKEN_GT, TE_TOKEN_GE, TE_TOKEN_EQ, TE_TOKEN_NE,
    TE_TOKEN_PLUS, TE_TOKEN_MINUS, TE_TOKEN_TIMES, TE_TOKEN_DIVIDE, TE_TOKEN_POWER,
    TE_TOKEN_OPEN, TE_TOKEN_CLOSE, TE_TOKEN_COMMA, TE_TOKEN_SEMICOLON, TE_TOKEN_ASSIGN,
    TE_TOKEN_BAD
} te_token_kind;

typedef struct te_token {
    te_token_kind kind;
    const char   *text;
    int           length;
    double        number;
} te_token;

/* Reads the token that starts at or after `text`. */
te_token te_token_read(const char *text);

/* Where names come from that the text does not assign. */
typedef struct te_formula_scope {
    void *user;
    /* The value, TE_VALUE_NONE for a name it does not know, -1 with the parser's error filled (or empty: no memory). */
    int (*resolve)(void *user, const char *name, int length);
    /* The index-th name it knows, for suggestions; false after the last. */
    bool (*name_at)(void *user, int index, char *name, size_t size);
} te_formula_scope;

typedef struct te_formula_symbol {
    const char *name; /* points into the text */
    int         length, value;
} te_formula_symbol;

typedef struct te_formula_parser {
    te_program             *program;
    const char             *name; /* of the operation, for messages */
    const char             *text;
    const te_formula_scope *scope;
    te_build_error         *error; /* never NULL */
    int                     row_length_slot; /* parameter slot of `n` */

    te_formula_symbol *symbols;
    size_t             symbol_capacity;
    int                n_symbols;
    te_token           token;
    int                depth, n_generators, n_steps;
} te_formula_parser;

/* What a text may ask for. Programs are built and compiled by functions that look back over what is there, and no
 * interrupt ends that; so it has to be over soon whatever the text is. */
enum { TE_FORMULA_MOST_STEPS = 4096 };

/* Emits all statements. The symbols stay readable until te_formula_close, also after a failure. */
te_status te_formula_parse(te_formula_parser *parser);
void      te_formula_close(te_formula_parser *parser);

/* The value that the name stands for at the end of the text; TE_VALUE_NONE, -1 as in `resolve`. */
int te_formula_lookup(te_formula_parser *parser, const char *name, int length);

/* --- between the parser's files ----------------------------------------------------------------------------------- */

/* Parses "(a, b, …)" after the name of a function; the current token is the parenthesis. */
int te_formula_call(te_formula_parser *parser, te_token name);
int te_formula_expression(te_formula_parser *parser);
int te_formula_row_length(te_formula_parser *parser);
void te_formula_next(te_formula_parser *parser);

/* The index-th function name; NULL after the last. */
const char *te_formula_function_at(int index);

/* Both return -1. The first names the position and what stands there. */
int te_formula_fail(te_formula_parser *parser, te_token at, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;
int te_formula_fail_unknown(te_formula_parser *parser, te_token name, bool function);

/* Counts a call, an operator or an assignment; false with the error filled where that is one too many. */
bool te_formula_step(te_formula_parser *parser);

/* Passes a value on and reports -1 as exhausted memory unless something else was reported before. */
int te_formula_checked(te_formula_parser *parser, int value);

static inline bool te_formula_has_input(const te_formula *formula, int input)
{
    return !formula->present || formula->present[input];
}

static inline bool te_name_equal(const char *a, int a_length, const char *b)
{
    return strlen(b) == (size_t)a_length && memcmp(a, b, (size_t)a_length) == 0;
}

#endif
