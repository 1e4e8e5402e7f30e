/* attention_naive.h - random problems of attention, and forward and backward straight from their definitions in
 * float64: what backends' results are compared with. */
#ifndef TE_TEST_ATTENTION_NAIVE_H
#define TE_TEST_ATTENTION_NAIVE_H

#include "test.h"

#include "kernels/dtype.h"
#include "kernels/philox.h"

/* --- a problem -------------------------------------------------------------------------------------------------- */

/* Everything that is random about a case, and where its operands lie. */
typedef struct problem {
    te_attention_grad g;
    te_view           bias;
    double           *values[4]; /* q, k, v, dout as float64, contiguous [batch, heads, seq, dim] */
    void             *memory[12];
    int               n_memory;
} problem;

enum { Q, K, V, DOUT };

static void *keep(problem *p, size_t bytes)
{
    void *m = calloc(bytes + 64, 1);
    if (!m) abort();
    return p->memory[p->n_memory++] = m;
}

/* [batch, heads, seq, dim] as a view of memory [batch, seq, parts, heads, dim], part `part`, as a projection leaves it.
 */
static te_view projection_view(void *data, te_dtype dtype, const int64_t *shape, int parts, int part)
{
    te_view v = {
        .data = (char *)data + (size_t)(part * shape[1] * shape[3]) * te_dtype_size(dtype), .dtype = dtype, .ndim = 4};
    memcpy(v.shape, shape, 4 * sizeof *shape);
    v.stride[3] = 1;
    v.stride[1] = shape[3];
    v.stride[2] = shape[1] * shape[3] * parts;
    v.stride[0] = v.stride[2] * shape[2];
    return v;
}

static te_view new_view(problem *p, te_dtype dtype, const int64_t *shape)
{
    int64_t n = shape[0] * shape[1] * shape[2] * shape[3];
    return projection_view(keep(p, (size_t)n * te_dtype_size(dtype)), dtype, shape, 1, 0);
}

static int64_t offset4(const te_view *v, int64_t b, int64_t h, int64_t i, int64_t d)
{
    return b * v->stride[0] + h * v->stride[1] + i * v->stride[2] + d * v->stride[3];
}

static double at4(const te_view *v, int64_t b, int64_t h, int64_t i, int64_t d)
{
    return te_load_f64(v->data, v->dtype, offset4(v, b, h, i, d));
}

static void randomize(const te_view *v, uint64_t *seed, double size)
{
    for (int64_t b = 0; b < v->shape[0]; b++)
        for (int64_t h = 0; h < v->shape[1]; h++)
            for (int64_t i = 0; i < v->shape[2]; i++)
                for (int64_t d = 0; d < v->shape[3]; d++)
                    te_store_f64(v->data, v->dtype, offset4(v, b, h, i, d), test_uniform(seed, -size, size));
}

typedef struct shape {
    int64_t batch, heads, kv_heads, seq_q, seq_kv, dim, dim_v;
} shape;

