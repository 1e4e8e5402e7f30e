/* gemm_plan.c - products as cuBLASLt is told of them, kept in memory with the algorithm of each (gemm_choose.c). Of
 * those whose algorithm a rule chose only the latest are kept, since there is no end of them.
 */
#include "gemm_plan.h"

enum { MOST_PASSING = 512 };

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

cublasStatus_t te_cuda_gemm_multiply(te_exec *exec, const te_cuda_blas *blas, const te_cuda_gemm_plan *plan,
                                     const cublasLtMatmulAlgo_t *algorithm, const te_cuda_product_data *data,
                                     bool accumulate, void *workspace, size_t workspace_bytes)
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
    if (r == CUBLAS_STATUS_SUCCESS) r = te_cuda_gemm_choose(exec, blas, plan, data);
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
    te_hash128 hash = te_cuda_product_hash(product);
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
        r = te_cuda_gemm_multiply(exec, blas, plan, &plan->algorithm, data, product->accumulate, workspace,
                                  plan->workspace);
    if (workspace) exec->scratch_free(exec, workspace);
    plan->unsupported = declines(r);
    if (plan->unsupported) return fail_unsupported(exec, product);
    return r == CUBLAS_STATUS_SUCCESS ? TE_OK : fail_blas(exec, blas, r, product);
}
