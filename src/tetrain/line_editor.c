/* line_editor.c - reading lines.
 *
 * libedit reads its characters through read_key, so that three things are ours: a signal ends the line at once, a
 * paste (which terminals bracket with ESC [200~ and ESC [201~ when asked to) is taken as text, tabs included, and its
 * newlines are told from those that were typed.
 */
#include "line_editor.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <unistd.h>
#include <wchar.h>

#ifdef TETRAIN_WITH_EDIT
#include <histedit.h>
#endif

enum { HISTORY_LINES = 2000, AHEAD = 16, LATE_MS = 30, CTRL_E = 5 };

struct line_editor {
    line_editor_options options;
    bool                terminal, editing, pasting, leaving;
    char               *text; /* the line that was read */
    size_t              size, capacity;
    unsigned char       ahead[AHEAD]; /* bytes read but not yet taken */
    int                 n_ahead;
    const char         *prompt;
    sigset_t            open_signals; /* blocked while waiting: all that were before */
#ifdef TETRAIN_WITH_EDIT
    EditLine *edit;
    History  *history;
#endif
};

static volatile sig_atomic_t signalled; /* the number of the signal that no line has told of yet */

static volatile sig_atomic_t continued; /* the process was stopped meanwhile */

static void on_signal(int number) { signalled = number; }

static void on_continue(int number)
{
    (void)number;
    continued = 1;
}

void line_editor_catch_hangup(const struct sigaction *action)
{
    struct sigaction now;
    if (sigaction(SIGHUP, NULL, &now) == 0 && now.sa_handler != SIG_IGN) sigaction(SIGHUP, action, NULL);
}

void line_editor_catch_signals(void)
{
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    line_editor_catch_hangup(&action);
    action = (struct sigaction){.sa_handler = on_continue, .sa_flags = SA_RESTART};
    sigaction(SIGCONT, &action, NULL);
}

/* Signals wait while the editor is not waiting itself: none is missed between a look at `signalled` and the next wait.
 * before receives the signals that were blocked. */
static void hold_signals(sigset_t *before)
{
    sigset_t ours;
    sigemptyset(&ours);
    sigaddset(&ours, SIGINT);
    sigaddset(&ours, SIGTERM);
    sigaddset(&ours, SIGHUP);
    sigaddset(&ours, SIGCONT);
    sigprocmask(SIG_BLOCK, &ours, before);
}

static bool keep(line_editor *e, const char *text, size_t size)
{
    if (size + 1 > e->capacity) {
        char *p = realloc(e->text, 2 * (size + 1));
        if (!p) return false;
        e->text = p;
        e->capacity = 2 * (size + 1);
    }
    memcpy(e->text, text, size);
    e->text[size] = 0;
    e->size = size;
    return true;
}

static line_result ended(void) { return signalled == SIGINT ? LINE_INTERRUPTED : LINE_END; }

/* A line of a pipe, of any length. */
static line_result read_plain(line_editor *e)
{
    size_t  capacity = 0;
    char   *line = NULL;
    ssize_t n = getline(&line, &capacity, stdin);
    bool    good = n >= 0 && keep(e, line, (size_t)n - (n > 0 && line[n - 1] == '\n'));
    free(line);
    clearerr(stdin);
    return good ? LINE_READ : ended();
}

/* A line of a terminal that cannot be edited beyond what the system does. */
static line_result read_shown(line_editor *e)
{
    fputs(e->prompt, stdout);
    fflush(stdout);
    e->size = 0;
    line_result result = read_plain(e);
    if (result != LINE_READ) fputc('\n', stdout);
    return result;
}

#ifdef TETRAIN_WITH_EDIT

static void tell_terminal(const char *text)
{
    fputs(text, stdout);
    fflush(stdout);
}

static const char bracket_pastes[] = "\033[?2004h";

/* What stopped the process has left the terminal to others, who left it as they like it. */
static void prepare_again(line_editor *e)
{
    continued = 0;
    el_set(e->edit, EL_PREP_TERM, 0); /* it is prepared, as far as libedit knows */
    el_set(e->edit, EL_PREP_TERM, 1);
    tell_terminal(bracket_pastes);
    el_set(e->edit, EL_REFRESH);
}

