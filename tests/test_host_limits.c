/* test_host_limits.c - limits of a restricted runtime end the call, whatever the script catches: memory of the Lua heap
 * and of tensors, instructions. Where nothing is restricted a script may catch that memory ran out. */
#include "test.h"

#include "tetrain/tetrain.h"

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
    "pcall(te._core.custom, function() return te.ones({1e9}) end, function() end, te.ones {2})",
};

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

static void test_instructions(void)
{
    tetrain *rt = open_runtime(TETRAIN_RESTRICTED, 0, 0, 1000000);
    CHECK(run(rt, "te = require 'te'") == TETRAIN_OK);
    check_ends(rt, "return pcall(function() while true do end end)", TETRAIN_ERROR_LIMIT, "instruction limit");
    tetrain_close(rt);
}

/* A script of the host's own may go on with less. */
static void test_caught(void)
{
    tetrain *rt = open_runtime(0, 32 << 20, 32 << 20, 0);
    CHECK(run(rt, "te = require 'te'") == TETRAIN_OK);
    check_ends(rt, "assert(not pcall(function() " GROW " end)) assert(not pcall(te.ones, {1e9}))", TETRAIN_OK, "");
    check_ends(rt, "return pcall(te.ones, {1e9})", TETRAIN_OK, "");
    check_ends(rt, "te.ones {1e9}", TETRAIN_ERROR_MEMORY, "out of memory");
    tetrain_close(rt);
}

int main(void)
{
    test_memory();
    test_instructions();
    test_caught();
    return TEST_END();
}
