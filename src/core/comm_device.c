/* comm_device.c - calls on devices whose backend has collectives (src/kernels/collectives.h). */
#include "comm_work.h"

#include "tensor.h"

static te_status fail_device(const te_comm_work *w, te_status status)
{
    return te_fail_exec(w->comm->ctx, status, &w->device->exec, "distributed");
}

/* The processes' devices, made known to each other. */
static te_status connect_device(const te_comm_work *w, te_device_peers **peers)
{
    te_comm              *comm = w->comm;
    te_exec              *exec = &w->device->exec;
    const te_collectives *c = exec->backend->collectives;
    te_comm_announcement *a = comm->announced; /* not here: were the call left off, it would still be written to */
    *a = (te_comm_announcement){0};
    if (c->id_bytes > sizeof a->id) return te_fail(comm->ctx, TE_ERROR_UNSUPPORTED, "te.distributed: a long id");
    if (te_comm_rank(comm) == 0) a->status = c->make_id(exec, a->id);
    te_status made = (te_status)a->status;
    te_status status = comm->messenger->broadcast(&comm->exec, comm->peers, a, sizeof *a, 0);
    if (status != TE_OK) return te_comm_fail_exec(comm, status, te_comm_function_name(w->function));
    if (made != TE_OK) return fail_device(w, made);
    if (a->status != TE_OK)
        return te_fail(comm->ctx, (te_status)a->status, "te.distributed: rank 0 cannot connect its device");
    status = c->connect(exec, a->id, te_comm_rank(comm), te_comm_size(comm), peers);
    if (status == TE_OK) comm->connection[w->device - comm->ctx->devices] = ++comm->connections;
    if (status == TE_OK) return TE_OK;
    te_comm_give_up(comm); /* the others may be connected */
    return fail_device(w, status);
}

static te_status device_call(const te_comm_work *w, const te_collectives *c, te_exec *exec, void *x, void *out)
{
    int64_t  n = te_tensor_numel(w->x);
    int      ranks = te_comm_size(w->comm);
    te_dtype dtype = w->x->dtype;
    switch (w->function) {
    case TE_COMM_ALL_REDUCE: return c->all_reduce(exec, w->peers, x, x, n, dtype, w->reduction);
    case TE_COMM_REDUCE_SCATTER: return c->reduce_scatter(exec, w->peers, x, out, n / ranks, dtype, w->reduction);
    case TE_COMM_ALL_GATHER: return c->all_gather(exec, w->peers, x, out, n, dtype);
    case TE_COMM_BROADCAST: return c->broadcast(exec, w->peers, x, n, dtype, w->root);
    case TE_COMM_ALL_TO_ALL: return c->all_to_all(exec, w->peers, x, out, n / ranks, dtype);
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

te_status te_comm_on_device(te_comm_work *w)
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
