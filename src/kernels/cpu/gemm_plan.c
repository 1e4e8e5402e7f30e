/* gemm_plan.c - see gemm_plan.h. */
#include "gemm_plan.h"

#include <math.h>

enum {
    THREAD_MACS = 512 << 10, /* work that pays for waking a thread */
    PRODUCT_MACS = 256,      /* that take as long as all else about a product */
    MATRIX_K = 32,           /* elements of a row of its registers */
    ACROSS_WORDS = 64,       /* of k, up to which lines of c take longer than a matrix unit's sums */
    DIRECT_COLS = 96,        /* up to so many an operand that stays for several slices is not worth a copy */
    STREAM_BYTES = 2 << 20,  /* of a result that is written past the caches, from which on nobody finds it there; … */
    ROUNDED_BYTES = 4 << 20, /* … of bfloat16, which what comes next reads at once */
    PAIR = 128,              /* bytes of two cache lines, which memory gives in little more time than one */
    SMALL_K = 64,
    SMALL_ROWS = 16, SMALL_COLS = 32, /* by which k may be larger */
    TINY_PANEL = 64,         /* elements of b that are moved one by one */
    NARROW_ROWS = 32,        /* at least, … */
    NARROW_COLS = 15,        /* … and at most: less than a vector, which tiles leave as it is */
    NARROW_FEW_COLS = 8,     /* with which longer sums take less time as those of a few rows, … */
    NARROW_K = 16,           /* … where pairs are not multiplied at once */
    NARROW_UNIT = 1024,      /* rows */
    SMALL_MACS = 256 << 10,  /* of a product that is multiplied without tiles, … */
    SMALL_PANEL_MACS = 16 << 10, /* … where b is packed nevertheless, … */
    SMALL_PAIR_MACS = 2 << 10,   /* … and where tiles would take two elements at a time */
    FEW_UNITS = 16           /* that are gone through one by one */
};
enum { BLOCK_BYTES = 1280 << 10 }; /* of a, which second-level caches hold */
static const double TAIL = 1.0 / 32; /* of a unit: what the last one makes the others wait, about */
static const double SHOWN = 0.5; /* of packing that tiles do beside multiplying: what it takes nevertheless, about */
static const double HELD = 1.1;      /* how much longer tiles take whose b comes from the second-level cache, about */

/* A matrix unit if there is one for it, else vectors. */
static const te_gemm_kernel *unit_or(const te_gemm_state *state, const te_gemm_problem *p, const te_gemm_kernel *unit,
                                     const te_gemm_kernel *vectors)
{
    double macs = (double)p->m * (double)p->n * (double)p->k;
    return unit && p->k >= MATRIX_K && macs >= state->matrix_macs ? unit : vectors;
}

static void plan_arithmetic(te_gemm_plan *plan, const te_gemm_state *state)
{
    const te_gemm_isa *isa = plan->isa = state->isa;
    plan->kernel = &state->f32;
    switch (plan->p->a.dtype) {
    case TE_F64:
        plan->kernel = &isa->f64;
        plan->word = TE_GEMM_WORD_F64;
        break;
    case TE_BF16:
        plan->word = state->bf16_pairs ? TE_GEMM_WORD_BF16PAIR : TE_GEMM_WORD_BF16;
        if (state->bf16_pairs) plan->kernel = unit_or(state, plan->p, state->matrix_unit, &state->bf16);
        break;
    case TE_F16: plan->word = TE_GEMM_WORD_F16; break;
    default:
        plan->kernel = unit_or(state, plan->p, state->f32_in_unit, &state->f32);
        plan->word = plan->kernel == state->f32_in_unit ? TE_GEMM_WORD_F32PARTS : TE_GEMM_WORD_F32;
    }
    plan->words = divide_up(plan->p->k, plan->kernel->k_per_word);
    int64_t slices = at_least(divide_up(plan->words, plan->kernel->slice_words), 1);
    plan->slice_words = at_least(round_up(divide_up(plan->words, slices), plan->kernel->step), 1);
}

/* Rows pages apart are packed although they are contiguous. */
bool te_gemm_reads_rows(const te_gemm_matrix *a) { return a->cs == 1 && !te_gemm_lines_apart(a); }

bool te_gemm_is_low(const te_gemm_plan *plan)
{
    return plan->p->m < plan->kernel->mr && plan->p->b.cs == 1 && plan->kernel->packing;
}

