/* attention_packed.c - te.self_attention: queries, keys and values in one projection, of sequences of one length or of
 * several that lie one behind the other; queries and keys are turned by their positions where frequencies are given. */
#include "attention.h"
#include "attention_quantized.h"
#include "rope.h"

#include "../autograd.h"

enum { HEADS = TE_ATTENTION_OPTIONS, KV_HEADS, PAIRS_INTERLEAVED };
enum { LENGTHS = 1, FREQUENCIES, SINKS, SAVED_POSITIONS = 3, SAVED_FREQUENCIES, SAVED_SINKS };

/* q, k, v (or their gradients) inside qkv {.., (heads + 2 kv_heads) dim}: blocks Q | K | V. */
static void packed_views(const te_tensor *qkv, int64_t heads, int64_t kv_heads, te_view *q, te_view *k, te_view *v)
{
    int64_t dim = qkv->shape[qkv->ndim - 1] / (heads + 2 * kv_heads);
    bool batched = qkv->ndim == 3;
    te_view base = {.data = te_tensor_pointer(qkv), .dtype = qkv->dtype, .ndim = 4};
    te_view *views[3] = {q, k, v};
    int64_t start = 0;
    base.shape[0] = batched ? qkv->shape[0] : 1;
    base.stride[0] = batched ? qkv->stride[0] : 0;
    base.shape[2] = qkv->shape[qkv->ndim - 2];
    base.stride[2] = qkv->stride[qkv->ndim - 2];
    base.shape[3] = dim;
    base.stride[3] = 1;
    base.stride[1] = dim;
    for (int i = 0; i < 3; i++) {
        *views[i] = base;
        views[i]->shape[1] = i ? kv_heads : heads;
        views[i]->data = (char *)base.data + (size_t)start * te_dtype_size(qkv->dtype);
        start += views[i]->shape[1] * dim;
    }
}

static te_status check_packed(te_call *call, int64_t heads, int64_t kv_heads)
{
    te_tensor *qkv = call->in[0], *lens = call->in[1];
    if (heads < 1 || kv_heads < 1 || heads % kv_heads)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "heads = %lld must be a multiple of kv_heads = %lld",
                            (long long)heads, (long long)kv_heads);
    if (qkv->ndim < 2 || qkv->ndim > 3 || qkv->shape[qkv->ndim - 1] % (heads + 2 * kv_heads))
        return te_call_fail(
            call, TE_ERROR_ARGUMENT,
            "{tokens, width} or {batch, seq, width} is needed, width a multiple of heads + 2 kv_heads = %lld, not %s",
            (long long)(heads + 2 * kv_heads), TE_SHAPE_TEXT(qkv));
    if (lens && (lens->ndim != 1 || qkv->ndim != 2 || (lens->dtype != TE_I32 && lens->dtype != TE_I64)))
        return te_call_fail(
            call, TE_ERROR_ARGUMENT,
            "seq_lens must be {batch} of int32 or int64 beside a projection {tokens, width}, not %s of %s beside %s",
            TE_SHAPE_TEXT(lens), te_dtype_name(lens->dtype), TE_SHAPE_TEXT(qkv));
    if (lens && (lens->shape[0] >= INT32_MAX || qkv->shape[0] > INT32_MAX))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "seq_lens %s beside %s: more than 2^31 - 1 sequences or tokens",
                            TE_SHAPE_TEXT(lens), TE_SHAPE_TEXT(qkv));
    return TE_OK;
}

/* Lengths to offsets where they lie: nobody waits for them. */
static te_status pack_lengths(te_call *call, te_attention_state *s, te_tensor *lens)
{
    te_device *device = lens->storage->device;
    int64_t tokens = call->in[0]->shape[0], room = lens->shape[0] + 1;
    te_view lengths = te_tensor_view(lens);
    s->packed = te_tensor_new(call->ctx, device, TE_I32, 1, &room);
    if (!s->packed) return call->ctx->status;
    s->a.cu_seqlens_q = s->a.cu_seqlens_kv = te_tensor_pointer(s->packed);
    s->a.n_seqs = (int)lens->shape[0];
    s->a.longest = tokens > 0 ? tokens : 1;
    te_status status = device->exec.backend->pack(&device->exec, te_tensor_pointer(s->packed), &lengths, tokens);
    return te_call_kernel(call, &device->exec, status);
}

