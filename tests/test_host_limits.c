/* test_host_limits.c - limits of a restricted runtime end the call, whatever the script catches: memory of the Lua heap
 * and of tensors, instructions. Where nothing is restricted a script may catch that memory ran out. */
#include "test.h"

#include "tetrain/tetrain.h"

#include <pthread.h>
#include <unistd.h>

static tetrain_status run(tetrain *rt, const char *code) { return tetrain_run_string(rt, code, strlen(code), "=test"); }

static bool says(tetrain *rt, const char *part) { return strstr(tetrain_error(rt), part) != NULL; }

static tetrain *open_runtime(unsigned flags, size_t lua, size_t tensors, uint64_t instructions)
{
    tetrain_options options = {.struct_size = sizeof options, .threads = 1, .lua_memory_limit = lua,
                               .tensor_memory_limit = tensors, .instruction_limit = instructions, .flags = flags};
    return tetrain_open(&options);
}

#define GROW "local s = 'x' while true do s = s .. s end"

/* Each reaches the limit of the Lua heap and goes on. */
static const char *const heap[] = {
    "pcall(function() " GROW " end) error('went on')",
    "coroutine.resume(coroutine.create(function() " GROW " end)) error('went on')",
    "local co = coroutine.create(function() pcall(function() " GROW " end) coroutine.yield() end) "
    "coroutine.resume(co) error('went on')",
    "pcall(coroutine.wrap(function() " GROW " end)) error('went on')",
    "xpcall(function() " GROW " end, function() while true do end end) error('went on')",
    "for i = 1, 20 do pcall(function() return ('x'):rep(9e7) end) end",
    "load(function() return '   ' end)",
    "load(function() return '   ' end) error('went on')",
    "return pcall(string.rep, 'x', 9e7)", /* nothing of the script comes after it */
    "local t = {} pcall(function() for i = 1, 1e9 do t[i] = {} end end) t = nil",
    "pcall(function() return table.concat({('x'):rep(2e7), ('y'):rep(2e7)}) end)",
    "pcall(require('te').no_grad, function() " GROW " end) error('went on')",
    "string.gsub('a', 'a', function() pcall(string.rep, 'x', 9e7) end)",
    "te.profile(function() local x = te.ones {1} for i = 1, 5e5 do x:neg() end error('went on') end)", /* its events */
    "local x = te.ones {1} for i = 1, 3 do pcall(te.profile, function() while true do x:neg() end end) end",
};

static const char *const tensors[] = {
    "pcall(function() return te.ones({1e9}) end)",
    "pcall(te.ones, {2^45})",
    "return pcall(te.ones, {1e9})",
    "coroutine.resume(coroutine.create(function() return te.ones({1e9}) end)) error('went on')",
    "xpcall(te.ones, function() error('went on') end, {1e9}) error('went on')",
    "local t = {} pcall(function() for i = 1, 1e6 do t[i] = te.ones({1e5}) end end) t = nil",
    "local x = te.ones({2, 2}) pcall(function() while true do x = te.cat({x, x}) end end) x = nil",
    "pcall(te.no_grad, te.ones, {1e9}) error('went on')",
    "local x = te.ones({1}, {requires_grad = true}) while true do x = x + 1 end", /* what is recorded */
    "local t = {} for i = 1, 1e5 do t[i] = te.ones {1} end error('went on')", /* what is kept beside the 64 bytes */
    "local x = te.ones({1}, {requires_grad = true}) while true do x = x:view{1} end",
    "pcall(te._core.custom, function() return te.ones({1e9}) end, function() end, te.ones {2})",
    "local g = te._core.group_new() while true do te._core.group_input(g, false) end",
    ("local g = te._core.group_new() local x = te._core.group_input(g, false) "
     "while true do x = te._core.group_op(g, 1, 'neg', {x}, {}) end"),
    "local t = {} for i = 1, 1e6 do t[i] = te._core.group_new() end error('went on')",
    "local t = {} for i = 1, 1e6 do t[i] = te._core.define('f(x)', 'y = x * 2') end error('went on')",
    /* plans, in which there is no tensor */
    "local keep, core = {}, te._core for n = 1, 1e6 do local g = core.group_new() keep[n] = g "
    "local x = core.group_input(g, false) for i = 1, 60 do x = core.group_op(g, 1, 'tanh', {x}, {}) end "
    "core.group_output(g, x) core.group_run(g, {te.ones({2})}) core.group_run(g, {te.ones({2, 2})}) end",
    "local keep = {} for n = 1, 1e7 do keep[n] = te._core.recipe_state() end",
};

