/* test_host_random.c - random calls from the declarations of the engine, right and wrong ones, under limits: the host
 * survives, the runtime answers the next call, and closing gives all memory back. test_host_random.lua makes the
 * calls.
 *
 *     test_host_random [CALLS [SEED]]
 */
#include "test.h"

#include "tetrain/tetrain.h"

enum { ROUND = 2000 };

static void *counted_realloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    long *live = user;
    (void)old_size;
    if (new_size == 0) {
        *live -= ptr != NULL;
        free(ptr);
        return NULL;
    }
    void *p = realloc(ptr, new_size);
    *live += p && !ptr;
    return p;
}

/* The script beside this file. */
static void script_path(char *path, size_t size)
{
    const char *slash = strrchr(__FILE__, '/');
    snprintf(path, size, "%.*stest_host_random.lua", slash ? (int)(slash - __FILE__ + 1) : 0, __FILE__);
}

/* Runs calls in rounds, each a call of its own; returns how many of the calls went well. */
static double run_rounds(tetrain *rt, long calls, long seed)
{
    double good = 0;
    for (long done = 0; done < calls; done += ROUND) {
        char code[96];
        snprintf(code, sizeof code, "good = round(%ld, %d)", (seed * 1000003 + done) % 2147483646 + 1, ROUND);
        tetrain_status status = tetrain_run_string(rt, code, strlen(code), "=round");
        CHECK_MSG(status == TETRAIN_OK || status == TETRAIN_ERROR_MEMORY || status == TETRAIN_ERROR_LIMIT,
                  "%s: status %d, %s", code, (int)status, tetrain_error(rt));
        te_tensor *t = status == TETRAIN_OK ? tetrain_get_tensor(rt, "good") : NULL;
        if (t) good += *(float *)te_tensor_data(t);
        te_tensor_release(t);
    }
    return good;
}

int main(int argc, char **argv)
{
    long            calls = argc > 1 ? atol(argv[1]) : 10000, seed = argc > 2 ? atol(argv[2]) : 1, live = 0;
    char            path[4096];
    tetrain_options options = {.struct_size = sizeof options, .threads = 1, .tensor_memory_limit = 64 << 20,
                               .instruction_limit = 1000000000, .realloc = counted_realloc, .realloc_user = &live};
    tetrain        *rt = tetrain_open(&options);
    script_path(path, sizeof path);
    CHECK_MSG(rt && tetrain_run_file(rt, path, 0, NULL) == TETRAIN_OK, "%s", rt ? tetrain_error(rt) : "not opened");
    double good = run_rounds(rt, calls, seed);
    CHECK_MSG(good > 0.1 * (double)calls && good < 0.95 * (double)calls, "%g of %ld calls went well", good, calls);
    static const char after[] = "assert(require('te').ones(3):sum():item() == 3)";
    CHECK(tetrain_run_string(rt, after, sizeof after - 1, "=after") == TETRAIN_OK);
    tetrain_close(rt);
    CHECK_MSG(live == 0, "%ld blocks leaked", live);
    printf("%.0f of %ld calls went well\n", good, calls);
    return TEST_END();
}
