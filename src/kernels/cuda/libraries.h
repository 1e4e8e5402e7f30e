/* libraries.h - NVIDIA's libraries, loaded when needed and called through tables; nothing is linked.
 *
 * A table has one member per function under the function's own name, so that calls read like ordinary ones:
 * d->driver.cuMemAlloc(…). Headers give the types. Each name is searched on the loader's path, in $CUDA_HOME and
 * $CUDA_PATH, in /usr/local/cuda and in Python environments (the nvidia packages), or only in $TETRAIN_CUDA_LIBRARIES
 * when that is set.
 */
#ifndef TE_KERNELS_CUDA_LIBRARIES_H
#define TE_KERNELS_CUDA_LIBRARIES_H

#include "../kernels.h"

#include <cublasLt.h>
#include <cuda.h>
#include <nvrtc.h>

/* Names as the library exports them: cuda.h maps plain names to the versioned ones, for calls and members alike.
 * Drivers for CUDA 12.1 have all of these; cuEventElapsedTime_v2, say, came with 12.8 and takes the same. */
#define TE_CUDA_DRIVER(X)                                                                                              \
    X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString) X(cuDeviceGetCount) X(cuDeviceGet)           \
    X(cuDeviceGetName) X(cuDeviceGetAttribute) X(cuDeviceTotalMem_v2) X(cuDevicePrimaryCtxRetain)                      \
    X(cuDevicePrimaryCtxRelease_v2) X(cuDevicePrimaryCtxGetState) X(cuCtxGetCurrent) X(cuCtxSetCurrent)                \
    X(cuMemAlloc_v2) X(cuMemFree_v2) X(cuMemGetInfo_v2) X(cuMemHostAlloc) X(cuMemFreeHost)                             \
    X(cuMemcpyHtoDAsync_v2) X(cuMemcpyDtoHAsync_v2) X(cuMemcpyDtoDAsync_v2)                                            \
    X(cuMemsetD8Async) X(cuStreamCreate) X(cuStreamDestroy_v2) X(cuStreamSynchronize) X(cuStreamQuery)                 \
    X(cuEventCreate) X(cuEventDestroy_v2) X(cuEventRecord) X(cuEventQuery) X(cuEventSynchronize)                       \
    X(cuEventElapsedTime) X(cuModuleLoadData) X(cuModuleUnload) X(cuModuleGetFunction) X(cuFuncGetAttribute)           \
    X(cuFuncSetAttribute) X(cuLaunchKernel) X(cuStreamBeginCapture_v2) X(cuStreamEndCapture)                           \
    X(cuGraphInstantiateWithFlags) X(cuGraphLaunch) X(cuGraphExecDestroy) X(cuGraphDestroy)

#define TE_CUDA_NVRTC(X)                                                                                               \
    X(nvrtcVersion) X(nvrtcGetErrorString) X(nvrtcGetNumSupportedArchs) X(nvrtcGetSupportedArchs)                      \
    X(nvrtcCreateProgram) X(nvrtcDestroyProgram) X(nvrtcCompileProgram) X(nvrtcGetCUBINSize) X(nvrtcGetCUBIN)          \
    X(nvrtcGetPTXSize) X(nvrtcGetPTX) X(nvrtcGetProgramLogSize) X(nvrtcGetProgramLog)

#define TE_CUDA_BLAS(X)                                                                                                \
    X(cublasLtCreate) X(cublasLtDestroy) X(cublasLtGetVersion) X(cublasLtGetStatusName) X(cublasLtMatmulDescCreate)    \
    X(cublasLtMatmulDescDestroy) X(cublasLtMatmulDescSetAttribute) X(cublasLtMatrixLayoutCreate)                       \
    X(cublasLtMatrixLayoutDestroy) X(cublasLtMatrixLayoutSetAttribute) X(cublasLtMatmulPreferenceCreate)               \
    X(cublasLtMatmulPreferenceDestroy) X(cublasLtMatmulPreferenceSetAttribute) X(cublasLtMatmulAlgoGetHeuristic)       \
    X(cublasLtMatmulAlgoCheck) X(cublasLtMatmul)

#define TE_CUDA_MEMBER(name) __typeof__(&name) name;
typedef struct te_cuda_driver {
    TE_CUDA_DRIVER(TE_CUDA_MEMBER)
} te_cuda_driver;
typedef struct te_cuda_nvrtc {
    TE_CUDA_NVRTC(TE_CUDA_MEMBER)
} te_cuda_nvrtc;
typedef struct te_cuda_blas_library {
    TE_CUDA_BLAS(TE_CUDA_MEMBER)
} te_cuda_blas_library;
#undef TE_CUDA_MEMBER

/* Each fills a table or fails with a message that says what was looked for and where. Libraries stay loaded: the driver
 * keeps threads of its own. A driver takes what libraries of its own major version and of older ones make, so one for
 * CUDA 12 (12040 for 12.4) is given those of 12 where both are there. */
te_status te_cuda_load_driver(te_exec *exec, te_cuda_driver *table);
te_status te_cuda_load_nvrtc(te_exec *exec, int driver_version, te_cuda_nvrtc *table);
te_status te_cuda_load_blas(te_exec *exec, int driver_version, te_cuda_blas_library *table);

/* For tables declared elsewhere: n function pointers, named in `functions`, from the first of `files` (NULL at the end)
 * that can be opened. */
te_status te_cuda_load_library(te_exec *exec, const char *const *files, const char *const *functions, size_t n,
                               void *table);

#endif
