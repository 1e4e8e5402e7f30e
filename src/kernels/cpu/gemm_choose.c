/* gemm_choose.c - which implementation takes a matrix product, and why the others do not. */
#include "../dtype.h"
#include "gemm.h"

enum { SMALL_MACS = 128 << 10 };

static const char *decline_large(te_exec *exec, const te_gemm_problem *p)
{
    (void)exec;
    double macs = (double)p->m * (double)p->n * (double)(p->k + 1) * (double)p->batches;
    return macs > SMALL_MACS ? "large enough to share or to hand over" : NULL;
}

#ifdef TE_WITH_ONEDNN
enum { OWN_UNIT_COLS = 48, OWN_UNIT_K = 48 };
enum { OWN_ROWS = 48, OWN_COLS = 96, OWN_FEW_COLS = 32, OWN_K = 64 };
enum { OWN_F32_K = 128, OWN_F32_FEW_ROWS = 256, OWN_F32_MANY_ROWS = 16 << 10 };
enum { OWN_F32_FEW_B = 1 << 18, OWN_F32_B = 3 << 17, OWN_F32_TURNED_B = 1 << 16 };
enum { OWN_AVX2_ROWS = 9, OWN_AVX2_COLS = 768, OWN_AVX2_STEP = 2048 /* bytes */ };

/* With avx2 both are alike but for wide products, where oneDNN takes b as it lies, and where steps along k are of so
 * many bytes that lines of an operand push each other out of the first-level cache, which costs it up to half of its
 * rate. */
static const char *decline_f32_avx2(const te_gemm_problem *p)
{
    int64_t a_step = p->a.cs * p->a.size, b_step = p->b.rs * p->b.size;
    if (a_step % OWN_AVX2_STEP == 0 || b_step % OWN_AVX2_STEP == 0) return NULL;
    if (p->a.cs != 1) return "columns of a need packing";
    return p->n < OWN_AVX2_COLS ? "few columns for avx2" : NULL;
}

/* Few rows by a b that has to be turned: with a packed copy of that, which oneDNN's own kernels for one give other bits
 * than those without, ours is the faster one from the second time on, and no slower before but for the fewest rows. */
static bool keeps_b_avx2(const te_gemm_state *state, const te_gemm_problem *p)
{
    return state->isa->f32.mr < TE_GEMM_MAX_ROWS && p->b.cs != 1 && p->m >= OWN_AVX2_ROWS;
}

/* Lines of an operand whole pages apart, as features by the thousand have them, cost oneDNN up to a quarter of its rate
 * and ours, which packs all but rows of a for itself, little. Only such rows by a b that lies well are no worse to it.
 * This was measured where vectors are multiplied two at a time. */
static bool suffers_from_pages(const te_gemm_state *state, const te_gemm_problem *p)
{
    if (state->f32.rate < 2) return false;
    return te_gemm_lines_apart(&p->b) || (te_gemm_lines_apart(&p->a) && (p->a.cs != 1 || p->b.cs != 1));
}

/* Few columns as well, where both operands have to be turned: then it takes up to three times as long. */
static bool suffers_twice(const te_gemm_state *state, const te_gemm_problem *p)
{
    return p->a.dtype == TE_F32 && p->a.cs != 1 && p->b.cs != 1 && p->n >= OWN_FEW_COLS && te_gemm_lines_apart(&p->b) &&
           suffers_from_pages(state, p);
}

/* Float32 has half as many multiplications per element that is rearranged, so it takes a large b, and an a that needs
 * no packing, for our way to be the faster one; with few rows less of both. A b that has to be turned takes ours up to
 * 2 % longer than oneDNN while it is small, but oneDNN turns it for each of its pieces, which therefore are few: no
 * work for many threads. Where sums are short, or c is the gradient of a large vocabulary, it is c that costs: ours
 * adds to it from registers. */
