/* test_cuda_backend_emit.c - programs that leave results quantized, through the whole backend on the machine that is
 * made up: the bytes are those of running the program on the CPU and quantizing what it gives. */
#include "cuda_backend.h"

#include "core/quantized.h"
#include "program_hand.h"
#include "quantizers.h"

enum { MAX_ROWS = 300, MAX_COLS = 520 };

static uint64_t seed = 0x2545f4914f6cdd1du;

/* What one device makes of a program with inputs x and w: y, which is quantized, z beside it, a sum over columns, a sum
 * of all. */
typedef struct made {
    te_tensor *x, *w, *y, *z, *columns, *total, *rows;
    te_quantized q;
} made;

static te_tensor *tensor(te_device *device, te_dtype dtype, int64_t rows, int64_t cols)
{
    te_tensor *t = te_tensor_new(device->ctx, device, dtype, 2, (int64_t[]){rows, cols});
    if (!t || te_tensor_fill(t, 0) != TE_OK) abort();
    return t;
}

static void make(made *m, te_device *device, te_dtype dtype, int64_t rows, int64_t cols, const double *values)
{
    memset(m, 0, sizeof *m);
    m->x = tensor(device, dtype, rows, cols);
    m->w = tensor(device, TE_F32, 1, cols);
    m->z = tensor(device, TE_F32, rows, cols);
    m->columns = tensor(device, TE_F32, 1, cols);
    m->total = tensor(device, TE_F32, 1, 1);
    m->rows = tensor(device, TE_F32, rows, 1);
    if (te_tensor_write(m->x, TE_F64, values) != TE_OK || te_tensor_write(m->w, TE_F64, values + rows * cols) != TE_OK)
        abort();
}

static void unmake(made *m)
{
    te_tensor *const all[] = {m->x, m->w, m->y, m->z, m->columns, m->total, m->rows};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) te_tensor_release(all[i]);
    te_quantized_close(&m->q);
}

/* y = tanh(x) * w, or with the largest of each row taken off first, which no order of additions changes. */
static void build(built *b, bool reduces)
{
    begin(b, reduces ? "with_rows" : "pointwise");
    int x = input(b, TE_RATE_ELEM), w = input(b, TE_RATE_ELEM);
    int most = reduces ? reduce(b, TE_PW_ROWMAX, x) : number(b, 0.25);
    int half = emit(b, TE_PW_MUL, most, number(b, 0.5), -1);
    int y = emit(b, TE_PW_MUL, emit(b, TE_PW_TANH, emit(b, TE_PW_SUB, x, half, -1), -1, -1), w, -1);
    output(b, TE_OUT_ELEM, y);
    output(b, TE_OUT_ELEM, x);
    output(b, TE_OUT_COLSUM, x);
    output(b, TE_OUT_SUM, x);
    if (reduces) output(b, TE_OUT_ROW, half);
}

static te_operand whole(te_tensor *t, int64_t row_stride, int64_t stride)
{
    te_operand o = {.data = te_tensor_pointer(t), .dtype = t->dtype, .stride = {row_stride, stride}};
    return o;
}

static te_status run(built *b, te_device *device, made *m, te_operand y)
{
    int64_t rows = m->x->shape[0], cols = m->x->shape[1];
    te_operand in[2] = {whole(m->x, cols, 1), whole(m->w, 0, 1)};
    te_operand out[5] = {y, whole(m->z, cols, 1), whole(m->columns, 0, 1), whole(m->total, 0, 0), whole(m->rows, 1, 0)};
    te_run r = {.ndim = 2, .shape = {rows, cols}, .inputs = in, .outputs = out};
    return device->exec.backend->program_run(&device->exec, &b->program, &r, 1);
}

/* Nothing but y, and what it follows from. */
static te_status run_alone(built *b, te_device *device, made *m, te_operand y)
{
    int64_t rows = m->x->shape[0], cols = m->x->shape[1];
    te_operand in[2] = {whole(m->x, cols, 1), whole(m->w, 0, 1)}, out[5] = {y};
    te_run r = {.ndim = 2, .shape = {rows, cols}, .inputs = in, .outputs = out};
    return device->exec.backend->program_run(&device->exec, &b->program, &r, 1);
}

static bool same_tensor(te_tensor *cpu, te_tensor *gpu)
{
    if (!cpu || !gpu) return cpu == gpu;
    te_tensor *back = te_tensor_on_device(gpu, cpu->storage->device);
    bool same = back && memcmp(te_tensor_data(back), te_tensor_data(cpu),
                               (size_t)te_tensor_numel(cpu) * te_dtype_size(cpu->dtype)) == 0;
    te_tensor_release(back);
    return same;
}

static double farthest(te_tensor *a, te_tensor *b)
{
    static double x[MAX_COLS], y[MAX_COLS];
    double worst = 0;
    if (te_tensor_read(a, TE_F64, x) != TE_OK || te_tensor_read(b, TE_F64, y) != TE_OK) abort();
    for (int64_t i = 0; i < te_tensor_numel(a); i++) worst = fmax(worst, fabs(x[i] - y[i]));
    return worst;
}

