/* hand_attention.c - plans of attention forward and backward, and of what stands around cuDNN's. */
#include "hand_internal.h"

#include "kernels/philox.h"

enum {
    THREADS = 128,
    SHARED_BYTES = 96 << 10, /* that every device has for a block which asks for them */
    ROWS_PER_BLOCK = 4,
    MMA_ROWS = 64,
    MMA_MAX_DIM = 128
};

/* --- arguments --------------------------------------------------------------------------------------------------- */

static te_attention_args args_for(const te_attention *a)
{
    int64_t open = a->q.shape[2] + a->k.shape[2];
    te_attention_args args = {.q = te_cuda_view_of(&a->q), .k = te_cuda_view_of(&a->k), .v = te_cuda_view_of(&a->v),
                              .out = te_cuda_view_of(&a->out), .lse = te_cuda_view_of(&a->lse),
                              .bias = te_cuda_view_of(&a->bias), .sinks = a->sinks.data,
                              .cu_q = a->cu_seqlens_q, .cu_kv = a->cu_seqlens_kv,
                              .n_seqs = a->n_seqs, .bottom_right = a->bottom_right, .scale = a->scale};
    args.left = a->window_left < 0 || a->window_left > open ? open : a->window_left;
    args.right = a->window_right < 0 || a->window_right > open ? open : a->window_right;
    args.lse_wide = a->lse.dtype == TE_F64;
    args.dropout = a->dropout > 0;
    args.kept_scale = a->dropout < 1 ? 1 / (1 - a->dropout) : 0;
    args.scale_f32 = (float)args.scale;
    args.kept_scale_f32 = (float)args.kept_scale;
    args.threshold = te_rng_threshold(a->dropout);
    args.rng[0] = a->rng.seed;
    args.rng[1] = a->rng.stream;
    args.rng[2] = a->rng.offset;
    args.rng[3] = (uint64_t)(uintptr_t)a->rng.base;
    return args;
}

/* Tiles per head of so many rows: of a batch entry, or of packed extents, in which each part may add
 * one (te_sequence_of). */
static int64_t tiles_of(const te_attention *a, int64_t rows, int tile)
{
    return a->cu_seqlens_q ? rows / tile + a->n_seqs + 2 : (rows + tile - 1) / tile;
}

/* A block for each tile of each head. */
static te_status count_blocks(te_exec *exec, const te_attention *a, int64_t tiles, int64_t heads, int64_t *blocks)
{
    int64_t others = heads * (a->cu_seqlens_q ? 1 : a->q.shape[0]);
    if (others > 0 && tiles > INT32_MAX / others)
        return te_exec_fail(exec, TE_ERROR_UNSUPPORTED,
                            "attention: %lld tiles for %lld heads of all sequences; less than 2^31 together are "
                            "supported",
                            (long long)tiles, (long long)others);
    *blocks = tiles * others;
    return TE_OK;
}

/* Numbers in shared memory for tiles of that many rows: see te_forward_at and te_backward_at. Rows are of whole units
 * of 16 bytes, and where they are read side by side of an odd number. */
static int64_t shared_numbers(const te_attention *a, int64_t tile, bool backward)
{
    int64_t unit = a->q.dtype == TE_F64 ? 2 : 4, dim = (a->q.shape[3] + unit - 1) / unit,
            dim_v = (a->v.shape[3] + unit - 1) / unit, pitch = (dim | 1) * unit, pitch_v = (dim_v | 1) * unit;
    if (backward) return tile * (2 * pitch + 2 * pitch_v + (dim + dim_v) * unit + 2 * tile + 4) + 1;
    return tile * (2 * (pitch > pitch_v ? pitch : pitch_v) + dim_v * unit + tile + 5);
}

static int tile_rows(const te_attention *a, bool backward)
{
    int64_t size = a->q.dtype == TE_F64 ? 8 : 4;
    int     tile = 32;
    while (tile > 1 && shared_numbers(a, tile, backward) * size > SHARED_BYTES) tile /= 2;
    return tile;
}

/* --- kinds of kernels -------------------------------------------------------------------------------------------- */

