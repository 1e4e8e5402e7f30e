/* test_bench_arguments.c - the benches' arguments: a wrong one ends the program with 2 and one line that names
 * it, before anything is measured. The benches are linked in with main under their names, and called in
 * processes of their own. */
#define _POSIX_C_SOURCE 200809L
#include "test.h"

#include <sys/wait.h>
#include <unistd.h>

int bench_attention(int argc, char **argv);
int bench_gemm(int argc, char **argv);
int bench_machine(int argc, char **argv);
int bench_program(int argc, char **argv);
int bench_quantize(int argc, char **argv);

enum { MOST_ARGUMENTS = 8 };

typedef struct refusal {
    int (*bench)(int argc, char **argv);
    char       *argv[MOST_ARGUMENTS]; /* ends with NULL */
    const char *line;
} refusal;

static const refusal refusals[] = {
    {bench_attention, {"bench_attention", "0"}, "threads: expected a whole number from 1 to 1024, got \"0\""},
    {bench_attention, {"bench_attention", "1", "-1"}, "seconds: expected a number from 0 on, got \"-1\""},
    {bench_attention, {"bench_attention", "1", "0", "7"}, "shape: expected a whole number from 0 to 6, got \"7\""},
    {bench_attention, {"bench_attention", "1", "0", "1", "f16"}, "dtype: expected float32 or bfloat16, got \"f16\""},
    {bench_attention, {"bench_attention", "1", "0", "1", "float32", "?"}, "arguments: expected no more, got \"?\""},
    {bench_gemm, {"bench_gemm", "two"}, "threads: expected a whole number from 1 to 1024, got \"two\""},
    {bench_gemm, {"bench_gemm", "1", "0.1s"}, "seconds: expected a number from 0 on, got \"0.1s\""},
    {bench_gemm, {"bench_gemm", "1", "0", ""}, "dtype: expected f32 or bf16, got \"\""},
    {bench_gemm, {"bench_gemm", "1", "0", "f32", "hot"}, "weights: expected warm or cold, got \"hot\""},
    {bench_gemm, {"bench_gemm", "1", "0", "f32", "cold", "1e3"},
     "tokens: expected a whole number from 0 to 1073741824, got \"1e3\""},
    {bench_machine, {"bench_machine", "1025"}, "threads: expected a whole number from 1 to 1024, got \"1025\""},
    {bench_machine, {"bench_machine", "1", "nan"}, "seconds: expected a number from 0 on, got \"nan\""},
    {bench_machine, {"bench_machine", "1", "0", "--xml"}, "output: expected --json or --streams, got \"--xml\""},
    {bench_machine, {"bench_machine", "1", "0", "--json", "?"}, "arguments: expected no more, got \"?\""},
    {bench_program, {"bench_program", "1", "0", "no such case"},
     "case: expected part of a case's name, got \"no such case\""},
    {bench_program, {"bench_program", "1", "0", "", "8"}, "columns: expected a number where rows are given, got \"\""},
    {bench_program, {"bench_program", "1", "0", "", "8", "0"},
     "columns: expected a whole number from 1 to 1073741824, got \"0\""},
    {bench_quantize, {"bench_quantize", "1", "inf"}, "seconds: expected a number from 0 on, got \"inf\""},
    {bench_quantize, {"bench_quantize", "1", "0", "no such case"},
     "case: expected part of a case's name, got \"no such case\""},
    {bench_quantize, {"bench_quantize", "1", "0", "", "-8"},
     "rows: expected a whole number from 1 to 1073741824, got \"-8\""},
    {bench_quantize, {"bench_quantize", "1", "0", "", "8"},
     "columns: expected a number where rows are given, got \"\""},
    {bench_quantize, {"bench_quantize", "1", "0", "", "8", "8", "?"}, "arguments: expected no more, got \"?\""},
};

/* What a bench says before it ends, at most `size` bytes of both streams, and its exit status;
 * -1: a signal ended it. */
static int run(const refusal *r, char *said, size_t size)
{
    int ends[2], status = 0, argc = 0;
    char *argv[MOST_ARGUMENTS];
    size_t used = 0;
    memcpy(argv, r->argv, sizeof argv);
    while (argv[argc]) argc++;
    fflush(NULL); /* or the child writes it again */
    if (pipe(ends) != 0) abort();
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDOUT_FILENO);
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        alarm(20); /* one that measures instead */
        exit(r->bench(argc, argv));
    }
    close(ends[1]);
    for (ssize_t n = 1; n > 0 && used + 1 < size; used += (size_t)n) {
        n = read(ends[0], said + used, size - 1 - used);
        if (n < 0) n = 0;
    }
    said[used] = 0;
    close(ends[0]);
    if (child < 0 || waitpid(child, &status, 0) != child) return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int main(void)
{
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        const refusal *r = &refusals[i];
        char said[512], expected[256];
        int status = run(r, said, sizeof said);
        snprintf(expected, sizeof expected, "%s: %s\n", r->argv[0], r->line);
        CHECK_MSG(status == 2, "%s: ended with %d", expected, status);
        CHECK_MSG(strcmp(said, expected) == 0, "said %s, not %s", said, expected);
    }
    return TEST_END();
}
