/* tensor_copy.c - copies and casts on one device; the shadow of a tensor in another dtype; whether two overlap. */
#include "tensor.h"

#include "graph.h"
#include "quantized_parameter.h"

static te_status copy_views(te_device *device, const te_view *dst, const te_view *src)
{
    te_status status = device->exec.backend->copy(&device->exec, dst, src);
    return status == TE_OK ? TE_OK : te_fail_exec(device->ctx, status, &device->exec, "copy");
}

/* Fills and returns fresh, or releases it; NULL passes through. */
static te_tensor *cast_into(te_tensor *t, te_tensor *fresh)
{
    te_tensor *values = fresh ? te_tensor_dequantized(t) : NULL;
    te_status status = TE_ERROR_INTERNAL;
    if (values) {
        te_view dst = te_tensor_view(fresh), src = te_tensor_view(values);
        status = copy_views(t->storage->device, &dst, &src);
    }
    te_tensor_release(values);
    if (status == TE_OK) return fresh;
    te_tensor_release(fresh);
    return NULL;
}

te_tensor *te_tensor_clone_data(te_tensor *t) { return cast_into(t, te_tensor_new_like(t)); }

te_tensor *te_tensor_contiguous_copy(te_tensor *t)
{
    return te_tensor_contiguous(t) ? te_tensor_dequantized(t) : te_tensor_clone_data(t);
}

te_tensor *te_tensor_cast(te_tensor *t, te_dtype dtype)
{
    if (t->dtype == dtype) return te_tensor_dequantized(t);
    return cast_into(t, te_tensor_new(t->ctx, t->storage->device, dtype, t->ndim, t->shape));
}

static bool covers_storage(const te_tensor *t)
{
    return t->offset == 0 && te_tensor_contiguous(t) &&
           (size_t)te_tensor_numel(t) * te_dtype_size(t->dtype) == t->storage->bytes;
}

te_tensor *te_tensor_cast_cached(te_tensor *t, te_dtype dtype)
{
    te_storage *s = t->storage;
    if (t->dtype == dtype || te_tensor_is_quantized(t) || !covers_storage(t)) return te_tensor_cast(t, dtype);
    if (s->shadow && s->shadow->dtype == dtype) {
        if (s->shadow_version != s->version) {
            te_view dst = te_tensor_view(s->shadow), src = te_tensor_view(t);
            memcpy(src.shape, dst.shape, sizeof src.shape); /* both contiguous: the shadow's geometry serves any view */
            memcpy(src.stride, dst.stride, sizeof src.stride);
            src.ndim = dst.ndim;
            if (copy_views(s->device, &dst, &src) != TE_OK) return NULL;
            te_tensor_written(s->shadow);
            s->shadow_version = s->version;
        }
        if (t->ctx->capture) te_graph_keep_shadow(t->ctx->capture, t);
        return te_tensor_alias(s->shadow, t->ndim, t->shape, NULL, 0);
    }
    te_tensor *copy = te_tensor_cast(t, dtype);
    if (!copy) return NULL;
    te_tensor_release(s->shadow);
    s->shadow = te_tensor_retain(copy);
    s->shadow_version = s->version;
    return copy;
}

/* The first byte of a tensor in its storage, and the one behind the last; strides are not negative. */
static void extent_of(const te_tensor *t, int64_t extent[2])
{
    int64_t size = (int64_t)te_dtype_size(t->dtype), last = t->offset;
    for (int i = 0; i < t->ndim; i++) last += (t->shape[i] - 1) * t->stride[i];
    extent[0] = t->offset * size;
    extent[1] = te_tensor_numel(t) > 0 ? (last + 1) * size : extent[0];
}

bool te_tensor_overlaps_otherwise(const te_tensor *out, const te_tensor *in)
{
    int64_t a[2], b[2];
    if (out->storage != in->storage) return false;
    extent_of(out, a);
    extent_of(in, b);
    if (a[1] <= b[0] || b[1] <= a[0]) return false;
    return out->offset != in->offset || out->dtype != in->dtype || out->ndim != in->ndim ||
           memcmp(out->shape, in->shape, (size_t)in->ndim * sizeof *in->shape) != 0 ||
           memcmp(out->stride, in->stride, (size_t)in->ndim * sizeof *in->stride) != 0;
}

