/* nccl.c - NCCL between processes of one machine, over sockets of Linux's abstract names, which vanish with their
 * processes. Each process sends its part to each other one with a few words that say what the call is.
 *
 * Communicators connect while somebody asks about them, and do not block. What a partner does not join in within a
 * minute fails. Work whose partner is gone stands still, as kernels of NCCL do, until the communicator is aborted. No
 * communicator comes to its end while a graph that holds a collective of it lives.
 */
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <nccl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        int code = te_fake_enter(__func__);                                                                            \
        if (code) return (ncclResult_t)code;                                                                           \
    } while (0)

enum { MAX_RANKS = 16, MAX_TRANSFERS = 2 * MAX_RANKS, PATIENCE = 60, MAGIC = 0x6e63636c };

typedef enum function { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, TRANSFERS } function;

struct ncclComm {
    ncclComm_t   next;
    unsigned     magic;
    int          rank, size, listening;
    int          sockets[MAX_RANKS]; /* -1: not connected */
    time_t       until;
    ncclUniqueId id;
    ncclResult_t state;
    bool         aborted, finalized;
    int          recorded; /* collectives that graphs hold */
    char         last[200];
};

static char       last_error[200];
static ncclComm_t comms; /* all there were: recorded work may look at one that is gone */

static ncclResult_t complain(ncclComm_t c, ncclResult_t result, const char *why)
{
    snprintf(last_error, sizeof last_error, "fake NCCL: %s", why);
    if (c) memcpy(c->last, last_error, sizeof last_error);
    return result;
}

static time_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec;
}

static bool is_comm(ncclComm_t c) { return c && c->magic == MAGIC && !c->aborted; }

/* --- connecting --------------------------------------------------------------------------------------------------- */

TE_FAKE ncclResult_t ncclGetVersion(int *version)
{
    ENTER();
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

TE_FAKE ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    unsigned long long words[2];
    ENTER();
    if (getrandom(words, sizeof words, 0) != (ssize_t)sizeof words) return ncclSystemError;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "te_fake_nccl_%016llx%016llx", words[0], words[1]);
    return ncclSuccess;
}

static socklen_t address_of(const ncclUniqueId *id, int rank, struct sockaddr_un *address)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    int n = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "%.64s_%d", id->internal, rank);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static int new_socket(void) { return socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); }

static bool listen_for_others(ncclComm_t c)
{
    struct sockaddr_un address;
    socklen_t          length = address_of(&c->id, c->rank, &address);
    c->listening = new_socket();
    return c->listening >= 0 && bind(c->listening, (struct sockaddr *)&address, length) == 0 &&
           listen(c->listening, MAX_RANKS) == 0;
}

/* A few bytes on a fresh connection. */
static bool all_of(int fd, void *bytes, ssize_t n, bool sends)
{
    struct pollfd p = {.fd = fd, .events = sends ? POLLOUT : POLLIN};
    if (poll(&p, 1, PATIENCE * 1000) != 1) return false;
    return (sends ? send(fd, bytes, (size_t)n, MSG_NOSIGNAL) : recv(fd, bytes, (size_t)n, 0)) == n;
}

static ncclResult_t greet(ncclComm_t c, int fd, int expected)
{
    int own[2] = {c->rank, c->size}, other[2] = {-1, -1};
    if (!all_of(fd, own, sizeof own, true) || !all_of(fd, other, sizeof other, false)) return ncclRemoteError;
    bool fits = other[1] == c->size && other[0] >= 0 && other[0] < c->size && c->sockets[other[0]] < 0 &&
                (expected < 0 || other[0] == expected);
    if (!fits) return complain(c, ncclInvalidArgument, "ranks or sizes of the processes do not fit together");
    c->sockets[other[0]] = fd;
    return ncclSuccess;
}

