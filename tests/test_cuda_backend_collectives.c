/* test_cuda_backend_collectives.c - groups of devices over NCCL, on the made-up machine: each process is a child of
 * this one, forked before anything is opened. With --card, on a real one, what one process can show.
 */
#include "cuda_backend.h"

#include "core/graph.h"
#include "kernels/collectives.h"

#include <signal.h>
#include <sys/wait.h>

enum { MAX_RANKS = 3, SECONDS = 120 };

typedef struct place {
    int              rank, size;
    int              id_pipes[MAX_RANKS][2];
    te_context      *ctx;
    te_exec         *exec;
    te_device_peers *peers;
} place;

static bool on_card;

static const te_collectives *table(const place *p) { return p->exec->backend->collectives; }

/* --- processes ---------------------------------------------------------------------------------------------------- */

typedef void scenario(place *p);

static te_status connect_group(place *p)
{
    unsigned char id[256] = {0};
    size_t        bytes = table(p)->id_bytes;
    te_status     status = TE_OK;
    CHECK(bytes <= sizeof id);
    if (p->rank == 0) {
        status = table(p)->make_id(p->exec, id);
        for (int r = 1; r < p->size; r++) CHECK(write(p->id_pipes[r][1], id, bytes) == (ssize_t)bytes);
    } else {
        CHECK(read(p->id_pipes[p->rank][0], id, bytes) == (ssize_t)bytes);
    }
    return status == TE_OK ? table(p)->connect(p->exec, id, p->rank, p->size, &p->peers) : status;
}

static void be_rank(place *p, scenario *run)
{
    alarm(SECONDS);
    if (!on_card) fake_find();
    p->ctx = te_context_open(NULL);
    te_device *device = te_context_device(p->ctx, "cuda");
    CHECK_MSG(device, "%s", te_context_error(p->ctx));
    if (device) {
        p->exec = &device->exec;
        run(p);
        if (p->peers) table(p)->disconnect(p->exec, p->peers);
    }
    te_context_release(p->ctx);
    if (!on_card) {
        CHECK_MSG(fake.live() == 0, "%d things of the fake machine were not given back", fake.live());
        CHECK_MSG(fake.faults() == 0, "%d bytes of device memory beside an allocation were touched", fake.faults());
    }
    fflush(stderr);
    _exit(test_failures != 0);
}

static void with_ranks(int size, scenario *run, const char *what)
{
    place p = {.size = size};
    pid_t children[MAX_RANKS];
    for (int r = 0; r < size; r++) CHECK(pipe(p.id_pipes[r]) == 0);
    for (p.rank = 0; p.rank < size; p.rank++) {
        children[p.rank] = fork();
        if (children[p.rank] == 0) be_rank(&p, run);
    }
    for (int r = 0; r < size; r++) {
        int state = -1;
        CHECK(waitpid(children[r], &state, 0) == children[r]);
        CHECK_MSG(state == 0, "%s: rank %d of %d ended with %d", what, r, size, state);
        close(p.id_pipes[r][0]);
        close(p.id_pipes[r][1]);
    }
}

/* --- tensors ------------------------------------------------------------------------------------------------------ */

/* Small numbers that say whose they are: exact in every dtype, and so are their sums. */
static double number(int rank, int64_t i) { return (double)((i * 5 + rank * 3) % 8); }

static te_tensor *empty(place *p, te_dtype dtype, int64_t n)
{
    return te_tensor_new(p->ctx, te_context_device(p->ctx, "cuda"), dtype, 1, &n);
}

static te_tensor *numbers(place *p, te_dtype dtype, int64_t n)
{
    te_tensor *t = empty(p, dtype, n);
    double    *values = malloc(((size_t)n + 1) * sizeof *values);
    for (int64_t i = 0; i < n; i++) values[i] = number(p->rank, i);
    CHECK_MSG(te_tensor_write(t, TE_F64, values) == TE_OK, "%s", te_context_error(p->ctx));
    free(values);
    return t;
}

