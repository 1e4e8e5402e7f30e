/* gemm_turned.c - products of some rows by a b whose columns are contiguous, as those of weights are: several texts
 * that are continued at once, or a short one.
 *
 * Rows of a become columns: a few panels, packed once for all threads, which stay in the second-level cache. Columns of
 * b are taken as they lie, mr lines at a time, and each of their numbers multiplies a row of a panel. So nothing of b
 * is packed, it is read once from its first byte to the last, and what comes next of it is asked for meanwhile, a cache
 * line every other step; where b comes from memory, that is as long as the multiplication takes. Tiles are those of
 * gemm_micro.c. Their sums are over all of k, in ascending order, and are turned back on their way to c.
 */
#include "gemm_plan.h"
#include "workers.h"

enum {
    LEAST_ROWS = 20,           /* a tile of one vector reads as many numbers of b as it multiplies vectors, … */
    LEAST_OF_PAIRS = 33,       /* … and pairs are multiplied twice as fast, … */
    LONG_ROWS = 4 << 10,       /* … which is of use as long as the first-level cache holds rows of a; … */
    LEAST_OF_NEAR = 48,        /* … a b that stays near is packed soon … */
    NEAR_BYTES = 1 << 20,
    FAR_BYTES = 4 << 20,       /* … and one that comes from memory leaves time to multiply */
    LEAST_COLS = 256,          /* by fewer columns packing a does not pay */
    LEAST_WORDS = 256,         /* of k, beside which turning sums back takes long */
    MOST_ROWS = 144,
    MOST_PANELS = 3,
    PANEL_BYTES = 1280 << 10,  /* that the second-level cache holds, more or less, beside lines of b */
    COLUMNS = 64,              /* of a piece of work: what `finish` takes at once, … */
    FEW_COLUMNS = 16,          /* … and least, where there would be fewer pieces than threads */
    PITCH = COLUMNS + 4        /* of sums */
};

/* Rows of a that are multiplied together, as the columns of one panel. */
typedef struct rows_panel {
    const char *data;
    int64_t     row;
    int         rows, vectors;
} rows_panel;

typedef struct turned_work {
    const te_gemm_problem *p;
    const te_gemm_kernel  *kernel;
    const void *bias;
    int64_t     words; /* of k */
    te_gemm_shares shares;
    int         panels;
    rows_panel  panel[MOST_PANELS];
} turned_work;

static const te_gemm_kernel *kernel_of(const te_gemm_state *state, te_dtype dtype)
{
    if (dtype == TE_F32) return &state->f32;
    return dtype == TE_BF16 && state->bf16_pairs && !state->matrix_unit ? &state->bf16 : NULL;
}

static int64_t panel_bytes(const te_gemm_kernel *kernel, int64_t k)
{
    return k / kernel->k_per_word * kernel->nr * kernel->word_bytes;
}

/* Whether there are enough rows, and these fill the vectors of panels well enough. All figures were measured. */
static bool rows_fit(const te_gemm_problem *p, int lanes)
{
    int64_t bytes = p->n * p->k * p->b.size, idle = divide_up(p->m, lanes) * lanes - p->m;
    bool    wide = p->a.dtype == TE_F32 || p->k * p->a.size >= LONG_ROWS;
    int64_t least = bytes < NEAR_BYTES ? LEAST_OF_NEAR : wide ? LEAST_ROWS : LEAST_OF_PAIRS;
    return p->m >= least && p->m <= MOST_ROWS && idle * (!wide ? 15 : bytes < FAR_BYTES ? 7 : 3) <= p->m;
}

const char *te_gemm_turned_decline(te_exec *exec, const te_gemm_problem *p)
{
    const te_gemm_state *state = te_gemm_state_get(exec);
    if (!state) return "no memory";
    const te_gemm_kernel *kernel = kernel_of(state, p->a.dtype);
    if (!kernel || kernel->rate < 2) return "no tiles that multiply two vectors in a cycle";
    if (p->a.dtype == TE_F32 && state->f32_in_unit && p->m >= TE_GEMM_UNIT_ROWS) return "rows enough for a matrix unit";
    if (!rows_fit(p, kernel->lanes)) return "few rows, or many, or a few more than whole vectors";
    if (p->b.rs != 1 || p->batches > 1) return "columns of b are not contiguous, or of several products";
    if (p->k % kernel->k_per_word != 0) return "an odd number of steps";
    if (p->n < LEAST_COLS || p->k / kernel->k_per_word < LEAST_WORDS) return "few columns, or short sums";
    return divide_up(p->m, kernel->nr) * panel_bytes(kernel, p->k) > PANEL_BYTES ? "rows of a are long" : NULL;
}

