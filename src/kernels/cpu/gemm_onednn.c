/* gemm_onednn.c - the matrix product through oneDNN: which products, in which pieces.
 *
 * oneDNN lets threads share the sum over k of long products, from about eight threads on, so its bits would depend on their
 * number. Therefore it never sees a thread: c is cut into a grid of pieces that follows from the shape alone, every piece is
 * a product that oneDNN computes on one thread, and our threads take pieces as they become free.
 *
 *               n0      n1                    pieces of one grid have at most four shapes (the last row and
 *           +-------+-------+                 column may be smaller), hence at most four primitives
 *      m0   |       |       |
 *           +-------+-------+
 *      m1   |       |       |
 *           +-------+-------+
 *
 * What oneDNN computes on the way out is the bias and the accumulation. Activations are ours, applied to a piece while it is
 * still in the cache: they are the same functions as everywhere else.
 */
#ifdef TE_WITH_ONEDNN
#include "../dtype.h"
#include "gemm_onednn_compat.h"

#include <omp.h>
#include <string.h>

/* --- primitives ------------------------------------------------------------------------------------------------------ */

enum { PRIMITIVES = 256, BUCKETS = 64, NONE = -1 };

/* A product that oneDNN cannot do is remembered too. */
typedef struct entry {
    te_dnnl_spec   spec;
    te_dnnl_matmul matmul;
    bool           made;
    int            next; /* in the bucket */
    uint64_t       used;
} entry;

struct te_gemm_onednn {
    dnnl_engine_t  engine;
    dnnl_stream_t *streams; /* one per thread */
    size_t         stream_capacity;
    int            n_streams;
    entry         *entries; /* PRIMITIVES */
    int            n_entries;
    int            bucket[BUCKETS];
    uint64_t       clock;
};

static void library_free(te_exec *exec, te_gemm_onednn *lib)
{
    for (int i = 0; i < lib->n_entries; i++)
        if (lib->entries[i].made) te_dnnl_matmul_free(&lib->entries[i].matmul);
    for (int i = 0; i < lib->n_streams; i++) dnnl_stream_destroy(lib->streams[i]);
    if (lib->engine) dnnl_engine_destroy(lib->engine);
    te_mem_free(exec->mem, lib->streams, lib->stream_capacity * sizeof *lib->streams);
    te_mem_free(exec->mem, lib->entries, PRIMITIVES * sizeof *lib->entries);
    te_mem_free(exec->mem, lib, sizeof *lib);
}
