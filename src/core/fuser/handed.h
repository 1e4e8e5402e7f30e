/* handed.h - results of attention that products read as the bytes which it left; see handed.c. */
#ifndef TE_CORE_FUSER_HANDED_H
#define TE_CORE_FUSER_HANDED_H

#include "plan.h"

/* Finds the values between one attention and one product. */
void te_plan_mark_handed(te_fuse_plan *plan);

/* Why the product does not read the bytes of the attention before it; NULL: it does, or neither is quantized. */
const char *te_plan_why_not_handed(const te_fuse_plan *plan, const te_unit *call);

/* Gives the product that reads the unit's result its bytes, which `y` has. */
te_status te_state_hand_on(te_group_state *state, const te_unit *call, const te_tensor *y);

#endif
