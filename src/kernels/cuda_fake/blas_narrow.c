/* blas_narrow.c - what the library documents of products of fp8 and fp4, and their values, one by one. */
#include "blas.h"

#include "kernels/quant.h"

#include <math.h>
#include <stdlib.h>

bool te_fake_is_narrow(cudaDataType_t type)
{
    return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2 || type == CUDA_R_4F_E2M1;
}

static bool is_fp4(const te_fake_layout *l) { return l->type == CUDA_R_4F_E2M1; }

/* --- what is supported -------------------------------------------------------------------------------------------- */

static bool is_block(int32_t mode)
{
    return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F || mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
}

static bool modes_fit(const te_fake_desc *d, bool fp4, int capability)
{
    int32_t a = d->mode[0], b = d->mode[1];
    if (is_block(a) && is_block(b))
        return !fp4 && capability == 90 && !d->fast && !(a == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F && a == b);
    if (a != b) return false;
    if (a == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) return !fp4 && capability >= 89;
    if (a == CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0) return !fp4 && capability >= 100;
    return a == CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 && fp4 && capability >= 100;
}

/* Lines of whole 16 bytes. */
static bool is_even(const te_fake_layout *l)
{
    int64_t elements = is_fp4(l) ? 32 : te_fake_is_narrow(l->type) ? 16 : l->type == CUDA_R_32F ? 4 : 8;
    return l->rows % elements == 0 && l->ld % elements == 0 && l->columns % 16 == 0 && l->batch == 1;
}