/* Waits for a key or a signal; false for a signal, or when nothing came in time (ms, negative: no limit). */
static bool wait_for_key(const line_editor *e, int ms)
{
    struct timespec limit = {.tv_nsec = ms * 1000000L};
    fd_set          input;
    sigset_t        closed;
    FD_ZERO(&input);
    FD_SET(STDIN_FILENO, &input);
    bool key = pselect(STDIN_FILENO + 1, &input, NULL, NULL, ms < 0 ? NULL : &limit, &e->open_signals) > 0;
    sigprocmask(SIG_SETMASK, &e->open_signals, &closed); /* a signal goes before the keys that were typed after it */
    sigprocmask(SIG_SETMASK, &closed, NULL);
    return key && !signalled;
}

/* Reads until n bytes are ahead; those after the first only as long as they come at once. False at the end of input and
 * after a signal when not even one is there. */
static bool look_ahead(line_editor *e, int n)
{
    while (e->n_ahead < n) {
        bool key = wait_for_key(e, e->n_ahead > 0 ? LATE_MS : -1);
        if (continued) prepare_again(e);
        if (!key && (signalled || e->n_ahead > 0)) return e->n_ahead > 0;
        if (!key) continue; /* a signal of somebody else's */
        if (read(STDIN_FILENO, e->ahead + e->n_ahead, 1) != 1) return e->n_ahead > 0;
        e->n_ahead++;
    }
    return true;
}

static unsigned char take(line_editor *e)
{
    unsigned char byte = e->ahead[0];
    memmove(e->ahead, e->ahead + 1, (size_t)--e->n_ahead);
    return byte;
}

/* Takes `mark` when it is what comes next. */
static bool take_mark(line_editor *e, const char *mark)
{
    int n = (int)strlen(mark);
    for (int i = 1; i <= n; i++)
        if (!look_ahead(e, i) || e->n_ahead < i || e->ahead[i - 1] != (unsigned char)mark[i - 1]) return false;
    e->n_ahead -= n;
    memmove(e->ahead, e->ahead + n, (size_t)e->n_ahead);
    return true;
}

static const char paste_begin[] = "\033[200~", paste_end[] = "\033[201~";

/* The next byte for the editor; false at the end. A tab in a paste is a blank, other control characters are dropped. */
static bool next_byte(line_editor *e, unsigned char *byte)
{
    for (;;) {
        if (!look_ahead(e, 1) || signalled) return false;
        if (e->ahead[0] == '\033' && take_mark(e, e->pasting ? paste_end : paste_begin)) {
            e->pasting = !e->pasting;
            continue;
        }
        *byte = take(e);
        if (!e->pasting) return true;
        if (*byte == '\r') *byte = '\n';
        if (*byte == '\t') *byte = ' ';
        if (*byte == '\n' && take_mark(e, paste_end)) e->pasting = false;
        if (*byte == '\n' || *byte >= ' ') return true;
    }
}

/* One character, put together from the bytes of its encoding. A signal moves to the end of the input before it ends the
 * line: the cursor may be rows above, and what comes next is written below all of them. */
static int read_key(EditLine *edit, wchar_t *key)
{
    line_editor *e;
    mbstate_t    state;
    el_get(edit, EL_CLIENTDATA, &e);
    memset(&state, 0, sizeof state);
    for (;;) {
        unsigned char byte;
        if (e->leaving) return -1;
        if (!next_byte(e, &byte)) {
            if (!signalled) return 0;
            e->leaving = true;
            *key = CTRL_E;
            return 1;
        }
        size_t n = mbrtowc(key, (const char *)&byte, 1, &state);
        if (n == (size_t)-2) continue;
        if (n == (size_t)-1) *key = L'?';
        return 1;
    }
}

static char *show_prompt(EditLine *edit)
{
    line_editor *e;
    el_get(edit, EL_CLIENTDATA, &e);
    return (char *)(void *)e->prompt;
}

static unsigned char complete(EditLine *edit, int key)
{
    line_editor    *e;
    const LineInfo *line = el_line(edit);
    (void)key;
    el_get(edit, EL_CLIENTDATA, &e);
    completion    found = e->options.complete(e->options.user, line->buffer, (size_t)(line->cursor - line->buffer));
    unsigned char next = CC_REFRESH_BEEP;
    if (found.insert && *found.insert && el_insertstr(edit, found.insert) == 0) next = CC_REFRESH;
    if (found.show && *found.show) {
        printf("\n%s\n", found.show);
        fflush(stdout);
        next = CC_REDISPLAY;
    }
    free(found.insert);
    free(found.show);
    return next;
}

