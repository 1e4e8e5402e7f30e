/* test_comm.c - groups of processes without processes: contexts of several threads, joined by a messenger that copies
 * between them. What is summed is compared bit by bit with sums taken here, in the order of the ranks. */
#include "test.h"

#include "core/comm_work.h"
#include "core/tensor.h"
#include "failing_context.h"
#include "kernels/dtype.h"

#include <pthread.h>

/* --- a messenger between threads ---------------------------------------------------------------------------------- */

enum { MAX_RANKS = 5 };

typedef struct room {
    pthread_mutex_t lock;
    pthread_cond_t  change;
    int             size, waiting, round, joined;
    const void     *in[MAX_RANKS];
    void           *out[MAX_RANKS];
    int             color[MAX_RANKS], key[MAX_RANKS];
    struct room    *parts[MAX_RANKS]; /* by color */
} room;

typedef struct thread_peers {
    te_peers peers;
    room    *room;
} thread_peers;

static room *joining; /* what te_comm_join joins now */

static unsigned char farewell[256]; /* what a member that ends has to say */
static size_t        farewell_bytes;

static room *new_room(int size)
{
    room *r = calloc(1, sizeof *r);
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->change, NULL);
    r->size = size;
    return r;
}

static void free_room(room *r)
{
    for (int i = 0; r && i < MAX_RANKS; i++) free_room(r->parts[i]);
    free(r);
}

/* Waits for all of the group; looks at the interrupt now and then. */
static te_status meet(te_exec *exec, room *r)
{
    te_status status = TE_OK;
    pthread_mutex_lock(&r->lock);
    int round = r->round;
    if (++r->waiting == r->size) {
        r->waiting = 0;
        r->round++;
        pthread_cond_broadcast(&r->change);
    }
    while (r->round == round && status == TE_OK) {
        struct timespec soon;
        clock_gettime(CLOCK_REALTIME, &soon);
        soon.tv_nsec += 2000000;
        if (soon.tv_nsec >= 1000000000) soon = (struct timespec){soon.tv_sec + 1, soon.tv_nsec - 1000000000};
        pthread_cond_timedwait(&r->change, &r->lock, &soon);
        if (r->round == round && atomic_load(exec->interrupt)) status = TE_ERROR_INTERRUPTED;
    }
    pthread_mutex_unlock(&r->lock);
    return status == TE_OK ? TE_OK : te_exec_fail(exec, status, "left off");
}

/* in and out of every rank are known; then all may be read until the second meeting. */
static te_status show(te_exec *exec, thread_peers *p, const void *in, void *out)
{
    p->room->in[p->peers.rank] = in;
    p->room->out[p->peers.rank] = out;
    return meet(exec, p->room);
}

static thread_peers *enter(room *r, int rank)
{
    thread_peers *p = calloc(1, sizeof *p);
    *p = (thread_peers){{rank, r->size, rank, r->size, false}, r};
    return p;
}

static te_status thread_join(te_exec *exec, const void *word, size_t bytes, te_peers **peers)
{
    pthread_mutex_lock(&joining->lock);
    if (bytes <= sizeof farewell) memcpy(farewell, word, farewell_bytes = bytes);
    int rank = joining->joined++;
    pthread_mutex_unlock(&joining->lock);
    *peers = &enter(joining, rank)->peers;
    return meet(exec, joining);
}

enum { NOT_TO_BE_MADE = 99 }; /* a key */

static te_status thread_split(te_exec *exec, te_peers *peers, int color, int key, te_peers **part)
{
    if (key == NOT_TO_BE_MADE) return te_exec_fail(exec, TE_ERROR_DEVICE, "split: no more");
    thread_peers *p = (thread_peers *)peers;
    room         *r = p->room;
    int           rank = 0, size = 0;
    r->color[peers->rank] = color;
    r->key[peers->rank] = key;
    *part = NULL;
    te_status status = meet(exec, r);
    for (int i = 0; i < r->size; i++) {
        bool before = r->key[i] < key || (r->key[i] == key && i < peers->rank);
        size += r->color[i] == color;
        rank += r->color[i] == color && before;
    }
    if (status == TE_OK && color >= 0 && rank == 0) r->parts[color] = new_room(size);
    if (status == TE_OK) status = meet(exec, r);
    if (status == TE_OK && color >= 0) *part = &enter(r->parts[color], rank)->peers;
    return status;
}