/* Tensor cores take 16-bit types and heads that fit registers. */
static bool uses_mma(const te_attention *a)
{
    bool half = a->q.dtype == TE_BF16 || a->q.dtype == TE_F16;
    return half && a->q.shape[3] > 0 && a->q.shape[3] <= MMA_MAX_DIM && a->v.shape[3] > 0 &&
           a->v.shape[3] <= MMA_MAX_DIM;
}

/* Elements of the rows of all these operands that may be loaded at a time. The stride of an extent of 1 is any. */
static int unit_of(const te_view *const *views, int n)
{
    int unit = 8;
    for (int i = 0; i < n; i++) {
        int64_t steps = views[i]->shape[3];
        for (int d = 0; d < 3; d++)
            if (views[i]->shape[d] > 1) steps |= views[i]->stride[d];
        while (unit > 1 && (steps % unit != 0 || (uintptr_t)views[i]->data % (2 * (size_t)unit) != 0)) unit /= 2;
    }
    return unit;
}

static uint8_t bias_of(const te_attention *a)
{
    return te_view_present(&a->bias) ? (uint8_t)(1 + a->bias.dtype) : 0;
}

/* g: NULL in forward. */
static te_cuda_kernel kernel_for(const te_attention *a, const te_attention_grad *g)
{
    te_cuda_kernel kernel = {.file = TE_CUDA_FILE_ATTENTION, .wide = a->q.dtype == TE_F64, .third = bias_of(a)};
    const te_view *forward[] = {&a->q, &a->k, &a->v, &a->out};
    kernel.dtype[0] = kernel.dtype[1] = (uint8_t)a->q.dtype;
    kernel.vector = (uint16_t)tile_rows(a, g != NULL);
    if (!uses_mma(a)) return kernel;
    kernel.vector = (uint16_t)unit_of(forward, 4);
    if (g) {
        const te_view *backward[] = {&a->q, &a->k, &a->v, &a->out, &g->dout, &g->dq, &g->dk, &g->dv};
        kernel.vector = (uint16_t)unit_of(backward, 8);
    }
    kernel.dim[0] = (uint16_t)((a->q.shape[3] + 15) / 16 * 16);
    kernel.dim[1] = (uint16_t)((a->v.shape[3] + 15) / 16 * 16);
    return kernel;
}

/* One of a pair of kernels, over the tiles of `rows` rows of `heads` heads. */
static te_status add_call(te_exec *exec, te_cuda_plan *plan, const char *name, const char *mma_name,
                          te_attention_args *args, int64_t rows, int64_t heads, const te_attention *a,
                          const te_attention_grad *g)
{
    te_cuda_kernel kernel = kernel_for(a, g);
    int            tile = kernel.dim[0] ? MMA_ROWS : kernel.vector;
    int64_t        blocks = 0;
    args->tiles = tiles_of(a, rows, tile);
    te_status status = count_blocks(exec, a, args->tiles, heads, &blocks);
    if (status != TE_OK) return status;
    te_cuda_call *call = te_cuda_plan_add(plan, TE_CUDA_FILE_ATTENTION, kernel.dim[0] ? mma_name : name, blocks,
                                          THREADS, args, sizeof *args);
    call->kernel = kernel;
    if (!kernel.dim[0]) call->launch.shared = (uint32_t)(shared_numbers(a, tile, g != NULL) * (kernel.wide ? 8 : 4));
    return TE_OK;
}

/* --- few queries ------------------------------------------------------------------------------------------------- */

enum {
    DECODE_ROWS = 16,      /* of a tile, and the most queries */
    DECODE_WARP_KEYS = 16, /* keys of a warp at a time */
    DECODE_WARPS = 4,      /* of a block, where blocks are many */
    DECODE_LEAST = 128,    /* keys: fewer are not worth it */
    DECODE_KEYS = 256,     /* at least, of a split */
    DECODE_WHOLE = 512,    /* so many are not split, for another kernel would have to merge them */
    DECODE_SPLITS = 64,    /* at most */
    DECODE_BLOCKS = 512,   /* that fill any device */
    DECODE_MANY = 256,     /* blocks that do so with few warps */
    DECODE_MOST = 1 << 30, /* keys, which the kernel counts in 32 bits */
};

/* Few queries, as in generation, leave most rows of a tile empty and most of a device idle: unless there are few keys,
 * too, these are split among blocks. */
