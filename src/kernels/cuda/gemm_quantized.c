/* gemm_quantized.c - products of quantized operands: as bytes where the device multiplies them (gemm_narrow.c), else
 * decoded on the device, then an ordinary product.
 *
 * As on the CPU (cpu/gemm_quantized.c) bfloat16 carries what it holds exactly, and the factor of a whole tensor,
 * which is in device memory, goes to alpha there; everything else is float32. No value is looked at before: of
 * factors that are powers of two the smallest, where a block has nothing above 2^-119, leave values that bfloat16
 * rounds at 2^-133.
 */
#include "gemm.h"

#include "../dtype.h"

static bool is_one_amax(const te_quant *q) { return q->amax_stride[0] == 0 && q->amax_stride[1] == 0; }

static bool fits_bf16(const te_view *v)
{
    const te_quant *q = v->quant;
    if (!q) return v->dtype == TE_BF16;
    if (q->scale == TE_SCALE_E4M3) return is_one_amax(q);
    return q->scale == TE_SCALE_E8M0 || q->block[0] == 0 || q->power_of_two;
}

static bool has_tensor_factor(const te_quant *q)
{
    return q && (q->scale == TE_SCALE_E4M3 || (q->scale == TE_SCALE_F32 && q->block[0] == 0));
}

static te_status check(te_exec *exec, const te_view *v)
{
    if (!v->quant && v->dtype != TE_F32 && v->dtype != TE_BF16 && v->dtype != TE_F16)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "matrix product: %s beside a quantized operand",
                            te_dtype_name(v->dtype));
    for (int i = 0; i < v->ndim - 2 && v->quant; i++)
        if (v->shape[i] != 1 && v->stride[i] != 0)
            return te_exec_fail(exec, TE_ERROR_ARGUMENT,
                                "matrix product: a batch of %lld quantized matrices; one may serve all, with stride 0",
                                (long long)v->shape[i]);
    return TE_OK;
}

/* Values of a quantized view, dense in the order in which it lies, or another dtype; what is lent is in *lent. */
static te_status prepare(te_exec *exec, te_view *v, te_dtype dtype, bool whole, void **lent)
{
    te_view given = *v;
    int d = v->ndim;
    *lent = NULL;
    if (te_view_numel(v) == 0) {
        v->quant = NULL;
        v->dtype = dtype;
        return TE_OK;
    }
    if (!v->quant) {
        if (v->dtype == dtype) return TE_OK;
        *v = te_cuda_gemm_dense(exec, &given, dtype);
        *lent = v->data;
        return v->data ? TE_OK : TE_ERROR_MEMORY;
    }
    bool across = v->stride[d - 1] != 1 && v->stride[d - 2] == 1;
    v->quant = NULL;
    v->dtype = dtype;
    v->stride[d - 2] = across ? 1 : v->shape[d - 1];
    v->stride[d - 1] = across ? v->shape[d - 2] : 1;
    *lent = v->data = exec->scratch(exec, (size_t)(v->shape[d - 2] * v->shape[d - 1]) * te_dtype_size(dtype));
    return v->data ? te_cuda_decode(exec, v, &given, whole) : TE_ERROR_MEMORY;
}

te_status te_cuda_gemm_quantized(te_exec *exec, const te_gemm *gemm)
{
    te_gemm g = *gemm;
    void *lent[3] = {NULL, NULL, NULL};
    bool narrow = fits_bf16(&g.a) && fits_bf16(&g.b) && g.c.dtype != TE_F16;
    te_dtype dtype = narrow ? TE_BF16 : TE_F32;
    te_status status = check(exec, &g.a);
    if (status == TE_OK) status = check(exec, &g.b);
    if (status != TE_OK) return status;
    const char *reason = te_cuda_decline_narrow(exec, gemm);
    if (!reason) {
        status = te_cuda_gemm_narrow(exec, gemm);
        if (status != TE_ERROR_UNSUPPORTED) return status;
        reason = "cuBLASLt has no algorithm for the bytes";
    }
    te_cuda_trace(exec, "dispatch: quantized operands are decoded to %s: %s\n", te_dtype_name(dtype), reason);
    status = prepare(exec, &g.a, dtype, !narrow, &lent[0]);
    if (status == TE_OK) status = prepare(exec, &g.b, dtype, !narrow, &lent[1]);
    bool scaled = narrow && (has_tensor_factor(gemm->a.quant) || has_tensor_factor(gemm->b.quant));
    if (status == TE_OK && scaled) {
        lent[2] = exec->scratch(exec, 3 * sizeof(float));
        status = lent[2] ? te_cuda_product_scales(exec, gemm, lent[2]) : TE_ERROR_MEMORY;
    }
    if (status == TE_OK) status = te_cuda_gemm_scaled(exec, &g, lent[2], NULL);
    for (int i = 2; i >= 0; i--)
        if (lent[i]) exec->scratch_free(exec, lent[i]);
    return status;
}
