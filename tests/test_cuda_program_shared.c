/* test_cuda_program_shared.c - long rows that several blocks share, by the simulator: against the CPU computing in
 * float64, random programs against the naive evaluator, to the bit. */
#include "cuda_device.h"
#define TE_NAIVE_OF_LIBRARY
#include "program_scene.h"

#include <sys/mman.h>

static cuda_device cuda;
static int         n_shared;

static int levels_of(built *b, const te_run *run)
{
    te_cuda_program_shape shape;
    CHECK_MSG(te_cuda_program_shape_make(&cuda.exec, &b->program, run, &shape) == TE_OK, "%s", cuda.exec.message);
    return shape.levels;
}

/* --- programs ---------------------------------------------------------------------------------------------------- */

static int64_t columns_now;

static int mean_of(built *b, int v)
{
    return emit(b, TE_PW_MUL, reduce(b, TE_PW_ROWSUM, v), number(b, 1.0 / (double)columns_now), -1);
}

static void build_sum(built *b) { output(b, TE_OUT_ROW, reduce(b, TE_PW_ROWSUM, input(b, TE_RATE_ELEM))); }
static void build_mean(built *b) { output(b, TE_OUT_ROW, mean_of(b, input(b, TE_RATE_ELEM))); }

static void build_extremes(built *b)
{
    int x = input(b, TE_RATE_ELEM);
    output(b, TE_OUT_ROW, reduce(b, TE_PW_ROWMAX, x));
    output(b, TE_OUT_ROW, reduce(b, TE_PW_ROWMIN, x));
}

static void build_norm(built *b)
{
    int x = input(b, TE_RATE_ELEM);
    output(b, TE_OUT_ROW, emit(b, TE_PW_SQRT, reduce(b, TE_PW_ROWSUM, emit(b, TE_PW_MUL, x, x, -1)), -1, -1));
}

static void build_loss(built *b) /* mean of squares */
{
    int d = emit(b, TE_PW_SUB, input(b, TE_RATE_ELEM), input(b, TE_RATE_ELEM), -1);
    output(b, TE_OUT_ROW, mean_of(b, emit(b, TE_PW_MUL, d, d, -1)));
}

static void build_variance(built *b)
{
    int x = input(b, TE_RATE_ELEM), d = emit(b, TE_PW_SUB, x, mean_of(b, x), -1);
    output(b, TE_OUT_ROW, mean_of(b, emit(b, TE_PW_MUL, d, d, -1)));
}

/* Standardized, with the reciprocal deviation, and what a row is given. */
static void build_layer_norm(built *b)
{
    int x = input(b, TE_RATE_ELEM), gamma = input(b, TE_RATE_ELEM), d = emit(b, TE_PW_SUB, x, mean_of(b, x), -1);
    int variance = mean_of(b, emit(b, TE_PW_MUL, d, d, -1));
    int r = emit(b, TE_PW_RSQRT, emit(b, TE_PW_ADD, variance, number(b, 1e-5), -1), -1, -1);
    output(b, TE_OUT_ELEM, emit(b, TE_PW_MUL, emit(b, TE_PW_MUL, d, r, -1), gamma, -1));
    output(b, TE_OUT_ROW, r);
}

/* Shares, their logarithms, the maximum and the logarithm of the sum, and the logit of a target. */
static void build_softmax(built *b)
{
    int x = input(b, TE_RATE_ELEM), target = input(b, TE_RATE_ROW), top = reduce(b, TE_PW_ROWMAX, x);
    int below = emit(b, TE_PW_SUB, x, top, -1), e = emit(b, TE_PW_EXP, below, -1, -1);
    int sum = reduce(b, TE_PW_ROWSUM, e), log = emit(b, TE_PW_LOG, sum, -1, -1);
    int column = emit_full(b, TE_PW_COLUMN, TE_RATE_ELEM, 0, 0, -1, -1, -1);
    int here = emit(b, TE_PW_WHERE, emit(b, TE_PW_EQ, column, target, -1), x, number(b, 0));
    output(b, TE_OUT_ELEM, emit(b, TE_PW_DIV, e, sum, -1));
    output(b, TE_OUT_ELEM, emit(b, TE_PW_SUB, below, log, -1));
    output(b, TE_OUT_ROW, emit(b, TE_PW_ADD, top, log, -1));
    output(b, TE_OUT_ROW, reduce(b, TE_PW_ROWSUM, here));
}