/* Whether tiles can read rows of a where they lie. */
static bool rows_serve(const te_gemm_plan *plan)
{
    bool whole_words = plan->word == TE_GEMM_WORD_F32 || plan->word == TE_GEMM_WORD_F64 ||
                       plan->word == TE_GEMM_WORD_BF16PAIR;
    bool whole_steps = plan->p->k % (plan->kernel->k_per_word * plan->kernel->step) == 0;
    return whole_words && whole_steps && plan->p->m % plan->kernel->row_group == 0 && te_gemm_reads_rows(&plan->p->a);
}

static bool is_direct(const te_gemm_plan *plan)
{
    bool stays = plan->kernel->step > 1 && plan->words > plan->slice_words;
    if (stays && plan->p->n > DIRECT_COLS) return false;
    return !te_gemm_is_low(plan) && rows_serve(plan);
}

/* Whether c is large, and made of whole cache lines. */
static bool streams(const te_gemm_plan *plan)
{
    enum { LINE = 64 };
    const te_gemm_matrix *c = &plan->p->c;
    int64_t most = c->dtype == TE_BF16 ? ROUNDED_BYTES : STREAM_BYTES, row = c->rs * c->size;
    return plan->kernel->streams && plan->p->m * plan->p->n * c->size >= most && row % LINE == 0 &&
           (uintptr_t)c->data % LINE == 0 && plan->p->batches == 1;
}

/* Sums that are c's values, or what is added to them, need not be kept before they are finished. */
static te_gemm_way way_out(const te_gemm_plan *plan)
{
    const te_gemm_problem *p = plan->p;
    te_dtype sum = plan->kernel->sum_bytes == sizeof(double) ? TE_F64 : TE_F32;
    if (p->alpha != 1 || te_view_present(&p->bias) || p->c.cs != 1) return TE_GEMM_OUT_KEEP;
    if (p->c.dtype == sum && p->accumulate) return TE_GEMM_OUT_ADD;
    if (p->c.dtype == sum) return streams(plan) ? TE_GEMM_OUT_STREAM : TE_GEMM_OUT_STORE;
    if (p->c.dtype != TE_BF16 || p->accumulate || !plan->kernel->rounds) return TE_GEMM_OUT_KEEP;
    return plan->kernel->drain && streams(plan) ? TE_GEMM_OUT_ROUND_STREAM : TE_GEMM_OUT_ROUND;
}

/* Sums of squares are taken of what leaves the caches, tile by tile: elsewhere who wants them had better read c. Those
 * of a vector of columns do not depend on how wide panels are. */
static void plan_squares(te_gemm_plan *plan)
{
    const te_gemm_problem *p = plan->p;
    const te_gemm_kernel *kernel = plan->kernel;
    bool whole = p->n % kernel->lanes == 0 && p->m % kernel->row_group == 0;
    if (!p->squares || plan->small || plan->way != TE_GEMM_OUT_STREAM || !whole) return;
    plan->square_rows = divide_up(p->m, kernel->mr);
    plan->square_cols = p->n / kernel->lanes;
}

static bool small_finishes(const te_gemm_isa *isa, const te_gemm_problem *p)
{
    bool plain = p->alpha == 1 && !p->bias_by_row;
    return isa->small && plain && p->c.cs == 1 && !(p->accumulate && p->c.dtype != TE_F32) && p->a.dtype != TE_F64;
}

bool te_gemm_is_narrow(const te_gemm_state *state, const te_gemm_problem *p)
{
    bool pairs = p->a.dtype == TE_BF16 && state->bf16_pairs && p->a.cs == 1;
    int64_t most_k = pairs || p->n > NARROW_FEW_COLS ? SMALL_K : NARROW_K;
    return p->m >= NARROW_ROWS && p->n <= NARROW_COLS && p->k <= most_k && small_finishes(state->isa, p);
}

bool te_gemm_turns_b(const te_gemm_state *state, const te_gemm_problem *p)
{
    return p->b.cs != 1 && p->n > 1 && p->m > 1 && p->n * p->k <= TINY_PANEL && small_finishes(state->isa, p);
}

/* Whether products are so small that what packing and tiles take on top of multiplying counts for more. */
static bool is_small(const te_gemm_plan *plan, bool panel)
{
    const te_gemm_problem *p = plan->p;
    double macs = (double)p->m * (double)p->n * (double)p->k;
    int most = plan->word == TE_GEMM_WORD_BF16PAIR ? SMALL_PAIR_MACS : panel ? SMALL_PANEL_MACS : SMALL_MACS;
    bool few = p->m <= SMALL_ROWS && p->n <= SMALL_COLS && !panel;
    return small_finishes(plan->isa, p) && (few || p->k <= SMALL_K) && macs <= most &&
           !(panel && p->n > plan->kernel->nr);
}

