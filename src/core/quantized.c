/* quantized.c - the tensors of a quantized tensor, and the way there and back. */
#include "quantized.h"

#include "op.h"
#include "quantized_parameter.h"

void te_quantized_close(te_quantized *quantized)
{
    for (int s = 0; s < 2; s++) {
        te_tensor_release(quantized->side[s].data);
        te_tensor_release(quantized->side[s].scale_inv);
        te_tensor_release(quantized->side[s].amax);
        quantized->side[s] = (te_quantized_part){NULL, NULL, NULL};
    }
    te_tensor_release(quantized->factor);
    quantized->factor = NULL;
}

void te_quantized_share(const te_quantized *from, bool rowwise, bool columnwise, te_quantized *to)
{
    bool wanted[2] = {rowwise, columnwise};
    *to = *from;
    to->factor = NULL;
    for (int s = 0; s < 2; s++) {
        te_quantized_part *part = &to->side[s];
        if (!wanted[s]) *part = (te_quantized_part){NULL, NULL, NULL};
        if (part->data) te_tensor_retain(part->data);
        if (part->scale_inv) te_tensor_retain(part->scale_inv);
        if (part->amax) te_tensor_retain(part->amax);
    }
}

bool te_quantized_may_complete(const te_quantized *z)
{
    const te_quantizer *q = &z->quantizer;
    return z->side[1].data || (z->side[0].data && q->has_columnwise && q->transposed && !q->block_rows &&
                               !q->hadamard && q->scale == TE_SCALE_F32 && q->element != TE_E2M1);
}

te_status te_quantized_complete(te_quantized *z)
{
    te_tensor *rowwise = z->side[0].data;
    if (z->side[1].data) return TE_OK;
    int64_t cols = z->ndim ? z->shape[z->ndim - 1] : 1, rows = 1;
    for (int i = 0; i + 1 < z->ndim; i++) rows *= z->shape[i];
    const int64_t shape[] = {cols, rows}, stride[] = {1, cols};
    te_tensor *turned = te_tensor_alias(rowwise, 2, shape, stride, rowwise->offset);
    te_tensor *data = turned ? te_tensor_clone_data(turned) : NULL;
    te_tensor_release(turned);
    if (!data) return rowwise->ctx->status;
    z->side[1] = (te_quantized_part){.data = data, .scale_inv = te_tensor_retain(z->side[0].scale_inv)};
    return TE_OK;
}

static void matrix_of(int ndim, const int64_t *shape, int64_t *rows, int64_t *cols)
{
    *rows = 1;
    *cols = ndim ? shape[ndim - 1] : 1;
    for (int i = 0; i < ndim - 1; i++) *rows *= shape[i];
}

/* The stored matrix in the source's shape, or as it is. */
static int data_shape(const te_quantized *z, int side, const te_quantized_layout *l, int64_t *shape)
{
    if (side == 1 && z->quantizer.transposed) {
        shape[0] = l->data_rows;
        shape[1] = l->data_bytes;
        return 2;
    }
    memcpy(shape, z->shape, sizeof z->shape);
    if (z->ndim) shape[z->ndim - 1] = l->data_bytes;
    return z->ndim;
}

/* The factors of a side; `turned`: one line's after the other's, block by block. */
static te_tensor *make_factors(te_device *device, const te_quantized_layout *l, bool turned)
{
    const int64_t *shape = l->scale_shape;
    if (!turned) return te_tensor_new(device->ctx, device, l->scale_dtype, l->scale_ndim, shape);
    te_tensor *across = te_tensor_new(device->ctx, device, l->scale_dtype, 2, (int64_t[]){shape[1], shape[0]});
    te_tensor *factors = across ? te_tensor_alias(across, 2, shape, (int64_t[]){1, shape[0]}, 0) : NULL;
    te_tensor_release(across);
    return factors;
}

