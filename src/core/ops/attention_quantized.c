/* attention_quantized.c - see attention_quantized.h. */
#include "attention_quantized.h"

#include "../quantized_parameter.h"

/* What quantizes the operands; NULL: nothing does. */
static te_recipe_state *active_state(const te_call *call, te_dtype dtype)
{
    te_recipe_state *state = call->ctx->product_state;
    const te_product_recipe *recipe = te_recipe_active(state);
    return recipe && recipe->quantized[TE_ROLE_INPUT] && dtype != TE_F64 ? state : NULL;
}

/* Copies that somebody else made, with another quantizer, are not what the kernels read. */
static bool has_other_copies(const te_recipe_state *state, const te_tensor *t)
{
    const struct te_quantized_values *attached = t->storage->attached;
    const te_quantizer *q = &state->recipe->quantizers[TE_ROLE_INPUT];
    return attached && (attached->copies.quantizer.element != q->element ||
                        attached->copies.quantizer.scale != q->scale || attached->copies.quantizer.block_rows);
}

static te_status quantize_operand(te_call *call, te_attention_state *s, te_recipe_state *state, te_tensor *t)
{
    te_tensor *own = has_other_copies(state, t) ? te_tensor_clone_data(t) : te_tensor_retain(t);
    if (!own) return call->ctx->status;
    te_status status = te_role_quantize(state, state->recipe, TE_ROLE_INPUT, own, t->dtype, true, false,
                                        &s->operands[s->n_operands]);
    te_tensor_release(own);
    if (status == TE_OK) s->n_operands++;
    return status;
}

te_status te_attention_quantize(te_call *call, te_attention_state *s, te_tensor *const *t, int n)
{
    te_recipe_state *own = call->ctx->product_state, *state = active_state(call, t[0]->dtype);
    te_status status = TE_OK;
    for (int i = 0; i < n && status == TE_OK; i++) {
        if (state)
            status = quantize_operand(call, s, state, t[i]);
        else if (te_recipe_calibrates(own))
            status = te_role_observe(own, TE_ROLE_INPUT, t[i], t[i]->dtype);
    }
    return status;
}

void te_attention_mark(te_attention_state *s, int i, te_view *view)
{
    te_quantized_operand(&s->operands[i], 0, false, &s->quants[i]);
    view->quant = &s->quants[i];
}

te_tensor *te_attention_result(te_call *call, te_attention_state *s, te_dtype dtype, te_device *device,
                               const int64_t rows[4])
{
    const te_quantized *v = s->n_operands ? &s->operands[s->n_operands - 1] : NULL;
    const bool want[2] = {true, false};
    if (!v || s->a.dropout > 0) return te_tensor_new(call->ctx, device, dtype, 4, rows);
    if (te_quantized_open(device, &v->quantizer, dtype, 4, rows, want, false, &s->result) != TE_OK) return NULL;
    te_tensor_release(s->result.side[0].scale_inv);
    s->result.side[0].scale_inv = te_tensor_retain(v->side[0].scale_inv);
    return te_tensor_retain(s->result.side[0].data);
}

te_tensor *te_attention_open_result(te_call *call, te_attention_state *s, int ndim, const int64_t *shape)
{
    const te_product_recipe *recipe = te_recipe_active(call->ctx->product_state);
    te_quantized copies;
    te_tensor *data = te_tensor_alias(s->result.side[0].data, ndim, shape, NULL, 0);
    if (!data) return NULL;
    te_tensor_release(s->result.side[0].data);
    s->result.side[0].data = data;
    s->result.ndim = ndim;
    memcpy(s->result.shape, shape, (size_t)ndim * sizeof *shape);
    if (call->ctx->product_bytes) return te_quantized_parameter_from(call->ctx, &s->result, call->ctx->product_state);
    if (!recipe->hands_on) return te_dequantize(call->ctx, &s->result, 0);
    te_quantized_share(&s->result, true, true, &copies);
    return te_quantized_values(call->ctx, &copies);
}

te_tensor *te_attention_result_values(te_call *call, const te_attention_state *s, te_tensor *saved)
{
    return s->result.side[0].data ? te_dequantize(call->ctx, &s->result, 0) : te_tensor_retain(saved);
}
