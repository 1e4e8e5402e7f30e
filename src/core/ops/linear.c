/* linear.c - matrix products. Operands enter the GEMM as they lie; gradients of leaves are added to in the GEMM. */
#include "ops.h"

#include "../autograd.h"

static uint64_t content_key(const te_tensor *t)
{
    return t->storage->block ? (t->storage->id << 24 ^ t->storage->version << 4 ^ (uint64_t)t->offset << 44) | 1 : 0;
}

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

/* Leading dimensions joined: {.., k} as {rows, k}. False when they are not evenly spaced. */
static bool as_rows(const te_tensor *t, te_view *out)
{
    te_view v = te_tensor_view(t);
    int64_t width = t->shape[t->ndim - 1], last = t->stride[t->ndim - 1], rows = 1, step = width;
    bool stepped = false; /* a step may be 0: gradients of sums are broadcast */
    for (int i = t->ndim - 2; i >= 0; i--) {
        if (t->shape[i] == 1) continue;
        if (stepped && rows * step != t->stride[i]) return false;
        if (!stepped) step = t->stride[i];
        stepped = true;
        rows *= t->shape[i];
    }
    *out = (te_view){.data = v.data, .dtype = v.dtype, .ndim = 2, .shape = {rows, width}, .stride = {step, last}};
    return true;
}

/* The same as a tensor that stays valid: t itself or a copy. A new reference. */
static te_tensor *row_tensor(te_tensor *t, te_view *view)
{
    if (as_rows(t, view)) return te_tensor_retain(t);
    te_tensor *copy = te_tensor_clone_data(t);
    if (copy) as_rows(copy, view);
    return copy;
}

/* --- linear ------------------------------------------------------------------------------------------------------- */

static te_status check_linear(te_call *call)
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

static te_dtype gemm_dtype(te_call *call, te_dtype a, te_dtype b)
{
    te_dtype dtype = te_promote(a, b);
    if (dtype != TE_F64 && dtype != TE_BF16 && dtype != TE_F16) dtype = TE_F32;
    return te_call_compute_dtype(call, dtype);
}

/* y = x W^T + b, x {.., in}, W {out, in}. Saved: x and W in the compute dtype. */
static te_status linear_forward(te_call *call)
{
    te_tensor *x = call->in[0], *w = call->in[1], *b = call->in[2];
    te_status status = check_linear(call);
    if (status != TE_OK) return status;
    te_dtype dtype = gemm_dtype(call, x->dtype, w->dtype);
    te_tensor *xc = te_tensor_cast(x, dtype), *wc = xc ? te_tensor_cast_cached(w, dtype) : NULL;
    int64_t shape[TE_MAX_DIMS];
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = w->shape[0];
    te_tensor *y = wc ? te_tensor_new(call->ctx, x->storage->device, dtype, x->ndim, shape) : NULL, *rows = NULL;
    call->out[0] = y;
    if (!y) {
        status = call->ctx->status;
        goto done;
    }
    te_gemm gemm = {.b = transposed(te_tensor_view(wc)), .alpha = 1, .b_key = content_key(wc)};
    if (!(rows = row_tensor(xc, &gemm.a))) {
        status = call->ctx->status;
        goto done;
    }
    as_rows(y, &gemm.c);
    if (b) gemm.bias = te_tensor_view(b);
    te_exec *exec = te_call_exec(call, x);
    status = run_gemm(call, exec, &gemm);
    if (status == TE_OK && call->record && (te_call_save(call, xc) < 0 || te_call_save(call, wc) < 0))
        status = call->ctx->status;
done:
    te_tensor_release(rows);
    te_tensor_release(xc);
    te_tensor_release(wc);
    return status;
}

/* d = a b written to, or added to, the gradient of input i: in the GEMM where its memory and dtype allow. */
static te_status product_into_grad(te_call *call, te_exec *exec, int i, te_gemm *gemm, te_dtype compute)
{
    const te_grad_meta *meta = te_grad_input(call, i);
    bool direct = meta->dtype == compute || (meta->dtype == TE_F32 && compute != TE_F64);
    bool accumulate = false;
    te_tensor *target = direct ? te_grad_target(call, i, &accumulate)
                               : te_tensor_new(call->ctx, meta->device, compute, meta->ndim, meta->shape);
    if (!target) return call->ctx->status;
    as_rows(target, &gemm->c);
    gemm->alpha = 1;
    gemm->beta = accumulate ? 1 : 0;
    te_status status = run_gemm(call, exec, gemm);
    if (direct) return status;
    if (status == TE_OK) return te_grad_give(call, i, target);
    te_tensor_release(target);
    return status;
}

static te_status linear_backward(te_call *call)
{
    te_tensor *x = call->saved[0], *w = call->saved[1];
    te_exec *exec = te_call_exec(call, w);
    te_view dy, xv;
    te_status status = TE_OK;
    te_tensor *dout = te_tensor_cast(call->dout[0], w->dtype);
    te_tensor *dy_rows = dout ? row_tensor(dout, &dy) : NULL, *x_rows = dy_rows ? row_tensor(x, &xv) : NULL;
    if (!x_rows) status = call->ctx->status;
    if (status == TE_OK && te_grad_wanted(call, 0)) { /* dx = dy W */
        te_gemm gemm = {.a = dy, .b = te_tensor_view(w), .b_key = content_key(w)};
        status = product_into_grad(call, exec, 0, &gemm, w->dtype);
    }
    if (status == TE_OK && te_grad_wanted(call, 1)) { /* dW = dy^T x */
        te_gemm gemm = {.a = transposed(dy), .b = xv};
        status = product_into_grad(call, exec, 1, &gemm, w->dtype);
    }
    if (status == TE_OK && call->node->n_edges > 2 && te_grad_wanted(call, 2)) {
        bool accumulate;
        te_tensor *db = te_grad_target(call, 2, &accumulate);
        status = db ? te_sum_to(db, call->dout[0], 1, accumulate) : call->ctx->status;
    }
    te_tensor_release(x_rows);
    te_tensor_release(dy_rows);
    te_tensor_release(dout);
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
    te_dtype dtype = gemm_dtype(call, a->dtype, b->dtype);
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

const te_op_def te_ops_linear[] = {
    {.signature = "linear(x, weight, bias = nil)",
     .doc = "x W^T + b for x {..., in}, weight {out, in}, bias {out}. In the compute dtype of te.autocast, otherwise "
            "the operands'; float32 accumulation.",
     .forward = linear_forward,
     .backward = linear_backward},
    {.signature = "matmul(a, b)",
     .doc = "Matrix product over the last two dimensions; leading ones are batches and broadcast; a vector counts as a "
            "row (a) or a column (b).",
     .flags = TE_OP_METHOD,
     .forward = matmul_forward},
    {.signature = "matmul_matrices(a, b)",
     .doc = "Product of matrices or batches of them.",
     .flags = TE_OP_HIDDEN,
     .forward = matmul_matrices,
     .backward = matmul_backward},
    {0},
};
