/* check.c - see check.h. */
#include "check.h"

#include "dtype.h"

#include <stdio.h>

te_view_words te_describe_view(const te_view *view)
{
    te_view_words words;
    size_t used = (size_t)snprintf(words.text, sizeof words.text, "{");
    for (int i = 0; i < view->ndim && used < 130; i++)
        used += (size_t)snprintf(words.text + used, sizeof words.text - used, "%s%lld", i ? ", " : "",
                                 (long long)view->shape[i]);
    snprintf(words.text + used, sizeof words.text - used, "}");
    return words;
}

bool te_view_has_shape(const te_view *view, int ndim, const int64_t *shape)
{
    bool same = view->ndim == ndim;
    for (int i = 0; same && i < ndim; i++) same = view->shape[i] == shape[i];
    return same;
}

static bool is_index(te_dtype dtype) { return dtype == TE_I64 || dtype == TE_I32; }

/* --- programs ----------------------------------------------------------------------------------------------------- */

static te_status check_operand(te_exec *exec, const te_program *program, const te_operand *operand, const char *what,
                               int i)
{
    if ((unsigned)operand->dtype < TE_DTYPE_COUNT) return TE_OK;
    return te_exec_fail(exec, TE_ERROR_ARGUMENT, "program %s: %s %d has no such dtype: %d", program->name, what, i,
                        (int)operand->dtype);
}

te_status te_check_run(te_exec *exec, const te_program *program, const te_run *run)
{
    bool      empty = false;
    te_status status = TE_OK;
    if (run->ndim < 1 || run->ndim > TE_MAX_DIMS)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "program %s: %d dimensions, wanted 1 to %d", program->name,
                            run->ndim, TE_MAX_DIMS);
    for (int d = 0; d < run->ndim; d++) {
        if (run->shape[d] < 0)
            return te_exec_fail(exec, TE_ERROR_ARGUMENT, "program %s: extent %lld of dimension %d", program->name,
                                (long long)run->shape[d], d);
        empty |= run->shape[d] == 0;
    }
    for (int i = 0; i < program->n_inputs && status == TE_OK; i++) {
        status = check_operand(exec, program, &run->inputs[i], "input", i);
        if (status == TE_OK && !run->inputs[i].data && !empty)
            status = te_exec_fail(exec, TE_ERROR_ARGUMENT, "program %s: input %d has no data", program->name, i);
    }
    for (int o = 0; o < program->n_outputs && status == TE_OK; o++)
        if (run->outputs[o].data) status = check_operand(exec, program, &run->outputs[o], "output", o);
    return status;
}

/* --- matrix products ---------------------------------------------------------------------------------------------- */

static bool gemm_fits(const te_gemm *g)
{
    int d = g->c.ndim;
    if (d < 2 || d > TE_MAX_DIMS || g->a.ndim != d || g->b.ndim != d) return false;
    for (int i = 0; i < d - 2; i++)
        if (g->a.shape[i] != g->c.shape[i] || g->b.shape[i] != g->c.shape[i]) return false;
    return g->a.shape[d - 2] == g->c.shape[d - 2] && g->b.shape[d - 1] == g->c.shape[d - 1] &&
           g->a.shape[d - 1] == g->b.shape[d - 2];
}

static te_status check_gemm_bias(te_exec *exec, const te_gemm *g)
{
    int d = g->c.ndim;
    const te_view *bias = &g->bias;
    if (te_view_present(bias) && !te_view_has_shape(bias, 1, &g->c.shape[d - 1]))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "matrix product: a bias %s for %lld columns",
                            te_describe_view(bias).text, (long long)g->c.shape[d - 1]);
    if (te_view_present(bias) && !te_dtype_has_gradient(bias->dtype))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "matrix product: a bias of %s", te_dtype_name(bias->dtype));
    return TE_OK;
}

