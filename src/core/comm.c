/* comm.c - groups of processes: what include/tetrain/comm.h promises.
 *
 * Between processes go bytes (src/kernels/messenger.h), and before each call a few that say which call it is: so calls
 * that do not fit together are an error in every process. On a device whose backend has collectives these move and add;
 * the messenger then only makes them known to each other.
 */
#include "comm.h"

#include "device_module.h"
#include "kernels/environment.h"
#include "quantized_parameter.h"
#include "tensor.h"

#include <dlfcn.h>
#include <stdio.h>

enum { STAGING = 4 << 20 }; /* bytes that are on their way at a time while adding */

/* --- groups ------------------------------------------------------------------------------------------------------- */

static te_status fail_exec(te_comm *comm, te_status status)
{
    comm->broken = true;
    return te_fail(comm->ctx, status, "te.distributed: %s", comm->exec.message);
}

static te_comm *new_comm(te_context *ctx, const te_messenger *messenger)
{
    te_comm *comm = te_mem_zalloc(&ctx->mem, sizeof *comm);
    if (!comm) {
        te_fail_memory(ctx, "a group of processes");
        return NULL;
    }
    comm->ctx = ctx;
    comm->refs = 1;
    comm->messenger = messenger;
    comm->exec = (te_exec){.mem = &ctx->mem, .interrupt = &ctx->interrupted};
    te_context_retain(ctx);
    return comm;
}

te_comm *te_comm_join(te_context *ctx, const te_messenger *messenger)
{
    te_comm *comm = new_comm(ctx, messenger);
    if (!comm || !messenger) return comm;
    te_status status = messenger->join(&comm->exec, &comm->peers);
    if (status == TE_OK) return comm;
    fail_exec(comm, status);
    te_comm_release(comm);
    return NULL;
}

bool te_comm_launched(void)
{
    return te_environment(TE_ENV_OMPI_SIZE) || te_environment(TE_ENV_PMIX_RANK) || te_environment(TE_ENV_PMI_SIZE);
}

/* The library is never closed again: MPI is one for the process. */
static const te_messenger *open_messenger(te_context *ctx)
{
    te_exec                    exec = {.mem = &ctx->mem};
    te_messenger_get_function *get = NULL;
    void *library = te_module_library(&exec, "libtetrain_mpi.so", te_environment(TE_ENV_MPI_MODULE), "MPI");
    if (!library) {
        te_fail(ctx, TE_ERROR_UNSUPPORTED, "te.distributed: started with other processes, but %s", exec.message);
        return NULL;
    }
    *(void **)&get = dlsym(library, TE_MESSENGER_ENTRY);
    const te_messenger *messenger = get ? get() : NULL;
    if (messenger && messenger->layout == TE_MESSENGER_LAYOUT) return messenger;
    te_fail(ctx, TE_ERROR_UNSUPPORTED, "te.distributed: the MPI module found is of another build of tetrain");
    return NULL;
}

te_comm *te_comm_world(te_context *ctx)
{
    if (!ctx) return NULL;
    if (ctx->world) return te_comm_retain(ctx->world);
    const te_messenger *messenger = NULL;
    if (te_comm_launched() && !(messenger = open_messenger(ctx))) return NULL;
    return ctx->world = te_comm_join(ctx, messenger);
}

te_comm *te_comm_retain(te_comm *comm)
{
    if (comm) comm->refs++;
    return comm;
}

static void disconnect_devices(te_comm *comm)
{
    for (int i = 0; i < TE_MAX_DEVICES; i++) {
        te_exec *exec = &comm->ctx->devices[i].exec;
        if (comm->device_peers[i]) exec->backend->collectives->disconnect(exec, comm->device_peers[i]);
    }
}

void te_comm_release(te_comm *comm)
{
    if (!comm || --comm->refs > 0) return;
    te_context *ctx = comm->ctx;
    disconnect_devices(comm);
    if (comm->peers) comm->messenger->leave(&comm->exec, comm->peers);
    if (ctx->world == comm) ctx->world = NULL;
    te_mem_free(&ctx->mem, comm, sizeof *comm);
    te_context_unref(ctx);
}

