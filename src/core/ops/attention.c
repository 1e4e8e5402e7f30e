/* attention.c - scaled dot product attention on separate and on packed projections.
 *
 * Both ops describe their operands as [batch, heads, seq, dim] views and leave the rest to the backend; scores are
 * never stored. The packed form exists because a projection's gradient is then written once, where three views would
 * each need their own pass over it.
 *
 * Sinks (te_attention) are the kernels' in the forward pass, which leave them in lse, so that backward needs not know
 * of them; only their own gradient is made here: they have no value, so of dS = P (dP - D) it is
 *
 *      dsink = sum over rows of -exp(sink - lse) D,        D = rowsum(do o)
 *
 * Under a recipe with FP8 attention the operands are quantized (attention_quantized.h).
 */
#include "attention_quantized.h"
#include "ops.h"
#include "rope.h"

#include "../autograd.h"

#include <math.h>

static void release_state(te_call *call)
{
    te_attention_state *s = (te_attention_state *)(uintptr_t)call->pointer;
    te_mem mem = s->mem;
    for (int i = 0; i < s->n_operands; i++) te_quantized_close(&s->operands[i]);
    te_quantized_close(&s->result);
    te_tensor_release(s->packed);
    te_mem_free(&mem, s, sizeof *s + (size_t)s->n_offsets * sizeof *s->offsets);
    call->pointer = NULL;
}

/* What backward reads is kept where the call is recorded; elsewhere, and after a failure, the state goes. */
static te_status keep_for_backward(te_call *call, te_status status, te_tensor *const *tensors, int n)
{
    for (int i = 0; i < n && status == TE_OK && call->record; i++)
        if (te_call_save(call, tensors[i]) < 0) status = call->ctx->status;
    if (!call->record || status != TE_OK) {
        release_state(call);
        call->release = NULL;
    }
    return status;
}

static te_attention_state *new_state(te_call *call, int n_offsets)
{
    te_attention_state *s = te_mem_zalloc(&call->ctx->mem, sizeof *s + (size_t)n_offsets * sizeof *s->offsets);
    if (!s) {
        te_fail_memory(call->ctx, call->op->name);
        return NULL;
    }
    s->mem = call->ctx->mem;
    s->n_offsets = n_offsets;
    call->pointer = s;
    call->release = release_state;
    return s;
}

/* The options both ops share, in this order in their attributes. */
enum { CAUSAL, SCALE, DROPOUT, WINDOW_LEFT, WINDOW_RIGHT, BOTTOM_RIGHT, N_SHARED };
#define SHARED_OPTIONS                                                                                                 \
    "causal: bool = false, scale: number = nil, dropout: number = 0, window_left: int = -1, window_right: int = -1, "  \
    "bottom_right: bool = false"

static te_status read_options(te_call *call, te_attention *a)
{
    const te_attr *o = call->attr;
    a->scale = o[SCALE].set ? o[SCALE].number : 1 / sqrt((double)a->q.shape[3]);
    a->window_left = (int64_t)o[WINDOW_LEFT].number;
    a->window_right = o[CAUSAL].number != 0 ? 0 : (int64_t)o[WINDOW_RIGHT].number;
    a->bottom_right = o[BOTTOM_RIGHT].number != 0;
    a->dropout = o[DROPOUT].number;
    if (!(a->dropout >= 0 && a->dropout < 1))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "dropout must lie in [0, 1), not %g", a->dropout);
    if (o[WINDOW_LEFT].number < -1 || o[WINDOW_RIGHT].number < -1)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "window_left and window_right must be at least -1, not %g and %g",
                            o[WINDOW_LEFT].number, o[WINDOW_RIGHT].number);
    if (a->dropout > 0)
        a->rng = te_context_draw(call->ctx, (uint64_t)a->q.shape[0] * (uint64_t)a->q.shape[1] *
                                                (uint64_t)a->q.shape[2] * (uint64_t)a->k.shape[2]);
    return TE_OK;
}

/* --- both ops ----------------------------------------------------------------------------------------------------- */