/* Elements and values of the row that follow from one another's places. */
static void build_in_place(built *b)
{
    int x = input(b, TE_RATE_ELEM), row = input(b, TE_RATE_ROW);
    row = emit(b, TE_PW_MUL, row, number(b, 1e-4), -1);
    int sum = emit(b, TE_PW_ADD, emit(b, TE_PW_MUL, mean_of(b, x), number(b, 30), -1), row, -1);
    int e = emit(b, TE_PW_SUB, emit(b, TE_PW_MUL, x, sum, -1), row, -1);
    output(b, TE_OUT_ELEM, e);
    output(b, TE_OUT_ROW, emit(b, TE_PW_ADD, sum, reduce(b, TE_PW_ROWMAX, e), -1));
}

static void build_dropout(built *b)
{
    b->program.n_rngs = 1;
    int keep = emit_full(b, TE_PW_KEEP, TE_RATE_ELEM, 0, 0, number(b, 0.25), -1, -1);
    int x = emit(b, TE_PW_MUL, input(b, TE_RATE_ELEM), keep, -1);
    output(b, TE_OUT_ELEM, emit(b, TE_PW_MAX, x, mean_of(b, x), -1));
}

/* --- scenes ------------------------------------------------------------------------------------------------------ */

enum { HOSTILE = 1, ADDED = 2, IN_PLACE = 4, APART = 8, TURNED = 16, SKEWED = 32, WIDE = 64, NARROW = 128 };

enum { MOST_OPERANDS = 4 };

typedef struct place {
    void      *memory[2 * MOST_OPERANDS];
    te_operand in[MOST_OPERANDS], out[MOST_OPERANDS];
} place;

/* Elements of a matrix, or numbers, one per row. APART: every third element; TURNED: columns one after the other;
 * SKEWED: an element from where it would be aligned. */
static te_operand operand_of(place *p, int n, te_dtype dtype, bool rows_only, int64_t rows, int64_t columns, int how)
{
    int64_t    step = how & APART ? 3 : 1, count = rows * (rows_only ? 1 : columns);
    char      *memory = p->memory[n] = test_scratch(&cuda.exec, (size_t)(count * step + 4) * te_dtype_size(dtype));
    te_operand o = {.data = memory + (how & SKEWED ? te_dtype_size(dtype) : 0), .dtype = dtype};
    for (int64_t i = 0; i < count * step; i++) te_store_f64(o.data, dtype, i, 0.5);
    o.stride[0] = rows_only ? step : how & TURNED ? step : step * columns;
    o.stride[1] = rows_only ? 0 : how & TURNED ? step * rows : step;
    return o;
}

static double element(const te_operand *o, int64_t row, int64_t column)
{
    return te_load_f64(o->data, o->dtype, row * o->stride[0] + column * o->stride[1]);
}

/* Hostile rows: nothing but -infinity, stretches of it, which whole shares are, one number, infinity, NaN. */
static double hostile(double value, int64_t row, int64_t column, int64_t columns)
{
    switch (row) {
    case 0: return -INFINITY;
    case 1: return column < columns / 2 || column > columns * 3 / 4 ? -INFINITY : value;
    case 2: return column == columns - 1 ? value : -INFINITY;
    case 3: return column == columns / 3 ? INFINITY : value;
    case 4: return column == columns / 2 + 7 ? NAN : value;
    default: return value;
    }
}

static place make_place(const built *b, int64_t rows, int64_t columns, int how, bool reference)
{
    place    p = {0};
    uint64_t state = 17;
    te_dtype usual = how & WIDE ? TE_F64 : how & NARROW ? TE_BF16 : TE_F32;
    for (int i = 0; i < b->program.n_inputs; i++) {
        bool row = b->input_rates[i] == TE_RATE_ROW;
        p.in[i] = operand_of(&p, i, row ? TE_F32 : usual, row, rows, columns, row ? 0 : how);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < (row ? 1 : columns); c++) {
                double value = row ? (double)(r * 7919 % columns) : test_uniform(&state, -6, 7);
                if (!row && (how & HOSTILE)) value = hostile(value, r, c, columns);
                te_store_f64(p.in[i].data, p.in[i].dtype, r * p.in[i].stride[0] + c * p.in[i].stride[1], value);
            }
    }
    for (int o = 0; o < b->program.n_outputs; o++) {
        bool     row = b->outputs[o].kind == TE_OUT_ROW;
        te_dtype dtype = reference || (how & WIDE) ? TE_F64 : TE_F32;
        if (how & IN_PLACE && !reference) p.out[o] = p.in[row ? 1 : 0];
        else p.out[o] = operand_of(&p, MOST_OPERANDS + o, dtype, row, rows, columns, reference ? 0 : how);
        p.out[o].accumulate = (how & ADDED) != 0;
    }
    return p;
}

