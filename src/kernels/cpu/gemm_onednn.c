/* gemm_onednn.c - the matrix product through oneDNN: which products, in which pieces.
 *
 * oneDNN lets threads share the sum over k of long products, from about eight threads on, so its bits would depend on
 * their number. Therefore it never sees more than one: c is cut into a grid of pieces that follows from the shape
 * alone, oneDNN computes a piece on one thread, and our threads take pieces as they become free.
 *
 *               n0      n1                    pieces of one grid have at most four shapes (the last row and
 *           +-------+-------+                 column may be smaller), hence at most four primitives
 *      m0   |       |       |
 *           +-------+-------+
 *      m1   |       |       |
 *           +-------+-------+
 *
 * oneDNN computes the bias and the accumulation on the way out.
 */
#ifdef TE_WITH_ONEDNN
#include "../dtype.h"
#include "gemm_cache.h"
#include "gemm_onednn.h"
#include "workers.h"

#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>

enum {
    PIECE_MACS = 64 << 20,  /* about 0.1 to 1 ms of one thread */
    FEW_MACS = 4 << 20,     /* what is shared at all, by few threads */
    PIECES = 16,
    PIECE_ROWS = 128,       /* oneDNN rearranges b for each piece: with fewer rows that becomes noticeable */
    PIECE_COLS = 512,
    PIECE_COLS_LEAST = 64,  /* where rows are few and do not halve evenly */
    LARGE_B = 8 << 20,      /* elements of b, with which it takes more rows … */
    LARGE_B_ROWS = 512,
    MATRIX_ROWS = 512,      /* the same with a matrix unit */
    MATRIX_COLS = 128,
    FINE_MACS = 3 << 20,    /* at least, of the pieces that many threads need … */
    FINE_PIECES = 64,
    FINE_B = 1 << 20,       /* elements of b of a piece that stay in a core's cache, about */
    SMALL_B = 1 << 17,
    FINE_ROWS = 64,
    FINE_TURNED_ROWS = 72,
    FINE_COLS = 384,
    PACK_ROWS = 128,        /* up to here b is worth a packed copy */
    BATCH_MACS = 1 << 20,
    SHAPES = 4
};

typedef struct grid {
    int64_t rows, cols;     /* of a piece */
    int64_t down, across;   /* pieces */
} grid;

static int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

static int64_t pieces_wanted(const te_gemm_problem *p)
{
    double macs = (double)p->m * (double)p->n * (double)p->k;
    if (macs >= PIECES * (double)PIECE_MACS) return PIECES;
    if (macs >= 4 * (double)PIECE_MACS) return (int64_t)(macs / PIECE_MACS);
    return macs >= 4 * (double)FEW_MACS ? 4 : macs >= FEW_MACS ? 2 : 1;
}

/* The rows that a piece keeps so that it costs one thread next to nothing to have more of them. Where columns of b lie
 * beside each other oneDNN hardly rearranges it; a large b is read again from memory, though. Rows of a that have to be
 * turned, as for a weight's gradient, take longer when they are few. */
static int64_t least_fine_rows(const te_gemm_problem *p, int64_t cols)
{
    if (p->b.cs != 1) return LARGE_B_ROWS;
    if (p->a.cs != 1) return p->k * cols > SMALL_B ? FINE_TURNED_ROWS : FINE_ROWS / 2;
    return p->k * cols > FINE_B ? 2 * PIECE_ROWS : FINE_ROWS;
}

/* More than PIECES are not worth it where a is turned and rows of b share few sets of the cache, so that oneDNN
 * rearranges b as well. */
static int64_t most_fine_pieces(const te_gemm_problem *p)
{
    bool moves_b = p->b.rs * p->b.size % 2048 == 0;
    return p->b.cs == 1 && p->a.cs != 1 && moves_b ? PIECES : FINE_PIECES;
}

