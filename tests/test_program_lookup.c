/* test_program_lookup.c - functions of bfloat16 that large runs look up: the bits of the same run on float32, where
 * nothing is looked up, in every plan, layout and instruction set, gathered and loaded; many functions, parameters,
 * interrupts, and no memory.
 */
#include "failing_memory.h"
#include "kernels/dtype.h"
#include "kernels/program_tables.h"
#include "program_hand.h"

enum { N = 3 << 17, ROOM = N + 4096 };

static uint64_t seed = 0x9e3779b97f4a7c15u;

/* Every code, the likely ones often. */
static void fill(uint16_t *codes, int n)
{
    for (int i = 0; i < n; i++) {
        uint32_t bits = test_random(&seed);
        codes[i] = bits & 0x10000 ? (uint16_t)bits : (uint16_t)((118u * 128u + bits % 1536) | (bits & 0x8000));
    }
}

/* --- programs ----------------------------------------------------------------------------------------------------- */

static int gelu(built *b, int x)
{
    int h = emit(b, TE_PW_MUL, x, number(b, 0.70710678118654752), -1);
    int one = emit(b, TE_PW_ADD, emit(b, TE_PW_ERF, h, -1, -1), number(b, 1), -1);
    return emit(b, TE_PW_MUL, emit(b, TE_PW_MUL, x, number(b, 0.5), -1), one, -1);
}

static void build_alone(built *b)
{
    begin(b, "alone");
    int x = input(b, TE_RATE_ELEM);
    input(b, TE_RATE_ELEM);
    output(b, TE_OUT_ELEM, gelu(b, x));
}

/* Two functions of x, one of y, and what is made of them and of numbers as they are. */
static void build_gated(built *b)
{
    begin(b, "gated");
    int x = input(b, TE_RATE_ELEM), y = input(b, TE_RATE_ELEM);
    int s = emit(b, TE_PW_SIGMOID, x, -1, -1), g = emit(b, TE_PW_MUL, gelu(b, x), y, -1);
    int t = emit(b, TE_PW_ADD, emit(b, TE_PW_MUL, s, y, -1), emit(b, TE_PW_TANH, y, -1, -1), -1);
    int cleared = emit(b, TE_PW_WHERE, emit(b, TE_PW_ISFINITE, t, -1, -1), t, number(b, 0.25));
    output(b, TE_OUT_ELEM, g);
    output(b, TE_OUT_ELEM, emit(b, TE_PW_TO_BF16, t, -1, -1));
    output(b, TE_OUT_COLSUM, cleared);
    output(b, TE_OUT_SUM, cleared);
    output(b, TE_OUT_AMAX, g);
}

/* A norm over a residual branch. */
static void build_norm(built *b)
{
    begin(b, "norm");
    int x = input(b, TE_RATE_ELEM), r = input(b, TE_RATE_ELEM);
    int d = emit(b, TE_PW_ADD, gelu(b, x), r, -1);
    int kept = emit(b, TE_PW_WHERE, emit(b, TE_PW_ISFINITE, d, -1, -1), d, number(b, 0));
    int mean = emit(b, TE_PW_MUL, reduce(b, TE_PW_ROWSUM, kept), number(b, 0.01), -1);
    output(b, TE_OUT_ELEM, emit(b, TE_PW_SUB, kept, mean, -1));
    output(b, TE_OUT_ROW, mean);
    output(b, TE_OUT_ROW, reduce(b, TE_PW_ROWMAX, gelu(b, x)));
}

/* The element of a row in column 2, and 0 where that is none. */
static void build_pick(built *b)
{
    begin(b, "pick");
    int x = input(b, TE_RATE_ELEM), y = input(b, TE_RATE_ELEM), zero = number(b, 0);
    int column = emit_full(b, TE_PW_COLUMN, TE_RATE_ELEM, 0, 0, -1, -1, -1);
    int value = emit(b, TE_PW_ADD, gelu(b, x), number(b, 0.5), -1);
    for (int at = 2; at <= 1 << 20; at = at == 2 ? 1 << 20 : 1 << 21) {
        int is = emit(b, TE_PW_EQ, column, number(b, at), -1);
        output(b, TE_OUT_ROW, reduce(b, TE_PW_ROWSUM, emit(b, TE_PW_WHERE, is, value, zero)));
    }
    output(b, TE_OUT_ELEM, emit(b, TE_PW_MUL, value, y, -1));
}

/* --- runs --------------------------------------------------------------------------------------------------------- */

typedef struct layout {
    int rows, columns, pitch, step; /* elements from row to row, and from column to column, of x */
} layout;

typedef struct results {
    char data[MAX_SLOTS][4 * ROOM];
} results;

static uint16_t codes[2][2 * ROOM];
static float    wide[2][2 * ROOM];
static results  looked_up, computed;

static bool rounds(const built *b, int o) { return b->insns[b->outputs[o].value].op == TE_PW_TO_BF16; }