te_status te_check_gemm(te_exec *exec, const te_gemm *g, bool bytes)
{
    te_dtype in = g->a.dtype, out = g->c.dtype;
    bool     narrows = in == TE_F32 && (out == TE_BF16 || out == TE_F16);
    if (!gemm_fits(g))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "matrix product: shapes %s and %s do not give %s",
                            te_describe_view(&g->a).text, te_describe_view(&g->b).text, te_describe_view(&g->c).text);
    if (g->c.quant) return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "matrix product: a quantized result");
    if (!bytes &&
        (!te_dtype_has_gradient(in) || g->b.dtype != in || (out != in && out != TE_F32 && !narrows)))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "matrix product: %s by %s into %s is not supported",
                            te_dtype_name(in), te_dtype_name(g->b.dtype), te_dtype_name(out));
    if (g->beta != 0 && g->beta != 1)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "matrix product: beta is %g, expected 0 or 1", (double)g->beta);
    return check_gemm_bias(exec, g);
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

static te_status check_attention_shapes(te_exec *exec, const char *op, const te_attention *a)
{
    const te_view *q = &a->q, *k = &a->k, *v = &a->v;
    bool fits = q->ndim == 4 && k->ndim == 4 && v->ndim == 4 && k->shape[0] == q->shape[0] &&
                k->shape[3] == q->shape[3] &&
                te_view_has_shape(v, 4, (int64_t[4]){k->shape[0], k->shape[1], k->shape[2], v->shape[3]});
    fits = fits && (q->shape[1] == 0 || (k->shape[1] > 0 && q->shape[1] % k->shape[1] == 0));
    if (!fits)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: q %s, k %s and v %s do not fit together", op,
                            te_describe_view(q).text, te_describe_view(k).text, te_describe_view(v).text);
    if (q->shape[3] > TE_ATTENTION_MAX_DIM || v->shape[3] > TE_ATTENTION_MAX_DIM)
        return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "%s: dim %lld and dim_v %lld; at most %d", op,
                            (long long)q->shape[3], (long long)v->shape[3], TE_ATTENTION_MAX_DIM);
    if (!te_view_has_shape(&a->out, 4, (int64_t[4]){q->shape[0], q->shape[1], q->shape[2], v->shape[3]}))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: out %s does not fit q %s and v %s", op,
                            te_describe_view(&a->out).text, te_describe_view(q).text, te_describe_view(v).text);
    if (te_view_present(&a->lse) && !te_view_has_shape(&a->lse, 3, q->shape))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: lse %s does not fit q %s", op,
                            te_describe_view(&a->lse).text, te_describe_view(q).text);
    if (te_view_present(&a->bias) &&
        !te_view_has_shape(&a->bias, 4, (int64_t[4]){q->shape[0], q->shape[1], q->shape[2], k->shape[2]}))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: bias %s does not fit q %s and k %s", op,
                            te_describe_view(&a->bias).text, te_describe_view(q).text, te_describe_view(k).text);
    if (te_view_present(&a->sinks) &&
        (!te_view_has_shape(&a->sinks, 1, &q->shape[1]) || (q->shape[1] > 1 && a->sinks.stride[0] != 1)))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: sinks %s do not fit the heads of q %s", op,
                            te_describe_view(&a->sinks).text, te_describe_view(q).text);
    return TE_OK;
}

static te_status check_attention_elements(te_exec *exec, const char *op, const te_attention *a)
{
    static const char *const names[4] = {"q", "k", "v", "out"};
    const te_view *views[4] = {&a->q, &a->k, &a->v, &a->out};
    te_dtype t = a->q.dtype;
    if (t != TE_F32 && t != TE_BF16 && t != TE_F16 && t != TE_F64)
        return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "%s: q must be float32, bfloat16, float16 or float64", op);
    bool wider = exec->backend->wide_attention && a->out.dtype == TE_F32 && t != TE_F64;
    if (a->k.dtype != t || a->v.dtype != t || (a->out.dtype != t && !wider))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: q, k, v and out must have the same dtype", op);
    if (te_view_present(&a->lse) && a->lse.dtype != TE_F32 && a->lse.dtype != TE_F64)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: lse must be float32 (or float64)", op);
    if (te_view_present(&a->sinks) && a->sinks.dtype != (t == TE_F64 ? TE_F64 : TE_F32))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: sinks must be float32 (float64 beside float64)", op);
    for (int i = 0; i < 4; i++)
        if (views[i]->stride[3] != 1 && views[i]->shape[3] > 1)
            return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: %s has stride %lld in its last dimension; 1 is needed",
                                op, names[i], (long long)views[i]->stride[3]);
    return TE_OK;
}

