/* gemm_blocked.c - our own matrix product: in which order packed panels meet, and which thread computes what.
 *
 *      a thread takes a unit: a block of rows x a group of panels of b
 *        for each slice of k
 *          packs the block of a                          into its second-level cache, where a is not fit as it lies
 *          for each panel of b in the group
 *            packs the panel's slice                     into its first-level cache
 *            for each panel of a: a tile of sums         after the last slice it is finished into c
 *
 * Nothing is shared and nothing waits: packing b takes a third of a cycle per word, half of one from memory, and a word
 * then serves all rows of the block, 16 cycles of multiplication where these are 256. Packing it once for all would cost
 * more, since it would be read again from the last-level cache. While the tiles of a slice run they prefetch what is
 * packed next, which is worth 5 % of the time where weights come from memory.
 *
 * Units, slices and tiles depend on the shape alone (units on the number of threads, but k is not divided between
 * them), and a tile's sums are kept in full precision between slices; so the result does not depend on who computes
 * it.
 */
#include "../dtype.h"
#include "gemm.h"

#include <math.h>
#include <omp.h>
#include <string.h>

enum {
    SLICE_WORDS = 128,       /* of 48 floats: 24 KiB, and a panel of a passes by */
    UNIT_ROWS = 256,         /* with a slice of them: 128 KiB … */
    UNIT_PANELS = 8,         /* … and their sums 384 KiB; where there is one slice no sums are kept, so both are doubled */
    THREAD_MACS = 512 << 10, /* work that pays for waking a thread */
    STACK_BYTES = 32 << 10
};
static const double TAIL = 1.0 / 32; /* of a unit: what the last one makes the others wait, about */

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
    const void *bias;                       /* of the type of the sums, or NULL */
    int64_t words;
    int64_t unit_rows, blocks;              /* of a */
    int64_t width;                          /* columns of a panel */
    int64_t panels, unit_panels, groups;    /* of b */
    int     threads;
    bool    direct_a;                       /* rows of a serve as they are */
    te_gemm_way way;                        /* of whole vectors, when they are complete */
    size_t  a_bytes, b_bytes, sums_bytes;   /* workspace of a thread */
} gemm_plan;

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
    plan->words = divide_up(plan->p->k, plan->kernel->k_per_word);
}

/* Rows a multiple of a page apart are packed although they are contiguous: they would share the few cache lines of one
 * set. */
bool te_gemm_reads_rows(const te_gemm_matrix *a) { return a->cs == 1 && a->rs * a->size % 4096 != 0; }

static bool is_direct(const gemm_plan *plan)
{
    bool whole_words = plan->word == TE_GEMM_WORD_F32 || plan->word == TE_GEMM_WORD_F64 ||
                       (plan->word == TE_GEMM_WORD_BF16PAIR && plan->p->k % 2 == 0);
    return whole_words && te_gemm_reads_rows(&plan->p->a);
}

/* Sums that are c's values, or what is added to them, need not be kept before they are finished. */
static te_gemm_way way_out(const gemm_plan *plan)
{
    const te_gemm_problem *p = plan->p;
    te_dtype sum = plan->kernel->sum_bytes == sizeof(double) ? TE_F64 : TE_F32;
    if (p->alpha != 1 || te_view_present(&p->bias) || p->aux.data || p->activation != TE_ACT_NONE || p->c.cs != 1)
        return TE_GEMM_OUT_KEEP;
    if (p->c.dtype == sum) return p->accumulate ? TE_GEMM_OUT_ADD : TE_GEMM_OUT_STORE;
    return p->c.dtype == TE_BF16 && !p->accumulate && plan->kernel->rounds ? TE_GEMM_OUT_ROUND : TE_GEMM_OUT_KEEP;
}

/* Cycles for a step of k of so much work, as they were measured: a multiplication of vectors takes one, packing a word
 * a part of one, and so does reading a where it lies. Narrow panels read it more often. */
static double cycles_of(const gemm_plan *plan, double multiply, double words_b, double words_a)
{
    double narrow = plan->width < plan->kernel->nr ? 1.03 : 1;
    return narrow * multiply + 0.35 * words_b + (plan->direct_a ? 0.15 : 0.3) * words_a;
}

