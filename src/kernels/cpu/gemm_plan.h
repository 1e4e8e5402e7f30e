/* gemm_plan.h - how our own matrix product divides c: its arithmetic, panels, units and workspace.
 *
 * A unit is a block of rows x a group of panels, and belongs to one thread. Units as large as the caches allow pack
 * least, but c shall also be divided evenly between threads; so the plan takes the division that is done first by a
 * small model of what packing and multiplying take.
 */
#ifndef TE_KERNELS_CPU_GEMM_PLAN_H
#define TE_KERNELS_CPU_GEMM_PLAN_H

#include "gemm.h"

typedef struct te_gemm_plan {
    const te_gemm_problem *p;
    const te_gemm_isa     *isa;
    const te_gemm_kernel  *kernel;
    te_gemm_word           word;
    const void *bias;                       /* of the type of the sums, or NULL */
    int64_t words, slice_words, chunk_words; /* of k, of a slice of it, and of several */
    int64_t unit_rows, blocks;              /* of a */
    int64_t width;                          /* columns of a panel */
    int64_t panels, unit_panels, groups;    /* of b */
    int64_t near_panels;                    /* whose rows of b are fetched together, 1 where they are not */
    int     threads;
    bool    small;                          /* not in tiles (isa/gemm_small.c), and whether b is packed there */
    bool    small_panel, small_pairs, small_turned; /* … as pairs, or turned as it is */
    bool    across;                         /* a tile's rows meet all panels of the unit before the next ones do … */
    bool    held;                           /* … over all of k, from the second-level cache, which has all of b; … */
    int64_t held_words;                     /* … or so much of it, one after the other; 0: all at once */
    bool    direct_a;                       /* rows of a serve as they are, … */
    bool    beside;                         /* … or a tile's are packed while those before them are multiplied */
    bool    blocks_first;                   /* neighbouring units are blocks of one group, else groups of one block */
    te_gemm_way way;                        /* of whole vectors, when they are complete */
    size_t  a_bytes, b_bytes, sums_bytes;   /* workspace of a thread, … */
    size_t  range_bytes;                    /* … of the magnitudes in lines of a and b, … */
    size_t  note_bytes;                     /* … and to note what of it serves neighbouring units; 0: nothing does */
    int64_t square_rows, square_cols;       /* tiles down and vectors across whose sums of squares are wanted, or 0 */
    float  *squares;                        /* these, or NULL */
    const char *packed_b;                   /* all panels of a b that comes again, slice after slice; or NULL */
} te_gemm_plan;

static inline int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }
static inline int64_t at_most(int64_t x, int64_t limit) { return x < limit ? x : limit; }
static inline int64_t at_least(int64_t x, int64_t limit) { return x > limit ? x : limit; }
static inline int64_t round_up(int64_t x, int64_t unit) { return divide_up(x, unit) * unit; }
static inline size_t align_up(size_t bytes) { return (bytes + 127) & ~(size_t)127; }

void te_gemm_plan_make(te_exec *exec, te_gemm_state *state, const te_gemm_problem *p, te_gemm_plan *plan);

static inline int64_t te_gemm_lines_of(const te_gemm_ahead *ahead) { return ahead->runs * divide_up(ahead->bytes, 64); }

/* Has `tiles` tiles of all rows, of `steps` steps, ask for what is next, as much in each and spread over its steps: a
 * core has few buffers for missing lines, so a burst keeps it waiting. Where there is no such tile asks at once. */
void te_gemm_plan_asking(te_gemm_out *out, te_gemm_ahead *next, int64_t tiles, int64_t steps);

/* Whether c is less than a tile high, by a b that a tile of all rows packs while it multiplies: with rows of zeros. */
bool te_gemm_is_low(const te_gemm_plan *plan);

/* Workspace of a thread. */
static inline size_t te_gemm_thread_bytes(const te_gemm_plan *plan)
{
    return plan->a_bytes + plan->b_bytes + plan->sums_bytes + plan->range_bytes + plan->note_bytes;
}

#endif