int te_comm_rank(const te_comm *comm) { return comm && comm->peers ? comm->peers->rank : 0; }
int te_comm_size(const te_comm *comm) { return comm && comm->peers ? comm->peers->size : 1; }
int te_comm_local_rank(const te_comm *comm) { return comm && comm->peers ? comm->peers->local_rank : 0; }
int te_comm_local_size(const te_comm *comm) { return comm && comm->peers ? comm->peers->local_size : 1; }

/* --- what all processes must do alike ----------------------------------------------------------------------------- */

typedef enum function {
    SPLIT, BARRIER, BROADCAST, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, EXCHANGE
} function;

static const char *const function_names[] = {
    "split", "barrier", "broadcast", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange",
};
static const char *const reduction_names[] = {"sum", "average", "max", "min"};

/* One call of one process; compared as bytes, so it has no padding and what is not used is 0. */
typedef struct call {
    int64_t function, dtype, by_device, reduction, root, ndim, shape[TE_MAX_DIMS];
} call;

static const char *call_text(const call *c, char *text, size_t size)
{
    char shape[160];
    int  n = snprintf(text, size, "%s", function_names[c->function]);
    if (c->function <= BARRIER) return text;
    n += snprintf(text + n, size - (size_t)n, " of %s%s %s", c->by_device ? "a device's " : "",
                  te_dtype_name((te_dtype)c->dtype), te_shape_text((int)c->ndim, c->shape, shape, sizeof shape));
    if (c->function == BROADCAST) snprintf(text + n, size - (size_t)n, " from rank %d", (int)c->root);
    if (c->function == ALL_REDUCE || c->function == REDUCE_SCATTER)
        snprintf(text + n, size - (size_t)n, " (%s)", reduction_names[c->reduction]);
    return text;
}

static te_status different_calls(te_comm *comm, const call *first, const call *other, int rank)
{
    char a[256], b[256];
    return te_fail(comm->ctx, TE_ERROR_ARGUMENT, "te.distributed: the processes differ: rank %d calls %s, rank 0 %s",
                   rank, call_text(other, a, sizeof a), call_text(first, b, sizeof b));
}

/* Every process finds the same difference, and all go on from the same place. */
static te_status agree(te_comm *comm, const call *own)
{
    int   size = te_comm_size(comm);
    call *all = te_mem_alloc(&comm->ctx->mem, (size_t)size * sizeof *all);
    if (!all) return te_fail_memory(comm->ctx, "a call of a group of processes");
    te_status status = comm->messenger->all_gather(&comm->exec, comm->peers, own, all, sizeof *own);
    if (status != TE_OK) status = fail_exec(comm, status);
    for (int rank = 1; rank < size && status == TE_OK; rank++)
        if (memcmp(&all[rank], &all[0], sizeof *all) != 0) status = different_calls(comm, &all[0], &all[rank], rank);
    te_mem_free(&comm->ctx->mem, all, (size_t)size * sizeof *all);
    return status;
}

/* A call on its way. x lies in host memory or in that of a device with collectives, and is contiguous. */
typedef struct work {
    te_comm      *comm;
    function      function;
    te_tensor    *x;
    te_reduction  reduction;
    int           root, to, from;
    bool          in_place;
    te_device    *device; /* with collectives; NULL: the host's memory */
    te_device_peers *peers;
} work;

static bool adds(function f) { return f == ALL_REDUCE || f == REDUCE_SCATTER; }
static bool takes_rows(function f) { return f == ALL_GATHER || f == REDUCE_SCATTER || f == ALL_TO_ALL; }
static bool splits_rows(function f) { return f == REDUCE_SCATTER || f == ALL_TO_ALL; }

static te_status refuse(const work *w, const char *why)
{
    return te_fail(w->comm->ctx, TE_ERROR_ARGUMENT, "te.distributed: %s: %s", function_names[w->function], why);
}

static te_status check_group(te_comm *comm, function f)
{
    if (!comm->broken) return TE_OK;
    return te_fail(comm->ctx, TE_ERROR_DEVICE, "te.distributed: %s: an earlier call of this group was left off",
                   function_names[f]);
}

/* What requires a gradient would lose it. A leaf may be written over: what it was then counts for nothing. */
static bool loses_gradient(const work *w)
{
    if (!w->comm->ctx->grad_enabled || !te_tensor_requires_grad(w->x)) return false;
    return !(w->in_place && !w->x->node);
}