static bool decodes(const te_attention *a)
{
    return uses_mma(a) && !a->cu_seqlens_q && a->dropout == 0 && a->q.shape[2] <= DECODE_ROWS &&
           a->k.shape[2] >= DECODE_LEAST && a->k.shape[2] <= DECODE_MOST;
}

/* A block's tiles, of 16-bit numbers, and in their place the float32 rows that its warps found. */
static uint32_t decode_shared(const te_cuda_kernel *kernel, uint32_t warps)
{
    uint32_t pitch = kernel->dim[0] + 8u, pitch_v = kernel->dim[1] + 8u;
    uint32_t tiles = DECODE_WARP_KEYS * (pitch + pitch_v) * 2, found = DECODE_ROWS * pitch_v * 4;
    return warps * (tiles > found ? tiles : found);
}

/* Warps of a block: each step of keys waits for memory, so a block that shares the device with few others takes many
 * at a time, as shared memory and registers allow: 16 warps have half the registers of 8. */
static uint32_t decode_warps(const te_cuda_kernel *kernel, int64_t blocks)
{
    uint32_t warps = blocks >= DECODE_MANY ? DECODE_WARPS : 4 * DECODE_WARPS, dims = kernel->dim[0] + kernel->dim[1];
    while (decode_shared(kernel, warps) > SHARED_BYTES || (warps > 8 && dims > 128)) warps /= 2;
    return warps;
}

static int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

/* Splits of the keys that are seen, and a block's warps; from shapes and the mask alone, so that sums have one order on
 * every device. */
static void split_keys(const te_attention *a, te_attention_args *args, te_cuda_kernel *kernel)
{
    int64_t n_q = a->q.shape[2], n_kv = a->k.shape[2], delta = a->bottom_right ? n_kv - n_q : 0;
    int64_t rows = a->q.shape[1] / a->k.shape[1] * n_q;
    args->tiles = (rows + DECODE_ROWS - 1) / DECODE_ROWS;
    int64_t others = a->q.shape[0] * a->k.shape[1] * args->tiles;
    kernel->decode = (uint8_t)decode_warps(kernel, others);
    int64_t step = DECODE_WARP_KEYS * kernel->decode;
    int64_t first = clamp(delta - args->left, 0, n_kv) / DECODE_WARP_KEYS * DECODE_WARP_KEYS;
    int64_t keys = clamp(clamp(n_q + delta + args->right, 0, n_kv) - first, 1, n_kv);
    int64_t most = keys <= DECODE_WHOLE ? 1 : (keys + DECODE_KEYS - 1) / DECODE_KEYS;
    int64_t splits = clamp((DECODE_BLOCKS + others - 1) / others, 1, most < DECODE_SPLITS ? most : DECODE_SPLITS);
    args->split_keys = ((keys + splits - 1) / splits + step - 1) / step * step;
    args->splits = (keys + args->split_keys - 1) / args->split_keys;
}

static te_status plan_decode(te_exec *exec, te_cuda_plan *plan, const te_attention *a, te_attention_args *args)
{
    int64_t rows = a->q.shape[0] * a->q.shape[1] * a->q.shape[2], blocks = 0;
    te_cuda_kernel kernel = kernel_for(a, NULL);
    split_keys(a, args, &kernel);
    te_status status = count_blocks(exec, a, args->tiles * args->splits, a->k.shape[1], &blocks);
    if (status != TE_OK) return status;
    bool merges = args->splits > 1;
    if (merges) plan->scratch_bytes = (size_t)(rows * args->splits * (2 + a->v.shape[3])) * sizeof(float);
    int64_t merging = (rows + ROWS_PER_BLOCK - 1) / ROWS_PER_BLOCK;
    te_cuda_call *call = te_cuda_plan_add(plan, TE_CUDA_FILE_ATTENTION, "te_attention_decode", blocks,
                                          kernel.decode * 32, args, sizeof *args);
    call->kernel = kernel;
    call->launch.shared = decode_shared(&kernel, kernel.decode);
    if (merges)
        te_cuda_plan_add(plan, TE_CUDA_FILE_ATTENTION, "te_attention_decoded", merging, THREADS, args,
                         sizeof *args)->kernel = kernel;
    return TE_OK;
}

/* --- quantized operands ------------------------------------------------------------------------------------------ */

