/* triangle.c - matrices without what is above or below a diagonal. */
#include "ops.h"

#include "../autograd.h"

/* The triangle of t that the operation is about, where the backend cuts them. */
static te_tensor *triangle_of(te_call *call, te_tensor *t)
{
    bool upper = strcmp(call->op->name, "triu") == 0;
    double most = (double)(INT64_C(1) << 40), diagonal = call->attr[0].number;
    te_exec *exec = te_call_exec(call, t);
    te_tensor *y = te_tensor_new(call->ctx, t->storage->device, t->dtype, t->ndim, t->shape);
    if (!y) return NULL;
    te_view dst = te_tensor_view(y), src = te_tensor_view(t);
    int64_t at = (int64_t)(diagonal > most ? most : diagonal < -most ? -most : diagonal);
    if (te_call_kernel(call, exec, exec->backend->triangle(exec, &dst, &src, at, upper)) == TE_OK) return y;
    te_tensor_release(y);
    return NULL;
}

/* Elsewhere row numbers enter a row program beside x. */
static te_status triangle_program(te_call *call)
{
    te_context *ctx = call->ctx;
    te_tensor *x = call->in[0];
    te_tensor *row = te_tensor_new(ctx, x->storage->device, TE_F32, 1, &x->shape[x->ndim - 2]);
    te_arg count[] = {TE_A_TENSOR(row), TE_A_NUMBER(0), TE_A_NUMBER(1)};
    te_status status = row ? te_op_run_inplace(ctx, te_op_find(ctx, "sequence"), count, 3) : ctx->status;
    bool upper = strcmp(call->op->name, "triu") == 0;
    te_arg args[] = {TE_A_TENSOR(x), TE_A_TENSOR(row), TE_A_NUMBER(call->attr[0].number)};
    if (status == TE_OK) status = te_call_delegate(call, upper ? "triu_row" : "tril_row", 3, args);
    te_tensor_release(row);
    return status;
}

static te_status triangle_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    if (x->ndim < 2)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "at least two dimensions are needed, not %s", TE_SHAPE_TEXT(x));
    bool eight_bits = x->dtype == TE_F8E4M3 || x->dtype == TE_F8E5M2; /* programs give float32 */
    if (eight_bits || !te_call_exec(call, x)->backend->triangle) return triangle_program(call);
    call->out[0] = triangle_of(call, x);
    return call->out[0] ? TE_OK : call->ctx->status;
}

static te_status triangle_backward(te_call *call)
{
    te_tensor *dx = triangle_of(call, call->dout[0]);
    return dx ? te_grad_give(call, 0, dx) : call->ctx->status;
}

#define ROW_MASK (TE_OP_HIDDEN)

const te_op_def te_ops_triangle[] = {
    {.signature = "tril(x, diagonal: int = 0)",
     .doc = "x with zeros above the diagonal (shifted right by `diagonal`).",
     .flags = TE_OP_METHOD,
     .forward = triangle_forward,
     .backward = triangle_backward},
    {.signature = "triu(x, diagonal: int = 0)",
     .doc = "x with zeros below the diagonal (shifted right by `diagonal`).",
     .flags = TE_OP_METHOD,
     .forward = triangle_forward,
     .backward = triangle_backward},
    {.signature = "tril_row(x, row; diagonal: number = 0)",
     .doc = "Lower triangle, given the row numbers.",
     .flags = ROW_MASK | TE_OP_LASTROW,
     .rows = "row",
     .formula = "y = where(column() <= row + diagonal, x, 0)"},
    {.signature = "triu_row(x, row; diagonal: number = 0)",
     .doc = "Upper triangle, given the row numbers.",
     .flags = ROW_MASK | TE_OP_LASTROW,
     .rows = "row",
     .formula = "y = where(column() >= row + diagonal, x, 0)"},
    {0},
};
