/* test_program_run.c - the CPU interpreter against the naive evaluator, to the bit, for every instruction set and
 * several thread counts, and again with the operands elsewhere. `test_program_run COUNT` tries that many random
 * programs. */
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
        for (int turn = 0; turn < 2 * n_devices && right; turn++) {
            int d = turn / 2;
            for (int r = 0; r < n_runs; r++) {
                if (turn % 2) move(&scenes[r], &b.program);
                restart(&scenes[r], &b.program);
            }
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

enum { ALIASED = 40 };

/* One program and one shape, with results in every combination of places: memory of their own, or that of an input.
 * What is found out for one run must not serve another. */
static void check_places(te_exec *exec)
{
    static built b;
    float        x[2][ALIASED], y[2][ALIASED];
    begin(&b, "places");
    int a0 = input(&b, TE_RATE_ELEM), a1 = input(&b, TE_RATE_ELEM);
    int sum = emit(&b, TE_PW_ADD, a0, a1, -1);
    output(&b, TE_OUT_ELEM, emit(&b, TE_PW_MUL, sum, a0, -1));
    output(&b, TE_OUT_ELEM, emit(&b, TE_PW_SUB, sum, a1, -1));
    for (int turn = 0; turn < 18; turn++) {
        int places[2] = {turn % 3, turn / 3 % 3};
        if (places[0] < 2 && places[0] == places[1]) continue;
        te_operand in[2], out[2];
        for (int i = 0; i < 2; i++) {
            for (int j = 0; j < ALIASED; j++) x[i][j] = (float)(j * (3 - 4 * i) + turn), y[i][j] = -1;
            in[i] = (te_operand){.data = x[i], .dtype = TE_F32, .stride = {1}};
            out[i] = (te_operand){.data = places[i] < 2 ? x[places[i]] : y[i], .dtype = TE_F32, .stride = {1}};
        }
        te_run run = {.ndim = 1, .shape = {ALIASED}, .inputs = in, .outputs = out};
        bool   right = te_cpu_program_run(exec, &b.program, &run, 1) == TE_OK;
        for (int j = 0; j < ALIASED; j++) {
            float p = (float)(j * 3 + turn), q = (float)(-j + turn);
            right = right && ((float *)out[0].data)[j] == (p + q) * p && ((float *)out[1].data)[j] == p;
        }
        CHECK_MSG(right, "results in %d and %d", places[0], places[1]);
    }
    release(&b);
}

enum { TALL = 2880, SLICE = 96, WIDE = 768 };

/* Outputs of a row's sum and of elements alone: past the caches where all rows are one run, in them where a run has a
 * few. The same bits either way. */
static void check_streams(te_exec *exec)
{
    static built b;
    size_t       count = (size_t)TALL * WIDE;
    float       *x = te_cpu_memory_alloc(exec, 4 * count * sizeof *x);
    uint16_t    *z = te_cpu_memory_alloc(exec, 2 * count * sizeof *z);
    CHECK(x && z);
    for (size_t i = 0; x && i < 2 * count; i++) x[i] = (float)(i * 2654435761u % 1009) / 64 - 7;
    begin(&b, "streams");
    int a = input(&b, TE_RATE_ELEM), w = input(&b, TE_RATE_ELEM);
    int sum = reduce(&b, TE_PW_ROWSUM, a), y = emit(&b, TE_PW_MUL, emit(&b, TE_PW_SUB, a, sum, -1), w, -1);
    output(&b, TE_OUT_ELEM, y);
    output(&b, TE_OUT_ELEM, emit(&b, TE_PW_MUL, w, w, -1));
    bool right = x && z;
    for (int rows = TALL, turn = 0; turn < 2; turn++, rows = SLICE)
        for (size_t r = 0; right && r < TALL; r += (size_t)rows) {
            te_operand in[2], out[2];
            for (size_t i = 0; i < 2; i++)
                in[i] = (te_operand){.data = x + i * count + r * WIDE, .dtype = TE_F32, .stride = {WIDE, 1}};
            out[0] =
                (te_operand){.data = x + (size_t)(2 + turn) * count + r * WIDE, .dtype = TE_F32, .stride = {WIDE, 1}};
            out[1] = (te_operand){.data = z + (size_t)turn * count + r * WIDE, .dtype = TE_BF16, .stride = {WIDE, 1}};
            te_run run = {.ndim = 2, .shape = {rows, WIDE}, .inputs = in, .outputs = out};
            right = te_cpu_program_run(exec, &b.program, &run, 1) == TE_OK;
        }
    right = right && memcmp(x + 2 * count, x + 3 * count, count * sizeof *x) == 0;
    right = right && memcmp(z, z + count, count * sizeof *z) == 0;
    CHECK_MSG(right, "outputs past the caches, %s, %d threads", te_cpu_isa_name(te_cpu(exec)->isa), exec->threads);
    te_cpu_memory_free(exec, z, 2 * count * sizeof *z);
    te_cpu_memory_free(exec, x, 4 * count * sizeof *x);
    release(&b);
}

int main(int argc, char **argv)
{
    open_devices();
    check_random_programs(argc > 1 ? atoi(argv[1]) : 400);
    for (int d = 0; d < n_devices; d++) check_places(&devices[d]);
    for (int d = 0; d < n_devices; d++) check_streams(&devices[d]);
    close_devices();
    return TEST_END();
}
