/* line_editor.h - lines from a terminal, with editing, history and completion, or from a pipe.
 *
 * With libedit a terminal gets all of it; without, or where standard input is no terminal, lines are read as they are.
 */
#ifndef TETRAIN_LINE_EDITOR_H
#define TETRAIN_LINE_EDITOR_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct line_editor line_editor;

/* What to insert behind the text before the cursor, and what to show when there are several ways to go on. Both are
 * freed by the editor and may be NULL. */
typedef struct completion {
    char *insert, *show;
} completion;

typedef struct line_editor_options {
    const char *history; /* file, NULL: kept nowhere */
    completion (*complete)(void *user, const char *before, size_t size);
    void *user;
} line_editor_options;

typedef enum line_result {
    LINE_READ,
    LINE_PASTED,      /* read, and the paste it came with goes on: not to be run yet */
    LINE_INTERRUPTED, /* Ctrl-C: what was typed is dropped, size says how much that was */
    LINE_END
} line_result;

/* NULL when memory is exhausted. */
line_editor *line_editor_open(const line_editor_options *options);
void         line_editor_close(line_editor *e);
/* SIGINT, SIGTERM and SIGHUP are the editor's from here on: one that comes before the next line is read ends that
 * line. */
void line_editor_catch_signals(void);
/* What is to happen at SIGHUP, when the terminal is closed, unless that is ignored, as nohup has it. */
void line_editor_catch_hangup(const struct sigaction *action);
/* *line is valid until the next call and has no newline. Catches the signals itself. */
line_result line_editor_read(line_editor *e, const char *prompt, const char **line, size_t *size);
bool        line_editor_on_terminal(const line_editor *e);

#endif
