/* messenger.c - libtetrain_mpi.so: bytes between processes over MPI 3.1 (https://www.mpi-forum.org/docs/).
 *
 * MPI is one for a process, so it is begun by the first who joins and ended with the process. Who joins later, when the
 * first has left, has the same communicator again, unless it is of no use to somebody. Calls are the ones that return
 * at once, but for those that join and split a group, and are then asked whether they are done: so Ctrl-C is seen, and
 * a process that waits long leaves the processor to the others.
 */
#include "kernels/messenger.h"

#include <limits.h>
#include <mpi.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Stays to the end of the process, as the communicator does. */
typedef struct mpi_peers {
    te_peers          peers;
    MPI_Comm          comm;
    struct mpi_peers *next; /* in `groups` */
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

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static mpi_peers      *groups; /* all that there ever were; under the guard */
static int             n_groups;
static unsigned char   farewell[512];
static size_t          farewell_bytes;

static mpi_peers  *world; /* of the join before */
static atomic_bool joined, join_left_off;
static bool        somebody_ended; /* who joined before */

enum { ENDED = -1, NEW, KEPT }; /* what a process has to say when it joins: the least counts */

static void bid_farewell(mpi_peers *p, MPI_Request *request)
{
    void *all = malloc((size_t)p->peers.size * farewell_bytes); /* stays */
    if (!all) return;
    MPI_Iallgather(farewell, (int)farewell_bytes, MPI_BYTE, all, (int)farewell_bytes, MPI_BYTE, p->comm, request);
}

/* Tells all who may be waiting for this process, or will be, that it comes no more. They end or are told in turn. */
static void bid_farewells(void)
{
    static int   own = ENDED, least;
    double       since = seconds();
    int          n = 0, done = 0;
    MPI_Request *requests = malloc(((size_t)n_groups + 1) * sizeof *requests);
    if (!requests) return;
    for (int i = 0; i <= n_groups; i++) requests[i] = MPI_REQUEST_NULL;
    for (mpi_peers *p = groups; p; p = p->next)
        if (!p->peers.over) bid_farewell(p, &requests[n++]);
    if (!somebody_ended) MPI_Iallreduce(&own, &least, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD, &requests[n++]);
    while (MPI_Testall(n, requests, &done, MPI_STATUSES_IGNORE) == MPI_SUCCESS && !done) wait_a_little(since);
    free(requests);
}

static pid_t process; /* that began; not a child of it */

/* A process that ends well waits for the others. One that failed, or left off a call, must not: whoever started them
 * ends them all. */
static void end(int status, void *unused)
{
    int ended = 0;
    (void)unused;
    if (status != 0 || left_off || getpid() != process || MPI_Finalized(&ended) != MPI_SUCCESS || ended) return;
    bid_farewells();
    MPI_Finalize();
}

static int begun = MPI_SUCCESS;

static void begin(void)
{
    int there = 0, level;
    MPI_Initialized(&there);
    if (there) return; /* by the host, who ends it too */
    process = getpid();
    begun = MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    if (begun == MPI_SUCCESS) on_exit(end, NULL);
}

static mpi_peers *new_peers(te_exec *exec, const char *what)
{
    mpi_peers *p = calloc(1, sizeof *p);
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

static te_status enter(te_exec *exec, const char *what, mpi_peers *p)
{
    te_status status = look_around(exec, what, p);
    if (status != TE_OK) return status;
    pthread_mutex_lock(&guard);
    p->next = groups;
    groups = p;
    n_groups++;
    pthread_mutex_unlock(&guard);
    return TE_OK;
}

/* What the least of all processes says. */
static te_status ask_all(te_exec *exec, int own, int *least)
{
    static int  in, out; /* may be written to for long when this is left off: then nobody joins again */
    MPI_Request request;
    in = own;
    int       code = MPI_Iallreduce(&in, &out, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD, &request);
    te_status status = code == MPI_SUCCESS ? finish(exec, "join", 1, &request) : failed(exec, "join", code);
    *least = out;
    return status;
}

/* Into `world`; p is room for a new one. */
static te_status join_with(te_exec *exec, mpi_peers *p)
{
    MPI_Request request;
    int         least;
    te_status   status = ask_all(exec, world && !world->peers.over ? KEPT : NEW, &least);
    somebody_ended = status == TE_OK && least == ENDED;
    if (somebody_ended) status = te_exec_fail(exec, TE_ERROR_DEVICE, "join: another process has ended");
    if (status == TE_OK && least == NEW) {
        int code = MPI_Comm_idup(MPI_COMM_WORLD, &p->comm, &request);
        status = code == MPI_SUCCESS ? finish(exec, "join", 1, &request) : failed(exec, "join", code);
        if (status == TE_OK) status = enter(exec, "join", p);
        if (status == TE_OK) world = p;
    }
    join_left_off = status == TE_ERROR_INTERRUPTED; /* the others are one call ahead */
    if (p != world && !join_left_off) free(p);
    return status;
}

static te_status check_join(te_exec *exec, size_t bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, begin);
    if (begun != MPI_SUCCESS) return te_exec_fail(exec, TE_ERROR_DEVICE, "join: MPI cannot be begun");
    if (join_left_off) return te_exec_fail(exec, TE_ERROR_DEVICE, "join: an earlier one was interrupted");
    if (somebody_ended) return te_exec_fail(exec, TE_ERROR_DEVICE, "join: another process has ended");
    if (bytes > sizeof farewell) return te_exec_fail(exec, TE_ERROR_ARGUMENT, "join: a long farewell");
    return TE_OK;
}

/* The processes find each other by the order of their calls, which that of two threads is not. */
static te_status mpi_join(te_exec *exec, const void *word, size_t bytes, te_peers **peers)
{
    if (atomic_exchange(&joined, true))
        return te_exec_fail(exec, TE_ERROR_UNSUPPORTED,
                            "join: another runtime of this process is among the processes; one can be at a time");
    te_status  status = check_join(exec, bytes);
    mpi_peers *p = status == TE_OK ? new_peers(exec, "join") : NULL;
    if (p) {
        memcpy(farewell, word, farewell_bytes = bytes);
        status = join_with(exec, p);
    } else if (status == TE_OK) {
        status = TE_ERROR_MEMORY;
    }
    if (status == TE_OK) *peers = &world->peers;
    else joined = false;
    return status;
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
    bool      inside = status == TE_OK && comm != MPI_COMM_NULL;
    if (inside) status = enter(exec, "split", p);
    if (inside && status == TE_OK) *part = &p->peers;
    else free(p);
    return status;
}

/* The communicator is left to the end of the process: freeing it waits for all of the group, and who leaves may be
 * cleaning up after a failure. */
static void mpi_leave(te_exec *exec, te_peers *peers)
{
    (void)exec;
    if ((mpi_peers *)peers == world) joined = false;
}

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
