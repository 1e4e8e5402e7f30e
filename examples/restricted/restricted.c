/* restricted.c - runs somebody else's script under limits, in a runtime without files, processes and bytecode.
 *
 *     restricted SCRIPT...
 *
 * Every script runs in the same runtime after the one before, whatever became of that: a failure costs one script, not
 * the host. The exit status is the number of scripts that failed. */
#include <stdio.h>
#include <tetrain/tetrain.h>

static const char *const outcomes[] = {"done",           "script error", "wrong argument",           "out of memory",
                                       "file not read", "interrupted",  "instruction limit reached"};

static void log_line(void *user, int level, const char *message)
{
    (void)level;
    fprintf(user, "| %s\n", message);
}

int main(int argc, char **argv)
{
    tetrain_options options = {.struct_size = sizeof options,
                               .threads = 1,
                               .lua_memory_limit = 16 << 20,
                               .tensor_memory_limit = 64 << 20,
                               .instruction_limit = 50000000,
                               .flags = TETRAIN_RESTRICTED,
                               .log = log_line,
                               .user = stdout};
    tetrain *rt = tetrain_open(&options);
    int      failed = 0;
    if (!rt) return fprintf(stderr, "out of memory\n"), 1;
    for (int i = 1; i < argc; i++) {
        tetrain_status status = tetrain_run_file(rt, argv[i], 0, NULL);
        printf("%s: %s\n", argv[i], outcomes[status]);
        if (status != TETRAIN_OK) printf("%s\n", tetrain_error(rt));
        failed += status != TETRAIN_OK;
    }
    tetrain_close(rt);
    return failed;
}