te_status te_check_attention(te_exec *exec, const char *op, const te_attention *a)
{
    te_status status = check_attention_shapes(exec, op, a);
    if (status == TE_OK) status = check_attention_elements(exec, op, a);
    if (status != TE_OK) return status;
    if (!(a->dropout >= 0.0 && a->dropout <= 1.0))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: dropout probability %g is outside 0 to 1", op, a->dropout);
    bool packed = a->cu_seqlens_q || a->cu_seqlens_kv;
    if (packed && (!a->cu_seqlens_q || !a->cu_seqlens_kv || a->q.shape[0] != 1 || a->n_seqs < 0))
        return te_exec_fail(
            exec, TE_ERROR_ARGUMENT,
            "%s: packed sequences need both lists of offsets and batch 1, not batch %lld with %d sequences", op,
            (long long)a->q.shape[0], a->n_seqs);
    return TE_OK;
}

/* --- look-ups ----------------------------------------------------------------------------------------------------- */

te_status te_check_embedding(te_exec *exec, const char *op, const te_view *rows, const te_view *table,
                             const te_view *ids)
{
    bool fits = table->ndim == 2 && rows->ndim == ids->ndim + 1 && rows->shape[ids->ndim] == table->shape[1];
    for (int i = 0; fits && i < ids->ndim; i++) fits = rows->shape[i] == ids->shape[i];
    if (!fits)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: rows %s, table %s and ids %s do not fit together", op,
                            te_describe_view(rows).text, te_describe_view(table).text, te_describe_view(ids).text);
    if (!is_index(ids->dtype)) return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: ids must be int32 or int64", op);
    return TE_OK;
}

te_status te_check_index(te_exec *exec, const char *op, const te_view *whole, const te_view *part,
                         const te_view *index, int dim)
{
    bool fits = whole->ndim == index->ndim && part->ndim == index->ndim && dim >= 0 && dim < index->ndim;
    for (int i = 0; fits && i < index->ndim; i++)
        fits = part->shape[i] == index->shape[i] && (i == dim || index->shape[i] <= whole->shape[i]);
    if (!fits)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s along %d: %s, %s and index %s do not fit together", op, dim,
                            te_describe_view(whole).text, te_describe_view(part).text, te_describe_view(index).text);
    if (!is_index(index->dtype)) return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: index must be int32 or int64", op);
    if (whole->dtype != part->dtype)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: both operands must have the same dtype", op);
    return TE_OK;
}

te_status te_check_rows(te_exec *exec, const char *op, const te_view *a, const te_view *b)
{
    bool fits = a->ndim == b->ndim && a->ndim > 0;
    for (int i = 0; fits && i + 1 < a->ndim; i++) fits = a->shape[i] == b->shape[i];
    if (fits) return TE_OK;
    return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: %s and %s differ before the last dimension", op,
                        te_describe_view(a).text, te_describe_view(b).text);
}

te_status te_check_arg_reduce(te_exec *exec, const te_view *index, const te_view *src)
{
    int64_t rows = 1;
    bool fits = src->ndim > 0 && index->dtype == TE_I64 && te_view_has_shape(index, src->ndim - 1, src->shape);
    if (!fits)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT,
                            "arg_reduce: index must be int64 %s without the last dimension, not %s",
                            te_describe_view(src).text, te_describe_view(index).text);
    for (int i = 0; i + 1 < src->ndim; i++) rows *= src->shape[i];
    if (rows > 0 && src->shape[src->ndim - 1] == 0)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "arg_reduce: rows of %s are empty", te_describe_view(src).text);
    return TE_OK;
}

