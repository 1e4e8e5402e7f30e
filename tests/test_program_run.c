/* test_program_run.c - the CPU interpreter against the naive evaluator, to the bit: random programs on random shapes,
 * strides, types and values, for every instruction set and several thread counts; then the cases worth naming. Sums are
 * compared on whole numbers, where every order gives the same, and on ordinary ones within a bound. */
#include "program_naive.h"

#include "kernels/cpu/cpu.h"

enum { MAX_INSNS = 96, MAX_SLOTS = 8, MAX_RUNS = 3 };

/* --- programs by hand ------------------------------------------------------------------------------------------- */

typedef struct built {
    te_program        program;
    te_insn           insns[MAX_INSNS];
    struct te_program_output outputs[MAX_SLOTS];
    uint8_t           input_rates[MAX_SLOTS];
} built;

static void begin(built *b, const char *name)
{
    memset(b, 0, sizeof *b);
    snprintf(b->program.name, sizeof b->program.name, "%s", name);
    b->program.mem = &te_mem_libc;
    b->program.insns = b->insns;
    b->program.outputs = b->outputs;
    b->program.input_rates = b->input_rates;
}

static int emit_full(built *b, te_opcode op, int rate, int slot, double imm, int a0, int a1, int a2)
{
    te_insn insn = {.op = (uint8_t)op, .slot = (int16_t)slot, .arg = {a0, a1, a2}, .imm = imm};
    if (rate < 0) {
        rate = TE_RATE_UNIFORM;
        for (int k = 0; k < te_opcode_args(op); k++)
            if (b->insns[insn.arg[k]].rate > rate) rate = b->insns[insn.arg[k]].rate;
    }
    insn.rate = (uint8_t)rate;
    b->insns[b->program.n_insns] = insn;
    return b->program.n_insns++;
}

static int emit(built *b, te_opcode op, int a0, int a1, int a2) { return emit_full(b, op, -1, 0, 0, a0, a1, a2); }
static int number(built *b, double value) { return emit_full(b, TE_PW_CONST, TE_RATE_UNIFORM, 0, value, -1, -1, -1); }
static int reduce(built *b, te_opcode op, int a) { return emit_full(b, op, TE_RATE_ROW, 0, 0, a, -1, -1); }

static int input(built *b, te_rate rate)
{
    int slot = b->program.n_inputs++;
    b->input_rates[slot] = (uint8_t)rate;
    return emit_full(b, TE_PW_LOAD, rate, slot, 0, -1, -1, -1);
}

static int param(built *b)
{
    return emit_full(b, TE_PW_PARAM, TE_RATE_UNIFORM, b->program.n_params++, 0, -1, -1, -1);
}

static void output(built *b, te_output_kind kind, int value)
{
    b->outputs[b->program.n_outputs++] = (struct te_program_output){(uint8_t)kind, value};
}

static void release(built *b)
{
    if (b->program.release_compiled) b->program.release_compiled(&b->program);
    CHECK(b->program.compiled == NULL);
}

/* A whole number from -8 to 8, so that sums of many are exact. */
static int whole(built *b, int a)
{
    int bounded = emit(b, TE_PW_MIN, emit(b, TE_PW_MAX, a, number(b, -8), -1), number(b, 8), -1);
    return emit(b, TE_PW_ROUND, emit(b, TE_PW_WHERE, emit(b, TE_PW_ISNAN, a, -1, -1), number(b, 3), bounded), -1, -1);
}

/* --- running and comparing -------------------------------------------------------------------------------------- */

/* NaN equals NaN whatever its sign and payload, which differ with the order of arguments. */
static bool same_element(const void *a, const void *b, te_dtype dtype, int64_t i)
{
    size_t size = te_dtype_size(dtype);
    if (memcmp((const char *)a + (size_t)i * size, (const char *)b + (size_t)i * size, size) == 0) return true;
    return isnan(te_load_f64(a, dtype, i)) && isnan(te_load_f64(b, dtype, i));
}

typedef struct buffer {
    te_dtype dtype;
    int64_t  count;
    void    *data, *start, *want; /* in use; as it was before the run; as it should be after */
} buffer;

static buffer buffer_new(te_dtype dtype, int64_t count)
{
    size_t bytes = (size_t)(count ? count : 1) * te_dtype_size(dtype);
    return (buffer){dtype, count, calloc(1, bytes), calloc(1, bytes), calloc(1, bytes)};
}