static te_status check_quantized(te_exec *exec, const te_attention *a)
{
    te_attention   plain = *a;
    te_dtype       t = a->out.dtype;
    bool           known = t == TE_F32 || t == TE_BF16 || t == TE_F16 || t == TE_F8E4M3;
    const te_view *views[3] = {&a->q, &a->k, &a->v};
    plain.q.dtype = plain.k.dtype = plain.v.dtype = plain.out.dtype = TE_F32; /* as if they were decoded */
    te_status status = te_check_attention(exec, "attention", &plain);
    for (int i = 0; i < 3 && status == TE_OK; i++) {
        const te_quant *q = views[i]->quant;
        bool fits = q && q->element == TE_E4M3 && q->scale == TE_SCALE_F32 && q->block[0] == 0 && q->scale_inv;
        if (!fits || !known)
            return te_exec_fail(exec, TE_ERROR_UNSUPPORTED,
                                "attention: quantized operands are E4M3 with one float32 factor, out float32, "
                                "bfloat16, "
                                "float16 or float8_e4m3");
    }
    return status;
}

static te_status plan_quantized(te_exec *exec, te_cuda_plan *plan, const te_attention *a)
{
    te_status status = check_quantized(exec, a);
    if (status != TE_OK || a->q.shape[0] * a->q.shape[1] * a->q.shape[2] == 0) return status;
    te_attention_args args = args_for(a);
    const te_view    *views[3] = {&a->q, &a->k, &a->v};
    int               tile = tile_rows(a, false);
    for (int i = 0; i < 3; i++) args.factor[i] = views[i]->quant->scale_inv;
    args.codes = a->out.dtype == TE_F8E4M3;
    args.tiles = tiles_of(a, a->q.shape[2], tile);
    int64_t blocks = 0;
    if ((status = count_blocks(exec, a, args.tiles, a->q.shape[1], &blocks)) != TE_OK) return status;
    te_cuda_call *call =
        te_cuda_plan_add(plan, TE_CUDA_FILE_ATTENTION, "te_attention_rounded", blocks, THREADS, &args, sizeof args);
    call->kernel = (te_cuda_kernel){.file = TE_CUDA_FILE_ATTENTION, .dtype = {TE_F8E4M3, (uint8_t)a->out.dtype},
                                    .vector = (uint16_t)tile, .third = bias_of(a)};
    call->launch.shared = (uint32_t)(shared_numbers(a, tile, false) * 4);
    return TE_OK;
}

/* --- plans ------------------------------------------------------------------------------------------------------- */

te_status te_cuda_plan_attention(te_exec *exec, te_cuda_plan *plan, const te_attention *a)
{
    te_cuda_plan_open(plan);
    if (a->q.quant) return plan_quantized(exec, plan, a);
    te_status status = te_check_attention(exec, "attention", a);
    if (status != TE_OK || a->q.shape[0] * a->q.shape[1] * a->q.shape[2] == 0) return status;
    te_attention_args args = args_for(a);
    if (decodes(a)) return plan_decode(exec, plan, a, &args);
    return add_call(exec, plan, "te_attention", "te_attention_mma", &args, a->q.shape[2], a->q.shape[1], a, NULL);
}

static te_status check_gradients(te_exec *exec, const te_attention_grad *g)
{
    const te_view *views[4] = {&g->dout, &g->dq, &g->dk, &g->dv};
    const te_view *like[4] = {&g->forward.out, &g->forward.q, &g->forward.k, &g->forward.v};
    static const char *const names[4] = {"dout", "dq", "dk", "dv"};
    if (!te_view_present(&g->forward.lse))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "attention backward: lse of the forward pass is needed");
    for (int i = 0; i < 4; i++)
        if (!te_view_has_shape(views[i], 4, like[i]->shape) || views[i]->dtype != g->forward.q.dtype ||
            (views[i]->stride[3] != 1 && views[i]->shape[3] > 1))
            return te_exec_fail(exec, TE_ERROR_ARGUMENT,
                                "attention backward: %s must be %s of q's dtype with stride 1 in its last dimension",
                                names[i], te_describe_view(like[i]).text);
    const te_view *b = &g->dbias, *q = &g->forward.q;
    int64_t        scores[4] = {q->shape[0], q->shape[1], q->shape[2], g->forward.k.shape[2]};
    if (te_view_present(b) && !te_view_present(&g->forward.bias))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "attention backward: dbias of scores without a bias");
    if (te_view_present(b) && (!te_view_has_shape(b, 4, scores) || b->dtype != (q->dtype == TE_F64 ? TE_F64 : TE_F32)))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "attention backward: dbias %s %s does not fit the scores",
                            te_dtype_name(b->dtype), te_describe_view(b).text);
    return TE_OK;
}

