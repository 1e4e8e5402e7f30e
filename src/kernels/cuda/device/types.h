/* types.h - what the shared headers expect of <stdint.h> and of kernels.h, for device code: NVRTC has no headers. */
#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
# include <stdint.h> /* nvcc has read it already; with the blank, embedding keeps the line */
#else
typedef signed char        int8_t;
typedef unsigned char      uint8_t;
typedef short              int16_t;
typedef unsigned short     uint16_t;
typedef int                int32_t;
typedef unsigned int       uint32_t;
typedef long long          int64_t;
typedef unsigned long long uint64_t;
typedef decltype(sizeof(0)) size_t;

#define INT32_MAX 2147483647
#define INT32_MIN (-2147483647 - 1)
#define INT64_MAX 9223372036854775807ll
#define INT64_MIN (-9223372036854775807ll - 1)
#define UINT64_MAX 18446744073709551615ull
#endif

#define TE_RNG_BASE 1
typedef struct te_rng {
    uint64_t        seed, stream, offset;
    const uint64_t *base;
} te_rng;

#ifndef TE_CUDA_SIM
#define TE_DYNAMIC_SHARED(type, name)                          \
    extern __shared__ __align__(1024) char te_dynamic_shared[]; \
    type *name = (type *)te_dynamic_shared
#endif
