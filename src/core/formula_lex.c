/* formula_lex.c - tokens of a formula. Knows nothing of locales: letters are ASCII and the decimal point is a point. */
#include "formula.h"

#include <stdio.h>
#include <stdlib.h>

static bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
static bool is_digit(char c) { return c >= '0' && c <= '9'; }
static bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

/* Digits are collected without the point and the exponent moved instead, since strtod reads the locale's point only. */
static te_token read_number(const char *text)
{
    enum { MAX_DIGITS = 60, MAX_EXPONENT = 99999 };
    char digits[MAX_DIGITS + 16];
    const char *at = text;
    int n_digits = 0, exponent = 0;
    bool point = false;
    for (; is_digit(*at) || (*at == '.' && !point); at++) {
        if (*at == '.') {
            point = true;
        } else if (*at == '0' && n_digits == 0) {
            exponent -= point; /* a leading zero is not a digit worth keeping */
        } else if (n_digits < MAX_DIGITS) {
            digits[n_digits++] = *at;
            exponent -= point;
        } else if (exponent < MAX_EXPONENT) {
            exponent += !point;
        }
    }
    if (*at == 'e' || *at == 'E') {
        const char *power = at + 1;
        bool negative = *power == '-';
        int number = 0;
        if (*power == '-' || *power == '+') power++;
        if (is_digit(*power)) {
            for (; is_digit(*power); power++) number = number < MAX_EXPONENT ? number * 10 + (*power - '0') : number;
            exponent += negative ? -number : number;
            at = power;
        }
    }
    if (n_digits == 0) digits[n_digits++] = '0';
    snprintf(digits + n_digits, sizeof digits - (size_t)n_digits, "e%d", exponent);
    return (te_token){TE_TOKEN_NUMBER, text, (int)(at - text), strtod(digits, NULL)};
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