/* A write to or from a parameter that is stored quantized goes through its values. */
static te_status copy_quantized(te_tensor *dst, te_tensor *src)
{
    te_tensor *values = te_tensor_dequantized(src), *written = NULL;
    if (values) written = te_tensor_is_quantized(dst) ? te_tensor_new_like(dst) : te_tensor_retain(dst);
    te_status status = written ? te_tensor_copy_data(written, values) : dst->ctx->status;
    if (status == TE_OK && written != dst) status = te_quantized_parameter_store(dst, written);
    te_tensor_release(written);
    te_tensor_release(values);
    return status;
}

/* The part of `fresh` at the offset that has src's shape. */
static te_view part_view(te_tensor *fresh, const int64_t *stride, int64_t offset, const te_view *src)
{
    te_view d = *src;
    d.data = (char *)te_tensor_pointer(fresh) + offset * (int64_t)te_dtype_size(fresh->dtype);
    d.dtype = fresh->dtype;
    memcpy(d.stride, stride, (size_t)src->ndim * sizeof *stride);
    return d;
}

te_status te_tensor_copy_part(te_tensor *fresh, const int64_t *stride, int64_t offset, te_tensor *src)
{
    if (te_tensor_is_quantized(src) || src->storage->device != fresh->storage->device) {
        te_tensor *part = te_tensor_alias(fresh, src->ndim, src->shape, stride, offset);
        te_status  status = part ? te_tensor_copy_data(part, src) : fresh->ctx->status;
        te_tensor_release(part);
        return status;
    }
    te_view s = te_tensor_view(src), d = part_view(fresh, stride, offset, &s);
    return copy_views(fresh->storage->device, &d, &s);
}

te_status te_tensor_copy_parts(te_tensor *fresh, const int64_t *stride, int dim, bool stacked, te_tensor *const *list,
                               int n)
{
    enum { MOST = 64 };
    te_device *device = fresh->storage->device;
    te_view dst[MOST], src[MOST];
    int64_t offset = 0;
    te_status status = TE_OK;
    for (int k = 0, m = 0; k < n && status == TE_OK; k++) {
        te_tensor *t = list[k];
        bool plain = !te_tensor_is_quantized(t) && t->storage->device == device;
        if (device->exec.backend->copy_all && plain) {
            src[m] = te_tensor_view(t);
            dst[m] = part_view(fresh, stride, offset, &src[m]);
            m++;
        } else {
            status = te_tensor_copy_part(fresh, stride, offset, t);
        }
        offset += (stacked ? 1 : t->shape[dim]) * fresh->stride[dim];
        if (status != TE_OK || m == 0 || (m < MOST && k < n - 1)) continue;
        status = device->exec.backend->copy_all(&device->exec, dst, src, m);
        if (status != TE_OK) te_fail_exec(fresh->ctx, status, &device->exec, "copy");
        m = 0;
    }
    return status;
}

te_status te_tensor_copy_data(te_tensor *dst, te_tensor *src)
{
    if (te_tensor_is_quantized(dst) || te_tensor_is_quantized(src)) return copy_quantized(dst, src);
    te_context *ctx = dst->ctx;
    int ndim = dst->ndim;
    int64_t shape[TE_MAX_DIMS];
    memcpy(shape, dst->shape, sizeof shape);
    if (!te_broadcast(&ndim, shape, src->ndim, src->shape) || ndim != dst->ndim ||
        memcmp(shape, dst->shape, (size_t)ndim * sizeof *shape) != 0)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "copy_: cannot broadcast %s to %s", TE_SHAPE_TEXT(src),
                       TE_SHAPE_TEXT(dst));
    const char *why = te_tensor_unwritable(dst);
    if (why) return te_fail(ctx, TE_ERROR_ARGUMENT, "copy_: %s", why);
    if (src->storage->device != dst->storage->device) return te_tensor_copy_across(dst, src);
    if (te_tensor_overlaps_otherwise(dst, src)) {
        te_tensor *before = te_tensor_clone_data(src);
        te_status  status = before ? te_tensor_copy_data(dst, before) : ctx->status;
        te_tensor_release(before);
        return status;
    }
    te_view d = te_tensor_view(dst), s = te_tensor_view(src);
    int lead = dst->ndim - src->ndim;
    for (int i = dst->ndim - 1; i >= 0; i--) {
        bool spread = i < lead || (src->shape[i - lead] == 1 && dst->shape[i] != 1);
        s.stride[i] = spread ? 0 : src->stride[i - lead];
        s.shape[i] = dst->shape[i];
    }
    s.ndim = dst->ndim;
    te_tensor_written(dst);
    return copy_views(dst->storage->device, &d, &s);
}