static size_t buffer_bytes(const buffer *b) { return (size_t)b->count * te_dtype_size(b->dtype); }

static void buffer_free(buffer *b)
{
    free(b->data);
    free(b->start);
    free(b->want);
}

static bool buffer_matches(const buffer *b)
{
    for (int64_t i = 0; i < b->count; i++)
        if (!same_element(b->data, b->want, b->dtype, i)) {
            fprintf(stderr, "element %lld of %lld (%s): %.9g, want %.9g\n", (long long)i, (long long)b->count,
                    te_dtype_name(b->dtype), te_load_f64(b->data, b->dtype, i), te_load_f64(b->want, b->dtype, i));
            return false;
        }
    return true;
}

static double random_value(uint64_t *state)
{
    static const double special[] = {0.0, -0.0, 1, -1, INFINITY, -INFINITY, NAN, 3e38, -1e-40, 1e-45, 65504, 70000, 448, 0.5, 1e30};
    uint32_t r = test_random(state) % 16;
    if (r == 0) return special[test_random(state) % (sizeof special / sizeof special[0])];
    if (r == 1) return (double)te_f32_from_bits(test_random(state));
    return test_uniform(state, -4, 4);
}

static void fill(buffer *b, uint64_t *state)
{
    for (int64_t i = 0; i < b->count; i++) te_store_f64(b->start, b->dtype, i, random_value(state));
    memcpy(b->want, b->start, buffer_bytes(b));
}

/* --- random runs ------------------------------------------------------------------------------------------------ */

typedef struct scene {
    te_run     run;
    te_operand inputs[MAX_SLOTS], outputs[MAX_SLOTS];
    double     params[MAX_SLOTS];
    te_rng     rngs[MAX_SLOTS];
    buffer     in[MAX_SLOTS], out[MAX_SLOTS];
    int        in_place[MAX_SLOTS]; /* input whose memory an output shares, -1: none */
} scene;

static void random_shape(te_run *run, uint64_t *state)
{
    static const int64_t outer[] = {1, 2, 3, 5, 8, 40, 130}, inner[] = {0, 1, 1, 2, 3, 7, 16, 17, 33, 64, 100, 129, 300, 1000, 2500, 20000};
    run->ndim = 1 + (int)(test_random(state) % 4);
    for (;;) {
        int64_t total = 1;
        for (int d = 0; d < run->ndim; d++) {
            run->shape[d] = d == run->ndim - 1 ? inner[test_random(state) % 16] : outer[test_random(state) % 7];
            total *= run->shape[d];
        }
        if (test_random(state) % 64 == 0) run->shape[0] = 0;
        if (total <= 40000) return;
    }
}

/* Strides of a dense, permuted, padded or (inputs only) broadcast layout; returns the number of elements it spans. */
static int64_t random_strides(const te_run *run, int64_t *strides, bool broadcast, uint64_t *state)
{
    int     order[TE_MAX_DIMS], kind = (int)(test_random(state) % 6);
    int64_t stride = 1;
    for (int d = 0; d < run->ndim; d++) order[d] = run->ndim - 1 - d;
    if (kind == 0 && run->ndim > 1) {
        int at = (int)(test_random(state) % (uint32_t)(run->ndim - 1)), keep = order[at];
        order[at] = order[at + 1];
        order[at + 1] = keep;
    }
    if (kind == 1 && test_random(state) % 2) stride = 2;
    for (int i = 0; i < run->ndim; i++) {
        int d = order[i];
        bool flat = broadcast && kind >= 4 && test_random(state) % 2;
        strides[d] = flat ? 0 : stride;
        if (!flat) stride *= (run->shape[d] ? run->shape[d] : 1) + (kind == 1 ? 3 : 0);
    }
    return stride;
}

