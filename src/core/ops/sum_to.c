/* sum_to.c - adding up: gradients into gradients, and broadcast gradients back to the shape they came from. */
#include "ops.h"

static const te_utility add_into = {.name = "add_into", .inputs = "x", .outputs = "y", .formula = "y = x"};
/* Sums, and the same for a factor of 1, which is bound when a program runs: too late to be simplified away. Adding is
 * then all that they do, which is faster. */
#define SUMS(NAME, KIND)                                                                                            \
    {                                                                                                               \
        {.name = NAME, .inputs = "x", .params = "scale", .outputs = "y", .formula = "y = x * scale", .kind = KIND}, \
        {.name = NAME, .inputs = "x", .outputs = "y", .formula = "y = x", .kind = KIND},                            \
    }

static const te_utility sum_columns[] = SUMS("sum_columns", TE_OUT_COLSUM);
static const te_utility sum_all[] = SUMS("sum_all", TE_OUT_SUM);
static const te_utility scale_elements = {
    .name = "scale_elements", .inputs = "x", .params = "scale", .outputs = "y", .formula = "y = x * scale"};
static const te_utility sum_rows = {.name = "sum_rows",
                                    .inputs = "x",
                                    .params = "scale",
                                    .outputs = "y",
                                    .formula = "y = rowsum(x) * scale",
                                    .kind = TE_OUT_ROW};

static te_operand operand(const te_tensor *t)
{
    te_operand o = {.data = te_tensor_pointer(t), .dtype = t->dtype};
    memcpy(o.stride, t->stride, sizeof o.stride);
    return o;
}

/* Whether float32 may lose digits of what is added up: float64 does not, up to 2^53. */
static bool needs_f64(const te_tensor *dst, const te_run *r, te_operand in, te_operand out)
{
    int64_t each = 1, results = te_tensor_numel(dst);
    if (te_dtype_is_float(in.dtype)) return in.dtype == TE_F64;
    if (out.accumulate) return true;
    for (int i = 0; i < r->ndim; i++) each *= r->shape[i];
    if (results > 0) each /= results;
    return in.dtype == TE_BOOL ? each > 1 << 24 : in.dtype != TE_U8 || each > 1 << 16;
}

static te_status run(te_tensor *dst, const te_utility *utility, int ndim, const int64_t *shape, te_operand in,
                     te_operand out, double scale)
{
    te_context *ctx = dst->ctx;
    te_exec *exec = &dst->storage->device->exec;
    te_program *program = te_utility_program(ctx, utility);
    if (!program) return ctx->status;
    te_run r = {.ndim = ndim ? ndim : 1,
                .shape = {1},
                .inputs = &in,
                .outputs = &out,
                .params = &scale};
    memcpy(r.shape, shape, (size_t)ndim * sizeof *shape);
    r.compute_f64 = out.dtype == TE_F64 || needs_f64(dst, &r, in, out);
    te_tensor_written(dst);
    te_status status = exec->backend->program_run(exec, program, &r, 1);
    return status == TE_OK ? TE_OK : te_fail_exec(ctx, status, exec, NULL);
}

te_status te_add_to(te_tensor *dst, te_tensor *src)
{
    te_operand out = operand(dst);
    out.accumulate = true;
    return run(dst, &add_into, dst->ndim, dst->shape, operand(src), out, 1);
}

/* The first of the last dimensions that are one, elements some step apart. */
static int last_chained(int n, const int64_t *shape, const int64_t *stride)
{
    int first = n - 1;
    while (first > 0 && stride[first - 1] == shape[first] * stride[first]) first--;
    return first;
}

/* The neighbours among the reduced dimensions that are the most elements; false: they are all that are reduced. */
static bool largest_part(const te_tensor *src, const bool *reduced, bool *part)
{
    int64_t most = 0, all = 1;
    for (int first = 0; first < src->ndim; first++) {
        int64_t elements = 1;
        int     end = first;
        for (; end < src->ndim && (reduced[end] || src->shape[end] == 1); end++) elements *= src->shape[end];
        if (elements > most && end > first) {
            most = elements;
            for (int i = 0; i < src->ndim; i++) part[i] = i >= first && i < end && reduced[i];
        }
        if (end > first) all *= elements, first = end;
    }
    return most < all;
}

/* Reduced dimensions that lie apart, some before the others: what is left is small, while putting their elements
 * together would write as much as is read. */
static te_status sum_in_turns(te_tensor *dst, te_tensor *src, const bool *part, double scale, bool accumulate)
{
    /* sums of int64 may leave its range on the way */
    bool wide = src->dtype == TE_F64 || dst->dtype == TE_F64 || src->dtype == TE_I64;
    int64_t shape[TE_MAX_DIMS];
    for (int i = 0; i < src->ndim; i++) shape[i] = part[i] ? 1 : src->shape[i];
    te_dtype dtype = wide ? TE_F64 : te_dtype_is_float(src->dtype) ? TE_F32 : TE_I64;
    te_tensor *some = te_tensor_new(dst->ctx, src->storage->device, dtype, src->ndim, shape);
    te_status status = some ? te_sum_to(some, src, 1, false) : dst->ctx->status;
    if (status == TE_OK) status = te_sum_to(dst, some, scale, accumulate);
    te_tensor_release(some);
    return status;
}

