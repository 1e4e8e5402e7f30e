/* gemm_blocked.c - our own matrix product: which panels are packed when, and which thread computes which tile.
 *
 *      for each chunk of columns                       a chunk of packed b lies in the last-level cache
 *        for each pass over k                          one, unless k is very long
 *          all threads pack the chunk of b | barrier
 *          a thread takes a unit: a block of rows x a share of the chunk's panels
 *            packs the block of a                      stays in the thread's second-level cache
 *            for each panel of b, slice of k           a slice of a panel stays in the first-level cache
 *              for each panel of a: a tile of sums; after the last slice of the last pass it is finished into c
 *
 * Slices, passes and tiles depend on the shape alone, and a tile's sums are kept in full precision between slices; so
 * the result does not depend on which thread takes which unit. Batches are spread over the threads when there are
 * enough of them; otherwise they follow one another.
 */
#include "../dtype.h"
#include "gemm.h"

#include <omp.h>
#include <string.h>

enum {
    SLICE_WORDS = 128,       /* of 48 floats: 24 KiB, and a panel of a passes by */
    PASS_WORDS = 2048,       /* a block of a of some rows must fit in A_BYTES */
    A_BYTES = 256 << 10,
    A_ROWS = 128,
    CHUNK_BYTES = 4 << 20,
    THREAD_MACS = 512 << 10, /* work that pays for waking a thread */
    STACK_BYTES = 24 << 10
};

/* Byte strides of a matrix. */
typedef struct gemm_source {
    const char *data;
    int64_t     row, col;
} gemm_source;

typedef struct gemm_plan {
    const te_gemm_problem *p;
    const te_gemm_isa     *isa;
    const te_gemm_kernel  *kernel;
    te_gemm_word           word;
    int64_t words, pass_words, passes;
    int64_t panels, chunk_panels; /* of b */
    int64_t block_rows, blocks;   /* of a */
    int64_t splits;               /* shares of a chunk */
    int     threads;              /* that share one product */
    bool    spread;               /* each thread takes whole products of the batch */
    bool    direct_a; /* rows of a serve as they are */
    size_t  b_bytes, a_bytes, sums_bytes, bias_bytes; /* workspace: sums per thread, or of a chunk when passes > 1 */
} gemm_plan;

/* One product of the batch, as the threads that share it see it. */
typedef struct gemm_product {
    const gemm_plan *plan;
    gemm_source    a, b;
    te_gemm_finish finish;
    char          *b_panels, *sums; /* shared */
    int64_t        next;            /* next unit of the chunk */
} gemm_product;

static int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }
static int64_t at_most(int64_t x, int64_t limit) { return x < limit ? x : limit; }
static int64_t at_least(int64_t x, int64_t limit) { return x > limit ? x : limit; }
static size_t align_up(size_t bytes) { return (bytes + 127) & ~(size_t)127; }

/* --- planning ----------------------------------------------------------------------------------------------------- */

static void plan_arithmetic(gemm_plan *plan, const te_gemm_state *state)
{
    const te_gemm_isa *isa = plan->isa = state->isa;
    plan->kernel = &isa->f32;
    switch (plan->p->a.dtype) {
    case TE_F64:
        plan->kernel = &isa->f64;
        plan->word = TE_GEMM_WORD_F64;
        break;
    case TE_BF16:
        plan->word = state->bf16_pairs ? TE_GEMM_WORD_BF16PAIR : TE_GEMM_WORD_BF16;
        if (state->bf16_pairs) plan->kernel = &isa->bf16;
        break;
    case TE_F16: plan->word = TE_GEMM_WORD_F16; break;
    default: plan->word = TE_GEMM_WORD_F32;
    }
}

static void plan_blocks(gemm_plan *plan)
{
    const te_gemm_problem *p = plan->p;
    const te_gemm_kernel *kernel = plan->kernel;
    plan->words = divide_up(p->k, kernel->k_per_word);
    plan->passes = at_least(divide_up(plan->words, PASS_WORDS), 1);
    plan->pass_words = divide_up(divide_up(plan->words, plan->passes), SLICE_WORDS) * SLICE_WORDS;
    if (plan->passes == 1) plan->pass_words = plan->words;
    else plan->passes = divide_up(plan->words, plan->pass_words);

    int64_t line = at_least(plan->pass_words * kernel->word_bytes, 1);
    plan->panels = divide_up(p->n, kernel->nr);
    int64_t chunks = divide_up(plan->panels, at_least(CHUNK_BYTES / (line * kernel->nr), 1));
    plan->chunk_panels = divide_up(plan->panels, chunks);

    int64_t rows = at_most(A_BYTES / line, A_ROWS);
    rows = at_most(rows, divide_up(p->m, 2 * plan->threads));
    plan->block_rows = at_least(divide_up(rows, kernel->mr), 1) * kernel->mr;
    plan->blocks = divide_up(p->m, plan->block_rows);
    plan->splits = plan->threads == 1 ? 1 : at_most(divide_up(2 * plan->threads, plan->blocks), plan->chunk_panels);
}

