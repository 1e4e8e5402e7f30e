/* multinomial.c - draws by weights. */
#include "select.h"
#include "workers.h"

#include "kernels/philox.h"

#include <float.h>

/* The weights of a row are the leaves of a binary tree of sums, tree[1] the root, tree[leaves + i] weight i. Each draw
 * walks down from the root; a drawn weight becomes 0 and the sums above it are made anew, so that nothing remains of
 * it. */
typedef struct weight_tree {
    double *sums;
    int64_t leaves; /* a power of two, at least the row's length */
} weight_tree;

/* NULL when the row's weights are sound, else what is wrong with them. */
static const char *tree_load(const te_copy_blocks *blocks, weight_tree *tree, const te_view *src, int64_t row,
                             int64_t positive_needed)
{
    int64_t n = te_row_length(src), positive = 0;
    double *leaf = tree->sums + tree->leaves;
    te_convert(blocks, leaf, TE_F64, 1, te_row_at(src, row), src->dtype, te_row_stride(src), n);
    for (int64_t i = 0; i < n; i++) {
        if (!(leaf[i] >= 0.0)) return "has a weight that is negative or NaN";
        positive += leaf[i] > 0.0;
    }
    memset(leaf + n, 0, (size_t)(tree->leaves - n) * sizeof *leaf);
    for (int64_t i = tree->leaves - 1; i > 0; i--) tree->sums[i] = tree->sums[2 * i] + tree->sums[2 * i + 1];
    if (!(tree->sums[1] <= DBL_MAX)) return "has weights whose sum is infinite";
    if (positive == 0) return "has no positive weight";
    return positive < positive_needed ? "has fewer positive weights than samples asked for" : NULL;
}

/* The leaf in which the share `u` of the total falls; never one of weight 0. */
static int64_t tree_find(const weight_tree *tree, double u)
{
    double target = u * tree->sums[1];
    int64_t node = 1;
    while (node < tree->leaves) {
        double left = tree->sums[2 * node], right = tree->sums[2 * node + 1];
        bool go_right = target >= left && right > 0.0;
        if (go_right) target -= left;
        node = 2 * node + go_right;
    }
    return node - tree->leaves;
}

static void tree_remove(weight_tree *tree, int64_t leaf)
{
    int64_t node = tree->leaves + leaf;
    tree->sums[node] = 0.0;
    while (node /= 2) tree->sums[node] = tree->sums[2 * node] + tree->sums[2 * node + 1];
}

te_status te_cpu_multinomial(te_exec *exec, const te_view *out, const te_view *src, bool replacement, te_rng rng)
{
    te_status status = te_check_rows(exec, "multinomial", out, src);
    if (status != TE_OK) return status;
    if (out->dtype != TE_I64) return te_exec_fail(exec, TE_ERROR_ARGUMENT, "multinomial: samples must be int64");
    int64_t rows = te_rows_of(src), n = te_row_length(src), draws = te_row_length(out);
    if (rows == 0 || draws == 0) return TE_OK;
    weight_tree tree = {.leaves = 1};
    while (tree.leaves < n) tree.leaves *= 2;
    tree.sums = exec->scratch(exec, (size_t)tree.leaves * 2 * sizeof(double));
    if (!tree.sums) return TE_ERROR_MEMORY;
    for (int64_t row = 0; row < rows && status == TE_OK && !te_cpu_stopping(exec); row++) {
        const char *fault = tree_load(te_copy_blocks_of(exec), &tree, src, row, replacement ? 1 : draws);
        if (fault)
            status = te_exec_fail(exec, TE_ERROR_ARGUMENT, "multinomial: row %lld %s", (long long)row + 1, fault);
        int64_t *sample = te_row_at(out, row);
        for (int64_t d = 0; d < draws && !fault && !(d % TE_SELECT_POLL == 0 && te_cpu_stopping(exec)); d++) {
            int64_t drawn = tree_find(&tree, te_rng_word(rng, (uint64_t)(row * draws + d)) * 0x1p-32);
            sample[d * te_row_stride(out)] = drawn;
            if (!replacement) tree_remove(&tree, drawn);
        }
    }
    exec->scratch_free(exec, tree.sums);
    return te_cpu_finish(exec, status);
}
