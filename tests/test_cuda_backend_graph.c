/* test_cuda_backend_graph.c - recorded graphs on the made-up machine: what a launch computes, what recording refuses,
 * whose the memory is, which copies of weights are made again, and that everything is given back when a call or an
 * allocation fails at any place.
 */
#include "cuda_backend.h"
#include "core/graph.h"
#include "core/op.h"
#include "core/recipe.h"
#include "failing_memory.h"
#include "quantizers.h"

static te_tensor *binary(te_context *ctx, const char *op, te_tensor *a, te_tensor *b)
{
    te_arg     args[2] = {{.kind = TE_ARG_TENSOR, .as.tensor = a}, {.kind = TE_ARG_TENSOR, .as.tensor = b}};
    te_tensor *out = NULL;
    te_op_run(ctx, te_op_find(ctx, op), args, 2, &out, 1);
    return out;
}

/* y = exp(x) + x, with something in between whose memory is free again at the end. */
static te_tensor *work(te_context *ctx, te_tensor *x)
{
    te_tensor *e = apply(ctx, "exp", x), *s = e ? apply(ctx, "sin", e) : NULL, *y = s ? binary(ctx, "add", e, x) : NULL;
    te_tensor_release(e);
    te_tensor_release(s);
    return y;
}

/* The graph of work(x) and its result; false when that fails. */
static bool record(te_context *ctx, te_tensor *x, te_graph **graph, te_tensor **y)
{
    *y = NULL;
    if (te_graph_begin(ctx, te_context_device(ctx, "cuda"), graph) != TE_OK) return false;
    *y = work(ctx, x);
    bool kept = te_graph_end(*graph, *y != NULL) == TE_OK && *y;
    if (kept) return true;
    te_tensor_release(*y);
    return false;
}

static void expect_work(te_tensor *x, te_tensor *y, const char *what)
{
    double a[5], b[5];
    CHECK(te_tensor_read(x, TE_F64, a) == TE_OK && te_tensor_read(y, TE_F64, b) == TE_OK);
    for (int i = 0; i < 5; i++)
        CHECK_MSG(fabs(b[i] - (exp(a[i]) + a[i])) < 1e-5 * (1 + fabs(b[i])), "%s: %g gives %g", what, a[i], b[i]);
}

static void write_small(te_tensor *x, double first)
{
    double values[5];
    for (int i = 0; i < 5; i++) values[i] = first + 0.25 * i;
    CHECK(te_tensor_write(x, TE_F64, values) == TE_OK);
}

/* Recording computes nothing; each launch reads what lies in the input then. Memory between is nobody else's. */
static void test_launches(void)
{
    te_context *ctx = te_context_open(NULL);
    te_tensor  *x = numbers_on(ctx, "cuda", TE_F32, 1, (int64_t[]){5}), *y = NULL, *others[8];
    te_graph   *graph = NULL;
    write_small(x, 0);
    te_tensor *warm = work(ctx, x);
    te_tensor_release(warm);
    uint64_t launched = fake.count("cuLaunchKernel");
    bool     recorded = record(ctx, x, &graph, &y);
    CHECK_MSG(recorded, "%s", te_context_error(ctx));
    CHECK_MSG(fake.count("cuLaunchKernel") == launched + 3, "%d kernels",
              (int)(fake.count("cuLaunchKernel") - launched));
    for (int i = 0; recorded && i < 3; i++) {
        for (int k = 0; k < 8; k++) others[k] = numbers_on(ctx, "cuda", TE_F32, 1, (int64_t[]){5});
        write_small(x, i);
        CHECK(te_graph_launch(graph) == TE_OK);
        expect_work(x, y, "a launch");
        double first = 0;
        for (int k = 0; k < 8; k++) {
            double values[5];
            CHECK(te_tensor_read(others[k], TE_F64, values) == TE_OK);
            first = values[0];
            CHECK_MSG(first == -40, "a tensor beside the graph holds %g", first);
            te_tensor_release(others[k]);
        }
    }
    te_tensor_release(x); /* the graph keeps it */
    if (recorded) CHECK(te_graph_launch(graph) == TE_OK);
    if (recorded) te_graph_release(graph);
    te_tensor_release(y); /* outlives the graph */
    te_context_release(ctx);
}