/* Whether words of a lie one after the other in memory. Rows a multiple of a page apart are packed all the same: they
 * would share the few cache lines of one set. */
static bool is_direct(const gemm_plan *plan)
{
    const te_gemm_matrix *a = &plan->p->a;
    bool whole_words = plan->word == TE_GEMM_WORD_F32 || plan->word == TE_GEMM_WORD_F64 ||
                       (plan->word == TE_GEMM_WORD_BF16PAIR && plan->p->k % 2 == 0);
    return whole_words && a->cs == 1 && a->rs * a->size % 4096 != 0;
}

static void plan_workspace(gemm_plan *plan)
{
    const te_gemm_problem *p = plan->p;
    const te_gemm_kernel *kernel = plan->kernel;
    size_t line = plan->pass_words * kernel->word_bytes, tile = (size_t)kernel->mr * kernel->nr * kernel->sum_bytes;
    int64_t row_panels = plan->block_rows / kernel->mr;
    plan->b_bytes = align_up(plan->chunk_panels * kernel->nr * line);
    plan->direct_a = is_direct(plan);
    plan->a_bytes = plan->direct_a ? 0 : align_up(plan->block_rows * line);
    if (plan->passes > 1) plan->sums_bytes = align_up(plan->blocks * row_panels * plan->chunk_panels * tile);
    else plan->sums_bytes = align_up(row_panels * tile);
    if (te_view_present(&p->bias)) plan->bias_bytes = align_up((p->bias_by_row ? p->m : p->n) * kernel->sum_bytes);
}

static void plan_make(te_exec *exec, const te_gemm_state *state, const te_gemm_problem *p, gemm_plan *plan)
{
    *plan = (gemm_plan){.p = p};
    double macs = (double)p->m * p->n * at_least(p->k, 1);
    int64_t threads = at_least(exec->threads, 1), wanted = 1 + (int64_t)(macs * p->batches / THREAD_MACS);
    plan->threads = (int)at_most(threads, wanted);
    plan->spread = p->batches >= plan->threads && plan->threads > 1;
    int shared_by = plan->threads;
    if (plan->spread) plan->threads = 1;
    plan_arithmetic(plan, state);
    plan_blocks(plan);
    plan_workspace(plan);
    plan->threads = shared_by;
}

/* Shared by all threads of a product: the chunk of b and, with several passes, the sums. Then what each thread has. */
static size_t shared_bytes(const gemm_plan *plan) { return plan->b_bytes + (plan->passes > 1 ? plan->sums_bytes : 0); }
static size_t thread_bytes(const gemm_plan *plan) { return plan->a_bytes + (plan->passes > 1 ? 0 : plan->sums_bytes); }

/* --- computing ---------------------------------------------------------------------------------------------------- */

static void pack_lines(const gemm_plan *plan, const gemm_source *src, bool rows, int64_t line, int extent, int width,
                       int64_t pass, void *panel)
{
    int64_t k0 = pass * plan->pass_words * plan->kernel->k_per_word;
    int64_t line_stride = rows ? src->row : src->col, k_stride = rows ? src->col : src->row;
    te_gemm_pack pack = {.word = plan->word,
                         .line_stride = line_stride,
                         .k_stride = k_stride,
                         .extent = extent,
                         .width = width,
                         .k = at_most(plan->p->k - k0, plan->pass_words * plan->kernel->k_per_word),
                         .src = src->data + line * line_stride + k0 * k_stride};
    plan->isa->pack(&pack, panel);
}

static int64_t words_of_pass(const gemm_plan *plan, int64_t pass)
{
    return at_most(plan->words - pass * plan->pass_words, plan->pass_words);
}

/* This thread's share of packing panels [first, last) of b. */
static void pack_b(gemm_product *t, int64_t first, int64_t last, int64_t pass, int thread, int team)
{
    const gemm_plan *plan = t->plan;
    int nr = plan->kernel->nr;
    int64_t bytes = words_of_pass(plan, pass) * nr * plan->kernel->word_bytes;
    for (int64_t panel = first + thread; panel < last; panel += team) {
        int extent = (int)at_most(plan->p->n - panel * nr, nr);
        pack_lines(plan, &t->b, false, panel * nr, extent, nr, pass, t->b_panels + (panel - first) * bytes);
    }
}