static bool can_add(te_dtype dtype, te_reduction reduction)
{
    if (dtype == TE_F32 || dtype == TE_BF16 || dtype == TE_F16 || dtype == TE_F64) return true;
    if (dtype == TE_I64 || dtype == TE_I32 || dtype == TE_U8) return reduction != TE_REDUCE_AVERAGE;
    return dtype == TE_BOOL && reduction >= TE_REDUCE_MAX;
}

static te_status check_rank(const work *w, const char *name, int rank, int least)
{
    if (rank >= least && rank < te_comm_size(w->comm)) return TE_OK;
    return te_fail(w->comm->ctx, TE_ERROR_ARGUMENT, "te.distributed: %s: %s is %d in a group of %d",
                   function_names[w->function], name, rank, te_comm_size(w->comm));
}

static te_status check_tensor(const work *w)
{
    te_tensor *x = w->x;
    char       text[160];
    if (!x) return refuse(w, "x is NULL");
    if (x->ctx != w->comm->ctx) return refuse(w, "x belongs to another context");
    if (te_tensor_is_quantized(x)) return refuse(w, "x is a parameter that is stored quantized");
    if (loses_gradient(w))
        return refuse(w, "x requires a gradient, which this does not carry; use x:detach(), te.no_grad or the modules "
                         "AllReduce, AllGather and ReduceScatter");
    if (adds(w->function) && !can_add(x->dtype, w->reduction))
        return te_fail(w->comm->ctx, TE_ERROR_UNSUPPORTED, "te.distributed: %s: %s of %s", function_names[w->function],
                       reduction_names[w->reduction], te_dtype_name(x->dtype));
    te_shape_text(x->ndim, x->shape, text, sizeof text);
    if (takes_rows(w->function) && x->ndim == 0) return refuse(w, "x has no first dimension");
    if (splits_rows(w->function) && x->shape[0] % te_comm_size(w->comm))
        return te_fail(w->comm->ctx, TE_ERROR_ARGUMENT, "te.distributed: %s: %s cannot be split between %d processes",
                       function_names[w->function], text, te_comm_size(w->comm));
    if (w->in_place && x->storage->read_only) return refuse(w, "x is read-only");
    return TE_OK;
}

static te_status check(const work *w)
{
    te_status status = check_group(w->comm, w->function);
    if (status == TE_OK && (unsigned)w->reduction > TE_REDUCE_MIN) status = refuse(w, "no such reduction");
    if (status == TE_OK) status = check_tensor(w);
    if (status == TE_OK && w->function == BROADCAST) status = check_rank(w, "root", w->root, 0);
    if (status == TE_OK && w->function == EXCHANGE) status = check_rank(w, "to", w->to, -1);
    if (status == TE_OK && w->function == EXCHANGE) status = check_rank(w, "from", w->from, -1);
    return status;
}

/* --- the host's memory: bytes moved by the messenger, added here -------------------------------------------------- */

static te_tensor *staging(te_comm *comm, te_dtype dtype, int64_t n)
{
    return te_tensor_new(comm->ctx, te_context_device(comm->ctx, "cpu"), dtype, 1, &n);
}

/* Elements of one part where `parts` parts together stay within STAGING. */
static int64_t piece_of(te_dtype dtype, int parts)
{
    int64_t n = STAGING / ((int64_t)te_dtype_size(dtype) * parts);
    return n > 0 ? n : 1;
}

/* parts[r] of all ranks -> their sum: `send` holds a part of n elements for each rank. */
static te_status exchange_and_reduce(const work *w, const void *send, void *parts, void *sum, int64_t n)
{
    te_comm  *comm = w->comm;
    te_dtype  dtype = w->x->dtype;
    te_status status = comm->messenger->all_to_all(&comm->exec, comm->peers, send, parts,
                                                   (size_t)n * te_dtype_size(dtype));
    if (status == TE_OK) te_comm_reduce_parts(sum, parts, te_comm_size(comm), n, dtype, w->reduction);
    return status;
}

/* Few elements: every process gets all and adds by itself. */
static te_status reduce_few(const work *w, char *data, void *parts, int64_t n)
{
    te_comm  *comm = w->comm;
    te_status status = comm->messenger->all_gather(&comm->exec, comm->peers, data, parts,
                                                   (size_t)n * te_dtype_size(w->x->dtype));
    if (status == TE_OK) te_comm_reduce_parts(data, parts, te_comm_size(comm), n, w->x->dtype, w->reduction);
    return status;
}

