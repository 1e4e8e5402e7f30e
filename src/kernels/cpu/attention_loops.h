/* attention_loops.h - the attention loops for one arithmetic (a template).
 *
 * Parameters, undefined again at the end:
 *      REAL, T(name)               float or double, and the suffix of what is defined here
 *      REAL_EXP, REAL_LOG          exponential, logarithm
 *      REAL_NAME                   name of the exported table
 *      VECTOR, VLEN, V_…           a vector of REAL and what can be done with it; V_DOT is the step of products
 *      PAIRS                       defined: products are of pairs of bfloat16
 *      MATRIX_UNIT                 defined: in a matrix unit, which ENTER and LEAVE are for
 *      IN_PLACE                    optional: the dtype of operands that are REAL as they lie
 *      TRANSPOSE_BLOCK             optional: transposes VLEN x VLEN elements
 *      ROUNDED                     defined: also forward with probabilities rounded to E4M3
 *      MICRO_ROWS                  rows of the register block: MICRO_ROWS x 2 vectors of sums must fit the registers
 *      TOGETHER                    rows of scores whose exponentials are computed side by side
 */
#ifdef PAIRS
typedef uint16_t half_in_pair __attribute__((may_alias));
#endif

#ifdef MATRIX_UNIT
#define ENTER() te_tiles_enter()
#define LEAVE() te_tiles_leave()
#else
#define ENTER() ((void)0)
#define LEAVE() ((void)0)
#endif

#include "attention_tile.h"

#ifdef PAIRS
#include "attention_pairs.h"
#else
#include "attention_products.h"
#endif

#include "attention_forward.h"

#ifdef ROUNDED
#include "attention_rounded.h"
#endif

#include "attention_backward.h"

const te_attention_blocks TE_ISA_NAME(REAL_NAME) = {
    .element = sizeof(REAL),
    .forward_bytes = T(forward_bytes),
    .backward_bytes = T(backward_bytes),
    .forward = T(forward),
#ifdef ROUNDED
    .forward_rounded = T(forward_rounded),
#endif
    .backward = T(backward),
    .sum_dq = T(sum_dq),
};

#undef REAL
#undef T
#undef REAL_EXP
#undef REAL_LOG
#undef REAL_NAME
#undef VECTOR
#undef VLEN
#undef V_SET
#undef V_LOAD
#undef V_STORE
#undef V_DOT
#undef PAIRS
#undef MATRIX_UNIT
#undef ENTER
#undef LEAVE
#undef ROUNDED
#undef V_MAX
#undef V_TOP
#undef V_SUM
#undef TRANSPOSE_BLOCK
#undef MICRO_ROWS
#undef TOGETHER
#undef IN_PLACE
