/* tensor.c - life of tensors and storages, shapes. */
#include "tensor.h"

#include "quantized_parameter.h"

#include "autograd.h"
#include "graph.h"
#include "kernels/dtype.h"

#include <stdio.h>

/* --- shapes ------------------------------------------------------------------------------------------------------- */

int64_t te_shape_numel(int ndim, const int64_t *shape, size_t element_size)
{
    int64_t n = 1;
    bool empty = false;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 0) return -1;
        if (shape[i] == 0) {
            empty = true;
            continue;
        }
        if (__builtin_mul_overflow(n, shape[i], &n)) return -1;
    }
    int64_t bytes;
    if (__builtin_mul_overflow(n, (int64_t)element_size, &bytes)) return -1;
    return empty ? 0 : n;
}

const char *te_shape_text(int ndim, const int64_t *shape, char *text, size_t size)
{
    size_t at = (size_t)snprintf(text, size, "{");
    for (int i = 0; i < ndim && at < size; i++)
        at += (size_t)snprintf(text + at, size - at, "%s%lld", i ? "," : "", (long long)shape[i]);
    if (at < size) snprintf(text + at, size - at, "}");
    return text;
}

int te_dim_index(int64_t dim, int ndim)
{
    if (dim < 0) dim += ndim;
    return dim < 0 || dim >= ndim ? -1 : (int)dim;
}

bool te_broadcast(int *ndim, int64_t *shape, int other_ndim, const int64_t *other)
{
    int n = *ndim > other_ndim ? *ndim : other_ndim;
    int64_t result[TE_MAX_DIMS];
    for (int i = 1; i <= n; i++) {
        int64_t a = i <= *ndim ? shape[*ndim - i] : 1, b = i <= other_ndim ? other[other_ndim - i] : 1;
        if (a != b && a != 1 && b != 1) return false;
        result[n - i] = a == 1 ? b : a;
    }
    memcpy(shape, result, (size_t)n * sizeof *shape);
    *ndim = n;
    return true;
}

static void contiguous_strides(int ndim, const int64_t *shape, int64_t *stride)
{
    int64_t step = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        stride[i] = step;
        step *= shape[i] > 0 ? shape[i] : 1;
    }
}

bool te_tensor_contiguous(const te_tensor *t)
{
    int64_t step = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (t->shape[i] == 0) return true;
        if (t->shape[i] != 1 && t->stride[i] != step) return false;
        step *= t->shape[i];
    }
    return true;
}

bool te_tensor_repeats(const te_tensor *t)
{
    bool repeats = false;
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] == 0) return false;
        repeats |= t->shape[i] > 1 && t->stride[i] == 0;
    }
    return repeats;
}

const char *te_tensor_unwritable(const te_tensor *t)
{
    switch (t->storage->read_only) {
    case TE_OF_FILE: return "tensor is read-only: it came from te.from_file";
    case TE_OF_QUANTIZED:
        return "these are the values of a parameter that is stored quantized; write to the parameter, or clone() them";
    default: break;
    }
    return te_tensor_repeats(t) ? "elements share memory, as where a tensor was expanded; write to a clone()" : NULL;
}

bool te_same_shape(const te_tensor *a, const te_tensor *b)
{
    return a->ndim == b->ndim && memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0;
}

/* --- storage ------------------------------------------------------------------------------------------------------ */

/* Structs of a tensor with memory of its own, which count as well: a small tensor is mostly these. */
enum { STRUCTS = sizeof(te_storage) + sizeof(te_block) + sizeof(te_tensor) };

static te_storage *storage_new(te_device *device, size_t bytes)
{
    te_context *ctx = device->ctx;
    if (!te_context_count(ctx, STRUCTS)) return NULL;
    te_storage *s = te_mem_zalloc(&ctx->mem, sizeof *s);
    if (!s) te_fail_memory(ctx, "tensor");
    else s->block = te_device_alloc(device, bytes);
    if (!s || !s->block) {
        te_mem_free(&ctx->mem, s, sizeof *s);
        te_context_discount(ctx, STRUCTS);
        return NULL;
    }
    s->ctx = ctx;
    s->device = device;
    s->data = s->block->ptr;
    s->bytes = bytes;
    s->id = ctx->clock++;
    s->refs = 1;
    if (ctx->capture) te_graph_made(ctx->capture, s);
    te_context_retain(ctx);
    return s;
}

