/* gemm_rows.c - products of few rows: a model that answers token by token.
 *
 * Such a product reads b once and does next to nothing with it, so packing b, or reading it in tiles that hop from
 * column to column, would be most of the time. Where columns of b are contiguous, as those of weights are, a thread
 * goes through its share of them from the first byte to the last and every element of c is one sum over two lines
 * (isa/gemm_dots.c).
 */
#include "gemm.h"
#include "workers.h"

enum {
    MOST_ROWS = 8,             /* with more of them, tiles use what they loaded more often, … */
    LARGE_BYTES = 1 << 20,     /* … and with more than one where all of b stays near */
    COLUMNS = 64,              /* of a piece of work: what `finish` takes at once, … */
    FEW_COLUMNS = 16,          /* … and least, where there would be fewer pieces than threads */
    THREAD_BYTES = 128 << 10,  /* of b that pay for waking a thread */
    PITCH = COLUMNS + 4,       /* of sums */
    STACK_BYTES = 16 << 10
};

typedef struct rows_work {
    const te_gemm_problem *p;
    const te_gemm_isa *isa;
    const void *bias;
    int64_t columns; /* of a piece */
    int64_t pieces;  /* of a product */
} rows_work;

const char *te_gemm_rows_decline(te_exec *exec, const te_gemm_problem *p)
{
    (void)exec;
    if (p->m > MOST_ROWS) return "many rows";
    if (p->m > 1 && (double)p->n * (double)p->k * p->b.size < LARGE_BYTES) return "b is small";
    if (p->a.dtype != TE_F32 && p->a.dtype != TE_BF16) return "neither float32 nor bfloat16";
    if (p->b.rs != 1 || p->a.cs != 1) return "its lines are not contiguous";
    return NULL;
}

static void run_piece(const rows_work *w, int64_t batch, int64_t piece)
{
    const te_gemm_problem *p = w->p;
    te_gemm_product t = te_gemm_product_of(p, batch);
    int64_t col = piece * w->columns, left = p->n - col;
    float   sums[MOST_ROWS * PITCH];
    te_gemm_dots dots = {.a = t.a.data, .b = te_gemm_element(&t.b, 0, col), .a_line = t.a.rs * t.a.size,
                         .b_line = t.b.cs * t.b.size, .bytes = p->k * t.a.size, .rows = (int)p->m,
                         .cols = (int)(left < w->columns ? left : w->columns), .pitch = PITCH, .sums = sums};
    if (p->a.dtype == TE_F32) w->isa->dots_f32(&dots);
    else w->isa->dots_bf16(&dots);
    te_gemm_finish finish = {.c = t.c, .aux = t.aux, .bias = w->bias, .bias_by_row = p->bias_by_row,
                             .activation = p->activation, .alpha = p->alpha, .accumulate = p->accumulate};
    w->isa->f32.finish(&finish, sums, PITCH, 0, col, dots.rows, dots.cols);
}

static void run_pieces(void *context, int64_t first, int64_t end, int thread)
{
    const rows_work *w = context;
    (void)thread;
    for (int64_t i = first; i < end; i++) run_piece(w, i / w->pieces, i % w->pieces);
}

te_status te_gemm_rows_run(te_exec *exec, const te_gemm_problem *p)
{
    te_gemm_state *state = te_gemm_state_get(exec);
    if (!state) return TE_ERROR_MEMORY;
    _Alignas(64) char stack[STACK_BYTES];
    size_t bytes = te_gemm_bias_bytes(p, false);
    char  *room = bytes <= sizeof stack ? stack : exec->scratch(exec, bytes);
    if (!room) return TE_ERROR_MEMORY;
    rows_work work = {.p = p, .isa = state->isa, .bias = te_gemm_bias_array(p, false, room), .columns = COLUMNS};
    double  read = (double)p->n * (double)p->k * p->b.size * (double)p->batches, pay = 1 + read / THREAD_BYTES;
    int     threads = pay < exec->threads ? (int)pay : exec->threads;
    while (work.columns > FEW_COLUMNS && p->n * p->batches < threads * work.columns) work.columns /= 2;
    work.pieces = (p->n + work.columns - 1) / work.columns;
    int64_t pieces = work.pieces * p->batches;
    te_cpu_loop(exec, threads, pieces, te_cpu_even_grain(pieces, 4 * threads), run_pieces, &work);
    if (room != stack) exec->scratch_free(exec, room);
    return TE_OK;
}
