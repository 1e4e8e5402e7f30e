/* recipe_kinds.h - the recipes that have names: what each can be told, and the quantizers that follow from it.
 *
 * One row of a table per recipe. te_recipe_new and Lua's te.recipe check options against it and ask it for quantizers;
 * nothing else knows a recipe by name, and a new one is a new row. */
#ifndef TE_CORE_RECIPE_KINDS_H
#define TE_CORE_RECIPE_KINDS_H

#include "quantizer.h"

enum { TE_RECIPE_MAX_OPTIONS = 12 };

typedef struct te_recipe_kind te_recipe_kind;

/* A kind with a value for each of its options, choices by index. */
typedef struct te_recipe_settings {
    const te_recipe_kind *kind;
    double values[TE_RECIPE_MAX_OPTIONS];
} te_recipe_settings;

struct te_recipe_kind {
    const char *name;
    const char *short_name; /* on command lines */
    const te_option_info *options; /* ends with an empty one */
    /* NULL: a function of the host's says */
    void (*quantizer)(const te_recipe_settings *s, te_role role, te_quantizer *q);
    /* of q, k and v under fp8_dpa; NULL: they are not quantized */
    void (*attention)(const te_recipe_settings *s, te_quantizer *q);
    /* what options must be to each other; NULL: nothing */
    te_status (*check)(te_context *ctx, const te_recipe_settings *s);
};

/* NULL where there is none. */
const te_recipe_kind *te_recipe_kind_find(const char *name);
const te_recipe_kind *te_recipe_kind_at(int i);
extern const te_recipe_kind te_recipe_kind_custom;

te_recipe_settings te_recipe_defaults(const te_recipe_kind *kind);
/* The value of an option, `otherwise` where the recipe has none of that name. */
double te_recipe_setting(const te_recipe_settings *s, const char *name, double otherwise);

/* One factor of the whole tensor from its own amax, E4M3: what fields that nobody sets are. */
te_quantizer te_quantizer_usual(void);
/* The quantizer of an operand; false: it stays in high precision. Of recipes that have a function for it. */
bool te_recipe_operand(const te_recipe_settings *s, te_role role, bool attention, te_quantizer *q);
/* Whether attention's result goes on as it is: in the format that the recipe's products multiply. */
bool te_recipe_hands_on(const te_recipe_settings *s);

#endif
