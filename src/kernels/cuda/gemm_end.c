/* gemm_end.c - the end of a product, which is its bias: fused into it as cuBLASLt's epilogue, or apart from it, a row
 * program over the dense product (gemm_finish.c).
 *
 * Fused moves fewer bytes. But a library has fewer kernels with an epilogue than without, and the best of them may lose
 * more than a pass over the result costs. So of a product that is large enough for its algorithms to be timed both ways
 * are timed as well, once, each with its own fastest algorithm, and the answer is kept in memory and on disk beside the
 * algorithms. Only where a repetition changes nothing: not where the product is added to its result. While a graph is
 * recorded nothing runs, so that what is not known yet stays fused, and so do sizes that are not timed (gemm_sizes.c).
 */
#include "gemm.h"

#include "../dtype.h"

typedef enum way { UNKNOWN = 0, FUSED, APART } way;

/* --- what is known ------------------------------------------------------------------------------------------------ */

void te_cuda_ends_close(te_exec *exec, te_cuda_blas *blas) { te_map_clear(&blas->ends, exec->mem); }

/* The way itself stands where the table has a pointer. Without memory for that the answer is looked up again. */
static void remember(te_exec *exec, te_hash128 key, way found)
{
    te_map_put(&te_cuda(exec)->blas->ends, exec->mem, key, (void *)(uintptr_t)found);
}

/* Of the key in memory, else on disk. */
static way known_way(te_exec *exec, const te_cuda_product *described, te_hash128 key)
{
    way known = (way)(uintptr_t)te_map_find(&te_cuda(exec)->blas->ends, key);
    size_t length = 0;
    if (known != UNKNOWN) return known;
    if (!te_cuda_product_timed(exec, described)) return FUSED;
    uint32_t *kept = te_disk_cache_read(&te_cuda(exec)->cache, key, ".gemm", &length);
    if (kept && length == sizeof *kept && (*kept == FUSED || *kept == APART)) known = (way)*kept;
    if (kept) te_mem_free(exec->mem, kept, length);
    if (known != UNKNOWN) remember(exec, key, known);
    return known;
}

/* --- the two ways ------------------------------------------------------------------------------------------------- */

/* A product and all that both ways want of it. */
typedef struct product {
    const te_gemm *gemm;
    const void    *bias; /* dense, in c's dtype and aligned as the epilogue's vectors are read */
    const float   *scales;
    const te_cuda_narrow *narrow;
} product;

static te_status bias_of(te_exec *exec, const te_gemm *g, const void **bias, void **lent)
{
    *lent = NULL;
    *bias = g->bias.data;
    if (!te_view_present(&g->bias)) return TE_OK;
    bool dense_already = g->bias.dtype == g->c.dtype && (g->bias.stride[0] == 1 || g->bias.shape[0] == 1);
    if (dense_already && (uintptr_t)g->bias.data % 16 == 0) return TE_OK;
    te_view dense = g->bias;
    dense.dtype = g->c.dtype;
    dense.stride[0] = 1;
    dense.data = *lent = exec->scratch(exec, (size_t)dense.shape[0] * te_dtype_size(dense.dtype));
    *bias = dense.data;
    return dense.data ? te_cuda_copy(exec, &dense, &g->bias) : TE_ERROR_MEMORY;
}

static te_status run_fused(te_exec *exec, void *work)
{
    const product *p = work;
    return te_cuda_gemm_batches(exec, p->gemm, p->bias, p->scales, p->narrow);
}

