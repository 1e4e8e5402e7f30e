/* blas.c - cuBLASLt's entry points: plain loops, and the restrictions that the real library documents. */
#include "blas.h"

#include "kernels/dtype.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        int code = te_fake_enter(__func__);                                                                            \
        if (code) return (cublasStatus_t)code;                                                                         \
    } while (0)

typedef te_fake_desc desc;
typedef te_fake_layout layout;

static desc *desc_of(cublasLtMatmulDesc_t d) { return (desc *)(void *)d; }
static layout *layout_of(cublasLtMatrixLayout_t l) { return (layout *)(void *)l; }

/* --- objects ------------------------------------------------------------------------------------------------------ */

static void *make(size_t size)
{
    te_fake_made(1);
    return calloc(1, size);
}

static cublasStatus_t destroy(void *object)
{
    te_fake_made(-1);
    free(object);
    return CUBLAS_STATUS_SUCCESS;
}

TE_FAKE cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    ENTER();
    if (te_fake_driver() < 13000) return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = make(8);
    return CUBLAS_STATUS_SUCCESS;
}

TE_FAKE cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return destroy(handle); }
TE_FAKE size_t cublasLtGetVersion(void) { return 130000; }
TE_FAKE const char *cublasLtGetStatusName(cublasStatus_t status)
{
    return status == CUBLAS_STATUS_NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_FAKED";
}

TE_FAKE cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *out, cublasComputeType_t compute,
                                                cudaDataType_t scale)
{
    ENTER();
    if ((scale == CUDA_R_64F) != (compute == CUBLAS_COMPUTE_64F)) return CUBLAS_STATUS_NOT_SUPPORTED;
    desc *d = make(sizeof *d);
    d->compute = compute;
    d->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    *out = (cublasLtMatmulDesc_t)(void *)d;
    return CUBLAS_STATUS_SUCCESS;
}

TE_FAKE cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { return destroy(d); }

TE_FAKE cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle, cublasLtMatmulDescAttributes_t name,
                                                      const void *value, size_t size)
{
    desc *d = desc_of(handle);
    void *field = name == CUBLASLT_MATMUL_DESC_TRANSA            ? (void *)&d->op_a
                  : name == CUBLASLT_MATMUL_DESC_TRANSB          ? (void *)&d->op_b
                  : name == CUBLASLT_MATMUL_DESC_EPILOGUE        ? (void *)&d->epilogue
                  : name == CUBLASLT_MATMUL_DESC_BIAS_POINTER    ? (void *)&d->bias
                  : name == CUBLASLT_MATMUL_DESC_POINTER_MODE    ? (void *)&d->pointers
                  : name == CUBLASLT_MATMUL_DESC_A_SCALE_POINTER ? (void *)&d->factors[0]
                  : name == CUBLASLT_MATMUL_DESC_B_SCALE_POINTER ? (void *)&d->factors[1]
                  : name == CUBLASLT_MATMUL_DESC_A_SCALE_MODE    ? (void *)&d->mode[0]
                  : name == CUBLASLT_MATMUL_DESC_B_SCALE_MODE    ? (void *)&d->mode[1]
                  : name == CUBLASLT_MATMUL_DESC_FAST_ACCUM      ? (void *)&d->fast
                                                                 : NULL;
    bool word = field == &d->op_a || field == &d->op_b || field == &d->epilogue || field == &d->pointers ||
                field == &d->mode[0] || field == &d->mode[1];
    size_t wanted = word ? 4 : field == &d->fast ? 1 : 8;
    ENTER();
    if (!field || size != wanted) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(field, value, size);
    return CUBLAS_STATUS_SUCCESS;
}

TE_FAKE cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType_t type, uint64_t rows,
                                                  uint64_t columns, int64_t ld)
{
    ENTER();
    layout *l = make(sizeof *l);
    *l = (layout){type, (int64_t)rows, (int64_t)columns, ld, 0, 1};
    *out = (cublasLtMatrixLayout_t)(void *)l;
    return CUBLAS_STATUS_SUCCESS;
}

TE_FAKE cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { return destroy(l); }

TE_FAKE cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t handle,
                                                        cublasLtMatrixLayoutAttribute_t name, const void *value,
                                                        size_t size)
{
    layout *l = layout_of(handle);
    ENTER();
    if (name == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT && size == 4)
        memcpy(&l->batch, value, 4);
    else if (name == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET && size == 8)
        memcpy(&l->step, value, 8);
    else
        return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

TE_FAKE cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *out)
{
    ENTER();
    *out = make(8);
    return CUBLAS_STATUS_SUCCESS;
}

TE_FAKE cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { return destroy(p); }

