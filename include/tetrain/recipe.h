/* recipe.h - low precision: recipes, the scope in which they act, the state of products, quantized tensors. Part of
 * te.h, whose conventions apply here: the caller releases what it makes, arguments are borrowed, a NULL or a status
 * comes with a message, and objects keep their context alive. Passing NULL in place of an object is an error, too,
 * without a message where no other argument has a context.
 *
 * A matrix product has three operands: the input {.., in}, the weight {out, in}, and in backward the gradient of the
 * output. A *recipe* says how each is quantized. It acts between te_autocast_begin and te_autocast_end, on operations
 * that run with a *product*: the state of one weight's matrix products, which outlives scopes and recipes.
 *
 *      te_recipe_option options[] = {{"amax_history_len", 16, NULL}, {"fp8_format", 0, "E4M3"}};
 *      te_recipe  *recipe = te_recipe_new(ctx, "DelayedScaling", options, 2);
 *      te_product *fc = te_product_new(ctx, "fc");                 kept from step to step, like the weight
 *      te_autocast scope = {sizeof scope, recipe, "bfloat16", false, false};
 *      te_autocast_begin(ctx, &scope);
 *      te_product_run(fc, te_op_find(ctx, "linear"), args, 3, &y, 1);
 *      te_autocast_end(ctx);                                       updates the scales of input and weight
 *      te_backward(loss, NULL, false);                             … and at its end that of the gradient
 *
 * Recipes, options and their defaults are those of Lua's te.recipe, from one table. Scripts have scopes of their own
 * (te.autocast). A C scope quantizes nothing in Lua modules that are called inside it, but their operations compute in
 * its dtype; te.autocast quantizes nothing that C calls.
 */
#ifndef TETRAIN_RECIPE_H
#define TETRAIN_RECIPE_H

#include "te.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct te_recipe           te_recipe;
typedef struct te_recipe_state     te_product; /* a product holds the state of its recipe */
typedef struct te_quantized_tensor te_quantized_tensor;

/* --- quantizers --------------------------------------------------------------------------------------------------- */

typedef enum te_role { TE_ROLE_INPUT, TE_ROLE_WEIGHT, TE_ROLE_GRAD_OUTPUT, TE_ROLE_COUNT } te_role;

/* How one operand is quantized. The fields can be combined as far as the kernels support it (te_quantizer_fields_check
 * reports what they do not). Begin with te_quantizer_defaults: one float32 factor for the whole tensor, from its own
 * amax, E4M3 elements.
 *
 *      factor of a block = largest value of the element / amax of the block;  its inverse, scale_inv, is stored */
typedef struct te_quantizer_fields {
    size_t      struct_size;    /* sizeof(te_quantizer_fields) */
    const char *element;        /* "float8_e4m3" (largest value 448), "float8_e5m2" (57344), "float4_e2m1" (6) */
    const char *scale;          /* of factors: "float32"; "e8m0": powers of two; "float8_e4m3", below the tensor's */
    const char *four_over_six;  /* "none"; "mae", "mse": the one of two factors of a block with the smaller error */
    int         block_rows;     /* block_rows x block_cols: 1 x n or n x n with n dividing 128; … */
    int         block_cols;     /* … 0 x 0: the whole tensor */
    bool        needs_history;  /* the factor is given, from amaxes of earlier steps, and the amax is reported */
    bool        has_columnwise; /* a column-wise copy may be stored, for products that sum over rows … */
    bool        transposed;     /* … as the transpose, {cols, rows}; false: in the order of the source */
    bool        replicated;     /* a factor per row of each block; in square blocks these are equal */
    bool        power_of_two;   /* float32 factors are rounded down to powers of two */
    bool        row_scaled;     /* with "float8_e4m3": an amax per row instead of one per tensor */
    bool        hadamard;       /* the column-wise copy is transformed, 16 rows together, with fixed signs */
    bool        stochastic;     /* float4_e2m1 is rounded stochastically, with random bits of the context */
    float       epsilon;        /* smaller amaxes count as this */
    float       scale_max;      /* with "float8_e4m3": largest factor of a block, 448 or 256 */
} te_quantizer_fields;

/* Fills as much of the struct as struct_size, which must be set before, says there is; so do functions below. */
TE_API void      te_quantizer_defaults(te_quantizer_fields *fields);
TE_API te_status te_quantizer_fields_check(te_context *ctx, const te_quantizer_fields *fields);

/* --- recipes ------------------------------------------------------------------------------------------------------ */

/* An option by name: `text` for those with choices, `number` for all others (for switches: 0 is false, else true). */
typedef struct te_recipe_option {
    const char *name;
    double      number;
    const char *text;
} te_recipe_option;

