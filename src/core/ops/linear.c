/* linear.c - matrix products. Operands enter the GEMM as they lie; gradients of leaves are added to in the GEMM. */
#include "ops.h"

#include "../autograd.h"
#include "../product.h"
#include "../quantized_parameter.h"

/* A matrix (and leading batch dimensions) as a view with the last two exchanged. */
static te_view transposed(te_view v)
{
    int m = v.ndim - 2, n = v.ndim - 1;
    int64_t shape = v.shape[m], stride = v.stride[m];
    v.shape[m] = v.shape[n];
    v.stride[m] = v.stride[n];
    v.shape[n] = shape;
    v.stride[n] = stride;
    return v;
}

static te_status run_gemm(te_call *call, te_exec *exec, const te_gemm *gemm)
{
    return te_call_kernel(call, exec, exec->backend->gemm(exec, gemm));
}

/* --- linear ------------------------------------------------------------------------------------------------------- */

te_status te_linear_check(te_call *call)
{
    te_tensor *x = call->in[0], *w = call->in[1], *b = call->in[2];
    if (w->ndim != 2)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "weight must be {out_features, in_features}, not %s",
                            TE_SHAPE_TEXT(w));
    if (x->ndim < 1 || x->shape[x->ndim - 1] != w->shape[1])
        return te_call_fail(call, TE_ERROR_ARGUMENT, "inner sizes differ: x %s, weight %s", TE_SHAPE_TEXT(x),
                            TE_SHAPE_TEXT(w));
    if (b && (b->ndim != 1 || b->shape[0] != w->shape[0]))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "bias %s for weight %s", TE_SHAPE_TEXT(b), TE_SHAPE_TEXT(w));
    return TE_OK;
}

/* y = x W^T + b, x {.., in}, W {out, in}. Saved: x and W in the compute dtype, W not where it is multiplied as it is
 * stored quantized. */
static te_status linear_forward(te_call *call)
{
    te_tensor *x = call->in[0], *w = call->in[1];
    te_status status = te_linear_check(call);
    if (status != TE_OK) return status;
    te_dtype dtype = te_product_dtype(call->ctx, x->dtype, w->dtype);
    te_tensor *xc = te_tensor_cast(x, dtype), *wc = xc ? te_product_weight(w, dtype) : NULL;
    int64_t shape[TE_MAX_DIMS];
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = w->shape[0];
    te_tensor *y = wc ? te_tensor_new(call->ctx, x->storage->device, dtype, x->ndim, shape) : NULL;
    call->out[0] = y;
    status = y ? te_linear_product(y, xc, wc, call->in[2]) : call->ctx->status;
    bool saved = status != TE_OK || !call->record ||
                 (te_call_save(call, xc) >= 0 && (te_tensor_is_quantized(wc) || te_call_save(call, wc) >= 0));
    if (!saved) status = call->ctx->status;
    te_tensor_release(xc);
    te_tensor_release(wc);
    return status;
}

typedef te_status product(te_tensor *target, te_tensor *dy, te_tensor *other, bool accumulate);

/* A product written to, or added to, the gradient of input i: in the GEMM where its memory and dtype allow. */
static te_status product_into_grad(te_call *call, int i, product *multiply, te_tensor *dy, te_tensor *other)
{
    const te_grad_meta *meta = te_grad_input(call, i);
    bool direct = te_product_fits(meta->dtype, other->dtype), accumulate = false;
    te_tensor *target = direct ? te_grad_target(call, i, &accumulate)
                               : te_tensor_new(call->ctx, meta->device, other->dtype, meta->ndim, meta->shape);
    if (!target) return call->ctx->status;
    te_status status = multiply(target, dy, other, accumulate);
    if (direct) return status;
    if (status == TE_OK) return te_grad_give(call, i, target);
    te_tensor_release(target);
    return status;
}

static te_status linear_backward(te_call *call)
{
    te_tensor *x = call->saved[0], *dy = te_tensor_cast(call->dout[0], x->dtype);
    te_status status = dy ? TE_OK : call->ctx->status;
    if (status == TE_OK && te_grad_wanted(call, 0))
        status = product_into_grad(call, 0, te_linear_dgrad, dy, call->saved[1]);
    if (status == TE_OK && te_grad_wanted(call, 1)) status = product_into_grad(call, 1, te_linear_wgrad, dy, x);
    if (status == TE_OK && call->node->n_edges > 2 && te_grad_wanted(call, 2)) {
        bool accumulate;
        te_tensor *db = te_grad_target(call, 2, &accumulate);
        status = db ? te_sum_to(db, call->dout[0], 1, accumulate) : call->ctx->status;
    }
    te_tensor_release(dy);
    return status;
}

