/* messenger.c - libtetrain_mpi.so: bytes between processes over MPI 3.1 (https://www.mpi-forum.org/docs/).
 *
 * MPI is one for a process, so it is begun by the first who joins and ended with the process; every join has a
 * communicator of its own. Calls are the ones that return at once, but for those that join and split a group, and are
 * then asked whether they are done: so Ctrl-C is seen, and a process that waits long leaves the processor to the
 * others.
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

static atomic_bool left_off; /* something will never be done */

/* Until the n requests are done. After an interrupt they never will be: the group is of no use from then on. */
static te_status finish(te_exec *exec, const char *what, int n, MPI_Request *requests)
{
    double since = seconds();
    for (int done = 0;;) {
        int code = MPI_Testall(n, requests, &done, MPI_STATUSES_IGNORE);
        if (code != MPI_SUCCESS) return failed(exec, what, code);
        if (done) return TE_OK;
        if (exec->interrupt && atomic_load_explicit(exec->interrupt, memory_order_relaxed)) {
            left_off = true;
            return te_exec_fail(exec, TE_ERROR_INTERRUPTED, "%s: interrupted", what);
        }
        wait_a_little(since);
    }
}

/* --- beginning and end -------------------------------------------------------------------------------------------- */

/* A process that ends well waits for the others. One that failed, or left off a call, must not: whoever started them
 * ends them all. */
static void end(int status, void *unused)
{
    int ended = 0;
    (void)unused;
    if (status == 0 && !left_off && MPI_Finalized(&ended) == MPI_SUCCESS && !ended) MPI_Finalize();
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

static mpi_peers *new_peers(te_exec *exec, const char *what)
{
    mpi_peers *p = te_mem_zalloc(exec->mem, sizeof *p);
    if (!p) te_exec_fail(exec, TE_ERROR_MEMORY, "%s: out of host memory", what);
    return p;
}

/* Fills what is known of a new group; who is on the same machine is asked by all of it. */
static te_status look_around(te_exec *exec, const char *what, mpi_peers *p)
{
    MPI_Comm local;
    MPI_Comm_set_errhandler(p->comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(p->comm, &p->peers.rank);
    MPI_Comm_size(p->comm, &p->peers.size);
    int code = MPI_Comm_split_type(p->comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local);
    if (code != MPI_SUCCESS) return failed(exec, what, code);
    MPI_Comm_rank(local, &p->peers.local_rank);
    MPI_Comm_size(local, &p->peers.local_size);
    MPI_Comm_free(&local);
    return TE_OK;
}

static te_status hand_out(te_exec *exec, te_status status, mpi_peers *p, te_peers **peers)
{
    if (status == TE_OK) *peers = &p->peers;
    else te_mem_free(exec->mem, p, sizeof *p);
    return status;
}

static atomic_bool join_left_off;

static te_status mpi_join(te_exec *exec, te_peers **peers)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    MPI_Request           request;
    pthread_once(&once, begin);
    if (begun != MPI_SUCCESS) return te_exec_fail(exec, TE_ERROR_DEVICE, "join: MPI cannot be begun");
    if (join_left_off) return te_exec_fail(exec, TE_ERROR_DEVICE, "join: an earlier one was interrupted");
    mpi_peers *p = new_peers(exec, "join");
    if (!p) return TE_ERROR_MEMORY;
    int       code = MPI_Comm_idup(MPI_COMM_WORLD, &p->comm, &request);
    te_status status = code == MPI_SUCCESS ? finish(exec, "join", 1, &request) : failed(exec, "join", code);
    if (status == TE_ERROR_INTERRUPTED) { /* p may still be written to, and the others are one call ahead */
        join_left_off = true;
        return status;
    }
    if (status == TE_OK) status = look_around(exec, "join", p);
    return hand_out(exec, status, p, peers);
}

static te_status mpi_split(te_exec *exec, te_peers *peers, int color, int key, te_peers **part)
{
    MPI_Comm   comm = MPI_COMM_NULL;
    mpi_peers *p = new_peers(exec, "split"); /* the others wait for a process without memory, too: it is in no group */
    *part = NULL;
    int code = MPI_Comm_split(((mpi_peers *)peers)->comm, color < 0 || !p ? MPI_UNDEFINED : color, key, &comm);
    if (!p) return TE_ERROR_MEMORY;
    p->comm = comm;
    te_status status = code == MPI_SUCCESS ? TE_OK : failed(exec, "split", code);
    if (status == TE_OK && comm != MPI_COMM_NULL) return hand_out(exec, look_around(exec, "split", p), p, part);
    te_mem_free(exec->mem, p, sizeof *p);
    return status;
}

/* The communicator is left to the end of the process: freeing it waits for all of the group, and who leaves may be
 * cleaning up after a failure. */
static void mpi_leave(te_exec *exec, te_peers *peers) { te_mem_free(exec->mem, peers, sizeof(mpi_peers)); }

/* --- moving bytes ------------------------------------------------------------------------------------------------- */

/* `bytes` as a count of some type, since counts are int; the type is freed after use unless it is MPI_BYTE. */
typedef struct extent {
    MPI_Datatype type;
    int          count;
} extent;

#define MOST INT_MAX /* bytes that a count names by itself */

static te_status measure(te_exec *exec, const char *what, size_t bytes, extent *e)
{
    MPI_Datatype many;
    *e = (extent){MPI_BYTE, (int)bytes};
    if (bytes <= MOST) return TE_OK;
    e->count = 1;
    int code = MPI_Type_contiguous(MOST, MPI_BYTE, &many);
    if (code == MPI_SUCCESS) {
        int whole = (int)(bytes / MOST), rest = (int)(bytes % MOST);
        code = MPI_Type_create_struct(2, (int[]){whole, rest}, (MPI_Aint[]){0, (MPI_Aint)whole * MOST},
                                      (MPI_Datatype[]){many, MPI_BYTE}, &e->type);
        MPI_Type_free(&many);
    }
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
