/* hand_quantize.c - plans of quantizing and dequantizing. */
#include "hand_internal.h"


/* As in quantize_tile.cu. */
enum { SQUARE = 128, CHUNKS = 16, LINES_PITCH = 132, THREADS = 256 };

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

uint16_t te_cuda_quantize_variant(const te_quantizer *q)
{
    int variant = (int)q->element | (int)q->scale << 2 | TE_VARIANT_ANY | (int)q->four_over_six << TE_VARIANT_FOUR_BITS;
    for (int n = q->block_cols; n > 0; n /= 2) variant += 1 << 4;
    if (q->block_rows > 1) variant |= TE_VARIANT_SQUARE;
    if (q->transposed || !q->has_columnwise) variant |= TE_VARIANT_TRANSPOSED;
    if (q->hadamard) variant |= TE_VARIANT_HADAMARD;
    if (q->stochastic) variant |= TE_VARIANT_STOCHASTIC;
    return (uint16_t)variant;
}

bool te_cuda_quantizes_whole(uint16_t variant)
{
    int element = variant & 3, blocks = variant >> 4 & 15;
    return (element == TE_E4M3 || element == TE_E5M2) && !blocks && !(variant & TE_VARIANT_HADAMARD);
}

static te_cuda_call *add_call(te_cuda_plan *plan, const char *name, te_dtype dtype, int64_t blocks, const void *args,
                              size_t bytes)
{
    te_cuda_call *call = te_cuda_plan_add(plan, TE_CUDA_FILE_QUANTIZE, name, blocks, THREADS, args, bytes);
    call->kernel.dtype[0] = call->kernel.dtype[1] = (uint8_t)dtype;
    return call;
}

static int64_t tiles_of(const te_quantize_job *job)
{
    return (job->rows + SQUARE - 1) / SQUARE * ((job->cols + SQUARE - 1) / SQUARE);
}

size_t te_cuda_quantize_lines(const te_quantizer *q)
{
    size_t blocks = q->block_cols ? (size_t)(SQUARE / q->block_cols) : 0;
    return (CHUNKS + (q->four_over_six ? 2 * blocks : 0)) * LINES_PITCH * sizeof(float);
}

/* Whether the bytes that are there stand for the source, so that nothing but the factor decides. Their amax, which does
 * not depend on it, may be raised to what it is. */
static bool decides(const te_quantize_job *job)
{
    return job->step == TE_QUANTIZE_BOTH && job->kept && !job->force && !job->stale &&
           !te_quantizer_measures(job->quantizer);
}

/* Whether something has to be 0 before tiles raise it, or to be decided before they are looked at. */
static bool wants_clear(const te_quantize_job *job)
{
    const te_quantizer *q = job->quantizer;
    bool raised = q->needs_history && (job->side[0].amax || job->side[1].amax);
    return job->step == TE_QUANTIZE_BOTH && !decides(job) && (te_quantizer_measures(q) || raised || job->kept);
}

te_status te_cuda_plan_quantize(te_cuda_plan *plan, const te_quantize_job *job)
{
    const te_quantizer *q = job->quantizer;
    te_quantize_args args = te_cuda_quantize_args(job);
    bool measures = job->step != TE_QUANTIZE_CONVERT && te_quantizer_measures(q), clears = wants_clear(job);
    uint16_t variant = te_cuda_quantize_variant(q);
    args.decides = decides(job);
    te_cuda_plan_open(plan);
    plan->scratch_bytes = clears ? 64 : 0;
    if (clears)
        add_call(plan, "te_quantize_clear", TE_F32, q->row_scaled ? te_blocks_for(job->rows) : 1, &args, sizeof args);
    if (measures)
        add_call(plan, "te_quantize_measure", job->dtype, tiles_of(job), &args, sizeof args)->kernel.dim[0] = variant;
    if (job->step == TE_QUANTIZE_MEASURE) return TE_OK;
    te_cuda_call *call = add_call(plan, "te_quantize", job->dtype, tiles_of(job), &args, sizeof args);
    call->kernel.dim[0] = variant;
    call->launch.shared = (uint32_t)(TE_CUDA_SQUARE_CODES + te_cuda_quantize_lines(q));
    return TE_OK;
}

te_status te_cuda_plan_dequantize(te_cuda_plan *plan, const te_quantize_job *job, int side)
{
    te_quantize_args args = te_cuda_quantize_args(job);
    te_cuda_plan_open(plan);
    args.from = side;
    if (job->rows > 0 && job->cols > 0)
        add_call(plan, "te_dequantize", job->dtype, tiles_of(job), &args, sizeof args)->launch.shared =
            SQUARE * (SQUARE + 1) * sizeof(float);
    return TE_OK;
}

/* --- operands of products ----------------------------------------------------------------------------------------- */

/* log2 of a block's extent; one factor for all: what every index is below. */
static int64_t shift_of(int block)
{
    int64_t shift = 0;
    while (block > 0 && block >> shift > 1) shift++;
    return block > 0 ? shift : 63;
}

/* Lines run along whichever dimension the result has its neighbours in. */
static te_decode_args decode_args(const te_view *to, const te_view *from, bool whole)
{
    const te_quant *q = from->quant;
    int last = from->ndim - 1;
    bool down = to->stride[last - 1] == 1 && to->shape[last - 1] > 1;
    int line = down ? last : last - 1, place = down ? last - 1 : last;
    te_decode_args args = {.data = from->data,
                           .to = to->data,
                           .lines = from->shape[line],
                           .places = from->shape[place],
                           .stride = {from->stride[line], from->stride[place]},
                           .to_stride = {to->stride[line], to->stride[place]},
                           .element = q->element,
                           .scale = q->scale,
                           .shift = {shift_of(q->block[down]), shift_of(q->block[!down])},
                           .scale_stride = {q->scale_stride[down], q->scale_stride[!down]},
                           .scale_inv = q->scale_inv,
                           .amax = q->amax,
                           .amax_stride = {q->amax_stride[down], q->amax_stride[!down]},
                           .scaled = q->scale != TE_SCALE_F32 || q->block[0] || whole,
                           .whole = whole,
                           .scale_max = (double)q->scale_max};
    while (args.across_bits < 8 && args.places > (int64_t)8 << args.across_bits) args.across_bits++;
    return args;
}

te_status te_cuda_plan_decode(te_cuda_plan *plan, const te_view *to, const te_view *from, bool whole)
{
    enum { LINES = 4, MOST_DOWN = 16384, MOST_ACROSS = 65535 };
    te_decode_args args = decode_args(to, from, whole);
    int64_t lines = (int64_t)LINES * (THREADS >> args.across_bits), places = (int64_t)8 << args.across_bits;
    int64_t down = (args.lines + lines - 1) / lines, across = (args.places + places - 1) / places;
    te_cuda_plan_open(plan);
    if (down == 0 || across == 0) return TE_OK;
    add_call(plan, "te_decode", to->dtype, down < MOST_DOWN ? down : MOST_DOWN, &args, sizeof args)->launch.grid[1] =
        (uint32_t)(across < MOST_ACROSS ? across : MOST_ACROSS);
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