/* Halves pieces on for many threads. */
static void refine(const te_gemm_problem *p, int64_t *rows, int64_t *cols, int64_t pieces)
{
    double  macs = (double)p->m * (double)p->n * (double)p->k;
    int64_t most = most_fine_pieces(p);
    for (; 2 * pieces <= most && macs >= 2 * (double)pieces * FINE_MACS; pieces *= 2) {
        bool across = p->b.cs == 1 && (p->a.cs == 1 || pieces < PIECES);
        if (*rows >= 2 * least_fine_rows(p, *cols)) *rows = (*rows + 1) / 2;
        else if (across && *cols >= 2 * FINE_COLS) *cols = (*cols + 1) / 2;
        else break;
    }
}

/* Halves whichever side is long enough, wide products across and others down, until there are enough pieces. A few
 * there shall be even where that costs a little. */
static void divide(const te_gemm_problem *p, int64_t *down, int64_t *across)
{
    int64_t rows = p->m, cols = p->n, pieces = 1, wanted = pieces_wanted(p);
    int64_t least_rows = p->k * p->n >= LARGE_B ? LARGE_B_ROWS : PIECE_ROWS;
    for (; 2 * pieces <= wanted; pieces *= 2) {
        if (cols >= 4 * rows && cols >= 4 * PIECE_COLS) cols = (cols + 1) / 2;
        else if (rows >= 2 * least_rows) rows = (rows + 1) / 2;
        else if (cols >= 2 * PIECE_COLS) cols = (cols + 1) / 2;
        else if (pieces < 4 && p->k * cols >= LARGE_B && cols >= PIECE_COLS) cols = (cols + 1) / 2;
        else if (pieces < 2 && rows < PIECE_ROWS && rows % 32 && cols >= 2 * PIECE_COLS_LEAST) cols = (cols + 1) / 2;
        else if (pieces < 4 && rows >= PIECE_ROWS / 2) rows = (rows + 1) / 2;
        else break;
    }
    refine(p, &rows, &cols, pieces);
    *down = rows, *across = cols;
}

/* A matrix unit multiplies a word of b with 16 rows in the time of one, so rearranging b weighs 16 times as much:
 * pieces share no columns as long as these can be divided, or serve many rows. */
static void divide_for_matrix_unit(const te_gemm_problem *p, int64_t *down, int64_t *across)
{
    int64_t rows = p->m, cols = p->n, wanted = pieces_wanted(p);
    for (int64_t pieces = 1; 2 * pieces <= wanted; pieces *= 2) {
        if (rows >= 2 * MATRIX_ROWS && rows >= cols) rows = (rows + 1) / 2;
        else if (cols >= 2 * MATRIX_COLS) cols = (cols + 1) / 2;
        else if (rows >= 2 * MATRIX_ROWS || (pieces < 4 && rows >= PIECE_ROWS / 2)) rows = (rows + 1) / 2;
        else break;
    }
    *down = rows, *across = cols;
}

static grid grid_make(te_exec *exec, const te_gemm_problem *p)
{
    const te_gemm_state *state = te_gemm_state_get(exec);
    int64_t rows, cols;
    if (p->a.dtype == TE_BF16 && state && state->matrix_unit) divide_for_matrix_unit(p, &rows, &cols);
    else divide(p, &rows, &cols);
    grid g = {.rows = round_up(rows, rows < PIECE_ROWS ? 8 : 16), .cols = round_up(cols, 64)};
    if (rows == p->m) g.rows = rows;
    if (cols == p->n) g.cols = cols;
    g.down = (p->m + g.rows - 1) / g.rows;
    g.across = (p->n + g.cols - 1) / g.cols;
    return g;
}

typedef struct piece {
    int64_t row, col, rows, cols;
    int     shape; /* bit 0: of the last row, bit 1: of the last column */
} piece;

