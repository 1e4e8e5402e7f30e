/* command_line.c - reading the command line. Options end at the script, at `-` and at `--`; `--name value` and
 * `--name=value` mean the same. */
#include "command_line.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char help[] =
    "usage: tetrain [options] [script [arguments]]\n"
    "\n"
    "  script           a Lua file; also the name of one of tetrain's own, like train_gpt.lua\n"
    "  -                run standard input\n"
    "  -e CODE          run CODE first\n"
    "  -l MODULE        require MODULE first\n"
    "  -i               prompt after the script; also without script or code on a terminal\n"
    "  --device NAME    where new tensors are made: cpu, cuda, cuda:N (default: $TE_DEVICE, or cpu)\n"
    "  --threads N      CPU threads (default: all cores)\n"
    "  --seed N         seed of the random numbers (default: 0)\n"
    "  --version        print the version\n"
    "  --help           print this\n"
    "\n"
    "Exit status: 0, 1 when the script fails, 2 for a wrong command line, or what the script passes to os.exit.\n";

static int usage_error(const char *format, const char *what)
{
    fputs("tetrain: ", stderr);
    fprintf(stderr, format, what);
    fputs("\nTry \"tetrain --help\".\n", stderr);
    return 2;
}

/* The value of option argv[*i] when it is `name`: behind '=' or the next argument. *missing when there is none. */
static const char *value_of(int argc, char **argv, int *i, const char *name, bool *missing)
{
    size_t n = strlen(name);
    *missing = false;
    if (strncmp(argv[*i], name, n) != 0) return NULL;
    if (argv[*i][n] == '=') return argv[*i] + n + 1;
    if (argv[*i][n]) return NULL;
    if (*i + 1 < argc) return argv[++*i];
    *missing = true;
    return NULL;
}

static bool parse_number(const char *text, unsigned long long most, unsigned long long *number)
{
    char *end;
    errno = 0;
    *number = strtoull(text, &end, 10);
    return *text >= '0' && *text <= '9' && !*end && !errno && *number <= most;
}

static int parse_long_option(command_line *line, int argc, char **argv, int *i)
{
    static const char *const names[] = {"--device", "--threads", "--seed"};
    unsigned long long       number;
    if (strcmp(argv[*i], "--help") == 0) return fputs(help, stdout), 0;
    if (strcmp(argv[*i], "--version") == 0) return printf("tetrain %s\n", tetrain_version()), 0;
    for (int k = 0; k < 3; k++) {
        bool        missing;
        const char *value = value_of(argc, argv, i, names[k], &missing);
        if (missing) return usage_error("%s needs a value", names[k]);
        if (!value) continue;
        if (k == 0) {
            line->device = value;
            return -1;
        }
        if (!parse_number(value, k == 1 ? 1024 : (1ull << 53), &number))
            return usage_error(k == 1 ? "--threads: \"%s\" is no whole number up to 1024" : "--seed: \"%s\" is no whole number up to 2^53", value);
        if (k == 1) {
            line->threads = (int)number;
        } else {
            line->seed = number;
            line->seed_given = true;
        }
        return -1;
    }
    return usage_error("unknown option \"%s\"", argv[*i]);
}

/* -e CODE, -eCODE, -l MODULE, -lMODULE, -i */
static int parse_short_option(command_line *line, int argc, char **argv, int *i)
{
    const char *option = argv[*i];
    if (strcmp(option, "-i") == 0) {
        line->interactive = true;
        return -1;
    }
    if (option[1] != 'e' && option[1] != 'l') return usage_error("unknown option \"%s\"", option);
    if (line->n_actions == MAX_ACTIONS) return usage_error("too many -e and -l options: \"%s\"", option);
    if (!option[2] && *i + 1 == argc) return usage_error("%s needs a value", option);
    line->actions[line->n_actions++] = (action){option[1] == 'e' ? ACTION_EXECUTE : ACTION_REQUIRE, option[2] ? option + 2 : argv[++*i]};
    return -1;
}

static void take_script(command_line *line, int argc, char **argv, int i)
{
    line->run_script = true;
    line->script = strcmp(argv[i], "-") == 0 ? NULL : argv[i];
    line->argc = argc - i - 1;
    line->argv = (const char *const *)(argv + i + 1);
}

int command_line_parse(command_line *line, int argc, char **argv)
{
    memset(line, 0, sizeof *line);
    int i = 1;
    for (; i < argc && argv[i][0] == '-' && argv[i][1]; i++) {
        if (strcmp(argv[i], "--") == 0) {
            i++;
            break;
        }
        int code = argv[i][1] == '-' ? parse_long_option(line, argc, argv, &i) : parse_short_option(line, argc, argv, &i);
        if (code >= 0) return code;
    }
    if (i < argc) {
        take_script(line, argc, argv, i);
    } else if (!line->n_actions && !line->interactive) {
        line->interactive = isatty(STDIN_FILENO);
        line->run_script = !line->interactive;
    }
    return -1;
}
