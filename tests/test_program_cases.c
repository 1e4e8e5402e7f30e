/* test_program_cases.c - what a random program on the CPU interpreter would hardly meet: long rows and their sums,
 * several runs that share an output, outputs in the place of inputs, empty spaces, wrong arguments, memory that runs
 * out. */
#include "program_hand.h"

#include "kernels/dtype.h"

/* softmax(x) and log-sum-exp of the row. */
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

static void build_layer_norm(built *b, int64_t n)
{
    begin(b, "layer_norm");
    int x = input(b, TE_RATE_ELEM), gamma = input(b, TE_RATE_ELEM), beta = input(b, TE_RATE_ELEM);
    int scale = number(b, 1.0 / (double)n);
    int mean = emit(b, TE_PW_MUL, reduce(b, TE_PW_ROWSUM, x), scale, -1);
    int d = emit(b, TE_PW_SUB, x, mean, -1);
    int variance = emit(b, TE_PW_MUL, reduce(b, TE_PW_ROWSUM, emit(b, TE_PW_MUL, d, d, -1)), scale, -1);
    int rstd = emit(b, TE_PW_RSQRT, emit(b, TE_PW_ADD, variance, number(b, 1e-5), -1), -1, -1);
    int y = emit(b, TE_PW_MUL, emit(b, TE_PW_MUL, d, rstd, -1), gamma, -1);
    output(b, TE_OUT_ELEM, emit(b, TE_PW_ADD, y, beta, -1));
    output(b, TE_OUT_COLSUM, x);
    output(b, TE_OUT_SUM, emit(b, TE_PW_MUL, x, x, -1));
}

static te_operand operand(void *data, te_dtype dtype, int64_t outer, int64_t inner)
{
    return (te_operand){.data = data, .dtype = dtype, .stride = {outer, inner}};
}

/* Rows of every length class: float32 within a bound of float64, and the same bits on every device. */
static void check_sums(int64_t rows, int64_t columns)
{
    static built softmax, norm;
    uint64_t     state = 7;
    size_t       n = (size_t)(rows * columns);
    float       *x = malloc(n * 4), *g = malloc((size_t)columns * 4), *y = malloc(n * 4), *first = malloc(n * 4);
    float *lse = malloc((size_t)rows * 4), *sums = malloc((size_t)columns * 4),
          *first_sums = malloc((size_t)columns * 4);
    double      *want = malloc(n * 8), *want_sums = calloc((size_t)columns, 8), want_total = 0;
    for (size_t i = 0; i < n; i++) x[i] = (float)test_uniform(&state, -3, 3);
    for (int64_t j = 0; j < columns; j++) g[j] = (float)test_uniform(&state, 0.5, 2);
    for (size_t i = 0; i < n; i++) want_sums[(int64_t)i % columns] += (double)x[i], want_total += (double)(x[i] * x[i]);

    build_softmax(&softmax);
    build_layer_norm(&norm, columns);
    float      total = 0, first_total = 0;
    te_operand in[3] = {operand(x, TE_F32, columns, 1), operand(g, TE_F32, 0, 1), operand(g, TE_F32, 0, 1)};
    te_operand softmax_out[2] = {operand(y, TE_F32, columns, 1), operand(lse, TE_F32, 1, 1)};
    te_operand norm_out[3] = {operand(y, TE_F32, columns, 1), operand(sums, TE_F32, 0, 1),
                              operand(&total, TE_F32, 0, 0)};
    te_run     run = {.ndim = 2, .shape = {rows, columns}, .inputs = in, .outputs = softmax_out};
    te_run     norm_run = {.ndim = 2, .shape = {rows, columns}, .inputs = in, .outputs = norm_out};
    for (int d = 0; d < n_devices; d++) {
        CHECK(te_cpu_program_run(&devices[d], &softmax.program, &run, 1) == TE_OK);
        if (d == 0) memcpy(first, y, n * 4);
        CHECK(memcmp(first, y, n * 4) == 0);
    }
    for (int64_t r = 0; r < rows; r++) {
        double top = -INFINITY, sum = 0, worst = 0;
        for (int64_t j = 0; j < columns; j++) top = fmax(top, (double)x[r * columns + j]);
        for (int64_t j = 0; j < columns; j++) sum += exp((double)x[r * columns + j] - top);
        for (int64_t j = 0; j < columns; j++) {
            double p = exp((double)x[r * columns + j] - top) / sum;
            worst = fmax(worst, fabs((double)first[r * columns + j] / p - 1));
        }
        CHECK_MSG(worst < 2e-6, "softmax of %lld: %g", (long long)columns, worst);
        CHECK(fabs((double)lse[r] - top - log(sum)) < 2e-6);
    }
    for (int d = 0; d < n_devices; d++) {
        CHECK(te_cpu_program_run(&devices[d], &norm.program, &norm_run, 1) == TE_OK);
        if (d == 0) memcpy(first, y, n * 4), memcpy(first_sums, sums, (size_t)columns * 4), first_total = total;
        CHECK(memcmp(first, y, n * 4) == 0 && memcmp(first_sums, sums, (size_t)columns * 4) == 0 &&
              first_total == total);
    }
    for (int64_t j = 0; j < columns; j++) CHECK(fabs((double)sums[j] - want_sums[j]) < 2e-7 * 3 * (double)(rows + 4));
    CHECK_MSG(fabs((double)total / want_total - 1) < 1e-6, "sum of %lld x %lld: %.9g, want %.9g", (long long)rows,
              (long long)columns, (double)total, want_total);
    for (int64_t r = 0; r < rows; r++) {
        double mean = 0, variance = 0, worst = 0;
        for (int64_t j = 0; j < columns; j++) mean += (double)x[r * columns + j] / (double)columns;
        for (int64_t j = 0; j < columns; j++) variance += pow((double)x[r * columns + j] - mean, 2) / (double)columns;
        for (int64_t j = 0; j < columns; j++) {
            double value = ((double)x[r * columns + j] - mean) / sqrt(variance + 1e-5) * (double)g[j] + (double)g[j];
            worst = fmax(worst, fabs((double)first[r * columns + j] - value));
        }
        CHECK_MSG(worst < (columns < 3 ? 1e-3 : 5e-6), "layer norm of %lld: %g", (long long)columns, worst);
    }
    release(&softmax);
    release(&norm);
    free(x), free(g), free(y), free(first), free(lse), free(sums), free(first_sums), free(want), free(want_sums);
}

