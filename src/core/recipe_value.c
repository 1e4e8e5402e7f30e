/* recipe_value.c - making recipes, and quantizers of operands from them; see recipe_value.h. */
#include "recipe_value.h"

#include "kernels/float_mode.h"
#include "quantizer_fields.h"

#include <math.h>
#include <stdio.h>

enum { MOST_ANSWERS = 16 }; /* recipes that name another recipe */

/* --- options ------------------------------------------------------------------------------------------------------ */

static const te_option_info *find_option(const te_recipe_kind *kind, const char *name, int *i)
{
    for (*i = 0; name && kind->options[*i].name; ++*i)
        if (strcmp(kind->options[*i].name, name) == 0) return &kind->options[*i];
    return NULL;
}

/* "one of E4M3, HYBRID" */
static void describe_choices(const te_option_info *info, char *text, size_t size)
{
    size_t n = 0;
    for (int i = 0; info->choices[i] && n < size; i++)
        n += (size_t)snprintf(text + n, size - n, "%s%s", i ? ", " : "", info->choices[i]);
}

static te_status read_choice(te_context *ctx, const char *recipe, const te_option_info *info, const char *given,
                             double *value)
{
    char text[200] = "";
    for (int i = 0; given && info->choices[i]; i++) {
        if (strcmp(info->choices[i], given) != 0) continue;
        *value = i;
        return TE_OK;
    }
    describe_choices(info, text, sizeof text);
    return te_fail(ctx, TE_ERROR_ARGUMENT, "te.recipe.%s: option %s: expected one of %s, got %.60s", recipe, info->name,
                   text, given ? given : "no text");
}

static te_status read_option(te_context *ctx, te_recipe_settings *s, const te_recipe_option *given)
{
    const char *recipe = s->kind->name;
    int i;
    const te_option_info *info = find_option(s->kind, given->name, &i);
    if (!info)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te.recipe.%s: unknown option %.60s", recipe,
                       given->name ? given->name : "NULL");
    if (info->type == TE_OPTION_CHOICE) return read_choice(ctx, recipe, info, given->text, &s->values[i]);
    double x = given->number;
    if (info->type == TE_OPTION_SWITCH) x = x != 0;
    bool whole = info->type != TE_OPTION_INTEGER || (x > -0x1p53 && x < 0x1p53 && x == (double)(int64_t)x);
    if (!(x >= info->min && x <= info->max && x < HUGE_VAL && whole))
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te.recipe.%s: option %s: expected %s from %g to %g, got %g", recipe,
                       info->name, info->type == TE_OPTION_INTEGER ? "an integer" : "a number", info->min, info->max,
                       x);
    s->values[i] = x;
    return TE_OK;
}

/* --- life --------------------------------------------------------------------------------------------------------- */

static te_recipe *make(te_context *ctx, const te_recipe_kind *kind, const te_recipe_option *options, int n)
{
    te_recipe_settings s = te_recipe_defaults(kind);
    te_status status = TE_OK;
    if (n < 0 || (n > 0 && !options))
        status = te_fail(ctx, TE_ERROR_ARGUMENT, "te.recipe.%s: %d options%s", kind->name, n,
                         options ? "" : " at NULL");
    for (int i = 0; i < n && status == TE_OK; i++) status = read_option(ctx, &s, &options[i]);
    if (status == TE_OK && kind->check) status = kind->check(ctx, &s);
    if (status != TE_OK) return NULL;
    te_recipe *recipe = te_mem_zalloc(&ctx->mem, sizeof *recipe);
    if (!recipe) {
        te_fail_memory(ctx, "recipe");
        return NULL;
    }
    recipe->ctx = ctx;
    recipe->refs = 1;
    recipe->settings = s;
    te_context_retain(ctx);
    return recipe;
}

te_recipe *te_recipe_new(te_context *ctx, const char *name, const te_recipe_option *options, int n_options)
{
    TE_FLOAT_DEFAULT_HERE;
    if (!ctx) return NULL;
    const te_recipe_kind *kind = te_recipe_kind_find(name);
    if (kind) return make(ctx, kind, options, n_options);
    te_fail(ctx, TE_ERROR_ARGUMENT, "te_recipe_new: there is no recipe %.60s", name ? name : "NULL");
    return NULL;
}

te_recipe *te_recipe_custom(te_context *ctx, te_quantizer_factory *factory, void *user, const te_recipe_option *options,
                            int n_options)
{
    TE_FLOAT_DEFAULT_HERE;
    if (!ctx) return NULL;
    if (!factory) {
        te_fail(ctx, TE_ERROR_ARGUMENT, "te_recipe_custom: expected a function from operand to quantizer");
        return NULL;
    }
    te_recipe *recipe = make(ctx, &te_recipe_kind_custom, options, n_options);
    if (!recipe) return NULL;
    recipe->factory = factory;
    recipe->user = user;
    return recipe;
}

