/* hand_internal.h - what the files behind hand.h share. */
#ifndef TE_KERNELS_CUDA_KERNELS_HAND_INTERNAL_H
#define TE_KERNELS_CUDA_KERNELS_HAND_INTERNAL_H

#include "hand.h"

#include "../../check.h"
#include "args.h"

te_cuda_view te_cuda_view_of(const te_view *view);
int64_t      te_row_count(const te_view *view);

/* Starts a plan without calls. */
void te_cuda_plan_open(te_cuda_plan *plan);

/* Adds a launch of `blocks` blocks (bounded to 1 … most) of `threads`; args are copied. Returns its kernel, which has
 * the file and is otherwise 0. */
te_cuda_call *te_cuda_plan_add(te_cuda_plan *plan, te_cuda_file file, const char *name, int64_t blocks, int threads,
                               const void *args, size_t bytes);

enum { TE_HAND_THREADS = 256, TE_HAND_FULL = 16384 /* blocks that fill any device */ };

/* Blocks whose threads go over so many elements. */
static inline int64_t te_blocks_for(int64_t elements)
{
    int64_t blocks = (elements + TE_HAND_THREADS - 1) / TE_HAND_THREADS;
    return blocks < TE_HAND_FULL ? blocks : TE_HAND_FULL;
}

/* Adds the sort of n keys up to `largest` (te_sort_args); returns the number of digits. Sets the plan's scratch memory.
 */
int te_cuda_plan_sort(te_cuda_plan *plan, int64_t n, uint64_t largest);

/* Adds what puts the first k of each row in order, by whole tiles where there are many of them; false where a block for
 * each row that looks for them one after the other is quicker, or the rows are too long. */
bool te_cuda_plan_best(te_cuda_plan *plan, te_order_args *args, te_dtype dtype);

/* Joins the dimensions of an index that lie behind one another in all three views; dim stays by itself. */
void te_cuda_join_index(te_index_args *args);
/* A gather whose indices are the same for many elements; false: it is none. */
bool te_cuda_plan_gather_lines(te_cuda_plan *plan, const te_index_args *args, te_dtype dtype);
/* A scatter by a vector of indices; of equal ones the last counts. */
bool te_cuda_plan_scatter_lines(te_cuda_plan *plan, const te_index_args *args, te_dtype dtype);

/* Sums of single elements where the result, or stretches of it, have room in shared memory; false: they have not, or
 * it would not be faster. Sets the plan's scratch memory. */
bool te_cuda_plan_add_elements(te_cuda_plan *plan, const te_index_args *args, te_dtype dtype);

static inline te_dtype te_storage_dtype(te_dtype dtype) /* some dtype of that size, for elements that are only moved */
{
    switch (te_dtype_size(dtype)) {
    case 1: return TE_U8;
    case 2: return TE_BF16;
    case 4: return TE_I32;
    default: return TE_I64;
    }
}

static inline bool te_is_whole(te_dtype dtype)
{
    return dtype == TE_I64 || dtype == TE_I32 || dtype == TE_U8 || dtype == TE_BOOL;
}

#endif