static void thread_leave(te_exec *exec, te_peers *peers)
{
    (void)exec;
    free(peers);
}

static te_status thread_broadcast(te_exec *exec, te_peers *peers, void *data, size_t bytes, int root)
{
    thread_peers *p = (thread_peers *)peers;
    te_status     status = show(exec, p, data, data);
    if (status == TE_OK && peers->rank != root) memcpy(data, p->room->in[root], bytes);
    return status == TE_OK ? meet(exec, p->room) : status;
}

static te_status thread_all_gather(te_exec *exec, te_peers *peers, const void *in, void *out, size_t bytes)
{
    thread_peers *p = (thread_peers *)peers;
    te_status     status = show(exec, p, in, out);
    for (int i = 0; i < peers->size && status == TE_OK; i++) {
        char *to = (char *)out + (size_t)i * bytes;
        if (to != p->room->in[i]) memcpy(to, p->room->in[i], bytes);
    }
    return status == TE_OK ? meet(exec, p->room) : status;
}

static te_status thread_all_to_all(te_exec *exec, te_peers *peers, const void *in, void *out, size_t bytes)
{
    thread_peers *p = (thread_peers *)peers;
    te_status     status = show(exec, p, in, out);
    for (int i = 0; i < peers->size && status == TE_OK; i++)
        memcpy((char *)out + (size_t)i * bytes, (const char *)p->room->in[i] + (size_t)peers->rank * bytes, bytes);
    return status == TE_OK ? meet(exec, p->room) : status;
}

static te_status thread_exchange(te_exec *exec, te_peers *peers, const void *out, int to, void *in, int from,
                                 size_t bytes)
{
    thread_peers *p = (thread_peers *)peers;
    te_status     status = show(exec, p, out, in);
    (void)to;
    if (status == TE_OK && from >= 0) memcpy(in, p->room->in[from], bytes);
    return status == TE_OK ? meet(exec, p->room) : status;
}

static const te_messenger messenger = {
    .layout = TE_MESSENGER_LAYOUT, .name = "threads", .join = thread_join, .split = thread_split,
    .leave = thread_leave, .broadcast = thread_broadcast, .all_gather = thread_all_gather,
    .all_to_all = thread_all_to_all, .exchange = thread_exchange,
};

/* --- groups of threads -------------------------------------------------------------------------------------------- */

typedef struct member {
    pthread_t  thread;
    void     (*run)(struct member *m);
    te_context *ctx;
    te_comm    *comm;
    int         rank, size;
    void       *calls_left; /* of a group that left a call off: they are still written to */
} member;

static pthread_mutex_t checking = PTHREAD_MUTEX_INITIALIZER;

/* CHECK counts without atomics. */
#define CHECK_RANK(condition, ...)                                                                                    \
    do {                                                                                                              \
        bool holds = condition;                                                                                       \
        pthread_mutex_lock(&checking);                                                                                \
        CHECK_MSG(holds, __VA_ARGS__);                                                                                \
        pthread_mutex_unlock(&checking);                                                                              \
    } while (0)

static void *run_member(void *arg)
{
    member *m = arg;
    m->ctx = te_context_open(&(te_context_options){.struct_size = sizeof(te_context_options), .threads = 1});
    m->comm = te_comm_join(m->ctx, &messenger);
    m->rank = te_comm_rank(m->comm);
    m->size = te_comm_size(m->comm);
    m->run(m);
    m->calls_left = m->comm && m->comm->left_off ? m->comm->calls : NULL;
    te_comm_release(m->comm);
    te_context_release(m->ctx);
    return NULL;
}

static void together(int size, void (*run)(member *m))
{
    member members[MAX_RANKS];
    room  *r = joining = new_room(size);
    for (int i = 0; i < size; i++) {
        members[i] = (member){.run = run};
        if (pthread_create(&members[i].thread, NULL, run_member, &members[i]) != 0) abort();
    }
    for (int i = 0; i < size; i++) pthread_join(members[i].thread, NULL);
    for (int i = 0; i < size; i++) {
        if (members[i].calls_left) memset(members[i].calls_left, 1, ((size_t)size + 1) * sizeof(te_comm_call));
        free(members[i].calls_left);
    }
    free_room(r);
}

/* --- values ------------------------------------------------------------------------------------------------------- */

