/* test_host_hostile.c - scripts that want to stay, to grow or to break something: every deed in every place from which
 * Lua can be made to run code, restricted and not. Each ends in a status, within the limits, and the runtime answers
 * the next call. */
#include "test.h"

#include "tetrain/tetrain.h"

#include <pthread.h>

/* What a script does. */
static const char *const deeds[] = {
    "while true do end",
    "while true do pcall(function() while true do end end) end",
    "while true do xpcall(error, function() end) end",
    "local function f() return f() end return f()",
    "local function f() return 1 + f() end return f()",
    "local function f() return pcall(f) end return f()",
    "local s = 'x' while true do s = s .. s end",
    "local t = {} for i = 1, 1e9 do t[i] = {i} end",
    "local t = {} for i = 1, 1e9 do t[i] = ('x'):rep(1000) .. i end",
    "local t = {} while true do t = {t} end",
    "local t = {} while true do pcall(function() for i = 1, 1e9 do t[#t + 1] = {} end end) end",
    "local f = function() end while true do local g = f f = function() return g() end end",
    "return ('x'):rep(1e9)",
    "return table.concat({('x'):rep(1e5), ('y'):rep(1e5)}, ('z'):rep(1e5)):rep(100)",
    "return string.format(('%s'):rep(200), unpack({}, 1, 200))",
    "return unpack({}, 1, 1e7)",
    "return select('#', unpack({}, 1, 700))",
    "error()",
    "error({})",
    "error(setmetatable({}, {__tostring = function() error('again') end}))",
    "error(setmetatable({}, {__tostring = function() while true do end end}))",
    "error(setmetatable({}, {__tostring = function() return {} end}))",
    "error(('long '):rep(1e3))",
    "error(coroutine.create(function() end))",
    "local co co = coroutine.wrap(function() co() end) co()",
    "local function f() return coroutine.wrap(f)() end f()",
    ("local list = {} for i = 1, 1e6 do list[i] = coroutine.create(function() coroutine.yield() end) "
     "coroutine.resume(list[i]) end"),
    "coroutine.yield()",
    "local kept = {} for i = 1, 1e6 do kept[i] = te.ones(256, 256) end",
    "local x = te.ones(8, 8) while true do x = te.matmul(x, x) end",
    "local x = te.ones({8}, {requires_grad = true}) while true do x = x * 1 end",
    "return te.empty(2^40)",
    "return te.ones(1):expand(2^30):contiguous()",
    "local x = te.ones({2}, {requires_grad = true}) x.grad = x:detach() * 2 x.grad = x return x:sum():backward()",
    "local x = te.ones(3) x:release() x:release() return x + x",
    "return te.tensor(setmetatable({}, {__index = function() return {} end}))",
    "local t = {} t[1] = t return te.tensor(t)",
    "return te.zeros(setmetatable({}, {__len = function() return 1e9 end}))",
    "return te.Linear(2^40, 2)",
    "return te.Sequential(te.Linear(2, 2), function() while true do end end)(te.ones(1, 2))",
    "local m = te.Sequential() m[1] = m return m(te.ones(2))",
    "local M = te.Module:extend('M') function M:init() self.self = self end return M():parameters()",
    "return te.optim.AdamW({te.ones({2}, {requires_grad = true})}, {lr = 0/0}):step()",
    "return te.checkpoint(function(x) return te.checkpoint(error, x) end, te.ones({2}, {requires_grad = true}))",
    "while true do te.manual_seed(1) te.randn{4} end",
};

/* Where it does it: DEED stands for the code. */
static const char *const places[] = {
    "DEED",
    "pcall(function() DEED end)",
    "repeat pcall(function() DEED end) until false",
    "xpcall(function() DEED end, function() DEED end)",
    "xpcall(function() error('x') end, function() DEED end)",
    "coroutine.wrap(function() DEED end)()",
    "local co = coroutine.create(function() DEED end) while coroutine.resume(co) do end",
    "local _ = setmetatable({}, {__index = function() DEED end}).x",
    "local _ = setmetatable({}, {__add = function() DEED end}) + 1",
    "local _ = tostring(setmetatable({}, {__tostring = function() DEED end}))",
    "error(setmetatable({}, {__tostring = function() DEED end}))",
    "table.sort({3, 1, 2}, function() DEED end)",
    "string.gsub('abc', '.', function() DEED end)",
    "load(function() DEED end)",
    "for _ in function() DEED end do end",
    "te.no_grad(function() DEED end)",
    "te.autocast({}, function() pcall(function() DEED end) end)",
    "te._core.custom(function(_, x) DEED end, function() end, te.ones({2}, {requires_grad = true}))",
    "te._core.custom(function(_, x) return x * 2 end, function() DEED end, te.ones({2}, {requires_grad = "
    "true})):sum():backward()",
    "local M = te.Module:extend('M') function M:forward() DEED end M()(te.ones(2))",
    "local O = te.BasicOperation:extend('O') function O:op_forward() DEED end te.Sequential(O())(te.ones(2))",
    "te.gradcheck(function() DEED end, {te.ones({1}, {dtype = 'float64'})})",
    "if newproxy then for i = 1, 50 do getmetatable(newproxy(true)).__gc = function() DEED end end end for i = 1, 3e4 "
    "do local _ = {} end",
    "setmetatable(_G, {__index = function() DEED end}) local _ = nowhere setmetatable(_G, nil)",
};