/* The general case: reduced dimensions last, in one row. */
static te_status sum_permuted(te_tensor *dst, te_tensor *src, const bool *reduced, double scale, bool accumulate)
{
    int n = 0, kept = 0, lead = src->ndim - dst->ndim;
    int64_t shape[TE_MAX_DIMS], stride[TE_MAX_DIMS] = {0}, row = 1, out_stride[TE_MAX_DIMS];
    bool any = false;
    for (int i = 0; i < src->ndim; i++) any |= reduced[i];
    if (!any) { /* nothing to add up: every element for itself */
        te_operand same = operand(dst);
        memset(same.stride, 0, sizeof same.stride);
        for (int i = lead; i < src->ndim; i++) same.stride[i] = dst->stride[i - lead];
        same.accumulate = accumulate;
        return run(dst, &scale_elements, src->ndim, src->shape, operand(src), same, scale);
    }
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < src->ndim; i++) {
            if (reduced[i] != (pass == 1)) continue;
            if (pass == 0) out_stride[kept++] = i < lead ? 0 : dst->stride[i - lead];
            if (pass == 1) row *= src->shape[i];
            if (pass == 1 && src->shape[i] == 1) continue;
            shape[n] = src->shape[i];
            stride[n++] = src->stride[i];
        }
    }
    te_operand in = operand(src), out = {.data = te_tensor_pointer(dst), .dtype = dst->dtype, .accumulate = accumulate};
    te_tensor *packed = NULL;
    if (n == kept) shape[n] = stride[n] = 1, n++;
    bool on_host = src->storage->device->exec.backend->host_memory, part[TE_MAX_DIMS] = {false};
    if (on_host && te_tensor_numel(src) && last_chained(n, shape, stride) > kept && largest_part(src, reduced, part))
        return sum_in_turns(dst, src, part, scale, accumulate);
    if (!on_host || last_chained(n, shape, stride) > kept) { /* rows in several pieces are put together */
        te_tensor *moved = te_tensor_alias(src, n, shape, stride, src->offset);
        packed = moved ? te_tensor_contiguous_copy(moved) : NULL;
        te_tensor_release(moved);
        if (!packed) return dst->ctx->status;
        in.data = te_tensor_pointer(packed);
        memcpy(stride, packed->stride, sizeof stride);
    }
    stride[kept] = stride[n - 1];
    shape[kept] = row;
    memcpy(in.stride, stride, sizeof in.stride);
    memcpy(out.stride, out_stride, (size_t)kept * sizeof *out_stride);
    te_status status = run(dst, &sum_rows, kept + 1, shape, in, out, scale);
    te_tensor_release(packed);
    return status;
}

/* Puts the dimensions from `first` on into one, the columns, where none of them is added up and both tensors have their
 * elements one behind the other. */
static bool merge_columns(const te_tensor *dst, const te_tensor *src, const bool *reduced, int first, int64_t *shape,
                          te_operand *in, te_operand *out)
{
    int lead = src->ndim - dst->ndim;
    int64_t columns = 1;
    for (int i = src->ndim - 1; i >= first; i--) {
        if (src->shape[i] == 1) continue;
        if (reduced[i] || src->stride[i] != columns || dst->stride[i - lead] != columns) return false;
        columns *= src->shape[i];
    }
    memcpy(shape, src->shape, (size_t)first * sizeof *shape);
    shape[first] = columns;
    in->stride[first] = out->stride[first] = 1;
    return true;
}

te_status te_sum_to(te_tensor *dst, te_tensor *src, double scale, bool accumulate)
{
    bool reduced[TE_MAX_DIMS];
    int lead = src->ndim - dst->ndim, first_kept = src->ndim, last_kept = -1;
    for (int i = 0; i < src->ndim; i++) {
        reduced[i] = i < lead || (dst->shape[i - lead] == 1 && src->shape[i] != 1);
        if (reduced[i]) continue;
        if (first_kept == src->ndim) first_kept = i;
        last_kept = i;
    }
    te_operand in = operand(src), out = {.data = te_tensor_pointer(dst), .dtype = dst->dtype, .accumulate = accumulate};
    if (last_kept < 0) return run(dst, &sum_all[scale == 1], src->ndim, src->shape, in, out, scale);
    const te_utility *columns = &sum_columns[scale == 1];
    bool only_last = first_kept == src->ndim - 1;
    for (int i = 0; i < src->ndim - 1; i++) only_last &= reduced[i] || src->shape[i] == 1;
    if (only_last) {
        out.stride[src->ndim - 1] = dst->stride[dst->ndim - 1];
        return run(dst, columns, src->ndim, src->shape, in, out, scale);
    }
    int64_t shape[TE_MAX_DIMS];
    if (first_kept > 0 && merge_columns(dst, src, reduced, first_kept, shape, &in, &out))
        return run(dst, columns, first_kept + 1, shape, in, out, scale);
    return sum_permuted(dst, src, reduced, scale, accumulate);
}