/* Element i of what a rank has: the same for whoever asks. Integers, where the dtype has nothing else. */
static double value(te_dtype dtype, int rank, int64_t i)
{
    uint64_t state = (uint64_t)i * 0x9e3779b97f4a7c15u + (uint64_t)rank * 0x123456789abcdefu + 88172645463325252u;
    test_random(&state);
    if (dtype == TE_BOOL) return test_random(&state) & 1;
    if (dtype == TE_U8) return test_random(&state) & 31;
    if (dtype == TE_I32 || dtype == TE_I64) return (double)(test_random(&state) % 2000001) - 1000000;
    return test_uniform(&state, -3, 3);
}

static void put(void *to, te_dtype dtype, int64_t i, double v)
{
    switch (dtype) {
    case TE_F64: ((double *)to)[i] = v; break;
    case TE_F32: ((float *)to)[i] = (float)v; break;
    case TE_BF16: ((uint16_t *)to)[i] = te_f32_to_bf16((float)v); break;
    case TE_F16: ((uint16_t *)to)[i] = te_f32_to_f16((float)v); break;
    case TE_I64: ((int64_t *)to)[i] = (int64_t)v; break;
    case TE_I32: ((int32_t *)to)[i] = (int32_t)v; break;
    default: ((uint8_t *)to)[i] = (uint8_t)(int)v; break; /* also the bits of fp8 */
    }
}

static double take(const void *from, te_dtype dtype, int64_t i)
{
    switch (dtype) {
    case TE_F64: return ((const double *)from)[i];
    case TE_F32: return (double)((const float *)from)[i];
    case TE_BF16: return (double)te_bf16_to_f32(((const uint16_t *)from)[i]);
    case TE_F16: return (double)te_f16_to_f32(((const uint16_t *)from)[i]);
    case TE_I64: return (double)((const int64_t *)from)[i];
    case TE_I32: return ((const int32_t *)from)[i];
    default: return ((const uint8_t *)from)[i];
    }
}

/* As the tensor of that dtype has it. */
static double rounded(te_dtype dtype, int rank, int64_t i)
{
    double x;
    put(&x, dtype, 0, value(dtype, rank, i));
    return take(&x, dtype, 0);
}

static double reduced(te_dtype dtype, te_reduction reduction, int size, int64_t i)
{
    double sum = rounded(dtype, 0, i);
    for (int rank = 1; rank < size; rank++) {
        double x = rounded(dtype, rank, i);
        if (reduction == TE_REDUCE_MAX) sum = x > sum ? x : sum;
        else if (reduction == TE_REDUCE_MIN) sum = x < sum ? x : sum;
        else sum = dtype == TE_F64 ? sum + x : (double)(float)((float)sum + (float)x);
    }
    if (reduction != TE_REDUCE_AVERAGE) return sum;
    return dtype == TE_F64 ? sum / size : (double)((float)sum / (float)size);
}

static te_tensor *filled(const member *m, te_dtype dtype, int ndim, const int64_t *shape)
{
    te_tensor *t = te_tensor_empty(m->ctx, dtype, ndim, shape);
    int64_t    n = te_tensor_numel(t);
    for (int64_t i = 0; i < n; i++) put(te_tensor_data(t), dtype, i, value(dtype, m->rank, i));
    return t;
}

/* The elements of t are those that reduced says from `first` on. */
static void check_reduced(const member *m, te_tensor *t, te_reduction reduction, int64_t first, const char *what)
{
    int64_t  n = te_tensor_numel(t), wrong = -1;
    te_dtype dtype = te_tensor_dtype(t);
    double   want, is;
    for (int64_t i = 0; i < n && wrong < 0; i++) {
        want = 0;
        put(&want, dtype, 0, reduced(dtype, reduction, m->size, first + i));
        is = 0;
        memcpy(&is, (char *)te_tensor_data(t) + (size_t)i * te_dtype_size(dtype), te_dtype_size(dtype));
        if (memcmp(&want, &is, sizeof is) != 0) wrong = i;
    }
    CHECK_RANK(t && wrong < 0, "%s of %s, reduction %d, rank %d of %d: element %ld of %ld: %s", what,
               te_dtype_name(dtype), (int)reduction, m->rank, m->size, (long)wrong, (long)n, te_context_error(m->ctx));
}

/* --- sums --------------------------------------------------------------------------------------------------------- */

static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F16, TE_F64, TE_I64, TE_I32, TE_U8, TE_BOOL};
enum { N_DTYPES = sizeof dtypes / sizeof *dtypes };