TE_FAKE cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                            cublasLtMatmulPreferenceAttributes_t name,
                                                            const void *value, size_t size)
{
    (void)p, (void)value;
    ENTER();
    return size == (name == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8 : 4) ? CUBLAS_STATUS_SUCCESS
                                                                              : CUBLAS_STATUS_INVALID_VALUE;
}

/* --- what is supported -------------------------------------------------------------------------------------------- */

enum { MOST_BATCHES = 65535 }; /* that all of the real library's kernels take */

static bool fits(const layout *l) { return l->rows > 0 && l->columns > 0 && l->ld >= l->rows && l->batch > 0; }

static cublasStatus_t check(const desc *d, const layout *a, const layout *b, const layout *c)
{
    int64_t m = d->op_a ? a->columns : a->rows, k = d->op_a ? a->rows : a->columns;
    int64_t k2 = d->op_b ? b->columns : b->rows, n = d->op_b ? b->rows : b->columns;
    bool f64 = d->compute == CUBLAS_COMPUTE_64F;
    if (!fits(a) || !fits(b) || !fits(c) || m != c->rows || n != c->columns || k != k2 || a->batch != c->batch ||
        b->batch != c->batch)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (c->batch > MOST_BATCHES) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (te_fake_is_narrow(a->type) || te_fake_is_narrow(b->type))
        return te_fake_check_narrow(d, a, b, c, te_fake_capability());
    if (d->factors[0] || d->factors[1] || d->mode[0] || d->mode[1]) return CUBLAS_STATUS_INVALID_VALUE;
    if (a->type != b->type || (c->type != a->type && c->type != CUDA_R_32F) || f64 != (a->type == CUDA_R_64F))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (d->epilogue == CUBLASLT_EPILOGUE_DEFAULT) return CUBLAS_STATUS_SUCCESS;
    bool takes_bias = d->epilogue == CUBLASLT_EPILOGUE_BIAS && !f64 && (uintptr_t)d->bias % 16 == 0;
    return takes_bias ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

enum { ALGORITHMS = 3, FASTEST = 1 };
static uint64_t epilogue_cost, cold_cost[ALGORITHMS], hot_cost[ALGORITHMS], spent;

TE_FAKE void te_fake_set_epilogue_cost(uint64_t nanoseconds) { epilogue_cost = nanoseconds; }

TE_FAKE void te_fake_set_product_costs(const uint64_t *cold, const uint64_t *hot)
{
    memcpy(cold_cost, cold, sizeof cold_cost);
    memcpy(hot_cost, hot, sizeof hot_cost);
    spent = 0;
}

/* What a product costs, and a call of the algorithm's name for it. */
static uint64_t cost_of(int algorithm)
{
    static const char *const names[ALGORITHMS] = {"product 0", "product 1", "product 2"};
    te_fake_enter(names[algorithm]);
    uint64_t cost = spent < TE_FAKE_HOT ? cold_cost[algorithm] : hot_cost[algorithm];
    if (!cost) return algorithm == FASTEST ? 1000 : 2000;
    spent += cost;
    return cost;
}

/* Under TE_FAKE_ONE_PRODUCT one, which nobody has to time. */
static int algorithms(void)
{
    static int n;
    if (!n) n = getenv("TE_FAKE_ONE_PRODUCT") ? 1 : ALGORITHMS;
    return n;
}

TE_FAKE cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t d,
                                                      cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                      cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t e,
                                                      cublasLtMatmulPreference_t preference, int wanted,
                                                      cublasLtMatmulHeuristicResult_t *found, int *n)
{
    (void)handle, (void)e, (void)preference;
    ENTER();
    cublasStatus_t status = check(desc_of(d), layout_of(a), layout_of(b), layout_of(c));
    *n = 0;
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < algorithms() && i < wanted; i++, ++*n) {
        memset(&found[i], 0, sizeof found[i]);
        found[i].algo.data[0] = (uint64_t)i + 1;
        found[i].workspaceSize = (size_t)i << 20;
    }
    return status;
}

TE_FAKE cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t d,
                                               cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                               cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t e,
                                               const cublasLtMatmulAlgo_t *algorithm,
                                               cublasLtMatmulHeuristicResult_t *result)
{
    (void)handle, (void)e;
    ENTER();
    if (algorithm->data[0] < 1 || algorithm->data[0] > ALGORITHMS) return CUBLAS_STATUS_INVALID_VALUE;
    result->workspaceSize = (size_t)(algorithm->data[0] - 1) << 20;
    return check(desc_of(d), layout_of(a), layout_of(b), layout_of(c));
}

/* --- the product -------------------------------------------------------------------------------------------------- */

