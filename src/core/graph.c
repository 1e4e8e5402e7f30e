/* graph.c - see graph.h. */
#include "graph.h"

/* Memory that existed before the recording, and its dtype: copies in the compute dtype are made anew from it when it
 * was changed by others between launches. */
typedef struct kept {
    te_storage *storage;
    te_dtype dtype;
    uint64_t version; /* when it was first given to a kernel of the graph */
    bool written;     /* by the graph */
    te_tensor *shadow; /* the copy in the compute dtype that kernels of the graph read; NULL: none does */
    uint64_t shadow_version; /* of the storage, when the graph has copied it there, and it is not the storage's own */
    te_tensor *left; /* the copy that the graph leaves up to date where it writes the storage; NULL: none */
} kept;

/* Copies of a source that a launch makes only where that was changed: by others, or by the graph itself. */
typedef struct copied {
    te_storage *source;
    uint64_t version; /* that they are of, once the graph has been launched */
    bool launched, written;
    te_quantized copies;
    te_tensor *words; /* te_quantize_job.kept */
} copied;

enum { MAX_COPIED = 2048 };

struct te_graph {
    te_context *ctx;
    te_device *device;
    te_pool *pool;
    void *recorded;            /* the backend's */
    te_tensor *random;         /* int64 {2}: seed, and where the numbers of a launch begin */
    uint64_t id, began;    /* began: where random numbers stood, and stand again behind the recording */
    uint64_t first, drawn; /* offset of its first number; how far it went from there */
    uint64_t seed;
    te_tensor *random_before; /* of the graph that this one follows, with its first offset; NULL: it follows none */
    uint64_t first_before;
    kept *kept;
    size_t n_kept, capacity;
    te_storage *made; /* what there is of its own memory: results, gradients */
    copied *copied;
    size_t n_copied, copied_capacity;
    te_tensor *stale; /* float32 {MAX_COPIED}: whether a launch makes those copies */
    float *sent;      /* what is there */
    const char *spoilt;
};

/* --- recording ---------------------------------------------------------------------------------------------------- */

static void dissolve(te_graph *g)
{
    te_context *ctx = g->ctx;
    te_exec *exec = &g->device->exec;
    if (g->recorded) exec->backend->graph_free(exec, g->recorded);
    for (size_t i = 0; i < g->n_copied; i++) {
        te_quantized_close(&g->copied[i].copies);
        te_tensor_release(g->copied[i].words);
    }
    te_mem_free(&ctx->mem, g->copied, g->copied_capacity * sizeof *g->copied);
    te_mem_free(&ctx->mem, g->sent, MAX_COPIED * sizeof *g->sent);
    te_tensor_release(g->stale);
    if (g->pool) te_pool_close(&g->device->allocator, g->pool);
    for (size_t i = 0; i < g->n_kept; i++) {
        te_tensor_release(g->kept[i].shadow);
        te_tensor_release(g->kept[i].left);
        g->kept[i].storage->graph_refs--;
        te_storage_release(g->kept[i].storage);
    }
    te_mem_free(&ctx->mem, g->kept, g->capacity * sizeof *g->kept);
    while (g->made) te_graph_unmade(g->made);
    te_tensor_release(g->random);
    te_tensor_release(g->random_before);
    te_mem_free(&ctx->mem, g, sizeof *g);
    te_context_unref(ctx);
}

te_status te_graph_begin(te_context *ctx, te_device *device, te_graph **out)
{
    te_exec *exec = &device->exec;
    int64_t two = 2;
    if (!exec->backend->capture_begin)
        return te_fail(ctx, TE_ERROR_UNSUPPORTED, "te.graph: %s has no graphs", device->name);
    if (ctx->capture) return te_fail(ctx, TE_ERROR_UNSUPPORTED, "te.graph: another graph is being recorded");
    te_graph *g = te_mem_zalloc(&ctx->mem, sizeof *g);
    if (!g) return te_fail_memory(ctx, "te.graph");
    *g = (te_graph){
        .ctx = ctx, .device = device, .id = ctx->clock++, .began = ctx->rng_offset, .first = ctx->rng_offset,
        .seed = ctx->seed};
    te_context_retain(ctx);
    g->random = te_tensor_new(ctx, device, TE_I64, 1, &two);
    g->pool = te_pool_open(&device->allocator);
    te_status status = !g->random ? ctx->status : g->pool ? TE_OK : te_fail_memory(ctx, "te.graph");
    if (status == TE_OK) {
        status = exec->backend->capture_begin(exec);
        if (status != TE_OK) te_fail_exec(ctx, status, exec, "graph");
    }
    if (status != TE_OK) {
        dissolve(g);
        return status;
    }
    device->allocator.pool = g->pool;
    ctx->capture = g;
    *out = g;
    return TE_OK;
}

