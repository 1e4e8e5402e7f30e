/* gemm_choose.c - algorithms of cuBLASLt, chosen by measuring.
 *
 * For each product (shape, layout, types, bias) the library's heuristic names candidates; they are timed once on
 * the operands at hand, and the winner is kept in memory and on disk. A product that adds to its result is timed on a
 * copy's memory. Small products, and sizes beyond the few that are timed (gemm_sizes.c), take the first candidate:
 * measuring would cost more than it can win.
 */
#include "gemm_plan.h"

#include "../dtype.h"

enum { WORKSPACE = 32 << 20 };
static const double worth_timing = 4e6; /* multiplications */

static cublasStatus_t ask_heuristic(const te_cuda_blas *blas, const te_cuda_gemm_plan *plan,
                                    cublasLtMatmulHeuristicResult_t *found, int *n)
{
    const te_cuda_blas_library *l = &blas->library;
    const te_cuda_product *p = &plan->product;
    cublasLtMatmulPreference_t preference;
    uint64_t workspace = WORKSPACE;
    uint32_t aligned[3] = {(uint32_t)p->align_a, (uint32_t)p->align_b, (uint32_t)p->align_d};
    const cublasLtMatmulPreferenceAttributes_t names[4] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    cublasStatus_t r = l->cublasLtMatmulPreferenceCreate(&preference);
    if (r != CUBLAS_STATUS_SUCCESS) return r;
    r = l->cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                sizeof workspace);
    for (int i = 0; i < 4 && r == CUBLAS_STATUS_SUCCESS; i++)
        r = l->cublasLtMatmulPreferenceSetAttribute(preference, names[i], &aligned[i < 2 ? i : 2], sizeof aligned[0]);
    if (r == CUBLAS_STATUS_SUCCESS)
        r = l->cublasLtMatmulAlgoGetHeuristic(blas->handle, plan->desc, plan->a, plan->b, plan->d, plan->d, preference,
                                              blas->candidates, found, n);
    l->cublasLtMatmulPreferenceDestroy(preference);
    return r == CUBLAS_STATUS_SUCCESS && *n == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : r;
}

typedef struct contest {
    const te_cuda_blas *blas;
    const te_cuda_gemm_plan *plan;
    const cublasLtMatmulHeuristicResult_t *candidates;
    te_cuda_product_data data;
    void *workspace;
} contest;

static te_status run_candidate(te_exec *exec, void *work, int number)
{
    const contest *c = work;
    const cublasLtMatmulHeuristicResult_t *one = &c->candidates[number];
    if (one->state != CUBLAS_STATUS_SUCCESS) return TE_ERROR_UNSUPPORTED;
    cublasStatus_t r = te_cuda_gemm_multiply(exec, c->blas, c->plan, &one->algo, &c->data, false, c->workspace,
                                             one->workspaceSize);
    return r == CUBLAS_STATUS_SUCCESS ? TE_OK : TE_ERROR_UNSUPPORTED;
}

/* As te_cuda_fastest has it. */
static te_status fastest(te_exec *exec, const te_cuda_blas *blas, const te_cuda_gemm_plan *plan,
                         const cublasLtMatmulHeuristicResult_t *candidates, int n, const te_cuda_product_data *data,
                         int *best)
{
    const te_cuda_product *p = &plan->product;
    int64_t span = (p->columns - 1) * p->ld_d + p->rows + (p->batch - 1) * p->step_d;
    void *result = p->accumulate ? exec->scratch(exec, (size_t)span * te_dtype_size((te_dtype)p->output)) : data->d;
    void *workspace = result ? exec->scratch(exec, WORKSPACE) : NULL;
    contest c = {blas, plan, candidates, *data, workspace};
    c.data.d = result;
    te_status status = workspace ? te_cuda_fastest(exec, run_candidate, &c, n, best) : TE_ERROR_MEMORY;
    if (workspace) exec->scratch_free(exec, workspace);
    if (result && p->accumulate) exec->scratch_free(exec, result);
    return status;
}

typedef struct choice {
    cublasLtMatmulAlgo_t algorithm;
    uint64_t workspace;
} choice;