static ncclResult_t call_lower(ncclComm_t c, int rank)
{
    struct sockaddr_un address;
    socklen_t          length = address_of(&c->id, rank, &address);
    int                fd = new_socket();
    if (fd < 0) return ncclSystemError;
    if (connect(fd, (struct sockaddr *)&address, length) == 0) return greet(c, fd, rank);
    close(fd);
    return ncclInProgress;
}

/* One step towards being connected: those below are called, those above call. */
static ncclResult_t step(ncclComm_t c)
{
    ncclResult_t r = ncclSuccess;
    bool         all = true;
    for (int i = 0; i < c->rank && (r == ncclSuccess || r == ncclInProgress); i++)
        if (c->sockets[i] < 0) r = call_lower(c, i);
    for (int fd; (r == ncclSuccess || r == ncclInProgress) && (fd = accept(c->listening, NULL, NULL)) >= 0;) {
        fcntl(fd, F_SETFL, O_NONBLOCK);
        r = greet(c, fd, -1);
    }
    if (r != ncclSuccess && r != ncclInProgress) return r;
    for (int i = 0; i < c->size; i++) all &= i == c->rank || c->sockets[i] >= 0;
    if (all) return ncclSuccess;
    return now() > c->until ? complain(c, ncclSystemError, "not all processes came to connect") : ncclInProgress;
}

TE_FAKE ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    ENTER();
    if (!config || config->magic != 0xcafebeef || config->size != sizeof *config || config->blocking != 0)
        return complain(NULL, ncclInvalidArgument, "a configuration that does not block is all there is");
    if (rank < 0 || rank >= size || size > MAX_RANKS || strncmp(id.internal, "te_fake_nccl_", 13) != 0)
        return complain(NULL, ncclInvalidArgument, "rank, size or id");
    ncclComm_t c = calloc(1, sizeof *c);
    if (!c) return ncclSystemError;
    *c = (struct ncclComm){.magic = MAGIC, .rank = rank, .size = size, .id = id, .state = ncclInProgress,
                           .until = now() + PATIENCE, .next = comms};
    comms = c;
    for (int i = 0; i < MAX_RANKS; i++) c->sockets[i] = -1;
    if (!listen_for_others(c)) c->state = complain(c, ncclSystemError, "two processes have the same rank");
    *out = c;
    te_fake_made(1);
    return ncclInProgress;
}

static void hang_up(ncclComm_t c)
{
    for (int i = 0; i < MAX_RANKS; i++)
        if (c->sockets[i] >= 0) close(c->sockets[i]);
    for (int i = 0; i < MAX_RANKS; i++) c->sockets[i] = -1;
    if (c->listening >= 0) close(c->listening);
    c->listening = -1;
}

static ncclResult_t end(ncclComm_t c)
{
    hang_up(c);
    c->aborted = true;
    te_fake_made(-1);
    return ncclSuccess;
}

TE_FAKE ncclResult_t ncclCommAbort(ncclComm_t c)
{
    ENTER();
    if (!is_comm(c)) return complain(NULL, ncclInvalidArgument, "no communicator, or one that is gone");
    if (c->recorded > 0) {
        fprintf(stderr, "fake NCCL: an abort that has no end: graphs hold %d collectives\n", c->recorded);
        abort();
    }
    return end(c);
}

TE_FAKE ncclResult_t ncclCommFinalize(ncclComm_t c)
{
    ENTER();
    if (!is_comm(c) || c->finalized || c->state != ncclSuccess)
        return complain(NULL, ncclInvalidUsage, "a communicator that cannot be finalized");
    if (te_fake_poll() == CUDA_ERROR_NOT_READY || c->recorded > 0) c->state = ncclInProgress;
    c->finalized = true;
    return c->state;
}

TE_FAKE ncclResult_t ncclCommDestroy(ncclComm_t c)
{
    ENTER();
    if (!is_comm(c) || !c->finalized || c->state != ncclSuccess)
        return complain(NULL, ncclInvalidUsage, "a communicator that is not finalized");
    return end(c);
}