static bool has_reduction(te_dtype dtype, te_reduction reduction)
{
    if (dtype == TE_BOOL) return reduction >= TE_REDUCE_MAX;
    return te_dtype_is_float(dtype) || reduction != TE_REDUCE_AVERAGE;
}

static void one_sum(const member *m, te_dtype dtype, te_reduction reduction, int64_t n)
{
    int64_t    rows = n * m->size;
    te_tensor *x = filled(m, dtype, 1, &n), *sum = te_comm_all_reduce(m->comm, x, reduction);
    check_reduced(m, sum, reduction, 0, "all_reduce");
    te_tensor_release(sum);
    CHECK_RANK(te_comm_all_reduce_in_place(m->comm, x, reduction) == TE_OK, "%s", te_context_error(m->ctx));
    check_reduced(m, x, reduction, 0, "all_reduce in place");
    te_tensor_release(x);
    x = filled(m, dtype, 1, &rows);
    sum = te_comm_reduce_scatter(m->comm, x, reduction);
    check_reduced(m, sum, reduction, n * m->rank, "reduce_scatter");
    te_tensor_release(sum);
    te_tensor_release(x);
}

static void sums(member *m)
{
    static const int64_t sizes[] = {0, 1, 3, 255, 256, 257, 1023, 5000};
    for (int d = 0; d < N_DTYPES; d++)
        for (int reduction = TE_REDUCE_SUM; reduction <= TE_REDUCE_MIN; reduction++)
            for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
                if (has_reduction(dtypes[d], (te_reduction)reduction))
                    one_sum(m, dtypes[d], (te_reduction)reduction, sizes[s]);
}

/* In several pieces, with a remainder: 4 MB are on their way at a time. */
static void large_sums(member *m) { one_sum(m, TE_F32, TE_REDUCE_SUM, (1 << 20) + (1 << 19) + 7); }

/* Bit by bit the same everywhere follows from the sums being exact; NaN and what is not contiguous are left. */
static void special_sums(member *m)
{
    float      numbers[3] = {1, m->rank == m->size - 1 ? NAN : 2, m->rank == 0 ? NAN : 3}, got[3];
    te_tensor *x = te_tensor_from_data(m->ctx, numbers, TE_F32, 1, (int64_t[]){3}, NULL, NULL);
    for (int reduction = TE_REDUCE_MAX; reduction <= TE_REDUCE_MIN; reduction++) {
        te_tensor *y = te_comm_all_reduce(m->comm, x, (te_reduction)reduction);
        CHECK_RANK(te_tensor_read(y, TE_F32, got) == TE_OK && got[0] == 1 && isnan(got[1]) && isnan(got[2]),
                   "NaN in %d, rank %d of %d", reduction, m->rank, m->size);
        te_tensor_release(y);
    }
    te_tensor_release(x);

    te_tensor *whole = filled(m, TE_F32, 2, (int64_t[]){6, 4});
    te_tensor *turned = te_tensor_alias(whole, 2, (int64_t[]){4, 6}, (int64_t[]){1, 4}, 0);
    te_tensor *sum = te_comm_all_reduce(m->comm, turned, TE_REDUCE_SUM);
    float      apart[24], there[24];
    CHECK_RANK(te_comm_all_reduce_in_place(m->comm, turned, TE_REDUCE_SUM) == TE_OK, "%s", te_context_error(m->ctx));
    check_reduced(m, whole, TE_REDUCE_SUM, 0, "what is not contiguous");
    CHECK_RANK(te_tensor_read(sum, TE_F32, apart) == TE_OK && te_tensor_read(turned, TE_F32, there) == TE_OK &&
                   memcmp(apart, there, sizeof there) == 0,
               "what is not contiguous, apart");
    te_tensor_release(sum);
    te_tensor_release(turned);
    te_tensor_release(whole);

    te_tensor *one = te_tensor_full(m->ctx, TE_F32, 0, NULL, m->rank + 1);
    CHECK_RANK(te_comm_all_reduce_in_place(m->comm, one, TE_REDUCE_AVERAGE) == TE_OK &&
                   te_tensor_read(one, TE_F32, got) == TE_OK && got[0] == (float)(m->size + 1) / 2,
               "a scalar's average");
    te_tensor_release(one);
}

/* --- what is only moved ------------------------------------------------------------------------------------------- */

