/* main.c - the executable: command line, script runner, tools and prompt, over the public headers. Of the
 * engine's insides command_line.c has the search for the nearest name, manual.c the table of environment variables.
 *
 *     tetrain [options] [script [arguments]]
 *     tetrain [options] TOOL [arguments]
 *
 * Tools are Lua files of the embedded library (te.tools.NAME); the prompt is the one that C runs, since every line
 * must be a call of its own for an interrupt to end that line alone.
 *
 * Exit status: 0; 1 when a script fails; 2 for a wrong command line; 74 where standard output cannot be written or a
 * tool's files fail; 130 after an interrupt that a script did not handle; or what the script passes to os.exit. A
 * script that notices no interrupt for GRACE seconds ends by the signal itself.
 */
#include "command_line.h"
#include "line_editor.h"
#include "lua_call.h"
#include "prompt.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { EXIT_SCRIPT = 1, EXIT_USAGE = 2, EXIT_OUTPUT = 74, EXIT_INTERRUPTED = 130 };
enum { GRACE = 2, LOOK_AGAIN = 1 }; /* seconds */

/* A file that a script opens must not take the number of a standard one that is closed, and what is printed with it:
 * reading and writing go on failing. */
static void fill_standard_files(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0) open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

/* At the end of the process, which would drop what the disk has no room for without a word. */
static void write_out(void)
{
    bool lost = ferror(stdout);
    errno = 0;
    if (fflush(stdout) == 0 && !lost) return;
    fprintf(stderr, "tetrain: cannot write standard output: %s\n", errno ? strerror(errno) : "some of it is lost");
    _exit(EXIT_OUTPUT);
}

/* The runtime that signals are for: the one thing a signal handler can reach. */
static tetrain *running;

static volatile sig_atomic_t last_signal;
static bool                  compiles; /* scripts: the prompt interprets all it runs, which notices soon enough */

/* A loop that LuaJIT compiled looks at no flag, and many who send a signal send one: so the process ends where the
 * script has not begun to. A file that is being saved is completed first. */
static void on_alarm(int number)
{
    static const char message[] = "tetrain: interrupted; the script did not notice\n";
    (void)number;
    if (!tetrain_interrupt_pending(running))
        alarm(LOOK_AGAIN);
    else if (write(STDERR_FILENO, message, sizeof message - 1) != 0)
        raise(last_signal);
}

static void catch_signals(void);

/* First a request, where the script listens; then an error inside the script; then the system's own way. A request does
 * not end a write that waits (interrupt_flag in system.c), the next signal does. */
static void on_signal(int number)
{
    static volatile sig_atomic_t asked; /* the request: at the end of a session SIGTERM and SIGHUP may come together */
    if ((number == SIGHUP && asked) || (number == SIGTERM && asked == SIGHUP)) {
        asked = SIGTERM;
        return;
    }
    if (tetrain_request_stop(running)) {
        asked = number;
        catch_signals();
        signal(SIGHUP, SIG_IGN); /* a shell passes on what the terminal sends, too */
        return;
    }
    last_signal = number;
    tetrain_interrupt(running);
    signal(number, SIG_DFL);
    if (compiles) alarm(GRACE);
}

static void catch_signals(void)
{
    struct sigaction handler = {.sa_handler = on_signal}, look = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    sigaddset(&handler.sa_mask, SIGHUP);
    sigaddset(&handler.sa_mask, SIGTERM);
    sigaction(SIGINT, &handler, NULL);
    sigaction(SIGTERM, &handler, NULL);
    line_editor_catch_hangup(&handler);
    sigaction(SIGALRM, &look, NULL);
}

static int report(tetrain_status status)
{
    if (status == TETRAIN_OK) return 0;
    static const char no_value[] = "(error value of type nil)";
    const char       *message = tetrain_error(running);
    lua_texts         hint;
    /* error() without a value ends a script that has said all there is to say, as with other interpreters of Lua */
    bool silent = !*message || strncmp(message, no_value, sizeof no_value - 1) == 0;
    if (!silent) fprintf(stderr, "tetrain: %s\n", message);
    if (status != TETRAIN_ERROR_INTERRUPTED &&
        lua_call_text(running, "te.tools.hint", "text", message, strlen(message), &hint)) {
        if (hint.first) fprintf(stderr, "hint: %s\n", hint.first);
        lua_texts_free(&hint);
    }
    return status == TETRAIN_ERROR_INTERRUPTED ? EXIT_INTERRUPTED : EXIT_SCRIPT;
}

static tetrain_status run_text(const char *text, const char *name)
{
    return tetrain_run_string(running, text, strlen(text), name);
}

/* Joins folder, middle and name into path; whether that file can be read. */
static bool readable(char *path, size_t size, const char *folder, const char *middle, const char *name)
{
    int n = snprintf(path, size, "%s%s%s", folder, middle, name);
    struct stat s;
    return n > 0 && (size_t)n < size && access(path, R_OK) == 0 && stat(path, &s) == 0 && S_ISREG(s.st_mode);
}

