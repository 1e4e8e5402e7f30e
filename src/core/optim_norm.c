/* optim_norm.c - norms of gradients, and clipping by them: with the host, or on the device alone. */
#include "optim_internal.h"

static const te_utility squares_program = {
    .name = "sum_squares", .inputs = "x", .outputs = "y", .formula = "y = x * x", .kind = TE_OUT_SUM};

/* A sum that was found while the tensor was written. */
static bool is_known(te_tensor *t, float *sum)
{
    double squares;
    if (!t->storage->device->exec.backend->host_memory || !te_tensor_squares_known(t, &squares)) return false;
    *sum = (float)squares;
    return true;
}

/* {n} on the tensors' device; NULL on failure. */
static te_tensor *squares_of(te_context *ctx, int n, te_tensor *const *tensors)
{
    te_program *program = te_utility_program(ctx, &squares_program);
    te_device *device = tensors[0]->storage->device;
    int64_t count = n;
    te_tensor *sums = te_tensor_new(ctx, device, TE_F32, 1, &count);
    te_optim_batch b = {.runs = NULL};
    te_status status = program && sums ? te_optim_batch_open(ctx, &b, n, 1, 1) : ctx->status;
    te_tensor **dense = status == TE_OK ? te_mem_zalloc(&ctx->mem, (size_t)n * sizeof *dense) : NULL;
    if (status == TE_OK && !dense) status = te_fail_memory(ctx, "te.sum_squares");
    int runs = 0;
    for (int i = 0; i < n && status == TE_OK; i++) {
        te_operand *o = b.operands + 2 * (size_t)runs;
        float *sum = (float *)te_tensor_pointer(sums) + i;
        if (tensors[i]->storage->device != device) {
            status = te_fail(ctx, TE_ERROR_ARGUMENT, "te.sum_squares: tensors on %s and %s", device->name,
                             tensors[i]->storage->device->name);
        } else if (is_known(tensors[i], sum)) {
            continue;
        } else if (!(dense[i] = te_tensor_contiguous_copy(tensors[i]))) {
            status = ctx->status;
        } else {
            b.runs[runs++].shape[0] = te_tensor_numel(dense[i]);
            o[0] = te_optim_flat(dense[i]);
            o[1] = te_optim_flat(sums);
            o[1].data = sum;
        }
    }
    if (status == TE_OK && runs > 0) {
        status = device->exec.backend->program_run(&device->exec, program, b.runs, runs);
        if (status != TE_OK) te_fail_exec(ctx, status, &device->exec, "sum_squares");
    }
    for (int i = 0; dense && i < n; i++) te_tensor_release(dense[i]);
    if (dense) te_mem_free(&ctx->mem, dense, (size_t)n * sizeof *dense);
    if (b.runs) te_mem_free(&ctx->mem, b.runs, b.bytes);
    if (status == TE_OK) return sums;
    te_tensor_release(sums);
    return NULL;
}

static const te_utility total_program = {
    .name = "total", .inputs = "x", .params = "", .outputs = "y", .formula = "y = x", .kind = TE_OUT_SUM};

static const te_utility clip_program = {
    .name = "clip",
    .inputs = "total loss",
    .params = "scale max",
    .outputs = "norm factor allowed",
    .formula = "norm = sqrt(total) * scale; factor = where(max > 0 and norm > max, scale * max / norm, scale); "
               "allowed = where(norm - norm == 0 and loss - loss == 0, 1, 0)",
};

static te_status run_f64(te_context *ctx, te_device *device, const te_utility *utility, int64_t n, const te_operand *in,
                         const te_operand *out, const double *params)
{
    te_program *program = te_utility_program(ctx, utility);
    te_run run = {.ndim = 1, .shape = {n}, .inputs = in, .outputs = out, .params = params, .compute_f64 = true};
    if (!program) return ctx->status;
    te_status status = device->exec.backend->program_run(&device->exec, program, &run, 1);
    return status == TE_OK ? TE_OK : te_fail_exec(ctx, status, &device->exec, NULL);
}

/* Of float32 squares that are neither infinite nor so small that some of them are lost, and of no wider numbers. */
static bool is_exact(double squares, const te_tensor *t)
{
    int64_t n = te_tensor_numel(t);
    return squares != squares || n == 0 || (t->dtype != TE_F64 && squares < 1e38 && squares > 1e-28 * (double)n);
}