static void free_place(place *p)
{
    for (int i = 0; i < 2 * MOST_OPERANDS; i++) free(p->memory[i]);
}

static te_run run_at(place *p, int64_t rows, int64_t columns, int how)
{
    static const te_rng rngs[1] = {{5, 6, 7, NULL}};
    return (te_run){.ndim = 2, .shape = {rows, columns}, .inputs = p->in, .outputs = p->out, .rngs = rngs,
                    .compute_f64 = (how & WIDE) != 0};
}

static bool near(double a, double b, double tolerance)
{
    return (isnan(a) && isnan(b)) || a == b || fabs(a - b) <= tolerance * (1 + fabs(b));
}

/* `levels` of shared rows, the results near those of the CPU in float64. */
static void check(const char *name, void (*build)(built *), int64_t rows, int64_t columns, int how, int levels)
{
    static built b;
    double       tolerance = how & WIDE ? 1e-12 : 4e-6;
    begin(&b, name);
    columns_now = columns;
    build(&b);
    place  gpu = make_place(&b, rows, columns, how, false), again = make_place(&b, rows, columns, how, false);
    place  cpu = make_place(&b, rows, columns, how, true);
    te_run run = run_at(&gpu, rows, columns, how), second = run_at(&again, rows, columns, how);
    te_run want = run_at(&cpu, rows, columns, WIDE);
    CHECK_MSG(levels_of(&b, &run) == levels, "%s: %d levels", name, levels_of(&b, &run));
    n_shared += levels > 0;
    CHECK_MSG(cuda_program_run(&cuda, &b.program, &run, 1) == TE_OK, "%s: %s", name, cuda.exec.message);
    cuda.multiprocessors = 132;
    CHECK_MSG(cuda_program_run(&cuda, &b.program, &second, 1) == TE_OK, "%s: %s", name, cuda.exec.message);
    cuda.multiprocessors = 3;
    CHECK_MSG(te_cpu_program_run(&cuda.exec, &b.program, &want, 1) == TE_OK, "%s: %s", name, cuda.exec.message);
    bool right = true, same = true;
    for (int o = 0; o < b.program.n_outputs; o++)
        for (int64_t r = 0; r < rows && right; r++)
            for (int64_t c = 0; c < (b.outputs[o].kind == TE_OUT_ROW ? 1 : columns) && right; c++) {
                double a = element(&gpu.out[o], r, c), d = element(&again.out[o], r, c);
                same &= a == d || (isnan(a) && isnan(d));
                right = near(a, element(&cpu.out[o], r, c), tolerance);
                if (!right)
                    fprintf(stderr, "%s, output %d, %lld, %lld: %.9g, want %.9g\n", name, o, (long long)r,
                            (long long)c, a, element(&cpu.out[o], r, c));
            }
    CHECK_MSG(right && same, "%s of %lld x %lld, %d", name, (long long)rows, (long long)columns, how);
    free_place(&gpu), free_place(&again), free_place(&cpu);
    release(&b);
}

/* --- how long, how many ------------------------------------------------------------------------------------------ */

static int levels_on(built *b, int64_t rows, int64_t columns)
{
    static float x[1];
    te_operand   in[MAX_SLOTS], out[MAX_SLOTS];
    for (int i = 0; i < MAX_SLOTS; i++)
        in[i] = out[i] = (te_operand){.data = x, .dtype = TE_F32, .stride = {columns, 1}};
    te_run run = {.ndim = 2, .shape = {rows, columns}, .inputs = in, .outputs = out};
    return levels_of(b, &run);
}

