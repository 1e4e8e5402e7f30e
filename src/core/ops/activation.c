/* activation.c - activation functions. A new one is a row here: formula, gradient, binding, help and test follow, and
 * with `module` the module of that name, whose options are the attributes (lua/te/ops/activation.lua).
 *
 * max(x, 0) passes no gradient at 0, clamp passes it at both bounds (see program.h). Gated activations split the last
 * dimension in halves a and b and activate the first. Scaled ones multiply each row by a number of its own, such as
 * the weight of an expert.
 */
#include "ops.h"

#define ACTIVATION     (TE_OP_METHOD | TE_OP_FLOAT)
#define GATED          (TE_OP_METHOD | TE_OP_FLOAT | TE_OP_GATED)
/* Choices, not min and clamp: these pass no gradient at a NaN, which would leave a model with it look sound. */
#define CLAMPED_SWIGLU                                                                            \
    "g = where(a > limit, limit, a); l = where(b > limit, limit, where(b < -limit, -limit, b)); " \
    "y = g * sigmoid(alpha * g) * (l + offset)"
#define SITUGLU        "beta1 * tanh(a / beta1) * sigmoid(a) * (beta2 * tanh(b / beta2))"
#define HALVES         " x {..., 2 n} holds a, then b; y {..., n}."
#define BLOCKS         HALVES " If interleave is not 0, a and b alternate in blocks of that many features."
/* 0.5 + 0.5 tanh(u) is sigmoid(2 u), which keeps its relative accuracy where it is small. The numbers are
 * 2 sqrt(2 / pi) and 0.044715 times it, to float64's last digit. */
#define GELU(v)        v " * sigmoid(" v " * (1.5957691216057308 + 0.07135481627260025 * (" v " * " v ")))"

static te_status gelu_resolve(te_call *call, te_delegate *to)
{
    to->name = call->attr[0].number == 0 ? "gelu_tanh" : "gelu_erf";
    return TE_OK;
}

/* {.., 2 h} -> {.., h / size, 2, size} -> {.., 2, h / size, size} -> {.., 2 h}. */
static te_status deinterleave_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    double size = call->attr[0].number;
    int n = x->ndim;
    if (!(size >= 1)) return te_call_fail(call, TE_ERROR_ARGUMENT, "size must be positive, not %g", size);
    int64_t last = n ? x->shape[n - 1] : 0, shape[TE_MAX_DIMS];
    if (n == 0 || n + 2 > TE_MAX_DIMS || size > (double)last || last % (2 * (int64_t)size))
        return te_call_fail(call, TE_ERROR_ARGUMENT,
                            "the last dimension must be a multiple of 2 * size = %g, and at most %d dimensions: %s",
                            2 * size, TE_MAX_DIMS - 2, TE_SHAPE_TEXT(x));
    memcpy(shape, x->shape, (size_t)n * sizeof *shape);
    shape[n - 1] = last / (2 * (int64_t)size);
    shape[n] = 2;
    shape[n + 1] = (int64_t)size;
    te_arg split[2] = {TE_A_TENSOR(x), TE_A_INTS(shape, n + 2)};
    te_tensor *blocks = te_op_call(call->ctx, "reshape", 2, split);
    te_arg swap[3] = {TE_A_TENSOR(blocks), TE_A_NUMBER(-3), TE_A_NUMBER(-2)};
    te_tensor *halves = blocks ? te_op_call(call->ctx, "transpose", 3, swap) : NULL;
    te_arg join[2] = {TE_A_TENSOR(halves), TE_A_INTS(x->shape, n)};
    te_tensor *y = halves ? te_op_call(call->ctx, "reshape", 2, join) : NULL;
    te_tensor_release(blocks);
    te_tensor_release(halves);
    return te_call_result(call, y);
}

