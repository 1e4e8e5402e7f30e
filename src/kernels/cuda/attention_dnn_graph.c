/* attention_dnn_graph.c - attention and its gradient, written as the operations that cuDNN recognises.
 *
 * With group = heads / kv_heads and every query head h reading kv head h / group:
 *
 *   s = scale q k^T, masked        p = exp(s - lse)              d = rows of dout * out
 *   out = softmax(s) v             dv = p^T dout                 ds = scale p (dout v^T - d)
 *   lse = log of the sum           dk = ds^T q                   dq = ds k
 *
 * A bias is added to scaled scores. A sink is a score more in the sum and in lse: so backward need not know of it.
 *
 * On E4M3, with fq and fk the factors of q and k and the numbers of v and out their bytes,
 *
 *   s = scale fq fk q k^T, masked         p = E4M3(448 softmax(s))       out = E4M3(p v / 448)
 *
 * which cuDNN knows with factors of v and out, 1 here since they share theirs, and with the amaxes of p and
 * out, which nobody needs. All its factors but the scale lie on the device: so it is asked everywhere else.
 *
 * dq is a product of the stored ds. In the other known form, any_order, its tiles are added to float32 sums in memory
 * as they come, which moves fewer bytes and does not give the same bits every time.
 */
#include "attention_dnn.h"

/* One graph being written. */
typedef struct writer {
    te_dnn_graph *g;
    const te_dnn_attention *a;
    te_dnn_tensor scale, lengths, lse_offsets;
} writer;

static const te_dnn_tensor no_lengths[3] = {TE_DNN_NONE, TE_DNN_NONE, TE_DNN_NONE};

static te_dnn_tensor offsets_of(writer *w, int uid)
{
    int64_t n = w->a->batch + 1;
    te_dnn_description d = {
        .type = CUDNN_DATA_INT32, .dim = {n, 1, 1, 1}, .stride = {1, 1, 1, 1}, .ragged = TE_DNN_NONE};
    return w->a->packed ? te_dnn_add(w->g, TE_DNN_OFFSETS + uid, &d) : TE_DNN_NONE;
}

/* An operand of `heads` x `rows` x `dim`, or its transpose. */
static te_dnn_tensor operand(writer *w, int uid, int64_t heads, int64_t rows, int64_t dim, bool turned,
                             te_dnn_tensor offsets)
{
    const int64_t *stride = w->a->stride[uid];
    te_dnn_description d = {.type = w->a->type,
                            .dim = {w->a->batch, heads, turned ? dim : rows, turned ? rows : dim},
                            .stride = {stride[0], stride[1], turned ? 1 : stride[2], turned ? stride[2] : 1},
                            .ragged = offsets};
    return te_dnn_add(w->g, uid, &d);
}

static te_dnn_tensor plain_operand(writer *w, int uid, int64_t heads, int64_t rows, int64_t dim)
{
    return operand(w, uid, heads, rows, dim, false, offsets_of(w, uid));
}

/* A number per row, in memory. */
static te_dnn_tensor row_numbers(writer *w, int uid, const int64_t stride[3])
{
    te_dnn_description d = {.type = CUDNN_DATA_FLOAT,
                            .dim = {w->a->batch, w->a->heads, w->a->seq_q, 1},
                            .stride = {stride[0], stride[1], stride[2], 1},
                            .ragged = w->lse_offsets};
    return te_dnn_add(w->g, uid, &d);
}

static te_dnn_tensor new_scores(writer *w, cudnnDataType_t type)
{
    return te_dnn_virtual(w->g, type, (int64_t[]){w->a->batch, w->a->heads, w->a->seq_q, w->a->seq_kv});
}

static te_dnn_tensor new_rows(writer *w)
{
    return te_dnn_virtual(w->g, CUDNN_DATA_FLOAT, (int64_t[]){w->a->batch, w->a->heads, w->a->seq_q, 1});
}

static te_dnn_tensor on_scores(writer *w, cudnnPointwiseMode_t mode, te_dnn_tensor x, te_dnn_tensor b)
{
    te_dnn_tensor y = new_scores(w, CUDNN_DATA_FLOAT);
    te_dnn_pointwise(w->g, mode, CUDNN_DATA_FLOAT, x, b, TE_DNN_NONE, y, 0);
    return y;
}

static te_dnn_tensor on_rows(writer *w, cudnnPointwiseMode_t mode, te_dnn_tensor x, te_dnn_tensor b)
{
    te_dnn_tensor y = new_rows(w);
    te_dnn_pointwise(w->g, mode, CUDNN_DATA_FLOAT, x, b, TE_DNN_NONE, y, 0);
    return y;
}

