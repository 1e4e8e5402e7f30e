/* attention_quantized.c - the forward pass on E4M3 operands.
 *
 * Every E4M3 number is exact in bfloat16, and so is a product of two of them in float32. So the bytes are decoded to
 * bfloat16 as they are, and the loops of bfloat16 multiply them; the factors of q and k go to the scale of scores, that
 * of v to the result, unless that is to be bytes with the same factor.
 */
#include "attention.h"
#include "decode.h"

static te_status check_operand(te_exec *exec, const char *name, const te_view *v)
{
    const te_quant *q = v->quant;
    bool fits = q && q->element == TE_E4M3 && q->scale == TE_SCALE_F32 && q->block[0] == 0 && q->scale_inv &&
                v->ndim == 4 && (v->stride[3] == 1 || v->shape[3] <= 1);
    if (fits) return TE_OK;
    return te_exec_fail(exec, TE_ERROR_UNSUPPORTED,
                        "attention: quantized operands are E4M3 with one float32 factor and unit stride, which %s is "
                        "not", name);
}

static te_status check(te_exec *exec, const te_attention *a)
{
    te_dtype t = a->out.dtype;
    te_status status = check_operand(exec, "q", &a->q);
    if (status == TE_OK) status = check_operand(exec, "k", &a->k);
    if (status == TE_OK) status = check_operand(exec, "v", &a->v);
    if (status == TE_OK && t != TE_F32 && t != TE_BF16 && t != TE_F16 && t != TE_F8E4M3)
        return te_exec_fail(exec, TE_ERROR_UNSUPPORTED,
                            "attention: out of quantized operands is float32, bfloat16, float16 or float8_e4m3");
    return status;
}

static int64_t bytes_of(const te_view *v) { return (te_view_numel(v) * 2 + 63) & ~(int64_t)63; }

/* The bytes' own values, dense, without the factor. */
static te_view decoded(te_exec *exec, const te_view *from, char *to)
{
    te_view v = {.data = to, .dtype = TE_BF16, .ndim = 4};
    int64_t step = 1;
    bool across;
    memcpy(v.shape, from->shape, sizeof v.shape);
    for (int i = 3; i >= 0; step *= v.shape[i--]) v.stride[i] = step;
    for (int64_t i = 0; i < v.shape[0] * v.shape[1] && step > 0; i++) {
        int64_t batch = i / v.shape[1], head = i % v.shape[1];
        te_view m = {.dtype = from->dtype, .ndim = 2, .quant = from->quant,
                     .shape = {from->shape[2], from->shape[3]}, .stride = {from->stride[2], 1}};
        m.data = (char *)from->data + batch * from->stride[0] + head * from->stride[1];
        te_decode d = te_decode_of(&m, &across);
        te_decode_matrix(exec, &d, TE_BF16, to + i * v.stride[1] * 2);
    }
    return v;
}

te_status te_cpu_attention_quantized(te_exec *exec, const te_attention *a)
{
    te_attention plain = *a;
    te_status status = check(exec, a);
    if (status != TE_OK) return status;
    plain.q.dtype = plain.k.dtype = plain.v.dtype = plain.out.dtype = TE_BF16; /* as it will be */
    status = te_attention_check(exec, "attention", &plain);
    if (status != TE_OK) return status;
    int64_t q_bytes = bytes_of(&a->q), k_bytes = bytes_of(&a->k);
    char *room = exec->scratch(exec, (size_t)(q_bytes + k_bytes + bytes_of(&a->v)));
    if (!room) return TE_ERROR_MEMORY;
    plain.q = decoded(exec, &a->q, room);
    plain.k = decoded(exec, &a->k, room + q_bytes);
    plain.v = decoded(exec, &a->v, room + q_bytes + k_bytes);
    plain.out = a->out;
    plain.scale *= (double)te_decode_tensor_factor(&a->q) * (double)te_decode_tensor_factor(&a->k);
    double kept = a->dropout < 1 ? 1 / (1 - a->dropout) : 0;
    double factor = a->out.dtype == TE_F8E4M3 ? 1 : (double)te_decode_tensor_factor(&a->v);
    float times = (float)(factor / TE_ATTENTION_ONE * kept);
    status = te_attention_run(exec, &plain, &times);
    exec->scratch_free(exec, room);
    return status;
}
