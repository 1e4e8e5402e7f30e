/* attention_rounded.cu - attention forward on E4M3 operands, with probabilities rounded to E4M3 (te_attention), for
 * what cuDNN declines. te_a: the operands' bytes, te_b: the result, or its bytes with v's factor.
 *
 * What is rounded is the probability, so its row's maximum and sum come first: one walk over the keys finds them, a
 * second weighs the values. Tiles are those of attention.cu, of whose functions this is made.
 */

/* 448 times a probability: 1 is the largest number of the format. */
TE_HD static inline te_real te_round_probability(te_real x)
{
    return (te_real)te_f8e4m3_to_f32(te_f32_to_f8e4m3((float)x));
}

/* lse; what exp(score - maximum) is multiplied by takes the place of the sums. */
__device__ static inline void te_close_sums(const te_attention_args &a, const te_sequence &s, int64_t head,
                                            int64_t first, int rows, const te_real *top, te_real *sum)
{
    for (int i = threadIdx.x; i < rows; i += TE_ATTENTION_THREADS) {
        if (a.lse.data) {
            te_real lse = sum[i] == 0 ? TE_LOWEST : top[i] + TE_ATTENTION_LOG(sum[i]);
            te_store_lse(a, s, head, first + i, lse);
        }
        sum[i] = sum[i] == 0 ? (te_real)0 : (te_real)448 / sum[i];
    }
}

extern "C" __global__ void __launch_bounds__(128) te_attention_rounded(const __grid_constant__ te_attention_args a)
{
    TE_DYNAMIC_SHARED(te_real, shared);
    te_forward  f = te_forward_at(a, shared);
    const auto [s, head, kv_head, first, rows] = te_queries_of_block<TE_TILE>(a);
    if (rows <= 0) return;
    te_real scale = (te_real)(a.scale * (double)*a.factor[0] * (double)*a.factor[1]);
    te_real times = (te_real)((a.codes ? 1.0 : (double)*a.factor[2]) / 448 * (a.dropout ? a.kept_scale : 1.0));
    te_load_rows(f.q, f.pitch, a.q, s.batch, head, s.q_start + first, rows, 1);
    te_clear(f.out, TE_TILE * f.units_v * TE_UNIT);
    te_dropout z = te_dropout_of(a);
    te_real    sink = te_sink_of(a, head);
    for (int i = threadIdx.x; i < TE_TILE; i += TE_ATTENTION_THREADS) f.top[i] = sink, f.sum[i] = te_sink_weight(sink);
    int64_t end = te_end_key(s, first + rows - 1);
    for (int walk = 0; walk < 2; walk++) {
        for (int64_t key = te_first_key(s, first) / TE_TILE * TE_TILE; key < end; key += TE_TILE) {
            int n = te_rows_in_tile(key, s.n_kv, TE_TILE);
            te_load_rows(f.kv, f.pitch, a.k, s.batch, kv_head, s.kv_start + key, n, 1);
            if (walk == 1) te_draw_tile(f.kept, a, s, z, head, first, key);
            __syncthreads();
            te_tile_scores(a, f, s, head, first, rows, key, n, scale);
            __syncthreads();
            if (walk == 0) {
                for (int i = threadIdx.x / 32; i < rows; i += TE_ATTENTION_THREADS / 32)
                    te_softmax_row(a, f.p + i * TE_TILE, f.top + i, f.sum + i, f.shrink + i, 0);
                __syncthreads();
                continue;
            }
            te_load_rows(f.kv, f.pitch, a.v, s.batch, kv_head, s.kv_start + key, n, 1);
            for (int e = threadIdx.x; e < rows * TE_TILE; e += TE_ATTENTION_THREADS) {
                int     i = e / TE_TILE;
                te_real most = f.top[i] == TE_LOWEST ? (te_real)0 : f.top[i];
                bool    kept = !a.dropout || te_kept_of(f.kept, i, e % TE_TILE);
                f.p[e] = kept ? te_round_probability(TE_ATTENTION_EXP(f.p[e] - most) * f.sum[i]) : (te_real)0;
            }
            __syncthreads();
            te_weigh_values(f.out, f.p, 0, f.kv, f.pitch, f.units_v, s, first, rows, key, n);
            __syncthreads();
        }
        __syncthreads();
        if (walk == 0) te_close_sums(a, s, head, first, rows, f.top, f.sum);
        __syncthreads();
    }
    for (int i = threadIdx.x / 32; i < rows; i += TE_ATTENTION_THREADS / 32) {
        te_b *row = (te_b *)a.out.data + s.batch * a.out.stride[0] + head * a.out.stride[1] +
                    (s.q_start + first + i) * a.out.stride[2];
        for (int d = threadIdx.x % 32; d < a.v.shape[3]; d += 32)
            row[d] = te_as_b(times * f.out[i * f.units_v * TE_UNIT + d]);
    }
}
