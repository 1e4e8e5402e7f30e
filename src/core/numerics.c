/* numerics.c - counting what quantization does to operands. */
#include "numerics.h"

#include <math.h>

te_status te_numerics_watch(te_recipe_state *state, bool on)
{
    if (!state->watched) {
        state->watched = te_mem_zalloc(&state->ctx->mem, sizeof *state->watched);
        if (!state->watched) return te_fail_memory(state->ctx, "numerics");
    }
    if (on) memset(state->watched, 0, sizeof *state->watched);
    state->watched->on = on;
    return TE_OK;
}

void te_numerics_unwatch(te_recipe_state *state)
{
    te_mem_free(&state->ctx->mem, state->watched, sizeof *state->watched);
    state->watched = NULL;
}

/* The largest code of a format, and what counts as beyond it: the next value would have been that much larger, and from
 * the middle on a source would have been rounded to it. */
static const struct {
    uint8_t code;
    double reach;
} largest[TE_ELEMENT_COUNT] = {
    [TE_E4M3] = {0x7e, 464.0 / 448.0}, [TE_E5M2] = {0x7b, 61440.0 / 57344.0}, [TE_E2M1] = {0x07, 7.0 / 6.0}};

/* The code of an element of the row-wise copy, without its sign. */
static uint8_t magnitude(const uint8_t *data, te_element_kind element, int64_t row, int64_t col, int64_t cols)
{
    if (element != TE_E2M1) return data[row * cols + col] & 0x7f;
    return (uint8_t)(data[row * ((cols + 1) / 2) + col / 2] >> (col % 2 * 4)) & 0x07;
}

static void count_value(te_role_numerics *n, te_element_kind element, double x, double result, uint8_t code)
{
    double size = fabs(x);
    n->values++;
    if (!isfinite(x)) {
        n->nonfinite++;
        return;
    }
    n->saturated += code == largest[element].code && size > fabs(result) * largest[element].reach;
    n->flushed += x != 0 && result == 0;
    n->error += (result - x) * (result - x);
    n->norm += x * x;
    n->amax = size > n->amax ? size : n->amax;
}

/* source and *z are contiguous and on the host. */
static te_status count_tensor(te_role_numerics *n, te_tensor *source, te_quantized *z)
{
    const te_quantizer *q = &z->quantizer;
    int64_t cols = z->ndim ? z->shape[z->ndim - 1] : 1, numel = te_shape_numel(z->ndim, z->shape, 1);
    z->dtype = TE_F32; /* which holds every quantized value exactly */
    te_tensor *result = te_dequantize(source->ctx, z, 0);
    if (!result) return source->ctx->status;
    const void *from = te_tensor_data(source), *to = te_tensor_data(result);
    const uint8_t *data = te_tensor_data(z->side[0].data);
    for (int64_t i = 0; i < numel; i++)
        count_value(n, q->element, te_load_f64(from, source->dtype, i), te_load_f64(to, TE_F32, i),
                    magnitude(data, q->element, i / cols, i % cols, cols));
    bool one_factor = !q->block_rows && q->scale == TE_SCALE_F32;
    n->scale = one_factor ? 1 / te_load_f64(te_tensor_data(z->side[0].scale_inv), TE_F32, 0) : 0;
    te_tensor_release(result);
    return TE_OK;
}

static bool counts(const te_recipe_state *state, te_role role)
{
    const te_context *ctx = state->ctx;
    if (!state->watched || !state->watched->on || ctx->replayed_scales.on) return false;
    return ctx->grad_enabled || ctx->recorded_scales.on || role == TE_ROLE_GRAD_OUTPUT;
}

te_status te_numerics_count(te_recipe_state *state, const te_quantizer *q, te_role role, te_tensor *t, te_dtype compute,
                            float scale)
{
    if (!counts(state, role)) return TE_OK;
    te_context *ctx = state->ctx;
    te_quantize_options options = {.want = {true, false}, .scale = scale, .seed = &(uint64_t){0}};
    te_quantized z = {.ndim = 0};
    te_device *cpu = te_context_device(ctx, "cpu"); /* which nobody else may have needed yet */
    te_tensor *cast = cpu ? te_tensor_cast(t, compute) : NULL;
    te_tensor *host = cast ? te_tensor_on_device(cast, cpu) : NULL;
    te_tensor *source = host ? te_tensor_contiguous_copy(host) : NULL;
    te_status status = source ? te_quantize(source, q, &options, &z) : ctx->status;
    if (status == TE_OK) status = count_tensor(&state->watched->roles[role], source, &z);
    te_quantized_close(&z);
    te_tensor_release(source);
    te_tensor_release(host);
    te_tensor_release(cast);
    return status;
}
