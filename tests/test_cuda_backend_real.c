/* test_cuda_backend_real.c - the made-up libraries beside the real ones, as far as that needs no device: the made-up
 * cuBLASLt takes every attribute that the backend sets in the sizes that the real one takes, and the driver's functions
 * are in the toolkit's stand-in for it. What is not installed is skipped, with the reason.
 */
#include "kernels/cuda/libraries.h"
#include "test.h"

#include <dlfcn.h>

/* Under AddressSanitizer: NVIDIA's library lets go of memory only when the process ends. */
__attribute__((visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "detect_leaks=0"; }

/* --- the driver --------------------------------------------------------------------------------------------------- */

static void check_driver(void)
{
    static const char *const names[] = {
#define NAME(name) #name,
        TE_CUDA_DRIVER(NAME)
#undef NAME
    };
    void *driver = dlopen("/usr/local/cuda/lib64/stubs/libcuda.so", RTLD_LAZY | RTLD_LOCAL);
    if (!driver) printf("skipped: the toolkit has no stubs/libcuda.so\n");
    for (size_t i = 0; driver && i < sizeof names / sizeof *names; i++)
        CHECK_MSG(dlsym(driver, names[i]) != NULL, "no driver has %s", names[i]);
}

/* --- cuBLASLt ----------------------------------------------------------------------------------------------------- */

static bool load(void *library, te_cuda_blas_library *table)
{
    static const char *const names[] = {
#define NAME(name) #name,
        TE_CUDA_BLAS(NAME)
#undef NAME
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *address = library ? dlsym(library, names[i]) : NULL;
        if (!address) return false;
        memcpy((char *)table + i * sizeof address, &address, sizeof address);
    }
    return true;
}

static const uint64_t value[2]; /* zeros are in every attribute's range */
static const size_t sizes[] = {1, 2, 4, 8};

static void compare(const char *what, int name, size_t size, cublasStatus_t real, cublasStatus_t fake)
{
    CHECK_MSG((real == CUBLAS_STATUS_SUCCESS) == (fake == CUBLAS_STATUS_SUCCESS),
              "%s %d of %d bytes: the library says %d, the fake %d", what, name, (int)size, (int)real, (int)fake);
}

/* Of a product: those that gemm_plan.c sets. */
static void check_products(const te_cuda_blas_library *real, const te_cuda_blas_library *fake)
{
    static const cublasLtMatmulDescAttributes_t names[] = {
        CUBLASLT_MATMUL_DESC_TRANSA,          CUBLASLT_MATMUL_DESC_TRANSB,
        CUBLASLT_MATMUL_DESC_EPILOGUE,        CUBLASLT_MATMUL_DESC_POINTER_MODE,
        CUBLASLT_MATMUL_DESC_A_SCALE_MODE,    CUBLASLT_MATMUL_DESC_B_SCALE_MODE,
        CUBLASLT_MATMUL_DESC_FAST_ACCUM,      CUBLASLT_MATMUL_DESC_BIAS_POINTER,
        CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER};
    cublasLtMatmulDesc_t of_real, of_fake;
    CHECK(real->cublasLtMatmulDescCreate(&of_real, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS);
    CHECK(fake->cublasLtMatmulDescCreate(&of_fake, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
            compare("attribute of a product", (int)names[i], sizes[k],
                    real->cublasLtMatmulDescSetAttribute(of_real, names[i], value, sizes[k]),
                    fake->cublasLtMatmulDescSetAttribute(of_fake, names[i], value, sizes[k]));
    real->cublasLtMatmulDescDestroy(of_real);
    fake->cublasLtMatmulDescDestroy(of_fake);
}

static void check_layouts(const te_cuda_blas_library *real, const te_cuda_blas_library *fake)
{
    static const cudaDataType_t types[] = {CUDA_R_64F,     CUDA_R_32F,     CUDA_R_16BF,   CUDA_R_16F,
                                           CUDA_R_8F_E4M3, CUDA_R_8F_E5M2, CUDA_R_4F_E2M1};
    static const cublasLtMatrixLayoutAttribute_t names[] = {CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                            CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET};
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        cublasLtMatrixLayout_t of_real, of_fake;
        CHECK(real->cublasLtMatrixLayoutCreate(&of_real, types[t], 64, 32, 96) == CUBLAS_STATUS_SUCCESS);
        CHECK(fake->cublasLtMatrixLayoutCreate(&of_fake, types[t], 64, 32, 96) == CUBLAS_STATUS_SUCCESS);
        for (size_t i = 0; i < 2; i++)
            for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
                compare("attribute of a matrix", (int)names[i], sizes[k],
                        real->cublasLtMatrixLayoutSetAttribute(of_real, names[i], value, sizes[k]),
                        fake->cublasLtMatrixLayoutSetAttribute(of_fake, names[i], value, sizes[k]));
        real->cublasLtMatrixLayoutDestroy(of_real);
        fake->cublasLtMatrixLayoutDestroy(of_fake);
    }
}

static void check_preferences(const te_cuda_blas_library *real, const te_cuda_blas_library *fake)
{
    static const cublasLtMatmulPreferenceAttributes_t names[] = {
        CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,   CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    cublasLtMatmulPreference_t of_real, of_fake;
    CHECK(real->cublasLtMatmulPreferenceCreate(&of_real) == CUBLAS_STATUS_SUCCESS);
    CHECK(fake->cublasLtMatmulPreferenceCreate(&of_fake) == CUBLAS_STATUS_SUCCESS);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
            compare("preference", (int)names[i], sizes[k],
                    real->cublasLtMatmulPreferenceSetAttribute(of_real, names[i], value, sizes[k]),
                    fake->cublasLtMatmulPreferenceSetAttribute(of_fake, names[i], value, sizes[k]));
    real->cublasLtMatmulPreferenceDestroy(of_real);
    fake->cublasLtMatmulPreferenceDestroy(of_fake);
}

int main(void)
{
    te_cuda_blas_library real, fake;
    void *library = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
    if (!library) library = dlopen("/usr/local/cuda/lib64/libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
    check_driver();
    if (!load(library, &real)) {
        printf("skipped: libcublasLt.so.13 is not on the loader's path\n");
        return TEST_END();
    }
    CHECK(load(dlopen(TE_CUDA_FAKE "/libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL), &fake));
    check_products(&real, &fake);
    check_layouts(&real, &fake);
    check_preferences(&real, &fake);
    return TEST_END();
}
