/* prompt.c - a plain prompt: an expression is printed, a statement is run, an unfinished one asks for more lines.
 *
 * `te` is loaded. Globals persist from line to line; an error or an interrupt ends the line, not the session.
 */
#include "prompt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Runs `text`, which the line before this defines: as an expression first, else as a statement. Sets _MORE when the text is
 * the beginning of something. */
static const char evaluate[] = "_MORE = nil\n"
                               "local chunk, problem = loadstring('return ' .. text, '=prompt')\n"
                               "if not chunk then chunk, problem = loadstring(text, '=prompt') end\n"
                               "if not chunk and problem:find(\"near '<eof>'$\") then _MORE = true return end\n"
                               "if not chunk then error(problem, 0) end\n"
                               "local function show(...) if select('#', ...) > 0 then print(...) end end\n"
                               "show(chunk())\n";

typedef struct text_buffer {
    char  *text;
    size_t size, capacity;
} text_buffer;

static bool append(text_buffer *b, const char *text, size_t size)
{
    if (b->size + size + 1 > b->capacity) {
        size_t capacity = 2 * (b->size + size + 1);
        char  *p = realloc(b->text, capacity);
        if (!p) return false;
        b->text = p;
        b->capacity = capacity;
    }
    memcpy(b->text + b->size, text, size);
    b->size += size;
    b->text[b->size] = 0;
    return true;
}

/* One line of any length without its newline; false at the end of input. */
static bool read_line(text_buffer *b)
{
    char piece[512];
    b->size = 0;
    while (fgets(piece, sizeof piece, stdin)) {
        size_t n = strlen(piece);
        bool   whole = n && piece[n - 1] == '\n';
        if (!append(b, piece, n - whole)) return false;
        if (whole) return true;
    }
    return b->size > 0;
}

/* The text as a Lua string, every byte by its number, goes ahead of the chunk that evaluates it. */
static tetrain_status run_text(tetrain *rt, const text_buffer *text)
{
    text_buffer    code = {0};
    tetrain_status status = TETRAIN_ERROR_MEMORY;
    bool           good = append(&code, "local text = '", 14);
    for (size_t i = 0; i < text->size && good; i++) {
        char escape[8];
        int  n = snprintf(escape, sizeof escape, "\\%03d", (unsigned char)text->text[i]);
        good = append(&code, escape, (size_t)n);
    }
    good = good && append(&code, "'\n", 2) && append(&code, evaluate, sizeof evaluate - 1);
    if (good) status = tetrain_run_string(rt, code.text, code.size, "=prompt");
    free(code.text);
    return status;
}

/* Whether the last evaluation wants more lines. */
static bool wants_more(tetrain *rt)
{
    static const char test[] = "if not _MORE then error('no', 0) end";
    return tetrain_run_string(rt, test, sizeof test - 1, "=prompt") == TETRAIN_OK;
}

int prompt_run(tetrain *rt, void (*catch_signals)(void))
{
    static const char load[] = "te = require 'te'";
    text_buffer       line = {0}, text = {0};
    if (tetrain_run_string(rt, load, sizeof load - 1, "=prompt") != TETRAIN_OK) {
        fprintf(stderr, "tetrain: %s\n", tetrain_error(rt));
        return 1;
    }
    printf("tetrain %s\n", tetrain_version());
    for (;;) {
        fputs(text.size ? ">> " : "> ", stdout);
        fflush(stdout);
        catch_signals();
        if (!read_line(&line)) break;
        if (!append(&text, line.text ? line.text : "", line.size) || !append(&text, "\n", 1)) break;
        tetrain_status status = run_text(rt, &text);
        if (status != TETRAIN_OK)
            fprintf(stderr, "%s\n", tetrain_error(rt));
        else if (wants_more(rt))
            continue;
        text.size = 0;
    }
    fputc('\n', stdout);
    free(line.text);
    free(text.text);
    return 0;
}