/* Scopes that never end by themselves, and what must hold after each. */
static const char *const scopes[][2] = {
    {"te.no_grad(LOOP)", "assert(te._core.grad_enabled())"},
    {"te.autocast({dtype = 'bfloat16'}, LOOP)", "assert(te.matmul(te.ones{2, 2}, te.ones{2, 2}).dtype == 'float32')"},
    {"te.autocast({recipe = te.recipe.MXFP8BlockScaling{}}, LOOP)", "assert(not require('te.recipe.mode').on)"},
    {"te.quantized_model_init({}, LOOP)", "assert(not te._core.is_quantized(te.Linear(4, 4).weight))"},
    {"gpt:generate(te.zeros({1, 1}, {dtype = 'int32'}), 3, {on_token = LOOP})",
     "assert(gpt.training and te._core.grad_enabled()) gpt:generate(te.zeros({1, 1}, {dtype = 'int32'}), 2)"},
    {"te.KVCache():run(LOOP)", "assert(not require('te.kv_cache').active)"},
    {"coroutine.wrap(function() te.no_grad(LOOP) end)()", "assert(te._core.grad_enabled())"},
    {"pcall(te.no_grad, LOOP)", "assert(te._core.grad_enabled())"},
    {"seed = te.rng_state() n = 0 pcall(function() te.checkpoint(function(x) n = n + 1 if n == 2 then LOOP() end\n"
     "return te.dropout(x, 0.5) end, te.ones({4}, {requires_grad = true})):sum():backward() end)",
     "assert(not require('te.recipe.mode').replaying and not te._core.replay_since() and te.rng_state() ~= seed)"},
    {"te.custom_backward():backward()", "local w = te.ones({2}, {requires_grad = true}) te.sum(w * 2):backward() "
                                        "assert(w.grad[1]:item() == 2)"},
};

static void test_scopes(void)
{
    for (int kind = 0; kind < 2; kind++) { /* stopped by the number of instructions, or by memory */
        tetrain *rt = open_runtime(TETRAIN_RESTRICTED, kind ? 64 << 20 : 0, 0, kind ? 0 : 2000000);
        CHECK(run(rt, "te = require 'te'\n"
                      "gpt = te.models.gpt {vocab_size = 5, n_layer = 1, n_head = 1, n_embd = 8, block_size = 8}\n"
                      "function te.custom_backward()\n"
                      "    return te._core.custom(function(ctx, x) return x * 1 end, function() LOOP() end,\n"
                      "        te.ones({1}, {requires_grad = true}))\n"
                      "end") == TETRAIN_OK);
        CHECK(run(rt, kind ? "function LOOP() local s = 'x' while true do s = s .. s end end"
                           : "function LOOP() while true do end end") == TETRAIN_OK);
        for (size_t i = 0; i < sizeof scopes / sizeof *scopes; i++) {
            tetrain_status status = run(rt, scopes[i][0]);
            CHECK_MSG(status == (kind ? TETRAIN_ERROR_MEMORY : TETRAIN_ERROR_LIMIT), "%s: %d, %s", scopes[i][0],
                      (int)status, tetrain_error(rt));
            CHECK_MSG(run(rt, scopes[i][1]) == TETRAIN_OK, "after %s: %s", scopes[i][0], tetrain_error(rt));
        }
        tetrain_close(rt);
    }
}

