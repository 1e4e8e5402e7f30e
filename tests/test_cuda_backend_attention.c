/* test_cuda_backend_attention.c - attention through cuDNN on the made-up machine: results and gradients are those of
 * the CPU, plans are made once per shape, and what cuDNN declines or lacks is done by the backend's own kernels.
 */
#include "cuda_backend.h"
#include "core/graph.h"
#include "failing_context.h"

enum { MOST = 5 };

/* What few scenes have. Numbers of a bias, also minus infinity, which hides all keys of some rows. */
typedef struct extra {
    int64_t keys; /* 0: as many as queries */
    bool bottom_right, sinks, bias, of_batch, of_heads, of_queries; /* of: it differs by these */
    te_dtype bias_dtype;
} extra;

typedef struct scene {
    const char *name;
    te_dtype    dtype;
    int64_t     batch, heads, kv_heads, seq, dim;
    int         n_seqs;
    int32_t     at[MOST]; /* offsets of packed sequences */
    int64_t     left, right;
    double      dropout;
    bool        declined;
    extra       with;
} scene;

static const scene scenes[] = {
    {"causal", TE_BF16, 2, 3, 3, 13, 8, 0, {0}, -1, 0, 0, false, {0}},
    {"all positions", TE_F16, 2, 2, 2, 9, 16, 0, {0}, -1, -1, 0, false, {0}},
    {"grouped query", TE_BF16, 2, 4, 2, 11, 8, 0, {0}, -1, 0, 0, false, {0}},
    {"window", TE_BF16, 1, 2, 1, 20, 8, 0, {0}, 4, 0, 0, false, {0}},
    {"packed", TE_BF16, 1, 4, 2, 21, 16, 4, {0, 5, 5, 14, 21}, -1, 0, 0, false, {0}},
    {"packed, all positions", TE_F16, 1, 2, 2, 12, 16, 3, {0, 1, 7, 12}, -1, -1, 0, false, {0}},
    {"dropout", TE_BF16, 1, 2, 2, 10, 8, 0, {0}, -1, 0, 0.25, true, {0}},
    {"float32", TE_F32, 1, 2, 2, 10, 8, 0, {0}, -1, 0, 0, true, {0}},
    {"heads of 12", TE_BF16, 1, 2, 2, 10, 12, 0, {0}, -1, 0, 0, true, {0}},
    {"a bias of all", TE_BF16, 2, 3, 3, 19, 8, 0, {0}, -1, -1, 0, false,
     {.bias = true, .bias_dtype = TE_BF16, .of_batch = true, .of_heads = true, .of_queries = true}},
    {"a bias of heads and queries, causal", TE_F16, 2, 4, 2, 21, 16, 0, {0}, -1, 0, 0, false,
     {.bias = true, .bias_dtype = TE_F32, .of_heads = true, .of_queries = true}},
    {"a bias of batch entries, other keys", TE_BF16, 2, 2, 2, 18, 16, 0, {0}, -1, -1, 0, false,
     {.keys = 27, .bias = true, .bias_dtype = TE_BF16, .of_batch = true}},
    {"a bias of queries, a window", TE_BF16, 2, 2, 1, 24, 8, 0, {0}, 4, 0, 0, false,
     {.bias = true, .bias_dtype = TE_F32, .of_queries = true}},
    {"a bias of another dtype", TE_BF16, 1, 2, 2, 18, 8, 0, {0}, -1, 0, 0, true,
     {.bias = true, .bias_dtype = TE_F16, .of_queries = true}},
    {"a bias for few queries", TE_BF16, 1, 2, 2, 9, 8, 0, {0}, -1, 0, 0, true,
     {.bias = true, .bias_dtype = TE_BF16, .of_queries = true}},
    {"the last position", TE_BF16, 2, 4, 2, 20, 8, 0, {0}, -1, 0, 0, false, {.keys = 33, .bottom_right = true}},
    {"the last position, a window", TE_F16, 2, 2, 2, 18, 16, 0, {0}, 7, 0, 0, false,
     {.keys = 31, .bottom_right = true}},
    {"the last position, few queries", TE_BF16, 1, 2, 2, 5, 8, 0, {0}, -1, 0, 0, true,
     {.keys = 33, .bottom_right = true}},
    {"more queries than keys", TE_BF16, 1, 2, 2, 33, 8, 0, {0}, -1, 0, 0, true, {.keys = 20, .bottom_right = true}},
    {"sinks", TE_BF16, 2, 4, 2, 20, 8, 0, {0}, -1, 0, 0, false, {.sinks = true}},
    {"sinks, a window", TE_F16, 1, 2, 2, 24, 16, 0, {0}, 5, 0, 0, false, {.sinks = true}},
};