static void check_moved(const member *m, te_tensor *t, int64_t at, int64_t n, int rank, int64_t first, const char *what)
{
    te_dtype dtype = te_tensor_dtype(t);
    bool     same = t != NULL;
    for (int64_t i = 0; i < n && same; i++)
        same = take(te_tensor_data(t), dtype, at + i) == rounded(dtype, rank, first + i);
    CHECK_RANK(same, "%s of %s: what came from rank %d to rank %d of %d", what, te_dtype_name(dtype), rank, m->rank,
               m->size);
}

static void moves_of(const member *m, te_dtype dtype, int64_t n)
{
    int64_t    rows[2] = {n * m->size, 3}, all = 3 * rows[0], next = (m->rank + 1) % m->size;
    int        before = (m->rank + m->size - 1) % m->size;
    te_tensor *x = filled(m, dtype, 2, rows);
    te_tensor *gathered = te_comm_all_gather(m->comm, x), *swapped = te_comm_all_to_all(m->comm, x);
    te_tensor *came = te_comm_exchange(m->comm, x, (int)next, before);
    for (int r = 0; r < m->size; r++) {
        check_moved(m, gathered, r * all, all, r, 0, "all_gather");
        check_moved(m, swapped, r * 3 * n, 3 * n, r, m->rank * 3 * n, "all_to_all");
    }
    check_moved(m, came, 0, all, before, 0, "exchange");
    te_tensor_release(came);
    bool last = m->rank == m->size - 1;
    came = te_comm_exchange(m->comm, x, last ? -1 : (int)next, m->rank == 0 ? -1 : before);
    if (m->rank > 0) check_moved(m, came, 0, all, before, 0, "exchange along a line");
    else CHECK_RANK(came && (all == 0 || take(te_tensor_data(came), dtype, all - 1) == 0), "nobody's zeros");
    CHECK_RANK(te_comm_broadcast(m->comm, x, m->size - 1) == TE_OK, "%s", te_context_error(m->ctx));
    check_moved(m, x, 0, all, m->size - 1, 0, "broadcast");
    te_tensor_release(came);
    te_tensor_release(swapped);
    te_tensor_release(gathered);
    te_tensor_release(x);
}

static void moves(member *m)
{
    for (int d = 0; d < TE_DTYPE_COUNT; d++)
        for (int64_t n = 0; n < 100; n = 7 * n + 1) moves_of(m, (te_dtype)d, n);
}

static void splits(member *m)
{
    te_comm *odd = te_comm_split(m->comm, m->rank % 2, -m->rank);
    int      mates = (m->size + 1 - m->rank % 2) / 2;
    CHECK_RANK(te_comm_size(odd) == mates && te_comm_rank(odd) == mates - 1 - m->rank / 2, "split: rank %d is %d of %d",
               m->rank, te_comm_rank(odd), te_comm_size(odd));
    te_tensor *one = te_tensor_full(m->ctx, TE_I32, 0, NULL, 1);
    int32_t    sum = 0;
    CHECK_RANK(te_comm_all_reduce_in_place(odd, one, TE_REDUCE_SUM) == TE_OK &&
                   te_tensor_read(one, TE_I32, &sum) == TE_OK && sum == mates,
               "a sum of a part: %d", (int)sum);
    te_tensor_release(one);
    te_comm *rest = te_comm_split(m->comm, m->rank == 0 ? -1 : 2, 0);
    CHECK_RANK((rest == NULL) == (m->rank == 0), "who is in no group");
    CHECK_RANK(te_comm_barrier(m->comm) == TE_OK, "%s", te_context_error(m->ctx));
    te_comm_release(rest);
    te_comm_release(odd);
}

/* --- failures ----------------------------------------------------------------------------------------------------- */

static void check_message(const member *m, const char *part)
{
    CHECK_RANK(strstr(te_context_error(m->ctx), part), "rank %d: \"%s\" says nothing of \"%s\"", m->rank,
               te_context_error(m->ctx), part);
}