void te_graph_follow(te_graph *g, const te_graph *before)
{
    g->random_before = te_tensor_retain(before->random);
    g->first_before = before->first;
    g->first = g->ctx->rng_offset = before->first + before->drawn;
}

/* Whether it lies in the graph's own memory. */
static bool is_own(const te_graph *g, const te_storage *s) { return s->block && s->block->pool == g->pool; }

/* What a launch writes. */
static bool writes(const te_graph *g, const te_storage *s)
{
    for (size_t i = 0; i < g->n_kept; i++)
        if (g->kept[i].storage == s) return g->kept[i].written;
    return true;
}

/* Nothing ran: random numbers stand where they stood. */
te_status te_graph_end(te_graph *g, bool keep)
{
    te_context *ctx = g->ctx;
    te_exec *exec = &g->device->exec;
    te_status status = TE_OK;
    ctx->capture = NULL;
    g->device->allocator.pool = NULL;
    for (size_t i = 0; i < g->n_kept; i++) {
        const te_storage *s = g->kept[i].storage;
        g->kept[i].written = g->kept[i].version != s->version || s->graph_wrote == g->id;
        if (s->shadow_version == s->version) g->kept[i].left = te_tensor_retain(s->shadow);
    }
    for (size_t i = 0; i < g->n_copied; i++) g->copied[i].written = writes(g, g->copied[i].source);
    g->drawn = ctx->rng_offset - g->first;
    ctx->rng_offset = g->began;
    ctx->seed = g->seed;
    if (g->spoilt && keep)
        status = te_fail(ctx, TE_ERROR_UNSUPPORTED, "te.graph: %s cannot be part of a graph", g->spoilt);
    te_status ended = exec->backend->capture_end(exec, keep && !g->spoilt, &g->recorded);
    if (ended != TE_OK && keep && status == TE_OK) status = te_fail_exec(ctx, ended, exec, "graph");
    if (status != TE_OK || !keep) dissolve(g);
    return status;
}

void te_graph_keep(te_graph *g, const te_tensor *t)
{
    te_storage *s = t->storage;
    if (s->device != g->device || s->graph == g->id || is_own(g, s)) return;
    if (!te_mem_grow(&g->ctx->mem, &g->kept, &g->capacity, g->n_kept + 1, sizeof *g->kept)) {
        g->spoilt = "more than host memory can hold";
        return;
    }
    s->graph = g->id;
    s->refs++;
    s->graph_refs++;
    g->kept[g->n_kept++] = (kept){.storage = s, .dtype = t->dtype, .version = s->version};
}

void te_graph_keep_shadow(te_graph *g, const te_tensor *t)
{
    te_graph_keep(g, t);
    for (size_t i = 0; i < g->n_kept; i++) {
        kept *k = &g->kept[i];
        if (k->storage != t->storage || k->shadow == t->storage->shadow) continue;
        te_tensor_release(k->shadow);
        k->shadow = te_tensor_retain(t->storage->shadow);
        k->shadow_version = t->storage->shadow_version;
    }
}

void te_graph_made(te_graph *g, te_storage *s)
{
    if (!is_own(g, s)) return;
    s->made_at = &g->made;
    s->made_next = g->made;
    if (g->made) g->made->made_at = &s->made_next;
    g->made = s;
}

void te_graph_unmade(te_storage *s)
{
    if (!s->made_at) return;
    *s->made_at = s->made_next;
    if (s->made_next) s->made_next->made_at = s->made_at;
    s->made_at = NULL;
    s->made_next = NULL;
}

/* --- quantized weights -------------------------------------------------------------------------------------------- */

/* Memory that no kernel of the graph has before. */
static bool open_stale(te_graph *g)
{
    te_pool *pool = g->device->allocator.pool;
    if (g->stale) return true;
    g->sent = te_mem_zalloc(&g->ctx->mem, MAX_COPIED * sizeof *g->sent);
    g->device->allocator.pool = NULL;
    g->stale = g->sent ? te_tensor_new(g->ctx, g->device, TE_F32, 1, (int64_t[]){MAX_COPIED}) : NULL;
    g->device->allocator.pool = pool;
    for (int i = 0; i < MAX_COPIED && g->stale; i++) g->sent[i] = -1; /* nothing yet */
    return g->stale != NULL;
}