/* Several runs, one output: sums in the order of the runs, the largest amax. */
static void check_shared_sum(void)
{
    static built b;
    begin(&b, "shared");
    int x = input(&b, TE_RATE_ELEM);
    output(&b, TE_OUT_SUM, x);
    output(&b, TE_OUT_AMAX, x);
    float      big = 1e8f, one[3] = {1, -3, 2.5f}, minus = -1e8f, sum, amax;
    te_operand in[3] = {operand(&big, TE_F32, 1, 0), operand(one, TE_F32, 1, 0), operand(&minus, TE_F32, 1, 0)};
    te_operand out[2] = {operand(&sum, TE_F32, 0, 0), operand(&amax, TE_F32, 0, 0)};
    out[0].accumulate = out[1].accumulate = true;
    te_run runs[3];
    for (int r = 0; r < 3; r++)
        runs[r] = (te_run){.ndim = 1, .shape = {r == 1 ? 3 : 1}, .inputs = &in[r], .outputs = out};
    for (int d = 0; d < n_devices; d++) {
        sum = 5.0f, amax = 7.0f;
        CHECK(te_cpu_program_run(&devices[d], &b.program, runs, 3) == TE_OK);
        CHECK(sum == ((5.0f + 1e8f) + 0.5f) - 1e8f && amax == 1e8f);
        sum = 5.0f, amax = 7.0f;
        CHECK(te_cpu_program_run(&devices[d], &b.program, &runs[1], 1) == TE_OK && sum == 5.5f && amax == 7.0f);
    }
    release(&b);
}

/* An output that shares memory with an input which a later operation still needs. */
static void check_in_place(te_dtype dtype)
{
    static built b;
    begin(&b, "momentum");
    int m = input(&b, TE_RATE_ELEM), g = input(&b, TE_RATE_ELEM), beta = param(&b);
    int next = emit(&b, TE_PW_ADD, emit(&b, TE_PW_MUL, m, beta, -1), g, -1);
    int change = emit(&b, TE_PW_SUB, next, m, -1); /* the old m, after next was made */
    output(&b, TE_OUT_ELEM, next);
    output(&b, TE_OUT_ELEM, change);
    enum { N = 1000 };
    double     moment[N], gradient[N], params[1] = {0.5};
    te_operand in[2] = {operand(moment, dtype, 1, 0), operand(gradient, dtype, 1, 0)};
    te_run     run = {.ndim = 1, .shape = {N}, .inputs = in, .outputs = in, .params = params};
    for (int d = 0; d < n_devices; d++) {
        for (int i = 0; i < N; i++) te_store_f64(moment, dtype, i, i % 50), te_store_f64(gradient, dtype, i, 1);
        CHECK(te_cpu_program_run(&devices[d], &b.program, &run, 1) == TE_OK);
        for (int i = 0; i < N; i++)
            CHECK(te_load_f64(moment, dtype, i) == 0.5 * (i % 50) + 1 &&
                  te_load_f64(gradient, dtype, i) == 0.5 * (i % 50) + 1 - i % 50);
    }
    release(&b);
}