/* --- mixtures of experts ------------------------------------------------------------------------------------------ */

static bool is_contiguous(const te_view *v)
{
    int64_t step = 1, all = te_view_numel(v);
    for (int i = v->ndim - 1; i >= 0 && all > 0; i--) {
        if (v->shape[i] > 1 && v->stride[i] != step) return false;
        step *= v->shape[i];
    }
    return true;
}

te_status te_check_route_map(te_exec *exec, const te_view *map, const te_view *counts, const te_view *routing)
{
    bool mask = routing->dtype == TE_BOOL || routing->dtype == TE_U8;
    bool fits = routing->ndim == 2 && (mask || is_index(routing->dtype)) && map->dtype == TE_I32;
    if (fits && mask)
        fits = te_view_has_shape(map, 2, (int64_t[2]){routing->shape[0], 2 * routing->shape[1] + 1}) &&
            te_view_present(counts) && te_view_has_shape(counts, 1, &routing->shape[1]) && counts->dtype == TE_I32;
    else if (fits)
        fits = te_view_has_shape(map, 1, (int64_t[1]){routing->shape[0] * routing->shape[1]});
    if (!fits || !is_contiguous(map) || !is_contiguous(routing))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "route_map: routing %s and map %s do not fit together",
                            te_describe_view(routing).text, te_describe_view(map).text);
    if (te_view_numel(map) > INT32_MAX)
        return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "route_map: %s has more places than int32 can number",
                            te_describe_view(map).text);
    return TE_OK;
}

te_status te_check_routes(te_exec *exec, const char *op, const te_routes *r, const te_view *rows,
                          const te_view *tokens)
{
    bool fits = rows->ndim == 2 && tokens->ndim == 2 && rows->shape[1] == tokens->shape[1] &&
                tokens->shape[0] == r->tokens && rows->dtype == tokens->dtype && te_dtype_is_float(rows->dtype);
    fits = fits && is_contiguous(rows) && is_contiguous(tokens) && te_dtype_size(rows->dtype) > 1;
    if (fits && te_view_present(&r->weights))
        fits = te_view_has_shape(&r->weights, 2, (int64_t[2]){r->tokens, r->experts}) && is_contiguous(&r->weights) &&
            r->weights.dtype == (rows->dtype == TE_F64 ? TE_F64 : TE_F32);
    if (!fits)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: rows %s, tokens %s and weights %s do not fit together", op,
                            te_describe_view(rows).text, te_describe_view(tokens).text,
                            te_describe_view(&r->weights).text);
    return TE_OK;
}

te_status te_check_route_choose(te_exec *exec, const te_view *map, const te_view *scores, int64_t k, int64_t groups,
                                int64_t best_groups)
{
    bool fits = scores->ndim == 2 && te_view_has_shape(map, 2, scores->shape) && map->dtype == TE_BOOL &&
                scores->dtype == TE_F32 && is_contiguous(map) && is_contiguous(scores);
    int64_t experts = fits ? scores->shape[1] : 0, size = groups > 0 ? experts / groups : 0;
    fits = fits && groups > 0 && experts % groups == 0 && best_groups > 0 && best_groups <= groups && k >= 0 &&
           k <= best_groups * size && (groups == 1 || (k % best_groups == 0 && k / best_groups <= size));
    if (fits) return TE_OK;
    return te_exec_fail(exec, TE_ERROR_ARGUMENT, "route_choose: %lld of scores %s in %lld of %lld groups, to %s",
                        (long long)k, te_describe_view(scores).text, (long long)best_groups, (long long)groups,
                        te_describe_view(map).text);
}