/* When the last thread is done, and a little for large units, since threads do not begin at one time. */
static double plan_cycles(const gemm_plan *plan, int64_t rows, int64_t panels)
{
    const te_gemm_problem *p = plan->p;
    int64_t lanes = plan->kernel->lanes, m = p->m, n = p->n, threads = plan->threads;
    int64_t cols = at_most(panels * plan->width, n);
    int64_t blocks = divide_up(m, rows), groups = divide_up(plan->panels, panels), units = blocks * groups * p->batches;
    int64_t whole = at_least(m / rows, 1) * at_least(n / cols, 1) * p->batches;
    double unit = cycles_of(plan, (double)(rows * divide_up(cols, lanes)), (double)cols, (double)rows);
    double all = cycles_of(plan, (double)(m * divide_up(n, lanes)), (double)(n * blocks), (double)(m * groups));
    double mean = all / (double)(blocks * groups) * (double)divide_up(units, threads);
    double most = unit * (double)divide_up(whole, threads);
    return (mean > most ? mean : most) + (threads > 1 ? TAIL * unit : 0);
}

/* Tries the groups that the caches allow, each with as many blocks of rows as give every thread one unit, two or four;
 * returns what the best takes. */
static double plan_units(gemm_plan *plan)
{
    int64_t m = plan->p->m, mr = plan->kernel->mr, scale = plan->words > SLICE_WORDS ? 1 : 2;
    int64_t most = plan->threads > 1 ? 4 : 1;
    int64_t least_blocks = divide_up(m, scale * UNIT_ROWS), groups = 0;
    double best = INFINITY;
    plan->panels = divide_up(plan->p->n, plan->width);
    for (int64_t panels = at_most(plan->panels, scale * UNIT_PANELS); panels > 0; panels--) {
        if (divide_up(plan->panels, panels) == groups) continue;
        groups = divide_up(plan->panels, panels);
        int64_t even = divide_up(plan->panels, groups), tried = 0;
        for (int64_t each = 1; each <= most; each *= 2) {
            int64_t blocks = at_least(each * plan->threads / (groups * plan->p->batches), least_blocks);
            int64_t rows = divide_up(divide_up(m, blocks), mr) * mr;
            if (rows == tried) continue;
            tried = rows;
            double cycles = plan_cycles(plan, rows, even);
            if (cycles >= best) continue;
            best = cycles;
            plan->unit_rows = rows;
            plan->unit_panels = even;
        }
    }
    plan->groups = divide_up(plan->panels, plan->unit_panels);
    plan->blocks = divide_up(m, plan->unit_rows);
    return best;
}

/* Panels are full tiles wide, or one vector less where units are more even so. */
static void plan_panels(gemm_plan *plan)
{
    gemm_plan narrow = *plan;
    double wide = plan_units(plan);
    narrow.width -= narrow.kernel->lanes;
    if (narrow.width > narrow.kernel->lanes && plan_units(&narrow) < wide) *plan = narrow;
}

/* One thread needs one unit, if it is not too large; finding that out takes no time. */
static void plan_one_unit(gemm_plan *plan)
{
    plan->blocks = plan->groups = 1;
    plan->unit_panels = plan->panels;
    plan->unit_rows = (plan->p->m + plan->kernel->mr - 1) & -(int64_t)plan->kernel->mr; /* mr is a power of two */
}

static void plan_workspace(gemm_plan *plan)
{
    const te_gemm_kernel *kernel = plan->kernel;
    size_t slice = at_most(plan->words, SLICE_WORDS) * kernel->word_bytes;
    size_t tile = (size_t)kernel->mr * kernel->nr * kernel->sum_bytes;
    bool one_slice = plan->words <= SLICE_WORDS;
    plan->b_bytes = align_up(kernel->nr * slice);
    plan->a_bytes = plan->direct_a ? 0 : align_up(plan->unit_rows * slice);
    plan->sums_bytes = align_up(one_slice ? tile : plan->unit_rows / kernel->mr * plan->unit_panels * tile);
}

static void plan_make(te_exec *exec, const te_gemm_state *state, const te_gemm_problem *p, gemm_plan *plan)
{
    *plan = (gemm_plan){.p = p};
    double macs = (double)p->m * p->n * at_least(p->k, 1) * p->batches;
    plan->threads = (int)at_most(at_least(exec->threads, 1), 1 + (int64_t)(macs / THREAD_MACS));
    plan_arithmetic(plan, state);
    plan->width = plan->kernel->nr;
    plan->panels = divide_up(p->n, plan->width);
    plan->direct_a = is_direct(plan);
    plan->way = way_out(plan);
    if (plan->threads == 1 && p->m <= UNIT_ROWS && plan->panels <= UNIT_PANELS) plan_one_unit(plan);
    else if (plan->threads == 1) plan_units(plan);
    else plan_panels(plan);
    plan_workspace(plan);
    plan->threads = (int)at_most(plan->threads, plan->blocks * plan->groups * p->batches);
}