static te_status make_part(te_quantized *z, te_device *device, int side, const te_quantized_layout *l, bool passing)
{
    te_context *ctx = device->ctx;
    te_quantized_part *part = &z->side[side];
    const te_quantizer *q = &z->quantizer;
    int64_t shape[TE_MAX_DIMS];
    int ndim = data_shape(z, side, l, shape);
    bool shared = side == 1 && z->side[0].data && !q->block_rows; /* one factor serves both */
    passing &= !device->exec.backend->host_memory;
    part->data = te_tensor_new(ctx, device, l->data_dtype, ndim, shape);
    if (!part->data) return ctx->status;
    bool turned = passing && q->scale == TE_SCALE_F32 && q->block_rows == 1 && l->scale_row_stride != 1;
    part->scale_inv = shared ? te_tensor_retain(z->side[0].scale_inv) : make_factors(device, l, turned);
    if (!part->scale_inv) return ctx->status;
    if (l->amaxes < 0 || (passing && q->needs_history)) return TE_OK;
    part->amax = shared ? te_tensor_retain(z->side[0].amax) : te_tensor_new(ctx, device, TE_F32, 1, &l->amaxes);
    return part->amax ? TE_OK : ctx->status;
}

/* Strides of the factors are their tensor's, which has the layout's shape. */
static te_quantized_side bind_side(const te_quantized_part *part, const te_quantized_layout *l)
{
    te_quantized_side side = {.rows = l->rows, .cols = l->cols};
    if (!part->data) return side;
    side.data = te_tensor_pointer(part->data);
    side.row_stride = l->row_stride;
    side.col_stride = l->col_stride;
    side.scale_inv = te_tensor_pointer(part->scale_inv);
    side.scale_row_stride = l->scale_row_stride;
    side.scale_col_stride = l->scale_col_stride;
    if (l->scale_ndim == 2 && !te_tensor_contiguous(part->scale_inv)) {
        side.scale_row_stride = part->scale_inv->stride[0];
        side.scale_col_stride = part->scale_inv->stride[1];
    }
    side.amax = part->amax ? te_tensor_pointer(part->amax) : NULL;
    side.amax_stride = l->amaxes != 1;
    return side;
}

static te_quantize_job bind(const te_quantized *z)
{
    te_quantize_job job = {.quantizer = &z->quantizer, .dtype = z->dtype};
    matrix_of(z->ndim, z->shape, &job.rows, &job.cols);
    for (int s = 0; s < 2; s++) {
        te_quantized_layout l = te_quantizer_layout(&z->quantizer, s, job.rows, job.cols);
        job.side[s] = bind_side(&z->side[s], &l);
    }
    return job;
}

/* Side 1 takes its numbers after those of side 0, which are counted whether or not it is made: the bytes of a direction
 * do not depend on whether the other one was wanted. */
static void draw(te_context *ctx, te_quantize_job *job, const uint64_t *seed)
{
    uint64_t groups = te_quantize_groups(&job->side[0]);
    te_rng rng =
        seed ? (te_rng){.seed = *seed} : te_context_draw(ctx, 4 * (groups + te_quantize_groups(&job->side[1])));
    job->side[0].rng = job->side[1].rng = rng;
    job->side[1].rng.offset += groups;
}

/* Whether the rows of the matrix are evenly spaced and their elements adjacent; *step: from row to row, of a contiguous
 * copy where they are not. */
static bool row_step(const te_tensor *t, int64_t *step)
{
    int64_t width = t->ndim ? t->shape[t->ndim - 1] : 1, rows = 1;
    *step = width;
    if (te_tensor_contiguous(t)) return true;
    if (width > 1 && t->stride[t->ndim - 1] != 1) return false;
    for (int i = t->ndim - 2; i >= 0; i--) {
        if (t->shape[i] == 1) continue;
        if (rows > 1 && t->stride[i] != rows * *step) return *step = width, false;
        if (rows == 1) *step = t->stride[i];
        rows *= t->shape[i];
    }
    return true;
}

static te_status check_source(const te_tensor *source, const te_quantizer *q, const te_quantize_options *options)
{
    te_context *ctx = source->ctx;
    te_status status = te_quantizer_check(ctx, q);
    if (status != TE_OK) return status;
    if (source->dtype != TE_F32 && source->dtype != TE_BF16 && source->dtype != TE_F16)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te.quantize: %s; convert to float32, bfloat16 or float16 first",
                       te_dtype_name(source->dtype));
    if (!options->want[0] && !options->want[1])
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te.quantize: neither rowwise nor columnwise is wanted");
    if (options->want[1] && !q->has_columnwise)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te.quantize: columnwise: this quantizer has no column-wise form");
    if (q->needs_history && !options->factor && !te_is_factor(options->scale))
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "te.quantize: scale: %g; a factor must be positive and finite, and its inverse too",
                       (double)options->scale);
    return TE_OK;
}

