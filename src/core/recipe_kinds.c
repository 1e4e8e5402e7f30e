/* recipe_kinds.c - the table of recipes; see recipe_kinds.h. Formats: Micikevicius et al. 2022 (FP8), the OCP
 * Microscaling specification 1.0 (MXFP8); NVFP4 has E4M3 factors of blocks of 16 under one of the tensor. */
#include "recipe_kinds.h"

#include "recipe.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* --- options that several have ------------------------------------------------------------------------------------ */

static const char *const formats[] = {"E4M3", "HYBRID", NULL};
static const char *const only_e4m3[] = {"E4M3", NULL};
static const char *const only_e2m1[] = {"E2M1", NULL};
static const char *const amax_algorithms[] = {"max", "most_recent", NULL};
static const char *const tensors[] = {"none", "weights", "activations", "all", NULL};
static const char *const errors[] = {"MAE", "MSE", NULL};
static const char *const precisions[] = {"high_precision", "dequantized", NULL}; /* te_backward_precision, from 1 */
enum { E4M3, HYBRID };
enum { NO_TENSORS, WEIGHTS, ACTIVATIONS, ALL_TENSORS };

#define SWITCH(name, on, doc) {name, TE_OPTION_SWITCH, on, 0, 1, NULL, doc}
#define CHOICE(name, names, i, doc) {name, TE_OPTION_CHOICE, i, 0, 0, names, doc}
#define INTEGER(name, n, least, most, doc) {name, TE_OPTION_INTEGER, n, least, most, NULL, doc}
#define FP8_FORMAT(i) CHOICE("fp8_format", formats, i, "elements; HYBRID: E5M2 for gradients, E4M3 for the rest")
#define BACKWARD_OVERRIDE                                                                                              \
    CHOICE("backward_override", precisions, -1,                                                                        \
           "backward multiplies in high precision: operands as they were before quantization, or the dequantized "     \
           "ones")
#define FAST_ACCUMULATION                                                                                              \
    CHOICE("fast_accumulation", te_fast_accumulation_names, 1,                                                         \
           "products whose sums tensor cores may accumulate in fewer bits than float32 has")
#define FP8_ATTENTION \
    SWITCH("fp8_dpa", false, "attention multiplies in E4M3 in forward"), \
    SWITCH("fp8_mha", false, \
           "attention multiplies in E4M3 in forward, and its projection takes the E4M3 result as it is; under MXFP8, " \
           "whose projection multiplies blocks, the same as fp8_dpa")
#define AMAX_EPSILON {"amax_epsilon", TE_OPTION_NUMBER, 0, 0, FLT_MAX, NULL, "smaller amaxes count as this value"}

double te_recipe_setting(const te_recipe_settings *s, const char *name, double otherwise)
{
    for (int i = 0; s->kind->options[i].name; i++)
        if (strcmp(s->kind->options[i].name, name) == 0) return s->values[i];
    return otherwise;
}

static bool is_on(const te_recipe_settings *s, const char *name) { return te_recipe_setting(s, name, 0) != 0; }

/* HYBRID: gradients need E5M2's range more than E4M3's precision. */
static te_element_kind element_of(const te_recipe_settings *s, te_role role)
{
    return te_recipe_setting(s, "fp8_format", E4M3) == HYBRID && role == TE_ROLE_GRAD_OUTPUT ? TE_E5M2 : TE_E4M3;
}

/* Blocks of `along` elements, or square ones. */
static void set_blocks(te_quantizer *q, int along, bool square)
{
    q->block_rows = square ? along : 1;
    q->block_cols = along;
}

static void measure(const te_recipe_settings *s, te_quantizer *q)
{
    q->power_of_two = is_on(s, "use_power_2_scales");
    q->epsilon = (float)te_recipe_setting(s, "amax_epsilon", 0);
}

/* --- one factor a tensor ------------------------------------------------------------------------------------------ */

static const te_option_info delayed_options[] = {
    INTEGER("margin", 0, -1000, 1000, "factors leave room for 2^margin times the amax"),
    FP8_FORMAT(HYBRID),
    INTEGER("amax_history_len", 1024, 1, INFINITY, "steps whose amaxes are kept, the one in progress included"),
    CHOICE("amax_compute_algo", amax_algorithms, 0,
           "the amax that a factor is computed from: the largest of the history, the last one, or a function's result"),
    SWITCH("reduce_amax", true, "processes that train together share amaxes; no effect with one process"),
    FAST_ACCUMULATION,
    FP8_ATTENTION,
    {0},
};

static void delayed(const te_recipe_settings *s, te_role role, te_quantizer *q)
{
    q->element = element_of(s, role);
    q->needs_history = true;
}

static void delayed_attention(const te_recipe_settings *s, te_quantizer *q)
{
    (void)s;
    q->needs_history = true;
}