/* One tensor's sum in float64, which takes five times as long: squares of 1e20 are infinite in float32, those of 1e-23
 * are 0. */
static te_status sum_exactly(te_context *ctx, te_tensor *t, double *squares)
{
    te_device *device = t->storage->device;
    te_tensor *dense = te_tensor_contiguous_copy(t), *sum = dense ? te_tensor_new(ctx, device, TE_F64, 0, NULL) : NULL;
    te_status status = sum ? TE_OK : ctx->status;
    if (status == TE_OK) {
        te_operand in = te_optim_flat(dense), out = te_optim_flat(sum);
        status = run_f64(ctx, device, &squares_program, te_tensor_numel(dense), &in, &out, NULL);
    }
    if (status == TE_OK) status = te_tensor_read(sum, TE_F64, squares);
    te_tensor_release(dense);
    te_tensor_release(sum);
    return status;
}

te_status te_sum_squares(te_context *ctx, int n, te_tensor *const *tensors, double *squares)
{
    if (n < 1) return TE_OK;
    te_tensor *sums = squares_of(ctx, n, tensors);
    te_status status = sums ? te_tensor_read(sums, TE_F64, squares) : ctx->status;
    te_tensor_release(sums);
    for (int i = 0; i < n && status == TE_OK; i++)
        if (!is_exact(squares[i], tensors[i])) status = sum_exactly(ctx, tensors[i], &squares[i]);
    return status;
}

/* The sum of all squares, in device memory. Those that float32 has not stay infinite or 0 where the host would have to
 * wait for the device to see them. */
static te_status total_of(te_context *ctx, int n, te_tensor *const *tensors, te_tensor *total)
{
    te_device *device = tensors[0]->storage->device;
    if (device->exec.backend->host_memory) {
        double *squares = te_mem_alloc(&ctx->mem, (size_t)n * sizeof *squares), sum = 0;
        te_status status = squares ? te_sum_squares(ctx, n, tensors, squares) : te_fail_memory(ctx, "clip");
        for (int i = 0; i < n && status == TE_OK; i++) sum += squares[i];
        if (squares) te_mem_free(&ctx->mem, squares, (size_t)n * sizeof *squares);
        return status == TE_OK ? te_tensor_write(total, TE_F64, &sum) : status;
    }
    te_tensor *squares = squares_of(ctx, n, tensors);
    if (!squares) return ctx->status;
    te_operand in = te_optim_flat(squares), out = te_optim_flat(total);
    te_status status = run_f64(ctx, device, &total_program, n, &in, &out, NULL);
    te_tensor_release(squares);
    return status;
}

te_tensor *te_grad_clip(te_context *ctx, int n, te_tensor *const *tensors, const te_tensor *loss, double scale,
                        double max)
{
    if (n < 1) {
        te_fail(ctx, TE_ERROR_ARGUMENT, "a gradient is needed");
        return NULL;
    }
    if (loss && (te_tensor_numel(loss) != 1 || loss->storage->device != tensors[0]->storage->device)) {
        te_fail(ctx, TE_ERROR_ARGUMENT, "loss: expected one element on the gradients' device %s, got %s on %s",
                tensors[0]->storage->device->name, TE_SHAPE_TEXT(loss), loss->storage->device->name);
        return NULL;
    }
    te_device *device = tensors[0]->storage->device;
    te_tensor *total = te_tensor_new(ctx, device, TE_F64, 0, NULL);
    te_tensor *clip = total ? te_tensor_new(ctx, device, TE_F64, 1, (int64_t[]){3}) : NULL;
    te_status status = clip ? total_of(ctx, n, tensors, total) : ctx->status;
    if (status == TE_OK) {
        te_operand in[2] = {te_optim_flat(total), te_optim_flat(loss ? loss : total)},
                   out[3] = {te_optim_flat(clip), te_optim_flat(clip), te_optim_flat(clip)};
        for (int i = 0; i < 3; i++) out[i].data = (double *)out[i].data + i;
        status = run_f64(ctx, device, &clip_program, 1, in, out, (double[]){scale, max});
    }
    te_tensor_release(total);
    if (status == TE_OK) return clip;
    te_tensor_release(clip);
    return NULL;
}
