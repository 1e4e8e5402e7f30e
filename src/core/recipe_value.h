/* recipe_value.h - a recipe as a host holds it (te_recipe of recipe.h), and what products are given of it. Scripts have
 * values of their own, from the same table (recipe_kinds.h). */
#ifndef TE_CORE_RECIPE_VALUE_H
#define TE_CORE_RECIPE_VALUE_H

#include "recipe.h"
#include "recipe_kinds.h"

struct te_recipe {
    te_context *ctx;
    int refs;
    te_recipe_settings settings;
    te_delayed_algorithms algorithms;
    te_quantizer_factory *factory; /* Custom */
    void *user;
    bool used;                    /* options are what products were made from */
    te_product_recipe *forms[2];  /* of a product, of an attention; not of Custom, which looks at names */
};

/* A product's quantizers under a recipe, one reference each, to be released; `rules`: the recipes whose delayed scaling
 * updates them, or NULL. */
typedef struct te_recipe_form {
    te_product_recipe *recipe;
    te_recipe *rules[TE_ROLE_COUNT];
} te_recipe_form;

te_status te_recipe_form_open(te_recipe *recipe, const char *name, bool attention, te_recipe_form *form);
void te_recipe_form_close(te_recipe_form *form);

#endif