enum { BIASED = 9 }; /* the first scene with a bias */
enum { QKV, OUT, LSE, DOUT, DQKV, BIAS, SINKS, N_TENSORS };

typedef struct run {
    te_tensor        *tensors[N_TENSORS];
    te_attention_grad grad;
} run;

static te_tensor *filled(te_device *device, te_dtype dtype, int64_t n, uint64_t seed)
{
    te_tensor *t = te_tensor_new(device->ctx, device, dtype, 1, &n);
    double    *values = malloc((size_t)n * sizeof *values);
    for (int64_t i = 0; i < n; i++) values[i] = seed ? (double)(int32_t)test_random(&seed) / 2147483648.0 : 0;
    if (!t || te_tensor_write(t, TE_F64, values) != TE_OK) abort();
    free(values);
    return t;
}

static int64_t keys_of(const scene *s) { return s->with.keys ? s->with.keys : s->seq; }
static int64_t most_rows(const scene *s) { return keys_of(s) > s->seq ? keys_of(s) : s->seq; }

/* [batch, heads, rows, dim] inside rows of `width`. The stride of a single sequence is 1, which must not matter. */
static te_view part(const te_tensor *t, const scene *s, int64_t first, int64_t heads, int64_t rows, int64_t width)
{
    te_view v = {.data = (char *)te_tensor_pointer(t) + (size_t)first * te_dtype_size(t->dtype), .dtype = t->dtype,
                 .ndim = 4, .shape = {s->batch, heads, rows, s->dim},
                 .stride = {s->batch > 1 ? most_rows(s) * width : 1, s->dim, width, 1}};
    return v;
}

/* A third of the keys is hidden, and of every third row, or batch entry but the first where rows have one bias, all. */
static te_view bias_view(te_device *device, const scene *s, te_tensor **t)
{
    const extra *with = &s->with;
    int64_t n[4] = {with->of_batch ? s->batch : 1, with->of_heads ? s->heads : 1, with->of_queries ? s->seq : 1,
                    keys_of(s)},
            numel = n[0] * n[1] * n[2] * n[3];
    *t = te_tensor_new(device->ctx, device, with->bias_dtype, 1, &numel);
    double *values = malloc((size_t)numel * sizeof *values);
    uint64_t seed = 13;
    for (int64_t i = 0; i < numel; i++) {
        int64_t row = i / n[3], which = n[2] > 1 ? row % n[2] % 3 == 1 : row / n[1] > 0;
        values[i] = which || (i % n[3] + row) % 3 == 2 ? -INFINITY : (double)(int32_t)test_random(&seed) / 1073741824.0;
    }
    if (!*t || te_tensor_write(*t, TE_F64, values) != TE_OK) abort();
    free(values);
    return (te_view){.data = te_tensor_pointer(*t), .dtype = with->bias_dtype, .ndim = 4,
                     .shape = {s->batch, s->heads, s->seq, n[3]},
                     .stride = {with->of_batch ? n[1] * n[2] * n[3] : 0, with->of_heads ? n[2] * n[3] : 0,
                                with->of_queries ? n[3] : 0, 1}};
}

