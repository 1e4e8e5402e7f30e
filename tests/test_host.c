/* test_host.c - the host interface where it meets the host: memory without copies, interrupts of every kind of script,
 * opening and closing without end, restricted scripts, and the library in a Lua state of the host's own.
 *
 *     test_host [N]      opens, trains and closes N times
 */
#include "test.h"

#include "tetrain/tetrain.h"

#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
#include <pthread.h>
#include <unistd.h>

static tetrain_status run(tetrain *rt, const char *code) { return tetrain_run_string(rt, code, strlen(code), "=test"); }

static bool says(tetrain *rt, const char *part) { return strstr(tetrain_error(rt), part) != NULL; }

/* --- memory of the host ------------------------------------------------------------------------------------------- */

static void count_deletion(void *user) { ++*(int *)user; }

static void test_no_copies(void)
{
    tetrain    *rt = tetrain_open(NULL);
    te_context *ctx = tetrain_context(rt);
    float       numbers[6] = {1, 2, 3, 4, 5, 6};
    int         deleted = 0;
    te_tensor  *t = te_tensor_from_data(ctx, numbers, TE_F32, 2, (int64_t[]){2, 3}, count_deletion, &deleted), *out;
    CHECK(te_tensor_data(t) == numbers);
    CHECK(tetrain_set_tensor(rt, "t", t) == TETRAIN_OK);
    /* the script writes here */
    CHECK(run(rt, "t:mul_(10) function same(x) return x:view(6) end") == TETRAIN_OK && numbers[5] == 60);
    numbers[0] = 7;
    CHECK(run(rt, "assert(t[1][1]:item() == 7)") == TETRAIN_OK); /* and reads what the host writes */
    CHECK(tetrain_call(rt, "same", &t, 1, &out, 1) == TETRAIN_OK && te_tensor_data(out) == numbers);
    te_tensor_release(out);
    te_tensor_release(t);
    CHECK(deleted == 0); /* Lua holds it */
    CHECK(tetrain_set_tensor(rt, "t", NULL) == TETRAIN_OK &&
          run(rt, "assert(t == nil) collectgarbage() collectgarbage()") == TETRAIN_OK);
    CHECK(deleted == 1);
    CHECK(run(rt, "r = require('te').tensor {1, 2, 3, 4}") == TETRAIN_OK);
    out = tetrain_get_tensor(rt, "r");
    float *data = out ? te_tensor_data(out) : NULL;
    CHECK(data && data[3] == 4);
    tetrain_close(rt);
    CHECK(data && data[0] == 1); /* held by the host */
    te_tensor_release(out);
}

/* Tensors are whole whatever a script made of what loads the library. */
static void test_tensors_without_require(unsigned flags)
{
    static const char *const deeds[] = {
        "function require() return {} end", "require = nil", "setmetatable = nil",
        "if package then package.loaded.te = {} package.preload.te = function() return {} end end",
    };
    for (size_t i = 0; i < sizeof deeds / sizeof *deeds; i++) {
        tetrain_options options = {.struct_size = sizeof options, .threads = 1, .flags = flags};
        tetrain        *rt = tetrain_open(&options);
        float           numbers[2] = {1, 2};
        int             deleted = 0;
        te_tensor      *t = te_tensor_from_data(tetrain_context(rt), numbers, TE_F32, 1, (int64_t[]){2},
                                                count_deletion, &deleted), *out = NULL;
        CHECK(run(rt, deeds[i]) == TETRAIN_OK);
        CHECK_MSG(tetrain_set_tensor(rt, "t", t) == TETRAIN_OK, "%s: %s", deeds[i], tetrain_error(rt));
        CHECK_MSG(run(rt, "t:mul_(10) function same(x) return x:view(2) end") == TETRAIN_OK, "%s: %s", deeds[i],
                  tetrain_error(rt));
        CHECK_MSG(tetrain_call(rt, "same", &t, 1, &out, 1) == TETRAIN_OK && numbers[1] == 20, "%s: %s", deeds[i],
                  tetrain_error(rt));
        te_tensor_release(out);
        te_tensor_release(t);
        tetrain_close(rt);
        CHECK_MSG(deleted == 1, "%s: the host's memory was never given back", deeds[i]);
    }
}