static void compare(const char *name, const made *cpu, const made *gpu)
{
    for (int s = 0; s < 2; s++) {
        const te_quantized_part *a = &cpu->q.side[s], *b = &gpu->q.side[s];
        CHECK_MSG(same_tensor(a->data, b->data), "%s: data of side %d", name, s);
        CHECK_MSG(same_tensor(a->scale_inv, b->scale_inv), "%s: factors of side %d", name, s);
        CHECK_MSG(same_tensor(a->amax, b->amax), "%s: amax of side %d", name, s);
    }
    CHECK_MSG(same_tensor(cpu->z, gpu->z), "%s: what is stored beside it", name);
    CHECK_MSG(same_tensor(cpu->rows, gpu->rows), "%s: values of rows", name);
    CHECK_MSG(farthest(cpu->columns, gpu->columns) < 2e-3, "%s: sums over columns", name);
    CHECK_MSG(farthest(cpu->total, gpu->total) < 0.1, "%s: the sum of all", name);
}

static void check(te_context *ctx, const char *recipe, const te_quantizer *q, te_dtype dtype, int64_t rows,
                  int64_t cols, bool reduces, const bool want[2])
{
    static double values[MAX_ROWS * MAX_COLS + MAX_COLS];
    te_device *cpu = te_context_device(ctx, "cpu"), *gpu = te_context_device(ctx, "cuda");
    const uint64_t number = 77;
    te_quantize_options options = {.want = {want[0], want[1]}, .scale = 11, .seed = &number};
    char name[128];
    snprintf(name, sizeof name, "%s of %s %lld x %lld%s", recipe, te_dtype_name(dtype), (long long)rows,
             (long long)cols, reduces ? " with rows" : "");
    for (int64_t i = 0; i < (rows + 1) * cols; i++) values[i] = test_uniform(&seed, -2, 2);
    static built b;
    made a, g;
    build(&b, reduces);
    make(&a, cpu, dtype, rows, cols, values);
    make(&g, gpu, dtype, rows, cols, values);
    a.y = tensor(cpu, dtype, rows, cols);
    CHECK_MSG(run(&b, cpu, &a, whole(a.y, cols, 1)) == TE_OK, "%s: %s", name, cpu->exec.message);
    CHECK_MSG(te_quantize(a.y, q, &options, &a.q) == TE_OK, "%s: %s", name, te_context_error(ctx));
    if (te_quantized_open(gpu, q, dtype, 2, a.x->shape, want, false, &g.q) != TE_OK) abort();
    te_tensor *factor = q->needs_history ? te_tensor_scalar(ctx, gpu, TE_F32, 11) : NULL;
    te_quantize_job job = te_quantized_job(&g.q, factor, NULL);
    te_tensor *amaxes = tensor(gpu, TE_F32, 1, 2);
    job.amaxes = te_tensor_pointer(amaxes);
    if (te_quantizer_measures(q)) {
        if (q->row_scaled && g.q.side[0].amax && te_tensor_fill(g.q.side[0].amax, 0) != TE_OK) abort();
        job.step = TE_QUANTIZE_MEASURE;
        CHECK_MSG(run_alone(&b, gpu, &g, (te_operand){.quantized = &job}) == TE_OK, "%s: %s", name, gpu->exec.message);
        job.step = TE_QUANTIZE_CONVERT;
    }
    for (int s = 0; s < 2 && q->stochastic; s++) job.side[s].rng = (te_rng){.seed = number};
    if (q->stochastic) job.side[1].rng.offset += te_quantize_groups(&job.side[0]);
    CHECK_MSG(run(&b, gpu, &g, (te_operand){.quantized = &job}) == TE_OK, "%s: %s", name, gpu->exec.message);
    te_tensor_release(amaxes);
    compare(name, &a, &g);
    te_tensor_release(factor);
    unmake(&a);
    unmake(&g);
    if (b.program.release_device_compiled) b.program.release_device_compiled(&b.program);
    release(&b);
}

/* Quantizers that look at the whole first, in one run, sources of another shape and sums are refused before anything
 * runs. */
static void check_refusals(te_context *ctx)
{
    static double values[40 * 48];
    te_device *gpu = te_context_device(ctx, "cuda");
    const te_quantizer *refused[] = {&quantizer_recipes[1].q[0], &quantizer_recipes[6].q[0]};
    for (int i = 0; i < 2; i++) {
        static built b;
        made g;
        build(&b, false);
        make(&g, gpu, TE_BF16, 33, 48, values);
        const bool both[2] = {true, true};
        if (te_quantized_open(gpu, refused[i], TE_BF16, 2, g.x->shape, both, false, &g.q) != TE_OK) abort();
        te_quantize_job job = te_quantized_job(&g.q, NULL, NULL);
        CHECK(run(&b, gpu, &g, (te_operand){.quantized = &job}) == TE_ERROR_ARGUMENT);
        CHECK(strstr(gpu->exec.message, "output 0 cannot be left quantized") != NULL);
        unmake(&g);
        if (b.program.release_device_compiled) b.program.release_device_compiled(&b.program);
        release(&b);
    }
}

