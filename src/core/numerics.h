/* numerics.h - how well the operands of a product survive quantization: what te.numerics shows.
 *
 * A state that is watched counts the tensors that are quantized in each of its roles while gradients are recorded. Each
 * is copied to the host in the compute dtype and quantized there once more, row-wise and without touching the random
 * numbers: slow, meant for one step in many, and the step computes what it would have computed. */
#ifndef TE_CORE_NUMERICS_H
#define TE_CORE_NUMERICS_H

#include "recipe.h"

/* Sums over all tensors of a role since the watch was last turned on. */
typedef struct te_role_numerics {
    double values, nonfinite;  /* how many; infinite and NaN ones count for nothing below */
    double saturated, flushed; /* cut off by more than rounding; made 0 without being 0 */
    double error, norm;        /* sums of squares: what quantizing changed, and the source */
    double amax;
    double scale; /* what the last tensor was multiplied by; 0: each block has its own */
} te_role_numerics;

struct te_numerics {
    bool on;
    te_role_numerics roles[TE_ROLE_COUNT];
};

/* On: counts anew from here. Off: keeps what was counted. */
te_status te_numerics_watch(te_recipe_state *state, bool on);
void te_numerics_unwatch(te_recipe_state *state);
/* Counts t, which is about to be quantized with `scale`, where the state is watched. */
te_status te_numerics_count(te_recipe_state *state, const te_quantizer *q, te_role role, te_tensor *t, te_dtype compute,
                            float scale);

#endif