static te_status run_apart(te_exec *exec, void *work)
{
    const product *p = work;
    const te_gemm *g = p->gemm;
    te_view dense = g->c;
    for (int i = 0; i < dense.ndim; i++) dense.stride[i] = 1; /* no dimension repeats */
    dense = te_cuda_gemm_room(exec, &dense, g->c.dtype == TE_F64 ? TE_F64 : TE_F32);
    if (!dense.data) return TE_ERROR_MEMORY;
    te_gemm plain = {.a = g->a, .b = g->b, .c = dense, .alpha = g->alpha, .fast_sums = g->fast_sums};
    te_status status;
    if (g->a.shape[g->a.ndim - 1] == 0) {
        te_cuda_device *d = te_cuda(exec);
        size_t bytes = (size_t)te_view_numel(&dense) * te_dtype_size(dense.dtype);
        status = te_cuda_result(exec, d->driver.cuMemsetD8Async(te_cuda_address(dense.data), 0, bytes, d->stream),
                                "matrix product");
    } else {
        status = te_cuda_gemm_batches(exec, &plain, NULL, p->scales, p->narrow);
    }
    if (status == TE_OK) status = te_cuda_gemm_finish(exec, g, &dense);
    exec->scratch_free(exec, dense.data);
    return status;
}

te_status te_cuda_gemm_apart(te_exec *exec, const te_gemm *g, const float *scales, const te_cuda_narrow *narrow)
{
    return run_apart(exec, &(product){.gemm = g, .scales = scales, .narrow = narrow});
}

/* --- the choice --------------------------------------------------------------------------------------------------- */

/* Times both ways, and leaves the result of the one that is taken from now on. */
static te_status measure(te_exec *exec, product *p, const te_cuda_product *described, te_hash128 key)
{
    float fused = 0, apart = 0;
    te_status status = te_cuda_time(exec, run_apart, p, &apart);
    /* it wants more memory, and another product */
    bool possible = status != TE_ERROR_UNSUPPORTED && status != TE_ERROR_MEMORY, lasting = status != TE_ERROR_MEMORY;
    if (status == TE_OK || !possible) status = te_cuda_time(exec, run_fused, p, &fused);
    if (status != TE_OK) return status;
    uint32_t found = possible && apart < fused ? APART : FUSED;
    remember(exec, key, (way)found);
    if (lasting) te_disk_cache_write(&te_cuda(exec)->cache, key, ".gemm", &found, sizeof found);
    te_cuda_trace(exec,
                  "dispatch: matrix product %lldx%lldx%lld x%lld: its end %s (%.4g ms fused, %.4g ms in two passes)\n",
                  (long long)described->rows, (long long)described->columns, (long long)described->inner,
                  (long long)described->batch, found == APART ? "is a pass of its own" : "is fused", (double)fused,
                  (double)apart);
    return found == APART ? run_apart(exec, p) : TE_OK;
}

static te_status end_product(te_exec *exec, product *p)
{
    te_cuda_product described;
    te_cuda_blas *blas;
    te_status status = te_cuda_blas_open(exec, &blas);
    if (status != TE_OK) return status;
    bool chosen = p->gemm->beta == 0 &&
                  te_cuda_gemm_single(exec, p->gemm, p->bias, p->scales != NULL, p->narrow, &described) &&
                  te_cuda_product_large(&described);
    te_hash128 key = chosen ? te_hash128_add(te_cuda_product_key(exec, &described), "end", 3) : TE_HASH128_START;
    way known = chosen ? known_way(exec, &described, key) : FUSED;
    if (known == APART) return run_apart(exec, p);
    status = run_fused(exec, p);
    if (status == TE_ERROR_UNSUPPORTED) {
        te_cuda_trace(exec, "dispatch: matrix product in two passes: cuBLASLt has no algorithm with this epilogue\n");
        return run_apart(exec, p);
    }
    return status == TE_OK && known == UNKNOWN && !te_cuda(exec)->capture ? measure(exec, p, &described, key) : status;
}

te_status te_cuda_gemm_ended(te_exec *exec, const te_gemm *g, const float *scales, const te_cuda_narrow *narrow)
{
    product p = {.gemm = g, .scales = scales, .narrow = narrow};
    void *lent;
    if (!te_view_present(&g->bias)) return run_fused(exec, &p);
    te_status status = bias_of(exec, g, &p.bias, &lent);
    if (status == TE_OK) status = end_product(exec, &p);
    if (lent) exec->scratch_free(exec, lent);
    return status;
}
