/* attention.c - scaled dot product attention on separate and on packed projections.
 *
 * Both ops describe their operands as [batch, heads, seq, dim] views and leave the rest to the backend. Scores are not
 * stored, except in backward where a bias has a gradient (attention_separate.c). The packed form exists because a
 * projection's gradient is then written once, where three views would each need their own pass over it. Here stands
 * what both share, and their declarations; the rest is in attention_separate.c and attention_packed.c, and attention to
 * keys that arrive block by block in attention_block.c.
 *
 * Sinks (te_attention) are the kernels' in the forward pass, which leave them in lse, so that backward needs not know
 * of them; only their own gradient is made here: they have no value, so of dS = P (dP - D) it is
 *
 *      dsink = sum over rows of -exp(sink - lse) D,        D = rowsum(do o)
 *
 * Under a recipe with FP8 attention the operands are quantized (attention_quantized.h).
 */
#include "attention.h"
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

te_status te_attention_keep(te_call *call, te_status status, te_tensor *const *tensors, int n)
{
    for (int i = 0; i < n && status == TE_OK && call->record; i++)
        if (te_call_save(call, tensors[i]) < 0) status = call->ctx->status;
    if (!call->record || status != TE_OK) {
        release_state(call);
        call->release = NULL;
    }
    return status;
}

te_attention_state *te_attention_open(te_call *call, int n_offsets)
{
    te_attention_state *s = te_mem_zalloc(&call->ctx->mem, sizeof *s + (size_t)n_offsets * sizeof *s->offsets);
    if (!s) {
        te_call_fail(call, TE_ERROR_MEMORY, "out of host memory");
        return NULL;
    }
    s->mem = call->ctx->mem;
    s->n_offsets = n_offsets;
    call->pointer = s;
    call->release = release_state;
    return s;
}

te_status te_attention_options(te_call *call, te_attention *a)
{
    const te_attr *o = call->attr;
    a->scale = o[TE_ATTENTION_SCALE].set ? o[TE_ATTENTION_SCALE].number : 1 / sqrt((double)a->q.shape[3]);
    a->window_left = (int64_t)o[TE_ATTENTION_WINDOW_LEFT].number;
    a->window_right = o[TE_ATTENTION_CAUSAL].number != 0 ? 0 : (int64_t)o[TE_ATTENTION_WINDOW_RIGHT].number;
    a->bottom_right = o[TE_ATTENTION_BOTTOM_RIGHT].number != 0;
    a->dropout = o[TE_ATTENTION_DROPOUT].number;
    if (!(a->dropout >= 0 && a->dropout < 1))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "dropout must lie in [0, 1), not %g", a->dropout);
    if (o[TE_ATTENTION_WINDOW_LEFT].number < -1 || o[TE_ATTENTION_WINDOW_RIGHT].number < -1)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "window_left and window_right must be at least -1, not %g and %g",
                            o[TE_ATTENTION_WINDOW_LEFT].number, o[TE_ATTENTION_WINDOW_RIGHT].number);
    if (a->dropout > 0)
        a->rng = te_context_draw(call->ctx, (uint64_t)a->q.shape[0] * (uint64_t)a->q.shape[1] *
                                                (uint64_t)a->q.shape[2] * (uint64_t)a->k.shape[2]);
    return TE_OK;
}

te_tensor *te_attention_unit_stride(te_tensor *t)
{
    return t->shape[t->ndim - 1] <= 1 || t->stride[t->ndim - 1] == 1 ? te_tensor_retain(t) : te_tensor_clone_data(t);
}

te_tensor *te_attention_input(te_call *call, int index)
{
    te_tensor *t = call->in[index];
    te_dtype dtype = te_call_compute_dtype(call, t->dtype);
    return dtype == t->dtype ? te_attention_unit_stride(t) : te_tensor_cast(t, dtype);
}