/* On the host the factor is read here and amaxes are compared; elsewhere the kernel does both. */
static void bind_history(te_quantize_job *job, const te_quantize_options *options, bool host_memory)
{
    job->scale = options->scale;
    if (options->factor && host_memory) job->scale = *(float *)te_tensor_pointer(options->factor);
    if (host_memory) return;
    if (options->factor) job->given = te_tensor_pointer(options->factor);
    if (options->seen) job->seen = te_tensor_pointer(options->seen);
    if (options->kept) job->kept = te_tensor_pointer(options->kept);
    job->stale = options->stale;
    job->force = !options->again && !options->stale;
}

static te_tensor *amax_of(const te_quantized *z) { return z->side[0].amax ? z->side[0].amax : z->side[1].amax; }

static void raise_on_host(const te_quantized *z, te_tensor *seen)
{
    float now = *(float *)te_tensor_pointer(amax_of(z)), *most = te_tensor_pointer(seen);
    if (now > *most) *most = now;
}

te_status te_quantized_count(const te_quantized *z, te_tensor *seen)
{
    te_context *ctx = seen->ctx;
    if (seen->storage->device->exec.backend->host_memory) {
        raise_on_host(z, seen);
        return TE_OK;
    }
    te_tensor *first = te_tensor_alias(seen, 1, (int64_t[]){1}, (int64_t[]){1}, seen->offset), *larger = NULL;
    te_arg args[2] = {{.kind = TE_ARG_TENSOR, .as.tensor = first}, {.kind = TE_ARG_TENSOR, .as.tensor = amax_of(z)}};
    te_status status = first ? te_op_run(ctx, te_op_find(ctx, "maximum"), args, 2, &larger, 1) : ctx->status;
    if (status == TE_OK) status = te_tensor_copy_data(first, larger);
    te_tensor_release(larger);
    te_tensor_release(first);
    return status;
}

te_status te_quantize(te_tensor *source, const te_quantizer *q, const te_quantize_options *options,
                      te_quantized *result)
{
    if (!options->again) memset(result, 0, sizeof *result);
    te_status status = check_source(source, q, options);
    if (status != TE_OK) return status;
    te_device *device = source->storage->device;
    int64_t rows, cols, step;
    matrix_of(source->ndim, source->shape, &rows, &cols);
    bool as_it_is = row_step(source, &step) && !te_tensor_is_quantized(source);
    te_tensor *read = as_it_is ? te_tensor_retain(source) : te_tensor_contiguous_copy(source);
    if (!read) return source->ctx->status;
    if (!options->again)
        status = te_quantized_open(device, q, source->dtype, source->ndim, source->shape, options->want,
                                   options->passing, result);
    if (status == TE_OK) {
        te_quantize_job job = bind(result);
        job.source = te_tensor_pointer(read);
        job.source_stride = step;
        bool host_memory = device->exec.backend->host_memory;
        bind_history(&job, options, host_memory);
        if (q->stochastic) draw(source->ctx, &job, options->seed);
        device->exec.message[0] = 0;
        status = device->exec.backend->quantize(&device->exec, &job);
        if (status != TE_OK) te_fail_exec(source->ctx, status, &device->exec, "quantize");
        if (status == TE_OK && options->seen && host_memory) raise_on_host(result, options->seen);
    }
    te_tensor_release(read);
    if (status != TE_OK) te_quantized_close(result);
    return status;
}

/* --- in stripes --------------------------------------------------------------------------------------------------- */