TE_FAKE const char *ncclGetErrorString(ncclResult_t result)
{
    return result == ncclSuccess           ? "no error"
           : result == ncclRemoteError     ? "remote process exited or there was a network error"
           : result == ncclInvalidArgument ? "invalid argument"
           : result == ncclInvalidUsage    ? "invalid usage"
                                           : "a failure made for a test";
}

TE_FAKE const char *ncclGetLastError(ncclComm_t c) { return is_comm(c) && c->last[0] ? c->last : last_error; }

TE_FAKE ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *error)
{
    ENTER();
    if (!is_comm(c)) return complain(NULL, ncclInvalidArgument, "no communicator, or one that is gone");
    if (c->state == ncclInProgress && !c->finalized) c->state = step(c);
    *error = c->state;
    return ncclSuccess;
}

/* --- work --------------------------------------------------------------------------------------------------------- */

/* What a message says before its bytes. */
typedef struct header {
    int32_t function, type, op, root;
    int64_t bytes;
} header;

typedef struct flow {
    const char *out;
    char       *in;
    header      sent, came;
    size_t      to_send, to_receive, sends, receives; /* with the header; 0: nothing that way */
} flow;

typedef struct transfer {
    char  *buffer;
    size_t bytes;
    int    rank;
    bool   sends;
} transfer;

typedef struct job {
    ncclComm_t  comm;
    header      header;
    const char *in;
    char       *out;
    size_t      count;
    int         n_transfers;
    transfer    transfers[MAX_TRANSFERS];
} job;

static size_t size_of(int type)
{
    static const unsigned char sizes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}

static void give_up(ncclComm_t c, ncclResult_t result, const char *why)
{
    c->state = complain(c, result, why);
    te_fake_stand_still();
}

/* Of bytes of a message, of which the header comes first: as many as go at once. 1: some, 0: not now, -1: gone. */
static int move(int fd, header *head, char *data, size_t done, size_t total, size_t *moved, bool sends)
{
    char   *at = done < sizeof *head ? (char *)head + done : data + (done - sizeof *head);
    size_t  n = done < sizeof *head ? sizeof *head - done : total - done;
    ssize_t r = sends ? send(fd, at, n, MSG_NOSIGNAL) : recv(fd, at, n, 0);
    if (r > 0) *moved += (size_t)r;
    if (r > 0) return 1;
    return r < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -1;
}

static bool fits(const flow *f)
{
    return f->came.function == f->sent.function && f->came.type == f->sent.type && f->came.op == f->sent.op &&
           f->came.root == f->sent.root && (size_t)f->came.bytes == f->to_receive - sizeof f->came;
}

/* Whether the connection goes on. */
static bool advance(ncclComm_t c, int fd, flow *f)
{
    while (f->sends < f->to_send) {
        int r = move(fd, &f->sent, (char *)(uintptr_t)f->out, f->sends, f->to_send, &f->sends, true);
        if (r < 0) return give_up(c, ncclRemoteError, "a process is gone"), false;
        if (r == 0) break;
    }
    while (f->receives < f->to_receive) {
        int r = move(fd, &f->came, f->in, f->receives, f->to_receive, &f->receives, false);
        if (r < 0) return give_up(c, ncclRemoteError, "a process is gone"), false;
        if (r == 0) break;
        if (f->receives == sizeof f->came && !fits(f))
            return give_up(c, ncclInvalidUsage, "the processes' calls differ"), false;
    }
    return true;
}

static bool run_flows(ncclComm_t c, flow *flows)
{
    time_t until = now() + PATIENCE;
    for (;;) {
        struct pollfd waits[MAX_RANKS];
        int           n = 0;
        for (int i = 0; i < c->size; i++) {
            flow *f = &flows[i];
            if (i == c->rank || (f->sends == f->to_send && f->receives == f->to_receive)) continue;
            if (!advance(c, c->sockets[i], f)) return false;
            short events = (short)((f->sends < f->to_send ? POLLOUT : 0) | (f->receives < f->to_receive ? POLLIN : 0));
            if (events) waits[n++] = (struct pollfd){.fd = c->sockets[i], .events = events};
        }
        if (n == 0) return true;
        poll(waits, (nfds_t)n, 1000);
        if (now() <= until) continue;
        give_up(c, ncclSystemError, "a process does not join in");
        return false;
    }
}

