/* graph.c - graphs: work on the stream recorded once and launched again as a whole.
 *
 * What a graph reads from the host besides its kernels' arguments lies in pinned memory of its own. Operations that
 * check their ids report into words of the graph; its last node copies them to the host, where the next wait finds
 * them. A word keeps its report until the host has seen it, however many launches later that is.
 */
#include "cuda_backend.h"

enum { MAX_REPORTS = 256 };

typedef struct kept_memory {
    struct kept_memory *next;
    void *pinned;
} kept_memory;

typedef struct kept_peers {
    struct kept_peers *next;
    struct te_device_peers *peers;
} kept_peers;

typedef struct te_cuda_graph te_cuda_graph;
struct te_cuda_graph {
    te_cuda_graph *next;
    bool dead; /* freed while another one was being recorded, and nothing could be waited for */
    CUgraph graph;
    CUgraphExec runnable; /* both NULL: a connection that it goes through has failed */
    kept_memory *kept;
    kept_peers *peers;
    uint64_t *words, *seen; /* reports, on the device and on the host */
    te_cuda_check checks[MAX_REPORTS];
    int n_reports;
};

/* --- while recording ---------------------------------------------------------------------------------------------- */

te_status te_cuda_outside_graph(te_exec *exec, const char *what)
{
    if (!te_cuda(exec)->capture) return TE_OK;
    return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "%s cannot be part of a graph", what);
}

void *te_cuda_graph_keep(te_exec *exec, size_t bytes)
{
    te_cuda_device *d = te_cuda(exec);
    kept_memory *kept = te_mem_zalloc(exec->mem, sizeof *kept);
    CUresult r = kept ? d->driver.cuMemHostAlloc(&kept->pinned, bytes, 0) : CUDA_ERROR_OUT_OF_MEMORY;
    if (r != CUDA_SUCCESS) {
        te_cuda_result(exec, r, "memory of a graph");
        if (kept) te_mem_free(exec->mem, kept, sizeof *kept);
        return NULL;
    }
    kept->next = d->capture->kept;
    d->capture->kept = kept;
    return kept->pinned;
}

te_status te_cuda_graph_keep_peers(te_exec *exec, struct te_device_peers *peers)
{
    te_cuda_graph *g = te_cuda(exec)->capture;
    for (kept_peers *kept = g->peers; kept; kept = kept->next)
        if (kept->peers == peers) return TE_OK;
    kept_peers *kept = te_mem_zalloc(exec->mem, sizeof *kept);
    if (!kept) return te_exec_fail(exec, TE_ERROR_MEMORY, "out of host memory for a graph");
    *kept = (kept_peers){g->peers, te_cuda_peers_retain(peers)};
    g->peers = kept;
    return TE_OK;
}

static te_status open_reports(te_exec *exec, te_cuda_graph *g)
{
    size_t bytes = MAX_REPORTS * sizeof *g->words;
    g->words = te_cuda_memory_alloc(exec, bytes);
    g->seen = g->words ? te_cuda_graph_keep(exec, bytes) : NULL;
    if (!g->seen) {
        if (g->words) te_cuda_memory_free(exec, g->words, bytes);
        g->words = NULL;
        return te_exec_fail(exec, TE_ERROR_MEMORY, "out of memory on the device");
    }
    memset(g->seen, 0xff, bytes);
    return TE_OK;
}

/* Before the first launch, and when a report was read: one that nobody has read outlasts the launches after it. */
static te_status clear_reports(te_exec *exec, te_cuda_graph *g)
{
    te_cuda_device *d = te_cuda(exec);
    if (g->n_reports == 0) return TE_OK;
    CUresult r = d->driver.cuMemsetD8Async(te_cuda_address(g->words), 0xff, MAX_REPORTS * sizeof *g->words, d->stream);
    return te_cuda_result(exec, r, "clearing the reports of a graph");
}

uint64_t *te_cuda_graph_report(te_exec *exec, const te_cuda_check *check)
{
    te_cuda_graph *g = te_cuda(exec)->capture;
    if (g->n_reports == 0 && open_reports(exec, g) != TE_OK) return NULL;
    int i = g->n_reports < MAX_REPORTS ? g->n_reports : MAX_REPORTS - 1; /* the last word serves all that follow */
    if (i == g->n_reports) g->checks[g->n_reports++] = *check;
    return &g->words[i];
}

/* --- life --------------------------------------------------------------------------------------------------------- */

/* A launch that is under way is not ended by this, but keeps what it needs. */
static void destroy(te_cuda_device *d, te_cuda_graph *g)
{
    if (g->runnable) d->driver.cuGraphExecDestroy(g->runnable);
    if (g->graph) d->driver.cuGraphDestroy(g->graph);
    g->runnable = NULL;
    g->graph = NULL;
}

void te_cuda_graphs_drop(te_exec *exec, const struct te_device_peers *peers)
{
    te_cuda_device *d = te_cuda(exec);
    for (te_cuda_graph *g = d->graphs; g; g = g->next)
        for (const kept_peers *kept = g->peers; kept; kept = kept->next)
            if (kept->peers == peers) destroy(d, g);
}

static te_status check_all_peers(te_exec *exec, const te_cuda_graph *g, const char *what)
{
    te_status status = TE_OK;
    for (const kept_peers *kept = g->peers; kept && status == TE_OK; kept = kept->next)
        status = te_cuda_peers_check(exec, kept->peers, what);
    return status;
}

