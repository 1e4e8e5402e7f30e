/* command_line.c - reading the command line. Options end at the script, at `-` and at `--`; what follows is the
 * script's. `--name value` and `--name=value` mean the same, `-e CODE` and `-eCODE` too. */
#include "command_line.h"

#include "../core/nearest.h" /* of the engine's insides, this alone */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EXIT_WRONG = 2, NOT_DONE = -1 };

const option_row command_line_options[] = {
    {OPTION_EXECUTE, "-e", "CODE", "run CODE first, with te as a global"},
    {OPTION_REQUIRE, "-l", "MODULE", "require MODULE first, as a global of that name"},
    {OPTION_INTERACTIVE, "-i", NULL, "prompt after the script (default on a terminal without script or code)"},
    {OPTION_DEVICE, "--device", "NAME", "device of new tensors: cpu, cuda, cuda:N (default: $TE_DEVICE, or cpu)"},
    {OPTION_THREADS, "--threads", "N", "CPU threads (default: OMP_NUM_THREADS, or all cores)"},
    {OPTION_SEED, "--seed", "N", "seed of the random numbers (default: 0)"},
    {OPTION_MEM_LIMIT, "--mem-limit", "SIZE", "memory limit for tensors, such as 512M or 8G (default: no limit)"},
    {OPTION_MAN, "--man", NULL, "print the manual page"},
    {OPTION_COMPLETION, "--completion", NULL, "print the completion script for bash"},
    {OPTION_VERSION, "--version", NULL, "print the version"},
    {OPTION_HELP, "--help", NULL, "print this"},
    {OPTION_HELP, "-h", NULL, "the same as --help"},
    {OPTION_HELP, NULL, NULL, NULL},
};

const tool_row command_line_tools[] = {
    {"repl", "", "the prompt"},
    {"train", "[options]", "train a GPT on text"},
    {"generate", "[options]", "continue a text with a trained model"},
    {"export", "[options]", "write a trained model as Hugging Face Transformers reads it"},
    {"inspect", "FILE...", "list the tensors and metadata of safetensors files"},
    {"plan", "SCRIPT [arguments]", "print how the model that SCRIPT returns will run"},
    {"bench", "[options]", "measure the engine's kernels against the limits of the machine"},
    {"doctor", "", "report what was found on this machine, and why something is unavailable"},
    {"plot", "RUN...", "draw loss, throughput and gradient norm of training runs"},
    {NULL, NULL, NULL},
};

static int usage_error(const char *format, const char *what)
{
    fputs("tetrain: ", stderr);
    fprintf(stderr, format, what);
    fputs("\nTry \"tetrain --help\".\n", stderr);
    return EXIT_WRONG;
}

static int unknown_option(const char *word)
{
    te_nearest nearest = te_nearest_to(word, strcspn(word, "="));
    for (const option_row *row = command_line_options; row->spelling; row++)
        if (strlen(row->spelling) > 2) te_nearest_consider(&nearest, row->spelling);
    if (!nearest.name[0]) return usage_error("unknown option \"%s\"", word);
    char format[128];
    snprintf(format, sizeof format, "unknown option \"%%s\"; did you mean %s?", nearest.name);
    return usage_error(format, word);
}

static bool parse_number(const char *text, unsigned long long most, unsigned long long *number)
{
    char *end;
    errno = 0;
    *number = strtoull(text, &end, 10);
    return *text >= '0' && *text <= '9' && !*end && !errno && *number <= most;
}

/* "512M": a whole number with K, M, G or T, in steps of 1024. */
static bool parse_size(const char *text, size_t *bytes)
{
    static const char  units[] = "KMGT";
    unsigned long long number;
    char               digits[32];
    size_t             n = strspn(text, "0123456789");
    const char        *unit = text[n] ? strchr(units, text[n]) : NULL;
    if (n == 0 || n >= sizeof digits || (text[n] && (!unit || text[n + 1]))) return false;
    memcpy(digits, text, n);
    digits[n] = 0;
    int shift = unit ? 10 * (int)(unit - units + 1) : 0;
    if (!parse_number(digits, SIZE_MAX >> shift, &number) || number == 0) return false;
    *bytes = (size_t)number << shift;
    return true;
}

static int add_action(command_line *line, const option_row *row, const char *value)
{
    if (line->n_actions == MAX_ACTIONS) return usage_error("too many -e and -l options: \"%s\"", value);
    line->actions[line->n_actions++] = (action){row->id == OPTION_EXECUTE ? ACTION_EXECUTE : ACTION_REQUIRE, value};
    return NOT_DONE;
}