static void test_arguments(void)
{
    tetrain   *rt = tetrain_open(NULL);
    te_tensor *in[2] = {NULL, te_tensor_full(tetrain_context(rt), TE_F64, 0, NULL, 2)}, *out[2];
    CHECK(run(rt, "function f(a, b) assert(a == nil) return b, b * 2 end") == TETRAIN_OK);
    CHECK(tetrain_call(rt, "f", in, 2, out, 2) == TETRAIN_OK && *(double *)te_tensor_data(out[1]) == 4);
    te_tensor_release(out[0]);
    te_tensor_release(out[1]);
    CHECK(tetrain_call(rt, "f", in + 1, 1, out, 2) == TETRAIN_ERROR_SCRIPT && !out[0] && !out[1]);
    CHECK_MSG(says(rt, "test:1: assertion failed!\nstack traceback:\n\ttest:1:"), "%s", tetrain_error(rt));
    CHECK(tetrain_call(rt, "", in, 0, out, 0) == TETRAIN_ERROR_SCRIPT &&
          tetrain_call(rt, "..", in, 0, out, 0) == TETRAIN_ERROR_SCRIPT);
    CHECK(tetrain_run_file(rt, "/", 0, NULL) != TETRAIN_OK && *tetrain_error(rt));
    CHECK(tetrain_run_string(rt, "\033LJ", 3, "=b") == TETRAIN_ERROR_SCRIPT);
    CHECK(run(rt, "os.exit(3)") == TETRAIN_ERROR_SCRIPT && says(rt, "test:1: os.exit"));
    CHECK(run(rt, "require('te').train.run(function() end)") == TETRAIN_ERROR_SCRIPT);
    te_tensor_release(in[1]);
    tetrain_close(rt);
    /* an older host: the rest is not read */
    tetrain_options smaller = {.struct_size = offsetof(tetrain_options, threads), .threads = -77};
    rt = tetrain_open(&smaller);
    CHECK(rt && run(rt, "assert(require('te').get_num_threads() >= 1)") == TETRAIN_OK);
    tetrain_close(rt);
    memset(&smaller, 0xff, sizeof smaller);
    for (size_t size = 1; size < offsetof(tetrain_options, threads); size += 5) { /* nothing of a pointer's half */
        smaller.struct_size = size;
        rt = tetrain_open(&smaller);
        CHECK_MSG(rt && run(rt, "assert(require('te').get_default_device() == 'cpu')") == TETRAIN_OK, "%zu", size);
        tetrain_close(rt);
    }
}

/* What a host does that does not look at what tetrain_open gave, or passes nothing where something is wanted. */
static void test_null(void)
{
    int64_t         shape[] = {2};
    float           numbers[2] = {1, 2};
    te_tensor      *out[1];
    tetrain_options forgotten = {.flags = TETRAIN_RESTRICTED};
    CHECK(!te_context_open(&(te_context_options){.tensor_memory_limit = 1}));
    tetrain        *rt = tetrain_open(&forgotten);
    CHECK(rt == NULL && tetrain_context(rt) == NULL && tetrain_lua_state(rt) == NULL && *tetrain_error(rt) &&
          !tetrain_request_stop(rt) && !tetrain_interrupt_pending(rt));
    CHECK(run(rt, "x = 1") == TETRAIN_ERROR_ARGUMENT &&
          tetrain_run_file(rt, "x.lua", 0, NULL) == TETRAIN_ERROR_ARGUMENT);
    CHECK(tetrain_call(rt, "f", NULL, 0, out, 1) == TETRAIN_ERROR_ARGUMENT && out[0] == NULL);
    CHECK(tetrain_set_tensor(rt, "x", NULL) == TETRAIN_ERROR_ARGUMENT && tetrain_get_tensor(rt, "x") == NULL);
    CHECK(te_tensor_from_data(tetrain_context(rt), numbers, TE_F32, 1, shape, NULL, NULL) == NULL &&
          te_tensor_data(NULL) == NULL);
    tetrain_interrupt(rt);
    tetrain_close(rt);
    rt = tetrain_open(NULL);
    CHECK(tetrain_run_string(rt, NULL, 0, NULL) == TETRAIN_OK &&
          tetrain_run_string(rt, NULL, 9, NULL) == TETRAIN_ERROR_ARGUMENT);
    CHECK(tetrain_run_file(rt, "x.lua", 2, NULL) == TETRAIN_ERROR_ARGUMENT && says(rt, "2 arguments at NULL"));
    CHECK(tetrain_call(rt, NULL, NULL, 0, NULL, 0) == TETRAIN_ERROR_ARGUMENT && says(rt, "function NULL"));
    CHECK(tetrain_call(rt, "print", NULL, 1, NULL, 0) == TETRAIN_ERROR_ARGUMENT && says(rt, "1 tensors at NULL"));
    CHECK(tetrain_set_tensor(rt, "a.b", NULL) == TETRAIN_ERROR_ARGUMENT && says(rt, "\"a.b\" is no name of a global"));
    CHECK(tetrain_get_tensor(rt, NULL) == NULL && says(rt, "the name is NULL"));
    CHECK(te_tensor_from_data(tetrain_context(rt), numbers, TE_F32, 1, NULL, NULL, NULL) == NULL);
    CHECK(te_tensor_from_data(tetrain_context(rt), (char *)numbers + 1, TE_F32, 1, (int64_t[]){1}, NULL, NULL) == NULL);
    CHECK(strstr(te_context_error(tetrain_context(rt)), "is not aligned for float32"));
    CHECK(run(rt, "error()") == TETRAIN_ERROR_SCRIPT && says(rt, "error value of type nil"));
    tetrain_close(rt);
}

