/* collectives.c - collectives.h over NCCL, on the device's stream.
 *
 * Communicators do not block: a call that takes long is asked about until it has come to an end, so that Ctrl-C and the
 * failure of another process end it. For the same reason the host asks about the device instead of sleeping while a
 * communicator is connected: kernels of NCCL whose partner is gone run until their communicator is aborted. A partner
 * that stays but never makes the call is waited for, as NCCL does, until Ctrl-C.
 */
#include "cuda_backend.h"

#include "../collectives.h"

#ifdef TE_HAVE_NCCL

#include "collectives_nccl.h"

#include <sched.h>
#include <stdio.h>
#include <time.h>

enum { SPINS = 2000, CLOSING_MS = 5000, ID_BYTES = sizeof(ncclUniqueId) };

struct te_device_peers {
    te_device_peers *next; /* of those of the device */
    int              refs; /* of the group, and of graphs */
    int              rank, size;
    ncclComm_t       comm; /* NULL: there is none any more */
    bool             failed;
};

typedef struct te_cuda_collectives {
    te_cuda_nccl     nccl;
    te_device_peers *peers;
} te_cuda_collectives;

/* --- failures and waiting ----------------------------------------------------------------------------------------- */

static const te_cuda_nccl *nccl_of(te_exec *exec) { return &te_cuda(exec)->collectives->nccl; }

/* Lets go of what the communicator has on the device, whatever the others do. NCCL waits for the end of every graph
 * that holds one of its collectives, so these go first; the one that is being recorded cannot, and te_cuda_peers_reap
 * comes after it. */
static void drop(te_exec *exec, te_device_peers *p)
{
    p->failed = true;
    if (!p->comm || te_cuda(exec)->capture) return;
    te_cuda_graphs_drop(exec, p);
    nccl_of(exec)->ncclCommAbort(p->comm);
    p->comm = NULL;
}

static te_status fail(te_exec *exec, te_device_peers *p, ncclResult_t result, const char *what)
{
    const te_cuda_nccl *n = nccl_of(exec);
    const char         *last = n->ncclGetLastError(p ? p->comm : NULL);
    te_status status = te_exec_fail(exec, TE_ERROR_DEVICE, "NCCL: %s: %s%s%.200s", what, n->ncclGetErrorString(result),
                                    last && *last ? "; " : "", last ? last : "");
    if (p) drop(exec, p);
    return status;
}

static bool is_interrupted(const te_exec *exec) { return exec->interrupt && atomic_load(exec->interrupt); }

static te_status interrupted(te_exec *exec, te_device_peers *p, const char *what)
{
    drop(exec, p);
    return te_exec_fail(exec, TE_ERROR_INTERRUPTED, "NCCL: %s: interrupted; the group is of no use any more", what);
}

/* A while that grows from nothing: short waits must not cost a sleep. */
static void pause_for(int64_t round)
{
    if (round < SPINS)
        sched_yield();
    else
        nanosleep(&(struct timespec){.tv_nsec = round < 2 * SPINS ? 20000 : 500000}, NULL);
}

/* Of a call that has returned `result`: until what it began has been handed to the device. */
static te_status settle(te_exec *exec, te_device_peers *p, ncclResult_t result, const char *what)
{
    for (int64_t round = 0; result == ncclInProgress; round++) {
        ncclResult_t asked = nccl_of(exec)->ncclCommGetAsyncError(p->comm, &result);
        if (asked != ncclSuccess) result = asked;
        if (result != ncclInProgress) break;
        if (is_interrupted(exec)) return interrupted(exec, p, what);
        pause_for(round);
    }
    return result == ncclSuccess ? TE_OK : fail(exec, p, result, what);
}