static run open_run(te_device *device, const scene *s)
{
    int64_t rows = s->batch * most_rows(s), width = (s->heads + 2 * s->kv_heads) * s->dim, out = s->heads * s->dim;
    run     r = {.tensors = {filled(device, s->dtype, rows * width, 11), filled(device, s->dtype, rows * out, 0),
                             filled(device, TE_F32, rows * s->heads, 0), filled(device, s->dtype, rows * out, 12),
                             filled(device, s->dtype, rows * width, 0)}};
    te_attention      *a = &r.grad.forward;
    te_attention_grad *g = &r.grad;
    int64_t            k = s->heads * s->dim, v = k + s->kv_heads * s->dim;
    a->q = part(r.tensors[QKV], s, 0, s->heads, s->seq, width);
    a->k = part(r.tensors[QKV], s, k, s->kv_heads, keys_of(s), width);
    a->v = part(r.tensors[QKV], s, v, s->kv_heads, keys_of(s), width);
    a->out = part(r.tensors[OUT], s, 0, s->heads, s->seq, out);
    a->lse = te_tensor_view(r.tensors[LSE]);
    a->lse.ndim = 3;
    memcpy(a->lse.shape, (int64_t[]){s->batch, s->heads, s->seq}, 3 * sizeof(int64_t));
    memcpy(a->lse.stride, (int64_t[]){s->heads * s->seq, s->seq, 1}, 3 * sizeof(int64_t));
    a->scale = 0.6;
    a->window_left = s->left;
    a->window_right = s->right;
    a->bottom_right = s->with.bottom_right;
    if (s->with.bias) a->bias = bias_view(device, s, &r.tensors[BIAS]);
    if (s->with.sinks) {
        r.tensors[SINKS] = filled(device, TE_F32, s->heads, 14);
        a->sinks = te_tensor_view(r.tensors[SINKS]);
    }
    a->dropout = s->dropout;
    a->rng = (te_rng){7, 1, 0, NULL};
    a->n_seqs = s->n_seqs;
    a->cu_seqlens_q = a->cu_seqlens_kv = s->n_seqs ? s->at : NULL;
    g->dout = part(r.tensors[DOUT], s, 0, s->heads, s->seq, out);
    g->dq = part(r.tensors[DQKV], s, 0, s->heads, s->seq, width);
    g->dk = part(r.tensors[DQKV], s, k, s->kv_heads, keys_of(s), width);
    g->dv = part(r.tensors[DQKV], s, v, s->kv_heads, keys_of(s), width);
    return r;
}

static void close_run(run *r)
{
    for (int i = 0; i < N_TENSORS; i++) te_tensor_release(r->tensors[i]);
}

static void execute(te_device *device, const scene *s, run *r)
{
    te_exec  *exec = &device->exec;
    te_status status = exec->backend->attention(exec, &r->grad.forward);
    CHECK_MSG(status == TE_OK, "%s: %s", s->name, exec->message);
    status = exec->backend->attention_backward(exec, &r->grad);
    CHECK_MSG(status == TE_OK, "%s backward: %s", s->name, exec->message);
}

static void compare(const scene *s, const run *cpu, const run *cuda, int which, const char *what)
{
    int64_t n = te_tensor_numel(cpu->tensors[which]);
    double *a = malloc((size_t)n * sizeof *a), *b = malloc((size_t)n * sizeof *b), worst = 0;
    double  tolerance = s->dtype == TE_F32 ? 1e-5 : which == LSE ? 1e-4 : s->dtype == TE_F16 ? 4e-3 : 3e-2;
    bool    read = te_tensor_read(cpu->tensors[which], TE_F64, a) == TE_OK &&
                te_tensor_read(cuda->tensors[which], TE_F64, b) == TE_OK;
    CHECK_MSG(read, "%s: %s", s->name, te_context_error(cuda->tensors[which]->ctx));
    for (int64_t i = 0; i < n && read; i++) {
        double off = a[i] == b[i] ? 0 : fabs(a[i] - b[i]) / (1 + fabs(a[i])); /* both may be minus infinity */
        if (!(off <= worst)) worst = off;
    }
    CHECK_MSG(worst <= tolerance, "%s: %s is off by %g", s->name, what, worst);
    free(a);
    free(b);
}

/* Runs of cuDNN that it took. */
static uint64_t check_scene(te_context *ctx, const scene *s)
{
    te_device *cpu_device = te_context_device(ctx, "cpu"), *cuda_device = te_context_device(ctx, "cuda");
    run        cpu = open_run(cpu_device, s), cuda = open_run(cuda_device, s);
    uint64_t   before = fake.count("cudnnBackendExecute");
    execute(cpu_device, s, &cpu);
    execute(cuda_device, s, &cuda);
    compare(s, &cpu, &cuda, OUT, "the result");
    compare(s, &cpu, &cuda, LSE, "the denominator");
    compare(s, &cpu, &cuda, DQKV, "the gradient");
    close_run(&cpu);
    close_run(&cuda);
    return fake.count("cudnnBackendExecute") - before;
}

static void test_scenes(void)
{
    te_context *ctx = te_context_open(NULL);
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++) {
        uint64_t runs = check_scene(ctx, &scenes[i]), wanted = scenes[i].declined ? 0 : 2;
        CHECK_MSG(runs == wanted, "%s: cuDNN ran %d times, not %d", scenes[i].name, (int)runs, (int)wanted);
    }
    te_context_release(ctx);
}