/* --- interrupts --------------------------------------------------------------------------------------------------- */

static void *interrupt_later(void *rt)
{
    usleep(30000);
    tetrain_interrupt(rt);
    return NULL;
}

static void test_interrupts(void)
{
    static const char *const loops[] = {
        "while true do end",
        "while true do pcall(function() while true do end end) end",
        "local function f() return f() end f()",
        "local co = coroutine.wrap(function() while true do pcall(coroutine.yield) end end) while true do co() end",
        "xpcall(function() while true do end end, function() while true do end end)",
        "local co = coroutine.wrap(function() xpcall(coroutine.yield, print) while true do end end) co() co()",
        "local function f() pcall(f) return f() end f()",
        "local function f() pcall(f) pcall(f) end f()",
        "repeat xpcall(function() error('x') end, function() while true do end end) until false",
        "local t = setmetatable({}, {__index = function() while true do end end}) local _ = t.x",
        "local te = require 'te' te._core.sleep(1000)",
        ("local te = require 'te' local x = te.ones(64, 64) while true do te.no_grad(function() te.matmul(x, x) end) "
         "end"),
        "local te = require 'te' te.no_grad(function() while true do end end)",
        "for _ in function() return 1 end do string.gsub('aaa', 'a', function() while true do end end) end",
        "if jit then jit.on() end local i = 0 while true do i = i + 1 end",
        "if debug then debug.sethook() end while true do end",
    };
    tetrain_options options = {.struct_size = sizeof options, .threads = 1, .flags = TETRAIN_INTERPRETED};
    tetrain        *rt = tetrain_open(&options);
    for (size_t i = 0; i < sizeof loops / sizeof *loops; i++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, interrupt_later, rt) == 0);
        tetrain_status status = run(rt, loops[i]);
        CHECK_MSG(status == TETRAIN_ERROR_INTERRUPTED && says(rt, "interrupted"), "%s: %d, %s", loops[i], (int)status,
                  tetrain_error(rt));
        pthread_join(thread, NULL);
        CHECK(run(rt, "assert(require('te').ones(1):item() == 1)") == TETRAIN_OK);
    }
    tetrain_interrupt(rt); /* nothing runs: the next call ends */
    CHECK(run(rt, "while true do end") == TETRAIN_ERROR_INTERRUPTED && run(rt, "x = 1") == TETRAIN_OK);
    /* finalizers run without hooks, and those of files are out of reach */
    CHECK_MSG(run(rt, "local f, n = io.tmpfile(), 0 assert(not getmetatable(f) and not f.__gc and not f.__index)\n"
                      "assert(io.type(f) == 'file' and f:write('a\\nb\\n') and f:seek('set') == 0)\n"
                      "for _ in f:lines() do n = n + 1 end assert(n == 2 and tostring(f):find('^file'))\n"
                      "assert(f:close() and io.type(f) == 'closed file')") == TETRAIN_OK,
              "%s", tetrain_error(rt));
    tetrain_close(rt);
}

static void interrupt_at_i(void *user, int level, const char *message)
{
    (void)level;
    if (strcmp(message, "i") == 0) tetrain_interrupt(*(tetrain **)user);
}

/* One that comes when the script has failed already is pending, and the next call's. What scripts set by other ways
 * than scopes ends with their call. */
