/* quantized_parameter.c - parameters that exist in quantized form alone. */
#include "quantized_parameter.h"

#include "op.h"

void te_quantized_storage_free(te_storage *storage)
{
    struct te_quantized_storage *q = storage->quantized;
    if (!q) return;
    storage->quantized = NULL;
    te_mem mem = storage->ctx->mem;
    te_quantized_close(&q->copies);
    te_recipe_state_release(q->state);
    te_mem_free(&mem, q, sizeof *q);
}

static te_tensor *attach(te_context *ctx, te_quantized *copies, te_recipe_state *state)
{
    te_tensor *data = copies->side[0].data ? copies->side[0].data : copies->side[1].data;
    te_tensor *t = te_tensor_new_unbacked(ctx, data->storage->device, copies->dtype, copies->ndim, copies->shape);
    struct te_quantized_storage *q = t ? te_mem_alloc(&ctx->mem, sizeof *q) : NULL;
    if (!q) {
        if (t) te_fail_memory(ctx, "quantized parameter");
        te_tensor_release(t);
        te_quantized_close(copies);
        return NULL;
    }
    *q = (struct te_quantized_storage){*copies, te_recipe_state_retain(state)};
    t->storage->quantized = q;
    return t;
}

te_tensor *te_quantized_parameter_new(te_tensor *source, te_recipe_state *state, bool columnwise)
{
    te_context *ctx = source->ctx;
    te_quantized copies;
    if (!state->recipe || !state->recipe->quantized[TE_ROLE_WEIGHT])
        return te_tensor_is_quantized(source) ? te_tensor_dequantized(source) : te_tensor_clone_data(source);
    const te_quantizer *q = &state->recipe->quantizers[TE_ROLE_WEIGHT];
    te_status status = te_role_quantize_resident(state, q, source, columnwise, false, &copies);
    return status == TE_OK ? attach(ctx, &copies, state) : NULL;
}

te_tensor *te_quantized_parameter_from(te_context *ctx, const te_quantized *copies, te_recipe_state *state)
{
    te_quantized own;
    te_quantized_share(copies, true, true, &own);
    return attach(ctx, &own, state);
}

/* *to = from on the device, a copy of it where there is none, or what stands for it there where both directions share
 * it. */
static te_status move_part(te_tensor *from, te_tensor *shared, te_tensor *moved, te_device *device, te_tensor **to)
{
    *to = !from            ? NULL
          : from == shared ? te_tensor_retain(moved)
          : device         ? te_tensor_on_device(from, device)
                           : te_tensor_clone_data(from);
    return !from || *to ? TE_OK : from->ctx->status;
}

/* The same copies on a device, references where they are there; without one, new ones where they are. On failure *to
 * holds nothing. */
static te_status move_copies(const te_quantized *all, te_device *device, te_quantized *to)
{
    te_status status = TE_OK;
    *to = *all;
    memset(to->side, 0, sizeof to->side);
    for (int i = 0; i < 2 && status == TE_OK; i++) {
        const te_quantized_part *from = &all->side[i], *first = &all->side[0];
        te_quantized_part *part = &to->side[i], *moved = &to->side[0];
        status = move_part(from->data, NULL, NULL, device, &part->data);
        if (status == TE_OK)
            status =
                move_part(from->scale_inv, i ? first->scale_inv : NULL, moved->scale_inv, device, &part->scale_inv);
        if (status == TE_OK) status = move_part(from->amax, i ? first->amax : NULL, moved->amax, device, &part->amax);
    }
    if (status != TE_OK) te_quantized_close(to);
    return status;
}

/* Takes the copies over. What stands for `param` elsewhere has been written as often. */
static te_tensor *attach_like(const te_tensor *param, te_quantized *copies, te_recipe_state *state)
{
    te_tensor *t = attach(param->ctx, copies, state);
    if (t) t->storage->version = param->storage->version;
    return t;
}

te_tensor *te_quantized_parameter_as(const te_tensor *param, te_dtype dtype)
{
    te_quantized copies;
    te_quantized_share(&param->storage->quantized->copies, true, true, &copies);
    copies.dtype = dtype;
    return attach_like(param, &copies, param->storage->quantized->state);
}

