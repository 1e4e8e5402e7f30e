/* test_cuda_program_cases.c - what a random program in the simulator would hardly meet: every operation on hostile
 * values, rows of every length class and their sums, many runs in one launch, turned tiles with random numbers,
 * operands that are not aligned, empty spaces, wrong arguments, memory that runs out. The CPU backend gives the bits to
 * expect. */
#include "cuda_device.h"
#include "program_hand.h"
#include "kernels/elementary.h"

static cuda_device cuda;

static te_operand operand(void *data, te_dtype dtype, int64_t outer, int64_t inner)
{
    return (te_operand){.data = data, .dtype = dtype, .stride = {outer, inner}};
}

/* Bits, but that every NaN is as good as another. */
static bool same_floats(const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (memcmp(&a[i], &b[i], 4) == 0 || (isnan(a[i]) && isnan(b[i]))) continue;
        fprintf(stderr, "element %zu of %zu: %.9g, want %.9g\n", i, n, (double)a[i], (double)b[i]);
        return false;
    }
    return true;
}

static bool near(const float *a, const float *b, size_t n, double tolerance)
{
    for (size_t i = 0; i < n; i++)
        if (!(fabs((double)a[i] - (double)b[i]) <= tolerance)) {
            fprintf(stderr, "element %zu of %zu: %.9g, want %.9g\n", i, n, (double)a[i], (double)b[i]);
            return false;
        }
    return true;
}

static void run_both(built *b, const te_run *gpu, const te_run *cpu, int n, const char *name)
{
    CHECK_MSG(cuda_program_run(&cuda, &b->program, gpu, n) == TE_OK, "%s: %s", name, cuda.exec.message);
    CHECK_MSG(te_cpu_program_run(&cuda.exec, &b->program, cpu, n) == TE_OK, "%s: %s", name, cuda.exec.message);
}

/* --- every operation --------------------------------------------------------------------------------------------- */

static void check_operation(te_opcode op)
{
    enum { N = 1021 };
    static built b;
    static float x[3][N], gpu[N], cpu[N];
    static const float hostile[] = {0.0f, -0.0f, 1, -1, INFINITY, -INFINITY, NAN, 3e38f, -1e-40f, 1e-45f, 65504, 2.5f,
                                    -3.5f, 88.8f, -104, 1e9f, 3, 2, 0.5f, 1e13f};
    enum { HOSTILE = sizeof hostile / sizeof hostile[0] };
    uint64_t state = 99;
    for (int i = 0; i < N; i++) {
        x[0][i] = i < HOSTILE * HOSTILE ? hostile[i % HOSTILE] : (float)test_uniform(&state, -20, 20);
        x[1][i] = i < HOSTILE * HOSTILE ? hostile[i / HOSTILE] : (float)test_uniform(&state, -5, 5);
        x[2][i] = (float)i;
    }
    begin(&b, te_opcode_name(op));
    int        values[3] = {-1, -1, -1};
    te_operand in[3], out[2] = {operand(gpu, TE_F32, 1, 0), operand(cpu, TE_F32, 1, 0)};
    for (int k = 0; k < te_opcode_args(op); k++) {
        values[k] = input(&b, TE_RATE_ELEM);
        in[k] = operand(x[k], TE_F32, 1, 0);
    }
    output(&b, TE_OUT_ELEM, emit(&b, op, values[0], values[1], values[2]));
    te_run run = {.ndim = 1, .shape = {N}, .inputs = in, .outputs = &out[0]}, want = run;
    want.outputs = &out[1];
    run_both(&b, &run, &want, 1, te_opcode_name(op));
    CHECK_MSG(same_floats(gpu, cpu, N), "%s", te_opcode_name(op));
    release(&b);
}

/* --- rows and their sums ----------------------------------------------------------------------------------------- */

static void build_softmax(built *b)
{
    begin(b, "softmax");
    int x = input(b, TE_RATE_ELEM);
    int top = reduce(b, TE_PW_ROWMAX, x);
    int e = emit(b, TE_PW_EXP, emit(b, TE_PW_SUB, x, top, -1), -1, -1);
    int sum = reduce(b, TE_PW_ROWSUM, e);
    output(b, TE_OUT_ELEM, emit(b, TE_PW_MUL, e, emit(b, TE_PW_RECIP, sum, -1, -1), -1));
    output(b, TE_OUT_ROW, emit(b, TE_PW_ADD, top, emit(b, TE_PW_LOG, sum, -1, -1), -1));
}

