/* gemm.c - the CPU's matrix product: the normal form of a problem, and the choice of an implementation. */
#include "../check.h"
#include "../dtype.h"
#include "attention.h"
#include "gemm.h"
#include "gemm_cache.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* --- state -------------------------------------------------------------------------------------------------------- */

static void state_release(te_exec *exec, void *gemm)
{
    te_gemm_state *state = gemm;
    if (!state) return;
#ifdef TE_WITH_ONEDNN
    te_gemm_onednn_close(exec, state->onednn);
#endif
    te_gemm_cache_free(state->packed);
    te_mem_free(exec->mem, state, sizeof *state);
}

#if defined(TE_ISA_HAS_X86) && defined(__x86_64__)
/* First-level caches of 48 KiB hold 36 of b, which pass by a slice of more rows, and with them come two multiplications
 * of vectors in a cycle: products of bfloat16 and float32 take 2.5 % less time on average, some 13, and another 1 where
 * results of float32 go past the caches. */
static void suit_first_level(te_gemm_kernel *kernel)
{
    kernel->slice_words = 192;
    kernel->unit_rows = 512;
    kernel->rate = 2;
    kernel->streams = true;
    kernel->stream_squares = te_gemm_stream_squares_avx512;
    kernel->leave = te_gemm_streamed_avx512;
}

static bool has_large_first_level(void)
{
#ifdef _SC_LEVEL1_DCACHE_SIZE
    return sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 << 10;
#else
    return false;
#endif
}
#endif

#ifdef TE_ISA_HAS_AMX
/* 30 KiB of b are better there, as several slices of a stay beside them. */
void te_gemm_suit_large_caches(te_gemm_kernel *f32)
{
    suit_first_level(f32);
    f32->slice_words = 160;
    f32->unit_panels = 16;
    f32->chunk_bytes = 1 << 20;
}
#endif

te_gemm_state *te_gemm_state_get(te_exec *exec)
{
    te_cpu_device *device = te_cpu(exec);
    if (device->gemm) return device->gemm;
    te_gemm_state *state = te_mem_zalloc(exec->mem, sizeof *state);
    if (!state) {
        te_exec_fail(exec, TE_ERROR_MEMORY, "matrix product: out of memory for its caches");
        return NULL;
    }
    state->slice_macs = 4e9; /* some 50 ms */
    state->matrix_macs = 256 << 10;
    state->isa = &te_gemm_isa_portable;
#if defined(TE_ISA_HAS_X86) && defined(__x86_64__)
    if (device->isa == TE_CPU_AVX2) state->isa = &te_gemm_isa_avx2;
    if (device->isa == TE_CPU_AVX512) state->isa = &te_gemm_isa_avx512;
#endif
#ifdef TE_ISA_HAS_NEONBF16
    if (device->has_bf16) state->isa = &te_gemm_isa_neonbf16;
#endif
    state->f32 = state->isa->f32;
    state->bf16 = state->isa->bf16;
    state->bf16_pairs = device->has_bf16;
#if defined(TE_ISA_HAS_X86) && defined(__x86_64__)
    if (device->isa == TE_CPU_AVX512 && has_large_first_level()) {
        suit_first_level(&state->f32);
        suit_first_level(&state->bf16);
    }
#ifdef TE_ISA_HAS_AMX
    if (state->bf16_pairs && te_gemm_amx_allowed()) {
        state->matrix_unit = &te_gemm_kernel_amx;
        device->tiled_attention = &te_attention_bf16_amx;
        te_gemm_suit_large_caches(&state->f32);
    }
#endif
#endif
    device->gemm = state;
    device->gemm_release = state_release;
    return state;
}

/* --- the normal form ---------------------------------------------------------------------------------------------- */

static te_gemm_matrix matrix_of(const te_view *v, int ndim)
{
    if (!te_view_present(v)) return (te_gemm_matrix){0};
    return (te_gemm_matrix){v->data, v->dtype, (int32_t)te_dtype_size(v->dtype), v->stride[ndim - 2],
                            v->stride[ndim - 1]};
}

/* Adds a batch dimension inside the ones there are, joined to the last where one step of it is a whole run of the new
 * one. */
static void push_batch(te_gemm_problem *p, int64_t extent, const int64_t stride[3])
{
    if (extent == 1) return;
    int last = p->batch_dims - 1;
    bool joins = last >= 0;
    for (int i = 0; joins && i < 3; i++) joins = p->batch_stride[i][last] == extent * stride[i];
    if (joins) p->batch_shape[last] *= extent;
    else p->batch_shape[p->batch_dims++] = extent;
    for (int i = 0; i < 3; i++) p->batch_stride[i][p->batch_dims - 1] = stride[i];
}