static void flow_to(flow *f, const header *h, const char *out, size_t bytes)
{
    f->sent = *h;
    f->sent.bytes = (int64_t)bytes;
    f->out = out;
    f->to_send = sizeof *h + bytes;
}

static void flow_from(flow *f, const header *h, char *in, size_t bytes)
{
    if (!f->to_send) f->sent = *h;
    f->in = in;
    f->to_receive = sizeof *h + bytes;
}

static float half_value(uint16_t h)
{
    uint32_t sign = (uint32_t)(h >> 15) << 31, e = h >> 10 & 31, m = h & 1023;
    float    x = e == 31 ? (m ? __builtin_nanf("") : __builtin_inff())
                         : __builtin_ldexpf((float)(e ? m + 1024 : m), (int)(e ? e : 1) - 25);
    return sign ? -x : x;
}

/* Numbers of tests are small: rounded to nearest even, not beyond the largest one. */
static uint16_t half_bits(float x)
{
    uint16_t best = 0, sign = x < 0 ? 0x8000 : 0;
    float    a = x < 0 ? -x : x;
    if (!(a < 65520)) return (uint16_t)(sign | 0x7c00);
    int low = 0, high = 0x7bff;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (half_value((uint16_t)middle) <= a)
            low = middle;
        else
            high = middle - 1;
    }
    float below = half_value((uint16_t)low), above = half_value((uint16_t)(low + 1));
    best = (uint16_t)(a - below > above - a || (a - below == above - a && low % 2) ? low + 1 : low);
    return (uint16_t)(sign | best);
}