void te_storage_release(te_storage *s)
{
    if (--s->refs > 0) return;
    te_context *ctx = s->ctx;
    te_graph_unmade(s);
    te_tensor_release(s->shadow);
    te_quantized_storage_free(s);
    te_quantized_values_free(s);
    te_exec *exec = &s->device->exec;
    if (s->keyed && exec->backend->forget) exec->backend->forget(exec, s->data, s->bytes);
    if (s->block) {
        te_allocator_free(&s->device->allocator, s->block);
        te_context_discount(ctx, STRUCTS);
    }
    if (s->deleter) s->deleter(s->user);
    te_mem_free(&ctx->mem, s, sizeof *s);
    te_context_unref(ctx);
}

/* --- tensors ------------------------------------------------------------------------------------------------------ */

enum { POOL_LIMIT = 256 }; /* recycled tensor structs kept per context */

void te_tensor_pool_close(te_context *ctx)
{
    while (ctx->free_tensors) {
        te_tensor *t = ctx->free_tensors;
        ctx->free_tensors = t->next;
        te_mem_free(&ctx->mem, t, sizeof *t);
    }
}

static te_tensor *tensor_struct(te_context *ctx)
{
    te_tensor *t = ctx->free_tensors;
    if (t) {
        ctx->free_tensors = t->next;
        ctx->n_free_tensors--;
    } else if (!(t = te_mem_alloc(&ctx->mem, sizeof *t))) {
        te_fail_memory(ctx, "tensor");
        return NULL;
    }
    memset(t, 0, sizeof *t);
    t->ctx = ctx;
    t->refs = 1;
    te_context_retain(ctx);
    return t;
}

static void tensor_free(te_tensor *t)
{
    te_context *ctx = t->ctx;
    te_tensor_release(t->grad);
    te_tensor_release(t->main_grad);
    te_leaf_hooks_release(t);
    if (t->storage) te_storage_release(t->storage);
    if (t->node) te_node_release(t->node);
    if (ctx->n_free_tensors < POOL_LIMIT) {
        t->next = ctx->free_tensors;
        ctx->free_tensors = t;
        ctx->n_free_tensors++;
    } else {
        te_mem_free(&ctx->mem, t, sizeof *t);
    }
    te_context_unref(ctx);
}

te_tensor *te_tensor_retain(te_tensor *t)
{
    if (t) t->refs++;
    return t;
}

/* What a tensor holds may be the last to hold another one; those are queued rather than freed recursively. */
void te_tensor_release(te_tensor *t)
{
    if (!t || --t->refs > 0) return;
    te_context *ctx = t->ctx;
    t->next = ctx->dead_tensors;
    ctx->dead_tensors = t;
    if (ctx->freeing_tensors) return;
    te_context_retain(ctx);
    ctx->freeing_tensors = true;
    while (ctx->dead_tensors) {
        te_tensor *dead = ctx->dead_tensors;
        ctx->dead_tensors = dead->next;
        tensor_free(dead);
    }
    ctx->freeing_tensors = false;
    te_context_unref(ctx);
}

static bool check_shape(te_context *ctx, te_dtype dtype, int ndim, const int64_t *shape)
{
    if (ndim < 0 || ndim > TE_MAX_DIMS) {
        te_fail(ctx, TE_ERROR_ARGUMENT, "a tensor has 0 to %d dimensions, not %d", TE_MAX_DIMS, ndim);
        return false;
    }
    if (ndim && !shape) {
        te_fail(ctx, TE_ERROR_ARGUMENT, "the shape of %d dimensions is NULL", ndim);
        return false;
    }
    if ((unsigned)dtype >= TE_DTYPE_COUNT) {
        te_fail(ctx, TE_ERROR_ARGUMENT, "unknown dtype %d", (int)dtype);
        return false;
    }
    if (te_shape_numel(ndim, shape, te_dtype_size(dtype)) < 0) {
        char text[160];
        te_fail(ctx, TE_ERROR_ARGUMENT, "shape %s of %s is negative or too large",
                te_shape_text(ndim, shape, text, sizeof text), te_dtype_name(dtype));
        return false;
    }
    return true;
}