static void check_ends(tetrain *rt, const char *code, tetrain_status expected, const char *message)
{
    tetrain_status status = run(rt, code);
    CHECK_MSG(status == expected && says(rt, message), "%s: %d, %s", code, (int)status, tetrain_error(rt));
    CHECK_MSG(run(rt, "assert(te.ones(3):sum():item() == 3)") == TETRAIN_OK, "after %s: %s", code, tetrain_error(rt));
}

static void test_memory(void)
{
    tetrain *rt = open_runtime(TETRAIN_RESTRICTED, 32 << 20, 0, 0);
    CHECK(run(rt, "te = require 'te'") == TETRAIN_OK);
    for (size_t i = 0; i < sizeof heap / sizeof *heap; i++)
        check_ends(rt, heap[i], TETRAIN_ERROR_MEMORY, "not enough memory");
    tetrain_close(rt);
    rt = open_runtime(TETRAIN_RESTRICTED, 0, 32 << 20, 0);
    CHECK(run(rt, "te = require 'te'") == TETRAIN_OK);
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        check_ends(rt, tensors[i], TETRAIN_ERROR_MEMORY, "limit 33554432");
    /* what the script would have had no right to, limit or not */
    check_ends(rt, "pcall(te.ones, {-1}) error('went on')", TETRAIN_ERROR_SCRIPT, "went on");
    tetrain_close(rt);
}

/* Functions of C that count as what they do: as one instruction each they would take minutes. */
static const char *const work[] = {
    "while true do table.sort(list) end",
    "while true do table.sort(list, rawequal) end",
    "while true do table.insert(list, 1, 1) table.remove(list) end",
    "while true do table.concat(list) end",
    "while true do text:rep(50) end",
    "while true do (''):rep(1e8) end",
    "while true do text:reverse() end",
    "while true do text:upper() end",
    "while true do text:lower() end",
    "while true do pcall(string.lower, text) end",
    "while true do tonumber(digits) end",
    "while true do local x = ('%q'):format(text) end",
    "while true do load(text) end",
    "(('b'):rep(6e4)):find('%f[' .. ('a'):rep(6e4) .. ']')",
    "(('b'):rep(1000)):find('[' .. ('a'):rep(1e6) .. ']')",
    "(('b'):rep(2e6)):find(('()'):rep(31) .. '%f[a]')",
    "text:gsub('', '')",
};

/* What long texts are made by, where the heap is one that counts. */
static const char *const made[] = {
    "while true do local x = text .. 'a' end",
    "while true do local x = text:sub(2) end",
    "while true do local x = ('%s'):format(text) end",
};

/* They are what they were. */
static const char same[] =
    "local t = {} for i = 1, 3000 do t[i] = i * 7919 % 3001 end\n"
    "table.sort(t) for i = 1, 3000 do assert(t[i] == i) end\n"
    "table.sort(t, function(a, b) return a > b end) for i = 1, 3000 do assert(t[i] == 3001 - i) end\n"
    "t = {3, 1, 2} table.sort(t) assert(table.concat(t, '-') == '1-2-3' and table.concat(t, '-', 2, 3) == '2-3')\n"
    "table.insert(t, 4) table.insert(t, 1, 0) table.insert(t, 6, 5) table.insert(t, 2, nil)\n"
    "assert(t[1] == 0 and t[2] == nil and t[3] == 1 and t[7] == 5)\n"
    "assert(('ab'):rep(3, ',') == 'ab,ab,ab' and ('ab'):rep(-1) == '' and ('aB'):upper() == 'AB')\n"
    "assert(('aB'):lower() == 'ab' and ('ab'):reverse() == 'ba')\n"
    "local function fails(message, f, ...)\n"
    "    local ok, said = pcall(f, ...) assert(not ok and said:find(message, 1, true), said)\n"
    "end\n"
    "fails('wrong number of arguments', table.insert, {}) fails('table expected', table.insert, nil, 1, 1)\n"
    "fails('position: expected one from 1 to 2147483647, got number -2147483647', table.insert, {1}, -2147483647, 1)\n"
    "fails('got number 0', table.insert, {}, 0, 1) fails('got number 2147483648', table.insert, {}, 2^31, 1)\n"
    "t = {1} table.insert(t, 3, 'x') table.insert(t, 1.5, 0) assert(t[1] == 0 and t[2] == 1 and t[3] == 'x')\n"
    "fails('got number nan', table.insert, {1}, 0/0, 1)\n"
    "fails('table expected', table.sort, 1) fails('compare', table.sort, {1, 'x'})\n"
    "fails(\"bad argument #2 to 'rep' (number expected\", function() string.rep 'x' end)";

