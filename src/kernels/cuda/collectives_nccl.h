/* collectives_nccl.h - NCCL's functions, loaded as the other libraries are. */
#ifndef TE_KERNELS_CUDA_COLLECTIVES_NCCL_H
#define TE_KERNELS_CUDA_COLLECTIVES_NCCL_H

#include "libraries.h"

#include <nccl.h>

#define TE_CUDA_NCCL(X)                                                                                                \
    X(ncclGetVersion) X(ncclGetUniqueId) X(ncclCommInitRankConfig) X(ncclCommFinalize) X(ncclCommDestroy)              \
    X(ncclCommAbort) X(ncclGetErrorString) X(ncclGetLastError) X(ncclCommGetAsyncError) X(ncclAllReduce)               \
    X(ncclReduceScatter) X(ncclAllGather) X(ncclBroadcast) X(ncclSend) X(ncclRecv) X(ncclGroupStart) X(ncclGroupEnd)

#define TE_CUDA_NCCL_MEMBER(name) __typeof__(&name) name;
typedef struct te_cuda_nccl {
    TE_CUDA_NCCL(TE_CUDA_NCCL_MEMBER)
} te_cuda_nccl;
#undef TE_CUDA_NCCL_MEMBER

/* All of the above are in NCCL 2.14; 2.18 is what CUDA 12.1, the oldest that the backend takes, came with. */
enum { TE_NCCL_OLDEST = NCCL_VERSION(2, 18, 0) };

#endif
