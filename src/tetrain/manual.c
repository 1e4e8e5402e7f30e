/* manual.c - help, manual page and shell completion, all from the tables of command_line.c. */
#include "command_line.h"

#include "../kernels/environment.h" /* for its table alone */

#include <string.h>

static const char exit_statuses[] =
    "0; 1 when the script fails; 2 for a wrong command line; 74 when standard output cannot be written, or a tool's "
    "file is missing, damaged or cannot be written; 130 after an interrupt; or what the script passes to os.exit.";

/* Calls row(out, name, NULL, meaning) for each variable of the environment. */
static void each_variable(FILE *out, void (*row)(FILE *, const char *, const char *, const char *))
{
#define PUT_VARIABLE(name, text, doc) row(out, text, NULL, doc);
    TE_ENVIRONMENT_OWN(PUT_VARIABLE)
    row(out, "OMP_NUM_THREADS", NULL, "CPU threads unless --threads says otherwise");
    row(out, "TETRAIN_HISTORY", NULL,
        "file of the prompt's history (default: ~/.tetrain_history); empty: no history");
}

static void print_row(FILE *out, const char *name, const char *value, const char *help)
{
    char left[64];
    snprintf(left, sizeof left, "%s%s%s", name, value && *value ? " " : "", value ? value : "");
    fprintf(out, "  %-24s %s\n", left, help);
}

void manual_print_help(FILE *out)
{
    fputs("usage: tetrain [options] [script [arguments]]\n"
          "       tetrain [options] TOOL [arguments]\n\n", out);
    print_row(out, "script", NULL, "a Lua file, or the name of one of tetrain's own, such as train_gpt.lua");
    print_row(out, "-", NULL, "run standard input");
    for (const option_row *row = command_line_options; row->spelling; row++)
        print_row(out, row->spelling, row->value, row->help);
    fputs("\nTools (\"tetrain TOOL --help\" says more; run a file of such a name as ./NAME)\n", out);
    for (const tool_row *row = command_line_tools; row->name; row++)
        print_row(out, row->name, row->arguments, row->help);
    fputs("\nEnvironment\n", out);
    each_variable(out, print_row);
    fprintf(out, "\nExit status: %s\n", exit_statuses);
}

/* In the notation of man pages a hyphen is a hyphen only behind a backslash. */
static void put_roff(FILE *out, const char *text)
{
    for (; *text; text++) {
        if (*text == '-' || *text == '\\') fputc('\\', out);
        fputc(*text, out);
    }
}

static void put_entry(FILE *out, const char *name, const char *value, const char *help)
{
    fputs(".TP\n\\fB", out);
    put_roff(out, name);
    fputs("\\fR", out);
    if (value && *value) {
        fputs(" \\fI", out);
        put_roff(out, value);
        fputs("\\fR", out);
    }
    fputc('\n', out);
    put_roff(out, help);
    fputc('\n', out);
}

void manual_print_man(FILE *out)
{
    fprintf(out, ".TH TETRAIN 1 \"\" \"tetrain %s\" \"User Commands\"\n", tetrain_version());
    fputs(".SH NAME\ntetrain \\- train and run Transformers, scripted in Lua\n"
          ".SH SYNOPSIS\n.B tetrain\n[options] [script [arguments]]\n.br\n.B tetrain\n[options] \\fITOOL\\fR "
          "[arguments]\n"
          ".SH DESCRIPTION\nRuns a Lua script, which gets the library by \\fBlocal te = require \"te\"\\fR; for "
          "\\fB\\-e\\fR and at the prompt it is the global \\fBte\\fR.\nEverything after the script goes to "
          "it unchanged, as the\n"
          "table \\fBarg\\fR and as the values of \\fB...\\fR. A script that is not found is looked for among the "
          "installed ones.\n"
          ".SH OPTIONS\n", out);
    for (const option_row *row = command_line_options; row->spelling; row++)
        put_entry(out, row->spelling, row->value, row->help);
    fputs(".SH TOOLS\n", out);
    for (const tool_row *row = command_line_tools; row->name; row++)
        put_entry(out, row->name, row->arguments, row->help);
    fputs(".SH ENVIRONMENT\n", out);
    each_variable(out, put_entry);
    fputs(".SH EXIT STATUS\n", out);
    put_roff(out, exit_statuses);
    fputc('\n', out);
}

void manual_print_completion(FILE *out)
{
    fputs("_tetrain() {\n"
          "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} i tool=\n"
          "    for ((i = 1; i < COMP_CWORD; i++)); do\n"
          "        case ${COMP_WORDS[i]} in\n"
          "        ", out);
    const char *separator = "";
    for (const option_row *row = command_line_options; row->spelling; row++) {
        if (!row->value) continue;
        fprintf(out, "%s%s", separator, row->spelling);
        separator = "|";
    }
    fputs(") ((i++)) ;;\n        -*) ;;\n        *) tool=${COMP_WORDS[i]}; break ;;\n        esac\n    done\n"
          "    local names\n    case $tool in\n    \"\") names='", out);
    for (const option_row *row = command_line_options; row->spelling; row++) fprintf(out, "%s ", row->spelling);
    for (const tool_row *row = command_line_tools; row->name; row++) fprintf(out, "%s ", row->name);
    fputs("' ;;\n    ", out);
    separator = "";
    for (const tool_row *row = command_line_tools; row->name; row++) {
        fprintf(out, "%s%s", separator, row->name);
        separator = "|";
    }
    fputs(") names=$(\"${COMP_WORDS[0]}\" \"$tool\" --help 2>/dev/null | grep -o -- '^ *--[a-z][a-z0-9-]*') ;;\n"
          "    esac\n"
          "    case $before in --device) names='cpu cuda' ;; esac\n"
          "    COMPREPLY=($(compgen -W \"$names\" -- \"$word\"))\n"
          "    [[ $word == -* ]] || COMPREPLY+=($(compgen -f -- \"$word\"))\n"
          "}\n"
          "complete -o filenames -F _tetrain tetrain\n", out);
}