static void test_late_interrupt(void)
{
    tetrain        *rt;
    tetrain_options options = {.struct_size = sizeof options, .threads = 1, .flags = TETRAIN_RESTRICTED,
                               .log = interrupt_at_i, .user = &rt};
    rt = tetrain_open(&options);
    CHECK(run(rt, "core = require('te')._core") == TETRAIN_OK);
    CHECK(run(rt, "print 'i' error 'x'") == TETRAIN_ERROR_SCRIPT && tetrain_interrupt_pending(rt));
    CHECK(run(rt, "x = 1") == TETRAIN_ERROR_INTERRUPTED && !tetrain_interrupt_pending(rt));
    CHECK(run(rt, "x = 1") == TETRAIN_OK);
    CHECK(run(rt, "core.set_grad_enabled(false) core.set_compute_dtype 'bfloat16'") == TETRAIN_OK);
    CHECK(run(rt, "assert(core.grad_enabled() and core.compute_dtype() == nil)") == TETRAIN_OK);
    tetrain_close(rt);
}

/* An interrupt waits for the call that ends with it. */
static void test_interrupts_wait(unsigned flags)
{
    tetrain_options options = {.struct_size = sizeof options, .threads = 1, .flags = flags};
    tetrain        *rt = tetrain_open(&options);
    CHECK(run(rt, "q = require('te').ones(2) function f() return q end") == TETRAIN_OK);
    tetrain_interrupt(rt);
    te_tensor *q = tetrain_get_tensor(rt, "q"), *out;
    CHECK(q && tetrain_get_tensor(rt, "nothing") == NULL && says(rt, "is no tensor"));
    CHECK(run(rt, "x = = 1") == TETRAIN_ERROR_SCRIPT && says(rt, "unexpected symbol"));
    CHECK(run(rt, "x = 1") == TETRAIN_ERROR_INTERRUPTED && run(rt, "assert(x == nil)") == TETRAIN_OK);
    tetrain_interrupt(rt);
    CHECK(tetrain_interrupt_pending(rt));
    CHECK(run(rt, "") == TETRAIN_ERROR_INTERRUPTED && run(rt, "") == TETRAIN_OK && !tetrain_interrupt_pending(rt));
    tetrain_interrupt(rt);
    CHECK(tetrain_call(rt, "f", NULL, 0, &out, 1) == TETRAIN_ERROR_INTERRUPTED && !out);
    CHECK(tetrain_call(rt, "f", NULL, 0, &out, 1) == TETRAIN_OK && out);
    te_tensor_release(out);
    tetrain_interrupt(rt);
    CHECK(tetrain_set_tensor(rt, "p", q) == TETRAIN_ERROR_INTERRUPTED && tetrain_set_tensor(rt, "p", q) == TETRAIN_OK);
    CHECK(run(rt, "setmetatable(_G, {__index = function() while true do end end})") == TETRAIN_OK);
    tetrain_interrupt(rt);
    CHECK(!tetrain_get_tensor(rt, "nowhere") && says(rt, "interrupted") && run(rt, "x = 1") == TETRAIN_OK);
    te_tensor_release(q);
    tetrain_close(rt);
}

/* The engine's interrupt is about operations, and lasts until it is cleared. */
static void test_interrupted_engine(unsigned flags)
{
    static const char sum[] = "x = te.ones(3):sum():item()";
    tetrain_options   options = {.struct_size = sizeof options, .threads = 1, .flags = flags,
                                 .instruction_limit = 1000000};
    tetrain          *rt = tetrain_open(&options);
    te_context       *ctx = tetrain_context(rt);
    CHECK(run(rt, "te = require 'te' te.ones(1)") == TETRAIN_OK);
    te_context_interrupt(ctx);
    for (int i = 0; i < 2; i++)
        CHECK_MSG(run(rt, sum) == TETRAIN_ERROR_INTERRUPTED && says(rt, "interrupted"), "%s", tetrain_error(rt));
    CHECK_MSG(run(rt, "assert(not pcall(te.ones, 3)) for i = 1, 1e5 do x = i end") == TETRAIN_OK, "%s",
              tetrain_error(rt));
    CHECK(!te_tensor_full(ctx, TE_F32, 1, (int64_t[]){3}, 1));
    tetrain_interrupt(rt); /* is over with the call, the other is not */
    CHECK(run(rt, "while true do end") == TETRAIN_ERROR_INTERRUPTED && run(rt, "x = 1") == TETRAIN_OK);
    CHECK(run(rt, sum) == TETRAIN_ERROR_INTERRUPTED);
    te_context_clear_interrupt(ctx);
    CHECK_MSG(run(rt, sum) == TETRAIN_OK, "%s", tetrain_error(rt));
    tetrain_close(rt);
}

/* --- opening and closing ------------------------------------------------------------------------------------------ */

