/* dequantize.c - the values that a quantized side stands for, to a matrix that lies as the source did.
 *
 * A side that lies so itself is decoded row by row, a transposed one square by square, turned as float32.
 */
#include "copy.h"
#include "decode.h"
#include "workers.h"

#include <string.h>

enum {
    SQUARE = 128,
    PARALLEL_FROM = 16 << 10,
    STREAM_FROM = 32 << 20, /* bytes that no cache holds are written past the caches */
};

typedef struct target {
    const te_quantize_job *job;
    te_decode decode;
    const te_quantize_blocks *blocks;
    te_store_fn store;
    te_transpose_fn transpose; /* of float32 */
    bool past;
} target;

static void *place(const target *t, int64_t row, int64_t col)
{
    return (char *)t->job->source + (row * t->job->source_stride + col) * (int64_t)te_dtype_size(t->job->dtype);
}

static void put(const target *t, int64_t row, int64_t col, const float *values, int n)
{
    t->store(place(t, row, col), 1, values, 1, n);
}

static bool run(const target *t, int64_t row, int64_t col, int64_t n)
{
    return te_decode_run(t->blocks, &t->decode, row, col, (int)n, t->job->dtype, place(t, row, col), t->past);
}

static void decode_rows(const target *t, int64_t row)
{
    float values[TE_DECODE_RUN];
    for (int64_t far = 0, next, cols = t->job->cols; far < cols; far = next) {
        next = cols - far < TE_DECODE_FAR ? cols : far + TE_DECODE_FAR;
        if (run(t, row, far, next - far)) continue;
        for (int64_t col = far; col < next; col += TE_DECODE_RUN) {
            int n = (int)(next - col < TE_DECODE_RUN ? next - col : TE_DECODE_RUN);
            if (run(t, row, col, n)) continue;
            te_decode_row(t->blocks, &t->decode, row, col, n, values);
            put(t, row, col, values, n);
        }
    }
}

/* The square whose first element is (row, col) of the source. Groups of 16 rows are whole in a transformed side. */
static void decode_square(const target *t, int64_t row, int64_t col)
{
    float turned[SQUARE][SQUARE], values[TE_GROUP][SQUARE];
    int64_t left = t->decode.cols - row;
    int rows = (int)(left < SQUARE ? left : SQUARE);
    int cols = (int)(t->job->cols - col < SQUARE ? t->job->cols - col : SQUARE);
    for (int j = 0; j < cols; j++) te_decode_row(t->blocks, &t->decode, col + j, row, rows, turned[j]);
    for (int i = 0; i < rows && row + i < t->job->rows; i += TE_GROUP) {
        int n = rows - i < TE_GROUP ? rows - i : TE_GROUP;
        t->transpose(values, SQUARE, &turned[0][i], SQUARE, n, cols);
        if (t->job->quantizer->hadamard) t->blocks->transform_back(values[0], SQUARE, cols);
        for (int k = 0; k < n && row + i + k < t->job->rows; k++) put(t, row + i + k, col, values[k], cols);
    }
}

typedef struct decode_job {
    te_exec              *exec;
    const target         *t;
    const te_copy_blocks *copy;
    int64_t               over; /* squares beside each other; 0: parts are rows */
} decode_job;

static void decode_parts(void *context, int64_t first, int64_t end, int thread)
{
    const decode_job *all = context;
    (void)thread;
    for (int64_t i = first; i < end && !te_cpu_stopping(all->exec); i++)
        if (all->over)
            decode_square(all->t, i / all->over * SQUARE, i % all->over * SQUARE);
        else
            decode_rows(all->t, i);
    if (all->t->past) all->copy->settle();
}

te_status te_cpu_dequantize(te_exec *exec, const te_quantize_job *job, int side)
{
    te_quant quant;
    bool across, turned = side == 1 && job->quantizer->transposed;
    /* rows as they lie */
    te_view view = te_quantized_view(job->quantizer, &job->side[side], side == 1 && !turned, &quant);
    const te_copy_blocks *copy = te_copy_blocks_of(exec);
    if (job->rows == 0 || job->cols == 0) return TE_OK;
    target t = {.job = job,
                .decode = te_decode_of(&view, &across),
                .blocks = te_quantize_blocks_of(exec),
                .store = copy->store[TE_CLASS_F32][job->dtype],
                .transpose = copy->transpose[2]};
    t.decode.times = te_decode_tensor_factor(&view);
    int threads = exec->threads < 1 || job->rows * job->cols < PARALLEL_FROM ? 1 : exec->threads;
    int64_t over = (job->cols + SQUARE - 1) / SQUARE, squares = (job->rows + SQUARE - 1) / SQUARE * over;
    int64_t parts = turned ? squares : job->rows;
    t.past = job->rows * job->cols * (int64_t)te_dtype_size(job->dtype) >= STREAM_FROM;
    decode_job all = {exec, &t, copy, turned ? over : 0};
    te_cpu_loop(exec, threads, parts, te_cpu_even_grain(parts, threads), decode_parts, &all);
    return te_cpu_finish(exec, TE_OK);
}