static void build_norm(built *b, int64_t n)
{
    begin(b, "norm");
    int x = input(b, TE_RATE_ELEM), gamma = input(b, TE_RATE_ELEM), scale = number(b, 1.0 / (double)n);
    int mean = emit(b, TE_PW_MUL, reduce(b, TE_PW_ROWSUM, x), scale, -1), d = emit(b, TE_PW_SUB, x, mean, -1);
    int variance = emit(b, TE_PW_MUL, reduce(b, TE_PW_ROWSUM, emit(b, TE_PW_MUL, d, d, -1)), scale, -1);
    int rstd = emit(b, TE_PW_RSQRT, emit(b, TE_PW_ADD, variance, number(b, 1e-5), -1), -1, -1);
    output(b, TE_OUT_ELEM, emit(b, TE_PW_MUL, emit(b, TE_PW_MUL, d, rstd, -1), gamma, -1));
    output(b, TE_OUT_COLSUM, x);
    output(b, TE_OUT_SUM, emit(b, TE_PW_MUL, x, x, -1));
    output(b, TE_OUT_AMAX, x);
}

/* One program on rows x columns numbers, x and y at `skip` elements from where they would be aligned. */
typedef struct sums {
    float *memory, *y, *row, *column, total[2];
} sums;

static sums run_sums(built *b, int64_t rows, int64_t columns, int skip, bool on_cuda)
{
    size_t   n = (size_t)(rows * columns);
    uint64_t state = 7;
    sums     s = {.memory = test_scratch(&cuda.exec, (2 * n + (size_t)(rows + 3 * columns) + 64) * 4)};
    float   *x = s.memory + skip, *gamma = x + n;
    s.column = gamma + columns;
    s.row = s.column + columns;
    s.y = s.row + rows;
    for (size_t i = 0; i < n; i++) x[i] = (float)test_uniform(&state, -3, 3);
    for (int64_t j = 0; j < columns; j++) gamma[j] = (float)test_uniform(&state, 0.5, 2);
    te_operand in[2] = {operand(x, TE_F32, columns, 1), operand(gamma, TE_F32, 0, 1)};
    te_operand out[4] = {operand(s.y, TE_F32, columns, 1), operand(s.row, TE_F32, 1, 1),
                         operand(&s.total[0], TE_F32, 0, 0), operand(&s.total[1], TE_F32, 0, 0)};
    if (b->outputs[1].kind == TE_OUT_COLSUM) out[1] = operand(s.column, TE_F32, 0, 1);
    te_run run = {.ndim = 2, .shape = {rows, columns}, .inputs = in, .outputs = out};
    CHECK_MSG((on_cuda ? cuda_program_run(&cuda, &b->program, &run, 1)
                       : te_cpu_program_run(&cuda.exec, &b->program, &run, 1)) == TE_OK, "%s", cuda.exec.message);
    return s;
}

static void check_sums(int64_t rows, int64_t columns)
{
    static built b;
    size_t       n = (size_t)(rows * columns);
    for (int k = 0; k < 2; k++) {
        if (k == 0) build_softmax(&b);
        else build_norm(&b, columns);
        sums gpu = run_sums(&b, rows, columns, 0, true), again = run_sums(&b, rows, columns, 0, true);
        sums moved = run_sums(&b, rows, columns, 1, true), cpu = run_sums(&b, rows, columns, 0, false);
        CHECK_MSG(near(gpu.y, cpu.y, n, columns < 3 ? 1e-3 : 5e-6), "%s of %lld", b.program.name, (long long)columns);
        CHECK(memcmp(gpu.y, again.y, n * 4) == 0 && memcmp(gpu.y, moved.y, n * 4) == 0);
        if (k == 0) {
            CHECK(near(gpu.row, cpu.row, (size_t)rows, 2e-6) && memcmp(gpu.row, moved.row, (size_t)rows * 4) == 0);
        } else {
            CHECK(near(gpu.column, cpu.column, (size_t)columns, 4e-7 * 3 * (double)(rows + 4)));
            CHECK(memcmp(gpu.column, moved.column, (size_t)columns * 4) == 0 && memcmp(gpu.total, moved.total, 8) == 0);
            CHECK(fabsf(gpu.total[0] - cpu.total[0]) <= 1e-6f * cpu.total[0] && gpu.total[1] == cpu.total[1]);
        }
        free(gpu.memory), free(again.memory), free(moved.memory), free(cpu.memory);
        release(&b);
    }
}

/* Sums of many columns at once, which all pass through one shared array: a kernel that declares more than 48 KiB of
 * shared variables does not load. */