/* Every rank has an error for each of these, and the group goes on. */
static void differences(member *m)
{
    bool       last = m->rank == m->size - 1;
    int64_t    n = last ? 4 : 3;
    te_tensor *x = filled(m, TE_F32, 1, &n), *y = filled(m, TE_I32, 1, (int64_t[]){3});
    CHECK_RANK(!te_comm_all_reduce(m->comm, x, TE_REDUCE_SUM), "shapes differ");
    check_message(m, "calls all_reduce of float32 {4} (sum), rank 0 all_reduce of float32 {3} (sum)");
    CHECK_RANK(!te_comm_all_reduce(m->comm, y, last ? TE_REDUCE_MAX : TE_REDUCE_MIN), "reductions differ");
    check_message(m, "(max), rank 0 all_reduce of int32 {3} (min)");
    CHECK_RANK(!(last ? te_comm_all_gather(m->comm, y) : te_comm_all_reduce(m->comm, y, TE_REDUCE_SUM)), "functions");
    check_message(m, "calls all_gather of int32 {3}, rank 0 all_reduce");
    CHECK_RANK((last ? te_comm_barrier(m->comm) : te_comm_broadcast(m->comm, y, 0)) != TE_OK, "functions differ");
    check_message(m, "calls barrier, rank 0 broadcast of int32 {3} from rank 0");
    CHECK_RANK(!te_comm_exchange(m->comm, y, last ? -1 : m->rank, m->rank), "one sends to nobody");
    check_message(m, "expects rank");
    CHECK_RANK(!te_comm_all_reduce(m->comm, y, last ? TE_REDUCE_AVERAGE : TE_REDUCE_SUM), "one cannot");
    check_message(m, last ? "average of int32" : "whose message says why");
    CHECK_RANK(te_comm_broadcast(m->comm, last ? NULL : y, 0) == TE_ERROR_ARGUMENT, "one has nothing");
    CHECK_RANK(te_comm_broadcast(m->comm, y, m->size) == TE_ERROR_ARGUMENT, "a rank too many");
    check_message(m, "root is");
    CHECK_RANK(te_comm_barrier(m->comm) == TE_OK, "goes on: %s", te_context_error(m->ctx));
    te_tensor_release(x);
    te_tensor_release(y);
}

/* The last rank never comes; the others are told to wait no longer. */
static void interrupts(member *m)
{
    te_tensor *x = filled(m, TE_F32, 1, (int64_t[]){3});
    if (m->rank < m->size - 1) {
        te_context_interrupt(m->ctx);
        CHECK_RANK(!te_comm_all_gather(m->comm, x) && m->ctx->status == TE_ERROR_INTERRUPTED, "left off");
        check_message(m, "te.distributed: all_gather: interrupted");
        te_context_clear_interrupt(m->ctx);
        CHECK_RANK(te_comm_barrier(m->comm) == TE_ERROR_DEVICE, "of no use");
        check_message(m, "an earlier call of this group was left off");
    }
    te_tensor_release(x);
}

static te_context *waiting;
static te_tensor  *tensor_left; /* what is still written to when nobody has the group any more */

/* The last rank agrees on a call and is not seen again; the other one leaves it off, half-way. */
static void leaves_off(member *m)
{
    te_comm_call own = {.function = TE_COMM_BROADCAST, .dtype = TE_F32, .root = 1, .ndim = 1, .shape = {3}};
    if (m->rank == 1) {
        CHECK_RANK(te_comm_agree(m->comm, &own) == TE_OK, "%s", te_context_error(m->ctx));
        te_context_interrupt(waiting);
        return;
    }
    te_tensor *x = tensor_left = filled(m, TE_F32, 1, own.shape);
    waiting = m->ctx;
    CHECK_RANK(te_comm_broadcast(m->comm, x, 1) == TE_ERROR_INTERRUPTED, "%s", te_context_error(m->ctx));
    te_tensor_release(x);
}

static void test_left_off(void)
{
    together(2, leaves_off);
    memset(te_tensor_data(tensor_left), 1, 3 * sizeof(float));
    te_tensor_release(tensor_left); /* and with it goes the context */
}

/* The last rank says farewell, as a process does that ends; the others wait neither for this call nor for the next. */
static void ends(member *m)
{
    unsigned char all[MAX_RANKS * sizeof farewell];
    int           last = m->size - 1;
    char          text[64];
    if (m->rank == last) {
        messenger.all_gather(&m->comm->exec, m->comm->peers, farewell, all, farewell_bytes);
        return;
    }
    te_tensor *x = filled(m, TE_F32, 1, (int64_t[]){3});
    snprintf(text, sizeof text, "te.distributed: all_gather: rank %d has ended", last);
    for (int i = 0; i < 2; i++) {
        CHECK_RANK(!te_comm_all_gather(m->comm, x), "nobody is there");
        check_message(m, text);
    }
    CHECK_RANK(!te_comm_split(m->comm, 0, 0) && te_comm_decline_split(m->comm) != TE_OK && m->comm->peers->over,
               "of no use");
    te_tensor_release(x);
}

