/* gemm_quantized.c - products of quantized operands: decoded exactly, then an ordinary product.
 *
 * What an operand stands for is split in two: element * factor of its block, which is decoded, and a factor of the
 * whole tensor, which goes to alpha. Decoded values have few significant bits, so bfloat16 holds them exactly, and
 * products of bfloat16 are exact in the float32 that they are added in. Float32 carries what bfloat16 cannot: factors
 * that are no powers of two, an amax per row, values below bfloat16's normal range (which its products take for 0), a
 * partner that is wider.
 *
 * A copy of an operand that comes again under its key is kept, as packed ones are (gemm_cache.h).
 */
#include "decode.h"
#include "gemm.h"
#include "gemm_cache.h"

#include <math.h>
#include <string.h>

/* An operand on its way to a plain view. */
typedef struct operand {
    const te_view *given;
    te_view        plain;
    uint64_t       key;   /* of the decoded copy, 0: none that stays */
    float          factor; /* of the whole tensor */
    void          *lent;
} operand;

/* --- what is decoded to what -------------------------------------------------------------------------------------- */

static bool fits_bf16(const te_view *v)
{
    const te_quant *q = v->quant;
    if (!q) return v->dtype == TE_BF16;
    if (q->scale == TE_SCALE_E4M3) return q->amax_stride[0] == 0 && q->amax_stride[1] == 0;
    return q->scale == TE_SCALE_E8M0 || q->block[0] == 0 || q->power_of_two;
}

static te_status check(te_exec *exec, const te_view *v)
{
    int d = v->ndim;
    if (!v->quant) {
        if (v->dtype == TE_F32 || v->dtype == TE_BF16 || v->dtype == TE_F16) return TE_OK;
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "matrix product: %s beside a quantized operand",
                            te_dtype_name(v->dtype));
    }
    for (int i = 0; i < d - 2; i++)
        if (v->shape[i] != 1 && v->stride[i] != 0)
            return te_exec_fail(exec, TE_ERROR_ARGUMENT,
                                "matrix product: a batch of %lld quantized matrices; one may serve all, with stride 0",
                                (long long)v->shape[i]);
    if (v->quant->element == TE_E2M1 && v->stride[d - 1] != 1 && v->stride[d - 2] != 1)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT,
                            "matrix product: strides %lld, %lld of float4 elements; one must be 1",
                            (long long)v->stride[d - 2], (long long)v->stride[d - 1]);
    return TE_OK;
}

/* --- decoding ----------------------------------------------------------------------------------------------------- */

/* What a decoded copy depends on. */
static te_gemm_packed_id id_of(const te_decode *d, te_dtype dtype, uint64_t key)
{
    te_gemm_packed_id id = {.key = key};
    int64_t form[15] = {(int64_t)(intptr_t)d->data,
                        (int64_t)(intptr_t)d->factors,
                        (int64_t)(intptr_t)d->amax,
                        d->element,
                        d->scale,
                        dtype,
                        d->rows,
                        d->cols,
                        d->row_stride,
                        d->col_stride,
                        d->block_rows,
                        d->block_cols,
                        d->factor_row_stride,
                        d->factor_col_stride,
                        te_f32_bits(d->times)};
    memcpy(id.form, form, sizeof form);
    return id;
}

/* Memory for the decoded copy: one that stays (*fresh: to be filled), or lent. */
static void *room_for(te_exec *exec, operand *o, const te_decode *d, te_dtype dtype, bool *fresh)
{
    size_t bytes = (size_t)d->rows * (size_t)d->cols * te_dtype_size(dtype);
    te_gemm_state *state = te_gemm_state_get(exec);
    if (!state) return NULL;
    *fresh = true;
    if (o->key && !state->packed) state->packed = te_gemm_cache_new(exec->mem);
    if (o->key && state->packed) {
        te_gemm_packed_id id = id_of(d, dtype, o->key);
        void *room;
        const void *kept = te_gemm_cache_find(state->packed, &id, bytes, &room);
        if (kept) *fresh = false;
        if (kept || room) return kept ? (void *)kept : room;
    }
    o->key = 0; /* what is lent has no contents that stay */
    return o->lent = exec->scratch(exec, bytes);
}

/* *exact: whether `dtype` holds the values. */
static te_status decode(te_exec *exec, operand *o, te_dtype dtype, float times, bool *exact)
{
    bool across, fresh;
    int n = o->given->ndim;
    te_decode d = te_decode_of(o->given, &across);
    d.times = times;
    *exact = true;
    if (d.rows == 0 || d.cols == 0) return TE_OK;
    void *to = room_for(exec, o, &d, dtype, &fresh);
    if (!to) return TE_ERROR_MEMORY;
    if (fresh) *exact = te_decode_matrix(exec, &d, dtype, to);
    if (fresh && o->key && (!*exact || te_cpu_stopped(exec))) {
        te_gemm_packed_id id = id_of(&d, dtype, o->key);
        te_gemm_cache_forget(te_gemm_state_get(exec)->packed, &id);
    }
    o->plain.data = to;
    o->plain.stride[n - 2] = across ? 1 : d.cols;
    o->plain.stride[n - 1] = across ? d.cols : 1;
    return te_cpu_finish(exec, TE_OK);
}

