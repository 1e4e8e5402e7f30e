/* attention_separate.c - te.scaled_dot_product_attention: queries, keys and values that are tensors each. */
#include "attention.h"
#include "attention_quantized.h"
#include "ops.h"

#include "../autograd.h"

enum { BIAS = 3, SINKS, SAVED_OUT = 3, SAVED_STATISTICS, SAVED_BIAS, SAVED_SINKS };

te_status te_attention_check_separate(te_call *call, const te_tensor *q, const te_tensor *k, const te_tensor *v)
{
    bool fits = q->ndim == 4 && k->ndim == 4 && v->ndim == 4 && q->shape[0] == k->shape[0] &&
                k->shape[0] == v->shape[0] && k->shape[1] == v->shape[1] && k->shape[2] == v->shape[2] &&
                q->shape[3] == k->shape[3] && k->shape[1] > 0 && q->shape[1] % k->shape[1] == 0;
    if (!fits)
        return te_call_fail(call, TE_ERROR_ARGUMENT,
                            "q {batch, heads, seq_q, dim}, k {batch, kv_heads, seq_kv, dim} and v {batch, kv_heads, "
                            "seq_kv, dim_v} with heads a multiple of "
                            "kv_heads are needed, not %s, %s, %s",
                            TE_SHAPE_TEXT(q), TE_SHAPE_TEXT(k), TE_SHAPE_TEXT(v));
    te_dtype dtype = te_call_compute_dtype(call, q->dtype);
    bool     one = te_call_compute_dtype(call, k->dtype) == dtype && te_call_compute_dtype(call, v->dtype) == dtype;
    if (!te_dtype_has_gradient(dtype) || !one)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "q, k and v must have one floating dtype, not %s, %s, %s",
                            te_dtype_name(q->dtype), te_dtype_name(k->dtype), te_dtype_name(v->dtype));
    return TE_OK;
}

/* Where a mask is true a score stays, elsewhere it becomes minus infinity: the logarithm of 1 and 0. Both are exact in
 * 16 bits, of which there are fewer to read, and beside operands of 16 bits some libraries take no other dtype. */
static te_tensor *bias_of_mask(te_context *ctx, te_tensor *mask, te_dtype operands)
{
    te_dtype dtype = operands == TE_BF16 || operands == TE_F16 ? operands : TE_F32;
    te_tensor *ones = te_tensor_cast(mask, dtype), *bias = NULL;
    if (ones) te_op_run(ctx, te_op_find(ctx, "log"), &TE_A_TENSOR(ones), 1, &bias, 1);
    te_tensor_release(ones);
    if (!bias || bias->dtype == dtype) return bias;
    te_tensor *cast = te_tensor_cast(bias, dtype); /* autocast has logarithms in float32 */
    te_tensor_release(bias);
    return cast;
}

static te_status bias_view(te_call *call, te_tensor *bias, te_attention *a)
{
    int64_t full[4] = {a->q.shape[0], a->q.shape[1], a->q.shape[2], a->k.shape[2]}, shape[TE_MAX_DIMS];
    int ndim = 4;
    memcpy(shape, full, sizeof full);
    if (!te_dtype_is_float(bias->dtype))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "bias: expected a floating dtype or bool, got %s",
                            te_dtype_name(bias->dtype));
    bool fits =
        te_broadcast(&ndim, shape, bias->ndim, bias->shape) && ndim == 4 && memcmp(shape, full, sizeof full) == 0;
    if (!fits)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "bias %s does not broadcast to the scores", TE_SHAPE_TEXT(bias));
    a->bias = (te_view){.data = te_tensor_pointer(bias), .dtype = bias->dtype, .ndim = 4};
    for (int i = 0; i < 4; i++) {
        int own = i - (4 - bias->ndim);
        a->bias.shape[i] = full[i];
        a->bias.stride[i] = own < 0 || bias->shape[own] == 1 ? 0 : bias->stride[own];
    }
    return TE_OK;
}

/* q, k and v of tensors, or of the operands made of them. */
static void separate_views(te_attention_state *s, te_tensor *const *qkv)
{
    te_view *views[3] = {&s->a.q, &s->a.k, &s->a.v};
    for (int i = 0; i < 3; i++) {
        *views[i] = te_tensor_view(s->n_operands ? s->operands[i].side[0].data : qkv[i]);
        if (s->n_operands) te_attention_mark(s, i, views[i]);
    }
}