static problem problem_new(te_dtype dtype, shape s, uint64_t *seed)
{
    problem p = {0};
    int64_t q[4] = {s.batch, s.heads, s.seq_q, s.dim}, k[4] = {s.batch, s.kv_heads, s.seq_kv, s.dim};
    int64_t v[4] = {s.batch, s.kv_heads, s.seq_kv, s.dim_v}, o[4] = {s.batch, s.heads, s.seq_q, s.dim_v};
    te_attention *a = &p.g.forward;
    if (s.heads == s.kv_heads && s.seq_q == s.seq_kv && s.dim == s.dim_v) {
        size_t n = (size_t)(s.batch * s.heads * s.seq_q * s.dim) * 3;
        char *x = keep(&p, n * te_dtype_size(dtype)), *dx = keep(&p, n * te_dtype_size(dtype));
        a->q = projection_view(x, dtype, q, 3, 0), p.g.dq = projection_view(dx, dtype, q, 3, 0);
        a->k = projection_view(x, dtype, k, 3, 1), p.g.dk = projection_view(dx, dtype, k, 3, 1);
        a->v = projection_view(x, dtype, v, 3, 2), p.g.dv = projection_view(dx, dtype, v, 3, 2);
    } else {
        a->q = new_view(&p, dtype, q), p.g.dq = new_view(&p, dtype, q);
        a->k = new_view(&p, dtype, k), p.g.dk = new_view(&p, dtype, k);
        a->v = new_view(&p, dtype, v), p.g.dv = new_view(&p, dtype, v);
    }
    a->out = new_view(&p, dtype, o);
    p.g.dout = new_view(&p, dtype, o);
    a->lse = test_view(keep(&p, (size_t)(s.batch * s.heads * s.seq_q) * 8), dtype == TE_F64 ? TE_F64 : TE_F32, 3, q);
    a->scale = 1 / sqrt((double)(s.dim ? s.dim : 1));
    a->window_left = a->window_right = -1;
    a->rng = (te_rng){.seed = 12345, .stream = 7, .offset = 99};
    randomize(&a->q, seed, 2);
    randomize(&a->k, seed, 2);
    randomize(&a->v, seed, 2);
    randomize(&p.g.dout, seed, 2);
    return p;
}

static void problem_free(problem *p)
{
    for (int i = 0; i < p->n_memory; i++) free(p->memory[i]);
}

/* A bias [batch | 1, heads | 1, seq_q | 1, seq_kv], broadcast by stride 0. */
static void add_bias(problem *p, te_dtype dtype, bool per_batch, bool per_head, bool per_query, uint64_t *seed)
{
    te_attention *a = &p->g.forward;
    int64_t full[4] = {a->q.shape[0], a->q.shape[1], a->q.shape[2], a->k.shape[2]};
    int64_t own[4] = {per_batch ? full[0] : 1, per_head ? full[1] : 1, per_query ? full[2] : 1, full[3]};
    int64_t n = own[0] * own[1] * own[2] * own[3];
    a->bias = test_view(keep(p, (size_t)n * te_dtype_size(dtype)), dtype, 4, own);
    randomize(&a->bias, seed, 1);
    for (int i = 0; i < 4; i++) {
        if (own[i] != full[i]) a->bias.stride[i] = 0;
        a->bias.shape[i] = full[i];
    }
    p->g.dbias = new_view(p, a->q.dtype == TE_F64 ? TE_F64 : TE_F32, full);
}

/* Sinks, of which one is -inf where there are several. */
static void add_sinks(problem *p, uint64_t seed)
{
    te_attention *a = &p->g.forward;
    te_dtype dtype = a->q.dtype == TE_F64 ? TE_F64 : TE_F32;
    int64_t  heads = a->q.shape[1];
    a->sinks = test_view(keep(p, (size_t)heads * te_dtype_size(dtype)), dtype, 1, &heads);
    for (int64_t h = 0; h < heads; h++)
        te_store_f64(a->sinks.data, dtype, h, h == 2 ? -INFINITY : test_uniform(&seed, -2, 4));
}

/* --- the reference ---------------------------------------------------------------------------------------------- */

typedef struct reference {
    double *out, *lse, *dq, *dk, *dv, *dbias;
    double *out_size, *dq_size, *dk_size, *dv_size; /* the same sums over the sizes of their terms */
    double *dbias_size; /* 2^-9 of that: a difference of sums of float32 */
} reference;