static void test_instructions(void)
{
    tetrain *rt = open_runtime(TETRAIN_RESTRICTED, 0, 0, 1000000);
    CHECK(run(rt, "te = require 'te'") == TETRAIN_OK);
    check_ends(rt, "return pcall(function() while true do end end)", TETRAIN_ERROR_LIMIT, "instruction limit");
    CHECK(run(rt, "list, text, digits = {}, ('aB'):rep(1e6), ('1'):rep(1e6)") == TETRAIN_OK);
    CHECK(run(rt, "for i = 1, 3e4 do list[i] = -i end") == TETRAIN_OK);
    for (size_t i = 0; i < sizeof work / sizeof *work; i++)
        check_ends(rt, work[i], TETRAIN_ERROR_LIMIT, "instruction limit");
    check_ends(rt, same, TETRAIN_OK, "");
    tetrain_close(rt);
    rt = open_runtime(TETRAIN_RESTRICTED, 64 << 20, 0, 1000000);
    CHECK(run(rt, "te, text = require 'te', ('aB'):rep(1e6)") == TETRAIN_OK);
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        check_ends(rt, made[i], TETRAIN_ERROR_LIMIT, "instruction limit");
    tetrain_close(rt);
}

static void *interrupt_soon(void *rt)
{
    usleep(100000);
    tetrain_interrupt(rt);
    return NULL;
}

/* A backward pass that the host runs has the script's limits. */
static void test_backward_of_the_host(void)
{
    static const char code[] =
        "local Own = te.BasicOperation:extend('Own') function Own:op_forward(_, x) return x * 2 end "
        "function Own:op_backward() while true do end end loss = Own()(te.ones({2}, {requires_grad = true})):sum()";
    tetrain *rt = open_runtime(TETRAIN_RESTRICTED, 32 << 20, 32 << 20, 1000000);
    CHECK(run(rt, "te = require 'te'") == TETRAIN_OK && run(rt, code) == TETRAIN_OK);
    te_tensor *loss = tetrain_get_tensor(rt, "loss");
    CHECK(te_backward(loss, NULL, true) == TE_ERROR_INTERRUPTED);
    CHECK(strstr(te_context_error(tetrain_context(rt)), "instruction limit"));
    check_ends(rt, "assert(te.ones(2):sum():item() == 2)", TETRAIN_OK, "");
    te_tensor_release(loss);
    tetrain_close(rt);
    pthread_t thread;
    rt = open_runtime(TETRAIN_INTERPRETED, 0, 0, 0);
    CHECK(run(rt, "te = require 'te'") == TETRAIN_OK && run(rt, code) == TETRAIN_OK);
    loss = tetrain_get_tensor(rt, "loss");
    CHECK(pthread_create(&thread, NULL, interrupt_soon, rt) == 0);
    CHECK(te_backward(loss, NULL, false) == TE_ERROR_INTERRUPTED);
    pthread_join(thread, NULL);
    CHECK(!tetrain_interrupt_pending(rt) && run(rt, "x = 1") == TETRAIN_OK);
    te_tensor_release(loss);
    tetrain_close(rt);
}