static int levels_at(void (*build)(built *), int64_t rows, int64_t columns)
{
    static built b;
    begin(&b, "limits");
    columns_now = columns;
    build(&b);
    return levels_on(&b, rows, columns);
}

static void build_sum_beside(built *b)
{
    build_sum(b);
    output(b, TE_OUT_SUM, 0);
}

static void build_many_levels(built *b)
{
    int x = input(b, TE_RATE_ELEM);
    for (int i = 0; i < TE_CUDA_MAX_LEVELS + 1; i++) x = emit(b, TE_PW_SUB, x, reduce(b, TE_PW_ROWMAX, x), -1);
    output(b, TE_OUT_ELEM, x);
}

static void check_limits(void)
{
    CHECK(levels_at(build_sum, 1, 65535) == 0 && levels_at(build_sum, 1, 65536) == 1);
    CHECK(levels_at(build_loss, 1, 32767) == 0 && levels_at(build_loss, 1, 32768) == 1);
    CHECK(levels_at(build_sum, 64, 1 << 19) == 1 && levels_at(build_sum, 65, 1 << 19) == 0);
    CHECK(levels_at(build_sum, 64, (1 << 19) - 1) == 0 && levels_at(build_variance, 32, 1 << 18) == 2);
    CHECK(levels_at(build_sum, 0, 1 << 20) == 0 && levels_at(build_sum, 1 << 20, 0) == 0);
    CHECK(levels_at(build_sum, 1, 3ll << 32) == 1);
    CHECK(levels_at(build_sum_beside, 1, 1 << 20) == 0);
    CHECK(levels_at(build_many_levels, 1, 1 << 20) == 0);
}

/* Overlapping rows, so that many long ones take little memory; whole numbers, whose sums are exact. */
static void check_many_rows(void)
{
    enum { ROWS = 64, COLUMNS = 1 << 18, STEP = 8, N = COLUMNS + ROWS * STEP };
    static built b;
    static float x[N], sums[2][ROWS];
    begin(&b, "many");
    int v = emit(&b, TE_PW_SUB, input(&b, TE_RATE_ELEM), input(&b, TE_RATE_ELEM), -1);
    output(&b, TE_OUT_ROW, reduce(&b, TE_PW_ROWSUM, v));
    for (int i = 0; i < N; i++) x[i] = (float)(i * 31 % 17 - 8);
    te_operand in[2] = {{.data = x, .dtype = TE_F32, .stride = {STEP, 1}},
                        {.data = x, .dtype = TE_F32, .stride = {0, 1}}}, out[2];
    te_run runs[2];
    for (int k = 0; k < 2; k++) {
        out[k] = (te_operand){.data = sums[k], .dtype = TE_F32, .stride = {1, 0}};
        runs[k] = (te_run){.ndim = 2, .shape = {ROWS, COLUMNS}, .inputs = in, .outputs = &out[k]};
    }
    CHECK(levels_of(&b, &runs[0]) == 1);
    CHECK(cuda_program_run(&cuda, &b.program, &runs[0], 1) == TE_OK);
    CHECK(te_cpu_program_run(&cuda.exec, &b.program, &runs[1], 1) == TE_OK);
    CHECK(memcmp(sums[0], sums[1], sizeof sums[0]) == 0);
    release(&b);
}

/* Rows so far apart that offsets need 64 bits, in memory of which little is touched. */
static void check_far_rows(void)
{
    const int64_t columns = 300000, apart = (int64_t)1 << 31;
    static built  b;
    size_t        bytes = (size_t)(apart + columns);
    float         sums[2] = {0};
    uint8_t      *x = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (x == MAP_FAILED) {
        fprintf(stderr, "no address space for rows that are far apart\n");
        return;
    }
    double want[2] = {0, 0};
    for (int64_t i = 0; i < 2 * columns; i++) {
        uint8_t value = (uint8_t)(i % 13);
        x[i / columns * apart + i % columns] = value;
        want[i / columns] += value;
    }
    begin(&b, "far");
    build_sum(&b);
    te_operand in = {.data = x, .dtype = TE_U8, .stride = {apart, 1}};
    te_operand out = {.data = sums, .dtype = TE_F32, .stride = {1, 0}};
    te_run     run = {.ndim = 2, .shape = {2, columns}, .inputs = &in, .outputs = &out};
    CHECK(levels_of(&b, &run) == 1);
    CHECK(cuda_program_run(&cuda, &b.program, &run, 1) == TE_OK);
    CHECK(sums[0] == want[0] && sums[1] == want[1]);
    munmap(x, bytes);
    release(&b);
}

