/* quantizer_fields.c - see quantizer_fields.h. */
#include "quantizer_fields.h"

#include "kernels/float_mode.h"
#include "recipe_kinds.h"

#include <string.h>

/* The index of a name in a list that ends with NULL; of NULL 0, -1: not there. */
static int index_of(const char *const *names, const char *name)
{
    for (int i = 0; names[i]; i++)
        if (!name || strcmp(names[i], name) == 0) return i;
    return -1;
}

static te_status check_extent(te_context *ctx, const char *who, const char *name, int extent)
{
    if (extent >= 0 && extent <= 128) return TE_OK;
    return te_fail(ctx, TE_ERROR_ARGUMENT, "%s: %s: %d; blocks have at most 128 rows and columns", who, name, extent);
}

te_status te_quantizer_from_fields(te_context *ctx, const char *who, const te_quantizer_fields *fields, te_quantizer *q)
{
    te_quantizer_fields f;
    if (!fields) return te_fail(ctx, TE_ERROR_ARGUMENT, "%s: there is no quantizer", who);
    if (fields->struct_size < offsetof(te_quantizer_fields, scale))
        return te_fail(ctx, TE_ERROR_ARGUMENT, "%s: struct_size: %zu; see te_quantizer_defaults", who,
                       fields->struct_size);
    f.struct_size = sizeof f;
    te_quantizer_defaults(&f);
    te_copy_fields(&f, fields, fields->struct_size, sizeof f);
    int element = index_of(te_element_names, f.element), scale = index_of(te_scale_names, f.scale);
    int four = index_of(te_four_over_six_names, f.four_over_six);
    if (element < 0) return te_fail(ctx, TE_ERROR_ARGUMENT, "%s: element: no choice \"%.40s\"", who, f.element);
    if (scale < 0) return te_fail(ctx, TE_ERROR_ARGUMENT, "%s: scale: no choice \"%.40s\"", who, f.scale);
    if (four < 0)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "%s: four_over_six: no choice \"%.40s\"", who, f.four_over_six);
    te_status status = check_extent(ctx, who, "block_rows", f.block_rows);
    if (status == TE_OK) status = check_extent(ctx, who, "block_cols", f.block_cols);
    if (status != TE_OK) return status;
    *q = (te_quantizer){.element = (te_element_kind)element,
                        .scale = (te_scale_kind)scale,
                        .four_over_six = (te_four_over_six)four,
                        .block_rows = f.block_rows,
                        .block_cols = f.block_cols,
                        .needs_history = f.needs_history,
                        .has_columnwise = f.has_columnwise,
                        .transposed = f.transposed,
                        .replicated = f.replicated,
                        .power_of_two = f.power_of_two,
                        .row_scaled = f.row_scaled,
                        .hadamard = f.hadamard,
                        .stochastic = f.stochastic,
                        .epsilon = f.epsilon,
                        .scale_max = f.scale_max};
    return te_quantizer_check(ctx, q);
}

void te_quantizer_to_fields(const te_quantizer *q, te_quantizer_fields *fields)
{
    te_quantizer_fields f = {.struct_size = sizeof f,
                             .element = te_element_names[q->element],
                             .scale = te_scale_names[q->scale],
                             .four_over_six = te_four_over_six_names[q->four_over_six],
                             .block_rows = q->block_rows,
                             .block_cols = q->block_cols,
                             .needs_history = q->needs_history,
                             .has_columnwise = q->has_columnwise,
                             .transposed = q->transposed,
                             .replicated = q->replicated,
                             .power_of_two = q->power_of_two,
                             .row_scaled = q->row_scaled,
                             .hadamard = q->hadamard,
                             .stochastic = q->stochastic,
                             .epsilon = q->epsilon,
                             .scale_max = q->scale_max};
    if (fields->struct_size < sizeof f) f.struct_size = fields->struct_size;
    te_copy_fields(fields, &f, f.struct_size, sizeof f);
}

void te_quantizer_defaults(te_quantizer_fields *fields)
{
    te_quantizer usual = te_quantizer_usual();
    if (!fields) return;
    te_quantizer_to_fields(&usual, fields);
}

te_status te_quantizer_fields_check(te_context *ctx, const te_quantizer_fields *fields)
{
    TE_FLOAT_DEFAULT_HERE;
    te_quantizer q;
    return ctx ? te_quantizer_from_fields(ctx, "te_quantizer", fields, &q) : TE_ERROR_ARGUMENT;
}