static bool sees(const te_attention *a, int64_t i, int64_t j)
{
    int64_t n_q = a->q.shape[2], n_kv = a->k.shape[2];
    if (a->cu_seqlens_q) {
        int s = -1;
        for (int n = 0; n < a->n_seqs; n++)
            if (i >= a->cu_seqlens_q[n] && i < a->cu_seqlens_q[n + 1] && j >= a->cu_seqlens_kv[n] &&
                j < a->cu_seqlens_kv[n + 1])
                s = n;
        if (s < 0) return false;
        i -= a->cu_seqlens_q[s], j -= a->cu_seqlens_kv[s];
        n_q = a->cu_seqlens_q[s + 1] - a->cu_seqlens_q[s], n_kv = a->cu_seqlens_kv[s + 1] - a->cu_seqlens_kv[s];
    }
    int64_t at = i + (a->bottom_right ? n_kv - n_q : 0);
    return (a->window_left < 0 || j >= at - a->window_left) && (a->window_right < 0 || j <= at + a->window_right);
}

static double dropout_factor(const te_attention *a, int64_t b, int64_t h, int64_t i, int64_t j)
{
    if (a->dropout == 0) return 1;
    uint64_t e = (uint64_t)(((b * a->q.shape[1] + h) * a->q.shape[2] + i) * a->k.shape[2] + j);
    double threshold = rint(a->dropout * 4294967296.0);
    return te_rng_word(a->rng, e) >= threshold ? 1 / (1 - a->dropout) : 0;
}

/* A tensor's values, one behind the other. */
typedef struct dense {
    double *x;
    int64_t heads, rows, columns;
} dense;

static dense dense_of(const te_view *v)
{
    dense t = {NULL, v->shape[1], v->shape[2], v->shape[3]};
    double *x = t.x = malloc((size_t)(v->shape[0] * t.heads * t.rows * t.columns + 1) * sizeof *x);
    if (!x) abort();
    for (int64_t b = 0; b < v->shape[0]; b++)
        for (int64_t h = 0; h < t.heads; h++)
            for (int64_t i = 0; i < t.rows; i++)
                for (int64_t d = 0; d < t.columns; d++) *x++ = at4(v, b, h, i, d);
    return t;
}

TEST_UNWATCHED static inline double *row_of(const dense *t, int64_t b, int64_t h, int64_t i)
{
    return t->x + ((b * t->heads + h) * t->rows + i) * t->columns;
}

TEST_UNWATCHED static double dot(const double *x, const double *y, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

/* One row: weights p, factors z; false when it sees nothing. */
static bool row_weights(const te_attention *a, const dense *q, const dense *k, int64_t b, int64_t h, int64_t i,
                        double *p, double *z, double *lse)
{
    int64_t n = a->k.shape[2], kv = h / (a->q.shape[1] / a->k.shape[1]);
    double top = -INFINITY, sum = 0;
    for (int64_t j = 0; j < n; j++) {
        p[j] = a->scale * dot(row_of(q, b, h, i), row_of(k, b, kv, j), q->columns);
        double bias = a->bias.data ? at4(&a->bias, b, h, i, j) : 0;
        p[j] = !sees(a, i, j) || bias == -INFINITY ? -INFINITY : p[j] + bias;
        z[j] = dropout_factor(a, b, h, i, j);
        if (p[j] > top) top = p[j];
    }
    double sink = a->sinks.data ? te_load_f64(a->sinks.data, a->sinks.dtype, h) : -INFINITY;
    if (sink > top) top = sink;
    if (sink != -INFINITY) sum = exp(sink - top);
    for (int64_t j = 0; j < n; j++) sum += p[j] = p[j] == -INFINITY ? 0 : exp(p[j] - top);
    for (int64_t j = 0; j < n; j++) p[j] = sum == 0 ? 0 : p[j] / sum;
    *lse = sum == 0 ? -INFINITY : top + log(sum);
    return sum != 0;
}

TEST_UNWATCHED static inline void add_term(double *sum, double *size, double term)
{
    *sum += term;
    *size += fabs(term);
}

/* sum += factor * x, and the sizes of terms. */
TEST_UNWATCHED static void add_row(double *sum, double *size, double factor, const double *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) add_term(&sum[i], &size[i], factor * x[i]);
}

TEST_UNWATCHED static void add_dot(double *sum, double *size, const double *x, const double *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) add_term(sum, size, x[i] * y[i]);
}