const float *te_graph_stale(te_graph *g, const te_tensor *t)
{
    te_graph_keep(g, t);
    bool lasts = t->storage->graph == g->id && !g->spoilt && g->n_copied < MAX_COPIED;
    if (!lasts || !open_stale(g)) return NULL;
    if (!te_mem_grow(&g->ctx->mem, &g->copied, &g->copied_capacity, g->n_copied + 1, sizeof *g->copied))
        return NULL;
    g->copied[g->n_copied] = (copied){.source = t->storage};
    return (const float *)te_tensor_pointer(g->stale) + g->n_copied;
}

void te_graph_keep_copies(te_graph *g, const te_quantized *copies, te_tensor *words)
{
    copied *c = &g->copied[g->n_copied++];
    te_quantized_share(copies, true, true, &c->copies);
    c->words = te_tensor_retain(words);
}

/* Tells the device which copies to make, where that is not what it knows. */
static te_status send_stale(te_graph *g)
{
    te_exec *exec = &g->device->exec;
    bool same = true;
    for (size_t i = 0; i < g->n_copied; i++) {
        const copied *c = &g->copied[i];
        float stale = !c->launched || c->written || c->version != c->source->version;
        same &= g->sent[i] == stale;
        g->sent[i] = stale;
    }
    if (same) return TE_OK;
    te_status status = exec->backend->memory_copy(exec, g->stale->storage->data, g->sent, g->n_copied * sizeof *g->sent,
                                                  TE_COPY_HOST_TO_DEVICE);
    if (status == TE_OK) return TE_OK;
    for (size_t i = 0; i < g->n_copied; i++) g->sent[i] = -1; /* nobody knows what has arrived */
    return te_fail_exec(g->ctx, status, exec, "graph");
}

uint64_t te_graph_id(const te_graph *g) { return g ? g->id : 0; }

te_rng te_graph_draw(te_graph *g, te_rng rng)
{
    if (rng.offset < g->first && g->random_before) {
        rng.offset -= g->first_before;
        rng.base = (const uint64_t *)g->random_before->storage->data;
        return rng;
    }
    if (rng.offset < g->first) te_graph_spoil(g, "drawing random numbers from before the recording");
    rng.offset -= g->first;
    rng.base = (const uint64_t *)g->random->storage->data;
    return rng;
}

void te_graph_spoil(te_graph *g, const char *what)
{
    if (!g->spoilt) g->spoilt = what;
}

/* --- launching ---------------------------------------------------------------------------------------------------- */

static te_status refresh_copy(te_graph *g, const kept *k, te_tensor *shadow, uint64_t *version)
{
    te_exec *exec = &g->device->exec;
    if (!shadow || *version == k->storage->version) return TE_OK;
    te_view dst = te_tensor_view(shadow), src = dst;
    src.data = k->storage->data;
    src.dtype = k->dtype;
    te_status status = exec->backend->copy(exec, &dst, &src);
    if (status != TE_OK) return te_fail_exec(g->ctx, status, exec, "graph");
    *version = k->storage->version;
    return TE_OK;
}

/* The copies in the compute dtype of a weight that somebody changed: its own, and the graph's where somebody has had
 * another one made since. */
static te_status refresh(te_graph *g, kept *k)
{
    te_storage *s = k->storage;
    te_status status = refresh_copy(g, k, s->shadow, &s->shadow_version);
    if (k->shadow == s->shadow) k->shadow_version = s->shadow_version;
    return status == TE_OK ? refresh_copy(g, k, k->shadow, &k->shadow_version) : status;
}

/* What a graph has kept it may have written, and its own memory it has. */
static void count_writes(te_graph *g)
{
    for (size_t i = 0; i < g->n_kept; i++) {
        kept *k = &g->kept[i];
        te_storage *s = k->storage;
        bool current = s->shadow && s->shadow_version == s->version && (!k->written || s->shadow == k->left);
        bool own_current = k->shadow && k->shadow_version == s->version && (!k->written || k->shadow == k->left);
        s->version++;
        if (g->kept[i].written) s->written = g->ctx->clock++;
        else s->launches++;
        if (current) s->shadow_version = s->version;
        if (own_current) k->shadow_version = s->version;
    }
    for (te_storage *s = g->made; s; s = s->made_next) {
        bool current = s->shadow && s->shadow_version == s->version && is_own(g, s->shadow->storage);
        s->version++;
        s->written = g->ctx->clock++;
        if (current) s->shadow_version = s->version; /* a launch makes that copy as well */
    }
    for (size_t i = 0; i < g->n_copied; i++) {
        g->copied[i].version = g->copied[i].source->version;
        g->copied[i].launched = true;
    }
}

