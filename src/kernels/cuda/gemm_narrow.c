/* gemm_narrow.c - products of quantized operands as bytes, on tensor cores that read them.
 *
 * cuBLASLt multiplies fp8 and fp4 elements together with factors in device memory. What its documentation allows, by
 * compute capability:
 *
 *      8.9 and later    one float32 factor a tensor     where the quantizer left it
 *      9.0              float32, blocks of 128          M follows M, then the next blocks of K
 *                       float32, blocks of 128 x 128    blocks of K follow one another, lines padded to 4
 *      10.0 and later   E8M0, 32; E4M3, 16              tiles of 128 x 4 factors, see te_arranged, kernels/quantized.cu
 *
 * Both operands have factors of one row of this table, but not both square blocks, and not both E5M2. Before 10.0, on
 * 12.x, and of fp4 always, the elements that are added up lie together, which is how side 0 and the transposed side 1
 * are stored. fp4's factors of whole tensors go to alpha.
 *
 * Sizes and lines have to be multiples of 16 bytes, a last block may be short. Operands that have others are copied
 * with zeros beyond them: a byte read and written an element, where to decode would write two or four. What the
 * zeros add to the result is left out when its end is written (gemm_finish.c). What is copied of a weight serves its
 * next products (gemm_kept.c).
 */
#include "gemm.h"

#include "kernels/args.h"

/* An operand as cuBLASLt sees it: lines of the result by steps of the sum. */
typedef struct narrow_operand {
    const te_view *view;
    int line, sum; /* dimensions of the view */
    uint64_t key;  /* of its contents, as in te_gemm */
} narrow_operand;

static void operands_of(const te_gemm *g, narrow_operand o[2])
{
    int d = g->c.ndim;
    o[0] = (narrow_operand){&g->a, d - 2, d - 1, g->a_key};
    o[1] = (narrow_operand){&g->b, d - 1, d - 2, g->b_key};
}

/* The mode of its factors; -1: there is none. */
static int mode_of(const narrow_operand *o)
{
    const te_quant *q = o->view->quant;
    int down = q->block[o->line - (o->view->ndim - 2)], along = q->block[o->sum - (o->view->ndim - 2)];
    if (q->scale == TE_SCALE_E4M3) return down == 1 && along == 16 ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 : -1;
    if (q->scale == TE_SCALE_E8M0) return down == 1 && along == 32 ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0 : -1;
    if (along == 0) return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    if (along != 128) return -1;
    return down == 1     ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
           : down == 128 ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
                         : -1;
}

static bool is_float32_block(int mode)
{
    return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F || mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
}

/* --- what is declined --------------------------------------------------------------------------------------------- */

static const char *decline_shape(const te_gemm *g)
{
    int64_t rows = g->c.shape[g->c.ndim - 2], columns = g->c.shape[g->c.ndim - 1], inner = g->a.shape[g->a.ndim - 1];
    for (int i = 0; i < g->c.ndim - 2; i++)
        if (g->c.shape[i] != 1) return "it is a batch of products";
    return rows == 0 || columns == 0 || inner == 0 ? "there is nothing to multiply" : NULL;
}

/* `together`: the dimension that is summed over has to be adjacent. */
static const char *decline_layout(const narrow_operand *o, bool together)
{
    const te_view *v = o->view;
    int64_t along = v->stride[o->sum], across = v->stride[o->line];
    if (together && along != 1) return "the elements that are added up do not lie together";
    return along != 1 && across != 1 ? "an operand has no unit stride" : NULL;
}

static const char *decline_device(int capability, int mode)
{
    switch (mode) {
    case CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F:
        return capability >= 89 ? NULL : "fp8 needs compute capability 8.9";
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F:
    case CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F:
        return capability == 90 ? NULL : "float32 factors of blocks need compute capability 9.0";
    default:
        return capability >= 100 ? NULL : "fp8 and fp4 with factors of a byte need compute capability 10.0";
    }
}

static bool has_row_amaxes(const te_quant *q) { return q->amax && (q->amax_stride[0] || q->amax_stride[1]); }

static const char *decline_formats(const te_quant *a, const te_quant *b, int mode_a, int mode_b)
{
    if (a->element == TE_E5M2 && b->element == TE_E5M2) return "both operands are float8_e5m2";
    if ((a->element == TE_E2M1) != (b->element == TE_E2M1)) return "fp4 by fp8";
    if (mode_a < 0 || mode_b < 0) return "no product has blocks of this shape along the sum";
    if (mode_a != mode_b && !(is_float32_block(mode_a) && is_float32_block(mode_b)))
        return "the operands' factors are of different kinds";
    if (mode_a == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F && mode_b == mode_a)
        return "both operands have square blocks";
    if ((a->element == TE_E2M1) != (mode_a == CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3))
        return "no product has factors of this kind for such elements";
    if (has_row_amaxes(a) || has_row_amaxes(b)) return "rows have factors of their own";
    return NULL;
}