static te_status run_on(te_exec *exec, built *b, layout l, te_dtype dtype, const double *params, results *r)
{
    te_operand out[MAX_SLOTS], in[2] = {{.dtype = dtype, .stride = {l.pitch, l.step}},
                                        {.dtype = dtype, .stride = {l.columns, 1}}};
    for (int i = 0; i < 2; i++) in[i].data = dtype == TE_BF16 ? (void *)codes[i] : (void *)wide[i];
    memset(r, 0x55, sizeof *r);
    for (int o = 0; o < b->program.n_outputs; o++) {
        int  kind = b->outputs[o].kind;
        out[o] = (te_operand){.data = r->data[o], .dtype = rounds(b, o) ? TE_BF16 : TE_F32};
        if (kind == TE_OUT_ELEM) out[o].stride[0] = l.columns;
        if (kind == TE_OUT_ELEM || kind == TE_OUT_COLSUM) out[o].stride[1] = 1;
        if (kind == TE_OUT_ROW) out[o].stride[0] = 1;
    }
    te_run run = {.ndim = 2, .shape = {l.rows, l.columns}, .inputs = in, .outputs = out, .params = params};
    return te_cpu_program_run(exec, &b->program, &run, 1);
}

/* Two NaNs make one of either. */
static void settle_nans(const built *b, results *r)
{
    for (int o = 0; o < b->program.n_outputs; o++) {
        uint16_t *halves = (uint16_t *)(void *)r->data[o];
        uint32_t *words = (uint32_t *)(void *)r->data[o];
        for (int i = 0; i < 2 * ROOM && rounds(b, o); i++)
            if ((halves[i] & 0x7fff) > 0x7f80) halves[i] = 0x7fc0;
        for (int i = 0; i < ROOM && !rounds(b, o); i++)
            if ((words[i] & 0x7fffffff) > 0x7f800000) words[i] = 0x7fc00000;
    }
}

static void check(te_exec *exec, built *b, layout l, const double *params)
{
    CHECK(run_on(exec, b, l, TE_BF16, params, &looked_up) == TE_OK);
    CHECK(run_on(exec, b, l, TE_F32, params, &computed) == TE_OK);
    settle_nans(b, &looked_up);
    settle_nans(b, &computed);
    bool same = memcmp(&looked_up, &computed, sizeof computed) == 0;
    CHECK_MSG(same, "%s, %d x %d", b->program.name, l.rows, l.columns);
}

static void fill_all(void)
{
    for (int i = 0; i < 2; i++) {
        fill(codes[i], 2 * ROOM);
        for (int k = 0; k < 65536; k++) codes[i][k] = (uint16_t)(i ? 65535 - k : k);
        for (int k = 0; k < 2 * ROOM; k++) wide[i][k] = te_bf16_to_f32(codes[i][k]);
    }
}

static void test_plans(te_exec *exec)
{
    static const layout layouts[] = {
        {1, N, N, 1},      {N / 64, 64, 64, 1},   {N / 768, 768, 768, 1}, {N / 768, 768, 776, 1},
        {N / 40, 40, 40, 1}, {N / 3, 3, 3, 1},    {19, 20000, 20000, 1},  {N / 257, 257, 258, 1},
        {N / 96, 96, 192, 2}, {N / 128, 128, 0, 1}, {380, 1001, 1001, 1},
    };
    static void (*const builders[])(built *) = {build_alone, build_gated, build_norm, build_pick};
    for (size_t k = 0; k < sizeof builders / sizeof *builders; k++) {
        static built b;
        builders[k](&b);
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) check(exec, &b, layouts[i], NULL);
        release(&b);
    }
    CHECK(te_cpu(exec)->tables != NULL);
}

/* A result may take the place of what it is made from. */
static void test_in_place(te_exec *exec)
{
    static uint16_t there[N];
    static built    b;
    te_operand x = {.data = there, .dtype = TE_BF16, .stride = {1}}, in[2] = {x, x};
    te_run     run = {.ndim = 1, .shape = {N}, .inputs = in, .outputs = &x};
    build_alone(&b);
    memcpy(there, codes[0], sizeof there);
    CHECK(te_cpu_program_run(exec, &b.program, &run, 1) == TE_OK);
    CHECK(run_on(exec, &b, (layout){1, N, N, 1}, TE_F32, NULL, &computed) == TE_OK);
    int wrong = 0;
    for (int i = 0; i < N; i++) {
        float value;
        memcpy(&value, computed.data[0] + 4 * i, sizeof value);
        wrong += there[i] != te_f32_to_bf16(value);
    }
    CHECK(wrong == 0);
    release(&b);
}

static void build_scaled(built *b, double constant)
{
    begin(b, "scaled");
    int x = input(b, TE_RATE_ELEM), y = input(b, TE_RATE_ELEM);
    int scaled = emit(b, TE_PW_MUL, emit(b, TE_PW_MUL, x, param(b), -1), number(b, constant), -1);
    output(b, TE_OUT_ELEM, emit(b, TE_PW_MUL, emit(b, TE_PW_TANH, scaled, -1, -1), y, -1));
}

