/* program_scene.h - random programs on random shapes, strides, types and values, and what should come out of them: for
 * tests that run programs on a backend. Sums are of whole numbers, where every order gives the same. */
#ifndef TE_TEST_PROGRAM_SCENE_H
#define TE_TEST_PROGRAM_SCENE_H

#include "program_hand.h"
#include "program_naive.h"

enum { MAX_RUNS = 3 };

/* --- running and comparing --------------------------------------------------------------------------------------- */

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
    static const double special[] = {0.0,    -0.0,  1,     -1,    INFINITY, -INFINITY, NAN, 3e38,
                                     -1e-40, 1e-45, 65504, 70000, 448,      0.5,       1e30};
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

/* --- random runs ------------------------------------------------------------------------------------------------- */

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
    static const int64_t outer[] = {1, 2, 3, 5, 8, 40, 130},
                         inner[] = {0,  1,   1,   2,   3,   7,   16,  17,  33,   64,
                                    64, 100, 128, 129, 192, 300, 384, 768, 1000, 2500, 20000};
    const uint32_t       n_inner = sizeof inner / sizeof inner[0];
    run->ndim = 1 + (int)(test_random(state) % 4);
    for (;;) {
        int64_t total = 1;
        for (int d = 0; d < run->ndim; d++) {
            run->shape[d] = d == run->ndim - 1 ? inner[test_random(state) % n_inner] : outer[test_random(state) % 7];
            total *= run->shape[d];
        }
        if (test_random(state) % 64 == 0) run->shape[0] = 0;
        if (total <= 40000) return;
    }
}

/* Mostly 0, else a divisor of the number of columns. */
static int64_t random_block(const te_run *run, uint64_t *state)
{
    int64_t columns = run->shape[run->ndim - 1], block = 1 + (int64_t)(test_random(state) % 64);
    if (test_random(state) % 8) return 0;
    while (columns % block) block--;
    return block;
}

/* Strides of a dense, permuted, padded or (inputs only) broadcast layout, its columns next to each other or in blocks;
 * returns the number of elements it spans. */
static int64_t random_strides(const te_run *run, te_operand *operand, bool broadcast, uint64_t *state)
{
    int64_t *strides = operand->stride;
    int     order[TE_MAX_DIMS], kind = (int)(test_random(state) % 6);
    int64_t stride = 1;
    operand->block = random_block(run, state);
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
        bool blocked = d == run->ndim - 1 && operand->block;
        if (!flat) stride *= (run->shape[d] ? run->shape[d] : 1) * (blocked ? 2 : 1) + (kind == 1 ? 3 : 0);
    }
    return stride;
}

