/* gemm_sweep.c - products of few rows with contiguous rows: a vector times a matrix.
 *
 * As in gemm_rows.c b is read once and packing it would be most of the time; here it is its rows that are contiguous,
 * so a thread takes a range of columns and goes down through all rows (isa/gemm_sweep.c).
 */
#include "gemm.h"
#include "workers.h"

enum {
    COLUMNS = 512,            /* of a piece of work at most: sums of all rows stay in the first-level cache, … */
    FEW_COLUMNS = 64,         /* … and least: some cache lines of each row */
    SMALL_BYTES = 128 << 10,  /* of b */
    MEDIUM_BYTES = 4 << 20,
    LARGE_BYTES = 16 << 20,
    FINISH = 64,              /* columns that `finish` takes at once */
    STACK_BYTES = 16 << 10
};

typedef struct sweep_work {
    const te_gemm_problem *p;
    const te_gemm_isa *isa;
    const void *bias;
    te_gemm_shares shares;
} sweep_work;

/* Up to how many rows this is the faster way: tiles use what they loaded more often, and multiply two bfloat16 at a
 * time. A b that comes from memory is different: only for one row of float32 oneDNN reads it faster. */
static int most_rows(const te_gemm_problem *p, double bytes)
{
    te_dtype dtype = p->a.dtype;
    if (p->c.cs != 1) return TE_GEMM_SWEEP_ROWS; /* few columns that became rows: the others are slow with them */
    if (dtype == TE_F16 || bytes > LARGE_BYTES) return TE_GEMM_SWEEP_ROWS;
    if (bytes < SMALL_BYTES) return dtype == TE_F32 ? TE_GEMM_SWEEP_ROWS : 2;
    if (bytes < MEDIUM_BYTES) return 4;
    return dtype == TE_F32 ? 1 : 2;
}

const char *te_gemm_sweep_decline(te_exec *exec, const te_gemm_problem *p)
{
    (void)exec;
    double bytes = (double)p->n * (double)p->k * p->b.size;
    if (p->a.dtype == TE_F64) return "float64";
    if (p->b.cs != 1) return "rows of b are not contiguous";
    if (p->n < TE_GEMM_SWEEP_COLS) return "few columns";
    if (p->m > most_rows(p, bytes)) return "many rows";
    if (p->m == 1 && bytes > LARGE_BYTES && p->a.dtype == TE_F32) return "b comes from memory";
    return NULL;
}

static void run_piece(const sweep_work *w, int64_t batch, int64_t piece)
{
    const te_gemm_problem *p = w->p;
    te_gemm_product t = te_gemm_product_of(p, batch);
    int64_t columns = w->shares.columns, col = piece * columns, left = p->n - col;
    _Alignas(64) float sums[TE_GEMM_SWEEP_ROWS * COLUMNS];
    te_gemm_sweep sweep = {.dtype = p->a.dtype, .a = t.a.data, .b = te_gemm_element(&t.b, 0, col), .k = p->k,
                           .a_row = t.a.rs * t.a.size, .a_step = t.a.cs * t.a.size, .b_line = t.b.rs * t.b.size,
                           .rows = (int)p->m, .cols = (int)(left < columns ? left : columns), .sums = sums};
    sweep.pitch = (sweep.cols + TE_GEMM_SWEEP_COLS - 1) / TE_GEMM_SWEEP_COLS * TE_GEMM_SWEEP_COLS;
    w->isa->sweep(&sweep);
    te_gemm_finish finish = te_gemm_finish_of(p, &t, w->bias);
    for (int j = 0; j < sweep.cols; j += FINISH) {
        int cols = sweep.cols - j < FINISH ? sweep.cols - j : FINISH;
        w->isa->f32.finish(&finish, sums + j, (int)sweep.pitch, 0, col + j, sweep.rows, cols);
    }
}

static void run_pieces(void *context, int64_t first, int64_t end, int thread)
{
    const sweep_work *w = context;
    (void)thread;
    for (int64_t i = first; i < end; i++) run_piece(w, i / w->shares.pieces, i % w->shares.pieces);
}

te_status te_gemm_sweep_run(te_exec *exec, const te_gemm_problem *p)
{
    te_gemm_state *state = te_gemm_state_get(exec);
    if (!state) return TE_ERROR_MEMORY;
    _Alignas(64) char stack[STACK_BYTES];
    size_t bytes = te_gemm_bias_bytes(p, false);
    char  *room = bytes <= sizeof stack ? stack : exec->scratch(exec, bytes);
    if (!room) return TE_ERROR_MEMORY;
    sweep_work work = {.p = p, .isa = state->isa, .bias = te_gemm_bias_array(p, false, room),
                       .shares = te_gemm_shares_of(exec, p, COLUMNS, FEW_COLUMNS, 2)};
    int64_t pieces = work.shares.pieces * p->batches;
    te_cpu_loop(exec, work.shares.threads, pieces, te_cpu_even_grain(pieces, 4 * work.shares.threads), run_pieces,
                &work);
    if (room != stack) exec->scratch_free(exec, room);
    return TE_OK;
}