/* A script of the host's own may go on with less. */
static void test_caught(void)
{
    tetrain *rt = open_runtime(0, 32 << 20, 32 << 20, 0);
    CHECK(run(rt, "te = require 'te'") == TETRAIN_OK);
    check_ends(rt, "assert(not pcall(function() " GROW " end)) assert(not pcall(te.ones, {1e9}))", TETRAIN_OK, "");
    check_ends(rt, "return pcall(te.ones, {1e9})", TETRAIN_OK, "");
    check_ends(rt, "local x = te.ones {1} assert(not pcall(te.profile, function() for i = 1, 5e5 do x:neg() end end)) "
                   "assert(#te.profile(function() for i = 1, 100 do x:neg() end end).events == 100)",
               TETRAIN_OK, "");
    check_ends(rt, "te.ones {1e9}", TETRAIN_ERROR_MEMORY, "out of memory");
    tetrain_close(rt);
}

static void count_call(void *user) { ++*(int *)user; }

/* Where memory runs out the host is asked for some and Lua collects, whichever came first. */
static void test_pressure(void)
{
    static const char garbage[] = "te = require 'te' for i = 1, 50 do local t = te.ones {1000000} end";
    for (int late = 0; late < 2; late++) {
        tetrain *rt = open_runtime(0, 0, 10 << 20, 0);
        int      asked = 0;
        if (late) CHECK(run(rt, "te = require 'te' te.ones {1}") == TETRAIN_OK);
        te_context_on_memory_pressure(tetrain_context(rt), count_call, &asked);
        check_ends(rt, garbage, TETRAIN_OK, "");
        check_ends(rt, "te.ones {1e9}", TETRAIN_ERROR_MEMORY, "out of memory");
        CHECK_MSG(asked > 0, "set %s: never asked", late ? "late" : "early");
        te_context_on_memory_pressure(tetrain_context(rt), NULL, NULL);
        check_ends(rt, garbage, TETRAIN_OK, "");
        tetrain_close(rt);
    }
}

/* What print gives the host is run as a script inside the call, "get NAME" gets a tensor there. */
typedef struct nesting {
    tetrain *rt;
    int      calls;
} nesting;

static void run_inside(void *user, int level, const char *message)
{
    nesting *n = user;
    (void)level;
    n->calls++;
    if (strncmp(message, "get ", 4) == 0)
        te_tensor_release(tetrain_get_tensor(n->rt, message + 4));
    else
        tetrain_run_string(n->rt, message, strlen(message), "=inner");
}

static tetrain *open_nesting(nesting *n, uint64_t instructions)
{
    tetrain_options options = {.struct_size = sizeof options, .threads = 1, .lua_memory_limit = 32 << 20,
                               .tensor_memory_limit = 32 << 20, .instruction_limit = instructions,
                               .flags = TETRAIN_RESTRICTED, .log = run_inside, .user = n};
    *n = (nesting){.rt = tetrain_open(&options)};
    CHECK(run(n->rt, "te = require 'te' T = te.ones {2}") == TETRAIN_OK);
    return n->rt;
}

/* Each never ends by itself, whatever became of the calls inside it. */
static const char *const nested[] = {
    "print \"error 'x'\" while true do end",
    "print 'get T' while true do end",
    "print 'get nothing' while true do end",
    "print 'while true do end' while true do end",
    "pcall(print, 'while true do end') while true do end",
    "print \"print 'x = 1' error 'x'\" while true do end",
    "local s = 'x' print \"local s = 'x' while true do s = s .. s end\" while true do end",
    ("local co = coroutine.wrap(function() print 'get T' coroutine.yield() print 'error(1)' end) co() co() "
     "while true do end"),
    "while true do print 'x = 1' end",
    "while true do pcall(print, 'get T') end",
};