static void plan_small(te_gemm_plan *plan, const te_gemm_state *state)
{
    const te_gemm_problem *p = plan->p;
    bool panel = p->b.cs != 1 && p->n > 1, narrow = te_gemm_is_narrow(state, p);
    plan->small = narrow || is_small(plan, panel);
    plan->small_pairs = narrow && plan->word == TE_GEMM_WORD_BF16PAIR && p->a.cs == 1;
    plan->small_panel = panel || plan->small_pairs;
    plan->small_turned = panel && !plan->small_pairs && p->n * p->k <= TINY_PANEL;
    if (!plan->small) return;
    if (plan->word == TE_GEMM_WORD_F32PARTS) plan->word = TE_GEMM_WORD_F32, plan->kernel = &state->f32;
    plan->unit_panels = plan->panels;
    plan->unit_rows = narrow ? NARROW_UNIT : p->m;
}

/* Cycles for a step of k of so much work, as they were measured: a multiplication of vectors takes one, packing a word
 * a part of one, and so does reading a where it lies. Narrow panels read it more often. A matrix unit waits for what it
 * reads there, and longest for what another core has just written. */
static double cycles_of(const te_gemm_plan *plan, double multiply, double words_b, double words_a)
{
    double narrow = plan->width < plan->kernel->nr ? 1.03 : 1, rate = plan->kernel->rate;
    bool   passes = plan->direct_a && plan->kernel->step == 1;
    double each = plan->kernel->word_cycles;
    if (each > 0) return narrow * multiply / rate + each * (words_b + words_a);
    return narrow * multiply / rate + 0.35 * words_b + (passes ? 0.15 / rate : 0.3) * words_a;
}

/* One way to divide c. */
typedef struct gemm_division {
    int64_t rows, panels; /* of a unit */
    int64_t blocks, groups, units;
    bool    blocks_first;
} gemm_division;

static gemm_division division_of(const te_gemm_plan *plan, int64_t rows, int64_t panels)
{
    gemm_division d = {rows, panels, divide_up(plan->p->m, rows), divide_up(plan->panels, panels), 0, false};
    d.units = d.blocks * d.groups * plan->p->batches;
    return d;
}

static double unit_cycles(const te_gemm_plan *plan, const gemm_division *d, int64_t index)
{
    int64_t block = d->blocks_first ? index % d->blocks : index / d->groups % d->blocks;
    int64_t group = d->blocks_first ? index / d->blocks % d->groups : index % d->groups;
    int64_t rows = at_most(plan->p->m - block * d->rows, d->rows), width = d->panels * plan->width;
    int64_t cols = at_most(plan->p->n - group * width, width);
    double vectors = (double)divide_up(cols, plan->kernel->lanes);
    return cycles_of(plan, (double)rows * vectors, (double)cols, (double)rows);
}

/* When the last thread is done if each takes a unit as soon as it is free, first of its own share (workers.h). */
static double few_units_cycles(const te_gemm_plan *plan, const gemm_division *d)
{
    double  busy[FEW_UNITS] = {0}, last = 0;
    int64_t next[FEW_UNITS], end[FEW_UNITS];
    int     threads = (int)at_most(plan->threads, d->units);
    for (int t = 0; t < threads; t++) {
        int64_t each = d->units / threads, more = d->units % threads;
        next[t] = each * t + at_most(t, more);
        end[t] = next[t] + each + (t < more);
    }
    for (int64_t left = d->units; left > 0; left--) {
        int first = 0;
        for (int t = 1; t < threads; t++)
            if (busy[t] < busy[first]) first = t;
        int from = first;
        while (next[from] == end[from]) from = (from + 1) % threads;
        busy[first] += unit_cycles(plan, d, next[from]++);
        if (busy[first] > last) last = busy[first];
    }
    return last;
}

/* The same of many units, whose sizes even out. */
static double many_units_cycles(const te_gemm_plan *plan, const gemm_division *d)
{
    const te_gemm_problem *p = plan->p;
    int64_t m = p->m, n = p->n, cols = at_most(d->panels * plan->width, n), threads = plan->threads;
    int64_t whole = at_least(m / d->rows, 1) * at_least(n / cols, 1) * p->batches;
    double vectors = (double)divide_up(n, plan->kernel->lanes);
    double all = cycles_of(plan, (double)m * vectors, (double)(n * d->blocks), (double)(m * d->groups));
    double mean = all / (double)(d->blocks * d->groups) * (double)divide_up(d->units, threads);
    double most = unit_cycles(plan, d, 0) * (double)divide_up(whole, threads);
    return mean > most ? mean : most;
}

