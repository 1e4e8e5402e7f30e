/* attention_unseen.cu - rows of attention whose bias hides every key that they see, for cuDNN, which takes the
 * difference of two infinities there: what is made of them in forward is replaced, and in backward they get an lse from
 * which every weight is 0. A thread has a row; a warp together looks at those that may be such.
 *
 * Rows hidden by finite numbers, as -1e9 or the lowest of a dtype, give in forward what they give. In backward their
 * weights would be powers of two by chance, since an exponential takes scores and lse times log2 e, each rounded to
 * what float32 has room for, or no numbers where that overflows: they are left out, too.
 */

#define TE_UNSEEN  1e30f /* no score is so large */
#define TE_LOWERED (-1e8f) /* an lse below is of a row hidden by finite numbers */

__device__ static inline int64_t te_unseen_at(const te_cuda_view &v, int64_t row)
{
    int64_t heads = v.shape[1], rows = v.shape[2];
    return row / rows / heads * v.stride[0] + row / rows % heads * v.stride[1] + row % rows * v.stride[2];
}

__device__ static inline bool te_unseen_row(const te_unseen_args &a, int64_t row)
{
    const te_c *bias = (const te_c *)a.bias.data + te_unseen_at(a.bias, row);
    int64_t     i = row % a.lse.shape[2];
    int64_t     key = te_clamp(i - a.left, 0, a.keys), end = te_clamp(i + a.right + 1, 0, a.keys);
    bool        sees = false;
    for (key += threadIdx.x % 32; key < end && !sees; key += 32)
        sees = te_from_c(bias[key * a.bias.stride[3]]) != TE_LOWEST;
    return !__any_sync(0xffffffffu, sees);
}

/* An lse of 0 may come of a sum that was guarded, and of scores. */
extern "C" __global__ void __launch_bounds__(128) te_attention_unseen(const __grid_constant__ te_unseen_args a)
{
    int64_t  n = a.lse.shape[0] * a.lse.shape[1] * a.lse.shape[2];
    int64_t  row = (int64_t)blockIdx.x * 128 + threadIdx.x, first = row - threadIdx.x % 32;
    float    lse = row < n ? ((const float *)a.lse.data)[te_unseen_at(a.lse, row)] : 1.0f;
    unsigned odd = __ballot_sync(0xffffffffu, !(lse > -TE_UNSEEN && lse < TE_UNSEEN && lse != 0.0f));
    for (int k = 0; odd; k++, odd >>= 1) {
        if (!(odd & 1) || !te_unseen_row(a, first + k)) continue;
        te_a *out = (te_a *)a.out.data + te_unseen_at(a.out, first + k);
        for (int64_t d = threadIdx.x % 32; d < a.out.shape[3]; d += 32) out[d] = 0;
        if (threadIdx.x % 32 == 0) ((float *)a.lse.data)[te_unseen_at(a.lse, first + k)] = TE_LOWEST;
    }
}

extern "C" __global__ void __launch_bounds__(128) te_attention_raised(const __grid_constant__ te_unseen_args a)
{
    int64_t row = (int64_t)blockIdx.x * 128 + threadIdx.x;
    if (row >= a.lse.shape[0] * a.lse.shape[1] * a.lse.shape[2]) return;
    float lse = ((const float *)a.lse.data)[te_unseen_at(a.lse, row)];
    a.raised[row] = lse < TE_LOWERED ? TE_UNSEEN : lse;
}