/* In place, where nothing is needed later: y = (|x| - 1)^2 over x, and a copy of another dtype beside it. */
static void check_over_input(te_dtype dtype, te_dtype copy_dtype)
{
    static built b;
    begin(&b, "over");
    int d1 = emit(&b, TE_PW_SUB, emit(&b, TE_PW_ABS, input(&b, TE_RATE_ELEM), -1, -1), number(&b, 1), -1);
    int y = emit(&b, TE_PW_MUL, d1, d1, -1);
    output(&b, TE_OUT_ELEM, y);
    output(&b, TE_OUT_ELEM, y);
    enum { N = 333 };
    double     x[N], copy[N];
    te_operand in = operand(x, dtype, 1, 0), out[2] = {in, operand(copy, copy_dtype, 1, 0)};
    te_run     run = {.ndim = 1, .shape = {N}, .inputs = &in, .outputs = out};
    for (int d = 0; d < n_devices; d++) {
        for (int i = 0; i < N; i++) te_store_f64(x, dtype, i, i % 16 - 8);
        CHECK(te_cpu_program_run(&devices[d], &b.program, &run, 1) == TE_OK);
        for (int i = 0; i < N; i++) {
            double root = abs(i % 16 - 8) - 1;
            CHECK(te_load_f64(x, dtype, i) == root * root && te_load_f64(copy, copy_dtype, i) == root * root);
        }
    }
    release(&b);
}

/* Outputs larger than the caches, which may be written past them: y = 2 |x|, whole and from an odd address on. */
static void check_large(te_dtype dtype, int64_t n)
{
    static built b;
    begin(&b, "large");
    output(&b, TE_OUT_ELEM,
           emit(&b, TE_PW_MUL, emit(&b, TE_PW_ABS, input(&b, TE_RATE_ELEM), -1, -1), number(&b, 2), -1));
    size_t     size = te_dtype_size(dtype), bytes = (size_t)(n + 1) * size;
    char      *x = malloc(bytes), *y = aligned_alloc(64, (bytes + 63) / 64 * 64);
    for (int64_t i = 0; i <= n; i++) te_store_f64(x, dtype, i, (double)(i % 255 - 127));
    for (int64_t skip = 0; skip < 2; skip++) {
        te_operand in = operand(x + (size_t)skip * size, dtype, 1, 0);
        te_operand out = operand(y + (size_t)skip * size, dtype, 1, 0);
        te_run     run = {.ndim = 1, .shape = {n}, .inputs = &in, .outputs = &out};
        memset(y, 0xff, bytes);
        CHECK(te_cpu_program_run(&devices[n_devices - 2], &b.program, &run, 1) == TE_OK);
        int64_t wrong = 0;
        for (int64_t i = skip; i < n + skip; i++)
            wrong += te_load_f64(y, dtype, i) != 2 * fabs(te_load_f64(x, dtype, i));
        CHECK_MSG(wrong == 0, "%lld of %lld elements", (long long)wrong, (long long)n);
        CHECK(isnan(te_load_f64(y, dtype, skip ? 0 : n)));
    }
    release(&b);
    free(x), free(y);
}

/* One chain over whole chunks, with a value that waits in a register, tensors of both widths, one of them in place, and
 * a second run that begins at odd addresses: m = m / 2 + g, y = m g g + m. */