/* A batch of products with one b whose rows follow each other is one tall product. */
static void merge_batch_into_rows(te_gemm_problem *p)
{
    te_gemm_matrix *rows[3] = {&p->a, NULL, &p->c};
    while (p->batch_dims > 0) {
        int last = p->batch_dims - 1;
        if (p->batch_stride[1][last] != 0) return;
        for (int i = 0; i < 3; i++)
            if (rows[i] && p->m > 1 && p->batch_stride[i][last] != p->m * rows[i]->rs) return;
        for (int i = 0; i < 3; i++)
            if (rows[i] && p->m == 1) rows[i]->rs = p->batch_stride[i][last];
        p->m *= p->batch_shape[last];
        p->batches /= p->batch_shape[last];
        p->batch_dims--;
    }
}

static void swap_matrices(te_gemm_matrix *x, te_gemm_matrix *y)
{
    te_gemm_matrix t = *x;
    *x = *y;
    *y = t;
}

static void transpose_matrix(te_gemm_matrix *x)
{
    int64_t t = x->rs;
    x->rs = x->cs;
    x->cs = t;
}

/* c^T = b^T a^T */
static void transpose_problem(te_gemm_problem *p)
{
    int64_t m = p->m, strides[TE_GEMM_BATCH_DIMS];
    uint64_t key = p->a_key;
    p->m = p->n;
    p->n = m;
    p->a_key = p->b_key;
    p->b_key = key;
    swap_matrices(&p->a, &p->b);
    transpose_matrix(&p->a);
    transpose_matrix(&p->b);
    transpose_matrix(&p->c);
    memcpy(strides, p->batch_stride[0], sizeof strides);
    memcpy(p->batch_stride[0], p->batch_stride[1], sizeof strides);
    memcpy(p->batch_stride[1], strides, sizeof strides);
    p->bias_by_row = !p->bias_by_row;
}

enum { FEW_COLUMNS = 8, MANY_ROWS = 32 };

/* Few columns become few rows where these are taken as they lie, unless sums are so short that rows of c take less. */
static void turn_few_columns(te_exec *exec, te_gemm_problem *p)
{
    const te_gemm_state *state = te_gemm_state_get(exec);
    if (p->n > FEW_COLUMNS || p->m < MANY_ROWS || !state || te_gemm_is_narrow(state, p)) return;
    transpose_problem(p);
    if (!te_gemm_rows_decline(exec, p) || !te_gemm_sweep_decline(exec, p)) return;
    transpose_problem(p);
}

te_status te_gemm_problem_make(te_exec *exec, const te_gemm *g, te_gemm_problem *p)
{
    te_status status = te_check_gemm(exec, g, false);
    if (status != TE_OK) return status;

    int d = g->c.ndim;
    *p = (te_gemm_problem){.m = g->c.shape[d - 2], .n = g->c.shape[d - 1], .k = g->a.shape[d - 1], .bias = g->bias,
                           .a = matrix_of(&g->a, d), .b = matrix_of(&g->b, d), .c = matrix_of(&g->c, d),
                           .alpha = g->alpha, .accumulate = g->beta == 1, .a_key = g->a_key, .b_key = g->b_key,
                           .batches = 1, .squares = g->squares};
    for (int i = 0; i < d - 2; i++) {
        push_batch(p, g->c.shape[i], (int64_t[3]){g->a.stride[i], g->b.stride[i], g->c.stride[i]});
        p->batches *= g->c.shape[i];
    }
    if (p->m == 0 || p->n == 0 || p->batches == 0) return TE_OK;
    merge_batch_into_rows(p);
    bool one_column = p->n == 1 && p->m > 1;
    if (p->c.rs == 1 && (p->c.cs != 1 || one_column) && p->m > 1) transpose_problem(p);
    else turn_few_columns(exec, p);
    return TE_OK;
}

void te_gemm_offsets_of(const te_gemm_problem *p, int64_t batch, int64_t offsets[3])
{
    int32_t sizes[3] = {p->a.size, p->b.size, p->c.size};
    for (int i = 0; i < 3; i++) offsets[i] = 0;
    for (int d = p->batch_dims - 1; d >= 0; d--) {
        int64_t index = d == 0 ? batch : batch % p->batch_shape[d];
        if (d > 0) batch /= p->batch_shape[d];
        for (int i = 0; i < 3; i++) offsets[i] += index * p->batch_stride[i][d] * sizes[i];
    }
}

