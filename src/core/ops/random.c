/* random.c - draws. Element i of a draw is a function of seed and position alone, the same on every device. */
#include "ops.h"

/* dropout(x; p, training) */
static te_status dropout_resolve(te_call *call, te_delegate *to)
{
    double p = call->attr[0].number;
    if (!(p >= 0 && p <= 1)) return te_call_fail(call, TE_ERROR_ARGUMENT, "p must lie in [0, 1], not %g", p);
    if (p == 0 || call->attr[1].number == 0) return TE_OK;
    *to = (te_delegate){.name = "dropout_apply", .attrs = {p, p < 1 ? 1 / (1 - p) : 0}, .n = 2};
    return TE_OK;
}

#define DRAW (TE_OP_METHOD | TE_OP_INPLACE | TE_OP_NOGRAD)

const te_op_def te_ops_random[] = {
    {.signature = "dropout(x; p: number = 0.5, training: bool = true)",
     .doc = "Zeroes each element with probability p (exact to 2^-32) and divides the others by 1 - p; the mask is "
            "recomputed in backward, not stored.",
     .flags = TE_OP_METHOD,
     .resolve = dropout_resolve},
    {.signature = "dropout_apply(x; p: number = 0.5, scale: number = 2)",
     .doc = "Dropout with the scale given.",
     .flags = TE_OP_HIDDEN,
     .formula = "y = where(keep(p), x * scale, 0)"},
    {.signature = "uniform(x; low: number = 0, high: number = 1)",
     .doc = "Uniform numbers in [low, high) in x's shape.",
     .flags = DRAW,
     .formula = "y = low + (high - low) * random()"},
    {.signature = "normal(x; mean: number = 0, std: number = 1)",
     .doc = "Normal numbers in x's shape.",
     .flags = DRAW,
     .formula = "y = mean + std * normal()"},
    {.signature = "integers(x, low: number, high: number)",
     .doc = "Whole numbers from low to high, both included, in x's shape.",
     .flags = DRAW,
     .formula = "y = min(high, floor(low + (high - low + 1) * random()))"},
    {.signature = "bernoulli(x; p: number = 0.5)",
     .doc = "1 with probability p, else 0, in x's shape.",
     .flags = DRAW,
     .formula = "y = keep(1 - p)"},
    {.signature = "sequence(x, first: number = 0, step: number = 1)",
     .doc = "first + step * i along the last dimension, i from 0.",
     .flags = DRAW,
     .formula = "y = first + step * column()"},
    {0},
};