static piece piece_at(const te_gemm_problem *p, const grid *g, int64_t index)
{
    int64_t i = index / g->across, j = index % g->across;
    piece x = {.row = i * g->rows, .col = j * g->cols, .rows = g->rows, .cols = g->cols};
    if (i == g->down - 1) x.rows = p->m - x.row;
    if (j == g->across - 1) x.cols = p->n - x.col;
    x.shape = (i == g->down - 1) + 2 * (j == g->across - 1);
    return x;
}

/* --- what is accepted
 * -------------------------------------------------------------------------------------------------- */

/* Gives an extent of one the stride that makes the matrix regular; false when it is not contiguous along either side.
 */
static bool regular(int64_t rows, int64_t cols, int64_t *rs, int64_t *cs)
{
    if (cols == 1) *cs = *rs == 1 ? rows : 1;
    if (rows == 1) *rs = *cs == 1 ? cols : 1;
    return (*cs == 1 && *rs >= cols) || (*rs == 1 && *cs >= rows);
}

/* The strides as oneDNN is told them. */
static bool spec_make(const te_gemm_problem *p, te_dnnl_spec *s)
{
    memset(s, 0, sizeof *s);
    s->k = p->k;
    s->a_rs = p->a.rs, s->a_cs = p->a.cs, s->b_rs = p->b.rs, s->b_cs = p->b.cs, s->c_rs = p->c.rs;
    s->in = p->a.dtype, s->out = p->c.dtype;
    s->bias = te_view_present(&p->bias) ? p->bias.dtype : TE_DTYPE_COUNT;
    s->accumulate = p->accumulate;
    int64_t c_cs = p->c.cs;
    return regular(p->m, p->k, &s->a_rs, &s->a_cs) && regular(p->k, p->n, &s->b_rs, &s->b_cs) &&
           regular(p->m, p->n, &s->c_rs, &c_cs) && c_cs == 1;
}

/* A primitive for each shape of piece. */
static const char *find_primitives(te_exec *exec, te_gemm_onednn *lib, const te_gemm_problem *p, const grid *g,
                                   te_dnnl_spec *s, const te_dnnl_matmul *found[SHAPES])
{
    memset(found, 0, SHAPES * sizeof *found);
    for (int64_t i = 0; i < g->down * g->across; i++) {
        piece x = piece_at(p, g, i);
        if (found[x.shape]) continue;
        if (x.rows < TE_DNNL_LEAST_LINES || x.cols < TE_DNNL_LEAST_LINES) return "oneDNN errs for a single line";
        s->m = x.rows, s->n = x.cols;
        found[x.shape] = te_gemm_onednn_primitive(exec, lib, s);
        if (!found[x.shape]) return "oneDNN does not have it for these types on this machine";
    }
    return NULL;
}

static te_gemm_onednn *library_of(te_exec *exec)
{
    te_gemm_state *state = te_gemm_state_get(exec);
    if (!state) return NULL;
    if (!state->onednn) state->onednn = te_gemm_onednn_open(exec);
    return state->onednn;
}

const char *te_gemm_onednn_decline(te_exec *exec, const te_gemm_problem *p)
{
    const te_dnnl_matmul *found[SHAPES];
    te_dnnl_spec spec;
    if (te_cpu(exec)->isa == TE_CPU_PORTABLE) return "the portable instruction set is asked for";
    if (p->a.dtype == TE_F64) return "float64";
    if (p->k == 0) return "k is 0";
    if (p->a.dtype == TE_BF16 && p->k % 2) return "oneDNN makes NaN of an infinity that is half a pair";
    if (p->alpha != 1) return "alpha is not 1";
    if (te_view_present(&p->bias) && p->bias_by_row) return "the bias runs along the rows";
    if (te_view_present(&p->bias) && p->bias.stride[0] != 1 && p->n > 1) return "the bias is strided";
    if (p->batches > 1 && (double)p->m * (double)p->n * (double)p->k < BATCH_MACS) return "a batch of small products";
    grid g = grid_make(exec, p);
    if (!spec_make(p, &spec)) return "a matrix is contiguous along neither side";
    te_gemm_onednn *lib = library_of(exec);
    if (!lib) return "the library does not start";
    return find_primitives(exec, lib, p, &g, &spec, found);
}