/* Where tiles and what goes with them have no room results are stored first. */
static void check_small_device(void)
{
    fake.set_shared(95300); /* enough for quantizing by itself, not for all of these programs */
    te_context *ctx = te_context_open(NULL);
    for (int r = 0; r < QUANTIZER_RECIPES; r++)
        for (int role = 0; role < 3; role++)
            check(ctx, quantizer_recipes[r].name, &quantizer_recipes[r].q[role], TE_F32, 130, 160, role == 1,
                  (bool[]){true, true});
    te_context_release(ctx);
    fake.set_shared(0);
}

/* What is looked up, of many elements; some lie beyond the tables. */
static void check_tables(te_context *ctx, const te_quantizer *q)
{
    enum { EDGE = 4096 };
    static built b;
    te_device *cpu = te_context_device(ctx, "cpu"), *gpu = te_context_device(ctx, "cuda");
    te_tensor *x = tensor(cpu, TE_BF16, EDGE, EDGE), *y = tensor(cpu, TE_BF16, EDGE, EDGE);
    uint16_t *codes = te_tensor_data(x);
    te_quantize_options options = {.want = {true, true}, .scale = 11};
    te_quantized want = {0}, got = {0};
    begin(&b, "looked_up");
    int in = input(&b, TE_RATE_ELEM);
    output(&b, TE_OUT_ELEM, emit(&b, TE_PW_MUL, in, emit(&b, TE_PW_SIGMOID, in, -1, -1), -1));
    for (int i = 0; i < EDGE * EDGE; i++) codes[i] = te_f32_to_bf16((float)test_uniform(&seed, -3, 3));
    for (int i = 0; i < 65536; i++) codes[test_random(&seed) % (EDGE * EDGE)] = te_f32_to_bf16((float)i * 0.001f);
    te_tensor *there = te_tensor_on_device(x, gpu);
    te_operand from = whole(x, EDGE, 1), to = whole(y, EDGE, 1);
    te_run r = {.ndim = 2, .shape = {EDGE, EDGE}, .inputs = &from, .outputs = &to};
    CHECK(cpu->exec.backend->program_run(&cpu->exec, &b.program, &r, 1) == TE_OK);
    CHECK_MSG(te_quantize(y, q, &options, &want) == TE_OK, "%s", te_context_error(ctx));
    if (te_quantized_open(gpu, q, TE_BF16, 2, x->shape, options.want, false, &got) != TE_OK) abort();
    te_tensor *factor = te_tensor_scalar(ctx, gpu, TE_F32, 11), *amaxes = tensor(gpu, TE_F32, 1, 2);
    te_quantize_job job = te_quantized_job(&got, factor, NULL);
    job.amaxes = te_tensor_pointer(amaxes);
    from = whole(there, EDGE, 1);
    to = (te_operand){.quantized = &job};
    CHECK_MSG(gpu->exec.backend->program_run(&gpu->exec, &b.program, &r, 1) == TE_OK, "%s", gpu->exec.message);
    for (int s = 0; s < 2; s++) {
        CHECK_MSG(same_tensor(want.side[s].data, got.side[s].data), "looked up: data of side %d", s);
        CHECK_MSG(same_tensor(want.side[s].amax, got.side[s].amax), "looked up: amax of side %d", s);
    }
    te_tensor *const all[] = {x, y, there, factor, amaxes};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) te_tensor_release(all[i]);
    te_quantized_close(&want);
    te_quantized_close(&got);
    if (b.program.release_device_compiled) b.program.release_device_compiled(&b.program);
    release(&b);
}

int main(void)
{
    static const int64_t sizes[][2] = {{37, 50}, {130, 160}, {128, 257}, {300, 520}};
    static const te_dtype dtypes[] = {TE_BF16, TE_F16, TE_F32};
    static const bool wants[][2] = {{true, true}, {true, false}, {false, true}};
    fake_open();
    te_context *ctx = te_context_open(NULL);
    int n = 0;
    for (int r = 0; r < QUANTIZER_RECIPES; r++)
        for (int role = 0; role < 3; role++) {
            const te_quantizer *q = &quantizer_recipes[r].q[role];
            for (int s = 0; s < 4; s++, n++)
                check(ctx, quantizer_recipes[r].name, q, dtypes[n % 3], sizes[s][0], sizes[s][1], (n / 3 + s) % 2,
                      wants[n % 5 % 3]);
        }
    CHECK(n > 90);
    for (int i = 0; i < 2 * 4 * 2; i++) /* one factor for all, known beforehand: delayed and current scaling */
        check(ctx, quantizer_recipes[i / 8].name, &quantizer_recipes[i / 8].q[2], TE_BF16, sizes[i % 4][0],
              sizes[i % 4][1], i / 4 % 2, wants[0]);
    check_tables(ctx, &quantizer_recipes[0].q[2]);
    check_refusals(ctx);
    te_context_release(ctx);
    check_small_device();
    fake_close();
    return TEST_END();
}