te_recipe *te_recipe_retain(te_recipe *recipe)
{
    if (recipe) recipe->refs++;
    return recipe;
}

void te_recipe_release(te_recipe *recipe)
{
    if (!recipe || --recipe->refs > 0) return;
    te_context *ctx = recipe->ctx;
    for (int i = 0; i < 2; i++) te_product_recipe_release(recipe->forms[i]);
    te_mem_free(&ctx->mem, recipe, sizeof *recipe);
    te_context_unref(ctx);
}

te_status te_recipe_set_algorithms(te_recipe *recipe, const te_delayed_algorithms *algorithms)
{
    if (!recipe) return TE_ERROR_ARGUMENT;
    if (te_recipe_setting(&recipe->settings, "amax_history_len", 0) == 0)
        return te_fail(recipe->ctx, TE_ERROR_ARGUMENT, "te_recipe_set_algorithms: %s keeps no history",
                       recipe->settings.kind->name);
    if (recipe->used)
        return te_fail(recipe->ctx, TE_ERROR_ARGUMENT,
                       "te_recipe_set_algorithms: the recipe is in use; make another one");
    recipe->algorithms = algorithms ? *algorithms : (te_delayed_algorithms){0};
    return TE_OK;
}

/* --- operands ----------------------------------------------------------------------------------------------------- */

enum { NO_SAY = -2 }; /* -1: quantized; else a choice of backward_override */

/* Where a quantizer comes from. */
typedef struct source {
    te_recipe *owner; /* whose options hold; NULL: none's */
    int backward;     /* what those that were asked say, the first of them that says something */
} source;

static void ask_backward(source *from, const te_recipe *recipe)
{
    int said = (int)te_recipe_setting(&recipe->settings, "backward_override", NO_SAY);
    bool custom = recipe->settings.kind == &te_recipe_kind_custom; /* which leaves it to others unless it says more */
    if (from->backward < 0 && !(custom && said < 0)) from->backward = said;
}

/* Of an attention, q, k and v are the only operands, and those of a recipe from a function stay in high precision
 * unless it was made with fp8_dpa. */
static bool asks_of_attention(const te_recipe *custom, const te_operand_role *operand)
{
    return operand->role == TE_ROLE_INPUT && te_recipe_setting(&custom->settings, "fp8_dpa", 0) != 0;
}

/* What a recipe says of an operand, asking the recipes that it names. */
static te_status resolve(te_recipe *recipe, const te_operand_role *operand, te_quantizer *q, bool *quantized,
                         source *from)
{
    te_context *ctx = recipe->ctx;
    *from = (source){NULL, NO_SAY};
    for (int n = 0; n < MOST_ANSWERS; n++) {
        ask_backward(from, recipe);
        if (recipe->settings.kind != &te_recipe_kind_custom) {
            from->owner = recipe;
            *quantized = te_recipe_operand(&recipe->settings, operand->role, operand->attention, q);
            return TE_OK;
        }
        *quantized = false;
        if (operand->attention && !asks_of_attention(recipe, operand)) return TE_OK;
        te_quantizer_fields fields = {.struct_size = sizeof fields};
        te_recipe *other = NULL;
        te_quantizer_defaults(&fields);
        te_answer answer = recipe->factory(recipe->user, operand, &fields, &other);
        *quantized = answer == TE_ANSWER_QUANTIZER;
        if (answer == TE_ANSWER_HIGH_PRECISION) return TE_OK;
        if (answer == TE_ANSWER_QUANTIZER) return te_quantizer_from_fields(ctx, "te.recipe.Custom", &fields, q);
        if (answer != TE_ANSWER_RECIPE || !other || other->ctx != ctx)
            return te_fail(ctx, TE_ERROR_ARGUMENT, "te.recipe.Custom: the function gave %s for %s",
                           answer == TE_ANSWER_RECIPE ? "no recipe of this context" : "no te_answer",
                           te_role_names[operand->role]);
        recipe = other;
    }
    return te_fail(ctx, TE_ERROR_ARGUMENT, "te.recipe.Custom: recipes name each other for %s",
                   te_role_names[operand->role]);
}