/* Result and softmax statistics; out is laid out [batch, seq, heads, dim] so that joining the heads costs nothing. */
static te_status run_forward(te_call *call, te_attention_state *s, te_dtype dtype, te_device *device, te_tensor **out,
                             te_tensor **lse)
{
    te_attention *a = &s->a;
    int64_t rows[4] = {a->q.shape[0], a->q.shape[2], a->q.shape[1], a->v.shape[3]};
    int64_t statistics[3] = {a->q.shape[0], a->q.shape[1], a->q.shape[2]};
    *out = te_attention_result(call, s, dtype, device, rows);
    *lse = *out ? te_tensor_new(call->ctx, device, dtype == TE_F64 ? TE_F64 : TE_F32, 3, statistics) : NULL;
    if (!*lse) return call->ctx->status;
    a->out = te_tensor_view(*out);
    if (s->result.side[0].data) a->out.dtype = TE_F8E4M3;
    a->out.shape[1] = rows[2];
    a->out.shape[2] = rows[1];
    a->out.stride[1] = (*out)->stride[2];
    a->out.stride[2] = (*out)->stride[1];
    a->lse = te_tensor_view(*lse);
    return te_call_kernel(call, &device->exec, device->exec.backend->attention(&device->exec, a));
}

/* The sinks as kernels read them: another reference, or a copy. */
static te_status take_sinks(te_call *call, te_tensor *sinks, te_dtype dtype, te_attention *a, te_tensor **taken)
{
    int64_t  heads = a->q.shape[1];
    te_dtype wanted = dtype == TE_F64 ? TE_F64 : TE_F32;
    if (sinks->ndim != 1 || sinks->shape[0] != heads || !te_dtype_is_float(sinks->dtype))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "sinks must be {heads} = {%lld} of a floating dtype, not %s of %s",
                            (long long)heads, TE_SHAPE_TEXT(sinks), te_dtype_name(sinks->dtype));
    *taken = sinks->dtype == wanted ? te_tensor_contiguous_copy(sinks) : te_tensor_cast(sinks, wanted);
    if (!*taken) return call->ctx->status;
    a->sinks = te_tensor_view(*taken);
    return TE_OK;
}

static const te_utility sink_program = {.name = "sink_gradient",
                                        .inputs = "o d l a",
                                        .outputs = "y",
                                        .formula = "y = where(a < -3.0e38, 0, -exp(a - l) * o * d)"};

/* Dimension i of v as to[i] of a run's. */
static te_operand operand_of(const te_view *v, const int to[])
{
    te_operand o = {.data = v->data, .dtype = v->dtype};
    for (int i = 0; i < v->ndim; i++) o.stride[to[i]] = v->shape[i] == 1 ? 0 : v->stride[i];
    return o;
}

static bool wants_dsinks(const te_call *call, int index, const te_tensor *sinks)
{
    return sinks && call->node->n_edges > index && te_grad_wanted(call, index);
}

/* The gradient of input `index`, the sinks that were saved: terms [batch, seq, dim, heads], then their sums. */
static te_status give_dsinks(te_call *call, int index, const te_attention_grad *g, te_tensor *sinks)
{
    static const int rows[4] = {0, 3, 1, 2}, heads[1] = {3};
    const te_attention *a = &g->forward;
    te_device *device = sinks->storage->device;
    bool       wide = a->q.dtype == TE_F64, accumulate;
    te_run     run = {.ndim = 4, .compute_f64 = wide};
    int64_t    held[4] = {a->out.shape[0], a->out.shape[2], a->out.shape[1], a->out.shape[3]};
    for (int i = 0; i < 4; i++) run.shape[rows[i]] = a->out.shape[i];
    te_view    s = te_tensor_view(sinks);
    te_tensor *held_terms = te_tensor_new(call->ctx, device, wide ? TE_F64 : TE_F32, 4, held), *terms = NULL, *to;
    if (!held_terms) return call->ctx->status;
    int64_t stride[4] = {held_terms->stride[0], held_terms->stride[1], held_terms->stride[3], held_terms->stride[2]};
    terms = te_tensor_alias(held_terms, 4, run.shape, stride, 0);
    te_status status = terms ? TE_OK : call->ctx->status;
    if (status == TE_OK) {
        te_view    y = te_tensor_view(terms);
        te_operand in[4] = {operand_of(&a->out, rows), operand_of(&g->dout, rows), operand_of(&a->lse, rows),
                            operand_of(&s, heads)}, out = {.data = y.data, .dtype = y.dtype};
        memcpy(out.stride, y.stride, 4 * sizeof *y.stride);
        run.inputs = in;
        run.outputs = &out;
        te_program *program = te_utility_program(call->ctx, &sink_program);
        status = !program ? call->ctx->status
                          : te_call_kernel(call, &device->exec,
                                           device->exec.backend->program_run(&device->exec, program, &run, 1));
    }
    if (status == TE_OK) {
        to = te_grad_target(call, index, &accumulate);
        status = to ? te_sum_to(to, terms, 1, accumulate) : call->ctx->status;
    }
    te_tensor_release(terms);
    te_tensor_release(held_terms);
    return status;
}

