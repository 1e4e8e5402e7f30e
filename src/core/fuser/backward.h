/* backward.h - a backward pass in progress, shared by the files that run it. */
#ifndef TE_CORE_FUSER_BACKWARD_H
#define TE_CORE_FUSER_BACKWARD_H

#include "plan.h"

#include "../autograd.h"

typedef struct te_group_backward {
    te_group_state *state;
    te_fuse_plan   *plan;
    te_context     *ctx;
    te_call        *call;
    bool            release; /* saved tensors are consumed */
} te_group_backward;

static inline void te_drop(te_tensor **t)
{
    te_tensor_release(*t);
    *t = NULL;
}

/* The tape's number of a parameter, when its gradient is wanted in this pass; -1 otherwise. */
static inline int te_wanted_edge(const te_group_backward *b, int value)
{
    int edge = b->plan->values[value].input;
    return b->plan->values[value].wanted && te_grad_wanted(b->call, edge) ? edge : -1;
}

/* A product keeps x, the weight and, while its weight gradient waits for x, the gradient of its result: under no recipe
 * in tensors of the run, else in what it saved. */
static inline te_tensor **te_waiting(const te_group_backward *b, const te_unit *product)
{
    return &b->state->aux[product->first_aux + 2];
}

static inline bool te_waits_for(const te_group_backward *b, const te_unit *unit, int value)
{
    if (unit->kind != TE_UNIT_LINEAR || unit->x != value) return false;
    return unit->recipe ? te_factor_is_there(&b->state->products[unit->product].waiting) : *te_waiting(b, unit) != NULL;
}

/* backward_products.c: adds to the gradient of an activation so far, taking over the tensor; the gradients of a
 * product; those of weights that waited for what a unit has computed again. */
te_status te_backward_add(te_group_backward *b, int value, te_tensor *grad);
te_status te_backward_linear(te_group_backward *b, const te_unit *unit);
te_status te_backward_finish(te_group_backward *b, const te_unit *unit);
void      te_backward_forget(te_group_backward *b, const te_unit *product); /* what waits for that */
te_status te_backward_gather(te_group_backward *b, const te_unit *unit); /* gather.c */
te_status te_backward_grouped(te_group_backward *b, const te_unit *unit); /* grouped.c */
te_status te_backward_biases(te_group_backward *b, const te_unit *unit); /* ranges.c */

/* What the gradients of a product are made of. */
typedef struct te_backward_operands {
    te_tensor *dy, *x, *weight;
    te_factor  factor; /* of dy under a recipe */
    te_product_saved *saved; /* under a recipe: the other operands */
} te_backward_operands;

/* dW, added straight to where the tape wants it, or in the dtype of the product and then cast. */
te_status te_backward_weight(te_group_backward *b, const te_unit *unit, int edge, const te_backward_operands *p);

/* Where the gradient of an activation may be written, or added when *accumulate. NULL on failure. */
te_tensor *te_backward_target(te_group_backward *b, int value, bool *accumulate);

#endif