static void check_many_column_sums(bool reduces)
{
    enum { ROWS = 20, COLUMNS = 1024, SUMS = 14, SHARED = 48 << 10 };
    static built                    b;
    static struct te_program_output outputs[SUMS];
    static uint16_t                 x[ROWS * COLUMNS];
    static float                    gpu[SUMS][COLUMNS], cpu[SUMS][COLUMNS];
    te_operand in = operand(x, TE_BF16, COLUMNS, 1), out[2][SUMS];
    uint64_t   state = 3;
    for (int i = 0; i < ROWS * COLUMNS; i++) x[i] = te_f32_to_bf16((float)test_uniform(&state, -3, 3));
    begin(&b, "column sums");
    int value = input(&b, TE_RATE_ELEM);
    if (reduces) value = emit(&b, TE_PW_ADD, value, reduce(&b, TE_PW_ROWMAX, value), -1);
    b.program.outputs = outputs;
    b.program.n_outputs = SUMS;
    for (int o = 0; o < SUMS; o++) {
        outputs[o] = (struct te_program_output){TE_OUT_COLSUM, emit(&b, TE_PW_MUL, value, number(&b, o + 1), -1)};
        out[0][o] = operand(gpu[o], TE_F32, 0, 1);
        out[1][o] = operand(cpu[o], TE_F32, 0, 1);
    }
    te_run run = {.ndim = 2, .shape = {ROWS, COLUMNS}, .inputs = &in, .outputs = out[0]}, want = run;
    want.outputs = out[1];
    run_both(&b, &run, &want, 1, "column sums");
    for (int o = 0; o < SUMS; o++) CHECK(near(gpu[o], cpu[o], COLUMNS, 1e-3));
    te_cuda_program_shape shape;
    te_text               source;
    te_text_open(&source, &te_mem_libc);
    CHECK(te_cuda_program_shape_make(&cuda.exec, &b.program, &run, &shape) == TE_OK);
    CHECK(shape.kind == (reduces ? TE_CUDA_ROWS : TE_CUDA_COLUMNS));
    CHECK(te_cuda_program_source(&b.program, &shape, &source) == TE_OK);
    te_cuda_sim *sim =
        te_cuda_sim_compile(source.data, NULL, cuda.exec.message, sizeof cuda.exec.message);
    CHECK(sim && te_cuda_sim_variables(sim) <= SHARED);
    te_cuda_sim_release(sim);
    te_text_close(&source);
    release(&b);
}

/* The device's own exponential, for the one that says its argument is never above 0 alone: within 3 units of the last
 * place down to the smallest normal number. */
static void check_exp_below(void)
{
    enum { N = 1000 };
    static built b;
    float        x[N], plain[N], below[N];
    begin(&b, "exp below");
    int value = input(&b, TE_RATE_ELEM), marked = emit(&b, TE_PW_EXP, value, -1, -1);
    output(&b, TE_OUT_ELEM, emit(&b, TE_PW_EXP, value, -1, -1));
    b.insns[marked].slot = TE_EXP_BELOW;
    output(&b, TE_OUT_ELEM, marked);
    for (int i = 0; i < N; i++) x[i] = -110.0f * (float)i / N;
    x[N - 1] = -INFINITY;
    te_operand in = operand(x, TE_F32, 0, 1), out[2] = {operand(plain, TE_F32, 0, 1), operand(below, TE_F32, 0, 1)};
    te_run     run = {.ndim = 1, .shape = {N}, .inputs = &in, .outputs = out};
    in.stride[0] = out[0].stride[0] = out[1].stride[0] = 1;
    CHECK(cuda_program_run(&cuda, &b.program, &run, 1) == TE_OK);
    for (int i = 0; i < N; i++) {
        double wanted = exp((double)x[i]), unit = wanted * 0x1p-23;
        CHECK(plain[i] == te_exp(x[i]));
        CHECK_MSG(wanted < 0x1p-126 ? below[i] < 0x1.1p-126f : fabs(below[i] - wanted) <= 3 * unit, "e^%g: %g, not %g",
                  (double)x[i], (double)below[i], wanted);
    }
    te_cuda_program_shape shape;
    te_text               source;
    te_text_open(&source, &te_mem_libc);
    CHECK(te_cuda_program_shape_make(&cuda.exec, &b.program, &run, &shape) == TE_OK);
    CHECK(te_cuda_program_source(&b.program, &shape, &source) == TE_OK);
    CHECK(strstr(source.data, " = te_row_exp(v") && strstr(source.data, " = te_op_exp(v"));
    te_text_close(&source);
    release(&b);
}

/* Sums of columns on [outer, inner, columns] into every second element, added to what is there, with the scaled
 * elements, their sum and their amax: few rows, whose sums are whole at once, and many, which leave parts. Numbers are
 * whole, so that every order gives the same. */
