/* command_line.h - what the user asked for, and the table that says what can be asked.
 *
 * One row per option and one per tool: parsing, --help, the manual page and shell completion all read them.
 */
#ifndef TETRAIN_COMMAND_LINE_H
#define TETRAIN_COMMAND_LINE_H

#include <tetrain/tetrain.h>

#include <stdio.h>

enum { MAX_ACTIONS = 32 };

typedef enum option_id {
    OPTION_EXECUTE,
    OPTION_REQUIRE,
    OPTION_INTERACTIVE,
    OPTION_DEVICE,
    OPTION_THREADS,
    OPTION_SEED,
    OPTION_MEM_LIMIT,
    OPTION_MAN,
    OPTION_COMPLETION,
    OPTION_VERSION,
    OPTION_HELP
} option_id;

typedef struct option_row {
    option_id   id;
    const char *spelling; /* "-e", "--device" */
    const char *value;    /* what stands for it in help, "CODE"; NULL: it takes none */
    const char *help;
} option_row;

typedef struct tool_row {
    const char *name, *arguments, *help;
} tool_row;

extern const option_row command_line_options[]; /* both end with a row of NULLs */
extern const tool_row   command_line_tools[];

/* -e and -l, in the order given. */
typedef struct action {
    enum { ACTION_EXECUTE, ACTION_REQUIRE } kind;
    const char *text;
} action;

typedef struct command_line {
    const char        *device; /* NULL: the default */
    int                threads;
    size_t             mem_limit; /* bytes, 0: none */
    bool               seed_given;
    uint64_t           seed;
    action             actions[MAX_ACTIONS];
    int                n_actions;
    bool               run_script, interactive;
    const tool_row    *tool;   /* instead of a script */
    const char        *script; /* NULL: standard input */
    int                argc;   /* of the script or tool */
    const char *const *argv;
} command_line;

/* Fills line and returns -1, or returns the exit status when everything is said (--help, --version, a mistake). */
int command_line_parse(command_line *line, int argc, char **argv);

/* manual.c: the table as text. */
void manual_print_help(FILE *out);
void manual_print_man(FILE *out);
void manual_print_completion(FILE *out);

#endif
