/* ready.h - kernels that the build has compiled: the hand-written ones in the variants that training, sampling and
 * recipes use most, for sm_80, sm_89, sm_90a and sm_100. They stand in the module, and are found by the hash of their
 * source before the cache on disk and NVRTC are asked. What is not among them is compiled like any program.
 *
 * A binary for sm_80 runs on every card 8.x, but 8.9 converts FP8 itself; one for sm_100 runs on 10.x. One that the
 * driver refuses, being older than the toolkit of the build, counts as missing.
 */
#ifndef TE_KERNELS_CUDA_READY_H
#define TE_KERNELS_CUDA_READY_H

#include "disk_cache.h"
#include "kernels/hand.h"

/* NVRTC's options but for the target: each instruction of a program rounds once. */
#define TE_CUDA_FIXED_OPTIONS "--fmad=false", "--std=c++17"

/* Ends with an entry whose file is TE_CUDA_FILE_COUNT. */
extern const te_cuda_kernel te_cuda_ready_list[];

typedef struct te_cuda_ready {
    te_hash128 source;
    size_t     offset, size; /* in the bytes of its target */
} te_cuda_ready;

/* The binary of a source for a card of that capability (90 for sm_90); NULL when there is none. */
const void *te_cuda_ready_find(int capability, const char *source, size_t length);

static inline te_hash128 te_cuda_ready_hash(const char *source, size_t length)
{
    return te_hash128_add(TE_HASH128_START, source, length);
}

#endif