/* A script that is not where the user stands may be one of tetrain's own: beside the executable or installed. Its name
 * may have a folder, as in examples/custom_fusion.lua. */
static const char *find_script(const char *name, char *path, size_t size)
{
    static const char *const places[] = {"/../scripts/", "/scripts/", "/../share/tetrain/scripts/"};
    char                     folder[3072];
    if (!name || !*name || name[0] == '/' || name[0] == '.' || access(name, R_OK) == 0) return name;
    ssize_t n = readlink("/proc/self/exe", folder, sizeof folder - 1);
    if (n <= 0) return name;
    folder[n] = 0;
    char *slash = strrchr(folder, '/');
    if (slash) *slash = 0;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        if (readable(path, size, folder, places[i], name)) return path;
    return name;
}

/* os.exit closes the runtime first: threads end and files are written out. */
static const char prelude[] = "local exit = os.exit\n"
                              "function os.exit(code, close) exit(code, close ~= false) end\n";

static bool executes(const command_line *line)
{
    for (int i = 0; i < line->n_actions; i++)
        if (line->actions[i].kind == ACTION_EXECUTE) return true;
    return false;
}

/* require, under the last part of the name. The name is handed over as an argument, for it may hold anything. */
static int run_module(const char *name)
{
    static const char chunk[] = "local name = arg[0] arg = nil _G[name:match('[^.]*$')] = require(name)";
    if (!lua_set_arguments(running, name, 0, NULL)) {
        fprintf(stderr, "tetrain: out of memory\n");
        return EXIT_SCRIPT;
    }
    return report(run_text(chunk, "=(command line)"));
}

/* In the order given; `te` is there for -e, as it is at the prompt. */
static int run_actions(const command_line *line)
{
    int code = executes(line) ? report(run_text("te = require 'te'", "=tetrain")) : 0;
    for (int i = 0; i < line->n_actions && code == 0; i++) {
        const action *a = &line->actions[i];
        code = a->kind == ACTION_EXECUTE ? report(run_text(a->text, "=(command line)")) : run_module(a->text);
    }
    return code;
}

static int run_tool(const command_line *line)
{
    if (strcmp(line->tool->name, "repl") == 0 && line->argc == 0) return prompt_run(running, catch_signals);
    if (!lua_set_arguments(running, line->tool->name, line->argc, line->argv)) {
        fprintf(stderr, "tetrain: out of memory\n");
        return EXIT_SCRIPT;
    }
    return report(run_text("require('te.tools').run(arg)", "=tetrain"));
}

static int run_script(const command_line *line)
{
    char        path[4096];
    const char *script = line->script ? find_script(line->script, path, sizeof path) : NULL;
    return report(tetrain_run_file(running, script, line->argc, line->argv));
}

static int run(const command_line *line)
{
    te_memory_stats stats;
    te_status       status = TE_OK;
    if (line->device) status = te_context_memory(tetrain_context(running), line->device, &stats);
    if (status != TE_OK) {
        fprintf(stderr, "tetrain: %s\n", te_context_error(tetrain_context(running)));
        return status == TE_ERROR_ARGUMENT ? EXIT_USAGE : EXIT_SCRIPT;
    }
    if (line->seed_given) te_context_seed(tetrain_context(running), line->seed);
    catch_signals();
    int code = report(run_text(prelude, "=tetrain"));
    if (code == 0) code = run_actions(line);
    if (code == 0 && line->run_script) code = line->tool ? run_tool(line) : run_script(line);
    if (code == 0 && line->interactive) code = prompt_run(running, catch_signals);
    return code;
}

int main(int argc, char **argv)
{
    fill_standard_files();
    atexit(write_out);
    signal(SIGXFSZ, SIG_IGN); /* a write past the limit of a file's size fails, as one to a full disk */
    command_line line;
    int          code = command_line_parse(&line, argc, argv);
    if (code >= 0) return code;
    bool            prompt = line.interactive || (line.tool && strcmp(line.tool->name, "repl") == 0);
    tetrain_options options = {.struct_size = sizeof options, .device = line.device, .threads = line.threads,
                               .tensor_memory_limit = line.mem_limit,
                               .flags = TETRAIN_MAY_EXIT | TETRAIN_ENVIRONMENT | (prompt ? TETRAIN_INTERPRETED : 0u)};
    running = tetrain_open(&options);
    if (!running) {
        fprintf(stderr, "tetrain: out of memory\n");
        return EXIT_SCRIPT;
    }
    compiles = !prompt;
    code = run(&line);
    alarm(0);
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    line_editor_catch_hangup(&(struct sigaction){.sa_handler = SIG_DFL});
    tetrain_close(running);
    return code;
}