te_status te_recipe_quantizer(te_recipe *recipe, const te_operand_role *operand, te_quantizer_fields *fields,
                              bool *quantized)
{
    TE_FLOAT_DEFAULT_HERE;
    te_quantizer q;
    source from;
    if (!recipe) return TE_ERROR_ARGUMENT;
    if (!operand || !fields || !quantized)
        return te_fail(recipe->ctx, TE_ERROR_ARGUMENT, "te_recipe_quantizer: operand, fields and quantized are needed");
    if ((unsigned)operand->role >= TE_ROLE_COUNT)
        return te_fail(recipe->ctx, TE_ERROR_ARGUMENT, "te_recipe_quantizer: operand: there is no role %d",
                       (int)operand->role);
    if (fields->struct_size < offsetof(te_quantizer_fields, scale))
        return te_fail(recipe->ctx, TE_ERROR_ARGUMENT,
                       "te_recipe_quantizer: struct_size: %zu; see te_quantizer_defaults", fields->struct_size);
    te_operand_role asked = *operand;
    if (!asked.name) asked.name = "";
    te_status status = resolve(recipe, &asked, &q, quantized, &from);
    if (status == TE_OK && *quantized) te_quantizer_to_fields(&q, fields);
    return status;
}

/* --- forms -------------------------------------------------------------------------------------------------------- */

/* The quantizer of one role in *made, and whose rule updates it. */
static te_status fill_role(te_recipe *recipe, const te_operand_role *operand, te_product_recipe *made,
                           te_recipe_form *form, source *from)
{
    te_role r = operand->role;
    te_status status = resolve(recipe, operand, &made->quantizers[r], &made->quantized[r], from);
    te_recipe *owner = from->owner;
    if (!made->quantized[r]) *from = (source){NULL, NO_SAY};
    if (status != TE_OK || !made->quantized[r] || !made->quantizers[r].needs_history) return status;
    if (!owner)
        return te_fail(recipe->ctx, TE_ERROR_ARGUMENT,
                       "te.recipe: %s: a quantizer that needs a history comes from DelayedScaling", te_role_names[r]);
    made->history_length[r] = (int64_t)te_recipe_setting(&owner->settings, "amax_history_len", 1);
    owner->used = true;
    form->rules[r] = te_recipe_retain(owner);
    return TE_OK;
}

/* What backward computes with: as the recipe itself says, else as those say that it names. */
static te_status fill_backward(const te_recipe *recipe, const source *from, te_product_recipe *made)
{
    int said = (int)te_recipe_setting(&recipe->settings, "backward_override", -1), first = -1;
    for (int r = 0; r < TE_ROLE_COUNT && recipe->factory && said < 0; r++) {
        if (from[r].backward == NO_SAY) continue;
        if (first < 0) first = r;
        if (from[r].backward != from[first].backward)
            return te_fail(recipe->ctx, TE_ERROR_ARGUMENT,
                           "te.recipe.Custom: option backward_override: the recipes for %s and %s differ in it; give "
                           "it to te.recipe.Custom",
                           te_role_names[first], te_role_names[r]);
    }
    made->backward = (te_backward_precision)(1 + (first < 0 ? said : from[first].backward));
    return TE_OK;
}

static void fill_fast_sums(const source *from, te_product_recipe *made)
{
    int choices[TE_ROLE_COUNT];
    for (int r = 0; r < TE_ROLE_COUNT; r++)
        choices[r] = from[r].owner ? (int)te_recipe_setting(&from[r].owner->settings, "fast_accumulation", 0) : 0;
    te_product_recipe_allow_fast_sums(made, choices);
}

te_status te_recipe_form_open(te_recipe *recipe, const char *name, bool attention, te_recipe_form *form)
{
    TE_FLOAT_DEFAULT_HERE;
    te_product_recipe made = {.history_length = {1, 1, 1}};
    source from[TE_ROLE_COUNT] = {{NULL, NO_SAY}};
    *form = (te_recipe_form){.recipe = NULL};
    te_status status = TE_OK;
    for (int r = 0; r < TE_ROLE_COUNT && status == TE_OK; r++)
        status = fill_role(recipe, &(te_operand_role){(te_role)r, attention, name}, &made, form, &from[r]);
    if (status == TE_OK) status = fill_backward(recipe, from, &made);
    if (status == TE_OK) fill_fast_sums(from, &made);
    te_recipe *input = from[TE_ROLE_INPUT].owner;
    made.hands_on = attention && input && te_recipe_hands_on(&input->settings);
    te_product_recipe *kept = recipe->forms[attention];
    if (status == TE_OK)
        form->recipe = kept ? te_product_recipe_retain(kept) : te_product_recipe_new(recipe->ctx, &made);
    if (status == TE_OK && !form->recipe) status = recipe->ctx->status;
    if (status == TE_OK && !kept && !recipe->factory) recipe->forms[attention] = te_product_recipe_retain(form->recipe);
    recipe->used |= status == TE_OK;
    if (status != TE_OK) te_recipe_form_close(form);
    return status;
}

void te_recipe_form_close(te_recipe_form *form)
{
    te_product_recipe_release(form->recipe);
    for (int r = 0; r < TE_ROLE_COUNT; r++) te_recipe_release(form->rules[r]);
    *form = (te_recipe_form){.recipe = NULL};
}