static te_status check_peers(te_exec *exec)
{
    te_cuda_collectives *c = te_cuda(exec)->collectives;
    for (te_device_peers *p = c->peers; p; p = p->next) {
        ncclResult_t result = ncclSuccess, asked;
        if (p->failed) continue;
        asked = c->nccl.ncclCommGetAsyncError(p->comm, &result);
        if (asked != ncclSuccess) result = asked;
        if (result != ncclSuccess && result != ncclInProgress)
            return fail(exec, p, result, "waiting for the other processes");
        if (is_interrupted(exec)) return interrupted(exec, p, "waiting for the other processes");
    }
    return TE_OK;
}

static bool has_peers(te_exec *exec)
{
    te_cuda_collectives *c = te_cuda(exec)->collectives;
    for (te_device_peers *p = c ? c->peers : NULL; p; p = p->next)
        if (!p->failed) return true;
    return false;
}

te_status te_cuda_await(te_exec *exec, CUevent event)
{
    te_cuda_device *d = te_cuda(exec);
    te_status       status = TE_OK;
    for (int64_t round = 0; has_peers(exec) && status == TE_OK; round++) {
        CUresult r = event ? d->driver.cuEventQuery(event) : d->driver.cuStreamQuery(d->stream);
        if (r != CUDA_ERROR_NOT_READY) return te_cuda_waited(exec, r);
        if (round % 64 == 63 || round >= SPINS) status = check_peers(exec);
        pause_for(round);
    }
    if (status != TE_OK) return status;
    return te_cuda_waited(exec, event ? d->driver.cuEventSynchronize(event) : d->driver.cuStreamSynchronize(d->stream));
}

/* --- groups ------------------------------------------------------------------------------------------------------- */

static te_status load(te_exec *exec)
{
    static const char *const files[] = {"libnccl.so.2", NULL};
#define NAME(name) #name,
    static const char *const functions[] = {TE_CUDA_NCCL(NAME)};
#undef NAME
    te_cuda_device      *d = te_cuda(exec);
    te_cuda_collectives *c;
    int                  version = 0;
    if (d->collectives) return TE_OK;
    if (!(c = te_mem_zalloc(exec->mem, sizeof *c))) return te_exec_fail(exec, TE_ERROR_MEMORY, "out of host memory");
    te_status status = te_cuda_load_library(exec, files, functions, sizeof functions / sizeof *functions, &c->nccl);
    if (status == TE_OK) c->nccl.ncclGetVersion(&version);
    if (status == TE_OK && version < TE_NCCL_OLDEST)
        status = te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "libnccl.so.2 is version %d.%d.%d; 2.18 is the oldest that "
                              "groups of CUDA devices take", version / 10000, version / 100 % 100, version % 100);
    if (status == TE_OK)
        d->collectives = c;
    else
        te_mem_free(exec->mem, c, sizeof *c);
    return status;
}

static te_status enter(te_exec *exec, const char *what)
{
    te_status status = te_cuda_enter(exec);
    if (status == TE_OK) status = te_cuda_outside_graph(exec, what);
    return status == TE_OK ? load(exec) : status;
}

static te_status make_id(te_exec *exec, void *id)
{
    ncclUniqueId made;
    te_status    status = enter(exec, "starting a group of processes");
    if (status != TE_OK) return status;
    ncclResult_t result = nccl_of(exec)->ncclGetUniqueId(&made);
    if (result != ncclSuccess) return fail(exec, NULL, result, "an id for a group of processes");
    memcpy(id, &made, sizeof made);
    return TE_OK;
}

static void unlink_peers(te_exec *exec, te_device_peers *p)
{
    for (te_device_peers **at = &te_cuda(exec)->collectives->peers; *at; at = &(*at)->next) {
        if (*at != p) continue;
        *at = p->next;
        break;
    }
    te_mem_free(exec->mem, p, sizeof *p);
}

