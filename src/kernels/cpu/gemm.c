/* gemm.c - the CPU's matrix product: what a device keeps for it, and large products cut into slices. */
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
        state->f32_in_unit = &te_gemm_kernel_f32_amx;
        device->tiled_attention = &te_attention_bf16_amx;
    }
#endif
#endif
    device->gemm = state;
    device->gemm_release = state_release;
    return state;
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