/* Who cannot split says so. */
static void declines(member *m)
{
    bool last = m->rank == m->size - 1;
    if (last) CHECK_RANK(te_comm_decline_split(m->comm) == TE_ERROR_ARGUMENT, "it fails");
    else CHECK_RANK(!te_comm_split(m->comm, 0, 0), "nobody splits");
    if (!last) check_message(m, "te.distributed: split: the call failed on rank");
    CHECK_RANK(!te_comm_split(m->comm, 0, NOT_TO_BE_MADE), "there are no more");
    check_message(m, "te.distributed: split: no more");
    CHECK_RANK(te_comm_barrier(m->comm) == TE_OK, "goes on: %s", te_context_error(m->ctx));
}

static void refusals(member *m)
{
    te_tensor *x = filled(m, TE_F32, 1, (int64_t[]){m->size});
    te_tensor *eight = te_tensor_empty(m->ctx, TE_F8E4M3, 1, (int64_t[]){m->size});
    te_tensor *odd = filled(m, TE_F32, 1, (int64_t[]){m->size + 1}), *zero = te_tensor_full(m->ctx, TE_F32, 0, NULL, 1);
    CHECK_RANK(!te_comm_all_reduce(m->comm, eight, TE_REDUCE_SUM) && m->ctx->status == TE_ERROR_UNSUPPORTED, "fp8");
    CHECK_RANK(m->size == 1 || !te_comm_reduce_scatter(m->comm, odd, TE_REDUCE_SUM), "not to be split");
    CHECK_RANK(!te_comm_all_gather(m->comm, zero), "no rows");
    te_tensor_set_requires_grad(x, true);
    CHECK_RANK(!te_comm_all_reduce(m->comm, x, TE_REDUCE_SUM), "a gradient");
    check_message(m, "AllReduce");
    CHECK_RANK(te_comm_broadcast(m->comm, x, 0) == TE_OK, "a leaf may be written over");
    te_tensor_release(zero);
    te_tensor_release(odd);
    te_tensor_release(eight);
    te_tensor_release(x);
}

/* --- alone -------------------------------------------------------------------------------------------------------- */

static bool call_alone(te_context *ctx)
{
    te_comm   *world = te_comm_world(ctx);
    te_comm   *part = world ? te_comm_split(world, 0, 0) : NULL;
    te_tensor *x = te_tensor_full(ctx, TE_F32, 1, (int64_t[]){4}, 2);
    te_tensor *y = part && x ? te_comm_reduce_scatter(part, x, TE_REDUCE_SUM) : NULL;
    te_tensor *none = y ? te_comm_exchange(world, x, -1, -1) : NULL;
    bool       done = none && te_comm_size(part) == 1 && *(float *)te_tensor_data(none) == 0 &&
                *(float *)te_tensor_data(y) == 2;
    te_tensor_release(none);
    te_tensor_release(y);
    te_tensor_release(x);
    te_comm_release(part);
    te_comm_release(world);
    return done;
}

/* Every allocation of a group of one fails in turn. */
static void test_memory(void)
{
    bool done = false;
    for (long n = 0; n < 1000 && !done; n++) {
        failing_memory     memory;
        te_context        *ctx = failing_context_open(&memory, 1);
        memory.countdown = n;
        done = call_alone(ctx);
        CHECK_MSG(done || ctx->status == TE_ERROR_MEMORY, "allocation %ld: %s", n, te_context_error(ctx));
        memory.countdown = -1;
        CHECK(call_alone(ctx));
        failing_context_close(ctx, &memory, n);
    }
    CHECK(done);
}

int main(void)
{
    static const int sizes[] = {1, 2, 3, 5};
    for (int i = 0; i < 4; i++) {
        together(sizes[i], sums);
        together(sizes[i], special_sums);
        together(sizes[i], moves);
        together(sizes[i], splits);
        together(sizes[i], refusals);
        if (sizes[i] > 1) together(sizes[i], differences);
        if (sizes[i] > 1) together(sizes[i], declines);
        if (sizes[i] > 1) together(sizes[i], ends);
    }
    together(2, large_sums);
    together(3, large_sums);
    together(2, interrupts);
    test_left_off();
    CHECK(te_comm_launched() || te_comm_size(NULL) == 1);
    test_memory();
    return TEST_END();
}