/* A block of rows of a: packed, or in place. Strides in bytes. */
typedef struct gemm_block {
    const char *data;
    int64_t     row, rows;
    int64_t     row_stride, step, panel_stride; /* within a panel and from panel to panel */
} gemm_block;

static gemm_block block_of_a(const gemm_product *t, int64_t row, int64_t rows, int64_t pass, char *packed)
{
    const gemm_plan *plan = t->plan;
    int64_t mr = plan->kernel->mr, word = plan->kernel->word_bytes, line = words_of_pass(plan, pass) * word;
    if (plan->direct_a)
        return (gemm_block){.data = t->a.data + row * t->a.row + pass * plan->pass_words * word,
                            .row = row,
                            .rows = rows,
                            .row_stride = t->a.row,
                            .step = word,
                            .panel_stride = mr * t->a.row};
    for (int64_t i = 0; i < rows; i += mr)
        pack_lines(plan, &t->a, true, row + i, (int)at_most(rows - i, mr), (int)mr, pass, packed + i * line);
    return (gemm_block){.data = packed, .row = row, .rows = rows, .row_stride = word, .step = mr * word,
                        .panel_stride = mr * line};
}

/* The lines of c that a tile is about to reach, which are a few from each of some rows: no pattern that hardware
 * foresees. */
static void prefetch_tile(const te_gemm_matrix *c, int64_t row, int64_t col, int rows, int cols)
{
    for (int i = 0; i < rows; i++) {
        const char *line = te_gemm_element(c, row + i, col), *end = te_gemm_element(c, row + i, col + cols - 1);
        for (; c->cs == 1 && line <= end; line += 64) __builtin_prefetch(line, 1);
    }
}

/* The tiles of a block with panel `panel` of b, at b; sums: tiles `sums_step` bytes apart. */
static void run_tiles(const gemm_product *t, const gemm_block *block, const char *b, int64_t panel, int64_t pass,
                      char *sums, int64_t sums_step)
{
    const gemm_plan *plan = t->plan;
    const te_gemm_kernel *kernel = plan->kernel;
    int64_t words = words_of_pass(plan, pass), b_step = kernel->nr * kernel->word_bytes, col = panel * kernel->nr;
    int cols = (int)at_most(plan->p->n - col, kernel->nr), vectors = (cols + kernel->lanes - 1) / kernel->lanes;
    for (int64_t w = 0; w == 0 || w < words; w += SLICE_WORDS) {
        int64_t slice = at_most(words - w, SLICE_WORDS);
        bool done = w + slice == words && pass == plan->passes - 1;
        const char *a = block->data + w * block->step;
        char *tile = sums;
        for (int64_t i = 0; i < block->rows; i += kernel->mr, a += block->panel_stride, tile += sums_step) {
            int rows = (int)at_most(block->rows - i, kernel->mr);
            if (done) prefetch_tile(&t->finish.c, block->row + i, col, rows, cols);
            kernel->tile[rows - 1][vectors - 1](a, block->row_stride, block->step, b + w * b_step, slice, tile,
                                                w == 0 && pass == 0);
            if (done) kernel->finish(&t->finish, tile, kernel->nr, block->row + i, col, rows, cols);
        }
    }
}

/* One block of rows with one share of the chunk's panels. `own`: this thread's workspace. */
static void run_unit(const gemm_product *t, int64_t unit, int64_t first, int64_t last, int64_t pass, char *own)
{
    const gemm_plan *plan = t->plan;
    const te_gemm_kernel *kernel = plan->kernel;
    int64_t share = unit % plan->splits, row = unit / plan->splits * plan->block_rows, panels = last - first;
    int64_t begin = first + panels * share / plan->splits, end = first + panels * (share + 1) / plan->splits;
    int64_t tile = kernel->mr * kernel->nr * kernel->sum_bytes,
            b_bytes = words_of_pass(plan, pass) * kernel->nr * kernel->word_bytes;
    gemm_block block = block_of_a(t, row, at_most(plan->p->m - row, plan->block_rows), pass, own);
    for (int64_t panel = begin; panel < end; panel++) {
        char *sums = own + plan->a_bytes;
        int64_t step = tile;
        if (plan->passes > 1) {
            step = tile * plan->chunk_panels;
            sums = t->sums + row / kernel->mr * step + (panel - first) * tile;
        }
        run_tiles(t, &block, t->b_panels + (panel - first) * b_bytes, panel, pass, sums, step);
    }
}

