/* attention.c - attention: what is accepted, how sequences are laid out, and the forward pass over threads. */
#include "attention.h"
#include "copy.h"
#include "gemm.h"
#include "workers.h"

enum { SERIAL_WORK = 1 << 18 }; /* multiply-adds below which a parallel region costs more than it gains */

const te_attention_blocks *te_attention_blocks_of(te_exec *exec, te_dtype dtype)
{
    bool wide = dtype == TE_F64;
#ifdef TE_ISA_HAS_AVX512BF16
    if (te_cpu(exec)->isa == TE_CPU_AVX512 && te_cpu(exec)->has_bf16 && dtype == TE_BF16)
        return te_gemm_state_get(exec) && te_cpu(exec)->tiled_attention ? te_cpu(exec)->tiled_attention
                                                                        : &te_attention_bf16_avx512bf16;
#endif
#ifdef TE_ISA_HAS_X86
    if (te_cpu(exec)->isa == TE_CPU_AVX512) return wide ? &te_attention_f64_avx512 : &te_attention_f32_avx512;
    if (te_cpu(exec)->isa == TE_CPU_AVX2) return wide ? &te_attention_f64_avx2 : &te_attention_f32_avx2;
#endif
    (void)exec;
    return wide ? &te_attention_f64_portable : &te_attention_f32_portable;
}

/* --- operands --------------------------------------------------------------------------------------------------- */

static te_status check_offsets(te_exec *exec, const char *op, const char *name, const int32_t *offsets, int n,
                               int64_t extent)
{
    for (int i = 0; i <= n; i++)
        if (offsets[i] < (i ? offsets[i - 1] : 0) || offsets[i] > extent)
            return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: %s[%d] is %d; offsets must ascend from 0 to %lld", op,
                                name, i, (int)offsets[i], (long long)extent);
    return TE_OK;
}

te_status te_attention_check(te_exec *exec, const char *op, const te_attention *a)
{
    te_status status = te_check_attention(exec, op, a);
    if (status != TE_OK || !a->cu_seqlens_q) return status;
    status = check_offsets(exec, op, "cu_seqlens_q", a->cu_seqlens_q, a->n_seqs, a->q.shape[2]);
    if (status != TE_OK) return status;
    return check_offsets(exec, op, "cu_seqlens_kv", a->cu_seqlens_kv, a->n_seqs, a->k.shape[2]);
}

/* --- sequences -------------------------------------------------------------------------------------------------- */

int64_t te_attention_seq_count(const te_attention *a)
{
    return a->cu_seqlens_q ? (int64_t)a->n_seqs + 2 : a->q.shape[0];
}

te_attention_seq te_attention_seq_at(const te_attention *a, int64_t index)
{
    int64_t seq_q = a->q.shape[2], seq_kv = a->k.shape[2], open = seq_q + seq_kv;
    te_attention_seq s = {.batch = index, .n_q = seq_q, .n_kv = seq_kv};
    s.left = a->window_left < 0 || a->window_left > open ? open : a->window_left;
    s.right = a->window_right < 0 || a->window_right > open ? open : a->window_right;
    if (a->cu_seqlens_q) {
        int n = a->n_seqs;
        bool lead = index == 0, tail = index == n + 1;
        s.batch = 0;
        s.q_start = lead ? 0 : a->cu_seqlens_q[index - 1];
        s.kv_start = lead ? 0 : a->cu_seqlens_kv[index - 1];
        s.n_q = (tail ? seq_q : a->cu_seqlens_q[index]) - s.q_start;
        s.n_kv = (tail ? seq_kv : a->cu_seqlens_kv[index]) - s.kv_start;
        if (lead || tail) s.left = 0, s.right = -1;
    }
    s.delta = a->bottom_right ? s.n_kv - s.n_q : 0;
    return s;
}

double te_attention_work(const te_attention *a)
{
    double work = 0;
    for (int64_t i = 0; i < te_attention_seq_count(a); i++) {
        te_attention_seq s = te_attention_seq_at(a, i);
        work += (double)s.n_q * (double)s.n_kv;
    }
    return work * (double)a->q.shape[1] * (double)(a->q.shape[3] + a->v.shape[3]);
}

