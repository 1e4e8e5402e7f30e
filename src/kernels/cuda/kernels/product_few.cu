/* product_few.cu - products of few rows, as in generation: y {m, n} = x {m, k} w {n, k}^T for m <= 8, where reading w
 * is all the work.
 *
 * A block takes 16 lines of w, and its warps take turns along them: of each line four lanes read 64 bytes that follow
 * one another, the warp beside it the next 64. What a lane reads at once goes to the tensor cores as it stands, w on
 * the left and x on the right: the order of a sum's terms is another one than theirs, for both alike. FP8 is widened to
 * float16, which is exact. The warps' sums are added in their order at the end, so results repeat to the bit.
 *
 * te_a and te_b are the elements of w and x, both of 16 bits and the same or both FP8, te_c those of y.
 */

enum {
    TE_FEW_WARPS = TE_VECTOR,
    TE_FEW_UNIT = 16 / sizeof(te_a),  /* elements that a lane reads at once */
    TE_FEW_TURN = 4 * TE_FEW_UNIT,    /* and a warp of a line */
    TE_FEW_AHEAD = 4,                 /* turns whose loads are under way together */
    TE_FEW_ROUND = TE_FEW_AHEAD * TE_FEW_WARPS * TE_FEW_TURN,
    TE_FEW_SUMS = TE_FEW_LINES * TE_FEW_ROWS
};

/* A unit of w, which is read once and leaves x in the first cache, or of x. */
template <bool ONCE> __device__ static inline uint4 te_few_load(const void *at, bool inside)
{
    uint4 x = {0, 0, 0, 0};
#if TE_MMA_DEVICE
    if (!inside) return x;
    if (ONCE)
        asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at));
    else
        asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at));
    return x;
#else
    return inside ? *(const uint4 *)at : x;
#endif
}

#if TE_A_IS_FP8
/* Four elements as two pairs of float16. */
template <bool WIDE_EXPONENT> __device__ static inline void te_few_widen(uint32_t *pairs, uint32_t codes)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t low = (uint16_t)codes, high = (uint16_t)(codes >> 16);
    if (WIDE_EXPONENT) {
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pairs[0]) : "h"(low));
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pairs[1]) : "h"(high));
    } else {
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pairs[0]) : "h"(low));
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pairs[1]) : "h"(high));
    }
#else
    for (int i = 0; i < 4; i++) {
        uint8_t  code = (uint8_t)(codes >> 8 * i);
        uint32_t half = te_as_float16(WIDE_EXPONENT ? te_from_float8_e5m2(code) : te_from_float8_e4m3(code));
        pairs[i / 2] = i % 2 ? pairs[i / 2] | half << 16 : half;
    }
#endif
}

enum { TE_FEW_WORDS = 8 };
template <bool WIDE_EXPONENT> __device__ static inline void te_few_pairs(uint32_t (&to)[8], const uint4 &x)
{
    te_few_widen<WIDE_EXPONENT>(to, x.x), te_few_widen<WIDE_EXPONENT>(to + 2, x.y);
    te_few_widen<WIDE_EXPONENT>(to + 4, x.z), te_few_widen<WIDE_EXPONENT>(to + 6, x.w);
}
#else
enum { TE_FEW_WORDS = 4 };
template <bool> __device__ static inline void te_few_pairs(uint32_t (&to)[4], const uint4 &x)
{
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}
#endif

/* What a lane reads in a round: units of lines g and g + 8 of w, and of row g of x. */
struct te_few_units {
    uint4 line[TE_FEW_AHEAD][2], row[TE_FEW_AHEAD];
};

/* Takes the next round, of which `left` elements of a line are there from the lane's first one on. */
__device__ static inline void te_few_take(te_few_units *units, const te_a *(&w)[2], const te_b *&x, int left,
                                          bool there)
{
    const int TURN = TE_FEW_WARPS * TE_FEW_TURN;
#pragma unroll
    for (int i = 0; i < TE_FEW_AHEAD; i++) {
        bool inside = i * TURN < left;
        units->line[i][0] = te_few_load<true>(w[0] + i * TURN, inside);
        units->line[i][1] = te_few_load<true>(w[1] + i * TURN, inside);
        units->row[i] = te_few_load<false>(x + i * TURN, inside && there);
    }
    w[0] += TE_FEW_ROUND, w[1] += TE_FEW_ROUND, x += TE_FEW_ROUND;
}

__device__ static inline void te_few_add(float (&c)[4], const te_few_units &units)
{
#pragma unroll
    for (int i = 0; i < TE_FEW_AHEAD; i++) {
        uint32_t lines[2][TE_FEW_WORDS], row[TE_FEW_WORDS];
        te_few_pairs<TE_A_IS_E5M2>(lines[0], units.line[i][0]);
        te_few_pairs<TE_A_IS_E5M2>(lines[1], units.line[i][1]);
        te_few_pairs<TE_B_IS_E5M2>(row, units.row[i]);
#pragma unroll
        for (int k = 0; k < TE_FEW_WORDS; k += 2) {
            const uint32_t a[4] = {lines[0][k], lines[1][k], lines[0][k + 1], lines[1][k + 1]};
            te_mma(c, a, row[k], row[k + 1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * TE_FEW_WARPS) te_product_few(const __grid_constant__ te_few_args a)
{
    __shared__ float sums[TE_FEW_WARPS][TE_FEW_SUMS];
    int         warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int64_t     first = (int64_t)blockIdx.x * TE_FEW_LINES, line[2] = {first + g, first + g + 8};
    int         begin = warp * TE_FEW_TURN + t * TE_FEW_UNIT, left = (int)a.k - begin;
    const te_a *w[2];
    const te_b *x = (const te_b *)a.x + g * a.x_line + begin;
    float       c[4] = {0, 0, 0, 0};
    for (int i = 0; i < 2; i++) w[i] = (const te_a *)a.w + (line[i] < a.n ? line[i] : a.n - 1) * a.w_line + begin;
    int     row = threadIdx.x / TE_FEW_LINES;
    int64_t column = first + threadIdx.x % TE_FEW_LINES;
    bool    writes = row < a.m && row < TE_FEW_ROWS && column < a.n;
    float   bias = writes && a.bias ? te_from_c(((const te_c *)a.bias)[column]) : 0.0f, by = (float)a.alpha;
    for (int i = 0; i < 2; i++)
        if (a.factor[i]) by *= *a.factor[i];
    /* A round is taken while the one before it is added: a compiler would make a single one wait for every load. */
    te_few_units units, next;
    te_few_take(&units, w, x, left, g < a.m);
    for (int rounds = ((int)a.k + TE_FEW_ROUND - 1) / TE_FEW_ROUND; rounds > 0; rounds--) {
        te_few_take(&next, w, x, left -= TE_FEW_ROUND, g < a.m);
        te_few_add(c, units);
        units = next;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sums[warp][(2 * t + i % 2) * TE_FEW_LINES + g + i / 2 * 8] = c[i];
    __syncthreads();
    if (!writes) return;
    float sum = 0;
    for (int i = 0; i < TE_FEW_WARPS; i++) sum += sums[i][threadIdx.x];
    float y = by * sum;
    if (a.bias) y += bias;
    ((te_c *)a.y)[row * a.y_line + column] = te_as_c(y);
}