/* Describes an option of a recipe. */
typedef enum te_option_type { TE_OPTION_SWITCH, TE_OPTION_INTEGER, TE_OPTION_NUMBER, TE_OPTION_CHOICE } te_option_type;
typedef struct te_option_info {
    const char        *name;
    te_option_type     type;
    double             number;   /* the default: for choices an index into `choices`, -1 for none */
    double             min, max; /* INTEGER, NUMBER */
    const char *const *choices;  /* CHOICE: ends with NULL */
    const char        *doc;      /* its meaning, in a few words */
} te_option_info;

/* The name of recipe i, "DelayedScaling" and so on, NULL past the last; docs/operations.md lists them all. And option i
 * of a recipe, NULL past the last, or where there is no such recipe. Static memory. */
TE_API const char           *te_recipe_name_at(int i);
TE_API const te_option_info *te_recipe_option_at(const char *recipe, int i);

/* A recipe never changes once products use it. Options that are not given have their defaults; where one is given
 * twice, the last counts. TE_ERROR_ARGUMENT in the context and NULL for an unknown name, a value out of range, or
 * options that contradict each other. */
TE_API te_recipe *te_recipe_new(te_context *ctx, const char *name, const te_recipe_option *options, int n_options);
TE_API te_recipe *te_recipe_retain(te_recipe *recipe);
TE_API void       te_recipe_release(te_recipe *recipe);

/* Custom algorithms of delayed scaling; NULL: the built-in one. They are called on the host at the end of a step, once
 * per operand that was seen in it; amaxes of 0 (nothing was seen) and infinite ones are never passed. history: the
 * amax of this step, then those of earlier ones, the oldest first. Results must be positive and finite where they
 * become a scale. To be set before the recipe is first used. What `user` points to must live as long as the recipe and
 * the products that ran under it: amaxes of a backward may come after the products have got another recipe. */
typedef struct te_delayed_algorithms {
    float (*amax)(void *user, const float *history, int64_t n);            /* in place of amax_compute_algo */
    float (*scale)(void *user, float amax, float old_scale, float largest); /* in place of largest 2^-margin / amax */
    void *user;
} te_delayed_algorithms;
TE_API te_status te_recipe_set_algorithms(te_recipe *recipe, const te_delayed_algorithms *algorithms);

/* A recipe from a function, Lua's te.recipe.Custom. The function is called once per operand of a product, when the
 * product first runs under the recipe. `fields` hold their defaults. It returns what to do with the operand. */
typedef struct te_operand_role {
    te_role     role;
    bool        attention; /* q, k and v of an attention, whose role is INPUT: only asked for under fp8_dpa */
    const char *name;      /* of the product */
} te_operand_role;
typedef enum te_answer {
    TE_ANSWER_HIGH_PRECISION, /* it is not quantized */
    TE_ANSWER_QUANTIZER,      /* quantize it by *fields, without needs_history */
    TE_ANSWER_RECIPE          /* quantize it as *recipe does, which is borrowed */
} te_answer;
typedef te_answer te_quantizer_factory(void *user, const te_operand_role *operand, te_quantizer_fields *fields,
                                       te_recipe **recipe);
/* Options: backward_override, and fp8_dpa: the function is asked of attentions, too, which otherwise stay in high
 * precision. A recipe that it names for an attention quantizes that if its own options say so. */
TE_API te_recipe *te_recipe_custom(te_context *ctx, te_quantizer_factory *factory, void *user,
                                   const te_recipe_option *options, int n_options);

/* The quantizer of an operand. *quantized false: it stays in high precision, and *fields are left alone. */
TE_API te_status te_recipe_quantizer(te_recipe *recipe, const te_operand_role *operand, te_quantizer_fields *fields,
                                     bool *quantized);

/* --- the scope of a recipe ---------------------------------------------------------------------------------------- */

typedef struct te_autocast {
    size_t      struct_size; /* sizeof(te_autocast) */
    te_recipe  *recipe;      /* NULL: that of the enclosing scope */
    const char *dtype;       /* of product, norm, attention, embedding: "float32", "bfloat16", "float16"; NULL: as is */
    bool        disabled;    /* nothing is quantized, and operations compute in the dtype of their operands */
    bool        calibrating; /* with disabled: amaxes are collected, and scales follow from them at the end */
} te_autocast;

/* Scopes nest. NULL: a scope that changes nothing. On failure nothing has begun. */
TE_API te_status te_autocast_begin(te_context *ctx, const te_autocast *scope);
/* Ends the innermost scope and restores the dtype. When the outermost one ends, with gradients enabled or after
 * calibrating, delayed scaling takes the amaxes of inputs and weights into account. The scope ends also on failure. An
 * error where none has begun. */
TE_API te_status te_autocast_end(te_context *ctx);
/* For error paths: the number of open scopes, and a function that ends all above `depth`, without new scales. Amaxes
 * that te_autocast_end would have taken into account are discarded. */
TE_API int       te_autocast_depth(const te_context *ctx);
TE_API te_status te_autocast_unwind(te_context *ctx, int depth);

/* --- products ----------------------------------------------------------------------------------------------------- */

