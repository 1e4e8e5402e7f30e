/* hand_quantize.c - plans of quantizing and dequantizing. */
#include "hand_internal.h"


enum { SQUARE = 128, PITCH = 129, THREADS = 256 };

static te_quantize_place place_of(const te_quantized_side *s)
{
    return (te_quantize_place){.data = s->data,
                               .rows = s->rows,
                               .cols = s->cols,
                               .row_stride = s->row_stride,
                               .col_stride = s->col_stride,
                               .scale_inv = s->scale_inv,
                               .scale_row_stride = s->scale_row_stride,
                               .scale_col_stride = s->scale_col_stride,
                               .amax = s->amax,
                               .amax_stride = s->amax_stride,
                               .rng = {s->rng.seed, s->rng.stream, s->rng.offset, (uint64_t)(uintptr_t)s->rng.base},
                               .line_groups = s->line_groups ? s->line_groups : (s->cols + 15) / 16};
}

te_quantize_args te_cuda_quantize_args(const te_quantize_job *job)
{
    const te_quantizer *q = job->quantizer;
    double overflow = job->dtype == TE_BF16  ? (double)te_bf16_to_f32(0x7f7f)
                      : job->dtype == TE_F16 ? 65504.0
                                             : (double)TE_FLT_MAX;
    return (te_quantize_args){.source = job->source,
                              .rows = job->rows,
                              .cols = job->cols,
                              .source_stride = job->source_stride,
                              .side = {place_of(&job->side[0]), place_of(&job->side[1])},
                              .element = q->element,
                              .scale = q->scale,
                              .block_rows = q->block_rows,
                              .block_cols = q->block_cols,
                              .needs_history = q->needs_history,
                              .replicated = q->replicated,
                              .power_of_two = q->power_of_two,
                              .row_scaled = q->row_scaled,
                              .hadamard = q->hadamard,
                              .stochastic = q->stochastic,
                              .four_over_six = q->four_over_six,
                              .epsilon = (double)q->epsilon,
                              .scale_max = (double)q->scale_max,
                              .factor = (double)job->scale,
                              .overflow = overflow,
                              .given = job->given,
                              .seen = job->seen,
                              .amaxes = job->step == TE_QUANTIZE_BOTH ? NULL : job->amaxes,
                              .measures = job->step == TE_QUANTIZE_MEASURE,
                              .kept = job->kept,
                              .stale = job->stale,
                              .force = job->force};
}

static void add_call(te_cuda_plan *plan, const char *name, const te_quantize_job *job, const te_quantize_args *args,
                     size_t shared)
{
    int64_t tiles = (job->rows + SQUARE - 1) / SQUARE * ((job->cols + SQUARE - 1) / SQUARE);
    te_cuda_call *call = te_cuda_plan_add(plan, TE_CUDA_FILE_QUANTIZE, name, tiles, THREADS, args, sizeof *args);
    call->kernel.dtype[0] = call->kernel.dtype[1] = (uint8_t)job->dtype;
    call->launch.shared = (uint32_t)shared;
}

size_t te_cuda_quantize_lines(const te_quantizer *q)
{
    size_t units = q->block_cols ? (size_t)(SQUARE / q->block_cols) * SQUARE : 0;
    size_t arrays = q->four_over_six ? 3 : q->block_rows > 1 ? 1 : 0;
    return arrays * units * sizeof(float);
}

/* Values, codes and what blocks need. */
static size_t shared_bytes(const te_quantize_job *job)
{
    return TE_CUDA_SQUARE_TILE * te_dtype_size(job->dtype) + TE_CUDA_SQUARE_CODES +
           te_cuda_quantize_lines(job->quantizer);
}

te_status te_cuda_plan_quantize(te_cuda_plan *plan, const te_quantize_job *job)
{
    const te_quantizer *q = job->quantizer;
    te_quantize_args args = te_cuda_quantize_args(job);
    size_t shared = shared_bytes(job);
    te_cuda_plan_open(plan);
    plan->scratch_bytes = 64;
    if (job->step == TE_QUANTIZE_BOTH) add_call(plan, "te_quantize_clear", job, &args, 0);
    if (job->step != TE_QUANTIZE_CONVERT && te_quantizer_measures(q))
        add_call(plan, "te_quantize_measure", job, &args, shared);
    if (job->step != TE_QUANTIZE_MEASURE) add_call(plan, "te_quantize", job, &args, shared);
    return TE_OK;
}