static int apply(command_line *line, const option_row *row, const char *value)
{
    unsigned long long number;
    switch (row->id) {
    case OPTION_EXECUTE:
    case OPTION_REQUIRE: return add_action(line, row, value);
    case OPTION_INTERACTIVE: line->interactive = true; return NOT_DONE;
    case OPTION_DEVICE: line->device = value; return NOT_DONE;
    case OPTION_THREADS:
        if (!parse_number(value, 1024, &number))
            return usage_error("--threads: \"%s\" is no whole number up to 1024", value);
        line->threads = (int)number;
        return NOT_DONE;
    case OPTION_SEED:
        if (!parse_number(value, 1ull << 53, &number))
            return usage_error("--seed: \"%s\" is no whole number up to 2^53", value);
        line->seed = number;
        line->seed_given = true;
        return NOT_DONE;
    case OPTION_MEM_LIMIT:
        if (!parse_size(value, &line->mem_limit))
            return usage_error("--mem-limit: \"%s\" is no size like 512M or 8G", value);
        return NOT_DONE;
    case OPTION_MAN: manual_print_man(stdout); return 0;
    case OPTION_COMPLETION: manual_print_completion(stdout); return 0;
    case OPTION_VERSION: printf("tetrain %s\n", tetrain_version()); return 0;
    case OPTION_HELP: manual_print_help(stdout); return 0;
    }
    return NOT_DONE;
}

/* Whether `word` spells the option; *attached is then the value within the word, NULL when there is none. */
static bool spells(const char *word, const option_row *row, const char **attached)
{
    size_t n = strlen(row->spelling);
    *attached = NULL;
    if (strncmp(word, row->spelling, n) != 0) return false;
    if (!word[n]) return true;
    bool is_long = word[1] == '-';
    if (is_long && word[n] != '=') return false;
    *attached = word + n + is_long;
    return is_long || row->value != NULL;
}

static int parse_option(command_line *line, int argc, char **argv, int *i)
{
    const char *value;
    for (const option_row *row = command_line_options; row->spelling; row++) {
        if (!spells(argv[*i], row, &value)) continue;
        if (!row->value && value) return usage_error("%s takes no value", row->spelling);
        if (row->value && !value) {
            if (*i + 1 == argc) return usage_error("%s needs a value", row->spelling);
            value = argv[++*i];
        }
        return apply(line, row, value);
    }
    return unknown_option(argv[*i]);
}

static void take_script(command_line *line, int argc, char **argv, int i)
{
    line->run_script = true;
    line->script = strcmp(argv[i], "-") == 0 ? NULL : argv[i];
    line->argc = argc - i - 1;
    line->argv = (const char *const *)(argv + i + 1);
    for (const tool_row *row = command_line_tools; row->name; row++)
        if (strcmp(argv[i], row->name) == 0) line->tool = row;
}

static bool names_device(const char *text)
{
    if (strcmp(text, "cpu") == 0 || strcmp(text, "cpu:0") == 0 || strcmp(text, "cuda") == 0) return true;
    return strncmp(text, "cuda:", 5) == 0 && text[5] >= '0' && text[5] <= '9' && !text[6];
}

/* Variables of the engine that would have no effect, or that of 0, with a text that is no number. */
static int check_numbers(void)
{
    const char *candidates = getenv("TETRAIN_GEMM_CANDIDATES"), *mib = getenv("TETRAIN_CUDNN_WORKSPACE");
    long        n = candidates && *candidates && !candidates[strspn(candidates, "0123456789")] ? atol(candidates) : 0;
    if (candidates && *candidates && (n < 1 || n > 10000))
        return usage_error("TETRAIN_GEMM_CANDIDATES=%s: expected a whole number from 1 to 10000", candidates);
    if (mib && (mib[strspn(mib, "0123456789.")] || strcmp(mib, ".") == 0))
        return usage_error("TETRAIN_CUDNN_WORKSPACE=%s: expected a number of MiB", mib);
    return NOT_DONE;
}

/* Variables of the engine that would have no effect with a word that it does not know. */
static int check_variables(void)
{
    static const struct {
        const char *name, *between, *words, *message;
    } rows[] = {
        {"TE_CPU_ISA", "", " portable avx2 avx512 ", "TE_CPU_ISA=%s: expected portable, avx2 or avx512"},
        {"TETRAIN_CUDNN", "", " 0 all ", "TETRAIN_CUDNN=%s: expected 0 or all"},
        {"TE_TRACE", ",", " dispatch fuse ", "TE_TRACE=%s: expected dispatch, fuse or both, with a comma between"},
    };
    char        word[32];
    const char *device = getenv("TE_DEVICE");
    if (device && *device && !names_device(device))
        return usage_error("TE_DEVICE=%s: expected cpu, cuda or cuda:N", device);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *value = getenv(rows[i].name), *at = value ? value : "";
        while (*at) {
            size_t n = strcspn(at, rows[i].between);
            int    size = snprintf(word, sizeof word, " %.*s ", (int)n, at);
            if (size >= (int)sizeof word || !strstr(rows[i].words, word)) return usage_error(rows[i].message, value);
            at += n + (at[n] != 0);
        }
    }
    return check_numbers();
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
        int code = parse_option(line, argc, argv, &i);
        if (code != NOT_DONE) return code;
    }
    if (i < argc) {
        take_script(line, argc, argv, i);
    } else if (!line->n_actions && !line->interactive) {
        line->interactive = isatty(STDIN_FILENO);
        line->run_script = !line->interactive;
    }
    return check_variables();
}
