/* attention.h - how the attention kernels divide their work.
 *
 * The unit of everything is a block of TE_ATTENTION_KEYS keys that starts at a multiple of that number within its
 * sequence. A forward task is some queries of one head: it walks over the key blocks those queries see, keeping per
 * query the running maximum, the sum and the weighted values (online softmax; Milakov and Gimelshein, arXiv:1805.02867,
 * Dao et al., arXiv:2205.14135). A backward task is some keys of one kv head: it walks over the queries that see them,
 * recomputing the softmax from q, k and lse.
 *
 *              keys                 A row of scores is cut at the same keys whatever else shares the task, so which
 *            0  64 128 192          queries a forward task holds does not change a bit. In backward, dk and dv have one
 *          +---+---+---+---+        owner; dq is summed per *chunk* of keys, whose length depends on the shape alone,
 *  queries | \ |   |   |   |        and the sums of the chunks are added in order: in place when one task holds all
 *          |   | \ |   |   |        chunks of a head, from separate buffers when each chunk is a task of its own.
 *          |   |   | \ |   |        Both give the same bits. So results do not depend on the number of threads.
 *          +---+---+---+---+
 *
 * Masks are windows: what a query sees is one range of keys, and the ranges move monotonically with the query. Blocks
 * and tiles outside are never computed. Entries of a tile outside have weight zero; a value or key that is not finite
 * must not get through by 0 * inf, so a block that is partly masked and holds such numbers is multiplied row by row,
 * each row over its exact range.
 *
 * The loops are templates over the arithmetic (float, double, float with products of bfloat16), compiled per
 * instruction set in isa/attention_blocks.c. With products of bfloat16, weights and their gradients are rounded before
 * they are multiplied, sums are float32.
 */
#ifndef TE_KERNELS_CPU_ATTENTION_H
#define TE_KERNELS_CPU_ATTENTION_H

#include "../check.h"
#include "cpu.h"

enum {
    TE_ATTENTION_KEYS = 64,         /* keys (and, in backward, queries) of a block */
    TE_ATTENTION_QUERIES = 256,     /* most queries of a forward task */
    TE_ATTENTION_ALONE = 8,         /* most queries that take keys as they lie, one after the other */
    TE_ATTENTION_TILE = 8,          /* queries that share a tile of scores in a block that is partly masked */
    TE_ATTENTION_LANES = 16,        /* columns are padded to this */
    TE_ATTENTION_ONE = 448          /* what a probability of 1 is rounded as: the largest E4M3 */
};

/* One sequence: a batch entry, or a part of the packed extents. */
typedef struct te_attention_seq {
    te_exec *exec; /* whose interrupt ends a task early; set by whoever hands the sequence to te_attention_blocks */
    int64_t batch;
    int64_t q_start, n_q, kv_start, n_kv;
    int64_t delta;       /* query i stands at key i + delta */
    int64_t left, right; /* visible keys around that, both >= 0 */
} te_attention_seq;

/* A backward task: keys key_first … key_end of one kv head, walked in chunks. */
typedef struct te_attention_keys {
    te_attention_seq seq;
    int64_t          kv_head, key_first, key_end;
    int64_t          chunk;   /* keys whose share of dq is summed together */
    void            *dq_part; /* [group][n_q][padded dim] for this chunk; NULL: the task holds all keys and writes dq */
} te_attention_keys;

/* The loops for one arithmetic and instruction set. Scratch is 64-byte aligned and belongs to the calling thread. */
typedef struct te_attention_blocks {
    size_t element; /* of the arithmetic, in bytes */
    size_t (*forward_bytes)(const te_attention *a, int64_t queries);
    size_t (*backward_bytes)(const te_attention_grad *g, int64_t queries, int64_t keys,
                             bool whole); /* whole: dq_part NULL */
    void (*forward)(const te_attention *a, const te_attention_seq *seq, int64_t head, int64_t first, int64_t end,
                    void *scratch);
    /* The same with probabilities rounded to E4M3, as multiples of 1 / TE_ATTENTION_ONE; out = `times` their sum over
     * the values. Dropout leaves entries out and scales nothing. NULL in float64. */
    void (*forward_rounded)(const te_attention *a, const te_attention_seq *seq, int64_t head, int64_t first,
                            int64_t end, float times, void *scratch);
    void (*backward)(const te_attention_grad *g, const te_attention_keys *keys, void *scratch);
    /* dq of rows first … end of a head from its parts, `part_stride` elements apart, each for `chunk` keys. */
    void (*sum_dq)(const te_attention_grad *g, const te_attention_seq *seq, int64_t head, int64_t first, int64_t end,
                   int64_t chunk, const void *parts, int64_t part_stride);
} te_attention_blocks;

extern const te_attention_blocks te_attention_f32_portable, te_attention_f32_avx2, te_attention_f32_avx512;
/* All operands but lse and bias are bfloat16. */
extern const te_attention_blocks te_attention_bf16_avx512bf16, te_attention_bf16_amx;
extern const te_attention_blocks te_attention_f64_portable, te_attention_f64_avx2, te_attention_f64_avx512;

/* attention.c. Packed extents before the first sequence and behind the last one count as sequences that see nothing, so
 * that they get their zeros in the ordinary way. */
te_status        te_attention_check(te_exec *exec, const char *op, const te_attention *a);
int64_t          te_attention_seq_count(const te_attention *a);
te_attention_seq te_attention_seq_at(const te_attention *a, int64_t index);
double           te_attention_work(const te_attention *a); /* multiply-adds of one forward pass, masks not considered */
const te_attention_blocks *te_attention_blocks_of(te_exec *exec, te_dtype dtype);
/* The forward pass of what was checked; times: see forward_rounded, NULL: nothing is rounded. */
te_status te_attention_run(te_exec *exec, const te_attention *a, const float *times);
/* The forward pass on quantized operands (te_attention). */
te_status te_cpu_attention_quantized(te_exec *exec, const te_attention *a);

static inline int64_t te_attention_clamp(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

/* Keys that query i sees: first … end, clamped to low … high. */
static inline int64_t te_attention_first_key(const te_attention_seq *s, int64_t i, int64_t low, int64_t high)
{
    return te_attention_clamp(i + s->delta - s->left, low, high);
}

static inline int64_t te_attention_end_key(const te_attention_seq *s, int64_t i, int64_t low, int64_t high)
{
    return te_attention_clamp(i + s->delta + s->right + 1, low, high);
}

/* Queries that may see some of the keys key_first … key_end. */
static inline int64_t te_attention_first_query(const te_attention_seq *s, int64_t key_first)
{
    return te_attention_clamp(key_first - s->delta - s->right, 0, s->n_q);
}

static inline int64_t te_attention_end_query(const te_attention_seq *s, int64_t key_end)
{
    return te_attention_clamp(key_end - s->delta + s->left, 0, s->n_q);
}

static inline int64_t te_attention_pad(int64_t n)
{
    return (n + TE_ATTENTION_LANES - 1) / TE_ATTENTION_LANES * TE_ATTENTION_LANES;
}

#endif