static te_status connect_peers(te_exec *exec, const void *id, int rank, int size, te_device_peers **peers)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId known;
    char         what[64];
    te_status    status = enter(exec, "connecting a group of processes");
    *peers = NULL;
    if (status != TE_OK) return status;
    te_cuda_collectives *c = te_cuda(exec)->collectives;
    te_device_peers     *p = te_mem_zalloc(exec->mem, sizeof *p);
    if (!p) return te_exec_fail(exec, TE_ERROR_MEMORY, "out of host memory");
    *p = (te_device_peers){.next = c->peers, .refs = 1, .rank = rank, .size = size};
    c->peers = p;
    config.blocking = 0;
    memcpy(&known, id, sizeof known);
    snprintf(what, sizeof what, "connecting rank %d of %d processes", rank, size);
    status = settle(exec, p, c->nccl.ncclCommInitRankConfig(&p->comm, size, known, rank, &config), what);
    if (status == TE_OK)
        *peers = p;
    else
        unlink_peers(exec, p);
    return status;
}

/* What has been called comes to its end first; processes that do not come to theirs in a few seconds are left. */
static void close_peers(te_exec *exec, te_device_peers *p)
{
    const te_cuda_nccl *n = nccl_of(exec);
    ncclResult_t        result = ncclInProgress;
    if (te_cuda_enter(exec) == TE_OK && !p->failed && te_cuda_await(exec, NULL) == TE_OK && !p->failed)
        result = n->ncclCommFinalize(p->comm);
    else
        drop(exec, p);
    for (int ms = 0; p->comm && result == ncclInProgress && ms < CLOSING_MS; ms++) {
        if (n->ncclCommGetAsyncError(p->comm, &result) != ncclSuccess) break;
        if (result == ncclInProgress) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    if (p->comm && result == ncclSuccess && n->ncclCommDestroy(p->comm) == ncclSuccess) p->comm = NULL;
    drop(exec, p);
    unlink_peers(exec, p);
}

void te_cuda_peers_reap(te_exec *exec)
{
    te_cuda_collectives *c = te_cuda(exec)->collectives;
    for (te_device_peers *p = c ? c->peers : NULL; p; p = p->next)
        if (p->failed) drop(exec, p);
}

te_status te_cuda_peers_check(te_exec *exec, const te_device_peers *p, const char *what)
{
    if (!p->failed) return TE_OK;
    return te_exec_fail(exec, TE_ERROR_DEVICE, "NCCL: %s: the group has failed before", what);
}

/* While a graph is recorded nothing can be waited for: then the device's end is the connection's. */
void te_cuda_peers_release(te_exec *exec, te_device_peers *p)
{
    if (p && --p->refs == 0 && !te_cuda(exec)->capture) close_peers(exec, p);
}

void te_cuda_collectives_close(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    if (!d->collectives) return;
    while (d->collectives->peers) close_peers(exec, d->collectives->peers);
    te_mem_free(exec->mem, d->collectives, sizeof *d->collectives);
    d->collectives = NULL;
}

/* --- calls -------------------------------------------------------------------------------------------------------- */

typedef struct transfer {
    te_exec         *exec;
    CUcontext        host; /* what was current before, NULL: nothing that is not ours */
    te_device_peers *peers;
    const char      *name;
    int64_t          n;
    te_dtype         dtype;
    ncclDataType_t   type;
    size_t           size; /* of an element */
} transfer;

/* What is only moved goes as bytes where NCCL has no such type, or not in all versions. */
static ncclDataType_t type_of(te_dtype dtype)
{
    switch (dtype) {
    case TE_F32: return ncclFloat32;
    case TE_BF16: return ncclBfloat16;
    case TE_F16: return ncclFloat16;
    case TE_F64: return ncclFloat64;
    case TE_I64: return ncclInt64;
    case TE_I32: return ncclInt32;
    default: return ncclUint8;
    }
}

static te_status begin(transfer *t)
{
    t->host = te_cuda_host_context(t->exec);
    te_status status = te_cuda_enter(t->exec);
    t->type = type_of(t->dtype);
    t->size = te_dtype_size(t->dtype);
    if (status == TE_OK) status = te_cuda_peers_check(t->exec, t->peers, t->name);
    if (status == TE_OK && te_cuda(t->exec)->capture) status = te_cuda_graph_keep_peers(t->exec, t->peers);
    if (status == TE_OK) te_cuda_note(t->exec, t->name);
    else te_cuda_leave(t->exec, t->host);
    return status;
}

static te_status finish(transfer *t, ncclResult_t result)
{
    char what[96];
    snprintf(what, sizeof what, "%s of %lld %s, rank %d of %d", t->name, (long long)t->n, te_dtype_name(t->dtype),
             t->peers->rank, t->peers->size);
    te_status status = settle(t->exec, t->peers, result, what);
    te_cuda_leave(t->exec, t->host);
    return status;
}

static cudaStream_t stream_of(te_exec *exec) { return (cudaStream_t)te_cuda(exec)->stream; }

/* Sums of fp8 and averages of integers are not what the CPU makes of them, or not there. */
static te_status check_reduction(transfer *t, te_reduction reduction)
{
    bool is_float = t->dtype <= TE_F64, is_byte = t->dtype > TE_U8, orders = reduction >= TE_REDUCE_MAX;
    if (is_float || (!is_byte && reduction != TE_REDUCE_AVERAGE) || (t->dtype == TE_BOOL && orders)) return TE_OK;
    return te_exec_fail(t->exec, TE_ERROR_UNSUPPORTED, "NCCL: %s: not of %s", t->name, te_dtype_name(t->dtype));
}

static const ncclRedOp_t operators[] = {
    [TE_REDUCE_SUM] = ncclSum, [TE_REDUCE_AVERAGE] = ncclAvg, [TE_REDUCE_MAX] = ncclMax, [TE_REDUCE_MIN] = ncclMin,
};

static te_status all_reduce(te_exec *exec, te_device_peers *p, const void *in, void *out, int64_t n, te_dtype dtype,
                            te_reduction reduction)
{
    transfer  t = {.exec = exec, .peers = p, .name = "all_reduce", .n = n, .dtype = dtype};
    te_status status = check_reduction(&t, reduction);
    if (n == 0 || status != TE_OK || (status = begin(&t)) != TE_OK) return status;
    return finish(&t, nccl_of(exec)->ncclAllReduce(in, out, (size_t)n, t.type, operators[reduction], p->comm,
                                                   stream_of(exec)));
}

static te_status reduce_scatter(te_exec *exec, te_device_peers *p, const void *in, void *out, int64_t n,
                                te_dtype dtype, te_reduction reduction)
{
    transfer  t = {.exec = exec, .peers = p, .name = "reduce_scatter", .n = n, .dtype = dtype};
    te_status status = check_reduction(&t, reduction);
    if (n == 0 || status != TE_OK || (status = begin(&t)) != TE_OK) return status;
    return finish(&t, nccl_of(exec)->ncclReduceScatter(in, out, (size_t)n, t.type, operators[reduction], p->comm,
                                                       stream_of(exec)));
}

static te_status all_gather(te_exec *exec, te_device_peers *p, const void *in, void *out, int64_t n, te_dtype dtype)
{
    transfer  t = {.exec = exec, .peers = p, .name = "all_gather", .n = n, .dtype = dtype};
    te_status status = n == 0 ? TE_OK : begin(&t);
    if (n == 0 || status != TE_OK) return status;
    return finish(&t, nccl_of(exec)->ncclAllGather(in, out, (size_t)n, t.type, p->comm, stream_of(exec)));
}

static te_status broadcast(te_exec *exec, te_device_peers *p, void *data, int64_t n, te_dtype dtype, int root)
{
    transfer  t = {.exec = exec, .peers = p, .name = "broadcast", .n = n, .dtype = dtype};
    te_status status = n == 0 ? TE_OK : begin(&t);
    if (n == 0 || status != TE_OK) return status;
    return finish(&t, nccl_of(exec)->ncclBroadcast(data, data, (size_t)n, t.type, root, p->comm, stream_of(exec)));
}

static bool goes_on(ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; }

/* One part to a rank and one from another; either may be -1. */
static ncclResult_t send_and_receive(const transfer *t, const void *out, int to, void *in, int from)
{
    const te_cuda_nccl *nccl = nccl_of(t->exec);
    ncclResult_t        r = ncclSuccess;
    if (to >= 0) r = nccl->ncclSend(out, (size_t)t->n, t->type, to, t->peers->comm, stream_of(t->exec));
    if (goes_on(r) && from >= 0)
        r = nccl->ncclRecv(in, (size_t)t->n, t->type, from, t->peers->comm, stream_of(t->exec));
    return r;
}

/* A group that was begun is ended, also after an error in it. */
static te_status end_group(transfer *t, ncclResult_t result)
{
    ncclResult_t end = nccl_of(t->exec)->ncclGroupEnd();
    return finish(t, goes_on(result) ? end : result);
}

static te_status all_to_all(te_exec *exec, te_device_peers *p, const void *in, void *out, int64_t n, te_dtype dtype)
{
    transfer  t = {.exec = exec, .peers = p, .name = "all_to_all", .n = n, .dtype = dtype};
    te_status status = n == 0 ? TE_OK : begin(&t);
    if (n == 0 || status != TE_OK) return status;
    ncclResult_t r = nccl_of(exec)->ncclGroupStart();
    if (r != ncclSuccess) return finish(&t, r);
    for (int i = 0; i < p->size && goes_on(r); i++) {
        size_t at = (size_t)i * (size_t)n * t.size;
        r = send_and_receive(&t, (const char *)in + at, i, (char *)out + at, i);
    }
    return end_group(&t, r);
}

static te_status exchange(te_exec *exec, te_device_peers *p, const void *out, int to, void *in, int from, int64_t n,
                          te_dtype dtype)
{
    transfer  t = {.exec = exec, .peers = p, .name = "exchange", .n = n, .dtype = dtype};
    bool      is_nothing = n == 0 || (to < 0 && from < 0);
    te_status status = is_nothing ? TE_OK : begin(&t);
    if (is_nothing || status != TE_OK) return status;
    ncclResult_t r = nccl_of(exec)->ncclGroupStart();
    if (r != ncclSuccess) return finish(&t, r);
    return end_group(&t, send_and_receive(&t, out, to, in, from));
}

te_device_peers *te_cuda_peers_retain(te_device_peers *p)
{
    p->refs++;
    return p;
}

/* As in backend.c; what follows them sees to it in `begin` and `finish`. */
static te_status guarded_make_id(te_exec *exec, void *id)
{
    CUcontext host = te_cuda_host_context(exec);
    te_status status = make_id(exec, id);
    te_cuda_leave(exec, host);
    return status;
}

static te_status guarded_connect(te_exec *exec, const void *id, int rank, int size, te_device_peers **peers)
{
    CUcontext host = te_cuda_host_context(exec);
    te_status status = connect_peers(exec, id, rank, size, peers);
    te_cuda_leave(exec, host);
    return status;
}

static void guarded_disconnect(te_exec *exec, te_device_peers *peers)
{
    CUcontext host = te_cuda_host_context(exec);
    te_cuda_peers_release(exec, peers);
    te_cuda_leave(exec, host);
}

const te_collectives te_cuda_collectives_table = {
    .id_bytes = ID_BYTES,
    .make_id = guarded_make_id,
    .connect = guarded_connect,
    .disconnect = guarded_disconnect,
    .all_reduce = all_reduce,
    .reduce_scatter = reduce_scatter,
    .all_gather = all_gather,
    .broadcast = broadcast,
    .all_to_all = all_to_all,
    .exchange = exchange,
};

#endif
