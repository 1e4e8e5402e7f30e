/* test_host_errors.c - what a host is told of a script's error: the message whole, with the traceback whatever was
 * raised, and the status that the error has, not one that its words suggest. */
#include "test.h"

#include "tetrain/tetrain.h"

static tetrain_status run_text(tetrain *rt, const char *code, size_t size)
{
    return tetrain_run_string(rt, code, size, "=test");
}

static bool says(tetrain *rt, const char *part) { return strstr(tetrain_error(rt), part) != NULL; }

#define RUN(rt, code) run_text(rt, code, sizeof code - 1)
#define FRAMES "\nstack traceback:\n\ttest:2: in function 'f'\n\ttest:2: in main chunk"

/* Each is raised by f in line 2. */
static const struct {
    const char *raise, *message;
} errors[] = {
    {"error('oops')", "test:2: oops" FRAMES},
    {"error('oops', 0)", "oops" FRAMES},
    {"error(42, 0)", "42" FRAMES},
    {"error({})", "(error value of type table)" FRAMES},
    {"error()", "(error value of type nil)" FRAMES},
    {"error(false)", "(error value of type boolean)" FRAMES},
    {"error(print)", "(error value of type function)" FRAMES},
    {"error(setmetatable({}, {__tostring = function() return 'mine' end}))", "mine" FRAMES},
    {"error(setmetatable({}, {__tostring = function() return {} end}))",
     "(error value whose __tostring gives no string)" FRAMES},
    {"error(setmetatable({}, {__tostring = function() error('again') end}))", "(error value that cannot be described)"},
    {"error('a\\0b', 0)", "a\\0b" FRAMES},
    {"error(setmetatable({}, {__tostring = function() return 'a\\0b' end}))", "a\\0b" FRAMES},
    {"require('te').no_grad(error, {})", "(error value of type table)\nstack traceback:\n\ttest:2: in function 'f'"},
};

static void test_messages(unsigned flags)
{
    tetrain_options options = {.struct_size = sizeof options, .threads = 1, .flags = flags};
    tetrain        *rt = tetrain_open(&options);
    char            code[256];
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        int n = snprintf(code, sizeof code, "local function f()\n%s return 1 end local _ = f()", errors[i].raise);
        CHECK(run_text(rt, code, (size_t)n) == TETRAIN_ERROR_SCRIPT);
        CHECK_MSG(strncmp(tetrain_error(rt), errors[i].message, strlen(errors[i].message)) == 0, "%s: %s", code,
                  tetrain_error(rt));
    }
    /* the stack is full when its frames are to be written down */
    CHECK(RUN(rt, "local function f()\nreturn f() + 1 end\nlocal function g() return 1, f() end\ng()") ==
          TETRAIN_ERROR_SCRIPT);
    CHECK_MSG(says(rt, "stack overflow\nstack traceback:\n\ttest:") &&
                  says(rt, "\n\t...\n\ttest:2: in function 'f'") &&
                  says(rt, "\n\ttest:3: in function 'g'\n\ttest:4: in main chunk"),
              "%s", tetrain_error(rt));
    /* that of the error before is forgotten */
    CHECK(RUN(rt, "error({})") == TETRAIN_ERROR_SCRIPT && !says(rt, "'f'"));
    tetrain_close(rt);
}

static void test_statuses(void)
{
    static const char full[] = "local s = 'x' while true do s = s .. s end";
    tetrain_options   options = {.struct_size = sizeof options, .threads = 1};
    for (int limited = 0; limited <= 1; limited++) {
        options.lua_memory_limit = limited ? 16 << 20 : 0;
        tetrain *rt = tetrain_open(&options);
        CHECK(RUN(rt, "error('not enough memory in my wallet', 0)") == TETRAIN_ERROR_SCRIPT);
        CHECK(RUN(rt, "error('not enough memory in my wallet')") == TETRAIN_ERROR_SCRIPT);
        CHECK(RUN(rt, "error(setmetatable({}, {__tostring = function() return 'not enough memory here' end}))") ==
              TETRAIN_ERROR_SCRIPT);
        if (limited) {
            char code[256];
            CHECK(RUN(rt, "error('not enough memory', 0)") == TETRAIN_ERROR_SCRIPT);
            CHECK(run_text(rt, full, sizeof full - 1) == TETRAIN_ERROR_MEMORY);
            int n = snprintf(code, sizeof code, "coroutine.wrap(function() %s end)()", full);
            CHECK_MSG(run_text(rt, code, (size_t)n) == TETRAIN_ERROR_MEMORY, "%s", tetrain_error(rt));
            n = snprintf(code, sizeof code, "require('te').no_grad(function() %s end)", full);
            CHECK_MSG(run_text(rt, code, (size_t)n) == TETRAIN_ERROR_MEMORY, "%s", tetrain_error(rt));
            n = snprintf(code, sizeof code, "pcall(function() %s end) error('not enough memory in all', 0)", full);
            CHECK_MSG(run_text(rt, code, (size_t)n) == TETRAIN_ERROR_SCRIPT, "%s", tetrain_error(rt));
        }
        tetrain_close(rt);
    }
}

