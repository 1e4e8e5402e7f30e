/* gemm_narrow.c - products of quantized operands as bytes, on tensor cores that read them.
 *
 * cuBLASLt multiplies fp8 and fp4 elements together with factors in device memory. What its documentation allows, by
 * compute capability:
 *
 *      8.9 and later    one float32 factor a tensor     where the quantizer left it
 *      9.0              float32, blocks of 128          M follows M, then the next blocks of K
 *                       float32, blocks of 128 x 128    blocks of K follow one another, lines padded to 4
 *      10.0 and later   E8M0, 32; E4M3, 16              tiles of 128 x 4 factors, see te_arranged (kernels/quantize.cu)
 *
 * Both operands have factors of one row of this table, but not both square blocks, and not both E5M2. Sizes and lines are
 * multiples of 16 bytes. Before 10.0, on 12.x, and of fp4 always, the elements that are added up lie together, which is how
 * side 0 and the transposed side 1 are stored. fp4's factors of whole tensors go to alpha.
 */
#include "gemm.h"

#include "kernels/args.h"

/* An operand as cuBLASLt sees it: lines of the result by steps of the sum. */
typedef struct narrow_operand {
    const te_view *view;
    int line, sum; /* dimensions of the view */
} narrow_operand;

static void operands_of(const te_gemm *g, narrow_operand o[2])
{
    int d = g->c.ndim;
    o[0] = (narrow_operand){&g->a, d - 2, d - 1};
    o[1] = (narrow_operand){&g->b, d - 1, d - 2};
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

static const char *decline_shape(const te_gemm *g, const narrow_operand o[2], int mode)
{
    int64_t sums = mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F ? 16 : is_float32_block(mode) ? 128 : 32;
    int64_t rows = g->c.shape[g->c.ndim - 2], columns = g->c.shape[g->c.ndim - 1], inner = g->a.shape[g->a.ndim - 1];
    for (int i = 0; i < g->c.ndim - 2; i++)
        if (g->c.shape[i] != 1) return "it is a batch of products";
    if (rows % 16 || columns % 16 || rows == 0 || columns == 0)
        return "rows and columns of the result are not multiples of 16";
    if (inner % sums || inner == 0)
        return sums == 16   ? "the sum's length is no multiple of 16"
               : sums == 32 ? "the sum's length is no multiple of 32"
                            : "the sum's length is no multiple of 128";
    for (int i = 0; i < 2; i++)
        if ((uintptr_t)o[i].view->data % 16) return "an operand does not begin at a multiple of 16 bytes";
    return NULL;
}

/* Lines of 16 bytes' multiples; `together`: the dimension that is summed over has to be adjacent. */
static const char *decline_layout(const narrow_operand *o, bool together)
{
    const te_view *v = o->view;
    int64_t per_16_bytes = v->quant->element == TE_E2M1 ? 32 : 16;
    int64_t along = v->stride[o->sum], across = v->stride[o->line];
    if (together && along != 1) return "the elements that are added up do not lie together";
    if (along != 1 && across != 1) return "an operand has no unit stride";
    if ((along == 1 ? across : along) % per_16_bytes) return "lines do not begin at multiples of 16 bytes";
    return NULL;
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
    if (!reason) reason = decline_shape(g, o, mode[0]);
    for (int i = 0; i < 2 && !reason; i++) reason = decline_layout(&o[i], together);
    return reason;
}

/* --- factors ------------------------------------------------------------------------------------------------------ */

static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

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
                        : args.layout == TE_ARRANGE_BY_BLOCKS ? round_up(args.lines, 4)
                                                              : args.lines;
    args.padded_blocks = args.layout == TE_ARRANGE_BY_BLOCKS ? args.blocks : round_up(args.blocks, 4);
    *factors = args.to = *lent = exec->scratch(exec, (size_t)(args.padded_lines * args.padded_blocks * args.bytes));
    return *lent ? te_cuda_arrange_factors(exec, &args) : TE_ERROR_MEMORY;
}

/* --- the product -------------------------------------------------------------------------------------------------- */

te_status te_cuda_gemm_narrow(te_exec *exec, const te_gemm *gemm)
{
    narrow_operand o[2];
    te_cuda_narrow narrow = {{NULL, NULL}, {0, 0}};
    te_gemm g = *gemm;
    void *lent[3] = {NULL, NULL, NULL};
    te_status status = te_cuda_enter(exec);
    operands_of(gemm, o);
    for (int i = 0; i < 2 && status == TE_OK; i++) {
        narrow.mode[i] = mode_of(&o[i]);
        status = arrange(exec, &o[i], narrow.mode[i], &narrow.factors[i], &lent[i]);
    }
    if (is_float32_block(narrow.mode[0])) g.fast_sums = false; /* their sums are always promoted, block by block */
    if (status == TE_OK && gemm->a.quant->element == TE_E2M1) {
        lent[2] = exec->scratch(exec, 3 * sizeof(float));
        status = lent[2] ? te_cuda_product_scales(exec, gemm, lent[2]) : TE_ERROR_MEMORY;
    }
    g.a.quant = g.b.quant = NULL;
    if (status == TE_OK) status = te_cuda_gemm_scaled(exec, &g, lent[2], &narrow);
    for (int i = 2; i >= 0; i--)
        if (lent[i]) exec->scratch_free(exec, lent[i]);
    return status;
}