static double expected(const place *p, te_reduction reduction, int64_t i)
{
    double sum = number(0, i);
    for (int r = 1; r < p->size; r++) {
        double x = number(r, i);
        sum = reduction == TE_REDUCE_MAX ? fmax(sum, x) : reduction == TE_REDUCE_MIN ? fmin(sum, x) : sum + x;
    }
    return reduction == TE_REDUCE_AVERAGE ? sum / p->size : sum;
}

/* Against expect(p, i, about) at i; averages of three are rounded. */
static void compare(place *p, te_tensor *t, double (*expect)(const place *, int64_t, int64_t), int64_t about,
                    const char *what)
{
    int64_t n = te_tensor_numel(t), wrong = 0;
    double *values = malloc(((size_t)n + 1) * sizeof *values);
    CHECK_MSG(te_tensor_read(t, TE_F64, values) == TE_OK, "%s: %s", what, te_context_error(p->ctx));
    for (int64_t i = 0; i < n; i++) {
        double e = expect(p, i, about);
        wrong += !(fabs(values[i] - e) <= (t->dtype == TE_BF16 ? 0.01 : t->dtype == TE_F16 ? 1e-3 : 1e-6) * fabs(e));
    }
    CHECK_MSG(wrong == 0, "%s of %lld %s: %lld wrong", what, (long long)n, te_dtype_name(t->dtype), (long long)wrong);
    free(values);
}

static double reduced(const place *p, int64_t i, int64_t reduction) { return expected(p, (te_reduction)reduction, i); }
static double own_share(const place *p, int64_t i, int64_t n) { return expected(p, TE_REDUCE_SUM, p->rank * n + i); }
static double gathered(const place *p, int64_t i, int64_t n) { return (void)p, number((int)(i / n), i % n); }
static double from_rank(const place *p, int64_t i, int64_t rank) { return (void)p, number((int)rank, i); }
static double all_parts(const place *p, int64_t i, int64_t n) { return number((int)(i / n), p->rank * n + i % n); }

#define OK(call) CHECK_MSG((call) == TE_OK, "%s", p->exec->message)

/* --- scenarios ---------------------------------------------------------------------------------------------------- */

static void check_sums(place *p, te_dtype dtype, int64_t n)
{
    bool has_average = dtype <= TE_F64;
    for (int op = TE_REDUCE_SUM; op <= TE_REDUCE_MIN; op++) {
        if (op == TE_REDUCE_AVERAGE && !has_average) continue;
        te_tensor *x = numbers(p, dtype, n), *y = empty(p, dtype, n);
        OK(table(p)->all_reduce(p->exec, p->peers, te_tensor_pointer(x), te_tensor_pointer(y), n, dtype,
                                (te_reduction)op));
        OK(table(p)->all_reduce(p->exec, p->peers, te_tensor_pointer(x), te_tensor_pointer(x), n, dtype,
                                (te_reduction)op));
        compare(p, y, reduced, op, "all_reduce");
        compare(p, x, reduced, op, "all_reduce in place");
        te_tensor_release(x);
        te_tensor_release(y);
    }
    te_tensor *x = numbers(p, dtype, n * p->size), *y = empty(p, dtype, n);
    OK(table(p)->reduce_scatter(p->exec, p->peers, te_tensor_pointer(x), te_tensor_pointer(y), n, dtype,
                                TE_REDUCE_SUM));
    compare(p, y, own_share, n, "reduce_scatter");
    te_tensor_release(x);
    te_tensor_release(y);
}

static void check_moves(place *p, te_dtype dtype, int64_t n)
{
    te_tensor *x = numbers(p, dtype, n), *all = empty(p, dtype, n * p->size), *parts = numbers(p, dtype, n * p->size);
    te_tensor *received = empty(p, dtype, n), *turned = empty(p, dtype, n * p->size);
    int        to = (p->rank + 1) % p->size, from = (p->rank + p->size - 1) % p->size;
    OK(table(p)->all_gather(p->exec, p->peers, te_tensor_pointer(x), te_tensor_pointer(all), n, dtype));
    OK(table(p)->all_to_all(p->exec, p->peers, te_tensor_pointer(parts), te_tensor_pointer(turned), n, dtype));
    OK(table(p)->exchange(p->exec, p->peers, te_tensor_pointer(x), to, te_tensor_pointer(received), from, n, dtype));
    compare(p, all, gathered, n, "all_gather");
    compare(p, turned, all_parts, n, "all_to_all");
    compare(p, received, from_rank, from, "exchange");
    /* a line: the first receives from none, the last sends to none */
    OK(table(p)->exchange(p->exec, p->peers, te_tensor_pointer(x), to ? to : -1, te_tensor_pointer(received),
                          p->rank ? from : -1, n, dtype));
    compare(p, received, from_rank, from, "exchange along a line");
    OK(table(p)->broadcast(p->exec, p->peers, te_tensor_pointer(x), n, dtype, p->size - 1));
    compare(p, x, from_rank, p->size - 1, "broadcast");
    te_tensor_release(x);
    te_tensor_release(all);
    te_tensor_release(parts);
    te_tensor_release(received);
    te_tensor_release(turned);
}