te_status te_cuda_plan_dequantize(te_cuda_plan *plan, const te_quantize_job *job, int side)
{
    te_quantize_args args = te_cuda_quantize_args(job);
    te_cuda_plan_open(plan);
    args.from = side;
    if (job->rows > 0 && job->cols > 0)
        add_call(plan, "te_dequantize", job, &args, SQUARE * PITCH * sizeof(float));
    return TE_OK;
}

/* --- operands of products ----------------------------------------------------------------------------------------- */

te_status te_cuda_plan_decode(te_cuda_plan *plan, const te_view *to, const te_view *from, bool whole)
{
    enum { FULL = 16384 };
    const te_quant *q = from->quant;
    int d = from->ndim;
    te_decode_args args = {.data = from->data,
                           .to = to->data,
                           .rows = from->shape[d - 2],
                           .cols = from->shape[d - 1],
                           .stride = {from->stride[d - 2], from->stride[d - 1]},
                           .to_stride = {to->stride[d - 2], to->stride[d - 1]},
                           .element = q->element,
                           .scale = q->scale,
                           .block = {q->block[0], q->block[1]},
                           .scale_stride = {q->scale_stride[0], q->scale_stride[1]},
                           .scale_inv = q->scale_inv,
                           .amax = q->amax,
                           .amax_stride = {q->amax_stride[0], q->amax_stride[1]},
                           .whole = whole,
                           .scale_max = (double)q->scale_max};
    te_cuda_plan_open(plan);
    int64_t blocks = (args.rows * args.cols + THREADS - 1) / THREADS;
    if (blocks == 0) return TE_OK;
    if (blocks > FULL) blocks = FULL;
    te_cuda_call *call =
        te_cuda_plan_add(plan, TE_CUDA_FILE_QUANTIZE, "te_decode", blocks, THREADS, &args, sizeof args);
    call->kernel.dtype[0] = call->kernel.dtype[1] = (uint8_t)to->dtype;
    return TE_OK;
}

te_status te_cuda_plan_scales(te_cuda_plan *plan, const te_gemm *gemm, float *scales)
{
    const te_quant *quants[2] = {gemm->a.quant, gemm->b.quant};
    te_scales_args args = {.out = scales, .alpha = (double)gemm->alpha, .beta = (double)gemm->beta};
    for (int i = 0; i < 2; i++) {
        const te_quant *q = quants[i];
        if (q && q->scale == TE_SCALE_E4M3) {
            args.factor[i] = q->amax;
            args.scale_max[i] = (double)q->scale_max;
        } else if (q && q->scale == TE_SCALE_F32 && !q->block[0]) {
            args.factor[i] = q->scale_inv;
        }
    }
    te_cuda_plan_open(plan);
    te_cuda_call *call = te_cuda_plan_add(plan, TE_CUDA_FILE_QUANTIZE, "te_product_scales", 1, 1, &args, sizeof args);
    call->kernel.dtype[0] = call->kernel.dtype[1] = TE_F32;
    return TE_OK;
}

te_status te_cuda_plan_arrange(te_cuda_plan *plan, const te_arrange_args *args)
{
    te_cuda_plan_open(plan);
    int64_t blocks = (args->padded_lines * args->padded_blocks + THREADS - 1) / THREADS;
    te_cuda_call *call =
        te_cuda_plan_add(plan, TE_CUDA_FILE_QUANTIZE, "te_arrange_factors", blocks, THREADS, args, sizeof *args);
    call->kernel.dtype[0] = call->kernel.dtype[1] = TE_F32;
    return TE_OK;
}

te_status te_cuda_plan_pad(te_cuda_plan *plan, const te_pad_args *args)
{
    enum { FULL = 16384 };
    te_cuda_plan_open(plan);
    int64_t blocks = (args->padded_lines * args->padded_bytes / 16 + THREADS - 1) / THREADS;
    te_cuda_call *call = te_cuda_plan_add(plan, TE_CUDA_FILE_QUANTIZE, "te_pad_lines", blocks < FULL ? blocks : FULL,
                                          THREADS, args, sizeof *args);
    call->kernel.dtype[0] = call->kernel.dtype[1] = TE_F32;
    return TE_OK;
}

te_status te_cuda_plan_delayed(te_cuda_plan *plan, const te_delayed *tensors, int64_t n, uint64_t *skipped)
{
    te_delayed_args args = {.tensors = tensors, .n = n, .skipped = skipped};
    te_cuda_plan_open(plan);
    te_cuda_call *call =
        te_cuda_plan_add(plan, TE_CUDA_FILE_QUANTIZE, "te_delayed_update", n, THREADS, &args, sizeof args);
    call->kernel.dtype[0] = call->kernel.dtype[1] = TE_F32;
    return TE_OK;
}