/* A plain operand in another dtype, dense in the order in which it lies; dimensions that repeat are stored once. */
static te_status widen(te_exec *exec, operand *o, te_dtype dtype)
{
    const te_view *v = o->given;
    int n = v->ndim;
    bool across = v->stride[n - 1] != 1 && v->stride[n - 2] == 1;
    int64_t step = 1;
    if (v->dtype == dtype) return TE_OK;
    for (int i = 0; i < n; i++) {
        int dim = i < 2 && across ? n - 2 + i : n - 1 - i;
        bool repeats = i >= 2 && v->stride[dim] == 0;
        o->plain.stride[dim] = repeats ? 0 : step;
        if (!repeats) step *= v->shape[dim];
    }
    if (step == 0) return TE_OK;
    o->key = 0;
    o->lent = o->plain.data = exec->scratch(exec, (size_t)step * te_dtype_size(dtype));
    if (!o->lent) return TE_ERROR_MEMORY;
    te_view from = *v, to = o->plain;
    for (int i = 0; i < n - 2; i++)
        if (to.stride[i] == 0) from.shape[i] = to.shape[i] = 1;
    return te_cpu_copy(exec, &to, &from);
}

/* How a product is computed. */
typedef struct way {
    te_dtype dtype;
    bool     apart; /* factors of whole tensors go to alpha, not into the values */
} way;

/* Fills o->plain with values. */
static te_status prepare(te_exec *exec, operand *o, const te_view *given, uint64_t key, way w, bool *exact)
{
    float factor = te_decode_tensor_factor(given);
    *o = (operand){.given = given, .plain = *given, .key = key, .factor = w.apart ? factor : 1};
    o->plain.dtype = w.dtype;
    o->plain.quant = NULL;
    *exact = true;
    return given->quant ? decode(exec, o, w.dtype, w.apart ? 1 : factor, exact) : widen(exec, o, w.dtype);
}

/* A product of few rows by b as it is stored, where that is faster: *done. */
static te_status run_coded(te_exec *exec, const te_gemm *g, const operand *a, bool *done)
{
    te_gemm         plain = *g;
    te_gemm_problem p;
    bool            across;
    if (!g->b.quant) return TE_OK;
    te_decode d = te_decode_of(&g->b, &across);
    plain.a = a->plain;
    plain.b.dtype = TE_BF16;
    plain.b.quant = NULL;
    te_status status = te_gemm_problem_make(exec, &plain, &p);
    bool      lies = across && p.b.data == g->b.data && p.n == d.rows && p.k == d.cols;
    if (status != TE_OK || !lies || te_gemm_coded_decline(exec, &p, &d)) return status;
    p.alpha = (float)((double)g->alpha * (double)a->factor * (double)te_decode_tensor_factor(&g->b));
    if (p.squares) *p.squares = (double)NAN;
    *done = true;
    return te_cpu_finish(exec, te_gemm_coded_run(exec, &p, &d));
}

/* *exact false: nothing was computed, since w.dtype does not hold the operands. */
static te_status run(te_exec *exec, const te_gemm *g, way w, bool *exact)
{
    operand a = {0}, b = {0};
    te_status status = prepare(exec, &a, &g->a, g->a_key, w, exact);
    bool done = false;
    if (status == TE_OK && *exact && w.dtype == TE_BF16) status = run_coded(exec, g, &a, &done);
    if (status == TE_OK && *exact && !done) status = prepare(exec, &b, &g->b, g->b_key, w, exact);
    if (status == TE_OK && *exact && !done) {
        te_gemm plain = *g;
        plain.a = a.plain;
        plain.b = b.plain;
        plain.a_key = a.key;
        plain.b_key = b.key;
        plain.alpha = (float)((double)g->alpha * (double)a.factor * (double)b.factor);
        status = te_cpu_gemm(exec, &plain);
    }
    if (b.lent) exec->scratch_free(exec, b.lent);
    if (a.lent) exec->scratch_free(exec, a.lent);
    return status;
}

/* Whether factors of whole tensors may be multiplied before the sum is known: their product may leave float32's range
 * where the result does not. */
static bool factors_join(const te_gemm *g)
{
    double a = (double)te_decode_tensor_factor(&g->a), b = (double)te_decode_tensor_factor(&g->b);
    bool plain = g->alpha == 0 || a == 0 || b == 0 || !isfinite(a) || !isfinite(b); /* nothing to lose */
    return plain || isnormal((float)((double)g->alpha * a * b));
}

te_status te_gemm_quantized(te_exec *exec, const te_gemm *g)
{
    way w = {.dtype = TE_F32, .apart = true};
    bool exact = false;
    te_gemm_problem unused;
    te_gemm plain = *g;
    plain.a.dtype = plain.b.dtype = TE_F32;
    plain.a.quant = plain.b.quant = NULL;
    te_status status = te_gemm_problem_make(exec, &plain, &unused); /* which checks */
    if (status == TE_OK) status = check(exec, &g->a);
    if (status == TE_OK) status = check(exec, &g->b);
    if (status != TE_OK || te_view_numel(&g->c) == 0) return status;
    w.apart = factors_join(g);
    if (w.apart && fits_bf16(&g->a) && fits_bf16(&g->b) && g->c.dtype != TE_F16)
        status = run(exec, g, (way){TE_BF16, true}, &exact);
    return status == TE_OK && !exact ? run(exec, g, w, &exact) : status;
}