/* --- running
 * ----------------------------------------------------------------------------------------------------------- */

typedef struct gemm_job {
    const te_gemm_problem *p;
    const te_gemm_onednn  *lib;
    grid                   grid;
    const te_dnnl_matmul  *matmul[SHAPES];
    const char            *packed; /* b, one part per column of the grid; or NULL */
    size_t                 part_bytes, scratch_bytes;
    char                  *scratch; /* one part per thread */
    te_exec               *exec;
    atomic_int             failed;
} gemm_job;

/* Some of oneDNN's kernels of float32 point the stack pointer into memory of their own, below which a signal would
 * put its frame: over whatever lies there. So signals wait on the caller's thread, as they always do on workers'. */
static bool run_undisturbed(const te_dnnl_matmul *matmul, const te_dnnl_args *args, int thread)
{
    sigset_t every, before;
    if (thread > 0) return te_dnnl_matmul_run(matmul, args);
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    bool good = te_dnnl_matmul_run(matmul, args);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return good;
}

/* Piece `x` of the product whose operands are a, b, c. */
static bool run_piece(const gemm_job *job, const te_gemm_product *t, piece x, int thread)
{
    const te_gemm_problem *p = job->p;
    te_dnnl_args args = te_gemm_onednn_args(job->lib, thread);
    args.a = te_gemm_element(&t->a, x.row, 0);
    args.b =
        job->packed ? (char *)job->packed + x.col / job->grid.cols * job->part_bytes : te_gemm_element(&t->b, 0, x.col);
    args.c = te_gemm_element(&t->c, x.row, x.col);
    if (te_view_present(&p->bias)) args.bias = (char *)p->bias.data + x.col * (int64_t)te_dtype_size(p->bias.dtype);
    args.scratchpad = job->scratch + thread * job->scratch_bytes;
    return run_undisturbed(job->matmul[x.shape], &args, thread);
}

static void run_pieces(void *context, int64_t first, int64_t end, int thread)
{
    gemm_job *job = context;
    int64_t per_product = job->grid.down * job->grid.across;
    if (thread > 0) omp_set_num_threads(1); /* for the caller it is done already */
    for (int64_t i = first; i < end && !te_cpu_stopping(job->exec); i++) {
        te_gemm_product t = te_gemm_product_of(job->p, i / per_product);
        if (!run_piece(job, &t, piece_at(job->p, &job->grid, i % per_product), thread)) atomic_store(&job->failed, 1);
    }
}

/* Fills room with b packed for the pieces of each column of the grid. */
static bool pack_b(const gemm_job *job, char *room)
{
    bool good = true;
    for (int64_t j = 0; j < job->grid.across && good; j++) {
        te_dnnl_args args = te_gemm_onednn_args(job->lib, 0);
        piece x = piece_at(job->p, &job->grid, j);
        args.b = te_gemm_element(&job->p->b, 0, x.col);
        good = te_dnnl_pack_b(job->matmul[x.shape], &args, room + j * job->part_bytes);
    }
    return good;
}

_Static_assert(sizeof(te_dnnl_spec) <= 12 * sizeof(int64_t), "the form of a packed copy holds a spec");

/* Whether a packed b gives the bits of a plain one: oneDNN's kernels for float32 differ by the layout of b, and those
 * for lines that lie apart. */
static bool packs_alike(const te_gemm_problem *p)
{
    return p->a.dtype != TE_F32 && (p->b.cs == 1 ? p->b.rs == p->n : p->b.cs == p->k);
}

/* Where b comes again under its key and has few rows to serve: switches to a packed copy, when there is one or it may
 * be made. */