/* Gradients whose sums come in any order: the same results everywhere, by other plans where cuDNN takes them so. */
static void test_any_order(void)
{
    te_context *ctx = te_context_open(NULL);
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++) {
        const scene *s = &scenes[i];
        bool other = !s->declined && !s->n_seqs;
        check_scene(ctx, s);
        uint64_t made = fake.count("cudnnBackendFinalize");
        te_context_set_any_order(ctx, true);
        uint64_t runs = check_scene(ctx, s); /* each finalizes a pack of pointers */
        bool anew = fake.count("cudnnBackendFinalize") > made + runs;
        te_context_set_any_order(ctx, false);
        CHECK_MSG(runs == (s->declined ? 0 : 2) && anew == other, "%s: cuDNN ran %d times, by %s plans", s->name,
                  (int)runs, anew ? "other" : "the same");
    }
    te_context_release(ctx);
}

/* One finalization of a plan per shape and direction, however often it runs. */
static void test_plans_are_kept(void)
{
    te_context *ctx = te_context_open(NULL);
    check_scene(ctx, &scenes[0]);
    check_scene(ctx, &scenes[4]);
    uint64_t made = fake.count("cudnnBackendFinalize");
    for (int i = 0; i < 3; i++) check_scene(ctx, &scenes[0]);
    scene other = scenes[4]; /* other lengths, the same plan */
    memcpy(other.at, (int32_t[]){0, 7, 12, 20, 21}, sizeof other.at);
    check_scene(ctx, &other);
    CHECK_MSG(fake.count("cudnnBackendFinalize") == made + 8, "%d descriptors beside the packs",
              (int)(fake.count("cudnnBackendFinalize") - made - 8)); /* a pack of pointers per run */
    te_context_release(ctx);
}

/* Of more shapes than are kept the plan that was not wanted for longest goes, once nothing that it has started is under
 * way. */
static void test_plans_go(void)
{
    te_context *ctx = te_context_open(NULL);
    te_device *device = te_context_device(ctx, "cuda");
    scene s = scenes[0];
    s.batch = s.heads = s.kv_heads = 1;
    for (int length = 2; length < 80; length++)
        for (int again = 0; again < 2; again++) { /* the first one is wanted all the time */
            s.seq = again ? 2 : length;
            run r = open_run(device, &s);
            uint64_t before = fake.count("cudnnBackendFinalize");
            execute(device, &s, &r);
            uint64_t made = fake.count("cudnnBackendFinalize") - before; /* two packs */
            CHECK_MSG(!again || made == 2, "%d descriptors for a plan that is known", (int)made);
            close_run(&r);
        }
    CHECK_MSG(device->exec.backend->synchronize(&device->exec) == TE_OK, "%s", device->exec.message);
    te_context_release(ctx);
}

/* Where a plan wants more memory to work in than it may have the batch is split, down to single sequences. */
static void test_split(void)
{
    setenv("TETRAIN_CUDNN_WORKSPACE", "0.0001", 1);
    te_context *ctx = te_context_open(NULL);
    CHECK_MSG(scenes[0].batch > 1, "%s", scenes[0].name);
    uint64_t runs = check_scene(ctx, &scenes[0]);
    CHECK_MSG(runs == 2 * (uint64_t)scenes[0].batch, "cuDNN ran %d times", (int)runs);
    runs = check_scene(ctx, &scenes[BIASED + 1]); /* all entries of the batch have the same bias */
    CHECK_MSG(runs == 2 * (uint64_t)scenes[BIASED + 1].batch, "cuDNN ran %d times", (int)runs);
    unsetenv("TETRAIN_CUDNN_WORKSPACE");
    te_context_release(ctx);
}

/* Packed sequences cannot be split, wherever their lengths are known: own kernels. */
static void test_packed_workspace(void)
{
    setenv("TETRAIN_CUDNN_WORKSPACE", "0.0001", 1);
    te_context *ctx = te_context_open(NULL);
    uint64_t runs = check_scene(ctx, &scenes[4]);
    CHECK_MSG(runs == 0, "cuDNN ran %d times", (int)runs);
    unsetenv("TETRAIN_CUDNN_WORKSPACE");
    te_context_release(ctx);
}

