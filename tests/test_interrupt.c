/* test_interrupt.c - an interrupt ends operations that take long: every kernel of the CPU with the flag set beforehand,
 * and a few operations of seconds from another thread. */
#include "program_hand.h"

#include "kernels/quantize.h"
#include "tetrain/tetrain.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

/* --- kernels ------------------------------------------------------------------------------------------------------ */

enum { ROWS = 6, COLUMNS = 1000, N = ROWS * COLUMNS, HEADS = 2, SEQ = 100, DIM = 16, A = HEADS * SEQ * DIM };

static float   x[N], y[N], z[N], a[5][A], b[3][A], lse[HEADS * SEQ];
static int64_t ids[N], positions[N];

static te_view matrix(void *data, te_dtype dtype)
{
    return test_view(data, dtype, 2, (int64_t[]){ROWS, COLUMNS});
}

static te_view heads(float *data) { return test_view(data, TE_F32, 4, (int64_t[]){1, HEADS, SEQ, DIM}); }

static te_status run_program(te_exec *exec)
{
    static built p;
    begin(&p, "twice");
    int in = input(&p, TE_RATE_ELEM);
    output(&p, TE_OUT_ELEM, emit(&p, TE_PW_ADD, in, in, -1));
    output(&p, TE_OUT_COLSUM, in);
    te_operand inputs = {.data = x, .dtype = TE_F32, .stride = {0, 1}};
    te_operand outputs[] = {{.data = NULL}, {.data = y, .dtype = TE_F32, .stride = {0, 1}}};
    te_run     run = {.ndim = 2, .shape = {20000, COLUMNS}, .inputs = &inputs, .outputs = outputs};
    te_status  status = te_cpu_program_run(exec, &p.program, &run, 1);
    release(&p);
    return status;
}

static te_attention attention(void)
{
    return (te_attention){.q = heads(a[0]), .k = heads(a[1]), .v = heads(a[2]), .out = heads(a[3]),
                          .lse = test_view(lse, TE_F32, 3, (int64_t[]){1, HEADS, SEQ}), .scale = 0.25,
                          .window_left = -1, .window_right = -1};
}

static te_status run_attention(te_exec *exec)
{
    te_attention forward = attention();
    return te_cpu_attention(exec, &forward);
}

static te_status run_attention_backward(te_exec *exec)
{
    te_attention_grad g = {
        .forward = attention(), .dout = heads(a[4]), .dq = heads(b[0]), .dk = heads(b[1]), .dv = heads(b[2])};
    return te_cpu_attention_backward(exec, &g);
}

static te_status run_gemm(te_exec *exec)
{
    te_gemm g = {.a = test_view(x, TE_F32, 2, (int64_t[]){40, 50}), .b = test_view(y, TE_F32, 2, (int64_t[]){50, 40}),
                 .c = test_view(z, TE_F32, 2, (int64_t[]){40, 40}), .alpha = 1};
    return te_cpu_gemm(exec, &g);
}

static te_status run_copy(te_exec *exec)
{
    te_view from = matrix(x, TE_F32), to = matrix(ids, TE_I64);
    return te_cpu_copy(exec, &to, &from);
}

static te_status run_triangle(te_exec *exec)
{
    te_view from = matrix(x, TE_F32), to = matrix(y, TE_F32);
    return te_cpu_triangle(exec, &to, &from, 0, false);
}

static te_status run_embedding(te_exec *exec)
{
    te_view table = matrix(x, TE_F32), out = matrix(y, TE_F32),
            rows = test_view(positions, TE_I64, 1, (int64_t[]){ROWS});
    return te_cpu_embedding(exec, &out, &table, &rows);
}

static te_status run_embedding_backward(te_exec *exec)
{
    te_view table = matrix(y, TE_F32), dy = matrix(x, TE_F32),
            rows = test_view(positions, TE_I64, 1, (int64_t[]){ROWS});
    return te_cpu_embedding_backward(exec, &table, &dy, &rows, NULL);
}

static te_status run_gather(te_exec *exec)
{
    te_view from = matrix(x, TE_F32), to = matrix(y, TE_F32), index = matrix(positions, TE_I64);
    return te_cpu_gather(exec, &to, &from, &index, 1);
}

