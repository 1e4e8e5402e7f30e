/* gemm_sizes.c - which sizes of a product are timed.
 *
 * Layers have a few shapes, but there may be any number of tokens: prompts are as long as they are, and an expert has
 * other rows in each step. Timing each of these would cost more than it can win. So products that differ in one extent
 * alone are a *series*, and of a series the first few sizes that come are timed. All others take the first candidate of
 * the library's heuristic and a fused end.
 *
 * What is timed decides which kernel runs, and so the bits of the result. A series is therefore kept on disk beside the
 * choices: once it is full it stays as it is, in this run and in later ones, so a product runs the same kernel whatever
 * came before it. While it is not full it is read again before a size joins it, since other processes write as well.
 */
#include "gemm.h"

enum { SIZES = 8 };

typedef struct series {
    te_hash128 key;
    int        n; /* 0: nobody has joined yet */
    int64_t    sizes[SIZES];
} series;

void te_cuda_sizes_close(te_exec *exec, te_cuda_blas *blas)
{
    series *s;
    for (size_t at = 0; (s = te_map_next(&blas->series, &at));) te_mem_free(exec->mem, s, sizeof *s);
    te_map_clear(&blas->series, exec->mem);
}

/* --- one series --------------------------------------------------------------------------------------------------- */

static bool has(const series *s, int64_t size)
{
    for (int i = 0; i < s->n; i++)
        if (s->sizes[i] == size) return true;
    return false;
}

static void add(series *s, int64_t size)
{
    if (s->n < SIZES && !has(s, size)) s->sizes[s->n++] = size;
}

/* NULL, a series that is not in memory, shuts nothing out. */
static bool shuts_out(const series *s, int64_t size) { return s && s->n == SIZES && !has(s, size); }

static void read_sizes(te_exec *exec, series *s)
{
    size_t length = 0;
    int64_t *kept = te_disk_cache_read(&te_cuda(exec)->cache, s->key, ".sizes", &length);
    for (size_t i = 0; kept && i < length / sizeof *kept; i++) add(s, kept[i]);
    if (kept) te_mem_free(exec->mem, kept, length);
}

/* NULL: no memory. */
static series *new_series(te_exec *exec, te_cuda_blas *blas, te_hash128 key)
{
    series *s = te_mem_zalloc(exec->mem, sizeof *s);
    if (!s) return NULL;
    s->key = key;
    if (te_map_put(&blas->series, exec->mem, key, s)) return s;
    te_mem_free(exec->mem, s, sizeof *s);
    return NULL;
}

static series *open_series(te_exec *exec, te_cuda_blas *blas, te_hash128 key)
{
    series *s = te_map_find(&blas->series, key);
    if (!s) s = new_series(exec, blas, key);
    if (s && s->n < SIZES) read_sizes(exec, s);
    return s;
}

/* --- the series of a product -------------------------------------------------------------------------------------- */

/* What is left of a product without an extent and what follows from it. */
static te_hash128 key_without(te_exec *exec, te_cuda_product p, bool columns)
{
    *(columns ? &p.columns : &p.inner) = 0;
    if (columns ? p.transposed_b : !p.transposed_b) p.ld_b = 0;
    if (!columns && p.transposed_a) p.ld_a = 0;
    p.step_a = p.step_b = p.step_d = 0;
    p.align_a = p.align_b = p.align_d = 0;
    p.align_bias = p.align_bias != 0;
    return te_hash128_add(te_cuda_product_key(exec, &p), columns ? "columns" : "inner", columns ? 7 : 5);
}

bool te_cuda_product_timed(te_exec *exec, const te_cuda_product *p)
{
    te_cuda_blas *blas = te_cuda(exec)->blas;
    if (!te_cuda_product_large(p)) return false;
    const te_hash128 keys[2] = {key_without(exec, *p, true), key_without(exec, *p, false)};
    const int64_t sizes[2] = {p->columns, p->inner};
    series *both[2];
    /* in memory first: a full series is not to cost its others anything */
    for (int i = 0; i < 2; i++)
        if (shuts_out(te_map_find(&blas->series, keys[i]), sizes[i])) return false;
    for (int i = 0; i < 2; i++)
        if (!(both[i] = open_series(exec, blas, keys[i]))) return false;
    if (shuts_out(both[0], sizes[0]) || shuts_out(both[1], sizes[1])) return false;
    bool known = has(both[0], sizes[0]) && has(both[1], sizes[1]);
    if (known || te_cuda(exec)->capture) return known; /* what is recorded cannot be timed */
    for (int i = 0; i < 2; i++) {
        add(both[i], sizes[i]);
        te_disk_cache_write(&te_cuda(exec)->cache, keys[i], ".sizes", both[i]->sizes,
                            (size_t)both[i]->n * sizeof *both[i]->sizes);
    }
    return true;
}