enum { N_DEEDS = sizeof deeds / sizeof *deeds, N_PLACES = sizeof places / sizeof *places };

static void write_script(char *code, size_t size, const char *place, const char *deed)
{
    size_t n = 0;
    n += (size_t)snprintf(code + n, size - n, "local te = require 'te' ");
    for (const char *at = place; *at && n + 1 < size; at++) {
        if (strncmp(at, "DEED", 4) != 0) {
            code[n++] = *at;
            continue;
        }
        n += (size_t)snprintf(code + n, size - n, "do %s end", deed); /* a block of its own: some end with return */
        at += 3;
    }
    code[n] = 0;
}

static tetrain *open_runtime(unsigned flags)
{
    tetrain_options options = {.struct_size = sizeof options, .threads = 1, .lua_memory_limit = 6 << 20,
                               .tensor_memory_limit = 4 << 20,
                               .instruction_limit = 100000, .flags = flags};
    return tetrain_open(&options);
}

static void check_script(tetrain *rt, const char *code, int *counts)
{
    static const char after[] = "assert(require('te').ones(3):sum():item() == 3)";
    tetrain_status    status = tetrain_run_string(rt, code, strlen(code), "=hostile");
    bool known = status == TETRAIN_OK || status == TETRAIN_ERROR_SCRIPT || status == TETRAIN_ERROR_MEMORY ||
                 status == TETRAIN_ERROR_LIMIT;
    CHECK_MSG(known, "%s: status %d, %s", code, (int)status, tetrain_error(rt));
    counts[status]++;
    status = tetrain_run_string(rt, after, sizeof after - 1, "=after");
    CHECK_MSG(status == TETRAIN_OK, "after %s: status %d, %s", code, (int)status, tetrain_error(rt));
}

/* Every stride-th of all pairs; stride and the number of places share no factor, so deeds and places both change. */
static void test_all(unsigned flags, int stride)
{
    static char code[2048];
    int         counts[8] = {0};
    tetrain    *rt = NULL;
    for (int i = 0; i < N_DEEDS * N_PLACES; i += stride) {
        if (i % 50 < stride) { /* what scripts leave behind in globals goes */
            tetrain_close(rt);
            rt = open_runtime(flags);
        }
        write_script(code, sizeof code, places[i % N_PLACES], deeds[i / N_PLACES]);
        if (getenv("TEST_VERBOSE")) fprintf(stderr, "%s\n", code);
        check_script(rt, code, counts);
    }
    tetrain_close(rt);
    printf("%d well, %d errors, %d out of memory, %d at the instruction limit\n", counts[TETRAIN_OK],
           counts[TETRAIN_ERROR_SCRIPT], counts[TETRAIN_ERROR_MEMORY], counts[TETRAIN_ERROR_LIMIT]);
    CHECK(counts[TETRAIN_ERROR_LIMIT] > 0 && counts[TETRAIN_ERROR_MEMORY] > 0 && counts[TETRAIN_ERROR_SCRIPT] > 0);
}

/* --- calls without end through C, where no limit is set ----------------------------------------------------------- */