static te_status run_scatter_add(te_exec *exec)
{
    te_view from = matrix(x, TE_F32), to = matrix(y, TE_F32), index = matrix(positions, TE_I64);
    return te_cpu_scatter_add(exec, &to, &from, &index, 1);
}

static te_status run_arg_reduce(te_exec *exec)
{
    te_view from = matrix(x, TE_F32), to = test_view(ids, TE_I64, 1, (int64_t[]){ROWS});
    return te_cpu_arg_reduce(exec, &to, &from, true);
}

static te_status run_topk(te_exec *exec)
{
    te_view from = matrix(x, TE_F32), values = matrix(y, TE_F32), indices = matrix(ids, TE_I64);
    return te_cpu_topk(exec, &values, &indices, &from, true);
}

static te_status run_sort(te_exec *exec)
{
    te_view from = matrix(x, TE_F32), indices = matrix(ids, TE_I64);
    return te_cpu_sort(exec, NULL, &indices, &from, true);
}

static te_status run_cumsum(te_exec *exec)
{
    te_view from = matrix(x, TE_F32), to = matrix(y, TE_F32);
    return te_cpu_cumsum(exec, &to, &from, false);
}

static te_status run_multinomial(te_exec *exec)
{
    te_view from = matrix(x, TE_F32), to = matrix(ids, TE_I64);
    return te_cpu_multinomial(exec, &to, &from, true, (te_rng){.seed = 1, .stream = 2, .offset = 3});
}

static te_status run_integers(te_exec *exec)
{
    te_integers drawn = {.range = 10};
    return te_cpu_integers(exec, ids, N, &drawn);
}

/* --- of quantization ---------------------------------------------------------------------------------------------- */

static uint8_t codes[2][N];
static float   factors[2][N], amaxes[2];

static const te_quantizer current = {.element = TE_E4M3, .has_columnwise = true, .transposed = true},
                          in_blocks = {.element = TE_E4M3, .scale = TE_SCALE_E8M0, .block_rows = 1, .block_cols = 32,
                                       .has_columnwise = true},
                          by_rows = {.element = TE_E2M1, .scale = TE_SCALE_E4M3, .block_rows = 1, .block_cols = 16,
                                     .scale_max = 448, .row_scaled = true};

static te_quantize_job quantize_job(const te_quantizer *q, bool both)
{
    static float row_amaxes[ROWS];
    int64_t per_row = q->block_cols ? (COLUMNS + q->block_cols - 1) / q->block_cols : 0;
    te_quantize_job job = {.quantizer = q, .source = x, .dtype = TE_F32, .rows = ROWS, .cols = COLUMNS,
                           .source_stride = COLUMNS, .scale = 1};
    job.side[0] = (te_quantized_side){.data = codes[0], .rows = ROWS, .cols = COLUMNS, .row_stride = COLUMNS,
                                      .col_stride = 1,
                                      .scale_inv = factors[0], .scale_row_stride = per_row, .scale_col_stride = 1,
                                      .amax = q->row_scaled ? row_amaxes : amaxes, .amax_stride = q->row_scaled};
    job.side[1] = (te_quantized_side){.data = both ? codes[1] : NULL, .rows = COLUMNS, .cols = ROWS, .row_stride = ROWS,
                                      .col_stride = 1, .scale_inv = factors[1], .scale_row_stride = 1,
                                      .scale_col_stride = COLUMNS, .amax = amaxes + 1};
    if (!q->transposed) job.side[1].row_stride = 1, job.side[1].col_stride = COLUMNS;
    return job;
}

static te_status run_quantize(te_exec *exec)
{
    te_quantize_job job = quantize_job(&current, true);
    return te_cpu_quantize(exec, &job);
}

static te_status run_quantize_blocks(te_exec *exec)
{
    te_quantize_job job = quantize_job(&in_blocks, true);
    return te_cpu_quantize(exec, &job);
}

static te_status run_quantize_rows(te_exec *exec)
{
    te_quantize_job job = quantize_job(&by_rows, false);
    return te_cpu_quantize(exec, &job);
}

static te_status run_dequantize(te_exec *exec)
{
    te_quantize_job job = quantize_job(&in_blocks, false);
    job.source = y;
    return te_cpu_dequantize(exec, &job, 0);
}

