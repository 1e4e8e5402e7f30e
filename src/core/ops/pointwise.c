/* pointwise.c - arithmetic, elementary functions and comparisons, element by element with broadcasting. */
#include "ops.h"

#define UNARY  (TE_OP_METHOD | TE_OP_INPLACE | TE_OP_FLOAT)
#define BINARY (TE_OP_METHOD | TE_OP_INPLACE | TE_OP_NUMBERS)
#define TEST   (TE_OP_METHOD | TE_OP_NUMBERS | TE_OP_BOOL | TE_OP_NOGRAD)

const te_op_def te_ops_pointwise[] = {
    {.signature = "add(x, other)", .doc = "Sum, x + other.", .flags = BINARY, .formula = "y = x + other"},
    {.signature = "sub(x, other)", .doc = "Difference, x - other.", .flags = BINARY, .formula = "y = x - other"},
    {.signature = "mul(x, other)", .doc = "Product, x * other.", .flags = BINARY, .formula = "y = x * other"},
    {.signature = "div(x, other)", .doc = "Quotient, x / other; whole numbers give float32.", .flags = BINARY | TE_OP_FLOAT,
     .formula = "y = x / other", .domain = "0.3 2"},
    {.signature = "pow(x, other)", .doc = "Power, x ^ other, with the sign rules of C's pow.", .flags = BINARY | TE_OP_FLOAT,
     .formula = "y = x ^ other", .domain = "0.3 2"},
    {.signature = "maximum(x, other)", .doc = "Larger of both; NaN when either is NaN.", .flags = BINARY, .formula = "y = max(x, other)"},
    {.signature = "minimum(x, other)", .doc = "Smaller of both; NaN when either is NaN.", .flags = BINARY, .formula = "y = min(x, other)"},
    {.signature = "lerp(x, other, weight)", .doc = "Linear interpolation, x + weight * (other - x).", .flags = BINARY,
     .formula = "y = x + weight * (other - x)"},
    {.signature = "addcmul(x, a, b; value: number = 1)", .doc = "x + value * a * b.", .flags = BINARY, .formula = "y = x + value * a * b"},
    {.signature = "addcdiv(x, a, b; value: number = 1)", .doc = "x + value * a / b.", .flags = BINARY, .formula = "y = x + value * a / b",
     .domain = "0.3 2"},

    {.signature = "neg(x)", .doc = "Negation, -x.", .flags = TE_OP_METHOD | TE_OP_INPLACE, .formula = "y = -x"},
    {.signature = "abs(x)", .doc = "Absolute value.", .flags = TE_OP_METHOD | TE_OP_INPLACE, .formula = "y = abs(x)"},
    {.signature = "sign(x)", .doc = "-1, 0 or 1.", .flags = TE_OP_METHOD | TE_OP_INPLACE, .formula = "y = sign(x)"},
    {.signature = "floor(x)", .doc = "Largest integer not above x.", .flags = TE_OP_METHOD | TE_OP_INPLACE, .formula = "y = floor(x)"},
    {.signature = "ceil(x)", .doc = "Smallest integer not below x.", .flags = TE_OP_METHOD | TE_OP_INPLACE, .formula = "y = ceil(x)"},
    {.signature = "round(x)", .doc = "Nearest integer, ties to even.", .flags = TE_OP_METHOD | TE_OP_INPLACE, .formula = "y = round(x)"},
    {.signature = "trunc(x)", .doc = "Integer part.", .flags = TE_OP_METHOD | TE_OP_INPLACE, .formula = "y = trunc(x)"},
    {.signature = "square(x)", .doc = "x * x.", .flags = TE_OP_METHOD | TE_OP_INPLACE, .formula = "y = x * x"},
    {.signature = "exp(x)", .doc = "e ^ x.", .flags = UNARY, .formula = "y = exp(x)"},
    {.signature = "log(x)", .doc = "Natural logarithm.", .flags = UNARY, .formula = "y = log(x)", .domain = "0.2 3"},
    {.signature = "sqrt(x)", .doc = "Square root.", .flags = UNARY, .formula = "y = sqrt(x)", .domain = "0.2 3"},
    {.signature = "rsqrt(x)", .doc = "1 / sqrt(x).", .flags = UNARY, .formula = "y = rsqrt(x)", .domain = "0.2 3"},
    {.signature = "reciprocal(x)", .doc = "1 / x.", .flags = UNARY, .formula = "y = recip(x)", .domain = "0.2 3"},
    {.signature = "sin(x)", .doc = "Sine of x radians.", .flags = UNARY, .formula = "y = sin(x)"},
    {.signature = "cos(x)", .doc = "Cosine of x radians.", .flags = UNARY, .formula = "y = cos(x)"},
    {.signature = "tanh(x)", .doc = "Hyperbolic tangent.", .flags = UNARY, .formula = "y = tanh(x)"},
    {.signature = "sigmoid(x)", .doc = "Logistic function, 1 / (1 + e^-x).", .flags = UNARY, .formula = "y = sigmoid(x)"},
    {.signature = "erf(x)", .doc = "Error function.", .flags = UNARY, .formula = "y = erf(x)"},

    {.signature = "clamp(x, min: number = -inf, max: number = inf)", .doc = "x limited to [min, max].",
     .flags = TE_OP_METHOD | TE_OP_INPLACE, .formula = "y = clamp(x, min, max)"},
    {.signature = "where(condition, x, y)", .doc = "x where condition holds (is not 0), else y.", .flags = TE_OP_NUMBERS,
     .formula = "r = where(condition, x, y)", .outputs = "r"},
    {.signature = "masked_fill(x, mask, value: number)", .doc = "x with `value` where mask holds.", .flags = TE_OP_METHOD | TE_OP_INPLACE,
     .formula = "y = where(mask, value, x)"},

    {.signature = "eq(x, other)", .doc = "Whether x == other.", .flags = TEST, .formula = "y = x == other"},
    {.signature = "ne(x, other)", .doc = "Whether x ~= other.", .flags = TEST, .formula = "y = x ~= other"},
    {.signature = "lt(x, other)", .doc = "Whether x < other.", .flags = TEST, .formula = "y = x < other"},
    {.signature = "le(x, other)", .doc = "Whether x <= other.", .flags = TEST, .formula = "y = x <= other"},
    {.signature = "gt(x, other)", .doc = "Whether x > other.", .flags = TEST, .formula = "y = x > other"},
    {.signature = "ge(x, other)", .doc = "Whether x >= other.", .flags = TEST, .formula = "y = x >= other"},
    {.signature = "isnan(x)", .doc = "Whether x is NaN.", .flags = TE_OP_METHOD | TE_OP_BOOL | TE_OP_NOGRAD, .formula = "y = isnan(x)"},
    {.signature = "isfinite(x)", .doc = "Whether x is neither NaN nor infinite.", .flags = TE_OP_METHOD | TE_OP_BOOL | TE_OP_NOGRAD,
     .formula = "y = isfinite(x)"},

    {.signature = "clone(x)", .doc = "A contiguous copy, connected to x in the graph.", .flags = TE_OP_METHOD, .formula = "y = x"},
    {.signature = "copy(x, source)", .doc = "source in x's shape; copy_ writes it into x, converting.",
     .flags = TE_OP_METHOD | TE_OP_INPLACE | TE_OP_NUMBERS | TE_OP_NOGRAD, .formula = "y = source"},
    {.signature = "fill(x, value: number)", .doc = "`value` in x's shape.", .flags = TE_OP_METHOD | TE_OP_INPLACE | TE_OP_NOGRAD, .formula = "y = value"},
    {.signature = "zero(x)", .doc = "Zeros in x's shape.", .flags = TE_OP_METHOD | TE_OP_INPLACE | TE_OP_NOGRAD, .formula = "y = 0"},
    {0},
};
