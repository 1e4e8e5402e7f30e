/* quantized_tensor.c - quantized tensors as values of a host (recipe.h): te_quantized with a count of holders. */
#include "kernels/float_mode.h"
#include "quantized_parameter.h"
#include "quantizer_fields.h"

struct te_quantized_tensor {
    te_context *ctx;
    int refs;
    te_quantized copies;
};

/* Takes the copies over; NULL on failure. */
static te_quantized_tensor *wrap(te_context *ctx, te_quantized *copies)
{
    te_quantized_tensor *q = te_mem_alloc(&ctx->mem, sizeof *q);
    if (!q) {
        te_fail_memory(ctx, "quantize");
        te_quantized_close(copies);
        return NULL;
    }
    *q = (te_quantized_tensor){ctx, 1, *copies};
    te_context_retain(ctx);
    return q;
}

static te_status read_how(te_context *ctx, const te_quantize_how *given, te_quantize_how *how)
{
    *how = (te_quantize_how){.struct_size = sizeof *how};
    if (given && given->struct_size < offsetof(te_quantize_how, scale))
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te.quantize: struct_size: %zu", given->struct_size);
    if (given) te_copy_fields(how, given, given->struct_size, sizeof *how);
    if (how->scale == 0) how->scale = 1;
    return TE_OK;
}

te_quantized_tensor *te_quantized_tensor_new(te_tensor *source, const te_quantizer_fields *fields,
                                             const te_quantize_how *given)
{
    TE_FLOAT_DEFAULT_HERE;
    if (!source) return NULL;
    te_context *ctx = source->ctx;
    te_quantizer q;
    te_quantize_how how;
    te_quantized copies;
    te_status status = te_quantizer_from_fields(ctx, "te.quantize", fields, &q);
    if (status == TE_OK) status = read_how(ctx, given, &how);
    if (status != TE_OK) return NULL;
    te_quantize_options options = {.want = {!how.no_rowwise, q.has_columnwise && !how.no_columnwise},
                                   .scale = how.scale,
                                   .seed = how.seeded ? &how.seed : NULL};
    return te_quantize(source, &q, &options, &copies) == TE_OK ? wrap(ctx, &copies) : NULL;
}

static te_tensor **part_of(te_quantized *z, int direction, int part)
{
    te_quantized_part *p = &z->side[direction];
    return part == TE_STORED_DATA ? &p->data : part == TE_STORED_SCALE_INV ? &p->scale_inv : &p->amax;
}

/* Parts are believed where they can be dequantized. */
static te_status check_parts(te_context *ctx, te_quantized *z)
{
    te_status status = TE_OK;
    for (int side = 0; side < 2 && status == TE_OK; side++) /* of both: either way back binds them all */
        if (z->side[side].data) status = te_quantized_check(ctx, "te.dequantize", z, side);
    for (int side = 0; side < 2 && status == TE_OK; side++) {
        if (!z->side[side].data) continue;
        te_tensor *values = te_dequantize(ctx, z, side);
        if (!values) status = ctx->status;
        te_tensor_release(values);
    }
    return status;
}

te_quantized_tensor *te_quantized_tensor_from_parts(te_context *ctx, const te_quantizer_fields *fields, te_dtype dtype,
                                                    int ndim, const int64_t *shape,
                                                    te_tensor *parts[2][TE_STORED_PART_COUNT])
{
    TE_FLOAT_DEFAULT_HERE;
    te_quantized z = {.dtype = dtype, .ndim = ndim};
    if (!ctx) return NULL;
    te_status status = te_quantizer_from_fields(ctx, "te.dequantize", fields, &z.quantizer);
    if (status == TE_OK && dtype != TE_F32 && dtype != TE_BF16 && dtype != TE_F16)
        status = te_fail(ctx, TE_ERROR_ARGUMENT, "te.dequantize: dtype: %s; use float32, bfloat16 or float16",
                         te_dtype_name(dtype));
    if (status == TE_OK &&
        (ndim < 0 || ndim > TE_MAX_DIMS || (ndim && !shape) || !parts || (!parts[0][0] && !parts[1][0])))
        status = te_fail(ctx, TE_ERROR_ARGUMENT, "te.dequantize: a shape of %d dimensions, or no data", ndim);
    if (status != TE_OK) return NULL;
    if (ndim) memcpy(z.shape, shape, (size_t)ndim * sizeof *shape);
    for (int i = 0; i < 2 * TE_STORED_PART_COUNT; i++) {
        te_tensor *part = parts[i / TE_STORED_PART_COUNT][i % TE_STORED_PART_COUNT];
        if (part && part->ctx != ctx)
            status = te_fail(ctx, TE_ERROR_ARGUMENT, "te.dequantize: a part of another context");
        *part_of(&z, i / TE_STORED_PART_COUNT, i % TE_STORED_PART_COUNT) = part ? te_tensor_retain(part) : NULL;
    }
    if (status == TE_OK) status = check_parts(ctx, &z);
    if (status == TE_OK) return wrap(ctx, &z);
    te_quantized_close(&z);
    return NULL;
}

te_quantized_tensor *te_quantized_tensor_retain(te_quantized_tensor *q)
{
    if (q) q->refs++;
    return q;
}

void te_quantized_tensor_release(te_quantized_tensor *q)
{
    if (!q || --q->refs > 0) return;
    te_context *ctx = q->ctx;
    te_quantized_close(&q->copies);
    te_mem_free(&ctx->mem, q, sizeof *q);
    te_context_unref(ctx);
}

static bool names_part(te_direction direction, te_stored_part part)
{
    return (unsigned)direction < 2 && (unsigned)part < TE_STORED_PART_COUNT;
}

te_tensor *te_quantized_tensor_part(const te_quantized_tensor *q, te_direction direction, te_stored_part part)
{
    return q && names_part(direction, part) ? *part_of((te_quantized *)(uintptr_t)&q->copies, direction, part) : NULL;
}

te_tensor *te_quantized_tensor_dequantize(const te_quantized_tensor *q, te_direction direction)
{
    TE_FLOAT_DEFAULT_HERE;
    if (!q) return NULL;
    if ((unsigned)direction < 2) return te_dequantize(q->ctx, &q->copies, direction);
    te_fail(q->ctx, TE_ERROR_ARGUMENT, "te.dequantize: there is no direction %d", (int)direction);
    return NULL;
}

te_tensor *te_tensor_quantized_part(const te_tensor *t, te_direction direction, te_stored_part part)
{
    bool there = t && te_tensor_is_quantized(t) && names_part(direction, part);
    return there ? *part_of(&t->storage->quantized->copies, direction, part) : NULL;
}