/* Lengths to offsets; they must add up to the number of tokens. */
static te_status read_lengths(te_call *call, te_attention_state *s, te_tensor *lens)
{
    int64_t n = lens->shape[0], total = 0, tokens = call->in[0]->shape[0];
    int64_t *lengths = te_mem_alloc(&call->ctx->mem, (size_t)n * sizeof *lengths);
    if (!lengths) return te_call_fail(call, TE_ERROR_MEMORY, "out of host memory");
    te_status status = te_tensor_read(lens, TE_I64, lengths);
    for (int64_t i = 0; i < n && status == TE_OK; i++) {
        if (lengths[i] < 0 || lengths[i] > tokens - total)
            status = te_call_fail(call, TE_ERROR_ARGUMENT, "seq_lens[%lld] = %lld does not fit %lld tokens",
                                  te_counted(call->ctx, i), (long long)lengths[i], (long long)tokens);
        else
            s->offsets[i + 1] = (int32_t)(total += lengths[i]);
    }
    if (status == TE_OK && total != tokens)
        status = te_call_fail(call, TE_ERROR_ARGUMENT, "seq_lens add up to %lld of %lld tokens", (long long)total,
                              (long long)tokens);
    te_mem_free(&call->ctx->mem, lengths, (size_t)n * sizeof *lengths);
    s->a.cu_seqlens_q = s->a.cu_seqlens_kv = s->offsets;
    s->a.n_seqs = (int)n;
    return status;
}

/* --- its queries and keys turned by their positions --------------------------------------------------------------- */

/* The first heads of every row, [batch, heads, seq, dim]. */
static te_view first_heads(const te_tensor *rows, int64_t heads, int64_t dim)
{
    te_view q, k, v;
    packed_views(rows, rows->shape[rows->ndim - 1] / dim, 0, &q, &k, &v);
    q.shape[1] = heads;
    return q;
}

/* Positions on the host where the lengths are read there. */
static te_tensor *positions_in(te_call *call, const te_attention_state *s, const te_tensor *qkv)
{
    te_device *device = qkv->storage->device;
    int64_t n = qkv->shape[qkv->ndim - 2];
    if (s->packed) return te_rope_packed_positions(call->ctx, s->packed, n);
    if (!s->n_offsets) return te_rope_positions(call->ctx, device, n);
    te_tensor *positions = te_tensor_new(call->ctx, device, TE_F32, 1, &n);
    float *p = positions ? te_tensor_pointer(positions) : NULL;
    for (int i = 1; p && i < s->n_offsets; i++)
        for (int32_t t = s->offsets[i - 1]; t < s->offsets[i]; t++) p[t] = (float)(t - s->offsets[i - 1]);
    return positions;
}