static const te_option_info current_options[] = {
    FP8_FORMAT(HYBRID),
    SWITCH("use_power_2_scales", false, "factors are rounded down to powers of two"),
    AMAX_EPSILON,
    FAST_ACCUMULATION,
    FP8_ATTENTION,
    BACKWARD_OVERRIDE,
    {0},
};

static void current(const te_recipe_settings *s, te_role role, te_quantizer *q)
{
    q->element = element_of(s, role);
    measure(s, q);
}

/* One factor for all of q, k and v, or of each where they are separate. Scores are sums over a head's columns and
 * values are summed over positions: blocks would have to lie along both, so recipes of blocks scale attention by the
 * tensor's own amax. */
static void current_attention(const te_recipe_settings *s, te_quantizer *q) { measure(s, q); }

/* --- a factor a block --------------------------------------------------------------------------------------------- */

static const te_option_info block_options[] = {
    FP8_FORMAT(E4M3),
    SWITCH("use_f32_scales", false, "factors are not rounded to powers of two"),
    AMAX_EPSILON,
    INTEGER("x_block_scaling_dim", 1, 1, 2, "blocks of the input; 1: 1 x 128, 2: 128 x 128"),
    INTEGER("w_block_scaling_dim", 2, 1, 2, "blocks of the weight; 1: 1 x 128, 2: 128 x 128"),
    INTEGER("grad_block_scaling_dim", 1, 1, 2, "blocks of the gradient; 1: 1 x 128, 2: 128 x 128"),
    BACKWARD_OVERRIDE,
    {0},
};

static const char *const block_dims[TE_ROLE_COUNT] = {"x_block_scaling_dim", "w_block_scaling_dim",
                                                      "grad_block_scaling_dim"};

static te_status check_blocks(te_context *ctx, const te_recipe_settings *s)
{
    int dims[TE_ROLE_COUNT], sum = 0;
    for (int r = 0; r < TE_ROLE_COUNT; r++) sum += dims[r] = (int)te_recipe_setting(s, block_dims[r], 1);
    if (sum <= 4) return TE_OK;
    return te_fail(ctx, TE_ERROR_ARGUMENT,
                   "te.recipe.%s: at most one of x, w and grad_block_scaling_dim may be 2, got %d, %d and %d",
                   s->kind->name, dims[0], dims[1], dims[2]);
}

static void blocks(const te_recipe_settings *s, te_role role, te_quantizer *q)
{
    q->element = element_of(s, role);
    set_blocks(q, 128, te_recipe_setting(s, block_dims[role], 1) == 2);
    q->power_of_two = !is_on(s, "use_f32_scales");
    q->epsilon = (float)te_recipe_setting(s, "amax_epsilon", 0);
}

static const te_option_info mxfp8_options[] = {
    FP8_FORMAT(E4M3),
    SWITCH("enable_2d_quantization", false, "weights in blocks of 32 x 32, so that both directions agree"),
    FP8_ATTENTION,
    BACKWARD_OVERRIDE,
    {0},
};

static void mxfp8(const te_recipe_settings *s, te_role role, te_quantizer *q)
{
    bool square = is_on(s, "enable_2d_quantization") && role == TE_ROLE_WEIGHT;
    q->element = element_of(s, role);
    q->scale = TE_SCALE_E8M0;
    set_blocks(q, 32, square);
    q->replicated = square;
    q->transposed = false;
}

/* --- two levels --------------------------------------------------------------------------------------------------- */

static const te_option_info nvfp4_options[] = {
    CHOICE("fp4_format", only_e2m1, 0, "elements"),
    CHOICE("fp8_format", only_e4m3, E4M3, "factors of blocks"),
    SWITCH("disable_rht", false, "no random Hadamard transform of the operands of the weight gradient"),
    SWITCH("disable_stochastic_rounding", false, "gradients are rounded to nearest"),
    SWITCH("disable_2d_quantization", false, "weights in blocks of 1 x 16, not 16 x 16"),
    SWITCH("row_scaled_activation", false, "inputs have an amax per row, not one per tensor"),
    CHOICE("nvfp4_4over6", tensors, NO_TENSORS,
           "blocks map to 4 or to 6, whichever has the smaller error; activations need disable_rht"),
    CHOICE("nvfp4_4over6_e4m3_use_256", tensors, ALL_TENSORS,
           "with nvfp4_4over6: the largest factor of a block is 256, not 448"),
    CHOICE("nvfp4_4over6_err_mode", errors, 0, "with nvfp4_4over6: errors are added up as magnitudes or squares"),
    BACKWARD_OVERRIDE,
    {0},
};

/* Whether a choice of tensors has this role among them; gradients are never chosen. */
static bool chosen(const te_recipe_settings *s, const char *name, te_role role)
{
    int choice = (int)te_recipe_setting(s, name, NO_TENSORS), own = role == TE_ROLE_WEIGHT ? WEIGHTS : ACTIVATIONS;
    return role != TE_ROLE_GRAD_OUTPUT && (choice == own || choice == ALL_TENSORS);
}