static void every_function(place *p)
{
    static const te_dtype added[] = {TE_F32, TE_BF16, TE_F16, TE_F64, TE_I64, TE_I32, TE_U8};
    OK(connect_group(p));
    if (!p->peers) return;
    for (size_t i = 0; i < sizeof added / sizeof *added; i++) check_sums(p, added[i], 37);
    for (int dtype = 0; dtype < TE_DTYPE_COUNT; dtype++)
        if (dtype != TE_BOOL) check_moves(p, (te_dtype)dtype, dtype == TE_F32 ? 100003 : 13);
    check_sums(p, TE_F32, 1);
    OK(table(p)->all_reduce(p->exec, p->peers, NULL, NULL, 0, TE_F32, TE_REDUCE_SUM));
    OK(table(p)->all_to_all(p->exec, p->peers, NULL, NULL, 0, TE_F32));
    /* own places */
    te_tensor *all = empty(p, TE_F32, 5 * p->size), *parts = numbers(p, TE_F32, 5 * p->size);
    te_tensor *x = numbers(p, TE_F32, 5);
    float     *place_in_all = (float *)te_tensor_pointer(all) + 5 * p->rank;
    OK(p->exec->backend->memory_copy(p->exec, place_in_all, te_tensor_pointer(x), 20, TE_COPY_DEVICE_TO_DEVICE));
    OK(table(p)->all_gather(p->exec, p->peers, place_in_all, te_tensor_pointer(all), 5, TE_F32));
    compare(p, all, gathered, 5, "all_gather in place");
    float *own = (float *)te_tensor_pointer(parts) + 5 * p->rank;
    OK(table(p)->reduce_scatter(p->exec, p->peers, te_tensor_pointer(parts), own, 5, TE_F32, TE_REDUCE_SUM));
    OK(p->exec->backend->memory_copy(p->exec, te_tensor_pointer(x), own, 20, TE_COPY_DEVICE_TO_DEVICE));
    compare(p, x, own_share, 5, "reduce_scatter in place");
    te_tensor_release(all);
    te_tensor_release(x);
    te_tensor_release(parts);
}

static void refusals(place *p)
{
    OK(connect_group(p));
    if (!p->peers) return;
    te_tensor *x = numbers(p, TE_F32, 4);
    void      *data = te_tensor_pointer(x);
    CHECK(table(p)->all_reduce(p->exec, p->peers, data, data, 4, TE_F8E4M3, TE_REDUCE_SUM) == TE_ERROR_UNSUPPORTED);
    CHECK_MSG(strstr(p->exec->message, "all_reduce"), "%s", p->exec->message);
    CHECK(table(p)->all_reduce(p->exec, p->peers, data, data, 4, TE_I32, TE_REDUCE_AVERAGE) == TE_ERROR_UNSUPPORTED);
    OK(table(p)->all_reduce(p->exec, p->peers, data, data, 4, TE_F32, TE_REDUCE_SUM));
    compare(p, x, reduced, TE_REDUCE_SUM, "after what was refused");
    te_tensor_release(x);
}