te_gemm_product te_gemm_product_of(const te_gemm_problem *p, int64_t batch)
{
    te_gemm_product t = {p->a, p->b, p->c};
    int64_t offsets[3];
    te_gemm_offsets_of(p, batch, offsets);
    t.a.data += offsets[0];
    t.b.data += offsets[1];
    t.c.data += offsets[2];
    return t;
}

te_gemm_shares te_gemm_shares_of(const te_exec *exec, const te_gemm_problem *p, int64_t most, int64_t least, int each)
{
    enum { THREAD_BYTES = 128 << 10 }; /* of b that pay for waking a thread */
    double read = (double)p->n * (double)p->k * p->b.size * (double)p->batches, pay = 1 + read / THREAD_BYTES;
    te_gemm_shares s = {.threads = pay < exec->threads ? (int)pay : exec->threads, .columns = most};
    while (s.columns > least && p->n * p->batches < each * s.threads * s.columns) s.columns /= 2;
    s.pieces = (p->n + s.columns - 1) / s.columns;
    return s;
}

/* --- the choice --------------------------------------------------------------------------------------------------- */

enum { SMALL_MACS = 128 << 10 };

static const char *decline_large(te_exec *exec, const te_gemm_problem *p)
{
    (void)exec;
    double macs = (double)p->m * (double)p->n * (double)(p->k + 1) * (double)p->batches;
    return macs > SMALL_MACS ? "large enough to share or to hand over" : NULL;
}

#ifdef TE_WITH_ONEDNN
enum { OWN_ROWS = 48, OWN_COLS = 96, OWN_FEW_COLS = 32, OWN_K = 64 };
enum { OWN_F32_K = 128, OWN_F32_FEW_ROWS = 256, OWN_F32_MANY_ROWS = 16 << 10 };
enum { OWN_F32_LARGE_MACS = 128 << 20 };
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

/* Processors with a matrix unit have first-level caches of 48 KiB and second-level ones of 2 MiB. With tiles that suit
 * these, ours takes up to 20 % less time than oneDNN but for products as small as those of 128 features, on which its
 * code for the very shape saves up to 10 %, and those of few rows by a b that it takes as it lies: 5 %. That b's rows
 * must not be pages apart, which costs it a fifth, nor it be so large that the library gets it in slices. */
