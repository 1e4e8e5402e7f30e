/* index.h - what embedding.c takes from the files of index_walk.h. */
#ifndef TE_KERNELS_CPU_INDEX_H
#define TE_KERNELS_CPU_INDEX_H

#include "copy.h"

/* Fails where an id is not below the bound, and names the first of these. */
te_status te_cpu_check_ids(te_exec *exec, const char *op, const te_view *ids, int64_t bound);

/* The table's rows by id, without a conversion; false where that needs one, where there is nothing to read, or where an
 * id is outside: nobody is told which, and what is in rows does not count. */
bool te_cpu_gather_rows(te_exec *exec, const te_view *rows, const te_view *table, const te_view *ids);

/* table[id] += row in the order of positions, by ids that were checked; false where sums have another dtype than the
 * table or positions are not in one row, and nothing was done. */
bool te_cpu_add_rows(te_exec *exec, const te_view *table, const te_view *rows, const te_view *ids);

#endif
