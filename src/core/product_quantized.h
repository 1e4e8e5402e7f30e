/* product_quantized.h - the three products of a linear layer under a recipe.
 *
 *      y  = x W^T      x row-wise,      W row-wise
 *      dx = dy W       dy row-wise,     W column-wise
 *      dW = dy^T x     dy column-wise,  x column-wise
 *
 * Copies for a direction are made only when a product will read them, together with those for the other direction.
 * After forward only what backward reads is kept. Of an x that backward computes again that is the factor of delayed
 * scaling: from the same values follow the same bytes. */
#ifndef TE_CORE_PRODUCT_QUANTIZED_H
#define TE_CORE_PRODUCT_QUANTIZED_H

#include "recipe.h"

/* An operand: quantized, or a tensor where its role stays in high precision. */
typedef struct te_factor {
    te_tensor *plain;
    uint64_t version; /* of plain, when it was kept */
    te_quantized quantized; /* of `plain` NULL */
} te_factor;

/* What backward reads. */
typedef struct te_product_saved {
    te_recipe_state *state; /* NULL: nothing was saved */
    te_product_recipe *recipe;
    te_dtype compute;
    te_factor x, weight;
    te_tensor *scale;  /* of an x that is computed again: what it was multiplied by, where that was given */
    te_factor waiting; /* the gradient of y, while dW waits for such an x */
} te_product_saved;

/* What becomes of x after forward. */
typedef enum te_product_x {
    TE_X_UNREAD, /* dW is not wanted */
    TE_X_KEPT,
    TE_X_AGAIN   /* te_quantized_recall gets it once more */
} te_product_x;

/* y = x W^T + bias in dtype `compute`: x {.., in}, weight {out, in}, bias {out} or NULL, y {.., out} of that dtype.
 * `saved` is filled for the wanted gradients, to be closed by the caller, also on failure. `ready`: x quantized
 * already, which is taken over; NULL or nothing there: it is quantized here. */
te_status te_quantized_product(te_recipe_state *state, te_tensor *y, te_tensor *x, te_quantized *ready,
                               te_tensor *weight, te_tensor *bias, bool want_dx, te_product_x after,
                               te_product_saved *saved);
void te_product_saved_close(te_product_saved *saved);

/* Whether what dW reads of x can be made from x computed again, to the same bytes. */
bool te_product_may_recall(const te_product_recipe *recipe);
/* Makes that, in saved->x, from x in dtype `compute`; the caller closes saved->x behind dW. */
te_status te_quantized_recall(te_product_saved *saved, te_tensor *x);

/* The gradient of y, as the wanted products read it; to be closed. `ready` as above. */
te_status te_quantized_grad_output(const te_product_saved *saved, te_tensor *dy, te_quantized *ready, bool want_dx,
                                   bool want_dweight, te_factor *result);
void te_factor_close(te_factor *factor);
static inline bool te_factor_is_there(const te_factor *f) { return f->plain || te_quantized_is_there(&f->quantized); }
/* Lets go of the direction that no product reads any more. */
void te_factor_keep_side(te_factor *factor, int side);

/* dx = dy W and dW = dy^T x, or added to what is there. Targets as for te_linear_dgrad and te_linear_wgrad. */
te_status te_quantized_dgrad(const te_product_saved *saved, te_tensor *dx, const te_factor *dy, bool accumulate);
te_status te_quantized_wgrad(const te_product_saved *saved, te_tensor *dweight, const te_factor *dy, bool accumulate);

#endif