/* --- forward ---------------------------------------------------------------------------------------------------- */

/* Some queries of one sequence; each head of them is a task. */
typedef struct query_block {
    int64_t seq, first, end;
} query_block;

/* Lists the blocks of `size` queries, late ones first: under a causal mask they see most. Returns how many there are;
 * with blocks NULL only counts. */
static int64_t list_blocks(const te_attention *a, int64_t size, query_block *blocks)
{
    int64_t n = 0, seqs = te_attention_seq_count(a);
    for (int64_t i = 0; !blocks && i < seqs; i++) n += (te_attention_seq_at(a, i).n_q + size - 1) / size;
    if (!blocks) return n;
    int64_t longest = 0;
    for (int64_t i = 0; i < seqs; i++) {
        int64_t length = te_attention_seq_at(a, i).n_q;
        if (length > longest) longest = length;
    }
    for (int64_t first = (longest - 1) / size * size; first >= 0 && longest > 0; first -= size)
        for (int64_t i = 0; i < seqs; i++) {
            int64_t length = te_attention_seq_at(a, i).n_q, end = first + size < length ? first + size : length;
            if (first < length) blocks[n++] = (query_block){i, first, end};
        }
    return n;
}

typedef struct forward_job {
    te_exec                   *exec;
    const te_attention        *a;
    const float               *times;
    const te_attention_blocks *blocks;
    const query_block         *list;
    char                      *scratch; /* a part per thread */
    size_t                     task_bytes;
} forward_job;

static void run_blocks(void *context, int64_t first, int64_t end, int thread)
{
    const forward_job  *job = context;
    const te_attention *a = job->a;
    int64_t             heads = a->q.shape[1];
    void               *own = job->scratch + (size_t)thread * job->task_bytes;
    for (int64_t task = first; task < end && !te_cpu_stopping(job->exec); task++) {
        const query_block *block = &job->list[task / heads];
        te_attention_seq   seq = te_attention_seq_at(a, block->seq);
        seq.exec = job->exec;
        if (job->times)
            job->blocks->forward_rounded(a, &seq, task % heads, block->first, block->end, *job->times, own);
        else
            job->blocks->forward(a, &seq, task % heads, block->first, block->end, own);
    }
}

te_status te_attention_run(te_exec *exec, const te_attention *a, const float *times)
{
    int64_t heads = a->q.shape[1];
    if (a->q.shape[0] * a->q.shape[2] * heads == 0) return TE_OK;
    const te_attention_blocks *blocks = te_attention_blocks_of(exec, a->q.dtype);
    int threads = te_attention_work(a) < SERIAL_WORK ? 1 : exec->threads;
    int64_t size = TE_ATTENTION_QUERIES;
    while (size > TE_ATTENTION_KEYS && threads > 1 && list_blocks(a, size, NULL) * heads < 4 * (int64_t)threads)
        size /= 2;
    int64_t n_blocks = list_blocks(a, size, NULL);
    size_t list_bytes = ((size_t)n_blocks * sizeof(query_block) + 63) & ~(size_t)63;
    size_t task_bytes = (blocks->forward_bytes(a, size < a->q.shape[2] ? size : a->q.shape[2]) + 63) & ~(size_t)63;
    char *scratch = exec->scratch(exec, list_bytes + (size_t)threads * task_bytes);
    if (!scratch) return TE_ERROR_MEMORY;
    query_block *list = (query_block *)scratch;
    list_blocks(a, size, list);
    forward_job job = {exec, a, times, blocks, list, scratch + list_bytes, task_bytes};
    te_cpu_loop(exec, threads, n_blocks * heads, 1, run_blocks, &job);
    exec->scratch_free(exec, scratch);
    return te_cpu_finish(exec, TE_OK);
}

te_status te_cpu_attention(te_exec *exec, const te_attention *a)
{
    if (a->q.quant) return te_cpu_attention_quantized(exec, a);
    te_status status = te_attention_check(exec, "attention", a);
    return status == TE_OK ? te_attention_run(exec, a, NULL) : status;
}