te_tensor *te_tensor_new(te_context *ctx, te_device *device, te_dtype dtype, int ndim, const int64_t *shape)
{
    if (!device && !(device = te_context_device(ctx, NULL))) return NULL;
    if (!check_shape(ctx, dtype, ndim, shape)) return NULL;
    te_tensor *t = tensor_struct(ctx);
    if (!t) return NULL;
    t->dtype = dtype;
    t->ndim = ndim;
    if (ndim) memcpy(t->shape, shape, (size_t)ndim * sizeof *shape);
    contiguous_strides(ndim, shape, t->stride);
    t->storage = storage_new(device, (size_t)te_shape_numel(ndim, shape, 1) * te_dtype_size(dtype));
    if (!t->storage) {
        te_tensor_release(t);
        return NULL;
    }
    return t;
}

te_tensor *te_tensor_new_unbacked(te_context *ctx, te_device *device, te_dtype dtype, int ndim, const int64_t *shape)
{
    te_tensor *t = tensor_struct(ctx);
    te_storage *s = t ? te_mem_zalloc(&ctx->mem, sizeof *s) : NULL;
    if (!s) {
        te_fail_memory(ctx, "tensor");
        te_tensor_release(t);
        return NULL;
    }
    *s = (te_storage){.ctx = ctx, .device = device, .id = ctx->clock++, .refs = 1};
    te_context_retain(ctx);
    t->storage = s;
    t->dtype = dtype;
    t->ndim = ndim;
    if (ndim) memcpy(t->shape, shape, (size_t)ndim * sizeof *shape);
    contiguous_strides(ndim, shape, t->stride);
    return t;
}

te_tensor *te_tensor_empty(te_context *ctx, te_dtype dtype, int ndim, const int64_t *shape)
{
    return ctx ? te_tensor_new(ctx, NULL, dtype, ndim, shape) : NULL;
}

te_tensor *te_tensor_new_like(const te_tensor *t)
{
    return te_tensor_new(t->ctx, t->storage->device, t->dtype, t->ndim, t->shape);
}

te_tensor *te_tensor_full(te_context *ctx, te_dtype dtype, int ndim, const int64_t *shape, double value)
{
    te_tensor *t = te_tensor_empty(ctx, dtype, ndim, shape);
    if (t && te_tensor_fill(t, value) != TE_OK) {
        te_tensor_release(t);
        return NULL;
    }
    return t;
}

te_tensor *te_tensor_scalar(te_context *ctx, te_device *device, te_dtype dtype, double value)
{
    te_tensor *t = te_tensor_new(ctx, device, dtype, 0, NULL);
    if (t && te_tensor_fill(t, value) != TE_OK) {
        te_tensor_release(t);
        return NULL;
    }
    return t;
}

te_tensor *te_tensor_from_data(te_context *ctx, void *data, te_dtype dtype, int ndim, const int64_t *shape,
                               void (*deleter)(void *user), void *user)
{
    te_device *device = ctx ? te_context_device(ctx, "cpu") : NULL;
    if (!device || !check_shape(ctx, dtype, ndim, shape)) return NULL;
    int64_t n = te_shape_numel(ndim, shape, 1);
    if (!data && n) {
        te_fail(ctx, TE_ERROR_ARGUMENT, "te_tensor_from_data: data is NULL for a tensor of %lld elements",
                (long long)n);
        return NULL;
    }
    if (n && (uintptr_t)data % te_dtype_size(dtype)) {
        te_fail(ctx, TE_ERROR_ARGUMENT, "te_tensor_from_data: data at %p is not aligned for %s", data,
                te_dtype_name(dtype));
        return NULL;
    }
    te_tensor *t = te_tensor_new_unbacked(ctx, device, dtype, ndim, shape);
    if (!t) return NULL;
    t->storage->data = data;
    t->storage->bytes = (size_t)n * te_dtype_size(dtype);
    t->storage->deleter = deleter;
    t->storage->user = user;
    return t;
}

