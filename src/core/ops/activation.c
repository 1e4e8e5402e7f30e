/* activation.c - activation functions. A new one is a row here: formula, gradient, binding, help and test follow.
 *
 * max(x, 0) passes no gradient at 0, clamp passes it at both bounds (see program.h). Gated activations split the last
 * dimension in halves a and b and activate the first.
 */
#include "ops.h"

#define ACTIVATION (TE_OP_METHOD | TE_OP_FLOAT)
#define GATED      (TE_OP_METHOD | TE_OP_FLOAT | TE_OP_GATED)
#define GELU(v)    v " * (0.5 + 0.5 * tanh(" v " * (0.79788456 + 0.03567741 * " v " * " v ")))"

static te_status gelu_resolve(te_call *call, te_delegate *to)
{
    to->name = call->attr[0].number == 0 ? "gelu_tanh" : "gelu_erf";
    return TE_OK;
}

const te_op_def te_ops_activation[] = {
    {.signature = "relu(x)", .doc = "max(x, 0).", .flags = ACTIVATION | TE_OP_INPLACE, .formula = "y = max(x, 0)"},
    {.signature = "gelu(x; approximate: tanh|none = tanh)",
     .doc = "Gaussian error linear unit, x Phi(x); the tanh form by default, with approximate = \"none\" through erf "
            "(Hendrycks and Gimpel 2016).",
     .flags = ACTIVATION,
     .resolve = gelu_resolve},
    {.signature = "gelu_tanh(x)",
     .doc = "GELU in its tanh form.",
     .flags = TE_OP_FLOAT | TE_OP_HIDDEN,
     .formula = "y = " GELU("x")},
    {.signature = "gelu_erf(x)",
     .doc = "GELU through erf.",
     .flags = TE_OP_FLOAT | TE_OP_HIDDEN,
     .formula = "y = 0.5 * x * (1 + erf(x * 0.70710678118654752))"},
    {.signature = "quick_gelu(x)",
     .doc = "x sigmoid(1.702 x).",
     .flags = ACTIVATION,
     .formula = "y = x * sigmoid(1.702 * x)"},
    {.signature = "srelu(x)",
     .doc = "Squared ReLU, max(x, 0)^2 (So et al. 2021).",
     .flags = ACTIVATION,
     .formula = "r = max(x, 0); y = r * r"},
    {.signature = "silu(x)",
     .doc = "x sigmoid(x) (Elfwing et al. 2018).",
     .flags = ACTIVATION,
     .formula = "y = x * sigmoid(x)"},

    {.signature = "glu(x)",
     .doc = "Gated linear unit, sigmoid(a) b (Dauphin et al. 2017; the first half is activated).",
     .flags = GATED,
     .formula = "y = sigmoid(a) * b"},
    {.signature = "geglu(x)",
     .doc = "GELU(a) b, tanh form (Shazeer 2020).",
     .flags = GATED,
     .formula = "y = " GELU("a") " * b"},
    {.signature = "qgeglu(x)", .doc = "quick_gelu(a) b.", .flags = GATED, .formula = "y = a * sigmoid(1.702 * a) * b"},
    {.signature = "reglu(x)", .doc = "relu(a) b (Shazeer 2020).", .flags = GATED, .formula = "y = max(a, 0) * b"},
    {.signature = "sreglu(x)", .doc = "max(a, 0)^2 b.", .flags = GATED, .formula = "r = max(a, 0); y = r * r * b"},
    {.signature = "swiglu(x)", .doc = "silu(a) b (Shazeer 2020).", .flags = GATED, .formula = "y = a * sigmoid(a) * b"},
    {.signature = "clamped_swiglu(x; limit: number = 7, alpha: number = 1.702, offset: number = 1)",
     .doc = "g sigmoid(alpha g) (clamp(b, -limit, limit) + offset) with g = min(a, limit).",
     .flags = GATED,
     .formula = "g = min(a, limit); y = g * sigmoid(alpha * g) * (clamp(b, -limit, limit) + offset)"},
    {0},
};