/* Each process adds its share of a piece and hands it round. */
static te_status reduce_piece(const work *w, char *data, void *parts, int64_t n)
{
    te_comm  *comm = w->comm;
    size_t    bytes = (size_t)n * te_dtype_size(w->x->dtype);
    char     *own = data + (size_t)te_comm_rank(comm) * bytes;
    te_status status = exchange_and_reduce(w, data, parts, own, n);
    return status == TE_OK ? comm->messenger->all_gather(&comm->exec, comm->peers, own, data, bytes) : status;
}

static te_status host_all_reduce(const work *w)
{
    enum { FEW = 256 };
    int        ranks = te_comm_size(w->comm);
    size_t     size = te_dtype_size(w->x->dtype);
    int64_t    left = te_tensor_numel(w->x), most = piece_of(w->x->dtype, ranks);
    int64_t    each = left / ranks < most ? left / ranks : most;
    te_tensor *parts = staging(w->comm, w->x->dtype, (each > FEW ? each : FEW) * ranks);
    if (!parts) return w->comm->ctx->status;
    char     *data = te_tensor_pointer(w->x), *room = te_tensor_pointer(parts);
    te_status status = TE_OK;
    while (left > 0 && status == TE_OK) {
        int64_t n = left / ranks < each ? left / ranks : each, taken = left <= FEW ? left : n * ranks;
        status = left <= FEW ? reduce_few(w, data, room, left) : reduce_piece(w, data, room, n);
        data += (size_t)taken * size;
        left -= taken;
    }
    te_tensor_release(parts);
    return status == TE_OK ? TE_OK : fail_exec(w->comm, status);
}

static te_status host_reduce_scatter(const work *w, te_tensor *out)
{
    int        ranks = te_comm_size(w->comm);
    size_t     size = te_dtype_size(w->x->dtype);
    int64_t    n = te_tensor_numel(out), most = piece_of(w->x->dtype, ranks), each = n < most ? n : most;
    te_tensor *room = staging(w->comm, w->x->dtype, 2 * each * ranks);
    if (!room) return w->comm->ctx->status;
    char      *send = te_tensor_pointer(room), *parts = send + (size_t)(each * ranks) * size;
    const char *data = te_tensor_pointer(w->x);
    te_status   status = TE_OK;
    for (int64_t at = 0; at < n && status == TE_OK; at += each) {
        int64_t now = n - at < each ? n - at : each;
        for (int r = 0; r < ranks; r++)
            memcpy(send + (size_t)(r * now) * size, data + (size_t)(r * n + at) * size, (size_t)now * size);
        status = exchange_and_reduce(w, send, parts, (char *)te_tensor_pointer(out) + (size_t)at * size, now);
    }
    te_tensor_release(room);
    return status == TE_OK ? TE_OK : fail_exec(w->comm, status);
}

static te_status host_move(const work *w, te_tensor *out)
{
    te_comm            *comm = w->comm;
    const te_messenger *m = comm->messenger;
    void               *x = te_tensor_pointer(w->x), *to = out ? te_tensor_pointer(out) : NULL;
    size_t              bytes = (size_t)te_tensor_numel(w->x) * te_dtype_size(w->x->dtype);
    te_status           status;
    switch (w->function) {
    case BROADCAST: status = m->broadcast(&comm->exec, comm->peers, x, bytes, w->root); break;
    case ALL_GATHER: status = m->all_gather(&comm->exec, comm->peers, x, to, bytes); break;
    case ALL_TO_ALL:
        status = m->all_to_all(&comm->exec, comm->peers, x, to, bytes / (size_t)te_comm_size(comm));
        break;
    default: status = m->exchange(&comm->exec, comm->peers, x, w->to, to, w->from, bytes); break;
    }
    return status == TE_OK ? TE_OK : fail_exec(comm, status);
}

static te_status run_on_host(const work *w, te_tensor *out)
{
    if (te_tensor_numel(w->x) == 0) return TE_OK;
    if (w->function == ALL_REDUCE) return host_all_reduce(w);
    return w->function == REDUCE_SCATTER ? host_reduce_scatter(w, out) : host_move(w, out);
}

