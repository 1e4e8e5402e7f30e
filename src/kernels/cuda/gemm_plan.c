/* gemm_plan.c - algorithms of cuBLASLt, chosen by measuring.
 *
 * For each product (shape, layout, types, bias) the library's heuristic names candidates; they are timed once on
 * the operands at hand, and the winner is kept in memory and on disk. A product that adds to its result is timed on a
 * copy's memory. Small products, and sizes beyond the few that are timed (gemm_sizes.c), take the first candidate:
 * measuring would cost more than it can win. Of their plans only the latest are kept, since there is no end of them.
 */
#include "gemm.h"

#include "../dtype.h"

#include <stdio.h>

enum { WORKSPACE = 32 << 20, MOST_PASSING = 512 };
static const double worth_timing = 4e6; /* multiplications */

typedef struct te_cuda_gemm_plan {
    te_cuda_product product;
    te_hash128 hash;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace;
    uint64_t used;
    bool unsupported; /* the library has no algorithm for it */
    bool passing;     /* chosen by a rule, so that it would be the same again */
} te_cuda_gemm_plan;

static te_hash128 hash_of(const te_cuda_product *p) { return te_hash128_add(TE_HASH128_START, p, sizeof *p); }

static te_status fail_blas(te_exec *exec, const te_cuda_blas *blas, cublasStatus_t r, const te_cuda_product *p)
{
    return te_exec_fail(exec, TE_ERROR_DEVICE, "matrix product {%lld, %lld} by {%lld, %lld}, %lld times: cuBLASLt: %s",
                        (long long)p->rows, (long long)p->inner, (long long)p->inner, (long long)p->columns,
                        (long long)p->batch, blas->library.cublasLtGetStatusName(r));
}

static te_status fail_unsupported(te_exec *exec, const te_cuda_product *p)
{
    return te_exec_fail(exec, TE_ERROR_UNSUPPORTED,
                        "matrix product {%lld, %lld} by {%lld, %lld}, %lld times: cuBLASLt has no algorithm",
                        (long long)p->rows, (long long)p->inner, (long long)p->inner, (long long)p->columns,
                        (long long)p->batch);
}

/* Whether the failure is of what was asked for, not of the device. */
static bool declines(cublasStatus_t r)
{
    return r == CUBLAS_STATUS_NOT_SUPPORTED || r == CUBLAS_STATUS_INVALID_VALUE || r == CUBLAS_STATUS_ARCH_MISMATCH;
}

/* --- description -------------------------------------------------------------------------------------------------- */

static cudaDataType_t data_type(int32_t dtype)
{
    switch (dtype) {
    case TE_F64: return CUDA_R_64F;
    case TE_BF16: return CUDA_R_16BF;
    case TE_F16: return CUDA_R_16F;
    case TE_F8E4M3: return CUDA_R_8F_E4M3;
    case TE_F8E5M2: return CUDA_R_8F_E5M2;
    case TE_U8: return CUDA_R_4F_E2M1;
    default: return CUDA_R_32F;
    }
}

static cublasStatus_t make_layout(const te_cuda_blas *blas, cublasLtMatrixLayout_t *out, int32_t dtype, int64_t rows,
                                  int64_t columns, int64_t ld, int64_t batch, int64_t step)
{
    int32_t count = (int32_t)batch;
    const te_cuda_blas_library *l = &blas->library;
    cublasStatus_t r = l->cublasLtMatrixLayoutCreate(out, data_type(dtype), (uint64_t)rows, (uint64_t)columns, ld);
    if (r == CUBLAS_STATUS_SUCCESS && batch > 1)
        r = l->cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count);
    if (r == CUBLAS_STATUS_SUCCESS && batch > 1)
        r = l->cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof step);
    return r;
}

static cublasStatus_t make_desc(const te_cuda_blas *blas, const te_cuda_product *p, cublasLtMatmulDesc_t *out)
{
    const te_cuda_blas_library *l = &blas->library;
    bool f64 = p->input_a == TE_F64;
    cublasComputeType_t compute = f64       ? CUBLAS_COMPUTE_64F
                                  : p->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                            : CUBLAS_COMPUTE_32F;
    cublasOperation_t op_a = p->transposed_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                      op_b = p->transposed_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = p->align_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    int32_t pointers = CUBLASLT_POINTER_MODE_DEVICE;
    int8_t fast = p->fast != 0;
    cublasStatus_t r = l->cublasLtMatmulDescCreate(out, compute, f64 ? CUDA_R_64F : CUDA_R_32F);
    struct {
        cublasLtMatmulDescAttributes_t name;
        const void *value;
        size_t size;
        bool wanted;
    } attributes[] = {
        {CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a, true},
        {CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b, true},
        {CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue, true},
        {CUBLASLT_MATMUL_DESC_POINTER_MODE, &pointers, sizeof pointers, p->device_scales != 0},
        {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &p->mode_a, sizeof p->mode_a, p->narrow && p->mode_a},
        {CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &p->mode_b, sizeof p->mode_b, p->narrow && p->mode_b},
        {CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast, fast},
    };
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes && r == CUBLAS_STATUS_SUCCESS; i++)
        if (attributes[i].wanted)
            r = l->cublasLtMatmulDescSetAttribute(*out, attributes[i].name, attributes[i].value, attributes[i].size);
    return r;
}