te_status te_quantized_open(te_device *device, const te_quantizer *q, te_dtype dtype, int ndim, const int64_t *shape,
                            const bool want[2], bool passing, te_quantized *result)
{
    int64_t rows, cols;
    te_status status = TE_OK;
    matrix_of(ndim, shape, &rows, &cols);
    *result = (te_quantized){.quantizer = *q, .dtype = dtype, .ndim = ndim};
    memcpy(result->shape, shape, (size_t)ndim * sizeof *shape);
    for (int s = 0; s < 2 && status == TE_OK; s++) {
        te_quantized_layout l = te_quantizer_layout(q, s, rows, cols);
        if (want[s]) status = make_part(result, device, s, &l, passing);
    }
    if (status != TE_OK) te_quantized_close(result);
    return status;
}

/* The part of a side that rows from `row` on of the source go to. */
static te_quantized_side from_row(const te_quantizer *q, te_quantized_side side, bool columnwise, int64_t row,
                                  int64_t n)
{
    static const int64_t factor[] = {4, 1, 1};
    int64_t block = columnwise ? q->block_cols : q->replicated ? 1 : q->block_rows;
    int64_t factors = block ? row / block * (columnwise ? side.scale_col_stride : side.scale_row_stride) : 0;
    if (columnwise)
        side.cols = q->hadamard ? (n + 15) / 16 * 16 : n;
    else
        side.rows = n;
    int64_t elements = q->element == TE_E2M1 ? 2 : 1; /* to a byte */
    side.data += columnwise ? row * side.col_stride / elements : row * side.row_stride;
    if (!columnwise && side.amax) side.amax += row * side.amax_stride;
    side.scale_inv = (char *)side.scale_inv + factors * factor[q->scale];
    return side;
}

static te_quantize_job bind_rows(const te_quantized *z, int64_t row, int64_t n, void *source)
{
    te_quantize_job job = bind(z);
    job.rows = n;
    job.source = source;
    job.source_stride = job.cols;
    for (int s = 0; s < 2; s++)
        if (job.side[s].data) job.side[s] = from_row(&z->quantizer, job.side[s], s == 1, row, n);
    return job;
}

static te_tensor *data_of(const te_quantized *z) { return z->side[0].data ? z->side[0].data : z->side[1].data; }

static te_status run_rows(const te_quantized *z, const te_quantize_job *job)
{
    te_tensor *data = data_of(z);
    te_exec *exec = &data->storage->device->exec;
    te_status status = exec->backend->quantize(exec, job);
    return status == TE_OK ? TE_OK : te_fail_exec(data->ctx, status, exec, "quantize");
}

te_status te_measure_rows(const te_quantized *z, int64_t row, int64_t n, void *source, float *amax)
{
    te_quantize_job job = bind_rows(z, row, n, source);
    job.step = TE_QUANTIZE_MEASURE;
    job.amaxes = amax;
    return run_rows(z, &job);
}

te_status te_quantize_rows(te_quantized *z, int64_t row, int64_t n, void *source, float scale, float *amax)
{
    te_quantize_job job = bind_rows(z, row, n, source);
    bool measured = te_quantizer_measures(&z->quantizer);
    job.scale = scale;
    if (measured) job.step = TE_QUANTIZE_CONVERT;
    if (measured) job.amaxes = amax;
    if (z->quantizer.stochastic) draw(data_of(z)->ctx, &job, NULL);
    float *seen = measured ? NULL : job.side[0].amax ? job.side[0].amax : job.side[1].amax;
    te_status status = run_rows(z, &job);
    if (status != TE_OK || !seen) return status;
    *amax = *seen > *amax ? *seen : *amax;
    *seen = *amax;
    return TE_OK;
}

te_status te_quantize_prepare(const te_quantized *z, int64_t n)
{
    te_quantize_job job = bind_rows(z, 0, n, NULL);
    job.step = TE_QUANTIZE_PREPARE;
    return run_rows(z, &job);
}

te_quantize_job te_quantized_job(const te_quantized *z, te_tensor *factor, te_tensor *seen)
{
    te_quantize_job job = bind(z);
    if (factor) job.given = te_tensor_pointer(factor);
    if (seen) job.seen = te_tensor_pointer(seen);
    if (z->quantizer.stochastic) draw(data_of(z)->ctx, &job, NULL);
    return job;
}

