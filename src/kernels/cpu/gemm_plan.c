/* gemm_plan.c - see gemm_plan.h. */
#include "gemm_plan.h"

#include <math.h>

enum {
    UNIT_ROWS = 256,        /* with a slice of them: 128 KiB … */
    UNIT_PANELS = 8,        /* … and their sums 384 KiB; both twice where there is one slice, since no sums are kept */
    THREAD_MACS = 512 << 10 /* work that pays for waking a thread */
};
static const double TAIL = 1.0 / 32; /* of a unit: what the last one makes the others wait, about */

static void plan_arithmetic(te_gemm_plan *plan, const te_gemm_state *state)
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

static bool is_direct(const te_gemm_plan *plan)
{
    bool whole_words = plan->word == TE_GEMM_WORD_F32 || plan->word == TE_GEMM_WORD_F64 ||
                       (plan->word == TE_GEMM_WORD_BF16PAIR && plan->p->k % 2 == 0);
    return whole_words && te_gemm_reads_rows(&plan->p->a);
}

/* Sums that are c's values, or what is added to them, need not be kept before they are finished. */
static te_gemm_way way_out(const te_gemm_plan *plan)
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
static double cycles_of(const te_gemm_plan *plan, double multiply, double words_b, double words_a)
{
    double narrow = plan->width < plan->kernel->nr ? 1.03 : 1;
    return narrow * multiply + 0.35 * words_b + (plan->direct_a ? 0.15 : 0.3) * words_a;
}

/* When the last thread is done, and a little for large units, since threads do not begin at one time. */
static double plan_cycles(const te_gemm_plan *plan, int64_t rows, int64_t panels)
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
static double plan_units(te_gemm_plan *plan)
{
    int64_t m = plan->p->m, mr = plan->kernel->mr, scale = plan->words > TE_GEMM_SLICE_WORDS ? 1 : 2;
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
static void plan_panels(te_gemm_plan *plan)
{
    te_gemm_plan narrow = *plan;
    double wide = plan_units(plan);
    narrow.width -= narrow.kernel->lanes;
    if (narrow.width > narrow.kernel->lanes && plan_units(&narrow) < wide) *plan = narrow;
}

/* One thread needs one unit, if it is not too large; finding that out takes no time. */
static void plan_one_unit(te_gemm_plan *plan)
{
    plan->blocks = plan->groups = 1;
    plan->unit_panels = plan->panels;
    plan->unit_rows = (plan->p->m + plan->kernel->mr - 1) & -(int64_t)plan->kernel->mr; /* mr is a power of two */
}

static void plan_workspace(te_gemm_plan *plan)
{
    const te_gemm_kernel *kernel = plan->kernel;
    size_t slice = at_most(plan->words, TE_GEMM_SLICE_WORDS) * kernel->word_bytes;
    size_t tile = (size_t)kernel->mr * kernel->nr * kernel->sum_bytes;
    bool one_slice = plan->words <= TE_GEMM_SLICE_WORDS;
    plan->b_bytes = align_up(kernel->nr * slice);
    plan->a_bytes = plan->direct_a ? 0 : align_up(plan->unit_rows * slice);
    plan->sums_bytes = align_up(one_slice ? tile : plan->unit_rows / kernel->mr * plan->unit_panels * tile);
}

void te_gemm_plan_make(te_exec *exec, const te_gemm_state *state, const te_gemm_problem *p, te_gemm_plan *plan)
{
    *plan = (te_gemm_plan){.p = p};
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