/* --- random programs --------------------------------------------------------------------------------------------- */

/* Without the sums over more than a row, beside which rows are not shared. */
static void check_random_program(int i, bool chosen, uint64_t *state)
{
    static const int64_t columns[] = {66000, 70001, 98306, 131084};
    static built         b;
    static scene         s;
    do {
        random_program(&b, state);
        for (int o = 0; o < b.program.n_outputs; o++)
            if (b.outputs[o].kind != TE_OUT_ROW)
                b.outputs[o].kind = b.insns[b.outputs[o].value].rate == TE_RATE_ELEM ? TE_OUT_ELEM : TE_OUT_ROW;
    } while (levels_on(&b, 1, 1 << 20) == 0);
    te_run shape = {.ndim = 1 + (int)(test_random(state) % 3)};
    for (int d = 0; d + 1 < shape.ndim; d++) shape.shape[d] = 1 + test_random(state) % 2;
    shape.shape[shape.ndim - 1] = columns[test_random(state) % 4];
    fill_scene(&s, &b, &shape, state);
    chosen = chosen && levels_of(&b, &s.run) > 0;
    if (chosen) {
        n_shared++;
        expect(&s, &b.program);
        restart(&s, &b.program);
        te_status status = cuda_program_run(&cuda, &b.program, &s.run, 1);
        bool      right = status == TE_OK && scene_matches(&s, &b.program);
        CHECK_MSG(right, "random program %d: %s", i, status == TE_OK ? "wrong" : cuda.exec.message);
        if (!right && test_failures < 5) print_program(&b.program, &s.run);
    }
    scene_free(&s, &b.program);
    release(&b);
}

int main(int argc, char **argv)
{
    int      count = argc > 1 ? atoi(argv[1]) : 16, first = argc > 2 ? atoi(argv[2]) : 0;
    uint64_t state = 0x9e3779b97f4a7c15u;
    cuda = (cuda_device){.exec = test_exec_open(1), .multiprocessors = 3, .show = argc > 2};
    nvrtc_open(&cuda.nvrtc);
    check_limits();
    check("sum", build_sum, 1, 300000, 0, 1);
    check("sum", build_sum, 1, 65536, ADDED, 1);
    check("sum", build_sum, 1, 65535, 0, 0);
    check("sum", build_sum, 3, 100001, 0, 1);
    check("sum", build_sum, 3, 66666, APART, 1);
    check("sum", build_sum, 2, 131080, TURNED | NARROW, 1);
    check("mean", build_mean, 1, 200004, WIDE, 1);
    check("mean", build_mean, 3, 100004, SKEWED | ADDED, 1);
    check("extremes", build_extremes, 1, 99999, 0, 1);
    check("extremes", build_extremes, 6, 66664, HOSTILE, 1);
    check("norm", build_norm, 1, 131080, NARROW, 1);
    check("loss", build_loss, 1, 65540, 0, 1);
    check("variance", build_variance, 1, 262148, 0, 2);
    check("variance", build_variance, 3, 65536, WIDE, 2);
    check("layer norm", build_layer_norm, 2, 66668, 0, 2);
    check("layer norm", build_layer_norm, 2, 66668, ADDED | SKEWED, 2);
    check("softmax", build_softmax, 6, 66668, HOSTILE, 1);
    check("softmax", build_softmax, 6, 66667, HOSTILE | WIDE, 1);
    check("softmax", build_softmax, 1, 200000, 0, 1);
    check("in place", build_in_place, 3, 66664, IN_PLACE, 2);
    check("dropout", build_dropout, 3, 70002, 0, 1);
    check_many_rows();
    check_far_rows();
    for (int i = 0; i < first + count; i++) check_random_program(i, i >= first, &state);
    fprintf(stderr, "%d with shared rows; %d sources through NVRTC\n", n_shared, cuda.nvrtc.compiled);
    CHECK(count < 16 || n_shared > 24);
    test_exec_close(&cuda.exec);
    return TEST_END();
}
