/* attention_dnn_key.c - what a plan is kept by: an attention as far as the library's kernel depends on it. */
#include "attention_dnn.h"

#include <string.h>

const te_view *te_dnn_attention_view(const te_attention *a, const te_attention_grad *g, int uid)
{
    const te_view *forward[] = {&a->q, &a->k, &a->v, &a->out};
    if (uid <= TE_DNN_OUT) return forward[uid - TE_DNN_Q];
    const te_view *gradient[] = {&g->dout, &g->dq, &g->dk, &g->dv};
    return gradient[uid - TE_DNN_DOUT];
}

static int64_t power_of_two(int64_t n, int64_t least)
{
    while (least < n) least *= 2;
    return least;
}

static int64_t longest(const te_attention *a)
{
    int64_t most = 1;
    if (a->longest > 0) return a->longest;
    for (int i = 0; i < a->n_seqs; i++) {
        int64_t length = a->cu_seqlens_q[i + 1] - a->cu_seqlens_q[i];
        if (length > most) most = length;
    }
    return most;
}

static cudnnDataType_t type_of(te_dtype dtype)
{
    return dtype == TE_BF16 ? CUDNN_DATA_BFLOAT16 : dtype == TE_F16 ? CUDNN_DATA_HALF : CUDNN_DATA_FLOAT;
}

/* Where a bias is the same for all batch entries, heads or queries the extent is 1, and the stride what it would be in
 * a dense tensor. */
static void add_bias(te_dnn_attention *key, const te_view *bias)
{
    int64_t dense = key->seq_kv;
    key->bias_type = type_of(bias->dtype);
    for (int i = 2; i >= 0; i--) {
        bool own = bias->shape[i] > 1 && bias->stride[i] != 0;
        key->bias_dim[i] = own ? bias->shape[i] : 1;
        key->bias_stride[i] = own ? bias->stride[i] : dense;
        dense = key->bias_dim[i] * key->bias_stride[i];
    }
}

/* The backward pass of a bias reads lse from a dense copy (te_cuda_attention_raised). */
static void add_rows(te_dnn_attention *key, const te_attention *a)
{
    int64_t *stride = key->stride[TE_DNN_LSE];
    bool copied = key->packed || (key->backward && key->bias_dim[0]);
    if (!key->lse && !copied) return;
    stride[0] = key->seq_q * key->heads;
    stride[1] = key->packed ? 1 : key->seq_q;
    stride[2] = key->packed ? key->heads : 1;
    for (int i = 0; i < 3 && !copied; i++)
        if (a->lse.shape[i] > 1) stride[i] = a->lse.stride[i];
}

void te_dnn_attention_key(te_dnn_attention *key, const te_attention *a, const te_attention_grad *g, bool any_order)
{
    memset(key, 0, sizeof *key);
    key->packed = a->cu_seqlens_q != NULL;
    key->batch = key->packed ? power_of_two(a->n_seqs, 1) : a->q.shape[0];
    key->heads = a->q.shape[1];
    key->kv_heads = a->k.shape[1];
    key->seq_q = key->packed ? power_of_two(longest(a), 64) : a->q.shape[2];
    key->seq_kv = key->packed ? key->seq_q : a->k.shape[2];
    key->dim = a->q.shape[3];
    key->dim_v = a->v.shape[3];
    key->type = a->q.quant ? CUDNN_DATA_FP8_E4M3 : type_of(a->q.dtype);
    key->causal = a->window_right == 0;
    key->shift = a->bottom_right && (key->causal || a->window_left >= 0) ? key->seq_kv - key->seq_q : 0;
    key->window = a->window_left < 0 || a->window_left >= key->seq_q + key->shift ? -1 : a->window_left;
    key->backward = g != NULL;
    key->any_order = g && any_order && !key->packed;
    key->lse = te_view_present(&a->lse);
    key->sinks = !g && te_view_present(&a->sinks);
    if (te_view_present(&a->bias)) add_bias(key, &a->bias);
    for (int uid = TE_DNN_Q; uid <= (g ? TE_DNN_DV : TE_DNN_OUT); uid++) {
        const te_view *v = te_dnn_attention_view(a, g, uid);
        int64_t unit = 16 / (int64_t)te_dtype_size(v->dtype);
        for (int i = 0; i < 3; i++) /* that of an extent of 1 may be any, also one that cuDNN would not take */
            key->stride[uid][i] = v->shape[i] > 1 || v->stride[i] % unit == 0 ? v->stride[i] : v->shape[3];
        if (key->packed) key->stride[uid][0] = key->seq_q * v->stride[2];
    }
    add_rows(key, a);
}