typedef struct product {
    desc d;
    layout a, b, c;
    const char *pa, *pb;
    char *pc;
    double alpha, beta;
    const float *device_alpha, *device_beta; /* read when the product runs */
} product;

static int element_size(cudaDataType_t type) { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }

static double get(const char *base, cudaDataType_t type, int64_t i)
{
    uint16_t half;
    if (type == CUDA_R_64F) return ((const double *)(const void *)base)[i];
    if (type == CUDA_R_32F) return ((const float *)(const void *)base)[i];
    memcpy(&half, base + 2 * i, 2);
    return type == CUDA_R_16BF ? te_bf16_to_f32(half) : te_f16_to_f32(half);
}

static void put(char *base, cudaDataType_t type, int64_t i, double value)
{
    if (type == CUDA_R_64F)
        ((double *)(void *)base)[i] = value;
    else if (type == CUDA_R_32F)
        ((float *)(void *)base)[i] = (float)value;
    else {
        uint16_t half = type == CUDA_R_16BF ? te_f32_to_bf16((float)value) : te_f32_to_f16((float)value);
        memcpy(base + 2 * i, &half, 2);
    }
}

/* 10 bits of fraction are left. */
static double round_to_tf32(double x)
{
    int exponent;
    double fraction = frexp(x, &exponent);
    return ldexp(rint(ldexp(fraction, 11)), exponent - 11);
}

/* op(x) as doubles, the lines fastest. */
static double *unpack(const char *base, const layout *l, bool k_is_row, int64_t lines, int64_t k, bool tf32)
{
    double *out = malloc((size_t)(lines * k + 1) * sizeof *out);
    for (int64_t j = 0; j < k; j++)
        for (int64_t i = 0; i < lines; i++)
            out[j * lines + i] = get(base, l->type, k_is_row ? j + i * l->ld : i + j * l->ld);
    for (int64_t i = 0; tf32 && i < lines * k; i++) out[i] = round_to_tf32(out[i]);
    return out;
}

enum { LINES = 16, COLUMNS = 4 }; /* whose sums stay in registers */

/* sums[c * m + i] of column j + c for `lines` and `columns` from line i on. Four steps at a time, in an order that does
 * not depend on how many go together. The arrays are those of one_product, and no sanitizer watches them: that is the
 * caller's to say, into which this goes. */
__attribute__((no_sanitize("address", "undefined"), always_inline)) static inline void
block_sums(double *restrict sums, const double *restrict a, const double *restrict b, int64_t m, int64_t n, int64_t k,
           int lines, int columns)
{
    double s[COLUMNS][LINES] = {{0}};
    int64_t l = 0;
    for (; l + 4 <= k; l += 4) {
        const double *x = a + l * m, *y = b + l * n;
        for (int c = 0; c < columns; c++)
            for (int i = 0; i < lines; i++)
                s[c][i] += x[i] * y[c] + x[m + i] * y[n + c] +
                           (x[2 * m + i] * y[2 * n + c] + x[3 * m + i] * y[3 * n + c]);
    }
    for (; l < k; l++)
        for (int c = 0; c < columns; c++)
            for (int i = 0; i < lines; i++) s[c][i] += a[l * m + i] * b[l * n + c];
    for (int c = 0; c < columns; c++) memcpy(sums + c * m, s[c], (size_t)lines * sizeof **s);
}

/* sums[c * m + i] of line i and column j + c, so many columns. */
__attribute__((no_sanitize("address", "undefined"))) static void
column_sums(double *sums, const double *a, const double *b, int64_t m, int64_t n, int64_t k, int64_t j, int columns)
{
    for (int64_t i = 0; i < m; i += LINES)
        if (m - i >= LINES && columns == COLUMNS)
            block_sums(sums + i, a + i, b + j, m, n, k, LINES, COLUMNS);
        else
            block_sums(sums + i, a + i, b + j, m, n, k, (int)(m - i < LINES ? m - i : LINES), columns);
}

static void put_column(const product *p, char *base_c, const double *sums, int64_t m, int64_t j)
{
    for (int64_t i = 0; i < m; i++) {
        double sum = p->alpha * sums[i];
        if (p->beta != 0) sum += p->beta * get(base_c, p->c.type, i + j * p->c.ld);
        if (p->d.epilogue == CUBLASLT_EPILOGUE_BIAS) sum += get(p->d.bias, p->c.type, i);
        put(base_c, p->c.type, i + j * p->c.ld, sum);
    }
}

