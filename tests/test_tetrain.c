/* test_tetrain.c - the host interface: running, calling, exchanging tensors, limits, interrupts, several runtimes. */
#include "test.h"

#include "tetrain/tetrain.h"

#include <signal.h>
#include <pthread.h>
#include <unistd.h>

static tetrain_status run(tetrain *rt, const char *code) { return tetrain_run_string(rt, code, strlen(code), "=test"); }

static bool says(tetrain *rt, const char *part) { return strstr(tetrain_error(rt), part) != NULL; }

static void test_running(void)
{
    tetrain *rt = tetrain_open(NULL);
    CHECK(rt != NULL);
    CHECK(run(rt, "x = 1 + 1") == TETRAIN_OK && tetrain_error(rt)[0] == 0);
    CHECK(run(rt, "x = = 1") == TETRAIN_ERROR_SCRIPT && says(rt, "test:1:"));
    CHECK(run(rt, "local function f() error('oops') end\nf()") == TETRAIN_ERROR_SCRIPT);
    CHECK_MSG(says(rt, "test:1: oops\nstack traceback:"), "%s", tetrain_error(rt));
    CHECK(run(rt, "error({})") == TETRAIN_ERROR_SCRIPT && says(rt, "error value of type table"));
    CHECK(run(rt, "error(setmetatable({}, {__tostring = function() error('x') end}))") == TETRAIN_ERROR_SCRIPT);
    CHECK(run(rt, "local function f() return f() + 1 end f()") == TETRAIN_ERROR_SCRIPT && says(rt, "stack overflow"));
    CHECK(run(rt, "require('te').empty(1e13)") == TETRAIN_ERROR_MEMORY);
    CHECK(tetrain_run_file(rt, "/no/such/file.lua", 0, NULL) == TETRAIN_ERROR_IO && says(rt, "/no/such/file.lua"));
    static const char *const files[] = {"te.load('/no/such/file')", "te.from_file('/no/such/file', 'uint8')",
                                        "te.save('/no/such/folder/x', { x = te.ones(1) })",
                                        "te._core.tokens_open { paths = { '/no/such/file' }, batch = 1, block = 1 }"};
    CHECK(run(rt, "te = require 'te'") == TETRAIN_OK);
    for (int i = 0; i < (int)(sizeof files / sizeof *files); i++)
        CHECK_MSG(run(rt, files[i]) == TETRAIN_ERROR_IO && says(rt, "/no/such/f"), "%s", tetrain_error(rt));
    CHECK(run(rt, "pcall(te.load, '/no/such/file') error('x')") == TETRAIN_ERROR_SCRIPT);
    CHECK(run(rt, "assert(x == 2)") == TETRAIN_OK);
    tetrain_close(rt);
    tetrain_close(NULL);
}

/* Every function that takes a context, without one. */
static void test_no_context(te_context *none)
{
    te_memory_stats stats = {.current = 7};
    uint64_t        seed = 7, offset = 7;
    te_context_interrupt(none);
    te_context_clear_interrupt(none);
    te_context_set_threads(none, 3);
    te_context_set_tf32(none, true);
    te_context_set_any_order(none, true);
    te_context_on_memory_pressure(none, NULL, NULL);
    te_context_reset_peak(none);
    te_context_empty_cache(none);
    te_context_seed(none, 1);
    te_context_rng_state(none, &seed, &offset);
    te_context_set_rng_state(none, 1, 2);
    CHECK(seed == 0 && offset == 0 && te_context_threads(none) == 0 && !te_context_tf32(none) &&
          !te_context_any_order(none));
    CHECK(te_context_memory(none, "cpu", &stats) == TE_ERROR_ARGUMENT && stats.current == 0);
    CHECK(te_context_synchronize(none, NULL) == TE_ERROR_ARGUMENT);
    CHECK(!te_context_set_grad_enabled(none, true) && !te_context_grad_enabled(none));
    CHECK(te_context_set_compute_dtype(none, TE_BF16) == TE_DTYPE_COUNT);
    CHECK(te_autocast_begin(none, NULL) == TE_ERROR_ARGUMENT && te_autocast_end(none) == TE_ERROR_ARGUMENT);
    CHECK(!te_optimizer_adamw(none, NULL, 0, NULL) && !te_recipe_new(none, "MXFP8BlockScaling", NULL, 0));
}