static const char *const nestings[] = {
    "local function f() coroutine.wrap(f)() end f()",
    "local function f() error(select(2, coroutine.resume(coroutine.create(f))), 0) end f()",
    "local function f() string.gsub('a', 'a', f) end f()",
    "local function f() local _ = string.format('%s', setmetatable({}, {__tostring = f})) end f()",
    "local function f() print(setmetatable({}, {__tostring = f})) end f()",
    "local function f() table.sort({1, 2, 3}, f) end f()",
    "local function f() table.foreach({1}, f) end f()",
    "local function f() error((select(2, load(f))) or 'over', 0) end f()",
    "local te = require 'te' local function f() te.no_grad(f) end f()",
    "local te = require 'te' local function f() coroutine.wrap(te.no_grad)(f) end f()",
    "local te = require 'te' local function f() coroutine.wrap(te.autocast)({}, f) end f()",
    "local m = {} m.__tostring = function(s) return tostring(s) .. '' end tostring(setmetatable({}, m))",
    ("local core, m = require 'te'._core, {} m.__index = function() return core.check_quantizer(setmetatable({}, m)) "
     "end core.check_quantizer(setmetatable({}, m))"),
    ("local core, m = require 'te'._core, {} m.__index = function() return core.product_recipe(false, false, false, "
     "'quantized', setmetatable({}, m), setmetatable({}, m)) end core.product_recipe(false, false, false, 'quantized', "
     "setmetatable({}, m), setmetatable({}, m)) error 'over'"),
    ("local core, m = require 'te'._core, {} m.__index = function() return core.sgd_step({setmetatable({}, m)}) end "
     "core.sgd_step({setmetatable({}, m)})"),
    ("local te, m = require 'te', {} m.__index = function() return te.ones({2}):backward(setmetatable({}, m)) end "
     "te.ones({2}):backward(setmetatable({}, m))"),
    ("local te = require 'te' local x = te.ones({2}) x.requires_grad = true local function f() return "
     "(te.checkpoint(f, x)) end f()"),
};

static void no_log(void *user, int level, const char *message) { (void)user, (void)level, (void)message; }

typedef struct nesting {
    unsigned flags;
    bool     limits;
} nesting;

static void *nest(void *user)
{
    const nesting *n = user;
    static const char again[] = "assert(coroutine.wrap(function() return ('a'):gsub('a', 'b') end)() == 'b')";
    tetrain_options options = {.struct_size = sizeof options, .threads = 1, .flags = n->flags, .log = no_log};
    if (n->limits) options.lua_memory_limit = 64 << 20, options.instruction_limit = UINT64_C(1) << 40;
    tetrain *rt = tetrain_open(&options);
    for (size_t i = 0; i < sizeof nestings / sizeof *nestings; i++) {
        tetrain_status status = tetrain_run_string(rt, nestings[i], strlen(nestings[i]), "=nested");
        CHECK_MSG(status == TETRAIN_ERROR_SCRIPT && tetrain_error(rt)[0], "%s: status %d, %.100s", nestings[i],
                  (int)status, tetrain_error(rt));
        CHECK(tetrain_run_string(rt, again, sizeof again - 1, "=again") == TETRAIN_OK);
    }
    tetrain_close(rt);
    return NULL;
}

/* On this thread's stack and on a small one. */
static void test_nesting(unsigned flags, bool limits)
{
    nesting        how = {flags, limits};
    pthread_attr_t attributes;
    pthread_t      thread;
    nest(&how);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, limits ? 256 << 10 : 1 << 20);
    CHECK(pthread_create(&thread, &attributes, nest, &how) == 0);
    pthread_join(thread, NULL);
    pthread_attr_destroy(&attributes);
}

/* --- a coroutine that called the engine and was collected, before memory runs out for the call around it ---------- */

static void test_left_coroutine(unsigned flags)
{
    static const char code[] =
        "local te, junk = require 'te', {}\n"
        "local options = setmetatable({}, {__index = function(_, key)\n"
        "    coroutine.wrap(function() te.zeros(1) end)()\n"
        "    for i = 1, 200000 do junk[i % 20000] = ('\\127'):rep(30 + i % 200) .. i .. key end\n"
        "end})\n"
        "te.zeros({10000000}, options)";
    tetrain_options options = {.struct_size = sizeof options, .threads = 1, .lua_memory_limit = 64 << 20,
                               .tensor_memory_limit = 6 << 20, .instruction_limit = 500000000, .flags = flags};
    tetrain        *rt = tetrain_open(&options);
    tetrain_status  status = tetrain_run_string(rt, code, sizeof code - 1, "=left");
    CHECK_MSG(status == TETRAIN_ERROR_MEMORY, "status %d, %s", (int)status, tetrain_error(rt));
    tetrain_close(rt);
}

/* test_host_hostile [STRIDE]: 1 tries all of them, the test every seventh. */
int main(int argc, char **argv)
{
    int stride = argc > 1 ? atoi(argv[1]) : 7;
    test_all(TETRAIN_RESTRICTED, stride);
    test_all(0, stride);
    test_nesting(TETRAIN_RESTRICTED, false);
    test_nesting(0, false);
    test_nesting(TETRAIN_RESTRICTED, true);
    test_left_coroutine(TETRAIN_RESTRICTED);
    test_left_coroutine(0);
    return TEST_END();
}
