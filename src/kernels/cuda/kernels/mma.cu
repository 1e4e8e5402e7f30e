/* mma.cu - the product that tensor cores make of 16 x 16 by 16 x 8 elements, in bfloat16 where TE_A_IS_BF16, else in
 * float16, with float32 sums. */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define TE_MMA_DEVICE 1 /* else the same by plain C, for the simulator */
#else
#define TE_MMA_DEVICE 0
#endif

TE_HD static inline float te_mma_half(uint32_t pair, int upper)
{
    uint16_t half = (uint16_t)(upper ? pair >> 16 : pair & 0xffffu);
    return TE_A_IS_BF16 ? te_from_bfloat16(half) : te_from_float16(half);
}

/* c += a b. Lane 4 g + t holds of a[16][16] the pairs (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), of b[16][8]
 * the pairs of rows 2t and 2t + 8 in column g, and of c[16][8] the pairs (g, 2t) and (g + 8, 2t). Volatile, because all
 * lanes must reach it: otherwise the compiler may move it to where its result is used, behind a branch that some do not
 * take. */
__device__ static inline void te_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
#if TE_MMA_DEVICE
#if TE_A_IS_BF16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    int      row = threadIdx.x % 32 & ~3, column = threadIdx.x % 4 * 8;
    uint64_t low = a[0] | (uint64_t)a[1] << 32, high = a[2] | (uint64_t)a[3] << 32, b = b0 | (uint64_t)b1 << 32;
    for (int k = 0; k < 4; k++) {
        uint64_t left[2] = {__shfl_sync(0xffffffffu, low, row + k), __shfl_sync(0xffffffffu, high, row + k)};
        uint64_t right[2] = {__shfl_sync(0xffffffffu, b, column + k), __shfl_sync(0xffffffffu, b, column + 4 + k)};
        for (int e = 0; e < 4; e++)
            for (int part = 0; part < 2; part++) {
                uint32_t x = (uint32_t)(left[part] >> e / 2 * 32), y = (uint32_t)(right[e % 2] >> part * 32);
                c[e] += te_mma_half(x, 0) * te_mma_half(y, 0) + te_mma_half(x, 1) * te_mma_half(y, 1);
            }
    }
#endif
}