const char *te_cuda_decline_narrow(te_exec *exec, const te_gemm *g)
{
    int capability = te_cuda(exec)->capability;
    if (!g->a.quant || !g->b.quant) return "one operand is not quantized";
    narrow_operand o[2];
    operands_of(g, o);
    int mode[2] = {mode_of(&o[0]), mode_of(&o[1])};
    bool together = capability < 100 || capability >= 120 || g->a.quant->element == TE_E2M1;
    const char *reason = decline_formats(g->a.quant, g->b.quant, mode[0], mode[1]);
    for (int i = 0; i < 2 && !reason; i++) reason = decline_device(capability, mode[i]);
    if (!reason) reason = decline_shape(g);
    for (int i = 0; i < 2 && !reason; i++) reason = decline_layout(&o[i], together);
    return reason;
}

/* --- sizes -------------------------------------------------------------------------------------------------------- */

/* Memory for a copy of an operand: kept for its next products, with the copy where that is `there`,
 * or lent for this one. */
static void *room_for(te_exec *exec, const narrow_operand *o, const int64_t form[7], size_t bytes, bool *there,
                      void **lent)
{
    te_cuda_kept_id id = {.key = o->key, .of = o->view->data, .form = {o->line}};
    memcpy(id.form + 1, form, 7 * sizeof *form);
    void *room = te_cuda_kept_copy(exec, &id, bytes, there);
    if (!room) room = *lent = exec->scratch(exec, bytes);
    return room;
}

/* What was to be kept, but could not be made. */
static te_status made(te_exec *exec, const narrow_operand *o, te_status status)
{
    if (status != TE_OK) te_cuda_forget(exec, o->view->data, 1);
    return status;
}

static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* What the sum's length has to be a multiple of. */
static int64_t step_of(int mode, bool whole_blocks)
{
    bool scale_bytes =
        mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 || mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
    return scale_bytes ? 32 : is_float32_block(mode) && whole_blocks ? 128 : 16;
}

/* An operand of whole multiples: as it is, or a copy with zeros beyond it, whose memory is in *lent. */
static te_status pad(te_exec *exec, const narrow_operand *o, int64_t step, te_view *padded, void **lent)
{
    const te_view *v = o->view;
    int64_t elements = v->quant->element == TE_E2M1 ? 2 : 1; /* to a byte */
    int unit = v->stride[o->sum] == 1 ? o->sum : o->line, other = unit == o->sum ? o->line : o->sum;
    *padded = *v;
    padded->shape[o->line] = round_up(v->shape[o->line], 16);
    padded->shape[o->sum] = round_up(v->shape[o->sum], step);
    bool whole = padded->shape[o->line] == v->shape[o->line] && padded->shape[o->sum] == v->shape[o->sum];
    if (whole && v->stride[other] % (16 * elements) == 0 && (uintptr_t)v->data % 16 == 0) return TE_OK;
    padded->stride[unit] = 1;
    padded->stride[other] = padded->shape[unit];
    te_pad_args args = {.from = v->data,
                        .lines = v->shape[other],
                        .bytes = (v->shape[unit] + elements - 1) / elements,
                        .stride = v->stride[other] / elements,
                        .padded_lines = padded->shape[other],
                        .padded_bytes = padded->shape[unit] / elements};
    const int64_t form[7] = {-1, args.lines, args.bytes, args.stride, args.padded_lines, args.padded_bytes};
    bool there;
    padded->data = args.to = room_for(exec, o, form, (size_t)(args.padded_lines * args.padded_bytes), &there, lent);
    if (!args.to || there) return args.to ? TE_OK : TE_ERROR_MEMORY;
    return made(exec, o, te_cuda_pad_lines(exec, &args));
}

/* --- factors ------------------------------------------------------------------------------------------------------ */

/* Whether factors lie as they are wanted already: no line and no block beyond theirs, and neighbours where they are
 * looked for. */
static bool is_arranged(const te_arrange_args *a)
{
    bool by_blocks = a->layout == TE_ARRANGE_BY_BLOCKS;
    if (a->layout == TE_ARRANGE_TILES || a->lines != a->padded_lines || a->blocks != a->padded_blocks) return false;
    bool lines = a->lines == 1 || a->stride[0] == (by_blocks ? 1 : a->padded_blocks);
    bool blocks = a->blocks == 1 || a->stride[1] == (by_blocks ? a->padded_lines : 1);
    return lines && blocks && (uintptr_t)a->from % 16 == 0;
}