static void check_column_sums(int64_t outer, int64_t inner, int64_t columns, te_dtype dtype, bool direct)
{
    static built b;
    size_t       n = (size_t)(outer * inner * columns), width = (size_t)columns;
    uint64_t     state = 11;
    float       *x = test_scratch(&cuda.exec, n * 4), *y[2], *added[2], total[2] = {1, 1}, amax[2] = {1, 1};
    float       *factor = test_scratch(&cuda.exec, (size_t)outer * 4);
    for (size_t i = 0; i < n; i++) {
        float value = (float)(int)(test_random(&state) % 17) - 8;
        if (dtype == TE_BF16) ((uint16_t *)x)[i] = te_f32_to_bf16(value);
        else x[i] = value;
    }
    for (int64_t i = 0; i < outer; i++) factor[i] = (float)(i % 3 - 1);
    begin(&b, "columns");
    int v = emit(&b, TE_PW_MUL, input(&b, TE_RATE_ELEM), input(&b, TE_RATE_ROW), -1);
    output(&b, TE_OUT_COLSUM, v);
    output(&b, TE_OUT_ELEM, v);
    output(&b, TE_OUT_SUM, v);
    output(&b, TE_OUT_AMAX, v);
    te_operand in[2] = {{.data = x, .dtype = dtype, .stride = {inner * columns, columns, 1}},
                        {.data = factor, .dtype = TE_F32, .stride = {1, 0, 0}}}, out[2][4];
    te_run runs[2];
    for (int k = 0; k < 2; k++) {
        y[k] = test_scratch(&cuda.exec, n * 4);
        added[k] = test_scratch(&cuda.exec, width * 8);
        for (size_t i = 0; i < 2 * width; i++) added[k][i] = (float)i;
        out[k][0] = (te_operand){.data = added[k], .dtype = TE_F32, .stride = {0, 0, 2}, .accumulate = true};
        out[k][1] = (te_operand){.data = y[k], .dtype = TE_F32, .stride = {inner * columns, columns, 1}};
        out[k][2] = (te_operand){.data = &total[k], .dtype = TE_F32};
        out[k][3] = (te_operand){.data = &amax[k], .dtype = TE_F32};
        runs[k] = (te_run){.ndim = 3, .shape = {outer, inner, columns}, .inputs = in, .outputs = out[k]};
    }
    te_cuda_program_shape shape;
    CHECK(te_cuda_program_shape_make(&cuda.exec, &b.program, &runs[0], &shape) == TE_OK);
    CHECK_MSG(shape.kind == TE_CUDA_COLUMNS && shape.direct == direct, "%lld columns", (long long)columns);
    run_both(&b, &runs[0], &runs[1], 1, "columns");
    CHECK_MSG(same_floats(added[0], added[1], 2 * width) && same_floats(y[0], y[1], n), "%lld columns",
              (long long)columns);
    CHECK(total[0] == total[1] && amax[0] == amax[1]);
    for (int k = 0; k < 2; k++) free(y[k]), free(added[k]);
    free(x), free(factor);
    release(&b);
}

static void check_columns(void)
{
    check_column_sums(2, 3, 50001, TE_F32, true);
    check_column_sums(4, 8, 50000, TE_BF16, true);
    check_column_sums(3, 5, 1, TE_F32, true);
    check_column_sums(30, 100, 1, TE_BF16, true);
    check_column_sums(30, 100, 68, TE_BF16, false);
    check_column_sums(70, 10, 769, TE_F32, false);
    check_column_sums(100, 13, 768, TE_BF16, false);
}

/* --- losses ------------------------------------------------------------------------------------------------------ */

/* log sum exp, the logit of a target, shares, of rows of a width: one held in registers, one read in pieces. */
typedef struct loss {
    float *memory, *y, *top, *sum, *logit, *lse;
} loss;

static void build_loss(built *b, bool shares)
{
    begin(b, "loss");
    int x = input(b, TE_RATE_ELEM), target = input(b, TE_RATE_ROW), zero = number(b, 0);
    int top = reduce(b, TE_PW_ROWMAX, x);
    int e = emit(b, TE_PW_EXP, emit(b, TE_PW_SUB, x, top, -1), -1, -1);
    int sum = reduce(b, TE_PW_ROWSUM, e);
    int column = emit_full(b, TE_PW_COLUMN, TE_RATE_ELEM, 0, 0, -1, -1, -1);
    int here = emit(b, TE_PW_WHERE, emit(b, TE_PW_EQ, column, target, -1), x, zero);
    output(b, TE_OUT_ROW, top);
    output(b, TE_OUT_ROW, sum);
    output(b, TE_OUT_ROW, reduce(b, TE_PW_ROWSUM, here));
    output(b, TE_OUT_ROW, emit(b, TE_PW_ADD, top, emit(b, TE_PW_LOG, sum, -1, -1), -1));
    if (shares) output(b, TE_OUT_ELEM, emit(b, TE_PW_DIV, e, sum, -1));
}