/* --- matmul ------------------------------------------------------------------------------------------------------- */

/* Batch dimensions of both operands broadcast to one shape; views with stride 0 where they repeat. */
static te_status spread_batches(te_call *call, te_tensor *a, te_tensor *b, te_view *va, te_view *vb, int *ndim,
                                int64_t *shape)
{
    int n = a->ndim - 2;
    memcpy(shape, a->shape, sizeof a->shape);
    if (!te_broadcast(&n, shape, b->ndim - 2, b->shape))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "batch dimensions do not broadcast: %s x %s", TE_SHAPE_TEXT(a),
                            TE_SHAPE_TEXT(b));
    te_tensor *operands[2] = {a, b};
    te_view *views[2] = {va, vb};
    for (int k = 0; k < 2; k++) {
        te_tensor *t = operands[k];
        te_view v = {.data = te_tensor_pointer(t), .dtype = t->dtype, .ndim = n + 2};
        int lead = n + 2 - t->ndim;
        for (int i = 0; i < n + 2; i++) {
            bool absent = i < lead || (i < n && t->shape[i - lead] == 1);
            v.shape[i] = i < n ? shape[i] : t->shape[i - lead];
            v.stride[i] = absent ? 0 : t->stride[i - lead];
        }
        *views[k] = v;
    }
    *ndim = n;
    return TE_OK;
}

static te_status matmul_matrices(te_call *call)
{
    te_tensor *a = call->in[0], *b = call->in[1];
    if (a->ndim < 2 || b->ndim < 2)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "matrices are needed: %s x %s", TE_SHAPE_TEXT(a),
                            TE_SHAPE_TEXT(b));
    if (a->shape[a->ndim - 1] != b->shape[b->ndim - 2])
        return te_call_fail(call, TE_ERROR_ARGUMENT, "inner sizes differ: %s x %s", TE_SHAPE_TEXT(a), TE_SHAPE_TEXT(b));
    te_dtype dtype = te_product_dtype(call->ctx, a->dtype, b->dtype);
    te_tensor *ac = te_tensor_cast(a, dtype), *bc = ac ? te_tensor_cast(b, dtype) : NULL;
    te_gemm gemm = {.alpha = 1};
    int n;
    int64_t shape[TE_MAX_DIMS];
    te_status status = bc ? spread_batches(call, ac, bc, &gemm.a, &gemm.b, &n, shape) : call->ctx->status;
    if (status == TE_OK) {
        shape[n] = a->shape[a->ndim - 2];
        shape[n + 1] = b->shape[b->ndim - 1];
        call->out[0] = te_tensor_new(call->ctx, a->storage->device, dtype, n + 2, shape);
        if (!call->out[0]) status = call->ctx->status;
    }
    if (status == TE_OK) {
        gemm.c = te_tensor_view(call->out[0]);
        status = run_gemm(call, te_call_exec(call, a), &gemm);
    }
    if (status == TE_OK && call->record && (te_call_save(call, ac) < 0 || te_call_save(call, bc) < 0))
        status = call->ctx->status;
    te_tensor_release(ac);
    te_tensor_release(bc);
    return status;
}

/* Gradient of operand i of a batched product: left x right over the whole batch, summed where the operand repeated. */
static te_status batched_grad(te_call *call, int i, te_view left, te_view right, int64_t rows, int64_t columns)
{
    const te_grad_meta *meta = te_grad_input(call, i);
    te_tensor *dc = call->dout[0];
    int64_t shape[TE_MAX_DIMS];
    memcpy(shape, dc->shape, sizeof shape);
    shape[dc->ndim - 2] = rows;
    shape[dc->ndim - 1] = columns;
    te_tensor *grad = te_tensor_new(call->ctx, meta->device, left.dtype, dc->ndim, shape);
    if (!grad) return call->ctx->status;
    te_gemm gemm = {.a = left, .b = right, .c = te_tensor_view(grad), .alpha = 1};
    te_status status = run_gemm(call, te_call_exec(call, dc), &gemm);
    if (status == TE_OK &&
        (meta->ndim != dc->ndim || memcmp(meta->shape, shape, (size_t)dc->ndim * sizeof *shape) != 0)) {
        te_tensor *sum = te_tensor_new(call->ctx, meta->device, meta->dtype, meta->ndim, meta->shape);
        status = sum ? te_sum_to(sum, grad, 1, false) : call->ctx->status;
        te_tensor_release(grad);
        grad = sum;
    }
    if (status == TE_OK) return te_grad_give(call, i, grad);
    te_tensor_release(grad);
    return status;
}