static void check_windows(te_dtype g_dtype, te_dtype y_dtype)
{
    static built b;
    begin(&b, "windows");
    int m = input(&b, TE_RATE_ELEM), g = input(&b, TE_RATE_ELEM);
    int square = emit(&b, TE_PW_MUL, emit(&b, TE_PW_ABS, g, -1, -1), g, -1);
    int next = emit(&b, TE_PW_ADD, emit(&b, TE_PW_MUL, m, number(&b, 0.5), -1), g, -1);
    output(&b, TE_OUT_ELEM, next);
    output(&b, TE_OUT_ELEM, emit(&b, TE_PW_ADD, emit(&b, TE_PW_MUL, next, square, -1), next, -1));
    enum { N = 20077, FIRST = 17001 };
    float *moment = malloc(N * sizeof *moment), *gradient = malloc(N * sizeof *gradient), *y = malloc(N * sizeof *y);
    size_t g_size = te_dtype_size(g_dtype), y_size = te_dtype_size(y_dtype);
    te_operand in[2][2] = {
        {operand(moment, TE_F32, 1, 0), operand(gradient, g_dtype, 1, 0)},
        {operand(moment + FIRST, TE_F32, 1, 0), operand((char *)gradient + FIRST * g_size, g_dtype, 1, 0)}};
    te_operand out[2][2] = {{in[0][0], operand(y, y_dtype, 1, 0)},
                            {in[1][0], operand((char *)y + FIRST * y_size, y_dtype, 1, 0)}};
    te_run     runs[2] = {{.ndim = 1, .shape = {FIRST}, .inputs = in[0], .outputs = out[0]},
                          {.ndim = 1, .shape = {N - FIRST}, .inputs = in[1], .outputs = out[1]}};
    for (int d = 0; d < n_devices; d++) {
        for (int i = 0; i < N; i++) moment[i] = (float)(i % 50 * 2), te_store_f64(gradient, g_dtype, i, i % 3);
        CHECK(te_cpu_program_run(&devices[d], &b.program, runs, 2) == TE_OK);
        int wrong = 0;
        for (int i = 0; i < N; i++) {
            double now = i % 50 + i % 3, want = now * (i % 3) * (i % 3) + now;
            wrong += moment[i] != (float)now || te_load_f64(y, y_dtype, i) != want;
        }
        CHECK_MSG(wrong == 0, "device %d: %d of %d elements", d, wrong, N);
    }
    release(&b);
    free(moment), free(gradient), free(y);
}

/* rowsum(where(column() == t, x, 0)) beside a sum that needs the whole row; t may be no column at all. */
static void check_pick(te_dtype dtype, int64_t columns)
{
    enum { ROWS = 9 };
    static built b;
    begin(&b, "pick");
    int x = input(&b, TE_RATE_ELEM), t = input(&b, TE_RATE_ROW);
    int column = emit_full(&b, TE_PW_COLUMN, TE_RATE_ELEM, 0, 0, -1, -1, -1);
    int is = emit(&b, TE_PW_EQ, t, column, -1);
    output(&b, TE_OUT_ROW, reduce(&b, TE_PW_ROWSUM, emit(&b, TE_PW_WHERE, is, x, number(&b, 0))));
    output(&b, TE_OUT_ROW, reduce(&b, TE_PW_ROWMAX, x));
    float      at[ROWS] = {0, (float)(columns - 1), (float)(columns / 2), (float)columns, -1, 0.5f, NAN, INFINITY, 1};
    float      picked[ROWS], top[ROWS];
    void      *data = calloc((size_t)(ROWS * columns), te_dtype_size(dtype));
    te_operand in[2] = {operand(data, dtype, columns, 1), operand(at, TE_F32, 1, 0)};
    te_operand out[2] = {operand(picked, TE_F32, 1, 0), operand(top, TE_F32, 1, 0)};
    te_run     run = {.ndim = 2, .shape = {ROWS, columns}, .inputs = in, .outputs = out};
    for (int64_t i = 0; i < ROWS * columns; i++) te_store_f64(data, dtype, i, i % 7 ? (double)(i % 251) - 100 : -0.0);
    te_store_f64(data, dtype, columns + columns - 1, NAN);
    for (int d = 0; d < n_devices; d++) {
        CHECK(te_cpu_program_run(&devices[d], &b.program, &run, 1) == TE_OK);
        for (int r = 0; r < ROWS; r++) {
            bool   inside = at[r] >= 0 && at[r] < (float)columns && at[r] == floorf(at[r]);
            double want = inside ? te_load_f64(data, dtype, r * columns + (int64_t)at[r]) + 0.0 : 0;
            CHECK_MSG(isnan(want) ? isnan(picked[r])
                                  : (double)picked[r] == want && !signbit(picked[r]) == !signbit(want),
                      "row %d of %lld: %g, want %g", r, (long long)columns, (double)picked[r], want);
        }
    }
    release(&b);
    free(data);
}

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
    CHECK(te_cpu_program_run(&devices[0], &b.program, &no_columns, 1) == TE_OK);
    CHECK(top[0] == -INFINITY && top[1] == -INFINITY && sum[0] == 0 && sum[1] == 0 && total == 0 && columns[0] == 9);
    total = 9;
    CHECK(te_cpu_program_run(&devices[0], &b.program, &no_rows, 1) == TE_OK);
    CHECK(columns[0] == 0 && columns[1] == 0 && columns[2] == 0 && total == 0);
    release(&b);
}

