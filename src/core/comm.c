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
#include <stdlib.h>

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

/* What is said before each call has room from the beginning: a group of this size, or of fewer. */
static te_status make_room_for_calls(te_comm *comm, int size)
{
    size_t bytes = ((size_t)size + 1) * sizeof(te_comm_call);
    comm->calls = te_mem_alloc(&comm->ctx->mem, bytes);
    if (!comm->calls) return te_fail_memory(comm->ctx, "a group of processes");
    comm->bytes_of_calls = bytes;
    return TE_OK;
}

te_comm *te_comm_join(te_context *ctx, const te_messenger *messenger)
{
    te_comm *comm = new_comm(ctx, messenger);
    if (!comm || !messenger) return comm;
    te_status status = messenger->join(&comm->exec, &comm->peers);
    if (status != TE_OK) fail_exec(comm, status);
    else status = make_room_for_calls(comm, comm->peers->size);
    if (status == TE_OK) return comm;
    te_comm_release(comm);
    return NULL;
}

/* How many processes the starter says that it started: 1 also where it says nothing, 0 where there may be more. */
static long announced_size(void)
{
    const char *size = te_environment(TE_ENV_OMPI_SIZE);
    if (!size) size = te_environment(TE_ENV_PMI_SIZE);
    if (!size && !te_environment(TE_ENV_PMIX_RANK)) return 1;
    if (!size) size = te_environment(TE_ENV_SLURM_SIZE);
    return size ? strtol(size, NULL, 10) : 0;
}

bool te_comm_launched(void) { return announced_size() != 1; }

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

/* Processes that each find themselves alone would do the same work side by side, and write the same files. */
static te_comm *join_all(te_context *ctx, const te_messenger *messenger)
{
    te_comm *comm = te_comm_join(ctx, messenger);
    long     size = announced_size();
    if (!comm || size == 0 || size == te_comm_size(comm)) return comm;
    te_fail(ctx, TE_ERROR_DEVICE,
            "te.distributed: %ld processes were started together, but only %d of them find each other: they want the "
            "mpirun of the MPI that tetrain was built with", size, te_comm_size(comm));
    te_comm_release(comm);
    return NULL;
}