static size_t thread_bytes(const gemm_plan *plan) { return plan->a_bytes + plan->b_bytes + plan->sums_bytes; }

/* --- a unit ------------------------------------------------------------------------------------------------------- */

/* One unit of one product; `first` and `words` are the slice it is at. */
typedef struct gemm_unit {
    const gemm_plan *plan;
    gemm_source    a, b;
    te_gemm_finish finish;
    int64_t row, rows;          /* of c */
    int64_t panel, panels;
    int64_t first, words;
    char   *a_room, *b_room, *sums;
} gemm_unit;

static int columns_of(const gemm_unit *u, int64_t panel)
{
    int64_t width = u->plan->width;
    return (int)at_most(u->plan->p->n - panel * width, width);
}

static int vectors_of(const gemm_unit *u, int64_t panel)
{
    int lanes = u->plan->kernel->lanes;
    return (columns_of(u, panel) + lanes - 1) / lanes;
}

static te_gemm_pack pack_of_slice(const gemm_unit *u, const char *src, int64_t line_stride, int64_t k_stride)
{
    const gemm_plan *plan = u->plan;
    int64_t k0 = u->first * plan->kernel->k_per_word;
    return (te_gemm_pack){.word = plan->word, .src = src + k0 * k_stride, .line_stride = line_stride,
                          .k_stride = k_stride, .k = at_most(plan->p->k - k0, u->words * plan->kernel->k_per_word)};
}

static void pack_a(const gemm_unit *u)
{
    te_gemm_pack pack = pack_of_slice(u, u->a.data + u->row * u->a.row, u->a.row, u->a.col);
    pack.extent = (int)u->rows;
    pack.width = u->plan->kernel->mr;
    u->plan->isa->pack(&pack, u->a_room);
}

static void pack_b(const gemm_unit *u, int64_t panel)
{
    const te_gemm_kernel *kernel = u->plan->kernel;
    te_gemm_pack pack = pack_of_slice(u, u->b.data + panel * u->plan->width * u->b.col, u->b.col, u->b.row);
    pack.extent = columns_of(u, panel);
    pack.width = kernel->nr;
    pack.filled = vectors_of(u, panel) * kernel->lanes;
    u->plan->isa->pack(&pack, u->b_room);
}

/* Memory that is read soon: `runs` pieces of `bytes` bytes, `stride` apart. */
typedef struct gemm_ahead {
    const char *data;
    int64_t runs, stride, bytes;
} gemm_ahead;

/* The next `runs` pieces of it. */
static void fetch(gemm_ahead *ahead, int64_t runs)
{
    for (; runs > 0 && ahead->runs > 0; runs--, ahead->runs--, ahead->data += ahead->stride) {
        const char *line = ahead->data, *end = line + ahead->bytes;
        for (; line < end; line += 64) __builtin_prefetch(line, 0, 2);
    }
}

/* What the unit packs after panel `panel` of this slice. */
static gemm_ahead after(const gemm_unit *u, int64_t panel)
{
    const te_gemm_kernel *kernel = u->plan->kernel;
    int64_t size = u->plan->p->b.size, word = u->first;
    if (++panel == u->panel + u->panels) panel = u->panel, word += u->words;
    if (word >= u->plan->words) return (gemm_ahead){0};
    int64_t k0 = word * kernel->k_per_word, cols = columns_of(u, panel);
    int64_t k = at_most(u->plan->p->k - k0, SLICE_WORDS * kernel->k_per_word);
    const char *data = u->b.data + k0 * u->b.row + panel * u->plan->width * u->b.col;
    if (u->b.row == size) return (gemm_ahead){data, cols, u->b.col, k * size};
    if (u->b.col == size) return (gemm_ahead){data, k, u->b.row, cols * size};
    return (gemm_ahead){0};
}