static te_status check_nvfp4(te_context *ctx, const te_recipe_settings *s)
{
    if (!chosen(s, "nvfp4_4over6", TE_ROLE_INPUT) || is_on(s, "disable_rht")) return TE_OK;
    return te_fail(
        ctx, TE_ERROR_ARGUMENT,
        "te.recipe.%s: option nvfp4_4over6: \"%s\" needs disable_rht = true: activations are transformed otherwise",
        s->kind->name, tensors[(int)te_recipe_setting(s, "nvfp4_4over6", NO_TENSORS)]);
}

static void nvfp4(const te_recipe_settings *s, te_role role, te_quantizer *q)
{
    bool square = role == TE_ROLE_WEIGHT && !is_on(s, "disable_2d_quantization"),
         four = chosen(s, "nvfp4_4over6", role);
    q->element = TE_E2M1;
    q->scale = TE_SCALE_E4M3;
    set_blocks(q, 16, square);
    q->replicated = square;
    q->hadamard = role != TE_ROLE_WEIGHT && !is_on(s, "disable_rht");
    q->stochastic = role == TE_ROLE_GRAD_OUTPUT && !is_on(s, "disable_stochastic_rounding");
    q->row_scaled = role == TE_ROLE_INPUT && is_on(s, "row_scaled_activation");
    if (four) q->four_over_six = te_recipe_setting(s, "nvfp4_4over6_err_mode", 0) == 0 ? TE_46_MAE : TE_46_MSE;
    q->scale_max = four && chosen(s, "nvfp4_4over6_e4m3_use_256", role) ? 256 : 448;
}

/* --- the table ---------------------------------------------------------------------------------------------------- */

static const te_option_info custom_options[] = {
    SWITCH("fp8_dpa", false, "the function is asked for a quantizer of attention, too"),
    BACKWARD_OVERRIDE,
    {0},
};
const te_recipe_kind te_recipe_kind_custom = {"Custom", NULL, custom_options, NULL, NULL, NULL};

static const te_recipe_kind kinds[] = {
    {"DelayedScaling", "delayed", delayed_options, delayed, delayed_attention, NULL},
    {"Float8CurrentScaling", "current", current_options, current, current_attention, NULL},
    {"Float8BlockScaling", "block", block_options, blocks, NULL, check_blocks},
    {"MXFP8BlockScaling", "mxfp8", mxfp8_options, mxfp8, current_attention, NULL},
    {"NVFP4BlockScaling", "nvfp4", nvfp4_options, nvfp4, NULL, check_nvfp4},
};

enum { KINDS = sizeof kinds / sizeof *kinds };

const te_recipe_kind *te_recipe_kind_at(int i) { return i >= 0 && i < KINDS ? &kinds[i] : NULL; }

const te_recipe_kind *te_recipe_kind_find(const char *name)
{
    for (int i = 0; i < KINDS && name; i++)
        if (strcmp(kinds[i].name, name) == 0) return &kinds[i];
    return NULL;
}

static int n_options(const te_recipe_kind *kind)
{
    int n = 0;
    while (kind->options[n].name) n++;
    return n;
}

te_recipe_settings te_recipe_defaults(const te_recipe_kind *kind)
{
    te_recipe_settings s = {.kind = kind};
    for (int i = 0; kind->options[i].name; i++) s.values[i] = kind->options[i].number;
    return s;
}

te_quantizer te_quantizer_usual(void)
{
    return (te_quantizer){.element = TE_E4M3, .has_columnwise = true, .transposed = true, .scale_max = 448};
}

bool te_recipe_operand(const te_recipe_settings *s, te_role role, bool attention, te_quantizer *q)
{
    const te_recipe_kind *kind = s->kind;
    bool wanted =
        !attention || (kind->attention && role == TE_ROLE_INPUT && (is_on(s, "fp8_dpa") || is_on(s, "fp8_mha")));
    *q = te_quantizer_usual();
    if (!wanted) return false;
    if (attention)
        kind->attention(s, q);
    else
        kind->quantizer(s, role, q);
    return true;
}

bool te_recipe_hands_on(const te_recipe_settings *s)
{
    te_quantizer q;
    if (!is_on(s, "fp8_mha") || !te_recipe_operand(s, TE_ROLE_INPUT, false, &q)) return false;
    return q.element == TE_E4M3 && q.scale == TE_SCALE_F32 && !q.block_rows;
}

/* --- te.h --------------------------------------------------------------------------------------------------------- */

const char *te_recipe_name_at(int i)
{
    const te_recipe_kind *kind = te_recipe_kind_at(i);
    return kind ? kind->name : NULL;
}

const te_option_info *te_recipe_option_at(const char *recipe, int i)
{
    const te_recipe_kind *kind = te_recipe_kind_find(recipe);
    return kind && i >= 0 && i < n_options(kind) ? &kind->options[i] : NULL;
}