const te_op_def te_ops_activation[] = {
    {.signature = "relu(x)",
     .module = "ReLU",
     .doc = "max(x, 0).",
     .flags = ACTIVATION | TE_OP_INPLACE,
     .formula = "y = max(x, 0)"},
    {.signature = "gelu(x; approximate: tanh|none = tanh)",
     .module = "GELU",
     .doc = "Gaussian error linear unit, x Phi(x) (Hendrycks and Gimpel 2016); the tanh approximation by default, "
            "exact by erf with approximate = \"none\".",
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
     .module = "QuickGELU QGELU",
     .doc = "x sigmoid(1.702 x).",
     .flags = ACTIVATION,
     .formula = "y = x * sigmoid(1.702 * x)"},
    {.signature = "srelu(x)",
     .module = "SReLU",
     .doc = "Squared ReLU, max(x, 0)^2 (So et al. 2021).",
     .flags = ACTIVATION,
     .formula = "r = max(x, 0); y = r * r"},
    {.signature = "silu(x)",
     .module = "SiLU",
     .doc = "x sigmoid(x) (Elfwing et al. 2018).",
     .flags = ACTIVATION,
     .formula = "y = x * sigmoid(x)"},
    {.signature = "softplus(x)",
     .doc = "log(1 + exp(x)), without overflow.",
     .flags = ACTIVATION,
     .formula = TE_LOG1P_EXP "y = max(x, 0) + l",
     .gradient = "dx = dy * sigmoid(x)"},
    {.signature = "log_sigmoid(x)",
     .doc = "log(sigmoid(x)), without underflow.",
     .flags = ACTIVATION,
     .formula = TE_LOG1P_EXP "y = min(x, 0) - l",
     .gradient = "dx = dy * sigmoid(-x)"},

    {.signature = "glu(x)",
     .module = "GLU",
     .doc = "Gated linear unit, sigmoid(a) b (Dauphin et al. 2017; the first half is activated)." HALVES,
     .flags = GATED,
     .formula = "y = sigmoid(a) * b"},
    {.signature = "geglu(x)",
     .module = "GEGLU GeGLU",
     .doc = "GELU(a) b, tanh form (Shazeer 2020)." HALVES,
     .flags = GATED,
     .formula = "y = " GELU("a") " * b"},
    {.signature = "geglu_erf(x)",
     .module = "ExactGEGLU",
     .doc = "GELU(a) b, exact by erf (Shazeer 2020)." HALVES,
     .flags = GATED,
     .formula = "y = 0.5 * a * (1 + erf(a * 0.70710678118654752)) * b"},
    {.signature = "qgeglu(x)",
     .module = "QGEGLU",
     .doc = "quick_gelu(a) b." HALVES,
     .flags = GATED,
     .formula = "y = a * sigmoid(1.702 * a) * b"},
    {.signature = "reglu(x)",
     .module = "ReGLU",
     .doc = "relu(a) b (Shazeer 2020)." HALVES,
     .flags = GATED,
     .formula = "y = max(a, 0) * b"},
    {.signature = "sreglu(x)",
     .module = "SReGLU",
     .doc = "max(a, 0)^2 b." HALVES,
     .flags = GATED,
     .formula = "r = max(a, 0); y = r * r * b"},
    {.signature = "swiglu(x; interleave: int = 0)",
     .module = "SwiGLU",
     .doc = "silu(a) b (Shazeer 2020)." BLOCKS,
     .flags = GATED,
     .formula = "y = a * sigmoid(a) * b"},
    {.signature =
         "clamped_swiglu(x; limit: number = 7, alpha: number = 1.702, offset: number = 1, interleave: int = 0)",
     .module = "ClampedSwiGLU",
     .doc = "g sigmoid(alpha g) (clamp(b, -limit, limit) + offset) with g = min(a, limit)." BLOCKS,
     .flags = GATED,
     .formula = CLAMPED_SWIGLU},
    {.signature = "situglu(x; beta1: number = 4, beta2: number = 25, interleave: int = 0)",
     .module = "SiTUGLU",
     .doc = "beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2)." BLOCKS,
     .flags = GATED,
     .formula = "y = " SITUGLU},

    {.signature = "scaled_srelu(x, scale)",
     .module = "ScaledSReLU",
     .doc = "srelu(x) times scale, one number for every row of x.",
     .flags = TE_OP_FLOAT,
     .rows = "scale",
     .formula = "r = max(x, 0); y = r * r * scale"},
    {.signature = "scaled_swiglu(x, scale; interleave: int = 0)",
     .module = "ScaledSwiGLU",
     .doc = "swiglu(x) times scale, one number for every row of x.",
     .flags = TE_OP_FLOAT | TE_OP_GATED,
     .rows = "scale",
     .formula = "y = a * sigmoid(a) * b * scale"},
    {.signature = "scaled_clamped_swiglu(x, scale; limit: number = 7, alpha: number = 1.702, offset: number = 1, "
                  "interleave: int = 0)",
     .module = "ScaledClampedQGeGLU",
     .doc = "clamped_swiglu(x) times scale, one number for every row of x.",
     .flags = TE_OP_FLOAT | TE_OP_GATED,
     .rows = "scale",
     .formula = CLAMPED_SWIGLU " * scale"},
    {.signature = "scaled_situglu(x, scale; beta1: number = 4, beta2: number = 25, interleave: int = 0)",
     .module = "ScaledSiTUGLU",
     .doc = "situglu(x) times scale, one number for every row of x.",
     .flags = TE_OP_FLOAT | TE_OP_GATED,
     .rows = "scale",
     .formula = "y = " SITUGLU " * scale"},

    {.signature = "glu_deinterleave(x, size: int)",
     .doc = "Reorders features stored as blocks a0 b0 a1 b1 … of `size` to a0 a1 … b0 b1 …, the order that gated "
            "activations take.",
     .flags = TE_OP_METHOD,
     .forward = deinterleave_forward},
    {0},
};