static const char *decline_f32_large_caches(const te_gemm_state *state, const te_gemm_problem *p)
{
    bool   lies = p->b.cs == 1, apart = te_gemm_lines_apart(&p->b);
    double macs = (double)p->m * (double)p->n * (double)p->k;
    if (lies && (apart || macs > state->slice_macs)) return NULL;
    if (macs < OWN_F32_LARGE_MACS) return "a small product where caches are large";
    return lies && p->m <= OWN_F32_FEW_ROWS && te_gemm_reads_rows(&p->a) ? "few rows by a b that lies well" : NULL;
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
    if (state->matrix_unit) return decline_f32_large_caches(state, p);
    if (p->k <= OWN_F32_K) return NULL;
    if (p->m <= OWN_F32_FEW_ROWS && p->k * p->n >= OWN_F32_FEW_B) return NULL;
    if (suffers_from_pages(state, p)) return NULL;
    if (p->accumulate && p->m >= OWN_F32_MANY_ROWS) return NULL;
    if (!te_gemm_reads_rows(&p->a)) return "rows of a need packing";
    bool turned = p->b.rs == 1 && p->n > 1;
    return p->k * p->n < (turned ? OWN_F32_TURNED_B : OWN_F32_B) ? "b is small" : NULL;
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

/* --- slices ------------------------------------------------------------------------------------------------------- */

enum { CUT = 64 /* rows and columns are cut at multiples of it */ };

/* The half of a side that comes first. */
static int64_t first_half(int64_t extent) { return (extent / 2 + CUT - 1) / CUT * CUT; }

/* Of the outermost batch dimension that has several, entries first … first + n. */
static void take_batches(te_gemm_problem *p, int dim, int64_t first, int64_t n)
{
    te_gemm_matrix *matrices[3] = {&p->a, &p->b, &p->c};
    for (int i = 0; i < 3; i++) matrices[i]->data += first * p->batch_stride[i][dim] * matrices[i]->size;
    p->batches = p->batches / p->batch_shape[dim] * n;
    p->batch_shape[dim] = n;
}

static void take_bias(te_gemm_problem *p, int64_t first, int64_t n)
{
    if (!te_view_present(&p->bias)) return;
    p->bias.data = (char *)p->bias.data + first * p->bias.stride[0] * (int64_t)te_dtype_size(p->bias.dtype);
    p->bias.shape[0] = n;
}

static void take_rows(te_gemm_problem *p, int64_t first, int64_t n)
{
    p->a.data = te_gemm_element(&p->a, first, 0);
    p->c.data = te_gemm_element(&p->c, first, 0);
    if (p->bias_by_row) take_bias(p, first, n);
    p->m = n;
}

static void take_columns(te_gemm_problem *p, int64_t first, int64_t n)
{
    p->b.data = te_gemm_element(&p->b, 0, first);
    p->c.data = te_gemm_element(&p->c, 0, first);
    if (!p->bias_by_row) take_bias(p, first, n);
    p->n = n;
}

/* Cuts a product in two, of batches, else of the longer side of c; false: neither is long enough. */
static bool cut_in_two(const te_gemm_problem *p, te_gemm_problem *one, te_gemm_problem *other)
{
    *one = *other = *p;
    for (int d = 0; d < p->batch_dims; d++) {
        int64_t n = p->batch_shape[d], half = n / 2;
        if (n < 2) continue;
        take_batches(one, d, 0, half);
        take_batches(other, d, half, n - half);
        return true;
    }
    int64_t longer = p->m > p->n ? p->m : p->n, half = first_half(longer);
    void (*take)(te_gemm_problem *, int64_t, int64_t) = p->m > p->n ? take_rows : take_columns;
    if (longer < 2 * CUT) return false;
    take(one, 0, half);
    take(other, half, longer - half);
    return true;
}

static te_status run_with(te_exec *exec, const te_gemm_impl *impl, const te_gemm_problem *p)
{
    if (p->squares && impl->run != te_gemm_blocked_run) *p->squares = (double)NAN;
    return impl->run(exec, p);
}

/* Slices follow from the shape alone, so they do not make results depend on threads. Our own kernel looks at the
 * interrupt itself: cut, a product reads its operands more than once. */
static te_status run_slices(te_exec *exec, const te_gemm_problem *p)
{
    te_gemm_problem one, other;
    double macs = (double)p->m * (double)p->n * (double)p->k * (double)p->batches;
    if (te_cpu_stopping(exec)) return TE_OK;
    const te_gemm_impl *impl = te_gemm_choose(exec, p, NULL);
    bool whole = !exec->interrupt || impl->run == te_gemm_blocked_run || macs <= te_gemm_state_get(exec)->slice_macs;
    if (whole || !cut_in_two(p, &one, &other)) return run_with(exec, impl, p);
    te_status status = run_slices(exec, &one);
    return status == TE_OK ? run_slices(exec, &other) : status;
}

te_status te_cpu_gemm(te_exec *exec, const te_gemm *gemm)
{
    if (gemm->a.quant || gemm->b.quant) return te_gemm_quantized(exec, gemm);
    te_gemm_problem p;
    te_status status = te_gemm_problem_make(exec, gemm, &p);
    if (status != TE_OK || p.m == 0 || p.n == 0 || p.batches == 0) return status;
    if (!te_gemm_state_get(exec)) return TE_ERROR_MEMORY;
    if (p.squares) *p.squares = 0;
    return te_cpu_finish(exec, run_slices(exec, &p));
}

te_status te_cpu_gemm_with(te_exec *exec, const char *name, const te_gemm *gemm)
{
    te_gemm_problem p;
    te_status status = te_gemm_problem_make(exec, gemm, &p);
    if (status != TE_OK || p.m == 0 || p.n == 0 || p.batches == 0) return status;
    if (!te_gemm_state_get(exec)) return TE_ERROR_MEMORY;
    for (const te_gemm_impl *impl = te_gemm_impls; impl->name; impl++) {
        if (strcmp(impl->name, name) != 0) continue;
        const char *reason = impl->decline(exec, &p);
        if (reason) return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "matrix product: %s declines: %s", name, reason);
        if (p.squares) *p.squares = 0;
        return te_cpu_finish(exec, run_with(exec, impl, &p));
    }
    return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "matrix product: no implementation %s in this build", name);
}
