/* command_line.h - what the user asked for. */
#ifndef TETRAIN_COMMAND_LINE_H
#define TETRAIN_COMMAND_LINE_H

#include <tetrain/tetrain.h>

enum { MAX_ACTIONS = 32 };

/* -e and -l, in the order given. */
typedef struct action {
    enum { ACTION_EXECUTE, ACTION_REQUIRE } kind;
    const char *text;
} action;

typedef struct command_line {
    const char        *device; /* NULL: the default */
    int                threads;
    bool               seed_given;
    uint64_t           seed;
    action             actions[MAX_ACTIONS];
    int                n_actions;
    bool               run_script, interactive;
    const char        *script; /* NULL: standard input */
    int                argc;   /* of the script */
    const char *const *argv;
} command_line;

/* Fills line and returns -1, or returns the exit status when everything is said (--help, --version, a mistake). */
int command_line_parse(command_line *line, int argc, char **argv);

#endif