static te_status run_quantized_gemm(te_exec *exec)
{
    te_quant quant[2];
    te_quantize_job job = quantize_job(&in_blocks, false);
    te_gemm g = {.a = te_quantized_view(&in_blocks, &job.side[0], false, &quant[0]),
                 .b = te_quantized_view(&in_blocks, &job.side[0], true, &quant[1]),
                 .c = test_view(z, TE_F32, 2, (int64_t[]){ROWS, ROWS}), .alpha = 1, .b_key = 7};
    return te_cpu_gemm(exec, &g);
}

static const struct {
    const char *name;
    te_status (*run)(te_exec *);
} kernels[] = {{"program", run_program},       {"attention", run_attention},
               {"attention backward", run_attention_backward},
               {"gemm", run_gemm},             {"copy", run_copy},    {"triangle", run_triangle},
               {"embedding", run_embedding},   {"embedding backward", run_embedding_backward},
               {"gather", run_gather},         {"scatter_add", run_scatter_add},
               {"arg_reduce", run_arg_reduce}, {"topk", run_topk}, {"sort", run_sort},
               {"cumsum", run_cumsum},         {"multinomial", run_multinomial},
               {"integers", run_integers},
               {"quantize", run_quantize},     {"quantize blocks", run_quantize_blocks},
               {"quantize rows", run_quantize_rows},
               {"dequantize", run_dequantize}, {"quantized gemm", run_quantized_gemm}};

/* Set, the flag ends each of them; taken back, it leaves nothing behind. */
static void test_kernels(int threads)
{
    atomic_int flag = 0;
    te_exec    exec = test_exec_open(threads);
    exec.interrupt = &flag;
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
        for (int j = 0; j < N; j++) x[j] = 1 + (float)(j % 7), ids[j] = -1, positions[j] = j % ROWS;
        for (int turn = 0; turn < 4; turn++) {
            flag = turn % 2;
            exec.message[0] = 0;
            te_status status = kernels[i].run(&exec);
            CHECK_MSG(status == (flag ? TE_ERROR_INTERRUPTED : TE_OK), "%s, %d threads, flag %d: status %d, %s",
                      kernels[i].name, threads, (int)flag, (int)status, exec.message);
            CHECK_MSG(!flag || strcmp(exec.message, "interrupted") == 0, "%s: %s", kernels[i].name, exec.message);
        }
    }
    test_exec_close(&exec);
}

/* --- operations --------------------------------------------------------------------------------------------------- */

/* Of the processor, which a busy machine does not stretch. */
static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

typedef struct caller {
    tetrain *rt;
    double   at; /* when it interrupted */
} caller;

static void *interrupt_later(void *user)
{
    caller *c = user;
    usleep(100000);
    c->at = seconds();
    tetrain_interrupt(c->rt);
    return NULL;
}

static tetrain_status run(tetrain *rt, const char *text) { return tetrain_run_string(rt, text, strlen(text), "=test"); }

/* What is prepared, and one operation on it that takes seconds on one thread; whom the message names, not parts of it
 * that have names of their own. */
static const struct {
    const char *prepare, *run, *name;
} operations[] = {
    {"x = te.ones(1, 3072, 3072):expand(64, 3072, 3072)", "y = te.matmul(x, x)", "matmul"},
    {"x = te.ones(8000, 8000)", "y = te.matmul(x, x)", "matmul"},
    {"x = te.randn { 1, 8, 16384, 64 }", "y = te.scaled_dot_product_attention(x, x, x)",
     "scaled_dot_product_attention"},
    {"x = te.randn { 1, 8, 8192, 64 } x.requires_grad = true l = te.scaled_dot_product_attention(x, x, x):sum()",
     "y = l:backward()", NULL},
    {"x = te.ones(1):expand(2^30)", "y = te.sin(x)", "sin"},
    {"x = te.ones(1):expand(2^30)", "y = te.softmax(x)", "softmax"},
    {"x = te.ones(1, 1):expand(2, 2^29)", "y = te.cumsum(x, 2)", "cumsum"},
    {"x = te.ones(1, 1):expand(2^26, 16)", "y = te.cumsum(x, 1)", "cumsum"},
    {"x = te.ones(1, 1):expand(2^28, 16)", "y = te.argmax(x, 1)", "argmax"},
    {"x = te.ones(1, 1):expand(2^28, 16)", "y = te.max(x, 1)", "max"},
    {"x = te.rand { 2^24 }", "y = te.topk(x, 2^24)", "topk"},
    {"x = nil", "while true do te.ones(1000, 1000):release() end", "ones"},
    {"x = nil", "while true do te.rand(1000, 1000):release() end", "rand"},
};