/* Divides the rows into panels as even as whole vectors allow, and packs them. */
static void make_panels(turned_work *w, const te_gemm_isa *isa, char *to)
{
    const te_gemm_problem *p = w->p;
    const te_gemm_kernel  *kernel = w->kernel;
    int64_t row = 0, vectors = divide_up(p->m, kernel->lanes);
    for (int i = 0; i < w->panels; i++, to += panel_bytes(kernel, p->k)) {
        int mine = (int)(vectors / w->panels + (i < vectors % w->panels)), most = mine * kernel->lanes;
        int rows = (int)at_most(p->m - row, most);
        te_gemm_pack pack = {.word = p->a.dtype == TE_F32 ? TE_GEMM_WORD_F32 : TE_GEMM_WORD_BF16PAIR,
                             .src = te_gemm_element(&p->a, row, 0), .line_stride = p->a.rs * p->a.size,
                             .k_stride = p->a.cs * p->a.size, .k = p->k, .extent = rows, .width = kernel->nr,
                             .filled = most};
        isa->pack(&pack, to);
        w->panel[i] = (rows_panel){to, row, rows, mine};
        row += rows;
    }
}

/* `lines` columns of b, from number `col` on, times all rows of a. */
static void run_lines(const turned_work *w, int64_t col, int lines, float *sums)
{
    enum { LANES = 16 };
    const te_gemm_problem *p = w->p;
    const te_gemm_kernel  *kernel = w->kernel;
    const char *b = te_gemm_element(&p->b, 0, col);
    int64_t line = p->b.cs * p->b.size;
    float   kept[TE_GEMM_MAX_ROWS * TE_GEMM_MAX_VECTORS * LANES];
    int64_t left = p->n - col - lines;
    te_gemm_ahead next = {b + lines * line, at_most(left, kernel->mr), line, p->k * p->b.size, 0};
    te_gemm_out   out = {.way = TE_GEMM_OUT_KEEP};
    if (left > 0) te_gemm_plan_asking(&out, &next, 1, w->words);
    for (const rows_panel *panel = w->panel; panel < w->panel + w->panels; panel++, out.asking = 0) {
        te_gemm_tile *tile = kernel->tile[lines - 1][panel->vectors - 1];
        tile(b, line, kernel->word_bytes, panel->data, w->words, kept, true, &out);
        float *to = sums + panel->row * PITCH;
        for (int i = 0; i < panel->rows; i++, to += PITCH)
            for (int j = 0; j < lines; j++) to[j] = kept[j * kernel->nr + i];
    }
}

static void run_piece(const turned_work *w, int64_t piece)
{
    const te_gemm_problem *p = w->p;
    int64_t col = piece * w->shares.columns;
    int     cols = (int)at_most(p->n - col, w->shares.columns), mr = w->kernel->mr;
    float   sums[MOST_ROWS * PITCH];
    for (int j = 0; j < cols; j += mr)
        run_lines(w, col + j, (int)at_most(cols - j, mr), sums + j);
    te_gemm_product t = te_gemm_product_of(p, 0);
    te_gemm_finish  finish = te_gemm_finish_of(p, &t, w->bias);
    w->kernel->finish(&finish, sums, PITCH, 0, col, (int)p->m, cols);
}

static void run_pieces(void *context, int64_t first, int64_t end, int thread)
{
    (void)thread;
    for (int64_t i = first; i < end; i++) run_piece(context, i);
}

te_status te_gemm_turned_run(te_exec *exec, const te_gemm_problem *p)
{
    te_gemm_state *state = te_gemm_state_get(exec);
    if (!state) return TE_ERROR_MEMORY;
    const te_gemm_kernel *kernel = kernel_of(state, p->a.dtype);
    int    panels = (int)divide_up(p->m, kernel->nr);
    size_t bias = te_gemm_bias_bytes(p, false);
    char  *room = exec->scratch(exec, bias + (size_t)(panels * panel_bytes(kernel, p->k)));
    if (!room) return TE_ERROR_MEMORY;
    turned_work work = {.p = p, .kernel = kernel, .bias = te_gemm_bias_array(p, false, room), .panels = panels,
                        .shares = te_gemm_shares_of(exec, p, COLUMNS, FEW_COLUMNS, 1),
                        .words = p->k / kernel->k_per_word};
    make_panels(&work, state->isa, room + bias);
    int64_t pieces = work.shares.pieces;
    te_cpu_loop(exec, work.shares.threads, pieces, te_cpu_even_grain(pieces, 4 * work.shares.threads), run_pieces,
                &work);
    exec->scratch_free(exec, room);
    return TE_OK;
}