/* --- devices with collectives ------------------------------------------------------------------------------------- */

/* The processes' devices, made known to each other at the first call. */
static te_status connect_device(work *w)
{
    te_comm              *comm = w->comm;
    te_exec              *exec = &w->device->exec;
    const te_collectives *c = exec->backend->collectives;
    te_device_peers     **peers = &comm->device_peers[w->device - comm->ctx->devices];
    unsigned char         id[256] = {0};
    te_status             status = TE_OK;
    if (!*peers) {
        if (te_comm_rank(comm) == 0) status = c->make_id(exec, id);
        if (status != TE_OK) return te_fail_exec(comm->ctx, status, exec, "distributed");
        status = comm->messenger->broadcast(&comm->exec, comm->peers, id, c->id_bytes, 0);
        if (status != TE_OK) return fail_exec(comm, status);
        status = c->connect(exec, id, te_comm_rank(comm), te_comm_size(comm), peers);
    }
    w->peers = *peers;
    return status == TE_OK ? TE_OK : te_fail_exec(comm->ctx, status, exec, "distributed");
}

static te_status device_call(const work *w, const te_collectives *c, te_exec *exec, void *x, void *to)
{
    int64_t  n = te_tensor_numel(w->x);
    int      ranks = te_comm_size(w->comm);
    te_dtype dtype = w->x->dtype;
    switch (w->function) {
    case ALL_REDUCE: return c->all_reduce(exec, w->peers, x, x, n, dtype, w->reduction);
    case REDUCE_SCATTER: return c->reduce_scatter(exec, w->peers, x, to, n / ranks, dtype, w->reduction);
    case ALL_GATHER: return c->all_gather(exec, w->peers, x, to, n, dtype);
    case BROADCAST: return c->broadcast(exec, w->peers, x, n, dtype, w->root);
    case ALL_TO_ALL: return c->all_to_all(exec, w->peers, x, to, n / ranks, dtype);
    default: return c->exchange(exec, w->peers, x, w->to, to, w->from, n, dtype);
    }
}

static te_status run_on_device(work *w, te_tensor *out)
{
    te_exec  *exec = &w->device->exec;
    te_status status = connect_device(w);
    if (status != TE_OK || te_tensor_numel(w->x) == 0) return status;
    void *to = out ? te_tensor_pointer(out) : NULL;
    status = device_call(w, exec->backend->collectives, exec, te_tensor_pointer(w->x), to);
    return status == TE_OK ? TE_OK : te_fail_exec(w->comm->ctx, status, exec, "distributed");
}

/* --- calls -------------------------------------------------------------------------------------------------------- */

static te_status agree_on(const work *w)
{
    call own = {.function = w->function, .dtype = w->x->dtype, .by_device = w->device != NULL,
                .reduction = w->reduction, .root = w->root, .ndim = w->x->ndim};
    memcpy(own.shape, w->x->shape, (size_t)w->x->ndim * sizeof *own.shape);
    return agree(w->comm, &own);
}

/* The call on w->x, which lies where it can be run. out: NULL for what works in place. */
static te_status run(work *w, te_tensor *out)
{
    te_status status = agree_on(w);
    if (status != TE_OK) return status;
    return w->device ? run_on_device(w, out) : run_on_host(w, out);
}

/* x where the call can be run: on the host, or on a device with collectives; contiguous. A new reference. */
static te_tensor *bring(work *w)
{
    te_device *device = w->x->storage->device;
    w->device = device->exec.backend->collectives ? device : NULL;
    if (w->device || device->exec.backend->host_memory) return te_tensor_contiguous_copy(w->x);
    return te_tensor_on_device(w->x, te_context_device(w->comm->ctx, "cpu"));
}

static te_status in_place(work w)
{
    if (!w.comm) return TE_ERROR_ARGUMENT;
    te_tensor *x = w.x;
    w.in_place = true;
    te_status  status = check(&w);
    if (status != TE_OK || te_comm_size(w.comm) == 1) return status;
    w.x = bring(&w);
    if (!w.x) return w.comm->ctx->status;
    status = run(&w, NULL);
    if (status == TE_OK && w.x->storage != x->storage) status = te_tensor_copy_across(x, w.x);
    if (w.x->storage == x->storage) te_tensor_written(x); /* also of what was left off half-way */
    te_tensor_release(w.x);
    return status;
}

