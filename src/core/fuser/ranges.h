/* ranges.h - units over ranges of rows; see ranges.c and grouped.c. */
#ifndef TE_CORE_FUSER_RANGES_H
#define TE_CORE_FUSER_RANGES_H

#include "backward.h"

/* Positions of the first dimension that rows are seen in. */
typedef struct te_range {
    int64_t first, n;
} te_range;

/* The ranges of a run; `ranges` has room for one per group. The first unit that asks reads them, and keeps them on the
 * host. */
te_status te_ranges_read(te_group_state *state, const te_unit *unit, int groups, te_range *ranges);
/* Those rows of the memory, or the gradient, of a value that the unit reads or makes. NULL on failure. */
te_tensor *te_range_rows(const te_group_state *state, const te_unit *unit, int value, te_tensor *t, te_range range);

#endif
