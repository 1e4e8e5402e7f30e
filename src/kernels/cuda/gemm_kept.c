/* gemm_kept.c - copies of operands that come again: weights with zeros around them, and their
 * factors as cuBLASLt reads them.
 *
 * As on the CPU (cpu/gemm_cache.h) contents are known by a key, and a copy is kept from the second sight of one on: a
 * weight that changes in every step costs nothing here, one that serves several batches, or many tokens of a sample, is
 * copied once. Copies go when what they are copies of dies or has another key, and when nobody has asked for them for
 * long; where they have no room, operands are copied for each product. While a graph is recorded nothing is kept or
 * taken, since a launch may come after a change of the weight that the recording does not know; and a launch may change
 * weights under their keys, so all copies go.
 */
#include "gemm.h"

enum { MOST_COPIES = 256, STALE_AFTER = 1024 /* look-ups; a step of a deep model makes some hundreds */ };
static const size_t MOST_BYTES = (size_t)256 << 20;

struct te_cuda_kept {
    te_cuda_kept_id id;
    uint64_t used;
    void    *memory; /* NULL: only seen so far */
    size_t   bytes;
};

static void drop(te_exec *exec, te_cuda_blas *blas, size_t i)
{
    struct te_cuda_kept *k = &blas->kept[i];
    if (k->memory) exec->scratch_free(exec, k->memory);
    blas->kept_bytes -= k->memory ? k->bytes : 0;
    *k = blas->kept[--blas->n_kept];
}

/* The same operand with other contents is not coming back with the old ones. */
static bool is_over(const te_cuda_blas *blas, const struct te_cuda_kept *k, const te_cuda_kept_id *id)
{
    return (k->id.of == id->of && k->id.key != id->key) || blas->kept_clock - k->used > STALE_AFTER;
}

static struct te_cuda_kept *find(te_exec *exec, te_cuda_blas *blas, const te_cuda_kept_id *id)
{
    struct te_cuda_kept *found = NULL;
    for (size_t i = blas->n_kept; i-- > 0;)
        if (is_over(blas, &blas->kept[i], id)) drop(exec, blas, i);
    for (size_t i = 0; i < blas->n_kept && !found; i++)
        if (memcmp(&blas->kept[i].id, id, sizeof *id) == 0) found = &blas->kept[i];
    return found;
}

static void remember(te_exec *exec, te_cuda_blas *blas, const te_cuda_kept_id *id)
{
    if (!blas->kept) blas->kept = te_mem_alloc(exec->mem, MOST_COPIES * sizeof *blas->kept);
    if (blas->kept && blas->n_kept < MOST_COPIES)
        blas->kept[blas->n_kept++] = (struct te_cuda_kept){*id, blas->kept_clock, NULL, 0};
}

void *te_cuda_kept_copy(te_exec *exec, const te_cuda_kept_id *id, size_t bytes, bool *there)
{
    te_cuda_blas *blas;
    *there = false;
    if (!id->key || te_cuda(exec)->capture || te_cuda_blas_open(exec, &blas) != TE_OK) return NULL;
    blas->kept_clock++;
    struct te_cuda_kept *k = find(exec, blas, id);
    if (!k) {
        remember(exec, blas, id);
        return NULL;
    }
    k->used = blas->kept_clock;
    *there = k->memory != NULL;
    if (*there || blas->kept_bytes + bytes > MOST_BYTES) return k->memory;
    void *memory = exec->scratch(exec, bytes); /* which may release tensors, and so drop copies */
    if (!memory) return NULL;
    k = find(exec, blas, id);
    if (!k) {
        exec->scratch_free(exec, memory);
        return NULL;
    }
    k->memory = memory;
    k->bytes = bytes;
    blas->kept_bytes += bytes;
    return memory;
}

void te_cuda_forget(te_exec *exec, const void *data, size_t bytes)
{
    te_cuda_blas *blas = te_cuda(exec)->blas;
    for (size_t i = blas ? blas->n_kept : 0; i-- > 0;) {
        const char *of = blas->kept[i].id.of;
        if (of >= (const char *)data && of < (const char *)data + bytes) drop(exec, blas, i);
    }
}

void te_cuda_forget_all(te_exec *exec)
{
    te_cuda_blas *blas = te_cuda(exec)->blas;
    while (blas && blas->n_kept) drop(exec, blas, blas->n_kept - 1);
}

void te_cuda_kept_close(te_exec *exec, te_cuda_blas *blas)
{
    te_cuda_forget_all(exec);
    te_mem_free(exec->mem, blas->kept, MOST_COPIES * sizeof *blas->kept);
    blas->kept = NULL;
}