/* Rows of numbers; the first ones hold infinities and NaN, or nothing else. */
static loss run_loss(built *b, int64_t rows, int64_t columns, int shares, bool on_cuda)
{
    size_t   n = (size_t)(rows * columns), height = (size_t)rows;
    uint64_t state = 21;
    loss     l = {.memory = test_scratch(&cuda.exec, (n * (size_t)(1 + shares) + 5 * height) * 4)};
    float   *x = l.memory, *target = x + n;
    l.top = target + height, l.sum = l.top + height, l.logit = l.sum + height, l.lse = l.logit + height;
    l.y = l.lse + height;
    for (size_t i = 0; i < n; i++) x[i] = (float)test_uniform(&state, -60, 30);
    for (int64_t r = 0; r < rows; r++) target[r] = (float)(r * 7919 % (columns + 1));
    for (int64_t j = 0; j < columns; j++) {
        x[j] = -INFINITY;
        if (j % 64 < 63) x[columns + j] = -INFINITY; /* whole units, and whole threads' */
        if (j > 0) x[2 * columns + j] = -INFINITY;
    }
    x[3 * columns + columns / 2] = INFINITY;
    x[4 * columns + columns - 1] = NAN;
    te_operand in[2] = {operand(x, TE_F32, columns, 1), operand(target, TE_F32, 1, 0)};
    te_operand out[5] = {operand(l.top, TE_F32, 1, 0), operand(l.sum, TE_F32, 1, 0), operand(l.logit, TE_F32, 1, 0),
                         operand(l.lse, TE_F32, 1, 0), operand(l.y, TE_F32, columns, 1)};
    te_run run = {.ndim = 2, .shape = {rows, columns}, .inputs = in, .outputs = out};
    CHECK_MSG((on_cuda ? cuda_program_run(&cuda, &b->program, &run, 1)
                       : te_cpu_program_run(&cuda.exec, &b->program, &run, 1)) == TE_OK, "%s", cuda.exec.message);
    return l;
}

/* Within so many units of the last place; what is below 2^-126 may be 0. */
static bool close_floats(const float *a, const float *b, size_t n, double units)
{
    for (size_t i = 0; i < n; i++) {
        double error = fabs((double)a[i] - (double)b[i]);
        if ((isnan(a[i]) && isnan(b[i])) || a[i] == b[i] || error <= units * 0x1p-23 * fabs((double)b[i]) + 0x1p-126)
            continue;
        fprintf(stderr, "element %zu of %zu: %.9g, want %.9g\n", i, n, (double)a[i], (double)b[i]);
        return false;
    }
    return true;
}

static void check_loss(int64_t rows, int64_t columns, bool shares)
{
    static built b;
    size_t       height = (size_t)rows;
    build_loss(&b, shares);
    loss gpu = run_loss(&b, rows, columns, shares, true), cpu = run_loss(&b, rows, columns, shares, false);
    CHECK_MSG(same_floats(gpu.top, cpu.top, height) && same_floats(gpu.logit, cpu.logit, height), "%lld",
              (long long)columns);
    CHECK_MSG(close_floats(gpu.sum, cpu.sum, height, 24) && close_floats(gpu.lse, cpu.lse, height, 4), "%lld",
              (long long)columns);
    if (shares) CHECK(close_floats(gpu.y, cpu.y, height * (size_t)columns, 24));
    free(gpu.memory), free(cpu.memory);
    release(&b);
}

/* --- many runs --------------------------------------------------------------------------------------------------- */

/* Tensors of several sizes and a momentum update in place; the sum of squares of all in one output. */
static void check_many_runs(void)
{
    enum { RUNS = 148, LONGEST = 3000 };
    static built  update, squares;
    static float  weight[2][RUNS][LONGEST], moment[2][RUNS][LONGEST];
    static te_run runs[2][RUNS], sum_runs[2][RUNS];
    static te_operand in[2][RUNS][2], out[2][RUNS][2];
    float         total[2] = {0.5f, 0.5f};
    double        params[2] = {0.9, 0.01};
    uint64_t      state = 3;
    begin(&update, "momentum");
    int w = input(&update, TE_RATE_ELEM), m = input(&update, TE_RATE_ELEM), beta = param(&update),
        rate = param(&update);
    int next = emit(&update, TE_PW_ADD, emit(&update, TE_PW_MUL, m, beta, -1), w, -1);
    output(&update, TE_OUT_ELEM, emit(&update, TE_PW_SUB, w, emit(&update, TE_PW_MUL, next, rate, -1), -1));
    output(&update, TE_OUT_ELEM, next);
    begin(&squares, "squares");
    int x = input(&squares, TE_RATE_ELEM);
    output(&squares, TE_OUT_SUM, emit(&squares, TE_PW_ROUND, emit(&squares, TE_PW_MUL, x, x, -1), -1, -1));
    te_operand sum_out[2] = {operand(&total[0], TE_F32, 0, 0), operand(&total[1], TE_F32, 0, 0)};
    for (int r = 0; r < RUNS; r++) {
        int64_t n = r % 7 == 0 ? LONGEST : r == 1 ? 1 : 100 + 3 * r;
        for (int k = 0; k < 2; k++) {
            for (int i = 0; i < LONGEST; i++)
                weight[k][r][i] = (float)test_uniform(&state, -9, 9), moment[k][r][i] = 0.5f;
            memcpy(weight[k][r], weight[0][r], sizeof weight[0][r]);
            in[k][r][0] = out[k][r][0] = operand(weight[k][r], TE_F32, 1, 0);
            in[k][r][1] = out[k][r][1] = operand(moment[k][r], TE_F32, 1, 0);
            runs[k][r] = (te_run){.ndim = 1, .shape = {n}, .inputs = in[k][r], .outputs = out[k][r], .params = params};
            sum_runs[k][r] = (te_run){.ndim = 1, .shape = {n}, .inputs = in[k][r], .outputs = &sum_out[k]};
        }
    }
    sum_out[0].accumulate = sum_out[1].accumulate = true;
    int before = cuda.kinds[TE_CUDA_FLAT];
    run_both(&update, runs[0], runs[1], RUNS, "momentum");
    CHECK_MSG(cuda.kinds[TE_CUDA_FLAT] - before <= 3, "%d launches", cuda.kinds[TE_CUDA_FLAT] - before);
    for (int r = 0; r < RUNS; r++)
        CHECK(same_floats(weight[0][r], weight[1][r], LONGEST) && same_floats(moment[0][r], moment[1][r], LONGEST));
    run_both(&squares, sum_runs[0], sum_runs[1], RUNS, "squares");
    CHECK_MSG(total[0] == total[1], "sum of squares %.9g, want %.9g", (double)total[0], (double)total[1]);
    release(&update), release(&squares);
}