static float brain_value(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float    x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint16_t brain_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static double value_at(const char *p, int type, size_t i)
{
    switch (type) {
    case ncclFloat32: return (double)((const float *)(const void *)p)[i];
    case ncclFloat64: return ((const double *)(const void *)p)[i];
    case ncclFloat16: return (double)half_value(((const uint16_t *)(const void *)p)[i]);
    default: return (double)brain_value(((const uint16_t *)(const void *)p)[i]);
    }
}

static void set_at(char *p, int type, size_t i, double x)
{
    switch (type) {
    case ncclFloat32: ((float *)(void *)p)[i] = (float)x; break;
    case ncclFloat64: ((double *)(void *)p)[i] = x; break;
    case ncclFloat16: ((uint16_t *)(void *)p)[i] = half_bits((float)x); break;
    default: ((uint16_t *)(void *)p)[i] = brain_bits((float)x); break;
    }
}

static int64_t integer_at(const char *p, int type, size_t i)
{
    switch (type) {
    case ncclInt64: return ((const int64_t *)(const void *)p)[i];
    case ncclInt32: return ((const int32_t *)(const void *)p)[i];
    default: return ((const uint8_t *)(const void *)p)[i];
    }
}

static void set_integer(char *p, int type, size_t i, int64_t x)
{
    switch (type) {
    case ncclInt64: ((int64_t *)(void *)p)[i] = x; break;
    case ncclInt32: ((int32_t *)(void *)p)[i] = (int32_t)x; break;
    default: ((uint8_t *)(void *)p)[i] = (uint8_t)x; break;
    }
}

/* parts: of all ranks, one behind the other. */
static void reduce(const job *j, const char *parts, char *out)
{
    int    type = j->header.type, op = j->header.op, size = j->comm->size;
    size_t n = j->count;
    bool   is_float = type == ncclFloat32 || type == ncclFloat64 || type == ncclFloat16 || type == ncclBfloat16;
    for (size_t i = 0; i < n; i++) {
        double  sum = is_float ? value_at(parts, type, i) : 0;
        int64_t whole = is_float ? 0 : integer_at(parts, type, i);
        for (int r = 1; r < size; r++) {
            size_t at = (size_t)r * n + i;
            if (is_float) {
                double x = value_at(parts, type, at);
                sum = op == ncclMax ? (x > sum ? x : sum) : op == ncclMin ? (x < sum ? x : sum) : sum + x;
            } else {
                int64_t x = integer_at(parts, type, at);
                whole = op == ncclMax   ? (x > whole ? x : whole)
                        : op == ncclMin ? (x < whole ? x : whole)
                                        : (int64_t)((uint64_t)whole + (uint64_t)x);
            }
        }
        if (is_float)
            set_at(out, type, i, op == ncclAvg ? sum / size : sum);
        else
            set_integer(out, type, i, whole);
    }
}

static void run_reduction(job *j)
{
    ncclComm_t c = j->comm;
    flow       flows[MAX_RANKS] = {0};
    size_t     bytes = j->count * size_of(j->header.type);
    char      *parts = malloc(bytes ? bytes * (size_t)c->size : 1);
    if (!parts || bytes > PTRDIFF_MAX) abort();
    for (int i = 0; i < c->size; i++) {
        const char *part = j->in + (j->header.function == REDUCE_SCATTER ? (size_t)i * bytes : 0);
        char       *place = parts + (size_t)i * bytes;
        if (i == c->rank) {
            memcpy(place, part, bytes);
            continue;
        }
        flow_to(&flows[i], &j->header, part, bytes);
        flow_from(&flows[i], &j->header, place, bytes);
    }
    if (run_flows(c, flows)) reduce(j, parts, j->out);
    free(parts);
}

static void run_move(job *j)
{
    ncclComm_t c = j->comm;
    flow       flows[MAX_RANKS] = {0};
    size_t     bytes = j->count * size_of(j->header.type);
    int        root = j->header.root;
    for (int i = 0; i < c->size; i++) {
        if (j->header.function == ALL_GATHER || c->rank == root) flow_to(&flows[i], &j->header, j->in, bytes);
        if (j->header.function == ALL_GATHER) flow_from(&flows[i], &j->header, j->out + (size_t)i * bytes, bytes);
        if (j->header.function == BROADCAST && i == root) flow_from(&flows[i], &j->header, j->out, bytes);
    }
    if (j->header.function == ALL_GATHER) memmove(j->out + (size_t)c->rank * bytes, j->in, bytes);
    if (j->header.function == BROADCAST && c->rank == root) memmove(j->out, j->in, bytes);
    run_flows(c, flows);
}

static void run_transfers(job *j)
{
    ncclComm_t      c = j->comm;
    flow            flows[MAX_RANKS] = {0};
    const transfer *own_send = NULL, *own_receive = NULL;
    for (int i = 0; i < j->n_transfers; i++) {
        const transfer *t = &j->transfers[i];
        if (t->rank == c->rank) *(t->sends ? &own_send : &own_receive) = t;
        if (t->sends)
            flow_to(&flows[t->rank], &j->header, t->buffer, t->bytes);
        else
            flow_from(&flows[t->rank], &j->header, t->buffer, t->bytes);
    }
    if (own_send) memcpy(own_receive->buffer, own_send->buffer, own_send->bytes);
    run_flows(c, flows);
}

static void run_job(void *work)
{
    job *j = work;
    if (j->comm->aborted) return;
    if (j->comm->state != ncclSuccess && !j->comm->finalized) {
        te_fake_stand_still();
        return;
    }
    if (j->header.function <= REDUCE_SCATTER)
        run_reduction(j);
    else if (j->header.function == TRANSFERS)
        run_transfers(j);
    else
        run_move(j);
}

/* --- calls -------------------------------------------------------------------------------------------------------- */

static int depth; /* of groups */
static job grouped;
static CUstream grouped_stream;

static bool apart(const char *a, size_t n, const char *b, size_t m) { return a + n <= b || b + m <= a; }

static ncclResult_t check(ncclComm_t c, int type, size_t count)
{
    if (!is_comm(c)) return complain(NULL, ncclInvalidArgument, "no communicator, or one that is gone");
    if (c->state != ncclSuccess || c->finalized) return complain(c, ncclInvalidUsage, "a communicator not to be used");
    if (type < 0 || type >= ncclNumTypes || count > (size_t)1 << 40) 
        return complain(c, ncclInvalidArgument, "type, count");
    return ncclSuccess;
}

static void forget_recorded(void *comm) { ((ncclComm_t)comm)->recorded--; }

static ncclResult_t queue(job *j, CUstream stream)
{
    if (te_fake_record_hold(forget_recorded, j->comm)) j->comm->recorded++;
    if (te_fake_queue(stream, run_job, j, sizeof *j, 5000) != CUDA_SUCCESS)
        return complain(j->comm, ncclUnhandledCudaError, "the stream takes no work");
    te_fake_hasten();
    return ncclSuccess;
}

static ncclResult_t collective(job j, size_t in_bytes, size_t out_bytes, const void *in_place, cudaStream_t stream)
{
    ncclResult_t r = check(j.comm, j.header.type, j.count);
    if (r != ncclSuccess) return r;
    if (depth > 0) return complain(j.comm, ncclInvalidUsage, "collectives in a group are not made up here");
    if (!te_fake_contains((CUdeviceptr)(uintptr_t)j.in, in_bytes) ||
        !te_fake_contains((CUdeviceptr)(uintptr_t)j.out, out_bytes))
        return complain(j.comm, ncclInvalidArgument, "memory that is not the device's");
    if (in_place != j.out && !apart(j.in, in_bytes, j.out, out_bytes))
        return complain(j.comm, ncclInvalidArgument, "in and out overlap");
    return queue(&j, (CUstream)stream);
}

static bool is_operator(ncclRedOp_t op) { return (int)op >= 0 && (int)op < ncclNumOps && op != ncclProd; }

TE_FAKE ncclResult_t ncclAllReduce(const void *in, void *out, size_t n, ncclDataType_t type, ncclRedOp_t op,
                                   ncclComm_t c, cudaStream_t stream)
{
    ENTER();
    ncclResult_t r = is_operator(op) ? check(c, (int)type, n) : ncclInvalidArgument;
    if (r != ncclSuccess) return r;
    size_t bytes = n * size_of((int)type);
    job    j = {.comm = c, .header = {ALL_REDUCE, (int)type, (int)op, 0, 0}, .in = in, .out = out, .count = n};
    return collective(j, bytes, bytes, in, stream);
}

TE_FAKE ncclResult_t ncclReduceScatter(const void *in, void *out, size_t n, ncclDataType_t type, ncclRedOp_t op,
                                       ncclComm_t c, cudaStream_t stream)
{
    ENTER();
    ncclResult_t r = is_operator(op) ? check(c, (int)type, n) : ncclInvalidArgument;
    if (r != ncclSuccess) return r;
    size_t bytes = n * size_of((int)type);
    job    j = {.comm = c, .header = {REDUCE_SCATTER, (int)type, (int)op, 0, 0}, .in = in, .out = out, .count = n};
    return collective(j, bytes * (size_t)c->size, bytes, (const char *)in + (size_t)c->rank * bytes, stream);
}

TE_FAKE ncclResult_t ncclAllGather(const void *in, void *out, size_t n, ncclDataType_t type, ncclComm_t c,
                                   cudaStream_t stream)
{
    ENTER();
    ncclResult_t r = check(c, (int)type, n);
    if (r != ncclSuccess) return r;
    size_t bytes = n * size_of((int)type);
    job    j = {.comm = c, .header = {ALL_GATHER, (int)type, 0, 0, 0}, .in = in, .out = out, .count = n};
    bool   own_place = (const char *)in == (char *)out + (size_t)c->rank * bytes;
    return collective(j, bytes, bytes * (size_t)c->size, own_place ? out : NULL, stream);
}

TE_FAKE ncclResult_t ncclBroadcast(const void *in, void *out, size_t n, ncclDataType_t type, int root, ncclComm_t c,
                                   cudaStream_t stream)
{
    ENTER();
    ncclResult_t r = check(c, (int)type, n);
    if (r != ncclSuccess) return r;
    if (root < 0 || root >= c->size) return complain(c, ncclInvalidArgument, "root");
    size_t bytes = n * size_of((int)type);
    job    j = {.comm = c, .header = {BROADCAST, (int)type, 0, root, 0}, .in = in, .out = out, .count = n};
    return collective(j, bytes, bytes, in, stream);
}

static ncclResult_t add_transfer(void *buffer, size_t n, int type, int rank, ncclComm_t c, cudaStream_t stream,
                                 bool sends)
{
    ncclResult_t r = check(c, type, n);
    if (r != ncclSuccess) return r;
    if (rank < 0 || rank >= c->size) return complain(c, ncclInvalidArgument, "peer");
    if (depth == 0) return complain(c, ncclInvalidUsage, "sending and receiving stand in a group here");
    transfer t = {buffer, n * size_of(type), rank, sends};
    if (!te_fake_contains((CUdeviceptr)(uintptr_t)buffer, t.bytes))
        return complain(c, ncclInvalidArgument, "memory that is not the device's");
    if (grouped.n_transfers == 0) {
        grouped = (job){.comm = c, .header = {TRANSFERS, type, 0, 0, 0}};
        grouped_stream = (CUstream)stream;
    }
    for (int i = 0; i < grouped.n_transfers; i++) {
        const transfer *other = &grouped.transfers[i];
        if (other->rank == rank && other->sends == sends)
            return complain(c, ncclInvalidUsage, "twice to or from one rank");
        if (!(sends && other->sends) && !apart(t.buffer, t.bytes, other->buffer, other->bytes))
            return complain(c, ncclInvalidArgument, "buffers of a group overlap");
    }
    if (grouped.comm != c || grouped.header.type != type || grouped.n_transfers == MAX_TRANSFERS)
        return complain(c, ncclInvalidUsage, "a group of one communicator and one type is all there is");
    grouped.transfers[grouped.n_transfers++] = t;
    return ncclSuccess;
}

TE_FAKE ncclResult_t ncclSend(const void *in, size_t n, ncclDataType_t type, int to, ncclComm_t c, cudaStream_t stream)
{
    ENTER();
    return add_transfer((void *)(uintptr_t)in, n, (int)type, to, c, stream, true);
}

TE_FAKE ncclResult_t ncclRecv(void *out, size_t n, ncclDataType_t type, int from, ncclComm_t c, cudaStream_t stream)
{
    ENTER();
    return add_transfer(out, n, (int)type, from, c, stream, false);
}

TE_FAKE ncclResult_t ncclGroupStart(void)
{
    ENTER();
    depth++;
    return ncclSuccess;
}

TE_FAKE ncclResult_t ncclGroupEnd(void)
{
    size_t own[2] = {0}, ways[2] = {0};
    if (depth == 0) return complain(NULL, ncclInvalidUsage, "a group that was not begun");
    int n = --depth > 0 ? 0 : grouped.n_transfers;
    job j = grouped;
    if (depth == 0) grouped.n_transfers = 0;
    ENTER();
    if (n == 0) return ncclSuccess;
    for (int i = 0; i < n; i++) {
        if (j.transfers[i].rank != j.comm->rank) continue;
        own[j.transfers[i].sends] += j.transfers[i].bytes;
        ways[j.transfers[i].sends]++;
    }
    if (own[0] != own[1] || ways[0] != ways[1])
        return complain(j.comm, ncclInvalidUsage, "what a process sends itself it receives");
    return queue(&j, grouped_stream);
}
