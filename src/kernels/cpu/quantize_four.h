/* quantize_four.h - two-level factors chosen between two candidates: a block's largest value to 6, or to 4. */
#ifndef TE_KERNELS_QUANTIZE_FOUR_H
#define TE_KERNELS_QUANTIZE_FOUR_H

#include "quantize_panel.h"

/* Factors of the blocks of `part` (one block high on side 0, one block deep on side 1) from l->amaxes: as stored to
 * l->factors. */
void te_four_over_six_factors(const te_panel_job *p, te_panel_lane *l, te_panel part, int side,
                              const te_factor_rule *rule, float *multipliers);

#endif
