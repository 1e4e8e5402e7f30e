/* product.c - a linear layer's products as GEMM calls. */
#include "product.h"

#include "ops/ops.h"
#include "quantized_parameter.h"

#include <math.h>

te_dtype te_product_dtype(const te_context *ctx, te_dtype a, te_dtype b)
{
    te_dtype dtype = te_promote(a, b);
    if (dtype != TE_F64 && dtype != TE_BF16 && dtype != TE_F16) dtype = TE_F32;
    return dtype != TE_F64 && ctx->compute_dtype != TE_DTYPE_COUNT ? ctx->compute_dtype : dtype;
}

uint64_t te_content_key(const te_tensor *t)
{
    te_storage *s = t->storage;
    if (!s->block) return 0;
    s->keyed = true;
    return (s->id << 24 ^ s->version << 4 ^ (uint64_t)t->offset << 44) | 1;
}

te_view te_matrix_transposed(te_view v)
{
    int64_t shape = v.shape[0], stride = v.stride[0];
    v.shape[0] = v.shape[1];
    v.stride[0] = v.stride[1];
    v.shape[1] = shape;
    v.stride[1] = stride;
    return v;
}

bool te_rows_view(const te_tensor *t, te_view *out)
{
    te_view v = te_tensor_view(t);
    int64_t width = t->shape[t->ndim - 1], last = t->stride[t->ndim - 1], rows = 1, step = width;
    bool stepped = false; /* a step may be 0: gradients of sums are broadcast */
    bool empty = te_tensor_numel(t) == 0; /* steps to nowhere */
    for (int i = t->ndim - 2; i >= 0; i--) {
        if (t->shape[i] == 1) continue;
        if (stepped && !empty && rows * step != t->stride[i]) return false; /* none are evenly spaced */
        if (!stepped) step = t->stride[i];
        stepped = true;
        rows *= t->shape[i];
    }
    *out = (te_view){.data = v.data, .dtype = v.dtype, .ndim = 2, .shape = {rows, width}, .stride = {step, last}};
    return true;
}

te_tensor *te_rows_tensor(te_tensor *t, te_view *view)
{
    if (te_rows_view(t, view)) return te_tensor_retain(t);
    te_tensor *copy = te_tensor_clone_data(t);
    if (copy) te_rows_view(copy, view);
    return copy;
}

static te_status run(te_tensor *c, const te_gemm *gemm)
{
    te_exec *exec = &c->storage->device->exec;
    te_status status = exec->backend->gemm(exec, gemm);
    return status == TE_OK ? TE_OK : te_fail_exec(c->ctx, status, exec, "linear");
}

/* The dtype in which a bias is added to y. A product converts operands that are no floating point, so also this one. */
static te_dtype bias_dtype(const te_tensor *y, const te_tensor *bias)
{
    bool narrow = y->dtype == TE_BF16 || y->dtype == TE_F16;
    if (narrow && !y->storage->device->exec.backend->host_memory) return y->dtype;
    if (te_dtype_has_gradient(bias->dtype)) return bias->dtype;
    return y->dtype == TE_F64 ? TE_F64 : TE_F32;
}

te_status te_product_bias(const te_tensor *y, te_tensor *bias, te_view *view, te_tensor **held)
{
    *held = NULL;
    if (!bias) return TE_OK;
    *view = te_tensor_view(bias); /* by which a graph knows it */
    te_dtype dtype = bias_dtype(y, bias);
    if (bias->dtype == dtype) return TE_OK;
    *held = te_tensor_cast_cached(bias, dtype);
    if (!*held) return y->ctx->status;
    *view = te_tensor_view(*held);
    return TE_OK;
}

te_tensor *te_product_weight(te_tensor *w, te_dtype dtype)
{
    bool trains = w->ctx->grad_enabled || w->ctx->recorded_scales.on;
    bool stored = te_tensor_is_quantized(w) && !trains && w->storage->quantized->copies.side[0].data &&
                  w->storage->device->exec.backend->host_memory && dtype != TE_F64;
    return stored ? te_tensor_retain(w) : te_tensor_cast_cached(w, dtype);
}

te_status te_linear_product(te_tensor *y, te_tensor *x, te_tensor *w, te_tensor *bias)
{
    te_gemm gemm = {.alpha = 1};
    te_quant quant;
    if (te_tensor_is_quantized(w)) {
        const te_quantized *copies = &w->storage->quantized->copies;
        gemm.b = te_quantized_operand(copies, 0, true, &quant);
        gemm.b_key = te_content_key(copies->side[0].data);
    } else {
        gemm.b = te_matrix_transposed(te_tensor_view(w));
        gemm.b_key = te_content_key(w);
    }
    te_tensor *rows = te_rows_tensor(x, &gemm.a), *held;
    if (!rows) return y->ctx->status;
    te_rows_view(y, &gemm.c);
    te_status status = te_product_bias(y, bias, &gemm.bias, &held);
    if (status == TE_OK) status = run(y, &gemm);
    te_tensor_release(held);
    te_tensor_release(rows);
    return status;
}

te_status te_linear_dgrad(te_tensor *dx, te_tensor *dy, te_tensor *w, bool accumulate)
{
    te_gemm gemm = {.b = te_tensor_view(w), .alpha = 1, .beta = accumulate ? 1 : 0, .b_key = te_content_key(w)};
    te_tensor *rows = te_rows_tensor(dy, &gemm.a);
    if (!rows) return dx->ctx->status;
    te_rows_view(dx, &gemm.c);
    te_status status = run(dx, &gemm);
    te_tensor_release(rows);
    return status;
}

te_status te_linear_wgrad(te_tensor *dw, te_tensor *dy, te_tensor *x, bool accumulate)
{
    te_gemm gemm = {.alpha = 1, .beta = accumulate ? 1 : 0};
    te_tensor *dy_rows = te_rows_tensor(dy, &gemm.a), *x_rows = dy_rows ? te_rows_tensor(x, &gemm.b) : NULL;
    te_status status = x_rows ? TE_OK : dw->ctx->status;
    if (status == TE_OK) {
        gemm.a = te_matrix_transposed(gemm.a);
        double squares = NAN;
        gemm.c = te_tensor_view(dw);
        if (!accumulate && dw->dtype == TE_F32) gemm.squares = &squares;
        status = run(dw, &gemm);
        if (status == TE_OK && !isnan(squares)) te_tensor_note_squares(dw, squares);
    }
    te_tensor_release(x_rows);
    te_tensor_release(dy_rows);
    return status;
}