/* The tiles of the unit's rows with one panel of b, over one slice. */
static void run_tiles(const gemm_unit *u, int64_t panel)
{
    const gemm_plan *plan = u->plan;
    const te_gemm_kernel *kernel = plan->kernel;
    int64_t mr = kernel->mr, word = kernel->word_bytes, tile_bytes = mr * kernel->nr * kernel->sum_bytes;
    int64_t col = panel * plan->width, row_panels = divide_up(u->rows, mr);
    int64_t a_row = plan->direct_a ? u->a.row : word, a_step = plan->direct_a ? word : mr * word;
    int64_t a_panel = plan->direct_a ? mr * u->a.row : mr * u->words * word;
    const char *a = plan->direct_a ? u->a.data + u->row * u->a.row + u->first * word : u->a_room;
    int cols = columns_of(u, panel), vectors = vectors_of(u, panel);
    bool begins = u->first == 0, ends = u->first + u->words == plan->words;
    bool kept = plan->words > SLICE_WORDS;
    char *sums = u->sums + (kept ? (panel - u->panel) * row_panels * tile_bytes : 0);
    te_gemm_out out = {.way = ends && cols == vectors * kernel->lanes ? plan->way : TE_GEMM_OUT_KEEP,
                       .row = u->finish.c.rs * u->finish.c.size, .vector = kernel->lanes * u->finish.c.size};
    gemm_ahead next = after(u, panel);
    int64_t share = next.runs ? divide_up(next.runs, row_panels) : 0;
    for (int64_t i = 0; i < row_panels; i++, a += a_panel, sums += kept ? tile_bytes : 0) {
        int64_t row = u->row + i * mr;
        int rows = (int)at_most(u->rows - i * mr, mr);
        fetch(&next, share);
        if (ends) kernel->fetch(&u->finish.c, row, col, rows, cols);
        out.c = te_gemm_element(&u->finish.c, row, col);
        kernel->tile[rows - 1][vectors - 1](a, a_row, a_step, u->b_room, u->words, sums, begins, &out);
        if (ends && out.way == TE_GEMM_OUT_KEEP) kernel->finish(&u->finish, sums, kernel->nr, row, col, rows, cols);
    }
}

static void run_unit(gemm_unit *u)
{
    const gemm_plan *plan = u->plan;
    for (u->first = 0; u->first == 0 || u->first < plan->words; u->first += SLICE_WORDS) {
        u->words = at_most(plan->words - u->first, SLICE_WORDS);
        if (!plan->direct_a) pack_a(u);
        for (int64_t panel = u->panel; panel < u->panel + u->panels; panel++) {
            pack_b(u, panel);
            run_tiles(u, panel);
        }
    }
}

/* --- all units ---------------------------------------------------------------------------------------------------- */

static gemm_source source_of(const te_gemm_matrix *m)
{
    return (gemm_source){m->data, m->rs * m->size, m->cs * m->size};
}

/* Unit `index` of all products; neighbours have the rows of a in common. */
static gemm_unit unit_make(const gemm_plan *plan, int64_t index, char *room)
{
    const te_gemm_problem *p = plan->p;
    int64_t group = 0, block = 0;
    if (plan->groups > 1) group = index % plan->groups, index /= plan->groups;
    if (plan->blocks > 1) block = index % plan->blocks, index /= plan->blocks;
    te_gemm_product t = te_gemm_product_of(p, index);
    gemm_unit u = {.plan = plan, .a = source_of(&t.a), .b = source_of(&t.b), .row = block * plan->unit_rows,
                   .panel = group * plan->unit_panels, .b_room = room, .sums = room + plan->b_bytes,
                   .a_room = room + plan->b_bytes + plan->sums_bytes,
                   .finish = {.c = t.c, .aux = t.aux, .bias = plan->bias, .bias_by_row = p->bias_by_row,
                              .activation = p->activation, .alpha = p->alpha, .accumulate = p->accumulate}};
    u.rows = at_most(p->m - u.row, plan->unit_rows);
    u.panels = at_most(plan->panels - u.panel, plan->unit_panels);
    return u;
}

static void run_units(const gemm_plan *plan, char *work)
{
    int64_t units = plan->blocks * plan->groups * plan->p->batches;
    size_t each = thread_bytes(plan);
    if (plan->threads == 1) {
        for (int64_t i = 0; i < units; i++) {
            gemm_unit u = unit_make(plan, i, work);
            run_unit(&u);
        }
        return;
    }
#pragma omp parallel for num_threads(plan->threads) schedule(dynamic)
    for (int64_t i = 0; i < units; i++) {
        gemm_unit u = unit_make(plan, i, work + omp_get_thread_num() * each);
        run_unit(&u);
    }
}

static size_t bias_bytes(const gemm_plan *plan)
{
    const te_view *bias = &plan->p->bias;
    return te_view_present(bias) ? align_up(bias->shape[0] * plan->kernel->sum_bytes) : 0;
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
    size_t bytes = bias_bytes(&plan) + plan.threads * thread_bytes(&plan);
    _Alignas(64) char stack[STACK_BYTES];
    char *work = bytes <= sizeof stack ? stack : exec->scratch(exec, bytes);
    if (!work) return TE_ERROR_MEMORY;
    plan.bias = bias_array(&plan, work);
    run_units(&plan, work + bias_bytes(&plan));
    if (work != stack) exec->scratch_free(exec, work);
    return TE_OK;
}
