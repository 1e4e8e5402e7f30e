/* messenger.c - libtetrain_mpi.so: bytes between processes over MPI 3.1 (https://www.mpi-forum.org/docs/).
 *
 * MPI is one for a process, so it is begun by the first who joins and ended with the process; every join has a
 * communicator of its own. Calls are the ones that return at once, and are then asked whether they are done: so Ctrl-C
 * is seen, and a process that waits long leaves the processor to the others.
 */
#include "kernels/messenger.h"

#include <limits.h>
#include <mpi.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

typedef struct mpi_peers {
    te_peers peers;
    MPI_Comm comm;
} mpi_peers;

static te_status failed(te_exec *exec, const char *what, int code)
{
    char text[MPI_MAX_ERROR_STRING];
    int  n = 0;
    if (MPI_Error_string(code, text, &n) != MPI_SUCCESS) text[0] = 0;
    return te_exec_fail(exec, TE_ERROR_DEVICE, "%s: MPI: %s", what, text);
}

/* --- waiting ------------------------------------------------------------------------------------------------------ */

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* At first only others that want the processor go before; who has waited for long sleeps. */
static void wait_a_little(double since)
{
    const struct timespec nap = {.tv_nsec = 50000};
    if (seconds() - since < 0.02) sched_yield();
    else nanosleep(&nap, NULL);
}

/* Until the n requests are done. After an interrupt they never will be: the group is of no use from then on. */
static te_status finish(te_exec *exec, const char *what, int n, MPI_Request *requests)
{
    double since = seconds();
    for (int done = 0;;) {
        int code = MPI_Testall(n, requests, &done, MPI_STATUSES_IGNORE);
        if (code != MPI_SUCCESS) return failed(exec, what, code);
        if (done) return TE_OK;
        if (exec->interrupt && atomic_load_explicit(exec->interrupt, memory_order_relaxed))
            return te_exec_fail(exec, TE_ERROR_INTERRUPTED, "%s: interrupted", what);
        wait_a_little(since);
    }
}

/* --- beginning and end -------------------------------------------------------------------------------------------- */

/* A process that ends well waits for the others; one that failed must not: whoever started them ends them all. */
static void end(int status, void *unused)
{
    int ended = 0;
    (void)unused;
    if (status == 0 && MPI_Finalized(&ended) == MPI_SUCCESS && !ended) MPI_Finalize();
}

static int begun = MPI_SUCCESS;

static void begin(void)
{
    int there = 0, level;
    MPI_Initialized(&there);
    if (there) return; /* by the host, who ends it too */
    begun = MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    if (begun == MPI_SUCCESS) on_exit(end, NULL);
}

static te_status take(te_exec *exec, MPI_Comm comm, te_peers **peers)
{
    MPI_Comm   local;
    mpi_peers *p = te_mem_zalloc(exec->mem, sizeof *p);
    if (!p) {
        MPI_Comm_free(&comm);
        return te_exec_fail(exec, TE_ERROR_MEMORY, "join: out of host memory");
    }
    p->comm = comm;
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm, &p->peers.rank);
    MPI_Comm_size(comm, &p->peers.size);
    int code = MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local);
    if (code == MPI_SUCCESS) {
        MPI_Comm_rank(local, &p->peers.local_rank);
        MPI_Comm_size(local, &p->peers.local_size);
        MPI_Comm_free(&local);
        *peers = &p->peers;
        return TE_OK;
    }
    MPI_Comm_free(&p->comm);
    te_mem_free(exec->mem, p, sizeof *p);
    return failed(exec, "join", code);
}

static te_status mpi_join(te_exec *exec, te_peers **peers)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    MPI_Comm              comm;
    pthread_once(&once, begin);
    if (begun != MPI_SUCCESS) return te_exec_fail(exec, TE_ERROR_DEVICE, "join: MPI cannot be begun");
    int code = MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    return code == MPI_SUCCESS ? take(exec, comm, peers) : failed(exec, "join", code);
}

static te_status mpi_split(te_exec *exec, te_peers *peers, int color, int key, te_peers **part)
{
    MPI_Comm comm;
    *part = NULL;
    int code = MPI_Comm_split(((mpi_peers *)peers)->comm, color < 0 ? MPI_UNDEFINED : color, key, &comm);
    if (code != MPI_SUCCESS) return failed(exec, "split", code);
    return comm == MPI_COMM_NULL ? TE_OK : take(exec, comm, part);
}