static void check_errors(void)
{
    static built b;
    te_exec     *exec = &devices[0];
    float        x = 1;
    begin(&b, "wrong");
    output(&b, TE_OUT_ELEM, emit(&b, TE_PW_NEG, input(&b, TE_RATE_ELEM), -1, -1));
    te_operand in = operand(NULL, TE_F32, 1, 0), out = operand(&x, TE_F32, 1, 0);
    te_run     run = {.ndim = 1, .shape = {1}, .inputs = &in, .outputs = &out};
    CHECK(te_cpu_program_run(exec, &b.program, &run, 1) == TE_ERROR_ARGUMENT &&
          strstr(exec->message, "input 0 has no data"));
    in.data = &x;
    in.dtype = (te_dtype)99;
    CHECK(te_cpu_program_run(exec, &b.program, &run, 1) == TE_ERROR_ARGUMENT && strstr(exec->message, "99"));
    in.dtype = TE_F32;
    run.ndim = 0;
    CHECK(te_cpu_program_run(exec, &b.program, &run, 1) == TE_ERROR_ARGUMENT);
    run.ndim = 1;
    release(&b);
    b.insns[1].arg[0] = 1;
    CHECK(te_cpu_program_run(exec, &b.program, &run, 1) == TE_ERROR_INTERNAL && strstr(exec->message, "wrong"));
    CHECK(te_cpu_program_run(exec, &b.program, &run, 0) == TE_ERROR_INTERNAL);
}

/* --- memory that runs out ---------------------------------------------------------------------------------------- */

static long allocations_left, bytes_held;

static void *counting_realloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    (void)user;
    if (new_size && allocations_left-- <= 0) return NULL;
    void *p = te_mem_libc.realloc(NULL, ptr, old_size, new_size);
    bytes_held += (long)new_size - (long)old_size;
    return p;
}

static void *counting_scratch(te_exec *exec, size_t bytes)
{
    return allocations_left-- <= 0 ? NULL : test_scratch(exec, bytes);
}

static void check_memory(void)
{
    enum { ROWS = 100, COLUMNS = 40000 };
    static built b;
    te_mem       mem = {counting_realloc, NULL};
    te_exec      exec = devices[n_devices - 1];
    float       *x = calloc(ROWS * COLUMNS, 4), *y = calloc(ROWS * COLUMNS, 4), lse[ROWS];
    te_operand in = operand(x, TE_F32, COLUMNS, 1),
               out[2] = {operand(y, TE_F32, COLUMNS, 1), operand(lse, TE_F32, 1, 0)};
    te_run       run = {.ndim = 2, .shape = {ROWS, COLUMNS}, .inputs = &in, .outputs = out};
    exec.mem = &mem;
    exec.scratch = counting_scratch;
    build_softmax(&b);
    b.program.mem = &mem;
    te_status status = TE_ERROR_MEMORY;
    for (long allowed = 0; status != TE_OK && allowed < 1000; allowed++) {
        allocations_left = allowed;
        status = te_cpu_program_run(&exec, &b.program, &run, 1);
        CHECK(status == TE_OK || status == TE_ERROR_MEMORY);
        release(&b);
        CHECK_MSG(bytes_held == 0, "%ld bytes lost after %ld allocations", bytes_held, allowed);
    }
    CHECK(status == TE_OK);
    free(x), free(y);
}

int main(void)
{
    static const int64_t shapes[][2] = {{1, 1},      {300, 1},   {65, 2},     {40, 16},    {33, 17},   {200, 64},
                                        {7, 100},    {50, 129},  {20, 768},   {5, 3000},   {3, 16384}, {2, 50257},
                                        {1, 200000}, {2000, 48}, {130, 1025}, {1, 1000000}};
    open_devices();
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) check_sums(shapes[i][0], shapes[i][1]);
    check_shared_sum();
    check_in_place(TE_F32);
    check_in_place(TE_BF16);
    check_over_input(TE_F32, TE_BF16);
    check_over_input(TE_BF16, TE_F32);
    check_over_input(TE_BF16, TE_BF16);
    check_large(TE_F32, (9 << 20) + 77);
    check_large(TE_BF16, (17 << 20) + 77);
    check_windows(TE_F32, TE_F32);
    check_windows(TE_BF16, TE_F32);
    check_windows(TE_F32, TE_BF16);
    check_windows(TE_BF16, TE_BF16);
    for (int i = 0; i < 5; i++) {
        check_pick(TE_F32, (int64_t[]){1, 5, 129, 3000, 50257}[i]);
        check_pick(TE_BF16, (int64_t[]){2, 64, 768, 16384, 50257}[i]);
    }
    check_empty();
    check_errors();
    check_memory();
    close_devices();
    return TEST_END();
}
