/* prompt.c - the prompt: reads lines until they make a chunk, and has te.tools.repl run it.
 *
 * Every chunk is a call of the host interface, so that Ctrl-C ends this chunk and nothing else; what is typed, shown
 * and completed is decided in Lua. Piped input gets no prompt and no echo.
 */
#include "prompt.h"

#include "line_editor.h"
#include "lua_call.h"

#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char module[] = "te.tools.repl";

typedef struct session {
    tetrain     *rt;
    line_editor *editor;
    char        *text; /* the lines so far */
    size_t       size, capacity;
} session;

static bool append(session *s, const char *text, size_t size)
{
    if (s->size + size + 2 > s->capacity) {
        size_t capacity = 2 * (s->size + size + 2);
        char  *p = realloc(s->text, capacity);
        if (!p) return false;
        s->text = p;
        s->capacity = capacity;
    }
    memcpy(s->text + s->size, text, size);
    s->size += size;
    s->text[s->size++] = '\n';
    s->text[s->size] = 0;
    return true;
}

static completion complete(void *user, const char *before, size_t size)
{
    session  *s = user;
    lua_texts found;
    if (!lua_call_text(s->rt, module, "complete", before, size, &found)) return (completion){NULL, NULL};
    return (completion){found.first, found.second};
}

/* Shows what the last call left: the message without the frames of the prompt itself. */
static void show_problem(session *s)
{
    const char *message = tetrain_error(s->rt);
    lua_texts   text;
    fflush(stdout);
    if (lua_call_text(s->rt, module, "problem", message, strlen(message), &text) && text.first) message = text.first;
    if (*message) fprintf(stderr, "%s\n", message);
    lua_texts_free(&text);
}

/* Hands the lines so far over; false when they are only the beginning of something. */
static bool hand_over(session *s)
{
    lua_texts state;
    bool      whole = !lua_call_text(s->rt, module, "take", s->text, s->size, &state) || !state.first;
    lua_texts_free(&state);
    return whole;
}

/* Ctrl-C is the prompt's again. One that came when the chunk had ended already must not stop the next chunk. */
static void end_chunk(session *s)
{
    line_editor_catch_signals();
    te_context_clear_interrupt(tetrain_context(s->rt));
}

/* Runs what was handed over. */
static void evaluate(session *s, void (*catch_signals)(void))
{
    static const char run[] = "require('te.tools.repl').run()";
    catch_signals();
    tetrain_status status = tetrain_run_string(s->rt, run, sizeof run - 1, "=tetrain");
    end_chunk(s);
    if (status != TETRAIN_OK) show_problem(s);
    fflush(stdout);
    s->size = 0;
}

static const char *history_file(char *path, size_t size)
{
    const char *given = getenv("TETRAIN_HISTORY"), *home = getenv("HOME");
    if (given) return *given ? given : NULL;
    if (!home || !*home) return NULL;
    snprintf(path, size, "%s/.tetrain_history", home);
    return path;
}

/* Returns the exit status: 0 at the end of input, 130 after Ctrl-C twice at an empty line. */
static int loop(session *s, void (*catch_signals)(void))
{
    bool interrupted = false;
    for (;;) {
        const char *line;
        size_t      size;
        line_result result = line_editor_read(s->editor, s->size ? ">> " : "> ", &line, &size);
        if (result == LINE_END) break;
        if (result == LINE_INTERRUPTED) {
            bool empty = s->size == 0 && size == 0;
            if (interrupted && empty) return 130;
            interrupted = empty;
            if (interrupted) printf("(Ctrl-C again or Ctrl-D ends)\n");
            s->size = 0;
            continue;
        }
        interrupted = false;
        if (!append(s, line, size)) return 1;
        if (result == LINE_READ && hand_over(s)) evaluate(s, catch_signals);
    }
    if (s->size) evaluate(s, catch_signals); /* what the end of input cut off says so itself */
    return 0;
}

int prompt_run(tetrain *rt, void (*catch_signals)(void))
{
    static const char   load[] = "te = require 'te' require 'te.tools.repl'";
    char                path[4096];
    session             s = {.rt = rt};
    line_editor_options options = {.history = history_file(path, sizeof path), .complete = complete, .user = &s};
    if (tetrain_run_string(rt, load, sizeof load - 1, "=tetrain") != TETRAIN_OK) {
        fprintf(stderr, "tetrain: %s\n", tetrain_error(rt));
        return 1;
    }
    setlocale(LC_CTYPE, "");
    s.editor = line_editor_open(&options);
    if (!s.editor) {
        fprintf(stderr, "tetrain: out of memory\n");
        return 1;
    }
    if (line_editor_on_terminal(s.editor))
        printf("tetrain %s  ?name explains, :help lists what the prompt can do\n", tetrain_version());
    end_chunk(&s);
    int code = loop(&s, catch_signals);
    line_editor_close(s.editor);
    free(s.text);
    return code;
}
