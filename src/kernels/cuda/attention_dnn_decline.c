/* attention_dnn_decline.c - which attentions cuDNN is asked for. What the library itself refuses comes
 * out when a plan is made.
 */
#include "attention_dnn.h"
#include "cuda_backend.h"
#include "../environment.h"

#include <string.h>

/* Sixteen bytes at a time. */
static bool aligned(const te_view *v)
{
    int64_t steps = v->shape[3], step = 16 / (int64_t)te_dtype_size(v->dtype);
    for (int i = 0; i < 3; i++)
        if (v->shape[i] > 1) steps |= v->stride[i]; /* that of an extent of 1 is any */
    return (uintptr_t)v->data % 16 == 0 && steps % step == 0 && (v->stride[3] == 1 || v->shape[3] == 1);
}

static bool repeats_itself(const te_view *v)
{
    for (int i = 0; i < 3; i++)
        if (v->shape[i] > 1 && v->stride[i] == 0) return true;
    return false;
}

/* Whether the gradient's rows lie as far apart as those of what it is the gradient of. */
static bool lies_like(const te_view *gradient, const te_view *v)
{
    return gradient->stride[1] == v->stride[1] && gradient->stride[2] == v->stride[2];
}

static const char *decline_packed(const te_attention *a, const te_attention_grad *g)
{
    const int32_t *at = a->cu_seqlens_q;
    if (!at && !a->cu_seqlens_kv) return NULL;
    /* 9.14 on an H200: such gradients are wrong, though every tensor has offsets of its own */
    if (g && !(lies_like(&g->dq, &a->q) && lies_like(&g->dk, &a->k) && lies_like(&g->dv, &a->v) &&
               lies_like(&g->dout, &a->out)))
        return "gradients of packed sequences that lie otherwise than their operands";
    if (!at || !a->cu_seqlens_kv || a->q.shape[0] != 1 || a->n_seqs < 1) return "wrong offsets";
    if (a->longest > 0) return a->k.shape[2] != a->q.shape[2] ? "queries and keys are packed differently" : NULL;
    if (at != a->cu_seqlens_kv && memcmp(at, a->cu_seqlens_kv, ((size_t)a->n_seqs + 1) * sizeof *at) != 0)
        return "queries and keys are packed differently";
    if (at[0] != 0 || at[a->n_seqs] != a->q.shape[2] || a->k.shape[2] != a->q.shape[2]) return "tokens in no sequence";
    for (int i = 0; i < a->n_seqs; i++)
        if (at[i] > at[i + 1]) return "offsets that do not ascend";
    return NULL;
}

static const char *decline_quantized(te_exec *exec, const te_attention *a)
{
    const te_view *views[] = {&a->q, &a->k, &a->v};
    if (te_cuda(exec)->capability < 90) return "fp8 needs compute capability 9.0";
    if (a->out.dtype != TE_F8E4M3) return "fp8 operands whose result is not fp8";
    if (!te_view_present(&a->lse)) return "fp8 without lse";
    for (int i = 0; i < 3; i++) {
        const te_quant *q = views[i]->quant;
        bool known = q && q->element == TE_E4M3 && q->scale == TE_SCALE_F32 && !q->block[0];
        if (!known) return "quantized, but not E4M3 with one factor";
    }
    return a->q.shape[3] % 16 || a->v.shape[3] % 16 ? "fp8 with heads that are no multiple of 16" : NULL;
}

/* So many queries own kernels answer by splitting the keys, of which there is one more at every step of generation, and
 * a plan for each. */
enum { FEW_QUERIES = 16 };

/* Until 9.19 at least the gradient of a bias comes in 16 bits alone, summed over what has the same bias; what is wanted
 * is float32 of every score. */
