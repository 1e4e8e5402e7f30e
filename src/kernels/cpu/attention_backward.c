/* attention_backward.c - the gradient of attention over threads: tasks are kv heads, or chunks of their keys where
 * there are fewer heads than threads can use. attention.h explains why the two give the same bits. */
#include "attention.h"
#include "workers.h"

#include "copy.h"


enum {
    SERIAL_WORK = 1 << 17,       /* multiply-adds of a forward pass below which one thread does all */
    CHUNK = 256,                 /* least keys of a chunk */
    MAX_CHUNKS = 16,             /* per sequence */
    SUM_ROWS = 128               /* rows of dq that one task of the final sum takes */
};
static const double max_parts_bytes = 1e9; /* memory that splitting into chunks may take */

typedef struct backward_plan {
    te_exec                   *exec;
    const te_attention_grad   *g;
    const te_attention_blocks *blocks;
    int64_t seqs, heads, kv_heads;
    int64_t longest_q, longest_kv;
    int64_t chunk, chunks; /* keys, and how many the longest sequence has */
    int64_t part_stride;   /* elements of dq's parts per chunk */
    int     threads;
    bool    split;         /* every chunk is a task */
    size_t  task_bytes, parts_bytes;
    char   *parts, *scratch;
} backward_plan;

static te_status check_gradients(te_exec *exec, const te_attention_grad *g)
{
    static const char *const names[4] = {"dout", "dq", "dk", "dv"};
    const te_attention *a = &g->forward;
    const te_view *views[4] = {&g->dout, &g->dq, &g->dk, &g->dv}, *like[4] = {&a->out, &a->q, &a->k, &a->v};
    for (int i = 0; i < 4; i++) {
        bool fits = views[i]->ndim == 4 && (views[i]->stride[3] == 1 || views[i]->shape[3] <= 1);
        for (int d = 0; fits && d < 4; d++) fits = views[i]->shape[d] == like[i]->shape[d];
        te_dtype t = views[i]->dtype;
        bool ok = t == a->q.dtype || (a->q.dtype != TE_F64 && t == TE_F32);
        if (!fits || !ok)
            return te_exec_fail(exec, TE_ERROR_ARGUMENT,
                                "attention backward: %s %s must be %s with unit stride and the dtype of q (or float32)",
                                names[i], te_describe_view(views[i]).text, te_describe_view(like[i]).text);
    }
    const te_view *b = &g->dbias;
    const int64_t scores[4] = {a->q.shape[0], a->q.shape[1], a->q.shape[2], a->k.shape[2]};
    if (te_view_present(b) && (b->ndim != 4 || memcmp(b->shape, scores, sizeof scores) != 0 ||
                               b->dtype != (a->q.dtype == TE_F64 ? TE_F64 : TE_F32)))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "attention backward: dbias %s %s does not fit the scores",
                            te_dtype_name(b->dtype), te_describe_view(b).text);
    if (!te_view_present(&a->lse) || !te_view_present(&a->out))
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "attention backward: out and lse of the forward pass are needed");
    return TE_OK;
}

/* The chunk depends on the shape alone; whether chunks are separate tasks, on threads and memory. */
static void plan_make(backward_plan *p, te_exec *exec, const te_attention_grad *g)
{
    const te_attention *a = &g->forward;
    *p = (backward_plan){
        .exec = exec, .g = g, .seqs = te_attention_seq_count(a), .heads = a->q.shape[1], .kv_heads = a->k.shape[1]};
    p->blocks = te_attention_blocks_of(exec, a->q.dtype == TE_BF16 ? g->dout.dtype : a->q.dtype);
    for (int64_t i = 0; i < p->seqs; i++) {
        te_attention_seq s = te_attention_seq_at(a, i);
        if (s.n_q > p->longest_q) p->longest_q = s.n_q;
        if (s.n_kv > p->longest_kv) p->longest_kv = s.n_kv;
    }
    p->chunk = (a->k.shape[2] + MAX_CHUNKS - 1) / MAX_CHUNKS;
    p->chunk = p->chunk < CHUNK ? CHUNK : (p->chunk + TE_ATTENTION_KEYS - 1) & -TE_ATTENTION_KEYS;
    p->chunks = (p->longest_kv + p->chunk - 1) / p->chunk;
    p->threads = te_attention_work(a) < SERIAL_WORK ? 1 : exec->threads;
    p->part_stride = a->q.shape[0] * a->q.shape[2] * p->heads * te_attention_pad(a->q.shape[3]);
    double bytes = (double)p->part_stride * (double)p->chunks * (double)p->blocks->element;
    p->split =
        p->seqs * p->kv_heads < 2 * (int64_t)p->threads && p->chunks > 1 && p->threads > 1 && bytes < max_parts_bytes;
    p->parts_bytes = p->split ? ((size_t)bytes + 63) & ~(size_t)63 : 0;
    int64_t keys = p->split || p->heads == p->kv_heads ? p->chunk : p->longest_kv; /* of dk and dv at a time */
    p->task_bytes = (p->blocks->backward_bytes(g, p->longest_q, keys, !p->split) + 63) & ~(size_t)63;
}