/* Addresses that the descriptor itself carries. */
static cublasStatus_t set_pointers(const te_cuda_blas *blas, const te_cuda_gemm_plan *plan,
                                   const te_cuda_product_data *data)
{
    const te_cuda_blas_library *l = &blas->library;
    bool narrow = plan->product.narrow != 0;
    const struct {
        cublasLtMatmulDescAttributes_t name;
        const void *const *address;
        bool wanted;
    } pointers[] = {
        {CUBLASLT_MATMUL_DESC_BIAS_POINTER, &data->bias, data->bias != NULL},
        {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &data->factors_a, narrow},
        {CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &data->factors_b, narrow},
    };
    cublasStatus_t r = CUBLAS_STATUS_SUCCESS;
    for (size_t i = 0; i < sizeof pointers / sizeof *pointers && r == CUBLAS_STATUS_SUCCESS; i++)
        if (pointers[i].wanted)
            r = l->cublasLtMatmulDescSetAttribute(plan->desc, pointers[i].name, pointers[i].address, sizeof(void *));
    return r;
}

static cublasStatus_t describe(const te_cuda_blas *blas, const te_cuda_product *p, te_cuda_gemm_plan *plan)
{
    cublasStatus_t r = make_desc(blas, p, &plan->desc);
    if (r == CUBLAS_STATUS_SUCCESS)
        r = make_layout(blas, &plan->a, p->input_a, p->transposed_a ? p->inner : p->rows,
                        p->transposed_a ? p->rows : p->inner, p->ld_a, p->batch, p->step_a);
    if (r == CUBLAS_STATUS_SUCCESS)
        r = make_layout(blas, &plan->b, p->input_b, p->transposed_b ? p->columns : p->inner,
                        p->transposed_b ? p->inner : p->columns, p->ld_b, p->batch, p->step_b);
    if (r == CUBLAS_STATUS_SUCCESS)
        r = make_layout(blas, &plan->d, p->output, p->rows, p->columns, p->ld_d, p->batch, p->step_d);
    return r;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

static cublasStatus_t multiply(te_exec *exec, const te_cuda_blas *blas, const te_cuda_gemm_plan *plan,
                               const cublasLtMatmulAlgo_t *algorithm, const te_cuda_product_data *data, bool accumulate,
                               void *workspace, size_t workspace_bytes)
{
    float alpha = (float)data->alpha, beta = accumulate;
    double alpha64 = data->alpha, beta64 = accumulate;
    bool f64 = plan->product.input_a == TE_F64, device = plan->product.device_scales != 0;
    const void *by_alpha = device ? data->device_alpha : f64 ? (void *)&alpha64 : (void *)&alpha;
    const void *by_beta = device ? data->device_beta : f64 ? (void *)&beta64 : (void *)&beta;
    return blas->library.cublasLtMatmul(blas->handle, plan->desc, by_alpha, data->a, plan->a, data->b, plan->b, by_beta,
                                        data->d, plan->d, data->d, plan->d, algorithm, workspace, workspace_bytes,
                                        te_cuda(exec)->stream);
}

/* --- choosing ----------------------------------------------------------------------------------------------------- */

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
    cublasStatus_t r = multiply(exec, c->blas, c->plan, &one->algo, &c->data, false, c->workspace, one->workspaceSize);
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
    te_hash128 key = te_hash128_add(hash_of(product), d->title, strlen(d->title));
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

static cublasStatus_t choose(te_exec *exec, const te_cuda_blas *blas, te_cuda_gemm_plan *plan,
                             const te_cuda_product_data *data)
{
    size_t bytes = (size_t)blas->candidates * sizeof(cublasLtMatmulHeuristicResult_t);
    cublasLtMatmulHeuristicResult_t *found = te_mem_alloc(exec->mem, bytes);
    if (!found) return CUBLAS_STATUS_ALLOC_FAILED;
    cublasStatus_t r = choose_among(exec, blas, plan, data, found);
    te_mem_free(exec->mem, found, bytes);
    return r;
}

/* --- plans -------------------------------------------------------------------------------------------------------- */

static void free_plan(te_exec *exec, const te_cuda_blas *blas, te_cuda_gemm_plan *plan)
{
    const te_cuda_blas_library *l = &blas->library;
    if (plan->d) l->cublasLtMatrixLayoutDestroy(plan->d);
    if (plan->b) l->cublasLtMatrixLayoutDestroy(plan->b);
    if (plan->a) l->cublasLtMatrixLayoutDestroy(plan->a);
    if (plan->desc) l->cublasLtMatmulDescDestroy(plan->desc);
    te_mem_free(exec->mem, plan, sizeof *plan);
}

void te_cuda_plans_close(te_exec *exec, te_cuda_blas *blas)
{
    te_cuda_gemm_plan *plan;
    for (size_t at = 0; (plan = te_map_next(&blas->plans, &at));) free_plan(exec, blas, plan);
    te_map_clear(&blas->plans, exec->mem);
    blas->n_passing = 0;
}

static void remove_oldest(te_exec *exec, te_cuda_blas *blas)
{
    te_cuda_gemm_plan *plan, *oldest = NULL;
    for (size_t at = 0; (plan = te_map_next(&blas->plans, &at));)
        if (plan->passing && (!oldest || plan->used < oldest->used)) oldest = plan;
    if (!oldest) return;
    te_map_remove(&blas->plans, oldest->hash);
    blas->n_passing--;
    free_plan(exec, blas, oldest);
}

static te_status make_plan(te_exec *exec, te_cuda_blas *blas, const te_cuda_product *p, te_hash128 hash,
                           const te_cuda_product_data *data, te_cuda_gemm_plan **out)
{
    te_cuda_gemm_plan *plan = te_mem_zalloc(exec->mem, sizeof *plan);
    if (!plan) return te_exec_fail(exec, TE_ERROR_MEMORY, "matrix product: out of host memory");
    plan->product = *p;
    plan->hash = hash;
    cublasStatus_t r = describe(blas, p, plan);
    if (r == CUBLAS_STATUS_SUCCESS) r = set_pointers(blas, plan, data);
    if (r == CUBLAS_STATUS_SUCCESS) r = choose(exec, blas, plan, data);
    plan->unsupported = declines(r);
    if (plan->unsupported)
        te_cuda_trace(exec, "dispatch: matrix product %lldx%lldx%lld x%lld: cuBLASLt declines: %s\n",
                      (long long)p->rows, (long long)p->columns, (long long)p->inner, (long long)p->batch,
                      blas->library.cublasLtGetStatusName(r));
    if (r != CUBLAS_STATUS_SUCCESS && !plan->unsupported) {
        free_plan(exec, blas, plan);
        if (r == CUBLAS_STATUS_ALLOC_FAILED)
            return te_exec_fail(exec, TE_ERROR_MEMORY, "matrix product: out of memory");
        return fail_blas(exec, blas, r, p);
    }
    if (!te_map_put(&blas->plans, exec->mem, hash, plan)) {
        free_plan(exec, blas, plan);
        return te_exec_fail(exec, TE_ERROR_MEMORY, "matrix product: out of host memory");
    }
    blas->n_passing += plan->passing;
    *out = plan;
    return TE_OK;
}

te_status te_cuda_product_run(te_exec *exec, const te_cuda_product *product, const te_cuda_product_data *data)
{
    te_cuda_blas *blas;
    te_status status = te_cuda_blas_open(exec, &blas);
    if (status != TE_OK) return status;
    if (te_cuda_few_takes(exec, product)) return te_cuda_few_run(exec, product, data);
    te_hash128 hash = hash_of(product);
    te_cuda_gemm_plan *plan = te_map_find(&blas->plans, hash);
    if (!plan) status = make_plan(exec, blas, product, hash, data, &plan);
    if (status != TE_OK) return status;
    plan->used = ++blas->plan_clock;
    if (blas->n_passing > MOST_PASSING) remove_oldest(exec, blas);
    if (plan->unsupported) return fail_unsupported(exec, product);
    void *workspace = plan->workspace ? exec->scratch(exec, plan->workspace) : NULL;
    if (plan->workspace && !workspace) return TE_ERROR_MEMORY;
    te_cuda_note(exec, "matrix product");
    cublasStatus_t r = set_pointers(blas, plan, data);
    if (r == CUBLAS_STATUS_SUCCESS)
        r = multiply(exec, blas, plan, &plan->algorithm, data, product->accumulate, workspace, plan->workspace);
    if (workspace) exec->scratch_free(exec, workspace);
    plan->unsupported = declines(r);
    if (plan->unsupported) return fail_unsupported(exec, product);
    return r == CUBLAS_STATUS_SUCCESS ? TE_OK : fail_blas(exec, blas, r, product);
}
