/* attention_unseen.cu - rows of attention whose bias hides every key that they see, for cuDNN, which takes the
 * difference of two infinities there: what is made of them in forward is replaced, and in backward they get an lse from
 * which every weight is 0. A thread has a row; a warp together looks at those that may be such.
 *
 * Rows hidden by finite numbers, as -1e9 or the lowest of a dtype: of the largest of these, beside which scores are
 * nothing, times log2 e is infinite, and if that has made no number of lse, the row becomes the mean that it is. In
 * backward their weights would be no numbers, too, or powers of two by chance, since both scores and lse are rounded to
 * what float32 has room for there: they are left out.
 */

#define TE_UNSEEN  1e30f /* no score is anything beside it */
#define TE_LOWERED (-1e8f) /* an lse below is of a row hidden by finite numbers */

__device__ static inline int64_t te_unseen_at(const te_cuda_view &v, int64_t row)
{
    int64_t heads = v.shape[1], rows = v.shape[2];
    return row / rows / heads * v.stride[0] + row / rows % heads * v.stride[1] + row % rows * v.stride[2];
}

/* The keys that a row sees, and their biases. */
struct te_unseen_keys {
    const te_c *bias;
    int64_t     begin, end, step;
};

__device__ static inline te_unseen_keys te_unseen_keys_of(const te_unseen_args &a, int64_t row)
{
    int64_t i = row % a.lse.shape[2];
    return {(const te_c *)a.bias.data + te_unseen_at(a.bias, row), te_clamp(i - a.left, 0, a.keys),
            te_clamp(i + a.right + 1, 0, a.keys), a.bias.stride[3]};
}

/* The largest bias, minus infinity where there is none; 0 where one is no number. */
__device__ static inline float te_unseen_top(const te_unseen_keys &keys)
{
    float top = TE_LOWEST;
    for (int64_t key = keys.begin + threadIdx.x % 32; key < keys.end; key += 32) {
        float bias = te_from_c(keys.bias[key * keys.step]);
        top = bias != bias ? 0.0f : bias > top ? bias : top;
    }
    for (int by = 16; by > 0; by /= 2) {
        float other = __shfl_xor_sync(0xffffffffu, top, by);
        top = other > top ? other : top;
    }
    return top;
}

/* The mean of the values that have this bias. */
__device__ static inline void te_unseen_mean(const te_unseen_args &a, const te_unseen_keys &keys, float top,
                                             int64_t row, te_a *out)
{
    int64_t     group = a.out.shape[1] / a.v.shape[1], head = row / a.lse.shape[2];
    const te_a *v = (const te_a *)a.v.data + head / a.out.shape[1] * a.v.stride[0] +
                    head % a.out.shape[1] / group * a.v.stride[1];
    for (int64_t d = threadIdx.x % 32; d < a.out.shape[3]; d += 32) {
        float sum = 0, n = 0;
        for (int64_t key = keys.begin; key < keys.end; key++)
            if (te_from_c(keys.bias[key * keys.step]) == top) sum += te_from_a(v[key * a.v.stride[2] + d]), n += 1.0f;
        out[d] = te_as_a(sum / n);
    }
}

/* An lse of 0 may come of a sum that was guarded, and of scores. */
extern "C" __global__ void __launch_bounds__(128) te_attention_unseen(const __grid_constant__ te_unseen_args a)
{
    int64_t  n = a.lse.shape[0] * a.lse.shape[1] * a.lse.shape[2];
    int64_t  mine = (int64_t)blockIdx.x * 128 + threadIdx.x, row = mine - threadIdx.x % 32;
    float    lse = mine < n ? ((const float *)a.lse.data)[te_unseen_at(a.lse, mine)] : 1.0f;
    unsigned odd = __ballot_sync(0xffffffffu, !(lse > -TE_UNSEEN && lse < TE_UNSEEN && lse != 0.0f));
    unsigned lost = __ballot_sync(0xffffffffu, !(lse > TE_LOWEST && lse < -TE_LOWEST));
    for (; odd; row++, odd >>= 1, lost >>= 1) {
        if (!(odd & 1)) continue;
        te_unseen_keys keys = te_unseen_keys_of(a, row);
        float          top = te_unseen_top(keys);
        te_a          *out = (te_a *)a.out.data + te_unseen_at(a.out, row);
        if (top == TE_LOWEST)
            for (int64_t d = threadIdx.x % 32; d < a.out.shape[3]; d += 32) out[d] = 0;
        else if (top < -TE_UNSEEN && (lost & 1)) te_unseen_mean(a, keys, top, row, out);
        else continue;
        if (threadIdx.x % 32 == 0) ((float *)a.lse.data)[te_unseen_at(a.lse, row)] = top;
    }
}

extern "C" __global__ void __launch_bounds__(128) te_attention_raised(const __grid_constant__ te_unseen_args a)
{
    int64_t row = (int64_t)blockIdx.x * 128 + threadIdx.x;
    if (row >= a.lse.shape[0] * a.lse.shape[1] * a.lse.shape[2]) return;
    float lse = ((const float *)a.lse.data)[te_unseen_at(a.lse, row)];
    a.raised[row] = lse < TE_LOWERED ? TE_UNSEEN : lse;
}