/* Recorded once, launched three times on what lies there then; the graph outlives the group's own reference. */
static void recorded(place *p)
{
    te_graph  *graph = NULL;
    te_device *cuda = te_context_device(p->ctx, "cuda");
    te_tensor *x = empty(p, TE_F32, 9), *y = empty(p, TE_F32, 9);
    unsigned char    id[256];
    te_device_peers *none = NULL;
    OK(connect_group(p));
    if (!p->peers) return;
    CHECK(te_graph_begin(p->ctx, cuda, &graph) == TE_OK);
    CHECK(table(p)->make_id(p->exec, id) == TE_ERROR_UNSUPPORTED);
    CHECK(table(p)->connect(p->exec, id, 0, 1, &none) == TE_ERROR_UNSUPPORTED && !none);
    CHECK_MSG(strstr(p->exec->message, "cannot be part of a graph"), "%s", p->exec->message);
    OK(table(p)->all_reduce(p->exec, p->peers, te_tensor_pointer(x), te_tensor_pointer(y), 9, TE_F32, TE_REDUCE_SUM));
    CHECK_MSG(te_graph_end(graph, true) == TE_OK, "%s", te_context_error(p->ctx));
    table(p)->disconnect(p->exec, p->peers);
    p->peers = NULL;
    for (int i = 0; i < 3; i++) {
        double values[9], sums[9];
        for (int k = 0; k < 9; k++) values[k] = i + k + p->rank;
        CHECK(te_tensor_write(x, TE_F64, values) == TE_OK && te_graph_launch(graph) == TE_OK);
        CHECK_MSG(te_tensor_read(y, TE_F64, sums) == TE_OK, "%s", te_context_error(p->ctx));
        for (int k = 0; k < 9; k++)
            CHECK_MSG(sums[k] == p->size * (i + k) + p->size * (p->size - 1) / 2, "launch %d: %g", i, sums[k]);
    }
    te_graph_release(graph);
    te_tensor_release(x);
    te_tensor_release(y);
}

/* The last rank goes without a word: the others hear of it where they wait, and can go on alone. */
static void left_alone(place *p)
{
    te_tensor *x = numbers(p, TE_F32, 4);
    double     values[4];
    OK(connect_group(p));
    if (p->rank == p->size - 1) _exit(test_failures != 0);
    if (!p->peers) return;
    void     *data = te_tensor_pointer(x);
    te_status status = table(p)->all_reduce(p->exec, p->peers, data, data, 4, TE_F32, TE_REDUCE_SUM);
    if (status == TE_OK) status = p->exec->backend->synchronize(p->exec);
    CHECK(status == TE_ERROR_DEVICE);
    CHECK_MSG(strstr(p->exec->message, "remote process exited"), "%s", p->exec->message);
    CHECK(table(p)->all_reduce(p->exec, p->peers, data, data, 4, TE_F32, TE_REDUCE_SUM) == TE_ERROR_DEVICE);
    CHECK_MSG(strstr(p->exec->message, "failed before"), "%s", p->exec->message);
    CHECK(te_tensor_read(x, TE_F64, values) == TE_OK);
    te_tensor_release(x);
}

/* Likewise while recorded graphs hold collectives: what is left of the group goes, and the graphs say why. */
static void left_with_graphs(place *p)
{
    te_device *cuda = te_context_device(p->ctx, "cuda");
    te_tensor *x = numbers(p, TE_F32, 4);
    void      *data = te_tensor_pointer(x);
    te_graph  *graphs[2] = {NULL, NULL};
    double     values[4];
    OK(connect_group(p));
    if (!p->peers) return;
    for (int i = 0; i < 2; i++) {
        CHECK(te_graph_begin(p->ctx, cuda, &graphs[i]) == TE_OK);
        OK(table(p)->all_reduce(p->exec, p->peers, data, data, 4, TE_F32, TE_REDUCE_MAX));
        CHECK_MSG(te_graph_end(graphs[i], true) == TE_OK, "%s", te_context_error(p->ctx));
    }
    CHECK(te_graph_launch(graphs[0]) == TE_OK && te_tensor_read(x, TE_F64, values) == TE_OK);
    if (p->rank == p->size - 1) _exit(test_failures != 0);
    te_status status = te_graph_launch(graphs[0]);
    if (status == TE_OK) status = te_tensor_read(x, TE_F64, values);
    CHECK(status == TE_ERROR_DEVICE);
    for (int i = 0; i < 2; i++) {
        CHECK(te_graph_launch(graphs[i]) == TE_ERROR_DEVICE);
        CHECK_MSG(strstr(te_context_error(p->ctx), "launching a graph: the group has failed before"), "%s",
                  te_context_error(p->ctx));
    }
    CHECK(te_tensor_read(x, TE_F64, values) == TE_OK);
    for (int i = 0; i < 2; i++) te_graph_release(graphs[i]);
    te_tensor_release(x);
}

