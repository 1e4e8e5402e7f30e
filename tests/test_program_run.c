/* test_program_run.c - the CPU interpreter against the naive evaluator, to the bit, for every instruction set and several
 * thread counts. `test_program_run COUNT` tries that many random programs. */
#include "program_scene.h"

static void check_random_programs(int count)
{
    uint64_t state = 0x9e3779b97f4a7c15u;
    for (int i = 0; i < count; i++) {
        static built b;
        static scene scenes[MAX_RUNS];
        te_run       runs[MAX_RUNS];
        int          n_runs = test_random(&state) % 4 == 0 ? MAX_RUNS : 1;
        bool         right = true;
        random_program(&b, &state);
        for (int r = 0; r < n_runs; r++) {
            make_scene(&scenes[r], &b, &state);
            expect(&scenes[r], &b.program);
            runs[r] = scenes[r].run;
        }
        for (int d = 0; d < n_devices && right; d++) {
            for (int r = 0; r < n_runs; r++) restart(&scenes[r], &b.program);
            te_status status = te_cpu_program_run(&devices[d], &b.program, runs, n_runs);
            right = status == TE_OK;
            for (int r = 0; r < n_runs; r++) right = right && scene_matches(&scenes[r], &b.program);
            CHECK_MSG(right, "random program %d, %s, %d threads: %s", i, te_cpu_isa_name(te_cpu(&devices[d])->isa),
                      devices[d].threads, status == TE_OK ? "wrong" : devices[d].message);
            for (int r = 0; r < n_runs && !right && test_failures < 5; r++) print_program(&b.program, &runs[r]);
        }
        for (int r = 0; r < n_runs; r++) scene_free(&scenes[r], &b.program);
        release(&b);
    }
}

int main(int argc, char **argv)
{
    open_devices();
    check_random_programs(argc > 1 ? atoi(argv[1]) : 400);
    close_devices();
    return TEST_END();
}