static const char *decline_bias(const te_attention *a, const te_attention_grad *g)
{
    const te_view *bias = &a->bias;
    if (!te_view_present(bias)) return NULL;
    if (g && te_view_present(&g->dbias)) return "the gradient of a bias";
    if (a->q.quant || a->cu_seqlens_q) return "a bias of packed sequences or fp8";
    if (bias->dtype != a->q.dtype && bias->dtype != TE_F32) return "a bias neither of float32 nor like the operands";
    if (bias->stride[3] != 1 || (uintptr_t)bias->data % 16) return "a bias whose rows do not lie as keys do";
    if (te_view_present(&a->sinks)) return "a bias beside sinks";
    return te_view_present(&a->lse) ? NULL : "a bias without lse, by which rows are found that see nothing";
}

/* As NVIDIA's front end has it: at the last position only where all rows see something, and without a bias. */
static const char *decline_alignment(const te_attention *a)
{
    int64_t sq = a->q.shape[2], skv = a->k.shape[2];
    bool matters = a->bottom_right && sq != skv && (a->window_left >= 0 || a->window_right >= 0);
    if (!matters) return a->window_left >= 0 && sq > skv ? "rows that see nothing" : NULL;
    if (sq > skv) return "alignment at the last position of rows that see nothing";
    return te_view_present(&a->bias) ? "alignment at the last position beside a bias" : NULL;
}

static const char *decline_sinks(const te_attention *a, const te_attention_grad *g)
{
    if (!te_view_present(&a->sinks) || g) return NULL; /* backward has them in lse */
    return a->q.quant || a->cu_seqlens_q ? "sinks of packed sequences or fp8" : NULL;
}

/* That of which no card's results have been compared with the CPU's yet, as bench/gpu_sizes.lua does: asked for only
 * where somebody wants it. */
static const char *decline_untried(const te_attention *a)
{
    const char *wish = te_environment(TE_ENV_CUDNN);
    bool        last = a->bottom_right && a->q.shape[2] != a->k.shape[2];
    if (wish && strcmp(wish, "all") == 0) return NULL;
    if (te_view_present(&a->bias)) return "a bias, without TETRAIN_CUDNN=all";
    if (te_view_present(&a->sinks)) return "sinks, without TETRAIN_CUDNN=all";
    return last ? "alignment at the last position, without TETRAIN_CUDNN=all" : NULL;
}

/* What generation asks for at every step. */
static bool decodes(const te_attention *a)
{
    bool aligned_last = a->bottom_right && a->q.shape[2] != a->k.shape[2];
    return a->q.shape[2] <= FEW_QUERIES && (aligned_last || te_view_present(&a->bias) || te_view_present(&a->sinks));
}

const char *te_dnn_attention_decline(te_exec *exec, const te_attention *a, const te_attention_grad *g)
{
    int64_t sq = a->q.shape[2], skv = a->k.shape[2], d = a->q.shape[3], dv = a->v.shape[3];
    const char *reason = a->q.quant ? decline_quantized(exec, a) : NULL;
    if (!reason) reason = decline_bias(a, g);
    if (!reason) reason = decline_alignment(a);
    if (!reason) reason = decline_sinks(a, g);
    if (!reason) reason = decline_untried(a);
    if (reason) return reason;
    if (!a->q.quant && a->q.dtype != TE_BF16 && a->q.dtype != TE_F16) return "neither bfloat16 nor float16";
    if (a->dropout > 0) return "dropout would draw other bits";
    if (decodes(a)) return "few queries";
    if (te_view_numel(&a->q) == 0 || te_view_numel(&a->k) == 0 || dv == 0 || (sq == 1 && skv == 1)) return "too small";
    if (d % 8 != 0 || dv % 8 != 0 || d > 256 || dv > 256) return "heads that are no multiple of 8 or larger than 256";
    if (a->window_right > 0) return "a window to the right";
    if (te_view_present(&a->lse) ? a->lse.dtype != TE_F32 : g != NULL) return "lse is not float32";
    for (int uid = TE_DNN_Q; uid <= (g ? TE_DNN_DV : TE_DNN_OUT); uid++) {
        const te_view *v = te_dnn_attention_view(a, g, uid);
        if (v->ndim != 4 || te_dtype_size(v->dtype) != te_dtype_size(a->q.dtype) || !aligned(v) || repeats_itself(v))
            return "operands that are not aligned to 16 bytes";
    }
    return decline_packed(a, g);
}