static size_t resident(void)
{
    unsigned long pages = 0;
    FILE         *file = fopen("/proc/self/statm", "r");
    if (file && fscanf(file, "%*u %lu", &pages) != 1) pages = 0;
    if (file) fclose(file);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static void train_once(void)
{
    static const char step[] =
        "local te = require 'te' local m = te.Sequential(te.Linear(8, 16), te.GELU(), te.Linear(16, 4))\n"
        "local o = te.optim.SGD(m:parameters(), {lr = 0.1}) m(te.ones{4, 8}):sum():backward() o:step()";
    tetrain_options options = {.struct_size = sizeof options, .threads = 1};
    tetrain        *rt = tetrain_open(&options);
    CHECK_MSG(rt && run(rt, step) == TETRAIN_OK, "%s", rt ? tetrain_error(rt) : "not opened");
    tetrain_close(rt);
}

static void test_open_and_close(int times)
{
    int warm = times / 5;
    for (int i = 0; i < warm; i++) train_once();
    size_t before = resident();
    for (int i = warm; i < times; i++) train_once();
    size_t after = resident();
    printf("resident memory %.2f MB after %d times, %.2f MB after %d\n", (double)before / (1 << 20), warm,
           (double)after / (1 << 20), times);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* they keep freed memory aside */
    CHECK_MSG(after < before + (4 << 20), "%zu bytes grew to %zu", before, after);
#endif
}

/* --- restricted --------------------------------------------------------------------------------------------------- */

typedef struct lines {
    int  n;
    char last[256];
} lines;

static void take_line(void *user, int level, const char *message)
{
    lines *l = user;
    (void)level;
    l->n++;
    snprintf(l->last, sizeof l->last, "%s", message);
}

/* Each must fail or find nothing; what gets through sets `escaped`. */
static const char *const escapes[] = {
    "escaped = io or os or debug or package or ffi or jit",
    "escaped = require('io')", "escaped = require('os').execute", "escaped = require('ffi')",
    "escaped = require('debug')",
    "escaped = require('jit')", "escaped = require('package')", "escaped = require('/etc/passwd')",
    "escaped = require('string.buffer')",
    "escaped = dofile or loadfile or module or newproxy or collectgarbage",
    "escaped = getfenv(0).io", "escaped = getfenv(print).os", "escaped = getmetatable('').__index.dump",
    "escaped = string.dump",
    "escaped = load('\\27LJ\\2\\8')", "escaped = loadstring('\\27LJ\\1')",
    "escaped = load(function() return '\\27LJ' end)",
    "escaped = load('return io', 'x', 'b')()", "escaped = load('return os', 'x', 'bt', _G)()",
    "escaped = rawget(require('te'), 'save')", "escaped = rawget(require('te'), 'load')",
    "escaped = rawget(require('te'), 'from_file')",
    "escaped = require('te')._core.list_dir", "escaped = require('te')._core.stat",
    "escaped = require('te')._core.mkdir", "escaped = require('te')._core.write_file",
    /* LuaJIT opens its ffi library by itself at a number of 64 bits */
    "assert(load('return 1LL')() + 1 == 2) escaped = require('ffi')", "local x = 1ULL escaped = require('ffi')",
    "local x = 3i escaped = require('ffi').C", "escaped = tonumber('1LL') and require('ffi')",
    "escaped = require('te')._core.safetensors_read", "escaped = require('te')._core.safetensors_write",
    "escaped = require('te')._core.tokens_open", "escaped = require('te')._core.executable",
    "escaped = require('te')._core.sleep", "escaped = require('te')._core.tokenizer",
    "require('te').tokenizer.load('/etc/passwd') escaped = 1",
    "escaped = require('te')._core.safetensors_entries", "escaped = require('te')._core.rss",
    "escaped = require('te')._core.isatty",
    "require('te').data.open {path = '/etc/passwd'} escaped = 1",
    "require('te').train.Metrics.open('/tmp/x', 0) escaped = 1",
    "require('te').train.checkpoint.latest('/') escaped = 1", "require('te').train.run(function() end) escaped = 1",
    "require('te.tools.doctor') {} escaped = 1", "require('te.tools.inspect') {'/etc/passwd'} escaped = 1",
    "escaped = type(getmetatable(require('te').ones(1))) == 'table' and getmetatable(require('te').ones(1)).__gc",
    "local t = require('te').ones(1) getmetatable(t).__gc = function() end escaped = 1",
    "escaped = require('te')._core.tensor_metatable",
    /* no table within reach has a finalizer in it */
    "local te, seen = require('te'), {} local function look(t) if type(t) ~= 'table' or seen[t] then return end "
    "seen[t] = true escaped = escaped or rawget(t, '__gc') look(getmetatable(t)) "
    "for k, v in next, t do look(k) look(v) look(getmetatable(v)) end end "
    "te.Linear(2, 2) te.optim.SGD({te.ones(1)}, {lr = 1}) look(_G) look(te) look(te._core)",
    "setmetatable(require('te').ones(1), {}) escaped = 1", "debug.setmetatable(1, {}) escaped = 1",
    "for i = 1, 300 do require('te').set_num_threads(1024) end escaped = require('te').get_num_threads() > 1",
    "local t = require('te').ones(4) escaped = t[5]", "local t = require('te').ones(4) t:release() escaped = t:item()",
    "escaped = require('te').empty(4):view(2^53)", "escaped = require('te').ones(4):narrow(1, 3, 9)",
    "escaped = require('te').ones(4):index_select(1, require('te').tensor({99}, {dtype = 'int64'}))",
    "escaped = require('te').embedding(require('te').ones(4, 2), require('te').tensor({-1}, {dtype = 'int64'}))",
    "require('te')._core.record(1, 2, 3, 4) escaped = 1", "require('te')._core.adamw_step {1} escaped = 1",
    "require('te')._core.custom(1, 2) escaped = 1", "require('te')._core.nearest(1, {{}, {}}) escaped = nil error()",
    "local te = require('te') te._core.tensor_methods.item(io) escaped = 1",
    "error(setmetatable({}, {__tostring = function() error(1) end}))",
    "local s = ('x'):rep(1e9) escaped = s", "local s = string.format('%99999d', 1) escaped = s",
    "string.rep('x', -1) escaped = unpack({}, 1, 1e8)",
    "local function f() return f() + 1 end escaped = f()",
    "escaped = string.gsub(('a'):rep(1e5), '.', function() return ('b'):rep(1e4) end)",
    "local t = {} t.t = t for i = 1, 1e8 do t = setmetatable({t}, {__index = t}) end escaped = 1",
    "coroutine.wrap(function() while true do coroutine.wrap(function() while true do end end)() end end)() escaped = 1",
    "local co co = coroutine.create(function() coroutine.resume(co) while true do end end) coroutine.resume(co) "
    "escaped = 1",
    "xpcall(function() while true do end end, function() while true do end end) escaped = 1",
    "table.sort({3, 1, 2, 5, 4}, function() while true do end end) escaped = 1",
    "setfenv(0, {}) escaped = nil error()", "setfenv(print, {}) escaped = 1",
    "for k, v in pairs(_G) do if type(v) == 'table' and (v.open or v.execute or v.loadlib) then escaped = k end end",
    "for k, v in pairs(getfenv(1)) do if k == 'io' or k == 'os' then escaped = k end end",
    "local function walk(t, seen, depth) if seen[t] or depth > 6 then return end seen[t] = true for k, v in pairs(t) "
    "do\n"
    "if k == 'popen' or k == 'execute' or k == 'loadlib' or k == 'getregistry' or k == 'dump' or k == 'cdef' then "
    "escaped = k end\n"
    "if type(v) == 'table' then walk(v, seen, depth + 1) end end end walk(_G, {}, 0) walk(require('te'), {}, 0)",
    "escaped = getmetatable(require('te')).__index(nil, 'save')", "escaped = rawequal(getfenv(require), _G) == false",
    "escaped = getmetatable(coroutine.create(function() end))", "escaped = getmetatable(print)",
    "escaped = getmetatable(1)",
    "getmetatable('').__index = function() return io end escaped = ('x').y", "string.find = nil escaped = ('x').dump",
    "escaped = require('te').load", "escaped = require('te').save",
    "escaped = require('te')._core.library_sources().passwd",
    "for name in pairs(require('te')._core.library_sources()) do if name:find('^/') or name:find('%.%.') then escaped "
    "= name end end",
    "escaped = require('te.../../etc/passwd')", "escaped = require('te\\0x')", "escaped = require('')",
    "require(setmetatable({}, {__tostring = function() return 'io' end})) escaped = 1",
    "escaped = loadstring('return io or os')()", "escaped = setfenv(loadstring('return io'), {io = false})()",
    "escaped = load('return ...', nil, nil, nil)() and io",
    "escaped = pcall(load, '\\27LJ', 'x', 'b') and load('\\27LJ', 'x', 'b')",
    "escaped = xpcall(function() return io.open end, function() return nil end) and io",
    "escaped = select(2, pcall(require, 'ffi')).C",
    "escaped = require('te').ones(2):storage_id() < 0", "escaped = require('te').ones(2).data",
    "escaped = require('te').ones(2).ptr",
    "escaped = #tostring(require('te').ones(2)) > 1e6",
    "local t = require('te').ones(2) t.shape[1] = 1e9 escaped = t.shape[1] == 1e9",
    "local t = require('te').ones(2) t.shape = {9} escaped = 1", "escaped = require('te').empty({2^31, 2^31})",
    "escaped = require('te').empty(-1)",
    "escaped = require('te').ones(4):view(2, 2):expand(2, 2^60)",
    "escaped = require('te').tensor({1}):gather(1, require('te').tensor({-5}, {dtype = 'int64'}))",
    "escaped = require('te').ones(2, 2):narrow(1, -9, 2)", "escaped = require('te').ones(2)[-3]",
    "escaped = require('te').ones(2)[0]",
    "local te = require('te') local t = te.ones(4) t:release() t:add_(1) escaped = 1",
    "require('te').manual_seed(0/0) escaped = 1",
    "os = {exit = 1} escaped = nil", "print = nil escaped = print", "_G.require = nil escaped = require",
};

static void test_restricted(void)
{
    lines           printed = {0};
    tetrain_options options = {.struct_size = sizeof options, .threads = 1, .lua_memory_limit = 8 << 20,
                               .tensor_memory_limit = 8 << 20,
                               .instruction_limit = 20000000, .flags = TETRAIN_RESTRICTED, .log = take_line,
                               .user = &printed};
    tetrain        *rt = tetrain_open(&options);
    CHECK(run(rt, "print('a', 1, nil)") == TETRAIN_OK && printed.n == 1 && strcmp(printed.last, "a\t1\tnil") == 0);
    CHECK(run(rt, "print('x\\0y\\0', 1)") == TETRAIN_OK && strcmp(printed.last, "x\\0y\\0\t1") == 0);
    CHECK(run(rt, "require('te').data.open { path = '/' }") == TETRAIN_ERROR_SCRIPT &&
          says(rt, "test:1: te.data.open: scripts of this host reach no files"));
    CHECK(run(rt, "require('te').data.open { tokens = { 1, 2, 3 }, block = 1 }") == TETRAIN_ERROR_SCRIPT &&
          says(rt, "test:1: te.data.open: scripts of this host reach no files"));
    CHECK(run(rt, "require('te').data.open {}") == TETRAIN_ERROR_SCRIPT && says(rt, "reach no files"));
    CHECK_MSG(run(rt, "local te = require('te') local a = te.Linear(2, 2) local b = a:clone() "
                      "te.no_grad(b.weight.zero_, b.weight) assert(te.any(te.ne(a.weight, b.weight)):item())") ==
                  TETRAIN_OK,
              "%s", tetrain_error(rt));
    CHECK(run(rt, "require('te').profile(function() end):save_trace('/x')") == TETRAIN_ERROR_SCRIPT &&
          says(rt, "reach no files"));
    CHECK(run(rt, "assert(require('te.recipe.faster').path() == nil)") == TETRAIN_OK);
    CHECK(run(rt, "require('te').load('/x')") == TETRAIN_ERROR_SCRIPT &&
          says(rt, "test:1: te.load: scripts of this host reach no files"));
    CHECK(run(rt, "require('te').train.checkpoint.claim('/x', true)") == TETRAIN_ERROR_SCRIPT &&
          says(rt, "test:1: te.train.checkpoint.claim: scripts of this host reach no files"));
    CHECK(run(rt, "require('te').train.Metrics.open('/x', 0)") == TETRAIN_ERROR_SCRIPT && says(rt, "reach no files"));
    for (size_t i = 0; i < sizeof escapes / sizeof *escapes; i++) {
        run(rt, "escaped = nil");
        run(rt, escapes[i]);
        CHECK_MSG(run(rt, "if escaped then error('escaped') end") == TETRAIN_OK, "%s: %s", escapes[i],
                  tetrain_error(rt));
    }
    tetrain_close(rt);
}

/* --- a state of the host's own ------------------------------------------------------------------------------------ */

static void test_foreign_state(void)
{
    lua_State *L = luaL_newstate();
    luaL_openlibs(L);
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "preload");
    lua_pushcfunction(L, luaopen_te);
    lua_setfield(L, -2, "te");
    lua_settop(L, 0);
    const char *code = "local te = require 'te'\n"
                       "local m = te.Sequential(te.Linear(3, 4), te.GELU())\n"
                       "m(te.ones{2, 3}):sum():backward()\n"
                       "assert(m[1].weight.grad and te == require 'te')\n"
                       "local co = coroutine.wrap(function() return te.sum(te.ones(5)):item() end)\n"
                       "assert(co() == 5)\n"
                       "local ok, message = pcall(te.matmul, te.ones(2, 3), te.ones(2, 3))\n"
                       "assert(not ok and message:find('te.matmul', 1, true), message)\n"
                       "kept = m";
    int failed = luaL_loadbuffer(L, code, strlen(code), "=foreign") || lua_pcall(L, 0, 0, 0);
    CHECK_MSG(!failed, "%s", failed ? lua_tostring(L, -1) : "");
    lua_close(L);
}