/* A copy of the projection in which they are turned, in *qkv's place; *positions for backward. */
static te_status turn_projection(te_call *call, const te_attention_state *s, int64_t heads, int64_t kv_heads,
                                 te_tensor **qkv, te_tensor **positions)
{
    te_tensor *from = *qkv, *frequencies = call->in[FREQUENCIES];
    int64_t width = from->shape[from->ndim - 1], dim = width / (heads + 2 * kv_heads);
    te_status status = te_rope_check(call, frequencies, dim);
    if (status == TE_OK && dim == 0)
        status = te_call_fail(call, TE_ERROR_ARGUMENT, "heads of no features, qkv %s, cannot be turned",
                              TE_SHAPE_TEXT(from));
    if (status != TE_OK) return status;
    te_tensor *to = te_tensor_new_like(from);
    *positions = to ? positions_in(call, s, from) : NULL;
    status = *positions ? TE_OK : call->ctx->status;
    if (status == TE_OK) {
        te_rope rope = {*positions, frequencies, 0, call->attr[PAIRS_INTERLEAVED].number != 0};
        te_view x = first_heads(from, heads + kv_heads, dim), y = first_heads(to, heads + kv_heads, dim);
        status = te_rope_turn(call, &rope, &x, &y, false);
    }
    if (status == TE_OK) { /* values as they are */
        int64_t shape[3], first = (heads + kv_heads) * dim;
        memcpy(shape, from->shape, (size_t)from->ndim * sizeof *shape);
        shape[from->ndim - 1] = kv_heads * dim;
        te_tensor *v = te_tensor_alias(from, from->ndim, shape, from->stride, from->offset + first);
        te_tensor *copy = v ? te_tensor_alias(to, to->ndim, shape, to->stride, to->offset + first) : NULL;
        status = copy ? te_tensor_copy_data(copy, v) : call->ctx->status;
        te_tensor_release(v);
        te_tensor_release(copy);
    }
    if (status != TE_OK) {
        te_tensor_release(to);
        return status;
    }
    te_tensor_release(from);
    *qkv = to;
    return TE_OK;
}

/* Room for the gradients of turned queries and keys, to which the views then point: in rows as wide as the others',
 * for cuDNN takes it that gradients of packed sequences lie as what they are the gradients of. */
static te_tensor *open_turned(te_call *call, const te_tensor *dqkv, te_attention_grad *g)
{
    int64_t heads = call->memo[0], kv_heads = call->memo[1], dim = g->dq.shape[3];
    te_tensor *turned = te_tensor_new_like(dqkv);
    if (!turned) return NULL;
    g->dq = g->dk = first_heads(turned, heads, dim);
    g->dk.shape[1] = kv_heads;
    g->dk.data = (char *)g->dk.data + (size_t)(heads * dim) * te_dtype_size(turned->dtype);
    return turned;
}

static te_status turn_gradient_back(te_call *call, const te_tensor *turned, const te_tensor *dqkv, int64_t dim)
{
    int64_t heads = call->memo[0] + call->memo[1];
    te_rope rope = {call->saved[SAVED_POSITIONS], call->saved[SAVED_FREQUENCIES], 0,
                    call->attr[PAIRS_INTERLEAVED].number != 0};
    te_view x = first_heads(turned, heads, dim), y = first_heads(dqkv, heads, dim);
    return te_rope_turn(call, &rope, &x, &y, true);
}