static void one_product(const product *p, int64_t batch)
{
    int64_t m = p->c.rows, n = p->c.columns, k = p->d.op_a ? p->a.rows : p->a.columns;
    const char *base_a = p->pa + batch * p->a.step * element_size(p->a.type);
    const char *base_b = p->pb + batch * p->b.step * element_size(p->b.type);
    char *base_c = p->pc + batch * p->c.step * element_size(p->c.type);
    bool tf32 = p->d.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    bool narrow = te_fake_is_narrow(p->a.type);
    double *a =
        narrow ? te_fake_unpack_narrow(&p->d, &p->a, 0, p->pa, m, k) : unpack(base_a, &p->a, p->d.op_a, m, k, tf32);
    double *b =
        narrow ? te_fake_unpack_narrow(&p->d, &p->b, 1, p->pb, n, k) : unpack(base_b, &p->b, !p->d.op_b, n, k, tf32);
    bool shortly = narrow && te_fake_sums_are_short(te_fake_capability());
    double *sums = malloc((size_t)m * COLUMNS * sizeof *sums);
    for (int64_t j = 0, columns; j < n; j += columns) {
        columns = n - j < COLUMNS ? n - j : COLUMNS;
        if (!shortly) column_sums(sums, a, b, m, n, k, j, (int)columns);
        for (int64_t c = 0; c < columns; c++) {
            if (shortly) te_fake_short_sums(&p->d, sums + c * m, a, b, m, n, k, j + c);
            put_column(p, base_c, sums + c * m, m, j + c);
        }
    }
    free(sums);
    free(a);
    free(b);
}

static void run_product(void *work)
{
    product *p = work;
    if (p->device_alpha) {
        p->alpha = (double)*p->device_alpha;
        p->beta = (double)*p->device_beta;
    }
    for (int64_t batch = 0; batch < p->c.batch; batch++) one_product(p, batch);
}

static bool inside(const char *base, const layout *l)
{
    int64_t span = (l->columns - 1) * l->ld + l->rows + (l->batch - 1) * l->step;
    return te_fake_contains((CUdeviceptr)(uintptr_t)base, (size_t)(span * element_size(l->type)));
}

TE_FAKE cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t d, const void *alpha, const void *a,
                                      cublasLtMatrixLayout_t la, const void *b, cublasLtMatrixLayout_t lb,
                                      const void *beta, const void *c, cublasLtMatrixLayout_t lc, void *out,
                                      cublasLtMatrixLayout_t lout, const cublasLtMatmulAlgo_t *algorithm,
                                      void *workspace, size_t workspace_bytes, cudaStream_t stream)
{
    (void)handle, (void)lout;
    ENTER();
    product p = {*desc_of(d), *layout_of(la), *layout_of(lb), *layout_of(lc), a, b, out, 0, 0, NULL, NULL};
    bool f64 = p.d.compute == CUBLAS_COMPUTE_64F;
    size_t wanted = algorithm ? (size_t)(algorithm->data[0] - 1) << 20 : 0;
    if (p.d.pointers == CUBLASLT_POINTER_MODE_DEVICE) {
        if (f64 || !te_fake_contains((CUdeviceptr)(uintptr_t)alpha, sizeof(float)) ||
            !te_fake_contains((CUdeviceptr)(uintptr_t)beta, sizeof(float)))
            return CUBLAS_STATUS_INVALID_VALUE;
        p.device_alpha = alpha;
        p.device_beta = beta;
    } else {
        p.alpha = f64 ? *(const double *)alpha : (double)*(const float *)alpha;
        p.beta = f64 ? *(const double *)beta : (double)*(const float *)beta;
    }
    cublasStatus_t status = check(&p.d, &p.a, &p.b, &p.c);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    bool narrow = te_fake_is_narrow(p.a.type);
    bool there = narrow ? te_fake_narrow_memory(&p.d, &p.a, &p.b, a, b, out) : inside(a, &p.a) && inside(b, &p.b);
    if (c != out || !there || !inside(out, &p.c)) return CUBLAS_STATUS_INVALID_VALUE;
    if (wanted > workspace_bytes || (wanted && !te_fake_contains((CUdeviceptr)(uintptr_t)workspace, wanted)))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (p.d.epilogue == CUBLASLT_EPILOGUE_BIAS &&
        !te_fake_contains((CUdeviceptr)(uintptr_t)p.d.bias, (size_t)(p.c.rows * element_size(p.c.type))))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (narrow) te_fake_enter(p.d.fast ? "fast product" : "narrow product");
    uint64_t cost = cost_of(algorithm ? (int)algorithm->data[0] - 1 : 0);
    if (p.d.epilogue != CUBLASLT_EPILOGUE_DEFAULT) cost += epilogue_cost;
    return te_fake_queue((CUstream)stream, run_product, &p, sizeof p, cost) == CUDA_SUCCESS
               ? CUBLAS_STATUS_SUCCESS
               : CUBLAS_STATUS_EXECUTION_FAILED;
}