static void make_scene(scene *s, built *b, uint64_t *state)
{
    te_program *p = &b->program;
    bool        taken[MAX_SLOTS] = {false};
    memset(s, 0, sizeof *s);
    random_shape(&s->run, state);
    s->run.compute_f64 = test_random(state) % 5 == 0;
    te_dtype usual = s->run.compute_f64 ? TE_F64 : TE_F32;
    for (int i = 0; i < p->n_inputs; i++) {
        te_dtype dtype = test_random(state) % 2 ? usual : (te_dtype)(test_random(state) % TE_DTYPE_COUNT);
        int64_t  count = random_strides(&s->run, s->inputs[i].stride, true, state);
        s->in[i] = buffer_new(dtype, count);
        fill(&s->in[i], state);
        s->inputs[i].data = s->in[i].data;
        s->inputs[i].dtype = dtype;
    }
    for (int o = 0; o < p->n_outputs; o++) {
        te_dtype dtype = test_random(state) % 2 ? usual : (te_dtype)(test_random(state) % TE_DTYPE_COUNT);
        int      kind = p->outputs[o].kind, share = p->n_inputs ? (int)(test_random(state) % (uint32_t)p->n_inputs) : 0;
        int64_t  count = random_strides(&s->run, s->outputs[o].stride, false, state);
        s->outputs[o].accumulate = test_random(state) % 4 == 0;
        s->in_place[o] = -1;
        bool dense = p->n_inputs > 0;
        for (int d = 0; d < s->run.ndim && dense; d++) dense = s->inputs[share].stride[d] > 0 || s->run.shape[d] == 1;
        if (kind == TE_OUT_ELEM && dense && !taken[share] && b->input_rates[share] == TE_RATE_ELEM && test_random(state) % 2) {
            taken[share] = true;
            s->in_place[o] = share;
            memcpy(s->outputs[o].stride, s->inputs[share].stride, sizeof s->outputs[o].stride);
            s->outputs[o].data = s->inputs[share].data;
            s->outputs[o].dtype = s->inputs[share].dtype;
            s->out[o] = buffer_new(s->inputs[share].dtype, 0);
            continue;
        }
        s->out[o] = buffer_new(dtype, count);
        fill(&s->out[o], state);
        s->outputs[o].data = s->out[o].data;
        s->outputs[o].dtype = dtype;
        if (test_random(state) % 16 == 0) s->outputs[o].data = NULL;
    }
    for (int i = 0; i < p->n_params; i++) s->params[i] = test_uniform(state, -0.2, 1.2);
    for (int i = 0; i < p->n_rngs; i++) s->rngs[i] = (te_rng){test_random(state), test_random(state), ((uint64_t)1 << 34) - 3};
    s->run.inputs = s->inputs;
    s->run.outputs = s->outputs;
    s->run.params = s->params;
    s->run.rngs = s->rngs;
}

/* What should come out. */
static void expect(scene *s, const te_program *p)
{
    te_operand inputs[MAX_SLOTS], outputs[MAX_SLOTS];
    te_run     run = s->run;
    run.inputs = inputs;
    run.outputs = outputs;
    for (int i = 0; i < p->n_inputs; i++) {
        inputs[i] = s->inputs[i];
        inputs[i].data = s->in[i].start;
    }
    for (int o = 0; o < p->n_outputs; o++) {
        outputs[o] = s->outputs[o];
        if (outputs[o].data) outputs[o].data = s->in_place[o] >= 0 ? s->in[s->in_place[o]].want : s->out[o].want;
    }
    naive_run(p, &run);
}

static void restart(scene *s, const te_program *p)
{
    for (int i = 0; i < p->n_inputs; i++) memcpy(s->in[i].data, s->in[i].start, buffer_bytes(&s->in[i]));
    for (int o = 0; o < p->n_outputs; o++) memcpy(s->out[o].data, s->out[o].start, buffer_bytes(&s->out[o]));
}

static bool scene_matches(const scene *s, const te_program *p)
{
    for (int i = 0; i < p->n_inputs; i++)
        if (!buffer_matches(&s->in[i])) return false;
    for (int o = 0; o < p->n_outputs; o++)
        if (!buffer_matches(&s->out[o])) return false;
    return true;
}

static void scene_free(scene *s, const te_program *p)
{
    for (int i = 0; i < p->n_inputs; i++) buffer_free(&s->in[i]);
    for (int o = 0; o < p->n_outputs; o++) buffer_free(&s->out[o]);
}