te_tensor *te_tensor_alias(te_tensor *t, int ndim, const int64_t *shape, const int64_t *stride, int64_t offset)
{
    te_tensor *v = tensor_struct(t->ctx);
    if (!v) return NULL;
    v->dtype = t->dtype;
    v->ndim = ndim;
    v->offset = offset;
    if (ndim) memcpy(v->shape, shape, (size_t)ndim * sizeof *shape);
    if (stride)
        memcpy(v->stride, stride, (size_t)ndim * sizeof *stride);
    else
        contiguous_strides(ndim, shape, v->stride);
    v->storage = t->storage;
    v->storage->refs++;
    return v;
}

void *te_tensor_pointer(const te_tensor *t)
{
    if (t->ctx->capture) te_graph_keep(t->ctx->capture, t);
    return t->storage->data ? (char *)t->storage->data + (size_t)t->offset * te_dtype_size(t->dtype) : NULL;
}

te_view te_tensor_view(const te_tensor *t)
{
    te_view v = {.data = te_tensor_pointer(t), .dtype = t->dtype, .ndim = t->ndim};
    memcpy(v.shape, t->shape, sizeof v.shape);
    memcpy(v.stride, t->stride, sizeof v.stride);
    return v;
}

void *te_tensor_data(te_tensor *t)
{
    return t && t->storage->device->exec.backend->host_memory && te_tensor_contiguous(t) ? te_tensor_pointer(t) : NULL;
}

void te_tensor_written(te_tensor *t)
{
    if (!t) return;
    t->storage->version++;
    t->storage->written = t->ctx->clock++;
    if (t->ctx->capture) t->storage->graph_wrote = te_graph_id(t->ctx->capture);
}

uint64_t te_storage_writes(const te_storage *s) { return s->version - s->launches; }

static bool is_whole_f32(const te_tensor *t)
{
    size_t bytes = (size_t)te_tensor_numel(t) * sizeof(float);
    return t->dtype == TE_F32 && t->offset == 0 && te_tensor_contiguous(t) && bytes == t->storage->bytes;
}

void te_tensor_note_squares(te_tensor *t, double squares)
{
    if (!is_whole_f32(t)) return;
    t->storage->squares = squares;
    t->storage->squares_version = t->storage->version;
}

static bool squares_at(const te_tensor *t, uint64_t version, double *squares)
{
    const te_storage *s = t->storage;
    *squares = s->squares;
    return s->squares_version > 0 && s->squares_version == version && is_whole_f32(t);
}

bool te_tensor_squares_known(const te_tensor *t, double *squares)
{
    return squares_at(t, t->storage->version, squares);
}

bool te_tensor_squares_before(const te_tensor *t, double *squares)
{
    return squares_at(t, t->storage->version - 1, squares);
}

te_dtype te_tensor_dtype(const te_tensor *t) { return t ? t->dtype : TE_DTYPE_COUNT; }
int te_tensor_ndim(const te_tensor *t) { return t ? t->ndim : 0; }
const int64_t *te_tensor_shape(const te_tensor *t) { return t ? t->shape : NULL; }
const char *te_tensor_device(const te_tensor *t) { return t ? t->storage->device->name : NULL; }
te_context *te_tensor_context(const te_tensor *t) { return t ? t->ctx : NULL; }

int64_t te_tensor_numel(const te_tensor *t)
{
    int64_t n = t ? 1 : 0;
    for (int i = 0; t && i < t->ndim; i++) n *= t->shape[i];
    return n;
}