/* The communicator is left to the end of the process: freeing it waits for all of the group, and who leaves may be
 * cleaning up after a failure. */
static void mpi_leave(te_exec *exec, te_peers *peers) { te_mem_free(exec->mem, peers, sizeof(mpi_peers)); }

/* --- moving bytes ------------------------------------------------------------------------------------------------- */

/* `bytes` as a count of some type, since counts are int; the type is free'd after use unless it is MPI_BYTE. */
typedef struct extent {
    MPI_Datatype type;
    int          count;
} extent;

static te_status measure(te_exec *exec, const char *what, size_t bytes, extent *e)
{
    size_t unit = 1;
    while (bytes / unit > INT_MAX && bytes % (2 * unit) == 0) unit *= 2;
    if (bytes / unit > INT_MAX || unit > INT_MAX)
        return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "%s: %zu bytes at once", what, bytes);
    *e = (extent){MPI_BYTE, (int)(bytes / unit)};
    if (unit == 1) return TE_OK;
    int code = MPI_Type_contiguous((int)unit, MPI_BYTE, &e->type);
    if (code == MPI_SUCCESS) code = MPI_Type_commit(&e->type);
    return code == MPI_SUCCESS ? TE_OK : failed(exec, what, code);
}

/* Waits for the n requests of a call that gave `code`. */
static te_status settle(te_exec *exec, const char *what, extent *e, int code, int n, MPI_Request *requests)
{
    te_status status = code == MPI_SUCCESS ? finish(exec, what, n, requests) : failed(exec, what, code);
    if (e->type != MPI_BYTE) MPI_Type_free(&e->type); /* MPI keeps it while a request needs it */
    return status;
}

static te_status mpi_broadcast(te_exec *exec, te_peers *peers, void *data, size_t bytes, int root)
{
    MPI_Request request;
    extent      e;
    te_status   status = measure(exec, "broadcast", bytes, &e);
    if (status != TE_OK) return status;
    int code = MPI_Ibcast(data, e.count, e.type, root, ((mpi_peers *)peers)->comm, &request);
    return settle(exec, "broadcast", &e, code, 1, &request);
}

static te_status mpi_all_gather(te_exec *exec, te_peers *peers, const void *in, void *out, size_t bytes)
{
    MPI_Request request;
    extent      e;
    te_status   status = measure(exec, "all_gather", bytes, &e);
    if (status != TE_OK) return status;
    bool in_place = (const char *)in == (char *)out + (size_t)peers->rank * bytes;
    int  code = MPI_Iallgather(in_place ? MPI_IN_PLACE : in, e.count, e.type, out, e.count, e.type,
                               ((mpi_peers *)peers)->comm, &request);
    return settle(exec, "all_gather", &e, code, 1, &request);
}

static te_status mpi_all_to_all(te_exec *exec, te_peers *peers, const void *in, void *out, size_t bytes)
{
    MPI_Request request;
    extent      e;
    te_status   status = measure(exec, "all_to_all", bytes, &e);
    if (status != TE_OK) return status;
    int code = MPI_Ialltoall(in, e.count, e.type, out, e.count, e.type, ((mpi_peers *)peers)->comm, &request);
    return settle(exec, "all_to_all", &e, code, 1, &request);
}

static te_status mpi_exchange(te_exec *exec, te_peers *peers, const void *out, int to, void *in, int from, size_t bytes)
{
    MPI_Request requests[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
    MPI_Comm    comm = ((mpi_peers *)peers)->comm;
    extent      e;
    te_status   status = measure(exec, "exchange", bytes, &e);
    if (status != TE_OK) return status;
    int code = MPI_Irecv(in, e.count, e.type, from < 0 ? MPI_PROC_NULL : from, 0, comm, &requests[0]);
    if (code == MPI_SUCCESS)
        code = MPI_Isend(out, e.count, e.type, to < 0 ? MPI_PROC_NULL : to, 0, comm, &requests[1]);
    return settle(exec, "exchange", &e, code, 2, requests);
}

static const te_messenger messenger = {
    .layout = TE_MESSENGER_LAYOUT, .name = "mpi", .join = mpi_join, .split = mpi_split, .leave = mpi_leave,
    .broadcast = mpi_broadcast, .all_gather = mpi_all_gather, .all_to_all = mpi_all_to_all, .exchange = mpi_exchange,
};

__attribute__((visibility("default"))) const te_messenger *te_messenger_get(void);

const te_messenger *te_messenger_get(void) { return &messenger; }