te_view te_quantized_operand(const te_quantized *quantized, int side, bool transposed, te_quant *quant)
{
    int64_t rows, cols;
    matrix_of(quantized->ndim, quantized->shape, &rows, &cols);
    te_quantized_layout l = te_quantizer_layout(&quantized->quantizer, side, rows, cols);
    te_quantized_side bound = bind_side(&quantized->side[side], &l);
    return te_quantized_view(&quantized->quantizer, &bound, transposed, quant);
}

/* --- back --------------------------------------------------------------------------------------------------------- */

static bool has_shape(const te_tensor *t, const te_device *device, te_dtype dtype, int ndim, const int64_t *shape)
{
    bool same = t && t->dtype == dtype && t->ndim == ndim && te_tensor_contiguous(t) && t->storage->device == device;
    for (int i = 0; i < ndim && same; i++) same = t->shape[i] == shape[i];
    return same;
}

static te_status refuse_part(te_context *ctx, const char *who, const char *direction, const char *part,
                             const te_tensor *given, te_dtype dtype, int ndim, const int64_t *shape)
{
    const char *wanted = te_shape_text(ndim, shape, (char[160]){0}, 160);
    if (!given)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "%s: %s%s: expected %s %s, got none", who, direction, part,
                       te_dtype_name(dtype), wanted);
    return te_fail(ctx, TE_ERROR_ARGUMENT, "%s: %s%s: expected %s %s, contiguous, got %s %s", who, direction, part,
                   te_dtype_name(dtype), wanted, te_dtype_name(given->dtype), TE_SHAPE_TEXT(given));
}

/* The parts may come from a file or from a script: they are believed only where they have the quantizer's shapes. */
te_status te_quantized_check(te_context *ctx, const char *who, const te_quantized *z, int side)
{
    const te_quantized_part *part = &z->side[side];
    int64_t rows, cols, shape[TE_MAX_DIMS];
    te_status status = te_quantizer_check(ctx, &z->quantizer);
    if (status != TE_OK) return status;
    const char *direction = side ? "columnwise" : "rowwise";
    if (te_shape_numel(z->ndim, z->shape, sizeof(double)) < 0)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "%s: shape: %s is no shape", who,
                       te_shape_text(z->ndim, z->shape, (char[160]){0}, 160));
    if (!part->data) return te_fail(ctx, TE_ERROR_ARGUMENT, "%s: there is no %s data", who, direction);
    const te_device *device = part->data->storage->device;
    matrix_of(z->ndim, z->shape, &rows, &cols);
    te_quantized_layout l = te_quantizer_layout(&z->quantizer, side, rows, cols);
    int ndim = data_shape(z, side, &l, shape);
    if (!has_shape(part->data, device, l.data_dtype, ndim, shape))
        return refuse_part(ctx, who, direction, "_data", part->data, l.data_dtype, ndim, shape);
    if (!has_shape(part->scale_inv, device, l.scale_dtype, l.scale_ndim, l.scale_shape))
        return refuse_part(ctx, who, direction, "_scale_inv", part->scale_inv, l.scale_dtype, l.scale_ndim,
                           l.scale_shape);
    bool wanted = z->quantizer.scale == TE_SCALE_E4M3 || (part->amax && l.amaxes >= 0);
    if (wanted && !has_shape(part->amax, device, TE_F32, 1, &l.amaxes))
        return refuse_part(ctx, who, direction, " amax", part->amax, TE_F32, 1, &l.amaxes);
    return TE_OK;
}

te_tensor *te_dequantize(te_context *ctx, const te_quantized *quantized, int side)
{
    if (te_quantized_check(ctx, "te.dequantize", quantized, side) != TE_OK) return NULL;
    te_device *device = quantized->side[side].data->storage->device;
    te_tensor *result = te_tensor_new(ctx, device, quantized->dtype, quantized->ndim, quantized->shape);
    if (!result) return NULL;
    te_quantize_job job = bind(quantized);
    job.source = te_tensor_pointer(result);
    job.source_stride = job.cols;
    device->exec.message[0] = 0;
    te_status status = device->exec.backend->dequantize(&device->exec, &job, side);
    if (status == TE_OK) return result;
    te_fail_exec(ctx, status, &device->exec, "dequantize");
    te_tensor_release(result);
    return NULL;
}