te_status te_attention_packed_forward(te_call *call)
{
    te_context *ctx = call->ctx;
    te_tensor *lens = call->in[LENGTHS], *positions = NULL, *out = NULL, *lse = NULL, *sinks = NULL;
    int64_t heads = (int64_t)call->attr[HEADS].number,
            kv_heads = call->attr[KV_HEADS].set ? (int64_t)call->attr[KV_HEADS].number : heads;
    te_status status = check_packed(call, heads, kv_heads);
    if (status != TE_OK) return status;
    te_tensor *qkv = te_attention_input(call, 0);
    bool packs = lens && !lens->storage->device->exec.backend->host_memory;
    te_attention_state *s = qkv ? te_attention_open(call, lens && !packs ? (int)lens->shape[0] + 1 : 0) : NULL;
    if (!s) {
        te_tensor_release(qkv);
        return ctx->status;
    }
    if (lens) status = packs ? pack_lengths(call, s, lens) : read_lengths(call, s, lens);
    if (status == TE_OK && call->in[FREQUENCIES])
        status = turn_projection(call, s, heads, kv_heads, &qkv, &positions);
    if (status == TE_OK) status = te_attention_quantize(call, s, &qkv, 1);
    if (status == TE_OK) {
        packed_views(s->n_operands ? s->operands[0].side[0].data : qkv, heads, kv_heads, &s->a.q, &s->a.k, &s->a.v);
        te_view *views[3] = {&s->a.q, &s->a.k, &s->a.v};
        for (int i = 0; i < 3 && s->n_operands; i++) te_attention_mark(s, 0, views[i]);
        status = te_attention_options(call, &s->a);
    }
    if (status == TE_OK && call->in[SINKS])
        status = te_attention_take_sinks(call, call->in[SINKS], qkv->dtype, &s->a, &sinks);
    if (status == TE_OK) status = te_attention_compute(call, s, qkv->dtype, qkv->storage->device, &out, &lse);
    if (status == TE_OK) {
        int64_t shape[3];
        memcpy(shape, qkv->shape, (size_t)qkv->ndim * sizeof *shape);
        shape[qkv->ndim - 1] = heads * s->a.v.shape[3];
        call->out[0] = s->result.side[0].data ? te_attention_open_result(call, s, qkv->ndim, shape)
                                              : te_tensor_alias(out, qkv->ndim, shape, NULL, 0);
        if (!call->out[0]) status = ctx->status;
    }
    te_tensor *keep[] = {s->n_operands ? NULL : qkv, s->result.side[0].data ? NULL : out, lse, positions,
                         call->in[FREQUENCIES], sinks};
    status = te_attention_keep(call, status, keep, 6);
    call->memo[0] = heads;
    call->memo[1] = kv_heads;
    te_tensor_release(positions);
    te_tensor_release(sinks);
    te_tensor_release(qkv);
    te_tensor_release(out);
    te_tensor_release(lse);
    return status;
}

te_status te_attention_packed_backward(te_call *call)
{
    const te_attention_state *s = call->pointer;
    const te_grad_meta *meta = te_grad_input(call, 0);
    te_exec *exec = te_call_exec(call, call->saved[2]);
    te_tensor *qkv = s->n_operands ? te_dequantize(call->ctx, &s->operands[0], 0) : te_tensor_retain(call->saved[0]);
    te_tensor *dqkv = qkv ? te_tensor_new(call->ctx, meta->device, qkv->dtype, meta->ndim, meta->shape) : NULL;
    te_tensor *out = dqkv ? te_attention_result_values(call, s, call->saved[1]) : NULL;
    te_tensor *dout = out ? te_tensor_contiguous_copy(call->dout[0]) : NULL, *turned = NULL;
    te_status status = dout ? TE_OK : call->ctx->status;
    te_attention_grad g = {.forward = s->a};
    if (status == TE_OK) {
        if (s->packed) g.forward.cu_seqlens_q = g.forward.cu_seqlens_kv = te_tensor_pointer(s->packed);
        te_attention_point_to_result(&g.forward, out);
        g.dout = g.forward.out;
        g.dout.data = te_tensor_pointer(dout);
        packed_views(qkv, call->memo[0], call->memo[1], &g.forward.q, &g.forward.k, &g.forward.v);
        packed_views(dqkv, call->memo[0], call->memo[1], &g.dq, &g.dk, &g.dv);
        if (call->saved[SAVED_POSITIONS] && !(turned = open_turned(call, dqkv, &g))) status = call->ctx->status;
    }
    if (status == TE_OK) status = te_call_kernel(call, exec, exec->backend->attention_backward(exec, &g));
    if (status == TE_OK && turned) status = turn_gradient_back(call, turned, dqkv, g.dq.shape[3]);
    if (status == TE_OK && te_attention_wants_dsinks(call, SINKS, call->saved[SAVED_SINKS]))
        status = te_attention_give_dsinks(call, SINKS, &g, call->saved[SAVED_SINKS]);
    te_tensor_release(turned);
    te_tensor_release(dout);
    te_tensor_release(out);
    te_tensor_release(qkv);
    if (status == TE_OK && te_grad_wanted(call, 0)) return te_grad_give(call, 0, dqkv);
    te_tensor_release(dqkv);
    return status;
}