/* Calls that the host makes inside a call leave it its limits. */
static void test_nested(void)
{
    nesting   n;
    pthread_t thread;
    tetrain  *rt = open_nesting(&n, 2000000);
    for (size_t i = 0; i < sizeof nested / sizeof *nested; i++)
        check_ends(rt, nested[i], TETRAIN_ERROR_LIMIT, "instruction limit");
    n.calls = 0; /* what inner calls execute counts: some twenty use it up */
    check_ends(rt, "while true do print 'for i = 1, 1e5 do end' end", TETRAIN_ERROR_LIMIT, "instruction limit");
    CHECK_MSG(n.calls > 5 && n.calls < 60, "%d calls", n.calls);
    check_ends(rt, "print \"error 'x'\" error 'mine'", TETRAIN_ERROR_SCRIPT, "mine");
    check_ends(rt, "print \"local s = 'x' while true do s = s .. s end\" for i = 1, 1e5 do end", TETRAIN_OK, "");
    check_ends(rt, "local s = 'x' pcall(function() while true do s = s .. s end end) print 'x = 1'",
               TETRAIN_ERROR_MEMORY, "not enough memory");
    tetrain_close(rt);
    rt = open_nesting(&n, 0);
    for (size_t i = 0; i < sizeof nested / sizeof *nested; i++) {
        CHECK(pthread_create(&thread, NULL, interrupt_soon, rt) == 0);
        tetrain_status status = run(rt, nested[i]);
        pthread_join(thread, NULL);
        CHECK_MSG(status == TETRAIN_ERROR_INTERRUPTED, "%s: %d, %s", nested[i], (int)status, tetrain_error(rt));
        CHECK_MSG(run(rt, "assert(te.ones(3):sum():item() == 3)") == TETRAIN_OK, "%s: %s", nested[i],
                  tetrain_error(rt));
    }
    tetrain_close(rt);
}

/* What a script has put where the library puts scopes back: it ends, and so does the next call. */
static const char *const settling[] = {
    "pairs = FOREVER error 'x'",
    "pcall = FOREVER error 'x'",
    "te._core.settle_with(FOREVER) error 'x'",
    "require('te.settle').when_stopped(FOREVER) error 'x'",
    "require('te.settle').unfinished[1] = FOREVER error 'x'",
    "require('te.settle').unfinished[1] = function() local t = {} while true do t[#t + 1] = {} end end error 'x'",
    "require('te.settle').unfinished[1] = function() local s = 'x' while true do s = s .. s end end error 'x'",
};

static void test_settling(void)
{
    for (size_t i = 0; i < sizeof settling / sizeof *settling; i++) {
        tetrain *rt = open_runtime(TETRAIN_RESTRICTED, 32 << 20, 0, i % 2 ? 1000000 : 0);
        CHECK(run(rt, "te = require 'te' function FOREVER() while true do end end") == TETRAIN_OK);
        tetrain_status status = run(rt, settling[i]);
        CHECK_MSG(status == TETRAIN_ERROR_SCRIPT, "%s: %d, %s", settling[i], (int)status, tetrain_error(rt));
        CHECK_MSG(run(rt, "local s = ('x'):rep(8e6) assert(#s == 8e6)") == TETRAIN_OK, "%s: %s", settling[i],
                  tetrain_error(rt));
        tetrain_close(rt);
    }
    /* an interrupt that comes while it does so is the next call's, which puts back what this one left */
    tetrain *rt = open_runtime(TETRAIN_RESTRICTED, 0, 0, 0);
    CHECK(run(rt, "te = require 'te' require('te.settle').unfinished[1] = function() undone = te.ones {2} end") ==
          TETRAIN_OK);
    CHECK(run(rt, "error 'x'") == TETRAIN_ERROR_SCRIPT && run(rt, "undone:sum() undone = nil") == TETRAIN_OK);
    CHECK(run(rt, "require('te.settle').unfinished[1] = function() undone = te.ones {2} end") == TETRAIN_OK);
    tetrain_interrupt(rt);
    CHECK(run(rt, "this is no Lua") == TETRAIN_ERROR_SCRIPT);
    CHECK(run(rt, "while true do end") == TETRAIN_ERROR_INTERRUPTED);
    CHECK(run(rt, "undone:sum()") == TETRAIN_OK);
    tetrain_close(rt);
}

int main(void)
{
    test_nested();
    test_settling();
    test_pressure();
    test_scopes();
    test_memory();
    test_instructions();
    test_caught();
    test_backward_of_the_host();
    return TEST_END();
}