/* When the last thread is done, and a little for large units, since threads do not begin at one time. Where units are
 * few it matters which of them are neighbours, in one thread's share. */
static double plan_cycles(const te_gemm_plan *plan, gemm_division *d)
{
    double tail = plan->threads > 1 ? TAIL * unit_cycles(plan, d, 0) : 0;
    if (plan->threads == 1 || d->units > FEW_UNITS) return many_units_cycles(plan, d) + tail;
    double cycles = few_units_cycles(plan, d);
    if (d->blocks == 1 || d->groups == 1) return cycles + tail;
    d->blocks_first = true;
    double other = few_units_cycles(plan, d);
    d->blocks_first = other < cycles;
    return (d->blocks_first ? other : cycles) + tail;
}

static void take_division(te_gemm_plan *plan, const gemm_division *d)
{
    plan->unit_rows = d->rows;
    plan->unit_panels = d->panels;
    plan->blocks_first = d->blocks_first;
}

/* Tries the groups that the caches allow, each with as many blocks of rows as give every thread one unit, two or four;
 * returns what the best takes. */
static double plan_units(te_gemm_plan *plan)
{
    int64_t m = plan->p->m, mr = plan->kernel->mr;
    int64_t bytes = 2 * plan->kernel->unit_rows * plan->words * plan->kernel->word_bytes; /* of a, in one slice */
    int64_t scale = plan->words > plan->slice_words || bytes > BLOCK_BYTES ? 1 : 2;
    int64_t most = plan->threads > 1 ? 4 : 1;
    int64_t least_blocks = divide_up(m, scale * plan->kernel->unit_rows), groups = 0;
    double best = INFINITY;
    plan->panels = divide_up(plan->p->n, plan->width);
    for (int64_t panels = at_most(plan->panels, scale * plan->kernel->unit_panels); panels > 0; panels--) {
        if (divide_up(plan->panels, panels) == groups) continue;
        groups = divide_up(plan->panels, panels);
        int64_t even = divide_up(plan->panels, groups), tried = 0;
        for (int64_t each = 1; each <= most; each *= 2) {
            int64_t blocks = at_least(each * plan->threads / (groups * plan->p->batches), least_blocks);
            int64_t rows = divide_up(divide_up(m, blocks), mr) * mr;
            if (rows == tried) continue;
            tried = rows;
            gemm_division d = division_of(plan, rows, even);
            double cycles = plan_cycles(plan, &d);
            if (cycles >= best) continue;
            best = cycles;
            take_division(plan, &d);
        }
    }
    return best;
}

/* Panels are full tiles wide, or one vector less where units are more even so. Returns what that takes. */
static double plan_panels(te_gemm_plan *plan)
{
    te_gemm_plan narrow = *plan;
    double wide = plan_units(plan), less = INFINITY;
    narrow.width -= narrow.kernel->lanes;
    if (narrow.width > narrow.kernel->lanes) less = plan_units(&narrow);
    if (less >= wide) return wide;
    *plan = narrow;
    return less;
}

/* Where the second-level cache holds all of b, every thread packs that once, and reads rows of a once, as they lie, if
 * it takes less than `other` cycles. If words have to be made of rows, which is mostly hidden behind multiplying by
 * some panels, it may also be done for each of several groups of them, over all of k or, if few fit, chunk by chunk. */