/* A group that fails while it is recorded, at its first collective or at a later one: the graph does not come to be,
 * and neither do later calls. */
static void fails_while_recorded(place *p)
{
    te_device *cuda = te_context_device(p->ctx, "cuda");
    te_tensor *x = numbers(p, TE_F32, 4);
    void      *data = te_tensor_pointer(x);
    for (int keep = 0; keep < 2; keep++)
        for (int n = 0; n < 2; n++) {
            te_graph *graph = NULL, *other = NULL;
            OK(connect_group(p));
            if (!p->peers) return;
            CHECK(te_graph_begin(p->ctx, cuda, &other) == TE_OK);
            OK(table(p)->all_reduce(p->exec, p->peers, data, data, 4, TE_F32, TE_REDUCE_SUM));
            CHECK(te_graph_end(other, true) == TE_OK);
            CHECK(te_graph_begin(p->ctx, cuda, &graph) == TE_OK);
            fake.fail_call("ncclAllReduce", n, 5);
            for (int i = 0; i < 3; i++)
                CHECK((table(p)->all_reduce(p->exec, p->peers, data, data, 4, TE_F32, TE_REDUCE_SUM) == TE_OK) ==
                      (i < n));
            CHECK_MSG(strstr(p->exec->message, "failed before"), "%s", p->exec->message);
            if (!keep) te_graph_release(other); /* while another one is recorded */
            CHECK(te_graph_end(graph, keep) == (keep ? TE_ERROR_DEVICE : TE_OK));
            CHECK(!keep || te_graph_launch(other) == TE_ERROR_DEVICE);
            if (keep) te_graph_release(other);
            CHECK(table(p)->all_reduce(p->exec, p->peers, data, data, 4, TE_F32, TE_REDUCE_SUM) == TE_ERROR_DEVICE);
            table(p)->disconnect(p->exec, p->peers);
            p->peers = NULL;
        }
    te_tensor_release(x);
}

static void different_calls(place *p)
{
    te_tensor *x = numbers(p, TE_F32, 4);
    void      *data = te_tensor_pointer(x);
    OK(connect_group(p));
    if (!p->peers) return;
    te_status status = table(p)->all_reduce(p->exec, p->peers, data, data, p->rank ? 3 : 4, TE_F32, TE_REDUCE_SUM);
    if (status == TE_OK) status = p->exec->backend->synchronize(p->exec);
    CHECK(status == TE_ERROR_DEVICE);
    te_tensor_release(x);
}

/* Ctrl-C while the others have not come. */
static void interrupted(place *p)
{
    unsigned char id[256];
    OK(table(p)->make_id(p->exec, id));
    te_context_interrupt(p->ctx);
    CHECK(table(p)->connect(p->exec, id, 0, 2, &p->peers) == TE_ERROR_INTERRUPTED && !p->peers);
    CHECK_MSG(strstr(p->exec->message, "interrupted"), "%s", p->exec->message);
}

/* Every call of NCCL fails once: an error that says so, and everything is given back. */
static void failing_calls(place *p)
{
    static const char *const calls[] = {"ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommGetAsyncError",
                                        "ncclAllReduce", "ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"};
    te_tensor *x = numbers(p, TE_F32, 4), *y = empty(p, TE_F32, 4);
    void      *in = te_tensor_pointer(x), *out = te_tensor_pointer(y);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        fake.fail_call(calls[i], 0, 5);
        te_status status = connect_group(p);
        if (status == TE_OK)
            status = table(p)->all_reduce(p->exec, p->peers, in, in, 4, TE_F32, TE_REDUCE_SUM);
        if (status == TE_OK) status = table(p)->all_to_all(p->exec, p->peers, in, out, 4, TE_F32);
        CHECK_MSG(status == TE_ERROR_DEVICE && strstr(p->exec->message, "NCCL"), "%s: %s", calls[i], p->exec->message);
        if (p->peers) table(p)->disconnect(p->exec, p->peers);
        p->peers = NULL;
    }
    fake.reset();
    te_tensor_release(x);
    te_tensor_release(y);
}