static void print_program(const te_program *p, const te_run *run)
{
    for (int v = 0; v < p->n_insns; v++)
        fprintf(stderr, "  %2d %s.%d slot %d (%d %d %d) %g\n", v, te_opcode_name(p->insns[v].op), p->insns[v].rate, p->insns[v].slot,
                p->insns[v].arg[0], p->insns[v].arg[1], p->insns[v].arg[2], p->insns[v].imm);
    for (int o = 0; o < p->n_outputs; o++)
        fprintf(stderr, "  out %d: kind %d of %d, %s\n", o, p->outputs[o].kind, p->outputs[o].value, te_dtype_name(run->outputs[o].dtype));
    fprintf(stderr, "  %s, shape", run->compute_f64 ? "float64" : "float32");
    for (int d = 0; d < run->ndim; d++) fprintf(stderr, " %lld", (long long)run->shape[d]);
    fprintf(stderr, "\n");
}

/* --- random programs -------------------------------------------------------------------------------------------- */

static void random_leaves(built *b, uint64_t *state)
{
    int inputs = 1 + (int)(test_random(state) % 4);
    input(b, TE_RATE_ELEM);
    for (int i = 1; i < inputs; i++) input(b, (te_rate)(test_random(state) % 8 == 0 ? 0 : test_random(state) % 4 == 0 ? 1 : 2));
    param(b);
    number(b, test_uniform(state, -2, 2));
    if (test_random(state) % 4 == 0) emit_full(b, TE_PW_COLUMN, TE_RATE_ELEM, 0, 0, -1, -1, -1);
    if (test_random(state) % 4 == 0) {
        static const te_opcode ops[] = {TE_PW_RANDOM, TE_PW_KEEP, TE_PW_NORMAL};
        te_opcode op = ops[test_random(state) % 3];
        emit_full(b, op, TE_RATE_ELEM, b->program.n_rngs++, 0, op == TE_PW_KEEP ? (int)(test_random(state) % (uint32_t)b->program.n_insns) : -1, -1, -1);
    }
}

static void random_program(built *b, uint64_t *state)
{
    begin(b, "random");
    random_leaves(b, state);
    int length = 1 + (int)(test_random(state) % 24), reductions = test_random(state) % 2 ? 3 : 0;
    for (int i = 0; i < length; i++) {
        uint32_t  n = (uint32_t)b->program.n_insns;
        int       a = (int)(test_random(state) % n), recent = (int)(n - 1 - test_random(state) % (n < 4 ? n : 4));
        te_opcode op = (te_opcode)(TE_PW_NEG + test_random(state) % (TE_PW_ROWMIN - TE_PW_NEG + 1));
        if (op < TE_PW_ROWSUM) {
            emit(b, op, recent, a, (int)(test_random(state) % n));
        } else if (reductions-- > 0) {
            /* + 0: of -0 and 0 the greatest is the first that is met */
            reduce(b, op, op == TE_PW_ROWSUM ? whole(b, recent) : emit(b, TE_PW_ADD, recent, number(b, 0), -1));
        }
    }
    int outputs = 1 + (int)(test_random(state) % 4);
    for (int o = 0; o < outputs; o++) {
        int n = b->program.n_insns, v = o == 0 ? n - 1 : n - 1 - (int)(test_random(state) % (uint32_t)n);
        switch (test_random(state) % 8) {
        case 0: output(b, TE_OUT_COLSUM, whole(b, v)); break;
        case 1: output(b, TE_OUT_SUM, whole(b, v)); break;
        case 2: output(b, TE_OUT_AMAX, v); break;
        case 3: output(b, b->insns[v].rate == TE_RATE_ELEM ? TE_OUT_ELEM : TE_OUT_ROW, v); break;
        default: output(b, TE_OUT_ELEM, v);
        }
    }
}

/* All devices: each instruction set this machine has, with 1, 2 and 3 threads. */
static te_exec devices[3 * TE_CPU_ISA_COUNT];
static int     n_devices;

static void open_devices(void)
{
    te_exec probe = test_exec_open(1);
    int     best = te_cpu(&probe)->isa;
    test_exec_close(&probe);
    for (int isa = 0; isa <= best; isa++)
        for (int threads = 1; threads <= 3; threads++) {
            devices[n_devices] = test_exec_open(threads);
            te_cpu(&devices[n_devices++])->isa = (te_cpu_isa)isa;
        }
}

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