static bool means(te_context *ctx, te_status status, const char *part)
{
    return status == TE_ERROR_ARGUMENT && strstr(te_context_error(ctx), part);
}

/* NULL where results go or arguments come from. */
static void test_null_arguments(void)
{
    te_context  *ctx = te_context_open(NULL);
    te_tensor   *t = te_tensor_full(ctx, TE_F32, 1, (int64_t[]){2}, 1), *out = NULL;
    te_tensor   *empty = te_tensor_empty(ctx, TE_F32, 1, (int64_t[]){0});
    const te_op *relu = te_op_find(ctx, "relu");
    te_arg       args[] = {{.kind = TE_ARG_TENSOR, .as.tensor = t}};
    te_context_rng_state(ctx, NULL, NULL);
    CHECK(means(ctx, te_context_memory(ctx, "cpu", NULL), "te_context_memory: stats is NULL"));
    CHECK(means(ctx, te_tensor_read(t, TE_F32, NULL), "te_tensor_read: host is NULL for a tensor of 2 elements"));
    CHECK(means(ctx, te_tensor_write(t, TE_F64, NULL), "te_tensor_write: host is NULL for a tensor of 2 elements"));
    CHECK(te_tensor_read(empty, TE_F64, NULL) == TE_OK && te_tensor_write(empty, TE_F32, NULL) == TE_OK);
    CHECK(!te_tensor_empty(ctx, TE_F32, 1, NULL) && !te_tensor_full(ctx, TE_F32, 1, NULL, 1));
    CHECK(means(ctx, te_op_run(ctx, relu, args, 1, NULL, 1), "te.relu: 1 arguments, 1 results at NULL"));
    CHECK(means(ctx, te_op_run(ctx, relu, NULL, 1, &out, 1), "te.relu: 1 arguments at NULL, 1 results") && !out);
    CHECK(te_op_run(ctx, relu, args, 1, NULL, 0) == TE_OK);
    te_group *g = te_group_new(ctx);
    int       x = te_group_input(g, false), y = 7;
    CHECK(!te_group_accepts(NULL, relu) && !te_group_accepts(ctx, NULL));
    CHECK(strstr(te_context_error(ctx), "te_group_accepts: the operation is NULL"));
    CHECK(means(ctx, te_group_apply(g, relu, NULL, 1, NULL, 0, &y), "te.relu: 1 values at NULL") && y == TE_NO_VALUE);
    CHECK(means(ctx, te_group_apply(g, relu, &x, 1, NULL, 0, NULL), "te_group_apply: result is NULL"));
    CHECK(means(ctx, te_group_apply(g, NULL, &x, 1, NULL, 0, &y), "te_group_apply: there is no operation"));
    CHECK(te_group_apply(g, relu, &x, 1, NULL, 0, &y) == TE_OK && te_group_output(g, y) == TE_OK);
    CHECK(means(ctx, te_group_run(g, NULL, &out), "te_group_run: 1 inputs at NULL, 1 outputs") && !out);
    CHECK(means(ctx, te_group_run(g, &t, NULL), "te_group_run: 1 inputs, 1 outputs at NULL"));
    CHECK(te_group_run(g, &t, &out) == TE_OK && out);
    te_tensor_release(out);
    te_group_release(g);
    CHECK(te_group_input(NULL, true) == TE_NO_VALUE && te_group_output(NULL, 0) == TE_ERROR_ARGUMENT);
    CHECK(te_group_apply(NULL, relu, &x, 1, NULL, 0, &y) == TE_ERROR_ARGUMENT && y == TE_NO_VALUE);
    CHECK(te_group_run(NULL, &t, &out) == TE_ERROR_ARGUMENT && !te_group_refused(NULL));
    CHECK(te_group_n_inputs(NULL) == 0 && te_group_n_outputs(NULL) == 0 && te_group_n_plans(NULL) == 0);
    te_tensor_release(empty);
    te_tensor_release(t);
    te_context_release(ctx);
}