/* A context that the host has made current stays so, whatever is called and however that ends. */
static void host_context(place *p)
{
    void *library = dlopen(TE_CUDA_FAKE "/libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *other = NULL, *now = NULL;
    int (*get)(void **), (*set)(void *), (*retain)(void **, int), (*release)(int);
    *(void **)&get = fake_symbol(library, "cuCtxGetCurrent");
    *(void **)&set = fake_symbol(library, "cuCtxSetCurrent");
    *(void **)&retain = fake_symbol(library, "cuDevicePrimaryCtxRetain");
    *(void **)&release = fake_symbol(library, "cuDevicePrimaryCtxRelease_v2");
    te_tensor *x = numbers(p, TE_F32, 6), *y = empty(p, TE_F32, 6);
    void      *in = te_tensor_pointer(x), *out = te_tensor_pointer(y);
    CHECK(retain(&other, 1) == 0 && set(other) == 0);
#define STAYS(call)                                                                                                    \
    do {                                                                                                               \
        OK(call);                                                                                                      \
        CHECK_MSG(get(&now) == 0 && now == other, "not the host's context behind %s", #call);                          \
    } while (0)
    STAYS(connect_group(p));
    if (p->peers) {
        STAYS(table(p)->all_reduce(p->exec, p->peers, in, out, 3, TE_F32, TE_REDUCE_SUM));
        STAYS(table(p)->reduce_scatter(p->exec, p->peers, in, out, 3, TE_F32, TE_REDUCE_SUM));
        STAYS(table(p)->all_gather(p->exec, p->peers, in, out, 3, TE_F32));
        STAYS(table(p)->broadcast(p->exec, p->peers, out, 3, TE_F32, 0));
        STAYS(table(p)->all_to_all(p->exec, p->peers, in, out, 3, TE_F32));
        STAYS(table(p)->exchange(p->exec, p->peers, in, 1 - p->rank, out, 1 - p->rank, 3, TE_F32));
        fake.fail_call("ncclAllReduce", 0, 5);
        for (int i = 0; i < 2; i++)
            STAYS(table(p)->all_reduce(p->exec, p->peers, in, out, 3, TE_F32, TE_REDUCE_SUM) == TE_ERROR_DEVICE
                      ? TE_OK
                      : TE_ERROR_INTERNAL);
        STAYS((table(p)->disconnect(p->exec, p->peers), TE_OK));
    }
#undef STAYS
    p->peers = NULL;
    te_tensor_release(x);
    te_tensor_release(y);
    set(NULL);
    release(1);
}

/* With all that the host hands over and gets back, a call of NCCL for each. */
static void alone(void)
{
    with_ranks(1, every_function, "every function");
    with_ranks(1, refusals, "refusals");
    with_ranks(1, recorded, "a graph");
}

int main(int argc, char **argv)
{
    on_card = argc > 1 && strcmp(argv[1], "--card") == 0;
    if (on_card) {
        alone();
        return TEST_END();
    }
    setenv("TETRAIN_CUDA_LIBRARIES", TE_CUDA_FAKE, 1);
    if (!mkdtemp(cache_folder)) abort();
    setenv("TETRAIN_CACHE", cache_folder, 1);
    alone();
    with_ranks(2, every_function, "every function");
    with_ranks(3, every_function, "every function");
    with_ranks(2, refusals, "refusals");
    with_ranks(2, recorded, "a graph");
    with_ranks(2, left_alone, "a process that goes");
    with_ranks(3, left_alone, "a process that goes");
    with_ranks(2, left_with_graphs, "a process that goes, and graphs");
    with_ranks(1, fails_while_recorded, "a failure while recording");
    with_ranks(2, different_calls, "different calls");
    with_ranks(1, interrupted, "Ctrl-C");
    with_ranks(1, failing_calls, "failing calls");
    with_ranks(2, host_context, "a host's context");
    each_cached(remove_entry);
    rmdir(cache_folder);
    return TEST_END();
}