static void product(writer *w, te_dnn_tensor a, te_dnn_tensor b, te_dnn_tensor c, bool m, bool n, bool k)
{
    te_dnn_tensor lengths[3] = {m ? w->lengths : TE_DNN_NONE, n ? w->lengths : TE_DNN_NONE,
                                k ? w->lengths : TE_DNN_NONE};
    te_dnn_matmul(w->g, a, b, c, w->a->packed ? lengths : no_lengths);
}

/* --- masks -------------------------------------------------------------------------------------------------------- */

static te_dnn_tensor position(writer *w, te_dnn_tensor scores, int axis, cudnnDataType_t math)
{
    te_dnn_tensor y = new_scores(w, CUDNN_DATA_INT32);
    te_dnn_pointwise(w->g, CUDNN_POINTWISE_GEN_INDEX, math, scores, TE_DNN_NONE, TE_DNN_NONE, y, axis);
    return y;
}

static te_dnn_tensor compare(writer *w, cudnnPointwiseMode_t mode, te_dnn_tensor x, te_dnn_tensor b)
{
    te_dnn_tensor y = new_scores(w, CUDNN_DATA_BOOLEAN);
    te_dnn_pointwise(w->g, mode, CUDNN_DATA_BOOLEAN, x, b, TE_DNN_NONE, y, 0);
    return y;
}

static te_dnn_tensor keep_where(writer *w, te_dnn_tensor scores, te_dnn_tensor condition, te_dnn_tensor masked)
{
    te_dnn_tensor y = new_scores(w, CUDNN_DATA_FLOAT);
    te_dnn_pointwise(w->g, CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, scores, masked, condition, y, 0);
    return y;
}

/* Nothing beyond the end of a sequence. */
static te_dnn_tensor mask_padding(writer *w, te_dnn_tensor scores, te_dnn_tensor masked)
{
    if (!w->a->packed) return scores;
    te_dnn_tensor row = position(w, scores, 2, CUDNN_DATA_INT32), column = position(w, scores, 3, CUDNN_DATA_INT32);
    te_dnn_tensor inside = compare(w, CUDNN_POINTWISE_LOGICAL_AND, compare(w, CUDNN_POINTWISE_CMP_LT, row, w->lengths),
                                   compare(w, CUDNN_POINTWISE_CMP_LT, column, w->lengths));
    return keep_where(w, scores, inside, masked);
}

static te_dnn_tensor count(writer *w, cudnnPointwiseMode_t mode, te_dnn_tensor x, int uid)
{
    te_dnn_tensor y = new_scores(w, CUDNN_DATA_INT32);
    te_dnn_pointwise(w->g, mode, CUDNN_DATA_INT32, x, te_dnn_number(w->g, uid, CUDNN_DATA_INT32), TE_DNN_NONE, y, 0);
    return y;
}

/* Nothing after the row's own position, nor further before it than the window. A row's position is its number, plus
 * shift: for the first mask keys - queries, as the library knows it, for the second in the number that is added. */
static te_dnn_tensor mask_band(writer *w, te_dnn_tensor scores, te_dnn_tensor masked)
{
    if (w->a->causal) {
        te_dnn_tensor row = position(w, scores, 2, CUDNN_DATA_FLOAT), column = position(w, scores, 3, CUDNN_DATA_FLOAT);
        if (w->a->shift > 0) {
            row = count(w, CUDNN_POINTWISE_ADD, row, TE_DNN_KEYS);
            row = count(w, CUDNN_POINTWISE_SUB, row, TE_DNN_QUERIES);
        }
        scores = keep_where(w, scores, compare(w, CUDNN_POINTWISE_CMP_GE, row, column), masked);
    }
    if (w->a->window >= 0) {
        te_dnn_tensor row = position(w, scores, 2, CUDNN_DATA_FLOAT), column = position(w, scores, 3, CUDNN_DATA_FLOAT);
        te_dnn_tensor reach =
            on_scores(w, CUDNN_POINTWISE_ADD, column, te_dnn_number(w->g, TE_DNN_WINDOW, CUDNN_DATA_FLOAT));
        scores = keep_where(w, scores, compare(w, CUDNN_POINTWISE_CMP_GT, reach, row), masked);
    }
    return scores;
}

static te_dnn_tensor masked_number(writer *w)
{
    bool masks = w->a->packed || w->a->causal || w->a->window >= 0;
    return masks ? te_dnn_number(w->g, TE_DNN_MASKED, CUDNN_DATA_FLOAT) : TE_DNN_NONE;
}