/* --- turned tiles ------------------------------------------------------------------------------------------------ */

/* Dropout of a transposed operand, added to a plain one, to a transposed and a plain output, with its column sums and
 * amax, on [3, 45, 50]. */
static void check_turned(void)
{
    enum { A = 3, B = 45, C = 50, N = A * B * C };
    static built    b;
    static float    x[N], plain[2][N];
    static uint16_t turned[2][N];
    float           amax[2] = {0, 0}, column_sums[2][C];
    uint64_t        state = 5;
    double          params[1] = {0.4};
    te_rng          rng = {11, 22, 33, NULL};
    for (int i = 0; i < N; i++) x[i] = (float)test_uniform(&state, -2, 2);
    begin(&b, "turned");
    int v = input(&b, TE_RATE_ELEM), add = input(&b, TE_RATE_ELEM), row = input(&b, TE_RATE_ROW);
    b.program.n_rngs = 1;
    int keep = emit_full(&b, TE_PW_KEEP, TE_RATE_ELEM, 0, 0, param(&b), -1, -1);
    int column = emit_full(&b, TE_PW_COLUMN, TE_RATE_ELEM, 0, 0, -1, -1, -1);
    int y = emit(&b, TE_PW_ADD, emit(&b, TE_PW_MUL, emit(&b, TE_PW_MUL, v, keep, -1), row, -1), add, -1);
    output(&b, TE_OUT_ELEM, y);
    output(&b, TE_OUT_ELEM, emit(&b, TE_PW_ADD, y, column, -1));
    output(&b, TE_OUT_AMAX, y);
    output(&b, TE_OUT_COLSUM, emit(&b, TE_PW_ROUND, y, -1, -1));
    te_operand in[3] = {{.data = x, .dtype = TE_F32, .stride = {B * C, 1, B}},
                        {.data = x, .dtype = TE_F32, .stride = {0, C, 1}},
                        {.data = x, .dtype = TE_F32, .stride = {0, 1, 0}}};
    te_operand out[2][4];
    te_run     runs[2];
    for (int k = 0; k < 2; k++) {
        out[k][0] = (te_operand){.data = turned[k], .dtype = TE_BF16, .stride = {1, A, A * B}};
        out[k][1] = (te_operand){.data = plain[k], .dtype = TE_F32, .stride = {B * C, C, 1}};
        out[k][2] = operand(&amax[k], TE_F32, 0, 0);
        out[k][3] = (te_operand){.data = column_sums[k], .dtype = TE_F32, .stride = {0, 0, 1}};
        runs[k] =
            (te_run){.ndim = 3, .shape = {A, B, C}, .inputs = in, .outputs = out[k], .params = params, .rngs = &rng};
    }
    int before = cuda.kinds[TE_CUDA_TILED];
    run_both(&b, &runs[0], &runs[1], 1, "turned");
    CHECK(cuda.kinds[TE_CUDA_TILED] == before + 1);
    CHECK(same_floats(plain[0], plain[1], N) && memcmp(turned[0], turned[1], sizeof turned[0]) == 0 &&
          amax[0] == amax[1]);
    CHECK(same_floats(column_sums[0], column_sums[1], C));
    release(&b);
}

/* Dropout of a transposed operand times a plain one to both kinds of output, on [3, rows, columns]: in pairs where
 * `paired`. The operands begin `from` elements behind where memory does. */