static void *(*full_scratch)(te_exec *exec, size_t bytes);
static int refusals;

static void *refuse_workspace(te_exec *exec, size_t bytes)
{
    if (bytes != 1000) return full_scratch(exec, bytes); /* what plans of the made-up library want */
    refusals++;
    return NULL;
}

/* A plan for which there was no memory is not tried again. */
static void test_memory_refused(void)
{
    te_context *ctx = te_context_open(NULL);
    te_exec *exec = &te_context_device(ctx, "cuda")->exec;
    full_scratch = exec->scratch;
    exec->scratch = refuse_workspace;
    for (int i = 0; i < 3; i++) CHECK(check_scene(ctx, &scenes[0]) == 0);
    CHECK_MSG(refusals == 2, "%d refusals", refusals); /* forward and backward */
    exec->scratch = full_scratch;
    te_context_release(ctx);
}

/* Where the library does not say which of its engines repeat the bits of gradients, one is named. */
static void test_named_engine(void)
{
    fake.set_devices(1, 100);
    te_context *ctx = te_context_open(NULL);
    uint64_t before = fake.count("an engine that was named");
    CHECK(check_scene(ctx, &scenes[0]) == 2 && check_scene(ctx, &scenes[4]) == 2);
    CHECK(fake.count("an engine that was named") - before == 2);
    te_context_release(ctx);
    fake.set_devices(1, 120);
    ctx = te_context_open(NULL);
    CHECK(check_scene(ctx, &scenes[0]) == 2 && check_scene(ctx, &scenes[4]) == 1);
    CHECK(fake.count("an engine that was named") - before == 2);
    te_context_release(ctx);
    fake.set_devices(2, 90);
}

/* A library that does not start, refuses a graph, or has no memory to work in: own kernels. */
/* A bias is asked for where the environment says so. */
static void test_asked(void)
{
    static const char *const wishes[] = {"1", "all"};
    for (int i = 0; i < 2; i++) {
        te_context *ctx = te_context_open(NULL);
        setenv("TETRAIN_CUDNN", wishes[i], 1);
        uint64_t biased = check_scene(ctx, &scenes[BIASED]), plain = check_scene(ctx, &scenes[0]);
        CHECK_MSG(biased == (i ? 2u : 0u), "%s: cuDNN ran %d times", wishes[i], (int)biased);
        CHECK_MSG(plain == 2, "%s: cuDNN ran %d times", wishes[i], (int)plain);
        te_context_release(ctx);
    }
}

static void test_without(void)
{
    static const char *const calls[] = {"cudnnCreate", "cudnnSetStream"};
    for (int i = 0; i < 2; i++) {
        te_context *ctx = te_context_open(NULL);
        fake.fail_call(calls[i], 0, 3000);
        uint64_t runs = check_scene(ctx, &scenes[0]);
        CHECK_MSG(runs == 0, "%s: cuDNN ran %d times", calls[i], (int)runs);
        te_context_release(ctx);
        fake.reset();
    }
    te_context *ctx = te_context_open(NULL);
    fake.fail_call("cudnnBackendSetAttribute", 5, 3000); /* one graph: forward is declined, backward taken */
    uint64_t runs = check_scene(ctx, &scenes[0]);
    CHECK_MSG(runs == 1, "cuDNN ran %d times", (int)runs);
    fake.reset();
    runs = check_scene(ctx, &scenes[0]); /* what was declined stays so */
    CHECK_MSG(runs == 1, "cuDNN ran %d times", (int)runs);
    te_context_release(ctx);
    ctx = te_context_open(NULL);
    fake.fail_call("cudnnBackendExecute", 0, 3000); /* forward is declined when it is about to run, and asked no more */
    CHECK(check_scene(ctx, &scenes[0]) == 2);
    fake.reset();
    CHECK(check_scene(ctx, &scenes[0]) == 1);
    te_context_release(ctx);
}

/* Recorded, offsets of packed sequences included: nothing is written before the launch, and each
 * launch writes it all again. */