static int64_t rows_of_result(const work *w)
{
    int64_t rows = w->x->shape[0];
    if (w->function == ALL_GATHER) return rows * te_comm_size(w->comm);
    return w->function == REDUCE_SCATTER ? rows / te_comm_size(w->comm) : rows;
}

static te_tensor *to_new(work w)
{
    int64_t shape[TE_MAX_DIMS];
    if (!w.comm || check(&w) != TE_OK) return NULL;
    if (te_comm_size(w.comm) == 1) return te_tensor_clone_data(w.x);
    te_device *home = w.x->storage->device;
    memcpy(shape, w.x->shape, (size_t)w.x->ndim * sizeof *shape);
    if (w.x->ndim) shape[0] = rows_of_result(&w);
    w.x = bring(&w);
    if (!w.x) return NULL;
    te_tensor *out = te_tensor_new(w.comm->ctx, w.x->storage->device, w.x->dtype, w.x->ndim, shape);
    if (out && w.function == EXCHANGE && w.from < 0 && te_tensor_fill(out, 0) != TE_OK) {
        te_tensor_release(out);
        out = NULL;
    }
    te_status status = out ? run(&w, out) : TE_ERROR_MEMORY;
    te_tensor_release(w.x);
    te_tensor *result = status == TE_OK ? te_tensor_on_device(out, home) : NULL;
    te_tensor_release(out);
    return result;
}

te_status te_comm_barrier(te_comm *comm)
{
    call own = {.function = BARRIER};
    if (!comm) return TE_ERROR_ARGUMENT;
    te_status status = check_group(comm, BARRIER);
    return status != TE_OK || te_comm_size(comm) == 1 ? status : agree(comm, &own);
}

te_comm *te_comm_split(te_comm *comm, int color, int key)
{
    call own = {.function = SPLIT};
    if (!comm) return NULL;
    comm->ctx->message[0] = 0;
    if (te_comm_size(comm) == 1) return color < 0 ? NULL : new_comm(comm->ctx, NULL);
    if (check_group(comm, SPLIT) != TE_OK || agree(comm, &own) != TE_OK) return NULL;
    te_comm *part = new_comm(comm->ctx, comm->messenger);
    if (!part) return NULL;
    te_status status = comm->messenger->split(&comm->exec, comm->peers, color, key, &part->peers);
    if (status == TE_OK && part->peers) return part;
    if (status != TE_OK) fail_exec(comm, status);
    te_comm_release(part);
    return NULL;
}

te_status te_comm_broadcast(te_comm *comm, te_tensor *x, int root)
{
    return in_place((work){.comm = comm, .function = BROADCAST, .x = x, .root = root});
}

te_status te_comm_all_reduce_in_place(te_comm *comm, te_tensor *x, te_reduction reduction)
{
    return in_place((work){.comm = comm, .function = ALL_REDUCE, .x = x, .reduction = reduction});
}

te_tensor *te_comm_all_reduce(te_comm *comm, te_tensor *x, te_reduction reduction)
{
    work w = {.comm = comm, .function = ALL_REDUCE, .x = x, .reduction = reduction};
    if (!comm || check(&w) != TE_OK) return NULL;
    te_tensor *sum = te_tensor_clone_data(x);
    if (!sum || te_comm_all_reduce_in_place(comm, sum, reduction) == TE_OK) return sum;
    te_tensor_release(sum);
    return NULL;
}

te_tensor *te_comm_all_gather(te_comm *comm, te_tensor *x)
{
    return to_new((work){.comm = comm, .function = ALL_GATHER, .x = x});
}

te_tensor *te_comm_reduce_scatter(te_comm *comm, te_tensor *x, te_reduction reduction)
{
    return to_new((work){.comm = comm, .function = REDUCE_SCATTER, .x = x, .reduction = reduction});
}

te_tensor *te_comm_all_to_all(te_comm *comm, te_tensor *x)
{
    return to_new((work){.comm = comm, .function = ALL_TO_ALL, .x = x});
}

te_tensor *te_comm_exchange(te_comm *comm, te_tensor *x, int to, int from)
{
    return to_new((work){.comm = comm, .function = EXCHANGE, .x = x, .to = to, .from = from});
}