/* The factors of blocks in the order in which cuBLASLt reads them; memory that is lent is in *lent. */
static te_status arrange(te_exec *exec, const narrow_operand *o, int mode, const void **factors, void **lent)
{
    const te_view *v = o->view;
    const te_quant *q = v->quant;
    int line = o->line - (v->ndim - 2), sum = o->sum - (v->ndim - 2);
    *lent = NULL;
    *factors = q->scale_inv;
    if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) return TE_OK;
    te_arrange_args args = {.from = q->scale_inv,
                            .lines = (v->shape[o->line] + q->block[line] - 1) / q->block[line],
                            .blocks = (v->shape[o->sum] + q->block[sum] - 1) / q->block[sum],
                            .stride = {q->scale_stride[line], q->scale_stride[sum]},
                            .layout = mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F       ? TE_ARRANGE_BY_BLOCKS
                                      : mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F ? TE_ARRANGE_BY_LINES
                                                                                            : TE_ARRANGE_TILES,
                            .bytes = is_float32_block(mode) ? 4 : 1};
    args.padded_lines = args.layout == TE_ARRANGE_TILES       ? round_up(args.lines, 128)
                        : args.layout == TE_ARRANGE_BY_BLOCKS ? round_up(args.lines, 16)
                                                              : args.lines;
    args.padded_blocks = args.layout == TE_ARRANGE_BY_BLOCKS ? args.blocks : round_up(args.blocks, 4);
    if (is_arranged(&args)) return TE_OK;
    const int64_t form[7] = {args.layout,    args.lines,        args.blocks,       args.stride[0],
                             args.stride[1], args.padded_lines, args.padded_blocks};
    bool there;
    *factors = args.to =
        room_for(exec, o, form, (size_t)(args.padded_lines * args.padded_blocks * args.bytes), &there, lent);
    if (!args.to || there) return args.to ? TE_OK : TE_ERROR_MEMORY;
    return made(exec, o, te_cuda_arrange_factors(exec, &args));
}

/* --- the product -------------------------------------------------------------------------------------------------- */

/* c of whole multiples; in float32 and dense, for gemm_finish.c, where c itself is not. */
static te_status run_padded(te_exec *exec, const te_gemm *gemm, te_gemm *g, const float *scales,
                            const te_cuda_narrow *narrow)
{
    int d = gemm->c.ndim;
    int64_t rows = g->a.shape[d - 2], columns = g->b.shape[d - 1];
    if (rows == gemm->c.shape[d - 2] && columns == gemm->c.shape[d - 1])
        return te_cuda_gemm_scaled(exec, g, scales, narrow);
    void *room = exec->scratch(exec, (size_t)(rows * columns) * sizeof(float));
    if (!room) return TE_ERROR_MEMORY;
    te_cuda_trace(exec, "dispatch: a product of bytes is padded from %lld x %lld to %lld x %lld\n",
                  (long long)gemm->c.shape[d - 2], (long long)gemm->c.shape[d - 1], (long long)rows,
                  (long long)columns);
    te_gemm whole = {.a = g->a, .b = g->b, .c = g->c, .alpha = g->alpha, .fast_sums = g->fast_sums};
    whole.c.data = room;
    whole.c.dtype = TE_F32;
    for (int i = 0; i < d; i++) whole.c.stride[i] = 1;
    whole.c.shape[d - 2] = rows;
    whole.c.shape[d - 1] = columns;
    whole.c.stride[d - 2] = columns;
    te_status status = te_cuda_gemm_scaled(exec, &whole, scales, narrow);
    if (status == TE_OK) status = te_cuda_gemm_finish(exec, gemm, &whole.c);
    exec->scratch_free(exec, room);
    return status;
}

static te_status multiply(te_exec *exec, const te_gemm *gemm, bool whole_blocks)
{
    narrow_operand o[2];
    te_cuda_narrow narrow = {{NULL, NULL}, {0, 0}};
    te_gemm g = *gemm;
    te_view *padded[2] = {&g.a, &g.b};
    void *lent[5] = {NULL, NULL, NULL, NULL, NULL};
    te_status status = TE_OK;
    operands_of(gemm, o);
    for (int i = 0; i < 2 && status == TE_OK; i++) {
        narrow.mode[i] = mode_of(&o[i]);
        status = arrange(exec, &o[i], narrow.mode[i], &narrow.factors[i], &lent[i]);
        if (status == TE_OK) status = pad(exec, &o[i], step_of(narrow.mode[i], whole_blocks), padded[i], &lent[2 + i]);
    }
    if (is_float32_block(narrow.mode[0])) g.fast_sums = false; /* their sums are always promoted, block by block */
    if (status == TE_OK && gemm->a.quant->element == TE_E2M1) {
        lent[4] = exec->scratch(exec, 3 * sizeof(float));
        status = lent[4] ? te_cuda_product_scales(exec, gemm, lent[4]) : TE_ERROR_MEMORY;
    }
    g.a.quant = g.b.quant = NULL;
    if (status == TE_OK) status = run_padded(exec, gemm, &g, lent[4], &narrow);
    for (int i = 4; i >= 0; i--)
        if (lent[i]) exec->scratch_free(exec, lent[i]);
    return status;
}

/* A last block of 128 may be short; a library that does not think so is given zeros behind it. */
te_status te_cuda_gemm_narrow(te_exec *exec, const te_gemm *gemm)
{
    narrow_operand o[2];
    if (te_cuda_few_takes_fp8(exec, gemm)) return te_cuda_few_run_fp8(exec, gemm);
    operands_of(gemm, o);
    te_status status = multiply(exec, gemm, false);
    bool short_block = is_float32_block(mode_of(&o[0])) && gemm->a.shape[o[0].sum] % 128 != 0;
    return status == TE_ERROR_UNSUPPORTED && short_block ? multiply(exec, gemm, true) : status;
}