/* One for each weight that is multiplied with, or for each attention. name: for a te_quantizer_factory; NULL: "". */
TE_API te_product *te_product_new(te_context *ctx, const char *name);
TE_API te_product *te_product_retain(te_product *product);
TE_API void        te_product_release(te_product *product); /* groups and recorded runs that use it hold it as well */

/* te_op_run of linear, scaled_dot_product_attention or self_attention, under the recipe in force; without a recipe the
 * same as te_op_run. The quantized weight is kept until the weight changes. */
TE_API te_status te_product_run(te_product *product, const te_op *op, const te_arg *args, int n_args,
                                te_tensor **out, int n_out);
/* The same for te_group_apply of linear or self_attention: the recipe is the one in force when the group runs. */
TE_API te_status te_product_apply(te_product *product, te_group *group, const te_op *op, const int *values,
                                  int n_values, const te_arg *args, int n_args, int *result);

/* The state of delayed scaling: the factor that the next tensor is multiplied by, float32 {1}, and the amaxes, float32
 * {amax_history_len}: that of the step in progress, then those of earlier ones, the oldest first. Borrowed, for saving;
 * NULL until the product has run under such a recipe. */
TE_API te_tensor *te_product_scale(const te_product *product, te_role role);
TE_API te_tensor *te_product_amax_history(const te_product *product, te_role role);
/* Restores copies of what was saved: float32 on the CPU, {1} and {n}. */
TE_API te_status te_product_set_state(te_product *product, te_role role, te_tensor *scale, te_tensor *amax_history);
/* How many amaxes of a step were infinite or NaN and therefore discarded, since the context was opened. Waits for
 * devices. */
TE_API te_status te_context_skipped_amaxes(te_context *ctx, uint64_t *count);

/* --- quantized tensors -------------------------------------------------------------------------------------------- */

typedef enum te_direction { TE_ROWWISE, TE_COLUMNWISE } te_direction;
/* DATA: one byte per element, or per two of float4_e2m1, the even one in the low half. SCALE_INV: the factors to
 * multiply elements by, {1} or one per block; for "e8m0" a uint8 e stands for 2^(e - 127). AMAX: the amaxes from which
 * factors were computed, NULL where each block has its own. */
typedef enum te_stored_part {
    TE_STORED_DATA,
    TE_STORED_SCALE_INV,
    TE_STORED_AMAX,
    TE_STORED_PART_COUNT
} te_stored_part;

typedef struct te_quantize_how {
    size_t   struct_size;            /* sizeof(te_quantize_how) */
    bool     no_rowwise, no_columnwise; /* copies not to make, of those that the quantizer has */
    float    scale;                  /* with needs_history: the factor; 0 counts as 1 */
    bool     seeded;                 /* with stochastic: random bits come from `seed`, not from the context */
    uint64_t seed;
} te_quantize_how;

/* Quantizes the rows of `source` (float32, bfloat16, float16; leading dimensions count as rows); both copies come from
 * the same values. how NULL: all defaults. */
TE_API te_quantized_tensor *te_quantized_tensor_new(te_tensor *source, const te_quantizer_fields *fields,
                                                    const te_quantize_how *how);
/* Makes one from saved parts [direction][part], NULL where absent, and takes references to them; shape and dtype are
 * those of the source. */
TE_API te_quantized_tensor *te_quantized_tensor_from_parts(te_context *ctx, const te_quantizer_fields *fields,
                                                           te_dtype dtype, int ndim, const int64_t *shape,
                                                           te_tensor *parts[2][TE_STORED_PART_COUNT]);
TE_API te_quantized_tensor *te_quantized_tensor_retain(te_quantized_tensor *q);
TE_API void                 te_quantized_tensor_release(te_quantized_tensor *q);
/* Borrowed; NULL where absent. */
TE_API te_tensor *te_quantized_tensor_part(const te_quantized_tensor *q, te_direction direction, te_stored_part part);
/* A new tensor of the source's shape and dtype with the dequantized values. */
TE_API te_tensor *te_quantized_tensor_dequantize(const te_quantized_tensor *q, te_direction direction);

/* A leaf with the weight's values, stored only in the recipe's format, for this product (Lua's
 * te.quantized_model_init). Products multiply it as it is, other operations see its dequantized values, and
 * te_tensor_write quantizes what it writes. trains: with the copy that backward multiplies. It requires no gradient
 * until te_tensor_set_requires_grad is called. Where the recipe leaves weights in high precision, it is a leaf like any
 * other. */
TE_API te_tensor *te_product_parameter(te_product *product, te_recipe *recipe, te_tensor *weight, bool trains);
/* The parts of such a tensor, borrowed; NULL where absent, and for other tensors. */
TE_API te_tensor *te_tensor_quantized_part(const te_tensor *t, te_direction direction, te_stored_part part);

#ifdef __cplusplus
}
#endif
#endif