/* More functions than the device keeps, in turns, and numbers that change from run to run. */
static void test_many(te_exec *exec)
{
    enum { FUNCTIONS = 11 };
    static built b[FUNCTIONS];
    for (int k = 0; k < FUNCTIONS; k++) build_scaled(&b[k], 0.25 * (k + 1));
    for (int turn = 0; turn < 2; turn++)
        for (int k = 0; k < FUNCTIONS; k++) {
            double factor = turn ? 1 : 0.5 + k % 3;
            check(exec, &b[k], (layout){N / 512, 512, 512, 1}, &factor);
        }
    for (int k = 0; k < FUNCTIONS; k++) release(&b[k]);
}

/* What is as quick to compute is computed: a sigmoid, a square, also by a number of the run; and long programs are. */
static void test_computed(void)
{
    static built b;
    te_exec exec = test_exec_open(2);
    layout  l = {N / 512, 512, 512, 1};
    for (int kind = 0; kind < 3; kind++) {
        double exponent = 2;
        begin(&b, "computed");
        int x = input(&b, TE_RATE_ELEM), y = input(&b, TE_RATE_ELEM), value = x;
        for (int k = 0; k < 40 && kind == 2; k++)
            value = emit(&b, TE_PW_TANH, emit(&b, TE_PW_ADD, value, x, -1), -1, -1);
        if (kind == 0) value = emit(&b, TE_PW_SIGMOID, x, -1, -1);
        if (kind == 1) value = emit(&b, TE_PW_POW, x, param(&b), -1);
        for (int k = 0; k < 15 && kind == 2; k++) value = emit(&b, TE_PW_NEG, value, -1, -1);
        output(&b, TE_OUT_ELEM, emit(&b, TE_PW_MUL, value, y, -1));
        CHECK(kind < 2 || b.program.n_insns > TE_TABLES_INSNS);
        check(&exec, &b, l, &exponent);
        CHECK(te_cpu(&exec)->tables == NULL);
        exponent = 2.5;
        check(&exec, &b, l, &exponent);
        CHECK_MSG((te_cpu(&exec)->tables != NULL) == (kind == 1), "kind %d", kind);
        te_tables_free(&exec, te_cpu(&exec));
        release(&b);
    }
    test_exec_close(&exec);
}

static void test_interrupted(te_exec *exec)
{
    static built b;
    atomic_int   stop = 1;
    layout       l = {N / 512, 512, 512, 1};
    double       factor = 3.75;
    build_scaled(&b, 1.375);
    exec->interrupt = &stop;
    CHECK(run_on(exec, &b, l, TE_BF16, &factor, &looked_up) == TE_ERROR_INTERRUPTED);
    exec->interrupt = NULL;
    check(exec, &b, l, &factor); /* no table was left half made */
    release(&b);
}

/* Each allocation failing in turn: an error, or the same result without tables, and nothing is lost. */
static void test_memory(void)
{
    static built   b;
    failing_memory memory = {.countdown = -1};
    te_mem         mem = {failing_memory_realloc, &memory};
    layout         l = {N / 512, 512, 512, 1};
    double         factor = 0.875;
    te_exec        exec = test_exec_open(1);
    CHECK(run_on(&exec, (build_scaled(&b, 2), &b), l, TE_F32, &factor, &computed) == TE_OK);
    settle_nans(&b, &computed);
    release(&b);
    const te_mem *usual = exec.mem;
    long          failed = 0;
    for (long n = 0, done = 0; done == 0 && n < 200; n++) {
        build_scaled(&b, 2);
        b.program.mem = exec.mem = &mem;
        memory.countdown = n;
        te_status status = run_on(&exec, &b, l, TE_BF16, &factor, &looked_up);
        done = memory.countdown >= 0;
        memory.countdown = -1;
        failed += status == TE_ERROR_MEMORY;
        settle_nans(&b, &looked_up);
        CHECK(status == TE_ERROR_MEMORY || (status == TE_OK && memcmp(&looked_up, &computed, sizeof computed) == 0));
        if (b.program.release_compiled) b.program.release_compiled(&b.program);
        te_tables_free(&exec, te_cpu(&exec));
        CHECK(memory.live == 0);
        CHECK(n < 199);
    }
    CHECK(failed > 0);
    exec.mem = usual;
    test_exec_close(&exec);
}

int main(void)
{
    fill_all();
    open_devices();
    for (int d = 0; d < n_devices; d++) {
        test_in_place(&devices[d]);
        if (devices[d].threads != 2) continue;
        te_cpu_device *device = te_cpu(&devices[d]);
        for (int way = 0; way < (device->isa == TE_CPU_AVX512 ? 2 : 1); way++) {
            device->gathers = way == 1;
            test_plans(&devices[d]);
        }
        test_many(&devices[d]);
        test_interrupted(&devices[d]);
    }
    close_devices();
    test_computed();
    test_memory();
    return TEST_END();
}