/* However often it is opened, a state has one library. */
static void test_opened_again(void)
{
    static const char foreign[] =
        "assert(a == b)\n"
        "assert(a.Sequential(b.Linear(2, 2), require('te').GELU())(a.ones{1, 2}):numel() == 2)";
    static const char forgets[] =
        "local te, Module = require 'te', require 'te.module'\n"
        "local linear = te.Linear(2, 2)\n"
        "package.loaded.te = nil\n"
        "assert(require 'te' == te)\n"
        "for name in pairs(package.loaded) do if name:find '^te' then package.loaded[name] = nil end end\n"
        "assert(require 'te' == te and require 'te.module' == Module)\n"
        "assert(te.Sequential(linear, te.GELU())(te.ones{1, 2}):numel() == 2)";
    lua_State *L = luaL_newstate();
    luaL_openlibs(L);
    for (int i = 0; i < 2; i++) {
        lua_pushcfunction(L, luaopen_te);
        lua_call(L, 0, 1);
        lua_setglobal(L, i ? "b" : "a");
    }
    int failed = luaL_loadbuffer(L, foreign, sizeof foreign - 1, "=foreign") || lua_pcall(L, 0, 0, 0);
    CHECK_MSG(!failed, "%s", failed ? lua_tostring(L, -1) : "");
    lua_close(L);
    tetrain *rt = tetrain_open(NULL);
    CHECK_MSG(run(rt, forgets) == TETRAIN_OK, "%s", tetrain_error(rt));
    tetrain_close(rt);
}