te_status te_attention_separate_forward(te_call *call)
{
    te_context *ctx = call->ctx;
    te_tensor *bias = te_tensor_retain(call->in[BIAS]), *qkv[3] = {NULL}, *out = NULL, *lse = NULL, *sinks = NULL;
    te_status status = te_attention_check_separate(call, call->in[0], call->in[1], call->in[2]);
    te_attention_state *s = status == TE_OK ? te_attention_open(call, 0) : NULL;
    if (!s) {
        te_tensor_release(bias);
        return status == TE_OK ? ctx->status : status;
    }
    for (int i = 0; i < 3; i++)
        if (!(qkv[i] = te_attention_input(call, i))) status = ctx->status;
    if (status == TE_OK) status = te_attention_quantize(call, s, qkv, 3);
    if (status == TE_OK) {
        separate_views(s, qkv);
        status = te_attention_options(call, &s->a);
    }
    if (status == TE_OK && bias && bias->dtype == TE_BOOL) {
        te_tensor_release(bias);
        if (!(bias = bias_of_mask(ctx, call->in[BIAS], qkv[0]->dtype))) status = ctx->status;
    }
    if (status == TE_OK && bias) status = bias_view(call, bias, &s->a);
    if (status == TE_OK && call->in[SINKS])
        status = te_attention_take_sinks(call, call->in[SINKS], qkv[0]->dtype, &s->a, &sinks);
    if (status == TE_OK) status = te_attention_compute(call, s, qkv[0]->dtype, qkv[0]->storage->device, &out, &lse);
    if (status == TE_OK) {
        te_tensor *values =
            s->result.side[0].data ? te_attention_open_result(call, s, 4, out->shape) : te_tensor_retain(out);
        call->out[0] = values ? te_tensor_alias(values, 4, s->a.out.shape, s->a.out.stride, 0) : NULL;
        te_tensor_release(values);
        if (!call->out[0]) status = ctx->status;
    }
    bool plain = !s->n_operands;
    te_tensor *keep[] = {plain ? qkv[0] : NULL, plain ? qkv[1] : NULL, plain ? qkv[2] : NULL,
                         s->result.side[0].data ? NULL : out, lse, bias, sinks};
    status = te_attention_keep(call, status, keep, 7);
    for (int i = 0; i < 3; i++) te_tensor_release(qkv[i]);
    te_tensor_release(bias);
    te_tensor_release(sinks);
    te_tensor_release(out);
    te_tensor_release(lse);
    return status;
}

/* Room for the gradient of all scores, where the bias wants its own; *dscores NULL: it does not. */
static te_status open_dscores(te_call *call, te_attention_grad *g, te_tensor **dscores)
{
    const te_attention *a = &g->forward;
    int64_t shape[4] = {a->q.shape[0], a->q.shape[1], a->q.shape[2], a->k.shape[2]};
    *dscores = NULL;
    if (call->node->n_edges <= BIAS || !te_grad_wanted(call, BIAS)) return TE_OK;
    const te_tensor *lse = call->saved[SAVED_STATISTICS];
    *dscores = te_tensor_new(call->ctx, lse->storage->device, lse->dtype, 4, shape);
    te_status status = *dscores ? te_tensor_fill(*dscores, 0) : call->ctx->status;
    if (status == TE_OK) g->dbias = te_tensor_view(*dscores);
    return status;
}

/* Summed over the dimensions in which the bias was broadcast. */
static te_status give_dbias(te_call *call, te_tensor *dscores)
{
    bool accumulate;
    te_tensor *dbias = te_grad_target(call, BIAS, &accumulate);
    return dbias ? te_sum_to(dbias, dscores, 1, accumulate) : call->ctx->status;
}

te_status te_attention_separate_backward(te_call *call)
{
    const te_attention_state *s = call->pointer;
    te_exec *exec = te_call_exec(call, call->saved[SAVED_STATISTICS]);
    te_attention_grad g = {.forward = s->a};
    te_tensor *values[3] = {NULL}, *grads[3] = {NULL}, *dscores = NULL,
              *out = te_attention_result_values(call, s, call->saved[SAVED_OUT]);
    te_tensor *dout = out ? te_attention_unit_stride(call->dout[0]) : NULL;
    te_view *views[3] = {&g.dq, &g.dk, &g.dv}, *operands[3] = {&g.forward.q, &g.forward.k, &g.forward.v};
    te_status status = dout ? TE_OK : call->ctx->status;
    for (int i = 0; i < 3 && status == TE_OK; i++) {
        values[i] = s->n_operands ? te_dequantize(call->ctx, &s->operands[i], 0) : te_tensor_retain(call->saved[i]);
        grads[i] = values[i] ? te_tensor_new_like(values[i]) : NULL;
        if (!grads[i]) {
            status = call->ctx->status;
        } else {
            *operands[i] = te_tensor_view(values[i]);
            *views[i] = te_tensor_view(grads[i]);
        }
    }
    if (status == TE_OK) status = open_dscores(call, &g, &dscores);
    if (status == TE_OK) {
        g.dout = te_tensor_view(dout);
        te_attention_point_to_result(&g.forward, out);
        status = te_call_kernel(call, exec, exec->backend->attention_backward(exec, &g));
    }
    if (status == TE_OK && te_attention_wants_dsinks(call, SINKS, call->saved[SAVED_SINKS]))
        status = te_attention_give_dsinks(call, SINKS, &g, call->saved[SAVED_SINKS]);
    te_tensor_release(out);
    te_tensor_release(dout);
    for (int i = 0; i < 3; i++) {
        te_tensor_release(values[i]);
        if (status == TE_OK && te_grad_wanted(call, i))
            status = te_grad_give(call, i, grads[i]);
        else
            te_tensor_release(grads[i]);
    }
    if (status == TE_OK && dscores) status = give_dbias(call, dscores);
    te_tensor_release(dscores);
    return status;
}