static void plan_held(te_gemm_plan *plan, double other)
{
    enum { UNITS = 4, LEAST_TILES = 8 }; /* of a thread; of a unit whose first one packs rows for itself */
    enum { LEAST_PANELS = 8 };           /* beside which a tile's rows are packed in time */
    const te_gemm_kernel *kernel = plan->kernel;
    int64_t m = plan->p->m, panels = divide_up(plan->p->n, plan->width), words = round_up(plan->words, kernel->step);
    bool    packs = kernel->pack_rest != NULL;
    if (words == 0) return;
    int64_t fit = kernel->held_bytes / (words * kernel->nr * kernel->word_bytes), least = at_most(panels, LEAST_PANELS);
    bool    chunks = packs && fit < least;
    if (chunks) fit = kernel->held_bytes / (plan->slice_words * kernel->nr * kernel->word_bytes);
    if (fit < (packs ? least : panels) || plan->p->batches > 1) return;
    if (plan->words <= ACROSS_WORDS && !packs) return;
    if (packs ? plan->p->a.cs != 1 : !rows_serve(plan)) return;
    int64_t groups = divide_up(panels, fit);
    double  vectors = (double)divide_up(plan->p->n, kernel->lanes), rows = (double)divide_up(m, plan->threads);
    double  shown = packs ? SHOWN * rows * (double)groups : 0, packing = cycles_of(plan, 0, (double)plan->p->n, shown);
    if ((packs ? 1 : HELD) * cycles_of(plan, rows * vectors, 0, 0) + packing >= other) return;
    plan->held = true;
    plan->held_words = chunks ? plan->slice_words : 0;
    plan->unit_panels = divide_up(panels, groups);
    int64_t few = at_least(divide_up(m, plan->threads * kernel->mr) / LEAST_TILES, 1);
    plan->unit_rows = round_up(divide_up(m, (packs ? at_most(few, UNITS) : UNITS) * plan->threads), kernel->mr);
    plan->blocks_first = groups > 1;
}

/* One thread needs one unit, if it is not too large; finding that out takes no time. */
static void plan_one_unit(te_gemm_plan *plan)
{
    plan->unit_panels = plan->panels;
    plan->unit_rows = (plan->p->m + plan->kernel->mr - 1) & -(int64_t)plan->kernel->mr; /* mr is a power of two */
}

/* Where rows of b lie and panels are narrower than what memory gives in little more time than one line, the rows of
 * several panels are fetched together, and a chunk is one slice: of the lines that come along, parts are packed later,
 * so all that a unit has of b passes. Else a chunk is the slices whose rows of a fit the second-level cache. */
static void plan_chunks(te_gemm_plan *plan)
{
    const te_gemm_kernel *kernel = plan->kernel;
    const te_gemm_matrix *b = &plan->p->b;
    bool lies = b->cs == 1 && b->rs != 1;
    plan->near_panels = lies ? at_least(PAIR / (plan->width * b->size), 1) : 1;
    int64_t slices = kernel->chunk_bytes / (plan->unit_rows * plan->slice_words * kernel->word_bytes);
    plan->chunk_words = (plan->near_panels > 1 ? 1 : at_least(slices, 1)) * plan->slice_words;
    int64_t across_words = plan->held_words ? plan->held_words : plan->words;
    if (plan->across) plan->chunk_words = at_least(across_words, plan->slice_words);
}

static void plan_workspace(te_gemm_plan *plan)
{
    if (plan->small) {
        plan->b_bytes = plan->small_panel ? align_up(plan->p->k * round_up(plan->p->n, 16) * sizeof(float)) : 0;
        return;
    }
    const te_gemm_kernel *kernel = plan->kernel;
    size_t slice = round_up(at_most(plan->words, plan->slice_words), kernel->step) * kernel->word_bytes;
    size_t tile = (size_t)kernel->mr * kernel->nr * kernel->sum_bytes;
    bool one_slice = plan->words <= plan->slice_words;
    plan->b_bytes = align_up(kernel->nr * slice);
    int64_t held_words = round_up(at_most(plan->chunk_words, plan->words), kernel->step);
    if (plan->across) plan->b_bytes = plan->unit_panels * held_words * kernel->nr * kernel->word_bytes;
    int64_t row_panels = plan->unit_rows / kernel->mr, chunk = plan->chunk_words < plan->words ? plan->unit_panels : 1;
    size_t chunk_bytes = round_up(at_most(plan->chunk_words, plan->words), kernel->step) * kernel->word_bytes;
    int64_t packed_rows = plan->beside ? 2 * kernel->mr : plan->unit_rows;
    plan->a_bytes = plan->direct_a ? 0 : align_up(packed_rows * chunk_bytes);
    bool side_by_side = plan->groups > 1 && (plan->blocks == 1 || (!plan->blocks_first && plan->p->a.rs != 0));
    bool keeps_a = plan->a_bytes && plan->words <= plan->chunk_words && side_by_side && !plan->across;
    if (keeps_a || plan->across) plan->note_bytes = align_up(sizeof(char *));
    bool by_near = plan->square_rows && !kernel->drain;
    int64_t tiles = one_slice ? 1 : plan->across && !plan->held_words ? plan->unit_panels : row_panels * chunk;
    plan->sums_bytes = align_up(tiles * tile) + (by_near ? tile : 0);
    if (kernel->mend)
        plan->range_bytes = align_up(2 * (plan->unit_rows + plan->unit_panels * kernel->nr) * sizeof(uint32_t));
}