/* What a host that looks at nothing passes on when tetrain_open gave NULL. */
static void test_no_runtime(void)
{
    te_context *none = tetrain_context(NULL);
    CHECK(te_context_error(none)[0] != 0);
    CHECK(!te_tensor_empty(none, TE_F32, 0, NULL) && !te_tensor_full(none, TE_F32, 0, NULL, 1));
    CHECK(!te_tensor_from_data(none, NULL, TE_F32, 0, NULL, NULL, NULL) && !te_group_new(none));
    CHECK(!te_op_find(none, "exp") && !te_op_at(none, 0));
    CHECK(!te_op_name(NULL) && !te_op_signature(NULL) && !te_op_doc(NULL));
    te_tensor *out = NULL;
    CHECK(te_op_run(none, NULL, NULL, 0, &out, 1) == TE_ERROR_ARGUMENT && !out);
    CHECK(te_tensor_dtype(NULL) == TE_DTYPE_COUNT && te_tensor_ndim(NULL) == 0 && !te_tensor_shape(NULL));
    CHECK(te_tensor_numel(NULL) == 0 && !te_tensor_data(NULL) && !te_tensor_device(NULL) && !te_tensor_context(NULL));
    CHECK(te_dtype_from_name(NULL) == TE_DTYPE_COUNT);
    test_no_context(none);
    tetrain_options many = {.struct_size = sizeof many, .threads = 1000000};
    tetrain        *rt = tetrain_open(&many);
    CHECK(te_context_threads(tetrain_context(rt)) == 1024);
    CHECK(!te_op_find(tetrain_context(rt), NULL));
    tetrain_close(rt);
}

static void test_tensors(void)
{
    tetrain   *rt = tetrain_open(NULL), *other = tetrain_open(NULL);
    te_tensor *in[2], *out[2] = {NULL, NULL};
    float      values[2] = {0};
    in[0] = te_tensor_full(tetrain_context(rt), TE_F32, 1, (int64_t[]){2}, 3);
    in[1] = te_tensor_full(tetrain_context(rt), TE_F32, 1, (int64_t[]){2}, 4);
    CHECK(run(rt, "m = { f = function(a, b) return a + b, a * b end, g = setmetatable({}, {__call = function(_, a) "
                  "return a end}) }") == TETRAIN_OK);
    CHECK(tetrain_call(rt, "m.f", in, 2, out, 2) == TETRAIN_OK);
    CHECK(out[1] && te_tensor_read(out[1], TE_F32, values) == TE_OK && values[0] == 12 && values[1] == 12);
    te_tensor_release(out[0]);
    te_tensor_release(out[1]);
    CHECK(tetrain_call(rt, "m.g", in, 1, out, 1) == TETRAIN_OK && out[0] == in[0]);
    te_tensor_release(out[0]);
    CHECK(tetrain_call(rt, "m.h", in, 1, out, 1) == TETRAIN_ERROR_SCRIPT && out[0] == NULL &&
          says(rt, "\"m.h\" is no function"));
    CHECK(tetrain_call(rt, "a.b.c", NULL, 0, NULL, 0) == TETRAIN_ERROR_SCRIPT);
    CHECK(tetrain_call(rt, "tostring", in, 1, out, 1) == TETRAIN_ERROR_SCRIPT && says(rt, "is no tensor"));
    CHECK(tetrain_call(other, "tostring", in, 1, out, 1) == TETRAIN_ERROR_ARGUMENT);
    CHECK(tetrain_set_tensor(rt, "t", in[0]) == TETRAIN_OK && run(rt, "t2 = t * 2") == TETRAIN_OK);
    te_tensor *result = tetrain_get_tensor(rt, "t2");
    CHECK(result && te_tensor_read(result, TE_F32, values) == TE_OK && values[0] == 6);
    CHECK(tetrain_get_tensor(rt, "m") == NULL && tetrain_get_tensor(rt, "none") == NULL);
    te_tensor_release(in[0]);
    te_tensor_release(in[1]);
    tetrain_close(rt);
    tetrain_close(other);
    CHECK(te_tensor_read(result, TE_F32, values) == TE_OK && values[1] == 6); /* outlives the runtime */
    te_tensor_release(result);
}