te_status te_attention_compute(te_call *call, te_attention_state *s, te_dtype dtype, te_device *device, te_tensor **out,
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

te_status te_attention_take_sinks(te_call *call, te_tensor *sinks, te_dtype dtype, te_attention *a, te_tensor **taken)
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

bool te_attention_wants_dsinks(const te_call *call, int index, const te_tensor *sinks)
{
    return sinks && call->node->n_edges > index && te_grad_wanted(call, index);
}

/* By terms [batch, seq, dim, heads] and then their sums. */
te_status te_attention_give_dsinks(te_call *call, int index, const te_attention_grad *g, te_tensor *sinks)
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

void te_attention_point_to_result(te_attention *a, const te_tensor *out)
{
    a->out.data = te_tensor_pointer(out);
    a->out.dtype = out->dtype;
}

const te_op_def te_ops_attention[] = {
    {.signature = "scaled_dot_product_attention(q, k, v, bias = nil, sinks = nil; " TE_ATTENTION_SIGNATURE ")",
     .doc = "softmax(scale q k^T + bias) v for q {batch, heads, seq_q, dim}, k and v {batch, kv_heads, seq_kv, dim}; "
            "dim at most 512; scale 1/sqrt(dim) when absent. In the compute dtype of te.autocast, otherwise the "
            "operands'. "
            "causal hides later positions, window_left and window_right limit how far a query sees (-1: no limit), "
            "bottom_right aligns the last query with the last key. "
            "A fully masked row gives zeros. The bias broadcasts to {batch, heads, seq_q, seq_kv}; a bool bias says "
            "which scores take part. Scores are not stored (Dao et al. 2022), except in backward where the bias has a "
            "gradient. "
            "sinks {heads} add to every row one more score without a value (Xiao et al. 2023; zeros: off-by-one "
            "softmax). The result is laid out as {batch, seq_q, heads, dim}, so that heads are joined without a "
            "copy, and contiguous() copies it.",
     .flags = TE_OP_ATTENDS,
     .forward = te_attention_separate_forward,
     .backward = te_attention_separate_backward},
    {.signature = "rope(x, frequencies, positions = nil; interleaved: bool = false, offset: int = 0)",
     .doc = "Rotary position embedding (Su et al. 2021) of x {..., seq, dim}: pair k of a row's features is rotated by "
            "(position + offset) frequencies[k]. The float32 frequencies {pairs}, from te.rope_frequencies, "
            "rotate the first 2 pairs features: k pairs with k + pairs, or, if interleaved, 2k with 2k + 1. "
            "positions broadcast to {..., seq}; by default they count from 0 along seq. Angles are float32, "
            "or float64 where x is.",
     .flags = TE_OP_METHOD,
     .forward = te_rope_forward,
     .backward = te_rope_backward},
    {.signature = "self_attention(qkv, seq_lens = nil, frequencies = nil, sinks = nil; " TE_ATTENTION_SIGNATURE
                  ", heads: int = 1, kv_heads: int = nil, interleaved: bool = false)",
     .doc = "Attention on a packed projection: one sequence {tokens, width}, {batch, seq, width}, or {tokens, width} "
            "with seq_lens {batch}; "
            "width = (heads + 2 kv_heads) dim in blocks Q | K | V. Result {..., heads dim}. With frequencies Q and K "
            "are rotated by their position in the sequence, as by te.rope; dtype and sinks as for "
            "scaled_dot_product_attention.",
     .flags = TE_OP_ATTENDS,
     .unit = TE_UNIT_ATTENTION,
     .forward = te_attention_packed_forward,
     .backward = te_attention_packed_backward},
    {.signature = "attention_block(q, k, v; " TE_ATTENTION_SIGNATURE ")",
     .doc = "Attention to some of the keys: its result, in float32 where the device's kernels write that beside 16 "
            "bits, and for every row the logarithm of the softmax denominator.",
     .flags = TE_OP_HIDDEN | TE_OP_NOGRAD,
     .outputs = "y lse",
     .forward = te_attention_block_forward},
    {.signature = "attention_block_gradients(dy, q, k, v, y, lse; " TE_ATTENTION_SIGNATURE ")",
     .doc = "What some of the keys contribute to the gradients of q, k and v, in the dtype of a block's result: y and "
            "lse are those of all keys.",
     .flags = TE_OP_HIDDEN | TE_OP_NOGRAD,
     .outputs = "dq dk dv",
     .forward = te_attention_block_gradients},
    {.signature = "attention_merge(y, lse, part, part_lse)",
     .doc = "Attention to two sets of keys from what attention to each of them gives.",
     .flags = TE_OP_F32 | TE_OP_LASTROW | TE_OP_HIDDEN | TE_OP_NOGRAD,
     .rows = "lse part_lse",
     .outputs = "z total",
     .formula = "m = max(lse, part_lse); m = where(m == -inf, 0, m); a = exp(lse - m); b = exp(part_lse - m); "
                "s = a + b; z = where(s == 0, 0, (a * y + b * part) / s); total = m + log(s)"},
    {.signature = "attention_sink_gradient(y, dy, lse, sink)",
     .doc = "What every row contributes to the gradient of its head's sink.",
     .flags = TE_OP_F32 | TE_OP_LASTROW | TE_OP_HIDDEN | TE_OP_NOGRAD,
     .rows = "lse sink",
     .formula = "d = rowsum(y * dy); z = where(sink < -3.0e38, 0, -exp(sink - lse) * d)",
     .outputs = "z"},
    {0},
};