/* Memory where a tensor's handle once lay is no tensor: userdata that the host made and has not written yet. */
static void test_userdata_of_the_host(void)
{
    tetrain   *rt = tetrain_open(NULL);
    lua_State *L = tetrain_lua_state(rt);
    CHECK(run(rt, "te = require('te') keep = te.ones(3) check = te._core.adamw_send") == TETRAIN_OK);
    for (int round = 0; round < 60; round++) {
        CHECK(run(rt, "local t = {} for i = 1, 300 do t[i] = te.zeros(1) end for i = 1, 300, 2 do t[i] = nil end "
                      "collectgarbage() collectgarbage()") == TETRAIN_OK);
        for (int i = 0; i < 100; i++) {
            lua_getglobal(L, "te");
            lua_getfield(L, -1, "sum");
            lua_newuserdata(L, 16 + (size_t)(i % 8) * 8);
            CHECK(lua_pcall(L, 1, 0, 0) != 0);
            CHECK_MSG(strstr(lua_tostring(L, -1), "tensor"), "%s", lua_tostring(L, -1));
            lua_settop(L, 0);
        }
        CHECK(run(rt, "local ok, message = pcall(check, keep, {}) assert(message:find 'got nothing', message)") ==
              TETRAIN_OK);
    }
    tetrain_close(rt);
}

int main(int argc, char **argv)
{
    test_no_copies();
    test_tensors_without_require(0);
    test_tensors_without_require(TETRAIN_RESTRICTED);
    test_arguments();
    test_null();
    test_interrupts();
    test_late_interrupt();
    test_interrupts_wait(0);
    test_interrupts_wait(TETRAIN_INTERPRETED);
    test_interrupts_wait(TETRAIN_RESTRICTED);
    test_interrupted_engine(0);
    test_interrupted_engine(TETRAIN_RESTRICTED);
    test_open_and_close(argc > 1 ? atoi(argv[1]) : 100);
    test_restricted();
    test_foreign_state();
    test_opened_again();
    test_userdata_of_the_host();
    return TEST_END();
}