static void check_turned_units(te_dtype first, te_dtype second, int64_t rows, int64_t columns, int from, bool paired)
{
    enum { A = 3, MOST = A * 140 * 150 + 1 };
    static built    b;
    static uint32_t memory[6][MOST]; /* of elements of 4 bytes or 2 */
    uint64_t        state = 6;
    double          params[1] = {0.25};
    te_rng          rng = {1, 2, 3, NULL};
    size_t          sizes[2] = {te_dtype_size(first), te_dtype_size(second)};
    memset(memory, 0, sizeof memory);
    for (int64_t i = 0; i < A * rows * columns + from; i++)
        for (int k = 0; k < 2; k++)
            te_store_f64(memory[k], k ? second : first, i, (double)(float)test_uniform(&state, -2, 2));
    begin(&b, "turned units");
    int v = input(&b, TE_RATE_ELEM), by = input(&b, TE_RATE_ELEM);
    b.program.n_rngs = 1;
    int keep = emit_full(&b, TE_PW_KEEP, TE_RATE_ELEM, 0, 0, param(&b), -1, -1);
    int y = emit(&b, TE_PW_MUL, emit(&b, TE_PW_MUL, v, keep, -1), by, -1);
    output(&b, TE_OUT_ELEM, y);
    output(&b, TE_OUT_ELEM, emit(&b, TE_PW_ADD, y, v, -1));
    te_operand turned = {.dtype = first, .stride = {rows * columns, 1, rows}};
    te_operand plain = {.dtype = second, .stride = {rows * columns, columns, 1}};
    te_operand in[2] = {turned, plain}, out[2][2];
    te_run     runs[2];
    for (int k = 0; k < 2; k++) in[k].data = (char *)memory[k] + (size_t)from * sizes[k];
    for (int k = 0; k < 2; k++) {
        out[k][0] = turned, out[k][1] = plain;
        for (int o = 0; o < 2; o++) out[k][o].data = (char *)memory[2 + 2 * k + o] + (size_t)from * sizes[o];
        runs[k] = (te_run){.ndim = 3, .shape = {A, rows, columns}, .inputs = in, .outputs = out[k], .params = params,
                           .rngs = &rng};
    }
    te_cuda_program_shape shape;
    CHECK(te_cuda_program_shape_make(&cuda.exec, &b.program, &runs[0], &shape) == TE_OK);
    CHECK(shape.kind == TE_CUDA_TILED && shape.vector == 1 + paired);
    run_both(&b, &runs[0], &runs[1], 1, "turned units");
    for (int o = 0; o < 2; o++)
        CHECK_MSG(memcmp(memory[2 + o], memory[4 + o], sizeof memory[2]) == 0, "output %d, %s and %s, %lld x %lld", o,
                  te_dtype_name(first), te_dtype_name(second), (long long)rows, (long long)columns);
    release(&b);
}

static void check_all_turned_units(void)
{
    check_turned_units(TE_BF16, TE_BF16, 64, 128, 0, true);
    check_turned_units(TE_BF16, TE_BF16, 140, 150, 0, true);
    check_turned_units(TE_BF16, TE_F32, 66, 62, 0, true);
    check_turned_units(TE_F32, TE_BF16, 130, 66, 0, true);
    check_turned_units(TE_F32, TE_F32, 66, 62, 0, false);
    check_turned_units(TE_BF16, TE_BF16, 65, 62, 0, false);
    check_turned_units(TE_BF16, TE_BF16, 66, 63, 0, false);
    check_turned_units(TE_BF16, TE_BF16, 66, 62, 1, false);
}

/* --- edges ------------------------------------------------------------------------------------------------------- */

static void check_empty(void)
{
    static built b;
    begin(&b, "empty");
    int x = input(&b, TE_RATE_ELEM);
    output(&b, TE_OUT_ROW, reduce(&b, TE_PW_ROWMAX, x));
    output(&b, TE_OUT_ROW, reduce(&b, TE_PW_ROWSUM, x));
    output(&b, TE_OUT_COLSUM, x);
    output(&b, TE_OUT_SUM, x);
    float      top[2], sum[2] = {9, 9}, columns[3] = {9, 9, 9}, total = 9;
    te_operand in = operand(NULL, TE_F32, 0, 1);
    te_operand out[4] = {operand(top, TE_F32, 1, 0), operand(sum, TE_F32, 1, 0), operand(columns, TE_F32, 0, 1),
                         operand(&total, TE_F32, 0, 0)};
    te_run     no_columns = {.ndim = 2, .shape = {2, 0}, .inputs = &in, .outputs = out};
    te_run     no_rows = {.ndim = 2, .shape = {0, 3}, .inputs = &in, .outputs = out};
    CHECK(cuda_program_run(&cuda, &b.program, &no_columns, 1) == TE_OK);
    CHECK(top[0] == -INFINITY && top[1] == -INFINITY && sum[0] == 0 && sum[1] == 0 && total == 0 && columns[0] == 9);
    total = 9;
    CHECK(cuda_program_run(&cuda, &b.program, &no_rows, 1) == TE_OK);
    CHECK(columns[0] == 0 && columns[1] == 0 && columns[2] == 0 && total == 0);
    release(&b);
}