te_tensor *te_quantized_parameter_on(const te_tensor *param, te_device *device)
{
    te_quantized copies;
    te_status status = move_copies(&param->storage->quantized->copies, device, &copies);
    return status == TE_OK ? attach_like(param, &copies, param->storage->quantized->state) : NULL;
}

te_tensor *te_quantized_parameter_clone(const te_tensor *param, te_recipe_state *state)
{
    te_quantized copies;
    te_status status = move_copies(&param->storage->quantized->copies, NULL, &copies);
    if (status == TE_OK) copies.dtype = param->dtype;
    return status == TE_OK ? attach_like(param, &copies, state) : NULL;
}

static void replace(te_tensor *param, te_quantized *copies)
{
    te_quantized_close(&param->storage->quantized->copies);
    param->storage->quantized->copies = *copies;
    te_tensor_written(param);
}

/* --- in place ----------------------------------------------------------------------------------------------------- */

/* Whether nobody but the copies, and graphs, holds a tensor, which both directions may share. */
static bool is_own(const te_tensor *t, const te_tensor *shared)
{
    return !t || (t->storage->refs - t->storage->graph_refs == 1 && t->refs == (t == shared ? 2 : 1));
}

static bool are_own(const te_quantized *z)
{
    const te_quantized_part *a = &z->side[0], *b = &z->side[1];
    return is_own(a->data, NULL) && is_own(b->data, NULL) && is_own(a->scale_inv, b->scale_inv) &&
           is_own(b->scale_inv, a->scale_inv) && is_own(a->amax, b->amax) && is_own(b->amax, a->amax);
}

/* What was written in place has other contents than whoever keeps something of it believes. */
static void has_changed(const te_quantized *z)
{
    for (int s = 0; s < 2; s++) {
        const te_quantized_part *part = &z->side[s];
        te_tensor_written(part->data);
        te_tensor_written(part->scale_inv);
        te_tensor_written(part->amax);
    }
}

/* Whether a graph reads these copies, or will: then others in their place would never be seen by it. They are written
 * over, as other parameters are, whoever else looks at them. */
static bool in_graph(const te_tensor *param)
{
    const te_quantized *z = &param->storage->quantized->copies;
    bool held = param->ctx->capture != NULL;
    for (int s = 0; s < 2; s++) held |= z->side[s].data && z->side[s].data->storage->graph_refs > 0;
    return held;
}

static te_status refuse(const te_tensor *param)
{
    return te_fail(param->ctx, TE_ERROR_UNSUPPORTED,
                   "te.graph: the quantized parameter %s is read by a graph, so that copies of another kind cannot "
                   "take its place",
                   TE_SHAPE_TEXT(param));
}

static te_status store_in_place(te_tensor *param, te_tensor *values)
{
    struct te_quantized_storage *q = param->storage->quantized;
    te_quantized over;
    if (q->copies.dtype != param->dtype) return refuse(param);
    te_quantized_share(&q->copies, true, true, &over); /* a failure closes them */
    has_changed(&over);
    te_tensor_written(param);
    te_status status = te_role_quantize_resident(q->state, &q->copies.quantizer, values, true, true, &over);
    te_quantized_close(&over);
    return status;
}

te_status te_quantized_parameter_store(te_tensor *param, te_tensor *source)
{
    struct te_quantized_storage *q = param->storage->quantized;
    te_quantized copies;
    te_tensor *cast = te_tensor_cast(source, param->dtype);
    te_status status = cast ? te_role_forget_resident(q->state, &q->copies.quantizer) : param->ctx->status;
    bool stays = in_graph(param);
    if (status == TE_OK && stays) status = store_in_place(param, cast);
    if (status == TE_OK && !stays) {
        bool columnwise = q->copies.side[1].data != NULL;
        status = te_role_quantize_resident(q->state, &q->copies.quantizer, cast, columnwise, false, &copies);
        if (status == TE_OK) replace(param, &copies);
    }
    te_tensor_release(cast);
    return status;
}

static te_status overwrite(te_tensor *to, te_tensor *from)
{
    return to && from ? te_tensor_copy_data(to, from) : TE_OK;
}

static bool is_like(const te_tensor *a, const te_tensor *b)
{
    return a && b ? a->dtype == b->dtype && te_same_shape(a, b) : a == b;
}