/* Any byte but 0 is true, as in the host's C. */
static void test_bools(void)
{
    tetrain      *rt = tetrain_open(NULL);
    unsigned char bytes[4096];
    for (int i = 0; i < 4096; i++) bytes[i] = (unsigned char)(i % 4 * 85);
    te_tensor *x = te_tensor_from_data(tetrain_context(rt), bytes, TE_BOOL, 1, (int64_t[]){4096}, NULL, NULL);
    CHECK(tetrain_set_tensor(rt, "x", x) == TETRAIN_OK);
    CHECK(run(rt, "local te = require 'te' local function n(t) return te.sum(t:to 'int64'):item() end\n"
                  "for b, wanted in pairs { [0] = { 1024, 3072, 0, 1024 }, { 3072, 1024, 1024, 4096 } } do\n"
                  "  local y = te.full({ 4096 }, b == 1)\n"
                  "  for _, y in ipairs { y, b } do\n"
                  "    for i, name in ipairs { 'eq', 'ne', 'lt', 'le' } do\n"
                  "      local found = n(te[name](x, y))\n"
                  "      assert(found == wanted[i], name .. b .. ': ' .. found)\n"
                  "    end\n"
                  "  end\n"
                  "end") == TETRAIN_OK);
    te_tensor_release(x);
    tetrain_close(rt);
}

static void on_pipe(int number) { (void)number; }

/* A script that owns the process ignores SIGPIPE, unless the host handles it. */
static void test_pipes(void)
{
    tetrain_options  options = {.struct_size = sizeof options, .flags = TETRAIN_MAY_EXIT};
    tetrain         *owner = tetrain_open(&options), *guest = tetrain_open(NULL);
    static const char code[] = "require('te')._core.ignore_sigpipe()";
    void (*before)(int) = signal(SIGPIPE, on_pipe);
    CHECK(run(owner, code) == TETRAIN_OK && signal(SIGPIPE, SIG_DFL) == on_pipe);
    CHECK(run(guest, code) == TETRAIN_OK && signal(SIGPIPE, SIG_DFL) == SIG_DFL);
    CHECK(run(owner, code) == TETRAIN_OK && signal(SIGPIPE, before) == SIG_IGN);
    tetrain_close(owner);
    tetrain_close(guest);
}

/* A graph with a Lua operation in it, used after the interpreter is gone. */
static void test_graph_outlives(void)
{
    tetrain *rt = tetrain_open(NULL);
    CHECK(run(rt, "local te = require 'te'\nx = te.ones({2}, {requires_grad = true})\n"
                  "y = te._core.custom(function(_, a) return a * 2 end, function(_, d) return d end, x):sum()") ==
          TETRAIN_OK);
    te_tensor *y = tetrain_get_tensor(rt, "y");
    CHECK(y != NULL);
    CHECK(te_backward(y, NULL, true) == TE_OK); /* the host itself calls backward */
    tetrain_close(rt);
    CHECK(te_backward(y, NULL, false) == TE_ERROR_ARGUMENT);
    te_tensor_release(y);
}

static void test_limits(void)
{
    tetrain_options options = {.struct_size = sizeof options, .instruction_limit = 1000000};
    tetrain        *rt = tetrain_open(&options);
    CHECK(run(rt, "while true do end") == TETRAIN_ERROR_LIMIT && says(rt, "instruction limit"));
    CHECK(run(rt, "while true do pcall(function() while true do end end) end") == TETRAIN_ERROR_LIMIT);
    CHECK(run(rt, "local co = coroutine.wrap(function() while true do end end) co()") == TETRAIN_ERROR_LIMIT);
    /* at the end of the stack */
    CHECK(run(rt, "local function f() pcall(f) return f() end f()") == TETRAIN_ERROR_LIMIT);
    CHECK(run(rt, "local function f() xpcall(f, function() end) return f() end f()") == TETRAIN_ERROR_LIMIT);
    CHECK(run(rt, "x = 1") == TETRAIN_OK);
    tetrain_close(rt);

    options =
        (tetrain_options){.struct_size = sizeof options, .lua_memory_limit = 4 << 20, .tensor_memory_limit = 8 << 20};
    rt = tetrain_open(&options);
    CHECK(run(rt, "local t = {} for i = 1, 1e9 do t[i] = {i} end") == TETRAIN_ERROR_MEMORY);
    CHECK(run(rt, "local s = 'x' while true do s = s .. s end") == TETRAIN_ERROR_MEMORY);
    CHECK(run(rt, "te = require 'te' kept = {} for i = 1, 100 do kept[i] = te.zeros(256, 1024) end") ==
          TETRAIN_ERROR_MEMORY);
    CHECK(says(rt, "out of memory"));
    CHECK(run(rt, "kept = nil for i = 1, 100 do te.zeros(256, 1024) end") == TETRAIN_OK); /* garbage is found in time */
    tetrain_close(rt);
}