static te_dnn_tensor scaled_scores(writer *w, te_dnn_tensor q, te_dnn_tensor k_turned)
{
    te_dnn_tensor scores = new_scores(w, CUDNN_DATA_FLOAT);
    product(w, q, k_turned, scores, true, true, false);
    scores = on_scores(w, CUDNN_POINTWISE_MUL, scores, w->scale);
    if (w->a->bias_dim[0] == 0) return scores;
    const int64_t *n = w->a->bias_dim, *step = w->a->bias_stride;
    te_dnn_description bias = {.type = w->a->bias_type,
                               .dim = {n[0], n[1], n[2], w->a->seq_kv},
                               .stride = {step[0], step[1], step[2], 1},
                               .ragged = TE_DNN_NONE};
    return on_scores(w, CUDNN_POINTWISE_ADD, scores, te_dnn_add(w->g, TE_DNN_BIAS, &bias));
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

static te_dnn_tensor sinks_of(writer *w)
{
    int64_t heads = w->a->heads;
    te_dnn_description sinks = {.type = CUDNN_DATA_FLOAT, .dim = {1, heads, 1, 1}, .stride = {heads, 1, 1, 1},
                                .ragged = TE_DNN_NONE};
    return w->a->sinks ? te_dnn_add(w->g, TE_DNN_SINKS, &sinks) : TE_DNN_NONE;
}

/* Probabilities of masked scores in a tensor of `type`; lse where it is wanted. */
static te_dnn_tensor softmax(writer *w, te_dnn_tensor scores, cudnnDataType_t type)
{
    const te_dnn_attention *a = w->a;
    te_dnn_tensor largest = new_rows(w), sum = new_rows(w), sinks = sinks_of(w);
    te_dnn_reduce(w->g, CUDNN_REDUCE_TENSOR_MAX, scores, largest);
    if (a->sinks) largest = on_rows(w, CUDNN_POINTWISE_MAX, largest, sinks);
    te_dnn_tensor shares =
        on_scores(w, CUDNN_POINTWISE_EXP, on_scores(w, CUDNN_POINTWISE_SUB, scores, largest), TE_DNN_NONE);
    te_dnn_tensor share = TE_DNN_NONE; /* of the sink */
    if (a->sinks)
        share = on_rows(w, CUDNN_POINTWISE_EXP, on_rows(w, CUDNN_POINTWISE_SUB, sinks, largest), TE_DNN_NONE);
    te_dnn_reduce(w->g, CUDNN_REDUCE_TENSOR_ADD, shares, sum);
    if (a->sinks) sum = on_rows(w, CUDNN_POINTWISE_ADD, sum, share);
    if (a->lse) {
        te_dnn_tensor logarithm = on_rows(w, CUDNN_POINTWISE_LOG, sum, TE_DNN_NONE);
        te_dnn_pointwise(w->g, CUDNN_POINTWISE_ADD, CUDNN_DATA_FLOAT, largest, logarithm, TE_DNN_NONE,
                         row_numbers(w, TE_DNN_LSE, a->stride[TE_DNN_LSE]), 0);
    }
    te_dnn_tensor p = new_scores(w, type);
    te_dnn_pointwise(w->g, CUDNN_POINTWISE_DIV, CUDNN_DATA_FLOAT, shares, sum, TE_DNN_NONE, p, 0);
    return p;
}

static te_dnn_tensor mask(writer *w, te_dnn_tensor scores)
{
    te_dnn_tensor masked = masked_number(w);
    return mask_band(w, mask_padding(w, scores, masked), masked);
}

static void forward(writer *w)
{
    const te_dnn_attention *a = w->a;
    te_dnn_tensor q = plain_operand(w, TE_DNN_Q, a->heads, a->seq_q, a->dim);
    te_dnn_tensor k = operand(w, TE_DNN_K, a->kv_heads, a->seq_kv, a->dim, true, offsets_of(w, TE_DNN_K));
    te_dnn_tensor p = softmax(w, mask(w, scaled_scores(w, q, k)), a->type);
    te_dnn_tensor v = plain_operand(w, TE_DNN_V, a->kv_heads, a->seq_kv, a->dim_v);
    product(w, p, v, plain_operand(w, TE_DNN_OUT, a->heads, a->seq_q, a->dim_v), true, false, true);
}

/* --- forward on fp8 ----------------------------------------------------------------------------------------------- */

static te_dnn_tensor device_number(writer *w, int uid)
{
    te_dnn_description one = {
        .type = CUDNN_DATA_FLOAT, .dim = {1, 1, 1, 1}, .stride = {1, 1, 1, 1}, .ragged = TE_DNN_NONE};
    return te_dnn_add(w->g, uid, &one);
}

static te_dnn_tensor new_result(writer *w)
{
    const te_dnn_attention *a = w->a;
    return te_dnn_virtual(w->g, CUDNN_DATA_FLOAT, (int64_t[]){a->batch, a->heads, a->seq_q, a->dim_v});
}

static void multiply(writer *w, te_dnn_tensor x, te_dnn_tensor factor, te_dnn_tensor y)
{
    te_dnn_pointwise(w->g, CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, x, factor, TE_DNN_NONE, y, 0);
}

static void forward_quantized(writer *w)
{
    const te_dnn_attention *a = w->a;
    te_dnn_tensor q = plain_operand(w, TE_DNN_Q, a->heads, a->seq_q, a->dim);
    te_dnn_tensor k = operand(w, TE_DNN_K, a->kv_heads, a->seq_kv, a->dim, true, offsets_of(w, TE_DNN_K));
    te_dnn_tensor scores =
        on_scores(w, CUDNN_POINTWISE_MUL, scaled_scores(w, q, k), device_number(w, TE_DNN_DESCALE_Q));
    scores = on_scores(w, CUDNN_POINTWISE_MUL, scores, device_number(w, TE_DNN_DESCALE_K));
    te_dnn_tensor p = softmax(w, mask(w, scores), CUDNN_DATA_FLOAT), rounded = new_scores(w, a->type);
    te_dnn_reduce(w->g, CUDNN_REDUCE_TENSOR_AMAX, p, device_number(w, TE_DNN_AMAX_P));
    multiply(w, p, device_number(w, TE_DNN_SCALE_P), rounded);
    te_dnn_tensor v = plain_operand(w, TE_DNN_V, a->kv_heads, a->seq_kv, a->dim_v);
    te_dnn_tensor sums = new_result(w), once = new_result(w), twice = new_result(w);
    product(w, rounded, v, sums, true, false, true);
    multiply(w, sums, device_number(w, TE_DNN_DESCALE_P), once);
    multiply(w, once, device_number(w, TE_DNN_DESCALE_V), twice);
    te_dnn_tensor out = plain_operand(w, TE_DNN_OUT, a->heads, a->seq_q, a->dim_v);
    multiply(w, twice, device_number(w, TE_DNN_SCALE_OUT), out);
    te_dnn_reduce(w->g, CUDNN_REDUCE_TENSOR_AMAX, twice, device_number(w, TE_DNN_AMAX_OUT));
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* rows of dout * out */
static te_dnn_tensor row_sums(writer *w, te_dnn_tensor dout, te_dnn_tensor out)
{
    const te_dnn_attention *a = w->a;
    int64_t stride[3] = {a->heads * a->seq_q, a->seq_q, 1};
    te_dnn_tensor both = te_dnn_virtual(w->g, CUDNN_DATA_FLOAT, (int64_t[]){a->batch, a->heads, a->seq_q, a->dim_v});
    te_dnn_tensor sums = new_rows(w);
    te_dnn_pointwise(w->g, CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, dout, out, TE_DNN_NONE, both, 0);
    te_dnn_reduce(w->g, CUDNN_REDUCE_TENSOR_ADD, both, sums);
    te_dnn_tensor kept = row_numbers(w, TE_DNN_SUMS, a->packed ? a->stride[TE_DNN_LSE] : stride);
    te_dnn_pointwise(w->g, CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, sums,
                     te_dnn_number(w->g, TE_DNN_ONE, CUDNN_DATA_FLOAT), TE_DNN_NONE, kept, 0);
    return kept;
}

/* scores^T x, summed over the query heads that share a kv head. */
static void turned_product(writer *w, te_dnn_tensor scores, te_dnn_tensor x, int uid, int64_t dim)
{
    const te_dnn_attention *a = w->a;
    int64_t q = a->seq_q, kv = a->seq_kv;
    te_dnn_description turned = {.type = a->type,
                                 .dim = {a->batch, a->heads, kv, q},
                                 .stride = {a->heads * q * kv, q * kv, 1, kv},
                                 .ragged = TE_DNN_NONE};
    te_dnn_tensor y = te_dnn_virtual_as(w->g, &turned), gradient = plain_operand(w, uid, a->kv_heads, kv, dim);
    te_dnn_reshape(w->g, scores, y);
    if (a->heads == a->kv_heads) {
        product(w, y, x, gradient, true, false, true);
        return;
    }
    te_dnn_tensor each = te_dnn_virtual(w->g, a->type, (int64_t[]){a->batch, a->heads, kv, dim});
    product(w, y, x, each, true, false, true);
    te_dnn_reduce(w->g, CUDNN_REDUCE_TENSOR_ADD, each, gradient);
}

static void query_gradient(writer *w, te_dnn_tensor ds, te_dnn_tensor k, te_dnn_tensor k_offsets)
{
    const te_dnn_attention *a = w->a;
    const int64_t *stride = a->stride[TE_DNN_K];
    te_dnn_description rows = {.type = a->type,
                               .dim = {a->batch, a->kv_heads, a->seq_kv, a->dim},
                               .stride = {stride[0], stride[1], stride[2], 1},
                               .ragged = k_offsets};
    te_dnn_tensor k_rows = te_dnn_virtual_as(w->g, &rows);
    te_dnn_reshape(w->g, k, k_rows);
    te_dnn_tensor dq = plain_operand(w, TE_DNN_DQ, a->heads, a->seq_q, a->dim), sums = dq;
    if (a->any_order) {
        te_dnn_description dense = {.type = CUDNN_DATA_FLOAT,
                                    .dim = {a->batch, a->heads, a->seq_q, a->dim},
                                    .stride = {a->heads * a->seq_q * a->dim, a->seq_q * a->dim, a->dim, 1},
                                    .ragged = TE_DNN_NONE};
        sums = te_dnn_add(w->g, TE_DNN_DQ_SUMS, &dense);
    }
    product(w, ds, k_rows, sums, true, false, true);
    if (a->any_order)
        te_dnn_pointwise(w->g, CUDNN_POINTWISE_IDENTITY, CUDNN_DATA_FLOAT, sums, TE_DNN_NONE, TE_DNN_NONE, dq, 0);
}

static void backward(writer *w)
{
    const te_dnn_attention *a = w->a;
    te_dnn_tensor q = plain_operand(w, TE_DNN_Q, a->heads, a->seq_q, a->dim), k_offsets = offsets_of(w, TE_DNN_K);
    te_dnn_tensor k = operand(w, TE_DNN_K, a->kv_heads, a->seq_kv, a->dim, true, k_offsets);
    te_dnn_tensor v = operand(w, TE_DNN_V, a->kv_heads, a->seq_kv, a->dim_v, true, offsets_of(w, TE_DNN_V));
    te_dnn_tensor dout = plain_operand(w, TE_DNN_DOUT, a->heads, a->seq_q, a->dim_v);
    te_dnn_tensor d = row_sums(w, dout, plain_operand(w, TE_DNN_OUT, a->heads, a->seq_q, a->dim_v));
    te_dnn_tensor masked = masked_number(w), scores = mask_padding(w, scaled_scores(w, q, k), masked);
    scores = on_scores(w, CUDNN_POINTWISE_SUB, scores, row_numbers(w, TE_DNN_LSE, a->stride[TE_DNN_LSE]));
    te_dnn_tensor p = on_scores(w, CUDNN_POINTWISE_EXP, mask_band(w, scores, masked), TE_DNN_NONE);
    turned_product(w, p, dout, TE_DNN_DV, a->dim_v);
    te_dnn_tensor dp = new_scores(w, CUDNN_DATA_FLOAT);
    product(w, dout, v, dp, true, true, false);
    te_dnn_tensor ds = on_scores(w, CUDNN_POINTWISE_MUL, on_scores(w, CUDNN_POINTWISE_SUB, dp, d), p);
    te_dnn_tensor scaled = new_scores(w, a->type);
    te_dnn_pointwise(w->g, CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, ds, w->scale, TE_DNN_NONE, scaled, 0);
    turned_product(w, scaled, q, TE_DNN_DK, a->dim);
    query_gradient(w, scaled, k, k_offsets);
}

void te_dnn_attention_graph(te_dnn_graph *g, const te_dnn_attention *a)
{
    te_dnn_description lengths = {
        .type = CUDNN_DATA_INT32, .dim = {a->batch, 1, 1, 1}, .stride = {1, 1, 1, 1}, .ragged = TE_DNN_NONE};
    writer w = {.g = g, .a = a, .lengths = TE_DNN_NONE};
    w.scale = te_dnn_number(g, TE_DNN_SCALE, CUDNN_DATA_FLOAT);
    if (a->packed) w.lengths = te_dnn_add(g, TE_DNN_LENGTHS, &lengths);
    w.lse_offsets = a->lse || a->backward ? offsets_of(&w, TE_DNN_LSE) : TE_DNN_NONE;
    if (a->backward)
        backward(&w);
    else if (a->type == CUDNN_DATA_FP8_E4M3)
        forward_quantized(&w);
    else
        forward(&w);
}