static bool use_packed_b(te_exec *exec, te_gemm_state *state, gemm_job *job, te_dnnl_spec spec)
{
    const te_gemm_problem *p = job->p;
    const te_dnnl_matmul *found[SHAPES];
    if (!p->b_key || !packs_alike(p) || p->m > PACK_ROWS || job->grid.down > 1 || p->batches > 1) return true;
    spec.packed_b = 1;
    if (find_primitives(exec, state->onednn, p, &job->grid, &spec, found)) return true;
    if (!state->packed) state->packed = te_gemm_cache_new(exec->mem);
    if (!state->packed) return true;

    size_t part = 0;
    for (int i = 0; i < SHAPES; i++)
        if (found[i] && found[i]->packed_bytes > part) part = (found[i]->packed_bytes + 63) & ~(size_t)63;
    te_gemm_packed_id id = {.key = p->b_key, .form = {(int64_t)(intptr_t)p->b.data, p->n, job->grid.cols}};
    spec.n = job->grid.cols;
    memcpy(id.form + 3, &spec, sizeof spec);
    void *room;
    const void *packed = te_gemm_cache_find(state->packed, &id, part * job->grid.across, &room);
    if (!packed && !room) return true;
    memcpy(job->matmul, found, sizeof found);
    job->part_bytes = part;
    job->packed = packed ? packed : room;
    if (packed || pack_b(job, room)) return true;
    te_gemm_cache_forget(state->packed, &id);
    return false;
}

static te_status run_job(te_exec *exec, gemm_job *job)
{
    double macs = (double)job->p->m * (double)job->p->n * (double)job->p->k * (double)job->p->batches;
    int64_t pieces = job->grid.down * job->grid.across * job->p->batches;
    int threads = exec->threads < pieces ? exec->threads : (int)pieces;
    if (threads < 1 || macs < FEW_MACS) threads = 1;
    for (int i = 0; i < SHAPES; i++)
        if (job->matmul[i] && job->matmul[i]->scratchpad_bytes > job->scratch_bytes)
            job->scratch_bytes = round_up(job->matmul[i]->scratchpad_bytes, 4096);
    if (job->scratch_bytes && !(job->scratch = exec->scratch(exec, threads * job->scratch_bytes)))
        return TE_ERROR_MEMORY;
    te_cpu_loop(exec, threads, pieces, 1, run_pieces, job);
    if (job->scratch) exec->scratch_free(exec, job->scratch);
    if (!atomic_load(&job->failed)) return TE_OK;
    return te_exec_fail(exec, TE_ERROR_DEVICE, "matrix product: oneDNN failed on %lld x %lld x %lld of %s",
                        (long long)job->p->m, (long long)job->p->n, (long long)job->p->k,
                        te_dtype_name(job->p->a.dtype));
}

te_status te_gemm_onednn_run(te_exec *exec, const te_gemm_problem *p)
{
    te_gemm_state *state = te_gemm_state_get(exec);
    te_dnnl_spec spec;
    gemm_job job = {.exec = exec, .p = p, .lib = state->onednn, .grid = grid_make(exec, p)};
    if (!spec_make(p, &spec) || find_primitives(exec, state->onednn, p, &job.grid, &spec, job.matmul))
        return te_exec_fail(exec, TE_ERROR_INTERNAL, "matrix product: oneDNN was handed a product that it declines");
    if (!te_gemm_onednn_streams(exec, state->onednn, exec->threads > 1 ? exec->threads : 1))
        return te_exec_fail(exec, TE_ERROR_MEMORY, "matrix product: oneDNN has no stream for %d threads",
                            exec->threads);
    int threads = omp_get_max_threads();
    omp_set_num_threads(1); /* oneDNN stays on the thread that calls it; of this thread only, and restored */
    te_status status = TE_OK;
    if (!use_packed_b(exec, state, &job, spec))
        status = te_exec_fail(exec, TE_ERROR_DEVICE, "matrix product: oneDNN failed to pack an operand");
    if (status == TE_OK) status = run_job(exec, &job);
    omp_set_num_threads(threads);
    return status;
}

#else
typedef int te_gemm_onednn_is_empty; /* a translation unit declares something */
#endif