te_comm *te_comm_world(te_context *ctx)
{
    if (!ctx) return NULL;
    if (ctx->world) return te_comm_retain(ctx->world);
    const te_messenger *messenger = NULL;
    if (te_comm_launched() && !(messenger = open_messenger(ctx))) return NULL;
    return ctx->world = join_all(ctx, messenger);
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
    for (int i = 0; i < 3; i++) te_tensor_release(comm->left[i]);
    if (comm->peers) comm->messenger->leave(&comm->exec, comm->peers);
    if (ctx->world == comm) ctx->world = NULL;
    te_mem_free(&ctx->mem, comm->calls, comm->bytes_of_calls);
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

typedef te_comm_call call;

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

static te_status compare_calls(te_comm *comm, const call *all, int rank)
{
    char a[256], b[256];
    if (all[rank].failed)
        return te_fail(comm->ctx, (te_status)all[rank].failed,
                       "te.distributed: %s: the call failed on rank %d, whose message says why",
                       function_names[all[rank].function], rank);
    if (memcmp(&all[rank], &all[0], offsetof(call, failed)) == 0) return TE_OK;
    return te_fail(comm->ctx, TE_ERROR_ARGUMENT, "te.distributed: the processes differ: rank %d calls %s, rank 0 %s",
                   rank, call_text(&all[rank], a, sizeof a), call_text(&all[0], b, sizeof b));
}

/* Whoever sends is waited for. */
static te_status compare_partners(te_comm *comm, const call *all, int rank)
{
    int64_t to = all[rank].to, from = all[rank].from;
    if (all[rank].function != EXCHANGE) return TE_OK;
    if (to >= 0 && all[to].from != rank)
        return te_fail(comm->ctx, TE_ERROR_ARGUMENT,
                       "te.distributed: exchange: rank %d sends to rank %d, which expects rank %d", rank, (int)to,
                       (int)all[to].from);
    if (from >= 0 && all[from].to != rank)
        return te_fail(comm->ctx, TE_ERROR_ARGUMENT,
                       "te.distributed: exchange: rank %d expects rank %d, which sends to rank %d", rank, (int)from,
                       (int)all[from].to);
    return TE_OK;
}

/* Every process learns what the others are about to do, and finds the same fault in it or none; so all go on from the
 * same place. One that failed on its own takes part too: the others would wait for it. */
static te_status agree(te_comm *comm, const call *own)
{
    int   size = te_comm_size(comm);
    call *all = comm->calls, *sent = all + size; /* the group may be smaller than its room */
    *sent = *own;
    te_status status = comm->messenger->all_gather(&comm->exec, comm->peers, sent, all, sizeof *sent);
    if (status != TE_OK) return fail_exec(comm, status);
    if (own->failed) return (te_status)own->failed; /* and the message is there */
    for (int rank = 0; rank < size && status == TE_OK; rank++) status = compare_calls(comm, all, rank);
    for (int rank = 0; rank < size && status == TE_OK; rank++) status = compare_partners(comm, all, rank);
    return status;
}

/* A call on its way. All it needs is there before the processes agree on it: after that none may fail alone. */
typedef struct work {
    te_comm         *comm;
    function         function;
    te_tensor       *given;
    te_reduction     reduction;
    int              root, to, from;
    bool             in_place;
    te_tensor       *x;      /* `given` where the call can be run, contiguous; what works in place works here */
    te_tensor       *out;    /* NULL: x is the result */
    te_tensor       *room;   /* for what is on its way, in host memory; NULL: not needed */
    te_device       *device; /* with collectives; NULL: the host's memory */
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
    if (!w->comm->ctx->grad_enabled || !te_tensor_requires_grad(w->given)) return false;
    return w->function != BROADCAST || w->given->node;
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
    te_tensor *x = w->given;
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
    const char *why = w->in_place ? te_tensor_unwritable(x) : NULL;
    if (why) return refuse(w, why);
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

/* As few elements as this are not worth a share for each process; nor is less than one for each. */
static int64_t few(const te_comm *comm)
{
    int ranks = te_comm_size(comm);
    return ranks < 256 ? 256 : ranks;
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Elements that a process adds at a time. */
static int64_t share_of_piece(const work *w)
{
    int64_t ranks = te_comm_size(w->comm), most = piece_of(w->x->dtype, (int)ranks);
    return smaller(te_tensor_numel(w->x) / ranks, most);
}

/* Elements of w->room. */
static int64_t room_needed(const work *w)
{
    int64_t ranks = te_comm_size(w->comm), n = te_tensor_numel(w->x), share = share_of_piece(w);
    if (w->function == REDUCE_SCATTER) return 2 * share * ranks;
    if (w->function != ALL_REDUCE) return 0;
    int64_t least = smaller(n, few(w->comm));
    return (share > least ? share : least) * ranks;
}

static te_status host_all_reduce(const work *w)
{
    int       ranks = te_comm_size(w->comm);
    int64_t   left = te_tensor_numel(w->x), share = share_of_piece(w);
    char     *data = te_tensor_pointer(w->x), *parts = te_tensor_pointer(w->room);
    te_status status = TE_OK;
    while (left > 0 && status == TE_OK) {
        bool    all = left <= few(w->comm);
        int64_t each = smaller(left / ranks, share), taken = all ? left : each * ranks;
        status = all ? reduce_few(w, data, parts, left) : reduce_piece(w, data, parts, each);
        data += (size_t)taken * te_dtype_size(w->x->dtype);
        left -= taken;
    }
    return status;
}

/* This process's part of the sum of all x, piece by piece: what goes to one process lies together on the way. */
static te_status host_reduce_scatter(const work *w)
{
    int         ranks = te_comm_size(w->comm);
    size_t      size = te_dtype_size(w->x->dtype);
    int64_t     n = te_tensor_numel(w->out), share = share_of_piece(w);
    char       *send = te_tensor_pointer(w->room), *parts = send + (size_t)(share * ranks) * size;
    const char *data = te_tensor_pointer(w->x);
    char       *out = te_tensor_pointer(w->out);
    te_status   status = TE_OK;
    for (int64_t at = 0; at < n && status == TE_OK; at += share) {
        int64_t each = smaller(n - at, share);
        for (int r = 0; r < ranks; r++)
            memcpy(send + (size_t)(r * each) * size, data + (size_t)(r * n + at) * size, (size_t)each * size);
        status = exchange_and_reduce(w, send, parts, out + (size_t)at * size, each);
    }
    return status;
}

static te_status host_move(const work *w)
{
    te_comm            *comm = w->comm;
    const te_messenger *m = comm->messenger;
    void               *x = te_tensor_pointer(w->x), *out = w->out ? te_tensor_pointer(w->out) : NULL;
    size_t              bytes = (size_t)te_tensor_numel(w->x) * te_dtype_size(w->x->dtype);
    switch (w->function) {
    case BROADCAST: return m->broadcast(&comm->exec, comm->peers, x, bytes, w->root);
    case ALL_GATHER: return m->all_gather(&comm->exec, comm->peers, x, out, bytes);
    case ALL_TO_ALL: return m->all_to_all(&comm->exec, comm->peers, x, out, bytes / (size_t)te_comm_size(comm));
    default: return m->exchange(&comm->exec, comm->peers, x, w->to, out, w->from, bytes);
    }
}

static te_status run_on_host(const work *w)
{
    te_status status;
    if (te_tensor_numel(w->x) == 0) return TE_OK;
    if (w->function == ALL_REDUCE) status = host_all_reduce(w);
    else if (w->function == REDUCE_SCATTER) status = host_reduce_scatter(w);
    else status = host_move(w);
    return status == TE_OK ? TE_OK : fail_exec(w->comm, status);
}

/* --- devices with collectives ------------------------------------------------------------------------------------- */

static te_status fail_device(const work *w, te_status status)
{
    return te_fail_exec(w->comm->ctx, status, &w->device->exec, "distributed");
}

/* What rank 0 tells the others: whether it could make an id, and the id. */
typedef struct announcement {
    int64_t       status;
    unsigned char id[256];
} announcement;

/* The processes' devices, made known to each other. */
static te_status connect_device(const work *w, te_device_peers **peers)
{
    te_comm              *comm = w->comm;
    te_exec              *exec = &w->device->exec;
    const te_collectives *c = exec->backend->collectives;
    announcement          a = {TE_OK, {0}};
    if (c->id_bytes > sizeof a.id) return te_fail(comm->ctx, TE_ERROR_UNSUPPORTED, "te.distributed: a long id");
    if (te_comm_rank(comm) == 0) a.status = c->make_id(exec, a.id);
    te_status made = (te_status)a.status;
    te_status status = comm->messenger->broadcast(&comm->exec, comm->peers, &a, sizeof a, 0);
    if (status != TE_OK) return fail_exec(comm, status);
    if (made != TE_OK) return fail_device(w, made);
    if (a.status != TE_OK)
        return te_fail(comm->ctx, (te_status)a.status, "te.distributed: rank 0 cannot connect its device");
    status = c->connect(exec, a.id, te_comm_rank(comm), te_comm_size(comm), peers);
    if (status == TE_OK) comm->connection[w->device - comm->ctx->devices] = ++comm->connections;
    if (status == TE_OK) return TE_OK;
    comm->broken = true; /* the others may be connected */
    return fail_device(w, status);
}

static te_status device_call(const work *w, const te_collectives *c, te_exec *exec, void *x, void *out)
{
    int64_t  n = te_tensor_numel(w->x);
    int      ranks = te_comm_size(w->comm);
    te_dtype dtype = w->x->dtype;
    switch (w->function) {
    case ALL_REDUCE: return c->all_reduce(exec, w->peers, x, x, n, dtype, w->reduction);
    case REDUCE_SCATTER: return c->reduce_scatter(exec, w->peers, x, out, n / ranks, dtype, w->reduction);
    case ALL_GATHER: return c->all_gather(exec, w->peers, x, out, n, dtype);
    case BROADCAST: return c->broadcast(exec, w->peers, x, n, dtype, w->root);
    case ALL_TO_ALL: return c->all_to_all(exec, w->peers, x, out, n / ranks, dtype);
    default: return c->exchange(exec, w->peers, x, w->to, out, w->from, n, dtype);
    }
}

/* Whether every process's device has the same connection: one may have changed its device since. */
static bool is_connected(const te_comm *comm)
{
    int64_t first = comm->calls[0].connection;
    for (int rank = 1; rank < te_comm_size(comm); rank++)
        if (comm->calls[rank].connection != first) return false;
    return first > 0;
}

static te_status run_on_device(work *w)
{
    te_exec          *exec = &w->device->exec;
    te_device_peers **peers = &w->comm->device_peers[w->device - w->comm->ctx->devices];
    bool              connected = is_connected(w->comm);
    if (!connected && *peers) exec->backend->collectives->disconnect(exec, *peers);
    if (!connected) *peers = NULL;
    te_status status = connected ? TE_OK : connect_device(w, peers);
    if (status != TE_OK || te_tensor_numel(w->x) == 0) return status;
    w->peers = *peers;
    void *out = w->out ? te_tensor_pointer(w->out) : NULL;
    status = device_call(w, exec->backend->collectives, exec, te_tensor_pointer(w->x), out);
    return status == TE_OK ? TE_OK : fail_device(w, status);
}

/* --- calls -------------------------------------------------------------------------------------------------------- */

/* x where the call can be run: on the host, or on a device with collectives; contiguous. A new reference. */
static te_tensor *bring(work *w)
{
    te_device *device = w->given->storage->device;
    w->device = device->exec.backend->collectives ? device : NULL;
    if (w->device || device->exec.backend->host_memory) return te_tensor_contiguous_copy(w->given);
    return te_tensor_on_device(w->given, te_context_device(w->comm->ctx, "cpu"));
}

static te_tensor *new_result(const work *w)
{
    int64_t shape[TE_MAX_DIMS] = {0};
    int     ranks = te_comm_size(w->comm);
    memcpy(shape, w->x->shape, (size_t)w->x->ndim * sizeof *shape);
    if (w->function == ALL_GATHER) shape[0] *= ranks;
    if (w->function == REDUCE_SCATTER) shape[0] /= ranks;
    te_tensor *out = te_tensor_new(w->comm->ctx, w->x->storage->device, w->x->dtype, w->x->ndim, shape);
    if (!out || w->function != EXCHANGE || w->from >= 0 || te_tensor_fill(out, 0) == TE_OK) return out;
    te_tensor_release(out);
    return NULL;
}

static te_status prepare(work *w)
{
    te_context *ctx = w->comm->ctx;
    te_status   status = check(w);
    if (status != TE_OK || te_comm_size(w->comm) == 1) return status;
    w->x = bring(w);
    if (w->x && w->function == ALL_REDUCE && !w->in_place && w->x->storage == w->given->storage) {
        te_tensor *copy = te_tensor_clone_data(w->x);
        te_tensor_release(w->x);
        w->x = copy;
    }
    if (!w->x) return ctx->status;
    if (!w->in_place && w->function != ALL_REDUCE && !(w->out = new_result(w))) return ctx->status;
    int64_t room = w->device ? 0 : room_needed(w);
    if (room == 0) return TE_OK;
    w->room = te_tensor_new(ctx, te_context_device(ctx, "cpu"), w->x->dtype, 1, &room);
    return w->room ? TE_OK : ctx->status;
}

static te_status agree_on(const work *w, te_status prepared)
{
    call own = {.function = w->function, .failed = prepared};
    if (prepared != TE_OK) return agree(w->comm, &own);
    own = (call){.function = w->function, .dtype = w->x->dtype, .by_device = w->device != NULL,
                 .reduction = w->reduction, .root = w->root, .ndim = w->x->ndim, .to = w->to, .from = w->from};
    memcpy(own.shape, w->x->shape, (size_t)w->x->ndim * sizeof *own.shape);
    if (w->device) own.connection = w->comm->connection[w->device - w->comm->ctx->devices];
    return agree(w->comm, &own);
}

/* What a call that was left off may still be written to stays until the group is given up. */
static void leave_off(work *w)
{
    te_tensor *left[] = {w->x, w->out, w->room};
    for (int i = 0; i < 3; i++)
        if (!w->comm->left[i]) w->comm->left[i] = te_tensor_retain(left[i]);
}

static te_status run(work *w)
{
    te_status status = prepare(w);
    if (te_comm_size(w->comm) == 1 || w->comm->broken) return status;
    status = agree_on(w, status);
    if (status == TE_OK) status = w->device ? run_on_device(w) : run_on_host(w);
    if (w->comm->broken) leave_off(w);
    return status;
}

static void finish(work *w)
{
    te_tensor_release(w->x);
    te_tensor_release(w->out);
    te_tensor_release(w->room);
}

static te_status in_place(work w)
{
    if (!w.comm) return TE_ERROR_ARGUMENT;
    w.in_place = true;
    te_status status = run(&w);
    bool      there = w.x && w.x->storage == w.given->storage;
    if (status == TE_OK && w.x && !there) status = te_tensor_copy_across(w.given, w.x);
    if (there) te_tensor_written(w.given); /* also of what was left off half-way */
    finish(&w);
    return status;
}

/* The result in a group of one. */
static te_tensor *alone(const work *w)
{
    te_tensor *result = te_tensor_clone_data(w->given);
    bool       nothing_comes = w->function == EXCHANGE && w->from < 0;
    if (!result || !nothing_comes || te_tensor_fill(result, 0) == TE_OK) return result;
    te_tensor_release(result);
    return NULL;
}

static te_tensor *to_new(work w)
{
    if (!w.comm) return NULL;
    te_tensor *result = NULL;
    te_status  status = run(&w);
    if (status == TE_OK && !w.x) result = alone(&w);
    else if (status == TE_OK) result = te_tensor_on_device(w.out ? w.out : w.x, w.given->storage->device);
    finish(&w);
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
    if (!comm) return NULL;
    comm->ctx->message[0] = 0;
    if (te_comm_size(comm) == 1) return color < 0 ? NULL : new_comm(comm->ctx, NULL);
    if (check_group(comm, SPLIT) != TE_OK) return NULL;
    te_comm  *part = new_comm(comm->ctx, comm->messenger);
    te_status status = part ? make_room_for_calls(part, te_comm_size(comm)) : comm->ctx->status;
    call      own = {.function = SPLIT, .failed = status};
    status = agree(comm, &own);
    if (status == TE_OK) {
        status = comm->messenger->split(&comm->exec, comm->peers, color, key, &part->peers);
        if (status == TE_OK && part->peers) return part;
        if (status != TE_OK) fail_exec(comm, status);
    }
    te_comm_release(part);
    return NULL;
}

te_status te_comm_broadcast(te_comm *comm, te_tensor *x, int root)
{
    return in_place((work){.comm = comm, .function = BROADCAST, .given = x, .root = root});
}

te_status te_comm_all_reduce_in_place(te_comm *comm, te_tensor *x, te_reduction reduction)
{
    return in_place((work){.comm = comm, .function = ALL_REDUCE, .given = x, .reduction = reduction});
}

te_tensor *te_comm_all_reduce(te_comm *comm, te_tensor *x, te_reduction reduction)
{
    return to_new((work){.comm = comm, .function = ALL_REDUCE, .given = x, .reduction = reduction});
}

te_tensor *te_comm_all_gather(te_comm *comm, te_tensor *x)
{
    return to_new((work){.comm = comm, .function = ALL_GATHER, .given = x});
}

te_tensor *te_comm_reduce_scatter(te_comm *comm, te_tensor *x, te_reduction reduction)
{
    return to_new((work){.comm = comm, .function = REDUCE_SCATTER, .given = x, .reduction = reduction});
}

te_tensor *te_comm_all_to_all(te_comm *comm, te_tensor *x)
{
    return to_new((work){.comm = comm, .function = ALL_TO_ALL, .given = x});
}

te_tensor *te_comm_exchange(te_comm *comm, te_tensor *x, int to, int from)
{
    return to_new((work){.comm = comm, .function = EXCHANGE, .given = x, .to = to, .from = from});
}