static void check_errors(void)
{
    static built          b;
    te_cuda_program_shape shape;
    te_text               text;
    float                 x = 1;
    te_exec              *exec = &cuda.exec;
    begin(&b, "wrong");
    output(&b, TE_OUT_ELEM, emit(&b, TE_PW_NEG, input(&b, TE_RATE_ELEM), -1, -1));
    te_operand in = operand(NULL, TE_F32, 1, 0), out = operand(&x, TE_F32, 1, 0);
    te_run     run = {.ndim = 1, .shape = {1}, .inputs = &in, .outputs = &out};
    CHECK(te_cuda_program_shape_make(exec, &b.program, &run, &shape) == TE_ERROR_ARGUMENT &&
          strstr(exec->message, "input 0 has no data"));
    in.data = &x;
    in.dtype = (te_dtype)99;
    CHECK(te_cuda_program_shape_make(exec, &b.program, &run, &shape) == TE_ERROR_ARGUMENT &&
          strstr(exec->message, "99"));
    in.dtype = TE_F32;
    run.ndim = 0;
    CHECK(te_cuda_program_shape_make(exec, &b.program, &run, &shape) == TE_ERROR_ARGUMENT);
    run.ndim = 1;
    CHECK(te_cuda_program_shape_make(exec, &b.program, &run, &shape) == TE_OK);
    b.insns[1].arg[0] = 1;
    te_text_open(&text, &te_mem_libc);
    CHECK(te_cuda_program_source(&b.program, &shape, &text) == TE_ERROR_INTERNAL);
    te_text_close(&text);
}

static long allocations_left, bytes_held;

static void *counting_realloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    (void)user;
    if (new_size && allocations_left-- <= 0) return NULL;
    bytes_held += (long)new_size - (long)old_size;
    return te_mem_libc.realloc(NULL, ptr, old_size, new_size);
}

static void check_memory(void)
{
    static built          b;
    te_cuda_program_shape shape;
    te_text               text;
    float                 x[4];
    te_mem                mem = {counting_realloc, NULL};
    te_operand            in = operand(x, TE_F32, 2, 1), out[2] = {operand(x, TE_F32, 2, 1), operand(x, TE_F32, 1, 0)};
    te_run                run = {.ndim = 2, .shape = {2, 2}, .inputs = &in, .outputs = out};
    te_status             status = TE_ERROR_MEMORY;
    build_softmax(&b);
    CHECK(te_cuda_program_shape_make(&cuda.exec, &b.program, &run, &shape) == TE_OK);
    for (long allowed = 0; status != TE_OK && allowed < 100; allowed++) {
        allocations_left = allowed;
        te_text_open(&text, &mem);
        status = te_cuda_program_source(&b.program, &shape, &text);
        CHECK(status == TE_OK || status == TE_ERROR_MEMORY);
        te_text_close(&text);
        CHECK_MSG(bytes_held == 0, "%ld bytes lost after %ld allocations", bytes_held, allowed);
    }
    CHECK(status == TE_OK);
}

int main(void)
{
    static const int64_t shapes[][2] = {{1, 1},     {300, 1},    {65, 2},    {33, 17},   {50, 129}, {20, 768},
                                        {600, 64},  {5, 3000},   {3, 16384}, {2, 50257}, {1, 200000}};
    cuda = (cuda_device){.exec = test_exec_open(1), .multiprocessors = 3};
    nvrtc_open(&cuda.nvrtc);
    for (int op = TE_PW_NEG; op < TE_PW_ROWSUM; op++) check_operation((te_opcode)op);
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) check_sums(shapes[i][0], shapes[i][1]);
    check_many_column_sums(false);
    check_many_column_sums(true);
    check_exp_below();
    check_loss(40, 7, true);
    check_loss(20, 768, true);
    check_loss(6, 3001, true);
    check_loss(7, 20001, true);
    check_loss(9, 50304, false);
    check_loss(1024, 16640, false);
    check_columns();
    check_many_runs();
    check_turned();
    check_all_turned_units();
    check_empty();
    check_errors();
    check_memory();
    fprintf(stderr, "launches: %d flat, %d rows, %d columns, %d tiled; %d sources through NVRTC\n",
            cuda.kinds[TE_CUDA_FLAT], cuda.kinds[TE_CUDA_ROWS], cuda.kinds[TE_CUDA_COLUMNS], cuda.kinds[TE_CUDA_TILED],
            cuda.nvrtc.compiled);
    test_exec_close(&cuda.exec);
    return TEST_END();
}