static void point_to_result(te_attention *a, const te_tensor *out)
{
    a->out.data = te_tensor_pointer(out);
    a->out.dtype = out->dtype;
}

/* --- separate projections ----------------------------------------------------------------------------------------- */

static te_status check_separate(te_call *call)
{
    te_tensor *q = call->in[0], *k = call->in[1], *v = call->in[2];
    bool fits = q->ndim == 4 && k->ndim == 4 && v->ndim == 4 && q->shape[0] == k->shape[0] &&
                k->shape[0] == v->shape[0] && k->shape[1] == v->shape[1] && k->shape[2] == v->shape[2] &&
                q->shape[3] == k->shape[3] && k->shape[1] > 0 && q->shape[1] % k->shape[1] == 0;
    if (!fits)
        return te_call_fail(call, TE_ERROR_ARGUMENT,
                            "q {batch, heads, seq_q, dim}, k {batch, kv_heads, seq_kv, dim} and v {batch, kv_heads, "
                            "seq_kv, dim_v} with heads a multiple of "
                            "kv_heads are needed, not %s, %s, %s",
                            TE_SHAPE_TEXT(q), TE_SHAPE_TEXT(k), TE_SHAPE_TEXT(v));
    bool floating = q->dtype == TE_F32 || q->dtype == TE_F64 || q->dtype == TE_BF16 || q->dtype == TE_F16;
    if (!floating || q->dtype != k->dtype || q->dtype != v->dtype)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "q, k and v must have one floating dtype, not %s, %s, %s",
                            te_dtype_name(q->dtype), te_dtype_name(k->dtype), te_dtype_name(v->dtype));
    return TE_OK;
}

/* t itself when its last dimension has unit stride, else a copy. */
static te_tensor *unit_stride(te_tensor *t)
{
    return t->shape[t->ndim - 1] <= 1 || t->stride[t->ndim - 1] == 1 ? te_tensor_retain(t) : te_tensor_clone_data(t);
}

