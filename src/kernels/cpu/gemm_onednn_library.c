/* gemm_onednn_library.c - primitives are expensive to make (oneDNN generates machine code), so they are kept: a hash
 * table of a bounded number, the least recently used one making room. */
#ifdef TE_WITH_ONEDNN
#include "gemm_onednn.h"

#include <omp.h>
#include <string.h>
#include <sys/mman.h>

enum { CAPACITY = 256, BUCKETS = 128, NONE = -1 };

typedef struct entry {
    te_dnnl_spec   spec;
    te_dnnl_matmul matmul;
    bool           made; /* false: oneDNN cannot do it */
    int            next; /* in its bucket */
    uint64_t       used;
} entry;

struct te_gemm_onednn {
    dnnl_engine_t  engine;
    dnnl_stream_t *streams;
    size_t         stream_capacity;
    int            n_streams, n_entries;
    uint64_t       clock;
    int            bucket[BUCKETS];
    entry         *entries[CAPACITY];
};

te_gemm_onednn *te_gemm_onednn_open(te_exec *exec)
{
    te_gemm_onednn *lib = te_mem_zalloc(exec->mem, sizeof *lib);
    if (!lib) return NULL;
    for (int i = 0; i < BUCKETS; i++) lib->bucket[i] = NONE;
    if (dnnl_engine_create(&lib->engine, dnnl_cpu, 0) == dnnl_success) return lib;
    te_mem_free(exec->mem, lib, sizeof *lib);
    return NULL;
}

static void entry_free(te_exec *exec, entry *e)
{
    if (e->made) te_dnnl_matmul_free(&e->matmul);
    te_mem_free(exec->mem, e, sizeof *e);
}

void te_gemm_onednn_close(te_exec *exec, te_gemm_onednn *lib)
{
    if (!lib) return;
    for (int i = 0; i < lib->n_entries; i++) entry_free(exec, lib->entries[i]);
    for (int i = 0; i < lib->n_streams; i++) dnnl_stream_destroy(lib->streams[i]);
    te_mem_free(exec->mem, lib->streams, lib->stream_capacity * sizeof *lib->streams);
    dnnl_engine_destroy(lib->engine);
    te_mem_free(exec->mem, lib, sizeof *lib);
}

/* --- the table ---------------------------------------------------------------------------------------------------- */

static int bucket_of(const te_dnnl_spec *spec)
{
    uint64_t hash = 14695981039346656037u, word;
    for (size_t i = 0; i < sizeof *spec; i += sizeof word) {
        memcpy(&word, (const char *)spec + i, sizeof word);
        hash = (hash ^ word) * 1099511628211u;
        hash ^= hash >> 29;
    }
    return (int)(hash % BUCKETS);
}
_Static_assert(sizeof(te_dnnl_spec) % sizeof(uint64_t) == 0, "the hash reads whole words");

static void unlink_entry(te_gemm_onednn *lib, int index)
{
    int *link = &lib->bucket[bucket_of(&lib->entries[index]->spec)];
    while (*link != index) link = &lib->entries[*link]->next;
    *link = lib->entries[index]->next;
}

/* A place for a new entry: a fresh one, or that of the entry unused for longest. */
static int take_place(te_exec *exec, te_gemm_onednn *lib)
{
    if (lib->n_entries < CAPACITY) {
        entry *e = te_mem_zalloc(exec->mem, sizeof *e);
        if (!e) return NONE;
        lib->entries[lib->n_entries] = e;
        return lib->n_entries++;
    }
    int oldest = 0;
    for (int i = 1; i < CAPACITY; i++)
        if (lib->entries[i]->used < lib->entries[oldest]->used) oldest = i;
    unlink_entry(lib, oldest);
    if (lib->entries[oldest]->made) te_dnnl_matmul_free(&lib->entries[oldest]->matmul);
    return oldest;
}

/* Whether the system has memory for another primitive. oneDNN ends the process where it has none: it throws, or writes
 * to what it did not get. What is asked here it takes several times over. */
static bool has_room(void)
{
    enum { BYTES = 16 << 20 };
    void *trial = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return trial != MAP_FAILED && munmap(trial, BYTES) == 0;
}

const te_dnnl_matmul *te_gemm_onednn_primitive(te_exec *exec, te_gemm_onednn *lib, const te_dnnl_spec *spec)
{
    int bucket = bucket_of(spec);
    for (int i = lib->bucket[bucket]; i != NONE; i = lib->entries[i]->next) {
        entry *e = lib->entries[i];
        if (memcmp(&e->spec, spec, sizeof *spec) != 0) continue;
        e->used = ++lib->clock;
        return e->made ? &e->matmul : NULL;
    }
    int place = has_room() ? take_place(exec, lib) : NONE;
    if (place == NONE) return NULL;
    entry *e = lib->entries[place];
    *e = (entry){.spec = *spec, .next = lib->bucket[bucket], .used = ++lib->clock};
    lib->bucket[bucket] = place;
    int threads = omp_get_max_threads();
    omp_set_num_threads(1); /* what oneDNN plans for */
    e->made = te_dnnl_matmul_make(&e->matmul, lib->engine, spec);
    omp_set_num_threads(threads);
    return e->made ? &e->matmul : NULL;
}

/* --- streams ------------------------------------------------------------------------------------------------------ */

bool te_gemm_onednn_streams(te_exec *exec, te_gemm_onednn *lib, int threads)
{
    if (!te_mem_grow(exec->mem, &lib->streams, &lib->stream_capacity, (size_t)threads, sizeof *lib->streams))
        return false;
    for (; lib->n_streams < threads; lib->n_streams++)
        if (dnnl_stream_create(&lib->streams[lib->n_streams], lib->engine, dnnl_stream_default_flags) != dnnl_success)
            return false;
    return true;
}

te_dnnl_args te_gemm_onednn_args(const te_gemm_onednn *lib, int thread)
{
    return (te_dnnl_args){.engine = lib->engine, .stream = lib->streams[thread]};
}

#else
typedef int te_gemm_onednn_library_is_empty; /* a translation unit declares something */
#endif
