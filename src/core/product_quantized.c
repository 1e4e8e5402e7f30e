/* product_quantized.c - operands of a linear layer quantized by role, and their products as GEMM calls. */
#include "product_quantized.h"

#include "product.h"

void te_factor_close(te_factor *factor)
{
    te_tensor_release(factor->plain);
    factor->plain = NULL;
    te_quantized_close(&factor->quantized);
}

void te_product_saved_close(te_product_saved *saved)
{
    te_factor_close(&saved->x);
    te_factor_close(&saved->weight);
    te_factor_close(&saved->waiting);
    te_tensor_release(saved->scale);
    saved->scale = NULL;
    te_product_recipe_release(saved->recipe);
    te_recipe_state_release(saved->state);
    saved->recipe = NULL;
    saved->state = NULL;
}

/* --- operands ----------------------------------------------------------------------------------------------------- */

/* The tensor of a role in the form that its products read. */
static te_status make_factor(te_recipe_state *state, const te_product_recipe *recipe, te_role role, te_tensor *t,
                             te_dtype compute, bool rowwise, bool columnwise, te_factor *factor)
{
    *factor = (te_factor){.plain = NULL};
    if (recipe->quantized[role])
        return te_role_quantize(state, recipe, role, t, compute, rowwise, columnwise, &factor->quantized);
    factor->plain = role == TE_ROLE_WEIGHT ? te_tensor_cast_cached(t, compute) : te_tensor_cast(t, compute);
    return factor->plain ? TE_OK : state->ctx->status;
}

/* An operand of a GEMM and what must outlive the call: a copy where rows are not evenly spaced. */
typedef struct operand {
    te_quant quant;
    te_tensor *copy;
} operand;

/* The matrix {rows, columns} of a factor, or its transpose, from the copy for the given direction. */
static te_status view_factor(const te_factor *f, int side, bool turn, te_view *view, operand *o)
{
    o->copy = NULL;
    if (!f->plain) {
        *view = te_quantized_operand(&f->quantized, side, turn != (side == 1), &o->quant);
        view->quant = &o->quant;
        return TE_OK;
    }
    o->copy = te_rows_tensor(f->plain, view);
    if (!o->copy) return f->plain->ctx->status;
    if (turn) *view = te_matrix_transposed(*view);
    return TE_OK;
}

/* c = (or +=) a b + bias, unless something has failed before. a and b are released. */
static te_status multiply(te_tensor *c, te_status before, te_gemm *gemm, operand *a, operand *b)
{
    te_exec *exec = &c->storage->device->exec;
    te_status status = before == TE_OK ? exec->backend->gemm(exec, gemm) : before;
    te_tensor_release(a->copy);
    te_tensor_release(b->copy);
    return status == TE_OK || before != TE_OK ? status : te_fail_exec(c->ctx, status, exec, "linear");
}

static te_status product(te_tensor *c, const te_factor *a, int a_side, bool turn_a, const te_factor *b, int b_side,
                         bool turn_b, uint64_t b_key, te_tensor *bias, bool accumulate, bool fast_sums)
{
    te_gemm gemm = {.alpha = 1, .beta = accumulate ? 1 : 0, .fast_sums = fast_sums, .b_key = b_key};
    operand oa, ob = {.copy = NULL};
    te_status status = view_factor(a, a_side, turn_a, &gemm.a, &oa);
    if (status == TE_OK) status = view_factor(b, b_side, turn_b, &gemm.b, &ob);
    if (status != TE_OK) {
        te_tensor_release(oa.copy);
        return status;
    }
    te_rows_view(c, &gemm.c);
    te_tensor *held;
    status = te_product_bias(c, bias, &gemm.bias, &held);
    status = multiply(c, status, &gemm, &oa, &ob);
    te_tensor_release(held);
    return status;
}

