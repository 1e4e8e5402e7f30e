/* autocast.h - the scopes of a C host, and the products that run in them.
 *
 * A scope is an entry of the context's stack: what te_autocast_begin found, to be put back, and the recipe in force. A
 * product of a host's is a recipe state with a *host part*: its name, the recipe that it was last given, and its place
 * in the context's list of products whose scales have to be updated. Scripts have the like in Lua (lua/te/recipe/),
 * around the same states; both end in te_recipe_states_update. */
#ifndef TE_CORE_AUTOCAST_H
#define TE_CORE_AUTOCAST_H

#include "recipe_value.h"

typedef struct te_scope {
    te_recipe *recipe; /* held; NULL: none */
    bool updates; /* scales change where it ends: it quantizes or calibrates, and no scope around it does */
    bool enabled, calibrating; /* of the context before */
    te_dtype dtype;
} te_scope;

struct te_product_host {
    char name[64];
    te_recipe *recipe; /* held: what the state's quantizers come from; NULL: none yet */
    bool attention;
    te_recipe_form form; /* with the last rule that a role had */
    bool listed;
    te_recipe_state *next, *previous; /* in the context's list */
};

/* Gives a host's product the quantizers of the scope it is in; nothing for other states, and outside. */
te_status te_product_prepare(te_recipe_state *state, bool attention);
/* The end of a step for inputs and weights, or for gradients, of all products of the host. */
te_status te_products_update(te_context *ctx, bool gradients);
/* The end of one that failed: its amaxes are forgotten. */
te_status te_products_forget(te_context *ctx, bool gradients);
void te_product_host_close(te_recipe_state *state);
void te_scopes_close(te_context *ctx);

#endif
