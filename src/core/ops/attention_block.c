/* attention_block.c - attention to keys that are not all there at once, block by block, with the kernels of attention.
 *
 * Of blocks i of the keys, with l_i the logarithm of the softmax denominator of block i,
 *
 *      l = log(sum of exp(l_i))        o = sum of exp(l_i - l) o_i
 *
 * is attention to all of them (attention_merge, which adds one block). Probabilities are exp(score - l), so a kernel of
 * backward that gets the final l and o computes what its block contributes to the gradients, sums over blocks:
 *
 *      D = rowsum(do o)        dS_i = P_i (do v_i^T - D)        dq = sum of dS_i k_i
 *
 * Whoever calls adds and merges (te.ops.context_ring), and takes care of sinks, which stand in l.
 */
#include "attention.h"

/* Of what is added to other blocks': rounded once, in the end, where the device's kernels can leave it unrounded. */
static te_dtype part_dtype(const te_tensor *q)
{
    bool narrow = q->dtype == TE_BF16 || q->dtype == TE_F16;
    return narrow && q->storage->device->exec.backend->wide_attention ? TE_F32 : q->dtype;
}

te_status te_attention_block_forward(te_call *call)
{
    te_tensor *qkv[3] = {NULL}, *out = NULL;
    te_view   *views[3];
    te_attention_state s = {.n_operands = 0};
    te_status status = te_attention_check_separate(call, call->in[0], call->in[1], call->in[2]);
    views[0] = &s.a.q, views[1] = &s.a.k, views[2] = &s.a.v;
    for (int i = 0; i < 3 && status == TE_OK; i++) {
        qkv[i] = te_attention_input(call, i);
        if (qkv[i])
            *views[i] = te_tensor_view(qkv[i]);
        else
            status = call->ctx->status;
    }
    if (status == TE_OK) status = te_attention_options(call, &s.a);
    if (status == TE_OK)
        status = te_attention_compute(call, &s, part_dtype(qkv[0]), qkv[0]->storage->device, &out, &call->out[1]);
    if (status == TE_OK && !(call->out[0] = te_tensor_alias(out, 4, s.a.out.shape, s.a.out.stride, 0)))
        status = call->ctx->status;
    for (int i = 0; i < 3; i++) te_tensor_release(qkv[i]);
    te_tensor_release(out);
    return status;
}

/* Whether y and dy {batch, heads, seq_q, dim_v} and lse {batch, heads, seq_q} are of that attention. */
static te_status check_result(te_call *call, const te_tensor *q, const te_tensor *v)
{
    const te_tensor *dy = call->in[0], *y = call->in[4], *lse = call->in[5];
    int64_t  want[4] = {q->shape[0], q->shape[1], q->shape[2], v->shape[3]};
    te_dtype statistics = q->dtype == TE_F64 ? TE_F64 : TE_F32;
    bool     fits = dy->ndim == 4 && y->ndim == 4 && lse->ndim == 3;
    if (dy->dtype != q->dtype || y->dtype != q->dtype || v->dtype != q->dtype || lse->dtype != statistics)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "dy, y and v of %s and lse of %s are needed beside q, not %s, %s, "
                            "%s and %s", te_dtype_name(q->dtype), te_dtype_name(statistics), te_dtype_name(dy->dtype),
                            te_dtype_name(y->dtype), te_dtype_name(v->dtype), te_dtype_name(lse->dtype));
    for (int i = 0; i < 4 && fits; i++)
        fits = dy->shape[i] == want[i] && y->shape[i] == want[i] && (i == 3 || lse->shape[i] == want[i]);
    if (fits) return TE_OK;
    return te_call_fail(call, TE_ERROR_ARGUMENT, "dy %s, y %s and lse %s do not go with q %s and v %s",
                        TE_SHAPE_TEXT(dy), TE_SHAPE_TEXT(y), TE_SHAPE_TEXT(lse), TE_SHAPE_TEXT(q), TE_SHAPE_TEXT(v));
}

te_status te_attention_block_gradients(te_call *call)
{
    enum { DY, Q, K, V, Y, LSE, N };
    te_tensor *t[N] = {NULL};
    te_attention_grad g = {.forward = {.n_seqs = 0}};
    te_view *views[N] = {&g.dout, &g.forward.q, &g.forward.k, &g.forward.v, &g.forward.out, &g.forward.lse};
    te_view *grads[3] = {&g.dq, &g.dk, &g.dv};
    te_status status = te_attention_check_separate(call, call->in[Q], call->in[K], call->in[V]);
    if (status == TE_OK) status = check_result(call, call->in[Q], call->in[V]);
    for (int i = 0; i < N && status == TE_OK; i++) {
        t[i] = i == LSE ? te_tensor_contiguous_copy(call->in[i]) : te_attention_unit_stride(call->in[i]);
        if (t[i])
            *views[i] = te_tensor_view(t[i]);
        else
            status = call->ctx->status;
    }
    for (int i = 0; i < 3 && status == TE_OK; i++) {
        call->out[i] = te_tensor_new(call->ctx, t[Q]->storage->device, part_dtype(t[Q]), 4, t[Q + i]->shape);
        if (call->out[i])
            *grads[i] = te_tensor_view(call->out[i]);
        else
            status = call->ctx->status;
    }
    if (status == TE_OK) status = te_attention_options(call, &g.forward);
    if (status == TE_OK) {
        te_exec *exec = te_call_exec(call, t[Q]);
        status = te_call_kernel(call, exec, exec->backend->attention_backward(exec, &g));
    }
    for (int i = 0; i < N; i++) te_tensor_release(t[i]);
    return status;
}