static uint64_t weight_key(const te_factor *weight, int side)
{
    const te_tensor *t = weight->plain ? weight->plain : weight->quantized.side[side].data;
    return te_content_key(t);
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

void te_factor_keep_side(te_factor *f, int side)
{
    te_quantized_part *part = &f->quantized.side[!side];
    te_tensor_release(part->data);
    te_tensor_release(part->scale_inv);
    te_tensor_release(part->amax);
    *part = (te_quantized_part){NULL, NULL, NULL};
}

/* Moves what backward reads of an operand to where it is kept. */
static te_status keep(te_product_saved *saved, te_factor *kept, te_factor *from, te_tensor *source, bool is_weight)
{
    te_backward_precision backward = saved->recipe->backward;
    if (backward == TE_BACKWARD_HIGH_PRECISION) {
        te_dtype dtype = saved->compute;
        kept->plain = is_weight ? te_tensor_cast_cached(source, dtype) : te_tensor_cast(source, dtype);
    } else {
        *kept = *from;
        *from = (te_factor){.plain = NULL};
        if (!kept->plain) te_factor_keep_side(kept, backward == TE_BACKWARD_QUANTIZED);
    }
    if (kept->plain) kept->version = te_storage_writes(kept->plain->storage);
    return te_factor_is_there(kept) ? TE_OK : saved->state->ctx->status;
}

static bool take_ready(te_quantized *ready, te_factor *factor)
{
    if (!ready || !te_quantized_is_there(ready)) return false;
    *factor = (te_factor){.quantized = *ready};
    memset(ready, 0, sizeof *ready);
    return true;
}

/* x for the product, and for dW where that is kept. */
static te_status make_input(te_recipe_state *state, te_tensor *x, te_dtype compute, te_product_x after, te_factor *fx)
{
    const te_product_recipe *recipe = state->recipe;
    bool columnwise = recipe->backward == TE_BACKWARD_QUANTIZED && after == TE_X_KEPT;
    if (after != TE_X_AGAIN || !recipe->quantized[TE_ROLE_INPUT])
        return make_factor(state, recipe, TE_ROLE_INPUT, x, compute, true, columnwise, fx);
    *fx = (te_factor){.plain = NULL};
    return te_role_quantize_first(state, recipe, x, compute, &fx->quantized);
}

te_status te_quantized_product(te_recipe_state *state, te_tensor *y, te_tensor *x, te_quantized *ready,
                               te_tensor *weight, te_tensor *bias, bool want_dx, te_product_x after,
                               te_product_saved *saved)
{
    te_product_recipe *recipe = state->recipe;
    bool columnwise = recipe->backward == TE_BACKWARD_QUANTIZED;
    te_factor fx, fw = {.plain = NULL};
    *saved = (te_product_saved){.state = te_recipe_state_retain(state), .recipe = te_product_recipe_retain(recipe),
                                .compute = y->dtype};
    te_status status = TE_OK;
    if (!take_ready(ready, &fx)) status = make_input(state, x, y->dtype, after, &fx);
    if (status == TE_OK)
        status = make_factor(state, recipe, TE_ROLE_WEIGHT, weight, y->dtype, true, columnwise && want_dx, &fw);
    if (status == TE_OK)
        status = product(y, &fx, 0, false, &fw, 0, true, weight_key(&fw, 0), bias, false,
                         recipe->fast_sums[TE_PRODUCT_FORWARD]);
    if (status == TE_OK && after == TE_X_KEPT) status = keep(saved, &saved->x, &fx, x, false);
    if (status == TE_OK && after == TE_X_AGAIN) {
        saved->scale = fx.quantized.factor;
        fx.quantized.factor = NULL;
    }
    if (status == TE_OK && want_dx) status = keep(saved, &saved->weight, &fw, weight, true);
    te_factor_close(&fx);
    te_factor_close(&fw);
    return status;
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

te_status te_quantized_grad_output(const te_product_saved *saved, te_tensor *dy, te_quantized *ready, bool want_dx,
                                   bool want_dweight, te_factor *result)
{
    te_recipe_state *state = saved->state;
    if (take_ready(ready, result)) return TE_OK;
    *result = (te_factor){.plain = NULL};
    if (saved->recipe->backward == TE_BACKWARD_QUANTIZED && (want_dx || want_dweight))
        return make_factor(state, saved->recipe, TE_ROLE_GRAD_OUTPUT, dy, saved->compute, want_dx, want_dweight,
                           result);
    result->plain = te_tensor_cast(dy, saved->compute);
    return result->plain ? TE_OK : state->ctx->status;
}

/* What forward kept of an operand, dequantized where backward is to compute in high precision. */
static te_status restore(const te_product_saved *saved, const te_factor *from, te_factor *to)
{
    te_context *ctx = saved->state->ctx;
    *to = *from;
    if (from->plain && te_storage_writes(from->plain->storage) != from->version)
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "te.linear: backward: a tensor of shape %s that it saved was changed in place since",
                       TE_SHAPE_TEXT(from->plain));
    if (saved->recipe->backward != TE_BACKWARD_DEQUANTIZED || from->plain) return TE_OK;
    te_quantized copies = from->quantized;
    copies.dtype = saved->compute; /* which a parameter that is stored quantized need not stand for */
    *to = (te_factor){.plain = te_dequantize(ctx, &copies, 0)};
    return to->plain ? TE_OK : ctx->status;
}

static void drop(const te_factor *from, te_factor *restored)
{
    if (restored->plain != from->plain) te_factor_close(restored);
}

te_status te_quantized_dgrad(const te_product_saved *saved, te_tensor *dx, const te_factor *dy, bool accumulate)
{
    te_factor weight;
    te_status status = restore(saved, &saved->weight, &weight);
    if (status != TE_OK || !te_factor_is_there(&weight)) return status;
    status = product(dx, dy, 0, false, &weight, 1, false, weight_key(&weight, 1), NULL, accumulate,
                     saved->recipe->fast_sums[TE_PRODUCT_DGRAD]);
    drop(&saved->weight, &weight);
    return status;
}

bool te_product_may_recall(const te_product_recipe *recipe)
{
    const te_quantizer *q = &recipe->quantizers[TE_ROLE_INPUT];
    if (!recipe->quantized[TE_ROLE_INPUT] || recipe->backward == TE_BACKWARD_HIGH_PRECISION) return true;
    return recipe->backward == TE_BACKWARD_QUANTIZED && q->has_columnwise && !q->stochastic;
}

te_status te_quantized_recall(te_product_saved *saved, te_tensor *x)
{
    const te_product_recipe *recipe = saved->recipe;
    te_quantize_options options = {.want = {false, true}, .scale = 1, .factor = saved->scale, .passing = true};
    if (recipe->quantized[TE_ROLE_INPUT] && recipe->backward == TE_BACKWARD_QUANTIZED)
        return te_quantize(x, &recipe->quantizers[TE_ROLE_INPUT], &options, &saved->x.quantized);
    saved->x.plain = te_tensor_retain(x);
    saved->x.version = te_storage_writes(x->storage);
    return TE_OK;
}

te_status te_quantized_wgrad(const te_product_saved *saved, te_tensor *dweight, const te_factor *dy, bool accumulate)
{
    te_factor x;
    te_status status = restore(saved, &saved->x, &x);
    if (status != TE_OK || !te_factor_is_there(&x)) return status;
    status =
        product(dweight, dy, 1, true, &x, 1, false, 0, NULL, accumulate, saved->recipe->fast_sums[TE_PRODUCT_WGRAD]);
    drop(&saved->x, &x);
    return status;
}
