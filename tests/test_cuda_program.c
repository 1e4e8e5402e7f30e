/* test_cuda_program.c - CUDA C made from row programs, run by the simulator, against the naive evaluator, to the bit:
 * random programs on random shapes, strides, types and values. Every source is also compiled by NVRTC where that is
 * installed. `test_cuda_program COUNT [FIRST]` tries that many random programs. */
#include "cuda_device.h"
#define TE_NAIVE_OF_LIBRARY
#include "program_scene.h"

static cuda_device cuda;

static void check_random_program(int i, bool chosen, uint64_t *state)
{
    static built b;
    static scene scenes[MAX_RUNS];
    te_run       runs[MAX_RUNS];
    int          n_runs = test_random(state) % 4 == 0 ? MAX_RUNS : 1;
    random_program(&b, state);
    for (int r = 0; r < n_runs; r++) {
        make_scene(&scenes[r], &b, state);
        if (chosen) expect(&scenes[r], &b.program);
        runs[r] = scenes[r].run;
    }
    if (chosen) {
        for (int r = 0; r < n_runs; r++) restart(&scenes[r], &b.program);
        te_status status = cuda_program_run(&cuda, &b.program, runs, n_runs);
        bool      right = status == TE_OK;
        for (int r = 0; r < n_runs; r++) right = right && scene_matches(&scenes[r], &b.program);
        CHECK_MSG(right, "random program %d: %s", i, status == TE_OK ? "wrong" : cuda.exec.message);
        for (int r = 0; r < n_runs && !right && test_failures < 5; r++) print_program(&b.program, &runs[r]);
    }
    for (int r = 0; r < n_runs; r++) scene_free(&scenes[r], &b.program);
    release(&b);
}

int main(int argc, char **argv)
{
    int      count = argc > 1 ? atoi(argv[1]) : 40, first = argc > 2 ? atoi(argv[2]) : 0;
    uint64_t state = 0x9e3779b97f4a7c15u;
    cuda = (cuda_device){.exec = test_exec_open(1), .multiprocessors = 2, .show = argc > 2};
    nvrtc_open(&cuda.nvrtc);
    for (int i = 0; i < first + count; i++) check_random_program(i, i >= first, &state);
    fprintf(stderr, "launches: %d flat, %d rows, %d columns, %d tiled; %d sources through NVRTC\n",
            cuda.kinds[TE_CUDA_FLAT], cuda.kinds[TE_CUDA_ROWS], cuda.kinds[TE_CUDA_COLUMNS], cuda.kinds[TE_CUDA_TILED],
            cuda.nvrtc.compiled);
    test_exec_close(&cuda.exec);
    return TEST_END();
}