static void test_in_a_graph(void)
{
    scene own = scenes[4]; /* by the backend's own kernels */
    own.dtype = TE_F32;
    own.name = "packed, float32";
    const scene *recorded[] = {&scenes[0], &scenes[4], &own, &scenes[BIASED], &scenes[BIASED + 1]};
    te_context  *ctx = te_context_open(NULL);
    te_device   *device = te_context_device(ctx, "cuda");
    for (size_t i = 0; i < sizeof recorded / sizeof *recorded; i++) {
        const scene *s = recorded[i];
        run          cpu = open_run(te_context_device(ctx, "cpu"), s), cuda = open_run(device, s);
        te_graph    *graph;
        double      *zeros = calloc(10000, sizeof *zeros);
        execute(&ctx->devices[0], s, &cpu);
        CHECK_MSG(te_graph_begin(ctx, device, &graph) == TE_OK, "%s", te_context_error(ctx));
        execute(device, s, &cuda);
        CHECK_MSG(te_graph_end(graph, true) == TE_OK, "%s: %s", s->name, te_context_error(ctx));
        for (int k = 0; k < 2; k++) {
            for (int which = OUT; which <= DQKV; which++)
                if (which != DOUT) CHECK(te_tensor_write(cuda.tensors[which], TE_F64, zeros) == TE_OK);
            CHECK(te_graph_launch(graph) == TE_OK);
            compare(s, &cpu, &cuda, OUT, "the result of a launch");
            compare(s, &cpu, &cuda, DQKV, "the gradient of a launch");
        }
        te_graph_release(graph);
        free(zeros);
        close_run(&cpu);
        close_run(&cuda);
    }
    te_context_release(ctx);
}

/* The device says which it is. */
static void test_description(void)
{
    char        text[512];
    te_context *ctx = te_context_open(NULL);
    te_device  *device = te_context_device(ctx, "cuda");
    device->exec.backend->describe(&device->exec, text, sizeof text);
    CHECK_MSG(strstr(text, "Fake GPU 0") && strstr(text, "by cuDNN 9.19.0"), "%s", text);
    te_context_release(ctx);
    ctx = te_context_open(NULL);
    device = te_context_device(ctx, "cuda");
    fake.fail_call("cudnnCreate", 0, 1001);
    device->exec.backend->describe(&device->exec, text, sizeof text);
    CHECK_MSG(strstr(text, "without cuDNN: cuDNN 91900 does not start"), "%s", text);
    fake.reset();
    te_context_release(ctx);
}

/* Host memory that ends somewhere: what was asked for fails or is done without cuDNN, and all is given back. */
static void test_host_memory(void)
{
    for (int n = 0; n < 120; n++) {
        failing_memory     memory;
        te_context *ctx = failing_context_open(&memory, 1);
        te_device  *device = te_context_device(ctx, "cuda");
        run         r = open_run(device, &scenes[4]);
        memory.countdown = n;
        te_status status = device->exec.backend->attention(&device->exec, &r.grad.forward);
        if (status == TE_OK) status = device->exec.backend->attention_backward(&device->exec, &r.grad);
        CHECK_MSG(status == TE_OK || (status == TE_ERROR_MEMORY && n < 100), "allocation %d: status %d, %s", n,
                  (int)status, device->exec.message);
        memory.countdown = -1;
        close_run(&r);
        te_context_release(ctx);
        CHECK_MSG(memory.live == 0, "allocation %d: %zu bytes were not given back", n, memory.live);
        CHECK_MSG(fake.live() == 0, "allocation %d: %d things not given back", n, fake.live());
    }
}

/* What fails while it is asked to run is an error that names it. */
static void test_failing_run(void)
{
    te_context *ctx = te_context_open(NULL);
    te_device  *device = te_context_device(ctx, "cuda");
    run         r = open_run(device, &scenes[0]);
    fake.fail_call("cudnnBackendExecute", 0, 5000);
    te_status status = device->exec.backend->attention(&device->exec, &r.grad.forward);
    CHECK(status == TE_ERROR_DEVICE);
    CHECK_MSG(strstr(device->exec.message, "attention: cuDNN"), "%s", device->exec.message);
    fake.reset();
    close_run(&r);
    te_context_release(ctx);
}

int main(void)
{
    setenv("TETRAIN_CUDNN", "all", 1);
    fake_open();
    void (*tests[])(void) = {test_scenes, test_any_order, test_plans_are_kept, test_plans_go, test_split,
                             test_packed_workspace, test_memory_refused, test_named_engine, test_asked, test_without,
                             test_failing_run, test_in_a_graph, test_description, test_host_memory};
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        tests[i]();
        CHECK_MSG(fake.live() == 0, "test %d: %d things not given back", (int)i + 1, fake.live());
    }
    fake_close();
    return TEST_END();
}