/* --- named cases ------------------------------------------------------------------------------------------------ */

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
    float       *lse = malloc((size_t)rows * 4), *sums = malloc((size_t)columns * 4), *first_sums = malloc((size_t)columns * 4);
    double      *want = malloc(n * 8), *want_sums = calloc((size_t)columns, 8), want_total = 0;
    for (size_t i = 0; i < n; i++) x[i] = (float)test_uniform(&state, -3, 3);
    for (int64_t j = 0; j < columns; j++) g[j] = (float)test_uniform(&state, 0.5, 2);
    for (size_t i = 0; i < n; i++) want_sums[(int64_t)i % columns] += (double)x[i], want_total += (double)(x[i] * x[i]);

    build_softmax(&softmax);
    build_layer_norm(&norm, columns);
    float      total = 0, first_total = 0;
    te_operand in[3] = {operand(x, TE_F32, columns, 1), operand(g, TE_F32, 0, 1), operand(g, TE_F32, 0, 1)};
    te_operand softmax_out[2] = {operand(y, TE_F32, columns, 1), operand(lse, TE_F32, 1, 1)};
    te_operand norm_out[3] = {operand(y, TE_F32, columns, 1), operand(sums, TE_F32, 0, 1), operand(&total, TE_F32, 0, 0)};
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
        CHECK(memcmp(first, y, n * 4) == 0 && memcmp(first_sums, sums, (size_t)columns * 4) == 0 && first_total == total);
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
    for (int r = 0; r < 3; r++) runs[r] = (te_run){.ndim = 1, .shape = {r == 1 ? 3 : 1}, .inputs = &in[r], .outputs = out};
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
static void check_in_place(void)
{
    static built b;
    begin(&b, "momentum");
    int m = input(&b, TE_RATE_ELEM), g = input(&b, TE_RATE_ELEM), beta = param(&b);
    int next = emit(&b, TE_PW_ADD, emit(&b, TE_PW_MUL, m, beta, -1), g, -1);
    int change = emit(&b, TE_PW_SUB, next, m, -1); /* the old m, after next was made */
    output(&b, TE_OUT_ELEM, next);
    output(&b, TE_OUT_ELEM, change);
    enum { N = 1000 };
    float  moment[N], gradient[N];
    double params[1] = {0.5};
    te_operand in[2] = {operand(moment, TE_F32, 1, 0), operand(gradient, TE_F32, 1, 0)};
    te_operand out[2] = {operand(moment, TE_F32, 1, 0), operand(gradient, TE_F32, 1, 0)};
    te_run     run = {.ndim = 1, .shape = {N}, .inputs = in, .outputs = out, .params = params};
    for (int d = 0; d < n_devices; d++) {
        for (int i = 0; i < N; i++) moment[i] = (float)i, gradient[i] = 1;
        CHECK(te_cpu_program_run(&devices[d], &b.program, &run, 1) == TE_OK);
        for (int i = 0; i < N; i++) CHECK(moment[i] == 0.5f * (float)i + 1 && gradient[i] == 0.5f * (float)i + 1 - (float)i);
    }
    release(&b);
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
    te_operand out[4] = {operand(top, TE_F32, 1, 0), operand(sum, TE_F32, 1, 0), operand(columns, TE_F32, 0, 1), operand(&total, TE_F32, 0, 0)};
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
    CHECK(te_cpu_program_run(exec, &b.program, &run, 1) == TE_ERROR_ARGUMENT && strstr(exec->message, "input 0 has no data"));
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
    te_operand   in = operand(x, TE_F32, COLUMNS, 1), out[2] = {operand(y, TE_F32, COLUMNS, 1), operand(lse, TE_F32, 1, 0)};
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

int main(int argc, char **argv)
{
    static const int64_t shapes[][2] = {{1, 1},    {300, 1},  {65, 2},    {40, 16},   {33, 17},    {200, 64},  {7, 100},    {50, 129},
                                        {20, 768}, {5, 3000}, {3, 16384}, {2, 50257}, {1, 200000}, {2000, 48}, {130, 1025}, {1, 1000000}};
    open_devices();
    check_random_programs(argc > 1 ? atoi(argv[1]) : 400);
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) check_sums(shapes[i][0], shapes[i][1]);
    check_shared_sum();
    check_in_place();
    check_empty();
    check_errors();
    check_memory();
    for (int d = 0; d < n_devices; d++) test_exec_close(&devices[d]);
    return TEST_END();
}