static int64_t take_unit(int64_t *next, int team)
{
    int64_t unit;
    if (team == 1) return (*next)++;
#pragma omp atomic capture
    unit = (*next)++;
    return unit;
}

static void wait_for(int team)
{
    if (team > 1) {
#pragma omp barrier
    }
}

/* What each thread of a team does for a product. */
static void run_product(gemm_product *t, int thread, int team, char *own)
{
    const gemm_plan *plan = t->plan;
    int64_t units = plan->blocks * plan->splits, unit;
    for (int64_t first = 0; first < plan->panels; first += plan->chunk_panels) {
        int64_t last = at_most(first + plan->chunk_panels, plan->panels);
        for (int64_t pass = 0; pass < plan->passes; pass++) {
            pack_b(t, first, last, pass, thread, team);
            if (thread == 0) t->next = 0;
            wait_for(team);
            while ((unit = take_unit(&t->next, team)) < units) run_unit(t, unit, first, last, pass, own);
            wait_for(team);
        }
    }
}

/* --- the batch ---------------------------------------------------------------------------------------------------- */

static gemm_source source_of(const te_gemm_matrix *m)
{
    return (gemm_source){m->data, m->rs * m->size, m->cs * m->size};
}

static gemm_product product_make(const gemm_plan *plan, const void *bias, int64_t batch, char *shared)
{
    const te_gemm_problem *p = plan->p;
    te_gemm_product operands = te_gemm_product_of(p, batch);
    return (gemm_product){.plan = plan, .a = source_of(&operands.a), .b = source_of(&operands.b), .b_panels = shared,
                          .sums = shared + plan->b_bytes,
                          .finish = {.c = operands.c, .aux = operands.aux, .bias = bias, .bias_by_row = p->bias_by_row,
                                     .activation = p->activation, .alpha = p->alpha, .accumulate = p->accumulate}};
}

static void run_batch(const gemm_plan *plan, const void *bias, char *work)
{
    const te_gemm_problem *p = plan->p;
    char *shared = work, *own = work + shared_bytes(plan);
    size_t each = thread_bytes(plan);
    if (plan->threads == 1) {
        for (int64_t i = 0; i < p->batches; i++) {
            gemm_product t = product_make(plan, bias, i, shared);
            run_product(&t, 0, 1, own);
        }
    } else if (plan->spread) {
        each += shared_bytes(plan);
#pragma omp parallel for num_threads(plan->threads) schedule(dynamic)
        for (int64_t i = 0; i < p->batches; i++) {
            char *mine = work + omp_get_thread_num() * each;
            gemm_product t = product_make(plan, bias, i, mine);
            run_product(&t, 0, 1, mine + shared_bytes(plan));
        }
    } else
        for (int64_t i = 0; i < p->batches; i++) {
            gemm_product t = product_make(plan, bias, i, shared);
#pragma omp parallel num_threads(plan->threads)
            run_product(&t, omp_get_thread_num(), omp_get_num_threads(), own + omp_get_thread_num() * each);
        }
}

/* The bias as an array of the type of the sums. */
static const void *bias_array(const gemm_plan *plan, void *buffer)
{
    const te_view *bias = &plan->p->bias;
    bool wide = plan->kernel->sum_bytes == sizeof(double);
    if (!te_view_present(bias)) return NULL;
    if (bias->dtype == (wide ? TE_F64 : TE_F32) && bias->stride[0] == 1) return bias->data;
    for (int64_t i = 0; i < bias->shape[0]; i++) {
        double x = te_load_f64(bias->data, bias->dtype, i * bias->stride[0]);
        if (wide) ((double *)buffer)[i] = x;
        else ((float *)buffer)[i] = (float)x;
    }
    return buffer;
}

te_status te_gemm_blocked_run(te_exec *exec, const te_gemm_problem *problem)
{
    const te_gemm_state *state = te_gemm_state_get(exec);
    if (!state) return TE_ERROR_MEMORY;
    gemm_plan plan;
    plan_make(exec, state, problem, &plan);
    size_t teams = plan.spread ? plan.threads : 1;
    size_t bytes = plan.bias_bytes + teams * shared_bytes(&plan) + plan.threads * thread_bytes(&plan);
    _Alignas(64) char stack[STACK_BYTES];
    char *work = bytes <= sizeof stack ? stack : exec->scratch(exec, bytes);
    if (!work) return TE_ERROR_MEMORY;
    run_batch(&plan, bias_array(&plan, work), work + plan.bias_bytes);
    if (work != stack) exec->scratch_free(exec, work);
    return TE_OK;
}