/* Where the parts of a head's dq begin; chunks are part_stride apart. */
static char *parts_of(const backward_plan *p, const te_attention_seq *s, int64_t head)
{
    int64_t rows = (s->batch * p->g->forward.q.shape[2] + s->q_start) * p->heads + head * s->n_q;
    return p->parts + (size_t)(rows * te_attention_pad(p->g->forward.q.shape[3])) * p->blocks->element;
}

static void run_task(const backward_plan *p, int64_t chunk, int64_t index, char *scratch)
{
    te_attention_keys keys = {.seq = te_attention_seq_at(&p->g->forward, index / p->kv_heads),
                              .kv_head = index % p->kv_heads, .chunk = p->chunk};
    int64_t n = keys.seq.n_kv, first_head = keys.kv_head * (p->heads / p->kv_heads);
    keys.seq.exec = p->exec;
    keys.key_end = n;
    if (p->split) {
        keys.key_first = chunk * p->chunk;
        keys.key_end = keys.key_first + p->chunk < n ? keys.key_first + p->chunk : n;
        keys.dq_part = parts_of(p, &keys.seq, first_head) + (size_t)(chunk * p->part_stride) * p->blocks->element;
        if (keys.key_first >= n) return;
    }
    p->blocks->backward(p->g, &keys, scratch);
}

static void run_tasks(void *context, int64_t first, int64_t end, int thread)
{
    const backward_plan *p = context;
    int64_t              heads = p->seqs * p->kv_heads;
    for (int64_t task = first; task < end && !te_cpu_stopping(p->exec); task++)
        run_task(p, task / heads, task % heads, p->scratch + (size_t)thread * p->task_bytes);
}

static void run_sum(const backward_plan *p, int64_t index)
{
    int64_t row_blocks = (p->longest_q + SUM_ROWS - 1) / SUM_ROWS;
    int64_t head = index / row_blocks % p->heads, first = index % row_blocks * SUM_ROWS;
    te_attention_seq s = te_attention_seq_at(&p->g->forward, index / row_blocks / p->heads);
    int64_t end = first + SUM_ROWS < s.n_q ? first + SUM_ROWS : s.n_q;
    if (first < end) p->blocks->sum_dq(p->g, &s, head, first, end, p->chunk, parts_of(p, &s, head), p->part_stride);
}

static void run_sums(void *context, int64_t first, int64_t end, int thread)
{
    const backward_plan *p = context;
    (void)thread;
    for (int64_t i = first; i < end && !te_cpu_stopping(p->exec); i++) run_sum(p, i);
}

te_status te_cpu_attention_backward(te_exec *exec, const te_attention_grad *g)
{
    te_status status = te_attention_check(exec, "attention backward", &g->forward);
    if (status == TE_OK) status = check_gradients(exec, g);
    if (status != TE_OK) return status;
    if (g->forward.k.shape[0] * g->forward.k.shape[1] == 0) return TE_OK;
    backward_plan p;
    plan_make(&p, exec, g);
    p.parts = exec->scratch(exec, p.parts_bytes + (size_t)p.threads * p.task_bytes);
    if (!p.parts) return TE_ERROR_MEMORY;
    p.scratch = p.parts + p.parts_bytes;
    int64_t heads = p.seqs * p.kv_heads, tasks = p.split ? heads * p.chunks : heads;
    /* early chunks first: under a causal mask most queries see them */
    te_cpu_loop(exec, p.threads, tasks, 1, run_tasks, &p);
    if (p.split) {
        int64_t sums = p.seqs * p.heads * ((p.longest_q + SUM_ROWS - 1) / SUM_ROWS);
        te_cpu_loop(exec, p.threads, sums, te_cpu_even_grain(sums, p.threads), run_sums, &p);
    }
    exec->scratch_free(exec, p.parts);
    return te_cpu_finish(exec, TE_OK);
}