/* Operands for a run of the shape. */
static void fill_scene(scene *s, built *b, const te_run *shape, uint64_t *state)
{
    te_program *p = &b->program;
    bool        taken[MAX_SLOTS] = {false};
    memset(s, 0, sizeof *s);
    s->run = *shape;
    s->run.compute_f64 = test_random(state) % 5 == 0;
    te_dtype usual = s->run.compute_f64 ? TE_F64 : TE_F32;
    for (int i = 0; i < p->n_inputs; i++) {
        te_dtype dtype = test_random(state) % 2 ? usual : (te_dtype)(test_random(state) % TE_DTYPE_COUNT);
        int64_t  count = random_strides(&s->run, &s->inputs[i], true, state);
        s->in[i] = buffer_new(dtype, count);
        fill(&s->in[i], state);
        s->inputs[i].data = s->in[i].data;
        s->inputs[i].dtype = dtype;
    }
    for (int o = 0; o < p->n_outputs; o++) {
        te_dtype dtype = test_random(state) % 2 ? usual : (te_dtype)(test_random(state) % TE_DTYPE_COUNT);
        int      kind = p->outputs[o].kind, share = p->n_inputs ? (int)(test_random(state) % (uint32_t)p->n_inputs) : 0;
        int64_t  count = random_strides(&s->run, &s->outputs[o], false, state);
        s->outputs[o].accumulate = test_random(state) % 4 == 0;
        s->in_place[o] = -1;
        bool dense = p->n_inputs > 0;
        for (int d = 0; d < s->run.ndim && dense; d++) dense = s->inputs[share].stride[d] > 0 || s->run.shape[d] == 1;
        if (kind == TE_OUT_ELEM && dense && !taken[share] && b->input_rates[share] == TE_RATE_ELEM &&
            test_random(state) % 2) {
            taken[share] = true;
            s->in_place[o] = share;
            memcpy(s->outputs[o].stride, s->inputs[share].stride, sizeof s->outputs[o].stride);
            s->outputs[o].block = s->inputs[share].block;
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
    for (int i = 0; i < p->n_rngs; i++)
        s->rngs[i] = (te_rng){test_random(state), test_random(state), ((uint64_t)1 << 34) - 3, NULL};
    s->run.inputs = s->inputs;
    s->run.outputs = s->outputs;
    s->run.params = s->params;
    s->run.rngs = s->rngs;
}

static inline void make_scene(scene *s, built *b, uint64_t *state)
{
    te_run shape = {0};
    random_shape(&shape, state);
    fill_scene(s, b, &shape, state);
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

/* Gives every operand other memory; `restart` fills it. */
static inline void move(scene *s, const te_program *p)
{
    for (int i = 0; i < p->n_inputs + p->n_outputs; i++) {
        buffer *b = i < p->n_inputs ? &s->in[i] : &s->out[i - p->n_inputs];
        void   *old = b->data;
        b->data = calloc(1, buffer_bytes(b) + te_dtype_size(b->dtype));
        free(old);
    }
    for (int i = 0; i < p->n_inputs; i++) s->inputs[i].data = s->in[i].data;
    for (int o = 0; o < p->n_outputs; o++)
        if (s->outputs[o].data) s->outputs[o].data = s->in_place[o] >= 0 ? s->in[s->in_place[o]].data : s->out[o].data;
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
        fprintf(stderr, "  %2d %s.%d slot %d (%d %d %d) %g\n", v, te_opcode_name(p->insns[v].op), p->insns[v].rate,
                p->insns[v].slot, p->insns[v].arg[0], p->insns[v].arg[1], p->insns[v].arg[2], p->insns[v].imm);
    for (int o = 0; o < p->n_outputs; o++)
        fprintf(stderr, "  out %d: kind %d of %d, %s\n", o, p->outputs[o].kind, p->outputs[o].value,
                te_dtype_name(run->outputs[o].dtype));
    fprintf(stderr, "  %s, shape", run->compute_f64 ? "float64" : "float32");
    for (int d = 0; d < run->ndim; d++) fprintf(stderr, " %lld", (long long)run->shape[d]);
    fprintf(stderr, "\n");
}

/* --- random programs --------------------------------------------------------------------------------------------- */

/* A whole number from -8 to 8, so that sums of many are exact. */
static int whole(built *b, int a)
{
    int bounded = emit(b, TE_PW_MIN, emit(b, TE_PW_MAX, a, number(b, -8), -1), number(b, 8), -1);
    return emit(b, TE_PW_ROUND, emit(b, TE_PW_WHERE, emit(b, TE_PW_ISNAN, a, -1, -1), number(b, 3), bounded), -1, -1);
}

static void random_leaves(built *b, uint64_t *state)
{
    int inputs = 1 + (int)(test_random(state) % 4);
    input(b, TE_RATE_ELEM);
    for (int i = 1; i < inputs; i++)
        input(b, (te_rate)(test_random(state) % 8 == 0 ? 0 : test_random(state) % 4 == 0 ? 1 : 2));
    param(b);
    number(b, test_uniform(state, -2, 2));
    if (test_random(state) % 4 == 0) emit_full(b, TE_PW_COLUMN, TE_RATE_ELEM, 0, 0, -1, -1, -1);
    if (test_random(state) % 4 == 0) {
        static const te_opcode ops[] = {TE_PW_RANDOM, TE_PW_KEEP, TE_PW_NORMAL};
        te_opcode op = ops[test_random(state) % 3];
        emit_full(b, op, TE_RATE_ELEM, b->program.n_rngs++, 0,
                  op == TE_PW_KEEP ? (int)(test_random(state) % (uint32_t)b->program.n_insns) : -1, -1, -1);
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
            if (b->insns[recent].rate != TE_RATE_ELEM) recent = 0; /* an input of elements */
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

#endif