TEST_UNWATCHED static void add_sizes(double *size, double factor, const double *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) size[i] += factor * fabs(x[i]);
}

/* Backward is told what forward rounded: the gradients here take `out` as it is. */
static reference reference_run(const te_attention_grad *g)
{
    const te_attention *a = &g->forward;
    int64_t B = a->q.shape[0], H = a->q.shape[1], KH = a->k.shape[1], M = a->q.shape[2], N = a->k.shape[2],
            D = a->q.shape[3], E = a->v.shape[3];
    reference r = {calloc((size_t)(B * H * M * E + 1), 8), calloc((size_t)(B * H * M + 1), 8),
                   calloc((size_t)(B * H * M * D + 1), 8), calloc((size_t)(B * KH * N * D + 1), 8),
                   calloc((size_t)(B * KH * N * E + 1), 8), calloc((size_t)(B * H * M * N + 1), 8),
                   calloc((size_t)(B * H * M * E + 1), 8),
                   calloc((size_t)(B * H * M * D + 1), 8), calloc((size_t)(B * KH * N * D + 1), 8),
                   calloc((size_t)(B * KH * N * E + 1), 8), calloc((size_t)(B * H * M * N + 1), 8)};
    dense q = dense_of(&a->q), k = dense_of(&a->k), v = dense_of(&a->v), out = dense_of(&a->out),
          dout = dense_of(&g->dout);
    double *p = calloc((size_t)N + 1, 8), *z = calloc((size_t)N + 1, 8);
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < H; h++)
            for (int64_t i = 0; i < M; i++) {
                int64_t row = (b * H + h) * M + i, kv = h / (H / KH);
                bool any = row_weights(a, &q, &k, b, h, i, p, z, &r.lse[row]);
                double total = 0, total_size = 0;
                const double *gradient = row_of(&dout, b, h, i);
                for (int64_t j = 0; any && j < N; j++)
                    if (p[j] != 0) add_row(r.out + row * E, r.out_size + row * E, p[j] * z[j], row_of(&v, b, kv, j), E);
                if (any) add_dot(&total, &total_size, gradient, row_of(&out, b, h, i), E);
                for (int64_t j = 0; any && j < N; j++) {
                    double dp = 0, dp_size = 0;
                    int64_t at = (b * KH + kv) * N + j;
                    if (p[j] == 0) continue;
                    add_dot(&dp, &dp_size, gradient, row_of(&v, b, kv, j), E);
                    add_row(r.dv + at * E, r.dv_size + at * E, p[j] * z[j], gradient, E);
                    double ds = p[j] * (z[j] * dp - total) * a->scale;
                    r.dbias[row * N + j] = p[j] * (z[j] * dp - total);
                    double ds_size = p[j] * (z[j] * dp_size + total_size);
                    r.dbias_size[row * N + j] = 0x1p-9 * ds_size;
                    ds_size *= 0x1p-13 * fabs(a->scale); /* 2^-22 beside terms' 2^-9: what cancels leaves roundoff */
                    add_row(r.dq + row * D, r.dq_size + row * D, ds, row_of(&k, b, kv, j), D);
                    add_sizes(r.dq_size + row * D, ds_size, row_of(&k, b, kv, j), D);
                    add_row(r.dk + at * D, r.dk_size + at * D, ds, row_of(&q, b, h, i), D);
                    add_sizes(r.dk_size + at * D, ds_size, row_of(&q, b, h, i), D);
                }
            }
    free(q.x), free(k.x), free(v.x), free(out.x), free(dout.x);
    free(p);
    free(z);
    return r;
}

static void reference_free(reference *r)
{
    free(r->out), free(r->lse), free(r->dq), free(r->dk), free(r->dv), free(r->dbias);
    free(r->out_size), free(r->dq_size), free(r->dk_size), free(r->dv_size), free(r->dbias_size);
}

#endif