static bool are_like(const te_quantized *a, const te_quantized *b)
{
    bool like = te_quantizer_same(&a->quantizer, &b->quantizer);
    for (int s = 0; s < 2; s++)
        like = like && is_like(a->side[s].data, b->side[s].data) && is_like(a->side[s].amax, b->side[s].amax) &&
               is_like(a->side[s].scale_inv, b->side[s].scale_inv);
    return like;
}

/* The bytes of copies of the same kind over those of the parameter. */
static te_status adopt_in_place(te_tensor *param, const te_quantized *from)
{
    te_quantized *to = &param->storage->quantized->copies;
    te_status status = TE_OK;
    for (int s = 0; s < 2 && status == TE_OK; s++) {
        status = overwrite(to->side[s].data, from->side[s].data);
        if (status == TE_OK) status = overwrite(to->side[s].scale_inv, from->side[s].scale_inv);
        if (status == TE_OK) status = overwrite(to->side[s].amax, from->side[s].amax);
    }
    te_tensor_written(param);
    return status;
}

/* --- in steps ----------------------------------------------------------------------------------------------------- */

te_status te_quantized_parameter_open(te_tensor *param, te_quantized *copies)
{
    const struct te_quantized_storage *s = param->storage->quantized;
    const te_quantizer *q = &s->copies.quantizer;
    bool stays = in_graph(param), same = s->copies.dtype == param->dtype;
    if (stays && !same) return refuse(param);
    if (stays || (same && s->copies.side[0].data && are_own(&s->copies))) {
        *copies = s->copies;
        return TE_OK;
    }
    bool want[2] = {true, s->copies.side[1].data != NULL};
    return te_quantized_open(param->storage->device, q, param->dtype, param->ndim, param->shape, want, false, copies);
}

static bool is_its_own(const te_tensor *param, const te_quantized *copies)
{
    return param->storage->quantized->copies.side[0].data == copies->side[0].data;
}

void te_quantized_parameter_written(te_tensor *param, te_quantized *copies)
{
    if (is_its_own(param, copies)) {
        has_changed(copies);
        te_tensor_written(param);
    } else {
        replace(param, copies);
    }
}

void te_quantized_parameter_close(te_tensor *param, te_quantized *copies)
{
    if (!is_its_own(param, copies)) te_quantized_close(copies);
}

te_status te_quantized_parameter_check(const te_tensor *param, const char *who, const te_quantized *from)
{
    const te_quantized *own = &param->storage->quantized->copies;
    te_status status = TE_OK;
    for (int s = 0; s < 2 && status == TE_OK; s++) {
        const te_quantized_part *given = &from->side[s];
        bool wanted = own->side[s].data || given->data || given->scale_inv || given->amax;
        if (wanted) status = te_quantized_check(param->ctx, who, from, s);
        if (status == TE_OK && own->side[s].amax && !given->amax)
            status = te_fail(param->ctx, TE_ERROR_ARGUMENT, "%s: there is no %s amax", who,
                             s ? "columnwise" : "rowwise");
    }
    return status == TE_OK && in_graph(param) && !are_like(own, from) ? refuse(param) : status;
}

te_status te_quantized_parameter_adopt(te_tensor *param, const te_quantized *from)
{
    te_quantized copies;
    te_status status = te_quantized_parameter_check(param, "te.load_state_dict", from);
    if (status == TE_OK) status = move_copies(from, param->storage->device, &copies);
    if (status == TE_OK && in_graph(param)) {
        status = adopt_in_place(param, &copies);
        te_quantized_close(&copies);
    } else if (status == TE_OK) {
        replace(param, &copies);
    }
    return status;
}

te_tensor *te_tensor_dequantized(te_tensor *t)
{
    if (!te_tensor_is_quantized(t)) return te_tensor_retain(t);
    te_quantized copies = t->storage->quantized->copies;
    copies.dtype = t->dtype;
    return te_dequantize(t->ctx, &copies, copies.side[0].data ? 0 : 1);
}

te_tensor *te_tensor_plain(te_tensor *t)
{
    if (!te_tensor_is_quantized(t)) return te_tensor_retain(t);
    return te_op_apply(t->ctx, "dequantize_parameter", 1, &t);
}