/* Where a mask is true a score stays, elsewhere it becomes minus infinity: the logarithm of 1 and 0. */
static te_tensor *bias_of_mask(te_context *ctx, te_tensor *mask)
{
    te_tensor *ones = te_tensor_cast(mask, TE_F32), *bias = NULL;
    if (ones) te_op_run(ctx, te_op_find(ctx, "log"), &TE_A_TENSOR(ones), 1, &bias, 1);
    te_tensor_release(ones);
    return bias;
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

static te_status sdpa_forward(te_call *call)
{
    te_context *ctx = call->ctx;
    te_tensor *bias = te_tensor_retain(call->in[3]), *qkv[3] = {NULL}, *out = NULL, *lse = NULL, *sinks = NULL;
    te_status status = check_separate(call);
    if (status == TE_OK && bias && bias->dtype == TE_BOOL) {
        te_tensor_release(bias);
        if (!(bias = bias_of_mask(ctx, call->in[3]))) status = ctx->status;
    }
    te_attention_state *s = status == TE_OK ? new_state(call, 0) : NULL;
    if (!s) {
        te_tensor_release(bias);
        return status == TE_OK ? ctx->status : status;
    }
    for (int i = 0; i < 3; i++)
        if (!(qkv[i] = unit_stride(call->in[i]))) status = ctx->status;
    if (status == TE_OK) status = te_attention_quantize(call, s, qkv, 3);
    if (status == TE_OK) {
        separate_views(s, qkv);
        status = read_options(call, &s->a);
    }
    if (status == TE_OK && bias) status = bias_view(call, bias, &s->a);
    if (status == TE_OK && call->in[4]) status = take_sinks(call, call->in[4], qkv[0]->dtype, &s->a, &sinks);
    if (status == TE_OK) status = run_forward(call, s, qkv[0]->dtype, qkv[0]->storage->device, &out, &lse);
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
    status = keep_for_backward(call, status, keep, 7);
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
    if (call->node->n_edges < 4 || !te_grad_wanted(call, 3)) return TE_OK;
    *dscores =
        te_tensor_new(call->ctx, call->saved[4]->storage->device, a->q.dtype == TE_F64 ? TE_F64 : TE_F32, 4, shape);
    te_status status = *dscores ? te_tensor_fill(*dscores, 0) : call->ctx->status;
    if (status == TE_OK) g->dbias = te_tensor_view(*dscores);
    return status;
}

/* Summed over the dimensions in which the bias was broadcast. */
static te_status give_dbias(te_call *call, te_tensor *dscores)
{
    bool accumulate;
    te_tensor *dbias = te_grad_target(call, 3, &accumulate);
    return dbias ? te_sum_to(dbias, dscores, 1, accumulate) : call->ctx->status;
}

static te_status sdpa_backward(te_call *call)
{
    const te_attention_state *s = call->pointer;
    te_exec *exec = te_call_exec(call, call->saved[4]);
    te_attention_grad g = {.forward = s->a};
    te_tensor *values[3] = {NULL}, *grads[3] = {NULL}, *dscores = NULL,
              *out = te_attention_result_values(call, s, call->saved[3]);
    te_tensor *dout = out ? unit_stride(call->dout[0]) : NULL;
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
        point_to_result(&g.forward, out);
        status = te_call_kernel(call, exec, exec->backend->attention_backward(exec, &g));
    }
    if (status == TE_OK && wants_dsinks(call, 4, call->saved[6])) status = give_dsinks(call, 4, &g, call->saved[6]);
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

/* --- one packed projection ---------------------------------------------------------------------------------------- */

enum { HEADS = N_SHARED, KV_HEADS, PAIRS_INTERLEAVED };
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
            "seq_lens must be {batch} of int32 or int64 beside a projection {tokens, width}, not %s beside %s",
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
    if (!lengths) return te_fail_memory(call->ctx, call->op->name);
    te_status status = te_tensor_read(lens, TE_I64, lengths);
    for (int64_t i = 0; i < n && status == TE_OK; i++) {
        if (lengths[i] < 0 || lengths[i] > tokens - total)
            status = te_call_fail(call, TE_ERROR_ARGUMENT, "seq_lens[%lld] = %lld does not fit %lld tokens",
                                  (long long)i + 1, (long long)lengths[i], (long long)tokens);
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

/* Room for the gradients of turned queries and keys, to which the views then point. */
static te_tensor *open_turned(te_call *call, const te_tensor *dqkv, te_attention_grad *g)
{
    int64_t heads = call->memo[0], kv_heads = call->memo[1], dim = g->dq.shape[3], shape[3];
    memcpy(shape, dqkv->shape, (size_t)dqkv->ndim * sizeof *shape);
    shape[dqkv->ndim - 1] = (heads + kv_heads) * dim;
    te_tensor *turned = te_tensor_new(call->ctx, dqkv->storage->device, dqkv->dtype, dqkv->ndim, shape);
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

static te_status self_attention_forward(te_call *call)
{
    te_context *ctx = call->ctx;
    te_tensor *lens = call->in[LENGTHS], *positions = NULL, *out = NULL, *lse = NULL, *sinks = NULL;
    int64_t heads = (int64_t)call->attr[HEADS].number,
            kv_heads = call->attr[KV_HEADS].set ? (int64_t)call->attr[KV_HEADS].number : heads;
    te_status status = check_packed(call, heads, kv_heads);
    if (status != TE_OK) return status;
    te_tensor *qkv = unit_stride(call->in[0]);
    bool packs = lens && !lens->storage->device->exec.backend->host_memory;
    te_attention_state *s = qkv ? new_state(call, lens && !packs ? (int)lens->shape[0] + 1 : 0) : NULL;
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
        status = read_options(call, &s->a);
    }
    if (status == TE_OK && call->in[SINKS]) status = take_sinks(call, call->in[SINKS], qkv->dtype, &s->a, &sinks);
    if (status == TE_OK) status = run_forward(call, s, qkv->dtype, qkv->storage->device, &out, &lse);
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
    status = keep_for_backward(call, status, keep, 6);
    call->memo[0] = heads;
    call->memo[1] = kv_heads;
    te_tensor_release(positions);
    te_tensor_release(sinks);
    te_tensor_release(qkv);
    te_tensor_release(out);
    te_tensor_release(lse);
    return status;
}

static te_status self_attention_backward(te_call *call)
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
        point_to_result(&g.forward, out);
        g.dout = g.forward.out;
        g.dout.data = te_tensor_pointer(dout);
        packed_views(qkv, call->memo[0], call->memo[1], &g.forward.q, &g.forward.k, &g.forward.v);
        packed_views(dqkv, call->memo[0], call->memo[1], &g.dq, &g.dk, &g.dv);
        if (call->saved[SAVED_POSITIONS] && !(turned = open_turned(call, dqkv, &g))) status = call->ctx->status;
    }
    if (status == TE_OK) status = te_call_kernel(call, exec, exec->backend->attention_backward(exec, &g));
    if (status == TE_OK && turned) status = turn_gradient_back(call, turned, dqkv, g.dq.shape[3]);
    if (status == TE_OK && wants_dsinks(call, SINKS, call->saved[SAVED_SINKS]))
        status = give_dsinks(call, SINKS, &g, call->saved[SAVED_SINKS]);
    te_tensor_release(turned);
    te_tensor_release(dout);
    te_tensor_release(out);
    te_tensor_release(qkv);
    if (status == TE_OK && te_grad_wanted(call, 0)) return te_grad_give(call, 0, dqkv);
    te_tensor_release(dqkv);
    return status;
}