/* Whether an interrupt's message names an operation, or none, since it came before the next one. */
static bool names(const char *message, const char *name)
{
    char said[64];
    snprintf(said, sizeof said, "te.%s: interrupted\n", name ? name : "");
    return !name || !strstr(message, "te.") || strstr(message, said);
}

/* Generous, since sanitizers are slow: what is not interrupted takes much longer still. */
static void test_operations(void)
{
    tetrain_options options = {.struct_size = sizeof options, .threads = 1};
    tetrain        *rt = tetrain_open(&options);
    CHECK(run(rt, "te = require 'te'") == TETRAIN_OK);
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++) {
        pthread_t thread;
        caller    c = {.rt = rt};
        CHECK_MSG(run(rt, operations[i].prepare) == TETRAIN_OK, "%s", tetrain_error(rt));
        CHECK(pthread_create(&thread, NULL, interrupt_later, &c) == 0);
        tetrain_status status = run(rt, operations[i].run);
        pthread_join(thread, NULL);
        double late = seconds() - c.at;
        if (getenv("TE_TEST_TIMES")) fprintf(stderr, "%-40s %6.1f ms\n", operations[i].run, 1e3 * late);
        CHECK_MSG(status == TETRAIN_ERROR_INTERRUPTED && strstr(tetrain_error(rt), "interrupted"), "%s: %d, %s",
                  operations[i].run, (int)status, tetrain_error(rt));
        CHECK_MSG(names(tetrain_error(rt), operations[i].name), "%s: %s", operations[i].run, tetrain_error(rt));
        CHECK_MSG(late < 2, "%s worked for %.2f s after it was interrupted", operations[i].run, late);
        CHECK_MSG(run(rt, "assert(y == nil and te.ones(3):sum():item() == 3)") == TETRAIN_OK, "%s", tetrain_error(rt));
    }
    tetrain_close(rt);
}

/* An update of the optimizer is done as a whole. */
static void test_update(void)
{
    tetrain *rt = tetrain_open(NULL);
    CHECK(run(rt, "te = require 'te' p = te.zeros { 2^20 } p.requires_grad = true p.grad = te.ones { 2^20 }") ==
          TETRAIN_OK);
    CHECK_MSG(run(rt, "o = te.optim.SGD({ p }, { lr = 1 })") == TETRAIN_OK, "%s", tetrain_error(rt));
    te_context_interrupt(tetrain_context(rt));
    CHECK(run(rt, "o:step()") == TETRAIN_OK);
    te_context_clear_interrupt(tetrain_context(rt));
    CHECK(run(rt, "assert(p:detach():eq(-1):all():item())") == TETRAIN_OK);
    for (int i = 0; i < 2; i++) { /* quantized in the pass, and after it */
        const char *make[] = {"r = te.recipe.MXFP8BlockScaling {}", "r = te.recipe.Float8CurrentScaling {}"};
        CHECK(run(rt, make[i]) == TETRAIN_OK);
        CHECK(run(rt, "m = te.quantized_model_init({ recipe = r }, te.Linear, 512, 2048) w = m.weight") == TETRAIN_OK);
        CHECK(run(rt, "te.no_grad(w.fill_, w, 1) w.grad = te.ones { 2048, 512 } m.bias.grad = te.ones { 2048 }") ==
              TETRAIN_OK);
        CHECK_MSG(run(rt, "o = te.optim.SGD(m, { lr = 1.5 }) o:step()") == TETRAIN_OK, "%s", tetrain_error(rt));
        te_context_interrupt(tetrain_context(rt));
        CHECK_MSG(run(rt, "o:step()") == TETRAIN_OK, "%s", tetrain_error(rt));
        te_context_clear_interrupt(tetrain_context(rt));
        CHECK_MSG(run(rt, "assert(w:detach():eq(-2):all():item())") == TETRAIN_OK, "%s", tetrain_error(rt));
    }
    tetrain_close(rt);
}

int main(void)
{
    test_kernels(1);
    test_kernels(2);
    test_operations();
    test_update();
    return TEST_END();
}