te_status te_graph_launch(te_graph *g)
{
    te_context *ctx = g->ctx;
    te_exec *exec = &g->device->exec;
    uint64_t random[2] = {ctx->seed, ctx->rng_offset};
    te_status status = TE_OK;
    if (ctx->capture) return te_fail(ctx, TE_ERROR_UNSUPPORTED, "te.graph: a graph cannot be part of a graph");
    for (size_t i = 0; i < g->n_kept && status == TE_OK; i++) status = refresh(g, &g->kept[i]);
    if (status == TE_OK) status = send_stale(g);
    if (status != TE_OK) return status;
    if (g->drawn > 0)
        status =
            exec->backend->memory_copy(exec, g->random->storage->data, random, sizeof random, TE_COPY_HOST_TO_DEVICE);
    if (status == TE_OK) status = exec->backend->graph_launch(exec, g->recorded);
    if (status != TE_OK) return te_fail_exec(ctx, status, exec, "graph");
    ctx->rng_offset += g->drawn;
    count_writes(g);
    return TE_OK;
}

void te_graph_release(te_graph *g) { dissolve(g); }

te_tensor *te_graph_numbers(te_context *ctx, te_device *device, int64_t rows, int64_t columns)
{
    te_pool *pool = device->allocator.pool;
    device->allocator.pool = NULL;
    te_tensor *t = te_tensor_new(ctx, device, TE_F64, 2, (int64_t[]){rows, columns});
    device->allocator.pool = pool;
    return t;
}

te_status te_tensor_send(te_tensor *t, const double *values, int64_t n)
{
    te_exec *exec = &t->storage->device->exec;
    if (t->dtype != TE_F64 || te_tensor_numel(t) != n || !te_tensor_contiguous(t))
        return te_fail(t->ctx, TE_ERROR_ARGUMENT,
                       "send: a contiguous float64 tensor of %lld numbers is needed, not %s %s", (long long)n,
                       te_dtype_name(t->dtype), TE_SHAPE_TEXT(t));
    te_status status = exec->backend->memory_copy(exec, te_tensor_pointer(t), values, (size_t)n * sizeof *values,
                                                  TE_COPY_HOST_TO_DEVICE);
    te_tensor_written(t);
    return status == TE_OK ? TE_OK : te_fail_exec(t->ctx, status, exec, "send");
}

/* --- numbers that come without a wait ----------------------------------------------------------------------------- */

struct te_fetch {
    te_context *ctx;
    te_exec *exec;
    void *reading; /* the backend's; NULL: the numbers are here */
    int n;
    double values[];
};

static size_t fetch_size(int n) { return sizeof(te_fetch) + (size_t)n * sizeof(double); }

te_status te_tensor_fetch(te_tensor *t, te_fetch **out)
{
    te_context *ctx = t->ctx;
    te_exec *exec = &t->storage->device->exec;
    int64_t n = te_tensor_numel(t);
    if (t->dtype != TE_F64 || n > TE_FETCH_MAX || !te_tensor_contiguous(t))
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "fetch: a contiguous float64 tensor of at most %d numbers is needed, not %s %s",
                       (int)TE_FETCH_MAX, te_dtype_name(t->dtype), TE_SHAPE_TEXT(t));
    te_fetch *f = te_mem_zalloc(&ctx->mem, fetch_size((int)n));
    if (!f) return te_fail_memory(ctx, "fetch");
    f->ctx = ctx;
    f->exec = exec;
    f->n = (int)n;
    te_status status = TE_OK;
    if (exec->backend->host_memory)
        memcpy(f->values, te_tensor_pointer(t), (size_t)n * sizeof *f->values);
    else
        status = exec->backend->read_begin(exec, te_tensor_pointer(t), (size_t)n * sizeof *f->values, &f->reading);
    if (status != TE_OK) {
        te_mem_free(&ctx->mem, f, fetch_size(f->n));
        return te_fail_exec(ctx, status, exec, "fetch");
    }
    te_context_retain(ctx);
    *out = f;
    return TE_OK;
}

int te_fetch_count(const te_fetch *f) { return f->n; }

te_status te_fetch_end(te_fetch *f, double *values)
{
    te_context *ctx = f->ctx;
    te_status status = TE_OK;
    if (f->reading) {
        status = f->exec->backend->read_end(f->exec, f->reading, values);
        if (status != TE_OK) te_fail_exec(ctx, status, f->exec, "fetch");
    } else if (values) {
        memcpy(values, f->values, (size_t)f->n * sizeof *values);
    }
    te_mem_free(&ctx->mem, f, fetch_size(f->n));
    te_context_unref(ctx);
    return status;
}
