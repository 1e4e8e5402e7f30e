/* comm_host.c - calls in the host's memory: the messenger moves bytes, which are added here. */
#include "comm_work.h"

#include "tensor.h"

enum { STAGING = 4 << 20 }; /* bytes that are on their way at a time while adding */

/* Elements of one part where `parts` parts together stay within STAGING. */
static int64_t piece_of(te_dtype dtype, int parts)
{
    int64_t n = STAGING / ((int64_t)te_dtype_size(dtype) * parts);
    return n > 0 ? n : 1;
}

/* parts[r] of all ranks -> their sum: `send` holds a part of n elements for each rank. */
static te_status exchange_and_reduce(const te_comm_work *w, const void *send, void *parts, void *sum, int64_t n)
{
    te_comm  *comm = w->comm;
    te_dtype  dtype = w->x->dtype;
    te_status status = comm->messenger->all_to_all(&comm->exec, comm->peers, send, parts,
                                                   (size_t)n * te_dtype_size(dtype));
    if (status == TE_OK) te_comm_reduce_parts(sum, parts, te_comm_size(comm), n, dtype, w->reduction);
    return status;
}

/* Few elements: every process gets all and adds by itself. */
static te_status reduce_few(const te_comm_work *w, char *data, void *parts, int64_t n)
{
    te_comm  *comm = w->comm;
    te_status status = comm->messenger->all_gather(&comm->exec, comm->peers, data, parts,
                                                   (size_t)n * te_dtype_size(w->x->dtype));
    if (status == TE_OK) te_comm_reduce_parts(data, parts, te_comm_size(comm), n, w->x->dtype, w->reduction);
    return status;
}

/* Each process adds its share of a piece and hands it round. */
static te_status reduce_piece(const te_comm_work *w, char *data, void *parts, int64_t n)
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
static int64_t share_of_piece(const te_comm_work *w)
{
    int64_t ranks = te_comm_size(w->comm), most = piece_of(w->x->dtype, (int)ranks);
    return smaller(te_tensor_numel(w->x) / ranks, most);
}

/* Elements of w->room. */
int64_t te_comm_room(const te_comm_work *w)
{
    int64_t ranks = te_comm_size(w->comm), n = te_tensor_numel(w->x), share = share_of_piece(w);
    if (w->function == TE_COMM_REDUCE_SCATTER) return 2 * share * ranks;
    if (w->function != TE_COMM_ALL_REDUCE) return 0;
    int64_t least = smaller(n, few(w->comm));
    return (share > least ? share : least) * ranks;
}

static te_status host_all_reduce(const te_comm_work *w)
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

/* This process's part of the sum of all x, piece by piece: what goes to one process lies together on the way, as it
 * does in x if one piece is all. */
static te_status host_reduce_scatter(const te_comm_work *w)
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
        for (int r = 0; r < ranks && each < n; r++)
            memcpy(send + (size_t)(r * each) * size, data + (size_t)(r * n + at) * size, (size_t)each * size);
        status = exchange_and_reduce(w, each < n ? send : data, parts, out + (size_t)at * size, each);
    }
    return status;
}

static te_status host_move(const te_comm_work *w)
{
    te_comm            *comm = w->comm;
    const te_messenger *m = comm->messenger;
    void               *x = te_tensor_pointer(w->x), *out = w->out ? te_tensor_pointer(w->out) : NULL;
    size_t              bytes = (size_t)te_tensor_numel(w->x) * te_dtype_size(w->x->dtype);
    switch (w->function) {
    case TE_COMM_BROADCAST: return m->broadcast(&comm->exec, comm->peers, x, bytes, w->root);
    case TE_COMM_ALL_GATHER: return m->all_gather(&comm->exec, comm->peers, x, out, bytes);
    case TE_COMM_ALL_TO_ALL: return m->all_to_all(&comm->exec, comm->peers, x, out, bytes / (size_t)te_comm_size(comm));
    default: return m->exchange(&comm->exec, comm->peers, x, w->to, out, w->from, bytes);
    }
}

te_status te_comm_on_host(const te_comm_work *w)
{
    te_status status;
    if (te_tensor_numel(w->x) == 0) return TE_OK;
    if (w->function == TE_COMM_ALL_REDUCE) status = host_all_reduce(w);
    else if (w->function == TE_COMM_REDUCE_SCATTER) status = host_reduce_scatter(w);
    else status = host_move(w);
    return status == TE_OK ? TE_OK : te_comm_fail_exec(w->comm, status, te_comm_function_name(w->function));
}
