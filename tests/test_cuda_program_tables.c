/* test_cuda_program_tables.c - functions of a bfloat16 input that kernels look up, in the simulator: the CPU's bits for
 * every code, in units whose numbers all have a place in the table and in others. */
#include "cuda_device.h"
#include "kernels/cuda/program_source_internal.h"
#include "program_hand.h"

enum { ROWS = 4096, COLUMNS = 4096, PITCH = COLUMNS + 8 }; /* the fewest elements that tables are made for */
enum { N = ROWS * PITCH };

static cuda_device cuda;
static uint64_t    seed = 0x9e3779b97f4a7c15u;

static uint16_t *codes_new(void)
{
    uint16_t *codes = malloc(sizeof *codes * N);
    if (!codes) abort();
    return codes;
}

/* Codes that have a place in tables, and in some units any. */
static void fill(uint16_t *codes, bool any)
{
    for (int i = 0; i < N; i++) {
        uint32_t bits = test_random(&seed), place = bits % 2048;
        codes[i] = (uint16_t)((115u * 128u + place) | (bits >> 11 & 1u) << 15);
    }
    for (int i = 0; any && i < 4 * 65536; i++) codes[(size_t)(test_random(&seed) % N)] = (uint16_t)i;
    static const uint16_t edges[] = {0x397f, 0x3980, 0x417f, 0x4180, 0xb97f, 0xb980, 0xc17f, 0xc180, 0, 0x8000, 0x7fc0};
    for (int i = 0; any && i < 11 * 8; i++) codes[64 + 9 * i] = edges[i % 11]; /* each at each place of a unit */
}

static bool is_nan(uint16_t code) { return (code & 0x7fff) > 0x7f80; }

static int differences(const uint16_t *a, const uint16_t *b)
{
    int n = 0;
    for (int i = 0; i < ROWS * COLUMNS; i++) n += a[i] != b[i] && !(is_nan(a[i]) && is_nan(b[i]));
    return n;
}

/* The gradient of a sigmoid-gated x, and what follows from x alone: two values to look up, one made from them. */
static void build(built *b, bool sums)
{
    begin(b, "gated");
    int dy = input(b, TE_RATE_ELEM), x = input(b, TE_RATE_ELEM);
    int s = emit(b, TE_PW_SIGMOID, x, -1, -1), square = emit(b, TE_PW_MUL, x, x, -1);
    int bell = emit(b, TE_PW_EXP, emit(b, TE_PW_NEG, square, -1, -1), -1, -1);
    int grad = emit(b, TE_PW_ADD, emit(b, TE_PW_MUL, dy, s, -1), emit(b, TE_PW_MUL, dy, bell, -1), -1);
    output(b, TE_OUT_ELEM, grad);
    output(b, TE_OUT_ELEM, emit(b, TE_PW_ROUND, emit(b, TE_PW_MUL, x, s, -1), -1, -1));
    output(b, TE_OUT_ELEM, emit(b, TE_PW_TO_BF16, emit(b, TE_PW_TANH, dy, -1, -1), -1, -1));
    if (sums) output(b, TE_OUT_COLSUM, grad);
}

static te_operand codes(uint16_t *data, int64_t pitch)
{
    return (te_operand){.data = data, .dtype = TE_BF16, .stride = {pitch, 1}};
}