static bool open_edit(line_editor *e)
{
    HistEvent event;
    e->edit = el_init("tetrain", stdin, stdout, stderr);
    e->history = history_init();
    if (!e->edit || !e->history) return false;
    el_set(e->edit, EL_CLIENTDATA, e);
    el_set(e->edit, EL_PROMPT, show_prompt);
    el_set(e->edit, EL_SIGNAL, 0);
    el_set(e->edit, EL_EDITOR, "emacs");
    el_set(e->edit, EL_GETCFN, read_key);
    el_wset(e->edit, EL_ADDFN, L"complete", L"complete the name before the cursor", complete); /* el_set leaks copies */
    el_set(e->edit, EL_BIND, "^I", "complete", NULL);
    el_set(e->edit, EL_BIND, "^R", "em-inc-search-prev", NULL);
    history(e->history, &event, H_SETSIZE, HISTORY_LINES);
    history(e->history, &event, H_SETUNIQUE, 1);
    if (e->options.history && history(e->history, &event, H_LOAD, e->options.history) > 2 * HISTORY_LINES)
        history(e->history, &event, H_SAVE, e->options.history); /* of which only the last ones were kept */
    el_set(e->edit, EL_HIST, history, e->history);
    el_source(e->edit, NULL);
    return true;
}

/* Adds a line to the file as libedit writes it, with all that it might take for something else in octal. Other prompts
 * add theirs to the same file. */
static void keep_line(const char *path, const char *text)
{
    int   fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "a");
    if (!file) {
        if (fd >= 0) close(fd);
        return;
    }
    if (lseek(fd, 0, SEEK_END) == 0) fputs("_HiStOrY_V2_\n", file);
    for (; *text; text++) {
        bool plain = *text > ' ' && *text < 127 && *text != '\\';
        fprintf(file, plain ? "%c" : "\\%03o", (unsigned char)*text);
    }
    fputc('\n', file);
    fclose(file);
}

static void remember(line_editor *e)
{
    HistEvent event;
    if (!e->size || strspn(e->text, " ") == e->size) return;
    history(e->history, &event, H_ENTER, e->text);
    if (e->options.history) keep_line(e->options.history, e->text);
}

static line_result read_edited(line_editor *e)
{
    int n = 0;
    e->leaving = false;
    el_resize(e->edit);
    tell_terminal(bracket_pastes);
    const char *line = el_gets(e->edit, &n);
    tell_terminal("\033[?2004l");
    if (!line || n <= 0) {
        const LineInfo *typed = el_line(e->edit);
        e->size = (size_t)(typed->lastchar - typed->buffer);
        e->pasting = false;
        el_reset(e->edit);
        tell_terminal("\n");
        return ended();
    }
    if (!keep(e, line, (size_t)n - (line[n - 1] == '\n'))) return LINE_END;
    remember(e);
    return e->pasting ? LINE_PASTED : LINE_READ;
}

static void close_edit(line_editor *e)
{
    if (e->history) history_end(e->history);
    if (e->edit) el_end(e->edit);
}

#else

static bool open_edit(line_editor *e)
{
    (void)e;
    return false;
}

static line_result read_edited(line_editor *e) { return read_plain(e); }

static void close_edit(line_editor *e) { (void)e; }

#endif

line_editor *line_editor_open(const line_editor_options *options)
{
    line_editor *e = calloc(1, sizeof *e);
    if (!e) return NULL;
    e->options = *options;
    e->terminal = isatty(STDIN_FILENO);
    e->editing = e->terminal && open_edit(e);
    return e;
}

void line_editor_close(line_editor *e)
{
    close_edit(e);
    free(e->text);
    free(e);
}

bool line_editor_on_terminal(const line_editor *e) { return e->terminal; }

static line_result read_line(line_editor *e)
{
    if (!signalled) return e->editing ? read_edited(e) : e->terminal ? read_shown(e) : read_plain(e);
    e->size = 0; /* it came before the prompt did */
    if (e->terminal) fputc('\n', stdout);
    return ended();
}

line_result line_editor_read(line_editor *e, const char *prompt, const char **line, size_t *size)
{
    line_editor_catch_signals();
    hold_signals(&e->open_signals);
    e->prompt = prompt;
    if (!e->editing) sigprocmask(SIG_SETMASK, &e->open_signals, NULL);
    line_result result = read_line(e);
    signalled = 0;
    sigprocmask(SIG_SETMASK, &e->open_signals, NULL);
    *line = e->text;
    *size = e->size;
    return result;
}