#define HUGE_ONES " te.ones {1e8} "
#define X "local x = te.ones({2}, {requires_grad = true}) "

/* What ran out, or failed, in functions that the engine or the library calls. */
static const struct {
    const char    *code;
    tetrain_status status;
} inside[] = {
    {X "local Own = te.BasicOperation:extend('Own') function Own:op_forward(_, v) return v * 1 end "
       "function Own:op_backward()" HUGE_ONES "end te.sum(Own()(x)):backward()",
     TETRAIN_ERROR_MEMORY},
    {X "local n = 0 te.checkpoint(function(v) n = n + 1 if n == 2 then" HUGE_ONES "end return v * 2 end, x):sum()"
       ":backward()",
     TETRAIN_ERROR_MEMORY},
    {X "local n = 0 te.checkpoint(function(v) n = n + 1 if n == 2 then pcall(te.ones, {1e8}) error('mine') end "
       "return v * 2 end, x):sum():backward()",
     TETRAIN_ERROR_SCRIPT},
    {X "te.pointwise(function(_) local s = 'x' while true do s = s .. s end end)(x)", TETRAIN_ERROR_MEMORY},
    {X "te.pointwise(function(v)" HUGE_ONES "return v end)(x)", TETRAIN_ERROR_MEMORY},
    {"te.data.open {path = '/no/such.txt'}", TETRAIN_ERROR_IO},
    {"te.data.open {path = '/no/such.bin'}", TETRAIN_ERROR_IO},
    {"te.tokenizer.load '/no/such'", TETRAIN_ERROR_IO},
    {"te.tokenizer.load(1)", TETRAIN_ERROR_SCRIPT},
};

static void test_inside(void)
{
    tetrain_options options = {.struct_size = sizeof options, .threads = 1, .lua_memory_limit = 32 << 20,
                               .tensor_memory_limit = 32 << 20};
    tetrain        *rt = tetrain_open(&options);
    CHECK(RUN(rt, "te = require 'te'") == TETRAIN_OK);
    for (size_t i = 0; i < sizeof inside / sizeof *inside; i++) {
        tetrain_status status = run_text(rt, inside[i].code, strlen(inside[i].code));
        CHECK_MSG(status == inside[i].status, "%s: %d, %s", inside[i].code, (int)status, tetrain_error(rt));
    }
    tetrain_close(rt);
}

/* An error in a backward pass that the host ran is over, and none is left of what a call inside caught. */
static void test_forgotten(void)
{
    tetrain_options options = {.struct_size = sizeof options, .threads = 1};
    tetrain        *rt = tetrain_open(&options);
    CHECK(RUN(rt, "te = require 'te' local Own = te.BasicOperation:extend('Own') "
                  "function Own:op_forward(_, x) return x * 2 end function Own:op_backward() error('boom') end "
                  "loss = Own()(te.ones({2}, {requires_grad = true})):sum() "
                  "function twice(x) return x * 2 end") == TETRAIN_OK);
    te_tensor *loss = tetrain_get_tensor(rt, "loss"), *same[1] = {loss};
    CHECK(te_backward(loss, NULL, false) != TE_OK && strstr(te_context_error(tetrain_context(rt)), "boom"));
    CHECK(RUN(rt, "local ok, why = pcall(function() return te.ones{2} + te.ones{3} end) "
                  "assert(not ok and why:find 'do not broadcast', why)") == TETRAIN_OK);
    CHECK(tetrain_call(rt, "twice", same, 1, same, 1) == TETRAIN_ERROR_ARGUMENT && same[0] == loss &&
          says(rt, "overlap"));
    CHECK(tetrain_call(rt, "twice", same, 1, NULL, 0) == TETRAIN_OK && tetrain_error(rt)[0] == 0);
    te_tensor_release(loss);
    tetrain_close(rt);
}

/* LuaJIT does not say which chunk it refuses. */
static void test_bytecode(void)
{
    static const char code[] = "\33LJ\2\0";
    tetrain          *rt = tetrain_open(NULL);
    CHECK(run_text(rt, code, sizeof code - 1) == TETRAIN_ERROR_SCRIPT);
    CHECK_MSG(strcmp(tetrain_error(rt), "test: bytecode is not accepted") == 0, "%s", tetrain_error(rt));
    CHECK(tetrain_run_string(rt, code, sizeof code - 1, "@model.lua") == TETRAIN_ERROR_SCRIPT);
    CHECK_MSG(strcmp(tetrain_error(rt), "model.lua: bytecode is not accepted") == 0, "%s", tetrain_error(rt));
    CHECK(tetrain_run_string(rt, code, sizeof code - 1, code) == TETRAIN_ERROR_SCRIPT);
    CHECK_MSG(strcmp(tetrain_error(rt), "(string): bytecode is not accepted") == 0, "%s", tetrain_error(rt));
    tetrain_close(rt);
}

int main(void)
{
    test_bytecode();
    test_forgotten();
    test_inside();
    test_messages(0);
    test_messages(TETRAIN_RESTRICTED);
    test_statuses();
    return TEST_END();
}