static void check(const char *name, bool sums, int64_t pitch, te_cuda_program_kind kind)
{
    static built b;
    static float columns[2][COLUMNS];
    uint16_t    *in[2] = {codes_new(), codes_new()}, *out[2][3];
    te_operand   inputs[2], outputs[2][4];
    te_run       run[2];
    int          launched = cuda.kinds[kind];
    build(&b, sums);
    for (int i = 0; i < 2; i++) {
        fill(in[i], i == 1 || !sums);
        inputs[i] = codes(in[i], pitch);
    }
    for (int d = 0; d < 2; d++) {
        for (int o = 0; o < 3; o++) outputs[d][o] = codes(out[d][o] = codes_new(), COLUMNS);
        outputs[d][3] = (te_operand){.data = columns[d], .dtype = TE_F32, .stride = {0, 1}};
        run[d] = (te_run){.ndim = 2, .shape = {ROWS, COLUMNS}, .inputs = inputs, .outputs = outputs[d]};
    }
    te_cuda_program_shape shape;
    CHECK(te_cuda_program_shape_make(&cuda.exec, &b.program, &run[0], &shape) == TE_OK && shape.tables);
    te_program_table tables[TE_CUDA_TABLES];
    CHECK(te_cuda_tables(&b.program, &shape, tables) == 2 && tables[0].input == 1 && tables[1].input == 1);
    CHECK_MSG(cuda_program_run(&cuda, &b.program, &run[0], 1) == TE_OK, "%s: %s", name, cuda.exec.message);
    CHECK_MSG(te_cpu_program_run(&cuda.exec, &b.program, &run[1], 1) == TE_OK, "%s: %s", name, cuda.exec.message);
    CHECK_MSG(cuda.kinds[kind] == launched + 1, "%s: another kind of kernel", name);
    for (int o = 0; o < 3; o++) {
        int n = differences(out[0][o], out[1][o]);
        CHECK_MSG(n == 0, "%s: %d of %d numbers of output %d differ", name, n, ROWS * COLUMNS, o);
    }
    for (int i = 0; sums && i < COLUMNS; i++)
        CHECK_MSG(isnan(columns[0][i]) ? isnan(columns[1][i]) : fabsf(columns[0][i] - columns[1][i]) <= 0.05f,
                  "%s: sum of column %d is %.9g, want %.9g", name, i, (double)columns[0][i], (double)columns[1][i]);
    for (int d = 0; d < 2; d++)
        for (int o = 0; o < 3; o++) free(out[d][o]);
    free(in[0]);
    free(in[1]);
    release(&b);
}

/* Few elements, wide inputs and sums of all have none. */
static void check_without(void)
{
    static built          b;
    te_cuda_program_shape shape;
    static uint16_t       some[4];
    te_operand            in[2] = {codes(some, COLUMNS), codes(some, COLUMNS)};
    te_operand            out[4] = {codes(some, COLUMNS), codes(some, COLUMNS), codes(some, COLUMNS), {0}};
    te_run run = {.ndim = 2, .shape = {ROWS - 1, COLUMNS}, .inputs = in, .outputs = out};
    build(&b, false);
    CHECK(te_cuda_program_shape_make(&cuda.exec, &b.program, &run, &shape) == TE_OK && !shape.tables);
    run.shape[0] = ROWS;
    in[0].dtype = in[1].dtype = TE_F16;
    CHECK(te_cuda_program_shape_make(&cuda.exec, &b.program, &run, &shape) == TE_OK && !shape.tables);
    in[0].dtype = in[1].dtype = TE_BF16;
    run.compute_f64 = true;
    CHECK(te_cuda_program_shape_make(&cuda.exec, &b.program, &run, &shape) == TE_OK && !shape.tables);
    run.compute_f64 = false;
    output(&b, TE_OUT_SUM, 0);
    out[3] = (te_operand){.data = some, .dtype = TE_F32};
    CHECK(te_cuda_program_shape_make(&cuda.exec, &b.program, &run, &shape) == TE_OK && !shape.tables);
    release(&b);
}

int main(void)
{
    cuda = (cuda_device){.exec = test_exec_open(1), .multiprocessors = 3};
    nvrtc_open(&cuda.nvrtc);
    check("flat", false, COLUMNS, TE_CUDA_FLAT);
    check("flat, rows apart", false, PITCH, TE_CUDA_FLAT);
    check("columns", true, COLUMNS, TE_CUDA_COLUMNS);
    check_without();
    test_exec_close(&cuda.exec);
    return TEST_END();
}