cublasStatus_t te_fake_check_narrow(const te_fake_desc *d, const te_fake_layout *a, const te_fake_layout *b,
                                    const te_fake_layout *c, int capability)
{
    bool fp4 = is_fp4(a), together = capability < 100 || capability >= 120 || fp4;
    bool bias = d->epilogue == CUBLASLT_EPILOGUE_BIAS;
    if (!te_fake_is_narrow(a->type) || !te_fake_is_narrow(b->type) || fp4 != is_fp4(b))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (a->type == CUDA_R_8F_E5M2 && b->type == CUDA_R_8F_E5M2) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (d->compute != CUBLAS_COMPUTE_32F || te_fake_is_narrow(c->type) || c->type == CUDA_R_64F)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (together && !(d->op_a && !d->op_b)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!modes_fit(d, fp4, capability)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!is_even(a) || !is_even(b) || !is_even(c)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (d->epilogue != CUBLASLT_EPILOGUE_DEFAULT && !(bias && c->type != CUDA_R_32F))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    return CUBLAS_STATUS_SUCCESS;
}

/* --- factors ------------------------------------------------------------------------------------------------------ */

static int64_t blocks_of(int64_t n, int64_t block) { return (n + block - 1) / block; }

static int64_t even(int64_t n, int64_t to) { return blocks_of(n, to) * to; }

/* Bytes of the factors of `lines` by k elements. */
static int64_t factor_bytes(int32_t mode, int64_t lines, int64_t k)
{
    switch (mode) {
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F:
        return 4 * lines * blocks_of(k, 128);
    case CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F:
        return 4 * blocks_of(lines, 128) * even(blocks_of(k, 128), 4);
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0:
        return even(lines, 128) * even(blocks_of(k, 32), 4);
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3:
        return even(lines, 128) * even(blocks_of(k, 16), 4);
    default:
        return 4;
    }
}

/* Blocks in pieces of 128 lines by 4: 32 rows of 16 bytes, each with four factors of the lines r, r + 32, r + 64, r
 * + 96. */
static uint8_t tiled(const uint8_t *factors, int64_t line, int64_t block, int64_t blocks)
{
    int64_t piece = line / 128 * (even(blocks, 4) / 4) + block / 4, within = line % 128;
    return factors[512 * piece + 16 * (within % 32) + 4 * (within / 32) + block % 4];
}

static double factor(int32_t mode, const void *factors, int64_t line, int64_t step, int64_t lines, int64_t k)
{
    const float *f = factors;
    if (!factors) return 1;
    switch (mode) {
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F:
        return f[step / 128 * lines + line];
    case CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F:
        return f[line / 128 * even(blocks_of(k, 128), 4) + step / 128];
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0:
        return te_e8m0_to_f32(tiled(factors, line, step / 32, blocks_of(k, 32)));
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3:
        return te_f8e4m3_to_f32(tiled(factors, line, step / 16, blocks_of(k, 16)));
    default:
        return *f;
    }
}

static bool factors_there(const te_fake_desc *d, int operand, int64_t lines, int64_t k)
{
    const void *at = d->factors[operand];
    int32_t mode = d->mode[operand];
    if (!at) return mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    if (mode != CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F && (uintptr_t)at % 16) return false;
    return te_fake_contains((CUdeviceptr)(uintptr_t)at, (size_t)factor_bytes(mode, lines, k));
}

static bool elements_there(const te_fake_layout *l, const void *at)
{
    int64_t elements = (l->columns - 1) * l->ld + l->rows;
    return (uintptr_t)at % 16 == 0 &&
           te_fake_contains((CUdeviceptr)(uintptr_t)at, (size_t)(is_fp4(l) ? elements / 2 : elements));
}

bool te_fake_narrow_memory(const te_fake_desc *d, const te_fake_layout *a, const te_fake_layout *b, const void *pa,
                           const void *pb, const void *pc)
{
    int64_t m = d->op_a ? a->columns : a->rows, k = d->op_a ? a->rows : a->columns, n = d->op_b ? b->rows : b->columns;
    return elements_there(a, pa) && elements_there(b, pb) && (uintptr_t)pc % 16 == 0 && factors_there(d, 0, m, k) &&
           factors_there(d, 1, n, k);
}

/* --- values ------------------------------------------------------------------------------------------------------- */

static double element(const uint8_t *base, cudaDataType_t type, int64_t i)
{
    if (type == CUDA_R_8F_E4M3) return te_f8e4m3_to_f32(base[i]);
    if (type == CUDA_R_8F_E5M2) return te_f8e5m2_to_f32(base[i]);
    return te_e2m1_to_f32((uint8_t)(base[i / 2] >> (i % 2 * 4) & 15));
}

double *te_fake_unpack_narrow(const te_fake_desc *d, const te_fake_layout *l, int operand, const void *base,
                              int64_t lines, int64_t k)
{
    bool k_is_row = operand == 0 ? d->op_a : !d->op_b;
    double *out = malloc((size_t)(lines * k + 1) * sizeof *out);
    for (int64_t j = 0; j < k; j++)
        for (int64_t i = 0; i < lines; i++)
            out[j * lines + i] = element(base, l->type, k_is_row ? j + i * l->ld : i + j * l->ld) *
                                 factor(d->mode[operand], d->factors[operand], i, j, lines, k);
    return out;
}

/* --- sums --------------------------------------------------------------------------------------------------------- */

enum { STEP = 32, PROMOTED = 128, FRACTION = 13 };

static int short_sums = -1; /* as the environment says */

TE_FAKE void te_fake_set_short_sums(bool are_short) { short_sums = are_short; }

bool te_fake_sums_are_short(int capability)
{
    if (short_sums < 0) short_sums = getenv("TE_FAKE_SHORT_SUMS") != NULL;
    return short_sums && capability < 100;
}

/* 2^-13 of x's leading bit. */
static double unit_of(double x)
{
    int exponent;
    frexp(x, &exponent);
    return ldexp(1, exponent - 1 - FRACTION);
}

/* What was added up before and an instruction's products, cut off 13 bits below the leading bit of the largest, as
 * their sum is below its own. */
static double short_step(double before, const double *products, int n)
{
    double largest = fabs(before), plain = before, sum = 0;
    for (int i = 0; i < n; i++) {
        plain += products[i];
        if (fabs(products[i]) > largest) largest = fabs(products[i]);
    }
    if (!(largest > 0) || !isfinite(plain)) return plain;
    double unit = unit_of(largest);
    for (int i = 0; i < n; i++) sum += trunc(products[i] / unit);
    sum = (sum + trunc(before / unit)) * unit;
    return sum == 0 ? 0 : trunc(sum / unit_of(sum)) * unit_of(sum);
}

/* Unless they may stay short, sums of 128 are added up in float32. */
void te_fake_short_sums(const te_fake_desc *d, double *sums, const double *a, const double *b, int64_t m, int64_t n,
                        int64_t k, int64_t j)
{
    for (int64_t i = 0; i < m; i++) {
        double products[STEP], sum = 0;
        float whole = 0;
        for (int64_t first = 0; first < k; first += STEP) {
            int steps = (int)(k - first < STEP ? k - first : STEP);
            for (int l = 0; l < steps; l++) products[l] = a[(first + l) * m + i] * b[(first + l) * n + j];
            sum = short_step(sum, products, steps);
            if (d->fast || (first + STEP) % PROMOTED != 0) continue;
            whole += (float)sum;
            sum = 0;
        }
        sums[i] = (double)whole + sum;
    }
}