static void test_refusals(void)
{
    te_context *ctx = te_context_open(NULL);
    te_device  *cuda = te_context_device(ctx, "cuda");
    te_tensor  *x = numbers_on(ctx, "cuda", TE_F32, 1, (int64_t[]){5});
    te_graph   *graph, *second;
    double      values[5];
    CHECK(te_graph_begin(ctx, te_context_device(ctx, "cpu"), &graph) == TE_ERROR_UNSUPPORTED);
    CHECK(te_graph_begin(ctx, cuda, &graph) == TE_OK);
    CHECK(te_graph_begin(ctx, cuda, &second) == TE_ERROR_UNSUPPORTED);
    CHECK(te_tensor_read(x, TE_F64, values) == TE_ERROR_UNSUPPORTED);
    CHECK_MSG(strstr(te_context_error(ctx), "a copy to the host cannot be part of a graph"), "%s",
              te_context_error(ctx));
    CHECK(te_tensor_write(x, TE_F64, values) == TE_ERROR_UNSUPPORTED);
    CHECK(te_context_synchronize(ctx, "cuda") == TE_ERROR_UNSUPPORTED);
    te_context_empty_cache(ctx);
    CHECK(te_graph_end(graph, true) == TE_OK);
    te_graph_release(graph);
    CHECK(te_tensor_read(x, TE_F64, values) == TE_OK && values[0] == -40);
    te_tensor_release(x);
    te_context_release(ctx);
}

/* Random numbers: each launch goes on where the context stands, as the same calls would. */
static void test_random_numbers(void)
{
    double      drawn[3][5], expected[3][5];
    te_context *ctx = te_context_open(NULL);
    te_device  *cuda = te_context_device(ctx, "cuda");
    te_tensor  *x = te_tensor_new(ctx, cuda, TE_F32, 1, (int64_t[]){5});
    te_arg      arg = {.kind = TE_ARG_TENSOR, .as.tensor = x};
    te_graph   *graph;
    te_context_seed(ctx, 42);
    for (int i = 0; i < 3; i++) {
        CHECK(te_op_run_inplace(ctx, te_op_find(ctx, "normal"), &arg, 1) == TE_OK);
        CHECK(te_tensor_read(x, TE_F64, expected[i]) == TE_OK);
    }
    te_context_seed(ctx, 7);
    CHECK(te_graph_begin(ctx, cuda, &graph) == TE_OK);
    CHECK(te_op_run_inplace(ctx, te_op_find(ctx, "normal"), &arg, 1) == TE_OK);
    CHECK_MSG(te_graph_end(graph, true) == TE_OK, "%s", te_context_error(ctx));
    te_context_seed(ctx, 42);
    for (int i = 0; i < 3; i++) CHECK(te_graph_launch(graph) == TE_OK && te_tensor_read(x, TE_F64, drawn[i]) == TE_OK);
    CHECK(memcmp(drawn, expected, sizeof drawn) == 0);
    te_graph_release(graph);
    te_tensor_release(x);
    te_context_release(ctx);
}