static void discard(te_exec *exec, te_cuda_graph *g)
{
    te_cuda_device *d = te_cuda(exec);
    destroy(d, g);
    for (kept_memory *kept = g->kept; kept;) {
        kept_memory *next = kept->next;
        d->driver.cuMemFreeHost(kept->pinned);
        te_mem_free(exec->mem, kept, sizeof *kept);
        kept = next;
    }
    for (kept_peers *kept = g->peers; kept;) {
        kept_peers *next = kept->next;
        te_cuda_peers_release(exec, kept->peers);
        te_mem_free(exec->mem, kept, sizeof *kept);
        kept = next;
    }
    if (g->words) te_cuda_memory_free(exec, g->words, MAX_REPORTS * sizeof *g->words);
    te_mem_free(exec->mem, g, sizeof *g);
}

te_status te_cuda_capture_begin(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    te_status status = te_cuda_enter(exec);
    if (status == TE_OK) status = te_cuda_outside_graph(exec, "another graph");
    te_cuda_graph *g = status == TE_OK ? te_mem_zalloc(exec->mem, sizeof *g) : NULL;
    if (!g) return status == TE_OK ? te_exec_fail(exec, TE_ERROR_MEMORY, "out of host memory for a graph") : status;
    CUresult r = d->driver.cuStreamBeginCapture(d->stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    if (r == CUDA_SUCCESS)
        d->capture = g;
    else
        te_mem_free(exec->mem, g, sizeof *g);
    return te_cuda_result(exec, r, "recording a graph");
}

static void bury_the_dead(te_exec *exec)
{
    for (te_cuda_graph *g = te_cuda(exec)->graphs, *next; g; g = next) {
        next = g->next;
        if (g->dead) te_cuda_graph_free(exec, g);
    }
}

te_status te_cuda_capture_end(te_exec *exec, bool keep, void **graph)
{
    te_cuda_device *d = te_cuda(exec);
    te_cuda_graph *g = d->capture;
    *graph = NULL;
    te_status status = te_cuda_enter(exec);
    CUresult r = CUDA_SUCCESS;
    if (keep && g->n_reports > 0)
        r = d->driver.cuMemcpyDtoHAsync(g->seen, te_cuda_address(g->words), MAX_REPORTS * sizeof *g->words, d->stream);
    CUresult end = d->driver.cuStreamEndCapture(d->stream, &g->graph);
    d->capture = NULL;
    if (r == CUDA_SUCCESS) r = end;
    if (r == CUDA_SUCCESS && keep) r = d->driver.cuGraphInstantiateWithFlags(&g->runnable, g->graph, 0);
    d->n_recent = 0; /* nothing of what was recorded is under way */
    if (status == TE_OK && keep) status = te_cuda_result(exec, r, "recording a graph");
    if (status == TE_OK && keep) status = check_all_peers(exec, g, "recording a graph");
    if (status == TE_OK && keep) status = clear_reports(exec, g);
    if (status == TE_OK && keep) {
        g->next = d->graphs;
        d->graphs = g;
        *graph = g;
    } else {
        discard(exec, g);
    }
    te_cuda_peers_reap(exec);
    bury_the_dead(exec);
    return status;
}

te_status te_cuda_graph_launch(te_exec *exec, void *graph)
{
    te_cuda_device *d = te_cuda(exec);
    te_cuda_graph *g = graph;
    te_status status = te_cuda_enter(exec);
    if (status == TE_OK) status = te_cuda_outside_graph(exec, "another graph");
    if (status == TE_OK) status = check_all_peers(exec, g, "launching a graph");
    if (status != TE_OK) return status;
    te_cuda_note(exec, "graph");
    te_cuda_forget_all(exec);
    return te_cuda_result(exec, d->driver.cuGraphLaunch(g->runnable, d->stream), "launching a graph");
}

bool te_cuda_graph_reported(te_exec *exec)
{
    const te_cuda_device *d = te_cuda(exec);
    for (const te_cuda_graph *g = d->capture ? NULL : d->graphs; g; g = g->next)
        for (int i = 0; i < g->n_reports; i++)
            if (((const volatile uint64_t *)g->seen)[i] != UINT64_MAX) return true;
    return false;
}

te_status te_cuda_graph_reports(te_exec *exec)
{
    for (te_cuda_graph *g = te_cuda(exec)->graphs; g; g = g->next)
        for (int i = 0; i < g->n_reports; i++) {
            uint64_t report = g->seen[i];
            if (report == UINT64_MAX) continue;
            memset(g->seen, 0xff, (size_t)g->n_reports * sizeof *g->seen);
            te_status status = clear_reports(exec, g);
            return status == TE_OK ? te_cuda_check_fault(exec, &g->checks[i], report) : status;
        }
    return TE_OK;
}

void te_cuda_graph_free(te_exec *exec, void *graph)
{
    te_cuda_device *d = te_cuda(exec);
    if (d->capture) {
        ((te_cuda_graph *)graph)->dead = true;
        return;
    }
    if (te_cuda_enter(exec) == TE_OK) te_cuda_await(exec, NULL); /* it may be under way */
    for (te_cuda_graph **at = &d->graphs; *at; at = &(*at)->next) {
        if (*at != graph) continue;
        *at = (*at)->next;
        break;
    }
    discard(exec, graph);
}

void te_cuda_graphs_close(te_exec *exec)
{
    void *unfinished;
    if (te_cuda(exec)->capture) te_cuda_capture_end(exec, false, &unfinished);
    while (te_cuda(exec)->graphs) te_cuda_graph_free(exec, te_cuda(exec)->graphs);
}