static void test_restricted(void)
{
    tetrain_options options = {.struct_size = sizeof options, .flags = TETRAIN_RESTRICTED};
    tetrain        *rt = tetrain_open(&options);
    CHECK(run(rt, "for _, name in ipairs { 'io', 'os', 'package', 'debug', 'ffi', 'jit', 'dofile', 'loadfile' } do\n"
                  "if _G[name] ~= nil then error(name) end end") == TETRAIN_OK);
    CHECK_MSG(run(rt, "local te = require 'te' local m = te.Linear(3, 2) assert(m(te.ones(1, 3)).shape[2] == 2)") ==
                  TETRAIN_OK,
              "%s", tetrain_error(rt));
    CHECK(run(rt, "assert(rawget(require('te'), 'save') == nil and rawget(require('te'), 'from_file') == nil)") ==
          TETRAIN_OK);
    CHECK(run(rt, "require 'ffi'") == TETRAIN_ERROR_SCRIPT && run(rt, "print(1, {}, nil)") == TETRAIN_OK);
    CHECK(run(rt, "assert(not load('\\27LJ'))") == TETRAIN_OK);
    tetrain_close(rt);
}

static void *interrupt_later(void *rt)
{
    usleep(50000);
    tetrain_interrupt(rt);
    return NULL;
}

static void test_interrupt(void)
{
    static const char *const loops[] = {
        "local te = require 'te' local x = te.ones(4) while true do x = x + 1 end",
        "local te = require 'te' local x = te.ones(4) while true do pcall(function() x = x + 1 end) end"};
    tetrain  *rt = tetrain_open(NULL);
    pthread_t thread;
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_create(&thread, NULL, interrupt_later, rt) == 0);
        tetrain_status status = run(rt, loops[i]);
        CHECK_MSG(status == TETRAIN_ERROR_INTERRUPTED && says(rt, "interrupted"), "%d: %s", (int)status,
                  tetrain_error(rt));
        pthread_join(thread, NULL);
        CHECK(run(rt, "x = require('te').ones(1) + 1") == TETRAIN_OK);
    }
    CHECK(!tetrain_request_stop(rt)); /* nobody listens */
    tetrain_close(rt);
}

static void *train_alone(void *argument)
{
    double  *result = argument;
    tetrain *rt = tetrain_open(&(tetrain_options){.struct_size = sizeof(tetrain_options), .threads = 1});
    bool good = run(rt, "local te = require 'te' te.manual_seed(1) local w = te.randn({8, 8}, {requires_grad = true})\n"
                        "for i = 1, 50 do w.grad = nil te.sum(te.tanh(te.matmul(te.ones(4, 8), w)) ^ 2):backward()\n"
                        "te.no_grad(function() w:add_(w.grad * -0.1) end) end r = te.sum(w)") == TETRAIN_OK;
    te_tensor *r = good ? tetrain_get_tensor(rt, "r") : NULL;
    if (r) te_tensor_read(r, TE_F64, result);
    te_tensor_release(r);
    tetrain_close(rt);
    return NULL;
}

static void test_threads(void)
{
    pthread_t threads[2];
    double    results[2] = {1e9, -1e9};
    for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, train_alone, &results[i]) == 0);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    CHECK_MSG(results[0] == results[1], "%g and %g", results[0], results[1]);
}

int main(void)
{
    test_running();
    test_no_runtime();
    test_null_arguments();
    test_tensors();
    test_bools();
    test_pipes();
    test_graph_outlives();
    test_limits();
    test_restricted();
    test_interrupt();
    test_threads();
    return TEST_END();
}
