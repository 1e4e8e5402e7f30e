/* test_host_errors.c - what a host is told of a script's error: the message whole, with the traceback whatever was
 * raised. */
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

int main(void)
{
    test_messages(0);
    test_messages(TETRAIN_RESTRICTED);
    return TEST_END();
}