/* --- divisions that were found before ----------------------------------------------------------------------------- */

static te_gemm_division *entry_of(te_gemm_state *state, const te_gemm_division *key)
{
    uint64_t hash = (uint64_t)key->m * 31 + (uint64_t)key->n;
    hash = (hash * 31 + (uint64_t)key->words) * 31 + (uint64_t)key->batches;
    return &state->divisions[hash * 0x9e3779b97f4a7c15u >> 32 & (TE_GEMM_DIVISIONS - 1)];
}

static bool is_of(const te_gemm_division *d, const te_gemm_division *key)
{
    return d->kernel == key->kernel && d->m == key->m && d->n == key->n && d->words == key->words &&
           d->batches == key->batches && d->threads == key->threads && d->direct_a == key->direct_a &&
           d->rows_serve == key->rows_serve;
}

/* Going through divisions takes some microseconds, as much as a small product; so what was found is kept. */
static void plan_division(te_gemm_state *state, te_gemm_plan *plan)
{
    const te_gemm_problem *p = plan->p;
    te_gemm_division key = {.kernel = plan->kernel, .m = p->m, .n = p->n, .words = plan->words, .batches = p->batches,
                            .threads = plan->threads, .direct_a = plan->direct_a, .rows_serve = rows_serve(plan)};
    te_gemm_division *kept = entry_of(state, &key);
    if (!is_of(kept, &key)) {
        plan_held(plan, plan->threads == 1 ? plan_units(plan) : plan_panels(plan));
        *kept = key;
        kept->width = plan->width;
        kept->unit_rows = plan->unit_rows;
        kept->unit_panels = plan->unit_panels;
        kept->blocks_first = plan->blocks_first;
        kept->held = plan->held;
        kept->held_words = plan->held_words;
    }
    plan->width = kept->width;
    plan->unit_rows = kept->unit_rows;
    plan->unit_panels = kept->unit_panels;
    plan->blocks_first = kept->blocks_first;
    plan->held = kept->held;
    plan->held_words = kept->held_words;
}

void te_gemm_plan_make(te_exec *exec, te_gemm_state *state, const te_gemm_problem *p, te_gemm_plan *plan)
{
    *plan = (te_gemm_plan){.p = p};
    double macs = ((double)p->m * p->n * at_least(p->k, 1) + PRODUCT_MACS) * p->batches;
    plan->threads = (int)at_most(at_least(exec->threads, 1), 1 + (int64_t)(macs / THREAD_MACS));
    plan_arithmetic(plan, state);
    plan->width = plan->kernel->nr;
    plan->panels = divide_up(p->n, plan->width);
    plan->direct_a = is_direct(plan);
    plan->way = way_out(plan);
    plan_small(plan, state);
    plan_squares(plan);
    if (plan->small) {
    } else if (plan->threads == 1 && p->m <= plan->kernel->unit_rows && plan->panels <= plan->kernel->unit_panels)
        plan_one_unit(plan);
    else plan_division(state, plan);
    bool few_words = plan->kernel->drain && !plan->small && plan->words > 0 && plan->words <= ACROSS_WORDS;
    plan->across = plan->held || few_words;
    plan->beside = plan->held && plan->kernel->pack_rest;
    plan->direct_a |= plan->held && !plan->beside;
    plan->panels = divide_up(p->n, plan->width);
    plan->groups = divide_up(plan->panels, plan->unit_panels);
    plan->blocks = divide_up(p->m, plan->unit_rows);
    plan_chunks(plan);
    plan_workspace(plan);
    plan->threads = (int)at_most(plan->threads, plan->blocks * plan->groups * p->batches);
}

void te_gemm_plan_asking(te_gemm_out *out, te_gemm_ahead *next, int64_t tiles, int64_t steps)
{
    int64_t lines = te_gemm_lines_of(next);
    out->ahead = next;
    if (tiles == 0 || steps == 0) te_gemm_ask(next, lines);
    if (next->runs == 0 || lines == 0) return;
    int64_t each = divide_up(lines, tiles);
    out->lines = (int)divide_up(each, steps);
    for (out->apart = 1; out->lines == 1 && 2 * out->apart * each <= steps;) out->apart *= 2;
    out->asking = divide_up(each, out->lines) * out->apart;
}