te_status te_cuda_plan_attention_backward(te_exec *exec, te_cuda_plan *plan, const te_attention_grad *g)
{
    const te_attention *a = &g->forward;
    te_cuda_plan_open(plan);
    te_status status = te_check_attention(exec, "attention backward", a);
    if (status == TE_OK) status = check_gradients(exec, g);
    if (status != TE_OK) return status;
    te_attention_args args = args_for(a);
    int64_t           queries = a->q.shape[0] * a->q.shape[1] * a->q.shape[2];
    args.dout = te_cuda_view_of(&g->dout);
    args.dq = te_cuda_view_of(&g->dq);
    args.dk = te_cuda_view_of(&g->dk);
    args.dv = te_cuda_view_of(&g->dv);
    args.dbias = te_cuda_view_of(&g->dbias);
    if (queries > 0) {
        plan->scratch_bytes = (size_t)queries * 8;
        te_cuda_kernel kernel = kernel_for(a, g);
        int            each = !kernel.dim[0] ? ROWS_PER_BLOCK : THREADS / (kernel.dim[1] > 64 ? 16 : 8);
        te_cuda_plan_add(plan, TE_CUDA_FILE_ATTENTION, kernel.dim[0] ? "te_attention_mma_rows" : "te_attention_rows",
                         (queries + each - 1) / each, THREADS, &args, sizeof args)
            ->kernel = kernel;
        status =
            add_call(exec, plan, "te_attention_dq", "te_attention_mma_dq", &args, a->q.shape[2], a->q.shape[1], a, g);
    }
    if (status == TE_OK && a->k.shape[0] * a->k.shape[1] * a->k.shape[2] > 0)
        status =
            add_call(exec, plan, "te_attention_dkv", "te_attention_mma_dkv", &args, a->k.shape[2], a->k.shape[1], a, g);
    return status;
}

/* --- rows that see nothing --------------------------------------------------------------------------------------- */

static void add_unseen(te_cuda_plan *plan, const char *name, te_dtype dtype, te_dtype bias, const te_view *lse,
                       const te_unseen_args *args)
{
    int64_t rows = te_view_numel(lse);
    te_cuda_plan_open(plan);
    te_cuda_plan_add(plan, TE_CUDA_FILE_ATTENTION, name, (rows + THREADS - 1) / THREADS, THREADS, args, sizeof *args)
        ->kernel = (te_cuda_kernel){.file = TE_CUDA_FILE_ATTENTION, .dtype = {(uint8_t)dtype, (uint8_t)dtype},
                                    .third = (uint8_t)(1 + bias)};
}

void te_cuda_plan_attention_unseen(te_cuda_plan *plan, const te_attention *a)
{
    int64_t delta = a->bottom_right ? a->k.shape[2] - a->q.shape[2] : 0, open = a->q.shape[2] + a->k.shape[2];
    te_unseen_args args = {.v = te_cuda_view_of(&a->v), .out = te_cuda_view_of(&a->out),
                           .lse = te_cuda_view_of(&a->lse), .bias = te_cuda_view_of(&a->bias),
                           .keys = a->k.shape[2], .left = open, .right = open};
    if (a->window_left >= 0) args.left = a->window_left - delta;
    if (a->window_right >= 0) args.right = a->window_right + delta;
    add_unseen(plan, "te_attention_unseen", a->out.dtype, a->bias.dtype, &a->lse, &args);
}

void te_cuda_plan_attention_raised(te_cuda_plan *plan, const te_view *lse, float *raised)
{
    te_unseen_args args = {.lse = te_cuda_view_of(lse), .raised = raised};
    add_unseen(plan, "te_attention_raised", TE_BF16, TE_BF16, lse, &args);
}