static const char *decline_f32(const te_gemm_state *state, const te_gemm_problem *p)
{
    if (state->isa->f32.mr < TE_GEMM_MAX_ROWS) return decline_f32_avx2(p);
    if (p->k <= OWN_F32_K) return NULL;
    if (p->m <= OWN_F32_FEW_ROWS && p->k * p->n >= OWN_F32_FEW_B) return NULL;
    if (suffers_from_pages(state, p)) return NULL;
    if (p->accumulate && p->m >= OWN_F32_MANY_ROWS) return NULL;
    if (!te_gemm_reads_rows(&p->a)) return "rows of a need packing";
    bool turned = p->b.rs == 1 && p->n > 1;
    return p->k * p->n < (turned ? OWN_F32_TURNED_B : OWN_F32_B) ? "b is small" : NULL;
}

/* A matrix unit multiplies float32 in less time than vectors, up to half of it, if there is enough for its tiles. */
static const char *decline_in_unit(const te_gemm_problem *p)
{
    if (p->m < TE_GEMM_UNIT_ROWS) return "few rows";
    if (p->n < OWN_UNIT_COLS) return "few columns";
    return p->k < OWN_UNIT_K ? "a short sum" : NULL;
}

/* Where two vectors of pairs are multiplied in a cycle ours also is the faster one with few columns, and with few rows
 * by a b that lies well, which its first tile packs: up to a third less time. */
static const char *decline_pairs(const te_gemm_state *state, const te_gemm_problem *p)
{
    if (!state->bf16_pairs) return "no arithmetic on pairs of bfloat16";
    bool two = state->bf16.rate >= 2 && !state->matrix_unit;
    if (p->m < OWN_ROWS && !(two && p->b.cs == 1)) return "few rows";
    if (p->n < (two ? OWN_FEW_COLS : OWN_COLS)) return "few columns";
    return p->k < OWN_K && !(two && p->c.dtype == TE_F32) ? "a short sum" : NULL;
}

/* What our own kernel multiplies faster than oneDNN. Both reach the same share of the processor's peak in the inner
 * loop, but oneDNN rearranges b for every piece of c, one piece after the other, which costs a tenth to a fifth of the
 * time of bfloat16 in a training step: there weights are other ones in every step and come from memory. With few rows b
 * is better kept rearranged, as oneDNN does; few columns or steps of k leave tiles incomplete, which its code for the
 * very shape does not mind. bench_gemm shows both. */
static const char *decline_slower(te_exec *exec, const te_gemm_problem *p)
{
    const te_gemm_state *state = te_gemm_state_get(exec);
    if (!state) return "no memory for its state";
    if (te_gemm_is_narrow(state, p)) return NULL;
    if (p->a.dtype == TE_BF16) return decline_pairs(state, p);
    if (p->a.dtype != TE_F32) return "neither bfloat16 nor float32";
    if (state->f32_in_unit) return decline_in_unit(p);
    if (p->m < OWN_ROWS && !keeps_b_avx2(state, p)) return "few rows";
    if (p->n < OWN_COLS && !suffers_twice(state, p)) return "few columns";
    if (p->k < OWN_K) return "a short sum";
    return p->m < OWN_ROWS ? NULL : decline_f32(state, p);
}
#endif

static const char *decline_nothing(te_exec *exec, const te_gemm_problem *p)
{
    (void)exec;
    (void)p;
    return NULL;
}

const te_gemm_impl te_gemm_impls[] = {
    {"turned", te_gemm_turned_decline, te_gemm_turned_run},
    {"rows", te_gemm_rows_decline, te_gemm_rows_run},
    {"sweep", te_gemm_sweep_decline, te_gemm_sweep_run},
    {"small", decline_large, te_gemm_blocked_run},
#ifdef TE_WITH_ONEDNN
    {"own", decline_slower, te_gemm_blocked_run},
    {"onednn", te_gemm_onednn_decline, te_gemm_onednn_run},
#endif
    {"blocked", decline_nothing, te_gemm_blocked_run},
    {NULL, NULL, NULL},
};

const te_gemm_impl *te_gemm_choose(te_exec *exec, const te_gemm_problem *p, const char *reasons[TE_GEMM_IMPLS])
{
    const te_gemm_impl *impl = te_gemm_impls;
    for (int i = 0;; i++, impl++) {
        const char *reason = impl->decline(exec, p);
        if (reasons) reasons[i] = reason;
        if (!reason) return impl;
    }
}
