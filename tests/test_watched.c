/* test_watched.c - under AddressSanitizer: what an unwatched loop says it touches is reported where it may not be. */
#include "test.h"

#include "kernels/cpu/watched.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

/* Whether a process that touches so many bytes of 64 at `p` ends by itself. */
static bool survives(const char *p, int64_t bytes)
{
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr)) _exit(2);
        te_touches(p, bytes);
        _exit(0);
    }
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int main(void)
{
    char *p = calloc(64, 1);
    CHECK(p && survives(p, 64) && survives(p, 0));
#ifdef __SANITIZE_ADDRESS__
    CHECK(!survives(p, 65) && !survives(p - 1, 2) && !survives(p + 64, 1));
#endif
    free(p);
    return TEST_END();
}