/* Numbers on their way to the host: what they were when they were asked for, whatever comes after. */
static void test_fetches(void)
{
    te_context *ctx = te_context_open(NULL);
    te_tensor *x = numbers_on(ctx, "cuda", TE_F64, 1, (int64_t[]){5}),
              *few = numbers_on(ctx, "cuda", TE_F32, 1, (int64_t[]){5});
    te_tensor  *many = te_tensor_new(ctx, te_context_device(ctx, "cuda"), TE_F64, 1, (int64_t[]){TE_FETCH_MAX + 1});
    te_fetch   *fetches[3];
    double      values[5], sent[5] = {0};
    CHECK(te_tensor_fetch(x, &fetches[0]) == TE_OK);
    for (int i = 1; i < 3; i++) {
        sent[0] = i;
        CHECK(te_tensor_send(x, sent, 5) == TE_OK && te_tensor_fetch(x, &fetches[i]) == TE_OK);
    }
    uint64_t waits = fake.count("cuStreamSynchronize") + fake.count("cuEventSynchronize");
    CHECK(te_fetch_end(fetches[2], values) == TE_OK && values[0] == 2);
    CHECK(te_fetch_end(fetches[1], NULL) == TE_OK);
    CHECK(te_fetch_end(fetches[0], values) == TE_OK && values[0] == -40);
    CHECK(fake.count("cuStreamSynchronize") + fake.count("cuEventSynchronize") == waits);
    CHECK(te_tensor_fetch(few, fetches) == TE_ERROR_ARGUMENT && te_tensor_fetch(many, fetches) == TE_ERROR_ARGUMENT);
    CHECK_MSG(strstr(te_context_error(ctx), "at most 512 numbers"), "%s", te_context_error(ctx));
    /* numbers that have not arrived are waited for; a device that has failed says so */
    uint64_t pinned = fake.count("cuMemHostAlloc");
    CHECK(te_tensor_fetch(x, fetches) == TE_OK);
    fake.fail_call("cuEventQuery", 0, CUDA_ERROR_NOT_READY);
    waits = fake.count("cuEventSynchronize");
    CHECK(te_fetch_end(fetches[0], values) == TE_OK && values[0] == 2 && fake.count("cuEventSynchronize") == waits + 1);
    CHECK_MSG(fake.count("cuMemHostAlloc") == pinned, "pinned memory is used again");
    CHECK(te_tensor_fetch(x, fetches) == TE_OK);
    fake.fail_work(0, CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK(te_fetch_end(fetches[0], values) == TE_ERROR_DEVICE);
    fake.reset();
    te_graph *graph;
    CHECK(te_graph_begin(ctx, te_context_device(ctx, "cuda"), &graph) == TE_OK);
    CHECK(te_tensor_fetch(x, fetches) == TE_ERROR_UNSUPPORTED);
    te_graph_end(graph, false);
    const char *const calls[] = {"cuMemcpyDtoHAsync_v2", "cuEventRecord"};
    for (int i = 0; i < 2; i++) {
        fake.fail_call(calls[i], 0, 700);
        CHECK_MSG(te_tensor_fetch(x, fetches) == TE_ERROR_DEVICE, "%s", calls[i]);
        fake.reset();
    }
    CHECK(te_tensor_fetch(x, fetches) == TE_OK && te_fetch_end(fetches[0], values) == TE_OK && values[0] == 2);
    te_tensor_release(many);
    te_tensor_release(few);
    te_tensor_release(x);
    te_context_release(ctx);
}

/* Of a graph: said once, also where launches after the faulty one are under way when the host hears of it. */
static void test_reports(void)
{
    te_context *ctx = te_context_open(NULL);
    te_device  *cuda = te_context_device(ctx, "cuda");
    te_tensor  *rows = numbers_on(ctx, "cuda", TE_F32, 2, (int64_t[]){5, 3}),
              *ids = te_tensor_new(ctx, cuda, TE_I64, 1, (int64_t[]){4}),
              *few = te_tensor_new(ctx, cuda, TE_F64, 1, (int64_t[]){4});
    te_exec    *exec = &cuda->exec;
    te_tensor  *known[2]; /* good ids, and those with a bad one */
    double      values[2][4] = {{1, 2, 3, 4}, {1, 9, 3, 4}};
    te_graph   *graph = NULL;
    te_fetch   *fetch;
    for (int i = 0; i < 2; i++) {
        known[i] = te_tensor_new_like(ids);
        CHECK(te_tensor_write(known[i], TE_F64, values[i]) == TE_OK);
    }
    CHECK(te_tensor_write(ids, TE_F64, values[0]) == TE_OK && te_tensor_fill(few, 7) == TE_OK);
    te_tensor *warm = binary(ctx, "embedding", rows, ids);
    CHECK_MSG(warm, "%s", te_context_error(ctx));
    te_tensor_release(warm);
    CHECK(te_context_synchronize(ctx, "cuda") == TE_OK);
    CHECK(te_graph_begin(ctx, cuda, &graph) == TE_OK);
    te_tensor *out = binary(ctx, "embedding", rows, ids);
    CHECK_MSG(te_graph_end(graph, out != NULL) == TE_OK, "%s", te_context_error(ctx));
    for (int launches = 1; launches < 4; launches++) {
        for (int i = 0; i < launches; i++) {
            const te_tensor *from = known[i == 0];
            CHECK(exec->backend->memory_copy(exec, te_tensor_pointer(ids), te_tensor_pointer(from), 32,
                                             TE_COPY_DEVICE_TO_DEVICE) == TE_OK);
            CHECK(te_graph_launch(graph) == TE_OK);
            if (i == 0) CHECK(te_tensor_fetch(few, &fetch) == TE_OK);
        }
        CHECK(te_fetch_end(fetch, values[0]) != TE_OK);
        CHECK_MSG(strstr(te_context_error(ctx), "id 9 at position 2"), "%s", te_context_error(ctx));
        CHECK_MSG(te_context_synchronize(ctx, "cuda") == TE_OK, "%d launches: once more: %s", launches,
                  te_context_error(ctx));
        CHECK(te_tensor_write(ids, TE_F64, (double[]){0, 1, 2, 3}) == TE_OK);
        CHECK(te_graph_launch(graph) == TE_OK && te_context_synchronize(ctx, "cuda") == TE_OK);
    }
    te_graph_release(graph);
    te_tensor *tensors[] = {rows, ids, few, out, known[0], known[1]};
    for (int i = 0; i < 6; i++) te_tensor_release(tensors[i]);
    te_context_release(ctx);
}

static void test_failing_calls(void)
{
    static const char *const calls[] = {"cuStreamBeginCapture_v2", "cuStreamBeginCapture", "cuStreamEndCapture",
                                        "cuGraphInstantiateWithFlags", "cuLaunchKernel"};
    te_context *ctx = te_context_open(NULL);
    te_tensor  *x = numbers_on(ctx, "cuda", TE_F32, 1, (int64_t[]){5}), *y;
    te_graph   *graph;
    te_tensor  *warm = work(ctx, x);
    te_tensor_release(warm);
    for (int i = 0; i < 5; i++) {
        uint64_t before = fake.count(calls[i]);
        fake.fail_call(calls[i], 0, 700);
        bool recorded = record(ctx, x, &graph, &y);
        CHECK_MSG(recorded == (fake.count(calls[i]) == before), "%s", calls[i]);
        if (recorded) te_graph_release(graph);
        if (recorded) te_tensor_release(y);
        fake.reset();
    }
    CHECK(record(ctx, x, &graph, &y));
    fake.fail_call("cuGraphLaunch", 0, 700);
    CHECK(te_graph_launch(graph) == TE_ERROR_DEVICE);
    fake.reset();
    write_small(x, 1);
    CHECK(te_graph_launch(graph) == TE_OK);
    expect_work(x, y, "after a failed launch");
    te_graph_release(graph);
    te_tensor_release(y);
    te_tensor_release(x);
    te_context_release(ctx);
}

/* Host memory that ends at the n-th allocation, for every n. */
static void test_host_memory(void)
{
    bool done = false;
    for (int n = 0; n < 5000 && !done; n++) {
        failing_memory     memory = {.countdown = n};
        te_context_options options = {.struct_size = sizeof options, .threads = 1, .realloc = failing_memory_realloc,
                                      .realloc_user = &memory};
        te_context        *ctx = te_context_open(&options);
        if (!ctx) continue;
        te_tensor *x = numbers_on(ctx, "cuda", TE_F32, 1, (int64_t[]){5}), *y = NULL;
        te_graph  *graph;
        bool       recorded = x && record(ctx, x, &graph, &y);
        bool       launched = recorded && te_graph_launch(graph) == TE_OK;
        te_tensor *sum = launched ? te_tensor_new(ctx, te_context_device(ctx, "cuda"), TE_F64, 0, NULL) : NULL;
        te_fetch  *fetch;
        if (sum && te_tensor_fetch(sum, &fetch) == TE_OK)
            done = te_fetch_end(fetch, NULL) == TE_OK && memory.countdown >= 0;
        te_tensor_release(sum);
        if (recorded) te_graph_release(graph);
        if (recorded) te_tensor_release(y);
        te_tensor_release(x);
        te_context_release(ctx);
        CHECK_MSG(memory.live == 0, "allocation %d: %zu bytes were not given back", n, memory.live);
        CHECK_MSG(fake.live() == 0, "allocation %d: %d things not given back", n, fake.live());
    }
    CHECK(done);
}

static bool same_data(te_tensor *a, te_tensor *b)
{
    double x[32 * 48], y[32 * 48];
    CHECK(te_tensor_read(a, TE_F64, x) == TE_OK && te_tensor_read(b, TE_F64, y) == TE_OK);
    return memcmp(x, y, (size_t)te_tensor_numel(a) * sizeof *x) == 0;
}

/* A weight that is quantized in a graph, for every recipe: a launch makes its copies where the weight was changed by
 * others or by the graph, or its factor has another value, and otherwise leaves them as they are. */
static void test_quantized_weights(int recipe, bool writes)
{
    te_context *ctx = te_context_open(NULL);
    te_device  *cuda = te_context_device(ctx, "cuda");
    te_tensor  *w = numbers_on(ctx, "cuda", TE_BF16, 2, (int64_t[]){32, 48});
    const te_quantizer *q = &quantizer_recipes[recipe].q[TE_ROLE_WEIGHT];
    te_product_recipe from = {.quantized = {true, true, true}, .history_length = {4, 4, 4}}, *made;
    te_recipe_state *state = te_recipe_state_new(ctx);
    te_quantized z, fresh;
    te_graph *graph = NULL;
    for (int i = 0; i < TE_ROLE_COUNT; i++) from.quantizers[i] = quantizer_recipes[recipe].q[i];
    made = te_product_recipe_new(ctx, &from);
    CHECK(made && te_recipe_state_use(state, made) == TE_OK && te_tensor_fill(w, 1.5) == TE_OK);
    /* what follows is compiled */
    CHECK(te_role_quantize(state, state->recipe, TE_ROLE_WEIGHT, w, TE_BF16, true, true, &z) == TE_OK);
    te_quantized_close(&z);
    CHECK(te_graph_begin(ctx, cuda, &graph) == TE_OK);
    if (writes) CHECK(te_tensor_fill(w, 0.75) == TE_OK);
    CHECK_MSG(te_role_quantize(state, state->recipe, TE_ROLE_WEIGHT, w, TE_BF16, true, true, &z) == TE_OK, "%s",
              te_context_error(ctx));
    CHECK_MSG(te_graph_end(graph, true) == TE_OK, "%s", te_context_error(ctx));
    for (int i = 0; i < 5; i++) { /* 2: another weight; 3: another factor */
        float factor = i < 3 ? 1.0f : 0.5f;
        bool  changed = writes || i == 0 || i == 2 || (i == 3 && q->needs_history);
        if (i == 2) CHECK(te_tensor_fill(w, 2.5) == TE_OK);
        if (i == 3 && q->needs_history) CHECK(te_tensor_write(state->scale[TE_ROLE_WEIGHT], TE_F32, &factor) == TE_OK);
        /* what nobody else would write */
        for (int s = 0; s < 2; s++) CHECK(te_tensor_fill(z.side[s].data, 1) == TE_OK);
        CHECK_MSG(te_graph_launch(graph) == TE_OK, "%s", te_context_error(ctx));
        te_quantize_options options = {.want = {true, true}, .scale = factor};
        CHECK(te_quantize(w, q, &options, &fresh) == TE_OK);
        for (int s = 0; s < 2; s++)
            CHECK_MSG(same_data(z.side[s].data, fresh.side[s].data) == changed, "%s, launch %d, side %d%s",
                      quantizer_recipes[recipe].name, i, s, writes ? ", written" : "");
        te_quantized_close(&fresh);
    }
    te_quantized_close(&z);
    te_recipe_state_release(state);
    te_product_recipe_release(made);
    te_graph_release(graph);
    te_tensor_release(w);
    te_context_release(ctx);
}

static void test_weights(void)
{
    for (int recipe = 0; recipe < QUANTIZER_RECIPES; recipe++)
        for (int writes = 0; writes < 2; writes++) test_quantized_weights(recipe, writes);
}

int main(void)
{
    fake_open();
    void (*tests[])(void) = {test_launches, test_refusals, test_random_numbers, test_fetches, test_reports,
                             test_failing_calls, test_host_memory, test_weights};
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        tests[i]();
        CHECK_MSG(fake.live() == 0, "test %d: %d things not given back", (int)i + 1, fake.live());
    }
    fake_close();
    return TEST_END();
}