const te_op_def te_ops_attention[] = {
    {.signature = "scaled_dot_product_attention(q, k, v, bias = nil, sinks = nil; " SHARED_OPTIONS ")",
     .doc = "softmax(scale q k^T + bias) v for q {batch, heads, seq_q, dim}, k and v {batch, kv_heads, seq_kv, dim}; "
            "scale 1/sqrt(dim) when absent. "
            "causal hides later positions, window_left and window_right how far one sees (-1: all), bottom_right "
            "aligns the last query with the last key. "
            "A fully masked row gives zeros. Scores are not stored (Dao et al. 2022), but in backward where the bias, "
            "which broadcasts to {batch, heads, seq_q, seq_kv}, has a gradient; a bias of bool says which scores take "
            "part. "
            "sinks {heads} are one more score of every row, which has no value (Xiao et al. 2023; of zeros: softmax "
            "off by one).",
     .forward = sdpa_forward,
     .backward = sdpa_backward},
    {.signature = "rope(x, frequencies, positions = nil; interleaved: bool = false, offset: int = 0)",
     .doc = "Rotary position embedding (Su et al. 2021) of x {..., seq, dim}: pair k of a row's features turns by "
            "(position + offset) frequencies[k]. frequencies {pairs} of float32, as te.rope_frequencies gives them, "
            "turn the first 2 pairs features, k with k + pairs, or where interleaved is true 2k with 2k + 1. "
            "positions, which broadcast to {..., seq}, count from 0 along seq unless given. Angles are float32.",
     .flags = TE_OP_METHOD,
     .forward = te_rope_forward,
     .backward = te_rope_backward},
    {.signature = "self_attention(qkv, seq_lens = nil, frequencies = nil, sinks = nil; " SHARED_OPTIONS
                  ", heads: int = 1, kv_heads: int = nil, interleaved: bool = false)",
     .doc = "Attention on a packed projection: {tokens, width} one sequence, {batch, seq, width}, or {tokens, width} "
            "with seq_lens {batch}; "
            "width = (heads + 2 kv_heads) dim in blocks Q | K | V. Result {..., heads dim}. With frequencies Q and K "
            "are turned by their position in the sequence, as te.rope does; sinks as for "
            "scaled_dot_product_attention.",
     .forward = self_attention_forward,
     .backward = self_attention_backward},
    {0},
};