static te_status matmul_backward(te_call *call)
{
    te_tensor *a = call->saved[0], *b = call->saved[1], *dc = te_tensor_cast(call->dout[0], call->saved[0]->dtype);
    te_view va, vb;
    int n;
    int64_t shape[TE_MAX_DIMS];
    te_status status = dc ? spread_batches(call, a, b, &va, &vb, &n, shape) : call->ctx->status;
    if (status == TE_OK && te_grad_wanted(call, 0))
        status =
            batched_grad(call, 0, te_tensor_view(dc), transposed(vb), a->shape[a->ndim - 2], a->shape[a->ndim - 1]);
    if (status == TE_OK && te_grad_wanted(call, 1))
        status =
            batched_grad(call, 1, transposed(va), te_tensor_view(dc), b->shape[b->ndim - 2], b->shape[b->ndim - 1]);
    te_tensor_release(dc);
    return status;
}

/* Vectors become matrices with one row or column, which vanishes again from the result. */
static te_status matmul_forward(te_call *call)
{
    te_context *ctx = call->ctx;
    te_tensor *a = call->in[0], *b = call->in[1];
    if (a->ndim == 0 || b->ndim == 0)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "tensors without dimensions have no product: %s x %s",
                            TE_SHAPE_TEXT(a), TE_SHAPE_TEXT(b));
    if (a->shape[a->ndim - 1] != b->shape[b->ndim == 1 ? 0 : b->ndim - 2])
        return te_call_fail(call, TE_ERROR_ARGUMENT, "inner sizes differ: %s x %s", TE_SHAPE_TEXT(a), TE_SHAPE_TEXT(b));
    te_arg row[] = {TE_A_TENSOR(a), TE_A_NUMBER(0)}, column[] = {TE_A_TENSOR(b), TE_A_NUMBER(-1)};
    te_tensor *left = a->ndim == 1 ? te_op_call(ctx, "unsqueeze", 2, row) : te_tensor_retain(a);
    te_tensor *right = left && b->ndim == 1 ? te_op_call(ctx, "unsqueeze", 2, column) : te_tensor_retain(b);
    te_arg args[] = {TE_A_TENSOR(left), TE_A_TENSOR(right)};
    te_tensor *y = left && right ? te_op_call(ctx, "matmul_matrices", 2, args) : NULL;
    for (int k = 0; k < 2; k++) {
        if (!y || (k == 0 ? b : a)->ndim != 1) continue;
        te_arg drop[] = {TE_A_TENSOR(y), TE_A_NUMBER(k == 0 ? -1 : b->ndim == 1 ? -1 : -2)};
        te_tensor *less = te_op_call(ctx, "squeeze", 2, drop);
        te_tensor_release(y);
        y = less;
    }
    te_tensor_release(left);
    te_tensor_release(right);
    return te_call_result(call, y);
}

static te_status grouped_forward(te_call *call)
{
    return te_call_fail(call, TE_ERROR_ARGUMENT, "there are no parameters");
}

const te_op_def te_ops_linear[] = {
    {.signature = "linear(x, weight, bias = nil)",
     .doc = "x W^T + b for x {..., in}, weight {out, in}, bias {out}. In the compute dtype of te.autocast, otherwise "
            "the operands'; float32 accumulation. Integers give float32.",
     .flags = TE_OP_QUANTIZED,
     .unit = TE_UNIT_LINEAR,
     .forward = linear_forward,
     .backward = linear_backward},
    {.signature = "grouped_linear(x, sizes)",
     .doc = "Rows of x in contiguous groups of given sizes, each times its own weight. Only in plans, with weights.",
     .flags = TE_OP_HIDDEN,
     .unit = TE_UNIT_GROUPED,
     .forward = grouped_forward},
    {.signature = "grouped_biases(scale, sizes)",
     .doc = "For every row the bias of its group, in contiguous groups of given sizes. Only in plans, with biases.",
     .flags = TE_OP_HIDDEN | TE_OP_NOGRAD,
     .unit = TE_UNIT_BIASES,
     .forward = grouped_forward},
    {.signature = "addcmul_rows(x, scale, bias)",
     .doc = "x + scale * bias: scale has one number for every row.",
     .flags = TE_OP_HIDDEN,
     .rows = "scale",
     .formula = "y = x + scale * bias"},
    {.signature = "matmul(a, b)",
     .doc = "Matrix product over the last two dimensions; leading ones are batches and broadcast; a vector counts as a "
            "row (a) or a column (b). Dtypes as for linear.",
     .flags = TE_OP_METHOD,
     .forward = matmul_forward},
    {.signature = "matmul_matrices(a, b)",
     .doc = "Product of matrices or batches of them.",
     .flags = TE_OP_HIDDEN,
     .forward = matmul_matrices,
     .backward = matmul_backward},
    {0},
};
