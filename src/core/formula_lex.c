/* formula_lex.c - tokens of a formula. Knows nothing of locales: letters are ASCII and the decimal point is a point. */
#include "formula.h"

#include "kernels/numerals.h"

static bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
static bool is_digit(char c) { return c >= '0' && c <= '9'; }
static bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

/* What strtod takes for a number that begins with a digit or a point, except hexadecimal ones. */
static te_token read_number(const char *text)
{
    char *end = (char *)(uintptr_t)text + 1;
    bool hexadecimal = text[0] == '0' && (text[1] == 'x' || text[1] == 'X');
    double number = hexadecimal ? 0 : te_strtod(text, &end);
    return (te_token){TE_TOKEN_NUMBER, text, (int)(end - text), number};
}

static te_token read_name(const char *text)
{
    const char *end = text;
    while (is_letter(*end) || is_digit(*end)) end++;
    te_token token = {TE_TOKEN_NAME, text, (int)(end - text), 0};
    if (te_name_equal(text, token.length, "and")) token.kind = TE_TOKEN_AND;
    if (te_name_equal(text, token.length, "or")) token.kind = TE_TOKEN_OR;
    return token;
}

te_token te_token_read(const char *text)
{
    static const struct {
        char          text[3];
        te_token_kind kind;
    } marks[] = {
        {"<=", TE_TOKEN_LE}, {">=", TE_TOKEN_GE}, {"==", TE_TOKEN_EQ}, {"~=", TE_TOKEN_NE}, {"<", TE_TOKEN_LT},
        {">", TE_TOKEN_GT}, {"+", TE_TOKEN_PLUS}, {"-", TE_TOKEN_MINUS}, {"*", TE_TOKEN_TIMES}, {"/", TE_TOKEN_DIVIDE},
        {"^", TE_TOKEN_POWER}, {"(", TE_TOKEN_OPEN}, {")", TE_TOKEN_CLOSE}, {",", TE_TOKEN_COMMA},
        {";", TE_TOKEN_SEMICOLON}, {"=", TE_TOKEN_ASSIGN},
    };
    while (is_space(*text)) text++;
    if (*text == '\0') return (te_token){TE_TOKEN_END, text, 0, 0};
    if (is_digit(*text) || (*text == '.' && is_digit(text[1]))) return read_number(text);
    if (is_letter(*text)) return read_name(text);
    for (size_t i = 0; i < sizeof marks / sizeof marks[0]; i++) {
        size_t length = strlen(marks[i].text);
        if (strncmp(text, marks[i].text, length) == 0) return (te_token){marks[i].kind, text, (int)length, 0};
    }
    return (te_token){TE_TOKEN_BAD, text, 1, 0};
}