te_hash128 te_cuda_product_key(te_exec *exec, const te_cuda_product *product)
{
    te_cuda_device *d = te_cuda(exec);
    size_t version = d->blas->library.cublasLtGetVersion();
    te_hash128 key = te_hash128_add(te_cuda_product_hash(product), d->title, strlen(d->title));
    key = te_hash128_add(key, &d->blas->candidates, sizeof d->blas->candidates);
    key = te_hash128_add(key, "under load", 10); /* what was chosen otherwise is chosen again */
    return te_hash128_add(key, &version, sizeof version);
}

/* A choice from disk, if the library still accepts it. */
static bool remembered(te_exec *exec, const te_cuda_blas *blas, te_cuda_gemm_plan *plan, te_hash128 key)
{
    size_t length = 0;
    cublasLtMatmulHeuristicResult_t checked = {.state = CUBLAS_STATUS_SUCCESS};
    choice *kept = te_disk_cache_read(&te_cuda(exec)->cache, key, ".gemm", &length);
    bool good = kept && length == sizeof *kept &&
                blas->library.cublasLtMatmulAlgoCheck(blas->handle, plan->desc, plan->a, plan->b, plan->d, plan->d,
                                                      &kept->algorithm, &checked) == CUBLAS_STATUS_SUCCESS &&
                checked.workspaceSize <= WORKSPACE;
    if (good) {
        plan->algorithm = kept->algorithm;
        plan->workspace = checked.workspaceSize;
    }
    if (kept) te_mem_free(exec->mem, kept, length);
    return good;
}

bool te_cuda_product_large(const te_cuda_product *p)
{
    return (double)p->rows * (double)p->columns * (double)p->inner * (double)p->batch >= worth_timing;
}

static int first_possible(const cublasLtMatmulHeuristicResult_t *found, int n)
{
    for (int i = 0; i < n; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS) return i;
    return -1;
}

/* The fastest of the heuristic's candidates, or the first; `found` has room for them. */
static cublasStatus_t choose_among(te_exec *exec, const te_cuda_blas *blas, te_cuda_gemm_plan *plan,
                                   const te_cuda_product_data *data, cublasLtMatmulHeuristicResult_t *found)
{
    const te_cuda_product *p = &plan->product;
    int n = 0;
    te_hash128 key = te_cuda_product_key(exec, p);
    bool timed = te_cuda_product_timed(exec, p);
    plan->passing = !timed && !(te_cuda(exec)->capture && te_cuda_product_large(p));
    if (timed && remembered(exec, blas, plan, key)) return CUBLAS_STATUS_SUCCESS;
    cublasStatus_t r = ask_heuristic(blas, plan, found, &n);
    if (r != CUBLAS_STATUS_SUCCESS) return r;
    if (timed && te_cuda(exec)->capture) timed = false; /* nothing runs now: the first choice, and not for other runs */
    int best = first_possible(found, n);
    te_status measured = timed && n > 1 && best >= 0 ? fastest(exec, blas, plan, found, n, data, &best) : TE_OK;
    if (measured == TE_ERROR_UNSUPPORTED) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (measured != TE_OK) { /* memory is short, or somebody interrupts: the first choice, for this run alone */
        timed = false;
        best = first_possible(found, n);
        exec->message[0] = 0;
        exec->refused = TE_OK;
    }
    if (best < 0) return CUBLAS_STATUS_NOT_SUPPORTED;
    plan->algorithm = found[best].algo;
    plan->workspace = found[best].workspaceSize;
    choice kept = {.workspace = plan->workspace};
    kept.algorithm = plan->algorithm;
    if (timed) te_disk_cache_write(&te_cuda(exec)->cache, key, ".gemm", &kept, sizeof kept);
    te_cuda_trace(exec, "dispatch: matrix product %lldx%lldx%lld x%lld: candidate %d of %d\n", (long long)p->rows,
                  (long long)p->columns, (long long)p->inner, (long long)p->batch, best + 1, n);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t te_cuda_gemm_choose(te_exec *exec, const te_cuda_blas *blas, te_cuda_gemm_plan *plan,
                                   const te_cuda_product_data *data)
{
    size_t bytes = (size_t)blas->candidates * sizeof(cublasLtMatmulHeuristicResult_t);
    cublasLtMatmulHeuristicResult_t *found = te_mem_alloc(exec->mem, bytes);
    if (!found) return CUBLAS_STATUS_ALLOC_FAILED;
    cublasStatus_t r = choose_among(exec, blas, plan, data, found);
    te_mem_free(exec->mem, found, bytes);
    return r;
}
