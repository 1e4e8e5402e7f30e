/* cuda_twins.h - operands of hand-written CUDA kernels and of the CPU's, which the results are compared with. */
#ifndef TE_TEST_CUDA_TWINS_H
#define TE_TEST_CUDA_TWINS_H

#include "cuda_device.h"

#include "kernels/dtype.h"

static cuda_device  cuda;
static te_cuda_plan plan;
static uint64_t     state = 0x2545f4914f6cdd1du;

/* --- operands ---------------------------------------------------------------------------------------------------- */

/* The same contents twice: for the kernel and for the CPU. */
typedef struct twins {
    te_view gpu, cpu;
    size_t  bytes;
} twins;

typedef enum layout { DENSE, PADDED, SWAPPED } layout; /* SWAPPED: the last two dimensions change places in memory */

static inline twins twins_new(te_dtype dtype, layout l, int ndim, const int64_t *shape)
{
    twins   t = {.gpu = test_view(NULL, dtype, ndim, shape)};
    int64_t stride = 1;
    for (int i = 0; i < ndim; i++) {
        int d = ndim - 1 - i;
        if (l == SWAPPED && ndim > 1 && i < 2) d = ndim - 2 + i;
        t.gpu.stride[d] = stride;
        stride *= (shape[d] ? shape[d] : 1) + (l == PADDED ? 3 : 0);
    }
    t.bytes = (size_t)stride * te_dtype_size(dtype);
    t.cpu = t.gpu;
    t.gpu.data = test_scratch(&cuda.exec, t.bytes);
    t.cpu.data = test_scratch(&cuda.exec, t.bytes);
    for (int64_t i = 0; i < stride; i++) {
        double special[] = {INFINITY, -INFINITY, NAN, 0.0, -0.0};
        double x = test_uniform(&state, -4, 4);
        te_store_f64(t.gpu.data, dtype, i, test_random(&state) % 24 == 0 ? special[test_random(&state) % 5] : x);
    }
    memcpy(t.cpu.data, t.gpu.data, t.bytes);
    return t;
}

static inline void each(twins *t, double (*value)(double), double bound)
{
    int64_t n = (int64_t)(t->bytes / te_dtype_size(t->gpu.dtype));
    for (int64_t i = 0; i < n; i++)
        te_store_f64(t->gpu.data, t->gpu.dtype, i,
                     value ? value(te_load_f64(t->gpu.data, t->gpu.dtype, i))
                           : (double)(test_random(&state) % (uint32_t)bound));
    memcpy(t->cpu.data, t->gpu.data, t->bytes);
}

static inline void twins_free(twins *t)
{
    free(t->gpu.data);
    free(t->cpu.data);
}

/* To the bit, but that every NaN is as good as another; or within `tolerance` relatively. */
static inline bool same(const twins *t, double tolerance)
{
    int64_t n = (int64_t)(t->bytes / te_dtype_size(t->gpu.dtype));
    size_t  size = te_dtype_size(t->gpu.dtype);
    for (int64_t i = 0; i < n; i++) {
        double a = te_load_f64(t->gpu.data, t->gpu.dtype, i), b = te_load_f64(t->cpu.data, t->cpu.dtype, i);
        if (memcmp((char *)t->gpu.data + (size_t)i * size, (char *)t->cpu.data + (size_t)i * size, size) == 0) continue;
        if ((isnan(a) && isnan(b)) || fabs(a - b) <= tolerance * fmax(fabs(a), fabs(b))) continue;
        fprintf(stderr, "element %lld of %lld (%s): %.9g, want %.9g\n", (long long)i, (long long)n,
                te_dtype_name(t->gpu.dtype), a, b);
        return false;
    }
    return true;
}

#define CHECK_PLAN(made) CHECK_MSG((made) == TE_OK && cuda_plan_run(&cuda, &plan) == TE_OK, "%s", cuda.exec.message)

#endif
